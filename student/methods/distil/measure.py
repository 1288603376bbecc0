"""The reverse KL that evaluations report, between student and teachers on the student's answers.

The most exact payload that all teachers serve is used:

    hidden    exact over the vocabulary
    gather    exact on the student's top k, one sampled token for the tail
    sampled   the log-ratio of the sampled tokens, unbiased and noisy

All average KL(student || teacher) over the trained tokens of sampled answers, nats per token.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

import torch

from opd.config import parse_settings
from opd.fleet.membership.discovery import recorded_folder
from opd.wire.v1 import teacher_pb2 as pb
from student.data.batch import collate, split
from student.methods.distil.opd import OnPolicyDistillation, OpdSettings
from student.model.model import evaluating
from student.plugin.terms import losses_of

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from student.data.needs import Needs
    from student.data.row import Row
    from student.data.token_batch import TokenBatch
    from student.learning.learner import Learner
    from student.settings.teachers import TeacherSettings

_MEASURED_IDS = 64


class ReverseKl:
    """Implements `student.job.evaluate.EvalMeasure` with the term of on-policy distillation.

    Args:
        payload: what the teachers send.
        k: ids per position for payload gather.

    Attributes:
        estimator: describes the estimator in reports, because estimators differ in noise.
    """

    def __init__(self, payload: Literal["hidden", "gather", "sampled"], k: int) -> None:
        self._term = OnPolicyDistillation(parse_settings(OpdSettings, {"name": "opd", "payload": payload, "k": k}))
        self.estimator = {
            "hidden": "exact",
            "gather": f"exact on the student's top {k}, sampled tail",
            "sampled": "log-ratio of sampled tokens",
        }[payload]

    def needs(self) -> Needs:
        """What the measure needs from the models that score the answers."""
        return self._term.needs()

    @torch.no_grad()
    def measure(
        self, learner: Learner, rows: Sequence[Row], *, look: Callable[[TokenBatch], object] = lambda batch: None
    ) -> tuple[float, float]:
        """Sum of the divergence over the trained tokens of `rows` in nats, and the number of these tokens."""
        needs = self.needs()
        top = bottom = 0.0
        with evaluating(learner.student):
            for part in split(rows, learner.settings.micro_batch_tokens, turn=learner.student.turn, by_teacher=True):
                batch = learner.token_batch(collate(rows, part, learner.accelerator.device), needs=needs)
                look(batch)
                numerator, denominator = losses_of(self._term, batch).metrics["reverse_kl"]
                top, bottom = top + float(numerator), bottom + float(denominator)
        return top, bottom


def reverse_kl_of(
    infos: Mapping[str, pb.TeacherInfo], needs: Needs, settings: TeacherSettings | None, *, spans: bool = False
) -> ReverseKl | None:
    """The most exact measure that all teachers of a run serve; exact if all of them serve hidden states.

    None if it cannot be measured: without a teacher, or with recorded scores, which do not cover new samples.

    Args:
        infos: the served models.
        needs: the needs of the objective.
        settings: the recipe's `teachers`.
        spans: whether a teacher has another tokenizer, of which only log-probs of the sampled text can be compared.
    """
    if settings is None or recorded_folder(settings.endpoints) is not None:
        return None
    if not needs.teacher:
        return None
    if spans:
        return ReverseKl("sampled", 1)
    # Rows carry one set of candidates, so the measurement uses as many ids as the objective.
    k = needs.candidates or min([_MEASURED_IDS, *(info.limits.max_k for info in infos.values())])
    kinds = [set(info.payloads) for info in infos.values()]
    mixed = settings.map_stops or (settings.combine == "probability" and settings.several)
    if not mixed and all(pb.PAYLOAD_KIND_HIDDEN in served for served in kinds):
        return ReverseKl("hidden", k)
    return ReverseKl("gather" if all(pb.PAYLOAD_KIND_GATHER in served for served in kinds) else "sampled", k)
