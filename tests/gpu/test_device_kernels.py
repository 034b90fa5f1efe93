"""Needs a CUDA device: what a step's own kernels compute there."""

from __future__ import annotations

import pytest
import torch

from megatrain.engine import device_kernels
from megatrain.engine.weight_gradients import GradientAccumulator
from megatrain.models.layout import build_layout, views_of_parts

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

WORDS, WIDTH = 3000, 1030


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("ignored", [None, 7])
@pytest.mark.parametrize("has_triton", [True, False])
def test_rows_are_added_with_the_host_s_bits(
    dtype: torch.dtype, ignored: int | None, has_triton: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_triton:
        monkeypatch.setattr(device_kernels, "are_for", lambda tensor: False)
        monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    generator = torch.Generator().manual_seed(3)
    indexes = (WORDS * torch.rand(5000, generator=generator).pow(4)).long()  # some words again and again
    rows = torch.randn(5000, WIDTH, generator=generator).to(dtype)
    layout = build_layout("unit", [("w", torch.Size((WORDS, WIDTH)))], True)
    parts = [range(1_000_000), range(1_000_000, 2_000_003), range(2_000_003, layout.num_elements)]
    sums: list[torch.Tensor] = []
    torch.use_deterministic_algorithms(not has_triton)
    try:
        for device in ("cpu", "cuda"):
            blocks = [torch.full((len(part),), torch.nan, device=device) for part in parts]
            sink = GradientAccumulator(views_of_parts(blocks, parts, layout), set())
            for _ in range(2):
                sink.add_rows("w", indexes.to(device), rows.to(device), ignored)
            sums.append(torch.cat(blocks)[: WORDS * WIDTH].cpu())
    finally:
        torch.use_deterministic_algorithms(False)
    assert torch.equal(*sums)
