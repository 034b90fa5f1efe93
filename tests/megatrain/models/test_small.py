"""Small copies of large models keep the family and its kinds of layers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import CONFIG_MAPPING

from megatrain.base.errors import UnsupportedModelError
from megatrain.models.folder import ModelFolder
from megatrain.models.small import MAX_PARAMETERS, SmallModel, _shrink_depth, _shrunken_configs, write_small_model

FAMILIES = (
    "llama", "qwen2", "qwen3", "qwen3_moe", "gemma2", "gemma3_text", "gpt2", "opt", "phi3", "mixtral", "gpt_oss",
    "deepseek_v3", "smollm3", "qwen3_next",
)  # fmt: skip


@pytest.mark.parametrize("family", FAMILIES)
def test_small_copies_keep_the_family_and_its_kinds_of_layers(family: str, tmp_path: Path) -> None:
    original = CONFIG_MAPPING[family]()
    small = write_small_model(original, tmp_path, attn_implementation="auto", seed=1)
    assert small.num_parameters <= MAX_PARAMETERS // 10 and 3 <= small.num_layers <= 8
    values = json.loads((small.folder / "config.json").read_text())
    assert values["model_type"] == family
    kinds = getattr(original, "layer_types", None)
    if kinds:
        assert set(values["layer_types"]) == set(kinds)
    assert set(ModelFolder(small.folder).records)


def test_a_model_without_a_small_copy_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="uses a small Llama"):
        write_small_model(CONFIG_MAPPING["t5"](), tmp_path, attn_implementation="auto", seed=1)


LINEAR, FULL, SLIDING = "linear_attention", "full_attention", "sliding_attention"
#: Changes to each config, and the values that its small copies change: widths and heads, widths, or none.
SHRUNKEN: dict[str, tuple[dict[str, object], list[dict[str, object]]]] = {
    "llama": (
        {"num_key_value_heads": 8, "bos_token_id": 511, "eos_token_id": [512, 7], "attention_dropout": 0.1},
        [
            {
                "hidden_size": 64,
                "intermediate_size": 160,
                "num_attention_heads": 4,
                "num_key_value_heads": 1,
                "head_dim": 16,
            },
            {"hidden_size": 512, "intermediate_size": 160, "num_attention_heads": 4, "num_key_value_heads": 1},
            {},
        ],
    ),
    "deepseek_v3": (
        {},
        [
            {
                "hidden_size": 64,
                "intermediate_size": 160,
                "moe_intermediate_size": 48,
                "num_attention_heads": 4,
                "num_key_value_heads": 4,
                "kv_lora_rank": 16,
                "q_lora_rank": 16,
                "qk_rope_head_dim": 16,
                "qk_nope_head_dim": 16,
                "v_head_dim": 16,
                "head_dim": 16,
            },
            {
                "hidden_size": 256,
                "intermediate_size": 160,
                "moe_intermediate_size": 48,
                "num_attention_heads": 4,
                "num_key_value_heads": 4,
                "kv_lora_rank": 16,
                "q_lora_rank": 16,
                "qk_rope_head_dim": 16,
                "qk_nope_head_dim": 16,
                "v_head_dim": 16,
            },
            {},
        ],
    ),
    "falcon_h1": (
        {"mamba_n_heads": 8},
        [
            {
                "hidden_size": 64,
                "intermediate_size": 160,
                "num_attention_heads": 4,
                "num_key_value_heads": 1,
                "mamba_d_ssm": 128,
                "mamba_n_heads": 4,
                "mamba_d_head": 32,
                "mamba_d_state": 16,
            },
            {
                "hidden_size": 512,
                "intermediate_size": 160,
                "num_attention_heads": 4,
                "num_key_value_heads": 1,
                "mamba_n_heads": 4,
                "mamba_d_head": 256,
                "mamba_d_state": 16,
            },
            {},
        ],
    ),
    "gpt2": ({}, [{"n_embd": 64, "n_head": 4}, {"n_embd": 256, "n_head": 4}, {}]),
    "gemma3_text": (
        {"num_hidden_layers": 12, "query_pre_attn_scalar": 256, "layer_types": [SLIDING] * 5 + [FULL, *[SLIDING] * 6]},
        [
            {
                "hidden_size": 64,
                "intermediate_size": 160,
                "num_attention_heads": 4,
                "num_key_value_heads": 2,
                "head_dim": 16,
                "query_pre_attn_scalar": 16,
            },
            {"hidden_size": 1024, "intermediate_size": 160, "num_attention_heads": 4, "num_key_value_heads": 2},
            {},
        ],
    ),
}
#: Values that all of a family's configs have in common.
COMMON: dict[str, dict[str, object]] = {
    "llama": {"num_hidden_layers": 3, "eos_token_id": [0, 7], "attention_dropout": 0.0},
    "deepseek_v3": {
        "num_hidden_layers": 3,
        "n_routed_experts": 8,
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
    },
    "falcon_h1": {"num_hidden_layers": 3},
    "gpt2": {
        "n_layer": 3,
        "resid_pdrop": 0.0,
        "embd_pdrop": 0.0,
        "attn_pdrop": 0.0,
        "summary_first_dropout": 0.0,
        "bos_token_id": 0,
        "eos_token_id": 0,
    },
    "gemma3_text": {"num_hidden_layers": 6, "sliding_window": 32, "layer_types": [SLIDING] * 5 + [FULL]},
}


def test_small_configs_differ_only_in_sizes_and_dropout() -> None:
    for family, (changes, expected) in SHRUNKEN.items():
        config = CONFIG_MAPPING[family](**changes)
        original = config.to_dict()
        found = [
            {name: value for name, value in small.to_dict().items() if value != original.get(name)}
            for small in _shrunken_configs(config, 3)
        ]
        assert found == [{"vocab_size": 512, **COMMON[family], **each} for each in expected], family
        assert config.to_dict() == original


def test_depth_keeps_tables_of_the_kept_layers() -> None:
    values = {
        "depth": 12,
        "kinds": ["a"] * 4 + ["b"] + ["a"] * 7,
        "late": ["a"] * 9 + ["b", "c", "d"],
        "other": ["a", "b"],
        "by_layer": {"0": 5, "7": 6, "8": 7},
        "named": {"0": 1, "x": 2},
    }
    _shrink_depth(values, "depth", 3)
    assert values == {
        "depth": 8,
        "kinds": ["a"] * 4 + ["b"] + ["a"] * 3,
        "late": ["a"] * 8,
        "other": ["a", "b"],
        "by_layer": {"0": 5, "7": 6},
        "named": {"0": 1, "x": 2},
    }
    shallow = {"depth": 2, "kinds": ["a", "b"]}
    _shrink_depth(shallow, "depth", 3)
    assert shallow == {"depth": 2, "kinds": ["a", "b"]}


def test_default_model_has_a_tokenizer_and_texts(tmp_path: Path) -> None:
    from transformers import AutoTokenizer

    found = write_small_model(None, tmp_path, attn_implementation="auto", seed=3)
    weights = 2 * 512 * 64 + 3 * (64 * 64 * 2 + 64 * 32 * 2 + 3 * 64 * 160 + 2 * 64) + 64
    paths = [tmp_path / name for name in ("model", "tokenizer", "text.jsonl")]
    assert found == SmallModel(*paths, "llama", 3, weights)
    tokenizer = AutoTokenizer.from_pretrained(found.tokenizer)
    assert tokenizer("w2 w511  w512 <end>")["input_ids"] == [2, 511, 0, 1]
    assert (tokenizer.eos_token_id, tokenizer.unk_token_id, len(tokenizer)) == (1, 0, 512)
    texts = [json.loads(line) for line in found.text.read_text().splitlines()]
    assert len(texts) == 80 and all(set(row) == {"text"} for row in texts)
    counts = [len(row["text"].split(" ")) for row in texts]
    assert 12 <= min(counts) < 20 and 90 < max(counts) <= 100
    ids = {token for row in texts for token in tokenizer(row["text"])["input_ids"]}
    assert min(ids) == 2 and max(ids) == 511
    again = write_small_model(None, tmp_path / "again", attn_implementation="auto", seed=3)
    other = write_small_model(None, tmp_path / "other", attn_implementation="auto", seed=4)
    assert again.text.read_bytes() == found.text.read_bytes() != other.text.read_bytes()
    models = [(each.folder / "model.safetensors").read_bytes() for each in (found, again, other)]
    assert models[0] == models[1] != models[2]
