"""Reports of a run, as records and as lines of text, and the protocol for observers of a run.

The console, ``status.json``, ``metrics.jsonl`` and every tracker receive the same ``StepMetrics`` object for a step.
Does not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from tiered.units import GiB, MiB, format_duration, format_size


@dataclass(frozen=True, slots=True)
class StoredRecord:
    """Base class of dataclasses that are stored as JSON objects."""

    def to_json(self) -> dict[str, Any]:
        """Return JSON values. Non-finite floats become text, because strict JSON has no NaN."""
        return {item.name: _to_json_value(getattr(self, item.name)) for item in fields(self)}

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> Self:
        """Create a record from the output of ``to_json``, ignoring unknown keys.

        Raises:
            TypeError: A field is missing or has the wrong type.
            ValueError: A numeric field has text that is not a number.
        """
        arguments = {item.name: values[item.name] for item in fields(cls) if item.name in values}
        parsers = {item.name: _PARSERS[str(item.type)] for item in fields(cls) if str(item.type) in _PARSERS}
        return cls(**{name: parsers[name](value) if name in parsers else value for name, value in arguments.items()})


def _to_json_value(value: Any) -> Any:
    if isinstance(value, StoredRecord):
        return value.to_json()
    if isinstance(value, Mapping):
        return {name: _to_json_value(item) for name, item in value.items()}
    if isinstance(value, list | tuple):
        return [_to_json_value(item) for item in value]
    is_text = isinstance(value, Path) or (isinstance(value, float) and not math.isfinite(value))
    return str(value) if is_text else value


def _parse_numbers(values: Mapping[str, Any]) -> dict[str, float]:
    return {name: float(value) for name, value in values.items()}


@dataclass(frozen=True, slots=True)
class RunInfo:
    """Facts about a run that are known when training starts.

    Attributes:
        task: Name of the task, such as ``sft``.
        device: Compute device, such as ``cpu`` or ``cuda:0``.
        tokens_per_step: Token positions in a step, including padding.
    """

    run_name: str
    task: str
    device: str
    output_dir: Path
    max_steps: int
    tokens_per_step: int


@dataclass(frozen=True, slots=True)
class StepMetrics(StoredRecord):
    """Metrics of one optimizer step.

    Attributes:
        step: Number of finished steps, including this one.
        epoch: Fractional number of passes over the data so far.
        loss: Mean loss over the step's trained tokens, before the update.
        grad_norm: Global gradient norm before clipping.
        num_real_tokens: Tokens without padding.
        num_trained_tokens: Tokens with a label.
        step_s: Duration of this step in seconds.
        mean_step_s: Mean duration of this process's last 20 steps, or of all its steps if there are fewer, in seconds.
        eta_s: Estimated seconds until the last step ends.
        warmup_steps: Number of steps over which the learning rate rises.
        tier_used_bytes: Bytes of the slots in use after the step, by tier.
        tier_capacity_bytes: Capacity of each tier, in bytes.
        stall_s: Seconds that this step waited, by cause.
        written_bytes: Bytes written during this step, by path on a drive.
        link_bytes: Bytes moved for uses in this step, not for later steps, by link, such as ``"ram->nvme"``.
        link_busy_s: Seconds of this step with at least one transfer in progress, by link.
        ranks: For each process of a multi-process run: ``step_s``, ``tier_used_bytes``, ``stall_s``, ``link_bytes``,
            ``written_bytes``, ``rss_bytes`` and ``is_paused``. All other fields describe rank 0.
        rss_bytes: Resident memory of the process.
        process_usage: ``user_s``, ``system_s`` and ``page_faults`` of the process during this step.
        model_flops: Floating-point operations, excluding recomputation and padding. 0 if unknown.
        hardware_flops: All floating-point operations; see ``megatrain.trace.counting.step_flops``. 0 if unknown.
        preferences: Mean metrics of a preference loss, by TRL's names: ``rewards/accuracies``, ``logps/chosen`` ...
    """

    step: int
    max_steps: int
    epoch: float
    loss: float
    grad_norm: float
    lr: float
    num_real_tokens: int
    num_trained_tokens: int
    step_s: float
    eta_s: float
    tier_used_bytes: Mapping[str, int] = field(default_factory=dict)
    tier_capacity_bytes: Mapping[str, int] = field(default_factory=dict)
    stall_s: Mapping[str, float] = field(default_factory=dict)
    rss_bytes: int = 0
    written_bytes: Mapping[str, int] = field(default_factory=dict)
    link_bytes: Mapping[str, int] = field(default_factory=dict)
    model_flops: int = 0
    hardware_flops: int = 0
    mean_step_s: float = 0.0
    warmup_steps: int = 0
    link_busy_s: Mapping[str, float] = field(default_factory=dict)
    ranks: Sequence[Mapping[str, Any]] = ()
    preferences: Mapping[str, float] = field(default_factory=dict)
    process_usage: Mapping[str, float] = field(default_factory=dict)

    @property
    def real_tokens_per_s(self) -> float:
        """Tokens per second in this step, excluding padding."""
        return self.num_real_tokens / self.step_s if self.step_s > 0 else 0.0

    @property
    def trained_tokens_per_s(self) -> float:
        """Tokens with a label per second in this step."""
        return self.num_trained_tokens / self.step_s if self.step_s > 0 else 0.0

    @property
    def model_flops_per_s(self) -> float:
        """Floating-point operations per second in this step, excluding recomputation and padding."""
        return self.model_flops / self.step_s if self.step_s > 0 else 0.0

    @property
    def hardware_flops_per_s(self) -> float:
        """All floating-point operations per second in this step."""
        return self.hardware_flops / self.step_s if self.step_s > 0 else 0.0

    def to_json(self) -> dict[str, Any]:
        """Return JSON values; see ``StoredRecord.to_json``."""
        values = StoredRecord.to_json(self)
        if not self.ranks:
            del values["ranks"]
        for rate in ("real_tokens_per_s", "trained_tokens_per_s", "model_flops_per_s", "hardware_flops_per_s"):
            values[rate] = round(getattr(self, rate), 3)
        return values


@dataclass(frozen=True, slots=True)
class Sample(StoredRecord):
    """The model's continuation of a row in an evaluation set.

    Attributes:
        prompt: Beginning of the row.
        generated: Text that the model appended.
    """

    prompt: str
    generated: str
    reference: str


@dataclass(frozen=True, slots=True)
class EvaluationMetrics(StoredRecord):
    """Metrics of one evaluation set at one step.

    Attributes:
        step: Number of steps finished before the evaluation.
        name: Name of the evaluation set, as used in the names of metrics.
        loss: Mean cross entropy over all tokens with a label, without dropout, smoothing or auxiliary terms. For
            preferences, mean preference loss over all examples.
        num_tokens: Tokens with a label.
        seconds: Time for which training was paused.
        samples: Continuations of the set's first rows, if the config requests samples.
    """

    step: int
    max_steps: int
    name: str
    loss: float
    num_tokens: int
    seconds: float
    preferences: Mapping[str, float] = field(default_factory=dict)
    samples: Sequence[Sample] = ()

    @property
    def perplexity(self) -> float:
        """Perplexity, ``exp(loss)``. Meaningless for preference losses."""
        try:
            return math.exp(self.loss)
        except OverflowError:
            return math.inf

    @property
    def quality(self) -> str:
        """Metrics to print after the loss in a console line."""
        return format_preferences(self.preferences) or f"perplexity {self.perplexity:.2f}"

    def to_json(self) -> dict[str, Any]:
        """Return JSON values; see ``StoredRecord.to_json``."""
        values = {**StoredRecord.to_json(self), "perplexity": _to_json_value(self.perplexity)}
        if not self.samples:
            del values["samples"]
        return values


@dataclass(frozen=True, slots=True)
class CheckpointMetrics(StoredRecord):
    """Metrics of a checkpoint that is on disk.

    Attributes:
        step: Number of steps finished at the checkpoint.
        path: Directory of the checkpoints.
        nbytes: Size of all blocks.
        written_bytes: Bytes of the blocks that were copied from memory.
        linked_bytes: Bytes of the blocks that were hard-linked on drives.
        seconds: Time until the checkpoint would survive a power cut.
        stall_s: Part of ``seconds`` during which training was paused.
    """

    step: int
    path: Path
    nbytes: int
    written_bytes: int
    linked_bytes: int
    seconds: float
    stall_s: float


@dataclass(frozen=True, slots=True)
class RunSummary(StoredRecord):
    """Results of a run.

    Attributes:
        num_steps: Number of finished steps, including those before a resume.
        mean_losses: Mean losses over the first and over the last ``num_averaged`` steps. None if unknown.
        num_averaged: Number of steps in each mean of ``mean_losses``.
        seconds: Training time over all starts of the run, excluding the export.
        num_real_tokens: Tokens without padding, over all steps.
        num_trained_tokens: Tokens with a label, over all steps.
        tier_peak_bytes: Peak bytes in use, by tier.
        tier_capacity_bytes: Capacity of each tier, in bytes.
        link_bytes: Bytes moved since this start, by link, such as ``"ram->nvme"``.
        link_paths: Data path of each link: ``cuda``, ``posix-direct``, ``kvikio-gds`` ...
        written_bytes: Bytes written since this start, by path on a drive.
        export_dir: Exported Hugging Face folder. None without an export.
        interrupted: Whether the run was stopped early.
        saved_step: Step of the newest checkpoint. None without a checkpoint.
        evaluations: Last evaluation of each set.
        num_processes: Number of processes. Metrics of tiers, links, drives and memory describe rank 0.
    """

    num_steps: int
    first_loss: float | None
    last_loss: float | None
    seconds: float
    num_real_tokens: int
    num_trained_tokens: int
    tier_peak_bytes: Mapping[str, int] = field(default_factory=dict)
    tier_capacity_bytes: Mapping[str, int] = field(default_factory=dict)
    link_bytes: Mapping[str, int] = field(default_factory=dict)
    peak_rss_bytes: int = 0
    export_dir: Path | None = None
    interrupted: bool = False
    saved_step: int | None = None
    written_bytes: Mapping[str, int] = field(default_factory=dict)
    evaluations: Mapping[str, EvaluationMetrics] = field(default_factory=dict)
    link_paths: Mapping[str, str] = field(default_factory=dict)
    mean_losses: tuple[float, float] | None = None
    num_averaged: int = 0
    num_processes: int = 1


def _parse_samples(values: Sequence[Any]) -> tuple[Sample, ...]:
    return tuple(Sample.from_json(value) for value in values)


def _parse_metrics(values: Mapping[str, Any] | None) -> StepMetrics | None:
    return None if values is None else StepMetrics.from_json(values)


#: Functions that convert JSON values, by the annotation of the field.
_PARSERS: dict[str, Callable[[Any], Any]] = {
    "int": int,
    "float": float,
    "str": str,
    "Mapping[str, float]": _parse_numbers,
    "Sequence[Sample]": _parse_samples,
    "StepMetrics | None": _parse_metrics,
}


class RunObserver:
    """Protocol for observers of a run. By default, every method does nothing.

    The training thread calls the methods; any thread can call ``on_message``. Methods must be quick and must not raise
    errors.
    """

    def on_ready(self, step: int | None) -> None:
        """Called when all checks before training have passed. ``step`` is the resumed checkpoint's step, or None."""

    def on_start(self, info: RunInfo) -> None:
        """Called before training starts."""

    def on_step(self, metrics: StepMetrics) -> None:
        """Called after each step."""

    def on_evaluation(self, metrics: EvaluationMetrics) -> None:
        """Called after each evaluation of a set."""

    def on_checkpoint(self, metrics: CheckpointMetrics) -> None:
        """Called when a checkpoint is on disk."""

    def on_message(self, text: str) -> None:
        """Called with a message for the user."""

    def on_end(self, summary: RunSummary) -> None:
        """Called after training, unless training ended with an error."""


