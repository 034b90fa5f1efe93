"""Comparison of plain AdamW training with tiered training, on a small copy of the user's model."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field
from fnmatch import fnmatchcase
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megatrain.api import (
    THIS_MACHINE,
    DoesNotFitError,
    ModelFolder,
    OptimizerConfig,
    Trainer,
    existing_parent,
    no_progress_bars,
    plan_run,
    read_config,
    resolve,
    resolve_compute_dtype,
    resolve_model,
    resolve_tiers,
    write_small_model,
)
from megatrain.base.batch_keys import IGNORED_LABEL
from megatrain.base.names import CHECKPOINTS_NAME
from megatrain.base.observer import RunObserver, StepMetrics
from megatrain.config.schema import RunConfig
from megatrain.extras.doctor.drives import scratch_folder
from tiered import read_manifest

if TYPE_CHECKING:
    from torch import Tensor

    from megatrain.api import RunSpec, StepBatch

NUM_STEPS, STOP_AFTER = 4, 2
ROWS, MICRO_BATCHES, LENGTH = 2, 3, 64
#: Learning rate at which a few steps of AdamW change the weights measurably.
LEARNING_RATE = 1e-3
#: Learning rate of the SGD step whose weight changes reveal the gradients. A power of two scales without rounding.
GRADIENT_RATE = 1024.0

#: Maximum relative differences between plain and tiered fp32 training, which differ only in the order of sums.
LOSS_TOLERANCE, NORM_TOLERANCE = 5e-6, 1e-4
#: Maximum difference of a gradient element, relative to the largest element of the tensor's gradient.
GRADIENT_TOLERANCE = 1e-4
#: Maximum root mean square difference of a tensor's weights, relative to their change during training.
WEIGHT_TOLERANCE = 1e-2


@dataclass(frozen=True, slots=True)
class Check:
    """One comparison.

    Attributes:
        what: Name of the compared values.
        allowed: Largest allowed difference, or "same bits".
        found: Largest difference found, or the number of identical values.
        problems: One message for each difference that is too large.
    """

    what: str
    allowed: str
    found: str
    problems: tuple[str, ...] = ()

    @property
    def holds(self) -> bool:
        """Whether the check found no problem."""
        return not self.problems


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """Results of all comparisons, and notes on parts of the config that the comparisons leave out."""

    headline: str
    checks: tuple[Check, ...]
    notes: tuple[str, ...]
    seconds: float

    @property
    def holds(self) -> bool:
        """Whether no check found a problem."""
        return all(check.holds for check in self.checks)

    def to_json(self) -> dict[str, Any]:
        """Return the results as JSON values."""
        checks = [asdict(check) | {"holds": check.holds} for check in self.checks]
        return {"holds": self.holds, **asdict(self), "checks": checks}


@dataclass
class _TrainingResult(RunObserver):
    """Results of a training run. ``state`` contains the checksums of all saved blocks, by block key."""

    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    weights: dict[str, Tensor] = field(default_factory=dict)
    state: dict[str, Any] = field(default_factory=dict)

    def on_step(self, metrics: StepMetrics) -> None:
        self.losses.append(metrics.loss)
        self.grad_norms.append(metrics.grad_norm)


def verify(
    config: RunConfig | None,
    *,
    tiers: Sequence[str] = ("ram", "nvme"),
    scratch: Path,
    on_progress: Callable[[str], None] = lambda text: None,
) -> VerifyResult:
    """Compare plain with tiered training on this machine. With "nvme", also compare RAM and drives in tiered training.

    All runs train a scaled-down copy of the model on random text. Their files are written to new folders, which are
    removed at the end.

    Args:
        config: The user's config; None for a small Llama.
        tiers: "ram", or "ram" and "nvme".
        scratch: Folder for the model and the runs, and for drives if the config has none.

    Raises:
        UnsupportedModelError: The model cannot be scaled down.
        ModelFolderError: The model folder cannot be read.
        UnusablePathError: A drive is not writable.
    """
    start_s = time.perf_counter()
    with ExitStack() as stack:
        stack.enter_context(no_progress_bars())
        folder = stack.enter_context(scratch_folder(scratch))
        drives: list[Path] = []
        if "nvme" in tiers:
            nvme_tables = () if config is None else resolve_tiers(config).table.nvme
            parents = [existing_parent(drive.path) for drive in nvme_tables] or [scratch, scratch]
            drives = [stack.enter_context(scratch_folder(parent)) for parent in parents]
        on_progress("creating a small model")
        comparison = _Comparison(config, folder, on_progress)
        checks = tuple(comparison.run(drives))
        return VerifyResult(comparison.headline, checks, comparison.notes, time.perf_counter() - start_s)


class _Comparison:
    """Several training runs of the small model, and comparisons of their results."""

    def __init__(self, config: RunConfig | None, folder: Path, on_progress: Callable[[str], None]) -> None:
        self._user_config = source = config or _default_config()
        self._folder, self._on_progress = folder, on_progress
        # The comparison with plain training uses fp32, for which flash_attention_2 has no kernel.
        attention = source.model.attn_implementation
        self._attention = "sdpa" if attention == "flash_attention_2" else attention
        original = None if config is None else read_config(resolve_model(source).folder)
        self._small_model = write_small_model(original, folder, attn_implementation=self._attention, seed=source.seed)
        self._device = THIS_MACHINE.resolve_device(source.device)
        dtype = resolve_compute_dtype(source.precision.compute_dtype, self._device)
        self._precision = (str(dtype).removeprefix("torch."), source.precision.grad_dtype)
        origin = f" (a scaled-down copy of {Path(source.model.model_name_or_path).name})" if config else ""
        size = f"{self._small_model.num_parameters / 1e6:.2f} M parameters, {self._small_model.num_layers} layers"
        self.headline = f"{self._small_model.family}, {size}{origin}   {self._device.type}, adamw, {NUM_STEPS} steps"
        self.notes = tuple(_notes(source, *self._precision))

    def run(self, drives: Sequence[Path]) -> Iterator[Check]:
        """Train with each config, and yield each check when its results are available."""
        adamw = _constant_rate(LEARNING_RATE) | self._user_config.optimizer.model_dump(
            include={
                "weight_decay",
                "weight_decay_exclude",
                "adam_beta1",
                "adam_beta2",
                "adam_epsilon",
                "max_grad_norm",
            }
        )
        fp32_config = self._config("exact", adamw)
        start = _read_weights(self._small_model.folder)
        self._on_progress("plain AdamW")
        batches = list(islice(Trainer(fp32_config).make_loader(), NUM_STEPS))
        plain = _train_plainly(resolve(fp32_config), batches)
        self._on_progress("tiered training in RAM")
        tiered = _train(fp32_config)
        yield _compare_steps(f"loss of {NUM_STEPS} steps", plain.losses, tiered.losses, LOSS_TOLERANCE)
        yield _compare_steps(f"gradient norm of {NUM_STEPS} steps", plain.grad_norms, tiered.grad_norms, NORM_TOLERANCE)
        sgd = _constant_rate(GRADIENT_RATE) | {"optim": "sgd", "sgd_momentum": 0.0, "weight_decay": 0.0}
        sgd_config = self._config("gradient", sgd | {"max_grad_norm": 0.0}, num_steps=1)
        ref, out = _train_plainly(resolve(sgd_config), batches[:1]).weights, _train(sgd_config).weights
        yield _compare_tensors(
            "gradient of", start, ref, out, _largest_magnitude, min_change=1e-6, tolerance=GRADIENT_TOLERANCE
        )
        label = f"weights after {NUM_STEPS} steps,"
        yield _compare_tensors(
            label, start, plain.weights, tiered.weights, _root_mean_square, min_change=1e-3, tolerance=WEIGHT_TOLERANCE
        )
        if not drives:
            return
        base = tiered
        if self._precision != ("float32", "float32"):
            self._on_progress(f"tiered training in {self._precision[0]}, in RAM")
            base = _train(self._config("base", adamw, precision=self._precision))
        label = f"all on {len(drives)} drive{'s' * (len(drives) > 1)}, stopped after step {STOP_AFTER}, resumed"
        self._on_progress(label)
        resumed = _TrainingResult()
        for num_steps in (STOP_AFTER, NUM_STEPS):
            config = self._config("drives", adamw, num_steps=num_steps, precision=self._precision, drives=drives)
            _train(config, resumed)
        yield _compare_bits(label, resumed, base)

    def _config(
        self,
        name: str,
        optimizer: Mapping[str, Any],
        *,
        num_steps: int = NUM_STEPS,
        precision: tuple[str, str] = ("float32", "float32"),
        drives: Sequence[Path] = (),
    ) -> RunConfig:
        """Return the config of one run, with all blocks in RAM, or on drives with the smallest possible RAM tier."""
        user_config = self._user_config
        values: dict[str, Any] = {
            "task": "pretrain",
            "output_dir": str(self._folder / name),
            "seed": user_config.seed,
            "data_seed": user_config.data_seed,
            "device": self._device.type,
            "model": {
                "model_name_or_path": str(self._small_model.folder),
                "tokenizer_name_or_path": str(self._small_model.tokenizer),
                "attn_implementation": self._attention,
                "use_liger_kernel": False,  # plain training does not use it
            },
            "precision": {"compute_dtype": precision[0], "grad_dtype": precision[1]},
            "data": {
                "max_length": LENGTH,
                **user_config.data.model_dump(include={"packing"}, exclude_unset=True),
                "cache_dir": "none",
                "train": [{"path": str(self._small_model.text), "format": "text"}],
            },
            "training": {
                "per_device_train_batch_size": ROWS,
                "gradient_accumulation_steps": MICRO_BATCHES,
                "max_steps": num_steps,
            },
            "optimizer": dict(optimizer),
            "checkpoint": {"save_steps": 10**9, "min_free_disk": "0B", "save_on_signal": False},
            "export": {"dtype": "float32"},
            "logging": {"report_to": "none", "progress": "none"},
            "tiers": {
                "ram": {"size": "auto"},
                "on_disk_full": "error",
                "allow_tmpfs": True,  # losing these files in a crash does no harm
                "engine": user_config.tiers.engine,
                "direct": "off" if user_config.tiers.direct == "off" else "auto",
                "verify": user_config.tiers.verify,
            },
        }
        if drives:
            values["placement"] = dict.fromkeys(type(user_config.placement).model_fields, ("nvme",))
            values["tiers"]["nvme"] = [{"path": str(drive / name), "size": "auto"} for drive in drives]
            values["tiers"]["ram"] = {"size": _least_ram(values)}
        return RunConfig.model_validate(values)


def _least_ram(values: Mapping[str, Any]) -> str:
    """Return the smallest RAM size that the plan accepts, so that the run must evict copies and read them again."""
    size = "4KiB"
    for _ in range(8):  # a larger tier can need more workspace, so one iteration may not suffice
        config = RunConfig.model_validate({**values, "tiers": {**values["tiers"], "ram": {"size": size}}})
        try:
            plan_run(resolve(config), with_remedies=False)
        except DoesNotFitError as error:
            if error.tier != "ram":
                raise
            size = f"{error.need_bytes}B"
        else:
            return size
    return "auto"


def _default_config() -> RunConfig:
    """Return the config to use if the user passes none. All optional keys have their defaults."""
    values = {"task": "pretrain", "output_dir": "run", "model": {"model_name_or_path": "model"}}
    return RunConfig.model_validate({**values, "data": {"train": [{"path": "text"}]}})


def _constant_rate(rate: float) -> dict[str, Any]:
    return {"learning_rate": rate, "lr_scheduler_type": "constant", "warmup_steps": 0.0}


def _notes(config: RunConfig, compute_dtype: str, grad_dtype: str) -> Iterator[str]:
    """Yield one note for each part of the config that the comparison leaves out."""
    if (compute_dtype, grad_dtype) != ("float32", "float32"):
        yield (
            f"plain training is compared in float32, placements with compute_dtype = {compute_dtype}, "
            f"grad_dtype = {grad_dtype}"
        )
    if config.optimizer.optim != "adamw" or config.optimizer.groups:
        yield f"[optimizer]: compared with one group of adamw, not with optim = {config.optimizer.optim} or its groups"
    if config.model.images != "off":
        yield f'model.images = "{config.model.images}": only the language model is compared, on text'
    if config.lora.is_on or config.model.freeze:
        yield "[lora], model.freeze: all weights of the copy are trained. It has no adapters and no frozen weights"


def make_plain_optimizer(parameters: Iterable[tuple[str, Tensor]], table: OptimizerConfig) -> torch.optim.Optimizer:
    """Return torch's AdamW or SGD, with the learning rate and the weight decay of the config table."""
    groups = [
        {"params": [parameter], "weight_decay": table.weight_decay if _is_decayed(name, parameter, table) else 0.0}
        for name, parameter in parameters
    ]
    if table.optim == "sgd":
        return torch.optim.SGD(groups, lr=table.learning_rate, momentum=table.sgd_momentum)
    betas = (table.adam_beta1, table.adam_beta2)
    return torch.optim.AdamW(groups, lr=table.learning_rate, betas=betas, eps=table.adam_epsilon)


