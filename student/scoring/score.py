"""Score rows: route each to its teacher, send the requests that the objective needs, verify, wait.

A row is submitted the moment its rollout finishes, so the fleet works while the student still samples.
"""

import time
from collections.abc import Callable, Collection, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from opd.errors import ConfigError
from opd.fleet.membership.outage import OutageHooks, OutageWatch
from opd.fleet.source import ScoreSource
from opd.tasks.prompt import Prompt
from opd.tasks.source import PromptSource
from opd.wire.types import Head, PayloadKind, Scores
from student.data.row import Row, SignalKey
from student.learning.terms import HeadWeights
from student.recipe import TeacherSettings
from student.scoring.needs import REFERENCE, Needs, teacher_role
from student.scoring.routing import Destination, Router, RouteRule, RoutingSettings, mix_scores

_POLL_SECONDS = 0.5


def build_router(settings: TeacherSettings, served: Sequence[str]) -> Router:
    """The routes of a recipe: a prompt's own teacher, else its domain's, else the default or the only one served.

    Raises:
        ConfigError: when a route names a teacher that is not served.
    """
    others = [name for name in served if name != settings.reference]
    default = settings.default if settings.default is not None or len(others) != 1 else others[0]
    rules = [RouteRule(when={"domain": domain}, teacher=teacher) for domain, teacher in settings.routes.items()]
    return Router(RoutingSettings(rules=rules, default=default, combine=settings.combine), served)


def destination(router: Router, prompt: Prompt) -> Destination:
    """Where answers to `prompt` are scored.

    Raises:
        ConfigError: when nothing names a teacher for it.
    """
    return router.route({"uid": prompt.uid, "teacher": prompt.teacher, "domain": prompt.domain})


@dataclass(frozen=True, slots=True)
class _Call:
    """A request for one signal of a row, with the weight of its teacher in the signal."""

    key: SignalKey
    weight: float
    future: Future[Scores]


