"""The proof itself: plain against tiered training, then tiered training against itself with other placements."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, replace
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from megatrain.api import (
    ModelFolder,
    Trainer,
    World,
    check_ranks,
    existing_parent,
    no_progress_bars,
    resolve,
    resolve_tiers,
    to_toml,
)
from megatrain.base.batch_keys import IGNORED_LABEL
from megatrain.config.schema import RunConfig
from megatrain.doctor.drives import scratch_folder
from megatrain.verify.setting import (
    GRADIENT_RATE,
    Setting,
    dtypes_of,
    gradient_optimizer,
    make_config,
    make_setting,
    optimizer_of,
)
from megatrain.verify.tiered import RanksFailedError, TieredRun, batches, differences, train, train_in_processes
from tiered.units import format_size

if TYPE_CHECKING:
    from torch import Tensor

    from megatrain.api import OptimizerConfig, RunSpec, StepBatch


@dataclass(frozen=True, slots=True)
class PlainRun:
    """Losses and gradient norms of each step, and the folder of the trained weights."""

    losses: tuple[float, ...]
    grad_norms: tuple[float, ...]
    folder: Path


def train_plainly(run: RunSpec, steps: Iterable[StepBatch], folder: Path) -> PlainRun:
    """Train the model of a run in fp32 on the same batches, with a constant learning rate; write it to ``folder``.

    Micro-batches are weighted by their trained tokens, and the gradient is clipped as the run's is: by its global norm,
    or unit by unit.
    """
    from transformers import AutoModelForCausalLM

    attention, optimizer = run.model.table.attn_implementation, run.optimizer
    options = {} if attention == "auto" else {"attn_implementation": attention}
    source = run.model.folder
    model = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, local_files_only=True, **options)
    model.to(run.device).train()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not any(fnmatchcase(name, pattern) for pattern in run.model.table.freeze))
    trained = [(name, parameter) for name, parameter in model.named_parameters() if parameter.requires_grad]
    update = make_plain_optimizer(trained, optimizer, run.optimizer.learning_rate)
    clipped = [[parameter for _, parameter in trained]]
    if optimizer.clip_scope == "layer":
        units = run.model.build(torch.float32).layouts.values()
        names = [{entry.name for entry in unit.entries} for unit in units]
        clipped = [[parameter for name, parameter in trained if name in of_unit] for of_unit in names]
    losses, norms = [], []
    for step in steps:
        batches = [{name: tensor.to(run.device) for name, tensor in batch.items()} for batch in step.micro_batches]
        num_trained = sum(int((batch["labels"][:, 1:] != IGNORED_LABEL).sum()) for batch in batches)
        total = 0.0
        for batch in batches:
            num_own = int((batch["labels"][:, 1:] != IGNORED_LABEL).sum())
            if not num_own:
                continue
            loss = model(**batch, use_cache=False).loss * (num_own / num_trained)
            loss.backward()
            total += float(loss.detach())
        norms.append(float(torch.nn.utils.get_total_norm([p.grad for _, p in trained if p.grad is not None])))
        for parameters in clipped:
            torch.nn.utils.clip_grad_norm_(parameters, optimizer.max_grad_norm or math.inf)
        update.step()
        update.zero_grad(set_to_none=True)
        losses.append(total)
    model.cpu().save_pretrained(folder)
    return PlainRun(tuple(losses), tuple(norms), folder)


def make_plain_optimizer(trained: Sequence[tuple[str, Tensor]], table: OptimizerConfig, learning_rate: float) -> Any:
    """Return the published optimizer that ``table`` names, with its groups and its rule of what decays."""
    groups = []
    for name, parameter in trained:
        own = next((group for group in table.groups if group.matches(name)), None)
        rate = learning_rate if own is None else learning_rate * own.lr_scale(table.learning_rate)
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

    return Adafactor(groups, scale_parameter=False, relative_step=False, lr=learning_rate)


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
    num_processes: int = 1,
    run_command: Sequence[str] = (),
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
        num_processes: that train it together, besides; 1: none do.
        run_command: the words before the config that start a run, where there are several.

    Raises:
        UnsupportedModelError: the config's model cannot be copied.
        ModelFolderError: the config's model cannot be copied.
        UnusablePathError: a drive.
        ConfigError: several processes cannot train with this optimizer.
    """
    start_s = time.perf_counter()
    with ExitStack() as stack:
        stack.enter_context(no_progress_bars())
        folder = stack.enter_context(scratch_folder(scratch))
        drives: list[Path] = []
        if "nvme" in tiers:
            given = () if config is None else resolve_tiers(config).table.nvme
            parents = [existing_parent(drive.path) for drive in given]
            drives = [stack.enter_context(scratch_folder(parent)) for parent in parents or [scratch, scratch]]
        on_progress("making a small model")
        setting = make_setting(config, folder)
        proof = _Proof(setting, drives, tolerances, on_progress, num_processes, run_command)
        checks = tuple(proof.run())
        return Verdict(proof.headline, checks, tuple(proof.notes), time.perf_counter() - start_s)


