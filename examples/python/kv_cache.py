"""Generate with a KV cache that exceeds RAM: a small decoder has 512 KiB of keys and values, and 128 KiB of RAM.

Blocks that do not fit are in files. They are fetched one at a time, while the previous block is in use. Logits and
tokens match those with a cache in memory, bit for bit.
Run ``python examples/python/kv_cache.py``.
"""

import tempfile
from collections.abc import Callable, Iterator

import torch
from torch import Tensor

import tiered

LAYERS, HEADS, DIM, BLOCK, TOKENS = 4, 4, 32, 16, 128
SHAPE = (2, HEADS, BLOCK, DIM)  # a block: keys and values of 16 tokens in one layer, 16 KiB


def in_store(store: tiered.TieredStore, layer: int, position: int, new: Tensor) -> Iterator[Tensor]:
    """Add the keys and values of one token to the cache of a layer, and yield this cache block by block."""
    last, row = divmod(position, BLOCK)
    if row == 0:
        store.register(f"layer.{layer}/{last}", SHAPE, torch.float32, home="nvme")
    with store.acquire(f"layer.{layer}/{last}", "ram", "rw" if row else "w") as lease:
        lease.tensor[:, :, row] = new
    for number in range(last + 1):
        store.prefetch(f"layer.{layer}/{min(number + 1, last)}", "ram")
        with store.acquire(f"layer.{layer}/{number}", "ram") as lease:
            yield lease.tensor[:, :, : position + 1 - number * BLOCK]


def in_memory(blocks: dict[tuple[int, int], Tensor], layer: int, position: int, new: Tensor) -> Iterator[Tensor]:
    """Do the same as ``in_store``, with tensors in a dict."""
    blocks.setdefault((layer, position // BLOCK), torch.empty(SHAPE))[:, :, position % BLOCK] = new
    return (blocks[layer, start // BLOCK][:, :, : position + 1 - start] for start in range(0, position + 1, BLOCK))


def attend(query: Tensor, cache: Iterator[Tensor]) -> Tensor:
    """Return the attention output of one token over the whole cache, computed block by block."""
    top, total, mixed = torch.full((HEADS, 1, 1), -torch.inf), torch.zeros(HEADS, 1, 1), torch.zeros(HEADS, 1, DIM)
    for keys, values in cache:
        scores = query @ keys.transpose(1, 2) / DIM**0.5
        new_top = torch.maximum(top, scores.amax(-1, keepdim=True))
        scale, share = torch.exp(top - new_top), torch.exp(scores - new_top)
        top, total, mixed = new_top, total * scale + share.sum(-1, keepdim=True), mixed * scale + share @ values
    return mixed / total


def generate(cache: Callable[[int, int, Tensor], Iterator[Tensor]]) -> Tensor:
    """Generate tokens greedily, and return the logits of every token."""
    random, width = torch.Generator().manual_seed(0), HEADS * DIM
    embedding, head = torch.randn(2, 500, width, generator=random)
    layers = torch.randn(LAYERS, 4, width, width, generator=random) / width**0.5
    logits = [head @ embedding[0]]
    for position in range(TOKENS):
        x = embedding[logits[-1].argmax()]
        for layer, weights in enumerate(layers):
            query, *new = (torch.nn.functional.rms_norm(x, (width,)) @ weights[:3]).view(3, HEADS, 1, DIM)
            x = x + attend(query, cache(layer, position, torch.stack(new).squeeze(2))).view(-1) @ weights[3]
        logits.append(head @ x)
    return torch.stack(logits)


if __name__ == "__main__":
    ram = tiered.RamTier(128 * tiered.KiB)
    with tempfile.TemporaryDirectory() as path, tiered.TieredStore([ram, tiered.NvmeTier([path], tiered.MiB)]) as store:
        logits, cache = generate(lambda *new: in_store(store, *new)), store.stats().tiers["nvme"]
    print(f"cache: {cache.home_bytes} bytes; RAM: at most {ram.usage().high_water_bytes} of {ram.capacity_bytes}")
    blocks: dict[tuple[int, int], Tensor] = {}
    assert torch.equal(logits, generate(lambda *new: in_memory(blocks, *new))), "other logits than in memory"
    print(f"same logits as in memory, bit for bit; {len(set(logits.argmax(-1).tolist()))} different tokens")
