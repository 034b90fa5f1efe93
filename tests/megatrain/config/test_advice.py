"""Warnings about settings that are valid but rarely intended: row lengths, learning rates and warm-ups."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from megatrain.config import load_config
from megatrain.config.advice import model_warnings
from megatrain.config.schema import RunConfig
from megatrain.converters.spec import build_graph
from megatrain.models.graph import ModelGraph
from megatrain.optim.lr import schedule_warnings, warmup_notice
from megatrain.training.resolve import resolve

MODEL = Path(__file__).parents[3] / "examples/quickstart/model"


@pytest.fixture(scope="module")
def graph() -> ModelGraph:
    return build_graph(MODEL)


@pytest.fixture
def large(graph: ModelGraph, monkeypatch: pytest.MonkeyPatch) -> ModelGraph:
    """Return the same graph, but let it report 8 billion parameters."""
    monkeypatch.setattr(type(graph), "num_parameters", 8_000_000_000)
    return graph


def config(folder: Path, *overrides: str) -> RunConfig:
    path = folder / "run.toml"
    path.write_text(
        f'task = "pretrain"\noutput_dir = "out"\n[model]\nmodel_name_or_path = "{MODEL}"\n'
        '[[data.train]]\npath = "x.txt"\n[data]\nmax_length = 128\n'
    )
    return load_config(path, overrides=overrides).config


def warnings_of(config: RunConfig, graph: ModelGraph) -> Iterator[str]:
    run = resolve(config)
    return model_warnings(run.model, run.batch.max_length, run.optimizer, graph)


@pytest.mark.parametrize(
    ("optim", "rate", "key"),
    [
        ("adamw", "1e-5", ""), ("adamw", "2e-4", ""), ("adamw", "1e-3", "diverges"),
        ("adamw", "1e-10", "hardly change"), ("lion", "3e-5", ""), ("lion", "3e-4", "diverges"),
        ("sgd", "0.1", ""), ("sgd", "3", "diverges"),
        ("sgd", "1e-8", "hardly change"), ("adafactor", "1e-4", ""), ("adafactor", "1e-2", "diverges"),
    ],
)  # fmt: skip
def test_rates_of_all_parameters(optim: str, rate: str, key: str, large: ModelGraph, tmp_path: Path) -> None:
    found = list(warnings_of(config(tmp_path, f"optim={optim}", f"optimizer.learning_rate={rate}"), large))
    assert len(found) == bool(key)
    assert all(text.startswith("optimizer.learning_rate = ") and key in text and ". Use " in text for text in found)


@pytest.mark.parametrize(("optim", "rate", "is_warned"), [("adamw", "1e-3", False), ("adamw", "6e-3", True)])
def test_adapters_have_a_higher_limit(
    optim: str, rate: str, is_warned: bool, large: ModelGraph, tmp_path: Path
) -> None:
    found = list(warnings_of(config(tmp_path, f"optim={optim}", f"optimizer.learning_rate={rate}", "lora.r=4"), large))
    assert len(found) == is_warned
    assert all("training of adapters usually diverges above 0.005" in text for text in found)


def test_rank_above_the_models_width_gives_a_warning(graph: ModelGraph, tmp_path: Path) -> None:
    assert list(warnings_of(config(tmp_path, "lora.r=128"), graph)) == []
    assert list(warnings_of(config(tmp_path, "lora.r=129"), graph)) == [
        "lora.r = 129 is more than the model's hidden_size = 128: adapters are larger than the matrices that they "
        "change"
    ]


def test_rates_from_scratch_and_of_small_models(graph: ModelGraph, tmp_path: Path) -> None:
    assert list(warnings_of(config(tmp_path, "optimizer.learning_rate=3e-3"), graph)) == []
    (far_out,) = warnings_of(config(tmp_path, "optimizer.learning_rate=0.5"), graph)
    assert "above 0.01" in far_out


def test_the_rate_from_scratch_does_not_depend_on_the_size(large: ModelGraph, tmp_path: Path) -> None:
    new = config(tmp_path, "train_from_scratch=true", "optimizer.learning_rate=3e-3")
    assert list(warnings_of(new, large)) == []


def test_rates_of_groups(large: ModelGraph, tmp_path: Path) -> None:
    group = 'optimizer.groups=[{ params = ["*norm*"], learning_rate = 0.5 }, { params = ["*"], weight_decay = 0.0 }]'
    (found,) = warnings_of(config(tmp_path, group), large)
    assert found.startswith("optimizer.groups.0.learning_rate = 0.5")


def test_rows_longer_than_the_models_positions(graph: ModelGraph, tmp_path: Path) -> None:
    most = graph.config.max_position_embeddings
    assert list(warnings_of(config(tmp_path, f"data.max_length={most}"), graph)) == []
    (longer,) = warnings_of(config(tmp_path, f"data.max_length={most + 1}"), graph)
    assert f"max_position_embeddings = {most}" in longer and "was not trained on later" in longer
    (new,) = warnings_of(config(tmp_path, f"data.max_length={most + 1}", "train_from_scratch=true"), graph)
    assert "raise it in config.json" in new


@pytest.mark.parametrize(
    ("warmup", "num_steps", "text"),
    [
        ("0.03", 9, ""), ("0.03", 1000, ""), ("0", 1000, ""), ("2", 30, ""), ("100", 1000, ""), ("5", 1000, ""),
        ("0.03", 1, "never reaches"), ("0.99", 10, "never reaches"), ("0.6", 100, "60 of the 100"),
        ("60", 100, "60 of the 100"), ("1", 1000, "almost no effect"), ("0.001", 1000, "almost no effect"),
    ],
)  # fmt: skip
def test_unsuitable_warm_up_gives_a_warning(warmup: str, num_steps: int, text: str, tmp_path: Path) -> None:
    found = list(schedule_warnings(resolve(config(tmp_path, f"warmup_steps={warmup}")).optimizer, num_steps))
    assert len(found) == bool(text) and all(text in each for each in found)
    assert (
        list(
            schedule_warnings(
                resolve(config(tmp_path, f"warmup_steps={warmup}", "lr_scheduler_type=constant")).optimizer, 1
            )
        )
        == []
    )


def test_warm_up_is_reported() -> None:
    text = "warm-up: the learning rate rises from 0 to 0.001 over 3 steps"
    notice = "the first step does not change the weights, as in transformers"
    assert warmup_notice(0.0, 1e-3, 3, is_start=True) == f"{text}; {notice}"
    assert warmup_notice(0.0, 1e-3, 3, is_start=False) == text
    assert warmup_notice(2e-4, 1e-3, 1, is_start=True).endswith("from 0.0002 to 0.001 over 1 step")
