"""AdamW, Lion, SGD, Adafactor and Muon with the interface of ``torch.optim`` and their state in a tiered store."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from megatrain.base.layout import build_layout
from megatrain.embed.groups import (
    DeferredUpdates,
    DeviceCopies,
    DueUpdate,
    InterruptedUpdateError,
    OffloadedGroup,
    OrdinaryGroup,
    Settings,
    StateGroup,
    UpdatesInRam,
    norms_in_ram,
    take_gradients,
    update_in_order,
)
from megatrain.embed.partition import mark_optimized
from megatrain.embed.saved_state import SavedState
from megatrain.embed.shared import SharedGradients, SharedGroup, exchange_gradients
from megatrain.embed.stores import check_store, home_order, room_for_homes, shared_state
from megatrain.embed.weights import block_of
from megatrain.optim.adafactor import Adafactor
from megatrain.optim.average import EMA, WeightAverage
from megatrain.optim.base import Optimizer as Arithmetic
from megatrain.optim.clip import NonFiniteGradientError, global_norm, gradient_scale
from megatrain.optim.elementwise import SGD, AdamW, Lion
from megatrain.optim.matrices import DeviceMatrices, Shape, host_bytes
from megatrain.optim.moments import STATE_DTYPES
from megatrain.optim.muon import COEFFICIENTS, EPS, Muon
from megatrain.optim.table import StateDtype
from megatrain.optim.threads import KernelThreads
from megatrain.ranks.dtensors import (
    add_over_shards,
    check_parameter,
    is_dtensor,
    is_whole,
    local_of,
)
from tiered.errors import CapacityError

if TYPE_CHECKING:
    from megatrain.base.layout import UnitLayout
    from megatrain.optim.base import StateKind
    from tiered import TieredStore

__all__ = [
    "InterruptedUpdateError",
    "TieredAdafactor",
    "TieredAdamW",
    "TieredLion",
    "TieredMuon",
    "TieredOptimizer",
    "TieredSGD",
]

#: Settings of torch's optimizers that change the update rule, but have no kernel here.
_UNSUPPORTED = ("amsgrad", "maximize", "differentiable", "dampening")
#: Per parameter: state and gradient of the group being updated, and of the next one being fetched.
_BYTES_AT_ONCE = 2 * (12 + 4)
#: Ordinary parameters share a group up to the size of the largest parameter, which must fit in RAM anyway. The limit is
#: at least 2 MiB of each kind of fp32 state and at most 64 MiB. It does not depend on tier sizes, so that a state can
#: be loaded with other tiers.
_GROUP_ELEMENTS = (1 << 19, 1 << 24)
#: Number of update rules that are cached by their settings.
_MAX_ARITHMETICS = 64

_CONSUMED = (
    "step() without a backward since the step before: that step consumed the gradients in the store, and their "
    "parameters are not updated. torch would use them once more"
)


_ONE_KERNEL = "there is one kernel for each placement, and all give the same results. Leave the option out"
#: Further options of torch's optimizers -> reason for rejecting them; false and None have no effect.
_OPTIONS_OF_TORCH = {
    "fused": _ONE_KERNEL,
    "foreach": _ONE_KERNEL,
    "capturable": "updates run on the CPU or on a stream, outside of CUDA graphs",
    "differentiable": "nothing is differentiated through an update",
    "amsgrad": "AMSGrad keeps a third moment, which has no kernel here. Leave the option out",
    "maximize": "negate the loss instead",
}
#: Options of earlier versions -> their replacement (decision 0114).
_ENDED_OPTIONS = {
    "overlap": "step() makes the updates of ordinary parameters. Write megatrain.offload(model, store) before the "
    "optimizer: each layer is then updated right before its next use",
}


def _check_arguments(kind: str, params: object, store: object, unknown: Mapping[str, Any]) -> None:
    """Raise ``TypeError`` for a module instead of its parameters, and for options that only torch's optimizers have."""
    if isinstance(params, nn.Module):
        raise TypeError(f"{kind} takes parameters, not the module {type(params).__name__}: give model.parameters()")
    if store is not None:
        check_store(store, kind)
    reasons = _OPTIONS_OF_TORCH | _ENDED_OPTIONS
    for name, value in unknown.items():
        if name not in reasons:
            raise TypeError(f"{kind} has no option {name!r}")
        if value:
            raise TypeError(f"{kind} has no option {name!r}: {reasons[name]}")


