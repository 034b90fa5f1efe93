"""In tiers of minimum size, the real traffic equals the planned traffic, however long transfers and ticks take."""

from __future__ import annotations

import json
import os
import random
import re
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from megatrain.base import layout as layouts
from megatrain.base.layout import PART_ALIGNMENT_ELEMENTS
from megatrain.base.observer import RunInfo, RunObserver
from megatrain.config import load_config
from megatrain.engine.tape.tape import compile_step
from megatrain.plan import simulate
from megatrain.plan.plan import Plan
from megatrain.plan.shortfall import DoesNotFitError
from megatrain.training.trainer import Trainer
from oracles import tiered_run
from oracles.families import tiny_config
from oracles.tiered_run import (
    QUICKSTART,
    add_tokenizer,
    config_text,
    force_passing,
    plan_of,
    run_config,
    write_tiny_model,
)
from tiered import Transfer
from tiered.ext import SimulatedChannel
from tiered.links.base import Workers
from tiered.simulation import SimulatedLink

NUM_STEPS = 4
#: Scales of random durations in virtual seconds. Any transfer or tick may be the slowest.
SCALES = (0.0, 1e-5, 1e-4, 1e-3, 1e-2)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the folders of a dense model and of a mixture of experts, by kind."""
    dense = write_tiny_model(tmp_path_factory.mktemp("dense"))
    return {"dense": dense, "mixture": write_family(tmp_path_factory.mktemp("mixture"), "qwen3_moe")}


def write_family(folder: Path, model_type: str) -> Path:
    """Write a tiny model of a family with the quickstart's tokenizer, and return its folder."""
    config = tiny_config(model_type)
    config.vocab_size = AutoConfig.from_pretrained(QUICKSTART).vocab_size
    torch.manual_seed(7)
    AutoModelForCausalLM.from_config(config, dtype=torch.float32).save_pretrained(folder)
    return add_tokenizer(folder)


def plan_with(folder: Path, model: Path, ram: int, **tables: Any) -> Plan:
    folder.mkdir(exist_ok=True)
    path = folder / "plan.toml"
    path.write_text(config_text(folder, model, ram=f"{ram}B", **tables))
    return plan_of(load_config(path).config)


def least_bytes(tier: str, plan: Callable[[], object]) -> int:
    """Return the minimum size of a tier in bytes, from the error of a plan that gives the tier almost no memory."""
    with pytest.raises(DoesNotFitError) as refused:
        plan()
    found = re.search(rf"tier '{tier}' has .* needs at least (\d+) ", str(refused.value))
    assert found is not None, refused.value
    return int(found[1])


def tight_gpu(folder: Path, model: Path, share: float, **tables: Any) -> str:
    return f"{int(share * least_bytes('gpu', lambda: plan_with(folder, model, 64 << 20, gpu='4KiB', **tables)))}B"


class UnevenChannel(SimulatedChannel):
    """Channel whose concurrent transfers take random times and end in any order."""

    random = random.Random()

    def submit(self, link: SimulatedLink, transfer: Transfer) -> None:
        def end() -> None:
            link.num_bytes += transfer.nbytes
            transfer.finish()

        self._clock.at(self._clock.now_s + self.random.choice(SCALES) * self.random.random(), end)


def replayed(plan: Plan, seed: int, monkeypatch: pytest.MonkeyPatch) -> tuple[dict[str, int], int]:
    """Replay a run with random durations of transfers and ticks. Return bytes by link, and wasted fetches.

    Tiers, links and time are simulated; the store and its prefetcher are real.
    """
    chance = random.Random(seed)
    monkeypatch.setattr(UnevenChannel, "random", chance)
    monkeypatch.setattr(simulate, "SimulatedChannel", UnevenChannel)
    monkeypatch.setattr(simulate, "_NUM_STEPS", NUM_STEPS - 1 - simulate._NUM_WARM_STEPS)
    replay = simulate._Replay(plan, 1, simulate.SimulatedRates(1e9, 1e9, 1e9))
    monkeypatch.setattr(replay, "_seconds", lambda op: chance.choice(SCALES) * chance.random())
    before = replay.store.stats()
    for number in range(NUM_STEPS):
        replay.step(number)
    program, placement = plan.program, plan.placement
    last = compile_step(program, placement.homes, placement.stays, passes=False, pinned=replay._pinned)
    for op in last.ops:
        replay.store.advance(NUM_STEPS * len(program.ticks) + op.tick)
        replay._run(op)
    replay._copies.evict_pinned()
    replay.store.wait_idle()
    window = replay.store.stats() - before
    return {name: link.num_bytes for name, link in window.links.items()}, window.prefetch_wasted


