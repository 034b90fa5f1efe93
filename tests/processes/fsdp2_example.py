"""Runs examples/python/fsdp2.py as one of several ranks: ``python fsdp2_example.py plain|tiered OPTION ...``.

The environment has the address where ranks meet, as under torchrun. The last printed line is about the store.
"""

from __future__ import annotations

import json
import os
import sys
import threading

import torch

from processes import embed_examples

NAME = "fsdp2"


def main(which: str, *options: str) -> None:
    """Run the program, or its version before it had a store."""
    limit = threading.Timer(200, os._exit, [2])  # a collective that one rank leaves out would wait for ever
    limit.daemon = True
    limit.start()
    torch.set_num_threads(1)
    # Only at its end: gloo's destructor joins, with the GIL held, a thread that may wait for the GIL.
    torch.distributed.destroy_process_group = torch.distributed.barrier  # type: ignore[assignment]
    text = embed_examples.source(NAME)
    found = embed_examples.run(NAME, embed_examples.plain(text) if which == "plain" else text, options)
    print(json.dumps(found), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
