"""The tables of the config that say what is trained on: ``[data]`` and its sources."""

from __future__ import annotations

import re
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field

from megatrain.config.fields import CacheFolder, Packing, PlainSize, Table, as_tuple

#: What a row may hold.
RowFormat = Literal[
    "auto", "messages", "sharegpt", "alpaca", "prompt_completion", "text", "tokenized"
]  # preference data comes with a task that uses it
#: Our names of fields; the second line are names that other tools use for some of the first.
ColumnName = Literal[
    "messages", "prompt", "completion", "text", "instruction", "input", "output", "system", "history", "tools",
    "conversations", "query", "response",
    "role", "content", "input_ids", "labels", "loss_mask", "attention_mask",
]  # fmt: skip


class DatasetConfig(Table):
    """``[[data.train]]``: one source of training rows."""

    path: str = Field(
        min_length=1,
        description="File, glob or folder of .jsonl, .json, .csv, .tsv, .txt, .parquet or .arrow files (text files "
        "also with .gz), or the hub name of a dataset (the last three need the data extra).",
    )
    subset: str | None = Field(default=None, min_length=1, description="Hub datasets: which subset (configuration).")
    split: str | None = Field(
        default=None,
        min_length=1,
        description='Folders and hub datasets: which split. Default: "train" where there are several.',
    )
    format: RowFormat = Field(default="auto", description="What a row holds; auto: seen from its fields, row by row.")
    columns: dict[ColumnName, str] = Field(
        default_factory=dict,
        description='Our field -> your column, e.g. { prompt = "question", completion = "answer" }.',
    )
    max_samples: int | None = Field(default=None, ge=1, description="Use at most this many rows, from the start.")
    weight: float = Field(
        default=1.0,
        gt=0,
        description="How often its documents are used in an epoch: 2.5 is twice each, and half of them a third time; "
        "0.3 is three in ten. data_seed chooses which.",
    )


class EvalSetConfig(DatasetConfig):
    """``[[data.eval]]``: rows that are only evaluated on."""

    name: str | None = Field(
        default=None,
        min_length=1,
        description='What metrics call it, e.g. "held_out". Default: the last part of the path, without its ending.',
    )

    @property
    def shown_name(self) -> str:
        """What metrics call it."""
        return self.name or re.sub(r"[*?].*|[.][A-Za-z].*", "", self.path.rstrip("/").rpartition("/")[2]) or "eval"

    def as_source(self, max_samples: int | None = None) -> DatasetConfig:
        """Return the same rows as a source of training rows, at most ``max_samples`` of them."""
        values = self.model_dump(exclude={"name"})
        limits = [limit for limit in (self.max_samples, max_samples) if limit is not None]
        return DatasetConfig.model_validate({**values, "max_samples": min(limits, default=None)})


class DataConfig(Table):
    """``[data]``: rows, masks and their arrangement."""

    max_length: int = Field(default=1024, ge=2, description="Tokens in a row of a micro-batch.")
    packing: Packing = Field(
        default=True,
        description='true: several documents share a row and never attend to each other. "concat" (pretrain): texts '
        "are joined, end of text between them, and cut to full rows, in which what follows attends to what is before. "
        "false: one document a row, padded. Default: true, but false where the model would mix documents of a row.",
    )
    train_on: Literal["assistant", "last_assistant", "completion", "all"] = Field(
        default="assistant",
        description="assistant: all of the assistant's turns; last_assistant: only the last one; completion: what "
        "follows the prompt, in a conversation the last turn; all: every token. Plain text is always trained on "
        "whole. Default: assistant (sft), all (pretrain).",
    )
    overlong: Literal["truncate", "drop", "error"] = Field(
        default="truncate",
        description="What happens to conversations longer than max_length. Plain text is cut into pieces.",
    )
    bad_rows: Literal["drop", "error"] = Field(
        default="drop",
        description="What happens to rows whose loss mask cannot be proven, or that the chat template refuses: drop "
        "leaves them out, counted and explained; error ends the run at the first.",
    )
    max_dropped: float = Field(
        default=0.5,
        ge=0,
        le=1,
        description="Largest share of the rows, or of the tokens, of a source that may be dropped or cut; with more a "
        "run is refused. Above 0.05 there is a warning. 1: no limit.",
    )
    cache_dir: CacheFolder = Field(
        default="auto",
        description="Folder of tokenized data, found again by its contents. auto: $XDG_CACHE_HOME/megatrain-tier/"
        "tokens, else below ~/.cache; none: tokens are kept in RAM.",
    )
    max_cache_size: PlainSize | None = Field(
        default=None,
        ge=1,
        description="Largest size of that folder; what was used longest ago is removed. Default: no limit.",
    )
    val_size: float | None = Field(
        default=None,
        gt=0,
        description="Rows of [[data.train]] that are kept from training and evaluated on instead, chosen by data_seed. "
        ">= 1: so many. < 1: that share of them. Not together with [[data.eval]]. Default: none.",
    )
    train: Annotated[tuple[DatasetConfig, ...], BeforeValidator(as_tuple)] = Field(
        min_length=1, description="The sources of training rows."
    )
    eval: Annotated[tuple[EvalSetConfig, ...], BeforeValidator(as_tuple)] = Field(
        default=(), description="Rows that are only evaluated on: one loss for each table, as [evaluation] says."
    )
