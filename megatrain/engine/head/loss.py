"""Interface of losses, the quantities that steps minimize.

A head never holds all logits of a step at once. It iterates over pieces of the labelled rows and over parts of the
vocabulary (`chunked_head.py`). A loss therefore consists of three classes:

- `Loss` is part of the plan. It extracts the tensors that the loss needs, both from each micro-batch and from the step.
- `MicroBatchLoss` is created from the extracted tensors, on the compute device. It creates a `RowsLoss` for each piece.
  If the loss compares rows with each other, `MicroBatchLoss` also computes the loss of all rows at once.
- `RowsLoss` receives the logits of some rows, one part at a time. It returns the rows' loss and the logits' gradients.

`cross_entropy.py` defines the built-in loss. Tasks (`megatrain/tasks`) define further losses.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from math import fsum
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch
    from torch import Tensor
    from transformers import PreTrainedModel


@dataclass(frozen=True, slots=True, eq=False)
class PartialMean:
    """Contribution to a mean that a step reports: a sum over some examples.

    Attributes:
        total: Scalar, on the compute device or on the host.
        count: Number of examples in the sum.
    """

    name: str
    total: Tensor | float
    count: int


class RowsLoss(Protocol):
    """Loss of some rows whose logits are computed one vocabulary part at a time.

    Add all parts in order before reading the loss. The gradients of the parts can be read in any order.
    """

    def add(self, logits: Tensor, start: int) -> None:
        """Add the logits [rows, columns] of the part that starts at column ``start``."""

    def loss(self) -> Tensor:
        """Return these rows' contribution to the step's loss, a scalar on the compute device."""

    def gradient(self, logits: Tensor, start: int) -> Tensor:
        """Return the gradient with respect to a part's logits, in the dtype of the logits. Called once per part."""


class MicroBatchLoss(Protocol):
    """Loss of one micro-batch of a step."""

    @property
    def compares_rows(self) -> bool:
        """Whether the gradient of a row depends on other rows.

        If so, all rows of a micro-batch are added before any gradient is computed, and no logits are kept.
        """
        return False

    def for_rows(
        self, labels: Tensor, first: int, *, vocab_size: int, num_items: int, in_parts: bool
    ) -> RowsLoss | None:
        """Return the loss of some rows, or None if the model's own loss function computes it from all logits at once.

        Args:
            labels: Token ids of the labels, [rows].
            first: Position of the first row among the micro-batch's labelled rows.
            num_items: Number of labelled rows in the whole step, the divisor of a mean.
            in_parts: Whether logits are computed in parts. The model's own loss function then cannot be used.
        """

    def compare(self, rows: Sequence[RowsLoss]) -> tuple[Tensor, Sequence[PartialMean]]:
        """Return the loss and its metrics. Called after all rows were added, and only if ``compares_rows`` is true.

        After this call, ``gradient`` of each element of ``rows`` returns the gradient of this loss.

        Args:
            rows: Results of ``for_rows`` for all pieces of the micro-batch, in order.
        """
        raise AssertionError(f"{type(self).__name__} does not compare rows")


class Loss(Protocol):
    """Quantity that training steps minimize. Losses that compare equal must have the same plan."""

    @property
    def refusal(self) -> str:
        """End of the error message that refuses models with their own loss function; "" to accept such models."""
        return ""

    @property
    def compares_rows(self) -> bool:
        """Whether the loss of a micro-batch compares rows; see ``MicroBatchLoss``."""
        return False

    @property
    def needs_reference(self) -> bool:
        """Whether the loss needs scores of the data from the run's initial model."""
        return False

    @property
    def token_nbytes(self) -> int:
        """Additional bytes per token that a micro-batch holds for the loss."""
        return 0

    @property
    def row_nbytes(self) -> int:
        """Bytes per labelled row that the loss keeps on the compute device until all rows are added."""
        return 0

    def applied(self, model: PreTrainedModel) -> AbstractContextManager[None]:
        """Within the context, apply the changes that the loss makes to the model in training steps."""
        return nullcontext()

    def read(self, batch: Mapping[str, Tensor], shifted: Tensor, positions: Tensor) -> Mapping[str, Tensor]:
        """Return the tensors of a micro-batch that the loss needs on the compute device.

        Args:
            batch: Micro-batch on the host, including the keys that only losses read (``base.batch_keys.LOSS_PREFIX``).
            shifted: Next-token labels, [B * S].
            positions: Labelled positions in ``shifted``.
        """
        return {}

    def synthetic_inputs(self, num_rows: int, device: torch.device) -> Mapping[str, Tensor]:
        """Return placeholders for the results of ``read``, for a trace with ``num_rows`` labelled rows."""
        return {}

    def size_of_step(self, micro_batches: Sequence[Mapping[str, Tensor]], shifted: Sequence[Tensor]) -> object:
        """Return data about the whole step that the loss of each micro-batch needs."""
        return None

    def for_micro_batch(self, host: Mapping[str, Tensor], placed: Mapping[str, Tensor], size: object) -> MicroBatchLoss:
        """Return the loss of one micro-batch.

        Args:
            host: Result of ``read``; empty in a trace.
            placed: Copy of ``host`` on the compute device; in a trace, the result of ``synthetic_inputs``.
            size: Result of ``size_of_step``; None in a trace.
        """

    def step_metrics(self, means: dict[str, float]) -> dict[str, float]:
        """Return the metrics that a step reports, given the mean of each ``PartialMean`` by name."""
        return means


def mean_metrics(metrics: Iterable[PartialMean]) -> dict[str, float]:
    """Return the mean of each metric by name. Reads the totals, which should be on the host."""
    values_by_name: dict[str, list[float]] = {}
    counts: dict[str, int] = {}
    for metric in metrics:
        values_by_name.setdefault(metric.name, []).append(float(metric.total))
        counts[metric.name] = counts.get(metric.name, 0) + metric.count
    return {name: fsum(totals) / max(1, counts[name]) for name, totals in values_by_name.items()}
