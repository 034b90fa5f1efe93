"""Memory traffic of other packages' kernels is counted from their source, without launching them. Needs Triton."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from megatrain.engine.device.work import NO_WORK, Work
from megatrain.engine.unit.unneeded import ProductUses
from megatrain.trace.counting import count_flops
from megatrain.trace.kernel_work import count_accesses, count_kernel_launches, has_products

triton = pytest.importorskip("triton")
ROWS, WIDTH = 48, 640


def kernel(out_ptr: Any, sums_ptr: Any, left_ptr: Any, right_ptr: Any, kept_ptr: Any, stride: Any, SIZE: Any) -> None:
    tl = triton.language
    row = tl.program_id(0) * stride
    left_ptr += row
    place = kept_ptr + row
    left = tl.load(left_ptr + tl.arange(0, SIZE))
    right = tl.load(right_ptr + row)
    kept = tl.load(place) + left
    tl.store(place, kept)
    tl.store(out_ptr + row, left + right)
    tl.atomic_add(sums_ptr, left)


def test_kernel_accesses_are_found_in_the_source() -> None:
    found = count_accesses(kernel)
    pointers = {name: times for name, times in found.items() if name.endswith("_ptr")}
    assert pointers == {"out_ptr": 1, "sums_ptr": 2, "left_ptr": 1, "right_ptr": 1, "kept_ptr": 2}
    assert count_accesses(eval("lambda a, b: a")) == {}  # its source is not available


def product(out_ptr: Any, left_ptr: Any, right_ptr: Any) -> None:
    tl = triton.language
    tl.store(out_ptr, tl.dot(tl.load(left_ptr), tl.load(right_ptr)))


def test_uncounted_kernel_products_are_reported() -> None:
    assert has_products(product) and not has_products(kernel)
    said: list[str] = []
    with FakeTensorMode(), count_kernel_launches(lambda work, uncounted, tensors: said.append(uncounted)):
        triton.jit(product)[(1,)](*(torch.empty(16, 16) for _ in range(3)))
    assert said == ["kernel product: its products are not counted"]


def counted(run: Callable[[], Any]) -> Work:
    """Return the work of the kernels that a call launches."""
    found = [NO_WORK]

    def book(work: Work, uncounted: str, tensors: Sequence[Tensor]) -> None:
        found[0] += work
        assert uncounted == "" and tensors

    with count_kernel_launches(book):
        run()
    return found[0]


def test_a_launch_is_counted_and_does_not_take_place() -> None:
    compiled = triton.jit(kernel)
    with FakeTensorMode():
        tensors = [torch.empty(ROWS, WIDTH, dtype=torch.bfloat16) for _ in range(5)]
        work = counted(lambda: compiled[(ROWS,)](*tensors, WIDTH, SIZE=1024, num_warps=4))
    assert work == Work(moved_nbytes=7 * ROWS * WIDTH * 2, launches=1)


def test_kernels_on_real_tensors_are_launched() -> None:
    launched: list[Any] = []

    class Kernel(triton.runtime.jit.KernelInterface):  # type: ignore[misc, name-defined]
        def run(self, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> None:
            launched.append(args)

    tensor = torch.zeros(3)
    assert counted(lambda: Kernel()[(1,)](tensor)) == NO_WORK
    assert launched == [(tensor,)]


def backward(result: Tensor) -> None:
    result.backward(torch.ones_like(result))


def test_kernels_of_liger() -> None:
    """A norm moves two arrays and its backward three. A gated product moves three arrays and its backward five."""
    pytest.importorskip("liger_kernel")
    from liger_kernel.ops.rms_norm import LigerRMSNormFunction
    from liger_kernel.ops.swiglu import LigerSiLUMulFunction

    size = ROWS * WIDTH * 2
    with FakeTensorMode():
        rows = torch.empty(ROWS, WIDTH, dtype=torch.bfloat16, requires_grad=True)
        weight = torch.empty(WIDTH, dtype=torch.bfloat16, requires_grad=True)
        results: list[Tensor] = []
        work = counted(lambda: results.append(LigerRMSNormFunction.apply(rows, weight, 1e-6, 0.0, "llama", True)))
        beside = WIDTH * 2 + ROWS * 4  # the weight, and one fp32 number for each row
        assert work == Work(moved_nbytes=2 * size + beside, launches=1)
        work = counted(lambda: backward(results[0]))
        assert work == Work(moved_nbytes=3 * size + beside + WIDTH * 4, launches=1)
        gate, up = (torch.empty(ROWS, WIDTH, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
        work = counted(lambda: results.append(LigerSiLUMulFunction.apply(gate, up)))
        assert work == Work(moved_nbytes=3 * size, launches=1)
        assert counted(lambda: backward(results[1])) == Work(moved_nbytes=5 * size, launches=1)


def copied(out_ptr: Any, rows_ptr: Any) -> None:
    triton.language.store(out_ptr, triton.language.load(rows_ptr))


def unneeded_products(*, reports_launches: bool) -> set[str]:
    """Return the weights of unneeded products in a unit that is like a first layer with adapters only in its MLP.

    In such a layer, autograd saves the norm's output, but not its input.

    Args:
        reports_launches: Whether kernel launches are reported to the record of uses.
    """
    weight, adapter = torch.randn(WIDTH, WIDTH), torch.randn(WIDTH, WIDTH, requires_grad=True)
    uses = ProductUses({id(weight): "weight"}, count_flops)

    def pack(tensor: Tensor) -> Tensor:
        uses.record_saved(tensor)
        return tensor

    def run(rows: Tensor) -> Tensor:
        stream = rows + functional.linear(rows, weight)
        normed = torch.empty_like(stream)
        triton.jit(copied)[(ROWS,)](normed, stream)
        return stream + functional.linear(normed, adapter)

    def book(work: Work, uncounted: str, tensors: Sequence[Tensor]) -> None:
        if reports_launches:
            uses.record_launch(tensors)

    hooks = torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor)
    with FakeTensorMode(allow_non_fake_inputs=True), count_kernel_launches(book), hooks, uses.track():
        result = run(torch.empty(ROWS, WIDTH))
    return set(uses.find_unneeded([result]).weights)


def test_products_read_by_a_needed_kernel_are_needed() -> None:
    assert unneeded_products(reports_launches=True) == set()
    assert unneeded_products(reports_launches=False) == {"weight"}, "skipped if the launch is not reported"
