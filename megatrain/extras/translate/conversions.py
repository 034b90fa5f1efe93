"""Conversions of single keys, selected in the tables of :mod:`megatrain.base.other_tools`, and of groups of keys."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from megatrain.base.other_tools import KEYS, PLANNER, QUANTIZED, Row
from megatrain.config.keys import KEYS as OUR_KEYS
from megatrain.config.keys import leaf_schema, used_if
from megatrain.extras.translate.draft import NO_EQUIVALENT, Section, Translation, as_list, as_mapping, as_number
from megatrain.extras.translate.read import TranslationError, is_file, read_mapping

#: Globs of parameters that transformers' Trainer excludes from weight decay. Embeddings do decay.
DECAY_EXCLUDE = ("*bias*", "*norm*")
LOSSES = ("sigmoid", "hinge", "ipo", "robust", "kto", "cpo", "orpo", "simpo")
#: Keys of ``[preference]`` that only some losses use, each with these losses.
_LOSSES_WITH = {
    "preference.label_smoothing": ("sigmoid", "robust", "cpo", "simpo"),
    "preference.simpo_gamma": ("simpo",),
    "preference.rpo_alpha": ("sigmoid", "hinge", "ipo", "robust", "cpo", "orpo", "simpo"),
    "preference.desirable_weight": ("kto",),
    "preference.undesirable_weight": ("kto",),
}
#: Config keys that preference training does not support, with the reason.
_SFT_ONLY = {
    "data.packing": "each answer has its own row",
    "lora.lora_dropout": 'task = "dpo" has no dropout',
}
_OPTIMIZERS = {
    "adamw": ("adamw", "paged_adamw", "adamw_torch", "adamw_torch_fused", "adamw_hf", "adamw_apex_fused",
              "adamw_anyprecision", "paged_adamw_32bit", "adamw_torch_xla", "adam", "deepspeed_adam", "fused"),
    "lion": ("lion", "lion_32bit", "paged_lion_32bit", "lion_pytorch"),
    "adafactor": ("adafactor",),
    "sgd": ("sgd",),
    "muon": ("muon",),
}  # fmt: skip
#: Optimizers that are translated to 8-bit moments in blocks of 256, including a 4-bit optimizer.
_QUANTIZED_OPTIMIZERS = {
    "adamw": ("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit", "adamw_torch_8bit", "adamw_torch_4bit"),
    "lion": ("lion_8bit", "paged_lion_8bit"),
}
_LORA_LISTS = ("lora.target_modules", "lora.modules_to_save", "lora.target_parameters")
_BUILDERS = ("json", "csv", "parquet", "arrow", "text", "")  # file formats of `load_dataset`, or no path


# One key


def translate_keys(draft: Translation, values: Mapping[str, Any], prefix: str = "") -> None:
    """Translate keys individually, except for keys that a rule of the tool combines.

    Args:
        prefix: Path of the section that contains the keys, with a trailing dot, or "".
    """
    rows = KEYS[draft.tool]
    omitted_keys = {omitted.tool_key for omitted in (*draft.lost_keys, *draft.unneeded_keys)}
    for leaf, value in values.items():
        tool_key = prefix + leaf
        row = rows.get(tool_key)
        if value is None or tool_key in omitted_keys:
            continue
        if row is not None and row.conversion in CONVERSIONS:
            draft.answered.add(tool_key)
            CONVERSIONS[row.conversion](draft, tool_key, value, row)
        elif row is None and isinstance(value, Mapping) and any(name.startswith(f"{tool_key}.") for name in rows):
            translate_keys(draft, value, f"{tool_key}.")
        elif row is None and not prefix:
            draft.answered.add(tool_key)
            draft.omit_if_on(tool_key, NO_EQUIVALENT, value)


def _copy(draft: Translation, tool_key: str, value: Any, row: Row) -> None:
    draft.put(row.config_key, value, tool_key)


def _path(draft: Translation, tool_key: str, value: Any, row: Row) -> None:
    draft.put_path(row.config_key, value, tool_key)


def _unneeded(draft: Translation, tool_key: str, value: Any, row: Row) -> None:
    draft.drop(tool_key, row.reason, value)


def _lost(draft: Translation, tool_key: str, value: Any, row: Row) -> None:
    if row.choices:
        _choice(draft, tool_key, value, row)
    else:
        draft.omit_if_on(tool_key, row.reason, value)


def _choice(draft: Translation, tool_key: str, value: Any, row: Row) -> None:
    """Translate a value by the row's choices. Any other value is lost if the row has a reason, and copied otherwise."""
    is_choice = isinstance(value, str | bool | int | float) and value in row.choices
    choice = row.choices[value] if is_choice else value
    if not is_choice and row.reason:
        draft.omit(tool_key, row.reason, value)
    elif choice is not None:
        draft.put(row.config_key, choice, tool_key)


