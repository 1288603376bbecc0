"""Routing replay: in updates, a mixture-of-experts model sends each token to the experts that an earlier pass chose.

    R3, source: rollout    experts that the engine recorded while it sampled; also in the old policy's pass
    R2, source: old        experts of the student's own pass over the rows, before the first update of the step
    gate                   softmax of the training logits over the recorded experts, see `student.model.moe_routes`

A token whose router is close to a tie can change experts between sampling and learning, because another kernel rounds
differently (R3) or because earlier minibatches have moved the weights (R2), and then its log-prob jumps. With replay
the importance ratio reflects the change of the policy alone. The choice of experts has no gradient; the gates do, so
the router still learns. Tokens without a record (given answers, what was sampled under a hint, the last token) are
routed as usual. Models `initial` and `ema` are never replayed. Source: MiniRL, arXiv 2512.01374; the documentation of
ROLL and NeMo RL for what is replayed where.
"""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from pydantic import Field

from opd.errors import ConfigError
from opd.tasks.environments.base import ENVIRONMENT
from opd.wire.types import PayloadSpec
from student.data.needs import STUDENT, Needs, SignalNeed
from student.plugin.controllers import Controller, ControllerSettings
from student.plugin.traits import Traits

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

    from numpy.typing import NDArray
    from torch import Tensor, nn
    from transformers import PreTrainedModel

    from opd.tasks.prompt import Prompt
    from student.data.hooks import Reading
    from student.data.row import Row
    from student.learning.updates import Update
    from student.plugin.controllers import Services
    from student.plugin.terms import Term
    from student.settings.recipe import Recipe

NONE = -1
"""Index of an expert where none was recorded."""


class RoutingReplaySettings(ControllerSettings):
    """Settings of routing replay."""

    source: Literal["rollout", "old"] = Field(
        "rollout",
        description="Experts to replay: those that the engine recorded (rollout, R3), or those of the old "
        "policy's pass (old, R2).",
    )


