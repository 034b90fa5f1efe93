"""Layer costs are fitted to measured times. From simulated times, the fit recovers the known costs."""

from __future__ import annotations

import numpy as np
import pytest

from megatrain.extras.doctor.layers import LayerShape, _measure_phases, fit_costs, measure_layers

KNOWN = np.array([4e-12, 7e-12, 5e-11, 3e-5])  # seconds per FLOP of products, FLOP of attention, byte and launch
WORK = np.random.default_rng(0).uniform(0.1, 1.0, (12, 4)) * [1e10, 1e9, 1e8, 1e3]


def test_known_costs_are_found_again() -> None:
    assert fit_costs(list(zip(WORK @ KNOWN, WORK, strict=True))) == pytest.approx(KNOWN, rel=1e-9)


def test_unmeasured_kind_of_work_has_zero_cost() -> None:
    work = WORK * [1, 0, 1, 1]
    found = fit_costs(list(zip(work @ KNOWN, work, strict=True)))
    assert found == pytest.approx(KNOWN * [1, 0, 1, 1], rel=1e-9)


def test_no_cost_is_negative() -> None:
    """If the best fit has a negative attention cost, that cost becomes 0, and the other costs are fitted without it."""
    taken = WORK @ (KNOWN * [1, -1, 1, 1])
    found = fit_costs(list(zip(taken, WORK, strict=True)))
    assert min(found) == found[1] == 0
    scaled = WORK[:, [0, 2, 3]] / taken[:, None]
    size = scaled.max(axis=0)
    expected = np.linalg.lstsq(scaled / size, np.ones(12), rcond=None)[0] / size
    assert np.array(found)[[0, 2, 3]] == pytest.approx(expected, rel=1e-9)


def test_short_and_long_phases_have_equal_weight() -> None:
    """If a short and a long phase imply different costs, the fitted cost lies between the two."""
    [cost] = fit_costs([(1.0, [1e9]), (2e-3, [1e6])])
    assert cost == pytest.approx(1.2e-9)  # least squares of 1e9 c - 1 and 0.5e9 c - 1


def test_attention_counts_the_pairs_that_a_causal_kernel_computes() -> None:
    """As in plans, a forward has two products. A backward recomputes these two and has five more for gradients."""
    shape = LayerShape(128, 128, 2, 64, num_rows=3, row_tokens=96)
    _, amounts = zip(*_measure_phases(shape, "float32", 0.0), strict=True)
    pairs = shape.row_tokens**2 / 2  # pairs of a query and a key, in one row of one layer
    product = 2 * pairs * shape.hidden_size * shape.num_rows * shape.num_layers
    by_phase = sorted(attention for _, attention, _, _ in amounts)
    assert by_phase == pytest.approx([0, 2 * product, (2 + 5) * product], rel=0.02)


@pytest.mark.slow
def test_measured_layer_rates_are_plausible() -> None:
    found = measure_layers(seconds=0.0)
    assert 1e9 < found.matmul_flops["float32"] < 1e14 and 1e2 < found.launches_per_s < 1e7
    for rates in (found.matmul_flops, found.attention_flops, found.elementwise):
        assert rates.keys() <= {"float32", "bfloat16"} and all(rate > 0 for rate in rates.values())
