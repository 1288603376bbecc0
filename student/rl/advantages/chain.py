"""A chain of advantages: one estimator, then any number of modifiers of its credit."""

from __future__ import annotations

from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

import numpy as np

from opd.errors import ConfigError, PluginError, short
from student.data.needs import Needs, merge, needs_of
from student.data.outcome import KEYS
from student.rl import ADVANTAGES
from student.rl.advantages.base import Advantage, Modifier
from student.state.named_states import load_states, states_of

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from torch import Tensor

    from student.data.outcome import Outcome
    from student.data.report import StepReport
    from student.data.row import Row
    from student.data.token_batch import TokenBatch
    from student.plugin.terms import Term
    from student.plugin.traits import Scope, Traits
    from student.rl.advantages.base import Credit
    from student.settings.recipe import Recipe


class AdvantageChain:
    """The advantages of a term, in order.

    Args:
        entry: the settings of one advantage, or of several in order.
        where: names the term in messages.

    Raises:
        ConfigError: for an unknown name or setting, or parts in an order that cannot work.
    """

    def __init__(self, entry: dict[str, Any] | Sequence[dict[str, Any]], where: str) -> None:
        entries: list[dict[str, Any]] = [entry] if isinstance(entry, dict) else list(entry)
        self._where = where
        self.parts: list[Advantage] = []
        for one in entries:
            if "name" not in one:
                raise ConfigError(f"the advantage of {where} has no name; see `opd plugins list advantage`.")
            self.parts.append(ADVANTAGES.make(one, Advantage, f"advantage of {where}"))
        if not self.parts:
            raise ConfigError(f"the advantage of {where} is an empty list; name an estimator.")
        for index, part in enumerate(self.parts):
            modifies = isinstance(part, Modifier)
            if modifies != (index > 0):
                role = (
                    "changes the credit of another one and cannot come first"
                    if modifies
                    else "is an estimator, which must come first"
                )
                raise ConfigError(
                    f"advantage {part.settings.name!r} of {where} {role}; name one estimator, then its modifiers."
                )
        self._refuse_pairs(where)

    def _refuse_pairs(self, where: str) -> None:
        """Refuse parts that exclude each other.

        Raises:
            ConfigError: naming both.
        """
        names = [part.settings.name for part in self.parts]
        for name in names:
            if names.count(name) > 1:
                raise ConfigError(f"advantage {name!r} is in {where} twice; keep one of them.")
        by_token = type(self.first).refine is not Advantage.refine
        for part in self.parts[1:]:
            if by_token and type(part).shape is Advantage.shape:
                raise ConfigError(
                    f"advantage {part.settings.name!r} changes the credit of rows, but {names[0]!r} gives credit by "
                    "token; remove one of the two."
                )
        for part in self.parts:
            part.check_chain(self.parts)

    @property
    def first(self) -> Advantage:
        """The estimator."""
        return self.parts[0]

    @property
    def traits(self) -> Traits:
        """The traits of the estimator."""
        return self.first.traits

    def reading(self, source: str) -> list[Advantage]:
        """The parts whose credit is made of `source`."""
        return [part for part in self.parts if source in part.traits.reads]

    @property
    def shift_free(self) -> Scope:
        """Over which rewards a constant can be added without changing credit; a modifier that centres counts too."""
        later: Scope = "batch" if any(part.traits.shift_free for part in self.parts[1:]) else ""
        return self.traits.shift_free or later

    @property
    def scale_free(self) -> Scope:
        """Over which rewards a factor changes no credit; a modifier that standardises counts too."""
        later: Scope = "batch" if any(part.traits.scale_free for part in self.parts[1:]) else ""
        return self.traits.scale_free or later

    def needs(self) -> Needs:
        """What all parts need together."""
        return merge(needs_of(part) for part in self.parts)

    def check(self, recipe: Recipe, terms: Sequence[Term]) -> None:
        """Let each part look at the recipe.

        Raises:
            ConfigError: when one could do nothing in it.
        """
        for part in self.parts:
            part.check(recipe, terms)
            for key in part.settings.group:
                # Names of tags are free, but a near miss of a known key is taken for a typing error.
                near = get_close_matches(key, KEYS, n=1, cutoff=0.75)
                if key not in KEYS and near:
                    raise ConfigError(
                        f"advantage {part.settings.name!r} groups by {key!r}, which no row has; did you mean "
                        f"{near[0]!r}?"
                    )

    def remarks(self, recipe: Recipe, terms: Sequence[Term]) -> list[str]:
        """The remarks of all parts."""
        return [remark for part in self.parts for remark in part.remarks(recipe, terms)]

    def estimate(self, outcomes: Sequence[Outcome]) -> list[Credit]:
        """The credit of each outcome, all of which have a known reward.

        Raises:
            PluginError: if a part gives credit of a wrong shape, or credit that is not finite.
        """
        credit: list[Credit] | None = None
        for part in self.parts:
            credit = part.estimate(outcomes, credit)
            # Checked here, where the part can be named: later it would be a loss that is not finite, and be blamed on
            # the teacher's numbers.
            _check(part, outcomes, credit)
        return credit or []

    def refine(self, row: Row, credit: Credit) -> Credit | None:
        """The credit of one row of this rank after all parts, in order; None if one leaves the row out."""
        found: Credit | None = credit
        for part in self.parts:
            if found is not None:
                found = part.refine(row, found)
        return found

    def bind(self, tokenizer: Any) -> None:
        """Pass the student's tokenizer to each part."""
        for part in self.parts:
            part.bind(tokenizer)

    def shape(self, advantage: Tensor, batch: TokenBatch) -> Tensor:
        """The credit [N] of the positions of a micro-batch after all parts, in order.

        Raises:
            PluginError: if a part changes the shape.
        """
        for part in self.parts:
            shaped = part.shape(advantage, batch)
            if getattr(shaped, "shape", None) != advantage.shape:
                raise PluginError(
                    f"advantage {part.settings.name!r}: shape returned {short(shaped)} for {len(advantage)} "
                    "positions; it must return one number per position."
                )
            advantage = shaped
        return advantage

    def metrics(self) -> dict[str, tuple[Any, Any]]:
        """What the parts did, as PART/METRIC: (sum, count)."""
        return {
            f"{part.settings.name.rpartition(':')[2]}/{key}": v for part in self.parts for key, v in part.fired.items()
        }

    def observe(self, report: StepReport) -> None:
        """Let each part learn from the finished step."""
        for part in self.parts:
            part.observe(report)

    def state_dict(self) -> dict[str, Any]:
        """State of every part, by its name."""
        return states_of(self.parts)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        load_states(self.parts, state, f"advantage of {self._where}")


def _check(part: Advantage, outcomes: Sequence[Outcome], credit: Sequence[Credit]) -> None:
    name = part.settings.name
    if not hasattr(credit, "__len__"):
        raise PluginError(
            f"advantage {name!r} returned {short(credit)}; it must return a list with one credit for each row."
        )
    if len(credit) != len(outcomes):
        raise PluginError(
            f"advantage {name!r} returned {len(credit)} credits for {len(outcomes)} rows; it must return one for each."
        )
    for outcome, value in zip(outcomes, credit, strict=True):
        if isinstance(value, np.ndarray) and value.shape != (outcome.length,):
            raise PluginError(
                f"advantage {name!r} returned credit of shape {value.shape} for a response of {outcome.length} "
                "tokens; it must be one number, or one for each token."
            )
        if not isinstance(value, np.ndarray) and not hasattr(value, "__float__"):
            raise PluginError(
                f"advantage {name!r} returned the credit {short(value)} for sample {outcome.sample} of prompt "
                f"{outcome.uid}; it must be one number, or an array with one for each token."
            )
        if not np.isfinite(value).all():
            raise PluginError(
                f"advantage {name!r} returned a credit that is not finite for sample {outcome.sample} of prompt "
                f"{outcome.uid}."
            )
