"""A loss that the engine does not know works with full logits and with parts of the vocabulary, in every order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from megatrain.base.errors import UnsupportedModelError
from megatrain.converters.spec import build_graph
from megatrain.engine.device.host_io import read_numbers
from megatrain.engine.head.cross_entropy import RunningSoftmax
from megatrain.engine.head.loss import Loss, MicroBatchLoss, PartialMean, RowsLoss, mean_metrics
from megatrain.engine.head.objective import Objective
from megatrain.trace.trace import trace_visits
from oracles.families import padded_batches, tiny_config
from oracles.huggingface import build_model
from oracles.memory_access import MemoryAccess
from oracles.runners import layer_runner

pytestmark = pytest.mark.usefixtures("one_thread")

ROWS, COLUMNS = 4, 16


class RunningFocal(RunningSoftmax):
    """Focal loss: ``-(1 - p)**gamma * log(p)`` for the probability ``p`` of each row's label."""

    def __init__(self, labels: Tensor, vocab_size: int, num_items: int, gamma: float) -> None:
        super().__init__(labels, vocab_size, num_items)
        self._count, self._gamma = num_items, gamma

    def loss(self) -> Tensor:
        log_p = self.log_probs()
        missing = 1 - log_p.exp()
        # The derivative with respect to each log-probability scales the gradients of cross entropy.
        slope = missing**self._gamma - self._gamma * missing ** (self._gamma - 1) * log_p.exp() * log_p
        self.weigh(slope / self._count)
        return -(missing**self._gamma * log_p).sum() / self._count

    def gradient(self, logits: Tensor, start: int) -> Tensor:
        self.loss()
        return super().gradient(logits, start)


@dataclass(frozen=True)
class Focal(Loss, MicroBatchLoss):
    """Focal loss, which evaluates each row separately."""

    gamma: float = 2.0

    @property
    def compares_rows(self) -> bool:
        return False

    @property
    def refusal(self) -> str:
        return "in whose place no focal loss can be put"

    def for_micro_batch(self, host: Mapping[str, Tensor], placed: Mapping[str, Tensor], size: object) -> Focal:
        return self

    def for_rows(self, labels: Tensor, first: int, *, vocab_size: int, num_items: int, in_parts: bool) -> RowsLoss:
        return RunningFocal(labels, vocab_size, num_items, self.gamma)


def test_a_loss_needs_nothing_by_default() -> None:
    class Plain(Loss):
        pass

    class PlainRows(MicroBatchLoss):
        pass

    loss = Plain()
    figures = (loss.refusal, loss.compares_rows, loss.needs_reference, loss.token_nbytes, loss.row_nbytes)
    assert figures == ("", False, False, 0, 0)
    assert loss.read({}, torch.empty(0), torch.empty(0)) == loss.synthetic_inputs(3, torch.device("cpu")) == {}
    assert loss.size_of_step([], []) is None
    assert not PlainRows().compares_rows
    with pytest.raises(AssertionError, match=r"^PlainRows does not compare rows$"):
        PlainRows().compare([])


@dataclass(frozen=True)
class Likeliest(Loss):
    """Loss that compares rows: it weighs each row by its share of the micro-batch's probabilities."""

    @property
    def compares_rows(self) -> bool:
        return True

    def read(self, batch: Mapping[str, Tensor], shifted: Tensor, positions: Tensor) -> dict[str, Tensor]:
        return {"count": torch.tensor([float(len(positions))])}

    def synthetic_inputs(self, num_rows: int, device: torch.device) -> dict[str, Tensor]:
        return {"count": torch.zeros(1, device=device)}

    def size_of_step(self, micro_batches: Sequence[Mapping[str, Tensor]], shifted: Sequence[Tensor]) -> int:
        return len(micro_batches)

    def for_micro_batch(self, host: Mapping[str, Tensor], placed: Mapping[str, Tensor], size: object) -> MicroBatchLoss:
        return _LikeliestRows(placed["count"], size if isinstance(size, int) else 1)


