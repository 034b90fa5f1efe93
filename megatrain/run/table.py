"""Config tables [logging] and [profile]: output and records of a run."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from megatrain.base.table import HF, Listed, Table, all_alter, as_names, key

_TARGETS = ["jsonl", "tensorboard", "wandb", "mlflow", "swanlab", "trackio", "comet_ml"]
ReportTargets = Annotated[
    tuple[Literal["jsonl", "tensorboard", "wandb", "mlflow", "swanlab", "trackio", "comet_ml"], ...],
    BeforeValidator(as_names),
    WithJsonSchema({"anyOf": [{"enum": [*_TARGETS, "none"]}, {"type": "array", "items": {"enum": _TARGETS}}]}),
]


class LoggingConfig(Table, json_schema_extra=all_alter("no")):
    """``[logging]``: output and records."""

    logging_steps: int = key("Steps between two log lines.", 1, ge=1, same_name=HF)
    report_to: ReportTargets = key(
        "Destinations of metrics: jsonl (output_dir/metrics.jsonl), tensorboard (output_dir/tensorboard), or a "
        "service: wandb, mlflow, swanlab, trackio or comet_ml. All except jsonl need the extra of that name. "
        '"none": no destination.',
        ("jsonl",),
        same_name=HF,
    )
    project: str = key("Project or experiment of the run at a service.", "megatrain-tier", min_length=1)
    progress: Literal["auto", "bar", "plain", "json", "none"] = key(
        "auto: a bar on a terminal, else plain lines.", "auto"
    )


class ProfileConfig(Table, json_schema_extra=all_alter("no")):
    """``[profile]``: timelines."""

    trace_steps: Listed[Annotated[int, Field(ge=1)]] = key(
        "Steps (from 1) whose timeline is written to output_dir/trace.json for Perfetto.", ()
    )
