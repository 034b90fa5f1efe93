"""The proof itself: plain against tiered training, then tiered training against itself with other placements."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megatrain.config.schema import OptimizerConfig, RunConfig
from megatrain.doctor.drives import scratch_folder
from megatrain.models.folder import ModelFolder, read_config
from megatrain.models.small import default_config, kept_patterns, no_progress_bars, write_small_model
from megatrain.plan.machine import existing_parent, resolve_compute_dtype, resolve_device
from megatrain.verify.tiered import Setting, TieredRun, batches, differences, make_config, train
from tiered.units import format_size

if TYPE_CHECKING:
    from torch import Tensor

    from megatrain.data.loader import StepBatch

IGNORED = -100  # the label that Hugging Face's losses skip


@dataclass(frozen=True, slots=True)
class PlainRun:
    """Losses and gradient norms of each step, and the folder of the trained weights."""

    losses: tuple[float, ...]
    grad_norms: tuple[float, ...]
    folder: Path


def train_plainly(
    config: RunConfig, steps: Iterable[StepBatch], folder: Path, device: torch.device, optimizer: OptimizerConfig
) -> PlainRun:
    """Train the model of a config in fp32 on the same batches, with a constant learning rate; write it to ``folder``.

    Micro-batches are weighted by their trained tokens, and the gradient is clipped by its global norm.
    """
    from transformers import AutoModelForCausalLM

    attention = config.model.attn_implementation
    options = {} if attention == "auto" else {"attn_implementation": attention}
    source = config.model.model_name_or_path
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, local_files_only=True, **options)
    model.to(device).train()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(fnmatchcase(name, pattern) for pattern in config.model.freeze))
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    update = make_plain_optimizer(trained, optimizer)
    losses, norms = [], []
    for step in steps:
        batches = [{name: tensor.to(device) for name, tensor in batch.items()} for batch in step.micro_batches]
        num_trained = sum(int((batch["labels"][:, 1:] != IGNORED).sum()) for batch in batches)
        total = 0.0
        for batch in batches:
            loss = model(**batch, num_items_in_batch=num_trained, use_cache=False).loss
            loss.backward()
            total += float(loss.detach())
        most = optimizer.max_grad_norm or math.inf
        norms.append(float(torch.nn.utils.clip_grad_norm_([parameter for _, parameter in trained], most)))
        update.step()
        update.zero_grad(set_to_none=True)
        losses.append(total)
    model.cpu().save_pretrained(folder)
    return PlainRun(tuple(losses), tuple(norms), folder)


def make_plain_optimizer(trained: Sequence[tuple[str, Tensor]], table: OptimizerConfig) -> Any:
    """Return the published optimizer that ``table`` names, with its groups and its rule of what decays."""
    groups = []
    for name, parameter in trained:
        own = next((group for group in table.groups if any(fnmatchcase(name, glob) for glob in group.params)), None)
        rate = table.learning_rate if own is None or own.learning_rate is None else own.learning_rate
        decay = table.weight_decay if own is None or own.weight_decay is None else own.weight_decay
        decays = parameter.dim() >= 2 and not any(fnmatchcase(name, glob) for glob in table.weight_decay_exclude)
        groups.append({"params": [parameter], "lr": rate, "weight_decay": decay if decays else 0.0})
    betas = (table.adam_beta1, table.adam_beta2)
    if table.optim == "adamw":
        return torch.optim.AdamW(groups, betas=betas, eps=table.adam_epsilon)
    if table.optim == "sgd":
        return torch.optim.SGD(groups, momentum=table.sgd_momentum, nesterov=table.sgd_nesterov)
    if table.optim == "lion":
        return PlainLion(groups, betas)
    from transformers import Adafactor

    return Adafactor(groups, scale_parameter=False, relative_step=False, lr=table.learning_rate)


class PlainLion:
    """Lion as published (Chen et al. 2023, algorithm 2), on whole tensors.

    Args:
        groups: as torch's optimizers take them.
    """

    def __init__(self, groups: Sequence[dict[str, Any]], betas: tuple[float, float]) -> None:
        self._groups, self._betas = groups, betas
        self._moments: dict[int, Tensor] = {}

    @torch.no_grad()
    def step(self) -> None:
        """Update every parameter that has a gradient."""
        beta1, beta2 = self._betas
        for group in self._groups:
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                moment = self._moments.setdefault(id(parameter), torch.zeros_like(parameter))
                direction = moment.lerp(parameter.grad, 1 - beta1).sign_()
                parameter.mul_(1 - group["lr"] * group["weight_decay"]).add_(direction, alpha=-group["lr"])
                moment.lerp_(parameter.grad, 1 - beta2)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget the gradients."""
        for group in self._groups:
            for parameter in group["params"]:
                parameter.grad = None


