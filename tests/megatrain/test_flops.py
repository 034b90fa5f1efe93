"""A step's FLOPs match torch's count for the plain model and the rule 6 N T. Inexact traces give no count."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from megatrain.converters.spec import build_graph
from megatrain.engine.program.visit_trace import VisitTrace
from megatrain.trace.counting import StepFlops, count_flops, step_flops
from megatrain.trace.trace import trace_visits
from oracles.families import FAMILIES, VOCAB, tiny_config
from oracles.huggingface import build_model

ROWS, LENGTH = 2, 16
TOKENS = ROWS * LENGTH
MIXTURES = {"qwen3_moe", "qwen3_next", "mixtral", "gpt_oss", "deepseek_v3", "glm4_moe", "zaya"}


def trace_of(config: Any, **options: Any) -> VisitTrace:
    return trace_visits(build_graph(config, **options), ROWS, LENGTH, torch.float32)


def all_of(trace: VisitTrace) -> StepFlops:
    return step_flops(trace, num_positions=TOKENS, num_real_tokens=TOKENS, num_trained_tokens=TOKENS)


def counted(config: Any, freeze: tuple[str, ...] = ()) -> int:
    """Return torch's FLOP count for one forward and backward of the plain model."""
    model = build_model(config, freeze=freeze)
    ids = torch.randint(3, VOCAB, (ROWS, LENGTH))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, labels=ids, attention_mask=torch.ones_like(ids), use_cache=False).loss.backward()
    return int(counter.get_total_flops())


@pytest.mark.parametrize("family", sorted(set(FAMILIES) - MIXTURES))
def test_model_flops_are_torchs_count_of_the_plain_model(family: str) -> None:
    config = tiny_config(family, tied=False)
    config._attn_implementation = "eager"  # torch has no formula for the fused attention of the CPU
    trace = trace_of(config, attn_implementation="eager")
    flops = all_of(trace)
    # Products outside the layers are not counted. Some releases of transformers compute rotary tables with one.
    assert 0 <= counted(config) - flops.model <= 1e-4 * flops.model
    head = trace.head.flops
    left_out = sum(visit.unneeded_products.work.flops for visit in trace.visits)
    # A forward is a third of a forward and backward, or less if a Mamba layer consists of plain torch operations.
    assert 1.24 <= (flops.hardware + left_out - head) / (flops.model - head) <= 1.02 * 4 / 3


def test_frozen_layers_have_no_backward() -> None:
    freeze = ("model.embed_tokens.*", "model.layers.0.*")
    config = tiny_config("llama", tied=False)
    config._attn_implementation = "eager"
    trace = trace_of(config, attn_implementation="eager", freeze=freeze)
    flops = all_of(trace)
    assert flops.model == counted(config, freeze)
    again = sum(visit.forward.flops for visit in trace.visits if visit.has_backward and not visit.is_head)
    last = 2 * TOKENS * config.hidden_size * config.intermediate_size * (config.num_hidden_layers - 1)
    assert flops.hardware == flops.model + again - last


def test_model_flops_are_near_six_times_parameters_times_tokens() -> None:
    """Attention is small relative to the matrices, as in large models with short rows."""
    config = tiny_config(
        "llama", tied=False, hidden_size=256, intermediate_size=768, num_key_value_heads=4, head_dim=64
    )
    graph = build_graph(config)
    trace = trace_visits(graph, ROWS, LENGTH, torch.float32)
    embedding = graph.model.get_input_embeddings().weight.numel()
    rule = 6 * (graph.num_parameters - embedding) * TOKENS
    assert all_of(trace).model == pytest.approx(rule, rel=0.03)
    last = 2 * TOKENS * config.hidden_size * config.intermediate_size * config.num_hidden_layers
    assert all_of(trace).hardware == pytest.approx(rule * 4 / 3 - last, rel=0.04)


def test_fused_attention_is_counted_as_matrix_products_are() -> None:
    config = tiny_config("llama", tied=False)
    fused = all_of(trace_of(config, attn_implementation="sdpa")).model
    eager = all_of(trace_of(config, attn_implementation="eager")).model
    # The fused backward recomputes the scores: one product of [16, 8] x [8, 16] for 3 layers, 2 rows, 4 heads.
    assert fused - eager == 3 * 2 * 4 * (2 * 16 * 8 * 16)


def test_experts_count_for_the_tokens_they_see() -> None:
    base = {"num_hidden_layers": 1, "mlp_only_layers": []}
    two, three = (all_of(trace_of(tiny_config("qwen3_moe", num_experts_per_tok=k, **base))).model for k in (2, 3))
    assert three - two == 6 * TOKENS * (3 * 32 * 24)


def test_flops_depend_on_padding_and_labels() -> None:
    trace = trace_of(tiny_config("llama", tied=False))
    whole = all_of(trace)
    half = step_flops(trace, num_positions=TOKENS, num_real_tokens=TOKENS // 2, num_trained_tokens=TOKENS)
    assert half.hardware == whole.hardware
    assert half.model == trace.head.flops + (whole.model - trace.head.flops) / 2, "the same number of labels"
    unlabelled = step_flops(trace, num_positions=TOKENS, num_real_tokens=TOKENS, num_trained_tokens=0)
    assert whole.model - unlabelled.model == trace.head.flops == 6 * TOKENS * 32 * VOCAB
    several = step_flops(trace, num_positions=3 * TOKENS, num_real_tokens=3 * TOKENS, num_trained_tokens=3 * TOKENS)
    assert several == StepFlops(3 * whole.model, 3 * whole.hardware)


def test_inexact_trace_gives_no_flop_count() -> None:
    config = tiny_config("mixtral")
    config._experts_implementation = "eager"  # a loop over the experts that got tokens
    trace = trace_of(config)
    assert not trace.exact and all_of(trace) == StepFlops(0, 0)


def test_grouped_products() -> None:
    rows, matrices = torch.empty(10, 4), torch.empty(3, 4, 7)
    product = torch.ops.aten._grouped_mm.default
    assert count_flops(product, (rows, matrices), {}, None) == 2 * 10 * 4 * 7
    assert count_flops(product, (rows.t(), torch.empty(10, 7)), {}, None) == 2 * 10 * 4 * 7
    assert count_flops(product, (torch.empty(3, 5, 4), matrices), {}, None) == 2 * 3 * 5 * 4 * 7
    assert count_flops(torch.ops.aten.add.Tensor, (rows, rows), {}, rows) == 0
