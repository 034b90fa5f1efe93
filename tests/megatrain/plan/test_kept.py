"""Graphs and results that a plan keeps in spare memory, messages about them, and their effect on predicted times."""

from __future__ import annotations

import platform
import re
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

import psutil
import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import AutoModelForCausalLM

from megatrain.config import load_config
from megatrain.engine.program.visit_trace import Recompute
from megatrain.machine.profiles import LoadedProfile, MachineProfile, cpu_name
from megatrain.plan.estimate import estimate_step
from megatrain.plan.flops import flops_per_token
from megatrain.plan.kept import are_weights_resident, num_layers_kept, num_parameters_run_once
from megatrain.plan.plan import Plan
from megatrain.plan.planner import plan_run
from megatrain.plan.shortfall import DoesNotFitError
from megatrain.plan.show import messages, table_rows
from megatrain.plan.simulate import SimulatedRates, simulate_step
from megatrain.plan.times import StepShape
from megatrain.trace.counting import step_flops
from megatrain.training.resolve import resolve
from oracles.tiered_run import EXAMPLES, config_text
from tiered.units import PAGE_BYTES, format_size, round_up

MODEL = EXAMPLES / "quickstart" / "model"
TOKENS = 2 * 3 * 64


def make_plan(folder: Path, *, nvme: int = 0, **tables: str) -> Plan:
    tables = {"advanced": 'micro_batch_order = "layer"', **tables}
    (folder / "run.toml").write_text(config_text(folder, MODEL, nvme=nvme, **tables))
    return plan_run(resolve(load_config(folder / "run.toml").config))


def kept_bytes(plan: Plan, visits: list[int]) -> int:
    return plan.run.batch.num_micro_batches * sum(plan.trace.visits[visit].memory.graph_nbytes for visit in visits)


def test_last_layers_are_kept_up_to_the_memory(tmp_path: Path) -> None:
    none = make_plan(tmp_path, training='recompute = "full"')
    least, everything = none.totals["ram"], make_plan(tmp_path)
    assert not none.program.recompute.kept_graphs and none.kept_bytes == 0
    assert everything.program.recompute.kept_graphs == set(range(6)) and num_layers_kept(
        everything.graph, everything.trace, everything.program
    ) == (4, 4)
    most = everything.totals["ram"]
    some = least + 3 * (most - least) // 4
    plans = [make_plan(tmp_path, ram=f"{size}B") for size in (least, some, most - 1, most)]
    for plan in plans:
        kept = sorted(plan.program.recompute.kept_graphs)
        assert kept == list(range(6))[6 - len(kept) :]
        one = kept_bytes(plan, [5])
        room_bytes = plan.budgets["ram"] - plan.totals["ram"]
        assert 0 <= room_bytes < everything.kept_bytes / 4, "the graph of another layer does not fit"
        # At the peak, not all kept graphs exist at once, and one of them is part of its visit's workspace.
        assert kept_bytes(plan, kept) - one <= plan.kept_bytes < kept_bytes(plan, kept) + PAGE_BYTES
        assert plan.placement.workspace_bytes["ram"] == none.placement.workspace_bytes["ram"] + plan.kept_bytes
        activations = [block for block in plan.program.blocks.values() if block.kind == "activations"]
        num_saving = len(plan.program.recompute.saving_visits)
        assert len(activations) == 3 * (5 - len([visit for visit in kept if visit > 0]) + num_saving)
        taken = sum(plan.budgets_by_tier["ram"].slot_bytes(block.nbytes) for block in activations)
        assert plan.placement.home_bytes["ram"]["activations"] == taken
    for fewer, more in pairwise(plans):
        assert fewer.program.recompute.kept_graphs <= more.program.recompute.kept_graphs
    assert (
        plans[0].program.recompute.kept_graphs
        < plans[1].program.recompute.kept_graphs
        < plans[3].program.recompute.kept_graphs
        == set(range(6))
    )
    again = make_plan(tmp_path, ram=f"{some}B")
    assert again.program == plans[1].program and again.placement == plans[1].placement
    with pytest.raises(DoesNotFitError) as refused:
        make_plan(tmp_path, ram=f"{least - 16384}B")
    assert refused.value.need_bytes == least


