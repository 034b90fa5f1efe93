"""`model.use_liger_kernel`: which modules it replaces, when a run uses it, and errors if the package is missing."""

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
from megatrain.checkpoint.resume import ConfigChangedError
from megatrain.checkpoint.state import DecidedSettings
from megatrain.config import combinations
from megatrain.config.resolved import changes_from, config_from_toml, to_toml
from megatrain.converters import liger as liger_kernels
from megatrain.converters.liger import apply_liger_kernels, check_liger_kernels
from megatrain.converters.spec import build_graph
from megatrain.converters.tiled import TiledForward, tile_mlps
from megatrain.machine.planned_machine import find_machine
from megatrain.plan import traced
from megatrain.plan.planner import plan_run
from megatrain.plan.run_spec import RunSpec
from megatrain.training.resolve import resolve
from megatrain.training.trainer import Trainer
from oracles.families import tiny_config
from oracles.memory_access import MemoryAccess
from oracles.runners import layer_runner
from oracles.tiered_run import EXAMPLES, config_text, run_config, write_tiny_model

CUDA = torch.device("cuda")


@pytest.fixture
def liger() -> Iterator[None]:
    with stand_in_liger():
        yield


@pytest.mark.usefixtures("liger")
def test_only_modules_of_the_model_are_replaced() -> None:
    graph = build_graph(tiny_config("llama"))
    before = dict(vars(modeling_llama))
    check_liger_kernels(graph.model, CUDA)
    apply_liger_kernels(graph.model, include_mlps=True)
    assert dict(vars(modeling_llama)) == before  # models that are built later are unchanged
    assert "forward" not in graph.model.__dict__  # this project's head computes the loss
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
def test_tiled_mlps_keep_their_forward() -> None:
    graph = build_graph(tiny_config("llama"))
    tile_mlps(graph, 4)
    apply_liger_kernels(graph.model, include_mlps=False)
    layer = next(unit.module for unit in graph.units if unit.is_layer)
    assert isinstance(layer.mlp.forward, TiledForward)
    assert "_norm" in repr(layer.input_layernorm.forward)


@pytest.mark.parametrize("include_mlps", [False, True])
def test_mlp_kernels_are_disabled_unless_included(include_mlps: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    used: list[dict[str, bool]] = []

    def apply(model: object, rope: bool = True, rms_norm: bool = True, swiglu: bool = True, geglu: bool = True) -> None:
        used.append({"rope": rope, "rms_norm": rms_norm, "swiglu": swiglu, "geglu": geglu})

    monkeypatch.setattr(liger_kernels, "_find_function", lambda model: apply)
    apply_liger_kernels(build_graph(tiny_config("llama")).model, include_mlps=include_mlps)
    assert used == [{"rope": False, "rms_norm": True, "swiglu": include_mlps, "geglu": include_mlps}]


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
        apply_liger_kernels(graph.model, include_mlps=True)
    assert dict(vars(modeling_llama)) == before


def test_a_cpu_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="need a GPU"):
        check_liger_kernels(build_graph(tiny_config("llama")).model, torch.device("cpu"))


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.partition(".")[0] == "liger_kernel"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    with pytest.raises(UnsupportedModelError, match=r'liger-kernel cannot be used here .*pip install -e "\.\[gpu\]"'):
        check_liger_kernels(build_graph(tiny_config("llama")).model, CUDA)


def run_for(device: str, table: str = "") -> RunSpec:
    """Return a run of the model with 0.82 M parameters, resolved for a GPU or CPU machine."""
    machine = find_machine("h200-1.5tb" if device == "cuda" else "cpu-server-512gb")
    text = config_text(Path("folder"), EXAMPLES / "quickstart" / "model", nvme=0).replace('device = "cpu"', "")
    config = config_from_toml(text.replace("[data]", f"train_from_scratch = true\n{table}\n[data]", 1))
    return resolve(config, machine)


