"""``run`` in several processes: what the user sees."""

from __future__ import annotations

import json
import random
import signal
import socket
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
from click.testing import CliRunner

from megatrain.checkpoint.ranks import rank_folder_name
from megatrain.run.folder import living_owner
from processes.rank_runs import LIMIT_S, Ended, launch, launched, run_ranks, start_ranks
from processes.saved_run import SavedRun, command_group, make_run

HOST = socket.gethostname()


def options(*keys: str) -> list[str]:
    return [word for key in keys for word in ("--set", key)]


#: Micro-batches for four ranks.
BATCH = ("training.gradient_accumulation_steps=4",)
OPTIONS = options(*BATCH, "checkpoint.save_strategy=no", "checkpoint.save_on_signal=false")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> SavedRun:
    return make_run(tmp_path_factory.mktemp("made"))


def other_config(run: SavedRun, path: Path, before: str, after: str) -> Path:
    """Write the config that one rank has in place of the run's."""
    text = run.write_config().read_text()
    assert before in text
    path.write_text(text.replace(before, after))
    return path


def test_ranks_with_another_model_or_config(made: SavedRun, tmp_path: Path) -> None:
    """One message, which names the rank where it is one rank's; nothing is written."""
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
        "error: the ranks do not have the same config: training.max_steps is 6 on rank 0, and 7 on rank 1."
    )
    assert not made.out.exists()


def test_a_dry_run_plans_for_the_processes(made: SavedRun) -> None:
    result = CliRunner().invoke(
        command_group(), ["run", str(made.write_config()), "--dry-run", "--processes", "2", *OPTIONS]
    )
    assert result.exit_code == 0, result.output
    assert "this is one of 2 processes" in result.output and "ram->ranks" in result.output
    assert not made.out.exists()
    words = ["run", str(made.write_config()), "--dry-run", "--processes", "8", *OPTIONS]
    result = CliRunner().invoke(command_group(), words)
    assert result.exit_code == 2 and "with 8 processes 4 of these would have none" in result.output


def test_errors_of_all_ranks_are_told_once(made: SavedRun) -> None:
    ended = launch(2, made.write_config(), *OPTIONS, "--set", "tiers.ram.size=1MiB")
    assert ended.codes == [3] and len(ended.errors) == 1, ended.err
    assert ended.errors[0].startswith("error: does not fit: tier 'ram'")


def test_processes_that_others_started(made: SavedRun) -> None:
    ended = run_ranks([made.write_config()] * 2, "--processes", "3")
    assert ended.codes == [2, 2], ended.err
    (told,) = ended.errors
    assert "distributed.processes = 3, but 2 processes were started on this machine" in told


DRIVES = ("tiers.nvme.0.size=80MiB", "tiers.ram.size=24MiB", "placement.weights=nvme", "placement.optimizer=nvme")


def read_run(run: SavedRun) -> tuple[list[tuple[float, float]], bytes, list[dict[str, Any]], dict[str, Any]]:
    """Return losses and norms, the exported model, the metrics of the steps, and the plan of rank 0."""
    lines = [json.loads(line) for line in (run.out / "metrics.jsonl").read_text().splitlines()]
    steps = [line for line in lines if "grad_norm" in line]
    weights = (run.out / "final/model.safetensors").read_bytes()
    return (
        [(step["loss"], step["grad_norm"]) for step in steps],
        weights,
        steps,
        json.loads((run.out / "plan.json").read_text()),
    )


