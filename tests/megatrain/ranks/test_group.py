"""A rank's group: the port of the rendezvous, the settings of processes, and the order of host leaders."""

from __future__ import annotations

import os
import socket
from typing import Any

import pytest
from torch.distributed import HashStore

from megatrain.ranks import group as group_module
from megatrain.ranks.group import RankGroup, _port
from megatrain.ranks.table import DistributedConfig
from megatrain.ranks.watch import Failure, LauncherConnection, Watcher
from megatrain.ranks.world import World, WorldError


class Exited(BaseException):
    """Replaces the end of the process, which is ``os._exit``."""


@pytest.fixture
def exits(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Return the list of exit codes."""
    codes: list[int] = []

    def end(code: int) -> None:
        codes.append(code)
        raise Exited

    monkeypatch.setattr(group_module.os, "_exit", end)
    return codes


def test_ranks_wait_for_the_port_of_rank_0(exits: list[int]) -> None:
    here, there = map(LauncherConnection, socket.socketpair())
    there.send(text="not a port")
    there.send(port=29_501)
    assert _port(here) == 29_501 and not exits
    there.send(failed=Failure(0, "there", 7, "no memory").to_json())
    with pytest.raises(Exited):
        _port(here)
    there.close()
    with pytest.raises(Exited):
        _port(here)
    here.close()
    assert exits == [7, 1]


@pytest.mark.parametrize("has_launcher", [False, True])
def test_a_failure_before_the_ranks_meet_is_reported(
    has_launcher: bool, exits: list[int], capfd: pytest.CaptureFixture[str]
) -> None:
    here, there = map(LauncherConnection, socket.socketpair())
    group = RankGroup(World(1, 2, 1, 2, "here", 1), here if has_launcher else None)
    group.send_to_launcher(status="starts")
    with pytest.raises(Exited):
        group.fail("no port", 6, is_own=True)
    with pytest.raises(Exited):
        group.end(75)
    failure = Failure(1, "here", 6, "no port")
    sent = [{"status": "starts"}, {"failed": failure.to_json()}, {"done": 75}]
    assert there.receive(0.0) == (sent if has_launcher else [])
    assert capfd.readouterr().err == ("" if has_launcher else "error: rank 1 (on here): no port\n")
    assert exits == [6, 75]
    here.close()
    there.close()


def test_a_rank_that_ended_normally_is_not_missed(exits: list[int]) -> None:
    store, group = HashStore(), RankGroup(World(1, 2, 1, 2, "here", 1))
    group._watcher = Watcher(group.world, store, timeout_s=60.0)
    with pytest.raises(Exited):
        group.end(0)
    assert store.check(["gone/1"]) and exits == [0]


def test_settings_of_processes_are_checked_when_ranks_join() -> None:
    group = RankGroup(World.local(1, 4, num_hosts=2))
    group._watcher = watcher = Watcher(group.world, HashStore(), timeout_s=60.0)
    with pytest.raises(WorldError) as caught:
        group.join("cpu", DistributedConfig(processes=3, timeout="7s"))  # type: ignore[arg-type]
    assert str(caught.value) == (
        "distributed.processes = 3, but 2 processes were started on this machine. Remove the key with torchrun and "
        "srun, which start the processes themselves"
    )
    assert (watcher._timeout_s, watcher._limit_s) == (7.0, 7.0)
    notices: list[str] = []
    group.listen(on_notice=notices.append)
    watcher.on_notice("the drive is full")
    failures: list[Failure] = []
    group.listen(on_failure=failures.append)
    group._on_failure(Failure(1, "here", 1, "gone"))
    assert notices == ["the drive is full"] and failures == [Failure(1, "here", 1, "gone")]


@pytest.mark.parametrize(("rank", "order"), [(0, ["work", "wait", "wait"]), (3, ["wait", "work", "wait"])])
def test_the_first_rank_of_each_host_works_first(rank: int, order: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    group, events = RankGroup(World.local(rank, 4, num_hosts=2)), list[str]()
    monkeypatch.setattr(group, "wait_for_all", lambda: events.append("wait"))

    def work() -> int:
        events.append("work")
        return 5

    assert group.run_host_leaders_first(work) == 5 and events == order


def test_the_environment_selects_the_group(monkeypatch: pytest.MonkeyPatch) -> None:
    variables: Any = {"RANK": "2", "WORLD_SIZE": "3", "LOCAL_RANK": "2", "LOCAL_WORLD_SIZE": "3"}
    with monkeypatch.context() as patched:
        for name, value in (*variables.items(), ("CUDA_VISIBLE_DEVICES", "4,5,6"), ("TORCH_CPP_LOG_LEVEL", "")):
            patched.setenv(name, value)
        patched.delenv("TORCH_CPP_LOG_LEVEL")
        group = RankGroup.from_environment()
        assert group.world == World.local(2, 3) and group._launcher is None
        assert (os.environ["CUDA_VISIBLE_DEVICES"], os.environ["TORCH_CPP_LOG_LEVEL"]) == ("6", "ERROR")
    assert RankGroup.single().world == World.single()
