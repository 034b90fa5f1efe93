"""What the suites need to know of the tier of examples/tiers/object_store_tier.py, wherever its objects are."""

from __future__ import annotations

import errno
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any
from unittest import mock

import tiered
from reference.example_files import load_example

module = load_example("tiers/object_store_tier.py")


class Objects:
    """Objects in memory, in parts of 48 KiB."""

    takes_copies = False
    url = "memory://bucket/scratch"
    storage_options: Mapping[str, Any] = MappingProxyType({})

    def make_tier(self, capacity_bytes: int) -> tiered.Tier:
        tier: tiered.Tier = module.ObjectStoreTier(
            self.url, capacity_bytes, part_bytes=48 * tiered.KiB, storage_options=self.storage_options
        )
        return tier

    @contextmanager
    def failing(self, fast: tiered.Tier, slow: tiered.Tier) -> Iterator[None]:
        down = OSError(errno.ECONNRESET, "Connection reset by peer")
        files = slow._files  # type: ignore[attr-defined]
        with mock.patch.multiple(files, pipe_file=mock.Mock(side_effect=down), cat_file=mock.Mock(side_effect=down)):
            yield
