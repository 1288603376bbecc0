"""One trace from the student's step to the engine's forward."""

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from student.job.session import train
from student.settings.recipe import Recipe


@pytest.mark.slow
def test_a_steps_trace_reaches_the_engines_forward(
    world: Path, serve: Any, make_recipe: Callable[..., Recipe], collector: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in collector.environment.items():
        monkeypatch.setenv(name, value)
    server = serve("--model", f"teacher={world / 'teacher'}", "--tracing")
    train(make_recipe(tracing=True, train={"steps": 2}, eval={"prompts": 0}, teachers={"endpoints": [server.address]}))
    server.process.send_signal(signal.SIGTERM)
    assert server.process.wait(120) == 0
    spans = collector.spans
    steps = [span.trace_id for span in spans if span.name == "opd.step"]
    forwards = {span.trace_id for span in spans if span.name == "engine.forward"}
    assert len(set(steps)) == 2 and set(steps) <= forwards
    for trace in steps:
        names = {span.name for span in spans if span.trace_id == trace}
        assert {"opd.step", "rollout", "wait_teacher", "learn", "opd.score", "queue", "engine.forward"} <= names
