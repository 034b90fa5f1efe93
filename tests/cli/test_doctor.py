"""The command `doctor`: the folders that it measures, its output, the profile that it stores, and its errors."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import ModuleType

import pytest
from click.testing import CliRunner, Result

from megatrain.extras.doctor import examine, layers
from megatrain.extras.doctor.drives import DriveEffort, DriveResult, Rates, SustainedWrite, TierProbe
from megatrain.extras.doctor.findings import SystemFacts
from megatrain.extras.doctor.processors import GdsResult, GpuResult, ProcessorResult
from megatrain.machine.file_systems import FileSystem
from megatrain.machine.profiles import load_profile, profile_path
from tiered import GiB, MiB

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


def test_all_results_are_printed(cli_module: Callable[[str], ModuleType], capsys: pytest.CaptureFixture[str]) -> None:
    system = SystemFacts("here", "6.1", "CPU X", 8, 4, None, 0.5, 64 * GiB, 32 * GiB, None, True)
    float32_rates = ({"float32": 2e11}, {"float32": 1e11}, {"float32": 9e9})
    gpu = GpuResult(
        "GPU Y", 24 * GiB, True, 25e9, 20e9, {"bfloat16": 5e13, "float32": 9e11}, None, {"bfloat16": 1e12},
        {"bfloat16": 3e11},
    )  # fmt: skip
    drives = tuple(
        DriveResult(Path(path), FileSystem(device, "ext4", source, path), free * GiB, True, False, 0, rates, sustained)
        for path, device, source, free, rates, sustained in (
            ("/a", "1:1", "/dev/x", 90, Rates(3e9, 2e9, 4e9), SustainedWrite(2e9, 1.9e9, 32 * GiB, 30.0)),
            ("/b", "1:2", "/dev/y", 9, Rates(5e9, 6e9, 7e9), None),
        )
    )
    results = examine.DoctorResults(
        datetime(2026, 1, 1, tzinfo=UTC), True, system,
        ProcessorResult(4, 12e9, {"float32": 1.5e9, "bfloat16": 2.25e9}),
        layers.LayerRates(*float32_rates, 50_000.0), gpu, GdsResult(True, True, ()), drives,
    )  # fmt: skip
    cli_module("doctor")._print(results)
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == [
        "here  CPU X, 8 CPUs, 64.00 GiB RAM (limit 32.00 GiB)",
        "RAM      update 12.00 GB/s   (4 threads)",
        "AdamW    float32 1.50 G params/s  bfloat16 2.25 G params/s",
        "layers   cpu float32 products 200 GFLOP/s  attention 100 GFLOP/s  other operators 9.00 GB/s",
        "layers   gpu bfloat16 products 50.0 TFLOP/s  attention 1.0 TFLOP/s  other operators 300.00 GB/s",
        "layers   gpu float32 products 900 GFLOP/s",
        "host     20 us for each operator of a step",
        "GPU      GPU Y  from RAM 25.00 GB/s  to RAM 20.00 GB/s  (pinned)",
        "/a  ext4 on /dev/x",
        "                      read        write        mixed    sustained",
        "the tier gets    3.00 GB/s    2.00 GB/s    4.00 GB/s    1.90 GB/s",
        "/b  ext4 on /dev/y",
        "                      read        write        mixed    sustained",
        "the tier gets    5.00 GB/s    6.00 GB/s    7.00 GB/s            -",
        "note  threads: torch computes with 4 of 8 usable CPUs, here and in runs",
        "      fix: unset OMP_NUM_THREADS to use all CPUs",
        "ok    page-locking: works, no limit",
        "ok    GPU: GPU Y, 24.00 GiB",
        "ok    GPUDirect Storage: kvikio and nvidia-fs are installed",
        "ok    /a: ext4 with O_DIRECT, 90.00 GiB free",
        "ok    /a: does not slow down during a long write: 32.00 GiB written in 30 s: 2.00 GB/s at the start, "
        "1.90 GB/s at the end",
        "ok    /b: ext4 with O_DIRECT, 9.00 GiB free",
    ]
    slow = layers.LayerRates({"float32": 2e11}, {}, {}, 0.0)
    unlimited = replace(system, ram_limit_bytes=64 * GiB)
    cli_module("doctor")._print(replace(results, system=unlimited, gpu=None, layers=slow, drives=()))
    assert [line.rstrip() for line in capsys.readouterr().out.splitlines()] == [
        "here  CPU X, 8 CPUs, 64.00 GiB RAM",
        "RAM      update 12.00 GB/s   (4 threads)",
        "AdamW    float32 1.50 G params/s  bfloat16 2.25 G params/s",
        "layers   cpu float32 products 200 GFLOP/s",
        "note  threads: torch computes with 4 of 8 usable CPUs, here and in runs",
        "      fix: unset OMP_NUM_THREADS to use all CPUs",
        "ok    page-locking: not needed without a GPU (no limit for this user)",
        "warn  GPU: the machine has an NVIDIA driver, but torch sees no CUDA device",
        "      fix: install a torch built for CUDA, and check CUDA_VISIBLE_DEVICES",
    ]


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
