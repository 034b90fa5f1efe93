"""Problems of a config: one per mistake, all of them in one error, each with its remedy.

There are three kinds: the text is not TOML, a key has a value of the wrong kind, or values contradict each other.
"""

from __future__ import annotations

import difflib
import functools
import math
import re
import tomllib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast, get_args

from pydantic import ValidationError

from megatrain.base.errors import Problem
from megatrain.base.names import CHECKPOINTS_NAME, COPIES_NAME, ELEMENT_WISE
from megatrain.base.toml import format_value
from megatrain.config.keys import (
    ARRAY_TABLES,
    KEYS,
    TABLES,
    allowed_values,
    describe_allowed,
    dotted,
    first_required,
    header,
    how_to_fill_in,
    is_required,
    plain,
    used_if,
)
from megatrain.config.retired import RETIRED_CHOICES
from megatrain.config.schema import RunConfig
from megatrain.data.formats import READERS
from megatrain.data.table import RowFormat, weights_at
from megatrain.tasks.table import TASK_FACTS, PreferenceConfig, RewardConfig
from tiered.ext import folder_clashes

if TYPE_CHECKING:
    from pydantic_core import ErrorDetails


# The text is not TOML


_ERROR_LINE = re.compile(r"\(at line (\d+), column \d+\)|\(at end of document\)")
_LOOKS_LIKE_BARE_TEXT = re.compile(
    r"=\s*(?!true\b|false\b)([0-9.]*[A-Za-z][\w./%-]*|\.{0,2}/[\w./-]*|[0-9.]+%)\s*(#.*)?$"
)
_LOOKS_LIKE_YAML = re.compile(r"\s*(?:- *)?([A-Za-z_]\w*)\s*:(\s|$)")
_CURLY_QUOTES = ("\u2018", "\u2019", "\u201c", "\u201d")
_TWICE = re.compile(r"cannot declare \((.*)\) twice|cannot overwrite a value|duplicate", re.IGNORECASE)
#: Part of tomllib's message -> the remedy; the first match wins.
_REMEDIES = (
    ("unclosed array", "Close the list with ]"),
    ("unclosed inline table", "Close the table with }, on the same line"),
    ("invalid hex value", r"Write text with backslashes in single quotes: 'C:\Users'"),
    ("unescaped '\\'", r"Write text with backslashes in single quotes: 'C:\data'"),
    ("illegal character '\\n'", "Close the quotes on this line"),
    ('expected "\'"', "Close the quotes on this line"),
    ("expected '\"", "Close the quotes"),
    ("illegal character", "Remove that character"),
    ("at the end of a table declaration", "Write a table as [data] and an item of a list as [[data.train]]"),
    ("leading zero", "Write the number without zeros before it"),
    ("after a statement", "Write one KEY = VALUE on each line, with nothing but a # comment behind it"),
)
_ANY = 'Write each line as KEY = VALUE, for example seed = 42 or run_name = "mine", or as [TABLE]'


def toml_lines(text: str) -> list[str]:
    """Return the lines of a TOML text. ``str.splitlines`` also splits at characters that TOML allows within a line."""
    lines = text.replace("\r\n", "\n").split("\n")
    return lines if lines[-1] else lines[:-1]


def syntax_problem(source: str, text: str, error: tomllib.TOMLDecodeError) -> Problem:
    """Return the problem for an error of the TOML reader.

    Args:
        error: the error that ``tomllib`` raised.
    """
    error_text = str(error)
    match = _ERROR_LINE.search(error_text)
    lines = toml_lines(text)
    number = int(match[1]) if match and match[1] else len(lines) or None
    if "end of document" in error_text:
        number = _line_left_open(lines) or number
    message = _ERROR_LINE.sub("", error_text).strip().rstrip(".")
    message = message[:1].lower() + message[1:]
    line = lines[number - 1] if number is not None and 0 < number <= len(lines) else ""
    twice = _TWICE.search(error_text)
    if twice is not None:
        name = ".".join(re.findall(r"'([^']*)'", twice[1])) if twice[1] else line.partition("=")[0].strip()
        name = name or line.strip()
        return Problem("", f"{name.strip('[] ')} is defined twice", "Keep one of the two", source, number)
    return Problem("", f"this is not TOML: {message}", _remedy(error_text, line, lines), source, number)


def _line_left_open(lines: list[str]) -> int | None:
    """Return the last line with an unclosed quote, counted from 1; the reader reports only the end of the file."""
    for number in range(len(lines), 0, -1):
        line = re.sub(r"\"(?:\\.|[^\"\\])*\"|'[^']*'|#.*", "", lines[number - 1])
        if "'" in line or '"' in line:
            return number
    return None


