"""Reading a YAML file that people wrote, and finding the line that a key stands on."""

from __future__ import annotations

import io
from pathlib import Path

import yaml
from omegaconf import DictConfig, OmegaConf

from csbp.errors import ConfigError

OWN_FILE = "your_file"  # under which name a user's own experiment is given to Hydra
_DEEPEST, _MOST_NODES = 50, 100_000


def read_mapping(file: Path, holder: str) -> DictConfig:
    """What a file holds, references not yet followed.

    Args:
        file: YAML, UTF-8.
        holder: the setting that names the file, for what is wrong with the file as a whole.

    Raises:
        ConfigError: it cannot be read, is not UTF-8, is no mapping of text keys, or refers to itself.
        YAMLError, OmegaConfBaseException: it is not valid YAML, or holds what a configuration cannot.
    """
    try:
        text = file.read_bytes().decode("utf-8")
    except OSError as error:
        raise ConfigError(holder, str(file), f"cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        line = error.object[:error.start].count(b"\n") + 1
        raise ConfigError(holder, str(file), f"line {line} is not UTF-8 text; save the file as UTF-8") from error
    root = _tree(text, file, holder)
    if root is None:
        return OmegaConf.create({})
    if not isinstance(root, yaml.MappingNode):
        raise ConfigError(holder, str(file), "must hold a mapping of settings, not "
                                             f"{'a list' if isinstance(root, yaml.SequenceNode) else 'one value'}")
    _Walk(file, holder).check(root, ())
    content = OmegaConf.load(file)
    assert isinstance(content, DictConfig)
    return content


def _tree(text: str, file: Path, holder: str) -> yaml.Node | None:
    stream = io.StringIO(text)
    stream.name = str(file)  # type: ignore[attr-defined]  # for the parser's messages
    try:
        return yaml.compose(stream, Loader=yaml.SafeLoader)
    except RecursionError as error:
        raise ConfigError(holder, str(file), "is nested too deeply") from error


class _Walk:
    """Over every node; an alias is walked as often as it is used, as the reader would."""

    def __init__(self, file: Path, holder: str) -> None:
        self.file, self.holder, self.nodes = file, holder, 0

    def check(self, node: yaml.Node, above: tuple[int, ...]) -> None:
        """Refuse what is wrong below a node; ``above`` are the ids of those that hold it."""
        self.nodes += 1
        line = node.start_mark.line + 1
        if id(node) in above:
            raise self._refused(line, "an anchor holds itself")
        if len(above) > _DEEPEST or self.nodes > _MOST_NODES:
            raise self._refused(line, "too deep, or too much through anchors")
        inside = (*above, id(node))
        if isinstance(node, yaml.SequenceNode):
            for entry in node.value:
                self.check(entry, inside)
        elif isinstance(node, yaml.MappingNode):
            for key, value in node.value:
                self._check_key(key)
                self.check(value, inside)

    def _check_key(self, key: yaml.Node) -> None:
        line = key.start_mark.line + 1
        if not isinstance(key, yaml.ScalarNode):
            raise self._refused(line, "a key must be a name, not a list or a mapping")
        if key.tag.endswith((":null", ":bool", ":int", ":float", ":timestamp")):
            raise self._refused(line, f"the key {key.value or 'null'!r} is no name; put it in quotes if it is meant")

    def _refused(self, line: int, problem: str) -> ConfigError:
        return ConfigError(self.holder, str(self.file), f"line {line}: {problem}")


def place(file: Path | None, key: str) -> str:
    """`` (in FILE, line N)`` for a dotted key; without the line where the file does not hold it, "" without a file."""
    if file is None:
        return ""
    found = None
    try:
        node = yaml.compose(file.read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
        for part in key.split("."):
            if isinstance(node, yaml.SequenceNode):
                found = node = node.value[int(part)]
            elif isinstance(node, yaml.MappingNode):
                found, node = next((k, v) for k, v in node.value if k.value == part)
            else:
                break
    except (OSError, ValueError, LookupError, StopIteration, RecursionError, yaml.YAMLError):
        found = None
    return f" (in {file}, line {found.start_mark.line + 1})" if found is not None else f" (in {file})"
