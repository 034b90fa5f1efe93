"""Text rendering of a report for the terminal, and helpers shared with the HTML page."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence

from megatrain.base.observer import Sample, format_preferences, format_rank, format_samples
from megatrain.extras.report.figures import CAUSES, COMPUTING, Figures, PathWrites, PlanComparison
from tiered.units import GiB, MiB, format_decimal_size, format_duration, format_size

__all__ = ["binary_unit", "report_lines"]

_NAME_WIDTH, _NUMBER_WIDTH = 18, 12
_SMALLEST_SHARE = 0.001  # share of a step below which a part is omitted
_LARGEST_EXPONENT = 709.0  # exp() of larger numbers overflows


def report_lines(figures: Figures) -> list[str]:
    """Return the lines of a run's report."""
    lines = [_headline(figures)]
    if figures.headline:
        lines.append(figures.headline)
    if figures.state in ("failed", "died") and figures.message:
        lines.append(f"{'why' if figures.state == 'failed' else 'said last'}: {figures.message}")
    if figures.first_loss is None:
        lines.append("no step was recorded: nothing to compare")
    table = list(_comparison(figures))
    if table:
        header = f"{'':<{_NAME_WIDTH}}{'planned':>{_NUMBER_WIDTH}}{'measured':>{_NUMBER_WIDTH}}"
        lines += [header, *table]
    if figures.time_s:
        lines.append("mean step   " + " | ".join(_times(figures)))
    lines += _topic_lines(figures)
    return lines


def _headline(figures: Figures) -> str:
    parts = [f"report  {figures.name}", f"{figures.state} {figures.step:,}/{figures.max_steps:,}"]
    if figures.seconds:
        parts.append(f"{format_duration(figures.seconds)} with evaluations and saves")
    if figures.first_loss is not None and figures.last_loss is not None:
        name, count = f"{figures.loss_name} loss" if figures.loss_name else "loss", figures.num_averaged
        note = f" (means of {count} steps)" if count > 1 else ""
        parts.append(f"{name} {figures.first_loss:z.4f} -> {figures.last_loss:z.4f}{note}")
    for name, losses in figures.evaluations.items():
        start, end = losses[0][1], losses[-1][1]
        label = f"{name} cross entropy" if figures.loss_name else name
        parts.append(f"{label} {end:z.4f}" if len(losses) == 1 else f"{label} {start:z.4f} -> {end:z.4f}")
    return "   ".join(parts)


def _comparison(figures: Figures) -> Iterator[str]:
    if figures.step_s.measured is not None:
        error = figures.step_s.error
        note = "doctor measured no rates for a plan of times"
        if error is not None:
            note = f"{1 + error:.1f} times as long" if error > 1 else f"{error:+.0%}"
        yield _row("median step s", figures.step_s, 1.0, note, digits=3 if (figures.step_s.measured or 0) < 10 else 1)
    for tier, peak in figures.tiers.items():
        if not (peak.planned or peak.measured):
            continue
        capacity = figures.capacity_bytes.get(tier)
        unit, name = binary_unit(max(peak.planned or 0, peak.measured or 0))
        capacity_note = f"of {capacity / unit:,.1f}; planned: the least that it needs" if capacity else ""
        yield _row(f"{tier} {name}", peak, unit, capacity_note)
    for link, traffic in figures.links.items():
        if not (traffic.planned or traffic.measured):
            continue
        unit, name = binary_unit(max(traffic.planned or 0, traffic.measured or 0))
        error = traffic.error
        note = "" if error is None else "per step" if error == 0 else f"per step, {error:+.2%}"
        note = ", ".join(part for part in (note, figures.link_paths.get(link)) if part)
        yield _row(f"{link} {name}", traffic, unit, note)


def _row(name: str, pair: PlanComparison, unit: float, note: str = "", *, digits: int = 1) -> str:
    texts = ("-" if value is None else f"{value / unit:,.{digits}f}" for value in (pair.planned, pair.measured))
    cells = "".join(f"{text:>{_NUMBER_WIDTH}}" for text in texts)
    return f"{name:<{_NAME_WIDTH}}{cells}   {note}".rstrip()


def _times(figures: Figures) -> Sequence[str]:
    total = sum(figures.time_s.values())
    return [
        f"{cause_name(cause)} {format_duration(seconds)} ({seconds / total:.0%})"
        for cause, seconds in figures.time_s.items()
        if seconds > _SMALLEST_SHARE * total or cause == COMPUTING
    ]


def cause_name(cause: str) -> str:
    """Return the displayed name of a part of a step."""
    return CAUSES.get(cause, cause)


def binary_unit(nbytes: float) -> tuple[int, str]:
    """Return the common unit, and its name, for printing several sizes of at most ``nbytes`` bytes."""
    return (GiB, "GiB") if nbytes >= GiB else (MiB, "MiB")


def perplexity(loss: float) -> float:
    """Return ``exp(loss)``, or infinity if it would overflow."""
    return math.inf if loss > _LARGEST_EXPONENT else math.exp(loss)


def quality(figures: Figures, name: str, step: int, loss: float) -> str:
    """Return the metrics that are printed after an evaluation's loss."""
    preferences = figures.judged.get(name, {}).get(step)
    return format_preferences(preferences) if preferences else f"perplexity {perplexity(loss):.2f}"


