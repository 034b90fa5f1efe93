"""Which keys may name arrays of one zarr hierarchy: no array lies inside another."""

from __future__ import annotations

from collections import Counter

from tiered.zarr_layout import DOCUMENT_NAME


class ArrayKeys:
    """The keys in use by one tier. Guarded by its lock."""

    def __init__(self, tier: str) -> None:
        self._tier = tier
        self._keys: set[str] = set()
        self._groups: Counter[str] = Counter()

    def check(self, key: str) -> None:
        """Raise ``ValueError`` if ``key`` is in use, names no folder, or lies inside a block or around one."""
        segments = key.split("/")
        if any(segment in ("", ".", "..", DOCUMENT_NAME) for segment in segments):
            raise ValueError(f"'{key}' cannot name files: no segment may be empty, '.', '..' or '{DOCUMENT_NAME}'")
        if key in self._keys:
            raise ValueError(f"tier '{self._tier}' has a slot for '{key}' already")
        inside = next((group for group in _groups_of(key) if group in self._keys), None)
        if inside is not None or self._groups[key]:
            raise ValueError(f"'{key}': a block cannot lie inside another one ('{inside or key + '/...'}')")

    def add(self, key: str) -> None:
        self._keys.add(key)
        self._groups.update(_groups_of(key))

    def remove(self, key: str) -> None:
        self._keys.remove(key)
        self._groups.subtract(_groups_of(key))


def _groups_of(key: str) -> list[str]:
    """Return every group above a key: ``a/b/c`` lies in ``a`` and ``a/b``."""
    segments = key.split("/")
    return ["/".join(segments[:end]) for end in range(1, len(segments))]
