"""Resolves a config into records of a run's numbers, paths, dtypes and choices. No other module derives these values.

The layers below the trainer use the records and never see the config. Each record is defined next to its users.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Self

import torch

from megatrain.checkpoint.best import BestSpec
from megatrain.checkpoint.table import CheckpointSpec
from megatrain.config.resolved import resolved_values, to_toml, with_commit, with_decisions, with_values
from megatrain.config.schema import RunConfig
from megatrain.converters.heads import HeadSpec
from megatrain.converters.spec import ModelSpec
from megatrain.data.encoding import load_tokenizer, pad_token_id
from megatrain.data.rows_report import DataError
from megatrain.data.token_dataset import HELD_OUT_NAME
from megatrain.engine.head.objective import Objective
from megatrain.engine.program.block_plan import KINDS, Kind
from megatrain.engine.table import RecomputeChoice
from megatrain.machine.machine import Machine
from megatrain.machine.resources import TierSpecs, resolve_compute_dtype, stripe_rates
from megatrain.machine.table import TiersConfig
from megatrain.machine.this_machine import THIS_MACHINE
from megatrain.models.hub import find_hub_model
from megatrain.plan.budgets import FOLDER
from megatrain.plan.placement import PlacementSpec
from megatrain.plan.run_spec import MICRO_BATCH_TOKENS, BatchSpec, RunSpec
from megatrain.plan.run_tiers import tier_names
from megatrain.run.loggers import LoggingSpec
from megatrain.tasks.evaluation import EvaluationSource, EvaluationSpec
from megatrain.tasks.registry import task_class
from megatrain.tasks.table import TASK_FACTS
from megatrain.training.resolve_rows import resolve_data, resolve_folders

__all__ = [
    "RunSettings",
    "default_tiers",
    "resolve",
    "resolve_batch",
    "resolve_checkpoint",
    "resolve_data",
    "resolve_evaluation",
    "resolve_logging",
    "resolve_model",
    "resolve_tiers",
]


def resolve(config: RunConfig, machine: Machine = THIS_MACHINE) -> RunSpec:
    """Resolve a config to the specification of a run on a machine.

    Raises:
        ConfigError: The config requests a GPU, but the machine has none.
    """
    device = machine.resolve_device(config.device)
    tiers = resolve_tiers(config, machine)
    training = config.training
    loss = task_class(config.task).make_loss(training, config.task_table)
    return RunSpec(
        name=config.run_name,
        task=config.task,
        output_dir=config.output_dir,
        seed=config.seed,
        device=device,
        dtype=resolve_compute_dtype(config.precision.compute_dtype, device),
        grad_dtype=getattr(torch, config.precision.grad_dtype),
        is_deterministic=config.full_determinism,
        model=resolve_model(config),
        data=resolve_data(config),
        batch=resolve_batch(config, device.type),
        objective=Objective(loss, training.neftune_noise_alpha),
        optimizer=config.optimizer,
        num_epochs=training.num_train_epochs,
        max_steps=training.max_steps if training.max_steps > 0 else None,
        tiers=tiers,
        placement=_placement_spec(config, tier_names(tiers, device)),
        recompute=RecomputeChoice.parse(config.training.recompute),
        advanced=config.advanced,
        trace_steps=config.profile.trace_steps,
        checkpoint=resolve_checkpoint(config),
        export=config.export,
    )


def _head_spec(config: RunConfig, tokenizer_folder: str) -> HeadSpec | None:
    """Return the reward head that replaces the language model's head, or None for a language model."""
    if TASK_FACTS[config.task].has_lm_head:
        return None
    return HeadSpec(config.reward.center_rewards_coefficient, _padding_token(tokenizer_folder))


@functools.cache
def _padding_token(folder: str) -> int:
    """Return the id of the padding token, or 0 if the tokenizer cannot be opened. Later code reports that error."""
    try:
        return pad_token_id(load_tokenizer(folder))
    except DataError:
        return 0


def resolve_model(config: RunConfig) -> ModelSpec:
    """Return the model to train. For a hub model, download missing files except weights.

    Raises:
        HubError: The hub has no such model, or cannot be reached.
    """
    table = config.model
    hub = find_hub_model(table.model_name_or_path, table.revision)
    folder, tokenizer_folder = resolve_folders(config)
    return ModelSpec(
        table,
        folder,
        tokenizer_folder,
        hub,
        lora=config.lora if config.lora.is_on else None,
        task_spec=_head_spec(config, tokenizer_folder),
    )


def resolve_batch(config: RunConfig, device: str) -> BatchSpec:
    """Return how a step is divided into micro-batches.

    Args:
        device: Type of the compute device. Unless the config sets their size, micro-batches are larger on a GPU.
    """
    return BatchSpec(
        num_rows=config.rows_per_step,
        max_length=config.data.max_length,
        configured_rows=config.micro_batch_size,
        # Flash attention can separate packed documents only in micro-batches of one row.
        single_rows=bool(config.data.packing) and config.model.attn_implementation == "flash_attention_2",
        order="micro_batch" if config.advanced.micro_batch_order == "micro_batch" else "layer",
        rows_per_example=config.rows_per_example,
        target_tokens=MICRO_BATCH_TOKENS[device],
        num_lanes=None if config.training.gradient_lanes == "auto" else config.training.gradient_lanes,
    )


