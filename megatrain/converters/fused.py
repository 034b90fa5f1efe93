"""Rules for fused parameters in transformers' models. Such a parameter contains several matrices.

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


def _column_thirds(owner: nn.Module, length: int) -> FusedMatrix:
    return FusedMatrix((length // 3,) * 3, divides_columns=True)


def _head_thirds(owner: Any, length: int) -> FusedMatrix:
    config = owner.config
    heads = int(config.num_attention_heads)
    return FusedMatrix((length // (3 * heads),) * 3, heads)


def _grouped_qkv(owner: Any, length: int) -> FusedMatrix:
    config = owner.config
    head_dim = int(getattr(owner, "head_dim", 0) or config.hidden_size // config.num_attention_heads)
    key_size = head_dim * int(config.num_key_value_heads)
    return FusedMatrix((head_dim * int(config.num_attention_heads), key_size, key_size))


def _dbrx(owner: Any, length: int) -> FusedMatrix:
    key_size = int(owner.num_key_value_heads) * int(owner.head_dim)
    return FusedMatrix((int(owner.hidden_size), key_size, key_size))


def _delta_net(owner: Any, length: int) -> FusedMatrix:
    return FusedMatrix((int(owner.key_dim), int(owner.key_dim), int(owner.value_dim)))


def _head_delta_net(owner: Any, length: int) -> FusedMatrix:
    value_size = int(owner.num_v_heads) // int(owner.num_k_heads) * int(owner.head_v_dim)
    return FusedMatrix((int(owner.head_k_dim), int(owner.head_k_dim), value_size, value_size), int(owner.num_k_heads))


def _head_gates(owner: Any, length: int) -> FusedMatrix:
    return FusedMatrix((int(owner.num_v_heads) // int(owner.num_k_heads),) * 2, int(owner.num_k_heads))


_Rule = Callable[[Any, int], FusedMatrix]

#: Rules by the last part of the owner's class name, and by the name of the parameter or of its module.
_RULES: Mapping[tuple[str, str], _Rule] = {
    ("Phi3Attention", "qkv_proj"): _grouped_qkv,
    ("Phi4MultimodalAttention", "qkv_proj"): _grouped_qkv,
    ("MiniMaxLightningAttention", "qkv_proj"): _head_thirds,
    ("GPTNeoXAttention", "query_key_value"): _head_thirds,
    ("GPT2Attention", "c_attn"): _column_thirds,
    ("MptAttention", "Wqkv"): _thirds,
    ("DbrxAttention", "Wqkv"): _dbrx,
    ("JetMoeAttention", "kv_proj"): _halves,
    ("Qwen3_5GatedDeltaNet", "in_proj_qkv"): _delta_net,
    ("Qwen3_5MoeGatedDeltaNet", "in_proj_qkv"): _delta_net,
    ("Qwen3NextGatedDeltaNet", "in_proj_qkvz"): _head_delta_net,
    ("Qwen3NextGatedDeltaNet", "in_proj_ba"): _head_gates,
    ("MLP", "gate_up_proj"): _halves,
}


def find_fused(graph: ModelGraph) -> tuple[dict[str, FusedMatrix], list[str]]:
    """Find fused matrices among the trained parameters.

    Returns:
        Fused matrices by full parameter name, and names of parameters that look fused in an unknown way.
    """
    matrices: dict[str, FusedMatrix] = {}
    unknown: list[str] = []
    model = graph.model
    for path, module in model.named_modules():
        for leaf, parameter in module.named_parameters(recurse=False):
            if parameter.ndim < 2 or not parameter.requires_grad:
                continue
            owner_path, _, matrix_name = path.rpartition(".") if leaf == "weight" else (path, "", leaf)
            # Skip biases of experts, which are stacks of vectors.
            if not _FUSED_NAMES.search(matrix_name) or matrix_name.endswith("_bias"):
                continue
            name = f"{path}.{leaf}"
            name = graph.owner_names.get(name, name)
            matrix = _apply_rule(model.get_submodule(owner_path), matrix_name, parameter.shape)
            if matrix is None:
                unknown.append(name)
            else:
                matrices[name] = matrix
    return matrices, unknown


def _apply_rule(owner: nn.Module, matrix_name: str, shape: tuple[int, ...]) -> FusedMatrix | None:
    """Return the layout of the matrices in a fused parameter, or None if no rule matches."""
    if len(shape) == 3:
        return _fused_experts(owner, matrix_name, shape)
    class_name = type(owner).__name__
    rule = next((r for (end, name), r in _RULES.items() if name == matrix_name and class_name.endswith(end)), None)
    if rule is None:
        return None
    matrix = rule(owner, shape[-1] if rule is _column_thirds else shape[-2])
    return matrix if matrix.length == shape[-1 if matrix.divides_columns else -2] else None


def _fused_experts(owner: nn.Module, matrix_name: str, shape: tuple[int, ...]) -> FusedMatrix | None:
    """Return the layout of the gate and up projections of stacked experts, from the owner's attributes."""
    if matrix_name != "gate_up_proj" or not hasattr(owner, "is_transposed"):
        return None
    is_transposed = bool(getattr(owner, "is_transposed", False))
    length = shape[-1] if is_transposed else shape[-2]
    if getattr(owner, "is_concatenated", True):
        return FusedMatrix((length // 2,) * 2, divides_columns=is_transposed)
    return FusedMatrix((1, 1), length // 2, divides_columns=is_transposed)
