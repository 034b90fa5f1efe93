"""Computation of a report's figures, which the terminal, JSON and the page share."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import Any

from megatrain.api import NUM_LOSSES, resolved_values
from megatrain.base.toml import format_value
from megatrain.config.keys import ARRAY_TABLES, FREE_TABLES, KEYS, leaf_schema, plain
from megatrain.extras.report.history import RunHistory
from tiered.errors import TieredError
from tiered.ext import WearCounter

#: Number of first steps that means exclude, because these steps create files and touch memory for the first time.
NUM_WARM_STEPS = 2
#: Names of stall causes in a report, by cause in the metrics.
CAUSES = {
    "fill": "waiting for fetches",
    "drain": "waiting for write-backs",
    "space": "waiting for free space",
    "lease": "waiting for blocks in use",
    "commit": "waiting for a checkpoint",
}
COMPUTING = "computing"
#: Name of the training loss by task, if evaluations have a different loss.
_LOSS_NAMES = {"distill": "distillation"}
#: Config keys that differ in every run or that the report displays elsewhere.
_RUN_KEYS = frozenset({"config_version", "output_dir", "run_name", "data_seed"})


@dataclass(frozen=True, slots=True)
class PlanComparison:
    """A planned and a measured figure. Unknown figures are None."""

    planned: float | None
    measured: float | None

    @property
    def error(self) -> float | None:
        """Relative error of the plan: (measured - planned) / planned."""
        return self.measured / self.planned - 1 if self.planned and self.measured is not None else None


@dataclass(frozen=True, slots=True)
class PathWrites:
    """Bytes written to one path.

    Attributes:
        nbytes: Bytes written during the steps in ``metrics.jsonl``.
        limit_bytes: Value of ``max_written``.
        lifetime_bytes: Total bytes that all runs have written; None if unknown.
    """

    nbytes: int
    bytes_per_step: PlanComparison
    limit_bytes: int | None = None
    lifetime_bytes: int | None = None

    @property
    def share_of_limit(self) -> float | None:
        """Share of ``max_written`` that all runs together have used; None if unknown or without a limit."""
        return self.lifetime_bytes / self.limit_bytes if self.lifetime_bytes is not None and self.limit_bytes else None


@dataclass(frozen=True, slots=True)
class ChangedKey:
    """A config key whose value differs from its default. ``default`` is "" if the key has no default."""

    key: str
    value: str
    default: str


@dataclass(frozen=True, slots=True)
class Samples:
    """Completions that the model generated at a step.

    Attributes:
        rows: ``prompt``, ``generated`` and ``reference`` of each completion.
    """

    step: int
    rows: Sequence[Mapping[str, str]]


@dataclass(frozen=True)
class Figures:
    """All figures of one run, in bytes and seconds; shares are from 0 to 1. Unknown figures are None.

    Attributes:
        path: ``output_dir`` of the run.
        state: State of the run; see ``RunHistory``.
        message: Last message of the status, such as the cause of a failure.
        headline: Headline of the plan with model, task and tokens per step.
        step: Number of finished steps.
        seconds: Total time of steps, evaluations and saves.
        first_loss: Mean over the first ``num_averaged`` steps, because the loss of a single step is noisy.
        last_loss: Mean over the last ``num_averaged`` steps, which do not overlap with the first steps.
        num_averaged: Number of steps in ``first_loss`` and in ``last_loss``.
        loss_name: Name of the training loss if it differs from the evaluations' cross entropy, otherwise "".
        evaluations: (step, loss) of each evaluation in order, by name of the evaluation set.
        judged: Preference metrics of evaluations, with TRL's names, by evaluation set and step.
        samples: Newest completions, by name of the evaluation set.
        preferences: Means of preference metrics over the last training steps.
        num_real_tokens: Total tokens without padding.
        num_trained_tokens: Total tokens that contribute to the loss.
        padding_share: Share of padding in packed rows; None without packing.
        step_s: Median step time, without the first steps, evaluations and saves.
        time_s: Mean seconds of each part of a step, by name of the part, largest first.
        tokens_per_s: Tokens per second, excluding padding and the first steps.
        trained_tokens_per_s: Trained tokens per second, without the first steps.
        model_flops_per_s: FLOP/s without recompute, without the first steps.
        hardware_flops_per_s: FLOP/s with recompute, without the first steps.
        tiers: Peak bytes, by tier.
        capacity_bytes: Capacity, by tier.
        links: Bytes per step, by link.
        drives: Bytes written, by path.
        rss_first_bytes: Resident memory of the process after its first steps.
        rss_last_bytes: Resident memory after the last step.
        rss_peak_bytes: Peak resident memory.
        checkpoints: Checkpoint lines of ``metrics.jsonl``.
        restarts: (step, date and time) of each start except the first.
        settings: Config keys whose values differ from their defaults.
        machine: Machine of the last start.
        versions: Version of each library.
        export_dir: Folder of the newest exported model.
        link_paths: Data path of each link in the last finished start, such as ``cuda`` or ``kvikio-gds``.
        process_usage: Median CPU seconds and page faults of a step: ``user_s``, ``system_s``, ``page_faults``.
        beside_tier_bytes: Peak memory of the process outside the RAM tier: Python, libraries, data, and workspace
            outside of slots.
        timeline: File of the traced steps.
        ranks: A typical step of each rank, as in ``StepMetrics.ranks``: maximum bytes in use, median bytes moved, and
            mean waiting time. Empty for a single process.
    """

    name: str
    path: str
    state: str
    message: str
    headline: str
    step: int
    max_steps: int
    seconds: float
    first_loss: float | None
    last_loss: float | None
    num_averaged: int
    loss_name: str
    evaluations: Mapping[str, Sequence[tuple[int, float]]]
    judged: Mapping[str, Mapping[int, Mapping[str, float]]]
    samples: Mapping[str, Samples]
    preferences: Mapping[str, float]
    num_real_tokens: int
    num_trained_tokens: int
    padding_share: float | None
    step_s: PlanComparison
    time_s: Mapping[str, float]
    tokens_per_s: float | None
    trained_tokens_per_s: float | None
    model_flops_per_s: float | None
    hardware_flops_per_s: float | None
    tiers: Mapping[str, PlanComparison]
    capacity_bytes: Mapping[str, int]
    links: Mapping[str, PlanComparison]
    drives: Mapping[str, PathWrites]
    rss_first_bytes: int | None
    rss_last_bytes: int | None
    rss_peak_bytes: int | None
    checkpoints: Sequence[Mapping[str, Any]]
    restarts: Sequence[tuple[int, str]]
    settings: Sequence[ChangedKey] = ()
    machine: Mapping[str, Any] = field(default_factory=dict)
    versions: Mapping[str, str] = field(default_factory=dict)
    export_dir: str | None = None
    link_paths: Mapping[str, str] = field(default_factory=dict)
    beside_tier_bytes: int | None = None
    process_usage: Mapping[str, float] = field(default_factory=dict)
    timeline: str | None = None
    ranks: Sequence[Mapping[str, Any]] = ()

    def to_json(self) -> dict[str, Any]:
        """Return JSON values. Non-finite numbers become None."""
        values: dict[str, Any] = _strict(asdict(self))
        return values


def _mean_loss(steps: Sequence[Mapping[str, Any]]) -> float | None:
    return math.fsum(step["loss"] for step in steps) / len(steps) if steps else None


def compute_figures(history: RunHistory) -> Figures:
    """Return the figures of a run. Unknown figures are None or empty."""
    steps, plan = history.steps, history.plan
    timed_steps, planned_steps = steps[NUM_WARM_STEPS:] or steps, _planned_steps(history)
    real, trained = (sum(step.get(key, 0) for step in steps) for key in ("num_real_tokens", "num_trained_tokens"))
    timed_s = sum(step.get("step_s", 0.0) for step in timed_steps)
    rss_bytes = [step["rss_bytes"] for step in steps if step.get("rss_bytes")]
    status = history.status
    num_losses = min(NUM_LOSSES, max(1, len(steps) // 2))  # as in the summary of a run, so that both agree
    return Figures(
        name=history.name,
        path=str(history.path),
        state=history.state,
        message=status.message if status is not None else "",
        headline=str(plan.get("headline", "")),
        step=max([step["step"] for step in steps[-1:]], default=status.step if status is not None else 0),
        max_steps=max([step.get("max_steps", 0) for step in steps[-1:]], default=status.max_steps if status else 0),
        seconds=_total_seconds(history),
        first_loss=_mean_loss(steps[:num_losses]),
        last_loss=_mean_loss(steps[-num_losses:]),
        num_averaged=num_losses if steps else 0,
        loss_name=_LOSS_NAMES.get(history.config.task, "") if history.config is not None else "",
        evaluations=_evaluations(history),
        judged=_preference_metrics(history),
        samples=_samples(history),
        preferences=_mean_preferences(steps[-NUM_LOSSES:]),
        num_real_tokens=real,
        num_trained_tokens=trained,
        padding_share=_padding_share(history, real),
        step_s=PlanComparison(
            _planned_step_s(plan), median(step["step_s"] for step in timed_steps) if timed_steps else None
        ),
        time_s=_time_s(timed_steps),
        tokens_per_s=_rate(timed_steps, "num_real_tokens", timed_s),
        trained_tokens_per_s=_rate(timed_steps, "num_trained_tokens", timed_s),
        model_flops_per_s=_rate(timed_steps, "model_flops", timed_s),
        hardware_flops_per_s=_rate(timed_steps, "hardware_flops", timed_s),
        tiers=_tiers(history),
        capacity_bytes=_capacities(history),
        links=_links(history, planned_steps),
        link_paths=dict(history.ends[-1].get("link_paths") or {}) if history.ends else {},
        drives=_drives(history, planned_steps),
        rss_first_bytes=rss_bytes[min(4, len(rss_bytes) - 1)] if rss_bytes else None,
        rss_last_bytes=rss_bytes[-1] if rss_bytes else None,
        rss_peak_bytes=max([*rss_bytes, *(end.get("peak_rss_bytes", 0) for end in history.ends)], default=None),
        checkpoints=history.checkpoints,
        restarts=[(start.get("first_step", 0), str(start.get("at", ""))) for start in plan.get("starts", [])[1:]],
        settings=_changed_settings(resolved_values(history.config)) if history.config is not None else (),
        machine=plan.get("machine", {}),
        versions=plan.get("versions", {}),
        beside_tier_bytes=_peak_non_tier_bytes(steps),
        process_usage=_process_usage(timed_steps),
        timeline=None if history.timeline is None else str(history.timeline),
        ranks=_ranks(timed_steps),
        export_dir=next((end["export_dir"] for end in reversed(history.ends) if end.get("export_dir")), None),
    )


def _peak_non_tier_bytes(steps: Sequence[Mapping[str, Any]]) -> int | None:
    sizes = [
        step["rss_bytes"] - step.get("tier_used_bytes", {}).get("ram", 0) for step in steps if step.get("rss_bytes")
    ]
    return max(sizes, default=None)


def _process_usage(timed_steps: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    """Return the median of each counter over the steps that recorded counters."""
    usages = [step["process_usage"] for step in timed_steps if step.get("process_usage")]
    return {name: median(usage[name] for usage in usages) for name in usages[0]} if usages else {}


def _ranks(timed_steps: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Return a typical step of each rank, from all steps with the same number of ranks as the last step."""
    size = len(timed_steps[-1].get("ranks", ())) if timed_steps else 0
    rank_steps = [step["ranks"] for step in timed_steps if size and len(step.get("ranks", ())) == size]

    def summarize(
        steps: Sequence[Mapping[str, Any]], key: str, mean: Callable[[Iterable[float]], float]
    ) -> dict[str, float]:
        names = dict.fromkeys(name for step in steps for name in step.get(key, {}))
        return {name: mean([step.get(key, {}).get(name, 0) for step in steps]) for name in names}

    return [
        {
            "tier_used_bytes": summarize(steps, "tier_used_bytes", max),
            "link_bytes": summarize(steps, "link_bytes", median),
            "stall_s": summarize(steps, "stall_s", fmean),
            "rss_bytes": max(step.get("rss_bytes", 0) for step in steps),
        }
        for steps in zip(*rank_steps, strict=True)
    ]


