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
try: check_first_records(compose_run(["experiment=quickstart", *sys.argv[1:]]))
except ConfigError as error: print(error)
assert not {"torch", "transformers", "datasets"} & set(sys.modules)
"""


@pytest.mark.parametrize(("line", "format", "template", "said"), [
    ("text", "text", False, ""), ("messages", "messages", True, ""),
    ("messages", "messages", False, "data.sources.0.format='messages': this tokenizer has no chat template"),
    ("other", "text", False, "has no column 'text' for 'text'; it has content"),
    (None, "text", False, "line 1")])
def test_one_record_tells(tmp_path: Path, line: str | None, format: str, template: bool, said: str) -> None:
    file = tmp_path / "a.jsonl"
    file.write_text("{" if line is None else json.dumps(LINES[line]) + "\n{never read")
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "x"} if template else {}))
    done = subprocess.run([sys.executable, "-c", SCRIPT, f"data.tokenizer={tmp_path}",
                           f"data.sources=[{{kind: jsonl, path: {file}, format: {format}}}]"],
                          capture_output=True, text=True, check=True)
    assert said in done.stdout and bool(said) == bool(done.stdout), done.stdout


@pytest.mark.slow
def test_check_and_train_look_first(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"content": "x"}\n')
    for command in ("check", "train"):
        done = subprocess.run([str(Path(sys.executable).parent / "csbp"), command, "experiment=quickstart",
                               "data.sources=[{kind: jsonl, path: a.jsonl}]", "model.path=no/such"], cwd=tmp_path,
                              capture_output=True, text=True)
        assert done.returncode == 2 and done.stdout == ""  # not even the devices
        assert "has no column 'text'" in done.stderr and "hub" not in done.stderr
