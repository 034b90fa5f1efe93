"""Wrong tokenizers (missing, damaged or too large for the model) and chat templates (missing or with errors)."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from wrong_inputs.damage_model import _case
from wrong_inputs.workplace import Spoil, Workplace, WrongInput

CODE = 4
OFFLINE = 2
#: Name -> contents of a tokenizer file.
BROKEN: dict[str, bytes] = {
    "empty": b"", "an open brace": b"{", "a list": b"[]", "null": b"null", "an empty object": b"{}",
    "not UTF-8": b'{"a": "\xff"}', "a picture": b"\x89PNG\r\n\x1a\n", "a pointer of git lfs": b"version https://git-lfs\n",
}  # fmt: skip
#: Cases that are valid after all, because a tokenizer needs no settings.
HARMLESS = frozenset({"tokenizer_config.json is an empty object"})
TEMPLATES = {
    "an open brace": "{{ messages",
    "an open loop": "{% for m in messages %}x",
    "an unknown tag": "{% frobnicate %}",
    "an unknown filter": "{{ messages | frobnicate }}",
    "an unknown function": "{{ frobnicate() }}",
    "an unknown field": "{% for m in messages %}{{ m['role']['x']['y'] }}{% endfor %}",
    "a refusal": "{{ raise_exception('never') }}",
    "a division by zero": "{{ 1 / 0 }}",
    "no messages": "hello",
    "nothing": "",
    "an import": "{% import 'os' as os %}",
    "an attack": "{{ ''.__class__.__mro__ }}{{ messages.__class__ }}",
    "an endless loop": "{% for i in range(10 ** 12) %}x{% endfor %}",
}


def _change(change: Callable[[dict[str, Any]], object], *parts: str) -> Spoil:
    """Return a function that changes the values in tokenizer.json."""

    def spoil(work: Workplace) -> Sequence[str]:
        values = json.loads((work.base_model / "tokenizer.json").read_text())
        change(values)
        work.file("model/tokenizer.json", json.dumps(values))
        return parts or ("/model", "tokenizer")

    return spoil


def tokenizer_cases() -> Iterator[WrongInput]:
    kind = "tokenizer"

    def file(name: str, content: bytes) -> Spoil:
        def spoil(work: Workplace) -> Sequence[str]:
            work.file(f"model/{name}", content)
            return "/model", "tokenizer"

        return spoil

    for name in ("tokenizer.json", "tokenizer_config.json"):
        for what, content in BROKEN.items():
            if f"{name} is {what}" not in HARMLESS:
                yield _case(f"{name} is {what}", kind, CODE, file(name, content))

    def missing(work: Workplace) -> Sequence[str]:
        (work.model / "tokenizer.json").unlink()
        return ("tokenizer.json",)

    def only_sentencepiece(work: Workplace) -> Sequence[str]:
        (work.model / "tokenizer.json").rename(work.model / "tokenizer.model")
        return ("tokenizer.json",)

    def elsewhere(path: str) -> Spoil:
        def spoil(work: Workplace) -> Sequence[str]:
            work.config.put("model.tokenizer_name_or_path", f'"{path}"')
            return (path,)

        return spoil

    def too_large(work: Workplace) -> Sequence[str]:
        work.model_config(vocab_size=64)
        from safetensors.torch import load_file, save_file

        tensors = load_file(work.base_model / "model.safetensors")
        tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"][:64].clone()
        (work.model / "model.safetensors").unlink()
        save_file(tensors, work.model / "model.safetensors", {"format": "pt"})
        return "vocab_size", "64"

    yield _case("missing", kind, CODE, missing)
    yield _case("sentencepiece only", kind, CODE, only_sentencepiece)
    yield _case("a folder that is not there", kind, CODE, elsewhere("tokens"))
    yield _case("a name of the hub", kind, OFFLINE, elsewhere("Qwen/Qwen3-0.6B"))
    yield _case("a file as its folder", kind, CODE, elsewhere("rows.jsonl"))
    yield _case("larger than the vocabulary", kind, CODE, too_large)
    yield _case("no model", kind, CODE, _change(lambda v: v.pop("model")))
    yield _case("a model of an unknown type", kind, CODE, _change(lambda v: v["model"].update(type="XYZ")))
    yield _case("no vocabulary", kind, CODE, _change(lambda v: v["model"].pop("vocab")))
    yield _case("a vocabulary of texts", kind, CODE, _change(lambda v: v["model"].update(vocab={"a": "b"})))
    yield _case("an unknown decoder", kind, CODE, _change(lambda v: v.update(decoder={"type": "XYZ"})))


def template_cases() -> Iterator[WrongInput]:
    kind = "chat template"

    def own(text: str) -> Spoil:
        def spoil(work: Workplace) -> Sequence[str]:
            work.file("model/chat_template.jinja", text)
            return ("template",)

        return spoil

    for what, text in TEMPLATES.items():
        yield _case(what, kind, CODE, own(text))

    def none(work: Workplace) -> Sequence[str]:
        (work.model / "chat_template.jinja").unlink()
        return ("chat template",)

    def named(content: bytes) -> Spoil:
        def spoil(work: Workplace) -> Sequence[str]:
            work.file("turns.jinja", content)
            work.config.put("model.chat_template", '"turns.jinja"')
            return ("template",)

        return spoil

    yield _case("none", kind, CODE, none)
    yield _case("a file that is not UTF-8", kind, CODE, named(b"{# \xff #}"))
    yield _case("a file with a mistake", kind, CODE, named(b"{% for %}"))


def cases() -> Iterator[WrongInput]:
    yield from tokenizer_cases()
    yield from template_cases()
