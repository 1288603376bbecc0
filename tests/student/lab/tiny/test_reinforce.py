import pytest
import torch

from opd.tasks import Prompt, Verdict
from student.lab.tiny.model import make_model
from student.lab.tiny.plans import ReinforcePlan, Shape
from student.lab.tiny.reinforce import leave_one_out, train_reinforce
from student.lab.tiny.tokenizer import make_tokenizer

RIGHT, WRONG, UNKNOWN = Verdict.of(True), Verdict.of(False), Verdict.unknown("time-out")


class ShortAnswers:
    """A source whose verifier rewards answers of at most one character."""

    def prompts(self, split, count, start=0):
        return [Prompt.make(f"{index % 10}=") for index in range(start, start + count)]

    def verify(self, prompt, completion):
        return Verdict.of(len(completion) <= 1)

    def close(self):
        pass


def test_advantage_is_own_score_minus_the_mean_of_the_others():
    found = leave_one_out([RIGHT, WRONG, WRONG, WRONG, RIGHT, RIGHT, RIGHT, RIGHT], 4)
    assert found.tolist() == pytest.approx([1, -1 / 3, -1 / 3, -1 / 3, 0, 0, 0, 0])


def test_unknown_verdicts_neither_learn_nor_count_in_the_baseline():
    found = leave_one_out([RIGHT, WRONG, UNKNOWN, UNKNOWN], 4)
    assert found.tolist() == pytest.approx([1, -1, 0, 0])
    assert leave_one_out([UNKNOWN] * 4, 4).tolist() == [0, 0, 0, 0]


def test_training_raises_the_score():
    tokenizer = make_tokenizer()
    model = make_model(Shape(hidden=32, layers=1, heads=2), seed=0)
    plan = ReinforcePlan(steps=30, prompts=8, samples=8, lr=1e-2, warmup=1, max_new_tokens=4)
    first = train_reinforce(
        make_model(Shape(hidden=32, layers=1, heads=2), seed=0),
        tokenizer,
        ShortAnswers(),
        ReinforcePlan(steps=1, prompts=8, max_new_tokens=4),
        seed=0,
    )
    last = train_reinforce(model, tokenizer, ShortAnswers(), plan, seed=0)
    assert first < 0.3 < 0.8 < last


def test_a_batch_without_contrast_leaves_the_weights_alone():
    class AlwaysRight(ShortAnswers):
        def verify(self, prompt, completion):
            return RIGHT

    model = make_model(Shape(hidden=32, layers=1, heads=2), seed=0)
    before = [weight.clone() for weight in model.parameters()]
    train_reinforce(model, make_tokenizer(), AlwaysRight(), ReinforcePlan(steps=2, max_new_tokens=2), seed=0)
    assert all(torch.equal(left, right) for left, right in zip(before, model.parameters(), strict=True))
