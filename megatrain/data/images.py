"""Images of rows. The image processor in the model folder converts them to tokens and tensors.

A document stores a reference to each of its images, with a checksum. The pixels are computed again for each
micro-batch, so that the token cache stays small.
"""

from __future__ import annotations

import base64
import binascii
import importlib
import io
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast
from urllib.parse import unquote, urlparse

import xxhash

from megatrain.data.rows_report import DataError, RowError
from tiered.errors import install_command
from tiered.ext import read_document_file
from tiered.units import MiB

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PreTrainedTokenizerFast

#: Private-use character that marks an image's position in a message's text.
IMAGE_MARK = "\U0010f8f1"
#: Maximum size of an image file in bytes. The limit is needed because a path in a row can point to any file.
MAX_IMAGE_BYTES = 256 * MiB
_PROBE_SIDES = (32, 64, 128, 256, 512, 1024, 2048)  # side lengths of the probe images that fill a row in `make_example`
_TEXT_OUTPUTS = ("input_ids", "attention_mask", "token_type_ids", "mm_token_type_ids", "text_replacement_offsets")
_TYPE_OUTPUTS = ("mm_token_type_ids", "token_type_ids")


@dataclass(frozen=True, slots=True)
class ImageRef:
    """Reference to one of a row's images.

    Attributes:
        location: Path of the image file, or location of the row that contains the image.
        checksum: Checksum of the image's bytes.
        content: The image's bytes if the row contains them, or None if they are in a file.
    """

    location: str
    checksum: str
    content: bytes | None = None

    @classmethod
    def from_value(cls, value: object, folder: Path, location: str) -> ImageRef:
        """Return a reference to an image: a path, a `file:` or `data:` URL, bytes, or a mapping with one of these.

        Args:
            folder: Base folder for relative paths, which is the data file's folder.
            location: File and row, for error messages.

        Raises:
            RowError: The value is not a supported kind of image, or the file cannot be read.
        """
        if isinstance(value, Mapping):  # the datasets library and chat messages store images as mappings
            values = [value[key] for key in ("bytes", "path", "url", "image", "base64") if value.get(key) is not None]
            if not values:
                raise RowError(location, "an image has neither bytes nor a path", "Fix or remove the row")
            if value.get("base64") is not None and len(values) == 1:
                return cls._from_base64(str(values[0]), location)
            return cls.from_value(values[0], folder, location)
        if isinstance(value, bytes):
            return cls(location, xxhash.xxh3_64_hexdigest(value), value)
        if not isinstance(value, str) or not value:
            raise RowError(location, f"an image must be a path or its bytes, not {type(value).__name__}")
        if value.startswith("data:"):
            return cls._from_base64(value.partition(",")[2], location)
        address = urlparse(value)
        if address.scheme in ("http", "https"):
            raise RowError(
                location,
                f"the image {value[:80]} is on another machine, and images are not fetched",
                "Download it and use the path of the file",
                reason="an image is on another machine, and images are not fetched",
            )
        path = folder / Path(unquote(address.path) if address.scheme == "file" else value)
        try:
            content = read_document_file(path, MAX_IMAGE_BYTES)
        except OSError as error:
            raise RowError(
                location,
                f"the image {path} cannot be read: {error.strerror or error}",
                "Paths are relative to the data file; fix the path, or remove the row",
                reason=f"an image cannot be read: {error.strerror or error}",
            ) from None
        return cls(str(path.absolute()), xxhash.xxh3_64_hexdigest(content))

    @classmethod
    def _from_base64(cls, text: str, location: str) -> ImageRef:
        try:
            content = base64.b64decode(text, validate=True)
        except binascii.Error:
            raise RowError(location, "an image is not valid base64", "Write it again, or use a path") from None
        return cls(location, xxhash.xxh3_64_hexdigest(content), content)

    def read(self) -> bytes:
        """Return the image's bytes. Raises DataError if its file is missing or has changed since tokenization."""
        if self.content is not None:
            return self.content
        try:
            content = read_document_file(Path(self.location), MAX_IMAGE_BYTES)
        except OSError as error:
            problem = f"the image cannot be read: {error.strerror or error}"
            raise DataError(self.location, problem, "Restore it") from None
        if xxhash.xxh3_64_hexdigest(content) != self.checksum:
            raise DataError(
                self.location,
                "the image has changed since the data was tokenized",
                'Restore it; or, to start a run with the new image, empty data.cache_dir or set cache_dir = "none"',
            )
        return content


