"""Maps the stop tokens of teachers onto the student's, if the two end a response with different tokens.

A base student stops with another token than an instruct teacher (<|endoftext|> and <|im_end|> in Qwen3). The teacher
then gives the student's stop token a log-ratio of about -25, and distillation teaches the student never to stop. As
events, that is by the probability of stopping at this point, the two may well agree: log-ratio -1.

At every position, `StopMap` moves the teacher's probability of stop tokens v that do not end the student's responses
onto the student's stop tokens s in S, in equal shares: T'(s) = T(s) + (1 - e^-10) sum_v T(v) / |S|, T'(v) = e^-10 T(v).
T' is a distribution again, so every divergence and estimator keeps its meaning, with T' in place of T.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from opd.errors import ConfigError, IncompatibleTeacherError
from opd.heads import OutputHead, from_bits
from opd.tasks.stops import STOP_ADVICE, shown
from opd.wire.types import PayloadKind, PayloadSpec, ScoreItem, Scores
from opd.wire.v1 import teacher_pb2 as pb
from student.data.needs import TEACHER, Needs
from student.data.row import Row
from student.settings.recipe import Recipe

_LEFT = 10.0
"""Nats by which the log-prob of a moved stop token falls; a little is left, so that log-probs stay finite."""

_ROWS = 256
"""Number of last positions that are projected to logits together."""


def teacher_stops(info: pb.TeacherInfo) -> frozenset[int]:
    """Ids that end a response of a served model; only its tokenizer's end of sequence if the server lists none."""
    listed = frozenset(info.stop_token_ids)
    return listed or frozenset({info.tokenizer.eos_id} - {-1})


class StopMap:
    """Maps the stop tokens of served models onto the student's.

    Args:
        student: ids that end the student's responses.
        teachers: ids that end a response, by served model.
    """

    def __init__(self, student: Iterable[int], teachers: Mapping[str, Iterable[int]]) -> None:
        self._student = np.array(sorted(set(student)), dtype=np.uint32)
        foreign = {name: sorted(set(ids) - set(self._student.tolist())) for name, ids in teachers.items()}
        self._foreign = {
            name: np.array(ids, dtype=np.uint32) for name, ids in foreign.items() if ids and len(self._student)
        }

    @property
    def ids(self) -> tuple[int, ...]:
        """Ids that must be among the candidates at which teachers are asked: all between which mass is moved."""
        if not self._foreign:
            return ()
        return tuple(sorted({*self._student.tolist(), *(int(i) for ids in self._foreign.values() for i in ids)}))

    def ask(self, model: str, spec: PayloadSpec, item: ScoreItem) -> tuple[PayloadSpec, ScoreItem]:
        """What to request in place of `spec`; for sampled log-probs, those of foreign stop tokens are needed too."""
        foreign = self._foreign.get(model)
        if foreign is None or spec.kind is not PayloadKind.SAMPLED:
            return spec, item
        ids = np.ascontiguousarray(np.broadcast_to(foreign, (item.scored_length, len(foreign))))
        return PayloadSpec.gather(len(foreign), "f32"), replace(item, gather_ids=ids)

    def apply(self, model: str, spec: PayloadSpec, item: ScoreItem, scores: Scores) -> Scores:
        """Convert the answer to `ask(model, spec, item)` into what the mapped model would have answered to `spec`."""
        foreign = self._foreign.get(model)
        if foreign is None:
            return scores
        if scores.ids is None or scores.values is None or scores.sampled is None:
            raise ConfigError(f"teachers.map_stops cannot change payload {spec.kind}; use sampled, gather or topk.")
        ids, values = scores.ids, scores.values.astype(np.float64)
        theirs = np.isin(ids, foreign)
        # Log of the mass that moves, (1 - e^-10) sum_v T(v); -inf at positions of a top-k that has no foreign stop.
        with np.errstate(divide="ignore"):
            moved = np.log(np.where(theirs, np.exp(values), 0.0).sum(-1)) + np.log1p(-np.exp(-_LEFT))
        values = np.where(theirs, values - _LEFT, values)
        if spec.kind is PayloadKind.TOPK:
            ids, values = self._make_room(ids, values, theirs)
        ours = np.isin(ids, self._student)
        # A gather holds all of the student's stop tokens (`ids` are kept candidates); a top-k may hold some of them,
        # and those share the mass, or part of it would leave the distribution.
        receivers = len(self._student) if spec.kind is not PayloadKind.TOPK else np.maximum(ours.sum(-1), 1)
        share = moved - np.log(receivers)
        values = np.where(ours, np.logaddexp(values, share[:, None]), values)
        sampled = self._sampled(item.scored_ids, scores.sampled, foreign, share, ids if spec.k else None)
        if spec.kind is PayloadKind.SAMPLED:
            return replace(scores, sampled=sampled, ids=None, values=None, log_tail=None)
        if spec.kind is PayloadKind.TOPK:  # descending again, as readers of a top-k expect
            order = np.argsort(-values, axis=-1, kind="stable")
            ids, values = np.take_along_axis(ids, order, -1), np.take_along_axis(values, order, -1)
        return replace(scores, sampled=sampled, ids=ids, values=values.astype(np.float32))

    def _make_room(
        self, ids: NDArray[np.uint32], values: NDArray[np.float64], theirs: NDArray[np.bool_]
    ) -> tuple[NDArray[np.uint32], NDArray[np.float64]]:
        """If a top-k has a foreign stop token but none of the student's, put the student's first in its place."""
        ids = ids.copy()
        for position in np.flatnonzero(theirs.any(-1) & ~np.isin(ids, self._student).any(-1)):
            ids[position, int(theirs[position].argmax())] = self._student[0]
        return ids, values

    def _sampled(
        self,
        response: NDArray[np.uint32],
        sampled: NDArray[np.float32],
        foreign: NDArray[np.uint32],
        share: NDArray[np.float64],
        ids: NDArray[np.uint32] | None,
    ) -> NDArray[np.float32]:
        # Where the mass was shared among listed ids only, a sampled stop token outside the list got none.
        receives = np.isin(response, self._student)
        if ids is not None:
            receives &= (ids == response[:, None]).any(-1)
        mapped = np.where(receives, np.logaddexp(sampled.astype(np.float64), share), sampled)
        return np.where(np.isin(response, foreign), mapped - _LEFT, mapped).astype(np.float32)