class RoutingReplay(Controller[RoutingReplaySettings]):
    """Replays the experts that the rollout or the old policy chose (R3, R2).

    The recorded experts are kept in the rows.
    """

    evidence: ClassVar[str] = "text and code"
    traits = Traits(works_ahead=True)

    def __init__(self, settings: RoutingReplaySettings) -> None:
        super().__init__(settings)
        self.counts = np.zeros(3)
        """On this rank: tokens read in updates, those replayed, and those of them with other experts in some layer."""
        self.totals = [0.0, 0.0, 0.0]
        """The same counts for the whole step, over all ranks."""

    def needs(self) -> Needs:
        """The rollout's record of experts, or the student's pass over the rows."""
        if self.settings.source == "rollout":
            return Needs(moe_routes=True)
        return Needs(signals=(SignalNeed(STUDENT, PayloadSpec.sampled()),))

    def check(self, recipe: Recipe, terms: Sequence[Term]) -> None:
        """Refuse source `old` together with stale rows, which other weights have sampled.

        Raises:
            ConfigError: with the setting to change.
        """
        if self.settings.source == "old" and recipe.train.max_staleness:
            raise ConfigError(
                "method routing_replay with source: old replays the experts of the weights that a step begins with, "
                "but train.max_staleness samples with older ones; set source: rollout, or train.max_staleness: 0."
            )

    def check_prompts(self, prompts: Sequence[Prompt]) -> None:
        """With source `rollout`, refuse prompts of episodes before anything is sampled; see `compose`.

        Raises:
            ConfigError: with the setting to change.
        """
        if any(ENVIRONMENT in prompt.extra for prompt in prompts):
            self._refuse_episodes()

    def check_model(self, lm: PreTrainedModel) -> None:
        """Refuse a student without experts.

        Raises:
            ConfigError: naming the student's class.
        """
        from student.model.moe_routes import routers

        routers(lm)

    @contextmanager
    def around(self, lm: PreTrainedModel, reading: Reading) -> Iterator[None]:
        """Record or replay one forward pass."""
        if reading.kind == "kept":
            yield
        elif reading.kind == "student" and self.settings.source == "old":
            with recorded(lm, reading):
                yield
        else:
            with replayed(lm, reading, self.counts if reading.kind == "update" else np.zeros(3)):
                yield

    def compose(self, rows: list[Row]) -> list[Row]:
        """With source `rollout`, refuse episodes: the engine records each of their turns separately.

        Raises:
            ConfigError: with the setting to change.
        """
        if any(row.episode is not None for row in rows):
            self._refuse_episodes()
        return rows

    def _refuse_episodes(self) -> None:
        if self.settings.source == "rollout":
            raise ConfigError(
                "method routing_replay with source: rollout replays only single answers, but this task plays episodes "
                "of turns; set source: old."
            )

    def updates(self, updates: Iterable[Update], services: Services) -> Iterable[Update]:
        """Pass the updates on unchanged, then sum over all ranks what was replayed in them."""
        self.counts[:] = 0  # a step that is repeated must not count twice
        yield from updates
        self.totals = np.sum(services.gather(self.counts), axis=0).tolist()

    def after_update(self, step: int, services: Services) -> dict[str, float]:
        """Metrics routing/replayed and routing/changed.

        routing/replayed is the share of the tokens read in updates that were replayed; routing/changed is the share of
        the replayed tokens that the router would have sent to other experts in at least one layer.
        """
        tokens, known, changed = self.totals
        self.totals = [0.0, 0.0, 0.0]
        if not tokens:
            return {}
        return {"routing/replayed": known / tokens, "routing/changed": changed / max(1.0, known)}

    def state_dict(self) -> dict[str, Any]:
        """Counts of the step's updates that `after_update` has not reported yet."""
        return {"totals": list(self.totals)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        self.totals = [float(value) for value in state["totals"]]


@contextmanager
def recorded(lm: PreTrainedModel, reading: Reading) -> Iterator[None]:
    """Store in its rows the experts that one forward pass chooses."""
    from student.model.moe_routes import Recorder

    with Recorder(lm) as recorder:
        yield
        found = recorder.take(len(reading.rows))
    for row, mine in zip(reading.rows, found, strict=True):
        if row is not None:
            row.moe_routes = mine[: len(row.prompt_ids) + row.length].copy()


@contextmanager
def replayed(lm: PreTrainedModel, reading: Reading, counts: NDArray[np.float64]) -> Iterator[None]:
    """Route one forward pass through the experts recorded in its rows; adds its tokens to `counts` in place."""
    import torch

    from student.data.hooks import registered
    from student.model.moe_routes import check_rule, gates, routers

    every = routers(lm)
    read = sum(len(row.prompt_ids) + row.length for row in reading.rows if row is not None)
    table = _table(reading, len(every))
    known = torch.from_numpy(table[:, 0, 0] != NONE if table.size else np.zeros(0, np.bool_))
    wanted = torch.from_numpy(table.astype(np.int64))
    changed: dict[int, Tensor] = {}

    def replay(layer: int) -> Any:
        def hook(router: nn.Module, inputs: Any, output: Any) -> Any:
            check_rule(router, output)
            logits, scores, own = output
            mine = wanted[:, layer].to(own.device)
            here = known.to(own.device)[:, None]
            if layer not in changed:  # counted once, and not again when the backward pass recomputes the layer
                changed[layer] = (here & (own.sort(-1).values != mine.sort(-1).values)).any(-1)
            experts = torch.where(here, mine, own)
            # Tokens that are not replayed keep the router's own scores, bit for bit.
            return logits, torch.where(here, gates(router, logits, experts, scores.dtype), scores), experts

        return hook

    # Without any record no hook is installed, and the pass is untouched.
    some = bool(known.any())
    with registered([router.register_forward_hook(replay(i)) for i, router in enumerate(every)] if some else []):
        yield
    other = int(torch.stack(list(changed.values())).any(0).sum()) if changed else 0
    counts += [read, int(known.sum()), other]


def _table(reading: Reading, layers: int) -> NDArray[np.int16]:
    """[B * L, layers, k] int16 expert indices of each token, NONE where there is no record."""
    records = [None if row is None else row.moe_routes for row in reading.rows]
    k = next((record.shape[2] for record in records if record is not None), 0)
    table = np.full((len(records), reading.width, layers, k), NONE, np.int16)
    for line, record in zip(table, records, strict=True):
        if record is not None:
            line[: len(record)] = record
    return table.reshape(len(records) * reading.width, layers, k)  # k is 0 where no row has a record
