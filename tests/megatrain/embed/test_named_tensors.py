"""``named_tensors`` gives the weights to another program, and ``release`` frees GPU memory for it between steps."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM

import megatrain
from megatrain.embed.partition import OffloadError
from oracles.embedded import small_store
from oracles.tiered_run import QUICKSTART
from tiered import GpuTier, MiB, NvmeTier, RamTier, TieredStore

pytestmark = pytest.mark.filterwarnings("ignore::FutureWarning")  # peft uses a deprecated name in transformers

IDS = torch.randint(0, 1024, (2, 12), generator=torch.Generator().manual_seed(1))


def make(dtype: torch.dtype = torch.float32) -> Any:
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(QUICKSTART)).to(dtype)


def step(model: Any, optimizer: torch.optim.Optimizer) -> None:
    model(input_ids=IDS, labels=IDS).loss.backward()
    optimizer.step()
    optimizer.zero_grad()


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert list(found) == list(expected)
    for name, tensor in expected.items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("weights", ["auto", "nvme"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_named_tensors_yield_the_last_update(weights: str, dtype: torch.dtype, tmp_path: Path) -> None:
    plain, model = make(dtype), make(dtype)
    with small_store(tmp_path) as store:
        megatrain.offload(model, store, weights=weights)
        twin = megatrain.TieredAdamW(plain.parameters(), lr=1e-2, store=store)
        optimizer = megatrain.TieredAdamW(model.parameters(), lr=1e-2)
        step(plain, twin)
        step(model, optimizer)  # each layer's update waits for the layer's next use
        found = dict(megatrain.named_tensors(model))
        assert_same(found, {name: p.detach() for name, p in plain.named_parameters()})  # a tied weight occurs once
        step(model, optimizer)
        assert_same(
            found, {name: p.detach() for name, p in plain.named_parameters()}
        )  # they are copies, so a later step does not change them


def test_yielded_tensors_hold_no_leases(tmp_path: Path) -> None:
    model = make()
    with small_store(tmp_path) as store:
        megatrain.offload(model, store, weights="nvme")
        optimizer = megatrain.TieredAdamW(model.parameters(), lr=1e-2)
        left = megatrain.named_tensors(model)
        next(left)
        step(model, optimizer)
        before = dict(megatrain.named_tensors(model))
        assert torch.equal(dict(left)["model.norm.weight"], before["model.norm.weight"])


def with_adapters(kind: str) -> Any:
    peft = pytest.importorskip("peft")
    options = {"lora": {}, "dora": {"use_dora": True}, "saved": {"modules_to_save": ["norm"]}}[kind]
    config = peft.LoraConfig(r=4, target_modules=["q_proj", "down_proj"], task_type="CAUSAL_LM", **options)
    torch.manual_seed(1)
    model = peft.get_peft_model(make(), config)
    for name, parameter in model.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return model


@pytest.mark.parametrize("kind", ["lora", "dora", "saved"])
def test_merging_adapters_leaves_base_weights_unchanged(kind: str, tmp_path: Path) -> None:
    model = with_adapters(kind)
    plain = copy.deepcopy(model)
    with small_store(tmp_path) as store:
        megatrain.offload(model, store, weights="nvme")
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        found = dict(megatrain.named_tensors(model))
        after = model.state_dict()
        assert all(torch.equal(after[name], tensor) for name, tensor in before.items())
        apart = dict(megatrain.named_tensors(model, merge=False))
        assert any("lora_B" in name for name in apart)
    merged = plain.merge_and_unload()
    assert_same(found, {name: p.detach() for name, p in merged.named_parameters()})


def test_learned_prompts_are_refused(tmp_path: Path) -> None:
    peft = pytest.importorskip("peft")
    model = peft.get_peft_model(make(), peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=4))
    with pytest.raises(OffloadError, match="merge=False"):
        next(megatrain.named_tensors(model))


def test_fastest_tier_memory_is_released_between_steps(tmp_path: Path) -> None:
    tiers = [
        GpuTier(4 * MiB, device="cpu"),
        RamTier(16 * MiB),
        NvmeTier([str(tmp_path / "drive")], 256 * MiB),
    ]
    plain, model = make(), make()
    with TieredStore(tiers) as store, small_store(tmp_path / "other") as other:
        megatrain.offload(model, store, weights="ram", gradients="ram")
        optimizer = megatrain.TieredAdamW(model.parameters(), lr=1e-2)
        twin = megatrain.TieredAdamW(plain.parameters(), lr=1e-2, store=other)
        gpu: Any = store.tier("gpu")
        for _ in range(2):
            step(model, optimizer)
            step(plain, twin)
            assert megatrain.release(store, "gpu") == 0
            assert gpu.usage().used_bytes == 0 == gpu._pool.pooled_bytes, "given back, not only free"
        assert gpu.num_drops > 0
        assert_same(dict(megatrain.named_tensors(model)), {name: p.detach() for name, p in plain.named_parameters()})
        assert 0 < gpu.usage().used_bytes <= gpu.capacity_bytes
