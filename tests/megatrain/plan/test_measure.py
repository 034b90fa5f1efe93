"""Timing the steps of a plan covers every tick, stays within the RAM tier, and needs no data, weights or files."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner

from megatrain.config import load_config
from megatrain.data.row_kind import CHATS
from megatrain.engine.program.block_plan import BlockPlan
from megatrain.engine.step import StepEngine
from megatrain.extras.doctor import examine
from megatrain.extras.doctor.drives import DriveEffort
from megatrain.optim import clip
from megatrain.plan import measure
from megatrain.plan.measure import (
    NotMeasurableError,
    SharedMemoryTier,
    measure_ticks,
    shared_bytes,
    synthetic_batches,
    with_timed_steps,
)
from megatrain.plan.plan import Plan
from megatrain.plan.planner import plan_run
from megatrain.plan.times import MeasuredTicks
from megatrain.training.resolve import resolve
from oracles.tiered_run import EXAMPLES, config_text
from processes.saved_run import command_group
from tiered import MiB
from tiered.ext import TierUsage
from tiered.units import format_size, round_up

MODEL = EXAMPLES / "quickstart" / "model"
ALL_NVME = 'weights = ["nvme"]\ngradients = ["nvme"]\noptimizer = ["nvme"]\nactivations = ["nvme"]'

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))

    def write(model: Path = MODEL, **tables: Any) -> Path:
        text = config_text(tmp_path, model, **{"nvme": 1, "ram": "64MiB", **tables})
        path = tmp_path / "run.toml"
        path.write_text(text.replace("[model]\n", "[model]\ntrain_from_scratch = true\n"))
        return path

    return write


def planned(path: Path, *changes: str) -> Plan:
    config = load_config(path, (), changes).config
    return plan_run(resolve(config))


@pytest.mark.parametrize(
    "tables",
    [
        {},
        {"placement": ALL_NVME},
        {"advanced": 'micro_batch_order = "micro_batch"'},
        {"precision": 'compute_dtype = "bfloat16"\ngrad_dtype = "bfloat16"'},
        {"optimizer": 'optim = "lion"\nmax_grad_norm = 0.0\nnonfinite = "ignore"'},
        {"optimizer": 'optim = "adafactor"'},
        {"optimizer": 'optim = "sgd"'},
    ],
)
def test_every_tick_is_timed(tables: dict[str, str], write: Write) -> None:
    plan = planned(write(**tables))
    ticks = measure_ticks(plan, budget_s=0.0)
    assert len(ticks.seconds) == len(plan.program.ticks) and min(ticks.seconds) > 0
    assert ticks.between_s >= 0 and ticks.num_steps == measure.MIN_STEPS
    assert ticks.is_extrapolated == (ticks.num_micro_batches < plan.run.batch.num_micro_batches)


def test_timed_steps_compute_real_losses_and_gradients(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    """The losses are near the loss of a random guess, and the gradient norms are nonzero.

    The kernels are compiled before the first step. A slow first update would reduce the number of timed micro-batches.
    """
    plan = planned(write())
    results, step, warm_ups = [], StepEngine.step, list[tuple[str, int]]()
    for name, owner in (("optimizer", type(plan.traced.optimizer)), ("clip", clip)):
        monkeypatch.setattr(owner, "warm_up", lambda *_, name=name: warm_ups.append((name, len(results))))
    monkeypatch.setattr(StepEngine, "step", lambda *a, **kw: results.append(step(*a, **kw)) or results[-1])
    measure_ticks(plan, budget_s=0.0)
    vocabulary = plan.graph.model.get_input_embeddings().weight.shape[0]
    guess = float(torch.tensor(float(vocabulary)).log())
    assert len(results) >= 5 and warm_ups == [("optimizer", 0), ("clip", 0)]
    assert all(abs(result.loss - guess) < 1 and 0 < result.grad_norm < 1e3 for result in results)


def test_memory_stays_within_the_tier(write: Write, tmp_path: Path) -> None:
    plan = planned(write(placement=ALL_NVME, ram="6MiB"))
    needed = sum(block.nbytes for block in plan.program.blocks.values())
    ticks = measure_ticks(plan, budget_s=0.0)
    assert ticks.memory_bytes <= plan.budgets["ram"] < needed
    little = replace(plan, budgets_by_tier={"ram": replace(plan.budgets_by_tier["ram"], capacity_bytes=MiB)})
    with pytest.raises(NotMeasurableError, match=r"timing steps takes .* of RAM, but only 1\.00 MiB"):
        measure_ticks(little)
    with pytest.raises(NotMeasurableError, match="would compute for"):
        measure_ticks(plan, flops_per_s=1.0)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.toml"]  # nothing is written


@pytest.mark.parametrize("kind_bytes", [0, MiB, 4 * MiB, 1024 * MiB])
def test_blocks_share_slabs_of_their_kind(kind_bytes: int, write: Write) -> None:
    blocks = planned(write()).program.blocks
    tier = SharedMemoryTier(blocks, kind_bytes)
    try:
        assert tier.memory_bytes == shared_bytes(blocks, kind_bytes)
        tensors = {}
        for key, block in blocks.items():
            slot = tier.allocate(block.nbytes, name=key, home=True)
            assert slot is not None
            tensors[key] = tier.tensor(slot, (block.num_elements,), block.dtype)
        assert tier.usage().free_bytes == 0
        places = {(tensor.data_ptr(), blocks[key].kind) for key, tensor in tensors.items()}
        assert len(places) == len({address for address, _ in places})  # no two kinds share an address
        if kind_bytes >= 1024 * MiB:
            assert len(places) == len(blocks) and tier.memory_bytes == tier.capacity_bytes
        weights = [tensor for key, tensor in tensors.items() if blocks[key].kind == "weights"]
        assert all(0 < float(weight.abs().max()) < 0.1 for weight in weights)
        slot = tier.allocate(8, name=next(iter(blocks)), home=True)
        assert slot is not None
        tier.free(slot)
        assert tier.usage().free_bytes == 0
        del tensors, weights, slot
    finally:
        tier.close()


def test_batches_look_like_the_data(write: Write) -> None:
    plan = planned(write())
    batches = synthetic_batches(plan)
    assert len(batches) == 3 and all(batch["input_ids"].shape == (2, 64) for batch in batches)
    assert batches[0]["position_ids"][0].tolist() == list(range(64))
    chat = synthetic_batches(replace(plan, run=replace(plan.run, data=replace(plan.run.data, kind=CHATS))))
    assert chat[0]["position_ids"][0].tolist() == [*range(32), *range(32)]
    padded = planned(write(), "data.packing=false")
    assert set(synthetic_batches(padded)[0]) == {"input_ids", "labels", "attention_mask"}


@pytest.mark.parametrize(
    ("change", "asked", "is_extrapolated", "tick_s"),
    [
        # The first step is not timed. A step with two micro-batches shows that no more of them are affordable.
        ("gradient_accumulation_steps=12", [1, 1, 2, *(3 * [2, 1])], True, 25.0),
        ("gradient_accumulation_steps=2", [1, 1, 2, 2, 2, 2], False, 5.0),
        ("gradient_accumulation_steps=1", [1, 1, 1, 1, 1], False, 3.0),
        ("advanced.micro_batch_order=micro_batch", [3, 3, 3, 3, 3], False, 7.0),
    ],
)
def test_fewer_micro_batches_are_extrapolated(
    change: str,
    asked: list[int],
    is_extrapolated: bool,
    tick_s: float,
    write: Write,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A tick takes one second plus two per micro-batch. The medians ignore the slowest of the steps."""
    plan, found = planned(write(training='recompute = "full"'), change), list[int]()
    num_ticks = len(plan.program.ticks)

    def run(self: Any, num_micro_batches: int) -> Any:
        found.append(num_micro_batches)
        seconds = 1.0 + 2 * num_micro_batches + (1e3 if found.count(num_micro_batches) == 3 else 0)
        return measure._TimedStep(tuple(seconds for _ in range(num_ticks)), num_ticks * seconds + 4.0)

    monkeypatch.setattr(measure._StepRunner, "run", run)
    monkeypatch.setattr(measure, "own_bytes", lambda: 0)
    ticks = measure_ticks(plan, budget_s=0.0, kind_bytes=0)
    blocks = shared_bytes(plan.program.blocks, 0)
    workspace = plan.placement.workspace_bytes["ram"]
    assert found == asked
    assert ticks == MeasuredTicks((tick_s,) * num_ticks, 4.0, 3, asked[-2], is_extrapolated, blocks + workspace)


