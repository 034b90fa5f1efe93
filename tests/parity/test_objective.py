"""Label smoothing, noisy embeddings and z-loss match transformers and torch, and are bit-identical in any placement."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers.integrations.neftune import neftune_post_forward_hook
from transformers.trainer_pt_utils import LabelSmoother

from megatrain.base.errors import UnsupportedModelError
from megatrain.converters.spec import build_graph
from megatrain.engine.head.cross_entropy import CrossEntropy
from megatrain.engine.head.objective import Objective
from megatrain.engine.unit.state import micro_batch_seed
from megatrain.trace.trace import trace_visits
from oracles.families import FAMILIES, padded_batches, tiny_config
from oracles.huggingface import build_model, train_step
from oracles.memory_access import MemoryAccess
from oracles.runners import layer_runner
from oracles.tiered_run import ALL_NVME, config_text, run_config

pytestmark = pytest.mark.usefixtures("one_thread")

SEED = 11
FACTOR, ALPHA = 0.2, 5.0


def streamed(
    config: Any, model: Any, objective: Objective, order: Any = "layer", columns: int = 0
) -> tuple[float, dict[str, Any]]:
    graph = build_graph(config)
    access = MemoryAccess(graph, dict(model.named_parameters()), torch.float32)
    runner = layer_runner(
        graph,
        access,
        device="cpu",
        order=order,
        head_rows=4,
        head_columns=columns,
        objective=objective,
        trace=trace_visits(graph, 2, 12, torch.float32, objective=objective, head_rows=4, head_columns=columns),
    )
    loss, gradients = runner.forward_backward(padded_batches(), seed=SEED).loss, access.finish()
    assert runner.forward_backward(padded_batches(), seed=SEED).loss == loss
    assert runner.forward_backward(padded_batches(), seed=SEED + 1).loss != loss or not objective.neftune_noise_alpha
    assert not model.get_input_embeddings()._forward_hooks and "_loss_function" not in vars(graph.model)
    plain = layer_runner(graph, access, device="cpu", head_rows=4, head_columns=columns)
    assert runner.evaluate(padded_batches()) == plain.evaluate(padded_batches())
    return loss, gradients


def smoothed_step(model: Any, micro_batches: Sequence[Mapping[str, torch.Tensor]]) -> tuple[float, dict[str, Any]]:
    """Return loss and gradients from transformers' label smoother, called as in transformers' Trainer."""
    num_items = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in micro_batches)
    smoother, total = LabelSmoother(epsilon=FACTOR), 0.0
    for number, batch in enumerate(micro_batches):
        torch.manual_seed(micro_batch_seed(SEED, number))
        inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
        output = model(**inputs, use_cache=False)
        loss = smoother(output, batch["labels"], shift_labels=True, num_items_in_batch=num_items)
        loss.backward()
        total += float(loss.detach())
    return total, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def assert_close(expected: tuple[float, dict[str, Any]], found: tuple[float, dict[str, Any]]) -> None:
    assert found[0] == pytest.approx(expected[0], rel=1e-6)
    assert set(found[1]) == set(expected[1])
    noise = 1e-7 * max(float(gradient.abs().max()) for gradient in expected[1].values())
    for name, gradient in expected[1].items():
        assert (found[1][name] - gradient).abs().max() <= max(noise, 1e-5 * gradient.abs().max()), name


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_smoothed_labels_of_every_family(family: str) -> None:
    config = tiny_config(family, tied=False)
    found = streamed(config, build_model(config), Objective(CrossEntropy(FACTOR)))
    assert_close(smoothed_step(build_model(config), padded_batches()), found)


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_noisy_embeddings_of_every_family(family: str) -> None:
    config = tiny_config(family, tied=False)
    model = build_model(config)
    objective = Objective(neftune_noise_alpha=ALPHA)
    found = streamed(config, model, objective)
    if family in ("llama", "gpt2"):
        again = streamed(config, model, objective, order="micro_batch")
        assert again[0] == found[0] and all(torch.equal(again[1][name], found[1][name]) for name in found[1])
    embedding = model.get_input_embeddings()
    embedding.neftune_noise_alpha = ALPHA
    embedding.register_forward_hook(neftune_post_forward_hook)
    expected = train_step(model, padded_batches(), SEED)
    assert_close((expected.loss, expected.gradients), found)


def test_smoothing_and_noise_with_dropout_and_router_loss() -> None:
    objective = Objective(CrossEntropy(FACTOR), ALPHA)
    for family, changes in (
        ("gpt2", {"attn_pdrop": 0.2, "resid_pdrop": 0.2, "embd_pdrop": 0.2}),
        ("mixtral", {"output_router_logits": True, "router_aux_loss_coef": 0.3}),
    ):
        config = tiny_config(family, tied=False, **changes)
        model = build_model(config)
        embedding = model.get_input_embeddings()
        loss = streamed(config, model, objective)[0]
        embedding.neftune_noise_alpha = ALPHA
        embedding.register_forward_hook(neftune_post_forward_hook)
        expected = smoothed_step(model, padded_batches())[0]
        if family == "mixtral":  # transformers' smoother leaves out the auxiliary term
            assert loss > expected + 0.1
        else:
            assert loss == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize(("family", "smoothing"), [("llama", 0.0), ("gemma2", FACTOR)])
@pytest.mark.parametrize("columns", [0, 20])
def test_z_loss(family: str, smoothing: float, columns: int) -> None:
    config = tiny_config(family, tied=False)
    found = streamed(config, build_model(config), Objective(CrossEntropy(smoothing, z_loss=0.1)), columns=columns)
    model, batches, total = build_model(config), padded_batches(), 0.0
    num_items = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
    for batch in batches:
        inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
        rows, words = model(**inputs, use_cache=False).logits[:, :-1].float(), batch["labels"][:, 1:]
        rows, words = rows[words != -100], words[words != -100]
        loss = torch.nn.functional.cross_entropy(rows, words, reduction="sum", label_smoothing=smoothing)
        loss = (loss + 0.1 * rows.logsumexp(1).square().sum()) / num_items
        loss.backward()
        total += float(loss.detach())
    assert_close((total, {name: p.grad for name, p in model.named_parameters() if p.grad is not None}), found)


def test_custom_model_loss_cannot_be_smoothed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatrain.engine.forward.plan_head", lambda graph: None)
    with pytest.raises(UnsupportedModelError, match="label_smoothing_factor"):
        trace_visits(build_graph(tiny_config("llama")), 1, 8, torch.float32, objective=Objective(CrossEntropy(FACTOR)))


def test_same_bits_in_every_placement(tiny_model: Path, tmp_path: Path) -> None:
    def run(name: str, **options: Any) -> Any:
        text = config_text(tmp_path / name, tiny_model, **options)
        keys = f"label_smoothing_factor = {FACTOR}\nneftune_noise_alpha = {ALPHA}\n"
        return run_config(text.replace("[training]\n", f"[training]\n{keys}"), tmp_path / name, num_steps=3)

    in_ram, on_nvme = run("ram", nvme=0), run("nvme", placement=ALL_NVME, ram="7MiB")
    plain = run_config(config_text(tmp_path / "plain", tiny_model, nvme=0), tmp_path / "plain", num_steps=3)
    assert on_nvme.losses == in_ram.losses and on_nvme.digests == in_ram.digests
    assert all(mine != theirs for mine, theirs in zip(in_ram.losses, plain.losses, strict=True))
    moved = {link: stats.num_bytes for link, stats in on_nvme.moved.links.items()}
    assert moved == on_nvme.plan.placement.run_traffic_bytes(3)
