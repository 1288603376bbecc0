"""Golden numbers of the losses that read values, references or old states: ROVER, A-LoL, Direct Advantage PO, SAFE."""

from typing import Any

import numpy as np
import pytest
import torch
from rows import make_row

from opd_zoo.losses.safe import Safe, SafeSettings
from student.data.needs import REFERENCE, STUDENT
from student.data.outcome import Outcome
from student.data.report import StepReport
from student.data.row import CriticValues, EpisodeTrace
from student.plugin.terms import build_terms

FIXED = {"name": "signed", "positive": 1.0}


def token_logps(made: Any, hidden: torch.Tensor, head: torch.Tensor) -> torch.Tensor:
    return made.logp(hidden, head).gather(1, made.token_ids[:, None])[:, 0]


def run(made: Any, **entry: Any) -> tuple[torch.Tensor, torch.Tensor, Any]:
    """The loss of each position, d loss / d log pi, and the metrics."""
    made.hidden = made.hidden.detach().clone().requires_grad_()
    (term,) = build_terms([entry])
    term.prepare(made.rows)
    batch = made.batch()
    output = term.token_losses(batch)
    assert output.loss is not None
    (slope,) = torch.autograd.grad(output.loss.sum(), batch.student.scores.sampled)
    return output.loss.detach(), slope, output.metrics


def test_rover_regresses_on_the_reward_and_the_mean_of_the_next_state(toy: Any) -> None:
    made = toy(lengths=(4, 2), group=2, masked=False)
    made.rows[0].reward, made.rows[1].reward = 1.0, 0.0
    loss, slope, metrics = run(made, name="rover", rho=2.0)
    old_hidden, old_head = made.models[STUDENT]
    gap = token_logps(made, made.hidden, made.head) - token_logps(made, old_hidden, old_head)
    mean = (made.logp(made.hidden, made.head) - made.logp(old_hidden, old_head)).mean(-1).tolist()
    after = torch.tensor([mean[1], mean[2], mean[3], 0.0, mean[5], 0.0], dtype=torch.float64)
    credit = torch.tensor([0.5] * 4 + [-0.5] * 2, dtype=torch.float64)
    residual = 2.0 * gap - credit - 2.0 * after
    torch.testing.assert_close(loss, (residual**2).detach())
    torch.testing.assert_close(slope, (2.0 * residual * 2.0).detach())  # nothing flows through the next state
    assert float(metrics["rover_next"][0]) == pytest.approx(2.0 * float(after.sum()), rel=1e-6)


def test_rover_is_reinforce_before_the_weights_move(toy: Any) -> None:
    made = toy(lengths=(3, 3), group=2, masked=False)
    made.rows[0].reward, made.rows[1].reward = 1.0, 0.0
    made.models[STUDENT] = (made.hidden.clone(), made.head.clone())
    _, slope, metrics = run(made, name="rover")
    assert slope.tolist() == pytest.approx([-2 * 0.5] * 3 + [2 * 0.5] * 3)
    assert float(metrics["rover_next"][0]) == pytest.approx(0.0, abs=1e-12)


