"""Trains a tiny model for two steps with GPU, RAM and NVMe tiers. Meant to run under compute-sanitizer::

    PYTORCH_NO_CUDA_MEMORY_CACHING=1 compute-sanitizer --tool memcheck --error-exitcode 9 python tests/gpu/one_step.py

Run this command in the root of the repository. It also works with ``--tool racecheck``, ``synccheck`` and
``initcheck``. Without torch's memory cache, every buffer is a separate allocation. The sanitizer therefore detects any
kernel or copy that accesses memory outside its slot.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path

sys.path[:0] = [str(Path(__file__).parents[2]), str(Path(__file__).parents[1])]
os.environ.setdefault("PYTORCH_NO_CUDA_MEMORY_CACHING", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from fakes.gpu_run import gpu_config_text, virtual_gpu  # noqa: E402
from oracles.tiered_run import run_config, write_tiny_model  # noqa: E402

STATE_ON_NVME = 'optimizer = ["nvme"]'


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--virtual", action="store_true", help="on a device in software")
    parser.add_argument("--folder", type=Path, default=None, help="for the model and the files of the run")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        model = write_tiny_model(folder / "model")
        text = gpu_config_text(folder, model, placement=STATE_ON_NVME)
        with virtual_gpu() if options.virtual else nullcontext():
            run = run_config(text, folder / "run", num_steps=2)
        print(f"{len(run.losses)} steps, losses {run.losses}")


if __name__ == "__main__":
    main()