class Observers(RunObserver):
    """Observer that calls several observers in order."""

    def __init__(self, observers: Iterable[RunObserver]) -> None:
        self._observers = tuple(observers)


def _forward_to_all(name: str) -> Callable[..., None]:
    def call(self: Observers, *arguments: Any) -> None:
        for observer in self._observers:
            getattr(observer, name)(*arguments)

    return call


for _name in [name for name in vars(RunObserver) if name.startswith("on_")]:
    setattr(Observers, _name, _forward_to_all(_name))


def format_checkpoint(metrics: CheckpointMetrics) -> str:
    """Return the console line for a checkpoint."""
    parts = {"written": metrics.written_bytes, "linked": metrics.linked_bytes}
    note = ", ".join(f"{format_size(nbytes)} {name}" for name, nbytes in parts.items() if nbytes)
    note = f" ({note})" if metrics.linked_bytes else ""
    line = f"saved  checkpoint at step {metrics.step}: {format_size(metrics.nbytes)}{note} in {metrics.seconds:.1f} s"
    return line + (f", training waited {metrics.stall_s:.1f} s" if metrics.stall_s >= _MIN_SHOWN_STALL_S else "")


def format_evaluation(metrics: EvaluationMetrics) -> str:
    """Return the console line for an evaluation."""
    return (
        f"eval  {metrics.name} at step {metrics.step}: loss {metrics.loss:z.4f}, {metrics.quality} "
        f"({metrics.num_tokens:,} tokens in {metrics.seconds:.1f} s)"
    )