def _planned_step_s(plan: Mapping[str, Any]) -> float | None:
    """Return the plan's seconds per step, simulated if possible, else estimated; None without measured rates."""
    replay, estimate = plan.get("replayed") or {}, plan.get("estimate") or {}
    step_s = replay.get("step_s", estimate.get("predicted_step_s"))
    return float(step_s) if step_s else None


def _total_seconds(history: RunHistory) -> float:
    steps = sum(step.get("step_s", 0.0) for step in history.steps)
    evaluations = sum(line.get("seconds", 0.0) for line in history.evaluations)
    return float(steps + evaluations + sum(line.get("stall_s", 0.0) for line in history.checkpoints))


def _evaluations(history: RunHistory) -> dict[str, list[tuple[int, float]]]:
    sets: dict[str, dict[int, float]] = {}
    for line in history.evaluations:
        sets.setdefault(str(line.get("name", "eval")), {})[line["step"]] = line.get("loss", math.nan)
    for end in history.ends:  # summaries contain evaluations even if metrics.jsonl is missing
        for name, evaluation in end.get("evaluations", {}).items():
            sets.setdefault(name, {}).setdefault(evaluation["step"], float(evaluation["loss"]))
    return {name: sorted(losses.items()) for name, losses in sets.items()}


def _all_evaluations(history: RunHistory) -> Iterator[tuple[str, Mapping[str, Any]]]:
    """Yield (set, figures) of each evaluation in the summaries, and then in metrics.jsonl, which may be missing."""
    for end in history.ends:
        yield from end.get("evaluations", {}).items()
    yield from ((str(line.get("name", "eval")), line) for line in history.evaluations)


