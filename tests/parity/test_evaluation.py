"""An evaluation gives Hugging Face's loss, does not affect the training, and moves exactly the planned bytes."""

from __future__ import annotations

import html
import itertools
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from megatrain.base.layout import PART_ALIGNMENT_ELEMENTS
from megatrain.base.progress import Activity
from megatrain.config import load_config
from megatrain.converters.spec import build_graph
from megatrain.data.encoding import load_tokenizer
from megatrain.data.loader import BatchLoader
from megatrain.data.row_order import EpochOrder
from megatrain.extras.report.figures import compute_figures
from megatrain.extras.report.history import read_history
from megatrain.extras.report.page import render_page
from megatrain.extras.report.text import report_lines
from megatrain.plan.forward import plan_averages
from megatrain.plan.plan import Plan
from megatrain.plan.shortfall import DoesNotFitError
from megatrain.run.loggers import last_evaluations
from megatrain.tasks.evaluation import EvaluationSet, Evaluator, Sampler, count_pass_traffic, load_evaluation_sets
from megatrain.trace.trace import trace_visits
from megatrain.training.export import export_checkpoint
from megatrain.training.resolve import resolve_evaluation
from megatrain.training.trainer import Trainer
from oracles.families import FAMILIES, packed_batches, padded_batches, tiny_config
from oracles.huggingface import build_model, evaluate
from oracles.memory_access import MemoryAccess
from oracles.runners import StepRunner, layer_runner
from oracles.tiered_run import ALL_NVME, EXAMPLES, config_text
from oracles.whole_run import RunRecorder, WholeRun, train_whole

pytestmark = pytest.mark.usefixtures("one_thread")

Batches = Sequence[Mapping[str, torch.Tensor]]
DROPOUT = {"attn_pdrop": 0.2, "resid_pdrop": 0.2, "embd_pdrop": 0.2, "dropout": 0.2, "attention_dropout": 0.2}
PLACEMENTS: dict[str, dict[str, Any]] = {
    "RAM": {"nvme": 0},
    "NVMe": {"placement": ALL_NVME, "ram": "7MiB"},
    "mixed": {"placement": 'optimizer = ["nvme"]'},
}
NUM_STEPS = 5
#: Evaluations before the first step, after the third step and after the fifth (last) step.
EVALUATION = "eval_steps = 3\neval_on_start = true"


def make_runner(config: Any, model: Any, dtype: torch.dtype = torch.float32) -> tuple[StepRunner, MemoryAccess]:
    graph = build_graph(config, dtype=dtype)
    trace = trace_visits(graph, 2, 12, dtype)
    access = MemoryAccess(graph, dict(model.named_parameters()), dtype)
    runner = layer_runner(graph, access, device="cpu", trace=trace, head_rows=trace.head_rows and 4)
    return runner, access


def assert_equals_hugging_face(config: Any, batches: Batches, plain: Any = None) -> None:
    model = build_model(config)
    runner, access = make_runner(config, model)
    before = torch.get_rng_state()
    found = runner.evaluate(batches)
    assert torch.equal(torch.get_rng_state(), before)
    assert access.largest_num_activations == 0 and not access.finish()
    expected, num_tokens = evaluate(plain or model, batches)
    assert found.num_tokens == num_tokens
    assert math.fsum(found.terms) == pytest.approx(expected * num_tokens, rel=1e-6)
    phases = [phase for phase, _ in access.log]
    assert set(phases) == {"forward", "head"} and phases.count("head") == 1


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_every_family_matches_hugging_face_loss(family: str) -> None:
    assert_equals_hugging_face(tiny_config(family, tied=False), padded_batches())


@pytest.mark.parametrize("family", ["gpt2", "opt"])
def test_dropout_is_off(family: str) -> None:
    assert_equals_hugging_face(tiny_config(family, **DROPOUT), padded_batches())


