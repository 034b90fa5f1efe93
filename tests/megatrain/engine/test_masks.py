"""Rows that are one document each need no mask; the trace of a step knows that if it is told."""

from __future__ import annotations

import pytest
import torch

from megatrain.engine.trace import trace_visits
from megatrain.models.graph import build_graph
from reference.families import tiny_config


@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_without_masks_memory_is_linear_in_the_length_of_a_row(family: str) -> None:
    """In layers that attend to all that is before; a window takes a mask whatever the rows are."""

    def most(length: int, *, padded: bool) -> int:
        graph = build_graph(tiny_config(family), attn_implementation="sdpa", dtype=torch.float32)
        trace = trace_visits(graph, 1, length, torch.float32, padded=padded)
        return max(visit.held_nbytes for visit in trace.visits)

    assert most(8192, padded=False) < 2.5 * most(4096, padded=False)
    assert most(8192, padded=True) > 3.5 * most(4096, padded=True)
    assert most(8192, padded=False) < 8192 * 8192 < most(8192, padded=True)
