"""Launches the ranks of a test program: ``python launch_program.py NUM_RANKS COMMAND ...``."""

from __future__ import annotations

import sys

from megatrain.ranks.launch import launch
from megatrain.ranks.watch import Failure


def tell(failure: Failure) -> None:
    """Print the failure to stderr, as the command ``run`` does."""
    print(f"error: {failure}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(launch([sys.executable, *sys.argv[2:]], int(sys.argv[1]), threads=1, on_failure=tell))
