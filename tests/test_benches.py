"""Every bench runs at a tiny size. Its rows have all fields and unique names, and all targets except times are met."""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from bench import gpu
from bench.common import Report
from bench.gpu_sides.cases import PARTS, VARIANTS, part_named, write_shape
from bench.gpu_sides.job import Job
from bench.gpu_sides.ours import planned_peak
from bench.gpu_sides.profile import COPIES, KERNELS, busy_s, by_name, events, longest_gaps
from bench.gpu_sides.rows import Rows
from megatrain.config.keys import KEYS
from megatrain.plan.placement import Placement
from processes import warm
from tiered.events import STALL_CAUSES

ROOT = Path(__file__).resolve().parent.parent
BENCH = ROOT / "bench"
LAUNCHER = ROOT / "tests" / "fakes" / "on_virtual_gpu.py"
FIELDS = {"bench", "hardware", "versions", "commit", "T", "name", "value", "unit", "target", "ok", "timing"}

#: Benches that measure resident memory. They run in a new interpreter, which has no memory from other tests.
COLD = ("activations", "large", "process_memory")
#: Options of the smallest run of every bench.
ARGUMENTS = {
    "step": ["--quick", "--steps", "2", "--tokens", "2x1x32"],
    "optimizer": ["--quick", "--sizes", "1", "--rounds", "1"],
    "embed_optimizer": ["--quick", "--rounds", "1", "--tokens", "1x1x16"],
    "freezing": ["--quick"],
    "startup": ["--quick", "--rounds", "1", "--only", "preview", "--old", str(ROOT)],
    "states": ["--quick"],
    "score": ["--quick", "--rounds", "1"],
    "nvme_step": ["--quick", "--tokens", "1x1x32,1x1x64", "--steps", "1", "--rounds", "1"],
    "large": ["--quick", "--only", "moe"],
    "step_bytes": ["--quick", "--only", "unclipped"],
    "links": ["--blocks", "1", "--total", "2", "--rounds", "1"],
    "overlap": ["--quick", "--tokens", "1x1x32", "--steps", "2", "--rounds", "1"],
    "recompute": ["--quick", "--tokens", "1x1x32", "--rounds", "1"],
    "memory_over_time": ["--quick", "--steps", "2"],
    "timeline": ["--quick", "--tokens", "1x1x32", "--steps", "2"],
    "checkpoint": ["--quick", "--sizes", "0.002", "--blocks", "5", "--rounds", "1", "--saves", "1"],
    "many_blocks": ["--quick", "--blocks", "50", "--checkpoints", "3"],
    "export": ["--quick"],
    "activations": ["--quick", "--steps", "1", "--tokens", "1x1x256"],
    "gsm8k": ["--quick", "--steps", "3", "--eval-samples", "5"],
    "plan_accuracy": ["--quick", "--only", "small_on_nvme", "--steps", "3"],
    "process_memory": ["--quick", "--only", "narrow.ram.1024"],
    "gpu": [
        *["--quick", "--device", "cpu", "--steps", "1", "--parts", "rates,7b_4k_equal", "--profile"],
        *["--megatrain", str(ROOT / "tests" / "fakes" / "stand_in_megatrain")],
    ],
    "ranks": ["--quick", "--steps", "1", "--tokens", "4x1x32", "--placements", "nvme"],
    "compare/ranks": ["--quick", "--rounds", "1", "--tokens", "2x1x32", "--sides", "ours"],
    "compare/disk_offload": ["--quick", "--passes", "2", "--new-tokens", "2", "--prompts", "2"],
    "compare/deepspeed": ["--quick", "--rounds", "1", "--tokens", "1x1x32", "--sides", "ours_bf16,ours_fp32"],
}


@functools.cache
def run(name: str, *words: str) -> list[dict[str, Any]]:
    """Run a bench once, in a scratch folder that it must leave empty, and return its rows."""
    with tempfile.TemporaryDirectory() as folder:
        rows = run_in(name, Path(folder), *words)
        assert list(Path(folder).iterdir()) == []
    return rows


def run_in(name: str, scratch: Path, *words: str) -> list[dict[str, Any]]:
    command = [sys.executable, str(BENCH / f"{name}.py"), "--json", "--scratch", str(scratch), *ARGUMENTS[name], *words]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    if name in COLD:
        done = subprocess.run(command, env=environment, cwd=scratch, capture_output=True, text=True, timeout=280)
    else:
        done = warm.run(command, env=environment, cwd=scratch, timeout=280, with_children=True)
    assert done.returncode == 0, done.stderr + done.stdout
    return [json.loads(line) for line in done.stdout.splitlines()]


def test_every_bench_is_run_here() -> None:
    programs = {
        path.relative_to(BENCH).with_suffix("").as_posix()
        for path in BENCH.rglob("*.py")
        if '__name__ == "__main__"' in path.read_text(encoding="utf-8")
    }
    assert programs == set(ARGUMENTS)


