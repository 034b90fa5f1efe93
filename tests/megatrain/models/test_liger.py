"""`model.use_liger_kernel`: what is asked of the package, what it may not change, what is said where it is missing."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import MethodType, ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM
from transformers.loss.loss_utils import ForCausalLMLoss
from transformers.models.llama import modeling_llama

from fakes.liger_packages import stand_in_liger
from megatrain.config import load_config, problems
from megatrain.engine.forward import LayerRunner
from megatrain.engine.head import plan_head
from megatrain.engine.objective import Objective, causal_lm_loss
from megatrain.engine.tiled import TiledForward, tile_mlps
from megatrain.engine.trace import CountingMode
from megatrain.models.graph import UnsupportedModelError, build_graph
from megatrain.models.liger import LigerCrossEntropy, apply_liger_kernels, check_liger_kernels
from megatrain.plan import planner
from megatrain.run.metrics import Observers
from megatrain.trainer import Trainer
from oracles.families import packed_batches, padded_batches, tiny_config
from oracles.huggingface import build_model
from oracles.memory_access import MemoryAccess
from oracles.tiered_run import EXAMPLES, config_text, run_config, write_tiny_model

CUDA = torch.device("cuda")
COUNTS = (14, 3, 14)  # tokens of padded_batches() that have a label


@pytest.fixture
def liger() -> Iterator[ModuleType]:
    with stand_in_liger() as module:
        yield module


def test_modules_of_the_model_change_and_nothing_else(liger: ModuleType) -> None:
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


def test_mlps_that_run_in_pieces_stay_so(liger: ModuleType) -> None:
    graph = build_graph(tiny_config("llama"))
    tile_mlps(graph, 4)
    apply_liger_kernels(graph.model, with_mlps=False)
    layer = next(unit.module for unit in graph.units if unit.is_layer)
    assert isinstance(layer.mlp.forward, TiledForward)
    assert "_norm" in repr(layer.input_layernorm.forward)


def test_a_model_without_kernels_is_refused(liger: ModuleType) -> None:
    with pytest.raises(UnsupportedModelError, match=r"no kernels for gpt2\. Write use_liger_kernel = false"):
        check_liger_kernels(build_graph(tiny_config("gpt2")).model, CUDA)


def test_layers_that_liger_does_not_know_are_refused(liger: ModuleType) -> None:
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


def runner_of(config: Any, *, liger: bool, hook: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Return the runner of a tiny model in fp32, four rows of logits at a time, and its access."""
    graph = build_graph(config)
    if hook is not None:
        graph.model.get_output_embeddings().register_forward_hook(hook)
    access = MemoryAccess(graph, dict(build_model(config).named_parameters()), torch.float32)
    kernel = LigerCrossEntropy() if liger else None
    return LayerRunner(
        graph, access, device="cpu", compute_dtype=torch.float32, head_rows=4, cross_entropy=kernel, **options
    ), access


def step(config: Any, batches: Any, *, liger: bool, **options: Any) -> tuple[float, dict[str, Tensor]]:
    runner, access = runner_of(config, liger=liger, **options)
    loss = runner.forward_backward(batches, seed=1).loss
    return loss, access.finish()


def assert_close(found: tuple[float, dict[str, Tensor]], expected: tuple[float, dict[str, Tensor]]) -> None:
    assert found[0] == pytest.approx(expected[0], rel=1e-6)
    assert found[1].keys() == expected[1].keys()
    for name, gradient in expected[1].items():
        assert (found[1][name] - gradient).abs().max() <= 1e-5 * gradient.abs().max(), name


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "cohere2", "granite"])
def test_losses_and_gradients_are_those_of_the_models_own_loss(liger: ModuleType, family: str) -> None:
    """Heads that cap logits (gemma2), scale them (cohere2, granite), and tied ones: their own code runs."""
    config = tiny_config(family)
    for batches in (padded_batches(), packed_batches()):
        assert_close(step(config, batches, liger=True), step(config, batches, liger=False))
    assert liger.liger_cross_entropy_kernel.launches


