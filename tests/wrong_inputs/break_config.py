"""Wrong configs: files that are not TOML, wrong overrides, wrong extra files, and impossible combinations."""

# ruff: noqa: E501  -- one case per line reads best
from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence

from wrong_inputs.mutate_config import CODE, COMMANDS, SEED
from wrong_inputs.workplace import BASE_VALUES, CONFIG_NAME, Workplace, WrongInput

#: Wrong line, inserted in the middle of the config -> further text that the message must contain, or "".
BROKEN_LINES = {
    'run_name = "no end': "", "run_name = 'no end": "", "run_name = [1, 2": "", "run_name = { a = 1": "",
    "run_name": "", "run_name =": "", "= 7": "", "run_name: mine": "", "run_name = mine": '"mine"',
    "run_name = ./mine": "", "seed = 007": "", "seed = 1 2": "", "seed = 1,": "", "run_name = None": "null",
    "seed = 7GiB": '"7GiB"', "packing = True": "true", "packing = yes": '"yes"', "[data": "", "[]": "", "]": "",
    "// a comment": "", "{": "", 'run_name = "\\x"': "", 'run_name = "\\path"': "", '"run_name" "mine"': "",
    "- run_name": "", "run_name = 'a' 'b'": "", "seed = 1\nseed = 2": "", 'task = "sft"': "", "[model]": "",
    "[[model]]": "", "[data.train]": "", "[tiers.nvme]": "", "seed = 1_": "", "seed = 1.": "", "run_name = \u201cmine\u201d": "",
    "<<<<<<< HEAD": "", "\x07": "",
}  # fmt: skip
#: Name -> contents of a file that is not TOML.
BROKEN_FILES: dict[str, bytes] = {
    "not UTF-8": b'task = "caf\xe9"\n',
    "UTF-16": "task = 1\n".encode("utf-16"),
    "zero bytes": b"\0" * 64,
    "JSON": json.dumps({"task": "sft", "output_dir": "out"}, indent=1).encode(),
    "YAML": b"task: sft\noutput_dir: out\n",
    "binary": bytes(random.Random(SEED).randbytes(300)),
    "a picture": b"\x89PNG\r\n\x1a\n" + bytes(range(64)),
}
#: Argument of --set -> strings that the message must contain.
OVERRIDES: dict[str, tuple[str, ...]] = {
    "seed": ("--set", "seed", "KEY=VALUE"),
    "=7": ("--set", "KEY=VALUE"),
    "": ("--set", "KEY=VALUE"),
    "sede=7": ("--set", "sede", "seed"),
    "size=7GiB": ("--set", "size", "tiers.ram.size"),
    "tiers.ram.size=7": ("--set", "tiers.ram.size"),
    "learning_rate=fast": ("--set", "learning_rate"),
    "learning_rate=": ("--set", "learning_rate"),
    "data.train.path=x": ("--set", "data.train.0.path"),
    "data.train.7.path=x": ("--set", "data.train", "7"),
    "data.train.0.pth=x": ("--set", "data.train.0.path"),
    "data.train.0=x": ("--set", "data.train"),
    "data.train=x": ("--set", "data.train"),
    "data=x": ("--set", "data"),
    "task.x=1": ("--set", "task"),
    "model.model_name_or_path.x=1": ("--set", "model.model_name_or_path"),
    ".=1": ("--set",),
    "data..train=1": ("--set", "data"),
    "cutoff_len=64": ("--set", "data.max_length"),
    "seed=-1": ("--set", "seed"),
    "report_to=mlflow": ("--set", "logging.report_to"),
    "device=cuda:0": ("--set", "device"),
}
Keys = dict[str, str]
#: Name of an impossible combination -> (keys with values as TOML, key whose line the message must name, further
#: strings that the message must contain).
COMBINATIONS: dict[str, tuple[Keys, str, tuple[str, ...]]] = {
    "no steps": ({"training.max_steps": "0"}, "training.max_steps", ()),
    "batch twice": ({"training.train_batch_tokens": "128"}, "training.per_device_train_batch_size", ("train_batch_tokens",)),
    "plain text, masked": ({"task": '"pretrain"', "data.train_on": '"assistant"'}, "data.train_on", ("pretrain",)),
    "plain text from chats": ({"task": '"pretrain"', "data.train.format": '"messages"'}, "data.train.format", ("pretrain",)),
    "momentum without one": ({"optimizer.optim": '"sgd"', "optimizer.sgd_momentum": "0.0", "optimizer.sgd_nesterov": "true"}, "optimizer.sgd_nesterov", ("sgd_momentum",)),
    "custom without a name": ({"optimizer.optim": '"custom"'}, "optimizer.optim", ("custom_optimizer",)),
    "no schedule": ({"optimizer.lr_scheduler_type": '"consine"'}, "optimizer.lr_scheduler_type", ("cosine",)),
    "schedule of later torch": ({"optimizer.lr_scheduler_type": '"reduce_lr_on_plateau"'}, "optimizer.lr_scheduler_type", ()),
    "schedule argument": ({"optimizer.lr_scheduler_kwargs": "{ power = 2 }"}, "optimizer.lr_scheduler_kwargs", ("polynomial",)),
    "schedule lacks one": ({"optimizer.lr_scheduler_type": '"cosine_with_min_lr"'}, "optimizer.lr_scheduler_kwargs", ("min_lr",)),
    "schedule lacks decay": ({"optimizer.lr_scheduler_type": '"warmup_stable_decay"'}, "optimizer.lr_scheduler_kwargs", ("num_decay_steps",)),
    "half a step": ({"optimizer.warmup_steps": "2.5"}, "optimizer.warmup_steps", ()),
    "warm-up too long": ({"optimizer.lr_scheduler_type": '"cosine"', "optimizer.warmup_steps": "9", "training.max_steps": "5"}, "optimizer.warmup_steps", ("5 steps",)),
    "flash attention on the CPU": ({"model.attn_implementation": '"flash_attention_2"', "precision.compute_dtype": '"bfloat16"', "data.packing": "false"}, "model.attn_implementation", ("cpu",)),
    "flash attention in float32": ({"device": '"auto"', "model.attn_implementation": '"flash_attention_2"', "data.packing": "false"}, "model.attn_implementation", ("float32",)),
    "kernels of a GPU on the CPU": ({"model.use_liger_kernel": "true"}, "model.use_liger_kernel", ("cpu",)),
    "pieces of a graph": ({"model.compile": "true", "model.mlp_rows": "64"}, "model.mlp_rows", ("compile",)),
    "time without interval": ({"checkpoint.save_strategy": '"time"'}, "checkpoint.save_strategy", ("save_interval",)),
    "interval without time": ({"checkpoint.save_strategy": '"epoch"', "checkpoint.save_interval": '"45min"'}, "checkpoint.save_interval", ("time",)),
    "tier twice": ({"placement.weights": '["ram", "ram"]'}, "placement.weights", ("twice",)),
    "tier of no GPU": ({"placement.weights": '["gpu"]'}, "placement.weights", ("cpu",)),
    "emulated in addition to CUDA": ({"device": '"cuda"', "advanced.emulate_gpu": "true", "tiers.gpu.size": '"1GiB"'}, "advanced.emulate_gpu", ("cpu",)),
    "emulated without a size": ({"device": '"cpu"', "advanced.emulate_gpu": "true"}, "advanced.emulate_gpu", ("tiers.gpu",)),
    "direct without a GPU": ({"tiers.direct": '"on"'}, "tiers.direct", ("cpu",)),
    "margin auto": ({"tiers.safety_margin": '"auto"'}, "tiers.safety_margin", ("5%",)),
    "pinned more than all": ({"tiers.ram.pinned": '"128MiB"'}, "tiers.ram.pinned", ("tiers.ram.size",)),
    "bfloat16 sums": ({"precision.grad_dtype": '"bfloat16"', "advanced.micro_batch_order": '"micro_batch"', "training.gradient_accumulation_steps": "2"}, "precision.grad_dtype", ("micro_batch_order",)),
    "output is the model": ({"output_dir": '"model"'}, "output_dir", ("model",)),
    "no template file": ({"model.chat_template": '"no.jinja"'}, "model.chat_template", ("no.jinja",)),
    "template is a folder": ({"model.chat_template": '"model"'}, "model.chat_template", ("model",)),
}  # fmt: skip


