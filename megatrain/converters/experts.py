"""Fused experts of a mixture, cut into parts that are units of their own.

Transformers keeps the experts of a layer in a few tensors of three dimensions, `[experts, ...]`, of one module, which
its registry of implementations runs. Such a module is called with tokens, with the experts that each of them goes to,
and with the weights of these: nothing else of the layer looks at its parameters. Where the tensors are larger than a
part, the module's forward becomes a sum over parts: modules with some of the experts each, which give what their own
experts add to a token. The model keeps its tensors and their names; they are on meta, and only the parts have weights.
"""

from __future__ import annotations

import functools
import inspect
import math
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from megatrain.base.layout import PART_ELEMENTS
from megatrain.models.converter import InnerUnit, ModelConverter

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["ExpertsInParts", "ExpertsPart", "has_experts_to_cut"]

#: Elements of a part in a model that has not too many of them: 64 MiB in fp32, as of other parts (``base/layout.py``).
EXPERTS_ELEMENTS = PART_ELEMENTS
#: Parts of experts in a model, about: each is a visit of its own, forward and backward, and a plan counts them all.
MAX_EXPERTS_PARTS = 512
#: Parameters that transformers' implementations of experts know.
_NAMES = frozenset({"gate_up_proj", "gate_up_proj_bias", "up_proj", "up_proj_bias", "down_proj", "down_proj_bias"})


@torch.library.custom_op("megatrain::places_of_experts", mutates_args=())
def places_of_experts(chosen: Tensor, first: int, stop: int) -> Tensor:
    """Return where experts from ``first`` to ``stop`` were chosen: indexes into ``chosen``, expert by expert.

    The host waits for the number of them.
    """
    flat = chosen.reshape(-1)
    places = ((flat >= first) & (flat < stop)).nonzero().squeeze(1)
    return places[torch.sort(flat[places], stable=True).indices]


@places_of_experts.register_fake
def _most_places(chosen: Tensor, first: int, stop: int) -> Tensor:
    """All tokens may go to the experts of one part: memory is planned for that."""
    return chosen.new_empty(chosen.numel())


class ExpertsInParts(ModelConverter):
    """Cuts each layer with large fused experts into units: parts of its experts, and the modules around them."""

    def convert(self, model: PreTrainedModel) -> None:
        """Note the size of the model: the larger it is, the larger are parts."""
        self._num_elements = sum(parameter.numel() for parameter in model.parameters())

    def cut(self, model: PreTrainedModel, layer: nn.Module) -> Sequence[InnerUnit]:
        """Return the units of a layer whose experts are larger than a part; empty: it has none such."""
        cut = {id(each.module): each.parts for each in _cut_experts(layer, self._num_elements)}
        if not cut:
            return ()
        _drop_attention_weights(model, layer)
        found: list[InnerUnit] = []
        for path, module in _around(layer, cut):
            if id(module) not in cut:
                found.append(InnerUnit(path, module))
            for number, part in enumerate(cut.get(id(module), ())):
                found.append(InnerUnit(f"{path}.part{number}", part, part))
        return found


