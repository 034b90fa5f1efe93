"""Schema of the complete config: each package owns its tables, and this module combines them.

If transformers 5 or TRL 1 has the same setting, the key has the same name. Tables check single values, and
``megatrain.config.combinations`` checks values against each other.

To add a key, add a field to its table in the package that reads the key (``megatrain/optim/table.py``). The JSON Schema
in ``keys`` then includes it. The reference, ``config explain``, messages about wrong values, and the comparison on a
resume use this schema.
"""

from __future__ import annotations

import functools
from typing import Any, Literal

from pydantic import model_validator

from megatrain.base.table import HF, ConfigPath, Table, key
from megatrain.checkpoint.table import CheckpointConfig
from megatrain.data.row_kind import RowKind, row_kind
from megatrain.data.table import DataConfig, ScoreConfig
from megatrain.engine.table import PrecisionConfig, TrainingConfig
from megatrain.machine.table import TiersConfig
from megatrain.models.table import ExportConfig, LoraConfig, ModelConfig
from megatrain.optim.table import OptimizerConfig
from megatrain.plan.table import AdvancedConfig, PlacementConfig
from megatrain.ranks.table import DistributedConfig
from megatrain.run.table import LoggingConfig, ProfileConfig
from megatrain.tasks.table import (
    TASK_FACTS,
    DistillConfig,
    EvaluationConfig,
    PreferenceConfig,
    RewardConfig,
    TaskName,
    TaskTable,
)


class RunConfig(Table):
    """The config of a run."""

    config_version: Literal[1] = key("Version of this file format.", 1, alters="no")
    task: TaskName = key(
        "; ".join(f"{name}: {facts.description}" for name, facts in TASK_FACTS.items()) + ".",
        alters="yes",
    )
    output_dir: ConfigPath = key(
        "Folder of the run: metrics, resolved config, trained model.",
        examples=["outputs/first"],
        alters="no",
        same_name=HF,
    )
    run_name: str = key(
        "Default: the name of output_dir.",
        default_factory=lambda values: values["output_dir"].name or "run",
        alters="no",
        same_name=HF,
    )
    seed: int = key("Seed of dropout and random weights.", 42, ge=0, alters="yes", same_name=HF)
    data_seed: int = key(
        "Seed of the data order. Default: seed.",
        default_factory=lambda values: values["seed"],
        ge=0,
        alters="yes",
        same_name=HF,
    )
    device: Literal["auto", "cpu", "cuda"] = key("auto: cuda if a GPU exists.", "auto", alters="yes")
    full_determinism: bool = key(
        "On a GPU, use only kernels with bit-identical results in every run. false: use any kernel; results then "
        "depend on timing.",
        True,
        alters="yes",
        same_name="transformers",
    )
    model: ModelConfig = key("The model to train.")
    lora: LoraConfig = key("Adapters instead of the whole model.", default_factory=LoraConfig)
    precision: PrecisionConfig = key("Number formats.", default_factory=PrecisionConfig)
    data: DataConfig = key("Rows, loss masks and packing.")
    training: TrainingConfig = key("Size and number of steps.", default_factory=TrainingConfig)
    preference: PreferenceConfig = key("The loss of preferences.", default_factory=PreferenceConfig)
    reward: RewardConfig = key("The loss of rewards.", default_factory=RewardConfig)
    optimizer: OptimizerConfig = key("The update and its schedule.", default_factory=OptimizerConfig)
    score: ScoreConfig = key("Output of `score`.", default_factory=ScoreConfig)
    distill: DistillConfig = key("Training on a teacher's scores.", default_factory=DistillConfig)
    evaluation: EvaluationConfig = key("Losses of held-out rows.", default_factory=EvaluationConfig)
    checkpoint: CheckpointConfig = key("Saving and continuing.", default_factory=CheckpointConfig)
    export: ExportConfig = key("The folder written at the end.", default_factory=ExportConfig)
    logging: LoggingConfig = key("Console output and metrics.", default_factory=LoggingConfig)
    tiers: TiersConfig = key("Memory and drives of the run.", default_factory=TiersConfig)
    placement: PlacementConfig = key("Home tiers by kind of block.", default_factory=PlacementConfig)
    distributed: DistributedConfig = key("Several processes on one run.", default_factory=DistributedConfig)
    profile: ProfileConfig = key("Timelines.", default_factory=ProfileConfig)
    advanced: AdvancedConfig = key("Settings for measurements.", default_factory=AdvancedConfig)

    @model_validator(mode="before")
    @classmethod
    def _fill_dependent_defaults(cls, values: Any) -> Any:
        """Fill in keys whose default depends on values of other tables."""
        if not isinstance(values, dict):
            return values
        result = dict(values)
        facts = TASK_FACTS.get(str(result.get("task")))
        if facts is not None and isinstance(result.get("data"), dict):
            packing = {} if facts.is_packed else {"packing": False}
            train_on = {} if facts.train_on is None else {"train_on": facts.train_on}
            result["data"] = {**packing, **train_on, **result["data"]}
        if isinstance(result.get("data"), dict) and (result["data"].get("eval") or result["data"].get("val_size")):
            table = result.get("evaluation", {})
            result["evaluation"] = {"eval_strategy": "steps", **table} if isinstance(table, dict) else table
        return result

    def value(self, key: str) -> Any:
        """Return the value of a dotted key that is not in an array table."""
        return functools.reduce(getattr, key.split("."), self)

    @property
    def rows_per_step(self) -> int:
        """Rows of ``data.max_length`` tokens in one optimizer step, over all micro-batches."""
        if self.training.train_batch_tokens is not None:
            return self.training.train_batch_tokens // self.data.max_length
        rows = self.training.per_device_train_batch_size * self.training.gradient_accumulation_steps
        return rows * self.rows_per_example

    @property
    def task_table(self) -> TaskTable | None:
        """The table of the task, or None if the task has none."""
        return getattr(self, TASK_FACTS[self.task].table, None)

    @property
    def row_kind(self) -> RowKind:
        """Kind of rows on which the task trains."""
        return row_kind(TASK_FACTS[self.task].rows(self.task_table))

    @property
    def rows_per_example(self) -> int:
        """Number of rows that one example occupies in a micro-batch."""
        return self.row_kind.num_documents

    @property
    def micro_batch_size(self) -> int | None:
        """Rows per micro-batch; None if the planner chooses a divisor of :attr:`rows_per_step`."""
        if self.training.train_batch_tokens is not None:
            return None
        return self.training.per_device_train_batch_size * self.rows_per_example
