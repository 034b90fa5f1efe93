"""peft adapters of an offloaded model can be merged, removed and saved. Resizing its vocabulary is refused."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from torch import nn
from transformers import AutoModelForCausalLM

import megatrain
from megatrain.embed.offloaded_module import offloaded_module
from megatrain.embed.partition import OffloadError
from oracles.embedded import assert_same_weights, small_store
from oracles.families import VOCAB, tiny_config

pytestmark = pytest.mark.filterwarnings(
    "ignore:`is_gradient_checkpointing` is deprecated:FutureWarning",  # peft reads transformers' deprecated name
    "ignore:Merging adapters:UserWarning",
)
IDS = torch.randint(3, VOCAB, (2, 9), generator=torch.Generator().manual_seed(1))


def adapted(family: str, targets: list[str], **options: Any) -> Any:
    """Return a model with adapters that are not zero."""
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(tiny_config(family))
    settings = peft.LoraConfig(r=4, target_modules=targets, task_type="CAUSAL_LM", **options)
    found = peft.get_peft_model(model, settings)
    for name, parameter in found.named_parameters():
        if "lora_B" in name:
            nn.init.normal_(parameter, std=0.1)
    return found


@pytest.mark.parametrize(
    ("family", "targets", "options"),
    [
        ("llama", ["q_proj", "down_proj", "lm_head"], {}),
        ("gemma2", ["v_proj"], {"use_dora": True}),  # has a tied head
        ("llama", ["q_proj"], {"modules_to_save": ["lm_head"]}),
    ],
)
@pytest.mark.parametrize("home", ["ram", "nvme"])
def test_adapters_are_merged_in_the_store(
    family: str, targets: list[str], options: dict[str, Any], home: str, tmp_path: Path
) -> None:
    plain = adapted(family, targets, **options)
    model = copy.deepcopy(plain)
    with small_store(tmp_path) as store:
        megatrain.offload(model, store, weights=home)
        optimizers = [
            megatrain.TieredAdamW(
                (p for p in plain.parameters() if p.requires_grad), lr=1e-2, store=store, name="twin"
            ),
            megatrain.TieredAdamW((p for p in model.parameters() if p.requires_grad), lr=1e-2),
        ]
        for one, optimizer in zip((plain, model), optimizers, strict=True):
            one(input_ids=IDS, labels=IDS).loss.backward()
            optimizer.step()  # the update waits until the merge, the next use of the weights
        model.merge_adapter()
        model.unmerge_adapter()
        plain.merge_adapter()
        plain.unmerge_adapter()
        merged, expected = model.merge_and_unload(), plain.merge_and_unload()
        assert not any("lora" in name for name, _ in merged.named_parameters())
        assert merged.config.tie_word_embeddings == expected.config.tie_word_embeddings
        assert_same_weights(expected, merged)
        assert offloaded_module(merged) is not None
        with torch.no_grad():
            assert torch.equal(merged(input_ids=IDS).logits, expected(input_ids=IDS).logits)
        merged.save_pretrained(tmp_path / "merged")
        assert_same_weights(expected, AutoModelForCausalLM.from_pretrained(tmp_path / "merged"))


def test_adapters_are_unloaded_without_merging(tmp_path: Path) -> None:
    plain = adapted("llama", ["q_proj"])
    model = copy.deepcopy(plain)
    with small_store(tmp_path) as store:
        found = megatrain.offload(model, store, weights="nvme").unload()
        assert_same_weights(plain.unload(), found)
        found(input_ids=IDS, labels=IDS)


def test_unmergeable_adapters_are_refused(tmp_path: Path) -> None:
    settings = peft.LoraConfig(r=2, target_modules=["0"])

    class Attends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.ModuleList([nn.MultiheadAttention(8, 2)])

    model: Any = peft.get_peft_model(Attends(), settings)  # type: ignore[arg-type]
    with small_store(tmp_path) as store:
        megatrain.offload(model, store)
        with pytest.raises(OffloadError, match=r"MultiheadAttention.*ordinary model"):
            model.merge_and_unload()


def test_resizing_the_vocabulary_after_offload_is_refused(tmp_path: Path) -> None:
    model: Any = AutoModelForCausalLM.from_config(tiny_config("llama"))
    model.resize_token_embeddings(VOCAB + 5)
    with small_store(tmp_path) as store:
        megatrain.offload(model, store)
        embedding = model.get_input_embeddings()
        assert model.resize_token_embeddings(VOCAB + 5) is model.resize_token_embeddings() is embedding
        for options in ({"new_num_tokens": VOCAB + 9}, {"pad_to_multiple_of": 64}):
            with pytest.raises(OffloadError, match=r"resize_token_embeddings\(\d+\) before megatrain.offload"):
                model.resize_token_embeddings(**options)
        wrapped = peft.get_peft_model(model, peft.LoraConfig(target_modules=["q_proj"]))  # peft passes the call on
        with pytest.raises(OffloadError, match=r"before megatrain\.offload"):
            wrapped.resize_token_embeddings(VOCAB)
        model(input_ids=IDS, labels=IDS)
