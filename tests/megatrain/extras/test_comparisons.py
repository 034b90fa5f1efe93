"""Each comparison of `verify` lists exactly the values that differ, with the largest difference."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch

from megatrain.config import load_config
from megatrain.config.schema import RunConfig
from megatrain.extras import verify as module
from megatrain.extras.verify import Check, VerifyResult


def test_steps_within_and_beyond_the_tolerance() -> None:
    """Differences are relative to the plain value. A value that is not finite always differs."""
    within = module._compare_steps("loss", [2.0, -4.0, 0.0], [2.5, -3.0, 0.0], 0.25)
    assert within == Check("loss", "2e-01", "2.5e-01") and within.holds
    beyond = module._compare_steps("loss", [2.0, 4.0, 8.0, 0.0], [2.0, 4.5, math.nan, 1e-9], 0.0625)
    problems = (
        "step 2: plain 4.0, tiered 4.5",
        "step 3: plain 8.0, tiered nan",
        "step 4: plain 0.0, tiered 1e-09",
    )
    assert beyond == Check("loss", "6e-02", "inf", problems) and not beyond.holds
    with pytest.raises(ValueError, match="zip"):
        module._compare_steps("loss", [1.0], [1.0, 2.0], 1.0)


def test_tensors_are_compared_relative_to_their_change() -> None:
    """Tensor b changes less than a tenth of a's change, so its difference is relative to this tenth."""
    start = {"a": torch.tensor([1.0, 2.0]), "b": torch.tensor([5.0, 5.0])}
    plain = {"a": torch.tensor([1.0, -6.0]), "b": torch.tensor([5.0, 5.25])}
    tiered = {"a": torch.tensor([3.0, -6.0]), "b": torch.tensor([5.0, 5.05])}

    def compare(tolerance: float) -> Check:
        magnitude = module._largest_magnitude
        return module._compare_tensors("of", start, plain, tiered, magnitude, min_change=0.1, tolerance=tolerance)

    assert compare(0.25) == Check("of 2 tensors", "2e-01", "2.5e-01", ())
    assert compare(0.2) == Check("of 2 tensors", "2e-01", "2.5e-01", ("a: 2.5e-01", "b: 2.5e-01"))
    tiered["b"][0] = math.nan
    assert compare(0.3) == Check("of 2 tensors", "3e-01", "nan", ("b: nan",))
    with pytest.raises(AssertionError):
        module._compare_tensors("of", start, plain, {}, float, min_change=1, tolerance=1)  # type: ignore[arg-type]


@pytest.mark.parametrize("count", [8, 9, 11])
def test_at_most_eight_tensors_are_listed(count: int) -> None:
    zero, one = ({f"t{n}": torch.full((2,), value) for n in range(count)} for value in (0.0, 1.0))
    two = {name: 1 + tensor for name, tensor in one.items()}
    found = module._compare_tensors("of", zero, one, two, module._root_mean_square, min_change=0.1, tolerance=0.5)
    listed = tuple(f"t{n}: 1.0e+00" for n in range(8)) + ((f"and {count - 8} more",) if count > 8 else ())
    assert found == Check(f"of {count} tensors", "5e-01", "1.0e+00", listed)


def test_magnitudes_of_a_tensor() -> None:
    tensor = torch.tensor([1.0, -7.0])
    assert (module._largest_magnitude(tensor), module._root_mean_square(tensor)) == (7.0, 5.0)


def test_bits_of_two_runs() -> None:
    base = module._TrainingResult([1.0, 2.0, 3.0], [4.0, 5.0, 6.0], {}, {f"block{n}": n for n in range(7)})
    same = module._TrainingResult([1.0, 2.0, 3.0], [4.0, 5.0, 6.0], {}, {**base.state, "more": 1})
    assert module._compare_bits("all", same, base) == Check("all", "same bits", "3 losses and norms, 8 blocks")
    state = {**base.state, **{f"block{n}": 9 for n in (1, 2, 3, 5)}}
    del state["block6"]
    other = module._TrainingResult([1.0, 0.0, 0.0], [4.0, 5.0, 0.0], {}, state)
    assert module._compare_bits("all", other, base) == Check(
        "all",
        "same bits",
        "different",
        ("loss of step 2", "gradient norm of step 3", "5 of 7 blocks: block1, block2, block3, block5"),
    )


