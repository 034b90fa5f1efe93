"""All ranks plan with the same rates: the slowest of each kind, and only rates that all ranks have measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from fakes.rates import NOW, drive, make_machine
from megatrain.config import load_config
from megatrain.machine.file_systems import file_system_of
from megatrain.machine.profiles import LoadedProfile, MachineProfile, store_profile
from megatrain.plan.planner import plan_run
from megatrain.plan.run_spec import RunSpec
from megatrain.plan.together import RankRates, plan_together, slowest_rates
from megatrain.ranks.collectives import RanksDifferError
from megatrain.ranks.world import World
from megatrain.training.resolve import resolve
from oracles.tiered_run import config_text, write_tiny_model


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


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
    fast = drive(4e9, 1e9, 2e9, seconds_per_copy=3e-4)
    losses = {"computing_s_per_byte": 1e-9, "seconds_per_copy": 2e-4}
    slow = drive(3e9, 2e9, 2e9, sustained_write_bytes_per_s=5e8, **losses)
    of_ranks = [rates_of(here, nvme=fast), rates_of(there, rank=1, nvme=slow)]
    loaded = slowest_rates(of_ranks, 0, {"nvme": tmp_path})
    key = file_system_of(tmp_path).key
    gpu = here.gpu.model_copy(update={"h2d_bytes_per_s": 1e10})  # type: ignore[union-attr]
    slowest = {"read_bytes_per_s": 3e9, "write_bytes_per_s": 1e9, "mixed_bytes_per_s": 2e9}
    slowest |= {"sustained_write_bytes_per_s": 5e8, "computing_s_per_byte": 1e-9, "seconds_per_copy": 3e-4}
    changes = {"measured_at": there.measured_at, "is_quick": True, "matmul_flops_per_s": {"cuda/bfloat16": 1e14}}
    changes |= {"gpu": gpu, "drives": {key: fast.model_copy(update=slowest)}}  # the update rate of rank 0 is unknown
    lines = ("rates           the lowest of 2 ranks; rates of rank 0 and rank 1 are lower",)
    assert loaded == LoadedProfile(here.model_copy(update=changes), ranks=lines)
    without = rates_of(there.model_copy(update={"gpu": None}), rank=1, nvme=slow)
    found = slowest_rates([rates_of(here, nvme=fast), without], 0, {"nvme": tmp_path})
    assert found == LoadedProfile(here.model_copy(update={**changes, "gpu": None}), ranks=lines)


def test_ranks_with_lower_rates_are_named(tmp_path: Path) -> None:
    """The second of four ranks has no lower rate. Drives that share a path's drive here may be separate elsewhere."""
    machines = [
        make_machine(tmp_path, launches_per_s=rate, attention_flops_per_s={"cpu/float32": attention})
        for rate, attention in ((2e4, 7e9), (3e4, 8e9), (1e4, 8e9), (3e4, 6e9))
    ]
    drives = [drive(read, 1e9, 2e9) for read in (4e9, 4e9, 4e9, 3e9)]
    of_ranks = [
        RankRates(f"rank {rank}", machine, {"nvme": each, "output_dir": drive(2e9, 1e9, 2e9)})
        for rank, (machine, each) in enumerate(zip(machines, drives, strict=True))
    ]
    found = slowest_rates(of_ranks, 1, {"nvme": tmp_path, "output_dir": tmp_path})
    own = {"launches_per_s": 1e4, "attention_flops_per_s": {"cpu/float32": 6e9}}
    key = file_system_of(tmp_path).key
    expected = machines[1].model_copy(
        update={**own, "drives": {key: drives[1].model_copy(update={"read_bytes_per_s": 2e9})}}
    )
    lines = ("rates           the lowest of 4 ranks; rates of rank 2 and rank 3 are lower",)
    assert found == LoadedProfile(expected, ranks=lines)
    of_ranks[0] = replace(of_ranks[0], drives={"nvme": drive(1e9, 1e9, 2e9), "output_dir": drives[0]})
    found = slowest_rates(of_ranks, 1, {"nvme": tmp_path})
    assert found.ranks == ("rates           the lowest of 4 ranks; rates of rank 0, rank 2 and rank 3 are lower",)
    unknown = [replace(each, machine=None, note=f"note {rank}") for rank, each in enumerate(of_ranks)]
    line = "rates           of rank 0, rank 1 and rank 2 not measured: run `megatrain-tier doctor` there"
    assert slowest_rates([*unknown[:3], of_ranks[3]], 1, {}) == LoadedProfile(None, "note 1", ranks=(line,))
    assert slowest_rates(unknown, 3, {}) == LoadedProfile(None, "note 3")


