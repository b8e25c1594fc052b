"""Save and resume in one process without a process group (tests/dist has the sharded cases)."""

from __future__ import annotations

import errno
import json
import logging
import os
import resource
from pathlib import Path

import pytest
import torch
from torch import nn

from csbp.checkpoint import files, folder, shards, store
from csbp.checkpoint.store import CheckpointStore
from csbp.errors import UserError


class Tied(nn.Module):
    """A tied weight, a bias, a persistent and a non-persistent buffer, a frozen weight."""

    def __init__(self, width: int = 6) -> None:
        super().__init__()
        self.embed = nn.Embedding(11, width)
        self.inner = nn.Linear(width, width)
        self.head = nn.Linear(width, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("offset", torch.zeros(width))
        self.register_buffer("cache", torch.zeros(3), persistent=False)
        self.frozen = nn.Parameter(torch.ones(width), requires_grad=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.head(self.inner(self.embed(tokens) + self.offset) * self.frozen)


def start(seed: int = 0, width: int = 6) -> tuple[Tied, torch.optim.AdamW]:
    torch.manual_seed(seed)
    model = Tied(width)
    trained = [p for p in model.parameters() if p.requires_grad]
    groups = [{"params": [p for p in trained if p.dim() == dims], "weight_decay": 0.1 * (dims - 1)} for dims in (2, 1)]
    return model, torch.optim.AdamW(groups, lr=1e-2)


def train(model: Tied, optimizer: torch.optim.Optimizer, first: int, last: int) -> list[float]:
    losses = []
    for step in range(first, last):
        tokens = torch.randint(11, (4, 5), generator=torch.Generator().manual_seed(step))
        loss = nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        model.offset += 0.01
        losses.append(loss.item())
    return losses


def contents(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[torch.Tensor]:
    state = optimizer.state_dict()["state"]
    return [*(v.clone() for v in model.state_dict().values()),
            *(state[i][key].clone() for i in sorted(state) for key in sorted(state[i]))]


def same(left: list[torch.Tensor], right: list[torch.Tensor]) -> bool:
    return len(left) == len(right) and all(a.dtype == b.dtype and torch.equal(a, b)
                                           for a, b in zip(left, right, strict=True))


def test_three_steps_saved_and_seven_resumed_are_ten_steps(tmp_path):
    model, optimizer = start()
    whole = train(model, optimizer, 0, 10)
    end = contents(model, optimizer)

    model, optimizer = start()
    train(model, optimizer, 0, 3)
    (tmp_path / "config.yaml").write_text("seed: 0\n")
    extra = {"cursor": {"epoch": 0, "taken": 7}, "loss": 0.1 + 0.2}
    path = CheckpointStore(tmp_path, 2).save(3, model, optimizer, extra)
    names = sorted(p.name for p in path.iterdir())
    assert names == ["config.yaml", "manifest.json", "shard-00001-model-00001-of-00002.safetensors",
                     "shard-00001-model-00002-of-00002.safetensors", "state.json"]
    assert path == tmp_path / "checkpoints" / "step-00000003"

    other, fresh = start(seed=1)
    resumed = CheckpointStore(tmp_path, 2)
    state = resumed.load(resumed.newest_valid(), other, fresh)
    assert state == {"step": 3, **extra}
    assert same(contents(other, fresh), contents(model, optimizer)) and other.head.weight is other.embed.weight
    assert train(other, fresh, 3, 10) == whole[3:]
    assert same(contents(other, fresh), end)


def test_hyperparameters_come_from_the_run_not_from_the_checkpoint(tmp_path):
    model, optimizer = start()
    train(model, optimizer, 0, 1)
    path = CheckpointStore(tmp_path).save(1, model, optimizer, {})
    other, fresh = start()
    fresh.param_groups[0].update(lr=0.5, weight_decay=0.25)
    CheckpointStore(tmp_path).load(path, other, fresh)
    assert [(group["lr"], group["weight_decay"]) for group in fresh.param_groups] == [(0.5, 0.25), (1e-2, 0.0)]


def test_large_tensors_are_spread_over_files(tmp_path, monkeypatch):
    monkeypatch.setattr(shards, "FILE_BYTES", 100)
    model, optimizer = start()
    train(model, optimizer, 0, 2)
    path = CheckpointStore(tmp_path).save(2, model, optimizer, {})
    assert len(list(path.glob("*.safetensors"))) > 8
    other, fresh = start(seed=1)
    CheckpointStore(tmp_path).load(path, other, fresh)
    assert same(contents(other, fresh), contents(model, optimizer))


def test_model_alone_in_another_dtype_reads_no_optimizer_file(tmp_path, monkeypatch):
    model, optimizer = start()
    train(model, optimizer, 0, 2)
    path = CheckpointStore(tmp_path).save(2, model, optimizer, {"loss": 1.5})
    other = Tied().to(torch.bfloat16)
    assert shards.load_model(path, other) == {"step": 2, "loss": 1.5}
    assert torch.equal(other.inner.weight, model.inner.weight.bfloat16())


def test_names_of_compiled_modules_are_the_plain_ones(tmp_path):
    model, optimizer = start()
    train(model, optimizer, 0, 1)
    path = CheckpointStore(tmp_path).save(1, model, optimizer, {})
    other, fresh = start(seed=1)
    other.inner = torch.compile(other.inner, backend="eager")
    assert any("_orig_mod" in name for name, _ in other.named_parameters())
    CheckpointStore(tmp_path).load(path, other, fresh)
    assert torch.equal(other.inner.weight, model.inner.weight)


def test_another_model_is_refused_by_name(tmp_path):
    model, optimizer = start()
    train(model, optimizer, 0, 1)
    path = CheckpointStore(tmp_path).save(1, model, optimizer, {})
    with pytest.raises(UserError, match=r"'frozen' is \[6\] there and \[8\] here"):
        shards.load_model(path, start(width=8)[0])
    more = start()[0]
    more.extra = nn.Linear(2, 2)
    with pytest.raises(UserError, match="the checkpoint lacks 'extra.bias'"):
        shards.load_model(path, more)
    less = start()[0]
    del less.frozen
    with pytest.raises(UserError, match="the model lacks 'frozen'"):
        shards.load_model(path, less)
    part, _ = start()
    with pytest.raises(UserError, match="does not train that weight"):
        CheckpointStore(tmp_path).load(path, part, torch.optim.AdamW(part.inner.parameters()))


def test_newest_undamaged_one_wins_and_damage_is_told_once(tmp_path, caplog):
    model, optimizer = start()
    saved = CheckpointStore(tmp_path, 3)
    paths = [saved.save(step, model, optimizer, {}, best=step == 1) for step in (1, 2, 3)]
    shard = next(paths[2].glob("*.safetensors"))
    damaged = bytearray(shard.read_bytes())
    damaged[-1] ^= 4
    shard.write_bytes(damaged)
    (paths[1] / "state.json").unlink()

    reader = CheckpointStore(tmp_path, 3)
    with caplog.at_level(logging.WARNING):
        assert [reader.newest_valid() for _ in range(3)] == [paths[0]] * 3
    told = [record.getMessage() for record in caplog.records if record.name == store.__name__]
    assert told == [
        f"checkpoint {paths[2]} is damaged and passed over: {shard.name}: sha256 differs from what was written",
        f"checkpoint {paths[1]} is damaged and passed over: state.json: No such file or directory"]
    with pytest.raises(UserError, match=rf"{shard.name}: sha256 differs"):
        reader.load(paths[2], *start())
    with pytest.raises(UserError, match="damaged"):
        shards.load_model(paths[1], start()[0])


def test_no_checkpoint_is_none(tmp_path):
    assert CheckpointStore(tmp_path).newest_valid() is None


class Killed(BaseException):
    pass


POINTS = [(folder, "begin"), (store, "write_tensors"), (shards.dcp, "save"), (store, "describe_shards"),
          (store, "write_json"), (store.shutil, "copyfile"), (store, "write_text"), (folder, "publish"),
          (folder, "prune"), (folder, "delete")]


@pytest.mark.parametrize("owner, name", POINTS, ids=[name for _, name in POINTS])
@pytest.mark.parametrize("after", [pytest.param(False, id="before"),
                                   pytest.param(True, id="after", marks=pytest.mark.slow)])
def test_killed_while_saving(tmp_path, monkeypatch, owner, name, after):
    (tmp_path / "config.yaml").write_text("seed: 0\n")
    model, optimizer = start()
    train(model, optimizer, 0, 1)
    CheckpointStore(tmp_path, 1).save(1, model, optimizer, {})
    first = contents(model, optimizer)
    train(model, optimizer, 1, 2)
    second = contents(model, optimizer)

    real = getattr(owner, name)

    def fatal(*args, **kwargs):
        if after:
            real(*args, **kwargs)
        raise Killed

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fatal)
        with pytest.raises(Killed):
            CheckpointStore(tmp_path, 1).save(2, model, optimizer, {})
    other, fresh = start(seed=1)
    resumed = CheckpointStore(tmp_path, 1)
    step = resumed.load(resumed.newest_valid(), other, fresh)["step"]
    published = name in ("prune", "delete") or (name == "publish" and after)
    assert step == (2 if published else 1)
    assert same(contents(other, fresh), second if step == 2 else first)
    train(other, fresh, step, 3)
    path = resumed.save(3, other, fresh, {})
    assert [p for p in (tmp_path / "checkpoints").iterdir()] == [path]


def test_killed_in_the_middle_of_a_shard(tmp_path, monkeypatch):
    model, optimizer = start()
    train(model, optimizer, 0, 1)
    path = CheckpointStore(tmp_path, 1).save(1, model, optimizer, {})

    def half(writer, *args, **kwargs):
        (Path(writer.path) / "shard-00001-model-00001-of-00002.safetensors").write_bytes(b"half")
        raise Killed

    monkeypatch.setattr(shards.HuggingFaceStorageWriter, "write_data", half)
    with pytest.raises((Killed, RuntimeError)):
        CheckpointStore(tmp_path, 1).save(2, model, optimizer, {})
    assert CheckpointStore(tmp_path, 1).newest_valid() == path


def test_file_too_large_for_the_disk_changes_nothing(tmp_path):
    """A real refusal by the kernel: no file of this process may pass 3000 bytes."""
    model, optimizer = start(width=64)
    train(model, optimizer, 0, 1)
    saved = CheckpointStore(tmp_path, 1)
    path = saved.save(1, model, optimizer, {})
    before = contents(model, optimizer)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (3000, hard))
    try:
        with pytest.raises(UserError, match=r"save the checkpoint of step 2 .*older ones are unchanged.*too large"):
            saved.save(2, model, optimizer, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert same(contents(model, optimizer), before)
    assert [p for p in (tmp_path / "checkpoints").iterdir()] == [path]
    assert CheckpointStore(tmp_path).newest_valid() == path
    assert saved.save(2, model, optimizer, {}).name == "step-00000002"


@pytest.mark.parametrize("code, owner, name", [
    (errno.EROFS, Path, "mkdir"), (errno.ENOSPC, files, "sync"), (errno.EACCES, os, "rename")])
def test_refusing_disk_is_a_user_error_and_changes_nothing(tmp_path, monkeypatch, code, owner, name):
    model, optimizer = start()
    train(model, optimizer, 0, 1)
    path = CheckpointStore(tmp_path, 1).save(1, model, optimizer, {})

    def refuse(*args, **kwargs):
        raise OSError(code, os.strerror(code))

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, refuse)
        with pytest.raises(UserError, match=os.strerror(code)):
            CheckpointStore(tmp_path, 1).save(2, model, optimizer, {})
    assert [p for p in (tmp_path / "checkpoints").iterdir()] == [path]


def test_a_failed_deletion_does_not_fail_the_save(tmp_path, monkeypatch, caplog):
    model, optimizer = start()
    CheckpointStore(tmp_path, 1).save(1, model, optimizer, {})

    def refuse(path):
        raise OSError(errno.EACCES, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(folder, "delete", refuse)
        path = CheckpointStore(tmp_path, 1).save(2, model, optimizer, {})
    assert "could not be deleted" in caplog.text and CheckpointStore(tmp_path, 1).newest_valid() == path


def test_state_that_json_cannot_hold_fails_before_writing(tmp_path):
    with pytest.raises(TypeError):
        CheckpointStore(tmp_path).save(1, *start(), {"cursor": object()})
    assert not (tmp_path / "checkpoints").exists()


def test_nothing_on_disk_is_pickled(tmp_path):
    model, optimizer = start()
    train(model, optimizer, 0, 1)
    path = CheckpointStore(tmp_path).save(1, model, optimizer, {})
    for file in path.iterdir():
        raw = file.read_bytes()
        header = raw[8:8 + int.from_bytes(raw[:8], "little")] if file.suffix == ".safetensors" else raw
        json.loads(header)


def test_hidden_files_of_the_system_are_not_read(tmp_path):
    model, optimizer = start()
    train(model, optimizer, 0, 1)
    path = CheckpointStore(tmp_path).save(1, model, optimizer, {})
    (path / "._shard-00001-model-00001-of-00002.safetensors").write_bytes(b"not ours")
    other, fresh = start(seed=1)
    assert CheckpointStore(tmp_path).load(path, other, fresh) == {"step": 1}
    assert same(contents(other, fresh), contents(model, optimizer))


def test_what_was_passed_over_is_set_aside_when_asked_and_still_known(tmp_path, caplog):
    model, optimizer = start()
    saved = CheckpointStore(tmp_path, 3)
    paths = [saved.save(step, model, optimizer, {}) for step in (1, 2)]
    shard = next(paths[1].glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    reader = CheckpointStore(tmp_path, 3)
    assert reader.newest_valid() == paths[0] and paths[1].exists()
    reader.set_aside_damaged()
    reader.set_aside_damaged()
    assert sorted(p.name for p in reader.root.iterdir()) == ["step-00000001", "step-00000002.damaged"]
    assert caplog.text.count("step-00000002.damaged") == 1
    folder.delete(paths[0])
    assert reader.any() and CheckpointStore(tmp_path).newest_valid() is None


def test_a_doubtful_one_takes_no_other_away(tmp_path):
    model, optimizer = start()
    saved = CheckpointStore(tmp_path, 1)
    paths = [saved.save(step, model, optimizer, {}, prune=step != 2) for step in (1, 2)]
    assert all(path.exists() for path in paths)
    newest = saved.save(3, model, optimizer, {})
    assert [p for p in saved.root.iterdir()] == [newest]
