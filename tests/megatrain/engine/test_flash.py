"""`model.flash_attention`: which kernels a run uses, how it records this choice, and the workspace of FA3 and FA4.

The FA3 and FA4 packages need a GPU, so the tests register a stand-in for FA3 with torch.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.attention as torch_attention
from torch import Tensor

from megatrain.base.errors import UnsupportedModelError
from megatrain.checkpoint.resume import ConfigChangedError
from megatrain.checkpoint.state import DecidedSettings
from megatrain.config.combinations import find_bad_combinations
from megatrain.config.resolved import changes_from, config_from_toml, to_toml
from megatrain.engine.device import flash
from megatrain.engine.device.attention import AttentionCall
from megatrain.engine.device.flash import check_determinism, flash_for_gpu, flash_kernels
from megatrain.machine.planned_machine import find_machine
from megatrain.plan import traced
from megatrain.plan.plan import Plan
from megatrain.plan.planner import plan_run
from megatrain.training.resolve import resolve
from megatrain.training.trainer import Trainer
from oracles.tiered_run import EXAMPLES, config_text

_registry = pytest.importorskip("torch.nn.attention._registry", reason="torch before 2.11 has no such choice")
CPU, CUDA = torch.device("cpu"), torch.device("cuda")
MODEL = EXAMPLES / "quickstart" / "model"


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Register an FA3 without kernels, and yield its record of calls."""
    events: list[str] = []

    class Handle:
        def remove(self) -> None:
            events.append("removed")

    def register() -> Handle:
        events.append("active")
        return Handle()

    monkeypatch.setitem(_registry._FLASH_ATTENTION_IMPLS, "FA3", register)
    yield events
    assert torch_attention.current_flash_attention_impl() is None


def test_kernels_are_active_only_inside_the_context(stand_in: list[str]) -> None:
    with flash_kernels("FA2"):
        assert torch_attention.current_flash_attention_impl() is None
    with flash_kernels("FA3"):
        assert torch_attention.current_flash_attention_impl() == "FA3"
    assert stand_in == ["active", "removed"]


def test_a_missing_package_or_function_of_torch_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """This test uses the functions that torch itself registers, not the stand-in."""
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
    with pytest.raises(UnsupportedModelError, match=r"package flash-attn-3 cannot be used here .*Install it"):
        flash_kernels("FA3").__enter__()
    monkeypatch.setitem(sys.modules, "flash_attn", None)
    with pytest.raises(UnsupportedModelError, match=r"package flash-attn-4 cannot be used here"):
        flash_kernels("FA4").__enter__()
    monkeypatch.delattr(torch_attention, "activate_flash_attention_impl")
    with pytest.raises(UnsupportedModelError, match="Install a newer torch"):
        flash_kernels("FA3").__enter__()


