"""Runs one rank of a test program, under a launcher: ``python rank_program.py FOLDER [FAULT ...]``.

Each ``FAULT`` is ``RANK:KIND`` and affects that rank, or all ranks if ``RANK`` is ``*``:

- ``early`` exits before the ranks join a group.
- ``raise``, ``kill``, ``stop`` (SIGSTOP) and ``exit`` occur in the second step.
- ``slow`` runs steps until a stop request. ``hang`` waits a minute after the last step.
- ``differs`` gives the rank a different config. ``notice`` sends a message to rank 0.
- ``patient`` waits up to a minute for other ranks, instead of two seconds.
"""

from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path

from megatrain.ranks.collectives import check_same
from megatrain.ranks.group import RankGroup
from megatrain.ranks.record import Consensus, StepRecord
from megatrain.ranks.table import DistributedConfig
from megatrain.run.signals import RunSignals

NUM_STEPS = 4


def main() -> None:
    """Run steps until the last step or a stop request. Exit with 75 after a stop."""
    folder, rank = Path(sys.argv[1]), os.environ["RANK"]
    faults = {way.partition(":")[2] for way in sys.argv[2:] if way.partition(":")[0] in (rank, "*")}
    if "early" in faults:
        sys.exit(7)
    group = RankGroup.from_environment()
    try:
        group.rendezvous()
        group.join("cpu", DistributedConfig(timeout="60s" if "patient" in faults else "2s"))
        if "differs" in "".join(sys.argv[2:]):
            check_same(group.gather, "config", {"lr": "2" if "differs" in faults else "1"}, "Give all the same files")
        (folder / f"pid{rank}").write_text(str(os.getpid()))
        code = steps(group, folder, faults)
    except BaseException as error:
        group.fail(str(error) or type(error).__name__, 4, is_own=not isinstance(error, RuntimeError))
    group.end(code)


def steps(group: RankGroup, folder: Path, faults: set[str]) -> int:
    """Run steps, and return the exit code."""
    if "notice" in faults:
        group.notify("the drive is full")
    group.listen(on_notice=lambda text: print(text, flush=True))
    with RunSignals(stops_after_step=True) as signals:
        consensus, step = Consensus(group, lambda: StepRecord(signals.stop_requested)), 0
        while step < NUM_STEPS or "slow" in faults:
            if step == 1:
                cause_faults(faults)
            if step == 2:
                (folder / f"at_step_2_{group.world.rank}").touch()
            consensus.gather_records(StepRecord(), is_due=False)
            step += 1
            if consensus.must_stop:
                print(f"stopped after step {step}", flush=True)
                return 75
            time.sleep(0.02 if "slow" in faults else 0.0)
    if "hang" in faults:
        time.sleep(60)
    if "notice" in "".join(sys.argv[2:]):
        time.sleep(1.0)  # give rank 0 time to print the message
    return 0


def cause_faults(faults: set[str]) -> None:
    """Cause the requested faults of the second step."""
    if "raise" in faults:
        raise ValueError("the rows are wrong")
    if "exit" in faults:
        os._exit(9)
    for way, number in (("kill", signal.SIGKILL), ("stop", signal.SIGSTOP)):
        if way in faults:
            os.kill(os.getpid(), number)


if __name__ == "__main__":
    main()
