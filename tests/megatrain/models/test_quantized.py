"""Quantized models under ``[lora]`` are dequantized correctly, and train exactly like plain models of equal values."""

from __future__ import annotations

import itertools
import json
import math
import re
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from megatrain.base.errors import UnsupportedModelError
from megatrain.base.layout import views
from megatrain.converters import experts
from megatrain.converters.spec import build_graph
from megatrain.models.folder import ModelFolder, ModelFolderError
from megatrain.models.in_place import FolderSource, frozen_blocks
from megatrain.models.int4 import find_int4
from megatrain.models.load import open_loader
from megatrain.models.quantized import decode, find_decoders
from megatrain.models.table import LoraConfig
from oracles.families import tiny_config
from oracles.quantize import BLOCK, METHODS, fp8, int4, mxfp4, nf4, quantized_pair, write_quantized
from oracles.tiered_run import TieredRun, config_text, run_config
from tiered import TransferError


@pytest.mark.parametrize("method", list(METHODS))
def test_any_part_of_a_quantized_weight_is_dequantized(tmp_path: Path, method: str) -> None:
    quantized, plain = quantized_pair(tmp_path, method)
    folder, expected = ModelFolder(quantized), load_file(plain / "model.safetensors")
    assert set(folder.records) == set(expected)
    for name, weight in expected.items():
        torch.testing.assert_close(folder.read(name), weight, rtol=0, atol=0)
    name = max((record.numel, name) for name, record in folder.records.items() if record.decoder is not None)[1]
    decoder, weight = folder.records[name].decoder, expected[name]
    assert decoder is not None
    flat = (weight.transpose(-1, -2) if decoder.is_transposed else weight).reshape(-1)
    for first, count in ((0, 1), (1, 130), (47, 2), (flat.numel() - 5, 5), (1000, flat.numel() - 1007)):
        assert torch.equal(decode(decoder, first, count, folder.read_stored), flat[first : first + count])


LORA = '[lora]\nr = 4\ntarget_modules = ["q_proj", "v_proj"]\n[training]'
PLACES: dict[str, dict[str, Any]] = {
    "RAM": {"nvme": 0, "placement": 'weights = ["ram"]'},
    "folder": {"nvme": 0, "placement": 'weights = ["folder"]'},
    "NVMe": {"nvme": 1, "placement": 'weights = ["nvme"]'},
    "emulated GPU": {"nvme": 0, "gpu": "16MiB", "placement": 'weights = ["folder"]'},
    "at home in an emulated GPU": {"nvme": 0, "gpu": "64MiB"},
}


def run_at(where: str, folder: Path, model: Path) -> TieredRun:
    text = config_text(folder, model, **{"precision": 'compute_dtype = "bfloat16"', **PLACES[where]})
    return run_config(text.replace("[training]", LORA, 1), folder, num_steps=2)


def assert_same_numbers(run: TieredRun, plain: TieredRun) -> None:
    """Check that losses, norms, trained weights and all blocks except the packed ones are equal."""
    assert run.losses == plain.losses and run.grad_norms == plain.grad_norms
    assert all(torch.equal(run.weights[name], weight) for name, weight in plain.weights.items())
    others = [key for key, block in run.plan.program.blocks.items() if not block.num_packed and key in plain.digests]
    assert others and all(run.digests[key] == plain.digests[key] for key in others)


@pytest.mark.slow  # tests/gpu/test_quantized.py is similar
@pytest.mark.parametrize(
    ("method", "places"),
    [
        ("fp8", tuple(PLACES)),
        ("nf4", ("folder",)),
        ("nested nf4", ("folder", "RAM")),
        ("mxfp4", ("folder", "emulated GPU")),
        ("fp8 experts", ("folder", "RAM")),
        ("int4", ("folder", "emulated GPU")),
    ],
)
def test_run_moves_packed_bytes_and_matches_the_plain_folder(
    tmp_path: Path, method: str, places: tuple[str, ...]
) -> None:
    model, plain_model = quantized_pair(tmp_path, method)
    plain = run_at(places[0], tmp_path / "plain run", plain_model)
    for where in places:
        run = run_at(where, tmp_path / where, model)
        run.assert_as_planned()
        assert_same_numbers(run, plain)
        packed = {key: block for key, block in run.plan.program.blocks.items() if block.num_packed}
        assert packed, "the layers' frozen weights"
        stored = ModelFolder(model).file_records
        for key, block in packed.items():
            # A block has the layer's bytes in the files, its norms in the compute dtype, and padding for alignment.
            prefix = key.removesuffix(".frozen/weight")
            in_files = sum(r.nbytes for name, r in stored.items() if name.startswith(f"{prefix}."))
            assert block.nbytes <= in_files + 128 * 64 < 2 * block.num_packed
        unpacked = 2 * max(block.num_packed for block in packed.values())
        assert run.plan.placement.workspace_bytes[run.plan.program.compute_tier] > unpacked


