"""Live view of a run: the picture, and the thread that draws it at the bottom of a terminal."""

from __future__ import annotations

import io
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from types import MappingProxyType

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from megatrain.base.observer import (
    EvaluationMetrics,
    StepMetrics,
    format_eta,
    format_lr,
    format_stalls,
    format_tiers,
)
from megatrain.base.progress import ActivitySnapshot
from tiered.units import format_duration, format_size

from .console import nonzero_sizes, print_line

_REFRESH_S = 0.25  # Drawing takes only a few milliseconds of this.
_CLOSE_TIMEOUT_S = 5.0  # maximum wait for a stopped terminal
_SHORTEST_TEXTS, _LONGEST_TEXTS, _SHORTEST_BAR, _SHORTEST_NAME = 47, 54, 8, 3  # columns
_LONGEST_UNIT = 24


class LiveView:
    """A few lines at the bottom of a terminal, redrawn several times a second; messages scroll above them.

    A separate thread does all writes, so that neither drawing nor a stopped terminal (Ctrl-S, a dead connection)
    blocks the caller.

    Args:
        picture: Function that returns the lines to draw. The thread calls it.
        is_lost: Function that returns whether the terminal is gone. If so, messages are printed without a view.
    """

    def __init__(
        self, console: Console, picture: Callable[[], RenderableType], is_lost: Callable[[], bool] = lambda: False
    ) -> None:
        self._console, self._picture, self._is_lost = console, picture, is_lost
        self._messages: deque[str | Text] = deque()
        self._wake_event = threading.Event()
        self._is_closing, self._keep_picture = False, True
        self._thread = threading.Thread(target=self._run, name="view", daemon=True)
        self._thread.start()

    def print_message(self, text: str | Text) -> None:
        """Print a message above the view. A string is wrapped; a ``Text`` is printed unchanged."""
        self._messages.append(text)
        self._wake_event.set()

    def close(self, *, keep_picture: bool) -> None:
        """Draw one last time and restore the terminal. Idempotent. Wait only a few seconds for a stopped terminal.

        Args:
            keep_picture: Whether to leave the last picture on the terminal.
        """
        self._keep_picture = keep_picture
        self._is_closing = True
        self._wake_event.set()
        self._thread.join(_CLOSE_TIMEOUT_S)

    def _run(self) -> None:
        live = Live(self._picture(), console=self._console, auto_refresh=False)
        live.start(refresh=True)
        is_drawn = True
        while True:
            self._wake_event.wait(_REFRESH_S)
            self._wake_event.clear()
            is_closing = self._is_closing  # Read this first, so that messages from before ``close`` are printed.
            if is_drawn and self._is_lost():
                is_drawn = False
                self._console.file = io.StringIO()  # Keep the sequences that restore a terminal out of the log.
                live.stop()
            while self._messages:
                self._print(self._messages.popleft())
            if is_drawn:
                live.update(self._picture(), refresh=True)
            if is_closing:
                break
        if is_drawn:
            live.transient = not self._keep_picture
            live.stop()

    def _print(self, text: str | Text) -> None:
        if self._is_lost():
            print(text, flush=True)
        elif isinstance(text, Text):
            self._console.print(text, soft_wrap=True)
        else:
            print_line(self._console, text)


def live_view(
    metrics: StepMetrics | None,
    snapshot: ActivitySnapshot = ActivitySnapshot(),  # noqa: B008  -- frozen
    evaluations: Mapping[str, EvaluationMetrics] = MappingProxyType({}),
    *,
    width: int = 80,
) -> RenderableType:
    """Return the picture of a run: metrics of its last step, and bars for the run, its activity and each tier.

    Args:
        metrics: Metrics of the last step, or None before the first step.
        snapshot: Current activity.
        evaluations: Last evaluation on each set, by name of the set.
        width: Width in columns, at least 60.
    """
    lines: list[RenderableType] = [] if metrics is None else [_figures(metrics)]
    lines.append(_bars(list(_bar_rows(metrics, snapshot)), width))
    lines += [Text(line, style="dim", no_wrap=True, overflow="ellipsis") for line in _last_lines(metrics, evaluations)]
    if snapshot.notice:
        lines.append(Text(snapshot.notice, style="bold yellow"))
    return Group(*lines)


