"""Every command of the pages is run: here, by the test that is named, or, where it takes minutes, by `make pages`."""

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from ports import held_port
from slow_cases import slow
from typer.testing import CliRunner

import opd.cli

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "deploy" / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PEERS = ROOT / ".venv-oracles" / "bin"
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
    "opd plan recipe.yaml --hardware h100 --ranks 8 --mean-tokens 800": [
        *("rollout.prompts_per_step=8", "rollout.max_new_tokens=1024")
    ],
    "opd lab list": [],
}
"""Command to what is added to it here."""

ELSEWHERE = {
    # Pattern: (test that runs it, what stands there).
    r"opd serve .*--tls-cert": ("tests/opd/test_doctor.py", "--tls-cert"),
    r"opd serve .*--http-port": ("tests/teacher_server/http/test_door.py", '"--http-port"'),
    r"opd serve --model teacher=(runs/demo|world)": ("tests/conftest.py", '"-m", "teacher_server"'),
    r"opd serve --model teacher=runs/first-hour": ("tests/examples/test_first_hour.py", 'serve("--model"'),
    r"opd serve --model math=.*--config": ("tests/teacher_server/test_process.py", '"--config"'),
    r"opd train examples/recipes/demo.yaml": ("tests/examples/test_recipes.py", "--dry-run"),
    r"opd (train|plan) examples/first-hour": ("tests/examples/test_first_hour.py", '"train", path_of('),
    r"opd answers examples/first-hour": ("tests/examples/test_first_hour.py", '"answers", sft'),
    r"opd compare .*--html": ("tests/student/report/test_compare.py", "html=page"),
    r"opd runs": ("tests/student/report/test_runs.py", "command()(runs)"),
    r"opd compare runs/first-hour": ("tests/examples/test_first_hour.py", 'opd_("compare"'),
    r"python examples/prepare_prompts.py": ("tests/examples/test_recipes.py", "prepare_prompts.py"),
    r"prometheus --config.file": ("tests/deploy/test_alerts.py", '"check", "config", "prometheus.yml"'),
    r"opd reproduce": ("tests/end_to_end/test_reproduce.py", "reproduce("),
    r"opd orbit": ("tests/student/orbit/test_orbit.py", "orbit"),
    r"opd convert": ("tests/student/commands/test_convert.py", "convert("),
    r"opd prune": ("tests/student/commands/test_prune.py", "prune("),
    r"opd serve --model teacher=models/": ("tests/examples/test_real.py", 'served({"teacher"'),
    r"opd merge": ("tests/student/orbit/test_merge.py", "merge"),
    r"torchrun --nproc-per-node": ("tests/end_to_end/test_two_ranks.py", "two"),
    r"opd doctor$": ("tests/opd/test_doctor.py", "run()"),
    r"opd doctor --port": ("tests/opd/test_doctor.py", '"--port"'),
    r"opd doctor --self-test": ("tests/student/checks/test_doctor.py", "examine_payloads("),
    r"opd doctor --teacher": ("tests/student/checks/test_doctor.py", "examine_teacher("),
    r"opd fleet status --run": ("tests/opd/fleet/test_cli.py", '"--run"'),
    r"opd fleet status .*--set security": ("tests/chaos/test_weights.py", '"--set", token'),
    r"opd fleet update-weights": ("tests/opd/fleet/test_weights.py", "update_weights"),
    r"pip install alfworld": ("scripts/envs.sh", "'alfworld=="),
    r"pip install ./my_package": ("tests/docs/test_plugin_example.py", "my_package"),
    r"opd plugins show huber": ("tests/docs/test_plugin_example.py", "huber"),
    r"opd train recipe.yaml 'objective=": ("tests/docs/test_plugin_example.py", "huber"),
    r"pytest tests/student/methods/test_conformance.py": ("tests/docs/test_plugin_example.py", "test_conformance"),
    r"opd compose": ("tests/opd_zoo/compose/test_compose.py", "CliRunner"),
    r"opd episodes": ("tests/student/rollout/test_transcript.py", "episodes_cli"),
    r"opd env serve": ("tests/opd/tasks/environments/test_openenv.py", "serve"),
    r"opd lab (run|report|premise)": ("tests/opd_lab/test_runner.py", "run"),
    r"opd tiny build (worlds/test|world$)": ("tests/conftest.py", 'build_world(shared / "world", "test"'),
    r"opd tiny build world.yaml": ("tests/docs/test_tiny_page.py", '"tiny", "build"'),
    r"opd tiny random": ("tests/opd_lab/tiny/test_random_models.py", '"random"'),
    r"kubectl apply -k": ("tests/deploy/test_kubernetes.py", '"kubectl", "kustomize"'),
    r"make prometheus": ("tests/deploy/test_prometheus.py", "prometheus("),
    r"make chaos": ("tests/chaos/test_fleet.py", "chaos"),
}

