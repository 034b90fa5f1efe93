"""Whose leases cannot end before the calling thread goes on: its own, and those of a thread that waits for it."""

from __future__ import annotations

import sys
import threading
from collections.abc import Sequence

import torch
from torch.autograd import graph

#: Before, a garbage collection in the call deadlocks when it frees a tensor.
_CAN_SEE_FRAMES = sys.version_info >= (3, 12)


def threads_of_caller() -> Sequence[int]:
    """Return the ids of the calling thread, first, and, in a backward, of those that called one and wait for its end.

    On a CPU a backward runs in the thread that calls it, on a device in one of autograd's own: that one must not wait
    for leases of a caller that waits for it. (With Python 3.11 it does: who waits cannot be told there.) If two threads
    are in backwards, each counts for the other: for one device autograd has a single thread, so they do wait for each
    other.
    """
    own = threading.get_ident()
    if not _CAN_SEE_FRAMES or torch._C._current_graph_task_id() == -1:
        return (own,)
    # The engine is C++: of a thread that waits in it, the function that called it is the innermost of Python.
    calls_engine = getattr(graph._engine_run_backward, "__code__", None)
    return (own, *(thread_id for thread_id, frame in sys._current_frames().items() if frame.f_code is calls_engine))
