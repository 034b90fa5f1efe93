"""Output of a run's state as text or as JSON, for ``status``."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import click

from megatrain.base.names import FINAL_NAME
from megatrain.base.observer import StepMetrics, format_preferences, format_rank, format_tiers
from megatrain.base.owner import LockHolder
from megatrain.run.status import SILENT_S, RunStatus
from tiered.units import format_size

from .run_state import RunFolderState, describe_ended, format_age, format_seconds, seconds_since
from .terminal import echo_wrapped


def print_run(state: RunFolderState) -> None:
    """Print the state of a run."""
    click.secho(str(state.path), bold=True)
    for name, text in _lines(state):
        echo_wrapped(f"  {name:<9}{text}" if name else f"  {text}", indent=11 if name else 4)


def _lines(state: RunFolderState) -> Iterator[tuple[str, str]]:
    """Yield (name or "", text) for each line about a run."""
    status, owner = state.status, state.owner
    if owner is None:
        yield from (("", line) for line in describe_ended(state.path).splitlines())
        yield from _evaluations(status)
        yield from _checkpoint_lines(state)
        if status is not None and status.state == "done" and (state.path / FINAL_NAME).is_dir():
            yield "model", str(state.path / FINAL_NAME)
    elif status is None:
        yield "starting", owner.text
    else:
        yield from _active_lines(state, status, owner)


def _active_lines(state: RunFolderState, status: RunStatus, owner: LockHolder) -> Iterator[tuple[str, str]]:
    yield status.state, _progress(status)
    if notice := status.activity.get("notice"):
        yield "notice", str(notice)
    if silence := _silence_text(status):
        yield "silent", silence
    yield from _evaluations(status)
    if status.metrics is not None and any(status.metrics.tier_used_bytes.values()):
        yield "memory", _memory(status.metrics)
        for rank, metrics in enumerate(status.metrics.ranks):
            yield f"rank {rank}", format_rank(metrics)
    if state.saved_step is not None:
        age = f", {format_age(status.checkpoint_at)} ago" if status.checkpoint_at is not None else ""
        yield "saved", f"step {state.saved_step}{age}"
    yield from _checkpoint_lines(state)
    yield "process", f"{owner.pid} on {owner.host}, last wrote {format_age(status.updated_at)} ago"
    if status.message:
        yield "message", status.message


def _silence_text(status: RunStatus) -> str:
    """Return the likely reason why a run has not updated its status for some time, or ""."""
    seconds, metrics = seconds_since(status.updated_at), status.metrics
    if seconds is None or seconds < SILENT_S:
        return ""
    longest_s = max(metrics.mean_step_s, metrics.step_s) if metrics is not None else 0.0
    step_time = f"; a step usually takes {longest_s:.3g} s" if metrics is not None else ""
    return (
        f"no status for {format_seconds(seconds)}, although the run writes one every second{step_time}. A drive may be "
        "full, or the process suspended: see the output of the run"
    )


def _checkpoint_lines(state: RunFolderState) -> Iterator[tuple[str, str]]:
    """Yield a line for each drive with parts of checkpoints, and a line for the copies in output_dir."""
    for path, nbytes in state.drive_bytes.items():
        yield "drive", f"{format_size(nbytes)} of the checkpoints are in {path}: deleting this folder destroys them"
    if state.copied_steps:
        steps = ", ".join(map(str, state.copied_steps))
        yield "copies", f"step{'s' if len(state.copied_steps) > 1 else ''} {steps}, complete in output_dir"


def _evaluations(status: RunStatus | None) -> Iterator[tuple[str, str]]:
    """Yield a line for each evaluation set. The status stores non-finite numbers as text; convert them to float."""
    for name, evaluation in (status.evaluations if status is not None else {}).items():
        quality = f"perplexity {float(evaluation['perplexity']):.2f}"
        if evaluation.get("preferences"):
            quality = format_preferences({key: float(value) for key, value in evaluation["preferences"].items()})
        yield "eval", f"{name}: loss {float(evaluation['loss']):.4f}, {quality} at step {evaluation['step']}"


def _progress(status: RunStatus) -> str:
    if not status.max_steps:
        return status.run_name
    parts = [f"step {status.step}/{status.max_steps} {100.0 * status.step / status.max_steps:.1f}%"]
    if (metrics := status.metrics) is not None:
        parts += [
            f"loss {metrics.loss:z.4f}",
            f"gnorm {metrics.grad_norm:.2f}",
            f"lr {metrics.lr:.1e}",
            f"{metrics.real_tokens_per_s:,.0f} tok/s",
        ]
        parts += [f"eta {format_seconds(metrics.eta_s)}"] if status.state != "paused" else []
    return " | ".join(parts)


def _memory(metrics: StepMetrics) -> str:
    limits = metrics.tier_capacity_bytes
    tiers = [format_tiers({tier: nbytes}, limits) for tier, nbytes in metrics.tier_used_bytes.items() if nbytes]
    return "  ".join([*tiers, f"process {format_size(metrics.rss_bytes)}"])


def run_to_json(state: RunFolderState) -> dict[str, Any]:
    """Return the state of a run as JSON values."""
    return {
        "path": str(state.path.resolve()),
        "running": state.owner is not None,
        "owner": None if state.owner is None else state.owner.text,
        "saved_step": state.saved_step,
        "checkpoint_bytes_on_drives": {str(path): nbytes for path, nbytes in state.drive_bytes.items()},
        "copied_steps": state.copied_steps,
        "lost_steps": state.lost_steps,
        "status": None if state.status is None else state.status.to_json(),
    }
