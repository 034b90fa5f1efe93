"""Keys of other tools: how ``megatrain-tier import`` treats each key, and the config key that replaces it.

Plain data that imports nothing from the project. The config package uses it for advice on unknown keys, and
``megatrain.extras.translate`` to translate files. If a value also changes, its row names a conversion of ``translate``.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

Tool = Literal["llamafactory", "axolotl", "trl", "deepspeed", "megatrain"]
#: Names of the tools whose files are translated, as shown in messages.
TOOL_TITLES: dict[Tool, str] = {
    "llamafactory": "LLaMA-Factory",
    "axolotl": "Axolotl",
    "trl": "TRL",
    "deepspeed": "DeepSpeed",
    "megatrain": "MegaTrain",
}
TRANSFORMERS_4 = "transformers 4"
_TRANSFORMERS = "transformers"
_LLAMA_FACTORY, _AXOLOTL, _TRL, _DEEPSPEED, _MEGATRAIN = TOOL_TITLES.values()


class Row(NamedTuple):
    """Treatment of one key of another tool.

    Attributes:
        conversion: How ``import`` reads the value: a conversion of :mod:`megatrain.extras.translate.conversions`,
            "with others" for a key that a rule combines with other keys, "unneeded" or "lost".
        config_key: Dotted name of the equivalent config key, or "".
        reason: Reason why the key, or a value outside ``choices``, is unneeded or lost.
        note: Advice for a user who writes the key into a config of this project, in addition to ``config_key``.
        tool: Title of the tool that has the key.
        choices: Mapping from each of the tool's values to the value in the config, or to None for the default.
    """

    conversion: str
    config_key: str = ""
    reason: str = ""
    note: str = ""
    tool: str = ""
    choices: Mapping[Any, Any] = MappingProxyType({})

    @property
    def is_set(self) -> bool:
        """Whether the key's value is translated to a config key."""
        return bool(self.config_key) and self.conversion not in ("unneeded", "lost")

    def advice(self) -> str:
        """Return the advice that follows an "unknown key" error."""
        reason = "no equivalent here: remove it" if self.conversion == "lost" else "not needed here"
        replacement = f"here: {self.config_key}" if self.config_key else reason
        return f"That is {self.tool}'{'' if self.tool.endswith('s') else 's'} name; {replacement}" + (
            f" ({self.note})" if self.note else ""
        )


def _row(conversion: str, config_key: str = "", note: str = "", tool: str = "") -> Row:
    return Row(conversion, config_key, "", note, tool)


def _copy(config_key: str, note: str = "", tool: str = "") -> Row:
    return Row("copy", config_key, "", note, tool)


def _rule(config_key: str = "", note: str = "", tool: str = "") -> Row:
    return Row("with others", config_key, "", note, tool)


def _choice(config_key: str, choices: Mapping[Any, Any], reason: str = "", note: str = "", tool: str = "") -> Row:
    return Row("choice", config_key, reason, note, tool, choices)


def _unneeded(reason: str, config_key: str = "", note: str | None = None, tool: str = "") -> Row:
    return Row("unneeded", config_key, reason, reason if note is None else note, tool)


def _lost(reason: str, config_key: str = "", note: str | None = None, tool: str = "") -> Row:
    return Row("lost", config_key, reason, reason if note is None else note, tool)


def _lost_unless(value: Any, reason: str) -> Row:
    """Return a row for a key that is lost unless its value is ``value``, which matches this project's behavior."""
    return Row("lost", "", reason, reason, "", {value: None})


def _rows(names: str, row: Row) -> dict[str, Row]:
    return dict.fromkeys(names.split(), row)


def _table_rows(table: str, names: str, conversion: str = "copy") -> dict[str, Row]:
    """Return rows for keys that have the same name in the config's ``table``."""
    return {name: Row(conversion, f"{table}{name}") for name in names.split()}


def _set_tool(tool: str, rows: Mapping[str, Row]) -> dict[str, Row]:
    return {key: row if row.tool else row._replace(tool=tool) for key, row in rows.items()}


