"""Sizes and durations with units become bytes and seconds, and durations are written back exactly."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from megatrain.base.sizes import dump_duration, dump_size, parse_interval, parse_rate
from megatrain.config import Size


@pytest.mark.parametrize(
    ("text", "seconds"),
    [("45min", 2700.0), ("30s", 30.0), ("2h", 7200.0), ("1h30min", 5400.0), (" 1 h 1.5 s ", 3601.5), ("1d", 86400.0)],
)
def test_a_duration_is_read(text: str, seconds: float) -> None:
    assert parse_interval(text) == seconds


@pytest.mark.parametrize(
    ("value", "words"),
    [
        (45, '45 has no unit. Write "45min" or "45s"'),
        ("45", '"45" is not a duration. Write for example "45min"'),
        ("45 parsecs", '"45 parsecs" is not a duration'),
        ("1h30", '"1h30" is not a duration'),
        ("0min", '"0min" is not a duration above 0'),
        ("", '"" is not a duration'),
        (True, "this is not a duration"),
    ],
)
def test_invalid_duration_error_shows_valid_input(value: object, words: str) -> None:
    with pytest.raises(ValueError, match="Write") as caught:
        parse_interval(value)
    assert words in str(caught.value)


@given(st.one_of(st.integers(1, 10**9).map(float), st.floats(1e-9, 1e12)))
def test_every_duration_comes_back(seconds: float) -> None:
    assert parse_interval(dump_duration(seconds)) == seconds


@pytest.mark.parametrize("text", ["45min", "30s", "2h", "1h30min", "0.25s"])
def test_common_durations_round_trip(text: str) -> None:
    assert dump_duration(parse_interval(text)) == text


@pytest.mark.parametrize(
    ("text", "total", "expected"),
    [
        ("2GiB", 100, 2 << 30),
        ("90%", 1000, 900),
        ("auto", 1000, 1000),
        ("1.5GB", 0, 1_500_000_000),
        (" 50 % ", 10, 5),
        ("100%", 9, 9),
    ],
)
def test_size_resolves(text: str, total: int, expected: int) -> None:
    assert Size.parse(text).resolve(total) == expected


def test_auto_size_resolves_to_the_given_bytes() -> None:
    assert Size.parse("auto").resolve(1000, auto_bytes=7) == 7
    assert Size.parse("50%").resolve(1000, auto_bytes=7) == 500


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ("0%", '"0%" is not a valid share. Write more than 0% and at most "100%"'),
        ("100.1%", '"100.1%" is not a valid share. Write more than 0% and at most "100%"'),
        ("0GiB", '"0GiB" is zero. Write a size above 0'),
        (7, '7 has no unit. Write "7GiB" or "7GB"'),
        (1.5, '1.5 has no unit. Write "1.5GiB" or "1.5GB"'),
        (True, 'not a size. Write for example "110GiB", "90%" or "auto"'),
        ([], 'not a size. Write for example "110GiB", "90%" or "auto"'),
    ],
)
def test_invalid_size_error_shows_valid_input(value: object, message: str) -> None:
    with pytest.raises(ValueError, match="Write") as caught:
        Size.parse(value)
    assert str(caught.value) == message


def test_rates_are_sizes_per_second() -> None:
    assert [parse_rate(text) for text in ("2.5GB/s", " 3 MiB / s ")] == [2.5e9, 3.0 * (1 << 20)]
    for value, message in (
        (5, '5 is not a rate. Write for example "2.0GB/s"'),
        ("5GB", "'5GB' is not a rate. Write for example \"2.0GB/s\""),
        ("0GB/s", '"0GB/s" is zero. Write a rate above 0, for example "2.0GB/s"'),
    ):
        with pytest.raises(ValueError, match="Write") as caught:
            parse_rate(value)
        assert str(caught.value) == message


def test_a_size_is_written_with_the_largest_exact_unit() -> None:
    units = {"GiB": 1 << 30, "GB": 10**9, "MiB": 1 << 20, "MB": 10**6, "KiB": 1 << 10, "B": 1}
    assert [dump_size(3 * unit) for unit in units.values()] == [f"3{name}" for name in units]
    assert [dump_size(nbytes) for nbytes in (0, 5_000, 1_500_000_000)] == ["0B", "5000B", "1500MB"]