class ExpertsPart(nn.Module):
    """Some of the experts of a layer, a `LayerPart`.

    Args:
        first: Number of its first expert.
        stop: Number behind its last one.

    Attributes:
        rows: Numbers of its experts.
        num_all: Number of experts of the layer.
    """

    def __init__(self, experts: nn.Module, first: int, stop: int) -> None:
        super().__init__()
        self.rows = range(first, stop)
        self.num_all = int(experts.num_experts)  # type: ignore[arg-type]
        self._siblings: tuple[ExpertsPart, ...] = (self,)
        # Not a module of this one: its parameters are those of all experts.
        self._whole: tuple[Any] = (experts,)
        for name, parameter in experts.named_parameters(recurse=False):
            shape = (stop - first, *parameter.shape[1:])
            values = torch.empty(shape, dtype=parameter.dtype, device="meta")
            self.register_parameter(name, nn.Parameter(values, requires_grad=parameter.requires_grad))

    @property
    def whole(self) -> nn.Module:
        """The module with all experts of the layer."""
        (whole,) = self._whole
        found: nn.Module = whole
        return found

    @property
    def kind(self) -> tuple[Any, ...]:
        """What all parts have in common that compute alike, with as much memory."""
        shapes = tuple((name, tuple(each.shape), each.requires_grad) for name, each in self.named_parameters())
        return (type(self._whole[0]), shapes)

    @property
    def siblings(self) -> tuple[ExpertsPart, ...]:
        """All parts of the layer, in the order in which they are called, one right after the other."""
        return self._siblings

    # Calls have the arguments of ``forward``; the second says which experts each token goes to.

    def is_routed(self, arguments: Sequence[Any]) -> bool:
        """Return whether the experts that were chosen in a call have values."""
        return _hit_experts(arguments[1]) is not None

    def is_idle(self, arguments: Sequence[Any]) -> bool:
        """Return whether no token of a call goes to any of them. The host waits for the first look at a choice."""
        hit = _hit_experts(arguments[1])
        return hit is not None and hit.isdisjoint(self.rows)

    def chance_of_no_token(self, arguments: Sequence[Any]) -> float:
        """Return how likely a token goes to none of them, if it goes to each of the layer's as likely."""
        others, num_chosen = self.num_all - len(self.rows), arguments[1].shape[-1]
        return math.comb(others, num_chosen) / math.comb(self.num_all, num_chosen)

    def uncomputed(self, arguments: Sequence[Tensor]) -> Tensor:
        """Return an uncomputed result; the gradients of the weights are left out where others lead to the backward."""
        weights = () if any(tensor.requires_grad for tensor in arguments) else tuple(self.parameters())
        made: Tensor = _Uncomputed.apply(*arguments, *weights)  # type: ignore[no-untyped-call]
        return made

    def forward(self, hidden_states: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Return what the part's experts add to each token, in fp32.

        Args:
            hidden_states: [tokens, width].
            chosen: Experts that each token goes to, [tokens, experts per token].
            weights: What their results are multiplied with, [tokens, experts per token].
        """
        from transformers.integrations.moe import _grouped_linear

        (whole,) = self._whole
        places = torch.ops.megatrain.places_of_experts(chosen, self.rows.start, self.rows.stop)
        tokens = places // chosen.shape[-1]
        experts = chosen.reshape(-1)[places] - self.rows.start
        ends = torch.arange(1, len(self.rows) + 1, device=experts.device)
        offsets = torch.searchsorted(experts, ends).to(torch.int32)

        def linear(rows: Tensor, name: str) -> Tensor:
            weight: Tensor = getattr(self, name)
            bias: Tensor | None = getattr(self, f"{name}_bias") if whole.has_bias else None
            if not len(places):  # gradients that are zero, not missing: other experts of the layer have one
                width = weight.shape[-1 if whole.is_transposed else -2]
                zeros = [each[(0,) * each.dim()] * 0 for each in (weight, bias) if each is not None]
                return rows.new_zeros(0, width) + rows[:, :1] * 0 + sum(zeros)
            bias = None if bias is None else bias[experts]
            made: Tensor = _grouped_linear(rows, weight, offsets, bias=bias, is_transposed=whole.is_transposed)
            return made

        rows = linear(hidden_states[tokens], "gate_up_proj" if whole.has_gate else "up_proj")
        rows = whole._apply_gate(rows) if whole.has_gate else whole.act_fn(rows)
        rows = linear(rows, "down_proj") * weights.reshape(-1)[places].unsqueeze(1)
        total = hidden_states.new_zeros(hidden_states.shape, dtype=torch.float32)
        return total.index_add(0, tokens, rows.float())


class _Uncomputed(torch.autograd.Function):
    """What some experts take and give: a sum in fp32, and gradients of all that need one."""

    @staticmethod
    def forward(ctx: Any, stream: Tensor, *others: Tensor) -> Tensor:
        ctx.save_for_backward(stream, *others)
        return torch.empty_like(stream, dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        pairs = zip(ctx.saved_tensors, ctx.needs_input_grad, strict=True)
        return tuple(torch.empty_like(tensor) if needed else None for tensor, needed in pairs)


#: Attribute of a tensor of chosen experts: which these are, on the host.
_HIT = "_megatrain_hit_experts"


def _hit_experts(chosen: Tensor) -> frozenset[int] | None:
    """Return the experts that tokens go to, looked at once for all parts of a layer; None: there are no values."""
    if isinstance(chosen, FakeTensor) or chosen.is_meta:
        return None
    found: frozenset[int] | None = getattr(chosen, _HIT, None)
    if found is None:
        found = frozenset(torch.unique(chosen.detach()).tolist())
        setattr(chosen, _HIT, found)
    return found


@dataclass(frozen=True)
class _CutExperts:
    """The parts of one module of experts."""

    module: nn.Module
    parts: tuple[ExpertsPart, ...]


def _cut_experts(layer: nn.Module, model_elements: int) -> list[_CutExperts]:
    """Return the experts of a layer that are larger than a part, cut; their forwards become sums over the parts.

    Args:
        layer: Is called once a forward, and looks at parameters in modules of its own only.
        model_elements: Number of elements of all parameters of the model: larger parts, rather than too many.
    """
    found: list[_CutExperts] = []
    for module, step in list(_to_cut(layer, model_elements)):
        count = int(module.num_experts)  # type: ignore[arg-type]
        parts = tuple(ExpertsPart(module, first, min(first + step, count)) for first in range(0, count, step))
        for part in parts:
            part._siblings = parts
        module.__dict__["forward"] = _sum_of(module, parts)
        found.append(_CutExperts(module, parts))
    return found


def has_experts_to_cut(layers: Iterable[nn.Module], model_elements: int) -> bool:
    """Return whether `ExpertsInParts` would cut any of some layers, without cutting them."""
    return any(True for layer in layers for _ in _to_cut(layer, model_elements))


def _to_cut(layer: nn.Module, model_elements: int) -> Iterator[tuple[nn.Module, int]]:
    """Yield each module of experts that is larger than a part, and how many of its experts a part has."""
    most_elements = EXPERTS_ELEMENTS * max(1, -(-model_elements // (EXPERTS_ELEMENTS * MAX_EXPERTS_PARTS)))
    adapted = {id(module._modules.get("base_layer")) for module in layer.modules()}
    for module in layer.modules():
        # An adapter of a weight of all experts changes that weight while they run.
        if module is layer or id(module) in adapted or not _is_fused(module):
            continue
        size = sum(parameter.numel() for parameter in module.parameters())
        count = int(module.num_experts)  # type: ignore[arg-type]
        step = max(1, most_elements * count // size)
        if size > most_elements and step < count:
            yield module, step


def _is_fused(module: nn.Module) -> bool:
    """Return whether transformers' implementations can run a module: it was made for them, and has nothing else."""
    flags = ("has_gate", "has_bias", "is_transposed", "has_post_expert_norm", "num_experts", "_apply_gate")
    if not all(hasattr(module, flag) for flag in flags) or module.has_post_expert_norm:
        return False
    own = dict(module.named_parameters(recurse=False))
    wanted = {"gate_up_proj" if module.has_gate else "up_proj", "down_proj"}
    wanted |= {f"{name}_bias" for name in wanted} if module.has_bias else set()
    has_others = any(True for child in module.children() for _ in child.parameters())
    return (
        own.keys() == wanted <= _NAMES
        and not has_others
        and all(len(parameter) == module.num_experts for parameter in own.values())
        and len({parameter.requires_grad for parameter in own.values()}) == 1
        and len(inspect.signature(type(module).forward).parameters) == 4
    )


def _sum_of(module: nn.Module, parts: Sequence[ExpertsPart]) -> Callable[..., Tensor]:
    """Return the forward of all experts: the sum of the parts', in their order."""
    signature = inspect.signature(type(module).forward)

    def forward(*args: Any, **kwargs: Any) -> Tensor:
        _, hidden_states, chosen, weights = signature.bind(module, *args, **kwargs).arguments.values()
        total: Tensor = parts[0](hidden_states, chosen, weights)
        for part in parts[1:]:
            total = total + part(hidden_states, chosen, weights)
        return total.to(hidden_states.dtype)

    return forward


def _around(layer: nn.Module, experts: Container[int]) -> Iterator[tuple[str, nn.Module]]:
    """Yield the modules of a layer that together have all of its parameters, by local path, in the order of the model.

    Args:
        layer: Has several units.
        experts: Ids of the modules of experts.

    Raises:
        ValueError: a module around experts has parameters of its own.
    """

    def visit(path: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        if id(module) in experts:
            yield path, module
            return
        if not any(id(each) in experts for each in module.modules()):
            if next(module.parameters(), None) is not None:
                yield path, module
            return
        if any(parameter is not None for parameter in module._parameters.values()):
            raise ValueError(path)
        for leaf, child in module.named_children():
            yield from visit(f"{path}.{leaf}" if path else leaf, child)

    yield from visit("", layer)


def _drop_attention_weights(model: PreTrainedModel, layer: nn.Module) -> None:
    """Let the attention of a layer give None for its weights, [rows, heads, S, S], as fused kernels do.

    A layer that is one unit is done with them within its forward. As a unit of its own, attention would give them to
    the layer, which keeps them for nobody until its last part has run, those of all micro-batches at once. What
    transformers lets its hooks record says which modules give weights, and where in their results.
    """
    places = dict(_places_of_attention_weights(model))
    for module in layer.modules():
        index = next((places[kind] for kind in type(module).__mro__ if kind in places), None)
        if index is not None:
            module.__dict__["forward"] = _without(module.forward, index)


def _places_of_attention_weights(model: PreTrainedModel) -> Iterator[tuple[type[nn.Module], int]]:
    from transformers.utils.output_capturing import OutputRecorder

    for module in model.modules():
        recorded = getattr(module, "_can_record_outputs", None) or {}
        specs = recorded.get("attentions", ())
        for spec in specs if isinstance(specs, list | tuple) else (specs,):
            if isinstance(spec, OutputRecorder):
                yield spec.target_class, spec.index
            elif isinstance(spec, type):
                yield spec, 1  # as its hooks take it


def _without(forward: Callable[..., Any], index: int) -> Callable[..., Any]:
    """Return a forward that gives None in one place of its results."""

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        result = forward(*args, **kwargs)
        if isinstance(result, tuple) and 0 < index < len(result):
            return (*result[:index], None, *result[index + 1 :])
        return result

    return run
