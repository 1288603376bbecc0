"""ADWIN (arXiv 2605.28396): the shortest rollout window whose gradient still points the same way as the full one.

    L_next = min { L in windows : cos(g_L, g_full) >= rho },   rho = sqrt(1/2)

The cosines are measured by probes: `rows` full rollouts from a snapshot of the student, sampled, scored and
differentiated while training continues (see `student.methods.windows.probe`). One Gram matrix of segment gradients
gives the cosines of all windows. A probe takes effect exactly `delay` steps after its snapshot, and training waits for
it then. This is the paper's staleness limit, and it makes a run a function of its seed alone, so that it resumes bit
for bit.

The full text was not available to us. Known: the rule, rho, 64 rows, the limit of 5 steps, one global window. Ours: the
probe samples new prompts instead of continuing cut responses; its gradients are those of the snapshot; all trained
parameters enter the cosine with the Euclidean inner product; the full length is used if no window is admissible, and
before the first probe takes effect (`fallback`); `criterion`, `per_domain` and the null.

Costs are counted under cost/probe at the step in which the probe takes effect. A probe still running at the end of the
run is not counted.
Memory: see `student.methods.windows.probe`; a checkpoint written while a probe is under way holds the snapshot, one
more copy of the trained weights.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from pydantic import Field

from opd.errors import ConfigError
from student.data.plan import PlannedRow, StepPlan, plan_step
from student.methods.windows.admissibility import cross_fitted, published, shortest_admissible
from student.methods.windows.windows import WindowController
from student.plugin.controllers import ControllerSettings
from student.plugin.traits import Traits

if TYPE_CHECKING:
    from collections.abc import Sequence

    from student.methods.windows.probe import Probe, Prober, ProbeResult, ProbeSpec
    from student.plugin.controllers import Services
    from student.plugin.terms import Term
    from student.settings.recipe import Recipe


class AdwinSettings(ControllerSettings):
    """Settings of ADWIN."""

    windows: list[int] = Field(
        default=[64, 128, 256, 512, 1024, 2048],
        min_length=1,
        description="Candidate windows in tokens, in addition to rollout.max_new_tokens; those above it are ignored.",
    )
    rho: float = Field(
        0.5**0.5, gt=0, lt=1, description="Minimum cosine between the gradients of a window and of the full length."
    )
    criterion: Literal["published", "cross_fitted"] = Field(
        "published",
        description="Cosine that decides: published, the plain one; cross_fitted, the one without the bias of noise. "
        "Both are reported.",
    )
    rows: int = Field(64, ge=4, description="Number of responses in a probe.")
    folds: int = Field(4, ge=2, description="Number of parts into which a probe is split for the cross-fitted cosine.")
    delay: int = Field(5, ge=1, description="Number of steps from a probe's snapshot to the step that acts on it.")
    every: int = Field(
        1, ge=1, description="Minimum number of steps between the snapshots of two probes, if above `delay`."
    )
    background: bool = Field(
        True,
        description="Probe during training, on a copy of the student. false needs no copy, but training waits for "
        "the probe.",
    )
    per_domain: bool = Field(False, description="Choose a window for each domain of the prompts separately.")
    metric: Literal["full", "sketch", "last_layers"] = Field(
        "full",
        description="Gradients whose cosine is taken: full, over all parameters; sketch, a count sketch of those; "
        "last_layers, only the last decoder layers.",
    )
    buckets: int = Field(1 << 16, ge=256, description="With metric sketch: number of buckets.")
    layers: int = Field(1, ge=1, description="With metric last_layers: number of decoder layers.")
    fallback: Literal["full", "largest"] = Field(
        "full",
        description="Window before the first probe acts, and when no candidate is admissible: the full length, or the "
        "largest candidate.",
    )
    null_every: int = Field(
        8,
        ge=0,
        description="Every n-th probe also measures random tokens instead of prefixes, as a null; 0 never does.",
    )


class Adwin(WindowController[AdwinSettings]):
    """Finds the shortest rollout window whose gradient points the same way as the full one (ADWIN).

    Its state is the window of each domain and the probe under way.
    """

    traits = Traits(works_ahead=True, cuts_responses=True)

    def __init__(self, settings: AdwinSettings) -> None:
        super().__init__(settings)
        self._windows: dict[str, int] = {}
        self._edges: tuple[int, ...] = ()
        self._temperature = 1.0
        self._prober: Prober | None = None
        self._probe: Probe | None = None
        self._started: int | None = None
        self._saved: dict[str, Any] | None = None
        self._probes = 0

    def check(self, recipe: Recipe, terms: Sequence[Term]) -> None:
        """Also read the length limit and the temperature from the recipe.

        Raises:
            ConfigError: if no candidate is shorter than the length limit.
        """
        super().check(recipe, terms)
        limit = recipe.rollout.max_new_tokens
        shorter = sorted({window for window in self.settings.windows if 0 < window < limit})
        if not shorter:
            raise ConfigError(
                f"none of method adwin's windows {self.settings.windows} is shorter than rollout.max_new_tokens "
                f"({limit}); set shorter ones."
            )
        self._edges = (*shorter, limit)
        self._temperature = recipe.rollout.temperature

    def start(self, services: Services) -> None:
        """Set up the prober; restart the probe that was running when the run was saved."""
        from student.methods.windows.probe import Prober

        self._prober = Prober(services.workbench())
        if self._saved is not None and self._started is not None:
            self._probe = self._resume(self._saved, self._started, services)
            self._saved = None

    def window(self, step: int, row: PlannedRow) -> int:
        return self._windows.get(self._domain(row.prompt.domain), self._candidates[-1])

    @property
    def _candidates(self) -> tuple[int, ...]:
        """The windows to choose from; the last is the fallback."""
        return self._edges if self.settings.fallback == "full" else self._edges[:-1]

    def after_update(self, step: int, services: Services) -> dict[str, float]:
        """Act on a probe that is due, begin the next one; metrics window, at_*_share and, when a probe acted, more."""
        s = self.settings
        metrics = {"window": self._mean_window(), **self._at_bounds()}
        age = 0 if self._started is None else step - self._started
        acts = self._probe is not None and age >= s.delay
        begins = self._started is None or (age >= max(s.every, s.delay) and (acts or self._probe is None))
        # First everything that can be interrupted, then what changes the state: an interrupted call is made again after
        # a resume, and must find the state that it began with.
        found = self._probe.result() if self._probe is not None and acts else None
        began = self._launch(step, services, None) if begins else None
        if found is not None:
            metrics |= self._act(found, services)
            self._probe = None
        if began is not None:
            self._probe, self._started = began, step
            self._probes += 1
        return metrics

    def state_dict(self) -> dict[str, Any]:
        """Windows and, while a probe is under way, what is needed to obtain its result again."""
        probe = self._probe.state_dict() if self._probe is not None else None
        return {"windows": self._windows, "started": self._started, "probes": self._probes, "probe": probe}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` gave."""
        self._windows = {name: int(window) for name, window in state["windows"].items()}
        self._started, self._probes, self._saved = state["started"], int(state["probes"]), state["probe"]

    def _domain(self, domain: str | None) -> str:
        return (domain or "") if self.settings.per_domain else ""

    def _mean_window(self) -> float:
        return float(np.mean(list(self._windows.values()))) if self._windows else float(self._candidates[-1])

    def _at_bounds(self) -> dict[str, float]:
        """Shares of the domains at the longest window (no saving) and at the shortest; {} before the first probe."""
        if not self._windows:
            return {}
        chosen, edges = np.array(list(self._windows.values())), self._candidates
        return {
            "adwin/at_longest_share": float((chosen == edges[-1]).mean()),
            "adwin/at_shortest_share": float((chosen == edges[0]).mean()),
        }

    def _launch(self, step: int, services: Services, weights: dict[str, Any] | None) -> Probe:
        prompts = services.training_prompts(self.settings.rows, seed_names=("adwin", step))
        plan: StepPlan = plan_step(
            step, prompts, samples=1, max_new_tokens=self._edges[-1], temperature=self._temperature
        )
        if self._prober is None:
            raise TypeError("method adwin was not started")
        return self._prober.start(plan, self._spec(step), weights)

    def _resume(self, saved: dict[str, Any], step: int, services: Services) -> Probe:
        from student.methods.windows.probe import Probe, ProbeResult

        if "weights" in saved:
            return self._launch(step, services, saved["weights"])
        return Probe(ProbeResult(**saved["result"]))

    def _spec(self, step: int) -> ProbeSpec:
        from student.methods.windows.gradient_metric import GradientMetric
        from student.methods.windows.probe import ProbeSpec

        s = self.settings
        # A function of the step, like everything about a probe, so that a resumed run makes the same probe.
        index = step // max(s.every, s.delay)
        return ProbeSpec(
            edges=self._edges,
            folds=s.folds,
            metric=GradientMetric(s.metric, s.buckets, s.layers, seed=0),
            null=bool(s.null_every) and index % s.null_every == 0,
            per_domain=s.per_domain,
            background=s.background,
        )

    def _act(self, found: ProbeResult, services: Services) -> dict[str, float]:
        services.add_costs(found.costs)
        metrics: dict[str, float] = {"adwin/probes": float(self._probes)}
        for domain, gram in found.grams.items():
            cosines = {"published": published(gram), "cross_fitted": cross_fitted(gram)}
            if domain in found.nulls:
                cosines["null"] = published(found.nulls[domain])
            candidates = self._candidates
            self._windows[domain] = shortest_admissible(
                candidates, cosines[self.settings.criterion].tolist()[: len(candidates)], self.settings.rho
            )
            suffix = f"/{domain}" if domain else ""
            metrics[f"adwin/next_window{suffix}"] = float(self._windows[domain])
            for name, values in cosines.items():
                metrics |= {
                    f"adwin/{name}_{window}{suffix}": float(value)
                    for window, value in zip(self._edges, values, strict=True)
                    if np.isfinite(value)
                }
        return metrics
