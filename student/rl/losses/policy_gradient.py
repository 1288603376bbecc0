"""A policy gradient on the advantage of each row: the base of GRPO and RLOO, and usable as it is.

    token      loss_t = -min(rho_t A, clip(rho_t, 1 - clip_low, 1 + clip_high) A),   rho_t = pi(y_t) / mu(y_t)
    sequence   the same with one ratio per row, exp(mean_t log rho_t)                (GSPO, arXiv 2507.18071)
    none       loss_t = -A log pi(y_t)                                               (REINFORCE)

mu is the policy that sampled. On policy the ratio is 1, nothing clips, and all three have the gradient A grad log pi.
Rows whose verdict is unknown are in no mean and no loss. How tokens are averaged is `aggregation`: sequence_mean is
GRPO's paper, token_mean DAPO's, constant Dr. GRPO's. For a KL penalty add term reference_kl.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from pydantic import Field

from opd.config import parse_settings
from opd.errors import ConfigError
from student.learning.terms import Term, TermOutput, TermSettings, TokenBatch, have
from student.rl import ADVANTAGES
from student.rl.advantages.groups import group_rows
from student.scoring.needs import SCORES, Needs

if TYPE_CHECKING:
    from collections.abc import Sequence

    from jaxtyping import Float
    from torch import Tensor

    from student.data.row import Row
    from student.recipe import Recipe
    from student.rl.advantages.estimators import Advantage


class PolicyGradientSettings(TermSettings):
    """Settings of the policy gradient."""

    rows: Literal["all", "sampled", "expert"] = "sampled"
    advantage: dict[str, Any] = Field(
        default_factory=lambda: {"name": "group_mean"},
        description="The advantage estimator: its name and settings; see `opd plugins list`.",
    )
    ratio: Literal["token", "sequence", "none"] = Field("token", description="The importance ratio.")
    clip_low: float | None = Field(None, gt=0, le=1, description="The ratio is clipped at 1 - clip_low; null: not.")
    clip_high: float | None = Field(None, gt=0, description="The ratio is clipped at 1 + clip_high; null: not.")
    skip_degenerate: bool = Field(
        False, description="Leave groups whose rewards all agree out of the means too (DAPO, arXiv 2503.14476)."
    )
    skip_truncated: bool = Field(
        False, description="Leave out responses that hit the length limit, whose verdict is about the limit (DAPO)."
    )


class PolicyGradient(Term):
    """The term; see the module for the formula."""

    settings_type = PolicyGradientSettings
    settings: PolicyGradientSettings

    def __init__(self, settings: PolicyGradientSettings) -> None:
        super().__init__(settings)
        entry = settings.advantage
        if "name" not in entry:
            raise ConfigError(f"the advantage of term {settings.name!r} has no name; see `opd plugins list`.")
        cls: type[Advantage] = ADVANTAGES.load(str(entry["name"]))
        self.estimator = cls(parse_settings(cls.settings_type, entry, source=f"advantage of term {settings.name!r}"))
        self._advantages: dict[int, float] = {}

    def needs(self) -> Needs:
        """Verdicts, and the student's log-probs of the response tokens."""
        return Needs(reward=True, student=frozenset({SCORES}))

    def check(self, recipe: Recipe) -> None:
        """Refuse groups in which every advantage is 0.

        Raises:
            ConfigError: with the setting to raise.
        """
        least, samples = self.estimator.least_group, recipe.rollout.samples_per_prompt
        if samples < least:
            raise ConfigError(
                f"term {self.settings.name!r} compares the answers to a prompt, but rollout.samples_per_prompt is "
                f"{samples}, so that it would learn nothing; set it to {least} or more, for example 8."
            )

    def prepare(self, rows: Sequence[Row]) -> None:
        """Compute the advantages of all groups of the step."""
        able = [row for row in rows if Term.selects(self, row) and not (self.settings.skip_truncated and row.truncated)]
        groups = [g for g in group_rows(able) if not (self.settings.skip_degenerate and g.degenerate)]
        # Rows are told apart as objects: they live until the step ends, and replayed ones may share a key.
        self._advantages = {
            id(row): value
            for group, values in zip(groups, self.estimator.estimate(groups), strict=True)
            for row, value in zip(group.rows, values, strict=True)
        }

    def selects(self, row: Row) -> bool:
        """Whether the row has an advantage."""
        return id(row) in self._advantages

    def token_losses(self, batch: TokenBatch) -> TermOutput:
        """The surrogate per position; metrics advantage_magnitude, known_share, ratio and clipped_share."""
        import torch

        live = have(batch.student.scores, "scores").sampled
        values = [self._advantages.get(id(row), 0.0) for row in batch.rows]
        advantage = batch.of_rows(values).to(live.dtype)
        chosen = [row for row in batch.rows if self.selects(row)]
        metrics: dict[str, Any] = {
            "advantage_magnitude": (sum(map(abs, values)), float(len(chosen))),
            "known_share": (float(len(chosen)), float(len(batch.rows))),
        }
        if self.settings.ratio == "none":
            return TermOutput(-advantage * live, metrics=metrics)
        ratio = self._ratio(batch, live)
        low, high = self.settings.clip_low, self.settings.clip_high
        clipped = ratio if low is None else ratio.clamp(min=1.0 - low)
        clipped = clipped if high is None else clipped.clamp(max=1.0 + high)
        gain = torch.minimum(ratio * advantage, clipped * advantage)
        count = batch.mask.sum()
        bites = batch.mask & (clipped * advantage < ratio * advantage)
        metrics["ratio"] = (torch.where(batch.mask, ratio.detach(), torch.zeros_like(ratio)).sum(), count)
        metrics["clipped_share"] = (bites.sum(), count)
        return TermOutput(-gain, metrics=metrics)

    def _ratio(self, batch: TokenBatch, live: Float[Tensor, " n"]) -> Float[Tensor, " n"]:
        """[N] the importance ratio with gradient; 1 where masked."""
        import torch

        log_ratio = torch.where(batch.mask, live - batch.behaviour_logp.to(live.dtype), torch.zeros_like(live))
        if self.settings.ratio == "sequence":
            zeros = torch.zeros(len(batch.rows), dtype=live.dtype, device=live.device)
            total = zeros.index_add(0, batch.row, log_ratio)
            length = zeros.index_add(0, batch.row, batch.mask.to(live.dtype))
            log_ratio = (total / length.clamp(min=1.0))[batch.row]
        return log_ratio.exp()