def _remedy(error_text: str, line: str, lines: list[str]) -> str:
    invisible = next((sign for sign in line if not sign.isprintable() and sign != "\t"), "")
    if invisible:
        return f"Remove the invisible character {invisible!a}"
    bare = _LOOKS_LIKE_BARE_TEXT.search(line)
    word = bare[1] if bare else ""
    yaml = _LOOKS_LIKE_YAML.match(line)
    if word.lower() in ("true", "false"):
        return f"Write it in small letters: {word.lower()}"
    if word.lower() in ("none", "null"):
        return 'TOML has no null. Leave the key out, or write "none" where that is a choice'
    if word:
        return f'Text needs quotes: "{word}"'
    if any(quote in line for quote in _CURLY_QUOTES):
        return 'Write straight quotes: "'
    if yaml is not None:
        return f"This looks like YAML. Write {yaml[1]} = and the value, or translate a file: megatrain-tier import FILE"
    if next((part for part in lines if part.strip()), "").lstrip().startswith("{"):
        return "This looks like JSON. Write KEY = VALUE lines, or translate a file: megatrain-tier import FILE"
    if line.lstrip().startswith(("//", ";", "--")):
        return "Write # before a comment"
    if line.startswith(("<<<<<<<", "=======", ">>>>>>>")):
        return "Remove the marks of the merge, and keep one of the versions between them"
    return next((remedy for part, remedy in _REMEDIES if part in error_text.lower()), _ANY)


def encoding_problem(source: str, raw: bytes, error: UnicodeDecodeError) -> Problem:
    """Return the problem of a file that is not UTF-8."""
    line = raw[: error.start].count(b"\n") + 1
    byte = raw[error.start]
    return Problem("", f"the file is not UTF-8 text (byte 0x{byte:02x})", "Save it as UTF-8", source, line)


# A value of the wrong kind


_BOUNDS = {
    "greater_than": ("gt", "above"),
    "greater_than_equal": ("ge", "at least"),
    "less_than": ("lt", "below"),
    "less_than_equal": ("le", "at most"),
}
_NUMBER = re.compile(r"[+-]?[0-9][0-9_]*(\.[0-9_]+)?([eE][+-]?[0-9]+)?")
_KINDS = {
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text in quotes",
    "is_instance_of": "text in quotes",  # a path
    "tuple_type": "a list",
    "dict_type": "a table",
    "model_type": "a table",
}


def validated(values: Mapping[str, Any]) -> tuple[RunConfig | None, list[Problem]]:
    """Return the config of nested values, or None and the problems of single values; combinations are not checked."""
    try:
        return RunConfig.model_validate(values), []
    except ValidationError as error:
        found = (explain_error(detail) for detail in error.errors(include_url=False))
        return None, [problem for problem in found if problem is not None]


def explain_error(detail: ErrorDetails) -> Problem | None:
    """Return the problem for one validation error; None if another problem covers it."""
    path = _field_path(detail["loc"])
    key, name, kind, value = dotted(path), plain(path), detail["type"], detail["input"]
    schema, context = KEYS.get(name, {}), detail.get("ctx", {})
    shown = f"{key} = {format_value(value)}"
    if kind == "default_factory_not_called":
        return None  # its default is the value of another key, which has the problem
    if kind == "missing":
        return _explain_missing(key, name)
    if _takes_flag(schema) and _is_quoted_flag(value):
        return Problem(key, f"{shown} is text", f"Write it without quotes: {value.strip().lower()}")
    if "x-wrong" in schema:
        return Problem(key, f"{shown} {schema['x-wrong']}", schema["x-write"])
    if "propertyNames" in schema and detail["loc"][-1] == "[key]":
        names = ", ".join(schema["propertyNames"]["enum"])
        return Problem(
            key, f"{key}: `{value}` is no field of a row", f'Write FIELD = "COLUMN", where FIELD is one of {names}'
        )
    if kind in ("literal_error", "enum"):
        return _explain_choice(key, shown, value, str(context.get("expected", "")))
    if kind == "value_error":
        return _explain_unit(key, name, shown, value, str(context.get("error", detail["msg"])))
    if kind in _BOUNDS:
        bound, words = _BOUNDS[kind]
        return Problem(key, f"{shown} is out of range", f"It must be {words} {context[bound]:g}")
    if kind == "too_short" and value:
        return None  # its items are wrong; each of them is reported
    if kind in ("too_short", "string_too_short") or (kind == "is_instance_of" and value == ""):
        is_needed = name in TABLES or is_required(name)
        return Problem(key, f"{shown} is empty", how_to_fill_in(name) if is_needed else "Leave the key out or fill it")
    if kind == "string_unicode":  # bytes of another encoding than the process reads arguments in
        text = f"{key} = {value!a} holds bytes that this process cannot read as text"
        return Problem(key, text, "Use a UTF-8 locale (export LC_ALL=C.UTF-8, or PYTHONUTF8=1) and UTF-8 names")
    if kind == "finite_number":
        return Problem(key, f"{shown} is not a finite number", describe_allowed(name))
    if kind in _KINDS:
        return _explain_type(key, name, shown, value, _KINDS[kind])
    return Problem(key, f"{shown}: {detail['msg']}", describe_allowed(name) if name in KEYS else "")


