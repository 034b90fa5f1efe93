"""Names that other tools use for our keys: old names we accept, names we translate, and tables still to come."""

from __future__ import annotations

from dataclasses import dataclass

TRANSFORMERS_4 = "transformers 4"
LLAMA_FACTORY = "LLaMA-Factory"
AXOLOTL = "Axolotl"
MEGATRAIN = "MegaTrain"
TRL = "TRL"
TRANSFORMERS = "transformers"
DEEPSPEED = "DeepSpeed"
TORCHTITAN = "torchtitan"
TORCHTUNE = "torchtune"


@dataclass(frozen=True, slots=True)
class Translation:
    """Another tool's name for something this program also has.

    Attributes:
        tool: whose name it is.
        ours: our dotted key, or "" when there is nothing to write.
        note: what to write or know, when the key alone does not say it.
    """

    tool: str
    ours: str
    note: str = ""

    def advice(self) -> str:
        """Return the sentence that goes after "unknown key"."""
        here = f"here: {self.ours}" if self.ours else "not needed here"
        return f"That is {self.tool}'{'' if self.tool.endswith('s') else 's'} name; {here}" + (
            f" ({self.note})" if self.note else ""
        )


#: Leaf names of transformers 4 that are accepted with a warning: old leaf -> our dotted key.
ACCEPTED: dict[str, str] = {
    "warmup_ratio": "optimizer.warmup_steps",
    "per_gpu_train_batch_size": "training.per_device_train_batch_size",
    "evaluation_strategy": "evaluation.eval_strategy",
    "per_gpu_eval_batch_size": "evaluation.per_device_eval_batch_size",
}

#: Switches of transformers 4 whose effect is always on here; accepted with a warning when true.
ALWAYS_ON: dict[str, str] = {
    "gradient_checkpointing": "layers are recomputed in the backward pass but for advanced.keep_graphs",
    "activation_checkpointing": "every layer is recomputed once in the backward pass",
}

_RESUME, _WHOLE = "checkpoint.resume_from_checkpoint", "a checkpoint holds all that the run needs to continue"
_CHECKPOINTS: dict[str, Translation] = {
    "overwrite_output_dir": Translation(
        TRANSFORMERS, _RESUME, "nothing saved is overwritten: remove it with `megatrain-tier ckpt rm`"
    ),
    "save_safetensors": Translation(TRANSFORMERS, "", "the [export] is safetensors, checkpoints are plain zarr arrays"),
    "save_only_model": Translation(TRANSFORMERS, "", f"{_WHOLE}; [export] writes the model alone"),
    "ignore_data_skip": Translation(TRANSFORMERS, "", "the data goes on where it stopped, without reading it again"),
    "enable_jit_checkpoint": Translation(TRANSFORMERS, "checkpoint.save_on_signal"),
    "saves_per_epoch": Translation(AXOLOTL, "checkpoint.save_strategy", '1 is "epoch"; else count steps in save_steps'),
    "auto_resume_from_checkpoints": Translation(AXOLOTL, _RESUME, 'true is "auto"'),
    "load_universal": Translation(DEEPSPEED, "", "a checkpoint opens with any tiers and placement"),
    "tag_validation": Translation(DEEPSPEED, "", "checkpoints are verified when they are opened"),
    "use_node_local_storage": Translation(DEEPSPEED, "tiers.nvme.0.path", "state on a drive is checkpointed there"),
    "parallel_write": Translation(DEEPSPEED, "checkpoint.async_save"),
    "interval": Translation(TORCHTITAN, "checkpoint.save_steps"),
    "keep_latest_k": Translation(TORCHTITAN, "checkpoint.save_total_limit"),
    "async_mode": Translation(TORCHTITAN, "checkpoint.async_save"),
    "enable_checkpoint": Translation(TORCHTITAN, "checkpoint.save_strategy", 'false is "no"'),
    "initial_load_path": Translation(TORCHTITAN, _RESUME),
    "last_save_model_only": Translation(TORCHTITAN, "", f"{_WHOLE}; [export] writes the model alone"),
    "export_dtype": Translation(TORCHTITAN, "export.dtype"),
    "save_every_n_steps": Translation(TORCHTUNE, "checkpoint.save_steps"),
    "keep_last_n_checkpoints": Translation(TORCHTUNE, "checkpoint.save_total_limit"),
    "enable_async_checkpointing": Translation(TORCHTUNE, "checkpoint.async_save"),
    "recipe_checkpoint": Translation(TORCHTUNE, _RESUME, "the output_dir of a run"),
    "checkpoint_dir": Translation(TORCHTUNE, "model.model_name_or_path"),
}

