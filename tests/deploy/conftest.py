"""A real Prometheus for the tests of alerts and dashboards: on the PATH, or where `make prometheus` unpacks it."""

import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.error import URLError
from urllib.parse import urlencode
from urllib.request import urlopen

import pytest
import yaml
from ports import held_port
from waiting import wait_until

ROOT = Path(__file__).parents[2]
UNPACKED = Path(sys.prefix) / "prometheus" / "usr" / "bin"


def tool(name: str) -> str:
    """Path of prometheus or promtool; skips the test where there is none."""
    found = shutil.which(name) or shutil.which(name, path=str(UNPACKED))
    if found is None:
        pytest.skip(f"{name} is not installed; `make prometheus` gets it")
    return found


class Prometheus:
    """A Prometheus server that scrapes the given targets every second.

    Args:
        folder: for its configuration and data.
        targets: job to addresses.
    """

    def __init__(self, folder: Path, targets: dict[str, Sequence[str]]) -> None:
        self._port = held_port()
        shutil.copy(ROOT / "deploy" / "prometheus" / "alerts.yml", folder)
        static = [(job, {"targets": list(to), "labels": {"namespace": "opd"}}) for job, to in targets.items()]
        jobs = [{"job_name": job, "static_configs": [config]} for job, config in static]
        settings = {"global": {"scrape_interval": "1s", "scrape_timeout": "1s", "evaluation_interval": "1s"}}
        config = folder / "prometheus.yml"
        config.write_text(yaml.safe_dump({**settings, "rule_files": ["alerts.yml"], "scrape_configs": jobs}))
        flags = [f"--config.file={config}", f"--storage.tsdb.path={folder}/data"]
        self._log = (folder / "log").open("wb")
        self._process = subprocess.Popen(
            [tool("prometheus"), *flags, f"--web.listen-address=127.0.0.1:{self._port}"],
            stdout=self._log,
            stderr=subprocess.STDOUT,
        )
        self.until(lambda: self.api("targets") is not None)

    def api(self, path: str, **query: str) -> Any:
        """What the HTTP API answers, or None while it does not."""
        try:
            with urlopen(f"http://127.0.0.1:{self._port}/api/v1/{path}?{urlencode(query)}", timeout=120) as answer:
                return json.load(answer)["data"]
        except (URLError, ConnectionError):
            if self._process.poll() is not None:
                raise
            return None

    def ask(self, expression: str) -> list[dict[str, Any]]:
        """The vector that an expression gives now."""
        found = self.api("query", query=expression)
        assert found is not None and found["resultType"] == "vector", expression
        return found["result"]

    def until(self, holds: Callable[[], Any], why: str = "") -> None:
        """Wait for an event at the server; a scrape that comes too late leaves a gap, which the next one fills."""
        wait_until(lambda: holds() or self._process.poll() is not None, why=lambda: why)
        assert self._process.poll() is None

    def close(self) -> None:
        """Stop it."""
        self._process.kill()
        self._process.wait()
        self._log.close()


@pytest.fixture
def prometheus(tmp_path: Path) -> Iterator[Callable[..., Prometheus]]:
    """Start a Prometheus on targets; it ends with the test."""
    started: list[Prometheus] = []

    def start(**targets: Sequence[str]) -> Prometheus:
        folder = tmp_path / "prometheus"
        folder.mkdir()
        started.append(Prometheus(folder, {job.replace("_", "-"): to for job, to in targets.items()}))
        return started[-1]

    yield start
    for server in started:
        server.close()


@pytest.fixture
def promtool() -> str:
    return tool("promtool")
