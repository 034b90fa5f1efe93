"""What people see: the plan as a table, progress as a live view or plain lines, the summary."""

from __future__ import annotations

import dataclasses
import json
import textwrap
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from megatrain.metrics import (
    CheckpointMetrics,
    EvaluationMetrics,
    RunInfo,
    RunSummary,
    StepMetrics,
    format_checkpoint,
    format_evaluation,
    format_stalls,
    format_step,
    format_tiers,
)
from tiered.units import GiB, MiB, format_duration, format_size

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from megatrain.plan.cost import Estimate
    from megatrain.plan.limits import Objection
    from megatrain.plan.simulate import SimulatedStep

PLAIN_WIDTH = 140  # columns of a table that goes to a file: wide enough that notes stay on one line


class PlanView(Protocol):
    """What the table needs to know of a plan. Sizes are bytes.

    Attributes:
        headline: model, parameters, tokens and steps, in one line.
        tiers: names of the columns, fastest first.
        rows: (kind, tier -> bytes, note).
        totals, budgets: tier -> bytes.
        traffic: ``"ram->nvme"`` -> bytes per step.
        fits: whether it can run.
        messages: hints, or what does not fit.
    """

    @property
    def headline(self) -> str: ...
    @property
    def tiers(self) -> Sequence[str]: ...
    @property
    def rows(self) -> Sequence[tuple[str, Mapping[str, int], str]]: ...
    @property
    def totals(self) -> Mapping[str, int]: ...
    @property
    def budgets(self) -> Mapping[str, int]: ...
    @property
    def traffic(self) -> Mapping[str, int]: ...
    @property
    def fits(self) -> bool: ...
    @property
    def messages(self) -> Sequence[str]: ...


@runtime_checkable
class TimedPlan(Protocol):
    """A plan with an estimate of times and wear: lines for people, and JSON values."""

    @property
    def estimate(self) -> Estimate | None: ...


@runtime_checkable
class JudgedPlan(Protocol):
    """A plan that was compared with this machine."""

    @property
    def objections(self) -> Sequence[Objection]: ...


def print_plan(
    plan: PlanView,
    *,
    as_json: bool = False,
    simulated: SimulatedStep | None = None,
    console: Console | None = None,
) -> None:
    """Print a plan on stdout, as a table or as one JSON object."""
    console = console or Console()
    if not console.is_terminal:
        console.width = max(console.width, PLAIN_WIDTH)
    if as_json:
        values = plan_to_json(plan)
        if simulated is not None:
            values["simulated"] = dataclasses.asdict(simulated)
        console.out(json.dumps(values), highlight=False)
        return
    console.print(Text(plan.headline, style="bold"))
    console.print(plan_table(plan))
    if plan.traffic:
        moved = "  ".join(f"{link} {format_size(nbytes)}" for link, nbytes in plan.traffic.items())
        print_line(console, f"moved per step  {moved}")
    estimate = plan.estimate if isinstance(plan, TimedPlan) else None
    for line in estimate.lines if estimate is not None else ():
        print_line(console, line, indent=16)
    if simulated is not None:
        print_line(console, simulated.line, indent=16)
    for message in plan.messages:
        print_line(console, message, indent=0)
    objections = plan.objections if isinstance(plan, JudgedPlan) else ()
    for each in objections:
        name, style = ("problem", "red") if each.refuses else ("warning", "yellow")
        print_line(console, f"{name:<7} {each}", indent=8, style=style)
    if not plan.fits:
        console.print(Text("does not fit.", style="red"))
    elif any(each.refuses for each in objections):
        console.print(Text("fits, but not on this machine: `run` would refuse it here.", style="red"), soft_wrap=True)
    else:
        console.print(Text("fits.", style="green"))


def print_line(console: Console, text: str, *, indent: int = 7, style: str = "") -> None:
    """Print text; on a terminal it is cut between words.

    Args:
        indent: columns that further lines begin with: those of the name that stands at the start. style: of rich.
    """
    if console.is_terminal:
        width, below = max(console.width, 2 * indent), " " * indent
        parts = [
            textwrap.wrap(line, width, subsequent_indent=below, break_long_words=False, break_on_hyphens=False) or [""]
            for line in text.splitlines()
        ]
        text = "\n".join(line for lines in parts for line in lines)
    console.print(Text(text, style=style), soft_wrap=True)


def plan_to_json(plan: PlanView) -> dict[str, Any]:
    """Return a plan as JSON values, sizes in bytes."""
    estimate = plan.estimate if isinstance(plan, TimedPlan) else None
    objections = plan.objections if isinstance(plan, JudgedPlan) else ()
    return {
        "headline": plan.headline,
        "fits": plan.fits,
        "rows": [{"kind": kind, "bytes": dict(sizes), "note": note} for kind, sizes, note in plan.rows],
        "totals": dict(plan.totals),
        "budgets": dict(plan.budgets),
        "traffic_per_step": dict(plan.traffic),
        "messages": list(plan.messages),
        "estimate": None if estimate is None else estimate.to_json(),
        "fits_this_machine": plan.fits and not any(each.refuses for each in objections),
        "objections": [dataclasses.asdict(each) for each in objections],
    }


