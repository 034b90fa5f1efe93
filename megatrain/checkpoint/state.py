"""The state of a run, stored as plain JSON in the manifest of a generation (docs/checkpoints.md)."""

from __future__ import annotations

import platform
import tomllib
from collections.abc import Callable, Mapping
from dataclasses import MISSING, asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from math import fsum
from typing import Any

from megatrain.base.observer import RunSummary
from megatrain.checkpoint.best import BestEvaluation

__all__ = [
    "ARITHMETIC",
    "CHECKPOINT_FORMAT",
    "CheckpointError",
    "DecidedSettings",
    "RunState",
    "installed_versions",
    "now_text",
]

#: Version of ``RunState`` in manifests. Readers refuse newer versions and accept all older versions.
CHECKPOINT_FORMAT = 1
#: Version of the summation order. A different version changes the last bits of a step. Version 2: the head computes
#: pieces of 2,048 rows and parts of the vocabulary, and weight gradients are summed in fp32. Version 3: a part of the
#: vocabulary never spans two blocks of the weight gradient.
ARITHMETIC = 3
_PROGRAM = "megatrain-tier"
#: Number of losses that a state keeps from the start of a run, and also from its latest steps.
NUM_LOSSES = 10
_ANOTHER = "Use another checkpoint"


class CheckpointError(Exception):
    """A checkpoint cannot be used or written. The message contains the checkpoint, the cause and the remedy."""


#: Target number of tokens per micro-batch, by device type, for checkpoints that do not record it.
_UNRECORDED_TOKENS = {"cpu": 2048, "cuda": 8192}


@dataclass(frozen=True, slots=True)
class DecidedSettings:
    """Settings that a config can leave open. The first start of a run decides them, and all later starts keep them.

    Attributes:
        num_lanes: Number of gradient lanes (``training.gradient_lanes``).
        micro_batch_tokens: Target number of tokens per micro-batch. None if neither it nor the device is recorded.
        muon_fused: ``optimizer.muon_fused``; "whole" in checkpoints older than this key.
    """

    num_lanes: int = 1
    micro_batch_tokens: int | None = None
    muon_fused: str = "whole"
    uses_liger: bool = False
    flash: str = "FA2"

    @classmethod
    def of_meta(cls, meta: Mapping[str, Any]) -> DecidedSettings | None:
        """Return the settings of the run that wrote a checkpoint's ``meta``, or None if its config is damaged."""
        try:
            config = tomllib.loads(str(meta.get("config_toml", "")))
        except tomllib.TOMLDecodeError:
            return None
        found = meta.get("model")
        model = found if isinstance(found, Mapping) else {}
        lanes = config.get("training", {}).get("gradient_lanes", 1)
        flash = str(config.get("model", {}).get("flash_attention", "FA2"))
        tokens = model.get("micro_batch_tokens", _UNRECORDED_TOKENS.get(model.get("device", "")))
        return cls(
            num_lanes=lanes if isinstance(lanes, int) else 1,
            micro_batch_tokens=tokens if isinstance(tokens, int) else None,
            muon_fused=str(config.get("optimizer", {}).get("muon_fused", "whole")),
            uses_liger=config.get("model", {}).get("use_liger_kernel", False) is True,
            flash="FA2" if flash == "auto" else flash,
        )


