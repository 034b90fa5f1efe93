"""Preference task (``task = "dpo"``), for DPO and related losses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields
from typing import TYPE_CHECKING, Any

from megatrain.engine.micro_batches import shifted_labels
from megatrain.tasks.preference import CollectedExamples, PreferenceLoss
from megatrain.tasks.reference import RECORD, Reference
from megatrain.tasks.task import Gather, MicroBatches, PrepareContext, RowFinding, SetMetrics

if TYPE_CHECKING:
    from torch import Tensor

    from megatrain.data.token_dataset import TokenDataset
    from megatrain.engine.forward import LayerRunner
    from megatrain.engine.head.loss import Loss
    from megatrain.engine.table import TrainingConfig
    from megatrain.tasks.table import PreferenceConfig

__all__ = ["PreferenceTask"]

_Answers = Sequence[tuple[Mapping[str, "Tensor"], Sequence[float]]]


class PreferenceTask:
    """``Task`` that trains on preferred, rejected or labelled answers, usually relative to the initial model."""

    def __init__(self, loss: Loss) -> None:
        assert isinstance(loss, PreferenceLoss), loss
        self._loss = loss

    @staticmethod
    def make_loss(training: TrainingConfig | None, table: PreferenceConfig) -> PreferenceLoss:
        """Return the preference loss that ``[preference]`` configures."""
        return PreferenceLoss(**{field.name: getattr(table, field.name) for field in fields(PreferenceLoss)})

    @staticmethod
    def findings(table: PreferenceConfig, dataset: TokenDataset) -> Sequence[RowFinding]:
        """Return the number of examples, a warning if all labels are equal, and a note if answers must be scored."""
        loss = PreferenceTask.make_loss(None, table)
        notes = [RowFinding("ok", f"{dataset.kind.summary(dataset.roles)} for {loss.loss_type}")]
        if not loss.is_paired and len(set(dataset.roles[::2].tolist())) < 2:
            notes.append(RowFinding("warning", "all answers have the same label, but the loss learns from differences"))
        if loss.needs_reference:
            text = f"before its first step, `run` scores all {len(dataset):,} answers once with the initial model"
            notes.append(RowFinding("note", text))
        return notes

    def accumulator(self) -> PreferenceMetrics:
        """Return an accumulator for the metrics of a set's examples."""
        return PreferenceMetrics(self._loss)

    def prepare(self, context: PrepareContext) -> Mapping[str, Any]:
        """Add the reference model's log-probabilities to the loaders if the loss needs them."""
        if not self._loss.needs_reference:
            return {}
        reference = Reference(
            context.plan,
            context.store,
            activity=context.activity,
            on_message=context.on_message,
            saved_checksums=None if context.resumed_record is None else context.resumed_record.get(RECORD, {}),
            group=context.group,
        )
        reference.fill_loaders(context.loaders)
        return {RECORD: reference.record}


class PreferenceMetrics:
    """``MetricAccumulator`` for a set's examples. It computes the loss and TRL's metrics."""

    def __init__(self, loss: PreferenceLoss) -> None:
        self._loss, self._collected, self._num_passes = loss, CollectedExamples(), 0

    def head(self, runner: LayerRunner, micro_batches: MicroBatches) -> _Answers:
        """Return each micro-batch with the log-probabilities of its answers."""
        return list(zip(micro_batches, runner.log_probs(micro_batches), strict=True))

    def add(self, result: _Answers) -> None:
        """Add the result of ``head`` for one pass."""
        for batch, logps in result:
            self._collected.add(batch, shifted_labels(batch["labels"]), logps, pass_index=self._num_passes)
        self._num_passes += 1

    def compute(self, gather: Gather[CollectedExamples]) -> SetMetrics:
        """Return the loss and metrics over the examples of all ranks."""
        loss, num_tokens, metrics = CollectedExamples.join(gather(self._collected)).compute(self._loss)
        return SetMetrics(loss, num_tokens, metrics)
