"""Tiny configurations of many decoder families, and batches that show what goes wrong."""

from __future__ import annotations

from typing import Any

import torch
from transformers import AutoConfig

VOCAB = 101

_BASE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}

_MOE: dict[str, Any] = {
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 24,
}

_DEEPSEEK: dict[str, Any] = {
    "num_key_value_heads": 4,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 24,
    "first_k_dense_replace": 1,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "head_dim": 8,
}

FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {},
    "qwen2": {"use_sliding_window": True, "sliding_window": 4, "max_window_layers": 1},
    "qwen3": {},
    "qwen3_moe": {**_MOE, "decoder_sparse_step": 1, "mlp_only_layers": [0]},
    "qwen3_next": {
        **_MOE,
        "num_hidden_layers": 4,
        "shared_expert_intermediate_size": 24,
        "linear_num_value_heads": 2,
        "linear_num_key_heads": 2,
        "linear_key_head_dim": 8,
        "linear_value_head_dim": 8,
        "linear_conv_kernel_dim": 3,
    },
    "gemma2": {"sliding_window": 4, "query_pre_attn_scalar": 8},
    "gemma3_text": {"sliding_window": 4, "query_pre_attn_scalar": 8, "sliding_window_pattern": 2},
    "gpt2": {"n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 64},
    "gpt_neox": {},
    "opt": {"ffn_dim": 48, "word_embed_proj_dim": 16},
    "phi3": {},
    "mixtral": {**_MOE, "sliding_window": None},
    "gpt_oss": {**_MOE, "sliding_window": 4},
    "deepseek_v3": _DEEPSEEK,
    "glm4_moe": {**_DEEPSEEK, "num_key_value_heads": 2, "n_shared_experts": 1},
    "olmo2": {},
    "cohere2": {"sliding_window": 4, "sliding_window_pattern": 2},
    "granite": {"logits_scaling": 3.0, "residual_multiplier": 0.5, "embedding_multiplier": 2.0},
    "zamba2": {
        "num_hidden_layers": 5,
        "layers_block_type": ["mamba", "hybrid", "mamba", "hybrid", "hybrid"],
        "num_key_value_heads": 4,
        "num_mem_blocks": 1,
        "mamba_d_state": 8,
        "n_mamba_heads": 4,
        "mamba_ngroups": 1,
        "attention_head_dim": 16,
        "attention_hidden_size": 64,
        "head_dim": None,
    },
    "gemma3n_text": {
        "num_hidden_layers": 4,
        "num_kv_shared_layers": 2,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 4,
        "altup_num_inputs": 2,
        "laurel_rank": 4,
        "activation_sparsity_pattern": [0.5, 0.0, 0.0, 0.0],
        "vocab_size_per_layer_input": VOCAB,
        "hidden_size_per_layer_input": 8,
        "intermediate_size": [48] * 4,
    },
    "zaya": {"num_experts": 4, "num_experts_per_tok": 1},
    "smollm3": {"no_rope_layer_interval": 2},
    "llama4_text": {**_MOE, "intermediate_size_mlp": 48, "num_experts_per_tok": 1, "attention_chunk_size": 4},
}


def tiny_config(family: str, *, tied: bool | None = None, **changes: Any) -> Any:
    """Return a configuration; dropout is off unless `changes` turn it on."""
    values = {**_BASE, **FAMILIES[family], "attention_dropout": 0.0}
    if family in ("gpt2", "opt"):
        values |= {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "dropout": 0.0}
    if family == "gpt2":
        for name in ("hidden_size", "num_attention_heads", "num_hidden_layers", "max_position_embeddings"):
            values.pop(name)
    if tied is not None:
        values["tie_word_embeddings"] = tied
    return AutoConfig.for_model(family, **(values | changes))


def padded_batches() -> list[dict[str, torch.Tensor]]:
    """Return three unequal micro-batches: padded on the right, prompts without labels, lengths that differ."""
    generator = torch.Generator().manual_seed(5)
    batches = []
    for rows, length in ((2, 12), (1, 7), (3, 9)):
        ids = torch.randint(3, VOCAB, (rows, length), generator=generator)
        mask = torch.ones_like(ids)
        labels = ids.clone()
        labels[:, :3] = -100
        if rows > 1:
            mask[0, -3:] = 0
            ids[0, -3:] = 0
            labels[0, -3:] = -100
        labels[-1, 4] = -100
        batches.append({"input_ids": ids, "attention_mask": mask, "labels": labels})
    return batches


def packed_batches() -> list[dict[str, torch.Tensor]]:
    """Return two micro-batches of documents packed into one row, told apart by their positions."""
    generator = torch.Generator().manual_seed(6)
    batches = []
    for lengths in ((5, 4, 7), (3, 9)):
        ids = torch.randint(3, VOCAB, (1, sum(lengths)), generator=generator)
        positions = torch.cat([torch.arange(length) for length in lengths])[None]
        labels = ids.clone()
        labels[positions == 0] = -100
        batches.append({"input_ids": ids, "position_ids": positions, "labels": labels})
    return batches