@dataclass(frozen=True, slots=True)
class NamedImage:
    """Unread image that a row refers to. Its attributes are the arguments of ``ImageRef.from_value``."""

    value: object
    folder: Path
    location: str

    def ref(self) -> ImageRef:
        """Read the image and return a reference to it. Raises RowError."""
        return ImageRef.from_value(self.value, self.folder, self.location)


def refs_to_bytes(refs: Sequence[ImageRef]) -> bytes:
    """Serialize a document's image references. Return empty bytes if the document has no images."""
    if not refs:
        return b""
    header = json.dumps([[ref.location, ref.checksum, -1 if ref.content is None else len(ref.content)] for ref in refs])
    encoded = header.encode()
    return b"".join([len(encoded).to_bytes(8, "little"), encoded, *(ref.content or b"" for ref in refs)])


def refs_from_bytes(data: bytes) -> list[ImageRef]:
    """Parse the output of :func:`refs_to_bytes`."""
    if not data:
        return []
    offset = 8 + int.from_bytes(data[:8], "little")
    refs: list[ImageRef] = []
    for location, checksum, nbytes in json.loads(data[8:offset]):
        refs.append(ImageRef(location, checksum, None if nbytes < 0 else data[offset : offset + nbytes]))
        offset += max(0, nbytes)
    return refs


@dataclass(frozen=True, slots=True)
class ImageSpan:
    """Character ranges of an image's placeholder, and of the image tokens to which the placeholder expands."""

    placeholder: range
    expansion: range


