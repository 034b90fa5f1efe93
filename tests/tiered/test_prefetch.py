"""What the prefetcher picks: pure, so every rule is a small example."""

from __future__ import annotations

from tiered.prefetch import next_fetches
from tiered.schedule import Access, Mode, Schedule


def picks(text: str, room: int, lookahead: int | None = None, present: str = "", now: int = 0, size: int = 1) -> str:
    """Return the keys to fetch; ``text`` has one access per tick: ``a`` reads, ``A`` overwrites, ``.`` nothing."""
    accesses = []
    for tick, letter in enumerate(text):
        mode: Mode = "w" if letter.isupper() else "r"
        if letter != ".":
            accesses.append(Access(tick, letter.lower(), "ram", mode))
    fetches = next_fetches(
        Schedule(accesses), now, lookahead, {"ram": room}, lambda access: (access.key in present, size)
    )
    return "".join(access.key for access in fetches)


def test_nearest_deadline_first_while_all_fits_together() -> None:
    assert picks(".abcd", room=3) == "abc"
    assert picks(".abcd", room=9) == "abcd"
    assert picks(".abcd", room=5, size=2) == "ab"


def test_the_access_of_now_takes_room_and_is_not_fetched() -> None:
    assert picks("abcd", room=3) == "bc"


def test_what_is_there_takes_room_too() -> None:
    assert picks(".abcd", room=3, present="ab") == "c"


def test_lookahead_bounds_distinct_bytes() -> None:
    assert picks(".abcd", room=9, lookahead=2) == "ab"
    assert picks(".aabcd", room=9, lookahead=2) == "ab"
    assert picks(".abcd", room=9, lookahead=0) == ""
    assert picks(".abcd", room=9, lookahead=2, present="a") == "b"


def test_a_block_written_before_its_read_is_not_fetched() -> None:
    assert picks(".aBb", room=9) == "a"
    assert picks("Aab", room=9) == "b"
    assert picks(".aA", room=9) == "a", "the read comes first"


def test_an_overwrite_needs_room_but_no_bytes() -> None:
    assert picks(".Abc", room=2) == "b"
    assert picks(".Abc", room=9, lookahead=1) == "b"


def test_nothing_is_left_at_the_end() -> None:
    assert picks("abc", room=9, now=2) == ""
