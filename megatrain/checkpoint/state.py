"""What a checkpoint holds besides the blocks: plain JSON in the manifest of its generation (docs/checkpoints.md)."""

from __future__ import annotations

import platform
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from typing import Any

__all__ = ["CHECKPOINT_FORMAT", "CheckpointError", "RunState", "installed_versions", "now_text"]

#: Version of ``RunState`` in manifests. Readers refuse newer ones and read all older ones.
CHECKPOINT_FORMAT = 1
_PROGRAM = "megatrain-tier"


class CheckpointError(Exception):
    """A checkpoint cannot be used or written; the message says which, why and what to do."""


@dataclass(frozen=True, slots=True)
class RunState:
    """Where a run stands after a step. With the blocks of the same generation it determines all that follows.

    There is no state of a random number generator to save: dropout and the order of the data are functions of a seed
    and a position, both here.

    Attributes:
        step: steps done. max_steps: steps of the run, which the learning rate schedule is made for.
        num_updates: steps whose gradient was used; what the optimizer counts.
        epoch, epoch_step: position of the data: the next step is number ``epoch_step`` of epoch ``epoch``, from 0.
        num_real_tokens, num_trained_tokens: of all steps so far. seconds: of training, so far.
        first_loss, last_loss: of the first and the last step; None before the first.
        seed, data_seed: what every random number is a function of, with the step or the epoch.
        lr_schedule: type, peak learning rate, steps and warm-up steps; for people: the config decides.
        config_toml: the resolved config as a TOML file.
        data_fingerprint: checksum of all tokens, masks and document boundaries.
        model: name, class and number of parameters, for people; dtype, device, attention and a checksum of its config;
            where tensors of its folder are kept as they are, their number and their checksum.
        run_name: as in the config. saved_at: date and time, ISO 8601. versions: package -> version.
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

    def to_meta(self) -> dict[str, Any]:
        """Return the ``meta`` of the commit."""
        return {"program": _PROGRAM, "checkpoint_format": CHECKPOINT_FORMAT, **asdict(self)}

    @classmethod
    def from_meta(cls, meta: Mapping[str, Any], *, where: str) -> RunState:
        """Return the state that a manifest holds; unknown keys of it are ignored.

        Args:
            where: the checkpoint, for messages.

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
        missing = [f.name for f in fields(cls) if f.name not in meta and f.name != "versions"]
        if missing:
            raise CheckpointError(f"{where} lacks {', '.join(missing)}: it is damaged. Use another checkpoint")
        return cls(**{f.name: meta[f.name] for f in fields(cls) if f.name in meta})


def installed_versions() -> dict[str, str]:
    """Return the versions of this program, of Python and of the packages that the numbers come from."""
    found = {"python": platform.python_version()}
    for package in (_PROGRAM, "torch", "transformers", "numpy", "numba"):
        try:
            found[package] = version(package)
        except PackageNotFoundError:
            continue
    return found


def now_text() -> str:
    """Return the present date and time in UTC, e.g. ``2026-11-21T10:36:45+00:00``."""
    return datetime.now(UTC).isoformat(timespec="seconds")
