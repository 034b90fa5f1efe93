"""AdamW, Lion, SGD and Adafactor of torch's interface, with their state in a tiered store."""

from __future__ import annotations

import hashlib
import math
import os
import secrets
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from megatrain.embed.groups import (
    DeviceCopies,
    InterruptedUpdateError,
    Settings,
    StateGroup,
    TieredGroup,
    UntieredGroup,
    UpdatesBehind,
    UpdatesInRam,
    Work,
    norms_in_ram,
    take_gradients,
    update_in_order,
)
from megatrain.embed.partition import mark_optimized
from megatrain.embed.stores import home_order, ledger_of, room_for_homes
from megatrain.embed.tier import mapped_copy
from megatrain.embed.weights import WeightInUseError, block_of
from megatrain.engine.step import NonFiniteGradientError
from megatrain.models.layout import build_layout
from megatrain.optim.adafactor import Adafactor
from megatrain.optim.base import Optimizer as Arithmetic
from megatrain.optim.clip import clip_coefficient, global_norm
from megatrain.optim.elementwise import SGD, AdamW, Lion
from megatrain.optim.threads import KernelThreads
from tiered import GenerationReader, read_manifest
from tiered.errors import CapacityError, GenerationError, TieredError

if TYPE_CHECKING:
    from megatrain.optim.base import Optimizer, StateKind
    from tiered import TieredStore

__all__ = [
    "BYTES_AT_ONCE",
    "UNSUPPORTED",
    "InterruptedUpdateError",
    "NotCopied",
    "StoredState",
    "TieredAdafactor",
    "TieredAdamW",
    "TieredLion",
    "TieredOptimizer",
    "TieredSGD",
    "check_room",
    "check_settings",
    "commit_changes",
    "load_state",
    "packed",
    "plain",
    "release",
    "save_state",
    "settings_of",
]

#: Settings of torch's optimizers that change what an update does, and that there is no kernel for.
UNSUPPORTED = ("amsgrad", "maximize", "differentiable", "dampening")
#: Per parameter: state and gradient of the group that is updated, and of the one that is fetched meanwhile.
BYTES_AT_ONCE = 2 * (12 + 4)
_GROUP_ELEMENTS = (1 << 19, 1 << 24)
"""Ordinary parameters are put together up to the size of the largest one, for which there must be room anyway; but up
to 2 MiB of each kind of state in fp32 in any case, and not beyond 64 MiB. That does not depend on the size of the
tiers, so that a state can be loaded where they are others."""


