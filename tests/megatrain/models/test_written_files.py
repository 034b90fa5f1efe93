"""Planned weight files, records of exports, and refusals of targets are compared as a whole."""

from __future__ import annotations

import json
import os
import struct
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from megatrain.models import export as export_module
from megatrain.models import folder as folder_module
from megatrain.models.export import (
    DamagedShardError,
    ExportError,
    ExportTargetError,
    ShardPlan,
    ShardWriter,
    atomic_folder,
    check_target,
    copy_tokenizer,
    exported_step,
    plan_file,
    plan_shards,
    write_record,
)
from megatrain.models.folder import TensorFile
from tiered import checksum


def meta(**shapes: tuple[tuple[int, ...], torch.dtype]) -> dict[str, Tensor]:
    return {name: torch.empty(shape, dtype=dtype, device="meta") for name, (shape, dtype) in shapes.items()}


def test_wide_dtypes_come_first_in_a_planned_file() -> None:
    tensors = meta(a=((3,), torch.bfloat16), b=((2, 2), torch.float32), c=((1,), torch.float32), d=((5,), torch.int8))
    header = {
        "__metadata__": {"format": "pt"},
        "b": {"dtype": "F32", "shape": [2, 2], "data_offsets": [0, 16]},
        "c": {"dtype": "F32", "shape": [1], "data_offsets": [16, 20]},
        "a": {"dtype": "BF16", "shape": [3], "data_offsets": [20, 26]},
    }
    plan = plan_file("x.safetensors", ["a", "b", "c"], tensors)
    text = json.dumps(header, separators=(",", ":")).encode()
    size = -(-len(text) // 8) * 8
    assert plan == ShardPlan(
        "x.safetensors",
        struct.pack("<Q", size) + text.ljust(size),
        {"b": 8 + size, "c": 24 + size, "a": 28 + size},
        34 + size,
    )


def test_tensors_fill_files_in_order() -> None:
    sizes = {"a": 4, "b": 6, "c": 1, "d": 30, "e": 10, "f": 1}
    tensors = meta(**{name: ((size,), torch.int8) for name, size in sizes.items()})
    plans = plan_shards(tensors, 10)
    assert [(plan.file_name, list(plan.offsets)) for plan in plans] == [
        ("model-00001-of-00005.safetensors", ["a", "b"]),
        ("model-00002-of-00005.safetensors", ["c"]),
        ("model-00003-of-00005.safetensors", ["d"]),
        ("model-00004-of-00005.safetensors", ["e"]),
        ("model-00005-of-00005.safetensors", ["f"]),
    ]
    (single,) = plan_shards(tensors, 52)
    assert (single.file_name, list(single.offsets)) == ("model.safetensors", list("abcdef"))


def test_written_tensors_are_verified_with_progress(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(export_module, "PIECE_BYTES", 16)  # four elements
    monkeypatch.setattr(folder_module, "PIECE_BYTES", 8)
    tensors = meta(a=((2, 3), torch.bfloat16), b=((5,), torch.float32))
    values = {"a": torch.arange(6.0), "b": torch.arange(5.0) + 0.5}
    progress: list[tuple[int, int]] = []
    plans = plan_shards(tensors, 20)
    writer = ShardWriter(tmp_path, plans, tensors, lambda done, total: progress.append((done, total)))
    reads: list[tuple[str, int, int]] = []

    def write(name: str) -> None:
        def read(start: int, stop: int) -> Tensor:
            reads.append((name, start, stop))
            return values[name][start:stop]

        writer.write(name, read)

    write("b")
    write("a")
    assert reads == [("b", 0, 4), ("b", 4, 5), ("a", 0, 4), ("a", 4, 6)]
    assert writer.checksums == {
        "a": checksum(values["a"].bfloat16().view(torch.uint8).numpy().tobytes()),
        "b": checksum(values["b"].numpy().tobytes()),
    }
    writer.finish()
    names = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert json.loads((tmp_path / "model.safetensors.index.json").read_text()) == {
        "metadata": {"total_parameters": 11, "total_size": 32},
        "weight_map": dict(zip("ab", names, strict=True)),
    }
    (tmp_path / "config.json").write_text("{}")
    writer.verify()
    assert progress == [(done, 64) for done in (16, 20, 28, 32, 40, 44, 52, 60, 64)]
    with (tmp_path / names[1]).open("r+b") as file:
        file.seek(-1, os.SEEK_END)
        file.write(b"?")
    changed = bytearray(values["b"].numpy().tobytes())
    changed[-1:] = b"?"
    with pytest.raises(DamagedShardError) as refused:
        writer.verify()
    assert str(refused.value) == (
        f"{tmp_path / names[1]}: tensor b reads back with checksum {checksum(bytes(changed))}, expected "
        f"{writer.checksums['b']}. The drive or the memory of this machine is faulty"
    )
    with pytest.raises(DamagedShardError) as refused:
        writer.verify(TensorFile(tmp_path / names[0]))
    assert str(refused.value) == f"{tmp_path}: the header of b reads back as None"
    for other in (meta(a=((3, 2), torch.bfloat16)), meta(a=((2, 3), torch.float16))):
        with pytest.raises(DamagedShardError, match="the header of a reads back as TensorRecord"):
            ShardWriter(tmp_path, plans, other).verify(TensorFile(tmp_path / names[0]))


def test_record_of_an_export(tmp_path: Path) -> None:
    (tmp_path / "templates").mkdir()
    for name in ("b.json", "a.json", "templates/c.jinja"):
        (tmp_path / name).write_text("")
    write_record(tmp_path, torch.bfloat16, {"y": "2", "x": "1"}, {"step": 7})
    assert (tmp_path / "export.json").read_text() == (
        json.dumps(
            {
                "step": 7,
                "program": "megatrain-tier",
                "dtype": "bfloat16",
                "files": ["a.json", "b.json", "templates/c.jinja"],
                "xxh3_64": {"x": "1", "y": "2"},
            },
            indent=1,
        )
        + "\n"
    )
    assert exported_step(tmp_path) == 7
    for text in ("{}", "[]", "{", '{"step": "7"}'):
        (tmp_path / "export.json").write_text(text)
        assert exported_step(tmp_path) is None


def test_targets_with_other_files_are_refused(tmp_path: Path) -> None:
    out = tmp_path / "out"
    check_target(out)
    out.mkdir()
    (out / "empty").mkdir()
    check_target(out, overwrite=False)

    def refusal(*, overwrite: bool = True) -> tuple[type, str]:
        with pytest.raises(ExportError) as refused:
            check_target(out, overwrite=overwrite)
        return type(refused.value), str(refused.value)

    (out / "a.json").write_text("")
    foreign = f"{out} is neither empty nor an export of this program. Remove it or use another one"
    assert refusal() == (ExportTargetError, foreign)
    for record in ("{", "[]", '{"program": "other", "files": ["a.json"]}', '{"program": "megatrain-tier"}'):
        (out / "export.json").write_text(record)
        assert refusal() == (ExportTargetError, foreign)
    write_record(out, torch.float32, {}, {})
    check_target(out)
    advice = "from an earlier export; nothing was written. Use another folder, or --overwrite to replace it"
    assert refusal(overwrite=False) == (ExportTargetError, f"{out} contains a model {advice}")
    (out / "adapter_config.json").write_text("")
    write_record(out, torch.float32, {}, {"step": 0})
    assert refusal(overwrite=False) == (ExportTargetError, f"{out} contains an adapter of step 0 {advice}")
    for name in ("z.txt", "empty/b.txt"):
        (out / name).write_text("")
    assert refusal() == (
        ExportError,
        f"{out} contains files that the earlier export did not write: empty/b.txt, z.txt. Move them away or use "
        "another folder",
    )
    (tmp_path / "file").write_text("")
    with pytest.raises(ExportTargetError) as refused:
        check_target(tmp_path / "file")
    assert str(refused.value) == f"{tmp_path}/file is a file. Use another folder"


def test_too_small_drive_is_stated_with_all_sizes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plan, usage = ShardPlan("x", b"", {}, 3 << 20), SimpleNamespace(free=(6 << 20) - 1)
    monkeypatch.setattr(export_module.shutil, "disk_usage", lambda path: usage)
    with pytest.raises(ExportError) as refused, atomic_folder(tmp_path / "out", [plan, plan]):
        pytest.fail("the drive is too small")
    assert str(refused.value) == (
        f"{tmp_path}/out: the weights need 6291456 bytes (6.00 MiB), but the drive of {tmp_path} has 6291455 (6.00 "
        "MiB) free. Free 1 B or use another folder"
    )
    usage.free += 1
    with atomic_folder(tmp_path / "out", [plan, plan]) as folder:
        (folder / "x").write_text("")
        assert folder.name == f".out.partial-{os.getpid()}" and not (tmp_path / "out").exists()
    assert [path.relative_to(tmp_path).as_posix() for path in sorted(tmp_path.rglob("*"))] == ["out", "out/x"]


def test_first_folder_provides_each_file_of_the_tokenizer(tmp_path: Path) -> None:
    folders = [tmp_path / name for name in ("first", "second", "out")]
    for folder in folders:
        (folder / "additional_chat_templates").mkdir(parents=True)
    (folders[2] / "additional_chat_templates").rmdir()
    (folders[0] / "additional_chat_templates/tools.jinja").write_text("t")
    for name in (
        "tokenizer.json",
        "tokenizer_config.json",
        "vocab.txt",
        "merges.txt",
        "x.tiktoken",
        "x.model",
        "y.jinja",
    ):
        (folders[0] / name).write_text(f"first {name}")
    for name in ("tokenizer.json", "special_tokens_map.json", "added_tokens.json", "config.json", "vocab.bin.txt"):
        (folders[1] / name).write_text(f"second {name}")
    (folders[2] / "merges.txt").write_text("old")
    copy_tokenizer(folders[:2], folders[2])
    found = {path.relative_to(folders[2]).as_posix(): path for path in folders[2].rglob("*") if path.is_file()}
    texts = {name: path.read_text() for name, path in found.items()}
    assert texts == {
        "additional_chat_templates/tools.jinja": "t",
        "merges.txt": "old",
        **{name: f"first {name}" for name in ("tokenizer.json", "tokenizer_config.json", "vocab.txt", "x.tiktoken")},
        **{name: f"first {name}" for name in ("x.model", "y.jinja")},
        **{name: f"second {name}" for name in ("special_tokens_map.json", "added_tokens.json", "vocab.bin.txt")},
    }
