"""Short runs of the real engine with a real store, which record losses, final blocks and moved bytes."""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from megatrain.base.layout import views
from megatrain.config import load_config
from megatrain.config.schema import RunConfig
from megatrain.data.dataset import load_dataset
from megatrain.data.encoding import load_tokenizer
from megatrain.data.loader import BatchLoader
from megatrain.optim.lr import learning_rate_schedule
from megatrain.plan import planner
from megatrain.plan.attempts import Attempts
from megatrain.plan.plan import Plan
from megatrain.training import rows
from megatrain.training.resolve import resolve, resolve_data
from megatrain.training.trainer import Trainer
from oracles.traces import cached_traces
from tiered import StoreStats

EXAMPLES = Path(__file__).parents[2] / "examples"
#: Lines of ``[placement]`` that put all blocks on drives.
ALL_NVME = 'weights = ["nvme"]\ngradients = ["nvme"]\noptimizer = ["nvme"]\nactivations = ["nvme"]'


@dataclass
class TieredRun:
    """Results of a run: losses, gradient norms, block digests, fp32 weights and averages by name, and traffic."""

    plan: Plan
    losses: list[float] = field(default_factory=list)
    grad_norms: list[float] = field(default_factory=list)
    digests: dict[str, str] = field(default_factory=dict)
    weights: dict[str, torch.Tensor] = field(default_factory=dict)
    averages: dict[str, torch.Tensor] = field(default_factory=dict)
    moved: StoreStats | None = None
    moved_outside: Mapping[str, int] = field(default_factory=dict)

    def assert_as_planned(self) -> None:
        """Assert that the traffic is as planned, that no fetch was wasted, and that no tier exceeded its capacity."""
        assert self.moved is not None
        moved = {link: stats.num_bytes + self.moved_outside.get(link, 0) for link, stats in self.moved.links.items()}
        assert moved == self.plan.placement.run_traffic_bytes(len(self.losses))
        assert self.moved.prefetch_wasted == 0 and self.moved.schedule_misses == 0
        for tier, stats in self.moved.tiers.items():
            assert stats.capacity_bytes == self.plan.budgets[tier]
            # A block's home slot stays allocated for the whole run.
            assert stats.home_bytes == sum(self.plan.placement.home_bytes[tier].values())
            assert stats.home_bytes <= stats.high_water_bytes <= stats.capacity_bytes

    def assert_same(self, other: TieredRun) -> None:
        """Assert that losses, gradient norms, weights and optimizer state are bit-identical in both runs."""
        assert self.losses == other.losses and self.grad_norms == other.grad_norms
        assert self.digests == other.digests


def config_text(
    folder: Path,
    model: Path,
    *,
    nvme: int = 1,
    rates: Sequence[int] | None = None,
    gpu: str = "",
    device: str = "cpu",
    **tables: str,
) -> str:
    """Return a config that trains a model on text from Moby Dick.

    Args:
        nvme: Number of NVMe paths.
        rates: Rate of each path in GB/s.
        gpu: Size of the GPU tier, or "" for none. On the device "cpu", the tier is emulated.
        tables: Lines to add, by table name. ``top`` precedes all tables. ``ram`` is the size of the RAM tier instead.
    """
    if gpu and device == "cpu":
        tables["advanced"] = f"emulate_gpu = true\n{tables.get('advanced', '')}"
    text = f"""
task = "pretrain"
output_dir = "{folder / "out"}"
device = "{device}"
{tables.get("top", "")}
[model]
model_name_or_path = "{model}"
[data]
max_length = 64
{tables.get("data", "")}
[[data.train]]
path = "{EXAMPLES / "quickstart" / "loomings.txt"}"
[training]
per_device_train_batch_size = 2
gradient_accumulation_steps = 3
{tables.get("training", "")}
[optimizer]
learning_rate = 1e-3
lr_scheduler_type = "constant"
warmup_steps = 0
{tables.get("optimizer", "")}
[precision]
{tables.get("precision", "")}
[placement]
{tables.get("placement", "")}
[advanced]
{tables.get("advanced", "")}
[tiers]
{tables.get("tiers", "")}
[tiers.ram]
size = "{tables.get("ram", "256MiB")}"
"""
    text += f'[tiers.gpu]\nsize = "{gpu}"\n' if gpu else ""
    for number in range(nvme):
        text += f'[[tiers.nvme]]\npath = "{folder / f"drive{number}"}"\nsize = "256MiB"\n'
        text += f'rate = "{rates[number]}GB/s"\n' if rates else ""
    return text


