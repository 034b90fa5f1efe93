"""Single steps of a run, with access to the blocks between steps, and a way to make gradients non-finite."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from megatrain.config import load_config
from megatrain.engine.step import StepEngine, StepResult
from megatrain.engine.unit.weight_gradients import GradientAccumulator
from megatrain.training.trainer import Trainer
from oracles.tiered_run import make_loader, plan_of

NUM_STEPS = 4


class Steps:
    """Open trainer with loaded weights, which runs one step at a time.

    Attributes:
        engine: Engine that runs the steps.
        results: Results of the steps so far.
    """

    def __init__(self, trainer: Trainer, batches: list[list[dict[str, Tensor]]]) -> None:
        self.trainer, self._batches = trainer, batches
        self.engine: StepEngine = trainer.make_engine(NUM_STEPS)
        self.results: list[StepResult] = []

    def step(self, batch: int | None = None) -> StepResult:
        """Run the next step on its own batch, or on batch number ``batch``."""
        number = len(self.results)
        batches = self._batches[number if batch is None else batch]
        self.results.append(self.engine.step(batches, step_index=number, lr=1e-3))
        return self.results[-1]

    def contents(self) -> dict[str, Tensor]:
        """Return the current contents of all blocks of weights and optimizer state, by key."""
        found = {}
        for key, block in self.trainer.plan.program.blocks.items():
            if block.kind in ("weights", "optimizer"):
                home = self.trainer.plan.placement.homes[key]
                with self.trainer.store.acquire(key, "gpu" if home == "gpu" else "ram") as lease:
                    found[key] = lease.tensor.cpu().clone()
        return found

    def digests(self) -> dict[str, str]:
        """Return SHA-256 digests of all blocks of weights and optimizer state, by key."""
        blocks = {key: block.view(torch.uint8).numpy() for key, block in self.contents().items()}
        return {key: hashlib.sha256(block).hexdigest() for key, block in blocks.items()}


@contextmanager
def single_steps(folder: Path, text: str) -> Iterator[Steps]:
    """Open a config's trainer, with batches for four steps."""
    folder.mkdir(exist_ok=True)
    (folder / "run.toml").write_text(text)
    config = load_config(folder / "run.toml").config
    plan = plan_of(config)
    loader = make_loader(config, plan)
    batches = [[dict(batch) for batch in next(loader).micro_batches] for _ in range(NUM_STEPS)]
    with Trainer(config, plan=plan).open() as trainer:
        trainer.load()
        trainer.store.wait_idle()
        yield Steps(trainer, batches)


def spoil(monkeypatch: pytest.MonkeyPatch, glob: str = "*") -> None:
    """Patch the gradient accumulator so that gradients of parameters that match ``glob`` contain NaN."""

    def spoil_argument(method: str, position: int) -> None:
        original = getattr(GradientAccumulator, method)

        def spoiled(self: GradientAccumulator, name: str, *arguments: Any, **options: Any) -> None:
            if fnmatchcase(name, glob):
                values = arguments[position].clone()
                values.view(-1)[0] = torch.nan
                arguments = (*arguments[:position], values, *arguments[position + 1 :])
            original(self, name, *arguments, **options)

        monkeypatch.setattr(GradientAccumulator, method, spoiled)

    spoil_argument("add", 0)
    spoil_argument("add_product", 1)
    spoil_argument("add_rows", 1)
