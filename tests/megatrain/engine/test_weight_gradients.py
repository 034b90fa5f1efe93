"""Weight gradients that are added directly into their blocks: the sums, the memory, and the cases left to autograd."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from fakes.gpu_run import virtual_gpu
from megatrain.base.layout import Piece, SplitTensor, build_layout, views_of_parts
from megatrain.engine.unit import weight_gradients
from megatrain.engine.unit.weight_gradients import GradientAccumulator, GradientReceiver, GradientTarget, weight_leaf

M, K, N = 7, 5, 6


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def accumulator(shape: tuple[int, ...], device: str = "cpu") -> tuple[GradientAccumulator, Tensor]:
    """Return an accumulator for one parameter without a gradient, and its memory, which is filled with NaN."""
    target = torch.full(shape, torch.nan, device=device)
    return GradientAccumulator({"w": target}, set()), target


def test_first_product_overwrites_and_later_ones_accumulate() -> None:
    sink, target = accumulator((M, N))
    products = [(random(M, K, seed=n), random(K, N, seed=10 + n)) for n in range(3)]
    for left, right in products:
        sink.add_product("w", left, right)
    torch.testing.assert_close(target, sum(left @ right for left, right in products))


def test_products_of_row_ranges_sum_to_the_whole() -> None:
    sink, target = accumulator((M, N))
    left, right = random(M, K), random(K, N)
    for _ in range(2):
        sink.add_product("w", left[3:], right, 3)
        sink.add_product("w", left[:3], right, 0)
    torch.testing.assert_close(target, 2 * left @ right)


def test_product_within_one_block_touches_only_that_block(monkeypatch: pytest.MonkeyPatch) -> None:
    """The head's weight has one block per part of the vocabulary, and each part has its own products."""
    left, right = random(2, K), random(K, N)
    blocks = [torch.zeros(2 * N) for _ in range(3)]
    pieces = [(Piece(n, 0, range(2 * n, 2 * n + 2), None, (2, N)), block) for n, block in enumerate(blocks)]
    looked_at: list[int] = []
    view = Tensor.view
    monkeypatch.setattr(Tensor, "view", lambda place, *shape: looked_at.append(place.data_ptr()) or view(place, *shape))
    GradientAccumulator({"w": SplitTensor(pieces)}, {"w"}).add_product("w", left, right, 2)
    monkeypatch.undo()
    assert looked_at == [blocks[1].data_ptr()]
    torch.testing.assert_close(blocks[1].view(2, N), left @ right)
    assert not blocks[0].any() and not blocks[2].any()


def test_half_precision_products_are_summed_in_fp32_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    left, right = random(M, K, dtype=torch.bfloat16), random(K, N, dtype=torch.bfloat16)
    whole, target = accumulator((M, N))
    for _ in range(3):
        whole.add_product("w", left, right)
    monkeypatch.setattr(weight_gradients, "_TEMPORARY_NBYTES", 2 * N * 2)  # two rows
    ranges, same = accumulator((M, N))
    for _ in range(3):
        ranges.add_product("w", left, right)
    assert torch.equal(target, same)
    assert torch.equal(target, (left @ right).float() * 3)


def test_device_gemm_accumulates_half_precision_in_fp32() -> None:
    left, right = random(M, 64, dtype=torch.bfloat16), random(64, N, dtype=torch.bfloat16)
    with virtual_gpu():
        sink, target = accumulator((M, N), "cuda")
        for _ in range(2):
            sink.add_product("w", left.to("cuda"), right.to("cuda"))
        found = target.cpu()
    expected = 2 * left.double() @ right.double()
    assert (found - expected).abs().max() < 1e-5 * expected.abs().max()  # no sum was rounded to bf16
    assert ((2 * left @ right).double() - expected).abs().max() > 1e-4 * expected.abs().max()


def test_embedding_gradients_accumulate_at_token_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_gradients, "_TEMPORARY_NBYTES", 4 * N * 3)  # three rows at a time
    sink, target = accumulator((M, N))
    indexes = torch.tensor([1, 4, 1, 0, 1, 6, 4])
    rows = random(7, N, dtype=torch.bfloat16)
    sink.add_rows("w", indexes, rows, 0)
    expected = torch.zeros(M, N)
    for index, row in zip(indexes.tolist(), rows, strict=True):
        if index:
            expected[index] += row.float()
    assert torch.equal(target, expected)
    sink.add_rows("w", indexes, rows)
    assert torch.equal(target[0], rows[3].float())


