"""Updates are bit-identical, whether the device or the host decides to skip a step."""

from __future__ import annotations

from contextlib import AbstractContextManager
from pathlib import Path

import pytest

from fakes.gpu_run import gpu_config_text
from megatrain.engine.tape.updates import UpdateOps
from megatrain.optim.clip import NonFiniteGradientError
from oracles.single_steps import Steps, single_steps, spoil

pytestmark = pytest.mark.usefixtures("virtual")
HALF_IN_RAM = 'weights = ["ram"]\noptimizer = ["ram"]'


def run_in(folder: Path, model: Path, **tables: str) -> AbstractContextManager[Steps]:
    return single_steps(folder, gpu_config_text(folder, model, **tables))


def steps(run: Steps) -> tuple[list[tuple[float, float, bool]], dict[str, str]]:
    """Run four steps, the second with non-finite gradients. Return their results, and digests of weights and state."""
    for is_spoiled in (False, True, False, False):
        with pytest.MonkeyPatch.context() as patch:
            if is_spoiled:
                spoil(patch)
            run.step()
    run.engine.finish_updates()
    results = [(each.loss if not each.skipped else 0.0, each.grad_norm, each.skipped) for each in run.results]
    return results, run.digests()


@pytest.mark.parametrize("optimizer", ["max_grad_norm = 0.05", "max_grad_norm = 100", "optim = 'lion'"])
def test_updates_ahead_match_host_decided_updates_bitwise(
    optimizer: str, tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A step with non-finite gradients leaves weights, state and the number of updates unchanged."""
    tables = {"optimizer": f'{optimizer}\nnonfinite = "skip"'}
    with run_in(tmp_path / "ahead", tiny_model, **tables) as run:
        assert run.engine._access.can_update_ahead
        results, ahead = steps(run)
        num_updates = run.engine.num_updates
    with run_in(tmp_path / "ram", tiny_model, **tables, placement=HALF_IN_RAM) as run:
        assert not run.engine._access.can_update_ahead
        in_ram, digests = steps(run)
        assert digests == ahead and in_ram[0] == results[0] and in_ram[2:] == results[2:]
    monkeypatch.setattr(UpdateOps, "are_all_on_device", lambda ops: False)
    with run_in(tmp_path / "host", tiny_model, **tables) as run:
        assert steps(run)[1] == ahead
        assert run.engine.num_updates == num_updates == 3
        assert [skipped for *_, skipped in results] == [False, True, False, False]


def test_nonfinite_step_changes_no_state_and_is_reported(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with run_in(tmp_path / "run", tiny_model) as run:
        run.step()
        before = run.digests()
        run.engine.finish_updates()
        assert run.digests() == before, "the step made its own update"
        spoil(monkeypatch)
        with pytest.raises(NonFiniteGradientError, match="step 2: the gradient is not finite"):
            run.step()
        run.engine.finish_updates()
        assert run.digests() == before and run.engine.num_updates == 1
