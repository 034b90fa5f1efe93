"""Updates that a step defers to the next step: when they run, and how a non-finite gradient affects them."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from megatrain.config import load_config
from megatrain.optim.clip import NonFiniteGradientError
from megatrain.plan.planner import plan_run
from megatrain.plan.traffic import Traffic
from megatrain.training.resolve import resolve
from oracles.single_steps import Steps, single_steps, spoil
from oracles.tiered_run import ALL_NVME, config_text


def steps(folder: Path, model: Path, **tables: str) -> AbstractContextManager[Steps]:
    return single_steps(folder, config_text(folder, model, nvme=0, **tables))


def test_deferred_update_runs_once_at_first_use(tiny_model: Path, tmp_path: Path) -> None:
    with steps(tmp_path / "a", tiny_model) as late, steps(tmp_path / "b", tiny_model) as soon:
        before = late.digests()
        assert late.step() == soon.step()
        assert late.digests() == before
        soon.engine.finish_updates()
        after = soon.digests()
        assert all(after[key] != before[key] for key in before)
        soon.engine.finish_updates()
        assert soon.digests() == after
        for _ in range(2):
            assert late.step() == soon.step()
            soon.engine.finish_updates()
        late.engine.finish_updates()
        assert late.digests() == soon.digests()


def test_nonfinite_gradient_stops_the_run_without_changes(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with steps(tmp_path / "a", tiny_model) as run:
        run.step()
        run.engine.finish_updates()
        before = run.digests()
        spoil(monkeypatch)
        with pytest.raises(NonFiniteGradientError, match="step 2: the gradient is not finite"):
            run.step()
        run.engine.finish_updates()
        assert run.digests() == before


def test_skipped_step_changes_no_state(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    skip = {"optimizer": 'nonfinite = "skip"'}
    with steps(tmp_path / "a", tiny_model, **skip) as run, steps(tmp_path / "b", tiny_model) as clean:
        run.step()
        with monkeypatch.context() as patch:
            spoil(patch)
            spoiled = run.step()
        assert spoiled.skipped
        clean.step()
        clean.engine.finish_updates()
        run.engine.finish_updates()
        assert run.digests() == clean.digests()
        assert run.step(batch=1).loss == clean.step(batch=1).loss == spoiled.loss
        run.engine.finish_updates()
        clean.engine.finish_updates()
        assert run.digests() == clean.digests()


NO_CHECKS = 'max_grad_norm = 0\nnonfinite = "ignore"'


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
        traffic = Traffic(plan.program, plan.placement.routes, plan.placement.homes, plan.placement.stays)
        moved[name] = traffic.step_bytes(kinds.__contains__)
    assert 0 < moved["late"]["nvme->ram"] <= gradient_bytes and 0 < moved["late"]["ram->nvme"] <= gradient_bytes
    # A tied weight's gradient exists from the head's backward to the embedding's, and must be evicted in between.
    of_tied = 4 * plans["soon"].graph.layouts["model.embed_tokens"].num_elements
    assert all(moved["soon"][link] == of_tied < moved["late"][link] for link in ("nvme->ram", "ram->nvme"))
