"""Fused experts of mixture-of-experts layers, cut into parts that are separate units.

In transformers, one module holds all experts of a layer in a few 3-D tensors, `[experts, ...]`. Its inputs are tokens,
the experts chosen for each token, and the routing weights. Only this module reads the 3-D tensors. If they are larger
than a part, the module's forward becomes a sum over parts. Each part is a module with some of the experts, and returns
the contribution of these experts to each token. The original tensors stay on the meta device under their names, and
only the parts have weights.
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
from megatrain.models.converter import InnerUnit, ModelConverter, ModelSettings

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = ["ExpertsInParts", "ExpertsPart", "has_experts_to_cut"]

#: Default number of elements per part (64 MiB in fp32), as in ``base/layout.py``. Large models have larger parts.
EXPERTS_ELEMENTS = PART_ELEMENTS
#: Approximate limit on the number of parts in a model. Each part adds two visits to a plan.
MAX_EXPERTS_PARTS = 512
#: Names of parameters in transformers' implementations of experts.
_NAMES = frozenset({"gate_up_proj", "gate_up_proj_bias", "up_proj", "up_proj_bias", "down_proj", "down_proj_bias"})


@torch.library.custom_op("megatrain::expert_positions", mutates_args=())
def expert_positions(choices: Tensor, start: int, stop: int) -> Tensor:
    """Return the flat indices at which ``choices`` contains an expert from ``start`` to ``stop``, sorted by expert.

    Synchronizes the host, because the size of the result depends on the data.
    """
    expert_ids = choices.reshape(-1)
    positions = ((expert_ids >= start) & (expert_ids < stop)).nonzero().squeeze(1)
    return positions[torch.sort(expert_ids[positions], stable=True).indices]


@expert_positions.register_fake
def _fake_positions(choices: Tensor, start: int, stop: int) -> Tensor:
    """Return a fake result of maximum size, so that plans allow for all tokens being routed to one part."""
    return choices.new_empty(choices.numel())


class ExpertsInParts(ModelConverter):
    """Converter that cuts layers with large fused experts into units: parts of the experts, and the other modules."""

    @classmethod
    def for_model(cls, settings: ModelSettings) -> ExpertsInParts | None:
        """Return a converter if the config enables the splitting of experts."""
        return cls() if settings.table.split_experts else None

    def convert(self, model: PreTrainedModel) -> None:
        """Record the size of the model, because large models have larger parts."""
        self._num_elements = sum(parameter.numel() for parameter in model.parameters())

    def split_layer(self, model: PreTrainedModel, layer: nn.Module) -> Sequence[InnerUnit]:
        """Return the units of a layer. Return no units if the layer's experts fit in one part."""
        cut_parts = {id(experts.module): experts.parts for experts in _cut_experts(layer, self._num_elements)}
        if not cut_parts:
            return ()
        _drop_attention_weights(model, layer)
        units: list[InnerUnit] = []
        for path, module in _surrounding_modules(layer, cut_parts):
            if id(module) not in cut_parts:
                units.append(InnerUnit(path, module))
            for index, part in enumerate(cut_parts.get(id(module), ())):
                units.append(InnerUnit(f"{path}.part{index}", part, part))
        return units


