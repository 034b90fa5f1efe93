"""Predicted times, bottlenecks, T* and wear match calculations by hand, and missing measurements are reported."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import astuple, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from fakes.rates import drive, make_machine
from megatrain.config import load_config
from megatrain.config.schema import RunConfig
from megatrain.engine.device.work import Work
from megatrain.engine.program.visit_trace import KEEP_NOTHING, VisitTrace
from megatrain.machine import file_systems, profiles, this_machine
from megatrain.machine.profiles import GpuProfile, LoadedProfile, store_profile
from megatrain.plan.costs import DeviceCosts
from megatrain.plan.estimate import estimate_step, nvme_seconds, split
from megatrain.plan.flops import flops_per_token, tick_flops
from megatrain.plan.plan import Plan
from megatrain.plan.planner import plan_run
from megatrain.plan.show import estimate_lines
from megatrain.plan.simulate import SimulatedRates, measured_rates, simulate_step
from megatrain.plan.times import Estimate, MeasuredTicks, OutsideTraffic, StepShape
from megatrain.plan.traffic import Traffic
from megatrain.training.resolve import resolve
from oracles.tiered_run import EXAMPLES, config_text
from tiered import MiB


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def config_at(folder: Path, *, nvme: int = 1, **tables: str) -> Path:
    text = config_text(folder, EXAMPLES / "quickstart" / "model", nvme=nvme, **tables)
    path = folder / "run.toml"
    path.write_text(text.replace("[model]", "[model]\ntrain_from_scratch = true", 1))
    return path


@pytest.fixture(scope="module")
def plan(tmp_path_factory: pytest.TempPathFactory) -> Plan:
    """Return a plan with nearly everything on the drive."""
    folder = tmp_path_factory.mktemp("plan")
    planned = plan_run(resolve(load_config(config_at(folder, ram="6MiB")).config))
    assert planned.traffic["nvme->ram"] > planned.traffic["ram->nvme"] > 0
    return planned


def _with_trace(plan: Plan, trace: VisitTrace) -> Plan:
    return replace(plan, traced=replace(plan.traced, trace=trace))


def shape_of(folder: Path, **changes: object) -> StepShape:
    return replace(StepShape(384, None, [folder], [1.0]), **changes)  # type: ignore[arg-type]


def estimate(plan: Plan, folder: Path, *, shape: Mapping[str, object] | None = None, **changes: object) -> Estimate:
    """Estimate a step on a machine where, by default, element-wise work and launches take no time."""
    products = cast("dict[str, float]", changes.get("matmul_flops_per_s", {"cpu/float32": 1e11}))
    free = {
        "attention_flops_per_s": products,
        "elementwise_bytes_per_s": dict.fromkeys(products, 1e30),
        "launches_per_s": 1e30,
    }
    machine = make_machine(folder, **{**free, **changes})
    return estimate_step(plan, shape_of(folder, **(shape or {})), LoadedProfile(machine))


def seconds_of(found: Estimate) -> dict[str, float]:
    """Return the seconds of each cause that takes a significant time."""
    return {name: seconds for name, seconds in found.seconds.items() if seconds > 1e-12}


#: Rates at which each kind of work takes a distinct time.
RATES: dict[str, Any] = {
    "matmul_flops_per_s": {"cpu/float32": 1e11, "cuda/float32": 1e12},
    "attention_flops_per_s": {"cpu/float32": 2e10, "cuda/float32": 4e11},
    "elementwise_bytes_per_s": {"cpu/float32": 3e9, "cuda/float32": 8e10},
    "launches_per_s": 20_000.0,
}


def work_by_hand(plan: Plan) -> dict[str, float]:
    """Add up the work of a micro-batch: each visit's forward, recompute and backward, and the head."""
    parts = [each for visit in plan.trace.visits for each in (visit.forward, visit.backward)] + [plan.trace.head]
    assert not plan.program.recompute.kept_graphs and not plan.program.recompute.saved_attention
    assert plan.trace.head_parts == 1  # no logits are recomputed
    return {
        "products": sum(part.product_flops for part in parts),
        "attention": sum(part.attention_flops - part.skipped_flops for part in parts),
        "bytes": sum(part.moved_nbytes for part in parts),
        # On a GPU, products also read and write fp32 gradient sums. This applies to all parameters except the last
        # norm's, since the others are in layers with products or in the tied head.
        "sums": 8 * (plan.graph.num_parameters - plan.graph.config.hidden_size),
        "launches": sum(part.launches for part in parts),
        "leases": sum(len(tick.uses) for tick in plan.program.ticks),
    }


def test_seconds_of_a_drive() -> None:
    one = drive(2e9, 1e9, 1.5e9)
    assert nvme_seconds(3e9, 0, one) == pytest.approx(1.5)
    assert nvme_seconds(0, 3e9, one) == pytest.approx(3.0)
    assert nvme_seconds(3e9, 3e9, one) == pytest.approx(4.0)  # reads and writes share one limit: 6 GB at 1.5 GB/s
    assert nvme_seconds(5e9, 3e9, one) == pytest.approx(4.0 + 1.0)
    slowing = drive(2e9, 1e9, 1.5e9, sustained_write_bytes_per_s=0.5e9)
    assert nvme_seconds(3e9, 3e9, slowing) == pytest.approx(6.0)
    assert nvme_seconds(3e9, 0, slowing) == pytest.approx(1.5)


def test_flops_of_a_token_by_hand(plan: Plan) -> None:
    """Count each layer's forward, recompute and backward (twice a forward), and the head without a recompute.

    Only half of the causal attention counts, and the last product of a layer is not recomputed.
    """
    config, length = plan.graph.config, plan.run.batch.max_length
    embedding = config.vocab_size * config.hidden_size  # tied to the head
    in_layers = sum(
        entry.numel
        for layout in plan.graph.layouts.values()
        for entry in layout.entries
        if len(entry.shape) == 2 and entry.numel != embedding
    )
    num_heads, width = config.num_attention_heads, config.head_dim
    attention = config.num_hidden_layers * 2 * 2 * num_heads * width * length // 2  # causal: the other half is left out
    last = config.num_hidden_layers * config.intermediate_size * config.hidden_size
    by_hand = 8 * in_layers - 2 * last + 6 * embedding + attention * (1 + 1 + 2.5)
    assert flops_per_token(plan) == pytest.approx(by_hand, rel=0.01)
    assert sum(tick_flops(plan)) == pytest.approx(flops_per_token(plan))
    ticks = zip(plan.program.ticks, tick_flops(plan), strict=True)
    assert not any(flops for tick, flops in ticks if tick.phase == "update")


