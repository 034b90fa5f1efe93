"""Which graphs a plan keeps: those that fit where memory is left; what it says of them; what that does to its times."""

from __future__ import annotations

import platform
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

import psutil
import pytest

from megatrain.config import load_config
from megatrain.engine.trace import step_flops
from megatrain.machine.machine import LoadedProfile, MachineProfile, cpu_name
from megatrain.plan.estimate import estimate_step, flops_per_token
from megatrain.plan.kept import num_layers_kept, num_parameters_run_once, weights_stay
from megatrain.plan.placement import DoesNotFitError
from megatrain.plan.plan import Plan, StepShape
from megatrain.plan.planner import plan_run
from megatrain.plan.show import table_rows
from megatrain.plan.simulate import SimulatedRates, simulate_step
from megatrain.resolve import resolve
from oracles.tiered_run import EXAMPLES, config_text

MODEL = EXAMPLES / "quickstart" / "model"
TOKENS = 2 * 3 * 64


def make_plan(folder: Path, *, nvme: int = 0, **tables: str) -> Plan:
    (folder / "run.toml").write_text(config_text(folder, MODEL, nvme=nvme, **tables))
    return plan_run(resolve(load_config(folder / "run.toml").config))


def kept_bytes(plan: Plan, visits: list[int]) -> int:
    return plan.num_micro_batches * sum(plan.trace.visits[visit].graph_nbytes for visit in visits)


