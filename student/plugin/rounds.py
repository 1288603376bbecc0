"""The interface through which a rollout strategy samples and scores, and which keeps its ranks in step.

Ranks may need different numbers of rows, but never different numbers of rounds. Every loop over rounds must therefore
decide by the result of `any`, `gather` or `outcomes`, which is the same on every rank. If a rank fails, it says so in
its next exchange and the others stop too. A strategy whose ranks fall out of step fails with an error instead of
waiting forever.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Protocol, TypeVar

from opd.errors import PluginError, short
from opd.tasks.prompt import Prompt
from student.data.outcome import Outcome, gather_outcomes
from student.data.plan import PlannedRow, PromptCursor, StepPlan
from student.data.row import Row, are_rows
from student.model.ranks import Ranks

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
        told = self._ranks.gather((kind, self._cursor.taken, value))
        places = {(other, taken) for other, taken, _ in told}
        if len(places) > 1:
            raise RuntimeError(
                f"the ranks of a rollout strategy are out of step: {sorted(places)} (call, prompts taken); decide "
                "whether to go on by what Rollouts.any, gather or outcomes returned, and ask for prompts on every "
                "rank."
            )
        return [value for _, _, value in told]


class RolloutStages(Protocol):
    """What the loop does for a strategy, on this rank.

    Attributes:
        judges_first: whether rows can be judged before models score them, because no reward reads the scores.
    """

    judges_first: bool

    def sample(self, planned: Sequence[PlannedRow], *, ask: bool) -> list[Row]:
        """Sample rows; each goes to the verifier as soon as it ends and, with `ask`, to the scoring models."""

    def ask(self, rows: Sequence[Row]) -> None:
        """Send judged rows to the scoring models; returns at once."""

    def judge(self, rows: Sequence[Row]) -> None:
        """Wait for the verdicts and rewards of rows."""

    def score(self, rows: Sequence[Row], *, judged: bool) -> None:
        """Wait for the signals of rows that were sent and, unless they are `judged`, for verdicts and rewards."""

    def extract(self, rows: Sequence[Row]) -> list[str | None]:
        """The final answer of each row."""

    def fits(self, prompt: Prompt) -> bool:
        """Whether a prompt is within rollout.max_prompt_tokens."""

    def said(self, row: Row) -> list[str]:
        """The student's turns in an episode, as text."""