class ImageProcessor:
    """Image processor from a model folder. Not thread-safe.

    Args:
        folder: Folder with the processor's files.
        tokenizer: The model's tokenizer. It must have the image tokens.
        max_length: Maximum tokens in a row. A row filled with images sets the maximum number of pixels.

    Raises:
        DataError: The folder has no image processor, or a required package is missing.
    """

    def __init__(self, folder: str, tokenizer: PreTrainedTokenizerFast, max_length: int) -> None:
        self._folder, self._max_length = folder, max_length
        self._fill_id = next(
            (token for token in (tokenizer.pad_token_id, tokenizer.eos_token_id) if isinstance(token, int)), 0
        )
        self._processor = _open_processor(folder, tokenizer)
        self._image_token = getattr(self._processor, "image_token", None)
        if not isinstance(self._image_token, str):
            raise DataError(
                folder,
                f"{type(self._processor).__name__} has no image token",
                'Use another model, or set model.images = "off"',
            )
        template = getattr(self._processor, "chat_template", None)
        self.chat_template: str | None = template if isinstance(template, str) else None
        probe = self._run_processor([self._image_token], [[_make_blank_image(_PROBE_SIDES[1], _PROBE_SIDES[1])]])
        self._types_name = next((name for name in _TYPE_OUTPUTS if name in probe), None)

    def describe(self) -> str:
        """Return the processor's class and settings. They determine its tokens and pixels."""
        return f"{type(self._processor).__name__} {self._processor.to_json_string()}"

    def insert(self, text: str, refs: Sequence[ImageRef], location: str) -> tuple[str, list[ImageSpan]]:
        """Insert image tokens into a rendered conversation. Return the text and the images' positions.

        Raises:
            RowError: The images cannot be decoded or processed, have too many pixels, or do not match the placeholders.
        """
        num_placeholders = text.count(str(self._image_token))
        if num_placeholders != len(refs):
            raise RowError(
                location,
                f"the rendered row has {num_placeholders} placeholders for images ({self._image_token}), but "
                f"{len(refs)} images",
                "Fix or remove the row; its text must not contain that token",
                reason="the rendered row does not have one placeholder for each image",
            )
        if not refs:
            return text, []
        images = [self._decode(ref) for ref in refs]
        try:
            outputs = self._run_processor([text], [images], return_text_replacement_offsets=True)
        except Exception as error:  # the processors of the model families raise different types of errors
            reason = " ".join(str(error).split()) or type(error).__name__
            raise RowError(
                location, f"the processor rejects the images: {reason}", reason="the processor rejects the images"
            ) from None
        if _count_elements(outputs) > self._max_elements:  # the images would not fit in the memory planned for a step
            raise RowError(
                location,
                f"its images have more pixels than the memory plan allows for a row of {self._max_length} tokens",
                "Raise data.max_length, or make the images smaller",
                reason="its images have more pixels than the memory plan allows; raise data.max_length",
            )
        inserted: list[ImageSpan] = []
        pieces: list[str] = []
        position = 0
        for replacement in outputs["text_replacement_offsets"][0]:
            start, end = replacement["span"]
            pieces += [text[position:start], replacement["replacement"]]
            inserted.append(ImageSpan(range(start, end), range(*replacement["new_span"])))
            position = end
        return "".join([*pieces, text[position:]]), inserted

    def make_inputs(
        self, rows: Sequence[Sequence[int]], refs: Sequence[Sequence[ImageRef]], width: int
    ) -> dict[str, Tensor]:
        """Return a micro-batch's image inputs: pixels, sizes, and a mask of image tokens, of shape ``(rows, width)``.

        Args:
            rows: Token ids of each row, without padding.
            width: Number of tokens in a row, including padding.

        Raises:
            DataError: An image can no longer be read.
        """
        import torch

        images = [[self._decode(ref) for ref in row_refs] for row_refs in refs if row_refs]
        inputs = self._compute_pixels(images) if images else {}
        if self._types_name is not None:
            types = torch.zeros(len(rows), width, dtype=torch.long)
            for index, row_types in enumerate(self._processor.create_mm_token_type_ids([list(row) for row in rows])):
                types[index, : len(row_types)] = torch.tensor(row_types, dtype=torch.long)
            inputs[self._types_name] = types
        return inputs

    def make_example(self, num_rows: int) -> dict[str, Tensor]:
        """Return a micro-batch for measurements. Its rows have ``max_length`` tokens and are filled with images.

        Raises:
            DataError: ``max_length`` is too small for the smallest image.
        """
        import torch

        row: list[int] = []
        images: list[Any] = []
        for image, tokens in reversed(self._probe_images):
            count = (self._max_length - len(row)) // (len(tokens) + 1)  # one text token separates two images
            row += [*tokens, self._fill_id] * count
            images += [image] * count
        row += [self._fill_id] * (self._max_length - len(row))
        types: dict[str, Tensor] = {}
        if self._types_name is not None:
            (row_types,) = self._processor.create_mm_token_type_ids([row])
            types[self._types_name] = torch.tensor([row_types] * num_rows, dtype=torch.long)
        ids = torch.tensor([row] * num_rows, dtype=torch.long)
        mask = torch.ones_like(ids)
        return {"input_ids": ids, "attention_mask": mask, **self._compute_pixels([images] * num_rows), **types}

    @cached_property
    def _max_elements(self) -> int:
        """Maximum number of elements in a row's image tensors."""
        return _count_elements(self.make_example(1))

    @cached_property
    def _probe_images(self) -> list[tuple[Any, list[int]]]:
        """Images that fit in a row, smallest first, and the token ids of each image."""
        probes: list[tuple[Any, list[int]]] = []
        for side in _PROBE_SIDES:
            image = _make_blank_image(side, side)
            # Convert the ids to integers, because some processors always return tensors.
            tokens = [int(token) for token in self._run_processor([self._image_token], [[image]])["input_ids"][0]]
            if len(tokens) >= self._max_length:
                break
            if not probes or tokens != probes[-1][1]:
                probes.append((image, tokens))
        if not probes:
            raise DataError(
                self._folder,
                f"the smallest image needs {len(tokens)} tokens, but data.max_length = {self._max_length}",
                "Raise data.max_length",
            )
        return probes

    def _compute_pixels(self, images: Sequence[Sequence[Any]]) -> dict[str, Tensor]:
        import torch

        out = self._run_processor(
            [str(self._image_token) * len(row) for row in images], images, return_tensors="pt", padding=True
        )
        return {
            name: value for name, value in out.items() if name not in _TEXT_OUTPUTS and isinstance(value, torch.Tensor)
        }

    def _run_processor(self, text: Sequence[Any], images: Sequence[Sequence[Any]], **options: Any) -> Mapping[str, Any]:
        # The chat template already adds the special tokens, for example <bos>, so the processor must not.
        options = {"add_special_tokens": False, "return_mm_token_type_ids": True, **options}
        return cast(
            "Mapping[str, Any]", self._processor(text=list(text), images=[list(row) for row in images], **options)
        )

    def _decode(self, ref: ImageRef) -> Any:
        from PIL import Image
        from transformers.image_utils import load_image

        content = ref.read()
        try:
            with Image.open(io.BytesIO(content)) as image:
                return load_image(image)
        except Exception as error:  # Pillow's decoders raise many types of errors
            reason = " ".join(str(error).split()).split("<")[0].strip() or type(error).__name__
            raise RowError(
                ref.location,
                f"the image cannot be decoded: {reason}",
                "Write it again, or remove the row",
                reason="an image cannot be decoded",
            ) from None


