"""Resuming after the config, the data or the machine changed: what is refused, and where the data continues."""

from __future__ import annotations

import itertools
import json
import re
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from click.testing import Result

from megatrain.checkpoint import saver
from megatrain.checkpoint.inventory import RunInventory, find_checkpoint
from megatrain.checkpoint.resume import ConfigChangedError, check_changes
from megatrain.config import load_config
from megatrain.config.resolved import changes_from, to_toml
from megatrain.config.schema import RunConfig
from megatrain.plan.planner import plan_run
from megatrain.training.resolve import resolve
from megatrain.training.start import describe_model, with_decay_checksum
from processes.saved_run import SavedRun


@pytest.fixture
def run(unbroken: SavedRun, tmp_path: Path) -> SavedRun:
    return unbroken.copy(tmp_path / "w")


def train(run: SavedRun, *options: str, **config: Any) -> int:
    """Continue training, and return the step of the resumed checkpoint, or 0 if there is none."""
    result: Result = run.run(*options, **config)
    assert result.exit_code == 0, result.output
    found = re.search(r"continuing after step (\d+)", result.output)
    return int(found[1]) if found else 0


def saved_steps(folder: Path) -> list[int | None]:
    return [entry.checkpoint.step for entry in RunInventory(folder).entries]


def epochs(folder: Path) -> dict[int, float]:
    lines = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    return {line["step"]: line["epoch"] for line in lines if "epoch" in line}


def test_derived_run_resumes_from_its_own_checkpoints(run: SavedRun) -> None:
    config = {"out": "second", "checkpoint": f'resume_from_checkpoint = "{run.out}"'}
    second = run.folder / "second"
    assert train(run, steps=6, **config) == 6
    assert saved_steps(second) == [6], "no steps were left, and it has a separate checkpoint"
    assert train(run, steps=8, **config) == 6
    assert train(run, steps=9, **config) == 8
    assert saved_steps(second) == [6, 8, 9]


def test_export_with_another_dtype_is_rewritten(run: SavedRun) -> None:
    train(run, steps=6, more='[export]\ndtype = "bfloat16"\n')
    assert json.loads((run.out / "final/export.json").read_text())["dtype"] == "bfloat16"
    assert saved_steps(run.out) == [2, 4, 6]


@pytest.mark.parametrize("key", ["config_xxh3_64", "dtype", "device", "attention", "name", "class", "num_parameters"])
def test_model_facts_that_alter_results(key: str, unbroken: SavedRun) -> None:
    """Some facts are not in the config: ``auto`` may select another kernel on another machine."""
    found, config = find_checkpoint(unbroken.out).checkpoint, load_config(unbroken.folder / "run.toml").config
    now = {**found.state.model, key: "another"}
    changes = changes_from(found.state.config_toml, config)
    notices: list[str] = []

    def check(allow: bool) -> None:
        check_changes(changes, found, now, found.state.data_fingerprint, allow=allow, on_notice=notices.append)

    if key in ("name", "class", "num_parameters"):
        check(allow=False)
        assert not notices
        return
    with pytest.raises(ConfigChangedError, match="-> another"):
        check(allow=False)
    check(allow=True)
    assert len(notices) == 1 and "-> another" in notices[0]


EXCLUDE = "optimizer.weight_decay_exclude"


