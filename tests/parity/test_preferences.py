"""Preference losses, their metrics and every gradient match TRL, and are bit-identical in any loop order."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from megatrain.base.batch_keys import DESIRABLE
from megatrain.converters import experts
from megatrain.converters.spec import build_graph
from megatrain.data.chat import RowEncoder
from megatrain.data.encoding import load_tokenizer
from megatrain.data.loader import BatchLoader
from megatrain.data.packing import BatchShape
from megatrain.data.pair_rows import PAIRS as PAIR_ROWS
from megatrain.data.preference_format import PREFERENCE
from megatrain.data.row_kind import RowKind
from megatrain.data.tagged_rows import ANSWERS
from megatrain.engine.device.host_io import read_numbers
from megatrain.engine.head.loss import mean_metrics
from megatrain.engine.head.objective import Objective
from megatrain.engine.micro_batches import shifted_labels
from megatrain.tasks.preference import CollectedExamples, PreferenceLoss
from oracles import rows_in_memory
from oracles.families import tiny_config
from oracles.huggingface import build_model
from oracles.memory_access import MemoryAccess, joined, split_like
from oracles.rows_in_memory import encode_rows, to_row
from oracles.runners import StepRunner, layer_runner
from oracles.tiered_run import EXAMPLES

pytestmark = pytest.mark.usefixtures("one_thread")

TOKENIZER = EXAMPLES / "quickstart/model"
WORDS = ("whale", "ship", "sea", "a long grey voyage", "harpoon", "the captain Ahab", "Nantucket")
#: Answers of different lengths, so that rows have padding and answers span several pieces of the head.
PAIRS = [
    {
        "prompt": f"Question {n}:\n",
        "chosen": f"{WORDS[n]} and {WORDS[n + 1]}.",
        "rejected": f"no {WORDS[n + 2]}" * (n + 1),
    }
    for n in range(4)
]
JUDGED = [
    {"prompt": row["prompt"], "completion": row["chosen" if n % 2 else "rejected"], "label": bool(n % 2)}
    for n, row in enumerate(PAIRS)
]
#: Rows per piece of the head, and columns per vocabulary part. A micro-batch has several of both.
ROWS, COLUMNS = 5, 300


def config_of(family: str = "llama", **changes: Any) -> Any:
    return tiny_config(family, vocab_size=1024, **changes)


def loader_of(rows: list[dict[str, Any]], num_micro_batches: int, kind: RowKind) -> BatchLoader:
    encoder = RowEncoder(load_tokenizer(str(TOKENIZER)), train_on="completion")
    read = [to_row(row, f"row {n}", PREFERENCE, {}) for n, row in enumerate(rows)]
    dataset = encode_rows(read, encoder, max_length=48, kind=kind)
    shape = BatchShape(2 * len(rows) // num_micro_batches, num_micro_batches, 48, packing=False)
    return rows_in_memory.loader_of(dataset, shape, data_seed=0)


def make_runner(
    config: Any, model: Any, objective: Objective | None, *, cuts_experts: bool = False, **options: Any
) -> tuple[StepRunner, MemoryAccess]:
    graph = build_graph(config, split_experts=cuts_experts)
    access = MemoryAccess(graph, split_like(graph, dict(model.named_parameters())), torch.float32)
    options = {"head_rows": ROWS, "head_columns": COLUMNS, **options}
    runner = layer_runner(graph, access, device="cpu", objective=objective, **options)
    return runner, access


class Setup:
    """A policy, a reference with different weights, and the micro-batches of a step."""

    def __init__(
        self,
        loss: PreferenceLoss,
        num_micro_batches: int = 1,
        rows: list[dict[str, Any]] | None = None,
        **changes: Any,
    ) -> None:
        self.loss, self.config = loss, config_of(**changes)
        self.policy = build_model(self.config)
        self.reference = build_model(self.config)
        generator = torch.Generator().manual_seed(3)
        with torch.no_grad():
            for weight in self.reference.parameters():
                weight.add_(0.02 * torch.randn(weight.shape, generator=generator))
        rows = rows or (PAIRS if loss.is_paired else JUDGED)
        self.loader = loader_of(rows, num_micro_batches, PAIR_ROWS if loss.is_paired else ANSWERS)
        runner, _ = make_runner(self.config, self.reference, None)
        batch = self.loader.ordered_batch(0)
        found = runner.log_probs([batch])[0]
        for first in range(len(found), len(self.loader.dataset), len(found)):
            found += runner.log_probs([self.loader.ordered_batch(first)])[0]
        self.loader.use_reference(torch.tensor(found).numpy())
        self.batches = next(self.loader).micro_batches

    def step(self, **options: Any) -> tuple[float, dict[str, float], dict[str, Tensor]]:
        runner, access = make_runner(self.config, self.policy, Objective(self.loss), **options)
        queued = runner.queue(self.batches)
        means = mean_metrics(queued.metrics)
        figures = self.loss.step_metrics(means)
        return sum(read_numbers(queued.terms)), figures, access.finish()


def answers(model: Any, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Return the log-probability and length of each row's answer, computed from the full logits."""
    logits = model(input_ids=batch["input_ids"], attention_mask=batch["attention_mask"]).logits[:, :-1]
    labels = batch["labels"][:, 1:]
    logps = functional.log_softmax(logits.float(), -1).gather(-1, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
    return (logps * (labels != -100)).sum(1), (labels != -100).sum(1).float()


def loss_by_definition(loss: PreferenceLoss, batches: list[dict[str, Tensor]], policy: Any, reference: Any) -> Tensor:
    """Return the loss over all examples of a step, as defined in the paper of the loss."""
    terms, likelihood, tokens = [], [], 0.0
    for batch in batches:
        half = len(batch["input_ids"]) // 2
        logps, lengths = answers(policy, batch)
        with torch.no_grad():
            by_reference, _ = answers(reference, batch)
        chosen, rejected = logps[:half], logps[half:]
        long, short = lengths[:half], lengths[half:]
        ratios = logps - by_reference
        margin = ratios[:half] - ratios[half:]
        beta, eps = loss.beta, loss.label_smoothing
        likelihood.append(-chosen.sum())
        tokens += float(long.sum())
        if loss.loss_type == "kto":
            kl = ratios[half:].mean().detach().clamp(min=0)
            good = batch[DESIRABLE]
            values = torch.where(
                good, torch.sigmoid(beta * (ratios[:half] - kl)), torch.sigmoid(beta * (kl - ratios[:half]))
            )
            weights = torch.where(good, loss.desirable_weight, loss.undesirable_weight)
            terms.append(weights * (1 - values))
            continue
        if loss.loss_type == "sigmoid":
            terms.append(
                -(1 - eps) * functional.logsigmoid(beta * margin) - eps * functional.logsigmoid(-beta * margin)
            )
        elif loss.loss_type == "cpo":
            right, wrong = (-functional.logsigmoid(sign * beta * (chosen - rejected)) for sign in (1, -1))
            terms.append((1 - eps) * right + eps * wrong)
        elif loss.loss_type == "hinge":
            terms.append(torch.relu(1 - beta * margin))
        elif loss.loss_type == "robust":
            right, wrong = (-functional.logsigmoid(sign * beta * margin) for sign in (1, -1))
            terms.append(((1 - eps) * right - eps * wrong) / (1 - 2 * eps))
        elif loss.loss_type == "ipo":
            terms.append((ratios[:half] / long - ratios[half:] / short - 1 / (2 * beta)) ** 2)
        elif loss.loss_type == "simpo":
            terms.append(-functional.logsigmoid(beta * (chosen / long - rejected / short) - loss.simpo_gamma))
        else:
            odds = [mean - torch.log(1 - torch.exp(mean)) for mean in (chosen / long, rejected / short)]
            terms.append(-beta * functional.logsigmoid(odds[0] - odds[1]))
    weight = loss.rpo_alpha + (loss.loss_type == "orpo")
    return torch.cat(terms).mean() + (0 if loss.loss_type == "kto" else weight * sum(likelihood) / tokens)


def mean_nll_of_chosen(batches: list[dict[str, Tensor]], policy: Any) -> float:
    """Return the mean negative log-likelihood per token of the chosen answers, computed from the full logits."""
    with torch.no_grad():
        found = [answers(policy, batch) for batch in batches]
    halves = [slice(0, len(logps) // 2) for logps, _ in found]
    total = sum(float(logps[half].sum()) for half, (logps, _) in zip(halves, found, strict=True))
    return -total / sum(float(lengths[half].sum()) for half, (_, lengths) in zip(halves, found, strict=True))


LOSSES = {
    "sigmoid": PreferenceLoss(),
    "smoothed": PreferenceLoss(label_smoothing=0.2, rpo_alpha=0.5, beta=0.3),
    "hinge": PreferenceLoss("hinge", beta=0.5),
    "robust": PreferenceLoss("robust", label_smoothing=0.1),
    "ipo": PreferenceLoss("ipo", beta=0.5),
    "kto": PreferenceLoss("kto", desirable_weight=1.5, undesirable_weight=0.5),
    "cpo": PreferenceLoss("cpo", beta=0.3, rpo_alpha=0.6, label_smoothing=0.1),
    "orpo": PreferenceLoss("orpo", beta=0.3),
    "simpo": PreferenceLoss("simpo", beta=2.0, simpo_gamma=0.7),
}


def assert_close(found: Mapping[str, Tensor], expected: Mapping[str, Tensor], tolerance: float = 2e-6) -> None:
    assert set(found) == set(expected)
    largest = max(float(gradient.abs().max()) for gradient in expected.values())
    assert largest > 1e-5
    for name, gradient in expected.items():
        assert torch.allclose(found[name], gradient, rtol=1e-4, atol=tolerance * largest), name


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name in ("smoothed", "kto", "orpo") else [pytest.mark.slow]) for name in LOSSES],
)
def test_losses_and_gradients_match_whole_logits(name: str) -> None:
    setup = Setup(LOSSES[name], num_micro_batches=2, tie_word_embeddings=name == "ipo")
    expected = loss_by_definition(setup.loss, setup.batches, setup.policy, setup.reference)
    expected.backward()
    gradients = {name: weight.grad for name, weight in setup.policy.named_parameters()}
    loss, figures, found = setup.step()
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    assert_close(found, gradients)
    assert figures["rewards/chosen"] != 0.0
    assert ("nll_loss" in figures) == bool(setup.loss.rpo_alpha or name == "orpo")
    assert figures.get("nll_loss", 0.0) in (
        0.0,
        pytest.approx(mean_nll_of_chosen(setup.batches, setup.policy), rel=1e-5),
    )

    # Neither the loop order nor leasing vocabulary parts in turn changes the results. Full logits differ by rounding.
    for options in ({"order": "micro_batch"}, {"is_part_major": True}):
        again, same, gradients = setup.step(**options)
        assert again == loss and same == figures
        assert all(torch.equal(gradient, found[name]) for name, gradient in gradients.items())
    whole, _, gradients = setup.step(head_columns=0)
    assert whole == pytest.approx(loss, rel=1e-5)
    assert_close(gradients, found)

    collected = CollectedExamples()
    runner, _ = make_runner(setup.config, setup.policy, None)
    for batch, logps in zip(setup.batches, runner.log_probs(setup.batches), strict=True):
        collected.add(batch, shifted_labels(batch["labels"]), logps)
    if setup.loss.is_paired:  # in an evaluation, KTO estimates the KL over all examples together
        evaluated, _, means = collected.compute(setup.loss)
        assert evaluated == pytest.approx(loss, rel=1e-5)
        assert means == pytest.approx(figures, rel=1e-4, abs=1e-6)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name == "smoothed" else [pytest.mark.slow]) for name in ("smoothed", "kto")]
)
def test_experts_in_parts(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Loss and gradients are the same if each expert is a separate unit."""
    monkeypatch.setattr(experts, "EXPERTS_ELEMENTS", 1)
    setup = Setup(LOSSES[name], num_micro_batches=2, family="qwen3_moe")
    expected = loss_by_definition(setup.loss, setup.batches, setup.policy, setup.reference)
    expected.backward()
    gradients = {name: weight.grad for name, weight in setup.policy.named_parameters()}
    whole, figures, _ = setup.step()
    graph = build_graph(setup.config, split_experts=True)
    assert len(graph.layouts) > len(build_graph(setup.config).layouts)
    loss, same, found = setup.step(cuts_experts=True)
    assert loss == pytest.approx(expected.item(), rel=1e-5) and loss == pytest.approx(whole, rel=1e-5)
    assert same == pytest.approx(figures, rel=1e-4, abs=1e-6)
    assert_close(joined(graph, found), gradients)


def trl_trainer(setup: Setup, tmp_path: Path) -> Any:
    """Return TRL's trainer for the same loss, models and rows."""
    from datasets import Dataset
    from transformers import AutoTokenizer

    loss = setup.loss
    tokenizer = AutoTokenizer.from_pretrained(TOKENIZER)
    tokenizer.pad_token = tokenizer.eos_token
    common = {
        "output_dir": str(tmp_path),
        "per_device_train_batch_size": 4,
        "max_length": 48,
        "beta": loss.beta,
        "report_to": [],
        "use_cpu": True,
        "bf16": False,
        "activation_checkpointing": False,
    }
    rows = Dataset.from_list(PAIRS if loss.is_paired else JUDGED)
    given = {"model": setup.policy, "train_dataset": rows, "processing_class": tokenizer}
    if loss.loss_type == "kto":
        from trl import KTOConfig, KTOTrainer

        weights = {"desirable_weight": loss.desirable_weight, "undesirable_weight": loss.undesirable_weight}
        args = KTOConfig(**common, **weights, train_sampling_strategy="sequential")
        return KTOTrainer(**given, ref_model=setup.reference, args=args)
    if loss.loss_type in ("cpo", "simpo"):
        from trl.experimental.cpo import CPOConfig, CPOTrainer

        args = CPOConfig(
            **common,
            loss_type="simpo" if loss.loss_type == "simpo" else "sigmoid",
            label_smoothing=loss.label_smoothing,
            cpo_alpha=loss.rpo_alpha,
            simpo_gamma=loss.simpo_gamma,
        )
        return CPOTrainer(**given, args=args)
    if loss.loss_type == "orpo":
        from trl.experimental.orpo import ORPOConfig, ORPOTrainer

        return ORPOTrainer(**given, args=ORPOConfig(**common))
    from trl import DPOConfig, DPOTrainer

    types = [loss.loss_type] + (["sft"] if loss.rpo_alpha else [])
    args = DPOConfig(
        **common,
        loss_type=types,
        loss_weights=[1.0, loss.rpo_alpha][: len(types)],
        label_smoothing=loss.label_smoothing,
    )
    return DPOTrainer(**given, ref_model=setup.reference, args=args)


TRL = {
    "sigmoid": LOSSES["sigmoid"],
    "with_likelihood": PreferenceLoss(rpo_alpha=0.5, beta=0.3),
    **{name: LOSSES[name] for name in ("hinge", "robust", "ipo", "kto", "cpo", "orpo", "simpo")},
}


def trl_inputs(setup: Setup, trainer: Any) -> Any:
    """Return a micro-batch in the form that TRL's trainer expects."""
    if setup.loss.loss_type not in ("cpo", "orpo", "simpo"):
        return trainer.data_collator([trainer.train_dataset[n] for n in range(4)])
    # These trainers tokenize prompts differently, so they get this project's tokenized rows.
    (batch,) = setup.batches
    half = len(batch["input_ids"]) // 2
    return {
        f"{name}_{field}": batch[field][part]
        for name, part in (("chosen", slice(None, half)), ("rejected", slice(half, None)))
        for field in ("input_ids", "attention_mask", "labels")
    }


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in ("sigmoid", "orpo") else [pytest.mark.slow]) for name in TRL]
)
@pytest.mark.filterwarnings("ignore")  # warnings from TRL
def test_preference_step_matches_trl(name: str, tmp_path: Path) -> None:
    """For most losses, the same rows pass through TRL's own tokenization, collator and loss."""
    # TRL's ORPO likelihood includes the prompt, but the paper's does not. With a one-token prompt, both are equal.
    setup = Setup(TRL[name], rows=[{**row, "prompt": "Q"} for row in PAIRS] if name == "orpo" else None)
    trainer = trl_trainer(setup, tmp_path)
    inputs = trl_inputs(setup, trainer)
    trainer.model.train()
    loss = trainer.compute_loss(trainer.model, inputs)
    loss.backward()
    expected = {name: weight.grad for name, weight in setup.policy.named_parameters()}
    found, figures, gradients = setup.step()
    assert found == pytest.approx(loss.item(), rel=1e-5)
    assert_close(gradients, expected)
    stored = getattr(trainer, "_metrics", None) or trainer._stored_metrics
    compared = 0
    for key, values in stored["train"].items():
        if key in figures:
            assert figures[key] == pytest.approx(float(torch.tensor(values).float().mean()), rel=1e-4, abs=1e-6), key
            compared += 1
    assert compared >= 5, (sorted(stored["train"]), sorted(figures))