def format_samples(samples: Sequence[Sample]) -> list[str]:
    """Return a console line per sample: the end of the prompt, and the beginnings of continuation and reference."""
    return [
        f"      ...{_join_lines(sample.prompt)[-_MAX_CHARS:]} >> {_join_lines(sample.generated)[:_MAX_CHARS]} "
        f"(reference: {_join_lines(sample.reference)[:_MAX_CHARS]})"
        for sample in samples
    ]


#: Maximum number of characters of each text in a sample's console line.
_MAX_CHARS = 60
_MIN_SHOWN_STALL_S = 0.05


def _join_lines(text: str) -> str:
    return " ".join(text.split())


def format_step(metrics: StepMetrics) -> str:
    """Return the console line for a step."""
    width = len(str(metrics.max_steps))
    parts = [
        f"step {metrics.step:>{width}}/{metrics.max_steps} {100.0 * metrics.step / metrics.max_steps:.1f}%",
        f"loss {metrics.loss:z.4f}",
        *([format_preferences(metrics.preferences)] if metrics.preferences else []),
        f"gnorm {metrics.grad_norm:.2f}",
        f"lr {format_lr(metrics)}",
        f"{metrics.real_tokens_per_s:,.0f} tok/s (trained {metrics.trained_tokens_per_s:,.0f})",
    ]
    used_bytes = {tier: nbytes for tier, nbytes in metrics.tier_used_bytes.items() if nbytes}
    parts += [
        part for part in (format_tiers(used_bytes, metrics.tier_capacity_bytes), format_stalls(metrics.stall_s)) if part
    ]
    parts.append(f"eta {format_eta(metrics.eta_s)}")
    return " | ".join(parts)


