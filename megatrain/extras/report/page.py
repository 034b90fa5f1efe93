"""The report as one self-contained HTML page, which needs no network, scripts or other files."""

from __future__ import annotations

from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from megatrain.api import now_text
from megatrain.extras.report.charts import FRAME, NUM_COLORS, lay_out, make_charts
from megatrain.extras.report.figures import Figures
from megatrain.extras.report.history import RunHistory
from megatrain.extras.report.step_picture import draw, read_bars
from megatrain.extras.report.text import report_lines

__all__ = ["render_page"]

_BAD_STATES = ("failed", "died")


def render_page(history: RunHistory, figures: Figures) -> str:
    """Return the HTML page of a run, with charts, the timeline of traced steps, and the lines of the report."""
    drawings = [lay_out(chart) for chart in make_charts(history, figures)]
    bars = [] if history.timeline is None else read_bars(history.timeline)
    environment = Environment(
        loader=FileSystemLoader(Path(__file__).parent),
        autoescape=True,  # names, paths and messages can contain HTML characters
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    return environment.get_template("page.html.j2").render(
        figures=figures,
        kind="bad" if figures.state in _BAD_STATES else "good" if figures.state == "done" else "open",
        drawings=[drawing for drawing in drawings if drawing is not None],
        frame=FRAME,
        num_colors=NUM_COLORS,
        picture=Markup(draw(bars, "", "")) if bars else "",  # draw() escapes the labels
        timeline=None if history.timeline is None else history.timeline.as_uri(),
        lines=report_lines(figures),
        now=now_text().replace("T", " ").replace("+00:00", " UTC"),
    )
