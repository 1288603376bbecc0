"""Prompt augmentation: asks each prompt of a step through one of several templates, against collapse to one of them.

    template ~ uniform by (seed, step, prompt), the same for all answers to a prompt
    reward + format_weight where the answer matches the `format` of its template

A prompt that its template would make longer than rollout.max_prompt_tokens is asked unchanged (metric
prompt_augmentation/too_long_share). A template may begin the answer with a `prefix`, whose tokens are given and not
trained on. The prompt keeps its uid, so histories and groups are those of the prompt whatever its template. The authors
draw from about 13 templates, with rewards for each one's format. Source: arXiv 2602.03190 and the released code,
wenquanlu/prompt-augmentation-GRPO; their templates are not copied.
"""

from __future__ import annotations

import logging
import re
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from pydantic import Field, field_validator

from opd.config import Settings
from opd.errors import ConfigError
from opd.tasks.encode import encode_prompt
from opd_zoo.prompts import in_template
from student.data.streams import stream
from student.plugin.controllers import Controller, ControllerSettings
from student.plugin.traits import Traits

if TYPE_CHECKING:
    from collections.abc import Sequence

    from student.data.plan import PlannedRow, StepPlan
    from student.data.row import Row
    from student.plugin.controllers import Services
    from student.plugin.terms import Term
    from student.settings.recipe import Recipe

_TAG, _NONE = "template", "none"
_log = logging.getLogger(__name__)


class Template(Settings):
    """A way to ask a prompt."""

    text: str = Field(
        description="What the student reads instead of the prompt, or of the last user message; {prompt} is replaced "
        "by that."
    )
    prefix: str = Field("", description="Beginning of the answer, which is given and not trained on.")
    format: str = Field("", description="Regular expression that a well-formed answer matches; empty allows any.")

    @field_validator("text")
    @classmethod
    def _holds_prompt(cls, text: str) -> str:
        if "{prompt}" not in text:
            raise ValueError(f"template {text[:40]!r} does not contain {{prompt}}")
        return text

    @field_validator("format")
    @classmethod
    def _compiles(cls, pattern: str) -> str:
        try:
            re.compile(pattern)
        except re.error as error:
            raise ValueError(f"format {pattern!r} is not a regular expression: {error}") from error
        return pattern


class PromptAugmentationSettings(ControllerSettings):
    """Settings of the templates."""

    templates: list[Template] = Field(
        default_factory=lambda: [Template(text="{prompt}"), Template(text="{prompt}\n")],
        min_length=2,
        description="Templates, each with a text, and a prefix and a format if it has them.",
    )
    format_weight: float = Field(0.0, ge=0, description="Reward of an answer in the format of its template.")
    seed: int = Field(0, ge=0, description="Seed of the choice of templates.")


class PromptAugmentation(Controller[PromptAugmentationSettings]):
    """Asks each prompt through one of several templates, chosen at random."""

    evidence = "text and code"
    traits = Traits(works_ahead=True, tags={_TAG: ""})

    def __init__(self, settings: PromptAugmentationSettings) -> None:
        super().__init__(settings)
        self._prefixes: list[tuple[int, ...]] = [() for _ in settings.templates]
        self._tokenizer: Any = None
        self._longest = 0
        self._warned = False

    def check(self, recipe: Recipe, terms: Sequence[Term]) -> None:
        """Keep the recipe's longest prompt.

        Raises:
            ConfigError: for templates that are all alike, or a format_weight without any format.
        """
        s = self.settings
        self._longest = recipe.rollout.max_prompt_tokens
        if len({(template.text, template.prefix) for template in s.templates}) == 1:
            raise ConfigError("the templates of method prompt_augmentation are all equal; set different ones.")
        if s.format_weight and not any(template.format for template in s.templates):
            raise ConfigError(
                "method prompt_augmentation has a format_weight, but no template has a format to reward; set format "
                "in the templates, or remove format_weight."
            )

    def start(self, services: Services) -> None:
        """Encode the prefixes of the templates."""
        self._tokenizer = services.tokenizer
        for index, template in enumerate(self.settings.templates):
            if template.prefix:
                ids = services.tokenizer(template.prefix, add_special_tokens=False)["input_ids"]
                self._prefixes[index] = tuple(int(token) for token in ids)

    def plan(self, plan: StepPlan) -> StepPlan:
        """Ask each prompt through its template."""
        return replace(plan, rows=tuple(self._asked(row) for row in plan.rows))

    def _asked(self, row: PlannedRow) -> PlannedRow:
        s = self.settings
        place = int(stream(s.seed, "templates", row.key.step, row.key.uid).integers(len(s.templates)))
        asked = in_template(row.prompt, s.templates[place].text)
        if len(encode_prompt(asked, self._tokenizer)) > self._longest:
            self._warn(row, place)
            return replace(row, tags={**row.tags, _TAG: _NONE})
        return replace(
            row,
            prompt=asked,
            prefix_ids=(*self._prefixes[place], *row.prefix_ids),
            tags={**row.tags, _TAG: str(place)},
        )

    def _warn(self, row: PlannedRow, place: int) -> None:
        if not self._warned:
            self._warned = True
            _log.warning(
                "template %d of method prompt_augmentation makes %s longer than rollout.max_prompt_tokens (%d), so "
                "the prompt is asked unchanged; raise the limit (further ones are counted in the metric "
                "prompt_augmentation/too_long_share)",
                place,
                row.prompt.name,
                self._longest,
            )

    def compose(self, rows: list[Row]) -> list[Row]:
        """Add the reward for the template's format, as part `format`."""
        for row in rows:
            place = row.tags.get(_TAG)
            if place in (None, _NONE):
                continue
            template = self.settings.templates[int(place)]
            if template.format:
                fits = float(re.search(template.format, row.text, re.DOTALL) is not None)
                row.notes["prompt_augmentation/format"] = fits
                if self.settings.format_weight:
                    row.reward_parts["format"] = self.settings.format_weight * fits
        return rows

    def after_update(self, step: int, services: Services) -> dict[str, float]:
        """Metrics templates (how many the step used), too_long_share and format (share of answers in the format).

        Their names begin with prompt_augmentation/.
        """
        used = [outcome.tags[_TAG] for outcome in services.outcomes if _TAG in outcome.tags]
        metrics: dict[str, Any] = {"prompt_augmentation/templates": float(len(set(used) - {_NONE}))}
        if used:
            metrics["prompt_augmentation/too_long_share"] = used.count(_NONE) / len(used)
        name = "prompt_augmentation/format"
        fits = [outcome.notes[name] for outcome in services.outcomes if name in outcome.notes]
        return metrics | ({name: sum(fits) / len(fits)} if fits else {})
