"""The divergence of each turn of an episode, shared with all ranks through the row's notes."""

from collections.abc import Mapping, Sequence

import numpy as np

from student.data.needs import TEACHER
from student.data.outcome import Outcome
from student.data.row import Row

DEPTH = "turn_depth"
"""Tag of planned episodes: the number of turns that the student plays; without it, all of them."""
_PREFIX = "turn_kl/"
_SUMMARIES = "summary_kl"


def note_turns(row: Row) -> None:
    """Note the sampled reverse KL of each turn of the student: `turn_kl/i`, nats summed over the turn's tokens.

    Turns are counted from the start of the episode, replayed ones included. Summaries do not count as turns: their sum
    is noted as `summary_kl`. Rows without the teacher's log-probs of the sampled tokens get no note, nor do given
    episodes, which the student did not sample.
    """
    signals = [scores for (role, _), scores in row.signals.items() if role == TEACHER]
    scores = next((found.sampled for found in signals if found.sampled is not None), None)
    if scores is None or row.episode is None or row.origin == "expert":
        return
    first = int(row.notes.get("replayed", 0.0))
    sums = [float((row.behaviour_logp[a:b].astype(np.float64) - scores[a:b]).sum()) for a, b in row.turns]
    acts = [value for place, value in enumerate(sums) if place not in row.summaries]
    row.notes |= {f"{_PREFIX}{turn}": value for turn, value in enumerate(acts, first)}
    if row.summaries:
        row.notes[_SUMMARIES] = sum(sums[place] for place in row.summaries)


def sampled_episodes(outcomes: Sequence[Outcome]) -> list[Outcome]:
    """The episodes that the student played, without given ones."""
    return [outcome for outcome in outcomes if "ended" in outcome.tags and outcome.origin != "expert"]


def mean_depth(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Metric turn_depth: mean number of turns for which the episodes were planned, 0 for whole ones.

    It is read from the rows, which may have been planned earlier than they are learnt from (train.max_staleness).
    """
    depths = [int(outcome.tags.get(DEPTH, 0)) for outcome in sampled_episodes(outcomes)]
    return {"turn_depth": float(np.mean(depths))} if depths else {}


def turn_divergences(outcomes: Sequence[Outcome]) -> dict[int, float]:
    """Mean sampled reverse KL of each turn, over the episodes that reached it; nats per turn, turns from 0."""
    found: dict[int, list[float]] = {}
    for outcome in outcomes:
        for turn, value in turn_notes(outcome.notes).items():
            found.setdefault(turn, []).append(value)
    return {turn: float(np.mean(values)) for turn, values in sorted(found.items())}


def turn_notes(notes: Mapping[str, float]) -> dict[int, float]:
    """The divergences noted by `note_turns`, by turn."""
    return {int(name.removeprefix(_PREFIX)): value for name, value in notes.items() if name.startswith(_PREFIX)}


def turn_metrics(outcomes: Sequence[Outcome]) -> dict[str, float]:
    """Metrics of a step's episodes, without given ones.

    Returns:
        turns: mean number of turns of the student. episodes_ended_in_replay: share of such episodes. episode_kl:
        mean KL summed over an episode, nats. summary_kl: the part of it in summaries, mean over episodes with
        summaries. kl_by_turn/N: mean of turn N, nats. kl_escalation: mean of the last third of the turns over that of
        the first third; above 1 if the student drifts away as episodes go on.
    """
    played = sampled_episodes(outcomes)
    if not played:
        return {}
    ended = [outcome.tags["ended"] for outcome in played]
    metrics = {
        "turns": float(np.mean([outcome.notes.get("turns", 0.0) for outcome in played])),
        "episodes_ended_in_replay": float(np.mean([how == "replay" for how in ended])),
    }
    by_turn = turn_divergences(played)
    if by_turn:
        noted = [outcome.notes for outcome in played if turn_notes(outcome.notes)]
        sums = [sum(turn_notes(notes).values()) + notes.get(_SUMMARIES, 0.0) for notes in noted]
        metrics["episode_kl"] = float(np.mean(sums))
        summaries = [notes[_SUMMARIES] for notes in noted if _SUMMARIES in notes]
        if summaries:
            metrics["summary_kl"] = float(np.mean(summaries))
        metrics |= {f"kl_by_turn/{turn + 1}": value for turn, value in by_turn.items()}
        values, third = list(by_turn.values()), max(1, len(by_turn) // 3)
        early = float(np.mean(values[:third]))
        # An estimate from sampled tokens may be negative, and a ratio to it would be meaningless.
        if early > 0:
            metrics["kl_escalation"] = float(np.mean(values[-third:])) / early
    return metrics
