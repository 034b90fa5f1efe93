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
#: mode. The default of torch is 8.
_MOST_KINDS = 64
_LONGEST_REASON = 300


class LayerCompiler:
    """Compiler of layer forwards. The first call of each variant takes seconds to minutes.

    Forward and recompute run the same compiled code in grad mode, so their results are bit-identical.
    """

    def __init__(self, backend: str = "inductor") -> None:
        self._backend = backend
        self._by_class: dict[type, Callable[..., Any]] = {}

    def forward_of(self, unit: Unit) -> Callable[..., Any]:
        """Return the compiled forward of a layer. The forward raises ``UnsupportedModelError`` on a graph break."""
        module = unit.module
        compiled = self._by_class.get(type(module))
        if compiled is None:
            # With `fullgraph`, a graph break raises an error. Without it, the rest of the code would run eagerly.
            compiled = torch.compile(type(module).forward, fullgraph=True, dynamic=False, backend=self._backend)
            self._by_class[type(module)] = compiled

        def forward(*args: Any, **kwargs: Any) -> Any:
            # Disable autocast's cache, as in the recompute. Otherwise torch would compile a second variant.
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
    """Convert errors of `torch.compile` to an ``UnsupportedModelError`` that names the layer."""
    import torch._dynamo as dynamo

    failures = (dynamo.exc.TorchDynamoException, dynamo.exc.FailOnRecompileLimitHit)
    try:
        with dynamo.config.patch(recompile_limit=_MOST_KINDS):
            yield
    except failures as error:
        text = " ".join(str(error).split()).partition(" Set TORCHDYNAMO_VERBOSE")[0]  # drops irrelevant advice
        reason = text if len(text) <= _LONGEST_REASON else f"{text[:_LONGEST_REASON]} ..."
        raise UnsupportedModelError(
            f"{unit.name} ({type(unit.module).__name__})",
            f"torch.compile cannot compile its forward and backward as one graph ({type(error).__name__}: {reason}). "
            "Write model.compile = false",
        ) from error
