"""With an offloaded model, TRL's GRPOTrainer writes the same completions and matches the plain trainer's updates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, set_seed

import megatrain
from oracles.tiered_run import QUICKSTART

pytest.importorskip("trl")

NUM_STEPS = 2


def vowels(completions: list[str], **rest: object) -> list[float]:
    return [float(sum(letter in "aeiou" for letter in text)) for text in completions]


def train(folder: Path, *, offloaded: bool) -> tuple[list[dict[str, Any]], dict[str, torch.Tensor]]:
    """Train, and return the trainer's log entries and the final weights."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer

    set_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(QUICKSTART))
    rows = Dataset.from_list([{"prompt": f"What is whale {n}?\n"} for n in range(4)])
    arguments = GRPOConfig(
        output_dir=str(folder),
        max_steps=NUM_STEPS,
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=6,
        learning_rate=1e-3,
        beta=0.0,
        use_cpu=True,
        bf16=False,
        activation_checkpointing=False,
        save_strategy="no",
        logging_steps=1,
        report_to=[],
        disable_tqdm=True,
    )
    given = {
        "reward_funcs": vowels,
        "args": arguments,
        "train_dataset": rows,
        "processing_class": AutoTokenizer.from_pretrained(QUICKSTART),
    }
    if not offloaded:
        trainer = GRPOTrainer(model=model, **given)
        trainer.train()
        return trainer.state.log_history, model.state_dict()
    store = megatrain.open_store(ram="8MiB", nvme=folder / "store", nvme_size="256MiB")
    try:
        megatrain.offload(model, store)
        trainer = megatrain.hf.offloaded(GRPOTrainer)(model=model, **given)
        trainer.train()
        moved, weights_bytes = store.stats().links["nvme->ram"].num_bytes, sum(p.nbytes for p in model.parameters())
        assert 4 * weights_bytes < moved < 5 * weights_bytes, "less RAM than the weights and their state"
        trainer.save_model(str(folder / "final"))
    finally:
        store.close()
    saved = AutoModelForCausalLM.from_pretrained(folder / "final", dtype=torch.float32)
    return trainer.state.log_history, saved.state_dict()


@pytest.mark.filterwarnings("ignore")  # TRL's own warnings
def test_grpo_matches_plain_completions_and_training(tmp_path: Path) -> None:
    told, weights = train(tmp_path / "offloaded", offloaded=True)
    wanted, others = train(tmp_path / "plain", offloaded=False)
    for ours, theirs in zip(told[:NUM_STEPS], wanted[:NUM_STEPS], strict=True):
        for name in ("reward", "completions/mean_length", "num_tokens"):
            assert ours[name] == theirs[name], name  # the completions are identical
        assert ours["loss"] == pytest.approx(theirs["loss"], rel=1e-4, abs=1e-6)
        assert ours["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)
    assert any(line["reward"] > 0 for line in told[:NUM_STEPS])
    assert weights.keys() == others.keys()
    for name, weight in others.items():
        torch.testing.assert_close(weights[name], weight, rtol=1e-4, atol=2e-6)
