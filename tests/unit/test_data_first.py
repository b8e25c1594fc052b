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
for word in sys.argv[2:]:
    try: check_first_records(compose_run(["experiment=quickstart", sys.argv[1], word]))
    except ConfigError as error: print(error)
    else: print()
assert not {"torch", "transformers", "datasets"} & set(sys.modules)
"""
CASES = [("text", "text", False, ""), ("messages", "messages", True, ""),
         ("messages", "messages", False, "data.sources.0.format='messages': this tokenizer has no chat template"),
         ("other", "text", False, "has no column 'text' for 'text'; it has content"), (None, "text", False, "line 1")]


@pytest.mark.parametrize("template", [False, True])
def test_one_record_tells(tmp_path: Path, template: bool) -> None:
    words, expected = [], []
    for i, (line, format, has_template, said) in enumerate(CASES):
        if has_template == template:
            file = tmp_path / f"{i}.jsonl"
            file.write_text("{" if line is None else json.dumps(LINES[line]) + "\n{never read")
            words.append(f"data.sources=[{{kind: jsonl, path: {file}, format: {format}}}]")
            expected.append(said)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "x"} if template else {}))
    done = subprocess.run([sys.executable, "-c", SCRIPT, f"data.tokenizer={tmp_path}", *words], capture_output=True,
                          text=True, check=True)
    for line, said in zip(done.stdout.splitlines(), expected, strict=True):
        assert said in line and bool(said) == bool(line)


@pytest.mark.slow
def test_check_and_train_look_first(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"content": "x"}\n')
    for command in ("check", "train"):
        done = subprocess.run([str(Path(sys.executable).parent / "csbp"), command, "experiment=quickstart",
                               "data.sources=[{kind: jsonl, path: a.jsonl}]", "model.path=no/such"], cwd=tmp_path,
                              capture_output=True, text=True)
        assert done.returncode == 2 and done.stdout == ""  # not even the devices
        assert "has no column 'text'" in done.stderr and "hub" not in done.stderr