def test_untraced_flops_are_estimated_from_all_parameters(plan: Plan) -> None:
    guessed = _with_trace(plan, replace(plan.trace, guesses=("a value was made up",)))
    assert flops_per_token(guessed) == 8 * plan.graph.num_parameters
    assert sum(tick_flops(guessed)) == pytest.approx(8 * plan.graph.num_parameters)


def test_a_step_by_hand(plan: Plan, tmp_path: Path) -> None:
    found = estimate(plan, tmp_path, **RATES)
    num_parameters = plan.graph.num_parameters
    work, num_micro_batches = work_by_hand(plan), 384 / plan.trace.num_tokens
    read, written = plan.traffic["nvme->ram"], plan.traffic["ram->nvme"]
    computing_s = work["products"] / 1e11 + work["attention"] / 2e10 + work["bytes"] / 3e9
    assert found.seconds == {
        "compute": pytest.approx(computing_s * num_micro_batches),
        "host": pytest.approx((work["launches"] * num_micro_batches + 1.4 * work["leases"]) / 20_000),
        "optimizer": pytest.approx(num_parameters / 1e8, rel=0.02),  # blocks are padded
        "nvme": pytest.approx(2 * written / 1.5e9 + (read - written) / 2e9),
    }
    assert found.step_s == pytest.approx(
        max(found.seconds["compute"] + found.seconds["host"] + found.seconds["optimizer"], found.seconds["nvme"])
    )
    assert found.unmeasured == ()


def test_a_gpu_computes_while_the_host_launches(plan: Plan, tmp_path: Path) -> None:
    """The slower of the two determines the step time. A launch costs the host more for a GPU than for a CPU."""
    links = {"ram->gpu": 1000, "gpu->ram": 1000}
    placement = replace(plan.placement, traffic_bytes=links)
    on_gpu = replace(plan, run=replace(plan.run, device=torch.device("cuda")), placement=placement)
    gpu = GpuProfile(name="some", memory_bytes=1 << 30, h2d_bytes_per_s=2e9, d2h_bytes_per_s=1e9)
    found = estimate(on_gpu, tmp_path, **RATES, gpu=gpu, adamw_params_per_s={"float32": 1e12})
    work, num_micro_batches = work_by_hand(plan), 384 / plan.trace.num_tokens
    computing_s = work["products"] / 1e12 + work["attention"] / 4e11 + (work["bytes"] + work["sums"]) / 8e10
    computing_s *= num_micro_batches
    host_s = 1.05 * (work["launches"] * num_micro_batches + 1.4 * work["leases"]) / 20_000
    assert found.seconds["compute"] == pytest.approx(computing_s)
    assert found.seconds["host"] == pytest.approx(host_s)
    assert (found.step_s, found.bound_by) == (pytest.approx(host_s), "host")
    rates = measured_rates(replace(on_gpu, estimate=found))
    assert rates is not None and rates.flops_per_s == pytest.approx(flops_per_token(plan) * 384 / host_s)
    fast = estimate(on_gpu, tmp_path, **{**RATES, "launches_per_s": 1e8}, gpu=gpu, adamw_params_per_s={"float32": 1e12})
    assert (fast.step_s, fast.bound_by) == (pytest.approx(computing_s, rel=0.01), "compute")


def test_the_host_moves_blocks_over_the_bus(tmp_path: Path) -> None:
    """A transfer costs as much host time as eight launches. Transfers times block sizes add up to the bus traffic."""
    path = config_at(tmp_path, gpu="24MiB", placement='weights = ["ram"]')
    plan = plan_run(resolve(load_config(path).config))
    blocks, placement = plan.program.blocks, plan.placement
    traffic = Traffic(plan.program, placement.routes, placement.homes, placement.stays)
    of_each = {key: traffic.num_transfers("gpu", lambda other, key=key: other == key) for key in blocks}
    over_the_bus = plan.traffic["ram->gpu"] + plan.traffic["gpu->ram"]
    assert sum(count * blocks[key].nbytes for key, count in of_each.items()) == over_the_bus > 0
    assert traffic.num_transfers("gpu") == sum(of_each.values()) > 0
    links = GpuProfile(name="some", memory_bytes=1 << 30, h2d_bytes_per_s=2e9, d2h_bytes_per_s=1e9)
    on_gpu = replace(plan, run=replace(plan.run, device=torch.device("cuda")))
    num_tokens = plan.trace.num_tokens
    found = estimate(on_gpu, tmp_path, shape={"tokens_per_step": num_tokens}, **RATES, gpu=links)
    work = work_by_hand(plan)
    units = work["launches"] + 1.4 * work["leases"] + 8 * sum(of_each.values())
    assert found.seconds["host"] == pytest.approx(1.05 * units / 20_000)


def test_unmeasured_rates_are_reported_as_assumed(plan: Plan, tmp_path: Path) -> None:
    assert "assumed" not in estimate(plan, tmp_path, **RATES).notes[0]
    unknown = make_machine(tmp_path)
    found = estimate_step(plan, shape_of(tmp_path), LoadedProfile(unknown))
    for what in ("attention at 50%", "element-wise", "40 us of the host for each launch"):
        assert what in found.notes[0].partition("assumed: ")[2], found.notes
    work, num_micro_batches = work_by_hand(plan), 384 / plan.trace.num_tokens
    by_hand = work["products"] / 1e11 + work["attention"] / 5e10 + work["bytes"] / 1e10
    assert found.seconds["compute"] == pytest.approx(by_hand * num_micro_batches)
    on_gpu = replace(plan, run=replace(plan.run, device=torch.device("cuda")))
    said = estimate(on_gpu, tmp_path, **RATES).notes[0]
    assert "; assumed: launches at 1.05 times what they cost on the CPU; " in said


def test_untraced_layers_are_timed_by_their_products_alone(plan: Plan, tmp_path: Path) -> None:
    guessed = _with_trace(plan, replace(plan.trace, guesses=("a value was made up",)))
    found = estimate(guessed, tmp_path, **RATES)
    assert found.seconds["compute"] == pytest.approx(8 * plan.graph.num_parameters * 384 / 1e11)
    assert "host" not in found.seconds and "could not be traced" in found.notes[0]


