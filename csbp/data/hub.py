"""Models and tokenizers by their names on the Hugging Face hub."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path

from csbp.errors import ConfigError

HUB_NAME = re.compile(r"[\w.-]+/[\w.-]+")
# Weights as safetensors, configuration and tokenizer; never code, never pickles.
TOKENIZER_FILES = ("*.json", "*.jinja", "*.txt", "*.model")
MODEL_FILES = (*TOKENIZER_FILES, "*.safetensors")


def is_hub_name(path: str) -> bool:
    """Whether a path means something on the hub: OWNER/NAME, and nothing here is called so."""
    return HUB_NAME.fullmatch(path) is not None and not Path(path).exists()


def hub_folder(name: str, field: str, files: Sequence[str]) -> Path:
    """The folder of the hub's local cache with these files of a repository, downloaded once. It is said beforehand,
    because a machine without a network may take long to find out.

    Args:
        name: OWNER/NAME.
        field: the setting that holds it, for messages.
        files: patterns of names.

    Raises:
        ConfigError: it cannot be had.
    """
    from huggingface_hub import snapshot_download, try_to_load_from_cache
    from huggingface_hub.errors import LocalEntryNotFoundError, OfflineModeIsEnabled, RepositoryNotFoundError

    if not isinstance(try_to_load_from_cache(name, "config.json"), str):
        print(f"csbp: looking for {name} on the Hugging Face hub", file=sys.stderr, flush=True)
    try:
        return Path(snapshot_download(name, allow_patterns=list(files)))
    except Exception as error:  # the hub's client has many: offline, not found, gated, a full disk
        reason = str(error).strip().splitlines()[0].removeprefix("Got: ") if str(error).strip() else ""
        what = "the hub did not give it"
        if isinstance(error, LocalEntryNotFoundError | OfflineModeIsEnabled):
            what = "the Hugging Face hub cannot be reached"
        elif type(error) is RepositoryNotFoundError:
            what = "the hub has no such repository, or not for you"
        raise ConfigError(field, name, f"not a local folder, and {what} ({reason or type(error).__name__}); give a "
                                       "folder that is here") from error
