"""Expected results of each run, computed with transformers and peft, one row of data at a time."""

from __future__ import annotations

import json
import math
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from PIL import Image
from torch import Tensor
from torch.nn import functional
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForSequenceClassification,
    AutoTokenizer,
)

# Opens transformers' processor without its video part, which would need torchvision.
from megatrain.data.images import _open_processor as open_processor
from pairs.configs import ROWS_PER_STEP
from pairs.factors import PREFERENCES, Row
from pairs.places import LENGTH, Place

IMAGE_TEXT = ("qwen2_5_vl",)


@dataclass(frozen=True)
class Document:
    """Model inputs of one sequence.

    Attributes:
        inputs: Model inputs by name, [1, T].
        trained: Whether the model trains on each token, [T].
    """

    inputs: dict[str, Tensor]
    trained: Tensor

    @property
    def num_tokens(self) -> int:
        return len(self.trained)

    @property
    def num_trained(self) -> int:
        """Number of trained tokens that have a preceding token."""
        return int(self.trained[1:].sum())


@dataclass(frozen=True)
class Expected:
    """Expected token counts of one epoch, and the initial model's loss and metrics.

    Attributes:
        num_tokens: Number of tokens without padding.
        num_trained: Number of trained tokens. For rewards, the number of pairs.
        loss: Mean loss of the epoch, or None if it depends on how texts are divided into rows.
        figures: Preference metrics by name.
    """

    num_tokens: int
    num_trained: int
    loss: float | None
    figures: dict[str, float]


