"""Golden numbers of the samplers, and that each prefers what its paper says."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from opd.config import parse_settings
from opd.errors import ConfigError
from opd.tasks.prompt import Prompt
from opd_zoo.prompts import in_template
from opd_zoo.samplers.gdro import Gdro, GdroSettings, allocate, class_weights
from opd_zoo.samplers.gps import features_of
from opd_zoo.samplers.gps_model import GpsModel
from opd_zoo.samplers.mopps import Mopps, MoppsSettings
from opd_zoo.samplers.sec import Sec, SecSettings, standardised
from student.data.outcome import Outcome, outcome_of
from student.data.report import StepReport

Rate = Callable[[Prompt], float]


def answers(uid: str, rewards: list[float], domain: str = "") -> list[Outcome]:
    return [Outcome(0, uid, i, domain=domain, reward=reward) for i, reward in enumerate(rewards)]


def report(*outcomes: Outcome) -> StepReport:
    return StepReport(0, {}, list(outcomes))


def mean_distance(plan: Any, rate: Rate) -> float:
    return float(np.mean([abs(rate(row.prompt) - 0.5) for row in plan.rows]))


@pytest.mark.parametrize("mode", ["topk", "threshold"])
def test_prompts_of_middling_difficulty_are_preferred_to_chance(run: Any, rate: Rate, mode: str) -> None:
    made, chance = run("mopps", mode=mode), run("random_prompts")
    made.go(40)
    chance.go(40)
    found, null = (
        [mean_distance(one.plan(), rate) for one in [r] for _ in range(12) if one.finish(one.plan())]
        for r in (made, chance)
    )
    assert np.mean(found) < np.mean(null) - 0.1


def test_the_posterior_of_mopps_forgets_by_lam() -> None:
    for lam, expected in [(1.0, (4.0, 2.0)), (0.0, (4.0, 2.0)), (0.5, (4.0, 2.0))]:
        sampler = Mopps(MoppsSettings(name="mopps", lam=lam))
        sampler.observe(report(*answers("p", [1, 1, 1, 0])))
        assert sampler.counts["p"] == pytest.approx(expected)  # the prior is 1, 1 whatever is kept of it
    for lam, second in [(1.0, (4.0, 6.0)), (0.0, (1.0, 5.0)), (0.5, (2.5, 5.5))]:
        sampler = Mopps(MoppsSettings(name="mopps", lam=lam))
        sampler.observe(report(*answers("p", [1, 1, 1, 0])))
        sampler.observe(report(*answers("p", [0, 0, 0, 0])))
        assert sampler.counts["p"] == pytest.approx(second)


def test_a_posterior_is_held_against_a_target_or_a_band() -> None:
    prompts = [Prompt.make(text) for text in "ab"]
    for mode, expected in (("topk", [-0.16, -0.01]), ("threshold", [-0.2, 0.0])):
        made = Mopps(parse_settings(MoppsSettings, {"name": "mopps", "mode": mode}))
        made.counts = {prompts[0].uid: (9e9, 1e9), prompts[1].uid: (4e9, 6e9)}  # rates of 0.9 and 0.4 for sure
        assert made.scores(prompts, np.random.default_rng(0)) == pytest.approx(expected, abs=1e-3)


def test_the_pay_of_a_bandit_peaks_at_half() -> None:
    pays = {p: np.mean(np.abs(standardised([1.0] * p + [0.0] * (8 - p)))) for p in range(9)}
    assert pays[4] == 1.0 and pays[2] == pytest.approx(2 * (0.25 * 0.75) ** 0.5) and pays[0] == pays[8] == 0
    assert standardised([0.1] * 3) == [0.0] * 3  # whose mean is not a tenth
    sampler = Sec(SecSettings(name="sec"))
    sampler.observe(report(*answers("a", [1, 0, 1, 0], "even"), *answers("b", [1, 1, 1, 1], "easy")))
    assert sampler.value == {"even": 1.0, "easy": 0.0}
    sampler.observe(report(*answers("a", [1, 1, 1, 1], "even")))
    assert sampler.value["even"] == 0.5


def test_a_bandit_draws_the_kind_that_pays(run: Any) -> None:
    made = run("sec", tau=0.1)
    made.go(20)
    drawn = [row.prompt.domain for _ in range(10) for row in made.plan().rows if made.finish(made.plan())]
    assert drawn.count("middle") > 0.7 * len(drawn)


def test_pairs_come_from_both_ends_and_never_from_what_is_always_right_or_wrong(run: Any) -> None:
    made = run("positive_negative", explore=0.0, candidates=8)
    made.method.rates.known = {row.uid: 0.1 * (i % 11) for i, row in enumerate(made.prompts(48))}
    rates = sorted(made.method.rates.known[row.key.uid] for row in made.plan().rows)[::4]
    assert rates == pytest.approx([0.1, 0.1, 0.1, 0.9, 0.9, 0.9])


def test_phases_keep_the_hardest_and_shrink(run: Any, rate: Rate) -> None:
    made = run("drive", candidates=8, phases=[{"step": 8, "keep": 0.4, "samples": 8}, {"step": 10, "keep": 0.5}])
    sets = []
    for _ in range(12):
        plan = made.plan()
        sets.append(set(made.method.kept or ()))
        inside = [row.key.uid in sets[-1] for row in plan.rows]
        assert sets[-1] == set() or all(inside)
        assert len(plan.rows) / len({row.key.uid for row in plan.rows}) == (8 if 8 <= made.step < 10 else 4)
        made.finish(plan)
    assert sets[7] == set() and len(sets[8]) > len(sets[10]) > 0 and sets[10] < sets[8]
    assert np.mean([rate(row.prompt) for row in made.plan().rows]) < 0.3


@pytest.mark.parametrize("by", ["prompt", "domain"])
def test_a_phase_keeps_the_same_of_what_is_equally_hard_in_whatever_order_it_was_learnt(run: Any, by: str) -> None:
    made, again = (run("drive", by=by, phases=[{"step": 3, "keep": 0.5}]) for _ in range(2))
    for step in range(3):
        outcomes = [replace(o, reward=0.0) for o in map(outcome_of, made.rows(made.plan()))]
        made.position += 6
        made.method.observe(StepReport(step, {}, outcomes))
        again.method.observe(StepReport(step, {}, outcomes[::-1]))
    names = sorted(made.method.rates.known)
    assert len(names) == (3 if by == "domain" else 18)
    assert list(made.method.rates.known) != list(again.method.rates.known)
    assert made.method.kept == again.method.kept == names[: round(len(names) / 2)]


def test_stages_change_domains_and_lengths(run: Any) -> None:
    made = run("stages", stages=[{"step": 0, "domains": ["easy"]}, {"step": 1, "max_new_tokens": 5}])
    first = made.plan()
    made.finish(first)
    second = made.plan()
    assert {row.prompt.domain for row in first.rows} == {"easy"} and {r.max_new_tokens for r in first.rows} == {8}
    assert len({row.prompt.domain for row in second.rows}) == 3 and {r.max_new_tokens for r in second.rows} == {5}
    with pytest.raises(ConfigError, match=r"rollout\.max_new_tokens"):
        run("stages", stages=[{"step": 0, "max_new_tokens": 500}])


def test_the_weights_of_classes() -> None:
    found = class_weights({"a": 0.2, "b": 0.8}, 0.65, 0.01)
    assert list(found.values()) == pytest.approx([0.40468, 0.59532], abs=1e-5)


def test_hard_classes_weigh_more_and_weights_have_mean_one(run: Any, rate: Rate) -> None:
    made = run("prompt_gdro")
    made.go(20)
    rows = made.method.compose(made.rows(made.plan()))
    weights = {row.prompt.domain: row.weight for row in rows}
    assert weights["hard"] > weights["easy"] and np.mean([row.weight for row in rows]) == pytest.approx(1.0)


def test_rows_of_an_earlier_step_have_no_weight_of_its_plan(run: Any) -> None:
    made = run("prompt_gdro")
    made.go(20)
    earlier = made.rows(made.plan())
    made.finish(made.plan())
    now = {row.key.uid for row in made.plan().rows}
    replayed = [row for row in earlier if row.key.uid not in now]
    assert replayed and all(row.weight == 1.0 for row in made.method.compose(replayed))


def test_answers_follow_the_deviation_and_keep_the_budget(run: Any) -> None:
    assert allocate([0.25, 0.09, 0.01], 18, least=1, most=18) == [10, 6, 2]
    assert allocate([0.25, 0.0, 0.0], 12, least=2, most=6) == [6, 3, 3]
    assert allocate([0.0, 0.0], 7, least=1, most=7) == [4, 3]
    made = run("rollout_gdro")
    made.go(20)
    plan = made.plan()
    counts = {p: sum(row.prompt.domain == p for row in plan.rows) for p in ("easy", "middle", "hard")}
    assert len(plan.rows) == 24 and counts["middle"] > counts["easy"] and counts["middle"] > counts["hard"]


def test_a_prompt_changes_its_class_only_beyond_the_slack() -> None:
    moved = Gdro(parse_settings(GdroSettings, {"name": "gdro"}))._moved
    assert [moved(None, rate) for rate in (0.1, 0.4, 0.8)] == [0, 1, 2]
    assert [moved(0, 0.42), moved(0, 0.44), moved(1, 0.38), moved(1, 0.36), moved(2, 0.0)] == [0, 1, 1, 0, 0]


def test_a_template_keeps_who_the_prompt_is_and_its_prefix_is_given(run: Any) -> None:
    plain = Prompt.make("1+1=", answer="2")
    asked = in_template(plain, "Q: {prompt}")
    assert asked.text == "Q: 1+1=" and asked.uid == plain.uid and asked.answer == "2"
    chat = Prompt.make([{"role": "system", "content": "s"}, {"role": "user", "content": "1+1="}])
    assert [m["content"] for m in in_template(chat, "Q: {prompt}").messages or ()] == ["s", "Q: 1+1="]
    made = run(
        "prompt_augmentation",
        templates=[{"text": "{prompt}"}, {"text": "T {prompt}", "prefix": "<a>", "format": "^0$"}],
        format_weight=0.5,
    )
    plan = made.plan()
    for row in plan.rows:
        assert row.prefix_ids == (tuple(b"<a>") if row.tags["template"] == "1" else ())
        assert len({other.tags["template"] for other in plan.rows if other.key.uid == row.key.uid}) == 1
    assert {row.tags["template"] for row in plan.rows} == {"0", "1"}
    rows = made.method.compose(made.rows(plan))
    assert {row.tags["template"]: row.reward_parts.get("format") for row in rows} == {"0": None, "1": 0.5}


def test_gps_predicts_prompts_it_has_not_seen() -> None:
    """Difficulty that grows with the number of digits, on numbers that do not recur."""
    rng = np.random.default_rng(0)

    def batch(count: int) -> tuple[Any, Any]:
        sizes = rng.integers(1, 7, count)
        prompts = [
            Prompt.make(f"{rng.integers(10 ** (s - 1), 10**s)}+{rng.integers(10 ** (s - 1), 10**s)}=") for s in sizes
        ]
        return np.stack([features_of(p) for p in prompts]), (1.0 - (sizes - 0.5) / 6.0).astype(np.float32)

    model = GpsModel(64, 0, 3e-3)
    for step in range(60):
        model.fit(*batch(16), 4, seed=step)
    features, rates = batch(64)
    assert np.corrcoef(model.predict(features, 16, 0), rates)[0, 1] > 0.5


def test_a_head_on_the_prompts_states_learns_what_is_solved_and_chooses_the_middle(run: Any) -> None:
    made = run("pcl", learning_rate=0.05)
    assert made.method.value(np.array([0.3, 1.0], np.float32)) == 0.5  # before the first fit
    for _ in range(30):
        plan = made.plan()
        rows = [replace(o, reward=len(o_prompt(plan, o).text) / 6 - 0.3) for o in map(outcome_of, made.rows(plan))]
        made.method.observe(StepReport(made.step, {}, rows))
        made.position, made.step = made.position + made.taken, made.step + 1
    lengths = [len(row.prompt.text) for row in made.plan().rows]
    values = [made.method.value(np.array([n / 4 - 1, 1.0], np.float32)) for n in (3, 4, 5, 6)]
    assert values == sorted(values) and values[0] < 0.35 and values[-1] > 0.55
    assert np.mean(lengths) == pytest.approx(5, abs=0.6)  # where the rewards are nearest to one half


def o_prompt(plan: Any, outcome: Outcome) -> Prompt:
    return next(row.prompt for row in plan.rows if row.key.uid == outcome.uid)


def test_deeper_compositions_come_once_the_shallower_ones_are_solved(run: Any) -> None:
    made = run("depth_curriculum", memory=0.0, candidates=8)

    def step(success: float) -> list[int]:
        plan = made.plan()
        depths = [row.prompt.extra["depth"] for row in plan.rows]
        rows = [replace(outcome_of(row), reward=success) for row in made.method.compose(made.rows(plan))]
        made.method.observe(StepReport(made.step, {}, rows))
        made.position, made.step = made.position + made.taken, made.step + 1
        return depths

    assert [set(step(success)) for success in (0.5, 0.8, 0.7, 0.9, 1.0)] == [{1}, {1}, {2}, {2}, {3}]
    assert made.method.depth == 3 and set(step(1.0)) == {3}  # the deepest stays