def test_copies_come_before_graphs(tmp_path: Path) -> None:
    """If blocks are fetched, spare memory is used for their copies before graphs are kept."""
    plan = make_plan(tmp_path, nvme=1, placement='optimizer = ["nvme"]')
    assert plan.placement.working_bytes["ram"] and not plan.program.recompute.kept_graphs


def test_recompute_none_with_a_number_keeps_the_last_layers(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, nvme=1, placement='optimizer = ["nvme"]', training='recompute = "none:3"')
    assert plan.program.recompute.kept_graphs == {2, 3, 4, 5}  # including the final norm
    assert are_weights_resident(plan.graph, plan.trace, plan.program, plan.placement.homes)
    assert make_plan(tmp_path, training='recompute = "none:100"').program.recompute.kept_graphs == set(range(6))
    away = make_plan(tmp_path, nvme=1, placement='weights = ["nvme"]', training='recompute = "none:3"')
    assert not away.program.recompute.kept_graphs and away.kept_bytes == 0


def test_too_many_kept_layers_are_refused_with_a_remedy(tmp_path: Path) -> None:
    least = make_plan(tmp_path, training='recompute = "full"').totals["ram"]
    with pytest.raises(DoesNotFitError, match=r"Kept graphs take .*: write training.recompute") as refused:
        make_plan(tmp_path, ram=f"{least}B", training='recompute = "none:2"')
    enough = make_plan(tmp_path, ram=f"{refused.value.need_bytes}B", training='recompute = "none:2"')
    assert num_layers_kept(enough.graph, enough.trace, enough.program)[0] == 2
    assert enough.totals["ram"] == refused.value.need_bytes


def test_table_lists_kept_results(tmp_path: Path) -> None:
    rows = {
        kind: (sizes, note) for kind, sizes, note in table_rows(make_plan(tmp_path, training='recompute = "none:3"'))
    }
    assert rows["kept graphs"][1] == "3 of 4 layers keep their graphs, which the backward need not recompute"
    without = {
        kind: (sizes, note) for kind, sizes, note in table_rows(make_plan(tmp_path, training='recompute = "full"'))
    }
    assert "kept graphs" not in without and rows["workspace"] == without["workspace"]
    everything = make_plan(tmp_path)
    assert sum(sizes["ram"] for _, sizes, _ in table_rows(everything)) == everything.totals["ram"]


def test_hardware_flops_count_fewer_recomputes(tmp_path: Path) -> None:
    plan = make_plan(tmp_path, training='recompute = "none:2"')
    tokens = {"num_positions": 384, "num_real_tokens": 300, "num_trained_tokens": 200}
    all_again, flops = (
        step_flops(plan.trace, **tokens),
        step_flops(plan.trace, **tokens, recompute=plan.program.recompute),
    )
    saved = sum(plan.trace.visits[visit].recompute.flops for visit in plan.program.recompute.kept_graphs)
    assert saved > 0 and flops.model == all_again.model
    assert all_again.hardware - flops.hardware == pytest.approx(saved * 384 / plan.trace.num_tokens, abs=1)
    everything = step_flops(
        plan.trace,
        num_positions=384,
        num_real_tokens=384,
        num_trained_tokens=384,
        recompute=Recompute(frozenset(range(6))),
    )
    assert everything.hardware == everything.model


def result_blocks(plan: Plan) -> list[str]:
    return [key for key in plan.program.blocks if key.endswith(".results")]


SELECTIVE = 'recompute = "selective"'


