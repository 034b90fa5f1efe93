"""Choices that a plan makes from the traced model: optimizer, kernels, frozen blocks and the longest rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from megatrain.base.errors import UnsupportedModelError
from megatrain.config import ConfigError, load_config
from megatrain.converters.fused import find_fused
from megatrain.machine.planned_machine import find_machine
from megatrain.optim.muon import Muon
from megatrain.plan.plan import TracedModel
from megatrain.plan.run_spec import RunSpec
from megatrain.plan.traced import check_flash, choose_flash, trace_model
from megatrain.training.resolve import resolve
from oracles.families import tiny_config

MakeRun = Callable[..., RunSpec]


@pytest.fixture
def make_run(tmp_path: Path) -> MakeRun:
    """Return a function that resolves a config for a tiny GPT-2, with random weights and the given changes."""
    tiny_config("gpt2").save_pretrained(tmp_path / "model")

    def make_run(*changes: str, length: int = 16) -> RunSpec:
        (tmp_path / "run.toml").write_text(
            f'task = "pretrain"\noutput_dir = "out"\ndevice = "cpu"\n[model]\nmodel_name_or_path = "model"\n'
            f'train_from_scratch = true\n[data]\nmax_length = {length}\n[[data.train]]\npath = "x.txt"\n'
        )
        return resolve(load_config(tmp_path / "run.toml", (), changes).config)

    return make_run


def traced(run: RunSpec) -> TracedModel:
    return trace_model(run, None, None)


def test_muon_splits_the_fused_matrices_of_the_model(make_run: MakeRun) -> None:
    """The embeddings, one of which is also the head, are updated by AdamW."""
    model = traced(make_run("optimizer.optim=muon"))
    fused = {f"transformer.h.{layer}.attn.c_attn.weight" for layer in range(3)}
    assert isinstance(model.optimizer, Muon)
    assert model.optimizer.fused == find_fused(model.graph)[0] and set(model.optimizer.fused) == fused
    entries = [entry for layout in model.graph.layouts.values() for entry in layout.entries]
    others = {entry.name for entry in entries if len(entry.shape) == 2 and not model.optimizer.has_matrices(entry)}
    assert others == {"transformer.wte.weight", "transformer.wpe.weight"}
    whole = traced(make_run("optimizer.optim=muon", "optimizer.muon_fused=whole")).optimizer
    assert isinstance(whole, Muon) and not whole.fused


def test_rows_longer_than_the_learned_positions_are_refused(make_run: MakeRun) -> None:
    assert traced(make_run(length=64)).trace.exact
    with pytest.raises(ConfigError) as refused:
        traced(make_run(length=65))
    problem = "data.max_length = 65, but this model has 64 positions. Write at most 64"
    assert str(refused.value).splitlines()[1:] == [f"  {problem}"]


@pytest.mark.parametrize(
    ("changes", "padded"),
    [
        (("training.per_device_train_batch_size=1", "data.packing=false"), False),
        (("training.per_device_train_batch_size=2", "data.packing=false"), True),
    ],
)
def test_rows_of_several_documents_may_have_padding(changes: tuple[str, ...], padded: bool, make_run: MakeRun) -> None:
    run = make_run(*changes)
    model = traced(run)
    assert (model.padded, model.compute_tier, model.device_optimizer, model.host_updates) == (padded, "ram", None, "")
    assert trace_model(run, not padded, None).padded != padded
    assert (dict(model.in_place), dict(model.encodings), model.flash_note) == ({}, {}, "")
    assert (model.run.flash, model.run.uses_liger) == ("FA2", False)


def test_a_similar_plan_lends_its_graph_and_its_trace(make_run: MakeRun) -> None:
    """The trace is for rows of the same number and length."""
    like = traced(make_run("training.per_device_train_batch_size=2"))
    shorter = make_run("training.per_device_train_batch_size=2", length=8)
    other = trace_model(shorter, None, like)
    assert other.graph is like.graph and other.trace != like.trace
    again = trace_model(make_run("training.per_device_train_batch_size=2", "optimizer.optim=lion"), None, like)
    assert again.graph is like.graph and again.trace is like.trace


def test_flash_kernels_are_chosen_for_the_planned_gpu(make_run: MakeRun) -> None:
    run, cuda = make_run(), torch.device("cuda")
    note = "model.flash_attention: FA2, torch's own kernels: "
    assert choose_flash(run) == ("FA2", "")

    def on(machine: str, **choices: object) -> RunSpec:
        changed = replace(run, device=cuda, tiers=replace(run.tiers, machine=find_machine(machine)))
        return changed.with_kernels(**choices)

    assert choose_flash(on("h200-1.5tb")) == ("FA3", "")
    assert choose_flash(on("rtx4090-128gb")) == ("FA2", f"{note}FA3 and FA4 have no kernels for this GPU")
    compiled = on("h200-1.5tb", compile=True, compile_backend="eager")
    assert choose_flash(compiled) == ("FA2", f"{note}model.compile makes its own graphs")
    check_flash(on("h200-1.5tb", flash_attention="FA3"))
    for wrong, kernels, reason in (
        (run.with_kernels(flash_attention="FA3"), "FA3", "it needs a GPU"),
        (
            on("h200-1.5tb", flash_attention="FA4"),
            "FA4",
            "FA4 needs a GPU of the architecture Blackwell (B200, B300, GB200, GB300)",
        ),
    ):
        with pytest.raises(UnsupportedModelError) as refused:
            check_flash(wrong)
        remedy = f'A new run can set flash_attention = "FA2"; a run that began with {kernels} keeps it'
        text = f'model.flash_attention = "{kernels}" is not supported: {reason}'
        assert str(refused.value) == f"{text}. {remedy}"
