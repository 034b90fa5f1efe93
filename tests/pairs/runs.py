"""Runs rows of levels to the end, in one process or on several ranks, and records metrics, traffic and exports."""

from __future__ import annotations

import gc
import hashlib
import pickle
import shutil
import traceback
import warnings
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor

from fakes.gpu_run import virtual_gpu
from fakes.liger_packages import stand_in_liger
from fakes.objects_tier import objects_tier
from megatrain.base import layout as layouts
from megatrain.base.layout import PART_ALIGNMENT_ELEMENTS, views
from megatrain.base.observer import EvaluationMetrics, StepMetrics
from megatrain.config import load_config
from megatrain.config.schema import RunConfig
from megatrain.converters import experts as model_experts
from megatrain.extras.scoring import Scorer
from megatrain.plan.shortfall import DoesNotFitError
from megatrain.ranks.group import RankGroup
from megatrain.tasks.evaluation import count_pass_traffic
from megatrain.training import trainer
from megatrain.training.final import FinalExport
from megatrain.training.training_loop import TrainingLoop
from oracles.whole_run import RunRecorder
from pairs.configs import AMPLE, LENGTH, OBJECTS_FOLDER, WORLDS, Config, config_of, keep_all_blocks_on_device, to_text
from pairs.factors import Row
from pairs.places import Place
from processes import pair_rank
from processes.ranks import finish_ranks, start_ranks
from tiered import TieredStore
from tiered.units import parse_size

#: Maximum number of attempts to find a sufficient tier size. One requirement can hide another, so one may not suffice.
_MOST_TRIES = 12
TIMEOUT_S = 600.0


@dataclass
class RankEnd:
    """Observations of one process in a run.

    Attributes:
        steps: Metrics of each step, by number.
        evaluations: Metrics of the evaluations, in order.
        moved: Bytes moved between tiers and between ranks since the first step, by link.
        planned: Planned bytes of the same transfers, by link.
        wasted: Number of prefetched copies that were dropped unused, and number of accesses outside the schedule.
        tiers: Tier name -> (bytes of the blocks whose home is the tier, peak bytes, capacity in bytes).
        weights: Exported fp32 weights by name. Empty if there are several ranks.
        needs: Required bytes of each tier that was too small. If a tier was too small, all other fields are empty.
        interrupted: Whether a signal ended the run.
        num_commits: Number of checkpoints that began.
    """

    steps: dict[int, StepMetrics] = field(default_factory=dict)
    evaluations: list[EvaluationMetrics] = field(default_factory=list)
    moved: dict[str, int] = field(default_factory=dict)
    planned: dict[str, int] = field(default_factory=dict)
    wasted: tuple[int, int] = (0, 0)
    tiers: dict[str, tuple[int, int, int]] = field(default_factory=dict)
    weights: dict[str, Tensor] = field(default_factory=dict)
    needs: dict[str, int] = field(default_factory=dict)
    interrupted: bool = False
    num_commits: int = 0


@dataclass
class Run:
    """Finished run with one or two starts.

    Attributes:
        folder: Folder of the run.
        starts: Observations of each start's processes.
        config: Config of the first start.
    """

    folder: Path
    config: Config
    starts: list[list[RankEnd]] = field(default_factory=list)

    @property
    def bits(self) -> list[tuple[Any, ...]]:
        """For every step, the metrics that must not depend on placement."""
        steps = {number: step for start in self.starts for number, step in start[0].steps.items()}
        return [
            (n, s.loss, s.grad_norm, s.lr, s.num_real_tokens, s.num_trained_tokens, dict(s.preferences))
            for n, s in sorted(steps.items())
        ]

    @property
    def steps(self) -> list[StepMetrics]:
        """Metrics of all steps, as reported by rank 0."""
        return [step for start in self.starts for step in start[0].steps.values()]

    @property
    def evaluations(self) -> list[tuple[Any, ...]]:
        """For every evaluation, the metrics that must not depend on placement."""
        found = [each for start in self.starts for each in start[0].evaluations]
        return [(e.step, e.name, e.loss, e.num_tokens, dict(e.preferences), tuple(e.samples)) for e in found]

    @property
    def exported(self) -> Path:
        """Folder of the exported model."""
        return self.folder / "out" / "final"

    @property
    def exported_bits(self) -> dict[str, str]:
        """Digests of the exported weight files."""
        files = sorted(self.exported.glob("*.safetensors"))
        return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files}