HUB = r"opd serve --model (teacher=)?Qwen/"
"""Served here with the test world's teacher in place of the model from the hub."""

LONG = {
    # Pattern: seconds it may take on a busy machine. Run by `make pages`, as a reader would.
    r"make demo": 3600,
    r"make real": 7200,
    r"python benchmarks/": 3600,
    r"opd tiny build worlds/(demo|lab)": 3600,
    r"torchrun --nnodes 2": 600,
}

THEMSELVES = {
    r"make (test|gpu|soak|envs)": "is a test itself",
    r"python -m venv|pip install -e": "makes the environment that all else runs in",
    r"source ": "a shell's own, and `make setup` makes the file",
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
    """How a command is run: here, or the patterns that say where."""
    return ["here"] * (command in HERE) or [p for p in (*ELSEWHERE, HUB, *LONG, *THEMSELVES) if re.match(p, command)]


def test_every_command_is_run_somewhere() -> None:
    every = commands()
    assert len(every) > 50
    left = {command: page for command, page in every.items() if not kinds(command)}
    assert not left, f"new on the pages: add each to HERE, ELSEWHERE or LONG of this file: {left}"


def test_no_entry_is_left_of_a_command_that_is_gone() -> None:
    every = commands()
    assert HERE.keys() <= every.keys()
    for pattern in (*ELSEWHERE, HUB, *LONG, *THEMSELVES):
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
def place(tmp_path_factory: pytest.TempPathFactory, world: Path, lone_teacher: Any) -> tuple[Path, str]:
    """A folder as the pages assume it, with a recipe, rows and a finished run, and the address of a server."""
    folder = tmp_path_factory.mktemp("pages")
    recipe = {
        "run": FIRST,
        "model": {"path": str(world / "student")},
        "teachers": {"endpoints": [lone_teacher.address], "default": "teacher"},
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
    return folder, lone_teacher.address


def invoke(words: list[str]) -> str:
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


SERVED = [command for command in commands() if re.match(HUB, command)]


@pytest.mark.parametrize("command", [SERVED[0], *slow(*SERVED[1:])])
def test_a_model_of_the_hub_is_served_with_the_flags_of_the_pages(command: str, world: Path, serve: Any) -> None:
    words = shlex.split(re.sub(r"(?<=[ =])Qwen/\S+", str(world / "teacher"), command))[2:]
    port = words.index("--port")
    server = serve(*words[:port], *words[port + 2 :])
    assert "healthy" in invoke(["fleet", "status", f"127.0.0.1:{server.address.rpartition(':')[2]}"])


@pytest.mark.pages
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("command", [c for c in commands() if any(re.match(pattern, c) for pattern in LONG)])
def test_a_command_that_takes_minutes_runs(command: str, place: tuple[Path, str], tmp_path: Path) -> None:
    seconds = next(seconds for pattern, seconds in LONG.items() if re.match(pattern, command))
    environment = {**os.environ, "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}"}
    cwd = tmp_path
    if command.startswith(("make ", "python ")):  # which name files of the project
        cwd = ROOT
    if "--sides TRL" in command:  # TRL is in an environment of its own
        if not PEERS.exists():
            pytest.skip("make oracles makes the environment with TRL")
        environment["PATH"] = f"{PEERS}:{environment['PATH']}"
    several = [command]
    if command.startswith("torchrun"):  # the page goes on in the next line; both nodes are this machine
        cwd, port = place[0], held_port()
        told = command.replace("HOST:29500", f"127.0.0.1:{port}").replace("--nproc-per-node 8", "--nproc-per-node 1")
        several = [f"{told} --rdzv-id run1 --max-restarts 3 -m opd.cli train recipe.yaml run=runs/two-nodes"] * 2
    logs = [(tmp_path / f"log-{index}").open("w+") for index in range(len(several))]
    running = [
        # `env` looks the program up on the PATH that it is given, Popen on its own.
        subprocess.Popen(["env", *shlex.split(each)], cwd=cwd, env=environment, stdout=log, stderr=subprocess.STDOUT)
        for each, log in zip(several, logs, strict=True)
    ]
    try:
        codes = [process.wait(timeout=seconds) for process in running]
    finally:
        for process in running:
            process.kill()
    assert not any(codes), "".join((tmp_path / f"log-{index}").read_text()[-3000:] for index in range(len(several)))
