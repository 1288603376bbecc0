"""RL-Struct: a tiered reward for answers that must be JSON, in which form weighs more than content.

    whole = w_s structure + w_f format + w_v validity + w_c correctness,   a tier counts only when those before it hold

structure     the answer holds a JSON object or array, alone, in a fence of ``` or within other text
format        it holds nothing else
validity      the JSON fits the schema (`json_schema`, or column `schema_column` of the prompt), else structure alone
correctness   the verifier's verdict

Correctness needs structure and validity, but not format. A valid answer whose verdict is unknown has no reward. The
abstract names tiers, a hierarchy and weights that structure dominates; definitions and weights here are inferred.
Source: RL-Struct, arXiv 2512.00319, as far as its abstract goes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import Field, model_validator

from opd.tasks.json_answer import find_json, schema_errors
from student.data.needs import Needs
from student.data.prompt_facts import sources
from student.scoring.rewards.base import Reward, RewardSettings

if TYPE_CHECKING:
    from collections.abc import Sequence

    from student.data.row import Row
    from student.plugin.terms import Term
    from student.scoring.rewards.base import RewardServices
    from student.settings.recipe import Recipe


class RlStructSettings(RewardSettings):
    """Settings of the tiers."""

    structure: float = Field(0.4, ge=0, description="Weight of containing JSON at all.")
    format: float = Field(0.2, ge=0, description="Weight of containing nothing but JSON.")
    validity: float = Field(0.2, ge=0, description="Weight of JSON that fits the schema.")
    correctness: float = Field(0.2, ge=0, description="Weight of the verdict.")
    schema_column: str = Field(
        "schema", description="Kept column with the prompt's JSON schema (prompts.keep_columns)."
    )
    json_schema: dict[str, Any] | None = Field(
        None, description="JSON schema of prompts that have none in that column."
    )

    @model_validator(mode="after")
    def _check(self) -> RlStructSettings:
        if not self.structure + self.format + self.validity + self.correctness:
            raise ValueError("all weights are 0; raise that of one tier")
        return self


class RlStruct(Reward[RlStructSettings]):
    """A tiered reward for structure, format, validity and correctness of a JSON answer (RL-Struct)."""

    kind: ClassVar[Literal["whole", "part"]] = "whole"
    evidence = "abstract"
    by_group = False

    def needs(self) -> Needs:
        """Verdicts, if correctness has a weight."""
        return Needs(reward="verdict" if self.settings.correctness else "any")

    def remarks(self, recipe: Recipe, terms: Sequence[Term]) -> list[str]:
        """A remark if there is no schema to fit."""
        column = self.settings.schema_column
        given = any(hasattr(one, "task") or column in one.keep_columns for one in sources(recipe))
        if not self.settings.validity or self.settings.json_schema is not None or given:
            return []
        return [
            f"reward 'rl_struct' has no schema, so every JSON answer is valid; set json_schema, or add {column!r} to "
            "prompts.keep_columns"
        ]

    def reward(self, rows: Sequence[Row], services: RewardServices) -> None:
        """Set the whole reward; one metric per tier, its mean value."""
        for row in rows:
            tiers = self.tiers(row)
            known = {name: value for name, value in tiers.items() if value is not None}
            row.reward = None
            if len(known) == len(tiers):
                row.reward = sum(getattr(self.settings, name) * value for name, value in known.items())
            for name, value in known.items():
                self.fire(name, value)

    def tiers(self, row: Row) -> dict[str, float | None]:
        """The value of each tier, 0 to 1; None for a correctness that is needed and unknown."""
        found = find_json(row.text)
        if found is None:
            return {"structure": 0.0, "format": 0.0, "validity": 0.0, "correctness": 0.0}
        schema = row.prompt.extra.get(self.settings.schema_column, self.settings.json_schema)
        valid = schema is None or not schema_errors(found.value, schema)
        correct = row.verdict_value if valid and self.settings.correctness else 0.0
        return {
            "structure": 1.0,
            "format": float(found.alone),
            "validity": float(valid),
            "correctness": correct,
        }
