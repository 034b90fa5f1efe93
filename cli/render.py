"""Console output: the plan as a table, progress as a live view or lines, and the summary."""

from __future__ import annotations

import dataclasses
import io
import json
import shlex
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Self

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from megatrain.base.observer import (
    CheckpointMetrics,
    EvaluationMetrics,
    RunInfo,
    RunObserver,
    RunSummary,
    StepMetrics,
    format_checkpoint,
    format_eta,
    format_evaluation,
    format_lr,
    format_samples,
    format_stalls,
    format_step,
    format_tiers,
)
from megatrain.base.progress import Activity, Moment
from tiered.units import GiB, MiB, format_duration, format_size

from .terminal import given_columns, wrap_words

if TYPE_CHECKING:
    from types import TracebackType

    from megatrain.plan.plan import Plan
    from megatrain.plan.simulate import SimulatedStep

_REFRESH_S = 0.25  # Drawing takes a few milliseconds.
_CLOSE_TIMEOUT_S = 5.0  # wait for a stopped terminal
_SHORTEST_TEXTS, _LONGEST_TEXTS, _SHORTEST_BAR = 47, 54, 8  # columns
_LONGEST_NAME = 24

_LEAST_TABLE = 50  # minimum columns of a table of tiers
PLAIN_WIDTH = 140  # columns of a table in a file, so that notes fit on one line


def text_width(console: Console) -> int:
    """Return the columns of text: ``COLUMNS``, the width of the terminal, or ``PLAIN_WIDTH`` for a file or pipe."""
    # If the width is 0, rich prints nothing.
    return given_columns() or (console.width if console.is_terminal else 0) or PLAIN_WIDTH


def print_plan(
    plan: Plan,
    *,
    as_json: bool = False,
    simulated: SimulatedStep | None = None,
    run_lines: Sequence[str] = (),
    console: Console | None = None,
    problem: str = "",
) -> None:
    """Print a plan as a table or as one JSON object. The last line of the text states whether it fits.

    Args:
        run_lines: lines about the whole run, printed after the lines about a step.
        console: console to print on; default: stdout.
        problem: why a run would be refused although its blocks fit the tiers, or "".
    """
    from megatrain.plan import show
    from megatrain.plan.process import process_memory

    console = console or Console()
    console.width = text_width(console)
    if as_json:
        values = plan_to_json(plan)
        if simulated is not None:
            values["simulated"] = dataclasses.asdict(simulated)
        if problem:
            values["problem"] = problem
        console.out(json.dumps(values), highlight=False)
        return
    console.print(Text(show.headline(plan), style="bold"))
    if console.width < _LEAST_TABLE:
        for line in _narrow_plan(plan):
            print_line(console, line, indent=2)
    else:
        console.print(plan_table(plan))
    print_line(console, show.process_line(process_memory(plan)), indent=16)
    if moved := "  ".join(f"{link} {format_size(nbytes)}" for link, nbytes in plan.traffic.items() if nbytes):
        print_line(console, f"moved per step  {moved}", indent=16)
    for line in show.estimate_lines(plan.estimate) if plan.estimate is not None else ():
        print_line(console, line, indent=16)
    for line in (*(() if simulated is None else (simulated.line,)), *run_lines):
        print_line(console, line, indent=16)
    for message in show.messages(plan):
        print_line(console, message, indent=0)
    for each in plan.objections:
        name, style = ("problem", "red") if each.refuses else ("warning", "yellow")
        print_line(console, f"{name:<7} {each}", indent=8, style=style)
    if problem:
        print_line(console, f"problem {problem}", indent=8, style="red")
    if not plan.fits:
        console.print(Text("does not fit.", style="red"))
    elif problem:
        console.print(Text("fits the tiers, but `run` would refuse it here.", style="red"))
    elif any(each.refuses for each in plan.objections):
        machine = plan.run.tiers.machine
        there = "this machine: `run` would refuse it here." if machine is None else f"{machine.name}."
        console.print(Text(f"fits, but not on {there}", style="red"), soft_wrap=True)
    else:
        where = "." if plan.run.tiers.machine is None else f" on {plan.run.tiers.machine.name} (predicted)."
        console.print(Text(f"fits{where}", style="green"))


