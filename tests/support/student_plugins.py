"""Plug-ins that runs of tests name by their dotted path, also in processes of their own (see `PYTHONPATH` there)."""

import copy
import os
import signal
from collections.abc import Iterable, Sequence
from dataclasses import replace
from random import Random
from typing import Any

import torch

from opd.errors import ConfigError, DataError, RolloutEngineError
from opd.tasks.arithmetic import Addition
from opd.tasks.prompt import Prompt
from opd.tasks.verdict import Verdict
from student.data.row import Row
from student.data.token_batch import TokenBatch
from student.plugin.controllers import Controller
from student.plugin.terms import Term, TermOutput
from student.rl.losses.grpo import Grpo
from student.rollout.engine import EngineSetup, RolloutEngine, RolloutEngineSettings, TransformersRollout
from student.rollout.transformers import rollout
from student.settings.recipe import Recipe


class Digits(Addition):
    """Sums whose reward is the share of low digits in the answer: a model that is hardly trained earns some."""

    def verify(self, prompt: Prompt, completion: str) -> Verdict:
        return Verdict.score(0.9 * sum(c in "01234" for c in completion) / max(1, len(completion)))


class Halves(Digits):
    """The same where the sum is even; with an odd sum every answer earns nothing, so that its group prefers nothing."""

    def verify(self, prompt: Prompt, completion: str) -> Verdict:
        return super().verify(prompt, completion) if int(prompt.answer or 0) % 2 == 0 else Verdict.score(0.0)


class TwoTries(Addition):
    """Sums that are played: answers of even length are right, and wrong ones get a second try."""

    def draw(self, random: Random) -> Prompt:
        prompt = super().draw(random)
        place = {"name": "again", "options": {"verifier": "student_plugins:Even", "word": "?"}}
        return replace(prompt, extra={**prompt.extra, "environment": place})


class Measured(Addition):
    """Sums that are played in two turns whose digits are measured."""

    def draw(self, random: Random) -> Prompt:
        prompt = super().draw(random)
        return replace(prompt, extra={**prompt.extra, "environment": {"name": "environments:Profiled"}})


class Even:
    """A verifier to which answers of even length are right."""

    def __init__(self, timeout: float = 1.0) -> None:
        pass

    def verify(self, prompt: Prompt, completion: str) -> Verdict:
        return Verdict.of(len(completion) % 2 == 0, f"{len(completion)} letters")

    def close(self) -> None:
        pass


class DropStep(Controller):
    """Drops every row of the second step."""

    def compose(self, rows: list[Row]) -> list[Row]:
        return [row for row in rows if row.key.step != 1]


class DropFirstRank(Controller):
    """Drops every row of the first rank."""

    def compose(self, rows: list[Row]) -> list[Row]:
        import torch

        alone = not torch.distributed.is_initialized()
        return rows if alone or torch.distributed.get_rank() else []


class FailsToStart(Controller):
    """Refuses every recipe on rank 0."""

    def check(self, recipe: Recipe, terms: Sequence[Term]) -> None:
        if os.environ.get("RANK") == "0":
            raise ConfigError("this rank lacks what the method needs; install it.")


class FailsToCompose(Controller):
    """Fails on rank 1 with the rows of the second step, once they have been scored."""

    def compose(self, rows: list[Row]) -> list[Row]:
        if os.environ.get("RANK") == "1" and any(row.key.step == 1 for row in rows):
            raise DataError("a row of this rank is broken; drop it.")
        return rows


class FailsAtThird(Grpo):
    """Its loss is infinite in the third update of the second step."""

    calls = 0

    def token_losses(self, batch: TokenBatch) -> TermOutput:
        output = super().token_losses(batch)
        assert output.loss is not None
        if batch.rows[0].key.step == 1:
            type(self).calls += 1
        return TermOutput(output.loss * (float("inf") if type(self).calls == 3 else 1.0), metrics=output.metrics)


class FailsOnRank1(Grpo):
    """Its loss fails on rank 1 in the second step, between the gathers of a forward and those of its backward."""

    def token_losses(self, batch: TokenBatch) -> TermOutput:
        if batch.rows[0].key.step == 1 and os.environ.get("RANK") == "1":
            raise DataError("a row of this rank is broken; drop it.")
        return super().token_losses(batch)


class FailingEngineSettings(RolloutEngineSettings):
    """Where `FailingEngine` fails."""

    at: str
    call: int = 1
    lost: bool = False


class FailingEngine(TransformersRollout[FailingEngineSettings]):
    """Samples as ever, but on rank 1 it fails in a call for a certain purpose, or has the rank killed."""

    def open(self, setup: EngineSetup) -> None:
        super().open(setup)
        self.calls = 0

    def sample(self, planned: Any, *, purpose: Any = ("rollout",), on_row: Any = lambda row: None) -> list[Row]:
        self.calls += purpose[0] == self.settings.at
        if self.calls == self.settings.call and purpose[0] == self.settings.at and os.environ.get("RANK") == "1":
            if self.settings.lost:
                os.kill(os.getpid(), signal.SIGKILL)
            raise RolloutEngineError(f"the engine lost its memory in {purpose[0]!r}; start it again.")
        return super().sample(planned, purpose=purpose, on_row=on_row)


class CopyEngine(RolloutEngine):
    """Samples from a copy of the weights that it holds, as an inference server does: one missed sync shows."""

    syncs = 0

    def open(self, setup: EngineSetup) -> None:
        super().open(setup)
        self.copy = copy.deepcopy(setup.model)
        with torch.no_grad():
            for parameter in self.copy.parameters():
                parameter.zero_()

    def sync(self, parameters: Iterable[tuple[str, torch.Tensor]], version: int) -> None:
        super().sync(parameters, version)
        type(self).syncs += 1
        mine = dict(self.copy.named_parameters())
        with torch.no_grad():
            for name, tensor in parameters:
                mine[name].copy_(tensor)

    def sample(self, planned: Any, *, purpose: Any = ("rollout",), on_row: Any = lambda row: None) -> list[Row]:
        setup, version = self.setup, self.version
        return rollout(
            self.copy,
            setup.tokenizer,
            planned,
            setup.spec,
            policy_version=version,
            purpose=purpose,
            on_row=on_row,
        )
