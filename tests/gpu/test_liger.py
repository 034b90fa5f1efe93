"""liger-kernel's cross entropy in steps: nothing waits, bits stay, no second tensor of the size of the logits."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from fakes.gpu_run import gpu_config_text, no_waits_allowed
from fakes.liger_packages import stand_in_liger
from fakes.virtual_cuda import VirtualCuda
from megatrain.config import load_config
from megatrain.config.resolve import resolve
from megatrain.models.liger import LigerCrossEntropy
from megatrain.plan.planner import plan_run
from megatrain.trainer import Trainer
from oracles.tiered_run import TieredRun, make_loader, run_config

ALL_RAM = 'weights = ["ram"]\ngradients = ["ram"]\noptimizer = ["ram"]\nactivations = ["ram"]'
ALL_NVME = ALL_RAM.replace("ram", "nvme")


@pytest.fixture
def liger(virtual: VirtualCuda | None) -> Iterator[None]:
    """Let steps run with the package, or on a device in software with what takes its place."""
    if virtual is None:
        pytest.importorskip("liger_kernel")
    with nullcontext() if virtual is None else stand_in_liger():
        yield


def config_with_key(folder: Path, model: Path, **tables: Any) -> str:
    return gpu_config_text(folder, model, **tables).replace("[data]", "use_liger_kernel = true\n[data]", 1)


@pytest.mark.usefixtures("liger")
def test_a_step_makes_the_host_wait_for_nothing_but_its_end(tiny_model: Path, tmp_path: Path) -> None:
    (tmp_path / "run.toml").write_text(config_with_key(tmp_path, tiny_model, placement=ALL_RAM))
    config = load_config(tmp_path / "run.toml").config
    plan = plan_run(resolve(config))
    with Trainer(config, plan=plan).open() as trainer:
        trainer.load()
        trainer.store.wait_idle()
        plan.optimizer.warm_up()
        engine, loader = trainer.make_engine(4), make_loader(config, plan)
        for number in range(2):  # kernels are compiled
            engine.step(next(loader).micro_batches, number=number, lr=1e-3)
        with no_waits_allowed():
            results = [engine.step(next(loader).micro_batches, number=n, lr=1e-3) for n in (2, 3)]
        engine.finish_updates()
    assert all(result.loss > 0 and result.grad_norm > 0 for result in results)


@pytest.mark.usefixtures("liger")
def test_losses_and_bits(tiny_model: Path, tmp_path: Path) -> None:
    plain = run_config(gpu_config_text(tmp_path / "plain", tiny_model, nvme=0), tmp_path / "plain", num_steps=2)
    runs: list[TieredRun] = []
    for name, placement in (("gpu", ""), ("ram", ALL_RAM), ("nvme", ALL_NVME)):
        text = config_with_key(tmp_path / name, tiny_model, placement=placement)
        runs.append(run_config(text, tmp_path / name, num_steps=2))
        runs[-1].assert_as_planned()
    assert runs[0].losses == pytest.approx(plain.losses, rel=1e-2)
    for run in runs[1:]:
        run.assert_same(runs[0])


@pytest.mark.gpu
@pytest.mark.parametrize("num_columns", [101, 32_000, 151_936, 262_144])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_loss_and_gradient_are_those_of_torch(num_columns: int, dtype: torch.dtype) -> None:
    pytest.importorskip("liger_kernel")
    generator = torch.Generator().manual_seed(num_columns)
    values = (4 * torch.randn(65, num_columns, generator=generator)).to("cuda", dtype)
    labels = torch.randint(num_columns, (65,), generator=generator)
    labels[7] = -100
    labels = labels.cuda()
    kernel = LigerCrossEntropy()
    kernel((values * 1.0).requires_grad_(), labels, 1000, -100)  # compiled
    leaf = values.clone().requires_grad_()
    expected = torch.nn.functional.cross_entropy(leaf.float(), labels, reduction="sum") / 1000
    (expected_gradient,) = torch.autograd.grad(expected, leaf)
    logits = values.clone().requires_grad_()
    one = torch.ones_like(expected)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with no_waits_allowed():
        loss = kernel(logits, labels, 1000, -100)
        (gradient,) = torch.autograd.grad(loss, logits, one)
    taken = torch.cuda.max_memory_allocated() - before
    assert taken < 64 * 1024, "numbers per row, and nothing of the size of the logits"
    assert gradient.data_ptr() == logits.data_ptr() and not gradient[7].any()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-5)
    # Both round the same fp32 number once.
    assert torch.allclose(gradient, expected_gradient, rtol=2**-7 if dtype == torch.bfloat16 else 1e-4, atol=1e-9)


@pytest.mark.gpu
def test_bits_are_the_same_at_every_run() -> None:
    pytest.importorskip("liger_kernel")
    generator = torch.Generator().manual_seed(1)
    values = torch.randn(1024, 32_000, generator=generator).cuda().bfloat16()
    labels, kernel = torch.randint(32_000, (1024,), generator=generator).cuda(), LigerCrossEntropy()
    found = []
    for _ in range(5):
        logits = values.clone().requires_grad_()
        loss = kernel(logits, labels, 4096, -100)
        found.append((loss.detach(), torch.autograd.grad(loss, logits)[0]))
    for loss, gradient in found[1:]:
        assert torch.equal(loss, found[0][0]) and torch.equal(gradient, found[0][1])