@pytest.mark.parametrize(
    ("changes", "bound_by"),
    [
        ({"matmul_flops_per_s": {"cpu/float32": 1e9}}, "compute"),
        ({"matmul_flops_per_s": {"cpu/float32": 1e15}, "adamw_params_per_s": {"float32": 1e6}}, "optimizer"),
        ({"matmul_flops_per_s": {"cpu/float32": 1e15}, "adamw_params_per_s": {"float32": 1e12}}, "nvme"),
    ],
    ids=["compute", "optimizer", "nvme"],
)
def test_step_bound_is_identified(plan: Plan, tmp_path: Path, changes: Mapping[str, object], bound_by: str) -> None:
    found = estimate(plan, tmp_path, **changes)
    assert found.bound_by == bound_by
    assert found.step_s is not None
    assert found.seconds[bound_by] <= found.step_s <= sum(found.seconds.values())
    assert any(f"bound by: {bound_by}" in line for line in estimate_lines(found))


def test_compute_time_equals_transfer_time_at_the_crossing(plan: Plan, tmp_path: Path) -> None:
    """With T* tokens, compute and updates take as long as the drive, which also moves activations for each token."""
    rates = {"matmul_flops_per_s": {"cpu/float32": 1e12}, "adamw_params_per_s": {"float32": 1e10}}
    found = estimate(plan, tmp_path, **rates)
    assert found.bound_by == "nvme"
    assert found.crossing_tokens is not None and found.crossing_tokens > 384
    homes = plan.placement.homes
    staying = {key for _, key in plan.placement.stays}
    saved = [
        block.nbytes
        for block in plan.program.blocks.values()
        if block.kind == "activations" and homes[block.key] == "nvme" and block.key not in staying
    ]
    assert saved
    moved_per_token = nvme_seconds(sum(saved), sum(saved), drive(2e9, 1e9, 1.5e9)) / 384
    compute_per_token = found.seconds["compute"] / 384
    at = found.crossing_tokens
    moving = found.seconds["nvme"] + moved_per_token * (at - 384)
    assert compute_per_token * at + found.seconds["optimizer"] == pytest.approx(moving, rel=1e-6)


def test_no_crossing_if_activations_alone_take_longer(plan: Plan, tmp_path: Path) -> None:
    assert estimate(plan, tmp_path, matmul_flops_per_s={"cpu/float32": 1e18}).crossing_tokens is None


def test_always_compute_bound(plan: Plan, tmp_path: Path) -> None:
    found = estimate(plan, tmp_path, matmul_flops_per_s={"cpu/float32": 1e9}, adamw_params_per_s={"float32": 1e6})
    assert found.crossing_tokens == 0
    assert not any("T*" in line for line in estimate_lines(found))


def test_gpu_updates_overlap_the_forward(plan: Plan, tmp_path: Path) -> None:
    links = {"ram->gpu": 4_000_000_000, "gpu->ram": 1_000_000_000}
    placement = replace(plan.placement, traffic_bytes=links)
    on_gpu = replace(plan, run=replace(plan.run, device=torch.device("cuda")), placement=placement)
    gpu = GpuProfile(name="some", memory_bytes=1 << 30, h2d_bytes_per_s=2e9, d2h_bytes_per_s=1e9)
    flops = flops_per_token(plan) * 384
    ticks = zip(plan.program.ticks, tick_flops(plan), strict=True)
    forward_s = 8.0 * sum(flops for tick, flops in ticks if tick.phase == "forward") / flops_per_token(plan)
    found = estimate(on_gpu, tmp_path, gpu=gpu, matmul_flops_per_s={"cuda/float32": flops / 8})
    assert found.seconds["ram->gpu"] == pytest.approx(2.0)
    assert found.seconds["gpu->ram"] == pytest.approx(1.0)
    assert found.seconds["compute"] == pytest.approx(8.0)
    assert found.step_s == pytest.approx(8.0)  # the forward's 2 s hide the optimizer's milliseconds
    slow = estimate(
        on_gpu, tmp_path, gpu=gpu, matmul_flops_per_s={"cuda/float32": flops / 8},
        adamw_params_per_s={"float32": plan.graph.num_parameters / 3},
    )  # fmt: skip
    assert 1.0 < forward_s < 2.5  # this part of the computation overlaps the optimizer
    assert slow.step_s == pytest.approx(8.0 - forward_s + 3.0, rel=0.02)
    assert slow.crossing_tokens == pytest.approx(384 * slow.seconds["optimizer"] / forward_s)
    fast = estimate(on_gpu, tmp_path, gpu=gpu, matmul_flops_per_s={"cuda/float32": flops / 0.5})
    assert (fast.step_s, fast.bound_by) == (pytest.approx(2.0), "ram->gpu")


def test_updates_hide_behind_the_micro_batches_that_run_together(plan: Plan, tmp_path: Path) -> None:
    """Updates that wait for the norm overlap the first forward. Other updates overlap the last backward."""
    updates = plan.program.updates
    num_parameters = plan.updates.num_weights(on_gpu=False)
    gpu = GpuProfile(name="some", memory_bytes=1 << 30, h2d_bytes_per_s=2e9, d2h_bytes_per_s=1e9)
    flops = flops_per_token(plan) * 384
    ticks = list(zip(plan.program.ticks, tick_flops(plan), strict=True))
    share = {
        phase: sum(flops for tick, flops in ticks if tick.phase == phase) / flops_per_token(plan)
        for phase in ("forward", "backward")
    }
    assert share["backward"] > 2 * share["forward"]
    for order, num_apart in (("layer", 1), ("micro_batch", 3)):
        for are_deferred, phase in ((True, "forward"), (False, "backward")):
            program = replace(plan.program, updates=replace(updates, are_deferred=are_deferred))
            batch = replace(plan.run.batch, order=order)
            run = replace(plan.run, device=torch.device("cuda"), batch=batch)
            placement = replace(plan.placement, traffic_bytes={})
            other = replace(plan, run=run, program=program, placement=placement)
            rates = {"matmul_flops_per_s": {"cuda/float32": flops / 8}, "gpu": gpu}
            found = estimate(other, tmp_path, adamw_params_per_s={"float32": num_parameters / 7}, **rates)
            hiding_s = 8 * share[phase] / num_apart
            assert found.seconds["optimizer"] == pytest.approx(7) and hiding_s < 7
            assert found.step_s == pytest.approx(8 - hiding_s + 7, rel=1e-6), (order, phase)
            hidden = estimate(other, tmp_path, adamw_params_per_s={"float32": num_parameters / hiding_s * 1.1}, **rates)
            assert hidden.step_s == pytest.approx(8, rel=1e-6), (order, phase)
            if order == "layer":  # twice the tokens hide twice the update time
                assert found.crossing_tokens == pytest.approx(384 * 7 / hiding_s)
            else:
                assert found.crossing_tokens == pytest.approx(384 * (7 - hiding_s) / 8)


