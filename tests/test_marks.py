"""The selection of the tests that run without `-m slow`: cases of long matrices, and costly tests of a day."""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from conftest import COSTLY, DAYS, FEWEST, SHARE, mark_costly_tests, mark_long_matrices


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


def test_each_costly_test_runs_on_one_of_the_days() -> None:
    names, other = COSTLY.read_text(encoding="utf-8").splitlines(), "tests/test_it.py::test_it"
    days = []
    for day in range(739_000, 739_000 + DAYS):
        items = [_Item(nodeid=name, marks=[]) for name in (*names, other)]
        mark_costly_tests(items, day)  # type: ignore[arg-type]
        days.append([item.nodeid for item in items if "slow" not in item.marks])
    assert sorted(itertools.chain(*days)) == sorted([*names, *DAYS * [other]])
    assert max(map(len, days)) - min(map(len, days)) <= 1


def test_costly_tests_exist() -> None:
    """A renamed test would silently run every day."""
    names = COSTLY.read_text(encoding="utf-8").splitlines()
    assert names == sorted(set(names))
    for name in names:
        file, _, test = name.partition("::")
        words = test.partition("[")[0].split("::")
        assert words[0] in (Path(__file__).parents[1] / file).read_text(encoding="utf-8"), name