def test_kernel_choice_depends_on_device_and_installed_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU never uses these kernels. With ``true`` or ``false`` in the config, the plan has no choice."""
    is_installed = True
    monkeypatch.setattr(traced, "has_liger_kernels", lambda: is_installed)
    assert traced.can_use_liger_kernels(run_for("cuda"))
    assert not traced.can_use_liger_kernels(run_for("cpu"))
    assert not traced.can_use_liger_kernels(run_for("cuda", "compile = true"))
    for choice in (True, False):
        assert run_for("cuda", f"use_liger_kernel = {str(choice).lower()}").uses_liger is choice
    is_installed = False
    assert not traced.can_use_liger_kernels(run_for("cuda"))


@pytest.mark.usefixtures("liger")
def test_a_model_without_kernels_is_planned_without_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """With the default ``"auto"``, the plan leaves the kernels out. With ``true``, the model is refused."""
    monkeypatch.setattr(traced, "has_liger_kernels", lambda: True)
    assert plan_run(run_for("cuda")).run.uses_liger
    assert not plan_run(run_for("cpu")).run.uses_liger
    monkeypatch.setattr(liger_kernels, "_find_function", refuse)
    assert not plan_run(run_for("cuda")).run.uses_liger
    with pytest.raises(UnsupportedModelError, match="no kernels for it"):
        plan_run(run_for("cuda", "use_liger_kernel = true"))


def refuse(model: object) -> None:
    raise UnsupportedModelError("model.use_liger_kernel = true", "no kernels for it")


@pytest.mark.slow  # tests/megatrain/engine/test_flash.py has the same test
@pytest.mark.usefixtures("liger")
def test_a_run_keeps_its_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first start decides whether a run uses the kernels. A resumed run keeps this choice or fails."""

    def trainer(name: str, steps: int) -> Trainer:
        (tmp_path / name).mkdir(exist_ok=True)
        text = config_text(tmp_path / name, EXAMPLES / "quickstart" / "model", nvme=0)
        text = text.replace("[training]", f"[training]\nmax_steps = {steps}")
        config = config_from_toml(text.replace("[data]", "train_from_scratch = true\n[data]", 1))
        return Trainer(config)

    monkeypatch.setattr(traced, "check_liger_kernels", lambda model, device: check_liger_kernels(model, CUDA))
    for is_there in (True, False):
        name = "with" if is_there else "without"
        monkeypatch.setattr(traced, "can_use_liger_kernels", lambda run, is_there=is_there: is_there)
        first = trainer(name, 1)
        assert first.run.uses_liger is first.config.model.use_liger_kernel is is_there
        first.train()
        monkeypatch.setattr(traced, "can_use_liger_kernels", lambda run, is_there=is_there: not is_there)
        resumed = trainer(name, 2)
        assert resumed.run.uses_liger is is_there
        assert resumed.train().num_steps == 2
    monkeypatch.setattr(combinations, "_check_kernels", lambda config: iter(()))
    forced = trainer("with", 3)
    other = forced.config.model_copy(
        update={"model": forced.config.model.model_copy(update={"use_liger_kernel": False})}
    )
    with pytest.raises(ConfigChangedError, match=r"model\.use_liger_kernel: true -> false"):
        Trainer(other).train()
    for module in [module for module in sys.modules if module.partition(".")[0] == "liger_kernel"]:
        monkeypatch.delitem(sys.modules, module)
    monkeypatch.setitem(sys.modules, "liger_kernel", None)
    with pytest.raises(UnsupportedModelError, match=r'pip install -e "\.\[gpu\]".* keeps them'):
        trainer("with", 3)


def test_resumed_config_without_the_liger_key_uses_no_kernels(tmp_path: Path) -> None:
    """Its checkpoint is resumed without the kernels if the new config has ``use_liger_kernel = "auto"``."""
    config = config_from_toml(config_text(tmp_path, tmp_path, nvme=0))
    assert config.model.use_liger_kernel == "auto"
    written = to_toml(config)
    assert not changes_from(written, config).altering
    line = 'use_liger_kernel = "auto"\n'
    assert written.count(line) == 1
    before = written.replace(line, "")
    assert not changes_from(before, config).altering
    kept = DecidedSettings.of_meta({"config_toml": before})
    assert kept is not None and not kept.uses_liger
    recorded = written.replace('use_liger_kernel = "auto"', "use_liger_kernel = true")
    assert not changes_from(recorded, config).altering
    kept = DecidedSettings.of_meta({"config_toml": recorded})
    assert kept is not None and kept.uses_liger


@pytest.mark.usefixtures("liger")
def test_run_uses_liger_with_our_head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Liger's own head would compute full logits, and read the head's weight again for every few rows."""
    monkeypatch.setattr(combinations, "_check_kernels", lambda config: iter(()))
    monkeypatch.setattr(traced, "check_liger_kernels", lambda model, device: check_liger_kernels(model, CUDA))
    model = write_tiny_model(tmp_path / "model")
    plain = run_config(config_text(tmp_path / "plain", model, nvme=0), tmp_path / "plain", num_steps=2)
    text = config_text(tmp_path / "run", model, nvme=0).replace("[data]", "use_liger_kernel = true\n[data]", 1)
    run = run_config(text, tmp_path / "run", num_steps=2)
    assert run.losses == pytest.approx(plain.losses, rel=1e-5)
    trace, of_plain = run.plan.trace, plain.plan.trace
    assert (trace.head_columns, trace.head_rows) == (of_plain.head_columns, of_plain.head_rows) and trace.head_columns