def resolve_tiers(config: RunConfig, machine: Machine = THIS_MACHINE) -> TierSpecs:
    """Return the resources that a run may use on a machine."""
    advanced = config.advanced
    return _tier_specs(config.tiers, machine, file_bytes=advanced.file_size, emulates_gpu=advanced.emulate_gpu)


def default_tiers() -> TierSpecs:
    """Return the resources that a run may use on this machine by default."""
    return _tier_specs(TiersConfig(), THIS_MACHINE)


def _tier_specs(
    table: TiersConfig, machine: Machine, *, file_bytes: int | None = None, emulates_gpu: bool = False
) -> TierSpecs:
    paths = [drive.path for drive in table.nvme]
    rates = [drive.rate for drive in table.nvme if drive.rate is not None]
    return TierSpecs(
        table,
        machine,
        rates=tuple(stripe_rates(paths, rates, machine)),
        has_rates=len(rates) == len(paths),
        emulates_gpu=emulates_gpu,
        file_bytes=file_bytes,
    )


def _placement_spec(config: RunConfig, tiers: Sequence[str]) -> PlacementSpec:
    """Return the allowed homes of each kind of block.

    If the setting of a kind is "auto", the planner can also choose GPU memory as the home of some of its blocks.
    """
    table = config.placement
    choices: Mapping[Kind, Literal["auto"] | tuple[str, ...]] = {
        "weights": table.weights,
        "activations": table.activations,
        "gradients": table.gradients,
        "optimizer": table.optimizer,
    }
    default = [tier for tier in tiers if tier != "gpu"]
    homes: dict[Kind | Literal["in place"], Sequence[str]] = {}
    for kind in KINDS:
        names = choices[kind]
        homes[kind] = default if names == "auto" else [tier for tier in names if tier in tiers] or default
    # Frozen weights are already in the model's folder, so a drive would only contain a second copy.
    names = ("ram", FOLDER) if table.weights == "auto" else table.weights
    homes["in place"] = [tier for tier in names if tier in (*tiers, FOLDER)] or default
    return PlacementSpec(homes, frozenset(kind for kind in KINDS if choices[kind] == "auto" or "gpu" in choices[kind]))


def resolve_checkpoint(config: RunConfig) -> CheckpointSpec:
    """Return the locations of checkpoints, and the rules for saving and pruning them."""
    drives = tuple(drive.path for drive in config.tiers.nvme)
    return CheckpointSpec(config.checkpoint, config.output_dir, drives, config.tiers.on_disk_full)


def resolve_evaluation(config: RunConfig) -> EvaluationSpec:
    """Return the rules and the data sets for evaluations."""
    table = config.evaluation
    sources = (
        EvaluationSource(
            dataset.display_name,
            f"data.eval.{index} ({dataset.path})",
            resolve_data(config, [dataset.as_source(table.eval_max_samples)]),
        )
        for index, dataset in enumerate(config.data.eval)
    )
    rows = table.per_device_eval_batch_size
    return EvaluationSpec(table, None if rows is None else rows * config.rows_per_example, tuple(sources))


def resolve_best(config: RunConfig) -> BestSpec:
    """Return the rule that selects the best evaluation, and what the run does with that evaluation."""
    table, evaluations = config.evaluation, resolve_evaluation(config)
    metric, is_greater = table.metric_for_best_model, table.greater_is_better
    sets = [HELD_OUT_NAME] if config.data.val_size is not None else [source.name for source in evaluations.sources]
    averages = [f"{evaluations.evaluation_name(name, 'average')}_" for name in sets]
    return BestSpec(
        metric,
        is_greater_better=not metric.endswith(("loss", "perplexity")) if is_greater is None else is_greater,
        is_kept=config.checkpoint.load_best_model_at_end,
        patience=table.early_stopping_patience,
        threshold=table.early_stopping_threshold,
        is_average=table.weights == "average"
        or (table.weights == "both" and metric.removeprefix("eval_").startswith(tuple(averages))),
    )


def resolve_logging(config: RunConfig) -> LoggingSpec:
    """Return the destinations of a run's metrics."""
    return LoggingSpec(config.logging, config.run_name, config.output_dir, resolved_values(config), to_toml(config))


@dataclass(frozen=True, slots=True)
class RunSettings:
    """Resolved settings of a planned run, in addition to the settings in the plan.

    Attributes:
        config: Config with the planner's choices for unset keys, and with the commit of a hub model.
        best: Rule that selects the best evaluation.
        logging: Destinations of metrics.
    """

    config: RunConfig
    evaluation: EvaluationSpec
    best: BestSpec
    logging: LoggingSpec

    @classmethod
    def from_config(cls, config: RunConfig, run: RunSpec) -> Self:
        """Resolve the settings of a config that was planned as ``run``."""
        muon_fused = run.optimizer.muon_fused
        choices = {
            "training.gradient_lanes": run.num_lanes,
            "optimizer.muon_fused": "parts" if muon_fused == "auto" else muon_fused,
            "model.use_liger_kernel": run.uses_liger,
            "model.flash_attention": run.flash,
        }
        config = with_values(with_decisions(config, choices), {"data.packing": run.data.table.packing})
        config = with_commit(config, run.model.hub)
        return cls(config, resolve_evaluation(config), resolve_best(config), resolve_logging(config))
