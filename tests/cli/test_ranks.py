"""``run`` in several processes: what the user sees."""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from processes.rank_runs import launch, run_ranks
from processes.saved_run import SavedRun, make_run

HOST = socket.gethostname()
#: Micro-batches for four ranks; no checkpoints.
OPTIONS = [
    word
    for key in (
        "training.gradient_accumulation_steps=4",
        "checkpoint.save_strategy=no",
        "checkpoint.save_on_signal=false",
    )
    for word in ("--set", key)
]


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
