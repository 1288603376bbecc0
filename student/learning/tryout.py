"""Calls every term once on two invented tokens, so that an author's mistakes show before a model is loaded."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from opd.errors import OpdError
from opd.heads import OutputHead
from opd.maths import TokenScores, score_tokens
from opd.tasks.prompt import Prompt
from opd.wire.types import PayloadKind
from student.data.needs import HIDDEN, SCORES, SCORES_AT_TEACHER, Needs, merge
from student.data.row import Row, RowKey
from student.data.token_batch import SignalTokens, StudentTokens, TokenBatch
from student.plugin.terms import Term, losses_of

_TOKENS, _VOCABULARY, _WIDTH = 2, 32, 4


def try_terms(terms: Sequence[Term]) -> Iterator[str]:
    """Compute a copy of each term on what it declares in its needs; a remark on each that fails otherwise than below.

    Raises:
        PluginError: for a term that reads what it does not declare, or returns something of another type or shape.
    """
    for term in terms:
        try:
            losses_of(copy.deepcopy(term), invented(merge([term.needs()])))
        except OpdError:
            raise
        except Exception as error:  # it may read of a row what an invented one lacks
            yield f"term {term.settings.name!r} failed on two invented tokens: {type(error).__name__}: {error}"


def invented(needs: Needs) -> TokenBatch:
    """A row of two tokens with all that `needs` names, and nothing else; float32 on the CPU."""
    random = torch.Generator().manual_seed(0)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=random)

    ids = torch.arange(_TOKENS)
    hidden, head = normal(_TOKENS, _WIDTH).requires_grad_(), OutputHead(normal(_VOCABULARY, _WIDTH).requires_grad_())
    logits = hidden @ head.weight.T
    own = logits.detach().topk(min(needs.candidates, _VOCABULARY)).indices if needs.candidates else None
    signals: dict[tuple[str, PayloadKind], SignalTokens] = {}
    taught = None
    for need in needs.signals:
        theirs, kind = normal(_TOKENS, _VOCABULARY).log_softmax(-1), need.spec.kind
        if kind is PayloadKind.HIDDEN:
            signals[need.role, kind] = SignalTokens(
                hidden=normal(_TOKENS, _WIDTH), head=OutputHead(normal(_VOCABULARY, _WIDTH))
            )
            continue
        at = own if kind is PayloadKind.GATHER else theirs.topk(min(need.spec.k, _VOCABULARY)).indices
        taught = at if kind is PayloadKind.TOPK else taught
        scores = score_tokens(theirs, candidate_ids=at, sampled_ids=ids)
        several = kind in (PayloadKind.GATHER, PayloadKind.TOPK)
        signals[need.role, kind] = SignalTokens(
            scores.sampled, *((scores.candidates, at, scores.log_tail) if several else ())
        )

    def scored(view: str, at: torch.Tensor | None) -> TokenScores | None:
        return score_tokens(logits, candidate_ids=at, sampled_ids=ids) if view in needs.student else None

    reads = HIDDEN in needs.student
    return TokenBatch(
        token_ids=ids,
        mask=torch.ones(_TOKENS, dtype=torch.bool),
        weights=torch.full((_TOKENS,), 1.0 / _TOKENS),
        row=torch.zeros(_TOKENS, dtype=torch.int64),
        position=torch.arange(_TOKENS),
        behaviour_logp=logits.detach().log_softmax(-1).gather(1, ids[:, None])[:, 0],
        candidates=own,
        rows=[_row()],
        student=StudentTokens(
            scored(SCORES, own),
            scored(SCORES_AT_TEACHER, taught),
            hidden if reads else None,
            head if reads else None,
        ),
        signals=signals,
        valid_vocab=_VOCABULARY,
    )


def _row() -> Row:
    prompt = Prompt.make("?")
    return Row(
        key=RowKey(0, prompt.uid, 0),
        prompt=prompt,
        prompt_ids=np.zeros(1, np.uint32),
        response_ids=np.arange(_TOKENS, dtype=np.uint32),
        behaviour_logp=np.full(_TOKENS, -1.0, np.float32),
        policy_version=np.zeros(_TOKENS, np.int32),
        loss_mask=np.ones(_TOKENS, np.bool_),
        truncated=False,
        text="",
    )
