"""If the GPU fails or its memory runs out, the run ends with one error message. The same command resumes the run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from fakes.gpu_run import virtual_gpu
from fakes.virtual_cuda import VirtualCuda
from megatrain.run.status import StatusWriter
from processes.saved_run import NVME, SavedRun, make_run

STEPS, AT = 5, 3
TABLES: dict[str, Any] = {
    "device": "cuda",
    "dtype": "bfloat16",
    "steps": STEPS,
    "placement": 'optimizer = ["nvme"]',
    "more": f'[tiers.gpu]\nsize = "3MiB"\n{NVME}',
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> SavedRun:
    return make_run(tmp_path_factory.mktemp("device_faults") / "made")


@pytest.fixture(scope="module")
def expected(model: SavedRun, tmp_path_factory: pytest.TempPathFactory) -> tuple[bytes, int]:
    """Return the weights of an undisturbed run, and the number of its device calls after step ``AT``."""
    run = model.copy(tmp_path_factory.mktemp("expected") / "run")
    with virtual_gpu() as device, pytest.MonkeyPatch.context() as patch:
        calls: list[int] = []
        after_step(patch, AT, lambda: calls.append(device.num_calls))
        done = run.run(**TABLES)
        assert done.exit_code == 0, done.output
        return weights(run), device.num_calls - calls[0]


def after_step(patch: pytest.MonkeyPatch, step: int, act: Callable[[], object]) -> None:
    on_step = StatusWriter.on_step

    def acts(self: StatusWriter, metrics: Any) -> None:
        on_step(self, metrics)
        if metrics.step == step:
            act()

    patch.setattr(StatusWriter, "on_step", acts)


def weights(run: SavedRun) -> bytes:
    return (run.out / "final" / "model.safetensors").read_bytes()


def failed(run: SavedRun, act: Callable[[VirtualCuda], object]) -> str:
    """Train, and let ``act`` change the device after step ``AT``. Return the error message."""
    with virtual_gpu() as device, pytest.MonkeyPatch.context() as patch:
        after_step(patch, AT, lambda: act(device))
        done = run.run(**TABLES)
        device.last_call = None  # cleanup calls the device
    assert done.exit_code == 1, done.output
    error = done.output[done.output.index("error:") :]
    assert "internal" not in error and "Traceback" not in error, error
    assert json.loads((run.out / "status.json").read_text())["message"] in error
    return error


def assert_run_resumes(run: SavedRun, expected: tuple[bytes, int]) -> None:
    with virtual_gpu():
        done = run.run(**TABLES)
    assert done.exit_code == 0, done.output
    assert "continu" in done.output
    assert weights(run) == expected[0]


def test_gpu_memory_taken_by_another_program_is_reported(
    model: SavedRun, tmp_path: Path, expected: tuple[bytes, int]
) -> None:
    run = model.copy(tmp_path / "run")

    def exhaust_gpu_memory(device: VirtualCuda) -> None:
        device.others_bytes = device.total_bytes - device.allocated_bytes

    error = failed(run, exhaust_gpu_memory)
    assert "out of GPU memory" in error and "tiers.gpu.size" in error and "bytes is free" in error, error
    assert "PYTORCH_ALLOC_CONF" not in error, error
    assert_run_resumes(run, expected)


@pytest.mark.parametrize("share", [0.0, 0.1, 0.25, 0.45, 0.6, 0.8, 0.95])
def test_device_failure_is_reported_and_the_run_resumes(
    share: float, model: SavedRun, tmp_path: Path, expected: tuple[bytes, int]
) -> None:
    run = model.copy(tmp_path / "run")

    def fail_soon(device: VirtualCuda) -> None:
        device.last_call = device.num_calls + int(share * expected[1])

    error = failed(run, fail_soon)
    assert "the GPU failed" in error and "illegal memory access" in error and "Xid" in error, error
    assert "asynchronously" not in error, error
    assert_run_resumes(run, expected)


def test_tensor_lists_convert_during_and_after_device_replacement() -> None:
    """Lists of tensors can be converted to tensors while the software device is in place, and also afterwards.

    Some models need these conversions. If the device replaced ``Tensor.__getitem__``, they would fail for the rest of
    the process.
    """
    with virtual_gpu():
        there = torch.arange(3, device="cuda")
        assert torch.tensor([there[1], there[2]], device="cuda").tolist() == [1, 2]
    assert torch.tensor([torch.tensor(1), torch.tensor(2)]).tolist() == [1, 2]
