"""The update that a step leaves to the next one: when it is made, and what a gradient that is not finite does to it."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from megatrain.config import load_config
from megatrain.engine.residency import GradientAccumulator
from megatrain.engine.step import NonFiniteGradientError, StepEngine, StepResult
from megatrain.plan.planner import plan_run
from megatrain.session import Session
from reference.tiered_run import config_text, make_loader

LR = 1e-3


class Steps:
    """A session whose steps are taken one by one."""

    def __init__(self, session: Session, engine: StepEngine, batches: list[list[dict[str, torch.Tensor]]]) -> None:
        self.session, self.engine, self.batches = session, engine, batches

    def step(self, number: int, batch: int | None = None) -> StepResult:
        return self.engine.step(self.batches[number if batch is None else batch], number=number, lr=LR)

    def digests(self) -> dict[str, str]:
        """Return a digest of every block of weights and state as it is in the store now."""
        found = {}
        for block in self.session.plan.program.blocks.values():
            if block.kind in ("weights", "optimizer"):
                with self.session.store.acquire(block.key, "ram") as lease:
                    found[block.key] = hashlib.sha256(lease.tensor.view(torch.uint8).numpy()).hexdigest()
        return found


@contextmanager
def steps(folder: Path, model: Path, **tables: str) -> Iterator[Steps]:
    folder.mkdir()
    (folder / "run.toml").write_text(config_text(folder, model, nvme=0, **tables))
    config = load_config(folder / "run.toml").config
    plan = plan_run(config)
    loader = make_loader(config, plan)
    batches = [[dict(batch) for batch in next(loader).micro_batches] for _ in range(4)]
    with Session(config, plan) as session:
        session.prepare()
        yield Steps(session, session.make_engine(4), batches)


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
        assert spoiled.skipped and spoiled.loss > 0
        clean.step(0)
        clean.engine.finish_updates()
        run.engine.finish_updates()
        assert run.digests() == clean.digests()
        assert run.step(2, batch=1).loss == clean.step(2, batch=1).loss
        run.engine.finish_updates()
        clean.engine.finish_updates()
        assert run.digests() == clean.digests()
