"""Plans of passes that score tokens, continue prompts, or read averaged weights, compared with counts by hand."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from megatrain.config import ConfigError, load_config
from megatrain.engine.program.block_plan import KINDS
from megatrain.plan.forward import (
    GenerationPlan,
    check_weights,
    forward_run,
    plan_averages,
    plan_forward,
    plan_generation,
    plan_samples,
    score_bytes,
    with_prompts,
)
from megatrain.plan.placement import Placement
from megatrain.plan.plan import Plan
from megatrain.plan.planner import plan_run
from megatrain.plan.run_spec import RunSpec
from megatrain.plan.shortfall import DoesNotFitError
from megatrain.training.resolve import resolve
from oracles.tiered_run import EXAMPLES, config_text
from tiered import MiB
from tiered.units import format_size, round_up

#: Bytes of the fp32 weights of the embedding (which the head shares), of a layer, and of the last norm.
EMBEDDING, LAYER, NORM = 4 * 131_072, 4 * 174_080, 4 * 1024
WEIGHTS = EMBEDDING + 4 * LAYER + NORM
PAGE = 4096
MakeRun = Callable[..., RunSpec]


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """Return a function that resolves a config: three micro-batches of two rows with 64 tokens each."""

    def make_run(*, nvme: int = 0, **tables: str) -> RunSpec:
        text = config_text(tmp_path, EXAMPLES / "quickstart" / "model", nvme=nvme, **tables)
        (tmp_path / "run.toml").write_text(text.replace("[model]", "[model]\ntrain_from_scratch = true", 1))
        return resolve(load_config(tmp_path / "run.toml").config)

    return make_run


def homes_of(plan: Plan | GenerationPlan) -> Mapping[str, Mapping[str, int]]:
    """Return the bytes in each tier by kind, without kinds that have none."""
    placement: Placement = (plan.plan if isinstance(plan, GenerationPlan) else plan).placement
    assert all(tuple(by_kind) == KINDS for by_kind in placement.home_bytes.values())
    return {
        tier: {kind: nbytes for kind, nbytes in by_kind.items() if nbytes}
        for tier, by_kind in placement.home_bytes.items()
    }


def test_a_forward_run_trains_and_saves_nothing(make_run: MakeRun) -> None:
    run = make_run()
    forward = forward_run(run)
    table = forward.checkpoint.table
    assert (forward.model.is_trained, table.is_on, table.num_generations, run.model.is_trained) == (
        False,
        False,
        0,
        True,
    )
    assert replace(forward, model=run.model, checkpoint=run.checkpoint) == run
    with pytest.raises(ConfigError) as refused:
        check_weights(run)
    assert str(refused.value) == (
        "1 problem in the config\n  model.train_from_scratch = true: the output of random weights is meaningless. "
        "Leave the key out, and name the folder of a trained model in model_name_or_path"
    )
    table = run.model.table.model_copy(update={"train_from_scratch": False})
    check_weights(replace(run, model=replace(run.model, table=table)))


def test_prompts_of_a_batch_fill_whole_micro_batches(make_run: MakeRun) -> None:
    run = make_run(advanced='micro_batch_order = "micro_batch"')
    batch = replace(run.batch, num_rows=12, max_length=99, configured_rows=4, order="layer")
    assert with_prompts(run, 4, 10, 99) == with_prompts(run, 4, 12, 99) == replace(run, batch=batch)


@pytest.mark.parametrize(("top_k", "width"), [(0, 0), (5, 0), (5, 128)])
def test_scores_take_memory_beside_the_workspace(top_k: int, width: int, make_run: MakeRun) -> None:
    """A token has 16 bytes, and 12 more for each scored entry of the vocabulary, in three copies."""
    run = forward_run(make_run())
    scores = 3 * 384 * (12 * top_k + 16) + 4 * 6 * width
    assert score_bytes(run, top_k, width) == scores
    plan = plan_forward(run, top_k=top_k, width=width)
    memory = [visit.memory for visit in plan.trace.visits]
    moved = max(each.held_nbytes - each.retained_nbytes for each in memory)
    retained = max(each.retained_nbytes for each in memory)
    computing = max(plan.trace.head_nbytes, *(each.forward_nbytes for each in memory))
    workspace = round_up(3 * (retained + 2 * moved) + computing, PAGE) + round_up(scores, PAGE)
    assert homes_of(plan) == {"ram": {"weights": WEIGHTS}} and not any(plan.traffic.values())
    assert plan.placement.workspace_bytes == {"ram": workspace} and plan.totals == {"ram": WEIGHTS + workspace}
    assert [(tick.phase, tick.visit) for tick in plan.program.ticks] == [
        *(("forward", n) for n in range(6)),
        ("head", 6),
    ]
    assert (plan.estimate.tokens_per_step, plan.estimate.occasions, plan.kept_bytes) == (384, (), 0)


def test_streamed_weights_move_once_for_all_micro_batches(make_run: MakeRun) -> None:
    """The embedding stays in RAM for the head, and from the head to the next pass."""
    plan = plan_forward(forward_run(make_run(nvme=1, ram="6MiB", placement='weights = "nvme"')))
    placement = plan.placement
    assert homes_of(plan) == {"ram": {}, "nvme": {"weights": WEIGHTS}}
    embedding = "model.embed_tokens/weight"
    assert placement.stays == {(0, embedding): 6, (6, embedding): 0}
    assert placement.traffic_bytes == {"ram->nvme": 0, "nvme->ram": WEIGHTS - EMBEDDING}
    assert placement.first_traffic_bytes == {"ram->nvme": 0, "nvme->ram": WEIGHTS}
    assert placement.last_traffic_bytes == {"ram->nvme": 0, "nvme->ram": 0}
    assert placement.working_bytes == placement.median_working_bytes == {"ram": LAYER, "nvme": 0}
    assert placement.generation_bytes == {"ram": 0, "nvme": 0}


#: Keys and values of two rows with 20 positions and 64 numbers each, in fp32.
CACHE = 2 * 2 * 20 * 64 * 4
#: Eight fp32 copies of a micro-batch's logits.
LOGITS = 8 * 4 * 2 * 1024


def test_a_generation_pass_holds_the_cache_of_all_prompts(make_run: MakeRun) -> None:
    """Three micro-batches of two prompts have a cache in each of four layers."""
    run = with_prompts(forward_run(make_run()), 2, 5, 20)
    found = plan_generation(run)
    assert homes_of(found) == {"ram": {"weights": WEIGHTS, "activations": 12 * CACHE}}
    assert found.planned_bytes(1) == found.planned_bytes(4) == {}
    assert found.plan.estimate.tokens_per_step == 6
    assert [(tick.phase, tick.visit) for tick in found.plan.program.ticks] == [("forward", n) for n in range(7)]

    tables = {"ram": "6MiB", "placement": 'weights = "nvme"\nactivations = "nvme"'}
    found = plan_generation(with_prompts(forward_run(make_run(nvme=1, **tables)), 2, 5, 20))
    placement = found.plan.placement
    assert homes_of(found) == {"ram": {}, "nvme": {"weights": WEIGHTS, "activations": 12 * CACHE}}
    assert placement.working_bytes == {"ram": LAYER + CACHE, "nvme": 0}
    assert placement.traffic_bytes == {"ram->nvme": 12 * CACHE, "nvme->ram": WEIGHTS + 12 * CACHE}
    # The first pass writes the cache, and reads the embedding again for the head.
    first, second, later = WEIGHTS + EMBEDDING, WEIGHTS + EMBEDDING + 12 * CACHE, WEIGHTS + 12 * CACHE
    assert found.planned_bytes(1) == {"ram->nvme": 12 * CACHE, "nvme->ram": first}
    assert found.planned_bytes(2) == {"ram->nvme": 24 * CACHE, "nvme->ram": first + second}
    assert found.planned_bytes(4) == {"ram->nvme": 48 * CACHE, "nvme->ram": first + second + 2 * later}
    memory = [visit.memory for visit in found.plan.trace.visits]
    moved = max(each.held_nbytes - each.retained_nbytes for each in memory)
    retained = max(each.retained_nbytes for each in memory)
    computing = max(each.forward_nbytes for each in memory)
    workspace = round_up(3 * (retained + 2 * moved) + computing, PAGE) + LOGITS
    assert placement.workspace_bytes == {"ram": workspace, "nvme": 0}


@pytest.fixture
def trained(make_run: MakeRun) -> Plan:
    """Return the plan of a run that keeps fp32 averages, with all blocks in RAM."""
    return plan_run(make_run(optimizer="ema_decay = 0.9", training='recompute = "full"'))


def with_ram(plan: Plan, nbytes: int) -> Plan:
    budgets = {**plan.budgets_by_tier, "ram": replace(plan.budgets_by_tier["ram"], capacity_bytes=nbytes)}
    return replace(plan, budgets_by_tier=budgets)


def shortfall(plan: Callable[[int], object], advice: str) -> int:
    """Return the smallest RAM with which a plan is possible, and compare the error for one byte less."""
    with pytest.raises(DoesNotFitError) as refused:
        plan(MiB)
    need = refused.value.need_bytes
    plan(need)
    with pytest.raises(DoesNotFitError) as refused:
        plan(need - 1)
    have = f"{need - 1} bytes ({format_size(need - 1)})"
    needs = f"{need} ({format_size(need)})"
    text = f"does not fit: tier 'ram' has {have}, but this run needs at least {needs}"
    assert str(refused.value) == f"{text}. {advice}"
    return need


def test_averages_are_read_from_their_homes(trained: Plan) -> None:
    """Each visit rounds the averages that it reads, so the largest ones need workspace."""
    plan = plan_averages(trained)
    homes = trained.placement.homes
    assert plan.placement.homes == {key: homes[key] for key in plan.program.blocks}
    assert homes_of(plan) == {"ram": {"weights": WEIGHTS, "optimizer": 3 * WEIGHTS}}
    workspace = trained.placement.workspace_bytes["ram"]
    assert plan.placement.workspace_bytes == {"ram": workspace}  # fp32 averages need no rounding
    assert {key for tick in plan.program.ticks for key, _ in tick.uses} == {
        key for key in homes if key.endswith("/ema")
    }
    advice = (
        "This size is for evaluating the averaged weights, which are in fp32. Give tiers.ram that size, or write "
        'weights = "trained" in [evaluation].'
    )
    assert shortfall(lambda nbytes: plan_averages(with_ram(trained, nbytes)), advice) == plan.totals["ram"]


def test_samples_use_the_memory_of_a_step(trained: Plan) -> None:
    found = plan_samples(trained, rows=2, num_prompts=5, max_length=20)
    assert homes_of(found) == {"ram": {"weights": WEIGHTS, "activations": 12 * CACHE, "optimizer": 3 * WEIGHTS}}
    assert found.plan.run == with_prompts(trained.run, 2, 6, 20) and found.plan.estimate.tokens_per_step == 6
    assert found.planned_bytes(3) == {} and found.plan.kept_bytes == 0
    advice = (
        "This size is for continuing 2 prompts of evaluations, 20 tokens each. Give tiers.ram that size, or lower "
        "evaluation.max_new_tokens, evaluation.max_predict_samples or evaluation.per_device_eval_batch_size."
    )
    need = shortfall(
        lambda nbytes: plan_samples(with_ram(trained, nbytes), rows=2, num_prompts=2, max_length=20), advice
    )
    # Loading a layer's weights and averages takes more memory than one micro-batch.
    assert need == 4 * WEIGHTS + 2 * LAYER


def test_prompts_that_do_not_fit_together_run_in_smaller_batches(trained: Plan) -> None:
    """The number of micro-batches is halved, rounded up, until their caches fit."""
    totals = {}
    for count in (50, 25, 13):
        plan = plan_samples(trained, rows=2, num_prompts=2 * count, max_length=20).plan
        assert plan.run.batch.num_micro_batches == count
        totals[count] = plan.totals["ram"]
    for capacity, count in ((totals[50], 50), (totals[50] - 1, 25), (totals[25] - 1, 13)):
        plan = plan_samples(with_ram(trained, capacity), rows=2, num_prompts=99, max_length=20).plan
        assert plan.run.batch.num_micro_batches == count
