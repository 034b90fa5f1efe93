"""What the optimizers share whose state lives in a tiered store: torch's interface, steps, clipping, saving."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from megatrain.embed.behind import InterruptedUpdateError, UpdatesBehind
from megatrain.embed.device_copies import DeviceCopies
from megatrain.embed.groups import (
    StateGroup,
    TieredGroup,
    UntieredGroup,
    Work,
    take_gradients,
    update_in_order,
)
from megatrain.embed.in_ram import UpdatesInRam, norms_in_ram
from megatrain.embed.parameters import block_of
from megatrain.embed.partition import mark_optimized
from megatrain.embed.resume import StoredState, load_state, save_state
from megatrain.embed.settings import (
    BYTES_AT_ONCE,
    UNSUPPORTED,
    NotCopied,
    check_room,
    check_settings,
    packed,
    plain,
    settings_of,
)
from megatrain.embed.stores import home_order, ledger_of
from megatrain.embed.weights import WeightInUseError
from megatrain.engine.step import NonFiniteGradientError
from megatrain.models.layout import build_layout
from megatrain.optim.base import Optimizer as Arithmetic
from megatrain.optim.clip import clip_coefficient, global_norm
from megatrain.optim.threads import KernelThreads
from tiered.errors import TieredError

if TYPE_CHECKING:
    from megatrain.optim.base import StateKind
    from tiered.store import TieredStore

__all__ = ["InterruptedUpdateError", "TieredOptimizer"]

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
