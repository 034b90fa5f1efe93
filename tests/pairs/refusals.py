"""Runs that the program refuses. Each has one combination of incompatible levels. All its other levels are plain."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path
from unittest import mock

from megatrain.base.errors import ConfigError
from pairs import factors
from pairs.factors import EXCLUSIONS, Exclusion, Row, completed
from pairs.places import Place
from pairs.runs import train


def cases() -> Iterator[tuple[Exclusion, dict[str, str]]]:
    """Yield each exclusion with an error message, once for each combination of its levels."""
    for each in EXCLUSIONS:
        if each.text:
            for levels in product(*each.levels.values()):
                yield each, dict(zip(each.levels, levels, strict=True))


def refused_row(exclusion: Exclusion, levels: Row) -> dict[str, str]:
    """Return a row with these levels, without other excluded combinations if possible."""
    others = tuple(each for each in EXCLUSIONS if each is not exclusion)
    with mock.patch.object(factors, "EXCLUSIONS", others):
        found = completed(levels)
        if found is not None:
            return found
    for other in reversed(others):  # allow only one further refusal, because the run might report any of them
        with mock.patch.object(factors, "EXCLUSIONS", tuple(each for each in others if each is not other)):
            if other.text and (found := completed(levels)) is not None:
                return found
    with mock.patch.object(factors, "EXCLUSIONS", tuple(each for each in others if not each.text)):
        found = completed(levels)
    assert found is not None, levels
    return found


def refusal_of(row: Row, place: Place, folder: Path) -> str:
    """Return the error message of a row's run, or "" if the run succeeds."""
    try:
        train(row, place, folder)
    except (AssertionError, ConfigError) as error:  # with several ranks, the message is their output
        return str(error)
    return ""
