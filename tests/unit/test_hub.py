"""Names on the hub: what is said before and after a machine without a network has looked for them."""

from __future__ import annotations

import time

import huggingface_hub
import pytest
from huggingface_hub.errors import GatedRepoError, LocalEntryNotFoundError, RepositoryNotFoundError

from csbp.checkpoint.reading import resolve_model_folder
from csbp.data.tokenizer import load_tokenizer
from csbp.errors import ConfigError


def refusal(kind: type[Exception], text: str) -> Exception:
    error = kind.__new__(kind)  # some want the hub's whole response
    error.args = (text,)
    return error


@pytest.mark.parametrize(("error", "said"), [
    (refusal(LocalEntryNotFoundError, "Got: ConnectError: no name\nmore"),
     "the Hugging Face hub cannot be reached (ConnectError: no name)"),
    (refusal(RepositoryNotFoundError, "404"), "the hub has no such repository, or not for you"),
    (refusal(GatedRepoError, "ask its owner"), "the hub did not give it (ask its owner)")])
@pytest.mark.parametrize("field", ["model.path", "data.tokenizer"])
def test_a_name_that_the_hub_does_not_give(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
                                           error: Exception, said: str, field: str) -> None:
    def ask(name: str, **how: object) -> str:
        assert name == "no/such" and "looking for no/such on the Hugging Face hub" in capsys.readouterr().err
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", ask)
    with pytest.raises(ConfigError) as caught:
        load_tokenizer("no/such", "qwen3") if field == "data.tokenizer" else resolve_model_folder("no/such", "qwen3")
    assert caught.value.field == field and f"not a local folder, and {said}" in caught.value.fix


def test_nobody_tries_for_long_where_there_is_no_hub(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("tries again after a pause"))
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(ConfigError, match="cannot be reached"):
        load_tokenizer("no/such", "qwen3")
