"""A row in the tokens of a teacher that has another tokenizer than the student, and its scores in the student's.

Shapes: P and U tokens of prompt and response to the teacher, T of the response to the student, K ids per position.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from opd.wire.types import ScoreItem, Scores

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Translation:
    """What a teacher reads for a row, and which of its tokens stand for which of the student's.

    Attributes:
        item: [P + U] the prompt by the teacher's template, and the text of the response.
        span: [T] the span of each of the student's tokens, as the position of its first token; -1 for tokens without a
            counterpart, from which nothing is learned.
        of: [U] the span of each of the teacher's tokens, likewise.
        at: [T] the teacher's token that begins at the same byte, so that both have read the same text before; or -1.
        sizes: [T] bytes of the student's tokens.
        onto: by id of the teacher, the student's longest token with which its text begins, or -1: where its probability
            goes; None if only log-probs of spans are needed.
    """

    item: ScoreItem
    span: Ints
    of: Ints
    at: Ints
    sizes: Ints
    onto: Ints | None = None

    @property
    def aligned(self) -> NDArray[np.bool_]:
        """[T] whether a token has a counterpart."""
        found: NDArray[np.bool_] = self.span >= 0
        return found

    def cut(self, end: int) -> "Translation":
        """That of a row whose response is cut after `end` tokens."""
        of = np.where(self.of < end, self.of, -1)
        return replace(self, span=self.span[:end], of=of, at=self.at[:end], sizes=self.sizes[:end])

    def scores(self, answer: Scores, behaviour: NDArray[np.float32]) -> Scores:
        """The teacher's answer about its own tokens as one about the student's.

        The tokens of a span share its log-prob such that each has the same log-ratio to the policy that sampled, so
        that sums over spans are exact, and single tokens may be shown. A top-k is put onto the student's ids by
        `marginal`.

        Args:
            answer: [U] the answer to `item`.
            behaviour: [T] log-probs under the sampler; NaN for tokens that were not sampled.
        """
        assert answer.sampled is not None
        # In double precision: the shares of a span must add up to its log-prob.
        sampled = np.where(np.isfinite(behaviour), behaviour, 0.0).astype(np.float64)
        place = np.where(self.aligned, self.span, 0)
        counted, taken = self.of >= 0, np.zeros(len(self.span))
        np.add.at(taken, self.of[counted], answer.sampled[counted].astype(np.float64))
        mine = np.bincount(place[self.aligned], sampled[self.aligned], len(self.span))
        size = np.bincount(place[self.aligned], minlength=len(self.span))
        shared = sampled - (mine[place] - taken[place]) / np.maximum(size[place], 1)
        alone = np.where(size[place] == 1, taken[place], shared)
        found = np.where(self.aligned, alone, sampled).astype(np.float32)
        answer = replace(answer, sampled=found, span=self.span)
        return answer if answer.values is None or self.onto is None else marginal(answer, self.onto, self.at)


def marginal(answer: Scores, onto: Ints, at: Ints) -> Scores:
    """Byte-prefix marginalisation: a teacher's top-k as probabilities of the student's tokens (arXiv 2607.22334).

    The probability of each of the teacher's tokens goes to the student's longest token with which its bytes begin.
    What goes to none of them is in the tail, with all outside the top-k.

    Args:
        answer: [U, K] the teacher's top-k at its own positions.
        onto: by id of the teacher, the student's id or -1.
        at: [T] the teacher's position with the same text before it; -1 for none.

    Returns:
        [T, K] distinct ids of the student, in descending order of log-prob. Ids that stand in unused places have
        log-prob -inf, and no probability is known of them but that it is in the tail. Where `at` is -1, all do.
    """
    assert answer.ids is not None and answer.values is not None and answer.log_tail is not None
    known, place = at >= 0, np.maximum(at, 0)
    ids = np.where(known[:, None], onto[answer.ids[place].astype(np.int64)], -1)
    mass = np.exp(answer.values[place].astype(np.float64))
    order = np.argsort(ids, axis=1, kind="stable")
    ids, mass = np.take_along_axis(ids, order, 1), np.take_along_axis(mass, order, 1)
    lost = np.where(ids < 0, mass, 0.0).sum(1) + np.exp(answer.log_tail[place].astype(np.float64))
    count, k = ids.shape
    begins = np.ones(ids.shape, np.bool_)
    begins[:, 1:] = ids[:, 1:] != ids[:, :-1]
    slot, row = np.cumsum(begins, axis=1) - 1, np.arange(count)[:, None]
    total, found = np.zeros(ids.shape), np.full(ids.shape, -1, np.int64)
    np.add.at(total, (np.broadcast_to(row, ids.shape), slot), np.where(ids < 0, 0.0, mass))
    found[np.broadcast_to(row, ids.shape), slot] = ids
    with np.errstate(divide="ignore"):
        values = np.where(found >= 0, np.log(total), -np.inf)
        tail = np.where(known, np.log(lost), 0.0)
    order = np.argsort(-values, axis=1, kind="stable")
    found, values = np.take_along_axis(found, order, 1), np.take_along_axis(values, order, 1)
    # Unused places, now the last ones, take ids below K that are not in the list, because ids must be distinct.
    free, low = np.ones((count, k), np.bool_), (found >= 0) & (found < k)
    free[np.broadcast_to(row, ids.shape)[low], found[low]] = False
    spare = np.argsort(~free, axis=1, kind="stable")[:, ::-1]
    found = np.where(found >= 0, found, spare)
    return replace(
        answer,
        ids=found.astype(np.uint32),
        values=values.astype(np.float32),
        log_tail=tail.astype(np.float32),
    )
