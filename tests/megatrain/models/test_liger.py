"""`model.use_liger_kernel`: what is asked of the package, what it may not change, what is said where it is missing."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import MethodType, ModuleType

import pytest
import torch
from transformers import AutoModelForCausalLM
from transformers.models.llama import modeling_llama

from megatrain.engine.runner import LayerRunner
from megatrain.engine.tiled import TiledForward, tile_mlps
from megatrain.models.graph import UnsupportedModelError, build_graph
from megatrain.models.liger import apply_liger_kernels, check_liger_kernels
from reference.families import tiny_config
from reference.memory_access import MemoryAccess

STAND_IN = Path(__file__).parents[2] / "reference" / "stand_in_liger" / "liger_kernel"
CUDA = torch.device("cuda")


@pytest.fixture
def liger(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    _forget()
    package = ModuleType("liger_kernel")  # on sys.path a folder without __init__.py would give way to the real package
    package.__path__ = [str(STAND_IN)]
    monkeypatch.setitem(sys.modules, "liger_kernel", package)
    yield
    _forget()


def _forget() -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "liger_kernel"]:
        del sys.modules[name]


def test_modules_of_the_model_change_and_nothing_else(liger: None) -> None:
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
        runner = LayerRunner(one, access, device="cpu", compute_dtype=torch.float32)
        losses.append(runner.forward_backward([{"input_ids": ids, "labels": ids}]).loss)
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def test_mlps_that_run_in_pieces_stay_so(liger: None) -> None:
    graph = build_graph(tiny_config("llama"))
    tile_mlps(graph, 4)
    apply_liger_kernels(graph.model, with_mlps=False)
    layer = next(unit.module for unit in graph.units if unit.is_layer)
    assert isinstance(layer.mlp.forward, TiledForward)
    assert "_norm" in repr(layer.input_layernorm.forward)


def test_a_model_without_kernels_is_refused(liger: None) -> None:
    with pytest.raises(UnsupportedModelError, match=r"no kernels for gpt2\. Write use_liger_kernel = false"):
        check_liger_kernels(build_graph(tiny_config("gpt2")).model, CUDA)


def test_layers_that_liger_does_not_know_are_refused(liger: None) -> None:
    graph = build_graph(tiny_config("llama"))
    before = dict(vars(modeling_llama))
    del graph.model.model.layers[1].input_layernorm
    with pytest.raises(UnsupportedModelError, match=r"does not fit LlamaForCausalLM \(AttributeError.*input_layernorm"):
        apply_liger_kernels(graph.model, with_mlps=True)
    assert dict(vars(modeling_llama)) == before


def test_a_cpu_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="need a GPU"):
        check_liger_kernels(build_graph(tiny_config("llama")).model, torch.device("cpu"))


@pytest.mark.skipif(importlib.util.find_spec("liger_kernel") is not None, reason="it is installed")
def test_a_missing_package_is_named() -> None:
    with pytest.raises(UnsupportedModelError, match=r"liger-kernel cannot be used here .*pip install liger-kernel"):
        check_liger_kernels(build_graph(tiny_config("llama")).model, CUDA)
