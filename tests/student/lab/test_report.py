"""What the report shows besides numbers of arms."""

from typing import Any

from student.lab.experiment import ROUTED
from student.lab.report import _modes


def level(**figures: float) -> dict[str, Any]:
    return {"accuracy": 0.5, "modes": {name.replace("_", "/"): value for name, value in figures.items()}}


def test_modes_have_a_row_for_every_model_and_arm_with_their_means() -> None:
    figures = {"tokens_long": 14.0, "accuracy_long": 0.9, "hypervolume": 0.5}
    data = {
        "models": {ROUTED: {"w0-s10": level(**figures)}, "base": {}},
        "arms": [
            {
                "title": "ORBIT",
                "seeds": [{"level": level(**figures)}, {"level": level(**figures | {"tokens_long": 16.0})}],
            }
        ],
    }
    teachers, orbit = _modes(data)
    assert teachers["title"] == "each prompt's own teacher" and teachers["monotone"] == ""
    assert orbit == {"title": "ORBIT", "modes": "long 0.900 in 15.0", "monotone": "", "hypervolume": "0.500"}
    assert _modes({"models": {"base": {"w0-s10": {"accuracy": 0.5}}}, "arms": []}) == []
