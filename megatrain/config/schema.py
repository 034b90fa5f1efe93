"""The config: one frozen model per TOML table, one field per key, and beside each field all that is known of its key.

Leaf names are those of transformers 5 and TRL 1 where one exists. Every key here does something in this release.
Values are checked one by one here; combinations that cannot work are found in ``megatrain.config.problems``.

To add a key, add a field: ``keys`` makes the JSON Schema of it, from which follow the reference, ``config explain``,
the messages about wrong values, and what is compared when a run is continued.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    GetJsonSchemaHandler,
    PlainSerializer,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import CoreSchema

from megatrain.base.sizes import (
    DURATION_SCHEMA,
    RATE_SCHEMA,
    SIZE_SCHEMA,
    Size,
    exact_duration,
    exact_size,
    parse_interval,
    parse_rate,
)
from tiered.units import GiB, parse_size

T = TypeVar("T")

# What is said of a key. JSON Schema has words for type, bounds, description, examples and default; ours begin with x-.

#: Whether another value changes what a continued run computes. Free ("no") are where bytes live, and what is shown and
#: kept. "by contents" is what a checkpoint brings along: the weights, and the data, whose fingerprint is compared in
#: place of the keys that make it; a run from the start would be another run.
Alters = Literal["yes", "by contents", "no"]
_HF = "transformers, TRL, LLaMA-Factory"
_HF_AXOLOTL = "transformers, TRL, LLaMA-Factory, Axolotl"


def key(
    description: str,
    default: Any = ...,
    *,
    alters: Alters | None = None,
    same_name: str = "",
    used_if: Mapping[str, Sequence[str | bool]] | None = None,
    **words: Any,
) -> Any:
    """Return the pydantic field of a key.

    Args:
        description: one or two sentences for the reference, ``config explain`` and editors.
        default: required without one.
        alters: whether another value changes the results of a continued run. None: as its table says.
        same_name: the tools in which the key has the same name and meaning.
        used_if: another key of its table -> the values beside which this key has an effect.
        words: further arguments of ``pydantic.Field``: bounds, ``examples``, ``default_factory``.
    """
    facts: dict[str, Any] = {"x-alters": alters, "x-same-name": same_name, "x-used-if": used_if}
    if default is not ...:
        words["default"] = default
    return Field(
        description=description, json_schema_extra={word: fact for word, fact in facts.items() if fact}, **words
    )


def _all_alter(alters: Alters) -> dict[str, Any]:
    """Return the JSON Schema words of a table: what holds for its keys, and those of the tables inside it."""
    return {"x-alters": alters}


@dataclass(frozen=True, eq=False)
class _Words:
    """Annotation of a type: further words for its JSON Schema."""

    words: Mapping[str, Any]

    def __get_pydantic_json_schema__(self, schema: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, Any]:
        return {**handler(schema), **self.words}


def _is_not(wrong: str, write: str) -> _Words:
    """Return the message about values of a type: ``KEY = VALUE <wrong>. <write>``."""
    return _Words({"x-wrong": wrong, "x-write": write})


def _path(*words: str, name: str | None = None) -> _Words:
    """Mark text as a path, which is made absolute, unless it is one of ``words`` or a name on the hub.

    Args:
        words: values that are no path.
        name: a regular expression: what matches and is not there as a file is a name on the hub.
    """
    return _Words({"x-path": {"words": words, "name": name}})


# Kinds of values


def _as_tuple(value: object) -> object:
    """Return a list of TOML as a tuple, anything else as it is."""
    return tuple(value) if isinstance(value, list) else value


def _as_path(value: object) -> object:
    return Path(value) if isinstance(value, str) and value else value


def _as_placement(value: object) -> object:
    """Accept "auto", one tier, or several in order of preference."""
    if isinstance(value, str) and value != "auto":
        return (value,)
    return _as_tuple(value)


def _as_source(value: object) -> object:
    """Accept true and false, as other tools write "auto" and "no"."""
    return {True: "auto", False: "no"}[value] if isinstance(value, bool) else value


def _as_reports(value: object) -> object:
    """Accept one name, several, or "none"."""
    names = [value] if isinstance(value, str) else value
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        return _as_tuple(value)
    return tuple(dict.fromkeys(name for name in names if name != "none"))


def _plain_size(value: object) -> object:
    if isinstance(value, str):
        return parse_size(value)
    return Size.parse(value).nbytes  # a bare number: refused with the advice to add a unit


def _prefetch(value: object) -> object:
    """Return "auto", "unlimited" or bytes."""
    if value in ("auto", "unlimited") or (isinstance(value, int) and value == 0 and not isinstance(value, bool)):
        return value
    if isinstance(value, str) and value.strip() == "0":
        return 0
    return _plain_size(value)


TierName = Literal["gpu", "ram", "folder", "nvme"]
_TIER = {"type": "string", "enum": ["gpu", "ram", "folder", "nvme"]}
_REPORTS = ["jsonl", "tensorboard", "wandb"]
AUTO_SIZE = Size("auto")

Listed = Annotated[tuple[T, ...], BeforeValidator(_as_tuple)]
ConfigPath = Annotated[
    Path, BeforeValidator(_as_path), PlainSerializer(str), WithJsonSchema({"type": "string", "minLength": 1}), _path()
]
ModelPath = Annotated[str, _path(name=r"[\w.-]+/[\w.-]+|[\w-]+")]
AdapterPath = Annotated[str, Field(min_length=1), _path()]
TargetModules = Annotated[
    str | Annotated[tuple[str, ...], Field(min_length=1)],
    BeforeValidator(_as_tuple),
    WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}, "minItems": 1}]}),
    _is_not("names no modules", 'Write a list of names: ["q_proj", "v_proj"], "all-linear" or "auto"'),
]
#: owner/name; what ends as files do is a file.
DatasetPath = Annotated[str, _path(name=r"\w[\w.-]*/(?!.*\.[A-Za-z]\w+$)[\w.-]+")]
TemplatePath = Annotated[str, _path("auto")]
CacheFolder = Annotated[str, Field(min_length=1), _path("auto", "none")]
ResumeSource = Annotated[
    str,
    BeforeValidator(_as_source),
    Field(min_length=1),
    WithJsonSchema({"anyOf": [{"type": "string", "minLength": 1}, {"type": "boolean"}]}),
    _path("auto", "no"),
]
PlainSize = Annotated[int, BeforeValidator(_plain_size), PlainSerializer(exact_size), WithJsonSchema(dict(SIZE_SCHEMA))]
Rate = Annotated[
    float,
    BeforeValidator(parse_rate),
    PlainSerializer(lambda rate: exact_size(round(rate)) + "/s"),
    WithJsonSchema(dict(RATE_SCHEMA)),
]
Duration = Annotated[
    float, BeforeValidator(parse_interval), PlainSerializer(exact_duration), WithJsonSchema(dict(DURATION_SCHEMA))
]
Preference = Annotated[
    Literal["auto"] | Annotated[tuple[TierName, ...], Field(min_length=1)],
    BeforeValidator(_as_placement),
    WithJsonSchema({"anyOf": [{"const": "auto"}, _TIER, {"type": "array", "items": _TIER, "minItems": 1}]}),
    _is_not("is not a placement", 'Write "auto" or tiers in order of preference: ["ram", "nvme"]'),
]
PrefetchSize = Annotated[
    Literal["auto", "unlimited"] | Annotated[int, Field(ge=0)],
    BeforeValidator(_prefetch),
    PlainSerializer(lambda value: value if isinstance(value, str) else exact_size(value) if value else "0"),
    WithJsonSchema({"anyOf": [{"enum": ["auto", "unlimited", "0", 0]}, SIZE_SCHEMA]}),
]
GraphCount = Annotated[
    Literal["auto"] | Annotated[int, Field(ge=0)],
    _is_not("is no number of layers", 'Write a whole number at least 0, or "auto"'),
]
ThreadCount = Annotated[
    Literal["auto"] | Annotated[int, Field(ge=1)],
    _is_not("is no number of threads", 'Write a whole number at least 1, or "auto"'),
]
LaneCount = Annotated[
    Literal["auto"] | Annotated[int, Field(ge=1, le=1024)],
    _is_not("is no number of lanes", 'Write a whole number from 1 to 1024, or "auto"'),
]
#: Of which checkpoints there are whole copies: all or none, each so many-th, or the last of a run.
CopyRule = Annotated[
    bool | Annotated[int, Field(ge=1)] | Literal["last"],
    _is_not("is no rule for copies", 'Write true (every checkpoint), 5 (every fifth one), "last" or false'),
]
Packing = Annotated[
    bool | Literal["concat"],
    _is_not("is no way to pack", 'Write true, false or "concat"'),
]
ScoreFormats = Annotated[
    tuple[Literal["parquet", "zarr"], ...],
    Field(min_length=1),
    BeforeValidator(_as_reports),
    WithJsonSchema(
        {
            "anyOf": [
                {"enum": ["parquet", "zarr"]},
                {"type": "array", "items": {"enum": ["parquet", "zarr"]}, "minItems": 1},
            ]
        }
    ),
]
NoRemoteCode = Annotated[
    Literal[False], _is_not("is not possible: code in a model folder is never run here", "Leave the key out")
]
ReportTargets = Annotated[
    tuple[Literal["jsonl", "tensorboard", "wandb", "mlflow", "swanlab", "trackio", "comet_ml"], ...],
    BeforeValidator(_as_reports),
    WithJsonSchema({"anyOf": [{"enum": [*_REPORTS, "none"]}, {"type": "array", "items": {"enum": _REPORTS}}]}),
]
#: What a row may hold.
RowFormat = Literal["auto", "messages", "sharegpt", "alpaca", "prompt_completion", "text", "tokenized", "preference"]
#: Our names of fields; the second line are names that other tools use for some of the first.
ColumnName = Literal[
    "messages", "prompt", "completion", "text", "instruction", "input", "output", "system", "history", "tools",
    "images", "conversations", "query", "response",
    "role", "content", "input_ids", "labels", "loss_mask", "attention_mask",
    "chosen", "rejected", "label", "kto_tag",
]  # fmt: skip


# The tables


class Table(BaseModel):
    """Base of every table: immutable, unknown keys refused, no silent conversion of types."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class ModelConfig(Table):
    """``[model]``: what is trained."""

    model_name_or_path: ModelPath = key(
        "Hugging Face folder with config.json and safetensors, or the id of a model on the hub.",
        min_length=1,
        examples=["path/to/model"],
        alters="by contents",
        same_name="TRL, LLaMA-Factory",
    )
    revision: str | None = key(
        "Of a model on the hub: branch, tag or commit. A run names the commit in its checkpoints.",
        None,
        min_length=1,
        examples=["main"],
        alters="by contents",
        same_name="transformers",
    )
    tokenizer_name_or_path: ModelPath | None = key(
        "Folder of the tokenizer, or its name on the hub. Default: the model's.", None, alters="by contents"
    )
    chat_template: TemplatePath = key(
        '"auto" (the tokenizer\'s) or the path of a .jinja file.', "auto", alters="by contents"
    )
    attn_implementation: Literal["auto", "sdpa", "eager", "flash_attention_2"] = key(
        "Attention kernel; auto: sdpa where the model supports it, else eager.",
        "auto",
        alters="yes",
        same_name="transformers, TRL, Axolotl, MegaTrain",
    )
    compile: bool = key(
        "torch.compile of the layers, once per kind of layer. Other roundings than without; minutes at the "
        "first step, and a C++ compiler or Triton.",
        False,
        alters="yes",
    )
    compile_backend: Literal["inductor", "aot_eager", "eager"] = key(
        "compile: inductor makes kernels; the others are for finding faults.",
        "inductor",
        alters="yes",
        used_if={"compile": [True]},
    )
    use_liger_kernel: bool = key(
        "Norms and gated MLPs computed by the package liger-kernel, where it has kernels "
        "for the model; needs a GPU. Other roundings than without.",
        False,
        alters="yes",
        same_name="transformers, TRL",
    )
    mlp_rows: int = key(
        "Run the MLPs of layers over so many tokens at a time and once more in the backward, for long "
        "sequences: memory inside them is that of a piece. Weights' gradients are summed in another order. 0: off.",
        0,
        ge=0,
        alters="yes",
    )
    split_experts: bool = key(
        "Stream the fused experts of a mixture's layers some at a time, where all of a layer are larger than a part "
        "(16 Mi numbers): the least memory is then a part's, and experts that no token goes to stay where they are. "
        "Their results are summed in fp32: other roundings than without.",
        False,
        alters="yes",
    )
    trust_remote_code: NoRemoteCode = key("Code in a model folder is never run.", False, alters="no")
    train_from_scratch: bool = key("Start from random weights; only config.json is read.", False, alters="by contents")
    freeze: Listed[str] = key(
        'Globs of parameter names that stay as they are, e.g. ["model.embed_tokens.*"].', (), alters="yes"
    )
    images: Literal["off", "frozen", "trained"] = key(
        "Whether rows may have images, prepared by the processor in the model's folder. frozen: what reads them, "
        "vision tower and projector, is streamed and stays as it is; trained: it is trained with the rest, as far as "
        "freeze leaves it. off: rows with images are left out, and what reads them is not loaded.",
        "off",
        alters="yes",
    )


