"""One step's sampling: what a rollout strategy is given to sample and score with, and which keeps its ranks in step.

    engine, episodes, slots  <-  PolicySampler  <-  Sampling  <-  Strategy.run
    models, verifier         <-  Scoring        <-

Ranks may need different numbers of rows, but never different numbers of rounds. Every loop over rounds must therefore
decide by the result of `any`, `gather` or `outcomes`, which is the same on every rank. If a rank fails, it says so in
its next exchange and the others stop too. A strategy whose ranks fall out of step fails with an error instead of
waiting forever.
"""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, TypeVar

from opd.errors import PluginError, short
from opd.tasks.prompt import Prompt
from student.data.outcome import Outcome, gather_outcomes
from student.data.plan import PlannedRow, PromptCursor, StepPlan
from student.data.row import Row, RowKey, are_rows
from student.model.ranks import Ranks
from student.scoring.rewards.rounds import StepRewards

if TYPE_CHECKING:
    from student.report.telemetry import StageClock
    from student.rollout.ahead import Ahead
    from student.rollout.policy_sampler import PolicySampler
    from student.scoring.score import Scoring

T = TypeVar("T")
_SUMMARIES = ("summaries", "summaries_empty", "summaries_cut", "context_saved")
_ASKS, _DONE = "asks", "done"


class _InStep(Ranks):
    """Ranks that run a strategy together; every exchange also carries what its rank is doing."""

    def __init__(self, ranks: Ranks, cursor: PromptCursor) -> None:
        self.count, self.index = ranks.count, ranks.index
        self._ranks, self._cursor = ranks, cursor

    def agree(self, work: Callable[[], T]) -> T:
        return self._ranks.agree(work)

    def gather(self, value: T) -> list[T]:
        return self.exchange(_ASKS, value)

    def exchange(self, kind: str, value: T) -> list[T]:
        """Exchange `value` among ranks that are all at the same place in the strategy.

        Raises:
            CancelledError: if another rank failed.
            RuntimeError: if the ranks are at different places, which is a bug in the strategy.
        """
        # Each value travels with what the rank is doing and how many prompts it has taken: if ranks differed in these,
        # the strategy would wait forever or train on different prompts.
        messages = self._ranks.gather((kind, self._cursor.taken, value))
        places = {(other, taken) for other, taken, _ in messages}
        if len(places) > 1:
            raise RuntimeError(
                f"the ranks of a rollout strategy are out of step: {sorted(places)} (call, prompts taken); decide "
                "whether to go on by what Sampling.any, gather or outcomes returned, and ask for prompts on every "
                "rank."
            )
        return [value for _, _, value in messages]


