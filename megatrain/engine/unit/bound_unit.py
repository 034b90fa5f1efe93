"""Binding of weights to an unmodified module, and calls to its `forward`.

Between visits, a module's parameters are placeholders without memory (`absent_weights.py`). During a visit, they are
views of leased blocks, and leaves of the autograd graph.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from operator import is_not
from types import MappingProxyType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from megatrain.base.errors import UnsupportedModelError
from megatrain.engine.unit.absent_weights import AbsentWeight, WeightRead, absent_weight
from megatrain.engine.unit.arguments import CapturedArguments, CapturedResult
from megatrain.engine.unit.compiled_layers import explain_failures
from megatrain.engine.unit.passing import RowLookUps, SplitWeight
from megatrain.engine.unit.state import without_saved_tensors
from megatrain.engine.unit.suspend import UnitCall, suspend
from megatrain.engine.unit.weight_gradients import GradientReceiver, GradientTarget, intercept_leaves, weight_leaf

if TYPE_CHECKING:
    from torch import nn

    from megatrain.engine.program.block_access import MatrixParts
    from megatrain.engine.unit.compiled_layers import LayerCompiler
    from megatrain.models.graph import Unit


class BoundUnit:
    """Unit to which weights can be bound, so that its unmodified module's `forward` can run.

    Args:
        unit: Unit whose module has not been stubbed yet.

    Attributes:
        forward: The module's original or compiled forward; for a container, a function that copies its parameters.
        rows: Look-ups of rows in weights that are leased by part. They precede the runs of the unit.
    """

    def __init__(self, unit: Unit, device: torch.device, compiler: LayerCompiler | None = None) -> None:
        self.unit = unit
        self.forward: Callable[..., Any] = self._copy_parameters if unit.is_container else unit.module.forward
        self._is_compiled = compiler is not None and unit.is_layer
        if compiler is not None and unit.is_layer:
            self.forward = compiler.compile_forward(unit)
        self.receiver = GradientReceiver()
        self.rows = RowLookUps()
        self._modules = tuple(unit.module.modules())
        self._slots: list[tuple[dict[str, Any], str, str]] = []
        self._trainable: dict[str, bool] = {}
        self._declared_dtype: dict[str, torch.dtype] = {}
        self._placeholders: dict[str, AbsentWeight] = {}
        for param_path, owner, _ in unit.params:
            module_path, _, leaf = param_path.rpartition(".")
            parameters = unit.module.get_submodule(module_path)._parameters
            parameter = parameters[leaf]
            assert parameter is not None, param_path
            self._slots.append((parameters, leaf, owner))
            self._trainable[owner] = parameter.requires_grad
            self._declared_dtype[owner] = parameter.dtype
            self._placeholders[owner] = absent_weight(parameter, device)
            self._placeholders[owner].site = (unit.index, owner)
        self.trainable = tuple(owner for owner, requires_grad in self._trainable.items() if requires_grad)

    def _read_weight(self, weight_read: WeightRead, rows: Tensor | None = None) -> Tensor:
        """Return values that code outside of the module reads. The result is a copy, because it outlives the visit."""
        weight: Tensor = next(parameters[leaf] for parameters, leaf, owner in self._slots if owner == weight_read.owner)
        if rows is None:
            return weight.clone()
        matrix = weight if weight.dim() == 2 else weight.reshape(len(weight), -1)
        return functional.embedding(rows, matrix).reshape(*rows.shape, *weight.shape[1:])

    def _copy_parameters(self) -> dict[str, Tensor]:
        """Return copies of a container's parameters, which outlive the visit. Used as the forward of containers."""
        return {leaf: parameters[leaf].clone() for parameters, leaf, _ in self._slots}

    def zeros(self) -> dict[str, Tensor]:
        """Return zero-stride zeros to bind instead of unused weights."""
        return {
            owner: torch.zeros((), dtype=weight.dtype, device=weight.device).expand(weight.shape)
            for owner, weight in self._placeholders.items()
        }

    def with_placeholders(self) -> AbstractContextManager[None]:
        """Return a context in which placeholders without memory replace the parameters."""
        return self._set_slots(self._placeholders)

    @contextmanager
    def bind(self, weights: Mapping[str, Tensor | MatrixParts]) -> Iterator[dict[str, Tensor]]:
        """Bind `weights`, given by name, to the parameters within the context. Yield the trainable leaves by name."""
        leaves = {owner: self._make_leaf(owner, weights[owner]) for owner in self._trainable}
        with self.rows.bind(leaves.values()), self._set_slots(leaves), intercept_leaves(leaves.values()):
            yield {owner: leaves[owner] for owner in self.trainable}

    def look_up(self, calls: Sequence[UnitCall]) -> list[list[Tensor]]:
        """Look up the rows that calls need from weights leased by part; see ``RowLookUps.look_up``."""

        def start_run(call: UnitCall) -> None:
            with torch.no_grad(), self._restore_attributes():
                self.forward(*call.args, **call.kwargs)

        return self.rows.look_up(calls, start_run)

    def _make_leaf(self, owner: str, weight: Tensor | MatrixParts) -> Tensor:
        """Return the graph leaf for a weight. Compiled layers get plain tensors, which torch can compile."""
        if not isinstance(weight, Tensor):
            target = GradientTarget(self.receiver, owner) if self._trainable[owner] else None
            return SplitWeight.from_placeholder(self._placeholders[owner], weight, target, self.rows)
        values = weight.detach().to(self._declared_dtype[owner])
        if self._trainable[owner] and values.dim() == 2 and not self._is_compiled:
            return weight_leaf(values, GradientTarget(self.receiver, owner))
        return values.requires_grad_(self._trainable[owner])

    @contextmanager
    def replace_weight(self, owner: str, weight: Tensor) -> Iterator[Tensor]:
        """Replace a parameter with a tensor within the context. Yield the previously bound tensor."""
        previous = next(leaf for name, leaf in self.leaves() if name == owner)
        with self._set_slots({owner: weight}):
            yield previous

    def leaves(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the name and the bound tensor of each parameter."""
        for parameters, leaf, owner in self._slots:
            yield owner, parameters[leaf]

    def matrices(self) -> dict[int, str]:
        """Return the names of bound weights by id, except weights stored in parts; empty for compiled layers."""
        if self._is_compiled:
            return {}
        return {id(leaf): owner for owner, leaf in self.leaves() if not isinstance(leaf, SplitWeight)}

    def has(self, owner: str) -> bool:
        """Return whether the unit uses the parameter with this name."""
        return owner in self._placeholders

    def placeholder(self, owner: str) -> AbsentWeight:
        """Return the placeholder for the parameter with this name."""
        return self._placeholders[owner]

    @contextmanager
    def _set_slots(self, tensors: Mapping[str, Tensor]) -> Iterator[None]:
        """Set parameters to tensors, given by name, within the context."""
        slots = [slot for slot in self._slots if slot[2] in tensors]
        originals = [parameters[leaf] for parameters, leaf, _ in slots]
        try:
            for parameters, leaf, owner in slots:
                parameters[leaf] = tensors[owner]
            yield
        finally:
            for (parameters, leaf, _), parameter in zip(slots, originals, strict=True):
                parameters[leaf] = parameter

    def backward_context(self) -> AbstractContextManager[None]:
        """Return a context for a run's backward. If `torch.compile` fails, the error names the unit."""
        return explain_failures(self.unit) if self._is_compiled else nullcontext()

    def run(
        self,
        captured: CapturedArguments,
        tensors: list[Tensor | None],
        record_keys: tuple[str, ...],
        *,
        keep_graph: bool,
    ) -> CapturedResult:
        """Run the unit once for one micro-batch, in the current grad mode.

        Args:
            keep_graph: Whether autograd saves tensors for a backward.
        """
        arguments = captured.rebuild(tensors)
        records: dict[str, list[Any]] = {key: [] for key in record_keys}
        saving_context = nullcontext() if keep_graph else without_saved_tensors()
        with self._restore_attributes(), _activate_records(records or None), saving_context:
            value = self._compute(arguments.args, arguments.kwargs)
        captured.check_opaque()
        return CapturedResult(value, arguments, records)

    def call(self, call: UnitCall) -> Any:
        """Run the unit once with the arguments of a call, for passes without a backward."""
        with self._restore_attributes(), _activate_records(call.collector):
            return self._compute(call.args, call.kwargs)

    def _compute(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the result of the forward, or of a weight read."""
        if args and isinstance(args[0], WeightRead):
            return self._read_weight(*args)
        return self.forward(*args, **kwargs)

    @contextmanager
    def _restore_attributes(self) -> Iterator[None]:
        """Undo changes that a forward makes to attributes, because they would affect later runs."""
        attributes = [dict(module.__dict__) for module in self._modules]
        try:
            with forbid_buffer_changes(self.unit.name, self._modules):
                yield
        finally:
            for module, original in zip(self._modules, attributes, strict=True):
                current = module.__dict__
                if current.keys() != original.keys() or any(map(is_not, current.values(), original.values())):
                    current.clear()
                    current.update(original)


@contextmanager
def forbid_buffer_changes(name: str, modules: Iterable[nn.Module], *, may_replace: bool = False) -> Iterator[None]:
    """On exit, raise an error if a forward has changed a buffer, because steps do not restore buffers for a recompute.

    Args:
        may_replace: Whether a forward may replace non-persistent buffers, as rotary embeddings do.
    """
    buffers = [
        (module, leaf, buffer, buffer._version)
        for module in modules
        for leaf, buffer in module._buffers.items()
        if buffer is not None
    ]
    yield
    for module, leaf, buffer, version in buffers:
        is_replaced = module._buffers.get(leaf) is not buffer
        is_saved = leaf not in module._non_persistent_buffers_set
        if buffer._version != version or (is_replaced and (is_saved or not may_replace)):
            raise UnsupportedModelError(
                f"{name} ({type(module).__name__})",
                f"its forward changes the buffer '{leaf}', which a step neither saves nor restores for the backward",
            )


@contextmanager
def _activate_records(records: dict[str, list[Any]] | None) -> Iterator[None]:
    """Make Hugging Face's output recorders, such as those for router logits, write to `records` if it is not None."""
    if records is None:
        yield
        return
    from transformers.utils.output_capturing import _active_collector

    token = _active_collector.set(records)
    try:
        yield
    finally:
        _active_collector.reset(token)


@contextmanager
def stub_units(
    bounds: Sequence[BoundUnit], other_stubs: Mapping[nn.Module, Callable[..., Any]] = MappingProxyType({})
) -> Iterator[None]:
    """Within the context, replace weights with placeholders, and units' forwards with stubs that suspend the model.

    Args:
        bounds: All units. Containers keep their own forward.
        other_stubs: Stubs for modules that are not units.
    """
    units = {bound.unit.module: _unit_stub(bound.unit.index) for bound in bounds if not bound.unit.is_container}
    with ExitStack() as stack:
        for bound in bounds:
            stack.enter_context(bound.with_placeholders())
        stack.enter_context(install_stubs({**units, **other_stubs}))
        yield


def read_containers(units: Sequence[Unit]) -> Iterator[tuple[dict[str, Any], str, Tensor]]:
    """Suspend the forward at each container, whose parameters model code uses directly.

    Yield each container's parameter dict, and the name and a copy of each parameter. The copies outlive the visits.
    """
    for unit in units:
        if unit.is_container:
            for leaf, value in suspend(UnitCall(unit.index, (), {}, None)).items():
                yield unit.module._parameters, leaf, value


def _unit_stub(index: int) -> Callable[..., Any]:
    from transformers.utils.output_capturing import _active_collector

    def stub(*args: Any, **kwargs: Any) -> Any:
        return suspend(UnitCall(index, args, kwargs, _active_collector.get()))

    return stub


@contextmanager
def install_stubs(stubs: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Replace the `forward` of module instances within the context. Their classes stay unchanged."""
    originals = {module: module.__dict__.get("forward") for module in stubs}
    try:
        for module, stub in stubs.items():
            module.__dict__["forward"] = stub
        yield
    finally:
        for module, forward in originals.items():
            if forward is None:
                module.__dict__.pop("forward", None)
            else:
                module.__dict__["forward"] = forward
