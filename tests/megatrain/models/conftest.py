"""Fixtures: a model of each family, saved by transformers as one file and as shards."""

from __future__ import annotations

from pathlib import Path

import pytest
from transformers import PreTrainedModel

from tests.megatrain.models.tiny import FAMILIES, build_model


@pytest.fixture(params=list(FAMILIES))
def family(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(params=["1GB", "20KB"], ids=["single_file", "sharded"])
def saved(request: pytest.FixtureRequest, family: str, tmp_path: Path) -> tuple[PreTrainedModel, Path]:
    """Return a model and the folder to which transformers saved it."""
    model = build_model(family)
    folder = tmp_path / "saved"
    model.save_pretrained(folder, max_shard_size=request.param)
    return model, folder
