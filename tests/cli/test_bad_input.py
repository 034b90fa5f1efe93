"""Tests every user mistake through the real command: one message, the right exit code, no half-written files."""

# ruff: noqa: E501  -- one case per line reads best
from __future__ import annotations

import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from click.testing import CliRunner, Result
from safetensors.torch import load_file, save_file

from processes import warm
from processes.saved_run import make_model

CliModule = Callable[[str], ModuleType]
QUICKSTART = Path(__file__).parents[2] / "examples" / "quickstart"
CONFIG = """task = "pretrain"
output_dir = "out"
device = "cpu"
[model]
model_name_or_path = "model"
[precision]
compute_dtype = "float32"
[data]
max_length = 32
[[data.train]]
path = "data.txt"
[training]
per_device_train_batch_size = 2
gradient_accumulation_steps = 1
max_steps = 1
[optimizer]
learning_rate = 1e-3
lr_scheduler_type = "constant"
[tiers.ram]
size = "64MiB"
"""
#: Files in a run's output folder before its first save.
OWN_FILES = ("LOCK", "config.resolved.toml", "plan.json", "status.json")
NVME = '[[tiers.nvme]]\npath = "scratch"\nsize = "64MiB"\n'
GPT2 = '{"model_type": "gpt2", "n_embd": 32, "n_layer": 1, "n_head": 2, "n_positions": 16, "vocab_size": 1024}'
CHAT = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Call me Ishmael."}]