PLANNER = "the planner decides from [tiers] where bytes are stored and when they move: see `megatrain-tier plan`"
RANKS = "with several processes, each process holds a shard of every layer"
RECOMPUTED = "training.recompute determines what the backward recomputes"
SPEED = "changes the speed, not the results"
_CACHED = "the token cache is keyed by content, so it is never stale"
_ALL_CORES = "rows are tokenized on all cores"
QUANTIZED = "name a folder that is already quantized, such as a -bnb-4bit repository on the hub"
OWN_TEMPLATE = (
    "the chat template in the model's folder is used; a different template changes every text, so check the texts with "
    "`megatrain-tier data preview`"
)
_NOT_UPLOADED = "a run does not upload the model; use `megatrain-tier export OUTPUT_DIR --push-to-hub ID`"
_NO_REMOTE_CODE = "code in a model folder is never run"
_GROUPS = "see [[optimizer.groups]]"
_RESUME = "checkpoint.resume_from_checkpoint"
_WHOLE = "a checkpoint holds everything that the run needs to continue"
_WHOLE_AND_SAFETENSORS = "checkpoints are always complete, and the trained model is always written as safetensors"
_PROGRESS = "progress is shown live in a terminal, and as lines in a file"
_PADDING = "rows are packed, or padded to data.max_length"
_RUN_TRAINS = "`run` always trains, and sets this itself"
_EVAL_PACKING = "eval sets are packed like the training data"
_FROM_START = "the reference is always the model that the run starts from"
_UNSUPPORTED_HALF = 'float16 is not supported; write compute_dtype = "bfloat16"'
_BFLOAT16 = 'write compute_dtype = "bfloat16"'
_REPORT_TO_WANDB = 'write report_to = ["jsonl", "wandb"]'
_REPORT_TO_TENSORBOARD = 'write report_to = ["jsonl", "tensorboard"]'
_CPU = _choice("device", {True: "cpu", False: None}, "see device", 'write device = "cpu"')
_BACKENDS = {name: name for name in ("inductor", "aot_eager", "eager")}
_STRATEGY = {False: "no"}  # YAML reads a bare no as false
_HELD_OUT = _choice("data.val_size", {0: None, "": None})
_REVISION = _choice("model.revision", {"main": None})
_AUTO_ATTENTION = "auto uses sdpa if the model supports it"
_ATTENTION = _choice(
    "model.attn_implementation",
    {
        "auto": None,
        "sdpa": "sdpa",
        "eager": "eager",
        "disabled": "eager",
        "flash_attention_2": "flash_attention_2",
        "flash_attn_2": "flash_attention_2",
        "fa2": "flash_attention_2",
    },
    _AUTO_ATTENTION,
)

