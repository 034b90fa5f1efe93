"""Readers of other tools' config files, and of scripts and command lines that start a training run."""

from __future__ import annotations

import errno
import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from megatrain.base.other_tools import TOOL_TITLES, Tool
from megatrain.extras.translate.command_lines import TRL_TASKS, CommandLine, count, find_command_line, parse_words

_LLAMA_FACTORY = ("finetuning_type", "cutoff_len", "dataset_dir", "template", "stage", "neat_packing")
_TRL = ("dataset_name", "dataset_mixture", "dataset_mixer", "dataset_train_split", "datasets", "max_seq_length",
        "max_length", "use_peft", "assistant_only_loss", "completion_only_loss")  # fmt: skip
_DEEPSPEED = ("zero_optimization", "train_micro_batch_size_per_gpu", "zero_allow_untested_optimizer")
_MAX_CONFIG_BYTES = 16 << 20
_MAX_DEPTH = 100  # maximum nesting depth of tables and lists
_MAX_YAML_VALUES = 1_000_000  # maximum number of values after aliases are expanded
_SCRIPTS = (".sh", ".bash", ".zsh", ".slurm", ".sbatch", ".job")
_COMMAND_LINE = Path("command line")  # replaces the file name in messages


class TranslationError(Exception):
    """A file cannot be translated. The message contains the cause and the remedy."""

    def __init__(self, location: Path | str, problem: str, remedy: str = "") -> None:
        super().__init__(f"{location}: {problem}" + (f". {remedy}" if remedy else ""))


@dataclass(frozen=True, slots=True)
class Source:
    """A config file of another tool, or a command line that starts it.

    Attributes:
        values: Parsed keys and values.
        line: Command line. For a config file, it describes one process without a launcher.
        other_commands: First words of the other training commands in the same script.
    """

    path: Path
    values: dict[str, Any]
    tool: Tool
    line: CommandLine = field(default_factory=lambda: CommandLine([], num_processes=1))
    other_commands: Sequence[str] = ()

    @property
    def title(self) -> str:
        return TOOL_TITLES[self.tool]


def read_source(path: Path, tool: Tool | None = None) -> Source:
    """Read a config file, or a shell script that starts a training run. Without ``tool``, the tool is detected.

    Raises:
        TranslationError: The file cannot be read, has no supported format, or belongs to no supported tool.
    """
    if path.suffix.lower() == ".py":
        raise TranslationError(
            path,
            "this is a program, which does not contain the options of the training",
            f"Pass the command line that starts it: megatrain-tier import -- python {path} --OPTION ...",
        )
    text = _read_text(path)
    if path.suffix.lower() in _SCRIPTS or text.startswith("#!"):
        line, other_trainings = find_command_line(text)
        if line is None:
            raise TranslationError(
                path,
                "no command in this script starts a supported training",
                "Supported are trl, llamafactory-cli, axolotl, and python, accelerate launch, torchrun or deepspeed "
                "with a script and options. Or pass the command: megatrain-tier import -- COMMAND",
            )
        return _source_of(path, line, tool, other_trainings)
    values = read_mapping(path)
    return Source(path, values, tool or _detect(path, values))


def read_command_line(words: Sequence[str], tool: Tool | None = None) -> Source:
    """Read a command line that starts a training run. Without ``tool``, the tool is detected.

    Raises:
        TranslationError: The command does not start a training run of a supported tool, or its config cannot be read.
    """
    line = parse_words(words)
    if line is None:
        raise TranslationError(
            _COMMAND_LINE,
            f"`{' '.join(words[:4])}` starts no training with options",
            "Write for example: megatrain-tier import -- trl sft --model_name_or_path MODEL --dataset_name DATA",
        )
    return _source_of(_COMMAND_LINE, line, tool)


def _source_of(path: Path, line: CommandLine, tool: Tool | None, other_trainings: Sequence[str] = ()) -> Source:
    if line.task not in ("", *TRL_TASKS):
        raise TranslationError(path, f"`{line.task}` is not supported here", "Supported: sft, dpo, kto, orpo and cpo")
    values = {**(read_mapping(line.config) if line.config is not None else {}), **line.values}
    tool = tool or line.tool
    if tool is None:
        # The options of an unknown script are assumed to be Hugging Face's TrainingArguments, like TRL's options.
        is_hugging_face = "model_name_or_path" in values and not any(name in values for name in _LLAMA_FACTORY)
        tool = "trl" if is_hugging_face else _detect(path, values)
    settings = line.launch_options.get("config_file") or line.launch_options.get("accelerate_config")
    if line.num_processes is None and isinstance(settings, str) and is_file(Path(settings)):
        launch_config = read_mapping(Path(settings))
        line.num_processes = count(launch_config.get("num_processes"))
        line.num_hosts = count(launch_config.get("num_machines")) or line.num_hosts
    return Source(path, values, tool, line, other_trainings)