class _Proof:
    """Makes the runs and compares them."""

    def __init__(
        self,
        setting: Setting,
        drives: Sequence[Path],
        tolerances: Tolerances,
        on_progress: Callable[[str], None],
        num_processes: int,
        run_command: Sequence[str],
    ) -> None:
        self._num_processes, self._run_command = num_processes, run_command
        self._setting, self._drives, self._tolerances, self._say = setting, drives, tolerances, on_progress
        self._table = optimizer_of(setting)
        self._dtype, self._grad_dtype = dtypes_of(setting)
        if num_processes > 1:
            check_ranks(replace(resolve(self._config_of_processes("refused")), world=World.local(0, num_processes)))
        self.notes: list[str] = []
        self.headline = _headline(setting, self._table.optim)
        if self._dtype != "float32" or self._grad_dtype != "float32":
            self.notes.append(
                f"compared with plain training in float32; placements with compute_dtype = {self._dtype}, "
                f"grad_dtype = {self._grad_dtype}"
            )

        if setting.given.model.images != "off":
            self.notes.append(
                f'model.images = "{setting.given.model.images}": the proof is of the language model, on text. '
                "What reads images is no part of the copy"
            )
        if setting.given.lora.is_on:
            self.notes.append("[lora]: the proof is of training all weights. The copy has no adapters")

    def run(self) -> Iterator[Check]:
        """Yield the checks one after the other."""
        setting, table = self._setting, self._table
        self._say("plain training")
        exact = make_config(setting, "exact", table, num_steps=NUM_STEPS)
        steps = batches(Trainer(exact), NUM_STEPS)
        plain = train_plainly(resolve(exact), steps, setting.folder / "plain")
        self._say("tiered training, all in RAM")
        ours = train(Trainer(exact))
        allowed = self._tolerances
        yield self._numbers(f"loss of {NUM_STEPS} steps", plain.losses, ours.losses, allowed.loss)
        yield self._numbers(f"gradient norm of {NUM_STEPS} steps", plain.grad_norms, ours.grad_norms, allowed.norm)
        one_step = make_config(setting, "gradient", gradient_optimizer(), num_steps=1)
        theirs = train_plainly(resolve(one_step), steps[:1], setting.folder / "plain_gradient")
        mine = train(Trainer(one_step))
        start = setting.model.folder
        yield self._gradients(start, theirs.folder, mine.weights)
        yield self._weights(start, plain.folder, ours.weights)
        yield from self._placements(ours)
        if self._num_processes > 1:
            yield self._processes()

    def _processes(self) -> Check:
        """Compare a run of several processes with one, which adds gradients in as many lanes."""
        what = f"{self._num_processes} processes together"
        self._say(what)
        runs = []
        for number in (1, self._num_processes):
            path = self._setting.folder / f"processes{number}.toml"
            path.write_text(to_toml(self._config_of_processes(f"processes{number}")), encoding="utf-8")
            try:
                runs.append(train_in_processes(self._run_command, path, number))
            except RanksFailedError as error:
                return Check(what, "same bits", "failed", (f"{number} processes: {error}",))
        one, together = runs
        problems = tuple(differences(together, one))
        found = f"{len(together.losses)} losses and norms, the exported model"
        return Check(what, "same bits", "different" if problems else found, problems)

    def _config_of_processes(self, name: str) -> RunConfig:
        """Return the config of a run with a micro-batch and a lane for each process at least."""
        drives = [drive / name for drive in self._drives]
        config = make_config(
            self._setting,
            name,
            self._table,
            num_steps=NUM_STEPS,
            compute_dtype=self._dtype,
            grad_dtype=self._grad_dtype,
        )
        values = config.model_dump(exclude_unset=True)
        count = max(self._num_processes, values["training"]["gradient_accumulation_steps"])
        values["training"] |= {"gradient_accumulation_steps": count, "gradient_lanes": self._num_processes}
        values["distributed"] = {"threads": 1}
        values["logging"]["report_to"] = "jsonl"  # the losses
        if drives:
            values["tiers"]["nvme"] = [{"path": str(path), "size": "auto"} for path in drives]
            values["placement"] = {"optimizer": ("nvme",)}
        return RunConfig.model_validate(values)

    def _placements(self, exact: TieredRun) -> Iterator[Check]:
        """Yield what is the same to the bit: wherever blocks live, and stopped in the middle."""
        base = exact
        if self._dtype != "float32" or self._grad_dtype != "float32":
            self._say(f"tiered training in {self._dtype}, all in RAM")
            base = train(self._trainer("base"))
        places: list[tuple[str, Sequence[Path]]] = []
        if self._drives:
            places.append(("everything on NVMe", self._drives[:1]))
            if len(self._drives) > 1:
                places.append((f"striped over {len(self._drives)} drives", self._drives))
        for number, (what, drives) in enumerate(places):
            self._say(what)
            run = train(self._trainer(f"place{number}", [drive / f"place{number}" for drive in drives]))
            yield _same_bits(what, run, base)
        where = [drive / "stopped" for drive in self._drives]
        what = f"stopped after step {STOP_AFTER}, continued" + (" on NVMe" if where else "")
        self._say(what)
        first = train(self._trainer("stopped", where, num_steps=STOP_AFTER))
        yield _same_bits(what, train(self._trainer("stopped", where), first), base)

    def _trainer(self, name: str, drives: Sequence[Path] = (), *, num_steps: int = NUM_STEPS) -> Trainer:
        config = make_config(
            self._setting,
            name,
            self._table,
            num_steps=num_steps,
            compute_dtype=self._dtype,
            grad_dtype=self._grad_dtype,
            drives=drives,
        )
        return Trainer(config)

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
            gradient = (before - theirs) / GRADIENT_RATE
            largest[name] = float(gradient.abs().max())
            apart[name] = float(((before - mine) / GRADIENT_RATE - gradient).abs().max())
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
        if nbytes > run.planned_link_bytes[link] or (nbytes < run.planned_link_bytes[link] and not run.planned_is_most)
    ]
    problems += [
        f"tier {tier} held {nbytes:,} bytes, it has {run.capacity_bytes[tier]:,}"
        for tier, nbytes in run.high_water_bytes.items()
        if nbytes > run.capacity_bytes[tier]
    ]
    found = f"{len(run.losses)} losses and norms, {len(run.state)} blocks"
    if run.moved_bytes:
        is_less = run.moved_bytes < sum(run.planned_link_bytes.values())
        found += f"; {format_size(run.moved_bytes)} moved, {'less than' if is_less else 'as'} planned"
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


def _headline(setting: Setting, optim: str) -> str:
    model = setting.model
    origin = f" (a scaled-down copy of {setting.origin})" if setting.origin else ""
    size = f"{model.num_parameters / 1e6:.2f} M parameters, {model.num_layers} layers"
    return f"{model.family}, {size}{origin}   {setting.device}, {optim}, {NUM_STEPS} steps"
