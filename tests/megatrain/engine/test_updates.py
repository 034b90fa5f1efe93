"""Updates of layers: their factors, the threads that run them, and the copies that they leave behind."""

from __future__ import annotations

import math
import threading
from typing import Literal
from unittest import mock

import pytest
import torch

from megatrain.engine.head.token_scores import RunningTopK, TokenScores, join_scores
from megatrain.engine.tape.background import BackgroundUpdates
from megatrain.engine.tape.pieces import DecodedWeights
from megatrain.engine.tape.tape import Release, TapeStore, Use
from megatrain.engine.tape.updates import LayerScales, PendingUpdate
from megatrain.optim.base import Update

#: Squared norms of four layers, in the order of the backward.
SQUARED_NORMS = {"a": 16.0, "b": math.inf, "c": torch.tensor(0.25), "d": torch.tensor(math.nan, dtype=torch.float64)}
CLIPPED = 1 / (4 + 1e-6)  # as torch divides

Reaction = Literal["stop", "skip", "ignore"]


@pytest.mark.parametrize(
    ("nonfinite", "max_grad_norm", "expected", "skipped"),
    [
        ("stop", 1.0, [CLIPPED, None, None, None], ["b", "d"]),
        ("skip", 1.0, [CLIPPED, None, 1.0, None], ["b", "d"]),
        ("skip", 0.0, [1.0, None, 1.0, None], ["b", "d"]),
        ("ignore", 1.0, [CLIPPED, 0.0, 1.0, math.nan], []),
        ("ignore", 0.0, [1.0, 1.0, 1.0, 1.0], []),
    ],
)
def test_each_layer_has_the_factor_of_its_own_norm(
    nonfinite: Reaction, max_grad_norm: float, expected: list[float | None], skipped: list[str]
) -> None:
    scales = LayerScales(max_grad_norm, nonfinite)
    update = Update(step=3, lr=0.5)
    pending = PendingUpdate(2, update, {}, scales)
    found: list[float | None] = []
    for name, squared_norm in SQUARED_NORMS.items():
        scales.record_norm(name, squared_norm)
        own = pending.for_layout(name)
        assert own is None or (own.step, own.lr) == (3, 0.5)
        found.append(None if own is None else own.grad_scale)
    assert [value is None for value in found] == [value is None for value in expected]
    numbers = [value for value in found if value is not None]
    assert numbers == pytest.approx([value for value in expected if value is not None], nan_ok=True)
    assert (scales.skipped_layers, scales.num_used) == (skipped, len(numbers))
    assert PendingUpdate(2, update, {}).for_layout("a") is update


def test_decoded_weights_are_reserved_next_to_each_other() -> None:
    decoded, cpu = DecodedWeights(100), torch.device("cpu")
    with decoded.reserve(30, cpu) as first, decoded.reserve(70, cpu) as second:
        assert (len(first), len(second)) == (30, 70)
        assert second.data_ptr() - first.data_ptr() == 30
        with pytest.raises(AssertionError, match="weights are in use"):
            decoded.free()
    with decoded.reserve(50, cpu) as again:
        assert again.data_ptr() == first.data_ptr()
    decoded.free()
    with pytest.raises(AssertionError), decoded.reserve(101, cpu):
        pass


def test_background_updates_run_in_order_and_raise_their_error_at_the_wait() -> None:
    done: list[str] = []
    is_open = threading.Event()

    def slow() -> None:
        assert is_open.wait(60)
        done.append("a")

    def failing() -> None:
        raise ValueError("of the update")

    with BackgroundUpdates() as updates:
        updates.start(["a", "b"], slow)
        updates.start(["c"], lambda: done.append("c"))
        updates.wait_for(["x"])
        assert done == [], "no update uses the block"
        is_open.set()
        updates.wait_for(["b"])
        assert done[0] == "a" and len(updates._updates) == 1
        updates.wait()
        assert done == ["a", "c"] and not updates._updates
        updates.start(["d"], failing)
        updates.start(["e"], lambda: done.append("e"))
        with pytest.raises(ValueError, match="of the update"):
            updates.wait_for(["e"])
        updates._updates.clear()
    with pytest.raises(ValueError, match="of the update"), updates:
        updates.start(["d"], failing)
    assert not updates._updates

    def interrupted() -> None:
        with updates:
            updates.start(["d"], failing)
            raise KeyError("of the caller")

    with pytest.raises(KeyError, match="of the caller"):
        interrupted()
    assert not updates._updates


def use(key: str, release: Release, *, was_pinned: bool = False) -> Use:
    return Use(key, "r", was_pinned, not was_pinned, release, False)