NUM_STEPS, STOP_AFTER = 4, 2
#: Learning rates at which a few steps change the weights visibly.
_RATES = {"adamw": 1e-3, "lion": 1e-4, "sgd": 1e-2, "adafactor": 1e-3}
#: A power of two: a step of plain SGD at this rate leaves the gradient in the weights without rounding it again.
_GRADIENT_RATE = 1024.0


@dataclass(frozen=True, slots=True)
class Tolerances:
    """How far plain and tiered training may be apart: the order of sums differs, nothing else.

    Attributes:
        loss: relative difference.
        norm: relative difference.
        gradient: largest difference in a tensor, of the largest gradient in it.
        change: root mean square of the differences of a tensor's weights, of the change that training made.
    """

    loss: float = 5e-6
    norm: float = 1e-4
    gradient: float = 1e-4
    change: float = 1e-2


@dataclass(frozen=True, slots=True)
class Check:
    """One line of the proof.

    Attributes:
        what: compared.
        allowed: a number, or "same bits".
        found: the worst seen, or what is equal.
        problems: what differs; none: it holds.
    """

    what: str
    allowed: str
    found: str
    problems: tuple[str, ...] = ()

    @property
    def holds(self) -> bool:
        """Whether nothing differs."""
        return not self.problems


@dataclass(frozen=True, slots=True)
class Verdict:
    """The whole proof."""

    headline: str
    checks: tuple[Check, ...]
    notes: tuple[str, ...]
    seconds: float

    @property
    def holds(self) -> bool:
        """Whether every check does."""
        return all(check.holds for check in self.checks)

    def to_json(self) -> dict[str, Any]:
        """Return JSON values."""
        checks = [{**asdict(check), "problems": list(check.problems), "holds": check.holds} for check in self.checks]
        return {
            "holds": self.holds,
            "headline": self.headline,
            "checks": checks,
            "notes": list(self.notes),
            "seconds": self.seconds,
        }


def verify(
    config: RunConfig | None,
    *,
    tiers: Sequence[str] = ("ram", "nvme"),
    scratch: Path,
    tolerances: Tolerances = Tolerances(),
    on_progress: Callable[[str], None] = lambda text: None,
) -> Verdict:
    """Prove on this machine that tiered training equals plain training.

    A scaled-down copy of the config's model is trained for some steps on random text: by Hugging Face and torch alone,
    then by the trainer in RAM, with everything on drives, striped over them, and stopped and continued. Everything is
    written to new folders that are gone afterwards.

    Args:
        config: whose model, optimizer and drives are meant; None: a small Llama.
        tiers: where state is put.
        scratch: folder for the model and the runs, and for drives where the config names none.

    Raises:
        UnsupportedModelError: the config's model cannot be copied.
        ModelFolderError: the config's model cannot be copied.
        UnusablePathError: a drive.
    """
    start_s = time.perf_counter()
    with ExitStack() as stack:
        stack.enter_context(no_progress_bars())
        folder = stack.enter_context(scratch_folder(scratch))
        drives: list[Path] = []
        if "nvme" in tiers:
            parents = [existing_parent(table.path) for table in config.tiers.nvme] if config is not None else []
            drives = [stack.enter_context(scratch_folder(parent)) for parent in parents or [scratch, scratch]]
        on_progress("making a small model")
        setting = _make_setting(config, folder)
        proof = _Proof(setting, drives, tolerances, on_progress)
        checks = tuple(proof.run())
        return Verdict(proof.headline, checks, tuple(proof.notes), time.perf_counter() - start_s)


def _make_setting(config: RunConfig | None, folder: Path) -> Setting:
    given = config or _no_config()
    attention = given.model.attn_implementation
    if attention == "flash_attention_2":
        attention = "sdpa"  # it knows no fp32, in which the comparison with plain training is exact
    original = default_config() if config is None else read_config(given.model.model_name_or_path)
    model = write_small_model(original, folder, attn_implementation=attention, seed=given.seed)
    return Setting(
        given=given,
        model=model,
        folder=folder,
        attention=attention,
        device=resolve_device(given).type,
        origin="" if config is None else Path(given.model.model_name_or_path).name,
        freeze=kept_patterns(given.model.freeze, list(ModelFolder(model.folder).records)),
    )


