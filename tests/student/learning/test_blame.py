"""An exception from a plug-in's own code becomes a PluginError that names it; others stay as they are."""

from collections.abc import Callable
from typing import Any

import pytest

from opd.errors import DataError, PluginError
from student.learning.blame import blaming
from student.plugin.controllers import Controller, ControllerSettings
from student.plugin.strategy import Strategy, StrategySettings
from student.plugin.terms import Term, TermSettings
from student.rl.advantages.base import Advantage, AdvantageSettings
from student.rollout.sampling import Sampling
from student.scoring.rewards.base import Reward, RewardSettings
from student.scoring.routing import Router


def fault(error: Exception) -> Any:
    """Code of the plug-in outside its class."""
    raise error


class FaultyController(Controller):
    def observe(self, report: Any) -> None:
        self._look(report)

    def _look(self, report: Any) -> None:
        fault(report)


class FaultyTerm(Term):
    def token_losses(self, batch: Any) -> Any:
        return [fault(error) for error in (batch,)]


class FaultyStrategy(Strategy):
    def run(self, plan: Any, sampling: Any) -> Any:
        return fault(plan)


class FaultyReward(Reward):
    def reward(self, rows: Any, services: Any) -> None:
        fault(rows)


class FaultyAdvantage(Advantage):
    def estimate(self, outcomes: Any, credit: Any) -> Any:
        return fault(outcomes)


HOOKS: dict[str, Callable[[Any], Any]] = {
    "observe": FaultyController(ControllerSettings(name="mine")).observe,
    "token_losses": FaultyTerm(TermSettings(name="mine")).token_losses,
    "run": lambda error: FaultyStrategy(StrategySettings(name="mine")).run(error, None),
    "reward": lambda error: FaultyReward(RewardSettings(name="mine")).reward(error, None),  # type: ignore[arg-type]
    "estimate": lambda error: FaultyAdvantage(AdvantageSettings(name="mine")).estimate(error, None),
}


@pytest.mark.parametrize("hook", HOOKS)
@pytest.mark.parametrize("kind", [KeyError, ValueError, RuntimeError, ZeroDivisionError])
def test_the_plug_in_and_its_hook_are_named(hook: str, kind: type[Exception]) -> None:
    error = kind("a fault")
    with pytest.raises(PluginError, match=f"'mine' failed in {hook}: {kind.__name__}: ") as caught, blaming(1):
        HOOKS[hook](error)
    assert caught.value.__cause__ is error and caught.value.exit_code == 22 and __file__ in str(caught.value)


def test_a_strategy_that_calls_its_sampling_wrongly_is_named() -> None:
    class Wrong(Strategy):
        def run(self, plan: Any, sampling: Any) -> Any:
            return sampling.again(7)

    sampling: Any = object.__new__(Sampling)
    with pytest.raises(PluginError, match="'mine' failed in run: TypeError: "), blaming(1):
        Wrong(StrategySettings(name="mine")).run(None, sampling)


@pytest.mark.parametrize(
    ("error", "ranks"),
    [(DataError("row 7 is empty; drop it."), 1), (MemoryError(), 1), (RuntimeError("connection closed by peer"), 2)],
)
def test_errors_of_the_run_and_of_lost_ranks_stay_as_they_are(error: Exception, ranks: int) -> None:
    with pytest.raises(type(error)) as caught, blaming(ranks):
        HOOKS["observe"](error)
    assert caught.value is error


def test_what_the_loop_fails_to_do_for_a_plug_in_is_not_its_fault() -> None:
    class Asking(Controller):
        def observe(self, report: Any) -> None:
            Router.route(report, {})

    with pytest.raises(AttributeError), blaming(1):
        Asking(ControllerSettings(name="mine")).observe(None)
    with pytest.raises(AttributeError), blaming(1):
        fault(AttributeError("of the loop itself"))
