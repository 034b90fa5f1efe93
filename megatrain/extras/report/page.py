"""A report as one HTML page that needs no network, no script and no other file, in light and dark.

``page.html.j2`` is the whole page, its style and its drawings; here are the rows that take more than a format.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from megatrain.api import now_text
from megatrain.base.observer import format_rank
from megatrain.extras.report.charts import COLOR_OF_PART, FRAME, NUM_COLORS, laid_over, lay_out, make_charts
from megatrain.extras.report.compare import compare, names_of, setting_differences
from megatrain.extras.report.figures import Compared, Figures, PathWrites
from megatrain.extras.report.history import RunHistory
from megatrain.extras.report.text import cause_name, format_flops, quality
from tiered.units import format_decimal_size, format_duration, format_size

__all__ = ["render_page"]

_BAD_STATES = ("failed", "died")
_MOST_ROWS = 30  # of evaluations and checkpoints: the newest ones


def render_page(history: RunHistory, figures: Figures, other: tuple[RunHistory, Figures] | None = None) -> str:
    """Return the page of a run; with another one beside it, and its curves over this one's."""
    charts = make_charts(history, figures)
    if other is not None:
        charts = laid_over(charts, names_of(figures, other[1])[0], make_charts(*other), names_of(figures, other[1])[1])
    drawings = [lay_out(chart) for chart in charts]
    template = _template_environment().get_template("page.html.j2")
    return template.render(
        figures=figures,
        other_names=() if other is None else names_of(figures, other[1]),
        beside=() if other is None else list(compare(figures, other[1])),
        other_settings=() if other is None else list(setting_differences(figures, other[1])),
        timeline=None if history.timeline is None else history.timeline.as_uri(),
        starts=history.plan.get("starts", []),
        kind="bad" if figures.state in _BAD_STATES else "good" if figures.state == "done" else "open",
        headline=re.split(r"\s{2,}", figures.headline.strip()),
        tiles=list(_tiles(figures)),
        parts=list(_parts(figures)),
        comparison=[row for row in _comparison(figures) if row[1] != "-" or row[2] != "-"],
        checkpoints=_checkpoints(figures),
        evaluations=list(_evaluations(figures)),
        drawings=[drawing for drawing in drawings if drawing is not None],
        frame=FRAME,
        num_colors=NUM_COLORS,
        most_rows=_MOST_ROWS,
        now=now_text(),
    )


def _template_environment() -> Environment:
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,  # names, paths and messages are text, whatever they hold
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters |= {
        "count": "{:,}".format,
        "duration": format_duration,
        "rank_line": format_rank,
        "moment": lambda text: text.replace("T", " ").replace("+00:00", " UTC"),  # ISO 8601
        "share": "{:.1%}".format,
        "size": format_size,
    }
    return environment


def _tiles(figures: Figures) -> Iterator[tuple[str, str, str]]:
    """Yield (name, value, note) of the figures at the top."""
    yield "steps", f"{figures.step:,}", f"of {figures.max_steps:,}"
    if figures.seconds:
        yield "time", format_duration(figures.seconds), "steps, evaluations, saves"
    if figures.first_loss is not None and figures.last_loss is not None:
        note = f"from {figures.first_loss:z.4f}"
        if figures.num_averaged > 1:
            note += f", means of {figures.num_averaged} steps"
        yield f"{figures.loss_name} loss".strip(), f"{figures.last_loss:z.4f}", note
    for name, evaluated in list(figures.evaluations.items())[:3]:
        losses = [loss for _, loss in evaluated]
        last, best = losses[-1], min(losses)
        note = quality(figures, name, evaluated[-1][0], last) if len(losses) == 1 else f"from {losses[0]:.4f}"
        what = "cross entropy" if figures.loss_name else "loss"
        yield f"{name} {what}", f"{last:z.4f}", f"{note}, best {best:.4f}" if best < last else note
    if figures.tokens_per_s is not None:
        yield "tokens/s", f"{figures.tokens_per_s:,.0f}", f"trained {figures.trained_tokens_per_s or 0:,.0f}"
    if figures.hardware_flops_per_s:
        of_model = f"of the model {format_flops(figures.model_flops_per_s or 0)}"
        yield "computed", format_flops(figures.hardware_flops_per_s), of_model
    if figures.num_real_tokens:
        trained = figures.num_trained_tokens / figures.num_real_tokens
        padding = "" if figures.padding_share is None else f", padding {figures.padding_share:.1%}"
        yield "tokens", f"{figures.num_real_tokens:,}", f"{trained:.1%} trained{padding}"
    if figures.rss_peak_bytes:
        beside = figures.beside_tier_bytes
        note = "most memory" if beside is None else f"RAM tier + {format_size(beside)}"
        yield "process", format_size(figures.rss_peak_bytes), note


