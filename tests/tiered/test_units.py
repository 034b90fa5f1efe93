"""Parsing and formatting of sizes, durations and rates."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tiered import GB, GiB, KiB, MiB, format_size, parse_size, units
from tiered.units import (
    TB,
    TiB,
    format_decimal_size,
    format_duration,
    format_rate,
    is_number,
    parse_duration,
    round_up,
)


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("110GiB", 110 * GiB),
        ("110 GB", 110 * GB),
        ("1.5KiB", 1536),
        ("4_096b", 4096),
        (" 2mib ", 2 * MiB),
        ("0B", 0),
        ("3TiB", 3 << 40),
        ("3TB", 3 * 10**12),
        ("3MB", 3_000_000),
        ("1_000.5KB", 1_000_500),
        ("7kb", 7000),
    ],
)
def test_parse_size(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (" 1_10 ", '1_10 has no unit. Write "110GiB" or "110GB"'),
        ("1.5", '1.5 has no unit. Write "1.5GiB" or "1.5GB"'),
        ("ten GiB", '"ten GiB" is not a size. Write for example "110GiB" or "110GB"'),
        ("-1GiB", '"-1GiB" is not a size. Write for example "110GiB" or "110GB"'),
        ("5 GX", '"GX" is not a unit of size. Use B, KiB, MiB, GiB, TiB, KB, MB, GB or TB'),
    ],
)
def test_invalid_size_is_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse_size(text)
    assert str(caught.value) == message


def test_sizes_are_formatted_in_the_largest_unit_of_one_or_more() -> None:
    sizes = (0, 1023, KiB, 1.5 * KiB, MiB - 1, MiB, 1.5 * GiB, GiB - 6 * MiB, 2.25 * TiB, 3000 * TiB, -3 * MiB, -5)
    assert [format_size(size) for size in sizes] == [
        "0 B",
        "1023 B",
        "1.00 KiB",
        "1.50 KiB",
        "1024.00 KiB",
        "1.00 MiB",
        "1.50 GiB",
        "1018.00 MiB",
        "2.25 TiB",
        "3000.00 TiB",
        "-3.00 MiB",
        "-5 B",
    ]
    decimal_sizes = (0, 12_340_000, 99_990_000, GB / 10, 5.5 * GB, 999.99 * GB, TB, 1234.5 * TB, -2 * TB)
    assert [format_decimal_size(size) for size in decimal_sizes] == [
        "0.00 MB",
        "12.34 MB",
        "99.99 MB",
        "0.10 GB",
        "5.50 GB",
        "999.99 GB",
        "1.00 TB",
        "1,234.50 TB",
        "-2.00 TB",
    ]


def test_only_ascii_digits_are_numbers() -> None:
    assert [is_number(text) for text in ("0", "007", "", "-1", "1.0", "\u00b2", "\u0663", "1a")] == [
        True,
        True,
        *[False] * 6,
    ]


def test_durations_and_rates_are_parsed_and_formatted() -> None:
    assert [parse_duration(text) for text in ("45min", "90s", "2h", "0.5 d", "1_000S")] == [2700, 90, 7200, 43200, 1000]
    for text in ("5 GiB", "h", "7"):
        with pytest.raises(ValueError) as caught:
            parse_duration(text)
        assert str(caught.value) == f'"{text}" is not a duration. Write for example "45min", "90s" or "2h"'
    durations_s = (0, 0.0042, 0.0994, 0.0995, 0.42, 9.99, 10, 12.34, 59.9, 60, 185, 3599, 3600, 60240, 360_059)
    assert [format_duration(duration_s) for duration_s in durations_s] == [
        "0.00 s",
        "4.2 ms",
        "99 ms",
        "0.10 s",
        "0.42 s",
        "9.99 s",
        "10.0 s",
        "12.3 s",
        "59.9 s",
        "1m00s",
        "3m05s",
        "59m59s",
        "1h00m",
        "16h44m",
        "100h00m",
    ]
    assert format_rate(2.5e9) == "2.50 GB/s"


@given(nbytes=st.integers(0, 2**60), multiple=st.integers(1, 2**30))
def test_round_up_is_the_least_multiple(nbytes: int, multiple: int) -> None:
    rounded = round_up(nbytes, multiple)
    assert rounded % multiple == 0 and nbytes <= rounded < nbytes + multiple
    assert units.PAGE_BYTES == 4096
