"""Tiny configurations of the decoder and image-text families in transformers, and batches that reveal common errors."""

from __future__ import annotations

from typing import Any

import torch
import transformers
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

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

_QWEN3_5: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "linear_attention", "linear_attention", "full_attention"],
    "linear_num_value_heads": 2,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "linear_conv_kernel_dim": 3,
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
        "chunk_size": 8,
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

#: Recent families. To keep tests fast, only ``test_families.py`` trains them, to compare gradients with Hugging Face.
RECENT: dict[str, dict[str, Any]] = {
    "qwen3_5_text": _QWEN3_5,
    "qwen3_5_moe_text": {**_QWEN3_5, **_MOE, "shared_expert_intermediate_size": 24},
    "gemma4_text": {
        "num_hidden_layers": 4,
        "layer_types": ["sliding_attention", "full_attention"] * 2,
        "sliding_window": 4,
        "num_kv_shared_layers": 1,
        "vocab_size_per_layer_input": VOCAB,
        "hidden_size_per_layer_input": 8,
        "enable_moe_block": True,
        "num_experts": 4,
        "top_k_experts": 2,
        "moe_intermediate_size": 24,
    },
    "glm_moe_dsa": {**_DEEPSEEK, "index_n_heads": 2, "index_head_dim": 8, "index_topk": 4},
    "deepseek_v4": {
        **_DEEPSEEK,
        "num_hidden_layers": 4,
        "num_key_value_heads": 1,
        "layer_types": ["sliding_attention", "heavily_compressed_attention", *["compressed_sparse_attention"] * 2],
        "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
        "compress_rates": {"compressed_sparse_attention": 2, "heavily_compressed_attention": 4},
        "hc_mult": 2,
        "o_groups": 2,
        "o_lora_rank": 8,
        "sliding_window": 4,
        "index_n_heads": 2,
        "index_head_dim": 8,
        "index_topk": 2,
        "partial_rotary_factor": 0.5,
    },
}


def tiny_config(family: str, *, tied: bool | None = None, **changes: Any) -> Any:
    """Return a tiny configuration of a family, without dropout unless `changes` enable it."""
    values = {**_BASE, **(FAMILIES | RECENT)[family], "attention_dropout": 0.0}
    if family in ("gpt2", "opt"):
        values |= {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0, "dropout": 0.0}
    if family == "gpt2":
        for name in ("hidden_size", "num_attention_heads", "num_hidden_layers", "max_position_embeddings"):
            values.pop(name)
    if tied is not None:
        values["tie_word_embeddings"] = tied
    return AutoConfig.for_model(family, **(values | changes))


def padded_batches() -> list[dict[str, torch.Tensor]]:
    """Return three micro-batches of different lengths, with right padding and unlabeled prompts."""
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
    """Return two micro-batches, each with one row of packed documents. Positions restart at 0 in each document."""
    generator = torch.Generator().manual_seed(6)
    batches = []
    for lengths in ((5, 4, 7), (3, 9)):
        ids = torch.randint(3, VOCAB, (1, sum(lengths)), generator=generator)
        positions = torch.cat([torch.arange(length) for length in lengths])[None]
        labels = ids.clone()
        labels[positions == 0] = -100
        batches.append({"input_ids": ids, "position_ids": positions, "labels": labels})
    return batches


MODEL_TYPES = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
MAX_PARAMETERS = 30_000_000

SMALL_BY_NUMBER: dict[int, str] = {
    VOCAB: "vocab_size vocab_size_per_layer_input",
    64: "max_position_embeddings n_positions",
    48: "intermediate_size n_inner ffn_dim decoder_ffn_dim encoder_ffn_dim ffn_hidden_size ffn_hidden_dim d_ff",
    32: "hidden_size n_embd d_model embed_dim emb_dim dim lru_width attention_hidden_size word_embed_proj_dim "
    "embedding_size",
    24: "moe_intermediate_size shared_expert_intermediate_size moe_shared_expert_intermediate_size "
    "expert_ffn_hidden_size",
    16: "q_lora_rank kv_lora_rank mamba_d_head mamba_head_dim",
    8: "head_dim qk_nope_head_dim qk_rope_head_dim v_head_dim d_kv linear_key_head_dim linear_value_head_dim "
    "mamba_d_state hidden_size_per_layer_input index_head_dim mamba_chunk_size chunk_size query_pre_attn_scalar",
    4: "num_hidden_layers num_attention_heads num_experts num_local_experts n_routed_experts moe_num_experts n_layer "
    "n_head num_layers n_layers n_heads decoder_layers num_decoder_layers decoder_attention_heads "
    "encoder_attention_heads num_heads rotary_dim sliding_window attention_window attention_chunk_size index_topk "
    "state_size mamba_n_heads mamba_num_heads n_mamba_heads",
    2: "num_key_value_heads num_experts_per_tok moe_k moe_topk linear_num_value_heads linear_num_key_heads "
    "encoder_layers index_n_heads mamba_expand expand global_attn_every_n_layers eos_token_id",
    1: "n_group topk_group first_k_dense_replace n_groups mamba_n_groups mamba_ngroups bos_token_id",
    0: "pad_token_id",
}
SMALL = {name: number for number, names in SMALL_BY_NUMBER.items() for name in names.split()}


