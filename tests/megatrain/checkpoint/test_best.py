"""The best evaluation: how it is chosen, which checkpoint is kept and exported, and early stopping."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from transformers import EarlyStoppingCallback, TrainerControl, TrainerState, TrainingArguments

from megatrain.base.errors import ConfigError
from megatrain.base.observer import EvaluationMetrics
from megatrain.checkpoint.best import BestEvaluation, BestSpec
from megatrain.checkpoint.inventory import RunInventory
from megatrain.checkpoint.state import RunState
from oracles.run_state import make_state
from processes.saved_run import SavedRun

VALUES = st.one_of(st.sampled_from([1.0, 1.1, 1.2, 0.9, math.nan]), st.floats(0, 2))
#: Here the largest loss counts as the best. The loss falls, so the first evaluation stays the best.
WORST = 'eval_steps = 2\nmetric_for_best_model = "eval_loss"\ngreater_is_better = true\n'
EVAL = '[[data.eval]]\nname = "held out"\npath = "data.txt"\n'


@pytest.fixture
def run(untrained: SavedRun, tmp_path: Path) -> SavedRun:
    return untrained.copy(tmp_path / "w")


def train(run: SavedRun, evaluation: str, **config: Any) -> str:
    config.setdefault("checkpoint", "")
    result = run.run(more=f"{EVAL}[evaluation]\n{WORST}{evaluation}", **config)
    assert result.exit_code == 0, result.output
    return result.output


def saved_steps(run: SavedRun) -> list[int | None]:
    return [entry.checkpoint.step for entry in RunInventory(run.out).entries]


@given(st.lists(VALUES, min_size=1, max_size=8), st.booleans(), st.integers(1, 3), st.sampled_from([0.0, 0.1]))
def test_patience_matches_transformers(
    tmp_path_factory: pytest.TempPathFactory, values: list[float], greater: bool, patience: int, threshold: float
) -> None:
    spec = BestSpec("loss", greater, is_kept=True, patience=patience, threshold=threshold)
    arguments = TrainingArguments(
        str(tmp_path_factory.getbasetemp()), metric_for_best_model="loss", greater_is_better=greater, use_cpu=True,
        load_best_model_at_end=True, eval_strategy="steps", save_strategy="steps", eval_steps=1, save_steps=1,
    )  # fmt: skip
    theirs, state, best = EarlyStoppingCallback(patience, threshold), TrainerState(), None
    for step, value in enumerate(values, start=1):
        control = TrainerControl()
        theirs.on_evaluate(arguments, state, control, metrics={"eval_loss": value})
        if state.best_metric is None or (value > state.best_metric if greater else value < state.best_metric):
            state.best_metric, state.best_global_step = value, step
        first_is_nan = best is not None and math.isnan(best.value)
        best = spec.after(best, step, value)
        if first_is_nan or math.isnan(values[0]):
            return  # transformers considers no value better than NaN
        assert (best.value, best.step) == (state.best_metric, state.best_global_step)
        assert spec.is_over(best) == control.should_training_stop
        if control.should_training_stop:
            return


def test_metric_names_select_evaluation_values() -> None:
    def metric(name: str) -> BestSpec:
        return BestSpec(name, False, True, 0, 0.0)

    found = {
        "first": EvaluationMetrics(2, 9, "first", 1.5, 10, 0.1),
        "second": EvaluationMetrics(2, 9, "second", 2.5, 10, 0.1, {"rewards/accuracies": 0.75}),
    }
    values = {"loss": 1.5, "eval_loss": 1.5, "second_loss": 2.5, "eval_second_rewards/accuracies": 0.75}
    for name, value in values.items():
        assert metric(name).value_of(found) == value
    assert metric("perplexity").value_of(found) == pytest.approx(math.exp(1.5))
    metric("second_loss").check(found)
    with pytest.raises(ConfigError, match="Known metrics: loss, first_loss, second_loss"):
        metric("third_loss").check(found)
    with pytest.raises(ConfigError, match="second_rewards/accuracies"):
        metric("bleu").value_of(found)
    state = make_state(best=BestEvaluation("loss", 1.0, 3, 1))
    assert RunState.from_meta(json.loads(json.dumps(state.to_meta())), where="here") == state


def test_best_checkpoint_is_kept_and_exported(run: SavedRun) -> None:
    one = {"checkpoint": "load_best_model_at_end = true"}
    output = train(run, "", steps=6, **one).replace("\n", " ")
    assert "exporting the model of step 2, the best one" in output
    assert saved_steps(run) == [2, 4, 6]
    assert json.loads((run.out / "final/export.json").read_text())["step"] == 2
    assert "nothing to do" in train(run, "", steps=6, **one)
    # The continued run keeps the three newest checkpoints in addition to the best.
    train(run, "", steps=12, **one)
    assert saved_steps(run) == [2, 8, 10, 12]
    assert run.call("export", "--step", 2, run.out, run.folder / "two").exit_code == 0
    two, final = (load_file(folder / "model.safetensors") for folder in (run.folder / "two", run.out / "final"))
    assert two.keys() == final.keys() and all(two[name].equal(final[name]) for name in two)
    # After the best checkpoint is removed by hand, the next evaluation counts as the best.
    assert run.call("ckpt", "rm", run.out, "--step", 2, "--yes").exit_code == 0
    output = train(run, "", steps=14, **one).replace("\n", " ")
    assert "the checkpoint of the best evaluation, of step 2, is gone" in output
    assert json.loads((run.out / "final/export.json").read_text())["step"] == 14


def test_changed_metric_resets_the_best_checkpoint(run: SavedRun) -> None:
    one = {"checkpoint": "load_best_model_at_end = true"}
    train(run, "", steps=4, **one)
    assert json.loads((run.out / "final/export.json").read_text())["step"] == 2  # step 2 has the largest loss
    least = WORST.replace("true", "false")
    result = run.run(more=f"{EVAL}[evaluation]\n{least}", steps=8, **one)
    assert result.exit_code == 0, result.output
    said = " ".join(result.output.split())
    assert "of step 2, was chosen by another metric, the largest eval_loss: the next one counts as the best" in said
    assert json.loads((run.out / "final/export.json").read_text())["step"] == 8


def test_run_without_improvement_stops_early(run: SavedRun) -> None:
    assert "stopping early: 2 evaluations in a row" in train(run, "early_stopping_patience = 2\n", steps=20)
    assert saved_steps(run) == [2, 4, 6]
    assert json.loads((run.out / "final/export.json").read_text())["step"] == 6
    assert "nothing to do" in train(run, "early_stopping_patience = 2\n", steps=20)
    assert "stopping early" in train(run, "early_stopping_patience = 3\n", steps=20)
    assert saved_steps(run) == [4, 6, 8]
    # A resumed run continues the count of evaluations without an improvement.
    assert json.loads((run.out / "final/export.json").read_text())["step"] == 8


def test_an_evaluation_before_the_first_step_is_never_the_best(run: SavedRun) -> None:
    """No checkpoint has the weights of this evaluation. If it counted, the run would end one evaluation earlier."""
    output = train(run, "eval_on_start = true\nearly_stopping_patience = 2\n", steps=20)
    assert "stopping early: 2 evaluations in a row" in output
    assert saved_steps(run) == [2, 4, 6]


def test_invalid_best_model_settings_are_refused(run: SavedRun) -> None:
    def said(more: str, **config: str) -> str:
        result = run.run(more=more, **config)
        assert result.exit_code == 2, result.output
        assert not run.out.exists()
        return " ".join(result.output.split())

    assert "compares evaluations, but the run makes none" in said("[evaluation]\nearly_stopping_patience = 2\n")
    kept = {"checkpoint": "load_best_model_at_end = true"}
    assert "load_best_model_at_end = true compares evaluations" in said("", **kept)
    for weights in ("average", "both"):
        none = said(f'{EVAL}[evaluation]\nweights = "{weights}"\n')
        assert "evaluates averaged weights, but the run computes no average" in none and "ema_decay" in none
    twins = f'{EVAL}[[data.eval]]\nname = "held out_average"\npath = "data.txt"\n[evaluation]\nweights = "both"\n'
    assert "the name for evaluations of averaged weights on another set" in said(twins)
    unknown = f'{EVAL}[evaluation]\nearly_stopping_patience = 1\nmetric_for_best_model = "heldout_loss"\n'
    assert "no evaluation has this metric. Known metrics: loss, held out_loss" in said(unknown)