#: Keys of transformers' TrainingArguments, and other keys that LLaMA-Factory, TRL and Axolotl share.
_SHARED = _set_tool(_TRANSFORMERS, {
    **_table_rows("", "run_name seed data_seed full_determinism"),
    **_table_rows("training.", """per_device_train_batch_size gradient_accumulation_steps num_train_epochs max_steps
        label_smoothing_factor neftune_noise_alpha"""),
    **_table_rows("optimizer.", """learning_rate weight_decay adam_beta1 adam_beta2 adam_epsilon max_grad_norm
        lr_scheduler_type lr_scheduler_kwargs"""),
    **_table_rows("evaluation.", """eval_steps per_device_eval_batch_size eval_on_start metric_for_best_model
        greater_is_better early_stopping_patience early_stopping_threshold"""),
    **_table_rows("logging.", "logging_steps project"),
    **_table_rows("checkpoint.", "save_steps save_total_limit load_best_model_at_end"),
    "use_liger_kernel": _copy("model.use_liger_kernel"),
    "enable_liger_kernel": _copy("model.use_liger_kernel", tool=_LLAMA_FACTORY),
    "torch_compile": _copy("model.compile"),
    "torch_compile_backend": _choice("model.compile_backend", _BACKENDS,
                                     'possible values are "inductor", "aot_eager" and "eager"'),
    "output_dir": _row("path", "output_dir"),
    # Old names of transformers 4; also accepted in a config, with a warning.
    "warmup_ratio": _row("warmup", "optimizer.warmup_steps", tool=TRANSFORMERS_4),
    "per_gpu_train_batch_size": _copy("training.per_device_train_batch_size", tool=TRANSFORMERS_4),
    "evaluation_strategy": _choice("evaluation.eval_strategy", _STRATEGY, tool=TRANSFORMERS_4),
    "per_gpu_eval_batch_size": _copy("evaluation.per_device_eval_batch_size", tool=TRANSFORMERS_4),
    # Keys whose values are converted.
    "optim": _row("optimizer", "optimizer.optim"),
    "warmup_steps": _row("warmup", "optimizer.warmup_steps"),
    "bf16": _row("half_precision", "precision.compute_dtype", _BFLOAT16),
    "fp16": _row("half_precision", "precision.compute_dtype", _UNSUPPORTED_HALF),
    "torch_dtype": _row("loaded_dtype", "precision.compute_dtype"),
    "dtype": _row("loaded_dtype", "precision.compute_dtype"),
    "use_cpu": _CPU,
    "no_cuda": _CPU,
    "attn_implementation": _ATTENTION,
    "report_to": _row("reports", "logging.report_to"),
    "logging_dir": _unneeded(_PROGRESS, "logging.report_to", "TensorBoard's files are in output_dir/tensorboard"),
    "resume_from_checkpoint": _row("resume", _RESUME),
    "deepspeed": _row("deepspeed", "tiers", "see also [placement]", tool=_DEEPSPEED),
    "save_strategy": _choice("checkpoint.save_strategy", _STRATEGY | {name: name for name in ("no", "steps", "epoch")},
                             "checkpoints are saved at steps or epochs, and the newest ones are kept"),
    "eval_strategy": _choice("evaluation.eval_strategy", _STRATEGY),
    "model_revision": _REVISION,
    "chat_template": _row("chat_template", "model.chat_template"),
    "chat_template_path": _row("chat_template", "model.chat_template", tool=_TRL),
    # Keys without an equivalent.
    "trust_remote_code": _lost(_NO_REMOTE_CODE, "model.trust_remote_code"),
    **_rows("push_to_hub hub_model_id", _lost(_NOT_UPLOADED)),
    # Keys that are not needed.
    **_rows("fsdp fsdp_config low_cpu_mem_usage device_map max_memory", _unneeded(PLANNER)),
    "fsdp_version": _unneeded(PLANNER, tool=_AXOLOTL),
    **_rows("""gradient_checkpointing gradient_checkpointing_kwargs activation_checkpointing
        activation_checkpointing_kwargs""", _unneeded(RECOMPUTED)),
    "activation_offloading": _unneeded(RECOMPUTED, tool=_TRL),
    **_rows("disable_gradient_checkpointing use_reentrant_gc use_unsloth_gc",
            _unneeded(RECOMPUTED, tool=_LLAMA_FACTORY)),
    **_rows("""ddp_timeout ddp_find_unused_parameters ddp_bucket_cap_mb ddp_broadcast_buffers ddp_backend local_rank
        average_tokens_across_devices parallelism_config accelerator_config split_batches""", _unneeded(RANKS)),
    **_rows("""tf32 liger_kernel_config dataloader_num_workers dataloader_pin_memory dataloader_persistent_workers
        dataloader_prefetch_factor auto_find_batch_size torch_empty_cache_steps torch_compile_mode""",
            _unneeded(SPEED)),
    "dataset_num_proc": _unneeded(SPEED, note=_ALL_CORES, tool=_TRL),
    "preprocessing_num_workers": _unneeded(SPEED, note=_ALL_CORES, tool=_LLAMA_FACTORY),
    "preprocessing_batch_size": _unneeded(SPEED, tool=_LLAMA_FACTORY),
    "overwrite_cache": _unneeded(_CACHED, "data.cache_dir", "the cache is keyed by content, so it is never stale",
                                 _LLAMA_FACTORY),
    "dataset_prepared_path": _unneeded(_CACHED, "data.cache_dir", "", _AXOLOTL),
    "overwrite_output_dir": _unneeded("a run never overwrites checkpoints", _RESUME,
                                      "a run never overwrites checkpoints: remove them with `megatrain-tier ckpt rm`"),
    "save_safetensors": _unneeded(_WHOLE_AND_SAFETENSORS,
                                  note="the [export] is safetensors, and checkpoints are plain zarr arrays"),
    "save_only_model": _unneeded(_WHOLE_AND_SAFETENSORS, note=f"{_WHOLE}; [export] writes only the model"),
    "ignore_data_skip": _unneeded("a run resumes at its position in the data, without reading earlier rows"),
    "enable_jit_checkpoint": _copy("checkpoint.save_on_signal"),
    **_rows("""disable_tqdm log_level log_level_replica logging_strategy logging_first_step
        include_num_input_tokens_seen include_tokens_per_second skip_memory_metrics log_on_each_node
        logging_nan_inf_filter""", _unneeded(_PROGRESS)),
    "plot_loss": _unneeded(_PROGRESS, tool=_LLAMA_FACTORY),
    **_rows("remove_unused_columns dataloader_drop_last", _unneeded("batches contain only what the model reads")),
    **_rows("group_by_length train_sampling_strategy", _unneeded(_PADDING)),
    "pad_to_sequence_len": _unneeded(_PADDING, tool=_AXOLOTL),
    "pad_to_multiple_of": _unneeded(_PADDING, tool=_TRL),
    "padding_free": _unneeded(_PADDING, "data.packing", "", _TRL),
    **_rows("do_train use_cache", _unneeded(_RUN_TRAINS)),
    "ignore_pad_token_for_loss": _unneeded(_RUN_TRAINS, tool=_LLAMA_FACTORY),
})  # fmt: skip

