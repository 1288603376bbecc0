"""A plug-in that gives something of another kind or size is named, before anything is learnt from it."""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from prometheus_client import CollectorRegistry
from thread_ranks import together

from opd.config import parse_settings
from opd.errors import ConfigError, PluginError
from opd.registry import Registry
from opd.tasks.prompt import Prompt
from opd.wire.types import PayloadKind, PayloadSpec
from student.data.needs import Needs, SignalNeed, needs_of
from student.data.outcome import Outcome, outcome_of
from student.data.plan import StepPlan, plan_step
from student.data.token_batch import StudentTokens, TokenBatch, have
from student.job.plugins import build_plugins
from student.job.steering import acted, composed, ordered, planned
from student.learning.objective import Objective
from student.plugin.controllers import CONTROLLERS, Controller, ControllerSettings, Services
from student.plugin.strategy import STRATEGIES, Strategy, StrategySettings
from student.plugin.terms import OBJECTIVES, Term, TermOutput, TermSettings, losses_of
from student.report.series import Series
from student.rl import ADVANTAGES, REWARDS
from student.rl.advantages.base import Advantage, AdvantageSettings, GroupEstimator
from student.rl.advantages.chain import AdvantageChain
from student.rl.losses.policy_gradient import PolicyGradient, PolicyGradientSettings
from student.rollout.engine import ROLLOUT_ENGINES, RolloutEngine, RolloutEngineSettings
from student.rollout.policy_sampler import PolicySampler
from student.rollout.sampling import Sampling
from student.scoring.rewards.base import Reward
from student.settings.recipe import Recipe
from student.state.state_io import check_state


class Wrong(Term):
    """Gives what it was told to."""

    def __init__(self, made: Callable[[Any], Any]) -> None:
        super().__init__(TermSettings(name="wrong"))
        self.made = made

    def token_losses(self, batch: Any) -> Any:
        return self.made(batch)


def loss_of(term: Term, made: Any) -> None:
    weights = [torch.ones(row.length, dtype=torch.float64) for row in made.rows]
    Objective([term], 8).loss(made.batch(range(len(made.rows))), [torch.cat(weights)])


def test_a_loss_that_is_not_one_number_per_position_is_refused(toy: Any) -> None:
    with pytest.raises(PluginError, match=r"Wrong returned .* shape \[\] for \d+ positions"):
        loss_of(Wrong(lambda batch: TermOutput(torch.zeros(len(batch.mask)).mean())), toy())
    with pytest.raises(PluginError, match=r"Wrong returned a Tensor; token_losses .*TermOutput"):
        loss_of(Wrong(lambda batch: torch.zeros(len(batch.mask))), toy())

    with pytest.raises(PluginError, match=r"Wrong returned .* shape"):
        loss_of(Wrong(lambda batch: TermOutput(np.zeros(len(batch.mask)))), toy())  # type: ignore[arg-type]
    with pytest.raises(PluginError, match=r"Wrong .*'share' as 0\.5, .*\(numerator, denominator\)"):
        loss_of(Wrong(lambda batch: TermOutput(torch.zeros(len(batch.mask)), metrics={"share": 0.5})), toy())  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("read", "words"),
    [
        (lambda batch: batch.signal(PayloadKind.HIDDEN), "and read hidden from the teacher"),
        (lambda batch: batch.signal(PayloadKind.SAMPLED, "reference"), "and read sampled from the reference"),
        (lambda batch: batch.signals["teacher", PayloadKind.TOPK].ids, "and read topk from the teacher"),
        (lambda batch: have(batch.student.scores, "scores"), "and read scores"),
        (lambda batch: batch.student.scores.sampled, "and read sampled of an undeclared"),
        (lambda batch: batch.student.hidden.shape, "and read shape of an undeclared"),
        (lambda batch: {}[3], None),
        (lambda batch: None.foreign, None),  # type: ignore[attr-defined]
    ],
)
def test_a_term_that_reads_what_it_does_not_declare_is_named_with_both(
    toy: Any, read: Callable[[Any], Any], words: str | None
) -> None:
    made = toy()
    batch = replace(made.batch(range(len(made.rows))), student=StudentTokens())
    term = Wrong(read)
    term.needs = lambda: Needs(signals=(SignalNeed("teacher", PayloadSpec.sampled()),))  # type: ignore[method-assign]
    expected = f"term 'wrong' declared sampled from the teacher .*{words}" if words else None
    with pytest.raises(PluginError if words else (KeyError, AttributeError), match=expected):
        losses_of(term, replace(batch, signals={}))


