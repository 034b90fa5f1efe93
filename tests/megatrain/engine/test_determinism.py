from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator

import pytest
import torch

import megatrain
from fakes.gpu_run import virtual_gpu
from megatrain.base.errors import UnsupportedModelError
from megatrain.engine.device.environment import DeterminismError, consume_cublas_setting, deterministic_kernels

CUDA = torch.device("cuda")  # only its name is used


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)


@pytest.mark.parametrize("mode", [False, True])
def test_previous_determinism_setting_is_restored(mode: bool) -> None:
    torch.use_deterministic_algorithms(mode, warn_only=mode)
    try:
        with deterministic_kernels(CUDA, "Model"):
            assert torch.are_deterministic_algorithms_enabled()
            assert not torch.is_deterministic_algorithms_warn_only_enabled()
            assert torch.utils.deterministic.fill_uninitialized_memory is False  # type: ignore[attr-defined]
            assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
            assert os.environ["FLASH_ATTENTION_DETERMINISTIC"] == "1", "transformers passes it on to flash-attn"
        assert "FLASH_ATTENTION_DETERMINISTIC" not in os.environ
        assert torch.are_deterministic_algorithms_enabled() is mode
        assert torch.is_deterministic_algorithms_warn_only_enabled() is mode
        assert torch.utils.deterministic.fill_uninitialized_memory is True  # type: ignore[attr-defined]
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(("device", "enabled"), [(torch.device("cpu"), True), (CUDA, False)])
def test_determinism_setting_is_unchanged_if_not_needed(device: torch.device, enabled: bool) -> None:
    with deterministic_kernels(device, "Model", enabled=enabled):
        assert not torch.are_deterministic_algorithms_enabled()
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ


def test_operation_without_a_deterministic_kernel_is_named_with_a_remedy() -> None:
    with (
        pytest.raises(
            UnsupportedModelError, match=r"Model .* put_cpu_ has no deterministic kernel .* full_determinism = false"
        ),
        deterministic_kernels(CUDA, "Model"),
    ):
        raise RuntimeError("put_cpu_ does not have a deterministic implementation, but you set ...")
    with pytest.raises(RuntimeError, match="another one"), deterministic_kernels(CUDA, "Model"):
        raise RuntimeError("another one")
    assert not torch.are_deterministic_algorithms_enabled()


@pytest.fixture
def in_use() -> Iterator[None]:
    """Provide a virtual GPU that has already run a matrix product without the setting."""
    with virtual_gpu():
        multiply()
        yield


def multiply() -> None:
    matrix = torch.ones(2, 2, device="cuda")
    torch.mm(matrix, matrix)


def test_cublas_setting_exists_after_the_import() -> None:
    megatrain._set_deterministic_matmul()
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    with virtual_gpu():
        multiply()
        with deterministic_kernels(CUDA, "Model"):
            multiply()


@pytest.fixture
def cleared(monkeypatch: pytest.MonkeyPatch) -> list[str | None]:
    """Imitate a torch that parses the setting at each product.

    Return a list that records the setting whenever workspaces are freed.
    """
    monkeypatch.delattr(torch.backends.cuda, "cublas_workspace_size", raising=False)
    found: list[str | None] = []
    clear = lambda: found.append(os.environ.get("CUBLAS_WORKSPACE_CONFIG"))  # noqa: E731
    monkeypatch.setattr(torch._C, "_cuda_clearCublasWorkspaces", clear, raising=False)
    return found


def test_cublas_setting_is_read_before_removal_and_restored(cleared: list[str | None]) -> None:
    """Later products need not parse the setting again. Nested deterministic contexts know that it was read."""
    megatrain._set_deterministic_matmul()
    with virtual_gpu(), deterministic_kernels(CUDA, "Model"):
        with consume_cublas_setting(CUDA):
            assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
            multiply()
            assert cleared == [None], "a workspace of the old size would be used with the new one"
            with deterministic_kernels(CUDA, "Model"), consume_cublas_setting(CUDA):
                multiply()
            assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        multiply()


@pytest.mark.parametrize(("device", "enabled"), [(torch.device("cpu"), True), (CUDA, False)])
def test_cublas_setting_stays_if_products_do_not_parse_it(
    device: torch.device, enabled: bool, cleared: list[str | None]
) -> None:
    megatrain._set_deterministic_matmul()
    with deterministic_kernels(device, "Model", enabled=enabled), consume_cublas_setting(device):
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
    assert not cleared


