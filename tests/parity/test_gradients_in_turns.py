"""Updates during the backward: gradients share a few blocks in turn, and layers are checked and clipped one by one."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from contextlib import AbstractContextManager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from megatrain.config import load_config
from megatrain.engine.program.step_program import StepProgram
from megatrain.optim.clip import NonFiniteGradientError
from megatrain.plan.plan import Plan
from megatrain.plan.planner import plan_run
from megatrain.plan.shortfall import DoesNotFitError
from megatrain.training.resolve import resolve
from megatrain.training.trainer import Trainer
from oracles.families import tiny_config
from oracles.huggingface import train_plainly
from oracles.single_steps import Steps, single_steps, spoil
from oracles.tiered_run import (
    ALL_NVME,
    QUICKSTART,
    TieredRun,
    config_text,
    make_loader,
    plan_of,
    run_config,
    write_tiny_model,
)

NO_CLIPPING = "max_grad_norm = 0"
#: Gives the same results, but holds every gradient until the end of the step, so that a whole step can be skipped.
HELD = 'max_grad_norm = 0\nnonfinite = "skip"'
PER_LAYER = 'clip_scope = "layer"\nmax_grad_norm = 0.05'
NUM_STEPS = 3


@pytest.fixture(scope="module")
def models(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return model folders: the tiny one, one with an untied head, and one that uses the same layer in three places."""
    untied = write_tiny_model(tmp_path_factory.mktemp("untied"), tie_word_embeddings=False)
    zamba = tmp_path_factory.mktemp("zamba2")
    torch.manual_seed(7)
    config = tiny_config("zamba2", vocab_size=1024)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(zamba)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(QUICKSTART / name, zamba / name)
    return {"tied": tiny_model, "untied": untied, "several uses": zamba}


def text_of(folder: Path, model: Path, *, freeze: str = "", **tables: Any) -> str:
    text = config_text(folder, model, **{"nvme": 0, **tables})
    if model.name.startswith("zamba2"):
        text = text.replace("max_length = 64", "max_length = 16")
    return text.replace("[data]", f"freeze = {freeze}\n[data]", 1) if freeze else text


