"""Requested loggers are created, repeated steps are not logged twice, and a failing logger does not end a run."""

from __future__ import annotations

import dataclasses
import importlib.util
import json
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
from accelerate.tracking import LOGGER_TYPE_TO_CLASS, GeneralTracker

from megatrain.base.observer import CheckpointMetrics, EvaluationMetrics, RunSummary, StepMetrics
from megatrain.config import ConfigError, config_from_toml, load_config, to_toml
from megatrain.config.schema import RunConfig
from megatrain.run import loggers
from megatrain.run.loggers import TrackerLog, check_loggers, make_loggers
from megatrain.training.resolve import resolve_logging
from tiered.errors import install_command

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


def test_default_logger_is_jsonl_and_none_disables_loggers(make_config: Any) -> None:
    assert make_config().logging.report_to == ("jsonl",)
    assert make_loggers(resolve_logging(make_config('report_to = "none"')), None) == []
    assert make_loggers(resolve_logging(make_config("report_to = []")), None) == []


def test_unknown_report_to_is_refused(make_config: Any) -> None:
    with pytest.raises(ConfigError, match=r"logging\.report_to"):
        make_config('report_to = ["jsonl", "visdom"]')


def test_missing_loggers_are_reported_before_the_start(make_config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    config = make_config('report_to = ["jsonl", "tensorboard", "wandb"]')
    with pytest.raises(ConfigError) as caught:
        check_loggers(resolve_logging(config))
    assert [str(problem) for problem in caught.value.problems] == [
        f'logging.report_to names "{name}"; not installed: {name}, accelerate. Install it: {install_command(name)}, '
        "or leave it out"
        for name in ("tensorboard", "wandb")
    ]
    with pytest.raises(ConfigError):
        make_loggers(resolve_logging(config), None)
    assert not (config.output_dir / "metrics.jsonl").exists()
    check_loggers(resolve_logging(make_config()))


def test_json_lines_continue_at_the_resumed_step(make_config: Any) -> None:
    config = make_config()
    for continued_from, first, last in ((None, 1, 5), (3, 4, 6)):
        [log] = make_loggers(resolve_logging(config), continued_from)
        with log:
            train(log, first, last)
            log.on_end(SUMMARY)
    lines = [json.loads(line) for line in (config.output_dir / "metrics.jsonl").read_text().splitlines()]
    assert [line["step"] for line in lines if "loss" in line and "event" not in line] == [1, 2, 3, 4, 5, 6]
    assert [line["step"] for line in lines if line.get("event") == "evaluation"] == [6]


class Recorder(GeneralTracker):
    """Tracker that records its calls, in place of a tracker whose package is not installed."""

    name, requires_logging_directory = "recorder", False
    runs: ClassVar[list[Recorder]] = []

    def __init__(self, **arguments: Any) -> None:
        super().__init__()
        self.arguments, self.config, self.steps, self.is_over = arguments, None, [], False

    @property
    def tracker(self) -> Any:
        return self

    def start(self) -> None:
        self.info = SimpleNamespace(run_id=self.arguments["run_id"] or f"made-{len(self.runs)}")
        self.runs.append(self)

    def store_init_configuration(self, values: dict[str, Any]) -> None:
        self.config = values

    def log(self, values: dict[str, Any], step: int | None = None, **more: Any) -> None:
        self.steps.append((next(iter(values), ""), step))

    def finish(self) -> None:
        self.is_over = True


@pytest.fixture
def recorder(monkeypatch: pytest.MonkeyPatch) -> type[Recorder]:
    """Replace MLflow's tracker with ``Recorder``, which makes run ids and keeps every point. Return the class."""
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    monkeypatch.setitem(LOGGER_TYPE_TO_CLASS, "mlflow", Recorder)
    about = dataclasses.replace(loggers._TRACKERS["mlflow"], finish=lambda tracker, summary: tracker.finish())
    monkeypatch.setitem(loggers._TRACKERS, "mlflow", about)
    monkeypatch.setattr(Recorder, "runs", [])
    return Recorder


def test_a_tracker_that_fails_is_reported_and_given_up(
    make_config: Any, recorder: type[Recorder], monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(self: Recorder, values: dict[str, Any], **more: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(recorder, "log", fail)
    notices: list[str] = []
    with make_loggers(resolve_logging(make_config('report_to = "mlflow"')), None, notices.append)[0] as log:
        train(log, 1, 3)
        log.on_end(SUMMARY)
    assert notices == ["no more figures for mlflow: OSError: [Errno 28] No space left on device. The run continues"]
    assert not recorder.runs[0].is_over
    monkeypatch.setattr(recorder, "start", fail)
    with make_loggers(resolve_logging(make_config('report_to = "mlflow"')), None, notices.append)[0] as log:
        train(log, 1, 3)
    assert len(notices) == 2


def test_resumed_run_continues_its_tracker_run_without_duplicates(make_config: Any, recorder: type[Recorder]) -> None:
    config = make_config('report_to = ["mlflow"]\nproject = "whales"')
    for continued_from, first, last in ((None, 1, 5), (3, 4, 6), (None, 1, 2)):
        with make_loggers(resolve_logging(config), continued_from)[0] as log:
            train(log, first, last)
    one, continued, anew = recorder.runs
    assert one.arguments == {"experiment_name": "whales", "run_name": "out", "run_id": None}
    assert (continued.arguments["run_id"], anew.arguments["run_id"]) == ("made-0", None)
    assert one.config["data.max_length"] == 1024 and continued.config is None, "its parameters already exist"
    assert [step for name, step in one.steps if name == "train/loss"] == [1, 2, 3, 4, 5]
    assert continued.steps == [("train/loss", 6), ("eval/held_loss", 6), ("checkpoint/GiB", 6)]
    assert [step for name, step in anew.steps if name == "train/loss"] == [1, 2]
    assert all(run.is_over for run in recorder.runs)


def test_nonfinite_figures_are_omitted(make_config: Any, recorder: type[Recorder]) -> None:
    with make_loggers(resolve_logging(make_config('report_to = "mlflow"')), None)[0] as log:
        log.on_step(step(1, float("nan")))
    assert recorder.runs[0].steps == [("train/grad_norm", 1)]


def test_resumed_tensorboard_curves_have_no_duplicates(make_config: Any) -> None:
    pytest.importorskip("tensorboard", reason="the tensorboard extra is not installed")
    config = make_config('report_to = ["tensorboard"]')
    with warnings.catch_warnings():  # tensorboard uses deprecated features of numpy and protobuf
        warnings.simplefilter("ignore")
        for continued_from, first, last, loss in ((None, 1, 5, 3.0), (3, 4, 6, 2.0)):
            with tracker("tensorboard", config, continued_from) as log:
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
        with tracker("tensorboard", config, None) as log:  # a run that starts over in the same folder
            train(log, 1, 1, 9.0)
        events = EventAccumulator(str(config.output_dir / "tensorboard"))
        events.Reload()
        assert [(point.step, point.value) for point in events.Scalars("train/loss")] == [(1, 9.0)]


def test_curves_show_all_metrics() -> None:
    shown = dataclasses.replace(
        step(3), preferences={"rewards/margins": 2.0}, tier_used_bytes={"ram": 1 << 30, "nvme": 3 << 29},
        stall_s={"fill": 0.25, "io": 0.5}, written_bytes={"/d": 10**9, "/e": 2 * 10**9}, rss_bytes=3 << 30,
    )  # fmt: skip
    plain = {
        "train/loss": 1.5, "train/grad_norm": 0.5, "train/learning_rate": 1e-5, "train/epoch": 0.1,
        "speed/tokens_per_s": 200.0, "speed/trained_tokens_per_s": 100.0, "speed/step_s": 0.5,
        "memory/process_GiB": 3.0,
    }  # fmt: skip
    assert loggers.step_scalars(shown) == {
        **plain, "speed/model_TFLOPs": 2.0, "speed/hardware_TFLOPs": 4.0, "memory/ram_GiB": 1.0, "memory/nvme_GiB": 1.5,
        "train/rewards/margins": 2.0, "wait/fill_s": 0.25, "wait/io_s": 0.5, "drives/written_GB": 3.0,
    }  # fmt: skip
    none: dict[str, Any] = {key: {} for key in ("preferences", "tier_used_bytes", "stall_s", "written_bytes")}
    assert loggers.step_scalars(dataclasses.replace(shown, hardware_flops=0, **none)) == plain
    evaluation = EvaluationMetrics(2, 6, "held", 0.0, 10, 0.5)
    assert loggers.evaluation_scalars(evaluation) == {"eval/held_loss": 0.0, "eval/held_perplexity": 1.0}
    assert loggers.evaluation_scalars(dataclasses.replace(evaluation, preferences={"kl": 2.0})) == {
        "eval/held_loss": 0.0, "eval/held_kl": 2.0,
    }  # fmt: skip
    assert loggers.checkpoint_scalars(CheckpointMetrics(2, Path("out"), 3 << 29, 1, 2, 3.0, 0.5)) == {
        "checkpoint/GiB": 1.5, "checkpoint/seconds": 3.0, "checkpoint/stall_s": 0.5,
    }  # fmt: skip


def test_each_tracker_is_told_the_name_and_the_place_of_the_run(make_config: Any) -> None:
    spec = resolve_logging(make_config('project = "whales"'))
    spec = dataclasses.replace(spec, values={"seed": 7, "a": {"b": [1], "c": {"d": True}}})
    start = loggers._TrackerStart(spec, "id1", False, 4)
    out, nested, flat = str(spec.output_dir), spec.values, {"seed": 7, "a.b": "[1]", "a.c.d": True}
    assert {name: settings.arguments(start) for name, settings in loggers._TRACKERS.items()} == {
        "tensorboard": {"run_name": "tensorboard", "logging_dir": out, "purge_step": 4},
        "wandb": {
            "run_name": "whales", "name": "out", "dir": out, "id": "id1", "resume": "allow", "config": nested,
        },
        "mlflow": {"experiment_name": "whales", "run_name": "out", "run_id": "id1"},
        "swanlab": {
            "run_name": "whales", "name": "out", "log_dir": f"{out}/swanlab", "id": "id1", "resume": "allow",
            "config": nested,
        },
        "trackio": {"run_name": "whales", "name": "out-id1", "resume": "allow", "config": flat},
        "comet_ml": {"run_name": "whales", "experiment_key": "id1", "mode": "get_or_create"},
    }  # fmt: skip
    made = {name: settings.make_id and settings.make_id() for name, settings in loggers._TRACKERS.items()}
    assert {name: made_id and len(made_id) for name, made_id in made.items()} == {
        "tensorboard": 32, "wandb": 12, "mlflow": None, "swanlab": 32, "trackio": 6, "comet_ml": 32,
    }  # fmt: skip
    facts = {name: (settings.stores_duplicates, settings.accepts_nan) for name, settings in loggers._TRACKERS.items()}
    assert facts == {
        "tensorboard": (False, True), "wandb": (False, False), "mlflow": (True, False), "swanlab": (True, False),
        "trackio": (True, False), "comet_ml": (True, False),
    }  # fmt: skip


def test_wandb_and_comet_are_told_what_only_they_need(make_config: Any) -> None:
    calls: list[Any] = []
    tracker = SimpleNamespace(
        tracker=SimpleNamespace(
            summary=SimpleNamespace(update=calls.append), set_name=calls.append,
            finish=lambda exit_code: calls.append(exit_code),
        ),
        store_init_configuration=calls.append,
    )  # fmt: skip
    finish = loggers._TRACKERS["wandb"].finish
    finish(tracker, dataclasses.replace(SUMMARY, interrupted=True))
    finish(tracker, None)
    assert calls == [{"interrupted": True, "num_steps": 6}, 0, 1]
    calls.clear()
    spec = dataclasses.replace(resolve_logging(make_config()), values={"seed": 7})
    for is_new in (True, False):
        loggers._TRACKERS["comet_ml"].on_start(tracker, loggers._TrackerStart(spec, "id1", is_new, 0))
    assert calls == ["out", {"seed": 7}, "out"]


def tracker(name: str, config: RunConfig, continued_from: int | None) -> TrackerLog:
    return TrackerLog(name, resolve_logging(config), continued_from, lambda text: pytest.fail(text))


def test_wandb_offline(make_config: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb", reason="the wandb extra is not installed")
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("WANDB_SILENT", "true")
    config = make_config('report_to = ["wandb"]\nproject = "whales"')
    ids = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for continued_from, first, last in ((None, 1, 3), (3, 4, 6)):
            with tracker("wandb", config, continued_from) as log:
                run = log._tracker.tracker
                assert run.project == "whales" and run.name == "out"
                train(log, first, last)
                ids.append(run.id)
                log.on_end(SUMMARY)
    assert ids[0] == ids[1] == json.loads((config.output_dir / "trackers.json").read_text())["wandb"]["id"]
    assert len(list((config.output_dir / "wandb").glob("offline-run-*"))) >= 1


def test_mlflow_in_a_file(make_config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow", reason="the mlflow extra is not installed")
    monkeypatch.chdir(tmp_path)
    config = make_config('report_to = ["mlflow"]\nproject = "whales"')
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
        for continued_from, first, last in ((None, 1, 5), (3, 4, 6)):
            with tracker("mlflow", config, continued_from) as log:
                train(log, first, last)
                if last == 6:
                    log.on_end(SUMMARY)
        client = mlflow.MlflowClient()
        (run,) = client.search_runs([client.get_experiment_by_name("whales").experiment_id])
        points = client.get_metric_history(run.info.run_id, "train/loss")
    assert (run.info.run_name, run.info.status, run.data.params["data.max_length"]) == ("out", "FINISHED", "1024")
    assert sorted(point.step for point in points) == [1, 2, 3, 4, 5, 6]


def test_trackio_in_a_folder(make_config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("trackio", reason="the trackio extra is not installed")
    config = make_config('report_to = ["trackio"]\nproject = "whales"')
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from trackio import utils
        from trackio.sqlite_storage import SQLiteStorage

        for module in (utils, sys.modules["trackio.sqlite_storage"]):
            monkeypatch.setattr(module, "TRACKIO_DIR", tmp_path / "trackio")
        for continued_from, first, last in ((None, 1, 5), (3, 4, 6)):
            with tracker("trackio", config, continued_from) as log:
                train(log, first, last)
                log.on_end(SUMMARY)
        (name,) = SQLiteStorage.get_runs("whales")
        logs = SQLiteStorage.get_logs("whales", name)
    assert name.startswith("out-")
    assert [each["step"] for each in logs if "train/loss" in each] == [1, 2, 3, 4, 5, 6]
