"""YAML texts: what is written is read back, and no Python object comes out of one."""

import pytest
import yaml

from opd.config.text import read_yaml, write_yaml

VALUE = {"b": [1, 2.5e-4, None, True], "a": {"text": "0123", "längst": "no", "lines": "one\ntwo\n"}, "empty": {}}


def test_plain_values_are_read_as_they_were_written_and_in_their_order() -> None:
    text = write_yaml(VALUE)
    assert read_yaml(text) == yaml.safe_load(text) == VALUE
    assert list(read_yaml(text)) == ["b", "a", "empty"]
    assert "längst" in write_yaml(VALUE, allow_unicode=True) and text.isascii()


def test_a_text_that_asks_for_a_python_object_is_refused() -> None:
    with pytest.raises(yaml.YAMLError, match="python/object"):
        read_yaml("!!python/object/apply:os.getcwd []")
