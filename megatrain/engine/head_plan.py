"""Where a model is cut into a trunk and a head that can be run on a few rows.

The trunk ends with the outermost submodule around the layers, which returns a `ModelOutput`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from megatrain.engine.objective import replaced_loss
from megatrain.engine.units import installed_stubs

if TYPE_CHECKING:
    from megatrain.models.graph import ModelGraph, Unit

__all__ = ["HeadPlan", "accepts_use_cache", "has_auxiliary_loss", "plan_head", "without_auxiliary_loss"]

_LOGITS_NBYTES = 64 << 20
_AUXILIARY_FLAG = "output_router_logits"


@dataclass(frozen=True, slots=True, eq=False)
class HeadPlan:
    """Where a model is cut.

    Attributes:
        trunk: The submodule whose output the head starts from.
        units: Units that run behind the cut, in order of their first call.
        vocab_size: Columns of the logits.
        keeps_logits: Whether the model, or autograd for it, reads the logits besides in its loss.
    """

    trunk: nn.Module
    units: tuple[Unit, ...]
    vocab_size: int
    keeps_logits: bool = False

    @property
    def default_rows(self) -> int:
        """Rows per piece: 64 MiB of fp32 logits, a multiple of 64; depends on the model alone, never on memory."""
        return max(64, round(_LOGITS_NBYTES / (4 * self.vocab_size) / 64) * 64)


def plan_head(graph: ModelGraph) -> HeadPlan | None:
    """Cut the model, or return None if its loss cannot be computed in pieces.

    The head is tried on the meta device: it must call its units and its `loss_function` once, with logits of the rows
    it was given and with the shifted labels passed through.
    """
    model = graph.model
    from transformers.loss.loss_utils import ForCausalLMLoss

    if getattr(model, "loss_function", None) is not ForCausalLMLoss:
        return None
    layer = next((unit for unit in graph.units if unit.is_layer), None)
    path = layer.name.split(".")[:-1] if layer else []
    candidates = [model.get_submodule(".".join(path[: length + 1])) for length in range(len(path))]
    probe = _Probe(graph, [module for module in candidates if not isinstance(module, nn.ModuleList)])
    try:
        probe.run()
    except Exception:  # any failure on made-up rows means the same: this head is not to be called on rows
        return None
    if len(probe.trunks) != 1 or len(probe.losses) != 1:
        return None
    shape, labels_are_passed = probe.losses[0]
    if shape[:2] != (1, 2) or not labels_are_passed:
        return None
    units = tuple(graph.units[index] for index in dict.fromkeys(probe.called))
    return HeadPlan(probe.trunks[0], units, shape[-1], probe.keeps_logits)


class _Probe:
    """Tries a model's head on made-up rows on the meta device.

    Args:
        graph: The model.
        candidates: Submodules around the layers, outermost first; the first one that the model calls is the trunk.

    Attributes:
        trunks: Candidates that were called.
        called: Indexes of the units that were called.
        losses: Shape of the logits of every call of the loss, and whether the labels were passed on.
        keeps_logits: As in the plan.
    """

    def __init__(self, graph: ModelGraph, candidates: Sequence[nn.Module]) -> None:
        self._graph = graph
        self._candidates = candidates
        self.trunks: list[nn.Module] = []
        self.called: list[int] = []
        self.losses: list[tuple[torch.Size, bool]] = []
        self.keeps_logits = False
        self._reads = _Reads()
        self._logits = torch.empty(0, device="meta")

    def run(self) -> None:
        """Run the head; raises whatever the model's code raises."""
        model = self._graph.model
        embedding = model.get_output_embeddings()
        config = self._graph.config.get_text_config()
        width = embedding.weight.shape[1] if embedding is not None else config.hidden_size
        rows = torch.empty(1, 2, width, device="meta", dtype=self._graph.dtype, requires_grad=True)
        labels = torch.zeros(1, 2, dtype=torch.long, device="meta")
        stubs = {unit.module: self._unit_stub(unit) for unit in self._graph.units if not unit.is_container}
        stubs.update((module, self._trunk_stub(module, rows)) for module in self._candidates)
        loss = replaced_loss(model, self._loss_stub(model.loss_function, labels))
        reads = self._reads
        hooks = torch.autograd.graph.saved_tensors_hooks(reads.save, lambda tensor: tensor)
        with installed_stubs(stubs), without_auxiliary_loss(model), loss, torch.enable_grad(), hooks, reads:
            model(input_ids=labels, labels=labels, shift_labels=labels, num_items_in_batch=2)
        storage = self._logits.untyped_storage()._cdata
        self.keeps_logits = any(t.untyped_storage()._cdata == storage for t in (*reads.read, *reads.saved))

    def _unit_stub(self, unit: Unit) -> Callable[..., Any]:
        forward = unit.module.forward

        def stub(*args: Any, **kwargs: Any) -> Any:
            self.called.append(unit.index)
            return forward(*args, **kwargs)

        return stub

    def _trunk_stub(self, module: nn.Module, rows: Tensor) -> Callable[..., Any]:
        def stub(*args: Any, **kwargs: Any) -> Any:
            self.trunks.append(module)
            return _rows_only_output(rows)

        return stub

    def _loss_stub(self, loss_function: Callable[..., Any], labels: Tensor) -> Callable[..., Any]:
        def stub(*args: Any, **kwargs: Any) -> Any:
            logits = kwargs["logits"] if "logits" in kwargs else args[0]
            passed = kwargs.get("shift_labels") is labels and kwargs.get("num_items_in_batch") == 2
            self.losses.append((logits.shape, passed))
            value = loss_function(*args, **kwargs)  # it saves no logits, only what it makes of them
            self._logits = logits
            self._reads.read.clear()
            return value

        return stub


class _Reads(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes the tensors that operations read, and those that autograd saves."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.read: list[Tensor] = []
        self.saved: list[Tensor] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.read += [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        return func(*args, **(kwargs or {}))

    def save(self, tensor: Tensor) -> Tensor:
        self.saved.append(tensor)
        return tensor


def _rows_only_output(rows: Tensor) -> Any:
    """Return an output of no model in particular: rows, and None for whatever else is asked for."""
    from transformers.modeling_outputs import BaseModelOutputWithPast

    class RowsOnlyOutput(BaseModelOutputWithPast):  # type: ignore[misc]
        def __getattr__(self, name: str) -> None:
            if name.startswith("__"):
                raise AttributeError(name)

    return RowsOnlyOutput(last_hidden_state=rows)


@contextmanager
def without_auxiliary_loss(model: nn.Module) -> Iterator[None]:
    """Switch the router's auxiliary loss off: it belongs to the micro-batch, not to each piece of it."""
    configs = {id(config): config for config in _configs(model) if getattr(config, _AUXILIARY_FLAG, False)}
    try:
        for config in configs.values():
            setattr(config, _AUXILIARY_FLAG, False)
        yield
    finally:
        for config in configs.values():
            setattr(config, _AUXILIARY_FLAG, True)


def has_auxiliary_loss(model: nn.Module) -> bool:
    """Return whether the loss has a term of the routers."""
    return any(getattr(config, _AUXILIARY_FLAG, False) for config in _configs(model))


def accepts_use_cache(model: nn.Module) -> bool:
    """Return whether the model's forward can be told not to keep a key-value cache."""
    parameters = inspect.signature(type(model).forward).parameters
    return "use_cache" in parameters or any(p.kind is p.VAR_KEYWORD for p in parameters.values())


def _configs(model: nn.Module) -> list[Any]:
    config: Any = model.config
    return [config, config.get_text_config()]
