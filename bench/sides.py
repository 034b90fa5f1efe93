"""Sides that several benches compare: our engine with timed parts of a step, and plain PyTorch."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from bench.common import process_usage
from megatrain.base.layout import TensorEntry
from megatrain.config.schema import RunConfig
from megatrain.data.dataset import load_dataset
from megatrain.data.encoding import load_tokenizer
from megatrain.data.loader import BatchLoader
from megatrain.data.row_order import EpochOrder
from megatrain.engine.micro_batches import shifted_labels
from megatrain.engine.program.block_plan import DURABLE_KINDS
from megatrain.optim.base import FORMATS, Format, Optimizer, Segment, StateKind, Update, is_decayed
from megatrain.plan.plan import Plan
from megatrain.plan.planner import plan_run
from megatrain.plan.shortfall import DoesNotFitError
from megatrain.plan.stepping import warm_up
from megatrain.training.open_run import open_run
from megatrain.training.resolve import resolve, resolve_data
from megatrain.training.weights import WeightSource
from tiered import GpuTier, RamTier, StoreStats

MicroBatches = Sequence[Mapping[str, Tensor]]


@dataclass(frozen=True)
class StepTimes:
    """Measurements of one step, or means over several steps.

    Attributes:
        total_s: Seconds of the whole step.
        parts_s: Seconds of each part, by name.
        loss: Loss before the update.
        grad_norm: Gradient norm before clipping.
        num_drops: Number of buffers freed to make space for buffers of different sizes, by tier.
        usage: CPU seconds and page faults of the step, as in ``process_usage``.
    """

    total_s: float
    parts_s: Mapping[str, float]
    loss: float
    grad_norm: float
    num_drops: Mapping[str, int] = field(default_factory=dict)
    usage: Mapping[str, float] = field(default_factory=dict)


def with_tight_ram(config_with_ram: Callable[[str], RunConfig]) -> RunConfig:
    """Return the config whose RAM tier is a quarter above the minimum.

    Args:
        config_with_ram: Function that returns the config for a RAM size such as "1MiB".
    """
    try:
        plan_run(resolve(config_with_ram("1MiB")))
    except DoesNotFitError as error:
        return config_with_ram(f"{error.need_bytes * 5 // 4}B")
    return config_with_ram("1MiB")


def run_config(model: Path, text: Path, shape: tuple[int, int, int], folder: Path, /, **tables: Any) -> RunConfig:
    """Return the config of a run in fp32 on the CPU that trains on ``text``.

    Every layer is recomputed, as in the compared sides, unless ``training`` changes that.

    Args:
        model: Hugging Face folder with weights and tokenizer.
        shape: Number of micro-batches per step, rows per micro-batch, and tokens per row.
        folder: Writable folder.
        tables: Additional or replaced keys and tables of the config, e.g. ``tiers``.
    """
    num_micro_batches, rows, length = shape
    return RunConfig.model_validate(
        {
            "task": "pretrain",
            "output_dir": str(folder / "outputs"),
            "device": "cpu",
            "model": {"model_name_or_path": str(model), "attn_implementation": "sdpa"},
            "precision": {"compute_dtype": "float32"},
            "data": {"max_length": length, "train": [{"path": str(text)}]},
            "training": {
                "per_device_train_batch_size": rows,
                "gradient_accumulation_steps": num_micro_batches,
                "recompute": "full",
                **tables.pop("training", {}),
            },
            "optimizer": {"learning_rate": 1e-4},
            **tables,
        }
    )


def batches(config: RunConfig) -> Iterator[list[dict[str, Tensor]]]:
    """Yield the micro-batches of each step."""
    tokenizer = load_tokenizer(config.model.model_name_or_path)
    data, training = resolve_data(config), config.training
    shape = data.batch_shape(training.per_device_train_batch_size, training.gradient_accumulation_steps)
    order = EpochOrder(load_dataset(data, tokenizer), shape, config.data_seed)
    return (batch.micro_batches for batch in BatchLoader(order, data.collator(shape, tokenizer)))


@dataclass
class TimedOptimizer:
    """Optimizer that records how many seconds its kernels take."""

    inner: Optimizer
    kernel_s: float = 0.0

    def state_kinds(self, split_master: bool) -> tuple[StateKind, ...]:
        return self.inner.state_kinds(split_master)

    def warm_up(self, formats: Iterable[Format] = FORMATS) -> None:
        self.inner.warm_up(formats)

    def update(
        self, blocks: Mapping[str, Tensor], gradient: Tensor, segments: Sequence[Segment], update: Update
    ) -> None:
        start_s = time.perf_counter()
        self.inner.update(blocks, gradient, segments, update)
        self.kernel_s += time.perf_counter() - start_s


class Ours:
    """Our engine with one placement: a context manager that closes the store. No transfers run between steps.

    Args:
        config: Config of the run.
        num_steps: Number of steps to schedule.
        plan: Plan of the run, or None to plan it.
        source: Function that returns the source of the weights for a plan. By default, weights come from the model's
            folder or its initialization.

    Attributes:
        start_s: Seconds of each part of startup: ``warm_up`` of kernels, ``populate`` and ``pin`` of RAM (over all
            threads), and ``fill``, the remaining time until weights and state are in their homes.
        start_bytes: Bytes processed by ``populate``, ``pin`` and ``fill``.
    """

    def __init__(
        self,
        config: RunConfig,
        num_steps: int,
        *,
        plan: Plan | None = None,
        source: Callable[[Plan], WeightSource] | None = None,
    ) -> None:
        plan = plan or plan_run(resolve(config))
        begin_s = time.perf_counter()
        warm_up(plan)  # also the device's kernels, because the first update is in a measured step
        self.optimizer = TimedOptimizer(plan.traced.optimizer)
        self.plan = replace(plan, traced=replace(plan.traced, optimizer=self.optimizer))
        self.windows: list[StoreStats] = []
        self._num_steps = 0
        self._opened = ExitStack()
        self._run = self._opened.enter_context(open_run(self.plan, source=source and source(self.plan)))
        self._store = self._run.store
        self._tiers = {name: self._store.tier(name) for name in self._store.tier_names}
        warm_s = time.perf_counter()
        self._run.load()
        self._store.wait_idle()
        self.start_s, self.start_bytes = self._start(warm_s - begin_s, time.perf_counter() - warm_s)
        self._before = self._store.stats()
        self._engine = self._run.make_engine(num_steps)
        self._store.wait_idle()

    def __enter__(self) -> Ours:
        return self

    def __exit__(self, *exception: Any) -> None:
        self._opened.__exit__(*exception)

    def _start(self, warm_up_s: float, prepare_s: float) -> tuple[dict[str, float], dict[str, int]]:
        ram, blocks = self._tiers["ram"], self.plan.program.blocks.values()
        assert isinstance(ram, RamTier), ram
        fill_s = max(0.0, prepare_s - ram.populate_s - ram.pin_s)
        seconds = {"warm_up": warm_up_s, "populate": ram.populate_s, "pin": ram.pin_s, "fill": fill_s}
        filled = sum(block.nbytes for block in blocks if block.kind in DURABLE_KINDS)
        is_pinned = self.plan.device.type == "cuda"
        return seconds, {"populate": ram.made_bytes, "pin": ram.made_bytes * is_pinned, "fill": filled}

    def _num_drops(self) -> dict[str, int]:
        return {name: tier.num_drops for name, tier in self._tiers.items() if isinstance(tier, GpuTier | RamTier)}

    def step(self, micro_batches: MicroBatches, lr: float) -> StepTimes:
        """Run one step, and wait for its last write-back and for the first copies of the next step.

        The wait counts as step time, because no work of this side may run during the step of another side.
        """
        return self.steps([micro_batches], lr)

    def steps(self, batches: Sequence[MicroBatches], lr: float) -> StepTimes:
        """Run consecutive steps. Return the mean times per step, and the last loss and gradient norm."""
        store, self.optimizer.kernel_s = self._store, 0.0
        drops = self._num_drops()
        start_s, start_cpu_s, start_usage = time.perf_counter(), time.process_time(), process_usage()
        for micro_batches in batches:
            result = self._engine.step(micro_batches, step_index=self._num_steps, lr=lr)
            self._num_steps += 1
        stepped_s = time.perf_counter()
        store.wait_idle()
        end_s = time.perf_counter()
        window = self._end_window()
        parts = {
            "update_kernels": self.optimizer.kernel_s,
            "settle": end_s - stepped_s,
            "cpu": time.process_time() - start_cpu_s,
            **{f"stall_{cause}": seconds for cause, seconds in window.stall_s.items()},
        }
        parts = {name: seconds / len(batches) for name, seconds in parts.items()}
        drops = {tier: number - drops[tier] for tier, number in self._num_drops().items()}
        usage = _usage_since(start_usage, len(batches))
        return StepTimes((end_s - start_s) / len(batches), parts, result.loss, result.grad_norm, drops, usage)

    def finish(self) -> None:
        """Run the update that the last step postponed."""
        self._engine.finish_updates()
        self._store.wait_idle()
        self._end_window()

    def digests(self) -> dict[str, str]:
        """Return a digest of every block of weights and optimizer state, after the last update."""
        self.finish()
        found = {}
        for block in self.plan.program.blocks.values():
            if block.kind in ("weights", "optimizer"):
                with self._store.acquire(block.key, "ram") as lease:
                    found[block.key] = hashlib.sha256(lease.tensor.view(torch.uint8).numpy()).hexdigest()
                if self.plan.placement.homes[block.key] != "ram":
                    self._store.evict(block.key, "ram")
        return found

    def _end_window(self) -> StoreStats:
        now = self._store.stats()
        window, self._before = now - self._before, now
        self.windows.append(window)
        return window

    def moved_bytes(self) -> dict[str, int]:
        """Return the bytes that all steps moved over each link."""
        return {link: sum(window.links[link].num_bytes for window in self.windows) for link in self.plan.traffic}

    def planned_bytes(self) -> dict[str, int]:
        """Return the planned bytes of all steps, including the update after the last step."""
        return self.plan.placement.run_traffic_bytes(self._num_steps)


class Plain:
    """Plain PyTorch side: the whole Hugging Face model in RAM, gradient accumulation and fused AdamW.

    Args:
        config: Config with the model and the optimizer.
        checkpointing: Whether the backward recomputes every layer. If False, all activations are kept.
    """

    def __init__(self, config: RunConfig, *, checkpointing: bool = True) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(
            config.model.model_name_or_path, dtype=torch.float32, attn_implementation="sdpa"
        )
        self._model.train()
        model = self._model
        if checkpointing:  # transformers 5.23 renamed the method that enables checkpointing
            enable = getattr(model, "activation_checkpointing_enable", None) or model.gradient_checkpointing_enable
            enable({"use_reentrant": False})
        table = config.optimizer
        self._max_grad_norm = table.max_grad_norm
        decaying: list[Tensor] = []
        others: list[Tensor] = []
        for name, parameter in self._model.named_parameters():
            entry = TensorEntry(name, tuple(parameter.shape), 0)
            (decaying if is_decayed(entry, table.weight_decay_exclude) else others).append(parameter)
        groups = [{"params": decaying, "weight_decay": table.weight_decay}, {"params": others, "weight_decay": 0.0}]
        betas = (table.adam_beta1, table.adam_beta2)
        self._optimizer = torch.optim.AdamW(
            groups, lr=table.learning_rate, betas=betas, eps=table.adam_epsilon, fused=True
        )

    def step(self, micro_batches: MicroBatches, lr: float) -> StepTimes:
        """Run one step."""
        marks, start_cpu_s, start_usage = [time.perf_counter()], time.process_time(), process_usage()
        num_items = sum(int((shifted_labels(batch["labels"]) != -100).sum()) for batch in micro_batches)
        loss = 0.0
        for batch in micro_batches:
            term = self._model(**batch, num_items_in_batch=num_items, use_cache=False).loss
            term.backward()
            loss += term.item()
        marks.append(time.perf_counter())
        norm = torch.nn.utils.clip_grad_norm_(self._model.parameters(), self._max_grad_norm)
        marks.append(time.perf_counter())
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        self._optimizer.zero_grad()
        marks.append(time.perf_counter())
        parts = dict(zip(("forward_backward", "clip", "update"), _differences(marks), strict=True))
        parts["cpu"] = time.process_time() - start_cpu_s
        return StepTimes(marks[-1] - marks[0], parts, loss, float(norm), usage=_usage_since(start_usage))


def _usage_since(start: Mapping[str, float], num_steps: int = 1) -> dict[str, float]:
    return {name: (value - start[name]) / num_steps for name, value in process_usage().items()}


def _differences(marks: Sequence[float]) -> list[float]:
    return [after - before for before, after in pairwise(marks)]