#: Slow benches. `compare/ranks` starts three new interpreters, and the bench `ranks` already covers this project's
#: side. Another test runs `compare/disk_offload`.
SLOW = ("compare/ranks", "compare/disk_offload")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in ARGUMENTS]
)
def test_rows(name: str) -> None:
    rows = run(name)
    assert rows
    assert all(set(row) == FIELDS and row["bench"] == name for row in rows)
    assert all((row["ok"] is None) == (row["target"] is None) for row in rows)
    assert [row for row in rows if row["ok"] is False and not row["timing"]] == []
    assert len({(row["name"], row["T"]) for row in rows}) == len(rows)


def test_step_compares_the_sides() -> None:
    sides = ("ours_ram", "ours_nvme", "plain", "plain_keeps")
    rows = {row["name"]: row for row in run("step")}
    assert {row["T"] for row in rows.values()} == {64}
    assert all(rows[f"{side}.step"]["value"] > 0 for side in sides)
    assert rows["ratio.ours_ram/plain"]["target"] == 1.10
    assert rows["ours_nvme.nvme->ram.moved"]["value"] > 0  # the drive is used
    assert rows["loss.steps_that_differ_by_placement"]["value"] == 0


@pytest.mark.slow
def test_process_memory_is_predicted_for_long_rows() -> None:
    rows = {row["name"]: row for row in run("process_memory", "--only", "narrow.ram.16384")}
    assert rows["narrow.ram.16384.ratio"]["ok"], rows
    assert rows["narrow.ram.16384.planned.tier"]["value"] > 128 << 20


@pytest.mark.slow
def test_step_measures_the_memory_of_each_side() -> None:
    rows = {row["name"]: row["value"] for row in run("step", "--memory")}
    for side in ("ours_ram", "ours_nvme", "plain", "plain_keeps"):
        assert rows[f"{side}.process.peak"] > rows[f"{side}.process.before"] > 0


def test_embedded_optimizer_matches_torch() -> None:
    rows = {row["name"].split(".", 2)[2]: row for row in run("embed_optimizer")}
    for clipping in ("free", "clipped"):
        assert rows[f"{clipping}.ratio.step.tiered/torch_fused"]["target"] == 1.0
        assert all(rows[f"{clipping}.loss.{side}"]["ok"] for side in ("tiered", "offload"))
    for peer in ("torchao", "bitsandbytes"):
        assert f"free.{peer}.step" in rows or rows[f"{peer}.step"]["unit"].startswith("skipped: "), peer


@pytest.mark.slow
def test_rank_traffic_and_losses_match_plan_and_one_process() -> None:
    rows = {row["name"]: row["value"] for row in run("ranks")}
    assert rows["nvme.1x2.steps_that_differ"] == 0
    for link in ("ram->ranks", "nvme->ram"):
        assert min(rows[f"nvme.1x2.{link}.planned"]) > 0 == rows[f"nvme.1x2.{link}.moved-planned"]
    assert rows["planned.1x2.4096.ratio.efficiency/one_gpu"] > 0 < rows["planned.2x1.4096.gpu->hosts.planned"]


@pytest.mark.slow
def test_recompute_modes_are_compared() -> None:
    rows = {row["name"]: row["value"] for row in run("recompute")}
    layers = {name: (rows[f"{name}.layers_kept"], rows[f"{name}.layers_saving"]) for name in ("full", "nvme", "none")}
    assert layers == {"full": (0, 0), "nvme": (0, 4), "none": (4, 0)}
    flops = [rows[f"{name}.hardware_flops"] for name in ("whole", "full", "selective", "none")]
    assert flops[0] > flops[1] > flops[2] == flops[3] and rows["selective.hardware_per_model"] == 1.0
    assert rows["nvme.moved"] > rows["full.moved"] == 0
    assert rows["filled.moved"] == rows["streamed.moved"] > 0 == rows["filled.layers_saving"]  # without measured rates
    assert rows["ratio.step.none/whole"] > 0 and rows["none/full.blocks_that_differ"] == 0


@pytest.mark.slow
def test_nvme_steps_are_compared_with_both_bounds() -> None:
    rows = {(row["name"], row["T"]): row["value"] for row in run("nvme_step")}
    for tokens in (32, 64):
        for name in ("compute_alone", "bytes_over_rate", "nvme.step", "ratio.step/bound", "nvme->ram.moved"):
            assert rows[name, tokens] > 0, name
        assert rows["loss.turns_that_differ_by_placement", tokens] == 0
    assert ("crossing.measured", None) in rows and ("crossing.formula", None) in rows


def test_links_moves_the_same_bytes_through_every_tier_and_peer() -> None:
    rows = {row["name"]: row["value"] for row in run("links")}
    assert rows["1MiB.bytes_per_measurement"] == 2 * 2**20
    for side in ("tier_off", "tier_resume", "tier_always", "zarr", "safetensors"):
        assert all(rows[f"{operation}.1MiB.{side}.rate"] > 0 for operation in ("read", "write")), side
    for side in ("tier_off", "tier_resume", "tier_always"):
        assert rows[f"mixed.1MiB.{side}.cpu"] >= 0
        assert rows[f"1MiB.{side}.wrong_blocks"] == 0


