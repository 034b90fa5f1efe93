"""Agreement of all ranks after a step. If one rank received a request to stop or save, all ranks follow it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import psutil

from megatrain.engine.ranked import parts_of_program
from megatrain.plan.plan import Plan
from megatrain.ranks.collectives import check_same
from megatrain.ranks.group import RankGroup
from megatrain.ranks.record import Agreed, StepRecord
from megatrain.run.signals import RunSignals
from megatrain.training.start import describe_model
from megatrain.training.step_report import StepUsage

__all__ = ["Consensus", "check_ranks_agree"]


def check_ranks_agree(plan: Plan, config: Mapping[str, Any], group: RankGroup) -> None:
    """Check that all ranks have the same config, model and program. This is a collective.

    Args:
        config: All values of the config, by key.

    Raises:
        WorldError: The ranks differ. The message contains the difference.
    """
    if group.world.is_single:
        return
    check_same(group.gather, "config", config, "Give all ranks the same files and options")
    model = {name: str(value) for name, value in describe_model(plan).items()}
    check_same(group.gather, "model", model, "Give all ranks the same model folder, and the same kind of machine")
    # Ranks match collectives by their order, which is the order of ticks. Micro-batches and homes can differ.
    check_same(group.gather, "program of a step", parts_of_program(plan.program, plan.run.batch.num_micro_batches))


class Consensus:
    """Decides whether a run stops or saves after a step.

    A single process reads its signals at any time. Several ranks use the records that they gathered at the end of the
    last step, so that all ranks make the same decision.
    """

    def __init__(self, group: RankGroup, signals: RunSignals) -> None:
        self._group, self._signals, self._agreed = group, signals, Agreed()

    @property
    def stops(self) -> bool:
        """Whether the run ends after the current step."""
        return self._signals.stop_requested if self._group.world.is_single else self._agreed.stops

    @property
    def is_hung_up(self) -> bool:
        """Whether the terminal of any rank was closed."""
        return self._signals.is_hung_up or self._agreed.is_hung_up

    @property
    def saves_at_once(self) -> bool:
        """Whether a signal requests a checkpoint from a single process, even after the last step."""
        return self._group.world.is_single and self._signals.save_requested

    def is_due(self, is_due_here: bool) -> bool:
        """Return whether a checkpoint is due. Several ranks use their records, because their clocks may disagree."""
        return is_due_here if self._group.world.is_single else self._agreed.saves

    def agree_to_stop(self) -> bool:
        """Return whether the run must end because any rank received a stop request. This is a collective."""
        if not self._group.world.is_single:
            stops = any(self._group.gather(self._agreed.stops or self._signals.stop_requested))
            self._agreed = replace(self._agreed, stops=stops)
        return self.stops

    def agree(self, usage: StepUsage, *, is_due: bool, is_paused: bool) -> Sequence[StepRecord]:
        """Gather and return all ranks' records at the end of a step. Empty for a single process. This is a collective.

        Args:
            is_due: Whether the config requests a checkpoint. Only rank 0's value is used.
            is_paused: Whether this rank waits for space on a drive.
        """
        if self._group.world.is_single:
            return ()
        records = self._group.gather(
            StepRecord(
                stops=self._signals.stop_requested,
                saves=self._signals.save_requested or (self._group.world.is_first and is_due),
                is_hung_up=self._signals.is_hung_up,
                is_paused=is_paused,
                step_s=usage.step_s,
                tier_used_bytes={name: tier.used_bytes for name, tier in usage.moved.tiers.items()},
                stall_s=dict(usage.moved.stall_s),
                link_bytes=usage.links.num_bytes,
                written_bytes=dict(usage.moved.written_bytes),
                rss_bytes=psutil.Process().memory_info().rss,
            )
        )
        self._agreed = Agreed.of(records)
        return records