def _is_decayed(name: str, parameter: Tensor, table: OptimizerConfig) -> bool:
    excluded = table.weight_decay_exclude
    return not excluded or (parameter.dim() >= 2 and not any(fnmatchcase(name, pattern) for pattern in excluded))


def _train_plainly(run: RunSpec, steps: Iterable[StepBatch]) -> _TrainingResult:
    """Train the model with only transformers and torch, in fp32, on the given batches.

    Losses of micro-batches are weighted by their trained tokens, and gradients are clipped by their global norm.
    """
    from transformers import AutoModelForCausalLM

    attention = run.model.table.attn_implementation
    options = {} if attention == "auto" else {"attn_implementation": attention}
    model = AutoModelForCausalLM.from_pretrained(
        run.model.folder, dtype=torch.float32, local_files_only=True, **options
    )
    model.to(run.device).train()
    optimizer = make_plain_optimizer(model.named_parameters(), run.optimizer)
    result = _TrainingResult()
    for step in steps:
        batches = [{name: tensor.to(run.device) for name, tensor in batch.items()} for batch in step.micro_batches]
        counts = [int((batch["labels"][:, 1:] != IGNORED_LABEL).sum()) for batch in batches]
        total = 0.0
        for batch, count in zip(batches, counts, strict=True):
            if count:
                loss = model(**batch, use_cache=False).loss * (count / sum(counts))
                loss.backward()
                total += float(loss.detach())
        result.losses.append(total)
        max_norm = run.optimizer.max_grad_norm or math.inf
        result.grad_norms.append(float(torch.nn.utils.clip_grad_norm_(model.parameters(), max_norm)))
        optimizer.step()
        optimizer.zero_grad()
    folder = run.output_dir / "plain"
    model.cpu().save_pretrained(folder)
    result.weights = _read_weights(folder)
    return result


