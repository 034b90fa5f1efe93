"""Parsing and formatting of sizes, durations and rates."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiered import GB, GiB, KiB, MiB, format_size, parse_size, units
from tiered.units import format_duration, format_rate, parse_duration, round_up


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [("110GiB", 110 * GiB), ("110 GB", 110 * GB), ("1.5KiB", 1536), ("4_096b", 4096), (" 2mib ", 2 * MiB), ("0B", 0)],
)
def test_parse_size(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize(
    ("text", "advice"),
    [("110", 'Write "110GiB"'), ("ten GiB", "is not a size"), ("5 GX", "not a unit"), ("-1GiB", "size")],
)
def test_invalid_size_is_refused(text: str, advice: str) -> None:
    with pytest.raises(ValueError, match=advice):
        parse_size(text)


def test_format_size_uses_the_largest_unit_of_one_or_more() -> None:
    assert format_size(1.5 * GiB) == "1.50 GiB" and format_size(KiB) == "1.00 KiB"
    assert "B" in format_size(0) and "KiB" not in format_size(1023)


def test_durations_and_rates_are_parsed_and_formatted() -> None:
    assert [parse_duration(text) for text in ("45min", "90s", "2h", "0.5 d")] == [2700, 90, 7200, 43200]
    with pytest.raises(ValueError, match="is not a duration"):
        parse_duration("5 GiB")
    assert [format_duration(s) for s in (0, 0.0042, 0.42, 12.34, 185, 60240)] == [
        "0.00 s",
        "4.2 ms",
        "0.42 s",
        "12.3 s",
        "3m05s",
        "16h44m",
    ]
    assert format_rate(2.5e9) == "2.50 GB/s"


@given(nbytes=st.integers(0, 2**60), multiple=st.integers(1, 2**30))
def test_round_up_is_the_least_multiple(nbytes: int, multiple: int) -> None:
    rounded = round_up(nbytes, multiple)
    assert rounded % multiple == 0 and nbytes <= rounded < nbytes + multiple
    assert units.PAGE_BYTES == 4096
