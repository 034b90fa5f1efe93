"""What an optimizer's ``state_dict`` says about the store, and how it is brought back."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from megatrain.embed.groups import StateGroup, TieredGroup
from megatrain.embed.model_methods import mapped_copy
from megatrain.embed.stores import ledger_of
from tiered.errors import GenerationError
from tiered.reader import GenerationReader

if TYPE_CHECKING:
    from megatrain.embed.optimizer import TieredOptimizer
    from tiered.store import TieredStore

__all__ = ["StoredState", "commit_changes", "load_state", "save_state"]

_FORMAT = 1


class StoredState(MutableMapping[nn.Parameter, dict[str, Any]]):
    """``optimizer.state``: nothing is kept here, so that nobody moves it; what is asked for is read from the store.

    ``state[parameter]`` gives copies, under the names of torch's optimizer, in files without a name. It cannot be set:
    load a ``state_dict`` instead. Iterating finds nothing.
    """

    def __init__(self, optimizer: TieredOptimizer) -> None:
        self._optimizer = optimizer

    def __getitem__(self, parameter: nn.Parameter) -> dict[str, Any]:
        optimizer = self._optimizer
        if parameter not in optimizer.steps:
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
    return {
        "format": _FORMAT,
        "store": optimizer.store.path,
        "generation": commit_changes(optimizer.store),
        "blocks": _fingerprint(optimizer.store),
        "steps": {numbers[id(parameter)]: count for parameter, count in optimizer.steps.items()},
    }


def commit_changes(store: TieredStore) -> int | None:
    """Return the generation that holds the present state, made now if there is none; None: nothing was changed yet.

    Updates that are due must have been made. Returns when it would survive a power cut.

    Raises:
        GenerationError: the store has no folder. TransferError: a drive refused.
    """
    ledger = ledger_of(store)
    when, generation = ledger.committed
    if when == ledger.num_changes:
        return generation
    if store.path is None:
        raise GenerationError("this store has no folder to save to: open_store(path=...) or open_store(nvme=[...])")
    changes = ledger.num_changes
    commit = store.commit({"embedded": True, "changes": changes})
    commit.wait()
    ledger.committed = (changes, commit.generation)
    return commit.generation


def load_state(optimizer: TieredOptimizer, state_dict: Mapping[str, Any]) -> None:
    """Bring back groups, steps and the contents of the store; see ``TieredOptimizer.load_state_dict``."""
    _check_groups(optimizer, state_dict)
    if "tiered" in state_dict:
        record = state_dict["tiered"]
        _load_generation(optimizer, record)
        parameters = _parameters(optimizer)
        optimizer.steps = {parameters[number]: count for number, count in record["steps"].items()}
    else:
        _load_tensors(optimizer, state_dict["state"])
    for group, saved in zip(optimizer.param_groups, state_dict["param_groups"], strict=True):
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
    if ledger.committed == (ledger.num_changes, generation) and record["store"] == store.path:
        return
    if record["blocks"] != _fingerprint(store):
        raise ValueError(
            f"generation {generation} of {record['store']} is of other parameters or another kind of optimizer: make "
            "model, freezing and optimizer as they were when it was saved"
        )
    try:
        if store.path is not None and Path(record["store"]).resolve() == Path(store.path).resolve():
            store.load(generation)
        else:
            _read_foreign(store, Path(record["store"]), generation)
    except GenerationError as error:
        raise GenerationError(
            f"{error}. The optimizer's state_dict names generation {generation} of {record['store']}; it is gone if "
            "more checkpoints were made than open_store(keep_generations=...) keeps"
        ) from error
    for group in optimizer.groups:
        if isinstance(group, TieredGroup):
            group.weights.missing.clear()
    ledger.num_changes += 1
    ledger.committed = (ledger.num_changes, generation)


def _read_foreign(store: TieredStore, path: Path, generation: int) -> None:
    """Fill all durable blocks from a generation that another store wrote."""
    reader = GenerationReader(path, generation, [])
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
        parameter = parameters[number]
        group, name = _find(optimizer, parameter)
        (entry,) = group.entries({name: None})
        for kind, torch_name in names.items():
            numbers = values.get(torch_name)
            if numbers is None:
                continue
            if not isinstance(numbers, Tensor) or numbers.shape != parameter.shape:
                raise ValueError(f"{torch_name} of parameter {number} has not the shape {tuple(parameter.shape)}")
            with optimizer.store.acquire(group.keys[kind], "ram", "rw") as lease:
                group.part(kind, lease.tensor, entry).copy_(numbers.reshape(-1))
        optimizer.steps[parameter] = int(values.get("step", 0))
    ledger_of(optimizer.store).num_changes += 1


def _check_groups(optimizer: TieredOptimizer, state_dict: Mapping[str, Any]) -> None:
    now = [len(group["params"]) for group in optimizer.param_groups]
    saved = [len(group["params"]) for group in state_dict["param_groups"]]
    if now != saved:
        raise ValueError(f"the saved state has groups of {saved} parameters, this optimizer of {now}")


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
