"""Keys of a micro-batch other than its tokens. The data package writes these keys, and losses read them."""

from __future__ import annotations

__all__ = ["DESIRABLE", "IGNORED_LABEL", "LOSS_PREFIX", "MARGIN", "REFERENCE", "TEACHER_KEYS"]

#: Label of a position that does not count toward the loss, as in transformers.
IGNORED_LABEL = -100
#: Prefix of the keys that only losses read; a model's forward does not get them.
LOSS_PREFIX = "loss."
#: Keys of a teacher's scores: top ids and their log-probabilities [B, S, k], log-probability of all others [B, S].
TEACHER_KEYS = ("loss.teacher_ids", "loss.teacher_log_probs", "loss.teacher_rest_log_probs")
#: Key of the reference model's log-probability for each row's answer, [2 P] fp32.
REFERENCE = "loss.reference_logps"
#: Key of the flags that mark the examples whose first answer is desirable, [P] bool.
DESIRABLE = "loss.desirable"
#: Key of the margin by which each pair's chosen text should score higher, [P] fp32.
MARGIN = "margin"
