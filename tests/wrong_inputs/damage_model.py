"""Wrong model folders: the config.json, weights or shards are missing, damaged or from another model."""

# ruff: noqa: E501  -- one case per line reads best
from __future__ import annotations

import json
import random
import shutil
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from wrong_inputs.mutate_config import SEED
from wrong_inputs.workplace import Spoil, Workplace, WrongInput

MODEL, DATA = 2, 4
WEIGHTS = "model.safetensors"
COMMANDS = ("check", "run")
#: Name -> contents of config.json.
CONFIGS: dict[str, bytes] = {
    "empty": b"", "an open brace": b"{", "a list": b"[]", "null": b"null", "a number": b"7", "text": b'"llama"',
    "an empty object": b"{}", "not UTF-8": b'{"model_type": "\xff"}', "a picture": b"\x89PNG\r\n\x1a\n",
    "deeply nested": b"[" * 100_000, "a pointer of git lfs": b"version https://git-lfs.github.com/spec/v1\noid sha256:1\n",
}  # fmt: skip
#: Name -> values in config.json that describe an unsupported kind of model.
TYPES: dict[str, dict[str, Any]] = {
    "unknown model_type": {"model_type": "llamma"},
    "model_type is a number": {"model_type": 7},
    "model_type is a list": {"model_type": ["llama"]},
    "no model_type": {"model_type": None},
    "encoder and decoder": {"model_type": "t5", "architectures": ["T5ForConditionalGeneration"]},
    "encoder": {"model_type": "vit", "architectures": ["ViTModel"]},
    "speech": {"model_type": "wav2vec2"},
    "code of its own": {"model_type": "my_model", "auto_map": {"AutoConfig": "configuration_my.MyConfig"}},
    "quantized by gptq": {"quantization_config": {"quant_method": "gptq", "bits": 4}},
    "quantized by bitsandbytes": {"quantization_config": {"load_in_4bit": True}},
    "quantized, and no object": {"quantization_config": "int4"},
}
#: Key of config.json -> wrong values. Each is invalid or does not match the weights.
VALUES: dict[str, tuple[Any, ...]] = {
    "hidden_size": ("big", -1, 0, None, 96, 1.5, [128]),
    "intermediate_size": ("big", -1, None, 64),
    "num_hidden_layers": ("four", -1, None, 5, 0),
    "num_attention_heads": ("four", 0, None, 3),
    "num_key_value_heads": ("two", 3, 0),
    "head_dim": ("wide", -1, 16),
    "vocab_size": ("all", -1, 0, None, 2048),
    "hidden_act": ("sillu", 7, None),
    "rms_norm_eps": ("small", None),
    "max_position_embeddings": ("many", None),
    "rope_parameters": (7, {"rope_type": "xyz"}, {"rope_type": "default", "rope_theta": "far"}),
    "tie_word_embeddings": ("maybe",),
}


def _case(name: str, kind: str, code: int, spoil: Spoil) -> WrongInput:
    return WrongInput(name, f"model: {kind}", code, spoil, COMMANDS)


def _file(name: str, content: bytes, *parts: str) -> Spoil:
    def spoil(work: Workplace) -> Sequence[str]:
        work.file(f"model/{name}", content)
        return parts or (name,)

    return spoil


def _config(*parts: str, **values: Any) -> Spoil:
    def spoil(work: Workplace) -> Sequence[str]:
        work.model_config(**values)
        return parts

    return spoil


def config_cases() -> Iterator[WrongInput]:
    for what, content in CONFIGS.items():
        yield _case(f"config.json is {what}", "config.json", MODEL, _file("config.json", content))
    for what, values in TYPES.items():
        yield _case(what, "another kind of model", MODEL, _config("config.json", **values))
    for key, wrong in VALUES.items():
        for value in wrong:
            yield _case(f"{key} = {json.dumps(value)}", "config.json", MODEL, _config("config.json", **{key: value}))


def _weights(change: Callable[[dict[str, Any]], object], *parts: str) -> Spoil:
    def spoil(work: Workplace) -> Sequence[str]:
        from safetensors.torch import load_file, save_file

        tensors = load_file(work.base_model / WEIGHTS)
        change(tensors)
        (work.model / WEIGHTS).unlink()
        save_file(tensors, work.model / WEIGHTS, {"format": "pt"})
        return parts

    return spoil


def _bytes(change: Callable[[bytes], bytes], *parts: str) -> Spoil:
    def spoil(work: Workplace) -> Sequence[str]:
        work.file(f"model/{WEIGHTS}", change((work.base_model / WEIGHTS).read_bytes()))
        return parts or (WEIGHTS,)

    return spoil


def _header(change: Callable[[dict[str, Any]], object]) -> Callable[[bytes], bytes]:
    """Return a function that changes the header of a safetensors file but keeps the bytes after the header."""

    def changed(content: bytes) -> bytes:
        size = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + size])
        change(header)
        text = json.dumps(header).encode()
        return len(text).to_bytes(8, "little") + text + content[8 + size :]

    return changed


