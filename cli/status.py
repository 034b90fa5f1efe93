"""``megatrain-tier status``: where runs stand, and what to do about those that ended early."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from .control import age, describe_ended, duration, find_runs, own_status
from .follow import follow
from .main import EXIT_CONFIG, RunFailedError
from .options import json_option

if TYPE_CHECKING:
    from megatrain.run_folder import Owner, RunStatus

_MIB, _GIB = 1 << 20, 1 << 30


@dataclass(frozen=True)
class _Seen:
    """A run as it was found.

    Attributes:
        owner: the living process, or None.
        status: what it wrote, else what the last one wrote.
        saved_step: of the checkpoint that it would continue from.
        drive_bytes: path of a drive -> bytes of its checkpoints there.
        copied_steps: of whole copies in output_dir.
        lost_steps: of checkpoints whose parts on a drive are gone.
    """

    path: Path
    owner: Owner | None
    status: RunStatus | None
    saved_step: int | None
    drive_bytes: dict[Path, int]
    copied_steps: list[int]
    lost_steps: list[int]


@click.command("status")
@click.argument("run", required=False, type=click.Path(exists=True, file_okay=False, path_type=Path), metavar="[RUN]")
@click.option(
    "--follow",
    "is_followed",
    is_flag=True,
    help="Show the live view of a run until that ends, and end with its exit code. Ctrl-C leaves the view alone.",
)
@json_option
def command(run: Path | None, is_followed: bool, as_json: bool) -> int:
    """Show where runs stand.

    RUN is the output_dir of a run, or a folder with several below it; default: the current one.
    """
    if is_followed:
        return follow(_one_of(run or Path()), as_json=as_json)
    seen = [_look(path) for path in find_runs(run or Path())]
    if run is not None and not seen and (alone := _look(run)).owner is not None:
        seen = [alone]
    if as_json:
        click.echo(json.dumps({"runs": [_to_json(one) for one in seen]}))
    else:
        for one in seen:
            _print(one)
    if not seen:
        if run is not None:
            raise RunFailedError(f"no run in '{run}' or below. Give the output_dir of one", EXIT_CONFIG)
        if not as_json:
            click.echo("no run in the current folder or below")
    return 0


def _one_of(root: Path) -> Path:
    """Return the run to follow: the folder itself, or the only one below it that is alive."""
    from megatrain.run_folder import living_owner

    if living_owner(root) is not None:
        return root
    alive = [path for path in find_runs(root) if living_owner(path) is not None]
    if len(alive) > 1:
        raise RunFailedError(
            f"{len(alive)} runs are alive in '{root}': name one of {', '.join(map(str, alive))}", EXIT_CONFIG
        )
    return alive[0] if alive else root


def _look(path: Path) -> _Seen:
    from megatrain.checkpoint.whereabouts import bytes_on_drives, saved_checkpoints
    from megatrain.run_folder import living_owner, read_status

    owner = living_owner(path)
    status = read_status(path) if owner is None else own_status(path, owner)
    saved = saved_checkpoints(path)
    return _Seen(
        path,
        owner,
        status,
        next((checkpoint.step for checkpoint in saved if not checkpoint.missing), None),
        bytes_on_drives(path),
        sorted(checkpoint.step for checkpoint in saved if checkpoint.is_copy and not checkpoint.missing),
        sorted({checkpoint.step for checkpoint in saved if checkpoint.missing}),
    )


def _print(seen: _Seen) -> None:
    click.secho(str(seen.path), bold=True)
    for name, text in _lines(seen):
        click.echo(f"  {name:<9}{text}" if name else f"  {text}")


def _lines(seen: _Seen) -> list[tuple[str, str]]:
    status, owner = seen.status, seen.owner
    if owner is None:
        lines = [("", line) for line in describe_ended(seen.path).splitlines()]
        lines += [*_evaluations(status), *_places(seen)]
        if status is not None and status.state == "done" and (seen.path / "final").is_dir():
            lines.append(("model", str(seen.path / "final")))
        return lines
    if status is None:
        return [("starting", owner.text)]
    lines = [(status.state, _progress(status)), *_evaluations(status)]
    if status.tier_used_bytes:
        lines.append(("memory", _memory(status)))
    if seen.saved_step is not None:
        when = f", {age(status.checkpoint_at)} ago" if status.checkpoint_at is not None else ""
        lines.append(("saved", f"step {seen.saved_step}{when}"))
    lines += _places(seen)
    lines.append(("process", f"{owner.pid} on {owner.host}, last wrote {age(status.updated_at)} ago"))
    if status.message:
        lines.append(("said", status.message))
    return lines


def _places(seen: _Seen) -> list[tuple[str, str]]:
    """Return a line for each drive that holds parts of checkpoints, and one for the copies in output_dir."""
    lines = [
        ("drive", f"{_size(nbytes)} of its checkpoints lie in {path}: deleting that folder destroys them")
        for path, nbytes in seen.drive_bytes.items()
    ]
    if seen.copied_steps:
        steps = ", ".join(map(str, seen.copied_steps))
        lines.append(("copies", f"step{'s' if len(seen.copied_steps) > 1 else ''} {steps}, whole in output_dir"))
    return lines


def _evaluations(status: RunStatus | None) -> list[tuple[str, str]]:
    """Return a line for each set of held-out rows; what is not finite was written as text."""
    lines = []
    for name, each in (status.evaluations if status is not None else {}).items():
        loss, perplexity = float(each["loss"]), float(each["perplexity"])
        lines.append(("eval", f"{name}: loss {loss:.4f}, perplexity {perplexity:.2f} at step {each['step']}"))
    return lines


def _progress(status: RunStatus) -> str:
    if not status.max_steps:
        return status.run_name
    parts = [f"step {status.step}/{status.max_steps} {100.0 * status.step / status.max_steps:.1f}%"]
    for name, value in (("loss", status.loss), ("gnorm", status.grad_norm)):
        if value is not None:
            parts.append(f"{name} {value:.4f}" if name == "loss" else f"{name} {value:.2f}")
    if status.lr is not None:
        parts.append(f"lr {status.lr:.1e}")
    if status.tokens_per_s is not None:
        parts.append(f"{status.tokens_per_s:,.0f} tok/s")
    if status.eta_s is not None:
        parts.append(f"eta {duration(status.eta_s)}")
    return " | ".join(parts)


def _memory(status: RunStatus) -> str:
    tiers = [
        f"{tier} {_in_unit(used, capacity)}/{_size(capacity)}"
        for tier, used in status.tier_used_bytes.items()
        if (capacity := status.tier_capacity_bytes.get(tier, used))
    ]
    return "  ".join([*tiers, f"process {_size(status.rss_bytes)}"])


def _size(nbytes: int) -> str:
    """Return a size as ``tiered.units`` does, which would import torch."""
    return f"{_in_unit(nbytes, nbytes)} {'GiB' if nbytes >= _GIB else 'MiB'}"


def _in_unit(nbytes: int, largest: int) -> str:
    return f"{nbytes / (_GIB if largest >= _GIB else _MIB):.1f}"


def _to_json(seen: _Seen) -> dict[str, Any]:
    return {
        "path": str(seen.path.resolve()),
        "running": seen.owner is not None,
        "owner": None if seen.owner is None else seen.owner.text,
        "saved_step": seen.saved_step,
        "checkpoint_bytes_on_drives": {str(path): nbytes for path, nbytes in seen.drive_bytes.items()},
        "copied_steps": seen.copied_steps,
        "lost_steps": seen.lost_steps,
        "status": None if seen.status is None else seen.status.to_json(),
    }