def format_preferences(metrics: Mapping[str, float]) -> str:
    """Return the preference metrics for a console line, or "" if there are none."""
    names = {
        "rewards/accuracies": "accuracy {:.2f}",
        "rewards/margins": "margin {:.3f}",
        "kl": "kl {:.3f}",
        "accuracy": "accuracy {:.3f}",
        "margin": "margin {:.3f}",
    }
    return ", ".join(text.format(metrics[name]) for name, text in names.items() if name in metrics)


def format_lr(metrics: StepMetrics) -> str:
    """Return the learning rate and the progress of the warm-up, which starts at a rate of 0."""
    text = f"{metrics.lr:.1e}" if metrics.lr else "0"
    if metrics.step > metrics.warmup_steps:
        return text
    return f"{text} (warm-up {metrics.step}/{metrics.warmup_steps})"


def format_eta(seconds: float) -> str:
    """Return the estimated remaining time, rounded to seconds."""
    return f"{seconds:.0f} s" if round(seconds) < 60 else format_duration(round(seconds))


def format_tiers(used_bytes: Mapping[str, int], capacity_bytes: Mapping[str, int]) -> str:
    """Return the used bytes and the capacity of each tier, e.g. ``"ram 612.0/700.0 MiB nvme 1.4/20.0 GiB"``."""
    texts = []
    for tier, nbytes in used_bytes.items():
        limit = capacity_bytes.get(tier)
        if limit is None:
            texts.append(f"{tier} {format_size(nbytes)}")
            continue
        unit, name = (GiB, "GiB") if limit >= GiB else (MiB, "MiB")
        amount = "<0.1" if 0 < nbytes < unit / 20 else f"{nbytes / unit:.1f}"
        texts.append(f"{tier} {amount}/{limit / unit:.1f} {name}")
    return " ".join(texts)


def format_rank(metrics: Mapping[str, Any]) -> str:
    """Return a rank's tier usage, transfers and stalls in a step, given its entry in ``StepMetrics.ranks``."""
    link_bytes = metrics.get("link_bytes", {})
    rank_bytes = sum(nbytes for link, nbytes in link_bytes.items() if link.endswith(("->ranks", "->hosts")))
    parts = [
        format_tiers(metrics.get("tier_used_bytes", {}), {}),
        f"moved {format_size(int(sum(link_bytes.values())))}, {format_size(int(rank_bytes))} of it to other ranks",
        format_stalls(metrics.get("stall_s", {})),
        f"process {format_size(int(metrics.get('rss_bytes', 0)))}",
    ]
    return "  ".join(part for part in (*parts, "waits for space on a drive" * bool(metrics.get("is_paused"))) if part)


def format_stalls(stall_s: Mapping[str, float]) -> str:
    """Return the seconds waited by cause, omitting causes below 50 ms, or "" if all are omitted."""
    texts = [f"{cause} {seconds:.1f}s" for cause, seconds in stall_s.items() if seconds >= _MIN_SHOWN_STALL_S]
    return f"wait {' '.join(texts)}" if texts else ""
