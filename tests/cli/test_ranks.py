"""``run`` with several processes: messages, results, checkpoints, stops and failures."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from click.testing import CliRunner

from megatrain.ranks.world import rank_folder_name
from processes.rank_runs import (
    launch,
    launched,
    launched_with,
    read_until,
    run_ranks,
    start_runs,
    wait_until,
)
from processes.ranked_command import INSTANTS
from processes.ranks import ADDRESS, LIMIT_S, MEETING, Ended, environment
from processes.saved_run import QUICKSTART, ROOT, SavedRun, command_group, make_run

HOST = socket.gethostname()


def options(*keys: str) -> list[str]:
    return [word for key in keys for word in ("--set", key)]


#: Four micro-batches per step, so each of up to four ranks has at least one.
BATCH = ("training.gradient_accumulation_steps=4",)
OPTIONS = options(*BATCH, "checkpoint.save_strategy=no", "checkpoint.save_on_signal=false")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> SavedRun:
    return make_run(tmp_path_factory.mktemp("made"))


def other_config(run: SavedRun, path: Path, before: str, after: str) -> Path:
    """Write the run's config to ``path``, with ``before`` replaced by ``after``. Return the path."""
    text = run.write_config().read_text()
    assert before in text
    path.write_text(text.replace(before, after))
    return path


def test_differing_model_config_or_data_of_ranks_is_reported(made: SavedRun, tmp_path: Path) -> None:
    """Each difference gives one message, and nothing is written. If only one rank is wrong, the message names it."""
    config = made.write_config()
    elsewhere = other_config(made, made.folder / "elsewhere.toml", '"model"', '"nowhere"')
    ended = run_ranks([config, elsewhere], *OPTIONS)
    assert ended.codes == [2, 2], ended.err
    (told,) = ended.errors
    assert told.startswith(f"error: rank 1 (on {HOST}): ") and "nowhere" in told
    longer = other_config(made, made.folder / "longer.toml", "max_steps = 6", "max_steps = 7")
    ended = run_ranks([config, longer], *OPTIONS)
    assert ended.codes == [2, 2], ended.err
    (told,) = ended.errors
    assert told.startswith(
        "error: the ranks do not have the same config: training.max_steps is 6 on rank 0, but 7 on rank 1."
    )
    # Both ranks have the same path, but it leads to different files.
    (tmp_path / "data.txt").write_text((made.folder / "data.txt").read_text()[5:])
    here = options("data.train.0.path=/proc/self/cwd/data.txt")
    ended = run_ranks([config, config], *OPTIONS, *here, folders=[made.folder, tmp_path])
    assert ended.codes == [2, 2], ended.err
    (told,) = ended.errors
    assert told.startswith("error: the ranks do not have the same data: the fingerprint of the rows is "), told
    assert not made.out.exists()


def test_a_dry_run_plans_for_the_processes(made: SavedRun) -> None:
    result = CliRunner().invoke(
        command_group(), ["run", str(made.write_config()), "--dry-run", "--processes", "2", *OPTIONS]
    )
    assert result.exit_code == 0, result.output
    assert "this is one of 2 processes" in result.output and "ram->ranks" in result.output
    assert not made.out.exists()
    words = ["run", str(made.write_config()), "--dry-run", "--processes", "16", *OPTIONS]
    result = CliRunner().invoke(command_group(), words)
    assert result.exit_code == 2 and "with 16 processes each needs a micro-batch" in result.output
    checked = made.call("check", made.write_config(), "--skip-weights", "--set", "processes=16", *OPTIONS)
    assert checked.exit_code == 2 and "with 16 processes each needs a micro-batch" in " ".join(checked.output.split())


def write_token_batch_config(made: SavedRun, tokens: int, **config: Any) -> Path:
    """Write a config with the batch size in tokens instead of the micro-batch size, and return its path."""
    path = made.write_config(**config)
    text = path.read_text().replace("per_device_train_batch_size = 2", f"train_batch_tokens = {tokens}")
    path.write_text(text)
    return path


