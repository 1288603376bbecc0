import dataclasses

import numpy as np
import pytest

from opd.errors import UndecidedTeacherError
from opd.fleet.membership.agreement import AgreementReport, CheckRows, comparable_payload, distance, medoid
from opd.fleet.membership.identity import Identity, elect
from opd.fleet.membership.pool import Pool
from opd.wire.v1 import teacher_pb2 as pb

A = Identity("a" * 64, "tok", "chat", 100, "bf16", "head", 1.0, 0.0)
B = dataclasses.replace(A, weights_hash="b" * 64)


def info(**fields: object) -> pb.TeacherInfo:
    limits = pb.Limits(max_sequence_tokens=100)
    base = {"name": "t", "vocab_size": 128, "limits": limits, "tokenizer": pb.TokenizerInfo(size=100)}
    return pb.TeacherInfo(**{**base, **fields})  # type: ignore[arg-type]


def test_the_majority_is_elected() -> None:
    assert elect({"1": A, "2": B, "3": B}) == B


def test_a_tie_elects_nobody() -> None:
    assert elect({"1": A, "2": B}) is None


def test_the_error_of_a_tie_names_every_replica_and_its_side() -> None:
    def weights(digit: str) -> pb.TeacherInfo:
        return info(weights_hash=digit * 64)

    seen = {"h1:1": weights("a"), "h2:1": weights("b"), "h3:1": weights("a"), "h4:1": weights("b")}
    with pytest.raises(UndecidedTeacherError) as caught:
        Pool("t").choose(seen)
    said = str(caught.value)
    assert "h2:1, h4:1 have weights_hash" in said and "(alike: h1:1, h3:1)" in said


def test_a_pin_beats_the_majority_and_an_absent_pin_elects_nobody() -> None:
    replicas = {"1": A, "2": B, "3": B}
    assert elect(replicas, "a" * 64) == A
    assert elect(replicas, "c" * 64) is None


@pytest.mark.parametrize("field", [f.name for f in dataclasses.fields(Identity)])
def test_every_field_of_the_identity_counts_and_is_named(field: str) -> None:
    other = dataclasses.replace(A, **{field: 7 if isinstance(getattr(A, field), (int, float)) else "other"})
    assert field in other.differences(A)
    assert A.differences(A) == ""


def test_check_rows_are_drawn_anew_within_bounds_and_reproducible_by_their_seed() -> None:
    rows, same, secret = CheckRows(32, seed=1), CheckRows(32, seed=1), CheckRows(32)
    first, second = rows.draw(info()), rows.draw(info())
    assert first.token_ids.max() < 100 and first.response_length == 32
    assert not np.array_equal(first.token_ids, second.token_ids)
    assert np.array_equal(first.token_ids, same.draw(info()).token_ids)
    assert not np.array_equal(secret.draw(info()).token_ids, CheckRows(32).draw(info()).token_ids)


@pytest.mark.parametrize("most", [2, 3, 9, 40])
def test_a_check_row_fits_a_short_context(most: int) -> None:
    item = CheckRows(32).draw(info(limits=pb.Limits(max_sequence_tokens=most)))
    assert len(item.token_ids) <= most and item.prompt_length >= 1 and item.response_length >= 1


def test_a_check_asks_for_something_comparable_in_nats() -> None:
    kinds = pb.PAYLOAD_KIND_SAMPLED, pb.PAYLOAD_KIND_TOPK, pb.PAYLOAD_KIND_HIDDEN
    specs = [comparable_payload(info(payloads=[kind])) for kind in kinds]
    assert specs[0] is not None and specs[0].kind.value == "sampled"
    assert specs[1] is not None and specs[1].kind.value == "topk"
    assert specs[2] is None


def test_distance_is_the_largest_absolute_difference_and_infinite_for_nonsense() -> None:
    one = np.array([-1.0, -2.0, -np.inf], np.float32)
    assert distance(one, one) == 0.0
    assert distance(one, np.array([-1.0, -2.5, -np.inf], np.float32)) == 0.5
    assert distance(one, np.array([-1.0, -2.0, -3.0], np.float32)) == np.inf
    assert distance(one, one[:2]) == np.inf
    assert distance(one, np.array([np.nan, -2.0, -np.inf], np.float32)) == np.inf


def test_one_odd_replica_cannot_become_the_reference() -> None:
    odd, good = np.full(4, -9.0, np.float32), np.full(4, -1.0, np.float32)
    assert medoid([odd, good, good + 0.001]) in (1, 2)
    assert medoid([odd]) == 0


@pytest.mark.parametrize("seed", range(20))
def test_the_medoid_is_that_of_the_definition_whatever_the_answers_hold(seed: int) -> None:
    rng = np.random.default_rng(seed)
    vectors = [rng.normal(size=rng.choice([0, 3, 3, 3, 4])).astype(np.float32) for _ in range(rng.integers(1, 9))]
    for vector in vectors:
        vector[rng.random(len(vector)) < 0.2] = rng.choice([np.nan, np.inf, -np.inf])
    medians = [
        np.median([distance(mine, other) for j, other in enumerate(vectors) if j != i] or [0.0])
        for i, mine in enumerate(vectors)
    ]
    assert medoid(vectors) == int(np.argmin(medians))


def test_a_report_agrees_only_when_everybody_answered_within_tolerance() -> None:
    assert AgreementReport("t", 0.05, {"a": 0.0, "b": 0.05}, {}).agrees
    assert not AgreementReport("t", 0.05, {"a": 0.0, "b": 0.06}, {}).agrees
    assert not AgreementReport("t", 0.05, {"a": 0.0}, {"b": "gone"}).agrees
    assert "0.06 nats at b" in AgreementReport("t", 0.05, {"a": 0.0, "b": 0.06}, {}).sentence()
