"""Runs two steps of a tiny model on the null GPU under torch's stream sanitizer, which finds unordered accesses.

    . temp/null_gpu/env.sh; python tests/null_gpu/stream_order.py            # the sanitizer must report nothing
    . temp/null_gpu/env.sh; python tests/null_gpu/stream_order.py --control  # without ordering, it must report errors

The exit status is 1 if the result is not as expected. The sanitizer only tracks the reads and writes of torch's
operators, streams and events, so no kernel has to run. It does not see Triton's launches, or views that begin inside an
allocation.
"""

from __future__ import annotations

import argparse
import sys
import threading
from collections import Counter
from contextlib import nullcontext
from typing import Any
from unittest import mock

import torch
from gpu import one_step
from torch._subclasses.fake_tensor import FakeTensor
from torch.cuda import _sanitizer

from tiered.tiers.gpu import DeviceBuffer

NUM_PRINTED = 12


class Accesses(_sanitizer.ArgumentHandler):
    """Data pointers that an operator reads and writes. Fake tensors, which plans use, have no data pointers."""

    def _handle_argument(self, value: Any, *arguments: Any, **options: Any) -> None:
        if not isinstance(value, FakeTensor):
            super()._handle_argument(value, *arguments, **options)


class StreamOrder(_sanitizer.CUDASanitizerDispatchMode):
    """Sanitizer for all threads. It counts reports instead of raising an error at the first report.

    Attributes:
        num_calls: Number of operators that accessed device memory, by kind of thread.
        reports: Number of reports, by pair of operators that access the same memory on unordered streams.
    """

    def __init__(self) -> None:
        super().__init__()
        self.num_calls: Counter[str] = Counter()
        self.reports: Counter[str] = Counter()
        self._lock = threading.RLock()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options, schema = kwargs or {}, func._schema
        if "record_stream" in schema.name or "empty" in schema.name:  # no kernel is launched
            return func(*args, **options)
        is_factory = bool(_sanitizer.FACTORY_FUNCTION_REGEX.match(schema.name))
        seen = Accesses()
        seen.parse_inputs(schema, args, options, is_factory=is_factory)
        result = func(*args, **options)
        seen.parse_outputs(schema, result, is_factory=is_factory)
        read, written = seen.dataptrs_read - seen.dataptrs_written, seen.dataptrs_written
        if read or written:
            stream = torch.cuda.current_stream().cuda_stream
            with self._lock:
                self.num_calls[threading.current_thread().name.rsplit("-", 1)[0]] += 1
                self.reports.update(
                    f"{error.current_access.operator} after {error.previous_access.operator}"
                    for error in self.event_handler._handle_kernel_launch(
                        stream, read, written, seen.outputs, schema, seen.tensor_aliases
                    )
                )
        return result


def main() -> int:
    """Run the steps; return 1 unless the sanitizer reports what is expected."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--control", action="store_true", help="let buffers order nothing, which must be reported")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.error("torch finds no GPU: read the env.sh of the null GPU first")
    order = StreamOrder()
    run = threading.Thread.run

    def run_with_order_checks(thread: threading.Thread) -> None:
        with order:
            run(thread)

    sys.argv[1:] = []  # one_step parses the remaining arguments
    with (
        mock.patch.object(threading.Thread, "run", run_with_order_checks),
        # Work on the null GPU ends immediately. If events reported this, no code would wait for them.
        mock.patch.object(torch.cuda.Event, "query", return_value=False),
        mock.patch.object(DeviceBuffer, "order_before") if arguments.control else nullcontext(),
        order,
    ):
        one_step.main()
    print("operators by thread:", dict(order.num_calls))
    print(f"{sum(order.reports.values())} reports, {len(order.reports)} kinds")
    for report, count in order.reports.most_common(NUM_PRINTED):
        print(f"{count} x {report}")
    return int(bool(order.reports) is not arguments.control)


if __name__ == "__main__":
    sys.exit(main())
