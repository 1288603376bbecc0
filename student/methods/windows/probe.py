"""Gradient probes: full rollouts of a snapshot of the student, and the inner products of their gradients by position.

A probe runs in a thread during training, on a copy of the student as it was when the probe started. It samples full
responses, has them scored, splits their tokens into segments of positions and the prompts into folds, and reduces the
gradients of the objective on each (fold, segment) to one small Gram matrix. With several ranks it runs in the
foreground, because collectives of two threads would interleave; each rank takes a share of the prompts, the result is
the same, and no copy is needed.

Costs: one more copy of the student; folds x segments gradient vectors during the measurement; and about twice the
forward and backward passes of the probe's rows, because the rows of a segment are cut at its end (exact for losses that
are sums over tokens, as position t does not see what follows).
"""

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from opd.errors import CancelledError
from opd.wire.types import Scores
from student.data.costs import Costs
from student.data.plan import PlannedRow, StepPlan
from student.data.row import EpisodeTrace, Row, RowKey
from student.data.streams import stream
from student.data.token_batch import TokenBatch
from student.learning.learner import Learner
from student.methods.windows.gradient_metric import GradientMetric, gram
from student.plugin.controllers import Workbench

AnyRow = TypeVar("AnyRow", Row, PlannedRow)


@dataclass(frozen=True, slots=True)
class ProbeSpec:
    """What a probe measures.

    Attributes:
        edges: ends of the segments in tokens, ascending; the first segment begins at 0.
        folds: number of parts of the rows (whole prompts) with separate gradients.
        metric: the inner product.
        null: also measure segments of the same sizes that consist of random positions.
        per_domain: measure each domain separately.
        background: run during training, on a copy of the student; otherwise at once, while training waits.
    """

    edges: tuple[int, ...]
    folds: int
    metric: GradientMetric
    null: bool = False
    per_domain: bool = False
    background: bool = True


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """What a probe found.

    Attributes:
        grams: by domain ("" if all are together), inner products [F, S, F, S] of the gradients of folds and segments,
            float64.
        nulls: the same for random positions; empty unless asked for.
        costs: what the probe spent, under the names of `Costs`.
    """

    grams: dict[str, NDArray[np.float64]]
    nulls: dict[str, NDArray[np.float64]]
    costs: dict[str, float] = field(default_factory=dict)


class Probe:
    """A probe that has been started.

    Args:
        outcome: the result, or a future of it.
        weights: returns the tensors that it measures; None for a probe in the foreground, which is finished.
    """

    def __init__(
        self, outcome: ProbeResult | Future[ProbeResult], weights: Callable[[], dict[str, Tensor]] | None = None
    ) -> None:
        self._outcome = outcome
        self._weights = weights

    def result(self) -> ProbeResult:
        """Wait for the result."""
        return self._outcome.result() if isinstance(self._outcome, Future) else self._outcome

    def state_dict(self) -> dict[str, Any]:
        """What a resumed run needs: the trained tensors to restart it from, or the result of a foreground probe.

        Whether a background probe has finished does not matter, so that a checkpoint does not depend on timing.
        """
        if self._weights is not None:
            return {"weights": self._weights()}
        return {"result": dataclasses.asdict(self.result())}


