"""Copies of checkpoints at a URL, tested with a real S3 server on the loopback address."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import signal
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest
import torch

from fakes.s3_server import S3, s3_server
from megatrain.checkpoint import copy_transfer, object_folder, remote_copier, remote_folder
from megatrain.checkpoint.copy_transfer import Upload
from megatrain.checkpoint.document import Checkpoint
from megatrain.checkpoint.remote_folder import RemoteFolder
from megatrain.checkpoint.resume import download_newest
from megatrain.config.load import load_config
from megatrain.training.resolve import resolve_checkpoint
from oracles.run_state import make_state
from processes import saved_run
from processes.golden import unpack
from processes.rank_runs import launch
from processes.saved_run import NVME, ON_NVME, SavedRun, end
from tiered import CorruptBlockError, GenerationReader, MiB, RamTier, TieredStore, format_size
from tiered.durable.manifest import Manifest, list_generations, write_manifest
from tiered.locks import lock_directory

ON_DRIVE = {"placement": ON_NVME, "more": NVME}


def copied(saved_at: str) -> Checkpoint:
    return Checkpoint(Path(), 1, (), {"saved_at": saved_at})


@pytest.fixture(scope="module")
def server() -> Iterator[S3]:
    with s3_server() as found:
        yield found


@pytest.fixture
def s3(server: S3, monkeypatch: pytest.MonkeyPatch) -> Iterator[S3]:
    """Yield an empty server. Runs save every three steps, because each request takes milliseconds."""
    monkeypatch.setattr(saved_run, "CONFIG", saved_run.CONFIG.replace("save_steps = 2", "save_steps = 3"))
    yield server
    server.line.restore()
    for name in server.files().ls("bucket", detail=False):
        server.files().rm(name, recursive=True)


@pytest.fixture
def run(unbroken: SavedRun, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> SavedRun:
    monkeypatch.setattr(remote_copier, "MAX_DELAY_S", 0.05)
    made = unbroken.copy(tmp_path / "w")
    made.out.rename(made.folder / "undisturbed")
    return made


@pytest.fixture
def url(tmp_path: Path) -> str:
    """Return the URL of a folder, for tests that need no server."""
    return f"file://{tmp_path}/elsewhere/run"


def to(url: str, **more: Any) -> dict[str, Any]:
    return {"checkpoint": f'save_copy = "{url}"', **more}


def s3_copy_options(**more: Any) -> dict[str, Any]:
    return to("s3://bucket/run", **more)


def folder_of(url: str) -> Path:
    return Path(url.removeprefix("file://"))


def weights(run: SavedRun, out: str = "out") -> bytes:
    return (run.folder / out / "final/model.safetensors").read_bytes()


def steps_at_url(url: str = "s3://bucket/run") -> list[int]:
    return [each.step for each in RemoteFolder(url).checkpoints()]


def remove_local_files(run: SavedRun) -> None:
    for name in ("out", "drive"):
        shutil.rmtree(run.folder / name, ignore_errors=True)


# -- there and back ------------------------------------------------------------------------------------------------


def test_run_killed_during_an_upload_resumes_on_an_empty_machine(run: SavedRun, s3: S3) -> None:
    """A run is killed during its second upload.

    An empty machine resumes from the first copy, and its result is bit-identical.
    """
    s3.line.stall_after = 2_400_000  # in the second copy: each copy takes 1.6 MB, plus headers
    process = run.start(**s3_copy_options(**ON_DRIVE))
    try:
        assert s3.line.stalled.wait(60), "the second upload did not begin"
        process.send_signal(signal.SIGKILL)
        process.wait(30)
    finally:
        end(process)
    s3.line.restore()
    assert steps_at_url() == [3]
    half = [name for name in s3.files().ls("bucket/run", detail=False) if "step-6" in name]
    assert half and not s3.files().exists(f"{half[0]}/CHECKPOINT.json"), "the cut came in the middle of a copy"

    remove_local_files(run)
    result = run.run(**s3_copy_options())  # this machine has no drive
    assert result.exit_code == 0, result.output
    assert "downloading the checkpoint of step 3 from 's3://bucket/run'" in result.output
    assert "continuing after step 3 of 6" in result.output
    assert weights(run) == weights(run, "undisturbed")
    rows = [json.loads(line) for line in (run.out / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows if "loss" in row] == [1, 2, 3, 4, 5, 6], "the log also came back"
    assert steps_at_url() == [6, 3]


def test_url_holds_a_complete_checkpoint(run: SavedRun, s3: S3, tmp_path: Path) -> None:
    """Any tool can download the objects into a folder, and the reader of generations can verify this folder."""
    result = run.run(**s3_copy_options(**ON_DRIVE))
    assert result.exit_code == 0, result.output
    assert steps_at_url() == [6, 3] and result.output.count("copied checkpoint at step") == 2
    newest = RemoteFolder("s3://bucket/run").checkpoints()[0]
    s3.files().get(f"bucket/run/{newest.name}", str(tmp_path / "got"), recursive=True)
    reader = GenerationReader(tmp_path / "got")
    here = GenerationReader(run.out / "checkpoints", search=[run.folder / "drive"])
    assert reader.manifest.meta == here.manifest.meta and reader.manifest.meta["step"] == 6
    for key in reader.blocks:
        nbytes = reader.spec(key).nbytes
        assert reader.read_range(key, 0, nbytes).equal(here.read_range(key, 0, nbytes)), key
    objects = json.loads((tmp_path / "got/OBJECTS.json").read_text())["objects"]
    assert all(copy_transfer._sha256_of(tmp_path / "got" / name) == sum_ for name, (_, sum_) in objects.items())


@pytest.mark.slow
def test_copy_of_several_ranks_resumes_with_another_rank_count(
    run: SavedRun, s3: S3, monkeypatch: pytest.MonkeyPatch
) -> None:
    def two_rows(**config: Any) -> Path:
        path = run.write_config(**config)
        rows = "per_device_train_batch_size = 1\ngradient_accumulation_steps = 2"
        path.write_text(path.read_text().replace("per_device_train_batch_size = 2", rows))
        return path

    ended = launch(2, two_rows(steps=4, **s3_copy_options(**ON_DRIVE)))
    assert ended.codes == [0], ended.err
    assert steps_at_url() == [4, 3]
    remove_local_files(run)
    result = run.call("run", two_rows(**s3_copy_options()), "--allow-config-change")
    assert result.exit_code == 0, result.output
    assert "continuing after step 4 of 6" in result.output
    assert steps_at_url() == [6, 4, 3]
    ended = launch(2, two_rows(out="whole"))
    assert ended.codes == [0] and weights(run) == weights(run, "whole")


@pytest.mark.slow
def test_outdated_machine_resumes_from_the_url(run: SavedRun, s3: S3) -> None:
    """Another machine got further with the same run, so the local checkpoint is older than the copy."""
    assert run.run(steps=2, **s3_copy_options()).exit_code == 0
    other = run.copy(run.folder.parent / "other")
    for each, steps in ((other, 4), (run, 6)):
        result = each.run("--allow-config-change", steps=steps, **s3_copy_options())
        assert result.exit_code == 0, result.output
    assert "continuing after step 4 of 6" in result.output
    assert weights(run) == weights(run, "undisturbed")


# -- nothing is removed before its copy exists ---------------------------------------------------------------------


def test_checkpoint_is_pruned_only_after_its_copy_is_committed(
    run: SavedRun, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The run keeps one checkpoint, but each of the six checkpoints still exists when its copy is committed."""
    seen: list[tuple[int, bool]] = []
    commit = RemoteFolder.commit

    def look_and_commit(self: RemoteFolder, made: remote_folder.RemoteCheckpoint) -> None:
        generation = made.parts[0].generation
        seen.append((made.step, generation in list_generations(run.out / "checkpoints")))
        commit(self, made)

    monkeypatch.setattr(RemoteFolder, "commit", look_and_commit)
    path = run.write_config(**to(url))
    text = path.read_text().replace("save_steps = 2\nsave_total_limit = 3", "save_steps = 1\nsave_total_limit = 1")
    path.write_text(text)
    result = run.call("run", path)
    assert result.exit_code == 0, result.output
    assert seen == [(step, True) for step in range(1, 7)]
    assert steps_at_url(url) == [6] and len(list_generations(run.out / "checkpoints")) == 1
    assert weights(run) == weights(run, "undisturbed")