def test_a_lol_keeps_what_beats_the_prompt_and_bounds_the_ratio_of_the_answer(toy: Any) -> None:
    made = toy(lengths=(2, 2, 2), group=3, masked=False)
    for row, reward, value in zip(made.rows, (0.9, 0.9, 0.3), (0.4, 0.4, 0.4), strict=True):
        row.reward, row.critic = reward, CriticValues(np.array([value, 9.0], np.float32))
    live = token_logps(made, made.hidden, made.head)
    shift = torch.tensor([0.1, 0.1, 2.0, 2.0, 0.0, 0.0], dtype=torch.float64)
    wanted = torch.eye(made.vocab, dtype=torch.float64)  # a reference whose log-probs of the tokens are set
    reference = torch.full((6, made.vocab), -30.0, dtype=torch.float64)
    p = (live - shift).exp().detach()
    reference[range(6), made.token_ids] = p.log()
    reference[range(6), (made.token_ids + 1) % made.vocab] = (1 - p).log()
    made.models[REFERENCE] = (reference, wanted)
    (term,) = build_terms([{"name": "a_lol"}])
    term.prepare(made.rows)
    assert [term.selects(row) for row in made.rows] == [True, True, False]
    _, slope, metrics = run(made, name="a_lol")
    weights = [min(np.exp(0.2), 1.9)] * 2 + [1.9] * 2 + [1.0] * 2
    assert slope[:4].tolist() == pytest.approx([-0.5 * w for w in weights[:4]], rel=1e-6)
    assert slope[4:].tolist() == [0.0, 0.0] and float(metrics["tapered_share"][0]) == 2
    _, tokens, _ = run(made, name="a_lol", ratio="token")
    assert tokens[:4].tolist() == pytest.approx([-0.5 * np.exp(0.1)] * 2 + [-0.5 * 1.9] * 2, rel=1e-6)
    _, free, _ = run(made, name="a_lol", ratio="none")
    assert free[:4].tolist() == pytest.approx([-0.5] * 4)


class Letters:
    """Token i is the letter or break of that number."""

    def decode(self, ids: list[int]) -> str:
        return "ab\n\ncdefg"[ids[0]] if ids[0] != 2 else "\n\n"


def test_each_step_is_drawn_towards_its_own_advantage(toy: Any) -> None:
    made = toy(lengths=(5,), group=1, masked=False)
    made.token_ids = torch.tensor([0, 2, 1, 1, 0])  # a, break, b, b, a: two steps, of 2 and 3 tokens
    row = made.rows[0]
    row.response_ids = made.token_ids.numpy().astype(np.uint32)
    row.reward, row.critic = 1.0, CriticValues(np.array([0.2, 9.0, 0.6, 9.0, 9.0], np.float32))
    (term,) = build_terms([{"name": "dapo_direct", "beta": 0.5}])
    term.bind(Letters())
    places, advantages = term.steps(row)
    assert places.tolist() == [0, 0, 1, 1, 1] and advantages.tolist() == pytest.approx([0.4, 0.4])
    output = term.token_losses(made.batch())
    gap = token_logps(made, made.hidden, made.head) - token_logps(made, *made.models[REFERENCE])
    steps = [(0.8 - float(gap[:2].sum())) ** 2, (0.8 - float(gap[2:].sum())) ** 2]
    assert float(output.loss.mean()) == pytest.approx(sum(steps) / 2)  # the mean over steps, whatever their lengths
    # The sum of a row's advantages is what its answer was worth beyond the prompt's value.
    assert advantages.sum() == pytest.approx(1.0 - 0.2)


def test_the_steps_of_an_episode_begin_where_the_student_acts() -> None:
    row = make_row(7, turns=((0, 2), (4, 6)), reward=1.0)
    tools = np.array([0, 0, 1, 1, 0, 0, 1], np.bool_)
    row.episode, row.loss_mask = EpisodeTrace(tools), ~tools
    values = np.where(tools, np.nan, [0.2, 9.0, 0.0, 0.0, 0.6, 9.0, 0.0])
    row.critic = CriticValues(values.astype(np.float32))
    (term,) = build_terms([{"name": "dapo_direct"}])
    places, advantages = term.steps(row)
    # The last turn gets the reward although its environment answered it.
    assert places[row.loss_mask].tolist() == [0, 0, 1, 1] and advantages.tolist() == pytest.approx([0.4, 0.4])


def test_a_step_that_has_reached_its_advantage_is_left_alone(toy: Any) -> None:
    made = toy(lengths=(3,), group=1, masked=False)
    gap = token_logps(made, made.hidden, made.head) - token_logps(made, *made.models[REFERENCE])
    made.rows[0].reward = 0.25 * float(gap.sum())
    _, slope, _ = run(made, name="dapo_direct", beta=0.25)
    assert slope.abs().max() < 1e-6


