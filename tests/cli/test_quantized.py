"""Commands on quantized models in published formats: run, resume, plan, and export with a merged adapter."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from oracles.peft_model import opened
from oracles.quantize import quantized_pair
from processes.saved_run import QUICKSTART, SavedRun

LORA = '[lora]\nr = 4\nlora_alpha = 8\ntarget_modules = ["q_proj", "v_proj"]\n'
FOLDER = 'weights = ["folder"]'


def saved_run(folder: Path, method: str) -> tuple[SavedRun, Path]:
    """Return a run of a quantized model, and the folder with its dequantized weights."""
    quantized, plain = quantized_pair(folder, method)
    quantized.rename(folder / "model")
    (folder / "data.txt").write_text((QUICKSTART / "loomings.txt").read_text()[:2500])
    return SavedRun(folder), plain


@pytest.mark.parametrize(
    "method",
    ["mxfp4", pytest.param("fp8 experts", marks=pytest.mark.slow), pytest.param("nested nf4", marks=pytest.mark.slow)],
)
def test_a_run_stops_continues_and_gives_an_adapter_that_peft_opens(method: str, tmp_path: Path) -> None:
    run, plain = saved_run(tmp_path, method)

    def losses(out: str) -> list[float]:
        lines = [json.loads(line) for line in (tmp_path / out / "metrics.jsonl").read_text().splitlines()]
        return [line["loss"] for line in lines if "event" not in line]

    tables = {"top": "", "more": f'{LORA}[export]\ndtype = "float32"\n', "steps": 3}
    done = run.run(out="whole", **tables)
    assert done.exit_code == 0, done.output
    for steps in (2, 3):  # read weights from the model folder; the second start resumes
        done = run.run(out="parts", placement=FOLDER, **{**tables, "steps": steps})
        assert done.exit_code == 0, done.output
    assert losses("parts") == losses("whole") and len(losses("whole")) == 3
    name = "final/adapter_model.safetensors"
    adapter = (tmp_path / "whole" / name).read_bytes()
    assert (tmp_path / "parts" / name).read_bytes() == adapter
    plan = run.call("plan", run.write_config(out="parts", placement=FOLDER, **tables), "--json")
    assert plan.exit_code == 0, plan.output
    merged = tmp_path / "merged"
    done = run.call("export", tmp_path / "parts", merged, "--merge", "--dtype", "float32")
    assert done.exit_code == 0, done.output
    assert "quantization_config" not in json.loads((merged / "config.json").read_text())
    theirs = opened(plain, tmp_path / "parts/final").merge_and_unload().state_dict()
    ours = load_file(merged / "model.safetensors")
    assert set(ours) == set(load_file(plain / "model.safetensors"))
    adapted = [key for key in ours if key.endswith(("q_proj.weight", "v_proj.weight"))]
    assert adapted
    for key in adapted:
        torch.testing.assert_close(ours[key], theirs[key], rtol=0, atol=1e-6)
