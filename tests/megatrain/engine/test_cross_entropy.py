"""Cross entropy with label smoothing and z-loss, in parts of the vocabulary, matches autograd on full logits."""

from __future__ import annotations

import torch
from torch.nn import functional

from megatrain.engine.head.cross_entropy import RunningSoftmax


def test_smoothing_and_z_loss_together_in_parts_of_the_vocabulary() -> None:
    rows, words, num_items, smoothing, z_loss = 6, 11, 9, 0.3, 0.2
    generator = torch.Generator().manual_seed(4)
    logits = (3 * torch.randn(rows, words, generator=generator)).requires_grad_()
    labels = torch.randint(0, words, (rows,), generator=generator)
    expected = functional.cross_entropy(logits, labels, reduction="sum", label_smoothing=smoothing)
    expected = (expected + z_loss * logits.logsumexp(1).square().sum()) / num_items
    expected.backward()

    softmax, parts = RunningSoftmax(labels, words, num_items, smoothing, z_loss), ((0, 4), (4, 9), (9, 11))
    with torch.no_grad():
        for start, stop in parts:
            softmax.add(logits[:, start:stop], start)
        found = torch.cat([softmax.gradient(logits[:, start:stop], start) for start, stop in parts], 1)
        torch.testing.assert_close(softmax.loss(), expected.detach(), rtol=1e-6, atol=0)
    torch.testing.assert_close(found, logits.grad, rtol=1e-5, atol=1e-7)