_LLAMA_FACTORY_KEYS = _set_tool(_LLAMA_FACTORY, {
    "model_name_or_path": _row("path", "model.model_name_or_path"),
    "stage": _rule("task", '"sft", "pretrain" or "dpo"; "pt" becomes "pretrain", "kto" becomes "dpo" with a loss_type'),
    "pref_loss": _rule("preference.loss_type"),
    "pref_beta": _row("preference", "preference.beta"),
    "pref_ftx": _row("preference", "preference.rpo_alpha"),
    "dpo_label_smoothing": _row("preference", "preference.label_smoothing"),
    "kto_chosen_weight": _row("preference", "preference.desirable_weight"),
    "kto_rejected_weight": _row("preference", "preference.undesirable_weight"),
    "simpo_gamma": _row("preference", "preference.simpo_gamma"),
    "ref_model": _lost(_FROM_START),
    "finetuning_type": _rule("lora.r", "for LoRA, set r > 0; otherwise all parameters that are not frozen are trained"),
    "quantization_bit": _rule("model.model_name_or_path", QUANTIZED),
    **_table_rows("lora.", "adapter_name_or_path lora_alpha lora_dropout use_rslora use_dora", "lora"),
    "lora_rank": _row("lora", "lora.r"),
    "lora_target": _row("lora", "lora.target_modules", '"all" becomes "all-linear"'),
    "lora_parameters": _row("lora", "lora.target_parameters"),
    "additional_target": _row("lora", "lora.modules_to_save"),
    "create_new_adapter": _rule(),
    **_rows("pissa_init pissa_iter pissa_convert", _lost("adapters get peft's default initialization", "", None)),
    **_rows("loraplus_lr_ratio loraplus_lr_embedding", _lost(_GROUPS)),
    **_rows("flash_attn attn", _ATTENTION),
    "pure_bf16": _row("half_precision", "precision.compute_dtype", _BFLOAT16),
    "upcast_layernorm": _unneeded("master weights are fp32"),
    "upcast_lmhead_output": _unneeded("the loss is computed in float32"),
    "use_unsloth": _unneeded(SPEED),
    "rope_scaling": _lost("set rope_parameters in the model's config.json"),
    "cache_dir": _unneeded("models are folders on this machine"),
    "dataset": _rule("data.train.0.path"),
    "eval_dataset": _rule("data.eval.0.path"),
    **_table_rows("evaluation.", "predict_with_generate max_new_tokens"),
    "dataset_dir": _rule("data.train.0.path"),
    "dataset_info.num_samples": _rule("data.train.0.max_samples"),
    "max_samples": _rule("data.train.0.max_samples"),
    "media_dir": _rule(),
    "template": _lost(OWN_TEMPLATE, "model.chat_template", ""),
    "cutoff_len": _copy("data.max_length"),
    "packing": _rule("data.packing"),
    "neat_packing": _rule("data.packing"),
    "train_on_prompt": _rule("data.train_on", 'false becomes "assistant", true becomes "all"'),
    "mask_history": _rule("data.train_on", 'true becomes "last_assistant"'),
    "val_size": _HELD_OUT,
    "tokenized_path": _unneeded("tokens are cached by their contents, see data.cache_dir", "data.cache_dir", ""),
    "streaming": _unneeded("tokens are read from files and never completely in RAM; data.streaming reads shards "
                           "without a first pass", "data.streaming", "shards are read without a first pass"),
    "interleave_probs": _lost("data.train.N.weight sets how often an epoch uses the rows of a source",
                              "data.train.0.weight", "one for each source"),
    "mix_strategy": _lost("all sources are mixed and shuffled; data.train.N.weight changes their shares"),
    "freeze_vision_tower": _rule("model.images", 'true becomes "frozen", false becomes "trained"'),
    "freeze_multi_modal_projector": _rule("model.images", 'false becomes "trained"; model.freeze lists exceptions'),
    "freeze_language_model": _rule("model.freeze", "name the language model's parameters"),
    **_rows("image_max_pixels image_min_pixels", _lost("image sizes come from preprocessor_config.json in the model's "
                                                       "folder: change them there")),
    **_rows("video_max_pixels video_min_pixels video_fps video_maxlen", _unneeded("videos are not trained")),
    **_rows("use_galore use_badam use_apollo use_adam_mini", _lost("see optimizer.optim")),
    "use_muon": _rule("optimizer.optim", 'true becomes "muon"'),
})  # fmt: skip

