"""Use the tiered store without training code: run a network whose weights exceed the RAM tier.

Twelve layers of 256 KiB run in 2 MiB of RAM; layers that do not fit stay in files. At the end, the program commits the
weights and opens them again, as after a restart. Run ``python examples/python/embed_store.py``; it needs no other
files.
"""

from __future__ import annotations

import sys
import tempfile

import torch

import tiered

NUM_LAYERS, WIDTH = 12, 256


def tiers_in(directory: str) -> list[tiered.RamTier | tiered.NvmeTier]:
    """Return the two tiers that hold the weights, the faster one first."""
    return [tiered.RamTier(2 * tiered.MiB), tiered.NvmeTier([directory], 16 * tiered.MiB)]


def fill(store: tiered.TieredStore, weights: list[torch.Tensor]) -> None:
    """Copy the weights into the store. When RAM is full, the store writes back the least recently used block."""
    for i, weight in enumerate(weights):
        store.register(f"layers.{i}", weight.shape, weight.dtype, home="nvme")
        with store.acquire(f"layers.{i}", "ram", "w") as lease:
            lease.tensor.copy_(weight)


def forward(store: tiered.TieredStore, x: torch.Tensor) -> torch.Tensor:
    """Return the output of the network; fetch each layer while the previous one computes."""
    for i in range(NUM_LAYERS):
        if i + 1 < NUM_LAYERS:
            store.prefetch(f"layers.{i + 1}", "ram")
        with store.acquire(f"layers.{i}", "ram") as lease:
            x = torch.tanh(x @ lease.tensor)
    return x


def print_stats(stats: tiered.StoreStats) -> None:
    ram = stats.tiers["ram"]
    print(f"RAM: at most {tiered.format_size(ram.high_water_bytes)} of {tiered.format_size(ram.capacity_bytes)}")
    for name, link in stats.links.items():
        print(f"{name}: {tiered.format_size(link.num_bytes)} by {link.path}")
    print(f"prefetched: {stats.prefetch_on_time} on time, {stats.prefetch_late} late, {stats.prefetch_wasted} wasted")


def run(directory: str) -> bool:
    """Run the network in memory, and through the store before and after reopening; return whether all outputs agree."""
    generator = torch.Generator().manual_seed(0)
    weights = [torch.randn(WIDTH, WIDTH, generator=generator) / WIDTH**0.5 for _ in range(NUM_LAYERS)]
    x = torch.randn(8, WIDTH, generator=generator)
    expected = x
    for weight in weights:
        expected = torch.tanh(expected @ weight)

    with tiered.TieredStore(tiers_in(directory)) as store:
        fill(store, weights)
        is_equal = torch.equal(forward(store, x), expected)
        print_stats(store.stats())
        commit = store.commit({"num_layers": NUM_LAYERS})
        commit.wait()
        nbytes = sum(spec.nbytes for spec in store.blocks())
        print(f"committed generation {commit.generation}: {tiered.format_size(nbytes)} of weights")

    with tiered.TieredStore.open(directory, tiers_in(directory)) as store:
        is_equal_again = torch.equal(forward(store, x), expected)
    print(f"same output as in memory: {is_equal}; after reopening: {is_equal_again}")
    return is_equal and is_equal_again


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as temporary:
        sys.exit(0 if run(temporary) else 1)
