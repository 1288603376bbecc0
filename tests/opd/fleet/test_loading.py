"""A server that answers before its model is loaded is waited for, as one that does not answer yet, and said to load."""

import logging
from types import SimpleNamespace

import pytest
from fleet_cases import SPEC, reason_of, state_of, wait_for_all

from opd.errors import TeacherNotFoundError, UnavailableError
from opd.fleet.client import TeacherFleet
from opd.fleet.membership import members


@pytest.mark.parametrize("listed", [True, False], ids=["loading", "nothing listed yet"])
def test_a_restarted_server_that_loads_its_only_teacher_is_not_retired(tiny: SimpleNamespace, listed: bool) -> None:
    one = tiny.serve()
    with TeacherFleet.connect(one.address, settings=tiny.settings) as fleet:
        wait_for_all(fleet, one)
        math, one.models = one.models, {}
        one.loading = ["math"] if listed else []
        one.instance = "restarted"
        tiny.wait_until(lambda: reason_of(fleet, one.address) == "it is still loading")
        assert state_of(fleet, one.address) == "unverified"
        waiting = fleet.submit_many("math", tiny.items(2), SPEC)
        tiny.wait_until(fleet.outages)
        assert f"{one.address} is unverified, it is still loading" in fleet.outages()[0].sentence()
        one.models, one.loading = math, []
        assert len(fleet.wait(waiting)) == 2


@pytest.mark.parametrize("how", ["another teacher", "failed", "unloaded"])
def test_what_will_not_come_back_is_retired(tiny: SimpleNamespace, how: str) -> None:
    one = tiny.serve()
    with TeacherFleet.connect(one.address, settings=tiny.settings) as fleet:
        wait_for_all(fleet, one)
        said = "no longer served here"
        if how == "unloaded":
            one.models = {"code": tiny.model(2)}
            fleet.adopt("math")  # asks for a description
        else:
            # First it looks as if it were loading.
            one.models, one.instance = {}, "restarted"
            tiny.wait_until(lambda: reason_of(fleet, one.address) == "it is still loading")
        if how == "another teacher":
            one.models = {"code": tiny.model(2)}
        if how == "failed":
            one.failed, said = ["math"], "it has failed, see the log of its server"
        tiny.wait_until(lambda: said in [r.reason for r in fleet.status().replicas])
        assert ("retired", said) in [(r.state, r.reason) for r in fleet.status().replicas]


def test_connecting_waits_for_a_model_that_is_being_loaded_and_says_so(
    tiny: SimpleNamespace, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(members, "_SILENT_SECONDS", 0.0)
    one = tiny.serve()
    math, one.models, one.loading = one.models, {}, ["math"]

    def loaded() -> None:
        if "still loading" in caplog.text:
            one.models, one.loading = math, []

    caplog.set_level(logging.WARNING, "opd.fleet")
    with TeacherFleet.connect(one.address, settings=tiny.settings, poll=loaded) as fleet:
        assert len(fleet.score("math", tiny.items(2), SPEC)) == 2
    assert f"waiting for {one.address} (still loading math), up to" in caplog.text


@pytest.mark.parametrize("named", [True, False])
def test_a_model_that_takes_longer_than_connecting_may_is_named(tiny: SimpleNamespace, named: bool) -> None:
    one = tiny.serve()
    one.models, one.loading = {}, ["math"]
    settings = tiny.settings.model_copy(update={"connect_seconds": 0.1})
    with pytest.raises(UnavailableError, match=rf"{one.address} .*'math' after 0\.1 s; .*connect_seconds"):
        TeacherFleet.connect({"math": [one.address]} if named else one.address, settings=settings)
    # One that is not being loaded there is missing as before.
    with pytest.raises(TeacherNotFoundError, match="'poetry' is not served"):
        TeacherFleet.connect({"poetry": [one.address]}, settings=settings)
