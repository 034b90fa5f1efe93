"""Config tables [data] and [score]: training rows, loss masks and packing, and the scoring of tokens."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from megatrain.base.table import Listed, PlainSize, Table, all_alter, as_names, explain, key, mark_path, mask_secrets


def _redact(path: object) -> object:
    """Return a path without secrets, so that error messages do not reveal them."""
    return mask_secrets(path) if isinstance(path, str) else path


#: A path, a URL, or a hub name (owner/name). A hub name has no file suffix.
DatasetPath = Annotated[
    str, BeforeValidator(_redact), mark_path(name=r"\w[\w.-]*/(?!.*\.[A-Za-z]\w+$)[\w.-]+|[a-z][a-z0-9+.-]*://.*")
]
#: Weights of a source. Each weight is keyed by the first step that uses it.
WeightSchedule = Annotated[
    dict[Annotated[str, Field(pattern=r"^\d+$")], Annotated[float, Field(ge=0)]],
    WithJsonSchema({"type": "object", "additionalProperties": {"type": "number", "minimum": 0}}),
    explain("is not a weight schedule", "Write { 1000 = 0.5, 2000 = 0.0 }: step = weight from that step on"),
]
CacheFolder = Annotated[str, Field(min_length=1), mark_path("auto", "none")]
Packing = Annotated[
    bool | Literal["concat"],
    explain("is not a packing mode", 'Write true, false or "concat"'),
]
ScoreFormats = Annotated[
    tuple[Literal["parquet", "zarr"], ...],
    Field(min_length=1),
    BeforeValidator(as_names),
    WithJsonSchema(
        {
            "anyOf": [
                {"enum": ["parquet", "zarr"]},
                {"type": "array", "items": {"enum": ["parquet", "zarr"]}, "minItems": 1},
            ]
        }
    ),
]
#: Format of a row.
RowFormat = Literal[
    "auto", "messages", "sharegpt", "alpaca", "prompt_completion", "text", "tokenized", "preference",
]  # fmt: skip
#: Names of fields. Some of them are other tools' names for the same field.
ColumnName = Literal[
    "messages", "prompt", "completion", "text", "instruction", "input", "output", "system", "history", "tools",
    "images", "conversations", "query", "response",
    "role", "content", "input_ids", "labels", "loss_mask", "attention_mask",
    "chosen", "rejected", "label", "kto_tag", "margin",
]  # fmt: skip
_SOURCE_PATH = (
    "File, glob or folder of .jsonl, .json, .csv, .tsv, .txt, .parquet or .arrow files (text files also with .gz), or "
    "the hub name of a dataset. .parquet, .arrow and the hub need the extra `data`. With streaming also fsspec URLs."
)


class DatasetConfig(Table, json_schema_extra=all_alter("by contents")):
    """``[[data.train]]``: a source of training rows."""

    path: DatasetPath = key(_SOURCE_PATH, min_length=1, examples=["data.jsonl"])
    subset: str | None = key("Subset (configuration) of a hub dataset.", None, min_length=1)
    split: str | None = key(
        'Split of a folder or hub dataset. Default: "train" if there are several.', None, min_length=1
    )
    format: RowFormat = key("Format of the rows. auto detects it for each row from its fields.", "auto")
    columns: dict[ColumnName, str] = key(
        'Name of your column for each field, e.g. { prompt = "question", completion = "answer" }. "doc.body" is the '
        "field body of the object doc. Case is ignored unless a column matches exactly.",
        {},
    )
    json_key: str | None = key(
        'Key of the list of rows in a .json file with one object, e.g. "data.train". Default: the only list in it.',
        None,
        min_length=1,
    )
    max_samples: int | None = key("Maximum number of rows to use, from the start.", None, ge=1)
    weight: float = key(
        "How often an epoch uses each document: 2.5 uses all documents twice, and half of them, chosen by data_seed, a "
        "third time. With data.streaming: share of the rows, relative to the sum of all weights.",
        1.0,
        gt=0,
    )
    weight_from_step: WeightSchedule = key(
        "With data.streaming: new values of weight from the given steps on, e.g. { 1000 = 0.5, 2000 = 0.0 }.",
        {},
    )

    @property
    def column_names(self) -> dict[str, str]:
        """Column name of each field in ``columns``."""
        return {str(field_name): column for field_name, column in self.columns.items()}


def weights_at(sources: Sequence[DatasetConfig], step: int) -> tuple[list[float], int | None]:
    """Return each source's weight at a step, and the next step at which a weight changes, or None."""
    weights, changes = [], []
    for source in sources:
        schedule = sorted((int(start), weight) for start, weight in source.weight_from_step.items())
        weights.append(next((weight for start, weight in reversed(schedule) if start <= step), source.weight))
        changes += [start for start, _ in schedule if start > step]
    return weights, min(changes, default=None)