def format_flops(flops_per_s: float) -> str:
    """Format a rate of floating-point operations with a suitable unit."""
    for unit, name in ((1e15, "PFLOP/s"), (1e12, "TFLOP/s"), (1e9, "GFLOP/s")):
        if flops_per_s >= unit:
            return f"{flops_per_s / unit:.1f} {name}"
    return f"{flops_per_s / 1e6:.0f} MFLOP/s"


def _speed(figures: Figures) -> Iterator[str]:
    if figures.tokens_per_s is not None:
        speed = f"{figures.tokens_per_s:,.0f} tok/s (trained {figures.trained_tokens_per_s or 0:,.0f})"
        if figures.hardware_flops_per_s:
            model, hardware = format_flops(figures.model_flops_per_s or 0), format_flops(figures.hardware_flops_per_s)
            speed += f"   {model} of the model, {hardware} computed"
        yield speed


def _evaluations(figures: Figures) -> Iterator[str]:
    for name, losses in figures.evaluations.items():
        step, loss = losses[-1]
        best_step, best_loss = min(losses, key=lambda each: each[1])
        note = f"; best {best_loss:.4f} at step {best_step:,}" if best_loss < loss else ""
        yield f"{name}: loss {loss:.4f}, {quality(figures, name, step, loss)} at step {step:,}{note}"


def _tokens(figures: Figures) -> Iterator[str]:
    if figures.num_real_tokens:
        padding = "" if figures.padding_share is None else f", padding {figures.padding_share:.1%}"
        yield f"{figures.num_real_tokens:,} real, {figures.num_trained_tokens:,} trained{padding}"


def _memory(figures: Figures) -> Iterator[str]:
    if figures.rss_first_bytes is not None and figures.rss_last_bytes is not None:
        growth_mib = (figures.rss_last_bytes - figures.rss_first_bytes) / MiB
        other_bytes = figures.beside_tier_bytes
        other_text = f"; the RAM tier + {format_size(other_bytes)} of Python, libraries and data" if other_bytes else ""
        yield f"process {format_size(figures.rss_last_bytes)}, {growth_mib:+.1f} MiB since its first steps{other_text}"


def _checkpoints(figures: Figures) -> Iterator[str]:
    if figures.checkpoints:
        newest = figures.checkpoints[-1]
        stalls = sum(checkpoint.get("stall_s", 0.0) for checkpoint in figures.checkpoints)
        count = f"{len(figures.checkpoints)} checkpoint{'s' if len(figures.checkpoints) > 1 else ''}"
        yield (
            f"{count}, the last at step {newest['step']}, "
            f"{format_size(newest.get('nbytes', 0))}; training waited {stalls:.1f} s for them in total"
        )


def _starts(figures: Figures) -> Iterator[str]:
    if figures.restarts:
        steps = ", ".join(f"step {step}" for step, _ in figures.restarts)
        count = "once" if len(figures.restarts) == 1 else f"{len(figures.restarts)} times"
        yield f"continued {count}, after {steps}; peaks and bytes per step are from the last start"


def _samples(figures: Figures) -> Iterator[str]:
    for name, samples in figures.samples.items():
        yield f"samples of {name} at step {samples.step:,}"
        yield from format_samples([Sample(**row) for row in samples.rows])


def _usage(figures: Figures) -> Iterator[str]:
    if usage := figures.process_usage:
        times = f"{usage['user_s']:.2f} s user, {usage['system_s']:.2f} s system"
        yield f"{times}, {usage['page_faults']:,.0f} page faults per step"


#: Topics after the table, each with a label and a function that returns its lines. The label is "" if the lines contain
#: labels. A topic without figures has no lines.
_TOPICS: Sequence[tuple[str, Callable[[Figures], Iterable[str]]]] = (
    ("speed", _speed),
    ("eval", _evaluations),
    ("", _samples),
    ("answers", lambda f: [f"{format_preferences(f.preferences)}, means over the last steps"] if f.preferences else []),
    ("tokens", _tokens),
    ("memory", _memory),
    ("cpu", _usage),
    ("", lambda f: (f"rank {number:<2} {format_rank(rank)}" for number, rank in enumerate(f.ranks))),
    ("wrote", lambda f: (f"{path}   {_wear(drive)}" for path, drive in f.drives.items() if drive.nbytes)),
    ("saved", _checkpoints),
    ("starts", _starts),
    ("trace", lambda f: [] if f.timeline is None else [f"{f.timeline}: open it at https://ui.perfetto.dev"]),
    ("model", lambda f: [] if f.export_dir is None else [f.export_dir]),
)


def _topic_lines(figures: Figures) -> Iterator[str]:
    """Yield the lines of all topics that follow the table."""
    for label, make_lines in _TOPICS:
        for line in make_lines(figures):
            yield f"{label:<7} {line}" if label else line


def _wear(drive: PathWrites) -> str:
    text = f"{format_decimal_size(drive.nbytes)} during steps"
    per_step = drive.bytes_per_step
    if per_step.measured is not None:
        planned_text = "" if per_step.planned is None else f", planned {format_decimal_size(per_step.planned)}"
        text += f" ({format_decimal_size(per_step.measured)} per step{planned_text})"
    if drive.lifetime_bytes is not None:
        text += f"; all runs in this folder {format_decimal_size(drive.lifetime_bytes)}"
        if drive.share_of_limit is not None:
            text += f", {drive.share_of_limit:.1%} of max_written {format_decimal_size(drive.limit_bytes or 0)}"
    return text
