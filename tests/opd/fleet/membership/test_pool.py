import pytest

from opd.fleet.membership.pool import Pool
from opd.wire.v1 import teacher_pb2 as pb


def described(weights: str, longest: int, *payloads: pb.PayloadKind) -> pb.TeacherInfo:
    limits = pb.Limits(max_sequence_tokens=longest, max_k=64)
    return pb.TeacherInfo(name="t", weights_hash=weights, vocab_size=100, limits=limits, payloads=payloads)


def join(pool: Pool, info: pb.TeacherInfo) -> None:
    pool.choose({"a:1": info})
    pool.join(info)


def test_a_pool_can_do_what_all_its_replicas_can() -> None:
    pool = Pool("t")
    join(pool, described("w", 512, pb.PAYLOAD_KIND_SAMPLED, pb.PAYLOAD_KIND_TOPK))
    join(pool, described("w", 4096, pb.PAYLOAD_KIND_SAMPLED))
    assert pool.info is not None and pool.info.limits.max_sequence_tokens == 512
    assert list(pool.info.payloads) == [pb.PAYLOAD_KIND_SAMPLED]


@pytest.mark.parametrize("ability", ["deterministic", "supports_spans", "supports_temperature"])
@pytest.mark.parametrize("able", [(True, True), (True, False), (False, True)])
def test_a_pool_has_an_ability_where_all_its_replicas_have_it(ability: str, able: tuple[bool, bool]) -> None:
    pool = Pool("t")
    for one in able:
        info = described("w", 512)
        setattr(info, ability, one)
        join(pool, info)
    assert pool.info is not None and getattr(pool.info, ability) is all(able)


def test_what_replicas_could_before_an_adoption_bounds_none_after_it() -> None:
    pool = Pool("t")
    join(pool, described("old", 512))
    pool.adopt()
    join(pool, described("new", 4096, pb.PAYLOAD_KIND_SAMPLED))
    assert pool.info is not None and pool.info.limits.max_sequence_tokens == 4096
    assert list(pool.info.payloads) == [pb.PAYLOAD_KIND_SAMPLED]
    join(pool, described("new", 2048, pb.PAYLOAD_KIND_SAMPLED))
    assert pool.info.limits.max_sequence_tokens == 2048
