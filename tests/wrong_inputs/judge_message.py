"""Runs the real command on a case, and checks its message: location, remedy, no traceback.

Every problem in a message must contain a remedy. Cases need not list the expected remedies. Each of these is a remedy:

- a clause that begins with an imperative from :data:`VERBS` ("Write ...", "Leave it out", "or install ...");
- a suggestion ("Did you mean ...?"), or the right table for a key ("here: data.max_length", "belongs in [data]");
- the valid values ("It must be at least 1", "Roles: system, user");
- the required capacity ("needs at least 4096").

A sentence that only states the mistake contains no remedy.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

from click.testing import CliRunner
from wrong_inputs.workplace import Workplace, WrongInput

from processes.saved_run import command_group

VERBS = (
    "Add", "Ask", "Check", "Choose", "Close", "Convert", "Copy", "De-quantize", "Download", "Fetch", "Fill", "Fix",
    "Free", "Give", "Install", "Keep", "Leave", "Lower", "Make", "Mount", "Name", "Put", "Raise", "Remove", "Rename",
    "Save", "Say", "Set", "Take", "Turn", "Use", "Wrap", "Write",
)  # fmt: skip
_REMEDIES = (
    re.compile(rf"(?:[.;:,!?)] |\bor |\bThen )(?:{'|'.join(VERBS)})\b"),
    re.compile(rf"(?:; |: |, or | or )(?:{'|'.join(VERBS).lower()})\b"),
    re.compile(r"Did you mean .+\?"),
    re.compile(r"here: [a-z_]+|not needed here|belongs (?:in \[|at the top)|belongs to \""),
    re.compile(r"It must be (?:at least|at most|above|below|a multiple of) "),
    re.compile(r"(?:Text needs quotes|Roles|Splits found|Supported files|In that folder): "),
    re.compile(r"needs at least \d+"),
)  # fmt: skip
_HEAD = re.compile(r"(?:error: )?(\d+) problems? in (.*)")


@dataclass(frozen=True)
class Answer:
    """Exit code and output of a command for one case.

    Attributes:
        code: Exit code.
        problems: Text of each problem.
        output: Everything that the command printed.
        crash: Uncaught exception, or "".
    """

    code: int
    problems: tuple[str, ...]
    output: str
    crash: str = ""


def has_remedy(problem: str) -> bool:
    """Return whether the text of a problem contains a remedy."""
    return any(pattern.search(problem) for pattern in _REMEDIES)


def command_line(command: str, work: Workplace) -> list[str]:
    """Return the command line for a case."""
    options = {"check": ["--json"], "plan": [], "run": ["--max-steps", "1"]}[command]
    return [command, str(work.config_path), *options, *work.words]


def ask(command: str, work: Workplace) -> Answer:
    """Run a command in this process, and return its answer."""
    result = CliRunner().invoke(command_group(), command_line(command, work))
    crash = "" if result.exception is None or isinstance(result.exception, SystemExit) else repr(result.exception)
    return read_answer(command, result.exit_code, result.stdout, result.stderr, crash)


def read_answer(command: str, code: int, stdout: str, stderr: str, crash: str = "") -> Answer:
    """Return the answer of a command, with the problems extracted from its output."""
    problems: list[str] = []
    if command == "check" and stdout.startswith("{"):
        problems = [each["text"] for each in json.loads(stdout)["findings"] if each["severity"] == "problem"]
    elif "error: " in stderr:
        problems = _split(stderr[stderr.index("error: ") + len("error: ") :])
    return Answer(code, tuple(problems), f"{stdout}\n{stderr}", crash)


def _split(message: str) -> list[str]:
    """Split a message into its problems. Each problem is prefixed with the file from the first line of the message."""
    first, *rest = message.rstrip().splitlines()
    head = _HEAD.fullmatch(first)
    if head is None:
        return [message.rstrip()]
    problems: list[str] = []
    for line in rest:
        if line.startswith("  ") and not line.startswith("   "):
            problems.append(f"{head[2]}: {line.strip()}")
        else:
            problems[-1] += f"\n{line}"
    assert len(problems) == int(head[1]), message
    return problems


def faults(case: WrongInput, answer: Answer, locus: Sequence[str]) -> list[str]:
    """Return the faults of an answer, or [] if it is good."""
    found = []
    if answer.crash or "Traceback" in answer.output or "internal error" in answer.output:
        found.append(f"a traceback: {answer.crash or answer.output}")
    if answer.code != case.code:
        found.append(f"exit code {answer.code}, not {case.code}")
    if not answer.problems:
        found.append("no problem is named")
    named = [problem for problem in answer.problems if all(part in problem for part in locus)]
    if not named:
        found.append(f"no problem names all of {list(locus)}")
    found += [f"no remedy in: {problem}" for problem in answer.problems if not has_remedy(problem)]
    return found