@pytest.mark.parametrize(
    ("sizes", "places"),
    [
        ((1, 2, 3), ()),
        pytest.param((1, 2, 3, 4), DRIVES, marks=pytest.mark.slow),
        pytest.param((4,), (), marks=pytest.mark.slow),
    ],
    ids=["ram", "drives", "ram, 4"],
)
def test_the_same_bits_on_any_number_of_ranks(
    made: SavedRun, tmp_path: Path, sizes: Sequence[int], places: Sequence[str]
) -> None:
    """Whole runs: losses, norms and the exported model; what moved, within a rank and between ranks, is as planned."""
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
            assert all(rank["link_bytes"]["ram->ranks"] > 0 for rank in step["ranks"])
        if size == 1:
            assert "ranks" not in steps[0]
        status = json.loads((run.out / "status.json").read_text())
        assert status["state"] == "done" and status["exit_code"] == 0
        between = {link: nbytes for link, nbytes in plan["link_bytes_per_step"].items() if "ranks" in link}
        assert bool(between) == (size > 1)
        for step in steps:
            for rank in step.get("ranks", ()):
                assert {link: rank["link_bytes"][link] for link in between} == between
        if not places:
            assert steps[3]["link_bytes"] == plan["link_bytes_per_step"]
        else:
            assert steps[3]["tier_used_bytes"]["nvme"] > 0 and steps[3]["link_bytes"]["nvme->ram"] > 0
            assert not list((run.folder / "drive").glob("rank*/live/*"))
    assert all(each == found[sizes[0]] for each in found.values())


# -- checkpoints ---------------------------------------------------------------------------------------------------

SAVED = (*BATCH, "training.gradient_lanes=4")


def go_on(run: SavedRun, size: int, steps: int, *keys: str) -> None:
    """Run with so many processes to a step, from wherever the run stands."""
    ended = launch(size, run.write_config(steps=steps), *options(*SAVED, *keys))
    assert ended.codes == [0], ended.err


def wait_until(holds: Callable[[], bool], process: Any) -> None:
    """Wait for something that a run does."""
    end_s = time.monotonic() + LIMIT_S
    while not holds():
        assert time.monotonic() < end_s and process.poll() is None, process.communicate()
        time.sleep(0.01)


def has_steps(run: SavedRun) -> bool:
    metrics = run.out / "metrics.jsonl"
    return metrics.exists() and b"grad_norm" in metrics.read_bytes()


@pytest.mark.slow
def test_what_is_damaged_on_one_rank_is_passed_over_by_all(made: SavedRun, tmp_path: Path) -> None:
    run = made.copy(tmp_path / "run")
    go_on(run, 2, 4)
    folder = max((run.out / "checkpoints" / rank_folder_name(1) / "snap").glob("0*"))
    file = next(path for path in sorted(folder.rglob("c/0")) if "weight" in str(path))
    content = bytearray(file.read_bytes())
    content[5] ^= 1
    file.unlink()
    file.write_bytes(content)
    verified = run.call("ckpt", "verify", run.out)
    assert verified.exit_code == 1 and "rank 1" in verified.output
    ended = launch(2, run.write_config(steps=6), *options(*SAVED))
    assert ended.codes == [0], ended.err
    said = ended.out + ended.err
    assert "the checkpoint of step 4" in said and "cannot be used" in said and "continuing after step 2 of 6" in said
    assert run.call("ckpt", "verify", run.out).exit_code == 0
    assert_as_unbroken(run, made.copy(tmp_path / "fresh"), 6)


def grows(file: Path, size: int) -> bool:
    return file.exists() and file.stat().st_size > size


def saved_step(run: SavedRun) -> int | None:
    """Return the step of the newest checkpoint, as ``ckpt ls`` lists it."""
    listed = run.call("ckpt", "ls", run.out, "--json")
    found = json.loads(listed.output)["checkpoints"] if listed.exit_code == 0 else []
    return next((each["step"] for each in found if each["is_newest"]), None)


def assert_as_unbroken(run: SavedRun, fresh: SavedRun, steps: int) -> None:
    """Compare a run with one of one process that nothing interrupted."""
    go_on(fresh, 1, steps)
    assert read_run(run)[:2] == read_run(fresh)[:2]


