"""Scaled-down copies of models. A copy has the same family and types of layers, but fewer and narrower layers."""

from __future__ import annotations

import copy
import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megatrain.base.errors import UnsupportedModelError
from tiered.units import is_number

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

VOCAB_SIZE = 512
MAX_PARAMETERS = 50_000_000
NUM_HEADS, HEAD_DIM = 4, 16
_MIN_LAYERS, _MAX_LAYERS = 3, 8
_NOISE = 0.05  # standard deviation of the noise added to every weight, so that no weight is zero

#: Upper limits for widths. Keys are config keys in transformers.
_WIDTHS: dict[str, int] = {
    name: width
    for width, names in {
        160: "intermediate_size ffn_dim n_inner ffn_hidden_size d_ff intermediate_size_mlp",
        64: "shared_expert_intermediate_size hidden_size_per_layer_input word_embed_proj_dim",
        48: "moe_intermediate_size moe_shared_expert_intermediate_size expert_ffn_hidden_size",
        16: "q_lora_rank kv_lora_rank qk_nope_head_dim qk_rope_head_dim v_head_dim linear_key_head_dim "
        "linear_value_head_dim mamba_d_state mamba_d_head mamba_head_dim state_size d_kv index_head_dim",
        4: "linear_num_value_heads index_n_heads mamba_n_heads n_mamba_heads mamba_num_heads index_topk",
        2: "linear_num_key_heads",
        1: "n_groups mamba_n_groups mamba_ngroups",
    }.items()
    for name in names.split()
}
_COUNTS: dict[str, int] = {
    name: count
    for count, names in {
        VOCAB_SIZE: "vocab_size vocab_size_per_layer_input",
        32: "sliding_window attention_chunk_size attention_window",
        8: "num_experts num_local_experts n_routed_experts moe_num_experts",
        2: "num_experts_per_tok moe_k moe_topk num_kv_shared_layers",
        1: "n_group topk_group first_k_dense_replace n_shared_experts",
    }.items()
    for name in names.split()
}

#: Config keys of a state-space scan: expansion factor, number of heads and head width.
_SCAN_KEYS = (
    ("mamba_expand", "mamba_n_heads", "mamba_d_head"),
    ("mamba_expand", "n_mamba_heads", "mamba_headdim"),
    ("expand", "num_heads", "head_dim"),
)


def small_model(
    config: PretrainedConfig,
    attn_implementation: str,
    seed: int,
    *,
    num_layers: int = _MIN_LAYERS,
    needs_head: bool = True,
) -> PreTrainedModel:
    """Return a scaled-down copy of the model that ``config`` describes, in fp32 on the CPU, with random weights.

    Args:
        config: Configuration of the original model.
        attn_implementation: Attention implementation of transformers, or "auto".
        seed: Random seed for the weights.
        num_layers: Minimum number of layers, or all layers if the original model has fewer.
        needs_head: Whether the copy must have a head. If False, a text part without a causal language model is allowed.

    Raises:
        UnsupportedModelError: No small copy can be built and run.
    """
    problem: Exception | None = None
    for small_config in _shrunken_configs(config, num_layers):
        try:
            model = build(small_config, attn_implementation, seed, needs_head=needs_head)
            with torch.no_grad():
                model(input_ids=torch.arange(8)[None], use_cache=False)
        except Exception as error:  # the model families raise different types of errors for invalid configs
            problem = problem or error
            continue
        return model
    reason = f"{type(problem).__name__}: {problem}" if problem else "every copy is still too large"
    raise UnsupportedModelError(
        str(config.model_type),
        f"no small copy of it can be built ({reason}). `verify` without CONFIG uses a small Llama; model.mlp_rows also "
        "needs a small copy",
    )


