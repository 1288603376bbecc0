"""Files of expected figures: bands, published values, what is unknown, and mistakes in them."""

import json
from pathlib import Path
from typing import Any

import pytest

from opd.errors import ConfigError, OutputError
from student.report.expected import Expectation, against_expected, read_expected, write_expected


def file(folder: Path, **bands: Any) -> Path:
    path = folder / "expected.json"
    path.write_text(json.dumps({"about": "a test", "expected": bands}))
    return path


FOUND = {"tokens_per_second": 100.0, "payload_bytes_per_token": 192.0, "step_seconds": 3.0, "eval/accuracy@5": 0.6}


def verdicts(folder: Path, found: dict[str, float], **bands: Any) -> list[str]:
    return [line.verdict for line in against_expected(found, file(folder, **bands))]


def test_bands_are_judged_and_what_is_unknown_is_not(tmp_path: Path) -> None:
    bands: dict[str, Any] = {
        "tokens_per_second": {"source": "unknown"},
        "payload_bytes_per_token": {"low": 180, "high": 200, "source": "s"},
        "eval/accuracy@5": {"low": 0.7, "source": "s"},
        "step_seconds": {"high": 2.0, "source": "s"},
        "eval/reverse_kl@5": {"high": 1.0, "source": "s"},
    }
    assert verdicts(tmp_path, FOUND, **bands) == ["", "within", "below", "above", "missing"]


@pytest.mark.parametrize(
    ("value", "found", "verdict"),
    [
        (100.0, 110.0, "within"),
        (100.0, 111.0, "above"),
        (100.0, 89.0, "below"),
        (-2.0, -2.2, "within"),
        (-2.0, -2.3, "below"),
        (0.0, 0.0, "within"),
        (0.0, 0.1, "above"),
    ],
)
def test_a_band_is_a_share_of_the_value_either_way(tmp_path: Path, value: float, found: float, verdict: str) -> None:
    entry = {"value": value, "band": 0.1 + 1e-9, "source": "s"}
    assert verdicts(tmp_path, {"x": found}, x=entry) == [verdict]


def test_a_published_value_stands_beside_the_run_s_and_is_not_judged(tmp_path: Path) -> None:
    path = file(tmp_path, **{"eval/accuracy@5": {"value": 0.9, "source": "a card"}, "other": {"source": "unknown"}})
    known, unknown = against_expected(FOUND, path)
    assert (known.value, known.beside, known.bad) == (0.6, ("0.9 (a card)",), False)
    assert (unknown.value, unknown.beside, unknown.bad) == (None, ("not known (unknown)",), False)


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"hihg": 2, "source": "s"}, "unknown key 'expected.x.hihg'; did you mean 'high'"),
        ({"low": 2}, "source' is missing"),
        ({"band": 0.1, "source": "s"}, "set value and band, or low and high"),
        ({"value": 1, "band": 0.1, "low": 0, "source": "s"}, "set value and band, or low and high"),
        ({"low": 2, "high": 1, "source": "s"}, "low 2 is above high 1"),
        ({"value": 1, "band": -1, "source": "s"}, "band = -1"),
    ],
)
def test_a_mistake_in_the_file_is_named_and_never_judges_nothing(tmp_path: Path, entry: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        read_expected(file(tmp_path, x=entry))


@pytest.mark.parametrize(
    ("bounds", "said"),
    [
        ({"low": 0.1, "high": 0.9}, "0.1 to 0.9 (s)"),
        ({"low": 0.1}, "at least 0.1 (s)"),
        ({"value": 0.5, "high": 0.9}, "0.5, at most 0.9 (s)"),
    ],
)
def test_bounds_on_one_side_are_said_in_words(bounds: dict[str, float], said: str) -> None:
    assert Expectation(source="s", **bounds).words() == said


@pytest.mark.parametrize("text", ['{"bands": {}}', "[]", '{"expected": {}}', "{"])
def test_other_files_are_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "other.json").write_text(text)
    with pytest.raises(ConfigError, match=r"other\.json"):
        read_expected(tmp_path / "other.json")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_expected(tmp_path / "missing.json")


def test_written_figures_are_read_again_and_never_replace_a_file(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    found = FOUND | {"response_tokens": 12_345_678.0, "accuracy_gained": 1 / 3}
    write_expected(found, path, band=0.0, about="here", source="this test")
    assert read_expected(path).about == "here"
    assert [line.verdict for line in against_expected(found, path)] == ["within"] * 6
    with pytest.raises(ConfigError, match="exists already"):
        write_expected(FOUND, path, band=0.1, about="", source="s")
    with pytest.raises(OutputError, match="cannot be written"):
        write_expected(FOUND, tmp_path / "no" / "mine.json", band=0.1, about="", source="s")


def test_figures_that_noise_decides_are_written_without_a_band(tmp_path: Path) -> None:
    path = tmp_path / "mine.json"
    found = {"seconds/after_update": 7.8e-6, "seconds/learn": 0.5, "accuracy_gained": 0.0, "step_seconds": 0.0009}
    assert write_expected(found, path, band=0.2, about="here", source="this test") == 1
    later = {"seconds/after_update": 1e-5, "seconds/learn": 0.55, "accuracy_gained": 0.1, "step_seconds": 0.002}
    assert [line.verdict for line in against_expected(later, path)] == ["", "within", "", ""]