def _narrow_plan(plan: Plan) -> Iterator[str]:
    """Yield the rows of ``plan_table`` as lines that can be wrapped."""
    from megatrain.plan.show import table_rows

    def sizes_of(sizes: Mapping[str, int]) -> str:
        return ", ".join(f"{tier} {format_size(sizes[tier])}" for tier in plan.tiers if sizes.get(tier))

    for kind, sizes, note in table_rows(plan):
        if any(sizes.values()):
            yield f"{kind}: {sizes_of(sizes)}; {note}"
    yield f"total: {sizes_of(plan.totals)}"
    yield f"budget: {sizes_of({tier: plan.budgets.get(tier, 0) for tier in plan.tiers if plan.totals.get(tier)})}"


def print_line(console: Console, text: str, *, indent: int = 7, style: str = "") -> None:
    """Print text of one or more lines, wrapped between words on a terminal.

    Args:
        indent: columns before a continued line, usually the width of the name at the start.
    """
    if console.is_terminal:
        text = "\n".join(wrap_words(text, console.width, indent=indent))
    console.print(Text(text, style=style), soft_wrap=True)


def plan_to_json(plan: Plan) -> dict[str, Any]:
    """Return a plan as JSON values, with sizes in bytes."""
    from megatrain.plan import show
    from megatrain.plan.process import process_memory

    memory = process_memory(plan)
    estimate, objections, machine = plan.estimate, plan.objections, plan.run.tiers.machine
    return {
        "headline": show.headline(plan),
        "fits": plan.fits,
        "machine": None if machine is None else {"name": machine.name, "title": machine.title},
        "rows": [{"kind": kind, "bytes": dict(sizes), "note": note} for kind, sizes, note in show.table_rows(plan)],
        "totals": dict(plan.totals),
        "process_bytes": memory.total_bytes,
        "process": dataclasses.asdict(memory),
        "budgets": dict(plan.budgets),
        "traffic_per_step": dict(plan.traffic),
        "workspace_is_exact": not plan.guesses,
        "guesses": list(plan.guesses),
        "messages": list(show.messages(plan)),
        "estimate": None if estimate is None else estimate.to_json(),
        "fits_this_machine": plan.fits and not any(each.refuses for each in objections),
        "objections": [dataclasses.asdict(each) for each in objections],
    }


def plan_table(plan: Plan) -> Table:
    """Return a table of kinds by tiers with totals and budgets, in GiB, or in MiB if all sizes are small."""
    from megatrain.plan.show import table_rows

    largest = max([*plan.totals.values(), *plan.budgets.values()], default=0)
    unit, unit_name = (GiB, "GiB") if max(plan.totals.values(), default=largest) >= 4 * GiB else (MiB, "MiB")

    def cell(sizes: Mapping[str, int], tier: str) -> str:
        nbytes = sizes.get(tier, 0)
        return "-" if nbytes == 0 else f"{nbytes / unit:,.1f}" if nbytes >= unit / 20 else "<0.1"

    used = [tier for tier in plan.tiers if plan.totals.get(tier)]
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("", no_wrap=True)
    for tier in used:
        table.add_column(tier.upper(), justify="right", no_wrap=True)
    table.add_column("note", overflow="fold")
    for kind, sizes, note in table_rows(plan):
        if any(sizes.values()):
            table.add_row(kind, *(cell(sizes, tier) for tier in used), note)
    table.add_row(f"total {unit_name}", *(cell(plan.totals, tier) for tier in used), "", style="bold")
    over = [tier for tier in plan.tiers if tier in plan.budgets and plan.totals.get(tier, 0) > plan.budgets[tier]]
    budget_style = "red" if over else ""
    table.add_row("budget", *(cell(plan.budgets, tier) for tier in used), "", style=budget_style)
    return table