def _make_blank_image(width: int, height: int) -> Any:
    from PIL import Image

    return Image.new("RGB", (width, height), (127, 127, 127))


def _count_elements(outputs: Mapping[str, Any]) -> int:
    """Return the total number of elements in a processor's image outputs."""

    def count(value: Any) -> int:
        if isinstance(value, list | tuple):
            return sum(map(count, value))
        return math.prod(value.shape) if hasattr(value, "shape") else 0

    return sum(count(value) for name, value in outputs.items() if name not in _TEXT_OUTPUTS)


class _UnusedComponent(dict[str, Any]):
    """Stand-in for a processor's video or audio component. Needs no extra packages, and is serialized as `{}`."""


def _open_processor(folder: str, tokenizer: PreTrainedTokenizerFast) -> Any:
    try:
        import PIL  # noqa: F401
    except ImportError:
        advice = f"Install it: {install_command('images')}"
        raise DataError(folder, "images need Pillow, which is not installed", advice) from None
    from transformers import AutoProcessor, ProcessorMixin

    advice = "Copy the processor's files (preprocessor_config.json, processor_config.json) of the model into the folder"
    try:
        with _image_only_processors(tokenizer):
            processor = AutoProcessor.from_pretrained(folder, trust_remote_code=False, local_files_only=True)
    except ImportError as error:
        reason = " ".join(str(error).split()).partition(". ")[0]
        advice = f"Install that, or {install_command('images')}"
        raise DataError(folder, f"its processor needs a package: {reason}", advice) from None
    except Exception as error:  # from_pretrained raises many types of errors
        reason = " ".join(str(error).split()) or type(error).__name__
        raise DataError(folder, f"its image processor cannot be opened: {reason}", advice) from None
    if not isinstance(processor, ProcessorMixin) or not hasattr(processor, "image_processor"):
        raise DataError(folder, "the folder has no image processor", advice)
    return processor


@contextmanager
def _image_only_processors(tokenizer: PreTrainedTokenizerFast) -> Iterator[None]:
    """Make transformers use only the tokenizer and Pillow image processors, so that all machines get equal pixels."""
    from transformers import AutoImageProcessor, ProcessorMixin

    processing_auto: Any = importlib.import_module("transformers.models.auto.processing_auto")
    mixin: Any = ProcessorMixin
    get_class = processing_auto.processor_class_from_name
    originals = {
        name: mixin.__dict__[name] for name in ("_get_arguments_from_pretrained", "check_argument_for_proper_class")
    }
    check_argument = originals["check_argument_for_proper_class"]

    def make_components(cls: Any, /, folder: Any, processor_dict: Any = None, **options: Any) -> list[Any]:
        components: list[Any] = []
        for name in cls.get_attributes():
            if name == "tokenizer":
                components.append(tokenizer)
            elif name == "image_processor":
                components.append(AutoImageProcessor.from_pretrained(folder, backend="pil", **options))
            else:
                components.append(_UnusedComponent())
        return components

    def check_component(self: Any, name: str, argument: Any) -> Any:
        return None if isinstance(argument, _UnusedComponent) else check_argument(self, name, argument)

    try:
        processing_auto.processor_class_from_name = lambda name: _load_without_torchvision(name, get_class(name))
        mixin._get_arguments_from_pretrained = classmethod(make_components)
        mixin.check_argument_for_proper_class = check_component
        yield
    finally:
        processing_auto.processor_class_from_name = get_class
        for name, function in originals.items():
            setattr(mixin, name, function)


def _load_without_torchvision(name: str, processor_class: Any) -> Any:
    """Return a processor class that works without torchvision, if only the image module needs torchvision.

    The class is imported with the Pillow image module instead of the torchvision module. Both have the same functions.
    """
    if getattr(processor_class, "_backends", None) != ["torchvision"]:
        return processor_class
    import transformers

    module = getattr(transformers, name).__module__
    package, _, file = module.rpartition(".")
    image_module = f"{package}.image_processing_{file.removeprefix('processing_')}"
    try:
        sys.modules[image_module] = importlib.import_module(
            image_module.replace(".image_processing_", ".image_processing_pil_")
        )
        return getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError):
        return processor_class  # if a caller uses this class, it raises an error that names the missing package
    finally:
        sys.modules.pop(image_module, None)  # later imports of this module must still raise the original error
