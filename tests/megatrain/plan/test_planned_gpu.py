"""A plan for the GPU of another machine counts the GPU's operations, not the planning CPU's."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch

from megatrain.base.errors import UnsupportedModelError
from megatrain.config import load_config
from megatrain.converters import documents
from megatrain.engine.device.attention import AttentionCall
from megatrain.engine.device.flash import FlashKernels
from megatrain.engine.unit import weight_gradients
from megatrain.engine.unit.weight_gradients import GradientAccumulator
from megatrain.machine.planned_machine import find_machine
from megatrain.machine.this_machine import THIS_MACHINE
from megatrain.plan import traced
from megatrain.plan.flops import flops_per_token, work_of_phases
from megatrain.plan.plan import Plan
from megatrain.plan.planner import plan_run
from megatrain.trace.trace import trace_visits
from megatrain.training.resolve import resolve
from oracles.tiered_run import EXAMPLES

NUM_LAYERS, ROWS, LENGTH = 5, 2, 256


def planned(
    folder: Path,
    machine: str,
    like: Plan | None = None,
    *,
    rows: int = ROWS,
    model_table: str = "",
    more: str = "",
    **values: object,
) -> Plan:
    """Plan packed rows for SmolLM3-3B's first layers. ``machine`` is a machine's name, or "" for this machine's GPU."""
    model, path = folder / "model", folder / "run.toml"
    config = json.loads((EXAMPLES / "models" / "SmolLM3-3B" / "config.json").read_text())
    config |= {"num_hidden_layers": NUM_LAYERS, **values}
    config["no_rope_layers"] = config["no_rope_layers"][:NUM_LAYERS]
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(config))
    path.write_text(
        f'task = "pretrain"\noutput_dir = "{folder / "out"}"\n'
        f'[model]\nmodel_name_or_path = "{model}"\ntrain_from_scratch = true\n{model_table}'
        '[precision]\ncompute_dtype = "bfloat16"\n'
        f'[data]\nmax_length = {LENGTH}\npacking = true\n[[data.train]]\npath = "text.txt"\n'
        f"[training]\nper_device_train_batch_size = {rows}\n{more}"
    )
    return plan_run(resolve(load_config(path).config, find_machine(machine) if machine else THIS_MACHINE), like=like)


def test_cpu_only_work_is_not_counted(tmp_path: Path) -> None:
    """Each weight gradient takes one launch, attention one for all documents, and cross entropy one kernel."""
    on_cpu, products = planned(tmp_path, "cpu-server-512gb"), 0
    add = GradientAccumulator._add_matmul

    def counted(self: GradientAccumulator, *args: Any, **options: Any) -> None:
        nonlocal products
        products += 1
        add(self, *args, **options)

    def fail_on_cpu_work(*args: Any) -> None:
        raise AssertionError("as the CPU does it")

    with (
        mock.patch.object(GradientAccumulator, "_add_matmul", counted),
        mock.patch.object(weight_gradients, "_multiply_chunked", fail_on_cpu_work),
        mock.patch.object(documents, "_attend_documents", fail_on_cpu_work),
    ):
        on_gpu = planned(tmp_path, "h200-1.5tb")
    assert on_gpu.trace.exact and not on_gpu.trace.uncounted_ops
    here, there = work_of_phases(on_cpu), work_of_phases(on_gpu)
    for phase, work in there.items():
        assert work.product_flops == here[phase].product_flops, phase
        assert here[phase].moved_nbytes / 10 < work.moved_nbytes < here[phase].moved_nbytes / 2, phase
    # A plan that reuses another plan's model does not count operations that only the other plan's device needs.
    assert work_of_phases(planned(tmp_path, "cpu-server-512gb", like=on_gpu)) == here
    assert planned(tmp_path, "rtx4090-128gb", like=on_gpu).trace is on_gpu.trace
    num_parts = on_gpu.trace.head_parts
    assert products == 7 * NUM_LAYERS + 2  # including the head's
    # For each vocabulary part: its logits twice, the gradients of the weight and the rows, and the sum for the rows.
    assert num_parts == 16 and 5 * num_parts <= there["head"].launches <= 6 * num_parts + 20


def test_trace_is_reused_only_for_the_same_micro_batch_shape(tmp_path: Path) -> None:
    like, alone = planned(tmp_path, "h200-1.5tb"), planned(tmp_path, "h200-1.5tb", rows=2 * ROWS)
    plan = planned(tmp_path, "h200-1.5tb", rows=2 * ROWS, like=like)
    assert plan.graph is like.graph and plan.trace == alone.trace != like.trace
    assert plan.totals == alone.totals and plan.estimate == alone.estimate


def test_a_trace_of_padded_rows_is_not_reused_for_rows_without_padding(tmp_path: Path) -> None:
    packed = planned(tmp_path, "cpu-server-512gb")
    alone, reused = plan_run(packed.run, padded=False), plan_run(packed.run, padded=False, like=packed)
    assert reused.graph is packed.graph and reused.trace == alone.trace != packed.trace