def test_links_reports_missing_peers_with_reasons() -> None:
    rows = {row["name"]: row["value"] for row in run("links")}
    peers = ("fio_libaio_1M_qd32", "kvikio", "deepspeed_aio_1M_qd32_x1")
    assert all(f"read.1MiB.{peer}.rate" in rows or rows[f"1MiB.{peer}.skipped"] for peer in peers)
    assert ("read.1MiB.ratio.tier_off/fio" in rows) == ("read.1MiB.fio_libaio_1M_qd32.rate" in rows)


@pytest.mark.slow
def test_deepspeed_comparison_runs_our_sides_in_separate_processes() -> None:
    rows = {row["name"]: row["value"] for row in run("compare/deepspeed")}
    for side in ("ours_bf16", "ours_fp32"):
        assert rows[f"{side}.step"] > 0
        assert rows[f"{side}.losses"][1] < rows[f"{side}.losses"][0]  # each step has the same tokens
    assert rows["ours_bf16.memory_for_state"] < 12 * rows["ours_bf16.parameters"]  # some of the state is not in RAM


def test_comparison_without_deepspeed_is_reported() -> None:
    command = [sys.executable, str(BENCH / "compare" / "deepspeed.py"), "--json", "--python", "/nowhere/python"]
    done = warm.run(command, timeout=200)
    assert done.returncode == 0, done.stderr
    rows = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["name"] for row in rows] == ["deepspeed.skipped"]
    assert "/nowhere/python" in rows[0]["value"]


@pytest.mark.slow
def test_disk_offload_bench_compares_with_accelerate() -> None:
    rows = {row["name"]: row["value"] for row in run("compare/disk_offload")}
    if "accelerate.skipped" in rows:
        pytest.skip(rows["accelerate.skipped"])
    for task in ("score", "generate"):
        for side in ("ours", "accelerate", "accelerate_cached"):
            assert rows[f"{task}.{side}.seconds"] > 0
        assert rows[f"{task}.ours.moved_bytes"] > 0 < rows[f"{task}.ratio.accelerate/ours"]
    assert rows["score.tokens"] > 0 < rows["generate.tokens"] and 0 < rows["accelerate.offloaded"] < rows["weights"]


@pytest.mark.slow
def test_sides_on_one_device_agree_and_match_the_plan() -> None:
    rows = {row["name"]: row for row in run("gpu", "--parts", "rates,7b_4k_equal,plain,20b_nvme,long_32k")}
    assert rows["7b_4k_equal.ratio.ours/megatrain"]["target"] == 2.5 and rows["plain.ratio.ours/plain"]["target"] == 1.0
    for part, sides in {
        "7b_4k_equal": ("ours", "megatrain"),
        "plain": ("ours", "plain"),
        "long_32k": ("ours",),
    }.items():
        for side in sides:
            assert rows[f"{part}.{side}.rate"]["value"] > 0 < rows[f"{part}.{side}.peak.peak_rss"]["value"]
            assert rows[f"{part}.{side}.losses"]["value"] == rows[f"{part}.ours.losses"]["value"]
        assert 0 < rows[f"{part}.ours.share_of_matmul_rate"]["value"] < 1
    assert rows["20b_nvme.ours.nvme->ram.moved"]["value"] > 0  # the drive is used
    assert rows["20b_nvme.ours.home.nvme.optimizer"]["value"] > 0
    assert rows["7b_4k_equal.ours.predicted_step"]["value"] > 0 < rows["rates.drive.mixed"]["value"]


def on_virtual_gpu(folder: Path, *words: str) -> dict[str, dict[str, Any]]:
    """Run `gpu.py` at a tiny size on a software GPU that is too small for the whole model. Return its rows by name."""
    out = folder / "made" / "rows.jsonl"
    command = [sys.executable, str(LAUNCHER), str(BENCH / "gpu.py"), "--quick", "--device", "cuda", "--steps", "1"]
    command += ["--tables", '{"tiers": {"gpu": {"size": "2600KiB"}}}', "--scratch", str(folder), "--out", str(out)]
    done = warm.run([*command, *words], cwd=folder, timeout=500, with_children=True)
    assert done.returncode == 0, done.stderr + done.stdout
    return {row["name"]: row for row in map(json.loads, out.read_text().splitlines())}


@pytest.mark.slow  # the next test runs the same program
def test_our_side_runs_on_a_virtual_gpu(tmp_path: Path) -> None:
    rows = on_virtual_gpu(tmp_path, "--parts", "14b", "--traces", str(tmp_path / "traces"))
    assert rows["14b.ours.rate"]["value"] > 0 < rows["14b.ours.peak.device_bytes"]["value"]
    assert rows["14b.ours.ram->gpu.moved"]["ok"] and rows["14b.ours.ram->gpu.moved"]["value"] > 0
    events = json.loads((tmp_path / "traces" / "14b.json").read_text())["traceEvents"]
    kinds = {event["ph"] for event in events}
    assert "X" in kinds and "C" not in kinds, "bytes in use are not asked at every op of a step that is measured"
    assert rows["14b.ours.trace_is_exact"]["ok"]
    assert all(len(rows[f"14b.ours.num_drops.{tier}"]["value"]) == 1 for tier in ("gpu", "ram"))
    for part in ("plan", "warm_up", "populate", "pin", "fill"):
        assert rows[f"14b.ours.start.{part}"]["value"] > 0, part
    assert all(rows[f"14b.ours.start.{part}_per_gb"]["value"] > 0 for part in ("populate", "pin", "fill"))
    assert 0 < rows["14b.ours.real/planned_peak.gpu"]["value"] < 2
    assert all(rows[f"14b.ours.stall_{cause}"]["value"] >= 0 for cause in STALL_CAUSES)
    assert rows["14b.ours.updated_on_host"]["value"] > 0 < rows["14b.ours.updated_on_gpu"]["value"]
    assert rows["14b.ours.host_update_rate"]["value"] > 0


