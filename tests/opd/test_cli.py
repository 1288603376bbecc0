"""The command line itself: what holds for every verb."""

import contextlib
import signal
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace

import pytest
import typer

import opd
import opd.cli
from opd.errors import ConfigError

Call = Callable[..., tuple[int, str, str]]


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Call:
    """Call the command line in this process; gives exit code, stdout and stderr."""

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["opd", *arguments])
        monkeypatch.setenv("COLUMNS", "200")
        with pytest.raises(SystemExit) as caught:
            opd.cli.main()
        out, err = capsys.readouterr()
        return int(caught.value.code or 0), out, err

    return run


def test_the_version_needs_no_verb(call: Call) -> None:
    assert call("--version") == (0, f"opd {opd.__version__}\n", "")


def test_a_dependency_that_is_not_installed_is_named(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    def verbs(words: list[str]) -> None:
        raise ModuleNotFoundError("No module named 'httpcore2.pool'", name="httpcore2.pool")

    monkeypatch.setattr(opd.cli, "_add_verbs", verbs)
    code, _, said = call("watch")
    assert code == ConfigError.exit_code and said.count("\n") == 1 and "'httpcore2'" in said


@pytest.mark.parametrize(
    ("words", "loaded"),
    [
        (["-v", "train", "serve"], ["train"]),
        (["trian"], ["serve", "train"]),  # to say what it might be
        (["--help"], ["serve", "train"]),
        ([], ["serve", "train"]),
    ],
)
def test_a_verb_is_loaded_without_the_others(
    words: list[str], loaded: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[str] = []

    def point(name: str) -> SimpleNamespace:
        return SimpleNamespace(name=name, load=lambda: asked.append(name) or typer.Typer())

    monkeypatch.setattr(opd.cli, "app", typer.Typer())
    monkeypatch.setattr(opd.cli, "entry_points", lambda group: [point("train"), point("serve")])
    opd.cli._add_verbs(words)
    assert asked == loaded
    opd.cli._add_verbs()
    assert sorted(asked) == ["serve", "train"], "a verb that is there is not loaded again"


def test_the_package_can_be_run_as_the_command() -> None:
    def ask(*words: str) -> tuple[int, str, str]:
        done = subprocess.run([sys.executable, "-m", "opd", *words], capture_output=True, text=True, check=False)
        return done.returncode, done.stdout, done.stderr

    assert ask("--version") == (0, f"opd {opd.__version__}\n", "")
    code, out, error = ask("train", "missing.yaml")
    assert (code, out) == (2, "") and error.startswith("error: missing.yaml cannot be read: ")
    assert "Usage: python -m opd plugins list" in ask("plugins", "list", "--help")[1]


def test_ctrl_c_is_one_word_and_a_code(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted() -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("opd.plugins_cli.registries", interrupted)
    code, out, error = call("plugins", "list")
    assert (code, out) == (130, "") and error.split() == ["interrupted"]


def test_ctrl_c_that_an_import_swallows_is_no_error_of_the_import(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    handler = signal.getsignal(signal.SIGINT)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # pytest's, if the tests run under nohup, is another

    def swallow() -> None:
        with contextlib.suppress(KeyboardInterrupt):
            signal.raise_signal(signal.SIGINT)
        raise RecursionError

    monkeypatch.setattr("opd.plugins_cli.registries", swallow)
    try:
        code, out, error = call("plugins", "list")
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, handler)
    assert (code, out) == (130, "") and error.split() == ["interrupted"]


def test_help_shows_defaults_in_brackets(call: Call) -> None:
    code, out, _ = call("serve", "--help")
    assert code == 0
    assert "the models [transformers]" in out and "f16 [auto]" in out


def test_an_unknown_log_level_is_refused_by_name(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPD_LOG_LEVEL", "loud")
    code, _, err = call("plugins", "list")
    assert code == 2 and "OPD_LOG_LEVEL is 'LOUD'" in err


@pytest.mark.skipif(sys.platform != "linux", reason="/dev/full is Linux's")
def test_a_full_disk_is_one_sentence() -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "opd.cli", "plugins", "list", "task"]
        result = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert result.returncode == 1
    assert result.stderr == "error: No space left on device.\n"
