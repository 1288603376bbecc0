"""Given answers among the sampled ones: GKD's mixture, golden rollouts, and a cold start.

    share        share of each step's rows whose answer is given instead of sampled. GKD (arXiv 2306.13649) has
                 share = 1 - lambda and one divergence on all rows; StableOPD (2604.08527) mixes in golden rollouts
                 against length inflation
    cold_steps   number of first steps in which all answers are given, usually with term sft (arXiv 2604.13016)

Answers are the worked solution or the reference answer of the prompt, or recorded answers from a file, for example the
teacher's. For episodes they are the actions of a known or recorded path (`source: path`, `opd episodes record`), which
are played in the environment. The prompt's column `slips` may list the indices of actions that are mistakes; they are
played but not learnt from. Terms choose between given and sampled rows by their setting `rows`.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from pydantic import Field, model_validator

from opd.errors import ConfigError, DataError
from opd.tasks.environments.base import ENVIRONMENT, PATH
from opd.tasks.modes import asked_content
from student.data.plan import EpisodePlan
from student.data.streams import stream
from student.plugin.controllers import Controller, ControllerSettings
from student.plugin.traits import Traits
from student.rollout.recorded import read_answers

if TYPE_CHECKING:
    from collections.abc import Sequence

    from opd.tasks.prompt import Prompt
    from student.data.plan import PlannedRow, StepPlan
    from student.plugin.controllers import Services
    from student.plugin.terms import Term
    from student.settings.recipe import Recipe


class ExpertRowsSettings(ControllerSettings):
    """Settings of given rows."""

    share: float = Field(
        0.0, ge=0, le=1, description="Share of a step's rows whose answers are given instead of sampled."
    )
    cold_steps: int = Field(0, ge=0, description="Number of first steps in which all answers are given.")
    source: Literal["solution", "answer", "file", "path"] = Field(
        "solution",
        description="Where given answers come from: solution (the prompt's worked solution), answer (its reference "
        "answer), file (see `file`), or, for episodes, path (the actions of the prompt's path, which are played in "
        "the environment).",
    )
    file: Path | None = Field(
        None, description='With source file: a .jsonl file, each line with "prompt" and "answer".'
    )
    missing: Literal["error", "drop"] = Field(
        "error",
        description="What happens if too few prompts have an answer to give: error stops the run; drop gives fewer, "
        "and leaves the other rows out of the step (for files of verified answers, which do not cover every prompt).",
    )
    seed: int = Field(0, ge=0, description="Seed of the choice of rows that are given.")

    @model_validator(mode="after")
    def _check(self) -> ExpertRowsSettings:
        if (self.source == "file") != (self.file is not None):
            raise ValueError(
                f"source is {self.source} and file is {self.file}; source: file needs a file, and the other sources "
                "must leave it out"
            )
        if not (self.share or self.cold_steps):
            raise ValueError("share and cold_steps are both 0, so no answers would be given; set one of them")
        return self


class ExpertRows(Controller[ExpertRowsSettings]):
    """Mixes given answers with sampled ones: GKD's mixture, cold start."""

    @property
    def traits(self) -> Traits:
        paths = self.settings.source == "path"
        return Traits(
            works_ahead=True,
            works_with_summaries=not paths,
            gives_rows=("all", "expert"),
            gives_scored="given" if paths else "all",
            why={
                "works_with_summaries": "its recorded paths contain no summaries",
                "gives_rows": "add term sft, or set rows to all",
            },
        )

    def __init__(self, settings: ExpertRowsSettings) -> None:
        super().__init__(settings)
        self._recorded: dict[int, list[str]] = {}

    def check(self, recipe: Recipe, terms: Sequence[Term]) -> None:
        """Refuse a share that gives no row.

        Raises:
            ConfigError: naming the setting to change.
        """
        rows = recipe.rollout.prompts_per_step * recipe.rollout.samples_per_prompt
        if self.settings.share and not round(self.settings.share * rows):
            raise ConfigError(
                f"share {self.settings.share} of method expert_rows gives none of the {rows} rows of a step; raise it "
                "or rollout.prompts_per_step."
            )

    def check_prompts(self, prompts: Sequence[Prompt]) -> None:
        """Read the recorded answers, and refuse prompts of which none has an answer, where `missing` is an error.

        Raises:
            DataError: with the source of the answers.
        """
        self._read()
        if self.settings.missing == "error" and not any(map(self._answers, prompts)):
            raise DataError(
                f"method expert_rows gives answers from source {self.settings.source}, but none of the first "
                f"{len(prompts)} prompts has one; correct its source, or add answers to the prompts."
            )

    def start(self, services: Services) -> None:
        """Read the recorded answers, unless `check_prompts` has."""
        self._read()

    def _read(self) -> None:
        if self.settings.file is not None and not self._recorded:
            self._recorded = read_answers(self.settings.file)

    def plan(self, plan: StepPlan) -> StepPlan:
        """Give a fixed number of rows their answer, chosen by seed and step among those that have one.

        Raises:
            DataError: when fewer rows than wanted have an answer.
        """
        s = self.settings
        wanted = len(plan.rows) if plan.step < s.cold_steps else round(s.share * len(plan.rows))
        able = [i for i, row in enumerate(plan.rows) if self._answers(row.prompt)]
        if s.missing == "drop" and len(able) < wanted:
            able, plan, wanted = self._drop(plan, wanted)
        if len(able) < wanted:
            missing = next(row.prompt.uid for i, row in enumerate(plan.rows) if i not in able)
            raise DataError(
                f"{wanted} of the {len(plan.rows)} rows of step {plan.step} should be given, but only {len(able)} "
                f"have an answer (source {s.source}), and prompt {missing} has none; lower share or cold_steps, add "
                "answers, or set missing: drop."
            )
        # A function of seed and step alone, so that a step that is taken again chooses the same rows.
        order = stream(s.seed, "expert_rows", plan.step).permutation(len(able))
        chosen = {able[int(i)] for i in order[:wanted]}
        return replace(plan, rows=tuple(self._give(row) if i in chosen else row for i, row in enumerate(plan.rows)))

    def _drop(self, plan: StepPlan, wanted: int) -> tuple[list[int], StepPlan, int]:
        """Drop one row without an answer from the step for each answer that is missing.

        Returns:
            Indices of the rows that have an answer in the new plan, the new plan, and how many of its rows to give.
        """
        able = {i for i, row in enumerate(plan.rows) if self._answers(row.prompt)}
        lacking = [i for i in range(len(plan.rows)) if i not in able]
        # Drop only as many as answers are missing, so that as many rows as planned are still sampled.
        gone = set(lacking[: wanted - len(able)])
        rows = tuple(row for i, row in enumerate(plan.rows) if i not in gone)
        return [i for i, row in enumerate(rows) if self._answers(row.prompt)], replace(plan, rows=rows), len(able)

    def after_update(self, step: int, services: Services) -> dict[str, float]:
        """Metric expert_share; also counts the tokens that sampling the recorded answers once cost."""
        given = [outcome for outcome in services.outcomes if outcome.origin == "expert"]
        metrics = {"expert_share": len(given) / max(1, len(services.outcomes))}
        if self.settings.source == "file":
            metrics["cost/train/expert_tokens"] = float(sum(outcome.length for outcome in given))
            metrics["cost/train/expert_positions"] = float(sum(o.prompt_length + o.length for o in given))
        return metrics

    def _give(self, row: PlannedRow) -> PlannedRow:
        if self.settings.source == "path":
            path, slips = row.prompt.extra[PATH], row.prompt.extra.get("slips") or ()
            return replace(row, episode=EpisodePlan(replay=tuple(path), given=True, passed_over=tuple(slips)))
        answers = self._answers(row.prompt)
        return replace(row, answer=answers[row.key.sample % len(answers)])

    def _answers(self, prompt: Prompt) -> list[str]:
        if self.settings.source == "path":
            return list(prompt.extra.get(PATH) or ()) if ENVIRONMENT in prompt.extra else []
        if self.settings.source == "file":
            return self._recorded.get(asked_content(prompt), [])
        text = prompt.answer if self.settings.source == "answer" else prompt.extra.get("solution")
        return [] if text is None else [str(text)]
