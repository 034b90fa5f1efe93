"""Updates on the device are bit-identical to updates by the host's kernel. The tests need a CUDA device."""

from __future__ import annotations

import pytest
import torch

from megatrain.optim import on_device
from megatrain.optim.average import WeightAverage
from megatrain.optim.base import Optimizer, Segment, Update
from megatrain.optim.clip import squared_norm
from megatrain.optim.on_device import TritonOptimizer, device_squared_norm
from oracles.blocks import GRAD_SCALES, HOSTS, PALETTES, SHAPES, differing_blocks

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]

FORMATS = [(split, dtype) for split in (False, True) for dtype in (torch.float32, torch.bfloat16)]
LARGE = (3_000_017, (1 << 20, 2_000_001))


@pytest.mark.parametrize("split_master", [False, True])
def test_weight_average_is_bit_identical_to_host(split_master: bool) -> None:
    host = WeightAverage(HOSTS["adamw"], 0.999)
    made = on_device.device_optimizer(host, torch.device("cuda"))
    for size, cuts in (*SHAPES, LARGE):
        differing = differing_blocks(
            host,
            made,
            "cuda",
            size=size,
            cuts=cuts,
            split_master=split_master,
            grad_dtype=torch.float32,
            palette="normal",
            grad_scale=0.37,
        )
        assert differing == [], size


@pytest.mark.parametrize("name", HOSTS)
@pytest.mark.parametrize("palette", PALETTES)
@pytest.mark.parametrize(("split_master", "grad_dtype"), FORMATS)
@pytest.mark.parametrize(("size", "cuts"), [*SHAPES, LARGE])
def test_device_update_is_bit_identical_to_host(
    size: int, cuts: tuple[int, ...], split_master: bool, grad_dtype: torch.dtype, palette: str, name: str
) -> None:
    for grad_scale in GRAD_SCALES:
        differing = differing_blocks(
            HOSTS[name],
            TritonOptimizer(HOSTS[name]),
            "cuda",
            size=size,
            cuts=cuts,
            split_master=split_master,
            grad_dtype=grad_dtype,
            palette=palette,
            grad_scale=grad_scale,
        )
        assert differing == [], grad_scale


def test_split_masters_keep_all_bits_in_a_null_update() -> None:
    """An update with a learning rate of 0 leaves masters bit-identical.

    All high halves except NaN are tested with six low halves.
    """
    optimizer, lows = TritonOptimizer(HOSTS["adamw"]), (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF)
    for low in lows:
        bits = (torch.arange(1 << 16, dtype=torch.int64, device="cuda") << 16) + low
        master = bits.to(torch.int32).view(torch.float32)
        blocks = {
            "weight": ((bits + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16),
            "low": bits.to(torch.int16),
            "m": torch.zeros_like(master),
            "v": torch.zeros_like(master),
        }
        before = {name: block.clone() for name, block in blocks.items()}
        optimizer.update(blocks, torch.zeros_like(master), [Segment(0, 1 << 16, 0.1)], Update(step=1, lr=0.0))
        finite = ~master.isnan()
        for name in ("weight", "low"):
            left, right = blocks[name].view(torch.int16), before[name].view(torch.int16)
            assert torch.equal(left[finite], right[finite]), (name, low)


@pytest.mark.parametrize("name", HOSTS)
def test_warm_up_compiles_every_variant(name: str) -> None:
    optimizer = TritonOptimizer(HOSTS[name])
    assert isinstance(optimizer, Optimizer)
    optimizer.warm_up()
    torch.cuda.synchronize()


def test_work_is_queued_on_the_current_stream() -> None:
    stream = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    size = 1 << 20
    blocks = {name: torch.zeros(size, device="cuda") for name in ("weight", "m", "v")}
    gradient = torch.zeros(size, device="cuda")
    optimizer = TritonOptimizer(HOSTS["adamw"])
    optimizer.warm_up()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(100_000_000)  # type: ignore[no-untyped-call]
        gradient.fill_(1.0)
        optimizer.update(blocks, gradient, [Segment(0, size, 0.0)], Update(step=1, lr=1.0))
    stream.synchronize()
    assert float(blocks["weight"].max()) < -0.99, "the kernel read the gradient before it was written"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [1, 65, 65_536, 3_000_017])
def test_norms_match_host_bits(size: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(4)
    gradient = torch.randn(size, generator=generator).mul_(torch.rand(size, generator=generator).pow(20)).to(dtype)
    assert float(device_squared_norm(gradient.to("cuda"))) == squared_norm(gradient)
    without_triton = on_device._partials_in_torch(gradient.to("cuda"), 65_536, 64)
    assert torch.equal(without_triton, on_device.device_partials(gradient.to("cuda")))