def test_results_of_products_and_attention_by_hand(tmp_path: Path) -> None:
    """Queries, keys, values, attention with its sums and projection, gate and up are saved. The last product is not."""
    full, selective = make_plan(tmp_path, training='recompute = "full"'), make_plan(tmp_path, training=SELECTIVE)
    assert selective.program.recompute.saved_results == {1, 2, 3, 4} and not full.program.recompute.saving_visits
    config, rows, length = selective.graph.config, 2, 64
    queries, keys = config.num_attention_heads * config.head_dim, config.num_key_value_heads * config.head_dim
    widths = [queries, keys, keys, queries, config.num_attention_heads, config.hidden_size]
    widths += [config.intermediate_size] * 2
    expected = sum(round_up(4 * rows * length * width, 512) for width in widths)
    assert len(result_blocks(selective)) == 4 * 3 and not any(selective.traffic.values())
    assert {selective.program.blocks[key].nbytes for key in result_blocks(selective)} == {expected}
    more = selective.totals["ram"] - full.totals["ram"]
    assert more == 12 * selective.budgets_by_tier["ram"].slot_bytes(expected)
    rows_of_table = {kind: note for kind, _, note in table_rows(selective)}
    assert "products and attention of 4 layers are not recomputed" in rows_of_table["activations"]


def test_the_kind_that_saves_more_for_its_bytes_comes_first(tmp_path: Path) -> None:
    """Per byte, saved results avoid more recomputed products than kept graphs do, so results come first."""
    full, most = make_plan(tmp_path, training='recompute = "full"'), make_plan(tmp_path)
    selective = make_plan(tmp_path, training=SELECTIVE)
    assert most.program.recompute.kept_graphs == set(range(6)) and not result_blocks(most)
    for share in (0.1, 0.3, 0.5, 0.7, 0.9):
        size = full.totals["ram"] + int(share * (most.totals["ram"] - full.totals["ram"]))
        plan = make_plan(tmp_path, ram=f"{size}B")
        recompute = plan.program.recompute
        assert 0 <= plan.budgets["ram"] - plan.totals["ram"] < most.kept_bytes / 4, (
            "the graph of another layer does not fit"
        )
        assert not recompute.kept_graphs & recompute.saving_visits
        assert not recompute.saved_attention & recompute.saved_results
        saving = recompute.kept_graphs | recompute.saving_visits
        if size >= selective.totals["ram"]:
            assert {1, 2, 3, 4} <= saving and not recompute.saved_attention
        again = flops_per_token(full) - flops_per_token(plan)
        assert 0 <= again <= flops_per_token(full) - flops_per_token(most)
        assert (again == 0) == (not saving)


def test_results_are_not_saved_next_to_moving_blocks_without_rates(tmp_path: Path) -> None:
    streamed = {"nvme": 1, "placement": 'optimizer = ["nvme"]'}
    assert not make_plan(tmp_path, **streamed).program.recompute.saving_visits
    plan = make_plan(tmp_path, training='recompute = "selective:2"', **streamed)
    assert plan.program.recompute.saved_results == {3, 4}


def test_recompute_none_saves_results_without_kept_graphs(tmp_path: Path) -> None:
    away = {"nvme": 1, "placement": 'weights = ["nvme"]'}
    plan = make_plan(tmp_path, training='recompute = "none"', **away)
    assert not plan.program.recompute.kept_graphs and plan.program.recompute.saved_results == {1, 2, 3, 4}


def test_saved_results_that_do_not_fit_are_refused_with_a_remedy(tmp_path: Path) -> None:
    least = make_plan(tmp_path, training='recompute = "full"').totals["ram"]
    with pytest.raises(DoesNotFitError, match=r"Saved results take .*: write training.recompute") as refused:
        make_plan(tmp_path, ram=f"{least}B", training=SELECTIVE)
    enough = make_plan(tmp_path, ram=f"{refused.value.need_bytes}B", training=SELECTIVE)
    assert enough.program.recompute.saved_results == {1, 2, 3, 4}


def test_saved_results_reduce_hardware_flops(tmp_path: Path) -> None:
    full, saved = (make_plan(tmp_path, training=f'recompute = "{choice}"') for choice in ("full", "selective"))
    tokens = {"num_positions": 384, "num_real_tokens": 300, "num_trained_tokens": 200}
    less = (
        step_flops(saved.trace, **tokens),
        step_flops(saved.trace, **tokens, recompute=saved.program.recompute),
    )
    assert less[0].model == less[1].model
    # Every product of a layer is saved or skipped.
    recomputed = sum(saved.trace.visits[visit].recompute.flops for visit in (1, 2, 3, 4))
    assert less[0].hardware - less[1].hardware == pytest.approx(recomputed * 384 / saved.trace.num_tokens, abs=1)
    in_attention = sum(saved.trace.visits[visit].attention.work.skipped_flops for visit in (1, 2, 3, 4))
    computed = recomputed - in_attention
    assert flops_per_token(full) - flops_per_token(saved) == pytest.approx(computed / saved.trace.num_tokens)


