"""The services that controllers may use, on top of the loop's stages."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from opd.fleet.membership.outage import OutageHooks
from opd.tasks.prompt import Prompt
from opd.tasks.source import PromptSource
from opd.wire.types import PayloadSpec, ScoreItem, Scores
from student.controllers import EvalReport
from student.data.cursor import PromptCursor
from student.data.outcome import Outcome
from student.data.plan import StepPlan
from student.data.row import Row
from student.data.streams import stream
from student.evaluate import estimator_of, mean_divergence, report, sample_answers
from student.learning.learner import Learner
from student.methods.distil.opd import OnPolicyDistillation
from student.methods.windows.probe import Probe, Prober, ProbeSpec
from student.recipe import Recipe
from student.rollout.engine import Sampler
from student.run.costs import Costs, Purpose, positions
from student.run.samples import sample_of
from student.scoring.local import LocalModels
from student.scoring.needs import STUDENT
from student.scoring.score import Scorer
from student.scoring.verify import Verification


class LoopServices:
    """Implements `student.controllers.Services`.

    Args:
        recipe: the run's recipe.
        learner: weights and optimizer.
        tokenizer: the student's.
        source: prompts and verifier.
        scorer: signals for the objective.
        sampler: samples from the current weights.
        kl_scorer: signals for the measurement of reverse KL, or None when no teacher serves one.
        kl_term: measures reverse KL on what `kl_scorer` gives.
        poll: called while waiting for the fleet.
        prober: runs gradient probes, with a scorer of its own.
        local: the models in process.
        cursor: the run's place in its training prompts.
        verification: judges answers.

    Attributes:
        tokenizer: see `Services.tokenizer`.
        outcomes: see `Services.outcomes`; the loop sets them.
        costs: tokens spent since the loop last took them.
        prober: runs gradient probes, with a scorer of its own.
    """

    def __init__(
        self,
        recipe: Recipe,
        learner: Learner,
        tokenizer: Any,
        source: PromptSource,
        scorer: Scorer,
        sampler: Sampler,
        kl_scorer: Scorer | None,
        kl_term: OnPolicyDistillation | None,
        poll: Callable[[], None],
        prober: Prober,
        local: LocalModels,
        cursor: PromptCursor,
        verification: Verification,
    ) -> None:
        self._cursor = cursor
        self.prober = prober
        self._local = local
        self._verification = verification
        self._recipe = recipe
        self._learner = learner
        self.tokenizer = tokenizer
        self._source = source
        self._scorer = scorer
        self._sampler = sampler
        self._kl_scorer = kl_scorer
        self._kl_term = kl_term
        self._poll = poll
        self.costs = Costs()
        self.outcomes: Sequence[Outcome] = ()

    def hook_outages(self, hooks: OutageHooks) -> None:
        """Have `hooks` called while any scorer of the run waits for a teacher that is away."""
        for scorer in (self._scorer, self._kl_scorer):
            if scorer is not None:
                scorer.hooks = hooks

    def parameters(self) -> Iterator[tuple[str, Tensor]]:
        """See `Services.parameters`."""
        self._sampler.expose()
        return self._learner.named_parameters()

    def rollout(self, plan: StepPlan) -> list[Row]:
        """See `Services.rollout`."""
        return self._sampler.sample(plan.rows, purpose=("probe",))

    def score(self, rows: Sequence[Row]) -> list[Row]:
        """See `Services.score`."""

        def work() -> None:
            for row in rows:
                self._scorer.submit(row)
            self._scorer.collect(rows, poll=self._poll)

        self._learner.ranks.agree(work)
        return list(rows)

    def read(
        self,
        items: Sequence[Row | ScoreItem],
        spec: PayloadSpec | None = None,
        *,
        model: str = STUDENT,
        temperature: float | None = None,
    ) -> list[Scores]:
        """See `Services.read`."""
        requests = [item.score_item(gather=False, role=model) if isinstance(item, Row) else item for item in items]
        self.costs.add("train", "local_positions", sum(len(request.token_ids) for request in requests))
        return self._local.score(model, items, spec, temperature=temperature, poll=self._poll)

    def extract(self, rows: Sequence[Row]) -> list[str | None]:
        """See `Services.extract`."""
        return self._verification.extract(rows)

    def refresh(self, model: str, decay: float) -> None:
        """See `Services.refresh`."""
        self._local.refresh(model, decay)

    def start_probe(self, plan: StepPlan, spec: ProbeSpec, weights: dict[str, Tensor] | None = None) -> Probe:
        """See `Services.start_probe`."""
        return self.prober.start(plan, spec, weights)

    def add_costs(self, counts: Mapping[str, float]) -> None:
        """See `Services.add_costs`."""
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
    ) -> EvalReport:
        """See `Services.evaluate`; `temperature` defaults to the rollout's, costs go to `purpose`.

        With `keep`, the report holds the first so many answers; the first samples.count of them have a divergence each
        where one is measured.
        """
        level = self._recipe.rollout.temperature if temperature is None else temperature
        kl_scorer = self._kl_scorer if reverse_kl else None
        on_policy = level == self._recipe.rollout.temperature
        shown = min(keep, self._recipe.samples.count)

        def work() -> tuple[list[Row], list[Row]]:
            rows = self._answers(prompts, seed_names, samples, level, kl_scorer if on_policy else None)
            if kl_scorer is None:
                return rows, []
            scored = rows
            if not on_policy:
                scored = self._answers(prompts, seed_names, 1, self._recipe.rollout.temperature, kl_scorer)
                for row in rows[:shown]:
                    kl_scorer.submit(row)
                kl_scorer.collect(rows[:shown], poll=self._poll)
            kl_scorer.collect(scored, poll=self._poll)
            return rows, scored

        rows, scored = self._learner.ranks.agree(work)
        if purpose is not None:
            self.costs.sampled(purpose, rows)
        value = None
        if kl_scorer is not None and self._kl_term is not None:
            if purpose is not None:
                self.costs.scored(purpose, kl_scorer.positions(scored))
                self.costs.add(purpose, "decoded_positions", positions(scored))
                if not on_policy:
                    self.costs.sampled(purpose, scored)
            value = mean_divergence(self._learner, scored, self._kl_term, self._kl_term.needs())
        self._verification.collect(rows, poll=self._poll)
        found = report(rows, samples, value, "" if self._kl_term is None else estimator_of(self._kl_term))
        return replace(found, samples=self._samples(rows[:keep], 0 if value is None else shown))

    def _samples(self, rows: Sequence[Row], measured: int) -> list[dict[str, Any]]:
        """The answers for samples.jsonl, the first `measured` with their divergence."""
        found = []
        for index, row in enumerate(rows):
            kl = None
            if index < measured and self._kl_term is not None:
                kl = mean_divergence(self._learner, [row], self._kl_term, self._kl_term.needs())
            found.append(sample_of(row, kl))
        return found

    def _answers(
        self,
        prompts: Sequence[Prompt],
        seed_names: Sequence[object],
        samples: int,
        temperature: float,
        scorer: Scorer | None,
    ) -> list[Row]:
        def on_row(row: Row) -> None:
            self._poll()
            if scorer is not None:
                scorer.submit(row)

        return sample_answers(
            self._sampler,
            prompts,
            samples=samples,
            temperature=temperature,
            max_new_tokens=self._recipe.rollout.max_new_tokens,
            names=seed_names,
            on_row=on_row,
        )

    def prompts(self, count: int) -> list[Prompt]:
        """See `Services.prompts`."""
        return self._cursor.take(count)

    def training_prompts(self, count: int, *, seed_names: Sequence[object]) -> list[Prompt]:
        """See `Services.training_prompts`."""
        start = int(stream(self._recipe.seed, "prompts", *seed_names).integers(0, 2**31))
        return self._source.prompts("train", count, start)

    def optimizer_moments(self) -> Iterator[tuple[str, dict[str, Tensor]]]:
        """See `Services.optimizer_moments`."""
        for name, parameter in self._learner.named_parameters():
            yield name, self._learner.optimizer.state.get(parameter, {})
