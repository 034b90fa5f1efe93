"""``megatrain-tier report``: compare plan and measurements, and show where the time went."""

from __future__ import annotations

import json
from pathlib import Path

import click

from .main import write_file
from .options import explain_damaged_records, json_option, run_argument
from .terminal import echo_wrapped


@click.command("report")
@run_argument
@click.option(
    "--html",
    "page",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="OUT",
    help="Write a self-contained HTML page to OUT.",
)
@json_option
def command(run: Path, page: Path | None, as_json: bool) -> int:
    """Compare plan and measurements of a run, and show where the time went.

    RUN is the output_dir of a finished, active or dead run.
    """
    with explain_damaged_records(run):
        return _report(run, page, as_json=as_json)


def _report(run: Path, page: Path | None, *, as_json: bool) -> int:
    from megatrain.extras.report.figures import compute_figures
    from megatrain.extras.report.history import read_history

    history = read_history(run)
    figures = compute_figures(history)
    if page is not None:
        from megatrain.extras.report.page import render_page

        write_file(page, render_page(history, figures))
    if as_json:
        values = {**figures.to_json(), "page": None if page is None else str(page)}
        click.echo(json.dumps(values, allow_nan=False))
        return 0
    from megatrain.extras.report.text import report_lines

    headline, *other_lines = report_lines(figures)
    echo_wrapped(headline, indent=8, bold=True)
    for line in other_lines:
        echo_wrapped(line, indent=8)
    if page is not None:
        click.echo(f"page    {page}")
    return 0
