"""What every registered rollout engine owes; registering one makes it pass here."""

from collections.abc import Callable

import numpy as np
import pytest
import torch

from opd.errors import DataError
from opd.tasks.prompt import Prompt
from student.data.plan import PlannedRow, plan_step
from student.data.row import Row, RowKey
from student.rollout.engine import ROLLOUT_ENGINES, RolloutEngine

NAMES = [
    pytest.param(entry.name, marks=pytest.mark.engine if entry.name.startswith("vllm") else ())
    for entry in ROLLOUT_ENGINES
]
PROMPTS = [Prompt.make(text) for text in ("1+1=", "12+34=", "7+7=")]


@pytest.fixture(params=NAMES)
def engine(request: pytest.FixtureRequest, make_engine: Callable[..., RolloutEngine]) -> RolloutEngine:
    return make_engine(request.param)


def plan(samples: int = 2, temperature: float = 1.0) -> tuple[PlannedRow, ...]:
    return plan_step(1, PROMPTS, samples=samples, max_new_tokens=8, temperature=temperature).rows


def same(one: Row, other: Row) -> bool:
    return one.key == other.key and one.response_ids.tolist() == other.response_ids.tolist()


def test_a_row_depends_on_its_own_stream_and_not_on_its_company(engine: RolloutEngine) -> None:
    together = engine.sample(plan())
    assert [row.key for row in together] == [planned.key for planned in plan()]
    for planned, row in zip(plan(), together, strict=True):
        (alone,) = engine.sample([planned])
        assert same(alone, row)
        np.testing.assert_allclose(alone.behaviour_logp, row.behaviour_logp, atol=1e-4)
    assert len({tuple(row.response_ids) for row in together}) > len(PROMPTS)


def test_a_purpose_has_streams_of_its_own(engine: RolloutEngine) -> None:
    usual, other = engine.sample(plan()), engine.sample(plan(), purpose=("probe",))
    assert not all(same(one, two) for one, two in zip(usual, other, strict=True))


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_log_probs_are_those_of_the_model_at_the_temperature_of_the_row(
    engine: RolloutEngine, temperature: float
) -> None:
    for row in engine.sample(plan(1, temperature)):
        ids = torch.from_numpy(np.concatenate([row.prompt_ids, row.response_ids]).astype(np.int64))[None]
        with torch.no_grad():
            logits = engine.setup.model(ids).logits[0, :, : engine.setup.spec.valid_vocab].float() / temperature
        start = len(row.prompt_ids) - 1
        logp = logits.log_softmax(-1)[start : start + row.length].gather(-1, ids[0, start + 1 :, None])[:, 0]
        np.testing.assert_allclose(row.behaviour_logp, logp.numpy(), atol=1e-3)
        assert row.candidates is not None and row.candidates.shape == (row.length, 4)


def test_every_row_is_told_of_as_it_ends_and_carries_the_version(engine: RolloutEngine) -> None:
    told: list[Row] = []
    rows = engine.sample(plan(), on_row=told.append)
    assert {id(row) for row in told} == {id(row) for row in rows} and len(told) == len(rows)
    assert all(set(row.policy_version) == {3} for row in rows)
    assert engine.sample([]) == []


def test_an_error_of_the_callback_ends_the_sampling(engine: RolloutEngine) -> None:
    def stop(row: Row) -> None:
        raise InterruptedError

    with pytest.raises(InterruptedError):
        engine.sample(plan(), on_row=stop)
    assert len(engine.sample(plan())) == 6  # and it can sample again


def test_sync_makes_the_weights_count(engine: RolloutEngine) -> None:
    before = engine.sample(plan(1))
    with torch.no_grad():
        for parameter in engine.setup.model.parameters():
            parameter.mul_(0.5)
    engine.sync(engine.setup.model.named_parameters(), 4)
    after = engine.sample(plan(1))
    assert not all(np.allclose(a.behaviour_logp[:1], b.behaviour_logp[:1]) for a, b in zip(before, after, strict=True))
    assert set(after[0].policy_version) == {4}


def test_prefix_hint_stops_answer_and_tags_are_kept(engine: RolloutEngine) -> None:
    (whole,) = engine.sample([PlannedRow(RowKey(1, "u", 0), PROMPTS[1], 8, 0.0)])
    prefix = tuple(whole.response_ids[:2].tolist())
    hint = Prompt.make("the sum is 46. 12+34=")
    rest, hinted, given = engine.sample(
        [
            PlannedRow(RowKey(1, "u", 1), PROMPTS[1], 6, 0.0, prefix_ids=prefix, tags={"arm": "a"}),
            PlannedRow(RowKey(1, "u", 2), PROMPTS[1], 6, 1.0, behaviour_prompt=hint),
            PlannedRow(RowKey(1, "u", 3), PROMPTS[1], 6, 1.0, answer="46"),
        ]
    )
    assert rest.response_ids.tolist() == whole.response_ids.tolist() and not rest.loss_mask[:2].any()
    assert rest.tags == {"arm": "a"} and rest.on_policy
    assert hinted.origin == "hinted" and hinted.behaviour_prompt_ids is not None and not hinted.on_policy
    assert given.origin == "expert" and given.text == "46" and np.isfinite(given.behaviour_logp).all()
    assert given.candidates is not None and rest.candidates is not None


def test_a_response_ends_with_a_stop_id_or_at_its_limit(engine: RolloutEngine) -> None:
    (free,) = engine.sample([PlannedRow(RowKey(1, "u", 0), PROMPTS[1], 8, 1.0, stop_ids=frozenset())])
    ids = free.response_ids.tolist()
    stop, first = ids[2], ids.index(ids[2])
    key = RowKey(1, "u", 0)
    stopped, cut = (
        engine.sample([PlannedRow(key, PROMPTS[1], 8, 1.0, stop_ids=frozenset({stop}))])[0],
        engine.sample([PlannedRow(key, PROMPTS[1], 2, 1.0)])[0],
    )
    assert stopped.response_ids.tolist() == ids[: first + 1] and not stopped.truncated
    assert cut.response_ids.tolist() == ids[:2] and cut.truncated == (ids[1] not in engine.setup.spec.stop_ids)


def test_ids_to_keep_are_among_the_candidates_which_are_the_most_likely(
    make_engine: Callable[..., RolloutEngine], engine: RolloutEngine
) -> None:
    (usual,) = engine.sample(plan(1)[:1])
    name = engine.settings.name
    (kept,) = make_engine(name, keep_ids=(5,)).sample(plan(1)[:1])
    assert usual.candidates is not None and kept.candidates is not None
    assert (kept.candidates == 5).any(axis=1).all() and not (usual.candidates == 5).any(axis=1).all()
    assert all(set(new) - {5} <= set(old) for new, old in zip(kept.candidates, usual.candidates, strict=True))


def test_a_prompt_over_the_limit_is_an_error_that_names_the_setting(engine: RolloutEngine) -> None:
    with pytest.raises(DataError, match=r"rollout\.max_prompt_tokens"):
        engine.sample([PlannedRow(RowKey(1, "u", 0), Prompt.make("1" * 60), 4, 1.0)])