class NotCopied:
    """An object of which the store holds a part: there is one of it."""

    def __deepcopy__(self, memo: Any) -> Any:
        """Refuse: the state is in the store once."""
        raise TypeError("an optimizer with its state in a store cannot be copied: make another, load its state_dict()")

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse: ``state_dict`` is what can be saved."""
        raise TypeError("an optimizer with its state in a store cannot be pickled: save its state_dict()")


def check_room(store: TieredStore, groups: Sequence[StateGroup]) -> None:
    """Refuse now what the first step would.

    Raises:
        CapacityError: RAM cannot hold what an update of some group needs at once, beside the homes there.
    """
    ram, room = store.tier("ram"), room_for_homes(store, "ram")
    known = {spec.key: spec for spec in store.blocks()}
    for group in groups:
        specs = [known[key] for key in group.keys_at_once()]
        need = sum(ram.slot_bytes(spec.nbytes) for spec in specs if spec.home != "ram")
        if need > room:
            raise CapacityError(
                "ram",
                need,
                max(0, room),
                detail=f"to update {group.layout.name} with its state and gradient. Give ram more room",
            )


def check_settings(param_group: Mapping[str, Any]) -> None:
    """Refuse settings of a group that make no sense, and parameters that have no master weights.

    Raises:
        ValueError: with what, and what to do.
    """
    for name in UNSUPPORTED:
        if param_group.get(name):
            raise ValueError(f"{name}={param_group[name]}: the tiered optimizers have no such variant")
    for name in ("lr", "weight_decay", "eps", "momentum"):
        if name in param_group and not float(param_group[name]) >= 0:
            raise ValueError(f"{name}={param_group[name]}: it cannot be below 0")
    for beta in param_group.get("betas", ()):
        if not 0 <= float(beta) < 1:
            raise ValueError(f"betas={tuple(param_group['betas'])}: each lies from 0 up to below 1")
    for parameter in param_group["params"]:
        if parameter.requires_grad and parameter.dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"a parameter is {parameter.dtype}; master weights exist for float32 and bfloat16")
        if parameter.requires_grad and parameter.device.type == "meta":
            raise ValueError("a parameter is on the meta device: load its weights first, or tier the module")


def settings_of(
    taken: Sequence[tuple[StateGroup, Mapping[str, object]]],
    param_groups: Iterable[Mapping[str, Any]],
    arithmetic_of: Callable[[Mapping[str, Any]], Optimizer],
    steps: Mapping[nn.Parameter, int],
) -> tuple[dict[int, Settings], list[tuple[nn.Parameter, int]]]:
    """Return how each parameter with a gradient is updated, by its id, and which step of its own that is.

    Parameters of a group that are at the same step share one object.

    Args:
        taken: groups of state, with the names that have a gradient.
        steps: that were made before.

    Raises:
        ValueError: a setting was changed to one that needs state which was never made.
    """
    with_gradient = {id(group.parameters[name]) for group, names in taken for name in names}
    found: dict[int, Settings] = {}
    counted: list[tuple[nn.Parameter, int]] = []
    for param_group in param_groups:
        own = [parameter for parameter in param_group["params"] if id(parameter) in with_gradient]
        arithmetic, lr = arithmetic_of(param_group), float(param_group["lr"])
        decay = float(param_group.get("weight_decay", 0.0))
        _check_state({kind.name for kind in arithmetic.state_kinds(False)} - {"weight"}, own, taken)
        counts = [steps.get(parameter, 0) + 1 for parameter in own]
        at_step = {step: Settings(arithmetic, step, lr, decay) for step in set(counts)}
        counted.extend(zip(own, counts, strict=True))
        found.update(zip(map(id, own), map(at_step.__getitem__, counts), strict=True))
    return found, counted


def _check_state(
    needed: set[str], parameters: Iterable[nn.Parameter], taken: Iterable[tuple[StateGroup, Mapping[str, object]]]
) -> None:
    for group, _ in taken:
        missing = needed - group.kinds.keys()
        if missing and not {id(p) for p in group.parameters.values()}.isdisjoint(map(id, parameters)):
            raise ValueError(
                f"no {', '.join(sorted(missing))} is kept of a parameter of this group: its settings were others when "
                "its state was made. Give them to the constructor"
            )


def packed(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Put ordinary parameters together that are alike in dtype and device, up to a size."""
    together: list[nn.Parameter] = []
    fewest, most = _GROUP_ELEMENTS
    limit = max(fewest, min(most, max((parameter.numel() for parameter in parameters), default=0)))
    for parameter in parameters:
        if together:
            alike = (parameter.dtype, parameter.device) == (together[0].dtype, together[0].device)
            if not alike or sum(p.numel() for p in together) + parameter.numel() > limit:
                yield together
                together = []
        together.append(parameter)
    if together:
        yield together


def plain(value: Any) -> Any:
    """Return a setting as numbers that can be compared."""
    return tuple(float(one) for one in value) if isinstance(value, list | tuple) else float(value)


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


#: Objects with settings of groups that are kept.
_MAX_ARITHMETICS = 64


