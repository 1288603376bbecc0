"""The laws of GPS: what it prefers among predicted rates, what it remembers, and how its model counts."""

from typing import Any

import numpy as np
import pytest
import torch
from torch.distributions import Normal, kl_divergence

from opd.tasks.prompt import Prompt
from opd_zoo.samplers.gps import features_of
from opd_zoo.samplers.gps_model import GpsModel, _kl
from student.data.outcome import Outcome
from student.data.plan import plan_step
from student.data.report import StepReport

PLAN = plan_step(0, [Prompt.make("p")], samples=1, max_new_tokens=1, temperature=1.0)


class Foreseen:
    """A model whose rates are given."""

    def __init__(self, rates: list[float]) -> None:
        self.rates = np.array(rates)

    def predict(self, features: Any, draws: int, seed: int) -> Any:
        return self.rates


def chosen(run: Any, rates: list[float], texts: list[str], count: int, **settings: Any) -> list[str]:
    made = run("gps", **settings)
    made.method._model = Foreseen(rates)
    pool = [Prompt.make(text) for text in texts]
    found = made.method.choose(pool, count, np.random.default_rng(0), PLAN)
    gaps = -((np.array(rates) - made.method.settings.target) ** 2)
    assert [gain for _, gain in found] == pytest.approx([gaps[pool.index(p)] - gaps.mean() for p, _ in found])
    return [str(prompt.text) for prompt, _ in found]


def test_prompts_whose_rate_is_nearest_to_the_target_come_first(run: Any) -> None:
    texts = ["one", "two", "three", "four", "five"]
    assert chosen(run, [0.9, 0.45, 0.0, 0.6, 0.2], texts, 2, diversity=0.0, target=0.5) == ["two", "four"]
    assert chosen(run, [0.9, 0.45, 0.0, 0.6, 0.2], texts, 2, diversity=0.0, target=0.1) == ["three", "five"]


def test_among_equal_rates_each_next_prompt_is_unlike_those_before(run: Any) -> None:
    texts = ["What is 1 + 1?", "What is 1 + 1? ", "Name the capital of France.", "Prove the lemma of Zorn."]
    found = chosen(run, [0.5] * 4, texts, 3, diversity=1.0)
    assert found == [texts[0], texts[2], texts[3]]


def test_prompts_like_those_of_late_are_passed_over(run: Any) -> None:
    made = run("gps", diversity=1.0)
    old, new = Prompt.make("What is 1 + 1?"), Prompt.make("Name the capital of France.")
    made.method._model, made.method._recent, made.method._seen = Foreseen([0.5, 0.5]), features_of(old), 1
    ((found, _),) = made.method.choose([old, new], 1, np.random.default_rng(0), PLAN)
    assert found == new


def test_half_of_what_is_recent_is_the_last_step_that_it_chose_and_saw(run: Any) -> None:
    method = run("gps").method
    first, second, strange = (Prompt.make(text) for text in ("1+1=", "2+2=", "3+3="))
    assert not method.knows(first)
    for prompt in (first, second):
        method._features = {prompt.uid: features_of(prompt)}
        seen = [Outcome(0, uid, 0, reward=1.0) for uid in (prompt.uid, strange.uid)]
        method.observe(StepReport(0, {}, seen))
        method.observe(StepReport(0, {}, seen[1:]))  # none of its choice: no step of its own
    assert method.knows(strange) and method._seen == 2
    assert method._recent == pytest.approx((features_of(first) + features_of(second)) / 2)


def test_it_foresees_the_rates_that_it_has_seen(run: Any) -> None:
    method = run("gps", learning_rate=0.01).method
    prompts = [Prompt.make(text) for text in ("1+1=", "Who is she?", "Prove it.")]
    method._features = {prompt.uid: features_of(prompt) for prompt in prompts}
    rewards = ([1, 1, 1, 1], [1, 0, 1, 0], [0, 0, 0, 0])
    seen = [
        Outcome(0, p.uid, i, reward=r) for p, mine in zip(prompts, rewards, strict=True) for i, r in enumerate(mine)
    ]
    for _ in range(40):
        method.observe(StepReport(0, {}, seen))
    foreseen = method.model.predict(np.stack([features_of(prompt) for prompt in prompts]), 16, 0)
    assert foreseen == pytest.approx([1.0, 0.5, 0.0], abs=0.15)


def test_features_have_length_one_and_tell_texts_apart_by_grams_and_length() -> None:
    def of(text: str) -> Any:
        return features_of(Prompt.make(text))

    chat = features_of(Prompt.make([{"role": "system", "content": "be"}, {"role": "user", "content": "brief"}]))
    assert chat == pytest.approx(of("be\nbrief"))
    for text in ("a", "a much longer text " * 50):
        assert np.linalg.norm(of(text)) == pytest.approx(1.0, abs=1e-6) and of(text).shape == (64,)
    assert of("x" * 500)[-1] > of("x" * 5)[-1] > 0
    assert not np.allclose(of("abc"), of("cba"))  # the same letters
    # Grams decide, and not how often the whole is said: such texts are nearer to each other than others are.
    assert of("12+34=")[:-1] @ of("12+34=12+34=")[:-1] > 0.8 > abs(of("12+34=")[:-1] @ of("Who is she?")[:-1])


def test_rates_are_means_of_draws_within_0_and_1() -> None:
    model, features = GpsModel(64, 0, 3e-3), np.stack([features_of(Prompt.make(f"{i}+{i}=")) for i in range(8)])
    for step in range(20):
        model.fit(features, np.ones(8, np.float32), 4, seed=step)
    few, many = model.predict(features, 1, 0), model.predict(features, 64, 0)
    assert (few > 0.8).all() and (few <= 1).all() and (many > 0.8).all() and (many <= 1).all()
    assert len({float(model.predict(features, 1, seed)[0]) for seed in range(4)}) == 4  # a draw of the latent each
    before = model.memory.clone()
    model.fit(features, np.zeros(8, np.float32), 1, seed=99)
    assert not torch.equal(model.memory, before)


def test_the_divergence_of_two_gaussians_is_torchs() -> None:
    mean, other = torch.tensor([0.3, -1.0]), torch.tensor([-0.2, 0.5])
    width, other_width = torch.tensor([0.7, 1.5]), torch.tensor([1.2, 0.4])
    expected = kl_divergence(Normal(mean, width), Normal(other, other_width)).sum()
    assert torch.isclose(_kl(mean, width, other, other_width), expected)
