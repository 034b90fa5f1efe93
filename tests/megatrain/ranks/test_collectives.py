"""Transfers between ranks: contents, counted bytes, and errors that reach all ranks."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch

from megatrain.ranks.collectives import (
    Collectives,
    RanksDifferError,
    SingleRank,
    check_same,
    make_collectives,
)
from megatrain.ranks.group import RankGroup
from megatrain.ranks.messages import broadcast_message
from megatrain.ranks.world import World
from processes.ranks import run_on_ranks

SIZE = 3
pytestmark = pytest.mark.skipif(
    not (torch.distributed.is_available() and torch.distributed.is_gloo_available()), reason="no gloo"
)


def transfer(world: World) -> dict[str, Any]:
    """Use each collective, and return its results on this rank."""
    rank, found = world.rank, dict[str, Any]()
    collectives = make_collectives(world, "gpu")
    assert isinstance(collectives, Collectives)
    on_hosts = Collectives(num_hosts=SIZE)
    found["start"] = (collectives.rank, collectives.size, dict(collectives.moved_bytes), dict(on_hosts.moved_bytes))
    found["devices"] = [collectives.supports_device(kind) for kind in ("cpu", "none")]
    for each in (collectives, on_hosts):
        whole = torch.zeros(2 * SIZE, dtype=torch.bfloat16)
        work = each.gather(whole, torch.tensor([rank, rank + 10], dtype=torch.bfloat16), is_async=each is on_hosts)
        if work is not None:
            work.wait()
        found.setdefault("gathered", []).append((work is not None, whole.tolist()))
    # Rank s sends 3 * s + d + 1 numbers to rank d.
    sent, received = ([3 * rank + other + 1 for other in range(SIZE)], [3 * other + rank + 1 for other in range(SIZE)])
    input_ = torch.tensor([100 * rank + other for other in range(SIZE) for _ in range(sent[other])])
    output = torch.zeros(sum(received), dtype=torch.int64)
    assert on_hosts.exchange(output, input_, received, sent) is None
    found["exchanged"] = output.tolist()
    found["moved"] = dict(collectives.moved_bytes), dict(on_hosts.moved_bytes)
    share, parts = torch.zeros(2), [torch.full((2,), float(other + 5)) for other in range(SIZE)]
    collectives.scatter(share, parts if rank == 1 else None, 1)
    collected = [torch.zeros(2) for _ in range(SIZE)]
    collectives.collect(share * 2, collected if rank == 2 else None, 2)
    found["scattered"] = share.tolist(), [each.tolist() for each in collected]
    found["objects"] = collectives.gather_objects({"rank": "x" * 10**rank})
    found["broadcast"] = broadcast_message(("from", rank), source=1), RankGroup(world).broadcast(rank + 7)
    found["errors"] = [text_of(partial(fail, rank, ranks), collectives) for ranks in ((1, 2), (2,), ())]
    found["differ"] = [
        difference(collectives, parts)
        for parts in (
            {"lr": "1", "seed": "5"},
            {"lr": "1", "seed": "5" if rank < 2 else "6"},
            {"lr": "1", **({"only": "7"} if rank == 1 else {})},
        )
    ]
    found["leaders"] = RankGroup(world).run_host_leaders_first(lambda: rank + 1)
    return found


def fail(rank: int, ranks: tuple[int, ...]) -> int:
    if rank in ranks:
        raise ValueError(f"error of rank {rank}")
    return 10 + rank


def text_of(action: Any, collectives: Collectives) -> Any:
    """Run an action on all ranks. Return its result or the text of the error."""
    try:
        return collectives.run_on_all(action)
    except ValueError as error:
        return str(error)


def difference(collectives: Collectives, parts: dict[str, str]) -> str:
    try:
        check_same(collectives.gather_objects, "config", parts, "Start again")
    except RanksDifferError as error:
        return str(error)
    return ""


def test_transfers_between_three_ranks() -> None:
    ranks = run_on_ranks(SIZE, transfer)
    links, host_links = {"ranks->gpu": 0, "gpu->ranks": 0}, {"hosts->ram": 0, "ram->hosts": 0}
    numbers = [0.0, 10.0, 1.0, 11.0, 2.0, 12.0]
    exchanged_bytes = [(40, 88), (80, 80), (120, 72)]  # sent and received, without the rank's own part
    for rank, found in enumerate(ranks):
        assert found["start"] == (rank, SIZE, links, host_links)
        assert found["devices"] == [True, False]
        assert found["gathered"] == [(False, numbers), (True, numbers)]
        counts = [3 * other + rank + 1 for other in range(SIZE)]
        assert found["exchanged"] == [100 * other + rank for other in range(SIZE) for _ in range(counts[other])]
        sent, received = exchanged_bytes[rank]
        assert found["moved"] == (
            {"ranks->gpu": 8, "gpu->ranks": 8},
            {"hosts->ram": 8 + received, "ram->hosts": 8 + sent},
        )
        collected = [[10.0] * 2, [12.0] * 2, [14.0] * 2] if rank == 2 else [[0.0] * 2] * SIZE
        assert found["scattered"] == ([5.0 + rank] * 2, collected)
        assert found["objects"] == [{"rank": "x"}, {"rank": "x" * 10}, {"rank": "x" * 100}]
        assert found["broadcast"] == (("from", 1), 7)
        assert found["errors"] == ["error of rank 1", "error of rank 2", 10 + rank]
        assert found["leaders"] == rank + 1
        assert found["differ"] == [
            "",
            "the ranks do not have the same config: seed is 5 on rank 0, but 6 on rank 2. Start again",
            "the ranks do not have the same config: only is nothing on rank 0, but 7 on rank 1. Start again",
        ]


def test_a_single_process_transfers_nothing() -> None:
    single = make_collectives(World.single(), "gpu")
    assert isinstance(single, SingleRank)
    assert (single.rank, single.size, single.moved_bytes, single.gather_objects("x")) == (0, 1, {}, ["x"])
    group = RankGroup.single()
    assert (group.gather(3), group.broadcast(4), group.run_host_leaders_first(lambda: 5)) == ([3], 4, 5)
    group.wait_for_all()
