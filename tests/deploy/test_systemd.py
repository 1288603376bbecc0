"""The units of deploy/systemd, run by a real systemd that boots a container."""

import json
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from deployed_job import student_recipe
from machines import Machine, machine, why_not
from waiting import wait_until

pytestmark = [pytest.mark.slow, pytest.mark.skipif(why_not() is not None, reason=why_not() or "")]

RUN = "/var/lib/opd/runs/first"


@pytest.fixture
def server(world: Path) -> Iterator[Machine]:
    """A machine on which the commands of deploy/README.md have installed the units."""
    page = (Path(__file__).parents[2] / "deploy" / "README.md").read_text()
    section = page.split("\n## systemd\n")[1].split("\n## ")[0]
    commands = [line.strip() for line in section.splitlines() if line.startswith("    ")]
    with tempfile.TemporaryDirectory(prefix="systemd-") as folder, machine(Path(folder), world) as made:
        made.sh("mkdir -p /etc/systemd/system; cd /opt/source\n" + "\n".join(c for c in commands if "NAME" not in c))
        yield made


def teacher(server: Machine, name: str, model: str = "teacher=/srv/models/teacher", **settings: Any) -> str:
    """The unit of a teacher server, whose files this writes."""
    (server.settings / f"{name}.env").write_text(f"MODELS=--model {model}\n")
    (server.settings / f"{name}.yaml").write_text(yaml.safe_dump({"port": 7070, "metrics_port": 9400, **settings}))
    return f"opd-teacher@{name}"


def student(server: Machine, **changes: Any) -> str:
    """The unit of a student, whose recipe this writes."""
    recipe = student_recipe("/srv/models", ["127.0.0.1:7070"], **changes)
    (server.settings / "first.yaml").write_text(yaml.safe_dump(recipe))
    return "opd-student@first"


def steps(server: Machine) -> list[dict[str, Any]]:
    """The steps that the run has logged."""
    text = server.sh(f"cat {RUN}/metrics.jsonl 2>/dev/null || true")
    return [json.loads(line) for line in text.splitlines()]


def goes_on(server: Machine) -> None:
    """Wait for more steps of the run."""
    done = len(steps(server))
    wait_until(lambda: len(steps(server)) > done, why=lambda: server.journal("'opd-*'"))


def test_a_student_goes_on_while_its_teacher_is_restarted_and_when_it_dies_itself(server: Machine) -> None:
    serving, training = teacher(server, "math"), student(server)
    units = [f"/etc/systemd/system/{unit}.service" for unit in (serving, training)]
    assert "opd-" not in server.ask("systemd-analyze", "verify", *units).stderr
    assert server.ask("systemctl", "enable", "--now", serving).returncode == 0
    # It has started, so it serves.
    assert "teacher ready" in server.journal(serving)
    metrics = server.sh(
        "/opt/opd/bin/python -c 'from urllib.request import urlopen as u; print(u(\"http://127.0.0.1:9400/metrics\").read().decode())'"
    )
    assert 'opd_teacher_state{state="ready",teacher="teacher"} 1.0' in metrics
    server.sh(f"systemctl start {training}")
    goes_on(server)
    began = server.show(training, "MainPID")

    server.sh(f"systemctl restart {serving}")
    assert '"message": "stopped", "exit_code": 0' in server.journal(serving)
    goes_on(server)
    server.sh(f"systemctl kill --signal KILL {serving}")
    server.until(serving, "NRestarts", "1")
    server.until(serving, "ActiveState", "active")
    goes_on(server)
    assert server.show(training, "MainPID") == began

    # From elsewhere: it saves, and is started again.
    server.sh(f"kill {began}")
    server.until(training, "NRestarts", "1")
    goes_on(server)
    server.sh(f"systemctl stop {training}")
    assert server.show(training, "ActiveState") == "inactive"  # and not "failed"
    done = steps(server)
    saved = server.sh(f"ls {RUN}/checkpoints").splitlines()[-1]
    assert saved == f"step-{done[-1]['step']:06d}"
    assert [each["step"] for each in done] == list(range(1, len(done) + 1))
    assert {each["sampled_rows"] for each in done} == {8.0}

    # Done at last: it is not started again. Its result is a teacher of another server.
    server.sh(f"systemctl stop {serving}")
    student(server, steps=len(done) + 1)
    server.sh(f"systemctl start --no-block {training}; systemctl start {serving}")
    server.until(training, "ActiveState", "inactive")
    assert server.show(training, "ExecMainStatus") == "0", server.journal(training)
    own = teacher(server, "own", f"own={RUN}/checkpoints/step-{len(done) + 1:06d}/model", port=7071, metrics_port=-1)
    assert server.ask("systemctl", "start", own).returncode == 0, server.journal(own)


