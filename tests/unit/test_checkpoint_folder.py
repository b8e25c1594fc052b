"""Manifests, publishing and pruning, without tensors: every damage is found, every crash leaves a good one."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import pytest

from csbp.checkpoint import folder
from csbp.checkpoint.files import MANIFEST, Manifest, describe_files, find_damage, write_json, write_text


class Killed(BaseException):
    """Not an Exception: no handler runs, as in a process that is killed."""


def write(root: Path, step: int, *, best: bool = False, text: str = "") -> Path:
    temporary = folder.begin(root, step)
    for name, size in (("shard-00001.safetensors", 400), ("shard-00002.safetensors", 1), ("state.json", 30)):
        (temporary / name).write_bytes((text or f"{step}{name}").encode().ljust(size, b"."))
    entries = describe_files(sorted(temporary.iterdir()))
    write_text(temporary / MANIFEST, Manifest(step, best, entries).render())
    return folder.publish(temporary)


def newest_sound(root: Path) -> Path | None:
    return next((path for path in folder.list_checkpoints(root) if find_damage(path) is None), None)


def steps(root: Path) -> list[int]:
    return [folder.step_of(path) for path in folder.list_checkpoints(root)]


def test_untouched_folder_is_sound_for_any_share(tmp_path):
    path = write(tmp_path, 7)
    assert path.name == "step-00000007" and Manifest.read(path).step == 7
    assert [find_damage(path, part, parts) for parts in (1, 2, 5) for part in range(parts)] == [None] * 8


def test_every_flipped_bit_is_found_and_its_file_named(tmp_path):
    path = write(tmp_path, 7)
    draw = random.Random(0)
    for name in sorted(p.name for p in path.iterdir()):
        whole = (path / name).read_bytes()
        for place in {0, len(whole) - 1, *(draw.randrange(len(whole)) for _ in range(40))}:
            damaged = bytearray(whole)
            damaged[place] ^= 1 << draw.randrange(8)
            (path / name).write_bytes(damaged)
            found = find_damage(path)
            assert found is not None and found.startswith(name), (name, place, found)
        (path / name).write_bytes(whole)
    assert find_damage(path) is None


def test_truncated_longer_lost_and_added_files_are_found(tmp_path):
    path = write(tmp_path, 7)
    for name in sorted(p.name for p in path.iterdir()):
        whole = (path / name).read_bytes()
        for damaged in (whole[:-1], b"", whole + b" "):
            (path / name).write_bytes(damaged)
            assert str(find_damage(path)).startswith(name)
        (path / name).unlink()
        assert str(find_damage(path)).startswith(name)
        (path / name).write_bytes(whole)
    (path / "shard-00003.safetensors").write_bytes(b"x")
    assert find_damage(path) == "shard-00003.safetensors: not listed in manifest.json"


@pytest.mark.parametrize("old, new", [
    ('"step": 7', '"step": 8'), ('"best": false', '"best": true'), ('"size": 400', '"size": 401'),
    ("shard-00001", "shard-00009"), ('"digest"', '"digests"'), (": ", ":  "), ("{", "[{"), ("}\n", "}")])
def test_edited_manifest_is_found(tmp_path, old, new):
    path = write(tmp_path, 7)
    text = (path / MANIFEST).read_text()
    assert old in text
    (path / MANIFEST).write_text(text.replace(old, new, 1) if new != "}" else text.removesuffix("\n"))
    assert find_damage(path) == "manifest.json: has been altered"


def test_damage_is_found_by_the_rank_that_hashes_the_file(tmp_path):
    path = write(tmp_path, 7)
    (path / "state.json").write_bytes(b"x" * 30)
    found = [find_damage(path, part, 3) for part in range(3)]
    assert found[:2] == [None, None] and found[2] == "state.json: sha256 differs from what was written"


def test_prune_keeps_the_newest_and_the_best(tmp_path):
    for step in (10, 20, 30, 40):
        folder.prune(tmp_path, write(tmp_path, step, best=step in (10, 20)), keep=2)
    assert steps(tmp_path) == [40, 30, 20]
    folder.prune(tmp_path, write(tmp_path, 50, best=True), keep=1)
    assert steps(tmp_path) == [50]
    folder.prune(tmp_path, write(tmp_path, 60), keep=1)
    assert steps(tmp_path) == [60, 50] and Manifest.read(tmp_path / "step-00000050").best


def test_prune_never_counts_on_a_damaged_one_and_ends_an_abandoned_continuation(tmp_path):
    for step in (10, 20, 30):
        write(tmp_path, step)
    (tmp_path / "step-00000030" / "state.json").write_text("torn")
    (tmp_path / "step-00000020" / MANIFEST).unlink()
    path = write(tmp_path, 11)  # resumed from step 10
    folder.prune(tmp_path, path, keep=1)
    assert steps(tmp_path) == [11] and newest_sound(tmp_path) == path


def test_saving_a_step_again_replaces_it(tmp_path):
    write(tmp_path, 10, text="first")
    path = write(tmp_path, 10, text="second")
    assert (path / "state.json").read_text().startswith("second") and find_damage(path) is None
    assert [p.name for p in tmp_path.iterdir()] == ["step-00000010"]


def crash_at(monkeypatch, count: int) -> None:
    """Die at the count-th change to the disk (counted over renames, deletions, writes, syncs, new folders)."""
    left = [count]

    def counted(function):
        def call(*args, **kwargs):
            left[0] -= 1
            if left[0] < 0:
                raise Killed
            return function(*args, **kwargs)
        return call

    for owner, name in ((os, "rename"), (os, "replace"), (os, "fsync"), (os, "unlink"), (os, "rmdir"), (os, "mkdir"),
                        (Path, "write_bytes"), (Path, "mkdir")):
        monkeypatch.setattr(owner, name, counted(getattr(owner, name)))


def test_crash_at_any_change_to_the_disk_leaves_a_good_one(tmp_path, monkeypatch):
    crashes = 0
    for again in (False, True):  # a new step; the same step once more
        for count in range(200):
            root = tmp_path / f"{again}{count}"
            folder.prune(root, write(root, 10, text="old"), keep=1)
            with monkeypatch.context() as patch:
                crash_at(patch, count)
                try:
                    folder.prune(root, write(root, 10 if again else 20, text="new"), keep=1)
                    finished = True
                except Killed:
                    finished = False
            found = newest_sound(root)
            assert found is not None, count
            # The next run clears up and goes on, whatever was left.
            folder.prune(root, write(root, 30, text="next"), keep=1)
            assert [p.name for p in root.iterdir()] == ["step-00000030"]
            shutil.rmtree(root)
            if finished:
                break
            crashes += 1
        else:
            pytest.fail("the write never finished")
    assert crashes > 20


def test_a_replaced_one_counts_until_its_successor_has_its_name(tmp_path, monkeypatch):
    write(tmp_path, 10, text="old")
    renames = []

    def rename(source, target, real=os.rename):
        renames.append(target)
        if len(renames) == 2:
            raise Killed
        real(source, target)

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", rename)
        with pytest.raises(Killed):
            write(tmp_path, 10, text="new")
    found = newest_sound(tmp_path)
    assert found is not None and found.name == ".replaced-step-00000010" and steps(tmp_path) == [10]
    assert (found / "state.json").read_text().startswith("old")


def test_json_is_replaced_whole_and_floats_come_back_exactly(tmp_path, monkeypatch):
    import json

    path = tmp_path / "state.json"
    write_json(path, {"loss": 0.1 + 0.2, "cursor": {"epoch": 2 ** 60}})
    assert json.loads(path.read_text()) == {"loss": 0.1 + 0.2, "cursor": {"epoch": 2 ** 60}}
    monkeypatch.setattr(os, "replace", lambda *_: (_ for _ in ()).throw(Killed()))
    with pytest.raises(Killed):
        write_json(path, {"loss": 1})
    assert json.loads(path.read_text())["loss"] == 0.1 + 0.2


def test_hidden_files_of_the_system_are_no_damage(tmp_path):
    path = write(tmp_path, 7)
    for name in (".DS_Store", ".nfs0001", "._shard-00001.safetensors"):
        (path / name).write_bytes(b"not ours")
    assert find_damage(path) is None


def test_saving_sets_damaged_ones_aside_and_does_not_count_them(tmp_path, caplog):
    for step in (10, 20, 30, 40):
        write(tmp_path, step)
    (tmp_path / "step-00000030" / "state.json").write_text("torn")
    (tmp_path / "step-00000040" / MANIFEST).unlink()  # later than the one from which the run goes on
    (tmp_path / "step-00000040.damaged").mkdir()
    folder.prune(tmp_path, write(tmp_path, 35), keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "step-00000020", "step-00000030.damaged", "step-00000035", "step-00000040.damaged", "step-00000040.damaged-2"]
    assert (tmp_path / "step-00000030.damaged" / "state.json").read_text() == "torn"
    assert caplog.text.count("damaged checkpoint") == 2 and "state.json: 4 bytes where 30" in caplog.text
    assert steps(tmp_path) == [35, 20] and folder.any_set_aside(tmp_path)
    folder.prune(tmp_path, write(tmp_path, 50), keep=1)
    assert sorted(p.name for p in tmp_path.iterdir())[2:] == ["step-00000040.damaged-2", "step-00000050"]


def test_leftovers_that_cannot_be_deleted_yet_do_not_stop_a_save(tmp_path, monkeypatch):
    (tmp_path / ".deleted-step-00000001" / ".nfs01").mkdir(parents=True)

    def busy(path, ignore_errors=False, **_):
        if not ignore_errors:
            raise OSError(16, "Device or resource busy")

    monkeypatch.setattr(shutil, "rmtree", busy)
    assert find_damage(write(tmp_path, 2)) is None