def test_kept_graphs_shorten_the_estimate_by_their_recompute(tmp_path: Path) -> None:
    machine = MachineProfile(
        host=platform.node(),
        cpu=cpu_name(),
        ram_bytes=psutil.virtual_memory().total,
        measured_at=datetime.now(UTC),
        is_quick=True,
        num_threads=2,
        ram_update_bytes_per_s=1e10,
        adamw_params_per_s={"float32": 1e8},
        matmul_flops_per_s={"cpu/float32": 1e11},
    )
    shape = StepShape(TOKENS, None, [], [])
    rates = SimulatedRates(nvme_bytes_per_s=1e9, flops_per_s=1e10, update_params_per_s=5e8)
    again, kept = (make_plan(tmp_path, training=f'recompute = "{choice}"') for choice in ("full", "none:2"))
    once = num_parameters_run_once(kept.graph, kept.trace, kept.program)
    layer = sum(parameter.numel() for parameter in kept.graph.units[2].module.parameters())
    assert 2 * layer <= once <= 2.1 * layer
    trace = kept.trace
    saved = sum(trace.visits[visit].recompute.flops for visit in kept.program.recompute.kept_graphs) / trace.num_tokens
    less = flops_per_token(again) - flops_per_token(kept)
    last = sum(trace.visits[visit].unneeded_products.work.flops for visit in kept.program.recompute.kept_graphs)
    never_again = last / trace.num_tokens
    # The tolerances are for attention, of which only the causal half counts.
    assert 0.85 * saved < less < saved and less == pytest.approx(2 * once - never_again, rel=0.1)
    estimates = [estimate_step(plan, shape, LoadedProfile(machine)).seconds["compute"] for plan in (again, kept)]
    recomputed = [trace.visits[visit].recompute for visit in kept.program.recompute.kept_graphs]
    flops = sum(work.product_flops for work in recomputed) / 1e11
    attention = sum(work.attention_flops - work.skipped_flops for work in recomputed) / 5e10  # assumed: half of 1e11
    moved = sum(work.moved_nbytes for work in recomputed) / 1e10
    assert estimates[0] - estimates[1] == pytest.approx((flops + attention + moved) * TOKENS / trace.num_tokens)
    replays = [simulate_step(plan, TOKENS, rates).step_s for plan in (again, kept)]
    assert replays[0] - replays[1] == pytest.approx(less * TOKENS / 1e10, rel=0.02)  # blocks are padded


def test_plan_reports_recompute_and_the_memory_to_avoid_it(tmp_path: Path) -> None:
    """The share matches a count by PyTorch. The memory matches the plan that saves all results."""
    full, selective = make_plan(tmp_path, training='recompute = "full"'), make_plan(tmp_path, training=SELECTIVE)
    none = make_plan(tmp_path, training='recompute = "none"')
    (line,) = (text for text in messages(full) if "recomputes" in text)
    size = format_size(selective.totals["ram"] - full.totals["ram"])
    assert line.endswith(f'; training.recompute = "selective" would reduce this to 0% with {size} more memory')
    found = re.match(r"the backward recomputes 4 of 4 layers: (\d+)% of the operations of a step;", line)
    assert found is not None
    model = AutoModelForCausalLM.from_config(full.graph.config)
    ids = torch.randint(0, 64, (2, 64))
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, labels=ids).loss.backward()
    counts = counter.get_flop_counts()
    forward = sum(sum(counts[f"{type(model).__name__}.model.layers.{layer}"].values()) for layer in range(4)) / 3
    last = sum(2 * ids.numel() * model.config.hidden_size * model.config.intermediate_size for _ in range(4))
    expected = (forward - last) / (counter.get_total_flops() + forward - last)
    assert float(found[1]) / 100 == pytest.approx(expected, abs=0.02)
    assert any("0% of the operations" in text for text in messages(selective))
    assert not any("recomputes" in text for text in messages(none))