def test_dropped_connection_is_reported_and_retried(run: SavedRun, s3: S3, monkeypatch: pytest.MonkeyPatch) -> None:
    fail = remote_copier.RemoteCopier._fail

    def fail_and_restore(self: Any, *arguments: Any) -> None:
        s3.line.is_down = False
        fail(self, *arguments)

    def go_down(self: Any, reader: Any, name: str, *arguments: Any) -> Any:
        s3.line.is_down = name.startswith("00000002") and not s3.line.num_cuts
        s3.line.num_cuts += s3.line.is_down
        return send(self, reader, name, *arguments)

    send = Upload.send
    monkeypatch.setattr(Upload, "send", go_down)
    monkeypatch.setattr(remote_copier.RemoteCopier, "_fail", fail_and_restore)
    result = run.run(**s3_copy_options())
    assert result.exit_code == 0, result.output
    assert "the checkpoint of step 6 is not in 's3://bucket/run' yet: checkpoint.save_copy: " in result.output
    assert steps_at_url() == [6, 3] and weights(run) == weights(run, "undisturbed")


@pytest.mark.slow
def test_interrupted_upload_is_completed(run: SavedRun, s3: S3) -> None:
    s3.line.cut_after = 900_000
    result = run.run(**s3_copy_options())
    assert result.exit_code == 0, result.output
    assert s3.line.num_cuts == 1 and steps_at_url() == [6, 3]
    remove_local_files(run)
    assert "continuing after step 6 of 6" in run.run(**s3_copy_options()).output
    assert weights(run) == weights(run, "undisturbed")


