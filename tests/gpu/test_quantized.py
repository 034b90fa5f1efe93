"""Kernels dequantize packed weights on the device without a host wait. Results are bit-identical to the host's."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from fakes.gpu_run import gpu_config_text, no_waits_allowed
from megatrain.converters.spec import build_graph
from megatrain.models.in_place import FolderSource, frozen_blocks
from megatrain.models.load import open_loader
from megatrain.models.table import LoraConfig
from oracles.quantize import METHODS, quantized_pair
from oracles.tiered_run import TieredRun, run_config
from tiered import MiB

LORA = '[lora]\nr = 4\ntarget_modules = ["q_proj", "v_proj"]\n[training]'


@pytest.mark.usefixtures("virtual")
@pytest.mark.parametrize("method", METHODS)
def test_device_unpacking_is_bit_identical_to_host(method: str, tmp_path: Path) -> None:
    model, _ = quantized_pair(tmp_path, method)
    graph = build_graph(model, lora=LoraConfig(r=2, lora_alpha=2, target_modules=("q_proj",)), dtype=torch.bfloat16)
    layout = graph.layouts["model.layers.1.frozen"]
    block = frozen_blocks(open_loader(model, graph), [layout], torch.bfloat16)[layout.name]
    assert block.packing is not None
    packed = torch.zeros(block.nbytes, dtype=torch.uint8)
    for part in FolderSource({"a": block}, torch.bfloat16).parts("a"):
        part(packed)
    on_host = torch.zeros(layout.num_elements, dtype=torch.bfloat16)
    block.packing.decode(packed, on_host)
    there, on_device = packed.to("cuda"), torch.zeros(layout.num_elements, dtype=torch.bfloat16, device="cuda")
    block.packing.decode(there, on_device)  # the first call copies a 2 KiB table to the device
    on_device.zero_()
    with no_waits_allowed():
        block.packing.decode(there, on_device)
    assert torch.equal(on_device.cpu(), on_host)


@pytest.mark.usefixtures("virtual")
def test_a_run_moves_packed_bytes_over_the_bus(tmp_path: Path) -> None:
    def run(model: Path, name: str, gpu_mib: int, placement: str) -> TieredRun:
        precision = 'compute_dtype = "bfloat16"'
        text = gpu_config_text(
            tmp_path / name, model, gpu_bytes=gpu_mib * MiB, nvme=0, placement=placement, precision=precision
        )
        return run_config(text.replace("[training]", LORA, 1), tmp_path / name, num_steps=2)

    model, plain_model = quantized_pair(tmp_path, "mxfp4")
    plain = run(plain_model, "plain", 16, 'weights = ["folder"]')
    for name, gpu_mib, placement in (("streamed", 16, 'weights = ["folder"]'), ("at home", 64, "")):
        packed = run(model, name, gpu_mib, placement)
        packed.assert_as_planned()
        assert packed.losses == plain.losses and packed.grad_norms == plain.grad_norms
        assert all(torch.equal(packed.weights[key], weight) for key, weight in plain.weights.items())
        if name == "streamed":
            assert packed.moved is not None and plain.moved is not None
            moved, before = (each.moved.links["folder->ram"].num_bytes for each in (packed, plain))
            assert moved < 0.75 * before, (moved, before)  # embedding and head are not quantized
