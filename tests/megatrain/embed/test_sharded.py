"""FSDP2 shards parameters over two ranks, and each rank keeps its optimizer state in its own store."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

import megatrain
from processes import sharded_ranks
from processes.ranks import run_on_ranks
from processes.sharded_ranks import CASES, STEPS, Net, load_half, loss_of, make, optimizer_of, step

#: Cases in which one process is bit-identical to two ranks. Clipping adds squares in another order.
SAME_BITS_AS_ONE_PROCESS = ("fp32", "bf16")
PAGE = 4096
pytestmark = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()), reason="no gloo"
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return the folder for the checkpoints of both ranks."""
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Any]]:
    """Run all cases on two ranks. Return each rank's results, keyed by case."""
    return run_on_ranks(2, sharded_ranks.run_all, folder, limit_s=240.0)


def train_alone(module: Net, optimizer: Any, case: str, steps: range) -> list[list[float]]:
    """Train in one process on both halves of each batch. Return the losses of each half."""
    losses: list[list[float]] = [[], []]
    for number in steps:
        for half in (0, 1):
            loss = loss_of(module, number, half)
            (loss / 2).backward()
            losses[half].append(loss.item())
        step(module, optimizer, case)
    return losses


def same(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return list(one) == list(other) and all(torch.equal(numbers, other[name]) for name, numbers in one.items())


def test_results_are_bit_identical_for_any_tier_and_after_resume(ranks: list[dict[str, Any]]) -> None:
    for case, found in ((case, rank[case]) for case in CASES for rank in ranks):
        kinds = ["ram", "nvme", *CASES[case][3]]
        if case == "int8":
            kinds.remove("tensors")  # encoded again: see the next test
        for kind in kinds:
            assert found[kind]["losses"] == found["ram"]["losses"], (case, kind)
            assert same(found[kind]["weights"], ranks[0][case]["ram"]["weights"]), (case, kind)
            assert same(found[kind]["averages"], ranks[0][case]["ram"]["averages"]), (case, kind)
        assert found["nvme"]["norm"] == found["ram"]["norm"] == ranks[0][case]["ram"]["norm"]
        assert found["ram"]["is_kept"] and found["nvme"]["is_kept"]
        assert not found["ram"]["home_bytes"]["nvme"] and not found["nvme"]["home_bytes"]["ram"]
        assert found["nvme"]["home_bytes"]["nvme"] >= found["ram"]["home_bytes"]["ram"] > 0


def test_8_bit_moments_loaded_from_tensors_are_reencoded(ranks: list[dict[str, Any]]) -> None:
    for found in (rank["int8"] for rank in ranks):
        for name, numbers in found["ram"]["weights"].items():
            torch.testing.assert_close(found["tensors"]["weights"][name], numbers, rtol=2**-6, atol=2**-8)


def test_two_ranks_and_one_process(ranks: list[dict[str, Any]]) -> None:
    for case in CASES:
        check_two_ranks_and_one_process(case, ranks)


def check_two_ranks_and_one_process(case: str, ranks: list[dict[str, Any]]) -> None:
    """Compare both ranks with one process. A rank's state covers only its shard, about half of most parameters."""
    module = make(CASES[case][0])
    with megatrain.open_store(ram="8MiB") as store:
        optimizer = optimizer_of(module, case, store)
        losses = train_alone(module, optimizer, case, range(STEPS))
        alone_bytes = store.stats().tiers["ram"].home_bytes
        weights = {name: numbers.detach() for name, numbers in module.state_dict().items()}
        if optimizer.ema_decay:
            with optimizer.averaged_parameters():
                assert same(dict(module.state_dict()), ranks[0][case]["ram"]["averages"])
    for rank, found in enumerate(each[case]["ram"] for each in ranks):
        if case == "fp32":
            # Each of nine parameters has two moments, which take whole pages. A matrix takes two pages, half a matrix
            # one page. Only rank 0 has the single row of the scale.
            assert (alone_bytes, found["home_bytes"]["ram"]) == (26 * PAGE, (18, 16)[rank] * PAGE)
        if case in SAME_BITS_AS_ONE_PROCESS:
            assert found["losses"] == losses[rank], case
            assert same(found["weights"], weights), case
            continue
        if optimizer.grad_norm is not None:
            assert found["norm"] == pytest.approx(optimizer.grad_norm, rel=1e-12)
        close = 2**-6 if case == "int8" else 1e-6
        assert found["losses"] == pytest.approx(losses[rank], rel=close)
        for name, numbers in weights.items():
            torch.testing.assert_close(found["weights"][name], numbers, rtol=close, atol=close)


def test_results_match_torch(ranks: list[dict[str, Any]]) -> None:
    for case in ("fp32", "clipped"):
        module = make(torch.float32)
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2, weight_decay=0.1, foreach=False)
        train_alone(module, optimizer, case, range(STEPS))
        for name, expected in module.state_dict().items():
            found = ranks[0][case]["nvme"]["weights"][name]
            torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5 * expected.abs().max().item())