def test_packed_documents() -> None:
    assert_equals_hugging_face(tiny_config("llama", tied=True), packed_batches())


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_evaluation_loss_excludes_router_auxiliary_loss(family: str) -> None:
    config = tiny_config(family, output_router_logits=True, router_aux_loss_coef=0.3)
    plain = build_model(tiny_config(family))
    plain.load_state_dict(build_model(config).state_dict())
    assert_equals_hugging_face(config, padded_batches(), plain)


def test_bfloat16() -> None:
    config = tiny_config("llama", tied=False)
    model = build_model(config, torch.bfloat16)
    found = make_runner(config, model, torch.bfloat16)[0].evaluate(padded_batches())
    assert math.fsum(found.terms) / found.num_tokens == pytest.approx(evaluate(model, padded_batches())[0], rel=1e-3)


def test_evaluations_leave_training_bit_identical() -> None:
    config = tiny_config("gpt2", **DROPOUT)
    runner, access = make_runner(config, build_model(config))
    loss, gradients = runner.forward_backward(padded_batches(), seed=1), access.finish()
    first = runner.evaluate(padded_batches())
    again, others = runner.forward_backward(padded_batches(), seed=1), access.finish()
    assert again == loss and all(torch.equal(others[name], gradients[name]) for name in gradients)
    assert runner.evaluate(padded_batches()) == first


def test_micro_batches_without_labels_do_not_affect_evaluation() -> None:
    config = tiny_config("llama")
    runner, _ = make_runner(config, build_model(config))
    empty = {name: tensor.clone() for name, tensor in padded_batches()[0].items()}
    empty["labels"].fill_(-100)
    assert runner.evaluate([empty, *padded_batches()]) == runner.evaluate(padded_batches())
    nothing = runner.evaluate([empty])
    assert (nothing.terms, nothing.num_tokens) == ((), 0)


def test_nan_weight_gives_nan_loss() -> None:
    config = tiny_config("llama", tied=False)
    model = build_model(config)
    with torch.no_grad():
        model.model.layers[1].mlp.up_proj.weight[3, 3] = math.nan
    found = make_runner(config, model)[0].evaluate(padded_batches())
    num_labels = sum(int((batch["labels"][:, 1:] != -100).sum()) for batch in padded_batches())
    assert math.isnan(math.fsum(found.terms)) and found.num_tokens == num_labels


# -- whole runs ------------------------------------------------------------------------------------------------


def logged(run: WholeRun) -> list[tuple[int, str, float, int]]:
    lines = [line for line in run.lines if line.get("event") == "evaluation"]
    return [(line["step"], line["name"], line["loss"], line["num_tokens"]) for line in lines]


def load_sets_of_run(run: WholeRun) -> list[EvaluationSet]:
    tokenizer = load_tokenizer(run.config.model.model_name_or_path)
    return load_evaluation_sets(resolve_evaluation(run.config), run.plan, tokenizer, lambda text: None)


def train(
    folder: Path,
    model: Path,
    placement: dict[str, Any],
    *,
    evaluation: str | None = EVALUATION,
    stop_after: int | None = None,
    stop_at: str = "",
    more: str = "",
    num_steps: int = NUM_STEPS,
) -> WholeRun:
    folder.mkdir(exist_ok=True)
    text = config_text(folder, model, **{"nvme": 1, **placement})
    text = text.replace("[training]\n", f"[training]\nmax_steps = {num_steps}\n")
    text += f'[checkpoint]\nmin_free_disk = "0MiB"\n{more}\n'
    if evaluation is not None:
        book = (EXAMPLES / "quickstart" / "loomings.txt").read_text()
        (folder / "held_out.txt").write_text(book[-3000:])
        (folder / "start.txt").write_text(book[:500])
        text += '[[data.eval]]\npath = "held_out.txt"\n[[data.eval]]\nname = "the start"\npath = "start.txt"\n'
        text += f"[evaluation]\n{evaluation}\n"
    return train_whole(folder, text, stop_after=stop_after, stop_at=stop_at)


