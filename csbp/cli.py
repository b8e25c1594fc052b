"""The command line. Imports nothing heavy: ``csbp --help`` and configuration errors answer at once."""

from __future__ import annotations

import argparse
import os
import re
import sys
import textwrap
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from csbp import __version__
from csbp.checkpoint.target import NOT_OURS, may_export_to
from csbp.config.bench import BenchAttentionConfig, BenchProfileConfig, BenchStepConfig
from csbp.config.fields import nearest_name
from csbp.config.schema import GenerateConfig
from csbp.config.simulate import SimulateConfig
from csbp.errors import ConfigError, UserError, met_by_all
from csbp.output import called_as, outlast_output, until_closed
from csbp.usage import run_settings, settings_of


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of the ``csbp`` script; leaves with the exit code."""
    parser, commands = _parser()
    words = sys.argv[1:] if argv is None else argv
    if words and not words[0].startswith("-") and words[0] not in commands:
        fix = f"no such command; {nearest_name(words[0], commands, 'commands')}"
        sys.exit(guarded(lambda: _refuse(words[0], fix)))
    arguments, rest = parser.parse_known_args(argv)
    wrong = next((word for word in rest if word.startswith("-")), "")
    if wrong:
        sys.exit(guarded(lambda: _refuse(*_unknown_option(wrong, arguments.command))))
    if arguments.command is None:
        parser.print_help()
        sys.exit(2)
    # argparse stops collecting settings at an option; those after it are settings too.
    arguments.settings += rest
    sys.exit(guarded(lambda: arguments.run(arguments)))


def _refuse(word: str, fix: str) -> int:
    with met_by_all():
        raise ConfigError(word, ..., fix)


def _unknown_option(word: str, command: str | None) -> tuple[str, str]:
    """A word that starts with a dash, and what to do about it: most are settings written as options."""
    name, equals, value = word.lstrip("-").partition("=")
    if command and re.fullmatch(r"\w+(\.\w+)+", name) or equals:
        return word, f"write {name}={value if equals else 'VALUE'}; settings have no dashes"
    return word, f"no such option; see {' '.join([called_as(), *([command] if command else [])])} --help"


def guarded(call: Callable[[], int]) -> int:
    """The exit code of a call. What a user can put right is said in one message, without a traceback."""
    try:
        return call()
    except UserError as error:
        rank = os.environ.get("RANK", "0")
        if not error.shared or "0" in (rank, os.environ.get("LOCAL_RANK", "0")):  # torchrun's ranks share a terminal
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
    _add(commands, "train", _train, "train a model; starts its own ranks",
         run_settings("csbp train experiment=quickstart run_dir=runs/first train.steps=50"))
    check = _add(commands, "check", _check, "check a run before it costs anything: configuration, data, devices, "
                 "memory", run_settings("csbp check experiment=quickstart"))
    check.add_argument("--lengths", default="", metavar="FILE", help="write the tokens of each training document, one "
                       "a line, for data.document_lengths of csbp plan")
    plan = _add(commands, "plan", _plan, "predict time, memory, balance and bytes of a run, from shapes alone",
                run_settings("csbp plan experiment=nemotron_8b_sft parallel.nproc=16 data.seq_len=262144"))
    plan.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    plan.add_argument("--picture", default="", metavar="FILE", help="draw who owns and reads what: .svg or .png")
    simulate = _add(commands, "simulate", _simulate, "predict steps of a cluster, without one: csbp, with and without "
                    "disaggregation, and others",
                    "csbp simulate takes experiment=NAME and what changes it, as csbp train, and:\n"
                    + settings_of(SimulateConfig) + "\n\nWhat is predicted, and how: docs/cad.md\n\nexample:\n"
                    "  csbp simulate experiment=nemotron_8b_sft parallel.nproc=64 parallel.csbp=8 data.seq_len=131072")
    simulate.add_argument("--json", action="store_true", help="print one JSON object and nothing else")
    bench = _add(commands, "bench", _bench, "measure attention, whole steps, or what attention costs on this device",
                 "csbp bench attention takes:\n" + settings_of(BenchAttentionConfig)
                 + "\n\ncsbp bench step takes experiment=NAME and what changes it, as csbp train, and:\n"
                 + settings_of(BenchStepConfig) + "\n\ncsbp bench profile takes:\n" + settings_of(BenchProfileConfig)
                 + "\n\nWhat is measured, and how: docs/benchmarks.md\n\nexamples:\n"
                 "  csbp bench attention preset=h200\n"
                 "  torchrun --nproc-per-node 2 $(which csbp) bench attention preset=h200\n"
                 "  csbp bench step experiment=quickstart \"variants=[default, 'parallel.checkpointing=full']\"\n"
                 "  csbp bench profile out=h200.json")
    bench.add_argument("--json", action="store_true", help="print one JSON list and nothing else")
    bench.add_argument("--out", default="", metavar="FILE", help="put the rows into this file of results, each in the "
                                                                 "place of the one with its name")
    _add(commands, "generate", _generate, "write text with a trained model",
         f"settings are written KEY=VALUE:\n{settings_of(GenerateConfig)}\n\nexample:\n"
         "  csbp generate model=runs/first 'prompt=def add(a, b):' max_new_tokens=32")
    _add(commands, "export", _export, "write a run's newest checkpoint as a Hugging Face folder",
         "settings:\n  run_dir=DIR   the run\n  out=DIR       where to; default: run_dir/export")
    return parser, list(commands.choices)


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


@until_closed
def _check(arguments: argparse.Namespace) -> int:
    from csbp.config.compose import compose_run
    from csbp.config.validate import validate_run

    config = compose_run(arguments.settings)
    validate_run(config)
    from csbp.data.first import check_first_records

    check_first_records(config)
    from csbp.check import run_check

    return run_check(config, arguments.settings, lengths=arguments.lengths)


@until_closed
def _plan(arguments: argparse.Namespace) -> int:
    from csbp.plan_cli import run_plan

    return run_plan(arguments.settings, json_only=arguments.json, picture=arguments.picture)


@until_closed
def _simulate(arguments: argparse.Namespace) -> int:
    from csbp.simulate_cli import run_simulate

    return run_simulate(arguments.settings, json_only=arguments.json)


def _bench(arguments: argparse.Namespace) -> int:
    outlast_output()
    what, *settings = arguments.settings or [""]
    if what not in ("attention", "step", "profile"):
        fix = nearest_name(what, ["attention", "step", "profile"], "say what to measure")
        raise ConfigError(f"bench {what}".strip(), ..., fix)
    if what == "attention":
        from csbp.bench.attention import run_attention as run
    elif what == "profile":
        from csbp.bench.profile import run_profile as run
    else:
        from csbp.bench.step import run_step as run

    return run(settings, json_only=arguments.json, out=arguments.out)


@until_closed
def _generate(arguments: argparse.Namespace) -> int:
    from csbp.config.compose import compose_generate
    from csbp.config.validate import validate_generate

    config = compose_generate(arguments.settings)
    validate_generate(config)
    from csbp.generate import run_generate

    return run_generate(config)


def _export(arguments: argparse.Namespace) -> int:
    outlast_output()
    given = {}
    for word in arguments.settings:
        key, equals, value = word.partition("=")
        if key not in ("run_dir", "out") or not value:
            meant = (f"did you mean run_dir={key}?" if Path(key).expanduser().is_dir() else
                     "write run_dir=DIR or out=DIR")
            raise ConfigError(key, value if equals else ...,
                              nearest_name(key, ["run_dir", "out"], "settings") if equals and value else meant)
        given[key] = Path(value).expanduser()
    if "run_dir" not in given:
        raise ConfigError("run_dir", ..., "say which run: run_dir=DIR")
    run_dir = given["run_dir"]
    if not run_dir.is_dir():
        raise ConfigError("run_dir", str(run_dir), "no such folder")
    if not any((run_dir / "checkpoints").glob("step-*")):
        raise ConfigError("run_dir", str(run_dir), "is not the folder of a run that has a checkpoint")
    out = given.get("out", run_dir / "export")
    if not may_export_to(out):
        raise ConfigError("out", str(out), NOT_OURS)
    from csbp.checkpoint.export_cli import run_export

    return run_export(run_dir, out)


if __name__ == "__main__":
    main()