def _no_config() -> RunConfig:
    """Return defaults, for who names no config."""
    nothing = {"task": "pretrain", "output_dir": "run", "model": {"model_name_or_path": "model"}}
    return RunConfig.model_validate({**nothing, "data": {"train": [{"path": "text"}]}})


class _Proof:
    """Makes the runs and compares them."""

    def __init__(
        self, setting: Setting, drives: Sequence[Path], tolerances: Tolerances, on_progress: Callable[[str], None]
    ) -> None:
        self._setting, self._drives, self._tolerances, self._say = setting, drives, tolerances, on_progress
        self._table = _optimizer(setting)
        self._dtype, self._grad_dtype = _dtypes(setting)
        self.notes: list[str] = []
        self.headline = _headline(setting, self._table.optim)
        if self._dtype != "float32" or self._grad_dtype != "float32":
            self.notes.append(
                f"compared with plain training in float32; placements with compute_dtype = {self._dtype}, "
                f"grad_dtype = {self._grad_dtype}"
            )

    def run(self) -> Iterator[Check]:
        """Yield the checks one after the other."""
        setting, table = self._setting, self._table
        self._say("plain training")
        exact = make_config(setting, "exact", table, num_steps=NUM_STEPS)
        steps = batches(exact, NUM_STEPS)
        device = torch.device(setting.device)
        plain = train_plainly(exact, steps, setting.folder / "plain", device, table)
        self._say("tiered training, all in RAM")
        ours = train(exact)
        allowed = self._tolerances
        yield self._numbers(f"loss of {NUM_STEPS} steps", plain.losses, ours.losses, allowed.loss)
        yield self._numbers(f"gradient norm of {NUM_STEPS} steps", plain.grad_norms, ours.grad_norms, allowed.norm)
        reader = {"optim": "sgd", "sgd_momentum": 0.0, "weight_decay": 0.0, "max_grad_norm": 0.0}
        table_of_gradients = OptimizerConfig.model_validate({**reader, **_constant(_GRADIENT_RATE)})
        one_step = make_config(setting, "gradient", table_of_gradients, num_steps=1)
        theirs = train_plainly(one_step, steps[:1], setting.folder / "plain_gradient", device, table_of_gradients)
        mine = train(one_step)
        start = setting.model.folder
        yield self._gradients(start, theirs.folder, mine.weights)
        yield self._weights(start, plain.folder, ours.weights)
        yield from self._placements(ours)

    def _placements(self, exact: TieredRun) -> Iterator[Check]:
        """Yield what is the same to the bit: wherever blocks live, and stopped in the middle."""
        base = exact
        if self._dtype != "float32" or self._grad_dtype != "float32":
            self._say(f"tiered training in {self._dtype}, all in RAM")
            base = train(self._config("base"))
        places: list[tuple[str, Sequence[Path]]] = []
        if self._drives:
            places.append(("everything on NVMe", self._drives[:1]))
            if len(self._drives) > 1:
                places.append((f"striped over {len(self._drives)} drives", self._drives))
        for number, (what, drives) in enumerate(places):
            self._say(what)
            run = train(self._config(f"place{number}", [drive / f"place{number}" for drive in drives]))
            yield _same_bits(what, run, base)
        where = [drive / "stopped" for drive in self._drives]
        what = f"stopped after step {STOP_AFTER}, continued" + (" on NVMe" if where else "")
        self._say(what)
        first = train(self._config("stopped", where, num_steps=STOP_AFTER))
        yield _same_bits(what, train(self._config("stopped", where), first), base)

    def _config(self, name: str, drives: Sequence[Path] = (), *, num_steps: int = NUM_STEPS) -> RunConfig:
        return make_config(
            self._setting,
            name,
            self._table,
            num_steps=num_steps,
            compute_dtype=self._dtype,
            grad_dtype=self._grad_dtype,
            drives=drives,
        )

    def _numbers(self, what: str, plain: Sequence[float], ours: Sequence[float], allowed: float) -> Check:
        apart = [
            abs(mine - theirs) / max(abs(theirs), 1e-30) if math.isfinite(mine) else math.inf
            for mine, theirs in zip(ours, plain, strict=True)
        ]
        wrong = [
            f"step {step}: plain {theirs!r}, tiered {mine!r}"
            for step, (theirs, mine, error) in enumerate(zip(plain, ours, apart, strict=True), 1)
            if not error <= allowed
        ]
        return Check(what, f"{allowed:.0e}", f"{max(apart):.1e}", tuple(wrong))

    def _gradients(self, start: Path, plain: Path, ours: Path) -> Check:
        """Compare every gradient, read off a step of plain SGD."""
        largest, apart = {}, {}
        for name, before, theirs, mine in _tensors(start, plain, ours):
            gradient = (before - theirs) / _GRADIENT_RATE
            largest[name] = float(gradient.abs().max())
            apart[name] = float(((before - mine) / _GRADIENT_RATE - gradient).abs().max())
        # What has no effect on the loss, as a bias of keys, has rounding noise for a gradient.
        noise = 1e-6 * max(largest.values())
        return self._worst(
            f"gradient of {len(apart)} tensors",
            {name: error / max(largest[name], noise) for name, error in apart.items()},
            self._tolerances.gradient,
        )

    def _weights(self, start: Path, plain: Path, ours: Path) -> Check:
        changes, apart = {}, {}
        for name, before, theirs, mine in _tensors(start, plain, ours):
            changes[name] = float((theirs - before).square().mean().sqrt())
            apart[name] = float((mine - theirs).square().mean().sqrt())
        least = 1e-3 * max(changes.values())
        return self._worst(
            f"weights after {NUM_STEPS} steps, {len(apart)} tensors",
            {name: error / max(changes[name], least) for name, error in apart.items()},
            self._tolerances.change,
        )

    @staticmethod
    def _worst(what: str, apart: Mapping[str, float], allowed: float) -> Check:
        worst = max(apart, key=lambda name: math.inf if math.isnan(apart[name]) else apart[name])
        wrong = [f"{name}: {error:.1e}" for name, error in apart.items() if not error <= allowed]
        more = (f"and {len(wrong) - 8} more",) if len(wrong) > 8 else ()
        return Check(what, f"{allowed:.0e}", f"{apart[worst]:.1e}", (*wrong[:8], *more))


