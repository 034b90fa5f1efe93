"""The proof holds on a sound program, and every kind of fault breaks it, by name."""

from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from transformers import CONFIG_MAPPING

from megatrain.base.errors import UnsupportedModelError
from megatrain.config import load_config
from megatrain.models.folder import ModelFolder
from megatrain.models.small import LARGEST_NUM_PARAMETERS, write_small_model
from megatrain.optim.base import Update
from megatrain.optim.elementwise import SGD, AdamW
from megatrain.verify import proof
from megatrain.verify.proof import Tolerances, Verdict, verify

PACKAGE = "megatrain_tier_cli" if importlib.util.find_spec("megatrain_tier_cli") else "cli"
FAMILIES = (
    "llama", "qwen2", "qwen3", "qwen3_moe", "gemma2", "gemma3_text", "gpt2", "opt", "phi3", "mixtral", "gpt_oss",
    "deepseek_v3", "smollm3", "qwen3_next",
)  # fmt: skip


def config_of(tmp_path: Path, family: str, *overrides: str, drives: int = 0) -> Any:
    """Return the config of a full-size model of a family; it has no weights."""
    CONFIG_MAPPING[family]().save_pretrained(tmp_path / "model")
    text = 'task = "sft"\noutput_dir = "out"\ndevice = "cpu"\n[model]\nmodel_name_or_path = "MODEL"\n[data]\n'
    text = text.replace("MODEL", str(tmp_path / "model")) + '[[data.train]]\npath = "d.jsonl"\n'
    text += "".join(f'[[tiers.nvme]]\npath = "drive{number}"\n' for number in range(drives))
    (tmp_path / "run.toml").write_text(text)
    return load_config(tmp_path / "run.toml", (), overrides).config


def failed(verdict: Verdict) -> set[str]:
    """Return the first word of every check that does not hold."""
    assert not verdict.holds
    return {check.what.split()[0] for check in verdict.checks if not check.holds}


@pytest.mark.parametrize("family", FAMILIES)
def test_small_copies_keep_the_family_and_its_kinds_of_layers(family: str, tmp_path: Path) -> None:
    original = CONFIG_MAPPING[family]()
    small = write_small_model(original, tmp_path, attn_implementation="auto", seed=1)
    assert small.num_parameters <= LARGEST_NUM_PARAMETERS // 10 and 3 <= small.num_layers <= 8
    values = json.loads((small.folder / "config.json").read_text())
    assert values["model_type"] == family
    kinds = getattr(original, "layer_types", None)
    if kinds:
        assert set(values["layer_types"]) == set(kinds)
    assert set(ModelFolder(small.folder).records)


def test_what_cannot_be_copied_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match="uses a small Llama"):
        write_small_model(CONFIG_MAPPING["t5"](), tmp_path, attn_implementation="auto", seed=1)


@pytest.mark.slow
def test_the_default_proof(tmp_path: Path) -> None:
    said: list[str] = []
    verdict = verify(None, scratch=tmp_path, on_progress=said.append)
    assert verdict.holds, verdict
    assert [check.what.split()[0] for check in verdict.checks] == [
        "loss", "gradient", "gradient", "weights", "everything", "striped", "stopped",
    ]  # fmt: skip
    assert "as planned" in verdict.checks[4].found and "18 blocks" in verdict.checks[4].found
    assert not list(tmp_path.iterdir()) and len(said) == 6


