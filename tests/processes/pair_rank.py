"""Runs one rank of a test in tests/pairs: ``python pair_rank.py CONFIG CUT STOP_AFTER FOLDER``."""

from __future__ import annotations

import os
import pickle
import sys
import traceback
from pathlib import Path

from megatrain.config import load_config
from megatrain.ranks.group import RankGroup


def main() -> None:
    """Train as one rank, and write the observations to ``FOLDER/<rank>.pickle``."""
    from pairs.runs import train_here

    path, cut, stop_after, folder = sys.argv[1:]
    group = RankGroup.from_environment()
    group.rendezvous()
    try:
        config = load_config(Path(path)).config
        group.join(config.device, config.distributed)
        end = train_here(Path(path), cut, int(stop_after) or None, group)
        Path(folder, f"{group.world.rank}.pickle").write_bytes(pickle.dumps(end))
        if end.needs:
            group.fail("it does not fit", 3, is_own=True)
    except BaseException as error:
        group.fail(f"{error}\n{traceback.format_exc()}", 1, is_own=True)
    group.end(0)


if __name__ == "__main__":
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "ERROR")
    main()
