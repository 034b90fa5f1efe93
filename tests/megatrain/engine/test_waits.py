"""The host never waits for the GPU within a step. The tests run on a CPU, and count operations that would wait."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from fakes.waits import counted_waits
from megatrain.config import load_config
from megatrain.converters.spec import build_graph
from megatrain.engine import micro_batches as inputs
from megatrain.engine.device import host_io
from megatrain.engine.tape import gradients, leased
from megatrain.engine.unit import weight_gradients
from megatrain.optim import clip
from megatrain.plan.planner import plan_run
from megatrain.training.resolve import resolve
from megatrain.training.trainer import Trainer
from oracles.families import packed_batches, padded_batches, tiny_config
from oracles.huggingface import build_model
from oracles.memory_access import MemoryAccess
from oracles.runners import StepRunner, layer_runner
from oracles.tiered_run import config_text, make_loader, write_tiny_model

BATCHES = {"padded": padded_batches, "packed": packed_batches}


@pytest.fixture
def emulate_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the engine act on the CPU as on a GPU: norms stay tensors, and host copies answer value reads."""
    for module in (inputs, weight_gradients):
        monkeypatch.setattr(module, "has_sync_reads", lambda device: True)
    monkeypatch.setattr(gradients, "SquaredNorm", NormOnDevice)


class NormOnDevice(clip.SquaredNorm):
    """Norm that is computed as on a GPU, for parts on the CPU."""

    def add(self, number: int, part: torch.Tensor) -> None:
        self._device[number] = clip.device_partials(part)

    def add_all(self, parts: Sequence[torch.Tensor]) -> None:
        self._device[0] = torch.cat([clip.device_partials(part) for part in parts])


def runner_of(config: Any) -> StepRunner:
    graph = build_graph(config)
    access = MemoryAccess(graph, dict(build_model(config).named_parameters()), torch.float32)
    return layer_runner(graph, access, device="cpu")


@pytest.mark.parametrize("batches", BATCHES)
@pytest.mark.parametrize("family", ["llama", "qwen2", "qwen3", "gemma3_text", "gpt2", "olmo2", "phi3", "smollm3"])
def test_queueing_a_step_reads_no_device_values(family: str, batches: str, emulate_device: None) -> None:
    runner, micro_batches = runner_of(tiny_config(family)), BATCHES[batches]()
    with counted_waits() as waits:
        queued = runner.queue(micro_batches)
    # On the host, labels are counted, their rows are found, and the model's queries about its masks are answered.
    mirror = runner._micro_batches.mirror
    assert mirror is not None and 1 <= mirror.num_answers <= 4 * len(micro_batches)
    assert waits == {"numpy": 2 * len(micro_batches) + mirror.num_answers}
    with counted_waits() as waits:
        host_io.read_numbers(queued.terms)
    assert waits == {"tolist": 1}


@pytest.mark.parametrize("batches", BATCHES)
def test_host_answers_are_bit_identical(batches: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config, micro_batches = tiny_config("qwen2"), BATCHES[batches]()
    plain = runner_of(config)
    with counted_waits() as waits:
        expected = plain.forward_backward(micro_batches)
    num_looks = waits["_local_scalar_dense"] + waits["tolist"] - 1  # the last wait reads the loss
    assert len(micro_batches) <= num_looks <= 4 * len(micro_batches), "the plain run reads masks"
    monkeypatch.setattr(inputs, "has_sync_reads", lambda device: True)
    mirrored = runner_of(config)
    assert mirrored.forward_backward(micro_batches) == expected
    assert mirrored._micro_batches.mirror is not None
    assert mirrored._micro_batches.mirror.num_answers == num_looks
    left, right = plain.visits.access.finish(), mirrored.visits.access.finish()  # type: ignore[attr-defined]
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_waits_inside_expert_routers_are_allowed(emulate_device: None) -> None:
    """A layer that reads its router's choice waits within the layer. The engine cannot answer this read."""
    runner = runner_of(tiny_config("mixtral", experts_implementation="eager"))
    with counted_waits() as waits:
        runner.queue(padded_batches())
    assert sum(waits.values()) > 2 * len(padded_batches())


@pytest.mark.parametrize("packing", ["false", "true"])
@pytest.mark.parametrize("max_grad_norm", [0.0, 1.0])
def test_a_whole_step_reads_once_at_its_end(
    max_grad_norm: float, packing: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, emulate_device: None
) -> None:
    """A step with a real store and the previous step's updates reads loss and norm once, together, at its end."""
    model = write_tiny_model(tmp_path / "model")
    optimizer = f"max_grad_norm = {max_grad_norm}"
    text = config_text(tmp_path, model, nvme=0, data=f"packing = {packing}", optimizer=optimizer)
    (tmp_path / "run.toml").write_text(text)
    config = load_config(tmp_path / "run.toml").config
    plan = plan_run(resolve(config))
    loader = make_loader(config, plan)
    reads: list[Counter[str]] = []
    with Trainer(config, plan=plan).open() as trainer:
        trainer.load()
        engine = trainer.make_engine(3)
        engine.step(next(loader).micro_batches, step_index=0, lr=1e-3)
        before_read = Counter[str]()

        class Arriving(host_io.PendingScalars):
            def read(self) -> list[float]:
                before_read.update(waits)
                reads.append(Counter[str]())
                return super().read()

        monkeypatch.setattr(leased, "PendingScalars", Arriving)
        micro_batches = next(loader).micro_batches
        with counted_waits() as waits:
            result = engine.step(micro_batches, step_index=1, lr=1e-3)
    assert 0 < result.loss < 8 and 0 < result.grad_norm < 10, "the logarithm of 1024 tokens is 6.9"
    assert len(reads) == 1
    # Blocks in RAM reach the update's kernels through numpy. Without clipping, updates run in the backward, and each
    # reads its norm, which was already being copied to the host. No other value is read before the final read.
    assert set(before_read) == ({"numpy"} if max_grad_norm else {"numpy", "tolist"})
    assert waits - before_read == {"tolist": 1}


def test_wait_counter_finds_synchronizations() -> None:
    tensor, leaf = torch.arange(4.0), torch.ones(3, requires_grad=True)

    class Looks(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
            return value * 2

        @staticmethod
        def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
            assert gradient.sum() > 0
            return gradient

    with counted_waits() as waits:
        float(tensor.sum())
        bool(tensor.any())
        int(tensor[0])
        tensor[tensor > 1]
        tensor.nonzero()
        torch.equal(tensor, tensor)
        torch.masked_select(tensor, tensor > 1)
        tensor.tolist()
        tensor.cpu()
        Looks.apply(leaf).sum().backward()
    assert waits == {
        "_local_scalar_dense": 4,
        "cpu": 1,
        "equal": 1,
        "index": 1,
        "masked_select": 1,
        "nonzero": 1,
        "tolist": 1,
    }
