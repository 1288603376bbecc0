import re
from pathlib import Path
from types import SimpleNamespace

from prometheus_client import CollectorRegistry, generate_latest

from opd.fleet.client import TeacherFleet
from opd.fleet.metrics import COUNTERS, PREFIX, register_metrics
from opd.fleet.settings import CacheSettings
from opd.fleet.status.records import FleetCounters
from opd.wire.types import PayloadSpec


def scrape(registry: CollectorRegistry) -> str:
    return generate_latest(registry).decode()


def test_the_metrics_tell_what_happened(tiny: SimpleNamespace) -> None:
    server = tiny.serve()
    registry = CollectorRegistry()
    with TeacherFleet.connect(server.address, settings=tiny.settings) as fleet:
        register_metrics(fleet, registry)
        fleet.score("math", tiny.items(7), PayloadSpec.sampled())
        page = scrape(registry)
    assert f"{PREFIX}rows_answered_total 7.0" in page
    assert f'{PREFIX}replicas{{state="healthy",teacher="math"}} 1.0' in page
    assert f'{PREFIX}row_seconds_count{{teacher="math"}} 7.0' in page
    assert re.search(
        rf'{PREFIX}replica_tokens_per_second{{address="{re.escape(server.address)}",teacher="math"}} \d', page
    )
    assert f'{PREFIX}weights_info{{teacher="math",weights_hash="{tiny.model(1).weights_hash}"}} 1.0' in page


def test_hits_and_misses_of_the_score_cache_are_counted(tiny: SimpleNamespace, tmp_path: Path) -> None:
    settings = tiny.settings.model_copy(update={"cache": CacheSettings(folder=tmp_path)})
    registry = CollectorRegistry()
    for seen in (5, 3):
        with TeacherFleet.connect(tiny.serve().address, settings=settings) as fleet:
            fleet.score("math", tiny.items(seen), PayloadSpec.sampled())
            if seen == 3:
                register_metrics(fleet, registry)
                fleet.score("math", tiny.items(2, seed=9), PayloadSpec.sampled())
                page = scrape(registry)
    assert f"{PREFIX}cache_hits_total 3.0" in page and f"{PREFIX}cache_misses_total 2.0" in page


def test_a_closed_fleet_shows_nothing_and_breaks_no_scrape(tiny: SimpleNamespace) -> None:
    registry = CollectorRegistry()
    with TeacherFleet.connect(tiny.serve().address, settings=tiny.settings) as fleet:
        register_metrics(fleet, registry)
    assert "rows_answered" not in scrape(registry)


def test_every_counter_has_a_help_text() -> None:
    assert set(COUNTERS) == set(FleetCounters.__dataclass_fields__)
    assert all(text.endswith(".") for text in COUNTERS.values())


def test_names_follow_prometheus_rules(tiny: SimpleNamespace) -> None:
    registry = CollectorRegistry()
    with TeacherFleet.connect(tiny.serve().address, settings=tiny.settings) as fleet:
        register_metrics(fleet, registry)
        families = list(registry.collect())
    assert len(families) > 25
    for family in families:
        assert re.fullmatch(r"opd_student_fleet_[a-z_]+", family.name) and family.documentation
        for sample in family.samples:
            assert set(sample.labels) <= {"teacher", "address", "state", "weights_hash", "le"}
            if family.type == "counter":
                assert sample.name.endswith("_total")
