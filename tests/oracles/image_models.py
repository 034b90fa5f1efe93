"""Writes folders of tiny image-text models with tokenizer and processor, and rows with images."""

from __future__ import annotations

import io
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer, TokenizersBackend

from megatrain.data.dataset import DataSpec
from megatrain.data.row_kind import CHATS
from megatrain.data.table import DataConfig, DatasetConfig
from oracles.families import image_text_class, tiny_image_text_config

TOKENIZER = Path(__file__).parents[2] / "examples/quickstart/model"
SIDE = 32  # image width and height in pixels, for vision towers with a fixed input size

_PARTS = (
    "{%- for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' }}"
    "{%- if message['content'] is string %}{{ message['content'] }}"
    "{%- else %}{%- for part in message['content'] %}"
    "{%- if part['type'] == 'image' %}{{ 'IMAGE' }}{%- else %}{{ part['text'] }}{%- endif %}"
    "{%- endfor %}{%- endif %}{{ '<|im_end|>\n' }}{%- endfor %}"
    "{%- if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{%- endif %}"
)


@dataclass(frozen=True)
class Family:
    """Contents of a family's tiny model folder that ``tiny_image_text_config`` does not determine.

    Attributes:
        processor: Class name of the processor.
        image_processor: Class name and settings of the image processor.
        tokens: Special tokens of the tokenizer, by name.
        placeholder: Text that represents an image in the chat template.
        ids: Token for each configuration field that holds a token id.
        values: Settings of the processor.
        changes: Configuration values to replace, by dotted path. The path "" holds constructor arguments.
    """

    processor: str
    image_processor: dict[str, Any]
    tokens: dict[str, str]
    placeholder: str
    ids: dict[str, str]
    values: dict[str, Any] = field(default_factory=dict)
    changes: dict[str, Any] = field(default_factory=dict)


_FIXED = {"size": {"height": SIDE, "width": SIDE}}
_QWEN: dict[str, Any] = {
    "image_processor": {
        "image_processor_type": "Qwen2VLImageProcessor",
        "patch_size": 16,
        "merge_size": 2,
        "temporal_patch_size": 2,
        "size": {"shortest_edge": 32 * 32, "longest_edge": 128 * 128},
    },
    "tokens": {
        "image_token": "<|image_pad|>",
        "video_token": "<|video_pad|>",
        "vision_start_token": "<|vision_start|>",
        "vision_end_token": "<|vision_end|>",
    },
    "placeholder": "<|vision_start|><|image_pad|><|vision_end|>",
    "ids": {
        "image_token_id": "<|image_pad|>",
        "video_token_id": "<|video_pad|>",
        "vision_start_token_id": "<|vision_start|>",
        "vision_end_token_id": "<|vision_end|>",
    },
}  # fmt: skip

