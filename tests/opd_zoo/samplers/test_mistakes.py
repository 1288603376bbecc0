"""Mistakes of the author of a sampler, with what to correct."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from opd.errors import PluginError
from opd.tasks.prompt import Prompt
from opd_zoo.samplers.base import Sampler, SamplerSettings
from student.data.plan import StepPlan, plan_step
from student.plugin.controllers import Controller


@pytest.mark.parametrize("given", [None, [float("nan")] * 4, ["a"] * 4])
def test_a_sampler_that_gives_no_scores_is_named(given: Any) -> None:
    class Odd(Sampler):
        def scores(self, pool: Sequence[Prompt], rng: np.random.Generator) -> Any:
            return given

    pool = [Prompt.make(f"{number}+1=") for number in range(4)]
    with pytest.raises(PluginError, match=r"Odd(\.scores)? returned .* (a list of|a) number"):
        Odd(SamplerSettings(name="odd")).choose(pool, 2, np.random.default_rng(0), StepPlan(0, ()))


def test_a_sampler_that_scores_another_number_of_prompts_is_named() -> None:
    class Few(Sampler):
        def scores(self, pool: Sequence[Prompt], rng: np.random.Generator) -> list[float]:
            return [0.0] * (len(pool) - 1)

    pool = [Prompt.make(f"{number}+1=") for number in range(4)]
    sampler: Controller = Few(SamplerSettings(name="few"))
    with pytest.raises(PluginError, match=r"Few returned 3 scores .*4 prompts"):
        sampler.choose(  # type: ignore[attr-defined]
            pool, 2, np.random.default_rng(0), plan_step(0, pool, samples=1, max_new_tokens=4, temperature=1.0)
        )