def test_unreachable_url_fails_the_run_and_the_next_start_copies(
    run: SavedRun, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_copier, "LAST_TRY", 2)

    def refuse(*arguments: Any) -> None:
        raise object_folder.RemoteError("the bucket went away")

    with monkeypatch.context() as patch:
        patch.setattr(Upload, "send", refuse)
        result = run.run(steps=2, **to(url))
    assert result.exit_code == 1
    said = " ".join(result.output.split())
    problem = (
        f"the checkpoint of step 2 is not in '{url}' yet: the bucket went away. It stays on its drive; next try in"
    )
    assert said.count(f"{problem} 0 s") == 2
    assert (
        f"the checkpoint of step 2 is not in '{url}', after 2 tries. It is whole in '{run.out / 'checkpoints'}': "
        "repeat the same command to copy it"
    ) in said
    assert steps_at_url(url) == []
    result = run.run(steps=2, **to(url))
    assert result.exit_code == 0 and "nothing to do" in result.output, result.output
    assert steps_at_url(url) == [2]


# -- what is refused -----------------------------------------------------------------------------------------------


def test_copy_with_a_damaged_object_is_named_and_skipped(run: SavedRun, url: str) -> None:
    assert run.run(**to(url)).exit_code == 0
    newest = RemoteFolder(url).checkpoints()[0]
    victim = next((folder_of(url) / newest.name).rglob("weight/c/0"))
    contents = bytearray(victim.read_bytes())
    contents[5] ^= 1
    sound = run.call("ckpt", "verify", url, "--step", 6)
    assert sound.exit_code == 0 and "copy of step 6 (generation 3): sound" in sound.output, sound.output
    victim.write_bytes(bytes(contents))
    listed = json.loads(run.call("ckpt", "ls", url, "--json").stdout)["checkpoints"]
    assert [(each["step"], each["is_newest"]) for each in listed] == [(2, False), (4, False), (6, True)]
    damaged = run.call("ckpt", "verify", url)
    assert damaged.exit_code == 1 and "1 of 3 checkpoints cannot be used" in damaged.output, damaged.output
    assert f"'file://{victim}': its SHA-256 is" in damaged.output and "ckpt rm" not in damaged.output
    remove_local_files(run)
    result = run.run(**to(url))
    assert result.exit_code == 0, result.output
    assert f"'file://{victim}' is damaged: its SHA-256 is" in result.output.replace("\n", " ")
    assert "continuing after step 4 of 6" in result.output
    assert weights(run) == weights(run, "undisturbed")

    remove_local_files(run)
    for path in folder_of(url).glob("*/OBJECTS.json"):
        path.unlink()
    result = run.run(**to(url))
    assert result.exit_code == 1 and f"copies in '{url}' is whole" in result.output
    assert not (run.out / "final").exists(), "it did not silently start over"