class ExpertsPart(nn.Module):
    """`LayerPart` with some of a layer's experts.

    Args:
        start: Index of the first expert.
        stop: Index after the last expert.

    Attributes:
        rows: Indices of the experts.
        total_rows: Number of experts in the layer.
    """

    def __init__(self, experts: nn.Module, start: int, stop: int) -> None:
        super().__init__()
        self.rows = range(start, stop)
        self.total_rows = int(experts.num_experts)  # type: ignore[arg-type]
        self._siblings: tuple[ExpertsPart, ...] = (self,)
        # The tuple hides the module from torch. As a submodule, it would add all experts' parameters to this part.
        self._experts: tuple[Any] = (experts,)
        for name, parameter in experts.named_parameters(recurse=False):
            shape = (stop - start, *parameter.shape[1:])
            values = torch.empty(shape, dtype=parameter.dtype, device="meta")
            self.register_parameter(name, nn.Parameter(values, requires_grad=parameter.requires_grad))

    @property
    def parent(self) -> nn.Module:
        """Module with all experts of the layer."""
        module: nn.Module = self._experts[0]
        return module

    @property
    def kind(self) -> tuple[Any, ...]:
        """Grouping key. Parts with equal keys need the same computation and memory."""
        shapes = tuple((name, tuple(p.shape), p.requires_grad) for name, p in self.named_parameters())
        return (type(self._experts[0]), shapes)

    @property
    def siblings(self) -> tuple[ExpertsPart, ...]:
        """All parts of the layer, in the order in which they are called."""
        return self._siblings

    # In these methods, `arguments` are the arguments of ``forward``. The second one holds each token's chosen experts.

    def has_routing(self, arguments: Sequence[Any]) -> bool:
        """Return whether the chosen experts of a call are known. In a trace they are not."""
        return _routed_experts(arguments[1]) is not None

    def is_idle(self, arguments: Sequence[Any]) -> bool:
        """Return whether a call routes no token to the part. The first query of a routing synchronizes the host."""
        expert_ids = _routed_experts(arguments[1])
        return expert_ids is not None and expert_ids.isdisjoint(self.rows)

    def no_token_probability(self, arguments: Sequence[Any]) -> float:
        """Return the probability that a token is not routed to the part, assuming uniform routing."""
        num_others, num_chosen = self.total_rows - len(self.rows), arguments[1].shape[-1]
        return math.comb(num_others, num_chosen) / math.comb(self.total_rows, num_chosen)

    def placeholder_result(self, arguments: Sequence[Tensor]) -> Tensor:
        """Return a placeholder for the result. Weights are autograd inputs only if no argument requires a gradient."""
        weights = () if any(tensor.requires_grad for tensor in arguments) else tuple(self.parameters())
        result: Tensor = _PlaceholderResult.apply(*arguments, *weights)  # type: ignore[no-untyped-call]
        return result

    def forward(self, hidden_states: Tensor, choices: Tensor, weights: Tensor) -> Tensor:
        """Return the contribution of the part's experts to each token, in fp32.

        Args:
            hidden_states: Tokens, [tokens, width].
            choices: Chosen experts of each token, [tokens, experts per token].
            weights: Routing weights of the chosen experts, [tokens, experts per token].
        """
        from transformers.integrations.moe import _grouped_linear

        (module,) = self._experts
        positions = torch.ops.megatrain.expert_positions(choices, self.rows.start, self.rows.stop)
        tokens = positions // choices.shape[-1]
        expert_indices = choices.reshape(-1)[positions] - self.rows.start
        ends = torch.arange(1, len(self.rows) + 1, device=expert_indices.device)
        offsets = torch.searchsorted(expert_indices, ends).to(torch.int32)

        def linear(rows: Tensor, name: str) -> Tensor:
            weight: Tensor = getattr(self, name)
            bias: Tensor | None = getattr(self, f"{name}_bias") if module.has_bias else None
            # Return zero gradients instead of None, because the layer's other experts have gradients.
            if not len(positions):
                width = weight.shape[-1 if module.is_transposed else -2]
                zeros = [tensor[(0,) * tensor.dim()] * 0 for tensor in (weight, bias) if tensor is not None]
                return rows.new_zeros(0, width) + rows[:, :1] * 0 + sum(zeros)
            bias = None if bias is None else bias[expert_indices]
            output: Tensor = _grouped_linear(rows, weight, offsets, bias=bias, is_transposed=module.is_transposed)
            return output

        rows = linear(hidden_states[tokens], "gate_up_proj" if module.has_gate else "up_proj")
        rows = module._apply_gate(rows) if module.has_gate else module.act_fn(rows)
        rows = linear(rows, "down_proj") * weights.reshape(-1)[positions].unsqueeze(1)
        total = hidden_states.new_zeros(hidden_states.shape, dtype=torch.float32)
        return total.index_add(0, tokens, rows.float())


