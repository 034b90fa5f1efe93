"""Split of a step into micro-batches and ranks, and configs that several ranks cannot run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatrain.config import ConfigError, load_config
from megatrain.machine.planned_machine import find_machine
from megatrain.plan.rank_checks import check_ranks
from megatrain.plan.run_spec import BatchSpec, RunSpec
from megatrain.ranks.world import World
from megatrain.training.resolve import resolve

MakeRun = Callable[..., RunSpec]


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """Return a function that resolves a config with the given changes, for a rank of a world."""

    def make_run(*changes: str, rank: int = 0, size: int = 1, num_hosts: int = 1) -> RunSpec:
        (tmp_path / "run.toml").write_text(
            f'task = "pretrain"\noutput_dir = "out"\ndevice = "cpu"\n[model]\nmodel_name_or_path = "{tmp_path}"\n'
            '[data]\nmax_length = 32\n[[data.train]]\npath = "x.txt"\n'
        )
        run = resolve(load_config(tmp_path / "run.toml", (), [f"training.{change}" for change in changes]).config)
        return replace(run, world=World.local(rank, size, num_hosts))

    return make_run


@pytest.mark.parametrize(
    ("values", "rows", "count"),
    [
        ({"configured_rows": 4, "single_rows": True}, 4, 3),
        ({"single_rows": True}, 1, 12),
        ({"target_tokens": 320}, 4, 3),  # at most five rows
        ({"target_tokens": 256}, 4, 3),
        ({"target_tokens": 255}, 3, 4),
        ({"target_tokens": 1024}, 12, 1),
        ({"target_tokens": 63}, 1, 12),
        ({"target_tokens": 320, "num_lanes": 6}, 2, 6),
        ({"target_tokens": 320, "rows_per_example": 2}, 4, 3),
        ({"target_tokens": 255, "rows_per_example": 2}, 2, 6),
        ({"target_tokens": 63, "rows_per_example": 2}, 2, 6),
        ({}, 12, 1),
    ],
)
def test_rows_of_a_micro_batch_are_the_largest_allowed_divisor(values: dict[str, Any], rows: int, count: int) -> None:
    batch = BatchSpec(
        **{"num_rows": 12, "max_length": 64, "configured_rows": None, "single_rows": False, **values}, order="layer"
    )
    assert (batch.micro_batch_rows, batch.num_micro_batches, batch.num_tokens) == (rows, count, 768)
    assert (batch.together(5), replace(batch, order="micro_batch").together(5)) == (5, 1)


def test_a_rank_has_the_micro_batches_of_its_lanes(make_run: MakeRun) -> None:
    """With seven micro-batches in four lanes, the first of two ranks has three and the second has four."""
    keys = ("per_device_train_batch_size=2", "gradient_accumulation_steps=7", "gradient_lanes=4")
    for rank, own, tokens in ((0, range(3), 192), (1, range(3, 7), 256)):
        run = make_run(*keys, rank=rank, size=2)
        assert (run.num_lanes, run.own_micro_batches, run.num_own_tokens) == (4, own, tokens)
        assert (run.num_together, run.num_busiest_tokens) == (len(own), 256)
        one_at_a_time = replace(run, batch=replace(run.batch, order="micro_batch"))
        assert one_at_a_time.num_together == 1
        assert [run.tokens_of_rank(other) for other in (0, 1)] == [192, 256]
        sharding = run.sharding(3)
        assert (sharding.gathers_ahead, sharding.lanes, sharding.shards.rank, sharding.shards.size) == (
            3,
            run.lanes,
            rank,
            2,
        )
    assert make_run(*keys[:2]).num_lanes == 1 and make_run(*keys[:2], size=3).num_lanes == 3


def test_the_busiest_rank_is_the_first_with_the_most_tokens(make_run: MakeRun) -> None:
    run = make_run("gradient_accumulation_steps=7", "gradient_lanes=4")
    worlds = {(size, hosts): run.as_busiest_rank(size, hosts).world for size, hosts in ((2, 1), (4, 1), (4, 4), (4, 2))}
    assert worlds == {
        (2, 1): World.local(1, 2),
        (4, 1): World.local(1, 4),  # ranks 1, 2 and 3 have two micro-batches
        (4, 4): World.local(1, 4, 4),
        (4, 2): World.local(0, 4, 2),  # refused later
    }
    assert run.as_busiest_rank(5).world == World.local(0, 5)


def test_micro_batches_may_run_one_at_a_time_if_no_bits_change(make_run: MakeRun) -> None:
    several = "gradient_accumulation_steps=2"
    run = make_run(several)
    sequential = run.sequential_run
    assert sequential is not None
    assert (sequential.batch.order, sequential.advanced.micro_batch_order) == ("micro_batch", "micro_batch")
    assert (run.batch.order, run.advanced.micro_batch_order) == ("layer", "auto")
    advanced = run.advanced.model_copy(update={"micro_batch_order": "micro_batch"})
    assert sequential == replace(run, batch=replace(run.batch, order="micro_batch"), advanced=advanced)
    assert sequential.sequential_run is None
    assert replace(run, grad_dtype=torch.bfloat16).sequential_run is None
    assert make_run("gradient_accumulation_steps=1").sequential_run is None
    assert make_run(several, "gradient_lanes=2").sequential_run is None
    assert make_run(several, size=2).sequential_run is None


def test_the_kernels_of_another_machine_are_counted_on_the_cpu(make_run: MakeRun) -> None:
    here, cuda = make_run(), torch.device("cuda")
    there = replace(here, tiers=replace(here.tiers, machine=find_machine("rtx4090-128gb")))
    found = [(run.trace_device.type, run.has_fake_gpu) for run in (here, there)]
    assert found == [("cpu", False), ("cpu", False)]
    found = [
        (run.trace_device.type, run.has_fake_gpu) for run in (replace(here, device=cuda), replace(there, device=cuda))
    ]
    assert found == [("cuda", False), ("cpu", True)]
    assert (here.uses_liger, here.flash) == (False, "FA2")
    chosen = here.with_kernels(use_liger_kernel=True, flash_attention="FA3")
    assert (chosen.uses_liger, chosen.flash) == (True, "FA3")
    assert replace(chosen, model=here.model) == here


# -- refused configs ---------------------------------------------------------------------------------------------------


def refused(run: RunSpec) -> list[str]:
    with pytest.raises(ConfigError) as error:
        check_ranks(run)
    first, *problems = str(error.value).split("\n  ")
    assert first == f"{len(problems)} problem{'s' * (len(problems) > 1)} in the config"
    return problems


@pytest.mark.parametrize(("lanes", "processes"), [(3, "3 processes"), (1, "1 process")])
def test_each_process_needs_a_lane(lanes: int, processes: str, make_run: MakeRun) -> None:
    run = make_run(f"gradient_lanes={lanes}", "gradient_accumulation_steps=1", size=4, num_hosts=2)
    assert refused(run) == [
        f"training.gradient_lanes = {lanes}: 4 processes need at least one lane each. A run keeps its number of lanes, "
        "because it affects the last bits of the results. "
        f"Start at most {processes}, or begin a new run with more lanes"
    ]


ROWS, STEPS, LANES, TOKENS = (
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "gradient_lanes",
    "train_batch_tokens",
)
SAME_STEP = "which is the same step in smaller micro-batches"
ONLY = "processes each needs a micro-batch, but a step has only that many"


@pytest.mark.parametrize(
    ("changes", "size", "problem", "advice"),
    [
        (
            {ROWS: 2, STEPS: 4}, 8, f"{STEPS} = 4: with 8 {ONLY}",
            f"Write {ROWS} = 1 and {STEPS} = 8, {SAME_STEP}, or start at most 4 processes",
        ),
        (
            {ROWS: 6, STEPS: 2}, 3, f"{STEPS} = 2: with 3 {ONLY}",
            f"Write {ROWS} = 4 and {STEPS} = 3, {SAME_STEP}, or start at most 2 processes",
        ),
        ({ROWS: 3, STEPS: 3}, 5, f"{STEPS} = 3: with 5 {ONLY}",
            f"Write {ROWS} = 1 and {STEPS} = 9, {SAME_STEP}, or start at most 3 processes"),
        ({ROWS: 1, STEPS: 4}, 8, f"{STEPS} = 4: with 8 {ONLY}", f"Write {STEPS} = 8, or start at most 4 processes"),
        ({ROWS: 1, STEPS: 1}, 2, f"{STEPS} = 1: with 2 {ONLY}", f"Write {STEPS} = 2, or start at most 1 process"),
        (
            {ROWS: 1, STEPS: 3, LANES: 4}, 3, f"{STEPS} = 3: with 3 {ONLY}",
            f"Write {STEPS} = 4, for a new run {LANES} = 3, so that each has one; or start at most 2 processes",
        ),
        (
            {ROWS: 1, STEPS: 2, LANES: 4}, 3, f"{STEPS} = 2: with 3 {ONLY}",
            f"Write {STEPS} = 4, or start at most 2 processes",
        ),
        (
            {TOKENS: 128}, 8,
            f"{TOKENS} = 128: with 8 processes each needs a micro-batch, and a step has 4 rows of data.max_length = 32",
            f"Write {TOKENS} = 256, or start at most 4 processes",
        ),
    ],
)  # fmt: skip
def test_each_process_needs_a_micro_batch(
    changes: dict[str, int], size: int, problem: str, advice: str, make_run: MakeRun
) -> None:
    keys = [f"{key}={value}" for key, value in changes.items()]
    assert refused(make_run(*keys, size=size)) == [f"training.{problem}. {advice}"]
    check_ranks(make_run(*keys))  # a single process accepts the config


def test_each_process_needs_an_example_of_two_rows(make_run: MakeRun) -> None:
    run = make_run("train_batch_tokens=128", size=4)
    run = replace(run, batch=replace(run.batch, rows_per_example=2))
    assert refused(run) == [
        "training.train_batch_tokens = 128: with 4 processes each needs a micro-batch, and a step has 2 examples of "
        "two rows of data.max_length = 32. Write train_batch_tokens = 256, or start at most 2 processes"
    ]


def test_all_problems_of_several_ranks_are_reported(make_run: MakeRun) -> None:
    run = make_run(f"{ROWS}=1", f"{STEPS}=3", size=4, num_hosts=2)
    run = replace(run, batch=replace(run.batch, order="micro_batch"))
    for optim in ("adafactor", "muon"):
        chosen = replace(run, optimizer=run.optimizer.model_copy(update={"optim": optim}))
        assert refused(chosen) == [
            "2 hosts with 2 processes each: a world with several hosts and several processes on each is refused until "
            "two real hosts have trained in it. Start one process on each host, or all processes on one host",
            f"training.{STEPS} = 3: with 4 {ONLY}. Write {STEPS} = 4, or start at most 3 processes",
            'advanced.micro_batch_order = "micro_batch": with 4 processes all micro-batches of a layer run before the '
            'next layer. Write "layer"',
            f'optimizer.optim = "{optim}" needs whole matrices, and with 4 processes each has only a part of every '
            "matrix. "
            "Start one process, which also resumes a checkpoint of several, or write an optimizer such as adamw",
        ]
    for num_hosts in (1, 4):
        check_ranks(make_run("gradient_accumulation_steps=4", size=4, num_hosts=num_hosts))
