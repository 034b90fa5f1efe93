"""Loss and every gradient of the streamed step match plain Hugging Face, for every family."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch

from megatrain.converters.spec import build_graph
from oracles.families import FAMILIES, RECENT, packed_batches, padded_batches, tiny_config
from oracles.huggingface import Reference, build_model, train_step
from oracles.memory_access import MemoryAccess
from oracles.runners import StepLoss, StepRunner, layer_runner

pytestmark = pytest.mark.usefixtures("one_thread")

SEED = 11
TIED = ("llama", "qwen2", "qwen3", "gemma2", "gemma3_text", "gpt2", "opt", "phi3", "granite", "cohere2", "smollm3")
#: Tolerance by family. In these families, fp32 gradients have large rounding errors even in Hugging Face: 2.9e-5 of the
#: largest gradient.
NOISY = {"gemma4_text": 5e-5}


def streamed(
    config: Any,
    model: Any,
    batches: Sequence[Mapping[str, torch.Tensor]],
    *,
    order: Any = "layer",
    head_rows: int | None = None,
    freeze: Sequence[str] = (),
    dtype: torch.dtype = torch.float32,
) -> tuple[StepLoss, dict[str, torch.Tensor], StepRunner]:
    graph = build_graph(config, freeze=freeze, dtype=dtype)
    buffers = dict(model.named_buffers())
    for name, buffer in graph.model.named_buffers():
        torch.testing.assert_close(buffer, buffers[name], rtol=0, atol=0)
    access = MemoryAccess(graph, dict(model.named_parameters()), dtype)
    runner = layer_runner(graph, access, device="cpu", order=order, head_rows=head_rows)
    loss = runner.forward_backward(batches, seed=SEED)
    assert all(parameter.is_meta for parameter in graph.model.parameters())
    return loss, access.finish(), runner


def assert_equal(
    expected: Reference, loss: StepLoss, gradients: Mapping[str, torch.Tensor], tolerance: float = 1e-5
) -> None:
    assert loss.loss == pytest.approx(expected.loss, rel=min(1e-6, tolerance) if tolerance < 1e-4 else 1e-3)
    assert set(gradients) == set(expected.gradients)
    # A key bias has no effect on the loss, so its gradient is only rounding noise from the other gradients.
    noise = 1e-7 * max(float(gradient.abs().max()) for gradient in expected.gradients.values())
    for name, gradient in expected.gradients.items():
        error = (gradients[name] - gradient).abs().max()
        assert error <= max(noise, tolerance * gradient.abs().max()), (name, float(error), float(gradient.abs().max()))


def compare(
    config: Any, batches: Sequence[Mapping[str, torch.Tensor]], *, tolerance: float = 1e-5, **options: Any
) -> StepRunner:
    """Compare a step in layer order with Hugging Face, and bit for bit with a step in micro-batch order."""
    model = build_model(config, freeze=options.get("freeze", ()))
    expected = train_step(model, batches, SEED)
    loss, gradients, runner = streamed(config, model, batches, **options)
    assert_equal(expected, loss, gradients, tolerance)
    again, others, _ = streamed(config, model, batches, order="micro_batch", **options)
    assert again == loss
    assert all(torch.equal(others[name], gradients[name]) for name in gradients)
    return runner


@pytest.mark.parametrize("family", sorted(FAMILIES | RECENT))
def test_family_untied(family: str) -> None:
    runner = compare(tiny_config(family, tied=False), padded_batches(), tolerance=NOISY.get(family, 1e-5))
    assert runner.head.rows


@pytest.mark.parametrize("family", TIED)
def test_tied_family_with_small_head_chunks(family: str) -> None:
    runner = compare(tiny_config(family, tied=True), padded_batches(), head_rows=4)
    assert runner.head.rows == 4


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe", "gpt_oss"])
def test_router_auxiliary_loss(family: str) -> None:
    config = tiny_config(family, output_router_logits=True, router_aux_loss_coef=0.3)
    without = tiny_config(family)
    runner = compare(config, padded_batches(), head_rows=4)
    assert runner.head.rows
    model = build_model(config)
    with_term, _, _ = streamed(config, model, padded_batches())
    plain, _, _ = streamed(without, model, padded_batches())
    assert with_term.loss > plain.loss + 0.1


@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_dropout_is_repeated_in_the_recompute(family: str) -> None:
    rates = {"attn_pdrop": 0.2, "resid_pdrop": 0.2, "embd_pdrop": 0.2, "dropout": 0.2, "attention_dropout": 0.2}
    config = tiny_config(family, **rates)
    compare(config, padded_batches())
    model = build_model(config)
    assert train_step(model, padded_batches(), SEED).loss != train_step(model, padded_batches(), SEED + 1).loss


@pytest.mark.parametrize(
    "freeze",
    [
        ["model.embed_tokens.*", "model.layers.0.*"],
        ["*norm*"],
        ["lm_head.weight"],
        ["model.layers.*.self_attn.*", "model.embed_tokens.weight"],
    ],
)
def test_frozen_parameters(freeze: list[str]) -> None:
    compare(tiny_config("llama", tied=False), padded_batches(), freeze=freeze)


def test_only_the_head_is_trained() -> None:
    compare(tiny_config("llama", tied=False), padded_batches(), freeze=["model.*"])


def test_packed_documents() -> None:
    compare(tiny_config("llama", tied=True), packed_batches())


def test_bfloat16() -> None:
    config = tiny_config("llama", tied=False)
    model = build_model(config, torch.bfloat16)
    batches = padded_batches()[:1]  # Hugging Face adds gradients in bf16, but the engine in fp32
    expected = train_step(model, batches, SEED)
    loss, gradients, _ = streamed(config, model, batches, dtype=torch.bfloat16)
    assert_equal(expected, loss, {n: g.to(torch.bfloat16) for n, g in gradients.items()}, tolerance=2e-2)
    again, others, _ = streamed(config, model, batches, dtype=torch.bfloat16, order="micro_batch")
    assert again == loss
    assert all(torch.equal(others[name], gradients[name]) for name in gradients)


def test_steps_with_equal_seeds_are_bit_identical() -> None:
    config = tiny_config("gpt2", resid_pdrop=0.2)
    model = build_model(config)
    graph = build_graph(config)
    access = MemoryAccess(graph, dict(model.named_parameters()), torch.float32)
    runner = layer_runner(graph, access, device="cpu")
    state = torch.get_rng_state()
    first, gradients = runner.forward_backward(padded_batches(), seed=1), access.finish()
    second, others = runner.forward_backward(padded_batches(), seed=1), access.finish()
    third, _ = runner.forward_backward(padded_batches(), seed=2), access.finish()
    assert first == second != third
    assert all(torch.equal(others[name], gradients[name]) for name in gradients)
    assert torch.equal(torch.get_rng_state(), state)
