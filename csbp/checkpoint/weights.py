"""Are a model folder's weights whole, and of this model? From the headers of the files, without reading a tensor."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

from csbp.errors import ConfigError

_INDEX = "model.safetensors.index.json"
_LONGEST_HEADER = 100_000_000  # the format's own limit


def expect_weights(folder: Path, wanted: Mapping[str, Sequence[int]], optional: Sequence[str] = (), *,
                   field: str = "model.path") -> None:
    """Hold the safetensors files of a Hugging Face folder against a model.

    Args:
        folder: with its config.json.
        wanted: name -> shape of every tensor of the model.
        optional: names that may be missing: weights tied to another.
        field: the setting that names the folder.

    Raises:
        ConfigError: there are none, a file is cut short or damaged, one of the index is missing, or a tensor is
            missing or of another shape.
    """
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ConfigError(field, str(folder), "holds no *.safetensors; convert the weights, or set model.init=random")
    try:
        listed = set(json.loads((folder / _INDEX).read_text("utf-8"))["weight_map"].values())
    except FileNotFoundError:
        listed = set()
    except (OSError, ValueError, LookupError, AttributeError, TypeError) as error:
        raise ConfigError(field, str(folder), f"{_INDEX} cannot be read: {error}") from error
    if lost := sorted(listed - {file.name for file in files}):
        raise ConfigError(field, str(folder), f"{lost[0]} is missing, which {_INDEX} names; fetch it again")
    found: dict[str, Sequence[int]] = {}
    for file in files:
        try:
            found |= tensor_shapes(file)
        except (OSError, ValueError) as error:
            raise ConfigError(field, str(folder), f"{file.name} is damaged or cut short ({error}); fetch it again"
                              ) from error
    for name, shape in wanted.items():
        stored = found.get(name, found.get(name.partition(".")[2]))  # the bare decoder leaves its first name out
        if stored is None and name not in optional:
            raise ConfigError(field, str(folder), f"has no weights for {name}; is its config.json of another model?")
        if stored is not None and list(stored) != list(shape):
            raise ConfigError(field, str(folder), f"{name} has shape {list(stored)} there, and {list(shape)} by its "
                                                  "config.json")


def tensor_shapes(file: Path) -> dict[str, list[int]]:
    """Name -> shape of every tensor of a safetensors file.

    Raises:
        ValueError: the file is not whole.
    """
    size = file.stat().st_size
    with file.open("rb") as opened:
        start = opened.read(8)
        length = struct.unpack("<Q", start)[0] if len(start) == 8 else _LONGEST_HEADER + 1
        if length > min(_LONGEST_HEADER, size - 8):
            raise ValueError(f"{size} bytes hold no header")
        header = json.loads(opened.read(length))
    if not isinstance(header, dict):
        raise ValueError("its header is no mapping")
    header.pop("__metadata__", None)
    try:
        end = max((int(entry["data_offsets"][1]) for entry in header.values()), default=0)
        shapes = {name: [int(n) for n in entry["shape"]] for name, entry in header.items()}
        bits = [8 * (e["data_offsets"][1] - e["data_offsets"][0]) for e in header.values() if math.prod(e["shape"])]
    except (LookupError, TypeError) as error:
        raise ValueError("its header is incomplete") from error
    if 8 + length + end != size or any(b <= 0 for b in bits):
        raise ValueError(f"{size} bytes, {8 + length + end} by its header")
    return shapes
