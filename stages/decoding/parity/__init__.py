"""Whether a head does in serving what it did in training: the same logits, the same tokens a step.

Training writes down what it expects of held-out rows (`ParityRecord`); `check_parity` replays those rows
through the drafter and the decode loop and compares. Where they differ it tries what commonly goes wrong,
one suspect after the other, and names the one that explains the difference.
"""

from stages.decoding.parity.gate import check_parity
from stages.decoding.parity.record import RECORD_NAME, ExpectedRow, ParityRecord, digest_of
from stages.decoding.parity.report import ParityReport

__all__ = ["RECORD_NAME", "ExpectedRow", "ParityRecord", "ParityReport", "check_parity", "digest_of"]