def test_a_stopped_run_goes_on_with_other_numbers_of_ranks(made: SavedRun, tmp_path: Path) -> None:
    """2 -> 1 -> 2 processes, the first stopped by SIGTERM: losses, norms and model of an unbroken run of one."""
    run, fresh = made.copy(tmp_path / "run"), made.copy(tmp_path / "fresh")
    with launched(2, run.write_config(steps=400), *options(*SAVED)) as process:
        wait_until(partial(has_steps, run), process)
        process.send_signal(signal.SIGTERM)
        _, err = process.communicate(timeout=LIMIT_S)
    step = saved_step(run)
    assert process.returncode == 75 and step is not None and f"interrupted at step {step}, saved" in err, err
    status = json.loads((run.out / "status.json").read_text())
    assert (status["state"], status["exit_code"]) == ("stopped", 75)
    assert run.call("ckpt", "verify", run.out).exit_code == 0
    go_on(run, 1, step + 2)
    go_on(run, 2, step + 4)
    assert saved_step(run) == step + 4
    assert_as_unbroken(run, fresh, step + 4)
    again = launch(2, run.write_config(steps=step + 4), *options(*SAVED))
    assert again.codes == [0] and "nothing to do" in again.err + again.out, again.err


@pytest.mark.slow
def test_other_tiers_and_drives_each_time(made: SavedRun, tmp_path: Path) -> None:
    """1 -> 2 -> 4 -> 1 processes."""
    run, fresh = made.copy(tmp_path / "run"), made.copy(tmp_path / "fresh")
    (run.folder / "other").mkdir()
    on_drive = (*DRIVES, f"tiers.nvme.0.path={run.folder}/drive")
    elsewhere = ("tiers.nvme.0.size=80MiB", "placement.optimizer=nvme", f"tiers.nvme.0.path={run.folder}/other")
    for size, steps, keys in ((1, 2, ()), (2, 4, on_drive), (4, 6, elsewhere), (1, 8, on_drive)):
        go_on(run, size, steps, *keys)
        assert saved_step(run) == steps
        assert run.call("ckpt", "verify", run.out).exit_code == 0
    assert_as_unbroken(run, fresh, 8)


@pytest.mark.slow
@pytest.mark.parametrize("stopped", [(0, 1), (1,)], ids=["all, as torchrun does", "one"])
def test_ranks_that_others_started_stop_together(made: SavedRun, tmp_path: Path, stopped: Sequence[int]) -> None:
    run = made.copy(tmp_path / "run")
    ranks = start_ranks([run.write_config(steps=400)] * 2, *options(*SAVED))
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
    assert_as_unbroken(run, made.copy(tmp_path / "fresh"), step + 1)


@pytest.mark.slow
def test_a_rank_that_is_killed_at_any_instant(made: SavedRun, tmp_path: Path) -> None:
    """Ten kills while each step is saved: starts go on from a whole checkpoint, to the bits of an unbroken run."""
    run, steps, draw = made.copy(tmp_path / "run"), 60, random.Random(0)
    keys = (*SAVED, "checkpoint.save_steps=1", *DRIVES, f"tiers.nvme.0.path={run.folder}/drive")
    metrics, before = run.out / "metrics.jsonl", 0
    for _ in range(10):
        with launched(2, run.write_config(steps=steps), *options(*keys)) as process:
            size = metrics.stat().st_size if metrics.exists() else 0
            wait_until(partial(grows, metrics, size), process)
            time.sleep(draw.uniform(0.0, 0.3))
            number = draw.randrange(2)
            ranks = rank_processes(run.folder / "drive", 2)
            ranks[number].kill()
            ended = Ended([], *process.communicate(timeout=LIMIT_S))
            assert process.returncode == 1 and len(ended.errors) == 1, ended.err
            assert ended.errors[0].startswith(f"error: rank {number} (on {HOST}): was ended by SIGKILL"), ended.err
            assert not any(rank.is_running() and rank.status() != psutil.STATUS_ZOMBIE for rank in ranks)
        step = saved_step(run)
        assert step is None or step >= before
        before = step or 0
        if step is not None:
            assert run.call("ckpt", "verify", run.out).exit_code == 0
    go_on(run, 2, steps, *keys[len(SAVED) :])
    assert_as_unbroken(run, made.copy(tmp_path / "fresh"), steps)


def rank_processes(drive: Path, size: int) -> list[psutil.Process]:
    """Return the ranks of a run, by rank: each has its folder on the drive."""
    owners = [living_owner(drive / rank_folder_name(rank)) for rank in range(size)]
    return [psutil.Process(owner.pid) for owner in owners if owner is not None]
