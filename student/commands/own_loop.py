"""A job without its loop: the parts of `student.train`, with a call for each stage of a step."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from opd.errors import ConfigError
from opd.tasks.prompt import Prompt
from student.data.outcome import Outcome, gather_outcomes
from student.data.plan import plan_step
from student.data.report import StepReport
from student.data.row import Row
from student.job.job import Job, build_job
from student.learning.blame import blaming
from student.learning.objective import quotients
from student.run.checkpoint import save_checkpoint
from student.run.model_folder import model_parts
from student.scoring.rewards.rounds import StepRewards
from student.settings.recipe import Recipe


@contextmanager
def open_session(recipe: Recipe) -> Iterator["LoopSession"]:
    """Load the student and connect to its teachers for the duration of the block.

    A session is not resumed: where its loop stands is known to the caller alone, who may begin another one from the
    model that `LoopSession.save` wrote.

    Raises:
        ConfigError: if the recipe has what only the loop of `student.train` carries out.
        OpdError: as `student.train` does before its first step.
        PluginError: in place of a plug-in's exception that ends the block.
    """
    train = recipe.train
    of_the_loop = {
        "methods": bool(recipe.methods),
        "rollout.strategy": recipe.rollout.strategy.get("name") != "single",
        "teachers.ema.served": recipe.teachers is not None and recipe.teachers.ema.served is not None,
        "train.epochs": train.epochs > 1,
        "train.max_staleness": train.max_staleness > 0,
        "train.minibatches": train.minibatches > 1,
    }
    for key, found in of_the_loop.items():
        if found:
            raise ConfigError(
                f"{key} is set, which only the loop of student.train carries out; leave it out of the recipe of a "
                "session, or use student.train."
            )
    with ExitStack() as stack:
        job = build_job(recipe, stack, poll=lambda: None)
        with blaming(job.learner.ranks.count):
            yield LoopSession(job)


class LoopSession:
    """The student, its optimizer and its teachers; an update is rollout, score, loss and step.

    Args:
        job: its parts.

    Attributes:
        job: the parts, such as `job.learner.student.lm`, the model of transformers.
        steps: number of steps made.
    """

    def __init__(self, job: Job) -> None:
        self.job = job
        self.steps = 0
        self._drawn: list[Prompt] = []  # prompts answered since the last step
        self._learnt: tuple[Sequence[Row], list[Outcome]] | None = None
        job.local.kept.start(job.models.local, fresh=True)
        job.sampler.moved(0)

    def rollout(self, prompts: Sequence[Prompt] | None = None) -> list[Row]:
        """Sample rollout.samples_per_prompt answers to each prompt with the current weights; returns this rank's share.

        Args:
            prompts: what to answer; None for the next rollout.prompts_per_step prompts of the recipe.
        """
        settings, cursor, ranks = self.job.recipe.rollout, self.job.cursor, self.job.learner.ranks
        if prompts is None:
            prompts = cursor.take(settings.prompts_per_step)
            cursor.commit()
        # Planned after the prompts before them, so that a prompt answered again in a step is answered anew.
        plan = plan_step(
            self.steps,
            [*self._drawn, *prompts],
            samples=settings.samples_per_prompt,
            max_new_tokens=settings.max_new_tokens,
            temperature=settings.temperature,
        )
        fresh = replace(plan, rows=plan.rows[len(self._drawn) * settings.samples_per_prompt :])
        self._drawn += prompts
        return self.job.sampler.sample(fresh.shard(ranks.index, ranks.count).rows)

    def score(self, rows: Sequence[Row]) -> None:
        """Give sampled rows the scores, verdicts and rewards that the objective reads; call it once for a row."""
        for row in rows:
            self.job.scorer.ask(row)
        self.job.scorer.wait(rows, StepRewards(self.job.plugins.rewards, self.job.services))

    def loss(self, rows: Sequence[Row]) -> dict[str, float]:
        """Replace the parameters' `.grad` by the gradient of the objective on scored rows; returns its metrics.

        Raises:
            RuntimeError: if none of the rows has been scored.
        """
        learner, needs = self.job.learner, self.job.scorer.needs
        signals, verdicts = [row.signals for row in rows], [row.verdict for row in rows]
        if rows and ((needs.signals and not any(signals)) or (needs.reward == "verdict" and not any(verdicts))):
            raise RuntimeError("loss reads the scores of rows; call score(rows) first")
        outcomes, places = gather_outcomes(rows, learner.ranks)
        learner.objective.assess(rows, outcomes, places)
        learner.optimizer.zero_grad(set_to_none=True)
        self._learnt = rows, outcomes
        return quotients(learner.begin(rows, self.steps, lambda _: None) or {})

    def step(self) -> dict[str, float]:
        """Clip the gradient, take the optimizer's step and show terms and rewards the result; returns metrics.

        Raises:
            RuntimeError: without a gradient from `loss`.
            NonFiniteError: if it is not finite; the weights are unchanged.
        """
        if self._learnt is None:
            raise RuntimeError("step applies the gradient of loss; call loss(rows) first")
        (rows, outcomes), self._learnt = self._learnt, None
        metrics = quotients(self.job.learner.update(rows, self.steps) or {}) | self.job.local.kept.after_step(
            self.steps
        )
        report = StepReport(self.steps, metrics, outcomes)
        self.steps, self._drawn = self.steps + 1, []
        self.job.sampler.moved(self.steps)
        self.job.learner.objective.observe(report)
        self.job.plugins.rewards.observe(report)
        return metrics

    def save(self, folder: str | Path) -> Path:
        """Write model and tokenizer below `folder`, without the optimizer; returns their own, for `from_pretrained`."""
        learner = self.job.learner
        parts = model_parts("model", learner.student, self.job.tokenizer, learner.ranks)
        return save_checkpoint(Path(folder), self.steps, parts, keep=self.steps + 1, ranks=learner.ranks) / "model"