def _explain_missing(key: str, name: str) -> Problem:
    """Return the problem of a missing key or table; a missing table is named by its required key."""
    if name in TABLES:
        inner = first_required(name)
        table = inner.rpartition(".")[0]
        key = table if table in ARRAY_TABLES else inner
    return Problem(key, f"`{key}` is missing", how_to_fill_in(name))


def _takes_flag(schema: Mapping[str, Any]) -> bool:
    return "const" not in schema and any(each.get("type") == "boolean" for each in (schema, *schema.get("anyOf", ())))


def _is_quoted_flag(value: object) -> bool:
    return isinstance(value, str) and value.strip().lower() in ("true", "false")


def _field_path(location: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """Remove the parts that pydantic adds after the key: the branch of a union, the item of a list."""
    for length in range(1, len(location) + 1):
        if plain(location[:length]) in KEYS:
            return location[:length]
    return location


#: Tasks that generate samples during training.
_ONLINE_TASKS = ("grpo", "ppo", "rloo", "online_dpo", "gspo", "dapo")
#: (key, value) -> the name of that choice here.
_ALIASES = {("preference.loss_type", "dpo"): "sigmoid"}


def _explain_choice(key: str, shown: str, value: object, expected: str) -> Problem:
    retired = RETIRED_CHOICES.get((key.rpartition(".")[2], str(value)))
    if retired is not None:
        return Problem(key, f"{shown} is not supported any more", retired)
    choices = re.findall(r"'([^']*)'", expected) or [expected]
    alias = _ALIASES.get((key, str(value).lower()))
    near = [alias] if alias else difflib.get_close_matches(str(value), choices, n=1, cutoff=0.6)
    remedy = f'Did you mean "{near[0]}"? ' if near else ""
    if key == "task" and str(value).lower() in _ONLINE_TASKS:
        remedy = "TRL trains it with megatrain.hf.offloaded(GRPOTrainer). "
    if alias:
        remedy = f'Write "{alias}", which is {str(value).upper()}. '
    listed = ", ".join(f'"{choice}"' for choice in choices) if re.search("'", expected) else expected
    return Problem(key, f"{shown} is not a choice", f"{remedy}Write {'one of ' if len(choices) > 1 else ''}{listed}")


def _explain_unit(key: str, name: str, shown: str, value: object, reason: str) -> Problem:
    """Return the problem of a size, rate or duration: the parser's reason for text or a positive number."""
    schema = KEYS[name]
    words = [f'"{word}"' for word in ("auto", "unlimited") if f'"{word}"' in allowed_values(schema)]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if isinstance(value, str) or (is_number and cast("float", value) > 0):
        more = f", or {' or '.join(words)}" if words and "is not a size" in reason else ""
        return Problem(key, f"{key} = {reason}{more}" if "size" in name else f"{key}: {reason}{more}")
    example = next((text for text in schema.get("examples", ()) if text != "auto"), "2GiB")
    return Problem(
        key, f"{shown} is not text with a unit", f'Write {" or ".join([*words, "text"])} such as "{example}"'
    )


def _explain_type(key: str, name: str, shown: str, value: object, wanted: str) -> Problem:
    if isinstance(value, str) and wanted in ("a number", "a whole number") and _NUMBER.fullmatch(value.strip()):
        return Problem(key, f"{shown} is text", f"Write it without quotes: {value.strip()}")
    if isinstance(value, int | float) and not isinstance(value, bool) and wanted == "text in quotes":
        return Problem(key, f"{shown} is a number", f'Write it in quotes: "{value}"')
    if isinstance(value, float) and wanted == "a whole number" and math.isfinite(value) and value == int(value):
        return Problem(key, f"{shown} is not a whole number", f"Write {int(value)}")
    if isinstance(value, float) and wanted == "a whole number" and 0 < value < 1 and name.endswith("_steps"):
        return Problem(key, f"{shown} is a share of all steps, which transformers takes", "Write a number of steps")
    if isinstance(value, float) and wanted == "a whole number" and math.isfinite(value):
        text = f"Write {math.floor(value)} or {math.ceil(value)}"
        return Problem(key, f"{shown} is not a whole number", text)
    if wanted == "a list" and isinstance(value, dict) and name in TABLES:
        return Problem(key, f"{key} is a table, not a list of tables", f"Write [[{key}]] with two brackets")
    if name not in KEYS:
        return Problem(key, f"{shown} is not a table", f"Write {header(name)} and its keys below it")
    items = KEYS[name].get("items", {})
    if wanted == "a list" and type(value) is {"string": str, "integer": int}.get(items.get("type")):
        return Problem(key, f"{shown} is not a list", f"Write [{format_value(value)}]")
    return Problem(key, f"{shown} is not {wanted}", describe_allowed(name))


# Values that contradict each other


#: Extra arguments of each transformers schedule.
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
    """Return every combination of values in ``config`` that cannot work. Reads only the config."""
    return [
        *_check_batch(config),
        *_check_data(config),
        *_check_streams(config),
        *_check_preferences(config),
        *_check_heads(config),
        *_check_images(config),
        *_check_evaluation(config),
        *_check_optimizer(config),
        *_check_distillation(config),
        *_check_gradients(config),
        *_check_schedule(config),
        *_check_attention(config),
        *_check_kernels(config),
        *_check_lora(config),
        *_check_checkpoint(config),
        *_check_tiers(config),
        *_check_emulated_gpu(config),
        *_check_paths(config),
    ]


def find_warnings(config: RunConfig) -> list[str]:
    """Return sentences about values that have no effect in combination."""
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
        if evaluation.predict_with_generate:
            warnings.append('evaluation.predict_with_generate has no effect with evaluation.eval_strategy = "no"')
    for key in KEYS:
        for other, value in idle_with(key, config).items():
            given = _value(key, config)
            if (list(given) if isinstance(given, tuple) else given) != KEYS[key].get("default"):
                warnings.append(f"{key} has no effect with {other.rpartition('.')[2]} = {format_value(value)}")
    if not _may_have_gpu_tier(config) and not config.tiers.gpu.size.is_auto:
        warnings.append('tiers.gpu.size has no effect with device = "cpu"')
    if config.export.merge and not config.lora.is_on:
        warnings.append("export.merge has no effect without [lora]")
    if config.lora.is_on and config.model.freeze:
        warnings.append("model.freeze has little effect with [lora], which trains adapters only")
    # `init` writes the default of num_train_epochs next to max_steps; that is not a second choice by the user.
    has_epochs = "num_train_epochs" in config.training.model_fields_set and config.training.num_train_epochs != 1.0
    if config.training.max_steps > 0 and has_epochs:
        warnings.append("training.max_steps is set, so training.num_train_epochs has no effect")
    return warnings


def idle_with(key: str, config: RunConfig) -> dict[str, Any]:
    """Return the other keys, with their values, that make a key ineffective; empty if it has an effect."""
    found = {other: (_value(other, config), values) for other, values in used_if(key).items()}
    return {other: value for other, (value, values) in found.items() if value not in values}


def _value(key: str, config: RunConfig) -> Any:
    """Return the value of a key outside of array tables."""
    return functools.reduce(getattr, key.split("."), config)


def _check_gradients(config: RunConfig) -> Iterator[Problem]:
    training = config.training
    is_split = training.train_batch_tokens is not None or training.gradient_accumulation_steps > 1
    if config.precision.grad_dtype == "bfloat16" and config.advanced.micro_batch_order == "micro_batch" and is_split:
        yield Problem(
            "precision.grad_dtype",
            'bfloat16 gradients cannot be summed over micro-batches in advanced.micro_batch_order = "micro_batch"',
            'Write micro_batch_order = "layer", which sums all micro-batches first',
        )


def find_unscorable(config: RunConfig) -> Iterator[Problem]:
    """Yield the reasons why the model of a config cannot be scored."""
    if config.lora.is_on:
        text = "[lora]: only whole models are scored, not a model with separate adapters"
        advice = "Merge them (megatrain-tier export RUN MERGED --merge), and use the merged folder without [lora]"
        yield Problem("lora", text, advice)
    yield from _find_unreadable(config)


def find_ungenerable(config: RunConfig) -> Iterator[Problem]:
    """Yield the reasons why the model of a config cannot continue prompts."""
    if config.lora.is_on and config.lora.adapter_name_or_path is None:
        text = "[lora] without adapter_name_or_path: new adapters do not change the model's output"
        advice = "For those that a run trained, name its folder: megatrain-tier generate RUN. Else leave [lora] out"
        yield Problem("lora", text, advice)
    yield from _find_unreadable(config)


def _find_unreadable(config: RunConfig) -> Iterator[Problem]:
    """Yield the reasons why the model of a config cannot be run for inference."""
    if config.model.images != "off":
        text = f'model.images = "{config.model.images}": only text is scored and continued by this release'
        yield Problem("model.images", text, "Leave the key out")
    if not TASK_FACTS[config.task].has_lm_head:
        text = f'task = "{config.task}" trains a model that cannot generate text'
        yield Problem("task", text, "Open it with transformers, which has its class")
    if config.data.packing == "concat":
        text = 'data.packing = "concat" joins documents, and scores are per document'
        yield Problem("data.packing", text, "Write packing = true")


def _check_distillation(config: RunConfig) -> Iterator[Problem]:
    table, setting = config.distill, 'task = "distill"'
    if config.task != "distill":
        if table.scores is not None:
            text = f'distill.scores has no effect with task = "{config.task}"'
            yield Problem("distill.scores", text, f"Write {setting}, or leave [distill] out")
        return
    if table.scores is None:
        yield Problem(
            "distill.scores",
            f"{setting} trains on the scores of a teacher, and distill.scores names none",
            'Make them with megatrain-tier score TEACHER.toml, and write scores = "OUTPUT_DIR/scores" in [distill]',
        )
    if config.training.label_smoothing_factor:
        text = f"{setting} ignores training.label_smoothing_factor: the teacher's scores replace it"
        yield Problem("training.label_smoothing_factor", text, "Leave the key out")
    if config.training.z_loss:
        yield Problem("training.z_loss", f"{setting} has no z-loss in this release", "Leave training.z_loss out")
    uses_liger = config.model.use_liger_kernel is True
    for is_on, name in ((uses_liger, "use_liger_kernel"), (config.model.images != "off", "images")):
        if is_on:
            yield Problem(
                f"model.{name}", f"{setting} cannot be used with model.{name} by this release", "Leave it out"
            )


def _check_batch(config: RunConfig) -> Iterator[Problem]:
    training, length = config.training, config.data.max_length
    tokens = training.train_batch_tokens
    lanes = training.gradient_lanes
    if lanes not in ("auto", 1) and config.advanced.micro_batch_order == "micro_batch":
        yield Problem(
            "training.gradient_lanes",
            f'training.gradient_lanes = {lanes} needs advanced.micro_batch_order = "layer": with micro-batches one at '
            "a time, the sums of all layers would be open at once",
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
        below, above = tokens // length * length, -(-tokens // length) * length
        choices = f"{below} or {above}" if below else str(above)
        yield Problem(
            "training.train_batch_tokens",
            f"training.train_batch_tokens = {tokens} is not a multiple of data.max_length = {length}",
            f"Write {choices}",
        )


def _check_images(config: RunConfig) -> Iterator[Problem]:
    images = config.model.images
    if images == "off":
        return
    setting = f'model.images = "{images}"'
    if config.task == "pretrain":
        yield Problem(
            "model.images",
            f'{setting} needs conversations, but task = "pretrain" trains plain text',
            'Leave the key out, or write task = "sft"',
        )
    if config.model.train_from_scratch:
        text = f"{setting} needs the weights of the image encoder, and model.train_from_scratch = true loads none"
        yield Problem("model.images", text, "Leave one of them out")


def _check_preferences(config: RunConfig) -> Iterator[Problem]:
    if config.task != "dpo":
        if config.preference != PreferenceConfig():  # a resolved file has all tables
            yield Problem(
                "preference",
                f'[preference] says how to train on preferences, but task = "{config.task}" trains on single rows',
                'Write task = "dpo", or leave the table out',
            )
        return
    data, training = config.data, config.training
    if data.train_on not in ("completion", "assistant"):
        yield Problem(
            "data.train_on",
            f'data.train_on = "{data.train_on}", but task = "dpo" compares what follows the prompt',
            "Leave the key out",
        )
    if training.label_smoothing_factor:
        yield Problem(
            "training.label_smoothing_factor",
            'training.label_smoothing_factor smooths cross entropy, which task = "dpo" does not train on',
            "Write label_smoothing in [preference] for labels that may be wrong, or leave it out",
        )
    if training.z_loss:
        text = 'training.z_loss is a term of cross entropy, which task = "dpo" does not train on'
        yield Problem("training.z_loss", text, "Leave it out")
    if config.lora.lora_dropout:
        yield Problem(
            "lora.lora_dropout",
            f'lora.lora_dropout = {config.lora.lora_dropout:g}, but task = "dpo" allows no dropout: the model '
            "is compared with its reference",
            "Leave the key out",
        )
    if training.train_batch_tokens is not None and config.rows_per_step % 2:
        yield Problem(
            "training.train_batch_tokens",
            f"training.train_batch_tokens = {training.train_batch_tokens} makes {config.rows_per_step} rows of "
            f"data.max_length = {data.max_length}, but an example of preferences is two rows",
            f"Write {(config.rows_per_step + 1) * data.max_length}",
        )
    if config.preference.loss_type == "robust" and not config.preference.label_smoothing:
        yield Problem(
            "preference.label_smoothing",
            'preference.loss_type = "robust" assumes wrong labels, but preference.label_smoothing = 0',
            "Write the share of labels that may be wrong, e.g. label_smoothing = 0.1",
        )
    if config.model.images != "off":
        yield Problem(
            "model.images",
            f'model.images = "{config.model.images}", but task = "dpo" reads text alone in this release',
            "Leave the key out",
        )


def _check_heads(config: RunConfig) -> Iterator[Problem]:
    """Yield values that contradict the training of reward models."""
    if config.task != "reward" and config.reward != RewardConfig():  # a resolved file has all tables
        text = f'[reward] says how rewards are trained, but task = "{config.task}"'
        yield Problem("reward", text, 'Write task = "reward", or leave the table out')
    if TASK_FACTS[config.task].has_lm_head:
        return
    setting = f'task = "{config.task}"'
    for name in ("label_smoothing_factor", "z_loss"):
        if getattr(config.training, name):
            text = f"training.{name} changes the cross entropy, which {setting} does not train on"
            yield Problem(f"training.{name}", text, "Leave it out")
    if config.model.images != "off":
        text = f'model.images = "{config.model.images}", but {setting} reads text alone'
        yield Problem("model.images", text, "Leave the key out")
    if config.evaluation.predict_with_generate:
        text = f"evaluation.predict_with_generate generates text, and with {setting} the model cannot"
        yield Problem("evaluation.predict_with_generate", text, "Leave it out")
    if config.training.train_batch_tokens is not None and config.rows_per_step % config.rows_per_example:
        text = (
            f"training.train_batch_tokens = {config.training.train_batch_tokens} makes {config.rows_per_step} rows of "
            f"data.max_length = {config.data.max_length}, but a pair is two rows"
        )
        advice = f"Write {(config.rows_per_step + 1) * config.data.max_length}"
        yield Problem("training.train_batch_tokens", text, advice)


def _shown(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else f'"{value}"'


def _check_data(config: RunConfig) -> Iterator[Problem]:
    sources = [(f"data.train.{index}", source) for index, source in enumerate(config.data.train)]
    sources += [(f"data.eval.{index}", source) for index, source in enumerate(config.data.eval)]
    reader = config.row_kind.reader
    for key, source in sources:
        if source.format == "auto" or (source.format in READERS if reader is None else source.format == reader.name):
            continue
        text = f'{key}.format = "{source.format}" holds preferences, and task = "{config.task}" trains on single rows'
        advice = 'Write task = "dpo"'
        if reader is not None:
            fields = f" ({', '.join(reader.needed)})" if reader.needed else ""
            text = f'{key}.format = "{source.format}", but task = "{config.task}" trains on {reader.what}{fields}'
            is_choice = reader.name in get_args(RowFormat)
            advice = f'Write "{reader.name}", or leave the key out' if is_choice else "Leave the key out"
        yield Problem(f"{key}.format", text, advice)
    packing, is_packed = config.data.packing, TASK_FACTS[config.task].is_packed
    if packing and not is_packed:
        text = f'data.packing = {_shown(packing)}, but with task = "{config.task}" each text has its own row'
        yield Problem("data.packing", text, "Leave the key out, or write packing = false")
    if reader is not None:
        return
    if config.task != "pretrain":
        if packing == "concat" and is_packed:
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
    for key, source in sources:
        if source.format not in ("auto", "text", "tokenized", "preference"):
            yield Problem(
                f"{key}.format",
                f'{key}.format = "{source.format}" is not plain text, which task = "pretrain" trains',
                'Write task = "sft"',
            )


def _check_streams(config: RunConfig) -> Iterator[Problem]:
    data = config.data
    for index, source in enumerate(data.train):
        key = f"data.train.{index}"
        if "***" in source.path:
            text = f'{key}.path = "{source.path}" has a password or a signature in it, and the config is kept and shown'
            yield Problem(f"{key}.path", text, "Leave it out: keys come from the environment")
            continue
        if not data.streaming and source.weight_from_step:
            text = f"{key}.weight_from_step changes weights during the run, but these rows are read before it"
            yield Problem(f"{key}.weight_from_step", text, "Write streaming = true in [data], or leave it out")
        if not data.streaming and "://" in source.path:
            text = f'{key}.path = "{source.path}" is a URL, which can only be read during the run'
            yield Problem(f"{key}.path", text, "Write streaming = true in [data], and max_steps in [training]")
        for name in ("subset", "split", "json_key", "max_samples"):
            if data.streaming and getattr(source, name) is not None:
                text = f"{key}.{name} does not go together with data.streaming"
                yield Problem(f"{key}.{name}", text, 'Name the shards in path, e.g. "data/train-*.parquet"')
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
        text = f'data.streaming is for task = {names}, and this is "{config.task}"'
        yield Problem("data.streaming", text, "Leave it out: the rows are read before the first step")
    if config.model.images != "off":
        yield Problem("data.streaming", "data.streaming reads no images", "Leave out data.streaming or model.images")
    if data.val_size is not None:
        text = f"data.val_size = {data.val_size:g} chooses among all rows, which streams do not know in advance"
        yield Problem("data.val_size", text, "Name separate rows in [[data.eval]]")
    for table, value in (
        ("checkpoint.save_strategy", config.checkpoint.save_strategy),
        ("evaluation.eval_strategy", config.evaluation.eval_strategy),
    ):
        if value == "epoch":
            yield Problem(table, f'{table} = "epoch", and streams have none', 'Write "steps"')
    steps = {0, *(int(step) for source in data.train for step in source.weight_from_step)}
    if empty := [step for step in sorted(steps) if not sum(weights_at(data.train, step)[0])]:
        text = f"from step {empty[0]} on all weights are 0"
        yield Problem("data.train.0.weight_from_step", text, "Let one source have a weight above 0")


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
    if table.weights != "trained" and not config.optimizer.ema_decay:
        yield Problem(
            "evaluation.weights",
            f'evaluation.weights = "{table.weights}" evaluates the average of the weights, and the run makes none',
            "Write ema_decay = 0.999 in [optimizer], or leave weights out",
        )
    if table.predict_with_generate and config.model.images != "off":
        key = "evaluation.predict_with_generate"
        text = f'{key} = true continues text alone in this release, but model.images = "{config.model.images}"'
        yield Problem(key, text, "Leave one of them out")
    wants_best = {
        "checkpoint.load_best_model_at_end = true": config.checkpoint.load_best_model_at_end,
        f"evaluation.early_stopping_patience = {table.early_stopping_patience}": table.early_stopping_patience > 0,
    }
    for condition, is_wanted in wants_best.items():
        if is_wanted and table.eval_strategy == "no":
            yield Problem(
                condition.split()[0],
                f"{condition} compares evaluations, and there are none",
                'Write eval_strategy = "steps" in [evaluation], and rows to evaluate on',
            )
    if config.checkpoint.load_best_model_at_end and config.checkpoint.save_strategy == "no":
        yield Problem(
            "checkpoint.load_best_model_at_end",
            'checkpoint.load_best_model_at_end = true needs checkpoints, and save_strategy is "no"',
            'Write save_strategy = "steps"',
        )
    names = [source.shown_name for source in sets]
    for index, name in enumerate(names):
        if name in names[:index]:
            yield Problem(
                f"data.eval.{index}.name",
                f'data.eval.{index} is called "{name}", as data.eval.{names.index(name)} is',
                "Give each its own name",
            )
        elif table.weights == "both" and name.removesuffix("_average") in names and name.endswith("_average"):
            yield Problem(
                f"data.eval.{index}.name",
                f'data.eval.{index} is called "{name}", as evaluations of the average of another set are',
                "Give it another name",
            )


def _check_optimizer(config: RunConfig) -> Iterator[Problem]:
    optimizer = config.optimizer
    if optimizer.optim == "sgd" and optimizer.sgd_nesterov and not optimizer.sgd_momentum:
        yield Problem(
            "optimizer.sgd_nesterov",
            "optimizer.sgd_nesterov = true looks one step of momentum ahead, but optimizer.sgd_momentum = 0.0",
            "Write sgd_momentum = 0.9, or leave sgd_nesterov out",
        )
    if optimizer.optim == "custom" and not optimizer.custom_optimizer:
        yield Problem(
            "optimizer.optim",
            'optimizer.optim = "custom" does not say which optimizer',
            'Write custom_optimizer = "NAME", as the package names it',
        )
    for number, group in enumerate(optimizer.groups):
        key = f"optimizer.groups.{number}"
        if group.learning_rate is None and group.weight_decay is None and group.lr_mult in (None, 1.0):
            yield Problem(key, f"{key} changes nothing for its parameters", "Give it a learning_rate or a weight_decay")
        if group.learning_rate is not None and group.lr_mult is not None:
            message = f"{key} has a learning_rate and an lr_mult, which is a factor on the optimizer's learning_rate"
            yield Problem(f"{key}.lr_mult", message, "Keep one of them")


def _check_schedule(config: RunConfig) -> Iterator[Problem]:
    optimizer = config.optimizer
    name, arguments = optimizer.lr_scheduler_type, optimizer.lr_scheduler_kwargs
    if name not in _SCHEDULE_ARGUMENTS:
        yield Problem(
            "optimizer.lr_scheduler_type",
            f'optimizer.lr_scheduler_type = "{name}" is not a schedule',
            "Write one of " + ", ".join(f'"{known}"' for known in _SCHEDULE_ARGUMENTS),
        )
        return
    for argument in sorted(set(arguments) - _SCHEDULE_ARGUMENTS[name]):
        takers = [other for other, taken in _SCHEDULE_ARGUMENTS.items() if argument in taken]
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
    if config.model.compile and config.model.mlp_rows:
        yield Problem(
            "model.mlp_rows",
            "model.mlp_rows runs pieces of a layer one by one, model.compile makes one graph of it: not both",
            "Write mlp_rows = 0, or compile = false",
        )
    if config.model.split_experts:
        others = {
            "model.compile": (config.model.compile, "compile = false"),
            "model.mlp_rows": (bool(config.model.mlp_rows), "mlp_rows = 0"),
            'optimizer.clip_scope = "layer"': (config.optimizer.clip_scope == "layer", 'clip_scope = "global"'),
            f'optimizer.optim = "{config.optimizer.optim}"': (
                config.optimizer.optim not in ELEMENT_WISE,
                'optim = "adamw"',
            ),
        }
        for name, (is_set, instead) in others.items():
            if is_set:
                yield Problem(
                    "model.split_experts",
                    f"{name} needs whole layers, or whole matrices, and model.split_experts cuts them",
                    f"Write split_experts = false, or {instead}",
                )


def _check_lora(config: RunConfig) -> Iterator[Problem]:
    table = config.lora
    given = [name for name, field in type(table).model_fields.items() if getattr(table, name) != field.get_default()]
    if not table.is_on:
        if given:
            yield Problem("lora.r", f"[lora] has {given[0]}, but no r", "Write r = 16, for example")
        return
    if table.adapter_name_or_path is not None:
        own = [name for name in given if name not in ("adapter_name_or_path", "lora_dropout")]
        if own:
            yield Problem(
                f"lora.{own[0]}",
                f"lora.{own[0]} is for new adapters; the adapters of lora.adapter_name_or_path have their own settings",
                "Leave one of the two out",
            )
    if config.model.train_from_scratch:
        yield Problem(
            "model.train_from_scratch",
            "model.train_from_scratch = true with [lora]: adapters are trained on the weights of a folder",
            "Leave one of the two out",
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
        if "folder" in wanted and (kind != "weights" or config.model.train_from_scratch):
            yield Problem(
                key, f'{key} names "folder", where only frozen weights of a model can be', 'Leave "folder" out'
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
    names = [f"tiers.nvme.{index}.path" for index in range(len(tiers.nvme))]
    places = [drive.path for drive in tiers.nvme]
    for name in (CHECKPOINTS_NAME, COPIES_NAME):
        names.append(f"output_dir/{name}")
        places.append(config.output_dir / name)
    clashing: set[str] = set()
    for number, first, clash in folder_clashes(places):
        key = names[first if number >= len(tiers.nvme) else number]  # the drive that another folder fits better
        if first < len(tiers.nvme) and key not in clashing:
            clashing.add(key)
            text = f"{names[number]} {clash} {names[first]} ({places[first]})"
            yield Problem(key, text, "Give each drive its own folder, apart from the checkpoints of output_dir")
    if len({drive.rate is None for drive in tiers.nvme}) > 1:
        yield Problem("tiers.nvme", "only some of [[tiers.nvme]] have a rate", "Give a rate to all of them or to none")


def _check_direct(config: RunConfig) -> Iterator[Problem]:
    key, advice = "tiers.direct", 'Write direct = "auto"'
    if not config.tiers.nvme:
        yield Problem(key, f'{key} = "on", but there is no [[tiers.nvme]]', advice)
    if not _may_have_gpu_tier(config):
        yield Problem(key, f'{key} = "on", but device = "cpu": there is no GPU memory', advice)
    if config.tiers.verify == "always":
        text = f'{key} = "on" moves bytes past RAM, where tiers.verify = "always" would compare them'
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
        text = f"model.revision is of a model on the hub, and {config.model.model_name_or_path} is a path"
        yield Problem("model.revision", text, "Leave it out")
    if config.output_dir == Path(config.model.model_name_or_path):
        yield Problem("output_dir", "output_dir is the folder of the model that is trained", "Write another folder")
    places = {"output_dir": config.output_dir}
    places |= {f"tiers.nvme.{index}.path": drive.path for index, drive in enumerate(config.tiers.nvme)}
    for key, path in places.items():
        nearest = next((each for each in (path, *path.parents) if each.exists()), path)
        if nearest.exists() and not nearest.is_dir():
            yield Problem(key, f"{key}: {nearest} is a file", "Write the path of a folder")