class TieredOptimizer(torch.optim.Optimizer):
    """A ``torch.optim.Optimizer`` with its state in a store: 12 bytes per parameter, weights included, for AdamW.

    Takes parameters of offloaded modules, ordinary parameters, or both. The arithmetic equals ``megatrain-tier run``:
    an fp32 master (a bf16 parameter keeps its low half in the store) and the same bits for any placement. ``step``
    clips by the exact global norm and updates ordinary parameters. An offloaded unit is updated right before its next
    use, while the next unit's blocks are fetched; reading its weights earlier applies the update first. Parameter
    groups, LR schedulers and closures work as in torch; a parameter without a gradient is skipped.

    Each rank updates its part of sharded parameters (``DTensor``: FSDP2, tensor parallelism), with state in its store;
    gradients and weights stay in place. All ranks step together. ``max_grad_norm`` clips by the norm over all ranks.

    Args:
        defaults: settings of groups that do not set them.
        store: store of the state; default: the store of the parameters, if they are offloaded.
        max_grad_norm: largest global norm without clipping; 0: no clipping. With clipping, ``grad_norm`` is the norm of
            the last step.
        nonfinite: with clipping, the effect of a NaN or infinite norm: "stop" raises and changes nothing, "skip" skips
            the update, "ignore" uses the gradients as torch does.
        offload_gradients: whether gradients of ordinary parameters move to the store when autograd computes them, and
            are summed there in fp32 over backward passes.
        state_dtype: format of the moments: "float32", "bfloat16" (stochastic rounding by seed, step and element) or
            "int8" (blocks of 256 with a scale); see ``megatrain.optim.elementwise``.
        seed: seed of that rounding.
        ema_decay: decay of an average of the fp32 weights, which takes 4 more bytes per parameter. It starts with the
            weights before the first step and moves with each update; 0: no average. See ``averaged_parameters``.
        state: allowed tiers of the state, preferred first; "auto": RAM while there is space, then drives.
        name: prefix of the keys of ordinary parameters' blocks; a second optimizer in one store needs another.
        checkpoint: result of ``state_dict``: "generation", the number of a committed generation of the store, which
            each rank saves and loads itself; "tensors", which ``torch.distributed.checkpoint`` needs; "auto": tensors
            if a parameter is sharded, else a generation.

    Raises:
        TypeError: a module instead of its parameters, an object that is not a store, or an option that only torch has.
        ValueError: a setting out of range, no store, a dtype without master weights, or a setting that sharded
            parameters do not allow.
        CapacityError: the state does not fit the store.
    """

    def __init__(
        self,
        params: Any,
        defaults: dict[str, Any],
        *,
        store: TieredStore | None,
        max_grad_norm: float = 0.0,
        nonfinite: Literal["stop", "skip", "ignore"] = "stop",
        offload_gradients: bool = False,
        state_dtype: StateDtype = "float32",
        seed: int = 0,
        ema_decay: float = 0.0,
        state: Sequence[str] | str = "auto",
        name: str = "optimizer",
        checkpoint: Literal["auto", "generation", "tensors"] = "auto",
        **unknown: Any,
    ) -> None:
        _check_arguments(type(self).__name__, params, store, unknown)
        if checkpoint not in ("auto", "generation", "tensors"):
            raise ValueError(f'checkpoint="{checkpoint}": there are "auto", "generation" and "tensors"')
        if not max_grad_norm >= 0:
            raise ValueError(f"max_grad_norm={max_grad_norm}: give the largest norm, or 0 for no clipping")
        if state_dtype not in STATE_DTYPES:
            raise ValueError(f'state_dtype="{state_dtype}": there are {", ".join(STATE_DTYPES)}')
        if not 0 <= ema_decay < 1:
            raise ValueError(f"ema_decay={ema_decay}: it must be at least 0 (no average) and below 1")
        self.max_grad_norm, self.nonfinite = max_grad_norm, nonfinite
        self.ema_decay = ema_decay
        self._is_averaged = False  # whether masters and averages are swapped
        self.state_dtype, self.seed = state_dtype, seed
        self.grad_norm: float | None = None
        self.threads = KernelThreads(among_operations=True)
        self.steps: dict[nn.Parameter, int] = {}
        self.groups: list[StateGroup] = []
        self._measured: object = None
        self._deferred = DeferredUpdates()
        self._has_consumed = False  # the last step took gradients from the store, and none were dropped afterwards
        self._in_ram = UpdatesInRam(self.threads)
        self._with_state: set[int] = set()  # ids of the parameters of all groups
        self._name, self._offload, self._homes = name, offload_gradients, state
        self._copies = DeviceCopies()
        self._scratch_bytes = 0  # bytes reserved in RAM
        self._checkpoint = checkpoint
        self._store = store
        self._rules = _UpdateRules(self)
        self._saved = SavedState(self)
        super().__init__(params, defaults)
        shared_state(self.store).optimizers.add(self)
        self.state = _StoredState(self)  # type: ignore[assignment]

    @property
    def store(self) -> TieredStore:
        """The store of the state."""
        if self._store is None:
            raise ValueError("these parameters are in no store: give store=megatrain.open_store(...)")
        return self._store

    @abstractmethod
    def make_arithmetic(self, settings: Mapping[str, Any]) -> Arithmetic:
        """Return the update rule for the settings of a group."""

    @abstractmethod
    def setting_names(self) -> tuple[str, ...]:
        """Return the names of the settings that ``make_arithmetic`` reads."""

    @abstractmethod
    def torch_names(self) -> Mapping[str, str]:
        """Return kind of state -> its name in the ``state_dict`` of torch's equivalent optimizer."""

    def _kernel_options(self) -> dict[str, Any]:
        """Return the arguments of all elementwise update rules."""
        return {"threads": self.threads, "state_dtype": self.state_dtype, "seed": self.seed}

    def widest(self, settings: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return settings of a group that require the most state that any group may need."""
        return settings

    def kinds_of(
        self, settings: Mapping[str, Any], split_master: bool, parameters: Mapping[str, nn.Parameter]
    ) -> Sequence[StateKind]:
        """Return the kinds of state of parameters that share blocks; ``parameters``: by name in their layout."""
        return self._rules.of(self.widest(settings)).state_kinds(split_master)

    def torch_names_of(self, parameter: nn.Parameter) -> Mapping[str, str]:
        """Return ``torch_names`` for one parameter."""
        return self.torch_names()

    def scratch_bytes(self, parameters: Iterable[nn.Parameter]) -> int:
        """Return the RAM that an update of any one of these parameters takes in addition to its blocks."""
        return 0

    def check_group(self, param_group: Mapping[str, Any]) -> None:
        """Raise for settings of a group that are out of range, and for parameters that cannot be updated.

        Raises:
            ValueError: a setting or parameter is invalid.
        """
        _check_settings(param_group)

    def __deepcopy__(self, memo: Any) -> Any:
        """Refuse a copy, because the state exists only once in the store."""
        raise TypeError("an optimizer with its state in a store cannot be copied: make another, load its state_dict()")

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Refuse pickling; ``state_dict`` can be saved."""
        raise TypeError("an optimizer with its state in a store cannot be pickled: save its state_dict()")

    # -- parameters --------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters and create their state.

        Raises:
            ValueError: as in the constructor.
            CapacityError: as in the constructor.
        """
        super().add_param_group(param_group)
        try:
            self.check_group(self.param_groups[-1])
            self._make_state(self.param_groups[-1])
        except BaseException:
            self.param_groups.pop()
            raise

    def _make_state(self, param_group: Mapping[str, Any]) -> None:
        """Create the state of a group's trained parameters that have none yet, completely or not at all."""
        new = [p for p in param_group["params"] if id(p) not in self._with_state and p.requires_grad]
        if not new:
            return
        blocks = dict.fromkeys(block for p in new if (block := block_of(p)) is not None)
        self._store = self._store or next((block.store for block in blocks), None)
        store = self.store
        for block in blocks:
            if block.store is not store:
                raise ValueError(f"{block.layout.name} is in another store than the optimizer's")
            if block.updater is not None:
                raise ValueError(
                    f"{block.layout.name} has an optimizer already. Parameters of one layer go to one optimizer; to "
                    "make another for all of them, open a new store"
                )
            block.check_frozen()
        kinds = partial(self.kinds_of, param_group)
        _check_sharded(
            new,
            kinds(False, {str(number): p for number, p in enumerate(new)}),
            type(self).__name__,
            is_lost=not self._with_state <= set(map(id, self.parameters())),
            offloads_gradients=self._offload,
        )
        if self.saves_tensors and (blocks or any(isinstance(group, OffloadedGroup) for group in self.groups)):
            raise ValueError(
                'checkpoint="tensors" (the default with sharded parameters) has no weights of offloaded modules: write '
                'checkpoint="generation"'
            )
        homes = home_order(store, self._homes)
        num_before, scratch = len(self.groups), max(0, self.scratch_bytes(new) - self._scratch_bytes)
        store.reserve("ram", scratch)
        try:
            with shared_state(store).all_or_nothing():
                for block in blocks:
                    kind_of_group = SharedGroup if isinstance(block.gradients, SharedGradients) else OffloadedGroup
                    own_kinds = kinds(block.dtype.itemsize == 2, block.parameters)
                    self.groups.append(kind_of_group(block, own_kinds, homes, deferred=self._deferred))
                self.groups += _ordinary_groups(
                    [p for p in new if block_of(p) is None],
                    partial(OrdinaryGroup, store, offload_gradients=self._offload, copies=self._copies),
                    kinds,
                    homes,
                    store=store,
                    name=self._name,
                    first=sum(isinstance(group, OrdinaryGroup) for group in self.groups),
                    bytes_at_once=_BYTES_AT_ONCE + (2 * EMA.dtype.itemsize if self.ema_decay else 0),
                )
                _check_room(store, self.groups)
        except BaseException:
            del self.groups[num_before:]
            store.reserve("ram", -scratch)
            raise
        self._scratch_bytes += scratch
        numbers = {id(parameter): str(number) for number, parameter in enumerate(self.parameters())}
        for group in self.groups[num_before:]:
            group.names = {name: numbers.get(id(p), name) for name, p in group.parameters.items()}
            self._with_state.update(map(id, group.parameters.values()))
            if isinstance(group, OffloadedGroup):
                group.attach()
            else:
                mark_optimized(group.parameters.values(), self)

    # -- steps -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update with the gradients. Those in the store are consumed; others stay in ``.grad``, as in torch.

        Args:
            closure: recomputes loss and gradients, as in torch.

        Raises:
            NonFiniteGradientError: see ``nonfinite``. Nothing was changed, and gradients are dropped.
        """
        self.check_not_averaged("step()")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.finish_updates()  # of units that were not used after the last step
        for param_group in self.param_groups:
            self._make_state(param_group)  # of parameters that were frozen before
        scale = self._grad_scale()
        if self.max_grad_norm == 0:
            exchange_gradients(self.groups, self.threads, with_norm=False)
        if scale is None:
            self.zero_grad()
            if self.nonfinite == "skip":
                return loss
            raise NonFiniteGradientError(
                f"the gradient is not finite (norm {self.grad_norm}); nothing was updated. Lower the learning rate, "
                'check the data of this step, or construct the optimizer with nonfinite="skip"'
            )
        taken = take_gradients(self.groups)
        has_any = any(found for group, found in taken if group.gradients is not None)
        if self._has_consumed and not has_any:
            warnings.warn(_CONSUMED, stacklevel=2)
        self._has_consumed = has_any
        all_settings = self._settings(taken)
        shared_state(self.store).num_changes += 1
        works: dict[StateGroup, DueUpdate] = {}
        for group, found in taken:
            mine = {name: settings for name in found if (settings := all_settings.get(id(group.parameters[name])))}
            gradients = {name: gradient for name, gradient in found.items() if gradient is not None}
            if mine and isinstance(group, OffloadedGroup):
                group.defer(DueUpdate(mine, scale * group.gradient_factor, gradients))
            elif mine:
                works[group] = DueUpdate(mine, scale, gradients)
        with self._deferred.applying(is_atomic=False):
            update_in_order(self._in_ram.update(works))
        return loss

    def _settings(self, taken: Sequence[tuple[StateGroup, Mapping[str, object]]]) -> dict[int, Settings]:
        """Return the settings of each parameter with a gradient, by its id, and count its step.

        Parameters of a group that are at the same step share one object.

        Args:
            taken: groups of state, each with the names of parameters that have a gradient.

        Raises:
            ValueError: a changed setting needs state that was never created. No step is counted.
        """
        with_gradient = {id(group.parameters[name]) for group, names in taken for name in names}
        found: dict[int, Settings] = {}
        counted: dict[nn.Parameter, int] = {}
        for param_group in self.param_groups:
            own = [parameter for parameter in param_group["params"] if id(parameter) in with_gradient]
            arithmetic, lr = self._rules.of(param_group), float(param_group["lr"])
            decay = float(param_group.get("weight_decay", 0.0))
            _check_state({kind.name for kind in arithmetic.state_kinds(False)} - {"weight"}, own, taken)
            counts = [self.steps.get(parameter, 0) + 1 for parameter in own]
            at_step = {step: Settings(arithmetic, step, lr, decay) for step in set(counts)}
            counted.update(zip(own, counts, strict=True))
            found.update(zip(map(id, own), map(at_step.__getitem__, counts), strict=True))
        self.steps.update(counted)
        return found

    def finish_updates(self) -> None:
        """Apply all due updates; afterwards the store holds weights and state after the last step.

        Raises:
            InterruptedUpdateError: an update was partially applied; raised once.
        """
        self._deferred.finish()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, including those in the store. They become None regardless of ``set_to_none``."""
        self._has_consumed = False
        for group in self.groups:
            if group.gradients is not None:
                group.gradients.clear()
        for param_group in self.param_groups:
            for parameter in param_group["params"]:
                if block_of(parameter) is None:
                    parameter.grad = None

    def measure_grad_norm(self) -> float:
        """Return the global norm of the current gradients; the next step clips by it.

        For trainers that clip before ``step``; it is measured again if gradients change in between. The engine sums
        over blocks; here the norm is summed parameter by parameter in the optimizer's order, so that it does not depend
        on which parameters are offloaded. With sharded parameters it is a collective, which all ranks must call.
        """
        squares = norms_in_ram([group for group in self.groups if isinstance(group, OrdinaryGroup)], self.threads)
        squares.update(exchange_gradients(self.groups, self.threads))
        for group in self.groups:
            if not isinstance(group, SharedGroup) and squares.keys().isdisjoint(group.parameters.values()):
                found = group.squared_norms(self.threads)
                squares.update((group.parameters[name], square) for name, square in found.items())
        # All parameters with state, with or without a gradient, so that no rank waits for another in vain.
        owners = [parameter for parameter in self.parameters() if id(parameter) in self._with_state]
        if any(map(is_dtensor, owners)):
            totals = add_over_shards(owners, [squares.get(parameter, 0.0) for parameter in owners])
            squares.update(zip(owners, totals, strict=True))
        self.grad_norm = global_norm(squares[parameter] for parameter in self.parameters() if parameter in squares)
        self._measured = [group.gradients_now() for group in self.groups]  # equal until a gradient changes
        return self.grad_norm

    def _grad_scale(self) -> float | None:
        """Return the factor on all gradients; None if they are not finite and must not be used."""
        if self.max_grad_norm == 0:
            return 1.0
        if self.grad_norm is None or self._measured != [group.gradients_now() for group in self.groups]:
            self.measure_grad_norm()
        self._measured = None
        assert self.grad_norm is not None
        return gradient_scale(self.grad_norm, self.max_grad_norm, self.nonfinite)

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters of all groups, in order."""
        return [parameter for group in self.param_groups for parameter in group["params"]]

    # -- averages ----------------------------------------------------------------------------------------------

    @contextmanager
    def averaged_parameters(self) -> Iterator[None]:
        """Swap in averages of the weights within the context, e.g. for evaluation, ``generate``, ``save_pretrained``.

        Masters and averages are swapped in the store, group by group, and swapped back at the end with the same bits.
        Nothing is stored twice. Code inside reads averages; a parameter that was never updated is its average. The swap
        changes weights, so graphs of earlier forwards become stale. ``step`` and ``state_dict`` raise inside. Ranks
        with shared or sharded parameters must enter and leave together.

        Raises:
            ValueError: the optimizer has no averages (``ema_decay``).
            RuntimeError: nested use.
            WeightInUseError: weights are held, by ``gathered`` or a running forward.
        """
        if not self.ema_decay:
            raise ValueError("this optimizer has no averages of the weights: construct it with ema_decay=0.999")
        self.check_not_averaged("averaged_parameters()")
        self.finish_updates()
        swapped: list[tuple[StateGroup, Mapping[str, object]]] = []
        self._is_averaged = True
        try:
            for group in self.groups:
                updated = {name: None for name, parameter in group.parameters.items() if self.steps.get(parameter, 0)}
                if updated:
                    with self._deferred.applying():
                        group.swap_averages(updated)
                    swapped.append((group, updated))
            yield
        finally:
            for group, names in swapped:
                with self._deferred.applying():
                    group.swap_averages(names)
            self._is_averaged = False

    def check_not_averaged(self, what: str) -> None:
        """Raise for operations that would mistake averages for weights.

        Raises:
            RuntimeError: averages are swapped in.
        """
        if self._is_averaged:
            raise RuntimeError(f"{what} inside of averaged_parameters(), where weights are averages: leave it before")

    # -- saving and loading ------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return groups and the number of a committed generation of the store, which holds weights and state.

        Commits if anything has changed since the last commit, and returns when that would survive a power cut. Contains
        no big tensors: ``torch.save`` it anywhere, and load it into an optimizer of a store on the same folder.

        With ``checkpoint="tensors"`` it returns all state instead, as tensors over files. State of sharded parameters
        is sharded alike, so that ``torch.distributed.checkpoint`` saves it, and loads it with other ranks.

        Raises:
            GenerationError: the store has no folder (``open_store(path=...)``).
            TransferError: a drive reported an error.
            OSError: a drive has no space for the tensors.
        """
        self.check_not_averaged("state_dict()")
        self.finish_updates()
        saved = super().state_dict()
        if self.saves_tensors:
            saved["state"] = {
                number: self._saved.tensors_of(parameter, with_master=True)
                for number, parameter in enumerate(self.parameters())
                if id(parameter) in self._with_state
            }
            return saved
        saved["tiered"] = self._saved.record()
        return saved

    @property
    def saves_tensors(self) -> bool:
        """Whether ``state_dict`` returns all state as tensors."""
        return self._checkpoint == "tensors" or (self._checkpoint == "auto" and any(map(is_dtensor, self.parameters())))

    def full_state_dict(self) -> dict[str, Any]:
        """Return the ``state_dict`` of torch's equivalent optimizer: all state, as tensors over files."""
        self.check_not_averaged("full_state_dict()")
        self.finish_updates()
        saved = super().state_dict()
        numbers = {id(parameter): number for number, parameter in enumerate(self.parameters())}
        saved["state"] = {
            numbers[id(p)]: {name: values for name, values in self.state[p].items() if name != EMA.name}
            for p in self.steps
        }
        saved["param_groups"] = [{**dict.fromkeys(_UNSUPPORTED, 0), **group} for group in saved["param_groups"]]
        return saved

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore a ``state_dict`` with weights of offloaded modules, or the state of torch's equivalent optimizer.

        Raises:
            ValueError: the groups do not match, or the generation is gone.
            GenerationError: the store has no such generation, or it is damaged.
            CorruptBlockError: the generation is damaged.
        """
        self.check_not_averaged("load_state_dict()")
        groups = state_dict["param_groups"]
        _check_groups(self.param_groups, groups)
        shared_state(self.store).finish_updates()  # keeps the trained weights if loading fails
        if "tiered" in state_dict:
            self._saved.load_generation(state_dict["tiered"])
        else:
            keys = [key for group in groups for key in group["params"]]  # names, in the checkpoints of some trainers
            state = state_dict["state"]
            self._saved.load_tensors({number: state[key] for number, key in enumerate(keys) if key in state})
        self.zero_grad()
        for state_group in self.groups:
            if isinstance(state_group, OrdinaryGroup):
                state_group.invalidate_masters()
        for group, saved in zip(self.param_groups, groups, strict=True):
            group.update((name, value) for name, value in saved.items() if name != "params")

    def state_of(self, parameter: nn.Parameter) -> dict[str, Any]:
        """Return copies of the state of one parameter, under torch's names, over unlinked files.

        Raises:
            KeyError: it has no state, because it was never updated or belongs to another optimizer.
        """
        if not isinstance(parameter, nn.Parameter) or parameter not in self.steps:
            raise KeyError("this parameter has no state: no update of it was made")
        self.finish_updates()
        return self._saved.tensors_of(parameter)

    def release(self) -> None:
        """Apply the due updates, then unregister the state; the optimizer cannot be used afterwards.

        Committed generations keep their contents.
        """
        self.check_not_averaged("release()")
        self.finish_updates()
        self.zero_grad()
        shared = shared_state(self.store)
        for group in self.groups:
            if isinstance(group, OffloadedGroup):
                group.detach()
            elif group.gradients is not None:
                group.gradients.close()
            shared.unregister(*group.keys.values())
        self.groups.clear()
        self.store.reserve("ram", -self._scratch_bytes)
        self._scratch_bytes = 0
        shared.optimizers.discard(self)
        self.threads.close()
        shared.num_changes += 1


class TieredAdamW(TieredOptimizer):
    """AdamW with decoupled weight decay; see ``TieredOptimizer``. Defaults equal ``torch.optim.AdamW``."""

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
        return AdamW(float(beta1), float(beta2), float(settings["eps"]), **self._kernel_options())

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
        return Lion(float(beta1), float(beta2), **self._kernel_options())

    def torch_names(self) -> Mapping[str, str]:
        return {"m": "exp_avg"}


class TieredSGD(TieredOptimizer):
    """SGD with momentum; see ``TieredOptimizer``. Defaults equal ``torch.optim.SGD``."""

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
        return SGD(float(settings["momentum"]), bool(settings["nesterov"]), **self._kernel_options())

    def widest(self, settings: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return settings with momentum if the optimizer has any: parameters of several groups share a block."""
        return {**settings, "momentum": max(float(settings["momentum"]), float(self.defaults["momentum"]))}

    def torch_names(self) -> Mapping[str, str]:
        return {"m": "momentum_buffer"}


class TieredAdafactor(TieredOptimizer):
    """Adafactor with an external learning rate; see ``TieredOptimizer`` and ``megatrain.optim.adafactor``."""

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
        if options.get("state_dtype", "float32") != "float32":
            raise ValueError("TieredAdafactor keeps row and column means in fp32: it has no state_dtype")
        super().__init__(params, defaults, store=store, **options)

    def setting_names(self) -> tuple[str, ...]:
        return ("decay_rate", "eps", "clip_threshold")

    def make_arithmetic(self, settings: Mapping[str, Any]) -> Arithmetic:
        decay_rate, eps, clip_threshold = (float(settings[name]) for name in self.setting_names())
        return Adafactor(decay_rate, eps, clip_threshold, threads=self.threads)

    def torch_names(self) -> Mapping[str, str]:
        return {}


class TieredMuon(TieredOptimizer):
    """Muon for matrices, AdamW for the rest; see ``TieredOptimizer`` and ``megatrain.optim.muon``.

    Arguments, defaults and arithmetic equal ``torch.optim.Muon``, which takes only two-dimensional parameters. An
    offloaded layer has one optimizer and usually also other parameters: AdamW updates groups with ``use_muon=False``,
    which should include embeddings and heads. Groups share ``lr`` and ``weight_decay`` unless they set them; with
    ``adjust_lr_fn="match_rms_adamw"`` one rate suits both. In addition to the master, state takes 4 bytes per matrix
    parameter and 8 per other parameter. The iteration runs on the compute device of the parameters. On a GPU it takes
    ``megatrain.optim.matrices.device_bytes`` of memory outside of any tier.

    Args:
        params: as for any optimizer; groups may set ``use_muon``.
        momentum: at least 0, below 1.
        nesterov: whether to use Nesterov momentum.
        ns_coefficients: the three factors of each Newton-Schulz step.
        eps: least norm that the iteration divides by; in a group with ``use_muon=False``, AdamW's eps, with default
            1e-8.
        ns_steps: number of Newton-Schulz steps.
        adjust_lr_fn: "original" (also None) or "match_rms_adamw".
        betas: AdamW's, for groups with ``use_muon=False``.
        store: as for ``TieredOptimizer``.
        options: as for ``TieredOptimizer``, without ``state_dtype``.

    Raises:
        ValueError: as for ``TieredOptimizer``; or a parameter for Muon is not a matrix.
    """

    def __init__(
        self,
        params: Iterable[Any],
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = COEFFICIENTS,
        eps: float = EPS,
        ns_steps: int = 5,
        adjust_lr_fn: Literal["original", "match_rms_adamw"] | None = None,
        *,
        betas: tuple[float, float] = (0.9, 0.999),
        store: TieredStore | None = None,
        **options: Any,
    ) -> None:
        defaults = {
            "lr": lr,
            "weight_decay": weight_decay,
            "momentum": momentum,
            "nesterov": nesterov,
            "ns_coefficients": ns_coefficients,
            "eps": eps,
            "ns_steps": ns_steps,
            "adjust_lr_fn": adjust_lr_fn,
            "betas": betas,
            "use_muon": True,
        }
        if options.get("state_dtype", "float32") != "float32":
            raise ValueError("TieredMuon keeps its moments in fp32: it has no state_dtype")
        groups = [{**one, "params": _as_list(one["params"])} if isinstance(one, dict) else one for one in params]
        # Over all groups, because a block of an offloaded layer may have parameters of several groups.
        self._matrices = {id(parameter) for group in groups if _uses_muon(group) for parameter in _parameters_of(group)}
        self._shapes: set[Shape] = set()
        self._on_gpu: DeviceMatrices | None = None
        super().__init__(groups, defaults, store=store, **options)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters; see ``TieredOptimizer``."""
        param_group["params"] = _as_list(param_group["params"])
        own = map(id, _parameters_of(param_group))
        if _uses_muon(param_group):
            self._matrices.update(own)
        else:
            param_group.setdefault("eps", 1e-8)
            self._matrices.difference_update(own)
        super().add_param_group(param_group)
        matrices = [each for each in _parameters_of(param_group) if id(each) in self._matrices]
        self._shapes |= {(len(matrix), matrix.shape[1]) for matrix in matrices}
        if self._on_gpu is None and matrices and matrices[0].is_cuda:
            self._on_gpu = DeviceMatrices(matrices[0].device)
        if self._on_gpu is not None:
            self._on_gpu.make_room(self._muon(self.defaults, lambda name, shape: True), self._shapes)

    def release(self) -> None:
        """Remove parameters and state from the store; see ``TieredOptimizer``."""
        super().release()
        self._on_gpu = None

    def check_group(self, param_group: Mapping[str, Any]) -> None:
        super().check_group(param_group)
        momentum, ns_steps, adjust = (param_group[name] for name in ("momentum", "ns_steps", "adjust_lr_fn"))
        if not 0 <= float(momentum) < 1:
            raise ValueError(f"momentum={momentum}: it must be at least 0 and below 1")
        if not 1 <= int(ns_steps) < 100:
            raise ValueError(f"ns_steps={ns_steps}: from 1 to 99")
        if len(param_group["ns_coefficients"]) != 3:
            raise ValueError(f"ns_coefficients={param_group['ns_coefficients']}: give three numbers")
        if adjust not in (None, "original", "match_rms_adamw"):
            raise ValueError(f'adjust_lr_fn="{adjust}": there are "original" and "match_rms_adamw"')
        if not param_group["use_muon"]:
            return
        names = param_group.get("param_names") or [f"number {n}" for n in range(len(param_group["params"]))]
        for name, parameter in zip(names, param_group["params"], strict=True):
            if parameter.ndim != 2:
                raise ValueError(
                    f"Muon updates parameters of two dimensions, and parameter {name} of this group has the shape "
                    f"{tuple(parameter.shape)}: put it into a group with use_muon=False, which AdamW updates"
                )

    def setting_names(self) -> tuple[str, ...]:
        return (
            "use_muon",
            "momentum",
            "nesterov",
            "ns_coefficients",
            "eps",
            "ns_steps",
            "adjust_lr_fn",
            "betas",
        )

    def make_arithmetic(self, settings: Mapping[str, Any]) -> Arithmetic:
        uses_muon = bool(settings["use_muon"])
        return self._muon(settings, lambda name, shape: uses_muon)

    def _muon(self, settings: Mapping[str, Any], is_matrix: Callable[[str, Sequence[int]], bool]) -> Muon:
        beta1, beta2 = settings["betas"]
        a, b, c = settings["ns_coefficients"]
        return Muon(
            AdamW(float(beta1), float(beta2), float(settings["eps"]), threads=self.threads),
            is_matrix,
            momentum=float(settings["momentum"]),
            nesterov=bool(settings["nesterov"]),
            num_steps=int(settings["ns_steps"]),
            adjust_lr=settings["adjust_lr_fn"] or "original",
            coefficients=(float(a), float(b), float(c)),
            eps=float(settings["eps"]),
            matrices=self._on_gpu,
        )

    def kinds_of(
        self, settings: Mapping[str, Any], split_master: bool, parameters: Mapping[str, nn.Parameter]
    ) -> Sequence[StateKind]:
        matrices = frozenset(name for name, parameter in parameters.items() if id(parameter) in self._matrices)
        kinds = self._muon(settings, lambda name, shape: name in matrices).state_kinds(split_master)
        # Here a rank has only its part of a sharded matrix, and nothing gathers the parts.
        own = [replace(kind, needs_whole=kind.name == "m" and bool(matrices)) for kind in kinds]
        return [*own, EMA] if self.ema_decay else own

    def scratch_bytes(self, parameters: Iterable[nn.Parameter]) -> int:
        muon = self._muon(self.defaults, lambda name, shape: True)
        matrices = [parameter for parameter in parameters if id(parameter) in self._matrices]
        if self._on_gpu is not None or (matrices and matrices[0].is_cuda):
            return host_bytes([(len(matrix), matrix.shape[1]) for matrix in matrices])
        layout = build_layout("", ((str(number), matrix.shape) for number, matrix in enumerate(matrices)), True)
        return max((muon.workspace_bytes(entry) for entry in layout.entries), default=0)

    def torch_names(self) -> Mapping[str, str]:
        return {"m": "momentum_buffer", "v": "exp_avg_sq"}

    def torch_names_of(self, parameter: nn.Parameter) -> Mapping[str, str]:
        if id(parameter) in self._matrices:
            return {"m": "momentum_buffer"}
        return {"m": "exp_avg", "v": "exp_avg_sq"}


def _as_list(params: Any) -> list[Any]:
    """Return the parameters of a group, which may be a single one, or an iterator that can only be read once."""
    return [params] if isinstance(params, Tensor) else list(params)


def _parameters_of(given: Any) -> list[Any]:
    """Return the parameters in an argument of an optimizer: a group, a parameter, or a named parameter."""
    found = given["params"] if isinstance(given, dict) else [given]
    return [each[1] if isinstance(each, tuple) else each for each in found]


def _check_groups(own: Sequence[Mapping[str, Any]], groups: Sequence[Mapping[str, Any]]) -> None:
    """Raise for saved groups that do not match, and for variants without a kernel.

    Raises:
        ValueError: they do not match, or use such a variant.
    """
    now = [len(group["params"]) for group in own]
    saved = [len(group["params"]) for group in groups]
    if now != saved:
        raise ValueError(f"the saved state has groups of {saved} parameters, this optimizer of {now}")
    for name in (name for group in groups for name in _UNSUPPORTED if group.get(name)):
        raise ValueError(f"the saved state is of an optimizer with {name}: the tiered optimizers have no such variant")


def _uses_muon(group: Any) -> bool:
    return bool(group.get("use_muon", True)) if isinstance(group, dict) else True


def _check_settings(param_group: Mapping[str, Any]) -> None:
    """Raise for settings of a group that are out of range, and for parameters without master weights.

    Raises:
        ValueError: a setting or parameter is invalid.
    """
    for name in _UNSUPPORTED:
        if param_group.get(name):
            raise ValueError(f"{name}={param_group[name]}: the tiered optimizers have no such variant")
    for name in ("lr", "weight_decay", "eps", "momentum"):
        if name in param_group and not float(param_group[name]) >= 0:
            raise ValueError(f"{name}={param_group[name]}: it cannot be below 0")
    for beta in param_group.get("betas", ()):
        if not 0 <= float(beta) < 1:
            raise ValueError(f"betas={tuple(param_group['betas'])}: each must be at least 0 and below 1")
    for parameter in param_group["params"]:
        if parameter.requires_grad and parameter.dtype not in (torch.float32, torch.bfloat16):
            raise ValueError(f"a parameter is {parameter.dtype}; master weights exist for float32 and bfloat16")
        if parameter.requires_grad and parameter.device.type == "meta":
            raise ValueError("a parameter is on the meta device: load its weights first, or offload the module")


def _check_sharded(
    parameters: Sequence[nn.Parameter],
    kinds: Sequence[StateKind],
    optimizer: str,
    *,
    is_lost: bool,
    offloads_gradients: bool,
) -> None:
    """Raise for settings and parameters that do not work with sharded parameters.

    Args:
        parameters: parameters that get state; ordinary ones are skipped.
        optimizer: name of its class.
        is_lost: whether there is state of parameters that are no longer in a group.
        offloads_gradients: whether gradients move to the store when autograd computes them.

    Raises:
        ValueError: a setting or parameter does not work.
    """
    for parameter in parameters:
        if not is_dtensor(parameter):
            continue
        if is_lost:
            raise ValueError(
                "the parameters of this optimizer were replaced by sharded ones (fully_shard, accelerate's "
                "prepare): make the optimizer after that, from the model's parameters as they are then"
            )
        check_parameter(parameter)
        shape = tuple(parameter.shape)
        if any(kind.needs_whole for kind in kinds) and not is_whole(parameter):
            raise ValueError(
                f"{optimizer} needs whole matrices, and a parameter of shape {shape} is sharded: use "
                "TieredAdamW, TieredLion or TieredSGD"
            )
        if offloads_gradients:
            raise ValueError(
                f"offload_gradients=True with a sharded parameter, of shape {shape}: its gradient is made from "
                "the gradients of all ranks, after autograd. Leave it out"
            )


def _ordinary_groups(
    parameters: Sequence[nn.Parameter],
    make: Callable[[str, UnitLayout, Mapping[str, nn.Parameter], Sequence[StateKind], Sequence[str]], OrdinaryGroup],
    kinds: Callable[[bool, Mapping[str, nn.Parameter]], Sequence[StateKind]],
    homes: Sequence[str],
    *,
    store: TieredStore,
    name: str,
    first: int,
    bytes_at_once: int,
) -> Iterator[OrdinaryGroup]:
    """Create groups of parameters that are in no block.

    Args:
        parameters: in the order of the optimizer's groups.
        make: creates a group from the root of its keys, layout, parameters by name, kinds of state and homes.
        kinds: returns the kinds of state, given whether the master is split and the parameters by name.
        homes: allowed tiers of the state, preferred first.
        name: prefix of all keys.
        first: number of existing groups.
        bytes_at_once: bytes per parameter that an update holds in RAM.

    Raises:
        ValueError: the store already has blocks with this prefix.
    """
    if parameters and not first and any(s.key.startswith(f"{name}/") for s in store.blocks()):
        raise ValueError(f'this store already has blocks of the name "{name}": give the optimizer name="..."')
    shared = shared_state(store)
    packs = list(_packed(parameters))
    largest = max((sum(local_of(parameter).numel() for parameter in together) for together in packs), default=0)
    shared.working_bytes = max(shared.working_bytes, bytes_at_once * largest)
    for number, together in enumerate(packs, first):
        named = {f"{number}.{index}": parameter for index, parameter in enumerate(together)}
        root = f"{name}/{number:05d}"
        layout = build_layout(root, ((each, local_of(p).shape) for each, p in named.items()), True)
        yield make(root, layout, named, kinds(together[0].dtype.itemsize == 2, named), homes)


def _packed(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Group ordinary parameters of one dtype and device, limited by the size of this process's part of them."""
    together: list[nn.Parameter] = []
    fewest, most = _GROUP_ELEMENTS
    values = [local_of(parameter) for parameter in parameters]
    limit = max(fewest, min(most, max((value.numel() for value in values), default=0)))
    kind, num_elements = None, 0
    for parameter, value in zip(parameters, values, strict=True):
        own_kind = (value.dtype, value.device)
        if together and (own_kind != kind or num_elements + value.numel() > limit):
            yield together
            together, num_elements = [], 0
        kind, num_elements = own_kind, num_elements + value.numel()
        together.append(parameter)
    if together:
        yield together


def _check_room(store: TieredStore, groups: Iterable[StateGroup]) -> None:
    """Raise now instead of in the first step if RAM cannot hold the blocks of an update in addition to its homes."""
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


def _comparable(value: Any) -> Any:
    """Return a setting as floats, which compare by value; text unchanged."""
    if value is None or isinstance(value, str):
        return value
    return tuple(float(one) for one in value) if isinstance(value, list | tuple) else float(value)


class _UpdateRules:
    """The update rules of an optimizer, one for all groups with equal settings."""

    def __init__(self, optimizer: TieredOptimizer) -> None:
        self._optimizer = optimizer
        self._made: dict[tuple[Any, ...], Arithmetic] = {}

    def of(self, settings: Mapping[str, Any]) -> Arithmetic:
        """Return the rule for the settings of a group, with an average of the weights if the optimizer has averages."""
        optimizer = self._optimizer
        key = tuple(_comparable(settings[name]) for name in optimizer.setting_names())
        if key not in self._made:
            if len(self._made) >= _MAX_ARITHMETICS:  # e.g. a scheduler that changes betas in every step
                self._made.clear()
            made, decay = optimizer.make_arithmetic(settings), optimizer.ema_decay
            self._made[key] = WeightAverage(made, decay, optimizer.threads) if decay else made
        return self._made[key]


class _StoredState(MutableMapping[nn.Parameter, dict[str, Any]]):
    """``optimizer.state``: appears empty, so that trainers do not move it; ``state[parameter]`` reads copies.

    It cannot be set: load a ``state_dict`` instead. ``torch.distributed.checkpoint`` tests its truth value, and creates
    missing state by a step with zero gradients. That step would change moments, which exist from the start.
    """

    def __init__(self, optimizer: TieredOptimizer) -> None:
        self._optimizer = optimizer

    def __getitem__(self, parameter: nn.Parameter) -> dict[str, Any]:
        return self._optimizer.state_of(parameter)

    def __setitem__(self, parameter: nn.Parameter, state: dict[str, Any]) -> None:
        raise TypeError("the state is in the store: use optimizer.load_state_dict")

    def __delitem__(self, parameter: nn.Parameter) -> None:
        raise TypeError("the state is in the store: it cannot be removed")

    def __bool__(self) -> bool:
        if not self._optimizer.saves_tensors:
            raise TypeError(
                "state_dict() of this optimizer names a generation of its store, from which "
                "torch.distributed.checkpoint would save nothing. Make the optimizer with "
                f'checkpoint="tensors" ({type(self._optimizer).__name__}), or save its state_dict() on each rank'
            )
        return True

    def __iter__(self) -> Iterator[nn.Parameter]:
        return iter(())

    def __len__(self) -> int:
        return 0
