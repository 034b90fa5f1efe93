"""Steps of several ranks on a GPU: collectives run on a separate stream in the right order, without a host wait."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from fakes.gpu_run import gpu_config_text, no_waits_allowed
from fakes.twins import Twins
from megatrain.base import layout as layouts
from megatrain.base.layout import PART_ALIGNMENT_ELEMENTS
from megatrain.config import load_config
from megatrain.engine.program.workspace import collective_transients, peak_bytes
from megatrain.plan.planner import plan_run
from megatrain.ranks import collectives
from megatrain.ranks.world import World
from megatrain.training.resolve import resolve
from megatrain.training.trainer import Trainer
from oracles.tiered_run import force_passing, make_loader

NUM_STEPS = 4
WORLD = World.local(0, 2)


def train(folder: Path, model: Path, *, ahead: bool, passes: bool = False, **tables: str) -> tuple[Any, ...]:
    """Run four steps. The last two must not make the host wait.

    Return the loss and gradient norm of each step, and how many visits ahead the weights are gathered.

    Args:
        ahead: Whether weights are gathered ahead.
        passes: Whether parts of the vocabulary are streamed one by one.
        tables: Config tables, as for ``config_text``.
    """
    folder.mkdir()
    tables["advanced"] = "" if ahead else "prefetch = 0"
    text = gpu_config_text(folder, model, **tables)
    text = text.replace("gradient_accumulation_steps = 3", "gradient_accumulation_steps = 4")
    (folder / "run.toml").write_text(text)
    config = load_config(folder / "run.toml").config
    with force_passing(passes):
        plan = plan_run(replace(resolve(config), world=WORLD))
    assert bool(plan.program.cuts.passing) == passes
    loader, found = make_loader(config, plan), []
    with mock.patch.object(collectives, "Collectives", Twins.of(WORLD)), Trainer(config, plan=plan).open() as trainer:
        trainer.load()
        trainer.store.wait_idle()
        engine = trainer.make_engine(NUM_STEPS)
        for number in range(NUM_STEPS):
            batch = next(loader).micro_batches
            with no_waits_allowed() if number >= 2 else nullcontext():  # the first steps allocate memory
                result = engine.step(batch, step_index=number, lr=1e-3)
            found.append((result.loss, result.grad_norm))
        engine.finish_updates()
        assert 0 < engine.window_bytes <= peak_bytes(collective_transients(plan.graph, plan.program))
    return found, plan.program.sharding.gathers_ahead


@pytest.mark.usefixtures("virtual")
@pytest.mark.parametrize("optimizer", ["max_grad_norm = 0.5", 'clip_scope = "layer"'])
def test_collective_streams_are_ordered_without_host_waits(
    optimizer: str, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layouts, "PART_ELEMENTS", PART_ALIGNMENT_ELEMENTS)
    in_one_stream, gathers_ahead = train(tmp_path / "one", tiny_model, ahead=False, optimizer=optimizer)
    assert gathers_ahead == 0
    beside, gathers_ahead = train(tmp_path / "two", tiny_model, ahead=True, optimizer=optimizer)
    assert beside == in_one_stream
    assert gathers_ahead > 1
    passing, gathers_ahead = train(tmp_path / "three", tiny_model, ahead=True, passes=True, optimizer=optimizer)
    assert passing == in_one_stream
    assert gathers_ahead > 1