def test_step_is_profiled_on_a_virtual_gpu(tmp_path: Path) -> None:
    """torch cannot profile a software GPU, so the rows list host operators. The profiled step is not timed."""
    words = ["--parts", "7b_4k+bf16_gradients", "--profile", "--traces", str(tmp_path / "traces")]
    found = {name: row["value"] for name, row in on_virtual_gpu(tmp_path, *words).items()}
    start = "7b_4k+bf16_gradients.ours."
    assert len(found[f"{start}steps"]) == 1 and len(found[f"{start}losses"]) == 2
    rows = {name.removeprefix(f"{start}profile."): value for name, value in found.items() if ".profile." in name}
    assert rows["step"] > rows["kernels.busy"] > 0
    assert rows["kernels.span"] == pytest.approx(rows["kernels.busy"] + rows["gaps"])
    longest = [value for name, value in rows.items() if re.fullmatch(r"kernel\.\d+", name)]
    assert longest == sorted(longest, reverse=True) and 5 < len(longest) <= 40 and rows["kernel.others"] >= 0
    trace = tmp_path / "traces" / "7b_4k+bf16_gradients.profile.json.gz"
    assert len(events(trace, ["cpu_op"])) == rows["kernels"]
    assert found[f"{start}ram->gpu.moved"] > 0, "planned bytes are moved bytes, the profiled step included"


def test_gaps_are_times_without_kernels(tmp_path: Path) -> None:
    """The trace is in torch's format: three kernels on two streams (the last runs alone) and an overlapping copy."""
    bars = [
        ("kernel", "gemm", 1000.0, 500.0),
        ("kernel", "norm", 1400.0, 200.0),  # on another stream, until 1600
        ("kernel", "gemm", 2600.0, 400.0),
        ("gpu_memcpy", "Memcpy HtoD (Pinned -> Device)", 1500.0, 300.0),
        ("cpu_op", "aten::mm", 0.0, 9000.0),
    ]
    found = [{"ph": "X", "cat": cat, "name": name, "ts": ts, "dur": dur} for cat, name, ts, dur in bars]
    path = tmp_path / "trace.json"
    path.write_text(json.dumps({"traceEvents": [{"ph": "M", "name": "process_name"}, *found]}))
    kernels = events(path, KERNELS)
    copies = events(path, COPIES)
    assert busy_s(kernels) == pytest.approx(1000e-6)  # 1000 to 1600 and 2600 to 3000
    assert busy_s([*kernels, *copies]) == pytest.approx(1200e-6)
    (gap,) = longest_gaps(kernels, 5)
    assert gap.seconds == pytest.approx(1000e-6) and gap.before == "gemm"
    assert by_name(kernels) == {"gemm": (pytest.approx(900e-6), 2), "norm": (pytest.approx(200e-6), 1)}


def test_part_with_variants_has_only_our_side_and_changed_tables() -> None:
    part = part_named("7b_4k_equal+bf16_gradients+any_kernel")
    assert part.sides == ("ours",) and part.target is None
    assert part.tables == {
        "model": {"use_liger_kernel": False},
        "training": {"recompute": "full"},
        "precision": {"grad_dtype": "bfloat16"},
        "full_determinism": False,
    }
    tables = part_named("long_32k+compile").tables["model"]
    assert tables == {"use_liger_kernel": False, "mlp_rows": 4096, "compile": True}
    assert PARTS["7b_64k"].rate == 12_000 and part_named("7b_64k+eager").rate is None
    for name in VARIANTS:  # each changes only existing keys
        tables = part_named(f"7b_4k+{name}").tables
        texts = {f"{table}.{key}" if key else table for table, key in _keys(tables)}
        assert texts <= KEYS.keys(), texts
    for wrong in ("8b_4k", "7b_4k+faster"):
        with pytest.raises(KeyError):
            part_named(wrong)


def _keys(tables: Any) -> list[tuple[str, str]]:
    return [(name, key) for name, table in tables.items() for key in (table if isinstance(table, dict) else ("",))]


def fifteen(folder: Path, *words: str, **variables: str) -> tuple[int, str, Path]:
    """Run `gpu_fifteen.sh` at a tiny size; the first word is its CALL. Return exit status, log and result folder."""
    out = folder / "out"
    command = ["bash", str(BENCH / "gpu_fifteen.sh"), "--quick", words[0], str(out), *words[1:]]
    environment = {**os.environ, "PYTHON": sys.executable, "TMPDIR": str(folder), "OMP_NUM_THREADS": "1", **variables}
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=2500)
    assert done.returncode in (0, 1), done.stderr
    return done.returncode, (out / "log.txt").read_text(), out


