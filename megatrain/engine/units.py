"""Running one unit with weights that are only there for that time."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from operator import is_not
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatrain.engine.absent import absent_weight
from megatrain.engine.arguments import CapturedArguments, CapturedResult
from megatrain.engine.compiled import naming_failures
from megatrain.models.errors import UnsupportedModelError

if TYPE_CHECKING:
    from torch import nn

    from megatrain.engine.compiled import LayerCompiler
    from megatrain.models.graph import Unit

__all__ = ["BoundUnit", "collected_records", "installed_stubs"]


def _drop(tensor: Tensor) -> None:
    """Keep nothing of what autograd would save: the unit is run again in the backward."""


def _unpack_dropped(_: object) -> Tensor:
    raise AssertionError("the graph of a unit's first run was used; only its recompute has one")


class BoundUnit:
    """A unit's module, its parameter slots, and its own `forward`.

    Args:
        unit: The unit; its module must not be stubbed yet.
        device: Compute device.
        compiler: Of layers; None: they run as they are.
    """

    def __init__(self, unit: Unit, device: torch.device, compiler: LayerCompiler | None = None) -> None:
        self.unit = unit
        self.forward: Callable[..., Any] = self._own_parameters if unit.is_container else unit.module.forward
        self._is_compiled = compiler is not None and unit.is_layer
        if compiler is not None and unit.is_layer:
            self.forward = compiler.forward_of(unit)
        self._modules = tuple(unit.module.modules())
        self._slots: list[tuple[dict[str, Any], str, str]] = []
        self._trainable: dict[str, bool] = {}
        self._declared_dtype: dict[str, torch.dtype] = {}
        self._absent: dict[str, Tensor] = {}
        for local, owner, _ in unit.params:
            path, _, leaf = local.rpartition(".")
            parameters = unit.module.get_submodule(path)._parameters
            parameter = parameters[leaf]
            assert parameter is not None, local
            self._slots.append((parameters, leaf, owner))
            self._trainable[owner] = parameter.requires_grad
            self._declared_dtype[owner] = parameter.dtype
            self._absent[owner] = absent_weight(parameter, device)
        self.trainable = tuple(owner for owner, trains in self._trainable.items() if trains)

    def _own_parameters(self) -> dict[str, Tensor]:
        """Forward of a container: copies of its parameters, which outlive the visit."""
        return {leaf: parameters[leaf].clone() for parameters, leaf, _ in self._slots}

    @contextmanager
    def standing_in(self) -> Iterator[None]:
        """Put stand-ins in the place of the parameters: right shape, dtype and device, no memory."""
        saved = [(parameters, leaf, parameters[leaf]) for parameters, leaf, _ in self._slots]
        try:
            for parameters, leaf, owner in self._slots:
                parameters[leaf] = self._absent[owner]
            yield
        finally:
            for parameters, leaf, parameter in saved:
                parameters[leaf] = parameter

    @contextmanager
    def bound(self, weights: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
        """Put `weights` (owner's name -> tensor) in the place of the parameters; yield the trainable ones as leaves."""
        leaves = {
            owner: weights[owner].detach().to(self._declared_dtype[owner]).requires_grad_(trains)
            for owner, trains in self._trainable.items()
        }
        saved = [(parameters, leaf, parameters[leaf]) for parameters, leaf, _ in self._slots]
        try:
            for parameters, leaf, owner in self._slots:
                parameters[leaf] = leaves[owner]
            yield {owner: leaves[owner] for owner in self.trainable}
        finally:
            for parameters, leaf, parameter in saved:
                parameters[leaf] = parameter

    def in_backward(self) -> AbstractContextManager[None]:
        """Return what the backward of a run is to be in: compiled code is made when it is first called."""
        return naming_failures(self.unit) if self._is_compiled else nullcontext()

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
            captured: The call.
            tensors: Its tensors, with leaves in the place of the activations.
            record_keys: Keys of the output recorders that are active.
            keep_graph: True in the recompute; False drops everything that autograd would save.
        """
        rebuilt = captured.rebuild(tensors)
        records: dict[str, list[Any]] = {key: [] for key in record_keys}
        with self._attributes_restored(), collected_records(records):
            if keep_graph:
                value = self.forward(*rebuilt.args, **rebuilt.kwargs)
            else:
                # In grad mode all the same: attention picks its kernel by requires_grad, and another kernel in
                # the recompute could flip a router's choice.
                with torch.autograd.graph.saved_tensors_hooks(_drop, _unpack_dropped):
                    value = self.forward(*rebuilt.args, **rebuilt.kwargs)
        captured.check_opaque()
        return CapturedResult(value, rebuilt, records)

    @contextmanager
    def _attributes_restored(self) -> Iterator[None]:
        """Undo what the forward stored in attributes: it would leak into the next micro-batch and the recompute."""
        attributes = [dict(module.__dict__) for module in self._modules]
        buffers = [
            (module, leaf, buffer, buffer._version)
            for module in self._modules
            for leaf, buffer in module._buffers.items()
            if buffer is not None
        ]
        try:
            yield
        finally:
            for module, before in zip(self._modules, attributes, strict=True):
                now = module.__dict__
                if now.keys() != before.keys() or any(map(is_not, now.values(), before.values())):
                    now.clear()
                    now.update(before)
        for module, leaf, buffer, version in buffers:
            if module._buffers.get(leaf) is not buffer or buffer._version != version:
                raise UnsupportedModelError(
                    f"{self.unit.name} ({type(module).__name__})",
                    f"its forward changes the buffer '{leaf}', and would change it a second time when the layer is "
                    "run again for the backward",
                )


@contextmanager
def collected_records(records: dict[str, list[Any]]) -> Iterator[None]:
    """Let Hugging Face's output recorders inside write to `records`."""
    if not records:
        yield
        return
    from transformers.utils.output_capturing import _active_collector

    token = _active_collector.set(records)
    try:
        yield
    finally:
        _active_collector.reset(token)


@contextmanager
def installed_stubs(stubs: Mapping[nn.Module, Callable[..., Any]]) -> Iterator[None]:
    """Replace the `forward` of modules for a time."""
    own = {module: module.__dict__.get("forward") for module in stubs}
    try:
        for module, stub in stubs.items():
            module.__dict__["forward"] = stub
        yield
    finally:
        for module, forward in own.items():
            if forward is None:
                module.__dict__.pop("forward", None)
            else:
                module.__dict__["forward"] = forward