def _train(config: RunConfig, result: _TrainingResult | None = None) -> _TrainingResult:
    """Train to the end, from the checkpoint if there is one, and add the results to ``result``."""
    result = result or _TrainingResult()
    trainer = Trainer(config)
    trainer.observer = result
    summary = trainer.train()
    if summary.interrupted:
        raise KeyboardInterrupt
    assert summary.export_dir is not None, summary
    result.weights = _read_weights(summary.export_dir)
    blocks = read_manifest(trainer.run.output_dir / CHECKPOINTS_NAME).blocks
    result.state = {block.key: block.xxh3_64 for block in blocks}
    return result


def _read_weights(folder: Path) -> dict[str, Tensor]:
    """Return the floating-point tensors of a model folder, by name."""
    model = ModelFolder(folder)
    tensors = {name: model.read(name) for name in sorted(model.records)}
    return {name: tensor for name, tensor in tensors.items() if tensor.is_floating_point()}


def _compare_steps(label: str, plain: Sequence[float], tiered: Sequence[float], tolerance: float) -> Check:
    differences = [
        abs(actual - expected) / max(abs(expected), 1e-30) if math.isfinite(actual) else math.inf
        for actual, expected in zip(tiered, plain, strict=True)
    ]
    problems = [
        f"step {step}: plain {expected!r}, tiered {actual!r}"
        for step, (expected, actual, difference) in enumerate(zip(plain, tiered, differences, strict=True), 1)
        if not difference <= tolerance
    ]
    return Check(label, f"{tolerance:.0e}", f"{max(differences):.1e}", tuple(problems))


