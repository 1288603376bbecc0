"""The Compose file of deploy/containers as a project of its own under Podman, which leaves only images behind."""

import json
import os
import resource
import shlex
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from waiting import PATIENCE, wait_until

ROOT = Path(__file__).parents[2]
FILES = [ROOT / "deploy" / "containers" / name for name in ("compose.yaml", "cpu.yaml")]
PROJECT = "opd-test"
LABEL = f"label=io.podman.compose.project={PROJECT}"
BASE = "localhost/opd-test-base"
PACKAGES = "ca-certificates,python3,python3-venv,python-is-python3"
# Neither systemd nor the limits of an ordinary machine are taken for granted.
SETTINGS = """[containers]
default_ulimits = ["nofile={files}:{files}", "nproc={processes}:{processes}"]
log_driver = "k8s-file"
[engine]
cgroup_manager = "cgroupfs"
events_logger = "file"
runtime = "runc"
"""


def why_not() -> str | None:
    """Why no containers can be run here, as a sentence; None if they can."""
    needs = ["podman", "podman-compose", "runc"] + ([] if "OPD_BASE_IMAGE" in os.environ else ["debootstrap"])
    missing = [name for name in needs if shutil.which(name) is None]
    if missing or os.getuid():
        return f"{', '.join(missing) or 'root'} is needed; `make containers`, run by root, gets what is missing"
    return None


@dataclass
class Compose:
    """The project; its services are called teacher and student.

    Attributes:
        environment: the variables of every command.
    """

    environment: dict[str, str]

    def ask(self, *command: str, seconds: float = 2 * PATIENCE) -> subprocess.CompletedProcess[str]:
        """Run a command of this machine with the project's settings."""
        return subprocess.run(
            command,
            env=self.environment,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=seconds,
            check=False,
        )

    def podman(self, *arguments: str) -> str:
        """What Podman prints; it must end with 0."""
        done = self.ask("podman", *arguments)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout.strip()

    def compose(self, *arguments: str, seconds: float = 2 * PATIENCE) -> None:
        """Run podman-compose on the two files; it must end with 0."""
        flags = os.environ.get("OPD_BUILD_FLAGS", "")
        options = [f"--podman-build-args={flags}"] if flags else []
        files = [word for file in FILES for word in ("-f", str(file))]
        done = self.ask("podman-compose", *options, "-p", PROJECT, *files, *arguments, seconds=seconds)
        assert done.returncode == 0, f"{arguments}: {done.stdout[-8000:]}{done.stderr[-8000:]}"

    def container(self, service: str) -> str:
        """The id of the container of a service, running or not."""
        only = ["--filter", LABEL, "--filter", f"label=com.docker.compose.service={service}"]
        (found,) = self.podman("ps", "--all", "--quiet", *only).splitlines()
        return found

    def show(self, service: str, form: str) -> str:
        """A property of the container of a service, by a template such as `{{.State.Pid}}`."""
        return self.podman("inspect", "--type", "container", "--format", form, self.container(service))

    def is_healthy(self, service: str) -> bool:
        """Whether the health check in the Compose file, run now, succeeds. Without systemd nothing else runs it."""
        return self.ask("podman", "healthcheck", "run", self.container(service)).returncode == 0

    def logs(self) -> str:
        """The last lines of both services."""
        found = self.podman("ps", "--all", "--quiet", "--filter", LABEL).splitlines()
        answers = [self.ask("podman", "logs", "--tail", "20", each) for each in found]
        return "\n".join(answer.stdout + answer.stderr for answer in answers)

    def until(self, condition: Any, seconds: float = PATIENCE) -> None:
        """Wait for an event in a container; fails with what the containers said."""
        wait_until(condition, seconds, why=self.logs)

    def volume(self, name: str) -> Path:
        """The folder of a volume of the project."""
        return Path(self.podman("volume", "inspect", "--format", "{{.Mountpoint}}", f"{PROJECT}_{name}"))

    def clear(self) -> None:
        """Remove the project's containers, networks and volumes. Images stay: they take minutes to build."""
        for kind, listing in (("", ["ps", "--all"]), ("network", ["network", "ls"]), ("volume", ["volume", "ls"])):
            found = self.podman(*listing, "--quiet", "--filter", LABEL).split()
            if found:
                self.podman(*kind.split(), "rm", "--force", *found)


@contextmanager
def compose(models: Path, recipe: Path, teacher: str) -> Iterator[Compose]:
    """The project with both images built and nothing running; cleared before and after.

    Variables say how images are built where the defaults will not do: OPD_BASE_IMAGE instead of a Debian with Python,
    PIP_EXTRA_INDEX_URL instead of PyTorch's index of CPU builds, and OPD_BUILD_FLAGS for `podman build`, such as `-v`
    for a pip.conf.

    Args:
        models: folder whose contents are in the volume `models`.
        recipe: the student's.
        teacher: path of the teacher in its container.
    """
    with tempfile.TemporaryDirectory(prefix="containers-") as folder:
        settings = Path(folder) / "containers.conf"
        settings.write_text(
            SETTINGS.format(files=_limit(resource.RLIMIT_NOFILE), processes=_limit(resource.RLIMIT_NPROC))
        )
        given = {"TEACHER": teacher, "RECIPE": str(recipe), "PYTHON": os.environ.get("OPD_BASE_IMAGE", BASE)}
        made = Compose({**os.environ, **given, "CONTAINERS_CONF": str(settings)})
        made.clear()
        try:
            if given["PYTHON"] == BASE and made.ask("podman", "image", "exists", BASE).returncode:
                _debian(made, Path(folder) / "base")
            for service in ("teacher", "student"):  # not at once, or each would install the packages that both have
                made.compose("build", service, seconds=3000)
            made.podman("volume", "create", "--label", LABEL.removeprefix("label="), f"{PROJECT}_models")
            shutil.copytree(models, made.volume("models"), dirs_exist_ok=True)
            yield made
        finally:
            made.clear()


def steps(made: Compose, run: str) -> list[dict[str, Any]]:
    """The steps that a run in the volume `runs` has logged."""
    log = made.volume("runs") / run / "metrics.jsonl"
    return [json.loads(line) for line in log.read_text().splitlines()] if log.exists() else []


def _limit(kind: int) -> int:
    """A limit that Podman may set even where it may not raise those that it has: its own defaults are a million."""
    hard = resource.getrlimit(kind)[1]
    return 20_000 if hard == resource.RLIM_INFINITY else min(hard, 20_000)


def _debian(made: Compose, folder: Path) -> None:
    """Make the base image without a registry: the smallest Debian with what the Dockerfile asks of a Python image."""
    done = made.ask("debootstrap", "--variant=minbase", f"--include={PACKAGES}", "bookworm", str(folder), seconds=1800)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr
    pack = f"tar -C {shlex.quote(str(folder))} -c . | podman import - {BASE}"
    done = made.ask("bash", "-o", "pipefail", "-c", pack, seconds=1800)
    assert done.returncode == 0, done.stderr