class EvalSetConfig(DatasetConfig):
    """``[[data.eval]]``: rows used only for evaluation."""

    path: DatasetPath = key(_SOURCE_PATH, min_length=1, examples=["held_out.jsonl"])
    name: str | None = key(
        'Name of the set in metrics, e.g. "held_out". Default: the file name without its suffix.',
        None,
        min_length=1,
    )

    @property
    def display_name(self) -> str:
        """Name of the set in metrics."""
        return self.name or re.sub(r"[*?].*|[.][A-Za-z].*", "", self.path.rstrip("/").rpartition("/")[2]) or "eval"

    def as_source(self, max_samples: int | None = None) -> DatasetConfig:
        """Return this set as a source of training rows, limited to ``max_samples`` rows."""
        values = self.model_dump(exclude={"name"})
        limits = [limit for limit in (self.max_samples, max_samples) if limit is not None]
        return DatasetConfig.model_validate({**values, "max_samples": min(limits, default=None)})


class DataConfig(Table):
    """``[data]``: training rows, loss masks and packing."""

    max_length: int = key("Maximum tokens in a row of a micro-batch.", 1024, ge=2, alters="yes", same_name="TRL")
    packing: Packing = key(
        "true: documents share a row without attending to each other. false: each row has one padded document. "
        '"concat" (pretrain): texts are joined with end-of-text tokens and split into full rows, and attend to the '
        "texts before them. Default: true; false for preferences, image models and models that mix documents of a row.",
        True,
        alters="yes",
        same_name="TRL, LLaMA-Factory",
    )
    train_on: Literal["assistant", "last_assistant", "completion", "all"] = key(
        "Tokens with a loss. assistant: all turns of the assistant; last_assistant: the last one; completion: the "
        "tokens after the prompt, or the last turn of a conversation; all: every token. In plain text, every token has "
        "a loss. Default: assistant (sft), all (pretrain), completion (preferences, the only allowed value).",
        "assistant",
        alters="by contents",
    )
    overlong: Literal["truncate", "drop", "error"] = key(
        "Treatment of conversations longer than max_length. Plain text is always split into pieces.",
        "truncate",
        alters="by contents",
    )
    bad_rows: Literal["drop", "error"] = key(
        "Treatment of rows whose loss mask cannot be verified, rows that the chat template rejects, rows that are not "
        "objects with fields, and empty files. drop: drop them and report the reasons; error: end the run.",
        "drop",
        alters="by contents",
    )
    max_dropped: float = key(
        "Maximum share of a source's rows, tokens or assistant turns that can be dropped or truncated. A run with more "
        "is refused. A share above 0.05 causes a warning. 1: no limit.",
        0.5,
        ge=0,
        le=1,
        alters="by contents",
    )
    streaming: bool = key(
        "Read [[data.train]] during the run, without a first pass or a cache: folders, files, patterns or URLs "
        "(s3://, gs://, hf:// ...) of .jsonl, .jsonl.gz, .jsonl.zst or .parquet shards. Checkpoints store the position "
        "in the data, so that a resumed run is bit-identical. Needs training.max_steps.",
        False,
        alters="by contents",
        same_name="LLaMA-Factory, Axolotl",
    )
    cache_dir: CacheFolder = key(
        "Folder for tokenized data. auto: megatrain-tier/tokens in $XDG_CACHE_HOME or ~/.cache; none: keep it in RAM.",
        "auto",
        alters="no",
    )
    max_cache_size: PlainSize | None = key(
        "Maximum size of cache_dir; the least recently used entries are removed first. Default: no limit.",
        None,
        ge=1,
        alters="no",
    )
    val_size: float | None = key(
        "Rows of [[data.train]] to use for evaluation instead of training, chosen by data_seed. >= 1: their number; "
        "< 1: their share. Cannot be combined with [[data.eval]]. Default: none.",
        None,
        gt=0,
        alters="by contents",
        same_name="LLaMA-Factory",
    )
    train: Listed[DatasetConfig] = key("Sources of training rows.", min_length=1)
    eval: Listed[EvalSetConfig] = key(
        "Sets of rows that are used only for evaluation, at the times set in [evaluation]. Each set has its own loss.",
        (),
    )


class ScoreConfig(Table, json_schema_extra=all_alter("no")):
    """``[score]``: options of ``megatrain-tier score``, which scores each token of [[data.train]]. Runs ignore them."""

    top_k: int = key(
        "Number of most likely tokens to store per position, with their log-probabilities. 0: store only the "
        "log-probabilities of the row's tokens.",
        64,
        ge=0,
    )
    temperature: float = key("Divisor of the logits of the most likely tokens.", 1.0, gt=0)
    embeddings: Literal["none", "mean", "last"] = key(
        "Vector per document: the mean of its last hidden states, or the last hidden state of its last token.", "none"
    )
    formats: ScoreFormats = key("File formats of the scores.", ("parquet",))