def _same_bits(what: str, run: TieredRun, base: TieredRun) -> Check:
    problems = list(differences(run, base))
    problems += [
        f"{link} moved {nbytes:,} bytes, planned were {run.planned_link_bytes[link]:,}"
        for link, nbytes in run.link_bytes.items()
        if nbytes != run.planned_link_bytes[link]
    ]
    problems += [
        f"tier {tier} held {nbytes:,} bytes, it has {run.capacity_bytes[tier]:,}"
        for tier, nbytes in run.high_water_bytes.items()
        if nbytes > run.capacity_bytes[tier]
    ]
    found = f"{len(run.losses)} losses and norms, {len(run.state)} blocks"
    if run.moved_bytes:
        found += f"; {format_size(run.moved_bytes)} moved, as planned"
    return Check(what, "same bits", found if not problems else "different", tuple(problems))


def _tensors(start: Path, plain: Path, ours: Path) -> Iterator[tuple[str, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Yield name, and the weights before, after plain and after tiered training."""
    folders = [ModelFolder(folder) for folder in (start, plain, ours)]
    names = [set(folder.records) for folder in folders]
    assert names[0] == names[1] == names[2], names[0] ^ names[1] | names[0] ^ names[2]
    for name in sorted(names[0]):
        before, theirs, mine = (folder.read(name) for folder in folders)
        if before.is_floating_point():
            yield name, before, theirs, mine


def _constant(rate: float) -> dict[str, Any]:
    return {"learning_rate": rate, "lr_scheduler_type": "constant", "lr_scheduler_kwargs": {}, "warmup_steps": 0.0}


def _optimizer(setting: Setting) -> OptimizerConfig:
    """Return the optimizer of the user's config with a constant rate at which a few steps show something."""
    table = setting.given.optimizer
    names = list(ModelFolder(setting.model.folder).records)
    groups = [
        group.model_copy(update={"params": tuple(kept), "learning_rate": None})
        for group in table.groups
        if (kept := kept_patterns(group.params, names))
    ]
    changes = {**_constant(_RATES[table.optim]), "groups": tuple(groups), "nonfinite": "stop"}
    return table.model_copy(update=changes)


def _dtypes(setting: Setting) -> tuple[str, str]:
    """Return compute and gradient dtype of the user's config, "auto" resolved."""
    dtype = resolve_compute_dtype(setting.given, torch.device(setting.device))
    return str(dtype).removeprefix("torch."), setting.given.precision.grad_dtype


def _headline(setting: Setting, optim: str) -> str:
    model = setting.model
    origin = f" (a scaled-down copy of {setting.origin})" if setting.origin else ""
    size = f"{model.num_parameters / 1e6:.2f} M parameters, {model.num_layers} layers"
    return f"{model.family}, {size}{origin}   {setting.device}, {optim}, {NUM_STEPS} steps"
