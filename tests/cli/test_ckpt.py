"""``megatrain-tier ckpt``: listing, verifying and removing the checkpoints of a run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
from click.testing import CliRunner

from megatrain.run.folder import RunFolder
from oracles.run_state import make_state
from processes.saved_run import SavedRun, command_group
from tiered.durable.manifest import Manifest, list_generations, write_manifest

CliModule = Callable[[str], ModuleType]
SOUND = "".join(f"step {2 * number} (generation {number}): sound\n" for number in (1, 2, 3))


@pytest.fixture
def run(unbroken: SavedRun, tmp_path: Path) -> SavedRun:
    return unbroken.copy(tmp_path / "w")


def generations(run: SavedRun) -> list[int]:
    return list_generations(run.out / "checkpoints")


def test_ls(run: SavedRun) -> None:
    result = run.call("ckpt", "ls", run.out)
    assert result.exit_code == 0, result.output
    rows = [line.split() for line in result.stdout.splitlines()]
    assert rows[0] == ["step", "saved", "size", "loss", "generation"]
    assert [row[0] for row in rows[1:-1]] == ["2", "4", "6"]
    assert [" ".join(row[6:]) for row in rows[1:-1]] == ["", "", "newest"]
    assert " ".join(rows[-1]) == "a run continues from step 6"
    assert "\x1b" not in result.output
    infos = json.loads(run.call("ckpt", "ls", run.out, "--json").stdout)["checkpoints"]
    assert [(info["step"], info["generation"], info["is_newest"], info["problem"]) for info in infos] == [
        (2, 1, False, None), (4, 2, False, None), (6, 3, True, None),
    ]  # fmt: skip


def test_ls_shows_all_facts(tmp_path: Path) -> None:
    """The checkpoint of step 4 is damaged. A copy of step 2 exists."""
    folders = tmp_path / "checkpoints", tmp_path / "copies"
    states = [
        make_state(step=2, saved_at="2026-01-02T03:04:05.678+00:00", save_number=1, last_loss=1.25),
        make_state(step=4, saved_at="2026-01-02T03:05:05.678+00:00", save_number=2, last_loss=0.5),
        make_state(step=6, saved_at="2026-01-02T03:06:05.678+00:00", save_number=3),
    ]
    for folder, numbers in zip(folders, ((1, 2, 3), (1,)), strict=True):
        folder.mkdir()
        for number in numbers:
            write_manifest(folder, Manifest(number, (), states[number - 1].to_meta()))
    (folders[0] / "snap/00000002/MANIFEST.json").write_text("{")
    result = CliRunner().invoke(command_group(), ["ckpt", "ls", str(tmp_path)])
    assert result.exit_code == 0, result.output
    problem = (
        f"'{folders[0]}/snap/00000002/MANIFEST.json' cannot be read as a manifest: Expecting property name enclosed in "
        "double quotes: line 1 column 2 (char 1)"
    )
    assert [line.rstrip() for line in result.stdout.splitlines()] == [
        "step  saved                 size    loss  generation",
        "   2  2026-01-02T03:04:05Z   0 B  1.2500           1",
        "   ?                         0 B                   2  unusable",
        "   6  2026-01-02T03:06:05Z   0 B                   3  newest",
        "   2  2026-01-02T03:04:05Z   0 B  1.2500           1  copy",
        f"step ?: {problem}",
        "a run continues from step 6",
    ]
    values = json.loads(CliRunner().invoke(command_group(), ["ckpt", "ls", str(tmp_path), "--json"]).stdout)
    assert values["notices"] == []
    figures = {"nbytes": 0, "note": None, "lost": [], "num_ranks": 1, "is_newest": False, "problem": None, "loss": None}
    figures["is_copy"] = False
    assert values["checkpoints"] == [
        {**figures, "step": 2, "generation": 1, "saved_at": states[0].saved_at, "loss": 1.25},
        {**figures, "step": None, "generation": 2, "saved_at": None, "problem": problem},
        {**figures, "step": 6, "generation": 3, "saved_at": states[2].saved_at, "is_newest": True},
        {**figures, "step": 2, "generation": 1, "saved_at": states[0].saved_at, "loss": 1.25, "is_copy": True},
    ]


def test_ls_works_during_a_run(run: SavedRun) -> None:
    with RunFolder(run.out):
        assert run.call("ckpt", "ls", run.out).exit_code == 0


def test_verify(run: SavedRun) -> None:
    result = run.call("ckpt", "verify", run.out)
    assert (result.exit_code, result.stdout) == (0, f"{SOUND}a run continues from step 6\n"), result.output
    chunk = run.out / "checkpoints/snap/00000003/model.layers.0/weight/c/0"
    chunk.write_bytes(b"\1" + chunk.read_bytes()[1:])
    result = run.call("ckpt", "verify", run.out)
    assert result.exit_code == 1
    assert "step 4 (generation 2): sound\nstep 6 (generation 3): 1 problem\n" in result.stdout
    assert str(chunk) in result.stdout and "a run continues from step 4\n" in result.stdout
    assert f"1 of 3 checkpoints cannot be used. A run skips it; remove it with megatrain-tier ckpt rm {run.out}" in (
        result.stderr
    )
    (one,) = json.loads(run.call("ckpt", "verify", run.out, "--step", 6, "--json").stdout)["checkpoints"]
    assert one["step"] == 6 and len(one["problems"]) == 1
    assert run.call("ckpt", "verify", run.out, "--step", 4).stdout == "step 4 (generation 2): sound\n"


def test_rm(run: SavedRun) -> None:
    asked = run.call("ckpt", "rm", run.out, "--step", 2)
    assert asked.exit_code == 2 and "Add --yes" in asked.stderr and generations(run) == [1, 2, 3]
    result = run.call("ckpt", "rm", run.out, "--step", 2, "--yes")
    assert (result.exit_code, result.stdout) == (0, "removed step 2 (generation 1)\n"), result.output
    assert generations(run) == [2, 3]
    result = run.call("ckpt", "rm", run.out, "--step", 6, "--yes", "--json")
    assert [info["step"] for info in json.loads(result.stdout)["removed"]] == [6]
    last = run.call("ckpt", "rm", run.out, "--step", 4, "--yes")
    assert last.exit_code == 1 and "the only one" in last.stderr and "--all" in last.stderr and generations(run) == [2]
    result = run.call("ckpt", "rm", run.out, "--all", "--yes")
    assert (result.exit_code, result.stdout, generations(run)) == (0, "removed step 4 (generation 2)\n", [])
    assert run.call("ckpt", "ls", run.out).stdout == "no checkpoints: all were removed\n"
    assert run.call("ckpt", "rm", run.out, "--all", "--yes").stdout == f"no checkpoint in '{run.out}'\n"


def test_rm_removes_a_checkpoint_with_a_damaged_manifest(run: SavedRun) -> None:
    (run.out / "checkpoints/snap/00000002/MANIFEST.json").write_text("{")
    assert "MANIFEST.json" in run.call("ckpt", "ls", run.out).stdout
    result = run.call("ckpt", "rm", run.out, "--generation", 2, "--yes")
    assert (result.exit_code, result.stdout) == (0, "removed step ? (generation 2)\n"), result.output
    assert generations(run) == [1, 3]


def test_rm_confirms_on_a_terminal(run: SavedRun, cli_module: CliModule, monkeypatch: pytest.MonkeyPatch) -> None:
    words = ["ckpt", "rm", str(run.out), "--step", "2"]
    monkeypatch.setattr("click.testing._NamedTextIOWrapper.isatty", lambda self: True, raising=False)
    refused = CliRunner().invoke(command_group(), words, input="n\n")
    assert refused.exit_code == 2 and "Remove step 2?" in refused.stdout and generations(run) == [1, 2, 3]
    assert CliRunner().invoke(command_group(), words, input="y\n").exit_code == 0
    assert generations(run) == [2, 3]


def test_rm_all_lets_the_run_start_again(run: SavedRun) -> None:
    refused = run.run("--resume", "no")
    assert refused.exit_code == 1 and "ckpt rm" in refused.stderr
    assert run.call("ckpt", "rm", run.out, "--all", "--yes").exit_code == 0
    result = run.run("--resume", "no")
    assert result.exit_code == 0 and "step 1/6" in result.output, result.output


def test_removal_is_refused_during_a_run(run: SavedRun) -> None:
    with RunFolder(run.out):
        for words in (["--all"], ["--step", 2]):
            result = run.call("ckpt", "rm", run.out, *words, "--yes")
            assert result.exit_code == 1 and "in use by process" in result.stderr, result.output
    assert generations(run) == [1, 2, 3]


def test_usage(run: SavedRun, tmp_path: Path) -> None:
    for words, code, message in (
        (["rm", run.out], 2, "choose one option: --step N, --generation N or --all"),
        (["rm", run.out, "--all", "--step", 2], 2, "choose one option: --step N, --generation N or --all"),
        (["rm", run.out, "--step", 3, "--yes"], 1, "Saved steps: 2, 4, 6"),
        (["rm", run.out, "--generation", 7, "--yes"], 1, "Existing generations: 1, 2, 3"),
        (["verify", run.out, "--step", 3], 1, "Saved steps: 2, 4, 6"),
        (["ls", tmp_path], 1, "holds no checkpoint. Give the output_dir of a run that saved"),
        (["ls", tmp_path / "nowhere"], 2, "does not exist"),
        (["list", run.out], 2, "No such command 'list'"),
        (["ls"], 2, "Missing argument 'RUN'"),
    ):
        result = run.call("ckpt", *words)
        assert result.exit_code == code and message in result.stderr, (words, result.output)
        assert "Traceback" not in result.output
