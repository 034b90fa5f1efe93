"""Exports: transformers loads bit-identical weights, and a failed export leaves no incomplete folder."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from megatrain.base.layout import UnitLayout
from megatrain.converters import spec
from megatrain.converters.adapters import export_adapter
from megatrain.models import export as export_module
from megatrain.models import export as shards_module
from megatrain.models import folder as folder_module
from megatrain.models.converter import ReadMaster
from megatrain.models.export import RECORD_FILE, ExportError, ShardWriter, export_model, plan_shards
from megatrain.models.folder import ModelFolder, read_config
from megatrain.models.load import WeightLoader
from megatrain.models.table import LoraConfig
from oracles.families import shrunk_config
from tests.megatrain.models.tiny import FAMILIES, Weights, build_graph, build_model, build_model_of


def load(path: Path) -> Weights:
    weights = Weights(build_graph(read_config(path)))
    loader = WeightLoader(path, weights.graph.model)
    weights.fill(loader.fill)
    loader.load_buffers()
    return weights


@pytest.fixture
def weights(tmp_path: Path) -> Weights:
    """Return the weights of an untied Llama in flat blocks."""
    build_model("llama").save_pretrained(tmp_path / "source")
    return load(tmp_path / "source")


def reopened(path: Path, dtype: torch.dtype) -> dict[str, Tensor]:
    model, report = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, output_loading_info=True)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    return dict(model.state_dict())


def tensors_in(path: Path) -> dict[str, Tensor]:
    return {name: value for file in path.glob("*.safetensors") for name, value in load_file(file).items()}


@pytest.mark.parametrize("max_shard_nbytes", [10**9, 20_000], ids=["one_file", "shards"])
def test_transformers_loads_bit_identical_weights(
    saved: tuple[PreTrainedModel, Path], tmp_path: Path, max_shard_nbytes: int
) -> None:
    model, path = saved
    weights = load(path)
    out = export_model(
        weights.graph, weights.source, tmp_path / "out", dtype=torch.float32, max_shard_nbytes=max_shard_nbytes
    )
    found = reopened(out, torch.float32)
    expected = model.state_dict()
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name
    theirs, ours = tensors_in(path), tensors_in(out)
    assert ours.keys() == theirs.keys(), "transformers writes these names"
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    assert (out / "model.safetensors").exists() == (max_shard_nbytes == 10**9)
    assert weights.most_open == 1
    assert not weights.open_now


def test_model_built_without_a_folder_is_exported(family: str, tmp_path: Path) -> None:
    model = build_model(family)
    weights = Weights(build_graph(model.config))
    named = dict(model.named_parameters(remove_duplicate=False))
    weights.fill(lambda _, views: [view.copy_(named[name].detach()) for name, view in views.items()] and None)
    persistent = {name: value for name, value in model.state_dict().items() if name not in named}
    for name, value in persistent.items():
        module_name, _, leaf = name.rpartition(".")
        weights.graph.model.get_submodule(module_name)._buffers[leaf] = value
    out = export_model(weights.graph, weights.source, tmp_path / "out", dtype=torch.float32)
    found = reopened(out, torch.float32)
    assert all(torch.equal(found[name], value) for name, value in model.state_dict().items())


def checkpoint_of(name: str, folder: Path) -> PreTrainedModel:
    """Save and return a model of the family. Its fp32 weights cannot be represented exactly in bf16."""
    config = shrunk_config(name) if name in KEEPS_FP32 else AutoConfig.for_model(FAMILIES[name][0], **FAMILIES[name][1])
    model = build_model_of(config)
    model.save_pretrained(folder)
    return model


#: Families with parameters that transformers keeps in fp32, and parts of the names of these parameters.
KEEPS_FP32 = {
    "bailing_hybrid": ("A_log", "conv1d", "dt_bias"),
    "ernie4_5_moe": ("gate.weight", "moe_statics"),
}


@pytest.mark.parametrize("name", ["llama_tied", "mixtral", "deepseek_v3", *KEEPS_FP32])
def test_bfloat16_export_matches_transformers(name: str, tmp_path: Path) -> None:
    """Masters are rounded to bf16, except for the parameters and buffers that transformers keeps in fp32."""
    source, out = tmp_path / "source", tmp_path / "out"
    parameters = dict(checkpoint_of(name, source).named_parameters(remove_duplicate=False))
    weights = load(source)
    export_model(weights.graph, weights.source, out)
    assert json.loads((out / "config.json").read_text())["dtype"] == "bfloat16"
    expected, found = reopened(source, torch.bfloat16), reopened(out, torch.bfloat16)
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert found[key].dtype == value.dtype and torch.equal(found[key], value), key
    kept = {key for key, value in expected.items() if key in parameters and value.dtype == torch.float32}
    assert bool(kept) == (name in KEEPS_FP32)
    assert all(any(part in key for part in KEEPS_FP32[name]) for key in kept)
    assert all(any(part in key for key in kept) for part in KEEPS_FP32.get(name, ())), "each belongs to a parameter"
    assert not any(torch.equal(expected[key], expected[key].bfloat16().float()) for key in kept)
    assert len(kept) < len(parameters)
    in_file = {value.dtype for key, value in tensors_in(out).items() if key in parameters and key not in kept}
    assert in_file == {torch.bfloat16}


def test_our_own_load_reads_our_export(saved: tuple[PreTrainedModel, Path], tmp_path: Path) -> None:
    _, path = saved
    weights = load(path)
    again = load(export_model(weights.graph, weights.source, tmp_path / "out", dtype=torch.float32))
    for name, block in weights.blocks.items():
        assert torch.equal(again.blocks[name], block), name


def test_tied_weights_are_stored_once(tmp_path: Path) -> None:
    build_model("llama_tied").save_pretrained(tmp_path / "source")
    weights = load(tmp_path / "source")
    out = export_model(weights.graph, weights.source, tmp_path / "out")
    assert "lm_head.weight" not in tensors_in(out)
    assert "model.embed_tokens.weight" in tensors_in(out)


def test_index_and_export_record_match_the_files(weights: Weights, tmp_path: Path) -> None:
    out = export_model(weights.graph, weights.source, tmp_path / "out", max_shard_nbytes=20_000)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    total = 0
    for file in out.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            keys = list(opened.keys())
            nbytes = sum(opened.get_tensor(key).nbytes for key in keys)
        assert 0 < nbytes <= 20_000
        assert all(index["weight_map"][key] == file.name for key in keys)
        total += nbytes
    assert index["metadata"]["total_size"] == total
    record = json.loads((out / RECORD_FILE).read_text())
    assert record["xxh3_64"].keys() == index["weight_map"].keys()
    assert set(record["files"]) | {RECORD_FILE} == {path.name for path in out.iterdir()}


def test_tokenizer_and_generation_config_come_along(weights: Weights, tmp_path: Path) -> None:
    example = Path(__file__).parents[3] / "examples" / "quickstart" / "model"
    source = tmp_path / "source"
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (source / name).write_bytes((example / name).read_bytes())
    (source / "generation_config.json").write_text('{"temperature": 0.25, "do_sample": true}')
    (source / "LICENSE").write_text("free")
    (source / "pytorch_model.bin").write_text("no")
    copied = export_model(weights.graph, weights.source, tmp_path / "copied", copy_from=source)
    assert json.loads((copied / "generation_config.json").read_text())["temperature"] == 0.25
    assert (copied / "LICENSE").read_text() == "free"
    assert not (copied / "pytorch_model.bin").exists()
    tokenizer = AutoTokenizer.from_pretrained(example)
    written = export_model(weights.graph, weights.source, tmp_path / "written", tokenizer=tokenizer)
    text = "Call me Ishmael."
    assert (
        AutoTokenizer.from_pretrained(written)(text) == AutoTokenizer.from_pretrained(copied)(text) == tokenizer(text)
    )
    assert (written / "generation_config.json").exists()


def test_all_chat_templates_of_a_tokenizer_are_exported(weights: Weights, tmp_path: Path) -> None:
    """Transformers stores all templates except the default one in a folder, which an export writes or copies."""
    tokenizer = AutoTokenizer.from_pretrained(Path(__file__).parents[3] / "examples" / "quickstart" / "model")
    tokenizer.chat_template = {"default": "{{ messages[0]['content'] }}", "tool_use": "tools"}
    written = export_model(weights.graph, weights.source, tmp_path / "written", tokenizer=tokenizer)
    copied = export_model(weights.graph, weights.source, tmp_path / "copied", copy_from=written)
    for folder in (written, copied):
        assert AutoTokenizer.from_pretrained(folder).chat_template == tokenizer.chat_template


def test_export_converts_tensors_in_pieces(weights: Weights, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    largest = 0
    plain_to = Tensor.to

    def counting_to(self: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        nonlocal largest
        result: Tensor = plain_to(self, *args, **kwargs)
        largest = max(largest, result.nbytes)
        return result

    monkeypatch.setattr(shards_module, "PIECE_BYTES", 512)
    monkeypatch.setattr(folder_module, "PIECE_BYTES", 512)
    monkeypatch.setattr(Tensor, "to", counting_to)
    out = export_model(weights.graph, weights.source, tmp_path / "out")
    assert 0 < largest <= 512
    monkeypatch.undo()
    assert torch.equal(tensors_in(out)["model.norm.weight"], weights.named()["model.norm.weight"].bfloat16())


def test_an_earlier_export_is_replaced_and_nothing_is_left_over(weights: Weights, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()  # an empty folder is fine
    export_model(weights.graph, weights.source, out, max_shard_nbytes=20_000)
    weights.blocks["model.norm"] += 1
    export_model(weights.graph, weights.source, out)
    assert not list(out.glob("model-*"))
    assert torch.equal(tensors_in(out)["model.norm.weight"], weights.named()["model.norm.weight"].bfloat16())
    assert {path.name for path in tmp_path.iterdir()} == {"source", "out"}


def test_foreign_export_folder_is_refused(weights: Weights, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="nor an export of this program"):
        export_model(weights.graph, weights.source, tmp_path / "source")
    out = export_model(weights.graph, weights.source, tmp_path / "out")
    (out / "notes.txt").write_text("mine")
    with pytest.raises(ExportError, match=r"did not write: notes\.txt"):
        export_model(weights.graph, weights.source, out)
    (tmp_path / "file").write_text("")
    with pytest.raises(ExportError, match="is a file"):
        export_model(weights.graph, weights.source, tmp_path / "file")
    assert (out / "notes.txt").read_text() == "mine"


def test_too_little_space_error_states_the_sizes(
    weights: Weights, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export_module.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1000})())
    with pytest.raises(ExportError, match=r"need \d+ bytes .* has 1000 \(1000 B\) free\. Free .* or use another"):
        export_model(weights.graph, weights.source, tmp_path / "out")
    assert {path.name for path in tmp_path.iterdir()} == {"source"}


def test_a_failure_on_the_way_leaves_the_earlier_export(weights: Weights, tmp_path: Path) -> None:
    out = export_model(weights.graph, weights.source, tmp_path / "out")
    before = {path.name: path.read_bytes() for path in out.iterdir()}

    @contextmanager
    def failing(layout: UnitLayout) -> Iterator[ReadMaster]:
        if "layers.2" in layout.name:
            raise OSError(28, "No space left on device")
        with weights.source(layout) as read:
            yield read

    with pytest.raises(ExportError, match=r"was not written: .*No space left"):
        export_model(weights.graph, failing, out)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert {path.name for path in tmp_path.iterdir()} == {"source", "out"}


def test_leftovers_of_a_killed_process_are_removed(weights: Weights, tmp_path: Path) -> None:
    dead = tmp_path / ".out.partial-999999999"
    dead.mkdir()
    (dead / "model.safetensors").write_bytes(b"half")
    export_model(weights.graph, weights.source, tmp_path / "out")
    assert not dead.exists()


def test_flipped_bit_is_found_before_the_export_is_renamed(
    weights: Weights, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish = ShardWriter.finish

    def finish_and_flip(self: ShardWriter) -> None:
        finish(self)
        (file,) = next(iter(tmp_path.glob(".out.partial-*"))).glob("*.safetensors")
        data = bytearray(file.read_bytes())
        data[-5] ^= 4
        file.write_bytes(data)

    monkeypatch.setattr(ShardWriter, "finish", finish_and_flip)
    with pytest.raises(ExportError, match="reads back with checksum"):
        export_model(weights.graph, weights.source, tmp_path / "out")
    lora: Any = spec.build_graph(tmp_path / "source", lora=LoraConfig(r=4, target_modules=("q_proj",)))
    with pytest.raises(ExportError, match="reads back with checksum"):
        export_adapter(lora, Weights(lora).source, tmp_path / "out", base_model="base")
    assert not (tmp_path / "out").exists()


def test_wide_tensors_come_first_so_that_all_are_aligned(tmp_path: Path) -> None:
    tensors = {"odd": torch.arange(3.0).bfloat16(), "wide": torch.arange(5.0), "scalar": torch.tensor(2.0)}
    on_meta = {name: value.to("meta") for name, value in tensors.items()}
    (shard,) = plan_shards(on_meta, 10**6)
    assert all(offset % tensors[name].dtype.itemsize == 0 for name, offset in shard.offsets.items())
    writer = ShardWriter(tmp_path, [shard], on_meta)
    for name, value in tensors.items():
        writer.write(name, lambda start, stop, value=value: value.view(-1)[start:stop])
    writer.finish()
    (tmp_path / "config.json").write_text("{}")
    writer.verify()
    found = load_file(tmp_path / "model.safetensors")
    assert all(torch.equal(found[name], value) for name, value in tensors.items())
    assert list(ModelFolder(tmp_path).records) == ["wide", "scalar", "odd"]


def test_file_of_exactly_the_maximum_size_is_allowed() -> None:
    tensors = {name: torch.zeros(4, device="meta") for name in "abcd"}
    assert [list(shard.offsets) for shard in plan_shards(tensors, 32)] == [["a", "b"], ["c", "d"]]
    assert [list(shard.offsets) for shard in plan_shards(tensors, 31)] == [["a"], ["b"], ["c"], ["d"]]


def test_failed_rename_keeps_the_earlier_export(
    weights: Weights, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = export_model(weights.graph, weights.source, tmp_path / "out")
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    rename = os.rename

    def refuse(source: Any, target: Any) -> None:
        if ".partial-" in str(source):
            raise OSError(errno.EIO, "the drive is gone")
        rename(source, target)

    weights.blocks["model.norm"] += 1
    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", refuse)
        with pytest.raises(ExportError, match="was not written"):
            export_model(weights.graph, weights.source, out)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == before
    assert {path.name for path in tmp_path.iterdir()} == {"source", "out"}


def test_all_families_are_covered() -> None:
    assert {"llama", "gpt2", "qwen3_moe", "mixtral", "gpt_oss", "deepseek_v3", "llama4_text", "gemma3_text"} <= set(
        FAMILIES
    )
