"""Ranks divide the cores near their GPUs, without a gap and without sharing a core."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from megatrain.ranks import group as group_module
from megatrain.ranks.affinity import gpu_bus_id, nearby_cores, parse_cores, rank_cores
from megatrain.ranks.group import RankGroup
from megatrain.ranks.world import World


def test_ranks_divide_the_cores() -> None:
    cores = [9, 2, 4, 7, 5, 3, 8]
    assert [rank_cores(rank, 3, cores) for rank in range(3)] == [[2, 3], [4, 5], [7, 8, 9]]
    assert [rank_cores(rank, 7, cores) for rank in range(7)] == [[core] for core in sorted(cores)]
    assert [rank_cores(rank, 8, cores) for rank in range(8)] == [sorted(cores)] * 8
    assert rank_cores(0, 1) == sorted(os.sched_getaffinity(0))


def test_cores_of_a_numa_node_are_read_from_sysfs(tmp_path: Path) -> None:
    for text, expected in (("0-3,8\n", [0, 1, 2, 3, 8]), ("5", [5]), ("", []), ("2,4-5,", [2, 4, 5])):
        assert parse_cores(text) == expected
    (tmp_path / "0000:3b:00.0").mkdir()
    list_file = tmp_path / "0000:3b:00.0" / "local_cpulist"
    list_file.write_text("4-6,11\n")
    assert nearby_cores("0000:3B:00.0", tmp_path) == [4, 5, 6, 11]
    assert nearby_cores("0000:3c:00.0", tmp_path) == []
    list_file.write_text("four\n")
    assert nearby_cores("0000:3b:00.0", tmp_path) == []


def test_address_of_the_current_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = {1: SimpleNamespace(pci_domain_id=2, pci_bus_id=0x3B, pci_device_id=10)}
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties.__getitem__)
    assert gpu_bus_id() == "0002:3b:0a.0"
    for name in ("pci_domain_id", "pci_bus_id", "pci_device_id"):
        properties[1] = SimpleNamespace(**{"pci_domain_id": 0, "pci_bus_id": 0, "pci_device_id": 0, name: None})
        assert gpu_bus_id() == ""
    properties[1] = SimpleNamespace(pci_domain_id=0, pci_bus_id=0, pci_device_id=0)
    assert gpu_bus_id() == "0000:00:00.0"


def test_ranks_with_gpus_on_one_numa_node_divide_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """There are two hosts with four ranks each. Ranks 0, 2 and 3 of a host share a node; rank 1 is on another."""
    nodes = {"a": [0, 1, 2, 3, 4, 5, 20], "b": [8, 9], "none": []}
    allowed, pinned = {*range(10)}, list[list[int]]()
    by_rank = [(host, sorted({*nodes[node]} & allowed)) for host in (0, 1) for node in ("a", "b", "a", "a")]
    monkeypatch.setattr(group_module, "nearby_cores", nodes.__getitem__)
    fake_os: Any = SimpleNamespace(
        sched_getaffinity=lambda process: allowed, sched_setaffinity=lambda process, cores: pinned.append(cores)
    )
    monkeypatch.setattr(group_module, "os", fake_os)
    for rank in range(8):
        group = RankGroup(World.local(rank, 8, num_hosts=2))
        monkeypatch.setattr(group, "gather", lambda item, rank=rank: [*by_rank[:rank], item, *by_rank[rank + 1 :]])
        group._pin_near_gpu("b" if rank % 4 == 1 else "a")
    assert pinned == [[0, 1], [8, 9], [2, 3], [4, 5]] * 2
    group._pin_near_gpu("none")
    assert len(pinned) == 8
