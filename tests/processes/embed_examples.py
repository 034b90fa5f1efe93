"""Runs the programs in examples/python in several variants, with and without the lines that use megatrain.

python embed_examples.py NAME FOLDER plain in_ram unbroken stopped     # prints one JSON object per run
python embed_examples.py NAME FOLDER resumed
"""

from __future__ import annotations

import contextlib
import io
import json
import re
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from tiered import TieredStore

EXAMPLES = Path(__file__).parents[2] / "examples" / "python"
MARK = "# megatrain"
_WAS = re.compile(r"^( *)# was: ", flags=re.MULTILINE)


@dataclass(frozen=True)
class Program:
    """Command-line options of a program for a complete run, and for half of that run."""

    whole: tuple[str, ...]
    half: tuple[str, ...]


PROGRAMS = {
    "pytorch_optimizer": Program(("--steps", "8"), ("--steps", "4")),
    "pytorch_offload": Program(("--steps", "8"), ("--steps", "4")),
    "lightning_offload": Program(("--epochs", "2"), ("--epochs", "1")),
}


def source(name: str) -> str:
    """Return the source code of an example."""
    return (EXAMPLES / f"{name}.py").read_text(encoding="utf-8")


def marked_lines(text: str) -> list[str]:
    """Return the lines that end with ``# megatrain``, which marks additions."""
    return [line for line in text.splitlines() if line.endswith(MARK)]


def plain(text: str) -> str:
    """Return the program without the added lines, and with replaced lines restored."""
    kept = [line for line in text.splitlines() if not line.endswith(MARK)]
    return _WAS.sub(r"\1", "\n".join(kept) + "\n")


def in_ram(text: str) -> str:
    """Return the program with its RAM size increased, so that everything fits into RAM."""
    changed, count = re.subn(r'ram="\d+MiB"', 'ram="200MiB"', text)
    assert count == 1, text
    return changed


def run(name: str, text: str, options: Sequence[str]) -> dict[str, object]:
    """Run a program in this process. Return its losses, and the RAM capacity and peak RAM use of its store."""
    printed, before = io.StringIO(), sys.argv
    sys.argv = [f"{name}.py", *options]
    try:
        with contextlib.redirect_stdout(printed), _watched_stores() as stores:
            exec(compile(text, str(EXAMPLES / f"{name}.py"), "exec"), _main_module(name))
    finally:
        sys.argv = before
    result: dict[str, object] = {
        "losses": re.findall(r"^step \d+: (?:rank \d+: )?loss (\S+)$", printed.getvalue(), re.MULTILINE)
    }
    for store in stores:
        ram = store.stats().tiers["ram"]
        result |= {"ram_bytes": ram.capacity_bytes, "high_water_bytes": ram.high_water_bytes}
        store.close()
    return result


@contextlib.contextmanager
def _watched_stores() -> Iterator[list[TieredStore]]:
    """Yield a list that collects the stores opened in the context."""
    opened: list[TieredStore] = []
    construct = TieredStore.__init__

    def noted(self: TieredStore, *args: object, **options: object) -> None:
        construct(self, *args, **options)
        opened.append(self)

    TieredStore.__init__ = noted
    try:
        yield opened
    finally:
        TieredStore.__init__ = construct


def _main_module(name: str) -> dict[str, object]:
    return {"__name__": "__main__", "__file__": str(EXAMPLES / f"{name}.py")}


def main(name: str, folder: str, *runs: str) -> None:
    """Run variants of a program, each in a folder with the variant's name. Stopped and resumed runs share a folder."""
    text, program = source(name), PROGRAMS[name]
    for which in runs:
        variant = plain(text) if which == "plain" else in_ram(text) if which == "in_ram" else text
        output = Path(folder, "broken" if which in ("stopped", "resumed") else which)
        options = [*(program.half if which == "stopped" else program.whole), "--output", str(output)]
        found = run(name, variant, [*options, "--resume"] if which == "resumed" else options)
        print(json.dumps({"run": which, **found}), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