class LoraConfig(Table, json_schema_extra=_all_alter("yes")):
    """``[lora]``: small adapters that are trained in place of the model, with peft's names and files."""

    r: int = key(
        "Rank of the adapters, e.g. 16; QLoRA over a quantized folder. 0: none, and the model itself is trained.",
        0,
        ge=0,
    )
    lora_alpha: float = key("Adapters are scaled by lora_alpha / r.", 8.0, gt=0)
    lora_dropout: float = key("Share of an adapter's inputs that is dropped.", 0.0, ge=0, lt=1)
    target_modules: TargetModules = key(
        'Modules with adapters: names or their ends, e.g. ["q_proj", "v_proj"]; "all-linear"; a regular expression of '
        "whole names. auto: those that peft chooses for this kind of model.",
        "auto",
    )
    target_parameters: Listed[str] = key(
        "Parameters with adapters that are no module's weight, such as those of fused experts: "
        '["mlp.experts.gate_up_proj"]. Not with lora_dropout.',
        (),
    )
    exclude_modules: Listed[str] = key("Modules among target_modules that get no adapter.", ())
    modules_to_save: Listed[str] = key(
        'Modules that are trained as a whole beside the adapters, and saved with them, e.g. ["lm_head"].', ()
    )
    layers_to_transform: Listed[int] = key("Numbers of the layers that get adapters. Default: all.", ())
    rank_pattern: dict[str, Annotated[int, Field(ge=1)]] = key("Name of a module -> its own r.", {})
    alpha_pattern: dict[str, Annotated[float, Field(gt=0)]] = key("Name of a module -> its own lora_alpha.", {})
    use_rslora: bool = key("Scale by lora_alpha / sqrt(r).", False)
    use_dora: bool = key("DoRA: magnitudes of the rows of each weight are trained as well.", False)
    init_lora_weights: Literal["gaussian"] | bool = key("true: Kaiming's rule for A, zeros for B.", True)
    adapter_name_or_path: AdapterPath | None = key(
        "Folder of an adapter, as peft or an earlier run wrote it, that training starts from. Its settings hold; only "
        "lora_dropout is taken from here. Default: a new one.",
        None,
        alters="by contents",
        same_name="LLaMA-Factory",
    )

    @property
    def is_on(self) -> bool:
        """Whether adapters are trained."""
        return self.r > 0 or self.adapter_name_or_path is not None