def test_result_as_json() -> None:
    checks = (Check("a", "1e-1", "2e-2"), Check("b", "same bits", "different", ("loss of step 1",)))
    result = VerifyResult("tiny", checks, ("a note",), 1.5)
    assert result.to_json() == {
        "holds": False,
        "headline": "tiny",
        "checks": [
            {"what": "a", "allowed": "1e-1", "found": "2e-2", "problems": (), "holds": True},
            {
                "what": "b",
                "allowed": "same bits",
                "found": "different",
                "problems": ("loss of step 1",),
                "holds": False,
            },
        ],
        "notes": ("a note",),
        "seconds": 1.5,
    }
    assert VerifyResult("tiny", checks[:1], (), 1.5).to_json()["holds"] is True


def config_of(folder: Path, *overrides: str) -> RunConfig:
    text = 'task = "sft"\noutput_dir = "out"\n[model]\nmodel_name_or_path = "m"\n[[data.train]]\npath = "d.jsonl"\n'
    (folder / "run.toml").write_text(text)
    return load_config(folder / "run.toml", (), overrides).config


ADAMW = "[optimizer]: compared with one group of adamw, not with optim = {} or its groups"
PRECISION = "plain training is compared in float32, placements with compute_dtype = {}, grad_dtype = {}"
FROZEN = "[lora], model.freeze: all weights of the copy are trained. It has no adapters and no frozen weights"


@pytest.mark.parametrize(
    ("overrides", "dtypes", "notes"),
    [
        ([], ("float32", "float32"), []),
        (["optim=lion"], ("bfloat16", "float32"), [PRECISION.format("bfloat16", "float32"), ADAMW.format("lion")]),
        (["model.freeze=['*bias']"], ("float32", "bfloat16"), [PRECISION.format("float32", "bfloat16"), FROZEN]),
        (["lora.r=4", "model.images=trained"], ("float32", "float32"),
         ['model.images = "trained": only the language model is compared, on text', FROZEN]),
    ],
)  # fmt: skip
def test_notes_name_the_omitted_parts(
    tmp_path: Path, overrides: list[str], dtypes: tuple[str, str], notes: list[str]
) -> None:
    assert list(module._notes(config_of(tmp_path, *overrides), *dtypes)) == notes


def test_plain_optimizers_have_the_values_of_the_config(tmp_path: Path) -> None:
    """Vectors and excluded names have no weight decay. Without exclusions, all tensors decay."""
    model = {"w.weight": torch.nn.Parameter(torch.ones(2, 3)), "w.bias": torch.nn.Parameter(torch.ones(3)),
             "e.weight": torch.nn.Parameter(torch.ones(3, 2))}  # fmt: skip
    values = ["learning_rate=0.5", "weight_decay=0.25", "adam_beta1=0.7", "adam_beta2=0.8", "adam_epsilon=0.01"]
    for more, decays in (
        (["weight_decay_exclude=['e.*']"], [0.25, 0.0, 0.0]), (["weight_decay_exclude=[]"], [0.25] * 3),
    ):  # fmt: skip
        table = config_of(tmp_path, *values, *more).optimizer
        optimizer = module.make_plain_optimizer(model.items(), table)
        assert type(optimizer) is torch.optim.AdamW
        found = [(group["params"], group["lr"], group["weight_decay"]) for group in optimizer.param_groups]
        expected = [([parameter], 0.5, decay) for parameter, decay in zip(model.values(), decays, strict=True)]
        assert [(params[0] is mine[0], *rest) for (params, *rest), (mine, *_) in zip(found, expected, strict=True)] == [
            (True, lr, decay) for _, lr, decay in expected
        ]
        assert {(*group["betas"], group["eps"]) for group in optimizer.param_groups} == {(0.7, 0.8, 0.01)}
    table = config_of(tmp_path, *values[:2], "optim=sgd", "sgd_momentum=0.75", "weight_decay_exclude=[]").optimizer
    optimizer = module.make_plain_optimizer(model.items(), table)
    assert type(optimizer) is torch.optim.SGD
    assert {(group["lr"], group["momentum"], group["weight_decay"]) for group in optimizer.param_groups} == {
        (0.5, 0.75, 0.25)
    }
