"""The memory of a rank's full copies and sums matches the plan exactly, on one host and on several hosts."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from unittest import mock

import pytest
from torch import Tensor

from fakes.twins import Twins
from megatrain.base import layout as layouts
from megatrain.base.layout import PART_ALIGNMENT_ELEMENTS
from megatrain.config import load_config
from megatrain.engine.program.workspace import collective_transients, peak_bytes
from megatrain.engine.tape.ranked import Ranks
from megatrain.plan.planner import plan_run
from megatrain.ranks import collectives
from megatrain.ranks.world import World
from megatrain.training.resolve import resolve
from megatrain.training.trainer import Trainer
from oracles.tiered_run import config_text, force_passing, make_loader, write_tiny_model


@pytest.mark.parametrize(("size", "num_hosts"), [(2, 1), (3, 1), (4, 1), (6, 1), (3, 3)])
def test_exchange_memory_matches_the_plan(
    size: int, num_hosts: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layouts, "PART_ELEMENTS", PART_ALIGNMENT_ELEMENTS)
    world = World.local(0, size, num_hosts)
    text = config_text(tmp_path, write_tiny_model(tmp_path / "model"), nvme=0)
    text = text.replace("gradient_accumulation_steps = 3", f"gradient_accumulation_steps = {world.size}")
    (tmp_path / "run.toml").write_text(text.replace("max_length = 64", "max_length = 8"))
    config = load_config(tmp_path / "run.toml").config
    with force_passing(True):
        plan = plan_run(replace(resolve(config), world=world))
    with mock.patch.object(collectives, "Collectives", Twins.of(world)), Trainer(config, plan=plan).open() as trainer:
        trainer.load()
        engine = trainer.make_engine(1)
        sharding, lanes, held_at_once = engine._access.sharding, plan.program.sharding.lanes, set()
        assert isinstance(sharding, Ranks)
        window, added = sharding.window, sharding.gradients._exchange_sums

        def measured(sums: Sequence[Tensor]) -> Tensor:
            before, most, window.peak_bytes = window.live_bytes, window.peak_bytes, 0
            found = added(sums)
            held_at_once.add((window.peak_bytes - before) * world.size // (4 * sums[0].numel()))
            window.peak_bytes = max(most, window.peak_bytes)
            return found

        monkeypatch.setattr(sharding.gradients, "_exchange_sums", measured)
        engine.step(next(make_loader(config, plan)).micro_batches, step_index=0, lr=1e-3)
        engine.finish_updates()
        assert held_at_once == {lanes.num_sums}
        assert engine.window_bytes == peak_bytes(collective_transients(plan.graph, plan.program)) > 0
