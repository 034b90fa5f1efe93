"""A module shared by ranks: results do not depend on their number, and ranks that act differently raise an error."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from megatrain.ranks.shards import SHARD_BLOCK_ELEMENTS
from processes import shared_module
from processes.ranks import run_on_ranks
from processes.shared_module import CASES, LANES, STEPS, loss_of, make

#: By case: bytes per trained element (weight and state), and bytes per frozen element (weight).
ELEMENT_BYTES = {"fp32": (16, 4), "bf16": (8, 2), "int8": (2 + 2 + 2 * (1 + 4 / 256), 2), "gpu": (12, 4)}
pytestmark = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()), reason="no gloo"
)


def run_ranks(world: int, folder: Path, cases: list[str]) -> list[dict[str, Any]]:
    """Run the cases on ``world`` ranks. Return each rank's results, keyed by case."""
    folder.mkdir()
    return run_on_ranks(world, shared_module.run_all, folder, cases, limit_s=240.0)


def check_same(alone: dict[str, Any], ranks: list[dict[str, Any]], case: str) -> None:
    """Compare each rank with a single rank that computes all lanes."""
    expected, lanes = alone[case], set()
    trained, frozen = ELEMENT_BYTES[case]
    num_blocks = 2 * math.ceil(5 / len(ranks)) + 2  # five per layer; one each for the embedding and the unused part
    for found in (rank[case] for rank in ranks):
        assert found["norms"] == expected["norms"]
        assert all(expected["losses"][number] == loss for number, loss in found["losses"].items())
        lanes |= found["losses"].keys()
        kinds = {"resumed": "weights", "resumed averages": "averages"}
        for kind in ("weights", "averages", "changed", *kinds):
            wanted = expected[kinds.get(kind, kind)]
            assert list(found[kind]) == list(wanted)
            assert all(torch.equal(numbers, found[kind][name]) for name, numbers in wanted.items()), kind
        assert found["is_kept"] and found["state_bytes"] == (num_blocks * trained + frozen) * SHARD_BLOCK_ELEMENTS
        assert "this rank has only a shard of the state" in found["state"]
    assert lanes == expected["losses"].keys() and len(lanes) == STEPS * LANES


def test_results_are_bit_identical_for_any_number_of_ranks(tmp_path: Path) -> None:
    cases = ["fp32", "gpu"]
    (alone,), ranks = (run_ranks(world, tmp_path / str(world), cases) for world in (1, 2))
    for case in cases:
        check_same(alone, ranks, case)
    weights = alone["fp32"]["weights"]
    changed = alone["fp32"]["changed"]
    assert torch.equal(changed["layers.0.0.weight"], 2 * weights["layers.0.0.weight"])
    assert torch.equal(changed["embed.weight"], weights["embed.weight"] + 1)
    check_against_torch(alone["fp32"])
    for found in (alone, *ranks):
        assert re.match(r"CapacityError: tier 'gpu' is too small", found["gpu"]["room"])
        assert list(found["gpu"]["losses"].values()) == pytest.approx(list(found["fp32"]["losses"].values()), rel=1e-4)
    check_refusals([rank["refused"] for rank in ranks])


def test_gradients_measured_before_a_step_are_exchanged_only_once() -> None:
    (found,) = run_on_ranks(1, shared_module.measure_before_step)
    assert found["norms"] == [8.0] * 4 and found["weight"] == [-2.0]
    for text in found["late"]:
        assert text.startswith("WeightInUseError: a gradient of weight arrived after gradients were exchanged")


@pytest.mark.slow
def test_four_ranks(tmp_path: Path) -> None:
    (alone,), *others = (run_ranks(world, tmp_path / str(world), list(CASES)) for world in (1, 2, 4))
    for ranks in others:
        for case in CASES:
            check_same(alone, ranks, case)


def check_against_torch(alone: dict[str, Any]) -> None:
    """Compare with a plain torch loop that trains on the mean of the lanes' losses."""
    module = make(torch.float32)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, weight_decay=0.1, foreach=False)
    for step in range(STEPS):
        for lane in range(LANES):
            loss = loss_of(module, step, lane)
            assert loss.item() == pytest.approx(alone["losses"][f"{step}.{lane}"], rel=1e-4)
            (loss / LANES).backward()
        norm = torch.nn.utils.clip_grad_norm_(module.parameters(), 0.5)
        assert norm.item() == pytest.approx(alone["norms"][step], rel=1e-4)
        optimizer.step()
        optimizer.zero_grad()


REFUSED = {
    "forward": "RanksDifferError: the ranks of an offloaded module do different things: rank 0 comes to the weights of "
    "model/layers.0/weight as number 2, rank 1 to the weights of model/layers.1/weight",
    "backward": "rank 0 comes to the end of a backward: step() or measure_grad_norm()",
    "seed": "RanksDifferError: the ranks do not have the same offloaded module: embed.weight is torch.float32",
    "lanes": "gradient_lanes=3 for 2 ranks",
    "left": "unused.weight is trained but left out of the store",
    "parallel": "DistributedDataParallel around an offloaded module",
    "whole": "this optimizer needs whole matrices, but embed is shared by 2 ranks",
    "no group": "gradient_lanes without group",
    "room": "CapacityError: tier 'ram' is too small",
    "left over": "True",
}


def check_refusals(ranks: list[dict[str, str]]) -> None:
    """Check that both ranks raise the same error, even if only one of them has a reason."""
    assert ranks[0] == ranks[1]
    assert ranks[0].keys() == REFUSED.keys()
    for name, expected in REFUSED.items():
        assert expected in ranks[0][name], name
