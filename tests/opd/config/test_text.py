"""YAML texts: what is written is read back, and no Python object comes out of one."""

import pytest
import yaml

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
