"""The software device reuses freed memory like torch's allocator, and detects races on reused memory."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from fakes.gpu_run import virtual_gpu

SIZE = 1000
Change = Callable[[Tensor, Any, Any], None]


@pytest.fixture(autouse=True)
def _device() -> Iterator[None]:
    with virtual_gpu():
        yield


def read_on_side_stream(between: Change, behind: Change = lambda *_: None, size: int = SIZE) -> None:
    """Read a tensor of the current stream on a side stream, free it, and allocate memory on the current stream.

    Args:
        between: Action before the tensor is freed.
        behind: Action after the tensor is freed.
        size: Number of elements of the new allocation.
    """
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    tensor = torch.ones(SIZE, device="cuda")
    side.wait_stream(main)
    with torch.cuda.stream(side):
        product = tensor * 2
    between(tensor, main, side)
    del tensor
    behind(product, main, side)
    torch.empty(size, device="cuda").zero_()
    side.synchronize()
    assert product.cpu().eq(2).all()


def test_reusing_memory_read_by_another_stream_raises() -> None:
    with pytest.raises(AssertionError, match="while another has work queued on them"):
        read_on_side_stream(lambda *_: None)
    torch.cuda.synchronize()
    read_on_side_stream(lambda *_: None, size=2 * SIZE)  # does not fit into the freed memory


@pytest.mark.parametrize(
    "between",
    [
        lambda tensor, main, side: main.wait_stream(side),
        lambda tensor, main, side: tensor.record_stream(side),
        lambda tensor, main, side: side.synchronize(),
    ],
    ids=["stream", "recorded", "host"],
)
def test_memory_is_reused_after_waiting_for_its_readers(between: Change) -> None:
    read_on_side_stream(between)


def test_stream_that_waits_before_allocating_gets_the_memory() -> None:
    read_on_side_stream(lambda *_: None, lambda product, main, side: main.wait_stream(side))


def test_stream_waits_are_transitive() -> None:
    def wait_through_a_third_stream(tensor: Tensor, main: Any, side: Any) -> None:
        third = torch.cuda.Stream()
        third.wait_stream(side)
        main.wait_stream(third)

    read_on_side_stream(wait_through_a_third_stream)


def test_another_stream_waits_for_previous_users_of_memory() -> None:
    main, side = torch.cuda.current_stream(), torch.cuda.Stream()
    torch.ones(SIZE, device="cuda").mul_(2)
    reused = torch.empty(SIZE, device="cuda")
    with torch.cuda.stream(side), pytest.raises(AssertionError, match="for their previous owner"):
        reused.zero_()
    side.wait_stream(main)
    with torch.cuda.stream(side):
        reused.zero_()
    side.synchronize()
    assert reused.cpu().eq(0).all()
