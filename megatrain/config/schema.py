"""The config: one frozen model per TOML table, one field per key.

Leaf names are those of transformers 5 and TRL 1 where one exists. Every key here does something in this release.
Values are checked one by one here; combinations that cannot work are found by ``megatrain.config.combinations``.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, model_validator

from megatrain.config.data_tables import DataConfig
from megatrain.config.fields import (
    ConfigPath,
    CopyRule,
    Duration,
    GraphCount,
    PlainSize,
    Preference,
    PrefetchSize,
    ReportTargets,
    ResumeSource,
    StringTuple,
    Table,
    as_tuple,
)
from megatrain.config.tier_tables import TiersConfig
from tiered.units import GiB


class ModelConfig(Table):
    """``[model]``: what is trained."""

    model_name_or_path: str = Field(min_length=1, description="Hugging Face folder with config.json and safetensors.")
    tokenizer_name_or_path: str | None = Field(
        default=None, description="Folder of the tokenizer. Default: the model's."
    )
    chat_template: str = Field(default="auto", description='"auto" (the tokenizer\'s) or the path of a .jinja file.')
    attn_implementation: Literal["auto", "sdpa", "eager", "flash_attention_2"] = Field(
        default="auto", description="Attention kernel; auto: sdpa where the model supports it, else eager."
    )
    compile: bool = Field(
        default=False,
        description="torch.compile of the layers, once per kind of layer. Other roundings than without; minutes at the "
        "first step, and a C++ compiler or Triton.",
    )
    compile_backend: Literal["inductor", "aot_eager", "eager"] = Field(
        default="inductor", description="compile: inductor makes kernels; the others are for finding faults."
    )
    use_liger_kernel: bool = Field(
        default=False,
        description="Norms, gated MLPs and cross entropy computed by the package liger-kernel, where it has kernels "
        "for the model; needs a GPU. Other roundings than without.",
    )
    mlp_rows: int = Field(
        default=0,
        ge=0,
        description="Run the MLPs of layers over so many tokens at a time and once more in the backward, for long "
        "sequences: memory inside them is that of a piece. Weights' gradients are summed in another order. 0: off.",
    )
    trust_remote_code: Literal[False] = Field(default=False, description="Code in a model folder is never run.")
    train_from_scratch: bool = Field(default=False, description="Start from random weights; only config.json is read.")
    freeze: StringTuple = Field(
        default=(), description='Globs of parameter names that stay as they are, e.g. ["model.embed_tokens.*"].'
    )


class PrecisionConfig(Table):
    """``[precision]``: number formats."""

    compute_dtype: Literal["auto", "float32", "bfloat16"] = Field(
        default="auto", description="What layers multiply; auto: bfloat16 with CUDA, float32 on the CPU."
    )
    grad_dtype: Literal["float32", "bfloat16"] = Field(
        default="float32",
        description="What gradients are kept in until the update. They are summed in float32 either way; bfloat16 "
        "halves their bytes and rounds each sum once, to 8 bits of mantissa.",
    )


class TrainingConfig(Table):
    """``[training]``: size of a step and length of the run."""

    train_batch_tokens: int | None = Field(
        default=None,
        ge=2,
        description="Tokens per optimizer step, a multiple of data.max_length. Instead of the next two.",
    )
    per_device_train_batch_size: int = Field(default=8, ge=1, description="Rows per micro-batch.")
    gradient_accumulation_steps: int = Field(default=1, ge=1, description="Micro-batches per optimizer step.")
    num_train_epochs: float = Field(default=1.0, gt=0, description="Passes over the data.")
    max_steps: int = Field(default=-1, ge=-1, description="Optimizer steps; overrides num_train_epochs. -1: not set.")
    label_smoothing_factor: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="Share of every target that is spread evenly over the vocabulary. Evaluations do not smooth.",
    )
    neftune_noise_alpha: float = Field(
        default=0.0,
        ge=0,
        description="NEFTune: uniform noise on the input embeddings, of at most this / sqrt(tokens in a row x width). "
        "0: none.",
    )


class EvaluationConfig(Table):
    """``[evaluation]``: when ``[[data.eval]]``, or what ``data.val_size`` kept, is evaluated, and how much of it."""

    eval_strategy: Literal["no", "steps", "epoch"] = Field(
        default="no",
        description="When to evaluate. Unless no, also at the end. Default: steps where there is a [[data.eval]] or a "
        "data.val_size, else no.",
    )
    eval_steps: int = Field(default=100, ge=1, description="steps: optimizer steps between two evaluations.")
    eval_on_start: bool = Field(default=False, description="Also before the first step.")
    eval_max_samples: int | None = Field(
        default=None, ge=1, description="Use at most this many rows of each set, from the start."
    )
    per_device_eval_batch_size: int | None = Field(
        default=None,
        ge=1,
        description="Rows per micro-batch, at most those of a training micro-batch, whose memory is planned. "
        "Default: the same.",
    )


class ParameterGroupConfig(Table):
    """``[[optimizer.groups]]``: parameters with settings of their own."""

    params: Annotated[tuple[str, ...], BeforeValidator(as_tuple), Field(min_length=1)] = Field(
        description="Globs of parameter names. Of the groups that match a parameter the first one counts."
    )
    learning_rate: float | None = Field(
        default=None, gt=0, description="Peak learning rate, on the same schedule. Not set: the optimizer's."
    )
    weight_decay: float | None = Field(
        default=None, ge=0, description="For those of them that decay. Not set: the optimizer's."
    )


class OptimizerConfig(Table):
    """``[optimizer]``: the update and its schedule."""

    optim: Literal["adamw", "lion", "sgd", "adafactor"] = Field(
        default="adamw",
        description="State beside the 4 bytes of a parameter: adamw 8 bytes, lion and sgd 4, adafactor almost none.",
    )
    learning_rate: float = Field(default=1e-5, gt=0, description="Peak learning rate.")
    weight_decay: float = Field(
        default=0.1,
        ge=0,
        description="Decay per step, times the learning rate; with sgd added to the gradient, as in torch.",
    )
    weight_decay_exclude: StringTuple = Field(
        default=("*.bias", "*norm*", "*embed*"), description="Globs of parameter names that do not decay."
    )
    adam_beta1: float = Field(
        default=0.9, ge=0, lt=1, description="adamw: decay of the first moment. lion: its weight in the direction."
    )
    adam_beta2: float = Field(
        default=0.95, ge=0, lt=1, description="adamw: decay of the second moment. lion: of its moment, 0.99 by default."
    )
    adam_epsilon: float = Field(default=1e-8, gt=0, description="adamw: added to the denominator.")
    sgd_momentum: float = Field(default=0.9, ge=0, lt=1, description="sgd: decay of the moment. 0: no state.")
    sgd_nesterov: bool = Field(default=False, description="sgd: look one step of momentum ahead.")
    max_grad_norm: float = Field(
        default=1.0, ge=0, description="Gradients are scaled to at most this norm. 0: no clipping."
    )
    nonfinite: Literal["stop", "skip", "ignore"] = Field(
        default="stop",
        description="A NaN or infinite gradient: stop ends the run, skip leaves that update out, ignore does not look "
        "and, without clipping, lets a layer be updated during the backward.",
    )
    lr_scheduler_type: str = Field(
        default="cosine", description="Name of a schedule of transformers, e.g. cosine, linear."
    )
    lr_scheduler_kwargs: dict[str, int | float | str] = Field(
        default_factory=dict, description="Extra arguments of the schedule, e.g. { min_lr_rate = 0.1 }."
    )
    warmup_steps: float = Field(default=0.03, ge=0, description=">= 1: steps. < 1: fraction of all steps.")
    groups: Annotated[tuple[ParameterGroupConfig, ...], BeforeValidator(as_tuple)] = Field(
        default=(), description="Parameters with a learning rate or a decay of their own."
    )

    @model_validator(mode="before")
    @classmethod
    def _fill_default_of_lion(cls, values: Any) -> Any:
        if isinstance(values, dict) and values.get("optim") == "lion":
            return {"adam_beta2": 0.99, **values}
        return values


class CheckpointConfig(Table):
    """``[checkpoint]``: when the run is saved, how often that is kept, and what a run starts from."""

    save_strategy: Literal["steps", "time", "epoch", "no"] = Field(
        default="steps",
        description="When to save. Unless no, also at the end. Default: time where save_interval is given, else steps.",
    )
    save_steps: int = Field(default=200, ge=1, description="steps: optimizer steps between two saves.")
    save_interval: Duration | None = Field(default=None, description='time: between two saves, e.g. "45min".')
    save_total_limit: int = Field(default=2, ge=1, description="Checkpoints that are kept, the newest ones.")
    save_copy: CopyRule = Field(
        default=False,
        description="Whole copies in output_dir/copies, made while training goes on, from which a run continues if a "
        'drive of [[tiers.nvme]] is lost. true: of every checkpoint; 5: of every fifth; "last": only of the one at the '
        "end or at a stop, which all but false copy. save_total_limit of them are kept.",
    )
    save_on_signal: bool = Field(
        default=True,
        description="SIGTERM, SIGINT and SIGHUP: finish the step, save, exit with 75. false: end at once.",
    )
    resume_from_checkpoint: ResumeSource = Field(
        default="auto",
        description='"auto": continue the run in output_dir if there is one; "no": start at the beginning, '
        "refused where output_dir holds checkpoints; or the output_dir of another run, to start from its newest one.",
    )
    async_save: bool = Field(default=True, description="Training goes on while a checkpoint is written.")
    min_free_disk: PlainSize = Field(default=GiB, ge=0, description="Space that a save leaves free on its drive.")

    @model_validator(mode="before")
    @classmethod
    def _fill_strategy(cls, values: Any) -> Any:
        if isinstance(values, dict) and "save_interval" in values:
            return {"save_strategy": "time", **values}
        return values

    @property
    def copy_every(self) -> int | None:
        """Saves from one copy to the next; None: none is copied, or only the last."""
        if isinstance(self.save_copy, bool):
            return 1 if self.save_copy else None
        return self.save_copy if isinstance(self.save_copy, int) else None

    @property
    def is_on(self) -> bool:
        """Whether this run may save at all."""
        return self.save_strategy != "no" or self.save_on_signal


class ExportConfig(Table):
    """``[export]``: the Hugging Face folder written at the end."""

    format: Literal["safetensors"] = Field(default="safetensors", description="Config, tokenizer, shards and index.")
    dtype: Literal["auto", "float32", "bfloat16"] = Field(default="auto", description="auto: the compute dtype.")
    max_shard_size: PlainSize = Field(default=5 * 10**9, ge=1, description='Largest file, e.g. "5GB".')


class LoggingConfig(Table):
    """``[logging]``: what is shown and kept."""

    logging_steps: int = Field(default=1, ge=1, description="Steps between two lines.")
    report_to: ReportTargets = Field(
        default=("jsonl",),
        description="Where figures go: jsonl, output_dir/metrics.jsonl; tensorboard, output_dir/tensorboard; wandb, "
        'Weights & Biases. The last two need the extra of that name. "none": nowhere.',
    )
    project: str = Field(default="megatrain-tier", min_length=1, description="wandb: project of the run.")
    progress: Literal["auto", "bar", "plain", "json", "none"] = Field(
        default="auto", description="auto: a bar on a terminal, else plain lines."
    )


class PlacementConfig(Table):
    """``[placement]``: "auto", or tiers in order of preference, per kind of bytes."""

    weights: Preference = Field(default="auto", description="Parameters in the compute dtype.")
    gradients: Preference = Field(default="auto", description="Gradient sums.")
    optimizer: Preference = Field(default="auto", description="Optimizer state, and the low halves of bf16 parameters.")
    activations: Preference = Field(default="auto", description="Inputs of layers, kept for the recompute.")


class AdvancedConfig(Table):
    """``[advanced]``: for measurements. The results do not depend on any of these."""

    prefetch: PrefetchSize = Field(
        default="auto", description='Bytes fetched ahead: "auto", "0", "2GiB" or "unlimited".'
    )
    eviction_policy: Literal["schedule", "lru"] = Field(default="schedule", description="Who leaves a full tier first.")
    file_size: PlainSize | None = Field(
        default=None,
        ge=4096,
        multiple_of=4096,
        description='Largest file of a block: "16MiB". Not set: 512 MiB, striped 16 MiB.',
    )
    micro_batch_order: Literal["layer", "micro_batch"] = Field(
        default="layer", description="layer: each layer runs for all micro-batches before the next."
    )
    keep_graphs: GraphCount = Field(
        default="auto",
        description="Layers, counted from the last one, that the backward does not run again, as the graph of their "
        "forward is kept in the compute tier. auto: as many as fit where every block is at home there, none with "
        "compile or use_liger_kernel; 0: none.",
    )
    emulate_gpu: bool = Field(
        default=False,
        description='With device = "cpu": a second part of RAM, of tiers.gpu.size, takes the place of GPU memory. For '
        "tests, and for trying a setup out; the processor computes.",
    )


class ProfileConfig(Table):
    """``[profile]``: timelines."""

    trace_steps: Annotated[tuple[Annotated[int, Field(ge=1)], ...], BeforeValidator(as_tuple)] = Field(
        default=(), description="Steps, from 1, whose timeline is written to output_dir/trace.json, for Perfetto."
    )


class RunConfig(Table):
    """A whole run."""

    config_version: Literal[1] = Field(default=1, description="Version of this file format.")
    task: Literal["sft", "pretrain"] = Field(description="sft: chats and prompts; pretrain: plain text.")
    output_dir: ConfigPath = Field(description="Folder of the run: metrics, resolved config, trained model.")
    run_name: str = Field(description="Default: the name of output_dir.")
    seed: int = Field(default=42, ge=0, description="Dropout and random weights.")
    data_seed: int = Field(ge=0, description="Order of the data. Default: seed.")
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="auto: cuda when there is one.")
    full_determinism: bool = Field(
        default=True,
        description="On a GPU: only kernels that give the same bits at every run. false: any; bits then depend on "
        "timing.",
    )
    model: ModelConfig = Field(description="What is trained.")
    precision: PrecisionConfig = Field(default_factory=PrecisionConfig, description="Number formats.")
    data: DataConfig = Field(description="Rows, masks and their arrangement.")
    training: TrainingConfig = Field(default_factory=TrainingConfig, description="Size and number of steps.")
    optimizer: OptimizerConfig = Field(default_factory=OptimizerConfig, description="The update and its schedule.")
    evaluation: EvaluationConfig = Field(default_factory=EvaluationConfig, description="Losses of held-out rows.")
    checkpoint: CheckpointConfig = Field(default_factory=CheckpointConfig, description="Saving and continuing.")
    export: ExportConfig = Field(default_factory=ExportConfig, description="The folder written at the end.")
    logging: LoggingConfig = Field(default_factory=LoggingConfig, description="What is shown and kept.")
    tiers: TiersConfig = Field(default_factory=TiersConfig, description="What this run may use.")
    placement: PlacementConfig = Field(default_factory=PlacementConfig, description="Where kinds of bytes live.")
    profile: ProfileConfig = Field(default_factory=ProfileConfig, description="Timelines.")
    advanced: AdvancedConfig = Field(default_factory=AdvancedConfig, description="For measurements.")

    @model_validator(mode="before")
    @classmethod
    def _fill_dependent_defaults(cls, values: Any) -> Any:
        """Fill the keys whose default is another key's value."""
        if not isinstance(values, dict):
            return values
        filled = dict(values)
        if isinstance(filled.get("output_dir"), str | Path):
            filled.setdefault("run_name", Path(filled["output_dir"]).name or "run")
        filled.setdefault("data_seed", filled.get("seed", 42))
        if filled.get("task") == "pretrain" and isinstance(filled.get("data"), dict):
            filled["data"] = {"train_on": "all", **filled["data"]}
        if isinstance(filled.get("data"), dict) and (filled["data"].get("eval") or filled["data"].get("val_size")):
            table = filled.get("evaluation", {})
            filled["evaluation"] = {"eval_strategy": "steps", **table} if isinstance(table, dict) else table
        return filled

    @property
    def rows_per_step(self) -> int:
        """Rows of ``data.max_length`` tokens in one optimizer step, over all micro-batches."""
        if self.training.train_batch_tokens is not None:
            return self.training.train_batch_tokens // self.data.max_length
        return self.training.per_device_train_batch_size * self.training.gradient_accumulation_steps

    @property
    def micro_batch_size(self) -> int | None:
        """Rows per micro-batch; None where the planner chooses a divisor of :attr:`rows_per_step`."""
        return None if self.training.train_batch_tokens is not None else self.training.per_device_train_batch_size
