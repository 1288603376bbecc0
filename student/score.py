"""Score rows: route each to its teacher, send the requests that the objective needs, verify, wait.

A row is submitted the moment its rollout finishes, so the fleet works while the student still samples.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from typing import Any

import numpy as np
import torch

from opd.errors import ConfigError
from opd.fleet.client import TeacherFleet
from opd.fleet.outage import OutageHooks, OutageWatch
from opd.tasks.prompt import Prompt
from opd.tasks.source import PromptSource
from opd.wire.types import Head, PayloadKind, Scores
from student.needs import REFERENCE, Needs
from student.recipe import TeacherSettings
from student.row import Row, SignalKey
from student.terms import HeadWeights

_POLL_SECONDS = 0.5


def route(prompt: Prompt, settings: TeacherSettings, served: Sequence[str]) -> str:
    """Name of the teacher that scores answers to `prompt`: its own, else its domain's, else the default.

    Raises:
        ConfigError: when nothing names a teacher.
    """
    if prompt.teacher is not None:
        return prompt.teacher
    if prompt.domain is not None and prompt.domain in settings.routes:
        return settings.routes[prompt.domain]
    if settings.default is not None:
        return settings.default
    candidates = [name for name in served if name != settings.reference]
    if len(candidates) == 1:
        return candidates[0]
    raise ConfigError(
        f"prompt {prompt.uid} (domain {prompt.domain!r}) has no teacher; set teachers.default, teachers.routes or a "
        f"teacher column. The fleet serves {', '.join(served)}."
    )


class Scorer:
    """Collects the signals of rows.

    Args:
        fleet: the served models; None when no term needs any.
        settings: the recipe's `teachers` group.
        needs: what the terms need.
        source: verifies answers when a term needs rewards.
        device: where heads of hidden payloads go.

    Attributes:
        hooks: what to call, in the waiting thread, while a teacher is away.
    """

    def __init__(
        self,
        fleet: TeacherFleet | None,
        settings: TeacherSettings | None,
        needs: Needs,
        source: PromptSource,
        device: torch.device,
    ) -> None:
        self._fleet = fleet
        self._settings = settings
        self.needs = needs
        self._source = source
        self._device = device
        self._served = sorted(fleet.teachers()) if fleet is not None else []
        self._heads: dict[str, HeadWeights] = {}
        self._pending: dict[int, list[tuple[SignalKey, Future[Scores]]]] = {}
        self.hooks = OutageHooks()

    def submit(self, row: Row) -> None:
        """Start scoring a row; returns at once."""
        if self._fleet is None or self._settings is None:
            return
        row.teacher = route(row.prompt, self._settings, self._served)
        calls: list[tuple[SignalKey, Future[Scores]]] = []
        for need in self.needs.signals:
            name = self._settings.reference if need.role == REFERENCE else row.teacher
            if name is None:
                raise ConfigError("the objective needs a reference; set teachers.reference to a served model.")
            item = row.score_item(gather=need.spec.kind is PayloadKind.GATHER)
            future = self._fleet.submit(name, item, need.spec, temperature=need.temperature, group=row.key.group)
            calls.append(((need.role, need.spec.kind), future))
        self._pending[id(row)] = calls

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
        calls = [(row, key, future) for row in rows for key, future in self._pending.pop(id(row), [])]
        try:
            self._wait([future for _, _, future in calls], poll)
        finally:
            for _, _, future in calls:
                future.cancel()
        for row, key, future in calls:
            row.signals[key] = future.result()
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
        name = (self._settings.reference if role == REFERENCE else row.teacher) or ""
        head = self._fleet.head(name)
        key = f"{name}/{head.hash}"
        if key not in self._heads:
            self._heads = {k: v for k, v in self._heads.items() if not k.startswith(f"{name}/")}
            self._heads[key] = _to_device(head, self._device)
        return self._heads[key]


def _to_device(head: Head, device: torch.device) -> HeadWeights:
    def tensor(array: np.ndarray[Any, Any]) -> torch.Tensor:
        host = torch.from_numpy(array)
        return (host.view(torch.bfloat16) if head.dtype == "bf16" else host).float().to(device)

    bias = None if head.bias is None else tensor(head.bias)
    return HeadWeights(tensor(head.weight), bias, head.logit_scale, head.soft_cap)