class Rollouts:
    """What a strategy may call; methods act on this rank unless their docstring says otherwise.

    A strategy that keeps every row calls `score(sample(planned))`, so that models score rows while others are still
    sampled. A strategy that may drop rows calls `judge(planned)`, so that models only score the rows that it chooses.
    Rewards see each group as a whole, over all rounds.

    Args:
        stages: does the sampling, judging and scoring.
        plan: makes the plan for given prompts, including the changes of the run's methods.
        cursor: the run's position in its prompts.
        ranks: all ranks.

    Attributes:
        rows: all rows sampled, for costs and metrics.
        scored: the rows that models were asked to score.
        rounds: number of calls of `sample` and `judge`.
        measured: metrics of the strategy, name -> (numerator, denominator) on this rank.
    """

    def __init__(
        self,
        stages: RolloutStages,
        plan: Callable[[Sequence[Prompt]], StepPlan],
        cursor: PromptCursor,
        ranks: Ranks,
    ) -> None:
        self._stages, self._plan, self._cursor = stages, plan, cursor
        self._ranks = _InStep(ranks, cursor)
        self._owner: dict[str, int] = {}  # rank of each group, in draw order; a prompt drawn twice stays on its rank
        self._samples: dict[str, int] = {}  # first free sample index of each group
        self._waiting: dict[int, Row] | None = None  # judged rows not sent to models yet; None if nothing was judged
        self.rows: list[Row] = []
        self.scored: list[Row] = []
        self._unscored: set[int] = set()  # rows sent to models whose scores were not waited for yet
        self._kept: list[Row] = []  # judged rows that were sent to models
        self.rounds = 0
        self.measured: dict[str, tuple[float, float]] = {}

    @property
    def ranks(self) -> tuple[int, int]:
        """The number of ranks and the index of this one."""
        return self._ranks.count, self._ranks.index

    def run(self, strategy: Callable[[StepPlan, "Rollouts"], list[Row]], plan: StepPlan) -> list[Row]:
        """Run a strategy on the whole plan and return its scored rows; if it fails on one rank, it fails on all.

        Args:
            strategy: the strategy's method `run`.
            plan: the plan of all ranks.

        Raises:
            OpdError: if the strategy failed on this rank.
            CancelledError: if it failed on another rank only.
        """
        return self._ranks.agree(lambda: self._ran(strategy, plan))

    def _ran(self, strategy: Callable[[StepPlan, "Rollouts"], list[Row]], plan: StepPlan) -> list[Row]:
        rows = strategy(self._mine(plan), self)
        if not are_rows(rows):
            raise PluginError(
                f"{strategy.__qualname__} returned {short(rows)}; it must return a list of rows, which may be empty."
            )
        if any(id(row) in self._unscored for row in rows):
            raise PluginError(
                f"{strategy.__qualname__} returned rows that it sampled but did not score; return "
                "rollouts.score(rows), or sample with rollouts.judge."
            )
        if self._waiting is not None:
            self.keep(rows)
            self._stages.score(self._kept, judged=True)
        self._ranks.exchange(_DONE, None)
        return rows

    def sample(self, planned: Sequence[PlannedRow]) -> list[Row]:
        """Sample rows; each is sent to be scored as soon as it ends.

        Every rank must call it equally often, with no rows if it has none.
        """
        return self._sampled(planned, ask=True)

    def _sampled(self, planned: Sequence[PlannedRow], *, ask: bool) -> list[Row]:
        self.rounds += 1
        rows = self._stages.sample(planned, ask=ask)
        self.rows += rows
        if ask:
            self.scored += rows
            self._unscored |= {id(row) for row in rows}
        return rows

    def score(self, rows: Sequence[Row]) -> list[Row]:
        """Wait for signals, verdicts and rewards of sampled rows; every rank must call it equally often."""
        self._stages.score(rows, judged=False)
        self._unscored -= {id(row) for row in rows}
        return list(rows)

    def judge(self, planned: Sequence[PlannedRow]) -> list[Row]:
        """Sample rows and wait for their verdicts and rewards; models then score the rows that the strategy returns.

        Every rank must call it equally often, with no rows if it has none. If a reward reads the scores of models, all
        rows are scored before this returns.
        """
        if not self._stages.judges_first:
            return self.score(self.sample(planned))
        rows = self._sampled(planned, ask=False)
        self._stages.judge(rows)
        self._waiting = {**(self._waiting or {}), **{id(row): row for row in rows}}
        return rows

    def keep(self, rows: Sequence[Row]) -> None:
        """Start scoring judged rows that the strategy will return, while it samples more."""
        waiting = self._waiting or {}
        chosen = [row for row in rows if waiting.pop(id(row), None) is not None]
        self._stages.ask(chosen)
        self._kept += chosen
        self.scored += chosen

    def extract(self, rows: Sequence[Row]) -> list[str | None]:
        """The final answer of each row, in a form in which equal answers compare equal; None if there is none."""
        return self._stages.extract(rows)

    def fits(self, prompt: Prompt) -> bool:
        """Whether a prompt, for example one with a hint, is within rollout.max_prompt_tokens."""
        return self._stages.fits(prompt)

    def said(self, row: Row) -> list[str]:
        """The student's turns in an episode as text, in the form that an environment without tools reads."""
        return self._stages.said(row)

    def rescore(self, rows: Sequence[Row]) -> list[Row]:
        """Have models score rows of earlier steps again; rewards are kept. Every rank must call it equally often."""
        self._stages.ask(rows)
        self.scored += rows
        self._stages.score(rows, judged=True)
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
        known = set(self._samples)
        rows = tuple(self._fresh(row) if row.key.group in known else row for row in mine)
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
        found: dict[str, float] = {"sampled_rows": float(len(self.rows))}
        found |= {"top/episodes_broken": float(broken), "bottom/episodes_broken": float(len(ended))}
        windows = [len(row.windows) for row in self.rows if row.windows]
        found |= {"top/episode_windows": float(sum(windows)), "bottom/episode_windows": float(len(windows))}
        found |= self._summaries()
        for name, (top, bottom) in self.measured.items():
            found |= {f"top/{name}": top, f"bottom/{name}": bottom}
        return found

    def _summaries(self) -> dict[str, float]:
        """Counts for episodes with `history: summary`: summaries, empty and cut ones, and context tokens saved."""
        notes = [row.notes for row in self.rows if "summaries" in row.notes]
        if not notes:
            return {}
        sums = {name: sum(one[name] for one in notes) for name in (*_SUMMARIES, "turns")}
        bottoms = dict(zip(_SUMMARIES, (len(notes), sums["summaries"], sums["summaries"], sums["turns"]), strict=True))
        tops = {f"top/{name}": sums[name] for name in _SUMMARIES}
        return tops | {f"bottom/{name}": float(count) for name, count in bottoms.items()}

    def metrics(self, counts: dict[str, float]) -> dict[str, float]:
        """Metrics of the step from `counts`, summed over all ranks."""
        found = {"rollout_rounds": float(self.rounds), "sampled_rows": counts["sampled_rows"]}
        for key, top in counts.items():
            kind, _, name = key.partition("/")
            if kind == "top" and counts[f"bottom/{name}"]:
                found[name] = top / counts[f"bottom/{name}"]
        return found
