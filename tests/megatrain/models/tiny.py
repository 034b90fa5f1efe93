"""Tiny random models of many families, with their skeletons on the meta device, layouts and weights."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from megatrain.base.layout import UnitLayout, views
from megatrain.converters import spec
from megatrain.models.converter import WeightSource

BASE: dict[str, Any] = {
    "vocab_size": 96,
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
DEEPSEEK = {
    "num_key_value_heads": 4,
    "q_lora_rank": 16,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 8,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "n_group": 1,
    "topk_group": 1,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}
QWEN3_MOE = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16, "mlp_only_layers": [1]}
GPT_OSS = {
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "sliding_window": 16,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}
GPT2 = {
    "vocab_size": 96,
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama_tied": ("llama", {**BASE, "tie_word_embeddings": True}),
    "llama": ("llama", {**BASE, "tie_word_embeddings": False}),
    "gpt2": ("gpt2", GPT2),
    "qwen3_moe": ("qwen3_moe", {**BASE, **QWEN3_MOE}),
    "mixtral": ("mixtral", {**BASE, "num_local_experts": 4}),
    "gpt_oss": ("gpt_oss", {**BASE, **GPT_OSS}),
    "deepseek_v3": ("deepseek_v3", {**BASE, **DEEPSEEK}),
    "llama4_text": (
        "llama4_text",
        {**BASE, "num_local_experts": 2, "intermediate_size_mlp": 48, "interleave_moe_layer_step": 2},
    ),
    "gemma3_text": ("gemma3_text", {**BASE, "sliding_window": 16}),
}


@dataclass
class Graph:
    """Skeleton and layouts of a model. Tests may reorder the layouts."""

    model: PreTrainedModel
    layouts: dict[str, UnitLayout]

    def plain_model(self) -> AbstractContextManager[None]:
        return nullcontext()

    def export_source(self, source: WeightSource) -> WeightSource:
        return source


def build_model(family: str, seed: int = 0) -> PreTrainedModel:
    """Return an fp32 model in memory, with random weights and random persistent buffers."""
    model_type, values = FAMILIES[family]
    return build_model_of(AutoConfig.for_model(model_type, **values), seed)


def build_model_of(config: Any, seed: int = 0) -> PreTrainedModel:
    """Return a model like ``build_model``, but for the given config."""
    model: PreTrainedModel = AutoModelForCausalLM.from_config(config).float()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.uniform_(-1, 1, generator=generator)
        persistent = set(model.state_dict())
        for name, buffer in model.named_buffers():
            if name in persistent and buffer.is_floating_point():
                buffer.uniform_(-1, 1, generator=generator)
    return model


def build_graph(config: Any) -> Graph:
    """Return the skeleton for ``config``, with all parameters on the meta device."""
    graph = spec.build_graph(config)
    return Graph(graph.model, dict(graph.layouts))


class Weights:
    """Flat fp32 blocks of a graph, as a store would hold them. They can be the source of an export."""

    def __init__(self, graph: Graph) -> None:
        self.graph = graph
        self.blocks = {name: torch.zeros(layout.num_elements) for name, layout in graph.layouts.items()}
        self.open_now: list[str] = []
        self.most_open = 0

    def fill(self, fill: Callable[[UnitLayout, Mapping[str, Tensor]], None]) -> None:
        for name, layout in self.graph.layouts.items():
            fill(layout, views(self.blocks[name], layout))

    def named(self) -> dict[str, Tensor]:
        return {
            name: view
            for layout in self.graph.layouts.values()
            for name, view in views(self.blocks[layout.name], layout).items()
        }

    @contextmanager
    def source(self, layout: UnitLayout) -> Iterator[Callable[[int, int], Tensor]]:
        self.open_now.append(layout.name)
        self.most_open = max(self.most_open, len(self.open_now))
        yield lambda start, stop: self.blocks[layout.name][start:stop]
        self.open_now.remove(layout.name)
