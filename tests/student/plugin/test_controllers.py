"""What every method is given, however it is written."""

from typing import Any

from opd.config import parse_settings
from student.data.row import Row
from student.plugin.controllers import Controller, ControllerSettings, Services, begin


class Counting(Controller):
    """A method with a `start` of its own that leaves its base's alone."""

    def start(self, services: Services) -> None:
        self.rows = 0

    def compose(self, rows: list[Row]) -> list[Row]:
        self.rows += sum(self.services.gather(len(rows)))
        return rows


class Alone:
    """The one service that is asked for."""

    def gather(self, value: Any) -> list[Any]:
        return [value]


def test_a_method_whose_start_leaves_its_bases_alone_has_services_all_the_same() -> None:
    made = Counting(parse_settings(ControllerSettings, {"name": "counting"}))
    begin(made, Alone())  # type: ignore[arg-type]
    made.compose([])
    assert made.rows == 0 and made.services.gather(1) == [1]
