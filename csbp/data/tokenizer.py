"""Loading a tokenizer, and what csbp needs to know of it."""

from __future__ import annotations

import hashlib
import json
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, cast

from csbp.config.places import package_dir
from csbp.data.hub import TOKENIZER_FILES, hub_folder, is_hub_name
from csbp.errors import ConfigError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

BUILTIN = "builtin:"
_ELSEWHERE = "set data.tokenizer to a folder that has the model's"


def resolve_folder(path: str, family: str, field: str = "model.path") -> str:
    """A folder for ``builtin:NAME`` (shipped below ``models/<family>``), the path with ``~`` expanded for a folder
    that exists, else the text itself: a name on the hub.

    Raises:
        ConfigError: an empty path, or a builtin that csbp does not ship.
    """
    if not path:
        raise ConfigError(field, path, "name a Hugging Face folder or builtin:NAME")
    if path.startswith(BUILTIN):
        files = (package_dir("csbp.models") / family).rglob("config.json")
        shipped = {BUILTIN + file.parent.name: file.parent for file in files}
        if path not in shipped:
            raise ConfigError(field, path, f"family {family} ships {', '.join(sorted(shipped)) or 'none'}")
        return str(shipped[path])
    local = Path(path).expanduser()
    return str(local) if local.exists() else path


def load_tokenizer(path_or_builtin: str, family: str, field: str = "data.tokenizer") -> PreTrainedTokenizerFast:
    """The tokenizer of a Hugging Face folder, or ``builtin:NAME``.

    Args:
        path_or_builtin: as in ``data.tokenizer``.
        family: folder under ``models/`` that builtin names are looked up in.
        field: dotted name of the setting, for messages.

    Raises:
        ConfigError: there is none, or it is not one of the fast (Rust) kind, which alone gives offsets.
    """
    folder = resolve_folder(path_or_builtin, family, field)
    if is_hub_name(folder):
        folder = str(hub_folder(folder, field, TOKENIZER_FILES))
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise ConfigError(field, path_or_builtin, f"no tokenizer can be read there: {reason}; {_ELSEWHERE}") from error
    # From a config.json alone transformers makes one that knows a few special tokens and no text.
    if len(tokenizer) == len(tokenizer.added_tokens_decoder):
        raise ConfigError(field, path_or_builtin, f"holds no tokenizer; {_ELSEWHERE}")
    if not tokenizer.is_fast:
        raise ConfigError(field, path_or_builtin, "needs a tokenizer.json (a fast tokenizer)")
    return cast("PreTrainedTokenizerFast", tokenizer)


def next_free_id(tokenizer: PreTrainedTokenizerFast) -> int:
    """The first id past the tokenizer's last, added tokens included: a mask id that no text can contain."""
    return max(len(tokenizer), max(tokenizer.get_vocab().values()) + 1)


def special_ids(tokenizer: PreTrainedTokenizerFast) -> frozenset[int]:
    """Ids of the tokens that stand for no text: the named ones and every added token marked special."""
    return _special_ids(tokenizer, len(tokenizer))


def special_strings(tokenizer: PreTrainedTokenizerFast) -> tuple[str, ...]:
    """How the special tokens are written."""
    return _special_strings(tokenizer, len(tokenizer))


@lru_cache(maxsize=4)
def _special_strings(tokenizer: PreTrainedTokenizerFast, size: int) -> tuple[str, ...]:
    return tuple(tokenizer.convert_ids_to_tokens(sorted(_special_ids(tokenizer, size))))


@lru_cache(maxsize=4)
def _special_ids(tokenizer: PreTrainedTokenizerFast, size: int) -> frozenset[int]:
    """``size`` is there so that tokens added later are seen."""
    added = {index for index, token in tokenizer.added_tokens_decoder.items() if token.special}
    return frozenset(added | set(tokenizer.all_special_ids))


def tokenizer_digest(tokenizer: PreTrainedTokenizerFast) -> str:
    """sha256 of everything that decides which ids a text or a chat gets."""
    special = {key: str(value) for key, value in sorted(tokenizer.special_tokens_map.items())}
    parts = [tokenizer.backend_tokenizer.to_str(), json.dumps(special), json.dumps(tokenizer.chat_template)]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()