def build(config: PretrainedConfig, attn_implementation: str, seed: int, *, needs_head: bool = True) -> PreTrainedModel:
    """Build the model of a small config in fp32 on the CPU, with seeded random weights. See `small_model`."""
    from transformers import AutoModel, AutoModelForCausalLM

    has_head = needs_head or type(config) in AutoModelForCausalLM._model_mapping
    model_class: Any = AutoModelForCausalLM if has_head else AutoModel
    options = {} if attn_implementation == "auto" else {"attn_implementation": attn_implementation}
    with torch.device("meta"):
        num_parameters = sum(p.numel() for p in model_class.from_config(copy.deepcopy(config)).parameters())
    if num_parameters > MAX_PARAMETERS:
        raise ValueError(f"{num_parameters:,} parameters are too many for a quick test")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model: PreTrainedModel = model_class.from_config(config, dtype=torch.float32, **options)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(torch.randn(parameter.shape) * _NOISE)
    return model


def _shrunken_configs(config: PretrainedConfig, num_layers: int) -> Iterator[PretrainedConfig]:
    """Yield scaled-down configs to try: with all widths reduced, then all but the head width, then none."""
    for keep_head_dim, keep_widths in ((False, False), (True, False), (True, True)):
        values = config.to_dict()
        for name in ("architectures", "dtype", "torch_dtype", "transformers_version", "_name_or_path"):
            values.pop(name, None)
        try:
            _shrink(values, config, num_layers, keep_head_dim=keep_head_dim, keep_widths=keep_widths)
            yield type(config).from_dict(values)
        except Exception:  # the model family rejects this config; the next config is closer to the original
            continue


