"""``load_pretrained`` loads a Hugging Face model folder directly into a store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

import megatrain
from megatrain.embed.weights import block_of
from megatrain.models.folder import ModelFolderError
from oracles.embedded import assert_same_gradients, assert_same_weights, small_store
from oracles.families import VOCAB, tiny_config
from tiered import CapacityError


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("model")
    torch.manual_seed(1)
    AutoModelForCausalLM.from_config(tiny_config("gemma2")).save_pretrained(path)  # gemma2 has a tied head
    return path


@pytest.mark.parametrize("dtype", [torch.float32, "bfloat16"])
@pytest.mark.parametrize("options", [{"weights": "nvme"}, {"leave": ["*embed_tokens*", "*norm.weight"]}, {}])
def test_load_pretrained_matches_from_pretrained(
    dtype: Any, options: dict[str, Any], folder: Path, tmp_path: Path
) -> None:
    plain = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    with small_store(tmp_path) as store:
        model = megatrain.load_pretrained(folder, store, dtype=dtype, **options)
        assert model.lm_head.weight is model.model.embed_tokens.weight
        assert any(block_of(p) is None for p in model.parameters()) == ("leave" in options)
        assert_same_weights(plain, model)
        twin = megatrain.TieredAdamW(plain.parameters(), lr=1e-3, store=store, max_grad_norm=1.0, name="twin")
        optimizer = megatrain.TieredAdamW(model.parameters(), lr=1e-3, max_grad_norm=1.0)
        ids = torch.randint(3, VOCAB, (2, 9), generator=torch.Generator().manual_seed(1))
        for one in (plain, model):
            one.train()
            one(input_ids=ids, labels=ids).loss.backward()
        assert_same_gradients(plain, model)
        twin.step()
        optimizer.step()
        assert_same_weights(plain, model)
        model.save_pretrained(tmp_path / "saved")
        assert_same_weights(plain, AutoModelForCausalLM.from_pretrained(tmp_path / "saved", dtype=dtype))


def test_unloadable_folders_are_refused(folder: Path, tmp_path: Path) -> None:
    with small_store(tmp_path) as store:
        with pytest.raises(ModelFolderError, match="nowhere"):
            megatrain.load_pretrained(tmp_path / "nowhere", store)
        with pytest.raises(ValueError, match="bfloat17"):
            megatrain.load_pretrained(folder, store, dtype="bfloat17")
        assert not list(store.blocks())
    with megatrain.open_store(ram="64KiB") as store:
        with pytest.raises(CapacityError, match="Increase"):
            megatrain.load_pretrained(folder, store)
        assert not list(store.blocks())