class Prober:
    """Runs probes, one at a time.

    Args:
        bench: its learner gives the student to copy and the objective to differentiate; its sampler samples from the
            student, or makes an engine for the copy.
    """

    def __init__(self, bench: Workbench) -> None:
        self._learner, self._sampler, self._scorer = bench.learner, bench.sampler, bench.scorer
        self._poll = bench.poll
        bench.closing(self.close)
        self._twin: Learner | None = None
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="probe")
        self._closing = False

    def start(self, plan: StepPlan, spec: ProbeSpec, weights: dict[str, Tensor] | None = None) -> Probe:
        """Start a probe of the rows of `plan` on the current weights, or on `weights`."""
        # Models in this process would be read while training changes them, and a sharded student cannot be copied.
        alone = self._learner.accelerator.num_processes == 1 and not self._scorer.reads_locally
        alone = alone and not self._learner.sharded
        if not spec.background or not alone:
            return Probe(self._measure(self._learner, plan, spec))
        twin = self._copy(weights)
        threads = torch.get_num_threads()

        def work() -> ProbeResult:
            torch.set_num_threads(threads)  # torch's setting is per thread, and sums depend on it
            return self._measure(twin, plan, spec)

        future = self._pool.submit(work)
        return Probe(future, lambda: {name: p.detach().clone() for name, p in twin.named_parameters()})

    def close(self) -> None:
        """Cancel a running probe and wait for its thread."""
        self._closing = True
        self._pool.shutdown(cancel_futures=True)

    def _check(self) -> None:
        if self._closing:
            raise CancelledError("the run has ended")
        self._poll()

    @torch.no_grad()
    def _copy(self, weights: dict[str, Tensor] | None) -> Learner:
        """The copy of the learner with the current weights; made once, and refreshed for every probe."""
        if self._twin is None:
            self._twin = copy.copy(self._learner)
            self._twin.student = self._twin.wrapped = copy.deepcopy(self._learner.student)
        # Terms keep statistics of the current step, so the thread needs terms of its own.
        self._twin.objective = copy.deepcopy(self._learner.objective)
        source = dict(self._learner.named_parameters()) if weights is None else weights
        for name, parameter in self._twin.named_parameters():
            parameter.copy_(source[name])
            parameter.grad = None
        return self._twin

    def _measure(self, twin: Learner, plan: StepPlan, spec: ProbeSpec) -> ProbeResult:
        costs, ranks = Costs(), self._learner.ranks
        # Each rank has a share of the prompts; folds and domains are those of all ranks, which every rank knows.
        mine = plan.shard(ranks.index, ranks.count)
        rows = ranks.agree(lambda: self._scored(twin, mine))
        costs.sampled("probe", rows)
        costs.scored("probe", self._scorer.positions(rows))
        # In the foreground the twin is the learner itself, whose gradients must be restored.
        kept = {name: p.grad for name, p in twin.named_parameters()}
        found = {row.key: row for row in rows}
        names = sorted({row.prompt.domain or "" for row in plan.rows}) if spec.per_domain else [""]
        grams, nulls = {}, {}
        for name in names:
            planned = [row for row in plan.rows if not spec.per_domain or (row.prompt.domain or "") == name]
            folds = [[found[row.key] for row in fold if row.key in found] for fold in split_folds(planned, spec.folds)]
            grams[name] = self._gram(twin, folds, spec, costs, random=False)
            if spec.null:
                nulls[name] = self._gram(twin, folds, spec, costs, random=True)
        for name, parameter in twin.named_parameters():
            parameter.grad = kept[name]
        # The same on every rank, because one rank writes the checkpoint; summed over ranks, they are the total.
        return ProbeResult(grams, nulls, {name: n / ranks.count for name, n in ranks.total(costs.take()).items()})

    def _scored(self, twin: Learner, plan: StepPlan) -> list[Row]:
        engine = self._sampler if twin is self._learner else self._sampler.fork(twin.student.lm)
        rows = engine.sample(plan.rows, purpose=("probe",), on_row=self._submit)
        self._scorer.wait(rows, poll=self._check)
        return rows

    def _submit(self, row: Row) -> None:
        self._check()
        self._scorer.ask(row)

    def _gram(
        self, twin: Learner, folds: Sequence[Sequence[Row]], spec: ProbeSpec, costs: Costs, *, random: bool
    ) -> NDArray[np.float64]:
        weights = _weights(twin, [row for fold in folds for row in fold])
        vectors = []
        for fold in folds:
            for segment in pairwise((0, *spec.edges)):
                self._check()
                vectors.append(_segment_vector(twin, fold, segment, weights, spec.metric, costs, random=random))
        count = len(spec.edges)
        # Vectors are ordered by fold and then by segment, as the shape requires.
        return gram(torch.stack(vectors)).numpy().reshape(spec.folds, count, spec.folds, count)


def _weights(twin: Learner, rows: Sequence[Row]) -> dict[RowKey, list[Tensor]]:
    """For each row and term, the weight [T] of each position in the objective on the rows of all ranks."""
    twin.objective.prepare(rows)
    found = twin.objective.position_weights(rows, twin.accelerator.device)
    parts = [every.split([row.length for row in rows]) for every in found]
    return {row.key: [part[i] for part in parts] for i, row in enumerate(rows)}