class _PlaceholderResult(torch.autograd.Function):
    """Autograd function that replaces experts in a trace. Returns fp32 results, and gradients for all inputs."""

    @staticmethod
    def forward(ctx: Any, hidden_states: Tensor, *tensors: Tensor) -> Tensor:
        ctx.save_for_backward(hidden_states, *tensors)
        return torch.empty_like(hidden_states, dtype=torch.float32)

    @staticmethod
    def backward(ctx: Any, *grad_outputs: Tensor) -> tuple[Tensor | None, ...]:
        pairs = zip(ctx.saved_tensors, ctx.needs_input_grad, strict=True)
        return tuple(torch.empty_like(tensor) if needs_grad else None for tensor, needs_grad in pairs)


#: Name of the attribute in which a tensor of chosen experts caches the set of these experts on the host.
_CACHE_ATTRIBUTE = "_megatrain_hit_experts"


def _routed_experts(choices: Tensor) -> frozenset[int] | None:
    """Return the experts that receive tokens, or None in a trace. The result is cached for all parts of a layer."""
    if isinstance(choices, FakeTensor) or choices.is_meta:
        return None
    experts: frozenset[int] | None = getattr(choices, _CACHE_ATTRIBUTE, None)
    if experts is None:
        experts = frozenset(torch.unique(choices.detach()).tolist())
        setattr(choices, _CACHE_ATTRIBUTE, experts)
    return experts


@dataclass(frozen=True)
class _CutExperts:
    """Parts of one expert module."""

    module: nn.Module
    parts: tuple[ExpertsPart, ...]


def _cut_experts(layer: nn.Module, model_elements: int) -> list[_CutExperts]:
    """Cut expert modules that are larger than a part. Replace each module's forward with a sum over its parts.

    Args:
        layer: Layer that the model calls once per forward, and whose parameters are only read by submodules.
        model_elements: Number of elements in the whole model, which determines the size of the parts.
    """
    cuts: list[_CutExperts] = []
    for module, step in list(_modules_to_cut(layer, model_elements)):
        count = int(module.num_experts)  # type: ignore[arg-type]
        parts = tuple(ExpertsPart(module, start, min(start + step, count)) for start in range(0, count, step))
        for part in parts:
            part._siblings = parts
        module.__dict__["forward"] = _make_summing_forward(module, parts)
        cuts.append(_CutExperts(module, parts))
    return cuts


def has_experts_to_cut(layers: Iterable[nn.Module], model_elements: int) -> bool:
    """Return whether `ExpertsInParts` would cut experts in any of these layers."""
    return any(True for layer in layers for _ in _modules_to_cut(layer, model_elements))


