"""What attention costs: what launches are counted as, how measured times become costs, which files are no profile."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from csbp.attention.tiles import row_visits
from csbp.bench.profile import launches, suited
from csbp.cli import main
from csbp.config.bench import BenchProfileConfig
from csbp.config.places import conf_dir
from csbp.errors import ConfigError
from csbp.plan.cost import CostModel, PassCost, Work, key_tiles, launch_work
from csbp.plan.profiles import PARTS, errors, fit, load_profile, parse_profile, predicted
from csbp.plan.ranges import RowRanges
from csbp.plan.tasks import TILE

TRUE = CostModel("made up", 64, 4, PassCost(9_000_000, 4_000_000, 30), PassCost(20_000_000, 90_000_000, 0), 50_000_000)
SMALL = ("rows=2048", "heads=2", "kv_heads=1", "head_dim=8", "repeats=3", "warmup=1", "seconds=0.01", "device=cpu")


def shapes(rows: int) -> list[Any]:
    return list(launches(suited(BenchProfileConfig(rows=rows), cuda=False)))


def answer(capsys: pytest.CaptureFixture[str], *words: str) -> tuple[object, str, str]:
    with pytest.raises(SystemExit) as left:
        main(["bench", "profile", *words])
    said = capsys.readouterr()
    return left.value.code, said.out, said.err


@pytest.mark.parametrize("rows", [4096, 16384])
def test_tiles_are_those_that_a_kernel_visits(rows: int) -> None:
    for shape in shapes(rows):
        bounds = (shape.ranges.prefix_start, shape.ranges.prefix_end, shape.ranges.block_start, shape.ranges.block_end)
        seen = row_visits(bounds, shape.keys, (TILE, TILE))
        visits = int(seen.partial.count.sum() + seen.full.count.sum())
        work = launch_work(shape.ranges)
        # A tile in which a row's two ranges meet is visited once.
        assert visits <= work.tiles <= min(1.02 * visits, visits + work.segments), shape.name
        assert work.pairs == shape.ranges.pairs.sum() <= TILE * TILE * work.tiles


def test_work_of_a_launch_by_hand() -> None:
    # 130 rows: the first 128 see 300 keys together and 2 noised ones, the last two 5 keys and none.
    low = np.array([0] * 128 + [300, 300])
    high = np.array([10] * 127 + [300, 302, 305])
    block = np.array([400] * 128 + [0, 0])
    work = launch_work(RowRanges(low, high, block, block + np.array([2] * 128 + [0, 0])))
    assert (work.tiles, work.segments, work.pairs) == (3 + 1 + 1, 3, 1270 + 300 + 7 + 256)
    none = np.zeros(0, np.int64)
    assert launch_work(RowRanges(none, none, none, none)) == Work(0, 0, 0)  # type: ignore[arg-type]
    assert key_tiles(np.array([0, 127, 1, 5, 9]), np.array([128, 129, 128, 5, 3])).tolist() == [1, 2, 1, 0, 0]


def test_times_of_a_layer() -> None:
    work = Work(np.array([10, 0]), np.array([3, 0]), np.array([1000, 0]))
    head = (10 * 9 + 3 * 4) * 10**6 + 30_000 + (10 * 20 + 3 * 90) * 10**6
    assert TRUE.passes().of(work.tiles, work.segments, work.pairs).tolist() == [head, 0]
    again = TRUE.passes(2).of(work.tiles, work.segments, work.pairs) - TRUE.passes().of(
        work.tiles, work.segments, work.pairs)
    assert again.dtype == np.int64 and again[0] == (10 * 9 + 3 * 4) * 10**6 + 30_000
    wide = TRUE.for_heads(128)
    assert (wide.forward, wide.launch, wide.head_dim) == (PassCost(18_000_000, 8_000_000, 60), TRUE.launch, 128)
    assert TRUE.for_heads(64) == TRUE


def timed(rows: list[dict[str, Any]], noise: float = 0.0, *, together: bool = False) -> list[dict[str, Any]]:
    random = np.random.default_rng(0)
    found = []
    for row in rows:
        times = {key: value * (1 + noise * random.uniform(-1, 1)) for key, value in predicted(TRUE, row, 8).items()}
        found.append({**row, "ms": times["ms"]} if together else
                     {**row, "forward_ms": times["forward_ms"], "backward_ms": times["backward_ms"]})
    return found


def rows_of(shapes: list[Any]) -> list[dict[str, Any]]:
    works = [launch_work(shape.ranges) for shape in shapes]
    return [{"tiles": int(w.tiles), "segments": int(w.segments), "pairs": int(w.pairs)} for w in works]


def test_a_fit_finds_the_costs() -> None:
    rows = rows_of(shapes(8192))
    asked = {"name": "made up", "heads": 8, "kv_heads": 2, "head_dim": 64}
    found = fit(timed(rows), **asked)
    for one, other in ((found.forward, TRUE.forward), (found.backward, TRUE.backward)):
        assert (one.tile, one.segment, one.pair) == pytest.approx((other.tile, other.segment, other.pair), rel=1e-3,
                                                                  abs=20)
    assert found.launch == pytest.approx(TRUE.launch, rel=1e-3)
    noisy = timed(rows, 0.03)
    model = fit(noisy, **asked)
    off = errors(model, noisy, 8)
    assert set(off) == {"forward_ms", "backward_ms"} and 0 < off["forward_ms"]["median"] <= off["forward_ms"]["worst"]
    assert off["forward_ms"]["worst"] < 0.05 and off["backward_ms"]["worst"] < 0.05
    assert min(model.launch, *vars(model.forward).values(), *vars(model.backward).values()) >= 0
    # Times of both passes together, and of some launches apart.
    mixed = timed(rows, together=True)[:6] + timed(rows)[6:]
    assert errors(fit(mixed, **asked), mixed, 8)["ms"]["worst"] < 1e-6


@pytest.mark.parametrize("name", ["h200", "cpu"])
def test_shipped_profiles_say_what_they_rest_on(name: str) -> None:
    profile = json.loads((conf_dir() / "profile" / f"{name}.json").read_text())
    model = load_profile(name)
    assert (model.name, model.head_dim) == (name, profile["head_dim"])
    fitted = fit(profile["rows"], name=name, heads=profile["heads"], kv_heads=profile["kv_heads"],
                 head_dim=profile["head_dim"], launch=profile["fit"]["launch"] > 0)
    rows = profile["rows"]
    for row in rows:
        for key, value in predicted(model, row, profile["heads"]).items():
            assert row.get(f"predicted_{key}", value) == pytest.approx(value, rel=1e-4)
        for key, value in predicted(fitted, row, profile["heads"]).items():
            assert value == pytest.approx(predicted(model, row, profile["heads"])[key], rel=2e-2)
    found = errors(model, rows, profile["heads"])
    assert set(found) == set(profile["error"])
    for key, off in found.items():
        assert profile["error"][key] == pytest.approx(off, rel=1e-2, abs=1e-4)
        assert off["worst"] < (0.1 if name == "h200" else 0.3)


def test_what_is_no_profile_is_refused(tmp_path: Path) -> None:
    good = json.loads((conf_dir() / "profile" / "h200.json").read_text())
    for changes, said in (({"format": 9}, "a profile of format 9; this csbp reads format 1"),
                          ({"heads": 0}, "heads is 0, not a whole number from 1"),
                          ({"fit": {}}, "fit.forward.tile is None"), ({"fit": [1]}, "fit.forward.tile is None"),
                          ({"fit": {**good["fit"], "launch": -1}}, "fit.launch is -1"),
                          ({"fit": {**good["fit"], "launch": 1.5}}, "fit.launch is 1.5"),
                          ({"fit": {**good["fit"], "backward": {part: 0 for part in PARTS}}}, "costs nothing")):
        with pytest.raises(ValueError, match=said.split(";")[0]):
            parse_profile({**good, **changes})
    file = tmp_path / "mine.json"
    for text, said in (("[]", "is no profile"), ("{", "it is not JSON"), ('{"fit": 1, "format": 9}', "format 9")):
        file.write_text(text)
        with pytest.raises(ConfigError, match=f"plan.profile='{file}'.*{said}.*csbp bench profile out=FILE.json"):
            load_profile(str(file), "plan.profile")
    with pytest.raises(ConfigError, match="did you mean h200"):
        load_profile("h20")
    with pytest.raises(ConfigError, match="No such file"):
        load_profile(str(tmp_path / "none.json"))
    file.write_text(json.dumps(good))
    assert load_profile(str(file)) == load_profile("h200")


def test_a_profile_is_measured_and_read_again(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "here.json"
    code, out, err = answer(capsys, *SMALL, f"out={file}", "name=here")
    assert code == 0 and f"written to {file}" in out and "off by" in out, err
    profile, model = json.loads(file.read_text()), load_profile(str(file))
    assert (model.name, model.queries_per_key, model.head_dim) == ("here", 2, 8)
    assert profile["versions"]["torch"] and profile["backend"] == "reference" and profile["device"]
    assert len({row["name"] for row in profile["rows"]}) == len(profile["rows"]) == len(shapes(2048))
    assert all(row["forward_ms"] > 0 and row["backward_ms"] > 0 for row in profile["rows"])
    assert profile["error"].keys() == {"forward_ms", "backward_ms"}


def test_what_is_no_profile_is_not_replaced(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "rows.json"
    file.write_text('[{"name": "a"}]')
    code, out, err = answer(capsys, *SMALL, f"out={file}")
    assert code == 2 and "holds no profile, which would be lost" in err and not out and "measuring" not in err
    assert file.read_text() == '[{"name": "a"}]'


def test_a_profile_that_cannot_be_written_is_shown(capsys: pytest.CaptureFixture[str], tmp_path: Path,
                                                   monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "mine.json"
    file.write_text((conf_dir() / "profile" / "h200.json").read_text())
    before = file.read_text()
    monkeypatch.setattr("os.replace", full_disk)
    code, out, err = answer(capsys, *SMALL, f"out={file}", "name=[/red]")
    assert code == 1 and "off by" in out and "[/red]" in out and "cannot be written: No space left" in err
    assert file.read_text() == before and [path.name for path in tmp_path.iterdir()] == ["mine.json"]


def full_disk(*_: Any) -> None:
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.mark.parametrize(("words", "said"), [
    (["kv_heads=3", "heads=4"], "kv_heads=3: must divide heads=4"), (["heads=3"], "must divide heads=3"),
    (["out=a.txt"], "out='a.txt': must be a file"),
    (["out=/no/a.json"], "out='/no/a.json'"), (["rows=7"], "rows=7: must be an integer from 2,048"),
    (["backend=fast"], "backend='fast'"), (["backend=flash", "device=cpu"], "backend='flash': cannot run here"),
    (["device=cuda"], "device='cuda': torch finds no CUDA device here; use device=cpu"),
    (["out=/proc/a.json"], "out='/proc/a.json': cannot be written"),
    (["heds=3"], "did you mean heads?"), (["--out", "a.txt"], "out='a.txt'")])
def test_refusals(capsys: pytest.CaptureFixture[str], words: list[str], said: str) -> None:
    code, out, err = answer(capsys, *words)
    assert code == 2 and said in err and not out and "measuring" not in err, err


def test_more_ranks_than_one_are_refused(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost",
                        "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    code, _, err = answer(capsys, *SMALL)
    assert code == 2 and "ranks=2: a profile is of one device" in err