def seen(term: Safe, kls: list[float], rewards: list[float], entropy: float = 1.0) -> None:
    for step, (kl, reward) in enumerate(zip(kls, rewards, strict=True)):
        metrics = {"safe_kl": kl, "student_entropy": entropy}
        term.observe(StepReport(step, metrics, [Outcome(step, "p", 0, reward=reward)]))


def test_the_threshold_of_safe_moves_with_the_phase_and_stays_in_bounds() -> None:
    term = Safe(SafeSettings(name="safe"))
    seen(term, [0.0], [0.5])
    assert term.phase == "warm_up" and term.limit == pytest.approx(0.45) and term.slope == 0.0
    seen(term, [0.1] * 50, [0.5] * 50)
    assert term.phase == "plateau" and 0.1 <= term.limit < 0.3
    seen(term, [0.1] * 50, [0.9] * 50)
    assert term.phase == "climbing"
    seen(term, [0.1] * 60, [0.9] * 60)
    assert term.phase == "converged" and 0.1 <= term.limit <= 0.6


def test_the_threshold_of_safe_follows_the_velocity_of_the_reward() -> None:
    """Smoothed rewards 0, 0.05 and 0.0975: errors 0.049 and 0.0465 beyond 0.001, in a phase of 1.5."""
    term = Safe(SafeSettings(name="safe"))
    seen(term, [0.0, 0.0], [0.0, 1.0])
    assert term.limit == pytest.approx(1.5 * (0.3 + 0.3 * 0.049 + 0.01 * 0.049 + 0.05 * 0.049))
    seen(term, [0.0], [1.0])
    assert term.limit == pytest.approx(1.5 * (0.3 + 0.3 * 0.0465 + 0.01 * 0.0955 + 0.05 * (0.0465 - 0.049)))
    for bound in (1.0, -1.0):
        term.integral = bound
        seen(term, [0.0] * 2, [bound * 99.0] * 2)
        assert term.integral == bound


def test_a_kl_over_the_threshold_pulls_back_more_where_entropy_is_low(toy: Any) -> None:
    loose, tight = Safe(SafeSettings(name="safe")), Safe(SafeSettings(name="safe"))
    seen(loose, [2.0] * 20, [0.5] * 20, entropy=3.9)
    seen(tight, [2.0] * 20, [0.5] * 20, entropy=0.4)
    short = 2.0 * (1 - 0.9**20)
    assert loose.short == pytest.approx(short)
    assert loose.slope == pytest.approx(0.2 * (short - loose.limit) * 0.5)
    assert tight.slope == pytest.approx(0.2 * (short - tight.limit) * 4.0)
    made = toy(lengths=(3,), group=1, masked=False)
    gap = token_logps(made, made.hidden, made.head) - token_logps(made, *made.models[REFERENCE])
    (term,) = build_terms([{"name": "safe", "advantage": {"name": "reinforce"}}])
    made.rows[0].reward = 0.0
    term.load_state_dict(tight.state_dict() | {"advantage": {}})
    term.prepare(made.rows)
    batch = made.batch()
    batch.student.scores.sampled.requires_grad_()
    (slope,) = torch.autograd.grad(term.token_losses(batch).loss.sum(), batch.student.scores.sampled)
    torch.testing.assert_close(slope, (tight.slope * gap).detach())


def test_the_asymmetric_controller_minds_only_a_kl_that_is_high_or_rises() -> None:
    term = Safe(SafeSettings(name="safe", form="asymmetric"))
    seen(term, [-1.0, 0.2], [0.5, 0.5])
    assert term.slope == 0.0
    seen(term, [0.8], [0.5])
    assert term.slope == pytest.approx(0.2 * 0.5)
    seen(term, [0.05] * 49 + [0.25], [0.5] * 50)
    assert term.slope == pytest.approx(2 * 5 * (0.2 / 50) / 50)