def test_a_surrogate_that_gives_a_bare_tensor_is_named(toy: Any) -> None:
    class Bare(PolicyGradient):
        def surrogate(self, log_ratio: Any, advantage: Any, live: Any, batch: Any) -> Any:
            return advantage

    term = Bare(PolicyGradientSettings(name="bare", advantage={"name": "signed"}))
    with pytest.raises(PluginError, match=r"Bare returned a Tensor; surrogate .*TermOutput"):
        toy().gradient([term])


def test_an_advantage_that_is_short_of_its_group_is_named(toy: Any) -> None:
    class Short(GroupEstimator):
        def of_group(self, rewards: Sequence[float]) -> list[float]:
            return [0.0]

    rows = toy().rows
    for row in rows:
        row.reward = 1.0
    outcomes = [outcome_of(row) for row in rows]
    with pytest.raises(PluginError, match=f"Short returned 1 .* {len(rows)} rewards"):
        Short(AdvantageSettings(name="short", group=["step"])).estimate(outcomes, None)


@pytest.mark.parametrize(
    ("given", "words"), [(None, "returned None; it must return a list"), (["a", "b"], "the credit 'a'")]
)
def test_an_advantage_that_gives_no_numbers_is_named(given: Any, words: str) -> None:
    class Odd(GroupEstimator):
        def of_group(self, rewards: Sequence[float]) -> Any:
            return given

    class Whole(Advantage):
        def estimate(self, outcomes: Any, credit: Any) -> Any:
            return given

    made = [Outcome(0, "u", sample, reward=1.0, length=3) for sample in range(2)]
    for cls in (Odd, Whole):
        chain = AdvantageChain({"name": "group_mean"}, "term 'mine'")
        chain.parts = [cls(AdvantageSettings(name="odd"))]
        with pytest.raises(PluginError, match=words):
            chain.estimate(made)


def test_an_advantage_whose_shape_forgets_its_return_is_named() -> None:
    class Forgetful(Advantage):
        def shape(self, advantage: Any, batch: Any) -> Any:
            pass

    chain = AdvantageChain({"name": "group_mean"}, "term 'mine'")
    chain.parts.append(Forgetful(AdvantageSettings(name="forgetful")))
    with pytest.raises(PluginError, match=r"'forgetful': shape returned None .*3"):
        chain.shape(torch.ones(3), cast(TokenBatch, None))


class Traitless(GroupEstimator):
    @property
    def traits(self) -> Any:
        """A hook without a return."""


def test_an_advantage_whose_traits_forget_their_return_is_named() -> None:
    term = {"name": "grpo", "advantage": {"name": f"{__name__}:Traitless"}}
    recipe = {"run": "unused", "model": {"path": "unused"}, "prompts": {"task": "addition"}, "objective": [term]}
    with pytest.raises(PluginError, match="traits of Traitless are None"):
        build_plugins(parse_settings(Recipe, recipe))


def test_a_strategy_that_returns_rows_it_did_not_score_is_named() -> None:
    class Hasty(Strategy):
        def run(self, plan: Any, sampling: Sampling) -> Any:
            return sampling.sample(plan.rows)

    with pytest.raises(PluginError, match=r"Hasty\.run returned .*not score"):
        together(1, lambda: Hasty(StrategySettings(name="hasty")))


@pytest.mark.parametrize("value", ["one", None])
def test_a_metric_that_is_no_number_is_named_with_its_value(value: Any) -> None:
    with pytest.raises(ConfigError, match=f"metric 'mine/divisor' is {value!r}"):
        Series(CollectorRegistry()).show({"mine/divisor": value})


class Plain:
    settings_type = ControllerSettings

    def __init__(self, settings: Any) -> None:
        self.settings = settings