@pytest.mark.parametrize("borders", [(), (6,), (12, 24), (4, 17, 30, 41), (1, 2, 3)])
def test_matrix_split_over_blocks_has_the_whole_gradient(borders: tuple[int, ...]) -> None:
    """Blocks end between rows or within rows. In one case, several blocks end within the same row."""
    layout = build_layout("unit", [("w", torch.Size((M, N)))], True)
    ends = [0, *borders, layout.num_elements]
    parts = [range(start, stop) for start, stop in itertools.pairwise(ends)]
    blocks = [torch.full((len(part),), torch.nan) for part in parts]
    sink = GradientAccumulator(views_of_parts(blocks, parts, layout), set())
    left, right, rows = random(M, K), random(K, N), random(4, N, seed=3)
    indexes = torch.tensor([6, 0, 3, 6])
    sink.add_product("w", left, right)
    sink.add_product("w", left[2:5], right, 2)
    sink.add_rows("w", indexes, rows, 3)
    expected = left @ right
    expected[2:5] += left[2:5] @ right
    expected.index_add_(0, indexes, rows * (indexes != 3).unsqueeze(1))
    torch.testing.assert_close(torch.cat(blocks)[: M * N].view(M, N), expected)


class Layer(nn.Module):
    """Layer that uses matrices directly, transposed, twice, in an in-place sum, and for a lookup."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a, self.b = nn.Linear(6, 6), nn.Linear(6, 6, bias=False)
        self.table = nn.Embedding(9, 6, padding_idx=-2)
        self.conv = nn.Parameter(torch.randn(6, 6))
        self.bias = nn.Parameter(torch.randn(6))

    def forward(self, x: Tensor, ids: Tensor) -> Tensor:
        h = self.a(x + self.table(ids))
        h += self.a(x)  # in place, as real models do
        h = torch.addmm(self.bias, h.view(-1, 6), self.conv).view(h.shape)
        h = functional.linear(h, self.b.weight.t()) + self.b(h)
        return functional.linear(h, self.table.weight)


@pytest.mark.parametrize("trains_input", [True, False])
def test_gradients_match_autograd(trains_input: bool) -> None:
    layer = Layer()
    ids = torch.tensor([[1, 7, 3], [3, 0, 7]])
    x = random(2, 3, 6).requires_grad_(trains_input)
    named = dict(layer.named_parameters())
    wanted = [x] if trains_input else []
    expected = torch.autograd.grad(layer(x, ids).square().sum(), [*wanted, *named.values()])
    receiver, added = GradientReceiver(), set[str]()
    sums = {name: torch.full(weight.shape, torch.nan) for name, weight in named.items()}
    sink = GradientAccumulator(sums, added)
    leaves: dict[str, Any] = {name: weight.detach().requires_grad_() for name, weight in named.items()}
    for name, weight in named.items():
        if weight.dim() == 2:
            leaves[name] = weight_leaf(weight, GradientTarget(receiver, name))
        path, _, own = name.rpartition(".")
        layer.get_submodule(path)._parameters[own] = leaves[name]
    out = layer(x, ids).square().sum()
    with pytest.raises(AssertionError, match="outside of the backward of its unit"):
        torch.autograd.grad(out, list(leaves.values()), allow_unused=True, retain_graph=True)
    with receiver.use_sink(sink):
        found = torch.autograd.grad(out, [*wanted, *leaves.values()], allow_unused=True)
    given = dict(zip(leaves, found[len(wanted) :], strict=True))
    assert [name for name, gradient in given.items() if gradient is not None] == ["bias", "a.bias", "b.weight"]
    for name, gradient in given.items():
        if gradient is not None:
            sink.add(name, gradient)
    assert added == set(named)
    if trains_input:
        torch.testing.assert_close(found[0], expected[0])
    for name, gradient in zip(named, expected[len(wanted) :], strict=True):
        torch.testing.assert_close(sums[name], gradient, msg=name)