@pytest.mark.parametrize(("budget_s", "count", "num_steps"), [(3 * 34.9, 6, 7), (3 * 35.0, 7, 7), (1e9, 12, 7)])
def test_budget_limits_the_number_of_micro_batches(
    budget_s: float, count: int, num_steps: int, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One micro-batch takes 5 s and each further one takes 5 s, so a third of the budget is enough for ``count``."""
    plan, found = planned(write(), "gradient_accumulation_steps=12"), list[int]()

    def run(self: Any, num_micro_batches: int) -> Any:
        found.append(num_micro_batches)
        return measure._TimedStep((0.0,) * len(plan.program.ticks), 5.0 * num_micro_batches)

    monkeypatch.setattr(measure._StepRunner, "run", run)
    ticks = measure_ticks(plan, budget_s=budget_s, kind_bytes=0)
    assert (ticks.num_micro_batches, ticks.num_steps, max(found)) == (count, num_steps, count)
    assert ticks.between_s == 5.0 * count


def test_slabs_of_a_kind_by_hand() -> None:
    """Within a limit of half of the weights' bytes, each size of weights gets half of its slabs."""
    sizes = {f"{index}/weight": ("weights", 5000) for index in range(4)}
    sizes |= {f"{index}/weight": ("weights", 4096) for index in (4, 5)}
    sizes |= {f"{index}/m": ("optimizer", 4000) for index in range(3)} | {"0/v": ("optimizer", 9000)}
    blocks = {key: BlockPlan(key, kind, size, torch.int8) for key, (kind, size) in sizes.items()}  # type: ignore[arg-type]
    weights, state = 4 * 8192 + 2 * 4096, 3 * 4096 + 12_288
    assert shared_bytes(blocks, weights) == weights + state
    assert shared_bytes(blocks, weights // 2) == 2 * 8192 + 4096 + state
    assert shared_bytes(blocks, weights // 2 - 1) == 8192 + 4096 + state  # 1.99 slabs are rounded down
    assert shared_bytes(blocks, 1) == 8192 + 4096 + 4096 + 12_288
    assert shared_bytes(blocks, 0) == 8192 + 4096 + 12_288  # one slab for each kind, also of state
    tier = SharedMemoryTier(blocks, weights // 2)
    try:
        assert tier.capacity_bytes == weights + state and tier.memory_bytes == 2 * 8192 + 4096 + state
        slots = {key: tier.allocate(block.nbytes, name=key, home=True) for key, block in blocks.items()}
        for key, slot in slots.items():
            nbytes = blocks[key].nbytes
            assert slot is not None and (slot.tier, slot.nbytes) == ("ram", nbytes)
            assert slot.slot_bytes == round_up(nbytes, 4096)
        used = weights + state
        assert tier.usage() == TierUsage(used, used, used)
        first = [tier.tensor(slots[f"{index}/weight"], (5000,), torch.int8).data_ptr() for index in range(4)]  # type: ignore[arg-type]
        assert first[0] == first[2] != first[1] == first[3]
        tier.free(slots["0/v"])  # type: ignore[arg-type]
        assert tier.usage() == TierUsage(used, used - 12_288, used - 12_288)
        slots.clear()
    finally:
        tier.close()
    assert tier.memory_bytes == 0


def test_memory_of_a_kind_is_halved_until_it_fits(write: Write) -> None:
    """Below 1 MiB, each kind gets one slab."""
    plan = planned(write())
    blocks, workspace = plan.program.blocks, 3 * MiB

    def halved(size: int) -> int:
        budget = replace(plan.budgets_by_tier["ram"], capacity_bytes=workspace + size)
        return measure._kind_bytes(replace(plan, budgets_by_tier={"ram": budget}), workspace, 8 * MiB)

    sizes = {kind_bytes: shared_bytes(blocks, kind_bytes) for kind_bytes in (8 * MiB, 4 * MiB, 2 * MiB, MiB, 0)}
    largest = {size: kind_bytes for kind_bytes, size in reversed(sizes.items())}  # equal sizes: the first is chosen
    for size in sizes.values():
        assert halved(size) == largest[size]
    assert halved(sizes[MiB] - 1) == 0
    with pytest.raises(NotMeasurableError) as refused:
        halved(sizes[0] - 1)
    need, room = format_size(workspace + sizes[0]), format_size(workspace + sizes[0] - 1)
    assert str(refused.value) == f"timing steps takes {need} of RAM, but only {room} are available"


@pytest.mark.parametrize("optim", ["adamw", "adafactor"])
def test_kept_graphs_are_timed_with_shared_weight_memory(write: Write, optim: str) -> None:
    """Updates overwrite the shared weights between a forward and its backward. Timing accepts the wrong values."""
    plan = planned(write(training='recompute = "none:3"', optimizer=f'optim = "{optim}"'))
    assert plan.kept_bytes
    ticks = measure_ticks(plan, budget_s=0.0, kind_bytes=0)
    assert len(ticks.seconds) == len(plan.program.ticks) and min(ticks.seconds) > 0
    assert plan.kept_bytes < ticks.memory_bytes <= plan.totals["ram"]


@pytest.mark.parametrize("replayed_s", [7.5, None])
def test_timed_plan_has_the_same_placement(
    replayed_s: float | None, write: Write, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan's step time is the time of the replay, or unknown if the machine's rates are unknown."""
    monkeypatch.setattr(measure, "step_seconds", lambda plan: replayed_s)
    plan, rates = planned(write(training='recompute = "full"')), list[float | None]()

    def fake(plan: Plan, *, flops_per_s: float | None) -> MeasuredTicks:
        rates.append(flops_per_s)
        return MeasuredTicks(
            tuple(0.01 for _ in plan.program.ticks), 0.005, 3, plan.run.batch.num_micro_batches, False, MiB
        )

    found = with_timed_steps(plan, measure=fake)
    assert len(rates) == 1 and found.ticks is not None and len(found.ticks.seconds) == len(plan.program.ticks)
    assert found.placement == plan.placement and found.traffic == plan.traffic
    assert found.estimate.step_s == replayed_s


def test_plan_is_kept_if_it_cannot_be_timed(write: Write) -> None:
    plan = planned(write())

    def refuse(plan: Plan, **rates: float | None) -> MeasuredTicks:
        raise NotMeasurableError("the moon is full")

    begun, said = list[str](), list[str]()
    assert with_timed_steps(plan, begun.append, said.append, measure=refuse) is plan
    assert begun == ["steps of this model"]
    assert said == ["steps of this model are not timed: the moon is full"]


@pytest.mark.slow
def test_the_command(write: Write, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(examine, "QUICK", DriveEffort(64 * MiB, 0.0, 0.0, computing_s=0.1))
    monkeypatch.setattr(examine, "_QUICK_PROCESSOR", (8 * MiB, 0.0))
    group = command_group()
    path = write(ram="6MiB", placement='optimizer = ["nvme"]')
    plain = CliRunner().invoke(group, ["plan", str(path), "--measure"])
    assert plain.exit_code == 0, plain.output
    assert re.search(r"^computing +measured: \d steps", plain.stdout, re.MULTILINE)
    assert "at best" not in plain.stdout.replace("of the drive at best", "")
    result = CliRunner().invoke(group, ["plan", str(path), "--measure", "--json", "--set", "tiers.ram.size=64MiB"])
    assert result.exit_code == 0, result.output
    values = json.loads(result.stdout)
    assert values["estimate"]["computing_is_timed"] and values["estimate"]["predicted_step_s"] > 0
    assert result.stderr.count("steps of this model") == 1
    later = CliRunner().invoke(group, ["plan", str(path)])
    assert "at best" in later.stdout and "`plan --measure` times steps" in later.stdout
    assert sorted(each.name for each in tmp_path.iterdir()) == ["cache", "run.toml"]
