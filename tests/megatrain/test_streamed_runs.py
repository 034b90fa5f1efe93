"""Streamed runs are bit-identical after any interruption and on any number of processes."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from fakes.s3_server import s3_server
from oracles import shards
from processes.rank_runs import launch
from processes.saved_run import SavedRun, make_run

TWO_SOURCES = """[[data.train]]
path = "{where}/shards-a"
weight = 2.0
weight_from_step = {{ 3 = 0.5 }}
[[data.train]]
path = "{where}/shards-b"
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> SavedRun:
    """Return a run folder with a model, shards of two sources, and the result of six uninterrupted steps."""
    run = make_run(tmp_path_factory.mktemp("model") / "w")
    words = (run.folder / "data.txt").read_text().split()
    rows = [{"text": " ".join(words[start : start + 15])} for start in range(0, 400, 5)]
    for name, kind, part in (("a", "zst", rows[::2]), ("b", "parquet", rows[1::2])):
        folder = run.folder / f"shards-{name}"
        folder.mkdir()
        shards.WRITERS[kind](folder, [part[start : start + 7] for start in range(0, len(part), 7)])
    result = run.call("run", streamed(run, out="undisturbed"))
    assert result.exit_code == 0, result.output
    assert "streamed during the run: 6 shards" in result.output
    return run


@pytest.fixture
def run(model: SavedRun, tmp_path: Path) -> SavedRun:
    return model.copy(tmp_path / "w")


def streamed(run: SavedRun, *, where: str = ".", data: str = "streaming = true", **config: Any) -> Path:
    path = run.write_config(**config)
    text = path.read_text()
    text = text.replace("[data]\n", f"[data]\n{data}\n")
    text = text.replace('[[data.train]]\npath = "data.txt"\n', TWO_SOURCES.format(where=where))
    two = "per_device_train_batch_size = 1\ngradient_accumulation_steps = 2\n"
    path.write_text(text.replace("per_device_train_batch_size = 2\n", two))
    return path


def weights(run: SavedRun, out: str = "out") -> bytes:
    return (run.folder / out / "final/model.safetensors").read_bytes()


@pytest.mark.parametrize("steps", [5, pytest.param(3, marks=pytest.mark.slow)])
def test_streamed_run_resumes_from_its_cursor(run: SavedRun, steps: int) -> None:
    """The run stops at a step without a regular save. A change of the run's length does not change the data."""
    assert run.call("run", streamed(run, steps=steps)).exit_code == 0
    result = run.call("run", streamed(run), "--allow-config-change")
    assert result.exit_code == 0, result.output
    assert f"continuing after step {steps} of 6" in result.output
    assert weights(run) == weights(run, "undisturbed")


def test_mixing_schedule_may_change_on_resume(run: SavedRun) -> None:
    """A new schedule counts as different data and must be allowed. The run then continues after its last step."""
    assert run.call("run", streamed(run, steps=2)).exit_code == 0
    path = streamed(run, steps=4)
    path.write_text(path.read_text().replace("{ 3 = 0.5 }", "{ 3 = 0.0 }"))
    result = run.call("run", path)
    assert result.exit_code == 2 and "[[data.train]] differ" in " ".join(result.output.split()), result.output
    (run.folder / "shards-a" / "part-000.jsonl.zst").unlink()
    both = " ".join(run.call("run", path, "--set", "learning_rate=5e-4").output.split())
    assert "learning_rate: 0.001 -> 0.0005" in both and "data.train.0.weight_from_step.3: 0.5 -> 0.0" in both, both
    assert "data.train.0: the names or sizes of the shards have changed" in both and "data.train.1" not in both, both
    result = run.call("run", path, "--allow-config-change")
    assert result.exit_code == 0 and "continuing after step 2 of 4" in result.output


