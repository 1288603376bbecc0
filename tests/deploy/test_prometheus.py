"""A real Prometheus scrapes a real server and student: every alert is evaluated, every panel and series has data."""

import math
import re
import runpy
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import pytest
import yaml
from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from opd.config import parse_settings
from opd.fleet.metrics import collect_status
from opd.fleet.status.records import FleetStatus, TeacherStatus
from opd.telemetry.metrics_http import serve_metrics
from opd.wire.v1 import teacher_pb2 as pb
from opd.wire.v1 import teacher_pb2_grpc as pb_grpc
from student.job.session import train
from student.report.telemetry import Telemetry
from student.settings.recipe import Recipe
from teacher_server.observe.metrics import ServerMetrics

ROOT = Path(__file__).parents[2]
PANELS = runpy.run_path(str(ROOT / "scripts" / "dashboards.py"))
RULES = [
    rule
    for group in yaml.safe_load((ROOT / "deploy" / "prometheus" / "alerts.yml").read_text())["groups"]
    for rule in group["rules"]
]
STEPS = 3


class Lasting(Telemetry):
    """Sinks whose endpoint outlives the run, until the test ends."""

    def __init__(self, request: pytest.FixtureRequest) -> None:
        super().__init__(None, STEPS, 0)
        server, _ = serve_metrics(self.registry, 0)
        self.address = f"127.0.0.1:{server.server_port}"
        request.addfinalizer(server.server_close)
        request.addfinalizer(server.shutdown)


class Watched(Telemetry):
    """Sinks that, at the end of the run, look at it through a Prometheus before the endpoint closes."""

    def __init__(self, look: Callable[[], None]) -> None:
        super().__init__(None, STEPS, 0)
        server, _ = serve_metrics(self.registry, 0)
        self.address, self._shutdown, self._look = f"127.0.0.1:{server.server_port}", server.shutdown, look
        self._endpoint = server

    def close(self) -> None:
        try:
            self._look()
        finally:
            self._shutdown()
            self._endpoint.server_close()
            super().close()


def recipe(world: Path, address: str, run: Path) -> Recipe:
    """A run in which every mechanism that is watched takes part: domains, teachers, contexts, clips, positions."""
    sums = {"task": "addition", "options": {"digits": 2}}
    return parse_settings(
        Recipe,
        {
            "run": str(run),
            "model": {"path": str(world / "student")},
            "teachers": {"endpoints": [address], "default": "teacher", "reference": "student"},
            "contexts": {"teacher": {"prompt": "{{ prompt }}{{ answer }}", "max_tokens": 64}},
            "prompts": {
                "mix": [
                    {**sums, "domain": "sums", "teacher": "teacher"},
                    {**sums, "domain": "others", "teacher": "student"},
                ]
            },
            "rollout": {"prompts_per_step": 4, "samples_per_prompt": 2, "max_new_tokens": 12, "max_prompt_tokens": 32},
            "objective": [{"name": "opd", "payload": "hidden"}, {"name": "grpo"}],
            "train": {"steps": STEPS, "minibatches": 2, "learning_rate": 1e-3, "threads": 1},
            "eval": {"prompts": 4, "every": 1},
        },
    )


def shortened(world: Path, address: str, run: Path) -> Recipe:
    """A run with the methods that rewards of whole answers exclude: windows and jumps."""
    probes = {"name": "adwin", "windows": [4], "rows": 8, "folds": 2, "every": 1, "delay": 1, "background": False}
    return recipe(world, address, run).model_copy(
        update={
            "objective": [{"name": "opd", "payload": "sampled", "aggregation": "constant"}],
            "methods": [probes, {"name": "effopd", "tries": 1, "gate": {"kind": "reverse_kl", "prompts": 4}}],
        }
    )


def exposed(request: pytest.FixtureRequest, fill: Callable[[CollectorRegistry], object]) -> str:
    """Address of a metrics port, until the test ends."""
    registry = CollectorRegistry()
    fill(registry)
    server, thread = serve_metrics(registry, 0)
    request.addfinalizer(lambda: (server.shutdown(), server.server_close(), thread.join(10)))
    return f"127.0.0.1:{server.server_port}"


