"""`verify` finds no difference in correct training, and names a wrong gradient, update or placement."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from transformers import CONFIG_MAPPING

from megatrain.api import DoesNotFitError, plan_run, resolve
from megatrain.config import load_config
from megatrain.config.schema import RunConfig
from megatrain.extras import verify as module
from megatrain.extras.verify import VerifyResult, verify
from megatrain.optim.base import Update
from megatrain.optim.elementwise import SGD, AdamW
from processes.saved_run import command_group


def config_of(tmp_path: Path, family: str, *overrides: str, drives: int = 0) -> Any:
    """Write a model folder with a family's default config but without weights, and return a run config for it."""
    CONFIG_MAPPING[family]().save_pretrained(tmp_path / "model")
    text = 'task = "sft"\noutput_dir = "out"\ndevice = "cpu"\n[model]\nmodel_name_or_path = "MODEL"\n[data]\n'
    text = text.replace("MODEL", str(tmp_path / "model")) + '[[data.train]]\npath = "d.jsonl"\n'
    text += "".join(f'[[tiers.nvme]]\npath = "drive{number}"\n' for number in range(drives))
    (tmp_path / "run.toml").write_text(text)
    return load_config(tmp_path / "run.toml", (), overrides).config


def failed(verdict: VerifyResult) -> set[str]:
    """Return the first word of every failed check."""
    assert not verdict.holds
    return {check.what.split()[0] for check in verdict.checks if not check.holds}


@pytest.mark.slow
def test_no_difference_on_a_small_llama(tmp_path: Path) -> None:
    messages: list[str] = []
    verdict = verify(None, scratch=tmp_path, on_progress=messages.append)
    assert verdict.holds, verdict
    assert [check.what.split()[0] for check in verdict.checks] == ["loss", "gradient", "gradient", "weights", "all"]
    assert verdict.checks[4].what == "all on 2 drives, stopped after step 2, resumed"
    assert verdict.checks[4].found == "4 losses and norms, 18 blocks"
    assert not verdict.notes and not list(tmp_path.iterdir()) and len(messages) == 4


@pytest.mark.parametrize(
    ("family", "overrides", "notes"),
    [
        (
            "qwen2",
            ["optim=adafactor", "compute_dtype=bfloat16", "grad_dtype=bfloat16", "model.images=frozen"],
            ["plain", "[optimizer]:", "model.images"],
        ),
        pytest.param("gpt2", ["data.packing=false", "max_grad_norm=0"], [], marks=pytest.mark.slow),
        pytest.param(
            "qwen3_moe",
            ["max_grad_norm=0.05", 'model.freeze=["model.layers.40.*"]', "adam_beta1=0.8", "weight_decay=0.1"],
            ["[lora],"],
            marks=pytest.mark.slow,
        ),
    ],
)
def test_no_difference_on_the_users_model(family: str, overrides: list[str], notes: list[str], tmp_path: Path) -> None:
    config = config_of(tmp_path, family, *overrides, drives=1)
    before = sorted(tmp_path.rglob("*"))
    verdict = verify(config, scratch=tmp_path)
    assert verdict.holds, verdict
    assert family in verdict.headline and "a scaled-down copy of model" in verdict.headline
    assert sorted(tmp_path.rglob("*")) == before
    assert [note.split()[0] for note in verdict.notes] == notes


