from importlib.metadata import EntryPoint
from pathlib import Path

import pytest

from opd.errors import ConfigError
from opd.plugins_cli import registries
from opd.registry import Registry


def make() -> Registry:
    registry = Registry("number", "opd.test_numbers")
    registry.add("pi", "math:pi")
    registry.add("tau", "math:tau")
    return registry


def test_a_name_and_a_dotted_path_load_the_object() -> None:
    assert make().load("pi") == pytest.approx(3.14159, abs=1e-5)
    assert make().load("math:e") == pytest.approx(2.71828, abs=1e-5)


def test_listing_imports_nothing() -> None:
    registry = Registry("number", "opd.test_numbers")
    registry.add("broken", "no_such_module:thing")
    assert [entry.name for entry in registry] == ["broken"]


def test_an_unknown_name_prints_near_matches() -> None:
    with pytest.raises(ConfigError, match="did you mean 'tau'"):
        make().load("taw")


def test_a_class_of_ones_own_that_is_written_with_a_dot_is_put_right() -> None:
    with pytest.raises(ConfigError, match=r"no number 'my\.package\.Tau'; .* my\.package:Tau\.$"):
        make().load("my.package.Tau")


def test_a_duplicate_name_is_an_error_that_names_both_places() -> None:
    with pytest.raises(ConfigError) as caught:
        make().add("pi", "cmath:pi", origin="another-package")
    assert all(word in str(caught.value) for word in ("math:pi", "cmath:pi", "another-package"))


def test_a_path_that_does_not_import_is_an_error_with_its_reason() -> None:
    with pytest.raises(ConfigError, match=r"No module named 'no_such_module'; .* PYTHONPATH"):
        make().load("no_such_module:thing")
    with pytest.raises(ConfigError, match=r"has no attribute .thing.\.$"):
        make().load("math:thing")


def test_a_module_whose_own_code_fails_is_an_error_with_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "fails_when_imported.py").write_text("\nraise RuntimeError('no licence')\n")
    (tmp_path / "is_not_python.py").write_text("def f(:\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=r"RuntimeError: no licence \(.*fails_when_imported\.py, line 2\)"):
        make().load("fails_when_imported:thing")
    with pytest.raises(ConfigError, match=r"SyntaxError: .* \(is_not_python\.py, line 1\)"):
        make().load("is_not_python:thing")


@pytest.mark.parametrize("name", [":e", ".math:e"])
def test_a_path_without_a_module_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="have the form package"):
        make().load(name)


def test_what_is_no_plugin_of_the_kind_is_refused() -> None:
    registry = Registry("number", "opd.test_numbers", member="is_integer")
    assert registry.load("math:pi") == pytest.approx(3.14159, abs=1e-5)
    with pytest.raises(ConfigError, match=r"'math:sin' .*kind number: .*'is_integer'"):
        registry.load("math:sin")


def test_two_packages_with_one_name_are_named_however_often_one_asks(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [EntryPoint(name, "math:inf", "opd.test_numbers") for name in ("pi", "zeta")]
    monkeypatch.setattr("opd.registry.entry_points", lambda group: [point for point in points if point.group == group])
    registry = make()
    for _ in range(2):
        with pytest.raises(ConfigError, match="'pi' is registered twice"):
            registry.load("zeta")


def test_what_is_known_of_a_formula_is_read_from_the_source_as_its_class_says_it() -> None:
    entries = [(registry, entry) for registry in registries() for entry in registry if registry.kind != "engine"]
    assert len(entries) > 150
    for registry, entry in entries:
        own = vars(registry.load(entry.name)).get("evidence", "")
        assert entry.evidence == own and entry.summary, entry
