"""A loss term that is a micro-batch mean excludes empty rows, and is weighted by the micro-batch's share of labels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from megatrain.converters.spec import build_graph
from oracles.families import VOCAB, shrunk_config, tiny_config
from oracles.huggingface import build_model
from oracles.memory_access import MemoryAccess
from oracles.runners import layer_runner

pytestmark = pytest.mark.usefixtures("one_thread")

ROUTED: dict[str, Any] = {"output_router_logits": True, "router_aux_loss_coef": 0.3}
LENGTHS = (9, 5, 12, 7, 4, 10)


def texts() -> list[Tensor]:
    generator = torch.Generator().manual_seed(8)
    return [torch.randint(3, VOCAB, (length,), generator=generator) for length in LENGTHS]


def padded(rows: Sequence[Tensor], num_rows: int) -> dict[str, Tensor]:
    """Pad rows as the loader does. An empty row attends to one padding token."""
    length = max((len(row) for row in rows), default=1)
    ids, labels = torch.zeros(num_rows, length, dtype=torch.long), torch.full((num_rows, length), -100)
    mask = torch.zeros_like(ids)
    mask[:, 0] = 1
    for number, row in enumerate(rows):
        ids[number, : len(row)], labels[number, : len(row)], mask[number, : len(row)] = row, row, 1
    return {"input_ids": ids, "labels": labels, "attention_mask": mask}


def packed(rows: Sequence[Tensor], length: int) -> dict[str, Tensor]:
    """Pack rows into a single row of a fixed length. Without rows, the result has only padding."""
    ids, labels = torch.zeros(1, length, dtype=torch.long), torch.full((1, length), -100)
    positions, at = torch.arange(length)[None], 0
    for row in rows:
        part = slice(at, at + len(row))
        ids[0, part], labels[0, part], positions[0, part] = row, row, torch.arange(len(row))
        labels[0, at] = -100
        at += len(row)
    positions[0, at:] = torch.arange(length - at)
    return {"input_ids": ids, "labels": labels, "position_ids": positions}


def streamed(config: Any, batches: Sequence[Mapping[str, Tensor]], **options: Any) -> tuple[float, dict[str, Tensor]]:
    graph = build_graph(config)
    access = MemoryAccess(graph, dict(build_model(config).named_parameters()), torch.float32)
    loss = layer_runner(graph, access, head_rows=4, **options).forward_backward(batches, seed=3)
    return loss.loss, access.finish()


def by_hand(config: Any, batches: Sequence[Mapping[str, Tensor]]) -> tuple[float, dict[str, Tensor]]:
    """Return loss and gradients by definition: micro-batch means without empty rows, weighted by their label counts."""
    model, total, parts = build_model(config), 0.0, []
    for batch in batches:
        kept = (batch["labels"][:, 1:] != -100).any(1)
        if kept.any():
            own = {name: tensor[kept] for name, tensor in batch.items()}
            parts.append((own, int((own["labels"][:, 1:] != -100).sum())))
    for own, count in parts:
        loss = model(**own, use_cache=False).loss * count / sum(count for _, count in parts)
        loss.backward()
        total += float(loss.detach())
    return total, {name: weight.grad for name, weight in model.named_parameters() if weight.grad is not None}


def assert_close(found: tuple[float, dict[str, Tensor]], expected: tuple[float, dict[str, Tensor]]) -> None:
    assert found[0] == pytest.approx(expected[0], rel=1e-6)
    assert set(found[1]) == set(expected[1])
    noise = 1e-7 * max(float(gradient.abs().max()) for gradient in expected[1].values())
    for name, gradient in expected[1].items():
        error = float((found[1][name] - gradient).abs().max())
        assert error <= max(noise, 1e-5 * float(gradient.abs().max())), name


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("num_micro_batches", [1, 2, 6])
def test_router_loss_with_empty_micro_batches(family: str, num_micro_batches: int) -> None:
    config = tiny_config(family, **ROUTED)
    full, empty = packed(texts(), 60), packed([], 60)
    found = streamed(config, [full, *[empty] * (num_micro_batches - 1)])
    assert_close(found, by_hand(config, [full]))
    alone = streamed(config, [full])
    assert found[0] == alone[0]
    assert all(torch.equal(found[1][name], alone[1][name]) for name in alone[1])


def test_last_step_of_an_epoch_has_one_row() -> None:
    config = tiny_config("qwen3_moe", **ROUTED)
    row = padded(texts()[:1], 1)
    assert_close(streamed(config, [row, *[padded([], 1)] * 3]), by_hand(config, [row]))


@pytest.mark.parametrize("rows", [4, 1, 2, 6])
def test_router_loss_weights_micro_batches_by_label_count(rows: int) -> None:
    config = tiny_config("qwen3_moe", **ROUTED)
    # With four rows per micro-batch, the second one has two empty rows.
    batches = [padded(texts()[at : at + rows], rows) for at in range(0, len(LENGTHS), rows)]
    found = streamed(config, batches)
    assert_close(found, by_hand(config, batches))
    again = streamed(config, batches, order="micro_batch", head_columns=20, is_part_major=True)
    assert_close(again, by_hand(config, batches))


def test_one_row_at_a_time_is_the_weighted_mean_of_the_rows() -> None:
    config = tiny_config("qwen3_moe", **ROUTED)
    singles = [padded([row], 1) for row in texts()]
    losses = [streamed(config, [single])[0] for single in singles]
    counts = [length - 1 for length in LENGTHS]
    mean = sum(loss * count for loss, count in zip(losses, counts, strict=True)) / sum(counts)
    assert streamed(config, singles)[0] == pytest.approx(mean, rel=1e-6)


@pytest.mark.parametrize("num_empty", [0, 3])
def test_model_specific_z_loss_is_averaged_per_micro_batch(num_empty: int) -> None:
    """Bamba adds a z-loss, which is a mean over all logits of a micro-batch."""
    config = shrunk_config("bamba")
    config.z_loss_coefficient = 0.2
    batches = [padded(texts()[:2], 2), padded(texts()[2:3], 1)]
    found = streamed(config, [*batches, *[padded([], 1)] * num_empty])
    assert_close(found, by_hand(config, batches))
