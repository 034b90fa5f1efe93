"""The operators that plant mistakes, compared with handwritten expected mistakes."""

from __future__ import annotations

import pytest

from mutants.operators import mistakes_in


def changed(source: str) -> dict[str, set[str]]:
    """Return every version of a source text with one mistake, by operator."""
    found: dict[str, set[str]] = {}
    for mistake in mistakes_in("file.py", source):
        if mistake.is_valid(source):
            found.setdefault(mistake.operator, set()).add(mistake.applied(source))
    return found


@pytest.mark.parametrize(
    ("source", "operator", "expected"),
    [
        ("x = a < b", "comparison", {"x = a <= b"}),
        ("x = a is not None", "comparison", {"x = a is None"}),
        ("x = a not in b", "comparison", {"x = a in b"}),
        ("x = a and b", "and/or", {"x = a or b"}),
        ("x = a and b", "dropped condition", {"x = (a)", "x = (b)"}),
        ("x = [a for a in b if c]", "dropped condition", {"x = [a for a in b if True]"}),
        ("x = a if b else c", "negated condition", {"x = a if not (b) else c"}),
        ("if not a:\n    b()", "negated condition", {"if a:\n    b()"}),
        ("x = a[0]", "index", {"x = a[-1]"}),
        ("x = a[b:]", "bound", {"x = a[(b) + 1:]"}),
        ("x = a // b", "bound", {"x = -(-(a) // (b))"}),
        ("x = 3", "bound", {"x = 4", "x = 2"}),
        ("x = 1024", "unit", {"x = (1000)"}),
        ("x = MiB", "confused name", {"x = KiB"}),
        ("x = min(a)", "confused name", {"x = max(a)"}),
        ("x = f(a, b)", "swapped arguments", {"x = f(b, a)"}),
        ("x = f(a, b=1, c=d)", "dropped argument", {"x = f(a, c=d)", "x = f(a, b=1)"}),
        ("x = a['one'], a['two']", "wrong key", {"x = a['two'], a['two']", "x = a['one'], a['one']"}),
        ("event.wait()", "dropped call", {"pass"}),
        ("x = True", "flag", {"x = False"}),
        ("x += 2 * y", "arithmetic", {"x -= 2 * y", "x += 2 + y"}),
        ("for a in b:\n    c()", "loop ends early", {"for a in b:\n    c()\n    break"}),
        ("def f() -> None:\n    a()\n    b()", "early return", {"def f() -> None:\n    a()\n    return\n    b()"}),
    ],
)
def test_each_operator_generates_the_expected_mutants(source: str, operator: str, expected: set[str]) -> None:
    assert changed(source)[operator] == expected


@pytest.mark.parametrize(
    "source",
    [
        "raise ValueError(f'{a + 1} of {b < c}')",
        "assert a < b, 3",
        '"""Return 3 < 4."""',
        "from a import min",
        "if TYPE_CHECKING:\n    import a",
        "def f(a: Literal[0]) -> dict[str, int]:\n    ...",
    ],
)
def test_messages_annotations_and_imports_are_not_mutated(source: str) -> None:
    assert not changed(source)


def test_arguments_of_a_symmetric_function_are_not_swapped() -> None:
    assert "swapped arguments" not in changed("x = max(a, b)")


def test_offsets_count_characters_not_bytes() -> None:
    source = 'x = "µ", a < b'
    assert changed(source)["comparison"] == {'x = "µ", a <= b'}


def test_a_diff_shows_the_line() -> None:
    source = "a = 1\nb = c < d\n"
    (mistake,) = [each for each in mistakes_in("file.py", source) if each.operator == "comparison"]
    assert mistake.line == 2
    assert "-b = c < d\n+b = c <= d\n" in mistake.diff(source)
