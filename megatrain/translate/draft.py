"""The input and the state of a translation: another tool's file or command, our keys set so far, and keys left out.

The rules of :mod:`megatrain.translate.trainers` and :mod:`megatrain.translate.engines` fill a :class:`Draft`;
:mod:`megatrain.translate.translate` makes a valid config of it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import yaml

from megatrain.base.other_tools import KEYS, RANKS, TITLES, Fate, Tool
from megatrain.config.keys import KEYS as OUR_KEYS
from megatrain.config.keys import leaf_schema, plain
from megatrain.translate.command_lines import CommandLine, count, find_command_line, is_of_processes, parse_words

_LLAMA_FACTORY = ("finetuning_type", "cutoff_len", "dataset_dir", "template", "stage", "neat_packing")
_TRL = ("dataset_name", "dataset_mixture", "dataset_mixer", "dataset_train_split", "datasets", "max_seq_length",
        "max_length", "use_peft", "assistant_only_loss", "completion_only_loss")  # fmt: skip
_DEEPSPEED = ("zero_optimization", "train_micro_batch_size_per_gpu", "zero_allow_untested_optimizer")
#: Commands of TRL that train what is trained here.
TRL_TASKS = ("sft", "dpo", "kto", "orpo", "cpo")
_MAX_CONFIG_BYTES = 16 << 20
_MAX_YAML_VALUES = 1_000_000  # with aliases replaced by their values
_SCRIPTS = (".sh", ".bash", ".zsh", ".slurm", ".sbatch", ".job")
_COMMAND_LINE = Path("command line")  # where a file's name stands otherwise


class TranslationError(Exception):
    """A file cannot be translated; the message names the obstacle and the remedy."""

    def __init__(self, where: Path | str, problem: str, remedy: str = "") -> None:
        super().__init__(f"{where}: {problem}" + (f". {remedy}" if remedy else ""))


class ReadTable(dict[str, Any]):
    """A table of another tool's file that records which of its keys were read by name.

    Tables inside it, also those in lists, are of this class. Iteration and ``in`` record nothing.

    Args:
        values: The parsed table.
        path: The dotted path of the table, "" for the whole file.
        read: The paths that were read, shared by all tables of a file.
    """

    def __init__(self, values: Mapping[str, Any], path: str = "", read: set[str] | None = None) -> None:
        self.path = path
        self.read: set[str] = set() if read is None else read
        super().__init__({name: self._wrapped(value, self.path_of(name)) for name, value in values.items()})

    def _wrapped(self, value: Any, path: str) -> Any:
        if isinstance(value, Mapping):
            return ReadTable(value, path, self.read)
        if isinstance(value, list):
            return [self._wrapped(each, f"{path}.{number}") for number, each in enumerate(value)]
        return value

    def path_of(self, name: str) -> str:
        """Return the dotted path of one of the keys."""
        return f"{self.path}.{name}" if self.path else str(name)

    def __getitem__(self, name: str) -> Any:
        self.read.add(self.path_of(name))
        return super().__getitem__(name)

    def get(self, name: str, default: Any = None) -> Any:
        """Return a value, and record the key as read."""
        self.read.add(self.path_of(name))
        return super().get(name, default)

    def unread(self, done: Collection[str]) -> Iterator[tuple[str, Any]]:
        """Yield the path and the value of each key that was not read by name.

        Args:
            done: Paths that are listed already, with all that is below them.
        """
        if super().get("enabled") is False:
            return  # a switched-off table has no effect
        for name, value in self.items():
            path = self.path_of(name)
            if path not in done:
                yield from self._unread(path, value, done)

    def _unread(self, path: str, value: Any, done: Collection[str]) -> Iterator[tuple[str, Any]]:
        if isinstance(value, ReadTable):
            yield from value.unread(done)
        elif isinstance(value, list) and any(isinstance(each, ReadTable) for each in value):
            for number, each in enumerate(value):
                yield from self._unread(f"{path}.{number}", each, done)
        elif path not in self.read:
            yield path, value


@dataclass(frozen=True, slots=True)
class ForeignConfig:
    """A config file of another tool, or a command line that starts it.

    Attributes:
        path: The file.
        values: Its parsed content.
        tool: The tool it belongs to.
        num_processes: How many processes, each on a device, the command line starts; None: it does not say.
        num_hosts: On how many machines.
        unneeded: What of the command line nothing is needed for here.
        lost: What of it has no equivalent.
        task: What TRL's command trains; "" where that is not said.
    """

    path: Path
    values: ReadTable
    tool: Tool
    num_processes: int | None = 1
    num_hosts: int = 1
    unneeded: tuple[Left, ...] = ()
    lost: tuple[Left, ...] = ()
    task: str = ""

    @property
    def title(self) -> str:
        return TITLES[self.tool]


def read_source(path: Path, tool: Tool | None = None) -> ForeignConfig:
    """Read a config file, or a shell script that starts a training; without ``tool``, detect whose it is.

    Raises:
        TranslationError: The file cannot be read, is neither YAML, JSON nor such a script, or belongs to no known tool.
    """
    if path.suffix.lower() == ".py":
        raise TranslationError(
            path,
            "this is a program, whose options are not in it",
            f"Give the command line that starts it: megatrain-tier import -- python {path} --OPTION ...",
        )
    text = _read_text(path)
    if path.suffix.lower() in _SCRIPTS or text.startswith("#!"):
        line, others = find_command_line(text)
        if line is None:
            raise TranslationError(
                path,
                "no command in this script starts a training that is known",
                "Known are trl, llamafactory-cli, axolotl, and python, accelerate launch, torchrun or deepspeed with a "
                "script and its options. Give such a command itself: megatrain-tier import -- COMMAND",
            )
        return _source_of(path, line, tool, others)
    values = read_mapping(path)
    return ForeignConfig(path, ReadTable(values), tool or _detect(path, values))


def read_command_line(words: Sequence[str], tool: Tool | None = None) -> ForeignConfig:
    """Read a command line that starts a training; without ``tool``, detect whose it is.

    Raises:
        TranslationError: It starts no training, names a config that cannot be read, or belongs to no known tool.
    """
    line = parse_words(words)
    if line is None:
        raise TranslationError(
            _COMMAND_LINE,
            f"`{' '.join(words[:4])}` starts no training with options",
            "Write for example: megatrain-tier import -- trl sft --model_name_or_path MODEL --dataset_name DATA",
        )
    return _source_of(_COMMAND_LINE, line, tool)


def _source_of(path: Path, line: CommandLine, tool: Tool | None, others: Sequence[str] = ()) -> ForeignConfig:
    if line.task not in ("", *TRL_TASKS):
        raise TranslationError(path, f"`{line.task}` is not supported here", "sft, pretrain, dpo, kto and orpo are")
    values = {**(read_mapping(line.config) if line.config is not None else {}), **line.values}
    known: dict[str, Tool] = {"trl": "trl", "llamafactory": "llamafactory", "axolotl": "axolotl"}
    if tool is None and line.tool:
        tool = known[line.tool]
    if tool is None:
        # A script of somebody's own: with options of Hugging Face's TrainingArguments, as those of TRL have.
        is_hugging_face = "model_name_or_path" in values and not any(name in values for name in _LLAMA_FACTORY)
        tool = "trl" if is_hugging_face else _detect(path, values)
    number, hosts, launch = line.num_processes, line.num_hosts, dict(line.launch_options)
    settings = launch.get("config_file") or launch.get("accelerate_config")
    if number is None and isinstance(settings, str) and is_file(Path(settings)):
        found = read_mapping(Path(settings))
        number, hosts = count(found.get("num_processes")), count(found.get("num_machines")) or hosts
    lost = [Left(f"${{...}} in --{name}", None, "only a shell knows its value") for name in line.unknown]
    lost += [Left(other, None, "another training of the same script: import it by itself") for other in others]
    unneeded = tuple(
        Left(f"{line.launcher or 'trl'} --{name}", value, RANKS)
        for name, value in launch.items()
        if not is_of_processes(line, name)
    )
    return ForeignConfig(path, ReadTable(values), tool, number, hosts, unneeded, tuple(lost), line.task)


def _read_text(path: Path) -> str:
    try:
        with path.open("rb") as file:
            found = file.read(_MAX_CONFIG_BYTES + 1)
        if len(found) > _MAX_CONFIG_BYTES:
            raise TranslationError(path, f"more than {_MAX_CONFIG_BYTES} bytes, too many for the config of a run")
        return "\n".join(found.decode("utf-8-sig").replace("\r\n", "\n").split("\r"))
    except FileNotFoundError:
        raise TranslationError(path, "there is no such file", "Check the path") from None
    except UnicodeDecodeError as error:
        raise TranslationError(path, f"not UTF-8 text (byte {error.start})", "Give a YAML or JSON file") from None
    except OSError as error:
        raise TranslationError(path, f"the file cannot be read: {error.strerror or error}") from None


def load_yaml(text: str) -> Any:
    """Parse YAML whose aliases stand for a limited number of values.

    Raises:
        YAMLError: the text is no YAML, or its aliases stand for too many values.
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
    """Refuse a document that grows without bound when its aliases are replaced by their values."""
    sizes: dict[int, int] = {}  # by identity of a node, with all that is below it

    def size_of(node: yaml.Node) -> int:
        if id(node) in sizes:
            return sizes[id(node)]
        sizes[id(node)] = 1  # an alias of a value above it: refused where the values are checked
        below = node.value if isinstance(node, yaml.CollectionNode) else ()
        nodes = (part for item in below for part in (item if isinstance(item, tuple) else (item,)))
        sizes[id(node)] = total = 1 + sum(map(size_of, nodes))
        if total > _MAX_YAML_VALUES:
            problem = f"its aliases stand for more than {_MAX_YAML_VALUES} values"
            raise yaml.MarkedYAMLError(None, None, problem, node.start_mark)
        return total

    size_of(root)


