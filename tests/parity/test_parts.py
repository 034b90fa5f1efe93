"""Optimizer state and gradients of a large layout have one block per part. This does not change a run's results."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from megatrain.base import layout as layouts
from megatrain.base.layout import PART_ALIGNMENT_ELEMENTS
from megatrain.config import load_config
from megatrain.engine.head import head_plan
from megatrain.engine.program.block_keys import key_kind
from megatrain.engine.program.block_plan import DURABLE_KINDS
from megatrain.engine.program.builder import ProgramBuilder
from megatrain.models.graph import ModelGraph
from megatrain.plan import attempts
from megatrain.plan.planner import plan_run
from megatrain.plan.shortfall import DoesNotFitError
from megatrain.training.export import export_checkpoint
from megatrain.training.resolve import resolve
from megatrain.training.trainer import Trainer
from oracles.tiered_run import ALL_NVME, TieredRun, config_text, run_config
from tiered.durable.manifest import current_generation, read_manifest

BF16 = 'compute_dtype = "bfloat16"'
PLACEMENTS: dict[str, dict[str, Any]] = {
    "in RAM": {"nvme": 0},
    "on NVMe": {"placement": ALL_NVME, "ram": "7MiB"},
    "state on two drives": {"placement": 'optimizer = ["nvme"]', "nvme": 2},
    "on NVMe, one micro-batch at a time": {
        "placement": ALL_NVME,
        "ram": "7MiB",
        "advanced": 'micro_batch_order = "micro_batch"',
    },
    "partly on a GPU": {"gpu": "9MiB", "ram": "7MiB"},
    "all on a GPU": {"gpu": "64MiB", "ram": "3MiB", "nvme": 0},
}


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Cut every layer of the tiny model into parts, and lease parts one by one even if this saves little memory."""
    monkeypatch.setattr(layouts, "PART_ELEMENTS", PART_ALIGNMENT_ELEMENTS)
    monkeypatch.setattr(attempts, "spared_bytes", lambda *_: 1 << 40)


@pytest.mark.slow
def test_vocabulary_leased_by_part_is_bit_identical(tiny_model: Path, tmp_path: Path, small_parts: None) -> None:
    """If any block moves, the head and the embedding lease one part of their weight and gradient at a time."""
    runs: dict[str, TieredRun] = {}
    for name in ("in RAM", "on NVMe", "on NVMe, one micro-batch at a time", "partly on a GPU"):
        folder = tmp_path / name.replace(" ", "_")
        runs[name] = run_config(config_text(folder, tiny_model, **PLACEMENTS[name]), folder, num_steps=3)
    held = runs.pop("in RAM")
    assert held.plan.trace.head_parts > 1 and not held.plan.program.cuts.passing
    for run in runs.values():
        visits = [run.plan.trace.visits[visit].is_head for visit, _ in sorted(run.plan.program.cuts.passing)]
        assert visits == [False, True]
        for tick in run.plan.program.ticks:
            for group in (tick.held, *tick.passing):
                kinds = [key_kind(key) for key, _ in group if key.startswith("model.embed_tokens/")]
                assert kinds.count("weight") <= 1 and kinds.count("grad") <= 2  # two, for the tied head and embedding
        run.assert_same(held)
        run.assert_as_planned()


@pytest.fixture(scope="module")
def runs_without_parts(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, TieredRun]:
    """Return runs with uncut layouts but the vocabulary parts of cut layouts, because these parts affect rounding."""

    def boundaries(graph: ModelGraph, name: str) -> tuple[int, ...]:
        alone = [layout for layout in graph.layouts.values() if [entry.name for entry in layout.entries] == [name]]
        (layout,) = (replace(each, parts=layouts._parts(each, PART_ALIGNMENT_ELEMENTS)) for each in alone)
        return layout.first_rows[1:]

    runs: dict[str, TieredRun] = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(head_plan, "_boundaries", boundaries)
        for name, options in RUNS.items():
            folder = tmp_path_factory.mktemp("whole")
            runs[name] = run_config(config_text(folder, tiny_model, nvme=0, **options), folder, num_steps=4)
            assert runs[name].plan.trace.head_parts == 2
    return runs


RUNS: dict[str, dict[str, str]] = {
    "float32": {"precision": 'compute_dtype = "float32"'},
    "bfloat16": {"precision": 'compute_dtype = "bfloat16"'},
    "bfloat16 with its gradients": {"precision": 'compute_dtype = "bfloat16"\ngrad_dtype = "bfloat16"'},
}


CASES = (
    ("bfloat16", "on NVMe, one micro-batch at a time"),
    ("float32", "all on a GPU"),
    ("bfloat16 with its gradients", "partly on a GPU"),
)


@pytest.mark.slow  # tests/pairs covers parts
@pytest.mark.parametrize(("name", "placement"), CASES)
def test_parts_are_bit_identical_and_move_as_planned(
    name: str,
    placement: str,
    runs_without_parts: dict[str, TieredRun],
    tiny_model: Path,
    tmp_path: Path,
    small_parts: None,
) -> None:
    options = {"nvme": 1, **RUNS[name], **PLACEMENTS[placement]}
    run = run_config(config_text(tmp_path, tiny_model, **options), tmp_path, num_steps=4)
    whole = runs_without_parts[name]
    program = run.plan.program
    assert not whole.plan.program.cuts.parts
    cut = [layout for layout in run.plan.graph.layouts.values() if layout.num_elements > PART_ALIGNMENT_ELEMENTS]
    assert len(cut) == 5 and {layout.name for layout in cut} == program.cuts.parts.keys()
    assert run.losses == whole.losses and run.grad_norms == whole.grad_norms
    assert run.weights.keys() == whole.weights.keys()
    assert all(torch.equal(run.weights[key], whole.weights[key]) for key in whole.weights)
    assert program.cuts.weights == {"model.embed_tokens"}
    weights = {key for key in whole.digests if key.endswith("/weight")} - {"model.embed_tokens/weight"}
    assert {key for key in run.digests if key.endswith("/weight")} == weights
    assert all(run.digests[key] == whole.digests[key] for key in weights)
    run.assert_as_planned()


