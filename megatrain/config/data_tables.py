"""The tables of the config that say what is trained on: ``[data]`` and its sources."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from megatrain.config.fields import Table, as_tuple

#: Our names of fields.
ColumnName = Literal["messages", "prompt", "completion", "text"]


class DatasetConfig(Table):
    """``[[data.train]]``: one source of training rows."""

    path: str = Field(min_length=1, description="File, glob or folder of .jsonl, .json or .txt files.")
    format: Literal["auto", "messages", "prompt_completion", "text"] = Field(
        default="auto", description="What a row holds; auto: seen from its fields, row by row."
    )
    columns: dict[ColumnName, str] = Field(
        default_factory=dict,
        description='Our field -> your column, e.g. { prompt = "question", completion = "answer" }.',
    )
    max_samples: int | None = Field(default=None, ge=1, description="Use at most this many rows, from the start.")


class DataConfig(Table):
    """``[data]``: rows, masks and their arrangement."""

    max_length: int = Field(default=1024, ge=2, description="Tokens in a row of a micro-batch.")
    packing: bool = Field(default=True, description="Several documents share a row and never attend to each other.")
    train_on: Literal["assistant", "completion", "all"] = Field(
        default="assistant",
        description="assistant: all of the assistant's turns; completion: the last one; all: every token. "
        "Plain text is always trained on whole. Default: assistant (sft), all (pretrain).",
    )
    overlong: Literal["truncate", "drop", "error"] = Field(
        default="truncate",
        description="What happens to conversations longer than max_length. Plain text is cut into pieces.",
    )
    train: Annotated[tuple[DatasetConfig, ...], BeforeValidator(as_tuple)] = Field(
        min_length=1, description="The sources of training rows."
    )
