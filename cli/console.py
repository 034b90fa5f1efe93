"""Helpers for text on a rich console: its width, wrapped lines, and tables."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from .terminal import env_columns, wrap_words

PLAIN_WIDTH = 140  # columns of tables in files, so that notes fit on one line


def set_text_width(console: Console) -> Console:
    """Set a console's width to ``COLUMNS``, the terminal's width, or ``PLAIN_WIDTH`` for a file or pipe."""
    # If the width is 0, rich prints nothing.
    console.width = env_columns() or (console.width if console.is_terminal else 0) or PLAIN_WIDTH
    return console


def print_line(console: Console, text: str, *, indent: int = 7, style: str = "") -> None:
    """Print text of one or more lines, wrapped between words on a terminal or if ``COLUMNS`` is set.

    Args:
        indent: Indentation of continuation lines, in columns; usually the width of the name that starts the text.
    """
    if console.is_terminal or env_columns():
        text = "\n".join(wrap_words(text, console.width, indent=indent))
    console.print(Text(text, style=style), soft_wrap=True)


def plain_table(*, padding: tuple[int, int, int, int] = (0, 2, 0, 0), **options: Any) -> Table:
    """Return an empty table without borders, with two spaces between columns."""
    return Table(box=None, pad_edge=False, padding=padding, **options)


def nonzero_sizes(sizes: Mapping[str, int]) -> dict[str, int]:
    """Return the nonzero sizes, by name."""
    return {name: nbytes for name, nbytes in sizes.items() if nbytes}
