"""A report as one page: HTML that needs no network, no script and no other file, in light and dark."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Sequence
from html import escape

from megatrain.checkpoint.state import now_text
from megatrain.report.charts import COLOR_OF_PART, make_charts
from megatrain.report.figures import Compared, Figures
from megatrain.report.history import RunHistory
from megatrain.report.style import STYLE
from megatrain.report.svg import bar, draw_chart
from megatrain.report.text import cause_name, format_flops, perplexity
from tiered.units import format_decimal_size, format_duration, format_size

__all__ = ["draw_page"]

_BAD_STATES = ("failed", "died")
_MOST_CHECKPOINTS = _MOST_EVALUATIONS = 30  # the newest ones


def draw_page(history: RunHistory, figures: Figures) -> str:
    """Return the page of a run."""
    charts = "".join(draw_chart(chart) for chart in make_charts(history, figures))
    body = "".join(
        [
            _head(figures),
            _tiles(figures),
            _time(figures),
            _section("Planned and measured", _comparison(figures)),
            f'<section><h2>Curves</h2><div class="charts">{charts}</div></section>' if charts else "",
            _section("Evaluations", _evaluations(figures)),
            _section("Checkpoints", _checkpoints(figures)),
            _section("Starts", _starts(history)),
            _section("Config: what is not the default", _settings(figures)),
            _section("Where it ran", _machine(figures)),
        ]
    )
    title = escape(f"{figures.name}: {figures.state}")
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{title}</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{STYLE}</style></head><body><main>{body}"
        f"<footer>written {escape(_moment(now_text()))} by megatrain-tier report</footer></main></body></html>\n"
    )


def _head(figures: Figures) -> str:
    kind = "bad" if figures.state in _BAD_STATES else "good" if figures.state == "done" else "open"
    message, headline = "", " &middot; ".join(escape(part) for part in re.split(r"\s{2,}", figures.headline.strip()))
    if figures.state in _BAD_STATES and figures.message:
        message = f'<p class="message">{escape(figures.message)}</p>'
    return (
        f'<header><h1>{escape(figures.name)} <span class="state {kind}">{escape(figures.state)}</span></h1>'
        f'<p class="sub">{headline}</p><p class="sub path">{escape(figures.path)}</p>{message}</header>'
    )


def _tiles(figures: Figures) -> str:
    tiles: list[tuple[str, str, str]] = [("steps", f"{figures.step:,}", f"of {figures.max_steps:,}")]
    if figures.seconds:
        tiles.append(("time", format_duration(figures.seconds), "steps, evaluations, saves"))
    if figures.first_loss is not None and figures.last_loss is not None:
        tiles.append(("loss", f"{figures.last_loss:.4f}", f"from {figures.first_loss:.4f}"))
    for name, losses in list(figures.evaluations.items())[:3]:
        (first, *_, last), best = [loss for _, loss in (losses[0], *losses)], min(loss for _, loss in losses)
        note = f"perplexity {perplexity(last):.2f}" if len(losses) == 1 else f"from {first:.4f}"
        tiles.append((f"{name} loss", f"{last:.4f}", f"{note}, best {best:.4f}" if best < last else note))
    if figures.tokens_per_s is not None:
        tiles.append(("tokens/s", f"{figures.tokens_per_s:,.0f}", f"trained {figures.trained_tokens_per_s or 0:,.0f}"))
    if figures.hardware_flops_per_s:
        model = format_flops(figures.model_flops_per_s or 0)
        tiles.append(("computed", format_flops(figures.hardware_flops_per_s), f"of the model {model}"))
    if figures.num_real_tokens:
        share = figures.num_trained_tokens / figures.num_real_tokens
        padding = "" if figures.padding_share is None else f", padding {figures.padding_share:.1%}"
        tiles.append(("tokens", f"{figures.num_real_tokens:,}", f"{share:.1%} trained{padding}"))
    if figures.rss_peak_bytes:
        tiles.append(("process", format_size(figures.rss_peak_bytes), "most memory"))
    cells = "".join(
        f"<div><span>{escape(name)}</span><b>{escape(value)}</b><small>{escape(note)}</small></div>"
        for name, value, note in tiles
    )
    return f'<section class="tiles">{cells}</section>'


def _time(figures: Figures) -> str:
    parts = [(cause, seconds) for cause, seconds in figures.time_s.items() if seconds > 0]
    total = sum(seconds for _, seconds in parts)
    if not total:
        return ""
    drawn = bar([(cause_name(cause), seconds, COLOR_OF_PART.get(cause, 6)) for cause, seconds in parts])
    keys = "".join(
        f'<span class="key"><i class="k{COLOR_OF_PART.get(cause, 6)}"></i>{escape(cause_name(cause))} '
        f"<b>{format_duration(seconds)}</b> {seconds / total:.1%}</span>"
        for cause, seconds in parts
    )
    return f"<section><h2>A step of {format_duration(total)}</h2>{drawn}<p class=legend>{keys}</p></section>"


def _comparison(figures: Figures) -> str:
    rows = [("seconds per step", *_cells(figures.step_s, format_duration, is_exact=True))]
    for tier, peak in figures.tiers.items():
        planned, measured, _ = _cells(peak, format_size)
        limit = figures.capacity_bytes.get(tier)
        note = "planned is the least that it needs" + (f"; capacity {format_size(limit)}" if limit else "")
        rows.append((f"{tier}, most in use", planned, measured, note))
    for link, moved in figures.links.items():
        planned, measured, error = _cells(moved, format_size, is_exact=True)
        note = "; ".join(part for part in (error, figures.link_paths.get(link)) if part)
        rows.append((f"{link} per step", planned, measured, note))
    for path, drive in figures.drives.items():
        planned, measured, error = _cells(drive.bytes_per_step, format_size, is_exact=True)
        rows.append(
            (f"written per step, {path}", planned, measured, f"{error}; {_wear(figures, path)}".removeprefix("; "))
        )
    known = [row for row in rows if row[1] != "-" or row[2] != "-"]
    return _table(("", "planned", "measured", ""), known, numbers=(1, 2))


def _cells(pair: Compared, text: object, *, is_exact: bool = False) -> tuple[str, str, str]:
    assert callable(text)
    planned, measured = ("-" if value is None else str(text(value)) for value in (pair.planned, pair.measured))
    error = pair.error if is_exact else None
    if error is None:
        return planned, measured, ""
    note = "the same" if abs(error) < 5e-5 else f"{1 + error:.1f} times as much" if error > 1 else f"{error:+.1%}"
    return planned, measured, note


def _wear(figures: Figures, path: str) -> str:
    drive = figures.drives[path]
    text = f"{format_decimal_size(drive.nbytes)} in this run"
    if drive.lifetime_bytes is not None:
        text += f", {format_decimal_size(drive.lifetime_bytes)} by all runs"
        if drive.limit_bytes:
            share = drive.lifetime_bytes / drive.limit_bytes
            text += f": {share:.1%} of max_written {format_decimal_size(drive.limit_bytes)}"
    return text


def _evaluations(figures: Figures) -> str:
    """Return a table of the newest losses, a column for each set."""
    sets = {name: dict(losses) for name, losses in figures.evaluations.items()}
    steps = sorted({step for losses in sets.values() for step in losses})
    rows = []
    for step in steps[-_MOST_EVALUATIONS:]:
        cells = []
        for losses in sets.values():
            loss = losses.get(step)
            cells += ["-", "-"] if loss is None else [f"{loss:.4f}", f"{perplexity(loss):.2f}"]
        rows.append((f"{step:,}", *cells))
    head = ("after step", *(f"{name} {what}" for name in sets for what in ("loss", "perplexity")))
    left_out = len(steps) - len(rows)
    note = f'<p class="sub">{left_out:,} earlier ones are not shown</p>' if left_out else ""
    return _table(head, rows, numbers=range(len(head))) + note


def _checkpoints(figures: Figures) -> str:
    rows = [
        (
            f"{line['step']:,}",
            format_size(line.get("nbytes", 0)),
            format_size(line.get("written_bytes", 0)),
            format_size(line.get("linked_bytes", 0)),
            f"{line.get('seconds', 0.0):.2f} s",
            f"{line.get('stall_s', 0.0):.2f} s",
        )
        for line in figures.checkpoints[-_MOST_CHECKPOINTS:]
    ]
    head = ("after step", "size", "written", "linked", "took", "training stood still")
    left_out = len(figures.checkpoints) - len(rows)
    note = f'<p class="sub">{left_out:,} earlier ones are not shown</p>' if left_out else ""
    return _table(head, rows, numbers=range(len(head))) + note


def _starts(history: RunHistory) -> str:
    rows = []
    for start in history.plan.get("starts", []):
        budgets = ", ".join(f"{tier} {format_size(nbytes)}" for tier, nbytes in start.get("budget_bytes", {}).items())
        first = start.get("first_step", 0)
        where = f"after step {first:,}" if first else "from the beginning"
        rows.append((_moment(str(start.get("at", ""))), where, budgets))
    return _table(("at", "", "capacities"), rows)


def _moment(text: str) -> str:
    """Return an ISO 8601 date and time as people write it."""
    return text.replace("T", " ").replace("+00:00", " UTC")


def _settings(figures: Figures) -> str:
    rows = [(setting.key, setting.value, setting.default) for setting in figures.settings]
    return _table(("key", "value", "default"), rows, is_code=True)


def _machine(figures: Figures) -> str:
    machine, rows = figures.machine, []
    if machine:
        rows = [
            ("machine", f"{machine.get('host', '')}, {machine.get('system', '')}"),
            ("processor", f"{machine.get('cpu', '')}, {machine.get('num_cpus', '?')} CPUs"),
            ("RAM", format_size(machine.get("ram_bytes", 0))),
        ]
        rows += [("GPU", str(machine["gpu"]))] if machine.get("gpu") else []
        rows += [(str(name), str(system)) for name, system in machine.get("drives", {}).items()]
    if figures.versions:
        rows.append(("versions", ", ".join(f"{name} {version}" for name, version in figures.versions.items())))
    return _table((), rows)


def _section(title: str, content: str) -> str:
    return f"<section><h2>{escape(title)}</h2>{content}</section>" if content else ""


def _table(
    head: Sequence[str], rows: Iterable[Sequence[str]], *, numbers: Iterable[int] = (), is_code: bool = False
) -> str:
    right = set(numbers)

    def cells(row: Sequence[str], tag: str) -> Iterator[str]:
        for number, text in enumerate(row):
            kind = ' class="number"' if number in right else ""
            yield f"<{tag}{kind}>{escape(text)}</{tag}>"

    lines = [f"<tr>{''.join(cells(row, 'td'))}</tr>" for row in rows]
    if not lines:
        return ""
    first = f"<thead><tr>{''.join(cells(head, 'th'))}</tr></thead>" if any(head) else ""
    kind = ' class="code"' if is_code else ""
    return f'<div class="wide"><table{kind}>{first}<tbody>{"".join(lines)}</tbody></table></div>'