def test_url_of_another_run_is_refused(run: SavedRun, url: str) -> None:
    assert run.run(steps=2, **to(url)).exit_code == 0
    remove_local_files(run)
    path = run.write_config(steps=2, **to(url))
    path.write_text(path.read_text().replace("learning_rate = 1e-3", "learning_rate = 1e-4"))
    result = run.call("run", path)
    assert result.exit_code == 2 and "optimizer.learning_rate: 0.001 -> 0.0001" in result.output, result.output
    assert not (run.out / "checkpoints").exists() and "downloading" not in result.output, "nothing was fetched for it"
    assert f"That checkpoint is at '{url}', and no part of it was downloaded" in result.output
    remove_local_files(run)
    result = run.run(steps=2, checkpoint=f'save_copy = "{url}"\nresume_from_checkpoint = "no"')
    assert result.exit_code == 1 and 'resume_from_checkpoint is "no"' in result.output
    remove_local_files(run)
    assert run.run(steps=2, **to(f"{url}/another")).exit_code == 0
    result = run.run("--allow-config-change", steps=4, **to(url))
    assert result.exit_code == 1 and "holds the checkpoints of another run" in result.output


def test_adapters_of_other_base_weights_are_refused_before_they_are_fetched(run: SavedRun, url: str) -> None:
    """The config is unchanged, but the checkpoint holds only adapters that were trained on other base weights."""
    from transformers import AutoConfig, AutoModelForCausalLM

    lora = {"more": '[lora]\nr = 2\ntarget_modules = ["q_proj"]\n'}
    assert run.run(steps=2, **to(url, **lora)).exit_code == 0
    remove_local_files(run)
    torch.manual_seed(1)
    folder = run.folder / "model"
    AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(folder)
    result = run.run(steps=4, **to(url, **lora))
    assert result.exit_code != 0 and "its weights are no longer those that" in result.output, result.output
    assert "name another URL in checkpoint.save_copy" in " ".join(result.output.split())
    assert "downloading" not in result.output and not (run.out / "checkpoints").exists()


def test_two_processes_that_share_a_url(url: str) -> None:
    folder = RemoteFolder(url)
    made = remote_folder.RemoteCheckpoint(1, 2, (remote_folder.RemotePart("", 1, 0, 0, "a"),), copied("1"))
    folder.commit(made)
    folder.commit(made)  # a retry, as if the answer had been lost
    other = remote_folder.RemoteCheckpoint(1, 2, (remote_folder.RemotePart("", 1, 0, 0, "b"),), copied("2"))
    with pytest.raises(remote_folder.UrlInUseError, match="two runs share it"):
        folder.commit(other)


def test_pruning_keeps_the_best_and_the_newest_copies(url: str) -> None:
    folder = RemoteFolder(url)
    for number in range(1, 6):
        part = remote_folder.RemotePart("", number, 0, 0, "a")
        folder.commit(remote_folder.RemoteCheckpoint(number, 10 * number, (part,), copied(str(number))))
    (folder_of(url) / "00000002-step-20/CHECKPOINT.json").write_bytes(b"{torn")
    (folder_of(url) / "00000006-step-60").mkdir()  # an upload that a running process has begun
    folder.prune(2, 10)
    names = sorted(path.name for path in folder_of(url).iterdir())
    assert names == ["00000001-step-10", "00000004-step-40", "00000005-step-50", "00000006-step-60"]


@pytest.mark.parametrize(
    ("best", "left"), [(40, [30, 40, 50]), (50, [30, 40, 50]), (None, [40, 50]), (20, [20, 40, 50])]
)
def test_best_copy_is_kept_in_addition_to_the_newest(best: int | None, left: list[int], url: str) -> None:
    folder = RemoteFolder(url)
    for number in range(1, 6):
        part = remote_folder.RemotePart("", number, 0, 0, "a")
        folder.commit(remote_folder.RemoteCheckpoint(number, 10 * number, (part,), copied(str(number))))
    folder.prune(2, best)
    assert [each.step for each in folder.checkpoints()] == left[::-1]
    assert sorted(path.name for path in folder_of(url).iterdir()) == [
        f"0000000{step // 10}-step-{step}" for step in left
    ]


