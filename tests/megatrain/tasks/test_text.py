"""Evaluations of held-out texts give the same results however the rows are distributed over ranks."""

from __future__ import annotations

import math
from typing import Any

from megatrain.engine.forward import SummedLoss
from megatrain.tasks.text import MeanLoss, TextTask

PASSES = [SummedLoss((0.1, 0.2), 3), SummedLoss((), 0), SummedLoss((1e16, 0.3, -1e16), 4)]


def accumulator_of(*passes: SummedLoss) -> MeanLoss:
    accumulator = TextTask().accumulator()
    for each in passes:
        accumulator.add(each)
    return accumulator


def test_mean_is_independent_of_rank_assignment() -> None:
    alone = accumulator_of(*PASSES).compute(lambda own: [own])
    shown: list[Any] = []
    ranks = [accumulator_of(PASSES[2]), accumulator_of(*PASSES[:2])]
    for each in ranks:
        each.compute(lambda own: [shown.append(own) or own])
    assert [each.compute(lambda own: shown) for each in ranks] == [alone, alone]
    assert alone.loss == math.fsum([0.1, 0.2, 0.3]) / 7 and alone.num_tokens == 7 and not alone.metrics


def test_rows_without_a_label_have_no_loss() -> None:
    found = accumulator_of(PASSES[1]).compute(lambda own: [own])
    assert math.isnan(found.loss) and found.num_tokens == 0
