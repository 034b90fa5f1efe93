"""The update that a step leaves to the next one: when it is made, and what a gradient that is not finite does to it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from megatrain.config import load_config
from megatrain.engine.step import StepEngine, StepResult
from megatrain.engine.weight_gradients import GradientAccumulator
from megatrain.optim.clip import NonFiniteGradientError
from megatrain.plan.placement import Traffic
from megatrain.plan.planner import plan_run
from megatrain.training.resolve import resolve
from megatrain.training.trainer import Trainer
from oracles.tiered_run import config_text, make_loader, run_config

LR = 1e-3


class Steps:
    """A trainer whose steps are taken one by one."""

    def __init__(self, trainer: Trainer, engine: StepEngine, batches: list[list[dict[str, torch.Tensor]]]) -> None:
        self.trainer, self.engine, self.batches = trainer, engine, batches

    def step(self, number: int, batch: int | None = None) -> StepResult:
        return self.engine.step(self.batches[number if batch is None else batch], number=number, lr=LR)

    def digests(self) -> dict[str, str]:
        """Return a digest of every block of weights and state as it is in the store now."""
        found = {}
        for block in self.trainer.plan.program.blocks.values():
            if block.kind in ("weights", "optimizer"):
                with self.trainer.store.acquire(block.key, "ram") as lease:
                    found[block.key] = hashlib.sha256(lease.tensor.view(torch.uint8).numpy()).hexdigest()
        return found


@contextmanager
def steps(folder: Path, model: Path, **tables: str) -> Iterator[Steps]:
    folder.mkdir()
    (folder / "run.toml").write_text(config_text(folder, model, nvme=0, **tables))
    config = load_config(folder / "run.toml").config
    plan = plan_run(resolve(config))
    loader = make_loader(config, plan)
    batches = [[dict(batch) for batch in next(loader).micro_batches] for _ in range(4)]
    with Trainer(config, plan=plan).open() as trainer:
        trainer.load()
        yield Steps(trainer, trainer.make_engine(4), batches)


def spoil_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let one element of every gradient be NaN."""
    add = GradientAccumulator.add

    def spoiled(self: GradientAccumulator, name: str, gradient: torch.Tensor) -> None:
        gradient = gradient.clone()
        gradient.view(-1)[0] = torch.nan
        add(self, name, gradient)

    monkeypatch.setattr(GradientAccumulator, "add", spoiled)


def test_the_update_is_made_once_by_whoever_needs_it_first(tiny_model: Path, tmp_path: Path) -> None:
    with steps(tmp_path / "a", tiny_model) as late, steps(tmp_path / "b", tiny_model) as soon:
        before = late.digests()
        assert late.step(0) == soon.step(0)
        assert late.digests() == before
        soon.engine.finish_updates()
        after = soon.digests()
        assert all(after[key] != before[key] for key in before)
        soon.engine.finish_updates()
        assert soon.digests() == after
        for number in (1, 2):
            assert late.step(number) == soon.step(number)
            soon.engine.finish_updates()
        late.engine.finish_updates()
        assert late.digests() == soon.digests()


def test_a_gradient_that_is_not_finite_stops_the_run_and_changes_nothing(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with steps(tmp_path / "a", tiny_model) as run:
        run.step(0)
        run.engine.finish_updates()
        before = run.digests()
        spoil_gradients(monkeypatch)
        with pytest.raises(NonFiniteGradientError, match="step 2: the gradient is not finite"):
            run.step(1)
        run.engine.finish_updates()
        assert run.digests() == before


def test_a_skipped_step_leaves_no_trace(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    skip = {"optimizer": 'nonfinite = "skip"'}
    with steps(tmp_path / "a", tiny_model, **skip) as run, steps(tmp_path / "b", tiny_model) as clean:
        run.step(0)
        with monkeypatch.context() as patch:
            spoil_gradients(patch)
            spoiled = run.step(1)
        assert spoiled.skipped
        clean.step(0)
        clean.engine.finish_updates()
        run.engine.finish_updates()
        assert run.digests() == clean.digests()
        assert run.step(2, batch=1).loss == clean.step(2, batch=1).loss == spoiled.loss
        run.engine.finish_updates()
        clean.engine.finish_updates()
        assert run.digests() == clean.digests()


#: To leave out a whole step its last gradient is needed before its first update.
HELD = 'max_grad_norm = 0\nnonfinite = "skip"'
NO_CHECKS = 'max_grad_norm = 0\nnonfinite = "ignore"'
ALL_NVME = 'weights = ["nvme"]\ngradients = ["nvme"]\noptimizer = ["nvme"]\nactivations = ["nvme"]'


@pytest.mark.parametrize("order", ["layer", "micro_batch"])
@pytest.mark.parametrize("placement", [{"nvme": 0}, {"placement": ALL_NVME}])
def test_updates_during_the_backward_give_the_same_bits(
    order: str, placement: dict[str, Any], tiny_model: Path, tmp_path: Path
) -> None:
    advanced = f'micro_batch_order = "{order}"'
    late_text = config_text(tmp_path, tiny_model, nvme=0, optimizer=HELD)
    soon_text = config_text(tmp_path, tiny_model, optimizer=NO_CHECKS, advanced=advanced, **placement)
    late = run_config(late_text, tmp_path / "late", num_steps=4)
    soon = run_config(soon_text, tmp_path / "soon", num_steps=4)
    assert late.plan.program.updates.are_deferred and not soon.plan.program.updates.are_deferred
    assert soon.losses == late.losses and soon.grad_norms == late.grad_norms
    assert soon.digests == late.digests
    assert soon.moved is not None
    moved = {link: stats.num_bytes for link, stats in soon.moved.links.items()}
    assert moved == soon.plan.placement.run_traffic_bytes(4)


def test_updates_during_the_backward_move_no_gradient(tiny_model: Path, tmp_path: Path) -> None:
    plans = {}
    for name, optimizer in {"late": "", "soon": NO_CHECKS}.items():
        (tmp_path / f"{name}.toml").write_text(
            config_text(tmp_path, tiny_model, placement=ALL_NVME, optimizer=optimizer, ram="6MiB")
        )
        plans[name] = plan_run(resolve(load_config(tmp_path / f"{name}.toml").config))
    gradient_bytes = sum(
        block.nbytes for block in plans["late"].program.blocks.values() if block.key.endswith("/grad.0")
    )
    moved = {}
    for name, plan in plans.items():
        kinds = {key for key, block in plan.program.blocks.items() if block.kind == "gradients"}
        traffic = Traffic(plan.program, plan.tiers, plan.placement.homes, plan.placement.stays)
        moved[name] = traffic.of_step(kinds.__contains__)
    assert 0 < moved["late"]["nvme->ram"] <= gradient_bytes and 0 < moved["late"]["ram->nvme"] <= gradient_bytes
    # A tied weight's gradient lasts from the head to the embedding, and has to make room meanwhile.
    of_tied = 4 * plans["soon"].graph.layouts["model.embed_tokens"].num_elements
    assert all(moved["soon"][link] == of_tied < moved["late"][link] for link in ("nvme->ram", "ram->nvme"))