@pytest.mark.parametrize("max_grad_norm", [1, 0], ids=["clipped", "not clipped"])
@pytest.mark.parametrize("share_of_gpu", [1.0, 1.5, None], ids=["least GPU", "more GPU", "no GPU"])
def test_planned_traffic_is_exact_at_any_link_speed(
    share_of_gpu: float | None,
    max_grad_norm: int,
    models: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Some runs would move fewer or more bytes if the store had no rule for copies whose write-back waits for space."""
    tables: dict[str, Any] = {"optimizer": f"max_grad_norm = {max_grad_norm}"}
    model = models["dense"]
    if share_of_gpu is not None:
        tables["gpu"] = tight_gpu(tmp_path, model, share_of_gpu, **tables)
    least = least_bytes("ram", lambda: plan_with(tmp_path, model, 4 << 10, **tables))
    for share in (1.0, 1.1, 1.2):
        plan = plan_with(tmp_path, model, int(share * least), **tables)
        planned = plan.placement.run_traffic_bytes(NUM_STEPS)
        for seed in range(8):
            assert replayed(plan, seed, monkeypatch) == (planned, 0), (share, seed)


@pytest.fixture
def delayed_links(monkeypatch: pytest.MonkeyPatch) -> None:
    """Delay each job of the links by a random time."""
    submit, chance = Workers.submit, random.Random(5)

    def submit_late(self: Workers, job: Callable[[], None], *, urgent: bool = True) -> None:
        wait_s = chance.choice((0, 0, 0.001, 0.005))

        def late() -> None:
            time.sleep(wait_s)
            job()

        submit(self, late, urgent=urgent)

    monkeypatch.setattr(Workers, "submit", submit_late)


@pytest.mark.parametrize("kind", ["mixture", "dense"])
@pytest.mark.parametrize("has_gpu", [True, False])
def test_delayed_links_do_not_change_results_or_traffic(
    has_gpu: bool, kind: str, models: dict[str, Path], tmp_path: Path, delayed_links: None
) -> None:
    tables = {"gpu": tight_gpu(tmp_path, models[kind], 1.0)} if has_gpu else {}
    least = least_bytes("ram", lambda: plan_with(tmp_path, models[kind], 4 << 10, **tables))
    for number, share in enumerate((1.0, 1.0, 1.1)):
        text = config_text(tmp_path, models[kind], ram=f"{int(share * least)}B", **tables)
        run_config(text, tmp_path / str(number), num_steps=3).assert_as_planned()


@pytest.mark.slow
@pytest.mark.parametrize("has_gpu", [True, False])
def test_each_step_reports_the_bytes_it_uses(
    has_gpu: bool, models: dict[str, Path], tmp_path: Path, delayed_links: None
) -> None:
    """Copies for the next step may arrive before or after a step's end. They count in the step that uses them."""
    tables = {"gpu": tight_gpu(tmp_path, models["dense"], 1.0)} if has_gpu else {}
    least = least_bytes("ram", lambda: plan_with(tmp_path, models["dense"], 4 << 10, **tables))
    text = config_text(tmp_path, models["dense"], ram=f"{least}B", **tables)
    (tmp_path / "run.toml").write_text(text.replace("[training]", "[training]\nmax_steps = 8"))
    trainer = Trainer(load_config(tmp_path / "run.toml").config)
    summary = trainer.train()
    placement = trainer.plan.placement
    assert summary.link_bytes == placement.run_traffic_bytes(8)
    lines = (json.loads(line) for line in (tmp_path / "out/metrics.jsonl").read_text().splitlines())
    steps = [line["link_bytes"] for line in lines if "loss" in line and "link_bytes" in line]
    assert len(steps) == 8
    assert steps[1:] == [trainer.plan.traffic] * 7


def test_pending_writes_from_loading_are_not_counted_in_the_run(
    models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second run holds back its last write of a loaded block until the run has started."""
    least = least_bytes("ram", lambda: plan_with(tmp_path, models["dense"], 4 << 10))
    num_jobs, num_loading_jobs, has_started = 0, 0, threading.Event()
    submit = Workers.submit

    class Starts(RunObserver):
        def on_start(self, info: RunInfo) -> None:
            nonlocal num_loading_jobs
            num_loading_jobs = num_loading_jobs or num_jobs
            threading.Timer(0.05, has_started.set).start()

    def submit_late(self: Workers, job: Callable[[], None], *, urgent: bool = True) -> None:
        nonlocal num_jobs
        num_jobs += 1
        is_held = num_jobs == num_loading_jobs
        submit(self, lambda: (has_started.wait(30) if is_held else None, job())[1], urgent=urgent)

    monkeypatch.setattr(Workers, "submit", submit_late)
    for folder in (tmp_path / "first", tmp_path / "second"):
        folder.mkdir()
        text = config_text(folder, models["dense"], ram=f"{least}B")
        (folder / "run.toml").write_text(text.replace("[training]", "[training]\nmax_steps = 1"))
        num_jobs = 0
        has_started.clear()
        trainer = Trainer(load_config(folder / "run.toml").config, observer=Starts())
        assert trainer.train().link_bytes == trainer.plan.placement.run_traffic_bytes(1)
    assert 0 < num_loading_jobs < num_jobs


@pytest.mark.slow
def test_traffic_between_checkpoints_is_planned(models: dict[str, Path], tmp_path: Path, delayed_links: None) -> None:
    """Steps between two checkpoints are planned like a run: no fetch overtakes the updates before a checkpoint."""
    least = least_bytes("ram", lambda: plan_with(tmp_path, models["dense"], 4 << 10))
    for number in range(2):
        folder = tmp_path / str(number)
        folder.mkdir()
        text = config_text(folder, models["dense"], ram=f"{least}B").replace("[training]", "[training]\nmax_steps = 6")
        path = folder / "run.toml"
        path.write_text(f"{text}\n[checkpoint]\nsave_steps = 2\n")
        trainer = Trainer(load_config(path).config)
        summary = trainer.train()
        planned = trainer.plan.placement.run_traffic_bytes(2)
        assert summary.link_bytes == {link: 3 * nbytes for link, nbytes in planned.items()}


@pytest.mark.parametrize("passes", [False, True], ids=["whole", "by part"])
def test_unlabeled_micro_batches_move_the_planned_bytes(
    passes: bool, models: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Micro-batches run one at a time, and one has no labels. The weights for its backward are still leased."""
    make_loader = tiered_run.make_loader

    def without_labels(config: Any, plan: Plan) -> Any:
        for number, batch in enumerate(make_loader(config, plan)):
            batch.micro_batches[number % 3]["labels"].fill_(-100)
            yield batch

    monkeypatch.setattr(tiered_run, "make_loader", without_labels)
    tables = {"advanced": 'micro_batch_order = "micro_batch"'}
    if passes:
        monkeypatch.setattr(layouts, "PART_ELEMENTS", PART_ALIGNMENT_ELEMENTS)
    with force_passing(passes):
        tables["gpu"] = tight_gpu(tmp_path, models["dense"], 1.0, **tables)
        run = run_config(config_text(tmp_path, models["dense"], **tables), tmp_path, num_steps=3)
    assert bool(run.plan.program.cuts.passing) == passes
    run.assert_as_planned()


@pytest.mark.slow
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("model_type", ["llama", "qwen3_moe", "gemma2", "gpt_oss", "deepseek_v3"])
def test_delayed_threads_do_not_change_results_or_traffic(
    model_type: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each seed delays jobs of links, updates and readers differently. Traffic and results stay the same.

    ``MEGATRAIN_TIER_LATE_SEEDS`` is the number of seeds, and ``MEGATRAIN_TIER_LATE_SEED`` is the first one. Half of
    the runs have a GPU tier.
    """
    chance = random.Random()

    def late(job: Callable[..., Any]) -> Callable[..., Any]:
        wait_s = chance.choice((0, 0, 0.001, 0.005, 0.02))

        def act(*args: Any, **options: Any) -> Any:
            time.sleep(wait_s)
            return job(*args, **options)

        return act

    submit, submit_to_pool = Workers.submit, ThreadPoolExecutor.submit

    def submit_late(self: Workers, job: Callable[[], None], *, urgent: bool = True) -> None:
        submit(self, late(job), urgent=urgent)

    def submit_to_pool_late(
        self: ThreadPoolExecutor, job: Callable[..., Any], /, *args: Any, **options: Any
    ) -> Future[Any]:
        return submit_to_pool(self, late(job), *args, **options)

    model = write_family(tmp_path / "model", model_type)
    cases = []
    for tables in ({}, {"gpu": tight_gpu(tmp_path, model, 1.0)}):
        least = least_bytes("ram", lambda tables=tables: plan_with(tmp_path, model, 4 << 10, **tables))  # type: ignore[misc]
        cases.append(config_text(tmp_path, model, ram=f"{least}B", **tables))
    monkeypatch.setattr(Workers, "submit", submit_late)
    monkeypatch.setattr(ThreadPoolExecutor, "submit", submit_to_pool_late)
    first = int(os.environ.get("MEGATRAIN_TIER_LATE_SEED", "1"))
    expected: tiered_run.TieredRun | None = None
    for seed in range(first, first + int(os.environ.get("MEGATRAIN_TIER_LATE_SEEDS", "4"))):
        chance.seed(seed)
        run = run_config(cases[seed % 2], tmp_path / str(seed), num_steps=3)
        run.assert_as_planned()
        expected = expected or run
        run.assert_same(expected)
        print(f"{model_type}, seed {seed}, {'a GPU tier' if seed % 2 else 'no GPU tier'}: as planned", flush=True)
