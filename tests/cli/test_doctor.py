"""The command `doctor`: the folders that it measures, its output, the profile that it stores, and its errors."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
from click.testing import CliRunner, Result

from megatrain.extras.doctor import examine, layers
from megatrain.extras.doctor.drives import DriveEffort, TierProbe
from megatrain.machine.profiles import load_profile, profile_path
from tiered import MiB

Call = Callable[..., Result]


@pytest.fixture
def call(cli_module: Callable[[str], ModuleType], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Call:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(examine, "QUICK", DriveEffort(64 * MiB, 0.0, 0.0))
    monkeypatch.setattr(examine, "_QUICK_PROCESSOR", (8 * MiB, 0.0))
    monkeypatch.setattr(examine, "measure_layers", partial(layers.measure_layers, shapes=layers.SHAPES[:1]))
    group = cli_module("main").command_group
    return lambda *arguments: CliRunner().invoke(group, ["doctor", *map(str, arguments)])


@pytest.fixture
def drive(tmp_path: Path) -> Path:
    (tmp_path / "drive").mkdir()
    return tmp_path / "drive"


def test_doctor_measures_prints_and_stores(call: Call, drive: Path) -> None:
    result = call("--quick", drive)
    assert result.exit_code == 0, result.output
    for word in ("RAM ", "AdamW", str(drive), "the tier gets", "page-locking", "stored in"):
        assert word in result.stdout
    assert "\x1b" not in result.output
    assert "measuring" in result.stderr
    assert os.listdir(drive) == []
    machine = load_profile().machine
    assert machine is not None
    assert machine.drive_of(drive) is not None


def test_json_is_one_object(call: Call, drive: Path) -> None:
    result = call("--quick", "--json", drive, drive)
    assert result.exit_code == 0, result.output
    values = json.loads(result.stdout)
    assert [each["path"] for each in values["drives"]] == [str(drive)]
    assert values["stored"] == str(profile_path())
    assert {"severity", "subject", "seen", "advice"} == set(values["findings"][0])


def test_the_paths_of_a_config_are_measured_before_they_exist(call: Call, drive: Path, tmp_path: Path) -> None:
    config = tmp_path / "run.toml"
    config.write_text(
        f"""task = "sft"
output_dir = "out"
[model]
model_name_or_path = "model"
[[data.train]]
path = "chat.jsonl"
[[tiers.nvme]]
path = "{drive / "not" / "yet"}"
"""
    )
    result = call("--quick", "--json", "--config", config)
    assert result.exit_code == 0, result.output
    assert [each["path"] for each in json.loads(result.stdout)["drives"]] == [str(drive)]
    assert os.listdir(drive) == []


@pytest.mark.slow
def test_doctor_measures_the_current_folder_by_default(
    call: Call, drive: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(drive)
    assert [each["path"] for each in json.loads(call("--quick", "--json").stdout)["drives"]] == [str(drive)]


@pytest.mark.parametrize("path", ["/nowhere/at/all", "/proc"])
def test_doctor_rejects_an_unusable_path(call: Call, path: str) -> None:
    result = call("--quick", path)
    assert result.exit_code == 2
    assert result.stderr.startswith(f"error: {path} ")
    assert len(result.stderr.splitlines()) == 1
    assert not profile_path().exists()


def test_ctrl_c_leaves_no_files(call: Call, drive: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupt(self: TierProbe, seconds: float) -> float:
        raise KeyboardInterrupt

    monkeypatch.setattr(TierProbe, "read_and_write", interrupt)
    result = call("--quick", drive)
    assert result.exit_code == 1
    assert "interrupted" in result.stderr
    assert os.listdir(drive) == []
    assert not profile_path().exists()


@pytest.mark.slow
def test_unwritable_cache_is_reported(call: Call, drive: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file")
    result = call("--quick", drive)
    assert result.exit_code == 0
    assert "not stored: " in result.stdout