def plan_table(plan: PlanView) -> Table:
    """Return kinds x tiers with totals and budgets, in GiB, or in MiB where everything is small."""
    largest = max([*plan.totals.values(), *plan.budgets.values()], default=0)
    unit, unit_name = (GiB, "GiB") if max(plan.totals.values(), default=largest) >= 4 * GiB else (MiB, "MiB")

    def cell(sizes: Mapping[str, int], tier: str) -> str:
        nbytes = sizes.get(tier, 0)
        return "-" if nbytes == 0 else f"{nbytes / unit:,.1f}" if nbytes >= unit / 20 else "<0.1"

    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("", no_wrap=True)
    for tier in plan.tiers:
        table.add_column(tier.upper(), justify="right", no_wrap=True)
    table.add_column("note", overflow="fold")
    for kind, sizes, note in plan.rows:
        table.add_row(kind, *(cell(sizes, tier) for tier in plan.tiers), note)
    table.add_row(f"total {unit_name}", *(cell(plan.totals, tier) for tier in plan.tiers), "", style="bold")
    over = [tier for tier in plan.tiers if tier in plan.budgets and plan.totals.get(tier, 0) > plan.budgets[tier]]
    budget_style = "red" if over else ""
    table.add_row("budget", *(cell(plan.budgets, tier) for tier in plan.tiers), "", style=budget_style)
    return table


class QuietObserver:
    """Shows nothing."""

    def on_start(self, info: RunInfo) -> None: ...

    def on_step(self, metrics: StepMetrics) -> None: ...

    def on_evaluation(self, metrics: EvaluationMetrics) -> None: ...

    def on_checkpoint(self, metrics: CheckpointMetrics) -> None: ...

    def on_message(self, text: str) -> None: ...

    def on_end(self, summary: RunSummary) -> None: ...

    def close(self) -> None: ...


class PlainObserver(QuietObserver):
    """One line per ``logging_steps`` steps, without control characters."""

    def __init__(self, *, logging_steps: int = 1, console: Console | None = None) -> None:
        self._logging_steps = logging_steps
        self._console = console or Console(highlight=False)

    def on_start(self, info: RunInfo) -> None:
        self._line(
            f"start  {info.run_name}: {info.task} on {info.device}, {info.max_steps} steps of "
            f"{info.tokens_per_step:,} tokens"
        )

    def on_step(self, metrics: StepMetrics) -> None:
        if is_shown(metrics, self._logging_steps):
            self._line(format_step(metrics))

    def on_evaluation(self, metrics: EvaluationMetrics) -> None:
        self._line(format_evaluation(metrics))

    def on_checkpoint(self, metrics: CheckpointMetrics) -> None:
        self._line(format_checkpoint(metrics))

    def on_message(self, text: str) -> None:
        self._line(text)

    def on_end(self, summary: RunSummary) -> None:
        for line in summary_lines(summary):
            self._line(line)

    def _line(self, text: str) -> None:
        print_line(self._console, text)


class JsonObserver(QuietObserver):
    """One JSON object per line on stdout."""

    def __init__(self, *, logging_steps: int = 1, console: Console | None = None) -> None:
        self._logging_steps = logging_steps
        self._console = console or Console()

    def on_step(self, metrics: StepMetrics) -> None:
        if is_shown(metrics, self._logging_steps):
            self._object({"event": "step", **metrics.to_json()})

    def on_evaluation(self, metrics: EvaluationMetrics) -> None:
        self._object({"event": "evaluation", **metrics.to_json()})

    def on_checkpoint(self, metrics: CheckpointMetrics) -> None:
        self._object({"event": "checkpoint", **metrics.to_json()})

    def on_message(self, text: str) -> None:
        self._object({"event": "message", "text": text})

    def on_end(self, summary: RunSummary) -> None:
        self._object({"event": "end", **summary.to_json()})

    def _object(self, values: Mapping[str, Any]) -> None:
        self._console.out(json.dumps(values), highlight=False)


class LiveObserver(PlainObserver):
    """A view of a few lines that is redrawn after each step; messages scroll above it."""

    def __init__(self, *, logging_steps: int = 1, console: Console | None = None) -> None:
        super().__init__(logging_steps=logging_steps, console=console)
        self._live: Live | None = None
        self._shown: StepMetrics | None = None
        self._evaluations: dict[str, EvaluationMetrics] = {}

    def on_start(self, info: RunInfo) -> None:
        super().on_start(info)
        self._live = Live(Text("first step ..."), console=self._console, auto_refresh=False)
        self._live.start(refresh=True)

    def on_step(self, metrics: StepMetrics) -> None:
        if is_shown(metrics, self._logging_steps):
            self._shown = metrics
            self._draw()

    def on_evaluation(self, metrics: EvaluationMetrics) -> None:
        self._evaluations[metrics.name] = metrics
        super().on_evaluation(metrics)
        self._draw()

    def _draw(self) -> None:
        if self._live is not None and self._shown is not None:
            self._live.update(live_view(self._shown, self._evaluations), refresh=True)

    def on_end(self, summary: RunSummary) -> None:
        self.close()
        super().on_end(summary)

    def close(self) -> None:
        if self._live is not None:
            self._live.stop()
            self._live = None


