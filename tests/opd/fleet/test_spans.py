"""Rows of which parts are asked for: servers that know spans, servers that do not, pools of both, and records."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from opd.errors import DataError
from opd.fleet.client import TeacherFleet
from opd.fleet.settings import CacheSettings
from opd.wire.spans import cut, spans_of, whole
from opd.wire.types import PayloadSpec, ScoreItem, Scores

SPECS = [PayloadSpec.sampled(), PayloadSpec.topk(4), PayloadSpec.gather(3, "f32"), PayloadSpec.hidden("f32")]
each = pytest.mark.parametrize("spec", SPECS, ids=lambda spec: spec.kind.value)


def partial(tiny: SimpleNamespace, spec: PayloadSpec, count: int = 6) -> list[ScoreItem]:
    """Rows asked for at every third token."""
    wholes = tiny.items(count, gather=spec.k if spec.kind.value == "gather" else 0)
    items = [replace(item, spans=spans_of(np.arange(item.response_length) % 3 == 0)) for item in wholes]
    return [i if i.gather_ids is None else replace(i, gather_ids=i.pick(i.gather_ids)) for i in items]


def raw(scores: Sequence[Scores]) -> list[list[bytes]]:
    names = ("sampled", "values", "ids", "log_tail", "hidden")
    return [[b"" if (a := getattr(s, n)) is None else a.tobytes() for n in names] for s in scores]


def asked_in_parts(server: Any) -> bool:
    return any(sequence.spans for request in server.requests for sequence in request.sequences)


@each
def test_a_part_has_the_numbers_that_the_whole_has_there_and_fewer_bytes(
    tiny: SimpleNamespace, spec: PayloadSpec
) -> None:
    server = tiny.serve()
    server.spans = True
    items = partial(tiny, spec)
    with TeacherFleet.connect(server.address, settings=tiny.settings) as fleet:
        parts = fleet.score("math", items, spec)
        wholes = fleet.score("math", [whole(item) for item in items], spec)
    assert asked_in_parts(server)
    assert raw(parts) == raw([cut(scores, item) for scores, item in zip(wholes, items, strict=True)])
    assert sum(s.wire_bytes for s in parts) < 0.6 * sum(s.wire_bytes for s in wholes)


@each
def test_a_server_whose_engine_takes_no_spans_is_asked_for_everything_and_gives_the_same(
    tiny: SimpleNamespace, spec: PayloadSpec
) -> None:
    able, unable = tiny.serve(), tiny.serve()
    able.spans = True
    items, found = partial(tiny, spec), []
    for server in (able, unable):
        with TeacherFleet.connect(server.address, settings=tiny.settings) as fleet:
            found.append(fleet.score("math", items, spec))
    assert asked_in_parts(able) and not asked_in_parts(unable)
    assert raw(found[0]) == raw(found[1])


def test_a_pool_with_a_server_that_takes_no_spans_asks_all_its_servers_for_everything(tiny: SimpleNamespace) -> None:
    able, unable = tiny.serve(), tiny.serve()
    able.spans = True
    spec = PayloadSpec.topk(4)
    items = partial(tiny, spec, 12)
    with TeacherFleet.connect([able.address, unable.address], settings=tiny.settings) as fleet:
        assert fleet.settle(60)
        assert not fleet.describe("math").supports_spans
        found = fleet.score("math", items, spec)
    assert not asked_in_parts(able) and not asked_in_parts(unable)
    assert [len(scores.log_tail) for scores in found] == [item.scored_length for item in items]


@each
def test_a_record_of_parts_answers_for_these_parts_alone(
    tiny: SimpleNamespace, tmp_path: Path, spec: PayloadSpec
) -> None:
    server = tiny.serve()
    server.spans = True
    items = partial(tiny, spec)
    settings = tiny.settings.model_copy(update={"cache": CacheSettings(folder=tmp_path)})
    with TeacherFleet.connect(server.address, settings=settings) as fleet:
        live = fleet.score("math", items, spec)
    sent = server.scored_rows()
    with TeacherFleet.connect(server.address, settings=settings) as fleet:
        assert raw(fleet.score("math", items, spec)) == raw(live)
    with TeacherFleet.connect(f"store:{tmp_path}") as fleet:
        assert raw(fleet.score("math", items, spec)) == raw(live)
        with pytest.raises(DataError, match=r"at \d+ of \d+ response tokens"):
            fleet.score("math", [replace(items[0], spans=((0, items[0].scored_length),))], spec)
    assert server.scored_rows() == sent