class OtherSettings(Controller[dict]):  # type: ignore[type-var]
    pass


class Unset(Controller):
    def __init__(self) -> None:
        pass


class Lost(Controller):
    def __init__(self, settings: Any) -> None:
        self.value = 1


class Needy(Controller):
    def needs(self) -> Any:
        return None


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("Plain", r"does not derive from student\.plugin\.controllers\.Controller"),
        ("SoftLoss", r"does not derive from student\.plugin\.controllers\.Controller"),
        ("OtherSettings", r"settings of .* do not derive from student\.plugin\.controllers\.ControllerSettings"),
        ("Unset", r"give it __init__\(self, settings\)"),
        ("Lost", r"super\(\)\.__init__\(settings\)"),
    ],
)
def test_a_class_that_is_not_of_its_kind_is_refused_with_what_it_lacks(name: str, words: str) -> None:
    with pytest.raises(ConfigError, match=f"^[^\n]*{words}"):
        CONTROLLERS.make({"name": f"{__name__}:{name}"}, Controller, "methods.0")


class SoftLoss(Term):
    """A plug-in of another kind, which lacks its hook."""


class Grouped(GroupEstimator):
    """An estimator that lacks its hook."""


@pytest.mark.parametrize(
    ("term", "hook"),
    [
        ({"name": f"{__name__}:SoftLoss"}, "token_losses"),
        ({"name": "grpo", "advantage": {"name": f"{__name__}:Grouped"}}, "of_group"),
    ],
)
def test_a_hook_that_is_missing_or_misspelt_is_named_before_anything_is_loaded(term: Any, hook: str) -> None:
    recipe = {"run": "unused", "model": {"path": "unused"}, "prompts": {"task": "addition"}, "objective": [term]}
    with pytest.raises(PluginError, match=f"does not implement {hook}"):
        build_plugins(parse_settings(Recipe, recipe | {"rollout": {"samples_per_prompt": 4}}))


def test_a_key_of_a_class_that_names_no_settings_is_refused_with_how_to_name_them() -> None:
    with pytest.raises(ConfigError, match=r"tau.*no settings .*class SoftLoss\(Term\["):
        OBJECTIVES.make({"name": f"{__name__}:SoftLoss", "tau": 1.0}, Term, "objective.0")


@pytest.mark.parametrize(
    ("base", "member", "instead"),
    [
        (Term, "shown", r"Traits\(shown=\.\.\.\)"),
        (Term, "hooks", "around"),
        (Strategy, "judges", "judges_first"),
        (Term, "admits", "settings"),
        (Controller, "learns_from_given_rows", r"Traits\(learns_from_given_rows"),
        (RolloutEngine, "holds_weights", r"Traits\(holds_weights"),
        (Advantage, "tags", r"Traits\(tags"),
    ],
)
def test_a_member_that_nothing_reads_is_named_with_what_is_read_instead(base: type, member: str, instead: str) -> None:
    with pytest.raises(PluginError, match=rf"Old\.{member} .*{instead}"):
        type("Old", (base,), {member: True})


@pytest.mark.parametrize(
    ("registry", "base"),
    [
        *((OBJECTIVES, Term), (CONTROLLERS, Controller), (ADVANTAGES, Advantage), (REWARDS, Reward)),
        *((STRATEGIES, Strategy), (ROLLOUT_ENGINES, RolloutEngine)),
    ],
)
def test_every_registered_plug_in_is_of_its_kind(registry: Registry, base: type) -> None:
    for entry in registry:
        registry.load(entry.name, base)


def test_needs_that_are_not_needs_are_named() -> None:
    with pytest.raises(PluginError, match=r"Needy\.needs returned None; .*student"):
        needs_of(Needy(ControllerSettings(name="needy")))


class Hook(Controller):
    """Every hook gives what the test says."""

    def __init__(self, given: Any) -> None:
        super().__init__(ControllerSettings(name="hook"))
        self.given = given

    def plan(self, plan: Any) -> Any:
        return self.given

    def compose(self, rows: Any) -> Any:
        return self.given

    def updates(self, updates: Any, services: Any) -> Any:
        return self.given

    def after_update(self, step: int, services: Any) -> Any:
        return self.given


