"""`model.use_liger_kernel`: what is asked of the package, what it may not change, what is said where it is missing."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import MethodType

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.llama import modeling_llama

from fakes.liger_packages import stand_in_liger
from megatrain.base.errors import UnsupportedModelError
from megatrain.config import problems
from megatrain.converters.liger import apply_liger_kernels, check_liger_kernels
from megatrain.converters.spec import build_graph
from megatrain.converters.tiled import TiledForward, tile_mlps
from megatrain.plan import planner
from oracles.families import tiny_config
from oracles.memory_access import MemoryAccess
from oracles.runners import layer_runner
from oracles.tiered_run import config_text, run_config, write_tiny_model

CUDA = torch.device("cuda")


@pytest.fixture
def liger() -> Iterator[None]:
    with stand_in_liger():
        yield


@pytest.mark.usefixtures("liger")
def test_modules_of_the_model_change_and_nothing_else() -> None:
    graph = build_graph(tiny_config("llama"))
    before = dict(vars(modeling_llama))
    check_liger_kernels(graph.model, CUDA)
    apply_liger_kernels(graph.model, with_mlps=True)
    assert dict(vars(modeling_llama)) == before  # models that are built later are as they were
    assert "forward" not in graph.model.__dict__  # the head computes the loss
    layer = next(unit.module for unit in graph.units if unit.is_layer)
    assert isinstance(layer.input_layernorm.forward, MethodType) and "_norm" in repr(layer.input_layernorm.forward)

    torch.manual_seed(0)
    parameters = dict(AutoModelForCausalLM.from_config(tiny_config("llama"), dtype=torch.float32).named_parameters())
    ids = torch.randint(3, 90, (2, 16))
    losses = []
    for one in (graph, build_graph(tiny_config("llama"))):
        access = MemoryAccess(one, parameters, torch.float32)
        runner = layer_runner(one, access, device="cpu")
        losses.append(runner.forward_backward([{"input_ids": ids, "labels": ids}]).loss)
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


@pytest.mark.usefixtures("liger")
def test_mlps_that_run_in_pieces_stay_so() -> None:
    graph = build_graph(tiny_config("llama"))
    tile_mlps(graph, 4)
    apply_liger_kernels(graph.model, with_mlps=False)
    layer = next(unit.module for unit in graph.units if unit.is_layer)
    assert isinstance(layer.mlp.forward, TiledForward)
    assert "_norm" in repr(layer.input_layernorm.forward)


@pytest.mark.usefixtures("liger")
def test_a_model_without_kernels_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match=r"no kernels for gpt2\. Write use_liger_kernel = false"):
        check_liger_kernels(build_graph(tiny_config("gpt2")).model, CUDA)


@pytest.mark.usefixtures("liger")
def test_layers_that_liger_does_not_know_are_refused() -> None:
    graph = build_graph(tiny_config("llama"))
    before = dict(vars(modeling_llama))
    del graph.model.model.layers[1].input_layernorm
    with pytest.raises(UnsupportedModelError, match=r"does not fit LlamaForCausalLM \(AttributeError.*input_layernorm"):
        apply_liger_kernels(graph.model, with_mlps=True)
    assert dict(vars(modeling_llama)) == before


def test_a_cpu_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="need a GPU"):
        check_liger_kernels(build_graph(tiny_config("llama")).model, torch.device("cpu"))


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "liger_kernel"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    with pytest.raises(UnsupportedModelError, match=r"liger-kernel cannot be used here .*pip install liger-kernel"):
        check_liger_kernels(build_graph(tiny_config("llama")).model, CUDA)


PLACEMENTS = {
    "RAM": {"nvme": 0},
    "NVMe": {"placement": 'weights = ["nvme"]\noptimizer = ["nvme"]\nactivations = ["nvme"]'},
    "GPU": {"nvme": 0, "gpu": "6MiB"},
}


@pytest.mark.usefixtures("liger")
def test_a_run_uses_it_with_the_head_of_ours_and_placement_changes_no_bit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whole logits would read the head's weight once for every few rows of them."""
    monkeypatch.setattr(problems, "_check_kernels", lambda config: iter(()))
    monkeypatch.setattr(planner, "check_liger_kernels", lambda model, device: check_liger_kernels(model, CUDA))
    model = write_tiny_model(tmp_path / "model")
    plain = run_config(config_text(tmp_path / "plain", model, nvme=0), tmp_path / "plain", num_steps=2)
    runs = []
    for name, tables in PLACEMENTS.items():
        text = config_text(tmp_path / name, model, **tables)  # type: ignore[arg-type]
        text = text.replace("[data]", "use_liger_kernel = true\n[data]", 1)
        runs.append(run_config(text, tmp_path / name, num_steps=2))
        runs[-1].assert_as_planned()
        runs[-1].assert_same(runs[0])
    assert runs[0].losses == pytest.approx(plain.losses, rel=1e-5)
    trace, of_plain = runs[0].plan.trace, plain.plan.trace
    assert (trace.head_columns, trace.head_rows) == (of_plain.head_columns, of_plain.head_rows) and trace.head_columns
