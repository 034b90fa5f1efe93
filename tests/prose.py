"""Counts odd phrases, which often need a second reading, in documentation, comments and messages.

``python tests/prose.py FOLDER`` prints each occurrence. An occurrence can be correct, but the count must not grow.
"""

from __future__ import annotations

import ast
import functools
import io
import re
import sys
import tokenize
from collections.abc import Iterator
from pathlib import Path

#: Odd phrase -> its replacement.
PHRASES = {
    r"(?:^|(?<=[.:!?] ))(?:What|Whatever|Whoever|Of|Where|Those that|That which|As many|So many) (?!.*\?)": "a noun",
    r"\b(?:that|those) of\b": "the noun again",
    r"\b(?:goes|go|went|going|gone) on\b": "continue, resume",
    r"\b(?:is|are|was|were) there(?=[,.;:)])": "exist",
    r"\b(?:is|are|was|were|be|been) (?:told|said)\b|\btells?\b": "log, report, print, return, raise",
    r"\bbeside\b": "next to, in addition to, during",
    r"\b(?:nobody|somebody|whoever)\b": "the user, the caller, the thread",
    r"\b(?:so|as) many\b(?! as\b)": "the number of",
    r"\b(?:anew|for want of|shall|thereof|wherein|whereof)\b": "again, because there is no",
    r"\bof (?:its|one's|their) own\b|\bours\b": "the name of the object",
    r"\b(?:makes? way|takes? turns|stands? for|to be had)\b": "is evicted, alternate, represents",
    r"\blook(?:s|ed|ing)? at\b": "read, check",
    r"\bin all\b|\bin the end\b": "total, finally",
    r"\bNone: |\bnone (?:where|is)\b": "None if ...",
    r"(?:, too|\bas well)[.;]": "also, before the verb",
}
_ODD = re.compile("|".join(f"(?:{phrase})" for phrase in PHRASES))


def places(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (line, phrase) for each odd phrase of a Markdown or Python file."""
    text = path.read_text(encoding="utf-8")
    for number, prose in _markdown(text) if path.suffix == ".md" else _python(text):
        for found in _ODD.finditer(prose):
            yield number, found[0].strip()


def _markdown(text: str) -> Iterator[tuple[int, str]]:
    is_code = False
    for number, line in enumerate(text.splitlines(), 1):
        if line.lstrip().startswith("```"):
            is_code = not is_code
        elif not is_code and not line.startswith("    "):
            yield number, re.sub(r"`[^`]*`", "x", line.lstrip("|*-# "))


@functools.cache
def parse(text: str) -> ast.Module:
    """Parse a Python file. ``tests.house`` reads the same files."""
    return ast.parse(text)


def _python(text: str) -> Iterator[tuple[int, str]]:
    """Yield (line number, text) of comments, and of each line in strings of five or more words, such as messages."""
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string.lstrip("#: ")
    for node in ast.walk(parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and len(node.value.split()) >= 5:
            for number, line in enumerate(node.value.splitlines()):
                yield node.lineno + number, re.sub(r"`[^`]*`", "x", line.strip())


def count(folder: Path) -> int:
    """Return the number of odd phrases in the files of a folder, or in one file."""
    files = [folder] if folder.is_file() else sorted(path for kind in ("*.md", "*.py") for path in folder.rglob(kind))
    return sum(1 for path in files if path != Path(__file__) for _ in places(path))


if __name__ == "__main__":
    for name in sys.argv[1:]:
        for path in [Path(name)] if Path(name).is_file() else sorted(Path(name).rglob("*.*")):
            if path.suffix in (".md", ".py"):
                for number, phrase in places(path):
                    print(f"{path}:{number}: {phrase}")