class TieredOptimizer(NotCopied, torch.optim.Optimizer):
    """A ``torch.optim.Optimizer`` with its state in a store: 12 bytes per parameter, weights included, for AdamW.

    Takes parameters of tiered modules and ordinary ones, also together. Arithmetic is that of ``megatrain-tier run``:
    an fp32 master (a bf16 parameter's continues in the store), the same bits whatever the placement. ``step`` clips
    by the exact global norm, makes the update of ordinary parameters, and leaves that of a tiered unit to its next
    forward, where it runs beside the fetching of the next one; whoever reads weights before gets it made first.
    Parameter groups, LR schedulers and closures work as in torch; a parameter without a gradient is left alone.

    Args:
        params: as for any optimizer.
        defaults: settings of the groups that do not give their own.
        store: of the state; default: that of the parameters, where they are tiered.
        max_grad_norm: largest global norm that is let through; 0: no clipping. ``grad_norm`` then tells the norm.
        nonfinite: with clipping, what a NaN or infinite norm does: "stop" raises and changes nothing, "skip" leaves the
            update out, "ignore" uses it as torch does.
        offload_gradients: gradients of ordinary parameters leave for the store as autograd makes them, and are summed
            there in fp32 over backward passes.
        overlap: a model of ordinary parameters: ``step`` returns before their updates are made, and each of its modules
            waits for its own; see ``UpdatesBehind``. Gradients are then consumed.
        state: tiers that state may live in, most wanted first; "auto": RAM while there is room, then drives.
        name: of the blocks of ordinary parameters; a second optimizer in one store needs another.

    Raises:
        ValueError: a setting out of range, no store, or a dtype without master weights.
        CapacityError: no room.
    """

    sees_the_store = True

    def __init__(
        self,
        params: Any,
        defaults: dict[str, Any],
        *,
        store: TieredStore | None,
        max_grad_norm: float = 0.0,
        nonfinite: Literal["stop", "skip", "ignore"] = "stop",
        offload_gradients: bool = False,
        overlap: nn.Module | None = None,
        state: Sequence[str] | str = "auto",
        name: str = "optimizer",
    ) -> None:
        if not max_grad_norm >= 0:
            raise ValueError(f"max_grad_norm={max_grad_norm}: give the largest norm, or 0 for no clipping")
        self.max_grad_norm, self.nonfinite = max_grad_norm, nonfinite
        self.grad_norm: float | None = None
        self._measured: object = None
        self._is_torn = False
        self._behind = None if overlap is None else UpdatesBehind(overlap, self._tear)
        self.threads = KernelThreads(among_operations=True)
        self._in_ram = UpdatesInRam(self.threads)
        self.steps: dict[nn.Parameter, int] = {}
        self.groups: list[StateGroup] = []
        self._with_state: set[int] = set()  # ids of the parameters of all groups
        self._name, self._offload, self._homes = name, offload_gradients, state
        self._copies = DeviceCopies()
        self._store = store
        self._due: dict[TieredGroup, Work] = {}
        self._arithmetics: dict[tuple[Any, ...], Arithmetic] = {}
        super().__init__(params, defaults)
        if self._store is None:
            raise ValueError("these parameters are in no store: give store=megatrain.open_store(...)")
        ledger_of(self._store).optimizers.add(self)
        self.state = StoredState(self)  # type: ignore[assignment]

    @property
    def store(self) -> TieredStore:
        """The store of the state."""
        assert self._store is not None
        return self._store

    @abstractmethod
    def make_arithmetic(self, settings: Mapping[str, Any]) -> Arithmetic:
        """Return the update rule for the settings of a group."""

    @abstractmethod
    def setting_names(self) -> tuple[str, ...]:
        """Names of the settings that ``make_arithmetic`` looks at."""

    @abstractmethod
    def torch_names(self) -> Mapping[str, str]:
        """Return kind of state -> its name in the ``state_dict`` of torch's optimizer of this kind."""

    def widest(self, settings: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return settings of a group that need all the state which any group may need."""
        return settings

    # -- parameters --------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters; their state is made now.

        Raises:
            ValueError: as for the constructor.
            CapacityError: as for the constructor.
        """
        super().add_param_group(param_group)
        try:
            check_settings(self.param_groups[-1])
            self._make_state(self.param_groups[-1])
        except BaseException:
            self.param_groups.pop()
            raise

    def _make_state(self, param_group: Mapping[str, Any]) -> None:
        """Make the state of the parameters of a group that have none yet and are trained; all of it or nothing."""
        new = [p for p in param_group["params"] if id(p) not in self._with_state and p.requires_grad]
        if not new:
            return
        blocks = dict.fromkeys(block for p in new if (block := block_of(p)) is not None)
        self._store = self._store or next((block.store for block in blocks), None)
        if self._store is None:
            raise ValueError("these parameters are in no store: give store=megatrain.open_store(...)")
        for block in blocks:
            if block.store is not self._store:
                raise ValueError(f"{block.layout.name} is in another store than the optimizer's")
            if block.before_use is not None:
                raise ValueError(
                    f"{block.layout.name} has an optimizer already. Parameters of one layer go to one optimizer; to "
                    "make another for all of them, open a new store"
                )
            block.check_frozen()
        kinds = self._arithmetic(self.widest(param_group)).state_kinds
        homes = home_order(self._store, self._homes)
        num_before = len(self.groups)
        try:
            with ledger_of(self._store).all_or_nothing(self._store):
                for block in blocks:
                    self.groups.append(TieredGroup(block, kinds(block.dtype.itemsize == 2), homes))
                self._make_untiered([p for p in new if block_of(p) is None], kinds, homes)
                check_room(self.store, self.groups)
        except BaseException:
            del self.groups[num_before:]
            raise
        for group in self.groups[num_before:]:
            self._with_state.update(map(id, group.parameters.values()))
            if isinstance(group, TieredGroup):
                self._watch(group)
            else:
                mark_optimized(group.parameters.values(), self)

    def _watch(self, group: TieredGroup) -> None:
        """Let the update that is due be made before anybody uses the weights, or sums up new gradients."""

        def finish() -> None:
            self._finish(group)

        assert group.weights.gradients is not None, group.layout.name
        group.weights.before_use = group.weights.gradients.before_add = finish
        group.weights.after_change = group.reset_low

    def _make_untiered(
        self,
        parameters: Sequence[nn.Parameter],
        kinds: Callable[[bool], Sequence[StateKind]],
        homes: Sequence[str],
    ) -> None:
        first = sum(isinstance(group, UntieredGroup) for group in self.groups)
        if parameters and not first and any(s.key.startswith(f"{self._name}/") for s in self.store.blocks()):
            raise ValueError(f'this store has something of the name "{self._name}": give the optimizer name="..."')
        ledger = ledger_of(self.store)
        packs = list(packed(parameters))
        largest = max((sum(parameter.numel() for parameter in together) for together in packs), default=0)
        ledger.working_bytes = max(ledger.working_bytes, BYTES_AT_ONCE * largest)
        for number, together in enumerate(packs, first):
            named = {f"{number}.{index}": parameter for index, parameter in enumerate(together)}
            root = f"{self._name}/{number:05d}"
            layout = build_layout(root, ((name, parameter.shape) for name, parameter in named.items()), True)
            own = kinds(together[0].dtype.itemsize == 2)
            self.groups.append(
                UntieredGroup(
                    self.store, root, layout, named, own, homes, offload_gradients=self._offload, copies=self._copies
                )
            )

    # -- steps -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Use the gradients for an update. In the store they are consumed; ``.grad`` elsewhere stays, as in torch.

        Args:
            closure: computes loss and gradients anew, as in torch.

        Raises:
            NonFiniteGradientError: see ``nonfinite``. Nothing was changed, gradients are dropped.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.finish_updates()  # of units that nobody has used since
        for param_group in self.param_groups:
            self._make_state(param_group)  # of what was frozen until now
        scale = self._grad_scale()
        if scale is None:
            self.zero_grad()
            if self.nonfinite == "skip":
                return loss
            raise NonFiniteGradientError(
                f"the gradient is not finite (norm {self.grad_norm}); nothing was updated. Lower the learning rate, "
                'look at the data of this step, or construct the optimizer with nonfinite="skip"'
            )
        taken = take_gradients(self.groups)
        all_settings, counts = settings_of(taken, self.param_groups, self._arithmetic, self.steps)
        self.steps.update(counts)
        ledger_of(self.store).num_changes += 1
        works: dict[StateGroup, Work] = {}
        for group, found in taken:
            mine = {name: settings for name in found if (settings := all_settings.get(id(group.parameters[name])))}
            gradients = {name: gradient for name, gradient in found.items() if gradient is not None}
            if mine and isinstance(group, TieredGroup):
                self._due[group] = Work(mine, scale, gradients)
                group.weights.version += 1
            elif mine:
                works[group] = Work(mine, scale, gradients)
        if self._behind is not None:
            self._behind.start(works)
            return loss
        with self._telling_if_torn(is_torn_by_any=True):
            update_in_order(self._in_ram.update(works))
        return loss

    def finish_updates(self) -> None:
        """Make the updates that are still due; afterwards the store holds weights and state after the last step."""
        if self._behind is not None:
            self._behind.finish()
        if self._is_torn:
            self._is_torn = False
            raise InterruptedUpdateError(
                "an update of this optimizer ended halfway, with an error or an interrupt: some weights have made the "
                "step, others not. Load a saved state; or do this again, to go on from here"
            )
        for group in list(self._due):
            self._finish(group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, also those in the store. They become None, whatever ``set_to_none`` says."""
        for group in self.groups:
            if group.gradients is not None:
                group.gradients.clear()
        for param_group in self.param_groups:
            for parameter in param_group["params"]:
                if block_of(parameter) is None:
                    parameter.grad = None

    def _finish(self, group: TieredGroup) -> None:
        work = self._due.get(group)
        if work is not None:
            with self._telling_if_torn():
                group.update(work)
            del self._due[group]

    @contextmanager
    def _telling_if_torn(self, *, is_torn_by_any: bool = False) -> Iterator[None]:
        """Note that an update ended halfway; where the store gave nothing for its first group it has not begun."""
        try:
            yield
        except (TieredError, WeightInUseError):
            self._is_torn = self._is_torn or is_torn_by_any
            raise
        except BaseException:
            self._tear()
            raise

    def _tear(self) -> None:
        self._is_torn = True
        self._due.clear()

    def measure_grad_norm(self) -> float:
        """Return the global norm of the gradients as they are now; the step that follows clips by it.

        For trainers that clip before ``step``; it is measured anew if gradients change in between.
        """
        squares = norms_in_ram([group for group in self.groups if isinstance(group, UntieredGroup)], self.threads)
        for group in self.groups:
            if squares.keys().isdisjoint(group.parameters.values()):
                found = group.squared_norms(self.threads)
                squares.update((group.parameters[name], square) for name, square in found.items())
        # Added up in the order of the optimizer's parameters, so that it does not matter which are tiered.
        ordered = (parameter for param_group in self.param_groups for parameter in param_group["params"])
        self.grad_norm = global_norm(squares[parameter] for parameter in ordered if parameter in squares)
        self._measured = [group.gradients_now() for group in self.groups]  # equal until one comes, changes or goes
        return self.grad_norm

    def _grad_scale(self) -> float | None:
        """Return the factor on all gradients; None where they are not finite and must not be used."""
        if self.max_grad_norm == 0:
            return 1.0
        if self.grad_norm is None or self._measured != [group.gradients_now() for group in self.groups]:
            self.measure_grad_norm()
        self._measured = None
        assert self.grad_norm is not None
        if math.isfinite(self.grad_norm):
            return clip_coefficient(self.grad_norm, self.max_grad_norm)
        return self.max_grad_norm / self.grad_norm if self.nonfinite == "ignore" else None

    def _arithmetic(self, settings: Mapping[str, Any]) -> Arithmetic:
        key = tuple(plain(settings[name]) for name in self.setting_names())
        if key not in self._arithmetics:
            if len(self._arithmetics) >= _MAX_ARITHMETICS:  # a scheduler changes betas in every step
                self._arithmetics.clear()
            self._arithmetics[key] = self.make_arithmetic(settings)
        return self._arithmetics[key]

    # -- saving ------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return groups and the number of a committed generation of the store, which holds weights and state.

        Commits where anything has changed since the last one, and returns when that would survive a power cut. Holds
        no big tensors: ``torch.save`` it where you like, and load it into an optimizer of a store on the same folder.

        Raises:
            GenerationError: the store has no folder (``open_store(path=...)``).
            TransferError: a drive refused.
        """
        self.finish_updates()
        return {**super().state_dict(), "tiered": save_state(self)}

    def full_state_dict(self) -> dict[str, Any]:
        """Return what ``torch.optim``'s optimizer of this kind would: all state, in tensors over files."""
        self.finish_updates()
        packed = super().state_dict()
        numbers = {id(p): n for n, p in enumerate(p for group in self.param_groups for p in group["params"])}
        packed["state"] = {numbers[id(p)]: self.state[p] for p in self.steps}
        packed["param_groups"] = [{**dict.fromkeys(UNSUPPORTED, 0), **group} for group in packed["param_groups"]]
        return packed

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go back to what ``state_dict`` told of, weights of tiered modules included; or take over torch's own state.

        Raises:
            ValueError: the groups do not match, or that generation is gone.
            GenerationError: the store has no such generation, or it is damaged.
            CorruptBlockError: the store has no such generation, or it is damaged.
        """
        load_state(self, state_dict)


class TieredAdamW(TieredOptimizer):
    """AdamW with decoupled weight decay; see ``TieredOptimizer``. Defaults are those of ``torch.optim.AdamW``."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        store: TieredStore | None = None,
        **options: Any,
    ) -> None:
        super().__init__(
            params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay}, store=store, **options
        )

    def setting_names(self) -> tuple[str, ...]:
        return ("betas", "eps")

    def make_arithmetic(self, settings: Mapping[str, Any]) -> Arithmetic:
        beta1, beta2 = settings["betas"]
        return AdamW(float(beta1), float(beta2), float(settings["eps"]), threads=self.threads)

    def torch_names(self) -> Mapping[str, str]:
        return {"m": "exp_avg", "v": "exp_avg_sq"}


