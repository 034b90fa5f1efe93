"""Runs with ``[lora]`` are bit-identical at every placement, save only adapters, and export folders that peft opens."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from megatrain.base import limited
from megatrain.base.observer import RunObserver, RunSummary, StepMetrics
from megatrain.base.precision import encode_high_half
from megatrain.checkpoint.state import CheckpointError
from megatrain.config import load_config
from megatrain.converters.adapters import AdapterError, adapters_of
from megatrain.extras.generation import Generator, config_of_folder
from megatrain.models.export import ExportTargetError
from megatrain.tasks.prompts import GenerationSettings
from megatrain.training.export import export_checkpoint
from megatrain.training.trainer import Trainer
from oracles.peft_model import opened
from oracles.tiered_run import ALL_NVME, config_text, run_config, write_tiny_model
from oracles.whole_run import train_whole
from processes import warm
from tiered import TransferError
from tiered.durable.manifest import read_manifest

LORA = '[lora]\nr = 4\nlora_alpha = 8\ntarget_modules = ["q_proj", "v_proj", "down_proj"]\n'
DORA = LORA + "use_dora = true\nuse_rslora = true\nlora_dropout = 0.2\n"
ON_NVME: dict[str, Any] = {"placement": ALL_NVME, "ram": "5MiB", "nvme": 1}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("model"))


def lora_text(folder: Path, model: Path, lora: str = LORA, **options: Any) -> str:
    return config_text(folder, model, **{"nvme": 0, **options}).replace("[training]", f"{lora}[training]", 1)


def train(folder: Path, text: str, *, num_steps: int = 4, stop_after: int | None = None) -> RunSummary:
    text = text.replace("[training]\n", f"[training]\nmax_steps = {num_steps}\n")
    if "[checkpoint]" not in text:
        text += '[checkpoint]\nmin_free_disk = "0MiB"\n'
    return train_whole(folder, text, stop_after=stop_after).summary


def test_base_is_unchanged_and_only_adapters_have_state(model: Path, tmp_path: Path) -> None:
    run = run_config(lora_text(tmp_path, model), tmp_path, num_steps=2)
    for name, weight in load_file(model / "model.safetensors").items():
        assert torch.equal(run.weights[name], weight), name
    kinds = {b.kind for b in run.plan.program.blocks.values() if ".frozen/" in b.key}
    assert kinds == {"weights"}
    moved = [name for name, weight in run.weights.items() if ".lora_B" in name and bool(weight.any())]
    assert moved


def test_checkpoint_holds_adapters_and_their_state_only(model: Path, tmp_path: Path) -> None:
    unbroken = train(tmp_path / "a", lora_text(tmp_path / "a", model, DORA))
    stopped = train(tmp_path / "b", lora_text(tmp_path / "b", model, DORA), stop_after=2)
    assert stopped.interrupted and stopped.saved_step == 2
    blocks = read_manifest(tmp_path / "b/out/checkpoints").blocks
    assert blocks and not [block.key for block in blocks if "frozen" in block.key or "embed" in block.key]
    done = train(tmp_path / "b", lora_text(tmp_path / "b", model, DORA, **ON_NVME))
    assert done.num_steps == 4 and done.last_loss == unbroken.last_loss
    first, second = (tmp_path / x / "out/final/adapter_model.safetensors" for x in "ab")
    assert first.read_bytes() == second.read_bytes()


def test_base_that_changed_since_is_refused(model: Path, tmp_path: Path) -> None:
    copy = tmp_path / "model"
    shutil.copytree(model, copy)
    train(tmp_path, lora_text(tmp_path, copy), stop_after=2)
    tensors = load_file(copy / "model.safetensors")
    save_file({name: tensor + 0.5 for name, tensor in tensors.items()}, copy / "model.safetensors")
    with pytest.raises(CheckpointError, match="no longer those that"):
        train(tmp_path, lora_text(tmp_path, copy))
    with pytest.raises(CheckpointError, match="holds only the trained weights"):
        export_checkpoint(tmp_path / "out", tmp_path / "x")


OPEN = """
import sys, torch
from peft import AutoPeftModelForCausalLM
model = AutoPeftModelForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
ids = torch.arange(24).reshape(1, 24)
print(float(model(input_ids=ids, labels=ids).loss))
"""


@pytest.mark.parametrize("lora", [LORA, DORA], ids=["LoRA", "DoRA"])
def test_peft_opens_the_adapter_and_its_merge_is_the_same_model(model: Path, tmp_path: Path, lora: str) -> None:
    train(tmp_path, lora_text(tmp_path, model, lora) + '[export]\ndtype = "float32"\n')
    final = tmp_path / "out/final"
    names = {path.name for path in final.iterdir()}
    assert {"adapter_config.json", "adapter_model.safetensors", "tokenizer.json"} <= names
    assert "config.json" not in names and "model.safetensors" not in names
    found = warm.run([sys.executable, "-W", "ignore", "-c", OPEN, str(final)], timeout=200)
    assert found.returncode == 0, found.stderr
    ids = torch.arange(24).reshape(1, 24)
    here = opened(model, final).eval()
    with torch.no_grad():
        adapted = float(here(input_ids=ids, labels=ids).loss)
        with here.disable_adapter():
            base = float(here(input_ids=ids, labels=ids).loss)
    assert float(found.stdout) == pytest.approx(adapted, rel=1e-6) and abs(base - adapted) > 1e-3
    merged = export_checkpoint(tmp_path / "out", tmp_path / "merged", merge=True, dtype=torch.float32)
    theirs = here.merge_and_unload().state_dict()
    ours = load_file(merged / "model.safetensors")
    assert set(ours) == set(load_file(model / "model.safetensors"))
    for name, weight in ours.items():
        torch.testing.assert_close(weight, theirs[name], rtol=0, atol=1e-7)
    assert json.loads((merged / "config.json").read_text())["model_type"]


def test_final_merge_matches_the_merged_checkpoint(model: Path, tmp_path: Path) -> None:
    train(tmp_path, lora_text(tmp_path, model, **ON_NVME) + "[export]\nmerge = true\n")
    merged = export_checkpoint(tmp_path / "out", tmp_path / "merged")
    final = tmp_path / "out/final/model.safetensors"
    assert final.read_bytes() == (merged / "model.safetensors").read_bytes()


@pytest.mark.parametrize("lora", [LORA, DORA], ids=["LoRA", "DoRA"])
def test_generation_with_adapters_matches_peft(model: Path, tmp_path: Path, lora: str) -> None:
    """The run's folder, its adapter and a copy of the adapter all generate peft's tokens, whatever the size of RAM."""
    run = lora_text(tmp_path, model, lora).replace("learning_rate = 1e-3", "learning_rate = 0.05")
    train(tmp_path, run + '[export]\ndtype = "float32"\n')
    copy = shutil.copytree(tmp_path / "out/final", tmp_path / "copy")
    prompts, num_new = ["Call me", "Some years ago, never mind"], 6
    tokenizer = AutoTokenizer.from_pretrained(copy, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    batch = tokenizer(prompts, return_tensors="pt", padding=True)
    theirs = opened(model, copy).eval()

    def said(here: Any) -> list[list[int]]:
        out = here.generate(**batch, max_new_tokens=num_new, do_sample=False, pad_token_id=tokenizer.pad_token_id)
        return out[:, batch["input_ids"].shape[1] :].tolist()

    expected = said(theirs)
    with theirs.disable_adapter():
        assert said(theirs) != expected, "the adapters change no token"
    tables: dict[str, Any] = {
        "device": "cpu",
        "precision": {"compute_dtype": "float32"},
        "training": {"per_device_train_batch_size": 2},
    }
    for folder, more in (
        (tmp_path / "out", {"tiers": {"ram": {"size": "64MiB"}}}),
        (tmp_path / "out/final", {"tiers": {"ram": {"size": "6MiB"}}, "placement": {"weights": ["folder", "ram"]}}),
        (copy, {"tiers": {"ram": {"size": "64MiB"}}}),
    ):
        config = config_of_folder(folder, **tables, **more)
        generator = Generator(config, prompts, GenerationSettings(num_new, 0.0))
        found = [list(each.token_ids) for each in generator.run()]
        assert all(ids and ids == row[: len(ids)] for ids, row in zip(found, expected, strict=True)), folder
        assert any(len(ids) < num_new for ids in found) or generator.moved_bytes == generator.planned_bytes


def test_training_starts_from_an_adapter(model: Path, tmp_path: Path) -> None:
    train(tmp_path / "a", lora_text(tmp_path / "a", model, DORA) + '[export]\ndtype = "float32"\n')
    first = tmp_path / "a/out/final"
    again = f'[lora]\nadapter_name_or_path = "{first}"\n'
    run = run_config(lora_text(tmp_path / "b", model, again), tmp_path / "b", num_steps=1)
    given = load_file(first / "adapter_model.safetensors")
    assert {name.removeprefix("base_model.model.") for name in given} <= set(run.weights)
    assert (adapters := adapters_of(run.plan.graph)) is not None and adapters.config.use_dora


def adapter_of(model: Path, folder: Path) -> Path:
    train(folder, lora_text(folder, model), num_steps=1)
    return folder / "out/final"


def test_wrong_adapters_are_refused_by_name(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = adapter_of(model, tmp_path / "a")

    def refusal(change: Any, base: Path = model) -> str:
        copy = tmp_path / "copy"
        shutil.rmtree(copy, ignore_errors=True)
        shutil.copytree(adapter, copy)
        change(copy)
        with pytest.raises(AdapterError) as caught:
            train(tmp_path / "b", lora_text(tmp_path / "b", base, f'[lora]\nadapter_name_or_path = "{copy}"\n'))
        return str(caught.value)

    def edit(**values: Any) -> Any:
        def change(folder: Path) -> None:
            path = folder / "adapter_config.json"
            path.write_text(json.dumps({**json.loads(path.read_text()), **values}))

        return change

    narrow = write_tiny_model(tmp_path / "narrow", intermediate_size=128)
    assert "adapter of this model?" in refusal(lambda folder: None, narrow)
    assert "tensors are missing" in refusal(edit(target_modules=["q_proj", "k_proj"]))
    assert "shape" in refusal(edit(r=8))
    assert "type 'IA3'" in refusal(edit(peft_type="IA3"))
    assert "bias of peft is not supported" in refusal(edit(bias="all"))
    assert "is missing" in refusal(lambda folder: (folder / "adapter_model.safetensors").unlink())
    assert "is missing" in refusal(lambda folder: (folder / "adapter_config.json").unlink())
    assert "does not exist" in refusal(shutil.rmtree)
    assert "cannot be read as JSON" in refusal(lambda folder: (folder / "adapter_config.json").write_text("{"))
    assert "cannot be read as JSON" in refusal(lambda folder: (folder / "adapter_config.json").write_text("[" * 99999))
    monkeypatch.setattr(limited, "MAX_CPU_S", 1)
    for values in ({"target_modules": "(([a-z_.0-9]+)+)+!"}, {"rank_pattern": {"(([a-z_.0-9]+)+)+!": 2}}):
        text = refusal(edit(**values))
        assert "copy/adapter_config.json" in text and "more than 1 s of processor time" in text
    assert "is not a regular expression" in refusal(edit(target_modules="(q_proj"))


@pytest.mark.parametrize(
    ("lora", "words"),
    [
        ('[lora]\nr = 4\ntarget_modules = ["nope"]\n', "has e.g. q_proj"),
        ('[lora]\nr = 4\ntarget_modules = ["self_attn"]\n', "is not supported"),
        ('[lora]\nr = 4\ntarget_modules = ["q_proj"]\nmodules_to_save = ["classifier"]\n', "classifier"),
        ('[lora]\nr = 4\ntarget_modules = ["embed_tokens"]\nuse_dora = true\n', "is an embedding"),
    ],
)
def test_unknown_lora_targets_are_refused(model: Path, tmp_path: Path, lora: str, words: str) -> None:
    with pytest.raises(AdapterError, match=words):
        train(tmp_path, lora_text(tmp_path, model, lora))


def test_merge_into_a_tied_weight_is_refused_before_the_first_step(tmp_path: Path) -> None:
    tied = write_tiny_model(tmp_path / "tied", tie_word_embeddings=True)
    text = lora_text(tmp_path, tied, '[lora]\nr = 4\ntarget_modules = ["lm_head"]\n') + "[export]\nmerge = true\n"
    with pytest.raises(ExportTargetError, match="is the same tensor"):
        train(tmp_path, text)
    assert not (tmp_path / "out").exists()


#: Options of runs that read base weights in place: either all of them, or all except those with another home.
IN_PLACE: dict[str, dict[str, Any]] = {
    "folder": {"nvme": 0, "placement": 'weights = ["folder"]'},
    "folder and NVMe": {"nvme": 1, "placement": ALL_NVME.replace('["nvme"]', '["folder", "nvme"]', 1), "ram": "8MiB"},
    "folder and GPU": {"gpu": "6MiB", "ram": "8MiB", "nvme": 0, "placement": 'weights = ["folder", "ram"]'},
    "past RAM": {"gpu": "6MiB", "nvme": 1, "placement": 'weights = ["folder", "nvme"]', "tiers": 'direct = "on"'},
}


@pytest.mark.parametrize(
    ("place", "stored", "computed"),
    [
        ("folder", "float32", "bfloat16"),
        ("folder", "bfloat16", "bfloat16"),
        pytest.param("folder", "float16", "float32", marks=pytest.mark.slow),
        pytest.param("folder", "float32", "float32", marks=pytest.mark.slow),
        ("folder and NVMe", "bfloat16", "float32"),
        ("folder and GPU", "bfloat16", "float32"),
        pytest.param("past RAM", "bfloat16", "float32", marks=pytest.mark.slow),
    ],
)
def test_base_read_in_place_is_bit_identical_to_a_copy(
    model: Path, tmp_path: Path, place: str, stored: str, computed: str
) -> None:
    base = tmp_path / "model"
    shutil.copytree(model, base)
    tensors = {k: t.to(getattr(torch, stored)) for k, t in load_file(base / "model.safetensors").items()}
    save_file(tensors, base / "model.safetensors", metadata={"format": "pt"})
    before = {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in base.iterdir()}
    precision = f'compute_dtype = "{computed}"'
    options = {"placement": 'weights = ["ram"]'}
    copied = run_config(
        lora_text(tmp_path / "a", base, DORA, precision=precision, **options), tmp_path / "a", num_steps=2
    )
    text = lora_text(tmp_path / "b", base, DORA, precision=precision, **IN_PLACE[place])
    run = run_config(text, tmp_path / "b", num_steps=2)
    run.assert_as_planned()
    run.assert_same(copied)
    homes = run.plan.placement.homes
    assert {homes[key] for key, block in run.plan.program.blocks.items() if block.in_place} == {"folder"}
    assert run.moved is not None and run.moved.links["folder->ram"].num_bytes > 0
    assert before == {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in base.iterdir()}


def test_changing_the_model_folder_during_a_run_ends_the_run(model: Path, tmp_path: Path) -> None:
    base = tmp_path / "model"
    shutil.copytree(model, base)

    class Changer(RunObserver):
        def on_step(self, metrics: StepMetrics) -> None:
            tensors = load_file(model / "model.safetensors")
            save_file({k: t + 1 for k, t in tensors.items()}, base / "model.safetensors", metadata={"format": "pt"})

    text = lora_text(tmp_path, base, placement='weights = ["folder"]', ram="6800KiB")
    path = tmp_path / "run.toml"
    path.write_text(text.replace("[training]\n", "[training]\nmax_steps = 4\n"))
    with pytest.raises(TransferError, match="was changed or replaced during a run that reads its weights") as caught:
        Trainer(load_config(path).config, observer=Changer()).train()
    assert caught.value.path == str(base / "model.safetensors")


def test_frozen_parts_of_a_full_run_are_read_in_place_and_exported(model: Path, tmp_path: Path) -> None:
    freeze = '[model]\nfreeze = ["model.embed_tokens.*", "model.layers.0.*"]'
    options: dict[str, Any] = {"placement": 'weights = ["folder", "ram"]', "precision": 'compute_dtype = "bfloat16"'}
    text = config_text(tmp_path, model, nvme=0, **options).replace("[model]", freeze)
    train(tmp_path, text, num_steps=2)
    keys = {block.key for block in read_manifest(tmp_path / "out/checkpoints").blocks}
    assert not [key for key in keys if "embed_tokens" in key or "layers.0." in key]
    again = export_checkpoint(tmp_path / "out", tmp_path / "again")
    final = tmp_path / "out/final/model.safetensors"
    assert final.read_bytes() == (again / "model.safetensors").read_bytes()
    source, trained = load_file(model / "model.safetensors"), load_file(final)
    for name, weight in source.items():
        rounded = torch.empty(weight.numel(), dtype=torch.bfloat16)
        encode_high_half(weight.reshape(-1), rounded)
        is_frozen = name.startswith(("model.embed_tokens.", "model.layers.0."))
        assert torch.equal(trained[name].reshape(-1), rounded) == is_frozen, name
