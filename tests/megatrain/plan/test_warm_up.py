"""Before the first step, exactly the kernels that the run's updates need are compiled."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.sides import Ours
from megatrain.config import load_config
from megatrain.engine.device import device_kernels
from megatrain.optim import clip
from megatrain.optim.base import FORMATS, Format
from megatrain.plan import stepping
from megatrain.plan.plan import Plan
from megatrain.plan.planner import plan_run
from megatrain.plan.stepping import warm_up
from megatrain.training.resolve import resolve
from oracles.tiered_run import config_text, write_tiny_model

ALL_RAM = 'weights = ["ram"]\ngradients = ["ram"]\noptimizer = ["ram"]\nactivations = ["ram"]'


@dataclass
class WatchedOptimizer:
    """Optimizer that records for which formats it compiled kernels, and after how many updates."""

    inner: Any
    formats: list[tuple[Format, int]] = field(default_factory=list)
    num_updates: int = 0

    def state_kinds(self, split_master: bool) -> Any:
        return self.inner.state_kinds(split_master)

    def update(self, *args: Any) -> None:
        self.num_updates += 1
        self.inner.update(*args)

    def warm_up(self, formats: Iterable[Format] = FORMATS) -> None:
        self.formats += [(one, self.num_updates) for one in formats]


def watched_plan(folder: Path, **tables: str) -> tuple[Any, Plan, WatchedOptimizer, WatchedOptimizer]:
    """Return the config and plan of a tiny bf16 model with a GPU tier, and the watched host and device optimizers."""
    precision = 'compute_dtype = "bfloat16"\n' + tables.pop("precision", "")
    model = write_tiny_model(folder / "model")
    text = config_text(folder, model, nvme=0, gpu="64MiB", precision=precision, **tables)
    (folder / "run.toml").write_text(text)
    config = load_config(folder / "run.toml").config
    plan = plan_run(resolve(config))
    host, device = WatchedOptimizer(plan.traced.optimizer), WatchedOptimizer(plan.traced.device_optimizer)
    return config, replace(plan, traced=replace(plan.traced, optimizer=host, device_optimizer=device)), host, device


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_warm_up_uses_the_formats_of_the_run(dtype: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _, plan, host, device = watched_plan(tmp_path, precision=f'grad_dtype = "{dtype}"')
    others: list[tuple[Any, ...]] = []
    for owner, name in ((clip, "warm_up"), (stepping, "warm_up_norm"), (device_kernels, "warm_up")):
        monkeypatch.setattr(owner, name, lambda *given: others.append(given))
    warm_up(plan)
    assert others == [(), (plan.device,), (plan.device, torch.bfloat16)]
    assert plan.updates.gpu_memory_ticks
    assert host.formats == device.formats == [((True, getattr(torch, dtype)), 0)]


def test_warm_up_skips_a_device_without_updates(tmp_path: Path) -> None:
    _, plan, host, device = watched_plan(tmp_path, placement=ALL_RAM)
    warm_up(plan)
    assert host.formats and not plan.updates.gpu_memory_ticks and not device.formats


def test_benches_compile_the_kernels_of_the_device_before_the_first_step(tmp_path: Path) -> None:
    """The second step makes the first update, and this step is already measured."""
    config, plan, _, device = watched_plan(tmp_path)
    with Ours(config, 1, plan=plan) as ours:
        assert device.formats == [((True, torch.float32), 0)] and device.num_updates == 0
        assert ours.start_s.keys() == {"warm_up", "populate", "pin", "fill"}