@pytest.fixture(scope="module")
def without(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> WholeRun:
    return train(tmp_path_factory.mktemp("without"), tiny_model, PLACEMENTS["RAM"], evaluation=None)


@pytest.fixture(scope="module")
def in_ram(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> WholeRun:
    return train(tmp_path_factory.mktemp("in_ram"), tiny_model, PLACEMENTS["RAM"])


def test_evaluations_do_not_affect_training_and_read_every_weight_from_drives(
    tiny_model: Path, tmp_path: Path, without: WholeRun, in_ram: WholeRun
) -> None:
    run = train(tmp_path / "w", tiny_model, PLACEMENTS["NVMe"])
    for each in (in_ram, run):
        assert each.losses == without.losses and each.weights == without.weights
        assert [metrics.step for metrics in each.told.evaluations] == [0, 0, 3, 3, 5, 5]
    assert logged(run) == logged(in_ram)
    assert run.plan.totals == train_plan(tmp_path / "w", without).totals
    weights = sum(block.nbytes for block in run.plan.program.blocks.values() if block.kind == "weights")
    assert sum(n for link, n in count_pass_traffic(run.plan, 1).items() if link.startswith("nvme->")) >= weights


#: Generates samples for three rows of each set, with two rows per micro-batch.
SAMPLES = EVALUATION + "\npredict_with_generate = true\nmax_predict_samples = 3\nmax_new_tokens = 5"


@pytest.fixture(scope="module")
def sampled(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> WholeRun:
    return train(tmp_path_factory.mktemp("sampled"), tiny_model, PLACEMENTS["RAM"], evaluation=SAMPLES)


def test_samples_match_transformers(sampled: WholeRun, in_ram: WholeRun) -> None:
    assert [metrics.step for metrics in sampled.told.evaluations] == [0, 0, 3, 3, 5, 5]
    assert logged(sampled) == logged(in_ram)
    model = AutoModelForCausalLM.from_pretrained(sampled.folder / "out/final", dtype=torch.float32)
    tokenizer = load_tokenizer(sampled.config.model.model_name_or_path)
    for each, metrics in zip(load_sets_of_run(sampled), sampled.told.evaluations[-2:], strict=True):
        dataset = each.loader.dataset
        starts = dataset.starts[:4]
        rows = [torch.from_numpy(dataset.tokens[a:b].astype("int64")) for a, b in itertools.pairwise(starts)]
        prompts, answers = [row[: len(row) // 2] for row in rows], [row[len(row) // 2 :][:5] for row in rows]
        expected: list[str] = []
        for pair in (prompts[:2], prompts[2:]):
            width = max(map(len, pair))
            ids = torch.stack([torch.nn.functional.pad(row, (width - len(row), 0)) for row in pair])
            mask = torch.stack([torch.arange(width) >= width - len(row) for row in pair]).long()
            made = model.generate(ids, attention_mask=mask, max_new_tokens=5, do_sample=False, pad_token_id=0)
            expected += tokenizer.batch_decode(made[:, width:], skip_special_tokens=True)
        assert [sample.generated for sample in metrics.samples] == expected
        assert [sample.reference for sample in metrics.samples] == tokenizer.batch_decode(answers)
        assert [sample.prompt for sample in metrics.samples] == tokenizer.batch_decode(prompts)
    # The samples are in the log, and in everything that reads the log: a resumed run, the report and its page.
    found = last_evaluations(sampled.folder / "out/metrics.jsonl", NUM_STEPS)
    assert found["held_out"].samples == sampled.told.evaluations[-2].samples
    history = read_history(sampled.folder / "out")
    figures = compute_figures(history)
    assert figures.samples["the start"].step == NUM_STEPS and len(figures.samples["held_out"].rows) == 3
    page = html.unescape(render_page(history, figures))
    assert all(sample.generated in page and sample.reference in page for sample in sampled.told.evaluations[-1].samples)
    assert any(">> " in line for line in report_lines(figures))


def test_stopped_sampling_frees_its_memory(sampled: WholeRun) -> None:
    sampler = sampled.trainer.prepare().samplers["trained"]
    with Trainer(sampled.config, plan=sampled.plan).open() as opened:
        opened.load()
        store, activity = opened.store, Activity()
        before = set(store), store.stats().tiers["ram"].used_bytes
        answers = iter([False, False, True])  # stops after the second of five passes
        stopped = sampler.generate_samples("held_out", store, activity, lambda: next(answers))
        assert stopped == [] and before == (set(store), store.stats().tiers["ram"].used_bytes)
        whole = sampler.generate_samples("held_out", store, activity, lambda: False)
        assert tuple(whole) == sampled.told.evaluations[0].samples
        assert before == (set(store), store.stats().tiers["ram"].used_bytes)


def test_small_evaluation_sets_do_not_change_how_others_are_sampled(sampled: WholeRun) -> None:
    evaluation, batch = resolve_evaluation(sampled.config), sampled.plan.run.batch
    tokenizer = load_tokenizer(sampled.config.model.model_name_or_path)
    large, small = load_sets_of_run(sampled)
    for num_rows in (0, 1):
        dataset = small.loader.dataset
        dataset = replace(dataset, trained=dataset.trained & (num_rows > 0), in_use=np.arange(1))
        shape = sampled.plan.run.data.batch_shape(batch.micro_batch_rows, small.num_micro_batches)
        loader = BatchLoader(EpochOrder(dataset, shape, 0), sampled.plan.run.data.collator(shape, tokenizer))
        sampler = Sampler.for_sets(evaluation, sampled.plan, [large, replace(small, loader=loader)], tokenizer)
        assert sampler is not None, "the other set has rows"
        assert (sampler.plan.run.batch.micro_batch_rows, sampler.plan.run.batch.num_micro_batches) == (2, 2)


AVERAGED = {"optimizer": "ema_decay = 0.5", "precision": 'compute_dtype = "bfloat16"'}
#: ``BOTH`` evaluates weights and averages, with one sample per set. The best average is the model that the run exports.
ONE_SAMPLE = "predict_with_generate = true\nmax_predict_samples = 1\nmax_new_tokens = 2"
BOTH = f'eval_steps = 3\n{ONE_SAMPLE}\nweights = "both"\nmetric_for_best_model = "held_out_average_loss"'


@pytest.fixture(scope="module")
def averaged(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> WholeRun:
    """Return a run that keeps averages but evaluates only its trained weights."""
    return train(tmp_path_factory.mktemp("averaged"), tiny_model, {**PLACEMENTS["RAM"], **AVERAGED})


def test_average_weights_evaluate_like_their_export(
    tiny_model: Path, tmp_path: Path, averaged: WholeRun, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Covers layouts that are cut into parts, including layers with one weight block but several average blocks."""
    monkeypatch.setattr("megatrain.base.layout.PART_ELEMENTS", PART_ALIGNMENT_ELEMENTS)
    tables = {**PLACEMENTS["NVMe"], **AVERAGED}
    run = train(tmp_path / "w", tiny_model, tables, evaluation=BOTH, more="load_best_model_at_end = true")
    plan = run.plan
    cut, encodings = plan.program.cuts.weights, plan_averages(plan).program.encodings
    assert cut and {name for name, encoding in encodings.items() if len(encoding.keys) > 1} - cut
    names = ["held_out", "the start", "held_out_average", "the start_average"]
    assert [each.name for each in run.told.evaluations] == 2 * names
    trained, average = run.told.evaluations[-4], run.told.evaluations[-2]
    assert trained.loss != average.loss and len(average.samples) == 1

    # The run exports the average of the best step, which is the last step. The export is an ordinary model.
    final = tmp_path / "w/out/final"
    assert json.loads((final / "export.json").read_text())["ema"] and run.weights == exported(run, tmp_path / "again")
    once = f"eval_on_start = true\n{ONE_SAMPLE}"
    of_export = train(
        tmp_path / "e", final, {"nvme": 0, "precision": AVERAGED["precision"]}, evaluation=once, num_steps=1
    )
    for mine, theirs in zip(run.told.evaluations[-2:], of_export.told.evaluations[:2], strict=True):
        assert (mine.loss, mine.num_tokens, mine.samples) == (theirs.loss, theirs.num_tokens, theirs.samples)


def exported(run: WholeRun, folder: Path) -> bytes:
    export_checkpoint(run.folder / "out", folder, ema=True)
    return (folder / "model.safetensors").read_bytes()


def test_averages_that_do_not_fit_raise_with_required_ram(averaged: WholeRun) -> None:
    """The error states a RAM size that is sufficient."""
    plan = averaged.plan

    def with_ram(nbytes: int) -> Plan:
        return replace(plan, budgets_by_tier={"ram": replace(plan.budgets_by_tier["ram"], capacity_bytes=nbytes)})

    with pytest.raises(DoesNotFitError, match=r'weights = "trained" in \[evaluation\]') as refused:
        plan_averages(with_ram(2**20))
    plan_averages(with_ram(refused.value.need_bytes))


def train_plan(folder: Path, without: WholeRun) -> Plan:
    """Return the plan of the same run without evaluations."""
    from megatrain.plan.planner import plan_run
    from megatrain.training.resolve import resolve

    config = load_config(folder / "run.toml").config
    plain = config.model_copy(update={"data": without.config.data, "evaluation": without.config.evaluation})
    return plan_run(resolve(plain))


def test_last_evaluation_matches_hugging_face_on_the_export(in_ram: WholeRun) -> None:
    model = AutoModelForCausalLM.from_pretrained(in_ram.folder / "out/final", dtype=torch.float32)
    for each, metrics in zip(load_sets_of_run(in_ram), in_ram.told.evaluations[-2:], strict=True):
        batches = [batch for micro_batches in each.passes() for batch in micro_batches]
        labelled = [batch for batch in batches if (batch["labels"] != -100).any()]
        expected, num_tokens = evaluate(model, labelled)
        assert metrics.num_tokens == num_tokens == each.loader.dataset.report.num_trained_tokens
        assert metrics.loss == pytest.approx(expected, rel=1e-6)
        assert metrics.perplexity == pytest.approx(math.exp(expected), rel=1e-5)
    losses = [metrics.loss for metrics in in_ram.told.evaluations if metrics.name == "held_out"]
    assert losses[-1] < losses[0] - 0.1


def test_next_evaluation_step_is_known_at_every_step(in_ram: WholeRun) -> None:
    """The next evaluation must be known at any step, because each checkpoint restarts the schedule."""
    unused: Any = None
    evaluator = Evaluator(
        resolve_evaluation(in_ram.config),
        in_ram.plan,
        unused,
        load_sets_of_run(in_ram),
        unused,
        timeline=unused,
        activity=unused,
        steps_per_epoch=7,
        max_steps=NUM_STEPS,
        should_stop=lambda: False,
    )
    assert [evaluator.next_step(step) for step in range(NUM_STEPS)] == [3, 3, 3, 5, 5]


@pytest.mark.slow
def test_resumed_run_has_the_same_evaluations(tiny_model: Path, tmp_path: Path, in_ram: WholeRun) -> None:
    """The run stops before a due evaluation, and again a step later. Its log has an evaluation of a lost step."""
    stopped = train(tmp_path / "w", tiny_model, PLACEMENTS["RAM"], stop_after=3)
    assert [line[0] for line in logged(stopped)] == [0, 0]
    train(tmp_path / "w", tiny_model, PLACEMENTS["NVMe"], stop_after=4)
    log = tmp_path / "w/out/metrics.jsonl"
    lost = {"event": "evaluation", "step": 5, "name": "held_out", "loss": 0.0, "num_tokens": 1}
    log.write_text(log.read_text() + json.dumps(lost) + "\n")
    done = train(tmp_path / "w", tiny_model, PLACEMENTS["mixed"])
    assert logged(done) == logged(in_ram)
    assert done.losses == in_ram.losses and done.weights == in_ram.weights


def test_interrupted_evaluation_is_completed_on_resume(tiny_model: Path, tmp_path: Path, in_ram: WholeRun) -> None:
    stopped = train(tmp_path / "w", tiny_model, PLACEMENTS["NVMe"], stop_after=3, stop_at="held_out")
    assert logged(stopped) == logged(in_ram)[:3]
    done = train(tmp_path / "w", tiny_model, PLACEMENTS["RAM"])
    assert [metrics.step for metrics in done.told.evaluations] == [3, 5, 5]
    assert logged(done) == logged(in_ram) and done.losses == in_ram.losses and done.weights == in_ram.weights


@pytest.mark.slow
def test_evaluations_and_checkpoints_at_the_same_and_other_steps(
    tiny_model: Path, tmp_path: Path, in_ram: WholeRun
) -> None:
    run = train(tmp_path / "w", tiny_model, PLACEMENTS["NVMe"], more="save_steps = 1\nsave_total_limit = 1")
    assert run.losses == in_ram.losses and run.weights == in_ram.weights and logged(run) == logged(in_ram)
    each_step = run.plan.placement.run_traffic_bytes(1)
    passes = count_pass_traffic(run.plan, 3 * sum(each.num_passes for each in load_sets_of_run(run)))
    assert run.summary.link_bytes == {link: NUM_STEPS * each_step[link] + passes[link] for link in passes}


def test_eval_batch_size_and_max_samples(tiny_model: Path, tmp_path: Path, in_ram: WholeRun) -> None:
    narrow = train(tmp_path / "narrow", tiny_model, PLACEMENTS["RAM"], evaluation="per_device_eval_batch_size = 1")
    assert [metrics.step for metrics in narrow.told.evaluations] == [5, 5]
    for mine, theirs in zip(logged(narrow), logged(in_ram)[-2:], strict=True):
        assert mine[2] == pytest.approx(theirs[2], rel=1e-6) and mine[3] == theirs[3]
    wide = train(tmp_path / "wide", tiny_model, PLACEMENTS["RAM"], evaluation="per_device_eval_batch_size = 64")
    assert logged(wide) == logged(in_ram)[-2:]
    book = tmp_path / "rows.jsonl"
    book.write_text("".join(json.dumps({"text": f"Call me Ishmael {number}."}) + "\n" for number in range(9)))
    few = load_config(narrow.folder / "run.toml", overrides=[f"data.eval.0.path={book}", "eval_max_samples=4"])
    sets = load_evaluation_sets(
        resolve_evaluation(few.config), narrow.plan, load_tokenizer(str(tiny_model)), lambda text: None
    )
    assert len(sets[0].loader.dataset) == 4


@pytest.mark.slow
def test_evaluations_at_the_end_of_every_epoch(tiny_model: Path, tmp_path: Path) -> None:
    text = config_text(tmp_path, tiny_model, nvme=0)
    text = text.replace("gradient_accumulation_steps = 3", "gradient_accumulation_steps = 20\nmax_steps = 5")
    text += f'[checkpoint]\nmin_free_disk = "0MiB"\n[[data.eval]]\npath = "{EXAMPLES / "quickstart/loomings.txt"}"\n'
    path = tmp_path / "run.toml"
    path.write_text(text + '[evaluation]\neval_strategy = "epoch"\n')
    told = RunRecorder()
    trainer = Trainer(load_config(path).config, observer=told)
    assert trainer.make_loader().steps_per_epoch == 2
    trainer.train()
    assert [(metrics.step, metrics.name) for metrics in told.evaluations] == [
        (2, "loomings"),
        (4, "loomings"),
        (5, "loomings"),
    ]