_AXOLOTL_KEYS = _set_tool(_AXOLOTL, {
    "base_model": _row("path", "model.model_name_or_path"),
    "revision_of_model": _REVISION,
    "tokenizer_config": _row("path", "model.tokenizer_name_or_path"),
    **_rows("""model_type tokenizer_type is_llama_derived_model is_mistral_derived_model is_falcon_derived_model
        is_qwen_derived_model tokenizer_use_fast tokenizer_legacy base_model_config""",
            _unneeded("transformers reads the classes from config.json")),
    "flash_attention": _choice("model.attn_implementation", {True: "flash_attention_2", False: None}, _AUTO_ATTENTION),
    "sdp_attention": _choice("model.attn_implementation", {True: "sdpa", False: None}, _AUTO_ATTENTION),
    "eager_attention": _choice("model.attn_implementation", {True: "eager", False: None}, _AUTO_ATTENTION),
    "processor_type": _rule("model.images"),
    "unfrozen_parameters": _lost("list the parameters that are not trained in model.freeze", "model.freeze",
                                 "list the frozen parameters instead"),
    "chat_template_jinja": _row("chat_template", "model.chat_template"),
    "special_tokens": _lost("set them in the tokenizer's files"),
    "tokens": _lost("add them to the tokenizer and the model first"),
    "datasets": _rule("data.train"),
    "test_datasets": _rule("data.eval"),
    "pretraining_dataset": _rule("data.train"),
    "val_set_size": _HELD_OUT,
    "sequence_len": _copy("data.max_length"),
    "excess_length_strategy": _choice("data.overlong", {"drop": "drop", "truncate": "truncate", "raise": "error"},
                                      "see data.overlong"),
    "sample_packing": _copy("data.packing"),
    "eval_sample_packing": _unneeded(_EVAL_PACKING),
    "train_on_inputs": _rule("data.train_on", 'false becomes "assistant", true becomes "all"'),
    "roles_to_train": _rule("data.train_on"),
    **_rows("eot_tokens train_on_eos train_on_eot",
            _unneeded("end-of-turn tokens are found in the chat template, and trained")),
    "micro_batch_size": _copy("training.per_device_train_batch_size"),
    "batch_size": _lost("a step has micro_batch_size x gradient_accumulation_steps rows"),
    "eval_batch_size": _copy("evaluation.per_device_eval_batch_size"),
    "num_epochs": _copy("training.num_train_epochs"),
    "optimizer": _row("optimizer", "optimizer.optim"),
    "lr_scheduler": _copy("optimizer.lr_scheduler_type"),
    "cosine_min_lr_ratio": _rule("optimizer.lr_scheduler_kwargs", "min_lr_rate of cosine_with_min_lr"),
    **_rows("lr_groups embedding_lr", _lost(_GROUPS)),
    **_rows("loraplus_lr_ratio loraplus_lr_embedding", _lost(_GROUPS)),
    **_table_rows("lora.", "lora_alpha lora_dropout", "lora"),
    "lora_r": _row("lora", "lora.r"),
    "lora_target_linear": _rule("lora.target_modules", 'true becomes "all-linear"'),
    "lora_target_modules": _row("lora", "lora.target_modules"),
    "lora_target_parameters": _row("lora", "lora.target_parameters"),
    "lora_modules_to_save": _row("lora", "lora.modules_to_save"),
    "lora_model_dir": _row("lora", "lora.adapter_name_or_path"),
    "peft_use_dora": _row("lora", "lora.use_dora"),
    "peft_use_rslora": _row("lora", "lora.use_rslora"),
    "peft_layers_to_transform": _row("lora", "lora.layers_to_transform"),
    "peft_init_lora_weights": _row("lora", "lora.init_lora_weights"),
    **_rows("merge_lora", _lost("write export.merge = true", "export.merge")),
    "lora_fan_in_fan_out": _unneeded("peft reads the orientation of the weight from the module"),
    "evals_per_epoch": _lost("write a number of steps into evaluation.eval_steps"),
    "saves_per_epoch": _choice("checkpoint.save_strategy", {1: "epoch", 0: None},
                               "write a number of steps into checkpoint.save_steps",
                               '1 becomes "epoch"; otherwise set a number of steps in save_steps'),
    "save_first_step": _unneeded("checkpoints are always complete"),
    "auto_resume_from_checkpoints": _row("resume", _RESUME, 'true becomes "auto"'),
    "loss_watchdog_threshold": _lost("a NaN ends the run: optimizer.nonfinite"),
    "wandb_project": _rule("logging.project"),
    "wandb_name": _rule("run_name"),
    "use_wandb": _row("reports", "logging.report_to", _REPORT_TO_WANDB),
    "use_tensorboard": _row("reports", "logging.report_to", _REPORT_TO_TENSORBOARD),
    **_rows("experimental_skip_move_to_device gpu_memory_limit layer_offloading", _unneeded(PLANNER)),
    **_rows("""chunked_cross_entropy cut_cross_entropy liger_rope liger_rms_norm liger_glu_activation liger_layer_norm
        liger_fused_linear_cross_entropy liger_cross_entropy dataset_processes flash_attn_cross_entropy
        flash_attn_rms_norm flash_attn_fuse_qkv flash_attn_fuse_mlp plugins unsloth_cross_entropy_loss
        dataloader_num_workers sample_packing_group_size sample_packing_bin_size lora_mlp_kernel lora_qkv_kernel
        lora_o_kernel use_kernels experts_implementation""", _unneeded(SPEED)),
    "rl": _rule("task", '"dpo", and preference.loss_type'),
    "rl_beta": _row("preference", "preference.beta"),
    "dpo_beta": _row("preference", "preference.beta"),
    "orpo_alpha": _row("preference", "preference.beta"),
    "dpo_label_smoothing": _row("preference", "preference.label_smoothing"),
    "rpo_alpha": _row("preference", "preference.rpo_alpha"),
    "cpo_alpha": _row("preference", "preference.rpo_alpha"),
    "simpo_gamma": _row("preference", "preference.simpo_gamma"),
    "kto_desirable_weight": _row("preference", "preference.desirable_weight"),
    "kto_undesirable_weight": _row("preference", "preference.undesirable_weight"),
    **_rows("load_in_8bit load_in_4bit", _rule("model.model_name_or_path", QUANTIZED)),
    "adapter": _rule(),
})  # fmt: skip