#: Leaf names of other tools -> how it is written here.
TRANSLATIONS: dict[str, Translation] = {
    "cutoff_len": Translation(LLAMA_FACTORY, "data.max_length"),
    "neat_packing": Translation(LLAMA_FACTORY, "data.packing"),
    "val_set_size": Translation(AXOLOTL, "data.val_size"),
    "enable_liger_kernel": Translation(LLAMA_FACTORY, "model.use_liger_kernel"),
    "torch_compile": Translation(TRANSFORMERS, "model.compile"),
    "torch_compile_backend": Translation(TRANSFORMERS, "model.compile_backend"),
    "flash_attn": Translation(LLAMA_FACTORY, "model.attn_implementation"),
    "train_on_prompt": Translation(LLAMA_FACTORY, "data.train_on", 'false is "assistant", true is "all"'),
    "mask_history": Translation(LLAMA_FACTORY, "data.train_on", 'true is "last_assistant"'),
    "finetuning_type": Translation(LLAMA_FACTORY, "model.freeze", "every parameter that is not frozen is trained"),
    "stage": Translation(LLAMA_FACTORY, "task", '"sft" or "pretrain"; its "pt" is "pretrain"'),
    "dataset_dir": Translation(LLAMA_FACTORY, "data.train.0.path"),
    "streaming": Translation(LLAMA_FACTORY, "data.cache_dir", "tokens are always read from files, never held in RAM"),
    "preprocessing_num_workers": Translation(LLAMA_FACTORY, "", "rows are tokenized on all cores"),
    "dataset_num_proc": Translation(TRL, "", "rows are tokenized on all cores"),
    "num_samples": Translation(LLAMA_FACTORY, "data.train.0.max_samples"),
    "interleave_probs": Translation(LLAMA_FACTORY, "data.train.0.weight", "one for each source"),
    "tokenized_path": Translation(LLAMA_FACTORY, "data.cache_dir"),
    "overwrite_cache": Translation(LLAMA_FACTORY, "data.cache_dir", "the cache is keyed by content, it is never stale"),
    "template": Translation(LLAMA_FACTORY, "model.chat_template"),
    "base_model": Translation(AXOLOTL, "model.model_name_or_path"),
    "sequence_len": Translation(AXOLOTL, "data.max_length"),
    "micro_batch_size": Translation(AXOLOTL, "training.per_device_train_batch_size"),
    "num_epochs": Translation(AXOLOTL, "training.num_train_epochs"),
    "sample_packing": Translation(AXOLOTL, "data.packing"),
    "train_on_inputs": Translation(AXOLOTL, "data.train_on", 'false is "assistant", true is "all"'),
    "lr_scheduler": Translation(AXOLOTL, "optimizer.lr_scheduler_type"),
    "datasets": Translation(AXOLOTL, "data.train"),
    "dataset_prepared_path": Translation(AXOLOTL, "data.cache_dir"),
    "roles_to_train": Translation(AXOLOTL, "data.train_on"),
    "wandb_project": Translation(AXOLOTL, "logging.project"),
    "wandb_name": Translation(AXOLOTL, "run_name"),
    "use_wandb": Translation(AXOLOTL, "logging.report_to", 'write report_to = ["jsonl", "wandb"]'),
    "use_tensorboard": Translation(AXOLOTL, "logging.report_to", 'write report_to = ["jsonl", "tensorboard"]'),
    "logging_dir": Translation(TRANSFORMERS, "logging.report_to", "TensorBoard's files are in output_dir/tensorboard"),
    "unfrozen_parameters": Translation(AXOLOTL, "model.freeze", "name the frozen ones instead"),
    "max_seq_len": Translation(MEGATRAIN, "data.max_length"),
    "batch_size": Translation(MEGATRAIN, "training.per_device_train_batch_size"),
    "num_steps": Translation(MEGATRAIN, "training.max_steps"),
    "checkpoint_interval": Translation(MEGATRAIN, "", "the planner decides"),
    "num_grad_slabs": Translation(MEGATRAIN, "", "the planner decides"),
    "max_seq_length": Translation(TRL, "data.max_length"),
    "completion_only_loss": Translation(TRL, "data.train_on", 'true is "completion"'),
    "assistant_only_loss": Translation(TRL, "data.train_on", 'true is "assistant"'),
    "dataset_text_field": Translation(TRL, "data.train.0.columns", 'columns = { text = "your column" }'),
    "packing_strategy": Translation(TRL, "data.packing", "always best fit"),
    "padding_free": Translation(TRL, "data.packing"),
    "bf16": Translation(TRANSFORMERS, "precision.compute_dtype", 'write compute_dtype = "bfloat16"'),
    "fp16": Translation(
        TRANSFORMERS, "precision.compute_dtype", 'float16 is not supported; write compute_dtype = "bfloat16"'
    ),
    "torch_dtype": Translation(TRANSFORMERS, "precision.compute_dtype"),
    "dtype": Translation(TRANSFORMERS, "precision.compute_dtype"),
    "use_cpu": Translation(TRANSFORMERS, "device", 'write device = "cpu"'),
    "no_cuda": Translation(TRANSFORMERS, "device", 'write device = "cpu"'),
    "block_size": Translation(TRANSFORMERS, "data.max_length"),
    "train_file": Translation(TRANSFORMERS, "data.train.0.path"),
    "learning_rate_scheduler": Translation(TRANSFORMERS, "optimizer.lr_scheduler_type"),
    "train_micro_batch_size_per_gpu": Translation(DEEPSPEED, "training.per_device_train_batch_size"),
    "gradient_clipping": Translation(DEEPSPEED, "optimizer.max_grad_norm"),
    "train_batch_size": Translation(DEEPSPEED, "training.train_batch_tokens", "counted in tokens"),
    "zero_optimization": Translation(DEEPSPEED, "tiers", "see also [placement]"),
    "deepspeed": Translation(DEEPSPEED, "tiers", "see also [placement]"),
    "offload_optimizer": Translation(DEEPSPEED, "placement.optimizer"),
    "offload_param": Translation(DEEPSPEED, "placement.weights"),
    "nvme_path": Translation(DEEPSPEED, "tiers.nvme.0.path"),
    **_CHECKPOINTS,
}

