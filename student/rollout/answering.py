"""A model that is sampled but not trained: any weights, with the limits and stop tokens of a recipe."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from transformers import PreTrainedModel

from opd.tasks.stops import generation_stops, stop_set
from student.data.plan import PlannedRow
from student.data.row import Row
from student.model.model import Weights, load_student, load_tokenizer
from student.rollout.requests import RolloutSpec
from student.rollout.row_length import check_length
from student.rollout.transformers import rollout

if TYPE_CHECKING:
    from student.settings.recipe import Recipe

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class AnsweringModel:
    """Weights that are sampled and never trained.

    Attributes:
        lm: the model, on its device.
        tokenizer: encodes prompts and decodes answers.
        spec: seed, batch size, limits and stop tokens.
    """

    lm: PreTrainedModel
    tokenizer: Any
    spec: RolloutSpec

    @classmethod
    def load(
        cls,
        recipe: Recipe,
        model: str,
        *,
        tokenizer: Any = None,
        max_prompt_tokens: int | None = None,
        stop_ids: Iterable[int] = (),
    ) -> AnsweringModel:
        """Load `model` onto this process' first GPU, or the CPU without one.

        Args:
            recipe: gives dtype, attention, seed, batch size, prompt limit, stop texts and further stop tokens.
            model: folder or hub id.
            tokenizer: tokenizer to use; None for the model's own.
            max_prompt_tokens: replaces the recipe's limit; None keeps it.
            stop_ids: ids that end an answer, besides those of tokenizer, generation config and recipe.

        Raises:
            ConfigError: if it has no positions for the longest rows, or cannot be loaded.
        """
        settings = recipe.rollout
        prompt = settings.max_prompt_tokens if max_prompt_tokens is None else max_prompt_tokens
        for note in check_length(recipe, Weights.of(recipe.model, model), prompt, "rollout.max_prompt_tokens"):
            log.warning(note)
        tokenizer = load_tokenizer(model) if tokenizer is None else tokenizer
        student = load_student(
            model, dtype=recipe.model.dtype, attention=recipe.model.attention, gradient_checkpointing=False
        )
        student.to("cuda" if torch.cuda.is_available() else "cpu")
        stops = stop_set(tokenizer, generation_stops(model), settings.stop_tokens).ids
        spec = RolloutSpec(
            seed=recipe.seed,
            batch_rows=settings.batch_rows,
            candidates=0,
            valid_vocab=len(tokenizer),
            max_prompt_tokens=prompt,
            stop_ids=frozenset([*stops, *stop_ids]),
            stop_texts=tuple(settings.stop),
        )
        return cls(student.lm, tokenizer, spec)

    def answer(self, planned: Sequence[PlannedRow], purpose: str) -> list[Row]:
        """One answer per planned row, in their order, drawn from the random streams named `purpose`."""
        return rollout(self.lm, self.tokenizer, planned, self.spec, purpose=(purpose,))
