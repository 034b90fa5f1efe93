"""Config table ``[checkpoint]``: when a run saves, which checkpoints it keeps, and where it resumes from."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema, model_validator

from megatrain.base.table import (
    HF,
    HF_AXOLOTL,
    Duration,
    PlainSize,
    Table,
    all_alter,
    explain,
    key,
    mark_path,
    mask_secrets,
)
from tiered.units import GiB

#: Minimum number of checkpoints for which a run needs disk space: the newest one, and the one being written.
MIN_GENERATIONS = 2


def _parse_source(value: object) -> object:
    """Convert true to "auto" and false to "no", because other tools use these booleans."""
    return {True: "auto", False: "no"}[value] if isinstance(value, bool) else value


ResumeSource = Annotated[
    str,
    BeforeValidator(_parse_source),
    Field(min_length=1),
    WithJsonSchema({"anyOf": [{"type": "string", "minLength": 1}, {"type": "boolean"}]}),
    mark_path("auto", "no"),
]
#: URL for fsspec. It must not contain passwords, signatures or other secrets.
CopyUrl = Annotated[str, Field(pattern=r"^[a-z][a-z0-9+.-]*://[^\s*?]*$", examples=["s3://bucket/run"])]
#: Checkpoints to copy: all, every n-th, the last or none. A URL receives all checkpoints.
CopyRule = Annotated[
    bool | Annotated[int, Field(ge=1)] | Literal["last"] | CopyUrl,
    explain(
        "is not a rule for copies",
        'Write true (every checkpoint), 5 (every fifth one), "last" or false; or a URL such as "s3://bucket/run", '
        "without keys: those come from the environment (AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, or AWS_PROFILE)",
    ),
]


class CheckpointConfig(Table, json_schema_extra=all_alter("no")):
    """``[checkpoint]``: when a run saves, how many checkpoints it keeps, and where it resumes from."""

    save_strategy: Literal["steps", "time", "epoch", "no"] = key(
        'When to save. Every value but "no" also saves at the end. Default: time if save_interval is set, else steps.',
        "steps",
        same_name=HF_AXOLOTL,
    )
    save_steps: int = key(
        "steps: optimizer steps between two saves.",
        200,
        ge=1,
        same_name=HF_AXOLOTL,
        used_if={"save_strategy": ["steps"]},
    )
    save_interval: Duration | None = key(
        'time: interval between two saves, e.g. "45min".', None, used_if={"save_strategy": ["time"]}
    )
    save_total_limit: int = key("Number of newest checkpoints to keep.", 2, ge=1, same_name=HF_AXOLOTL)
    load_best_model_at_end: bool = key(
        "Save after each evaluation that is the best so far, keep that checkpoint in addition to the newest ones,"
        " and write it to output_dir/final instead of the last one.",
        False,
        same_name=HF,
    )
    save_copy: CopyRule = key(
        "Checkpoints to copy completely to output_dir/copies during training. If a [[tiers.nvme]] drive is lost, the "
        'run continues from a copy. true: every checkpoint; 5: every fifth and the last; "last": only the last, at '
        "the end or at a stop. save_total_limit copies are kept. A URL for fsspec, such as "
        '"s3://bucket/run": every checkpoint is copied there before it is removed here, and a run with an empty '
        "output_dir continues from there.",
        False,
    )
    save_on_signal: bool = key(
        "On SIGTERM, SIGINT and SIGHUP, finish the step, save and exit with 75. false: end at once.", True
    )
    resume_from_checkpoint: ResumeSource = key(
        '"auto": continue the run in output_dir if it exists; "no": start from the beginning, refused if '
        "output_dir has checkpoints; or the output_dir of another run, to start from its newest checkpoint.",
        "auto",
        same_name=HF_AXOLOTL,
    )
    async_save: bool = key("Continue training while a checkpoint is written.", True)
    min_free_disk: PlainSize = key("Space that a save leaves free on its drive.", GiB, ge=0)

    @model_validator(mode="before")
    @classmethod
    def _fill_strategy(cls, values: Any) -> Any:
        if isinstance(values, dict) and "save_interval" in values:
            values = {"save_strategy": "time", **values}
        if isinstance(values, dict) and isinstance(url := values.get("save_copy"), str):
            # Remove secrets before validation, because errors and logs show a refused value.
            values = {**values, "save_copy": mask_secrets(url)}
        return values

    @property
    def copy_url(self) -> str | None:
        """URL that receives the copies, or None if the run makes no copies or stores them in ``output_dir``."""
        is_url = isinstance(self.save_copy, str) and self.save_copy != "last"
        return str(self.save_copy) if is_url and self.is_on else None

    @property
    def copy_every(self) -> int | None:
        """Number of saves per copy in ``output_dir``, or None if the run copies at most its last checkpoint there."""
        if isinstance(self.save_copy, bool):
            return 1 if self.save_copy else None
        return self.save_copy if isinstance(self.save_copy, int) else None

    @property
    def is_on(self) -> bool:
        """Whether this run saves checkpoints."""
        return self.save_strategy != "no" or self.save_on_signal

    @property
    def num_generations(self) -> int:
        """Number of checkpoints for which the plan reserves disk space, or 0 if the run never saves."""
        return self._max_kept + self.load_best_model_at_end if self.is_on else 0

    @property
    def num_copies(self) -> int:
        """Maximum number of complete copies in ``output_dir``, or 0 if the run stores none there."""
        return self._max_kept if self.is_on and self.save_copy is not False and self.copy_url is None else 0

    @property
    def _max_kept(self) -> int:
        return max(self.save_total_limit, MIN_GENERATIONS)  # a checkpoint is removed only when the next one is complete

    def without_saves(self) -> CheckpointConfig:
        """Return a copy of the table that disables all saves and copies."""
        values = {"save_strategy": "no", "save_on_signal": False, "save_copy": False}
        return self.model_copy(update=values)


@dataclass(frozen=True, slots=True)
class CheckpointSpec:
    """Locations of a run's checkpoints, and its ``[checkpoint]`` table.

    Attributes:
        drives: Folders of the NVMe tier, which contain parts of checkpoints.
        on_full: How a save reacts to a full drive: it pauses training until space is free, or raises an error.
    """

    table: CheckpointConfig
    output_dir: Path
    drives: tuple[Path, ...]
    on_full: Literal["pause", "error"]
