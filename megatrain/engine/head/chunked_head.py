"""Head phase: compute the loss and its gradients from a few rows of logits at a time.

Logits are the largest activation of a step: [tokens, vocabulary] in fp32. The engine therefore cuts the model after its
decoder (the *trunk*). The rest of the model, the head, runs on the hidden states of labelled tokens, one piece at a
time. For each piece, the engine calls the model's own `forward` with a stub for the trunk. Hugging Face's code
therefore still computes norms, scaling and soft caps of logits.

If only elementwise operations follow the last matmul, a piece is computed one part of the vocabulary at a time
(`vocabulary.py`), in two passes. The first pass computes the loss. The second pass computes the gradients, in reverse
order. It reuses the graphs that the first pass kept, and recomputes the logits of all other parts. The choice of kept
graphs does not change results.

`plan_head` finds the cut with a trial run (`head_plan.py`). `HeadModel` runs the model after the cut (`head_model.py`).
`HeadWeights` leases the weights (`head_weights.py`), and `ChunkedHead` runs the pieces through both passes.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from megatrain.base.progress import Activity
from megatrain.engine.head.cross_entropy import RunningSoftmax
from megatrain.engine.head.head_model import HeadModel, HeadRows, TrunkOutput
from megatrain.engine.head.head_weights import HeadGradients, HeadWeights
from megatrain.engine.head.token_scores import RunningTopK, TokenScores, join_scores
from megatrain.engine.unit.arguments import has_differentiable
from megatrain.engine.unit.state import without_saved_tensors

if TYPE_CHECKING:
    from megatrain.engine.head.loss import PartialMean, RowsLoss
    from megatrain.engine.head.vocabulary import VocabularyPart
    from megatrain.engine.unit.state import RandomStates


@dataclass(slots=True, eq=False)
class PassLosses:
    """Losses of a pass, and the tensors from which its backward starts.

    Attributes:
        terms: Scalars whose sum is the loss.
        roots: Tensors from which the backward starts: the trunk's outputs, or the losses of ``ModelLoss``.
        gradients: Gradients of ``roots``.
        metrics: Metrics of the loss.
    """

    terms: list[Tensor] = field(default_factory=list)
    roots: list[Tensor] = field(default_factory=list)
    gradients: list[Tensor] = field(default_factory=list)
    metrics: list[PartialMean] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class HeadTiling:
    """Partition of a micro-batch's logits: rows are split into pieces, and the vocabulary into parts.

    Attributes:
        rows: Maximum number of rows per piece.
        columns: Maximum number of columns per part; 0 if the vocabulary is not split.
        kept_parts: Number of parts per piece whose graphs the first pass keeps, at least one. Does not affect results.
        is_part_major: Whether all rows use one part of the vocabulary before any row uses the next part. If so, no
            graphs are kept. Does not affect results.
    """

    vocab_size: int
    rows: int
    columns: int = 0
    kept_parts: int = 1
    is_part_major: bool = False


class ChunkedHead:
    """Head that computes the loss of one pass, and the gradients of the trunk's outputs."""

    def __init__(
        self,
        model: HeadModel,
        weights: HeadWeights,
        tiling: HeadTiling,
        random: RandomStates,
        activity: Activity | None = None,
    ) -> None:
        self._model, self._weights, self._tiling = model, weights, tiling
        self._random, self._activity = random, activity or Activity()
        self._losses = PassLosses()

    def run(self, outputs: Sequence[TrunkOutput], num_items: int) -> PassLosses:
        """Compute the losses of all outputs, and the gradients of the outputs and of the head's weights.

        The head leases its weights and gradient accumulators once for all outputs.

        Args:
            num_items: Number of labels in the whole step.
        """
        with ExitStack() as stack, torch.enable_grad():
            if self._tiling.is_part_major and self._tiling.columns:
                self._run_part_major(outputs, num_items, stack)
                return self._losses
            leaves = self._weights.leaves(stack, self._weights.bind(stack))
            for item in outputs:
                self._resume(item)
                self._run_micro_batch(item, num_items, leaves)
        return self._losses

    def evaluate(self, outputs: Sequence[TrunkOutput]) -> list[Tensor]:
        """Return the summed loss of each piece of all outputs, in order. Call this within `no_grad`.

        The head leases its weights once for all outputs.
        """
        losses: list[Tensor] = []
        with ExitStack() as stack:
            self._weights.bind(stack)
            if self._weights.is_passing:
                pieces = [piece for item in outputs for piece in self._pieces(item, 1)]
                self._add_all_logits(pieces)
                return [piece.loss.loss() for piece in pieces if piece.loss is not None]
            for item in outputs:
                self._resume(item)
                for piece in self._pieces(item, 1):
                    if piece.loss is None:
                        losses.append(self._model.loss(item, piece.output, piece.labels, 1))
                        continue
                    for part in self._weights.parts:
                        self._add_logits(piece, part, is_kept=False)
                    losses.append(piece.loss.loss())
        return losses

    def score(self, outputs: Sequence[TrunkOutput], k: int, temperature: float) -> Iterator[TokenScores]:
        """Yield each output's scores of labelled rows, on the host. Call this within `no_grad`.

        The head leases its weights once for all outputs.
        """
        with ExitStack() as stack:
            self._weights.bind(stack)
            assert not self._weights.is_passing, "scores need all parts of the weight leased"
            for item in outputs:
                self._resume(item)
                scores = [RunningTopK(item.labels[:0], 0, temperature).scores()]
                for piece in self._pieces(item, 1):
                    top_k = RunningTopK(piece.labels, k, temperature)
                    for part in self._weights.parts or (None,):
                        top_k.add(self._model.logits(item, piece.output, part), 0 if part is None else part.start)
                    scores.append(top_k.scores())
                yield join_scores(scores)

    def _resume(self, item: TrunkOutput) -> None:
        """Restore a micro-batch's random state from the end of its trunk, and mark the micro-batch as current."""
        self._activity.micro_batch = item.micro_batch + 1
        self._random.set(item.random_state)

    def _run_micro_batch(self, item: TrunkOutput, num_items: int, leaves: HeadGradients) -> None:
        """Run all pieces of one micro-batch in order. The caller has leased all weights."""
        losses: list[Tensor] = []
        leaves.set_micro_batch(item)
        hidden_grad = self._hidden_grad(item)
        with self._model.without_auxiliary_loss():
            if item.loss.compares_rows:
                losses.append(self._run_comparison(item, num_items, leaves, hidden_grad))
                return self._record(item, num_items, losses, hidden_grad)
            for piece in self._pieces(item, num_items):
                losses.append(self._run_piece(piece, num_items, leaves))
                piece.store_gradient(hidden_grad)
        self._record(item, num_items, losses, hidden_grad)

    def _run_comparison(
        self, item: TrunkOutput, num_items: int, leaves: HeadGradients, hidden_grad: Tensor | None
    ) -> Tensor:
        """Return a micro-batch's loss, and accumulate its gradients, for losses that compare rows.

        All rows are added to the loss before any gradient is computed, because the loss compares rows across pieces.
        """
        row_losses = self._add_row_logits(item, num_items)
        loss = self._compare_rows(item, row_losses)
        for piece in self._pieces(item, num_items, row_losses=row_losses):
            for part in reversed(self._vocabulary_or_parts()):
                self._add_gradients(piece, part, leaves)
            piece.store_gradient(hidden_grad)
        return loss

    def _add_row_logits(self, item: TrunkOutput, num_items: int) -> list[RowsLoss]:
        """Add all logits of a micro-batch to the loss, and return the loss object of each piece."""
        row_losses: list[RowsLoss] = []
        for piece in self._pieces(item, num_items, with_logits=True):
            assert piece.loss is not None
            for part in self._vocabulary_or_parts():
                self._add_logits(piece, part, is_kept=False)
            row_losses.append(piece.loss)
        return row_losses

    def _compare_rows(self, item: TrunkOutput, row_losses: Sequence[RowsLoss]) -> Tensor:
        """Return a micro-batch's loss and record its metrics, if the loss compares rows. Call after adding all rows."""
        loss, metrics = item.loss.compare(row_losses)
        self._losses.metrics += metrics
        return loss

    def _vocabulary_or_parts(self) -> Sequence[VocabularyPart | None]:
        """Return the parts of the vocabulary; [None] if it is not split."""
        return self._weights.parts if self._tiling.columns else [None]

    def log_probs(self, outputs: Sequence[TrunkOutput]) -> list[Tensor]:
        """Return the log-probabilities of each output's labels, in order. Call this within `no_grad`.

        The head leases its weights once for all outputs.
        """
        with ExitStack() as stack:
            self._weights.bind(stack)
            if self._weights.is_passing:
                pieces_by_item = [list(self._pieces(item, 1, with_logits=True)) for item in outputs]
                self._add_all_logits([piece for pieces in pieces_by_item for piece in pieces])
                losses = [[piece.loss for piece in group] for group in pieces_by_item]
            else:
                losses = []
                for item in outputs:
                    self._resume(item)
                    losses.append([*self._add_row_logits(item, 1)])
        softmaxes = [[loss for loss in group if isinstance(loss, RunningSoftmax)] for group in losses]
        empty = torch.zeros(0)
        return [torch.cat([loss.log_probs() for loss in group]) if group else empty for group in softmaxes]

    def _run_part_major(self, outputs: Sequence[TrunkOutput], num_items: int, stack: ExitStack) -> None:
        """Run all pieces of all micro-batches, one part of the vocabulary at a time.

        Results are bit-identical to ``_run_micro_batch``, because operations and the order of each sum are the same.
        """
        units = self._weights.bind(stack)
        with self._model.without_auxiliary_loss():
            pieces = [list(self._pieces(item, num_items)) for item in outputs]
            all_pieces = [piece for item_pieces in pieces for piece in item_pieces]
            self._add_all_logits(all_pieces)
            if self._weights.is_passing:  # a tick leases each block once, so the second pass is a separate tick
                stack.close()
                units = self._weights.bind(stack)
            leaves = self._weights.leaves(stack, units)
            compared_losses: list[Tensor | None] = []
            for item, item_pieces in zip(outputs, pieces, strict=True):
                row_losses = [piece.loss for piece in item_pieces if piece.loss is not None]
                compared_losses.append(self._compare_rows(item, row_losses) if item.loss.compares_rows else None)
            for block in self._weights.reversed_blocks(leaves):
                with block as parts:
                    for part in reversed(parts):
                        with self._weights.accumulate_part(part, leaves):
                            for piece in all_pieces:
                                leaves.set_micro_batch(piece.item)
                                self._add_gradients(piece, part, leaves)
        for item, item_pieces, loss in zip(outputs, pieces, compared_losses, strict=True):
            hidden_grad = self._hidden_grad(item)
            for piece in item_pieces:
                piece.store_gradient(hidden_grad)
            losses = [loss] if loss is not None else [each.loss.loss() for each in item_pieces if each.loss is not None]
            self._record(item, num_items, losses, hidden_grad)

    def _add_all_logits(self, pieces: Sequence[HeadRows]) -> None:
        """Add the logits of all pieces to their losses, one part of the vocabulary at a time."""
        for block in self._weights.blocks():
            with block as parts:
                for part in parts:
                    for piece in pieces:
                        self._add_logits(piece, part, is_kept=False)

    def _hidden_grad(self, item: TrunkOutput) -> Tensor | None:
        """Return zeros [B * S, H] for the gradient of the trunk's output, or None if the output has no gradient."""
        states: Tensor = item.output["last_hidden_state"]
        has_gradient = states.requires_grad and len(item.rows)
        return torch.zeros_like(states.detach().reshape(-1, states.shape[-1])) if has_gradient else None

    def _pieces(
        self,
        item: TrunkOutput,
        num_items: int,
        *,
        with_logits: bool = False,
        row_losses: Sequence[RowsLoss] | None = None,
    ) -> Iterator[HeadRows]:
        """Yield the pieces of a micro-batch. In each piece, the rows of the trunk's output form a new graph leaf.

        Args:
            num_items: Number of labels in the whole step.
            with_logits: Whether to pass logits to the loss even if the model's own function could compute the loss.
            row_losses: Loss objects of the pieces, which already have all logits; None to create new ones.
        """
        is_split = with_logits or self._tiling.columns > 0
        states: Tensor = item.output["last_hidden_state"]
        flat_states = states.detach().reshape(-1, states.shape[-1])
        bare_output = _bare_output(item.output)
        for index, start in enumerate(range(0, len(item.rows), self._tiling.rows)):
            rows, labels = item.rows[start : start + self._tiling.rows], item.labels[start : start + self._tiling.rows]
            leaf = flat_states.index_select(0, rows).unsqueeze(0).requires_grad_(states.requires_grad)
            output = copy.copy(bare_output)
            output["last_hidden_state"] = leaf
            loss = (
                item.loss.for_rows(
                    labels, start, vocab_size=self._tiling.vocab_size, num_items=num_items, in_parts=is_split
                )
                if row_losses is None
                else row_losses[index]
            )
            yield HeadRows(item, output, rows, labels, leaf, loss)

    def _record(self, item: TrunkOutput, num_items: int, losses: list[Tensor], hidden_grad: Tensor | None) -> None:
        """Record a micro-batch's loss terms, the tensors that cross the cut, and the gradients of these tensors."""
        states: Tensor = item.output["last_hidden_state"]
        self._losses.terms += losses
        if hidden_grad is not None:
            self._losses.roots.append(states)
            self._losses.gradients.append(hidden_grad.view(states.shape))
        if self._model.has_auxiliary_loss and len(item.rows):
            auxiliary_loss = self._model.auxiliary_loss(item, num_items, self._losses.roots, self._losses.gradients)
            self._losses.terms.append(auxiliary_loss)

    def _run_piece(self, piece: HeadRows, num_items: int, leaves: HeadGradients) -> Tensor:
        """Return the loss of a piece, and accumulate the gradients of weights and hidden states."""
        if piece.loss is None:
            loss = self._model.loss(piece.item, piece.output, piece.labels, num_items)
            leaves.add_gradients(piece, loss, torch.ones_like(loss), [])
            return loss.detach()
        parts = self._weights.parts or (None,)
        for index, part in enumerate(parts):
            self._add_logits(piece, part, is_kept=index >= len(parts) - self._tiling.kept_parts)
        for part in reversed(parts):
            self._add_gradients(piece, part, leaves)
        return piece.loss.loss()

    def _add_logits(self, piece: HeadRows, part: VocabularyPart | None, *, is_kept: bool) -> None:
        """Add the logits of a part, or all logits, to the loss. Optionally keep their graph for the second pass."""
        assert piece.loss is not None
        # Do not use `no_grad`, which can select different kernels. Both passes must compute the same logits.
        context = nullcontext() if is_kept or not torch.is_grad_enabled() else without_saved_tensors()
        with context:
            logits = self._model.logits(piece.item, piece.output, part)
        piece.loss.add(logits.detach(), 0 if part is None else part.start)
        if is_kept and torch.is_grad_enabled():
            piece.kept_logits.append(logits)

    def _add_gradients(self, piece: HeadRows, part: VocabularyPart | None, leaves: HeadGradients) -> None:
        """Accumulate the gradients that a part contributes. Recompute the part's logits if they were not kept."""
        assert piece.loss is not None
        logits = piece.kept_logits.pop() if piece.kept_logits else self._model.logits(piece.item, piece.output, part)
        part_leaves = [part.weight] if part is not None and part.weight.requires_grad else []
        gradient = piece.loss.gradient(logits.detach(), 0 if part is None else part.start)
        leaves.add_gradients(piece, logits, gradient, part_leaves)


def _bare_output(output: Any) -> Any:
    """Return a copy of a trunk's output without the differentiable tensors that only the auxiliary loss uses."""
    result = copy.copy(output)
    for key, value in output.items():
        if key != "last_hidden_state" and has_differentiable(value):
            result[key] = None
    return result