def test_the_host_is_no_bottleneck_while_a_gpu_computes_longer(tmp_path: Path) -> None:
    """The host is the bottleneck only if its launches take longer than the GPU's compute and updates combined."""
    planned = plan_run(
        resolve(load_config(config_at(tmp_path, nvme=0, gpu="64MiB", training='recompute = "full"')).config)
    )
    plan = replace(planned, run=replace(planned.run, device=torch.device("cuda")))
    num_trained = sum(block.num_elements for block in plan.program.blocks.values() if block.key.endswith("/m"))
    gpu = GpuProfile(
        name="some", memory_bytes=1 << 30, h2d_bytes_per_s=2e9, d2h_bytes_per_s=1e9,
        update_bytes_per_s=28.0 * num_trained,
    )  # fmt: skip
    flops = {"cuda/float32": flops_per_token(plan) * 384 / 2}
    work = work_by_hand(plan)
    launches = 1.05 * (work["launches"] * 384 / plan.trace.num_tokens + 1.4 * work["leases"])
    for host_s, step_s, bound_by in ((2.5, 3.0, "compute"), (3.5, 3.5, "host")):
        found = estimate(plan, tmp_path, gpu=gpu, matmul_flops_per_s=flops, launches_per_s=launches / host_s)
        assert found.seconds["host"] == pytest.approx(host_s)
        assert (found.step_s, found.bound_by) == (pytest.approx(step_s), bound_by)


def test_logits_that_the_head_keeps_are_computed_once(plan: Plan) -> None:
    """The head has four vocabulary parts. Its second pass recomputes the logits of the parts that were not kept."""
    trace = replace(plan.trace, head_parts=4)
    once = flops_per_token(plan)
    logits = 2 * plan.graph.config.vocab_size * plan.graph.config.hidden_size
    for kept_parts, again in ((1, 3), (3, 1), (4, 0)):
        recompute = replace(plan.program.recompute, kept_parts=kept_parts)
        other = replace(_with_trace(plan, trace), program=replace(plan.program, recompute=recompute))
        assert flops_per_token(other) == pytest.approx(once + logits * again / 4)


def test_saved_results_are_copied_once(tmp_path: Path) -> None:
    """Saved results avoid products in the recompute, but the forward needs time to copy them to a block."""
    path = config_at(tmp_path, nvme=0, training='recompute = "selective"')
    saving = plan_run(resolve(load_config(path).config))
    again = replace(saving, program=replace(saving.program, recompute=KEEP_NOTHING))
    visits = saving.program.recompute.saved_results
    config, num_tokens = saving.graph.config, saving.trace.num_tokens
    assert len(visits) == config.num_hidden_layers
    # Per token: queries, keys, values, attention with a log-sum-exp for each head, its projection, gate and up.
    heads, kv_heads, width = config.num_attention_heads, config.num_key_value_heads, config.head_dim
    numbers = heads * width + 2 * kv_heads * width + heads * (width + 1) + config.hidden_size
    numbers += 2 * config.intermediate_size
    nbytes = 4 * numbers * num_tokens * config.num_hidden_layers
    assert sum(saving.trace.visits[visit].results.nbytes for visit in visits) == pytest.approx(nbytes, rel=0.02)
    rates = {"elementwise_bytes_per_s": {"cpu/float32": 1e9}, "matmul_flops_per_s": {"cpu/float32": 1e30}}
    took, took_again = (
        estimate(each, tmp_path, shape={"tokens_per_step": num_tokens}, **rates).seconds["compute"]
        for each in (saving, again)
    )
    assert took - took_again == pytest.approx(2 * nbytes / 1e9, rel=0.02)


def test_compiled_layers_save_no_results(tmp_path: Path) -> None:
    """A compiled layer is a single call, so the recompute runs all of it, whatever the config requests."""
    for text, count in (('compile = true\ncompile_backend = "eager"\n', 0), ("", 4)):
        path = config_at(tmp_path, nvme=0, training='recompute = "selective"')
        path.write_text(path.read_text().replace("[model]", f"[model]\n{text}", 1))
        plan = plan_run(resolve(load_config(path).config))
        assert len(plan.program.recompute.saving_visits) == count


def test_updates_of_gpu_resident_blocks_take_gpu_time(tmp_path: Path) -> None:
    """All blocks are in GPU memory: no bus traffic, no host updates, and the GPU updates after the backward."""
    planned = plan_run(
        resolve(load_config(config_at(tmp_path, nvme=0, gpu="64MiB", training='recompute = "full"')).config)
    )
    plan = replace(planned, run=replace(planned.run, device=torch.device("cuda")))
    num_trained = sum(block.num_elements for block in plan.program.blocks.values() if block.key.endswith("/m"))
    assert (plan.updates.num_weights(on_gpu=True), plan.updates.num_weights(on_gpu=False)) == (num_trained, 0)
    flops = {"cuda/float32": flops_per_token(plan) * 384 / 2}
    gpu = GpuProfile(name="some", memory_bytes=1 << 30, h2d_bytes_per_s=2e9, d2h_bytes_per_s=1e9)
    unknown = estimate(plan, tmp_path, gpu=gpu, matmul_flops_per_s=flops)
    assert unknown.unmeasured == ("gpu optimizer",) and unknown.step_s is None
    measured = gpu.model_copy(update={"update_bytes_per_s": 28.0 * num_trained})
    found = estimate(plan, tmp_path, gpu=measured, matmul_flops_per_s=flops)
    assert seconds_of(found) == {
        "compute": pytest.approx(2.0),
        "gpu optimizer": pytest.approx(1.0),
    }  # 28 bytes per parameter: 12 read, 12 written, and 4 of the gradient
    assert (found.step_s, found.bound_by) == (pytest.approx(3.0), "compute")
    rates = measured_rates(replace(plan, estimate=found))
    assert rates is not None and rates.gpu_update_params_per_s == pytest.approx(num_trained)


