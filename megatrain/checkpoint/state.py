"""What a checkpoint holds besides the blocks: plain JSON in the manifest of its generation (docs/checkpoints.md)."""

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

__all__ = [
    "ARITHMETIC",
    "CHECKPOINT_FORMAT",
    "CheckpointError",
    "KeptRules",
    "RunState",
    "installed_versions",
    "now_text",
]

#: Version of ``RunState`` in manifests. Readers refuse newer ones and read all older ones.
CHECKPOINT_FORMAT = 1
#: Version of the order of additions: with another one, the last bits of a step are others. 2: pieces of the head have
#: 2,048 rows and parts of the vocabulary, and gradients of weights are products added in fp32. 3: such a part has no
#: words of two blocks of the weight's gradient, where that is more than one.
ARITHMETIC = 3
_PROGRAM = "megatrain-tier"
#: Losses that a state keeps of either end of a run.
NUM_LOSSES = 10
_ANOTHER = "Use another checkpoint"


class CheckpointError(Exception):
    """A checkpoint cannot be used or written; the message says which, why and what to do."""


#: Tokens that a micro-batch aimed at before checkpoints recorded them, by type of the device.
_UNRECORDED_TOKENS = {"cpu": 2048, "cuda": 8192}


@dataclass(frozen=True, slots=True)
class KeptRules:
    """Rules that a config may leave to the first start of a run, and that every later start keeps.

    Attributes:
        num_lanes: Lanes in which the gradients of micro-batches are added.
        micro_batch_tokens: Tokens that a micro-batch aims at; None if the checkpoint does not name its device.
        muon_fused: ``optimizer.muon_fused``, "whole" in a checkpoint of before there was the key.
    """

    num_lanes: int = 1
    micro_batch_tokens: int | None = None
    muon_fused: str = "whole"
    uses_liger: bool = False
    flash: str = "FA2"

    @classmethod
    def of_meta(cls, meta: Mapping[str, Any]) -> KeptRules | None:
        """Return the rules of the run that wrote a checkpoint's ``meta``; None if its config is damaged."""
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
    """Where a run stands after a step. With the blocks of the same generation it determines all that follows.

    There is no state of a random number generator to save: dropout and the order of the data are functions of a seed
    and a position, both here.

    Attributes:
        max_steps: steps of the run, which the learning rate schedule is made for.
        num_updates: steps whose gradient was used; what the optimizer counts.
        epoch: data position: epoch of the next step, from 0.
        epoch_step: data position: number of the next step in its epoch, from 0.
        num_real_tokens: tokens without padding, all steps so far.
        num_trained_tokens: tokens with a loss, all steps so far.
        first_loss: loss of the first step; None before it.
        last_loss: loss of the last step; None before the first.
        first_losses: losses of the first ``NUM_LOSSES`` steps.
        last_losses: losses of the last ``NUM_LOSSES`` steps.
        seed: What the model's random numbers come from, each a function of (seed, step).
        data_seed: What the order of the data comes from, a function of (seed, epoch).
        lr_schedule: type, peak learning rate, steps and warm-up steps; for people: the config decides.
        data_fingerprint: checksum of all tokens, masks and document boundaries.
        model: name, class and number of parameters, for people; dtype, device, attention, a checksum of its config,
            tokens that a micro-batch aims at; on a CPU, torch's threads; where tensors of its folder are kept as they
            are, their number and their checksum.
        saved_at: date and time, ISO 8601; for people.
        arithmetic: ``ARITHMETIC`` of the program that computed the last step.
        cursor: data position: where streams stand (``LoaderPosition.cursor``); None: there are none.
        save_number: grows with each save of the run, over all its folders and copies, and orders them; 0: not counted.
        sources: Checksum of each source's files; empty if not recorded. A refusal lists changed sources with them.
            They refuse nothing alone, as other bytes may have the same tokens.
        best: the best evaluation so far (``Best.to_state``); None: there was none, or nothing follows from it.
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
    best: Mapping[str, Any] | None = None
    cursor: Mapping[str, Any] | None = None
    save_number: int = 0
    sources: tuple[str, ...] = ()

    def to_meta(self) -> dict[str, Any]:
        """Return the ``meta`` of the commit."""
        return {"program": _PROGRAM, "checkpoint_format": CHECKPOINT_FORMAT, **asdict(self)}

    @classmethod
    def from_meta(cls, meta: Mapping[str, Any], *, where: str) -> RunState:
        """Return the state that a manifest holds; unknown keys of it are ignored.

        Raises:
            CheckpointError: it is no checkpoint of a run, or a newer version of this program wrote it.
        """
        if meta.get("program") != _PROGRAM:
            raise CheckpointError(
                f"{where} holds blocks that another program committed, not a checkpoint of {_PROGRAM}: name another"
            )
        found = meta.get("checkpoint_format")
        if not isinstance(found, int) or found > CHECKPOINT_FORMAT:
            raise CheckpointError(
                f"{where} has format {found}, this version reads up to {CHECKPOINT_FORMAT}: upgrade {_PROGRAM}"
            )
        required = [f.name for f in fields(cls) if f.default is MISSING and f.default_factory is MISSING]
        missing = [name for name in required if name not in meta]
        if missing:
            raise CheckpointError(f"{where} lacks {', '.join(missing)}: it is damaged. {_ANOTHER}")
        values = {f.name: meta[f.name] for f in fields(cls) if f.name in meta}
        validate, ValidationError = _validation()
        try:
            return validate(values)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            name = ".".join(map(str, first["loc"]))
            raise CheckpointError(f"{where} has {name} = {first['input']!r:.40}: it is damaged. {_ANOTHER}") from error

    def with_loss(self, loss: float) -> RunState:
        """Return the state with the loss of one more step."""
        first, last = self.first_losses, (*self.last_losses, loss)[-NUM_LOSSES:]
        if len(first) < NUM_LOSSES and len(first) == self.step:  # not those of an older version's run
            first = (*first, loss)
        first_loss = loss if self.first_loss is None else self.first_loss
        return replace(self, first_loss=first_loss, last_loss=loss, first_losses=first, last_losses=last)

    def saved_now(self) -> RunState:
        """Return the state with the present time as that of its checkpoint."""
        # Not to the second: an older version orders checkpoints by it.
        return replace(self, saved_at=now_text("microseconds"))

    @property
    def mean_losses(self) -> tuple[float, float, int] | None:
        """Means over the first and the last steps, as many each, which do not overlap, and how many; None: not known.

        A single step says more about its rows than about the model.
        """
        count = min(NUM_LOSSES, max(1, self.step // 2))
        if min(len(self.first_losses), len(self.last_losses)) < count:
            return None
        return fsum(self.first_losses[:count]) / count, fsum(self.last_losses[-count:]) / count, count


@cache
def _validation() -> tuple[Callable[[Any], RunState], Any]:
    """Return what checks the types of a state that a file holds, which may be a stranger's, and the error of it."""
    from pydantic import TypeAdapter, ValidationError  # ``status`` answers without it

    return TypeAdapter(RunState).validate_python, ValidationError


def installed_versions() -> dict[str, str]:
    """Return the versions of this program, of Python and of the packages that the numbers come from."""
    found = {"python": platform.python_version()}
    for package in (_PROGRAM, "torch", "transformers", "numpy", "numba"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def now_text(timespec: str = "seconds") -> str:
    """Return the present date and time in UTC, e.g. ``2026-11-21T10:36:45+00:00``.

    Texts are in the order of times, also beside one to the second: ``+`` comes before the point of a fraction.
    """
    return datetime.now(UTC).isoformat(timespec=timespec)
