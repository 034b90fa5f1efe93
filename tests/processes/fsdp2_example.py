"""Runs examples/python/fsdp2.py as one of several ranks: ``python fsdp2_example.py plain|tiered OPTION ...``.

The environment contains the rendezvous address, as under torchrun. The last printed line is a JSON object with the
losses and the RAM use of the store.
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
    """Run the program, or its plain version without a store."""
    limit = threading.Timer(200, os._exit, [2])  # if one rank skips a collective, the others wait forever
    limit.daemon = True
    limit.start()
    torch.set_num_threads(1)
    # Keep the process group: gloo's destructor holds the GIL while it joins a thread, which may need the GIL to end.
    torch.distributed.destroy_process_group = torch.distributed.barrier  # type: ignore[assignment]
    text = embed_examples.source(NAME)
    found = embed_examples.run(NAME, embed_examples.plain(text) if which == "plain" else text, options)
    print(json.dumps(found), flush=True)
    os._exit(0)


if __name__ == "__main__":
    main(*sys.argv[1:])
