"""Observers that print a run's events: as lines, as JSON, or above a live view."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, Self

import click
from rich.console import Console, RenderableType
from rich.text import Text

from megatrain.base.observer import (
    CheckpointMetrics,
    EvaluationMetrics,
    RunInfo,
    RunObserver,
    RunSummary,
    StepMetrics,
    format_checkpoint,
    format_evaluation,
    format_samples,
    format_step,
    format_tiers,
)
from megatrain.base.progress import Activity
from megatrain.models.hub import FetchedFile
from megatrain.models.hub import fetch_weights as fetch_from_hub

from .console import nonzero_sizes, print_line
from .live_view import LiveView, live_view
from .plan_text import print_plan
from .summary_text import summary_lines
from .terminal import echo_wrapped

if TYPE_CHECKING:
    from types import TracebackType

    from megatrain.plan.plan import Plan


class MessageObserver(RunObserver):
    """Observer that prints only messages, on stderr."""

    def on_message(self, text: str) -> None:
        echo_wrapped(text, err=True)


def fetch_weights(plan: Plan, *, show_files: bool = True, show_bar: bool = True) -> None:
    """Fetch a model's weights from the hub, if the run needs them."""

    def print_file(file: FetchedFile) -> None:
        click.echo(str(file), err=True)

    model = plan.run.model
    if model.hub is not None and not model.table.train_from_scratch:
        fetch_from_hub(model.hub, print_file if show_files else None, show_bar=show_bar)


class ConsoleObserver(RunObserver):
    """Base class of console observers. Prints only plans. As a context manager, restores the terminal on exit."""

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
    """Observer that prints the plan of a new run after the checks, or one line for a continued run.

    Args:
        config: Path of the config file, quoted for a command line.
        note: Message to print after the plan, or "".
    """

    def __init__(self, console: ConsoleObserver, plan: Plan, config: str, note: str = "") -> None:
        self._console, self._plan, self._config, self._note = console, plan, config, note

    def on_ready(self, step: int | None) -> None:
        if step is None:
            self._console.show_plan(self._plan)
        else:
            sizes = format_tiers(nonzero_sizes(self._plan.totals), self._plan.budgets)
            self._console.on_message(f"plan   {sizes}; `megatrain-tier plan {self._config}` shows details")
        if self._note:
            self._console.on_message(self._note)


class PlainObserver(ConsoleObserver):
    """Observer that prints one line per ``logging_steps`` steps, without control characters."""

    def __init__(self, *, logging_steps: int = 1, console: Console | None = None) -> None:
        self._logging_steps = logging_steps
        self._console = console or Console(highlight=False)

    def show_plan(self, plan: Plan) -> None:
        print_plan(plan, console=self._console)

    def on_start(self, info: RunInfo) -> None:
        self._print_line(
            f"start  {info.run_name}: {info.task} on {info.device}, {info.max_steps} steps of "
            f"{info.tokens_per_step:,} tokens"
        )

    def on_step(self, metrics: StepMetrics) -> None:
        if _is_shown(metrics, self._logging_steps):
            self._print_line(format_step(metrics))

    def on_evaluation(self, metrics: EvaluationMetrics) -> None:
        self._print_line(format_evaluation(metrics))
        for line in format_samples(metrics.samples):
            self._print_line(line)

    def on_checkpoint(self, metrics: CheckpointMetrics) -> None:
        self._print_line(format_checkpoint(metrics))

    def on_message(self, text: str) -> None:
        self._print_line(text)

    def on_end(self, summary: RunSummary) -> None:
        for line in summary_lines(summary):
            self._print_line(line)

    def _print_line(self, text: str) -> None:
        print_line(self._console, text)


class JsonObserver(ConsoleObserver):
    """Observer that prints one JSON object per line on stdout."""

    def __init__(self, *, logging_steps: int = 1, console: Console | None = None) -> None:
        self._logging_steps = logging_steps
        self._console = console or Console()

    def on_step(self, metrics: StepMetrics) -> None:
        if _is_shown(metrics, self._logging_steps):
            self._print_object({"event": "step", **metrics.to_json()})

    def on_evaluation(self, metrics: EvaluationMetrics) -> None:
        self._print_object({"event": "evaluation", **metrics.to_json()})

    def on_checkpoint(self, metrics: CheckpointMetrics) -> None:
        self._print_object({"event": "checkpoint", **metrics.to_json()})

    def on_message(self, text: str) -> None:
        self._print_object({"event": "message", "text": text})

    def on_end(self, summary: RunSummary) -> None:
        self._print_object({"event": "end", **summary.to_json()})

    def _print_object(self, values: Mapping[str, Any]) -> None:
        self._console.out(json.dumps(values), highlight=False)


class LiveObserver(PlainObserver):
    """Observer with a live view of a few lines; messages scroll above the view.

    Args:
        logging_steps: Number of steps after which the shown metrics are updated.
        console: Terminal. Default: stdout.
        activity: Current activity of the run, which the view shows.
        is_lost: Function that returns whether the terminal is gone. If so, lines are printed.
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
        self._shown_metrics: StepMetrics | None = None
        self._evaluations: dict[str, EvaluationMetrics] = {}

    def __enter__(self) -> Self:
        self._open()
        return self

    def show_plan(self, plan: Plan) -> None:
        if self._view is None:
            super().show_plan(plan)
            return
        terminal = self._console  # Only the view's thread may write to this console, so render the plan on another.
        buffer = Console(
            file=io.StringIO(), width=terminal.width, force_terminal=terminal.is_terminal, color_system="standard",
            no_color=terminal.no_color, highlight=False,
        )  # fmt: skip
        print_plan(plan, console=buffer)
        assert isinstance(buffer.file, io.StringIO)
        self._view.print_message(Text.from_ansi(buffer.file.getvalue().rstrip("\n")))

    def on_start(self, info: RunInfo) -> None:
        self._open()
        super().on_start(info)

    def on_step(self, metrics: StepMetrics) -> None:
        if _is_shown(metrics, self._logging_steps):
            self._shown_metrics = metrics
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
            view.close(keep_picture=self._shown_metrics is not None)

    def _open(self) -> None:
        if self._view is None:
            self._activity.is_watched = True
            self._view = LiveView(self._console, self._picture, self._is_lost)

    def _picture(self) -> RenderableType:
        snapshot = self._activity.snapshot()
        return live_view(self._shown_metrics, snapshot, self._evaluations, width=self._console.width)

    def _print_line(self, text: str) -> None:
        if self._view is not None:
            self._view.print_message(text)
        elif self._is_lost():
            print(text, flush=True)
        else:
            super()._print_line(text)


def make_observer(
    progress: str,
    *,
    logging_steps: int = 1,
    console: Console | None = None,
    activity: Activity | None = None,
    is_lost: Callable[[], bool] = lambda: False,
) -> ConsoleObserver:
    """Return the observer for ``logging.progress``. "auto" is a live view on a terminal, and lines otherwise."""
    console = console or Console(highlight=False)
    if progress == "none":
        return ConsoleObserver()
    if progress == "json":
        return JsonObserver(logging_steps=logging_steps, console=console)
    if progress == "bar" or (progress == "auto" and console.is_terminal):
        return LiveObserver(logging_steps=logging_steps, console=console, activity=activity, is_lost=is_lost)
    return PlainObserver(logging_steps=logging_steps, console=console)


def _is_shown(metrics: StepMetrics, logging_steps: int) -> bool:
    """Return whether a step is shown: the first, the last, and every ``logging_steps``-th step."""
    return metrics.step % logging_steps == 0 or metrics.step in (1, metrics.max_steps)