@dataclass(frozen=True)
class _LikeliestRows(MicroBatchLoss):
    count: Tensor
    num_micro_batches: int

    @property
    def compares_rows(self) -> bool:
        return True

    def for_rows(self, labels: Tensor, first: int, *, vocab_size: int, num_items: int, in_parts: bool) -> RowsLoss:
        return RunningSoftmax(labels, vocab_size, 1)

    def compare(self, rows: Sequence[RowsLoss]) -> tuple[Tensor, Sequence[PartialMean]]:
        softmaxes = [each for each in rows if isinstance(each, RunningSoftmax)]
        log_probs = torch.cat([each.log_probs() for each in softmaxes]).requires_grad_()
        with torch.enable_grad():
            loss = -log_probs.logsumexp(0) / self.num_micro_batches
        (gradient,) = torch.autograd.grad(loss, log_probs)
        sizes = [len(each.log_probs()) for each in softmaxes]
        for each, own in zip(softmaxes, gradient.split(sizes), strict=True):
            each.weigh(-own)
        return loss.detach(), [PartialMean("rows", self.count, 1)]


def step(loss: Loss, **options: Any) -> tuple[float, dict[str, float], dict[str, Tensor]]:
    config = tiny_config("llama")
    graph = build_graph(config)
    access = MemoryAccess(graph, dict(build_model(config).named_parameters()), torch.float32)
    objective = Objective(loss)
    columns = options.pop("head_columns", COLUMNS)
    trace = trace_visits(graph, 2, 12, torch.float32, objective=objective, head_rows=ROWS, head_columns=columns)
    runner = layer_runner(
        graph,
        access,
        device="cpu",
        head_rows=ROWS,
        head_columns=columns,
        objective=objective,
        trace=trace,
        **options,
    )
    queued = runner.queue(padded_batches())
    means = mean_metrics(queued.metrics)
    return sum(read_numbers(queued.terms)), means, access.finish()


def expected_step(of_rows: Any) -> tuple[float, dict[str, Tensor]]:
    """Return loss and gradients of the full logits. ``of_rows`` maps a micro-batch's log-probabilities to a loss."""
    model, total = build_model(tiny_config("llama")), torch.zeros(())
    for batch in padded_batches():
        inputs = {name: tensor for name, tensor in batch.items() if name != "labels"}
        labels = batch["labels"][:, 1:]
        log_probs = model(**inputs, use_cache=False).logits[:, :-1].float().log_softmax(-1)
        chosen = labels != -100
        total = total + of_rows(log_probs[chosen].gather(1, labels[chosen].unsqueeze(1)).squeeze(1))
    total.backward()
    return float(total.detach()), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


def num_items() -> int:
    return sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in padded_batches())


LOSSES: dict[str, tuple[Loss, Any]] = {
    "each row by itself": (Focal(), lambda log_p: -((1 - log_p.exp()) ** 2 * log_p).sum() / num_items()),
    "rows compared": (Likeliest(), lambda log_p: -log_p.logsumexp(0) / len(padded_batches())),
}


@pytest.mark.parametrize("name", LOSSES)
def test_custom_loss_needs_only_one_file(name: str) -> None:
    loss, of_rows = LOSSES[name]
    expected, gradients = expected_step(of_rows)
    found, figures, own = step(loss)
    assert found == pytest.approx(expected, rel=1e-5)
    assert set(own) == set(gradients)
    largest = max(float(gradient.abs().max()) for gradient in gradients.values())
    for parameter, gradient in gradients.items():
        assert torch.allclose(own[parameter], gradient, rtol=1e-4, atol=2e-6 * largest), parameter
    assert figures == ({} if name == "each row by itself" else {"rows": num_items() / len(padded_batches())})
    for options in ({"order": "micro_batch"}, {"is_part_major": True}):
        again, same, bits = step(loss, **options)
        assert again == found and same == figures
        assert all(torch.equal(bits[parameter], gradient) for parameter, gradient in own.items())
    assert step(loss, head_columns=0)[0] == pytest.approx(expected, rel=1e-5)


def test_model_with_a_custom_loss_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("megatrain.engine.forward.plan_head", lambda graph: None)
    with pytest.raises(UnsupportedModelError, match="its own loss function, in whose place no focal loss can be put"):
        trace_visits(build_graph(tiny_config("llama")), 1, 8, torch.float32, objective=Objective(Focal()))


def test_mean_of_a_figure_divides_by_its_count() -> None:
    """This includes a count of one. A figure without examples is 0, not NaN."""
    figures = [PartialMean("a", 3.0, 1), PartialMean("b", torch.tensor(3.0), 1), PartialMean("b", 4.0, 3)]
    assert mean_metrics([*figures, PartialMean("c", 0.0, 0)]) == {"a": 3.0, "b": 7 / 4, "c": 0.0}
