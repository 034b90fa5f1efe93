"""The rank and GPU of a process, from the environment variables of torchrun, srun and the launcher."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

from megatrain.ranks import world as world_module
from megatrain.ranks.world import World, WorldError, rendezvous_address, store_paths

TORCHRUN = {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
SRUN = {
    "SLURM_PROCID": "5",
    "SLURM_STEP_NUM_TASKS": "6",
    "SLURM_LOCALID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "2(x3)",
    "SLURM_STEP_NODELIST": "gpu[007-009],cpu1",
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
}


def numbers(world: World) -> tuple[int, ...]:
    return world.rank, world.size, world.local_rank, world.local_size, world.num_hosts, world.host_index


def described(ranks: str) -> str:
    """Return the message for an environment that contradicts itself."""
    return (
        f"the environment describes {ranks} on its host. Start the ranks with megatrain-tier run --processes N, "
        "torchrun or srun, the same number on each host"
    )


def test_ranks_of_torchrun_and_srun() -> None:
    assert numbers(World.from_environment(TORCHRUN)) == (5, 8, 1, 4, 2, 1)
    assert numbers(World.from_environment(SRUN)) == (5, 6, 1, 2, 3, 2)
    assert numbers(World.from_environment({**SRUN, **TORCHRUN})) == (5, 8, 1, 4, 2, 1), "srun torchrun ..."
    assert rendezvous_address(SRUN) == ("gpu007", 20_000 + 97 * 4711 % 10_000)
    assert rendezvous_address({**SRUN, "SLURM_STEP_ID": "3"}) == ("gpu007", 20_000 + (97 * 4711 + 3) % 10_000)
    assert rendezvous_address({**SRUN, "SLURM_STEP_NODELIST": "cpu1,gpu2"})[0] == "cpu1"
    assert rendezvous_address({**SRUN, "MASTER_ADDR": "h"}) == ("h", 20_000 + 97 * 4711 % 10_000)
    assert rendezvous_address({**SRUN, "MASTER_ADDR": "h", "MASTER_PORT": "77"}) == ("h", 77)


def test_environment_without_ranks_is_a_single_process() -> None:
    """A Slurm batch script has its job's variables, but it is not a rank."""
    batch = {"SLURM_PROCID": "0", "SLURM_NTASKS": "8", "SLURM_LOCALID": "0", "SLURM_TASKS_PER_NODE": "8"}
    for environment in ({}, batch, {"RANK": "0"}):
        assert numbers(World.from_environment(environment)) == numbers(World.single()) == (0, 1, 0, 1, 1, 0)


@pytest.mark.parametrize(
    ("environment", "says"),
    [
        ({**TORCHRUN, "RANK": "8"}, described("rank 8 of 8, number 1 of 4")),
        ({**TORCHRUN, "RANK": "-1"}, described("rank -1 of 8, number 1 of 4")),
        ({**TORCHRUN, "LOCAL_RANK": "4"}, described("rank 5 of 8, number 4 of 4")),
        ({**TORCHRUN, "LOCAL_RANK": "-1"}, described("rank 5 of 8, number -1 of 4")),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "3"}, described("rank 5 of 8, number 1 of 3")),
        ({**TORCHRUN, "LOCAL_WORLD_SIZE": "0"}, described("rank 5 of 8, number 1 of 0")),
        ({**TORCHRUN, "RANK": "five"}, "RANK = 'five' in the environment is not a number"),
        (
            {**SRUN, "SLURM_STEP_TASKS_PER_NODE": "2(x2),1"},
            "srun starts 2, 2, 1 processes on the hosts. Start the same number on each: --ntasks-per-node",
        ),
        (
            {**SRUN, "SLURM_STEP_TASKS_PER_NODE": "many"},
            "SLURM_STEP_TASKS_PER_NODE = 'many' in the environment cannot be read",
        ),
    ],
)
def test_inconsistent_environment_is_refused(environment: dict[str, str], says: str) -> None:
    with pytest.raises(WorldError) as raised:
        World.from_environment(environment)
    assert str(raised.value) == says


