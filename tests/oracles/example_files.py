"""Imports files from ``examples/``, which is not a package, and sets up the object-store tier for the test suites."""

from __future__ import annotations

import errno
import importlib.util
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import MappingProxyType, ModuleType
from typing import Any
from unittest import mock

import tiered

EXAMPLES = Path(__file__).parents[2] / "examples"


def load_example(name: str) -> ModuleType:
    """Import ``examples/<name>`` and return the module."""
    spec = importlib.util.spec_from_file_location(Path(name).stem, EXAMPLES / name)
    assert spec is not None and spec.loader is not None, name
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses need this entry
    spec.loader.exec_module(module)
    return module


module = load_example("extend/object_store_tier.py")


class Objects:
    """Setup of an object-store tier that keeps its objects in memory, in parts of 48 KiB."""

    takes_copies = False
    url = "memory://bucket/scratch"
    storage_options: Mapping[str, Any] = MappingProxyType({})

    def make_tier(self, capacity_bytes: int) -> tiered.Tier:
        tier: tiered.Tier = module.ObjectStoreTier(
            self.url, capacity_bytes, part_bytes=48 * tiered.KiB, storage_options=self.storage_options
        )
        return tier

    @contextmanager
    def fail_transfers(self, fast: tiered.Tier, slow: tiered.Tier) -> Iterator[None]:
        down = OSError(errno.ECONNRESET, "Connection reset by peer")
        files = slow._files  # type: ignore[attr-defined]
        with mock.patch.multiple(files, pipe_file=mock.Mock(side_effect=down), cat_file=mock.Mock(side_effect=down)):
            yield