#: Tables and keys of later releases: said plainly instead of guessing at a typing mistake.
NOT_YET: frozenset[str] = frozenset(
    {
        "model.model_revision",
        "placement.override",
        "precision.master_dtype",
        "precision.optimizer_dtype",
    }
)

#: Keys of ``[optimizer]`` that only some optimizers read.
OPTIMIZERS_WITH_KEY: dict[str, frozenset[str]] = {
    "adam_beta1": frozenset({"adamw", "lion"}),
    "adam_beta2": frozenset({"adamw", "lion"}),
    "adam_epsilon": frozenset({"adamw"}),
    "sgd_momentum": frozenset({"sgd"}),
    "sgd_nesterov": frozenset({"sgd"}),
}

#: Extra arguments that each schedule of transformers takes.
SCHEDULER_ARGUMENTS: dict[str, frozenset[str]] = {
    "constant": frozenset(),
    "constant_with_warmup": frozenset(),
    "linear": frozenset(),
    "cosine": frozenset({"num_cycles"}),
    "cosine_with_restarts": frozenset({"num_cycles"}),
    "polynomial": frozenset({"lr_end", "power"}),
    "inverse_sqrt": frozenset({"timescale"}),
    "cosine_with_min_lr": frozenset({"num_cycles", "min_lr", "min_lr_rate"}),
    "cosine_warmup_with_min_lr": frozenset({"num_cycles", "min_lr", "min_lr_rate", "warmup_lr_rate"}),
    "warmup_stable_decay": frozenset(
        {"num_decay_steps", "num_stable_steps", "warmup_type", "decay_type", "min_lr_ratio", "num_cycles"}
    ),
}