def read_mapping(path: Path) -> dict[str, Any]:
    """Parse a YAML or JSON file.

    Raises:
        TranslationError: The file cannot be read or parsed, or is not a mapping with text keys.
    """
    text = _read_text(path)
    try:
        values = json.loads(text) if path.suffix.lower() == ".json" else load_yaml(text)
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
            "Give the config of the training itself, or the whole command: megatrain-tier import -- accelerate launch "
            f"--config_file {path} SCRIPT.py --OPTION ...",
        )
    if path.suffix.lower() == ".toml":
        raise TranslationError(path, "this is a TOML file", "megatrain-tier check reads our own configs")
    raise TranslationError(
        path, "whose config is this? It has none of the keys of a tool that is known", f"Say --from {'|'.join(TITLES)}"
    )


#: Values with which an unknown key switches nothing on.
_OFF: tuple[Any, ...] = (None, False, "", [], {}, "no", "none", "auto")


@dataclass(frozen=True, slots=True)
class TranslatedValue:
    """The value of one of our keys.

    Attributes:
        value: The value as TOML has it.
        theirs: The key it came from, "" for none.
        note: A remark for the reader of the config.
        is_path: Whether it is a path, relative to the folder in which the other tool was started.
        to_fill_in: Whether it is only an example because their file has no such value.
    """

    value: Any
    theirs: str = ""
    note: str = ""
    is_path: bool = False
    to_fill_in: bool = False


