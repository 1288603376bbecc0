"""`opd doctor`: what it finds, and that it says so."""

import re
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import pytest
from typer import Typer
from typer.testing import CliRunner

import opd.doctor
from opd.doctor import examine_fleet, examine_installation, examine_machine
from opd.fleet.cli import fleet_settings


def run(*arguments: str) -> tuple[int, str]:
    app = Typer()
    app.command()(opd.doctor.doctor)
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, [*arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def test_a_complete_installation_is_well() -> None:
    code, out = run()
    assert code == 0
    assert "with its required packages" in out and "fail" not in out
    assert {finding.subject for finding in examine_machine()} >= {"python", "disk", "shared memory"}


def test_missing_and_unfit_packages_fail_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def fake(name: str) -> str:
        if name == "math-verify":
            raise PackageNotFoundError(name)
        return "0.1" if name == "pydantic" else version(name)

    monkeypatch.setattr(opd.doctor, "version", fake)
    failed = {f.subject: f.text for f in examine_installation() if f.level == "fail"}
    assert failed.keys() == {"math-verify", "pydantic"}
    assert "opd" not in {f.subject for f in examine_installation() if f.level == "ok"}
    code, out = run()
    assert code == 1
    assert "math-verify[antlr4" in out, "what stands in brackets is part of the name"


@pytest.mark.parametrize(
    ("endpoint", "words"),
    [
        ("nowhere", "not of the form 'host:port'"),
        ("store:[/nope]", "[/nope] is not a score store"),
    ],
)
def test_a_fleet_that_cannot_be_reached_fails_with_a_sentence(endpoint: str, words: str) -> None:
    code, out = run("--fleet", endpoint)
    assert code == 1 and words in " ".join(out.split())


def test_a_fleet_is_examined_with_the_fleets_settings(serve, world: Path, tmp_path: Path) -> None:
    tokens, secret = tmp_path / "tokens.yaml", tmp_path / "secret"
    tokens.write_text("- {name: somebody, token: a-long-random-string, scopes: [score]}\n")
    secret.write_text("a-long-random-string")
    server = serve("--model", f"teacher={world / 'teacher'}", "--tokens", str(tokens))
    findings = list(examine_fleet([server.address], fleet_settings(None, [f"security.token_file={secret}"])))
    assert [finding.level for finding in findings] == ["ok", "ok"]
    assert "weights" in findings[0].text
    assert "1 replicas" in findings[1].text
    assert re.search(r": [1-9][\d,]* tokens/s$", findings[1].text)
    code, out = run("--fleet", server.address, "--set", f"security.token_file={secret}")
    assert code == 0 and "tokens/s" in out
