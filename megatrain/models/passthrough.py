"""Pass-through tensors: tensors in a model's folder that are not loaded, but copied unchanged to an export.

They use no memory, because an export copies them directly from the folder. They include buffers, tensors that
transformers ignores, and tensors of modules that a converter removes (such as a vision tower in a run without images).
Every tensor of a folder is loaded, passed through or rejected. Messages call them "kept as they are".
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, cast

import torch
import xxhash
from torch import Tensor, nn

from megatrain.base.errors import UnsupportedModelError
from megatrain.models.folder import ModelFolder, dtype_name, join_names, tensor_bytes
from tiered.units import format_size

if TYPE_CHECKING:
    from transformers import PreTrainedModel

__all__ = [
    "PASSTHROUGH_CHECKSUM",
    "PASSTHROUGH_COUNT",
    "PassthroughModules",
    "PassthroughTensors",
    "RegisteredTensor",
    "passthrough_modules",
    "remove_tensors",
]

#: Keys in the result of ``PassthroughTensors.record``.
PASSTHROUGH_COUNT, PASSTHROUGH_CHECKSUM = "num_kept_tensors", "kept_xxh3_64"
_METADATA_FUNCTIONS = frozenset(
    {"__get__", "size", "dim", "numel", "is_floating_point", "is_complex", "__repr__", "__hash__"}
)
_ATTRIBUTE = "_megatrain_passthrough_modules"


class _PassthroughWeight(Tensor):
    """Placeholder with a pass-through weight's shape and dtype. Any use of its values raises an error."""

    weight_name: str
    model_name: str

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if getattr(func, "__name__", "") not in _METADATA_FUNCTIONS:
            weight = next((arg for arg in args if isinstance(arg, _PassthroughWeight)), None)
            raise UnsupportedModelError(
                getattr(weight, "model_name", "the model"),
                f"its forward uses {getattr(weight, 'weight_name', 'a weight')} for text without images. This weight "
                "is not part of its language model and is not loaded. Use a text model",
            )
        return super().__torch_function__(func, types, args, kwargs)  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True)
class RegisteredTensor:
    """A parameter or buffer, and where it is registered in the model.

    Attributes:
        name: Name in the model.
        leaf: Name in the module.
        value: Tensor on the meta device.
    """

    name: str
    module: nn.Module
    leaf: str
    value: Tensor
    is_parameter: bool

    @property
    def registry(self) -> dict[str, Any]:
        return cast("dict[str, Any]", self.module._parameters if self.is_parameter else self.module._buffers)


@dataclass(frozen=True)
class PassthroughModules:
    """Modules and single parameters that were removed from a skeleton.

    Attributes:
        paths: Paths of the outermost removed modules, and names of single removed parameters.
        names: Names of all removed parameters and persistent buffers.
    """

    paths: tuple[str, ...]
    names: frozenset[str]
    _tensors: tuple[RegisteredTensor, ...] = field(repr=False)

    @contextmanager
    def registered(self) -> Iterator[None]:
        """Register the meta tensors again while the context is open, so that the model lists their names."""
        for tensor in self._tensors:
            tensor.registry[tensor.leaf] = tensor.value
        try:
            yield
        finally:
            for tensor in self._tensors:
                del tensor.registry[tensor.leaf]


def passthrough_modules(model: PreTrainedModel) -> PassthroughModules | None:
    """Return the modules that `remove_tensors` removed from a model, or None if nothing was removed."""
    modules: PassthroughModules | None = getattr(model, _ATTRIBUTE, None)
    return modules


def remove_tensors(
    model: PreTrainedModel, paths: Sequence[str], names: Iterable[str], tensors: Sequence[RegisteredTensor]
) -> None:
    """Remove tensors from a skeleton. Module traversal no longer finds them, and the model's code cannot use them.

    Args:
        paths: Paths of the outermost removed modules, and names of single removed parameters.
        names: Names of the tensors that model files contain.
        tensors: Tensors to remove, with the places where they are registered.
    """
    for tensor in tensors:
        _replace_by_placeholder(model, tensor)
    passthrough = PassthroughModules(tuple(paths), frozenset(names), tuple(tensors))
    cast("Any", model).__dict__[_ATTRIBUTE] = passthrough


def _replace_by_placeholder(model: PreTrainedModel, tensor: RegisteredTensor) -> None:
    """Replace a registered tensor with a placeholder. The placeholder is a plain attribute of the module."""
    del tensor.registry[tensor.leaf]
    placeholder = Tensor._make_subclass(_PassthroughWeight, torch.empty_like(tensor.value, device="meta"))
    assert isinstance(placeholder, _PassthroughWeight)
    placeholder.weight_name, placeholder.model_name = tensor.name, type(model).__name__
    cast("Any", placeholder)._is_hf_initialized = True  # makes transformers' initialization skip the placeholder
    tensor.module.__dict__[tensor.leaf] = placeholder


@dataclass(frozen=True)
class PassthroughTensors:
    """The pass-through tensors of a folder.

    Attributes:
        folder: Folder that contains the tensors.
        names: Names of the tensors in the files.
        owners: Owner of each tensor, for messages: a module of the model or a prefix of the tensor's name.
    """

    folder: ModelFolder
    names: tuple[str, ...]
    owners: Mapping[str, str]

    @property
    def nbytes(self) -> int:
        return sum(self.folder.records[name].nbytes for name in self.names)

    def __str__(self) -> str:
        """Return a summary, such as `21 tensors (12.3 MB) are kept as they are: model.visual (21)`."""
        counts = Counter(self.owners[name] for name in self.names)
        owners = join_names([f"{owner} ({count})" for owner, count in counts.most_common()], limit=4)
        tensors = f"{len(self.names)} tensors" if len(self.names) != 1 else "1 tensor"
        verb = "are kept as they are" if len(self.names) != 1 else "is kept as it is"
        return f"{tensors} ({format_size(self.nbytes)}) {verb}: {owners}"

    def record(self) -> dict[str, Any]:
        """Read all tensors. Return their number and their checksum, for a checkpoint."""
        return {PASSTHROUGH_COUNT: len(self.names), PASSTHROUGH_CHECKSUM: self.checksum()}

    def checksum(self) -> str:
        """Read all tensors piece by piece. Return a checksum of their names, shapes, dtypes and bytes."""
        checksums: dict[str, str] = {}
        for name in self.names:
            digest = xxhash.xxh3_64()
            for _, piece in self.folder.pieces(name):
                digest.update(tensor_bytes(piece))
            checksums[name] = digest.hexdigest()
        return self.combine_checksums(checksums)

    def combine_checksums(self, checksums: Mapping[str, str]) -> str:
        """Return the result of `checksum`, computed from each tensor's xxh3-64 checksum instead of from its bytes."""
        digest = xxhash.xxh3_64()
        for name in sorted(self.names):
            record = self.folder.records[name]
            digest.update(f"{name} {dtype_name(record.dtype)} {list(record.shape)} {checksums[name]}\n".encode())
        return digest.hexdigest()
