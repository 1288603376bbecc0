"""Every command line of the pages is run: here, by the test that is named, or not, for a reason that is given."""

import re
import shlex
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

import opd.cli

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "deploy" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PROGRAMS = "opd|make|pip|python|pytest|torchrun|accelerate|prometheus|kubectl|source"

FIRST = "runs/first"
HERE = {
    # As written, but for addresses, and the name of the checkpoint that two steps leave.
    "opd doctor --fleet node1:7070": [],
    "opd doctor --fleet node1:7070 --fleet node2:7070": [],
    "opd train recipe.yaml": ["run=runs/again"],
    "opd eval runs/first/checkpoints/step-000100/model --recipe recipe.yaml": [],
    "opd watch runs/first": [],
    "opd report runs/first": [],
    "opd plugins list": [],
    "opd fleet status 10.0.0.1:7070,10.0.0.2:7070 --watch 2": ["--watch", "0"],
    "opd fleet status node1:7070,node2:7070": [],
    "opd fleet verify 10.0.0.1:7070,10.0.0.2:7070": [],
    "opd score 10.0.0.1:7070 --rows rows.jsonl --out scores --payload topk --k 64": [],
    "opd plan recipe.yaml --hardware h100 --ranks 8 --mean-tokens 800": ["rollout.prompts_per_step=8"],
    "opd lab list": [],
}
"""Command to what is added to it here."""

ELSEWHERE = {
    # Pattern: (test that runs it, what stands there).
    r"opd serve .*--tls-cert": ("tests/opd/test_doctor.py", "--tls-cert"),
    r"opd serve --model teacher=runs/demo": ("tests/conftest.py", '"-m", "teacher_server"'),
    r"opd serve --model math=.*--config": ("tests/teacher_server/test_process.py", '"--config"'),
    r"opd train examples/recipes/demo.yaml": ("tests/examples/test_recipes.py", "--dry-run"),
    r"prometheus --config.file": ("tests/deploy/test_alerts.py", '"check", "config", "prometheus.yml"'),
    r"opd reproduce": ("tests/end_to_end/test_reproduce.py", "reproduce("),
    r"opd orbit": ("tests/student/orbit/test_orbit.py", "orbit"),
    r"opd merge": ("tests/student/orbit/test_merge.py", "merge"),
    r"torchrun --nproc-per-node": ("tests/end_to_end/test_two_ranks.py", "two"),
    r"opd doctor$": ("tests/opd/test_doctor.py", "run()"),
    r"opd doctor --port": ("tests/opd/test_doctor.py", '"--port"'),
    r"opd doctor --self-test": ("tests/student/checks/test_doctor.py", "examine_payloads("),
    r"opd doctor --teacher": ("tests/student/checks/test_doctor.py", "examine_teacher("),
    r"opd fleet update-weights": ("tests/opd/fleet/test_weights.py", "update_weights"),
    r"pip install ./my_package": ("tests/docs/test_plugin_example.py", "my_package"),
    r"opd plugins show huber": ("tests/docs/test_plugin_example.py", "huber"),
    r"opd train recipe.yaml 'objective=": ("tests/docs/test_plugin_example.py", "huber"),
    r"pytest tests/student/methods/test_conformance.py": ("tests/docs/test_plugin_example.py", "test_conformance"),
    r"opd compose": ("tests/opd/tasks/test_compose.py", "CliRunner"),
    r"opd episodes": ("tests/student/rollout/test_transcript.py", "episodes_cli"),
    r"opd env serve": ("tests/opd/tasks/environments/test_openenv.py", "serve"),
    r"opd lab (run|report|premise)": ("tests/student/lab/test_runner.py", "run"),
    r"opd tiny build worlds/test": ("tests/conftest.py", 'build_world(shared / "world", "test"'),
    r"opd tiny build world.yaml": ("tests/docs/test_tiny_page.py", '"tiny", "build"'),
    r"kubectl apply -k": ("tests/deploy/test_kubernetes.py", '"kubectl", "kustomize"'),
    r"make prometheus": ("tests/deploy/test_prometheus.py", "prometheus("),
    r"make chaos": ("tests/chaos/test_fleet.py", "chaos"),
}

NOT_RUN = {
    r"make (demo|test|gpu|soak)": "minutes, the suite itself, a GPU, a quarter of an hour; the targets exist",
    r"python benchmarks/": "minutes each and a quiet machine; the files and their flags exist",
    r"opd serve --model (teacher=)?Qwen/": "a model from the hub; the flags exist",
    r"opd tiny build worlds/(demo|lab)": "minutes; the preset test is built",
    r"torchrun --nnodes": "two machines",
    r"source ": "a shell's own",
}


