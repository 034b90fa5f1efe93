"""Training on a teacher's scores: loss and gradients match plain torch, and a resumed run has the same losses."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from fakes.rates import make_machine
from megatrain.base.batch_keys import TEACHER_KEYS
from megatrain.base.errors import ConfigError
from megatrain.checkpoint.resume import ConfigChangedError
from megatrain.config import load_config
from megatrain.converters.spec import build_graph
from megatrain.data.rows_report import DataError
from megatrain.engine.head.objective import Objective
from megatrain.engine.head.vocabulary import vocabulary_ranges
from megatrain.extras.scoring import Scorer
from megatrain.machine.profiles import LoadedProfile
from megatrain.plan import attempts
from megatrain.plan.budgets import teacher_bytes
from megatrain.plan.estimate import estimate_step
from megatrain.plan.planner import plan_run
from megatrain.tasks.distillation import Distillation, RunningDistillation, TeacherRows
from megatrain.trace.trace import trace_visits
from megatrain.training.resolve import resolve
from megatrain.training.trainer import Trainer
from oracles.families import VOCAB, padded_batches, tiny_config
from oracles.huggingface import build_model
from oracles.memory_access import MemoryAccess
from oracles.runners import layer_runner
from oracles.tiered_run import EXAMPLES, config_text
from oracles.whole_run import train_whole
from tiered.units import PAGE_BYTES, round_up

Rest = Literal["bucket", "ignore", "renormalize"]
RESTS: tuple[Rest, ...] = ("bucket", "ignore", "renormalize")
K = 6


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def teacher_of(shape: Sequence[int], temperature: float, seed: int = 5, num_words: int = VOCAB) -> tuple[Tensor, ...]:
    """Return a random teacher's top tokens, their log-probabilities, and the log of the others' total probability."""
    logits = 3 * torch.randn(*shape, num_words, generator=torch.Generator().manual_seed(seed))
    log_probs = (logits / temperature).log_softmax(-1)
    top = log_probs.topk(K)
    return top.indices.int(), top.values, log_probs.scatter(-1, top.indices, -torch.inf).logsumexp(-1)


def plain_loss(logits: Tensor, labels: Tensor, teacher: tuple[Tensor, ...], spec: Distillation) -> Tensor:
    """Return the loss of docs/teachers.md, summed over tokens instead of averaged, in plain torch and fp64."""
    ids, log_p, log_rest = teacher[0].long(), teacher[1].double(), teacher[2].double()
    student = (logits.double() / spec.temperature).log_softmax(-1)
    of_top = student.gather(-1, ids)
    if spec.rest == "renormalize":
        log_p = log_p - log_p.logsumexp(-1, keepdim=True)
    soft = (log_p.exp() * (log_p - of_top)).sum(-1)
    if spec.rest == "bucket":
        inside = torch.zeros_like(student, dtype=torch.bool).scatter(-1, ids, True)
        rest = student.masked_fill(inside, -torch.inf).logsumexp(-1)
        soft = soft + log_rest.exp() * (log_rest - rest)
    hard = torch.nn.functional.cross_entropy(logits.double(), labels, reduction="none")
    return (spec.alpha * hard + (1 - spec.alpha) * spec.temperature**2 * soft).sum()


@pytest.mark.parametrize("rest", RESTS)
@pytest.mark.parametrize(("temperature", "alpha"), [(1.0, 0.0), (2.5, 0.3)])
def test_chunked_logits_match_plain_torch_loss_and_gradient(rest: Rest, temperature: float, alpha: float) -> None:
    rows, spec = 9, Distillation(temperature, alpha, rest)
    generator = torch.Generator().manual_seed(1)
    logits = 4 * torch.randn(rows, VOCAB, generator=generator)
    labels = torch.randint(VOCAB, (rows,), generator=generator)
    teacher = teacher_of((rows,), temperature)
    whole = logits.clone().requires_grad_()
    loss = plain_loss(whole, labels, teacher, spec) / 7
    loss.backward()
    for columns in (VOCAB, 16):
        running = RunningDistillation(labels, TeacherRows(*teacher), VOCAB, 7, spec)
        ranges = vocabulary_ranges(VOCAB, columns)
        for start, stop in ranges:
            running.add(logits[:, start:stop], start)
        assert float(running.loss()) == pytest.approx(float(loss.detach()), rel=1e-5)
        found = torch.cat([running.gradient(logits[:, start:stop], start) for start, stop in ranges], 1)
        torch.testing.assert_close(found, whole.grad, rtol=1e-4, atol=1e-6)


def test_scores_of_the_whole_vocabulary_give_no_nan() -> None:
    """If the teacher's scores cover every vocabulary entry, the bucket for the rest is empty, and no result is NaN."""
    logits = torch.randn(4, K, generator=torch.Generator().manual_seed(2))
    teacher = teacher_of((4,), 1.0, num_words=K)
    assert torch.isneginf(teacher[2]).all()
    running = RunningDistillation(torch.zeros(4, dtype=torch.long), TeacherRows(*teacher), K, 4, Distillation())
    running.add(logits, 0)
    whole = logits.clone().requires_grad_()
    p = teacher[1].exp()
    loss = (p * (teacher[1] - whole.log_softmax(-1).gather(1, teacher[0].long()))).sum() / 4
    loss.backward()
    assert float(running.loss()) == pytest.approx(float(loss.detach()), rel=1e-5)
    torch.testing.assert_close(running.gradient(logits, 0), whole.grad, rtol=1e-5, atol=1e-6)