@pytest.fixture(scope="module")
def baseline(models: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> Callable[..., TieredRun]:
    """Return a function that trains a model with the given tables and everything in RAM, and caches the results."""
    known: dict[str, TieredRun] = {}

    def find(model: str, **tables: str) -> TieredRun:
        name = repr((model, sorted(tables.items())))
        if name not in known:
            folder = tmp_path_factory.mktemp("baseline")
            known[name] = run_config(text_of(folder, models[model], **tables), folder, num_steps=NUM_STEPS)
        return known[name]

    return find


def gradient_bytes(program: StepProgram) -> int:
    return sum(block.nbytes for block in program.blocks.values() if block.kind == "gradients")


MICRO_BATCHES = 'micro_batch_order = "micro_batch"'
#: (model, tables that affect the results, tables that affect only the placement)
CASES: dict[str, tuple[str, dict[str, str], dict[str, Any]]] = {
    "tied, micro-batch-major": ("tied", {}, {"advanced": MICRO_BATCHES}),
    "untied, on NVMe": ("untied", {}, {"nvme": 1, "placement": ALL_NVME, "ram": "7MiB"}),
    "untied, GPU, gradients on NVMe": (
        "untied",
        {},
        {"gpu": "6MiB", "ram": "16MiB", "nvme": 1, "placement": 'gradients = ["nvme"]\noptimizer = ["nvme"]'},
    ),
    "bf16 gradients": ("untied", {"precision": 'grad_dtype = "bfloat16"'}, {"gpu": "6MiB", "nvme": 1, "ram": "8MiB"}),
    "several uses": ("several uses", {}, {"gpu": "13MiB", "nvme": 1, "ram": "16MiB"}),
    "frozen": ("untied", {"freeze": '["*embed*", "*layers.1.*", "*norm*"]'}, {"gpu": "6MiB"}),
}


@pytest.mark.parametrize("case", CASES)
def test_shared_gradient_blocks_are_bit_identical_to_held_gradients(
    case: str, models: dict[str, Path], tmp_path: Path, baseline: Callable[..., TieredRun]
) -> None:
    model, numbers, placement = CASES[case]
    held = baseline(model, optimizer=HELD, **numbers)
    result = run_config(
        text_of(tmp_path, models[model], optimizer=NO_CLIPPING, **numbers, **placement), tmp_path, num_steps=NUM_STEPS
    )
    assert held.plan.program.updates.are_deferred and not result.plan.program.updates.are_deferred
    result.assert_same(held)
    result.assert_as_planned()
    if MICRO_BATCHES not in str(placement):
        largest = max(block.nbytes for block in held.plan.program.blocks.values() if block.kind == "gradients")
        assert largest <= gradient_bytes(result.plan.program) < gradient_bytes(held.plan.program)


@pytest.mark.parametrize("model", ["tied", "untied"])
def test_layer_clipping_matches_pytorch_clipping_of_each_unit(
    model: str, models: dict[str, Path], tmp_path: Path
) -> None:
    """The plain loop calls ``clip_grad_norm_`` once per unit. Clipping by the global norm gives different weights."""
    text = text_of(tmp_path, models[model], optimizer=PER_LAYER)
    ours = run_config(text, tmp_path, num_steps=8)
    config = load_config(tmp_path / "run.toml").config
    loader, table = make_loader(config, plan_run(resolve(config))), config.optimizer
    owner = {entry.name: name for name, layout in ours.plan.graph.layouts.items() for entry in layout.entries}
    options: dict[str, Any] = {
        "lr": lambda step: table.learning_rate,
        "betas": (table.adam_beta1, table.adam_beta2),
        "eps": table.adam_epsilon,
        "weight_decay": table.weight_decay,
        "decays": lambda name, p: p.dim() >= 2 and not any(fnmatchcase(name, g) for g in table.weight_decay_exclude),
        "max_grad_norm": table.max_grad_norm,
    }
    batches = [next(loader).micro_batches for _ in range(8)]
    plain = train_plainly(models[model], batches, unit_of=owner.__getitem__, **options)
    by_all = train_plainly(models[model], batches, **options)
    for mine, theirs in zip(ours.losses, plain.losses, strict=True):
        assert abs(mine - theirs) <= 2e-6 * abs(theirs)
    for mine, theirs in zip(ours.grad_norms, plain.grad_norms, strict=True):
        assert abs(mine - theirs) <= 1e-4 * theirs, "the reported norm covers all gradients"
    for name, weight in plain.weights.items():
        worst = (ours.weights[name] - weight).abs().max()
        assert worst <= 2e-4 * weight.abs().max(), (name, worst)
    other = max((by_all.weights[name] - weight).abs().max() for name, weight in plain.weights.items())
    assert other > 10 * max((ours.weights[name] - weight).abs().max() for name, weight in plain.weights.items())


LEAST: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16": {"precision": 'compute_dtype = "bfloat16"'},
    "float32, NVMe": {"nvme": 1},
    "bfloat16, NVMe": {"nvme": 1, "precision": 'compute_dtype = "bfloat16"'},
    "bfloat16, GPU": {"gpu": "12MiB", "precision": 'compute_dtype = "bfloat16"'},
    "frozen, bfloat16": {
        "freeze": '["*embed*", "lm_head*"]',
        "precision": 'compute_dtype = "bfloat16"\ngrad_dtype = "bfloat16"',
    },
    "frozen, bfloat16, NVMe": {
        "freeze": '["*embed*", "lm_head*"]',
        "nvme": 1,
        "precision": 'compute_dtype = "bfloat16"\ngrad_dtype = "bfloat16"',
        "optimizer": f'{NO_CLIPPING}\noptim = "sgd"\nsgd_momentum = 0.0',
    },
}


