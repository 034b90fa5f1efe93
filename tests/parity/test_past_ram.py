"""Runs that move blocks directly between drives and emulated GPU memory, instead of through RAM.

Everything except the device is real: plans, working sets, prefetching, routes and files. Results must be bit-identical
to a run in RAM, traffic must be as planned, and less RAM must be needed.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatrain.config import ConfigError, load_config
from megatrain.machine import this_machine
from megatrain.plan.plan import Plan
from megatrain.plan.planner import plan_run
from megatrain.plan.shortfall import DoesNotFitError
from megatrain.plan.show import messages
from megatrain.plan.simulate import SimulatedRates, simulate_step
from megatrain.training.resolve import resolve, resolve_tiers
from oracles.tiered_run import TieredRun, config_text, run_config
from tiered.links.probe import KvikioProbe

NUM_STEPS = 3
ALL_NVME = 'weights = ["nvme"]\ngradients = ["nvme"]\noptimizer = ["nvme"]\nactivations = ["nvme"]'
ON = 'direct = "on"'
FROZEN = 'freeze = ["model.embed_tokens.*", "model.layers.[123].*"]'

Baseline = Callable[..., TieredRun]


def text_of(folder: Path, model: Path, *, frozen: bool = False, **tables: Any) -> str:
    text = config_text(folder, model, **tables)
    return text.replace("[data]", f"{FROZEN}\n[data]", 1) if frozen else text


def plan_of(folder: Path, model: Path, **tables: Any) -> Plan:
    folder.mkdir(exist_ok=True)
    (folder / "plan.toml").write_text(text_of(folder, model, **tables))
    return plan_run(resolve(load_config(folder / "plan.toml").config))


def smallest_ram(folder: Path, model: Path, **tables: Any) -> int:
    """Return the smallest RAM size that the planner accepts, in bytes."""
    nbytes = 4096
    for _ in range(8):
        try:
            plan_of(folder, model, ram=f"{nbytes}B", **tables)
            return nbytes
        except DoesNotFitError as error:
            nbytes = error.need_bytes
    raise AssertionError("no end")


def bytes_by_link(run: TieredRun) -> dict[str, int]:
    assert run.moved is not None
    return {link: stats.num_bytes for link, stats in run.moved.links.items() if stats.num_bytes}


@pytest.fixture(scope="module")
def baseline(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Baseline:
    """Return a function that trains with the given tables and everything in RAM, and caches the results."""
    known: dict[str, TieredRun] = {}

    def find(**tables: Any) -> TieredRun:
        name = repr(sorted(tables.items()))
        if name not in known:
            folder = tmp_path_factory.mktemp("baseline")
            known[name] = run_config(text_of(folder, tiny_model, nvme=0, **tables), folder, num_steps=NUM_STEPS)
        return known[name]

    return find


@pytest.mark.parametrize("nvme", [1, 2])
@pytest.mark.parametrize("gpu", ["6MiB", "9MiB", "16MiB"])
@pytest.mark.parametrize("placement", ["", ALL_NVME], ids=["free", "all on drives"])
def test_direct_copies_are_bitwise_equal_and_match_the_plan(
    placement: str, gpu: str, nvme: int, tiny_model: Path, tmp_path: Path, baseline: Baseline
) -> None:
    tables: dict[str, Any] = {"gpu": gpu, "ram": "7MiB", "nvme": nvme, "placement": placement, "tiers": ON}
    result = run_config(text_of(tmp_path, tiny_model, **tables), tmp_path, num_steps=NUM_STEPS)
    result.assert_same(baseline())
    result.assert_as_planned()
    if placement:
        moved = bytes_by_link(result)
        assert {"nvme->gpu", "gpu->nvme", "nvme->ram", "ram->nvme"} == set(moved), "RAM is only for the updates"


@pytest.mark.parametrize(
    "tables",
    [
        {"precision": 'compute_dtype = "bfloat16"\ngrad_dtype = "bfloat16"'},
        {"advanced": 'micro_batch_order = "micro_batch"'},
        {"optimizer": 'max_grad_norm = 0\nnonfinite = "ignore"'},
        {"advanced": "prefetch = 0"},
        {"advanced": 'prefetch = "unlimited"'},
        {"advanced": 'eviction_policy = "lru"'},
        {"frozen": True},
    ],
    ids=["bf16", "micro-batches", "updates at once", "no prefetch", "all prefetch", "lru", "frozen"],
)
def test_direct_copies_work_for_any_step_order(
    tables: dict[str, Any], tiny_model: Path, tmp_path: Path, baseline: Baseline
) -> None:
    given = {"gpu": "12MiB", "ram": "7MiB", "placement": ALL_NVME, "tiers": ON, **tables}
    result = run_config(text_of(tmp_path, tiny_model, **given), tmp_path, num_steps=NUM_STEPS)
    result.assert_same(baseline(**tables))
    result.assert_as_planned()
    assert bytes_by_link(result)["nvme->gpu"] > 0


def test_direct_copies_reduce_the_required_ram(tiny_model: Path, tmp_path: Path, baseline: Baseline) -> None:
    """Plain SGD has no state. Without direct copies, the backward therefore needs more RAM than an update does."""
    tables: dict[str, Any] = {"optimizer": 'optim = "sgd"\nsgd_momentum = 0.0'}
    given: dict[str, Any] = {"gpu": "9MiB", "placement": ALL_NVME, **tables}
    need = {way: smallest_ram(tmp_path / way, tiny_model, tiers=f'direct = "{way}"', **given) for way in ("off", "on")}
    assert 0.8 * need["off"] < need["on"] < need["off"]
    text = text_of(tmp_path / "on", tiny_model, ram=f"{need['on']}B", tiers=ON, **given)
    result = run_config(text, tmp_path / "on", num_steps=NUM_STEPS)
    result.assert_same(baseline(**tables))
    result.assert_as_planned()


@pytest.mark.slow
def test_direct_copies_reduce_ram_traffic(tiny_model: Path, tmp_path: Path, baseline: Baseline) -> None:
    passed = {}
    for way in ("off", "on"):
        (tmp_path / way).mkdir()
        tables: dict[str, Any] = {"gpu": "9MiB", "ram": "7MiB", "placement": ALL_NVME, "frozen": True}
        text = text_of(tmp_path / way, tiny_model, tiers=f'direct = "{way}"', **tables)
        result = run_config(text, tmp_path / way, num_steps=NUM_STEPS)
        result.assert_same(baseline(frozen=True))
        result.assert_as_planned()
        assert result.moved is not None
        passed[way] = sum(link.num_bytes for name, link in result.moved.links.items() if "ram" in name)
    # An update reads weights, gradients and two moments, and writes all but the gradients.
    of_moments = sum(block.nbytes for block in result.plan.program.blocks.values() if block.kind == "optimizer")
    assert passed["on"] == NUM_STEPS * 7 * of_moments // 2 < passed["off"]


def test_plan_and_replay_agree_on_direct_copies(tiny_model: Path, tmp_path: Path) -> None:
    plan = plan_of(tmp_path, tiny_model, gpu="9MiB", ram="7MiB", placement=ALL_NVME, tiers=ON)
    assert 0 < plan.traffic["gpu->nvme"] < plan.traffic["nvme->gpu"], "weights are only read"
    assert not plan.traffic["ram->gpu"] and not plan.traffic["gpu->ram"]
    assert "nvme->gpu, gpu->nvme: copies between drives and GPU memory bypass ram" in messages(plan)
    replayed = simulate_step(plan, 384, SimulatedRates(2e9, 1e12, 1e9))
    assert replayed.moved_bytes == plan.traffic
    usual = plan_of(tmp_path / "usual", tiny_model, gpu="9MiB", ram="7MiB", placement=ALL_NVME)
    assert "nvme->gpu" not in usual.traffic, "the stand-in for a GPU gets it only on request"


class TestProbe:
    """The probe decides whether drives and a device can copy directly. These tests replace it and set its answers."""

    @pytest.fixture(autouse=True)
    def _config(self, tmp_path: Path, tiny_model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.text = config_text(tmp_path, tiny_model, device="auto", tiers="TIERS")
        self.folder, self.asked, self.reason = tmp_path, list[Path](), ""
        this_machine._probe_once.cache_clear()
        monkeypatch.setattr(this_machine, "may_open_driver", lambda: True)
        monkeypatch.setattr(this_machine, "probe_kvikio", self._probe)

    def _probe(self, folder: Path) -> KvikioProbe:
        self.asked.append(folder)
        return KvikioProbe(reason=self.reason)

    def _decide(self, tiers: str) -> bool:
        (self.folder / "run.toml").write_text(self.text.replace("TIERS", tiers))
        config = load_config(self.folder / "run.toml").config
        return resolve_tiers(config).can_bypass_ram(torch.device("cuda"))

    def test_auto_uses_proven_direct_copies(self) -> None:
        assert self._decide("")
        assert self._decide(ON)
        assert self.asked == [self.folder], "probed once, in the nearest existing folder"

    def test_auto_uses_ram_for_unproven_direct_copies(self) -> None:
        self.reason = "kvikio moved the bytes through host memory"
        assert not self._decide("")
        with pytest.raises(ConfigError, match=f'"on", but GPUDirect Storage does not work on .*drive0: {self.reason}'):
            self._decide(ON)

    @pytest.mark.parametrize("tiers", ['direct = "off"', 'verify = "always"'])
    def test_disabled_direct_copies_are_not_probed(self, tiers: str) -> None:
        assert not self._decide(tiers)
        assert self.asked == []