def test_mxfp4_is_decoded_as_transformers_does(tmp_path: Path) -> None:
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    generator = torch.Generator().manual_seed(2)
    weight = torch.randn(3, 64, 40, generator=generator)
    parts, meant = mxfp4(weight)
    theirs = convert_moe_packed_tensors(parts["_blocks"], parts["_scales"], dtype=torch.float32)
    assert torch.equal(theirs, meant)
    save_file({f"experts.gate{end}": tensor for end, tensor in parts.items()}, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "mxfp4"}}))
    folder = ModelFolder(tmp_path)
    assert list(folder.records) == ["experts.gate"]
    assert torch.equal(folder.read("experts.gate"), meant)


def decoded_nf4(tensors: dict[str, torch.Tensor], shape: torch.Size) -> torch.Tensor:
    """Decode a weight to fp32 with this project's decoder. ``tensors`` has the stored tensors by name suffix."""
    names = {torch.uint8: "U8", torch.float32: "F32"}
    shapes = {f"weight{end}": (tuple(tensor.shape), names[tensor.dtype]) for end, tensor in tensors.items()}
    stored = {f"weight{end}": tensor.reshape(-1).view(torch.uint8) for end, tensor in tensors.items()}

    def read(name: str, first: int, count: int) -> torch.Tensor:
        return stored[name][first : first + count].clone()

    decoder = find_decoders(shapes, {"quant_method": "bitsandbytes", "load_in_4bit": True}, read)["weight"]
    return decode(decoder, 0, shape.numel(), read).view(shape)


def test_nf4_is_decoded_as_bitsandbytes_did() -> None:
    """The data was recorded on a CPU with bitsandbytes 0.50.2: blocks of 64 values, and of 128 with 8-bit scales."""
    recorded = load_file(Path(__file__).parents[2] / "data/bitsandbytes_nf4.safetensors")
    cases = [name.removesuffix(".dequantized") for name in recorded if name.endswith(".dequantized")]
    assert len(cases) == 6
    for case in cases:
        theirs, prefix = recorded[f"{case}.dequantized"], f"{case}.weight"
        parts = {name.removeprefix(prefix): each for name, each in recorded.items() if name.startswith(prefix)}
        assert torch.equal(decoded_nf4(parts, theirs.shape).to(theirs.dtype), theirs), case


def test_int4_is_decoded_as_compressed_tensors_did(tmp_path: Path) -> None:
    """The data, recorded with version 0.20.0, covers column groups, whole rows, zero points and three dtypes."""
    recorded = load_file(Path(__file__).parents[2] / "data/compressed_tensors_int4.safetensors")
    cases = [name.removesuffix(".decompressed") for name in recorded if name.endswith(".decompressed")]
    assert len(cases) == 4
    tensors = {name: tensor for name, tensor in recorded.items() if not name.endswith(".decompressed")}
    save_file(tensors, tmp_path / "model.safetensors")
    scheme = {"weights": {"num_bits": 4, "type": "int", "group_size": 32}, "input_activations": None}
    other = {"weights": {"num_bits": 4, "type": "int", "group_size": 16}}
    table = {**METHODS["int4"].table, "config_groups": {"a": scheme, "b": other}}
    (tmp_path / "config.json").write_text(json.dumps({"text_config": {"quantization_config": table}}))
    folder = ModelFolder(tmp_path)
    assert set(folder.records) == {f"{case}.weight" for case in cases}
    for case in cases:
        ours, theirs = folder.read(f"{case}.weight"), recorded[f"{case}.decompressed"]
        assert torch.equal(ours.to(theirs.dtype), theirs), case
        decoder, flat = folder.records[f"{case}.weight"].decoder, ours.view(-1)
        assert decoder is not None
        for first, count in ((0, 1), (47, 2), (200, 150), (flat.numel() - 5, 5)):
            assert torch.equal(decode(decoder, first, count, folder.read_stored), flat[first : first + count]), case