def test_cublas_setting_stays_if_torch_keeps_the_size(
    cleared: list[str | None], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch versions with ``cublas_workspace_size`` parse the setting only once."""
    monkeypatch.setattr(torch.backends.cuda, "cublas_workspace_size", lambda: 1 << 25, raising=False)
    megatrain._set_deterministic_matmul()
    with virtual_gpu(), deterministic_kernels(CUDA, "Model"), consume_cublas_setting(CUDA):
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"
        multiply()
    assert not cleared


@pytest.mark.usefixtures("cleared")
def test_smaller_workspace_of_the_user_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":16:8")
    with virtual_gpu(), deterministic_kernels(CUDA, "Model"), consume_cublas_setting(CUDA):
        assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":16:8"
        multiply()


@pytest.mark.usefixtures("in_use")
def test_too_late_cublas_setting_is_reported() -> None:
    megatrain._set_deterministic_matmul()
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    with pytest.raises(
        DeterminismError, match=r"not set before .* import megatrain before .* full_determinism = false"
    ):
        deterministic_kernels(CUDA, "Model").__enter__()
    with deterministic_kernels(CUDA, "Model", enabled=False):
        multiply()


@pytest.mark.usefixtures("in_use")
def test_cublas_setting_made_after_the_first_product_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    with (
        pytest.raises(DeterminismError, match=r"set after the first matrix product .* Start again with CUBLAS"),
        deterministic_kernels(CUDA, "Model"),
    ):
        multiply()
    assert not torch.are_deterministic_algorithms_enabled()


def test_nondeterministic_cublas_setting_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":0:0")
    with pytest.raises(DeterminismError, match=r"is ':0:0' .* set it to :4096:8"):
        deterministic_kernels(CUDA, "Model").__enter__()


_PRODUCTS_OF_ANY_NUM_THREADS = """
import itertools, torch, megatrain
torch.manual_seed(0)
for rows, inner, columns in itertools.product((1, 2, 5, 31, 96, 577), (31, 62, 64, 576), (32, 64, 192, 1536)):
    left, right = torch.randn(inner, rows).t(), torch.randn(inner, columns)
    products = [(torch.set_num_threads(count), left @ right)[1] for count in (1, 2)]
    assert torch.equal(*products), (rows, inner, columns)
"""


def test_a_product_has_the_same_bits_with_any_number_of_threads() -> None:
    """Ranks on one host share its cores, so thread counts vary. By default, MKL's sums depend on the thread count."""
    environment = {name: value for name, value in os.environ.items() if name != "MKL_CBWR"}
    environment["OMP_NUM_THREADS"] = "2"
    subprocess.run([sys.executable, "-c", _PRODUCTS_OF_ANY_NUM_THREADS], check=True, env=environment)


def test_mkl_is_set_unless_a_user_has_set_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MKL_CBWR", raising=False)
    megatrain._set_deterministic_matmul()
    assert os.environ["MKL_CBWR"] == "AUTO,STRICT"
    monkeypatch.setenv("MKL_CBWR", "COMPATIBLE")
    megatrain._set_deterministic_matmul()
    assert os.environ["MKL_CBWR"] == "COMPATIBLE"


@pytest.mark.parametrize(
    ("chosen", "found"),
    [
        ({}, "GOMP_SPINCOUNT = '20000'"),
        ({"GOMP_SPINCOUNT": "7"}, "GOMP_SPINCOUNT = '7'"),
        ({"OMP_WAIT_POLICY": "passive"}, "GOMP_SPINCOUNT = '0'"),
    ],
)
def test_openmp_threads_spin_briefly_unless_a_user_chose(chosen: dict[str, str], found: str) -> None:
    ours = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
    environment = {name: value for name, value in os.environ.items() if name not in ours}
    environment |= {"OMP_DISPLAY_ENV": "verbose", **chosen}
    done = subprocess.run(
        [sys.executable, "-c", "import megatrain, torch"],
        env=environment,
        stderr=subprocess.PIPE,
        text=True,
        check=True,
    )
    assert found in done.stderr
