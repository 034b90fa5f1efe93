"""Exports a finished run's model, with the trained weights or the weights of the best evaluation."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from megatrain.base.names import FINAL_NAME
from megatrain.base.progress import Activity
from megatrain.checkpoint.best import BestEvaluation, BestSpec
from megatrain.converters.adapters import adapters_of, export_adapter
from megatrain.models.converter import WeightSource
from megatrain.models.export import export_dtype, export_model
from megatrain.models.passthrough import PASSTHROUGH_CHECKSUM
from megatrain.plan.plan import Plan
from megatrain.ranks.group import RankGroup
from megatrain.run.signals import RunSignals
from megatrain.training.export import export_checkpoint
from megatrain.training.weights import ExportStopped, GatheredWeights, Weights

__all__ = ["FinalExport", "check_merge"]


def check_merge(plan: Plan) -> None:
    """If the config requests a merge, check that the adapters can be merged into the model.

    Raises:
        ExportTargetError: A module with an adapter shares its weight with a different module.
    """
    if plan.run.export.merge and (adapters := adapters_of(plan.graph)) is not None:
        adapters.check_merge(plan.graph)


@dataclass(frozen=True, slots=True)
class FinalExport:
    """Export to ``output_dir/final``, unit by unit. All ranks must call ``write``, but only rank 0 writes files.

    Attributes:
        weights: The trained weights in the store.
        signals: Signals of the run. A stop request ends the export.
        activity: Progress shared with a live view.
        on_message: Called with messages for the user.
    """

    plan: Plan
    weights: Weights
    group: RankGroup
    signals: RunSignals
    activity: Activity
    on_message: Callable[[str], None]

    def write(self, step: int, best: BestEvaluation | None, spec: BestSpec) -> Path:
        """Write the folder and return its path.

        Args:
            step: Number of finished steps.
            best: Best evaluation, or None.
            spec: Rule that decides whether the best evaluation's model is exported, and with which weights.

        Raises:
            ExportStopped: A stop was requested while several ranks were exporting. All ranks raise this error.
            KeyboardInterrupt: A stop was requested.
            ExportError: The folder cannot be written.
        """
        if spec.is_kept and best is not None and (spec.is_average or best.step != step):
            return self._run_on_first_rank(partial(self._write_saved, best, is_average=spec.is_average))
        if self.group.world.is_single:
            return self._write_trained(self.weights.export_reader, step)
        gathered_weights = GatheredWeights(self.weights, self.plan, self.group, lambda: self.signals.stop_requested)
        if self.group.world.is_first:
            with gathered_weights.end_serving_on_exit():
                return self._write_trained(gathered_weights.export_reader, step)
        if not gathered_weights.serve():
            raise ExportStopped
        return self._folder

    @property
    def _folder(self) -> Path:
        return self.plan.run.output_dir / FINAL_NAME

    def _run_on_first_rank(self, export: Callable[[], Path]) -> Path:
        """On rank 0, run an export that reads only files. All other ranks wait for it."""
        if self.group.world.is_single:
            return export()
        folder: Path | None = None
        if self.group.world.is_first:
            with contextlib.suppress(KeyboardInterrupt):
                if not self.signals.stop_requested:
                    self.signals.end_steps()  # a stop request now raises KeyboardInterrupt
                    folder = export()
        folder = self.group.broadcast(folder)
        if folder is None:
            raise ExportStopped
        return folder

    def _write_saved(self, best: BestEvaluation, *, is_average: bool) -> Path:
        """Write the best evaluation's model from its checkpoint."""
        run = self.plan.run
        subject = "the average of the weights" if is_average else "the model"
        self.on_message(f"exporting {subject} of step {best.step}, the best one: {best.metric} {best.value:.4f}")
        return export_checkpoint(
            run.output_dir,
            self._folder,
            step=best.step,
            dtype=export_dtype(run.export, run.dtype),
            max_shard_size=run.export.max_shard_size,
            merge=run.export.merge,
            ema=is_average,
            overwrite=True,
            on_progress=lambda unit, done, total: self.activity.set_bytes(done, total),
        )

    def _write_trained(self, weights: WeightSource, step: int) -> Path:
        """Export the weights in the store, either as a complete model or as adapters."""
        run = self.plan.run
        dtype = export_dtype(run.export, run.dtype)
        tokenizer, record = Path(run.model.tokenizer_folder), {"step": step}
        if adapters_of(self.plan.graph) is not None and not run.export.merge:
            return export_adapter(
                self.plan.graph,
                weights,
                self._folder,
                base_model=run.model.name,
                dtype=dtype,
                copy_from=tokenizer,
                record=record,
            )
        return export_model(
            self.plan.graph,
            weights,
            self._folder,
            dtype=dtype,
            max_shard_nbytes=run.export.max_shard_size,
            copy_from=tokenizer,
            record=record,
            origin=self.weights.source.origin,
            passthrough_checksum=self.weights.passthrough.get(PASSTHROUGH_CHECKSUM),
            on_bytes=self.activity.set_bytes,
        )