def _figures(metrics: StepMetrics) -> Text:
    return Text.assemble(
        ("step ", "dim"), (f"{metrics.step}/{metrics.max_steps}", "bold"),
        ("  loss ", "dim"), (f"{metrics.loss:z.4f}", "bold green"),
        ("  gnorm ", "dim"), f"{metrics.grad_norm:.2f}",
        ("  lr ", "dim"), format_lr(metrics),
        ("  eta ", "dim"), format_eta(metrics.eta_s),
        no_wrap=True, overflow="ellipsis",
    )  # fmt: skip


def _bar_rows(metrics: StepMetrics | None, snapshot: ActivitySnapshot) -> Iterator[tuple[str, float, float, str]]:
    """Yield the rows of bars: name, finished amount, total amount, and text."""
    if metrics is not None:
        mean = f"{format_duration(metrics.mean_step_s)}/step (mean)"
        text = f"{100.0 * metrics.step / metrics.max_steps:.1f}%  {mean}"
        yield "run", metrics.step, metrics.max_steps, text
    if snapshot.doing:
        done, total = snapshot.part, snapshot.num_parts
        if snapshot.num_bytes:
            done, total = snapshot.done_bytes, snapshot.num_bytes
        yield "now", done, total, describe_activity(snapshot)
    if snapshot.checkpoint_bytes:
        done, total = snapshot.saved_bytes, snapshot.checkpoint_bytes
        yield "save", done, total, f"checkpoint, {format_size(done)} of {format_size(total)}"
    if metrics is not None:
        limits = metrics.tier_capacity_bytes
        for tier, nbytes in nonzero_sizes(metrics.tier_used_bytes).items():
            yield tier, nbytes, limits.get(tier, 0), format_tiers({tier: nbytes}, limits).removeprefix(f"{tier} ")


def _bars(rows: list[tuple[str, float, float, str]], width: int) -> Table:
    """Return a table of bars. The length of the bars does not depend on the texts."""
    table = Table.grid(padding=(0, 2, 0, 0))
    available = width - max([_SHORTEST_NAME, *(len(name) for name, *_ in rows)]) - 2 * 2
    text_width = min(max(_SHORTEST_TEXTS, width // 2), _LONGEST_TEXTS, available - _SHORTEST_BAR)
    for name, done, total, text in rows:
        bar = ProgressBar(total=max(1.0, total), completed=done, width=available - text_width)
        table.add_row(name, bar, _shorten(text, text_width))
    return table


def _last_lines(metrics: StepMetrics | None, evaluations: Mapping[str, EvaluationMetrics]) -> Iterator[str]:
    if metrics is not None:
        speed = f"{metrics.real_tokens_per_s:,.0f} tok/s (trained {metrics.trained_tokens_per_s:,.0f})"
        parts = (speed, format_stalls(metrics.stall_s), f"process {format_size(metrics.rss_bytes)}")
        yield "  ".join(part for part in parts if part)
    if evaluations:
        summaries = (f"{name} loss {last.loss:z.4f} at step {last.step}" for name, last in evaluations.items())
        yield f"eval  {'  '.join(summaries)}"


def describe_activity(snapshot: ActivitySnapshot) -> str:
    """Describe the current activity, such as "backward layers.3, micro-batch 2/4  1.2 s"."""
    unit = ".".join(snapshot.unit.split(".")[-2:]).removeprefix("model.")[-_LONGEST_UNIT:]
    text = " ".join(part for part in (snapshot.phase, unit) if part)
    if snapshot.doing != "step":
        text = f"{snapshot.doing}  {text}".rstrip()
    elif not text:
        text = "next rows"
    if snapshot.micro_batch and snapshot.num_micro_batches > 1:
        text += f", micro-batch {snapshot.micro_batch}/{snapshot.num_micro_batches}"
    if snapshot.num_bytes:
        text = f"{snapshot.doing}, {format_size(snapshot.done_bytes)} of {format_size(snapshot.num_bytes)}"
    seconds = snapshot.seconds
    return f"{text}  " + (f"{seconds:.1f} s" if seconds < 60 else format_duration(seconds))


def _shorten(text: str, width: int) -> Text:
    """Shorten a text to ``width`` columns, but keep the duration at the end."""
    if len(text) > width:
        head, separator, tail = text.rpartition("  ")
        text = f"{head[: max(0, width - len(separator) - len(tail) - 2)]}..{separator}{tail}"
    return Text(text, no_wrap=True)
