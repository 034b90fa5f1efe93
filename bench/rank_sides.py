"""Rank processes for `ranks.py`, which run and time the same steps together on this machine."""

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

#: Time limit for all steps of a rank, so that a hanging rank does not block the bench.
TIMEOUT_S = 1200.0
LR = 1e-4


@dataclass(frozen=True)
class RankSteps:
    """Measurements that one rank returns.

    Attributes:
        times: Times of the measured steps.
        losses: Losses of all steps.
        norms: Gradient norms of all steps, before clipping.
        moved: Bytes moved by all steps and the final update, by link.
        planned: Planned bytes for the same work, by link.
    """

    times: Sequence[StepTimes]
    losses: Sequence[float]
    norms: Sequence[float]
    moved: dict[str, int]
    planned: dict[str, int]


class RankSide(Ours):
    """Our engine on one rank, or in a single process."""

    def moved_bytes(self) -> dict[str, int]:
        """Return the bytes that all steps moved over each link, including links between ranks."""
        links = {link for window in self.windows for link in window.links}
        moved = {link: sum(window.links[link].num_bytes for window in self.windows) for link in links}
        return {**moved, **self._engine.moved_bytes}


def run_world(
    folder: Path, config: RunConfig, num_hosts: int, per_host: int, num_warm: int, num_steps: int
) -> list[RankSteps]:
    """Run a few steps on all ranks, and return each rank's measurements.

    Args:
        folder: Folder for the file that the ranks use for their rendezvous.
        config: Config of the run. Each rank uses separate folders within the configured folders.
        num_hosts: Number of simulated hosts.
        per_host: Number of ranks per host.
        num_warm: Number of warm-up steps.
        num_steps: Number of measured steps.

    Raises:
        RuntimeError: A rank failed, or did not end in time.
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
