"""Parser for command lines and shell scripts that start a training run. It converts options to config values.

A script is read, never run. Script variables and environment variables are expanded as in a shell. Values that only a
shell can compute (``$(...)``, ``$1``) stay unknown, and ``CommandLine.unknown`` lists their options.
"""

from __future__ import annotations

import json
import os
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from megatrain.base.other_tools import Tool

__all__ = ["TRL_TASKS", "CommandLine", "count", "find_command_line", "is_world_size_option", "parse_words"]

#: Options of each program that starts a training script on several processes: (number of machines, number of
#: processes, whether the number of processes is per machine).
_LAUNCHERS = {
    "accelerate": ("num_machines", "num_processes", False),
    "torchrun": ("nnodes", "nproc_per_node", True),
    "deepspeed": ("num_nodes", "num_gpus", True),
    "trl": ("num_machines", "num_processes", False),
}
#: Launchers by module name, as in ``python -m torch.distributed.run``.
_LAUNCHER_MODULES = {
    "torch.distributed.run": "torchrun",
    "torch.distributed.launch": "torchrun",
    "accelerate.commands.launch": "accelerate",
    "deepspeed.launcher.runner": "deepspeed",
}
#: Tools by command name.
_TOOLS: dict[str, Tool] = {
    "trl": "trl",
    "llamafactory-cli": "llamafactory",
    "lmf": "llamafactory",
    "axolotl": "axolotl",
}
#: TRL commands whose training is supported here.
TRL_TASKS = ("sft", "dpo", "kto", "orpo", "cpo")
_ALL_TRL_TASKS = (*TRL_TASKS, "grpo", "gkd", "reward", "rloo", "online_dpo", "nash_md", "xpo", "bco")
_SWITCHES = ("no_cuda",)  # options whose "no_" is part of the name, not a negation
_CONFIG_FILES = (".yaml", ".yml", ".json")
_UNKNOWN = "\N{REPLACEMENT CHARACTER}"  # placeholder for a value that only a shell can compute
_ASSIGNMENT = re.compile(
    r"(?:export\s+|local\s+|readonly\s+|declare\s+(?:-\w+\s+)*)?([A-Za-z_]\w*)(\+?)=(.*)", re.DOTALL
)
_REDIRECTION = re.compile(r"(?<!\S)(?:\d?>>?|&>>?|<)(?:&\d|\s*[^\s;|&<>]+)")  # "2>&1", "> log.txt"
_VARIABLE = re.compile(
    r"'[^']*'"  # neither a shell nor `_expand` changes text in single quotes
    r"|(?P<array>\"?\$\{(?P<items>\w+)\[[@*]\]\}\"?)"
    r"|\$\{(?P<braced>\w+)(?:(?P<how>:?[-=])(?P<default>[^}]*))?\}"
    r"|\$(?P<plain>[A-Za-z_]\w*)"
    r"|(?P<other>\$\(\([^()]*\)\)|\$\([^()]*\)|`[^`]*`|\$\{[^}]*\}|\$[0-9@*#?!$-])"
)


@dataclass
class CommandLine:
    """A training run that a command line starts.

    Attributes:
        words: Arguments of the command line, split as in a shell.
        values: Values by option name, with underscores instead of dashes.
        config: Config file in the command line. Options of the command line override the file.
        tool: Tool of the command; None if unknown.
        task: Task of a TRL command, such as "sft" or "dpo", or "".
        launcher: Program that starts the processes, or "".
        num_processes: Total number of processes on all machines; None if unknown.
        num_hosts: Number of machines.
        unknown: Options whose values only a shell can compute.
    """

    words: list[str]
    values: dict[str, Any] = field(default_factory=dict)
    config: Path | None = None
    tool: Tool | None = None
    task: str = ""
    launcher: str = ""
    num_processes: int | None = None
    num_hosts: int = 1
    launch_options: dict[str, Any] = field(default_factory=dict)
    unknown: list[str] = field(default_factory=list)


def find_command_line(text: str) -> tuple[CommandLine | None, list[str]]:
    """Return a shell script's first supported training command, and the first words of its other training commands."""
    lines = [parse_words(words) for words in _commands(text)]
    commands = [line for line in lines if line is not None and (line.tool or "model_name_or_path" in line.values)]
    if not commands:
        return None, []
    command = next((line for line in commands if line.task in ("", *TRL_TASKS)), commands[0])
    return command, [" ".join(line.words[:4]) for line in commands if line is not command]


