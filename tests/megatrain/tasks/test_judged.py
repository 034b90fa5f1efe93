"""Figures of classifiers, recounted by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch

from megatrain.tasks.classify import JudgedClasses, f1_score, judged


def piece(said: list[int], true: list[int]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    losses = np.arange(len(true), dtype=np.float64)
    return losses, np.array(said, dtype=np.int64), np.array(true, dtype=np.int64)


def test_rows_of_all_ranks_are_judged() -> None:
    tally = JudgedClasses()
    tally.add([piece([0, 1], [0, 0]), piece([2], [2])])
    figures = tally.judge(lambda own: [own, [piece([1, 1, 0, 2], [1, 1, 1, 1])]])
    assert figures.num_tokens == 7
    assert figures.loss == (0 + 1 + 0 + 0 + 1 + 2 + 3) / 7
    assert figures.figures["accuracy"] == 4 / 7
    # Class 0: 1 right, 2 said, 2 true. Class 1: 2 right, 3 said, 4 true. Class 2: 1 right, 2 said, 1 true.
    assert figures.figures["f1"] == pytest.approx((2 / 4 + 4 / 7 + 2 / 3) / 3)


@pytest.mark.parametrize(
    ("said", "true", "expected"),
    [
        ([1, 0, 1, 1], [1, 1, 0, 1], 2 * 2 / (3 + 3)),  # of two classes that of class 1
        ([0, 0], [0, 0], 0.0),
        ([2, 0, 1], [0, 0, 1], (2 * 1 / (1 + 2) + 1.0 + 0.0) / 3),  # class 2 is said alone, and counts 0
        ([0, 0, 1], [2, 0, 1], (2 * 1 / (2 + 1) + 1.0 + 0.0) / 3),  # class 2 is true alone
    ],
)
def test_f1_counts_classes_that_are_said_or_true(said: list[int], true: list[int], expected: float) -> None:
    assert f1_score(np.array(said), np.array(true)) == pytest.approx(expected, rel=1e-15)


def test_labels_belong_to_the_place_before_them() -> None:
    scores = torch.tensor([[[0.0, 3.0], [5.0, 1.0], [0.0, 2.0]]])
    losses, said, true = judged(torch.tensor([[-100, 1, -100, 0]]), scores)
    assert (said.tolist(), true.tolist()) == ([1, 1], [1, 0])
    assert losses.tolist() == pytest.approx([math.log(1 + math.exp(-3.0)), math.log(1 + math.exp(2.0))])
    losses, said, true = judged(torch.tensor([[0, 1], [1, 0], [1, -100]]), torch.tensor([[0.0, 4.0]] * 3))
    assert (said.tolist(), true.tolist()) == ([1, 1], [1, 0])
    assert losses.tolist() == pytest.approx([math.log(1 + math.exp(-4.0)), math.log(1 + math.exp(4.0))])
