"""Makes checkpoints like the golden ones in this folder, with the current program; see README.md.

    PYTHONPATH=. python tests/data/checkpoints/make.py FOLDER

The runs write into FOLDER, which must not exist, and their files contain its path. The checkpoints are packed into
archives next to this script, which must not exist either.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

HERE = Path(__file__).parent
CONFIG = """task = "pretrain"
output_dir = "out"
device = "cpu"
[model]
model_name_or_path = "model"
[precision]
compute_dtype = "bfloat16"
[data]
max_length = 16
[[data.train]]
path = "data.txt"
[training]
per_device_train_batch_size = 1
gradient_accumulation_steps = 2
gradient_lanes = 2
max_steps = 2
[optimizer]
learning_rate = 1e-2
lr_scheduler_type = "constant"
warmup_steps = 0
[checkpoint]
save_steps = 1
save_total_limit = 2
save_copy = "last"
min_free_disk = "1MiB"
[tiers.ram]
size = "64MiB"
"""
ON_DRIVE = '[placement]\noptimizer = "nvme"\n[[tiers.nvme]]\npath = "drive"\nsize = "16MiB"\n'
#: Name -> (number of processes of the first and of the second step, additional config tables).
FORMS = {"one": ((1, 1), ON_DRIVE), "ram": ((1, 1), ""), "ranks": ((2, 2), ON_DRIVE), "both": ((1, 2), ON_DRIVE)}
#: Files in the folders of a run that belong to no checkpoint.
NOT_KEPT = ("live", ".pool", "LOCK", "README.txt", "out/*.json*", "out/rank?????")


def write_model(folder: Path) -> None:
    """Write a model with 900 parameters and a vocabulary of letters, and a text to train on."""
    letters = "abcdefghijklmnopqrstuvwxyz ."
    vocabulary = {"<s>": 0, **{letter: number for number, letter in enumerate(letters, 1)}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<s>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<s>", unk_token="<s>").save_pretrained(folder)
    assert len(AutoTokenizer.from_pretrained(folder)("call me")["input_ids"]) == len("call me")
    torch.manual_seed(0)
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "num_hidden_layers": 1}
    sizes = {"vocab_size": 32, "hidden_size": 8, "intermediate_size": 16, "max_position_embeddings": 64}
    LlamaForCausalLM(LlamaConfig(**sizes, **heads, tie_word_embeddings=True)).save_pretrained(folder)
    folder.with_name("data.txt").write_text("call me ishmael. some years ago never mind how long precisely. " * 3)


def run(folder: Path, processes: int, text: str) -> None:
    (folder / "run.toml").write_text(text)
    words = ["run", str(folder / "run.toml"), *(["--processes", str(processes)] if processes > 1 else [])]
    subprocess.run([sys.executable, "-m", "cli", *words], check=True)


def write(folder: Path) -> None:
    """Run each form's config, and stop and resume it so that each step leaves a checkpoint."""
    folder.mkdir(parents=True)
    write_model(folder / "model")
    for name, (processes, more) in FORMS.items():
        own = folder / name
        own.mkdir()
        shutil.copytree(folder / "model", own / "model")
        shutil.copy(folder / "data.txt", own)
        for step, size in enumerate(processes, 1):
            run(own, size, (CONFIG + more).replace("max_steps = 2", f"max_steps = {step}"))
            shutil.rmtree(own / "out/final")


def pack(folder: Path) -> None:
    """Pack the checkpoints of each form into an archive. Compression removes most bytes, which are padding zeros."""
    for name in FORMS:
        with tarfile.open(HERE / f"{name}.tar.xz", "x:xz") as archive:
            archive.add(folder / name, arcname=name, filter=kept)


def kept(member: tarfile.TarInfo) -> tarfile.TarInfo | None:
    """Return an archive member without its owner, or None if it belongs to no checkpoint."""
    member.uid = member.gid = 0
    member.uname = member.gname = ""
    path = Path(*Path(member.name).parts[1:])
    return None if any(path.match(pattern) for pattern in NOT_KEPT) else member


if __name__ == "__main__":
    write(Path(sys.argv[1]).absolute())
    pack(Path(sys.argv[1]).absolute())
