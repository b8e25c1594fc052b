"""The cheap look at the data: what it refuses, and that it needs nothing large."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

LINES = {"messages": {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]},
         "text": {"text": "some text"}, "other": {"content": "some text"}}
SCRIPT = """
import sys
from csbp.config.compose import compose_run
from csbp.data.first import check_first_records
from csbp.errors import ConfigError
for words in zip(sys.argv[1::2], sys.argv[2::2]):
    try: check_first_records(compose_run(["experiment=quickstart", *words]))
    except ConfigError as error: print(error)
    else: print()
assert not {"torch", "transformers", "datasets"} & set(sys.modules)
"""
CASES = [("text", "text", False, ""), ("messages", "messages", True, ""),
         ("messages", "messages", False, "data.sources.0.format='messages': this tokenizer has no chat template"),
         ("other", "text", False, "has no column 'text' for 'text'; it has content"), (None, "text", False, "line 1")]


def test_one_record_tells(tmp_path: Path) -> None:
    words: list[str] = []
    for i, (line, format, template, _) in enumerate(CASES):
        folder = tmp_path / str(i)
        folder.mkdir()
        (folder / "a.jsonl").write_text("{" if line is None else json.dumps(LINES[line]) + "\n{never read")
        (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": "x"} if template else {}))
        words += [f"data.tokenizer={folder}",
                  f"data.sources=[{{kind: jsonl, path: {folder / 'a.jsonl'}, format: {format}}}]"]
    done = subprocess.run([sys.executable, "-c", SCRIPT, *words], capture_output=True, text=True, check=True)
    for told, (*_, said) in zip(done.stdout.splitlines(), CASES, strict=True):
        assert said in told and bool(said) == bool(told)


@pytest.mark.slow
def test_check_and_train_look_first(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"content": "x"}\n')
    for command in ("check", "train"):
        done = subprocess.run([str(Path(sys.executable).parent / "csbp"), command, "experiment=quickstart",
                               "data.sources=[{kind: jsonl, path: a.jsonl}]", "model.path=no/such"], cwd=tmp_path,
                              capture_output=True, text=True)
        assert done.returncode == 2 and done.stdout == ""  # not even the devices
        assert "has no column 'text'" in done.stderr and "hub" not in done.stderr
