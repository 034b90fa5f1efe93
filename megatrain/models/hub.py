"""Download of models from the Hugging Face hub to its cache, at a fixed commit.

Config, tokenizer and index (a few MB) are fetched as soon as a config names a hub id, because a plan needs them. The
weights are fetched shard by shard when a run begins. The files are stored in the cache that all Hugging Face programs
share (``HF_HOME``). A download resumes after a broken connection. If the process is killed, only the current shard is
lost. The access token comes from ``HF_TOKEN`` or ``hf auth login``. Code is never fetched.
"""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from megatrain.base.errors import ModelFolderError
from megatrain.base.names import INDEX_FILE, SINGLE_FILE
from tiered.units import format_size

__all__ = [
    "FetchedFile",
    "HubError",
    "HubModel",
    "OnFetched",
    "cached_folder",
    "fetch_weights",
    "find_hub_model",
    "missing_files",
    "missing_weights",
    "push_folder",
]

_ID_PATTERN = re.compile(r"\w[\w.-]*/[\w.-]+")
#: Files to fetch for a model, except weights. ``config.json`` is fetched last; other ignored files are duplicates.
_SMALL_FILES = ["*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken"]
_IGNORED_FILES = ["config.json", "original/*", "onnx/*", "*.gguf"]


class HubError(ModelFolderError):
    """Failure of a download or upload. The message states the cause and the remedy."""

    def __init__(self, name: str, problem: str) -> None:
        super().__init__(Path(name), problem)


@dataclass(frozen=True, slots=True)
class HubModel:
    """A hub model in the cache, at a fixed commit.

    Attributes:
        commit: Full commit hash.
        folder: The cache's folder for this commit. It contains the weights after they have been fetched.
    """

    id: str
    commit: str
    folder: Path


@dataclass(frozen=True, slots=True)
class FetchedFile:
    """A fetched weight file, number ``position`` of ``count``."""

    name: str
    position: int
    count: int
    nbytes: int

    def __str__(self) -> str:
        return f"fetched {self.name}, {format_size(self.nbytes)} ({self.position} of {self.count})"


OnFetched = Callable[[FetchedFile], None]


def find_hub_model(name: str, revision: str | None) -> HubModel | None:
    """Return the hub model with this id, or None if ``name`` is a path.

    If the model's small files are not in the cache, fetch them. Otherwise the network is not used, so a branch stays at
    the commit of the first fetch.

    Args:
        name: A path or a hub id. If a path with this name exists, the name is a path.
        revision: Branch, tag or commit. Defaults to main.

    Raises:
        HubError: The model or revision does not exist, the model is gated or private, or the hub cannot be reached.
    """
    if Path(name).exists() or _ID_PATTERN.fullmatch(name) is None:
        return None
    return _locate_cached(name, revision)


@lru_cache(maxsize=8)
def _locate_cached(name: str, revision: str | None) -> HubModel:
    from huggingface_hub import hf_hub_download, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    def fetch_snapshot(*, is_local: bool) -> HubModel:
        options: dict[str, Any] = {
            "allow_patterns": _SMALL_FILES,
            "ignore_patterns": _IGNORED_FILES,
            "local_files_only": is_local,
        }
        folder = Path(
            str(snapshot_download(name, revision=revision, tqdm_class=_progress_bar(is_shown=False), **options))
        )
        # Fetch config.json last, so that every folder with a config.json also has all other files.
        hf_hub_download(name, "config.json", revision=folder.name, local_files_only=is_local)
        return HubModel(name, folder.name, folder)

    with _convert_errors(name, revision):
        try:
            return fetch_snapshot(is_local=True)
        except LocalEntryNotFoundError:
            return fetch_snapshot(is_local=False)


def cached_folder(name: str) -> Path | None:
    """Return the cached folder of a hub model's tokenizer, or None if it is not cached. The network is not used."""
    if _ID_PATTERN.fullmatch(name) is None:
        return None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        path = try_to_load_from_cache(name, "tokenizer_config.json")
    except HFValidationError:  # the name is a path that does not exist, such as `models/Llama-3--8B`
        return None
    return Path(path).parent if isinstance(path, str) else None


def missing_files(model: HubModel) -> list[str]:
    """Return the names of the weight files that are not in the cache. The network is not used."""
    return [name for name in _weight_files(model) if not (model.folder / name).exists()]


def missing_weights(model: HubModel) -> dict[str, int]:
    """Return the size in bytes of each weight file that is not in the cache, by name. Queries the hub.

    Raises:
        HubError: The hub does not have one of the files, or it cannot be reached.
    """
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    sizes = {}
    with _convert_errors(model.id, model.commit):
        for name in missing_files(model):
            try:
                info: Any = hf_hub_download(model.id, name, revision=model.commit, dry_run=True)
            except LocalEntryNotFoundError:  # no network; a subclass of EntryNotFoundError
                raise
            except EntryNotFoundError:
                raise HubError(
                    model.id,
                    f"has no {name} on the hub, but this program reads only safetensors. Use a model with safetensors, "
                    "or convert it with transformers: from_pretrained(ID), then save_pretrained(FOLDER)",
                ) from None
            sizes[name] = int(info.file_size)
    return sizes