def shrunk_config(model_type: str) -> Any:
    """Return a tiny configuration without dropout. Raise an error if a type cannot be made tiny."""
    if model_type in FAMILIES:
        return tiny_config(model_type)
    default = CONFIG_MAPPING[model_type]()
    values = {name: value for name, value in SMALL.items() if hasattr(default, name)}
    if "kv_lora_rank" in values:
        values["num_key_value_heads"] = 4  # latent attention does not group heads
    for name, value in vars(default).items():
        if ("dropout" in name or name.endswith("pdrop")) and isinstance(value, float):
            values[name] = 0.0
    config = AutoConfig.for_model(model_type, **values)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **values))
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    if num_parameters > MAX_PARAMETERS:
        raise ValueError(f"still {num_parameters} parameters")
    return config


IMAGE_TEXT_TYPES = tuple(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)

#: Sizes of image and audio towers. They extend or override the sizes of a text model.
_TOWER: dict[str, int] = {
    "image_size": 32,
    "patch_size": 16,
    "depth": 2,
    "out_hidden_size": 32,
    "num_hidden_layers": 2,
    "num_layers": 2,
    "num_heads": 4,
    "projection_dim": 32,
}


#: Types that split rotary dimensions into time, height and width. The default split does not fit a tiny head.
_MROPE = frozenset(
    [
        "glm46v",
        "glm4v",
        "glm4v_moe",
        "glm_ocr",
        "glmga",
        "paddleocr_vl",
        "qwen2_5_omni",
        "qwen2_5_omni_thinker",
        "qwen2_5_vl",
        "qwen2_vl",
    ]
)


def image_text_class(model_type: str) -> Any:
    """Return transformers' class for an image-text type."""
    return getattr(transformers, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[model_type])


def tiny_image_text_config(model_type: str) -> Any:
    """Return a tiny configuration without dropout. If the type cannot be made tiny, transformers raises an error."""
    default = CONFIG_MAPPING[model_type]()
    config = CONFIG_MAPPING[model_type](**_shrunk(default))
    if model_type.endswith(("_omni_moe_thinker", "_omni_thinker")):
        config.vision_start_token_id = VOCAB - 2  # published configs set this token, but the default config does not
    config.architectures = [image_text_class(model_type).__name__]
    return config


def _shrunk(config: Any, *, is_text: bool = False) -> dict[str, Any]:
    values: dict[str, Any] = {}
    subs = getattr(config, "sub_configs", None) or {}
    sizes = SMALL if is_text else {**SMALL, **_TOWER}
    text = config.get_text_config()
    for name, value in config.to_dict().items():
        inner = getattr(config, name, None) if name in subs else None
        if inner is not None:
            values[name] = {**_shrunk(inner, is_text=is_text or inner is text), "model_type": inner.model_type}
        elif name in sizes and isinstance(value, int):
            values[name] = sizes[name]
        elif ("dropout" in name or name.endswith("pdrop")) and isinstance(value, float):
            values[name] = 0.0
        elif name.endswith(("_token_id", "_token_index")):
            values[name] = min(value, VOCAB - 1) if isinstance(value, int) else value
        elif name == "rope_parameters" and config.model_type.removesuffix("_text") in _MROPE:
            half = int(SMALL["head_dim"] * value.get("partial_rotary_factor", 1.0)) // 2
            values[name] = {**value, "mrope_section": [half // 2, half // 4, half - half // 2 - half // 4]}
    if "kv_lora_rank" in values:
        values["num_key_value_heads"] = SMALL["num_attention_heads"]  # latent attention does not group heads
    return values
