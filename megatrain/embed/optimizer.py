"""``TieredOptimizer``: has the interface of ``torch.optim.Optimizer`` and keeps its state in a tiered store."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Literal

import torch
from torch import nn

from megatrain.embed import optimizer_checks
from megatrain.embed.block_homes import shared_state
from megatrain.embed.groups import GroupUpdate, StateGroup
from megatrain.embed.optimizer_groups import OptimizerGroups
from megatrain.embed.ordinary_groups import OrdinaryGroup
from megatrain.embed.partition import record_optimizer
from megatrain.embed.saved_state import SavedState, StoredState
from megatrain.embed.shared import exchange_gradients
from megatrain.embed.step_settings import StepCounter
from megatrain.embed.updates_in_ram import OrdinaryUpdates, squares_in_ram
from megatrain.embed.weights import block_of
from megatrain.optim.average import EMA, WeightAverage
from megatrain.optim.base import Optimizer as Arithmetic
from megatrain.optim.base import StateKind
from megatrain.optim.clip import NonFiniteGradientError, global_norm, gradient_scale
from megatrain.optim.table import StateDtype
from megatrain.optim.threads import KernelThreads
from megatrain.ranks.dtensors import add_over_shards, is_dtensor
from tiered import TieredStore

_NO_GRADIENTS = (
    "step() was called without a backward since the last step, which consumed the gradients in the store. Their "
    "parameters are not updated, whereas torch would use the gradients again"
)


class TieredOptimizer(torch.optim.Optimizer):
    """A ``torch.optim.Optimizer`` with its state in a store. AdamW needs 12 bytes per parameter, including weights.

    Parameters can be ordinary or in offloaded modules. The arithmetic is the same as in ``megatrain-tier run``:
    the optimizer updates an fp32 master (for a bf16 parameter, the master's low half is in the store). Results are
    bit-identical for any placement. ``step`` clips by the exact global norm and updates ordinary parameters
    immediately. Offloaded units are updated right before their next use, while the next unit's blocks are fetched.
    Reading a unit's weights earlier applies its update first. Parameter groups, LR schedulers and closures work as in
    torch. Parameters without a gradient are skipped.

    For sharded parameters (``DTensor``: FSDP2, tensor parallelism), each rank updates its shard and stores the shard's
    state. Weights and gradients stay in place. All ranks must step together. ``max_grad_norm`` clips by the norm over
    all ranks.

    Args:
        defaults: Default settings of parameter groups.
        store: Store of the state. Default: the store of the parameters, if they are offloaded.
        max_grad_norm: Maximum global norm; 0 disables clipping. With clipping, ``grad_norm`` is the last step's norm.
        nonfinite: Reaction to a NaN or infinite norm when clipping. "stop" raises an error before the update,
            "skip" skips the update, and "ignore" uses the gradients, as torch does.
        offload_gradients: Whether gradients of ordinary parameters move to the store as soon as autograd computes them.
            The store sums them in fp32 over backward passes.
        state_dtype: Format of the moments: "float32", "bfloat16" (stochastic rounding by seed, step and element) or
            "int8" (one scale per 256 elements); see ``megatrain.optim.elementwise``.
        seed: Seed of stochastic rounding.
        ema_decay: Decay of a moving average of the fp32 weights (4 more bytes per parameter); 0 for no average. The
            average starts as a copy of the initial weights. See ``averaged_parameters``.
        state: Allowed home tiers of the state, preferred first. "auto" uses RAM while it has space, then drives.
        name: Key prefix for blocks of ordinary parameters. Optimizers in the same store need different prefixes.
        checkpoint: What ``state_dict`` returns. "generation": the number of a committed generation of the store, which
            each rank saves and loads separately. "tensors": tensors, as ``torch.distributed.checkpoint`` requires.
            "auto": tensors if a parameter is sharded, otherwise a generation.

    Raises:
        TypeError: ``params`` contains a module, ``store`` is not a store, or an option is supported only by torch.
        ValueError: A setting is out of range or incompatible with sharded parameters, no store is known, or a dtype has
            no master weights.
        CapacityError: The state does not fit in the store.
    """

    #: Names of the group settings that ``make_update_rule`` reads.
    setting_names: tuple[str, ...]
    #: Names of state in the ``state_dict`` of torch's equivalent optimizer, by kind of state.
    torch_names: Mapping[str, str] = {}

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
        **unknown_options: Any,
    ) -> None:
        optimizer_checks.check_arguments(type(self).__name__, params, store, unknown_options)
        optimizer_checks.check_options(checkpoint, max_grad_norm, state_dtype, nonfinite)
        if not 0 <= ema_decay < 1:
            raise ValueError(f"ema_decay={ema_decay}: it must be at least 0 (no average) and below 1")
        self.max_grad_norm, self.nonfinite = max_grad_norm, nonfinite
        self.state_dtype, self.seed, self.ema_decay = state_dtype, seed, ema_decay
        self.threads = KernelThreads(is_interleaved=True)
        self.grad_norm: float | None = None
        self._store, self._checkpoint = store, checkpoint
        averages = [EMA] if ema_decay else []
        self._state_groups = OptimizerGroups(name, state, averages, offload_gradients=offload_gradients)
        self.groups: Sequence[StateGroup] = self._state_groups.groups
        self._counter = StepCounter(self.setting_names, self._make_rule)
        self.steps = self._counter.steps
        self._updates = OrdinaryUpdates(self.threads)
        self._saved = SavedState(self)
        self._measured_gradients: object = None  # versions of the gradients whose norm is grad_norm
        self._has_consumed = False  # whether step() consumed gradients since the last zero_grad()
        self._is_averaged = False  # whether masters and averages are swapped
        super().__init__(params, defaults)
        shared_state(self.store).optimizers.add(self)
        self.state = StoredState(self)  # type: ignore[assignment]

    @property
    def store(self) -> TieredStore:
        """Store of the state."""
        if self._store is None:
            raise ValueError("these parameters are in no store. Pass store=megatrain.open_store(...)")
        return self._store

    @abstractmethod
    def make_update_rule(self, settings: Mapping[str, Any]) -> Arithmetic:
        """Return the update rule that applies a group's settings."""

    def _make_rule(self, settings: Mapping[str, Any]) -> Arithmetic:
        """Return the update rule that applies a group's settings and, with averages, also updates the averages."""
        rule = self.make_update_rule(settings)
        return WeightAverage(rule, self.ema_decay, self.threads) if self.ema_decay else rule

    def _kernel_options(self) -> dict[str, Any]:
        """Return the arguments that all elementwise update rules receive."""
        return {"threads": self.threads, "state_dtype": self.state_dtype, "seed": self.seed}

    def widest_settings(self, settings: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return settings whose update rule needs all state that any group needs."""
        return settings

    def kinds_of(
        self, settings: Mapping[str, Any], split_master: bool, parameters: Mapping[str, nn.Parameter]
    ) -> Sequence[StateKind]:
        """Return the kinds of state for a block's parameters. ``parameters`` maps names in the layout to parameters."""
        return self.make_update_rule(self.widest_settings(settings)).state_kinds(split_master)

    def torch_names_of(self, parameter: nn.Parameter) -> Mapping[str, str]:
        """Return the ``torch_names`` that apply to a parameter."""
        return self.torch_names

    def scratch_bytes(self, parameters: Iterable[nn.Parameter]) -> int:
        """Return the RAM in bytes that updating these parameters one at a time needs in addition to blocks."""
        return 0

    def check_group(self, param_group: Mapping[str, Any]) -> None:
        """Raise ``ValueError`` if a group's setting is out of range, or if a parameter cannot be updated."""
        optimizer_checks.check_settings(param_group)

    def __deepcopy__(self, memo: Any) -> Any:
        """Raise ``TypeError``, because the state in the store cannot be copied."""
        raise TypeError("an optimizer with state in a store cannot be copied. Create another, load its state_dict()")

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Raise ``TypeError``, because only ``state_dict`` can be saved."""
        raise TypeError("an optimizer with its state in a store cannot be pickled. Save its state_dict()")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters and create their state. Raises the same errors as the constructor."""
        super().add_param_group(param_group)
        try:
            self.check_group(self.param_groups[-1])
            self._make_state(self.param_groups[-1])
        except BaseException:
            self.param_groups.pop()
            raise

    def _make_state(self, param_group: Mapping[str, Any]) -> None:
        """Create state for a group's trained parameters that have none. After an error, no state is created."""
        new = [p for p in param_group["params"] if id(p) not in self._state_groups.ids_with_state and p.requires_grad]
        if not new:
            return
        blocks = dict.fromkeys(block for p in new if (block := block_of(p)) is not None)
        self._store = self._store or next((block.store for block in blocks), None)
        optimizer_checks.check_blocks(blocks, self.store)
        kinds = partial(self.kinds_of, param_group)
        optimizer_checks.check_sharded(
            new,
            kinds(False, {str(index): p for index, p in enumerate(new)}),
            type(self).__name__,
            has_lost_parameters=not self._state_groups.ids_with_state <= set(map(id, self.parameters())),
            offloads_gradients=self._state_groups.offload_gradients,
        )
        if self.saves_tensors and (blocks or any(group.is_offloaded for group in self.groups)):
            raise ValueError(
                'checkpoint="tensors" (the default with sharded parameters) saves no weights of offloaded modules. '
                'Pass checkpoint="generation"'
            )
        names = {id(parameter): str(index) for index, parameter in enumerate(self.parameters())}
        self._state_groups.add(self.store, new, blocks, kinds, self.scratch_bytes(new), names)
        record_optimizer([parameter for parameter in new if block_of(parameter) is None], self)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Apply the gradients. Gradients in the store are consumed. Other gradients stay in ``.grad``, as in torch.

        Args:
            closure: Function that recomputes loss and gradients, as in torch.

        Raises:
            NonFiniteGradientError: See ``nonfinite``. No weight changed, and all gradients were dropped.
        """
        self.check_not_averaged("step()")
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.finish_updates()  # updates of units that were not used since the last step are still due
        for param_group in self.param_groups:
            self._make_state(param_group)  # parameters that were frozen before may need state
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
        for group in self.groups:  # check all groups before any gradient is consumed
            group.check_free()
        gradient_names = [(group, group.gradients.take()) for group in self.groups]
        has_gradients = any(names for group, names in gradient_names if group.gradients.key is not None)
        if self._has_consumed and not has_gradients:
            warnings.warn(_NO_GRADIENTS, stacklevel=2)
        self._has_consumed = has_gradients
        all_settings = self._counter.count_steps(self.param_groups, gradient_names)
        shared_state(self.store).note_change()
        updates: dict[OrdinaryGroup, GroupUpdate] = {}
        for group, names in gradient_names:
            own = {name: settings for name in names if (settings := all_settings.get(id(group.parameters[name])))}
            if own:
                group.submit(GroupUpdate(own, scale * group.gradients.factor), updates)
        with self._state_groups.deferred.recording_interrupts(is_atomic=False):
            self._updates.apply(updates)
        return loss

    def finish_updates(self) -> None:
        """Apply all deferred updates, so that the store contains the weights and state after the last step.

        Raises:
            InterruptedUpdateError: An earlier update was partially applied. This is raised only once.
        """
        self._state_groups.deferred.finish()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop all gradients, including gradients in the store. ``set_to_none`` has no effect."""
        self._has_consumed = False
        for group in self.groups:
            group.gradients.clear()
        for parameter in self.parameters():
            if block_of(parameter) is None:
                parameter.grad = None

    def measure_grad_norm(self) -> float:
        """Return the global norm of the current gradients, which the next step uses for clipping.

        This method is for trainers that clip before ``step``. If gradients change in between, ``step`` measures again.
        The norm is summed over parameters in the optimizer's order, so it does not depend on which parameters are
        offloaded (the engine sums over blocks). With sharded parameters, this is a collective.
        """
        squares = squares_in_ram(self.groups, self.threads)
        squares.update(exchange_gradients(self.groups, self.threads))
        for group in self.groups:
            if squares.keys().isdisjoint(group.parameters.values()):
                group_squares = group.gradients.squared_norms(self.threads)
                squares.update((group.parameters[name], square) for name, square in group_squares.items())
        # Include parameters without a gradient, because all ranks must sum over the same parameters.
        owners = [parameter for parameter in self.parameters() if id(parameter) in self._state_groups.ids_with_state]
        if any(map(is_dtensor, owners)):
            totals = add_over_shards(owners, [squares.get(parameter, 0.0) for parameter in owners])
            squares.update(zip(owners, totals, strict=True))
        self.grad_norm = global_norm(squares[parameter] for parameter in self.parameters() if parameter in squares)
        self._measured_gradients = [group.gradients.version for group in self.groups]  # detects changes of gradients
        return self.grad_norm

    def _grad_scale(self) -> float | None:
        """Return the factor by which all gradients are multiplied, or None if the norm requires skipping the update."""
        if self.max_grad_norm == 0:
            return 1.0
        is_current = self._measured_gradients == [group.gradients.version for group in self.groups]
        norm = self.grad_norm if is_current and self.grad_norm is not None else self.measure_grad_norm()
        self._measured_gradients = None
        return gradient_scale(norm, self.max_grad_norm, self.nonfinite)

    def parameters(self) -> list[nn.Parameter]:
        """Return the parameters of all groups, in order."""
        return [parameter for group in self.param_groups for parameter in group["params"]]

    @contextmanager
    def averaged_parameters(self) -> Iterator[None]:
        """Replace weights with their averages inside the context, for evaluation, ``generate`` or ``save_pretrained``.

        Masters and averages are swapped in the store group by group, and swapped back exactly on exit. The average of a
        parameter that was never updated is its weight. The swap changes weights, so graphs of earlier forwards become
        stale. ``step`` and ``state_dict`` raise an error inside the context. Ranks with shared or sharded parameters
        must enter and leave the context together.

        Raises:
            ValueError: The optimizer keeps no averages (``ema_decay``).
            RuntimeError: The context is already active.
            WeightInUseError: ``gathered`` or a running forward uses the weights.
        """
        if not self.ema_decay:
            raise ValueError("this optimizer has no averages of the weights. Construct it with ema_decay=0.999")
        self.check_not_averaged("averaged_parameters()")
        self.finish_updates()
        swapped_groups: list[tuple[StateGroup, Mapping[str, object]]] = []
        self._is_averaged = True
        try:
            for group in self.groups:
                updated_names = {name: None for name, p in group.parameters.items() if self.steps.get(p, 0)}
                if updated_names:
                    with self._state_groups.deferred.recording_interrupts():
                        group.swap_averages(updated_names)
                    swapped_groups.append((group, updated_names))
            yield
        finally:
            for group, names in swapped_groups:
                with self._state_groups.deferred.recording_interrupts():
                    group.swap_averages(names)
            self._is_averaged = False

    def check_not_averaged(self, call: str) -> None:
        """Raise ``RuntimeError`` if averages are swapped in, because the caller would use them as weights."""
        if self._is_averaged:
            raise RuntimeError(f"{call} inside of averaged_parameters(), where weights are averages. Leave it first")

    def state_dict(self) -> dict[str, Any]:
        """Return the parameter groups and the number of a committed generation that contains the weights and the state.

        If anything has changed since the last commit, this commits a generation, which then survives a power failure.
        The result contains no large tensors. Save it anywhere with ``torch.save``, and load it with a store on the same
        folder.

        With ``checkpoint="tensors"``, the result contains all state as tensors in memory-mapped files. State is sharded
        like its parameter, so ``torch.distributed.checkpoint`` can save it and load it on a different set of ranks.

        Raises:
            GenerationError: The store has no folder (``open_store(path=...)``).
            TransferError: A drive reported an error.
            OSError: A drive has no space for the tensors.
        """
        self.check_not_averaged("state_dict()")
        self.finish_updates()
        contents = super().state_dict()
        if self.saves_tensors:
            contents["state"] = {
                index: self._saved.tensors_of(parameter, with_master=True)
                for index, parameter in enumerate(self.parameters())
                if id(parameter) in self._state_groups.ids_with_state
            }
            return contents
        contents["tiered"] = self._saved.record()
        return contents

    @property
    def saves_tensors(self) -> bool:
        """Whether ``state_dict`` returns all state as tensors."""
        return self._checkpoint == "tensors" or (self._checkpoint == "auto" and any(map(is_dtensor, self.parameters())))

    def full_state_dict(self) -> dict[str, Any]:
        """Return the ``state_dict`` of torch's equivalent optimizer. Its tensors are in memory-mapped files."""
        self.check_not_averaged("full_state_dict()")
        self.finish_updates()
        contents = super().state_dict()
        indices = {id(parameter): index for index, parameter in enumerate(self.parameters())}
        contents["state"] = {
            indices[id(p)]: {name: values for name, values in self.state[p].items() if name != EMA.name}
            for p in self.steps
        }
        unsupported = dict.fromkeys(optimizer_checks.UNSUPPORTED_SETTINGS, 0)
        contents["param_groups"] = [{**unsupported, **group} for group in contents["param_groups"]]
        return contents

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a ``state_dict`` of this class (including offloaded weights) or of torch's equivalent optimizer.

        Raises:
            ValueError: The groups do not match, or the saved state does not fit this optimizer.
            GenerationError: The generation does not exist or is damaged.
            CorruptBlockError: The generation is damaged.
        """
        self.check_not_averaged("load_state_dict()")
        groups = state_dict["param_groups"]
        optimizer_checks.check_groups(self.param_groups, groups)
        shared_state(self.store).finish_updates()  # so that the weights are complete if loading fails
        if "tiered" in state_dict:
            self._saved.load_generation(state_dict["tiered"])
        else:
            keys = [key for group in groups for key in group["params"]]  # some trainers save names instead of numbers
            state = state_dict["state"]
            self._saved.load_tensors({index: state[key] for index, key in enumerate(keys) if key in state})
        self.zero_grad()
        for state_group in self.groups:
            state_group.handle_loaded_state(with_weights=False)
        for group, saved_group in zip(self.param_groups, groups, strict=True):
            group.update((name, value) for name, value in saved_group.items() if name != "params")

    def state_of(self, parameter: nn.Parameter) -> dict[str, Any]:
        """Return copies of a parameter's state under torch's names, in unlinked memory-mapped files.

        Raises:
            KeyError: The parameter has no state, because it was never updated or belongs to a different optimizer.
        """
        if not isinstance(parameter, nn.Parameter) or parameter not in self.steps:
            raise KeyError("this parameter has no state, because it was never updated")
        self.finish_updates()
        return self._saved.tensors_of(parameter)

    def release(self) -> None:
        """Apply the deferred updates and unregister the state. The optimizer cannot be used afterwards.

        Committed generations keep their contents.
        """
        self.check_not_averaged("release()")
        self.finish_updates()
        self.zero_grad()
        self._state_groups.release(self.store)
        shared = shared_state(self.store)
        shared.optimizers.discard(self)
        self.threads.close()
        shared.note_change()
