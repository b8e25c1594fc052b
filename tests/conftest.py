"""Fixtures that every test may use. Nothing here imports torch before a test asks for it."""

from __future__ import annotations

import copy
import gc
import os
from collections.abc import Callable, Iterator
from typing import Any

import hypothesis
import pytest

# A slow machine is no failure.
hypothesis.settings.register_profile("untimed", deadline=None)
hypothesis.settings.load_profile("untimed")
# Before the first import of torch: up to four ranks share two cores, and one thread makes sums repeatable.
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Importing makes millions of objects that stay: seconds of looking through them for garbage, again and again.
gc.disable()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_auto_num_workers(config: pytest.Config) -> int:
    """Workers of ``-n auto``: two for all the default tests; none for chosen ones, and for the slow ones, whose ranks
    want a small machine to themselves."""
    all_of_them = config.args_source is not pytest.Config.ArgsSource.ARGS
    return 2 if all_of_them and config.getoption("markexpr") == "not slow and not gpu" else 0


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Files one by one, but one worker takes all tests of many processes: the pool of ranks starts only there, and no
    two such tests are in each other's way."""
    from xdist.scheduler import LoadFileScheduling

    class Scheduling(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            return "ranks" if nodeid.startswith(("tests/dist/", "tests/e2e/")) else super()._split_scope(nodeid)

    return Scheduling(config, log)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture(scope="session", autouse=True)
def _files_are_merged_once() -> Iterator[None]:
    """Hydra takes a tenth of a second or more to merge shipped files; the next to choose the same ones get a copy.

    A user's own file, and whatever is refused, goes through Hydra every time.
    """
    from csbp.config import compose as module
    from csbp.config.files import OWN_FILE

    merge, kept = module.compose, dict[tuple[str, ...], Any]()

    def merge_once(name: str, overrides: list[str]) -> Any:
        if f"experiment={OWN_FILE}" in overrides:
            return merge(name, overrides=overrides)
        choices = (name, *overrides)
        if choices not in kept:
            kept[choices] = merge(name, overrides=overrides)
        return copy.deepcopy(kept[choices])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "compose", merge_once)
        yield


@pytest.fixture(scope="session", autouse=True)
def _own_compilations(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Graphs compiled by another version of csbp, kept in the machine's cache, must not be taken for this one's."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path_factory.getbasetemp() / "inductor"))
        yield


@pytest.fixture(scope="session")
def ranks() -> Iterator[Callable[..., list[Any]]]:
    """``ranks(n, function, *args, timeout=60)``: run a module-level function on n gloo ranks (see pool.py).

    Returns the results by rank. The workers start with the first call and live to the end of the session.
    """
    from pool import RankPool

    with RankPool() as pool:
        yield pool.run


@pytest.fixture
def exact_norms() -> Iterator[None]:
    """RMSNorm of the stock model in the dtype of its input, in this process (workers enter it themselves)."""
    import oracle

    with oracle.exact_norms():
        yield