def test_an_update_leases_a_part_at_a_time(tiny_model: Path, tmp_path: Path, small_parts: None) -> None:
    (tmp_path / "run.toml").write_text(
        config_text(tmp_path, tiny_model, placement=ALL_NVME, ram="7MiB", precision=BF16)
    )
    plan = plan_run(resolve(load_config(tmp_path / "run.toml").config))
    for tick in plan.updates.ticks:
        weight = next(key for key, _ in tick.uses if key_kind(key) == "weight")
        layout = plan.graph.layouts[weight.rpartition("/")[0]]
        is_cut = layout.name in plan.program.cuts.weights
        assert [key_kind(key) for key, _ in tick.held[:1]] == ([] if is_cut else ["weight"])
        groups = tick.passing or (tick.held[1:],)
        assert len(groups) == len(layout.parts)
        for group, part in zip(groups, layout.parts, strict=True):
            assert [key_kind(key) for key, _ in group] == ["weight"] * is_cut + ["low", "m", "v", "grad"]
            assert {plan.program.blocks[key].num_elements for key, _ in group} == {len(part)}


def test_adafactor_layouts_are_not_cut_into_parts(tiny_model: Path, tmp_path: Path, small_parts: None) -> None:
    (tmp_path / "run.toml").write_text(config_text(tmp_path, tiny_model, nvme=0, optimizer='optim = "adafactor"'))
    plan = plan_run(resolve(load_config(tmp_path / "run.toml").config))
    assert not plan.program.cuts.parts and all(not tick.passing for tick in plan.updates.ticks)


@pytest.mark.slow
def test_checkpoint_in_parts_resumes_in_ram_and_exports(tiny_model: Path, tmp_path: Path, small_parts: None) -> None:
    """A run saved from drives, continued in RAM and exported is bit-identical to an uninterrupted run."""

    def keys_of(out: Path) -> set[str]:
        return {record.key for record in read_manifest(out / "checkpoints").blocks}

    def train(steps: int, name: str, **options: Any) -> Path:
        text = config_text(tmp_path / name, tiny_model, precision=BF16, **options)
        (tmp_path / name).mkdir(exist_ok=True)
        (tmp_path / name / "run.toml").write_text(
            text.replace("[optimizer]", f"max_steps = {steps}\n[optimizer]") + '\n[export]\ndtype = "float32"\n'
        )
        config = load_config(tmp_path / name / "run.toml").config
        Trainer(config, plan=plan_run(resolve(config))).train()
        return tmp_path / name / "out"

    straight = train(4, "straight", nvme=0)
    train(2, "stopped", placement=ALL_NVME, ram="7MiB", nvme=2)
    # A version with whole weights can also continue the run. A checkpoint does not depend on how weights are cut.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ProgramBuilder, "_can_use_parts", lambda *_: False)
        stopped = train(3, "stopped", nvme=0)
        assert "model.embed_tokens/weight" in keys_of(stopped)
    stopped = train(4, "stopped", nvme=0)
    assert "model.embed_tokens/weight.1" in keys_of(stopped)
    assert any(key.endswith("/low.1") for key in keys_of(stopped))
    assert current_generation(stopped / "checkpoints") is not None
    exported = export_checkpoint(stopped, tmp_path / "exported")
    whole = (straight / "final/model.safetensors").read_bytes()
    assert (stopped / "final/model.safetensors").read_bytes() == whole
    assert (exported / "model.safetensors").read_bytes() == whole
    losses = [
        [json.loads(line)["loss"] for line in (out / "metrics.jsonl").read_text().splitlines() if '"loss"' in line]
        for out in (straight, stopped)
    ]
    assert losses[0] == losses[1]


def test_minimum_ram_scales_with_parts_not_layouts(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def update_bytes(part_elements: int) -> int:
        monkeypatch.setattr(layouts, "PART_ELEMENTS", part_elements)
        (tmp_path / "run.toml").write_text(
            config_text(tmp_path, tiny_model, placement=ALL_NVME, ram="2MiB", precision=BF16)
        )
        with pytest.raises(DoesNotFitError):
            plan_run(resolve(load_config(tmp_path / "run.toml").config))
        (tmp_path / "run.toml").write_text(config_text(tmp_path, tiny_model, placement=ALL_NVME, precision=BF16))
        plan = plan_run(resolve(load_config(tmp_path / "run.toml").config))
        blocks = plan.program.blocks
        return max(
            sum(blocks[key].nbytes for key, _ in tick.held)
            + max((sum(blocks[key].nbytes for key, _ in group) for group in tick.passing), default=0)
            for tick in plan.updates.ticks
        )

    whole, parted = update_bytes(16 << 20), update_bytes(PART_ALIGNMENT_ELEMENTS)
    largest = whole // 16
    assert parted == 2 * largest + 14 * PART_ALIGNMENT_ELEMENTS < whole // 2


def test_blocks_in_parts_have_the_durable_kinds(tiny_model: Path, tmp_path: Path, small_parts: None) -> None:
    (tmp_path / "run.toml").write_text(config_text(tmp_path, tiny_model, nvme=0, precision=BF16))
    program = plan_run(resolve(load_config(tmp_path / "run.toml").config)).program
    durable = {key_kind(block.key) for block in program.blocks.values() if block.kind in DURABLE_KINDS}
    assert durable == {"weight", "low", "m", "v"}
