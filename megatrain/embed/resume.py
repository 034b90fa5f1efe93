"""What an optimizer's ``state_dict`` says about the store, and how it is brought back."""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from megatrain.embed.groups import StateGroup, TieredGroup, UntieredGroup
from megatrain.embed.model_methods import mapped_copy
from megatrain.embed.settings import UNSUPPORTED
from megatrain.embed.stores import ledger_of
from tiered.errors import GenerationError
from tiered.manifest import read_manifest
from tiered.reader import GenerationReader

if TYPE_CHECKING:
    from megatrain.embed.optimizer import TieredOptimizer
    from tiered.store import TieredStore

__all__ = ["StoredState", "commit_changes", "load_state", "save_state"]

_FORMAT = 1
#: Of the record of a generation: tells it from others of the same number.
_MARK = "mark"


class StoredState(MutableMapping[nn.Parameter, dict[str, Any]]):
    """``optimizer.state``: nothing is kept here, so that nobody moves it; what is asked for is read from the store.

    ``state[parameter]`` gives copies, under the names of torch's optimizer, in files without a name. It cannot be set:
    load a ``state_dict`` instead. Iterating finds nothing.
    """

    def __init__(self, optimizer: TieredOptimizer) -> None:
        self._optimizer = optimizer

    def __getitem__(self, parameter: nn.Parameter) -> dict[str, Any]:
        optimizer = self._optimizer
        if not isinstance(parameter, nn.Parameter) or parameter not in optimizer.steps:
            raise KeyError("this parameter has no state: no update of it was made")
        optimizer.finish_updates()
        group, name = _find(optimizer, parameter)
        (entry,) = group.entries({name: None})
        found: dict[str, Any] = {"step": torch.tensor(float(optimizer.steps[parameter]))}
        for kind, key in group.keys.items():
            if kind in ("weight", "low"):
                continue
            with optimizer.store.acquire(key, "ram") as lease:
                part = group.part(kind, lease.tensor, entry)
                own = group.kinds[kind].elements_of is not None
                found[optimizer.torch_names().get(kind, kind)] = mapped_copy(part if own else part.view(entry.shape))
        return found

    def __setitem__(self, parameter: nn.Parameter, state: dict[str, Any]) -> None:
        raise TypeError("the state is in the store: use optimizer.load_state_dict")

    def __delitem__(self, parameter: nn.Parameter) -> None:
        raise TypeError("the state is in the store: it cannot be removed")

    def __iter__(self) -> Iterator[nn.Parameter]:
        return iter(())

    def __len__(self) -> int:
        return 0


def save_state(optimizer: TieredOptimizer) -> dict[str, Any]:
    """Return plain values: where the state is, after committing what has changed."""
    numbers = _numbers(optimizer)
    generation = commit_changes(optimizer.store)
    return {
        "format": _FORMAT,
        "store": None if optimizer.store.path is None else os.path.abspath(optimizer.store.path),
        "generation": generation,
        "mark": ledger_of(optimizer.store).mark,
        "blocks": _fingerprint(optimizer.store),
        "steps": {numbers[id(parameter)]: count for parameter, count in optimizer.steps.items()},
    }


def commit_changes(store: TieredStore) -> int | None:
    """Return the generation that holds the present state, made now if there is none; None: nothing was changed yet.

    Updates that are due are made, also those of other optimizers. Returns when it would survive a power cut.

    Raises:
        GenerationError: the store has no folder.
        TransferError: a drive refused.
    """
    ledger = ledger_of(store)
    ledger.finish_updates()
    when, generation = ledger.committed
    if when == ledger.num_changes:
        return generation
    if store.path is None:
        raise GenerationError("this store has no folder to save to: open_store(path=...) or open_store(nvme=[...])")
    changes = ledger.num_changes
    mark = secrets.token_hex(16)
    commit = store.commit({"embedded": True, "changes": changes, _MARK: mark})
    commit.wait()
    ledger.mark = mark
    ledger.committed = (changes, commit.generation)
    return commit.generation


def load_state(optimizer: TieredOptimizer, state_dict: Mapping[str, Any]) -> None:
    """Bring back groups, steps and the contents of the store; see ``TieredOptimizer.load_state_dict``."""
    groups = state_dict["param_groups"]
    _check_groups(optimizer, groups)
    ledger_of(optimizer.store).finish_updates()  # what was trained stays, should loading fail
    if "tiered" in state_dict:
        record = state_dict["tiered"]
        _load_generation(optimizer, record)
        parameters = _parameters(optimizer)
        optimizer.steps = {parameters[number]: count for number, count in record["steps"].items()}
    else:
        _load_tensors(optimizer, state_dict["state"])
    optimizer.zero_grad()
    for state_group in optimizer.groups:
        if isinstance(state_group, UntieredGroup):
            state_group.doubt_masters()
    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        group.update((name, value) for name, value in saved.items() if name != "params")


