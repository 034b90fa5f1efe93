"""Stand-in for liger-kernel's patches for existing models. It uses torch operations, because the kernels need a GPU."""

from __future__ import annotations

from types import MethodType
from typing import Any

import torch
from torch import Tensor


def _norm(self: Any, hidden: Tensor) -> Tensor:
    return torch.nn.functional.rms_norm(hidden, hidden.shape[-1:], self.weight, self.variance_epsilon)


def _mlp(self: Any, hidden: Tensor) -> Tensor:
    return self.down_proj(torch.nn.functional.silu(self.gate_proj(hidden)) * self.up_proj(hidden))


def apply_liger_kernel_to_llama(
    rope: bool = True,
    cross_entropy: bool = False,
    fused_linear_cross_entropy: bool = True,
    rms_norm: bool = True,
    swiglu: bool = True,
    model: Any = None,
) -> None:
    """Patch a model. Also replace names in transformers' Llama module, which affects models that are built later."""
    from transformers.models.llama import modeling_llama

    assert model is not None and rms_norm
    if rope:
        modeling_llama.apply_rotary_pos_emb = None
    modeling_llama.LlamaRMSNorm = type("LigerRMSNorm", (), {})
    if fused_linear_cross_entropy:
        model.forward = None
    for layer in model.model.layers:
        layer.input_layernorm.forward = MethodType(_norm, layer.input_layernorm)
        layer.post_attention_layernorm.forward = MethodType(_norm, layer.post_attention_layernorm)
        if swiglu:
            layer.mlp.forward = MethodType(_mlp, layer.mlp)


def apply_to_norms(rms_norm: bool = True, model: Any = None) -> None:
    """Patch the norms of a model. Unlike liger-kernel, leave its MLPs and experts unchanged."""
    assert model is not None and rms_norm
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = MethodType(_norm, module)


MODEL_TYPE_TO_APPLY_LIGER_FN = {
    "llama": apply_liger_kernel_to_llama,
    **dict.fromkeys(("qwen3_moe", "gpt_oss", "qwen2_5_vl"), apply_to_norms),
}
