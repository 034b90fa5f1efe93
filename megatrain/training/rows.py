"""Loads a run's tokenizer, checks token ids, and creates the run's batches."""

from __future__ import annotations

from typing import TYPE_CHECKING

from megatrain.converters.spec import ModelSpec
from megatrain.data.dataset import check_id_range
from megatrain.data.encoding import load_tokenizer
from megatrain.data.loader import BatchLoader
from megatrain.data.row_order import EpochOrder
from megatrain.data.scores import TeacherScores, tokenizer_checksum
from megatrain.data.stream import StreamDataset
from megatrain.data.stream_order import StreamOrder
from megatrain.data.token_dataset import TokenDataset
from megatrain.models.graph import ModelGraph
from megatrain.plan.plan import Plan
from megatrain.tasks.distillation import Distillation

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

__all__ = ["check_token_ids", "make_loader", "tokenizer_of"]


def tokenizer_of(model: ModelSpec) -> PreTrainedTokenizerFast:
    """Load a model's tokenizer, with the chat template from the config."""
    return load_tokenizer(model.tokenizer_folder, chat_template=model.table.chat_template)


def check_token_ids(model: ModelSpec, dataset: TokenDataset, graph: ModelGraph) -> None:
    """Check that all token ids are within the model's embedding.

    Raises:
        DataError: The tokenizer does not match the model.
    """
    check_id_range(dataset, graph.model.get_input_embeddings().weight.shape[0], location=model.tokenizer_folder)


def make_loader(plan: Plan, dataset: TokenDataset, tokenizer: PreTrainedTokenizerFast) -> BatchLoader:
    """Create the loader of a run's batches, positioned at the first step.

    Raises:
        DataError: The teacher's scores do not match the data, or are damaged.
    """
    data, teacher = plan.run.data, None
    if data.scores is not None:
        vocab_size = plan.graph.config.get_text_config().vocab_size
        loss = plan.run.objective.loss
        assert isinstance(loss, Distillation), loss
        teacher = TeacherScores(data.scores, loss.k, vocab_size)
        teacher.check_coverage(dataset, tokenizer_checksum(tokenizer))
    shape = data.batch_shape(plan.run.batch.micro_batch_rows, plan.run.batch.num_micro_batches)
    collator = data.collator(shape, tokenizer, teacher)
    if not isinstance(dataset, StreamDataset):
        return BatchLoader(EpochOrder(dataset, shape, data.seed), collator)
    max_steps, num_embeddings = plan.run.max_steps, plan.graph.model.get_input_embeddings().weight.shape[0]
    assert max_steps is not None, "streams need max_steps in the config"
    order = StreamOrder(dataset, shape, data.seed, max_steps=max_steps, num_embeddings=num_embeddings)
    return BatchLoader(order, collator)