def tape_store() -> tuple[mock.Mock, TapeStore]:
    """Return a recorder of the store's calls. Blocks that come from a drive also have a copy in RAM."""
    between = {("nvme", "gpu"): ("ram",)}
    store = mock.Mock(**{"tiers_between.side_effect": lambda *tiers: between.get(tiers, ())})
    return store, TapeStore(store, {"a": "nvme", "b": "ram"})


def calls(store: mock.Mock) -> list[tuple[str, ...]]:
    found = [(name, *arguments) for name, arguments, _ in store.mock_calls if name != "tiers_between"]
    store.reset_mock(side_effect=False)
    return found


def test_copies_are_pinned_until_their_next_use() -> None:
    store, tape = tape_store()
    tape.release_copies([use("a", Release.PIN), use("b", Release.PIN)], "gpu")
    assert calls(store) == [("evict", "a", "ram"), ("pin", "a", "gpu"), ("pin", "b", "gpu")]
    again = [use("a", Release.EVICT, was_pinned=True), use("b", Release.PIN, was_pinned=True)]
    tape.unpin_copies(again)
    assert calls(store) == [("unpin", "a", "gpu"), ("unpin", "b", "gpu")]
    tape.release_copies(again, "gpu")
    assert calls(store) == [("evict", "a", "gpu"), ("pin", "b", "gpu")]
    tape.evict_pinned()
    assert calls(store) == [("unpin", "b", "gpu"), ("evict", "b", "gpu")]
    tape.evict_pinned()
    assert calls(store) == []


def test_skipped_leases_pin_and_evict_as_planned() -> None:
    store, tape = tape_store()
    tape.skip_lease(use("a", Release.HOME), "gpu")
    assert calls(store) == []
    tape.skip_lease(use("a", Release.PIN), "gpu")
    tape.skip_lease(use("a", Release.PIN, was_pinned=True), "gpu")
    assert calls(store) == [("pin", "a", "gpu")]
    tape.skip_lease(use("a", Release.EVICT, was_pinned=True), "gpu")
    assert calls(store) == [("unpin", "a", "gpu"), ("evict", "a", "gpu"), ("evict", "a", "ram")]
    tape.skip_lease(use("b", Release.EVICT), "gpu")
    assert calls(store) == [("evict", "b", "gpu")]


@pytest.mark.parametrize("temperature", [1.0, 0.5])
@pytest.mark.parametrize("k", [0, 1, 3, 7])
def test_likeliest_tokens_of_parts_are_those_of_the_whole(k: int, temperature: float) -> None:
    logits = torch.randn(4, 7, generator=torch.Generator().manual_seed(1), dtype=torch.float32) * 3
    labels = torch.tensor([0, 2, 3, 6])
    running = RunningTopK(labels, k, temperature)
    for start, stop in ((0, 3), (3, 5), (5, 7)):
        running.add(logits[:, start:stop], start)
    found = running.scores()
    whole = logits.double().log_softmax(1)
    scaled = (logits.double() / temperature).log_softmax(1)
    values, ids = scaled.sort(1, descending=True)
    assert found.top_ids.tolist() == ids[:, :k].tolist() and found.top_log_probs.shape == (4, k)
    torch.testing.assert_close(found.log_probs.double(), whole.gather(1, labels.unsqueeze(1)).squeeze(1))
    torch.testing.assert_close(found.top_log_probs.double(), values[:, :k], rtol=1e-5, atol=1e-5)
    if k:
        torch.testing.assert_close(found.rest_log_probs.double(), values[:, k:].logsumexp(1), rtol=1e-4, atol=1e-5)


def test_scores_of_pieces_are_joined_in_order() -> None:
    def scores(start: int, rows: int, k: int) -> TokenScores:
        numbers = torch.arange(start, start + rows)
        ids = numbers.unsqueeze(1).expand(rows, k)
        return TokenScores(numbers.float(), ids, ids + 0.5, numbers - 0.5)

    joined = join_scores([scores(0, 0, 0), scores(1, 2, 2), scores(7, 1, 2)])
    assert joined.log_probs.tolist() == [1, 2, 7]
    assert joined.top_ids.tolist() == [[1, 1], [2, 2], [7, 7]]
    assert joined.top_log_probs.tolist() == [[1.5, 1.5], [2.5, 2.5], [7.5, 7.5]]
    assert joined.rest_log_probs.tolist() == [0.5, 1.5, 6.5]
    none = join_scores([scores(0, 0, 0)])
    assert (none.top_ids.shape, none.top_log_probs.shape, len(none.log_probs)) == ((0, 0), (0, 0), 0)