@dataclass(frozen=True, slots=True)
class Left:
    """One of their keys that is left out of the translation, and why."""

    theirs: str
    value: Any
    why: str


@dataclass
class Draft:
    """The translation so far.

    Attributes:
        source: The file to translate.
        base: The folder that its relative paths start from.
        entries: Our dotted key, array tables with an index -> value.
        lost: Their keys without an equivalent.
        unneeded: Their keys that nothing is needed for here.
        handled: Their keys that ``translate_keys`` has translated or listed with all that is in them.
    """

    source: ForeignConfig
    base: Path
    entries: dict[str, TranslatedValue] = field(default_factory=dict)
    lost: list[Left] = field(default_factory=list)
    unneeded: list[Left] = field(default_factory=list)
    handled: set[str] = field(default_factory=set)

    def translate_keys(self, rules: Mapping[str, Rule], values: Mapping[str, Any], prefix: str = "") -> None:
        """Translate keys one by one, as the tool's table in :data:`megatrain.base.other_tools.KEYS` says.

        Args:
            rules: How to read the keys with :attr:`Fate.RULE`; those without a rule are read together with others.
            values: The keys with their values.
            prefix: The section that the keys are in, with its dot.
        """
        names = KEYS[self.source.tool]
        for leaf, value in values.items():
            theirs = prefix + leaf
            name = names.get(theirs)
            if theirs in rules:
                self.source.values.read.add(theirs)
            elif name is None or name.fate is not Fate.RULE:
                self.handled.add(theirs)
            if value is None:
                continue
            if name is None:
                self.lose_if_on(theirs, "nothing like it here", value)
            elif theirs in rules:
                rules[theirs](self, theirs, value)
            elif name.fate is Fate.SAME:
                self.put(name.ours, value, theirs)
            elif name.fate is Fate.PATH:
                self.put_path(name.ours, value, theirs)
            elif name.fate is Fate.UNNEEDED:
                self.drop(theirs, name.why, value)
            elif name.fate is Fate.LOST:
                self.lose_if_on(theirs, name.why, value)

    def put(self, ours: str, value: Any, theirs: str = "", note: str = "", *, is_path: bool = False) -> None:
        """Set one of our keys."""
        self.entries[ours] = TranslatedValue(_number(value, ours), theirs, note, is_path)

    def put_path(self, ours: str, value: Any, theirs: str = "", note: str = "") -> None:
        """Set a key that is a path or a name on the hub: what exists on this machine is a path."""
        text = str(value)
        is_path = text.startswith((".", "/", "~")) or ours == "output_dir" or exists(self.base / text)
        self.put(ours, text, theirs, note, is_path=is_path)

    def fill_in(self, ours: str, value: Any, note: str) -> None:
        """Set a key to an example that the user has to replace."""
        self.entries[ours] = TranslatedValue(value, "", note, False, True)

    def fill_in_model(self) -> None:
        """Ask the user for the model, where no key has set it."""
        if "model.model_name_or_path" not in self.entries:
            self.fill_in("model.model_name_or_path", "path/to/model", "a Hugging Face folder")

    def fill_in_data(self) -> None:
        """Ask the user for the training data."""
        self.fill_in("data.train.0.path", "data/train.jsonl", "a file, glob or folder, or the hub name of a data set")

    def lose(self, theirs: str, why: str, value: Any = None) -> None:
        """List one of their keys as without equivalent."""
        self.lost.append(Left(theirs, value, why))

    def lose_if_on(self, theirs: str, why: str, value: Any) -> None:
        """List a key as without equivalent, unless its value switches nothing on."""
        if value not in _OFF:
            self.lose(theirs, why, value)

    def lose_unread(self) -> None:
        """List the keys that no rule has read: a table is not translated because one of its keys is."""
        self.source.values.read.update(entry.theirs for entry in self.entries.values())
        done = self.handled | {left.theirs for left in (*self.lost, *self.unneeded)}
        for path, value in list(self.source.values.unread(done)):
            if value is not None and value != "auto":
                self.lose(path, "nothing like it here", value)

    def drop(self, theirs: str, why: str, value: Any = None) -> None:
        """List one of their keys as not needed here."""
        self.unneeded.append(Left(theirs, value, why))

    def default(self, values: Mapping[str, Any]) -> None:
        """Set the tool's defaults that differ from ours, where nothing else has set the key."""
        for ours, value in values.items():
            if ours not in self.entries and leaf_schema(ours).get("default") != value:
                self.put(ours, value, note=f"{self.source.title}'s default")

    def refuse(self, problem: str, remedy: str = "") -> TranslationError:
        """Return the error of a file that asks for training that is not supported here."""
        return TranslationError(self.source.path, problem, remedy)


