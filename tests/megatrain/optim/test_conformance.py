"""Every optimizer passes the suite that is shipped for users' optimizers, and the suite detects broken contracts."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from megatrain.optim.adafactor import Adafactor
from megatrain.optim.average import WeightAverage
from megatrain.optim.base import Optimizer, StateKind
from megatrain.optim.elementwise import SGD, AdamW, Lion
from megatrain.optim.muon import Muon
from megatrain.optim.plugins import ENTRY_POINT_GROUP, OptimizerError, available_optimizers, make_custom_optimizer
from megatrain.optim.testing import OptimizerSuite
from megatrain.optim.threads import KernelThreads

EXAMPLES = Path(__file__).parents[3] / "examples"
sys.path.insert(0, str(EXAMPLES / "extend"))

from signum import Signum  # noqa: E402  -- outside of the package, like a user's optimizer

ONE = KernelThreads(1)
MAKERS: dict[str, Any] = {
    "signum": Signum,
    "muon": lambda: Muon(AdamW(threads=ONE)),
    "muon, averaged": lambda: WeightAverage(Muon(AdamW(threads=ONE)), 0.9),
    "adamw, int8, averaged": lambda: WeightAverage(AdamW(threads=ONE, state_dtype="int8"), 0.9),
    "adafactor": lambda: Adafactor(threads=ONE),
    "adamw, bfloat16": lambda: AdamW(threads=ONE, state_dtype="bfloat16"),
    "adamw, int8": lambda: AdamW(threads=ONE, state_dtype="int8"),
    "lion": lambda: Lion(threads=ONE),
    "sgd": lambda: SGD(threads=ONE),
    "adamw": lambda: AdamW(threads=ONE),
}
TESTS = [name for name in vars(OptimizerSuite) if name.startswith("test_")]


def run_suite(make: Any) -> list[str]:
    """Run all tests of the suite; return the names of those that failed."""

    class Suite(OptimizerSuite):
        def make_optimizer(self) -> Optimizer:
            made: Optimizer = make()
            return made

    failed = []
    for name in TESTS:
        try:
            getattr(Suite(), name)()
        except Exception:
            failed.append(name)
    return failed


@pytest.mark.parametrize("name", MAKERS)
def test_every_optimizer_passes(name: str) -> None:
    assert len(TESTS) >= 9
    assert run_suite(MAKERS[name]) == []


class HiddenStateSignum(Signum):
    """Optimizer that keeps state outside of its blocks."""

    count = 0.0

    def update(self, blocks: Any, gradient: Any, segments: Any, update: Any) -> None:
        self.count += 1e-3
        super().update(blocks, gradient * (1 + self.count), segments, update)
        if segments:
            blocks["weight"][segments[0].stop - 1] += self.count


class OutOfSegmentSignum(Signum):
    """Optimizer that changes elements outside of its segments."""

    def update(self, blocks: Any, gradient: Any, segments: Any, update: Any) -> None:
        super().update(blocks, gradient, segments, update)
        blocks["weight"].mul_(0.5)


class Whole(Signum):
    """Optimizer that reads a whole parameter without declaring it."""

    def update(self, blocks: Any, gradient: Any, segments: Any, update: Any) -> None:
        for segment in segments:
            inside = slice(segment.start, segment.stop)
            blocks["weight"][inside] -= update.lr * segment.lr_scale * gradient[inside].float().norm()


class Unnamed(Signum):
    def state_kinds(self, split_master: bool) -> tuple[StateKind, ...]:
        return (StateKind("m", torch.float32), *super().state_kinds(split_master))


@pytest.mark.parametrize(
    ("kind", "found"),
    [
        (HiddenStateSignum, "test_optimizer_object_has_no_state"),
        (OutOfSegmentSignum, "test_update_learns_and_leaves_padding_unchanged"),
        (Whole, "test_partwise_update_is_bitwise_equal"),
        (Unnamed, "test_optimizer_implements_the_protocol"),
    ],
)
def test_suite_finds_contract_violations(kind: Any, found: str) -> None:
    assert found in run_suite(kind)


@pytest.fixture
def installed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Imitate an installed package with entry points for optimizers."""
    info = tmp_path / "site" / "signs-1.2.dist-info"
    info.mkdir(parents=True)
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: signs\nVersion: 1.2\n")
    lines = ("signum = signum:Signum", "none = signum:nothing", "number = builtins:int", f"order = {__name__}:Unnamed")
    (info / "entry_points.txt").write_text("\n".join([f"[{ENTRY_POINT_GROUP}]", *lines]) + "\n")
    monkeypatch.syspath_prepend(str(tmp_path / "site"))


def test_optimizer_mistakes_have_clear_errors(installed: None) -> None:
    assert set(available_optimizers()) >= {"none", "number", "order", "signum"}
    for name, arguments, message in (
        (
            "signun",
            {},
            ": no installed package has an optimizer with this name. Available: none, number, order, signum",
        ),
        ("none", {}, r" from package 'signs' 1.2 \(signum:nothing\) cannot be imported: AttributeError: .*Install its"),
        ("number", {}, r" from package 'signs' 1.2 \(builtins:int\) is a int, not a .*OptimizerSuite"),
        ("order", {}, r" from .*:Unnamed\): its kinds of state are m, .*; weight and low must come first, and names"),
        ("signum", {"momentums": 1}, " from .* rejects optimizer.optim_args: TypeError: .*momentums"),
        ("signum", {"momentum": 2}, " from .* rejects optimizer.optim_args: ValueError: momentum = 2"),
    ):
        message = f'optimizer.custom_optimizer = "{name}"{message}'
        with pytest.raises(OptimizerError, match=message):
            make_custom_optimizer(name, arguments)
    assert isinstance(make_custom_optimizer("signum", {"momentum": 0.5}), Signum)