def _load_generation(optimizer: TieredOptimizer, record: Mapping[str, Any]) -> None:
    store = optimizer.store
    ledger = ledger_of(store)
    if record["format"] > _FORMAT:
        raise ValueError(f"this state was saved by a newer version (format {record['format']}): update megatrain-tier")
    generation = record["generation"]
    if generation is None:
        if ledger.num_changes:
            raise ValueError("this state is that before the first step, which was not kept: start anew")
        return
    if ledger.committed == (ledger.num_changes, generation) and record["mark"] == ledger.mark:
        return
    if record["blocks"] != _fingerprint(store):
        raise ValueError(
            f"generation {generation} of {record['store']} is of other parameters or another kind of optimizer: make "
            "model, freezing and optimizer as they were when it was saved"
        )
    path = _find_generation(store, record)
    if store.path is not None and path == Path(store.path).resolve():
        store.load(generation)
    else:
        _read_foreign(store, path, generation)
    for group in optimizer.groups:
        if isinstance(group, TieredGroup):
            group.weights.missing.clear()
            group.weights.version += 1
    ledger.num_changes += 1
    ledger.committed, ledger.mark = (ledger.num_changes, generation), record["mark"]


def _find_generation(store: TieredStore, record: Mapping[str, Any]) -> Path:
    """Return the folder with the very generation that was saved: this store's, else the one that it was saved in.

    Raises:
        GenerationError: it is in neither.
    """
    generation = record["generation"]
    looked = []
    for path in dict.fromkeys(Path(path).resolve() for path in (store.path, record["store"]) if path is not None):
        try:
            manifest = read_manifest(path, generation)
        except GenerationError as error:
            looked.append(f"{path}: {error}")
            continue
        if manifest.meta.get(_MARK) == record["mark"]:
            return path
        looked.append(f"{path} has another generation {generation}, of another run")
    raise GenerationError(
        f"the optimizer's state names generation {generation} of {record['store']}, which is not there: "
        f"{'; '.join(looked)}. It goes when more checkpoints were made than open_store(keep_generations=...) keeps; if "
        "its folder was moved, open the store there"
    )


def _read_foreign(store: TieredStore, path: Path, generation: int) -> None:
    """Fill all durable blocks from a generation that another store wrote."""
    reader = GenerationReader(path, generation, [path])
    homes = {spec.key: spec.home for spec in store.blocks() if spec.durable}
    for key, home in homes.items():
        with store.acquire(key, "ram", "w") as lease:
            reader.read(key, lease.tensor)
        if home != "ram":
            store.evict(key, "ram")


@torch.no_grad()
def _load_tensors(optimizer: TieredOptimizer, state: Mapping[int, Mapping[str, Any]]) -> None:
    """Take over the state of torch's own optimizer of this kind."""
    parameters, names = _parameters(optimizer), optimizer.torch_names()
    if state and not names:
        raise ValueError(f"{type(optimizer).__name__} cannot take over the state of another optimizer")
    for number, values in state.items():
        for torch_name in names.values():
            numbers, shape = values.get(torch_name), tuple(parameters[number].shape)
            if numbers is not None and (not isinstance(numbers, Tensor) or tuple(numbers.shape) != shape):
                raise ValueError(f"{torch_name} of parameter {number} has not the shape {shape}")
    for number, parameter in enumerate(parameters):
        values = state.get(number, {})
        if not values and parameter not in optimizer.steps:
            continue
        group, name = _find(optimizer, parameter)
        (entry,) = group.entries({name: None})
        for kind, torch_name in names.items():
            if kind in group.keys:
                numbers = values.get(torch_name)
                with optimizer.store.acquire(group.keys[kind], "ram", "rw") as lease:
                    part = group.part(kind, lease.tensor, entry)
                    part.zero_() if numbers is None else part.copy_(numbers.reshape(-1))
        optimizer.steps.pop(parameter, None)
        if values:
            optimizer.steps[parameter] = int(values.get("step", 0))
    ledger_of(optimizer.store).num_changes += 1


def _check_groups(optimizer: TieredOptimizer, groups: Sequence[Mapping[str, Any]]) -> None:
    now = [len(group["params"]) for group in optimizer.param_groups]
    saved = [len(group["params"]) for group in groups]
    if now != saved:
        raise ValueError(f"the saved state has groups of {saved} parameters, this optimizer of {now}")
    for name in (name for group in groups for name in UNSUPPORTED if group.get(name)):
        raise ValueError(f"the saved state is of an optimizer with {name}: the tiered optimizers have no such variant")


def _find(optimizer: TieredOptimizer, parameter: nn.Parameter) -> tuple[StateGroup, str]:
    for group in optimizer.groups:
        for name, own in group.parameters.items():
            if own is parameter:
                return group, name
    raise KeyError("this parameter is frozen, or belongs to another optimizer")


def _parameters(optimizer: TieredOptimizer) -> list[nn.Parameter]:
    return [parameter for group in optimizer.param_groups for parameter in group["params"]]


def _numbers(optimizer: TieredOptimizer) -> dict[int, int]:
    return {id(parameter): number for number, parameter in enumerate(_parameters(optimizer))}


def _fingerprint(store: TieredStore) -> str:
    """Return what tells the durable blocks of a store from those of another: keys, shapes, dtypes."""
    specs = sorted((spec.key, tuple(spec.shape), str(spec.dtype)) for spec in store.blocks() if spec.durable)
    return hashlib.sha256(repr(specs).encode()).hexdigest()[:16]
