"""The Compose file of deploy/containers, run by podman-compose with images built from the Dockerfile, on CPU."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from composes import Compose, compose, steps, why_not
from deployed_job import student_recipe

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(3600),  # the images are built
    pytest.mark.skipif(why_not() is not None, reason=why_not() or ""),
]

RUN = "first"


@pytest.fixture
def project(world: Path, tmp_path: Path) -> Iterator[Compose]:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(student_recipe("/models", ["teacher:7070"], run=f"/runs/{RUN}")))
    with compose(world, recipe, "/models/teacher") as made:
        yield made


def goes_on(project: Compose) -> None:
    """Wait for more steps of the run."""
    done = len(steps(project, RUN))
    project.until(lambda: len(steps(project, RUN)) > done)


def test_a_student_outlives_its_teacher_and_is_continued_from_the_volume(project: Compose) -> None:
    project.compose("up", "-d", "teacher")
    project.until(lambda: project.is_healthy("teacher"))
    project.compose("up", "-d", "student")
    project.until(lambda: project.is_healthy("student"))
    goes_on(project)
    for service in ("teacher", "student"):
        assert project.podman("exec", project.container(service), "id", "-u") == "10001"
        assert project.show(service, "{{.HostConfig.ReadonlyRootfs}} {{.EffectiveCaps}}") == "true []"
    assert (project.volume("runs") / RUN / "metrics.jsonl").stat().st_uid == 10001

    # Not by Podman, for which it would be a container that somebody has stopped.
    training = project.show("student", "{{.State.Pid}}")
    os.kill(int(project.show("teacher", "{{.State.Pid}}")), signal.SIGKILL)
    project.until(lambda: project.show("teacher", "{{.RestartCount}} {{.State.Status}}") == "1 running")
    project.until(lambda: project.is_healthy("teacher"))
    goes_on(project)
    assert project.show("student", "{{.State.Pid}}") == training

    project.compose("stop", "student")
    assert project.show("student", "{{.State.Status}} {{.State.ExitCode}}") == "exited 130", project.logs()
    done = steps(project, RUN)
    checkpoints = project.volume("runs") / RUN / "checkpoints"
    assert [each.name for each in checkpoints.iterdir()] == [f"step-{done[-1]['step']:06d}"]
    project.compose("stop", "teacher")
    assert project.show("teacher", "{{.State.Status}} {{.State.ExitCode}}") == "exited 0", project.logs()

    # Other containers, the same volumes.
    project.compose("down")
    project.compose("up", "-d", "teacher")
    project.until(lambda: project.is_healthy("teacher"))
    last = done[-1]["step"] + 2
    project.compose("run", "--rm", "-T", "student", "train", "/recipe.yaml", "--resume", f"train.steps={last}")
    done = steps(project, RUN)
    assert [each["step"] for each in done] == list(range(1, last + 1))
    assert {each["sampled_rows"] for each in done} == {8.0}
    assert (checkpoints / f"step-{last:06d}").is_dir()
