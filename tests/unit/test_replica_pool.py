"""Packs of several replicas planned as one: who trains which document, and on whose ranks; settings that cannot be."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest

from csbp.config.cad import check_cad, pooled
from csbp.config.compose import compose_run
from csbp.config.places import conf_dir
from csbp.config.schema import CadConfig, ParallelConfig, RunConfig
from csbp.errors import ConfigError
from csbp.plan.forecast import whole_pack
from csbp.plan.geometry import Geometry, LayerKind
from csbp.plan.ownership import assign_owners, make_units
from csbp.plan.plan import PackPlan
from csbp.plan.pool import pack_of, pool_owners, share_documents
from csbp.train.ready import check_model

KINDS = (LayerKind(),)


def loads(geometry: Geometry, replica: np.ndarray, replicas: int) -> np.ndarray:
    units, found = make_units(geometry, KINDS), np.zeros(replicas, np.int64)
    np.add.at(found, replica[units.document], units.cost)
    return found


@pytest.mark.parametrize("seed", range(20))
def test_documents_are_shared_no_worse_than_they_came(seed: int) -> None:
    rng = np.random.default_rng(seed)
    replicas, count = int(rng.integers(1, 6)), rng.integers(0, 8, 6)
    packs = pack_of(count[:replicas].tolist())
    lengths = rng.integers(1, 4000, len(packs))
    geometry = whole_pack(lengths, 32, noised=True)
    replica = share_documents(geometry, KINDS, None, packs, replicas)
    assert replica.shape == packs.shape and ((0 <= replica) & (replica < replicas)).all()
    assert loads(geometry, replica, replicas).max(initial=0) <= loads(geometry, packs, replicas).max(initial=0)
    most = max((lengths[packs == n].sum() for n in range(replicas)), default=0)
    assert all(lengths[replica == n].sum() <= most for n in range(replicas))


def test_a_lumpy_step_is_levelled() -> None:
    geometry = whole_pack([20000] * 2 + [1000] * 40, 32, noised=True)
    packs = pack_of([2, 40])
    found = loads(geometry, share_documents(geometry, KINDS, None, packs, 2), 2)
    assert found.max() < 1.05 * found.mean() < 1.5 * found.mean() < loads(geometry, packs, 2).max()


@pytest.mark.parametrize("seed", range(20))
def test_a_replica_keeps_its_documents_and_owns_them_as_alone(seed: int) -> None:
    rng = np.random.default_rng(seed)
    replicas, ranks = int(rng.integers(1, 4)), int(rng.integers(1, 4))
    lengths = rng.integers(1, 300, int(rng.integers(1, 7)))
    geometry, replica = whole_pack(lengths, 16, noised=True), rng.integers(0, replicas, len(lengths))
    owners = pool_owners(geometry, KINDS, None, replica, replicas, ranks)
    cells = np.searchsorted(geometry.document_starts, geometry.cell_starts[:-1], "right") - 1
    assert (owners.cell_rank // ranks == replica[cells]).all()
    assert (owners.block_rank // ranks == replica[geometry.block_document]).all()
    assert (owners.block_rank == owners.cell_rank[geometry.block_cell]).all()
    for number in range(replicas):
        alone = assign_owners(whole_pack(lengths[replica == number], 16, noised=True), KINDS, ranks)
        assert (owners.cell_rank[replica[cells] == number] - number * ranks == alone.cell_rank).all()
    matrix = PackPlan(geometry, KINDS, replicas * ranks, owners=owners).traffic["full"]
    same = np.arange(replicas * ranks) // ranks
    assert not matrix[same[:, None] != same[None]].any()  # without moves nothing leaves a replica


def test_blocks_without_text_follow_their_document() -> None:
    plain = whole_pack([40, 24, 60], 8, noised=True)
    order = np.array([3, 9, 1, 12, 6])  # anchors anywhere, over no cell
    geometry = dataclasses.replace(plain, block_document=plain.block_document[order], block_cell=np.full(5, -1),
                                   block_prefix_end=plain.block_prefix_end[order], block_starts=np.arange(6) * 8)
    owners = pool_owners(geometry, KINDS, None, np.array([1, 0, 1]), 2, 2)
    assert (owners.block_rank // 2 == np.array([1, 0, 1])[geometry.block_document]).all()


@pytest.mark.parametrize(("parallel", "cad", "field"), [
    ({"nproc": 2, "kind": "context"}, {}, "cad.enabled"), ({"nproc": 2, "kind": "block"}, {}, "cad.enabled"),
    ({"nproc": 2, "kind": "data"}, {}, "cad.pool"), ({"nproc": 4, "csbp": 1}, {}, "cad.pool"),
    ({"nproc": 4, "csbp": 2, "exchange": "all_gather"}, {"pool": "dp"}, "parallel.exchange"),
    ({"nproc": 2}, {"profile": "h2000"}, "cad.profile"), ({"nproc": 2}, {"profile": "gone.json"}, "cad.profile")])
def test_what_cannot_be_is_refused(parallel: dict, cad: dict, field: str) -> None:
    config = RunConfig(parallel=ParallelConfig(**parallel), cad=CadConfig(enabled=True, **cad))
    with pytest.raises(ConfigError) as error:
        check_cad(config)
    assert error.value.field == field
    check_cad(dataclasses.replace(config, cad=dataclasses.replace(config.cad, enabled=False)))


@pytest.mark.parametrize("text", ["{}", "[1", '{"format": 1, "fit": {}}'])
def test_a_profile_is_read_before_anything_starts(tmp_path: Path, text: str) -> None:
    (tmp_path / "mine.json").write_text(text)
    config = compose_run(["experiment=quickstart", "cad.enabled=true", f"cad.profile={tmp_path / 'mine.json'}"])
    with pytest.raises(ConfigError, match=r"cad\.profile=.*make one by: csbp bench profile"):
        check_model(config)


def test_what_can_be(tmp_path: Path) -> None:
    (tmp_path / "mine.json").write_text((conf_dir() / "profile" / "cpu.json").read_text())
    for parallel, cad, wide in (({"nproc": 1}, {}, False), ({"nproc": 2, "kind": "data"}, {"pool": "dp"}, True),
                                ({"nproc": 4, "csbp": 2}, {"pool": "dp", "profile": "h200"}, True),
                                ({"nproc": 2}, {"pool": "dp", "profile": str(tmp_path / "mine.json")}, False)):
        config = RunConfig(parallel=ParallelConfig(**parallel), cad=CadConfig(enabled=True, **cad))
        check_cad(config)
        assert pooled(config) == wide
