"""Optimizers of torch's interface whose state lives in a tiered store and is updated there."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn

from megatrain.embed.groups import Settings, StateGroup, TieredGroup, UntieredGroup, Work
from megatrain.embed.parameters import block_of
from megatrain.embed.resume import StoredState, load_state, save_state
from megatrain.embed.stores import home_order, ledger_of
from megatrain.engine.step import NonFiniteGradientError
from megatrain.models.layout import build_layout
from megatrain.optim.adafactor import Adafactor, AdafactorConfig
from megatrain.optim.adamw import AdamW, AdamWConfig
from megatrain.optim.base import Optimizer as Arithmetic
from megatrain.optim.clip import clip_coefficient, global_norm
from megatrain.optim.lion import Lion, LionConfig
from megatrain.optim.sgd import SGD, SGDConfig
from megatrain.optim.threads import KernelThreads
from tiered.errors import CapacityError

if TYPE_CHECKING:
    from tiered.store import TieredStore

__all__ = ["TieredAdafactor", "TieredAdamW", "TieredLion", "TieredOptimizer", "TieredSGD"]

_GROUP_ELEMENTS = 1 << 19
"""Ordinary parameters are put together up to this many, 2 MiB of each kind of state in fp32; a larger one is by itself.
It does not depend on the size of the tiers, so that a state can be loaded where they are others."""


_BYTES_AT_ONCE = 2 * (12 + 4)
"""Per parameter: state and gradient of the group that is updated, and of the one that is fetched meanwhile."""


class TieredOptimizer(torch.optim.Optimizer):
    """A ``torch.optim.Optimizer`` with its state in a store: 12 bytes per parameter, weights included, for AdamW.

    Takes parameters of tiered modules and ordinary ones, also together. Arithmetic is that of ``megatrain-tier run``:
    an fp32 master (a bf16 parameter's continues in the store), the same bits whatever the placement. ``step`` clips
    by the exact global norm, makes the update of ordinary parameters, and leaves that of a tiered unit to its next
    forward, where it runs beside the fetching of the next one; whoever reads weights before gets it made first.
    Parameter groups, LR schedulers and closures work as in torch; a parameter without a gradient is left alone.

    Args:
        params: as for any optimizer. defaults: settings of the groups that do not give their own.
        store: of the state; default: that of the parameters, where they are tiered.
        max_grad_norm: largest global norm that is let through; 0: no clipping. ``grad_norm`` then tells the norm.
        nonfinite: with clipping, what a NaN or infinite norm does: "stop" raises and changes nothing, "skip" leaves
            the update out, "ignore" uses it as torch does.
        offload_gradients: gradients of ordinary parameters leave for the store as autograd makes them, and are
            summed there in fp32 over backward passes.
        state: tiers that state may live in, most wanted first; "auto": RAM while there is room, then drives.
        name: of the blocks of ordinary parameters; a second optimizer in one store needs another.

    Raises:
        ValueError: a setting out of range, no store, or a dtype without master weights. CapacityError: no room.
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
        state: Sequence[str] | str = "auto",
        name: str = "optimizer",
    ) -> None:
        if not max_grad_norm >= 0:
            raise ValueError(f"max_grad_norm={max_grad_norm}: give the largest norm, or 0 for no clipping")
        self.max_grad_norm, self.nonfinite = max_grad_norm, nonfinite
        self.grad_norm: float | None = None
        self._is_measured = False
        self.threads = KernelThreads()
        self.steps: dict[nn.Parameter, int] = {}
        self.groups: list[StateGroup] = []
        self._name, self._offload, self._homes = name, offload_gradients, state
        self._store = store
        self._due: dict[TieredGroup, Work] = {}
        self._arithmetics: dict[tuple[Any, ...], Arithmetic] = {}
        super().__init__(params, defaults)
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

    # -- parameters --------------------------------------------------------------------------------------------

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters; their state is made now.

        Raises:
            ValueError, CapacityError: as for the constructor.
        """
        super().add_param_group(param_group)
        added = self.param_groups[-1]
        _check(added)
        self._make_state([parameter for parameter in added["params"] if parameter.requires_grad])
        self._check_room()

    def _make_state(self, parameters: Sequence[nn.Parameter]) -> None:
        known = {id(p) for group in self.groups for p in group.parameters.values()}
        new = [parameter for parameter in parameters if id(parameter) not in known]
        blocks = dict.fromkeys(block for p in new if (block := block_of(p)) is not None)
        self._store = self._store or next((block.store for block in blocks), None)
        if self._store is None:
            raise ValueError("these parameters are in no store: give store=megatrain.open_store(...)")
        for block in blocks:
            if block.store is not self._store:
                raise ValueError(f"{block.layout.name} is in another store than the optimizer's")
            if block.before_use is not None:
                raise ValueError(f"{block.layout.name} has an optimizer already")
            if block.gradients is None:
                continue  # frozen when it was tiered
            kinds = self._arithmetic(self.param_groups[-1]).state_kinds(block.dtype.itemsize == 2)
            group = TieredGroup(block, kinds, home_order(self._store, self._homes))
            self._watch(group)
            self.groups.append(group)
        self._make_untiered([parameter for parameter in new if block_of(parameter) is None])

    def _watch(self, group: TieredGroup) -> None:
        """Let the update that is due be made before anybody uses the weights, or sums up new gradients."""

        def finish() -> None:
            self._finish(group)

        def replaced(names: frozenset[str]) -> None:
            group.reset_low(names)

        assert group.weights.gradients is not None, group.layout.name
        group.weights.before_use = group.weights.gradients.before_add = finish
        group.weights.after_change = replaced

    def _make_untiered(self, parameters: Sequence[nn.Parameter]) -> None:
        first = sum(isinstance(group, UntieredGroup) for group in self.groups)
        ledger = ledger_of(self.store)
        packs = list(_packed(parameters))
        largest = max((sum(parameter.numel() for parameter in together) for together in packs), default=0)
        ledger.working_bytes = max(ledger.working_bytes, _BYTES_AT_ONCE * largest)
        for number, together in enumerate(packs, first):
            named = {f"{number}.{index}": parameter for index, parameter in enumerate(together)}
            root = f"{self._name}/{number:05d}"
            layout = build_layout(root, ((name, parameter.shape) for name, parameter in named.items()), True)
            kinds = self._arithmetic(self.param_groups[-1]).state_kinds(together[0].dtype.itemsize == 2)
            homes = home_order(self.store, self._homes)
            self.groups.append(
                UntieredGroup(self.store, root, layout, named, kinds, homes, offload_gradients=self._offload)
            )

    def _check_room(self) -> None:
        """Refuse now what the first step would.

        Raises:
            CapacityError: RAM cannot hold what an update of some group needs at once.
        """
        ram = self.store.tier("ram")
        for group in self.groups:
            need = sum(ram.slot_bytes(nbytes) for nbytes in group.bytes_at_once())
            if need > ram.capacity_bytes:
                raise CapacityError(
                    "ram", need, ram.capacity_bytes, detail=f"to update {group.layout.name} with its state and gradient"
                )

    # -- steps -------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        """Use the gradients for an update; they are consumed.

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
        scale = self._grad_scale()
        taken = [(group, group.take_gradients()) for group in self.groups]
        if scale is None:
            self.zero_grad()
            if self.nonfinite == "skip":
                return loss
            raise NonFiniteGradientError(
                f"the gradient is not finite (norm {self.grad_norm}); nothing was updated. Lower the learning rate, "
                'look at the data of this step, or construct the optimizer with nonfinite="skip"'
            )
        settings = self._settings({name for _, found in taken for name in found})
        for number, (group, found) in enumerate(taken):
            mine = {name: settings[group.parameters[name]] for name in found if group.parameters[name] in settings}
            work = Work(mine, scale, {name: gradient for name, gradient in found.items() if gradient is not None})
            if isinstance(group, TieredGroup):
                self._due[group] = work
            elif mine:
                for following, _ in taken[number + 1 : number + 2]:
                    following.prefetch()
                group.update(work)
        ledger_of(self.store).num_changes += 1
        return loss

    def finish_updates(self) -> None:
        """Make the updates that are still due; afterwards the store holds weights and state after the last step."""
        for group in list(self._due):
            self._finish(group)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, also those in the store."""
        for group in self.groups:
            if group.gradients is not None:
                group.gradients.consume()
        for param_group in self.param_groups:
            for parameter in param_group["params"]:
                if block_of(parameter) is None:
                    parameter.grad = None

    def _finish(self, group: TieredGroup) -> None:
        work = self._due.pop(group, None)
        if work is not None and work.settings:
            group.update(work)

    def measure_grad_norm(self) -> float:
        """Return the global norm of the gradients as they are now; the step that follows clips by it.

        For trainers that clip before ``step``: nothing may add to the gradients in between.
        """
        squares: dict[nn.Parameter, float] = {}
        for group in self.groups:
            found = group.squared_norms(self.threads)
            squares.update((group.parameters[name], square) for name, square in found.items())
        # Added up in the order of the optimizer's parameters, so that it does not matter which are tiered.
        ordered = (parameter for param_group in self.param_groups for parameter in param_group["params"])
        self.grad_norm = global_norm(squares[parameter] for parameter in ordered if parameter in squares)
        self._is_measured = True
        return self.grad_norm

    def _grad_scale(self) -> float | None:
        """Return the factor on all gradients; None where they are not finite and must not be used."""
        if self.max_grad_norm == 0:
            return 1.0
        if not self._is_measured or self.grad_norm is None:
            self.measure_grad_norm()
        self._is_measured = False
        assert self.grad_norm is not None
        if math.isfinite(self.grad_norm):
            return clip_coefficient(self.grad_norm, self.max_grad_norm)
        return self.max_grad_norm / self.grad_norm if self.nonfinite == "ignore" else None

    def _settings(self, names: set[str]) -> dict[nn.Parameter, Settings]:
        """Return how each parameter with a gradient is updated, and count its step."""
        with_gradient = {
            id(group.parameters[name]) for group in self.groups for name in group.parameters if name in names
        }
        found: dict[nn.Parameter, Settings] = {}
        for param_group in self.param_groups:
            arithmetic, lr = self._arithmetic(param_group), float(param_group["lr"])
            for parameter in param_group["params"]:
                if id(parameter) in with_gradient:
                    self.steps[parameter] = self.steps.get(parameter, 0) + 1
                    decay = float(param_group.get("weight_decay", 0.0))
                    found[parameter] = Settings(arithmetic, self.steps[parameter], lr, decay)
        return found

    def _arithmetic(self, param_group: Mapping[str, Any]) -> Arithmetic:
        key = tuple(_plain(param_group[name]) for name in self.setting_names())
        if key not in self._arithmetics:
            self._arithmetics[key] = self.make_arithmetic(param_group)
        return self._arithmetics[key]

    # -- saving ------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return groups and the number of a committed generation of the store, which holds weights and state.

        Commits where anything has changed since the last one, and returns when that would survive a power cut. Holds
        no big tensors: ``torch.save`` it where you like, and load it into an optimizer of a store on the same folder.

        Raises:
            GenerationError: the store has no folder (``open_store(path=...)``). TransferError: a drive refused.
        """
        self.finish_updates()
        return {**super().state_dict(), "tiered": save_state(self)}

    def full_state_dict(self) -> dict[str, Any]:
        """Return what ``torch.optim``'s optimizer of this kind would: all state, in tensors over files."""
        self.finish_updates()
        packed = super().state_dict()
        numbers = {id(p): n for n, p in enumerate(p for group in self.param_groups for p in group["params"])}
        packed["state"] = {numbers[id(p)]: self.state[p] for p in self.steps}
        return packed

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Go back to what ``state_dict`` told of, weights of tiered modules included; or take over torch's own state.

        Raises:
            ValueError: the groups do not match, or that generation is gone. GenerationError, CorruptBlockError: the
                store has no such generation, or it is damaged.
        """
        self._due.clear()
        self.zero_grad()
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
        return AdamW(AdamWConfig(0.0, float(beta1), float(beta2), float(settings["eps"]), 0.0), self.threads)

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
        return Lion(LionConfig(0.0, float(beta1), float(beta2), 0.0), self.threads)

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
        return SGD(SGDConfig(0.0, float(settings["momentum"]), bool(settings["nesterov"]), 0.0), self.threads)

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
        names = self.setting_names()
        return Adafactor(AdafactorConfig(0.0, *(float(settings[name]) for name in names), 0.0), self.threads)

    def torch_names(self) -> Mapping[str, str]:
        return {}


def _check(param_group: Mapping[str, Any]) -> None:
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


def _packed(parameters: Sequence[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
    """Put ordinary parameters together that are alike in dtype and device, up to a size."""
    together: list[nn.Parameter] = []
    for parameter in parameters:
        if together:
            alike = (parameter.dtype, parameter.device) == (together[0].dtype, together[0].device)
            if not alike or sum(p.numel() for p in together) + parameter.numel() > _GROUP_ELEMENTS:
                yield together
                together = []
        together.append(parameter)
    if together:
        yield together


def _plain(value: Any) -> Any:
    return tuple(float(one) for one in value) if isinstance(value, list | tuple) else float(value)
