"""Exporting a checkpoint later gives the model that the run itself would have exported."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatrain.checkpoint.inventory import RunInventory
from megatrain.checkpoint.removal import remove_checkpoint
from megatrain.checkpoint.state import CheckpointError
from megatrain.models.export import ExportError, ExportTargetError
from megatrain.models.folder import ModelFolderError
from megatrain.run.folder import RunFolder
from megatrain.training import export as export_module
from megatrain.training.export import export_checkpoint
from processes.saved_run import NVME, ON_NVME, QUICKSTART, SavedRun, make_run
from tests.megatrain.models.tiny import build_model
from tiered import list_generations
from tiered.durable.manifest import generation_folder

PLACES: dict[str, dict[str, Any]] = {
    "fp32 in RAM": {},
    "fp32 on a drive": {"placement": ON_NVME, "more": NVME},
    "bf16 on a drive": {"placement": ON_NVME, "more": NVME, "dtype": "bfloat16"},
    "bf16 partly frozen": {"dtype": "bfloat16", "model": 'freeze = ["model.embed_tokens.*", "*.0.self_attn.q_proj.*"]'},
    "from scratch": {"model": "train_from_scratch = true"},
}


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], SavedRun]:
    """Return a function that trains 6 steps, saved at 2, 4 and 6, in one of ``PLACES``, and caches the run."""
    runs: dict[str, SavedRun] = {}

    def train(name: str) -> SavedRun:
        if name not in runs:
            run = make_run(tmp_path_factory.mktemp("run") / "w")
            result = run.run(**PLACES[name])
            assert result.exit_code == 0, result.output
            runs[name] = run
        return runs[name]

    return train


@pytest.fixture
def run(trained: Callable[[str], SavedRun], tmp_path: Path) -> SavedRun:
    """Return a copy of the run in RAM, which a test may damage. Its checkpoints name the original model folder."""
    return trained("fp32 in RAM").copy(tmp_path / "w")


@pytest.mark.parametrize("name", PLACES)
def test_exported_files_match_the_final_model(trained: Callable[[str], SavedRun], tmp_path: Path, name: str) -> None:
    run = trained(name)
    units: list[tuple[str, int, int]] = []
    out = export_checkpoint(run.out, tmp_path / "out", on_progress=lambda *unit: units.append(unit))
    assert out == tmp_path / "out"
    final = run.out / "final"
    assert sorted(path.name for path in out.iterdir()) == sorted(path.name for path in final.iterdir())
    for path in final.iterdir():
        assert (out / path.name).read_bytes() == path.read_bytes(), path.name
    done, totals = [number for _, number, _ in units], {total for _, _, total in units}
    weights = sum(path.stat().st_size for path in out.glob("*.safetensors"))
    assert done == sorted(done) and totals == {done[-1]}
    assert 0.8 * 2 * weights < done[-1] <= 2 * weights  # written and read back; the files also have headers


def test_transformers_opens_an_earlier_step(run: SavedRun, tmp_path: Path) -> None:
    """An export of step 2 equals the final export of a run with 2 steps."""
    result = run.run(out="short", steps=2)
    assert result.exit_code == 0, result.output
    out = export_checkpoint(run.out, tmp_path / "out", step=2)
    ours, theirs = load_file(out / "model.safetensors"), load_file(run.folder / "short/final/model.safetensors")
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[key], theirs[key]) for key in ours)
    assert json.loads((out / "export.json").read_text())["step"] == 2
    model = AutoModelForCausalLM.from_pretrained(out)
    tokens = AutoTokenizer.from_pretrained(out)("Call me Ishmael", return_tensors="pt")
    assert torch.isfinite(model(**tokens).logits).all()


def test_fp32_export_has_the_exact_master_weights(trained: Callable[[str], SavedRun], tmp_path: Path) -> None:
    """An fp32 export of a bf16 run has the exact masters, which contain more bits than the bf16 weights."""
    run = trained("bf16 on a drive")
    exact = load_file(export_checkpoint(run.out, tmp_path / "exact", dtype=torch.float32) / "model.safetensors")
    rounded = load_file(run.out / "final/model.safetensors")
    assert all(value.dtype == torch.float32 for value in exact.values())
    assert all(torch.equal(exact[key].bfloat16(), value) for key, value in rounded.items())
    assert any(not torch.equal(exact[key], value.float()) for key, value in rounded.items())


def test_shards(run: SavedRun, tmp_path: Path) -> None:
    out = export_checkpoint(run.out, tmp_path / "out", max_shard_size=100_000)
    assert len(list(out.glob("model-*.safetensors"))) > 1
    assert AutoModelForCausalLM.from_pretrained(out) is not None
    with pytest.raises(ExportTargetError, match="contains a model of step 6 from an earlier export"):
        export_checkpoint(run.out, out)
    export_checkpoint(run.out, out, overwrite=True)
    assert not list(out.glob("model-*.safetensors")), "an earlier export is replaced"


def test_one_unit_in_memory_at_a_time(run: SavedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    open_now: list[str] = []
    real = export_module._CheckpointWeights.weights
    most = 0

    def watched(self: Any, layout: Any) -> Any:
        from contextlib import contextmanager

        @contextmanager
        def weights() -> Any:
            nonlocal most
            open_now.append(layout.name)
            most = max(most, len(open_now))
            with real(self, layout) as values:
                yield values
            open_now.remove(layout.name)

        return weights()

    monkeypatch.setattr(export_module._CheckpointWeights, "weights", watched)
    export_checkpoint(run.out, tmp_path / "out")
    assert most == 1 and not open_now


def test_export_works_during_a_run(run: SavedRun, tmp_path: Path) -> None:
    with RunFolder(run.out):
        assert export_checkpoint(run.out, tmp_path / "out").is_dir()


def test_checkpoint_removed_during_the_export_is_reported(run: SavedRun, tmp_path: Path) -> None:
    def remove(what: str, done: int, total: int) -> None:
        if 1 in list_generations(run.out / "checkpoints"):
            remove_checkpoint(run.out, RunInventory(run.out).entries[0].checkpoint)

    with pytest.raises(CheckpointError, match=r"step 2 .* was removed while it was being exported.*save_total_limit"):
        export_checkpoint(run.out, tmp_path / "out", step=2, on_progress=remove)
    assert not list(tmp_path.glob("out*")) and not list(tmp_path.glob(".out*"))


def test_damage_is_named_and_nothing_is_written(run: SavedRun, tmp_path: Path) -> None:
    chunk = generation_folder(run.out / "checkpoints", 3) / "model.layers.1/weight/c/0"
    data = bytearray(chunk.read_bytes())
    data[100] ^= 1
    chunk.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"step 6 .* cannot be exported: block 'model.layers.1/weight'") as caught:
        export_checkpoint(run.out, tmp_path / "out")
    assert str(chunk) in str(caught.value)
    assert not list(tmp_path.glob("*out*"))
    assert export_checkpoint(run.out, tmp_path / "out", step=4).is_dir()


def test_missing_model_folder_is_reported(tmp_path: Path) -> None:
    run = make_run(tmp_path / "w")
    assert run.run(steps=2).exit_code == 0
    (run.folder / "model").rename(tmp_path / "elsewhere")
    with pytest.raises(CheckpointError, match=r"the model in '.*w/model', which does not exist.*--model"):
        export_checkpoint(run.out, tmp_path / "out")
    with pytest.raises(ModelFolderError, match="does not exist"):
        export_checkpoint(run.out, tmp_path / "out", model_folder=tmp_path / "nowhere")
    out = export_checkpoint(run.out, tmp_path / "out", model_folder=tmp_path / "elsewhere")
    for name in ("model.safetensors", "tokenizer.json", "export.json"):
        assert (out / name).read_bytes() == (run.out / "final" / name).read_bytes()


def test_another_model_is_refused(run: SavedRun, tmp_path: Path) -> None:
    build_model("llama").save_pretrained(tmp_path / "another")
    with pytest.raises(CheckpointError, match=r"does not belong to the model in '.*another': block 'lm_head/weight'"):
        export_checkpoint(run.out, tmp_path / "out", model_folder=tmp_path / "another")
    with pytest.raises(ModelFolderError, match="has no weights"):
        export_checkpoint(run.out, tmp_path / "out", model_folder=QUICKSTART / "model")
    assert not (tmp_path / "out").exists()


def test_foreign_folder_is_not_changed(run: SavedRun, tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out/thesis.tex").write_text("precious")
    with pytest.raises(ExportError, match="is neither empty nor"):
        export_checkpoint(run.out, tmp_path / "out")
    assert (tmp_path / "out/thesis.tex").read_text() == "precious"


def test_buffers_come_from_the_models_folder(tmp_path: Path) -> None:
    """DeepSeek's routers have a bias that is a buffer. Experts are fused in the model, but separate in the files."""
    run = make_run(tmp_path / "w")
    shutil.rmtree(run.folder / "model")
    shutil.copytree(QUICKSTART / "model", run.folder / "model")
    model = build_model("deepseek_v3")
    vocabulary = json.loads((QUICKSTART / "model/config.json").read_text())["vocab_size"]
    model.resize_token_embeddings(vocabulary)
    model.save_pretrained(run.folder / "model")
    result = run.run(steps=2)
    assert result.exit_code == 0, result.output
    out = export_checkpoint(run.out, tmp_path / "out")
    ours, final = load_file(out / "model.safetensors"), load_file(run.out / "final/model.safetensors")
    before = load_file(run.folder / "model/model.safetensors")
    assert ours.keys() == final.keys() == before.keys()
    assert all(torch.equal(ours[key], final[key]) for key in ours)
    buffers = [key for key in ours if key.endswith("e_score_correction_bias")]
    assert buffers and all(torch.equal(ours[key], before[key]) for key in buffers)