def _samples(history: RunHistory) -> dict[str, Samples]:
    return {
        name: Samples(line["step"], line["samples"])
        for name, line in sorted(_all_evaluations(history), key=lambda each: int(each[1]["step"]))
        if line.get("samples")
    }


def _preference_metrics(history: RunHistory) -> dict[str, dict[int, dict[str, float]]]:
    metrics: dict[str, dict[int, dict[str, float]]] = {}
    for name, line in _all_evaluations(history):
        if line.get("preferences"):
            metrics.setdefault(name, {})[line["step"]] = {key: float(x) for key, x in line["preferences"].items()}
    return metrics


def _mean_preferences(steps: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    lines = [line["preferences"] for line in steps if line.get("preferences")]
    names = {name: None for line in lines for name in line}
    return {name: fmean(float(line[name]) for line in lines if name in line) for name in names}


def _padding_share(history: RunHistory, num_real_tokens: int) -> float | None:
    """Return the share of padding positions, or None without packing, because row lengths are then unknown."""
    config = history.config
    if config is None or not history.steps or not config.data.packing:
        return None
    positions = len(history.steps) * config.rows_per_step * config.data.max_length
    return max(0.0, 1 - num_real_tokens / positions)


def _time_s(steps: Sequence[Mapping[str, Any]]) -> dict[str, float]:
    if not steps:
        return {}
    causes = dict.fromkeys(cause for step in steps for cause in step.get("stall_s", {}))
    waits = {cause: fmean(step.get("stall_s", {}).get(cause, 0.0) for step in steps) for cause in causes}
    total = fmean(step.get("step_s", 0.0) for step in steps)
    parts = {COMPUTING: max(0.0, total - sum(waits.values())), **waits}
    return dict(sorted(parts.items(), key=lambda part: -part[1]))


def _rate(steps: Sequence[Mapping[str, Any]], key: str, seconds: float) -> float | None:
    total = sum(step.get(key, 0) for step in steps)
    return total / seconds if seconds > 0 and total else None


def _tiers(history: RunHistory) -> dict[str, PlanComparison]:
    """Return the peak of each tier, only over steps and starts with the capacities of the last start."""
    plan, capacities, peaks = history.plan.get("peak_bytes", {}), _capacities(history), dict[str, float]()
    known: tuple[Mapping[str, int] | None, ...] = (None, {}, capacities)
    lines = [line for line in (*history.steps, *history.ends) if line.get("tier_capacity_bytes") in known]
    for tiers in (line.get("tier_used_bytes", line.get("tier_peak_bytes", {})) for line in lines):
        for tier, nbytes in tiers.items():
            peaks[tier] = max(peaks.get(tier, 0), nbytes)
    return {tier: PlanComparison(plan.get(tier), peaks.get(tier)) for tier in dict.fromkeys([*plan, *peaks])}


def _capacities(history: RunHistory) -> dict[str, int]:
    capacities = history.steps[-1].get("tier_capacity_bytes") if history.steps else None
    return dict(capacities or history.plan.get("budget_bytes", {}))


def _planned_steps(history: RunHistory) -> list[Mapping[str, Any]]:
    """Return the steps that the plan describes, because they also apply the update of the step before them.

    An evaluation or a checkpoint applies this update itself, and the first step of a start has none. Starts with
    another plan, for example with less RAM, are excluded.
    """
    plan = history.plan.get("link_bytes_per_step")
    starts = {
        start.get("first_step", 0): start.get("link_bytes_per_step", plan) == plan
        for start in history.plan.get("starts", [])
    }
    stops = {0, *starts, *(line["step"] for line in (*history.evaluations, *history.checkpoints))}

    def is_planned(step: int) -> bool:
        return step - 1 not in stops and starts.get(max((0, *(first for first in starts if first < step))), True)

    return [step for step in history.steps if is_planned(step["step"])]


def _links(history: RunHistory, steps: Sequence[Mapping[str, Any]]) -> dict[str, PlanComparison]:
    """Return bytes per step of each link, as the median of the steps."""
    plan = history.plan.get("link_bytes_per_step", {})
    traffic = [step["link_bytes"] for step in steps if step.get("link_bytes")]
    rates = {link: median(step_bytes.get(link, 0) for step_bytes in traffic) for link in plan} if traffic else {}
    return {link: PlanComparison(plan.get(link), rates.get(link)) for link in plan}


def _drives(history: RunHistory, steps: Sequence[Mapping[str, Any]]) -> dict[str, PathWrites]:
    estimate = history.plan.get("estimate") or {}
    plan = estimate.get("nvme_written_bytes_per_step") or {}
    tables = history.config.tiers.nvme if history.config is not None else ()
    limits = {str(table.path): table.max_written for table in tables}
    paths = dict.fromkeys([*limits, *plan, *(p for step in history.steps for p in step.get("written_bytes", {}))])
    drives = {}
    for path in paths:
        step_bytes = [step.get("written_bytes", {}).get(path, 0) for step in steps]
        nbytes = sum(step.get("written_bytes", {}).get(path, 0) for step in history.steps)
        per_step = PlanComparison(plan.get(path), median(step_bytes) if step_bytes else None)
        drives[path] = PathWrites(nbytes, per_step, limits.get(path), _lifetime_bytes(Path(path)))
    return drives


def _lifetime_bytes(path: Path) -> int | None:
    try:
        return WearCounter(path).written_bytes or None
    except TieredError:
        return None


def _changed_settings(values: Mapping[str, Any]) -> list[ChangedKey]:
    """Return the keys whose values differ from their defaults, in the order of the config."""
    settings: list[ChangedKey] = []

    def visit(value: Any, path: tuple[str | int, ...]) -> None:
        key = plain(path)
        if isinstance(value, dict) and key not in FREE_TABLES:
            for name, inner in value.items():
                visit(inner, (*path, name))
        elif key in ARRAY_TABLES:
            for index, inner in enumerate(value):
                visit(inner, (*path, index))
        elif key in KEYS and key not in _RUN_KEYS and value is not None and value != {}:
            default = leaf_schema(key).get("default")
            if (list(value) if isinstance(value, tuple) else value) != default:
                text = "" if default is None or default == {} else format_value(default)
                settings.append(ChangedKey(".".join(map(str, path)), format_value(value), text))

    visit(values, ())
    return settings


def _strict(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _strict(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_strict(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value