def _broken_line(text: str, part: str) -> Callable[[Workplace], Sequence[str]]:
    def spoil(work: Workplace) -> Sequence[str]:
        lines = work.config.text().splitlines()
        lines.insert(len(lines) // 2, text)
        work.raw_config = "".join(f"{line}\n" for line in lines).encode()
        return (CONFIG_NAME, "line ", *([part] if part else []))

    return spoil


def file_cases() -> Iterator[WrongInput]:
    """Yield config files that are not TOML, are empty, are a folder, or do not exist."""
    for line, part in BROKEN_LINES.items():
        yield WrongInput(f"line {line!r}", "config: not TOML", CODE, _broken_line(line, part), COMMANDS)

    def other(content: bytes) -> Callable[[Workplace], Sequence[str]]:
        def spoil(work: Workplace) -> Sequence[str]:
            work.raw_config = content
            return (CONFIG_NAME,)

        return spoil

    for name, content in BROKEN_FILES.items():
        yield WrongInput(name, "config: not TOML", CODE, other(content), COMMANDS)
    for name, content in {"empty": b"", "spaces": b"  \n\n", "only comments": b"# nothing\n"}.items():
        yield WrongInput(f"{name} file", "config: missing key", CODE, other(content), COMMANDS)

    def folder(work: Workplace) -> Sequence[str]:
        work.config_path.mkdir()
        return (CONFIG_NAME,)

    def nothing(work: Workplace) -> Sequence[str]:
        work.config_path.symlink_to(work.folder / "nowhere.toml")
        return (CONFIG_NAME,)

    yield WrongInput("a folder", "config: no file", CODE, folder, COMMANDS)
    yield WrongInput("a link to nothing", "config: no file", CODE, nothing, COMMANDS)
    generator = random.Random(SEED)
    size = len("".join(f"{key} = {value}\n" for key, value in BASE_VALUES.items()))
    for place in sorted(generator.sample(range(40, size), 12)):
        yield _with_byte(place, generator.choice(b"\xff\xfe\x80\x00\x1b"))


def _with_byte(place: int, byte: int) -> WrongInput:
    """Return a case that inserts an invalid byte into the config."""

    def spoil(work: Workplace) -> Sequence[str]:
        text = work.config.text().encode()
        at = place % len(text)
        work.raw_config = text[:at] + bytes([byte]) + text[at:]
        return (CONFIG_NAME,)

    return WrongInput(f"byte {byte:02x} at {place}", "config: not TOML", CODE, spoil, COMMANDS)


def option_cases() -> Iterator[WrongInput]:
    """Yield wrong arguments of ``--set`` and ``-c``."""

    def override_on_command_line(word: str, parts: tuple[str, ...]) -> Callable[[Workplace], Sequence[str]]:
        def spoil(work: Workplace) -> Sequence[str]:
            work.words += ["--set", word]
            return parts

        return spoil

    for word, parts in OVERRIDES.items():
        yield WrongInput(f"--set {word!r}", "config: bad --set", CODE, override_on_command_line(word, parts), COMMANDS)

    def extra(name: str, text: str | None, parts: tuple[str, ...]) -> WrongInput:
        def spoil(work: Workplace) -> Sequence[str]:
            if text is not None:
                work.file("more.toml", text)
            work.words += ["-c", str(work.folder / "more.toml")]
            return "more.toml", *parts

        return WrongInput(f"-c {name}", "config: bad extra file", CODE, spoil, COMMANDS)

    yield extra("missing", None, ("no such file",))
    yield extra("no TOML", "seed = = 1\n", ("line 1",))
    yield extra("unknown key", "# mine\nsede = 1\n", ("line 2", "seed"))
    yield extra("wrong type", '\n\n[optimizer]\nlearning_rate = "fast"\n', ("line 4", "learning_rate"))
    yield extra("wrong combination", "[training]\nmax_steps = 0\n", ("line 2", "max_steps"))
    yield extra("a value for a table", "model = 7\n", ("line 1", "model"))


def combination_cases() -> Iterator[WrongInput]:
    """Yield values that are valid alone but invalid together."""

    def put(keys: Keys, key: str, parts: tuple[str, ...]) -> Callable[[Workplace], Sequence[str]]:
        def spoil(work: Workplace) -> Sequence[str]:
            for name, value in keys.items():
                work.config.put(name, value)
            place = work.config.line(key) if key in dict(work.config.lines()) else ""
            return CONFIG_NAME, place, *parts

        return spoil

    kind = "config: impossible combination"
    for name, (keys, key, parts) in COMBINATIONS.items():
        yield WrongInput(name, kind, CODE, put(keys, key, parts), COMMANDS)

    def indivisible_batch_tokens(work: Workplace) -> Sequence[str]:
        work.config.drop("training.per_device_train_batch_size")
        work.config.put("training.train_batch_tokens", "100")
        return CONFIG_NAME, work.config.line("training.train_batch_tokens"), "64 or 128"

    def no_eval(work: Workplace) -> Sequence[str]:
        del work.config.tables["data.eval"]
        work.config.put("evaluation.eval_strategy", '"epoch"')
        return CONFIG_NAME, work.config.line("evaluation.eval_strategy"), "[[data.eval]]"

    def no_drive(work: Workplace) -> Sequence[str]:
        del work.config.tables["tiers.nvme"]
        work.config.put("placement.optimizer", '["nvme"]')
        return CONFIG_NAME, work.config.line("placement.optimizer"), "[[tiers.nvme]]"

    def idle_group(work: Workplace) -> Sequence[str]:
        work.config.drop("optimizer.groups.learning_rate")
        return CONFIG_NAME, work.config.line("optimizer.groups"), "optimizer.groups.0"

    def two(table: str, text: str, *parts: str) -> Callable[[Workplace], Sequence[str]]:
        def spoil(work: Workplace) -> Sequence[str]:
            lines = work.config.text().splitlines()
            work.raw_config = "".join(f"{line}\n" for line in [*lines, f"[[{table}]]", text]).encode()
            line = len(lines) + (2 if table == "tiers.nvme" else 1)
            return CONFIG_NAME, f"line {line}", *parts

        return spoil

    yield WrongInput("tokens no multiple", kind, CODE, indivisible_batch_tokens, COMMANDS)
    yield WrongInput("nothing to evaluate on", kind, CODE, no_eval, COMMANDS)
    yield WrongInput("placement without a drive", kind, CODE, no_drive, COMMANDS)
    yield WrongInput("a group that changes nothing", kind, CODE, idle_group, COMMANDS)
    yield WrongInput("one drive twice", kind, CODE, two("tiers.nvme", 'path = "./drive"', "tiers.nvme.0"), COMMANDS)
    same = two("data.eval", 'path = "other/held_out.jsonl"', "held_out")
    yield WrongInput("two sets of one name", kind, CODE, same, COMMANDS)


def cases() -> Iterator[WrongInput]:
    yield from file_cases()
    yield from option_cases()
    yield from combination_cases()