def test_check_and_data_commands_handle_streams(run: SavedRun) -> None:
    """``check`` lists shards, ``data preview`` reads the first rows, ``data stats`` explains why it cannot count."""
    path = streamed(run)
    result = run.call("check", path)
    assert result.exit_code == 0, result.output
    assert "streamed during the run: 6 shards" in result.output
    result = run.call("data", "preview", path)
    assert result.exit_code == 0 and "shards-a/part-000.jsonl.zst line 1" in result.output.replace("\n", ""), (
        result.output
    )
    result = run.call("data", "stats", path)
    assert result.exit_code == 4 and "need a pass over all data" in result.output, result.output


def test_streamed_run_evaluates_ordinary_sets(run: SavedRun) -> None:
    path = streamed(run, steps=2)
    path.write_text(
        path.read_text() + '[[data.eval]]\npath = "data.txt"\n[evaluation]\neval_strategy = "steps"\neval_steps = 1\n'
    )
    result = run.call("run", path)
    assert result.exit_code == 0, result.output
    rows = [json.loads(line) for line in (run.out / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if row.get("event") == "evaluation"] == [1, 2]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("max_steps = 6\n", ""), "Write max_steps = 1000"),
        (("save_steps = 2", 'save_strategy = "epoch"'), 'save_strategy = "epoch", but data.streaming has no epochs'),
        (("streaming = true", "streaming = true\nval_size = 0.1"), "which streams do not know in advance"),
        (("streaming = true\n", ""), "weight_from_step changes weights during the run"),
        (("./shards-a", "s3://bucket/shards"), None),
        (("./shards-a", "sftp://me:hunter2@host/shards"), 'path = "sftp://***@host/shards" contains a password'),
        (("./shards-a", "s3://me:hun/hunter2@host/shards"), 'path = "s3://***@host/shards" contains a password'),
        (
            ("./shards-a", "https://host/a.parquet?sig=hunter2"),
            'path = "https://host/a.parquet?***" contains a password',
        ),
        (("weight = 2.0", "weight = 2.0\nmax_samples = 5"), "max_samples cannot be used with data.streaming"),
        (("{ 3 = 0.5 }", "{ soon = 0.5 }"), "is not a weight schedule"),
        (("{ 3 = 0.5 }", "{ 3 = -0.5 }"), "is not a weight schedule"),
        (('shards-b"', 'shards-b"\nweight_from_step = { 4 = 0 }'), None),
        (("./shards-b", "./shards-c"), "there is no such file or folder"),
    ],
)
def test_incompatible_stream_settings_are_refused(run: SavedRun, change: tuple[str, str], said: str | None) -> None:
    path = streamed(run)
    text = path.read_text()
    assert change[0] in text
    text = text.replace(*change)
    if said is None and "s3:" in change[1]:
        text, said = text.replace("streaming = true", ""), "is a URL, which can only be read during the run"
    elif said is None:
        text, said = text.replace("{ 3 = 0.5 }", "{ 3 = 0 }"), "from step 4 on all weights are 0"
    path.write_text(text)
    result = run.call("run", path)
    code = 4 if "shards-c" in change[1] else 2  # like other missing data
    assert result.exit_code == code and "Traceback" not in result.output, result.output
    assert said in " ".join(result.output.split()) and "hunter2" not in result.output, result.output


@pytest.mark.slow
def test_s3_run_resumes_with_other_ranks_and_no_local_files(run: SavedRun, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two processes read shards from S3 and upload checkpoints. One process without local files resumes exactly."""
    with s3_server() as s3:
        for name in ("shards-a", "shards-b"):
            s3.files().put(str(run.folder / name), f"bucket/{name}", recursive=True)
            shutil.rmtree(run.folder / name)
        config = {"where": "s3://bucket", "checkpoint": 'save_copy = "s3://bucket/run"'}
        ended = launch(2, streamed(run, steps=3, **config))
        assert ended.codes == [0], ended.err
        shutil.rmtree(run.out)
        result = run.call("run", streamed(run, **config), "--allow-config-change")
        assert result.exit_code == 0, result.output
        assert "continuing after step 3 of 6" in result.output
        ended = launch(2, streamed(run, out="whole", where="s3://bucket"))
        assert ended.codes == [0], ended.err
    assert weights(run) == weights(run, "whole")
