"""Small copies of large models keep the family and its kinds of layers."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from transformers import CONFIG_MAPPING

from megatrain.base.errors import UnsupportedModelError
from megatrain.models.folder import ModelFolder
from megatrain.models.small import MAX_PARAMETERS, write_small_model

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