def open_model(row: Row, place: Place, exported: Path | None = None) -> Any:
    """Return the initial model of a run, or the exported model, in the compute dtype."""
    kind = AutoModelForImageTextToText if row["model"] in IMAGE_TEXT else AutoModelForCausalLM
    if row["task"] == "reward":
        kind = AutoModelForSequenceClassification
    dtype = torch.float32 if row["precision"] == "fp32" else torch.bfloat16
    base = place.meant(row["model"], row["base"], row["task"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        if exported is None or row["adapters"] == "full":
            model = kind.from_pretrained(exported or base, dtype=dtype)
        else:
            model = PeftModel.from_pretrained(kind.from_pretrained(base, dtype=dtype), exported).to(dtype)
    return model.eval()


def documents_of(row: Row, place: Place, file: Path) -> list[list[Document]]:
    """Return the documents of each row in a file: one, or two (chosen and rejected) for preferences and rewards."""
    model = place.model(row["model"], "plain")
    tokenizer = AutoTokenizer.from_pretrained(model)
    lines = [json.loads(line) for line in file.read_text().splitlines()]
    if row["task"] == "pretrain":
        return [[_text(each["text"], tokenizer)] for each in lines]
    if row["task"] == "reward":
        kinds = ("chosen", "rejected")
        return [[_text(each["prompt"] + each[kind], tokenizer) for kind in kinds] for each in lines]
    if row["task"] in PREFERENCES:
        return [[_answer(each["prompt"], each[kind], tokenizer) for kind in ("chosen", "rejected")] for each in lines]
    if row["images"] != "text":
        encode = _image_encoder(open_processor(str(model), tokenizer), file.parent)
    else:
        encode = _chat_encoder(tokenizer)
    return [[_chat(each["messages"], encode)] for each in lines]


def _document(ids: Sequence[int], trained: Tensor) -> Document:
    return Document({"input_ids": torch.tensor([list(ids)])}, trained)


def _text(text: str, tokenizer: Any) -> Document:
    ids = [*tokenizer(text, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    return _document(ids, torch.ones(len(ids), dtype=torch.bool))


def _answer(prompt: str, answer: str, tokenizer: Any) -> Document:
    before = tokenizer(prompt, add_special_tokens=False)["input_ids"]
    ids = [*before, *tokenizer(answer, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
    return _document(ids, torch.arange(len(ids)) >= len(before))


Encode = Callable[[list[dict[str, Any]], bool], dict[str, Tensor]]


def _chat_encoder(tokenizer: Any) -> Encode:
    def encode(messages: list[dict[str, Any]], asks: bool) -> dict[str, Tensor]:
        text = tokenizer.apply_chat_template(messages, tokenize=False, add_generation_prompt=asks)
        return {"input_ids": tokenizer(text, add_special_tokens=False, return_tensors="pt")["input_ids"]}

    return encode


def _image_encoder(processor: Any, folder: Path) -> Encode:
    def encode(messages: list[dict[str, Any]], asks: bool) -> dict[str, Tensor]:
        images, shown = [], []
        for message in messages:
            parts = message["content"]
            if not isinstance(parts, str):
                images += [Image.open(folder / each["image_url"]["url"]) for each in parts if "image_url" in each]
                parts = [{"type": "image"} if "image_url" in each else each for each in parts]
            shown.append({**message, "content": parts})
        text = processor.apply_chat_template(shown, tokenize=False, add_generation_prompt=asks)
        made = processor(text=[text], images=images or None, return_tensors="pt", add_special_tokens=False)
        return {name: value for name, value in made.items() if name != "attention_mask"}

    return encode


def _chat(messages: list[dict[str, Any]], encode: Encode) -> Document:
    """Return a conversation that trains on each answer and its end-of-turn token, but not on the newline after it."""
    inputs = encode(messages, False)
    trained = torch.zeros(inputs["input_ids"].shape[1], dtype=torch.bool)
    for number, message in enumerate(messages):
        if message["role"] == "assistant":
            start = encode(messages[:number], True)["input_ids"].shape[1]
            trained[start : encode(messages[: number + 1], False)["input_ids"].shape[1] - 1] = True
    return Document(inputs, trained)


@torch.no_grad()
def _trained_logits(model: Any, document: Document) -> tuple[Tensor, Tensor]:
    """Return the fp64 logits for the trained tokens, [N, V], and the ids of these tokens, [N]."""
    logits = model(**document.inputs, use_cache=False).logits[0, :-1].double()
    wanted = document.trained[1:]
    return logits[wanted], document.inputs["input_ids"][0, 1:][wanted]


def negative_log_likelihoods(model: Any, documents: Sequence[Document]) -> list[float]:
    """Return the negative log-likelihood of each document, summed over its trained tokens."""
    found = (_trained_logits(model, each) for each in documents)
    return [float(functional.cross_entropy(logits, labels, reduction="sum")) for logits, labels in found]


def expected_epoch(row: Row, place: Place) -> Expected:
    """Return the expected token counts of one epoch, and the initial model's loss and metrics."""
    train, _ = place.data(row["task"], images=row["images"] != "text")
    of_rows = documents_of(row, place, train)
    documents = [each for of_row in of_rows for each in of_row]
    if row["reading"] == "streamed" and row["packing"] == "rows":
        # The first window has two steps of 8 rows: all rows of the file, and the first rows again.
        documents = (2 * documents)[: 2 * ROWS_PER_STEP]
    num_rows = 2 if row["task"] == "kto" else 1  # each kto answer also appears after the prompt of another row
    num_tokens = num_rows * sum(each.num_tokens for each in documents)
    num_trained = num_rows * sum(each.num_trained for each in documents)
    if row["packing"] == "concat":  # texts are concatenated, and all rows but the last are full
        return Expected(num_tokens, num_tokens - math.ceil(num_tokens / LENGTH), None, {})
    model = open_model(row, place)
    if row["task"] == "reward":
        chosen, rejected = rewards(model, of_rows)
        return Expected(num_tokens, len(of_rows), float(-functional.logsigmoid(chosen - rejected).mean()), {})
    if row["task"] == "distill":
        return Expected(num_tokens, num_trained, _distilled(row, place, model, documents) / num_trained, {})
    nll = negative_log_likelihoods(model, documents)
    if row["task"] not in PREFERENCES:
        return Expected(num_tokens, num_trained, sum(nll) / num_trained, {})
    if row["task"] == "kto":
        return Expected(num_tokens, num_trained, 0.5, {})  # before the first update, the loss is 1 - sigmoid(0)
    chosen, rejected = (documents[side::2] for side in (0, 1))
    logps = {"logps/chosen": [-each for each in nll[::2]], "logps/rejected": [-each for each in nll[1::2]]}
    if row["task"] == "dpo":
        return Expected(num_tokens, num_trained, math.log(2), {name: _mean(each) for name, each in logps.items()})
    means = [
        [logp / document.num_trained for logp, document in zip(logps[name], side, strict=True)]
        for name, side in (("logps/chosen", chosen), ("logps/rejected", rejected))
    ]
    odds = [
        one - other - (math.log1p(-math.exp(one)) - math.log1p(-math.exp(other)))
        for one, other in zip(*means, strict=True)
    ]
    likelihood = sum(nll[::2]) / sum(each.num_trained for each in chosen)
    loss = likelihood + 0.1 * _mean([math.log1p(math.exp(-each)) for each in odds])
    return Expected(num_tokens, num_trained, loss, {"logps/chosen": _mean(means[0]), "logps/rejected": _mean(means[1])})


@torch.no_grad()
def rewards(model: Any, pairs: Sequence[Sequence[Document]]) -> tuple[Tensor, Tensor]:
    """Return the fp64 rewards of the chosen and rejected texts."""
    found = [[model(**each.inputs, use_cache=False).logits[0, 0].double() for each in pair] for pair in pairs]
    chosen, rejected = (torch.stack(side) for side in zip(*found, strict=True))
    return chosen, rejected


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _distilled(row: Row, place: Place, model: Any, documents: Sequence[Document]) -> float:
    """Return the sum over tokens of ``0.25 * cross_entropy + 0.75 * 4 * kl_divergence``.

    The temperature is 2. The divergence covers the teacher's 8 likeliest tokens, and all other tokens as one outcome.
    """
    teacher = AutoModelForCausalLM.from_pretrained(place.teacher(row["model"]), dtype=torch.float32).eval()
    return sum(_divergence(*pair) for pair in _logits_of_model_and_teacher(model, teacher, documents))


def _logits_of_model_and_teacher(
    model: Any, teacher: Any, documents: Sequence[Document]
) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
    for each in documents:
        logits, labels = _trained_logits(model, each)
        yield logits, labels, _trained_logits(teacher, each)[0]


def _divergence(logits: Tensor, labels: Tensor, teacher: Tensor) -> float:
    top = (teacher / 2).log_softmax(-1).topk(8)
    log_p, log_q = top.values, (logits / 2).log_softmax(-1).gather(-1, top.indices)
    log_p, log_q = (torch.cat([each, torch.log1p(-each.exp().sum(-1, keepdim=True))], -1) for each in (log_p, log_q))
    soft = (log_p.exp() * (log_p - log_q)).sum()
    hard = functional.cross_entropy(logits, labels, reduction="sum")
    return float(0.25 * hard + 0.75 * 4 * soft)