class WatchedLoop(TrainingLoop):
    """Training loop that records its actual and its planned traffic.

    Args:
        end: Record to fill.
    """

    def __init__(self, *arguments: Any, end: RankEnd) -> None:
        super().__init__(*arguments)
        self._end, self._stretches, self._num_since = end, Counter[int](), 0

    def train_step(self, *arguments: Any) -> None:
        super().train_step(*arguments)
        self._num_since += 1

    def _schedule_to_next_stop(self) -> None:
        """Start a new stretch of steps, whose planned traffic is computed as for a separate run."""
        self._cut()
        super()._schedule_to_next_stop()

    def _cut(self) -> None:
        self._stretches[self._num_since] += 1
        self._num_since = 0

    def _summary(self, moved: Any, link_bytes: Mapping[str, int], **options: Any) -> Any:
        self._cut()
        end, planned, prepared = self._end, Counter[str](), self.parts.preparation
        settings, sets = prepared.settings.evaluation, prepared.evaluation_sets
        for num_steps, times in self._stretches.items():
            for link, nbytes in prepared.plan.placement.run_traffic_bytes(num_steps).items() if num_steps else ():
                planned[link] += times * nbytes
        num_passes = sum(each.num_passes for each in sets)
        for weights, plan in prepared.evaluation_plans.items():
            names = [settings.evaluation_name(each.name, weights) for each in sets]
            times = len({(each.step, each.name) for each in end.evaluations if each.name in names})
            planned.update({link: times * each for link, each in count_pass_traffic(plan, num_passes).items()})
        for sampler in prepared.samplers.values():
            planned.update(sampler.planned_bytes)
        planned.update({link: end.num_commits * each for link, each in prepared.plan.checkpoint.traffic.items()})
        end.planned = dict(planned)
        end.moved = dict(link_bytes)
        end.wasted = (moved.prefetch_wasted, moved.schedule_misses)
        for name, tier in moved.tiers.items():
            held = sum(prepared.plan.placement.home_bytes[name].values())
            end.tiers[name] = held, tier.high_water_bytes, tier.capacity_bytes
        assert {name: capacity for name, (_, _, capacity) in end.tiers.items()} == dict(prepared.plan.budgets)
        return super()._summary(moved, link_bytes, **options)

    def export(self) -> Path:
        """Record the weights when the export starts, after all updates and before the store closes."""
        real = FinalExport.write

        def write(export: FinalExport, *arguments: Any) -> Path:
            if self.parts.preparation.group.world.is_single:
                for layout in self.parts.preparation.plan.graph.layouts.values():
                    with export.weights.master(layout) as read:
                        self._end.weights.update(views(read(0, layout.num_elements).clone(), layout))
            return real(export, *arguments)

        with mock.patch.object(FinalExport, "write", write):
            return super().export()


def train_here(path: Path, cut: str, stop_after: int | None, group: RankGroup | None = None) -> RankEnd:
    """Train in this process, as a rank of a group or alone.

    Args:
        path: Config file.
        cut: Level of the factor "cut".
        stop_after: Step after which the run stops, or None.
        group: Group of the ranks, or None for a single process.
    """
    end, failed, config = RankEnd(), "", load_config(path).config
    with ExitStack() as stack:
        if cut == "parts":
            stack.enter_context(mock.patch.object(layouts, "PART_ELEMENTS", PART_ALIGNMENT_ELEMENTS))
        elif cut == "experts":
            stack.enter_context(mock.patch.object(model_experts, "EXPERTS_ELEMENTS", 1))
        if config.device == "cuda":
            # Without a GPU tier, the GPU shares the host's memory.
            stack.enter_context(virtual_gpu(is_integrated=config.tiers.gpu.size.is_auto))
        if config.tiers.nvme and (objects := path.parent / OBJECTS_FOLDER).exists():
            stack.enter_context(objects_tier(objects.as_uri(), parse_size(AMPLE)))
        if config.model.use_liger_kernel is True:
            stack.enter_context(stand_in_liger())
        if config.model.compile:
            stack.enter_context(new_compiler())
        stack.enter_context(count_commits(end))
        try:
            _train(config, end, stop_after, group)
        except DoesNotFitError as error:
            end.needs[error.tier] = error.need_bytes
        except Exception:
            failed = traceback.format_exc()
        gc.collect()  # free the memory of a failed run while its device still exists
    assert not failed, failed
    return end


@contextmanager
def count_commits(end: RankEnd) -> Iterator[None]:
    """Count the checkpoints of a run."""
    commit = TieredStore.commit

    def counted(*arguments: Any, **options: Any) -> Any:
        end.num_commits += 1
        return commit(*arguments, **options)

    with mock.patch.object(TieredStore, "commit", counted):
        yield


