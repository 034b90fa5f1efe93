"""Tests of the results of a step's device kernels. They need a CUDA device."""

from __future__ import annotations

import pytest
import torch

from megatrain.base.layout import build_layout, views_of_parts
from megatrain.engine.device import device_kernels
from megatrain.engine.head.cross_entropy import RunningSoftmax
from megatrain.engine.unit.weight_gradients import GradientAccumulator

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

WORDS, WIDTH = 3000, 1030


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("ignored", [None, 7])
@pytest.mark.parametrize("has_triton", [True, False])
def test_added_rows_are_bit_identical_to_host(
    dtype: torch.dtype, ignored: int | None, has_triton: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not has_triton:
        monkeypatch.setattr(device_kernels, "are_usable", lambda tensor: False)
        monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", False)
    generator = torch.Generator().manual_seed(3)
    indexes = (WORDS * torch.rand(5000, generator=generator).pow(4)).long()  # some words are repeated often
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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_row_lookup_is_bit_identical_to_host(dtype: torch.dtype) -> None:
    matrix = torch.randn(WORDS, WIDTH, generator=torch.Generator().manual_seed(3))
    indexes = torch.randint(0, WORDS, (5000,), generator=torch.Generator().manual_seed(4))
    found = torch.full((5000, WIDTH), torch.nan, dtype=dtype, device="cuda")
    for held in (range(1000), range(1000, WORDS)):
        rows = matrix[held.start : held.stop].to("cuda")
        device_kernels.copy_rows(found, held, rows, indexes.to("cuda"))
    assert torch.equal(found.cpu(), matrix[indexes].to(dtype))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("smoothing", "z_loss", "is_weighed"), [(0.0, 0.0, False), (0.1, 1e-3, False), (0.0, 0.0, True)]
)
def test_loss_and_gradient_of_parts_of_logits(
    dtype: torch.dtype, smoothing: float, z_loss: float, is_weighed: bool
) -> None:
    generator = torch.Generator().manual_seed(5)
    logits = (5 * torch.randn(70, 9001, generator=generator)).to(dtype)
    labels = torch.randint(0, 9001, (70,), generator=generator)
    weights = torch.linspace(-1, 2, 70, device="cuda")
    whole = logits.double().requires_grad_()
    losses = torch.nn.functional.cross_entropy(whole, labels, reduction="none", label_smoothing=smoothing)
    losses = losses + z_loss * whole.logsumexp(1).square()
    loss = losses.sum() / 64
    (expected,) = torch.autograd.grad((losses * weights.cpu()).sum() if is_weighed else loss, whole)

    def in_parts(rows: slice) -> tuple[torch.Tensor, torch.Tensor]:
        softmax = RunningSoftmax(labels[rows].to("cuda"), 9001, 64, smoothing, z_loss)
        parts = [(part.to("cuda"), start) for part, start in zip(logits[rows].split(4501, 1), (0, 4501), strict=True)]
        for part, start in parts:
            softmax.add(part, start)
        if is_weighed:
            softmax.weigh(weights[rows])
        return softmax.loss().cpu(), torch.cat([softmax.gradient(part, start) for part, start in parts], 1).cpu()

    found_loss, found = in_parts(slice(None))
    torch.testing.assert_close(found_loss.double(), loss.detach(), rtol=2e-6, atol=0)
    torch.testing.assert_close(found.double(), expected, rtol=2.0**-8 if dtype == torch.bfloat16 else 5e-5, atol=1e-8)
    assert torch.equal(found, torch.cat([in_parts(slice(33))[1], in_parts(slice(33, 70))[1]])), "a row has other bits"
