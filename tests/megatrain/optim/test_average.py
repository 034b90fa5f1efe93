"""The average of the weights matches torch's AveragedModel, and does not change the training."""

from __future__ import annotations

import torch
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from megatrain.base.precision import decode, encode
from megatrain.optim.average import WeightAverage
from megatrain.optim.base import Segment, Update, bytes_per_parameter
from megatrain.optim.elementwise import AdamW
from megatrain.optim.threads import KernelThreads

SIZE, STEPS = 200_000, 6


def test_average_matches_torch_and_changes_nothing_else() -> None:
    alone = AdamW(threads=KernelThreads(1))
    optimizer = WeightAverage(AdamW(threads=KernelThreads(2)), 0.9)
    assert bytes_per_parameter(optimizer.state_kinds(True)) == 16
    generator = torch.Generator().manual_seed(3)
    master = torch.randn(SIZE, generator=generator)
    blocks = {"m": torch.zeros(SIZE), "v": torch.zeros(SIZE), "ema": master.clone()}
    blocks |= {"weight": torch.empty(SIZE, dtype=torch.bfloat16), "low": torch.empty(SIZE, dtype=torch.int16)}
    encode(master, blocks["weight"], blocks["low"])
    without = {name: block.clone() for name, block in blocks.items() if name != "ema"}
    module = torch.nn.ParameterList([master.clone()])
    oracle = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    oracle.update_parameters(module)  # the first call copies the weights
    segments = [Segment(0, 70_000, 0.1), Segment(70_000, SIZE - 8, 0.0)]
    for step in range(1, STEPS + 1):
        gradient, update = torch.randn(SIZE, generator=generator), Update(step, 1e-2)
        optimizer.update(blocks, gradient, segments, update)
        alone.update(without, gradient, segments, update)
        decode(blocks["weight"], blocks["low"], master)
        with torch.no_grad():
            module[0].copy_(master)
        oracle.update_parameters(module)
    assert all(torch.equal(blocks[name], block) for name, block in without.items())
    # torch fuses the product with the sum: the last bit may differ.
    torch.testing.assert_close(blocks["ema"], oracle.module[0].detach(), rtol=1e-6, atol=1e-7)
    assert (blocks["ema"] - master).abs().max() > 0.01
