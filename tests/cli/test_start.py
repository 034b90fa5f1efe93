"""Before its first step, `run` prints a plan for a new run, a line for a resumed run, and neither before an error."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path

import pytest

from processes.saved_run import NVME, SavedRun, call_in_new_process, make_run


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> SavedRun:
    """Return a finished run of 4 steps. Tests copy it, or start it with settings that are refused."""
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
        (("--max-steps", "8"), 2, "accept the changes with --allow-config-change"),
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


def test_one_refusal_lists_all_differences(trained: SavedRun, tmp_path: Path) -> None:
    """One message lists changed keys, data files and ``config.json``, before rows are tokenized or a plan is made."""
    run = trained.copy(tmp_path / "w")
    words = ("--set", "lr_scheduler_type=cosine", "--set", f"data.cache_dir={tmp_path / 'tokens'}")
    (run.folder / "moved.txt").write_bytes((run.folder / "data.txt").read_bytes())
    wrong = ("--set", "learning_rate=5e-4", *words)
    moved = run.run(*wrong, "--set", f"data.train.0.path={run.folder / 'moved.txt'}", steps=4)
    assert moved.exit_code == 2 and "data.train" not in moved.stderr, "the same rows elsewhere"
    (run.folder / "data.txt").write_text("other rows\n")
    path = run.folder / "model" / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "comment": "new"}))
    wrong = (*wrong, "--set", "data.train.0.max_samples=5")
    result = run.run(*wrong, steps=4)
    assert result.exit_code == 2, result.output
    for line in (
        "  optimizer.learning_rate: 0.001 -> 0.0005\n",
        "  the model's config.json, as a checksum: ",
        "  data.train.0.max_samples: not set -> 5 (if the contents differ)\n",
        f"  data.train.0: the contents of the files have changed ({run.folder / 'data.txt'})\n",
    ):
        assert line in result.stderr, result.stderr
    assert not list((tmp_path / "tokens").glob("*/manifest.json")), "nothing is tokenized"
    checked = " ".join(run.call("check", run.folder / "run.toml", "--skip-weights", *wrong).output.split())
    assert "learning_rate: 0.001 -> 0.0005" in checked and "the rows of [[data.train]] differ" in checked


def test_refusal_lists_uncompared_data(trained: SavedRun) -> None:
    """A hub data set is not downloaded just for the comparison. Files that are now streamed are not compared either."""
    wrong = ("--set", "lr_scheduler_type=cosine", "--set", "learning_rate=5e-4")
    for words, line in (
        (("--set", "data.train.0.path=org/b"), ' -> "org/b" (if the contents differ)\n'),
        (("--set", "data.streaming=true", "--set", "max_steps=4"), "  data.streaming: false -> true (if the contents"),
    ):
        result = trained.run(*wrong, *words, steps=4)
        assert result.exit_code == 2 and "  optimizer.learning_rate: 0.001 -> 0.0005\n" in result.stderr, result.output
        assert line in result.stderr and "data.train.0: " not in result.stderr, result.stderr


def test_advice_for_another_state_format_is_accepted(trained: SavedRun, tmp_path: Path) -> None:
    run = trained.copy(tmp_path / "w")
    words = ("--set", "optimizer.state_dtype=bfloat16", "--set", "lr_scheduler_type=cosine")
    result = run.run(*words, steps=4)
    assert result.exit_code == 2 and "Undo that or name another output_dir" in result.stderr, result.output
    assert "--allow-config-change" not in result.stderr
    forced = run.run(*words, "--allow-config-change", steps=5)
    assert forced.exit_code != 0 and "Traceback" not in forced.output, "why it is not offered"
    assert "checkpoint" in forced.stderr and "continuing after" not in forced.stdout, forced.output


def test_missing_path_error_names_the_config_line(trained: SavedRun) -> None:
    """If a config still has the placeholders that `init` wrote, the error names the line to fill in."""
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


def test_finished_run_explains_how_to_train_further(trained: SavedRun, tmp_path: Path) -> None:
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
    assert "; `megatrain-tier plan" in on.stdout and "total MiB" not in on.stdout
    assert "(100.0% trained)" not in on.stdout, "the first start printed the figures of the data"
    checked = run.call("check", run.folder / "run.toml", "--skip-weights", *words, "--set", "max_steps=6")
    assert "cache_dir" not in checked.output, "check's internal changes are not the user's"


def test_dry_run_refuses_the_same_configs_as_a_run(trained: SavedRun, tmp_path: Path) -> None:
    """If the drive is too small, a dry run and a run give the same exit code, and write nothing."""
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


def _drop_head(model: Path) -> None:
    """Untie the embeddings in the model's config, so that the head matrix is missing from the weights file."""
    path = model / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "tie_word_embeddings": False}))


