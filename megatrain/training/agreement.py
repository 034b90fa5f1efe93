"""What all ranks of a run do after a step: the same, whichever of them was asked to stop or to save."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import psutil

from megatrain.engine.ranked import parts_of_program
from megatrain.ranks.collectives import check_same
from megatrain.ranks.record import Agreed, StepRecord
from megatrain.training.start import describe_model

if TYPE_CHECKING:
    from megatrain.plan.plan import Plan
    from megatrain.ranks.group import RankGroup
    from megatrain.run.signals import RunSignals
    from megatrain.training.step_report import StepUsage

__all__ = ["Agreement", "check_alike"]


def check_alike(plan: Plan, config: Mapping[str, Any], group: RankGroup) -> None:
    """Make sure that all ranks have the same config, model and program. A collective.

    Args:
        config: Key -> value of the whole config.

    Raises:
        WorldError: names what differs.
    """
    if group.world.is_single:
        return
    check_same(group.gather, "config", config, "Give all ranks the same files and options")
    model = {name: str(value) for name, value in describe_model(plan).items()}
    check_same(group.gather, "model", model, "Give all ranks the same model folder, and the same kind of machine")
    # Collectives are matched by their order, which is that of the ticks. Micro-batches and homes may differ.
    check_same(group.gather, "program of a step", parts_of_program(plan.program, plan.run.batch.num_micro_batches))


class Agreement:
    """Whether a run stops or saves after its step.

    A run of one process asks its signals whenever it wants to know. Several ranks do what followed from the records
    that they gathered at the end of the last step, so that none waits for another that went another way.
    """

    def __init__(self, group: RankGroup, signals: RunSignals) -> None:
        self._group, self._signals, self._agreed = group, signals, Agreed()

    @property
    def stops(self) -> bool:
        """Whether the run ends after its step."""
        return self._signals.stop_requested if self._group.world.is_single else self._agreed.stops

    @property
    def is_hung_up(self) -> bool:
        """Whether the terminal of a rank was closed."""
        return self._signals.is_hung_up or self._agreed.is_hung_up

    @property
    def saves_at_once(self) -> bool:
        """Whether a signal asks a run of one process for a checkpoint, also after its last step."""
        return self._group.world.is_single and self._signals.save_requested

    def is_due(self, is_due_here: bool) -> bool:
        """Return whether a checkpoint is due: a clock may say so to one rank and not yet to another."""
        return is_due_here if self._group.world.is_single else self._agreed.saves

    def agree_to_stop(self) -> bool:
        """Return whether the run is to end: whether any of its ranks was asked to by now. A collective."""
        if not self._group.world.is_single:
            stops = any(self._group.gather(self._agreed.stops or self._signals.stop_requested))
            self._agreed = replace(self._agreed, stops=stops)
        return self.stops

    def agree(self, usage: StepUsage, *, is_due: bool, is_paused: bool) -> Sequence[StepRecord]:
        """Gather records at the end of a step, and return those of all ranks; of one process none. A collective.

        Args:
            is_due: Whether the config asks for a checkpoint; the first rank's answer counts.
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
