"""Tiny image-text models of every type that transformers has, as far as its default configs can be shrunk."""

from __future__ import annotations

from typing import Any

import transformers
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from reference.every_family import SMALL
from reference.families import VOCAB

IMAGE_TEXT_TYPES = tuple(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)

#: Of towers of images and sounds, beside the sizes of a text model.
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


#: Types whose code cuts rotary dimensions into parts of time, height and width, by default for a larger head.
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
    """Return the class that transformers names for an image-text type."""
    return getattr(transformers, MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES[model_type])


def tiny_image_text_config(model_type: str) -> Any:
    """Return a tiny configuration without dropout; raises whatever transformers raises where that is impossible."""
    default = CONFIG_MAPPING[model_type]()
    config = CONFIG_MAPPING[model_type](**_shrunk(default))
    if model_type.endswith(("_omni_moe_thinker", "_omni_thinker")):
        config.vision_start_token_id = VOCAB - 2  # published configs have it, the default has not
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
        values["num_key_value_heads"] = SMALL["num_attention_heads"]  # latent attention has no groups
    return values
