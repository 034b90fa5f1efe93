"""Every tensor of a model folder is trained or passed through, and exported with the right name, values and dtype."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

from megatrain.base.errors import UnsupportedModelError
from megatrain.converters import spec
from megatrain.models import folder as folder_module
from megatrain.models.export import ExportError, export_model
from megatrain.models.folder import read_config
from megatrain.models.graph import FreezeError
from megatrain.models.load import WeightLoader
from megatrain.models.passthrough import passthrough_modules
from oracles.families import image_text_class, shrunk_config, tiny_image_text_config
from tests.megatrain.models.tiny import Weights, build_graph, build_model


def load(path: Path) -> tuple[Weights, WeightLoader]:
    weights = Weights(build_graph(read_config(path)))
    loader = WeightLoader(path, weights.graph.model)
    weights.fill(loader.fill)
    return weights, loader


def round_trip(path: Path, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    weights, loader = load(path)
    out = export_model(weights.graph, weights.source, path.parent / "out", dtype=dtype, origin=loader.origin)
    return tensors_in(out)


def tensors_in(path: Path) -> dict[str, Tensor]:
    return {name: value for file in path.glob("*.safetensors") for name, value in load_file(file).items()}


def edit(path: Path, change: Callable[[dict[str, Tensor]], Any]) -> dict[str, Tensor]:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")
    return tensors


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "source"


@pytest.mark.parametrize(
    ("family", "name"),
    [("llama", "model.layers.0.self_attn.rotary_emb.inv_freq"), ("qwen3_next", "mtp.layers.0.mlp.up_proj.weight")],
)
def test_tensors_ignored_by_transformers_are_exported(family: str, name: str, folder: Path) -> None:
    model = AutoModelForCausalLM.from_config(shrunk_config(family), dtype=torch.float32)
    model.save_pretrained(folder)
    before = edit(folder, lambda tensors: tensors.update({name: torch.randn(3, 5).half()}))
    _, loader = load(folder)
    assert loader.origin.passthrough.names == (name,)
    assert "1 tensor (30 B) is kept as it is" in str(loader.origin.passthrough)
    after = round_trip(folder, torch.bfloat16)
    assert after.keys() == before.keys() == loader.origin.folder.records.keys()
    assert after[name].dtype == torch.float16 and torch.equal(after[name], before[name])


def test_a_buffer_keeps_its_dtype_and_bytes(folder: Path) -> None:
    build_model("deepseek_v3").save_pretrained(folder)
    name = "model.layers.1.mlp.gate.e_score_correction_bias"
    before = edit(folder, lambda tensors: tensors.update({name: torch.rand(4, dtype=torch.float64) + 1e-12}))
    after = round_trip(folder, torch.bfloat16)
    assert after[name].dtype == torch.float64 and torch.equal(after[name], before[name])
    assert after["model.norm.weight"].dtype == torch.bfloat16


def test_both_names_of_a_tied_weight_are_exported(folder: Path) -> None:
    build_model("llama_tied").save_pretrained(folder)
    before = edit(
        folder, lambda tensors: tensors.update({"lm_head.weight": tensors["model.embed_tokens.weight"].clone()})
    )
    after = round_trip(folder)
    assert after.keys() == before.keys()
    assert torch.equal(after["lm_head.weight"], before["lm_head.weight"])


@pytest.mark.parametrize("family", ["llama_tied", "mixtral"])
def test_export_keeps_names_without_the_prefix(family: str, folder: Path) -> None:
    model = build_model(family)
    model.save_pretrained(folder)
    before = edit(
        folder,
        lambda tensors: [tensors.update({n.removeprefix("model."): tensors.pop(n)}) for n in list(tensors)],
    )
    after = round_trip(folder)
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)


def test_passthrough_modules_take_no_memory_and_refuse_to_be_used(folder: Path) -> None:
    config = tiny_image_text_config("qwen3_vl")
    image_text_class("qwen3_vl")._from_config(config, dtype=torch.float32).save_pretrained(folder)
    graph = spec.build_graph(read_config(folder))
    passthrough = passthrough_modules(graph.model)
    assert passthrough is not None and passthrough.paths == ("model.visual",)
    assert not [name for name, _ in graph.model.named_parameters() if "visual" in name]
    assert not [name for name, _ in graph.model.named_buffers() if "visual" in name]
    names = {entry.name for layout in graph.layouts.values() for entry in layout.entries}
    assert all("visual" not in name for name in names)
    with pytest.raises(UnsupportedModelError, match=r"uses model\.visual\.[a-z_.]* for text without images"):
        graph.model.model.visual.patch_embed(torch.zeros(4, 3, 2, 16, 16))
    loader = WeightLoader(folder, graph.model)
    weights = Weights(build_graph(read_config(folder)))
    weights.fill(loader.fill)
    assert set(loader.origin.passthrough.names) == {n for n in tensors_in(folder) if "visual" in n}


def test_text_model_folder_keeps_its_vision_tower(folder: Path) -> None:
    config = tiny_image_text_config("qwen3_5")
    image_text_class("qwen3_5")._from_config(config, dtype=torch.float32).save_pretrained(folder)
    values = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**values, "architectures": ["Qwen3_5ForCausalLM"]}))
    before = tensors_in(folder)
    after = round_trip(folder)
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)
    written = json.loads((folder.parent / "out/config.json").read_text())
    assert written == json.loads((folder / "config.json").read_text())


def test_freezing_passthrough_tensors_is_allowed() -> None:
    config = tiny_image_text_config("llava")
    graph = spec.build_graph(config, freeze=["*vision_tower*", "*.embed_tokens.weight"])
    assert "model.language_model.embed_tokens.weight" not in graph.trainable_parameters
    with pytest.raises(FreezeError, match="matches no parameter"):
        spec.build_graph(config, freeze=["*vision_towel*"])


def test_a_vision_tower_that_lacks_a_tensor_is_refused_by_name(folder: Path) -> None:
    image_text_class("llava")._from_config(tiny_image_text_config("llava"), dtype=torch.float32).save_pretrained(folder)
    name = next(name for name in tensors_in(folder) if "vision_tower" in name)
    edit(folder, lambda tensors: tensors.pop(name))
    with pytest.raises(folder_module.ModelFolderError, match="1 tensors of LlavaForConditionalGeneration are missing"):
        load(folder)


def test_a_folder_that_changed_or_vanished_is_named_at_the_export(folder: Path) -> None:
    image_text_class("llava")._from_config(tiny_image_text_config("llava"), dtype=torch.float32).save_pretrained(folder)
    weights, loader = load(folder)
    checksum = loader.origin.passthrough.checksum()
    options: dict[str, Any] = {"dtype": torch.float32, "origin": loader.origin, "passthrough_checksum": checksum}
    out = folder.parent / "out"
    export_model(weights.graph, weights.source, out, **options)
    name = loader.origin.passthrough.names[0]
    with (folder / "model.safetensors").open("r+b") as file:
        file.seek(loader.origin.folder.records[name].offset)
        file.write(b"else")
    with pytest.raises(ExportError, match="no longer those that the run began with"):
        export_model(weights.graph, weights.source, folder.parent / "changed", **options)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ExportError, match=r"needed for the export: .*model\.safetensors"):
        export_model(weights.graph, weights.source, folder.parent / "vanished", **options)
    assert sorted(path.name for path in folder.parent.iterdir()) == ["out", "source"]


def test_reading_passthrough_tensors_takes_one_piece_of_memory(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_module, "PIECE_BYTES", 256)
    image_text_class("llava")._from_config(tiny_image_text_config("llava"), dtype=torch.float32).save_pretrained(folder)
    loader = WeightLoader(folder, build_graph(read_config(folder)).model)
    loader.origin.passthrough.checksum()
    assert 0 < loader.largest_extra_nbytes <= 256


def dtypes_of(model_type: str) -> Any:
    values: dict[str, Any] = {}
    if model_type == "ernie4_5_moe":
        values = {"moe_num_experts": 4, "moe_k": 2, "moe_layer_start_index": 1, "moe_intermediate_size": 16}
        values |= {"num_hidden_layers": 2, "hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4}
        values |= {"num_key_value_heads": 2, "vocab_size": 96, "head_dim": 8}
        return AutoConfig.for_model(model_type, **values)
    return shrunk_config(model_type)


#: Models that keep some weights in fp32. They declare this in code, or list patterns with a dot (`mlp.gate.weight`),
#: names, or names that apply only to float16.
@pytest.mark.parametrize("model_type", ["ernie4_5_moe", "beam", "flint", "bailing_hybrid", "gpt_oss"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_weights_are_in_the_dtypes_of_from_pretrained(model_type: str, dtype: torch.dtype, folder: Path) -> None:
    model = AutoModelForCausalLM.from_config(dtypes_of(model_type), dtype=torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn(parameter.shape) * 0.1)
    model.save_pretrained(folder)
    theirs = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    expected = {name: parameter.dtype for name, parameter in theirs.named_parameters()}
    graph = spec.build_graph(read_config(folder), dtype=dtype)
    assert {name: parameter.dtype for name, parameter in graph.model.named_parameters()} == expected
    if model_type != "gpt_oss" or dtype == torch.float16:
        assert torch.float32 in expected.values()
    weights, loader = load(folder)
    out = export_model(weights.graph, weights.source, folder.parent / "out", dtype=dtype, origin=loader.origin)
    again = AutoModelForCausalLM.from_pretrained(out, dtype=dtype)
    for name, parameter in theirs.named_parameters():
        assert torch.equal(dict(again.named_parameters())[name], parameter), name
