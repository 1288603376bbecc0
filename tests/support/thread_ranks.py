"""Rollout strategies without a model: ranks that are threads which exchange values, and rows of a given reward."""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
from rows import make_row
from waiting import PATIENCE

from opd.config import parse_settings
from opd.errors import CancelledError, OpdError, OutageError
from opd.tasks.build import build_prompts
from opd.tasks.prompt import Prompt
from opd.tasks.settings import TaskSettings
from opd.tasks.verdict import Verdict
from opd.wire.types import PayloadKind, Scores
from student.data.needs import STUDENT
from student.data.plan import PlannedRow, PromptCursor, StepPlan, plan_step
from student.data.row import Row
from student.model.ranks import Ranks
from student.plugin.strategy import STRATEGIES, Strategy
from student.report.telemetry import StageClock
from student.rl import REWARDS
from student.rollout.sampling import Sampling
from student.scoring.rewards.chain import RewardChain
from student.scoring.rewards.rounds import StepRewards

SOURCE = build_prompts(TaskSettings(task="addition", options={"digits": 2}), seed=0)


class Meeting:
    """Where the threads of a test exchange values; a rank that does not come breaks it instead of the test hanging."""

    def __init__(self, count: int) -> None:
        self.values: list[Any] = [None] * count
        self.barrier = threading.Barrier(count, timeout=PATIENCE)

    def rank(self, index: int) -> Ranks:
        meeting = self

        class Told(Ranks):
            def __init__(self) -> None:
                self.count, self.index = len(meeting.values), index

            def _send(self, message: Any) -> list[Any]:
                meeting.values[index] = message
                meeting.barrier.wait()
                found = list(meeting.values)
                meeting.barrier.wait()
                return found

        return Told()


def of_each(work: Callable[[Ranks], Any], count: int = 3) -> list[Any]:
    """What `work` gives, or the error that ends it, on ranks that are threads."""
    meeting = Meeting(count)

    def one(index: int) -> Any:
        try:
            return work(meeting.rank(index))
        except (OpdError, RuntimeError) as error:
            return error

    with ThreadPoolExecutor(count) as pool:
        return list(pool.map(one, range(count)))


def sampled(planned: PlannedRow, reward: float, length: int = 2) -> Row:
    """A row of that reward, at each of whose tokens the student was undecided between two."""
    row = make_row(length, key=planned.key, prompt=planned.prompt, tags=planned.tags)
    row.signals[STUDENT, PayloadKind.GATHER] = Scores(values=np.full((length, 2), np.log(0.5), np.float32))
    if planned.behaviour_prompt is not None:
        row.origin, row.behaviour_prompt_ids = "hinted", np.ones(length, np.uint32)
    row.verdict = Verdict.score(reward)
    return row


def plan(prompts: Sequence[Prompt]) -> StepPlan:
    return plan_step(0, prompts, samples=2, max_new_tokens=4, temperature=1.0)


def mixed(planned: PlannedRow) -> Row:
    """Rewards differ within every third prompt or so."""
    return sampled(planned, planned.key.sample % 2 if int(planned.key.uid, 16) % 3 == 0 else 0.0)


class ByReward:
    """A sampler without a model: rows as `reward` makes them, with their verdicts.

    Attributes:
        longest: characters that a prompt may have.
    """

    def __init__(self, reward: Callable[[PlannedRow], Row] = mixed, longest: int = 10_000) -> None:
        self._reward, self.longest = reward, longest

    def sample(self, planned: Sequence[PlannedRow], *, on_row: Callable[[Row], None], poll: Any) -> list[Row]:
        rows = [self._reward(one) for one in planned]
        for row in rows:
            on_row(row)
        return rows

    def fits(self, prompt: Prompt) -> bool:
        return len(prompt.text or "") <= self.longest

    def said(self, row: Row) -> list[str]:
        return row.text.split()


class Asked:
    """A scorer without models, whose answers are there at once.

    Attributes:
        asked: rows that models were asked about, in order.
    """

    tokenizer, begun = None, False

    def __init__(self) -> None:
        self.asked: list[Row] = []

    def verify(self, row: Row) -> None:
        pass

    def ask(self, row: Row, *, verify: bool = True) -> None:
        self.asked.append(row)

    def judge(self, rows: Sequence[Row], rewards: StepRewards, *, poll: Any) -> None:
        rewards(rows)

    def wait(self, rows: Sequence[Row], rewards: StepRewards, *, judged: bool, poll: Any) -> None:
        assert {id(row) for row in rows} <= {id(row) for row in self.asked}
        if not judged:
            rewards(rows)

    def read(self, *arguments: Any, **options: Any) -> Any:
        raise TypeError("there is no model here")

    def extract(self, rows: Sequence[Row]) -> list[str | None]:
        return [row.text or None for row in rows]


def step_rewards(entries: Sequence[dict[str, Any]], scorer: Asked) -> StepRewards:
    made = [(REWARDS.load(entry["name"]), entry) for entry in entries]
    return StepRewards(RewardChain([cls(parse_settings(cls.settings_type, entry)) for cls, entry in made]), scorer)


def together(
    count: int,
    make: Callable[[], Strategy],
    reward: Callable[[PlannedRow], Row] = mixed,
    groups: int = 4,
    plan: Callable[[Sequence[Prompt]], StepPlan] = plan,
    rewards: Sequence[dict[str, Any]] = (),
    judges_first: bool = True,
    longest: int = 10_000,
) -> list[Any]:
    """(rows, sampling, cursor) of each rank, or the error that ended it."""
    meeting = Meeting(count)

    def work(index: int) -> Any:
        cursor = PromptCursor(SOURCE)
        scorer: Any = Asked()
        chain = step_rewards(rewards, scorer)
        chain.reads_signals = not judges_first
        sampler: Any = ByReward(reward, longest)
        sampling = Sampling(sampler, scorer, chain, plan, cursor, meeting.rank(index), StageClock())
        try:
            return sampling.run(make().run, plan(cursor.take(groups))), sampling, cursor
        except (CancelledError, OutageError, RuntimeError) as error:
            return error

    with ThreadPoolExecutor(count) as pool:
        return [future.result() for future in [pool.submit(work, index) for index in range(count)]]


def keys(rows: Sequence[Row]) -> set[tuple[str, int]]:
    return {(row.key.uid, row.key.sample) for row in rows}


def build(name: str, **settings: Any) -> Any:
    cls = STRATEGIES.load(name)
    return cls(parse_settings(cls.settings_type, {"name": name, **settings}))


def of(samples: int, step: int = 0) -> Callable[[Sequence[Prompt]], StepPlan]:
    return lambda prompts: plan_step(step, prompts, samples=samples, max_new_tokens=4, temperature=1.0)


def metrics_of(sampling: Any) -> dict[str, float]:
    return dict(sampling.metrics(sampling.counts()))


def place(planned: PlannedRow) -> int:
    """0, 1 or 2 by prompt."""
    return int(planned.key.uid, 16) % 3


class Ordered:
    """A source of training prompts in a given order."""

    def __init__(self, order: Sequence[Prompt]) -> None:
        self.order = list(order)

    def prompts(self, split: str, count: int, start: int = 0) -> list[Prompt]:
        return self.order[start : start + count]