#: Reads one key of theirs: ``rule(draft, their_key, value)``.
Rule = Callable[[Draft, str, Any], None]


def choice(ours: str, values: Mapping[Any, Any], otherwise: str) -> Rule:
    """Return the rule of a key whose values are renamed; ``otherwise`` says why any other value is lost."""

    def rule(draft: Draft, theirs: str, value: Any) -> None:
        if isinstance(value, str | bool | int) and value in values:
            if values[value] is not None:
                draft.put(ours, values[value], theirs)
        else:
            draft.lose(theirs, otherwise, value)

    return rule


def exists(path: Path) -> bool:
    """Return whether a path exists; false for text that cannot be a path."""
    try:
        return path.exists()
    except (OSError, ValueError):
        return False


def is_file(path: Path) -> bool:
    """Return whether a path is a file; false for text that cannot be a path."""
    return exists(path) and path.is_file()


def mapping(value: Any) -> Mapping[str, Any]:
    """Return a value that should be a mapping; empty where it is something else."""
    return value if isinstance(value, Mapping) else {}


def listed(value: Any) -> list[Any]:
    """Return one value or a list of them as a list."""
    return value if isinstance(value, list) else [] if value is None else [value]


def plain_key(key: str) -> str:
    """Return one of our keys without the indices of array tables."""
    return plain(tuple(int(part) if part.isdecimal() else part for part in key.split(".")))


def _number(value: Any, ours: str) -> Any:
    """Return a value as a number where our key is one: YAML takes 1e-5 for text."""
    name = plain_key(ours)
    if isinstance(value, str) and name in OUR_KEYS and leaf_schema(name).get("type") in ("number", "integer"):
        try:
            number = float(value)
        except ValueError:
            return value
        if not math.isfinite(number):
            return value
        return int(number) if leaf_schema(name)["type"] == "integer" and number.is_integer() else number
    return value
