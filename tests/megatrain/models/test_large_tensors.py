"""Tensors of any size are drawn, exported and loaded in small pieces, so the process needs little memory."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from megatrain.models.checkpoint_names import plan_export
from megatrain.models.initialize import Initializer, init_weights
from megatrain.models.regions import Region, read_regions
from tests.megatrain.models.tiny import Weights, build_graph, build_model
from tiered import MiB

#: Less than the largest tensor: a layer's experts take 64 MiB in the files and 128 MiB in fp32.
ALLOWED_BYTES = 48 * MiB

PROGRAM = """
import json, re, sys
from contextlib import contextmanager
import torch
from transformers import AutoConfig
from megatrain.models import export, folder
from megatrain.models.export import export_model
from megatrain.converters.spec import build_graph
from megatrain.models.load import WeightLoader
from megatrain.training.weights import RandomWeights

torch.set_num_threads(1)
folder.PIECE_BYTES = export.PIECE_BYTES = 4 << 20  # small pieces: the allocator keeps several of each size

def high_water():
    return int(re.search(r"VmHWM:\\s+([0-9]+) kB", open("/proc/self/status").read())[1]) * 1024

def graph_of(experts, vocabulary):
    return build_graph(AutoConfig.for_model(
        "qwen3_moe", hidden_size=512, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=4, head_dim=64,
        intermediate_size=512, moe_intermediate_size=512, num_experts=experts, num_experts_per_tok=2,
        vocab_size=vocabulary, pad_token_id=7, max_position_embeddings=64,
    ))

def ranges_of(source):
    buffer = torch.empty(1 << 20)
    @contextmanager
    def opened(layout):
        def read(start, stop):
            out = buffer[: stop - start].zero_()
            source.read(layout, start, out)
            return out
        yield read
    return opened

def whole(source, graph):
    step = 1 << 20
    total = {}
    for layout in graph.layouts.values():
        with ranges_of(source)(layout) as read:
            for start in range(0, layout.num_elements, step):
                bits = read(start, min(start + step, layout.num_elements)).bfloat16().view(torch.int16)
                total[layout.name] = hash((total.get(layout.name), int(bits.sum()), int(bits[::7].sum())))
    return total

def all_ways(name, **sizes):
    graph = graph_of(**sizes)
    drawn = RandomWeights(graph.model, seed=3)
    out = export_model(graph, ranges_of(drawn), name, dtype=torch.bfloat16)
    again = graph_of(**sizes)
    loader = WeightLoader(out, again.model)
    assert whole(loader, again) == whole(RandomWeights(graph.model, seed=3), graph)
    export_model(again, ranges_of(loader), name + "2", dtype=torch.float32, origin=loader.origin)
    return graph

all_ways("small", experts=2, vocabulary=512)  # libraries, thread stacks, allocator
before = high_water()
graph = all_ways("large", experts=64, vocabulary=32768)
largest = max(parameter.numel() for parameter in graph.model.parameters()) * 2
print(json.dumps({"grown": high_water() - before, "largest": largest}))
"""


def test_memory_does_not_grow_with_the_largest_tensor(tmp_path: Path) -> None:
    root = Path(__file__).parents[3]
    process = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        cwd=tmp_path,
        # malloc returns freed memory at once, so the limit applies to memory in use, not to what malloc retains.
        env={**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1", "MALLOC_MMAP_THRESHOLD_": str(128 << 10)},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert process.returncode == 0, process.stderr
    found = json.loads(process.stdout.splitlines()[-1])
    assert found["largest"] == 64 * MiB
    assert found["grown"] < ALLOWED_BYTES, found


def test_weights_drawn_in_ranges_are_bit_identical_to_whole_tensors(family: str) -> None:
    graph = build_graph(build_model(family).config)
    weights = Weights(graph)
    weights.fill(lambda layout, views: init_weights(graph.model, layout, views, 3))
    for layout in graph.layouts.values():
        initializer = Initializer(graph.model, [entry.name for entry in layout.entries], 3)
        for entry in reversed(layout.entries):  # in reverse order, each entry must first draw all entries before it
            found = torch.empty(entry.numel)
            for start in [*range(0, entry.numel, 112)][::-1]:
                initializer.read(entry.name, start, found[start : start + 112])
            assert torch.equal(found, weights.named()[entry.name].reshape(-1)), entry.name
        assert initializer.supports_ranges, layout.name


def test_an_export_in_ranges_equals_the_conversion_of_transformers(family: str) -> None:
    model = build_model(family)
    tensors = dict(model.state_dict())
    on_meta = {name: value.to("meta") for name, value in tensors.items()}
    skeleton = build_graph(model.config).model
    for step in plan_export(skeleton, on_meta):
        expected = step.run(lambda name: tensors[name].clone(), skeleton)
        regions = step.regions(skeleton)
        assert regions is not None, step.source_names
        assert regions.keys() == expected.keys()
        for target, value in expected.items():
            out = torch.zeros(value.numel())
            for start in range(0, out.numel(), 100):
                read_regions(regions[target], start, out[start : start + 100], read_of(tensors), 70)
            assert torch.equal(out, value.reshape(-1)), target


def read_of(tensors: dict[str, Tensor]):  # type: ignore[no-untyped-def]
    def read(name: str, first: int, count: int, place: Tensor | None = None) -> Tensor:
        assert count <= 70
        return tensors[name].reshape(-1)[first : first + count]

    return read


@pytest.mark.parametrize("strides", [(60, 12, 1), (1, 4, 20), (2, 16, 96)])
@pytest.mark.parametrize("step", [1, 7, 60, 100])
def test_any_range_of_a_strided_region_is_read(strides: tuple[int, ...], step: int) -> None:
    source = torch.arange(600.0)
    box = source.as_strided((4, 5, 3), strides, 5)
    region = Region("source", (4, 5, 3), strides, (15, 3, 1), 5, 0)
    out = torch.full((60,), -1.0)
    for start in range(0, 60, step):
        read_regions([region], start, out[start : start + step], read_of({"source": source}), 70)
    assert torch.equal(out, box.reshape(-1))
