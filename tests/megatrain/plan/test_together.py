"""All ranks plan with the same rates: the slowest of each kind, and only rates that all ranks have measured."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

from fakes.rates import NOW, drive, make_machine
from megatrain.machine.file_systems import file_system_of
from megatrain.machine.profiles import MachineProfile
from megatrain.plan.together import RankRates, slowest_rates

GPU = {"name": "a", "memory_bytes": 1, "h2d_bytes_per_s": 3e10, "d2h_bytes_per_s": 2e10, "peer_bytes_per_s": 1e11}


def rates_of(machine: MachineProfile | None, *, rank: int = 0, **drives: object) -> RankRates:
    return RankRates(f"rank {rank}", machine, drives)  # type: ignore[arg-type]


def test_each_rate_is_the_slowest(tmp_path: Path) -> None:
    here = make_machine(tmp_path, gpu=GPU, matmul_flops_per_s={"cuda/bfloat16": 2e14, "cpu/float32": 1e11})
    there = make_machine(
        tmp_path,
        host="b",
        gpu={**GPU, "name": "b", "h2d_bytes_per_s": 1e10, "d2h_bytes_per_s": 4e10, "update_bytes_per_s": 1e12},
        matmul_flops_per_s={"cuda/bfloat16": 1e14},
        measured_at=NOW - timedelta(days=9),
        is_quick=True,
    )
    fast, slow = drive(4e9, 1e9, 2e9), drive(3e9, 2e9, 2e9, sustained_write_bytes_per_s=5e8, computing_s_per_byte=1e-9)
    of_ranks = [rates_of(here, nvme=fast), rates_of(there, rank=1, nvme=slow)]
    loaded = slowest_rates(of_ranks, 0, {"nvme": tmp_path})
    found = loaded.machine
    assert found is not None and found.gpu is not None
    assert (found.host, found.gpu.name, found.is_quick, found.measured_at) == (here.host, "a", True, there.measured_at)
    assert (found.gpu.h2d_bytes_per_s, found.gpu.d2h_bytes_per_s, found.gpu.peer_bytes_per_s) == (1e10, 2e10, 1e11)
    assert found.gpu.update_bytes_per_s is None  # unknown on rank 0
    assert found.matmul_flops_per_s == {"cuda/bfloat16": 1e14}
    (known,) = found.drives.values()
    assert (known.read_bytes_per_s, known.write_bytes_per_s, known.mixed_bytes_per_s) == (3e9, 1e9, 2e9)
    assert (known.sustained_write_bytes_per_s, known.computing_s_per_byte) == (5e8, 1e-9)
    assert found.drives.keys() == {file_system_of(tmp_path).key}
    assert loaded.ranks == ("rates           the lowest of 2 ranks; rates of rank 0 and rank 1 are lower",)


def test_ranks_of_one_machine_plan_with_its_rates(tmp_path: Path) -> None:
    here = make_machine(tmp_path, gpu=GPU)
    own = here.drives[file_system_of(tmp_path).key]
    loaded = slowest_rates(
        [rates_of(here, nvme=own, output_dir=own)] * 2, 1, {"nvme": tmp_path, "output_dir": tmp_path}
    )
    assert loaded.machine == here and not loaded.ranks


def test_rate_missing_on_one_rank_is_unknown(tmp_path: Path) -> None:
    here = make_machine(tmp_path, gpu=GPU)
    own = here.drives[file_system_of(tmp_path).key]
    places = {"nvme": tmp_path, "output_dir": tmp_path}
    of_ranks = [rates_of(here, nvme=own, output_dir=own), rates_of(here, rank=1, nvme=None, output_dir=own)]
    loaded = slowest_rates(of_ranks, 0, places)
    assert loaded.machine is not None and not loaded.machine.drives
    assert loaded.ranks == ("rates           of rank 1, drive of nvme: not measured",)
    none = rates_of(None, rank=1, nvme=None, output_dir=None)
    loaded = slowest_rates([of_ranks[0], none], 0, places)
    assert loaded.machine is None
    assert loaded.ranks == ("rates           of rank 1 not measured: run `megatrain-tier doctor` there",)
    assert slowest_rates([none, none], 0, places).ranks == ()