def test_as_many_of_the_last_as_fit(tmp_path: Path) -> None:
    none = make_plan(tmp_path, advanced="keep_graphs = 0\nsave_attention = 0")
    least, everything = none.totals["ram"], make_plan(tmp_path)
    assert not none.program.recompute.kept_graphs and none.kept_bytes == 0
    assert everything.program.recompute.kept_graphs == set(range(6)) and num_layers_kept(
        everything.graph, everything.trace, everything.program
    ) == (4, 4)
    most = everything.totals["ram"]
    plain = "save_attention = 0"
    plans = [
        make_plan(tmp_path, ram=f"{size}B", advanced=plain)
        for size in (least, least + (most - least) // 2, most - 1, most)
    ]
    for plan in plans:
        kept = sorted(plan.program.recompute.kept_graphs)
        assert kept == list(range(6))[6 - len(kept) :]
        assert plan.totals["ram"] <= plan.budgets["ram"]
        assert 0 <= plan.kept_bytes - kept_bytes(plan, kept) < 4096
        assert plan.placement.workspace_bytes["ram"] == none.placement.workspace_bytes["ram"] + plan.kept_bytes
        activations = [block for block in plan.program.blocks.values() if block.kind == "activations"]
        assert len(activations) == 3 * (5 - len([visit for visit in kept if visit > 0]))
        assert plan.placement.home_bytes["ram"]["activations"] == sum(block.nbytes for block in activations)
    for fewer, more in pairwise(plans):
        assert fewer.program.recompute.kept_graphs <= more.program.recompute.kept_graphs
    assert (
        plans[0].program.recompute.kept_graphs
        < plans[1].program.recompute.kept_graphs
        < plans[3].program.recompute.kept_graphs
        == set(range(6))
    )
    again = make_plan(tmp_path, ram=f"{least + (most - least) // 2}B", advanced=plain)
    assert again.program == plans[1].program and again.placement == plans[1].placement
    with pytest.raises(DoesNotFitError) as refused:
        make_plan(tmp_path, ram=f"{least - 16384}B")
    assert refused.value.need_bytes == least


def test_copies_come_before_graphs(tmp_path: Path) -> None:
    """Where something is fetched, room lets it be fetched ahead, or stay."""
    plan = make_plan(tmp_path, nvme=1, placement='optimizer = ["nvme"]')
    assert plan.placement.working_bytes["ram"] and not plan.program.recompute.kept_graphs


def test_a_number_of_layers(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, nvme=1, placement='optimizer = ["nvme"]', advanced="keep_graphs = 3")
    assert plan.program.recompute.kept_graphs == {2, 3, 4, 5}  # the norm at the end, too
    assert weights_stay(plan.graph, plan.trace, plan.program, plan.placement.homes)
    assert make_plan(tmp_path, advanced="keep_graphs = 100").program.recompute.kept_graphs == set(range(6))
    away = make_plan(tmp_path, nvme=1, placement='weights = ["nvme"]', advanced="keep_graphs = 3")
    assert not away.program.recompute.kept_graphs and away.kept_bytes == 0


def test_a_number_that_does_not_fit_is_refused_with_what_would_do(tmp_path: Path) -> None:
    least = make_plan(tmp_path, advanced="keep_graphs = 0\nsave_attention = 0").totals["ram"]
    with pytest.raises(DoesNotFitError, match=r"Graphs that are kept take .*: lower advanced.keep_graphs") as refused:
        make_plan(tmp_path, ram=f"{least}B", advanced="keep_graphs = 2")
    enough = make_plan(tmp_path, ram=f"{refused.value.need_bytes}B", advanced="keep_graphs = 2")
    assert num_layers_kept(enough.graph, enough.trace, enough.program)[0] == 2
    assert enough.totals["ram"] == refused.value.need_bytes


def test_the_table_says_so(tmp_path: Path) -> None:
    rows = {kind: (sizes, note) for kind, sizes, note in table_rows(make_plan(tmp_path, advanced="keep_graphs = 3"))}
    assert (
        rows["kept graphs"][1] == "3 of 4 layers keep their results for the backward, which need not compute them again"
    )
    without = {kind: (sizes, note) for kind, sizes, note in table_rows(make_plan(tmp_path, advanced="keep_graphs = 0"))}
    assert "kept graphs" not in without and rows["workspace"] == without["workspace"]
    everything = make_plan(tmp_path)
    assert sum(sizes["ram"] for _, sizes, _ in table_rows(everything)) == everything.totals["ram"]


def test_hardware_flops_count_fewer_recomputes(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, advanced="keep_graphs = 2")
    tokens = {"num_places": 384, "num_real_tokens": 300, "num_trained_tokens": 200}
    all_again, flops = (
        step_flops(plan.trace, **tokens),
        step_flops(plan.trace, **tokens, kept=plan.program.recompute.kept_graphs),
    )
    saved = sum(plan.trace.visits[visit].recompute.flops for visit in plan.program.recompute.kept_graphs)
    assert saved > 0 and flops.model == all_again.model
    assert all_again.hardware - flops.hardware == pytest.approx(saved * 384 / plan.trace.num_tokens, abs=1)
    everything = step_flops(plan.trace, num_places=384, num_real_tokens=384, num_trained_tokens=384, kept=range(6))
    assert everything.hardware == everything.model


def attention_blocks(plan: Plan) -> list[str]:
    return [key for key in plan.program.blocks if key.endswith(".attention")]


def test_attention_is_saved_where_graphs_are_not_kept(tmp_path: Path) -> None:
    nothing = make_plan(tmp_path, advanced="keep_graphs = 0\nsave_attention = 0")
    everything = make_plan(tmp_path, advanced="keep_graphs = 0")
    assert (
        everything.program.recompute.saved_attention == {1, 2, 3, 4} and not nothing.program.recompute.saved_attention
    )
    assert len(attention_blocks(everything)) == 4 * 3 and not any(everything.traffic.values())
    sizes = {everything.program.blocks[key].nbytes for key in attention_blocks(everything)}
    assert sizes == {everything.trace.visits[1].attention_nbytes}
    more = everything.totals["ram"] - nothing.totals["ram"]
    assert more == 12 * everything.budgets_by_tier["ram"].slot_bytes(sizes.pop())
    # Rows are short here: a byte is worth more in a graph, so graphs come first.
    most = make_plan(tmp_path).totals["ram"]
    both = make_plan(tmp_path, ram=f"{(nothing.totals['ram'] + most) // 2}B")
    assert both.program.recompute.kept_graphs and both.program.recompute.saved_attention
    assert both.program.recompute.saved_attention == {1, 2, 3, 4} - both.program.recompute.kept_graphs
    assert both.totals["ram"] <= both.budgets["ram"]
    rows = {kind: note for kind, _, note in table_rows(both)}
    assert (
        f"attention of {len(both.program.recompute.saved_attention)} layers is not computed again"
        in rows["activations"]
    )
    some = make_plan(tmp_path, advanced="keep_graphs = 1\nsave_attention = 3")
    assert some.program.recompute.kept_graphs == {4, 5} and some.program.recompute.saved_attention == {2, 3}


def test_attention_that_would_move_is_left_to_measured_rates(tmp_path: Path) -> None:
    streamed = {"nvme": 1, "placement": 'optimizer = ["nvme"]'}
    assert not make_plan(tmp_path, **streamed).program.recompute.saved_attention
    assert make_plan(tmp_path, advanced="save_attention = 2", **streamed).program.recompute.saved_attention == {3, 4}


def test_saved_attention_is_no_work_of_the_hardware(tmp_path: Path) -> None:
    tables = "keep_graphs = 0\nsave_attention = "
    again, saved = (make_plan(tmp_path, advanced=tables + number) for number in ("0", "4"))
    visits = [saved.trace.visits[visit] for visit in saved.program.recompute.saved_attention]
    tokens = {"num_places": 384, "num_real_tokens": 300, "num_trained_tokens": 200}
    less = (
        step_flops(saved.trace, **tokens),
        step_flops(saved.trace, **tokens, saved_attention=saved.program.recompute.saved_attention),
    )
    assert less[0].model == less[1].model
    in_attention = sum(visit.attention.flops for visit in visits)
    assert less[0].hardware - less[1].hardware == pytest.approx(in_attention * 384 / saved.trace.num_tokens, abs=1)
    computed = in_attention - sum(visit.attention.skipped_flops for visit in visits)
    assert flops_per_token(again) - flops_per_token(saved) == pytest.approx(computed / saved.trace.num_tokens)


def test_the_estimate_is_shorter_by_one_forward(tmp_path: Path) -> None:
    machine = MachineProfile(
        host=platform.node(),
        cpu=cpu_name(),
        ram_bytes=psutil.virtual_memory().total,
        measured_at=datetime.now(UTC),
        is_quick=True,
        num_threads=2,
        ram_read_bytes_per_s=1e10,
        ram_copy_bytes_per_s=1e10,
        ram_update_bytes_per_s=1e10,
        adamw_params_per_s={"float32": 1e8},
        matmul_flops_per_s={"cpu/float32": 1e11},
    )
    shape = StepShape(TOKENS, None, [], [])
    rates = SimulatedRates(nvme_bytes_per_s=1e9, flops_per_s=1e10, update_params_per_s=5e8)
    again, kept = (make_plan(tmp_path, advanced=f"keep_graphs = {n}\nsave_attention = 0") for n in (0, 2))
    once = num_parameters_run_once(kept.graph, kept.trace, kept.program)
    layer = sum(parameter.numel() for parameter in kept.graph.units[2].module.parameters())
    assert 2 * layer <= once <= 2.1 * layer
    trace = kept.trace
    saved = sum(trace.visits[visit].recompute.flops for visit in kept.program.recompute.kept_graphs) / trace.num_tokens
    less = flops_per_token(again) - flops_per_token(kept)
    last = sum(trace.visits[visit].unneeded.work.flops for visit in kept.program.recompute.kept_graphs)
    never_again = last / trace.num_tokens
    # And half of causal attention.
    assert 0.85 * saved < less < saved and less == pytest.approx(2 * once - never_again, rel=0.1)
    estimates = [estimate_step(plan, shape, LoadedProfile(machine)).seconds["compute"] for plan in (again, kept)]
    recomputed = [trace.visits[visit].recompute for visit in kept.program.recompute.kept_graphs]
    flops = sum(work.product_flops for work in recomputed) / 1e11
    attention = sum(work.attention_flops - work.skipped_flops for work in recomputed) / 5e10  # assumed: half the rate
    moved = sum(work.moved_nbytes for work in recomputed) / 1e10
    assert estimates[0] - estimates[1] == pytest.approx((flops + attention + moved) * TOKENS / trace.num_tokens)
    replays = [simulate_step(plan, TOKENS, rates).step_s for plan in (again, kept)]
    assert replays[0] - replays[1] == pytest.approx(less * TOKENS / 1e10, rel=0.02)  # blocks are padded
