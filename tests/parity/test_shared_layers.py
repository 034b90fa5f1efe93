"""A layer that is used several times, with weights that only one of the uses needs."""

from __future__ import annotations

from fnmatch import fnmatchcase
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from megatrain.config import load_config
from megatrain.plan.planner import plan_run
from megatrain.training.resolve import resolve
from oracles.families import tiny_config
from oracles.huggingface import train_plainly
from oracles.tiered_run import add_tokenizer, config_text, make_loader, run_config


@pytest.fixture(scope="module")
def zamba(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder of a model that uses one attention block in three places, with an adapter for each place."""
    folder = tmp_path_factory.mktemp("zamba2")
    torch.manual_seed(7)
    config = tiny_config("zamba2", vocab_size=1024)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return add_tokenizer(folder)


@pytest.mark.slow
def test_recompute_inputs_are_planned_together(zamba: Path, tmp_path: Path) -> None:
    """The attention block reads both the embeddings and the hidden states. The planned minimum must include both."""
    text = config_text(tmp_path, zamba, nvme=0, training='recompute = "full"')
    (tmp_path / "run.toml").write_text(text)
    plan = plan_run(resolve(load_config(tmp_path / "run.toml").config))
    num_inputs = [len(visit.saved_inputs) for visit in plan.trace.visits]
    assert max(num_inputs) == 2
    for tick in plan.program.ticks:
        if tick.phase == "backward":
            kinds = [[plan.program.blocks[key].kind for key, _ in group] for group in tick.passing]
            read = [len(group) for group in kinds if "activations" in group]
            assert read == (
                [num_inputs[tick.visit]] * plan.run.batch.num_micro_batches if num_inputs[tick.visit] else []
            ), tick


@pytest.mark.parametrize("order", ["layer", "micro_batch"])
def test_weights_used_only_by_a_later_shared_layer_are_trained(order: str, zamba: Path, tmp_path: Path) -> None:
    text = config_text(tmp_path, zamba, nvme=0, advanced=f'micro_batch_order = "{order}"')
    ours = run_config(text.replace("max_length = 64", "max_length = 16"), tmp_path, num_steps=1)
    config = load_config(tmp_path / "run.toml").config
    loader, table = make_loader(config, plan_run(resolve(config))), config.optimizer
    before = AutoModelForCausalLM.from_pretrained(zamba, dtype=torch.float32).state_dict()
    plain = train_plainly(
        zamba,
        [next(loader).micro_batches],
        lr=lambda step: table.learning_rate,
        betas=(table.adam_beta1, table.adam_beta2),
        eps=table.adam_epsilon,
        weight_decay=table.weight_decay,
        decays=lambda name, p: p.dim() >= 2 and not any(fnmatchcase(name, g) for g in table.weight_decay_exclude),
        max_grad_norm=table.max_grad_norm,
    )
    assert ours.losses == pytest.approx(plain.losses, rel=1e-5)
    assert ours.weights.keys() == plain.weights.keys()
    trained = [name for name, weight in plain.weights.items() if not torch.equal(weight, before[name])]
    assert len([name for name in trained if "adapter_list" in name]) == 6, "the adapters of all three places"
    for name, weight in plain.weights.items():
        moved = (weight - before[name]).abs().max()
        assert (ours.weights[name] - weight).abs().max() <= 0.05 * moved, name