#: Damage to the model's weights -> (function that causes it, part of the message).
DAMAGES: dict[str, tuple[Callable[[Path], object], str]] = {
    "absent shard": (
        lambda model: (
            (model / "model.safetensors").unlink(),
            (model / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-1.safetensors"}}'),
        ),
        "1 of 1 shards are missing: model-1.safetensors",
    ),
    "a byte short": (
        lambda model: os.truncate(model / "model.safetensors", (model / "model.safetensors").stat().st_size - 1),
        "but its header describes",
    ),
    "empty": (lambda model: os.truncate(model / "model.safetensors", 0), "is not a safetensors file"),
    "pointer of LFS": (
        lambda model: (model / "model.safetensors").write_text("version https://git-lfs.github.com/spec/v1\n"),
        "is a Git LFS pointer",
    ),
    "without lm_head": (_drop_head, "ForCausalLM are missing: lm_head.weight"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_weights_are_checked_before_the_plan_and_the_data(tmp_path: Path, damage: str) -> None:
    run = make_run(tmp_path / "w")
    spoil, message = DAMAGES[damage]
    spoil(run.folder / "model")
    cache = run.folder / "tokens"
    words = ("--set", f"data.cache_dir={cache}")
    result = run.run(*words)
    assert result.exit_code == 2 and message in result.stderr, result.output
    assert "fits" not in result.output and not cache.exists(), "refused before any row is tokenized"
    config = run.write_config()
    for command in (("plan", config), ("run", config, "--dry-run")):
        result = run.call(*command, *words)
        assert result.exit_code == 2 and message in result.stdout, result.output
        assert "but `run` would refuse it here." in result.stdout and "fits.\n" not in result.stdout
    as_json = run.call("plan", config, "--json", *words)
    assert as_json.exit_code == 2 and message in json.loads(as_json.stdout)["problem"]
    checked = run.call("check", config, *words)
    assert checked.exit_code == 2 and message in " ".join(checked.stdout.split()), checked.output
    assert not cache.exists()


def test_a_plan_needs_no_weights(tmp_path: Path) -> None:
    run = make_run(tmp_path / "w")
    (run.folder / "model" / "model.safetensors").unlink()
    result = run.call("plan", run.write_config())
    assert result.exit_code == 0 and "fits." in result.stdout, result.output
    refused = run.run()
    assert refused.exit_code == 2 and "has no weights" in refused.stderr and "fits" not in refused.output


def test_drives_are_checked_before_the_plan_and_the_data(tmp_path: Path) -> None:
    run = make_run(tmp_path / "w")
    cache = run.folder / "tokens"
    words = ("--set", f"data.cache_dir={cache}")
    large = run.write_config(more=NVME, checkpoint="").read_text().replace('"1MiB"', '"900TiB"')
    (run.folder / "run.toml").write_text(large)
    full = run.call("run", run.folder / "run.toml", *words)
    assert full.exit_code == 3 and "min_free_disk" in full.stderr and "total MiB" not in full.output, full.output
    (run.folder / "drive").mkdir()
    (run.folder / "drive" / "photo.jpg").touch()
    foreign = run.run(*words, more=NVME)
    assert foreign.exit_code == 2 and "was not made by tiered" in foreign.stderr, foreign.output
    assert "total MiB" not in foreign.output and not cache.exists()
    (run.out / "checkpoints").mkdir(parents=True)
    (run.out / "checkpoints" / "photo.jpg").touch()
    foreign = run.run(*words)
    assert foreign.exit_code == 2 and "was not made by tiered" in foreign.stderr, foreign.output
    assert "total MiB" not in foreign.output and not cache.exists()


def test_resumed_run_reports_adapters_from_the_checkpoint(tmp_path: Path) -> None:
    run = make_run(tmp_path / "w")
    lora = "[lora]\nr = 2\n"
    plan = run.call("plan", run.write_config(more=lora))
    # Adapters of q_proj (64 x 64) and v_proj (64 x 32) in two layers. Each has rank * (rows + columns) parameters.
    trained = 2 * 2 * ((64 + 64) + (64 + 32))
    assert f"parameters ({trained:,} trained), 2 layers" in plan.stdout, plan.stdout
    first = run.run(more=lora, steps=2)
    assert f"LoRA: {trained:,} trained parameters" in first.stdout and "modules (new)" in first.stdout, first.output
    on = run.run("--set", "max_steps=4", "--allow-config-change", more=lora, steps=2)
    assert "continuing after step 2 of 4" in on.stdout, on.output
    assert "modules (from the checkpoint of step 2 in " in on.stdout and "(new)" not in on.stdout


def test_a_report_imports_no_torch(trained: SavedRun) -> None:
    report, has_torch = call_in_new_process("report", trained.out)
    assert report.returncode == 0 and not has_torch, report.stderr
    assert report.stdout == trained.call("report", trained.out).stdout and "fits" not in report.stdout
