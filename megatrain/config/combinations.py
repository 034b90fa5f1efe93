"""Checks of values against each other: combinations that cannot work, and values without effect."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, get_args

from megatrain.base.errors import Problem
from megatrain.base.names import CHECKPOINTS_NAME, COPIES_NAME, ELEMENTWISE_OPTIMIZERS
from megatrain.base.toml import format_value
from megatrain.config.keys import KEYS, used_if
from megatrain.config.schema import RunConfig
from megatrain.data.formats import READERS
from megatrain.data.table import RowFormat, weights_at
from megatrain.tasks.table import TASK_FACTS
from tiered.ext import folder_clashes

#: Additional arguments of the learning-rate schedules in transformers, by schedule.
_SCHEDULE_ARGUMENTS: Mapping[str, frozenset[str]] = {
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


def find_bad_combinations(config: RunConfig) -> list[Problem]:
    """Return the problems with values that are each valid but cannot work together. Open no files; only check paths."""
    return [
        *_check_batch(config),
        *_check_formats(config),
        *_check_packing(config),
        *_check_sources(config),
        *_check_streaming(config),
        *_check_task(config),
        *_check_evaluation_rows(config),
        *_check_evaluated_model(config),
        *_check_best_model(config),
        *_check_evaluation_names(config),
        *_check_optimizer(config),
        *_check_gradients(config),
        *_check_schedule(config),
        *_check_warmup(config),
        *_check_attention(config),
        *_check_kernels(config),
        *_check_splits(config),
        *_check_lora(config),
        *_check_from_scratch(config),
        *_check_checkpoint(config),
        *_check_placement(config),
        *_check_direct(config),
        *_check_sizes(config),
        *_check_drives(config),
        *_check_emulated_gpu(config),
        *_check_paths(config),
    ]


def find_warnings(config: RunConfig) -> list[str]:
    """Return warnings about values that have no effect because of other values."""
    warnings = []
    optimizer = config.optimizer
    if (
        optimizer.lr_scheduler_type == "constant"
        and "warmup_steps" in optimizer.model_fields_set
        and optimizer.warmup_steps
    ):
        warnings.append('the "constant" schedule has no warm-up; use "constant_with_warmup"')
    evaluation = config.evaluation
    if evaluation.eval_strategy == "no" and not evaluation.eval_on_start:
        if config.data.eval:
            warnings.append('[[data.eval]] has no effect with evaluation.eval_strategy = "no"')
        if config.data.val_size is not None:
            warnings.append('data.val_size keeps rows that evaluation.eval_strategy = "no" never evaluates')
        if evaluation.predict_with_generate:
            warnings.append('evaluation.predict_with_generate has no effect with evaluation.eval_strategy = "no"')
    warnings += _find_ineffective_keys(config)
    if not _may_have_gpu_tier(config) and not config.tiers.gpu.size.is_auto:
        warnings.append('tiers.gpu.size has no effect with device = "cpu"')
    if config.export.merge and not config.lora.is_on:
        warnings.append("export.merge has no effect without [lora]")
    if config.lora.is_on and config.model.freeze:
        warnings.append("model.freeze has little effect with [lora], which trains adapters only")
    # `init` writes the default of num_train_epochs, which stays in the file when a user adds max_steps.
    has_epochs = "num_train_epochs" in config.training.model_fields_set and config.training.num_train_epochs != 1.0
    if config.training.max_steps > 0 and has_epochs:
        warnings.append("training.max_steps is set, so training.num_train_epochs has no effect")
    return warnings


def _find_ineffective_keys(config: RunConfig) -> Iterator[str]:
    """Yield a warning for each key that is set but has no effect because of another key in its table."""
    for key, schema in KEYS.items():
        for other_key, value in disabling_keys(key, config).items():
            current = config.value(key)
            if (list(current) if isinstance(current, tuple) else current) != schema.get("default"):
                yield f"{key} has no effect with {other_key.rpartition('.')[2]} = {format_value(value)}"


def disabling_keys(key: str, config: RunConfig) -> dict[str, Any]:
    """Return the keys that make a key ineffective, with their values. Return {} if the key has an effect."""
    conditions = {other_key: (config.value(other_key), values) for other_key, values in used_if(key).items()}
    return {other_key: value for other_key, (value, values) in conditions.items() if value not in values}


def _check_gradients(config: RunConfig) -> Iterator[Problem]:
    training = config.training
    is_split = training.train_batch_tokens is not None or training.gradient_accumulation_steps > 1
    if config.precision.grad_dtype == "bfloat16" and config.advanced.micro_batch_order == "micro_batch" and is_split:
        yield Problem(
            "precision.grad_dtype",
            'bfloat16 gradients cannot be summed over micro-batches in advanced.micro_batch_order = "micro_batch"',
            'Write micro_batch_order = "layer", which sums all micro-batches first',
        )


def find_scoring_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield the problems that prevent scoring with the model of a config."""
    if config.lora.is_on:
        text = "[lora]: a model with separate adapters cannot be scored"
        advice = "Merge them (megatrain-tier export RUN MERGED --merge), and use the merged folder without [lora]"
        yield Problem("lora", text, advice)
    yield from _find_inference_problems(config)