def _flip_in_header(seed: int) -> Callable[[bytes], bytes]:
    def changed(content: bytes) -> bytes:
        size = int.from_bytes(content[:8], "little")
        at = random.Random(seed).randrange(8 + content[8 : 8 + size].index(b'"model.'), 8 + size)
        return content[:at] + bytes([content[at] ^ 0x11]) + content[at + 1 :]

    return changed


def weight_cases() -> Iterator[WrongInput]:
    norm, gate = "model.norm.weight", "model.layers.0.mlp.gate_proj.weight"
    kind = "weights"
    yield _case("a tensor is missing", kind, MODEL, _weights(lambda t: t.pop(norm), "/model", norm))
    yield _case(
        "a layer is missing", kind, MODEL, _weights(lambda t: [t.pop(n) for n in list(t) if ".0." in n], "layers.0")
    )
    yield _case("a tensor too many", kind, MODEL, _weights(lambda t: t.update(adapter=t[norm].clone()), "adapter"))
    yield _case("another shape", kind, MODEL, _weights(lambda t: t.update({gate: t[gate][1:].clone()}), WEIGHTS, gate))
    yield _case("transposed", kind, MODEL, _weights(lambda t: t.update({gate: t[gate].T.contiguous()}), WEIGHTS, gate))
    yield _case("whole numbers", kind, MODEL, _weights(lambda t: t.update({gate: t[gate].int()}), WEIGHTS, gate))
    yield _case(
        "names of another model",
        kind,
        MODEL,
        _weights(lambda t: [t.update({f"x.{n}": t.pop(n)}) for n in list(t)], "/model"),
    )
    yield _case("an adapter only", kind, MODEL, _adapter)
    not_finite = _weights(lambda t: t[norm].fill_(float("nan")), WEIGHTS, norm)
    yield WrongInput("not a number inside", "model: weights", MODEL, not_finite, ("run",))
    yield _case("empty", kind, MODEL, _bytes(lambda b: b""))
    yield _case("seven bytes", kind, MODEL, _bytes(lambda b: b[:7]))
    yield _case("only the length", kind, MODEL, _bytes(lambda b: b[:8]))
    yield _case("a huge header", kind, MODEL, _bytes(lambda b: b"\xff" * 8 + b[8:]))
    yield _case("zeros", kind, MODEL, _bytes(lambda b: bytes(len(b))))
    yield _case("a byte too many", kind, MODEL, _bytes(lambda b: b + b"\0"))
    yield _case("a web page", kind, MODEL, _bytes(lambda b: b"<!DOCTYPE html><html>Not found</html>"))
    yield _case(
        "a pointer of git lfs",
        kind,
        MODEL,
        _bytes(lambda b: b"version https://git-lfs.github.com/spec/v1\noid sha256:1\nsize 9\n"),
    )
    for share in (0.0001, 0.3, 0.9999):
        yield _case(f"cut off at {share:.2%}", kind, MODEL, _bytes(lambda b, share=share: b[: int(len(b) * share)]))
    for seed in range(8):
        yield _case(f"a bit of the header, {seed}", "header", MODEL, _bytes(_flip_in_header(SEED + seed), "/model"))
    changes: dict[str, Callable[[dict[str, Any]], object]] = {
        "unknown dtype": lambda h: h[norm].update(dtype="F8_E4M3"),
        "no dtype": lambda h: h[norm].pop("dtype"),
        "no shape": lambda h: h[norm].pop("shape"),
        "shape of text": lambda h: h[norm].update(shape=["x"]),
        "negative shape": lambda h: h[norm].update(shape=[-128, -1]),
        "offsets swapped": lambda h: h[norm]["data_offsets"].reverse(),
        "one offset": lambda h: h[norm].update(data_offsets=[0]),
        "offsets overlap": lambda h: h[norm].update(data_offsets=h[gate]["data_offsets"]),
        "a tensor that is a list": lambda h: h.update({norm: []}),
        "a tensor that is null": lambda h: h.update({norm: None}),
        "no tensors": lambda h: h.clear(),
    }  # fmt: skip
    for what, change in changes.items():
        yield _case(f"header with {what}", "header", MODEL, _bytes(_header(change)))


def _adapter(work: Workplace) -> Sequence[str]:
    (work.model / WEIGHTS).rename(work.model / "adapter_model.safetensors")
    work.file("model/adapter_config.json", '{"peft_type": "LORA"}')
    return "/model", "adapter"


