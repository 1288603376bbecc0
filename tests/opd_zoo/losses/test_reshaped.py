"""Next-token prediction reshaped: the weight by probability, the penalties by rank, and easy tokens first."""

from typing import Any

import numpy as np
import pytest
import torch

from opd.errors import ConfigError
from student.plugin.terms import build_terms


def built(**entry: Any) -> Any:
    (term,) = build_terms([{"rows": "all", **entry}])
    return term


def test_precision_weighs_by_probability_and_penalises_by_rank(toy: Any) -> None:
    made = toy(masked=False)
    term = built(name="precision", beta=0.5, k=2, top=0.3, tail=0.7)
    batch = made.batch()
    logp = made.logp(made.hidden, made.head)
    p = logp.exp()
    given, ids = batch.token_ids, batch.candidates[:, :2]
    p_given = p.gather(-1, given[:, None])[:, 0]
    kept = torch.where(ids != given[:, None], p.gather(-1, ids), torch.zeros(()).to(p))
    tail = 1.0 - p_given - kept.sum(-1)
    expected = -p_given.detach().sqrt() * p_given.log() + 0.3 * kept.sum(-1) + 0.7 * tail
    output = term.token_losses(batch)
    torch.testing.assert_close(output.loss.double(), expected.double(), rtol=1e-5, atol=1e-6)
    assert float(output.metrics["tail_mass"][0]) == pytest.approx(float(tail.sum()), rel=1e-4)


def test_neutral_settings_are_cross_entropy_and_refused(toy: Any) -> None:
    term = built(name="precision", beta=0.0, top=0.0, tail=0.0)
    made = toy(masked=False)
    torch.testing.assert_close(term.token_losses(made.batch()).loss, -made.behaviour)
    with pytest.raises(ConfigError, match="is cross-entropy"):
        term.check(None, [term])


def test_the_chosen_tokens_grow_in_entropy_with_the_schedule(toy: Any) -> None:
    made = toy(masked=False)
    term, entropies, shares = built(name="rmt", first=0.34, steps=10), [], []
    for step in (0, 5, 10):
        for row in made.rows:
            object.__setattr__(row.key, "step", step)
        output = term.token_losses(made.batch())
        chosen, count = output.metrics["selected_entropy"]
        entropies.append(float(chosen) / float(count))
        shares.append(float(output.metrics["selected_share"][0]) / float(output.metrics["selected_share"][1]))
        assert int((output.loss != 0).sum()) == int(count)
    assert entropies == sorted(entropies) and entropies[0] < entropies[-1] and shares == sorted(shares)
    assert shares[-1] == 1.0 and [term.share(step) for step in (0, 5, 10, 99)] == pytest.approx([0.34, 0.67, 1, 1])
    torch.testing.assert_close(output.loss, -made.behaviour)  # in the end all tokens, each with weight 1
    assert np.isfinite(entropies).all()
