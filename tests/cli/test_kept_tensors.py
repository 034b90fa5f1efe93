"""Training an image-text model on text: kept tensors are reported, checked for changes and exported unchanged."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer, Qwen3_5ForConditionalGeneration

from oracles.families import tiny_image_text_config
from processes.saved_run import NVME, ON_NVME, SavedRun, make_run

APART = ("--set", "data.packing=false")
MTP = "mtp.layers.0.self_attn.q_proj.weight"  # a tensor that transformers silently drops


def write_image_text_model(folder: Path) -> None:
    """Replace the model in a folder with a tiny Qwen3.5 that has a vision tower and a draft head."""
    config = tiny_image_text_config("qwen3_5")
    config.text_config.vocab_size = len(AutoTokenizer.from_pretrained(folder))
    (folder / "model.safetensors").unlink()
    torch.manual_seed(2)
    Qwen3_5ForConditionalGeneration._from_config(config, dtype=torch.float32).save_pretrained(folder)
    tensors = load_file(folder / "model.safetensors")
    save_file({**tensors, MTP: torch.randn(8, 8).bfloat16()}, folder / "model.safetensors")
    (folder / "preprocessor_config.json").write_text('{"image_mean": [0.5, 0.5, 0.5]}')


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> SavedRun:
    run = make_run(tmp_path_factory.mktemp("trained") / "w")
    write_image_text_model(run.folder / "model")
    result = run.run(*APART, steps=2)
    assert result.exit_code == 0, result.output
    assert "are kept as they are: model.visual" in result.output
    return run


@pytest.fixture
def run(trained: SavedRun, tmp_path: Path) -> SavedRun:
    return trained.copy(tmp_path / "w")


def test_export_keeps_the_tensors_of_the_model_folder(trained: SavedRun) -> None:
    source, final = trained.folder / "model", trained.out / "final"
    before, after = load_file(source / "model.safetensors"), load_file(final / "model.safetensors")
    assert before.keys() == after.keys()
    kept = [name for name in before if "visual" in name or name == MTP]
    assert kept and all(torch.equal(before[name], after[name]) for name in kept)
    assert after[MTP].dtype == torch.bfloat16
    text = [name for name in before if "language_model" in name]
    assert any(not torch.equal(before[name], after[name]) for name in text), "text was trained"
    assert json.loads((final / "config.json").read_text()) == json.loads((source / "config.json").read_text())
    assert (final / "preprocessor_config.json").read_text() == (source / "preprocessor_config.json").read_text()
    model, report = Qwen3_5ForConditionalGeneration.from_pretrained(final, output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
    assert model.model.visual is not None


def test_check_and_plan_report_kept_tensors(run: SavedRun) -> None:
    config = run.write_config(out="other")
    for command in ("check", "plan"):
        result = run.call(command, config, *APART)
        assert result.exit_code == 0, result.output
        assert "are kept as they are: model.visual" in " ".join(result.stdout.split()), command
    num_kept = sum("visual" in name or name == MTP for name in load_file(run.folder / "model/model.safetensors"))
    assert f"{num_kept} tensors (" in result.stdout


def test_missing_model_folder_is_reported_before_the_export(trained: SavedRun, tmp_path: Path) -> None:
    assert "note:" not in trained.call("ckpt", "verify", trained.out).stdout
    (trained.folder / "model").rename(tmp_path / "moved")
    try:
        verified = trained.call("ckpt", "verify", trained.out)
        listed = json.loads(trained.call("ckpt", "ls", trained.out, "--json").stdout)["checkpoints"]
        continued = trained.run(*APART, steps=4)
        exported = trained.call("export", trained.out, tmp_path / "out")
    finally:
        (tmp_path / "moved").rename(trained.folder / "model")
    assert verified.exit_code == 0 and "note: an export needs the" in verified.stdout
    assert all("--model FOLDER" in info["note"] for info in listed)
    assert continued.exit_code == 2 and "does not exist" in continued.stderr
    assert exported.exit_code == 1 and "--model FOLDER" in exported.stderr


def test_export_accepts_a_copy_of_the_model_but_not_a_changed_one(run: SavedRun, tmp_path: Path) -> None:
    shutil.copytree(run.folder / "model", tmp_path / "copy")
    result = run.call("export", run.out, tmp_path / "good", "--model", tmp_path / "copy")
    assert result.exit_code == 0, result.output
    final = load_file(run.out / "final/model.safetensors")
    again = load_file(tmp_path / "good/model.safetensors")
    assert final.keys() == again.keys() and all(torch.equal(final[name], again[name]) for name in final)
    tensors = load_file(tmp_path / "copy/model.safetensors")
    tensors[MTP][0, 0] += 1
    save_file(tensors, tmp_path / "copy/model.safetensors")
    result = run.call("export", run.out, tmp_path / "bad", "--model", tmp_path / "copy")
    assert result.exit_code == 1 and "no longer those that the run began with" in result.stderr
    assert not (tmp_path / "bad").exists()


def test_resume_with_changed_kept_tensors_is_refused(run: SavedRun) -> None:
    tensors = load_file(run.folder / "model/model.safetensors")
    name = next(name for name in tensors if "visual" in name)
    tensors[name] = tensors[name] + 1
    save_file(tensors, run.folder / "model/model.safetensors")
    result = run.run(*APART, steps=4)
    assert result.exit_code == 1 and "no longer those that" in result.stderr, result.output
    assert "Traceback" not in result.output


def test_explicit_packing_is_refused_for_image_text_models(run: SavedRun) -> None:
    shutil.rmtree(run.folder / "out")
    result = run.run("--set", "data.packing=true")
    assert result.exit_code == 2 and "Write data.packing = false" in result.stderr, result.output


def test_model_without_text_only_forward_is_refused(run: SavedRun) -> None:
    from transformers import BlipForConditionalGeneration

    config = tiny_image_text_config("blip")
    config.text_config.vocab_size = 400
    shutil.rmtree(run.folder / "out")
    (run.folder / "model/model.safetensors").unlink()
    BlipForConditionalGeneration._from_config(config, dtype=torch.float32).save_pretrained(run.folder / "model")
    result = run.run(*APART)
    assert result.exit_code == 2, result.output
    assert "does not run on text alone" in result.stderr and "Traceback" not in result.output


@pytest.mark.slow
def test_exported_weights_are_bit_identical_for_any_placement(run: SavedRun) -> None:
    finals = []
    for out, tables in (("ram", {}), ("nvme", {"placement": ON_NVME, "more": NVME})):
        more = {name: text.replace('"drive"', f'"{run.folder / "drive"}"') for name, text in tables.items()}
        result = run.run(*APART, out=out, steps=2, dtype="bfloat16", **more)
        assert result.exit_code == 0, result.output
        finals.append(run.folder / out / "final")
    one, other = ((final / "model.safetensors").read_bytes() for final in finals)
    assert one == other
    before, after = (load_file(folder / "model.safetensors") for folder in (run.folder / "model", finals[0]))
    assert all(after[name].dtype == torch.bfloat16 for name in before if "language_model" in name)
    assert all(torch.equal(after[name], before[name]) for name in before if "visual" in name)
    assert json.loads((finals[0] / "config.json").read_text())["dtype"] == "bfloat16"
    _, report = Qwen3_5ForConditionalGeneration.from_pretrained(finals[0], output_loading_info=True)
    assert not report["missing_keys"] and not report["unexpected_keys"]