def _optimizer(draft: Translation, tool_key: str, value: Any, row: Row) -> None:
    name = str(value).lower()
    exact_optim = next((optim for optim, names in _OPTIMIZERS.items() if name in names), None)
    quantized_optim = next((optim for optim, names in _QUANTIZED_OPTIMIZERS.items() if name in names), None)
    if exact_optim is None and quantized_optim is None:
        draft.omit(tool_key, f"optimizers here: {', '.join(leaf_schema('optimizer.optim')['enum'])}", value)
        return
    draft.put("optimizer.optim", exact_optim or quantized_optim, tool_key)
    if quantized_optim is not None:
        note = f"replaces {value}, because moments here have at least 8 bits" if name.endswith("4bit") else ""
        draft.put("optimizer.state_dtype", "int8", tool_key, note)


def _betas(draft: Translation, tool_key: str, value: Any, row: Row) -> None:
    if not isinstance(value, list) or len(value) != 2 or "auto" in value:
        draft.omit(tool_key, "write two numbers: optimizer.adam_beta1 and optimizer.adam_beta2", value)
        return
    draft.put("optimizer.adam_beta1", value[0], tool_key)
    draft.put("optimizer.adam_beta2", value[1], tool_key)


def _warmup(draft: Translation, tool_key: str, value: Any, row: Row) -> None:
    """Translate a number or a fraction of warm-up steps. A number above 0 takes precedence, as in transformers."""
    num_steps = as_number(value, row.config_key)
    if isinstance(num_steps, bool) or not isinstance(num_steps, int | float):
        draft.omit(tool_key, "write a number of steps, or a fraction of all steps", value)
        return
    previous = draft.entries.get(row.config_key)
    if previous is None or not previous.value or (tool_key == "warmup_steps" and num_steps):
        draft.put(row.config_key, num_steps, tool_key)
        tool_key, num_steps = (previous.tool_key, previous.value) if previous is not None else ("", 0)
    if num_steps:
        draft.drop(tool_key, "warmup_steps takes precedence", num_steps)


def _half_precision(draft: Translation, tool_key: str, value: Any, row: Row) -> None:
    is_float16 = "fp16" in tool_key and "bf16" not in tool_key
    if value in (True, "true") or (not is_float16 and value in ("auto", "full")):
        note = "instead of float16, which needs loss scaling" if is_float16 else ""
        draft.put(row.config_key, "bfloat16", tool_key, note)
    else:
        draft.omit_if_on(tool_key, NO_EQUIVALENT, value)


def _loaded_dtype(draft: Translation, tool_key: str, value: Any, row: Row) -> None:
    """Translate the dtype of the loaded model to the compute dtype. The master weights stay in float32."""
    if str(value).removeprefix("torch.") not in ("bfloat16", "float16", "bf16", "fp16", "half"):
        draft.drop(tool_key, "master weights have 32 bits, independent of the dtype in the files", value)
    elif row.config_key not in draft.entries:
        draft.put(row.config_key, "bfloat16", tool_key, "master weights keep 32 bits")


def _reports(draft: Translation, tool_key: str, value: Any, row: Row) -> None:
    """Translate a list of targets, or a switch such as ``use_wandb``."""
    if not tool_key.startswith("use_"):
        report_to(draft, tool_key, as_list(value))
    elif value is True:
        report_to(draft, tool_key, [tool_key.removeprefix("use_")])
    else:
        draft.omit_if_on(tool_key, "see logging.report_to", value)


def report_to(draft: Translation, tool_key: str, targets: list[Any]) -> None:
    """Add targets to ``logging.report_to``, which also contains "jsonl" and the targets of other keys."""
    kind = leaf_schema("logging.report_to")
    allowed = next(part["items"]["enum"] for part in (kind, *kind.get("anyOf", ())) if "items" in part)
    known_targets = [name for name in targets if name in allowed]
    if known_targets:
        previous = draft.entries.get("logging.report_to")
        names = dict.fromkeys(["jsonl", *(previous.value if previous else ()), *known_targets])
        draft.put("logging.report_to", list(names), tool_key)
    for name in targets:
        if name not in (*allowed, "none", "all"):
            draft.omit(tool_key, "metrics are written to output_dir/metrics.jsonl", name)


