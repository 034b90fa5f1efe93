"""Updates of ordinary parameters made on a thread, while the next forward runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from torch import nn

if TYPE_CHECKING:
    from megatrain.embed.groups import StateGroup, Work

__all__ = ["InterruptedUpdateError", "UpdatesBehind"]


class InterruptedUpdateError(RuntimeError):
    """Some weights have made a step that others have not."""


class UpdatesBehind:
    """Makes the updates of a step in order, on one thread; a module waits for its own parameters before its forward.

    For models whose modules use the parameters that they own: others' parameters are not waited for. Whoever reads
    weights or gradients in another way calls ``finish`` first; ``state_dict`` and ``load_state_dict`` of the model do.
    ``start``, ``finish`` and the forward belong to one thread.

    Args:
        model: whose forward follows.
        on_error: called, on the thread, when an update ended halfway.
    """

    def __init__(self, model: nn.Module, on_error: Callable[[], None]) -> None:
        self._on_error = on_error
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="update-behind")
        self._running: list[Future[None]] = []
        self._update_of: dict[int, Future[None]] = {}
        self._has_failed = False
        for module in model.modules():
            if any(parameter is not None for parameter in module._parameters.values()):
                module.register_forward_pre_hook(self._before, prepend=True)
            module.register_state_dict_pre_hook(self._before_reading)  # type: ignore[no-untyped-call]
            module.register_load_state_dict_pre_hook(self._before_reading)  # type: ignore[no-untyped-call]

    def start(self, works: Mapping[StateGroup, Work]) -> None:
        """Begin the updates of a step. Gradients leave their parameters: the next ones will be new tensors."""
        assert not self._running, "the updates of the step before have not been waited for"
        self._has_failed = False
        groups = list(works)
        for number, group in enumerate(groups):
            for name in works[group].gradients:
                group.parameters[name].grad = None
            following = groups[number + 1] if number + 1 < len(groups) else None
            update = self._thread.submit(self._make, group, works[group], following)
            self._running.append(update)
            self._update_of.update((id(group.parameters[name]), update) for name in works[group].settings)

    def finish(self) -> None:
        """Wait for all updates. Raises the error of the first one that failed; none after it was made."""
        running, self._running = self._running, []
        self._update_of.clear()
        for update in running:
            update.exception()  # all have ended before anybody is told
        for update in running:
            update.result()

    def _make(self, group: StateGroup, work: Work, following: StateGroup | None) -> None:
        if self._has_failed:
            raise InterruptedUpdateError("an update before this one failed")
        try:
            if following is not None:
                following.prefetch()
            group.update(work)
        except BaseException:
            self._has_failed = True
            self._on_error()
            raise

    def _before(self, module: nn.Module, inputs: Any) -> None:
        if self._update_of:
            for parameter in module._parameters.values():
                update = self._update_of.get(id(parameter))
                if update is not None:
                    update.result()

    def _before_reading(self, *_: Any) -> None:
        self.finish()