class ConsoleObserver(RunObserver):
    """Base class of console observers, and an observer without output. The context manager restores the terminal."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Restore the terminal. Idempotent."""

    def show_plan(self, plan: Plan) -> None:
        """Print a plan."""
        print_plan(plan)


class PlanObserver(RunObserver):
    """Shows the plan of a new run after its checks have passed, or one line for a continued run."""

    def __init__(self, console: ConsoleObserver) -> None:
        self._console = console
        self._plan: Plan | None = None
        self._config, self._note = "", ""

    def will_show(self, plan: Plan, config: str, note: str = "") -> None:
        """Set the plan to show.

        Args:
            config: quoted path of the config file, for a command line.
            note: additional message at the start, or "".
        """
        self._plan, self._config, self._note = plan, config, note

    def on_ready(self, step: int | None) -> None:
        if self._plan is None:
            return
        if step is None:
            self._console.show_plan(self._plan)
        else:
            sizes = format_tiers(_used(self._plan.totals), self._plan.budgets)
            self._console.on_message(f"plan   {sizes}; `megatrain-tier plan {self._config}` shows details")
        if self._note:
            self._console.on_message(self._note)


def _used(sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the nonzero sizes."""
    return {name: nbytes for name, nbytes in sizes.items() if nbytes}


class PlainObserver(ConsoleObserver):
    """Prints one line per ``logging_steps`` steps, without control characters."""

    def __init__(self, *, logging_steps: int = 1, console: Console | None = None) -> None:
        self._logging_steps = logging_steps
        self._console = console or Console(highlight=False)

    def show_plan(self, plan: Plan) -> None:
        print_plan(plan, console=self._console)

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
        for line in format_samples(metrics.samples):
            self._line(line)

    def on_checkpoint(self, metrics: CheckpointMetrics) -> None:
        self._line(format_checkpoint(metrics))

    def on_message(self, text: str) -> None:
        self._line(text)

    def on_end(self, summary: RunSummary) -> None:
        for line in summary_lines(summary):
            self._line(line)

    def _line(self, text: str) -> None:
        print_line(self._console, text)


class JsonObserver(ConsoleObserver):
    """Prints one JSON object per line on stdout."""

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


class LiveView:
    """A few lines at the end of a terminal, redrawn several times a second; messages scroll above them.

    Only a thread of this object writes, so that neither drawing nor a stopped terminal (Ctrl-S, a dead connection)
    blocks the caller.

    Args:
        picture: returns the lines to draw; called by the thread.
        is_lost: returns whether the terminal is gone; then messages are printed as lines and nothing is drawn.
    """

    def __init__(
        self, console: Console, picture: Callable[[], RenderableType], is_lost: Callable[[], bool] = lambda: False
    ) -> None:
        self._console, self._picture, self._is_lost = console, picture, is_lost
        self._messages: deque[str | Text] = deque()
        self._news = threading.Event()
        self._over, self._stays = False, True
        self._thread = threading.Thread(target=self._run, name="view", daemon=True)
        self._thread.start()

    def say(self, text: str | Text) -> None:
        """Print a message above the view. A string is wrapped; a ``Text`` is printed unchanged."""
        self._messages.append(text)
        self._news.set()

    def close(self, *, stays: bool = True) -> None:
        """Draw one last time and restore the terminal. Idempotent; stops waiting for a stopped terminal.

        Args:
            stays: whether the last picture stays visible.
        """
        self._stays = stays
        self._over = True
        self._news.set()
        self._thread.join(_CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        live = Live(self._picture(), console=self._console, auto_refresh=False)
        live.start(refresh=True)
        is_drawn = True
        while True:
            self._news.wait(_REFRESH_S)
            self._news.clear()
            is_over = self._over  # Read it before taking messages, so that all messages before ``close`` are printed.
            if is_drawn and self._is_lost():
                is_drawn = False
                self._console.file = io.StringIO()  # Keep the sequences that restore a terminal out of the log.
                live.stop()
            while self._messages:
                text = self._messages.popleft()
                if self._is_lost():
                    print(text, flush=True)
                elif isinstance(text, Text):
                    self._console.print(text, soft_wrap=True)
                else:
                    print_line(self._console, text)
            if is_drawn:
                live.update(self._picture(), refresh=True)
            if is_over:
                break
        if is_drawn:
            live.transient = not self._stays
            live.stop()


class LiveObserver(PlainObserver):
    """Shows a live view of a few lines; messages scroll above it.

    Args:
        logging_steps: number of steps between two updates of the figures.
        console: terminal; default: stdout.
        is_lost: returns whether the terminal is gone; then lines are printed.
    """

    def __init__(
        self,
        *,
        logging_steps: int = 1,
        console: Console | None = None,
        activity: Activity | None = None,
        is_lost: Callable[[], bool] = lambda: False,
    ) -> None:
        super().__init__(logging_steps=logging_steps, console=console)
        self._view: LiveView | None = None
        self._is_lost = is_lost
        self._activity = activity or Activity()
        self._shown: StepMetrics | None = None
        self._evaluations: dict[str, EvaluationMetrics] = {}

    def __enter__(self) -> Self:
        self._open()
        return self

    def show_plan(self, plan: Plan) -> None:
        if self._view is None:
            super().show_plan(plan)
            return
        mine = self._console  # The view's thread writes to it, so render the plan with another console.
        other = Console(
            file=io.StringIO(), width=mine.width, force_terminal=mine.is_terminal, color_system="standard",
            no_color=mine.no_color, highlight=False,
        )  # fmt: skip
        print_plan(plan, console=other)
        assert isinstance(other.file, io.StringIO)
        self._view.say(Text.from_ansi(other.file.getvalue().rstrip("\n")))

    def on_start(self, info: RunInfo) -> None:
        self._open()
        super().on_start(info)

    def on_step(self, metrics: StepMetrics) -> None:
        if is_shown(metrics, self._logging_steps):
            self._shown = metrics
            if self._is_lost():
                super().on_step(metrics)

    def on_evaluation(self, metrics: EvaluationMetrics) -> None:
        self._evaluations[metrics.name] = metrics
        super().on_evaluation(metrics)

    def on_end(self, summary: RunSummary) -> None:
        self.close()
        super().on_end(summary)

    def close(self) -> None:
        self._activity.is_watched = False
        view, self._view = self._view, None
        if view is not None:
            self._activity.begin("")  # Clear the activity, so that the last picture shows finished work.
            view.close(stays=self._shown is not None)

    def _open(self) -> None:
        if self._view is None:
            self._activity.is_watched = True
            self._view = LiveView(self._console, self._picture, self._is_lost)

    def _picture(self) -> RenderableType:
        moment = self._activity.snapshot()
        return live_view(self._shown, moment, self._evaluations, width=self._console.width)

    def _line(self, text: str) -> None:
        if self._view is not None:
            self._view.say(text)
        elif self._is_lost():
            print(text, flush=True)
        else:
            super()._line(text)


def make_observer(
    progress: str,
    *,
    logging_steps: int = 1,
    console: Console | None = None,
    activity: Activity | None = None,
    is_lost: Callable[[], bool] = lambda: False,
) -> ConsoleObserver:
    """Return the observer for ``logging.progress``. "auto" is a live view on a terminal, and lines otherwise.

    Args:
        console: console to print on; default: stdout.
        activity: current activity that the live view shows.
        is_lost: returns whether the terminal is gone.
    """
    console = console or Console(highlight=False)
    if progress == "none":
        return ConsoleObserver()
    if progress == "json":
        return JsonObserver(logging_steps=logging_steps, console=console)
    if progress == "bar" or (progress == "auto" and console.is_terminal):
        return LiveObserver(logging_steps=logging_steps, console=console, activity=activity, is_lost=is_lost)
    return PlainObserver(logging_steps=logging_steps, console=console)


def is_shown(metrics: StepMetrics, logging_steps: int) -> bool:
    """Return whether a step is shown: the first, the last, and every ``logging_steps``-th step."""
    return metrics.step % logging_steps == 0 or metrics.step in (1, metrics.max_steps)


def live_view(
    metrics: StepMetrics | None,
    moment: Moment = Moment(),  # noqa: B008  -- frozen
    evaluations: Mapping[str, EvaluationMetrics] = MappingProxyType({}),
    *,
    width: int = 80,
) -> RenderableType:
    """Return the view of a run: figures of its last step, and bars for the run, its activity and each tier.

    Args:
        metrics: metrics of the last step, or None before the first step.
        moment: current activity.
        evaluations: last evaluation of each set, by name.
        width: columns, at least 60.
    """
    bars = Table.grid(padding=(0, 2, 0, 0))
    saving = ["save"] if moment.checkpoint_bytes else []
    used = _used(metrics.tier_used_bytes) if metrics is not None else {}
    names = ["run", "now", *saving, *used]
    available = width - max(len(name) for name in names) - 2 * 2
    # The width does not depend on the texts, so that the length of the bars stays constant.
    texts = min(max(_SHORTEST_TEXTS, width // 2), _LONGEST_TEXTS, available - _SHORTEST_BAR)
    bar = available - texts
    lines: list[RenderableType] = []
    if metrics is not None:
        step, max_steps = metrics.step, metrics.max_steps
        figures = Text.assemble(
            ("step ", "dim"), (f"{step}/{max_steps}", "bold"),
            ("  loss ", "dim"), (f"{metrics.loss:z.4f}", "bold green"),
            ("  gnorm ", "dim"), f"{metrics.grad_norm:.2f}",
            ("  lr ", "dim"), format_lr(metrics),
            ("  eta ", "dim"), format_eta(metrics.eta_s),
            no_wrap=True, overflow="ellipsis",
        )  # fmt: skip
        lines.append(figures)
        mean = f"{format_duration(metrics.mean_step_s)}/step (mean)"
        bars.add_row("run", _bar(step, max_steps, bar), _cut(f"{100.0 * step / max_steps:.1f}%  {mean}", texts))
    if moment.doing:
        done, total = (moment.done_bytes, moment.num_bytes) if moment.num_bytes else (moment.part, moment.num_parts)
        bars.add_row("now", _bar(done, total, bar), _cut(describe_moment(moment), texts))
    if moment.checkpoint_bytes:
        done, total = moment.saved_bytes, moment.checkpoint_bytes
        text = f"checkpoint, {format_size(done)} of {format_size(total)}"
        bars.add_row("save", _bar(done, total, bar), _cut(text, texts))
    for tier, nbytes in used.items():
        assert metrics is not None
        text = format_tiers({tier: nbytes}, metrics.tier_capacity_bytes).removeprefix(f"{tier} ")
        bars.add_row(tier, _bar(nbytes, metrics.tier_capacity_bytes.get(tier, 0), bar), _cut(text, texts))
    lines.append(bars)
    last = []
    if metrics is not None:
        speed = f"{metrics.real_tokens_per_s:,.0f} tok/s (trained {metrics.trained_tokens_per_s:,.0f})"
        parts = (speed, format_stalls(metrics.stall_s), f"process {format_size(metrics.rss_bytes)}")
        last.append("  ".join(part for part in parts if part))
    if evaluations:
        shown = (f"{name} loss {each.loss:z.4f} at step {each.step}" for name, each in evaluations.items())
        last.append(f"eval  {'  '.join(shown)}")
    lines += [Text(line, style="dim", no_wrap=True, overflow="ellipsis") for line in last]
    if moment.notice:
        lines.append(Text(moment.notice, style="bold yellow"))
    return Group(*lines)


def describe_moment(moment: Moment) -> str:
    """Describe the current activity, such as "backward layers.3, micro-batch 2/4  1.2 s"."""
    unit = ".".join(moment.unit.split(".")[-2:]).removeprefix("model.")[-_LONGEST_NAME:]
    what = " ".join(part for part in (moment.phase, unit) if part)
    if moment.doing != "step":
        what = f"{moment.doing}  {what}".rstrip()
    elif not what:
        what = "next rows"
    if moment.micro_batch and moment.num_micro_batches > 1:
        what += f", micro-batch {moment.micro_batch}/{moment.num_micro_batches}"
    if moment.num_bytes:
        what = f"{moment.doing}, {format_size(moment.done_bytes)} of {format_size(moment.num_bytes)}"
    return f"{what}  {format_elapsed(moment.seconds)}"


def format_elapsed(seconds: float) -> str:
    """Format a duration, with decimals below a minute."""
    return f"{seconds:.1f} s" if seconds < 60 else format_duration(seconds)


def _bar(done: float, total: float, width: int) -> RenderableType:
    return ProgressBar(total=max(1.0, total), completed=done, width=width)


def _cut(text: str, width: int) -> Text:
    """Shorten a text to ``width`` columns, but keep the duration at its end."""
    if len(text) > width:
        head, mark, tail = text.rpartition("  ")
        text = f"{head[: max(0, width - len(mark) - len(tail) - 2)]}..{mark}{tail}"
    return Text(text, no_wrap=True)


def _loss_lines(summary: RunSummary) -> list[str]:
    """Return a line with the first and the last loss. Means over several steps are less noisy than single losses."""
    count = summary.num_averaged
    if summary.mean_losses is not None and count > 1:
        first, last = summary.mean_losses
        return [f"loss   {first:z.4f} -> {last:z.4f} (means of the first and last {count} steps)"]
    if summary.first_loss is not None and summary.last_loss is not None:
        return [f"loss   {summary.first_loss:z.4f} -> {summary.last_loss:z.4f} (first and last step)"]
    return []


def summary_lines(summary: RunSummary) -> list[str]:
    """Return the lines that are printed at the end of a run."""
    rate = summary.num_real_tokens / summary.seconds if summary.seconds > 0 else 0.0
    verdict = "stopped" if summary.interrupted else "done"
    steps = f"{summary.num_steps} step{'s' if summary.num_steps != 1 else ''}"
    first = f"{verdict}   {steps} in {format_duration(summary.seconds)} of training"
    if summary.num_steps:
        first += f"   {rate:,.0f} tok/s"
    first += f"   {summary.num_real_tokens:,} tokens, {summary.num_trained_tokens:,} trained"
    lines = [first, *_loss_lines(summary)]
    lines += [
        f"eval   {name}: loss {each.loss:z.4f}, {each.quality} at step {each.step}"
        for name, each in summary.evaluations.items()
    ]
    if summary.num_processes > 1:
        lines.append(f"ranks  {summary.num_processes} processes; peak, moved and wrote show the first process")
    if summary.tier_peak_bytes:
        peaks, limits = _used(summary.tier_peak_bytes), summary.tier_capacity_bytes
        tiers = "   ".join(format_tiers({tier: nbytes}, limits) for tier, nbytes in peaks.items())
        lines.append(f"peak   {tiers}   process {format_size(summary.peak_rss_bytes)}")
    if any(summary.link_bytes.values()):
        paths = {link: f" ({path})" for link, path in summary.link_paths.items() if path}
        moved = [f"{link} {format_size(n)}{paths.get(link, '')}" for link, n in _used(summary.link_bytes).items()]
        lines.append("moved  " + "  ".join(moved))
    if written := _used(summary.written_bytes):
        lines.append("wrote  " + "  ".join(f"{path} {format_size(n)}" for path, n in written.items()))
    if summary.export_dir is not None:
        lines.append(f"model  {summary.export_dir}")
        if not _judges_texts(summary.export_dir):
            lines.append(f"next   megatrain-tier generate {shlex.quote(str(summary.export_dir))} --interactive")
    return lines


def _judges_texts(folder: Path) -> bool:
    """Return whether an export is a classifier or a reward model, which generates no text."""
    try:
        names = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("architectures") or ()
    except (OSError, ValueError, AttributeError):
        return False
    return any(str(name).endswith("Classification") for name in names)