def fetch_weights(model: HubModel, on_fetched: OnFetched | None = None, *, show_bar: bool = False) -> None:
    """Fetch all weight files that are not in the cache, one at a time.

    Args:
        on_fetched: Called after each file.
        show_bar: Whether to show a progress bar if stderr is a terminal.

    Raises:
        HubError: A file cannot be fetched, or the drive is too full. Files fetched earlier stay in the cache.
    """
    from huggingface_hub import hf_hub_download

    sizes = missing_weights(model)
    total, free = sum(sizes.values()), shutil.disk_usage(model.folder).free
    if total > free:
        raise HubError(
            model.id,
            f"{format_size(total)} are missing, but {model.folder} has {format_size(free)} free. Free some space, or "
            "set HF_HOME to a folder on another drive",
        )
    with _convert_errors(model.id, model.commit):
        for position, (name, nbytes) in enumerate(sizes.items(), 1):
            hf_hub_download(model.id, name, revision=model.commit, tqdm_class=_progress_bar(is_shown=show_bar))
            if on_fetched is not None:
                on_fetched(FetchedFile(name, position, len(sizes), nbytes))


def push_folder(folder: Path, name: str, *, is_private: bool = False) -> str:
    """Upload a folder to the hub as one commit and return its URL. Create the repository if it does not exist.

    Args:
        name: Id of the repository.
        is_private: Whether to make a new repository private.

    Raises:
        HubError: There is no token, the token has no write permission, or the hub cannot be reached.
    """
    from huggingface_hub import HfApi

    with _convert_errors(name, None, is_upload=True):
        api = HfApi()
        repo_url = api.create_repo(name, private=is_private, exist_ok=True)
        api.upload_folder(repo_id=repo_url.repo_id, folder_path=folder, commit_message="Trained with megatrain-tier")
    return str(repo_url)


def _weight_files(model: HubModel) -> list[str]:
    index = model.folder / INDEX_FILE
    if not index.is_file():
        return [SINGLE_FILE]
    try:
        names = sorted({str(name) for name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise HubError(model.id, f"{INDEX_FILE} cannot be read ({error}). Use another revision") from error
    if any(Path(name).name != name for name in names):
        raise HubError(model.id, f"{INDEX_FILE} lists files outside of the folder. Do not use this model")
    return names


def _progress_bar(*, is_shown: bool) -> type[Any] | None:
    """Return the class for a download's progress bar, or None for the hub's default bar."""
    if is_shown:
        return None
    from tqdm import tqdm

    class SilentProgress(tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{**options, "disable": True})

    return SilentProgress


@contextmanager
def _convert_errors(name: str, revision: str | None, *, is_upload: bool = False) -> Iterator[None]:
    """Convert huggingface_hub's errors inside the context to ``HubError``."""
    from huggingface_hub import constants, errors

    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    try:
        logger.setLevel(logging.ERROR)  # suppress the log lines about retries
        try:
            yield
        finally:
            logger.setLevel(level)
    except errors.GatedRepoError:
        problem = (
            f"is gated: accept its terms at {constants.ENDPOINT}/{name}, then set HF_TOKEN to a token of that account"
        )
    except errors.RevisionNotFoundError:
        problem = f"has no revision {revision or 'main'!r} on the hub. Check model.revision"
    except errors.RepositoryNotFoundError:
        if is_upload:
            problem = "cannot be written on the hub. Set HF_TOKEN to a token with permission to write there"
        else:
            problem = (
                "is neither a folder here nor a model on the hub that can be read. Check the spelling (a path is "
                "relative to the config file); a private model needs HF_TOKEN"
            )
    except errors.HFValidationError as error:
        problem = f"is neither a folder here nor the id of a model: {_first_line(error)}"
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, ConnectionError, TimeoutError) as error:
        problem = _describe_unreachable(error, is_upload=is_upload)
    except errors.EntryNotFoundError as error:
        problem = f"lacks a file on the hub: {_first_line(error)}. Use another revision"
    except errors.HfHubHTTPError as error:
        status = getattr(error.response, "status_code", None)
        if status in (401, 403):
            action = "write there" if is_upload else "read it"
            problem = f"is refused by the hub ({status}). Set HF_TOKEN to a token with permission to {action}"
        else:
            problem = f"the hub returned an error: {_first_line(error)}. Try again later; fetched files are kept"
    except errors.LocalTokenNotFoundError:
        problem = "needs a token. Set HF_TOKEN, or log in with `hf auth login`"
    except OSError as error:
        if error.errno is not None:
            raise  # the message of a drive error is already clear
        problem = _describe_unreachable(error, is_upload=is_upload)
    except Exception as error:
        if not type(error).__module__.startswith("httpx"):  # huggingface_hub does not convert transport errors
            raise
        problem = _describe_unreachable(error, is_upload=is_upload)
    else:
        return
    raise HubError(name, problem) from None


def _describe_unreachable(error: BaseException, *, is_upload: bool) -> str:
    from huggingface_hub import constants

    reason = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else _first_line(error)
    if is_upload:
        return (
            f"cannot be written: {constants.ENDPOINT} cannot be reached ({reason}). The folder is complete; upload it "
            "later"
        )
    return (
        f"is not a folder here, is not completely in the hub's cache ({constants.HF_HUB_CACHE}), and "
        f"{constants.ENDPOINT} cannot be reached ({reason}). Check the spelling and the network; cached files are kept"
    )


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0].rstrip(".:") if text else type(error).__name__
