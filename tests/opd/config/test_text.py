"""YAML texts: what is written is read back, and no Python object comes out of one."""

from pathlib import Path

import pytest
import yaml

from opd.config.load import read_mapping
from opd.config.text import read_options, read_yaml, write_yaml
from opd.errors import ConfigError

VALUE = {"b": [1, 2.5e-4, None, True], "a": {"text": "0123", "längst": "no", "lines": "one\ntwo\n"}, "empty": {}}


def test_plain_values_are_read_as_they_were_written_and_in_their_order() -> None:
    text = write_yaml(VALUE)
    assert read_yaml(text) == yaml.safe_load(text) == VALUE
    assert list(read_yaml(text)) == ["b", "a", "empty"]
    assert "längst" in write_yaml(VALUE, allow_unicode=True) and text.isascii()


def test_a_text_that_asks_for_a_python_object_is_refused() -> None:
    with pytest.raises(yaml.YAMLError, match="python/object"):
        read_yaml("!!python/object/apply:os.getcwd []")


def test_options_are_yaml_and_numbers_without_a_dot_are_numbers() -> None:
    found = read_options("--o", ["a=[1, 2]", "b=1e-5", "c=x=y", "d=", "e='1e-5'"])
    assert found == {"a": [1, 2], "b": 1e-5, "c": "x=y", "d": None, "e": "1e-5"}
    assert read_options("--o", None) == {}


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ("a", "must have the form KEY=VALUE"),
        ("=1", "must have the form KEY=VALUE"),
        ("a=[", "not valid YAML"),
        ("a=2026-99-99", "not valid"),
    ],
)
def test_an_option_of_another_form_is_named(entry: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said) as caught:
        read_options("--o", [entry])
    assert str(caught.value).startswith(f"--o {entry!r}")


def bomb(merge: bool) -> str:
    """Nine levels, each of nine aliases of the one below: 400 million values in 500 characters."""
    opened, closed = ("{<<: [", "]}") if merge else ("[", "]")
    levels = (f"a{i}: &a{i} {opened}{', '.join([f'*a{i - 1}'] * 9)}{closed}\n" for i in range(1, 10))
    return f"a0: &a0 {'{k: 1}' if merge else '[1]'}\n" + "".join(levels)


HOSTILE = {
    "aliases": bomb(merge=False),
    "merge keys": bomb(merge=True),
    "brackets": "[" * 100_000,
    "indented": "".join(" " * level + "a:\n" for level in range(1000)),
    "itself": "a: &a [*a]",
    "itself, merged": "a: &a {<<: *a}",
    "a chain": "a0: &a0 [1]\n" + "".join(f"a{i}: &a{i} [*a{i - 1}]\n" for i in range(1, 400)),
}


@pytest.mark.parametrize("text", HOSTILE.values(), ids=HOSTILE)
def test_a_small_text_that_stands_for_much_is_refused(text: str, tmp_path: Path) -> None:
    with pytest.raises(yaml.YAMLError, match=r"nested|stands? for|own anchor"):
        read_yaml(text)
    (tmp_path / "recipe.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"recipe\.yaml .*valid YAML"):
        read_mapping(tmp_path / "recipe.yaml")


def test_aliases_and_merge_keys_of_people_are_read() -> None:
    assert read_yaml("a: &a {x: 1, y: 2}\nb: {<<: *a, y: 3}\nc: [*a, *a]")["b"] == {"x": 1, "y": 3}


def test_numbers_of_base_60_are_text(tmp_path: Path) -> None:
    (tmp_path / "x.yaml").write_text("a: 1:30\nb: 1:30.5\nc: " + ":".join(["1"] * 10_000))
    for found in (read_mapping(tmp_path / "x.yaml"), read_yaml((tmp_path / "x.yaml").read_text())):
        assert found["a"] == "1:30" and found["b"] == "1:30.5" and isinstance(found["c"], str)