@pytest.mark.parametrize(
    ("hook", "given", "words"),
    [
        ("plan", None, "plan returned None; it must return a StepPlan"),
        ("compose", None, "compose returned None; it must return a list of rows"),
        ("compose", [1], r"compose returned \[1\]; it must return a list of rows"),
        ("updates", None, "updates returned None; it must return updates"),
        ("updates", [1], "updates returned 1; it must return updates, each a student.learning.updates.Update"),
        ("after_update", None, "after_update returned None; it must return metrics by name, {} for none"),
        ("after_update", {1: 1.0}, "after_update returned 1; it must return metrics by name, each a text"),
        (
            "after_update",
            {"x": "one"},
            "after_update returned 'one'; it must return numbers, and metric 'x' is not one",
        ),
        ("after_update", {"x": torch.zeros(2)}, "metric 'x' is not one"),
    ],
)
def test_a_hook_that_gives_something_else_is_named(hook: str, given: Any, words: str) -> None:
    controller, services = Hook(given), cast(Services, None)
    calls: dict[str, Callable[[], Any]] = {
        "plan": lambda: planned([controller], StepPlan(0, ())),
        "compose": lambda: composed([controller], []),
        "updates": lambda: list(ordered([controller], [], services)),
        "after_update": lambda: acted(controller, 0, services),
    }
    with pytest.raises(PluginError, match=f"^method 'hook': .*{words}"):
        calls[hook]()


def test_a_metric_of_one_number_in_a_tensor_is_that_number() -> None:
    assert acted(Hook({"x": torch.tensor(0.5), "n": 2}), 0, cast(Services, None)) == {"x": 0.5, "n": 2}


@pytest.mark.parametrize("given", [None, ["row"], iter([])])
def test_a_strategy_that_gives_no_rows_is_named(given: Any) -> None:
    class Forgetful(Strategy):
        def run(self, plan: Any, sampling: Sampling) -> Any:
            sampling.score(sampling.sample(plan.rows))
            return given

    with pytest.raises(PluginError, match=r"Forgetful\.run returned .* list of rows"):
        together(1, lambda: Forgetful(StrategySettings(name="forgetful")))


@pytest.mark.parametrize(
    ("state", "words"),
    [
        (None, "it is None"),
        ({"seen": {1}}, r"seen is \{1\} \(set\), but it must be a JSON value"),
        ({"a": [{"b": np.float32(1)}]}, r"a\.0\.b is .*float32"),
        ({"counts": {3: 1.0}}, r"key 3 of counts is 3 \(int\), but it must be a text"),
        ({"names": np.array(["x"])}, "the array names"),
    ],
)
def test_a_state_that_no_checkpoint_holds_is_named_with_its_place(state: Any, words: str) -> None:
    with pytest.raises(PluginError, match=rf"state_dict of methods\.0 .*: {words}"):
        check_state("methods.0", state)


def test_a_state_of_what_a_checkpoint_holds_is_taken() -> None:
    check_state("methods.0", {"a": [1, (2.0, None)], "b": {"c": torch.ones(1), "d": np.ones(2)}, "e": np.float64(1)})


@pytest.mark.parametrize(("given", "words"), [(None, "returned None for 1"), ([], "returned 0 rows for 1")])
def test_an_engine_that_gives_another_number_of_rows_is_named(given: Any, words: str) -> None:
    class Few(RolloutEngine):
        def sample(self, planned: Any, **named: Any) -> Any:
            return given

    learner = SimpleNamespace(updates=0, sharded=False, whole=nullcontext, whole_parameters=lambda: iter(()))
    player = SimpleNamespace(plays=lambda row: False)
    sampler = PolicySampler(Few(RolloutEngineSettings(name="few")), cast(Any, learner), cast(Any, player))
    plan = plan_step(0, [Prompt.make("1+1=")], samples=1, max_new_tokens=4, temperature=1.0)
    with pytest.raises(PluginError, match=rf"Few\.sample {words} planned rows"):
        sampler.sample(plan.rows)
