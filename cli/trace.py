"""``megatrain-tier trace``: the timeline of a run's traced steps, for Perfetto."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import click

from .control import duration
from .main import EXIT_CONFIG, EXIT_FAILED, RunFailedError
from .options import json_option

_VIEWER = "https://ui.perfetto.dev"


@click.command("trace")
@click.argument("run", type=click.Path(exists=True, path_type=Path), metavar="RUN")
@click.option("-o", "--out", type=click.Path(path_type=Path), metavar="FILE", help="Copy the timeline there.")
@json_option
def command(run: Path, out: Path | None, as_json: bool) -> int:
    """Check the timeline of RUN and say how to look at it.

    RUN is the run's output_dir. A run writes trace.json there after the steps of [profile] trace_steps: a row for what
    computes, one for what waits, one for each link between tiers.
    """
    from megatrain.base.timeline import NoTimelineError, TimelineError, find_timeline, summarize

    try:
        path = find_timeline(run)
        summary = summarize(path)
    except NoTimelineError as error:
        raise RunFailedError(str(error), EXIT_CONFIG) from None
    except TimelineError as error:
        raise RunFailedError(str(error), EXIT_FAILED) from None
    if out is not None:
        path = _copy(path, out)
    if as_json:
        click.echo(json.dumps({"path": str(path.resolve()), **summary.to_json()}))
        return 0
    click.echo(f"trace  {path}  {summary.num_spans:,} spans over {_seconds(summary.seconds)}")
    width = max(len(row.name) for row in summary.rows)
    for row in summary.rows:
        moved = f"  {row.nbytes / (1 << 20):,.1f} MiB" if row.nbytes else ""
        click.echo(f"  {row.name:<{width}}  {row.num_spans:>7,} spans  {_seconds(row.busy_s):>9} busy{moved}")
    click.echo(f"open   {_VIEWER} in a browser and drop the file there; it stays on this machine")
    return 0


def _seconds(seconds: float) -> str:
    return f"{seconds:.3f} s" if seconds < 60 else duration(seconds)


def _copy(path: Path, out: Path) -> Path:
    target = out / path.name if out.is_dir() else out
    if target.exists():
        raise RunFailedError(f"{target}: is there already; nothing was written. Name another file", EXIT_CONFIG)
    if not target.absolute().parent.is_dir():
        raise RunFailedError(f"{target.parent}: there is no such folder", EXIT_CONFIG)
    shutil.copyfile(path, target)
    return target
