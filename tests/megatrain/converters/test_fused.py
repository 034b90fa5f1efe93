"""Parameters that fuse several matrices are found, with the sizes that the model's config implies."""

from __future__ import annotations

from typing import Any

import pytest

from megatrain.config.advice import _fused_warning
from megatrain.converters.fused import find_fused
from megatrain.converters.spec import build_graph
from megatrain.optim.fused import FusedMatrix
from megatrain.optim.table import OptimizerConfig
from oracles.families import tiny_config

LINEAR = {"linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 8, "linear_value_head_dim": 6}
FAMILIES: dict[str, tuple[dict[str, Any], dict[str, FusedMatrix]]] = {
    # 4 query heads and 2 key/value heads of size 8, and an MLP of width 48
    "phi3": (
        {},
        {"self_attn.qkv_proj.weight": FusedMatrix((32, 16, 16)), "mlp.gate_up_proj.weight": FusedMatrix((48, 48))},
    ),
    "gpt2": ({}, {"attn.c_attn.weight": FusedMatrix((32, 32, 32), divides_columns=True)}),
    "gpt_neox": ({}, {"attention.query_key_value.weight": FusedMatrix((8, 8, 8), 4)}),
    "mixtral": ({}, {"mlp.experts.gate_up_proj": FusedMatrix((48, 48))}),
    "gpt_oss": ({}, {"mlp.experts.gate_up_proj": FusedMatrix((1, 1), 48, divides_columns=True)}),
    "qwen3_next": (
        LINEAR,
        {
            "linear_attn.in_proj_qkvz.weight": FusedMatrix((8, 8, 12, 12), 2),
            "linear_attn.in_proj_ba.weight": FusedMatrix((2, 2), 2),
            "mlp.experts.gate_up_proj": FusedMatrix((24, 24)),
        },
    ),
    "qwen3_5_text": (LINEAR, {"linear_attn.in_proj_qkv.weight": FusedMatrix((16, 16, 24))}),
    "llama": ({}, {}),
}


@pytest.mark.parametrize("family", FAMILIES)
def test_fused_matrices_of_a_family(family: str) -> None:
    changes, expected = FAMILIES[family]
    graph = build_graph(tiny_config(family, **changes))
    found, unknown = find_fused(graph)
    assert not unknown
    by_end: dict[str, set[FusedMatrix]] = {}
    for name, fused in found.items():
        end = next((end for end in expected if name.endswith("." + end)), name)
        by_end.setdefault(end, set()).add(fused)
    assert by_end == {end: {fused} for end, fused in expected.items()}
    names = {entry.name for layout in graph.layouts.values() for entry in layout.entries}
    assert found.keys() <= names
    assert not [*_fused_warning(graph, OptimizerConfig(optim="muon"))]


def test_unknown_fused_layout_warning_suggests_muon_exclude() -> None:
    graph = build_graph(tiny_config("zamba2"))
    _, unknown = find_fused(graph)
    assert unknown and all(".in_proj." in name for name in unknown)
    (text,) = _fused_warning(graph, OptimizerConfig(optim="muon"))
    assert unknown[0] in text and 'optimizer.muon_exclude = ["*.in_proj*"]' in text
    assert not [*_fused_warning(graph, OptimizerConfig(optim="muon", muon_exclude=("*.in_proj*",)))]