def _resume(draft: Translation, tool_key: str, value: Any, row: Row) -> None:
    if isinstance(value, str):
        draft.omit(tool_key, "checkpoints of other tools cannot be read; use the exported model as the model", value)
    else:
        draft.drop(tool_key, "a run resumes automatically if output_dir contains checkpoints", value)


def chat_template(draft: Translation, tool_key: str, value: Any, row: Row | None = None) -> None:
    """Translate a chat template. A file is used; inline text is lost, with advice to write it into a file."""
    text = str(value)
    if text.endswith((".jinja", ".jinja2", ".j2")) and is_file(Path(draft.base, text)):
        draft.put("model.chat_template", text, tool_key, is_path=True)
    elif "{%" in text or "{{" in text:
        first_line = text.strip().splitlines()[0][:40]
        draft.omit(tool_key, "write it into a file, and set model.chat_template to that file", f"{first_line} ...")
    elif text not in ("tokenizer_default", "default"):
        draft.drop(tool_key, "the model's template is used; check it with `megatrain-tier data preview`", value)


def _deepspeed(draft: Translation, tool_key: str, value: Any, row: Row) -> None:
    """Translate the NVMe folder of a DeepSpeed config. The planner decides all other offloading."""
    draft.drop(tool_key, PLANNER, value)
    if not isinstance(value, Mapping):
        files = [folder / str(value) for folder in (draft.base, draft.source.path.parent)]
        try:
            value = next((read_mapping(file) for file in files if is_file(file)), {})
        except TranslationError:
            value = {}
    nvme_path(draft, value, f"{tool_key}: ")


def nvme_path(draft: Translation, values: Mapping[str, Any], prefix: str = "") -> None:
    """Set the path of ``[[tiers.nvme]]`` to the ``nvme_path`` of a DeepSpeed config, if it offloads to NVMe."""
    for block in ("offload_optimizer", "offload_param"):
        table = as_mapping(as_mapping(values.get("zero_optimization")).get(block))
        if table.get("device") == "nvme" and isinstance(table.get("nvme_path"), str):
            draft.put_path("tiers.nvme.0.path", table["nvme_path"], f"{prefix}{block}.nvme_path")
            draft.put("tiers.nvme.0.size", "auto", note="all free space except a margin")
            return


#: Functions ``conversion(draft, tool_key, value, row)``, by kind of conversion (``Row.conversion``).
CONVERSIONS: Mapping[str, Callable[[Translation, str, Any, Row], None]] = {
    "copy": _copy,
    "path": _path,
    "unneeded": _unneeded,
    "lost": _lost,
    "choice": _choice,
    "optimizer": _optimizer,
    "betas": _betas,
    "warmup": _warmup,
    "half_precision": _half_precision,
    "loaded_dtype": _loaded_dtype,
    "reports": _reports,
    "resume": _resume,
    "chat_template": chat_template,
    "deepspeed": _deepspeed,
}


# Groups of keys


def fill_defaults(draft: Translation, defaults: Mapping[str, Any]) -> None:
    """Set the tool's defaults that have an effect, and exclude biases and norms from decay as transformers does."""
    config = {key: entry.value for key, entry in draft.entries.items()}
    unused = {
        key
        for key in defaults
        if any(config.get(other, OUR_KEYS[other]["default"]) not in values for other, values in used_if(key).items())
    }
    num_steps = config.get("training.max_steps")
    if isinstance(num_steps, int) and num_steps > 0:
        unused.add("training.num_train_epochs")
    draft.default({key: value for key, value in defaults.items() if key not in unused})
    decay = draft.entries.get("optimizer.weight_decay")
    if decay is not None and decay.value:
        draft.put("optimizer.weight_decay_exclude", list(DECAY_EXCLUDE), note=f"as in {draft.source.title}")


def put_lora(draft: Translation, defaults: Mapping[str, Any], *quantization: str) -> None:
    """Fill ``[lora]`` from the tool's LoRA keys.

    Args:
        defaults: The tool's defaults, by config key.
        quantization: The tool's keys that quantize the base model.
    """
    rows = {tool_key: row.config_key for tool_key, row in draft.rows("lora").items()}
    folder = next((tool_key for tool_key, config_key in rows.items() if config_key == "lora.adapter_name_or_path"), "")
    if paths := folder and draft.get(folder):
        paths = [part.strip() for part in str(paths).split(",")] if not isinstance(paths, list) else paths
        draft.put_path("lora.adapter_name_or_path", paths[-1], folder)
        if len(paths) > 1:
            draft.omit(folder, "adapters cannot be stacked; first merge these adapters into the model", paths[:-1])
        # The adapter's config file contains all other settings.
        rows, defaults = {"lora_dropout": "lora.lora_dropout"}, {}
    for tool_key, config_key in rows.items():
        value = draft.get(tool_key)
        if config_key in _LORA_LISTS and isinstance(value, str) and value != "all-linear":
            value = [part.strip() for part in value.split(",") if part.strip()]
        if config_key == "lora.target_modules" and value in (["all"], True):
            value = "all-linear"
        if value is not None and value is not False and value != []:
            draft.put(config_key, value, tool_key)
    for config_key, value in defaults.items():
        if config_key not in draft.entries:
            draft.put(config_key, value, note=f"{draft.source.title}'s default")
    for tool_key in quantization:
        if value := draft.get(tool_key):
            reason = "the base model is streamed in the precision of its folder; for QLoRA"
            draft.omit(tool_key, f"{reason} {QUANTIZED}", value)