def test_values_are_summed_over_all_ranks_of_each_sharded_mesh_dimension() -> None:
    """Rank r adds 10 ** r. In the grid, columns are the ranks (0, 2) and (1, 3), and rows are (0, 1) and (2, 3)."""
    columns, rows = [101.0, 1010.0] * 2, [11.0, 11.0, 1100.0, 1100.0]
    for rank, found in enumerate(run_on_ranks(4, sharded_ranks.sums_over_shards)):
        assert found == [1111.0, 2222.0, 1111.0, columns[rank], rows[rank], 3.0, 4.0]


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_one_process_resumes_from_two_ranks(folder: Path, ranks: list[dict[str, Any]]) -> None:
    for case in SAME_BITS_AS_ONE_PROCESS:
        module = make(CASES[case][0])
        with megatrain.open_store(ram="4MiB") as store:
            optimizer = optimizer_of(module, case, store, checkpoint="tensors")
            load_half(module, optimizer, None, folder / case, None)
            losses = train_alone(module, optimizer, case, range(STEPS // 2, STEPS))
        assert losses[1] == ranks[1][case]["ram"]["losses"][STEPS // 2 :], case
        assert same(dict(module.state_dict()), ranks[0][case]["ram"]["weights"]), case


def test_torch_distributed_checkpoint_of_a_generation_is_refused() -> None:
    """Otherwise torch.distributed.checkpoint would run a step with zero gradients, and save no state."""
    module = nn.Linear(4, 4)
    with megatrain.open_store(ram="4MiB") as store:
        optimizer = megatrain.TieredAdamW(module.parameters(), store=store)
        module(torch.ones(1, 4)).sum().backward()
        optimizer.step()
        before = optimizer.state[module.weight]["exp_avg"].clone()
        optimizer.zero_grad()
        with pytest.raises(TypeError, match='checkpoint="tensors"'):
            get_optimizer_state_dict(module, optimizer)
        assert torch.equal(optimizer.state[module.weight]["exp_avg"], before)


REFUSED = {
    "offload": "so torch gathers its weights",
    "gradients": "offload_gradients=True with a sharded parameter",
    "whole": "TieredAdafactor needs whole matrices",
    "matrix": "TieredMuon needs whole matrices",
    "partial": "one term of a sum, which cannot be trained",
    "checkpoint": 'Create the optimizer with checkpoint="tensors"',
    "gradient": "has the placements (Replicate(),), but the parameter has (Shard(dim=0),)",
    "rank": "this state names a generation of rank {other} of 2, but this is rank {own} of 2",
    "world": "this state names a generation of rank 0 of 4, but this is rank {own} of 2",
    "partly sharded": "this state names a generation of one whole model, but this is rank {own} of 2",
    "replaced": "Create the optimizer afterwards",
}


def test_unsupported_sharded_calls_are_refused(ranks: list[dict[str, Any]]) -> None:
    for own, found in enumerate(rank["refused"] for rank in ranks):
        assert found.keys() == REFUSED.keys()
        for name, expected in REFUSED.items():
            assert expected.format(own=own, other=1 - own) in found[name], name