def with_teacher(batches: Sequence[Mapping[str, Tensor]], temperature: float) -> list[dict[str, Tensor]]:
    return [
        {**batch, **dict(zip(TEACHER_KEYS, teacher_of(batch["labels"].shape, temperature, seed), strict=True))}
        for seed, batch in enumerate(batches)
    ]


@pytest.mark.parametrize(
    ("family", "options"),
    [
        ("llama", {"head_columns": 16}),
        ("llama", {"head_columns": 16, "is_part_major": True}),
        ("gemma2", {"head_columns": 16}),  # caps its logits, and its head uses the embedding's weight
        ("gpt2", {"head_columns": 0}),
        ("mixtral", {"head_columns": 16}),
    ],
)
def test_every_gradient_matches_plain_torch(family: str, options: dict[str, Any]) -> None:
    config = tiny_config(family)
    spec = Distillation(2.0, 0.25, "bucket", K)
    objective = Objective(spec)
    batches = with_teacher(padded_batches(), 2.0)
    model = build_model(config)
    graph = build_graph(config)
    access = MemoryAccess(graph, dict(model.named_parameters()), torch.float32)
    columns = {key: value for key, value in options.items() if key != "is_part_major"}
    trace = trace_visits(graph, 2, 12, torch.float32, objective=objective, head_rows=4, **columns)
    runner = layer_runner(
        graph,
        access,
        device="cpu",
        head_rows=4,
        objective=objective,
        trace=trace,
        **options,
    )
    loss, found = runner.forward_backward(batches, seed=1).loss, access.finish()
    num_items = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in batches)
    expected = 0.0
    for batch in batches:
        inputs = {key: value for key, value in batch.items() if key not in ("labels", *TEACHER_KEYS)}
        logits = model(**inputs, use_cache=False).logits[:, :-1]
        labels = batch["labels"][:, 1:]
        chosen = labels != -100
        teacher = tuple(batch[key][:, :-1][chosen] for key in TEACHER_KEYS)
        total = plain_loss(logits[chosen], labels[chosen], teacher, spec) / num_items
        total.backward()
        expected += float(total.detach())
    assert loss == pytest.approx(expected, rel=2e-6)
    noise = 1e-7 * max(float(p.grad.abs().max()) for p in model.parameters() if p.grad is not None)
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            error = (found[name] - parameter.grad).abs().max()
            assert error <= max(noise, 2e-5 * parameter.grad.abs().max()), (name, float(error))


# -- runs -------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def scores(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Score the text that the runs train on, store the scores in both file formats, and return their folder."""
    folder = tmp_path_factory.mktemp("scores")
    path = folder / "score.toml"
    path.write_text(distill_text(folder, tiny_model, None))
    changes = ["score.top_k=8", "score.temperature=2.0", 'score.formats=["parquet","zarr"]']
    return Scorer(load_config(path, overrides=changes).config).run().folder


def distill_text(folder: Path, model: Path, scores: Path | None, table: str = "", **options: Any) -> str:
    text = config_text(folder, model, **options)
    if scores is None:
        return text.replace('task = "pretrain"', 'task = "sft"')
    text = text.replace('task = "pretrain"', 'task = "distill"')
    return text + f'[distill]\nscores = "{scores}"\ntemperature = 2.0\nalpha = 0.25\n{table}\n'