FAMILIES: dict[str, Family] = {
    "qwen2_5_vl": Family("Qwen2_5_VLProcessor", **_QWEN, changes={"vision_config.fullatt_block_indexes": [1]}),
    "qwen3_vl": Family(
        "Qwen3VLProcessor",
        **_QWEN,
        changes={
            "vision_config.deepstack_visual_indexes": [0, 1],
            "vision_config.num_position_embeddings": 16,
            "text_config.rope_parameters": {
                "rope_type": "default",
                "rope_theta": 10000.0,
                "mrope_section": [2, 1, 1],
                "mrope_interleaved": True,
            },
        },
    ),
    "gemma3": Family(
        "Gemma3Processor",
        {"image_processor_type": "Gemma3ImageProcessor", **_FIXED, "do_pan_and_scan": False},
        {"boi_token": "<start_of_image>", "eoi_token": "<end_of_image>", "image_token": "<image_soft_token>"},
        "<start_of_image>",
        {
            "boi_token_index": "<start_of_image>",
            "eoi_token_index": "<end_of_image>",
            "image_token_index": "<image_soft_token>",
            "image_token_id": "<image_soft_token>",
        },
        {"image_seq_length": 4},
        {"mm_tokens_per_image": 4},
    ),
    "gemma4": Family(
        "Gemma4Processor",
        {
            "image_processor_type": "Gemma4ImageProcessor",
            "patch_size": 16,
            "pooling_kernel_size": 2,
            "max_soft_tokens": 70,
        },
        {
            "boi_token": "<|image>",
            "eoi_token": "<image|>",
            "image_token": "<|image|>",
            "boa_token": "<|audio>",
            "eoa_token": "<audio|>",
            "audio_token": "<|audio|>",
        },
        "<|image|>",
        {
            "boi_token_id": "<|image>",
            "eoi_token_id": "<image|>",
            "image_token_id": "<|image|>",
            "boa_token_id": "<|audio>",
            "eoa_token_id": "<audio|>",
            "audio_token_id": "<|audio|>",
            "video_token_id": "<|video|>",
        },
        {"image_seq_length": 70},
        {
            "": {"vision_config": {
                "hidden_size": 32,
                "intermediate_size": 48,
                "num_hidden_layers": 2,
                "num_attention_heads": 4,
                "num_key_value_heads": 4,
                "head_dim": 8,
                "pooling_kernel_size": 2,
                "patch_size": 16,
                "position_embedding_size": 64,
            }}
        },
    ),
    "llava": Family(
        "LlavaProcessor",
        {
            "image_processor_type": "CLIPImageProcessor",
            "size": {"shortest_edge": SIDE},
            "crop_size": {"height": SIDE, "width": SIDE},
        },
        {"image_token": "<image>"},
        "<image>",
        {"image_token_index": "<image>", "image_token_id": "<image>"},
        {"patch_size": 16, "vision_feature_select_strategy": "default", "num_additional_image_tokens": 1},
        {"vision_config.image_size": SIDE, "vision_config.patch_size": 16},
    ),
    "internvl": Family(
        "InternVLProcessor",
        {"image_processor_type": "GotOcr2ImageProcessor", **_FIXED, "crop_to_patches": True, "max_patches": 2},
        {
            "start_image_token": "<img>",
            "end_image_token": "</img>",
            "context_image_token": "<IMG_CONTEXT>",
            "video_token": "<video>",
        },
        "<IMG_CONTEXT>",
        {"image_token_id": "<IMG_CONTEXT>"},
        {"image_seq_length": 1},
        {"image_seq_length": 1, "vision_config.image_size": [SIDE, SIDE], "vision_config.patch_size": [16, 16]},
    ),
    "mistral3": Family(
        "PixtralProcessor",
        {"image_processor_type": "PixtralImageProcessor", "patch_size": 32, "size": {"longest_edge": 96}},
        {},
        "[IMG]",
        {"image_token_index": "[IMG]", "image_token_id": "[IMG]"},
        {"patch_size": 16, "spatial_merge_size": 2, "image_token": "[IMG]"},
        {"spatial_merge_size": 2, "vision_config.image_size": 96, "vision_config.patch_size": 16},
    ),
    "smolvlm": Family(
        "SmolVLMProcessor",
        {
            "image_processor_type": "SmolVLMImageProcessor",
            "size": {"longest_edge": 64},
            "max_image_size": {"longest_edge": SIDE},
            "do_image_splitting": True,
        },
        {
            "fake_image_token": "<fake_token_around_image>",
            "image_token": "<image>",
            "end_of_utterance_token": "<end_of_utterance>",
            "global_image_token": "<global-img>",
        },
        "<image>",
        {"image_token_id": "<image>"},
        {"image_seq_len": 1},
        {"vision_config.image_size": SIDE, "vision_config.patch_size": 16, "scale_factor": 2},
    ),
}  # fmt: skip
_MORE_TOKENS = ("<|im_start|>", "<|im_end|>", "[IMG]", "[IMG_BREAK]", "[IMG_END]", "<|video|>")