def map_of(recipe: Recipe, student: Iterable[int], infos: Mapping[str, pb.TeacherInfo], needs: Needs) -> StopMap:
    """The map that a recipe asks for; it changes nothing if the recipe asks for none.

    Args:
        recipe: says whether stop tokens are mapped.
        student: ids that end the student's responses.
        infos: the served models.
        needs: what the terms need from them.

    Raises:
        ConfigError: for hidden states, or too few candidates.
        IncompatibleTeacherError: for a model that cannot be asked for log-probs at given ids.
    """
    if recipe.teachers is None or not recipe.teachers.map_stops:
        return StopMap((), {})
    stops = StopMap(student, {name: teacher_stops(info) for name, info in infos.items()})
    if stops.ids:
        _check(needs, infos, stops)
    return stops


def foreign_stops(
    recipe: Recipe, student: Iterable[int], infos: Mapping[str, pb.TeacherInfo], tokenizer: Any
) -> Iterator[str]:
    """A line for each teacher that ends a response with tokens that do not end the student's."""
    mine = set(student)
    mapped = recipe.teachers is not None and recipe.teachers.map_stops
    for name, info in infos.items():
        foreign = sorted(teacher_stops(info) - mine)
        if foreign:
            what = "its probability of them is mapped onto the student's stop tokens" if mapped else STOP_ADVICE
            pieces = shown(foreign, tokenizer)
            yield f"teacher {name} also ends with {pieces}, after which the student continues: {what}"


def _check(needs: Needs, infos: Mapping[str, pb.TeacherInfo], stops: StopMap) -> None:
    for need in needs.signals:
        if need.spec.kind in (PayloadKind.HIDDEN, PayloadKind.FULL):
            raise ConfigError(
                f"teachers.map_stops cannot change payload {need.spec.kind}; use sampled, gather or topk, or name the "
                "teacher's stop tokens in rollout.stop_tokens instead."
            )
        if need.spec.kind is PayloadKind.GATHER and need.spec.k <= len(stops.ids):
            raise ConfigError(
                f"teachers.map_stops keeps {len(stops.ids)} stop tokens among the candidates, but k is {need.spec.k}; "
                "raise k."
            )
        for info in infos.values():
            if need.spec.kind is PayloadKind.SAMPLED and pb.PAYLOAD_KIND_GATHER not in info.payloads:
                raise IncompatibleTeacherError(
                    f"teachers.map_stops needs log-probs of stop tokens, but teacher {info.name!r} ({info.engine}) "
                    "does not serve payload gather; use payload topk, or name the teacher's stop tokens in "
                    "rollout.stop_tokens."
                )


def stop_log_ratios(
    rows: Iterable[Row], head_of: Callable[[str, Row], OutputHead], valid_vocab: int, temperature: float
) -> list[float]:
    """Log T - log S of the stop token, nats, for each sampled row that ended with one and has been scored.

    Args:
        rows: scored rows.
        head_of: looks up the heads of teachers, for hidden states.
        valid_vocab: number of ids that the tokenizer can produce.
        temperature: the temperature of the rollout; divides logits computed from hidden states.
    """
    ratios: list[float] = []
    unprojected: dict[int, tuple[OutputHead, list[tuple[Row, Any]]]] = {}
    for row in rows:
        # An episode may end in what its environment wrote, which has no log-prob under the student.
        if row.truncated or not row.on_policy or row.turns[1:] or np.isnan(row.behaviour_logp[-1]):
            continue
        for (role, _), scores in row.signals.items():
            if role.partition("/")[0] != TEACHER:
                continue
            if scores.sampled is not None:
                ratios.append(float(scores.sampled[-1] - row.behaviour_logp[-1]))
                break
            if scores.hidden is not None:
                head = head_of(role, row)
                unprojected.setdefault(id(head.weight), (head, []))[1].append((row, scores.hidden[-1]))
                break
    for head, ends in unprojected.values():
        ratios += _from_hidden(head, ends, valid_vocab, temperature)
    return ratios


def _from_hidden(
    head: OutputHead, ends: Sequence[tuple[Row, Any]], valid_vocab: int, temperature: float
) -> list[float]:
    """The log-ratios at the last tokens of rows, from the teacher's hidden states there."""
    import torch

    from student.model.model import ProjectionSpec, logits_of

    raw = np.stack([state for _, state in ends])
    states = from_bits(torch.from_numpy(raw)).float().to(head.weight.device)
    spec = ProjectionSpec(frozenset(), valid_vocab, temperature)
    ratios = []
    for start in range(0, len(ends), _ROWS):
        part = ends[start : start + _ROWS]
        ids = torch.tensor([int(row.response_ids[-1]) for row, _ in part], device=states.device)
        logp = logits_of(states[start : start + _ROWS], head, spec).log_softmax(-1)
        taken = logp.gather(-1, ids[:, None])[:, 0].tolist()
        ratios += [value - float(row.behaviour_logp[-1]) for value, (row, _) in zip(taken, part, strict=True)]
    return ratios