def test_last_int4_group_of_a_row_can_be_shorter() -> None:
    """A row of 40 numbers has five words, and three groups of 16, 16 and 8 numbers."""
    shapes = {"a_packed": ((2, 5), "I32"), "a_scale": ((2, 3), "F32"), "a_shape": ((2,), "I64")}
    table = {
        **METHODS["int4"].table,
        "config_groups": {"a": {"weights": {"num_bits": 4, "type": "int", "group_size": 16}}},
    }
    decoder = find_int4(shapes, table, lambda *_: torch.tensor([2, 40]).view(torch.uint8))["a"]
    assert decoder.spans(0, 80) == (range(40), range(24))
    assert decoder.spans(40, 40) == (range(20, 40), range(12, 24))
    packed = torch.full((20,), 0x99, dtype=torch.uint8)  # all numbers are 9, which stands for 1
    scales = torch.tensor([2.0, 3.0, 5.0]).view(torch.uint8)
    assert decoder.numbers(40, 40, (packed, scales)).tolist() == [2.0] * 16 + [3.0] * 16 + [5.0] * 8


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"format": "float-quantized"}, "only pack-quantized is supported, not float-quantized"),
        ({"config_groups": {"a": {"weights": {"num_bits": 8, "type": "int"}}}}, r"have 8 bits \(int\), not 4"),
        (
            {"config_groups": {"a": {"weights": {"num_bits": 4, "type": "int"}, "input_activations": {"num_bits": 8}}}},
            "activations are also quantized",
        ),
        ({"config_groups": {"a": {"weights": {"num_bits": 4, "group_size": 7}}}}, "config.json no such size"),
    ],
)
def test_other_formats_of_compressed_tensors_are_refused(tmp_path: Path, change: dict[str, Any], says: str) -> None:
    parts, _ = int4(torch.randn(16, 64, generator=torch.Generator().manual_seed(2)), 16)
    save_file({f"a.weight{end}": tensor for end, tensor in parts.items()}, tmp_path / "model.safetensors")
    table = {**METHODS["int4"].table, **change}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": table}))
    with pytest.raises(ModelFolderError, match=says):
        ModelFolder(tmp_path)


def test_nf4_is_decoded_as_bitsandbytes_does() -> None:
    functional = pytest.importorskip("bitsandbytes.functional")
    generator = torch.Generator().manual_seed(5)
    # The cases include a partial last block and nested scales.
    for shape, dtype, block, nested in itertools.product(
        ((33, 130), (160, 512)), (torch.float32, torch.bfloat16, torch.float16), (64, 128), (False, True)
    ):
        weight = (torch.randn(shape, generator=generator) * 0.05).to(dtype)
        quantized, state = functional.quantize_4bit(
            weight, blocksize=block, quant_type="nf4", compress_statistics=nested
        )
        parts = {f".{name}": each for name, each in state.as_dict(packed=True).items()}
        theirs = functional.dequantize_4bit(quantized, state)
        ours = decoded_nf4({"": quantized, **parts}, theirs.shape)
        assert torch.equal(ours.to(dtype), theirs), (shape, dtype, block, nested)


def test_fp8_is_decoded_as_transformers_does(tmp_path: Path) -> None:
    from transformers.integrations.finegrained_fp8 import Fp8Dequantize

    weight = torch.randn(96, 144, generator=torch.Generator().manual_seed(2))
    parts, meant = fp8(weight, BLOCK)
    theirs = Fp8Dequantize(None)._dequantize_one(parts[""], parts["_scale_inv"], torch.float32)
    torch.testing.assert_close(theirs, meant, rtol=0, atol=0)


def test_unsupported_quantization_is_refused_by_name(tmp_path: Path) -> None:
    quantized, _ = quantized_pair(tmp_path, "fp8")
    with pytest.raises(UnsupportedModelError, match=r"quantized \(.*Train adapters: \[lora\]"):
        build_graph(quantized)
    path = quantized / "config.json"
    values = json.loads(path.read_text())

    def refusal(table: dict[str, object]) -> str:
        path.write_text(json.dumps({**values, "quantization_config": table}))
        with pytest.raises(ModelFolderError) as caught:
            ModelFolder(quantized)
        return str(caught.value)

    assert "quantized (gptq), which is not supported; with [lora]" in refusal({"quant_method": "gptq"})
    assert "without block scales" in refusal({"quant_method": "fp8"})
    assert "not F32 [" in refusal({"quant_method": "fp8", "weight_block_size": [16, 16]})
    path.write_text(json.dumps({key: value for key, value in values.items() if key != "quantization_config"}))
    with pytest.raises(ModelFolderError, match=r"dtype F8_E4M3, .* does not say how it is quantized"):
        ModelFolder(quantized)


