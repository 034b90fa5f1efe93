"""Planning with several ranks, which exchange capacities and rates. Each rank plans with the minimum over all ranks.

Each rank makes its own plan, because homes of blocks can differ between ranks. But collectives and predictions must
agree. Ranks wait for each other in every collective, so the slowest rank determines the time of a step. Therefore
every rank plans with the smallest tiers and the slowest rate of each link, drive and processor.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

from megatrain.machine.file_systems import file_system_of
from megatrain.machine.profiles import DriveProfile, GpuProfile, LoadedProfile, MachineProfile
from megatrain.machine.this_machine import ThisMachine
from megatrain.plan.plan import Plan
from megatrain.plan.planner import plan_run
from megatrain.plan.run_spec import RunSpec
from megatrain.plan.run_tiers import tier_budgets
from megatrain.plan.times import Estimate
from megatrain.ranks.collectives import RanksDifferError

#: Collective that returns the values of all ranks, in rank order.
Gather = Callable[[Any], Sequence[Any]]
_Record = TypeVar("_Record", DriveProfile, GpuProfile, MachineProfile)
#: Fields in which a larger value means a slower machine.
_LOSSES = ("computing_s_per_byte", "seconds_per_copy")
#: Rates that may be missing. If any other rate was not measured, the step's time is not predicted.
_LIMITS = ("sustained_write_bytes_per_s",)


@dataclass(frozen=True, slots=True)
class RankRates:
    """Rates measured on one rank's machine.

    Attributes:
        name: Name of the rank in messages.
        machine: Rates of the machine, or None if it was not measured.
        drives: Rates of drives by location (n-th drive, ``output_dir``, the model's folder); None if not measured.
        note: Reason why the file of rates was not used, or None.
    """

    name: str
    machine: MachineProfile | None
    drives: Mapping[str, DriveProfile | None]
    note: str | None = None


@dataclass(frozen=True, slots=True)
class _RankResources:
    """One rank's rates, and its capacities by tier. Ranks exchange these records before planning."""

    capacities: Mapping[str, int]
    rates: RankRates


@dataclass(frozen=True)
class _SlowestMachine(ThisMachine):
    """This machine, with the slowest rates over all ranks."""

    lowest: LoadedProfile

    def rates(self) -> LoadedProfile:
        return self.lowest


def plan_together(run: RunSpec, gather: Gather) -> Plan:
    """Plan this rank's part of a run with the minimum capacities and rates over all ranks. This is a collective.

    All plans have the same collectives, decide by the same rates, and predict the step time of the slowest rank.
    Homes of blocks can differ.

    Raises:
        RanksDifferError: If the ranks have different tiers.
        DoesNotFitError: If the run does not fit here. Errors of ``plan_run`` can differ between ranks.
    """
    capacities = {name: budget.capacity_bytes for name, budget in tier_budgets(run, 0).items()}
    resources: Sequence[_RankResources] = gather(_RankResources(capacities, _rates_of(run)))
    for rank, other in enumerate(resources):
        if other.capacities.keys() != resources[0].capacities.keys():
            raise RanksDifferError(
                f"the ranks do not have the same tiers. Rank 0: {', '.join(resources[0].capacities)}. Rank {rank}: "
                f"{', '.join(other.capacities)}. Start all of them with the same config, on the same kind of machine"
            )
    min_capacities = {name: min(other.capacities[name] for other in resources) for name in capacities}
    rates = slowest_rates([other.rates for other in resources], run.world.rank, _locations(run))
    run = replace(run, tiers=replace(run.tiers, machine=_SlowestMachine(rates)))
    plan = plan_run(run, capacities=min_capacities)
    if any(gather(bool(plan.program.cuts.passing))) and not plan.program.cuts.passing:
        # If one rank must process the vocabulary in parts, all ranks must do so, because parts change the collectives.
        plan = plan_run(run, like=plan, capacities=min_capacities, passes_parts=True)
    plan = limit_gathers_ahead(plan, min(gather(plan.program.sharding.gathers_ahead)), min_capacities)
    return replace(plan, estimate=_with_slowest_step(plan.estimate, run, gather))


def limit_gathers_ahead(plan: Plan, max_ahead: int, capacities: Mapping[str, int] | None = None) -> Plan:
    """Return this rank's plan with weights gathered at most ``max_ahead`` visits ahead.

    ``max_ahead`` is the minimum over all ranks, because ranks have different amounts of free memory.
    """
    if plan.program.sharding.gathers_ahead <= max_ahead:
        return plan
    return plan_run(
        plan.run,
        like=plan,
        capacities=capacities,
        max_ahead=max_ahead,
        passes_parts=bool(plan.program.cuts.passing),
    )


def _with_slowest_step(estimate: Estimate, run: RunSpec, gather: Gather) -> Estimate:
    """Return the estimate with the slowest rank's seconds. That rank may have more micro-batches. This is a collective.

    If one rank cannot predict a step, for example because its drives were not measured, no rank predicts it.
    """
    estimates: Sequence[tuple[float | None, str | None]] = gather((estimate.step_s, estimate.bound_by))
    seconds = [step_s for step_s, _ in estimates if step_s is not None]
    if len(seconds) < len(estimates):
        return replace(estimate, step_s=None, bound_by=None, crossing_tokens=None)
    slowest_rank = seconds.index(max(seconds))
    if estimate.step_s == seconds[slowest_rank]:
        return estimate
    note = f"predicted step  of {run.world.name_of(slowest_rank)}, the slowest rank"
    step_s, bound_by = estimates[slowest_rank]
    return replace(estimate, step_s=step_s, bound_by=bound_by, notes=(*estimate.notes, note))


# -- rates ---------------------------------------------------------------------------------------------------------


def _locations(run: RunSpec) -> dict[str, Path]:
    """Return the locations of this rank's files, under names that are the same on all ranks."""
    drives = {f"tiers.nvme.{index}": drive.path for index, drive in enumerate(run.tiers.table.nvme)}
    return {**drives, "output_dir": run.output_dir, "the model's folder": Path(run.model.folder)}


def _rates_of(run: RunSpec) -> RankRates:
    loaded, world = run.tiers.machine.rates(), run.world
    machine = loaded.machine
    drives = {name: None if machine is None else machine.drive_of(path) for name, path in _locations(run).items()}
    return RankRates(world.name_of(world.rank, world.host), machine, drives, loaded.note)


def slowest_rates(rank_rates: Sequence[RankRates], rank: int, locations: Mapping[str, Path]) -> LoadedProfile:
    """Return the profile with which a rank plans: for every rate, the slowest value over all ranks.

    A rate that was not measured on every rank is unknown, except for ``_LOSSES`` and ``_LIMITS``.

    Args:
        rank: Rank that plans. The names of drives differ between ranks.
        locations: Locations on this rank, under the names in ``RankRates.drives``.
    """
    unmeasured = [rates.name for rates in rank_rates if rates.machine is None]
    if unmeasured:
        note = f"rates           of {_join_names(unmeasured)} not measured: run `megatrain-tier doctor` there"
        return LoadedProfile(None, rank_rates[rank].note, ranks=(note,) if len(unmeasured) < len(rank_rates) else ())
    slower_ranks: set[int] = set()
    machines = [rates.machine for rates in rank_rates if rates.machine is not None]
    machine = _slowest(machines, rank, slower_ranks)
    drives: dict[str, DriveProfile] = {}
    unknown_keys: set[str] = set()
    lines: list[str] = []
    for location, path in locations.items():
        key = file_system_of(path).key
        profiles = [rates.drives[location] for rates in rank_rates]
        measured_profiles = [profile for profile in profiles if profile is not None]
        if len(measured_profiles) < len(profiles):
            unknown_keys.add(key)
            names = [rates.name for rates, drive in zip(rank_rates, profiles, strict=True) if drive is None]
            if measured_profiles:
                lines.append(f"rates           of {_join_names(names)}, drive of {location}: not measured")
            continue
        drive = _slowest(measured_profiles, rank, slower_ranks)
        # Locations that share a drive on this rank may be on different drives on another rank.
        drives[key] = _slowest([drives.get(key, drive), drive], 0, set())
    known_drives = {key: drive for key, drive in drives.items() if key not in unknown_keys}
    if slower_ranks:
        names = [rank_rates[index].name for index in sorted(slower_ranks)]
        lines.append(f"rates           the lowest of {len(rank_rates)} ranks; rates of {_join_names(names)} are lower")
    return LoadedProfile(machine.model_copy(update={"drives": known_drives}), ranks=tuple(lines))


def _slowest(records: Sequence[_Record], rank: int, slower_ranks: set[int]) -> _Record:
    """Return the rank's own record, with each rate replaced by the slowest rate over all ranks.

    Args:
        slower_ranks: Output set, to which ranks with the slowest value of a rate are added, unless all are equal.
    """
    changes: dict[str, Any] = {}
    for name in type(records[rank]).model_fields:
        values = [getattr(record, name) for record in records]
        if name in _LOSSES or name in _LIMITS:
            known = [value for value in values if value is not None]
            choose = max if name in _LOSSES else min
            changes[name] = choose(known, default=None)
            slower_ranks.update(_slowest_indices(values, changes[name]))
        elif name in ("measured_at", "is_quick"):
            changes[name] = min(values) if name == "measured_at" else any(values)
        elif name == "gpu":
            has_all = all(value is not None for value in values)
            changes[name] = _slowest(values, rank, slower_ranks) if has_all else None
        elif name.endswith("_per_s") and isinstance(values[rank], dict):
            kinds = [kind for kind in values[rank] if all(kind in rates for rates in values)]
            changes[name] = {kind: min(rates[kind] for rates in values) for kind in kinds}
            for kind, lowest in changes[name].items():
                slower_ranks.update(_slowest_indices([rates[kind] for rates in values], lowest))
        elif name.endswith("_per_s"):
            changes[name] = None if None in values else min(values)
            slower_ranks.update(_slowest_indices(values, changes[name]))
    return records[rank].model_copy(update=changes)


def _slowest_indices(values: Sequence[float | None], lowest: float | None) -> list[int]:
    """Return the indices of the values that equal ``lowest``, or none if all values are equal."""
    if lowest is None or all(value == lowest for value in values):
        return []
    return [index for index, value in enumerate(values) if value == lowest]


def _join_names(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