def test_folders_and_names_of_ranks(tmp_path: Path) -> None:
    assert (store_paths(1), store_paths(3)) == ([""], ["rank00000", "rank00001", "rank00002"])
    one, other = World.local(4, 6, num_hosts=2), World.local(1, 2)
    assert numbers(one) == (4, 6, 1, 3, 2, 1) and numbers(other) == (1, 2, 1, 2, 1, 0)
    assert one.rank_folder(tmp_path) == tmp_path / "rank00004" and World.single().rank_folder(tmp_path) == tmp_path
    assert [one.name_of(5, "gpu7"), one.name_of(5), other.name_of(0, "gpu7")] == ["rank 5 (gpu7)", "rank 5", "rank 0"]
    assert [each.is_first for each in (one, World.local(0, 2))] == [False, True]


def test_unreadable_node_list_is_an_error() -> None:
    with pytest.raises(WorldError) as caught:
        rendezvous_address({"SLURM_JOB_ID": "1", "SLURM_STEP_NODELIST": "[1"})
    assert str(caught.value) == ("SLURM_STEP_NODELIST = '[1' in the environment cannot be read. Set MASTER_ADDR")


def test_missing_master_port_is_an_error() -> None:
    with pytest.raises(WorldError, match="MASTER_PORT"):
        rendezvous_address({**TORCHRUN, "MASTER_ADDR": "h"})


@pytest.mark.parametrize(
    ("visible", "taken"),
    [
        (None, ["0", "1", "2"]),
        ("4,5,6,7", ["4", "5", "6"]),
        ("GPU-a,GPU-b", ["GPU-a", "GPU-b", ""]),  # rank 2 sees no GPU, which the ranks report when they connect
        ("3", ["3", "3", "3"]),  # may be a different GPU for each process
        ("", ["", "", ""]),
    ],
)
def test_each_rank_takes_a_gpu(visible: str | None, taken: list[str]) -> None:
    for rank, name in enumerate(taken):
        environment = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
        World.local(rank, len(taken)).select_gpu(environment)
        assert environment == {"CUDA_VISIBLE_DEVICES": name}
    alone: dict[str, str] = {}
    World.single().select_gpu(alone)
    assert not alone


BUSES = {
    "each its own": (["0000:01:00.0", "0000:02:00.0", "0000:01:00.0", "0000:02:00.0"], ""),
    "no GPUs": ([None] * 4, ""),
    "not known": ([""] * 4, ""),
    "the same": (
        ["0000:01:00.0", "0000:02:00.0", "0000:02:00.0", "0000:02:00.0"],
        "rank 2 and rank 3 would compute on the same GPU of .*, 0000:02:00.0. Start one process per GPU, and make all "
        r"GPUs or only its own GPU visible to each process \(CUDA_VISIBLE_DEVICES\)$",
    ),
    "one has none": (
        ["0000:01:00.0", "0000:02:00.0", "0000:03:00.0", None, "0000:01:00.0", "0000:02:00.0"],
        '3 processes on .*, of which 2 found a GPU. Start at most one for each GPU, or set device = "cpu"$',
    ),
}


@pytest.mark.parametrize("case", BUSES)
def test_the_ranks_of_a_host_have_a_gpu_each(case: str) -> None:
    """There are hosts with two or three ranks each. Bus ids on different hosts may be equal."""
    buses, says = BUSES[case]
    size = len(buses)
    store, worlds = HashStore(), [World.local(rank, size, num_hosts=2) for rank in range(size)]

    def check(rank: int) -> str:
        try:
            world_module._check_gpus(worlds[rank], store, buses[rank])
        except WorldError as error:
            return str(error)
        return ""

    with ThreadPoolExecutor(size) as threads:
        said = list(threads.map(check, range(size)))
    assert len(set(said)) == 1, "all ranks say the same"
    assert re.match(says, said[0]) and bool(said[0]) == bool(says)


def test_joining_a_group_compares_gpus() -> None:
    store = HashStore()
    store.set("gpu/1", "here 0000:01:00.0")
    with pytest.raises(WorldError, match="the same GPU"):
        world_module.init(World.local(0, 2), torch.device("cuda", 0), store, "0000:01:00.0")