_TRL_KEYS = _set_tool(_TRL, {
    "model_name_or_path": _row("path", "model.model_name_or_path"),
    "model_init_kwargs": _lost("see [model] and [precision]"),
    "max_length": _copy("data.max_length"),
    "max_seq_length": _copy("data.max_length"),
    "packing": _copy("data.packing"),
    "packing_strategy": _unneeded("documents are packed best fit, and never attend to each other", "data.packing",
                                  "always best fit"),
    "eval_packing": _unneeded(_EVAL_PACKING),
    "completion_only_loss": _rule("data.train_on", 'true becomes "completion"'),
    "assistant_only_loss": _rule("data.train_on", 'true becomes "assistant"'),
    **_rows("loss_type loss_weights", _rule("preference.loss_type")),
    "beta": _row("preference", "preference.beta"),
    "label_smoothing": _row("preference", "preference.label_smoothing"),
    "rpo_alpha": _row("preference", "preference.rpo_alpha"),
    "cpo_alpha": _row("preference", "preference.rpo_alpha"),
    "simpo_gamma": _row("preference", "preference.simpo_gamma"),
    "desirable_weight": _row("preference", "preference.desirable_weight"),
    "undesirable_weight": _row("preference", "preference.undesirable_weight"),
    **_rows("precompute_ref_log_probs precompute_ref_batch_size force_use_ref_model reference_free disable_dropout",
            _unneeded("the reference scores the data once, before the first step and without dropout")),
    **_rows("ref_model ref_model_init_kwargs ref_adapter_name sync_ref_model",
            _lost(_FROM_START)),
    **_rows("max_prompt_length max_completion_length truncation_mode", _lost("see data.max_length and data.overlong")),
    "eos_token": _lost("set it in the tokenizer's files"),
    "pad_token": _unneeded("padding is never attended to or trained"),
    "dataset_name": _rule("data.train.0.path"),
    "dataset_config": _rule("data.train.0.subset"),
    "dataset_train_split": _rule("data.train.0.split"),
    "dataset_test_split": _rule("data.eval.0.split"),
    "dataset_text_field": _rule("data.train.0.columns", 'columns = { text = "your column" }'),
    **_rows("dataset_mixture dataset_mixer datasets", _rule("data.train")),
    "dataset_kwargs": _lost("see [[data.train]]"),
    "dataset_batch_size": _unneeded(SPEED),
    **_table_rows("lora.", "lora_alpha lora_dropout use_rslora use_dora", "lora"),
    "lora_r": _row("lora", "lora.r"),
    "lora_target_modules": _row("lora", "lora.target_modules"),
    "lora_target_parameters": _row("lora", "lora.target_parameters"),
    "lora_modules_to_save": _row("lora", "lora.modules_to_save"),
    **_rows("load_in_4bit load_in_8bit", _rule("model.model_name_or_path", QUANTIZED)),
    "use_peft": _rule(),
})  # fmt: skip

