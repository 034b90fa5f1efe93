"""Carried tensors: those of a model's folder that are not trained, but copied into an export as they are.

A model that reads images has a vision tower that text never reaches. Its weights are not loaded: they take no memory,
stay in the folder, and an export copies them from there. (Messages and checkpoints say that they are "kept as is".)
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, cast

import torch
import xxhash
from torch import Tensor, nn

from megatrain.base.errors import UnsupportedModelError
from megatrain.models.folder import ModelFolder, dtype_name, some, tensor_bytes
from tiered.units import format_size

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = [
    "CARRIED_CHECKSUM",
    "CARRIED_COUNT",
    "CarriedModules",
    "CarriedTensors",
    "detach_non_text_modules",
    "Images",
    "carried_modules",
    "freeze_beyond_text",
    "modules_beyond_text",
    "reads_more_than_text",
    "text_modules",
]

#: What becomes of what reads images: carried as it is, streamed but not trained, or trained with the rest.
Images = Literal["off", "frozen", "trained"]

#: Keys of ``CarriedTensors.record``.
CARRIED_COUNT, CARRIED_CHECKSUM = "num_kept_tensors", "kept_xxh3_64"
_QUESTIONS = frozenset({"__get__", "size", "dim", "numel", "is_floating_point", "is_complex", "__repr__", "__hash__"})
_ATTRIBUTE = "_megatrain_carried_modules"


class _CarriedWeight(Tensor):
    """Placeholder of a carried weight: it has shape and dtype, and refuses to be computed with."""

    carried_name: str
    carried_model: str

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") not in _QUESTIONS:
            weight = next((arg for arg in args if isinstance(arg, _CarriedWeight)), None)
            raise UnsupportedModelError(
                getattr(weight, "carried_model", "the model"),
                f"its forward uses {getattr(weight, 'carried_name', 'a weight')} for a text without images, which is "
                "no part of its language model and is not loaded. Take a text model",
            )
        return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True)
class _Registration:
    """Where a carried parameter or buffer was registered."""

    name: str
    module: nn.Module
    leaf: str
    value: Tensor
    is_parameter: bool

    @property
    def registry(self) -> dict[str, Any]:
        return cast("dict[str, Any]", self.module._parameters if self.is_parameter else self.module._buffers)


@dataclass(frozen=True)
class CarriedModules:
    """The modules of a skeleton that text never reaches.

    Attributes:
        paths: The outermost of them, and owners of single parameters.
        names: Their parameters and persistent buffers.
    """

    paths: tuple[str, ...]
    names: frozenset[str]
    _slots: tuple[_Registration, ...] = field(repr=False)

    @contextmanager
    def registered(self) -> Iterator[None]:
        """Register these parameters and buffers (on the meta device) again, so that the model lists their names."""
        for slot in self._slots:
            slot.registry[slot.leaf] = slot.value
        try:
            yield
        finally:
            for slot in self._slots:
                del slot.registry[slot.leaf]


def reads_more_than_text(model: PreTrainedModel | type[PreTrainedModel]) -> bool:
    """Return whether a model, or a class of models, takes images or sounds as well."""
    modalities = model.input_modalities
    return (modalities if isinstance(modalities, str) else "".join(modalities)) != "text"


def carried_modules(model: PreTrainedModel) -> CarriedModules | None:
    """Return what `detach_non_text_modules` took out of the model; None: nothing."""
    found: CarriedModules | None = getattr(model, _ATTRIBUTE, None)
    return found


def detach_non_text_modules(model: PreTrainedModel) -> None:
    """Take the parameters and buffers out of a skeleton that only other inputs than text use.

    The language model is what transformers calls the decoder, with the embedding and the head. All else that owns
    parameters is carried; its placeholders refuse to be computed with, so a wrong guess here fails instead of training.

    Raises:
        UnsupportedModelError: the model has no decoder, or shares a weight between the decoder and something else.
    """
    if model.config.get_text_config() is model.config:
        return
    text = _language_model(model)
    inside = {id(module) for part in text for module in part.modules()}
    shared = {id(parameter) for part in text for parameter in part.parameters()}
    above = {id(module) for module in model.modules() if any(id(child) in inside for child in module.modules())}
    persistent = set(model.state_dict(keep_vars=True))
    paths: list[str] = []
    names: list[str] = []
    slots: dict[tuple[int, str], _Registration] = {}  # a module may be there under several names
    for path, module in model.named_modules(remove_duplicate=False):
        if id(module) in inside:
            continue
        is_first = id(module) in above or not any(path.startswith(f"{other}.") for other in paths)
        own = [(leaf, p, True) for leaf, p in module._parameters.items() if p is not None]
        own += [(leaf, b, False) for leaf, b in module._buffers.items() if b is not None and id(module) not in above]
        if is_first and (own or (id(module) not in above and next(module.parameters(), None) is not None)):
            paths += [f"{path}.{leaf}".lstrip(".") for leaf, _, _ in own] if id(module) in above else [path]
        for leaf, value, is_parameter in own:
            name = f"{path}.{leaf}".lstrip(".")
            if id(value) in shared:
                raise UnsupportedModelError(
                    type(model).__name__, f"it shares {name} with its language model, so it cannot be kept as it is"
                )
            if name in persistent:
                names.append(name)
            slot = _Registration(name, module, leaf, value if is_parameter else value.to("meta"), is_parameter)
            slots.setdefault((id(module), leaf), slot)
    for slot in slots.values():
        _stand_in(model, slot)
    if slots:
        carried = CarriedModules(tuple(paths), frozenset(names), tuple(slots.values()))
        cast("Any", model).__dict__[_ATTRIBUTE] = carried


def freeze_beyond_text(model: PreTrainedModel, images: Images) -> None:
    """Freeze what of an image-text model is not trained: all but the language model, or, where images are, sounds.

    Args:
        model: A skeleton with all of its modules.
        images: "frozen" or "trained".

    Raises:
        UnsupportedModelError: the model has no decoder, or does not read images.
    """
    modalities = model.input_modalities
    if "image" not in ((modalities,) if isinstance(modalities, str) else modalities):
        raise UnsupportedModelError(
            type(model).__name__,
            f'it does not read images, and the config says model.images = "{images}". Leave that out, or take an '
            "image-text model",
        )
    text = {id(parameter) for part in _language_model(model) for parameter in part.parameters()}
    sounds = {id(p) for module in _sound_modules(model) for p in module.parameters()}
    for parameter in model.parameters():
        if id(parameter) in sounds or (images == "frozen" and id(parameter) not in text):
            parameter.requires_grad_(False)


def text_modules(model: PreTrainedModel) -> list[nn.Module]:
    """Return all modules of a model's language model, with the embedding and the head."""
    return [module for part in _language_model(model) for module in part.modules()]


