"""Reading another tool's config file, and telling which tool it is of."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import yaml

Tool = Literal["llamafactory", "axolotl", "trl", "deepspeed", "megatrain"]
#: Tool -> how it is written in sentences.
TITLES: dict[Tool, str] = {
    "llamafactory": "LLaMA-Factory",
    "axolotl": "Axolotl",
    "trl": "TRL",
    "deepspeed": "DeepSpeed",
    "megatrain": "MegaTrain",
}
_LLAMA_FACTORY = ("finetuning_type", "cutoff_len", "dataset_dir", "template", "stage", "neat_packing")
_TRL = ("dataset_name", "dataset_mixture", "dataset_mixer", "dataset_train_split", "datasets", "max_seq_length",
        "max_length", "use_peft", "assistant_only_loss", "completion_only_loss")  # fmt: skip
_DEEPSPEED = ("zero_optimization", "train_micro_batch_size_per_gpu", "zero_allow_untested_optimizer")


class TranslationError(Exception):
    """A file cannot be translated; the text says what is in the way and what to do."""

    def __init__(self, where: Path | str, problem: str, remedy: str = "") -> None:
        super().__init__(f"{where}: {problem}" + (f". {remedy}" if remedy else ""))


@dataclass(frozen=True, slots=True)
class Source:
    """A config file of another tool.

    Attributes:
        path: the file.
        values: its mapping.
        tool: whose it is.
    """

    path: Path
    values: dict[str, Any]
    tool: Tool

    @property
    def title(self) -> str:
        return TITLES[self.tool]


def read_source(path: Path, tool: Tool | None = None) -> Source:
    """Read a file of ``tool``, or find out whose it is.

    Raises:
        TranslationError: it cannot be read, is neither YAML nor JSON, or is of no tool that is known.
    """
    values = read_mapping(path)
    return Source(path, values, tool or _detect(path, values))


def read_mapping(path: Path) -> dict[str, Any]:
    """Return what a YAML or JSON file holds.

    Raises:
        TranslationError: it cannot be read or parsed, or holds no mapping of names.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except FileNotFoundError:
        raise TranslationError(path, "there is no such file", "Check the path") from None
    except UnicodeDecodeError as error:
        raise TranslationError(path, f"not UTF-8 text (byte {error.start})", "Give a YAML or JSON file") from None
    except OSError as error:
        raise TranslationError(path, f"the file cannot be read: {error.strerror or error}") from None
    try:
        values = json.loads(text) if path.suffix.lower() == ".json" else yaml.safe_load(text)
    except json.JSONDecodeError as error:
        raise TranslationError(path, f"line {error.lineno}: this is not JSON: {error.msg}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f"line {mark.line + 1}: " if mark is not None else ""
        reason = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise TranslationError(path, f"{line}this is not YAML: {reason}") from None
    except (RecursionError, ValueError) as error:  # deep nesting; dates that do not exist
        raise TranslationError(path, f"the file cannot be parsed: {error}") from None
    try:
        json.dumps(values, ensure_ascii=False, allow_nan=False, default=str).encode()
    except (UnicodeEncodeError, ValueError, TypeError, RecursionError):
        problem = "it holds a value that no config can hold: half a character, or a number that is not finite"
        raise TranslationError(path, problem) from None
    if not isinstance(values, dict) or not all(isinstance(name, str) for name in values):
        raise TranslationError(path, "this holds no names with values", "Give the config file of a training run")
    return values


def _detect(path: Path, values: dict[str, Any]) -> Tool:
    if any(name in values for name in _DEEPSPEED):
        return "deepspeed"
    if "base_model" in values:
        return "axolotl"
    if isinstance(values.get("model"), dict) and isinstance(values.get("dataset"), dict) and "training" in values:
        return "megatrain"
    if any(name in values for name in _LLAMA_FACTORY) or isinstance(values.get("dataset"), str):
        return "llamafactory"
    if "model_name_or_path" in values and any(name in values for name in _TRL):
        return "trl"
    if "compute_environment" in values or "distributed_type" in values:
        raise TranslationError(
            path,
            "this is a launch config of accelerate, which says nothing of the training",
            "Give the config of the training itself",
        )
    if path.suffix.lower() == ".toml":
        raise TranslationError(path, "this is a TOML file", "megatrain-tier check reads our own configs")
    raise TranslationError(
        path, "whose config is this? It has none of the keys of a tool that is known", f"Say --from {'|'.join(TITLES)}"
    )
