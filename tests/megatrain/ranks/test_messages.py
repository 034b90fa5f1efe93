"""Messages between ranks: the project's objects survive a round trip, and foreign bytes execute nothing."""

from __future__ import annotations

import json
import math
import pickle
import struct
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from megatrain.base.errors import ConfigError
from megatrain.checkpoint.best import BestEvaluation
from megatrain.ranks.messages import MessageError, decode, encode
from megatrain.ranks.world import WorldError

PLAIN = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary()
HASHABLE = st.recursive(PLAIN, lambda inner: st.tuples(inner, inner) | st.frozensets(inner, max_size=3), max_leaves=6)
TREES = st.recursive(
    PLAIN,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.tuples(inner, inner)
        | st.dictionaries(HASHABLE, inner, max_size=4)
        | st.sets(HASHABLE, max_size=3)
    ),
    max_leaves=20,
)


@given(TREES)
def test_plain_values_come_back_with_their_types(tree: object) -> None:
    found = decode(encode(tree))
    assert found == tree
    assert repr(type(found)) == repr(type(tree))


def test_nonfinite_numbers_and_negative_zero_round_trip() -> None:
    nan, infinity = decode(encode([math.nan, -math.inf]))
    assert math.isnan(nan)
    assert infinity == -math.inf
    assert math.copysign(1.0, decode(encode(-0.0))) == -1.0


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.int64, torch.bool, torch.uint8])
@pytest.mark.parametrize("shape", [(), (0,), (3,), (2, 3)])
def test_tensors_and_arrays_keep_their_bits(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    tensor = torch.arange(math.prod(shape)).reshape(shape).to(dtype)
    array = np.arange(math.prod(shape), dtype=np.float32).reshape(shape)
    first, found, number, other = decode(encode(("before", tensor, np.float64(0.1), array)))
    assert first == "before"
    assert found.dtype == dtype
    assert torch.equal(found, tensor)
    assert isinstance(number, np.float64)
    assert number == 0.1
    assert other.dtype == array.dtype
    assert np.array_equal(other, array)
    other[...] = 1  # the array is writable


def test_project_records_paths_and_errors_round_trip() -> None:
    best = BestEvaluation("loss", 0.25, 7, num_worse=1)
    assert decode(encode({"best": (best, Path("a/b"))})) == {"best": (best, Path("a/b"))}
    error = decode(encode(WorldError("no port")))
    assert type(error) is WorldError
    assert error.args == ("no port",)
    assert type(decode(encode(ZeroDivisionError("division by zero")))) is ZeroDivisionError


def test_an_error_with_attributes_comes_back_with_them() -> None:
    config = ConfigError.__new__(ConfigError)
    config.args = ("two problems", object())
    config.note = ["first", "second"]  # type: ignore[attr-defined]
    found = decode(encode(config))
    assert type(found) is ConfigError
    assert found.args[0] == "two problems"
    assert found.args[1].startswith("<object")  # unsendable objects become text, so the error arrives
    assert found.note == ["first", "second"]


def test_an_error_of_another_package_keeps_its_name() -> None:
    found = decode(encode(torch.OutOfMemoryError("too much")))
    assert type(found) is RuntimeError
    assert str(found) == "OutOfMemoryError: too much"


def test_unsendable_value_is_named() -> None:
    value = object()
    with pytest.raises(TypeError) as caught:
        encode([value])
    assert str(caught.value) == f"ranks cannot send each other a value of builtins.object: {value!r}"


def test_a_message_is_json_followed_by_aligned_arrays() -> None:
    found = encode(
        [(b"abc", Path("a")), {"k": np.array([1.5, 2.5], np.float32)}, torch.tensor([7, 8], dtype=torch.int16)]
    )
    tree = [
        {"tuple": [{"bytes": 3}, {"path": "a"}]},
        {"map": [["k", {"array": ["<f4", [2], 8, False]}]]},
        {"tensor": ["int16", [2], 4]},
    ]
    text = json.dumps(tree, separators=(",", ":")).encode()
    text_and_padding = text + bytes(-len(text) % 8)
    arrays = b"abc" + bytes(5) + struct.pack("<2f", 1.5, 2.5) + struct.pack("<2h", 7, 8) + bytes(4)
    assert found == struct.pack("<Q", len(text)) + text_and_padding + arrays


class Attack:
    """Object that creates a file when its pickle is loaded."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return (Path.touch, (self.path,))


def test_a_pickle_is_not_loaded(tmp_path: Path) -> None:
    with pytest.raises(MessageError):
        decode(pickle.dumps(Attack(tmp_path / "ran")))
    assert not (tmp_path / "ran").exists()


def message(tree: object) -> bytes:
    text = json.dumps(tree).encode()
    return struct.pack("<Q", len(text)) + text


@dataclass
class OwnRecord:
    name: str


@pytest.mark.parametrize(
    "tree",
    [
        {"record": [["subprocess", "Popen"], [["args", "true"]]]},
        {"record": [["os", "system"], []]},
        {"record": [["megatrain.ranks.launch", "subprocess"], []]},  # imported by the module, not defined in it
        {"record": [["megatrain.ranks.launch", "subprocess.Popen"], []]},
        {"record": [["megatrain.ranks.launch", "launch"], []]},
        {"record": [["megatrain.ranks.world", "Path"], []]},
        {"record": [["megatrain.checkpoint.best", "BestEvaluation"], [["__class__", "x"]]]},
        {"record": [[OwnRecord.__module__, "OwnRecord"], [["name", "x"]]]},
        {"named": [["megatrain.checkpoint.best", "BestEvaluation"], []]},
        {"enum": [["megatrain.checkpoint.best", "BestEvaluation"], "x"]},
        {"error": [["builtins", "eval"], ["1"], []]},
        {"error": [["builtins", "SystemExit"], ["1"], []]},
        {"error": [["builtins", "KeyboardInterrupt"], [], []]},
        {"array": ["|O", [1], 8, False]},
        {"array": ["<f8", [4], 32, False]},  # longer than the message
        {"array": ["<f8", [1], -8, False]},
        {"tensor": ["float32", [2], 8]},
        {"tensor": ["float32", [2], 0]},  # the shape needs more bytes
        {"array": ["<f8", [2], 0, False]},
        {"record": [["megatrain.no_such_module", "BestEvaluation"], []]},
        {"tensor": ["load", [1], 0]},
        {"bytes": 10**18},
        {"tuple": 3},
        {"no_such": []},
        {"__class__": []},
        {"tuple": [], "map": []},
        {},
    ],
)
def test_invalid_messages_are_refused(tree: object) -> None:
    with pytest.raises(MessageError):
        decode(message(tree))


@given(st.binary(max_size=200))
def test_any_bytes_are_a_message_or_refused(data: bytes) -> None:
    try:
        decode(data)
    except MessageError:
        return
    assert len(data) >= 8


@given(TREES, st.data())
def test_a_damaged_message_is_read_or_refused(tree: object, data: st.DataObject) -> None:
    whole = bytearray(encode({"of": tree, "array": np.arange(3)}))
    at = data.draw(st.integers(0, len(whole) - 1))
    whole[at] ^= data.draw(st.integers(1, 255))
    try:
        decode(whole[: data.draw(st.integers(0, len(whole)))])
    except MessageError:
        return


def test_deep_nesting_is_refused() -> None:
    with pytest.raises(MessageError):
        decode(message(None)[:0] + struct.pack("<Q", 200_000) + b"[" * 100_000 + b"]" * 100_000)
