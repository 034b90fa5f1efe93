"""Tests for optimizers, inherited from ``OptimizerSuite``. They check the whole contract with the engine."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import torch
from torch import Tensor

from megatrain.base.layout import UnitLayout, build_layout
from megatrain.base.precision import decode, encode
from megatrain.optim.base import Optimizer, Segment, Update, build_segments

__all__ = ["OptimizerSuite"]

_PART = 65_536  # parts of a layout are aligned to this number of elements
Blocks = dict[str, Tensor]


class OptimizerSuite:
    """Tests for an optimizer. Subclass it and define ``make_optimizer``; pytest collects the tests::

    class TestMyOptimizer(OptimizerSuite):
        def make_optimizer(self) -> Optimizer:
            return MyOptimizer()
    """

    def make_optimizer(self) -> Optimizer:
        """Return a new optimizer, always with the same settings."""
        raise NotImplementedError

    def make_layout(self) -> UnitLayout:
        """Return the layout of the tested parameters: matrices, stacked matrices, a vector, and a single element."""
        shapes = [("up", (40, 72)), ("experts", (3, 16, 24)), ("norm", (72,)), ("scale", (1,)), ("down", (72, 40))]
        return build_layout("layer", shapes, True)

    # -- interface -----------------------------------------------------------------------------------------------

    def test_optimizer_implements_the_protocol(self) -> None:
        optimizer = self.make_optimizer()
        assert isinstance(optimizer, Optimizer), f"{type(optimizer).__name__} lacks state_kinds, update or warm_up"
        for split_master, expected in ((True, ["weight", "low"]), (False, ["weight"])):
            names = [kind.name for kind in optimizer.state_kinds(split_master)]
            assert names[: len(expected)] == expected, names
            assert len(set(names)) == len(names), f"two kinds have the same name: {names}"
            assert not any(set(name) & set("./") or name.startswith("grad") for name in names), names
        kinds, split_kinds = ({kind.name for kind in optimizer.state_kinds(is_split)} for is_split in (False, True))
        assert split_kinds - kinds == {"low"}, "fp32 and split masters have different state"

    def test_warm_up_can_be_repeated(self) -> None:
        optimizer = self.make_optimizer()
        optimizer.warm_up()
        optimizer.warm_up([(True, torch.bfloat16)])

    # -- updates -------------------------------------------------------------------------------------------------

    def test_update_learns_and_leaves_padding_unchanged(self) -> None:
        optimizer, layout = self.make_optimizer(), self.make_layout()
        blocks, old_blocks = self._blocks(optimizer, layout), self._blocks(optimizer, layout)
        gradient = self._gradient(layout, 1)
        gradient_copy = gradient.clone()
        segments = self._segments(optimizer, layout)
        optimizer.update(blocks, gradient, [], Update(1, 1e-2))
        assert self._are_equal(blocks, old_blocks), "an update without segments changed a block"
        chosen_segments = segments[::2]
        optimizer.update(blocks, gradient, chosen_segments, Update(1, 1e-2))
        assert torch.equal(gradient, gradient_copy), "the update changed the gradient"
        mask = torch.zeros(layout.num_elements, dtype=torch.bool)
        for segment in chosen_segments:
            mask[segment.start : segment.stop] = True
        is_changed = blocks["weight"] != old_blocks["weight"]
        assert not is_changed[~mask].any(), (
            "the update changed weights outside of the segments: other parameters, or padding"
        )
        assert is_changed[mask].float().mean() > 0.5, "the update changed less than half of the weights"
        assert blocks["weight"].isfinite().all()

    def test_optimizer_object_has_no_state(self) -> None:
        """A new optimizer object can continue a run with the same blocks."""
        layout = self.make_layout()
        optimizer = self.make_optimizer()
        blocks, resumed_blocks = self._blocks(optimizer, layout), self._blocks(optimizer, layout)
        for step in (1, 2, 3):
            self._step(optimizer, layout, blocks, step)
            self._step(self.make_optimizer(), layout, resumed_blocks, step)
            assert self._are_equal(blocks, resumed_blocks), (
                f"a new object with the same blocks gave a different result in step {step}"
            )

    def test_split_and_fp32_masters_are_bitwise_equal(self) -> None:
        optimizer, layout = self.make_optimizer(), self.make_layout()
        fp32_blocks, split_blocks = self._blocks(optimizer, layout), self._blocks(optimizer, layout, split_master=True)
        for step in (1, 2):
            self._step(optimizer, layout, fp32_blocks, step)
            self._step(optimizer, layout, split_blocks, step)
        master = torch.empty(layout.num_elements)
        decode(split_blocks["weight"], split_blocks["low"], master)
        assert torch.equal(master, fp32_blocks["weight"]), "a split master and an fp32 master gave different results"

    def test_bf16_gradients_match_their_fp32_values(self) -> None:
        optimizer, layout = self.make_optimizer(), self.make_layout()
        actual, expected = self._blocks(optimizer, layout), self._blocks(optimizer, layout)
        gradient = self._gradient(layout, 1).bfloat16()
        segments = self._segments(optimizer, layout)
        optimizer.update(actual, gradient, segments, Update(1, 1e-2))
        optimizer.update(expected, gradient.float(), segments, Update(1, 1e-2))
        assert self._are_equal(actual, expected), "a bf16 gradient and the same numbers in fp32 gave different results"

    def test_grad_scale_and_lr_scale_are_factors(self) -> None:
        optimizer, layout = self.make_optimizer(), self.make_layout()
        gradient, segments = self._gradient(layout, 1), self._segments(optimizer, layout)
        actual, expected = self._blocks(optimizer, layout), self._blocks(optimizer, layout)
        optimizer.update(actual, gradient, segments, Update(1, 1e-2, 0.25))
        optimizer.update(expected, gradient * 0.25, segments, Update(1, 1e-2))
        assert self._are_equal(actual, expected), "grad_scale is not a factor on the gradient"
        slow_segments = self._segments(optimizer, layout, lr_scale=0.5)
        actual, expected = self._blocks(optimizer, layout), self._blocks(optimizer, layout)
        optimizer.update(actual, gradient, slow_segments, Update(1, 1e-2))
        optimizer.update(expected, gradient, segments, Update(1, 5e-3))
        assert self._are_equal(actual, expected), "a segment's lr_scale is not a factor on the learning rate"

    # -- order and partition of calls ----------------------------------------------------------------------------

    def test_segments_can_be_updated_separately_and_concurrently(self) -> None:
        optimizer, layout = self.make_optimizer(), self.make_layout()
        expected = self._blocks(optimizer, layout)
        self._step(optimizer, layout, expected, 1)
        gradient, segments = self._gradient(layout, 1), self._segments(optimizer, layout)
        results = [self._blocks(optimizer, layout) for _ in range(4)]

        def update(blocks: Blocks) -> None:
            for segment in reversed(segments):
                optimizer.update(blocks, gradient, [segment], Update(1, 1e-2))

        with ThreadPoolExecutor(4) as threads:
            list(threads.map(update, results, timeout=120))
        assert all(self._are_equal(blocks, expected) for blocks in results), (
            "the result depends on the order or on other threads"
        )

    def test_partwise_update_is_bitwise_equal(self) -> None:
        """If no kind of state needs whole parameters, updates can process parts that begin inside a parameter."""
        optimizer = self.make_optimizer()
        layout = build_layout("embedding", [("weight", (1100, 128))], True)
        kinds = optimizer.state_kinds(False)
        if not all(kind.has_weight_layout(layout) for kind in kinds):
            return
        expected, actual = self._blocks(optimizer, layout), self._blocks(optimizer, layout)
        gradient, segments = self._gradient(layout, 1), self._segments(optimizer, layout)
        optimizer.update(expected, gradient, segments, Update(1, 1e-2))
        for part in (range(_PART), range(_PART, 2 * _PART), range(2 * _PART, layout.num_elements)):
            part_blocks = {
                kind.name: actual[kind.name][part.start // kind.granularity : -(-part.stop // kind.granularity)]
                for kind in kinds
            }
            part_segments = [segment.within(part) for segment in segments]
            optimizer.update(part_blocks, gradient[part.start : part.stop], part_segments, Update(1, 1e-2))
        assert self._are_equal(expected, actual), "an update in parts gave a different result; set needs_whole=True"

    # -- helpers -------------------------------------------------------------------------------------------------

    def _blocks(self, optimizer: Optimizer, layout: UnitLayout, *, split_master: bool = False) -> Blocks:
        """Return masters with random numbers, and state with zeros."""
        master = torch.zeros(layout.num_elements)
        for entry in layout.entries:
            generator = torch.Generator().manual_seed(entry.offset)
            master[entry.offset : entry.offset + entry.numel] = torch.randn(entry.numel, generator=generator)
        blocks = {
            kind.name: torch.zeros(kind.num_elements(layout), dtype=kind.dtype)
            for kind in optimizer.state_kinds(split_master)
        }
        if split_master:
            encode(master, blocks["weight"], blocks["low"])
        else:
            blocks["weight"].copy_(master)
        return blocks

    def _gradient(self, layout: UnitLayout, step: int) -> Tensor:
        return torch.randn(layout.num_elements, generator=torch.Generator().manual_seed(step))

    def _segments(self, optimizer: Optimizer, layout: UnitLayout, lr_scale: float = 1.0) -> Sequence[Segment]:
        segments = build_segments(layout, 0.1, (), kinds=optimizer.state_kinds(False))
        return [replace(segment, lr_scale=lr_scale) for segment in segments]

    def _step(self, optimizer: Optimizer, layout: UnitLayout, blocks: Blocks, step: int) -> None:
        segments = self._segments(optimizer, layout)
        optimizer.update(blocks, self._gradient(layout, step), segments, Update(step, 1e-2))

    def _are_equal(self, left: Blocks, right: Blocks) -> bool:
        return all(torch.equal(left[name], right[name]) for name in left)
