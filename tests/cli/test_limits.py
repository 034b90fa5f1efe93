"""`run` refuses sizes beyond this machine and unsuitable drives. `check` and `plan` report them. `plan` still plans."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from megatrain.machine.file_systems import file_system_of
from processes.saved_run import NVME, SavedRun, make_run

SHM = Path("/dev/shm")
BEYOND = ("--set", "tiers.ram.size=9000TiB")


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> SavedRun:
    return make_run(tmp_path_factory.mktemp("limits") / "w")


def test_plan_for_a_larger_machine_is_shown_as_not_fitting_here(run: SavedRun) -> None:
    path = run.write_config(more=NVME)
    shown = run.call("plan", path, *BEYOND)
    assert shown.exit_code == 0, shown.output
    assert "\nweights" in shown.stdout and 'tiers.ram.size = "9000TiB" is too large' in shown.stdout
    assert "fits, but not on this machine: `run` would refuse it here." in shown.stdout.splitlines()
    assert "fits." not in shown.stdout.splitlines()
    values = json.loads(run.call("plan", path, "--json", *BEYOND).stdout)
    assert (values["fits"], values["fits_this_machine"]) == (True, False)
    assert [(each["key"], each["kind"]) for each in values["objections"]] == [("tiers.ram.size", "size")]
    sound = json.loads(run.call("plan", path, "--json").stdout)
    assert (sound["fits"], sound["fits_this_machine"], sound["objections"]) == (True, True, [])


@pytest.mark.parametrize("words", [(), ("--dry-run",)])
def test_a_run_beyond_the_machine_is_refused(run: SavedRun, words: tuple[str, ...]) -> None:
    result = run.call("run", run.write_config(more=NVME), *BEYOND, *words)
    assert result.exit_code == 3
    assert "tiers.ram.size" in result.output and "free now" in result.output
    assert ("error: beyond this machine: tiers.ram.size" in result.stderr) == (not words)
    assert result.output.count("free now") == 1, "it is printed once"
    assert not run.out.exists()


def test_check_shows_the_locations_of_drives(run: SavedRun) -> None:
    path = run.write_config(more=NVME + NVME.replace("drive", "other"))
    found = json.loads(run.call("check", path, "--json").stdout)["findings"]
    drives = [each for each in found if each["subject"] == "drive"]
    here = file_system_of(run.folder)
    assert [each["severity"] for each in drives] == ["ok", "ok", "warning"]
    for each, name in zip(drives, ("drive", "other"), strict=False):
        assert all(part in each["text"] for part in (name, here.kind, here.source, here.mount_point, "free"))
    assert "are on one drive" in drives[2]["text"]
    text = run.call("check", path).stdout
    assert text.splitlines()[-1] == "no problems found, 1 warning"


@pytest.mark.skipif(file_system_of(SHM).kind != "tmpfs", reason="/dev/shm is not a tmpfs here")
def test_tmpfs_drive_requires_allow_tmpfs(run: SavedRun, tmp_path_factory: pytest.TempPathFactory) -> None:
    path = run.write_config(out="shm", more=NVME.replace("drive", f"{SHM}/megatrain-tier-{run.folder.parent.name}"))
    refused = run.call("run", path, "--max-steps", "1")
    assert refused.exit_code == 2 and "tiers.nvme.0.path" in refused.stderr and "allow_tmpfs = true" in refused.stderr
    assert run.call("run", path, "--dry-run").exit_code == 2
    assert run.call("check", path).exit_code == 2
    allowed = run.call("run", path, "--dry-run", "--set", "allow_tmpfs=true")
    assert allowed.exit_code == 0, allowed.output
    assert "warning tiers.nvme.0.path" in allowed.stdout and "tmpfs is RAM, not a drive" in allowed.stdout
