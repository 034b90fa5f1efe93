"""Last stage of a pass: the head after a cut, or the model's own loss if the model cannot be cut."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from megatrain.base.errors import UnsupportedModelError
from megatrain.engine.head.chunked_head import ChunkedHead, HeadTiling, PassLosses
from megatrain.engine.head.head_model import HeadModel, TrunkOutput
from megatrain.engine.head.head_weights import HeadWeights
from megatrain.engine.head.token_scores import RunningTopK, TokenScores, join_scores
from megatrain.engine.head.vocabulary import PartWeight
from megatrain.engine.unit.bound_unit import BoundUnit, install_stubs

if TYPE_CHECKING:
    from megatrain.engine.head.head_plan import HeadPlan
    from megatrain.engine.unit.visit import VisitSequence


class CutHead:
    """Head that runs after the cut. It computes a few rows of logits at a time.

    Args:
        bounds: All units of the model, in order.
        visits: Visits of the current pass. The head's visits follow them.
        rows: Number of rows whose logits are computed at a time; None for the model's default.
        columns: Number of vocabulary columns computed at a time; 0 for all columns; None for the default.
        kept_parts: Number of vocabulary parts whose logits are kept for the second pass.
        is_part_major: Whether all rows use one part of the vocabulary before any row uses the next part.

    Attributes:
        trunk: Module whose output is the input of the head.
        units: Indexes of the units that run in the head phase, after all other units.
        rows: Number of rows whose logits are computed at a time.
        columns: Number of vocabulary columns computed at a time; 0 if the vocabulary is not split.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: HeadPlan,
        bounds: Sequence[BoundUnit],
        visits: VisitSequence,
        *,
        rows: int | None,
        columns: int | None,
        kept_parts: int,
        is_part_major: bool,
    ) -> None:
        self._model, self._plan, self._visits = model, plan, visits
        self.trunk, self.units = plan.trunk, tuple(unit.index for unit in plan.units)
        self._bounds = [bounds[index] for index in self.units]
        default_columns = plan.default_columns
        self.columns = default_columns if columns is None else min(columns, default_columns)
        self.rows = rows or plan.default_rows(self.columns)
        self._tiling = HeadTiling(plan.vocab_size, self.rows, self.columns, kept_parts, is_part_major)
        self._ranges = plan.ranges(self.columns) if self.columns else []
        self._cut_weight = plan.cut_weight or ""
        self._part_weight: PartWeight | None = None  # placeholder for the weight that computes logits in parts
        if self.columns:
            owner = next(bound for bound in self._bounds if bound.has(self._cut_weight))
            self._part_weight = PartWeight.from_placeholder(owner.placeholder(self._cut_weight))

    @property
    def parts(self) -> int:
        """Number of vocabulary parts; 1 if the vocabulary is not split."""
        return len(self._ranges) or 1

    @property
    def logits_flops(self) -> int:
        """FLOPs needed for one row of logits, or 0 if the vocabulary is not split."""
        return 0 if self._part_weight is None else 2 * self._part_weight.numel()

    @property
    def partwise_params(self) -> frozenset[str]:
        """Name of the head's weight, if its gradient can be computed one part at a time; otherwise empty.

        Empty if the head has other trainable weights, because their gradients would be summed in a different order.
        """
        if not self.columns or not self._plan.boundaries:
            return frozenset()
        trained_names = {name for bound in self._bounds for name in bound.trainable}
        return frozenset(trained_names) if trained_names == {self._cut_weight} else frozenset()

    @property
    def part_nbytes(self) -> int:
        """Size of the graph that the head keeps for one vocabulary part of a full piece; 0 if there are no parts."""
        max_columns = max((stop - start for start, stop in self._ranges), default=0)
        return self.rows * max_columns * self._plan.logit_nbytes

    def last_hidden(self, output: Any) -> Tensor:
        """Return the last hidden states [B, S, H]."""
        states: Tensor = output["last_hidden_state"]
        return states

    @contextmanager
    def open(self) -> Iterator[ChunkedHead]:
        """Yield the head for a pass whose trunk has run, with the stubs of the head's units removed."""
        model = HeadModel(self._model, self.trunk, self._part_weight, is_product=self._plan.is_product)
        bounds = [(bound, len(self._visits) + offset) for offset, bound in enumerate(self._bounds)]
        weights = HeadWeights(bounds, self._visits.access, self._cut_weight, self._part_weight, self._ranges)
        head = ChunkedHead(model, weights, self._tiling, self._visits.random, self._visits.activity)
        with install_stubs({bound.unit.module: bound.forward for bound in self._bounds}):
            yield head


class ModelLoss:
    """Loss of a model that cannot be cut. The model's own forward computes it, as a mean, from all logits at once."""

    trunk: nn.Module | None = None
    units: tuple[int, ...] = ()
    rows = columns = logits_flops = part_nbytes = 0
    parts = 1
    partwise_params = frozenset[str]()

    def __init__(self, model: nn.Module) -> None:
        self._model_type = type(model).__name__

    def open(self) -> AbstractContextManager[ModelLoss]:
        """Return a context that yields this object, which has no state per pass; see ``CutHead.open``."""
        return nullcontext(self)

    def run(self, items: Sequence[TrunkOutput], num_items: int) -> PassLosses:
        """Return each micro-batch's loss as its share of the step's loss; see ``ChunkedHead.run``."""
        losses = PassLosses()
        for item in items:
            if count := len(item.labels):  # the mean is NaN without labels
                loss: Tensor = item.output["loss"]
                losses.terms.append(loss.detach() * (count / num_items))
                losses.roots.append(loss)
                losses.gradients.append(torch.full_like(loss, count / num_items))
        return losses

    def evaluate(self, items: Sequence[TrunkOutput]) -> list[Tensor]:
        """Return the summed loss of each micro-batch; see ``ChunkedHead.evaluate``."""
        return [item.output["loss"] * len(item.labels) for item in items if len(item.labels)]

    def score(self, items: Sequence[TrunkOutput], k: int, temperature: float) -> Iterator[TokenScores]:
        """Yield each micro-batch's scores of labelled rows; see ``ChunkedHead.score``."""
        for item in items:
            logits = item.output["logits"].flatten(0, -2).index_select(0, item.rows)
            top_k = RunningTopK(item.labels, k, temperature)
            top_k.add(logits, 0)
            yield join_scores([top_k.scores()])

    def last_hidden(self, output: Any) -> Tensor:
        """Raise an error, because the forward does not stop before the head."""
        raise UnsupportedModelError(
            self._model_type, "its hidden states are not available without its head: no embeddings"
        )
