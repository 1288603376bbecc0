"""G2RL: the direction of an answer's gradient, how new it is in its group, and what it is worth."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from rows import make_row

from opd.config import parse_settings
from opd.heads import OutputHead
from opd.tasks.verdict import Verdict
from opd.wire.types import Scores
from opd_zoo.filters.g2rl import G2rl, G2rlSettings, direction, novelty, raw_novelty
from student.data.outcome import outcome_of


def test_the_direction_is_that_of_the_gradient_in_the_hidden_states() -> None:
    torch.manual_seed(0)
    head = OutputHead(torch.randn(11, 5), padding=2)
    hidden = torch.randn(7, 5, requires_grad=True)
    ids = torch.tensor([0, 3, 8, 1, 1, 4, 7])
    logp = (hidden @ head.weight[:9].T).log_softmax(-1)
    (gradient,) = torch.autograd.grad(logp[torch.arange(7), ids].sum(), hidden)
    wanted = gradient.sum(0).double().numpy()
    found = direction(hidden.detach().numpy(), ids.numpy().astype(np.uint32), head)
    assert found == pytest.approx(wanted / np.linalg.norm(wanted), abs=1e-5)


def test_what_points_elsewhere_than_the_good_answers_is_new() -> None:
    phi = np.array([[1.0, 0.0], [1.0, 0.0], [0.0, 1.0]])
    assert raw_novelty(phi, np.array([1.0, 1.0, -1.0])) == pytest.approx([0.1192, 0.1192, 1.0], abs=1e-4)
    assert novelty(phi, np.array([1.0, 1.0, -1.0])).tolist() == [0.0, 0.0, 1.0]
    assert novelty(-2.0 * phi / 2.0, np.array([1.0, 1.0, -1.0])).tolist() == [0.0, 0.0, 1.0]  # a sign is no direction
    assert not novelty(phi[:2], np.ones(2)).any() and not novelty(phi[:1], np.ones(1)).any()


def test_right_answers_in_new_directions_gain_and_wrong_ones_lose() -> None:
    made = G2rl(parse_settings(G2rlSettings, {"name": "g2rl", "strength": 0.5}))
    head = OutputHead(torch.eye(3))
    hidden = {0: [9.0, 0.0, 0.0], 1: [9.0, 0.0, 0.0], 2: [0.0, 9.0, 0.0], 3: [0.0, 0.0, 9.0]}
    services: Any = SimpleNamespace(
        workbench=lambda: SimpleNamespace(learner=SimpleNamespace(student=SimpleNamespace(head=lambda: head))),
        read=lambda rows, spec: [Scores(hidden=np.array([hidden[row.key.sample]], np.float32)) for row in rows],
    )
    made.services = services
    made.start(services)
    rows = [make_row([1 if i < 2 else 0], sample=i, verdict=Verdict.of(i != 3)) for i in range(4)]
    rows.append(make_row([1], sample=4, verdict=Verdict.unknown("not asked")))
    found = made.compose(rows)
    values = [row.notes["g2rl/novelty"] for row in found[:4]]
    rewards = [outcome_of(row).reward for row in found]
    for value, right, reward in zip(values, (1, 1, 1, -1), rewards, strict=False):
        assert reward == pytest.approx((right * (1 + 0.5 * value) + 1) / 2)
    assert max(values) == 1.0 and min(values) == 0.0 and values[0] == values[1] and rewards[4] is None
    services.outcomes = [outcome_of(row) for row in found]
    assert made.after_update(0, services)["g2rl/novelty"] == pytest.approx(np.mean(values))
