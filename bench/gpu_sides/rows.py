"""Rows that `gpu.py` prints about the sides of a part."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import Any

from bench.common import Report
from bench.gpu_sides.cases import OURS, Part

#: Maximum relative difference between the sides' first losses. The sides add bf16 values in different orders.
LOSS_TOLERANCE = 2e-2

#: Tier -> key of its measured peak in the results: tensors on the GPU, or the growth in the machine's RAM use.
_REAL_PEAKS = {"gpu": "device_bytes", "ram": "host_bytes"}

Result = Mapping[str, Any]


class Rows:
    """Printer for the rows of one part.

    Args:
        report: Report whose rows state the part's tokens per step, T.
        name: Name of the part, used as the prefix of row names.
    """

    def __init__(self, report: Report, name: str, part: Part) -> None:
        self._report, self._name, self._part = report, name, part

    def row(self, name: str, value: Any, unit: str, **claim: Any) -> None:
        """Print a row, prefixing its name with the part's name."""
        self._report.row(f"{self._name}.{name}", value, unit, **claim)

    def skipped(self, side: str, reason: str) -> None:
        """Print why a side was skipped."""
        self.row(f"{side}.skipped", reason, "reason")

    def failed(self, side: str, reason: str, *, is_ours: bool) -> None:
        """Print why a side ended early. A failed peer is reported but does not fail the bench."""
        self.row(f"{side}.failed", reason, "reason")
        if is_ours:
            self.row(f"{side}.runs", 0, "1", target=1, ok=False)

    def start(self, side: str, result: Result) -> None:
        """Print a side's size and optimizer, and how long each part of its startup took."""
        row = self.row
        row(f"{side}.parameters", result["num_parameters"], "1")
        if "num_layers" in result:
            row(f"{side}.layers", result["num_layers"], "1")
        row(f"{side}.optimizer", result["optimizer"], "name and precision")
        row(f"{side}.start", result["start_s"], "s")
        for part, seconds in result.get("start_parts_s", {}).items():
            row(f"{side}.start.{part}", seconds, "s")
            if nbytes := result["start_bytes"].get(part):
                row(f"{side}.start.{part}_per_gb", seconds / (nbytes / 1e9), "s/GB")

    def side(self, side: str, result: Result, num_warm: int) -> None:
        """Print a side's seconds per step and part, tokens/s, memory peaks and losses."""
        steps = measured(result, num_warm)
        row = self.row
        if result.get("num_steps_missing"):
            row(f"{side}.steps_without_time", result["num_steps_missing"], "1")
        row(f"{side}.step", step_s(steps), "s")
        row(f"{side}.steps", [round(step["total_s"], 4) for step in steps], "s")
        rate, target = self._part.tokens / step_s(steps), self._part.rate if side == OURS else None
        ok = None if target is None else rate >= target
        row(f"{side}.rate", rate, "tokens/s", target=target, ok=ok, timing=True)
        for part in steps[-1]["parts_s"]:
            seconds = [step["parts_s"][part] for step in steps if part in step["parts_s"]]
            row(f"{side}.{part}", statistics.median(seconds), "s")
        for name in ("device_bytes", "device_reserved_bytes", "host_bytes", "peak_rss", "start_host_bytes"):
            row(f"{side}.peak.{name}", result[name], "bytes")
        row(f"{side}.losses", [round(step["loss"], 5) for step in result["steps"]], "nats")

        for name, (value, unit) in result.get("profile", {}).items():
            row(f"{side}.profile.{name}", value, unit)

    def ours(self, result: Result, num_warm: int) -> None:
        """Print rows that only our side has: FLOP/s, and planned and measured bytes."""
        steps = measured(result, num_warm)
        seconds = step_s(steps)
        rate = max(result["matmul_flops_per_s"])
        self.row("matmul_rate", rate, "FLOP/s")
        self.row("matmul_rates", [round(one) for one in result["matmul_flops_per_s"]], "FLOP/s, before and after")
        if result["model_flops"]:
            self.row("ours.model_flops", result["model_flops"] / seconds, "FLOP/s")
            share = result["hardware_flops"] / seconds / rate
            target = self._part.share
            ok = None if target is None else share >= target
            self.row("ours.hardware_flops", result["hardware_flops"] / seconds, "FLOP/s")
            self.row("ours.share_of_matmul_rate", share, "1", target=target, ok=ok, timing=True)
        if result["predicted_s"] is None:
            self.row("ours.predicted_step", None, "not measured: run the part rates first, with the same --cache")
        else:
            self.row("ours.predicted_step", result["predicted_s"], "s")
            self.row("ours.predicted/measured", result["predicted_s"] / seconds, "x")
        is_exact = bool(result["trace_is_exact"])  # otherwise FLOPs and the memory inside layers are estimates
        self.row("ours.trace_is_exact", int(is_exact), "1", target=1, ok=is_exact)
        self._updates(result, num_warm)
        for tier in steps[0]["num_drops"]:
            counts = [step["num_drops"][tier] for step in steps]
            self.row(f"ours.num_drops.{tier}", counts, "buffers given back in each step")
        for tier, kinds in result["home_bytes"].items():
            for kind, nbytes in kinds.items():
                self.row(f"ours.home.{tier}.{kind}", nbytes, "bytes")
            self.row(f"ours.planned_peak.{tier}", result["planned_peaks"][tier], "bytes")
            real = result[_REAL_PEAKS[tier]] if tier in _REAL_PEAKS else 0
            if real and result["planned_peaks"][tier]:
                self.row(f"ours.real/planned_peak.{tier}", real / result["planned_peaks"][tier], "x")
        if result.get("is_complete"):
            self._seen(result)

    def _updates(self, result: Result, num_warm: int) -> None:
        """Print where updates run, and how fast the host's kernels are."""
        for place, number in result["num_updated"].items():
            self.row(f"ours.updated_on_{place}", number, "parameters")
        steps = [step for number, step in enumerate(result["steps"]) if number >= max(1, num_warm)]
        kernels_s = [step["parts_s"]["update_kernels"] for step in steps]  # empty if only the first step ran
        if result["num_updated"]["host"] and any(kernels_s):
            rate = result["num_updated"]["host"] / statistics.median(kernels_s)
            self.row("ours.host_update_rate", rate, "parameters/s")

    def _seen(self, result: Result) -> None:
        for link, planned in result["planned_moved"].items():
            moved = result["moved"][link]
            self.row(f"ours.{link}.per_step", result["traffic"][link], "bytes")
            if result["num_steps_missing"]:  # bytes prefetched for the missing steps are also counted
                self.row(f"ours.{link}.moved", moved, "bytes, of which some for steps that there was no time for")
            else:
                self.row(f"ours.{link}.moved", moved, "bytes", target=planned, ok=moved == planned)
        for link, path in result["paths"].items():
            self.row(f"ours.{link}.path", path, "path")
        for tier, (high, capacity) in result["tiers"].items():
            self.row(f"ours.high_water.{tier}", high, "bytes", target=capacity, ok=high <= capacity)
        misses = result["schedule_misses"]
        self.row("ours.schedule_misses", misses, "accesses", target=0, ok=misses == 0)

    def compare(self, found: Mapping[str, Result], num_warm: int) -> None:
        """Print the ratio of our tokens/s to each other side's, and the difference between their first losses."""
        if OURS not in found:
            return
        ours, target = found[OURS], self._part.target
        for side, other in found.items():
            if side == OURS:
                continue
            if other["num_parameters"] != ours["num_parameters"]:
                self.row(f"ratio.ours/{side}", None, "not compared: models of different sizes")
                continue
            ratio = step_s(measured(other, num_warm)) / step_s(measured(ours, num_warm))
            ok = None if target is None else ratio >= target
            if ours["model_flops"]:  # known only from our trace, and valid for all sides
                self.row(f"{side}.model_flops", ours["model_flops"] / step_s(measured(other, num_warm)), "FLOP/s")
            self.row(f"ratio.ours/{side}", ratio, "x", target=target, ok=ok, timing=True)
            mine, theirs = ours["steps"][0]["loss"], other["steps"][0]["loss"]
            apart = abs(mine - theirs) / abs(theirs) if theirs else math.inf
            if not math.isfinite(apart):  # JSON has no NaN or infinity
                self.row(f"loss.relative_to.{side}", None, f"not comparable: {mine} and {theirs}", target=0, ok=False)
                continue
            self.row(f"loss.relative_to.{side}", apart, "1", target=LOSS_TOLERANCE, ok=apart <= LOSS_TOLERANCE)


def measured(result: Result, num_warm: int) -> Sequence[Mapping[str, Any]]:
    """Return the measured steps, or the warm-up steps if time ran out before the first measured step."""
    steps: Sequence[Mapping[str, Any]] = result["steps"]
    return steps[num_warm:] or steps


def step_s(steps: Sequence[Mapping[str, Any]]) -> float:
    """Return the median duration of the steps in seconds."""
    return float(statistics.median(step["total_s"] for step in steps))