def parse_words(words: Sequence[str]) -> CommandLine | None:
    """Parse a command line. Return None if it does not start a training run."""
    line = CommandLine(list(words))
    args = list(words)
    while args:
        program = os.path.basename(args.pop(0))
        if re.fullmatch(r"python[\d.]*", program):
            args = _parse_python(line, args)
            break
        if program in _LAUNCHERS or program in _TOOLS:
            args = _parse_program(line, program, args)
            break
    else:
        return None
    if args and not args[0].startswith("-") and args[0].endswith(_CONFIG_FILES):
        line.config = Path(args.pop(0))  # as in `llamafactory-cli train FILE` and `axolotl train FILE`
    line.values = _options(args, line.unknown)
    config = line.values.pop("config", None)
    if isinstance(config, str):
        line.config = Path(config)
    for name in list(line.values):
        if line.tool == "trl" and name in ("num_processes", "num_machines", "accelerate_config"):  # for the launcher
            line.launch_options[name] = line.values.pop(name)
    line.num_processes, line.num_hosts = _processes(line)
    return line if line.values or line.config else None


def _parse_python(line: CommandLine, words: list[str]) -> list[str]:
    """Parse the words after ``python`` up to the script or module, and return the remaining words."""
    while words and words[0].startswith("-") and words[0] != "-m":
        words.pop(0)
    if words[:1] == ["-m"] and len(words) > 1:
        module = words[1]
        if module in _LAUNCHER_MODULES:
            return _parse_program(line, _LAUNCHER_MODULES[module], words[2:], is_module=True)
        _name_script(line, module)
        return words[2:]
    if words:
        _name_script(line, words[0])
    return words[1:] if words and words[0].endswith(".py") else []


def _parse_program(line: CommandLine, program: str, words: list[str], *, is_module: bool = False) -> list[str]:
    if program in _TOOLS:
        line.tool = _TOOLS[program]
        if words and not words[0].startswith("-") and not words[0].endswith(_CONFIG_FILES):
            command = words.pop(0)
            if command not in (_ALL_TRL_TASKS if program == "trl" else ("train",)):
                return []  # the command does not train, as in `trl chat` or `axolotl preprocess`
            line.task = command if program == "trl" else ""
        return words
    line.launcher = program
    if program == "accelerate" and not is_module:
        if words[:1] != ["launch"]:
            return []
        words = words[1:]
    for index, word in enumerate(words):
        name = os.path.basename(word)
        if word.endswith(".py"):
            line.launch_options = _options(words[:index], line.unknown)
            _name_script(line, word)
            return words[index + 1 :]
        if word in ("-m", "--module") and index + 1 < len(words):
            line.launch_options = _options(words[:index], line.unknown)
            _name_script(line, words[index + 1])
            return words[index + 2 :]
        if name in _TOOLS and index:  # as in `torchrun ... --no_python trl sft`
            line.launch_options = _options(words[:index], line.unknown)
            return _parse_program(line, name, words[index + 1 :])
    return []


def _name_script(line: CommandLine, script: str) -> None:
    """Detect tool and task from the name of a script or module."""
    stem = os.path.basename(script).removesuffix(".py").rpartition(".")[2]
    if "axolotl" in script:
        line.tool = "axolotl"
    elif "llamafactory" in script or "llama_factory" in script.lower():
        line.tool = "llamafactory"
    elif stem in _ALL_TRL_TASKS:
        line.tool, line.task = "trl", stem


def _processes(line: CommandLine) -> tuple[int | None, int]:
    """Return the number of processes (None if unknown) and the number of machines."""
    if not line.launcher and not line.launch_options:
        return 1, 1
    host_option, process_option, is_per_host = _LAUNCHERS[line.launcher or "trl"]
    num_hosts = count(line.launch_options.get(host_option)) or 1
    num_processes = count(line.launch_options.get(process_option))
    return (None if num_processes is None else num_processes * (num_hosts if is_per_host else 1)), num_hosts


def count(value: Any) -> int | None:
    """Return the value if it is a whole number above 0, otherwise None."""
    return value if isinstance(value, int) and not isinstance(value, bool) and value > 0 else None