class TieredLion(TieredOptimizer):
    """Lion; see ``TieredOptimizer``."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        store: TieredStore | None = None,
        **options: Any,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay}, store=store, **options)

    def setting_names(self) -> tuple[str, ...]:
        return ("betas",)

    def make_arithmetic(self, settings: Mapping[str, Any]) -> Arithmetic:
        beta1, beta2 = settings["betas"]
        return Lion(float(beta1), float(beta2), threads=self.threads)

    def torch_names(self) -> Mapping[str, str]:
        return {"m": "exp_avg"}


class TieredSGD(TieredOptimizer):
    """SGD with momentum; see ``TieredOptimizer``. Defaults are those of ``torch.optim.SGD``."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        momentum: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        store: TieredStore | None = None,
        **options: Any,
    ) -> None:
        defaults = {"lr": lr, "momentum": momentum, "weight_decay": weight_decay, "nesterov": nesterov}
        super().__init__(params, defaults, store=store, **options)

    def setting_names(self) -> tuple[str, ...]:
        return ("momentum", "nesterov")

    def make_arithmetic(self, settings: Mapping[str, Any]) -> Arithmetic:
        return SGD(float(settings["momentum"]), bool(settings["nesterov"]), threads=self.threads)

    def widest(self, settings: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return settings with momentum where the optimizer has any: parameters of several groups share a block."""
        return {**settings, "momentum": max(float(settings["momentum"]), float(self.defaults["momentum"]))}

    def torch_names(self) -> Mapping[str, str]:
        return {"m": "momentum_buffer"}


class TieredAdafactor(TieredOptimizer):
    """Adafactor with a learning rate from outside; see ``TieredOptimizer`` and ``megatrain.optim.adafactor``."""

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        decay_rate: float = -0.8,
        eps: float = 1e-30,
        clip_threshold: float = 1.0,
        weight_decay: float = 0.0,
        *,
        store: TieredStore | None = None,
        **options: Any,
    ) -> None:
        defaults = {
            "lr": lr,
            "decay_rate": decay_rate,
            "eps": eps,
            "clip_threshold": clip_threshold,
            "weight_decay": weight_decay,
        }
        super().__init__(params, defaults, store=store, **options)

    def setting_names(self) -> tuple[str, ...]:
        return ("decay_rate", "eps", "clip_threshold")

    def make_arithmetic(self, settings: Mapping[str, Any]) -> Arithmetic:
        decay_rate, eps, clip_threshold = (float(settings[name]) for name in self.setting_names())
        return Adafactor(decay_rate, eps, clip_threshold, threads=self.threads)

    def torch_names(self) -> Mapping[str, str]:
        return {}


def release(optimizer: TieredOptimizer) -> None:
    """Make the updates that are due, then forget the optimizer's state; it cannot be used afterwards.

    Generations that were committed keep what they have.
    """
    optimizer.finish_updates()
    optimizer.zero_grad()
    ledger = ledger_of(optimizer.store)
    for group in optimizer.groups:
        if isinstance(group, TieredGroup):
            group.weights.before_use = group.weights.after_change = None
            assert group.weights.gradients is not None, group.layout.name
            group.weights.gradients.before_add = None
        elif group.gradients is not None:
            group.gradients.close()
        ledger.unregister(optimizer.store, *group.keys.values())
    optimizer.groups.clear()
    ledger.optimizers.discard(optimizer)
    optimizer.threads.close()
    ledger.num_changes += 1