def test_equivalent_decay_globs_may_change(unbroken: SavedRun) -> None:
    """Only the set of decayed parameters matters. Older checkpoints recorded only globs; at that time, no vector
    decayed.
    """
    found, config = find_checkpoint(unbroken.out).checkpoint, load_config(unbroken.folder / "run.toml").config
    plan = plan_run(resolve(config))

    def check(before: tuple[str, ...], now: tuple[str, ...], *, noted: bool = True) -> list[str]:
        def with_globs(globs: tuple[str, ...]) -> RunConfig:
            return config.model_copy(update={"optimizer": config.optimizer.model_copy(update={EXCLUDE[10:]: globs})})

        plans = [replace(plan, run=resolve(with_globs(globs))) for globs in (before, now)]
        model = {**found.state.model, **describe_model(plans[0])}
        if not noted:
            del model["decays"]
        state = replace(found.state, model=model, config_toml=to_toml(with_globs(before)))
        saved = with_decay_checksum(replace(found, meta=state.to_meta()), plan)
        notices: list[str] = []
        check_changes(
            changes_from(saved.state.config_toml, with_globs(now)),
            saved,
            {**model, **describe_model(plans[1])},
            found.state.data_fingerprint,
            allow=False,
            on_notice=notices.append,
        )
        return notices

    default = config.optimizer.weight_decay_exclude
    for noted in (True, False):
        (told,) = check(("*.bias", "*norm*", "*embed*"), default, noted=noted)
        assert told.startswith("changed, without effect on results") and EXCLUDE in told
        assert check(default, default, noted=noted) == []
        with pytest.raises(ConfigChangedError, match=f"(?s)^(?!.*checksum).*{EXCLUDE}"):
            check(default, ("*norm*",), noted=noted)
    assert check((), ()) == []
    with pytest.raises(ConfigChangedError, match="the parameters that weight decay applies to"):
        check((), (), noted=False)


def test_changed_number_of_threads_is_reported(unbroken: SavedRun) -> None:
    found, config = find_checkpoint(unbroken.out).checkpoint, load_config(unbroken.folder / "run.toml").config
    assert found.state.model["threads"] == 1
    changes = changes_from(found.state.config_toml, config)
    notices: list[str] = []
    for threads in (1, 2):
        now = {**found.state.model, "threads": threads}
        check_changes(changes, found, now, found.state.data_fingerprint, allow=False, on_notice=notices.append)
    (told,) = notices
    assert told.startswith("torch computes on 2 threads, and did on 1 up to the checkpoint")


def test_other_data_alters_results(unbroken: SavedRun) -> None:
    found, config = find_checkpoint(unbroken.out).checkpoint, load_config(unbroken.folder / "run.toml").config
    other = replace(found, meta={**found.meta, "data_fingerprint": "another"})
    with pytest.raises(ConfigChangedError, match="data: the rows"):
        check_changes(
            changes_from(other.state.config_toml, config),
            other,
            found.state.model,
            found.state.data_fingerprint,
            allow=False,
            on_notice=lambda text: None,
        )


def test_data_resumes_at_the_same_row_with_another_batch_size(run: SavedRun) -> None:
    """Six steps of two rows have already used twelve rows."""
    words = ("--set", "per_device_train_batch_size=1", "--allow-config-change")
    assert train(run, *words, steps=8) == 6
    found = epochs(run.out)
    per_row = found[8] - found[7]
    assert found[7] == pytest.approx(13 * per_row)


def test_saved_at_the_end_of_every_epoch_and_of_the_run(run: SavedRun) -> None:
    words = ("--set", "per_device_train_batch_size=8")
    train(run, *words, out="epochs", steps=9, checkpoint='save_strategy = "epoch"')
    whole = [step for step, epoch in epochs(run.folder / "epochs").items() if epoch == int(epoch)]
    assert len(whole) == 2 and 9 not in whole
    assert saved_steps(run.folder / "epochs") == [*whole, 9]


def test_a_save_reports_how_long_training_waited(
    untrained: SavedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each reading of the clock is one second later. A save waits twice: to begin the write, and for its end."""
    clock = SimpleNamespace(perf_counter=itertools.count(100.0).__next__, monotonic=time.monotonic, sleep=time.sleep)
    monkeypatch.setattr(saver, "time", clock)
    run = untrained.copy(tmp_path / "w")
    assert run.run(steps=2).exit_code == 0
    lines = [json.loads(line) for line in (run.out / "metrics.jsonl").read_text().splitlines()]
    assert [line["stall_s"] for line in lines if line.get("event") == "checkpoint"] == [2.0]
