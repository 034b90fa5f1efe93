"""Packed documents train like rows with one document: the same loss per document, and the same steps."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from megatrain.base.batch_keys import IGNORED_LABEL
from megatrain.config import load_config
from megatrain.data.dataset import load_dataset
from megatrain.data.encoding import load_tokenizer
from megatrain.data.packing import BatchShape
from megatrain.data.token_dataset import TokenDataset
from megatrain.training.resolve import resolve_data
from oracles.rows_in_memory import loader_of
from oracles.tiered_run import EXAMPLES, config_text, run_config

#: Number of words in each document's prompt, which is also the number in its completion.
LENGTHS = (3, 40, 11, 25, 8, 60, 17, 5, 33, 21, 2, 14)
MAX_LENGTH = 128


@pytest.fixture
def rows(tmp_path: Path) -> Path:
    words = (EXAMPLES / "quickstart" / "loomings.txt").read_text().split()
    path = tmp_path / "rows.jsonl"
    at = 0
    with path.open("w") as file:
        for length in LENGTHS:
            prompt, completion = " ".join(words[at : at + length]), " " + " ".join(words[at + length : at + 2 * length])
            file.write(json.dumps({"prompt": prompt, "completion": completion}) + "\n")
            at += 2 * length
    return path


def config_of(folder: Path, model: Path, rows: Path, *, packing: bool) -> str:
    """Return a config whose first step uses all data: 12 rows, or a few packed rows and empty rows."""
    text = config_text(folder, model, data=f"packing = {str(packing).lower()}").replace("pretrain", "sft")
    text = text.replace(str(EXAMPLES / "quickstart" / "loomings.txt"), str(rows))
    text = text.replace("max_length = 64", f"max_length = {MAX_LENGTH}")
    return text.replace("gradient_accumulation_steps = 3", "gradient_accumulation_steps = 6")


def losses_of_documents(model: Any, dataset: TokenDataset, *, packing: bool) -> dict[tuple[int, ...], torch.Tensor]:
    """Return the losses of each document's trained tokens, by the document's token ids, from Hugging Face's forward."""
    loader = loader_of(dataset, BatchShape(3, 4, MAX_LENGTH, packing), data_seed=5)
    found = {}
    for batch in itertools.islice(loader, loader.steps_per_epoch):
        for micro in batch.micro_batches:
            labels = micro.pop("labels")
            with torch.no_grad():
                logits = model(**micro, use_cache=False).logits.float()
            for row in range(len(labels)):
                ids, wanted = micro["input_ids"][row], labels[row]
                positions = micro.get("position_ids", torch.arange(len(ids)).expand_as(labels))[row]
                begins = [*(positions == 0).nonzero().flatten().tolist(), len(ids)]
                for start, end in itertools.pairwise(begins):
                    each = torch.nn.functional.cross_entropy(
                        logits[row, start : end - 1],
                        wanted[start + 1 : end],
                        reduction="none",
                        ignore_index=IGNORED_LABEL,
                    )
                    trained = wanted[start + 1 : end] != IGNORED_LABEL
                    if trained.any():
                        last = int(trained.nonzero()[-1]) + 2  # the padding after it belongs to no document
                        found[tuple(ids[start : start + last].tolist())] = each[trained]
    return found


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
def test_packed_documents_have_the_same_loss(tiny_model: Path, rows: Path, tmp_path: Path, attention: str) -> None:
    path = tmp_path / "run.toml"
    path.write_text(config_of(tmp_path, tiny_model, rows, packing=True))
    dataset = load_dataset(resolve_data(load_config(path).config), load_tokenizer(str(tiny_model)))
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32, attn_implementation=attention).eval()
    packed, plain = (losses_of_documents(model, dataset, packing=packing) for packing in (True, False))
    assert packed.keys() == plain.keys()
    assert len(plain) == len(dataset) == len(LENGTHS)
    for document, losses in plain.items():
        torch.testing.assert_close(packed[document], losses, rtol=2e-6, atol=2e-6)


def test_packed_steps_match_unpacked_steps(tiny_model: Path, rows: Path, tmp_path: Path) -> None:
    packed, plain = (
        run_config(config_of(tmp_path / name, tiny_model, rows, packing=packing), tmp_path / name, num_steps=2)
        for name, packing in (("packed", True), ("plain", False))
    )
    assert packed.losses == pytest.approx(plain.losses, rel=2e-6)
    assert packed.grad_norms == pytest.approx(plain.grad_norms, rel=1e-4)
    for name, weight in plain.weights.items():
        assert (packed.weights[name] - weight).abs().max() <= 2e-4 * weight.abs().max(), name
