from pathlib import Path
from typing import Annotated, Any

import pytest
from pydantic import Discriminator, Field, Tag

from opd.config import Settings, load_settings, parse_settings
from opd.errors import ConfigError


class Engine(Settings):
    cylinders: int = Field(4, ge=1)
    fuel: str = "petrol"


class Car(Settings):
    name: str
    engine: Engine = Engine()
    place: Path = Path("garage")
    length: float | None = None
    hybrid: bool | int = False
    share: dict[str, float] = Field(default_factory=dict)
    wheels: list[Engine] = Field(default_factory=list)


class Motor(Settings):
    volts: int


Drive = Annotated[
    Annotated[Engine, Tag("fuel")] | Annotated[Motor, Tag("volts")],
    Discriminator(lambda value: "fuel" if "fuel" in value else "volts"),
]


class Hybrid(Settings):
    drives: list[Drive]
    main: Drive | None = None


def write(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "car.yaml"
    path.write_text(text)
    return path


def test_overrides_replace_nested_keys_with_yaml_values(tmp_path: Path) -> None:
    car = load_settings(Car, write(tmp_path, "name: a\nengine: {fuel: diesel}"), ["engine.cylinders=6", "name=b"])
    assert (car.name, car.engine.cylinders, car.engine.fuel) == ("b", 6, "diesel")


def test_overrides_reach_into_lists_and_missing_groups(tmp_path: Path) -> None:
    path = write(tmp_path, "name: a\nwheels: [{cylinders: 1}, {cylinders: 2}]")
    car = load_settings(Car, path, ["wheels.1.cylinders=9", "engine.cylinders=3"])
    assert [w.cylinders for w in car.wheels] == [1, 9] and car.engine.cylinders == 3


@pytest.mark.parametrize(
    ("data", "words"),
    [
        ({"name": "a", "engin": {}}, ["'engin'", "'engine'"]),
        ({"name": "a", "engine": {"cilinders": 3}}, ["'engine.cilinders'", "'cylinders'"]),
        ({"name": "a", "wheels": [{"feul": "x"}]}, ["'wheels.0.feul'", "'fuel'"]),
        ({"name": "a", "engine": {"cylinders": 0}}, ["engine.cylinders = 0", "greater than or equal to 1"]),
        ({}, ["'name'", "missing"]),
        ({"name": "a", "place": None}, ["place = None", "it must be a path, in quotes"]),
        ({"name": "a", "engine": {"cylinders": True}}, ["engine.cylinders = True", "it must be a number"]),
        ({"name": "a", "share": True}, ["share = True", "it must be a group of keys"]),
        ({"name": "a", "length": False}, ["length = False", "it must be a number"]),
    ],
)
def test_a_mistake_is_one_sentence_with_the_key_and_the_nearest_valid_one(data: Any, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_settings(Car, data, source="car.yaml")
    assert all(word in str(caught.value) for word in words), str(caught.value)


class Garage(Settings):
    cars: list[str] | dict[str, list[int | str]]


@pytest.mark.parametrize(
    ("cars", "said"),
    [
        ("a", "cars = 'a' is not valid: it must be a list, in [brackets], or it must be a group of keys, in {braces}."),
        (["a", []], "cars.1 = [] is not valid: it must be text, in quotes if it looks like a number or a list."),
        ({"a": "b"}, "cars.a = 'b' is not valid: it must be a list, in [brackets]."),
    ],
)
def test_a_key_of_several_types_is_told_as_it_stands_in_the_file(cars: Any, said: str) -> None:
    """Pydantic has a message for each type, whose name stands in the place."""
    with pytest.raises(ConfigError) as caught:
        parse_settings(Garage, {"cars": cars}, source="file")
    assert str(caught.value) == f"file: {said}"
    with pytest.raises(ConfigError, match=r"cars\.a\.0 = None .* valid integer.* text"):
        parse_settings(Garage, {"cars": {"a": [None]}})


def test_yes_and_no_are_kept_where_a_key_takes_them() -> None:
    assert parse_settings(Car, {"name": "a", "hybrid": True}).hybrid is True


def test_of_a_long_value_only_the_beginning_is_shown() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_settings(Car, {"name": "a", "engine": {"cylinders": "ab" * 500}})
    assert "'abab" in str(caught.value) and "1002 characters" in str(caught.value) and len(str(caught.value)) < 400


@pytest.mark.parametrize(
    ("text", "overrides", "word"),
    [
        ("name: [", [], "not valid YAML"),
        ("- 1", [], "mapping"),
        ("name: a", ["engine"], "dotted.key=value"),
        ("name: a", ["name.b=1"], "'name'"),
        ("name: a\nwheels: [{}]", ["wheels.7={}"], "'7'"),
        ("name: a", ["name=[1"], "'name=\\[1' is not valid YAML"),
        ("name: a\nname: b", [], "'name' is given twice in line 2, column 1"),
        ("name: a\nengine: {fuel: a, fuel: b}", [], "'fuel' is given twice"),
        ("name: 2026-99-99", [], "month must be in"),
        ("name: !!timestamp x", [], "not valid YAML"),
        ("name: " + "[" * 5000, [], "not valid YAML"),
        ("name: a", ["name=2026-99-99"], "month must be in"),
    ],
)
def test_unusable_files_and_overrides_are_refused(tmp_path: Path, text: str, overrides: list[str], word: str) -> None:
    with pytest.raises(ConfigError, match=word):
        load_settings(Car, write(tmp_path, text), overrides)


def test_a_mistake_in_yaml_is_said_on_one_line_with_its_place(tmp_path: Path) -> None:
    path = write(tmp_path, "name: a\nwheels: [1, 2\n")
    with pytest.raises(ConfigError) as caught:
        load_settings(Car, path)
    assert str(caught.value) == (
        f"{path} is not valid YAML: expected ',' or ']', but got the end of the text in line 3, column 1, while "
        "parsing a flow sequence that begins in line 2, column 9."
    )
    with pytest.raises(ConfigError, match=r"mapping values .* line 1, column 8\.$"):
        load_settings(Car, write(tmp_path, "name: a: b"))
    with pytest.raises(ConfigError, match=r"unacceptable character #x0000: .* in position 7\.$"):
        load_settings(Car, write(tmp_path, "name: a\0"))


def test_without_a_file_overrides_apply_to_the_defaults() -> None:
    assert load_settings(Car, None, ["name=a"]).name == "a"
    with pytest.raises(ConfigError, match=r"^overrides: .*'nmae'.* 'name'"):
        load_settings(Car, None, ["name=a", "nmae=b"])


def test_a_file_that_is_no_text_is_named(tmp_path: Path) -> None:
    path = tmp_path / "binary.yaml"
    path.write_bytes(b"name: \xff\xfe")
    with pytest.raises(ConfigError, match=r"binary\.yaml is not UTF-8 text"):
        load_settings(Car, path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"nowhere\.yaml"):
        load_settings(Car, tmp_path / "nowhere.yaml")


def test_keys_of_a_member_of_a_union_are_named_as_they_stand_in_the_file() -> None:
    """Pydantic puts the member's tag between them, which is not in the file."""
    data = {"drives": [{"volts": 3}, {"fuel": "x", "cilinders": 2}], "main": {"volts": "many"}}
    with pytest.raises(ConfigError) as caught:
        parse_settings(Hybrid, data, source="car.yaml")
    assert "unknown key 'drives.1.cilinders'; did you mean 'cylinders'?" in str(caught.value)
    assert "main.volts = 'many'" in str(caught.value)


def test_valid_keys_are_those_of_the_member_that_was_chosen() -> None:
    with pytest.raises(ConfigError, match=r"valid keys here: volts\."):
        parse_settings(Hybrid, {"drives": [{"volts": 3, "ppppp": 1}]})


def test_merged_keys_may_be_replaced(tmp_path: Path) -> None:
    text = "engine: &e {cylinders: 2}\nwheels: [&w {<<: *e, cylinders: 3}, {<<: *w, cylinders: 4}]\nname: a"
    assert [wheel.cylinders for wheel in load_settings(Car, write(tmp_path, text)).wheels] == [3, 4]


class Way(Settings):
    start: str = Field(alias="from")
    to: str


class Trip(Settings):
    way: float | Way


@pytest.mark.parametrize(
    ("way", "said"),
    [
        ({"to": "home"}, r"^settings: key 'way\.from' is missing; give it a value\.$"),
        ({"form": "work", "to": "home"}, r"unknown key 'way\.form'; did you mean 'from'\?"),
        ({"from": 1, "to": "home"}, r"way\.from = 1 is not valid"),
    ],
)
def test_a_key_that_is_a_word_of_python_is_told_as_it_stands_in_the_file(way: Any, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        parse_settings(Trip, {"way": way})
