"""`config explain`: the text for each key, the names that find a key, and the generated page ``docs/config.md``."""

from __future__ import annotations

from pathlib import Path

import pytest

from megatrain.base.other_tools import TRANSLATIONS
from megatrain.config import ConfigError
from megatrain.config.keys import KEYS, alters
from megatrain.config.reference import describe_key, find_keys, to_markdown


@pytest.mark.parametrize("key", sorted(KEYS))
def test_every_key_is_described(key: str) -> None:
    found = describe_key(key)
    assert found.meaning and found.values and found.default
    assert found.alters == alters(key)
    assert find_keys(key) == ([key], "")


def test_description_of_max_length_is_complete() -> None:
    found = describe_key("data.max_length")
    assert (found.values, found.default, found.alters) == ("whole number at least 2", "1024", "yes")
    names = {(tool, name) for tool, name, _ in found.other_names}
    assert {("LLaMA-Factory", "cutoff_len"), ("Axolotl", "sequence_len"), ("MegaTrain", "max_seq_len")} <= names
    assert found.example == ("[data]", "max_length = 1024")
    assert found.to_json()["schema"]["minimum"] == 2


@pytest.mark.parametrize(
    ("key", "default", "example"),
    [
        ("task", "required", ()),
        ("tiers.nvme.path", "required", ("[[tiers.nvme]]", 'path = "state"')),
        ("run_name", "see above", ()),
        ("training.train_batch_tokens", "not set", ()),
        ("tiers.ram.size", '"auto"', ("[tiers.ram]", 'size = "110GiB"')),
        ("tiers.nvme.rate", "see above", ("[[tiers.nvme]]", 'rate = "2.0GB/s"')),
        ("checkpoint.min_free_disk", '"1GiB"', ("[checkpoint]", 'min_free_disk = "1GiB"')),
    ],
)
def test_defaults_and_examples(key: str, default: str, example: tuple[str, ...]) -> None:
    found = describe_key(key)
    assert (found.default, found.example) == (default, example)


@pytest.mark.parametrize(
    ("key", "what"),
    [
        ("optimizer.learning_rate", "yes"),
        ("data.train.path", "by contents"),
        ("model.model_name_or_path", "by contents"),
        ("data.cache_dir", "no"),
        ("tiers.ram.size", "no"),
        ("output_dir", "no"),
    ],
)
def test_result_altering_keys(key: str, what: str) -> None:
    assert alters(key) == what


@pytest.mark.parametrize(
    ("name", "keys"),
    [
        ("max_length", ["data.max_length"]),
        ("data.train.0.path", ["data.train.path"]),
        ("data.train.0.columns.prompt", ["data.train.columns"]),
        ("warmup_ratio", ["optimizer.warmup_steps"]),
        ("cutoff_len", ["data.max_length"]),
        ("[tiers.ram]", ["tiers.ram.size", "tiers.ram.pinned"]),
    ],
)
def test_find_keys_accepts_names_paths_and_tables(name: str, keys: list[str]) -> None:
    assert find_keys(name)[0] == keys


@pytest.mark.parametrize(
    ("name", "keys", "note"),
    [
        ("wandb", ["logging.report_to"], '`wandb` is a value: write report_to = ["jsonl", "wandb"] in [logging]'),
        (
            "use_wandb",
            ["logging.report_to"],
            'That is Axolotl\'s name; here: logging.report_to (write report_to = ["jsonl", "wandb"])',
        ),
        (
            "warmup_ratio",
            ["optimizer.warmup_steps"],
            "`warmup_ratio` is the name in transformers 4; here: optimizer.warmup_steps",
        ),
        ("size", ["tiers.gpu.size", "tiers.nvme.size", "tiers.ram.size"], ""),
        ("max_samples", ["data.train.max_samples"], ""),
        (
            "bnb_4bit_quant_type",
            ["model.model_name_or_path", "lora.r"],
            "`bnb_4bit_quant_type`: QLoRA is [lora] with a folder that is already quantized: name one of bitsandbytes' "
            "nf4, int4, fp8 or mxfp4 in model_name_or_path, and write [lora]. Nothing else is needed",
        ),
    ],
)
def test_a_note_explains_names_that_are_no_keys(name: str, keys: list[str], note: str) -> None:
    assert find_keys(name) == (keys, note)


def test_shared_leaf_name_finds_all_its_keys() -> None:
    assert {"tiers.gpu.size", "tiers.nvme.size", "tiers.ram.size"} <= set(find_keys("size")[0])


def test_every_name_of_other_tools_is_found() -> None:
    for name, translation in TRANSLATIONS.items():
        if translation.config_key:
            keys, note = find_keys(name)
            assert keys
            assert note or name in {key.rpartition(".")[2] for key in keys}


def test_unknown_key_suggests_the_closest_one() -> None:
    with pytest.raises(ConfigError, match=r"Did you mean optimizer\.learning_rate"):
        find_keys("learning_rat")
    with pytest.raises(ConfigError, match="no key `qqq`"):
        find_keys("qqq")


def test_reference_is_up_to_date() -> None:
    text = (Path(__file__).parents[3] / "docs/config.md").read_text(encoding="utf-8")
    assert text == to_markdown() + "\n", "run: python -m megatrain.config.reference > docs/config.md"


def test_reference_has_every_key() -> None:
    text = to_markdown()
    for key in KEYS:
        assert f"| `{key.rsplit('.', 1)[-1]}` |" in text, key