def test_token_batch_is_split_into_gradient_lanes(made: SavedRun, tmp_path: Path) -> None:
    """Four rows would fit into one micro-batch, but three lanes need three. Results are equal for any world size."""
    found = []
    for size in (1, 3):
        run = made.copy(tmp_path / str(size))
        ended = launch(size, write_token_batch_config(run, 4 * 32, steps=2), *options("training.gradient_lanes=3"))
        assert ended.codes == [0], ended.err
        losses, weights, *_ = read_run(run)
        found.append((losses, weights))
    assert found[0] == found[1]
    words = ["run", write_token_batch_config(made, 4 * 32), "--dry-run", "--processes"]
    assert made.call(*words, "3").exit_code == 0
    refused = made.call(*words, "8")
    assert refused.exit_code == 2
    assert "Write train_batch_tokens = 256, or start at most 4 processes" in refused.output
    assert made.call(*words, "8", *options("train_batch_tokens=256", "tiers.ram.size=1GiB")).exit_code == 0
    assert made.call(*words, "4").exit_code == 0
    # With two micro-batches, three processes are refused. Two processes are accepted, as the message says.
    words = ["run", write_token_batch_config(made, 2 * 32), "--dry-run", "--processes"]
    assert "or start at most 2 processes" in made.call(*words, "3").output
    assert made.call(*words, "2").exit_code == 0


def test_errors_of_all_ranks_are_reported_once(made: SavedRun) -> None:
    ended = launch(2, made.write_config(), *OPTIONS, "--set", "tiers.ram.size=1MiB")
    assert ended.codes == [3] and len(ended.errors) == 1, ended.err
    assert ended.errors[0].startswith("error: does not fit: tier 'ram'")
    need, in_all = (int(number) for number in re.findall(r"at least (\d+) .* processes, (\d+) ", ended.errors[0])[0])
    assert in_all == 2 * need  # tiers.ram.size is the size for all processes together


def test_externally_started_ranks_must_match_the_config(made: SavedRun) -> None:
    ended = run_ranks([made.write_config()] * 2, "--processes", "3")
    assert ended.codes == [2, 2], ended.err
    (told,) = ended.errors
    assert "distributed.processes = 3, but 2 processes were started on this machine" in told


def test_each_rank_selects_its_gpu_before_the_first_query(made: SavedRun, tmp_path: Path) -> None:
    """CUDA reads CUDA_VISIBLE_DEVICES at the first query, even by ``is_available``. Later changes have no effect."""
    files = [tmp_path / f"asked{rank}" for rank in range(2)]
    happens = ";".join(f"{rank}:asks:{file}" for rank, file in enumerate(files))
    config = made.copy(tmp_path / "run").write_config()
    with launched_with(2, tmp_path, happens, config, *OPTIONS, *options("device=auto")) as process:
        ended = Ended([], *process.communicate(timeout=LIMIT_S))
    assert process.returncode == 0, ended.err
    assert [set(file.read_text().split()) for file in files] == [{"0"}, {"1"}]


DRIVES = ("tiers.nvme.0.size=80MiB", "tiers.ram.size=24MiB", "placement.weights=nvme", "placement.optimizer=nvme")


