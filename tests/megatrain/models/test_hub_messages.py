"""Every error of the hub becomes one message with a remedy, and cached files are found without the network."""

from __future__ import annotations

import importlib
import json
import logging
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants, errors

from megatrain.models.hub import (
    FetchedFile,
    HubError,
    HubModel,
    _convert_errors,
    _progress_bar,
    cached_folder,
    find_hub_model,
    missing_files,
)

#: The HTTP library of huggingface_hub, whose name depends on its version.
httpx: Any = importlib.import_module(errors.HTTPError.__module__.partition(".")[0])
HUB = constants.ENDPOINT


def http_error(kind: type[errors.HfHubHTTPError], status: int, text: str = "first.\nsecond") -> errors.HfHubHTTPError:
    return kind(text, response=httpx.Response(status, request=httpx.Request("GET", HUB)))


UNREACHABLE = (
    f"is not a folder here, is not completely in the hub's cache ({constants.HF_HUB_CACHE}), and {HUB} cannot be "
    "reached ({}). Check the spelling and the network; cached files are kept"
)
NOT_SENT = f"cannot be written: {HUB} cannot be reached ({{}}). The folder is complete; upload it later"
REFUSED = "is refused by the hub ({}). Set HF_TOKEN to a token with permission to {}"
#: Errors, with the message of a download and of an upload.
FAILURES: dict[str, tuple[Exception, str, str]] = {
    "gated": (
        http_error(errors.GatedRepoError, 403),
        f"is gated: accept its terms at {HUB}/me/model, then set HF_TOKEN to a token of that account",
        f"is gated: accept its terms at {HUB}/me/model, then set HF_TOKEN to a token of that account",
    ),
    "no revision": (
        http_error(errors.RevisionNotFoundError, 404),
        "has no revision 'v9' on the hub. Check model.revision",
        "has no revision 'v9' on the hub. Check model.revision",
    ),
    "no model": (
        http_error(errors.RepositoryNotFoundError, 404),
        "is neither a folder here nor a model on the hub that can be read. Check the spelling (a path is relative to "
        "the config file); a private model needs HF_TOKEN",
        "cannot be written on the hub. Set HF_TOKEN to a token with permission to write there",
    ),
    "no id": (
        errors.HFValidationError("bad id: 'a//b'.\nmore"),
        "is neither a folder here nor the id of a model: bad id: 'a//b'",
        "is neither a folder here nor the id of a model: bad id: 'a//b'",
    ),
    **{
        str(status): (
            http_error(errors.HfHubHTTPError, status),
            REFUSED.format(status, "read it"),
            REFUSED.format(status, "write there"),
        )
        for status in (401, 403)
    },
    "server": (
        http_error(errors.HfHubHTTPError, 402),
        "the hub returned an error: first. Try again later; fetched files are kept",
        "the hub returned an error: first. Try again later; fetched files are kept",
    ),
    "no file": (
        http_error(errors.RemoteEntryNotFoundError, 404),
        "lacks a file on the hub: first. Use another revision",
        "lacks a file on the hub: first. Use another revision",
    ),
    "no token": (
        errors.LocalTokenNotFoundError("x"),
        "needs a token. Set HF_TOKEN, or log in with `hf auth login`",
        "needs a token. Set HF_TOKEN, or log in with `hf auth login`",
    ),
    "not cached": (errors.LocalEntryNotFoundError("gone:\n"), UNREACHABLE.format("gone"), NOT_SENT.format("gone")),
    "offline": (errors.OfflineModeIsEnabled("x"), UNREACHABLE.format("x"), NOT_SENT.format("x")),
    "connection": (ConnectionError(""), UNREACHABLE.format("ConnectionError"), NOT_SENT.format("ConnectionError")),
    "timeout": (TimeoutError("slow"), UNREACHABLE.format("slow"), NOT_SENT.format("slow")),
    "other network": (OSError("torn"), UNREACHABLE.format("torn"), NOT_SENT.format("torn")),
    "transport": (httpx.ConnectError("refused"), UNREACHABLE.format("refused"), NOT_SENT.format("refused")),
}


@pytest.mark.parametrize("name", FAILURES)
def test_failures_of_the_hub_are_explained(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    error, *messages = FAILURES[name]
    for is_upload, message in zip((False, True), messages, strict=True):
        with pytest.raises(HubError) as raised, _convert_errors("me/model", "v9", is_upload=is_upload):
            raise error
        assert str(raised.value) == str(HubError("me/model", message))
        assert raised.value.__suppress_context__
    if name == "timeout":
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
        with (
            pytest.raises(HubError, match=r"cannot be reached \(HF_HUB_OFFLINE is set\)"),
            _convert_errors("a/b", None),
        ):
            raise error


def test_other_errors_pass_and_the_log_level_is_restored() -> None:
    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    for error in (PermissionError(13, "Permission denied"), ValueError("x")):
        with pytest.raises(type(error)) as raised, _convert_errors("me/model", None):
            raise error
        assert raised.value is error and logger.level == level
    with _convert_errors("me/model", None):
        assert logger.level == logging.ERROR
    assert logger.level == level
    with pytest.raises(HubError, match="has no revision 'main' on the hub"), _convert_errors("me/model", None):
        raise http_error(errors.RevisionNotFoundError, 404)


def test_offline_mode_is_named_as_the_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(HubError) as raised, _convert_errors("me/model", None):
        raise TimeoutError("slow")
    assert str(raised.value) == str(HubError("me/model", UNREACHABLE.format("HF_HUB_OFFLINE is set")))


def test_missing_files_are_those_of_the_index(tmp_path: Path) -> None:
    model = HubModel("me/model", "c" * 40, tmp_path)
    assert missing_files(model) == ["model.safetensors"]
    (tmp_path / "model.safetensors").touch()
    assert missing_files(model) == []
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"x": "b", "y": "a", "z": "b", "w": "c"}}))
    (tmp_path / "b").touch()
    assert missing_files(model) == ["a", "c"]
    bad: list[tuple[Any, str]] = [
        ({"weight_map": {"x": "b", "y": "../a"}}, "lists files outside of the folder. Do not use this model"),
        ({}, "cannot be read ('weight_map'). Use another revision"),
    ]
    for values, problem in bad:
        index.write_text(json.dumps(values))
        with pytest.raises(HubError) as refused:
            missing_files(model)
        assert str(refused.value) == str(HubError("me/model", f"{index.name} {problem}"))


def test_names_of_paths_are_not_looked_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "me/model").mkdir(parents=True)
    for name in ("me/model", "model", "/a/b", "a/b/c", "a/"):
        assert find_hub_model(name, None) is None
    assert cached_folder("models/Llama-3--8B") is None and cached_folder("model") is None
    assert cached_folder("nobody/nothing") is None


def test_fetched_files_are_counted() -> None:
    assert str(FetchedFile("a.safetensors", 2, 3, 5 << 20)) == "fetched a.safetensors, 5.00 MiB (2 of 3)"
    assert _progress_bar(is_shown=True) is None
    bar = _progress_bar(is_shown=False)
    assert bar is not None and bar(total=3, disable=False).disable