def modules_beyond_text(model: PreTrainedModel, *, sounds: bool = True) -> list[str]:
    """Return paths of the outermost modules with weights that are no part of a model's language model.

    Args:
        sounds: those that read sounds, too.
    """
    inside = {id(module) for module in text_modules(model)}
    left_out = set() if sounds else {id(m) for sound in _sound_modules(model) for m in sound.modules()}
    above = {id(module) for module in model.modules() if any(id(child) in inside for child in module.modules())}
    paths: list[str] = []
    for path, module in model.named_modules():
        is_outermost = id(module) not in above and not any(path.startswith(f"{other}.") for other in paths)
        if is_outermost and id(module) not in left_out and next(module.parameters(), None) is not None:
            paths.append(path)
    return paths


def _sound_modules(model: PreTrainedModel) -> Iterator[nn.Module]:
    encoder = model.get_encoder("audio")
    if encoder not in (None, model, model.base_model):
        yield encoder


def _language_model(model: PreTrainedModel) -> list[nn.Module]:
    try:
        decoder = model.get_decoder()
        parts = [decoder, model.get_input_embeddings(), model.get_output_embeddings()]
    except (AttributeError, NotImplementedError):  # some classes have no text of their own
        decoder = None
    if decoder in (None, model, model.base_model):
        raise UnsupportedModelError(
            type(model).__name__, "transformers does not tell its language model from the rest. Take a text model"
        )
    return [part for part in parts if isinstance(part, nn.Module)]


def _stand_in(model: PreTrainedModel, slot: _Registration) -> None:
    """Put a plain attribute in the place of a registered tensor: nothing that walks over the model finds it."""
    del slot.registry[slot.leaf]
    standing_in = Tensor._make_subclass(_CarriedWeight, torch.empty_like(slot.value, device="meta"))
    assert isinstance(standing_in, _CarriedWeight)
    standing_in.carried_name, standing_in.carried_model = slot.name, type(model).__name__
    cast("Any", standing_in)._is_hf_initialized = True  # transformers' rules are to leave it alone
    slot.module.__dict__[slot.leaf] = standing_in


@dataclass(frozen=True)
class CarriedTensors:
    """The tensors of a folder that an export copies as they are.

    Attributes:
        folder: Where they lie.
        names: Their names in the files.
        owners: Name -> what it belongs to, for people: a module of the model, or the beginning of its name.
    """

    folder: ModelFolder
    names: tuple[str, ...]
    owners: Mapping[str, str]

    @property
    def nbytes(self) -> int:
        return sum(self.folder.records[name].nbytes for name in self.names)

    def __str__(self) -> str:
        """All of them in one line: `21 tensors (12.3 MB) are kept as they are: model.visual (21)`."""
        counts = Counter(self.owners[name] for name in self.names)
        what = some([f"{owner} ({count})" for owner, count in counts.most_common()], limit=4)
        tensors = f"{len(self.names)} tensors" if len(self.names) != 1 else "1 tensor"
        verb = "are kept as they are" if len(self.names) != 1 else "is kept as it is"
        return f"{tensors} ({format_size(self.nbytes)}) {verb}: {what}"

    def record(self) -> dict[str, Any]:
        """Return what a checkpoint records of them. Reads them all."""
        return {CARRIED_COUNT: len(self.names), CARRIED_CHECKSUM: self.checksum()}

    def checksum(self) -> str:
        """Read all of them and return the checksum of their names, shapes, dtypes and bytes. RAM: one small piece."""
        checksums: dict[str, str] = {}
        for name in self.names:
            digest = xxhash.xxh3_64()
            for _, piece in self.folder.pieces(name):
                digest.update(tensor_bytes(piece))
            checksums[name] = digest.hexdigest()
        return self.joined(checksums)

    def joined(self, checksums: Mapping[str, str]) -> str:
        """Return what `checksum` does, given the xxh3-64 of each tensor's bytes."""
        digest = xxhash.xxh3_64()
        for name in sorted(self.names):
            record = self.folder.records[name]
            digest.update(f"{name} {dtype_name(record.dtype)} {list(record.shape)} {checksums[name]}\n".encode())
        return digest.hexdigest()
