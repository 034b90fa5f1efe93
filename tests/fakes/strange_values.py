"""Random values, and the positions where they can replace a value in a valid JSON document."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from hypothesis import strategies as st

VALUES = (
    st.none() | st.booleans() | st.integers(-(1 << 70), 1 << 70) | st.floats() | st.text(max_size=5)
    | st.sampled_from(["..", "/", "../..", "\x1b[2J", "snap/00000001/m"]) | st.just([]) | st.just({}) | st.just([[[]]])
)  # fmt: skip


def places_in(tree: Any) -> Iterator[tuple[Any, Any]]:
    """Yield (container, key or index) of each value in a JSON tree. A container is a mapping or a list."""
    for key, value in list(tree.items() if isinstance(tree, dict) else enumerate(tree)):
        yield tree, key
        if isinstance(value, (dict, list)):
            yield from places_in(value)