def _segment_vector(
    twin: Learner,
    rows: Sequence[Row],
    segment: tuple[int, int],
    weights: Mapping[RowKey, Sequence[Tensor]],
    metric: GradientMetric,
    costs: Costs,
    *,
    random: bool,
) -> Tensor:
    """The contribution of a segment's positions, in the `rows` of all ranks, to the objective's gradient, as a vector.

    The weights are computed from all rows of the probe. From only the rows that reach the segment, each segment would
    have its own denominators, and so would each term, because terms skip different rows.
    """
    start, end = segment
    for _, parameter in twin.named_parameters():
        parameter.grad = None

    def inside(batch: TokenBatch) -> Tensor:
        position = _shuffled(batch) if random else batch.position
        return (position >= start) & (position < end)

    chosen = [row for row in rows if row.length > start]
    # Random positions lie anywhere in the row, so rows are cut only for segments of true positions.
    cut = chosen if random else [cut_row(row, end) for row in chosen]
    empty = torch.zeros(0, device=twin.accelerator.device)
    of_terms = [
        torch.cat([empty, *(weights[row.key][i][: row.length] for row in cut)])
        for i in range(len(twin.objective.terms))
    ]
    twin.accumulate(cut, inside, weights=of_terms)
    costs.trained("probe", cut)
    return metric.vector(twin.named_parameters())


def split_folds(rows: Sequence[AnyRow], folds: int) -> list[list[AnyRow]]:
    """Split rows into `folds` parts of nearly equal size; rows of a prompt stay together, as their noise is shared."""
    groups: dict[str, list[AnyRow]] = {}
    for row in rows:
        groups.setdefault(row.key.uid, []).append(row)
    parts: list[list[AnyRow]] = [[] for _ in range(folds)]
    for group in groups.values():
        min(parts, key=len).extend(group)  # the first of the smallest: a function of the plan alone
    return parts


def cut_row(row: Row, end: int) -> Row:
    """The row with its response and signals cut after `end` tokens."""
    if row.length <= end:
        return row
    return dataclasses.replace(
        row,
        response_ids=row.response_ids[:end],
        behaviour_logp=row.behaviour_logp[:end],
        policy_version=row.policy_version[:end],
        loss_mask=row.loss_mask[:end],
        truncated=True,
        candidates=None if row.candidates is None else row.candidates[:end],
        turns=tuple((a, min(b, end)) for a, b in row.turns if a < end),
        episode=None if row.episode is None else _cut_episode(row.episode, row.turns, end),
        turn_rewards=row.turn_rewards[: sum(a < end for a, _ in row.turns)],
        token_rewards=None if row.token_rewards is None else row.token_rewards[:end],
        signals={key: _cut_scores(scores, end) for key, scores in row.signals.items()},
        translations={teacher: translation.cut(end) for teacher, translation in row.translations.items()},
    )


def _cut_episode(episode: EpisodeTrace, turns: Sequence[tuple[int, int]], end: int) -> EpisodeTrace:
    return dataclasses.replace(
        episode,
        tool_mask=episode.tool_mask[:end],
        windows=tuple((since, a, min(b, end)) for since, a, b in episode.windows if a < end),
        summaries=tuple(turn for turn in episode.summaries if turns[turn][0] < end),
    )


def _cut_scores(scores: Scores, end: int) -> Scores:
    arrays = {
        name: getattr(scores, name) for name in ("sampled", "values", "ids", "log_tail", "hidden", "logits", "span")
    }
    return dataclasses.replace(scores, **{name: a[:end] for name, a in arrays.items() if a is not None})


def _shuffled(batch: TokenBatch) -> Tensor:
    """Each position's place in a random permutation of its row's positions, which depends on the row's key alone."""
    orders = [
        stream(0, "null", row.key.step, row.key.uid, row.key.sample).permutation(row.length) for row in batch.rows
    ]
    return torch.from_numpy(np.concatenate(orders)).to(batch.position.device)