def _modules_to_cut(layer: nn.Module, model_elements: int) -> Iterator[tuple[nn.Module, int]]:
    """Yield each expert module that is larger than a part, with the number of experts per part."""
    max_elements = EXPERTS_ELEMENTS * max(1, -(-model_elements // (EXPERTS_ELEMENTS * MAX_EXPERTS_PARTS)))
    adapted_ids = {id(module._modules.get("base_layer")) for module in layer.modules()}
    for module in layer.modules():
        # Skip modules whose weights an adapter changes during the forward.
        if module is layer or id(module) in adapted_ids or not _is_fused(module):
            continue
        size = sum(parameter.numel() for parameter in module.parameters())
        count = int(module.num_experts)  # type: ignore[arg-type]
        step = max(1, max_elements * count // size)
        if size > max_elements and step < count:
            yield module, step


def _is_fused(module: nn.Module) -> bool:
    """Return whether a module has exactly the parameters of transformers' fused experts."""
    flags = ("has_gate", "has_bias", "is_transposed", "has_post_expert_norm", "num_experts", "_apply_gate")
    if not all(hasattr(module, flag) for flag in flags) or module.has_post_expert_norm:
        return False
    parameters = dict(module.named_parameters(recurse=False))
    names = {"gate_up_proj" if module.has_gate else "up_proj", "down_proj"}
    names |= {f"{n}_bias" for n in names} if module.has_bias else set()
    has_others = any(True for child in module.children() for _ in child.parameters())
    return (
        parameters.keys() == names <= _NAMES
        and not has_others
        and all(len(parameter) == module.num_experts for parameter in parameters.values())
        and len({parameter.requires_grad for parameter in parameters.values()}) == 1
        and len(inspect.signature(type(module).forward).parameters) == 4
    )


def _make_summing_forward(module: nn.Module, parts: Sequence[ExpertsPart]) -> Callable[..., Tensor]:
    """Return a forward for an expert module that adds the results of its parts in order."""
    signature = inspect.signature(type(module).forward)

    def forward(*args: Any, **kwargs: Any) -> Tensor:
        _, hidden_states, choices, weights = signature.bind(module, *args, **kwargs).arguments.values()
        total: Tensor = parts[0](hidden_states, choices, weights)
        for part in parts[1:]:
            total = total + part(hidden_states, choices, weights)
        return total.to(hidden_states.dtype)

    return forward


def _surrounding_modules(layer: nn.Module, experts: Container[int]) -> Iterator[tuple[str, nn.Module]]:
    """Yield (local path, module) in model order for modules that together have all parameters of a layer.

    Args:
        layer: Layer with several units.
        experts: Python ids of the expert modules.

    Raises:
        ValueError: If a module that contains experts directly owns parameters.
    """

    def visit(path: str, module: nn.Module) -> Iterator[tuple[str, nn.Module]]:
        if id(module) in experts:
            yield path, module
            return
        if not any(id(submodule) in experts for submodule in module.modules()):
            if next(module.parameters(), None) is not None:
                yield path, module
            return
        if any(parameter is not None for parameter in module._parameters.values()):
            raise ValueError(path)
        for leaf, child in module.named_children():
            yield from visit(f"{path}.{leaf}" if path else leaf, child)

    yield from visit("", layer)


def _drop_attention_weights(model: PreTrainedModel, layer: nn.Module) -> None:
    """Make a layer's attention return None instead of attention weights [rows, heads, S, S], as fused kernels do.

    If a layer is one unit, its forward frees the attention weights. If attention is a separate unit, the layer would
    keep the weights of all micro-batches until its last part has run, without using them. transformers' output
    recorders specify which modules return attention weights, and at which index.
    """
    indices = dict(_find_attention_outputs(model))
    for module in layer.modules():
        index = next((indices[kind] for kind in type(module).__mro__ if kind in indices), None)
        if index is not None:
            module.__dict__["forward"] = _drop_result(module.forward, index)


def _find_attention_outputs(model: PreTrainedModel) -> Iterator[tuple[type[nn.Module], int]]:
    from transformers.utils.output_capturing import OutputRecorder

    for module in model.modules():
        recorders = getattr(module, "_can_record_outputs", None) or {}
        specs = recorders.get("attentions", ())
        for spec in specs if isinstance(specs, list | tuple) else (specs,):
            if isinstance(spec, OutputRecorder):
                yield spec.target_class, spec.index
            elif isinstance(spec, type):
                yield spec, 1  # the default index of transformers' hooks


def _drop_result(forward: Callable[..., Any], index: int) -> Callable[..., Any]:
    """Wrap a forward so that the item at ``index`` of its result is None."""

    @functools.wraps(forward)
    def run(*args: Any, **kwargs: Any) -> Any:
        result = forward(*args, **kwargs)
        if isinstance(result, tuple) and 0 < index < len(result):
            return (*result[:index], None, *result[index + 1 :])
        return result

    return run
