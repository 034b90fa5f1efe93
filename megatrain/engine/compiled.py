"""``torch.compile`` of layers: once for each kind of layer, and reused for all layers of that kind.

The forward of a layer's class is compiled, with the layer as an argument: weights, which are other views at each visit,
are inputs of the compiled code, which looks at their shapes and never at where they are. What the code of a class reads
of a layer (its window, its scaling) is checked before the code is reused; a layer where it differs is another kind.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from megatrain.models.errors import UnsupportedModelError

if TYPE_CHECKING:
    from megatrain.config.schema import ModelConfig
    from megatrain.models.graph import Unit

__all__ = ["LayerCompiler"]

#: Kinds of one class of layers: shapes of micro-batches, training and evaluation, windows. torch's own limit is 8.
_MOST_KINDS = 64
_LONGEST_REASON = 300


class LayerCompiler:
    """Makes compiled forwards of layers. The first call of each kind compiles, which takes seconds to minutes.

    Forward and recompute run the same compiled code, under grad mode both, so they compute the same bits.

    Args:
        backend: of ``torch.compile``.
    """

    def __init__(self, backend: str = "inductor") -> None:
        self._backend = backend
        self._by_class: dict[type, Callable[..., Any]] = {}

    @classmethod
    def of(cls, table: ModelConfig) -> LayerCompiler | None:
        """Return the compiler that a config asks for, or None."""
        return cls(table.compile_backend) if table.compile else None

    def forward_of(self, unit: Unit) -> Callable[..., Any]:
        """Return the compiled forward of a layer.

        It raises ``UnsupportedModelError`` where it cannot be compiled as one graph.
        """
        module = unit.module
        compiled = self._by_class.get(type(module))
        if compiled is None:
            # One graph or nothing: behind a break, code would run eagerly, and nobody would notice.
            compiled = torch.compile(type(module).forward, fullgraph=True, dynamic=False, backend=self._backend)
            self._by_class[type(module)] = compiled

        def forward(*args: Any, **kwargs: Any) -> Any:
            # Compiled code belongs to a state of autocast, whose cache forward and recompute have different uses for.
            is_cached = torch.is_autocast_cache_enabled()
            torch.set_autocast_cache_enabled(False)
            try:
                with naming_failures(unit):
                    return compiled(module, *args, **kwargs)
            finally:
                torch.set_autocast_cache_enabled(is_cached)

        return forward


@contextmanager
def naming_failures(unit: Unit) -> Iterator[None]:
    """Run compiled code of a layer, and say which layer it was whose code cannot be compiled.

    Around the backward, too, which is compiled when it first runs.
    """
    import torch._dynamo as dynamo

    failures = (dynamo.exc.TorchDynamoException, dynamo.exc.FailOnRecompileLimitHit)
    try:
        with dynamo.config.patch(recompile_limit=_MOST_KINDS):
            yield
    except failures as error:
        text = " ".join(str(error).split()).partition(" Set TORCHDYNAMO_VERBOSE")[0]  # advice that is none here
        reason = text if len(text) <= _LONGEST_REASON else f"{text[:_LONGEST_REASON]} ..."
        raise UnsupportedModelError(
            f"{unit.name} ({type(unit.module).__name__})",
            f"torch.compile cannot compile its forward and backward as one graph ({type(error).__name__}: {reason}). "
            "Write model.compile = false",
        ) from error
