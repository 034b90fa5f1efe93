"""Models of the Hugging Face hub by their id: fetched into the hub's own cache, at one commit, never twice.

What a plan needs (config, tokenizer, index: a few MB) is fetched where a config names an id; the weights, shard by
shard, when a run begins. Files lie where every program of Hugging Face finds them (``HF_HOME``). Where the connection
breaks, a file is continued; a process that ends loses the one shard that it was fetching. The token is that of the
environment (``HF_TOKEN``) or of ``hf auth login``. Code is never fetched.
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
    "locate",
    "missing_files",
    "missing_weights",
    "push",
]

_ID = re.compile(r"\w[\w.-]*/[\w.-]+")
#: All that a run reads of a model beside its weights. Folders inside hold other formats of the same model.
_SMALL = ["*.json", "*.jinja", "*.txt", "*.model", "*.tiktoken"]
_NOT = ["config.json", "original/*", "onnx/*", "*.gguf"]


class HubError(ModelFolderError):
    """A model of the hub cannot be fetched, or an export not be sent there; the text says why and what to do."""

    def __init__(self, name: str, problem: str) -> None:
        super().__init__(Path(name), problem)


@dataclass(frozen=True, slots=True)
class HubModel:
    """A model of the hub in the cache, as it was at one commit.

    Attributes:
        commit: whole hash.
        folder: folder of this commit in the cache; weights are in it once they were fetched.
    """

    id: str
    commit: str
    folder: Path


@dataclass(frozen=True, slots=True)
class FetchedFile:
    """A file of weights that has been fetched: the ``number``-th of ``count``."""

    name: str
    number: int
    count: int
    nbytes: int

    def __str__(self) -> str:
        return f"fetched {self.name}, {format_size(self.nbytes)} ({self.number} of {self.count})"


OnFetched = Callable[[FetchedFile], None]


def locate(name: str, revision: str | None) -> HubModel | None:
    """Return the model of the hub that a name means; None where it means a folder.

    Its small files are fetched unless the cache has them; then the network is not used, and a branch means what it
    meant when they were fetched.

    Args:
        name: a path or an id. What exists here is a path.
        revision: branch, tag or commit; None: main.

    Raises:
        HubError: there is no such model or revision, it is gated or private, or the hub cannot be reached.
    """
    if Path(name).exists() or _ID.fullmatch(name) is None:
        return None
    return _located(name, revision)


@lru_cache(maxsize=8)
def _located(name: str, revision: str | None) -> HubModel:
    from huggingface_hub import hf_hub_download, snapshot_download
    from huggingface_hub.errors import LocalEntryNotFoundError

    def snapshot(*, is_local: bool) -> HubModel:
        small: dict[str, Any] = {"allow_patterns": _SMALL, "ignore_patterns": _NOT, "local_files_only": is_local}
        folder = Path(str(snapshot_download(name, revision=revision, tqdm_class=_bar(is_shown=False), **small)))
        # Last, so that a folder with it has all the others too.
        hf_hub_download(name, "config.json", revision=folder.name, local_files_only=is_local)
        return HubModel(name, folder.name, folder)

    with _explained(name, revision):
        try:
            return snapshot(is_local=True)
        except LocalEntryNotFoundError:
            return snapshot(is_local=False)


def cached_folder(name: str) -> Path | None:
    """Return the folder of a model's tokenizer in the cache, without the network. None if the cache has none.

    Args:
        name: An id of the hub.
    """
    if _ID.fullmatch(name) is None:
        return None
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        found = try_to_load_from_cache(name, "tokenizer_config.json")
    except HFValidationError:  # such as `models/Llama-3--8B`: a path that does not exist
        return None
    return Path(found).parent if isinstance(found, str) else None


def missing_files(model: HubModel) -> list[str]:
    """Return the names of the files of weights that the cache lacks, without the network."""
    return [name for name in _weight_files(model) if not (model.folder / name).exists()]


def missing_weights(model: HubModel) -> dict[str, int]:
    """Return the files of weights that the cache lacks, with their sizes in bytes. Asks the hub unless all are there.

    Raises:
        HubError: there are none, or the hub cannot be reached.
    """
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError

    found = {}
    with _explained(model.id, model.commit):
        for name in missing_files(model):
            try:
                info: Any = hf_hub_download(model.id, name, revision=model.commit, dry_run=True)
            except LocalEntryNotFoundError:  # no network; a kind of EntryNotFoundError
                raise
            except EntryNotFoundError:
                raise HubError(
                    model.id,
                    f"has no {name} on the hub; this program reads safetensors only. Take a model with safetensors, or "
                    "convert it with transformers: from_pretrained(ID), then save_pretrained(FOLDER)",
                ) from None
            found[name] = int(info.file_size)
    return found


def fetch_weights(model: HubModel, on_fetched: OnFetched | None = None, *, shows_bar: bool = False) -> None:
    """Fetch the files of weights that the cache lacks, one after the other. Does nothing where all are there.

    Args:
        on_fetched: is called after each file.
        shows_bar: draw a bar on stderr, where that is a terminal.

    Raises:
        HubError: they cannot be fetched, or there is no room for them. What was fetched stays.
    """
    from huggingface_hub import hf_hub_download

    sizes = missing_weights(model)
    needed, free = sum(sizes.values()), shutil.disk_usage(model.folder).free
    if needed > free:
        raise HubError(
            model.id,
            f"{format_size(needed)} are still to fetch, and {model.folder} has {format_size(free)} free. Make room, or "
            "set HF_HOME to a folder on another drive",
        )
    with _explained(model.id, model.commit):
        for number, (name, nbytes) in enumerate(sizes.items(), 1):
            hf_hub_download(model.id, name, revision=model.commit, tqdm_class=_bar(is_shown=shows_bar))
            if on_fetched is not None:
                on_fetched(FetchedFile(name, number, len(sizes), nbytes))


def push(folder: Path, name: str, *, is_private: bool = False) -> str:
    """Send a folder to the hub, as one commit, and return its address. The repository is made if there is none.

    Args:
        name: id of the repository.
        is_private: whether a new repository is private.

    Raises:
        HubError: no token, no right to write there, or the hub cannot be reached. The folder stays as it is.
    """
    from huggingface_hub import HfApi

    with _explained(name, None, writes=True):
        api = HfApi()
        address = api.create_repo(name, private=is_private, exist_ok=True)
        api.upload_folder(repo_id=address.repo_id, folder_path=folder, commit_message="Trained with megatrain-tier")
    return str(address)


def _weight_files(model: HubModel) -> list[str]:
    index = model.folder / INDEX_FILE
    if not index.is_file():
        return [SINGLE_FILE]
    try:
        names = sorted({str(name) for name in json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()})
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise HubError(model.id, f"{INDEX_FILE} cannot be read ({error}). Take another revision of it") from error
    if any(Path(name).name != name for name in names):
        raise HubError(model.id, f"{INDEX_FILE} names files outside of the folder. Do not use this model")
    return names


def _bar(*, is_shown: bool) -> type[Any] | None:
    """Return the bar of a download; None for that of the hub, which a terminal shows."""
    if is_shown:
        return None
    from tqdm import tqdm

    class Silent(tqdm):
        def __init__(self, *args: Any, **options: Any) -> None:
            super().__init__(*args, **{**options, "disable": True})

    return Silent


@contextmanager
def _explained(name: str, revision: str | None, *, writes: bool = False) -> Iterator[None]:
    """Turn the errors of the hub inside the context into one of ours."""
    from huggingface_hub import constants, errors

    logger = logging.getLogger("huggingface_hub")
    level = logger.level
    try:
        logger.setLevel(logging.ERROR)  # a dozen lines of retries would come before the message
        try:
            yield
        finally:
            logger.setLevel(level)
    except errors.GatedRepoError:
        problem = (
            f"is gated: accept its terms at {constants.ENDPOINT}/{name}, then set HF_TOKEN to a token of that account"
        )
    except errors.RevisionNotFoundError:
        problem = f"has no revision {revision or 'main'!r} on the hub. Look at model.revision"
    except errors.RepositoryNotFoundError:
        if writes:
            problem = "cannot be written on the hub. Set HF_TOKEN to a token with the right to write there"
        else:
            problem = (
                "is neither a folder here nor a model on the hub that can be read. Check the spelling (a path is "
                "relative to the config file); a private model needs HF_TOKEN"
            )
    except errors.HFValidationError as error:
        problem = f"is neither a folder here nor the id of a model: {_first_line(error)}"
    except errors.HfHubHTTPError as error:
        status = getattr(error.response, "status_code", None)
        if status in (401, 403):
            what = "write there" if writes else "read it"
            problem = f"is refused by the hub ({status}). Set HF_TOKEN to a token with the right to {what}"
        else:
            problem = f"the hub answers with an error: {_first_line(error)}. Try again later; nothing is fetched twice"
    except errors.LocalTokenNotFoundError:
        problem = "needs a token. Set HF_TOKEN, or log in with `hf auth login`"
    except (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled, ConnectionError, TimeoutError) as error:
        problem = _unreachable(error, writes=writes)
    except OSError as error:
        if error.errno is None and not isinstance(error, errors.EntryNotFoundError):
            problem = _unreachable(error, writes=writes)
        elif isinstance(error, errors.EntryNotFoundError):
            problem = f"lacks a file on the hub: {_first_line(error)}. Take another revision of it"
        else:
            raise  # of the drive: it has a name and says what is wrong
    except Exception as error:
        if not type(error).__module__.startswith("httpx"):  # what huggingface_hub lets through of its transport
            raise
        problem = _unreachable(error, writes=writes)
    else:
        return
    raise HubError(name, problem) from None


def _unreachable(error: BaseException, *, writes: bool) -> str:
    from huggingface_hub import constants

    reason = "HF_HUB_OFFLINE is set" if constants.HF_HUB_OFFLINE else _first_line(error)
    if writes:
        return (
            f"cannot be written: {constants.ENDPOINT} cannot be reached ({reason}). The folder is whole; send it later"
        )
    return (
        f"is not a folder here, it is not whole in the cache of the hub ({constants.HF_HUB_CACHE}), and "
        f"{constants.ENDPOINT} cannot be reached ({reason}). Check the spelling and the network; what is here is kept"
    )


def _first_line(error: BaseException) -> str:
    text = str(error).strip()
    return text.splitlines()[0].rstrip(".:") if text else type(error).__name__