def test_a_backlog_of_a_minute_in_a_student_asks_the_autoscaler_for_more_than_one_replica(
    prometheus: Callable[..., Any], request: pytest.FixtureRequest
) -> None:
    """The series of a real client and a real server, and the arithmetic that KEDA and the autoscaler have for them."""
    scaler = yaml.safe_load((ROOT / "deploy/kubernetes/components/autoscaling/scaler.yaml").read_text())["spec"]
    metadata = scaler["triggers"][0]["metadata"]
    waiting = {"teacher": TeacherStatus("teacher", "", 1, 1, 900, 0, 80, 0.0)}

    class Client(Collector):
        def collect(self) -> Iterator[Metric]:
            return collect_status(FleetStatus(list(waiting.values()), [], []))

    def server_with_half_a_second(registry: CollectorRegistry) -> None:
        metrics = ServerMetrics()
        metrics.queued_tokens.labels("teacher").set(15_000)
        metrics.token_rate.labels("teacher").set(30_000)
        registry.register(metrics.registry)

    student = exposed(request, lambda registry: registry.register(Client()))
    server = prometheus(opd_teachers=[exposed(request, server_with_half_a_second)], opd_students=[student])

    def replicas() -> int | None:
        found = server.ask(metadata["query"])
        return math.ceil(float(found[0]["value"][1]) / float(metadata["threshold"])) if len(found) == 1 else None

    server.until(lambda: replicas() == 1, "half a second of work for the one that runs")
    waiting["teacher"] = replace(waiting["teacher"], queued_tokens=60 * 30_000)
    server.until(lambda: replicas() == 4, "60.5 s of work, 20 s for each")


def asked(expression: str) -> set[str]:
    return set(re.findall(r"\b(?:opd_\w+|up\b)", expression))


@pytest.mark.slow
def test_every_alert_and_panel_has_data_from_a_run(
    world: Path, teacher: Any, prometheus: Callable[..., Any], tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    looked = []

    def look() -> None:
        def has_data(expression: str, why: str) -> None:
            server.until(lambda: server.ask(expression), f"{why}: {expression}")

        # Rates need two scrapes of the finished run.
        last = f"opd_student_steps_total == {STEPS}"
        has_data(f"count_over_time((({last}))[1m:100ms]) > 20", "the run is not seen to end")
        boards = (PANELS[name] for name in ("FLEET_FIGURES", "FLEET", "TRAINING_FIGURES", "TRAINING"))
        for title, expression, _, _ in (PANELS["TIMELINE"], *(panel for board in boards for panel in board)):
            has_data(PANELS["plain"](expression, "5m"), title)
        for rule in RULES:
            server.ask(rule["expr"])
            for name in asked(rule["expr"]):
                has_data(name, f"{rule['alert']} asks for what nothing gives")
        server.until(lambda: all(r["health"] == "ok" for g in server.api("rules")["groups"] for r in g["rules"]))
        groups = server.api("rules")["groups"]
        firing = [r["name"] for g in groups for r in g["rules"] if r["state"] == "firing"]
        assert sum(len(g["rules"]) for g in groups) == len(RULES)
        assert not firing
        looked.append(True)

    sinks = Watched(look)
    other = Lasting(request)
    targets = {"opd_teachers": [f"127.0.0.1:{teacher.metrics_port}"], "opd_students": [sinks.address, other.address]}
    server = prometheus(**targets)
    train(shortened(world, teacher.address, tmp_path / "shortened"), telemetry=other)
    with grpc.insecure_channel(teacher.address) as channel, pytest.raises(grpc.RpcError):
        # A refusal, so that the panel of refusals has something to show.
        list(pb_grpc.TeacherServiceStub(channel).Score(pb.ScoreRequest(teacher="nobody"), timeout=120))
    train(recipe(world, teacher.address, tmp_path / "run"), telemetry=sinks)
    assert looked
