"""Offloaded tiny models of many Hugging Face families match plain models bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

import megatrain
from oracles.embedded import assert_same_gradients, assert_same_weights, pair_of, small_store
from oracles.families import FAMILIES, VOCAB, tiny_config


def make(family: str) -> nn.Module:
    model: nn.Module = AutoModelForCausalLM.from_config(tiny_config(family), attn_implementation="eager")
    return model.train()


def _recompute(model: nn.Module) -> None:
    """Enable recompute of layers in the backward. The method's name depends on the version of transformers."""
    if getattr(model, "supports_gradient_checkpointing", False):
        getattr(model, "activation_checkpointing_enable", model.gradient_checkpointing_enable)()


@pytest.mark.parametrize("family", list(FAMILIES))
def test_gradients_and_weights(family: str, tmp_path: Path) -> None:
    plain, model = pair_of(lambda: make(family))
    generator = torch.Generator().manual_seed(2)
    with small_store(tmp_path) as store:
        megatrain.offload(model, store, weights="nvme", gradients="nvme")
        twin = megatrain.TieredAdamW(plain.parameters(), lr=1e-3, store=store, max_grad_norm=1.0)
        optimizer = megatrain.TieredAdamW(model.parameters(), lr=1e-3, max_grad_norm=1.0)
        for step in range(2):
            ids = torch.randint(3, VOCAB, (2, 9), generator=generator)
            if step:
                for one in (plain, model):
                    _recompute(one)
            losses = [one(input_ids=ids, labels=ids, use_cache=False).loss for one in (plain, model)]
            for loss in losses:
                loss.backward()
            assert torch.equal(*losses)
            assert_same_gradients(plain, model)
            twin.step()
            optimizer.step()
            twin.zero_grad()
            assert twin.grad_norm == optimizer.grad_norm
        assert_same_weights(plain, model)
        with torch.no_grad():
            ids = ids[:, :4]
            outputs = [one.eval()(input_ids=ids).logits for one in (plain, model)]
        assert torch.equal(*outputs)


def test_at_least_twelve_families_are_tested() -> None:
    assert len(FAMILIES) >= 12
