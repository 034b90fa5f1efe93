"""Combinations of keys that cannot work, and those that work but may surprise."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from megatrain.config.problems import Problem
from megatrain.translate.names import OPTIMIZERS_WITH_KEY, SCHEDULER_ARGUMENTS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from megatrain.config.schema import RunConfig


def find_bad_combinations(config: RunConfig) -> list[Problem]:
    """Return every combination of values in ``config`` that cannot work. Looks at the config alone."""
    return [
        *_check_batch(config),
        *_check_data(config),
        *_check_evaluation(config),
        *_check_optimizer(config),
        *_check_gradients(config),
        *_check_schedule(config),
        *_check_attention(config),
        *_check_kernels(config),
        *_check_checkpoint(config),
        *_check_tiers(config),
        *_check_emulated_gpu(config),
        *_check_paths(config),
    ]


def find_warnings(config: RunConfig) -> list[str]:
    """Return sentences about values that have no effect together."""
    warnings = []
    optimizer = config.optimizer
    if (
        optimizer.lr_scheduler_type == "constant"
        and "warmup_steps" in optimizer.model_fields_set
        and optimizer.warmup_steps
    ):
        warnings.append('the "constant" schedule has no warm-up; "constant_with_warmup" has')
    evaluation = config.evaluation
    if evaluation.eval_strategy == "no" and not evaluation.eval_on_start:
        if config.data.eval:
            warnings.append('[[data.eval]] has no effect with evaluation.eval_strategy = "no"')
        if config.data.val_size is not None:
            warnings.append('data.val_size keeps rows that evaluation.eval_strategy = "no" never evaluates')
    usual_eval_steps = type(evaluation).model_fields["eval_steps"].default
    if evaluation.eval_strategy != "steps" and evaluation.eval_steps != usual_eval_steps:
        warnings.append(f'evaluation.eval_steps has no effect with eval_strategy = "{evaluation.eval_strategy}"')
    warnings.extend(
        f'optimizer.{key} has no effect with optim = "{optimizer.optim}"'
        for key, users in OPTIMIZERS_WITH_KEY.items()
        if optimizer.optim not in users and getattr(optimizer, key) != type(optimizer).model_fields[key].default
    )
    checkpoint = config.checkpoint
    usual_steps = type(checkpoint).model_fields["save_steps"].default
    if checkpoint.save_strategy != "steps" and checkpoint.save_steps != usual_steps:
        warnings.append(f'checkpoint.save_steps has no effect with save_strategy = "{checkpoint.save_strategy}"')
    if checkpoint.save_strategy == "no" and checkpoint.save_interval is not None:
        warnings.append('checkpoint.save_interval has no effect with save_strategy = "no"')
    if not _may_have_gpu_tier(config) and not config.tiers.gpu.size.is_auto:
        warnings.append('tiers.gpu.size has no effect with device = "cpu"')
    if config.training.max_steps > 0 and "num_train_epochs" in config.training.model_fields_set:
        warnings.append("training.max_steps is set, so training.num_train_epochs has no effect")
    return warnings


def _check_gradients(config: RunConfig) -> Iterator[Problem]:
    training = config.training
    is_split = training.train_batch_tokens is not None or training.gradient_accumulation_steps > 1
    if config.precision.grad_dtype == "bfloat16" and config.advanced.micro_batch_order == "micro_batch" and is_split:
        yield Problem(
            "precision.grad_dtype",
            'bfloat16 gradients cannot be summed over micro-batches in advanced.micro_batch_order = "micro_batch"',
            'Write micro_batch_order = "layer", which sums all micro-batches first',
        )


def _check_batch(config: RunConfig) -> Iterator[Problem]:
    training, length = config.training, config.data.max_length
    tokens = training.train_batch_tokens
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
        below, above = tokens // length * length, -(-tokens // length) * length
        choices = f"{below} or {above}" if below else str(above)
        yield Problem(
            "training.train_batch_tokens",
            f"training.train_batch_tokens = {tokens} is not a multiple of data.max_length = {length}",
            f"Write {choices}",
        )


def _check_data(config: RunConfig) -> Iterator[Problem]:
    if config.task != "pretrain":
        if config.data.packing == "concat":
            yield Problem(
                "data.packing",
                f'data.packing = "concat" joins plain text, but task = "{config.task}" trains on rows that stay apart',
                'Write packing = true, or task = "pretrain"',
            )
        return
    if config.data.train_on != "all":
        yield Problem(
            "data.train_on",
            f'data.train_on = "{config.data.train_on}" needs conversations, but task = "pretrain" trains plain text',
            'Leave the key out, or write task = "sft"',
        )
    sources = [(f"data.train.{index}", source) for index, source in enumerate(config.data.train)]
    sources += [(f"data.eval.{index}", source) for index, source in enumerate(config.data.eval)]
    for key, source in sources:
        if source.format not in ("auto", "text", "tokenized"):
            yield Problem(
                f"{key}.format",
                f'{key}.format = "{source.format}" is not plain text, which task = "pretrain" trains',
                'Write task = "sft"',
            )


def _check_evaluation(config: RunConfig) -> Iterator[Problem]:
    table, sets, val_size = config.evaluation, config.data.eval, config.data.val_size
    if val_size is not None and sets:
        yield Problem(
            "data.val_size", "data.val_size keeps rows of [[data.train]], and [[data.eval]] names others", "Keep one"
        )
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
    names = [source.shown_name for source in sets]
    for index, name in enumerate(names):
        if name in names[:index]:
            yield Problem(
                f"data.eval.{index}.name",
                f'data.eval.{index} is called "{name}", as data.eval.{names.index(name)} is',
                "Give each a name of its own",
            )


def _check_optimizer(config: RunConfig) -> Iterator[Problem]:
    optimizer = config.optimizer
    if optimizer.optim == "sgd" and optimizer.sgd_nesterov and not optimizer.sgd_momentum:
        yield Problem(
            "optimizer.sgd_nesterov",
            "optimizer.sgd_nesterov = true looks one step of momentum ahead, but optimizer.sgd_momentum = 0.0",
            "Write sgd_momentum = 0.9, or leave sgd_nesterov out",
        )
    for number, group in enumerate(optimizer.groups):
        if group.learning_rate is None and group.weight_decay is None:
            key = f"optimizer.groups.{number}"
            yield Problem(key, f"{key} changes nothing for its parameters", "Give it a learning_rate or a weight_decay")


def _check_schedule(config: RunConfig) -> Iterator[Problem]:
    optimizer = config.optimizer
    name, arguments = optimizer.lr_scheduler_type, optimizer.lr_scheduler_kwargs
    if name not in SCHEDULER_ARGUMENTS:
        yield Problem(
            "optimizer.lr_scheduler_type",
            f'optimizer.lr_scheduler_type = "{name}" is not a schedule',
            "Write one of " + ", ".join(f'"{known}"' for known in SCHEDULER_ARGUMENTS),
        )
        return
    for argument in sorted(set(arguments) - SCHEDULER_ARGUMENTS[name]):
        takers = [other for other, taken in SCHEDULER_ARGUMENTS.items() if argument in taken]
        yield Problem(
            "optimizer.lr_scheduler_kwargs",
            f'the "{name}" schedule takes no `{argument}`',
            "It belongs to " + ", ".join(f'"{taker}"' for taker in takers) if takers else "Leave it out",
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
            f'the "{name}" schedule needs `min_lr` or `min_lr_rate`, one of them',
            "Write lr_scheduler_kwargs = { min_lr_rate = 0.1 }",
        )
    warmup, steps = optimizer.warmup_steps, config.training.max_steps
    if warmup >= 1 and warmup != int(warmup):
        yield Problem(
            "optimizer.warmup_steps",
            f"optimizer.warmup_steps = {warmup} is not a whole number of steps",
            f"Write {int(warmup)}, or a fraction below 1 of all steps",
        )
    elif warmup >= 1 and 0 < steps <= warmup and name != "constant":
        yield Problem(
            "optimizer.warmup_steps",
            f"the warm-up of {int(warmup)} steps does not end within the {steps} steps of the run",
            "Write fewer, or a fraction below 1 of all steps",
        )


def _check_attention(config: RunConfig) -> Iterator[Problem]:
    key = "model.attn_implementation"
    if config.model.attn_implementation != "flash_attention_2":
        return
    if config.device == "cpu":
        yield Problem(key, 'flash_attention_2 needs a GPU, but device = "cpu"', 'Write "sdpa"')
    if config.precision.compute_dtype == "float32":
        yield Problem(key, 'flash_attention_2 has no float32, but precision.compute_dtype = "float32"', 'Write "sdpa"')
    if config.data.packing and config.micro_batch_size not in (None, 1):
        yield Problem(
            key,
            "flash_attention_2 separates packed documents only in micro-batches of one row, "
            f"but training.per_device_train_batch_size = {config.micro_batch_size}",
            'Write per_device_train_batch_size = 1 with a longer data.max_length, or "sdpa"',
        )


def _check_kernels(config: RunConfig) -> Iterator[Problem]:
    if config.model.use_liger_kernel and config.device == "cpu":
        yield Problem(
            "model.use_liger_kernel",
            'the kernels of model.use_liger_kernel need a GPU, but device = "cpu"',
            "Write use_liger_kernel = false",
        )
    if config.model.compile and config.model.mlp_rows:
        yield Problem(
            "model.mlp_rows",
            "model.mlp_rows runs pieces of a layer one by one, model.compile makes one graph of it: not both",
            "Write mlp_rows = 0, or compile = false",
        )


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


def _check_tiers(config: RunConfig) -> Iterator[Problem]:
    tiers = config.tiers
    for kind in ("weights", "gradients", "optimizer", "activations"):
        wanted = getattr(config.placement, kind)
        key = f"placement.{kind}"
        if wanted == "auto":
            continue
        if len(set(wanted)) != len(wanted):
            yield Problem(key, f"{key} names a tier twice", "Name each tier once, the preferred one first")
        if "nvme" in wanted and not tiers.nvme:
            yield Problem(
                key,
                f'{key} names "nvme", but there is no [[tiers.nvme]]',
                'Write [[tiers.nvme]] and below it path = "state"',
            )
        if "gpu" in wanted and not _may_have_gpu_tier(config):
            yield Problem(key, f'{key} names "gpu", but device = "cpu"', 'Leave "gpu" out')
    if tiers.direct == "on":
        yield from _check_direct(config)
    if tiers.safety_margin.is_auto:
        yield Problem(
            "tiers.safety_margin", 'tiers.safety_margin = "auto" is not a choice', 'Write for example "5%" or "2GiB"'
        )
    size, pinned = tiers.ram.size.nbytes, tiers.ram.pinned.nbytes
    if size is not None and pinned is not None and pinned > size:
        yield Problem(
            "tiers.ram.pinned",
            f'tiers.ram.pinned = "{tiers.ram.pinned.text}" is more than tiers.ram.size = "{tiers.ram.size.text}"',
            "Write at most the size",
        )
    seen: dict[Path, int] = {}
    for index, drive in enumerate(tiers.nvme):
        first = seen.setdefault(drive.path, index)
        if first != index:
            yield Problem(
                f"tiers.nvme.{index}.path",
                f"tiers.nvme.{index}.path is the folder of tiers.nvme.{first}",
                "Give each its own folder, best on its own drive",
            )
    if len({drive.rate is None for drive in tiers.nvme}) > 1:
        yield Problem("tiers.nvme", "only some of [[tiers.nvme]] have a rate", "Give a rate to all of them or to none")


def _check_direct(config: RunConfig) -> Iterator[Problem]:
    key, advice = "tiers.direct", 'Write direct = "auto"'
    if not config.tiers.nvme:
        yield Problem(key, f'{key} = "on", but there is no [[tiers.nvme]]', advice)
    if not _may_have_gpu_tier(config):
        yield Problem(key, f'{key} = "on", but device = "cpu": there is no GPU memory', advice)
    if config.tiers.verify == "always":
        text = f'{key} = "on" moves bytes that RAM never sees; tiers.verify = "always" compares them there'
        yield Problem(key, text, f'{advice}, or verify = "resume"')


def _check_paths(config: RunConfig) -> Iterator[Problem]:
    template = config.model.chat_template
    if template != "auto" and not Path(template).is_file():
        yield Problem(
            "model.chat_template",
            f"model.chat_template: there is no file {template}",
            'Write "auto" or the path of a .jinja file',
        )
    if config.output_dir == Path(config.model.model_name_or_path):
        yield Problem("output_dir", "output_dir is the folder of the model that is trained", "Write another folder")
    places = {"output_dir": config.output_dir}
    places |= {f"tiers.nvme.{index}.path": drive.path for index, drive in enumerate(config.tiers.nvme)}
    for key, path in places.items():
        nearest = next((each for each in (path, *path.parents) if each.exists()), path)
        if nearest.exists() and not nearest.is_dir():
            yield Problem(key, f"{key}: {nearest} is a file", "Write the path of a folder")
