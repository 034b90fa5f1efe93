"""Updates that the device decides about have the bits of those that the host decides about."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from fakes.gpu_run import gpu_config_text
from megatrain.config import load_config
from megatrain.engine.step import StepEngine
from megatrain.engine.updates import UpdateOps
from megatrain.engine.weight_gradients import GradientAccumulator
from megatrain.optim.clip import NonFiniteGradientError
from megatrain.training.trainer import Trainer
from oracles.tiered_run import make_loader, plan_of

pytestmark = pytest.mark.usefixtures("virtual")
HALF_IN_RAM = 'weights = ["ram"]\noptimizer = ["ram"]'


class Run:
    """Steps over blocks in GPU memory.

    Attributes:
        engine: Runs the steps.
        losses: By step; None for a step that was not used.
    """

    def __init__(self, trainer: Trainer, loader: Any) -> None:
        self._trainer, self._loader = trainer, loader
        self.engine: StepEngine = trainer.make_engine(4)
        self.results: list[tuple[float, float, bool]] = []

    def step(self) -> None:
        """Run the next step."""
        number = len(self.results)
        result = self.engine.step(next(self._loader).micro_batches, number=number, lr=1e-3)
        self.results.append((result.loss if not result.skipped else 0.0, result.grad_norm, result.skipped))

    def digests(self) -> dict[str, str]:
        """Return a digest of every block of weights and optimizer state."""
        found = {}
        for block in self._trainer.plan.program.blocks.values():
            if block.kind in ("weights", "optimizer"):
                home = self._trainer.plan.placement.homes[block.key]
                with self._trainer.store.acquire(block.key, home) as lease:
                    found[block.key] = hashlib.sha256(lease.tensor.cpu().view(torch.uint8).numpy()).hexdigest()
        return found


@contextmanager
def run_in(folder: Path, model: Path, **tables: str) -> Iterator[Run]:
    folder.mkdir()
    (folder / "run.toml").write_text(gpu_config_text(folder, model, **tables))
    config = load_config(folder / "run.toml").config
    plan = plan_of(config)
    with Trainer(config, plan=plan).open() as trainer:
        trainer.load()
        trainer.store.wait_idle()
        yield Run(trainer, make_loader(config, plan))


@pytest.fixture
def spoiled(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Let an element of every gradient be NaN as long as the list has an item."""
    is_spoiled: list[bool] = []
    add = GradientAccumulator.add

    def added(self: GradientAccumulator, name: str, gradient: torch.Tensor) -> None:
        if is_spoiled:
            gradient = gradient.clone()
            gradient.view(-1)[0] = torch.nan
        add(self, name, gradient)

    monkeypatch.setattr(GradientAccumulator, "add", added)
    return is_spoiled


def steps(run: Run, spoiled: list[bool]) -> dict[str, str]:
    """Run four steps, of which the second is not finite, and return the digests."""
    for is_spoiled in (False, True, False, False):
        spoiled[:] = [True] * is_spoiled
        run.step()
    run.engine.finish_updates()
    return run.digests()


@pytest.mark.parametrize("optimizer", ["max_grad_norm = 0.05", "max_grad_norm = 100", "optim = 'lion'"])
def test_bits_are_those_of_updates_that_the_host_decides_about(
    optimizer: str, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spoiled: list[bool]
) -> None:
    """With a step that is not finite, which leaves weights, state and the count of updates as they are."""
    tables = {"optimizer": f'{optimizer}\nnonfinite = "skip"'}
    with run_in(tmp_path / "ahead", tiny_model, **tables) as run:
        assert run.engine._access.updates_ahead
        ahead = steps(run, spoiled)
        results, num_updates = run.results, run.engine.num_updates
    with run_in(tmp_path / "ram", tiny_model, **tables, placement=HALF_IN_RAM) as run:
        assert not run.engine._access.updates_ahead
        assert steps(run, spoiled) == ahead
        assert run.results[0] == results[0] and run.results[2:] == results[2:]
    monkeypatch.setattr(UpdateOps, "are_all_on_device", lambda ops: False)
    with run_in(tmp_path / "host", tiny_model, **tables) as run:
        assert steps(run, spoiled) == ahead
        assert run.engine.num_updates == num_updates == 3
        assert [skipped for *_, skipped in results] == [False, True, False, False]


def test_a_step_that_is_not_finite_changes_nothing_and_is_reported(
    tiny_model: Path, tmp_path: Path, spoiled: list[bool]
) -> None:
    with run_in(tmp_path / "run", tiny_model) as run:
        run.step()
        before = run.digests()
        run.engine.finish_updates()
        assert run.digests() == before, "the step made its own update"
        spoiled.append(True)
        with pytest.raises(NonFiniteGradientError, match="step 2: the gradient is not finite"):
            run.step()
        run.engine.finish_updates()
        assert run.digests() == before and run.engine.num_updates == 1