def refuse_quantized(draft: Translation, *names: str) -> None:
    """Raise an error if one of the keys quantizes the model, because training without adapters changes its weights."""
    for name in names:
        if draft.get(name):
            raise draft.refuse(f"{name}: quantized weights cannot be trained without adapters", "Remove it")


def put_preference(draft: Translation, loss: Any, tool_key: str) -> None:
    """Fill ``task`` and ``[preference]`` from the tool's preference keys. If keys conflict, the first one applies.

    Args:
        tool_key: The tool's key that sets the loss.
    """
    if loss not in LOSSES:
        raise draft.refuse(f"the preference loss `{loss}` is not supported", f"Supported: {', '.join(LOSSES)}")
    draft.put("task", "dpo", tool_key)
    draft.put("preference.loss_type", loss, tool_key)
    for name, row in draft.rows("preference").items():
        if (value := draft.get(name)) is None:
            continue
        if row.config_key in draft.entries:
            draft.omit(name, f"{draft.entries[row.config_key].tool_key} sets the same key", value)
        elif loss in _LOSSES_WITH.get(row.config_key, LOSSES):
            draft.put(row.config_key, value, name)
        else:
            draft.drop(name, f"the loss {loss} has no such term", value)
    for config_key, reason in _SFT_ONLY.items():
        entry = draft.entries.pop(config_key, None)
        if entry is not None and entry.tool_key:
            draft.omit_if_on(entry.tool_key, reason, entry.value)
    draft.default({"preference.beta": 0.1})


def put_images(draft: Translation, images: str, tool_key: str) -> None:
    """Set ``model.images``. With LoRA, images are "frozen", because only the language model has adapters."""
    if images == "trained" and any(key.startswith("lora.") for key in draft.entries):
        draft.omit(tool_key, "the vision tower has no adapters; model.images freezes or fully trains it")
        images = "frozen"
    draft.put("model.images", images, tool_key if draft.get(tool_key) is not None else "", "the data has images")


def put_source(draft: Translation, key: str, fields: Section) -> None:
    """Translate path, subset and split of a data set that is described by arguments of ``load_dataset``.

    Args:
        key: Config table, such as ``data.train.0``.
    """
    tool_key, path = fields.path, str(fields.get("id") or fields.get("path") or "")
    files = [str(file) for file in as_list(fields.get("data_files"))]
    if files and path in _BUILDERS:
        path, tool_key = files[0], f"{tool_key}.data_files"
        if len(files) > 1:
            draft.omit(tool_key, "write a glob, or one [[data.train]] per file", files[1:])
    elif files:
        draft.omit(f"{tool_key}.data_files", "write the path of the files", files)
    if path:
        draft.put_path(f"{key}.path", path, tool_key)
    else:
        draft.fill_in(f"{key}.path", "data/train.jsonl", f"{tool_key} has no path")
    for name in ("config", "name"):
        if (subset := fields.get(name)) and subset != "default":
            draft.put(f"{key}.subset", subset, fields.path_of(name))
    if split := fields.get("split"):
        name, bracket, part = str(split).partition("[")
        draft.put(f"{key}.split", name, fields.path_of("split"))
        if bracket:
            draft.omit(fields.path_of("split"), "for a part of a split, see data.train.N.max_samples", f"[{part}")


def put_columns(draft: Translation, key: str, columns: Mapping[str, tuple[Any, str, str]]) -> None:
    """Set the columns whose names differ from the default names of the format.

    Args:
        key: Config table, such as ``data.train.0``.
        columns: (column in the rows, default name, the tool's key) of each field.
    """
    for config_key, (column, default, tool_key) in columns.items():
        if column and column != default:
            draft.put(f"{key}.columns.{config_key}", column, tool_key)