class Sampling:
    """What a strategy may call in one step; methods act on this rank unless their docstring says otherwise.

    A strategy that keeps every row calls `score(sample(planned))`, so that models score rows while others are still
    sampled. A strategy that may drop rows calls `judge(planned)`, so that models only score the rows that it chooses.
    Rewards see each group as a whole, over all rounds.

    Args:
        sampler: samples with the current weights.
        scorer: judges and scores each row as soon as it ends.
        rewards: the rewards of the step.
        plan: makes the plan for given prompts, including the changes of the run's methods.
        cursor: the run's position in its prompts.
        ranks: all ranks.
        clock: measures the time of each stage.
        poll: called between rows and while waiting; may raise to give up.
        ahead: gives the rows of the step's plan, which it has sampled already; None if nothing is sampled ahead.
        early: whether `score` leaves waiting for signals to `arrive`, because learning begins early.

    Attributes:
        rows: all rows sampled, for costs and metrics.
        scored: the rows that models were asked to score.
        rounds: number of calls of `sample` and `judge`.
        measured: metrics of the strategy, name -> (numerator, denominator) on this rank.
    """

    def __init__(
        self,
        sampler: "PolicySampler",
        scorer: "Scoring",
        rewards: StepRewards,
        plan: Callable[[Sequence[Prompt]], StepPlan],
        cursor: PromptCursor,
        ranks: Ranks,
        clock: "StageClock",
        poll: Callable[[], None] = lambda: None,
        *,
        ahead: "Ahead | None" = None,
        early: bool = False,
    ) -> None:
        self._sampler, self._scorer, self._rewards = sampler, scorer, rewards
        self._plan, self._cursor = plan, cursor
        self._ranks = _InStep(ranks, cursor)
        self._clock, self._poll = clock, poll
        self._ahead, self._early = ahead, early
        self._owner: dict[str, int] = {}  # rank of each group, in draw order; a prompt drawn twice stays on its rank
        self._samples: dict[str, int] = {}  # first free sample index of each group
        self._waiting: dict[int, Row] | None = None  # judged rows not sent to models yet; None if nothing was judged
        self.rows: list[Row] = []
        self.scored: list[Row] = []
        self._unscored: set[int] = set()  # rows sent to models whose scores were not waited for yet
        self._kept: list[Row] = []  # judged rows that were sent to models
        self._step = 0
        self._asked: float | None = None  # `time.monotonic()` when the first row was sent to the models
        self.rounds = 0
        self.measured: dict[str, tuple[float, float]] = {}

    @property
    def ranks(self) -> tuple[int, int]:
        """The number of ranks and the index of this one."""
        return self._ranks.count, self._ranks.index

    def run(self, strategy: Callable[[StepPlan, "Sampling"], list[Row]], plan: StepPlan) -> list[Row]:
        """Run a strategy on the whole plan and return its scored rows; if it fails on one rank, it fails on all.

        Args:
            strategy: the strategy's method `run`.
            plan: the plan of all ranks.

        Raises:
            OpdError: if the strategy failed on this rank.
            CancelledError: if it failed on another rank only.
        """
        self._step = plan.step
        return self._ranks.agree(lambda: self._ran(strategy, plan))

    def _ran(self, strategy: Callable[[StepPlan, "Sampling"], list[Row]], plan: StepPlan) -> list[Row]:
        rows = strategy(self._mine(plan), self)
        if not are_rows(rows):
            raise PluginError(
                f"{strategy.__qualname__} returned {short(rows)}; it must return a list of rows, which may be empty."
            )
        if any(id(row) in self._unscored for row in rows):
            raise PluginError(
                f"{strategy.__qualname__} returned rows that it sampled but did not score; return "
                "sampling.score(rows), or sample with sampling.judge."
            )
        if self._waiting is not None:
            self.keep(rows)
            self._wait(self._kept, judged=True)
        self._ranks.exchange(_DONE, None)
        return rows

    def sample(self, planned: Sequence[PlannedRow]) -> list[Row]:
        """Sample rows; each is sent to be scored as soon as it ends.

        Every rank must call it equally often, with no rows if it has none.
        """
        rows = self._round(planned, ask=True)
        self.scored += rows
        self._unscored |= {id(row) for row in rows}
        return rows

    def _round(self, planned: Sequence[PlannedRow], *, ask: bool) -> list[Row]:
        """Sample rows, which go to the verifier and, with `ask`, to models; see `Ahead` for those of the plan."""
        rows: dict[RowKey, Row] = {}
        if self._ahead is not None and not self.rounds:
            rows = {row.key: row for row in self._sampled_ahead(self._ahead, planned, ask=ask)}
        self.rounds += 1
        left = [row for row in planned if row.key not in rows]
        begin = self._scorer.ask if ask else self._scorer.verify

        def on_row(row: Row) -> None:
            self._poll()
            self._asked = self._asked or time.monotonic()
            begin(row)

        # All ranks or none, because ranks may share the engine or gather the weights together.
        if self._ahead is None or self.any(bool(left)):
            with self._clock.stage("rollout"):
                sampled = self._sampler.sample(left, on_row=on_row, poll=self._poll)
            rows |= {row.key: row for row in sampled}
        ordered = [rows[row.key] for row in planned]
        self.rows += ordered
        return ordered

    def _sampled_ahead(self, ahead: "Ahead", planned: Sequence[PlannedRow], *, ask: bool) -> list[Row]:
        """The rows of the step that were sampled ahead; waits for those that are still being sampled."""
        with self._clock.stage("wait_rollout"):
            sampled = ahead.take(self._step, planned, self._poll)
        if ask and not ahead.asks:
            self._ask(sampled.rows)
        if sampled.rows:
            self._asked = sampled.sent
            self._clock.beside = {
                "rollout_seconds": sampled.end - sampled.begin,
                "sampler_idle_seconds": sampled.idle,
            }
            self._clock.draw("sampler", "rollout", sampled.begin, sampled.end)
        return sampled.rows

    def _ask(self, rows: Sequence[Row]) -> None:
        """Send rows whose judging has begun to the models."""
        for row in rows:
            self._scorer.ask(row, verify=False)

    def _wait(self, rows: Sequence[Row], *, judged: bool = False) -> None:
        """Wait for signals and, unless `judged`, for verdicts and rewards; learning early leaves the former to come."""
        with self._clock.stage("wait_teacher"):
            if not self._early:
                self._scorer.wait(rows, self._rewards, judged=judged, poll=self._poll)
            else:
                self._scorer.begin(rows, poll=self._poll)
                if not judged:
                    self._scorer.judge(rows, self._rewards, poll=self._poll)
        self._draw_scoring()

    def arrive(self, rows: Sequence[Row]) -> None:
        """Wait for the signals of rows for which `score` did not wait, because learning begins early."""
        with self._clock.stage("wait_teacher"):
            self._scorer.arrive(rows, poll=self._poll)
            # Here rather than in the learner's pass, in which a failure could not be reported to other ranks.
            self._scorer.fetch_heads(rows)
        self._draw_scoring()

    def _draw_scoring(self) -> None:
        if self._asked is not None and not self._scorer.begun:
            self._clock.draw("teachers", "scoring", self._asked, time.monotonic())
            self._asked = None

    def close(self) -> None:
        """Cancel requests that nothing has waited for."""
        self._scorer.give_up()

    def score(self, rows: Sequence[Row]) -> list[Row]:
        """Wait for signals, verdicts and rewards of sampled rows; every rank must call it equally often."""
        self._wait(rows)
        self._unscored -= {id(row) for row in rows}
        return list(rows)

    def judge(self, planned: Sequence[PlannedRow]) -> list[Row]:
        """Sample rows and wait for their verdicts and rewards; models then score the rows that the strategy returns.

        Every rank must call it equally often, with no rows if it has none. If a reward reads the scores of models, all
        rows are scored before this returns.
        """
        if self._rewards.reads_signals:
            return self.score(self.sample(planned))
        rows = self._round(planned, ask=False)
        with self._clock.stage("wait_verifier"):
            self._scorer.judge(rows, self._rewards, poll=self._poll)
        self._waiting = {**(self._waiting or {}), **{id(row): row for row in rows}}
        return rows

    def keep(self, rows: Sequence[Row]) -> None:
        """Start scoring judged rows that the strategy will return, while it samples more."""
        waiting = self._waiting or {}
        chosen = [row for row in rows if waiting.pop(id(row), None) is not None]
        self._ask(chosen)
        self._kept += chosen
        self.scored += chosen

    def extract(self, rows: Sequence[Row]) -> list[str | None]:
        """The final answer of each row, in a form in which equal answers compare equal; None if there is none."""
        return self._scorer.extract(rows)

    def fits(self, prompt: Prompt) -> bool:
        """Whether a prompt, for example one with a hint, is within rollout.max_prompt_tokens."""
        return self._sampler.fits(prompt)

    def said(self, row: Row) -> list[str]:
        """The student's turns in an episode as text, in the form that an environment without tools reads."""
        return self._sampler.said(row)

    def rescore(self, rows: Sequence[Row]) -> list[Row]:
        """Have models score rows of earlier steps again; rewards are kept. Every rank must call it equally often."""
        self._ask(rows)
        self.scored += rows
        self._wait(rows, judged=True)
        return list(rows)

    @property
    def drawn(self) -> list[str]:
        """Groups of all ranks in the order in which their prompts were drawn, by which to choose a surplus to drop."""
        return list(self._owner)

    def more(self, prompts: int) -> StepPlan:
        """Take `prompts` more prompts and return this rank's share of their plan; every rank must ask for as many."""
        return self._mine(self._plan(self._cursor.take(prompts)))

    def again(self, planned: Sequence[PlannedRow]) -> list[PlannedRow]:
        """Plan further samples of the same groups: `planned` with new sample indices, and so new random streams."""
        return [self._fresh(row) for row in planned]

    def gather(self, value: T) -> list[T]:
        """The values of all ranks, in the order of ranks; every rank must call it."""
        return self._ranks.gather(value)

    def any(self, flag: bool) -> bool:
        """Whether `flag` is true on any rank; every rank must call it."""
        return self._ranks.any(flag)

    def outcomes(self, rows: Sequence[Row]) -> list[Outcome]:
        """The outcomes of `rows` of all ranks, sorted by key; every rank must call it."""
        return gather_outcomes(rows, self._ranks)[0]

    def measure(self, name: str, value: float, count: float = 1.0) -> None:
        """Add to a metric of the step: the sum of `value` over the sum of `count`, over all ranks."""
        top, bottom = self.measured.get(name, (0.0, 0.0))
        self.measured[name] = (top + value, bottom + count)

    def _mine(self, plan: StepPlan) -> StepPlan:
        """This rank's groups of a plan, dealt out evenly; a prompt drawn before goes to the rank with its group."""
        fresh = [g for g in dict.fromkeys(row.key.group for row in plan.rows) if g not in self._owner]
        self._owner |= {group: place % self._ranks.count for place, group in enumerate(fresh)}
        mine = [row for row in plan.rows if self._owner[row.key.group] == self._ranks.index]
        # A new group keeps its planned sample indices, which methods have seen. Further rows of a known group get new
        # indices, because a repeated index would draw from the same random stream.
        begun = set(self._samples)
        rows = tuple(self._fresh(row) if row.key.group in begun else row for row in mine)
        for row in rows:
            group = row.key.group
            self._samples[group] = max(self._samples.get(group, 0), row.key.sample + 1)
        return replace(plan, rows=rows)

    def _fresh(self, row: PlannedRow) -> PlannedRow:
        sample = self._samples.get(row.key.group, 0)
        self._samples[row.key.group] = sample + 1
        return replace(row, key=replace(row.key, sample=sample))

    def counts(self) -> dict[str, float]:
        """Counts of this rank, to be summed over ranks and passed to `metrics`."""
        ended = [row.tags["ended"] for row in self.rows if "ended" in row.tags]
        broken = sum(how.startswith("broken") for how in ended)
        counts: dict[str, float] = {"sampled_rows": float(len(self.rows))}
        counts |= {"top/episodes_broken": float(broken), "bottom/episodes_broken": float(len(ended))}
        windows = [len(row.windows) for row in self.rows if row.windows]
        counts |= {"top/episode_windows": float(sum(windows)), "bottom/episode_windows": float(len(windows))}
        counts |= self._summaries()
        for name, (top, bottom) in self.measured.items():
            counts |= {f"top/{name}": top, f"bottom/{name}": bottom}
        return counts

    def _summaries(self) -> dict[str, float]:
        """Counts for episodes with `history: summary`: summaries, empty and cut ones, and context tokens saved."""
        notes = [row.notes for row in self.rows if "summaries" in row.notes]
        if not notes:
            return {}
        sums = {name: sum(note[name] for note in notes) for name in (*_SUMMARIES, "turns")}
        bottoms = dict(zip(_SUMMARIES, (len(notes), sums["summaries"], sums["summaries"], sums["turns"]), strict=True))
        tops = {f"top/{name}": sums[name] for name in _SUMMARIES}
        return tops | {f"bottom/{name}": float(count) for name, count in bottoms.items()}

    def metrics(self, counts: dict[str, float]) -> dict[str, float]:
        """Metrics of the step from `counts`, summed over all ranks."""
        metrics = {"rollout_rounds": float(self.rounds), "sampled_rows": counts["sampled_rows"]}
        for key, top in counts.items():
            kind, _, name = key.partition("/")
            if kind == "top" and counts[f"bottom/{name}"]:
                metrics[name] = top / counts[f"bottom/{name}"]
        return metrics
