"""With PyTorch's selective checkpointing, an offloaded model does not recompute kept matrix products."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
from transformers import AutoModelForCausalLM

import megatrain
from oracles.embedded import assert_same_gradients, assert_same_weights, pair_of, small_store
from oracles.families import VOCAB, tiny_config

PRODUCTS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default, torch.ops.aten.bmm.default)


class Counter(TorchDispatchMode):
    """Mode that counts matrix products."""

    def __init__(self) -> None:
        super().__init__()
        self.products = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.products += func in PRODUCTS
        return func(*args, **(kwargs or {}))


def _keep_products(_: Any, operator: Any, *_args: Any, **_kwargs: Any) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operator in PRODUCTS else CheckpointPolicy.PREFER_RECOMPUTE


def _recompute(model: nn.Module, *, keeps_products: bool) -> None:
    kwargs: dict[str, Any] = {"use_reentrant": False}
    if keeps_products:
        kwargs["context_fn"] = partial(create_selective_checkpoint_contexts, _keep_products)
    if hasattr(model, "activation_checkpointing_enable"):  # the method's name since transformers 5.20
        model.activation_checkpointing_enable(activation_checkpointing_kwargs=kwargs)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=kwargs)


@pytest.mark.parametrize("moves_activations", [False, True])
@pytest.mark.parametrize("family", ["llama", "gpt2", "qwen3_moe"])
def test_saved_products_are_not_recomputed(family: str, moves_activations: bool, tmp_path: Path) -> None:
    def make() -> nn.Module:
        model: nn.Module = AutoModelForCausalLM.from_config(tiny_config(family), attn_implementation="eager")
        return model.train()

    plain, model = pair_of(make)
    generator = torch.Generator().manual_seed(2)
    with small_store(tmp_path) as store:
        megatrain.offload(model, store, weights="nvme", gradients="nvme")
        twin = megatrain.TieredAdamW(plain.parameters(), lr=1e-3, store=store, max_grad_norm=1.0)
        optimizer = megatrain.TieredAdamW(model.parameters(), lr=1e-3, max_grad_norm=1.0)

        activations = megatrain.offload_activations(store, min_bytes=1) if moves_activations else nullcontext()

        def products(one: nn.Module, ids: Tensor) -> int:
            with Counter() as counter, activations if one is model else nullcontext():
                one(input_ids=ids, labels=ids, use_cache=False).loss.backward()
            return counter.products

        counts = []
        for keeps_products in (False, True):
            ids = torch.randint(3, VOCAB, (2, 9), generator=generator)
            for one in (plain, model):
                _recompute(one, keeps_products=keeps_products)
            expected, found = products(plain, ids), products(model, ids)
            assert found == expected
            counts.append(found)
            assert_same_gradients(plain, model)
            twin.step()
            optimizer.step()
            twin.zero_grad()
        # A backward has twice the products of a forward, so about 3 of 4 products are left if none is recomputed.
        assert 3 / 4 * counts[0] < counts[1] < counts[0]
        assert_same_weights(plain, model)