class PrecisionConfig(Table, json_schema_extra=_all_alter("yes")):
    """``[precision]``: number formats."""

    compute_dtype: Literal["auto", "float32", "bfloat16"] = key(
        "What layers multiply; auto: bfloat16 with CUDA, float32 on the CPU.", "auto"
    )
    grad_dtype: Literal["float32", "bfloat16"] = key(
        "What gradients are kept in until the update. They are summed in float32 either way; bfloat16 "
        "halves their bytes and rounds each sum once, to 8 bits of mantissa.",
        "float32",
    )


_SOURCE_PATH = (
    "File, glob or folder of .jsonl, .json, .csv, .tsv, .txt, .parquet or .arrow files (text files also with .gz), or "
    "the hub name of a dataset (the last three need the data extra)."
)


class DatasetConfig(Table, json_schema_extra=_all_alter("by contents")):
    """``[[data.train]]``: one source of training rows."""

    path: DatasetPath = key(_SOURCE_PATH, min_length=1, examples=["data.jsonl"])
    subset: str | None = key("Hub datasets: which subset (configuration).", None, min_length=1)
    split: str | None = key(
        'Folders and hub datasets: which split. Default: "train" where there are several.', None, min_length=1
    )
    format: RowFormat = key("What a row holds; auto: seen from its fields, row by row.", "auto")
    columns: dict[ColumnName, str] = key(
        'Our field -> your column, e.g. { prompt = "question", completion = "answer" }; "doc.body" is the field body '
        "of the object doc. Capitals do not count where no column has the very name.",
        {},
    )
    json_key: str | None = key(
        'A .json file that is one object: the key of its list of rows, e.g. "data" or "data.train". Default: the only '
        "list of rows in it.",
        None,
        min_length=1,
    )
    max_samples: int | None = key("Use at most this many rows, from the start.", None, ge=1)
    weight: float = key(
        "How often its documents are used in an epoch: 2.5 is twice each, and half of them a third time; "
        "0.3 is three in ten. data_seed chooses which.",
        1.0,
        gt=0,
    )


