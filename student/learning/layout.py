"""Completes a batch for the terms: the student's distribution from its hidden states, and the signals of the rows."""

import dataclasses
from collections.abc import Mapping

from jaxtyping import Float
from torch import Tensor

from opd.heads import OutputHead
from opd.wire.types import PayloadKind
from student.data.batch import HeadLookup, signal_tokens
from student.data.needs import SCORES_AT_TEACHER, TEACHER, Needs, teacher_role
from student.data.token_batch import SignalTokens, StudentTokens, TeacherShare, TokenBatch
from student.model.model import ProjectionSpec, project

Signals = Mapping[tuple[str, PayloadKind], SignalTokens]


def lay_out(
    hidden: Float[Tensor, "n h"],
    head: OutputHead,
    batch: TokenBatch,
    needs: Needs,
    spec: ProjectionSpec,
    head_of: HeadLookup,
) -> TokenBatch:
    """The batch with the student's distribution and the signals of its rows.

    Args:
        hidden: [N, H] the student's hidden states from which each response token is predicted, with gradient.
        head: the student's output head, with gradient.
        batch: a collated batch; its rows have all their signals.
        needs: what the terms need.
        spec: what to compute from `hidden`, and how.
        head_of: looks up the output heads of other models, for hidden payloads.
    """
    # `split` keeps rows with different teachers apart, so the first row stands for all.
    several = batch.rows[0].teachers if needs.teacher else ()
    signals = {
        (need.role, need.spec.kind): signal_tokens(batch.rows, need.role, need.spec.kind, head_of, hidden.device)
        for need in needs.signals
        if need.role != TEACHER or not several
    }
    topk = next((signal for (_, kind), signal in signals.items() if kind is PayloadKind.TOPK), None)
    student = project(hidden, head, batch, None if topk is None else topk.ids, spec)
    shares = []
    for name, weight in several:
        mine = signals | {
            (TEACHER, kind): signal_tokens(batch.rows, teacher_role(name), kind, head_of, hidden.device)
            for kind in (need.spec.kind for need in needs.signals if need.role == TEACHER)
        }
        shares.append(TeacherShare(weight, mine, _at_teacher(student, mine, hidden, head, batch, spec)))
    return dataclasses.replace(
        batch,
        student=student,
        signals=signals,
        shares=tuple(shares),
        valid_vocab=spec.valid_vocab,
        temperature=spec.temperature,
    )


def _at_teacher(
    student: StudentTokens,
    signals: Signals,
    hidden: Float[Tensor, "n h"],
    head: OutputHead,
    batch: TokenBatch,
    spec: ProjectionSpec,
) -> StudentTokens:
    """The student's distribution at the top-k ids of one of several teachers.

    The hidden states come from the one forward pass; only the projection to this teacher's ids is repeated.
    """
    topk = signals.get((TEACHER, PayloadKind.TOPK))
    if topk is None or SCORES_AT_TEACHER not in spec.want:
        return student
    at_ids = dataclasses.replace(spec, want=frozenset({SCORES_AT_TEACHER}))
    projected = project(hidden, head, batch, topk.ids, at_ids)
    return dataclasses.replace(student, scores_at_teacher=projected.scores_at_teacher)
