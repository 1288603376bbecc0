from types import SimpleNamespace
from typing import Any

import pytest

from opd.config import parse_settings
from opd.fleet.client import TeacherFleet
from student.job.preparation import connect
from student.settings.recipe import Recipe


def test_servers_can_tell_runs_and_ranks_apart_and_ranks_share_what_one_would_have_in_flight(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[str, int]] = []

    def note(endpoints: Any, *, settings: Any, client: str, poll: Any) -> Any:
        asked.append((client, settings.calls.in_flight_tokens))
        return SimpleNamespace(settle=lambda poll: True)

    monkeypatch.setattr(TeacherFleet, "connect", note)
    for run, environment in (
        ("runs/first", {}),
        ("runs/first", {"WORLD_SIZE": "4", "RANK": "3"}),
        ("runs/läuft für " + "x" * 90, {"WORLD_SIZE": "16", "RANK": "15"}),
    ):
        for name, value in environment.items():
            monkeypatch.setenv(name, value)
        recipe = {"run": run, "model": {"path": "m"}, "prompts": {"task": "addition"}}
        connect(parse_settings(Recipe, recipe | {"teachers": {"endpoints": ["localhost:1"]}}))
    (alone, whole), (fourth, quarter), (last, part) = asked
    assert (alone, fourth) == ("first", "first.3")
    assert last == ("l-uft-f-r-" + "x" * 90)[:61] + ".15" and len(last) == 64
    assert (whole, quarter, part) == (32_768, 8_192, 2_048)