def is_world_size_option(line: CommandLine, name: str) -> bool:
    """Return whether an option of the launcher sets the number of processes or machines."""
    return name in _LAUNCHERS[line.launcher or "trl"][:2]


def _options(words: Sequence[str], unknown: list[str]) -> dict[str, Any]:
    """Parse ``--name value``, ``--name=value``, ``--name`` and ``--name a b`` like argparse, and return the values."""
    values: dict[str, Any] = {}
    name, args = "", list[str]()

    def finish_option() -> None:
        if not name:
            return
        if any(_UNKNOWN in word for word in args):
            unknown.append(name)
        elif not args and name.startswith("no_") and name not in _SWITCHES:
            values[name.removeprefix("no_")] = False  # negates a flag that is true by default
        elif not args:
            values[name] = True
        else:
            values[name] = _value(args[0]) if len(args) == 1 else [_value(word) for word in args]

    for word in words:
        is_number = re.fullmatch(r"-[\d.][\d.eE+-]*", word) is not None
        if word.startswith("-") and not is_number and len(word) > 1:
            finish_option()
            text, equals, value = word.partition("=")
            name, args = text.lstrip("-").replace("-", "_"), [value] if equals else []
        elif "=" in word and not name:  # as in `llamafactory-cli train FILE key=value`
            key, _, value = word.partition("=")
            values[key] = _value(value)
        elif name:
            args.append(word)
    finish_option()
    return values


def _value(word: str) -> Any:
    """Convert a command line argument to a config value."""
    lower = word.lower()
    if lower in ("true", "false"):
        return lower == "true"
    if lower in ("none", "null"):
        return None
    if re.fullmatch(r"[+-]?\d+", word):
        return int(word)
    if re.fullmatch(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?", word):
        return float(word)
    if word.startswith(("{", "[")):
        try:
            return json.loads(word)
        except ValueError:
            return word
    return word


# -- shell scripts


def _commands(text: str) -> Iterator[list[str]]:
    """Yield the words of each simple command in a shell script, with expanded variables."""
    variables: dict[str, str] = {}
    for line in _lines(text):
        match = _ASSIGNMENT.fullmatch(line.strip())
        if match is not None and (match[3].startswith("(") or len(_split(match[3])) <= 1):
            name, plus, value = match[1], match[2], match[3].strip()
            is_array = value.startswith("(") and value.endswith(")")
            value = _expand(value[1:-1] if is_array else value, variables)
            if not is_array:
                value = " ".join(_split(value))
            variables[name] = f"{variables.get(name, '')}{' ' if is_array else ''}{value}" if plus else value
            continue
        words = _split(_expand(line, variables))
        command: list[str] = []
        for word in [*words, ";"]:
            if word and set(word) <= set(";|&()<>"):
                yield command
                command = []
            else:
                command.append(word)


def _lines(text: str) -> Iterator[str]:
    """Yield the logical lines of a script. Continuation lines, multi-line quotes and multi-line arrays are joined."""
    joined = ""
    for line in text.replace("\\\n", " ").split("\n"):
        joined = f"{joined}\n{line}" if joined else line
        try:
            shlex.split(joined, comments=True)
        except ValueError:
            continue  # the quote continues on the next line
        if re.match(r"\s*(?:\w+\s+)*\w+\+?=\(", joined) and not line.partition("#")[0].rstrip().endswith(")"):
            continue  # the array continues on the next line
        yield joined
        joined = ""
    if joined:
        yield joined


def _split(line: str) -> list[str]:
    lexer = shlex.shlex(_REDIRECTION.sub(" ", line), posix=True, punctuation_chars=";|&()<>")
    lexer.whitespace_split = True
    try:
        return list(lexer)
    except ValueError:
        return []


def _expand(text: str, variables: Mapping[str, str]) -> str:
    """Expand variables. Script variables take precedence over environment variables."""

    def expand_match(match: re.Match[str]) -> str:
        if match["items"]:
            return variables.get(match["items"], _UNKNOWN)
        if match["other"]:
            return _UNKNOWN
        name = match["braced"] or match["plain"]
        if not name:
            return match[0]  # text in single quotes is not expanded
        text = variables.get(name, os.environ.get(name))
        if text is None or (not text and (match["how"] or "").startswith(":")):
            text = match["default"]
        return _UNKNOWN if text is None else text

    return _VARIABLE.sub(expand_match, text)
