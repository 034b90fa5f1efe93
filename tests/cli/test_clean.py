"""``megatrain-tier clean`` removes the scratch files of dead runs, and nothing else."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest
import torch
from click.testing import CliRunner, Result

from processes import warm
from tiered import KiB, MiB, NvmeTier, RamTier, TieredStore, format_size
from tiered.durable.manifest import forget_generation

CliModule = Callable[[str], ModuleType]
Run = Callable[..., Result]
NUM_BYTES = 100 * KiB


def make_store(*paths: Path) -> TieredStore:
    tier = NvmeTier(list(paths), 4 * MiB, chunk_bytes=32 * KiB, on_notice=lambda text: None)
    store = TieredStore([RamTier(4 * MiB, pin_memory=False), tier])
    for key in ("layer.0/weight", "layer.0/m"):
        store.register(key, (NUM_BYTES,), torch.uint8, home="nvme")
    write(store, 1)
    return store


def write(store: TieredStore, value: int) -> None:
    for key in ("layer.0/weight", "layer.0/m"):
        with store.acquire(key, "ram", "w") as lease:
            lease.tensor.fill_(value)
        store.evict(key, "ram").wait(60)


def tree(folder: Path) -> dict[str, int]:
    return {
        str(path.relative_to(folder)): path.lstat().st_ino
        for path in folder.rglob("*")
        if path.name not in ("LOCK", "WEAR.json")
    }


def allocated(folder: Path) -> int:
    files = [path for path in folder.rglob("*") if path.name.isdigit() and path.is_file()]
    sizes = {path.lstat().st_ino: path.lstat().st_blocks * 512 for path in files}
    return sum(size for path, size in sizes.items())


@pytest.fixture
def run(cli_module: CliModule) -> Run:
    group = cli_module("main").command_group
    return lambda *words, **options: CliRunner().invoke(group, ["clean", *map(str, words)], **options)


def test_clean_frees_the_scratch_space_of_a_dead_run(tmp_path: Path, run: Run) -> None:
    make_store(tmp_path / "runs/a", tmp_path / "runs/b").close()
    before = allocated(tmp_path)
    listed = run(tmp_path)
    assert listed.exit_code == 2 and "Add --yes" in listed.stderr, listed.output
    runs = tmp_path.resolve() / "runs"
    stores = json.loads(run(tmp_path, "--json").stdout)["stores"]
    assert [(each["path"], each["num_files"]) for each in stores] == [(str(runs / "a"), 4), (str(runs / "b"), 4)]
    sizes = [format_size(each["nbytes"]) for each in stores]
    assert listed.stdout == f"{runs / 'a'}  {sizes[0]} in 4 files\n{runs / 'b'}  {sizes[1]} in 4 files\n"
    assert allocated(tmp_path) == before
    result = run(tmp_path, "--yes")
    assert result.exit_code == 0, result.output
    assert "freed 2" in result.stdout and allocated(tmp_path) == 0
    for path in ("a", "b"):
        assert sorted(os.listdir(tmp_path / "runs" / path)) == ["LOCK", "WEAR.json", "zarr.json"]
    again = run(tmp_path, "--yes")
    assert again.exit_code == 0
    assert again.stdout == f"{runs / 'a'}  nothing to remove\n{runs / 'b'}  nothing to remove\n"
    make_store(tmp_path / "runs/a", tmp_path / "runs/b").close()


def test_clean_keeps_committed_generations(tmp_path: Path, run: Run) -> None:
    with make_store(tmp_path / "a", tmp_path / "b") as store:
        store.commit({"step": 1}).wait(60)
        write(store, 2)
        store.commit({"step": 2}).wait(60)
        write(store, 3)
    snapshots = {
        path: inode for path, inode in tree(tmp_path).items() if re.search(r"/snap|/latest|MANIFEST|STORE", path)
    }
    assert run(tmp_path, "--yes").exit_code == 0
    assert {path: inode for path, inode in tree(tmp_path).items() if not path.endswith("zarr.json")} == {
        path: inode
        for path, inode in [*snapshots.items(), *((p, os.stat(tmp_path / p).st_ino) for p in ("a", "b"))]
        if not path.endswith("zarr.json")
    }
    tiers = [RamTier(4 * MiB, pin_memory=False), NvmeTier([tmp_path / "a", tmp_path / "b"], 4 * MiB)]
    with TieredStore.open(str(tmp_path / "a"), tiers) as store, store.acquire("layer.0/m", "ram") as lease:
        assert set(lease.tensor.tolist()) == {2}


def test_foreign_files_are_kept(tmp_path: Path, run: Run) -> None:
    make_store(tmp_path / "a").close()
    foreign = ["live/layer.0/thesis.tex", "live/layer.0/m/c/notes", ".pool/4096/notes.1", "thesis.tex"]
    foreign = [*(f"a/{name}" for name in foreign), "b/live/c/0"]
    for name in foreign:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("precious")
    (tmp_path / "b/zarr.json").write_text((tmp_path / "a/live/zarr.json").read_text())
    (tmp_path / "b/LOCK").touch()
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside/0").write_text("precious")
    (tmp_path / "a/live/elsewhere").symlink_to(tmp_path / "outside")
    result = run(tmp_path, "--yes")
    assert result.exit_code == 0, result.output
    assert "4 files of other programs stay" in result.stdout and str(tmp_path / "b") not in result.stdout
    for name in [*foreign, "outside/0"]:
        assert (tmp_path / name).read_text() == "precious"
    assert not list((tmp_path / "a/live").rglob("c/0"))


def test_orphaned_generations_are_removed_on_request(tmp_path: Path, run: Run) -> None:
    for name in ("forgetful", "gone"):
        tier = NvmeTier([tmp_path / "drive"], 4 * MiB, on_notice=lambda text: None)
        with TieredStore([RamTier(4 * MiB, pin_memory=False), tier], path=str(tmp_path / name)) as store:
            store.register("weight", (NUM_BYTES,), torch.uint8, home="nvme")
            with store.acquire("weight", "ram", "w") as lease:
                lease.tensor.fill_(1)
            store.commit().wait(60)
    forget_generation(tmp_path / "forgetful", 1)
    shutil.rmtree(tmp_path / "gone")
    snap = tmp_path / "drive/snap"
    assert run(tmp_path, "--yes").exit_code == 0 and len(list(snap.glob("0*"))) == 2, "only on request"
    listed = run(tmp_path, "--generations", "forgotten")
    assert listed.exit_code == 2 and "forgetful' does not list it" in listed.stdout, listed.output
    assert "gone' is missing: kept without --generations all" in listed.stdout
    before = allocated(tmp_path)
    report = json.loads(run(tmp_path, "--generations", "forgotten", "--yes", "--json").stdout)
    removed = {Path(each["path"]).parent.parent.name: each["removed"] for each in report["generations"]}
    assert [each["checkpoints_gone"] for each in report["generations"]].count(True) == 1
    assert removed["forgetful"], "the store's own record is also removed"
    assert report["freed_bytes"] == before - allocated(tmp_path) == NUM_BYTES
    assert [path.name for path in snap.glob("0*")] == ["00000002"]
    assert run(tmp_path, "--generations", "all", "--yes").exit_code == 0 and not list(snap.glob("0*"))


def test_a_store_in_use_is_not_touched(tmp_path: Path, run: Run) -> None:
    make_store(tmp_path / "dead").close()
    nbytes = allocated(tmp_path / "dead")
    store = make_store(tmp_path / "living")
    before = tree(tmp_path / "living")
    result = run(tmp_path, "--yes", "--json")
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    dead, living = report["stores"]
    assert living["in_use_by"].startswith(f"process {os.getpid()} on") and not living["removed"]
    assert dead["removed"] and dead["in_use_by"] is None and dead["nbytes"] == report["freed_bytes"] == nbytes > 0
    assert tree(tmp_path / "living") == before
    with store.acquire("layer.0/m", "ram") as lease:
        assert set(lease.tensor.tolist()) == {1}
    store.close()


def test_a_run_that_starts_after_the_listing_is_not_touched(
    tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_store(tmp_path / "a").close()
    import tiered.tiers.cleanup as leftovers

    real, stores = leftovers.measure_leftovers, []

    def measure_and_start(path: Path) -> leftovers.Leftovers:
        found = real(path)
        stores.append(make_store(path))
        return found

    monkeypatch.setattr(leftovers, "measure_leftovers", measure_and_start)
    result = run(tmp_path, "--yes")
    assert result.exit_code == 1 and f"in use by process {os.getpid()}" in result.stderr
    with stores[0].acquire("layer.0/m", "ram") as lease:
        assert set(lease.tensor.tolist()) == {1}
    stores[0].close()


def test_clean_confirms_on_a_terminal(
    tmp_path: Path, run: Run, cli_module: CliModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_store(tmp_path / "a").close()
    before = allocated(tmp_path)
    monkeypatch.setattr(cli_module("clean"), "confirm", lambda question, as_json: False)
    assert run(tmp_path).exit_code == 2 and allocated(tmp_path) == before > 0
    monkeypatch.setattr(cli_module("clean"), "confirm", lambda question, as_json: True)
    assert run(tmp_path).exit_code == 0 and allocated(tmp_path) == 0


def test_json_output_never_prompts(tmp_path: Path, run: Run) -> None:
    make_store(tmp_path / "a").close()
    result = run(tmp_path, "--json")
    assert result.exit_code == 2
    (store,) = json.loads(result.stdout)["stores"]
    assert store["nbytes"] == allocated(tmp_path) > 0 and not store["removed"]


def test_empty_folder_is_reported(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = run()
    assert result.exit_code == 0 and "no folders of [[tiers.nvme]] in the current folder" in result.stdout
    missing = run(tmp_path / "nowhere")
    assert missing.exit_code == 2 and "does not exist" in missing.stderr


def test_read_only_drive_is_reported(tmp_path: Path, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    make_store(tmp_path / "a").close()

    def refuse(self: Path, missing_ok: bool = False) -> None:
        raise OSError(30, "Read-only file system", str(self))

    monkeypatch.setattr(Path, "unlink", refuse)
    result = run(tmp_path, "--yes")
    assert result.exit_code == 1 and "Read-only file system" in result.stderr
    monkeypatch.undo()
    assert run(tmp_path, "--yes").exit_code == 0


def test_next_run_reports_a_killed_run_and_clean_removes_it(tmp_path: Path, run: Run) -> None:
    script = f"""
import sys
sys.path[:0] = [{str(Path(__file__).parent)!r}, {str(Path(__file__).parents[1])!r}]
from test_clean import *
store = make_store(Path({str(tmp_path / "a")!r}))
print("started", flush=True)
sys.stdin.read()
"""
    root = Path(__file__).parents[2]
    with warm.Popen(
        [sys.executable, "-c", script], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=root
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "started\n"
        assert "in use by process" in run(tmp_path, "--yes").stdout
        process.kill()
        process.wait()
    shutil.copytree(tmp_path / "a", tmp_path / "copy", symlinks=True)
    notices: list[str] = []
    NvmeTier([tmp_path / "copy"], 4 * MiB, on_notice=notices.append).close()
    (text,) = notices
    assert "took over 2" in text and f"process {process.pid} on" in text
    NvmeTier([tmp_path / "copy"], 4 * MiB, on_notice=notices.append).close()
    assert len(notices) == 1, "a successful run is not reported"
    result = run(tmp_path / "a", "--yes")
    assert result.exit_code == 0 and allocated(tmp_path / "a") == 0
