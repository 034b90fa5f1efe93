"""What a micro-batch holds beside tokens, by key; data writes it, losses read it."""

from __future__ import annotations

__all__ = ["DESIRABLE", "IGNORED_LABEL", "LOSS_KEYS", "MARGIN", "REFERENCE", "TEACHER_KEYS"]

#: Label of a position that is not trained, as in transformers.
IGNORED_LABEL = -100
#: Keys of a micro-batch with what a teacher says of the token after each place: [B, S, k], [B, S, k], [B, S].
TEACHER_KEYS = ("teacher_ids", "teacher_log_probs", "teacher_rest_log_probs")
#: Key of a micro-batch: log-probability of each row's answer by the reference model [2 P], fp32.
REFERENCE = "reference_logps"
#: Key of a micro-batch: whether the first answer of each example is a good one [P], bool.
DESIRABLE = "desirable"
#: Key of a micro-batch: by how much the chosen text of each pair should win [P], fp32.
MARGIN = "margin"
#: Keys that losses alone read: a model's forward is not given them.
LOSS_KEYS = frozenset({*TEACHER_KEYS, REFERENCE, DESIRABLE})
