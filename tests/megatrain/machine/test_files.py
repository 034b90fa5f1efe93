"""Plans for other machines use only the sizes and rates in a machine file, each of which has a source."""

from __future__ import annotations

import importlib
import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from megatrain.base.errors import ConfigError
from megatrain.config import load_config
from megatrain.machine import cgroups, files, profiles, this_machine
from megatrain.machine.files import MachineFileError, machine_names, read_machine
from megatrain.machine.planned_machine import find_machine
from megatrain.machine.resources import TierSpecs, describe_library_memory, library_bytes
from megatrain.machine.this_machine import ThisMachine
from megatrain.plan.planner import plan_run
from megatrain.training.resolve import resolve
from oracles.tiered_run import EXAMPLES
from processes.saved_run import command_group
from tiered import GiB

MODEL = EXAMPLES / "quickstart" / "model"
WANTED = {
    *("h200-1.5tb", "h100-512gb", "gh200", "rtx4090-128gb", "rtx5090-128gb", "rtx-pro-6000-256gb", "8xh100-2tb"),
    *("4xrtx4090-256gb", "laptop-32gb", "dgx-spark", "cpu-server-512gb"),
}


@pytest.fixture(autouse=True)
def _forbid_queries_of_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fail if a plan for another machine queries this one."""

    def asked(*args: object, **kwargs: object) -> Any:
        raise AssertionError("this machine was asked")

    for module in (cgroups, this_machine):
        for name in ("available_ram_bytes", "total_ram_bytes"):
            monkeypatch.setattr(module, name, asked)
    for name in ("load_profile", "file_system_of"):
        monkeypatch.setattr(this_machine, name, asked)
    monkeypatch.setattr(ThisMachine, "gpu_memory", asked)
    monkeypatch.setattr(profiles, "file_system_of", asked)


def config_at(folder: Path, *, drives: int = 0, more: str = "") -> Path:
    tables = "".join(f'[[tiers.nvme]]\npath = "drive{number}"\n' for number in range(drives))
    (folder / "run.toml").write_text(
        f'task = "pretrain"\noutput_dir = "out"\n[model]\nmodel_name_or_path = "{MODEL}"\ntrain_from_scratch = true\n'
        f'[data]\nmax_length = 64\n[[data.train]]\npath = "text.txt"\n[training]\ntrain_batch_tokens = 256\n'
        f"{more}{tables}"
    )
    return folder / "run.toml"


def test_all_machines_can_be_used() -> None:
    assert set(machine_names()) == WANTED
    for name in machine_names():
        found, (_, file) = find_machine(name), read_machine(name)
        assert found.has_gpu == (name not in ("laptop-32gb", "cpu-server-512gb"))
        origins = [bool(figure.source or figure.estimate) for _, figure in file.figures()]
        assert all(origins) and len(origins) >= 15, name
        num_gpus = 0 if file.gpu is None else file.gpu.count
        assert num_gpus == {"8xh100-2tb": 8, "4xrtx4090-256gb": 4}.get(name, int(found.has_gpu))
        assert bool(file.note) == (num_gpus > 1 or found.has_unified_memory), name


def test_every_machine_figure_names_its_source() -> None:
    for name in machine_names():
        for place, figure in read_machine(name)[1].figures():
            assert figure.measured is None, (name, place)  # this project measured none of the package's machines
            assert len(figure.source or figure.estimate or "") > 5, (name, place)


def test_unified_memory_is_both_gpu_memory_and_ram() -> None:
    found = find_machine("dgx-spark")
    size = found.file.unified_memory
    assert size is not None and size.nbytes == found.gpu_memory(torch.device("cuda")).total == found.ram.total


@pytest.fixture
def broken(tmp_path: Path) -> Path:
    return tmp_path / "mine.toml"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        (("[ram]", "[ram"), "is not a TOML file"),
        (('is = "24GiB"', 'is = "24"'), "gpu.memory.is"),
        (('is = "24GiB"', "is = 24"), "has no unit"),
        (('is = "160TFLOP/s"', 'is = "160TB/s"'), 'Write for example "794TFLOP/s"'),
        (('source = "NVIDIA data sheet"', 'note = "x"'), "gpu.memory.note: is not a key of a machine file"),
        ((', source = "NVIDIA data sheet"', ""), "exactly one origin: source, estimate or measured"),
        (("[ram]\n", '[ram]\nspeed = "fast"\n'), "ram.speed: is not a key of a machine file"),
        (("in_use =", "# in_use ="), "ram.in_use: is missing"),
    ],
)
def test_a_broken_file_is_named_in_one_message(broken: Path, change: tuple[str, str], says: str) -> None:
    text = (Path(files.__file__).parent / "machines" / "rtx4090-128gb.toml").read_text()
    assert change[0] in text
    broken.write_text(text.replace(*change, 1))
    with pytest.raises(MachineFileError) as caught:
        find_machine(str(broken))
    assert says in str(caught.value) and str(broken) in str(caught.value) and "\n" not in str(caught.value).strip()


def test_an_unknown_name_lists_the_machines(tmp_path: Path) -> None:
    done = call("plan", config_at(tmp_path), "--machine", "h200")
    assert done.exit_code == 2 and "Traceback" not in done.output
    assert 'Did you mean "h200-1.5tb"?' in done.output and all(name in done.output for name in WANTED)
    both = call("plan", config_at(tmp_path), "--machine", "gh200", "--measure")
    assert both.exit_code == 2 and "use only one option" in both.output


def call(*words: object) -> Any:
    return CliRunner().invoke(command_group(), [str(word) for word in words])


def test_unset_sizes_come_from_the_machine(tmp_path: Path) -> None:
    there = find_machine("rtx4090-128gb")
    plan = plan_run(resolve(load_config(config_at(tmp_path, drives=2)).config, there))
    assert plan.device.type == "cuda" and plan.graph.dtype == torch.bfloat16
    assert plan.run.trace_device.type == "cpu"
    assert plan.budgets["gpu"] == 24 * GiB - 24 * GiB // 20  # less the margin
    assert plan.budgets["ram"] == 122 * GiB - 128 * GiB // 20  # less the memory in use on that machine, and the margin
    assert plan.budgets["nvme"] == 2 * (4 * 10**12 - 4 * 10**12 // 20)
    assert plan.objections == ()
    assert plan.estimate is not None and plan.estimate.step_s and not plan.estimate.unmeasured
    assert (
        "predicted for rtx4090-128gb" in plan.estimate.notes[-1] and "no rate was measured" in plan.estimate.notes[-1]
    )
    assert plan.run.tiers.rates == (5e9, 5e9)


def test_weights_read_in_place_use_the_first_drive(tmp_path: Path) -> None:
    """The model folder contains only a config.json, which is enough for a plan."""
    more = '[lora]\nr = 4\ntarget_modules = ["q_proj"]\n[placement]\nweights = ["folder"]\n'
    more += '[tiers.gpu]\nsize = "3400KiB"\n[tiers.ram]\nsize = "13MiB"\n'  # so no block of the model stays there
    path, there = config_at(tmp_path, more=more), find_machine("rtx4090-128gb")
    plan = plan_run(resolve(load_config(path, (), ["model.train_from_scratch=false"]).config, there))
    assert plan.estimate is not None and plan.estimate.step_s and not plan.estimate.unmeasured
    rate = there.profile.drives[there.drives[0][0]].read_bytes_per_s
    assert plan.estimate.seconds["folder"] == plan.traffic["folder->ram"] / rate > 0


def test_explicit_sizes_are_compared_with_the_machine(tmp_path: Path) -> None:
    more = '[tiers.gpu]\nsize = "40GiB"\n[tiers.ram]\nsize = "1TiB"\n'
    path = config_at(tmp_path, drives=3, more=more)
    plan = plan_run(resolve(load_config(path, (), ["tiers.nvme.0.size=5TB"]).config, find_machine("rtx4090-128gb")))
    found = {each.key: each for each in plan.objections}
    assert set(found) == {"tiers.gpu.size", "tiers.ram.size", "tiers.nvme", "tiers.nvme.0.size"}
    assert all(each.refuses and "rtx4090-128gb" in str(each) for each in found.values())
    assert 'tiers.ram.size = "1TiB" is too large' in found["tiers.ram.size"].text
    done = call("plan", path, "--machine", "rtx4090-128gb", "--set", "tiers.nvme.0.size=5TB")
    assert done.exit_code == 0 and "fits, but not on rtx4090-128gb." in done.output


def test_a_machine_without_a_gpu(tmp_path: Path) -> None:
    laptop = find_machine("laptop-32gb")
    plan = plan_run(resolve(load_config(config_at(tmp_path)).config, laptop))
    assert plan.device.type == "cpu" and set(plan.budgets) == {"ram"}
    (note,) = plan.objections
    assert not note.refuses and "laptop-32gb has 1 drives" in note.text
    with pytest.raises(ConfigError, match="laptop-32gb has no GPU"):
        resolve(load_config(config_at(tmp_path), (), ["device=cuda"]).config, laptop)


def test_plan_names_its_machine(tmp_path: Path) -> None:
    path = config_at(tmp_path, drives=2)
    shown = call("plan", path, "--machine", "4xrtx4090-256gb", "--set", "train_batch_tokens=512")
    assert shown.exit_code == 0, shown.output
    assert "fits on 4xrtx4090-256gb (predicted)." in shown.output
    assert "with --processes 4 for each of 4" in shown.output
    assert "doctor --config" not in shown.output and "plan --measure" not in shown.output
    values = json.loads(call("plan", path, "--machine", "gh200", "--json").stdout)
    assert values["machine"]["name"] == "gh200" and values["fits_this_machine"] is False  # two paths, but one drive
    assert values["estimate"]["predicted_tokens_per_s"] > 0


RATES = {
    "gpu": {
        "from_ram": "25GB/s", "to_ram": "20GB/s", "update": "700GB/s", "peer": "30GB/s", "network": "10GB/s",
        "bfloat16": "100TFLOP/s", "float32": "50TFLOP/s", "attention_bfloat16": "70TFLOP/s",
        "attention_float32": "30TFLOP/s", "elementwise_bfloat16": "600GB/s", "elementwise_float32": "500GB/s",
    },
    "cpu": {
        "bfloat16": "2TFLOP/s", "float32": "1.5TFLOP/s", "attention_bfloat16": "900GFLOP/s",
        "attention_float32": "800GFLOP/s", "elementwise_bfloat16": "60GB/s", "elementwise_float32": "50GB/s",
        "launches": "28klaunch/s", "adamw_bfloat16": "2.5Gparam/s", "adamw_float32": "1.5Gparam/s",
    },
    "ram": {"size": "64GiB", "in_use": "4GiB", "read": "90GB/s", "copy": "80GB/s", "update": "70GB/s"},
    "drives": {
        "size": "3TB", "read": "7GB/s", "write": "6GB/s", "mixed": "5GB/s", "sustained_write": "4GB/s",
        "endurance": "900TB",
    },
}  # fmt: skip


def machine_text() -> str:
    """Return a machine file in which every figure has a different value."""
    lines = ['format = "megatrain-tier machine 1"', 'title = "Title"']
    heads = {"gpu": ["[gpu]", 'name = "G"'], "cpu": ["[cpu]", 'name = "C"'], "ram": ["[ram]"]}
    heads["gpu"].append('memory = { is = "24GiB", source = "sheet" }')
    heads["cpu"].append('cores = { is = 12, source = "sheet" }')
    heads["drives"] = ["[[drives]]", 'name = "D"', "count = 2"]
    for table, rates in RATES.items():
        lines += [*heads[table], *(f'{key} = {{ is = "{value}", estimate = "guess" }}' for key, value in rates.items())]
    return "\n".join(lines)


def test_every_figure_of_a_file_reaches_the_plan(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(machine_text())
    found = find_machine(str(tmp_path / "mine.toml"))
    keys = [f"{table}.{key}" for table, rates in RATES.items() if table != "drives" for key in rates]
    keys += ["gpu.memory", "cpu.cores", *(f"drives.0.{key}" for key in RATES["drives"])]
    assert sorted(key for key, _ in found.file.figures()) == sorted(keys)
    day = datetime(1970, 1, 1, tzinfo=UTC)
    drive = profiles.DriveProfile(
        path="D", filesystem="unknown", measured_at=day, is_quick=False, is_direct=True, read_bytes_per_s=7e9,
        write_bytes_per_s=6e9, mixed_bytes_per_s=5e9, sustained_write_bytes_per_s=4e9,
    )  # fmt: skip
    expected = profiles.MachineProfile(
        host="mine", cpu="C", ram_bytes=64 * GiB, measured_at=day, is_quick=False, num_threads=12,
        ram_update_bytes_per_s=7e10, adamw_params_per_s={"bfloat16": 2.5e9, "float32": 1.5e9}, launches_per_s=28e3,
        matmul_flops_per_s={
            "cpu/bfloat16": 2e12, "cpu/float32": 1.5e12, "cuda/bfloat16": 1e14, "cuda/float32": 5e13,
        },
        attention_flops_per_s={
            "cpu/bfloat16": 9e11, "cpu/float32": 8e11, "cuda/bfloat16": 7e13, "cuda/float32": 3e13,
        },
        elementwise_bytes_per_s={
            "cpu/bfloat16": 6e10, "cpu/float32": 5e10, "cuda/bfloat16": 6e11, "cuda/float32": 5e11,
        },
        gpu=profiles.GpuProfile(
            name="G", memory_bytes=24 * GiB, h2d_bytes_per_s=25e9, d2h_bytes_per_s=20e9, update_bytes_per_s=7e11,
            peer_bytes_per_s=3e10, network_bytes_per_s=1e10,
        ),
        drives={"D 0": drive, "D 1": drive},
    )  # fmt: skip
    assert found.profile == expected
    assert found.rates() == profiles.LoadedProfile(
        expected,
        origin="rates           predicted for mine (Title): 2 of its figures are published ones, 31 estimated; "
        "no rate was measured for this plan",
    )
    assert (found.name, found.is_here, found.has_gpu, found.has_unified_memory) == ("mine", False, True, False)
    assert (found.ram, found.gpu_memory(torch.device("cuda"))) == ((64 * GiB, 60 * GiB), (24 * GiB, 24 * GiB))
    assert found.gpu_name(torch.device("cuda")) == "G"
    tiers = load_config(config_at(tmp_path, drives=3)).config.tiers
    size = 3 * 10**12
    assert found.drive_spaces(tiers, tmp_path) == [(size, size - size // 20)] * 2 + [(0, 0)]
    assert found.drive_keys([tmp_path] * 3) == ["D 0", "D 1", "beyond 0"]
    assert [found.can_bypass_ram(tiers.model_copy(update={"direct": way})) for way in ("on", "auto")] == [True, False]


def test_doctor_writes_a_file_with_the_same_figures(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(machine_text())
    planned = find_machine(str(tmp_path / "mine.toml")).profile
    drives = {"8:1 x": planned.drives["D 0"], "8:2 y": planned.drives["D 1"].model_copy(update={"path": 'a"b\\\n'})}
    measured = planned.model_copy(
        update={"host": "h", "measured_at": datetime(2026, 3, 4, tzinfo=UTC), "is_quick": True}
    )
    measured = measured.model_copy(update={"drives": drives})
    text = files.machine_toml(measured, 5 * GiB, dict.fromkeys(drives, 7 * GiB))
    (tmp_path / "theirs.toml").write_text(text)
    found = find_machine(str(tmp_path / "theirs.toml"))
    assert text.splitlines()[:3] == [
        "# Made by `megatrain-tier doctor --save-profile`; `megatrain-tier plan CONFIG --machine FILE` plans for it.",
        'format = "megatrain-tier machine 1"',
        'title = "h: C"',
    ]
    assert {figure.measured for _, figure in found.file.figures()} == {"2026-03-04, quick"}
    names = ["unknown at D 0", 'unknown at a"b\\? 0']
    written = [
        drive.model_copy(update={"path": name[:-2]}) for name, drive in zip(names, planned.drives.values(), strict=True)
    ]
    assert planned.gpu is not None
    gpu = planned.gpu.model_copy(update={"peer_bytes_per_s": None, "network_bytes_per_s": None})
    assert found.profile == planned.model_copy(
        update={"host": "theirs", "gpu": gpu, "drives": dict(zip(names, written, strict=True))}
    )
    assert found.ram == (64 * GiB, 59 * GiB) and [drive.size.nbytes for _, drive in found.drives] == [7 * GiB] * 2
    assert found.rates().origin == (
        "rates           predicted for theirs (h: C): measured there by doctor; no rate was measured for this plan"
    )
    plain = measured.model_copy(update={"gpu": None, "launches_per_s": None, "is_quick": False, "drives": {}})
    (tmp_path / "theirs.toml").write_text(files.machine_toml(plain, 0, {}))
    found = find_machine(str(tmp_path / "theirs.toml"))
    assert (found.profile.gpu, found.profile.launches_per_s, found.profile.drives) == (None, None, {})
    assert {figure.measured for _, figure in found.file.figures()} == {"2026-03-04"}
    assert found.file.ram.in_use.nbytes == int(0.004 * GiB), "the least that the format can express"


@pytest.mark.parametrize(
    ("table", "unified", "ram", "gpu"),
    [
        ("", 0, 60 * GiB - 64 * GiB // 20, 24 * GiB - 24 * GiB // 20),
        ('safety_margin = "1%"', 0, 60 * GiB - int(64 * GiB * 0.01), 23 * GiB),
        ('ram.size = "50%"\ngpu.size = "50%"', 0, 32 * GiB, 12 * GiB),
        ('ram.size = "7GiB"\ngpu.size = "3GiB"', 0, 7 * GiB, 3 * GiB),
        ("", 64, 60 * GiB - 64 * GiB // 10, 60 * GiB - 64 * GiB // 10),
        ('gpu.size = "25%"', 64, 44 * GiB - 64 * GiB // 10, 6 * GiB),
    ],
)
def test_capacities_are_what_the_margins_leave(tmp_path: Path, table: str, unified: int, ram: int, gpu: int) -> None:
    """GPU and RAM are one memory if ``unified`` is not 0. Then a tenth of it stays free."""
    shared = f'unified_memory = {{ is = "{unified}GiB", source = "sheet" }}\n' * bool(unified)
    (tmp_path / "mine.toml").write_text(shared + machine_text())
    machine = find_machine(str(tmp_path / "mine.toml"))
    tiers = load_config(config_at(tmp_path, more=f"[tiers]\n{table}\n")).config.tiers
    specs = TierSpecs(tiers, machine)
    assert (specs.ram_capacity_bytes(), specs.gpu_capacity_bytes(torch.device("cuda"))) == (ram, gpu)
    is_shared = bool(unified) and "gpu" not in table
    assert specs.compute_tier(torch.device("cuda")) == ("ram" if is_shared else "gpu")
    assert specs.compute_tier(torch.device("cpu")) == "ram"


def test_too_little_memory_left_for_the_system_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text('unified_memory = { is = "64GiB", source = "sheet" }\n' + machine_text())
    machine = find_machine(str(tmp_path / "mine.toml"))
    for size, text in (("40GiB", 'tiers.ram.size = "40GiB" and tiers.gpu.size = "18GiB"'), ("39GiB", "")):
        more = f'[tiers.ram]\nsize = "{size}"\n[tiers.gpu]\nsize = "18GiB"\n'
        specs = TierSpecs(load_config(config_at(tmp_path, more=more)).config.tiers, machine)
        if text:
            with pytest.raises(ConfigError) as caught:
                specs.ram_capacity_bytes()
            assert [str(problem) for problem in caught.value.problems] == [
                f"{text}: GPU and RAM are one memory here, of 64.00 GiB, and with less than 6.40 GiB left the system "
                'hangs instead of ending the run. Write at most "57GiB", or "auto"'
            ]
        else:
            assert specs.ram_capacity_bytes() == 39 * GiB


def test_gpu_memory_left_for_libraries_is_described(tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text(machine_text())
    machine, cuda = find_machine(str(tmp_path / "mine.toml")), torch.device("cuda")
    enough = "1.00 GiB of free GPU memory are outside of the tier; libraries are allowed 1.00 GiB"
    assert describe_library_memory(machine, 23 * GiB, cuda) == enough
    assert describe_library_memory(machine, 23 * GiB + GiB // 2, cuda) == (
        "512.00 MiB of free GPU memory are outside of the tier; libraries are allowed 1.00 GiB of it: with more than "
        "tiers.gpu.size = 23.00 GiB they may find none"
    )
    assert describe_library_memory(machine, 23 * GiB, torch.device("cpu")) == ""
    assert describe_library_memory(find_machine("laptop-32gb"), 1, cuda) == ""
    assert describe_library_memory(find_machine("dgx-spark"), 1, cuda) == ""
    assert [library_bytes(nbytes) for nbytes in (5 * GiB, 10 * GiB, 20 * GiB)] == [GiB // 2, GiB, GiB]


@pytest.mark.slow
def test_plan_accepts_a_machine_file_written_by_doctor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # this test may query this machine
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    drive = tmp_path / "drive"
    drive.mkdir()
    examine = importlib.import_module("megatrain.extras.doctor.examine")
    monkeypatch.setattr(examine, "_QUICK_PROCESSOR", (1 << 20, 0.01))
    file = tmp_path / "mine.toml"
    done = call("doctor", drive, "--quick", "--save-profile", file)
    assert done.exit_code == 0, done.output
    assert f"plan CONFIG --machine {file}" in done.output
    found, profile = find_machine(str(file)), profiles.load_profile().machine
    assert profile is not None and "measured there by doctor" in found.rates().origin
    assert found.profile.adamw_params_per_s == pytest.approx(profile.adamw_params_per_s, rel=0.02, abs=1e4)
    assert found.profile.ram_update_bytes_per_s == pytest.approx(profile.ram_update_bytes_per_s, rel=0.01)
    (measured,), (planned,) = profile.drives.values(), found.profile.drives.values()
    assert planned.mixed_bytes_per_s == pytest.approx(measured.mixed_bytes_per_s, rel=0.01, abs=1e5)
    plan = plan_run(resolve(load_config(config_at(tmp_path, drives=1), (), ["device=cpu"]).config, found))
    assert plan.estimate is not None and plan.estimate.step_s
    missing = call("doctor", drive, "--save-profile", tmp_path / "nowhere" / "mine.toml")
    assert missing.exit_code == 2 and "its folder does not exist or is not writable" in missing.output