def test_one_process_uploads_the_parts_of_former_ranks(tmp_path: Path, url: str) -> None:
    """Two ranks saved checkpoints while the URL was unreachable. One process then uploads the parts of both ranks."""
    run = unpack("ranks", tmp_path)
    config = load_config(run.folder / "run.toml", overrides=[f'checkpoint.save_copy="{url}"']).config
    told: list[str] = []
    copier = remote_copier.RemoteCopier(resolve_checkpoint(config), told.append, 0, lambda item: [item])
    copier.finish()
    copies = RemoteFolder(url).checkpoints()
    sizes = {copy.step: format_size(copy.nbytes) for copy in copies}
    assert [re.sub(r"in [0-9.]+ s$", "in N s", text) for text in told] == [
        f"copying the checkpoint of step 1, 2 to '{url}'",
        *(f"copied checkpoint at step {step} to '{url}': {sizes[step]}, compared, in N s" for step in (1, 2)),
    ]
    again = remote_copier.RemoteCopier(resolve_checkpoint(config), told.append, 0, lambda item: [item])
    again.finish()
    assert len(told) == 3, "everything is copied"
    assert [each.step for each in copies] == [2, 1]
    names = sorted(str(path.relative_to(folder_of(url))) for path in folder_of(url).rglob("OBJECTS.json"))
    ranks = ("rank00000", "rank00001")
    assert names == [f"0000000{step}-step-{step}/{rank}/OBJECTS.json" for step in (1, 2) for rank in ranks]
    assert all([part.path for part in each.parts] == list(ranks) for each in copies)
    assert [list(problems) for _, problems in remote_folder.UrlInventory(url).verify(None)] == [[], []]


def test_best_checkpoint_is_restored_with_the_newest(run: SavedRun, url: str) -> None:
    """The best checkpoint survives the loss of the machine, and becomes the final model as usual."""
    more = '[[data.eval]]\npath = "data.txt"\n[evaluation]\neval_strategy = "steps"\neval_steps = 2\n'

    def config(out: str, steps: int, **tables: str) -> Path:
        path = run.write_config(out=out, steps=steps, **tables)
        text = path.read_text().replace("save_total_limit = 3", "save_total_limit = 1\nload_best_model_at_end = true")
        path.write_text(text.replace("learning_rate = 1e-3", "learning_rate = 0.5") + more)
        return path

    assert run.call("run", config("whole", 10)).exit_code == 0
    assert run.call("run", config("out", 8, **to(url))).exit_code == 0
    before = RemoteFolder(url).checkpoints()
    remove_local_files(run)
    result = run.call("run", config("out", 10, **to(url)), "--allow-config-change")
    assert result.exit_code == 0, result.output
    assert result.output.count("downloading the checkpoint") == 2 == len(before), result.output
    # The newest checkpoint is fetched last, so that it is also the newest on this machine.
    fetched = [int(step) for step in re.findall(r"downloading the checkpoint of step (\d+)", result.output)]
    assert fetched == [before[1].step, 8] and "continuing after step 8 of 10" in result.output
    assert "is gone" not in result.output and weights(run) == weights(run, "whole")


@pytest.mark.parametrize(("save_number", "is_fetched"), [(3, False), (4, False), (5, True)])
def test_copy_is_fetched_if_it_is_of_a_later_save(tmp_path: Path, url: str, save_number: int, is_fetched: bool) -> None:
    """By the clock, which was ahead during the local save, every copy is older."""

    class Checked(Exception):
        pass

    def check(checkpoint: Checkpoint) -> None:
        assert (checkpoint.folder, checkpoint.meta) == (tmp_path / "out/checkpoints", meta)
        raise Checked

    meta = {"step": 7, "saved_at": "2026", "save_number": save_number}
    part = remote_folder.RemotePart("", 1, 0, 0, "a")
    (tmp_path / "out/checkpoints").mkdir(parents=True)
    local = make_state(step=6, saved_at="2099", save_number=4).to_meta()
    write_manifest(tmp_path / "out/checkpoints", Manifest(1, (), local))
    folder = RemoteFolder(url)
    folder.claim(tmp_path / "out", is_empty=False)
    folder.commit(remote_folder.RemoteCheckpoint(1, 7, (part,), Checkpoint(Path(), 1, (), meta)))
    path = tmp_path / "run.toml"
    path.write_text(
        f'task = "pretrain"\noutput_dir = "out"\n[model]\nmodel_name_or_path = "m"\n[[data.train]]\npath = "x.txt"\n'
        f'[checkpoint]\nsave_copy = "{url}"\n'
    )
    spec = resolve_checkpoint(load_config(path).config)
    with pytest.raises(Checked) if is_fetched else contextlib.nullcontext():
        download_newest(spec, print, check)