def make_folder(family: str, folder: Path) -> Path:
    """Write a tiny model with random weights, tokenizer, processor and chat template, and return its folder."""
    made, folder = FAMILIES[family], folder / family
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    special = [*_MORE_TOKENS, *made.tokens.values()]
    tokenizer = TokenizersBackend(
        tokenizer_object=tokenizer.backend_tokenizer,
        extra_special_tokens=made.tokens,
        eos_token="<|im_end|>",
        pad_token="<|im_end|>",
    )
    tokenizer.add_special_tokens(
        {"additional_special_tokens": list(dict.fromkeys(special))}, replace_extra_special_tokens=False
    )
    tokenizer.chat_template = _PARTS.replace("IMAGE", made.placeholder)
    model = random_model(family, tokenizer)
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    processor = {"processor_class": made.processor, **made.values}
    (folder / "processor_config.json").write_text(json.dumps(processor))
    (folder / "preprocessor_config.json").write_text(
        json.dumps(made.image_processor | {"processor_class": made.processor})
    )
    return folder


def random_model(family: str, tokenizer: Any) -> Any:
    """Return a model with random weights that are large enough that every gradient matters."""
    made = FAMILIES[family]
    config = tiny_image_text_config(family)
    text = config.get_text_config()
    text.vocab_size = len(tokenizer)
    if hasattr(text, "vocab_size_per_layer_input"):
        text.vocab_size_per_layer_input = len(tokenizer)
    text.max_position_embeddings = 512
    text.eos_token_id = text.pad_token_id = config.pad_token_id = tokenizer.eos_token_id
    for name, token in made.ids.items():
        setattr(config, name, tokenizer.convert_tokens_to_ids(token))
    for path, value in made.changes.items():
        if not path:
            continue
        *inner, name = path.split(".")
        setattr(getattr(config, inner[0]) if inner else config, name, value)
    # The constructor derives some fields from others.
    config = type(config)(**{**config.to_dict(), **made.changes.get("", {})})
    config.architectures = [image_text_class(family).__name__]
    torch.manual_seed(1234)
    model = image_text_class(family)._from_config(config, dtype=torch.float32).train()
    generator = torch.Generator().manual_seed(99)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.05)
    return model


def png(width: int, height: int, seed: int) -> bytes:
    """Return a PNG image of random noise."""
    from PIL import Image

    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    held = io.BytesIO()
    Image.fromarray(pixels).save(held, "PNG")
    return held.getvalue()


def chat(*parts: str | dict[str, Any], answer: str = "a whale") -> list[dict[str, Any]]:
    """Return a conversation in OpenAI's format: a question with several parts, and an answer."""
    content = [{"type": "text", "text": part} if isinstance(part, str) else part for part in parts]
    return [{"role": "user", "content": content}, {"role": "assistant", "content": answer}]


def write_rows(folder: Path, sizes: Sequence[Sequence[tuple[int, int]]]) -> Path:
    """Write images of the given sizes, and a file with one row per list of sizes. Return the file's path."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for number, own in enumerate(sizes):
        parts: list[str | dict[str, Any]] = []
        for index, (width, height) in enumerate(own):
            name = f"{number}-{index}.png"
            (folder / name).write_bytes(png(width, height, 10 * number + index))
            parts += [f"picture {index}: ", {"type": "image_url", "image_url": {"url": name}}]
        rows.append({"messages": chat(*parts, "what is it?", answer=f"it is the whale of row {number}")})
    file = folder / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def image_data(rows: Path, model: Path, max_length: int, /, **changes: Any) -> DataSpec:
    """Return the data settings of a run that trains on rows with images."""
    table = DataConfig(
        train=[DatasetConfig(path=str(rows))],
        max_length=max_length,
        packing=False,
        overlong="error",
        bad_rows="error",
        max_dropped=0.0,
        cache_dir="none",
    )
    folder = changes.pop("images_folder", str(model))
    return DataSpec(table, CHATS, seed=1, images_folder=folder).with_keys(**changes)
