"""References to images survive storage, and every unusable image is explained."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import pytest
import xxhash

from megatrain.data import images as images_module
from megatrain.data.images import ImageRef, NamedImage, refs_from_bytes, refs_to_bytes
from megatrain.data.messages import RowImages
from megatrain.data.rows_report import DataError, RowError

BYTES = b"not really a picture"
CHECKSUM = xxhash.xxh3_64_hexdigest(BYTES)
TEXT = base64.b64encode(BYTES).decode()


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "a b.png").write_bytes(BYTES)
    return tmp_path


def test_every_way_to_write_an_image_gives_its_reference(folder: Path) -> None:
    path = str(folder / "a b.png")
    in_file, in_row = ImageRef(path, CHECKSUM), ImageRef("row 1", CHECKSUM, BYTES)
    values: list[tuple[Any, ImageRef]] = [
        ("a b.png", in_file),
        (path, in_file),
        (f"file://{folder}/a%20b.png", in_file),
        ({"path": "a b.png"}, in_file),
        ({"bytes": None, "path": "a b.png"}, in_file),
        ({"url": "a b.png"}, in_file),
        ({"image": {"path": "a b.png"}}, in_file),
        (BYTES, in_row),
        ({"bytes": BYTES, "path": "other.png"}, in_row),
        (f"data:image/png;base64,{TEXT}", in_row),
        ({"url": f"data:image/png;base64,{TEXT}"}, in_row),
        ({"base64": TEXT}, in_row),
    ]
    for value, expected in values:
        assert ImageRef.from_value(value, folder, "row 1") == NamedImage(value, folder, "row 1").ref() == expected
        assert expected.read() == BYTES
    assert ImageRef.from_value({"base64": "x", "path": "a b.png"}, folder, "row 1") == in_file


def test_unusable_images_are_explained(folder: Path) -> None:
    far = "https://" + "x" * 80 + ".png"
    cases: list[tuple[Any, str, str]] = [
        ({}, "an image has neither bytes nor a path. Fix or remove the row", "an image has neither bytes nor a path"),
        (7, "an image must be a path or its bytes, not int. Fix or remove the row", ""),
        ("", "an image must be a path or its bytes, not str. Fix or remove the row", ""),
        (
            far,
            f"the image {far[:80]} is on another machine, and images are not fetched. Download it and use the path of "
            "the file",
            "an image is on another machine, and images are not fetched",
        ),
        (
            "none.png",
            f"the image {folder}/none.png cannot be read: No such file or directory. Paths are relative to the data "
            "file; fix the path, or remove the row",
            "an image cannot be read: No such file or directory",
        ),
        ({"base64": "??"}, "an image is not valid base64. Write it again, or use a path", ""),
    ]
    for value, message, reason in cases:
        with pytest.raises(RowError) as refused:
            ImageRef.from_value(value, folder, "row 1")
        assert str(refused.value) == f"row 1: {message}"
        assert not reason or refused.value.reason == reason


def test_a_changed_or_missing_file_is_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / "a b.png"
    ref = ImageRef.from_value(str(path), folder, "")
    path.write_bytes(BYTES + b"!")
    with pytest.raises(DataError) as refused:
        ref.read()
    assert str(refused.value) == (
        f"{path}: the image has changed since the data was tokenized. Restore it; or, to start a run with the new "
        'image, empty data.cache_dir or set cache_dir = "none"'
    )
    path.unlink()
    with pytest.raises(DataError) as refused:
        ref.read()
    assert str(refused.value) == f"{path}: the image cannot be read: No such file or directory. Restore it"
    path.write_bytes(BYTES)
    monkeypatch.setattr(images_module, "MAX_IMAGE_BYTES", len(BYTES))
    assert ref.read() == BYTES
    monkeypatch.setattr(images_module, "MAX_IMAGE_BYTES", len(BYTES) - 1)
    with pytest.raises(DataError, match="the image cannot be read: "):
        ref.read()


def test_stored_references_are_read_back() -> None:
    refs = [
        ImageRef("/a/\u00e9.png", "0123456789abcdef"),
        ImageRef("row 1", "f" * 16, b"\0\xff" * 5),
        ImageRef("row 2", "e" * 16, b""),
        ImageRef("row 3", "d" * 16, b"last"),
    ]
    for part in ([], refs[:1], refs[1:2], refs):
        assert refs_from_bytes(refs_to_bytes(part)) == part
    assert refs_to_bytes([]) == b""


def test_placeholders_take_the_images_of_the_column_in_order(folder: Path) -> None:
    images = RowImages(["a", "b"], "unused")
    assert images.mark("x <image> y", "row 1") == f"x {images_module.IMAGE_MARK} y"
    own = {"type": "image_url", "image_url": {"url": "c"}}
    assert images.add(own) == images.add({"type": "image", "image": "", "path": None}) == images_module.IMAGE_MARK
    assert images.mark("no place", "row 1") == "no place"
    found = images.match(folder, "row 1")
    assert found == tuple(NamedImage(value, folder, "row 1") for value in ("a", {"url": "c"}, "b"))
    optional = RowImages(None, {"bytes": BYTES})
    assert optional.match(folder, "row 1") == ()
    optional = RowImages(None, {"bytes": BYTES})
    optional.mark("<image>", "row 1")
    assert optional.match(folder, "row 1") == (NamedImage({"bytes": BYTES}, folder, "row 1"),)
    for column in ("a", b"a", {"path": "a"}):
        single = RowImages(column)
        single.add({"type": "image"})
        assert single.match(folder, "row 1") == (NamedImage(column, folder, "row 1"),)
    plain = RowImages()
    assert plain.mark("an <image> in text", "row 1") == "an <image> in text" and plain.match(folder, "row 1") == ()
    few = RowImages(["a", "b", "c"])
    few.mark("<image><image>", "row 1")
    with pytest.raises(RowError, match=r"^row 1: the row has 3 images but 2 placeholders for them \(<image>, or parts"):
        few.match(folder, "row 1")
    with pytest.raises(RowError, match=r"^row 1: the text contains .* which is the internal mark of images"):
        plain.mark(images_module.IMAGE_MARK, "row 1")
