"""`opd doctor`: what it finds, and that it says so."""

import os
import re
import socket
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from types import SimpleNamespace

import pytest
from certificates import self_signed
from typer import Typer
from typer.testing import CliRunner

import opd.doctor.installation
from opd.doctor import doctor
from opd.doctor.finding import Finding
from opd.doctor.fleet import examine_fleet
from opd.doctor.installation import examine_installation
from opd.doctor.machine import examine_machine, examine_ports
from opd.doctor.tls import examine_tls
from opd.errors import ConfigError
from opd.fleet.cli import fleet_settings
from opd.wire.channel import ClientSecurity


def run(*arguments: str) -> tuple[int, str]:
    app = Typer()
    app.command()(doctor)
    result = CliRunner(env={"COLUMNS": "200"}).invoke(app, [*arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit), result.exception
    return result.exit_code, result.output


def test_a_complete_installation_is_well() -> None:
    code, out = run()
    assert code == 0
    assert "with its required packages" in out and "fail" not in out
    assert {finding.subject for finding in examine_machine()} >= {"python", "disk", "shared memory", "ports"}


@pytest.mark.parametrize(
    "given",
    [
        ["rollout.temperature=0.7"],
        ["--teacher-model", "m"],
        ["--student", "m"],
        ["--fleet", "node:1", "--question", "Why?"],
        ["--set", "no.such=key"],
    ],
)
def test_what_would_be_ignored_is_refused(given: list[str]) -> None:
    app = Typer()
    app.command()(doctor)
    with pytest.raises(ConfigError, match=r" nothing without --\w+.*both\.$"):
        CliRunner().invoke(app, given, catch_exceptions=False)


@pytest.mark.parametrize(
    ("word", "said"),
    [
        ("127.0.0.1:7070", r"to check a teacher server, write opd doctor --fleet 127\.0\.0\.1:7070\.$"),
        ("[::1]:7070", r"write opd doctor --fleet \[::1\]:7070\.$"),
        ("recipe.yaml", r"to check the teachers of a recipe, write opd doctor --teacher recipe\.yaml\.$"),
        ("node", r"^'node' is not understood: .*--fleet HOST:PORT, or a recipe with --teacher RECIPE\.yaml\.$"),
    ],
)
@pytest.mark.parametrize("more", [[], ["--teacher", "first.yaml"]])
def test_a_word_that_is_not_a_key_is_answered_with_what_was_meant(word: str, said: str, more: list[str]) -> None:
    app = Typer()
    app.command()(doctor)
    with pytest.raises(ConfigError, match=said):
        CliRunner().invoke(app, [word, *more], catch_exceptions=False)


def test_a_taken_port_fails_with_the_process_that_has_it() -> None:
    with socket.create_server(("", 0)) as taken, socket.create_server(("", 0)) as free:
        port, other = taken.getsockname()[1], free.getsockname()[1]
        free.close()
        ok, bad = examine_ports([port, other])
        assert (ok.level, ok.text) == ("ok", f"{other} can be listened on")
        assert (bad.level, bad.subject) == ("fail", f"port {port}")
        assert f"process {os.getpid()}" in bad.text and "in use" in bad.text
        code, out = run("--port", str(port))
        assert code == 1 and "in use" in out


def test_missing_and_unfit_packages_fail_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    def fake(name: str) -> str:
        if name == "math-verify":
            raise PackageNotFoundError(name)
        return "0.1" if name == "pydantic" else version(name)

    requires = ["math-verify[antlr4-13-2]>=0.8", "pydantic>=2.11"]
    monkeypatch.setattr(opd.doctor.installation, "version", fake)
    monkeypatch.setattr(opd.doctor.installation, "distribution", lambda name: SimpleNamespace(requires=requires))
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
    assert [finding.level for finding in findings] == ["ok", "ok", "ok"]
    assert findings[0].text == "unencrypted, on loopback only"
    assert "weights" in findings[1].text
    assert "1 replica," in findings[2].text
    assert re.search(r": [1-9][\d,]* tokens/s$", findings[2].text)
    code, out = run("--fleet", server.address, "--set", f"security.token_file={secret}")
    assert code == 0 and "tokens/s" in out


def test_what_protects_the_way_to_a_server_is_said(serve, world: Path, tmp_path: Path) -> None:
    pem, key = self_signed(tmp_path, "soon", days=3)
    other, _ = self_signed(tmp_path, "other")
    server = serve("--model", f"teacher={world / 'teacher'}", "--tls-cert", str(pem), "--tls-key", str(key))
    place = f"localhost:{server.address.rpartition(':')[2]}"

    def look(address: str, **security: object) -> Finding:
        (found,) = examine_tls([address], ClientSecurity.model_validate(security))
        return found

    near = look(place, ca_file=pem)
    assert near.level == "note" and "TLSv1.3" in near.text and "valid for 3 more days" in near.text, near
    assert look(place, ca_file=other).level == "fail"
    wrong_name = look(place, ca_file=pem, server_name="elsewhere")
    assert wrong_name.level == "fail" and "elsewhere" in wrong_name.text
    with socket.create_server(("127.0.0.1", 0)) as closed:
        gone = f"127.0.0.1:{closed.getsockname()[1]}"
    assert "cannot be reached" in look(gone, tls=True).text
    absent = look(place, ca_file=tmp_path / "absent.pem")
    assert absent.level == "fail" and "cannot be used" in absent.text and str(tmp_path / "absent.pem") in absent.text
    assert look("10.1.2.3:7070").level == "note" and "unencrypted" in look("10.1.2.3:7070").text
    assert list(examine_tls(["store:/nowhere"], ClientSecurity())) == []
    levels = [f.level for f in examine_fleet([place], fleet_settings(None, [f"security.ca_file={pem}"]))]
    assert levels == ["note", "ok", "ok"]
