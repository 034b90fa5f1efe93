"""Classes of texts or of tokens: ``task = "classify"``."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from megatrain.base.batch_keys import IGNORED_LABEL
from megatrain.tasks.task import Before, Gather, MicroBatches, Note, SetFigures

if TYPE_CHECKING:
    import numpy.typing as npt

    from megatrain.data.dataset import TokenDataset
    from megatrain.engine.forward import LayerRunner

__all__ = ["ClassifyTask", "f1_score"]

#: For each text or token with a class: its cross entropy (fp64), the class that the model says, and its own.
_Judged = tuple["npt.NDArray[np.float64]", "npt.NDArray[np.int64]", "npt.NDArray[np.int64]"]


class ClassifyTask:
    """Held-out rows are judged by cross entropy, accuracy and F1; a ``Task``.

    Args:
        loss: What the steps minimise, which nothing here depends on.
    """

    def __init__(self, loss: object = None) -> None:
        pass

    def tally(self) -> JudgedClasses:
        """Return what judges the texts or tokens of a set."""
        return JudgedClasses()

    def prepare(self, before: Before) -> Mapping[str, Any]:
        """Return nothing: rows are all that steps read."""
        return {}

    def notes(self, dataset: TokenDataset) -> Sequence[Note]:
        """Return how many rows have which class, and what is seldom meant."""
        classes = dataset.tokens[np.flatnonzero(dataset.trained)]
        numbers, counts = np.unique(classes, return_counts=True)
        shown = ", ".join(f"{number}: {count:,}" for number, count in zip(numbers[:8], counts[:8], strict=True))
        found = [Note("ok", f"labels by class {shown}{' ...' if len(numbers) > 8 else ''}")]
        if len(numbers) == 1:
            found.append(Note("warning", "all labels are the same: there is nothing to tell apart"))
        return found


class JudgedClasses:
    """The classes of all rows of a set, and what the model says they are; a ``Tally``."""

    def __init__(self) -> None:
        self._found: list[_Judged] = []

    def head(self, runner: LayerRunner, micro_batches: MicroBatches) -> list[_Judged]:
        """Return what the model says of each text or token of a pass that has a class."""
        outputs = runner.outputs(micro_batches)
        return [judged(batch["labels"], logits) for batch, logits in zip(micro_batches, outputs, strict=True)]

    def add(self, found: list[_Judged]) -> None:
        """Take in a pass."""
        self._found += found

    def judge(self, gather: Gather[list[_Judged]]) -> SetFigures:
        """Return the mean cross entropy, accuracy and F1 of the rows of all ranks."""
        pieces = [piece for of_rank in gather(self._found) for piece in of_rank]
        losses, said, true = (np.concatenate([piece[part] for piece in pieces]) for part in range(3))
        count = len(true)
        if not count:
            return SetFigures(math.nan, 0)
        # Exactly rounded: neither the order of terms nor who has which matters.
        figures = {"accuracy": int((said == true).sum()) / count, "f1": f1_score(said, true)}
        return SetFigures(math.fsum(losses.tolist()) / count, count, figures)


def judged(labels: torch.Tensor, logits: torch.Tensor) -> _Judged:
    """Return cross entropy, said and true class of what has a class.

    Args:
        labels: One place later than what they belong to: [B, 2] of texts, [B, S + 1] of tokens.
        logits: [B, classes] or [B, S, classes], fp32.
    """
    is_text = logits.dim() == 2
    aligned = labels[:, 1] if is_text else labels[:, 1 : logits.shape[1] + 1].reshape(-1)
    has_class = aligned != IGNORED_LABEL
    true, scores = aligned[has_class], logits.reshape(-1, logits.shape[-1])[has_class].double()
    losses = scores.logsumexp(1) - scores.gather(1, true.unsqueeze(1)).squeeze(1)
    return losses.numpy(), scores.argmax(1).numpy(), true.numpy()


def f1_score(said: npt.NDArray[np.int64], true: npt.NDArray[np.int64]) -> float:
    """Return the F1 of the second class where there are classes 0 and 1 alone, else the mean over all classes.

    These are ``average="binary"`` and ``"macro"`` of scikit-learn, over the classes that are said or true; one that is
    never said right counts 0.
    """
    classes = np.union1d(said, true)
    if set(classes.tolist()) <= {0, 1}:
        classes = np.array([1])
    scores = []
    for each in classes:
        right = int(((said == each) & (true == each)).sum())
        both = int((said == each).sum() + (true == each).sum())
        scores.append(2 * right / both if both else 0.0)
    return math.fsum(scores) / len(scores)