def test_quantized_conv1d_of_any_shape_is_refused(tmp_path: Path) -> None:
    """Transformers transposes Conv1D weights before quantization, so square ones would be misread without an error."""
    plain = tmp_path / "plain"
    AutoModelForCausalLM.from_config(tiny_config("gpt2"), dtype=torch.float32).save_pretrained(plain)
    name = "transformer.h.0.attn.c_proj.weight"
    weight = load_file(plain / "model.safetensors")[name]
    assert weight.shape[0] == weight.shape[1]
    parts, _ = nf4(weight.T.contiguous())
    write_quantized(plain, tmp_path / "quantized", METHODS["nf4"].table, {name: parts})
    graph = build_graph(tmp_path / "quantized", lora=LoraConfig(r=2, lora_alpha=4, target_modules=("c_attn",)))
    with pytest.raises(ModelFolderError, match=rf"{re.escape(name)} is the weight of a Conv1D.* use the original"):
        open_loader(tmp_path / "quantized", graph)


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32], ids=str)
def test_expert_parts_match_the_plain_folder(
    tmp_path: Path, stored: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Experts are split. Their biases are not packed, lie between packed weights, and may have another dtype."""
    monkeypatch.setattr(experts, "EXPERTS_ELEMENTS", 1)
    quantized, plain = quantized_pair(tmp_path, "mxfp4")
    tensors = load_file(quantized / "model.safetensors")
    is_stored = {name: tensor.to(stored) for name, tensor in tensors.items() if tensor.is_floating_point()}
    save_file({**tensors, **is_stored}, quantized / "model.safetensors", metadata={"format": "pt"})
    values = load_file(plain / "model.safetensors")
    rounded = {name: tensor.to(stored).float() for name, tensor in values.items() if name in is_stored}
    save_file({**values, **rounded}, plain / "model.safetensors", metadata={"format": "pt"})
    lora = LoraConfig(r=2, lora_alpha=2, target_modules=("q_proj",))
    graph = build_graph(quantized, lora=lora, split_experts=True)
    layouts = [each for each in graph.layouts.values() if any(entry.part_of for entry in each.entries)]
    blocks = frozen_blocks(open_loader(quantized, graph), layouts, torch.float32)
    source, loader = FolderSource(blocks, torch.float32), open_loader(plain, graph)
    num_packed, num_bytes = 0, Counter[str]()
    for layout in layouts:
        filled = torch.zeros(layout.num_elements)
        with graph.plain_model():
            loader.fill(layout, views(filled, layout))
        block = blocks[layout.name]
        packed = torch.full((block.nbytes,), 7, dtype=torch.uint8)
        for part in source.parts(layout.name):
            part(packed)
        read = packed.view(torch.float32) if block.packing is None else torch.zeros(layout.num_elements)
        if block.packing is not None:
            block.packing.decode(packed, read)
            num_packed += 1
            for name, span in block.packing.byte_ranges:
                num_bytes[name] += len(span)
        assert torch.equal(read, filled) and filled.any(), layout.name
    assert 2 < num_packed <= 8
    assert num_bytes == {name: tensors[name].nbytes for name in num_bytes}, "each byte is in one part"


@pytest.mark.parametrize("method", ["mxfp4", "fp8 experts", "int4 experts"])
def test_fused_expert_blocks_match_the_plain_folder(tmp_path: Path, method: str) -> None:
    """Unpacking gives the same values as loading, for transposed tensors and for a separate tensor per expert."""
    blocks = []
    for folder in quantized_pair(tmp_path, method):
        graph = build_graph(folder, lora=LoraConfig(r=2, lora_alpha=2, target_modules=("q_proj",)))
        layout = graph.layouts["model.layers.1.frozen"]
        loader = open_loader(folder, graph)
        filled = torch.zeros(layout.num_elements)
        with graph.plain_model():
            loader.fill(layout, views(filled, layout))
        block = frozen_blocks(loader, [layout], torch.float32)[layout.name]
        source = FolderSource({"a": block}, torch.float32)
        packed = torch.full((block.nbytes,), 7, dtype=torch.uint8)
        for part in source.parts("a"):
            part(packed)
        read = packed.view(torch.float32) if block.packing is None else torch.zeros(layout.num_elements)
        if block.packing is not None:
            block.packing.decode(packed, read)
        assert torch.equal(read, filled)
        blocks.append(read)
    assert torch.equal(blocks[0], blocks[1])


@pytest.mark.parametrize(
    ("method", "part", "damage"),
    [
        ("fp8", "", lambda t: t.view(torch.uint8).fill_(0x7F)),
        ("fp8", "_scale_inv", lambda t: t.fill_(math.inf)),
        ("nf4", ".absmax", lambda t: t.fill_(math.nan)),
        ("mxfp4", "_scales", lambda t: t.fill_(255)),
        ("int4", "_scale", lambda t: t.fill_(math.inf)),
    ],
)
def test_nonfinite_quantized_values_end_the_run(tmp_path: Path, method: str, part: str, damage: Any) -> None:
    """The values are checked when they are read from the folder, whatever the block's home."""
    model, _ = quantized_pair(tmp_path, method)
    tensors = load_file(model / "model.safetensors")
    name = next(name for name in tensors if name.endswith(f"{METHODS[method].ends[-1]}{part}"))
    damage(tensors[name])
    save_file(tensors, model / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(TransferError, match=f"tensor {name} contains infinite values or NaN"):
        run_at("folder", tmp_path / "run", model)
