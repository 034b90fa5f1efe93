"""Encoding of messages between ranks as JSON and arrays, without pickle.

Any program that can reach a process group's port can send bytes to a rank. Unpickling such bytes could run code,
but parsing JSON cannot. Tags in the JSON represent Python types; a tuple is ``{"tuple": [...]}``. Arrays follow the
JSON as raw bytes. Records are decoded to instances of their classes, but only if the classes belong to this project:
dataclasses, pydantic models, enums, named tuples, and exceptions. Python's own exceptions are also allowed.

A message consists of the length of the JSON text (8 bytes, little-endian), the text, and the arrays. The text and each
array are padded to a multiple of 8 bytes.
"""

from __future__ import annotations

import builtins
import importlib
import json
import struct
from collections.abc import Mapping, Sequence
from dataclasses import fields, is_dataclass
from enum import Enum
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from pydantic import BaseModel
from torch import Tensor

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

__all__ = ["MessageError", "broadcast_message", "decode", "encode", "gather_messages"]

#: Packages whose classes messages can contain.
_PACKAGES = ("megatrain", "tiered", "megatrain_tier_cli")
_HEADER = struct.Struct("<Q")
#: Errors that invalid bytes can cause. torch and deeply nested JSON raise RuntimeError.
_DECODE_ERRORS = (
    *(ValueError, TypeError, LookupError, AttributeError, ArithmeticError, RuntimeError, ImportError),
    struct.error,
)
_ALIGNMENT = 8


class MessageError(ValueError):
    """Error for bytes that are not a valid message or that name a class that is not allowed."""


def encode(item: object) -> bytes:
    """Encode an object as bytes that ``decode`` can read.

    Args:
        item: None, bool, int, float, str, bytes, Path; numpy arrays and scalars, host tensors; exceptions; dataclasses,
            pydantic models, enums and named tuples of this project; and lists, tuples, sets and mappings of these.

    Raises:
        TypeError: The object contains a value of an unsupported type.
    """
    buffers: list[bytes] = []
    text = json.dumps(_tag(item, buffers), separators=(",", ":")).encode()
    parts = [_HEADER.pack(len(text)), _pad(text), *map(_pad, buffers)]
    return b"".join(parts)


def decode(message: bytes | bytearray | memoryview) -> Any:
    """Decode bytes that ``encode`` returned, and return the object.

    Raises:
        MessageError: The bytes are not a valid message, or they name a class outside this project.
    """
    data = memoryview(message)
    try:
        (length,) = _HEADER.unpack_from(data)
        start = _HEADER.size
        if length > len(data) - start:
            raise ValueError(f"{length} bytes of text in {len(data)} bytes")
        tree = json.loads(bytes(data[start : start + length]))
        return _Reader(data, _align(start + length)).value(tree)
    except MessageError:
        raise
    except _DECODE_ERRORS as error:
        raise MessageError(f"a message of another rank cannot be decoded: {error}") from error


def gather_messages(item: object, group: ProcessGroup | None = None) -> list[Any]:
    """Return every rank's item, by rank. This is a collective that uses host memory.

    Args:
        item: Object that ``encode`` supports.
        group: Group with a backend for host memory, or None for the default group.
    """
    import torch.distributed as dist

    message = torch.frombuffer(bytearray(encode(item)), dtype=torch.uint8)
    size = dist.get_world_size(group)
    lengths = [torch.zeros(1, dtype=torch.int64) for _ in range(size)]
    dist.all_gather(lengths, torch.tensor([len(message)]), group=group)
    max_length = max(int(length) for length in lengths)
    padded_message = torch.zeros(max_length, dtype=torch.uint8)
    padded_message[: len(message)] = message
    buffers = [torch.empty(max_length, dtype=torch.uint8) for _ in range(size)]
    dist.all_gather(buffers, padded_message, group=group)
    return [decode(buffer[: int(length)].numpy().data) for buffer, length in zip(buffers, lengths, strict=True)]


