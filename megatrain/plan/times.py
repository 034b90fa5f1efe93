"""Records about step times and a run's drive traffic: measured ticks, inputs of an estimate, and the estimate."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from tiered.units import format_size


@dataclass(frozen=True, slots=True)
class MeasuredTicks:
    """Measured times of a step in which no block moves, because every block's home is the tier that uses it.

    Attributes:
        seconds: Median seconds of each tick of the program, by number.
        between_s: Median seconds that a step spends outside its ticks.
        num_steps: Number of timed steps.
        num_micro_batches: Number of micro-batches in the timed steps.
        is_extrapolated: Whether the timed steps had fewer micro-batches than the plan's steps.
        memory_bytes: Peak memory of the measurement, including workspace.
    """

    seconds: tuple[float, ...]
    between_s: float
    num_steps: int
    num_micro_batches: int
    is_extrapolated: bool
    memory_bytes: int

    @property
    def note(self) -> str:
        """Summary of the measurement, as one line of the report."""
        steps = f"{self.num_steps} steps of this model"
        if self.is_extrapolated:
            steps += f" with {self.num_micro_batches} micro-batches each, extrapolated to all micro-batches"
        return f"computing       measured: {steps}, in {format_size(self.memory_bytes)} of RAM"


@dataclass(frozen=True, slots=True)
class StepShape:
    """Inputs of the estimate other than the plan itself.

    Attributes:
        tokens_per_step: Tokens that this process computes in a step (T).
        num_steps: Steps of the run, or None if only the data determines them.
        weights: Each path's relative share of the bytes of striped blocks.
        has_rates: Whether the config sets the weights.
    """

    tokens_per_step: int
    num_steps: int | None
    paths: Sequence[Path]
    weights: Sequence[float]
    has_rates: bool = False


@dataclass(frozen=True, slots=True)
class OutsideTraffic:
    """Drive traffic of a run outside its steps.

    Attributes:
        name: ``start`` (loading the model's weights), ``checkpoint`` (the first one) or ``export``.
        read_bytes: Bytes read from the model's folder or the tiers' drives. An export also reads back its files.
        written_bytes: Bytes written to the tiers' drives or to ``output_dir``.
        linked_bytes: Bytes of a checkpoint that stay on the drives and are only linked.
        seconds: Duration in seconds on otherwise idle drives, or None if a rate is unknown.
    """

    name: str
    read_bytes: int
    written_bytes: int
    linked_bytes: int = 0
    seconds: float | None = None


@dataclass(frozen=True, slots=True)
class Estimate:
    """Seconds per step at measured rates with perfect overlap, which is a lower bound on the real time.

    If steps of the model were timed, ``step_s`` is the expected time instead, including waits.

    Attributes:
        seconds: Busy seconds in a step, by resource: ``compute``, ``host`` (launches operators and leases blocks),
            ``optimizer`` on the host, ``gpu optimizer``, ``nvme``, ``ram->gpu`` and ``gpu->ram``.
        unmeasured: Resources without a rate in the profile. If there are any, ``step_s`` is None.
        step_s: Seconds per step, or None if a rate is unknown.
        bound_by: Resource that determines ``step_s``.
        crossing_tokens: Tokens per step (T*) above which computing takes longer than transfers. 0 means always; None
            means never or unknown.
        written_bytes: Bytes written in a step, by NVMe path.
        run_written_bytes: Bytes written in the run, by NVMe path, or None if the run's length is unknown.
        computing_s_per_nvme_byte: Seconds by which a byte moved to or from a drive delays computing; 0 if unknown.
        seconds_per_nvme_copy: Seconds that the step's thread spends per block moved to or from a drive; 0 if unknown.
        is_timed: Whether steps of the model were timed.
        notes: Lines for the user, such as the age of the rates or the reason why there are none.
        occasions: Drive traffic of the run outside its steps.
    """

    tokens_per_step: int
    seconds: Mapping[str, float]
    unmeasured: tuple[str, ...] = ()
    step_s: float | None = None
    bound_by: str | None = None
    crossing_tokens: float | None = None
    written_bytes: Mapping[str, int] | None = None
    run_written_bytes: Mapping[str, int] | None = None
    computing_s_per_nvme_byte: float = 0.0
    seconds_per_nvme_copy: float = 0.0
    is_timed: bool = False
    notes: tuple[str, ...] = ()
    occasions: tuple[OutsideTraffic, ...] = ()

    def to_json(self) -> dict[str, Any]:
        """Return the estimate as JSON values, in bytes and seconds."""
        return {
            "tokens_per_step": self.tokens_per_step,
            "busy_s": dict(self.seconds),
            "not_measured": list(self.unmeasured),
            "predicted_step_s": self.step_s,
            "computing_is_timed": self.is_timed,
            "predicted_tokens_per_s": self.tokens_per_step / self.step_s if self.step_s else None,
            "bound_by": self.bound_by,
            "crossing_tokens_per_step": self.crossing_tokens,
            "nvme_written_bytes_per_step": dict(self.written_bytes or {}),
            "nvme_written_bytes_per_run": None if self.run_written_bytes is None else dict(self.run_written_bytes),
            "notes": list(self.notes),
            "occasions": [asdict(occasion) for occasion in self.occasions],
        }