def test_stop_while_the_url_is_unreachable_saves_the_last_steps(
    run: SavedRun, url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Training waits for a copy that cannot be made. A stop request ends the wait, and the last steps are saved."""

    def refuse(*arguments: Any) -> None:
        raise object_folder.RemoteError("the bucket went away")

    waits = remote_copier.RemoteCopier.wait_until_prunable

    def wait_and_be_stopped(self: Any, outgoing: Any, should_stop: Any) -> None:
        if outgoing and not stops:
            stops.append(True)
            os.kill(os.getpid(), signal.SIGTERM)
        waits(self, outgoing, should_stop)

    stops: list[bool] = []
    monkeypatch.setattr(Upload, "send", refuse)
    monkeypatch.setattr(remote_copier.RemoteCopier, "wait_until_prunable", wait_and_be_stopped)
    monkeypatch.setattr(remote_copier, "LAST_TRY", 2)
    path = run.write_config(**to(url))
    path.write_text(path.read_text().replace("save_total_limit = 3", "save_total_limit = 1"))
    result = run.call("run", path)
    assert result.exit_code == 1 and "after 2 tries" in result.output, result.output
    assert "is replaced by the last one without having been copied" in " ".join(result.output.split())
    monkeypatch.undo()
    result = run.call("run", path)
    assert result.exit_code == 0 and "continuing after step 4 of 6" in result.output, result.output
    assert weights(run) == weights(run, "undisturbed") and steps_at_url(url) == [6]


@pytest.mark.parametrize("way", ["bucket", "credentials", "package", "unknown"])
def test_unusable_url_error_is_clear(run: SavedRun, s3: S3, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    url = "s3://no-such-bucket/run" if way == "bucket" else "nonsense://x" if way == "unknown" else "s3://bucket/run"
    if way == "credentials":
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            monkeypatch.delenv(name)
    with monkeypatch.context() as patch:
        if way == "package":
            patch.setitem(sys.modules, "s3fs", None)
            patch.delitem(import_module("fsspec.registry")._registry, "s3", raising=False)
        result = run.run(checkpoint=f'save_copy = "{url}"')
    text = {
        "bucket": "The specified bucket does not exist. Is the name of the bucket right?",
        "credentials": "No credentials were found: set AWS_ACCESS_KEY_ID",
        "package": "pip install s3fs",
        "unknown": "Name a URL that fsspec knows",
    }[way]
    assert result.exit_code == 1 and "Traceback" not in result.output
    assert text in " ".join(result.output.split()), result.output
    assert not (run.out / "checkpoints").exists(), "it ended before the first step"
    if way != "package":
        checked = run.call("check", run.folder / "run.toml")
        assert checked.exit_code == 2 and text in " ".join(checked.output.split()), checked.output


@pytest.mark.parametrize(
    "url",
    [
        "s3://key:hunter2@bucket/run",
        "s3://key:a/hunter2@bucket/run",
        "https://account.net/run?sig=hunter2",
        "ftp://me:hunter2@host/x?y=hunter2",
    ],
)
def test_a_secret_in_a_url_is_refused_and_never_shown(run: SavedRun, url: str) -> None:
    result = run.run(checkpoint=f'save_copy = "{url}"')
    assert result.exit_code == 2 and "hunter2" not in result.output, result.output
    assert "those come from the environment" in " ".join(result.output.split())
    assert not run.out.exists()


def test_missing_permissions_are_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    folder = RemoteFolder("memory://somewhere")

    def refuse(*arguments: Any, **options: Any) -> None:
        raise PermissionError("Access Denied")

    monkeypatch.setattr(folder.objects._files, "ls", refuse)
    with pytest.raises(
        object_folder.RemoteError, match=r"Access Denied.*the right to list, read, write and delete there"
    ):
        folder.checkpoints()


def test_object_names_outside_the_folder_are_refused(tmp_path: Path) -> None:
    """A writer at the URL can choose any object name, but nothing is written outside of the fetched folder."""
    folder = RemoteFolder(f"file://{tmp_path}/away")
    text = json.dumps({"format": 1, "objects": {"../../escaped": [1, "00"]}}).encode()
    part = remote_folder.RemotePart("", 1, 1, 1, hashlib.sha256(text).hexdigest())
    copy = remote_folder.RemoteCheckpoint(1, 2, (part,), copied("1"))
    folder.commit(copy)
    (tmp_path / "away" / copy.name / "OBJECTS.json").write_bytes(text)
    with pytest.raises(object_folder.RemoteError, match="would lie outside of the checkpoint"):
        copy_transfer.fetch(folder, folder.checkpoints()[0], tmp_path / "out", 0)
    assert not list(tmp_path.rglob("escaped"))


@pytest.mark.parametrize(
    "objects",
    [
        None,
        [],
        {"a\0b": [1, "00"]},
        {"a": ["many", "00"]},
        {"a": [-1, "00"]},
        {"a": [1, 7]},
        {"a": 1},
        {"a": [1, "00", 3]},
        "text",
    ],
)
def test_invalid_object_lists_are_refused(tmp_path: Path, objects: Any) -> None:
    folder = RemoteFolder(f"file://{tmp_path}/away")
    text = json.dumps({"format": 1} if objects is None else {"format": 1, "objects": objects}).encode()
    part = remote_folder.RemotePart("", 1, 1, 1, hashlib.sha256(text).hexdigest())
    copy = remote_folder.RemoteCheckpoint(1, 2, (part,), copied("1"))
    folder.commit(copy)
    (tmp_path / "away" / copy.name / "OBJECTS.json").write_bytes(text)
    with pytest.raises(object_folder.DamagedError, match=r"OBJECTS\.json' (is invalid|names)"):
        copy_transfer.fetch(folder, folder.checkpoints()[0], tmp_path / "out", 0)
    assert len(list(folder.problems(folder.checkpoints()[0]))) == 1


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("generation", "1"),
        ("nbytes", "many"),
        ("nbytes", -1),
        ("num_objects", None),
        ("path", 7),
        ("sha256", 7),
        ("elements", [1]),
        ("elements", {"a": "b"}),
        ("lanes", "x"),
        ("meta", []),
        ("parts", {}),
    ],
)
def test_copy_with_an_invalid_document_is_ignored(tmp_path: Path, field: str, value: Any) -> None:
    folder = RemoteFolder(f"file://{tmp_path}/away")
    body: dict[str, Any] = {"parts": [{"path": "", "generation": 1, "num_objects": 1, "nbytes": 1, "sha256": "0"}]}
    body |= {"meta": {}, "lanes": 1, "elements": {}}
    (body if field in body else body["parts"][0])[field] = value
    path = tmp_path / "away" / "00000001-step-2" / remote_folder.CHECKPOINT_NAME
    path.parent.mkdir(parents=True)
    path.write_text(json.dumps({"format": 1, "sha256": remote_folder._body_sha256(body), "body": body}))
    assert folder.checkpoints() == []


def test_only_known_files_enter_the_folder_of_a_run(tmp_path: Path) -> None:
    names = [".hidden", "final/evil.py", "checkpoints/EVIL", "a/reference/x", "reference/deep/x", "status.json"]
    for name in [*names, "reference/ab.safetensors", "metrics.jsonl", "trackers.json"]:
        (tmp_path / "got" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "got" / name).write_text("theirs")
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "metrics.jsonl").write_text("mine")
    copy_transfer._restore_run_files(tmp_path / "got", tmp_path / "out")
    found = {path.relative_to(tmp_path / "out").as_posix() for path in (tmp_path / "out").rglob("*") if path.is_file()}
    assert found == {"reference/ab.safetensors", "metrics.jsonl", "trackers.json"}
    assert (tmp_path / "out" / "metrics.jsonl").read_text() == "mine"


def test_damaged_download_leaves_the_folder_of_generations_unlocked(tmp_path: Path) -> None:
    """A caller that keeps the error, and with it the frames of the failed import, can use the folder."""
    with TieredStore([RamTier(MiB, pin_memory=False)], path=str(tmp_path / "got")) as store:
        store.put("a", torch.ones(1000))
        store.commit({"step": 2}).wait(60)
    (chunk,) = (tmp_path / "got").glob("snap/*/a/c/0")
    chunk.write_bytes(bytes(chunk.stat().st_size))
    copy = remote_folder.RemoteCheckpoint(1, 2, (remote_folder.RemotePart("", 1, 1, 1, "0"),), copied("1"))
    with pytest.raises(CorruptBlockError) as kept:
        copy_transfer._import_generations(copy, tmp_path / "got", tmp_path / "out")
    lock_directory(tmp_path / "out").release()
    assert kept.value.key == "a"


def test_a_secret_in_an_error_is_not_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2")
    text = object_folder._mask_secrets(
        "no hunter2 at https://me:pw1234@host/x?X-Amz-Signature=pw1234&a=b: ftp://u:pw1234@h"
    )
    assert "hunter2" not in text and "pw1234" not in text and "a=b" in text