def test_plan_includes_the_teacher_scores(
    tiny_model: Path, scores: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "run.toml"
    path.write_text(distill_text(tmp_path, tiny_model, scores))
    trainer = Trainer(load_config(path).config)
    plan, batch = trainer.plan, next(trainer.make_loader()).micro_batches
    nbytes = sum(micro_batch[key].nbytes for micro_batch in batch for key in TEACHER_KEYS)
    assert teacher_bytes(plan.run) == nbytes > 0
    monkeypatch.setattr(attempts, "teacher_bytes", lambda run: 0)
    without = plan_run(plan.run)
    room = plan.placement.workspace_bytes["ram"] - without.placement.workspace_bytes["ram"]
    assert room == round_up(nbytes, PAGE_BYTES)
    # The teacher's scores arrive with the rows and use no link. The loss needs more operations per logit.
    path.write_text(config_text(tmp_path, tiny_model))
    plain = plan_run(resolve(load_config(path).config))
    predicted = [estimate_step(each, each.shape, LoadedProfile(make_machine(tmp_path))) for each in (plan, plain)]
    on_links = [{name: s for name, s in each.seconds.items() if name not in ("compute", "host")} for each in predicted]
    assert on_links[0] == on_links[1] and on_links[0]
    assert predicted[0].seconds["compute"] > predicted[1].seconds["compute"] > 0


def test_distillation_loss_decreases_and_resumes_exactly(tiny_model: Path, scores: Path, tmp_path: Path) -> None:
    def train(folder: Path, *changes: str) -> list[float]:
        text = distill_text(folder, EXAMPLES / "quickstart/model", scores)
        wanted = ["model.train_from_scratch=true", "optimizer.learning_rate=3e-3", "checkpoint.save_steps=3", *changes]
        return [step.loss for step in train_whole(folder, text, overrides=wanted).told.steps]

    whole = train(tmp_path / "a", "training.max_steps=6")
    assert whole[-1] < whole[0] - 0.1
    first = train(tmp_path / "b", "training.max_steps=3")
    rest = train(tmp_path / "b", "training.max_steps=6")
    assert [*first, *rest] == whole
    with pytest.raises(ConfigChangedError, match="top_k"):
        train(tmp_path / "b", "training.max_steps=7", "distill.top_k=3")
    # With fewer of the teacher's tokens, the loss is different.
    assert train(tmp_path / "c", "training.max_steps=1", "distill.top_k=3")[0] != whole[0]


def test_mismatched_scores_raise_clear_errors(tiny_model: Path, scores: Path, tmp_path: Path) -> None:
    def load(*changes: str, table: str = "", given: Path = scores) -> Any:
        path = tmp_path / "run.toml"
        path.write_text(distill_text(tmp_path, tiny_model, given, table))
        return load_config(path, overrides=changes).config

    def refused(text: str, *changes: str, given: Path = scores) -> None:
        with pytest.raises((ConfigError, DataError), match=text):
            Trainer(load(*changes, given=given)).make_loader()

    refused("there are no scores in", given=tmp_path / "nowhere")
    refused(r"They may be in .*scores", given=scores.parent)
    refused("distill.top_k = 9, but the scores in .* have 8 per position", "distill.top_k=9")
    refused("have temperature 2", "distill.temperature=1.0")
    refused("label_smoothing_factor", "training.label_smoothing_factor=0.1")
    refused("distill.scores has no effect", 'task="sft"')
    (tmp_path / "other.jsonl").write_text(json.dumps({"text": "Another row, which has no scores."}) + "\n")
    other = f'data.train=[{{path="{tmp_path}/other.jsonl"}}]'
    refused("1 of 1 documents of data.train have no scores.*Score exactly these", other)
    damaged = tmp_path / "damaged"
    (damaged / "parquet").mkdir(parents=True)
    kind = json.loads((scores / "scores.json").read_text())
    (damaged / "scores.json").write_text(json.dumps(kind))
    part = next((scores / "parquet").iterdir())
    refused(r"Only 0 of \d+ rows have been scored", given=damaged)
    (damaged / "parquet" / part.name).write_bytes(part.read_bytes()[:-100])
    refused("this part of the scores cannot be read.*Delete it", given=damaged)
    (damaged / "parquet" / part.name).write_bytes(part.read_bytes())
    (damaged / "scores.json").write_text(json.dumps({**kind, "tokenizer": "another"}))
    refused("another tokenizer", other, given=damaged)