def find_generation_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield the problems that prevent text generation with the model of a config."""
    if config.lora.is_on and config.lora.adapter_name_or_path is None:
        text = "[lora] without adapter_name_or_path: new adapters do not change the model's output"
        advice = "For adapters that a run trained, give its folder: megatrain-tier generate RUN. Else leave [lora] out"
        yield Problem("lora", text, advice)
    yield from _find_inference_problems(config)


def _find_inference_problems(config: RunConfig) -> Iterator[Problem]:
    """Yield the problems that prevent inference with the model of a config."""
    if config.model.images != "off":
        text = f'model.images = "{config.model.images}": this release scores and continues only text'
        yield Problem("model.images", text, "Leave the key out")
    if not TASK_FACTS[config.task].has_lm_head:
        text = f'task = "{config.task}" trains a model that cannot generate text'
        yield Problem("task", text, "Open it with transformers")
    if config.data.packing == "concat":
        text = 'data.packing = "concat" joins documents, and scores are per document'
        yield Problem("data.packing", text, "Write packing = true")


def _check_batch(config: RunConfig) -> Iterator[Problem]:
    training, length = config.training, config.data.max_length
    tokens = training.train_batch_tokens
    lanes = training.gradient_lanes
    if lanes not in ("auto", 1) and config.advanced.micro_batch_order == "micro_batch":
        yield Problem(
            "training.gradient_lanes",
            f'training.gradient_lanes = {lanes} needs advanced.micro_batch_order = "layer": with one micro-batch at a '
            "time, the gradients of all layers would be summed at the same time",
            'Write micro_batch_order = "layer", or gradient_lanes = 1',
        )
    if training.max_steps == 0:
        yield Problem("training.max_steps", "training.max_steps = 0 trains nothing", "Write -1 for whole epochs")
    if tokens is None:
        return
    for name in ("per_device_train_batch_size", "gradient_accumulation_steps"):
        if name in training.model_fields_set:
            yield Problem(
                f"training.{name}", f"training.{name} and training.train_batch_tokens both set the batch", "Keep one"
            )
    if tokens % length:
        lower, upper = tokens // length * length, -(-tokens // length) * length
        choices = f"{lower} or {upper}" if lower else str(upper)
        yield Problem(
            "training.train_batch_tokens",
            f"training.train_batch_tokens = {tokens} is not a multiple of data.max_length = {length}",
            f"Write {choices}",
        )


def _check_task(config: RunConfig) -> Iterator[Problem]:
    """Yield the problems with keys that the task requires or does not support. ``TASK_FACTS`` declares these keys."""
    task, facts = config.task, TASK_FACTS[config.task]
    other_refusals = [other_facts.refusal_elsewhere for name, other_facts in TASK_FACTS.items() if name != task]
    for refusal in (*facts.refusals, *filter(None, other_refusals)):
        if problem := refusal.problem(task, config.value(refusal.key)):
            yield problem
    if config.task_table is not None:
        yield from config.task_table.problems()
    if config.evaluation.predict_with_generate and not facts.has_lm_head:
        key = "evaluation.predict_with_generate"
        text = f'{key} generates text, which a model trained with task = "{task}" cannot'
        yield Problem(key, text, "Leave it out")
    tokens, rows, size = config.training.train_batch_tokens, config.rows_per_step, config.rows_per_example
    if tokens is not None and rows % size:
        yield Problem(
            "training.train_batch_tokens",
            f"training.train_batch_tokens = {tokens} makes {rows} rows of data.max_length = {config.data.max_length}, "
            f"but {facts.example} is {'two' if size == 2 else size} rows",
            f"Write {-(-rows // size) * size * config.data.max_length}",
        )


def _check_formats(config: RunConfig) -> Iterator[Problem]:
    kind, task = config.row_kind, f'task = "{config.task}"'
    sources = [(f"data.train.{index}.format", source.format) for index, source in enumerate(config.data.train)]
    sources += [(f"data.eval.{index}.format", source.format) for index, source in enumerate(config.data.eval)]
    for key, name in sources:
        setting, reader = f'{key} = "{name}"', kind.reader
        if name == "auto" or (reader is not None and name == reader.name):
            continue
        if reader is not None:
            fields = f" ({', '.join(reader.required)})" if reader.required else ""
            is_choice = reader.name in get_args(RowFormat)
            advice = f'Write "{reader.name}", or leave the key out' if is_choice else "Leave the key out"
            yield Problem(key, f"{setting}, but {task} trains on {reader.title}{fields}", advice)
        elif name not in READERS:
            yield Problem(key, f"{setting} has preferences, but {task} trains on single rows", 'Write task = "dpo"')
        elif kind.is_text and name not in ("text", "tokenized"):
            yield Problem(key, f"{setting} is not plain text, which {task} trains", 'Write task = "sft"')


def _check_packing(config: RunConfig) -> Iterator[Problem]:
    packing, task = config.data.packing, f'task = "{config.task}"'
    if packing and not TASK_FACTS[config.task].is_packed:
        text = f"data.packing = {format_value(packing)}, but with {task} each text needs a separate row"
        yield Problem("data.packing", text, "Leave the key out, or write packing = false")
    elif packing == "concat" and not config.row_kind.is_text:
        text = f'data.packing = "concat" joins plain text, but {task} trains on separate rows'
        yield Problem("data.packing", text, 'Write packing = true, or task = "pretrain"')


def _check_sources(config: RunConfig) -> Iterator[Problem]:
    data = config.data
    for index, source in enumerate(data.train):
        key = f"data.train.{index}"
        if "***" in source.path:
            text = f'{key}.path = "{source.path}" contains a password or a signature, but configs are stored and shown'
            yield Problem(f"{key}.path", text, "Leave it out, and set keys in the environment")
            continue
        if not data.streaming and source.weight_from_step:
            text = f"{key}.weight_from_step changes weights during the run, but its rows are read before the run"
            yield Problem(f"{key}.weight_from_step", text, "Write streaming = true in [data], or leave it out")
        if not data.streaming and "://" in source.path:
            text = f'{key}.path = "{source.path}" is a URL, which can only be read during the run'
            yield Problem(f"{key}.path", text, "Write streaming = true in [data], and max_steps in [training]")
        for name in ("subset", "split", "json_key", "max_samples"):
            if data.streaming and getattr(source, name) is not None:
                text = f"{key}.{name} cannot be used with data.streaming"
                yield Problem(f"{key}.{name}", text, 'Name the shards in path, e.g. "data/train-*.parquet"')


def _check_streaming(config: RunConfig) -> Iterator[Problem]:
    data = config.data
    if not data.streaming:
        return
    if config.training.max_steps <= 0:
        yield Problem(
            "training.max_steps",
            "data.streaming: the rows are not counted, so the run has no epochs (training.num_train_epochs)",
            "Write max_steps = 1000, or another number of steps, in [training]",
        )
    if not TASK_FACTS[config.task].is_streamed:
        names = " and ".join(f'"{name}"' for name, facts in TASK_FACTS.items() if facts.is_streamed)
        text = f'data.streaming is only for task = {names}, but task = "{config.task}"'
        yield Problem("data.streaming", text, "Leave it out: the rows are read before the first step")
    if config.model.images != "off":
        yield Problem("data.streaming", "data.streaming reads no images", "Leave out data.streaming or model.images")
    if data.val_size is not None:
        text = f"data.val_size = {data.val_size:g} chooses among all rows, which streams do not know in advance"
        yield Problem("data.val_size", text, "Name separate rows in [[data.eval]]")
    for key in ("checkpoint.save_strategy", "evaluation.eval_strategy"):
        if config.value(key) == "epoch":
            yield Problem(key, f'{key} = "epoch", but data.streaming has no epochs', 'Write "steps"')
    steps = {0, *(int(step) for source in data.train for step in source.weight_from_step)}
    if empty := [step for step in sorted(steps) if not sum(weights_at(data.train, step)[0])]:
        text = f"from step {empty[0]} on all weights are 0"
        yield Problem("data.train.0.weight_from_step", text, "Give at least one source a weight above 0")


def _check_evaluation_rows(config: RunConfig) -> Iterator[Problem]:
    table, sets, val_size = config.evaluation, config.data.eval, config.data.val_size
    if val_size is not None and sets:
        yield Problem("data.val_size", "data.val_size and [[data.eval]] both set the rows for evaluation", "Keep one")
    if val_size is not None and val_size > 1 and val_size != int(val_size):
        yield Problem(
            "data.val_size",
            f"data.val_size = {val_size:g} is not a whole number of rows",
            f"Write {int(val_size)}, or a fraction below 1 of all rows",
        )
    if not sets and val_size is None and (table.eval_strategy != "no" or table.eval_on_start):
        key = "eval_strategy" if table.eval_strategy != "no" else "eval_on_start"
        yield Problem(
            f"evaluation.{key}",
            f"evaluation.{key} needs rows to evaluate on, but there is no [[data.eval]]",
            'Write [[data.eval]] and below it path = "held_out.jsonl", or val_size = 0.01 in [data]',
        )


def _check_evaluated_model(config: RunConfig) -> Iterator[Problem]:
    table = config.evaluation
    if table.weights != "trained" and not config.optimizer.ema_decay:
        yield Problem(
            "evaluation.weights",
            f'evaluation.weights = "{table.weights}" evaluates averaged weights, but the run computes no average',
            "Write ema_decay = 0.999 in [optimizer], or leave weights out",
        )
    if table.predict_with_generate and config.model.images != "off":
        key = "evaluation.predict_with_generate"
        text = f'{key} = true supports only text in this release, but model.images = "{config.model.images}"'
        yield Problem(key, text, "Leave out one of the two")


def _check_best_model(config: RunConfig) -> Iterator[Problem]:
    table = config.evaluation
    wants_best = {
        "checkpoint.load_best_model_at_end = true": config.checkpoint.load_best_model_at_end,
        f"evaluation.early_stopping_patience = {table.early_stopping_patience}": table.early_stopping_patience > 0,
    }
    for condition, is_set in wants_best.items():
        if is_set and table.eval_strategy == "no":
            yield Problem(
                condition.split()[0],
                f"{condition} compares evaluations, but the run makes none",
                'Write eval_strategy = "steps" in [evaluation], and rows to evaluate on',
            )
    if config.checkpoint.load_best_model_at_end and config.checkpoint.save_strategy == "no":
        yield Problem(
            "checkpoint.load_best_model_at_end",
            'checkpoint.load_best_model_at_end = true needs checkpoints, and save_strategy is "no"',
            'Write save_strategy = "steps"',
        )


def _check_evaluation_names(config: RunConfig) -> Iterator[Problem]:
    table = config.evaluation
    names = [source.display_name for source in config.data.eval]
    for index, name in enumerate(names):
        if name in names[:index]:
            yield Problem(
                f"data.eval.{index}.name",
                f'data.eval.{index} and data.eval.{names.index(name)} are both called "{name}"',
                "Give them different names",
            )
        elif table.weights == "both" and name.removesuffix("_average") in names and name.endswith("_average"):
            yield Problem(
                f"data.eval.{index}.name",
                f'data.eval.{index} is called "{name}", the name for evaluations of averaged weights on another set',
                "Give it another name",
            )


def _check_optimizer(config: RunConfig) -> Iterator[Problem]:
    optimizer = config.optimizer
    if optimizer.optim == "sgd" and optimizer.sgd_nesterov and not optimizer.sgd_momentum:
        yield Problem(
            "optimizer.sgd_nesterov",
            "optimizer.sgd_nesterov = true needs momentum, but optimizer.sgd_momentum = 0.0",
            "Write sgd_momentum = 0.9, or leave sgd_nesterov out",
        )
    if optimizer.optim == "custom" and not optimizer.custom_optimizer:
        text = 'optimizer.optim = "custom" needs optimizer.custom_optimizer'
        yield Problem("optimizer.optim", text, 'Write custom_optimizer = "NAME", with the name in its package')
    for index, group in enumerate(optimizer.groups):
        key = f"optimizer.groups.{index}"
        if group.learning_rate is None and group.weight_decay is None and group.lr_mult in (None, 1.0):
            yield Problem(key, f"{key} changes nothing for its parameters", "Give it a learning_rate or a weight_decay")
        if group.learning_rate is not None and group.lr_mult is not None:
            message = f"{key} has a learning_rate and an lr_mult, which is a factor on the optimizer's learning_rate"
            yield Problem(f"{key}.lr_mult", message, "Keep one")


def _check_schedule(config: RunConfig) -> Iterator[Problem]:
    optimizer = config.optimizer
    name, arguments = optimizer.lr_scheduler_type, optimizer.lr_scheduler_kwargs
    if name not in _SCHEDULE_ARGUMENTS:
        yield Problem(
            "optimizer.lr_scheduler_type",
            f'optimizer.lr_scheduler_type = "{name}" is not a schedule',
            "Write one of " + ", ".join(f'"{schedule}"' for schedule in _SCHEDULE_ARGUMENTS),
        )
        return
    for argument in sorted(set(arguments) - _SCHEDULE_ARGUMENTS[name]):
        schedules = [schedule_name for schedule_name, accepted in _SCHEDULE_ARGUMENTS.items() if argument in accepted]
        yield Problem(
            "optimizer.lr_scheduler_kwargs",
            f'the "{name}" schedule has no argument `{argument}`',
            "It belongs to " + ", ".join(f'"{item}"' for item in schedules) if schedules else "Leave it out",
        )
    if name == "warmup_stable_decay" and "num_decay_steps" not in arguments:
        yield Problem(
            "optimizer.lr_scheduler_kwargs",
            'the "warmup_stable_decay" schedule needs `num_decay_steps`',
            "Write lr_scheduler_kwargs = { num_decay_steps = 100 }",
        )
    if (
        name in ("cosine_with_min_lr", "cosine_warmup_with_min_lr")
        and len({"min_lr", "min_lr_rate"} & set(arguments)) != 1
    ):
        yield Problem(
            "optimizer.lr_scheduler_kwargs",
            f'the "{name}" schedule needs either `min_lr` or `min_lr_rate`',
            "Write lr_scheduler_kwargs = { min_lr_rate = 0.1 }",
        )


def _check_warmup(config: RunConfig) -> Iterator[Problem]:
    key, warmup, steps = "optimizer.warmup_steps", config.optimizer.warmup_steps, config.training.max_steps
    name = config.optimizer.lr_scheduler_type
    if name not in _SCHEDULE_ARGUMENTS:
        return
    if warmup >= 1 and warmup != int(warmup):
        advice = f"Write {int(warmup)}, or a fraction below 1 of all steps"
        yield Problem(key, f"{key} = {warmup} is not a whole number of steps", advice)
    elif warmup >= 1 and 0 < steps <= warmup and name != "constant":
        text = f"the warm-up of {int(warmup)} steps does not end within the {steps} steps of the run"
        yield Problem(key, text, "Write fewer, or a fraction below 1 of all steps")


def _check_attention(config: RunConfig) -> Iterator[Problem]:
    key = "model.attn_implementation"
    if config.model.attn_implementation != "flash_attention_2":
        return
    if config.device == "cpu":
        yield Problem(key, 'flash_attention_2 needs a GPU, but device = "cpu"', 'Write "sdpa"')
    if config.precision.compute_dtype == "float32":
        text = 'flash_attention_2 does not support float32, but precision.compute_dtype = "float32"'
        yield Problem(key, text, 'Write "sdpa"')
    if config.data.packing and config.micro_batch_size not in (None, 1):
        yield Problem(
            key,
            "flash_attention_2 separates packed documents only in micro-batches of one row, "
            f"but training.per_device_train_batch_size = {config.micro_batch_size}",
            'Write per_device_train_batch_size = 1 with a longer data.max_length, or "sdpa"',
        )


def _check_kernels(config: RunConfig) -> Iterator[Problem]:
    if config.model.flash_attention in ("FA3", "FA4") and config.device == "cpu":
        yield Problem(
            "model.flash_attention",
            f'{config.model.flash_attention} needs a GPU, but device = "cpu"',
            'Write flash_attention = "FA2"',
        )
    if config.model.use_liger_kernel is True and config.device == "cpu":
        yield Problem(
            "model.use_liger_kernel",
            'the kernels of model.use_liger_kernel need a GPU, but device = "cpu"',
            "Write use_liger_kernel = false",
        )


def _check_splits(config: RunConfig) -> Iterator[Problem]:
    if config.model.compile and config.model.mlp_rows:
        yield Problem(
            "model.mlp_rows",
            "model.mlp_rows runs a layer in pieces, but model.compile compiles it as one graph",
            "Write mlp_rows = 0, or compile = false",
        )
    if not config.model.split_experts:
        return
    optim = config.optimizer.optim
    for setting, is_set, alternative in (
        ("model.compile", config.model.compile, "compile = false"),
        ("model.mlp_rows", bool(config.model.mlp_rows), "mlp_rows = 0"),
        ('optimizer.clip_scope = "layer"', config.optimizer.clip_scope == "layer", 'clip_scope = "global"'),
        (f'optimizer.optim = "{optim}"', optim not in ELEMENTWISE_OPTIMIZERS, 'optim = "adamw"'),
    ):
        if is_set:
            text = f"{setting} needs whole layers or matrices, but model.split_experts splits them"
            yield Problem("model.split_experts", text, f"Write split_experts = false, or {alternative}")


def _check_lora(config: RunConfig) -> Iterator[Problem]:
    table = config.lora
    keys = [name for name, field in type(table).model_fields.items() if getattr(table, name) != field.get_default()]
    if not table.is_on:
        if keys:
            yield Problem("lora.r", f"[lora] sets {keys[0]}, but not r", "Write r = 16, for example")
        return
    if table.adapter_name_or_path is not None:
        extra = [name for name in keys if name not in ("adapter_name_or_path", "lora_dropout")]
        if extra:
            key = f"lora.{extra[0]}"
            text = f"{key} is for new adapters; the adapters of lora.adapter_name_or_path have their own settings"
            yield Problem(key, text, "Leave out one of the two")


def _check_from_scratch(config: RunConfig) -> Iterator[Problem]:
    if not config.model.train_from_scratch:
        return
    setting = "model.train_from_scratch = true"
    if config.lora.is_on:
        text = f"{setting} with [lora]: adapters are trained on the weights of a folder"
        yield Problem("model.train_from_scratch", text, "Leave out one of the two")
    if config.model.images != "off":
        text = f'model.images = "{config.model.images}" needs the weights of the image encoder, but {setting} loads no'
        yield Problem("model.images", f"{text} weights", "Leave out one of the two")


def _check_checkpoint(config: RunConfig) -> Iterator[Problem]:
    table = config.checkpoint
    if table.save_strategy == "time" and table.save_interval is None:
        yield Problem(
            "checkpoint.save_strategy",
            'checkpoint.save_strategy = "time" needs checkpoint.save_interval',
            'Write save_interval = "45min"',
        )
    if table.save_interval is not None and table.save_strategy in ("steps", "epoch"):
        yield Problem(
            "checkpoint.save_interval",
            f'checkpoint.save_interval has no effect with save_strategy = "{table.save_strategy}"',
            'Leave it out, or write save_strategy = "time"',
        )


def _may_have_gpu_tier(config: RunConfig) -> bool:
    return config.device != "cpu" or config.advanced.emulate_gpu


def _check_emulated_gpu(config: RunConfig) -> Iterator[Problem]:
    key = "advanced.emulate_gpu"
    if not config.advanced.emulate_gpu:
        return
    if config.device != "cpu":
        yield Problem(key, f'{key} = true needs device = "cpu", but device = "{config.device}"', 'Write device = "cpu"')
    if config.tiers.gpu.size.is_auto:
        yield Problem(key, f"{key} = true needs tiers.gpu.size", 'Write below [tiers.gpu] for example size = "2GiB"')


def _check_placement(config: RunConfig) -> Iterator[Problem]:
    for kind in ("weights", "gradients", "optimizer", "activations"):
        homes = getattr(config.placement, kind)
        key = f"placement.{kind}"
        if homes == "auto":
            continue
        if len(set(homes)) != len(homes):
            yield Problem(key, f"{key} names a tier twice", "Name each tier once, the preferred one first")
        for name in homes:
            if getattr(config.tiers, name, None) == ():
                yield Problem(
                    key,
                    f'{key} names "{name}", but there is no [[tiers.{name}]]',
                    f'Write [[tiers.{name}]] and below it path = "state"',
                )
        if "folder" in homes and (kind != "weights" or config.model.train_from_scratch):
            yield Problem(key, f'{key} names "folder", which can only store frozen weights', 'Leave "folder" out')
        if "gpu" in homes and not _may_have_gpu_tier(config):
            yield Problem(key, f'{key} names "gpu", but device = "cpu"', 'Leave "gpu" out')


def _check_sizes(config: RunConfig) -> Iterator[Problem]:
    tiers = config.tiers
    if tiers.safety_margin.is_auto:
        yield Problem(
            "tiers.safety_margin", 'tiers.safety_margin = "auto" is not valid', 'Write for example "5%" or "2GiB"'
        )
    size, pinned = tiers.ram.size.nbytes, tiers.ram.pinned.nbytes
    if size is not None and pinned is not None and pinned > size:
        yield Problem(
            "tiers.ram.pinned",
            f'tiers.ram.pinned = "{tiers.ram.pinned.text}" is more than tiers.ram.size = "{tiers.ram.size.text}"',
            "Write at most the size",
        )


def _check_drives(config: RunConfig) -> Iterator[Problem]:
    tiers = config.tiers
    names = [f"tiers.nvme.{index}.path" for index in range(len(tiers.nvme))]
    paths = [drive.path for drive in tiers.nvme]
    for name in (CHECKPOINTS_NAME, COPIES_NAME):
        names.append(f"output_dir/{name}")
        paths.append(config.output_dir / name)
    clashing: set[str] = set()
    for own_index, other_index, clash in folder_clashes(paths):
        key = names[other_index if own_index >= len(tiers.nvme) else own_index]  # the drive, not a folder in output_dir
        if other_index < len(tiers.nvme) and key not in clashing:
            clashing.add(key)
            text = f"{names[own_index]} {clash} {names[other_index]} ({paths[other_index]})"
            yield Problem(key, text, "Use a separate folder for each drive, outside the checkpoints in output_dir")
    if len({drive.rate is None for drive in tiers.nvme}) > 1:
        yield Problem("tiers.nvme", "only some of [[tiers.nvme]] have a rate", "Set a rate for all of them or for none")


def _check_direct(config: RunConfig) -> Iterator[Problem]:
    key, advice = "tiers.direct", 'Write direct = "auto"'
    if config.tiers.direct != "on":
        return
    if not config.tiers.nvme:
        yield Problem(key, f'{key} = "on", but there is no [[tiers.nvme]]', advice)
    if not _may_have_gpu_tier(config):
        yield Problem(key, f'{key} = "on", but device = "cpu": there is no GPU memory', advice)
    if config.tiers.verify == "always":
        text = f'{key} = "on" bypasses RAM, but tiers.verify = "always" compares checksums in RAM'
        yield Problem(key, text, f'{advice}, or verify = "resume"')


def _check_paths(config: RunConfig) -> Iterator[Problem]:
    template = config.model.chat_template
    if template != "auto" and not Path(template).is_file():
        yield Problem(
            "model.chat_template",
            f"model.chat_template: there is no file {template}",
            'Write "auto" or the path of a .jinja file',
        )
    if config.model.revision is not None and Path(config.model.model_name_or_path).is_absolute():
        text = f"model.revision is for a model on the hub, but {config.model.model_name_or_path} is a path"
        yield Problem("model.revision", text, "Leave it out")
    if config.output_dir == Path(config.model.model_name_or_path):
        yield Problem("output_dir", "output_dir is the folder of the model that is trained", "Write another folder")
    folders = {"output_dir": config.output_dir}
    folders |= {f"tiers.nvme.{index}.path": drive.path for index, drive in enumerate(config.tiers.nvme)}
    for key, path in folders.items():
        nearest = next((parent for parent in (path, *path.parents) if parent.exists()), path)
        if nearest.exists() and not nearest.is_dir():
            yield Problem(key, f"{key}: {nearest} is a file", "Write the path of a folder")