@dataclass
class Work:
    """Folder with a valid config, model and data. Each case breaks one of them."""

    folder: Path
    group: object
    text: str = CONFIG
    extra: list[str] = field(default_factory=list)

    @property
    def model(self) -> Path:
        return self.folder / "model"

    def swap(self, old: str, new: str) -> None:
        assert self.text.count(old) == 1, old
        self.text = self.text.replace(old, new)

    def add(self, text: str) -> None:
        self.text += text

    def rows(self, *lines: str, task: str = "pretrain") -> None:
        """Write the lines to a .jsonl file, and make it the training data."""
        (self.folder / "rows.jsonl").write_text("".join(f"{line}\n" for line in lines))
        self.swap("data.txt", "rows.jsonl")
        self.swap('task = "pretrain"', f'task = "{task}"')

    def model_config(self, **values: object) -> None:
        path = self.model / "config.json"
        path.write_text(json.dumps({**json.loads(path.read_text()), **values}))

    def weights(self, change: Callable[[dict[str, torch.Tensor]], object]) -> None:
        tensors = load_file(self.model / "model.safetensors")
        change(tensors)
        save_file(tensors, self.model / "model.safetensors", {"format": "pt"})

    def file(self, name: str, text: str = "somebody's") -> None:
        path = self.folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def run(self, *arguments: str) -> Result:
        (self.folder / "run.toml").write_text(self.text)
        words = ["run", str(self.folder / "run.toml"), *self.extra, *arguments]
        return CliRunner().invoke(self.group, words)  # type: ignore[arg-type]

    def tree(self) -> dict[str, bytes | None]:
        """Return the contents of all files below the folder except ``run.toml``, by path. Folders map to None."""
        paths = [path for path in self.folder.rglob("*") if path.name != "run.toml"]
        return {str(path.relative_to(self.folder)): path.read_bytes() if path.is_file() else None for path in paths}


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with the inputs of a run: a model and data."""
    folder = tmp_path_factory.mktemp("good")
    make_model(folder / "model")
    (folder / "data.txt").write_text((QUICKSTART / "loomings.txt").read_text()[:1500])
    return folder


@pytest.fixture
def work(good: Path, tmp_path: Path, cli_module: CliModule) -> Work:
    folder = tmp_path / "w"
    shutil.copytree(good, folder)
    return Work(folder, cli_module("main").command_group)


def check_failure(result: Result, code: int, *parts: str) -> None:
    assert result.exit_code == code, result.output
    for part in parts:
        assert part in result.stderr, result.stderr
    assert result.stderr.count("error: ") == 1, result.stderr
    assert "Traceback" not in result.output
    assert "internal error" not in result.output


Spoil = Callable[[Work], object]
CASES: dict[str, tuple[Spoil, int, tuple[str, ...]]] = {
    # config
    "no config file": (lambda w: w.extra.extend(["-c", "no-such.toml"]), 2, ("no-such.toml", "there is no such file")),
    "toml syntax": (lambda w: w.swap('"pretrain"', "pretrain"), 2, ("line 1", "not TOML", 'Text needs quotes: "pretrain"')),
    "typo": (lambda w: w.swap("max_length", "max_lenght"), 2, ("line 9", "unknown key `data.max_lenght`", "max_length")),
    "unknown table": (lambda w: w.add("[optimiser]\nlr = 1\n"), 2, ("line 21", "optimiser")),
    "no unit": (lambda w: w.swap('"64MiB"', "64"), 2, ("line 20", "has no unit", "64GiB")),
    "not a number": (lambda w: w.swap("= 1e-3", '= "fast"'), 2, ("line 17", "learning_rate")),
    "negative": (lambda w: w.swap("gradient_accumulation_steps = 1", "gradient_accumulation_steps = -1"), 2, ("line 14",)),
    "no output_dir": (lambda w: w.swap('output_dir = "out"\n', ""), 2, ("output_dir",)),
    "unknown schedule": (lambda w: w.swap('"constant"', '"consine"'), 2, ("line 18", '"consine" is not a schedule', '"cosine"')),
    "unknown dtype": (lambda w: w.swap('"float32"', '"float8"'), 2, ("line 7", "compute_dtype")),
    "unknown --set": (lambda w: w.extra.extend(["--set", "leaning_rate=1"]), 2, ("--set", "leaning_rate", "learning_rate")),
    "--set without value": (lambda w: w.extra.extend(["--set", "seed"]), 2, ("`seed` is not KEY=VALUE",)),
    "placement without drive": (lambda w: w.add('[placement]\nweights = ["nvme"]\n'), 2, ("line 22", "there is no [[tiers.nvme]]")),
    "packing": (lambda w: (w.swap("max_length = 32", "max_length = 32\npacking = true"), w.swap("[precision]", 'attn_implementation = "flash_attention_2"\n[precision]')), 2, ("flash_attention_2 needs a GPU",)),
    "freeze nothing": (lambda w: w.swap("[precision]", 'freeze = ["model.layer.*"]\n[precision]'), 2, ("'model.layer.*' matches no parameter", "model.layers")),
    "freeze all": (lambda w: w.swap("[precision]", 'freeze = ["*"]\n[precision]'), 2, ("leaves no parameter",)),
    "warm-up too long": (lambda w: (w.swap('"constant"', '"cosine"\nwarmup_steps = 500'), w.swap("max_steps = 1\n", "max_steps = -1\n")), 2, ("warm-up", "500")),
    # output
    "output below a file": (lambda w: w.swap('"out"', '"data.txt/out"'), 2, ("line 2", "output_dir", "data.txt is a file")),
    "unwritable output": (lambda w: w.swap('"out"', '"/proc/no-such-place/out"'), 2, ("output_dir: cannot write in /proc/no-such-place/out",)),
    "output is a file": (lambda w: w.swap('"out"', '"data.txt"'), 2, ("line 2", "is a file")),
    "foreign folder final": (lambda w: w.file("out/final/thesis.tex"), 2, ("out/final is neither empty nor an export of this program",)),
    # model
    "no model folder": (lambda w: w.swap('"model"', '"modle"'), 2, ("modle",)),
    "no config.json": (lambda w: (w.model / "config.json").unlink(), 2, ("config.json: is missing",)),
    "broken config.json": (lambda w: (w.model / "config.json").write_text("{"), 2, ("config.json: cannot be read as JSON",)),
    "quantized": (lambda w: w.model_config(quantization_config={"quant_method": "gptq", "bits": 4}), 2, ("the model is quantized (gptq)", "De-quantize")),
    "unknown model": (lambda w: w.model_config(model_type="llamma"), 2, ("model_type 'llamma' is unknown",)),
    "encoder and decoder": (lambda w: (w.model / "config.json").write_text('{"model_type": "t5"}'), 2, ("not supported",)),
    "encoder only": (lambda w: (w.model / "config.json").write_text('{"model_type": "vit"}'), 2, ("not supported",)),
    "more positions than learned": (lambda w: (w.model / "config.json").write_text(GPT2), 2, ("data.max_length = 32, but this model has 16 positions", "at most 16")),
    "no weights": (lambda w: (w.model / "model.safetensors").unlink(), 2, ("has no weights",)),
    "pickle only": (lambda w: (w.model / "model.safetensors").rename(w.model / "pytorch_model.bin"), 2, ("only pickle files", "Convert them")),
    "cut off weights": (lambda w: (w.model / "model.safetensors").write_bytes((w.model / "model.safetensors").read_bytes()[:-1000]), 2, ("but its header describes", "copy or download it again")),
    "empty weights": (lambda w: (w.model / "model.safetensors").write_bytes(b""), 2, ("is not a safetensors file",)),
    "missing tensor": (lambda w: w.weights(lambda t: t.pop("model.norm.weight")), 2, ("1 tensors of LlamaForCausalLM are missing: model.norm.weight",)),
    "one tensor too many": (lambda w: w.weights(lambda t: t.update(extra=torch.ones(1))), 2, ("1 tensors have no place", "extra")),
    "other shape": (lambda w: w.model_config(intermediate_size=128), 2, ("the shape [64, 96], but config.json requires [64, 128]",)),
    "missing shard": (lambda w: ((w.model / "model.safetensors").unlink(), w.file("model/model.safetensors.index.json", '{"weight_map": {"a": "model-1.safetensors"}}')), 2, ("1 of 1 shards are missing: model-1.safetensors",)),
    "not a number inside": (lambda w: w.weights(lambda t: t["model.norm.weight"].fill_(float("nan"))), 2, ("model.norm.weight contains infinite values or NaN",)),
    # tokenizer and data
    "no tokenizer": (lambda w: (w.model / "tokenizer.json").unlink(), 4, ("there is no tokenizer.json",)),
    "broken tokenizer": (lambda w: w.file("model/tokenizer.json", "{"), 4, ("the tokenizer cannot be opened",)),
    "tokenizer of another model": (lambda w: (w.model_config(vocab_size=256), w.weights(lambda t: t.update({"model.embed_tokens.weight": t["model.embed_tokens.weight"][:256].clone()}))), 4, ("tokenizer", "vocab_size", "256")),
    "no data file": (lambda w: w.swap("data.txt", "date.txt"), 4, ("date.txt: there is no such file or folder",)),
    "kind of data": (lambda w: (w.file("data.xlsx"), w.swap("data.txt", "data.xlsx")), 4, ('".xlsx" files are not supported',)),
    "empty data": (lambda w: w.file("data.txt", ""), 4, ("data.txt: the file is empty",)),
    "not utf-8": (lambda w: (w.folder / "data.txt").write_bytes(b"caf\xe9"), 4, ("not UTF-8",)),
    "broken line": (lambda w: w.rows('{"text": "good"}', '{"text": "bad'), 4, ("rows.jsonl line 2", "broken JSON")),
    "no known field": (lambda w: w.rows('{"question": "?", "answer": "!"}'), 4, ("line 1", "`question`, `answer`", 'prompt = "question"')),
    "chat as text": (lambda w: w.rows(json.dumps({"messages": CHAT})), 4, ("line 1", 'Set task = "sft"')),
    "unknown role": (lambda w: w.rows(json.dumps({"messages": [{"role": "narrator", "content": "x"}]}), task="sft"), 4, ("message 1", 'unknown role "narrator"')),
    "no chat template": (lambda w: ([path.unlink() for path in w.model.glob("chat_template*")], w.file("model/tokenizer_config.json", '{"tokenizer_class": "PreTrainedTokenizerFast"}'), w.rows(json.dumps({"messages": CHAT}), task="sft")), 4, ("chat template",)),
    "no trained token": (lambda w: w.rows('{"prompt": "a", "completion": ""}', task="sft"), 4, ("no token would be trained",)),
    # tiers
    "too little RAM": (lambda w: w.swap('"64MiB"', '"1MiB"'), 3, ("does not fit: tier 'ram' has 1048576 bytes", "needs at least", "add a [[tiers.nvme]] path")),
    "too little drive": (lambda w: (w.swap('"64MiB"', '"2560KiB"'), w.add(NVME.replace("64MiB", "4KiB"))), 3, ("does not fit: tier 'nvme' has 4096 bytes",)),
    "drive is a file": (lambda w: w.add(NVME.replace("scratch", "data.txt")), 2, ("line 22", "data.txt is a file")),
    "drive below a file": (lambda w: w.add(NVME.replace("scratch", "data.txt/x")), 2, ("line 22", "tiers.nvme.0.path", "data.txt is a file")),
    "drive holds other files": (lambda w: (w.file("scratch/thesis.tex"), w.add(NVME)), 2, ("scratch' is not empty and was not made by tiered",)),
    "one drive twice": (lambda w: w.add(NVME + NVME), 2, ("line 25", "is the same folder as tiers.nvme.0")),
}  # fmt: skip


@pytest.mark.parametrize("case", list(CASES))
def test_bad_input(work: Work, case: str) -> None:
    spoil, code, parts = CASES[case]
    spoil(work)
    before = work.tree()
    check_failure(work.run(), code, *parts)
    assert work.tree() == before


def test_missing_config_is_reported(work: Work) -> None:
    result = CliRunner().invoke(work.group, ["run", str(work.folder / "nowhere.toml")])  # type: ignore[arg-type]
    check_failure(result, 2, "there is no such file")


@contextmanager
def locked(folder: Path) -> Iterator[int]:
    """Start a process that locks a drive's folder during the context, and yield its pid."""
    script = (
        "import sys, tiered.tiers.directory as d; t = d.TierDirectory(sys.argv[1]); print('locked', flush=True);"
        "sys.stdin.read()"
    )
    with warm.Popen(
        [sys.executable, "-c", script, str(folder)],
        cwd=Path(__file__).parents[2], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        assert process.stdout.readline() == "locked\n"
        yield process.pid
        process.communicate()


def test_drive_in_use_by_another_process(work: Work) -> None:
    work.add(NVME)
    with locked(work.folder / "scratch") as pid:
        before = work.tree()
        check_failure(work.run(), 1, "scratch", f"process {pid}")
        assert work.tree() == before
    result = work.run()
    assert result.exit_code == 0, result.output


def test_drive_with_less_free_space_than_the_plan_needs(work: Work, monkeypatch: pytest.MonkeyPatch) -> None:
    work.swap('"64MiB"', '"2560KiB"')
    work.add(NVME)
    before = work.tree()
    real = shutil.disk_usage
    monkeypatch.setattr(shutil, "disk_usage", lambda path: SimpleNamespace(total=real(path).total, used=0, free=8192))
    result = work.run()
    check_failure(result, 3, "does not fit: the drive of", "has 8.00 KiB free", "scratch")
    assert work.tree() == before


def test_nonfinite_gradient_ends_the_run(work: Work) -> None:
    work.swap("= 1e-3", "= 1e30")
    work.swap("max_steps = 1", "max_steps = 3")
    check_failure(work.run(), 1, "gradient")
    assert sorted(path.name for path in (work.folder / "out").iterdir()) == sorted([*OWN_FILES, "metrics.jsonl"])


@pytest.mark.parametrize("drive", ["", NVME], ids=["ram", "nvme"])
@pytest.mark.parametrize("saves", [True, False], ids=["saves", "does not save"])
def test_interrupted_run_exits_75_only_if_it_saved(
    work: Work, drive: str, saves: bool, cli_module: CliModule, monkeypatch: pytest.MonkeyPatch
) -> None:
    work.file("out/notes.txt")
    work.add(drive)
    work.swap("max_steps = 1", "max_steps = 3")
    monkeypatch.setattr(
        cli_module("observers").PlainObserver, "on_step", lambda self, metrics: signal.raise_signal(signal.SIGINT)
    )
    result = work.run() if saves else work.run("--set", "checkpoint.save_on_signal=false")
    names = sorted(path.name for path in (work.folder / "out").iterdir())
    if saves:
        assert result.exit_code == 75
        assert "interrupted at step 1, saved: run the same command again" in result.stderr
        assert names == sorted([*OWN_FILES, "checkpoints", "metrics.jsonl", "notes.txt", "summary.json"])
    else:
        assert (result.exit_code, result.stderr.strip()) == (1, "error: interrupted; nothing saved")
        assert names == sorted([*OWN_FILES, "metrics.jsonl", "notes.txt"])
    monkeypatch.undo()
    result = work.run()
    assert result.exit_code == 0, "the same folders must serve the next run"
    assert ("continuing after step 1 of 3" in result.stdout) == saves


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("drive", ["", NVME], ids=["ram", "nvme"])
def test_reported_minimum_size_is_the_smallest_that_runs(work: Work, dtype: str, drive: str) -> None:
    work.swap('"float32"', f'"{dtype}"')
    work.add(drive)
    result = work.run("--set", "tiers.ram.size=1KiB")
    check_failure(result, 3, "does not fit: tier 'ram' has 1024 bytes")
    found = re.search(r"needs at least (\d+) \(", result.stderr)
    assert found is not None, result.stderr
    need = int(found[1])
    below = work.run("--set", f"tiers.ram.size={need - 1}B")
    check_failure(below, 3, f"has {need - 1} bytes", f"needs at least {need} ")
    assert not (work.folder / "out").exists()
    result = work.run("--set", f"tiers.ram.size={need}B")
    assert result.exit_code == 0, result.output
    assert (work.folder / "out/final/model.safetensors").is_file()