@pytest.mark.parametrize(
    ("family", "overrides"),
    [
        (
            "qwen2",
            [
                "optim=adafactor",
                "compute_dtype=bfloat16",
                "grad_dtype=bfloat16",
                "model.freeze=['*embed*']",
                "model.images=frozen",
            ],
        ),
        pytest.param("gpt2", ["optim=lion", "data.packing=false", "max_grad_norm=0"], marks=pytest.mark.slow),
        pytest.param(
            "qwen3_moe",
            ["optim=sgd", "clip_scope=layer", "max_grad_norm=0.05", 'model.freeze=["model.layers.40.*"]'],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_users_model_and_optimizer(family: str, overrides: list[str], tmp_path: Path) -> None:
    config = config_of(tmp_path, family, *overrides, drives=1)
    before = sorted(tmp_path.rglob("*"))
    verdict = verify(config, scratch=tmp_path)
    assert verdict.holds, verdict
    assert family in verdict.headline and "a scaled-down copy of model" in verdict.headline
    assert sorted(tmp_path.rglob("*")) == before
    assert bool(verdict.notes) == ("compute_dtype=bfloat16" in overrides)
    assert any(note.startswith("model.images") for note in verdict.notes) == ("model.images=frozen" in overrides)


def test_a_wrong_gradient_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = SGD.update

    def wrong(self: SGD, blocks: Any, gradient: torch.Tensor, segments: Any, update: Update) -> None:
        right(self, blocks, gradient, segments[:-1], update)  # one tensor of each layer is forgotten

    monkeypatch.setattr(SGD, "update", wrong)
    verdict = verify(None, tiers=["ram"], scratch=tmp_path)
    assert failed(verdict) == {"gradient"}
    [check] = [check for check in verdict.checks if not check.holds]
    assert any("model.layers.0." in problem for problem in check.problems)


def test_a_wrong_update_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = AdamW.update

    def wrong(self: AdamW, blocks: Any, gradient: torch.Tensor, segments: Any, update: Update) -> None:
        right(self, blocks, gradient, segments, replace(update, lr=1.05 * update.lr))

    monkeypatch.setattr(AdamW, "update", wrong)
    assert failed(verify(None, tiers=["ram"], scratch=tmp_path)) >= {"loss", "weights"}


@pytest.mark.slow
def test_what_depends_on_the_place_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = proof.make_config

    def wrong(setting: Any, name: str, *args: Any, **options: Any) -> Any:
        config = right(setting, name, *args, **options)
        return config.model_copy(update={"data_seed": 7}) if name == "place0" else config

    monkeypatch.setattr(proof, "make_config", wrong)
    verdict = verify(None, scratch=tmp_path)
    assert failed(verdict) == {"everything"}
    problems = " ".join(problem for check in verdict.checks for problem in check.problems)
    assert "loss of step 1" in problems and "norm of step 1" in problems and "the exported model" in problems
    assert "18 of 18 blocks" in problems


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    monkeypatch.chdir(tmp_path)
    group = importlib.import_module(f"{PACKAGE}.main").command_group
    return lambda *words: CliRunner().invoke(group, ["verify", *map(str, words)])


@pytest.mark.slow
def test_the_command(call: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    result = call("--tiers", "ram")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].startswith("llama, 0.2") and lines[-1].startswith("equal: tiered training is plain training")
    assert "\x1b" not in result.output and not list(tmp_path.iterdir())
    monkeypatch.setitem(proof.verify.__kwdefaults__, "tolerances", Tolerances(loss=-1.0))
    result = call("--tiers", "ram", "--json")
    assert result.exit_code == 5
    values = json.loads(result.stdout)
    assert not values["holds"] and any(check["problems"] for check in values["checks"])
    result = call("--tiers", "ram")
    assert result.exit_code == 5 and "differs: loss of 4 steps: step" in result.stdout


@pytest.mark.slow
def test_several_processes_are_compared_with_one(call: Callable[..., Any], tmp_path: Path) -> None:
    result = call("--processes", "2", "--json")
    assert result.exit_code == 0, result.output
    check = json.loads(result.stdout)["checks"][-1]
    assert check["what"] == "2 processes together" and check["found"] == "4 losses and norms, the exported model"
    assert not list(tmp_path.iterdir())
    command = [sys.executable, "-c", "import sys; sys.exit('no room')"]
    verdict = verify(None, tiers=["ram"], scratch=tmp_path, num_processes=2, run_command=command)
    assert not verdict.holds and verdict.checks[-1].problems == ("1 processes: no room",)


def test_processes_that_cannot_train_together_are_refused(call: Callable[..., Any], tmp_path: Path) -> None:
    config_of(tmp_path, "llama")
    result = call(tmp_path / "run.toml", "--processes", "2", "--set", "optimizer.optim=adafactor")
    assert result.exit_code == 2 and "with 2 processes each has a part of every one" in result.stderr


def test_wrong_use(call: Callable[..., Any], tmp_path: Path) -> None:
    assert call("--tiers", "tape").exit_code == 2
    assert call(tmp_path / "missing.toml").exit_code == 2
    config_of(tmp_path, "t5")
    result = call(tmp_path / "run.toml", "--tiers", "ram")
    assert result.exit_code == 2 and "uses a small Llama" in result.stderr