def _largest_magnitude(tensor: Tensor) -> float:
    return float(tensor.abs().max())


def _root_mean_square(tensor: Tensor) -> float:
    return float(tensor.square().mean().sqrt())


def _compare_tensors(
    label: str,
    start: Mapping[str, Tensor],
    plain: Mapping[str, Tensor],
    tiered: Mapping[str, Tensor],
    magnitude: Callable[[Tensor], float],
    *,
    min_change: float,
    tolerance: float,
) -> Check:
    """Compare trained tensors. Differences are relative to each tensor's change during plain training.

    Args:
        magnitude: Function that returns the magnitude of a tensor.
        min_change: Lower bound of a tensor's change, relative to the largest change of all tensors. Tensors without
            effect on the loss, such as key biases, change only by rounding noise.
    """
    assert start.keys() == plain.keys() == tiered.keys(), plain.keys() ^ tiered.keys()
    changes = {name: magnitude(plain[name] - start[name]) for name in start}
    min_size = min_change * max(changes.values())
    differences = {name: magnitude(tiered[name] - plain[name]) / max(changes[name], min_size) for name in start}
    problems = [f"{name}: {difference:.1e}" for name, difference in differences.items() if not difference <= tolerance]
    omitted = (f"and {len(problems) - 8} more",) if len(problems) > 8 else ()
    largest = max(differences.values(), key=lambda value: math.inf if math.isnan(value) else value)
    return Check(f"{label} {len(differences)} tensors", f"{tolerance:.0e}", f"{largest:.1e}", (*problems[:8], *omitted))


def _compare_bits(label: str, result: _TrainingResult, base: _TrainingResult) -> Check:
    problems = []
    pairs = {"loss": (result.losses, base.losses), "gradient norm": (result.grad_norms, base.grad_norms)}
    for name, (left, right) in pairs.items():
        steps = [step for step, pair in enumerate(zip(left, right, strict=True), 1) if pair[0] != pair[1]]
        problems += [f"{name} of step {steps[0]}"] if steps else []
    blocks = [key for key in base.state if result.state.get(key) != base.state[key]]
    if blocks:
        problems.append(f"{len(blocks)} of {len(base.state)} blocks: {', '.join(blocks[:4])}")
    summary = f"{len(result.losses)} losses and norms, {len(result.state)} blocks"
    return Check(label, "same bits", "different" if problems else summary, tuple(problems))