@dataclass(frozen=True, slots=True)
class RunState:
    """The state of a run after a step. Together with the blocks of its generation, it determines all further results.

    The state contains no random number generators, because dropout and data order depend only on a seed and a
    position, which are fields.

    Attributes:
        max_steps: Planned number of steps, which determines the learning rate schedule.
        num_updates: Number of steps whose gradient was applied, which is the optimizer's step count.
        epoch: Data position: epoch of the next step, starting at 0.
        epoch_step: Data position: number of the next step in its epoch, starting at 0.
        num_real_tokens: Number of tokens processed so far, without padding.
        num_trained_tokens: Number of tokens so far that contributed to the loss.
        first_loss: Loss of the first step; None before that step.
        last_loss: Loss of the last step; None before the first step.
        first_losses: Losses of the first ``NUM_LOSSES`` steps.
        last_losses: Losses of the last ``NUM_LOSSES`` steps.
        seed: Seed of the model's random numbers, each a function of (seed, step).
        data_seed: Seed of the data order, a function of (seed, epoch).
        lr_schedule: Type, peak learning rate, steps and warm-up steps. Informational, because the config decides.
        data_fingerprint: Checksum of all tokens, masks and document boundaries.
        model: Name, class and number of parameters (informational); dtype, device, attention, checksum of the model's
            config, target tokens of a micro-batch; on a CPU, torch's threads; number and checksum of kept tensors.
        saved_at: Date and time, ISO 8601; informational.
        arithmetic: ``ARITHMETIC`` of the program that computed the last step.
        cursor: Data position of streams (``LoaderPosition.cursor``); None without streams.
        save_number: Number of the save, which orders checkpoints across folders and copies; 0 if not recorded.
        sources: Checksum of each source's files; empty if not recorded. Only used to list changed sources in an error,
            because files with different bytes may have the same tokens.
        best: Best evaluation so far (``BestSpec.after``); None if there is none or the run does not use it.
    """

    step: int
    max_steps: int
    num_updates: int
    epoch: int
    epoch_step: int
    num_real_tokens: int
    num_trained_tokens: int
    seconds: float
    first_loss: float | None
    last_loss: float | None
    seed: int
    data_seed: int
    lr_schedule: Mapping[str, Any]
    config_toml: str
    data_fingerprint: str
    model: Mapping[str, Any]
    run_name: str
    saved_at: str
    versions: Mapping[str, str] = field(default_factory=dict)
    first_losses: tuple[float, ...] = ()
    last_losses: tuple[float, ...] = ()
    arithmetic: int = 1
    best: BestEvaluation | None = None
    cursor: Mapping[str, Any] | None = None
    save_number: int = 0
    sources: tuple[str, ...] = ()

    def to_meta(self) -> dict[str, Any]:
        """Return the state as the ``meta`` of a commit."""
        return {"program": _PROGRAM, "checkpoint_format": CHECKPOINT_FORMAT, **asdict(self)}

    @classmethod
    def from_meta(cls, meta: Mapping[str, Any], *, where: str) -> RunState:
        """Return the state in a manifest's ``meta``. Unknown keys are ignored.

        Raises:
            CheckpointError: ``meta`` is not from a checkpoint of a run, or a newer version of this program wrote it.
        """
        if meta.get("program") != _PROGRAM:
            raise CheckpointError(
                f"{where} holds blocks that another program committed, not a checkpoint of {_PROGRAM}: name another"
            )
        file_format = meta.get("checkpoint_format")
        if not isinstance(file_format, int) or file_format > CHECKPOINT_FORMAT:
            raise CheckpointError(
                f"{where} has format {file_format}, but this version reads up to {CHECKPOINT_FORMAT}: upgrade "
                f"{_PROGRAM}"
            )
        required = [f.name for f in fields(cls) if f.default is MISSING and f.default_factory is MISSING]
        missing_names = [name for name in required if name not in meta]
        if missing_names:
            raise CheckpointError(f"{where} lacks {', '.join(missing_names)}: it is damaged. {_ANOTHER}")
        values = {f.name: meta[f.name] for f in fields(cls) if f.name in meta}
        validate, ValidationError = _validation()
        try:
            return validate(values)
        except ValidationError as error:
            detail = error.errors(include_url=False)[0]
            name = ".".join(map(str, detail["loc"]))
            raise CheckpointError(f"{where} has {name} = {detail['input']!r:.40}: it is damaged. {_ANOTHER}") from error

    def with_loss(self, loss: float) -> RunState:
        """Return the state after recording the loss of one more step."""
        first_losses, last_losses = self.first_losses, (*self.last_losses, loss)[-NUM_LOSSES:]
        if len(first_losses) < NUM_LOSSES and len(first_losses) == self.step:  # older versions recorded no first losses
            first_losses = (*first_losses, loss)
        first_loss = loss if self.first_loss is None else self.first_loss
        return replace(self, first_loss=first_loss, last_loss=loss, first_losses=first_losses, last_losses=last_losses)

    def with_save_time(self) -> RunState:
        """Return the state with the current time as its save time."""
        # The time has microseconds, because older versions order checkpoints by this text.
        return replace(self, saved_at=now_text("microseconds"))

    @property
    def mean_losses(self) -> tuple[float, float, int] | None:
        """Mean loss of the first n steps, of the last n steps, and n. The steps do not overlap. None if not recorded.

        Means are reported because a single loss depends more on the rows of its step than on the model.
        """
        count = min(NUM_LOSSES, max(1, self.step // 2))
        if min(len(self.first_losses), len(self.last_losses)) < count:
            return None
        return fsum(self.first_losses[:count]) / count, fsum(self.last_losses[-count:]) / count, count

    def summary(self) -> RunSummary:
        """Return the steps, losses and tokens of the run so far."""
        means = self.mean_losses
        return RunSummary(
            num_steps=self.step,
            first_loss=self.first_loss,
            last_loss=self.last_loss,
            mean_losses=None if means is None else means[:2],
            num_averaged=0 if means is None else means[2],
            seconds=self.seconds,
            num_real_tokens=self.num_real_tokens,
            num_trained_tokens=self.num_trained_tokens,
        )


@cache
def _validation() -> tuple[Callable[[Any], RunState], Any]:
    """Return a function that validates the fields of a state from an untrusted file, and its error type."""
    from pydantic import TypeAdapter, ValidationError  # imported late, because ``status`` does not need it

    return TypeAdapter(RunState).validate_python, ValidationError


def installed_versions() -> dict[str, str]:
    """Return the versions of this program, of Python and of the packages that affect results."""
    versions = {"python": platform.python_version()}
    for package in (_PROGRAM, "torch", "transformers", "numpy", "numba"):
        try:
            versions[package] = version(package)
        except PackageNotFoundError:
            continue
    return versions


def now_text(timespec: str = "seconds") -> str:
    """Return the current date and time in UTC, e.g. ``2026-11-21T10:36:45+00:00``.

    The texts sort chronologically even if some have no fractional seconds, because ``+`` sorts before the point.
    """
    return datetime.now(UTC).isoformat(timespec=timespec)
