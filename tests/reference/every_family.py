"""Tiny configurations of every causal language model that transformers has, as far as its defaults can be shrunk."""

from __future__ import annotations

from typing import Any

import torch
from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from reference.families import FAMILIES, VOCAB, tiny_config

MODEL_TYPES = tuple(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
LARGEST_NUM_PARAMETERS = 30_000_000

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
    """Return a tiny configuration without dropout; raises whatever transformers raises where that is impossible."""
    if model_type in FAMILIES:
        return tiny_config(model_type)
    default = CONFIG_MAPPING[model_type]()
    values = {name: value for name, value in SMALL.items() if hasattr(default, name)}
    if "kv_lora_rank" in values:
        values["num_key_value_heads"] = 4  # latent attention has no groups
    for name, value in vars(default).items():
        if ("dropout" in name or name.endswith("pdrop")) and isinstance(value, float):
            values[name] = 0.0
    config = AutoConfig.for_model(model_type, **values)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **values))
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    if num_parameters > LARGEST_NUM_PARAMETERS:
        raise ValueError(f"still {num_parameters} parameters")
    return config
