"""Implements the stages of a step that a rollout strategy goes through: sampling, judging and scoring."""

import time
from collections.abc import Callable, Sequence

from opd.tasks.encode import encode_prompt
from opd.tasks.prompt import Prompt
from student.data.plan import PlannedRow
from student.data.row import Row, RowKey
from student.job.job import Job
from student.report.telemetry import StageClock
from student.rollout.ahead import Ahead
from student.scoring.rewards.rounds import StepRewards


class StepStages:
    """Implements `student.plugin.rounds.RolloutStages` for one step: each row is scored as soon as it ends.

    Args:
        job: the parts of the run.
        step: the step, counted from 0.
        clock: measures the time of each stage.
        poll: called between rows and while waiting; may raise to give up.

    Attributes:
        any: `Rollouts.any`, set by the loop: whether a flag is true on any rank.
    """

    def __init__(self, job: Job, step: int, clock: StageClock, poll: Callable[[], None]) -> None:
        self._job, self.step, self.clock, self._poll = job, step, clock, poll
        self._asked: float | None = None  # `time.monotonic()` when the first row was sent to the models
        self.any: Callable[[bool], bool] = bool
        self._taken = False  # whether the rows that were sampled ahead have been handed out
        self._rewards = StepRewards(job.rewards, job.services)
        self.judges_first = not job.rewards.reads_signals

    def sample(self, planned: Sequence[PlannedRow], *, ask: bool) -> list[Row]:
        """See `RolloutStages.sample`; with sampling ahead, the rows of the step's plan have been sampled already."""
        ahead = self._job.ahead
        if ahead is None:
            return self._sampled_now(planned, ask=ask)
        found: dict[RowKey, Row] = {}
        if not self._taken:
            self._taken = True
            found = {row.key: row for row in self._sampled_ahead(ahead, planned, ask=ask)}
        rest = [row for row in planned if row.key not in found]
        # All ranks or none, because ranks may share the engine or gather the weights together.
        if self.any(bool(rest)):
            found |= {row.key: row for row in self._sampled_now(rest, ask=ask)}
        return [found[row.key] for row in planned]

    def _sampled_now(self, planned: Sequence[PlannedRow], *, ask: bool) -> list[Row]:
        begin = self._job.scorer.ask if ask else self._job.scorer.verify

        def on_row(row: Row) -> None:
            self._poll()
            self._asked = self._asked or time.monotonic()
            begin(row)

        with self.clock.stage("rollout"):
            return self._job.sampler.sample(planned, on_row=on_row, poll=self._poll)

    def _sampled_ahead(self, ahead: Ahead, planned: Sequence[PlannedRow], *, ask: bool) -> list[Row]:
        """The rows of the step that were sampled ahead; waits for those that are still being sampled."""
        with self.clock.stage("wait_rollout"):
            found = ahead.take(self.step, planned, self._poll)
        if ask and not self._job.asks_ahead:
            self.ask(found.rows)
        if not found.rows:
            return []
        self._asked = found.sent
        self.clock.beside = {"rollout_seconds": found.end - found.begin, "sampler_idle_seconds": found.idle}
        self.clock.draw("sampler", "rollout", found.begin, found.end)
        return found.rows

    def ask(self, rows: Sequence[Row]) -> None:
        """See `RolloutStages.ask`."""
        for row in rows:
            self._job.scorer.ask(row, verify=False)

    def judge(self, rows: Sequence[Row]) -> None:
        """See `RolloutStages.judge`."""
        with self.clock.stage("wait_verifier"):
            self._job.scorer.judge(rows, self._rewards, poll=self._poll)

    def score(self, rows: Sequence[Row], *, judged: bool) -> None:
        """See `RolloutStages.score`; if the job learns early, `arrive` waits for the signals instead."""
        scorer = self._job.scorer
        with self.clock.stage("wait_teacher"):
            if self._job.learns_early:
                scorer.begin(rows, poll=self._poll)
                if not judged:
                    scorer.judge(rows, self._rewards, poll=self._poll)
            else:
                scorer.wait(rows, self._rewards, judged=judged, poll=self._poll)
        if not scorer.begun:
            self._scored()

    def arrive(self, rows: Sequence[Row]) -> None:
        """Wait for the signals of rows for which `score` did not wait."""
        with self.clock.stage("wait_teacher"):
            self._job.scorer.arrive(rows, poll=self._poll)
            # Here rather than in the learner's pass, in which a failure could not be reported to other ranks.
            self._job.scorer.fetch_heads(rows)
        if not self._job.scorer.begun:
            self._scored()

    def close(self) -> None:
        """Cancel requests that nothing has waited for."""
        self._job.scorer.give_up()

    def _scored(self) -> None:
        if self._asked is not None:
            self.clock.draw("teachers", "scoring", self._asked, time.monotonic())
            self._asked = None

    def extract(self, rows: Sequence[Row]) -> list[str | None]:
        """See `RolloutStages.extract`."""
        return self._job.services.extract(rows)

    def fits(self, prompt: Prompt) -> bool:
        """See `RolloutStages.fits`."""
        return len(encode_prompt(prompt, self._job.tokenizer)) <= self._job.recipe.rollout.max_prompt_tokens

    def said(self, row: Row) -> list[str]:
        """See `RolloutStages.said`."""
        decode = self._job.tokenizer.decode
        return [str(decode(row.response_ids[start:end], skip_special_tokens=True)) for start, end in row.actions]
