"""The figure of a fusion, from the folders of its runs."""

import json
from pathlib import Path
from xml.etree import ElementTree

from student.orbit.plot import plot_modes

SVG = "{http://www.w3.org/2000/svg}"


def run(folder: Path, *evaluations: dict[str, tuple[float, float]]) -> Path:
    """A finished run whose evaluations are (tokens, accuracy) of each mode."""
    folder.mkdir()
    *until, after = [
        {
            name: value
            for mode, (tokens, accuracy) in one.items()
            for name, value in ((f"tokens/{mode}", tokens), (f"accuracy/{mode}", accuracy))
        }
        for one in evaluations
    ]
    (folder / "summary.json").write_text(json.dumps({"after": {"modes": after}}))
    lines = [json.dumps({f"mode/{name}": value for name, value in one.items()}) for one in until]
    (folder / "metrics.jsonl").write_text("\n".join(lines))
    return folder


def test_each_mode_has_its_line_and_its_teachers_point_in_one_colour(tmp_path: Path) -> None:
    both = {"long": (30.0, 0.5), "short<": (10.0, 0.25)}
    fusion = run(tmp_path / "fusion", both, {**both, "long": (28.0, 0.75)}, both)
    stage = run(tmp_path / "long", {"long": (30.0, 0.1)}, {"long": (29.0, 0.9)})
    plot_modes(["long", "short<"], {"long": stage}, fusion, tmp_path / "modes.svg")
    figure = ElementTree.parse(tmp_path / "modes.svg")
    drawn = figure.findall(f"{SVG}polyline")
    assert [len(line.attrib["points"].split()) for line in drawn] == [3, 1, 3]
    colours = [line.attrib["style"] for line in drawn]
    assert colours[0] == colours[1] != colours[2]
    texts = [text.text for text in figure.iter(f"{SVG}text")]
    assert texts[-3:] == [
        "long, from the merge to the student",
        "long, the mode's teacher",
        "short<, from the merge to the student (never trained)",
    ]
    assert "tokens of an answer" in texts


def test_a_fusion_that_is_not_finished_has_no_figure(tmp_path: Path) -> None:
    (tmp_path / "fusion").mkdir()
    plot_modes(["long"], {}, tmp_path / "fusion", tmp_path / "modes.svg")
    assert not (tmp_path / "modes.svg").exists()
