"""ArCHer's critic: its gradient and targets, its values in a chain whose values are known, ranks and checkpoints."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from critics import assert_two_ranks_fit_as_one_and_a_checkpoint_keeps_it, step_of
from rows import make_row
from thread_ranks import Meeting

from opd.tasks.verdict import Verdict
from opd.wire.types import ScoreItem, Scores
from opd_zoo.advantages.archer import Archer
from opd_zoo.critics.archer import ArcherCritic, ArcherCriticSettings, gradient_of
from student.data.row import Row, RowKey
from student.model.ranks import Ranks
from student.plugin.controllers import begin
from student.rl.advantages.base import AdvantageSettings

GOOD, BAD = 1, 2
SPANS = ((0, 2), (3, 4))


class Services:
    """States that tell what was read last and how far the row is, and ranks that meet at a barrier."""

    def __init__(self, ranks: Ranks | None = None) -> None:
        self.gather = (ranks or Meeting(1).rank(0)).gather

    def read(self, items: list[ScoreItem], *arguments: Any, **options: Any) -> list[Scores]:
        found = []
        for item in items:
            ids = np.asarray(item.token_ids)
            hidden = np.zeros((len(ids) - item.prompt_length, 3), np.float32)
            for place in range(len(hidden)):
                last = ids[item.prompt_length + place - 1]
                hidden[place] = [last == GOOD, last == BAD, place >= 3]
            found.append(Scores(hidden=hidden))
        return found


def episode(step: int, sample: int, first: int, last: int) -> Row:
    """Two turns with an id of the environment between them; worth 1 where both ended well."""
    ids = np.array([7, first, 5, last], np.uint32)
    return make_row(
        4,
        key=RowKey(step, "p", sample),
        response_ids=ids,
        turns=SPANS,
        loss_mask=np.array([True, True, False, True]),
        verdict=Verdict.score(float(first == last == GOOD)),
    )


def rows(step: int) -> list[Row]:
    return [episode(step, 2 * i + j, a, b) for i, a in enumerate((GOOD, BAD)) for j, b in enumerate((GOOD, BAD))]


def critic(services: Services, **settings: Any) -> ArcherCritic:
    made = ArcherCritic(ArcherCriticSettings(name="archer_critic", **settings))
    begin(made, services)  # type: ignore[arg-type]
    return made


def test_the_gradient_is_that_of_four_squared_errors_against_the_copies() -> None:
    rng, width, count, gamma = np.random.default_rng(1), 3, 5, 0.9
    heads, copies = rng.normal(size=(2, 2, 3 * width + 2))
    turns = rng.normal(size=(count, 3 * width + 2))
    turns[:, -1] = [1, 0, 1, 1, 0]
    own, slow, data = torch.tensor(heads, requires_grad=True), torch.tensor(copies), torch.tensor(turns)
    state, action, later = data[:, :3], data[:, 3:6], data[:, 6:9]
    losses = []
    for j in range(2):
        q = (own[j, 4:7] * state).sum(1) + (own[j, 7:10] * action).sum(1) + own[j, 10]
        v = (own[j, :3] * state).sum(1) + own[j, 3]
        slow_q = (slow[j, 4:7] * state).sum(1) + (slow[j, 7:10] * action).sum(1) + slow[j, 10]
        slow_v = (slow[j, :3] * later).sum(1) + slow[j, 3]
        losses += [torch.nn.functional.mse_loss(q, data[:, 9] + gamma * data[:, 10] * slow_v)]
        losses += [torch.nn.functional.mse_loss(v, slow_q)]
    sum(losses, torch.zeros((), dtype=torch.float64)).backward()
    gradient, (of_q, of_v, _) = gradient_of(heads, copies, turns, gamma)
    np.testing.assert_allclose(gradient, own.grad, rtol=1e-12)
    assert (of_q, of_v) == pytest.approx(((losses[0] + losses[2]).item(), (losses[1] + losses[3]).item()), rel=1e-12)


def test_credit_is_the_least_q_less_the_least_v_on_all_tokens_of_the_turn() -> None:
    made = critic(Services())
    # States before the turns: (nothing read, not far), (the environment's id read, far); behind: what was written.
    v = [[0.0, 0.0, 0.5, 0.25], [0.0, 0.0, 1.0, 0.125]]
    q = [[0.0, 0.0, 0.0, 1.0, -1.0, 0.0, 0.5], [0.0, 0.0, 0.0, 2.0, -0.5, 0.0, 0.0]]
    made.heads = np.concatenate([v, q], 1)
    (row,) = made.compose([episode(0, 0, GOOD, BAD)])
    first, last = min(1.5, 2.0) - min(0.25, 0.125), min(-0.5, -0.5) - min(0.75, 1.125)
    assert row.critic.credit["ArcherCritic"].tolist() == pytest.approx([first, first, 0.0, last])
    found = Archer(AdvantageSettings(name="archer")).refine(row, 9.0)
    assert isinstance(found, np.ndarray)
    assert found.tolist() == pytest.approx([1.375, 1.375, 0.0, -1.25])


def test_turns_that_win_come_to_be_worth_more_than_those_that_lose() -> None:
    made = critic(Services(), fits=64, learning_rate=0.02, discount=1.0)
    assert not made.compose(rows(0))[0].critic.credit["ArcherCritic"].any()
    told = [step_of(made, step, rows(step)) for step in range(10)]
    assert told[-1]["archer/q_loss"] < told[0]["archer/q_loss"] and told[-1]["archer/buffer"] == 80
    won, _, _, lost = made.compose(rows(99))
    last = [row.critic.credit["ArcherCritic"][-1] for row in (won, lost)]
    assert last[0] > 0.05 > -0.05 > last[1]


def test_the_buffer_keeps_the_last_turns_and_the_warm_up_makes_no_update() -> None:
    made = critic(Services(), buffer=10, warm_up=1)
    services: Any = made.services
    made.compose(rows(0))
    assert list(made.updates(["update"], services)) == []  # type: ignore[list-item]
    assert made.after_update(0, services)["archer/warm_up"] == 1 and len(made.buffer) == 8  # type: ignore[arg-type]
    made.compose(rows(1))
    assert list(made.updates(["update"], services)) == ["update"]  # type: ignore[comparison-overlap, list-item]
    assert made.after_update(1, services)["archer/buffer"] == 10


def test_two_ranks_fit_what_one_does_to_the_bit_and_a_checkpoint_keeps_it(tmp_path: Path) -> None:
    alone, again = assert_two_ranks_fit_as_one_and_a_checkpoint_keeps_it(
        lambda ranks: critic(Services(ranks)), rows, tmp_path
    )
    np.testing.assert_array_equal(again.copies, alone.copies)  # type: ignore[arg-type]