def _shrink(
    values: dict[str, Any], config: PretrainedConfig, num_layers: int, *, keep_head_dim: bool, keep_widths: bool
) -> None:
    names = dict(getattr(config, "attribute_map", None) or {})
    _shrink_depth(values, names.get("num_hidden_layers", "num_hidden_layers"), num_layers)
    for name, maximum in _COUNTS.items():
        _limit(values, names.get(name, name), maximum)
    if not keep_widths:
        heads_key = names.get("num_attention_heads", "num_attention_heads")
        hidden_key = names.get("hidden_size", "hidden_size")
        hidden, heads = int(values[hidden_key]), int(values[heads_key])
        head_dim = int(values.get("head_dim") or hidden // heads)
        new_heads = min(heads, NUM_HEADS)
        new_head_dim = head_dim if keep_head_dim else min(head_dim, HEAD_DIM)
        values[heads_key], values[hidden_key] = new_heads, new_heads * new_head_dim
        if isinstance(values.get("head_dim"), int):
            values["head_dim"] = new_head_dim
        if isinstance(values.get("query_pre_attn_scalar"), int):
            values["query_pre_attn_scalar"] = new_head_dim
        groups = values.get("num_key_value_heads")
        if isinstance(groups, int):
            is_latent = "kv_lora_rank" in values
            values["num_key_value_heads"] = new_heads if is_latent else max(1, new_heads * groups // heads)
        for name, maximum in _WIDTHS.items():
            _limit(values, names.get(name, name), maximum)
        _fit_scan_width(values, hidden_key)
    for name, value in list(values.items()):
        if ("dropout" in name or name.endswith("pdrop")) and isinstance(value, float):
            values[name] = 0.0  # with dropout, the compared programs would give different results
        elif name.endswith("_token_id") and value is not None:
            values[name] = _limit_token(value)


def _shrink_depth(values: dict[str, Any], key: str, num_layers: int) -> None:
    """Keep only the first layers, but enough to include every layer type in the config's per-layer lists."""
    depth = int(values[key])
    lists = {name: value for name, value in values.items() if isinstance(value, list) and len(value) == depth}
    num_kept = min(depth, num_layers)
    for value in lists.values():
        layer_types = [str(item) for item in value]
        while num_kept < min(depth, _MAX_LAYERS) and set(layer_types[:num_kept]) != set(layer_types):
            num_kept += 1
    values[key] = num_kept
    for name, value in lists.items():
        values[name] = value[:num_kept]
    for name, value in values.items():
        # Shorten tables that are keyed by layer number.
        if isinstance(value, dict) and value and all(is_number(str(index)) for index in value):
            values[name] = {index: item for index, item in value.items() if int(index) < num_kept}


def _fit_scan_width(values: dict[str, Any], hidden_key: str) -> None:
    """Set a scan's head width. Some families require that the heads' total width equals the expanded width."""
    for expand, heads, width in _SCAN_KEYS:
        if all(isinstance(values.get(name), int) for name in (expand, heads)) and width in values:
            inner_width = values[expand] * values[hidden_key]
            if isinstance(values.get("mamba_d_ssm"), int):
                values["mamba_d_ssm"] = inner_width
            values[width] = inner_width // values[heads]


def _limit(values: dict[str, Any], name: str, maximum: int) -> None:
    value = values.get(name)
    if isinstance(value, int) and not isinstance(value, bool):
        values[name] = min(value, maximum)
    elif isinstance(value, list) and all(isinstance(item, int) for item in value):
        values[name] = [min(item, maximum) for item in value]


def _limit_token(value: Any) -> Any:
    if isinstance(value, list):
        return [_limit_token(item) for item in value]
    return value if value < VOCAB_SIZE else 0


_NUM_DOCUMENTS, _MIN_WORDS, _MAX_WORDS = 80, 12, 100  # number of documents, and minimum and maximum words in each


@dataclass(frozen=True, slots=True)
class SmallModel:
    """Paths and facts about a small model, its tokenizer, and a text to train on.

    Attributes:
        folder: Folder of the model.
        text: JSON lines file with documents.
        family: ``model_type`` of the config.
    """

    folder: Path
    tokenizer: Path
    text: Path
    family: str
    num_layers: int
    num_parameters: int


def _default_config() -> PretrainedConfig:
    """Return the default config of small models, a small Llama."""
    from transformers import LlamaConfig

    return LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=NUM_HEADS * HEAD_DIM,
        intermediate_size=160,
        num_hidden_layers=4,
        num_attention_heads=NUM_HEADS,
        num_key_value_heads=2,
        max_position_embeddings=256,
    )


@contextmanager
def no_progress_bars() -> Iterator[None]:
    """Disable transformers' progress bars in the context."""
    from transformers.utils import logging

    was_enabled = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if was_enabled:
            logging.enable_progress_bar()


def write_small_model(
    config: PretrainedConfig | None, folder: Path, *, attn_implementation: str, seed: int
) -> SmallModel:
    """Write a scaled-down copy of a model, with random weights, a tokenizer and a text.

    Args:
        config: Config of the original model, or None for a small Llama.

    Raises:
        UnsupportedModelError: No small copy can be built and run.
    """
    config = config or _default_config()
    model = small_model(config, attn_implementation, seed)
    model.save_pretrained(folder / "model")
    tokenizer = _write_tokenizer(folder / "tokenizer")
    text = _write_text(folder / "text.jsonl", seed)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    num_layers = int(model.config.num_hidden_layers)
    return SmallModel(folder / "model", tokenizer, text, str(config.model_type), num_layers, num_parameters)


def _write_tokenizer(folder: Path) -> Path:
    """Write a tokenizer whose words are named after their token ids. The folder has no ``config.json``."""
    from tokenizers import Tokenizer, models, pre_tokenizers

    folder.mkdir()
    vocab = {"<unk>": 0, "<end>": 1, **{f"w{index}": index for index in range(2, VOCAB_SIZE)}}
    tokenizer = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.save(str(folder / "tokenizer.json"))
    values = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "<unk>", "eos_token": "<end>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(values), encoding="utf-8")
    return folder


def _write_text(path: Path, seed: int) -> Path:
    """Write documents of many different lengths, so that training packs, splits and pads them."""
    rng = random.Random(seed)
    with path.open("w", encoding="utf-8") as file:
        for _ in range(_NUM_DOCUMENTS):
            tokens = (f"w{rng.randrange(2, VOCAB_SIZE)}" for _ in range(rng.randint(_MIN_WORDS, _MAX_WORDS)))
            file.write(json.dumps({"text": " ".join(tokens)}) + "\n")
    return path
