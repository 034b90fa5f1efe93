"""Updates on a device beside the same updates by the host's kernel, bit by bit."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch

from megatrain.optim.base import Optimizer, Update
from megatrain.optim.elementwise import SGD, AdamW, AdamWConfig, ElementwiseOptimizer, Lion, LionConfig, SGDConfig
from megatrain.optim.threads import KernelThreads
from reference.blocks import cut_segments, gradient_block, master_blocks, master_of, random_array, same_bits

HOSTS: dict[str, ElementwiseOptimizer] = {
    "adamw": AdamW(AdamWConfig(lr=1e-3, weight_decay=0.1), KernelThreads(1)),
    "lion": Lion(LionConfig(lr=1e-3, weight_decay=0.1), KernelThreads(1)),
    "sgd": SGD(SGDConfig(weight_decay=0.1), KernelThreads(1)),
    "sgd, nesterov": SGD(SGDConfig(nesterov=True, weight_decay=0.1), KernelThreads(1)),
    "sgd without momentum": SGD(SGDConfig(momentum=0.0, weight_decay=0.1), KernelThreads(1)),
}
#: (elements, where segments meet): one program and many, ends inside one, starts that no vector load is aligned to.
SHAPES: tuple[tuple[int, tuple[int, ...]], ...] = (
    (1, ()),
    (15, (7,)),
    (1024, ()),
    (5003, (16, 1040, 1041, 3000)),
)
GRAD_SCALES = (1.0, 0.37, 1e-30)


def differing_blocks(
    host: ElementwiseOptimizer,
    on_device: Optimizer,
    device: str,
    *,
    size: int,
    cuts: Sequence[int],
    split_master: bool,
    grad_dtype: torch.dtype,
    palette: str,
    grad_scale: float,
) -> list[str]:
    """Make three updates on the device and by the host; return the names of blocks that end with other bits."""
    generator = np.random.default_rng(size)
    blocks = master_blocks(random_array(generator, size, palette), split_master)
    for kind in host.state:
        state = random_array(generator, size, palette)
        blocks[kind.name] = torch.from_numpy(np.abs(state) if kind.name == "v" else state)
    copies = {name: block.to(device, copy=True) for name, block in blocks.items()}
    for step in (1, 2, 1000):
        gradient, _ = gradient_block(random_array(generator, size, palette), grad_dtype)
        update = Update(step=step, lr=1e-3, grad_scale=grad_scale)
        segments = cut_segments(cuts, size)
        host.update(blocks, gradient, segments, update)
        with np.errstate(all="ignore"):  # where the device is an interpreter on numpy
            on_device.update(copies, gradient.to(device), segments, update)
    results = {name: copy.cpu() for name, copy in copies.items()}
    states = [kind.name for kind in host.state]
    differing = [name for name in states if not same_bits(blocks[name].numpy(), results[name].numpy())]
    return differing if same_bits(master_of(blocks), master_of(results)) else ["master", *differing]