def test_nothing_is_predicted_without_a_profile(plan: Plan, tmp_path: Path) -> None:
    found = estimate_step(plan, shape_of(tmp_path), LoadedProfile(None, "the file is damaged"))
    assert found.seconds == {}
    assert found.step_s is None
    text = "\n".join(estimate_lines(found))
    assert "run `megatrain-tier doctor" in text and "the file is damaged" in text
    assert "predicted" not in text and "measured by" not in text
    assert found.to_json()["predicted_step_s"] is None


@pytest.mark.parametrize(
    ("changes", "missing"),
    [
        ({"drives": {}}, "nvme"),
        ({"matmul_flops_per_s": {"cpu/bfloat16": 1e11, "cuda/float32": 1e11}}, "compute"),
        ({"adamw_params_per_s": {"bfloat16": 1e9}}, "optimizer"),
    ],
    ids=["nvme", "compute", "optimizer"],
)
def test_missing_measurements_are_reported(
    plan: Plan, tmp_path: Path, changes: Mapping[str, object], missing: str
) -> None:
    found = estimate(plan, tmp_path, **changes)
    assert found.unmeasured == (missing,)
    assert missing not in found.seconds
    assert found.step_s is None
    assert any("not measured" in line for line in estimate_lines(found))
    assert not any(line.startswith("predicted") for line in estimate_lines(found))


def test_the_rate_of_another_optimizer_is_not_taken(plan: Plan, tmp_path: Path) -> None:
    class Other:
        def state_kinds(self, split_master: bool) -> object:
            return plan.traced.optimizer.state_kinds(split_master)

    other = replace(plan, traced=replace(plan.traced, optimizer=Other()))  # type: ignore[arg-type]
    assert estimate(other, tmp_path).unmeasured == ("optimizer",)


def planned_with(folder: Path, optimizer: str, **tables: str) -> Plan:
    path = config_at(folder, nvme=0, optimizer=optimizer, **tables)
    return plan_run(resolve(load_config(path).config))


@pytest.mark.parametrize(
    ("optimizer", "touched"),
    [
        ('optim = "lion"', 20),
        ('optim = "sgd"\nsgd_momentum = 0.0', 12),
        ("ema_decay = 0.9", 36),
        ('state_dtype = "int8"', None),
        ('optim = "adafactor"', None),
    ],
)
def test_memory_bound_optimizers_are_timed_by_their_bytes(optimizer: str, touched: int | None, tmp_path: Path) -> None:
    """Times are scaled from AdamW's 28 bytes per parameter. Optimizers that compute more are not predicted."""
    plan = planned_with(tmp_path, optimizer)
    found = estimate(plan, tmp_path)
    if touched is None:
        assert found.unmeasured == ("optimizer",)
        return
    assert found.seconds["optimizer"] == pytest.approx(plan.updates.num_weights(on_gpu=False) * touched / 28 / 1e8)
    assert any("this optimizer was not timed" in line for line in estimate_lines(found))
    assert not any("not timed" in line for line in estimate_lines(estimate(planned_with(tmp_path, ""), tmp_path)))


def test_muon_products_are_timed_on_the_compute_device(tmp_path: Path) -> None:
    plan = planned_with(tmp_path, 'optim = "muon"', gpu="24MiB")
    shapes = [
        (entry.shape[0], entry.shape[1])
        for layout in plan.graph.layouts.values()
        for entry in layout.entries
        if len(entry.shape) == 2 and "embed" not in entry.name
    ]
    flops = sum(5 * (4 * min(s) ** 2 * max(s) + 2 * min(s) ** 3) for s in shapes)
    rest = 20 / 28 / 1e8 * sum(rows * columns for rows, columns in shapes)
    rates = {"cpu/float32": 1e11, "cuda/float32": 1e11, "cpu/bfloat16": flops / 2, "cuda/bfloat16": flops / 3}
    on_cpu = estimate(plan, tmp_path, matmul_flops_per_s=rates).seconds
    assert on_cpu["optimizer"] == pytest.approx(rest + 2, rel=0.01)
    assert "gpu optimizer" not in on_cpu
    gpu = GpuProfile(name="some", memory_bytes=1 << 30, h2d_bytes_per_s=2e9, d2h_bytes_per_s=1e9)
    plan = replace(plan, run=replace(plan.run, device=torch.device("cuda")))
    found = estimate(plan, tmp_path, matmul_flops_per_s=rates, gpu=gpu)
    assert found.seconds["optimizer"] == pytest.approx(on_cpu["optimizer"] - 2)
    assert found.seconds["gpu optimizer"] == pytest.approx(3)
    assert found.step_s is not None and 3 < found.step_s <= sum(found.seconds.values())
    simulated = measured_rates(replace(plan, estimate=found))
    assert simulated is not None and simulated.products_flops_per_s == pytest.approx(flops / 3)
    without = simulate_step(plan, 384, replace(simulated, products_flops_per_s=None))
    assert simulate_step(plan, 384, simulated).step_s == pytest.approx(without.step_s + 3, rel=0.01)
    del rates["cuda/bfloat16"]
    assert estimate(plan, tmp_path, matmul_flops_per_s=rates, gpu=gpu).unmeasured == ("gpu optimizer",)


def rates_and_notes(costs: DeviceCosts | None) -> tuple[list[float], tuple[str, ...]]:
    assert costs is not None
    *rates, assumed = astuple(costs)
    return rates, assumed