_DEEPSPEED_KEYS = _set_tool(_DEEPSPEED, {
    "train_batch_size": _rule("training.train_batch_tokens", "counted in tokens"),
    "train_micro_batch_size_per_gpu": _copy("training.per_device_train_batch_size"),
    "gradient_accumulation_steps": _copy("training.gradient_accumulation_steps"),
    "gradient_clipping": _copy("optimizer.max_grad_norm"),
    "steps_per_print": _copy("logging.logging_steps"),
    "seed": _copy("seed"),
    **_rows("bf16.enabled fp16.enabled", _row("half_precision", "precision.compute_dtype")),
    **_rows("""fp16.auto_cast fp16.loss_scale fp16.initial_scale_power fp16.loss_scale_window fp16.hysteresis
        fp16.consecutive_hysteresis fp16.min_loss_scale fp16.fp16_master_weights_and_grads""",
            _unneeded("bfloat16 needs no loss scaling")),
    "optimizer.type": _row("optimizer", "optimizer.optim"),
    "optimizer.params.betas": _row("betas", "optimizer.adam_beta1", "the second value sets optimizer.adam_beta2"),
    "optimizer.params.lr": _copy("optimizer.learning_rate"),
    "optimizer.params.weight_decay": _copy("optimizer.weight_decay"),
    "optimizer.params.eps": _copy("optimizer.adam_epsilon"),
    "optimizer.params.momentum": _copy("optimizer.sgd_momentum"),
    "optimizer.params.nesterov": _copy("optimizer.sgd_nesterov"),
    "optimizer.params.adam_w_mode": _lost_unless(True, "weight decay is decoupled from the gradient here, as in AdamW"),
    "optimizer.params.bias_correction": _lost_unless(True, "bias correction of the moments is always on here"),
    "optimizer.params.fp32_optimizer_states": _lost_unless(True, "see optimizer.state_dtype"),
    "optimizer.params.torch_adam": _lost_unless(False, "the update rule is the same; only the kernel differs"),
    "scheduler": _rule("optimizer.lr_scheduler_type"),
    **_rows("wandb tensorboard", _rule("logging.report_to")),
    "zero_optimization": _unneeded(PLANNER, "tiers", "see also [placement]"),
    "zero_optimization.offload_optimizer": _rule("placement.optimizer"),
    "zero_optimization.offload_param": _rule("placement.weights"),
    "zero_optimization.offload_param.nvme_path": _rule("tiers.nvme.0.path"),
    **_rows("aio zero_allow_untested_optimizer zero_force_ds_cpu_optimizer", _unneeded(PLANNER)),
    "activation_checkpointing": _unneeded(RECOMPUTED),
    **_rows("""communication_data_type prescale_gradients gradient_predivide_factor sparse_gradients comms_config
        comms_logger tensor_parallel hybrid_engine""", _unneeded(RANKS)),
    "data_types": _unneeded("the gradients are summed in float32"),
    **_rows("""wall_clock_breakdown flops_profiler monitor_config dump_state csv_monitor memory_breakdown""",
            _unneeded("every run writes metrics.jsonl; [profile] writes timelines")),
    **_rows("checkpoint elasticity autotuning", _unneeded("checkpoints are verified, and open with any tiers")),
    "checkpoint.load_universal": _unneeded("a checkpoint opens with any tiers and any placement"),
    "checkpoint.tag_validation": _unneeded("checkpoints are verified when they are opened"),
    "checkpoint.use_node_local_storage": _rule("tiers.nvme.0.path", "state on a drive is saved on that drive"),
    "checkpoint.parallel_write": _rule("checkpoint.async_save"),
    "compression_training": _lost("all parameters are trained in full precision here"),
    **_rows("data_efficiency curriculum_learning", _lost("see [data]")),
    "amp": _lost("see precision.compute_dtype"),
})  # fmt: skip

_MEGATRAIN_KEYS = _set_tool(_MEGATRAIN, {
    "model.name": _row("path", "model.model_name_or_path"),
    "model.dtype": _row("loaded_dtype", "precision.compute_dtype"),
    "model.attn_implementation": _ATTENTION,
    "model.trust_remote_code": _lost(_NO_REMOTE_CODE, "model.trust_remote_code"),
    "model.device": _unneeded("a run uses one CUDA device if one exists; CUDA_VISIBLE_DEVICES selects it"),
    "model.devices": _lost(RANKS),
    **_rows("dataset.name dataset.path dataset.dataset_dir", _rule("data.train.0.path")),
    **_rows("dataset.query_field dataset.response_field", _rule("data.train.0.columns")),
    "dataset.max_seq_len": _copy("data.max_length"),
    "dataset.num_workers": _unneeded(SPEED),
    "dataset.system_prompt": _lost("write it into the rows"),
    "training.batch_size": _copy("training.per_device_train_batch_size"),
    "training.gradient_accumulation_steps": _copy("training.gradient_accumulation_steps"),
    "training.num_steps": _copy("training.max_steps"),
    "training.learning_rate": _copy("optimizer.learning_rate"),
    "training.weight_decay": _copy("optimizer.weight_decay"),
    "training.max_grad_norm": _copy("optimizer.max_grad_norm"),
    "training.seed": _copy("seed"),
    "training.train_on_prompt": _choice("data.train_on", {True: "all", False: None}, "see data.train_on"),
    "optimizer.type": _row("optimizer", "optimizer.optim"),
    "optimizer.beta1": _copy("optimizer.adam_beta1"),
    "optimizer.beta2": _copy("optimizer.adam_beta2"),
    "optimizer.eps": _copy("optimizer.adam_epsilon"),
    "memory": _unneeded(PLANNER),
    **_rows("memory.checkpoint_interval memory.num_grad_slabs", _unneeded("the planner decides")),
    "logging.log_interval": _copy("logging.logging_steps"),
    "logging.enable_timing": _unneeded("every step is timed"),
})  # fmt: skip