def test_each_piece_is_one_launch_that_divides_by_the_tokens_of_the_step(liger: ModuleType) -> None:
    runner, _ = runner_of(tiny_config("llama"), liger=True)
    runner.forward_backward(padded_batches())
    launches = liger.liger_cross_entropy_kernel.launches
    assert len(launches) == sum(-(-count // 4) for count in COUNTS)
    for launch in launches:
        assert launch["n_non_ignore"] == sum(COUNTS) and isinstance(launch["n_non_ignore"], float)
        assert launch["HAS_GRADIENTS"] and launch["n_cols"] == 101 and launch["BLOCK_SIZE"] == 128
        assert launch["ignore_index"] == -100 and launch["label_smoothing"] == launch["lse_square_scale"] == 0.0


def test_an_evaluation_computes_losses_alone(liger: ModuleType) -> None:
    config = tiny_config("gemma2")
    found = runner_of(config, liger=True)[0].evaluate(padded_batches())
    expected = runner_of(config, liger=False)[0].evaluate(padded_batches())
    assert found.num_tokens == expected.num_tokens == sum(COUNTS)
    assert found.terms == pytest.approx(expected.terms, rel=1e-6)
    launches = liger.liger_cross_entropy_kernel.launches
    assert len(launches) == len(found.terms)
    assert all(launch["n_non_ignore"] == 1.0 and not launch["HAS_GRADIENTS"] for launch in launches)


def test_smoothed_labels_keep_their_own_loss_and_noise_has_none(liger: ModuleType) -> None:
    config, launches = tiny_config("llama"), liger.liger_cross_entropy_kernel.launches
    smoothed = Objective(label_smoothing_factor=0.1)
    with_liger = step(config, padded_batches(), liger=True, objective=smoothed)
    expected = step(config, padded_batches(), liger=False, objective=smoothed)
    assert not launches
    assert_close(with_liger, expected)  # whole logits, and parts of them
    runner_of(config, liger=True, objective=smoothed)[0].evaluate(padded_batches())
    assert launches  # an evaluation knows no objective
    noisy = Objective(neftune_noise_alpha=5.0)
    assert_close(
        step(config, padded_batches(), liger=True, objective=noisy),
        step(config, padded_batches(), liger=False, objective=noisy),
    )


def test_the_routers_loss_is_added_by_the_model(liger: ModuleType) -> None:
    config = tiny_config("mixtral", output_router_logits=True, router_aux_loss_coef=0.3)
    assert_close(step(config, padded_batches(), liger=True), step(config, padded_batches(), liger=False))
    launches = liger.liger_cross_entropy_kernel.launches
    assert len(launches) == sum(-(-count // 4) for count in COUNTS) + len(COUNTS)  # and once without a label


def test_a_loss_that_is_not_computed_in_pieces_stays_the_models_own(liger: ModuleType) -> None:
    config = tiny_config("llama")
    losses = []
    for with_liger in (True, False):
        graph = build_graph(config)
        vars(graph.model)["_loss_function"] = _own_loss
        assert plan_head(graph) is None
        access = MemoryAccess(graph, dict(build_model(config).named_parameters()), torch.float32)
        kernel = LigerCrossEntropy() if with_liger else None
        runner = LayerRunner(graph, access, device="cpu", compute_dtype=torch.float32, cross_entropy=kernel)
        losses.append(runner.forward_backward(padded_batches()).loss)
    assert losses[0] == losses[1] and not liger.liger_cross_entropy_kernel.launches


def _own_loss(logits: Tensor, labels: Tensor, vocab_size: int, num_items_in_batch: int, **rest: Any) -> Tensor:
    shifted = torch.nn.functional.pad(labels, (0, 1), value=-100)[:, 1:].reshape(-1)
    total = torch.nn.functional.cross_entropy(logits.view(-1, vocab_size), shifted, reduction="sum")
    return 2.0 * total / num_items_in_batch


def capped(module: Any, args: Any, logits: Tensor) -> Tensor:
    return logits.tanh()  # autograd keeps its result, which is what the loss is given


@pytest.mark.parametrize(("hook", "keeps_logits"), [(capped, True), (None, False)])
def test_logits_that_somebody_else_needs_are_copied(
    liger: ModuleType, hook: Callable[..., Any] | None, keeps_logits: bool
) -> None:
    config = tiny_config("llama")
    runner, _ = runner_of(config, liger=True, hook=hook)
    assert runner._plan.keeps_logits == keeps_logits
    found, expected = (step(config, padded_batches(), liger=with_liger, hook=hook) for with_liger in (True, False))
    assert_close(found, expected)


def test_logits_that_are_read_after_the_loss_are_copied(liger: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    own = modeling_llama.LlamaForCausalLM.forward

    def with_penalty(self: Any, *args: Any, **kwargs: Any) -> Any:
        output = own(self, *args, **kwargs)
        output["loss"] = 0.5 * output["loss"] + 1e-3 * output["logits"].abs().mean()
        return output

    monkeypatch.setattr(modeling_llama.LlamaForCausalLM, "forward", with_penalty)
    config = tiny_config("llama")
    assert runner_of(config, liger=True)[0]._plan.keeps_logits
    assert_close(step(config, padded_batches(), liger=True), step(config, padded_batches(), liger=False))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_takes_the_place_of_the_logits(liger: ModuleType, dtype: torch.dtype) -> None:
    torch.manual_seed(3)
    leaf, labels = torch.randn(9, 300).to(dtype).requires_grad_(), torch.randint(300, (9,))
    labels[4] = -100
    logits = leaf * 1.0
    loss = LigerCrossEntropy()(logits, labels, 40, -100)
    assert loss.dtype == torch.float32
    (gradient,) = torch.autograd.grad(3 * loss, logits, retain_graph=True)
    assert gradient.dtype == dtype and gradient.data_ptr() == logits.data_ptr()
    with pytest.raises(AssertionError, match="a second backward"):
        torch.autograd.grad(loss, logits)
    total = torch.nn.functional.cross_entropy(leaf.float(), labels, reduction="sum") * 3 / 40
    expected = torch.autograd.grad(total, leaf)[0]
    assert 3 * loss.item() == pytest.approx(total.item(), rel=1e-6)
    assert torch.allclose(gradient, expected, rtol=1.6e-2 if dtype == torch.bfloat16 else 1e-5, atol=1e-9)


@pytest.mark.parametrize("change", [["temperature"], None])
def test_a_kernel_with_other_arguments_is_refused(
    liger: ModuleType, monkeypatch: pytest.MonkeyPatch, change: list[str] | None
) -> None:
    names = liger.Kernel.arg_names
    monkeypatch.setattr(liger.Kernel, "arg_names", names + change if change else names[1:])
    reason = rf"does not take the arguments .*\({change[0] if change else 'X_ptr'}\)\. Install version"
    with pytest.raises(UnsupportedModelError, match=reason):
        check_liger_kernels(build_graph(tiny_config("llama")).model, CUDA)


def test_an_older_kernel_is_launched_with_what_it_takes(liger: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    absent = {"HAS_GRADIENTS", "weight_ptr", "HAS_WEIGHT", "predicted_tokens_ptr"}
    monkeypatch.setattr(liger.Kernel, "arg_names", [name for name in liger.Kernel.arg_names if name not in absent])
    seen: list[dict[str, Any]] = []
    monkeypatch.setattr(liger.Kernel, "_launch", lambda self, grid, **given: seen.append(given))
    LigerCrossEntropy()(torch.randn(2, 8, requires_grad=True) * 1.0, torch.tensor([1, 2]), 2, -100)
    assert seen[0].keys() == {*liger.Kernel.arg_names, "num_warps"}


def test_a_package_without_the_kernel_is_named(liger: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(liger, "liger_cross_entropy_kernel")
    with pytest.raises(UnsupportedModelError, match=r"liger-kernel cannot be used here .*pip install liger-kernel"):
        LigerCrossEntropy()


PLACEMENTS = {
    "RAM": {"nvme": 0},
    "NVMe": {"placement": 'weights = ["nvme"]\noptimizer = ["nvme"]\nactivations = ["nvme"]'},
    "GPU": {"nvme": 0, "gpu": "6MiB"},
}


@pytest.fixture
def liger_on_the_cpu(liger: ModuleType, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.setattr(problems, "_check_kernels", lambda config: iter(()))
    monkeypatch.setattr(planner, "check_liger_kernels", lambda model, device: check_liger_kernels(model, CUDA))
    return liger


def test_a_run_uses_it_and_placement_changes_no_bit(liger_on_the_cpu: ModuleType, tmp_path: Path) -> None:
    launches = liger_on_the_cpu.liger_cross_entropy_kernel.launches
    model = write_tiny_model(tmp_path / "model")
    runs = []
    for name, tables in PLACEMENTS.items():
        text = config_text(tmp_path / name, model, **tables)  # type: ignore[arg-type]
        before = len(launches)
        runs.append(
            run_config(text.replace("[data]", "use_liger_kernel = true\n[data]", 1), tmp_path / name, num_steps=2)
        )
        runs[-1].assert_as_planned()
        assert len(launches) - before >= 2 * 3
    for run in runs[1:]:
        run.assert_same(runs[0])
    plain = run_config(config_text(tmp_path / "plain", model, nvme=0), tmp_path / "plain", num_steps=2)
    assert plain.losses == pytest.approx(runs[0].losses, rel=1e-5)


def test_the_evaluations_of_a_run_use_it(liger_on_the_cpu: ModuleType, tmp_path: Path) -> None:
    losses = []
    for name, key in (("plain", ""), ("liger", "use_liger_kernel = true\n")):
        folder = tmp_path / name
        folder.mkdir()
        text = config_text(folder, write_tiny_model(folder / "model"), nvme=0).replace("[data]", f"{key}[data]", 1)
        text = text.replace("[training]\n", "[training]\nmax_steps = 1\n")
        text += f'[[data.eval]]\npath = "{EXAMPLES / "quickstart" / "loomings.txt"}"\n'
        text += '[evaluation]\neval_on_start = true\n[checkpoint]\nmin_free_disk = "0MiB"\n'
        (folder / "run.toml").write_text(text)
        Trainer(load_config(folder / "run.toml").config, observer=Observers([])).train()
        lines = [json.loads(line) for line in (folder / "out" / "metrics.jsonl").read_text().splitlines()]
        losses.append([line["loss"] for line in lines if line.get("event") == "evaluation"])
    assert losses[1] == pytest.approx(losses[0], rel=1e-5) and losses[0]
    launches = liger_on_the_cpu.liger_cross_entropy_kernel.launches
    assert {launch["HAS_GRADIENTS"] for launch in launches} == {True, False}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_piece_takes_no_more_memory_than_planned(
    liger: ModuleType, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The plan is made with torch's loss. The kernel itself makes no tensor."""
    monkeypatch.setattr(liger.Kernel, "_launch", lambda self, grid, **given: None)
    rows, columns = 64, 1000
    functions = {"torch": ForCausalLMLoss, "liger": causal_lm_loss(LigerCrossEntropy(), keeps_logits=False)}
    labels, peaks = torch.zeros(1, rows, dtype=torch.long), {}
    for name, function in functions.items():
        leaf = torch.zeros(1, rows, columns, dtype=dtype, requires_grad=True)
        with CountingMode() as ledger:
            loss = function(leaf * 1.0, labels, vocab_size=columns, num_items_in_batch=7, shift_labels=labels)
            torch.autograd.grad(loss, leaf)
        peaks[name] = ledger.peak_nbytes
    logits_nbytes = rows * columns * dtype.itemsize
    assert peaks["liger"] < 2.1 * logits_nbytes < peaks["torch"]  # logits, and the gradient of what they were made of