def commands() -> dict[str, str]:
    """Every command line, without its comment, to the page where it stands first."""
    found: dict[str, str] = {}
    for page in PAGES:
        text = page.read_text()
        fenced = [
            block for language, block in re.findall(r"```(\w*)\n(.*?)```", text, re.DOTALL) if language != "mermaid"
        ]
        bare = re.sub(r"```.*?```", "", text, flags=re.DOTALL)
        lines = [line for block in fenced for line in block.splitlines()] + re.findall(
            r"^    (\S.*)", bare, re.MULTILINE
        )
        for line in lines:
            if re.match(rf"({PROGRAMS}) [a-z./-]", line) and not re.match(r"\w+ \w+ (in|is|:)\b", line):
                found.setdefault(shlex.join(shlex.split(line.removesuffix("\\"), comments=True)), page.name)
    return found


def kinds(command: str) -> list[str]:
    """How a command is run: one of here, elsewhere, not run."""
    found = ["here"] if command in HERE else []
    found += [f"elsewhere {pattern}" for pattern in ELSEWHERE if re.match(pattern, command)]
    return found[:1] or [f"not run {pattern}" for pattern in NOT_RUN if re.match(pattern, command)]


def test_every_command_is_run_or_says_why_not() -> None:
    every = commands()
    assert len(every) > 50
    left = {command: page for command, page in every.items() if not kinds(command)}
    assert not left, f"new on the pages: add each to HERE, ELSEWHERE or NOT_RUN of this file: {left}"


def test_no_entry_is_left_of_a_command_that_is_gone() -> None:
    every = commands()
    assert HERE.keys() <= every.keys()
    for pattern in (*ELSEWHERE, *NOT_RUN):
        assert any(re.match(pattern, command) for command in every), pattern


@pytest.mark.parametrize("pattern", ELSEWHERE)
def test_the_test_that_runs_a_command_exists(pattern: str) -> None:
    path, words = ELSEWHERE[pattern]
    assert words in (ROOT / path).read_text(), f"{path} no longer runs {pattern}"


@pytest.mark.parametrize("command", [c for c in commands() if c.startswith(("make ", "python benchmarks/"))])
def test_targets_files_and_flags_exist(command: str) -> None:
    program, first, *rest = shlex.split(command)
    if program == "make":
        subprocess.run(["make", "--dry-run", "--always-make", first], cwd=ROOT, check=True, capture_output=True)
    else:
        text = (ROOT / first).read_text()
        flags = [word for word in rest if word.startswith("--")]
        assert all(flag in text or flag[2:].replace("-", "_") in text for flag in flags), command


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory, world: Path, serve: Any) -> tuple[Path, str]:
    """A folder as the pages assume it, with a recipe, rows and a finished run, and the address of a server."""
    folder = tmp_path_factory.mktemp("pages")
    server = serve("--model", f"teacher={world / 'teacher'}", "--deterministic")
    recipe = {
        "run": FIRST,
        "model": {"path": str(world / "student")},
        "teachers": {"endpoints": [server.address], "default": "teacher"},
        "prompts": {"task": "addition"},
        "rollout": {"prompts_per_step": 2, "max_new_tokens": 8, "max_prompt_tokens": 32},
        "objective": [{"name": "opd", "payload": "gather", "k": 16}],
        "train": {"steps": 1, "threads": 1},
        "eval": {"prompts": 2},
    }
    (folder / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    (folder / "rows.jsonl").write_text('{"prompt_ids": [5, 6], "response_ids": [7, 8]}\n')
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        invoke(["train", "recipe.yaml"])
    return folder, server.address


def invoke(words: list[str]) -> str:
    if not opd.cli.app.registered_commands:
        opd.cli._add_verbs()
    result = CliRunner(env={"COLUMNS": "100"}).invoke(opd.cli.app, words, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


@pytest.mark.parametrize("command", HERE)
def test_a_command_of_the_pages_runs(command: str, place: tuple[Path, str], monkeypatch: pytest.MonkeyPatch) -> None:
    folder, address = place
    monkeypatch.chdir(folder)
    words = [*shlex.split(command)[1:], *HERE[command]]
    told = [
        re.sub(r"(node\d|10\.0\.0\.\d):7070(,\S+)?", address, w).replace("step-000100", "step-000001") for w in words
    ]
    invoke(told)
