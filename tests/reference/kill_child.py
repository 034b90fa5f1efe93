"""The process of a run that may be killed: forked from one that has imported all it needs."""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import importlib.util
import os
import sys
import traceback
from pathlib import Path
from typing import Any, NoReturn

import torch

from reference.tiered_run import config_text, make_loader

__all__ = ["preload", "run_child"]

_CLI = "megatrain_tier_cli" if importlib.util.find_spec("megatrain_tier_cli") else "cli"


def preload(model: Path, folder: Path) -> None:
    """Import and compile what a run needs; starts no thread and trains nothing."""
    from megatrain.config import load_config
    from megatrain.optim import clip
    from megatrain.plan.planner import plan_run

    for name in ("main", "run", "render", "options"):
        importlib.import_module(f"{_CLI}.{name}")
    importlib.import_module("megatrain.trainer")
    torch.set_num_threads(1)
    folder.mkdir(parents=True)
    path = folder / "run.toml"
    path.write_text(config_text(folder, model))
    config = load_config(path).config
    plan = plan_run(config)
    plan.optimizer.warm_up()
    clip.warm_up()
    make_loader(config, plan)


def run_child(folder: Path) -> NoReturn:
    """Be the process that gives the command ``run`` for ``<folder>/run.toml``; what it says goes to ``log.txt``."""
    code = 1
    try:
        torch.set_num_threads(1)
        log = os.open(folder / "log.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(log, 1)
        os.dup2(log, 2)
        faulthandler.enable(2)
        print("-- start", flush=True)
        group: Any = importlib.import_module(f"{_CLI}.main").command_group
        group.main(["run", str(folder / "run.toml")])
        code = 0
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    except BaseException:
        traceback.print_exc()
    finally:
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(code)
