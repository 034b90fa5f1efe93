"""Summary of a run that has ended, as lines of text."""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from megatrain.base.observer import format_tiers
from tiered.units import format_decimal_size, format_duration, format_size

from .console import nonzero_sizes

if TYPE_CHECKING:
    from megatrain.base.observer import RunSummary


def summary_lines(summary: RunSummary) -> Iterator[str]:
    """Yield the lines that are printed at the end of a run."""
    yield _head_line(summary)
    yield from _loss_lines(summary)
    for name, evaluation in summary.evaluations.items():
        yield f"eval   {name}: loss {evaluation.loss:z.4f}, {evaluation.quality} at step {evaluation.step}"
    if summary.num_processes > 1:
        yield f"ranks  {summary.num_processes} processes; peak, moved and wrote show the first process"
    if summary.tier_peak_bytes:
        peaks, limits = nonzero_sizes(summary.tier_peak_bytes), summary.tier_capacity_bytes
        tiers = "   ".join(format_tiers({tier: nbytes}, limits) for tier, nbytes in peaks.items())
        yield f"peak   {tiers}   process {format_size(summary.peak_rss_bytes)}"
    if link_bytes := nonzero_sizes(summary.link_bytes):
        paths = {link: f" ({path})" for link, path in summary.link_paths.items() if path}
        yield "moved  " + "  ".join(f"{link} {format_size(n)}{paths.get(link, '')}" for link, n in link_bytes.items())
    if written_bytes := nonzero_sizes(summary.written_bytes):
        yield "wrote  " + "  ".join(f"{path} {format_decimal_size(n)} with saves" for path, n in written_bytes.items())
    if summary.export_dir is not None:
        yield f"model  {summary.export_dir}"
        if not _is_classifier(summary.export_dir):
            yield f"next   megatrain-tier generate {shlex.quote(str(summary.export_dir))} --interactive"


def _head_line(summary: RunSummary) -> str:
    verdict = "stopped" if summary.interrupted else "done"
    steps = f"{summary.num_steps} step{'s' if summary.num_steps != 1 else ''}"
    line = f"{verdict}   {steps} in {format_duration(summary.seconds)} of training"
    if summary.num_steps:
        rate = summary.num_real_tokens / summary.seconds if summary.seconds > 0 else 0.0
        line += f"   {rate:,.0f} tok/s"
    return f"{line}   {summary.num_real_tokens:,} tokens, {summary.num_trained_tokens:,} trained"


def _loss_lines(summary: RunSummary) -> Iterator[str]:
    """Yield lines with the first and the last loss, or with the less noisy means over several steps."""
    count = summary.num_averaged
    if summary.mean_losses is not None and count > 1:
        first_loss, last_loss = summary.mean_losses
        yield f"loss   {first_loss:z.4f} -> {last_loss:z.4f} (means of the first and last {count} steps)"
    elif summary.first_loss is not None and summary.last_loss is not None:
        yield f"loss   {summary.first_loss:z.4f} -> {summary.last_loss:z.4f} (first and last step)"


def _is_classifier(folder: Path) -> bool:
    """Return whether an export is a classifier or a reward model, which generates no text."""
    try:
        names = json.loads((folder / "config.json").read_text(encoding="utf-8")).get("architectures") or ()
    except (OSError, ValueError, AttributeError):
        return False
    return any(str(name).endswith("Classification") for name in names)