@pytest.mark.parametrize("case", LEAST)
def test_run_fits_its_minimum_memory(case: str, tmp_path: Path) -> None:
    """Covers loading, steps, a checkpoint and the export.

    Loading and the export need an fp32 copy of a layer, which cannot use the gradients' memory.
    """
    wide = write_tiny_model(tmp_path / "model", tie_word_embeddings=False, vocab_size=4096)
    path = tmp_path / "run.toml"

    def planned(ram: str) -> Plan:
        text = text_of(tmp_path, wide, **{"ram": ram, "optimizer": NO_CLIPPING, **LEAST[case]})
        text = text.replace("max_length = 64", "max_length = 16").replace("gradient_accumulation_steps = 3", "")
        path.write_text(text.replace("[training]", "[training]\nmax_steps = 2"))
        return plan_of(load_config(path).config)

    with pytest.raises(DoesNotFitError) as refusal:
        planned("64KiB")
    assert refusal.value.tier == "ram"
    plan = planned(f"{refusal.value.need_bytes}B")
    summary = Trainer(load_config(path).config, plan=plan).train()
    assert summary.num_steps == 2
    assert summary.tier_peak_bytes["ram"] <= plan.budgets["ram"] == refusal.value.need_bytes


# -- gradients that are not finite -----------------------------------------------------------------------------------


def steps(folder: Path, model: Path, optimizer: str) -> AbstractContextManager[Steps]:
    return single_steps(folder, text_of(folder, model, optimizer=optimizer))


def changed(before: dict[str, torch.Tensor], after: dict[str, torch.Tensor]) -> set[str]:
    return {key.rpartition("/")[0] for key in before if not torch.equal(before[key], after[key])}


MIDDLE = "model.layers.1"


def test_skip_per_layer_skips_only_the_nonfinite_layer(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with steps(tmp_path / "a", tiny_model, 'clip_scope = "layer"\nnonfinite = "skip"') as run:
        run.step()
        before = run.contents()
        with monkeypatch.context() as patch:
            spoil(patch, f"{MIDDLE}.*")
            result = run.step()
        assert result.skipped_layers == (MIDDLE,) and not result.skipped
        after = run.contents()
        assert changed(before, after) == {key.rpartition("/")[0] for key in before} - {MIDDLE}
        assert run.engine.num_updates == 2
        assert not run.step().skipped_layers
        assert MIDDLE in changed(after, run.contents())
        with monkeypatch.context() as patch:
            spoil(patch, "*")
            before = run.contents()
            assert run.step().skipped and not changed(before, run.contents())
        assert run.engine.num_updates == 3, "a fully skipped step does not count"


@pytest.mark.parametrize("optimizer", [NO_CLIPPING, PER_LAYER])
def test_stop_per_layer_skips_all_later_updates(
    optimizer: str, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with steps(tmp_path / "a", tiny_model, optimizer) as run:
        run.step()
        before = run.contents()
        spoil(monkeypatch, f"{MIDDLE}.*")
        with pytest.raises(NonFiniteGradientError, match=rf"step 2: the gradient of {MIDDLE} is not .*last checkpoint"):
            run.step()
        found = changed(before, run.contents())
        assert MIDDLE not in found and "model.layers.0" not in found and "model.embed_tokens" not in found
        assert "model.norm" in found
        for call in (run.engine.finish_updates, lambda: run.step()):
            with pytest.raises(NonFiniteGradientError, match="last checkpoint"):
                call()


def test_nonfinite_loss_changes_no_state(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """This is the usual kind of non-finite step: all gradients are NaN, which is detected before any update."""
    with steps(tmp_path / "a", tiny_model, NO_CLIPPING) as run:
        run.step()
        before = run.contents()
        with monkeypatch.context() as patch:
            spoil(patch, "*")
            with pytest.raises(NonFiniteGradientError, match=r"step 2: .* nothing was updated in this step"):
                run.step()
        assert not changed(before, run.contents())
        run.engine.finish_updates()
        assert run.engine.num_updates == 1


def test_ignore_per_layer_uses_nonfinite_gradients(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with steps(tmp_path / "a", tiny_model, f'{PER_LAYER}\nnonfinite = "ignore"') as run:
        spoil(monkeypatch, f"{MIDDLE}.*")
        run.step()
        finite = {key: bool(block.isfinite().all()) for key, block in run.contents().items()}
        assert {key.rpartition("/")[0] for key, is_finite in finite.items() if not is_finite} == {MIDDLE}
