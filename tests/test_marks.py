"""The selection of the cases in long test matrices that run without `-m slow`."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import FEWEST, SHARE, mark_long_matrices


class _Item(SimpleNamespace):
    def get_closest_marker(self, name: str) -> Any:
        return name if name in self.marks else None

    def add_marker(self, mark: Any) -> None:
        self.marks.append(mark.name)


def test_virtual_and_real_gpu_cases_are_sampled_separately() -> None:
    """If both kinds were sampled together, a test with fewer than 17 cases would keep only its first case."""
    items = [
        _Item(nodeid=f"tests/gpu/test_it.py::test_it[{kind}-{number}]", marks=["gpu"] if kind == "real" else [])
        for number in range(FEWEST + 1)
        for kind in ("virtual", "real")
    ]
    mark_long_matrices(items)  # type: ignore[arg-type]
    left = [item for item in items if "slow" not in item.marks]
    assert [bool(item.get_closest_marker("gpu")) for item in left] == [False, True]
    assert SHARE > FEWEST and pytest.mark.slow.name == "slow"


@pytest.mark.parametrize(("folder", "keeps_pairs"), [("megatrain/engine", True), ("parity", False)])
def test_sampling_keeps_every_pair_of_options_except_in_whole_runs(folder: str, keeps_pairs: bool) -> None:
    items = [
        _Item(
            nodeid=f"tests/{folder}/test_it.py::test_it[{family}-{smoothing}-{z_loss}]",
            marks=[],
            callspec=SimpleNamespace(params={"family": family, "smoothing": smoothing, "z_loss": z_loss}),
        )
        for family in ("llama", "qwen2", "gemma2")
        for smoothing in (0.0, 0.1)
        for z_loss in (0.0, 1e-4)
    ]
    mark_long_matrices(items)  # type: ignore[arg-type]
    left = [item.callspec.params for item in items if "slow" not in item.marks]
    found = {(each["smoothing"], each["z_loss"]) for each in left}
    pairs = set(itertools.product((0.0, 0.1), (0.0, 1e-4)))
    assert found == (pairs if keeps_pairs else {(0.0, 0.0)})
    assert len(left) == len(found), "no more cases than the pairs need"
