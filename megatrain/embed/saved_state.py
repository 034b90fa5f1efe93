"""Saves and loads optimizer state, either as a generation of the store or as tensors with torch's names."""

from __future__ import annotations

import hashlib
import logging
import os
import secrets
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from megatrain.base.layout import TensorEntry
from megatrain.embed.block_homes import mapped_copy, shared_state
from megatrain.embed.groups import StateGroup
from megatrain.embed.stores import num_ranks, this_rank
from megatrain.optim.average import EMA
from megatrain.optim.moments import decode_moments, encode_moments, is_signed
from megatrain.ranks.dtensors import is_dtensor, is_unsharded, local_shard, make_dtensor
from tiered import GenerationReader, TieredStore, list_generations, read_manifest
from tiered.errors import GenerationError

_log = logging.getLogger(__name__)

#: Format version of ``SavedState.record``.
_FORMAT = 1
#: Key of a record's random text, which distinguishes generations with the same number.
_MARK = "mark"
#: Name of the fp32 master in saved tensors. Saved only for bf16 parameters, which are just the master's high half.
_MASTER = "master"


class _SavedOptimizer(Protocol):
    """Interface of an optimizer whose state can be saved.

    Attributes:
        groups: Groups of parameters that have state. The parameters of a group share blocks.
        steps: Number of updates of each parameter. Parameters that were never updated are missing.
    """

    groups: Sequence[StateGroup]
    steps: dict[nn.Parameter, int]
    torch_names: Mapping[str, str]

    @property
    def store(self) -> TieredStore: ...

    @property
    def saves_tensors(self) -> bool: ...

    def parameters(self) -> list[nn.Parameter]: ...

    def torch_names_of(self, parameter: nn.Parameter) -> Mapping[str, str]: ...

    def state_of(self, parameter: nn.Parameter) -> dict[str, Any]: ...


