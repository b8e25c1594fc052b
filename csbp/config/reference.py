"""The reference page docs/configuration.md and the files conf/<group>/default.yaml, both from the dataclasses.

``python -m csbp.config.reference`` in a checkout writes them; a test fails when they are not current.
"""

from __future__ import annotations

import dataclasses
import typing
from pathlib import Path
from typing import Any

from csbp.config.bench import BenchAttentionConfig, BenchProfileConfig, BenchStepConfig
from csbp.config.fields import Field, fields_of
from csbp.config.places import described_recipes, experiments
from csbp.config.schema import GenerateConfig, RunConfig, SourceConfig
from csbp.config.simulate import SimulateConfig
from csbp.config.typed import dump_plain

# conf/NAME.yaml -> the command that it is of, and its settings.
COMMANDS: dict[str, tuple[str, type]] = {
    "generate": ("csbp generate", GenerateConfig), "bench_attention": ("csbp bench attention", BenchAttentionConfig),
    "bench_step": ("csbp bench step", BenchStepConfig), "bench_profile": ("csbp bench profile", BenchProfileConfig),
    "simulate": ("csbp simulate", SimulateConfig)}
_ORIGIN = "Written by `python -m csbp.config.reference` from csbp/config/schema.py; edit that file instead."


def reference_files() -> dict[str, str]:
    """Path within the checkout -> text, of every generated file."""
    files = {"docs/configuration.md": reference_page()}
    for name, (_, command) in COMMANDS.items():
        files[f"conf/{name}.yaml"] = _command_defaults(name, command)
    for name, section in _sections().items():
        files[f"conf/{name}/default.yaml"] = _group_defaults(name, section)
    return files


def reference_page() -> str:
    """Every setting with its type, default and meaning, as Markdown."""
    own = [field for field in fields_of(RunConfig) if "." not in field.key and not field.is_section]
    parts = [_INTRODUCTION, "## Experiments\n", _list(experiments()), "## The run\n", _table(own),
             "### Recipes\n", _list(described_recipes())]
    for name, section in _sections().items():
        parts.append(f"## {name}\n\n{_summary(section)}\n")
        parts.append(_table([f for f in fields_of(section, f"{name}.") if ".N." not in f.key]))
        if name == "data":
            parts.append(f"### Entries of data.sources and data.validation\n\n{_summary(SourceConfig)}\n")
            parts.append(_table(list(fields_of(SourceConfig, "data.sources.N."))))
    for title, command in COMMANDS.values():
        parts.append(f"## {title}\n\n{_summary(command)}\n")
        parts.append(_table(list(fields_of(command))))
    return "\n".join(parts)


def _list(described: dict[str, str]) -> str:
    return "\n".join(f"- `{name}`: {text}" for name, text in described.items()) + "\n"


def _sections() -> dict[str, Any]:
    hints = typing.get_type_hints(RunConfig)
    return {f.name: hints[f.name] for f in dataclasses.fields(RunConfig) if dataclasses.is_dataclass(hints[f.name])}


def _summary(section: type) -> str:
    return " ".join((section.__doc__ or "").split())


def _table(rows: list[Field]) -> str:
    lines = ["| key | default | takes | meaning |", "|---|---|---|---|"]
    for row in rows:
        cells = [f"`{row.key}`", f"`{_inline(row.default)}`", row.expects(), row.help]
        lines.append("| " + " | ".join(cell.replace("|", "\\|").replace("<", "&lt;") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _inline(value: Any) -> str:
    """A default as it is written in YAML on one line."""
    if value == "":
        return '""'
    return dump_plain(value)


def _group_defaults(name: str, section: type) -> str:
    return f"# {_summary(section)}\n# {_ORIGIN}\n{_settings(section)}"


def _command_defaults(name: str, command: type) -> str:
    origin = _ORIGIN.replace("csbp/config/schema", command.__module__.replace(".", "/"))
    return (f"# {_summary(command)}\n# {origin}\ndefaults:\n  - {name}_schema\n  - _self_\n"
            f"{_settings(command)}")


def _settings(section: type) -> str:
    lines = []
    for field in fields_of(section):
        if ".N." not in field.key:
            line = f"{field.key}: {_inline(field.default)}"
            lines.append(f"{line:<28}  # {field.help or field.expects()}")
    return "\n".join(lines) + "\n"


_INTRODUCTION = f"""# Configuration

<!-- {_ORIGIN} -->

A run is one experiment file plus what the command line changes:

    csbp train experiment=quickstart train.steps=100 optim.lr=1e-3 run_dir=runs/first

- `experiment=NAME` picks a file of `conf/experiment`; `experiment=FILE.yaml` takes one of your own, written the
  same way. Its `defaults` list may start from a shipped one (`- quickstart`) and pick files of the groups
  (`- override /objective: sdar`).
- `GROUP=CHOICE` picks a file of `conf/GROUP`, over the experiment's choice.
- `section.field=VALUE` sets one field. A text field takes the rest of the word as it stands; lists are written
  `[a, b]`, mappings `{{name: value}}`. An entry of a list is reached by its number: `data.sources.0.path=docs`.
- `model.shape` and `columns` are mappings with keys of their own: `model.shape.hidden_size=128` sets one and keeps
  the others, `model.shape={{hidden_size: 128}}` replaces them all. In a file, a mapping joins that of the file it
  starts from.
- A file of `conf/model` brings a path and, for weights on the hub, their shape, which `csbp plan` goes by. A
  `model.path` in your file or on the command line takes the place of its path alone. For a folder of your own give
  `model.path` without `model=NAME`: its config.json has the shape.
- In files, `${{section.field}}` refers to another setting.

The result, with every field written out, is saved as `config.yaml` in the run folder. What cannot run is refused
before any work starts: exit code 2, with the field, its value and what to write instead. A number without a bound in
the tables may be as large as 64-bit integers and 32-bit floats go.
"""


def main() -> None:
    """Write the files into the checkout that this module belongs to."""
    root = Path(__file__).resolve().parents[2]
    for name, text in reference_files().items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text, encoding="utf-8")
        print(f"wrote {name}")


if __name__ == "__main__":
    main()
