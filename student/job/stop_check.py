"""Checks before the first step how likely teachers find the tokens with which the student ends its answers."""

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from opd.tasks.source import PromptSource
from opd.tasks.stops import STOP_ADVICE, ends_differ, verdict_on_ends
from opd.wire.types import PayloadSpec
from opd.wire.v1 import teacher_pb2 as pb
from student.data.needs import TEACHER, Needs, SignalNeed
from student.data.plan import plan_step
from student.data.row import Row
from student.rollout.policy_sampler import PolicySampler
from student.scoring.score import Scoring
from student.scoring.stops import StopMap, stop_log_ratios, teacher_stops
from student.settings.recipe import Recipe

_PROMPTS = 8
_TOKENS = 256


class StopCheck:
    """Samples a few answers and asks the teachers for the log-probs of their last tokens.

    Args:
        recipe: gives limits, temperature and the teachers' settings.
        sampler: samples the answers.
        source: the training prompts.
        infos: the served models.
        stops: ids that end the student's responses.
        scorer_of: makes a scorer for needs and a map of stop tokens.
    """

    def __init__(
        self,
        recipe: Recipe,
        sampler: PolicySampler,
        source: PromptSource,
        infos: Mapping[str, pb.TeacherInfo],
        stops: Sequence[int],
        scorer_of: Callable[[Needs, StopMap], Scoring],
    ) -> None:
        self._recipe, self._sampler, self._source = recipe, sampler, source
        self._stops = frozenset(stops)
        self._mapped = recipe.teachers is not None and recipe.teachers.map_stops
        temperature = recipe.rollout.temperature
        if not all(info.supports_temperature for info in infos.values()):
            # For a server without temperatures: a rough ratio is enough to tell foreign stop tokens from shared ones.
            temperature = 1.0
        needs = Needs(signals=(SignalNeed(TEACHER, PayloadSpec.sampled(), temperature),))
        self._plain = scorer_of(needs, StopMap((), {}))
        events = StopMap(stops, {name: teacher_stops(info) for name, info in infos.items()})
        asks = all(pb.PAYLOAD_KIND_GATHER in info.payloads for info in infos.values())
        self._event = scorer_of(needs, events) if events.ids and asks else None

    def lines(self, poll: Callable[[], None]) -> Iterator[str]:
        """The findings in words, with a line for each teacher that scored an answer that ended by itself.

        Args:
            poll: called while waiting for the fleet.
        """
        rollout = self._recipe.rollout
        longest = min(rollout.max_new_tokens, _TOKENS)
        plan = plan_step(
            0,
            self._source.prompts("train", _PROMPTS),
            samples=1,
            max_new_tokens=longest,
            temperature=rollout.temperature,
        )
        rows = [
            row for row in self._sampler.sample(plan.rows, purpose=("stops",)) if row.response_ids[-1] in self._stops
        ]
        # Asked even with no rows: other ranks may have some, and ranks of a sharded student read only together.
        plain = self._ratios(self._plain, rows, poll)
        events = self._ratios(self._event, rows, poll) if self._event is not None else {}
        if not rows:
            yield (
                f"stop tokens: none of {_PROMPTS} answers ended within {longest} tokens, so it is not known yet "
                "whether the teachers would stop where the student does; see the metric stop_log_ratio"
            )
        for teacher, ratio in plain.items():
            ended = sum(row.teacher == teacher for row in rows)
            yield self._sentence(teacher, ended, ratio, events.get(teacher))

    def _ratios(self, scorer: Scoring, rows: Sequence[Row], poll: Callable[[], None]) -> dict[str, float]:
        """Mean log-ratio at the last tokens, nats, by teacher."""
        for row in rows:
            row.signals.clear()  # the same rows are asked about under another map of stop tokens
            scorer.ask(row)
        scorer.wait(rows, poll=poll)
        found: dict[str, list[float]] = {}
        for row in rows:
            found.setdefault(row.teacher, []).extend(stop_log_ratios([row], scorer.head_of, 0, 1.0))
        return {teacher: float(np.mean(values)) for teacher, values in found.items() if values}

    def _sentence(self, teacher: str, ended: int, ratio: float, event: float | None) -> str:
        text = f"stop tokens: where {ended} of {_PROMPTS} answers end, log T - log S is {ratio:.2f} nats ({teacher})"
        if not ends_differ(ratio, event):
            return f"{text}: {verdict_on_ends(ratio)}"
        text += f", but {event:.2f} if the teacher's own stop tokens count too"
        return (
            f"{text}, as they do with teachers.map_stops"
            if self._mapped
            else f"{text}: the two end with different tokens; {STOP_ADVICE}"
        )
