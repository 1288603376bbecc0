"""Rows of which parts are asked for: servers that know spans, servers that do not, pools of both, and records."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

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
def test_a_server_without_spans_is_asked_for_everything_and_gives_the_same(
    tiny: SimpleNamespace, spec: PayloadSpec
) -> None:
    new, old = tiny.serve(), tiny.serve()
    new.spans = True
    items, found = partial(tiny, spec), []
    for server in (new, old):
        with TeacherFleet.connect(server.address, settings=tiny.settings) as fleet:
            found.append(fleet.score("math", items, spec))
    assert asked_in_parts(new) and not asked_in_parts(old)
    assert raw(found[0]) == raw(found[1])


def test_a_pool_with_an_older_server_asks_all_its_servers_for_everything(tiny: SimpleNamespace) -> None:
    new, old = tiny.serve(), tiny.serve()
    new.spans = True
    spec = PayloadSpec.topk(4)
    items = partial(tiny, spec, 12)
    with TeacherFleet.connect([new.address, old.address], settings=tiny.settings) as fleet:
        assert fleet.settle(60)
        assert not fleet.describe("math").supports_spans
        found = fleet.score("math", items, spec)
    assert not asked_in_parts(new) and not asked_in_parts(old)
    assert [len(scores.log_tail) for scores in found] == [item.scored_length for item in items]


def assert_known(
    tiny: SimpleNamespace, server: Any, folder: Path, items: list[ScoreItem], spec: PayloadSpec, known: list[Scores]
) -> None:
    """A live fleet with that cache asks its server for none of the rows."""
    sent = server.scored_rows()
    settings = tiny.settings.model_copy(update={"cache": CacheSettings(folder=folder)})
    with TeacherFleet.connect(server.address, settings=settings) as fleet:
        assert raw(fleet.score("math", items, spec)) == raw(known)
    assert server.scored_rows() == sent


def test_a_record_of_stop_tokens_at_every_position_answers_for_parts(tiny: SimpleNamespace, tmp_path: Path) -> None:
    server = tiny.serve()
    server.spans = True
    spec, stops = PayloadSpec.gather(3, "f32"), np.array([7, 5, 9], np.uint32)
    wholes = [replace(item, gather_ids=np.tile(stops, (item.response_length, 1))) for item in tiny.items(6, gather=3)]
    items = [replace(item, spans=spans_of(np.arange(item.response_length) % 3 == 0)) for item in wholes]
    items = [replace(item, gather_ids=np.tile(stops, (item.scored_length, 1))) for item in items]
    settings = tiny.settings.model_copy(update={"cache": CacheSettings(folder=tmp_path)})
    with TeacherFleet.connect(server.address, settings=settings) as fleet:
        found = fleet.score("math", wholes, spec)
    parts = [cut(scores, item) for scores, item in zip(found, items, strict=True)]
    with TeacherFleet.connect(f"store:{tmp_path}") as fleet:
        assert raw(fleet.score("math", items, spec)) == raw(parts)
    assert_known(tiny, server, tmp_path, items, spec, parts)


@each
def test_a_record_of_parts_or_of_wholes_answers_for_parts(
    tiny: SimpleNamespace, tmp_path: Path, spec: PayloadSpec
) -> None:
    server = tiny.serve()
    server.spans = True
    items, live = partial(tiny, spec), []
    for name, asked in (("parts", items), ("wholes", [whole(item) for item in items])):
        settings = tiny.settings.model_copy(update={"cache": CacheSettings(folder=tmp_path / name)})
        with TeacherFleet.connect(server.address, settings=settings) as fleet:
            live.append(fleet.score("math", asked, spec))
    sent = server.scored_rows()
    assert_known(tiny, server, tmp_path / "wholes", items, spec, live[0])
    for name in ("parts", "wholes"):
        with TeacherFleet.connect(f"store:{tmp_path / name}") as fleet:
            assert raw(fleet.score("math", items, spec)) == raw(live[0])
    assert server.scored_rows() == sent
