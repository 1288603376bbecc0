"""Implements the services that controllers may use, on top of the parts of the loop."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from torch import Tensor

from opd.tasks.prompt import Prompt
from opd.wire.types import PayloadSpec, ScoreItem, Scores
from student.data.costs import Costs, Purpose
from student.data.needs import STUDENT
from student.data.outcome import Outcome
from student.data.plan import PromptCursor, StepPlan
from student.data.report import EvalReport
from student.data.row import Row
from student.data.streams import stream
from student.job.evaluator import Evaluator
from student.plugin.controllers import Services, Workbench
from student.scoring.local import LocalModels
from student.scoring.score import Scoring
from student.scoring.verify import Verification

T = TypeVar("T")


class ReadingServices:
    """Implements `student.scoring.rewards.base.RewardServices`: what needs only the models in this process.

    Args:
        local: these models.
        verification: knows the answers.
        tokenizer: the student's.
        poll: called while reading; may raise to give up.

    Attributes:
        tokenizer: see `RewardServices.tokenizer`.
        costs: tokens spent since the loop last took them.
    """

    def __init__(
        self, local: LocalModels, verification: Verification, tokenizer: Any, poll: Callable[[], None]
    ) -> None:
        self._local, self._verification, self._poll = local, verification, poll
        self.tokenizer = tokenizer
        self.costs = Costs()

    def read(
        self,
        items: Sequence[Row | ScoreItem],
        spec: PayloadSpec | None = None,
        *,
        model: str = STUDENT,
        temperature: float | None = None,
    ) -> list[Scores]:
        """Score any responses with a model in this process, as `Services.read` describes."""
        asked = [item.asked(gather=False, role=model) if isinstance(item, Row) else [(item, 0)] for item in items]
        self.costs.add("train", "local_positions", sum(len(request.token_ids) for mine in asked for request, _ in mine))
        return self._local.score(model, items, spec, temperature=temperature, poll=self._poll)

    def extract(self, rows: Sequence[Row]) -> list[str | None]:
        """The final answer of each row; None where there is none."""
        return self._verification.extract(rows)


class LoopServices(Services):
    """Implements `student.plugin.controllers.Services`.

    Args:
        bench: the weights, what samples from them, and the scorer of the objective.
        make_scorer: makes another scorer of the objective, for `Services.workbench`.
        reading: reads with the models in this process.
        evaluator: evaluates the current weights.
        local: the models in this process.
        cursor: the run's position in its training prompts.
        seed: the run's seed.

    Attributes:
        read, extract, tokenizer: those of `reading`.
        outcomes: see `Services.outcomes`; the loop sets them.
        costs: tokens spent since the loop last took them.
    """

    read: Callable[..., list[Scores]]
    extract: Callable[..., list[str | None]]

    def __init__(
        self,
        bench: Workbench,
        make_scorer: Callable[[], Scoring],
        *,
        reading: ReadingServices,
        evaluator: Evaluator,
        local: LocalModels,
        cursor: PromptCursor,
        seed: int,
    ) -> None:
        self._bench, self._make_scorer = bench, make_scorer
        self._evaluator, self._local, self._cursor, self._seed = evaluator, local, cursor, seed
        self.read, self.extract = reading.read, reading.extract
        self.tokenizer, self.costs = reading.tokenizer, reading.costs
        self.outcomes: Sequence[Outcome] = ()

    def workbench(self) -> Workbench:
        return replace(self._bench, scorer=self._make_scorer())

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        self._bench.sampler.expose()  # the caller may write to them, which the sampler cannot detect
        return self._bench.learner.named_parameters()

    def rollout(self, plan: StepPlan) -> list[Row]:
        return self._bench.sampler.sample(plan.rows, purpose=("probe",))

    def score(self, rows: Sequence[Row]) -> list[Row]:
        scorer = self._bench.scorer

        def work() -> None:
            for row in rows:
                scorer.ask(row)
            scorer.wait(rows, poll=self._bench.poll)

        self._bench.learner.ranks.agree(work)
        return list(rows)

    def refresh(self, model: str, decay: float) -> None:
        self._local.kept.refresh(model, decay)

    def gather(self, value: T) -> list[T]:
        return self._bench.learner.ranks.gather(value)

    def add_costs(self, counts: Mapping[str, float]) -> None:
        self.costs.merge(counts)

    def evaluate(
        self,
        prompts: Sequence[Prompt],
        *,
        seed_names: Sequence[object],
        samples: int = 1,
        reverse_kl: bool = False,
        temperature: float | None = None,
        purpose: Purpose | None = "gate",
        keep: int = 0,
        leakage: int = 0,
        slack: float = 1.0,
    ) -> EvalReport:
        """See `Services.evaluate`. Each rank answers a share of the prompts; all ranks get the report over all prompts.

        Args:
            prompts: the prompts.
            seed_names: names of the random streams.
            samples: answers per prompt.
            reverse_kl: whether to score the answers and measure the reverse KL.
            temperature: sampling temperature; None for that of the rollouts.
            purpose: the purpose under which costs are counted; None not to count them.
            keep: number of first answers in the report; samples.count of them have a divergence if one is measured.
            leakage: number of first problems whose answers the teachers of all modes score.
            slack: answers in a mode may be this many times as long as its budget.
        """
        return self._evaluator.run(
            prompts,
            seed_names=seed_names,
            samples=samples,
            reverse_kl=reverse_kl,
            temperature=temperature,
            purpose=purpose,
            keep=keep,
            leakage=leakage,
            slack=slack,
        )

    def prompts(self, count: int) -> list[Prompt]:
        return self._cursor.take(count)

    def training_prompts(self, count: int, *, seed_names: Sequence[object]) -> list[Prompt]:
        # Any start will do, because the stream of prompts is endless (a table starts again).
        start = int(stream(self._seed, "prompts", *seed_names).integers(0, 2**31))
        return self._cursor.source.prompts("train", count, start)

    def optimizer_moments(self) -> Iterator[tuple[str, dict[str, Tensor]]]:
        for name, parameter in self._bench.learner.named_parameters():
            yield name, self._bench.learner.optimizer.state.get(parameter, {})
