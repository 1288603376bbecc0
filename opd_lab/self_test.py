"""`opd doctor --self-test`: scores a tiny student's answers on a real server on this machine, with every payload.

The server has two teachers: the student's own weights and other ones. From its own weights the student must receive
the log-probs that it computes itself, and get gradient 0. The other teacher must give a gradient that is not 0; without
this the test could pass although nothing is compared.
"""

import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from opd.doctor.finding import Finding
from opd.errors import OpdError
from opd.wire.types import PayloadKind
from opd_lab.tiny.model import make_model
from opd_lab.tiny.plans import Shape
from opd_lab.tiny.tokenizer import make_tokenizer
from student.data.needs import TEACHER
from student.data.plan import plan_step
from student.data.row import Row
from student.job.job import build_job
from student.run.local_server import CPU, served
from student.settings.recipe import Recipe

PAYLOADS = ("sampled", "gather", "topk", "hidden")
_ROWS, _TOKENS = 32, 16
_NATS = 1e-3
"""Largest difference between log-probs that rounding explains, in float32 on any device."""
_ZERO = 0.01
"""Gradient norm that counts as 0, as a share of the other teacher's; hidden states cross the wire in bfloat16."""


@dataclass(frozen=True, slots=True)
class Passed:
    """What was measured with one teacher and one payload.

    Attributes:
        gap: largest absolute difference between served log-probs and the student's own, in nats; nan for hidden states,
            which have no log-probs to compare.
        gradient: Euclidean norm of the objective's gradient.
        speed: prompt and response tokens scored per second.
    """

    gap: float
    gradient: float
    speed: float


def examine_chain() -> Iterator[Finding]:
    """Make the two models, serve them, and give a finding for each payload; an error ends the test as a failure."""
    with tempfile.TemporaryDirectory(prefix="opd-self-test-") as folder, ExitStack() as stack:
        place = Path(folder)
        for name, seed in (("student", 0), ("other", 1)):
            make_model(Shape(hidden=64, layers=2, heads=2, vocabulary=260), seed).save_pretrained(place / name)
            make_tokenizer().save_pretrained(place / name)
        flags = ("--dtype", "float32") if torch.cuda.is_available() else CPU
        try:
            models = {"itself": place / "student", "other": place / "other"}
            address = stack.enter_context(served(models, place / "server", flags))
            yield from examine_payloads(place / "student", address, *models)
        except OpdError as error:
            yield Finding("fail", "self-test", str(error))


def examine_payloads(student: Path, address: str, itself: str, other: str) -> Iterator[Finding]:
    """Give a finding for each payload.

    Args:
        student: folder of the student's model.
        address: host:port of a server.
        itself: name under which it serves the student's own weights.
        other: name under which it serves another teacher.
    """
    for payload in PAYLOADS:
        same, away = (through(student, address, name, payload) for name in (itself, other))
        yield _finding(payload, same, away)


def _finding(payload: str, same: Passed, other: Passed) -> Finding:
    agrees = np.isnan(same.gap) or same.gap < _NATS
    well = agrees and same.gradient < _ZERO * other.gradient
    text = (
        f"{payload}: {'' if np.isnan(same.gap) else f'served = computed here to {same.gap:.1g} nats; '}"
        f"student = teacher has gradient {same.gradient:.1g}, another teacher {other.gradient:.2g}; "
        f"{same.speed:,.0f} tokens/s"
    )
    return Finding("ok" if well else "fail", "self-test", text if well else f"{text}: something in the chain is wrong")


def through(model: Path, address: str, teacher: str, payload: str) -> Passed:
    """Sample rows, have `teacher` score them with `payload`, and compute the gradient; no weights are updated."""
    sized = {} if payload in ("sampled", "hidden") else {"k": 16}
    recipe = Recipe.model_validate(
        {
            "run": "self-test",
            "model": {"path": str(model), "dtype": "float32"},
            "teachers": {"endpoints": [address], "default": teacher},
            "prompts": {"task": "addition"},
            "rollout": {"max_new_tokens": _TOKENS, "max_prompt_tokens": 64},
            "objective": [{"name": "opd", "payload": payload, "aggregation": "constant", **sized}],
            "train": {"mixed_precision": "no", "threads": 1},
        }
    )
    with ExitStack() as stack:
        job = build_job(recipe, stack, poll=lambda: None)
        prompts = job.services.training_prompts(_ROWS, seed_names=("self-test",))
        plan = plan_step(0, prompts, samples=1, max_new_tokens=_TOKENS, temperature=1.0)
        rows = job.services.rollout(plan)
        begin = time.monotonic()
        job.services.score(rows)
        seconds = time.monotonic() - begin
        # No optimizer step, since only the gradient is of interest.
        job.learner.accumulate(rows)
        gradient = _norm(job.learner.student)
    tokens = sum(len(row.prompt_ids) + row.length for row in rows)
    return Passed(max(map(_gap, rows)), gradient, tokens / seconds)


def _gap(row: Row) -> float:
    scores = next(row.signals[TEACHER, kind] for kind in PayloadKind if (TEACHER, kind) in row.signals)
    return float("nan") if scores.sampled is None else float(np.abs(scores.sampled - row.behaviour_logp).max())


def _norm(module: Any) -> float:
    grads = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    return float(torch.stack([grad.norm() for grad in grads]).norm())
