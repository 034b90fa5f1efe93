"""Interface of losses, the quantities that steps minimise.

A head never has all logits of a step at once. It iterates over pieces of the labelled rows and over parts of the
vocabulary (`head.py`). A loss therefore consists of three classes:

- `Loss` is part of the plan. It extracts the tensors that it needs from a micro-batch, and data about the whole step.
- `MicroBatchLoss` is created from these tensors on the compute device. It computes the loss of each piece of rows or,
  if the loss compares rows with each other, of all rows together.
- `RowsLoss` receives the logits of some rows part by part, then returns their loss and the gradients of the logits.

`cross_entropy.py` defines the built-in loss. Tasks (`megatrain/tasks`) define other losses, unknown to the engine.
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

__all__ = ["Loss", "PartialMean", "MicroBatchLoss", "RowsLoss", "mean_figures"]


@dataclass(frozen=True, slots=True, eq=False)
class PartialMean:
    """Contribution to a reported mean of a step: a sum over some examples.

    Attributes:
        total: Scalar, on the compute device or on the host.
        count: Number of examples in the sum.
    """

    name: str
    total: Tensor | float
    count: int


class RowsLoss(Protocol):
    """Loss of some rows whose logits are computed in parts of the vocabulary.

    The caller adds all parts in order. Then it reads the loss, and the gradients of the parts in any order.
    """

    def add(self, logits: Tensor, start: int) -> None:
        """Add the logits [rows, columns] of the vocabulary from ``start`` on."""

    def loss(self) -> Tensor:
        """Return the contribution of these rows to the loss of the step, a scalar on the compute device."""

    def gradient(self, logits: Tensor, start: int) -> Tensor:
        """Return the gradient of a part's logits, in their dtype. Called once per part."""


class MicroBatchLoss(Protocol):
    """Loss of one micro-batch of a step."""

    @property
    def compares_rows(self) -> bool:
        """Whether the gradient of a row depends on other rows.

        If True, all rows of a micro-batch are added before any gradient is computed, and no logits are kept.
        """
        return False

    def for_rows(
        self, labels: Tensor, first: int, *, vocab_size: int, num_items: int, in_parts: bool
    ) -> RowsLoss | None:
        """Return the loss of some rows; None if the model's own loss function computes it from whole logits.

        Args:
            labels: Vocabulary indexes of the labels, [rows].
            first: Position of the first row among the micro-batch's rows with a label.
            num_items: Number of rows with a label in the whole step, by which means divide.
            in_parts: Whether logits come in parts, so that the model's own loss function cannot compute the loss.
        """

    def compare(self, rows: Sequence[RowsLoss]) -> tuple[Tensor, Sequence[PartialMean]]:
        """Return the loss and its metrics after all rows were added. Only called if ``compares_rows``.

        After this call, ``rows`` return the gradients of this loss.

        Args:
            rows: Results of ``for_rows`` for the pieces of the micro-batch, in order.
        """
        raise AssertionError(f"{type(self).__name__} does not compare rows")


class Loss(Protocol):
    """Quantity that a step minimises. Equal losses have equal plans. Evaluations use plain cross entropy."""

    @property
    def refusal(self) -> str:
        """Reason to refuse models with their own loss function; "" to accept them. It ends an error message."""
        return ""

    @property
    def compares_rows(self) -> bool:
        """Whether the loss of a micro-batch compares rows; see ``MicroBatchLoss``."""
        return False

    @property
    def needs_reference(self) -> bool:
        """Whether the data contains scores of the initial model of the run."""
        return False

    @property
    def token_nbytes(self) -> int:
        """Bytes per token that a micro-batch holds for the loss."""
        return 0

    @property
    def row_nbytes(self) -> int:
        """Bytes per labelled row on the compute device, kept until all rows of a micro-batch were added."""
        return 0

    def applied(self, model: PreTrainedModel) -> AbstractContextManager[None]:
        """Change the model for training steps within the context."""
        return nullcontext()

    def read(self, batch: Mapping[str, Tensor], shifted: Tensor, positions: Tensor) -> Mapping[str, Tensor]:
        """Return the tensors of a micro-batch that the loss needs on the compute device.

        Args:
            batch: Micro-batch on the host, including the keys that only losses read (``base.batch_keys.LOSS_PREFIX``).
            shifted: Next-token labels, [B * S].
            positions: Positions in ``shifted`` with a label.
        """
        return {}

    def synthetic_inputs(self, num_rows: int, device: torch.device) -> Mapping[str, Tensor]:
        """Return placeholder results of ``read`` for ``num_rows`` labelled rows, which a trace uses."""
        return {}

    def size_of_step(self, micro_batches: Sequence[Mapping[str, Tensor]], shifted: Sequence[Tensor]) -> object:
        """Return data about all micro-batches of a step, of all ranks, for the loss of each micro-batch."""
        return None

    def for_micro_batch(self, host: Mapping[str, Tensor], placed: Mapping[str, Tensor], size: object) -> MicroBatchLoss:
        """Return the loss of a micro-batch of a step.

        Args:
            host: Result of ``read``; empty in a trace.
            placed: ``host`` on the compute device; result of ``synthetic_inputs`` in a trace.
            size: Result of ``size_of_step``; None in a trace.
        """

    def step_metrics(self, means: dict[str, float]) -> dict[str, float]:
        """Return the metrics to report for a step, given the means of its metrics by name."""
        return means


def mean_figures(figures: Iterable[PartialMean], numbers: Sequence[float]) -> dict[str, float]:
    """Return the means of a step's metrics by name, given their totals as numbers."""
    totals: dict[str, list[float]] = {}
    counts: dict[str, int] = {}
    for figure, number in zip(figures, numbers, strict=True):
        totals.setdefault(figure.name, []).append(number)
        counts[figure.name] = counts.get(figure.name, 0) + figure.count
    return {name: fsum(values) / max(1, counts[name]) for name, values in totals.items()}
