"""Forward and backward of an unmodified model whose weights are streamed one unit at a time.

One pass over the model takes these steps:

1. `Trunk.prepare` replaces every parameter with a placeholder without memory, and every unit's `forward` with a stub.
2. Each micro-batch's forward starts in a greenlet and runs Hugging Face's own code until it calls a unit. The stub
  passes the call to the engine and suspends the forward (`suspend.py`).
3. When all micro-batches wait at the same unit, `UnitVisit.forward` leases and binds the weights, runs the unit for
  each micro-batch and releases the weights. `run_in_lockstep` resumes the forwards.
4. The forwards end at the cut before the head. `ChunkedHead` computes a few rows of logits at a time, and returns the
   gradients of the trunk's outputs (`head/`).
5. One `torch.autograd.backward` over the model's own graph reaches the visits in reverse. `UnitVisit.backward` leases
   the weights again, recomputes the unit and accumulates the gradients of its parameters.

Hugging Face's code determines the computation. The engine determines only when a unit's weights are in memory. In layer
order, all micro-batches run a unit before any of them reaches the next unit. Each direction of a step therefore fetches
each unit's weights once.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from megatrain.base.errors import UnsupportedModelError
from megatrain.base.progress import Activity
from megatrain.engine.device.host_io import read_numbers
from megatrain.engine.head.chunked_head import PassLosses
from megatrain.engine.head.cross_entropy import PLAIN
from megatrain.engine.head.cut_head import CutHead, ModelLoss
from megatrain.engine.head.head_model import TrunkOutput, without_auxiliary_loss
from megatrain.engine.head.head_plan import plan_head
from megatrain.engine.head.loss import MicroBatchLoss, PartialMean
from megatrain.engine.head.objective import Objective
from megatrain.engine.head.token_scores import TokenScores
from megatrain.engine.micro_batches import (
    LabelledRows,
    MicroBatches,
    count_labels,
    labelled_rows,
    shifted_labels,
    without_labels,
)
from megatrain.engine.program.visit_trace import KEEP_NOTHING, Recompute
from megatrain.engine.trunk import Trunk
from megatrain.engine.unit.bound_unit import BoundUnit
from megatrain.engine.unit.state import RandomStates
from megatrain.engine.unit.visit import VisitSequence

if TYPE_CHECKING:
    from megatrain.engine.program.block_access import BlockAccess
    from megatrain.engine.program.visit_trace import VisitTrace
    from megatrain.engine.unit.compiled_layers import LayerCompiler
    from megatrain.models.graph import ModelGraph


class NoTrainedTokensError(Exception):
    """Error for a step in which no token has a label."""


@dataclass(frozen=True, slots=True, eq=False)
class QueuedLoss:
    """Loss of one optimizer step, which the device may still be computing.

    Attributes:
        terms: Scalars on the compute device. The loss is their sum, added in order in double precision (decision 0099).
        metrics: Additional metrics that the loss reports.
    """

    terms: tuple[Tensor, ...]
    num_trained_tokens: int
    metrics: tuple[PartialMean, ...] = ()


@dataclass(frozen=True, slots=True)
class SummedLoss:
    """Summed cross entropy of an evaluation pass, and the number of labelled tokens.

    Attributes:
        terms: Sums over labelled tokens. `math.fsum` adds them exactly, so the grouping of tokens has no effect.
    """

    terms: tuple[float, ...]
    num_tokens: int


@dataclass(frozen=True, slots=True)
class PassOrder:
    """Order in which a pass runs units, micro-batches and chunks of logits. Only chunk sizes affect rounding.

    Attributes:
        mode: "layer" runs all micro-batches of a unit before the next unit; "micro_batch" runs them one at a time.
        head_rows: Number of rows whose logits are computed at a time; None for the model's default. Only runs with the
            same value are comparable.
        head_columns: Number of vocabulary columns computed at a time; 0 for all columns; None for the default.
        is_part_major: Whether all rows use one part of the vocabulary before any row uses the next part.
    """

    mode: Literal["layer", "micro_batch"] = "layer"
    head_rows: int | None = None
    head_columns: int | None = None
    is_part_major: bool = False


class LayerRunner:
    """Runner that computes the loss and gradients of a step, or the loss of an evaluation pass.

    Not thread-safe: run one step at a time, on one thread. Each pass raises `VisitOrderError` if the model does not
    call its units as planned, and `UnsupportedModelError` if a layer does something that streaming cannot reproduce.

    Args:
        trace: Planned visits to compare each forward with; None for no comparison.
        objective: Loss and noise; None for plain cross entropy.
        recompute: Forward results that are kept for the backward. If a visit keeps its graph, its weights must stay in
            place and unchanged until its backward.
        context: Function that returns the context manager of a pass; None to use ``graph.pass_context``.

    Attributes:
        bounds: All units, in order, with slots for their weights.
        head: Last stage of a pass: the head after the cut, or the model's own loss.
    """

    def __init__(
        self,
        graph: ModelGraph,
        access: BlockAccess,
        *,
        device: torch.device | str,
        order: PassOrder = PassOrder(),
        trace: VisitTrace | None = None,
        objective: Objective | None = None,
        recompute: Recompute = KEEP_NOTHING,
        compiler: LayerCompiler | None = None,
        activity: Activity | None = None,
        context: Callable[[], AbstractContextManager[None]] | None = None,
    ) -> None:
        self._graph = graph
        self._device = torch.device(device)
        self._order = order
        self._objective = objective or Objective()
        self._random = RandomStates(self._device)
        self._micro_batches = MicroBatches(self._device)
        move_buffers(graph.model, self._device)
        self.bounds = [BoundUnit(unit, self._device, compiler) for unit in graph.units]
        #: Visits of the current pass, without the head.
        self.visits = VisitSequence(access, self._random, activity or Activity())
        self.head = self._make_head(recompute)
        self._trunk = Trunk(
            graph,
            self.visits,
            self.bounds,
            self._device,
            self.head.trunk,
            trace,
            self._micro_batches.mirror,
            recompute,
            context or partial(graph.pass_context, is_compiled=compiler is not None),
        )

    def _make_head(self, recompute: Recompute) -> CutHead | ModelLoss:
        """Return the cut head, or the model's own loss. Raise an error if the objective forbids the model's loss."""
        model, order, refusal = self._graph.model, self._order, self._objective.loss.refusal
        plan = plan_head(self._graph)
        if plan is not None:
            return CutHead(
                model,
                plan,
                self.bounds,
                self.visits,
                rows=order.head_rows,
                columns=order.head_columns,
                kept_parts=recompute.kept_parts,
                is_part_major=order.is_part_major,
            )
        if refusal:
            raise UnsupportedModelError(type(model).__name__, f"it has its own loss function, {refusal}")
        return ModelLoss(model)

    def queue(
        self,
        micro_batches: Sequence[Mapping[str, Tensor]],
        *,
        num_items: int | None = None,
        seed: int = 0,
        first_index: int = 0,
        size: object = None,
    ) -> QueuedLoss:
        """Queue forward and backward of all micro-batches on the current stream, without a host sync.

        `BlockAccess.gradients` receives the gradients.

        Args:
            micro_batches: CPU tensors `input_ids` and `labels` [B, S], optionally `attention_mask` and `position_ids`.
                Either all or no micro-batches have the loss's extra inputs (``base.batch_keys.LOSS_PREFIX``).
            num_items: Divisor of the loss; None for the number of labels in these micro-batches.
            seed: Seed of the step. Each micro-batch has a separate random stream (`micro_batch_seed`).
            first_index: Position of ``micro_batches[0]`` in the step.
            size: Result of ``Loss.size_of_step``; None if these micro-batches are the whole step.

        Raises:
            NoTrainedTokensError: If no position has a label.
        """
        targets = [shifted_labels(batch["labels"]).reshape(-1) for batch in micro_batches]
        counts = [count_labels(labels) for labels in targets]
        num_labels = sum(counts) if num_items is None else num_items
        if num_labels == 0:
            raise NoTrainedTokensError(
                f"none of the {sum(len(labels) for labels in targets)} tokens of this step has a label; "
                "check the loss mask (train_on) and the truncation of the data"
            )
        indexes = list(range(len(micro_batches)))
        groups = [indexes] if self._order.mode == "layer" else [[index] for index in indexes]
        losses: list[Tensor] = []
        metrics: list[PartialMean] = []
        random_state = self._random.get()
        loss, host_rows = self._objective.loss, dict(enumerate(map(labelled_rows, targets)))
        host_inputs = {i: loss.read(batch, targets[i], host_rows[i][0]) for i, batch in enumerate(micro_batches)}
        size = loss.size_of_step(micro_batches, targets) if size is None else size
        try:
            # Upload all groups at once, because a second upload would wait for the copies of the first.
            batches, rows, inputs = self._micro_batches.upload(dict(enumerate(micro_batches)), host_rows, host_inputs)
            item_losses = {i: loss.for_micro_batch(host_inputs[i], inputs[i], size) for i in indexes}
            for group in groups:
                group_batches = {index: batches.pop(index) for index in group}
                terms, pass_metrics = self.run_pass(group_batches, rows, item_losses, num_labels, seed, first_index)
                losses += terms
                metrics += pass_metrics
        finally:
            self._end_pass(random_state)
        return QueuedLoss(tuple(losses), sum(counts), tuple(metrics))

    def evaluate(self, micro_batches: Sequence[Mapping[str, Tensor]]) -> SummedLoss:
        """Run the forward of all micro-batches in eval mode, in layer order, and return the summed loss.

        The loss is plain cross entropy, whatever the training objective, without dropout or auxiliary terms. Only
        hidden states are kept between units. Activation blocks, gradients and random states of training do not change.
        """
        targets = [shifted_labels(batch["labels"]).reshape(-1) for batch in micro_batches]
        counts = {index: count_labels(labels) for index, labels in enumerate(targets)}
        # Skip micro-batches without a label, but run at least one, because the pass must run all planned ticks.
        counts = {index: count for index, count in counts.items() if count} or {0: 0}
        with (
            self._eval_mode(micro_batches, {index: targets[index] for index in counts}) as (batches, rows),
            self._trunk_outputs(batches, rows) as items,
            self.head.open() as head,
        ):
            losses = head.evaluate(items)
        return SummedLoss(tuple(read_numbers(losses)), sum(counts.values()))

    @contextmanager
    def _eval_mode(
        self, micro_batches: Sequence[Mapping[str, Tensor]], targets: Mapping[int, Tensor]
    ) -> Iterator[tuple[dict[int, dict[str, Any]], dict[int, LabelledRows]]]:
        """Switch the model to eval mode, and yield micro-batches and their labelled rows on the compute device.

        Args:
            targets: Next-token labels [B * S] on the host, by micro-batch number. Only these micro-batches are yielded.
        """
        model, random_state = self._graph.model, self._random.get()
        model.eval()
        try:
            host_batches = {index: micro_batches[index] for index in targets}
            host_rows = {index: labelled_rows(labels) for index, labels in targets.items()}
            batches, rows, _ = self._micro_batches.upload(host_batches, host_rows)
            yield batches, rows
        finally:
            model.train()
            self._end_pass(random_state)

    def score(
        self,
        micro_batches: Sequence[Mapping[str, Tensor]],
        *,
        k: int,
        temperature: float = 1.0,
        on_hidden: Callable[[int, Tensor], None] | None = None,
    ) -> list[TokenScores]:
        """Run the forward of all micro-batches in eval mode, and return the scores of all labelled positions.

        Only hidden states are kept between units. The scores of a micro-batch do not depend on other micro-batches.

        Args:
            on_hidden: Function called with each micro-batch's number and last hidden states [B, S, H].

        Returns:
            Scores of each micro-batch's labelled positions, in order.

        Raises:
            UnsupportedModelError: If ``on_hidden`` is given, but the model's hidden states are not available.
        """
        targets = {index: shifted_labels(batch["labels"]).reshape(-1) for index, batch in enumerate(micro_batches)}
        with self._eval_mode(micro_batches, targets) as (batches, rows):
            return list(self.score_pass(batches, rows, k, temperature, on_hidden))

    def score_pass(
        self,
        batches: Mapping[int, dict[str, Any]],
        rows: Mapping[int, LabelledRows],
        k: int,
        temperature: float,
        on_hidden: Callable[[int, Tensor], None] | None = None,
    ) -> Iterator[TokenScores]:
        """Yield the scores of each micro-batch. The inputs are on the compute device; see `score`."""
        with self._trunk_outputs(batches, rows) as items:
            if on_hidden is not None:
                for item in items:
                    on_hidden(item.micro_batch, self.head.last_hidden(item.output))
            with self.head.open() as head:
                yield from head.score(items, k, temperature)

    @contextmanager
    def _trunk_outputs(
        self, batches: Mapping[int, dict[str, Any]], rows: Mapping[int, LabelledRows]
    ) -> Iterator[list[TrunkOutput]]:
        """Run the forwards of an evaluation up to the head, and yield their outputs."""
        with torch.no_grad(), without_auxiliary_loss(self._graph.model), self._trunk.prepare():
            yield self._run_trunk(batches, rows)

    def _run_trunk(
        self,
        batches: Mapping[int, dict[str, Any]],
        rows: Mapping[int, LabelledRows],
        losses: Mapping[int, MicroBatchLoss] = MappingProxyType({}),
        *,
        seed: int = 0,
        first_index: int = 0,
    ) -> list[TrunkOutput]:
        """Run the forwards up to the head, and return the inputs of the head. Evaluations pass no losses."""
        return [
            TrunkOutput(
                index,
                output,
                without_labels(batches[index]),
                *rows[index],
                random_state,
                losses.get(index, PLAIN),
            )
            for index, output, random_state in self._trunk.run(batches, seed, first_index)
        ]

    def outputs(self, micro_batches: Sequence[Mapping[str, Tensor]]) -> list[Tensor]:
        """Run the forward of all micro-batches like `evaluate`, and return their logits on the host.

        Only models without a chunked head are supported. Such models have only a few outputs per text or token.
        """
        assert isinstance(self.head, ModelLoss), "a model with a chunked head has no whole logits"
        targets = {index: shifted_labels(batch["labels"]).reshape(-1) for index, batch in enumerate(micro_batches)}
        with self._eval_mode(micro_batches, targets) as (batches, rows), self._trunk_outputs(batches, rows) as items:
            return [item.output["logits"].float().cpu() for item in items]

    def log_probs(self, micro_batches: Sequence[Mapping[str, Tensor]]) -> list[list[float]]:
        """Run the forward like `evaluate`, and return the log-probability of each row's labels, by micro-batch.

        Args:
            micro_batches: Micro-batches, in the format of `queue`. The extra inputs of losses are ignored.
        """
        shifted = [shifted_labels(batch["labels"]) for batch in micro_batches]
        counts = [[count_labels(row) for row in labels] for labels in shifted]
        # Run at least one micro-batch, even without a label, because the pass must run all planned ticks.
        indexes = [index for index, row_counts in enumerate(counts) if any(row_counts)] or [0]
        targets = {index: shifted[index].reshape(-1) for index in indexes}
        assert isinstance(self.head, CutHead), "a model with its own loss has no log-probabilities"
        with (
            self._eval_mode(micro_batches, targets) as (batches, rows),
            self._trunk_outputs(batches, rows) as items,
            self.head.open() as head,
        ):
            log_probs = head.log_probs(items)
            sums = [
                part.sum()
                for index, row_log_probs in zip(indexes, log_probs, strict=True)
                for part in torch.split(row_log_probs, counts[index])
            ]
        values = iter(read_numbers(sums))
        sums_by_index = {index: [next(values) for _ in counts[index]] for index in indexes}
        return [sums_by_index.get(index, [0.0] * len(row_counts)) for index, row_counts in enumerate(counts)]

    # -- one pass over a group of micro-batches ----------------------------------------------------------------

    def run_pass(
        self,
        batches: Mapping[int, dict[str, Any]],
        rows: Mapping[int, LabelledRows],
        micro_batch_losses: Mapping[int, MicroBatchLoss],
        num_items: int,
        seed: int,
        first_index: int = 0,
    ) -> tuple[list[Tensor], list[PartialMean]]:
        """Run forward and backward of one group of micro-batches, and return their loss terms and metrics.

        Args:
            rows: Labelled positions and their shifted labels.
            first_index: Position of micro-batch 0 in the step.
        """
        with (
            torch.enable_grad(),
            self._trunk.prepare(),
            self._objective.applied(self._graph.model),
            torch.autograd.set_multithreading_enabled(False),  # leases and greenlets belong to this thread
        ):
            # Keep no reference to the outputs. Otherwise, outputs that the backward does not need would stay alive.
            losses = self._run_head(
                self._run_trunk(batches, rows, micro_batch_losses, seed=seed, first_index=first_index), num_items
            )
            self.visits.start_backward()
            if losses.roots:
                torch.autograd.backward(losses.roots, losses.gradients)
            self.visits.end_backward()
        return losses.terms, losses.metrics

    def _run_head(self, items: Sequence[TrunkOutput], num_items: int) -> PassLosses:
        with self.head.open() as head:
            return head.run(items, num_items)

    def _end_pass(self, random_state: tuple[Tensor, ...]) -> None:
        self._random.set(random_state)
        self.visits.clear()
        self._micro_batches.forget()


def move_buffers(model: torch.nn.Module, device: torch.device) -> None:
    """Move a model's buffers to a device. Buffers that share a tensor continue to share one tensor."""
    moved_buffers: dict[int, Tensor] = {}
    for module in model.modules():
        for leaf, buffer in module._buffers.items():
            # A device without an index matches any index of its type.
            if buffer is None or (buffer.device.type == device.type and device.index in (None, buffer.device.index)):
                continue
            moved_buffers.setdefault(id(buffer), buffer.to(device))
            module._buffers[leaf] = moved_buffers[id(buffer)]