def read_run(run: SavedRun) -> tuple[list[tuple[float, float]], bytes, list[dict[str, Any]], dict[str, Any]]:
    """Return the losses and gradient norms, the exported weights, the metrics of the steps, and the plan of rank 0."""
    lines = [json.loads(line) for line in (run.out / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "grad_norm" in line]
    weights = (run.out / "final/model.safetensors").read_bytes()
    return (
        [(step["loss"], step["grad_norm"]) for step in steps],
        weights,
        steps,
        json.loads((run.out / "plan.json").read_text()),
    )


@pytest.mark.slow  # tests/parity/test_ranks.py has the same test without the command
@pytest.mark.parametrize(
    ("sizes", "places"),
    [((1, 2, 3, 4), ()), ((1, 2, 3, 4), DRIVES)],
    ids=["ram", "drives"],
)
def test_runs_are_bitwise_equal_for_any_world_size(
    made: SavedRun, tmp_path: Path, sizes: Sequence[int], places: Sequence[str]
) -> None:
    """Losses, gradient norms and exported weights match. The traffic within and between ranks is as planned."""
    found: dict[int, tuple[list[tuple[float, float]], bytes]] = {}
    for size in sizes:
        run = made.copy(tmp_path / str(size))
        keys = ["training.gradient_lanes=4", *places, *([f"tiers.nvme.0.path={run.folder}/drive"] if places else [])]
        ended = launch(size, run.write_config(), *OPTIONS, *(word for key in keys for word in ("--set", key)))
        assert ended.codes == [0], ended.err
        *bits, steps, plan = read_run(run)
        found[size] = bits[0], bits[1]
        assert len(steps) == 6
        for step in steps if size > 1 else ():
            assert [rank["is_paused"] for rank in step["ranks"]] == [False] * size
        if size == 1:
            assert "ranks" not in steps[0]
        status = json.loads((run.out / "status.json").read_text())
        assert status["state"] == "done" and status["exit_code"] == 0
        between = {link: nbytes for link, nbytes in plan["link_bytes_per_step"].items() if "ranks" in link}
        assert bool(between) == (size > 1) == bool(between.get("ram->ranks"))
        for step in steps:
            for rank in step.get("ranks", ()):
                assert {link: rank["link_bytes"][link] for link in between} == between
        assert steps[3]["link_bytes"] == plan["link_bytes_per_step"]
        if places:
            assert plan["link_bytes_per_step"]["nvme->ram"]
            folders = {path.name for path in (run.folder / "drive").glob("rank*")}
            assert folders == ({rank_folder_name(rank) for rank in range(size)} if size > 1 else set())
    assert all(each == found[sizes[0]] for each in found.values())


def test_preference_runs_on_ranks_match_one_process_bitwise(made: SavedRun, tmp_path: Path) -> None:
    """Reference log-probabilities, losses, preference metrics, evaluations and exported weights match."""
    keys = (
        "training.gradient_lanes=4",
        "task=dpo",
        f"data.train.0.path={QUICKSTART / 'preferences.jsonl'}",
        "data.val_size=6",
        "data.packing=false",
        "data.max_length=64",
        "data.cache_dir=none",
        "training.per_device_train_batch_size=1",
        "evaluation.eval_steps=2",
    )
    found = []
    for size in (1, 2):
        run = made.copy(tmp_path / str(size))
        ended = launch(size, run.write_config(steps=3), *OPTIONS, *options(*keys))
        assert ended.codes == [0], ended.err
        lines = [json.loads(line) for line in (run.out / "metrics.jsonl").read_text().splitlines()]
        figures = [(line["loss"], line.get("grad_norm"), line["preferences"]) for line in lines]
        assert len(figures) == 5 and all(each for *_, each in figures)
        (asked,) = (run.out / "reference").iterdir()
        found.append(
            (figures, asked.read_bytes().partition(b"\n")[2], (run.out / "final/model.safetensors").read_bytes())
        )
    assert found[0] == found[1]


@pytest.mark.slow
def test_logged_samples_and_averages_match_one_process(made: SavedRun, tmp_path: Path) -> None:
    (made.folder / "held_out.jsonl").write_text("".join(f'{{"text": "Call me Ishmael {n}."}}\n' for n in range(5)))
    keys = [f"data.eval.0.path={made.folder / 'held_out.jsonl'}", "predict_with_generate=true", "max_new_tokens=3"]
    keys += ["evaluation.weights=both", "optimizer.ema_decay=0.5", "gradient_lanes=4", "eval_steps=2"]
    found = []
    for size in (1, 2):
        run = made.copy(tmp_path / str(size))
        ended = launch(size, run.write_config(steps=3), *OPTIONS, *options(*keys))
        assert ended.codes == [0], ended.err
        lines = [json.loads(line) for line in (run.out / "metrics.jsonl").read_text().splitlines()]
        found.append([(x["name"], x["loss"], x["samples"]) for x in lines if x.get("event") == "evaluation"])
    assert [name for name, *_ in found[0]] == 2 * ["held_out", "held_out_average"]
    assert found[0] == found[1] and all(each for *_, each in found[0])


# -- checkpoints ---------------------------------------------------------------------------------------------------

SAVED = (*BATCH, "training.gradient_lanes=4")


def go_on(run: SavedRun, size: int, steps: int, *keys: str) -> None:
    """Resume the run from its current state, with ``size`` processes, until it has done ``steps`` steps."""
    ended = launch(size, run.write_config(steps=steps), *options(*SAVED, *keys))
    assert ended.codes == [0], ended.err


def has_steps(run: SavedRun) -> bool:
    metrics = run.out / "metrics.jsonl"
    return metrics.exists() and b"grad_norm" in metrics.read_bytes()


@pytest.mark.parametrize("way", ["launcher", "srun"])
def test_ranks_of_one_machine_listen_on_the_loopback_alone(
    way: str, made: SavedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With any launcher, neither the rendezvous store nor the process group accepts connections from the network."""
    run = made.copy(tmp_path / "run")
    config = run.write_config(steps=400)
    monkeypatch.setitem(MEETING, ADDRESS, "localhost")
    started = start_runs([config] * 2, *OPTIONS) if way == "srun" else []
    with contextlib.ExitStack() as stack:
        for process in started:
            stack.callback(process.communicate)
            stack.callback(process.kill)
        if not started:
            started = [stack.enter_context(launched(2, config, *OPTIONS))]
        wait_until(partial(has_steps, run), started[0])
        family = [each for process in started for each in (psutil.Process(process.pid), *children(process.pid))]
        connections = [each for process in family for each in process.net_connections("inet")]
    listening = [each.laddr.ip.removeprefix("::ffff:") for each in connections if each.status == psutil.CONN_LISTEN]
    assert len(listening) >= 3  # the rendezvous store, and gloo on each rank
    assert set(listening) == {"127.0.0.1"}, connections


def children(pid: int) -> list[psutil.Process]:
    return psutil.Process(pid).children(recursive=True)


@pytest.mark.slow
@pytest.mark.parametrize("home", ["ram", "nvme"])
def test_all_ranks_skip_a_checkpoint_damaged_on_one(home: str, made: SavedRun, tmp_path: Path) -> None:
    run = made.copy(tmp_path / "run")
    places = () if home == "ram" else (*DRIVES, f"tiers.nvme.0.path={run.folder}/drive")
    go_on(run, 2, 4, *places)
    folder = max(
        ((run.out / "checkpoints" if home == "ram" else run.folder / "drive") / rank_folder_name(1) / "snap").glob("0*")
    )
    file = next(path for path in sorted(folder.rglob("c/0")) if "weight" in str(path))
    content = bytearray(file.read_bytes())
    content[5] ^= 1
    file.unlink()
    file.write_bytes(content)
    verified = run.call("ckpt", "verify", run.out)
    assert verified.exit_code == 1 and "rank 1" in verified.output
    ended = launch(2, run.write_config(steps=6), *options(*SAVED, *places))
    assert ended.codes == [0], ended.err
    said = ended.out + ended.err
    assert "the checkpoint of step 4" in said and "cannot be used" in said and "continuing after step 2 of 6" in said
    assert run.call("ckpt", "verify", run.out).exit_code == 0
    assert_matches_uninterrupted_run(run, made.copy(tmp_path / "fresh"), 6)


def grows(file: Path, size: int) -> bool:
    return file.exists() and file.stat().st_size > size


def saved_step(run: SavedRun) -> int | None:
    """Return the step of the newest checkpoint, as ``ckpt ls`` lists it."""
    listed = run.call("ckpt", "ls", run.out, "--json")
    found = json.loads(listed.output)["checkpoints"] if listed.exit_code == 0 else []
    return next((each["step"] for each in found if each["is_newest"]), None)


BEST = """[[data.eval]]
path = "data.txt"
max_samples = 9
[evaluation]
eval_steps = 2
metric_for_best_model = "eval_loss"
greater_is_better = true
"""  # the first evaluation has the largest loss, so it counts as the best


def read_evaluations(run: SavedRun) -> list[tuple[int, float, int]]:
    lines = [json.loads(line) for line in (run.out / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["loss"], line["num_tokens"]) for line in lines if line.get("event") == "evaluation"]


@pytest.mark.slow
@pytest.mark.parametrize("worlds", [(2, 1), (1, 2, 3)])
def test_early_stopping_and_best_checkpoint_apply_to_all_ranks(
    made: SavedRun, tmp_path: Path, worlds: Sequence[int]
) -> None:
    """Evaluations match a run with one process, stop the run early, and choose the checkpoint to export."""
    run, fresh = made.copy(tmp_path / "run"), made.copy(tmp_path / "fresh")
    keys = options(*SAVED, "checkpoint.load_best_model_at_end=true", "checkpoint.save_total_limit=2")
    patience, steps = 2, 6
    for size in worlds:
        # The patience of each start is two evaluations longer than before, so the run continues and stops early again.
        given = [*keys, *options(f"evaluation.early_stopping_patience={patience}")]
        ended = launch(size, run.write_config(steps=20, more=BEST), *given)
        said = " ".join((ended.out + ended.err).split())
        assert ended.codes == [0] and f"stopping early: {patience} evaluations in a row" in said, ended.err
        assert "exporting the model of step 2, the best one" in said, said
        listed = json.loads(run.call("ckpt", "ls", run.out, "--json").output)["checkpoints"]
        assert sorted(each["step"] for each in listed) == [2, steps - 2, steps]
        assert run.call("ckpt", "verify", run.out).exit_code == 0
        if size > 1:
            again = launch(size, run.write_config(steps=20, more=BEST), *given)
            assert again.codes == [0] and "nothing to do" in again.err + again.out, again.err
        patience, steps = patience + 2, steps + 4
    ended = launch(1, fresh.write_config(steps=20, more=BEST), *given)
    assert ended.codes == [0], ended.err
    assert read_evaluations(run) == read_evaluations(fresh) and read_run(run)[:2] == read_run(fresh)[:2]


def assert_matches_uninterrupted_run(run: SavedRun, fresh: SavedRun, steps: int) -> None:
    """Check that a run has the same losses, gradient norms and weights as an uninterrupted run of one process."""
    go_on(fresh, 1, steps)
    assert read_run(run)[:2] == read_run(fresh)[:2]


@pytest.mark.parametrize("way", ["signal", pytest.param("commands", marks=pytest.mark.slow)])
def test_stopped_run_resumes_with_another_world_size(way: str, made: SavedRun, tmp_path: Path) -> None:
    """A run of 2 processes is stopped by SIGTERM or ``stop``, then resumed with 1 and with 2. Results do not change."""
    run, fresh = made.copy(tmp_path / "run"), made.copy(tmp_path / "fresh")
    keys = (*SAVED, *(["checkpoint.save_steps=1000"] if way == "commands" else []))
    with launched(2, run.write_config(steps=400), *options(*keys)) as process:
        wait_until(partial(has_steps, run), process)
        if way == "signal":
            process.send_signal(signal.SIGTERM)
        else:
            saved = run.call("save", run.out)
            assert saved.exit_code == 0 and saved_step(run) is not None, saved.output
            stopped = run.call("stop", run.out)
            assert stopped.exit_code == 0, stopped.output
        _, err = process.communicate(timeout=LIMIT_S)
    step = saved_step(run)
    assert process.returncode == 75 and step is not None and f"interrupted at step {step}, saved" in err, err
    status = json.loads((run.out / "status.json").read_text())
    assert (status["state"], status["exit_code"]) == ("stopped", 75)
    assert run.call("ckpt", "verify", run.out).exit_code == 0
    go_on(run, 1, step + 2)
    go_on(run, 2, step + 4)
    assert saved_step(run) == step + 4
    assert_matches_uninterrupted_run(run, fresh, step + 4)
    again = launch(2, run.write_config(steps=step + 4), *options(*SAVED))
    assert again.codes == [0] and "nothing to do" in again.err + again.out, again.err


@pytest.mark.slow
def test_resume_with_changed_tiers_drives_and_world_size(made: SavedRun, tmp_path: Path) -> None:
    """The run is started with 1, 2, 4 and 1 processes, each time with different tiers or drives."""
    run, fresh = made.copy(tmp_path / "run"), made.copy(tmp_path / "fresh")
    (run.folder / "other").mkdir()
    on_drive = (*DRIVES, f"tiers.nvme.0.path={run.folder}/drive")
    elsewhere = ("tiers.nvme.0.size=80MiB", "placement.optimizer=nvme", f"tiers.nvme.0.path={run.folder}/other")
    for size, steps, keys in ((1, 2, ()), (2, 4, on_drive), (4, 6, elsewhere), (1, 8, on_drive)):
        go_on(run, size, steps, *keys)
        assert saved_step(run) == steps
        assert run.call("ckpt", "verify", run.out).exit_code == 0
    assert_matches_uninterrupted_run(run, fresh, 8)


@pytest.mark.slow
@pytest.mark.parametrize("stopped", [(0, 1), (1,)], ids=["all, as torchrun does", "one"])
def test_externally_started_ranks_stop_together(made: SavedRun, tmp_path: Path, stopped: Sequence[int]) -> None:
    run = made.copy(tmp_path / "run")
    ranks = start_runs([run.write_config(steps=400)] * 2, *options(*SAVED))
    try:
        wait_until(partial(has_steps, run), ranks[0])
        for rank in stopped:
            ranks[rank].send_signal(signal.SIGTERM)
        said = [process.communicate(timeout=LIMIT_S)[1] for process in ranks]
        assert [process.returncode for process in ranks] == [75, 75], said
    finally:
        for process in ranks:
            process.kill()
    step = saved_step(run)
    assert step is not None
    go_on(run, 2, step + 1)
    assert_matches_uninterrupted_run(run, made.copy(tmp_path / "fresh"), step + 1)


@pytest.mark.slow
@pytest.mark.parametrize("worlds", [(2, 1), (1, 3, 2, 1)])
def test_ranks_resume_from_complete_copies(worlds: Sequence[int], made: SavedRun, tmp_path: Path) -> None:
    """All drives are lost after each start. The next start, with a different number of ranks, resumes from the copy."""
    run, drive, step = made.copy(tmp_path / "run"), tmp_path / "run/drive", 0
    for size in worlds:
        step += 4
        ended = launch(
            size,
            run.write_config(steps=step),
            *options(*SAVED, *DRIVES, f"tiers.nvme.0.path={drive}", "checkpoint.save_copy=true"),
        )
        said = " ".join((ended.out + ended.err).split())
        assert ended.codes == [0] and f"copied checkpoint at step {step}" in said, ended.err
        if step > 4:
            assert f"continuing after step {step - 4} of {step}" in said, said
        listed = json.loads(run.call("ckpt", "ls", run.out, "--json").output)["checkpoints"]
        copies = [each for each in listed if each["is_copy"]]
        assert [each["step"] for each in copies][-1] == step and len(copies) <= 3
        assert run.call("ckpt", "verify", run.out, "--step", step).exit_code == 0
        shutil.rmtree(drive)
    exported = run.call("export", run.out, run.folder / "exported")
    assert exported.exit_code == 0, exported.output
    for file in (run.folder / "exported").glob("*.safetensors"):
        assert file.read_bytes() == (run.out / "final" / file.name).read_bytes()
    assert_matches_uninterrupted_run(run, made.copy(tmp_path / "fresh"), step)


def test_commands_find_checkpoint_files_of_all_ranks(made: SavedRun, tmp_path: Path) -> None:
    """``status``, ``clean``, ``export`` and ``ckpt`` find the checkpoint files of all ranks, even those on drives."""
    run, drive = made.copy(tmp_path / "run"), tmp_path / "run/drive"

    def tell(*words: object) -> dict[str, Any]:
        found = run.call(*words, "--json")
        assert found.exit_code == 0, found.output
        result: dict[str, Any] = json.loads(found.output)
        return result

    go_on(run, 2, 4, *DRIVES, f"tiers.nvme.0.path={drive}")
    (status,) = tell("status", run.out)["runs"]
    on_drive = status["checkpoint_bytes_on_drives"]
    assert on_drive.keys() == {str(drive)} and status["saved_step"] == 4
    files = [path for rank in range(2) for path in (drive / rank_folder_name(rank) / "snap").rglob("c/*")]
    assert on_drive[str(drive)] == sum({path.stat().st_ino: path.stat().st_blocks * 512 for path in files}.values())
    # ``clean`` removes leftovers of dead runs, but no checkpoint files.
    tell("clean", drive, "--yes", "--generations", "all")
    assert all(path.exists() for path in files)
    tell("export", run.out, run.folder / "exported")
    for file in (run.folder / "exported").glob("*.safetensors"):
        assert file.read_bytes() == (run.out / "final" / file.name).read_bytes()
    assert run.call("ckpt", "rm", run.out, "--step", 2, "--yes").exit_code == 0
    assert [each["step"] for each in tell("ckpt", "ls", run.out)["checkpoints"]] == [4]
    (status,) = tell("status", run.out)["runs"]
    assert 0 < status["checkpoint_bytes_on_drives"][str(drive)] < on_drive[str(drive)]
    assert run.call("ckpt", "verify", run.out).exit_code == 0
    assert run.call("ckpt", "rm", run.out, "--all", "--yes").exit_code == 0
    (status,) = tell("status", run.out)["runs"]
    assert not status["checkpoint_bytes_on_drives"] and not list(drive.glob("rank*/snap/*/*"))


#: First, rank 1 of two dies between the two phases of a save. Then rank 0 of three dies after writing the document.
IN_CI = [(2, "1:kill:all whole:2"), (3, "0:kill:document written:3")]


def draw_kill(draw: random.Random) -> tuple[int, str]:
    """Draw a number of processes, and which rank to kill at which instant, or "" for a kill at a random time."""
    size = draw.choice((1, 2, 2, 3))
    if size == 1 or draw.random() < 0.4:
        return size, ""
    instant = draw.choice(list(INSTANTS))
    rank = 0 if instant == "document written" else draw.randrange(size)
    return size, f"{rank}:kill:{instant}:{draw.randint(1, 3)}"


@pytest.mark.parametrize(
    ("num_kills", "seed"),
    [
        pytest.param(0, 0, id="some"),
        *(
            pytest.param(30, seed, marks=[pytest.mark.slow, pytest.mark.timeout(0)]) for seed in range(14)
        ),  # 316 of these 420 kills hit a run with several ranks
    ],
)
def test_killing_any_rank_at_any_time_loses_no_checkpoint(
    num_kills: int, seed: int, made: SavedRun, tmp_path: Path
) -> None:
    """Each step is saved. No kill loses or damages a checkpoint, and any number of ranks can resume."""
    run, draw, before = made.copy(tmp_path / "run"), random.Random(seed), 0
    pids = tmp_path / "pids"
    pids.mkdir()
    on_drive = (*DRIVES, f"tiers.nvme.0.path={run.folder}/drive") if num_kills else ()
    keys = options(*SAVED, "checkpoint.save_steps=1", *on_drive)
    metrics = run.out / "metrics.jsonl"
    for size, happens in [draw_kill(draw) for _ in range(num_kills)] or IN_CI:
        for file in pids.iterdir():
            file.unlink()
        known = metrics.stat().st_size if metrics.exists() else 0
        with launched_with(size, pids, happens, run.write_config(steps=10_000), *keys) as process:
            victim = int(happens.partition(":")[0] or draw.randrange(size))
            if not happens:
                is_early = draw.random() < 0.3
                wait_until((pids / str(victim)).exists if is_early else partial(grows, metrics, known), process)
                time.sleep(draw.uniform(0.0, 3.0 if is_early else 0.5))
                os.kill(int((pids / str(victim)).read_text()), signal.SIGKILL)
            ended = Ended([], *process.communicate(timeout=LIMIT_S))
        assert process.returncode == (1 if size > 1 else -signal.SIGKILL), (happens, ended.err)
        if size > 1:
            (told,) = ended.errors
            assert told.startswith(f"error: rank {victim} (on {HOST}): was ended by SIGKILL"), (happens, ended.err)
        for file in pids.iterdir():
            assert not is_running(int(file.read_text())), (happens, file.name)
        step = saved_step(run) or 0
        assert step >= before, happens
        before = step
        if step:
            verified = run.call("ckpt", "verify", run.out)
            assert verified.exit_code == 0, (happens, verified.output)
    assert before > 0
    for size, more in ((1, 1), (2, 2)) if num_kills else ((1, 1),):
        go_on(run, size, before + more, "checkpoint.save_steps=1", *on_drive)
    assert_matches_uninterrupted_run(run, made.copy(tmp_path / "fresh"), before + more)


def is_running(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


FAILS = {
    "raise": ("1:raise:begins:2", r".*an unexpected failure"),
    "stop": ("1:stop:begins:2", r"has sent no heartbeat for \d+ s"),
    "flip": ("1:flip:{file}", r".*block '[\w.]+/\w+'"),
}


@pytest.mark.slow
@pytest.mark.parametrize("how", FAILS)
def test_failing_rank_is_named_and_loses_no_checkpoint(how: str, made: SavedRun, tmp_path: Path) -> None:
    """An error, a missing heartbeat or a flipped bit gives one message that names rank 1. No checkpoint is lost."""
    run, file = made.copy(tmp_path / "run"), tmp_path / "wrong"
    happens, says = FAILS[how]
    keys = (*SAVED, *DRIVES, f"tiers.nvme.0.path={run.folder}/drive", "tiers.verify=always", "distributed.timeout=2s")
    pids = tmp_path / "pids"
    pids.mkdir()
    happens = happens.format(file=file)
    with launched_with(2, pids, happens, run.write_config(steps=400), *options(*keys)) as process:
        wait_until(lambda: saved_step(run) is not None, process)
        file.touch()
        ended = Ended([], *process.communicate(timeout=LIMIT_S))
    (told,) = ended.errors
    assert process.returncode == 1 and re.match(rf"error: rank 1 \(on {HOST}\): {says}", told), ended.err
    assert not any(is_running(int(each.read_text())) for each in pids.iterdir())
    assert run.call("ckpt", "verify", run.out).exit_code == 0
    step = saved_step(run) or 0
    go_on(run, 2, step + 1, *keys[len(SAVED) :])
    assert_matches_uninterrupted_run(run, made.copy(tmp_path / "fresh"), step + 1)


@pytest.mark.parametrize("on_full", ["pause", pytest.param("error", marks=pytest.mark.slow)])
def test_full_drive_of_one_rank_pauses_or_ends_all_ranks(on_full: str, made: SavedRun, tmp_path: Path) -> None:
    """All ranks wait and continue together, or all end. The message names the rank with the full drive."""
    run, full = made.copy(tmp_path / "run"), tmp_path / "full"
    keys = (*SAVED, *DRIVES, f"tiers.nvme.0.path={run.folder}/drive", f"tiers.on_disk_full={on_full}")
    config = run.write_config(steps=400)
    with launched_with(2, tmp_path, f"1:full:{full}", config, *options(*keys)) as process:
        wait_until(partial(has_steps, run), process)
        full.touch()
        if on_full == "pause":
            said = read_until("paused", process)
            assert "rank 1: " in said and str(run.folder / "drive/rank00001") in said
            full.unlink()
            assert "rank 1: " in read_until("free space again", process)
            process.send_signal(signal.SIGTERM)
        ended = Ended([], *process.communicate(timeout=LIMIT_S))
    if on_full == "pause":
        assert process.returncode == 75 and not ended.errors, ended.err
    else:
        (told,) = ended.errors
        assert process.returncode == 1 and told.startswith(f"error: rank 1 (on {HOST}): "), ended.err
        assert "No space left on device" in told
        full.unlink()
    step = saved_step(run) or 0
    go_on(run, 2, step + 1, *keys[len(SAVED) :])
    assert_matches_uninterrupted_run(run, made.copy(tmp_path / "fresh"), step + 1)


@pytest.mark.slow
def test_sigterm_under_torchrun_saves_on_all_ranks(made: SavedRun, tmp_path: Path) -> None:
    """torchrun passes SIGTERM on to its processes, which save and exit with 75. torchrun itself exits with 1."""
    pytest.importorskip("megatrain_tier_cli", reason="the project is not installed")
    run = made.copy(tmp_path / "run")
    words = ["-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-addr", "127.0.0.1", "--master-port", "0"]
    words += ["--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "-m", "megatrain"]
    words += ["run", str(run.write_config(steps=400)), *options(*SAVED)]
    pipe, variables = subprocess.PIPE, environment(GLOO_SOCKET_IFNAME="lo")
    given: dict[str, Any] = {"stdout": pipe, "stderr": pipe, "text": True, "cwd": ROOT, "env": variables}
    with subprocess.Popen([sys.executable, *words], **given) as it:
        try:
            wait_until(partial(has_steps, run), it)
            it.send_signal(signal.SIGTERM)
            out, err = it.communicate(timeout=LIMIT_S)
        finally:
            it.kill()
    step = saved_step(run)
    assert it.returncode == 1 and step is not None and f"interrupted at step {step}, saved" in out + err, err
    status = json.loads((run.out / "status.json").read_text())
    assert (status["state"], status["exit_code"]) == ("stopped", 75)
    assert subprocess.run(["sh", "-c", requeue_condition(run.out)]).returncode == 0
    go_on(run, 2, step + 1)
    assert subprocess.run(["sh", "-c", requeue_condition(run.out)]).returncode != 0, "the run is done"
    assert_matches_uninterrupted_run(run, made.copy(tmp_path / "fresh"), step + 1)


def requeue_condition(out: Path) -> str:
    """Return the shell command in docs/distributed.md that decides whether to requeue a job, adapted to ``out``."""
    page = (ROOT / "docs/distributed.md").read_text(encoding="utf-8")
    (condition,) = re.findall(r"^(grep .*) && scontrol requeue", page, flags=re.MULTILINE)
    assert "outputs/first/" in condition
    return str(condition).replace("outputs/first/", f"{out}/")