class EvalSetConfig(DatasetConfig):
    """``[[data.eval]]``: rows that are only evaluated on."""

    path: DatasetPath = key(_SOURCE_PATH, min_length=1, examples=["held_out.jsonl"])
    name: str | None = key(
        'What metrics call it, e.g. "held_out". Default: the last part of the path, without its ending.',
        None,
        min_length=1,
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

    max_length: int = key("Tokens in a row of a micro-batch.", 1024, ge=2, alters="yes", same_name="TRL")
    packing: Packing = key(
        'true: several documents share a row and never attend to each other. "concat" (pretrain): texts '
        "are joined, end of text between them, and cut to full rows, in which what follows attends to what is before. "
        "false: one document a row, padded. Default: true, but false where the model would mix documents of a row, and "
        "with dpo.",
        True,
        alters="yes",
        same_name="TRL, LLaMA-Factory",
    )
    train_on: Literal["assistant", "last_assistant", "completion", "all"] = key(
        "assistant: all of the assistant's turns; last_assistant: only the last one; completion: what "
        "follows the prompt, in a conversation the last turn; all: every token. Plain text is always trained on "
        "whole. Default: assistant (sft), all (pretrain), completion (dpo, which knows no other).",
        "assistant",
        alters="by contents",
    )
    overlong: Literal["truncate", "drop", "error"] = key(
        "What happens to conversations longer than max_length. Plain text is cut into pieces.",
        "truncate",
        alters="by contents",
    )
    bad_rows: Literal["drop", "error"] = key(
        "What happens to rows whose loss mask cannot be proven, that the chat template refuses, or that are no objects "
        "with fields, and to empty files among others: drop leaves them out, counted and explained; error ends the run "
        "at the first.",
        "drop",
        alters="by contents",
    )
    max_dropped: float = key(
        "Largest share of the rows, or of the tokens, of a source that may be dropped or cut; with more a "
        "run is refused. Above 0.05 there is a warning. 1: no limit.",
        0.5,
        ge=0,
        le=1,
        alters="by contents",
    )
    cache_dir: CacheFolder = key(
        "Folder of tokenized data, found again by its contents. auto: $XDG_CACHE_HOME/megatrain-tier/"
        "tokens, else below ~/.cache; none: tokens are kept in RAM.",
        "auto",
        alters="no",
    )
    max_cache_size: PlainSize | None = key(
        "Largest size of that folder; what was used longest ago is removed. Default: no limit.", None, ge=1, alters="no"
    )
    val_size: float | None = key(
        "Rows of [[data.train]] that are kept from training and evaluated on instead, chosen by data_seed. "
        ">= 1: so many. < 1: that share of them. Not together with [[data.eval]]. Default: none.",
        None,
        gt=0,
        alters="by contents",
        same_name="LLaMA-Factory",
    )
    train: Listed[DatasetConfig] = key("The sources of training rows.", min_length=1)
    eval: Listed[EvalSetConfig] = key(
        "Rows that are only evaluated on: one loss for each table, as [evaluation] says.", ()
    )


class TrainingConfig(Table):
    """``[training]``: size of a step and length of the run."""

    train_batch_tokens: int | None = key(
        "Tokens per optimizer step, a multiple of data.max_length. Instead of the next two: a micro-batch then has as "
        "many rows as divide a step, up to 8,192 tokens on a GPU and 2,048 on a CPU, with a micro-batch for each of "
        "gradient_lanes where there are so many rows.",
        None,
        ge=2,
        alters="yes",
    )
    per_device_train_batch_size: int = key(
        "Rows per micro-batch; with dpo examples, of two rows each.", 8, ge=1, alters="yes", same_name=_HF
    )
    gradient_accumulation_steps: int = key("Micro-batches per optimizer step.", 1, ge=1, alters="yes", same_name=_HF)
    gradient_lanes: LaneCount = key(
        "The micro-batches of a step are cut into so many lanes: each is summed in order, and the lanes are added in a "
        "fixed tree, so that any number of processes up to this one computes the same bits. auto: the number of "
        "processes at the first start, which the checkpoints keep. 1: one sum in order, as in plain PyTorch.",
        "auto",
        alters="yes",
    )
    num_train_epochs: float = key("Passes over the data.", 1.0, gt=0, alters="yes", same_name=_HF)
    max_steps: int = key(
        "Optimizer steps; overrides num_train_epochs. -1: not set.", -1, ge=-1, alters="yes", same_name=_HF
    )
    label_smoothing_factor: float = key(
        "Share of every target that is spread evenly over the vocabulary. Evaluations do not smooth.",
        0.0,
        ge=0,
        lt=1,
        alters="yes",
        same_name=_HF,
    )
    z_loss: float = key(
        "z-loss: this times the square of the log of the sum of the logits' exponentials is added to each token's "
        "loss, which keeps logits from drifting; PaLM used 1e-4. 0: none. Evaluations have none.",
        0.0,
        ge=0,
        alters="yes",
    )
    neftune_noise_alpha: float = key(
        "NEFTune: uniform noise on the input embeddings, of at most this / sqrt(tokens in a row x width). 0: none.",
        0.0,
        ge=0,
        alters="yes",
        same_name=_HF,
    )


class PreferenceConfig(Table, json_schema_extra=_all_alter("yes")):
    """``[preference]``: the loss of task = "dpo"."""

    loss_type: Literal["sigmoid", "hinge", "ipo", "robust", "kto", "cpo", "orpo", "simpo"] = key(
        "sigmoid (DPO), hinge, ipo and robust compare a chosen and a rejected answer, and the model with the one that "
        "the run starts from; kto judges single answers against it; cpo, orpo and simpo compare two answers without "
        "it.",
        "sigmoid",
        same_name="TRL",
    )
    beta: float = key(
        "How closely the model is kept to the one that the run starts from; of orpo the weight of the odds ratio.",
        0.1,
        gt=0,
        same_name="TRL",
    )
    label_smoothing: float = key(
        "Probability that chosen and rejected were mistaken for each other.",
        0.0,
        ge=0,
        lt=0.5,
        same_name="TRL",
        used_if={"loss_type": ["sigmoid", "robust", "cpo", "simpo"]},
    )
    simpo_gamma: float = key(
        "simpo: by how much the chosen answer should win.",
        0.5,
        ge=0,
        same_name="TRL, LLaMA-Factory",
        used_if={"loss_type": ["simpo"]},
    )
    rpo_alpha: float = key(
        "Weight of the chosen answers' negative log-likelihood, which is added to the loss. orpo adds it once anyway. "
        "Default: 1 with cpo, else 0.",
        0.0,
        ge=0,
        same_name="TRL, Axolotl",
        used_if={"loss_type": ["sigmoid", "hinge", "ipo", "robust", "cpo", "orpo", "simpo"]},
    )
    desirable_weight: float = key(
        "kto: weight of good answers.", 1.0, ge=0, same_name="TRL", used_if={"loss_type": ["kto"]}
    )
    undesirable_weight: float = key(
        "kto: weight of bad answers.", 1.0, ge=0, same_name="TRL", used_if={"loss_type": ["kto"]}
    )

    @model_validator(mode="before")
    @classmethod
    def _fill_likelihood(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("loss_type") == "cpo":
            return {"rpo_alpha": 1.0, **values}
        return values


class ParameterGroupConfig(Table):
    """``[[optimizer.groups]]``: settings for some of the parameters."""

    params: Listed[str] = key(
        "Globs of parameter names. Of the groups that match a parameter the first one counts.",
        min_length=1,
        examples=[["*norm*"]],
    )
    learning_rate: float | None = key("Peak learning rate, on the same schedule. Not set: the optimizer's.", None, gt=0)
    lr_mult: float | None = key("Factor on the optimizer's learning rate, instead of a rate of their own.", None, gt=0)
    weight_decay: float | None = key("For those of them that decay. Not set: the optimizer's.", None, ge=0)


class OptimizerConfig(Table, json_schema_extra=_all_alter("yes")):
    """``[optimizer]``: the update and its schedule."""

    optim: Literal["adamw", "lion", "sgd", "adafactor", "muon", "custom"] = key(
        "State beside the 4 bytes of a parameter: adamw 8 bytes, lion and sgd 4, adafactor almost none; muon 4 for "
        "matrices, and adamw with 8 for embeddings, heads, norms and biases. custom: one of an installed package.",
        "adamw",
        same_name=_HF,
    )
    state_dtype: Literal["float32", "bfloat16", "int8"] = key(
        "Format of the moments, of which adamw has two and lion and sgd one: 4, 2 or 1.02 bytes of each per parameter. "
        "bfloat16 is rounded up or down at random, by seed, step and element. int8 is in blocks of 256 elements with a "
        "scale, in the code of bitsandbytes. Masters stay in fp32.",
        "float32",
        used_if={"optim": ["adamw", "lion", "sgd"]},
    )
    ema_decay: float = key(
        "Decay of an exponential moving average of the fp32 weights, e.g. 0.999; 4 bytes more per parameter. It begins "
        "as the weights do, and moves with every update; `export --ema` writes it. 0: none.",
        0.0,
        ge=0,
        lt=1,
    )
    learning_rate: float = key("Peak learning rate.", 1e-5, gt=0, same_name=_HF_AXOLOTL)
    weight_decay: float = key(
        "Decay per step, times the learning rate; with sgd added to the gradient, as in torch.",
        0.1,
        ge=0,
        same_name=_HF_AXOLOTL,
    )
    weight_decay_exclude: Listed[str] = key(
        "Globs of parameter names that do not decay. Vectors (norms, biases, magnitudes of DoRA, attention sinks) do "
        "not either, whatever their names, unless the list is empty: then every trained parameter decays.",
        ("*bias*", "*norm*", "*embed*"),
    )
    adam_beta1: float = key(
        "adamw: decay of the first moment. lion: its weight in the direction.",
        0.9,
        ge=0,
        lt=1,
        same_name=_HF_AXOLOTL,
        used_if={"optim": ["adamw", "lion", "muon"]},
    )
    adam_beta2: float = key(
        "adamw: decay of the second moment. lion: of its moment, 0.99 by default.",
        0.95,
        ge=0,
        lt=1,
        same_name=_HF_AXOLOTL,
        used_if={"optim": ["adamw", "lion", "muon"]},
    )
    adam_epsilon: float = key(
        "adamw: added to the denominator.", 1e-8, gt=0, same_name=_HF_AXOLOTL, used_if={"optim": ["adamw", "muon"]}
    )
    sgd_momentum: float = key("sgd: decay of the moment. 0: no state.", 0.9, ge=0, lt=1, used_if={"optim": ["sgd"]})
    sgd_nesterov: bool = key("sgd: look one step of momentum ahead.", False, used_if={"optim": ["sgd"]})
    muon_momentum: float = key("muon: decay of the moment.", 0.95, ge=0, lt=1, used_if={"optim": ["muon"]})
    muon_nesterov: bool = key("muon: look one step of momentum ahead.", True, used_if={"optim": ["muon"]})
    muon_ns_steps: int = key("muon: steps of the Newton-Schulz iteration.", 5, ge=1, le=99, used_if={"optim": ["muon"]})
    muon_adjust_lr: Literal["original", "match_rms_adamw"] = key(
        "muon: factor on the learning rate of a matrix. match_rms_adamw: 0.2 x sqrt(max(rows, columns)), so that one "
        "rate serves matrices and what adamw updates. original: sqrt(max(1, rows / columns)); give what adamw updates "
        "a rate of its own by groups.",
        "match_rms_adamw",
        used_if={"optim": ["muon"]},
    )
    muon_exclude: Listed[str] = key(
        "muon: globs of matrices that adamw updates, beside embeddings and heads.", (), used_if={"optim": ["muon"]}
    )
    custom_optimizer: str = key(
        "custom: name under which an installed package has its optimizer (group megatrain.optimizers).",
        "",
        used_if={"optim": ["custom"]},
    )
    optim_args: dict[str, int | float | bool | str] = key(
        "custom: arguments of that optimizer, e.g. { momentum = 0.95 }.", {}, used_if={"optim": ["custom"]}
    )
    max_grad_norm: float = key(
        "Gradients are scaled to at most this norm. 0: no clipping.", 1.0, ge=0, same_name=_HF_AXOLOTL
    )
    clip_scope: Literal["global", "layer"] = key(
        "Whose norm max_grad_norm limits, and whose update nonfinite stops or skips. global: that of all gradients, "
        "which are held until it is known. layer: each layer's own, which is not the global norm; a layer is updated "
        "during the backward, and only a layer's gradient is held.",
        "global",
    )
    nonfinite: Literal["stop", "skip", "ignore"] = key(
        "A NaN or infinite gradient: stop ends the run, skip leaves that update out, ignore does not look. With "
        "max_grad_norm = 0, stop and ignore let a layer be updated during the backward.",
        "stop",
    )
    lr_scheduler_type: str = key("Name of a schedule of transformers, e.g. cosine, linear.", "cosine", same_name=_HF)
    lr_scheduler_kwargs: dict[str, int | float | str] = key(
        "Extra arguments of the schedule, e.g. { min_lr_rate = 0.1 }.", {}, same_name=_HF
    )
    warmup_steps: float = key(">= 1: steps. < 1: fraction of all steps.", 0.03, ge=0, same_name=_HF_AXOLOTL)
    layer_decay: float = key(
        "Factor on the learning rate for each layer between a parameter and the head, as in timm: what follows the "
        "last layer has the whole rate, the last layer this share of it, the one before its square, embeddings the "
        "least.",
        1.0,
        gt=0,
        le=1,
    )
    groups: Listed[ParameterGroupConfig] = key("Parameters with another learning rate or weight decay.", ())

    @model_validator(mode="before")
    @classmethod
    def _fill_default_of_lion(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("optim") == "lion":
            return {"adam_beta2": 0.99, **values}
        return values


class ScoreConfig(Table, json_schema_extra=_all_alter("no")):
    """``[score]``: what ``megatrain-tier score`` writes of each token of [[data.train]]; runs ignore it."""

    top_k: int = key(
        "Likeliest words of each token, with their log-probabilities. 0: only those of the tokens themselves.", 64, ge=0
    )
    temperature: float = key("Logits are divided by it for the likeliest words.", 1.0, gt=0)
    embeddings: Literal["none", "mean", "last"] = key(
        "A vector for each document, of the last hidden states: their mean over its tokens, or that of its last token.",
        "none",
    )
    formats: ScoreFormats = key("Forms that scores are written in.", ("parquet",))


class DistillConfig(Table, json_schema_extra=_all_alter("yes")):
    """``[distill]``: with ``task = "distill"``, the scores of a teacher and the loss against them."""

    scores: ConfigPath | None = key(
        "Folder of scores that `megatrain-tier score` wrote for the rows of [[data.train]].", None, alters="by contents"
    )
    top_k: int | None = key(
        "Use so many of the likeliest words, at most those that the scores have. Default: all of them.", None, ge=1
    )
    temperature: float = key("As in the [score] that made them; the student's logits are divided by it.", 1.0, gt=0)
    alpha: float = key(
        "Share of the cross entropy with the labels: alpha * it + (1 - alpha) * temperature**2 * the divergence.",
        0.0,
        ge=0,
        lt=1,
    )
    rest: Literal["bucket", "ignore", "renormalize"] = key(
        "What becomes of the probability of all other words. bucket: they are one outcome, with teacher and student; "
        "ignore: they have no term; renormalize: the likeliest words are scaled to a sum of 1.",
        "bucket",
    )


class EvaluationConfig(Table, json_schema_extra=_all_alter("no")):
    """``[evaluation]``: when ``[[data.eval]]``, or what ``data.val_size`` kept, is evaluated, and how much of it."""

    eval_strategy: Literal["no", "steps", "epoch"] = key(
        "When to evaluate. Unless no, also at the end. Default: steps where there is a [[data.eval]] or a "
        "data.val_size, else no.",
        "no",
        same_name=_HF,
    )
    eval_steps: int = key(
        "steps: optimizer steps between two evaluations.",
        100,
        ge=1,
        same_name=_HF,
        used_if={"eval_strategy": ["steps"]},
    )
    eval_on_start: bool = key("Also before the first step.", False, same_name=_HF)
    eval_max_samples: int | None = key("Use at most this many rows of each set, from the start.", None, ge=1)
    per_device_eval_batch_size: int | None = key(
        "Rows per micro-batch, at most those of a training micro-batch, whose memory is planned. Default: the same.",
        None,
        ge=1,
        same_name=_HF,
    )
    weights: Literal["trained", "average", "both"] = key(
        "Which weights are evaluated, and write samples: as they are trained, or their average (optimizer.ema_decay). "
        "both: an evaluation of the average has _average behind the name of its set. The best checkpoint and early "
        "stopping follow what metric_for_best_model names; load_best_model_at_end exports the average where that is "
        "of it.",
        "trained",
    )
    predict_with_generate: bool = key(
        "At every evaluation also continue the first rows of each set, by the likeliest tokens, from where their "
        "trained part begins; of rows that are trained as a whole, from their middle. Shown in the log, in "
        "metrics.jsonl and in the report.",
        False,
        same_name="transformers, LLaMA-Factory",
    )
    max_predict_samples: int = key(
        "How many rows of each set.",
        4,
        ge=1,
        used_if={"predict_with_generate": [True]},
    )
    max_new_tokens: int = key(
        "New tokens of each, at most.",
        64,
        ge=1,
        same_name="LLaMA-Factory",
        used_if={"predict_with_generate": [True]},
    )
    metric_for_best_model: str = key(
        'Which figure of an evaluation says how good the model is: "loss", or "NAME_loss" where there are several '
        'sets; of preferences "rewards/accuracies" and the others too.',
        "loss",
        same_name=_HF,
    )
    greater_is_better: bool | None = key(
        "Whether more of it is better. Default: not of a loss or a perplexity.", None, same_name=_HF
    )
    early_stopping_patience: int = key(
        "End the run after so many evaluations in a row that were not better than the best one by more than "
        "early_stopping_threshold. 0: never.",
        0,
        ge=0,
        same_name=_HF_AXOLOTL,
    )
    early_stopping_threshold: float = key("What an improvement has to exceed.", 0.0, ge=0, same_name=_HF)


class CheckpointConfig(Table, json_schema_extra=_all_alter("no")):
    """``[checkpoint]``: when the run is saved, how often that is kept, and what a run starts from."""

    save_strategy: Literal["steps", "time", "epoch", "no"] = key(
        "When to save. Unless no, also at the end. Default: time where save_interval is given, else steps.",
        "steps",
        same_name=_HF_AXOLOTL,
    )
    save_steps: int = key(
        "steps: optimizer steps between two saves.",
        200,
        ge=1,
        same_name=_HF_AXOLOTL,
        used_if={"save_strategy": ["steps"]},
    )
    save_interval: Duration | None = key(
        'time: between two saves, e.g. "45min".', None, used_if={"save_strategy": ["time"]}
    )
    save_total_limit: int = key("Checkpoints that are kept, the newest ones.", 2, ge=1, same_name=_HF_AXOLOTL)
    load_best_model_at_end: bool = key(
        "Save after each evaluation that is the best so far, keep that checkpoint beside the newest ones, and write it "
        "to output_dir/final in place of the last one.",
        False,
        same_name=_HF,
    )
    save_copy: CopyRule = key(
        "Whole copies in output_dir/copies, made while training goes on, from which a run continues if a "
        'drive of [[tiers.nvme]] is lost. true: of every checkpoint; 5: of every fifth; "last": only of the one at the '
        "end or at a stop, which all but false copy. save_total_limit of them are kept.",
        False,
    )
    save_on_signal: bool = key(
        "SIGTERM, SIGINT and SIGHUP: finish the step, save, exit with 75. false: end at once.", True
    )
    resume_from_checkpoint: ResumeSource = key(
        '"auto": continue the run in output_dir if there is one; "no": start at the beginning, '
        "refused where output_dir holds checkpoints; or the output_dir of another run, to start from its newest one.",
        "auto",
        same_name=_HF_AXOLOTL,
    )
    async_save: bool = key("Training goes on while a checkpoint is written.", True)
    min_free_disk: PlainSize = key("Space that a save leaves free on its drive.", GiB, ge=0)

    @model_validator(mode="before")
    @classmethod
    def _fill_strategy(cls, values: Any) -> Any:
        if isinstance(values, dict) and "save_interval" in values:
            return {"save_strategy": "time", **values}
        return values

    @property
    def copy_every(self) -> int | None:
        """Saves from one copy to the next; None: none is copied, or only the last."""
        if isinstance(self.save_copy, bool):
            return 1 if self.save_copy else None
        return self.save_copy if isinstance(self.save_copy, int) else None

    @property
    def is_on(self) -> bool:
        """Whether this run may save at all."""
        return self.save_strategy != "no" or self.save_on_signal


class ExportConfig(Table, json_schema_extra=_all_alter("no")):
    """``[export]``: the Hugging Face folder written at the end."""

    format: Literal["safetensors"] = key("Config, tokenizer, shards and index.", "safetensors")
    dtype: Literal["auto", "float32", "bfloat16"] = key("auto: the compute dtype.", "auto")
    max_shard_size: PlainSize = key('Largest file, e.g. "5GB".', 5 * 10**9, ge=1)
    merge: bool = key("[lora]: write the model with its adapters added; false: the adapters alone.", False)


class LoggingConfig(Table, json_schema_extra=_all_alter("no")):
    """``[logging]``: what is shown and kept."""

    logging_steps: int = key("Steps between two lines.", 1, ge=1, same_name=_HF)
    report_to: ReportTargets = key(
        "Where figures go: jsonl, output_dir/metrics.jsonl; tensorboard, output_dir/tensorboard; or a service: wandb, "
        "mlflow, swanlab, trackio or comet_ml. "
        'All but jsonl need the extra of that name. "none": nowhere.',
        ("jsonl",),
        same_name=_HF,
    )
    project: str = key("Project, or experiment, of the run at a service.", "megatrain-tier", min_length=1)
    progress: Literal["auto", "bar", "plain", "json", "none"] = key(
        "auto: a bar on a terminal, else plain lines.", "auto"
    )


class GpuTierConfig(Table):
    """``[tiers.gpu]``: what fits best there has its home in GPU memory, the rest passes through."""

    size: Size = key('GPU memory this run may use: "22GiB", "90%" or "auto".', AUTO_SIZE)


class RamTierConfig(Table):
    """``[tiers.ram]``."""

    size: Size = key('RAM for blocks: "110GiB", "90%" or "auto" (measured, cgroup-aware).', AUTO_SIZE)
    pinned: Size = key("How much of it is pinned; auto: all, where CUDA exists.", AUTO_SIZE)


class NvmeTierConfig(Table):
    """``[[tiers.nvme]]``: one folder on a drive. Several tables are striped."""

    path: ConfigPath = key(
        "Folder for training state on this drive, made when missing. Parts of checkpoints lie there too: "
        "deleting it destroys them.",
        examples=["state"],
    )
    size: Size = key('Space it may take: "300GiB", "50%" or "auto" (of what is free).', AUTO_SIZE)
    mount_point: ConfigPath | None = key(
        'Folder where the drive of this path is mounted, e.g. "/mnt/nvme0": a run is refused while it is '
        "not, so that blocks never fill another drive. Default: not looked at.",
        None,
    )
    rate: Rate | None = key(
        'Relative weight when striped, e.g. "2.0GB/s". Default: as doctor measured it, else equal.', None
    )
    max_written: PlainSize | None = key(
        'Stop before all runs together write more than this there, e.g. "200TB". Default: no limit.', None, ge=1
    )


class TiersConfig(Table, json_schema_extra=_all_alter("no")):
    """``[tiers]``: what this run may use."""

    safety_margin: Size = key(
        'Kept free where a size is "auto"; of GPU memory at least 1 GiB, or a tenth, for libraries.',
        Size("5%", fraction=0.05),
    )
    engine: Literal["posix", "auto", "kvikio"] = key(
        "How files are read and written. auto: kvikio where GPUDirect Storage works, else posix.", "posix"
    )
    direct: Literal["auto", "off", "on"] = key(
        "Blocks go between drives and GPU memory without passing RAM. auto: where kvikio's probe shows "
        'that GPUDirect Storage does it, and verify is not "always"; on: an error where it does not.',
        "auto",
    )
    verify: Literal["resume", "always", "off"] = key(
        "When files are compared with the checksums taken as they were written. resume: when a generation "
        "is opened; always: at every read, too; off: no checksums in a step.",
        "resume",
    )
    on_disk_full: Literal["pause", "error"] = key(
        "A drive that is full during the run: pause until there is room, or end the run.", "pause"
    )
    allow_tmpfs: bool = key(
        "Accept a [[tiers.nvme]] path on tmpfs, which is RAM: for tests. Checkpoints there are gone after a restart.",
        False,
    )
    gpu: GpuTierConfig = key("GPU memory.", default_factory=GpuTierConfig)
    ram: RamTierConfig = key("Host memory.", default_factory=RamTierConfig)
    nvme: Listed[NvmeTierConfig] = key("Folders on drives; none: nothing is kept in files.", ())


class PlacementConfig(Table, json_schema_extra=_all_alter("no")):
    """``[placement]``: "auto", or tiers in order of preference, per kind of bytes."""

    weights: Preference = key(
        "Parameters in the compute dtype. Frozen ones may stay in the model's folder and be read from there each time: "
        '"folder"; with auto all those do that have no room in RAM.',
        "auto",
    )
    gradients: Preference = key("Gradient sums.", "auto")
    optimizer: Preference = key("Optimizer state, and the low halves of bf16 parameters.", "auto")
    activations: Preference = key("Inputs of layers, kept for the recompute.", "auto")


class ProfileConfig(Table, json_schema_extra=_all_alter("no")):
    """``[profile]``: timelines."""

    trace_steps: Listed[Annotated[int, Field(ge=1)]] = key(
        "Steps, from 1, whose timeline is written to output_dir/trace.json, for Perfetto.", ()
    )


class DistributedConfig(Table, json_schema_extra=_all_alter("no")):
    """Several processes on one run, each with its share of every block."""

    processes: int = key(
        "Processes (ranks) of the run on this machine, one for each GPU. torchrun and srun start them themselves.",
        1,
        ge=1,
    )
    threads: ThreadCount = key(
        "Threads of each process for what torch computes on the CPU; auto: its part of the cores. On a CPU another "
        "number gives other last bits.",
        "auto",
        alters="yes",
    )
    numa: Literal["auto", "off"] = key(
        "auto: each process computes on cores of its own, near its GPU. off: where the system puts it.", "auto"
    )
    timeout: Duration = key(
        "A process that has not been heard of for so long is taken for dead, and ends the run.",
        10.0,
    )


class AdvancedConfig(Table, json_schema_extra=_all_alter("no")):
    """``[advanced]``: for measurements. The results do not depend on any of these."""

    prefetch: PrefetchSize = key('Bytes fetched ahead: "auto", "0", "2GiB" or "unlimited".', "auto")
    eviction_policy: Literal["schedule", "lru"] = key("Which blocks leave a full tier first.", "schedule")
    file_size: PlainSize | None = key(
        'Largest file of a block: "16MiB". Not set: 512 MiB, striped 16 MiB.', None, ge=4096, multiple_of=4096
    )
    micro_batch_order: Literal["layer", "micro_batch"] = key(
        "layer: each layer runs for all micro-batches before the next.", "layer"
    )
    keep_graphs: GraphCount = key(
        "Layers, counted from the last one, that the backward does not run again, as the graph of their "
        "forward is kept in the compute tier. auto: as many as fit where every block is at home there; 0: none.",
        "auto",
    )
    save_attention: GraphCount = key(
        "Layers, counted from the last one, whose attention is not computed again in the backward: the results of its "
        "kernel (sdpa's, without dropout) are kept with the activations. auto: where it saves time, by the plan; 0: "
        "none. Compiled layers compute it again.",
        "auto",
    )
    stream_updates: GraphCount = key(
        "Beside a GPU: groups of weights with their state in RAM that are updated in GPU memory, where they are "
        "fetched part by part, while the processor updates the others. auto: as many as finish with the others, if "
        "measured rates say that a step is shorter; 0: none.",
        "auto",
    )
    emulate_gpu: bool = key(
        'With device = "cpu": a second part of RAM, of tiers.gpu.size, takes the place of GPU memory. For '
        "tests, and for trying a setup out; the processor computes.",
        False,
    )


class RunConfig(Table):
    """A whole run."""

    config_version: Literal[1] = key("Version of this file format.", 1, alters="no")
    task: Literal["sft", "pretrain", "distill", "dpo"] = key(
        "sft: chats and prompts; pretrain: plain text; distill: rows as with sft, on a teacher's scores ([distill]); "
        "dpo: preferences, with the loss of preference.loss_type.",
        alters="yes",
    )
    output_dir: ConfigPath = key(
        "Folder of the run: metrics, resolved config, trained model.",
        examples=["outputs/first"],
        alters="no",
        same_name=_HF,
    )
    run_name: str = key(
        "Default: the name of output_dir.",
        default_factory=lambda above: above["output_dir"].name or "run",
        alters="no",
        same_name=_HF,
    )
    seed: int = key("Dropout and random weights.", 42, ge=0, alters="yes", same_name=_HF)
    data_seed: int = key(
        "Order of the data. Default: seed.",
        default_factory=lambda above: above["seed"],
        ge=0,
        alters="yes",
        same_name=_HF,
    )
    device: Literal["auto", "cpu", "cuda"] = key("auto: cuda when there is one.", "auto", alters="yes")
    full_determinism: bool = key(
        "On a GPU: only kernels that give the same bits at every run. false: any; bits then depend on timing.",
        True,
        alters="yes",
        same_name="transformers",
    )
    model: ModelConfig = key("What is trained.")
    lora: LoraConfig = key("Adapters in place of the model.", default_factory=LoraConfig)
    precision: PrecisionConfig = key("Number formats.", default_factory=PrecisionConfig)
    data: DataConfig = key("Rows, masks and their arrangement.")
    training: TrainingConfig = key("Size and number of steps.", default_factory=TrainingConfig)
    preference: PreferenceConfig = key("The loss over preferences.", default_factory=PreferenceConfig)
    optimizer: OptimizerConfig = key("The update and its schedule.", default_factory=OptimizerConfig)
    score: ScoreConfig = key("What `score` writes.", default_factory=ScoreConfig)
    distill: DistillConfig = key("Training on a teacher's scores.", default_factory=DistillConfig)
    evaluation: EvaluationConfig = key("Losses of held-out rows.", default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = key("Saving and continuing.", default_factory=CheckpointConfig)
    export: ExportConfig = key("The folder written at the end.", default_factory=ExportConfig)
    logging: LoggingConfig = key("What is shown and kept.", default_factory=LoggingConfig)
    tiers: TiersConfig = key("What this run may use.", default_factory=TiersConfig)
    placement: PlacementConfig = key("Where kinds of bytes live.", default_factory=PlacementConfig)
    distributed: DistributedConfig = key("Several processes on one run.", default_factory=DistributedConfig)
    profile: ProfileConfig = key("Timelines.", default_factory=ProfileConfig)
    advanced: AdvancedConfig = key("For measurements.", default_factory=AdvancedConfig)

    @model_validator(mode="before")
    @classmethod
    def _fill_dependent_defaults(cls, values: Any) -> Any:
        """Fill the keys whose usual default is another one beside certain values of other tables."""
        if not isinstance(values, dict):
            return values
        filled = dict(values)
        if filled.get("task") == "pretrain" and isinstance(filled.get("data"), dict):
            filled["data"] = {"train_on": "all", **filled["data"]}
        if filled.get("task") == "dpo" and isinstance(filled.get("data"), dict):
            filled["data"] = {"train_on": "completion", "packing": False, **filled["data"]}
        if isinstance(filled.get("data"), dict) and (filled["data"].get("eval") or filled["data"].get("val_size")):
            table = filled.get("evaluation", {})
            filled["evaluation"] = {"eval_strategy": "steps", **table} if isinstance(table, dict) else table
        return filled

    @property
    def rows_per_step(self) -> int:
        """Rows of ``data.max_length`` tokens in one optimizer step, over all micro-batches."""
        if self.training.train_batch_tokens is not None:
            return self.training.train_batch_tokens // self.data.max_length
        rows = self.training.per_device_train_batch_size * self.training.gradient_accumulation_steps
        return rows * self.rows_per_example

    @property
    def rows_per_example(self) -> int:
        """Rows of a micro-batch that belong together: two of an example of preferences."""
        return 2 if self.task == "dpo" else 1

    @property
    def micro_batch_size(self) -> int | None:
        """Rows per micro-batch; None where the planner chooses a divisor of :attr:`rows_per_step`."""
        if self.training.train_batch_tokens is not None:
            return None
        return self.training.per_device_train_batch_size * self.rows_per_example
