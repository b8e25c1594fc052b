"""The command line. Imports nothing heavy: ``csbp --help`` and configuration errors answer at once."""

from __future__ import annotations

import argparse
import sys
import textwrap
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from csbp import __version__
from csbp.config.bench import BenchAttentionConfig, BenchStepConfig
from csbp.config.fields import fields_of, nearest_name
from csbp.config.places import experiments
from csbp.config.schema import GenerateConfig
from csbp.errors import ConfigError, UserError
from csbp.output import outlast_output

_WORDS = """\
settings are written KEY=VALUE:
  experiment=NAME            a run that ships with csbp: {names}
  experiment=FILE.yaml       one of your own; its 'defaults' list may start from a shipped one
  GROUP=CHOICE               a file of conf/GROUP, e.g. objective=sdar
  section.field=VALUE        one field, e.g. train.steps=100 data.sources.0.path=docs
All settings: docs/configuration.md. Exit code: 0 done, 2 bad configuration, 1 anything else.
"""


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of the ``csbp`` script; leaves with the exit code."""
    parser, commands = _parser()
    words = sys.argv[1:] if argv is None else argv
    if words and not words[0].startswith("-") and words[0] not in commands:
        print(f"csbp: {words[0]}: no such command; {nearest_name(words[0], commands, 'commands')}", file=sys.stderr)
        sys.exit(2)
    arguments, rest = parser.parse_known_args(argv)
    if any(word.startswith("-") for word in rest):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    if arguments.command is None:
        parser.print_help()
        sys.exit(2)
    # argparse stops collecting settings at an option; those after it are settings too.
    arguments.settings += rest
    sys.exit(guarded(lambda: arguments.run(arguments)))


def guarded(call: Callable[[], int]) -> int:
    """The exit code of a call. What a user can put right is said in one message, without a traceback."""
    try:
        return call()
    except UserError as error:
        print(f"csbp: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("csbp: interrupted", file=sys.stderr)
        return 1
    except Exception:
        traceback.print_exc()
        return 1


def _parser() -> tuple[argparse.ArgumentParser, list[str]]:
    """The parser and the names of its commands."""
    parser = argparse.ArgumentParser(
        prog="csbp", description="Train block-diffusion language models at long context.",
        epilog="start with: csbp train experiment=quickstart")
    parser.add_argument("--version", action="version", version=f"csbp {__version__}")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND")
    described = experiments()
    shipped = "\n".join(f"  {name:<24} {text}" for name, text in described.items())
    words = _WORDS.format(names=", ".join(described))
    _add(commands, "train", _train, "train a model; starts its own ranks",
         f"experiments:\n{shipped}\n\n{words}\nexample:\n  csbp train experiment=quickstart run_dir=runs/first "
         "train.steps=50")
    _add(commands, "check", _check, "check a run before it costs anything: configuration, data, devices, memory",
         f"experiments:\n{shipped}\n\n{words}\nexample:\n  csbp check experiment=quickstart")
    plan = _add(commands, "plan", _plan, "predict time, memory, balance and bytes of a run, from shapes alone",
                f"experiments:\n{shipped}\n\n{words}\nexample:\n  csbp plan experiment=nemotron_8b_sft "
                "parallel.nproc=16 data.seq_len=262144")
    plan.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    plan.add_argument("--picture", default="", metavar="FILE", help="draw who owns and reads what: .svg or .png")
    bench = _add(commands, "bench", _bench, "measure attention or whole steps: time, TFLOP/s, memory, communication",
                 "csbp bench attention takes:\n" + _settings_of(BenchAttentionConfig)
                 + "\n\ncsbp bench step takes experiment=NAME and what changes it, as csbp train, and:\n"
                 + _settings_of(BenchStepConfig) + "\n\nWhat is measured, and how: docs/benchmarks.md\n\nexamples:\n"
                 "  csbp bench attention preset=h200\n"
                 "  torchrun --nproc-per-node 2 $(which csbp) bench attention preset=h200\n"
                 "  csbp bench step experiment=quickstart \"variants=[default, 'parallel.checkpointing=full']\"")
    bench.add_argument("--json", action="store_true", help="print one JSON list and nothing else")
    bench.add_argument("--out", default="", metavar="FILE", help="put the rows into this file of results, each in the "
                                                                 "place of the one with its name")
    _add(commands, "generate", _generate, "write text with a trained model",
         f"settings are written KEY=VALUE:\n{_settings_of(GenerateConfig)}\n\nexample:\n"
         "  csbp generate model=runs/first 'prompt=def add(a, b):' max_new_tokens=32")
    _add(commands, "export", _export, "write a run's newest checkpoint as a Hugging Face folder",
         "settings:\n  run_dir=DIR   the run\n  out=DIR       where to; default: run_dir/export")
    return parser, list(commands.choices)


def _settings_of(command: type) -> str:
    """A line or two for each."""
    lines = []
    for field in fields_of(command):
        takes = f"; {field.expects()}; default {field.default}" if field.default != "" else ""
        lines += textwrap.wrap(f"{field.key:<15} {field.help}{takes}", 100, initial_indent="  ",
                               subsequent_indent=" " * 18)
    return "\n".join(lines)


def _add(commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str,
         run: Callable[[argparse.Namespace], int], summary: str, epilog: str) -> argparse.ArgumentParser:
    parser = commands.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.",
                                 epilog=textwrap.dedent(epilog), formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE")
    parser.set_defaults(run=run)
    return parser


def _train(arguments: argparse.Namespace) -> int:
    outlast_output()
    from csbp.launch import train

    return train(arguments.settings)


def _check(arguments: argparse.Namespace) -> int:
    from csbp.config.compose import compose_run
    from csbp.config.validate import validate_run

    config = compose_run(arguments.settings)
    validate_run(config)
    from csbp.check import run_check

    return run_check(config, arguments.settings)


def _plan(arguments: argparse.Namespace) -> int:
    from csbp.plan_cli import run_plan

    return run_plan(arguments.settings, json_only=arguments.json, picture=arguments.picture)


def _bench(arguments: argparse.Namespace) -> int:
    what, *settings = arguments.settings or [""]
    if what not in ("attention", "step"):
        raise ConfigError("csbp bench", what, nearest_name(what, ["attention", "step"], "it measures"))
    if what == "attention":
        from csbp.bench.attention import run_attention as run
    else:
        from csbp.bench.step import run_step as run

    return run(settings, json_only=arguments.json, out=arguments.out)


def _generate(arguments: argparse.Namespace) -> int:
    from csbp.config.compose import compose_generate
    from csbp.config.validate import validate_generate

    config = compose_generate(arguments.settings)
    validate_generate(config)
    from csbp.generate import run_generate

    return run_generate(config)


def _export(arguments: argparse.Namespace) -> int:
    given = {}
    for word in arguments.settings:
        key, equals, value = word.partition("=")
        if key not in ("run_dir", "out") or not value:
            raise ConfigError(key, value, nearest_name(key, ["run_dir", "out"], "settings") if equals and value
                              else f"did you mean run_dir={key}?" if Path(key).expanduser().is_dir()
                              else "write run_dir=DIR or out=DIR")
        given[key] = Path(value).expanduser()
    if "run_dir" not in given:
        raise ConfigError("run_dir", "", "say which run: run_dir=DIR")
    if not given["run_dir"].is_dir():
        raise ConfigError("run_dir", str(given["run_dir"]), "no such folder")
    from csbp.checkpoint.export_cli import run_export

    return run_export(given["run_dir"], given.get("out"))


if __name__ == "__main__":
    main()
