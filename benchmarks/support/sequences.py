"""Whole responses of a tiny language, enumerated: what the mean over a batch does to an estimator's gradient.

An estimator that is unbiased at every position, given its prefix, stays so in a sum. In a mean the weight of a token
depends on the length of the response, and the length on the tokens that were drawn, so weight and estimate are
correlated. That correlation is computed here exactly, for any number of rows in a batch.
"""

from dataclasses import dataclass, field
from functools import cache, cached_property
from itertools import product

import torch
from torch import Tensor

from support.estimator_forms import Estimator, Problem

VOCABULARY, LONGEST = 4, 3
END = VOCABULARY - 1
#: With four tokens: two candidates for wide supports, one for narrow ones.
SUPPORTS = {64: 2, 8: 1}

Prefix = tuple[int, ...]
Lengths = dict[int, float]
"""Probability of each number of tokens."""


@dataclass(frozen=True, eq=False)
class Language:
    """A student and a teacher that write at most `LONGEST` tokens; a response ends with token `END`, or is cut.

    Attributes:
        problem: logits [P, V], a row for each prefix.
    """

    problem: Problem
    _tokens: dict[int, Lengths] = field(default_factory=dict)

    @classmethod
    def make(cls, noise: float, seed: int) -> "Language":
        """Teacher logits N(0, 1), student = teacher + noise N(0, 1)."""
        generator = torch.Generator().manual_seed(seed)
        shape = len(PREFIXES), VOCABULARY
        teacher, gap = (torch.randn(*shape, generator=generator, dtype=torch.float64) for _ in "TG")
        return cls(Problem(teacher + noise * gap, teacher, SUPPORTS))

    @cached_property
    def probability(self) -> list[list[float]]:
        """[P][V] of the student."""
        found: list[list[float]] = self.problem.student.softmax(-1).tolist()
        return found

    def reached(self, prefix: Prefix) -> float:
        """Probability that a response of the student begins with `prefix`."""
        share = 1.0
        for t, token in enumerate(prefix):
            share *= self.probability[PREFIXES.index(prefix[:t])][token]
        return share

    def tokens(self, rows: int) -> Lengths:
        """How many tokens that many responses have together."""
        if rows not in self._tokens:
            total: Lengths = {} if rows else {0: 1.0}
            before = self.tokens(rows - 1) if rows else {}
            for (a, p), (b, q) in product(before.items(), self.lengths(()).items()):
                total[a + b] = total.get(a + b, 0.0) + p * q
            self._tokens[rows] = total
        return self._tokens[rows]

    def lengths(self, begun: Prefix) -> Lengths:
        """How long a response that begins so will be."""
        if len(begun) == LONGEST or (begun and begun[-1] == END):
            return {len(begun): 1.0}
        total: Lengths = {}
        for token, share in enumerate(self.probability[PREFIXES.index(begun)]):
            for length, chance in self.lengths((*begun, token)).items():
                total[length] = total.get(length, 0.0) + share * chance
        return total


def _prefixes() -> list[Prefix]:
    """Everything that the next token may follow."""
    return [prefix for t in range(LONGEST) for prefix in product(range(END), repeat=t)]


PREFIXES = _prefixes()


@cache
def mean_weight(language: Language, begun: Prefix, aggregation: str, rows: int) -> float:
    """Expected weight of a token of a response that begins so, times the rows of the batch.

    Args:
        language: gives the lengths of this response and of the others.
        begun: the response up to the token and with it.
        aggregation: "constant", "sequence_mean" or "token_mean".
        rows: responses in the batch.
    """
    mine = language.lengths(begun)
    if aggregation == "constant":
        return 1.0
    if aggregation == "sequence_mean":
        return sum(chance / length for length, chance in mine.items())
    pairs = product(mine.items(), language.tokens(rows - 1).items())
    return rows * sum(p * q / (length + rest) for (length, p), (rest, q) in pairs)


def batch_bias(estimator: Estimator, language: Language, aggregation: str, rows: int = 1) -> float:
    """Distance of the batch's expected gradient from the one with every estimate replaced by its expectation.

    Relative to the batch's gradient of the divergence that the estimator is meant for; 0 for estimators that do not
    look at the sampled token.
    """
    student, teacher = language.problem.student, language.problem.teacher
    count = len(PREFIXES)
    index, tokens = torch.arange(count).repeat_interleave(VOCABULARY), torch.arange(VOCABULARY).repeat(count)
    leaf, exact = student[index].requires_grad_(), student.clone().requires_grad_()
    (gradient,) = torch.autograd.grad(estimator.loss(language.problem, index, leaf, tokens).sum(), leaf)
    (truth,) = torch.autograd.grad(estimator.target(exact, teacher), exact)
    added: Tensor = torch.zeros_like(truth)
    for row, (prefix, mine) in enumerate(zip(PREFIXES, gradient.split(VOCABULARY), strict=True)):
        share = torch.tensor(language.probability[row], dtype=torch.float64)
        weights = [mean_weight(language, (*prefix, token), aggregation, rows) for token in range(VOCABULARY)]
        weighted = language.reached(prefix) * share * torch.tensor(weights, dtype=torch.float64)
        added[row] = weighted @ mine - weighted.sum() * (share @ mine)
        truth[row] *= weighted.sum()
    return float(added.norm() / truth.norm())
