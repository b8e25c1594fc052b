"""The command line. Imports nothing heavy: ``csbp --help`` and configuration errors answer at once."""

from __future__ import annotations

import argparse
import sys
import textwrap
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

from csbp import __version__
from csbp.config.fields import nearest_name
from csbp.config.places import experiments
from csbp.errors import ConfigError, UserError

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
    arguments = _parser().parse_args(argv)
    if arguments.command is None:
        _parser().print_help()
        sys.exit(2)
    sys.exit(guarded(lambda: arguments.run(arguments.settings)))


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


def _parser() -> argparse.ArgumentParser:
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
    _add(commands, "generate", _generate, "write text with a trained model",
         "example:\n  csbp generate model=runs/first 'prompt=def add(a, b):' max_new_tokens=32\n\n"
         "All settings: docs/configuration.md")
    _add(commands, "export", _export, "write a run's newest checkpoint as a Hugging Face folder",
         "settings:\n  run_dir=DIR   the run\n  out=DIR       where to; default: run_dir/export")
    return parser


def _add(commands: argparse._SubParsersAction[argparse.ArgumentParser], name: str, run: Callable[[list[str]], int],
         summary: str, epilog: str) -> None:
    parser = commands.add_parser(name, help=summary, description=f"{summary[0].upper()}{summary[1:]}.",
                                 epilog=textwrap.dedent(epilog), formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE")
    parser.set_defaults(run=run)


def _train(words: list[str]) -> int:
    from csbp.launch import train

    return train(words)


def _check(words: list[str]) -> int:
    from csbp.config.compose import compose_run
    from csbp.config.validate import validate_run

    config = compose_run(words)
    validate_run(config)
    from csbp.check import run_check

    return run_check(config)


def _generate(words: list[str]) -> int:
    from csbp.config.compose import compose_generate
    from csbp.config.validate import validate_generate

    config = compose_generate(words)
    validate_generate(config)
    from csbp.generate import run_generate

    return run_generate(config)


def _export(words: list[str]) -> int:
    given = {}
    for word in words:
        key, equals, value = word.partition("=")
        if key not in ("run_dir", "out") or not value:
            raise ConfigError(key, value, nearest_name(key, ["run_dir", "out"], "settings") if equals and value
                              else f"write {key}=DIR")
        given[key] = Path(value).expanduser()
    if "run_dir" not in given:
        raise ConfigError("run_dir", "", "say which run: run_dir=DIR")
    if not given["run_dir"].is_dir():
        raise ConfigError("run_dir", str(given["run_dir"]), "no such folder")
    from csbp.checkpoint.export_cli import run_export

    return run_export(given["run_dir"], given.get("out"))


if __name__ == "__main__":
    main()
