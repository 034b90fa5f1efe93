"""Two runs beside each other: what came of them, and which keys of their configs differ."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from megatrain.extras.report.figures import Figures
from tiered.units import format_duration, format_size

__all__ = ["Beside", "compare", "names_of", "setting_differences"]


@dataclass(frozen=True, slots=True)
class Beside:
    """A figure of two runs, as text; "-": not known. ``difference`` is of the first one, seen from the second."""

    name: str
    first: str
    second: str
    difference: str = ""


def names_of(first: Figures, second: Figures) -> tuple[str, str]:
    """Return what to call two runs: their names, or their folders where these are the same."""
    return (first.name, second.name) if first.name != second.name else (first.path, second.path)


def compare(first: Figures, second: Figures) -> Iterator[Beside]:
    """Yield what came of two runs, row by row."""
    yield Beside("steps", f"{first.step:,}", f"{second.step:,}")
    yield _row("last loss (mean)", first.last_loss, second.last_loss, "{:.4f}".format)
    for name in dict.fromkeys([*first.evaluations, *second.evaluations]):
        last, other = (
            each.evaluations[name][-1][1] if each.evaluations.get(name) else None for each in (first, second)
        )
        yield _row(f"{name} loss", last, other, "{:.4f}".format)
    yield _row("seconds per step", first.step_s.measured, second.step_s.measured, format_duration)
    yield _row("tokens per second", first.tokens_per_s, second.tokens_per_s, "{:,.0f}".format)
    for tier in dict.fromkeys([*first.tiers, *second.tiers]):
        peak, other = (each.tiers[tier].measured if tier in each.tiers else None for each in (first, second))
        yield _row(f"{tier}, most in use", peak, other, format_size)
    for link in dict.fromkeys([*first.links, *second.links]):
        moved, other = (each.links[link].measured if link in each.links else None for each in (first, second))
        yield _row(f"{link} per step", moved, other, format_size)
    yield _row("process, most memory", first.rss_peak_bytes, second.rss_peak_bytes, format_size)


def setting_differences(first: Figures, second: Figures) -> Iterator[Beside]:
    """Yield the keys of the configs that differ; a key that one run leaves out has its default there."""
    ours, theirs = ({setting.key: setting for setting in each.settings} for each in (first, second))
    for key in dict.fromkeys([*ours, *theirs]):
        left, right = (
            known[key].value if key in known else other[key].default or "not set"
            for known, other in ((ours, theirs), (theirs, ours))
        )
        if left != right:
            yield Beside(key, left, right)


def _row(name: str, first: float | None, second: float | None, form: Callable[[float], str]) -> Beside:
    left, right = ("-" if value is None else form(value) for value in (first, second))
    if first is None or second is None or not second:
        return Beside(name, left, right)
    change = first / second - 1
    return Beside(name, left, right, "the same" if first == second else f"{change:+.2%}")
