"""A plan for the GPU of another machine counts what a GPU computes, not what the CPU that plans would."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from megatrain.config import load_config
from megatrain.converters import documents
from megatrain.engine import weight_gradients
from megatrain.engine.weight_gradients import GradientAccumulator
from megatrain.machine.files import find_machine
from megatrain.plan.estimate import work_of_phases
from megatrain.plan.plan import Plan
from megatrain.plan.planner import plan_run
from megatrain.resolve import resolve
from oracles.tiered_run import EXAMPLES

NUM_LAYERS, ROWS, LENGTH = 5, 2, 256


def planned(folder: Path, machine: str, like: Plan | None = None) -> Plan:
    """Plan steps of the first layers of SmolLM3-3B, rows of several documents, for another machine; "": for this one's
    GPU."""
    model, path = folder / "model", folder / "run.toml"
    config = json.loads((EXAMPLES / "models" / "SmolLM3-3B" / "config.json").read_text())
    config["num_hidden_layers"] = NUM_LAYERS
    config["no_rope_layers"] = config["no_rope_layers"][:NUM_LAYERS]
    model.mkdir(exist_ok=True)
    (model / "config.json").write_text(json.dumps(config))
    path.write_text(
        f'task = "pretrain"\noutput_dir = "{folder / "out"}"\n'
        f'[model]\nmodel_name_or_path = "{model}"\ntrain_from_scratch = true\n'
        '[precision]\ncompute_dtype = "bfloat16"\n'
        f'[data]\nmax_length = {LENGTH}\npacking = true\n[[data.train]]\npath = "text.txt"\n'
        f"[training]\nper_device_train_batch_size = {ROWS}\n"
    )
    return plan_run(resolve(load_config(path).config, find_machine(machine) if machine else None), like=like)


def test_nothing_is_counted_that_the_cpu_alone_needs(tmp_path: Path) -> None:
    """The gradient of each weight is one launch, attention one for all documents, cross entropy none but a kernel."""
    on_cpu, products = planned(tmp_path, "cpu-server-512gb"), 0
    add = GradientAccumulator._add

    def counted(self: GradientAccumulator, *args: Any, **options: Any) -> None:
        nonlocal products
        products += 1
        add(self, *args, **options)

    def of_the_cpu(*args: Any) -> None:
        raise AssertionError("as the CPU does it")

    with (
        mock.patch.object(GradientAccumulator, "_add", counted),
        mock.patch.object(weight_gradients, "_multiply_in_ranges", of_the_cpu),
        mock.patch.object(documents, "_each_document", of_the_cpu),
    ):
        on_gpu = planned(tmp_path, "h200-1.5tb")
    assert on_gpu.trace.exact and not on_gpu.trace.uncounted
    here, there = work_of_phases(on_cpu), work_of_phases(on_gpu)
    for phase, work in there.items():
        assert work.product_flops == here[phase].product_flops, phase
        assert work.moved_nbytes < here[phase].moved_nbytes, phase
    # A plan that begins with another one's model does not count what only the other's device does.
    assert work_of_phases(planned(tmp_path, "cpu-server-512gb", like=on_gpu)) == here
    assert planned(tmp_path, "rtx4090-128gb", like=on_gpu).trace is on_gpu.trace
    num_parts = on_gpu.trace.head_parts
    assert products >= 7 * NUM_LAYERS  # and the head's
    # Of each part of the vocabulary: its logits twice, and the gradients of weight, rows and their sum.
    assert num_parts > 1 and there["head"].launches <= 6 * num_parts + 20


@pytest.mark.gpu
def test_it_is_what_is_counted_where_the_gpu_is(tmp_path: Path) -> None:
    here, there = planned(tmp_path, ""), planned(tmp_path, "h200-1.5tb")
    for phase, work in work_of_phases(here).items():
        other = work_of_phases(there)[phase]
        assert other.product_flops == work.product_flops, phase
        assert other.moved_nbytes == pytest.approx(work.moved_nbytes, rel=0.01), phase
        assert other.launches == pytest.approx(work.launches, abs=4), phase
