"""Where figures go: what is asked for is there, steps that come again are not doubled, a failure ends no run."""

from __future__ import annotations

import importlib.util
import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from megatrain import loggers
from megatrain.config import ConfigError, RunConfig, config_from_toml, load_config, to_toml
from megatrain.loggers import TensorBoardLog, WandbLog, check_loggers, make_loggers
from megatrain.metrics import CheckpointMetrics, EvaluationMetrics, RunSummary, StepMetrics

SUMMARY = RunSummary(6, 2.0, 1.0, 5.0, 100, 90)


@pytest.fixture
def make_config(tmp_path: Path) -> Callable[[str], RunConfig]:
    def make(lines: str = "") -> RunConfig:
        (tmp_path / "run.toml").write_text(
            f'task = "sft"\noutput_dir = "out"\n[model]\nmodel_name_or_path = "m"\n[data]\n[[data.train]]\n'
            f'path = "d.jsonl"\n[logging]\n{lines}\n'
        )
        config = load_config(tmp_path / "run.toml").config
        config.output_dir.mkdir(exist_ok=True)
        return config

    return make


def step(number: int, loss: float = 1.5) -> StepMetrics:
    return StepMetrics(
        step=number, max_steps=6, epoch=0.1, loss=loss, grad_norm=0.5, lr=1e-5, num_real_tokens=100,
        num_trained_tokens=50, step_s=0.5, eta_s=4.5, tier_used_bytes={"ram": 1 << 30},
        tier_capacity_bytes={"ram": 2 << 30}, stall_s={"fill": 0.25}, rss_bytes=1 << 30,
        written_bytes={"/d": 10**9}, model_flops=10**12, hardware_flops=2 * 10**12,
    )  # fmt: skip


def train(logger: Any, first: int, last: int, loss: float = 1.5) -> None:
    for number in range(first, last + 1):
        logger.on_step(step(number, loss))
    logger.on_evaluation(EvaluationMetrics(last, 6, "held", 1.25, 10, 0.5))
    logger.on_checkpoint(CheckpointMetrics(last, Path("out"), 1 << 30, 1, 2, 3.0, 0.5))


@pytest.mark.parametrize(
    ("value", "names"),
    [
        ('"jsonl"', ("jsonl",)),
        ('"none"', ()),
        ('["none"]', ()),
        ("[]", ()),
        ('["jsonl", "tensorboard"]', ("jsonl", "tensorboard")),
        ('["wandb", "jsonl", "wandb"]', ("wandb", "jsonl")),
    ],
)
def test_report_to_is_a_name_or_a_list(value: str, names: tuple[str, ...], make_config: Any) -> None:
    config = make_config(f"report_to = {value}")
    assert config.logging.report_to == names
    assert config_from_toml(to_toml(config)).logging.report_to == names


def test_jsonl_is_the_default_and_none_is_nothing(make_config: Any) -> None:
    assert make_config().logging.report_to == ("jsonl",)
    assert make_loggers(make_config('report_to = "none"'), None) == []
    assert make_loggers(make_config("report_to = []"), None) == []


def test_an_unknown_place_is_refused(make_config: Any) -> None:
    with pytest.raises(ConfigError, match=r"logging\.report_to"):
        make_config('report_to = ["jsonl", "mlflow"]')


def test_what_is_missing_is_said_before_anything_starts(make_config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    config = make_config('report_to = ["jsonl", "tensorboard", "wandb"]')
    with pytest.raises(ConfigError) as caught:
        check_loggers(config)
    text = str(caught.value)
    assert 'pip install "megatrain-tier[tensorboard]"' in text and 'pip install "megatrain-tier[wandb]"' in text
    assert len(caught.value.problems) == 2
    with pytest.raises(ConfigError):
        make_loggers(config, None)
    assert not (config.output_dir / "metrics.jsonl").exists()
    check_loggers(make_config())


def test_json_lines_go_on_where_the_run_does(make_config: Any) -> None:
    config = make_config()
    for continued_from, first, last in ((None, 1, 5), (3, 4, 6)):
        [log] = make_loggers(config, continued_from)
        with log:
            train(log, first, last)
            log.on_end(SUMMARY)
    lines = [json.loads(line) for line in (config.output_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line and "event" not in line] == [1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in lines if line.get("event") == "evaluation"] == [6]


def test_a_logger_that_fails_is_told_of_and_given_up(make_config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    class Full(TensorBoardLog):
        def __init__(self, config: RunConfig, continued_from: int | None) -> None:
            self.seen = 0

        def on_step(self, metrics: StepMetrics) -> None:
            self.seen += 1
            raise OSError(28, "No space left on device")

        def close(self) -> None:
            raise AssertionError("it was given up")

    notices: list[str] = []
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setattr(loggers, "TensorBoardLog", Full)
    with make_loggers(make_config('report_to = "tensorboard"'), None, notices.append)[0] as log:
        train(log, 1, 3)
        log.on_end(SUMMARY)
    assert len(notices) == 1 and "tensorboard" in notices[0] and "No space left" in notices[0], notices


def test_curves_of_tensorboard_are_not_doubled(make_config: Any) -> None:
    pytest.importorskip("tensorboard", reason="the tensorboard extra is not installed")
    config = make_config('report_to = ["tensorboard"]')
    with warnings.catch_warnings():  # their code uses what numpy and protobuf are about to drop
        warnings.simplefilter("ignore")
        for continued_from, first, last, loss in ((None, 1, 5, 3.0), (3, 4, 6, 2.0)):
            with TensorBoardLog(config, continued_from) as log:
                train(log, first, last, loss)
                log.on_end(SUMMARY)
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        events = EventAccumulator(str(config.output_dir / "tensorboard"))
        events.Reload()
        points = [(point.step, point.value) for point in events.Scalars("train/loss")]
        assert points == [(1, 3.0), (2, 3.0), (3, 3.0), (4, 2.0), (5, 2.0), (6, 2.0)]
        assert [point.step for point in events.Scalars("eval/held_loss")] == [6]
        assert events.Scalars("speed/tokens_per_s")[0].value == 200
        assert events.Scalars("speed/hardware_TFLOPs")[0].value == 4
        assert {"memory/ram_GiB", "memory/process_GiB", "wait/fill_s", "checkpoint/stall_s"} <= set(
            events.Tags()["scalars"]
        )
        with TensorBoardLog(config, None) as log:  # a run that starts anew in the same folder
            train(log, 1, 1, 9.0)
        events = EventAccumulator(str(config.output_dir / "tensorboard"))
        events.Reload()
        assert [(point.step, point.value) for point in events.Scalars("train/loss")] == [(1, 9.0)]


def test_wandb_offline(make_config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="the wandb extra is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    config = make_config('report_to = ["wandb"]\nproject = "whales"')
    ids = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for continued_from, first, last in ((None, 1, 3), (3, 4, 6)):
            with WandbLog(config, continued_from) as log:
                assert log._run.project == "whales" and log._run.name == "out"
                train(log, first, last)
                ids.append(log._run.id)
                log.on_end(SUMMARY)
    assert ids[0] == ids[1] == (config.output_dir / "wandb_id.txt").read_text().strip()
    assert len(list((config.output_dir / "wandb").glob("offline-run-*"))) >= 1
