from pathlib import Path
from types import SimpleNamespace

import pytest

from opd.errors import ConfigError
from opd.fleet.client import TeacherFleet
from opd.fleet.membership.discovery import Source, merge, parse_endpoints, resolve_all, split_address
from opd.fleet.settings import HedgeSettings
from opd.wire.types import PayloadSpec


async def places(source: Source) -> dict[str, frozenset[str] | None]:
    return (await resolve_all([source], {}))[source]


async def test_a_fixed_address_is_itself() -> None:
    assert await places(Source("h:1")) == {"h:1": None}


async def test_a_file_lists_addresses_with_optional_teachers(tmp_path: Path) -> None:
    path = tmp_path / "servers"
    path.write_text("# the fleet\na:1\n\nb:2 math code # two\n")
    assert await places(Source(f"file:{path}")) == {"a:1": None, "b:2": frozenset({"math", "code"})}
    limited = Source(f"file:{path}", frozenset({"math"}))
    assert await places(limited) == {"a:1": frozenset({"math"}), "b:2": frozenset({"math"})}


async def test_a_line_may_name_any_number_of_teachers(tmp_path: Path) -> None:
    path, names = tmp_path / "servers", [f"teacher{number}" for number in range(100)]
    path.write_text(f"a:1 {' '.join(names)}\n")
    assert await places(Source(f"file:{path}")) == {"a:1": frozenset(names)}


async def test_an_address_may_stand_on_several_lines(tmp_path: Path) -> None:
    path = tmp_path / "servers"
    path.write_text("a:1 math\na:1 code\nb:2 math\nb:2\n")
    assert await places(Source(f"file:{path}")) == {"a:1": frozenset({"math", "code"}), "b:2": None}


async def test_a_file_that_vanishes_or_breaks_keeps_what_was_known(tmp_path: Path) -> None:
    path = tmp_path / "servers"
    path.write_text("a:1\n")
    source = Source(f"file:{path}")
    known = await resolve_all([source], {})
    path.write_text("not an address\n")
    assert await resolve_all([source], known) == known
    path.unlink()
    assert await resolve_all([source], known) == known


async def test_a_broken_file_at_the_start_names_its_line(tmp_path: Path) -> None:
    path = tmp_path / "servers"
    path.write_text("a:1\nnonsense\n")
    with pytest.raises(ConfigError, match="line 2"):
        await places(Source(f"file:{path}"))


async def test_a_file_that_is_not_text_is_named(tmp_path: Path) -> None:
    (tmp_path / "list").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ConfigError, match="not UTF-8 text"):
        await resolve_all([Source(f"file:{tmp_path / 'list'}")], {})


async def test_dns_gives_every_address_of_the_name() -> None:
    assert "127.0.0.1:7070" in await places(Source("dns:localhost:7070"))


async def test_an_unknown_name_is_no_server_not_an_error() -> None:
    assert await places(Source("dns:no-such-host.invalid:7070")) == {}


def test_a_mapping_becomes_sources_limited_to_its_teachers() -> None:
    sources = parse_endpoints({"math": ["a:1", "b:1"], "code": ["b:1"]})
    assert sources == [Source("a:1", frozenset({"math"})), Source("b:1", frozenset({"math", "code"}))]


def test_a_mapping_from_addresses_to_teachers_is_told_its_direction() -> None:
    with pytest.raises(ConfigError, match="'math' of teacher 'dns:a:1'"):
        parse_endpoints({"dns:a:1": ["math"]})


def test_one_string_may_hold_several_and_duplicates_count_once() -> None:
    assert [source.text for source in parse_endpoints("a:1, b:2,a:1")] == ["a:1", "b:2"]


def test_sources_merge_to_what_either_allows() -> None:
    one, two, three = Source("x"), Source("y"), Source("z")
    found = {
        one: {"a:1": frozenset({"m"})},
        two: {"a:1": frozenset({"n"}), "b:1": None},
        three: {"b:1": frozenset({"m"})},
    }
    assert merge(found) == {"a:1": frozenset({"m", "n"}), "b:1": None}


def test_addresses_may_be_ipv6() -> None:
    assert split_address("[::1]:7070") == ("::1", 7070)


@pytest.mark.parametrize("text", ["host", "host:", ":1", "host:x", "host:0", "host:65536"])
def test_what_is_no_address_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="host:port"):
        split_address(text)


def test_replicas_join_and_leave_a_running_fleet_by_the_file(tiny: SimpleNamespace, tmp_path: Path) -> None:
    one, two = tiny.serve(), tiny.serve()
    path = tmp_path / "servers"
    path.write_text(one.address + "\n")
    items = tiny.items(30)
    with TeacherFleet.connect(f"file:{path}", settings=tiny.settings) as fleet:
        fleet.score("math", items, PayloadSpec.sampled())
        assert two.scored_rows() == 0
        path.write_text(two.address + "\n")
        tiny.wait_until(lambda: [r.address for r in fleet.status().replicas if r.state == "healthy"] == [two.address])
        before = one.scored_rows()
        fleet.score("math", items, PayloadSpec.sampled())
        assert two.scored_rows() == 30 and one.scored_rows() == before
        path.write_text(f"{one.address}\n{two.address}\n")
        tiny.wait_until(lambda: sum(r.state == "healthy" for r in fleet.status().replicas) == 2)


def test_a_server_that_leaves_the_list_finishes_what_it_has(tiny: SimpleNamespace, tmp_path: Path) -> None:
    one, two = tiny.serve(), tiny.serve()
    one.delay = 0.5
    path = tmp_path / "servers"
    path.write_text(one.address + "\n")
    settings = tiny.settings.model_copy(update={"hedge": HedgeSettings(enabled=False)})
    with TeacherFleet.connect(f"file:{path}", settings=settings) as fleet:
        future = fleet.submit("math", tiny.items(1)[0], PayloadSpec.sampled())
        tiny.wait_until(lambda: len(one.requests) == 1)
        path.write_text(two.address + "\n")
        future.result(timeout=120)
        assert two.scored_rows() == 0
        tiny.wait_until(lambda: [r.address for r in fleet.status().replicas] == [two.address])


def test_a_server_that_is_listed_again_goes_on_with_what_it_has(tiny: SimpleNamespace, tmp_path: Path) -> None:
    server = tiny.serve()
    server.wedged = True
    path = tmp_path / "servers"
    path.write_text(server.address + "\n")

    def state() -> str:
        return fleet.status().replicas[0].state

    with TeacherFleet.connect(f"file:{path}", settings=tiny.settings) as fleet:
        future = fleet.submit("math", tiny.items(1)[0], PayloadSpec.sampled())
        tiny.wait_until(lambda: len(server.requests) == 1)
        path.write_text("")  # as who writes it anew leaves it for a moment
        tiny.wait_until(lambda: state() == "retired")
        path.write_text(server.address + "\n")
        tiny.wait_until(lambda: state() == "healthy")
        server.wedged = False
        future.result(timeout=120)
        assert len(server.requests) == 1 and fleet.status().counters.calls_failed == 0
