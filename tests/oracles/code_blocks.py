"""Fenced code blocks in the documentation, and the shell commands in these blocks."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    {
        *(ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md")),
        *(ROOT / name for name in ("examples/README.md", "bench/README.md")),
        *(ROOT / "docs").rglob("*.md"),
    }
)
NAMES = [page.relative_to(ROOT).as_posix() for page in PAGES]
SHELLS = ("sh", "bash", "console")
LANGUAGES = (*SHELLS, "python", "toml", "json", "text")
_MARK = re.compile(r"<!-- not executed: (\S.*) -->")
_SEPARATORS = {";", "&&", "||", "|", "&", "(", ")"}
_WORDS_OF_THE_SHELL = {"while", "do", "done", "if", "then", "fi"}


@dataclass(frozen=True)
class Block:
    """Fenced code block.

    Attributes:
        page, line: Path of the page, and line number of the opening fence.
        language: Info string of the fence.
        text: Contents of the block.
        reason: Reason why tests do not execute the block, from the comment above it, or "".
    """

    page: str
    line: int
    language: str
    text: str
    reason: str

    def __str__(self) -> str:
        return f"{self.page}:{self.line}"


@dataclass(frozen=True)
class Command:
    """Simple command in a shell block: its words, and the comment at the end of its line."""

    words: tuple[str, ...]
    comment: str

    def __str__(self) -> str:
        return shlex.join(self.words)


def blocks_of(page: str) -> list[Block]:
    """Return the fenced code blocks of a page.

    Raises:
        AssertionError: The page has indented code, an indented or ``~~~`` fence, or an unclosed block.
    """
    found: list[Block] = []
    inside: list[str] | None = None
    start, language, reason, before = 0, "", "", ""
    for number, line in enumerate((ROOT / page).read_text(encoding="utf-8").splitlines(), 1):
        if inside is not None and line.startswith("```"):
            found.append(Block(page, start, language, "\n".join(inside) + "\n", reason))
            inside = None
        elif inside is not None:
            inside.append(line)
        elif line.lstrip().startswith(("```", "~~~")):
            assert line.startswith("```"), f"{page}:{number}: write fences as ``` at the start of a line"
            mark = _MARK.fullmatch(before.strip())
            inside, start, language, reason = [], number, line[3:].strip(), mark[1] if mark else ""
        else:
            assert not (line.startswith("    ") and not before.strip()), f"{page}:{number}: code without a fence"
        before = line
    assert inside is None, f"{page}:{start}: a block without an end"
    return found


def commands_of(block: Block) -> Iterator[Command]:
    """Yield the simple commands of a shell block. In a console block, only lines with a prompt are commands."""
    for line in block.text.splitlines():
        if block.language == "console":
            if not line.startswith("$ "):
                continue
            line = line[2:]
        code, comment = _without_comment(line)
        lexer = shlex.shlex(code, posix=True, punctuation_chars=True)
        lexer.whitespace_split, lexer.commenters = True, ""
        words: list[str] = []
        for word in [*lexer, ";"]:
            if word in _SEPARATORS:
                if words and words[0] != "[":
                    yield Command(tuple(words), comment)
                words = []
            elif words or word not in _WORDS_OF_THE_SHELL:
                words.append(word)


def _without_comment(line: str) -> tuple[str, str]:
    """Split a line into code and comment. A # inside quotes or inside a word does not start a comment."""
    quote = ""
    for position, letter in enumerate(line):
        if quote:
            quote = "" if letter == quote else quote
        elif letter in "'\"":
            quote = letter
        elif letter == "#" and (position == 0 or line[position - 1].isspace()):
            return line[:position].rstrip(), line[position + 1 :].strip()
    return line, ""