def plan_of(config: RunConfig) -> Plan:
    """Plan a run. Traces are cached, because most runs of a test differ only in placement."""
    with cached_traces():
        return planner.plan_run(resolve(config))


@contextmanager
def force_passing(passes: bool) -> Iterator[None]:
    """Make plans lease vocabulary parts one by one if ``passes`` is set, and otherwise hold all of them."""

    def attempts(*values: Any, **options: Any) -> Attempts:
        return replace(Attempts(*values, **options), passes_parts=passes)

    with mock.patch.object(planner, "Attempts", attempts):
        yield


def run_config(text: str, folder: Path, *, num_steps: int) -> TieredRun:
    """Plan a run, train ``num_steps`` steps, and read all durable blocks back."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / "run.toml"
    path.write_text(text)
    config = load_config(path).config
    plan = plan_of(config)
    run = TieredRun(plan)
    loader = make_loader(config, plan)
    table = config.optimizer
    lr = learning_rate_schedule(
        table.lr_scheduler_type, table.learning_rate, num_steps, table.num_warmup_steps(num_steps)
    )
    with Trainer(config, plan=plan).open() as running:
        running.load()
        store = running.store
        store.wait_idle()
        before = store.stats()
        engine = running.make_engine(num_steps)
        for number in range(num_steps):
            result = engine.step(next(loader).micro_batches, step_index=number, lr=lr(number))
            run.losses.append(result.loss)
            run.grad_norms.append(result.grad_norm)
        engine.finish_updates()
        store.wait_idle()
        run.moved, run.moved_outside = store.stats() - before, engine.moved_bytes
        running.end_steps()  # frees the steps' memory, which reading the weights may need, as in an export
        for block in plan.program.blocks.values():
            if block.kind in ("weights", "optimizer"):
                home = plan.placement.homes[block.key]
                with store.acquire(block.key, "gpu" if home == "gpu" else "ram") as lease:
                    contents = lease.tensor.cpu().view(torch.uint8).numpy()
                    run.digests[block.key] = hashlib.sha256(contents).hexdigest()
        for layout in plan.graph.layouts.values():
            with running.weights.master(layout) as read:
                run.weights.update(views(read(0, layout.num_elements).clone(), layout))
            for key in plan.program.state_keys(layout, "ema"):
                if key in plan.program.blocks and len(plan.program.layout_parts(layout)) == 1:
                    with store.acquire(key, "gpu" if plan.placement.homes[key] == "gpu" else "ram") as lease:
                        run.averages.update(views(lease.tensor.cpu().clone(), layout))
    return run


def make_loader(config: Any, plan: Plan) -> BatchLoader:
    """Return the loader that the trainer would use."""
    tokenizer = load_tokenizer(config.model.tokenizer_name_or_path or config.model.model_name_or_path)
    data = resolve_data(config)
    return rows.make_loader(plan, load_dataset(data, tokenizer), tokenizer)


QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart" / "model"


def write_tiny_model(folder: Path, **changes: Any) -> Path:
    """Write random weights, a config and a tokenizer to a folder, and return it. ``changes`` replace config values."""
    torch.manual_seed(7)
    config = AutoConfig.from_pretrained(QUICKSTART, **changes)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder)
    return add_tokenizer(folder)


def add_tokenizer(folder: Path) -> Path:
    """Copy the repository's tokenizer to a model folder, and return the folder."""
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(QUICKSTART / name, folder / name)
    return folder
