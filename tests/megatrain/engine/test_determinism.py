from __future__ import annotations

import os

import pytest
import torch

from megatrain.engine.determinism import deterministic_kernels
from megatrain.models.errors import UnsupportedModelError

CUDA = torch.device("cuda")  # only its name is looked at


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)


@pytest.mark.parametrize("mode", [False, True])
def test_what_was_set_before_is_set_afterwards(mode: bool) -> None:
    torch.use_deterministic_algorithms(mode, warn_only=mode)
    try:
        with deterministic_kernels(CUDA, "Model"):
            assert torch.are_deterministic_algorithms_enabled()
            assert not torch.is_deterministic_algorithms_warn_only_enabled()
            assert torch.utils.deterministic.fill_uninitialized_memory is False  # type: ignore[attr-defined]
            assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        assert torch.are_deterministic_algorithms_enabled() is mode
        assert torch.is_deterministic_algorithms_warn_only_enabled() is mode
        assert torch.utils.deterministic.fill_uninitialized_memory is True  # type: ignore[attr-defined]
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(("device", "enabled"), [(torch.device("cpu"), True), (CUDA, False)])
def test_nothing_is_changed_where_nothing_is_to_be_done(device: torch.device, enabled: bool) -> None:
    with deterministic_kernels(device, "Model", enabled=enabled):
        assert not torch.are_deterministic_algorithms_enabled()
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ


def test_an_operation_without_such_a_kernel_is_named_with_what_to_do() -> None:
    with (
        pytest.raises(UnsupportedModelError, match=r"Model .* put_cpu_ has no kernel .* full_determinism = false"),
        deterministic_kernels(CUDA, "Model"),
    ):
        raise RuntimeError("put_cpu_ does not have a deterministic implementation, but you set ...")
    with pytest.raises(RuntimeError, match="another one"), deterministic_kernels(CUDA, "Model"):
        raise RuntimeError("another one")
    assert not torch.are_deterministic_algorithms_enabled()
