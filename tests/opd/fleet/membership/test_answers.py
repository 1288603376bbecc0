"""The distance of two answers sees another model in every payload and weighs an id by its probability."""

from types import SimpleNamespace

import numpy as np
import pytest

from opd.fleet.membership.answers import answer_distance
from opd.wire.tensors import bf16_bits
from opd.wire.types import Head, PayloadSpec, ScoreItem, Scores

SPECS = [
    PayloadSpec.sampled(),
    PayloadSpec.topk(4, "f32"),
    PayloadSpec.gather(3, "f32"),
    PayloadSpec.hidden("f32"),
    PayloadSpec.full(),
]


def head_of(model: SimpleNamespace) -> Head:
    return Head(model.head, None, "f32", 1.0, 0.0, "")


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.kind.value)
def test_equal_models_are_zero_apart_and_other_models_far(tiny: SimpleNamespace, spec: PayloadSpec) -> None:
    (item,) = tiny.items(1, seed=3, gather=3 if spec.kind.value == "gather" else 0)
    model, same, other = tiny.model(1), tiny.model(1), tiny.model(2)
    head = head_of(model)
    answer = model.score(item, spec, 1.0)
    assert answer_distance(item, spec, answer, same.score(item, spec, 1.0), head) == 0.0
    gap = answer_distance(item, spec, answer, other.score(item, spec, 1.0), head)
    assert gap > 0.5
    assert answer_distance(item, spec, other.score(item, spec, 1.0), answer, head) == pytest.approx(gap)


@pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.kind.value)
def test_a_model_that_is_a_little_off_is_a_little_apart(tiny: SimpleNamespace, spec: PayloadSpec) -> None:
    (item,) = tiny.items(1, seed=3, gather=3 if spec.kind.value == "gather" else 0)
    model, near = tiny.model(1), tiny.model(1)
    near.states = near.states + np.float32(1e-3)
    gap = answer_distance(item, spec, model.score(item, spec, 1.0), near.score(item, spec, 1.0), head_of(model))
    assert 1e-5 < gap < 0.05


def answers(values: list[float], ids: list[int], tail: float, sampled: float = -1.0) -> Scores:
    return Scores(
        sampled=np.array([sampled], np.float32),
        values=np.array([values], np.float32),
        ids=np.array([ids], np.uint32),
        log_tail=np.array([tail], np.float32),
    )


ITEM = ScoreItem(np.array([1, 2], np.uint32), 1)


def test_the_order_of_a_tie_does_not_matter_in_a_top_k_list() -> None:
    one = answers([-0.7, -2.0, -2.0], [9, 3, 8], -1.6)
    other = answers([-0.7, -2.0, -2.0], [9, 8, 3], -1.6)
    assert answer_distance(ITEM, PayloadSpec.topk(3), one, other) == 0.0


def test_the_same_values_at_other_ids_are_another_distribution() -> None:
    one = answers([-0.1, -3.0], [5, 3], -3.0)
    other = answers([-0.1, -3.0], [6, 3], -3.0)
    assert answer_distance(ITEM, PayloadSpec.topk(2), one, other) > 2.0


def test_unlikely_ids_count_as_little_as_they_matter() -> None:
    one = answers([-0.01, -25.0], [5, 3], -4.6)
    other = answers([-0.01, -28.0], [5, 3], -4.6)
    assert answer_distance(ITEM, PayloadSpec.gather(2), one, other) < 1e-9
    never = answers([-0.01, -np.inf], [5, 3], -4.6)
    assert answer_distance(ITEM, PayloadSpec.gather(2), one, never) < 1e-6


def test_a_tail_that_holds_other_mass_is_seen() -> None:
    one, other = answers([-1.0], [5], -0.5), answers([-1.0], [5], -1.5)
    assert answer_distance(ITEM, PayloadSpec.gather(1), one, other) == pytest.approx(np.exp(-0.5), rel=1e-5)


def test_hidden_states_in_bfloat16_with_scale_and_cap_are_compared_as_logits(tiny: SimpleNamespace) -> None:
    model = tiny.model(1)
    (item,) = tiny.items(1, seed=3)
    hidden = model.score(item, PayloadSpec.hidden("f32"), 1.0).hidden
    spec = PayloadSpec.hidden("bf16")
    one, other = (Scores(hidden=bf16_bits(h.astype(np.float32))) for h in (hidden, hidden * 1.5))
    capped = Head(bf16_bits(model.head), None, "bf16", 0.5, 3.0, "")
    gap = answer_distance(item, spec, one, other, capped)
    assert 0.1 < gap <= 2 * 2 * 3.0
    with pytest.raises(ValueError, match="head"):
        answer_distance(item, spec, one, other)


def test_answers_of_another_form_are_infinitely_far() -> None:
    short, long = (Scores(logits=np.zeros((length, 4), np.float32)) for length in (1, 2))
    assert answer_distance(ITEM, PayloadSpec.full(), short, long) == np.inf
    assert answer_distance(ITEM, PayloadSpec.full(), short, Scores()) == np.inf
    assert answer_distance(ITEM, PayloadSpec.sampled(), Scores(), answers([-1.0], [5], -0.5)) == np.inf
    assert (
        answer_distance(ITEM, PayloadSpec.topk(1), answers([-1.0], [5], -0.5), Scores(sampled=np.zeros(1, np.float32)))
        == np.inf
    )