def test_nondeterministic_backwards_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, the same check runs before a deterministic run starts."""
    monkeypatch.setattr(flash, "_TEST_SHAPE", (4, 32, 64))
    check_determinism("FA3", CPU)
    attend, calls = flash.scaled_dot_product_attention, 0

    def drifting(*args: Tensor, **options: Any) -> Tensor:
        nonlocal calls
        calls += 1
        return attend(*args, **options) * (1 + calls % 3)

    monkeypatch.setattr(flash, "scaled_dot_product_attention", drifting)
    with pytest.raises(UnsupportedModelError, match="flash-attn-3 differ from run to run"):
        check_determinism("FA3", CPU)


@pytest.mark.parametrize(
    ("name", "kernels"),
    [
        ("NVIDIA H100 80GB HBM3", "FA3"),
        ("NVIDIA GH200 480GB", "FA3"),
        ("NVIDIA B200", "FA4"),
        ("NVIDIA GB300", "FA4"),
        ("NVIDIA A100-SXM4-80GB", "FA2"),
        ("NVIDIA GeForce RTX 5090", "FA2"),
        ("NVIDIA RTX PRO 6000 Blackwell", "FA2"),
        ("", "FA2"),
    ],
)
def test_kernels_follow_the_architecture(name: str, kernels: str) -> None:
    assert flash_for_gpu(CUDA, name) == kernels


# -- workspace ---------------------------------------------------------------------------------------------------------


def allocated(kernels: str, batch: int, tokens: int, heads: int, key_heads: int, width: int) -> int:
    """Return the bytes that a deterministic causal backward allocates for rows of equal length, tensor by tensor."""
    rows = {"FA3": 128 if width == 64 else 64, "FA4": 128}[kernels]  # queries per block; a block of keys has 128
    cluster = 2 if kernels == "FA4" and width >= 128 else 1
    queries, keys = -(-tokens // rows) * rows, -(-tokens // 128) * 128
    if cluster == 2 and keys // 128 % 2:
        keys += 128
    numbers = batch * heads * queries * width  # gradients of queries
    numbers += 2 * batch * heads * queries  # sums of products, and of exponentials
    numbers += batch * heads * (queries // rows) * cluster  # counters
    if key_heads != heads:
        numbers += 2 * batch * key_heads * keys * width  # gradients of keys and values
        numbers += 2 * batch * key_heads * (keys // 128) * (2 if kernels == "FA4" else 1)
    return 4 * numbers


@pytest.mark.parametrize("kernels", ["FA3", "FA4"])
@pytest.mark.parametrize(
    ("batch", "tokens", "heads", "key_heads", "width"),
    [
        (1, 524288, 28, 4, 128),
        (16, 1024, 32, 32, 128),
        (3, 1000, 14, 2, 64),
        (1, 129, 8, 8, 96),
        (1, 32768, 28, 4, 128),
    ],
)
def test_the_plan_covers_the_workspace(
    kernels: Any, batch: int, tokens: int, heads: int, key_heads: int, width: int
) -> None:
    query, key = (torch.empty(batch, n, tokens, width, dtype=torch.bfloat16, device="meta") for n in (heads, key_heads))
    out = torch.empty_like(query).transpose(1, 2).contiguous().transpose(1, 2)
    func = torch.ops.aten._scaled_dot_product_flash_attention_backward.default
    call = AttentionCall.from_operator(func, (out, query, key, key, out), {})
    assert call is not None
    found = call.workspace_nbytes(CUDA, is_deterministic=True, flash=kernels)
    exact = allocated(kernels, batch, tokens, heads, key_heads, width)
    assert exact <= found <= exact * (1 + 0.01 + 300 / tokens)
    forward = torch.ops.aten._scaled_dot_product_flash_attention.default
    passed = AttentionCall.from_operator(forward, (query, key, key), {})
    assert passed is not None and passed.workspace_nbytes(CUDA, is_deterministic=True, flash=kernels) == 0


def test_fa3_workspace_of_a_512k_row_is_smaller_than_fa2() -> None:
    """FA3 needs 28 x 524,288 x 128 numbers for queries, and 2 x 4 x 524,288 x 128 for keys and values.
    This is 9.7 GB; FA2 needs 45 GB.
    """
    assert allocated("FA3", 1, 524288, 28, 4, 128) == pytest.approx(9.78e9, rel=0.01)


@pytest.mark.parametrize("kernels", ["FA3", "FA4"])
def test_rows_of_several_lengths(kernels: Any) -> None:
    query, key = (torch.empty(1000, heads, 64, dtype=torch.bfloat16, device="meta") for heads in (8, 2))
    starts = torch.tensor([0, 300, 1000])
    func = torch.ops.aten._flash_attention_backward.default
    call = AttentionCall.from_operator(func, (query, query, key, key, query, query, starts, starts, 700, 700), {})
    assert call is not None
    rows, keys = 1000 + 3 * 128, 1000 + 3 * 128
    exact = rows * 8 * (64 + 2) + 2 * keys * 2 * 64 + 2 * 8 * 8 + 2 * 2 * 2 * 8 * 2
    copied = 1000 * (8 + 2 + 2) * 64 * 2 // 2
    found = call.workspace_nbytes(CUDA, is_deterministic=True, flash=kernels) - copied
    assert 4 * exact <= found <= 1.3 * 4 * exact


def test_nondeterministic_plan_counts_split_key_workspace() -> None:
    """Four heads of one row do not fill a GPU, so FA3 may split the keys. The plan counts the partial results."""
    query = torch.empty(1, 4, 1024, 64, dtype=torch.bfloat16, device="meta")
    call = AttentionCall.from_operator(
        torch.ops.aten._scaled_dot_product_flash_attention.default, (query, query, query), {}
    )
    assert call is not None
    least = 16 * 4 * 1024 * 65 * 4
    assert least <= call.workspace_nbytes(CUDA, is_deterministic=False, flash="FA3") < 1.25 * least
    assert call.workspace_nbytes(CUDA, is_deterministic=False, flash="FA4") == 0


# -- the choice of a plan ----------------------------------------------------------------------------------------------


def planned(folder: Path, machine: str, table: str) -> Plan:
    """Plan the 0.82 M model in bf16 for another machine. ``table`` has further lines of ``[model]``."""
    text = config_text(folder, MODEL, nvme=0).replace('device = "cpu"', "")
    text = text.replace("[data]", f"train_from_scratch = true\nuse_liger_kernel = false\n{table}\n[data]", 1)
    text = text.replace('compute_dtype = "float32"', 'compute_dtype = "bfloat16"')
    return plan_run(resolve(config_from_toml(text), find_machine(machine)))


def test_default_flash_version_is_that_in_torch(tmp_path: Path) -> None:
    assert planned(tmp_path, "h200-1.5tb", "").run.flash == "FA2"
    plan = planned(tmp_path, "rtx4090-128gb", 'flash_attention = "auto"')
    assert plan.run.flash == "FA2" and "no kernels for this GPU" in plan.traced.flash_note
    plan = planned(tmp_path, "cpu-server-512gb", 'flash_attention = "auto"')
    assert (plan.run.flash, plan.traced.flash_note) == ("FA2", "")
    with pytest.raises(UnsupportedModelError, match=r"FA4 needs a GPU of the architecture Blackwell"):
        planned(tmp_path, "h200-1.5tb", 'flash_attention = "FA4"')


def test_no_kernels_on_the_cpu(tmp_path: Path) -> None:
    text = config_text(tmp_path, MODEL, nvme=0).replace("[data]", 'flash_attention = "FA3"\n[data]', 1)
    (problem,) = find_bad_combinations(config_from_toml(text))
    assert problem.key == "model.flash_attention" and "needs a GPU" in str(problem)


# -- the record --------------------------------------------------------------------------------------------------------


def test_config_without_flash_attention_resumes_with_fa2(tmp_path: Path) -> None:
    written = to_toml(config_from_toml(config_text(tmp_path, tmp_path, nvme=0)))
    now = config_from_toml(written.replace('flash_attention = "FA2"', 'flash_attention = "auto"'))
    line = 'flash_attention = "FA2"\n'
    assert written.count(line) == 1
    before = written.replace(line, "")
    assert not changes_from(before, now).altering
    for text, kernels in (
        (before, "FA2"),
        (written.replace('flash_attention = "FA2"', 'flash_attention = "FA3"'), "FA3"),
    ):
        kept = DecidedSettings.of_meta({"config_toml": text})
        assert kept is not None and kept.flash == kernels


def test_a_run_keeps_its_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stand_in: list[str]) -> None:
    """The first start chooses the kernels. A resumed run uses the recorded kernels, or names the missing package."""

    def trainer(name: str, steps: int, kernels: str = "auto") -> Trainer:
        (tmp_path / name).mkdir(exist_ok=True)
        text = config_text(tmp_path / name, MODEL, nvme=0).replace("[training]", f"[training]\nmax_steps = {steps}")
        text = text.replace("[data]", f'train_from_scratch = true\nflash_attention = "{kernels}"\n[data]', 1)
        return Trainer(config_from_toml(text.replace('device = "cpu"', 'device = "auto"')))

    checked: Callable[[Any], None] = traced.check_flash
    monkeypatch.setattr(traced, "check_flash", lambda run: None)  # the CPU stands in for a GPU
    monkeypatch.setattr(flash, "_TEST_SHAPE", (4, 32, 64))
    for kernels in ("FA3", "FA2"):
        monkeypatch.setattr(traced, "choose_flash", lambda run, kernels=kernels: (kernels, ""))
        first = trainer(kernels, 1)
        assert first.run.flash == first.config.model.flash_attention == kernels
        first.train()
        other = "FA2" if kernels == "FA3" else "FA3"
        monkeypatch.setattr(traced, "choose_flash", lambda run, other=other: (other, ""))
        resumed = trainer(kernels, 2)
        assert resumed.run.flash == kernels
        assert resumed.train().num_steps == 2
    assert stand_in == ["active", "removed"] * 2
    with pytest.raises(ConfigChangedError, match=r'model\.flash_attention: "FA3" -> "FA2"'):
        trainer("FA3", 3, "FA2").train()
    monkeypatch.setattr(traced, "check_flash", checked)
    with pytest.raises(UnsupportedModelError, match=r"FA3.* needs a GPU.* keeps it"):
        trainer("FA3", 3)
    monkeypatch.setattr(traced, "check_flash", lambda run: None)
    monkeypatch.setitem(_registry._FLASH_ATTENTION_IMPLS, "FA3", torch_attention._fa3.register_flash_attention_fa3)
    monkeypatch.setitem(sys.modules, "flash_attn_interface", None)
    with pytest.raises(UnsupportedModelError, match=r"flash-attn-3 cannot be used here .*Install it.* keeps it"):
        trainer("FA3", 3).train()
