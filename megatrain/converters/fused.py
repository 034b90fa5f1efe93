"""Rules for parameters in transformers' models that fuse several matrices.

A rule is selected by module and parameter name. It computes the sizes of the matrices from the module that owns the
parameter. If the sizes do not match the parameter's shape, the parameter is reported as fused in an unknown way.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from megatrain.optim.fused import FusedMatrix

if TYPE_CHECKING:
    from torch import nn

    from megatrain.models.graph import ModelGraph

__all__ = ["find_fused"]

#: Names of parameters that probably fuse several matrices. The model splits their output.
_FUSED_NAMES = re.compile(
    r"qkv|query_key_value|^c_attn$|gate_up|up_gate|gate_and_up|^in_proj(_ba)?$|^kv_(proj|b_proj)$|^w13$"
)


def _thirds(owner: nn.Module, length: int) -> FusedMatrix:
    return FusedMatrix((length // 3,) * 3)


def _halves(owner: nn.Module, length: int) -> FusedMatrix:
    return FusedMatrix((length // 2,) * 2)


def _thirds_of_columns(owner: nn.Module, length: int) -> FusedMatrix:
    return FusedMatrix((length // 3,) * 3, by_column=True)


def _thirds_in_each_head(owner: Any, length: int) -> FusedMatrix:
    config = owner.config
    heads = int(config.num_attention_heads)
    return FusedMatrix((length // (3 * heads),) * 3, heads)


def _query_and_grouped_key_value(owner: Any, length: int) -> FusedMatrix:
    config = owner.config
    size = int(getattr(owner, "head_dim", 0) or config.hidden_size // config.num_attention_heads)
    key = size * int(config.num_key_value_heads)
    return FusedMatrix((size * int(config.num_attention_heads), key, key))


def _dbrx(owner: Any, length: int) -> FusedMatrix:
    key = int(owner.num_key_value_heads) * int(owner.head_dim)
    return FusedMatrix((int(owner.hidden_size), key, key))


def _delta_net(owner: Any, length: int) -> FusedMatrix:
    return FusedMatrix((int(owner.key_dim), int(owner.key_dim), int(owner.value_dim)))


def _delta_net_in_each_head(owner: Any, length: int) -> FusedMatrix:
    value = int(owner.num_v_heads) // int(owner.num_k_heads) * int(owner.head_v_dim)
    return FusedMatrix((int(owner.head_k_dim), int(owner.head_k_dim), value, value), int(owner.num_k_heads))


def _gates_in_each_head(owner: Any, length: int) -> FusedMatrix:
    return FusedMatrix((int(owner.num_v_heads) // int(owner.num_k_heads),) * 2, int(owner.num_k_heads))


_Rule = Callable[[Any, int], FusedMatrix]

#: Rules by the last part of the owner's class name, and by the name of the parameter or of its module.
_RULES: Mapping[tuple[str, str], _Rule] = {
    ("Phi3Attention", "qkv_proj"): _query_and_grouped_key_value,
    ("Phi4MultimodalAttention", "qkv_proj"): _query_and_grouped_key_value,
    ("MiniMaxLightningAttention", "qkv_proj"): _thirds_in_each_head,
    ("GPTNeoXAttention", "query_key_value"): _thirds_in_each_head,
    ("GPT2Attention", "c_attn"): _thirds_of_columns,
    ("MptAttention", "Wqkv"): _thirds,
    ("DbrxAttention", "Wqkv"): _dbrx,
    ("JetMoeAttention", "kv_proj"): _halves,
    ("Qwen3_5GatedDeltaNet", "in_proj_qkv"): _delta_net,
    ("Qwen3_5MoeGatedDeltaNet", "in_proj_qkv"): _delta_net,
    ("Qwen3NextGatedDeltaNet", "in_proj_qkvz"): _delta_net_in_each_head,
    ("Qwen3NextGatedDeltaNet", "in_proj_ba"): _gates_in_each_head,
    ("MLP", "gate_up_proj"): _halves,
}


def find_fused(graph: ModelGraph) -> tuple[dict[str, FusedMatrix], list[str]]:
    """Find fused matrices among the trained parameters.

    Returns:
        Fused matrices by full parameter name, and names of parameters that look fused in an unknown way.
    """
    found: dict[str, FusedMatrix] = {}
    unknown: list[str] = []
    model = graph.model
    for path, module in model.named_modules():
        for leaf, parameter in module.named_parameters(recurse=False):
            if parameter.ndim < 2 or not parameter.requires_grad:
                continue
            above, _, product = path.rpartition(".") if leaf == "weight" else (path, "", leaf)
            # Skip biases of experts, which are stacks of vectors.
            if not _FUSED_NAMES.search(product) or product.endswith("_bias"):
                continue
            name = f"{path}.{leaf}"
            name = graph.owner_names.get(name, name)
            fused = _apply_rule(model.get_submodule(above), product, parameter.shape)
            if fused is None:
                unknown.append(name)
            else:
                found[name] = fused
    return found, unknown


def _apply_rule(owner: nn.Module, product: str, shape: tuple[int, ...]) -> FusedMatrix | None:
    """Return the layout of the matrices in a fused parameter, or None if no rule matches."""
    if len(shape) == 3:
        return _fused_experts(owner, product, shape)
    kind = type(owner).__name__
    rule = next((rule for (end, name), rule in _RULES.items() if name == product and kind.endswith(end)), None)
    if rule is None:
        return None
    fused = rule(owner, shape[-1] if rule is _thirds_of_columns else shape[-2])
    return fused if fused.length == shape[-1 if fused.by_column else -2] else None


def _fused_experts(owner: nn.Module, product: str, shape: tuple[int, ...]) -> FusedMatrix | None:
    """Return the layout of the gate and up projections of stacked experts, from the owner's attributes."""
    if product != "gate_up_proj" or not hasattr(owner, "is_transposed"):
        return None
    by_column = bool(getattr(owner, "is_transposed", False))
    length = shape[-1] if by_column else shape[-2]
    if getattr(owner, "is_concatenated", True):
        return FusedMatrix((length // 2,) * 2, by_column=by_column)
    return FusedMatrix((1, 1), length // 2, by_column=by_column)
