"""Draws the diagrams in the documentation from text: every ``docs/pictures/NAME.txt`` becomes ``NAME.svg``.

``-`` and ``|`` with corners ``+`` become lines, and ``>``, ``<``, ``v`` and ``^`` at their ends become arrowheads. All
other characters are text. The first line of a file is ``# `` and the title. Run ``python docs/draw.py``.
"""

from __future__ import annotations

from html import escape
from pathlib import Path

PICTURES = Path(__file__).parent / "pictures"
_WIDTH, _HEIGHT = 9, 18  # size of a character in pixels
_STYLE = (
    "text{font:14px ui-monospace,monospace;fill:#37474f}path{stroke:#607d8b;stroke-width:1.5;fill:none}"
    "polygon{fill:#00897b}"
    "@media(prefers-color-scheme:dark){text{fill:#cfd8dc}path{stroke:#90a4ae}polygon{fill:#4db6ac}}"
)
#: Arrow -> offset (column, row) of the character where its line ends, and the corners of its head.
_ARROWS = {
    ">": ((-1, 0), ((0, -4), (9, 0), (0, 4))),
    "<": ((1, 0), ((9, -4), (0, 0), (9, 4))),
    "v": ((0, -1), ((0.5, -5), (8.5, -5), (4.5, 5))),
    "^": ((0, 1), ((0.5, 5), (8.5, 5), (4.5, -5))),
}


def picture_of(text: str, title: str) -> str:
    """Convert a drawing from text to SVG."""
    rows = text.rstrip("\n").split("\n")
    columns = max(map(len, rows))

    def at(column: int, row: int) -> str:
        return rows[row][column] if 0 <= row < len(rows) and 0 <= column < len(rows[row]) else " "

    drawn: list[str] = []
    taken: set[tuple[int, int]] = set()
    for row in range(len(rows)):
        for column in range(columns):
            sign = at(column, row)
            x, y = column * _WIDTH + _WIDTH / 2, row * _HEIGHT + _HEIGHT / 2
            level = [at(column - 1, row), at(column + 1, row)]
            upright = [at(column, row - 1), at(column, row + 1)]
            half = ""
            if sign == "-" and any(each in "-+<>" for each in level):
                half = f"M{x - _WIDTH / 2:g} {y:g}h{_WIDTH}"
            elif sign == "|" and any(each in "|+v^" for each in upright):
                half = f"M{x:g} {y - _HEIGHT / 2:g}v{_HEIGHT}"
            elif sign == "+" and (any(each in "-<>" for each in level) or any(each in "|v^" for each in upright)):
                half += f"M{x:g} {y:g}h{-_WIDTH / 2:g}" if level[0] in "-<" else ""
                half += f"M{x:g} {y:g}h{_WIDTH / 2:g}" if level[1] in "->" else ""
                half += f"M{x:g} {y:g}v{-_HEIGHT / 2:g}" if upright[0] in "|^" else ""
                half += f"M{x:g} {y:g}v{_HEIGHT / 2:g}" if upright[1] in "|v" else ""
            elif sign in _ARROWS:
                (dx, dy), corners = _ARROWS[sign]
                if at(column + dx, row + dy) in "-|+":
                    points = " ".join(f"{column * _WIDTH + px:g},{y + py:g}" for px, py in corners)
                    drawn.append(f'<polygon points="{points}"/>')
                    taken.add((column, row))
            if half:
                drawn.append(f'<path d="{half}"/>')
                taken.add((column, row))
    for row, line in enumerate(rows):
        words, start = "", 0
        for column in [*range(len(line)), len(line)]:
            sign = " " if column == len(line) or (column, row) in taken else line[column]
            is_end = column == len(line) or (sign == " " and (words.endswith(" ") or (column, row) in taken))
            if is_end and words.strip():
                y = row * _HEIGHT + 14
                drawn.append(
                    f'<text x="{start * _WIDTH}" y="{y}" textLength="{len(words.rstrip()) * _WIDTH}">'
                    f"{escape(words.rstrip())}</text>"
                )
                words = ""
            elif is_end:
                words = ""
            else:
                if not words.strip():
                    words, start = "", column
                words += sign
    size = f"{columns * _WIDTH} {len(rows) * _HEIGHT}"
    body = "\n".join(drawn)
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {size}" role="img"><title>{escape(title)}</title>\n'
        f"<style>{_STYLE}</style>\n{body}\n</svg>\n"
    )


def main() -> None:
    """Write the SVG file of every drawing."""
    for source in sorted(PICTURES.glob("*.txt")):
        first, _, rest = source.read_text(encoding="utf-8").partition("\n")
        if first.startswith("# "):
            source.with_suffix(".svg").write_text(picture_of(rest, first[2:]), encoding="utf-8")


if __name__ == "__main__":
    main()