@pytest.mark.slow
@pytest.mark.timeout(4000)
def test_calls_a_and_b_of_the_gpu_script_succeed(tmp_path: Path) -> None:
    stand_in = ROOT / "tests" / "fakes" / "stand_in_megatrain"
    status, log, out = fifteen(tmp_path, "a", str(stand_in), CALL_S="2400")
    assert status == 0 and log.endswith("0 lines failed\n"), log
    traces = {f"{part}.{kind}json.gz" for part in ("7b_64k", "7b_4k") for kind in ("", "profile.")}
    texts = {"gpu.jsonl", "machine.txt", "tests.txt", "log.txt"}
    assert {path.name for path in out.iterdir()} == texts | traces, "eight files, as many as come back"
    rows = {row["name"]: row for row in map(json.loads, (out / "gpu.jsonl").read_text().splitlines())}
    for part in ("7b_64k", "7b_4k", "7b_64k_equal", "7b_16k"):
        assert rows[f"{part}.ours.rate"]["value"] > 0, part
    assert rows["7b_64k.ours.rate"]["target"] == 12_000 and rows["7b_64k_equal.megatrain.rate"]["value"] > 0
    assert rows["7b_64k.ours.profile.kernels.busy"]["value"] > 0 < rows["7b_4k.ours.profile.kernels.busy"]["value"]
    facts, tests = (out / "machine.txt").read_text(), (out / "tests.txt").read_text()
    assert "Mem:" in facts and "NUMA node(s)" in facts and "transparent_hugepage/enabled" in facts and "torch" in facts
    assert re.search(r"PASSED.*\n(?s:.*)\d passed", tests), tests
    assert "2 steps, losses" in log
    assert not [path for path in tmp_path.iterdir() if path.name.startswith("tmp.")], "no scratch is left"
    status, log, out = fifteen(tmp_path, "b", CALL_S="1200")
    assert status == 0, log
    rows = {row["name"]: row for row in map(json.loads, (out / "gpu.jsonl").read_text().splitlines())}
    assert rows["14b.ours.rate"]["value"] > 0 < rows["long_32k.ours.rate"]["value"]


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_other_calls_of_the_gpu_script_succeed(tmp_path: Path) -> None:
    for call in ("tests", "sanitizer", "probe", "plain,7b_4k+any_kernel"):
        status, log, out = fifteen(tmp_path, call)
        assert status == 0, log
    assert "2 steps, losses" in (out / "tests.txt").read_text()
    rows = {row["name"]: row for row in map(json.loads, (out / "gpu.jsonl").read_text().splitlines())}
    assert rows["plain.ours.rate"]["value"] > 0 < rows["7b_4k+any_kernel.ours.rate"]["value"]


@pytest.mark.slow  # test_call_ends_if_the_tiny_model_fails is similar
def test_a_call_continues_after_failed_lines_and_reports_them(tmp_path: Path) -> None:
    """The first call has no time for any command. In the second, importing numba fails until a wheel is unpacked."""
    late = tmp_path / "late"
    late.mkdir()
    status, log, _ = fifteen(late, "b", CALL_S="1")
    assert status == 1 and "gpu.py 14b --steps 1" in log and "no time left" in log

    packages = tmp_path / "packages"
    packages.mkdir()
    (packages / "numba.py").write_text("import older_numpy")
    write_wheel(tmp_path / "wheels", "some_library")
    write_wheel(tmp_path / "wheels" / "numpy", "older_numpy")
    variables = {"WHEELS": str(tmp_path / "wheels"), "PYTHONPATH": str(packages)}
    status, log, out = fifteen(tmp_path, "facts", **variables)
    assert status == 0, log
    assert "unpack wheels: exit status 0" in log and "numba cannot be imported: ModuleNotFoundError" in log
    assert "import numba, with the other numpy: exit status 0" in log
    assert "torch" in (out / "machine.txt").read_text()


@pytest.mark.slow  # test_too_large_files_are_not_returned also runs the script
def test_call_ends_if_the_tiny_model_fails(tmp_path: Path) -> None:
    """numba cannot be imported, and there is no wheel that would fix this."""
    (tmp_path / "numba.py").write_text("raise ImportError('no numba here')")
    status, log, out = fifteen(tmp_path, "a", PYTHONPATH=str(tmp_path), CALL_S="300")
    assert status == 1 and "two steps of a tiny model, each launch awaited: exit status 1" in log
    assert "gpu.py" not in log and not (out / "gpu.jsonl").exists()


