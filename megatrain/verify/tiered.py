"""Tiered training of the small model: whole runs of the trainer, as ``run`` makes them, with each placement."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from megatrain.checkpoint.whereabouts import CHECKPOINTS_NAME
from megatrain.config.schema import RunConfig
from megatrain.engine.program import KINDS
from megatrain.plan.placement import DoesNotFitError
from megatrain.plan.planner import plan_run
from megatrain.run.metrics import RunObserver, StepMetrics
from megatrain.trainer import Trainer
from tiered import checksum, read_manifest

if TYPE_CHECKING:
    from megatrain.config.schema import OptimizerConfig
    from megatrain.data.loader import StepBatch
    from megatrain.models.small import SmallModel
    from megatrain.plan.plan import Plan

ROWS, MICRO_BATCHES, LENGTH = 2, 3, 64
_AMPLE = "auto"


@dataclass
class TieredRun:
    """What a run gave.

    Attributes:
        losses: one per step.
        grad_norms: one per step.
        weights: folder of the trained model.
        state: checksums by block of the last checkpoint: weights and optimizer state.
        files: by name, of the model.
        link_bytes: bytes moved by each link, over all starts of the run.
        planned_link_bytes: what the plan promised for them.
        high_water_bytes: peak bytes in use, by tier.
        capacity_bytes: capacity, by tier.
    """

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    weights: Path = Path()
    state: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    files: Mapping[str, str] = field(default_factory=dict)
    link_bytes: dict[str, int] = field(default_factory=dict)
    planned_link_bytes: dict[str, int] = field(default_factory=dict)
    high_water_bytes: Mapping[str, int] = field(default_factory=dict)
    capacity_bytes: Mapping[str, int] = field(default_factory=dict)

    @property
    def moved_bytes(self) -> int:
        """Bytes over all links."""
        return sum(self.link_bytes.values())


@dataclass(frozen=True, slots=True)
class Setting:
    """What all runs of one proof share.

    Attributes:
        given: the user's config, or defaults.
        model: the scaled-down copy.
        folder: for what the runs write.
        attention: implementation.
        device: "cpu" or "cuda".
        origin: name of what was copied, "" for the default.
        freeze: globs that the copy knows.
    """

    given: RunConfig
    model: SmallModel
    folder: Path
    attention: str
    device: str
    origin: str = ""
    freeze: Sequence[str] = ()


def make_config(
    setting: Setting,
    name: str,
    optimizer: OptimizerConfig,
    *,
    num_steps: int,
    compute_dtype: str = "float32",
    grad_dtype: str = "float32",
    drives: Sequence[Path] = (),
) -> RunConfig:
    """Return the config of one run.

    Args:
        name: of its folder.
        drives: folders for everything there is, with as little RAM as works; none: all in RAM.
    """
    given = setting.given
    values: dict[str, Any] = {
        "task": "pretrain",
        "output_dir": str(setting.folder / name),
        "seed": given.seed,
        "data_seed": given.data_seed,
        "device": setting.device,
        "model": {
            "model_name_or_path": str(setting.model.folder),
            "tokenizer_name_or_path": str(setting.model.tokenizer),
            "attn_implementation": setting.attention,
            "freeze": tuple(setting.freeze),
        },
        "precision": {"compute_dtype": compute_dtype, "grad_dtype": grad_dtype},
        "data": {
            "max_length": LENGTH,
            **given.data.model_dump(include={"packing"}, exclude_unset=True),
            "cache_dir": "none",
            "train": [{"path": str(setting.model.text), "format": "text"}],
        },
        "training": {
            "per_device_train_batch_size": ROWS,
            "gradient_accumulation_steps": MICRO_BATCHES,
            "max_steps": num_steps,
        },
        "optimizer": optimizer,
        "checkpoint": {"save_steps": 10**9, "min_free_disk": "0B", "save_on_signal": False},
        "export": {"dtype": "float32"},
        "logging": {"report_to": "none", "progress": "none"},
        "tiers": {
            "ram": {"size": _AMPLE},
            "on_disk_full": "error",
            "allow_tmpfs": True,  # the folders of a proof are gone at its end anyway
            "engine": given.tiers.engine,
            "direct": "off" if given.tiers.direct == "off" else "auto",  # one of the two runs has no drives
            "verify": given.tiers.verify,
        },
        "advanced": given.advanced.model_copy(update={"emulate_gpu": False}),  # all in RAM, against all on drives
    }
    if drives:
        values["placement"] = {kind: ("nvme",) for kind in KINDS}
        values["tiers"]["nvme"] = [{"path": str(path), "size": _AMPLE} for path in drives]
        return _with_little_ram(values)
    return RunConfig.model_validate(values)


def _with_little_ram(values: dict[str, Any]) -> RunConfig:
    """Return the config with the smallest RAM tier that the plan accepts, so that copies must come and go."""
    values["tiers"]["ram"] = {"size": "4KiB"}
    for _ in range(8):  # what a plan needs may grow with its workspace, once
        config = RunConfig.model_validate(values)
        try:
            plan_run(config)
        except DoesNotFitError as error:
            if error.tier != "ram":
                raise
            values["tiers"]["ram"] = {"size": f"{error.need_bytes}B"}
        else:
            return config
    return RunConfig.model_validate({**values, "tiers": {**values["tiers"], "ram": {"size": _AMPLE}}})


class _Listener(RunObserver):
    """Keeps what a run says of each step."""

    def __init__(self, run: TieredRun) -> None:
        self._run = run

    def on_step(self, metrics: StepMetrics) -> None:
        self._run.losses.append(metrics.loss)
        self._run.grad_norms.append(metrics.grad_norm)


def train(config: RunConfig, before: TieredRun | None = None) -> TieredRun:
    """Run a config to its end; continue what is in its folder.

    Args:
        before: the part of the run that came earlier; its figures are kept and added to.
    """
    run = before or TieredRun()
    done = len(run.losses)
    trainer = Trainer(config, observer=_Listener(run))
    summary = trainer.train()
    if summary.interrupted:
        raise KeyboardInterrupt
    assert summary.export_dir is not None, summary
    planned = _planned_bytes(trainer.plan, len(run.losses) - done)
    for link, nbytes in summary.link_bytes.items():
        run.link_bytes[link] = run.link_bytes.get(link, 0) + nbytes
        run.planned_link_bytes[link] = run.planned_link_bytes.get(link, 0) + planned.get(link, 0)
    run.weights = summary.export_dir
    run.files = {path.name: checksum(path.read_bytes()) for path in sorted(run.weights.glob("*.safetensors"))}
    run.state = {block.key: block.xxh3_64 for block in read_manifest(config.output_dir / CHECKPOINTS_NAME).blocks}
    run.high_water_bytes, run.capacity_bytes = summary.tier_peak_bytes, summary.tier_capacity_bytes
    return run


def _planned_bytes(plan: Plan, num_steps: int) -> Mapping[str, int]:
    return plan.placement.run_traffic_bytes(num_steps) if num_steps else {}


def batches(config: RunConfig, num_steps: int) -> list[StepBatch]:
    """Return the batches that a run of the config trains on."""
    steps: Iterator[StepBatch] = Trainer(config, observer=_Listener(TieredRun())).make_loader()
    return list(islice(steps, num_steps))


def differences(ours: TieredRun, theirs: TieredRun) -> Iterable[str]:
    """Yield what is not the same, bit for bit, in two runs."""
    for name, mine, other in (("loss", ours.losses, theirs.losses), ("norm", ours.grad_norms, theirs.grad_norms)):
        if mine != other:
            wrong = [step for step, pair in enumerate(zip(mine, other, strict=False), 1) if pair[0] != pair[1]]
            yield f"{name} of step {wrong[0]}" if wrong else f"{len(mine)} and {len(other)} steps"
    blocks = [key for key in sorted({*ours.state, *theirs.state}) if ours.state.get(key) != theirs.state.get(key)]
    if blocks:
        yield f"{len(blocks)} of {len(theirs.state)} blocks: {', '.join(blocks[:4])}" + (" ..." if blocks[4:] else "")
    if ours.files != theirs.files:
        yield "the exported model"