def broadcast_message(item: object, *, source: int = 0) -> Any:
    """Return rank ``source``'s item on all ranks. This is a collective of the default group.

    Args:
        item: Object that ``encode`` supports. Ignored on all ranks except ``source``.
    """
    import torch.distributed as dist

    is_source = dist.get_rank() == source
    message = torch.frombuffer(bytearray(encode(item if is_source else None)), dtype=torch.uint8)
    length = torch.tensor([len(message)])
    dist.broadcast(length, src=source)
    if not is_source:
        message = torch.empty(int(length), dtype=torch.uint8)
    dist.broadcast(message, src=source)
    return item if is_source else decode(message.numpy().data)


def _align(offset: int) -> int:
    """Return the offset rounded up to the alignment of arrays."""
    return -(-offset // _ALIGNMENT) * _ALIGNMENT


def _pad(data: bytes) -> bytes:
    return data + bytes(_align(len(data)) - len(data))


def _name(kind: type) -> list[str]:
    return [kind.__module__, kind.__qualname__]


def _tag(item: Any, buffers: list[bytes]) -> Any:
    """Convert an object to JSON values. Lists and plain values are kept. Other types become an object with one tag."""
    kind = type(item)
    if item is None or kind in (bool, int, float, str):
        return item

    def tag_all(items: Any) -> list[Any]:
        return [_tag(part, buffers) for part in items]

    if kind is list:
        return tag_all(item)
    if isinstance(item, Enum):
        return {"enum": [_name(kind), item.name]}
    if isinstance(item, Exception):
        return {"error": [_name(kind), [_tag_or_str(part, buffers) for part in item.args], _attributes(item, buffers)]}
    if isinstance(item, BaseModel):
        return {"model": [_name(kind), item.model_dump(mode="json")]}
    if is_dataclass(kind):
        values = [[field.name, _tag(getattr(item, field.name), buffers)] for field in fields(item)]
        return {"record": [_name(kind), values]}
    if isinstance(item, tuple):
        return {"named": [_name(kind), tag_all(item)]} if hasattr(kind, "_fields") else {"tuple": tag_all(item)}
    if isinstance(item, Mapping):
        return {"map": [tag_all(pair) for pair in item.items()]}
    if isinstance(item, (set, frozenset)):
        return {kind.__name__: tag_all(item)}
    if isinstance(item, (bytes, bytearray, memoryview)):
        buffers.append(bytes(item))
        return {"bytes": len(buffers[-1])}
    if isinstance(item, Path):
        return {"path": str(item)}
    if isinstance(item, Tensor):
        return {"tensor": [str(item.dtype).removeprefix("torch."), list(item.shape), _memory(item, buffers)]}
    if isinstance(item, (np.ndarray, np.generic)) and item.dtype.kind in "biufc":
        array = np.ascontiguousarray(item)
        buffers.append(array.tobytes())
        return {"array": [array.dtype.str, list(np.shape(item)), array.nbytes, isinstance(item, np.generic)]}
    raise TypeError(f"ranks cannot send each other a value of {kind.__module__}.{kind.__qualname__}: {item!r}")


def _memory(tensor: Tensor, buffers: list[bytes]) -> int:
    buffers.append(tensor.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return len(buffers[-1])


def _tag_or_str(item: Any, buffers: list[bytes]) -> Any:
    """Tag an exception's argument, or convert it to text if its type is unsupported, so that any error can be sent."""
    num_buffers = len(buffers)
    try:
        return _tag(item, buffers)
    except TypeError:
        del buffers[num_buffers:]
        return str(item)


def _attributes(error: Exception, buffers: list[bytes]) -> list[Any]:
    return [[name, _tag_or_str(value, buffers)] for name, value in vars(error).items()]


class _Reader:
    """Decoder for a message's JSON tree. It reads the arrays in the order in which they were written."""

    def __init__(self, data: memoryview, start: int) -> None:
        self._data, self._offset = data, start

    def value(self, tree: Any) -> Any:
        if isinstance(tree, list):
            return [self.value(item) for item in tree]
        if not isinstance(tree, dict):
            return tree
        (tag, content), *other_tags = tree.items()
        if other_tags:
            raise MessageError(f"a message has {len(tree)} tags instead of one")
        return getattr(self, f"_{tag}_of")(content)

    def _tuple_of(self, items: Sequence[Any]) -> Any:
        return tuple(map(self.value, items))

    def _set_of(self, items: Sequence[Any]) -> Any:
        return set(map(self.value, items))

    def _frozenset_of(self, items: Sequence[Any]) -> Any:
        return frozenset(map(self.value, items))

    def _map_of(self, items: Sequence[Any]) -> Any:
        return {self.value(key): self.value(value) for key, value in items}

    def _path_of(self, text: str) -> Any:
        return Path(text)

    def _bytes_of(self, nbytes: int) -> Any:
        return bytes(self._take(nbytes))

    def _tensor_of(self, content: Sequence[Any]) -> Any:
        dtype, shape, nbytes = content
        flat = torch.frombuffer(bytearray(self._take(nbytes)) or bytearray(1), dtype=torch.uint8)[:nbytes]
        return flat.view(_dtype(dtype)).view(shape)

    def _array_of(self, content: Sequence[Any]) -> Any:
        dtype, shape, nbytes, is_scalar = content
        array = np.frombuffer(bytearray(self._take(nbytes)), dtype=np.dtype(dtype)).reshape(shape)
        return array[()] if is_scalar else array

    def _enum_of(self, content: Sequence[Any]) -> Any:
        kind = _class(content[0])
        if not issubclass(kind, Enum):
            raise MessageError(f"{kind} is no enum")
        return kind[content[1]]

    def _named_of(self, content: Sequence[Any]) -> Any:
        kind = _class(content[0])
        if not (issubclass(kind, tuple) and hasattr(kind, "_make")):
            raise MessageError(f"{kind} is no named tuple")
        return kind._make(map(self.value, content[1]))

    def _model_of(self, content: Sequence[Any]) -> Any:
        kind = _class(content[0])
        if not issubclass(kind, BaseModel):
            raise MessageError(f"{kind} is no pydantic model")
        return kind.model_validate(content[1])

    def _record_of(self, content: Sequence[Any]) -> Any:
        kind = _class(content[0])
        if not is_dataclass(kind):
            raise MessageError(f"{kind} is no record")
        record: Any = object.__new__(kind)  # type: ignore[arg-type]  # skip the constructor, which ran on the sender
        names = {field.name for field in fields(kind)}
        for name, value in content[1]:
            if name not in names:
                raise MessageError(f"{kind} has no field {name}")
            object.__setattr__(record, name, self.value(value))
        return record

    def _error_of(self, content: Sequence[Any]) -> Any:
        (module, name), *_ = content
        arguments, attributes = [[self.value(item) for item in items] for items in content[1:]]
        kind = getattr(builtins, name, None) if module == "builtins" else _class(content[0], default=RuntimeError)
        if not (isinstance(kind, type) and issubclass(kind, Exception)):
            raise MessageError(f"{module}.{name} is no exception")
        if kind is RuntimeError and name != "RuntimeError":
            return RuntimeError(f"{name}: {' '.join(map(str, arguments))}")
        error = kind.__new__(kind)
        error.args = tuple(arguments)
        vars(error).update({key: value for key, value in attributes})
        return error

    def _take(self, nbytes: int) -> memoryview:
        data = self._data[self._offset : self._offset + nbytes]
        if not isinstance(nbytes, int) or nbytes < 0 or len(data) != nbytes:
            raise MessageError(f"a message is too short for the {nbytes} bytes of an array")
        self._offset = _align(self._offset + nbytes)
        return data


def _dtype(name: str) -> torch.dtype:
    dtype = getattr(torch, name)
    if not isinstance(dtype, torch.dtype):
        raise MessageError(f"{name} is no dtype")
    return dtype


def _class(name: Sequence[str], default: type | None = None) -> Any:
    """Return the class with this module and name. If the class is not allowed, return ``default`` or raise an error."""
    module, qualname = name
    if module.partition(".")[0] not in _PACKAGES:
        if default is None:
            raise MessageError(f"a message contains {module}.{qualname}, which is not a class of this project")
        return default
    member: Any = importlib.import_module(module)
    for part in qualname.split("."):
        member = vars(member)[part]
    if not isinstance(member, type) or member.__module__ != module:
        raise MessageError(f"{module}.{qualname} is not a class of this project")
    return member
