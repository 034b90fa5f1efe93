"""Packing with models that keep the documents of a row separate, and with models that do not."""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

from processes.saved_run import SavedRun, make_run

OFF = "data.packing, on by default, is off"
SCAN: dict[str, Any] = {"model_type": "falcon_mamba", "hidden_size": 32, "num_hidden_layers": 2, "state_size": 4}
#: This model builds its masks without positions, so the documents of a row are not kept separate.
ATTENTION: dict[str, Any] = {
    "model_type": "gpt_oss",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "intermediate_size": 32,
}
ATTENTION |= {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "num_local_experts": 2}
ATTENTION |= {"num_experts_per_tok": 1, "layer_types": ["sliding_attention", "full_attention"]}


def make_run_with_random_model(folder: Path, values: dict[str, Any]) -> SavedRun:
    """Create a run folder with a random model that has the given config values, and return the run."""
    make_run(folder)
    model = folder / "model"
    vocab_size = len(AutoTokenizer.from_pretrained(model))
    for name in ("config.json", "model.safetensors", "generation_config.json"):
        (model / name).unlink(missing_ok=True)
    config = AutoConfig.for_model(**values, vocab_size=vocab_size, tie_word_embeddings=False)
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(model)
    return SavedRun(folder)


@pytest.fixture(scope="module")
def scan(tmp_path_factory: pytest.TempPathFactory) -> SavedRun:
    return make_run_with_random_model(tmp_path_factory.mktemp("scan") / "w", SCAN)


def words_of(text: str) -> str:
    return " ".join(text.split())


def test_packing_defaults_to_off_if_documents_would_mix(scan: SavedRun) -> None:
    path = scan.folder / "rows.jsonl"
    words = (scan.folder / "data.txt").read_text().split()
    path.write_text("".join(json.dumps({"text": " ".join(words[at : at + 5])}) + "\n" for at in range(0, 60, 5)))
    data = [
        f"data.train=[{{ path = '{path}' }}]",
        f"data.eval=[{{ path = '{path}' }}]",
        "evaluation.eval_on_start=true",
    ]
    options = [option for value in data for option in ("--set", value)]
    result = scan.run(*options, steps=2)
    assert result.exit_code == 0, result.output
    assert words_of(result.output).count(OFF) == 1 and "FalconMambaForCausalLM" in result.output
    result = scan.run(*options, steps=3)
    assert result.exit_code == 0, "a run with the default continues: " + result.output
    apart = scan.run(*options, "--set", "data.packing=false", steps=3, out="apart")
    assert apart.exit_code == 0 and OFF not in words_of(apart.output), apart.output
    losses = [
        {line["step"]: line["loss"] for line in map(json.loads, file.read_text().splitlines()) if "grad_norm" in line}
        for file in (scan.out / "metrics.jsonl", scan.folder / "apart/metrics.jsonl")
    ]
    assert losses[0] == losses[1] and len(losses[0]) == 3


@pytest.mark.parametrize("values", [SCAN, ATTENTION], ids=lambda values: values["model_type"])
def test_explicit_packing_is_refused_for_mixing_models(values: dict[str, Any], tmp_path: Path) -> None:
    run = make_run_with_random_model(tmp_path / "w", values)
    for command in ("run", "plan"):
        result = run.call(command, run.write_config(), "--set", "data.packing=true")
        assert result.exit_code == 2, result.output
        assert "Write data.packing = false" in words_of(result.stderr) and "Traceback" not in result.output
    assert not run.out.exists()


def test_plan_check_and_stats_report_disabled_packing(scan: SavedRun) -> None:
    config = scan.write_config(out="none")
    for words in (("plan", config), ("check", config), ("data", "stats", config)):
        result = scan.call(*words)
        assert result.exit_code == 0 and OFF in words_of(result.output), result.output
    assert "with packing" in result.output, "the other way"
    result = scan.call("check", config, "--set", "data.packing=true")
    assert result.exit_code == 2 and "Write data.packing = false" in words_of(result.output)


def test_concat_packing_is_accepted_for_mixing_models(scan: SavedRun) -> None:
    result = scan.call("plan", scan.write_config(out="joined"), "--set", 'data.packing="concat"')
    assert result.exit_code == 0 and OFF not in words_of(result.output), result.output


def test_packing_stays_on_if_documents_are_separated(tmp_path: Path) -> None:
    run = make_run(tmp_path / "w")
    for options in ((), ("--set", "data.packing=true")):
        result = run.call("plan", run.write_config(), *options)
        assert result.exit_code == 0 and OFF not in words_of(result.output), result.output


def test_init_writes_no_packing_key_for_mixing_models(scan: SavedRun, tmp_path: Path) -> None:
    path = tmp_path / "run.toml"
    result = scan.call("init", path, "--model", scan.folder / "model", "--data", scan.folder / "data.txt")
    assert result.exit_code == 0, result.output
    assert "packing" not in tomllib.loads(path.read_text())["data"]