def test_too_large_files_are_not_returned(tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    for name, megabytes in {"small.json.gz": 1, "large.json.gz": 9, "larger.json.gz": 10}.items():
        (out / name).write_bytes(os.urandom(megabytes << 20))
    status, log, _ = fifteen(tmp_path, "facts")
    assert status == 0 and "larger.json.gz, as all files have more than 15 MB" in log
    assert {path.name for path in out.iterdir()} == {"small.json.gz", "large.json.gz", "log.txt", "machine.txt"}


def write_wheel(folder: Path, name: str) -> None:
    """Write a wheel with one empty module."""
    folder.mkdir(parents=True, exist_ok=True)
    about = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(folder / f"{name}-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr(f"{name}.py", "")
        wheel.writestr(f"{about}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        wheel.writestr(f"{about}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{about}/RECORD", "")


@pytest.mark.parametrize("call", ["a", "b"])
@pytest.mark.parametrize("has_room", [True, False])
def test_command_time_limits_fit_within_the_call(call: str, has_room: bool) -> None:
    """Otherwise, slow commands would leave no time for the last one. Commands that only use spare time do not count."""
    script = (BENCH / "gpu_fifteen.sh").read_text()
    (call_s,) = map(int, re.findall(rf"\b{call}\) call_s=\$\{{CALL_S:-(\d+)\}}", script))
    (lines,) = re.findall(rf"(?ms)^  {call}\)\n(.*?);;", script)
    lines = re.sub(r"\$\(\(has_room \? (\d+) : (\d+)\)\)", r"\1" if has_room else r"\2", lines)
    limits = [int(re.findall(r'"unpack wheels" (\d+) ', script)[0])]
    for line in lines.splitlines():
        is_left_out = (
            "call_s - SECONDS" in line or "LAUNCH_BLOCKING" in line or (not has_room and "((!has_room))" in line)
        )
        limits += [] if is_left_out else map(int, re.findall(r'(?:\brun "[^"]+"|\bgpu) (\d+) ', line))
    assert len(limits) >= (5 if call == "a" and has_room else 2) and sum(limits) < call_s


def test_gpu_script_rejects_wrong_arguments(tmp_path: Path) -> None:
    script = str(BENCH / "gpu_fifteen.sh")
    for words, expected in {
        ("a",): "CALL OUT [MEGATRAIN]",
        ("a", "out", "nowhere"): "there is no folder nowhere",
    }.items():
        done = subprocess.run(["bash", script, *words], cwd=tmp_path, capture_output=True, text=True, timeout=60)
        assert done.returncode == 2 and expected in done.stderr


def test_terminated_bench_keeps_finished_steps(tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    command = [sys.executable, str(BENCH / "gpu.py"), "--quick", "--device", "cpu", "--parts", "14b,long_32k"]
    command += ["--steps", "2000", "--scratch", str(tmp_path), "--out", str(out)]
    with warm.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, with_children=True) as bench:
        deadline_s = time.monotonic() + 150
        try:
            while not any("total_s" in path.read_text() for path in tmp_path.glob("*/14b/ours/result.json")):
                assert time.monotonic() < deadline_s and bench.poll() is None
                time.sleep(0.1)
        finally:
            bench.terminate()
        printed, _ = bench.communicate(timeout=100)
    assert bench.returncode == 1 and "Traceback" not in printed, printed
    rows = {row["name"]: row["value"] for row in map(json.loads, out.read_text().splitlines())}
    assert rows["14b.ours.rate"] > 0 and "received SIGTERM" in rows["14b.ours.failed"]
    assert "out of time" in rows["long_32k.ours.skipped"]
    assert list(tmp_path.iterdir()) == [out], "the side's process is gone, and so is its folder"


@pytest.mark.slow
def test_every_part_runs_on_a_virtual_gpu(tmp_path: Path) -> None:
    stand_in = ROOT / "tests" / "fakes" / "stand_in_megatrain"
    rows = on_virtual_gpu(tmp_path, "--megatrain", str(stand_in), "--cache", str(tmp_path / "rates"))
    for part in PARTS:
        assert rows[f"{part}.ours.rate"]["value"] > 0 and rows[f"{part}.ours.ram->gpu.moved"]["ok"], part
        assert rows[f"{part}.ours.predicted_step"]["value"] > 0, part
    assert rows["rates.gpu.matmul.bfloat16"]["value"] > 0
    assert rows["plain.ratio.ours/plain"]["value"] > 0 and rows["plain.loss.relative_to.plain"]["ok"]
    assert rows["plain.plain.peak.device_bytes"]["value"] > 0
    assert rows["7b_64k_equal.megatrain.rate"]["value"] > 0 and rows["zero3.zero3.skipped"]["value"]


def test_side_stops_at_its_time_limit_with_all_rows(tmp_path: Path) -> None:
    """There is time for only a few of the requested steps."""
    part = PARTS["plain"].small()
    result = tmp_path / "result.json"
    job = Job(
        "ours", str(write_shape(tmp_path / "model", part, quick=True)), 2, 64, 1, 1000, True, 4.0, "cpu", "float32", 1,
        str(tmp_path / "scratch"), str(result), matmul=64,
    )  # fmt: skip
    code = "from bench.gpu_sides import worker; worker.main()"
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-P", "-c", code, job.to_json()]
    done = warm.run(command, env=environment, timeout=100)
    assert done.returncode == 0, done.stderr
    seen = json.loads(result.read_text())
    assert seen["is_complete"] and seen["num_steps_missing"] == 1001 - len(seen["steps"]) > 0
    assert "ready after" in done.stdout and "step 1 of 1001" in done.stdout


def test_gpu_bench_sides_start_with_cublas_configured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Sides run matmuls before this project requests determinism, and torch reads CUBLAS_WORKSPACE_CONFIG only once."""
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    arguments = argparse.Namespace(
        layers=None,
        quick=True,
        tables={},
        traces=None,
        profile=False,
        steps=1,
        device="cpu",
        ram=None,
        megatrain=None,
        deepspeed=None,
    )
    comparison = gpu.Comparison("7b_4k", PARTS["7b_4k"].small(), tmp_path, arguments, Mock(), time.monotonic() + 60)
    start = subprocess.Popen
    said = [sys.executable, "-c", "import os; print(os.environ['CUBLAS_WORKSPACE_CONFIG'])"]
    monkeypatch.setattr(gpu.subprocess, "Popen", lambda command, **options: start(said, **options))
    assert comparison._run_side("ours", num_left=1) == ({}, "")
    assert (tmp_path / "ours.log").read_text() == ":4096:8\n"


def test_failed_side_reports_the_end_of_its_output(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    """A row holds only three lines of the output, and the log is deleted. So the last 200 lines are printed."""
    arguments = argparse.Namespace(
        layers=None,
        quick=True,
        tables={},
        traces=None,
        profile=False,
        steps=1,
        device="cpu",
        ram=None,
        megatrain=None,
        deepspeed=None,
    )
    comparison = gpu.Comparison("7b_4k", PARTS["7b_4k"].small(), tmp_path, arguments, Mock(), time.monotonic() + 60)
    start = subprocess.Popen
    said = [sys.executable, "-c", "for n in range(500): print('line', n)\nraise SystemExit(7)"]
    monkeypatch.setattr(gpu.subprocess, "Popen", lambda command, **options: start(said, **options))
    result, failure = comparison._run_side("ours", num_left=1)
    assert result == {} and failure.startswith("exit code 7: ")
    told = capfd.readouterr().err.splitlines()
    assert told[0] == "-- the last lines of ours of 7b_4k:"
    assert told[1:] == [f"line {number}" for number in range(300, 500)]


@pytest.mark.parametrize(("theirs", "is_ok"), [(2.5, True), (2.0, False), (0.0, False), (math.nan, False)])
def test_incomparable_losses_do_not_abort_a_call(theirs: float, is_ok: bool, tmp_path: Path) -> None:
    out = tmp_path / "rows.jsonl"
    report = Report("gpu", as_json=True, tokens_per_step=1, out=out)
    sides = {
        name: {"num_parameters": 1, "model_flops": 0, "steps": [{"total_s": 1.0, "loss": loss}]}
        for name, loss in (("ours", 2.5), ("plain", theirs))
    }
    Rows(report, "plain", PARTS["plain"]).compare(sides, 0)
    row = [json.loads(line) for line in out.read_text().splitlines()][-1]
    assert row["name"] == "plain.loss.relative_to.plain" and row["ok"] is is_ok is report.all_ok


def test_planned_peak_includes_all_buffers() -> None:
    """A run can allocate more buffers than the minimum that a step needs."""
    nothing: dict[str, int] = {}
    home = {"gpu": {"weights": 100}}
    placement = Placement({}, home, {"gpu": 20}, nothing, nothing, nothing, nothing, {"gpu": 5})
    assert planned_peak(placement, "gpu") == placement.peak_bytes("gpu") == 125
    assert planned_peak(replace(placement, buffers={"gpu": {10: 3, 7: 1}}), "gpu") == 100 + 37 + 5
    assert planned_peak(replace(placement, buffers={"gpu": {10: 1}}), "gpu") == 125


def test_missing_gpu_and_elapsed_time_are_reported(tmp_path: Path) -> None:
    def gpu(*words: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, str(BENCH / "gpu.py"), "--json", *words]
        return warm.run(command, cwd=tmp_path, timeout=200)

    refused = gpu("--device", "cpu", "--parts", "14b")
    assert refused.returncode == 2 and "--device cpu needs --quick" in refused.stderr
    out = tmp_path / "rows.jsonl"
    late = gpu("--quick", "--device", "cpu", "--parts", "14b,zero3", "--minutes", "0", "--out", str(out))
    assert late.returncode == 0, late.stderr
    rows = [json.loads(line) for line in out.read_text().splitlines()]
    assert [row["name"] for row in rows] == ["14b.ours.skipped", "zero3.ours.skipped", "zero3.zero3.skipped"]
    assert all("out of time" in row["value"] for row in rows)


def test_side_without_finished_steps_reports_its_start(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    part = part_named("14b").small()
    result = {"num_parameters": 5, "optimizer": "AdamW", "start_s": 2.0, "start_parts_s": {"plan": 1.0}, "steps": []}
    rows = Rows(Report("gpu", as_json=True, tokens_per_step=part.tokens), "14b", part)
    arguments = argparse.Namespace(layers=None, quick=True, megatrain=None)
    comparison = gpu.Comparison("14b", part, tmp_path, arguments, rows, time.monotonic() + 600)
    comparison._run_side = Mock(return_value=({**result, "start_bytes": {}}, "out of time"))  # type: ignore[method-assign]
    comparison.run()
    found = {row["name"]: row["value"] for row in map(json.loads, capsys.readouterr().out.splitlines())}
    assert found["14b.ours.failed"] == "out of time" and found["14b.ours.start"] == 2.0
    assert found["14b.ours.start.plan"] == 1.0 and "14b.ours.step" not in found


def test_optimizer_compares_every_format_with_its_ceiling() -> None:
    rows = {row["name"]: row for row in run("optimizer")}
    assert rows["bits.differ_by_format_and_threads"]["value"] == 0
    for name in ("fp32", "fp32_bf16grad", "split", "split_bf16grad"):
        assert rows[f"1M.1t.ratio.ours.{name}/ceiling.{name}"]["target"] == 0.95
        assert rows[f"1M.1t.ours.{name}.rate"]["value"] > 0
    assert rows["1M.1t.ratio.ours.norm_and_split_bf16grad/chain.host"]["target"] == 5.0


def test_weights_freeze_in_plain_bf16_but_not_in_ours() -> None:
    rows = {row["name"]: row["value"] for row in run("freezing")}
    assert rows["lr=1e-06.bf16_in_place.moved"] < 0.1 < 0.99 < rows["lr=1e-06.ours.moved"]
    assert rows["lr=1e-06.bf16_in_place.cosine_to_fp32_update"] < 0.5
    assert rows["lr=1e-06.ours.cosine_to_fp32_update"] > 0.999


@pytest.mark.slow
def test_overlapped_and_serial_updates_are_bit_identical() -> None:
    rows = {row["name"]: row for row in run("overlap")}
    for placement in ("ram", "nvme"):
        for way, clipped in (("never", {0}), ("always", {4}), ("sometimes", {1, 2, 3})):
            prefix = f"{placement}.{way}"
            assert rows[f"{prefix}.clipped"]["value"] in clipped
            assert rows[f"{prefix}.serial/overlapped.losses_that_differ"]["value"] == 0
            assert rows[f"{prefix}.serial/overlapped.blocks_that_differ"]["value"] == 0
            assert rows[f"{prefix}.ratio.serial/overlapped"]["value"] > 0
    assert rows["sometimes.nvme/ram.blocks_that_differ"]["value"] == 0
    assert rows["nvme.always.overlapped.nvme->ram.moved"]["value"] > 0  # the drive is used


def test_timeline_picture_shows_all_activities_of_a_step(tmp_path: Path) -> None:
    trace, picture = tmp_path / "trace.json", tmp_path / "step.svg"
    command = [sys.executable, str(BENCH / "timeline.py"), "--json", *ARGUMENTS["timeline"]]
    command += ["--trace", str(trace), "--picture", str(picture)]
    done = warm.run(command, timeout=200)
    assert done.returncode == 0, done.stderr
    rows = {row["name"]: row["value"] for row in map(json.loads, done.stdout.splitlines())}
    assert rows["ticks.missing"] == 0 < rows["busy.layers"] < rows["step"]
    assert 0 <= rows["links.hidden"] <= 1
    texts = re.findall(r"<text[^>]*>([^<]*)</text>", picture.read_text())
    assert {"layers", "updates", "waiting", "fetch to ram", "write to nvme", "forward", "backward"} <= set(texts)
    bars = [event for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"]
    assert len(bars) > 40


@pytest.mark.slow
def test_commit_writes_ram_blocks_and_links_the_rest() -> None:
    rows = {row["name"]: row["value"] for row in run("checkpoint")}
    for size in ("0.002GB",):
        assert rows[f"{size}.ram0.written"] == rows[f"{size}.changed10.written"] == rows[f"{size}.ram100.linked"] == 0
        assert rows[f"{size}.ram100.written"] == rows[f"{size}.ram0.linked"]
        assert rows[f"{size}.ram0.as_it_stands.seconds"] > rows[f"{size}.ram0.as_it_stands.held"] > 0
    for mode in ("beside", "waiting"):
        assert rows[f"save.ram.{mode}.linked"] == 0 < rows[f"save.nvme.{mode}.linked"]
        assert rows[f"save.nvme.{mode}.step_alone"] > 0


def test_gsm8k_training_matches_plain_hugging_face() -> None:
    rows = {row["name"]: row["value"] for row in run("gsm8k")}
    assert len(rows["ours.losses"]) == len(rows["plain.losses"]) == rows["steps"] == 3
    assert 0 < rows["trained_tokens"] < rows["tokens"]  # only answers are trained on
    assert rows["loss.max_relative_difference"] < 1e-5 and rows["weights.difference_over_move"] < 1e-3
    assert rows["test.after.ours"] < rows["test.before.ours"]
    assert rows["ours.nvme->ram.per_step"] > 0  # the run streams state from the drive


@pytest.mark.slow
def test_planned_bytes_equal_moved_bytes_at_every_size() -> None:
    rows = {row["name"]: row for row in run("plan_accuracy")}
    for name in ("small_on_nvme", "small_on_nvme.set.tiers.ram.size=1GiB"):
        assert rows[f"{name}.predicted"]["value"] > 0 < rows[f"{name}.measured"]["value"]
        assert rows[f"{name}.ratio"]["timing"] and rows[f"{name}.ratio"]["target"] == 1.0
        assert rows[f"{name}.nvme->ram.moved"]["ok"]
        assert rows[f"{name}.nvme.high_water"]["value"] == rows[f"{name}.nvme.planned_peak"]["value"] > 0
    assert rows["small_on_nvme.nvme->ram.moved"]["value"] > 0