def _read_text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            data = file.read(_MAX_CONFIG_BYTES + 1)
        if len(data) > _MAX_CONFIG_BYTES:
            raise TranslationError(path, f"the file has more than {_MAX_CONFIG_BYTES} bytes, too many for a config")
        return "\n".join(data.decode("utf-8-sig").replace("\r\n", "\n").split("\r"))
    except FileNotFoundError:
        raise TranslationError(path, "there is no such file", "Check the path") from None
    except UnicodeDecodeError as error:
        raise TranslationError(path, f"not UTF-8 text (byte {error.start})", "Pass a YAML or JSON file") from None
    except OSError as error:
        raise TranslationError(path, f"the file cannot be read: {error.strerror or error}") from None


def load_yaml(text: str) -> Any:
    """Parse YAML whose aliases expand to a limited number of values.

    Raises:
        YAMLError: The text is not YAML, or its aliases expand to too many values.
    """
    loader = yaml.SafeLoader(text)
    try:
        root = loader.get_single_node()
        if root is None:
            return None
        _check_aliases(root)
        return loader.construct_document(root)
    finally:
        loader.dispose()


def _check_aliases(root: yaml.Node) -> None:
    """Raise an error if expanding the aliases of a document creates too many values."""
    sizes: dict[int, int] = {}  # number of values in a node and its descendants, by id() of the node

    def count_values(node: yaml.Node) -> int:
        if id(node) in sizes:
            return sizes[id(node)]
        sizes[id(node)] = 1  # in case an alias refers to an enclosing value, which read_mapping() rejects
        children = node.value if isinstance(node, yaml.CollectionNode) else ()
        nodes = (part for item in children for part in (item if isinstance(item, tuple) else (item,)))
        sizes[id(node)] = total = 1 + sum(map(count_values, nodes))
        if total > _MAX_YAML_VALUES:
            problem = f"its aliases expand to more than {_MAX_YAML_VALUES} values"
            raise yaml.MarkedYAMLError(None, None, problem, node.start_mark)
        return total

    count_values(root)


def read_mapping(path: Path) -> dict[str, Any]:
    """Parse a YAML or JSON file.

    Raises:
        TranslationError: The file cannot be read or parsed, or does not contain a mapping with text keys.
    """
    text = _read_text(path)
    try:
        values = json.loads(text) if path.suffix.lower() == ".json" else load_yaml(text)
    except json.JSONDecodeError as error:
        raise TranslationError(path, f"line {error.lineno}: invalid JSON: {error.msg}") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f"line {mark.line + 1}: " if mark is not None else ""
        reason = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise TranslationError(path, f"{line}invalid YAML: {reason}") from None
    except (RecursionError, ValueError) as error:  # the nesting is too deep, or a date does not exist
        raise TranslationError(path, f"the file cannot be parsed: {error}") from None
    try:
        json.dumps(values, ensure_ascii=False, allow_nan=False, default=str).encode()
    except (UnicodeEncodeError, ValueError, TypeError, RecursionError):
        problem = "it contains a value that is invalid in a config: half a character, or a non-finite number"
        raise TranslationError(path, problem) from None
    if _is_too_deep(values):
        raise TranslationError(path, f"more than {_MAX_DEPTH} tables or lists are nested")
    if not isinstance(values, dict) or not all(isinstance(name, str) for name in values):
        raise TranslationError(path, "it does not map names to values", "Pass the config file of a training run")
    return values


def _is_too_deep(values: Any) -> bool:
    level = [values]
    for _ in range(_MAX_DEPTH + 1):
        tables = [item for item in level if isinstance(item, dict | list)]
        level = [child for table in tables for child in (table.values() if isinstance(table, dict) else table)]
    return bool(level)


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
            "this is a launch config of accelerate, which does not describe the training",
            "Pass the config of the training, or the whole command: megatrain-tier import -- accelerate launch "
            f"--config_file {path} SCRIPT.py --OPTION ...",
        )
    if path.suffix.lower() == ".toml":
        raise TranslationError(path, "this is a TOML file", "To check a config of megatrain-tier: megatrain-tier check")
    raise TranslationError(
        path, "unknown tool: the config has no key of a supported tool", f"Pass --from {'|'.join(TOOL_TITLES)}"
    )


def can_be_path(base: Path, text: str) -> bool:
    """Return whether a text can be a path: without zero bytes, overlong names or an unknown home folder."""
    try:
        (base / Path(text).expanduser()).stat()
    except OSError as error:
        return error.errno != errno.ENAMETOOLONG
    except (ValueError, RuntimeError):
        return False
    return True


def exists(path: Path) -> bool:
    """Return whether a path exists; False if the text cannot be a path."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def is_file(path: Path) -> bool:
    """Return whether a path is a file; False if the text cannot be a path."""
    return exists(path) and path.is_file()