class SavedState:
    """Saver and loader for the state of one optimizer."""

    def __init__(self, optimizer: _SavedOptimizer) -> None:
        self._optimizer = optimizer

    @property
    def _store(self) -> TieredStore:
        return self._optimizer.store

    def record(self) -> dict[str, Any]:
        """Return a record of a committed generation with the weights and state. Loading verifies the record.

        If anything has changed since the last commit, this commits a generation. On return, the generation survives a
        power failure.

        Raises:
            GenerationError: The store has no folder.
            TransferError: A drive reported an error.
        """
        generation = _commit_changes(self._store)
        indices = {id(parameter): index for index, parameter in enumerate(self._optimizer.parameters())}
        return {
            "format": _FORMAT,
            "store": None if self._store.path is None else os.path.abspath(self._store.path),
            "generation": generation,
            "mark": shared_state(self._store).mark,
            "blocks": _fingerprint(self._store),
            "steps": {indices[id(parameter)]: count for parameter, count in self._optimizer.steps.items()},
            "shards": self._shards,
        }

    def load_generation(self, record: Mapping[str, Any]) -> None:
        """Load weights, state and step counts from the generation that ``record`` describes."""
        if record["format"] > _FORMAT:
            raise ValueError(
                f"this state was saved by a newer version (format {record['format']}): update megatrain-tier"
            )
        if (shards := record.get("shards")) != self._shards:
            raise ValueError(
                f"this state names a generation of {_owner_of(shards)}, but this is {_owner_of(self._shards)}. Each "
                "rank can load only its own state, with the same number of ranks. For checkpoints that any number of "
                f'ranks can load, create {type(self._optimizer).__name__} with checkpoint="tensors"'
            )
        self._load_blocks(record)
        parameters = self._optimizer.parameters()
        self._optimizer.steps.clear()
        self._optimizer.steps.update((parameters[index], count) for index, count in record["steps"].items())

    def _load_blocks(self, record: Mapping[str, Any]) -> None:
        store, shared = self._store, shared_state(self._store)
        generation = record["generation"]
        if generation is None:
            if shared.num_changes:
                raise ValueError("this state is from before the first step and contains no values. Start again")
            return
        if shared.last_commit == (shared.num_changes, generation) and record["mark"] == shared.mark:
            return
        if record["blocks"] != _fingerprint(store):
            raise ValueError(
                f"generation {generation} of {record['store']} has different parameters or a different kind of "
                "optimizer. Create the same model, frozen parameters and optimizer as when it was saved"
            )
        path = _find_generation(store, record)
        if store.path is not None and path == Path(store.path).resolve():
            store.load(generation)
        else:
            _read_foreign(store, path, generation)
        for group in self._optimizer.groups:
            group.handle_loaded_state(with_weights=True)
        shared.note_change()
        shared.last_commit, shared.mark = (shared.num_changes, generation), record["mark"]

    @property
    def _shards(self) -> list[int] | None:
        """Return [rank, number of ranks] if the store's blocks contain shards of this rank, otherwise None."""
        shard = next((group.state.shard for group in self._optimizer.groups if group.state.shard is not None), None)
        if shard is not None:
            return [shard.index, shard.count]
        is_sharded = any(is_dtensor(p) and not is_unsharded(p) for p in self._optimizer.parameters())
        return [this_rank(), num_ranks()] if is_sharded else None

    def tensors_of(self, parameter: nn.Parameter, *, with_master: bool = False) -> dict[str, Any]:
        """Return copies of a parameter's state under torch's names. Before the first update, they are zeros.

        Args:
            with_master: Whether to include the fp32 master if the parameter is only its high half.
        """
        group, entry = self.group_of(parameter)
        state: dict[str, Any] = {"step": torch.tensor(float(self._optimizer.steps.get(parameter, 0)))}
        for name, kind in group.state.kinds.items():
            if name not in ("weight", "low") and kind.granularity == 1 and kind.length_of(entry):
                moment = self._read_moment(group, name, entry)
                if kind.elements_of is None or name in self._optimizer.torch_names:
                    moment = moment.view(entry.shape)
                    moment = make_dtensor(moment, parameter) if is_dtensor(parameter) else moment
                state[self._optimizer.torch_names_of(parameter).get(name, name)] = moment
        if with_master and "low" in group.state.keys and not group.is_offloaded:
            master = group.read_master(entry).view(entry.shape)
            state[_MASTER] = make_dtensor(master, parameter) if is_dtensor(parameter) else master
        return state

    def load_tensors(self, state: Mapping[int, Mapping[str, Any]]) -> None:
        """Load state tensors that this class or torch's equivalent optimizer saved."""
        parameters = self._optimizer.parameters()
        if state and not self._optimizer.torch_names:
            raise ValueError(f"{type(self._optimizer).__name__} cannot load the state of a different optimizer")
        for index, values in state.items():
            for torch_name in (*self._optimizer.torch_names_of(parameters[index]).values(), EMA.name):
                tensor, shape = values.get(torch_name), tuple(parameters[index].shape)
                if tensor is not None and (not isinstance(tensor, Tensor) or tuple(tensor.shape) != shape):
                    raise ValueError(f"{torch_name} of parameter {index} does not have the shape {shape}")
                if tensor is not None:
                    _check_same_sharding(f"{torch_name} of parameter {index}", tensor, parameters[index])
        for index, parameter in enumerate(parameters):
            values = state.get(index, {})
            if not values and parameter not in self._optimizer.steps:
                continue
            group, entry = self.group_of(parameter)
            for kind, torch_name in self._optimizer.torch_names_of(parameter).items():
                if kind in group.state.keys:
                    tensor = values.get(torch_name)
                    flat = None if tensor is None else _flatten_local(tensor)
                    self._set_moment(group, kind, entry, flat)
            if "low" in group.state.keys and isinstance(master := values.get(_MASTER), Tensor):
                self._set_master(group, entry, _flatten_local(master))
            if group.has_averages:
                average = values.get(EMA.name)
                if average is None:  # saved without averages, so the average starts at the master
                    average = group.read_master(entry)
                self._set_moment(group, EMA.name, entry, _flatten_local(average))
            self._optimizer.steps.pop(parameter, None)
            if values:
                self._optimizer.steps[parameter] = int(values.get("step", 0))
        shared_state(self._store).note_change()

    def group_of(self, parameter: nn.Parameter) -> tuple[StateGroup, TensorEntry]:
        """Return a parameter's group and layout entry. Raise ``TypeError`` if this rank stores only a shard."""
        for group in self._optimizer.groups:
            for name, member in group.parameters.items():
                if member is parameter and group.state.shard is not None:
                    raise TypeError(
                        f"this rank has only a shard of the state of {group.layout.name}. Use state_dict() and "
                        "load_state_dict() on each rank"
                    )
                if member is parameter:
                    return group, next(group.entries({name: None}))
        raise KeyError("this parameter is frozen, or belongs to another optimizer")

    def _set_master(self, group: StateGroup, entry: TensorEntry, values: Tensor) -> None:
        """Replace a master's low half, and its high half if the store contains it. ``values`` is flat."""
        bits = values.view(torch.int32)
        with group.state.lease("low", "rw") as lease:
            group.state.view("low", lease.tensor, entry).copy_(bits.to(torch.int16))  # to() keeps the lower 16 bits
        if "weight" in group.state.keys:
            high_half = ((bits + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16)
            with group.state.lease("weight", "rw") as lease:
                group.state.view("weight", lease.tensor, entry).copy_(high_half)

    def _read_moment(self, group: StateGroup, kind: str, entry: TensorEntry) -> Tensor:
        """Return a flat fp32 copy of a parameter's state of the given kind."""
        with group.state.lease(kind) as lease:
            part = group.state.view(kind, lease.tensor, entry)
            if part.dtype != torch.uint8:
                return mapped_copy(part.float(), self._store)
            with group.state.lease(f"{kind}_scale") as scales:
                scale = group.state.view(f"{kind}_scale", scales.tensor, entry)
                return mapped_copy(decode_moments(part, scale, is_signed(kind)), self._store)

    def _set_moment(self, group: StateGroup, kind: str, entry: TensorEntry, values: Tensor | None) -> None:
        """Set a parameter's state of the given kind, rounded to nearest. ``values`` is flat, or None for zeros."""
        with group.state.lease(kind, "rw") as lease:
            part = group.state.view(kind, lease.tensor, entry)
            if part.dtype != torch.uint8:
                part.zero_() if values is None else part.copy_(values)
                return
            codes, scales = encode_moments(torch.zeros(entry.numel) if values is None else values, is_signed(kind))
            part.copy_(codes)
            with group.state.lease(f"{kind}_scale", "rw") as scale_lease:
                group.state.view(f"{kind}_scale", scale_lease.tensor, entry).copy_(scales)


def _check_same_sharding(name: str, values: Tensor, parameter: nn.Parameter) -> None:
    """Raise ``ValueError`` if loaded state and its parameter are sharded differently."""
    if is_dtensor(parameter) != is_dtensor(values):
        raise ValueError(
            f"{name} is {'a DTensor' if is_dtensor(values) else 'an ordinary tensor'}, but the parameter is not. Load "
            "it with set_optimizer_state_dict of torch.distributed.checkpoint.state_dict, which shards it"
        )
    if is_dtensor(parameter) and is_dtensor(values):
        loaded, target = (values.device_mesh, values.placements), (parameter.device_mesh, parameter.placements)
        if loaded != target:
            raise ValueError(
                f"{name} has the placements {loaded[1]} on {loaded[0]}, the parameter has {target[1]} on {target[0]}. "
                "Redistribute it, or load it with torch.distributed.checkpoint, which redistributes"
            )


def _flatten_local(values: Tensor) -> Tensor:
    """Return this process's shard of a loaded tensor as a flat fp32 tensor in RAM."""
    return local_shard(values.detach()).reshape(-1).to("cpu", torch.float32)


def _owner_of(shards: Sequence[int] | None) -> str:
    """Describe the owner of a generation, for error messages."""
    return "one whole model" if shards is None else f"rank {shards[0]} of {shards[1]}"


def _commit_changes(store: TieredStore) -> int | None:
    """Return the number of a generation with the current contents, or None if nothing was ever changed.

    Deferred updates of all optimizers in the store are applied first. If contents changed since the last commit, a
    generation is committed. The returned generation survives a power failure.
    """
    shared = shared_state(store)
    for optimizer in shared.optimizers:
        optimizer.check_not_averaged("state_dict() of an optimizer in this store")
    shared.finish_updates()
    num_changes, generation = shared.last_commit
    if num_changes == shared.num_changes:
        return generation
    if store.path is None:
        raise GenerationError("this store has no folder to save to. Use open_store(path=...) or open_store(nvme=[...])")
    if generation is None and (old_generations := list_generations(store.path)):
        _log.warning(
            "'%s' contains generations %s of an earlier program, which this program has not loaded. New checkpoints "
            "replace them. To keep them, stop now and open the store in another folder. To resume from one, load it "
            "with load_state_dict",
            store.path,
            ", ".join(map(str, old_generations)),
        )
    changes = shared.num_changes
    mark = secrets.token_hex(16)
    commit = store.commit({"embedded": True, "changes": changes, _MARK: mark})
    commit.wait()
    shared.mark = mark
    shared.last_commit = (changes, commit.generation)
    return commit.generation


def _find_generation(store: TieredStore, record: Mapping[str, Any]) -> Path:
    """Return the folder that contains the recorded generation: in this store, or in the store that saved it.

    Raises:
        GenerationError: Neither folder contains the generation.
    """
    generation = record["generation"]
    reasons = []
    for path in dict.fromkeys(Path(path).resolve() for path in (store.path, record["store"]) if path is not None):
        try:
            manifest = read_manifest(path, generation)
        except GenerationError as error:
            reasons.append(f"{path}: {error}")
            continue
        if manifest.meta.get(_MARK) == record["mark"]:
            return path
        reasons.append(f"{path} has a generation {generation} of a different run")
    raise GenerationError(
        f"the optimizer's state names generation {generation} of {record['store']}, which does not exist: "
        f"{'; '.join(reasons)}. A store keeps only its newest generations, see open_store(keep_generations=...). If "
        "its folder was moved, open the store at the new path"
    )


def _read_foreign(store: TieredStore, path: Path, generation: int) -> None:
    """Fill all durable blocks of a store with the contents of another store's generation."""
    reader = GenerationReader(path, generation, [path])
    homes = {spec.key: spec.home for spec in store.blocks() if spec.durable}
    for key, home in homes.items():
        with store.acquire(key, "ram", "w") as lease:
            reader.read(key, lease.tensor)
        if home != "ram":
            store.evict(key, "ram")


def _fingerprint(store: TieredStore) -> str:
    """Return a checksum of the keys, shapes and dtypes of all durable blocks."""
    specs = sorted((spec.key, tuple(spec.shape), str(spec.dtype)) for spec in store.blocks() if spec.durable)
    return hashlib.sha256(repr(specs).encode()).hexdigest()[:16]


class StoredState(MutableMapping[nn.Parameter, dict[str, Any]]):
    """The ``state`` of an optimizer. It looks empty, so that trainers do not move it. Reading an item returns copies.

    Items cannot be set; load a ``state_dict`` instead. If ``bool(state)`` were False, ``torch.distributed.checkpoint``
    would create state by taking a step with zero gradients, which would change existing moments.
    """

    def __init__(self, optimizer: _SavedOptimizer) -> None:
        self._optimizer = optimizer

    def __getitem__(self, parameter: nn.Parameter) -> dict[str, Any]:
        return self._optimizer.state_of(parameter)

    def __setitem__(self, parameter: nn.Parameter, state: dict[str, Any]) -> None:
        raise TypeError("the state is in the store. Use optimizer.load_state_dict")

    def __delitem__(self, parameter: nn.Parameter) -> None:
        raise TypeError("the state is in the store and cannot be removed")

    def __bool__(self) -> bool:
        if not self._optimizer.saves_tensors:
            raise TypeError(
                "state_dict() of this optimizer names a generation of its store, which "
                "torch.distributed.checkpoint cannot save. Create the optimizer with "
                f'checkpoint="tensors" ({type(self._optimizer).__name__}), or save its state_dict() on each rank'
            )
        return True

    def __iter__(self) -> Iterator[nn.Parameter]:
        return iter(())

    def __len__(self) -> int:
        return 0