@pytest.fixture
def run(tmp_path: Path) -> RunSpec:
    """Return the first of two ranks of a run whose blocks are on a drive."""
    text = config_text(tmp_path, write_tiny_model(tmp_path / "model"), ram="64MiB", placement='optimizer = "nvme"')
    (tmp_path / "run.toml").write_text(text.replace("steps = 3", "steps = 4"))
    return replace(resolve(load_config(tmp_path / "run.toml").config), world=World.local(0, 2))


def gather_with(other: Callable[[Any], Any]) -> Callable[[Any], list[Any]]:
    """Return a collective in which the second rank has the value that ``other`` returns for the first rank's."""
    return lambda value: [value, other(value)]


def test_ranks_plan_with_the_smallest_tiers_and_the_slowest_step(run: RunSpec) -> None:
    """The other rank has a quarter of the RAM, half of the drive, and a slower step."""
    store_profile(make_machine(run.output_dir.parent, launches_per_s=1e4))
    alone = plan_run(run)
    asked: list[Any] = []

    def other(value: Any) -> Any:
        asked.append(value)
        if len(asked) == 1:
            return replace(
                value, capacities={"ram": value.capacities["ram"] // 4, "nvme": value.capacities["nvme"] // 2}
            )
        return (value[0] + 5, "nvme") if isinstance(value, tuple) else value

    plan = plan_together(run, gather_with(other))
    assert plan.budgets == {"ram": 8 << 20, "nvme": 64 << 20} != alone.budgets
    capacities, rates = asked[0].capacities, asked[0].rates
    assert capacities == {"ram": 32 << 20, "nvme": 128 << 20}
    assert rates.name == World.local(0, 2).name_of(0, run.world.host) and rates.note is None
    assert rates.machine == run.tiers.machine.rates().machine
    assert list(rates.drives) == ["tiers.nvme.0", "output_dir", "the model's folder"] and all(rates.drives.values())
    assert asked[1:3] == [False, plan.program.sharding.gathers_ahead]
    step_s, bound_by = asked[3]
    assert (plan.estimate.step_s, plan.estimate.bound_by) == (step_s + 5, "nvme") and bound_by != "nvme"
    assert plan.estimate.notes[-1] == f"predicted step  of {run.world.name_of(1)}, the slowest rank"
    faster = plan_together(
        run, gather_with(lambda value: (value[0] / 2, "nvme") if isinstance(value, tuple) else value)
    )
    assert (faster.estimate.bound_by, faster.budgets) == (bound_by, alone.budgets)
    assert "the slowest rank" not in faster.estimate.notes[-1]
    unknown = plan_together(
        run, gather_with(lambda value: (None, None) if isinstance(value, tuple) else value)
    ).estimate
    assert (unknown.step_s, unknown.bound_by, unknown.crossing_tokens) == (None, None, None) and unknown.seconds


def test_ranks_with_different_tiers_are_refused(run: RunSpec) -> None:
    with pytest.raises(RanksDifferError) as refused:
        plan_together(run, gather_with(lambda value: replace(value, capacities={"ram": 1})))
    assert str(refused.value) == (
        "the ranks do not have the same tiers. Rank 0: ram, nvme. Rank 1: ram. Start all of them with the same config, "
        "on the same kind of machine"
    )


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
