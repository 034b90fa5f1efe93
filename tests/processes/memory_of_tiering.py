"""Measures the memory of a process that offloads or loads a 64 MiB model: ``python memory_of_tiering.py FOLDER``."""

from __future__ import annotations

import gc
import json
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import megatrain

LAYERS, UNIT_BYTES = 16, 4 << 20


def anonymous_bytes() -> int:
    """Return the resident anonymous memory of this process, in bytes."""
    fields = dict(line.split(":", 1) for line in Path("/proc/self/status").read_text().splitlines())
    return int(fields["RssAnon"].split()[0]) << 10


@contextmanager
def peak(results: dict[str, int], name: str) -> Iterator[None]:
    """Record by how many bytes the memory of this process grows in the context: at the peak, and after the end."""
    gc.collect()
    before, highest, is_over = anonymous_bytes(), [0], threading.Event()

    def watch() -> None:
        while not is_over.wait(0.0005):
            highest[0] = max(highest[0], anonymous_bytes())

    thread = threading.Thread(target=watch)
    thread.start()
    yield
    is_over.set()
    thread.join()
    gc.collect()
    results[name] = max(highest[0], anonymous_bytes()) - before
    results[f"{name}, after"] = anonymous_bytes() - before


def main() -> None:
    """Measure the memory for offloading, loading and training, and write the results to FOLDER/memory.json."""
    folder, results = Path(sys.argv[1]), dict[str, int]()
    torch.set_num_threads(1)
    warm = nn.Sequential(nn.Linear(8, 8))
    with megatrain.open_store(ram="4MiB", nvme=folder / "warm", nvme_size="4MiB") as store:
        megatrain.offload(warm, store)(torch.zeros(1, 8)).sum().backward()
    config = LlamaConfig(
        vocab_size=64, hidden_size=512, intermediate_size=16, num_hidden_layers=LAYERS, tie_word_embeddings=True
    )
    config.num_attention_heads = config.num_key_value_heads = 8
    config.head_dim = 64
    with peak(results, "model"):
        model = LlamaForCausalLM(config)
    model.save_pretrained(folder / "model")
    # If weights have their home on the drive, RAM holds at most three units of the model, even if the drive is slow.
    for home, ram_bytes in (("ram", 200 << 20), ("nvme", 3 * UNIT_BYTES)):
        with megatrain.open_store(ram=ram_bytes, nvme=folder / home, nvme_size="512MiB") as store:
            with peak(results, f"tier in {home}"):
                megatrain.offload(model, store, weights=home, gradients="nvme")
            del model
        gc.collect()
        model = LlamaForCausalLM(config)
    del model
    gc.collect()
    with megatrain.open_store(ram="24MiB", nvme=folder / "loaded", nvme_size="512MiB") as store:
        with peak(results, "load_pretrained"):
            model = megatrain.load_pretrained(folder / "model", store, weights="nvme", gradients="nvme")
        with peak(results, "steps"):
            optimizer = megatrain.TieredSGD(model.parameters(), lr=1e-3)
            for _ in range(2):
                ids = torch.zeros(1, 4, dtype=torch.int64)
                model(input_ids=ids, labels=ids).loss.backward()
                optimizer.step()
        results["ram"] = store.stats().tiers["ram"].high_water_bytes
    (folder / "memory.json").write_text(json.dumps(results))


if __name__ == "__main__":
    main()