def _parts(figures: Figures) -> Iterator[tuple[str, int, float, float]]:
    """Yield (name, number of a colour, seconds, seconds before it) of the parts of a step."""
    before = 0.0
    for cause, seconds in figures.time_s.items():
        if seconds > 0:
            yield cause_name(cause), COLOR_OF_PART.get(cause, NUM_COLORS), seconds, before
            before += seconds


def _comparison(figures: Figures) -> Iterator[tuple[str, str, str, str]]:
    """Yield (name, planned, measured, note)."""
    yield "seconds per step", *_pair(figures.step_s, format_duration), _difference(figures.step_s)
    for tier, peak in figures.tiers.items():
        if not (peak.planned or peak.measured):
            continue
        limit = figures.capacity_bytes.get(tier)
        note = "planned is the least that it needs" + (f"; capacity {format_size(limit)}" if limit else "")
        yield f"{tier}, most in use", *_pair(peak, format_size), note
    for link, moved in figures.links.items():
        if not (moved.planned or moved.measured):
            continue
        note = _joined(_difference(moved), figures.link_paths.get(link, ""))
        yield f"{link} per step", *_pair(moved, format_size), note
    for path, drive in figures.drives.items():
        written = drive.bytes_per_step
        if not (written.planned or written.measured or drive.nbytes or drive.lifetime_bytes):
            continue
        note = _joined(_difference(written), _wear(drive))
        yield f"written per step, {path}", *_pair(written, format_decimal_size), note


def _pair(pair: Compared, format_value: Callable[[float], str]) -> tuple[str, str]:
    planned, measured = ("-" if value is None else format_value(value) for value in (pair.planned, pair.measured))
    return planned, measured


def _difference(pair: Compared) -> str:
    error = pair.error
    if error is None:
        return ""
    return "the same" if abs(error) < 5e-5 else f"{1 + error:.1f} times as much" if error > 1 else f"{error:+.1%}"


def _joined(*notes: str) -> str:
    return "; ".join(note for note in notes if note)


def _wear(drive: PathWrites) -> str:
    text = f"{format_decimal_size(drive.nbytes)} in this run"
    if drive.lifetime_bytes is not None:
        text += f", {format_decimal_size(drive.lifetime_bytes)} by all runs"
    if drive.share_of_limit is not None:
        text += f": {drive.share_of_limit:.1%} of max_written {format_decimal_size(drive.limit_bytes or 0)}"
    return text


def _checkpoints(figures: Figures) -> list[list[str]]:
    """Return a row for each checkpoint, below the names of the columns; without columns of which all are 0."""
    columns: list[tuple[str, str, Callable[[Any], str]]] = [
        ("after step", "step", "{:,}".format),
        ("size", "nbytes", format_size),
        ("written", "written_bytes", format_size),
        ("linked", "linked_bytes", format_size),
        ("took", "seconds", "{:.2f} s".format),
        ("training waited", "stall_s", "{:.2f} s".format),
    ]
    shown = [column for column in columns if any(line.get(column[1]) for line in figures.checkpoints)]
    rows = [[format_value(line.get(key, 0)) for _, key, format_value in shown] for line in figures.checkpoints]
    return [[name for name, _, _ in shown], *rows]


def _evaluations(figures: Figures) -> Iterator[Sequence[str]]:
    """Yield a row for each step with an evaluation: the step, then loss and perplexity of each set."""
    sets = {name: dict(losses) for name, losses in figures.evaluations.items()}
    for step in sorted({step for losses in sets.values() for step in losses}):
        row = [f"{step:,}"]
        for name, losses in sets.items():
            loss = losses.get(step)
            said = "" if loss is None else quality(figures, name, step, loss).removeprefix("perplexity ")
            row += ["-", "-"] if loss is None else [f"{loss:.4f}", said]
        yield row
