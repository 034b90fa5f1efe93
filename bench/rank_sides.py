"""A world of ranks for `ranks.py`: processes of this machine that run the same steps together and are timed."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import traceback
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import islice
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import torch

from bench.sides import Ours, StepTimes, batches
from megatrain.config.schema import RunConfig
from megatrain.plan.planner import plan_run
from megatrain.plan.together import plan_together
from megatrain.ranks.collectives import Collectives
from megatrain.ranks.world import World, init
from megatrain.training.resolve import resolve

#: Limit for all steps of a rank, so that a hanging rank does not block the bench.
TIMEOUT_S = 1200.0
LR = 1e-4


@dataclass(frozen=True)
class RankSteps:
    """Figures of one rank.

    Attributes:
        times: of the measured steps.
        losses: of all steps. norms: of all steps, before clipping.
        moved: by link, bytes of all steps and the update after them. planned: the planned bytes of the same.
    """

    times: Sequence[StepTimes]
    losses: Sequence[float]
    norms: Sequence[float]
    moved: dict[str, int]
    planned: dict[str, int]


class RankSide(Ours):
    """A rank, or a single process."""

    def moved_bytes(self) -> dict[str, int]:
        """Return the bytes that crossed each link over all steps, also between ranks."""
        links = {link for window in self.windows for link in window.links}
        moved = {link: sum(window.links[link].num_bytes for window in self.windows) for link in links}
        return {**moved, **self._engine.moved_bytes}


def run_world(
    folder: Path, config: RunConfig, num_hosts: int, per_host: int, num_warm: int, num_steps: int
) -> list[RankSteps]:
    """Return the figures of each rank over a few steps.

    Args:
        folder: for the meeting place of the ranks.
        config: of the run; every rank has separate folders in it.
        num_hosts: hosts that the ranks assume.
        per_host: ranks of each host.
        num_warm: steps that are not measured.
        num_steps: measured steps.

    Raises:
        RuntimeError: a rank failed, or did not end in time.
    """
    size = num_hosts * per_host
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["bench.rank_sides", "transformers.models.llama.modeling_llama"])
    ends: dict[Connection, int] = {}
    processes = []
    meeting = folder / f"meeting{num_hosts}x{per_host}-{os.urandom(4).hex()}"
    for rank in range(size):
        own, other = context.Pipe(duplex=False)
        arguments = (World.local(rank, size, num_hosts), str(meeting), other, config, num_warm, num_steps)
        processes.append(context.Process(target=_run_rank, args=arguments))
        processes[-1].start()
        other.close()
        ends[own] = rank
    found: dict[int, RankSteps] = {}
    try:
        while ends:
            ready = wait(list(ends), timeout=TIMEOUT_S)
            if not ready:
                raise RuntimeError(f"ranks {sorted(ends.values())} of {size} said nothing for {TIMEOUT_S:.0f} s")
            for end in ready:
                assert isinstance(end, Connection)
                rank = ends.pop(end)
                answer = pickle.loads(end.recv_bytes())
                if isinstance(answer, str):
                    raise RuntimeError(f"rank {rank} of {size}: {answer}")
                found[rank] = answer
    finally:
        for process in processes:
            process.kill()
            process.join()
        meeting.unlink(missing_ok=True)
    return [found[rank] for rank in range(size)]


def _run_rank(world: World, meeting: str, answer: Connection, *arguments: Any) -> None:
    torch.set_num_threads(1)
    try:
        init(world, torch.device("cpu"), torch.distributed.FileStore(meeting, world.size))
        answer.send_bytes(pickle.dumps(_steps(world, *arguments)))
    except BaseException:
        answer.send_bytes(pickle.dumps(traceback.format_exc()))
    answer.close()
    os._exit(0)  # destroying a gloo group can deadlock


def _steps(world: World, config: RunConfig, num_warm: int, num_steps: int) -> RankSteps:
    run = replace(resolve(config), world=world)
    plan = plan_run(run) if world.is_single else plan_together(run, Collectives().gather_objects)
    with ExitStack() as stack:
        side = stack.enter_context(RankSide(config, num_warm + num_steps, plan=plan))
        times = [side.step(batch, LR) for batch in islice(batches(config), num_warm + num_steps)]
        side.finish()
        losses, norms = [each.loss for each in times], [each.grad_norm for each in times]
        return RankSteps(times[num_warm:], losses, norms, side.moved_bytes(), side.planned_bytes())
