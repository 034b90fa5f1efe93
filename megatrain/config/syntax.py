"""Problems in config files that are not TOML or not UTF-8, each with its line and remedy."""

from __future__ import annotations

import re
import tomllib

from megatrain.base.errors import Problem

_ERROR_LINE = re.compile(r"\(at line (\d+), column \d+\)|\(at end of document\)")
_LOOKS_LIKE_BARE_TEXT = re.compile(
    r"=\s*(?!true\b|false\b)([0-9.]*[A-Za-z][\w./%-]*|\.{0,2}/[\w./-]*|[0-9.]+%)\s*(#.*)?$"
)
_LOOKS_LIKE_YAML = re.compile(r"\s*(?:- *)?([A-Za-z_]\w*)\s*:(\s|$)")
_CURLY_QUOTES = ("\u2018", "\u2019", "\u201c", "\u201d")
_DUPLICATE_KEY = re.compile(r"cannot declare \((.*)\) twice|cannot overwrite a value|duplicate", re.IGNORECASE)
#: Remedies by part of the message from tomllib. The first match wins.
_REMEDIES = (
    ("unclosed array", "Close the list with ]"),
    ("unclosed inline table", "Close the table with }, on the same line"),
    ("invalid hex value", r"Write text with backslashes in single quotes: 'C:\Users'"),
    ("unescaped '\\'", r"Write text with backslashes in single quotes: 'C:\data'"),
    ("illegal character '\\n'", "Close the quotes on this line"),
    ('expected "\'"', "Close the quotes on this line"),
    ("expected '\"", "Close the quotes"),
    ("illegal character", "Remove the character"),
    ("at the end of a table declaration", "Write a table as [data] and an item of a list as [[data.train]]"),
    ("leading zero", "Write the number without leading zeros"),
    ("after a statement", "Write one KEY = VALUE on each line; only a # comment may follow it"),
)
_DEFAULT_REMEDY = 'Write each line as KEY = VALUE, for example seed = 42 or run_name = "mine", or as [TABLE]'


def toml_lines(text: str) -> list[str]:
    """Return the lines of a TOML text. ``str.splitlines`` would also split at characters that TOML allows in a line."""
    lines = text.replace("\r\n", "\n").split("\n")
    return lines if lines[-1] else lines[:-1]


def syntax_problem(source: str, text: str, error: tomllib.TOMLDecodeError) -> Problem:
    """Return the problem, with line and remedy, for a parse error from ``tomllib``."""
    error_text = str(error)
    match = _ERROR_LINE.search(error_text)
    lines = toml_lines(text)
    lineno = int(match[1]) if match and match[1] else len(lines) or None
    if "end of document" in error_text:
        lineno = _find_unclosed_quote(lines) or lineno
    message = _ERROR_LINE.sub("", error_text).strip().rstrip(".")
    message = message[:1].lower() + message[1:]
    line = lines[lineno - 1] if lineno is not None and 0 < lineno <= len(lines) else ""
    duplicate = _DUPLICATE_KEY.search(error_text)
    if duplicate is not None:
        name = ".".join(re.findall(r"'([^']*)'", duplicate[1])) if duplicate[1] else line.partition("=")[0].strip()
        name = name or line.strip()
        return Problem("", f"{name.strip('[] ')} is defined twice", "Keep one", source, lineno)
    return Problem("", f"this is not TOML: {message}", _remedy(error_text, line, lines), source, lineno)


def _find_unclosed_quote(lines: list[str]) -> int | None:
    """Return the number, from 1, of the last line with an unclosed quote. The parser reports only the file's end."""
    for lineno in range(len(lines), 0, -1):
        line = re.sub(r"\"(?:\\.|[^\"\\])*\"|'[^']*'|#.*", "", lines[lineno - 1])
        if "'" in line or '"' in line:
            return lineno
    return None


def _remedy(error_text: str, line: str, lines: list[str]) -> str:
    invisible_char = next((char for char in line if not char.isprintable() and char != "\t"), "")
    if invisible_char:
        return f"Remove the invisible character {invisible_char!a}"
    bare_text = _LOOKS_LIKE_BARE_TEXT.search(line)
    word = bare_text[1] if bare_text else ""
    pair = _LOOKS_LIKE_YAML.match(line)
    if word.lower() in ("true", "false"):
        return f"Write it in lower case: {word.lower()}"
    if word.lower() in ("none", "null"):
        return 'TOML has no null. Leave the key out, or write "none" if the key allows it'
    if word:
        return f'Text needs quotes: "{word}"'
    if any(quote in line for quote in _CURLY_QUOTES):
        return 'Write straight quotes: "'
    if pair is not None:
        return f"This looks like YAML. Write {pair[1]} = and the value, or translate a file: megatrain-tier import FILE"
    if next((part for part in lines if part.strip()), "").lstrip().startswith("{"):
        return "This looks like JSON. Write KEY = VALUE lines, or translate a file: megatrain-tier import FILE"
    if line.lstrip().startswith(("//", ";", "--")):
        return "Write # before a comment"
    if line.startswith(("<<<<<<<", "=======", ">>>>>>>")):
        return "Remove the conflict markers, and keep one of the versions between them"
    return next((remedy for part, remedy in _REMEDIES if part in error_text.lower()), _DEFAULT_REMEDY)


def encoding_problem(source: str, raw: bytes, error: UnicodeDecodeError) -> Problem:
    """Return the problem, with line and remedy, for a file that is not UTF-8."""
    line = raw[: error.start].count(b"\n") + 1
    byte = raw[error.start]
    return Problem("", f"the file is not UTF-8 text (byte 0x{byte:02x})", "Save it as UTF-8", source, line)
