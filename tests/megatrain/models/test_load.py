"""Loading gives exactly the saved weights, takes little memory, and reports each broken folder with one clear error."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoModelForCausalLM, PreTrainedModel

from megatrain.models import folder as folder_module
from megatrain.models.checkpoint_names import plan_load
from megatrain.models.folder import ModelFolder, ModelFolderError, read_config
from megatrain.models.load import WeightLoader
from megatrain.models.regions import read_regions
from tests.megatrain.models.tiny import Weights, build_graph, build_model


def load(path: Path) -> Weights:
    weights = Weights(build_graph(read_config(path)))
    loader = WeightLoader(path, weights.graph.model)
    weights.fill(loader.fill)
    loader.load_buffers()
    return weights


def test_every_parameter_equals_the_saved_one(saved: tuple[PreTrainedModel, Path]) -> None:
    model, path = saved
    weights = load(path)
    expected = dict(model.named_parameters(remove_duplicate=False))
    found = weights.named()
    assert found.keys() == dict(weights.graph.model.named_parameters()).keys()
    for name, view in found.items():
        assert torch.equal(view, expected[name]), name
    for name, buffer in model.state_dict().items():
        if name not in expected:
            assert torch.equal(weights.graph.model.get_buffer(name), buffer), name


def test_padding_of_the_block_stays_untouched(saved: tuple[PreTrainedModel, Path]) -> None:
    _, path = saved
    weights = load(path)
    for name, layout in weights.graph.layouts.items():
        covered = torch.zeros(layout.num_elements, dtype=torch.bool)
        for entry in layout.entries:
            covered[entry.offset : entry.offset + entry.numel] = True
        assert torch.equal(weights.blocks[name][~covered], torch.zeros(int((~covered).sum())))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
def test_half_precision_files_are_widened_exactly(
    tmp_path: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(folder_module, "PIECE_BYTES", 100)  # many pieces, and an uneven last one
    model = build_model("qwen3_moe").to(dtype)
    model.save_pretrained(tmp_path)
    found = load(tmp_path).named()
    for name, parameter in model.named_parameters():
        assert torch.equal(found[name], parameter.float()), name


def test_a_bfloat16_view_receives_bfloat16(tmp_path: Path) -> None:
    model = build_model("llama").to(torch.bfloat16)
    model.save_pretrained(tmp_path)
    weights = Weights(build_graph(read_config(tmp_path)))
    weights.blocks = {name: block.to(torch.bfloat16) for name, block in weights.blocks.items()}
    weights.fill(WeightLoader(tmp_path, weights.graph.model).fill)
    for name, parameter in model.named_parameters():
        assert torch.equal(weights.named()[name], parameter), name


def test_experts_read_into_place_equal_the_plain_conversion(tmp_path: Path) -> None:
    model = build_model("mixtral")
    model.save_pretrained(tmp_path)
    folder = ModelFolder(tmp_path)
    skeleton = build_graph(model.config).model
    names = {name: torch.empty(record.shape, device="meta") for name, record in folder.records.items()}
    steps = {id(step): step for step in plan_load(skeleton, names).target_steps.values() if step.transform is not None}
    assert len(steps) == 6
    for step in steps.values():
        (expected,) = step.run(folder.read, skeleton).values()
        regions = step.regions(skeleton)
        assert regions is not None
        found = torch.zeros(expected.numel())
        for start in range(0, found.numel(), 100):  # ranges that do not end at the end of an expert or row
            read_regions(regions[step.first_target], start, found[start : start + 100], folder.read_span, 70)
        assert torch.equal(found, expected.view(-1))


class AllocationCounter(TorchDispatchMode):
    """Dispatch mode that records the size of the largest CPU tensor that an operation allocates."""

    def __init__(self) -> None:
        super().__init__()
        self.largest_nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        inputs = {id(arg.untyped_storage()) for arg in args if isinstance(arg, Tensor)}
        for value in result if isinstance(result, (tuple, list)) else (result,):
            if isinstance(value, Tensor) and value.device.type == "cpu" and id(value.untyped_storage()) not in inputs:
                pointers = {arg.data_ptr() for arg in args if isinstance(arg, Tensor) and arg.device.type == "cpu"}
                if value.untyped_storage().data_ptr() not in pointers and value._base is None:
                    self.largest_nbytes = max(self.largest_nbytes, value.nbytes)
        return result


@pytest.mark.parametrize("name", ["llama_tied", "mixtral", "qwen3_moe", "gpt2"])
def test_memory_besides_the_blocks_is_one_piece(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_module, "PIECE_BYTES", 256)
    build_model(name).to(torch.bfloat16).save_pretrained(tmp_path)
    weights = Weights(build_graph(read_config(tmp_path)))
    loader = WeightLoader(tmp_path, weights.graph.model)
    with AllocationCounter() as counter:
        weights.fill(loader.fill)
    assert 0 < loader.largest_extra_nbytes <= 256
    assert 0 < counter.largest_nbytes <= 256


def test_fp32_files_go_straight_into_fp32_blocks(tmp_path: Path) -> None:
    model = build_model("llama")
    model.save_pretrained(tmp_path)
    weights = Weights(build_graph(model.config))
    loader = WeightLoader(tmp_path, weights.graph.model)
    weights.fill(loader.fill)
    assert loader.largest_extra_nbytes == 0


def test_a_tied_head_in_the_file_must_equal_the_embedding(tmp_path: Path) -> None:
    build_model("llama_tied").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    assert "lm_head.weight" not in load(tmp_path).named()
    tensors["lm_head.weight"][3, 4] += 1
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ModelFolderError, match=r"ties model\.embed_tokens\.weight and lm_head\.weight"):
        load(tmp_path)


def test_a_tied_weight_stored_under_the_other_name_only(tmp_path: Path) -> None:
    model = build_model("llama_tied")
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    save_file(tensors, tmp_path / "model.safetensors")
    assert torch.equal(load(tmp_path).named()["model.embed_tokens.weight"], model.get_input_embeddings().weight)


def test_names_without_the_prefix_of_the_head_model_load(tmp_path: Path) -> None:
    model = build_model("llama_tied")
    model.model.save_pretrained(tmp_path)  # a base model, so names have no "model." prefix
    found = load(tmp_path).named()
    assert torch.equal(found["model.norm.weight"], model.model.norm.weight)


def test_old_rotary_tables_in_a_file_are_ignored(tmp_path: Path) -> None:
    build_model("llama").save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
    save_file(tensors, tmp_path / "model.safetensors")
    assert load(tmp_path).named()


# Broken folders: how a good folder is damaged, and the expected error message.


def edit_config(path: Path, **changes: Any) -> None:
    values = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**values, **changes}))


def edit_tensors(path: Path, change: Callable[[dict[str, Tensor]], Any]) -> None:
    tensors = load_file(path / "model.safetensors")
    change(tensors)
    save_file(tensors, path / "model.safetensors")


def truncate(path: Path) -> None:
    data = (path / "model.safetensors").read_bytes()
    (path / "model.safetensors").write_bytes(data[: len(data) - 100])


def to_bin(path: Path) -> None:
    (path / "model.safetensors").rename(path / "pytorch_model.bin")


def wrong_shape(tensors: dict[str, Tensor]) -> None:
    tensors["model.layers.1.mlp.up_proj.weight"] = torch.zeros(47, 32)


def to_integers(tensors: dict[str, Tensor]) -> None:
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.int8)


def with_value(value: float) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors["model.norm.weight"][7] = value

    return change


def to_fp8(tensors: dict[str, Tensor]) -> None:
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.float8_e4m3fn)


BROKEN: dict[str, tuple[Callable[[Path], Any], str]] = {
    "no_config": (lambda path: (path / "config.json").unlink(), r"config\.json: is missing"),
    "config_not_json": (
        lambda path: (path / "config.json").write_text('{"a": '),
        r"config\.json: cannot be read as JSON",
    ),
    "config_not_object": (lambda path: (path / "config.json").write_text("[]"), r"does not contain a JSON object"),
    "unknown_model_type": (lambda path: edit_config(path, model_type="llama99"), r"model_type 'llama99' is unknown"),
    "config_value": (lambda path: edit_config(path, num_attention_heads="many"), r"config\.json: transformers cannot"),
    "quantized": (
        lambda path: edit_config(path, quantization_config={"quant_method": "gptq", "bits": 4}),
        r"the model is quantized \(gptq\)",
    ),
    "fp8_tensor": (lambda path: edit_tensors(path, to_fp8), r"model\.norm\.weight has dtype F8_E4M3"),
    "no_weights": (lambda path: (path / "model.safetensors").unlink(), r"has no weights"),
    "bin_only": (to_bin, r"only pickle files.*save_pretrained"),
    "truncated": (truncate, r"model\.safetensors: has \d+ bytes, but its header describes \d+"),
    "empty_file": (lambda path: (path / "model.safetensors").write_bytes(b""), r"is not a safetensors file"),
    "garbage": (lambda path: (path / "model.safetensors").write_bytes(b"\x20" + b"\0" * 60), r"no valid safetensors"),
    "missing_tensor": (
        lambda path: edit_tensors(path, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight")),
        r"1 tensors of LlamaForCausalLM are missing: model\.layers\.1\.mlp\.up_proj\.weight",
    ),
    "unexpected_tensor": (lambda path: edit_config(path, num_hidden_layers=2), r"9 tensors have no place.*layers\.2\."),
    "wrong_shape": (
        lambda path: edit_tensors(path, wrong_shape),
        r"model\.layers\.1\.mlp\.up_proj\.weight the shape \[47, 32\], but config\.json requires \[48, 32\]",
    ),
    "integers": (lambda path: edit_tensors(path, to_integers), r"model\.norm\.weight has dtype int8"),
    "not_a_number": (
        lambda path: edit_tensors(path, with_value(math.nan)),
        r"norm\.weight contains infinite values or NaN",
    ),
    "infinite": (
        lambda path: edit_tensors(path, with_value(math.inf)),
        r"norm\.weight contains infinite values or NaN",
    ),
    "minus infinite": (
        lambda path: edit_tensors(path, with_value(-math.inf)),
        r"norm\.weight contains infinite values",
    ),
}


@pytest.mark.parametrize("case", list(BROKEN))
def test_a_broken_folder_gives_one_clear_error(case: str, tmp_path: Path) -> None:
    build_model("llama").save_pretrained(tmp_path)
    damage, message = BROKEN[case]
    damage(tmp_path)
    with pytest.raises(ModelFolderError, match=message) as raised:
        load(tmp_path)
    assert str(tmp_path) in str(raised.value)
    assert raised.value.path.is_relative_to(tmp_path)


@pytest.fixture
def shards(tmp_path: Path) -> Path:
    build_model("llama").save_pretrained(tmp_path, max_shard_size="20KB")
    return tmp_path


def test_a_missing_shard_is_named(shards: Path) -> None:
    victim = sorted(shards.glob("*.safetensors"))[2]
    victim.unlink()
    with pytest.raises(ModelFolderError, match=rf"1 of \d+ shards are missing: {victim.name}"):
        load(shards)


def test_a_missing_index_is_named(shards: Path) -> None:
    (shards / "model.safetensors.index.json").unlink()
    with pytest.raises(ModelFolderError, match=r"but no model\.safetensors\.index\.json"):
        load(shards)


def test_an_index_cannot_point_outside_of_the_folder(shards: Path) -> None:
    index = shards / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "../model.safetensors"}}))
    with pytest.raises(ModelFolderError, match="outside of the folder"):
        load(shards)


def test_tensor_listed_only_in_the_index_is_named(shards: Path) -> None:
    index = shards / "model.safetensors.index.json"
    values = json.loads(index.read_text())
    values["weight_map"]["ghost"] = sorted(shards.glob("*.safetensors"))[0].name
    index.write_text(json.dumps(values))
    with pytest.raises(ModelFolderError, match="1 tensors that no shard contains: ghost"):
        load(shards)


def test_experts_of_different_shapes_are_refused(tmp_path: Path) -> None:
    build_model("mixtral").save_pretrained(tmp_path)
    names = [name for name in ModelFolder(tmp_path).records if "layers.0" in name and "experts.1.w1" in name]
    edit_tensors(tmp_path, lambda tensors: tensors.update({name: torch.zeros(3, 3) for name in names}))
    with pytest.raises(ModelFolderError, match=r"cannot make model\.layers\.0\.mlp\.experts\.gate_up_proj"):
        load(tmp_path)


def test_missing_model_folder_gives_a_specific_error(tmp_path: Path) -> None:
    with pytest.raises(ModelFolderError, match="does not exist"):
        read_config(tmp_path / "absent")


def test_loaded_folder_matches_transformers(saved: tuple[PreTrainedModel, Path]) -> None:
    _, path = saved
    theirs = dict(AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).named_parameters())
    ours = load(path).named()
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