class Scorer:
    """Collects the signals of rows.

    Args:
        fleet: the served models; None when no term needs any.
        settings: the recipe's `teachers` group.
        needs: what the terms need.
        source: verifies answers when a term needs rewards.
        device: where heads of hidden payloads go.
        known: served models that the handshake has checked; None for all.

    Attributes:
        hooks: what to call, in the waiting thread, while a teacher is away.
    """

    def __init__(
        self,
        fleet: ScoreSource | None,
        settings: TeacherSettings | None,
        needs: Needs,
        source: PromptSource,
        device: torch.device,
        *,
        known: Collection[str] | None = None,
    ) -> None:
        self._fleet = fleet
        self._settings = settings
        self.needs = needs
        self._source = source
        self._device = device
        served = sorted(fleet.teachers()) if fleet is not None else []
        self._known = served if known is None else known
        self._heads: dict[str, HeadWeights] = {}
        self._router = build_router(settings, served) if settings is not None and needs.teacher else None
        self._pending: dict[int, list[_Call]] = {}
        self.hooks = OutageHooks()

    def submit(self, row: Row) -> None:
        """Start scoring a row; returns at once."""
        if self._fleet is None:
            return
        parts = self._route(row)
        calls: list[_Call] = []
        for need in self.needs.signals:
            item = row.score_item(gather=need.spec.kind is PayloadKind.GATHER)
            for role, name, weight in self._targets(need.role, row, parts):
                future = self._fleet.submit(name, item, need.spec, temperature=need.temperature, group=row.key.group)
                calls.append(_Call((role, need.spec.kind), weight, future))
        self._pending[id(row)] = calls

    def _route(self, row: Row) -> Sequence[tuple[str, float]]:
        """Give a row its teachers, with weights; none where no term needs any.

        Raises:
            ConfigError: when no teacher is mapped, or one that the handshake has not seen.
        """
        if self._router is None:
            return ()
        found = destination(self._router, row.prompt)
        parts = found.parts
        for name, _ in parts:
            if name not in self._known:
                raise ConfigError(
                    f"prompt {row.prompt.uid} goes to teacher {name!r}, which was not checked before the run, because "
                    "its task does not declare its labels; name that teacher in teachers.routes."
                )
        row.teachers = parts if found.combine == "divergence" and len(parts) > 1 else ()
        row.teacher = parts[0][0] if len(parts) == 1 else " + ".join(f"{weight:g} {name}" for name, weight in parts)
        return parts

    def _targets(self, role: str, row: Row, parts: Sequence[tuple[str, float]]) -> list[tuple[str, str, float]]:
        """(role in `row.signals`, served model, weight in that signal) for what a term calls `role`."""
        if role == REFERENCE:
            if self._settings is None or self._settings.reference is None:
                raise ConfigError("the objective needs a reference; set teachers.reference to a served model.")
            return [(role, self._settings.reference, 1.0)]
        if row.teachers:
            return [(teacher_role(name), name, 1.0) for name, _ in parts]
        return [(role, name, weight) for name, weight in parts]

    def positions(self, rows: Sequence[Row]) -> dict[str, int]:
        """Prompt and response positions in the requests for `rows`, by role; each teacher of a row gets its own."""
        found: dict[str, int] = {}
        for row in rows:
            parts = self._route(row)
            for need in self.needs.signals:
                requests = len(self._targets(need.role, row, parts))
                found[need.role] = found.get(need.role, 0) + requests * (len(row.prompt_ids) + row.length)
        return found

    def collect(self, rows: Sequence[Row], *, poll: Callable[[], None] = lambda: None) -> float:
        """Wait until every row has its signals and, when a term needs rewards, its verdict.

        Args:
            rows: rows that were submitted.
            poll: called about twice a second while waiting; may raise to give up (then all calls are cancelled).

        Returns:
            Seconds spent waiting for the fleet.
        """
        if self.needs.reward:
            for row in rows:
                row.verdict = self._source.verify(row.prompt, row.text)
        begin = time.monotonic()
        calls = {id(row): self._pending.pop(id(row), []) for row in rows}
        futures = [call.future for row in rows for call in calls[id(row)]]
        try:
            self._wait(futures, poll)
        finally:
            for future in futures:
                future.cancel()
        for row in rows:
            answers: dict[SignalKey, list[tuple[Scores, float]]] = {}
            for call in calls[id(row)]:
                answers.setdefault(call.key, []).append((call.future.result(), call.weight))
            for key, parts in answers.items():
                row.signals[key] = parts[0][0] if len(parts) == 1 else mix_scores(parts)
        return time.monotonic() - begin

    def _wait(self, futures: Sequence[Future[Scores]], poll: Callable[[], None]) -> None:
        """Wait for all futures, telling the hooks about outages and polling in between."""
        if self._fleet is None or self._settings is None:
            return
        watch = OutageWatch(self._settings.fleet.outage, self.hooks)
        waiting = set(futures)
        while waiting:
            done, waiting = wait(waiting, timeout=_POLL_SECONDS, return_when=FIRST_EXCEPTION)
            for future in done:
                future.result()
            if waiting:
                poll()
                watch.see(self._fleet.outages())
        watch.see([])

    def head_of(self, role: str, row: Row) -> HeadWeights:
        """The head of the model that `role` means for `row`, float32 on the device, fetched once."""
        if self._fleet is None or self._settings is None:
            raise ConfigError("hidden payloads need served models; set teachers.endpoints.")
        own = {teacher_role(teacher): teacher for teacher, _ in row.teachers}
        name = (self._settings.reference if role == REFERENCE else own.get(role, row.teacher)) or ""
        head = self._fleet.head(name)
        key = f"{name}/{head.hash}"
        found = self._heads.get(key)
        if found is None:
            found = _to_device(head, self._device)
            # Replaced and never changed, because a probe asks in its own thread.
            others = {k: v for k, v in self._heads.items() if not k.startswith(f"{name}/")}
            self._heads = {**others, key: found}
        return found


def _to_device(head: Head, device: torch.device) -> HeadWeights:
    def tensor(array: np.ndarray[Any, Any]) -> torch.Tensor:
        host = torch.from_numpy(array)
        return (host.view(torch.bfloat16) if head.dtype == "bf16" else host).float().to(device)

    bias = None if head.bias is None else tensor(head.bias)
    return HeadWeights(tensor(head.weight), bias, head.logit_scale, head.soft_cap)
