"""Compilation of layers' forwards with `torch.compile`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import torch

from megatrain.base.errors import UnsupportedModelError

if TYPE_CHECKING:
    from megatrain.models.graph import Unit


#: Maximum number of compiled variants per layer class. Variants differ in micro-batch shape, attention window and grad
#: mode. torch's default is 8.
_MAX_VARIANTS = 64
_MAX_REASON_LENGTH = 300


class LayerCompiler:
    """Compiler of layer forwards. The first call of each variant takes seconds to minutes.

    Forward and recompute run the same compiled code in grad mode, so their results are bit-identical.
    """

    def __init__(self, backend: str = "inductor") -> None:
        self._backend = backend
        self._compiled_forwards: dict[type, Callable[..., Any]] = {}

    def compile_forward(self, unit: Unit) -> Callable[..., Any]:
        """Return the compiled forward of a layer. The forward raises ``UnsupportedModelError`` on a graph break."""
        module = unit.module
        compiled_forward = self._compiled_forwards.get(type(module))
        if compiled_forward is None:
            # With `fullgraph`, a graph break raises an error. Without it, the rest of the code would run eagerly.
            compiled_forward = torch.compile(type(module).forward, fullgraph=True, dynamic=False, backend=self._backend)
            self._compiled_forwards[type(module)] = compiled_forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            # Disable autocast's cache, as in the recompute. Otherwise torch would compile a second variant.
            cache_enabled = torch.is_autocast_cache_enabled()
            torch.set_autocast_cache_enabled(False)
            try:
                with explain_failures(unit):
                    return compiled_forward(module, *args, **kwargs)
            finally:
                torch.set_autocast_cache_enabled(cache_enabled)

        return forward


@contextmanager
def explain_failures(unit: Unit) -> Iterator[None]:
    """Convert errors of `torch.compile` to an ``UnsupportedModelError`` that names the layer."""
    import torch._dynamo as dynamo

    error_types = (dynamo.exc.TorchDynamoException, dynamo.exc.FailOnRecompileLimitHit)
    try:
        with dynamo.config.patch(recompile_limit=_MAX_VARIANTS):
            yield
    except error_types as error:
        text = " ".join(str(error).split()).partition(" Set TORCHDYNAMO_VERBOSE")[0]  # drops irrelevant advice
        reason = text if len(text) <= _MAX_REASON_LENGTH else f"{text[:_MAX_REASON_LENGTH]} ..."
        raise UnsupportedModelError(
            f"{unit.name} ({type(unit.module).__name__})",
            f"torch.compile cannot compile its forward and backward as one graph ({type(error).__name__}: {reason}). "
            "Write model.compile = false",
        ) from error