def test_the_workspace_of_flash_attention_is_counted(tmp_path: Path) -> None:
    """The trace uses fake CPU tensors, but counts the workspace of the GPU kernels that the plan chooses."""
    table, count = 'use_liger_kernel = false\nflash_attention = "{}"\n', AttentionCall.workspace_nbytes
    counted: list[tuple[str, bool, int]] = []

    def noted(call: AttentionCall, device: torch.device, *, flash: FlashKernels, **options: bool) -> int:
        nbytes = count(call, device, flash=flash, **options)
        counted.append((flash, call.is_backward, nbytes))
        return nbytes

    with (
        mock.patch.object(AttentionCall, "workspace_nbytes", noted),
        mock.patch.object(traced, "trace_visits", trace_visits),  # traces of earlier plans are not reused
    ):
        for asked, chosen in (("FA2", "FA2"), ("FA3", "FA3"), ("auto", "FA3")):
            counted.clear()
            plan = planned(tmp_path, "h200-1.5tb", rows=1, model_table=table.format(asked))
            assert (plan.run.flash, plan.traced.flash_note) == (chosen, "")
            backward = {(flash, nbytes) for flash, is_backward, nbytes in counted if is_backward}
            assert {flash for flash, _, _ in counted} == {chosen}
            # At least the fp32 gradients of 16 heads of size 128, and less than five times that.
            least = LENGTH * 16 * 128 * 4
            assert backward and least < min(nbytes for _, nbytes in backward) < 5 * least
    narrow = planned(tmp_path, "h200-1.5tb", rows=1, model_table=table.format("auto"), head_dim=80)
    assert narrow.run.flash == "FA2" and "head widths 80 and 80" in narrow.traced.flash_note
    with pytest.raises(UnsupportedModelError, match="head widths 80 and 80"):
        planned(tmp_path, "h200-1.5tb", rows=1, model_table=table.format("FA3"), head_dim=80)


def test_kernels_of_liger_are_counted_as_they_are(tmp_path: Path) -> None:
    """Liger's kernels read each row once, so norms and MLPs move fewer bytes. Matrix products are the same."""
    pytest.importorskip("liger_kernel")
    plain, fused = (
        planned(tmp_path, "h200-1.5tb", model_table=f"use_liger_kernel = {text}\n") for text in ("false", '"auto"')
    )
    assert (plain.run.uses_liger, fused.run.uses_liger) == (False, True)
    assert fused.trace.exact and not fused.trace.uncounted_ops
    for phase, work in work_of_phases(plain).items():
        other = work_of_phases(fused)[phase]
        assert (other.product_flops, other.attention_flops) == (work.product_flops, work.attention_flops), phase
        if phase != "head":
            assert 0.4 * work.moved_nbytes < other.moved_nbytes < 0.6 * work.moved_nbytes, phase
            assert 0.5 * work.launches < other.launches < 0.8 * work.launches, phase
    layers = [(a, b) for a, b in zip(plain.trace.visits, fused.trace.visits, strict=True) if not a.is_head][1:]
    assert all(0 < with_kernels.memory.backward_nbytes < eager.memory.backward_nbytes for eager, with_kernels in layers)


def test_micro_batches_run_sequentially_if_it_reduces_the_cost(tmp_path: Path) -> None:
    """GPU memory holds weights, gradient sums and one micro-batch's results. The optimizer state is in RAM."""

    def plan(number: int, gpu: int, order: str = "auto", **values: object) -> Plan:
        tiers = f'[tiers.gpu]\nsize = "{gpu}GiB"\n[tiers.ram]\nsize = "20GiB"\n'
        text = f'gradient_accumulation_steps = {number}\n{tiers}[advanced]\nmicro_batch_order = "{order}"\n'
        return planned(tmp_path, "rtx4090-128gb", rows=16, more=text, **values)

    few_words = {"vocab_size": 16_384, "pad_token_id": 0, "bos_token_id": 0, "eos_token_id": 0}
    by_layer, chosen = plan(48, 5, "layer", **few_words), plan(48, 5, **few_words)
    assert chosen.run.batch.order == "micro_batch"
    assert chosen.traffic["ram->gpu"] == 2 * chosen.updates.num_weights(on_gpu=False), (
        "weights in bf16, from their updates"
    )
    assert chosen.estimate is not None and by_layer.estimate is not None
    updates_s, compute_s = (chosen.estimate.seconds[name] for name in ("optimizer", "compute"))
    # Updates overlap only the last micro-batch's forward, which is at most a third of its compute time.
    assert compute_s + updates_s - compute_s / 48 / 3 < chosen.estimate.step_s < by_layer.estimate.step_s
    # A forward is a quarter of a step that recomputes everything.
    assert 0.75 * flops_per_token(by_layer) < flops_per_token(chosen) < flops_per_token(by_layer)
    # The order "layer" is better if the results of two micro-batches fit, or if weights would move for each
    # micro-batch.
    assert [plan(2, 6).run.batch.order, plan(16, 3).run.batch.order] == ["layer", "layer"]


@pytest.mark.gpu
def test_planned_gpu_work_matches_a_real_gpu(tmp_path: Path) -> None:
    here, there = planned(tmp_path, ""), planned(tmp_path, "h200-1.5tb")
    for phase, work in work_of_phases(here).items():
        other = work_of_phases(there)[phase]
        assert other.product_flops == work.product_flops, phase
        assert other.moved_nbytes == pytest.approx(work.moved_nbytes, rel=0.01), phase
        assert other.launches == pytest.approx(work.launches, abs=4), phase
