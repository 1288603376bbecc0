"""`make gpu`: every part is a section of one file, a failure is kept beside what was measured, and a page shows it."""

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import gpu
import pytest
from packaging.requirements import Requirement

from support.gpu_page import BEGIN, END, PAGE, TABLES, render, write_page

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = ROOT / "benchmarks" / "gpu.py"
WRITES = (
    'import json, sys; open(sys.argv[1], "w").write(json.dumps({"figures": [{"k": 64, "who": "opd", "mfu": 0.25}]}))'
)
FAILS = f"{WRITES}; print('a cable was cut'); raise SystemExit(3)"


@pytest.fixture(scope="module")
def here() -> dict[str, Any]:
    return gpu.machine(os.environ)


@pytest.fixture
def collect(here: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> Callable[..., bool]:
    """What the script does; it asks once for all tests what machine this is."""
    monkeypatch.setattr(gpu, "machine", lambda environment: here)
    return gpu.collect


def test_a_part_that_fails_is_told_beside_its_figures_and_those_of_the_others(
    collect: Callable[..., bool], tmp_path: Path
) -> None:
    path = tmp_path / "runs" / "gpu.json"
    parts = {"broken": ("-c", FAILS), "race": ("-c", WRITES)}
    assert not collect(parts, path, os.environ)
    broken, race = (json.loads(path.read_text())[name] for name in parts)
    assert broken["error"] == "exit code 3: a cable was cut" and broken["figures"] == race["figures"]
    assert "error" not in race and race["seconds"] > 0 and race["command"].startswith("python -c ")
    assert race["machine"]["cores"] == os.cpu_count() and race["versions"]["torch"]
    # Run again, a part replaces its own section alone.
    assert collect({"broken": ("-c", WRITES)}, path, os.environ)
    again = json.loads(path.read_text())
    assert "error" not in again["broken"] and again["race"] == race


def test_dependencies_that_are_not_installed_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert gpu.lacking() == []
    known = gpu.distributions
    monkeypatch.setattr(gpu, "distributions", lambda name: [] if name == "httpcore2" else known(name=name))
    assert [Requirement(one).name for one in gpu.lacking()] == ["httpcore2"]


def test_a_part_that_takes_too_long_is_stopped_with_what_it_started_and_keeps_what_it_had_measured(
    collect: Callable[..., bool], tmp_path: Path
) -> None:
    child = "import subprocess, sys; subprocess.run([sys.executable, '-c', 'import time; time.sleep(600)'])"
    parts = {"long": ("-c", f"{WRITES}; {child}"), "race": ("-c", WRITES)}
    assert not collect(parts, tmp_path / "gpu.json", os.environ, 3.0)
    long, race = (json.loads((tmp_path / "gpu.json").read_text())[name] for name in parts)
    assert long["error"].startswith("stopped after 3 s") and long["figures"] == race["figures"]
    assert "error" not in race


def test_a_checkout_that_is_not_installed_is_found_by_the_parts(tmp_path: Path) -> None:
    """Started anywhere, without this environment's path to the project."""
    said = subprocess.run(
        [sys.executable, str(SCRIPT), "--lacking"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env={name: value for name, value in os.environ.items() if name != "PYTHONPATH"},
    )
    assert said.returncode == 0 and said.stdout.strip() == ""


def test_a_part_that_leaves_no_whole_file_is_told_and_the_others_go_on(
    collect: Callable[..., bool], tmp_path: Path
) -> None:
    half = 'import os, sys; open(sys.argv[1], "w").write(\'{"figures": [\'); '
    parts = {"killed": ("-c", half + "os._exit(9)"), "silent": ("-c", "print('done')"), "race": ("-c", WRITES)}
    assert not collect(parts, tmp_path / "gpu.json", os.environ)
    killed, silent, race = (json.loads((tmp_path / "gpu.json").read_text())[name] for name in parts)
    assert killed["error"].startswith("exit code 9") and "figures" not in killed
    assert silent["error"] == "no figures were written: done" and race["figures"]


@pytest.mark.slow
def test_every_part_runs_on_a_cpu_at_reduced_shape(tmp_path: Path) -> None:
    path = tmp_path / "gpu.json"
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "--device", "cpu", "--reduced", "--json", str(path)],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    sections = json.loads(path.read_text())
    for table in TABLES:
        section = sections[table.section]
        assert section["machine"]["device"] == "CPU"
        records = section[table.key]
        assert records and "error" not in section, table.section
        for record in records:
            assert record.keys() == table.columns.keys() or "skipped" in record, record
            assert all(math.isfinite(value) for value in record.values() if isinstance(value, float))
    race = {(one["k"], one["who"]): one for one in sections["race"]["figures"]}
    assert set(race) == {(64, "opd"), (64, "vllm"), (128, "opd"), (128, "vllm")}
    assert all(race[k, "opd"]["response_tokens_per_second"] > 0 for k in (64, 128))
    if find_spec("vllm") is None:
        assert race[64, "vllm"]["skipped"] == "vllm is not installed"
    (job,) = sections["job"]["figures"]
    assert 0 < job["teacher_share"] < 1 and 0 < job["mfu"] < job["learn_mfu"] < 1
    assert job["teacher_seconds"] == pytest.approx(job["teacher_share"] * job["step_seconds"])
    assert {one["stage"] for one in sections["job"]["plan"]} == {"rollout", "learn", "teachers"}
    page = render(sections)
    assert "Not measured yet" not in page and "No GPU figure" not in page
    refused = subprocess.run(
        [sys.executable, str(SCRIPT), "--publish", str(path)], capture_output=True, text=True, check=False
    )
    assert refused.returncode == 1 and "was measured on a CPU" in refused.stderr


def test_the_page_shows_what_is_published(tmp_path: Path) -> None:
    published = ROOT / "docs" / "results" / "gpu.json"
    sections = json.loads(published.read_text()) if published.exists() else {}
    shown = PAGE.read_text().partition(BEGIN)[2].partition(END)[0]
    assert shown == f"\n{render(sections)}", "run python benchmarks/gpu.py --publish docs/results/gpu.json"
    if not sections:
        assert "No GPU figure has been measured yet" in shown


def test_figures_skips_and_failures_are_rendered_where_they_belong(tmp_path: Path) -> None:
    opd = {"k": 64, "who": "opd", "seconds": 1.5, "response_tokens_per_second": 76458.3, "of_vllm": None, "mfu": 0.31}
    race = {
        "machine": {"device": "NVIDIA H100"},
        "versions": {"torch": "2.13"},
        "command": "python x.py",
        "began": "2027-01-02T03:04:05",
        "figures": [opd, {"k": 64, "who": "vllm", "skipped": "vllm is not installed"}],
        "error": "exit code 1: first\nlast line",
    }
    page = tmp_path / "page.md"
    page.write_text(f"before\n{BEGIN}\nstale\n{END}\nafter\n")
    write_page({"race": race}, page)
    text = page.read_text()
    assert text.startswith(f"before\n{BEGIN}\n") and text.endswith(f"{END}\nafter\n") and "stale" not in text
    assert "| 64 | opd | 1.5 | 76,458 |  | 0.31 |  |" in text
    assert "| 64 | vllm |  |  |  |  | skipped: vllm is not installed |" in text
    assert "NVIDIA H100, 2027-01-02, `python x.py`; torch 2.13." in text and "This part failed: last line." in text
    assert text.count("Not measured yet.") == len(TABLES) - 1