def test_rates_that_were_not_measured_are_assumed(tmp_path: Path) -> None:
    """Attention runs at half the rate of products. A launch, a lease and a transfer cost 1, 1.4 and 8 launches."""
    rates = {"matmul_flops_per_s": {"cpu/float32": 8e10, "cuda/bfloat16": 4e14}, "ram_update_bytes_per_s": 2e10}
    attention = "attention at 50% of the rate of products"
    moved = "element-wise operators at the rate of updates in memory"
    machine = make_machine(tmp_path, **rates)
    on_cpu = pytest.approx([8e10, 4e10, 2e10, 4e-5, 5.6e-5, 3.2e-4])
    notes = (attention, moved, "40 us of the host for each launch")
    assert rates_and_notes(DeviceCosts.of(machine, "cpu", "float32")) == (on_cpu, notes)
    assert DeviceCosts.of(machine, "cpu", "bfloat16") is None and DeviceCosts.of(machine, "cuda", "float32") is None
    host = [1.05 * seconds for seconds in (4e-5, 5.6e-5, 3.2e-4)]
    notes = (attention, moved, "42 us of the host for each launch")
    gpu = {"name": "some", "memory_bytes": 1 << 30, "h2d_bytes_per_s": 2e9, "d2h_bytes_per_s": 1e9}
    for more, rate in ((None, 2e10), (gpu, 2e10), (gpu | {"update_bytes_per_s": 1e12}, 1e12)):
        found = DeviceCosts.of(make_machine(tmp_path, **rates, gpu=more), "cuda", "bfloat16")
        assert rates_and_notes(found) == (pytest.approx([4e14, 2e14, rate, *host]), notes)
    measured = {
        "attention_flops_per_s": {"cpu/float32": 3e10, "cuda/bfloat16": 1e14},
        "elementwise_bytes_per_s": {"cpu/float32": 7e9, "cuda/bfloat16": 3e12},
        "launches_per_s": 50_000.0,
    }
    machine = make_machine(tmp_path, **rates, **measured, gpu=gpu)
    found = DeviceCosts.of(machine, "cpu", "float32")
    assert rates_and_notes(found) == (pytest.approx([8e10, 3e10, 7e9, 2e-5, 2.8e-5, 1.6e-4]), ())
    assert found is not None and found.computing_s(Work(16e10, 9e10, 3e10, 21e9, 5)) == pytest.approx(2 + 2 + 3)
    on_gpu = pytest.approx([4e14, 1e14, 3e12, 2.1e-5, 2.94e-5, 1.68e-4])
    assert rates_and_notes(DeviceCosts.of(machine, "cuda", "bfloat16")) == (
        on_gpu,
        ("launches at 1.05 times what they cost on the CPU",),
    )


DOCTOR = "run `megatrain-tier doctor --config CONFIG` for times"
COUNTED = "computing       products, attention and other operators at their rates"
TIMING = "; `plan --measure` times steps of this model"
TODAY = "rates           measured by doctor today"
STRIPING = "striping        the 2 NVMe paths are assumed to be equally fast: run doctor, or set rates"


