"""Tensors and facts are read from model folders exactly, and each unusable file is explained."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import xxhash
from safetensors.torch import save_file

from megatrain.base.facts import ModelFacts
from megatrain.models import folder as folder_module
from megatrain.models.folder import (
    ModelFolder,
    ModelFolderError,
    TensorFile,
    TensorRecord,
    join_names,
    model_facts,
    read_config,
    read_config_json,
    weight_file_bytes,
)

#: The data of a file starts after 8 bytes and the header. The tensors are sorted by element size, then by name.
TENSORS = {
    "a": torch.arange(15.0).reshape(3, 5),
    "b": torch.tensor([1.0, -2.0, 3.5, 0.0], dtype=torch.bfloat16),
    "c": torch.tensor(7, dtype=torch.int64),
    "d": torch.empty(0, 3),
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text('{"model_type": "llama", "max_position_embeddings": 77}')
    save_file(TENSORS, tmp_path / "model.safetensors", {"format": "pt"})
    return tmp_path


def write_file(path: Path, header: Any, data: bytes = b"") -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(text)) + text + data)


def test_records_state_where_each_tensor_is(folder: Path) -> None:
    path = folder / "model.safetensors"
    end = path.stat().st_size
    start = end - 8 - 60 - 8
    assert ModelFolder(folder).records == {
        "a": TensorRecord("a", path, torch.float32, (3, 5), start + 8, 60),
        "b": TensorRecord("b", path, torch.bfloat16, (4,), start + 68, 8),
        "c": TensorRecord("c", path, torch.int64, (), start, 8),
        "d": TensorRecord("d", path, torch.float32, (0, 3), start + 68, 0),
    }
    assert TensorFile(path).records == ModelFolder(folder).file_records
    assert [ModelFolder(folder).records[name].numel for name in "abcd"] == [15, 4, 1, 0]


def test_every_range_of_a_tensor_can_be_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_module, "PIECE_BYTES", 26)  # six fp32 elements
    reader = ModelFolder(folder)
    assert [(start, piece.tolist()) for start, piece in reader.pieces("a")] == [
        (0, [0.0, 1.0, 2.0, 3.0, 4.0, 5.0]),
        (6, [6.0, 7.0, 8.0, 9.0, 10.0, 11.0]),
        (12, [12.0, 13.0, 14.0]),
    ]
    assert reader.largest_piece_nbytes == 24
    assert list(reader.pieces("d")) == []
    assert [(start, piece.tolist()) for start, piece in reader.pieces("b")] == [(0, [1.0, -2.0, 3.5, 0.0])]
    assert reader.largest_piece_nbytes == 24
    out = torch.empty(3)
    assert reader.read_span("a", 4, 3, out) is out
    assert out.tolist() == [4.0, 5.0, 6.0] and reader.largest_piece_nbytes == 24
    for unsuitable in (
        None,
        torch.empty(9, dtype=torch.float64),
        torch.empty(9, 2)[:, 0],
        torch.empty(9, device="meta"),
    ):
        found = reader.read_span("a", 5, 9, unsuitable)
        assert found is not unsuitable
        assert found.tolist() == [5.0, 6.0, 7.0, 8.0, 9.0, 10.0, 11.0, 12.0, 13.0]
    assert reader.largest_piece_nbytes == 36
    assert reader.read_span("b", 1, 2).tolist() == [-2.0, 3.5]
    for name, tensor in TENSORS.items():
        found = reader.read(name)
        assert found.dtype == tensor.dtype and torch.equal(found, tensor)
    assert reader.largest_piece_nbytes == 60
    assert bytes(reader.read_stored("a", 8, 4).tolist()) == struct.pack("<f", 2.0)


def test_nonfinite_tensors_are_found_in_any_piece(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_module, "PIECE_BYTES", 8)
    tensors = {name: torch.arange(5.0) for name in "abcd"} | {"n": torch.arange(3)}
    tensors["b"][4], tensors["c"][1], tensors["d"][2] = float("nan"), float("-inf"), float("inf")
    save_file(tensors, tmp_path / "x.safetensors")
    progress: list[tuple[int, int]] = []
    reader = TensorFile(tmp_path / "x.safetensors")
    assert reader.find_nonfinite("abncd", lambda done, total: progress.append((done, total))) == ["b", "c", "d"]
    assert progress == [(done, 80) for done in (8, 16, 20, 28, 36, 40, 48, 56, 64)]
    assert reader.find_nonfinite("an") == []
    eight_bits = {"e": torch.tensor([1.0, float("nan")]).to(torch.float8_e4m3fn), "f": torch.ones(2, dtype=torch.int8)}
    save_file(eight_bits, tmp_path / "y.safetensors")
    assert TensorFile(tmp_path / "y.safetensors").find_nonfinite("ef") == ["e"]


def test_fingerprint_covers_headers_and_samples(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    headers = b"a F32 [3, 5]\nb BF16 [4]\nc I64 []\nd F32 [0, 3]\n"
    bytes_of = {name: tensor.view(-1).view(torch.uint8).numpy().tobytes() for name, tensor in TENSORS.items()}
    assert ModelFolder(folder).fingerprint() == xxhash.xxh3_64(headers + b"".join(bytes_of.values())).hexdigest()
    monkeypatch.setattr(folder_module, "_SAMPLE_BYTES", 6)
    monkeypatch.setattr(folder_module, "_NUM_SAMPLES", 2)  # every second tensor: a and c
    expected = xxhash.xxh3_64(headers + bytes_of["a"][27:33] + bytes_of["c"][1:7]).hexdigest()
    assert ModelFolder(folder).fingerprint() == expected
    monkeypatch.setattr(folder_module, "_NUM_SAMPLES", 3)
    assert ModelFolder(folder).fingerprint() == expected


ENTRY = {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}
DAMAGED = ". The file is damaged or truncated: copy or download it again"
BAD_FILES: dict[str, tuple[Callable[[Path], object], str]] = {
    "pointer": (
        lambda path: path.write_text("version https://git-lfs.github.com/spec/v1\n"),
        "is a Git LFS pointer, not the file. Fetch the file with `git lfs pull`",
    ),
    "short": (lambda path: path.write_bytes(b"1234567"), f"is not a safetensors file{DAMAGED}"),
    "huge header": (
        lambda path: path.write_bytes(struct.pack("<Q", 100_000_001)),
        f"is not a safetensors file{DAMAGED}",
    ),
    "list": (lambda path: write_file(path, []), f"has no valid safetensors header (not an object){DAMAGED}"),
    "no dtype": (
        lambda path: write_file(path, {"x": {"shape": []}}),
        f"has no valid safetensors header ('dtype'){DAMAGED}",
    ),
    "size": (
        lambda path: write_file(path, {"x": {**ENTRY, "data_offsets": [0, 9]}}, bytes(9)),
        f"has no valid safetensors header (tensor x has shape [2] and 9 bytes){DAMAGED}",
    ),
    "negative": (
        lambda path: write_file(path, {"x": {**ENTRY, "data_offsets": [-8, 0]}}),
        f"has no valid safetensors header (tensor x has shape [2] and 8 bytes){DAMAGED}",
    ),
    "negative shape": (
        lambda path: write_file(path, {"x": {**ENTRY, "shape": [-1, -2]}}, bytes(8)),
        f"has no valid safetensors header (tensor x has shape [-1, -2] and 8 bytes){DAMAGED}",
    ),
    "gap": (
        lambda path: write_file(path, {"x": ENTRY, "y": {**ENTRY, "data_offsets": [9, 17]}}, bytes(17)),
        f"tensor y does not start where the previous one ends{DAMAGED}",
    ),
    "overlap": (
        lambda path: write_file(path, {"x": ENTRY, "y": {**ENTRY, "data_offsets": [4, 12]}}, bytes(12)),
        f"tensor y does not start where the previous one ends{DAMAGED}",
    ),
    "short data": (
        lambda path: write_file(path, b'{"x":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}}', bytes(7)),
        f"has 69 bytes, but its header describes 70{DAMAGED}",
    ),
    "dtype": (
        lambda path: write_file(path, {"x": {**ENTRY, "dtype": "F4"}}, bytes(8)),
        "tensor x has dtype F4, which is not supported (a quantized model?). Use the original model in float32, "
        "bfloat16 or float16",
    ),
}


@pytest.mark.parametrize("name", BAD_FILES)
def test_a_damaged_file_is_explained(tmp_path: Path, name: str) -> None:
    path = tmp_path / "x.safetensors"
    damage, message = BAD_FILES[name]
    damage(path)
    with pytest.raises(ModelFolderError) as refused:
        TensorFile(path)
    assert str(refused.value) == str(ModelFolderError(path, message))


def test_tensors_of_one_file_may_be_empty_and_in_any_order(tmp_path: Path) -> None:
    header = {
        "__metadata__": {"format": "pt"},
        "y": {**ENTRY, "data_offsets": [8, 16]},
        "empty": {**ENTRY, "shape": [0], "data_offsets": [8, 8]},
        "x": ENTRY,
    }
    write_file(tmp_path / "x.safetensors", header, struct.pack("<4f", 1, 2, 3, 4))
    reader = TensorFile(tmp_path / "x.safetensors")
    assert {name: reader.read(name).tolist() for name in reader.records} == {
        "y": [3.0, 4.0],
        "empty": [],
        "x": [1.0, 2.0],
    }


def test_a_file_that_shrinks_while_it_is_read_is_named(folder: Path) -> None:
    reader = ModelFolder(folder)
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(ModelFolderError) as refused:
        reader.read("a")
    assert str(refused.value) == str(ModelFolderError(path, "ends inside tensor a. Copy it again"))
    path.unlink()
    with pytest.raises(ModelFolderError, match=r"model.safetensors.*cannot be read: .*No such file"):
        reader.read("a")


def damage_config(**values: Any) -> Callable[[Path], object]:
    return lambda folder: (folder / "config.json").write_text(json.dumps({"model_type": "llama", **values}))


def without_weights(*names: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        (folder / "model.safetensors").unlink()
        for name in names:
            (folder / name).write_text("{}")

    return change


def with_index(values: Any, *names: str) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        without_weights()(folder)
        for name in names:
            save_file({name: torch.ones(2)}, folder / name)
        (folder / "model.safetensors.index.json").write_text(json.dumps(values))

    return change


AGAIN = "Copy or download the model again"
PLAIN = (
    "De-quantize it with transformers (from_pretrained with dequantize=True, then save_pretrained), or use the "
    "original model"
)
METHODS = ", ".join(folder_module.METHODS.values())
#: How to damage a folder, the path that its error names, and the message.
BAD_FOLDERS: dict[str, tuple[Callable[[Path], object], str, str]] = {
    "size": (
        damage_config(hidden_size=0, vocab_size=-1),
        "config.json",
        "hidden_size = 0 is not a valid size. Copy or download it again",
    ),
    "quantized": (
        damage_config(quantization_config={"quant_method": "gguf"}),
        "config.json",
        f"the model is quantized (gguf), which is not supported; with [lora], {METHODS} are supported. {PLAIN}",
    ),
    "quantized text": (
        damage_config(text_config={"quantization_config": "x"}),
        "config.json",
        "the model is quantized (unknown method), which is not supported; with [lora], "
        f"{METHODS} are supported. {PLAIN}",
    ),
    "not an object": (
        lambda folder: (folder / "config.json").write_text("[]"),
        "config.json",
        "does not contain a JSON object. Copy or download it again",
    ),
    "no config": (
        lambda folder: (folder / "config.json").unlink(),
        "config.json",
        "is missing. Use a Hugging Face model folder",
    ),
    "no weights": (
        without_weights(),
        "",
        f"has no weights: neither model.safetensors nor model.safetensors.index.json. {AGAIN}",
    ),
    "no index": (
        without_weights("b.safetensors", "a.safetensors"),
        "",
        "has a.safetensors, b.safetensors but no model.safetensors.index.json. Copy or download it again",
    ),
    **{
        name: (
            without_weights(name),
            "",
            "has only pickle files, but this program reads only safetensors. Convert them with transformers: "
            "AutoModelForCausalLM.from_pretrained(FOLDER, dtype='auto').save_pretrained(NEW_FOLDER)",
        )
        for name in ("x.bin", "x.pt", "x.pth")
    },
    "gguf": (
        without_weights("x.gguf"),
        "",
        "is a GGUF model. Use the Hugging Face folder of the original model",
    ),
    "adapter": (
        without_weights("adapter_config.json"),
        "",
        "contains an adapter, not a model. Use the folder of its base model; to continue training the adapter, also "
        "set lora.adapter_name_or_path to its folder",
    ),
    "no map": (
        with_index({"weight_map": {}}),
        "model.safetensors.index.json",
        "has no weight_map. Copy or download it again",
    ),
    "outside": (
        with_index({"weight_map": {"x": "../a", "y": "b/c", "z": "d"}}),
        "model.safetensors.index.json",
        f"lists files outside of the folder: ../a, b/c. {AGAIN}",
    ),
    "missing shards": (
        with_index({"weight_map": {"x": "a", "y": "b", "z": "c"}}, "b"),
        "",
        "2 of 3 shards are missing: a, c. Copy or download them",
    ),
    "missing tensors": (
        with_index({"weight_map": {"b": "b", "y": "b", "x": "b"}}, "b"),
        "model.safetensors.index.json",
        f"lists 2 tensors that no shard contains: x, y. {AGAIN}",
    ),
    "fp8": (
        lambda folder: save_file({"x": torch.ones(2).to(torch.float8_e5m2)}, folder / "model.safetensors"),
        "model.safetensors",
        "tensor x has dtype F8_E5M2, but config.json does not say how it is quantized. Use the original model in "
        "float32, bfloat16 or float16",
    ),
}


@pytest.mark.parametrize("name", BAD_FOLDERS)
def test_an_unusable_folder_is_explained(folder: Path, name: str) -> None:
    damage, place, message = BAD_FOLDERS[name]
    damage(folder)
    with pytest.raises(ModelFolderError) as refused:
        read_config(folder) and ModelFolder(folder)
    assert str(refused.value) == str(ModelFolderError(folder / place, message))


def test_shards_are_read_as_one_folder(folder: Path) -> None:
    with_index({"weight_map": {"s2": "s2", "s1": "s1"}}, "s1", "s2")(folder)
    records = ModelFolder(folder).records
    assert {name: record.file for name, record in records.items()} == {"s1": folder / "s1", "s2": folder / "s2"}


def test_a_wrong_path_is_explained(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(folder)
    use = "Use the folder that contains config.json and *.safetensors"
    hub = ", or the id of a model on the hub, as OWNER/NAME"
    for path, message in (
        (folder / "none", f"does not exist. {use}"),
        (folder / "config.json", f"is not a folder. {use}"),
        (Path("none"), f"does not exist. {use}{hub}"),
        (Path("config.json"), f"is not a folder. {use}{hub}"),
    ):
        with pytest.raises(ModelFolderError) as refused:
            read_config_json(path)
        assert str(refused.value) == str(ModelFolderError(path, message))
    for place in ("snapshots/abc", "deep"):
        (folder / "outer" / place).mkdir(parents=True)
        (folder / "outer" / place / "config.json").write_text("{}")
        with pytest.raises(ModelFolderError) as refused:
            read_config_json(folder / "outer")
        message = f"is missing. Use {folder}/outer/{place}"
        assert str(refused.value) == str(ModelFolderError(folder / "outer/config.json", message))


@pytest.mark.parametrize(
    ("text", "base"),
    [
        ('{"base_model_name_or_path": "Qwen/Qwen3-8B"}', "its base model (Qwen/Qwen3-8B)"),
        ('{"base_model_name_or_path": 5}', "its base model"),
        ("[", "its base model"),
    ],
)
def test_folder_of_an_adapter_names_its_base_model(tmp_path: Path, text: str, base: str) -> None:
    (tmp_path / "adapter_config.json").write_text(text)
    with pytest.raises(ModelFolderError) as refused:
        read_config_json(tmp_path)
    message = (
        f"contains an adapter, not a model. Use the folder of {base}; to continue training the adapter, also set "
        "lora.adapter_name_or_path to its folder"
    )
    assert str(refused.value) == str(ModelFolderError(tmp_path, message))


def test_facts_about_a_model_are_read_from_its_folder(folder: Path) -> None:
    assert model_facts("m", folder) == ModelFacts("m", 19, 77)
    for values, positions in (
        ({"n_positions": 9}, 9),
        ({"max_position_embeddings": 1}, 0),
        ({}, 0),
        ({"n_positions": "9"}, 0),
    ):
        (folder / "config.json").write_text(json.dumps(values))
        assert model_facts("m", folder) == ModelFacts("m", 19, positions)
    (folder / "config.json").write_text("[")
    assert model_facts("m", folder) == model_facts("m", None) == model_facts("m", folder / "none") == ModelFacts("m")
    size = (folder / "model.safetensors").stat().st_size
    save_file({"x": torch.ones(9)}, folder / "x.safetensors")
    assert weight_file_bytes(str(folder)) == size + (folder / "x.safetensors").stat().st_size
    assert weight_file_bytes(str(folder / "none")) == 0


def test_long_lists_of_names_are_shortened() -> None:
    assert join_names([f"n{number}" for number in range(6)]) == "n0, n1, n2, n3, n4, n5"
    assert join_names([f"n{number}" for number in range(8)]) == "n0, n1, n2, n3, n4, n5 and 2 more"
    assert join_names(["a", "b", "c"], 2) == "a, b and 1 more"
