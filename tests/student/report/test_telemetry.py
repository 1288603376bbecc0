"""What a terminal shows of a run."""

import io
import re
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import yaml
from ports import held_port, listens
from prometheus_client import generate_latest
from rich.console import Console
from run_folders import RECIPE

from opd.config import parse_settings
from opd.errors import PortInUseError
from student.learning.objective import Objective
from student.plugin.terms import Term, build_terms
from student.plugin.traits import Traits
from student.report.shown import held, read_shown
from student.report.telemetry import Telemetry, check_port
from student.run.folder import RunFolder
from student.settings.recipe import Recipe

METRICS = {
    "reverse_kl": 0.79312,
    "reward": 0.25,
    "response_length": 1234.5,
    "grad_norm": 12.25,
    "response_tokens": 10.0,
    "payload_bytes": 0.0,
}


@pytest.mark.parametrize("width", [80, 140])
def test_the_progress_line_shows_its_figures_whole(width: int) -> None:
    out = io.StringIO()
    telemetry = Telemetry(None, 1000, 0, Console(file=out, width=width, force_terminal=True, color_system=None))
    telemetry.start(0, {"KL": ("reverse_kl",), "reward": ("reward",)})
    telemetry.step(120, METRICS, {"learn": 1.0})
    telemetry.close()
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "\n", out.getvalue())
    line = next(line for line in reversed(text.splitlines()) if "training" in line)
    assert "KL 0.7931  reward 0.25  length 1234  gradient 12.25" in line
    assert " 120/1000 " in line and "…" not in line and len(line.rstrip()) <= width
    assert ("━" in line or "╸" in line) == (width > 100)


def test_a_step_line_shows_what_the_terms_name_and_the_folder_keeps_it(tmp_path: Path) -> None:
    terms = build_terms(
        [
            {"name": "opd", "payload": "hidden", "divergence": "jsd", "mixture": 0.5},
            {"name": "opd"},
            {"name": "sft"},
            {"name": "opd"},
        ]
    )
    shown = Objective(terms, length_limit=1).shown()
    out, metrics = io.StringIO(), {"jsd": 0.5, "opd.1/reverse_kl": 0.25, "loss/sft": 2.0, "opd.3/reverse_kl": 0.75}
    telemetry = Telemetry(RunFolder(tmp_path), 1, 0, Console(file=out, width=200))
    telemetry.start(0, shown)
    telemetry.step(1, {**metrics, "grad_norm": 1.0}, {})
    telemetry.close()
    line = "step 1/1  jsd 0.5  KL 0.25  loss of sft 2  KL of opd.3 0.75  gradient 1"
    assert line in out.getvalue()
    assert list(held(read_shown(tmp_path, []), metrics).values()) == list(metrics)


def test_a_step_line_says_how_fast_the_run_is_and_what_is_left() -> None:
    out = io.StringIO()
    telemetry = Telemetry(None, 20, 0, Console(file=out, width=80))
    telemetry.start(10, {})
    telemetry._began = (10, time.monotonic() - 3600.0)
    telemetry.step(12, METRICS, {"learn": 1.5, "sample": 0.5})
    telemetry.close()
    assert re.search(r"gradient 12\.25  2 s  5 tokens/s  4:00:\d\d left$", out.getvalue(), re.MULTILINE)


@pytest.mark.parametrize(
    ("objective", "labels"),
    [
        ([{"name": "opd", "divergence": "forward_kl"}], ["forward KL"]),
        ([{"name": "grpo"}], ["reward", "entropy"]),
        ([{"name": "sft"}], ["loss"]),
        ([{"name": f"{__name__}:Own"}], ["mine"]),
        ([{"name": f"{__name__}:Plain"}], ["loss"]),
    ],
)
def test_each_term_names_its_own_figures(objective: list[dict[str, Any]], labels: list[str]) -> None:
    assert list(Objective(build_terms(objective), length_limit=1).shown()) == labels


class Plain(Term):
    """Of another package; it says nothing of what to show."""


class Own(Term):
    """Of another package; it names a metric of its own."""

    traits = Traits(shown={"my_metric": "mine"})


def test_a_line_for_people_is_not_cut_into_pieces() -> None:
    out = io.StringIO()
    telemetry = Telemetry(None, 10, 0, Console(file=out, width=40))
    telemetry.log("evaluation [before]: " + "x" * 100)
    when, said = out.getvalue()[:20], out.getvalue()[20:]
    assert said == "evaluation [before]: " + "x" * 100 + "\n"
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d ", when), "every line has its time"


def test_a_run_says_first_what_runs_and_names_itself_to_prometheus() -> None:
    out = io.StringIO()
    telemetry = Telemetry(None, 10, 0, Console(file=out, width=40))
    telemetry.introduce(parse_settings(Recipe, yaml.safe_load(RECIPE)), "cpu, 2 cores")
    said = "trains models/student on cpu, 2 cores: opd, teachers at node1:7070, 40 steps of 16 rows, into runs/first"
    assert said in out.getvalue()
    page = generate_latest(telemetry.registry).decode()
    assert re.search(r'^opd_student_info{objective="opd",run="runs/first",version=".*"} 1.0$', page, re.M)


def test_where_logs_are_json_every_line_is_an_object_with_its_figures(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("student.report.telemetry.is_json", lambda: True)
    out = io.StringIO()
    telemetry = Telemetry(None, 1, 0, Console(file=out, width=80))
    with caplog.at_level("INFO"):
        telemetry.start(0, {})
        telemetry.step(1, METRICS, {"learn": 1.0})
        telemetry.log("evaluation (after): accuracy 0.5")
        telemetry.close()
    assert out.getvalue() == "" and [record.getMessage()[:10] for record in caplog.records] == [
        "step 1/1  ",
        "evaluation",
    ]
    assert vars(caplog.records[0])["step"] == 1 and vars(caplog.records[0])["metrics"]["grad_norm"] == 12.25


def test_a_run_that_learns_nothing_is_told_so_and_why() -> None:
    out = io.StringIO()
    telemetry = Telemetry(None, 100, 0, Console(file=out, width=80))
    for step in range(1, 7):
        telemetry.step(step, {**METRICS, "grad_norm": 0.0 if step > 1 else 1.0}, {})
    lines = [line for line in out.getvalue().splitlines() if "gradient has been exactly 0" in line]
    assert len(lines) == 1 and "for 5 steps" in lines[0] and "rewards within each group are all equal" in lines[0]


def test_metrics_stay_on_loopback_until_an_address_is_given() -> None:
    for host, elsewhere in (("127.0.0.1", False), ("0.0.0.0", True)):
        port = held_port()
        telemetry = Telemetry(None, 1, port, Console(file=io.StringIO()), host=host)
        assert listens("127.0.0.1", port)
        assert listens("127.0.0.2", port) is elsewhere  # a listener on all addresses answers there too
        telemetry.close()
    assert Recipe.model_fields["metrics_host"].default == "127.0.0.1"


def test_only_the_rank_that_opens_the_metrics_port_asks_whether_it_is_free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of one machine all start at the same moment; one that checked would find the port taken by another."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        monkeypatch.setenv("RANK", "1")
        check_port(port)
        monkeypatch.setenv("RANK", "0")
        with pytest.raises(PortInUseError, match=f"metrics port {port}"):
            check_port(port)
