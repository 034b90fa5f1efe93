"""A model to make a run of, and the command."""

from __future__ import annotations

import importlib
import importlib.util
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from transformers import AutoConfig, AutoModelForCausalLM

QUICKSTART = Path(__file__).parents[3] / "examples" / "quickstart" / "model"
PACKAGE = "megatrain_tier_cli" if importlib.util.find_spec("megatrain_tier_cli") else "cli"


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with weights, config and tokenizer."""
    folder = tmp_path_factory.mktemp("tiny_model")
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(QUICKSTART), dtype=torch.float32)
    model.save_pretrained(folder)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(QUICKSTART / name, folder / name)
    return folder


@pytest.fixture
def cli_call() -> Callable[..., Any]:
    group = importlib.import_module(f"{PACKAGE}.main").command_group
    return lambda *words: CliRunner().invoke(group, list(map(str, words)))
