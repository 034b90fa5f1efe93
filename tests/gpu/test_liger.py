"""Within steps with liger-kernel's norms and MLPs, the host does not wait.

Results are bit-identical for all placements.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from fakes.gpu_run import gpu_config_text, no_waits_allowed
from fakes.liger_packages import stand_in_liger
from fakes.virtual_cuda import VirtualCuda
from megatrain.config import load_config
from megatrain.plan.planner import plan_run
from megatrain.training.resolve import resolve
from megatrain.training.trainer import Trainer
from oracles.tiered_run import TieredRun, make_loader, run_config

ALL_RAM = 'weights = ["ram"]\ngradients = ["ram"]\noptimizer = ["ram"]\nactivations = ["ram"]'
ALL_NVME = ALL_RAM.replace("ram", "nvme")


@pytest.fixture
def liger(virtual: VirtualCuda | None) -> Iterator[None]:
    """Use liger-kernel, or its stand-in on a software device."""
    if virtual is None:
        pytest.importorskip("liger_kernel")
    with nullcontext() if virtual is None else stand_in_liger():
        yield


def config_with_key(folder: Path, model: Path, **tables: Any) -> str:
    return gpu_config_text(folder, model, **tables).replace("[data]", "use_liger_kernel = true\n[data]", 1)


@pytest.mark.slow  # tests/gpu/test_steps.py has the same test of torch's kernels
@pytest.mark.usefixtures("liger")
def test_host_waits_only_for_the_end_of_a_step(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(config_with_key(tmp_path, tiny_model, placement=ALL_RAM))
    config = load_config(tmp_path / "run.toml").config
    plan = plan_run(resolve(config))
    with Trainer(config, plan=plan).open() as trainer:
        trainer.load()
        trainer.store.wait_idle()
        plan.traced.optimizer.warm_up()
        engine, loader = trainer.make_engine(4), make_loader(config, plan)
        for number in range(2):  # compiles kernels
            engine.step(next(loader).micro_batches, step_index=number, lr=1e-3)
        with no_waits_allowed():
            results = [engine.step(next(loader).micro_batches, step_index=n, lr=1e-3) for n in (2, 3)]
        engine.finish_updates()
    assert all(6 < result.loss < 7 and 1 < result.grad_norm < 5 for result in results)


@pytest.mark.usefixtures("liger")
def test_losses_are_close_and_placements_bit_identical(tiny_model: Path, tmp_path: Path) -> None:
    plain = run_config(gpu_config_text(tmp_path / "plain", tiny_model, nvme=0), tmp_path / "plain", num_steps=2)
    runs: list[TieredRun] = []
    for name, placement in (("gpu", ""), ("ram", ALL_RAM), ("nvme", ALL_NVME)):
        text = config_with_key(tmp_path / name, tiny_model, placement=placement)
        runs.append(run_config(text, tmp_path / name, num_steps=2))
        runs[-1].assert_as_planned()
    assert runs[0].losses == pytest.approx(plain.losses, rel=1e-2)
    for run in runs[1:]:
        run.assert_same(runs[0])
