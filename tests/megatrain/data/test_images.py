"""Rows with images: every way to name an image gives the same tokens and pixels, and unusable rows get a message."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from megatrain.data import images as images_module
from megatrain.data.dataset import DataSpec, load_dataset
from megatrain.data.encoding import load_tokenizer
from megatrain.data.packing import BatchShape
from megatrain.data.preview import preview_rows
from megatrain.data.rows_report import DataError, RowError
from megatrain.data.token_dataset import TokenDataset
from oracles.image_models import chat, image_data, make_folder, png
from oracles.rows_in_memory import loader_of

PNG = png(40, 60, 1)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    pytest.importorskip("PIL")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield make_folder("qwen2_5_vl", tmp_path_factory.mktemp("model"))
    torch.set_num_threads(before)


def spec(path: Path, model: Path, **changes: Any) -> DataSpec:
    return image_data(path, model, 128, **{"overlong": "truncate", "max_dropped": 1.0, **changes})


def write(folder: Path, *rows: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "a.png").write_bytes(PNG)
    path = folder / "rows.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def batch_of(data: DataSpec, model: Path) -> dict[str, torch.Tensor]:
    tokenizer = load_tokenizer(str(model))
    shape = BatchShape(1, 1, data.table.max_length, packing=False)
    loader = loader_of(
        load_dataset(data, tokenizer), shape, data_seed=1, image_processor=data.image_processor(tokenizer)
    )
    return next(loader).micro_batches[0]


WAYS: dict[str, dict[str, Any]] = {
    "image_url": {"messages": chat("look: ", {"type": "image_url", "image_url": {"url": "a.png"}}, "what?")},
    "data url": {
        "messages": chat(
            "look: ",
            {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{base64.b64encode(PNG).decode()}"}},
            "what?",
        )
    },
    "path": {"messages": chat("look: ", {"type": "image", "path": "a.png"}, "what?")},
    "column, parts": {"messages": chat("look: ", {"type": "image"}, "what?"), "images": ["a.png"]},
    "column, placeholder": {
        "messages": [
            {"role": "user", "content": "look: <image>what?"},
            {"role": "assistant", "content": "a whale"},
        ],
        "images": ["a.png"],
    },
    "sharegpt": {
        "conversations": [{"from": "human", "value": "look: <image>what?"}, {"from": "gpt", "value": "a whale"}],
        "images": ["a.png"],
    },
    "alpaca": {"instruction": "look: <image>what?", "output": "a whale", "images": ["a.png"]},
}


def test_every_way_to_name_an_image_gives_the_same_batch(model: Path, tmp_path: Path) -> None:
    found = {
        name: batch_of(spec(write(tmp_path / str(n), row), model), model) for n, (name, row) in enumerate(WAYS.items())
    }
    first = found["image_url"]
    for name, batch in found.items():
        assert batch.keys() == first.keys(), name
        assert all(torch.equal(batch[key], first[key]) for key in first), name
    # The output of Hugging Face's processor for the same conversation.
    tokenizer = load_tokenizer(str(model))
    processor = images_module._open_processor(str(model), tokenizer)
    from PIL import Image

    conversation = chat("look: ", {"type": "image", "image": Image.open(tmp_path / "0/a.png")}, "what?")
    conversation[1]["content"] = [{"type": "text", "text": "a whale"}]
    expected = processor.apply_chat_template(
        conversation,
        tokenize=True,
        return_dict=True,
        return_tensors="pt",
        processor_kwargs={"add_special_tokens": False},
    )
    for key in ("input_ids", "attention_mask", "pixel_values", "image_grid_thw", "mm_token_type_ids"):
        assert torch.equal(first[key], expected[key]), key
    image = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    assert (first["input_ids"] == image).any() and not (first["labels"] == image).any()
    trained = first["labels"][first["labels"] != -100]
    assert tokenizer.decode(trained).strip() == "a whale<|im_end|>"


def test_file_url_may_contain_escaped_characters(model: Path, tmp_path: Path) -> None:
    folder = tmp_path / "Moby Dick, 100% \u00e4"
    plain = batch_of(spec(write(folder, WAYS["image_url"]), model), model)
    address = (folder / "a.png").as_uri()
    assert "%20" in address and "%25" in address
    row = {"messages": chat("look: ", {"type": "image_url", "image_url": {"url": address}}, "what?")}
    batch = batch_of(spec(write(tmp_path / "elsewhere", row), model), model)
    assert all(torch.equal(batch[key], plain[key]) for key in plain)


def test_parquet_images_in_datasets_format_are_read(model: Path, tmp_path: Path) -> None:
    pyarrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    path = tmp_path / "rows.parquet"
    row = {**WAYS["column, placeholder"], "images": [{"bytes": PNG, "path": None}]}
    parquet.write_table(pyarrow.Table.from_pylist([row]), path)
    batch = batch_of(spec(path, model), model)
    other = batch_of(spec(write(tmp_path / "other", WAYS["image_url"]), model), model)
    assert all(torch.equal(batch[key], other[key]) for key in other)


def test_images_are_never_trained_and_never_cut(model: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "rows", WAYS["image_url"], {"messages": chat("what?")})
    tokenizer = load_tokenizer(str(model))
    whole = load_dataset(spec(path, model, train_on="all"), tokenizer)
    image = tokenizer.convert_tokens_to_ids("<|image_pad|>")
    places = [at for at, token in enumerate(whole.tokens[: whole.starts[1]]) if token == image]
    assert places and not whole.trained[places].any() and whole.trained[: whole.starts[1]].any()
    # A row that is cut within the image is dropped with the reason. A row that is cut after the image keeps it.
    cut = load_dataset(spec(path, model, train_on="all", max_length=places[-1], bad_rows="drop"), tokenizer)
    assert len(cut) == 1 and not cut.document_images(0)
    assert "1 row dropped: data.max_length would truncate it within an image" in str(cut.report)
    with pytest.raises(RowError, match="would truncate it within an image"):
        load_dataset(spec(path, model, train_on="all", max_length=places[-1]), tokenizer)
    kept = load_dataset(spec(path, model, train_on="all", max_length=places[-1] + 2), tokenizer)
    assert len(kept.document_images(0)) == 1 and not kept.document_images(1)


def test_changed_image_in_the_cache_is_reported(model: Path, tmp_path: Path) -> None:
    data = spec(write(tmp_path / "rows", WAYS["image_url"]), model, cache_dir=str(tmp_path / "cache"))
    tokenizer = load_tokenizer(str(model))

    def again() -> TokenDataset:
        return load_dataset(data, tokenizer)

    first, second = again(), again()
    assert first.fingerprint() == second.fingerprint()
    assert first.document_images(0) == second.document_images(0) and len(second.document_images(0)) == 1
    batch = batch_of(data, model)
    (tmp_path / "rows/a.png").write_bytes(png(40, 60, 2))
    with pytest.raises(DataError, match=r"a\.png: the image has changed since the data was tokenized"):
        batch_of(data, model)
    assert not torch.equal(batch_of(data.with_keys(cache_dir="none"), model)["pixel_values"], batch["pixel_values"])


def test_preview_shows_image_placeholders_as_untrained(model: Path, tmp_path: Path) -> None:
    path = write(tmp_path / "rows", WAYS["image_url"])
    (preview,) = preview_rows(spec(path, model), load_tokenizer(str(model)), 1)
    assert "<|vision_start|><|image_pad|>" in preview.segments[0].text and not preview.segments[0].is_trained
    assert [segment.text.strip() for segment in preview.segments if segment.is_trained] == ["a whale<|im_end|>"]


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "missing": ({"messages": chat({"type": "image", "path": "b.png"})}, r"b\.png cannot be read: No such file"),
    "unreadable": ({"messages": chat({"type": "image", "path": "rows.jsonl"})}, "the image cannot be decoded"),
    "too few": (
        {"messages": chat({"type": "image"}, {"type": "image"}), "images": ["a.png"]},
        "1 images but 2 placeholders",
    ),
    "no place": ({"messages": chat("what?"), "images": ["a.png"]}, "1 images but 0 placeholders"),
    "token in text": ({"messages": chat("a <|image_pad|>")}, r"has 1 placeholders for images .* but 0 images"),
    "url": (
        {"messages": chat({"type": "image_url", "image_url": {"url": "https://x/y.png"}})},
        "images are not fetched",
    ),
    "base64": ({"messages": chat({"type": "image", "url": "data:image/png;base64,??"})}, "not valid base64"),
    "number": ({"messages": chat({"type": "image", "image": 7})}, "must be a path or its bytes"),
}


@pytest.mark.parametrize("name", BAD)
def test_wrong_image_errors_name_the_row(name: str, model: Path, tmp_path: Path) -> None:
    row, expected = BAD[name]
    path = write(tmp_path / "rows", row)
    with pytest.raises(RowError, match=expected) as caught:
        load_dataset(spec(path, model), load_tokenizer(str(model)))
    assert str(path) in str(caught.value)


def test_image_rows_in_a_text_run_are_reported(model: Path, tmp_path: Path) -> None:
    data = spec(write(tmp_path / "rows", WAYS["image_url"]), model, images_folder=None)
    with pytest.raises(
        RowError, match=r'the run does not read images\. Use an image-text model and set model\.images = "frozen"'
    ):
        load_dataset(data, load_tokenizer(str(model)))
    with pytest.raises(DataError, match="no token would be trained") as caught:
        load_dataset(data.with_keys(bad_rows="drop"), load_tokenizer(str(model)))
    assert 'model.images = "off"' in str(caught.value)


def test_missing_processor_and_missing_pillow_are_reported(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = Path(__file__).parents[3] / "examples/quickstart/model"
    path = write(tmp_path / "rows", WAYS["image_url"])
    with pytest.raises(DataError, match=r"its image processor|no image processor"):
        load_dataset(spec(path, text), load_tokenizer(str(text)))
    monkeypatch.setitem(__import__("sys").modules, "PIL", None)
    with pytest.raises(DataError, match=r"images need Pillow, which is not installed\. Install it: pip install"):
        load_dataset(spec(path, model), load_tokenizer(str(model)))


def test_processor_for_torchvision_falls_back_to_pillow(tmp_path: Path) -> None:
    """The image processor of this model needs torchvision. It is replaced by the image processor for Pillow."""
    folder = make_folder("mistral3", tmp_path)
    example = images_module.ImageProcessor(str(folder), load_tokenizer(str(folder)), 96).make_example(2)
    assert example["pixel_values"].isfinite().all() and len(example["image_sizes"]) % 2 == 0
    assert (example["input_ids"][0] == load_tokenizer(str(folder)).convert_tokens_to_ids("[IMG]")).any()