@contextmanager
def new_compiler() -> Iterator[None]:
    """Let ``torch.compile`` start without compiled code from other runs, and restore a setting that it changes."""
    import torch._dynamo as dynamo

    validates = torch.distributions.Distribution._validate_args
    dynamo.reset()
    yield
    dynamo.reset()
    torch.distributions.Distribution._validate_args = validates


def _train(config: RunConfig, end: RankEnd, stop_after: int | None, group: RankGroup | None) -> None:
    told = RunRecorder(stop_after)
    end.evaluations = told.evaluations
    with mock.patch.object(trainer, "TrainingLoop", partial(WatchedLoop, end=end)):
        end.interrupted = trainer.Trainer(config, observer=told, group=group).train().interrupted
    end.steps = {metrics.step: metrics for metrics in told.steps}


def train_ranks(path: Path, cut: str, stop_after: int | None, size: int, num_hosts: int) -> list[RankEnd]:
    """Train in several processes with torchrun's environment variables. Return the observations of each process."""
    folder = path.parent / f"ranks-{path.stem}-{stop_after}"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    hosts = [path.parent / f"host{rank * num_hosts // size}" for rank in range(size)]
    for host in hosts:
        host.mkdir(exist_ok=True)
    words = [pair_rank.__file__, path, cut, stop_after or 0, folder]
    ended = finish_ranks(
        start_ranks([words] * size, num_hosts=num_hosts, folders=hosts, GLOO_SOCKET_IFNAME="lo"), TIMEOUT_S
    )
    ends = [pickle.loads(file.read_bytes()) for file in sorted(folder.glob("*.pickle"))]
    needs = next((end for end in ends if end.needs), None)
    assert needs is not None or len(ends) == size, ended
    return ends if needs is None else [needs]


def train(row: Row, place: Place, folder: Path, *, stop_after: int | None = None, is_plain: bool = False) -> Run:
    """Run a row to the end. With ``stop_after``, stop after this step, then resume as ``row["checkpoints"]`` says."""
    folder.mkdir(parents=True)
    config = config_of(row, place, folder, is_plain=is_plain)
    if row["task"] == "distill":
        score(row, place, folder.parent / "scores")
    run = Run(folder, config)
    run.starts.append(_start(run, "first", config, row, stop_after))
    if stop_after is None:
        return run
    assert all(end.interrupted for end in run.starts[0])
    if row["checkpoints"] in ("copied", "away"):
        for drive in [*folder.glob("drive*"), *folder.glob("host*/drive*")]:
            shutil.rmtree(drive)
    if row["checkpoints"] == "away":  # also lose the machine's files
        shutil.rmtree(run.folder / "out")
    if row["checkpoints"] == "moved":
        # A single process cannot read the drives of other hosts.
        stays = WORLDS[row["ranks"]][1] > 1 and "nvme" in config["tiers"]
        row, config = row if stays else {**row, "ranks": "alone"}, keep_all_blocks_on_device(config)
    run.starts.append(_start(run, "second", config, row, None))
    return run


def _start(run: Run, name: str, config: Config, row: Row, stop_after: int | None) -> list[RankEnd]:
    """Start a run, and repeat with larger tiers until the run fits."""
    path, (size, num_hosts) = run.folder / f"{name}.toml", WORLDS[row["ranks"]]
    for _ in range(_MOST_TRIES):
        path.write_text(to_text(config))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # ignore deprecation warnings of packages
            if size == 1:
                ends = [train_here(path, row["cut"], stop_after)]
            else:
                ends = train_ranks(path, row["cut"], stop_after, size, num_hosts)
        if not ends[0].needs:
            return ends
        for tier, nbytes in ends[0].needs.items():
            config["tiers"][tier]["size"] = f"{nbytes * (size // num_hosts)}B"
    raise AssertionError(f"it never fits: {ends[0].needs}")


def score(row: Row, place: Place, folder: Path) -> None:
    """Score the training data of a run with a teacher, unless the folder with the scores exists."""
    if folder.exists():
        return
    folder.mkdir(parents=True)
    config = {
        "task": "sft",
        "output_dir": str(folder),
        "device": "cpu",
        "model": {"model_name_or_path": str(place.teacher(row["model"]))},
        "precision": {"compute_dtype": "float32"},
        "data": {"max_length": LENGTH, "cache_dir": "none", "train": [{"path": str(place.data("sft")[0])}]},
        "score": {"top_k": 8, "temperature": 2.0},
        "tiers": {"ram": {"size": "64MiB"}},
    }
    path = folder.parent / "score.toml"
    path.write_text(to_text(config))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        Scorer(load_config(path).config).run()