def test_every_value_of_the_compared_runs(tmp_path: Path) -> None:
    """All runs have the user's seeds, packing and drive settings. Runs on drives have the least possible RAM."""
    overrides = ["seed=7", "data_seed=8", "data.packing=false", "tiers.direct=off", "tiers.verify=off"]
    config = config_of(tmp_path, "llama", *overrides, "attn_implementation=eager")
    (tmp_path / "new").mkdir()
    comparison = module._Comparison(config, tmp_path / "new", lambda text: None)
    values = {
        "task": "pretrain", "output_dir": str(tmp_path / "new/one"), "seed": 7, "data_seed": 8, "device": "cpu",
        "model": {
            "model_name_or_path": str(tmp_path / "new/model"),
            "tokenizer_name_or_path": str(tmp_path / "new/tokenizer"), "attn_implementation": "eager",
            "use_liger_kernel": False,
        },
        "precision": {"compute_dtype": "float32", "grad_dtype": "float32"},
        "data": {
            "max_length": 64, "packing": False, "cache_dir": "none", "train_on": "all",
            "train": ({"path": str(tmp_path / "new/text.jsonl"), "format": "text"},),
        },
        "training": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 3, "max_steps": 4},
        "optimizer": {"optim": "sgd"},
        "checkpoint": {"save_steps": 10**9, "min_free_disk": "0B", "save_on_signal": False},
        "export": {"dtype": "float32"}, "logging": {"report_to": (), "progress": "none"},
        "tiers": {
            "ram": {"size": "auto"}, "on_disk_full": "error", "allow_tmpfs": True, "engine": "posix", "direct": "off",
            "verify": "off",
        },
    }  # fmt: skip
    assert comparison._config("one", {"optim": "sgd"}).model_dump(mode="python", exclude_unset=True) == {
        **values, "output_dir": str(tmp_path / "new/one"),
    }  # fmt: skip
    drives = [tmp_path / "d0", tmp_path / "d1"]
    on_drives = comparison._config(
        "two", {"optim": "sgd"}, num_steps=2, precision=("bfloat16", "float32"), drives=drives
    )  # fmt: skip
    least = on_drives.tiers.ram.size
    assert on_drives.model_dump(mode="python", exclude_unset=True) == {
        **values, "output_dir": str(tmp_path / "new/two"),
        "training": {**values["training"], "max_steps": 2},
        "precision": {"compute_dtype": "bfloat16", "grad_dtype": "float32"},
        "placement": dict.fromkeys(("weights", "gradients", "optimizer", "activations"), ("nvme",)),
        "tiers": {
            **values["tiers"], "ram": {"size": least.text},
            "nvme": tuple({"path": str(drive / "two"), "size": "auto"} for drive in drives),
        },
    }  # fmt: skip
    smaller = on_drives.model_dump(mode="python", exclude_unset=True)
    smaller["tiers"]["ram"]["size"] = f"{least.nbytes - 4096}B"
    with pytest.raises(DoesNotFitError):
        plan_run(resolve(RunConfig.model_validate(smaller)))


def test_a_wrong_gradient_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = SGD.update

    def wrong(self: SGD, blocks: Any, gradient: torch.Tensor, segments: Any, update: Update) -> None:
        right(self, blocks, gradient, segments[:-1], update)  # skip the last segment of each update

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
def test_a_result_that_depends_on_the_placement_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    right = module._train

    def wrong(config: Any, *before: Any) -> Any:
        return right(config.model_copy(update={"data_seed": 7}) if config.tiers.nvme else config, *before)

    monkeypatch.setattr(module, "_train", wrong)
    verdict = verify(None, scratch=tmp_path)
    assert failed(verdict) == {"all"}
    problems = " ".join(verdict.checks[-1].problems)
    assert "loss of step 1" in problems and "gradient norm of step 1" in problems and "18 of 18 blocks" in problems


@pytest.fixture
def call(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    monkeypatch.chdir(tmp_path)
    group = command_group()
    return lambda *words: CliRunner().invoke(group, ["verify", *map(str, words)])


@pytest.mark.slow
def test_the_command(call: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    result = call("--tiers", "ram")
    assert result.exit_code == 0, result.output
    lines = result.stdout.splitlines()
    assert lines[0].startswith("llama, 0.2") and lines[-1].startswith("equal: tiered training equals plain training")
    assert "\x1b" not in result.output and not list(tmp_path.iterdir())
    monkeypatch.setattr(module, "LOSS_TOLERANCE", -1.0)
    result = call("--tiers", "ram", "--json")
    assert result.exit_code == 5
    values = json.loads(result.stdout)
    assert not values["holds"] and any(check["problems"] for check in values["checks"])
    result = call("--tiers", "ram")
    assert result.exit_code == 5 and "differs: loss of 4 steps: step" in result.stdout


def test_wrong_use(call: Callable[..., Any], tmp_path: Path) -> None:
    assert call("--tiers", "tape").exit_code == 2
    assert call(tmp_path / "missing.toml").exit_code == 2
    result = call("--processes", "2")
    assert result.exit_code == 2 and "no longer has --processes. Run CONFIG twice" in result.stderr
    config_of(tmp_path, "t5")
    result = call(tmp_path / "run.toml", "--tiers", "ram")
    assert result.exit_code == 2 and "uses a small Llama" in result.stderr
