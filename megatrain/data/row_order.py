"""Order of a run's rows. The rows of a step depend only on the seed and the position."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import numpy.typing as npt

from megatrain.data.packing import BatchShape

if TYPE_CHECKING:
    from megatrain.data.token_dataset import TokenDataset

_SHUFFLE_STREAM, _PACK_STREAM = 0, 1  # indices of random streams; token_dataset and stream_window use 2 to 6


@dataclass(frozen=True, slots=True)
class LoaderPosition:
    """Position of a loader: its complete state in a checkpoint. ``epoch`` and ``step`` identify the next step.

    Attributes:
        cursor: Position in the streams as JSON, or None if the data is not streamed.
    """

    epoch: int = 0
    step: int = 0
    cursor: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class StepRows:
    """Rows of an optimizer step.

    Attributes:
        dataset: Dataset that contains the documents of these rows, and possibly more.
        rows: Documents of each row. If an example has several documents, only the first one is listed.
        position: Position after this step.
    """

    dataset: TokenDataset
    rows: Sequence[Sequence[int]]
    position: LoaderPosition


class RowOrder(Protocol):
    """Order in which a run uses its rows.

    Attributes:
        dataset: Documents of the run. Empty if the data is streamed.
        steps_per_epoch: Number of optimizer steps in an epoch.
    """

    dataset: TokenDataset
    steps_per_epoch: int

    def steps(self, start: LoaderPosition) -> Iterator[StepRows]:
        """Yield the rows of each step from ``start`` on, without end. No data is read before the first iteration."""
        ...


def epoch_order(data_seed: int, epoch: int, num_rows: int) -> npt.NDArray[np.int64]:
    """Return the row numbers of an epoch in shuffled order."""
    return np.random.default_rng((data_seed, _SHUFFLE_STREAM, epoch)).permutation(num_rows).astype(np.int64)


class EpochOrder:
    """Order of a dataset whose documents are all known. Each epoch uses every row once, in a different order.

    All epochs have the same rows. An epoch's last step is padded with empty rows.

    Args:
        data_seed: Random seed for the packing and the order.

    Attributes:
        num_rows: Number of rows in an epoch.
    """

    def __init__(self, dataset: TokenDataset, shape: BatchShape, data_seed: int) -> None:
        self.dataset, self._data_seed = dataset, data_seed
        self._rows_per_step = shape.examples_per_step(dataset.kind.num_documents)
        documents = dataset.epoch_documents(data_seed)
        if shape.packing:
            documents = documents[np.random.default_rng((data_seed, _PACK_STREAM)).permutation(len(documents))]
        self._rows = shape.assign(documents, dataset)
        self.num_rows = len(self._rows)
        self.steps_per_epoch = -(-self.num_rows // self._rows_per_step)
        dataset.release_pages()

    def rows(self, start: int, stop: int) -> list[list[int]]:
        """Return the documents of rows ``start`` to ``stop``. The rows are numbered in their order before shuffling."""
        return [self._rows[row] for row in range(start, stop)]

    def steps(self, start: LoaderPosition) -> Iterator[StepRows]:
        """Yield the rows of each step from ``start`` on."""
        epoch, step = start.epoch, start.step
        assert epoch >= 0, start
        assert 0 <= step < self.steps_per_epoch, (start, self.steps_per_epoch)
        while True:
            order = epoch_order(self._data_seed, epoch, self.num_rows)
            for offset in range(step * self._rows_per_step, len(order), self._rows_per_step):
                step += 1
                rows = [self._rows[row] for row in order[offset : offset + self._rows_per_step]]
                rows += [[]] * (self._rows_per_step - len(rows))
                is_last = step == self.steps_per_epoch
                position = LoaderPosition(epoch + 1) if is_last else LoaderPosition(epoch, step)
                yield StepRows(self.dataset, rows, position)
            epoch, step = epoch + 1, 0