def _sharded(change: Callable[[Workplace, dict[str, Any]], object], *parts: str) -> Spoil:
    """Return a function that splits the weights into two shards with an index, and damages a shard or the index."""

    def spoil(work: Workplace) -> Sequence[str]:
        from safetensors.torch import load_file, save_file

        tensors = load_file(work.base_model / WEIGHTS)
        (work.model / WEIGHTS).unlink()
        names = sorted(tensors)
        halves = {"model-00001-of-00002.safetensors": names[::2], "model-00002-of-00002.safetensors": names[1::2]}
        for file, some in halves.items():
            save_file({name: tensors[name] for name in some}, work.model / file, {"format": "pt"})
        index = {"weight_map": {name: file for file, some in halves.items() for name in some}}
        changed = change(work, index)
        text = changed if isinstance(changed, str) else json.dumps(index)
        if text != "none":
            work.file(f"model/{WEIGHTS}.index.json", text)
        return parts

    return spoil


def shard_cases() -> Iterator[WrongInput]:
    second, index = "model-00002-of-00002.safetensors", f"{WEIGHTS}.index.json"
    norm = "model.norm.weight"

    def gone(work: Workplace, values: dict[str, Any]) -> None:
        (work.model / second).unlink()

    def cut(work: Workplace, values: dict[str, Any]) -> None:
        (work.model / second).write_bytes((work.model / second).read_bytes()[:-100])

    spoils = {
        "a missing shard": _sharded(gone, "/model", second),
        "a shard cut off": _sharded(cut, second),
        "an index of another file": _sharded(lambda w, i: i["weight_map"].update({norm: "model-3.safetensors"}), "model-3.safetensors"),
        "an index of a missing tensor": _sharded(lambda w, i: i["weight_map"].update({"ghost": second}), index, "ghost"),
        "an index outside of the folder": _sharded(lambda w, i: i["weight_map"].update({norm: "../x.safetensors"}), index, "../x.safetensors"),
        "an index that is empty": _sharded(lambda w, i: i["weight_map"].clear(), index),
        "an index without a map": _sharded(lambda w, i: i.clear(), index),
        "an index with a list": _sharded(lambda w, i: i.update(weight_map=[1]), index),
        "an index with numbers": _sharded(lambda w, i: i["weight_map"].update({norm: 7}), "7"),
        "an index that is no JSON": _sharded(lambda w, i: "{", index),
        "an index that is a list": _sharded(lambda w, i: "[]", index),
        "an index that is deeply nested": _sharded(lambda w, i: "[" * 100_000, index),
        "no index": _sharded(lambda w, i: "none", "/model", index),
    }  # fmt: skip
    for what, spoil in spoils.items():
        yield _case(what, "shards", MODEL, spoil)


def folder_cases() -> Iterator[WrongInput]:
    kind = "folder"

    def renamed(name: str, *parts: str) -> Spoil:
        def spoil(work: Workplace) -> Sequence[str]:
            (work.model / WEIGHTS).rename(work.model / name)
            return "/model", *parts

        return spoil

    def missing(work: Workplace) -> Sequence[str]:
        work.config.put("model.model_name_or_path", '"modle"')
        return ("modle",)

    def hub_name(work: Workplace) -> Sequence[str]:
        work.config.put("model.model_name_or_path", '"Qwen/Qwen3-0.6B"')
        return ("Qwen/Qwen3-0.6B",)

    def a_file(work: Workplace) -> Sequence[str]:
        work.config.put("model.model_name_or_path", '"model/config.json"')
        return ("model/config.json",)

    def nothing(work: Workplace) -> Sequence[str]:
        (work.folder / "bare").mkdir()
        work.config.put("model.model_name_or_path", '"bare"')
        return ("bare",)

    def no_config(work: Workplace) -> Sequence[str]:
        (work.model / "config.json").unlink()
        return ("config.json",)

    def config_is_a_folder(work: Workplace) -> Sequence[str]:
        (work.model / "config.json").unlink()
        (work.model / "config.json").mkdir()
        return ("config.json",)

    def snapshots(work: Workplace) -> Sequence[str]:
        shutil.copytree(work.base_model, work.folder / "cache/snapshots/abc")
        work.config.put("model.model_name_or_path", '"cache"')
        return "cache/config.json", "cache/snapshots/abc"

    spoils = {
        "missing": missing, "a hub name": hub_name, "a file": a_file, "empty": nothing, "no config.json": no_config,
        "config.json is a folder": config_is_a_folder, "one level too high": snapshots,
        "pickle files only": renamed("pytorch_model.bin", "pickle"),
        "a GGUF file only": renamed("model.gguf", "GGUF"),
        "original weights only": renamed("consolidated.00.pth", "pickle"),
        "an odd name": renamed("weights.safetensors", "weights.safetensors"),
        "another extension": renamed("model.safetensors.part"),
    }  # fmt: skip
    for what, spoil in spoils.items():
        yield _case(what, kind, MODEL, spoil)


def cases() -> Iterator[WrongInput]:
    yield from folder_cases()
    yield from config_cases()
    yield from weight_cases()
    yield from shard_cases()