def make_observer(progress: str, *, logging_steps: int = 1, console: Console | None = None) -> QuietObserver:
    """Return the observer that ``logging.progress`` asks for; "auto" is a live view on a terminal, else lines."""
    console = console or Console(highlight=False)
    if progress == "none":
        return QuietObserver()
    if progress == "json":
        return JsonObserver(logging_steps=logging_steps, console=console)
    if progress == "bar" or (progress == "auto" and console.is_terminal):
        return LiveObserver(logging_steps=logging_steps, console=console)
    return PlainObserver(logging_steps=logging_steps, console=console)


def is_shown(metrics: StepMetrics, logging_steps: int) -> bool:
    """Return whether a step is shown: the first, the last, and every ``logging_steps`` in between."""
    return metrics.step % logging_steps == 0 or metrics.step in (1, metrics.max_steps)


def live_view(
    metrics: StepMetrics, evaluations: Mapping[str, EvaluationMetrics] = MappingProxyType({})
) -> RenderableType:
    """Return the view of a step: figures, a bar for the run, a bar for each tier. It fits 80 columns.

    Args:
        evaluations: set -> its last evaluation.
    """
    first = Text.assemble(
        ("step ", "dim"), (f"{metrics.step}/{metrics.max_steps}", "bold"),
        ("  loss ", "dim"), (f"{metrics.loss:.4f}", "bold green"),
        ("  gnorm ", "dim"), f"{metrics.grad_norm:.2f}",
        ("  lr ", "dim"), f"{metrics.lr:.1e}",
        ("  eta ", "dim"), format_duration(metrics.eta_s),
        no_wrap=True, overflow="ellipsis",
    )  # fmt: skip
    bars = Table.grid(padding=(0, 2, 0, 0))
    bars.add_row(
        "run",
        ProgressBar(total=metrics.max_steps, completed=metrics.step, width=24),
        f"{100.0 * metrics.step / metrics.max_steps:.1f}%  {format_duration(metrics.step_s)}/step",
    )
    for tier, used in metrics.tier_used_bytes.items():
        capacity = metrics.tier_capacity_bytes.get(tier, 0)
        bars.add_row(
            tier,
            ProgressBar(total=max(1, capacity), completed=used, width=24),
            format_tiers({tier: used}, metrics.tier_capacity_bytes).removeprefix(f"{tier} "),
        )
    speed = f"{metrics.real_tokens_per_s:,.0f} tok/s (trained {metrics.trained_tokens_per_s:,.0f})"
    last = [f"{speed}  {format_stalls(metrics.stall_s)}  process {format_size(metrics.rss_bytes)}"]
    if evaluations:
        shown = (f"{name} loss {each.loss:.4f} at step {each.step}" for name, each in evaluations.items())
        last.append(f"eval  {'  '.join(shown)}")
    return Group(first, bars, *(Text(line, style="dim", no_wrap=True, overflow="ellipsis") for line in last))


def summary_lines(summary: RunSummary) -> list[str]:
    """Return what is said at the end of a run."""
    rate = summary.num_real_tokens / summary.seconds if summary.seconds > 0 else 0.0
    verdict = "stopped" if summary.interrupted else "done"
    first = f"{verdict}   {summary.num_steps} steps in {format_duration(summary.seconds)}"
    if summary.first_loss is not None and summary.last_loss is not None:
        first += f"   loss {summary.first_loss:.4f} -> {summary.last_loss:.4f}   {rate:,.0f} tok/s"
    first += f"   {summary.num_real_tokens:,} tokens, {summary.num_trained_tokens:,} trained"
    lines = [first]
    lines += [
        f"eval   {name}: loss {each.loss:.4f}, perplexity {each.perplexity:.2f} at step {each.step}"
        for name, each in summary.evaluations.items()
    ]
    if summary.tier_peak_bytes:
        peaks, limits = summary.tier_peak_bytes, summary.tier_capacity_bytes
        tiers = "   ".join(format_tiers({tier: nbytes}, limits) for tier, nbytes in peaks.items())
        lines.append(f"peak   {tiers}   process {format_size(summary.peak_rss_bytes)}")
    if summary.link_bytes:
        paths = {link: f" ({path})" for link, path in summary.link_paths.items() if path}
        moved = [f"{link} {format_size(n)}{paths.get(link, '')}" for link, n in summary.link_bytes.items()]
        lines.append("moved  " + "  ".join(moved))
    if summary.written_bytes:
        lines.append("wrote  " + "  ".join(f"{path} {format_size(n)}" for path, n in summary.written_bytes.items()))
    if summary.export_dir is not None:
        lines.append(f"model  {summary.export_dir}")
    return lines