def test_ranks_are_told_to_save_and_go_on(server: Machine) -> None:
    serving, training = teacher(server, "math"), student(server)
    (server.settings / "first.env").write_text("RANKS=2\n")
    server.sh(f"systemctl start --no-block {serving}; systemctl start {training}")
    for _ in range(2):
        goes_on(server)
        assert len(server.sh("pgrep --full 'opd.cli train /etc/opd/first.yaml'").splitlines()) == 3  # torchrun and two
        server.sh(f"systemctl stop {training}")
        assert server.show(training, "ActiveState") == "inactive", server.journal(training)
        done = steps(server)
        assert server.sh(f"ls {RUN}/checkpoints").splitlines()[-1] == f"step-{done[-1]['step']:06d}"
        assert [each["step"] for each in done] == list(range(1, len(done) + 1))
        server.sh(f"systemctl start {training}")
    server.sh(f"systemctl stop {training}")
    student(server, steps=0)
    server.ask("systemctl", "start", training)
    server.until(training, "ActiveState", "failed")
    assert server.show(training, "ExecMainStatus") == "2", server.journal(training)


def test_what_would_fail_again_is_not_repeated_and_the_journal_has_the_fix(server: Machine) -> None:
    server.sh("install -m 600 /dev/null /etc/opd/key.pem; install -m 644 /dev/null /etc/opd/cert.pem")
    tls = {"tls_cert": "/etc/opd/cert.pem", "tls_key": "/etc/opd/key.pem"}
    server.sh("systemctl start " + teacher(server, "math"))
    for unit, code, said in (
        (teacher(server, "none", "t=/srv/models/none", port=0, metrics_port=-1), "2", "give a folder or a hub id"),
        (teacher(server, "tls", port=0, metrics_port=-1, security=tls), "2", "check its path and permissions"),
        (teacher(server, "port"), "14", "choose another --host or --port"),
        ("opd-teacher@unknown", "2", "Missing option '--model'"),
        ("opd-student@unknown", "2", "/etc/opd/unknown.yaml cannot be read"),
    ):
        server.ask("systemctl", "start", unit)
        server.until(unit, "ActiveState", "failed")
        found = (server.show(unit, "ExecMainStatus"), server.show(unit, "NRestarts"))
        assert found == (code, "0") and said in server.journal(unit), server.journal(unit)

    # A student that waits for its servers has nothing to save.
    server.sh("systemctl stop opd-teacher@math; systemctl start " + student(server))
    wait_until(lambda: "waiting for 127.0.0.1:7070" in server.journal("opd-student@first"))
    server.sh("systemctl stop opd-student@first")
    assert server.show("opd-student@first", "ActiveState") == "inactive", server.journal("opd-student@first")

    # Without a network, the hub cannot be asked; that may pass, so it is tried five times.
    hub = teacher(server, "hub", "t=owner/name", port=0, metrics_port=-1)
    soon = f"/run/systemd/system/{hub}.service.d"
    server.sh(f"mkdir -p {soon}; printf '[Service]\\nRestartSec=0\\n' >{soon}/soon.conf; systemctl daemon-reload")
    assert server.ask("systemctl", "start", hub).returncode == 1
    server.until(hub, "ActiveState", "failed")
    assert (server.show(hub, "NRestarts"), server.show(hub, "ExecMainStatus")) == ("5", "7"), server.journal(hub)
    assert "the hub cannot be reached" in server.journal(hub)