#: Keys of tools whose files are not translated, for advice on unknown keys.
OTHER_KEYS = {
    **_set_tool(_TRANSFORMERS, {
        "block_size": _copy("data.max_length"),
        "train_file": _row("path", "data.train.0.path"),
        "learning_rate_scheduler": _copy("optimizer.lr_scheduler_type"),
    }),
    **_set_tool("torchtitan", {
        "hf_assets_path": _row("path", "model.model_name_or_path"),
        "dump_folder": _row("path", "output_dir"),
        "local_batch_size": _copy("training.per_device_train_batch_size"),
        "global_batch_size": _rule("training.gradient_accumulation_steps", "rows per step divided by rows per "
                                   "micro-batch; or only training.train_batch_tokens"),
        "seq_len": _copy("data.max_length"),
        "max_norm": _copy("optimizer.max_grad_norm"),
        "beta1": _copy("optimizer.adam_beta1"),
        "beta2": _copy("optimizer.adam_beta2"),
        "decay_ratio": _rule("optimizer.lr_scheduler_kwargs", 'lr_scheduler_type = "warmup_stable_decay"'),
        "decay_type": _rule("optimizer.lr_scheduler_type"),
        "mixed_precision_param": _rule("precision.compute_dtype"),
        "log_freq": _copy("logging.logging_steps"),
        "enable_tensorboard": _rule("logging.report_to", _REPORT_TO_TENSORBOARD),
        "enable_wandb": _rule("logging.report_to", _REPORT_TO_WANDB),
        "enable_profiling": _rule("profile.trace_steps", "the steps to trace"),
        "dataset_path": _row("path", "data.train.0.path"),
        **_rows("enable_cpu_offload fsdp_reshard_after_forward", _unneeded(PLANNER)),
        **_rows("""data_parallel_replicate_degree data_parallel_shard_degree tensor_parallel_degree
            pipeline_parallel_degree context_parallel_degree expert_parallel_degree""", _unneeded(RANKS)),
        "interval": _copy("checkpoint.save_steps"),
        "keep_latest_k": _copy("checkpoint.save_total_limit"),
        "async_mode": _rule("checkpoint.async_save"),
        "enable_checkpoint": _rule("checkpoint.save_strategy", 'false becomes "no"'),
        "initial_load_path": _row("path", _RESUME),
        "last_save_model_only": _unneeded(f"{_WHOLE}; [export] writes only the model"),
        "export_dtype": _copy("export.dtype"),
    }),
    **_set_tool("torchtune", {
        "save_every_n_steps": _copy("checkpoint.save_steps"),
        "keep_last_n_checkpoints": _copy("checkpoint.save_total_limit"),
        "enable_async_checkpointing": _copy("checkpoint.async_save"),
        "recipe_checkpoint": _rule(_RESUME, "the output_dir of a run"),
        "checkpoint_dir": _row("path", "model.model_name_or_path"),
    }),
}  # fmt: skip

#: Keys of each tool, dotted if they are in a section.
KEYS: dict[Tool, dict[str, Row]] = {
    "llamafactory": {**_SHARED, **_LLAMA_FACTORY_KEYS},
    "axolotl": {**_SHARED, **_AXOLOTL_KEYS},
    "trl": {**_SHARED, **_TRL_KEYS},
    "deepspeed": _DEEPSPEED_KEYS,
    "megatrain": _MEGATRAIN_KEYS,
}

#: Dotted config keys, by the old names that the config accepts with a warning.
ACCEPTED_KEYS: dict[str, str] = {key: row.config_key for key, row in _SHARED.items() if row.tool == TRANSFORMERS_4}

#: Switches of transformers 4 that are always on in this project. They are accepted with a warning if true.
ALWAYS_ON: dict[str, str] = {
    "gradient_checkpointing": "training.recompute determines what the backward pass recomputes",
    "activation_checkpointing": "training.recompute determines what the backward pass recomputes",
}

#: Last parts of keys that get no advice, because they are too general or resemble config keys.
_AMBIGUOUS = frozenset(
    {"cache_dir", "checkpoint", "dataset", "device", "devices", "enabled", "name", "optimizer", "path", "type"}
)


def _translations() -> dict[str, Row]:
    """Return the row of each name that gets advice. If several tools share a name, the first table wins."""
    rows: dict[str, Row] = {}
    excluded_keys = {*ACCEPTED_KEYS, *ALWAYS_ON, *_AMBIGUOUS}
    for table in (_SHARED, _LLAMA_FACTORY_KEYS, _MEGATRAIN_KEYS, _AXOLOTL_KEYS, _TRL_KEYS, _DEEPSPEED_KEYS, OTHER_KEYS):
        for key, row in table.items():
            short_key = key.rpartition(".")[2]
            has_advice = row.config_key or row.conversion in ("unneeded", "lost")
            is_own_key = short_key == row.config_key.rpartition(".")[2]
            if has_advice and not is_own_key and short_key not in excluded_keys:
                rows.setdefault(short_key, row)
    return rows


#: Replacements for unknown keys in a config, by the last part of another tool's key.
TRANSLATIONS: dict[str, Row] = _translations()

#: Tables and keys that are planned for later releases: reported as planned, not as typos.
PLANNED_KEYS: frozenset[str] = frozenset(
    {
        "placement.override",
        "precision.master_dtype",
        "precision.optimizer_dtype",
    }
)
