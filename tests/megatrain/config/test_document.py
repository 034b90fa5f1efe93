"""The reference in docs/ is that of the schema."""

from __future__ import annotations

from pathlib import Path

from megatrain.config.document import to_markdown
from megatrain.config.keys import known_keys


def test_reference_is_up_to_date() -> None:
    text = (Path(__file__).parents[3] / "docs/config.md").read_text(encoding="utf-8")
    assert text == to_markdown() + "\n", "run: python -m megatrain.config.document > docs/config.md"


def test_reference_has_every_key() -> None:
    text = to_markdown()
    for key in known_keys():
        assert f"| `{key.rsplit('.', 1)[-1]}` |" in text, key
