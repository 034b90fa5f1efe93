"""Generation from tiers: the same tokens as transformers' ``generate``, the planned traffic, and clear errors."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet
import pytest
import torch
from click.testing import CliRunner
from transformers import AutoModelForCausalLM, AutoTokenizer

from megatrain.base.errors import ConfigError, UnsupportedModelError
from megatrain.converters.spec import build_graph
from megatrain.engine.generate import GenerationRunner
from megatrain.extras.generation import Generator, config_of_folder, generate
from megatrain.tasks.prompts import GenerationSettings, PromptError
from megatrain.trace.trace import trace_generation
from oracles.families import FAMILIES, tiny_config
from oracles.huggingface import build_model
from processes.saved_run import command_group

PROMPTS = ["Call me", "Some years ago, never mind how long", "The sea", "Who", "There now is your insular city"]
NUM_NEW = 6


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def tables(ram: str, drive: Path | None = None, **more: Any) -> dict[str, Any]:
    """Return config tables for two prompts per micro-batch and four prompts per pass."""
    nvme = [] if drive is None else [{"path": drive, "size": "64MiB"}]
    placement = {} if drive is None else {"placement": {"activations": ["nvme"], "weights": ["folder"]}}
    return {
        "device": "cpu",
        "precision": {"compute_dtype": "float32"},
        "training": {"per_device_train_batch_size": 2, "gradient_accumulation_steps": 2},
        "tiers": {"ram": {"size": ram}, "nvme": nvme, **more.pop("tiers", {})},
        **placement,
        **more,
    }


def plain(folder: Path, prompts: list[str], temperature: float, seed: int) -> list[list[int]]:
    """Return the new tokens that transformers generates for each prompt, two prompts at a time."""
    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    if tokenizer.pad_token_id is None:
        tokenizer.pad_token = tokenizer.eos_token
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    options: dict[str, Any] = (
        {"do_sample": False} if not temperature else {"do_sample": True, "temperature": temperature}
    )
    found: list[list[int]] = []
    for number, first in enumerate(range(0, len(prompts), 2)):
        batch = tokenizer(prompts[first : first + 2], return_tensors="pt", padding=True)
        torch.manual_seed(seed + number)
        out = model.generate(**batch, max_new_tokens=NUM_NEW, pad_token_id=tokenizer.pad_token_id, **options)
        found += out[:, batch["input_ids"].shape[1] :].tolist()
    return found


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_tokens_match_transformers_for_any_cache_placement(
    tiny_model: Path, tmp_path: Path, temperature: float
) -> None:
    expected = plain(tiny_model, PROMPTS, temperature, 7)
    places = {
        "ram": tables("64MiB"),
        "drive": tables("4MiB", tmp_path / "drive"),
        "gpu": tables("16MiB", tiers={"gpu": {"size": "4MiB"}}, advanced={"emulate_gpu": True}),
    }
    for name, values in places.items():
        config = config_of_folder(tiny_model, **values)
        generator = Generator(config, PROMPTS, GenerationSettings(NUM_NEW, temperature, 7))
        found = [list(each.token_ids) for each in generator.run()]
        assert all(ids == row[: len(ids)] and ids for ids, row in zip(found, expected, strict=True)), name
        homes = generator.plan.plan.placement.homes
        places_of_cache = {home for key, home in homes.items() if key.startswith("cache/")}
        assert (places_of_cache == {"nvme"}) == (name == "drive")
        ended_early = any(len(ids) < NUM_NEW for ids in found)
        assert ended_early or generator.moved_bytes == generator.planned_bytes, name
        assert name != "drive" or generator.moved_bytes


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family_generates_like_transformers(family: str) -> None:
    """Blocks can hold every kind of cache. A model is refused only if transformers cannot generate with its cache."""
    config = tiny_config(family)
    config.get_text_config(decoder=True).attention_dropout = 0.5  # off in eval mode
    model = build_model(config).eval()
    graph = build_graph(config, dtype=torch.float32, is_trained=False)
    try:
        trace, nbytes = trace_generation(graph, 2, 16)
    except UnsupportedModelError:
        with pytest.raises(Exception):  # noqa: B017
            model.generate(torch.ones(1, 4, dtype=torch.long), max_new_tokens=2, do_sample=False, use_cache=True)
        return
    access = InMemory(dict(model.named_parameters(remove_duplicate=False)), nbytes)
    runner = GenerationRunner(graph, access, device=torch.device("cpu"), trace=trace)
    from transformers import DynamicCache

    generator = torch.Generator().manual_seed(4)
    batches = [torch.randint(3, 90, (2, 10), generator=generator) for _ in range(2)]
    caches = [DynamicCache(config=graph.config.get_text_config(decoder=True)) for _ in batches]
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}

    def continuing(number: int) -> Callable[[], Any]:
        mask = torch.ones_like(batches[number])
        return lambda: graph.model.generate(
            batches[number], attention_mask=mask, past_key_values=caches[number], **options
        )

    found = runner.run([continuing(0), continuing(1)], caches, [0, 1])
    for batch, tokens in zip(batches, found, strict=True):
        assert torch.equal(model.generate(batch, attention_mask=torch.ones_like(batch), **options), tokens)
    assert 0 < max(access.largest.values()) <= max(nbytes.values())


class InMemory:
    """Block access with weights and cache buffers in memory."""

    def __init__(self, weights: dict[str, torch.Tensor], nbytes: dict[int, int]) -> None:
        self._weights, self._nbytes = weights, nbytes
        self._rooms: dict[tuple[int, int], torch.Tensor] = {}
        self.largest: dict[int, int] = {}

    def begin(self, phase: Any, visit: int) -> None:
        pass

    def weights(self, unit: Any, visit: int) -> Any:
        from contextlib import nullcontext

        return nullcontext({owner: self._weights[owner].detach() for _, owner, _ in unit.params})

    def cache_block(self, visit: int, micro_batch: int) -> Any:
        from contextlib import nullcontext

        if visit not in self._nbytes:
            return nullcontext(None)
        self.largest[visit] = self._nbytes[visit]
        room = self._rooms.setdefault((visit, micro_batch), torch.empty(self._nbytes[visit], dtype=torch.uint8))
        return nullcontext(room)


def test_generation_estimate_counts_one_token_per_prompt(tiny_model: Path) -> None:
    generator = Generator(config_of_folder(tiny_model, **tables("64MiB")), PROMPTS, GenerationSettings(5))
    estimate = generator.plan.plan.estimate
    assert estimate is not None and not estimate.occasions
    assert estimate.tokens_per_step == generator.plan.plan.run.batch.num_rows


def test_invalid_generation_input_raises(tiny_model: Path) -> None:
    with pytest.raises(PromptError, match="prompt 2: this prompt has no tokens"):
        generate(tiny_model, ["a", ""])
    with pytest.raises(ConfigError, match="generate RUN"):
        Generator(config_of_folder(tiny_model, lora={"r": 4}), ["a"], GenerationSettings())


def test_command(tiny_model: Path, tmp_path: Path) -> None:
    runner = CliRunner()
    rows = tmp_path / "prompts.jsonl"
    rows.write_text("".join(json.dumps({"prompt": prompt}) + "\n" for prompt in PROMPTS))
    words = [
        "generate",
        str(tiny_model),
        "--max-new-tokens",
        str(NUM_NEW),
        "--temperature",
        "0",
        "--micro-batch-size",
        "2",
    ]
    words += ["--set", "device=cpu", "--set", "tiers.ram.size=8MiB", "--set", "precision.compute_dtype=float32"]
    done = runner.invoke(command_group(), [*words, "--prompts", str(rows), "-o", str(tmp_path / "said.parquet")])
    assert done.exit_code == 0, done.output
    said = pyarrow.parquet.read_table(tmp_path / "said.parquet").to_pylist()
    assert [row["prompt"] for row in said] == PROMPTS
    expected = plain(tiny_model, PROMPTS, 0.0, 0)
    assert all(row["token_ids"] == tokens[: len(row["token_ids"])] for row, tokens in zip(said, expected, strict=True))
    rows.write_text('{"text": "no prompt"}\n')
    wrong = runner.invoke(command_group(), [*words, "--prompts", str(rows)])
    assert wrong.exit_code == 4 and 'line 1: the row has no text under "prompt"' in wrong.output
    nothing = runner.invoke(command_group(), words)
    assert nothing.exit_code == 2 and "there are no prompts" in nothing.output
    assert runner.invoke(command_group(), [*words, "-p", "a", "-o", "said.csv"]).exit_code == 2


def test_generation_ignores_packing_and_batch_tokens(tiny_model: Path, tmp_path: Path) -> None:
    """In a training config, packing and a batch size in tokens have no effect on generation."""
    config = tmp_path / "run.toml"
    config.write_text(
        f'task = "sft"\noutput_dir = "out"\ndevice = "cpu"\n[model]\nmodel_name_or_path = "{tiny_model}"\n'
        '[data]\npacking = true\n[[data.train]]\npath = "x.jsonl"\n[training]\ntrain_batch_tokens = 4096\n'
        '[precision]\ncompute_dtype = "float32"\n'
    )
    words = ["generate", str(config), "--max-new-tokens", str(NUM_NEW), "--temperature", "0", "-p", PROMPTS[0]]
    done = CliRunner().invoke(command_group(), words)
    assert done.exit_code == 0, done.output
    (expected,) = plain(tiny_model, PROMPTS[:1], 0.0, 0)
    tokens = json.loads(done.stdout.splitlines()[0])["token_ids"]
    assert tokens == expected[: len(tokens)]
    refused = CliRunner().invoke(command_group(), [*words, "--set", "train_batch_tokens=8192"])
    assert refused.exit_code == 2 and "use --batch-size and --micro-batch-size" in refused.output
