"""Lines that a plan prints."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatrain.config import load_config
from megatrain.models.graph import ModelGraph
from megatrain.plan.show import headline
from oracles.tiered_run import EXAMPLES, config_text, plan_of


def test_headline_counts_parameters_in_millions_or_billions(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "run.toml").write_text(config_text(tmp_path, EXAMPLES / "quickstart" / "model"))
    plan = plan_of(load_config(tmp_path / "run.toml").config)
    for count, text in ((999_900_000, "999.9 M"), (1_000_000_000, "1.00 B"), (1_050_000_000, "1.05 B")):
        monkeypatch.setattr(ModelGraph, "num_parameters", count)
        assert f"model  {text} parameters" in headline(plan)
