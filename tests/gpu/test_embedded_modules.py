"""``megatrain.offload`` on a GPU: losses match the plain model's. Results are bit-identical for all placements."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainingArguments

import megatrain
from fakes.virtual_cuda import VirtualCuda
from fakes.virtual_embed import embedded
from megatrain.engine.device.environment import deterministic_kernels
from tiered import KiB, MiB

STEPS, ACCUMULATED = 3, 2
IDS = torch.randint(0, 128, (STEPS * ACCUMULATED, 2, 24), generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def _embedded(virtual: VirtualCuda | None) -> Iterator[None]:
    device = nullcontext() if virtual is None else embedded(virtual)
    with deterministic_kernels(torch.device("cuda"), "a test's model"), device:
        yield


def make_model(dtype: torch.dtype) -> Any:
    torch.manual_seed(0)
    config = LlamaConfig(vocab_size=128, hidden_size=64, intermediate_size=96, num_hidden_layers=4)
    config.num_attention_heads, config.num_key_value_heads, config.tie_word_embeddings = 4, 2, False
    return LlamaForCausalLM(config).to(dtype)


def train(model: Any, optimizer: torch.optim.Optimizer) -> list[float]:
    losses: list[Tensor] = []
    for number, ids in enumerate(IDS):
        ids = ids.to("cuda")
        loss = model(input_ids=ids, labels=ids).loss / ACCUMULATED
        loss.backward()
        losses.append(loss.detach())
        if (number + 1) % ACCUMULATED == 0:
            optimizer.step()
            optimizer.zero_grad()
    return [loss.item() for loss in losses]


def tiered(
    folder: Path, dtype: torch.dtype, *, gpu: int = 4 * MiB, weights: str = "ram", gradients: str = "ram"
) -> tuple[list[float], dict[str, Tensor], dict[str, int]]:
    """Train an offloaded model. Return its losses, its weights, and the number of bytes that each link moved."""
    with megatrain.open_store(ram="8MiB", nvme=folder, nvme_size="32MiB", gpu=gpu) as store:
        model = megatrain.offload(make_model(dtype), store, weights=weights, gradients=gradients)
        optimizer = megatrain.TieredAdamW(model.parameters(), lr=1e-2, max_grad_norm=1.0)
        losses = train(model, optimizer)
        found = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        stats = store.stats()
        assert all(tier.home_bytes <= tier.high_water_bytes <= tier.capacity_bytes for tier in stats.tiers.values())
        return losses, found, {name: link.num_bytes for name, link in stats.links.items()}


def test_embedded_losses_match_the_plain_model(virtual: VirtualCuda | None, tmp_path: Path) -> None:
    plain = make_model(torch.float32).to("cuda")
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2, foreach=False)

    def clip(*_: Any) -> None:
        torch.nn.utils.clip_grad_norm_(plain.parameters(), 1.0, foreach=False)

    optimizer.register_step_pre_hook(clip)
    expected = train(plain, optimizer)
    losses, _, moved = tiered(tmp_path, torch.float32)
    assert losses == pytest.approx(expected, rel=2e-5)
    assert moved["ram->gpu"] > 0 < moved["gpu->ram"]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_results_are_bit_identical_for_all_tier_sizes(
    dtype: torch.dtype, virtual: VirtualCuda | None, tmp_path: Path
) -> None:
    losses, weights, _ = tiered(tmp_path / "ram", dtype)
    cases: dict[str, dict[str, Any]] = {
        "tight": {"gpu": 640 * KiB},
        "nvme": {"gpu": 640 * KiB, "weights": "nvme", "gradients": "nvme"},
        "resident": {"weights": "gpu", "gradients": "gpu"},
    }
    for name, options in cases.items():
        other_losses, other_weights, _ = tiered(tmp_path / name, dtype, **options)
        assert other_losses == losses, name
        assert all(torch.equal(other_weights[key], weights[key]) for key in weights), name


def test_transformers_trainer_losses_match_the_cpu(virtual: VirtualCuda | None, tmp_path: Path) -> None:
    rows = [{"input_ids": row, "labels": row} for row in IDS.reshape(-1, IDS.shape[-1])]

    def losses_of(trainer_class: Any, model: Any, folder: Path, **options: Any) -> list[float]:
        arguments = TrainingArguments(
            str(folder),
            per_device_train_batch_size=2,
            max_steps=4,
            learning_rate=1e-2,
            logging_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            dataloader_pin_memory=False,
            **options,
        )
        trainer = trainer_class(model=model, args=arguments, train_dataset=rows)
        trainer.train()
        assert arguments.device.type == ("cpu" if options else "cuda")
        return [row["loss"] for row in trainer.state.log_history if "loss" in row]

    expected = losses_of(Trainer, make_model(torch.float32), tmp_path / "plain", use_cpu=True)
    with megatrain.open_store(ram="8MiB", nvme=tmp_path / "store", nvme_size="32MiB", gpu=2 * MiB) as store:
        model = megatrain.offload(make_model(torch.float32), store)
        losses = losses_of(megatrain.hf.offloaded(Trainer), model, tmp_path / "tiered")
    assert losses == pytest.approx(expected, rel=1e-4)