def test_notes_state_the_origin_of_all_rates(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert estimate(plan, tmp_path).notes == (COUNTED + TIMING, TODAY)
    assumed = "attention at 50% of the rate of products, element-wise operators at the rate of updates in memory, "
    loaded = LoadedProfile(make_machine(tmp_path), ranks=("some rank", "another"))
    found = estimate_step(plan, shape_of(tmp_path), loaded).notes
    launches = "40 us of the host for each launch"
    assert found == (f"{COUNTED}; assumed: {assumed}{launches}{TIMING}", TODAY, "some rank", "another")
    found = estimate_step(plan, shape_of(tmp_path), replace(loaded, origin="from a file")).notes
    assert found == (f"{COUNTED}; assumed: {assumed}{launches}", "from a file")

    two = {"paths": [tmp_path / "slow", tmp_path / "fast"], "weights": [1.0, 1.0]}
    loaded = LoadedProfile(None, "the file is damaged", ranks=("some rank",))
    unknown = f"times           not measured: {DOCTOR}"
    found = estimate_step(plan, shape_of(tmp_path, **two), loaded).notes
    assert found == (unknown, STRIPING, "some rank", "profile         the file is damaged")
    found = estimate_step(plan, shape_of(tmp_path, **two, has_rates=True), LoadedProfile(None)).notes
    assert found == (unknown,)
    by_name(monkeypatch)
    drives = {"slow": drive(1e9, 1e9, 1e9)}
    found = estimate(plan, tmp_path, shape=two, drives=drives).notes
    fast = f"times           drive of {tmp_path / 'fast'} not measured: {DOCTOR}"
    assert found == (COUNTED + TIMING, fast, STRIPING, TODAY)
    found = estimate(plan, tmp_path, shape={**two, "has_rates": True}, matmul_flops_per_s={}, drives={}).notes
    uncounted = (
        "computing       at least 8 FLOPs per parameter and token in large products, because layers could not be "
    )
    both = f"times           drive of {tmp_path / 'slow'}, {tmp_path / 'fast'} not measured: {DOCTOR}"
    compute = "times           not measured: compute. The step is not predicted"
    assert found == (f"{uncounted}traced{TIMING}", both, compute, TODAY)


@pytest.mark.parametrize(
    ("days", "age"),
    [
        (0.9, "today"),
        (1, "1 day ago"),
        (2.5, "2 days ago"),
        (29.9, "29 days ago"),
        (31, "31 days ago. They are older than 30 days: measure again"),
    ],
)
def test_old_measurements_are_reported(days: float, age: str, plan: Plan, tmp_path: Path) -> None:
    """The oldest measurement counts: of the machine or of a drive."""
    key = file_systems.file_system_of(tmp_path).key
    measured_at = datetime.now(UTC) - timedelta(days=days)
    old = drive(1e9, 1e9, 1e9, measured_at=measured_at)
    for changes in ({"measured_at": measured_at}, {"drives": {key: old}}):
        found = estimate(plan, tmp_path, **changes)
        assert found.notes == (COUNTED + TIMING, f"rates           measured by doctor {age}")
        assert found.step_s is not None
    quick = age.replace("ago", "ago, quick").replace("today", "today, quick")
    old = drive(1e9, 1e9, 1e9, measured_at=measured_at, is_quick=True)
    for changes in ({"measured_at": measured_at, "is_quick": True}, {"drives": {key: old}}):
        assert estimate(plan, tmp_path, **changes).notes[1] == f"rates           measured by doctor {quick}"


def test_timed_ticks_replace_counted_work(plan: Plan, tmp_path: Path) -> None:
    """Ticks take 1, 2, 3 ... ms, and a step spends 5 s outside of ticks."""
    seconds = tuple((index + 1) / 1000 for index in range(len(plan.program.ticks)))
    ticks = MeasuredTicks(seconds, 5.0, 4, 2, True, 3 * MiB)
    found = estimate(replace(plan, ticks=ticks), tmp_path)
    phases = [tick.phase for tick in plan.program.ticks]
    updates_s = sum(each for each, phase in zip(seconds, phases, strict=True) if phase == "update")
    assert 0 < updates_s < sum(seconds)
    assert found.seconds == {
        "compute": pytest.approx(5.0 + sum(seconds) - updates_s),
        "optimizer": pytest.approx(updates_s),
        "nvme": estimate(plan, tmp_path).seconds["nvme"],
    }
    assert (found.step_s, found.bound_by) == (pytest.approx(5.0 + sum(seconds)), "compute")
    text = "4 steps of this model with 2 micro-batches each, extrapolated to all micro-batches"
    assert found.is_timed and found.notes == (f"computing       measured: {text}, in 3.00 MiB of RAM", TODAY)
    whole = replace(ticks, is_extrapolated=False)
    assert whole.note == "computing       measured: 4 steps of this model, in 3.00 MiB of RAM"


def test_each_link_has_its_own_rate(plan: Plan, tmp_path: Path) -> None:
    moved = {"ram->gpu": 20, "gpu->ram": 30, "gpu->ranks": 40, "ranks->gpu": 50, "gpu->hosts": 60, "hosts->gpu": 70}
    placement = replace(plan.placement, traffic_bytes={**moved, "nvme->gpu": 0})
    on_gpu = replace(plan, run=replace(plan.run, device=torch.device("cuda")), placement=placement)
    gpu = GpuProfile(
        name="some", memory_bytes=1 << 30, h2d_bytes_per_s=2.0, d2h_bytes_per_s=5.0, peer_bytes_per_s=0.5,
        network_bytes_per_s=0.1,
    )  # fmt: skip
    seconds = {"ram->gpu": 10, "gpu->ram": 6, "gpu->ranks": 80, "ranks->gpu": 100, "gpu->hosts": 600, "hosts->gpu": 700}
    found = estimate(on_gpu, tmp_path, **RATES, gpu=gpu)
    assert {name: each for name, each in found.seconds.items() if name in moved} == pytest.approx(seconds)
    assert (found.step_s, found.bound_by, found.unmeasured) == (pytest.approx(700), "hosts->gpu", ())
    links = gpu.model_copy(update={"peer_bytes_per_s": None, "network_bytes_per_s": None})
    assert estimate(on_gpu, tmp_path, **RATES, gpu=links).unmeasured == tuple(moved)[2:]
    assert estimate(on_gpu, tmp_path, **RATES).unmeasured == tuple(moved)
    rates = measured_rates(replace(on_gpu, estimate=found))
    assert rates is not None and (rates.bus_bytes_per_s, rates.peer_bytes_per_s) == pytest.approx((5.0, 0.5))


def test_rates_behind_an_estimate(plan: Plan, tmp_path: Path) -> None:
    key = file_systems.file_system_of(tmp_path).key
    slow = drive(2e9, 1e9, 1.5e9, computing_s_per_byte=3e-9, seconds_per_copy=7e-4)
    found = estimate(plan, tmp_path, **RATES, drives={key: slow})
    assert (found.computing_s_per_nvme_byte, found.seconds_per_nvme_copy) == (pytest.approx(3e-9), 7e-4)
    seconds = found.seconds
    assert measured_rates(replace(plan, estimate=found)) == SimulatedRates(
        nvme_bytes_per_s=pytest.approx((plan.traffic["nvme->ram"] + plan.traffic["ram->nvme"]) / seconds["nvme"]),
        flops_per_s=pytest.approx(flops_per_token(plan) * 384 / (seconds["compute"] + seconds["host"])),
        update_params_per_s=pytest.approx(1e8),
        bus_bytes_per_s=1e12,
        computing_s_per_nvme_byte=pytest.approx(3e-9),
        seconds_per_nvme_copy=7e-4,
    )
    assert measured_rates(replace(plan, estimate=replace(found, step_s=None))) is None


def test_delays_by_drives_are_weighted_by_their_bytes(
    plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    by_name(monkeypatch)
    drives = {
        "a": drive(1e9, 1e9, 1e9, computing_s_per_byte=8e-9, seconds_per_copy=2e-4),
        "b": drive(1e9, 1e9, 1e9, computing_s_per_byte=4e-9, seconds_per_copy=3e-4),
        "c": drive(1e9, 1e9, 1e9),
    }
    shape = {"paths": [tmp_path / name for name in "abc"], "weights": [1.0, 2.0, 5.0]}
    found = estimate(plan, tmp_path, shape=shape, drives=drives)
    assert found.computing_s_per_nvme_byte == pytest.approx((8e-9 + 2 * 4e-9) / 8)
    assert found.seconds_per_nvme_copy == 3e-4


def test_runs_without_checkpoints_or_updates_have_fewer_occasions(plan: Plan, tmp_path: Path) -> None:
    checkpoint = replace(plan.run.checkpoint, table=plan.run.checkpoint.table.without_saves())
    found = estimate(replace(plan, run=replace(plan.run, checkpoint=checkpoint)), tmp_path).occasions
    assert [each.name for each in found] == ["start", "export"]
    ticks = tuple(tick for tick in plan.program.ticks if tick.phase != "update")
    assert estimate(replace(plan, program=replace(plan.program, ticks=ticks)), tmp_path).occasions == ()


def test_weights_that_stay_in_the_folder_are_not_loaded(plan: Plan, tmp_path: Path) -> None:
    """The files have 1,000 bytes. A part of them is used in place."""
    (tmp_path / "model.safetensors").write_bytes(bytes(1000))
    table = plan.run.model.table.model_copy(update={"train_from_scratch": False})
    run = replace(plan.run, model=replace(plan.run.model, table=table, folder=str(tmp_path)))
    homes = {key: "ram" if key.endswith("layers.0/weight") else "nvme" for key in plan.placement.homes}
    moved = replace(plan, run=run, placement=replace(plan.placement, homes=homes))
    assert estimate(moved, tmp_path).occasions[0].read_bytes == 1000
    budgets = {**plan.budgets_by_tier, "ram": replace(plan.budgets_by_tier["ram"], is_read_only=True)}
    share = 174_080 / (131_072 + 4 * 174_080 + 1024)
    assert estimate(replace(moved, budgets_by_tier=budgets), tmp_path).occasions[0].read_bytes == int(
        1000 * (1 - share)
    )


def test_wear(plan: Plan, tmp_path: Path) -> None:
    written = plan.traffic["ram->nvme"]
    two = {"paths": [tmp_path / "a", tmp_path / "b"], "weights": [1.0, 3.0], "num_steps": 10}
    found = estimate(plan, tmp_path, shape=two)
    assert found.written_bytes == {str(tmp_path / "a"): round(written / 4), str(tmp_path / "b"): round(written * 3 / 4)}
    assert found.run_written_bytes is not None
    run = plan.placement.run_traffic_bytes(10)["ram->nvme"]
    assert sum(found.run_written_bytes.values()) == pytest.approx(run, abs=2)
    assert any("in this run" in line and str(tmp_path / "b") in line for line in estimate_lines(found))
    unknown = estimate(plan, tmp_path)
    assert unknown.run_written_bytes is None
    assert any("in 1,000 steps" in line for line in estimate_lines(unknown))
    assert split(100, shape_of(tmp_path)) == {str(tmp_path): 100}


def test_traffic_of_start_checkpoint_and_export(plan: Plan, tmp_path: Path) -> None:
    homes = {**plan.placement.homes, "model.layers.0/m": "ram", "model.layers.1/weight": "ram"}
    plan = replace(plan, placement=replace(plan.placement, homes=homes))
    durable = [block for block in plan.program.blocks.values() if block.kind in ("weights", "optimizer")]
    on_drives = sum(block.nbytes for block in durable if plan.placement.homes[block.key] == "nvme")
    weights = sum(b.nbytes for b in durable if b.kind == "weights" and plan.placement.homes[b.key] == "nvme")
    in_memory = sum(block.nbytes for block in durable) - on_drives
    exported = plan.graph.num_parameters * plan.graph.dtype.itemsize
    assert 0 < weights < on_drives and in_memory == 2 * 4 * 174_080
    mixed_s = 2 * exported / 1.5e9 + weights / 2e9
    assert estimate(plan, tmp_path).occasions == (
        OutsideTraffic("start", 0, on_drives, 0, pytest.approx(on_drives / 1e9)),  # from scratch
        OutsideTraffic("checkpoint", 0, in_memory, on_drives, pytest.approx(in_memory / 1e9)),
        OutsideTraffic("export", weights + exported, exported, 0, pytest.approx(mixed_s)),
    )
    unknown = estimate(plan, tmp_path, drives={}).occasions
    assert [each.seconds for each in unknown] == [None, None, None]
    budgets = {
        name: replace(budget, is_durable=False, is_addressable=name != "nvme")
        for name, budget in plan.budgets_by_tier.items()
    }
    checkpoint = estimate(replace(plan, budgets_by_tier=budgets), tmp_path).occasions[1]
    written = in_memory + on_drives
    assert (checkpoint.read_bytes, checkpoint.written_bytes) == (on_drives, written)
    assert checkpoint.seconds == pytest.approx(written / 1e9)


def test_paths_on_one_drive_share_it(plan: Plan, tmp_path: Path) -> None:
    one = estimate(plan, tmp_path)
    two = estimate(plan, tmp_path, shape={"paths": [tmp_path / "a", tmp_path / "b"], "weights": [1.0, 1.0]})
    assert two.seconds["nvme"] == pytest.approx(one.seconds["nvme"], rel=1e-6)


def test_the_slowest_of_several_drives_counts(plan: Plan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    drives = {"fast": drive(4e9, 4e9, 4e9), "slow": drive(1e9, 1e9, 1e9)}
    by_name(monkeypatch)
    paths = [tmp_path / "fast", tmp_path / "slow"]
    equal = estimate(plan, tmp_path, shape={"paths": paths, "weights": [1.0, 1.0]}, drives=drives)
    fitting = estimate(plan, tmp_path, shape={"paths": paths, "weights": [4.0, 1.0]}, drives=drives)
    moved = plan.traffic["nvme->ram"] + plan.traffic["ram->nvme"]
    assert equal.seconds["nvme"] == pytest.approx(moved / 2 / 1e9, rel=1e-6)
    assert fitting.seconds["nvme"] == pytest.approx(moved / 5e9, rel=1e-6)


def by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat every folder as a separate drive with the folder's name."""

    def file_system(path: Path) -> file_systems.FileSystem:
        return file_systems.FileSystem("0:0", "ext4", os.path.basename(path), "/")

    monkeypatch.setattr(file_systems.FileSystem, "key", property(lambda self: self.source))
    for module in (this_machine, profiles):
        monkeypatch.setattr(module, "file_system_of", file_system)


def rates_of(config: RunConfig) -> tuple[float, ...]:
    return resolve(config).tiers.rates


def test_measured_rates_stripe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    by_name(monkeypatch)
    config = load_config(config_at(tmp_path, nvme=2)).config
    assert rates_of(config) == (1.0, 1.0)
    known = {"drive0": drive(9e9, 9e9, 3e9), "drive1": drive(9e9, 9e9, 1e9)}
    store_profile(make_machine(tmp_path, drives={"drive0": known["drive0"]}))
    assert rates_of(config) == (1.0, 1.0)  # one measured and one unknown drive cannot be compared
    store_profile(make_machine(tmp_path, drives=known))
    assert rates_of(config) == (3e9, 1e9)
    given = load_config(tmp_path / "run.toml", (), ["tiers.nvme.0.rate=1GB/s", "tiers.nvme.1.rate=2GB/s"]).config
    assert rates_of(given) == (1e9, 2e9)


def test_plan_reports_the_estimate(tmp_path: Path) -> None:
    """The planner reads the profile file. The test makes plans without the file, with it, and with a damaged file."""
    path = config_at(tmp_path, nvme=2, ram="6MiB")
    before = plan_run(resolve(load_config(path).config)).estimate
    assert before is not None
    assert any("doctor" in line for line in estimate_lines(before))
    assert any("equally fast" in line for line in estimate_lines(before))
    stored = store_profile(make_machine(tmp_path))
    planned = plan_run(resolve(load_config(path).config))
    assert planned.estimate is not None
    assert planned.estimate.step_s is not None
    assert planned.estimate.tokens_per_step == 384
    assert not any("equally fast" in line for line in estimate_lines(planned.estimate))
    stored.write_text("{")
    damaged = plan_run(resolve(load_config(path).config)).estimate
    assert damaged is not None
    assert damaged.step_s is None
    assert any(str(stored) in line for line in estimate_lines(damaged))
    assert planned.budgets["nvme"] == 512 * MiB
