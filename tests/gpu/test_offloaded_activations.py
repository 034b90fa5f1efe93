"""``offload_activations`` on a GPU with several streams: no stream gets memory that another stream still uses."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor

import megatrain
from fakes.virtual_cuda import VirtualCuda
from fakes.virtual_embed import offloading
from tiered import MiB, RamTier, TieredStore


@pytest.fixture(autouse=True)
def _offloading(virtual: VirtualCuda | None) -> Iterator[None]:
    with nullcontext() if virtual is None else offloading(virtual):
        yield


def test_each_unpacking_stream_has_separate_memory() -> None:
    numbers = torch.linspace(-1, 1, 4096)
    with TieredStore([RamTier(MiB)]) as store:
        source = numbers.to("cuda").requires_grad_()
        offloaded = megatrain.offload_activations(store, tier="ram", min_bytes=1)
        with offloaded:
            result = (source * 2).exp()
            squared = result.square()
        node: Any = squared.grad_fn
        del result
        assert offloaded.stats().offloaded_bytes == numbers.nbytes
        streams = [torch.cuda.Stream(), torch.cuda.Stream()]
        found: list[Tensor] = []
        products = []
        for stream in streams:
            with torch.cuda.stream(stream):
                found.append(node._saved_self)
                products.append(found[-1] * 3)
        found.clear()
        for stream in streams:  # reuses the memory that this stream freed
            with torch.cuda.stream(stream):
                torch.empty_like(source).zero_()
        torch.cuda.synchronize()
        for product in products:
            assert torch.equal(product.cpu(), (numbers * 2).exp() * 3)
        assert offloaded.stats().restored_bytes == 2 * numbers.nbytes
        squared.sum().backward()
        torch.cuda.synchronize()
        expected = numbers.clone().requires_grad_()
        (expected * 2).exp().square().sum().backward()
        assert source.grad is not None and expected.grad is not None
        torch.testing.assert_close(source.grad.cpu(), expected.grad)
