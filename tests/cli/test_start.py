"""What `run` says before its first step: a plan where it begins, a line where it goes on, none before an error."""

from __future__ import annotations

from pathlib import Path

import pytest

from processes.saved_run import NVME, SavedRun, make_run


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> SavedRun:
    """A run of 4 steps; tests copy it, or are refused in it."""
    made = make_run(tmp_path_factory.mktemp("start") / "w")
    result = made.run("--set", "lr_scheduler_type=cosine", steps=4)
    assert result.exit_code == 0, result.output
    assert "total MiB" in result.stdout and "fits." in result.stdout
    assert "0 B" not in result.output and "wait 0.0s" not in result.output, "nothing that is 0"
    return made


@pytest.mark.parametrize(
    ("words", "exit_code", "message"),
    [
        (("--set", "data.train.0.path=nowhere.txt"), 4, "nowhere.txt: there is no such file"),
        (("--resume", "nowhere", "--set", "output_dir=other"), 2, "holds no checkpoint"),
        (("--set", "learning_rate=5e-4"), 2, "with other results"),
        (("--max-steps", "8"), 2, "accept it with --allow-config-change"),
        (("--set", "lr_scheduler_type=cosine", "--set", "data.train.0.path=empty.txt"), 4, "empty"),
    ],
)
def test_no_plan_before_an_error(
    trained: SavedRun, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], exit_code: int, message: str
) -> None:
    (trained.folder / "empty.txt").touch()
    monkeypatch.chdir(trained.folder)
    result = trained.run(*words, steps=4)
    assert result.exit_code == exit_code and message in result.stderr, result.output
    assert "total MiB" not in result.output and "fits" not in result.output


def test_a_state_of_another_format_is_not_offered_what_is_refused(trained: SavedRun, tmp_path: Path) -> None:
    run = trained.copy(tmp_path / "w")
    words = ("--set", "optimizer.state_dtype=bfloat16", "--set", "lr_scheduler_type=cosine")
    result = run.run(*words, steps=4)
    assert result.exit_code == 2 and "Undo that or name another output_dir" in result.stderr, result.output
    assert "--allow-config-change" not in result.stderr
    forced = run.run(*words, "--allow-config-change", steps=5)
    assert forced.exit_code != 0 and "Traceback" not in forced.output, "why it is not offered"
    assert "checkpoint" in forced.stderr and "continuing after" not in forced.stdout, forced.output


def test_a_path_that_is_not_there_is_placed(trained: SavedRun) -> None:
    """The file that `init` wrote, before it was filled in: which line to fill."""
    path = trained.write_config(out="other", steps=4)
    path.write_text(path.read_text().replace('"model"', '"path/to/model"').replace("data.txt", "chats.txt"))
    lines = {line.split(" = ")[0]: number for number, line in enumerate(path.read_text().splitlines(), 1)}
    first = trained.call("run", path)
    assert first.exit_code == 4
    assert first.stderr.startswith(f"error: {path}:{lines['path']}, data.train.0.path: "), first.stderr
    path.write_text(path.read_text().replace("chats.txt", "data.txt"))
    second = trained.call("run", path)
    assert second.exit_code == 2
    assert second.stderr.startswith(f"error: {path}:{lines['model_name_or_path']}, model.model_name_or_path: ")


def test_a_run_that_is_done_says_how_to_train_on(trained: SavedRun, tmp_path: Path) -> None:
    run = trained.copy(tmp_path / "w")
    before = (run.out / "status.json").read_bytes()
    words = ("--set", "lr_scheduler_type=cosine")
    result = run.run(*words, steps=4)
    assert result.exit_code == 0, result.output
    assert "--max-steps N --allow-config-change, N above 4: its learning rate (cosine)" in result.stdout
    assert "total MiB" not in result.stdout
    assert (run.out / "status.json").read_bytes() == before, "it was done before"
    on = run.run(*words, "--max-steps", "6", "--allow-config-change")
    assert on.exit_code == 0, on.output
    assert "plan   as `megatrain-tier plan" in on.stdout and "total MiB" not in on.stdout
    assert "(100.0% trained)" not in on.stdout, "what is known of the data was said at the first start"
    checked = run.call("check", run.folder / "run.toml", "--skip-weights", *words, "--set", "max_steps=6")
    assert "cache_dir" not in checked.output, "what check changes for itself is no change of the user's"


def test_a_dry_run_refuses_what_a_run_refuses(trained: SavedRun, tmp_path: Path) -> None:
    """A drive that is too small: the same exit code, and nothing is written."""
    run = trained.copy(tmp_path / "w")
    config = run.write_config(out="new", more=NVME, checkpoint="").read_text().replace('"1MiB"', '"900TiB"')
    (run.folder / "run.toml").write_text(config)
    dry = run.call("run", run.folder / "run.toml", "--dry-run")
    real = run.call("run", run.folder / "run.toml")
    assert (dry.exit_code, real.exit_code) == (3, 3), dry.output
    assert "fits the tiers, but `run` would refuse it here." in dry.stdout
    for result in (dry, real):
        assert "checkpoint.min_free_disk" in result.output and "tier 'output_dir'" not in result.output
    assert not (run.folder / "new").exists()
