"""Premise of TCOD: whether the teacher is lost in states that only the student reaches.

Two things are measured:

    divergence   KL(student || teacher), exact at each token and summed over the tokens of a turn, on two fixed sets of
                 states: those on the problems' own paths, and those that the student reaches at temperature 1
    success      the student plays the first turns and the teacher the rest, in episodes that can still be won.
                 Episodes that are then in a state to which a mistake led (a letter state of the lock, a side room of a
                 house) are also counted separately, because a teacher that is lost there may win all the others

This needs environments that report how an episode stands (`standing`): lock and rooms.
"""

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace

import numpy as np
import torch

from opd.tasks.build import build_prompts
from opd.tasks.environments.base import ENVIRONMENT, PATH, Standing
from opd.tasks.environments.service import make_environment
from opd.tasks.prompt import Prompt
from opd_lab.experiment import Arm, Replicate
from opd_lab.plan import ExperimentPlan
from opd_lab.premises import Measured
from opd_lab.tiny.training import Examiner
from student.data.intervals import share_interval
from student.data.plan import EpisodePlan, PlannedRow, plan_step
from student.data.row import Row
from student.settings.recipe import Recipe

DEPTHS = (0, 2, 4)
"""Numbers of turns that the student plays before the teacher takes over, unless an experiment gives others."""


@dataclass(frozen=True, slots=True)
class Taken:
    """Episodes that a teacher took over from the student.

    Attributes:
        won: number of episodes that the teacher won.
        count: number of episodes that could still be won.
        won_lost: the same as `won`, of episodes in a state to which a mistake had led.
        count_lost: the same as `count`, of these episodes.
    """

    won: int
    count: int
    won_lost: int
    count_lost: int

    @property
    def share(self) -> float:
        """Share of the episodes that could be won that the teacher won; 0 if there were none."""
        return self.won / self.count if self.count else 0.0


def measure(
    plan: ExperimentPlan,
    world: int,
    *,
    teacher: str,
    lost: float | None = None,
    rise: float = 0.0,
    kept: float = 0.0,
    prompts: int | None = None,
    depths: Sequence[int] = DEPTHS,
    astray: str = "letter states",
) -> Measured:
    """Measure a teacher's success by the turn at which it takes over, and the student's divergence from it by turn.

    Args:
        plan: gives the models and the prompts.
        world: seed of the world.
        teacher: name of the teacher in the world.
        lost: for the premise to be present, the largest share that the teacher may win when it takes over at the last
            of `depths`; None for no limit.
        rise: for the premise to be present, the least ratio of the divergence on the student's states in the last third
            of the turns to that in the first third.
        kept: for the premise to be present, the least share that the teacher must win at every depth.
        prompts: number of episodes to play; None for that of an evaluation.
        depths: numbers of turns that the student plays before the teacher takes over, ascending.
        astray: name of the states to which a mistake leads, for the text.
    """
    data = plan.recipe(Arm("premise", ""), Replicate(world, plan.experiment.seeds[0]), plan.default_rate())
    recipe = Recipe.model_validate({"run": "unused", **data})
    chosen = build_prompts(recipe.prompts, seed=world).prompts("heldout", prompts or recipe.eval.prompts)

    def open_model(name: str) -> Examiner:
        path = plan.models[world].model(name).path
        limit = recipe.rollout.max_new_tokens
        return Examiner(path, longest=limit, seed=world, episodes=recipe.rollout.episodes)

    with closing(open_model(plan.experiment.student)) as student, closing(open_model(teacher)) as judge:
        gold = student.play([_with(row, replay=row.prompt.extra[PATH], given=True) for row in _planned(chosen)])
        own = student.play(_planned(chosen))
        wins = {depth: _takes_over(judge, own, depth) for depth in depths}
        by_turn = {"gold": divergence_by_turn(student, judge, gold), "own": divergence_by_turn(student, judge, own)}
    third = max(1, len(by_turn["own"]) // 3)
    ratio = float(np.mean(by_turn["own"][-third:]) / np.mean(by_turn["own"][:third]))
    shares = [taken.share for taken in wins.values()]
    present = (lost is None or shares[-1] <= lost) and ratio >= rise and min(shares) >= kept
    return Measured(present, _words(teacher, wins, by_turn, ratio, astray))


def divergence_by_turn(student: Examiner, teacher: Examiner, rows: Sequence[Row]) -> list[float]:
    """Mean KL(student || teacher) by turn over the rows that reached it, in nats summed over the turn's tokens."""
    found: dict[int, list[float]] = {}
    with torch.no_grad():
        for row in rows:
            ids = torch.from_numpy(np.concatenate([row.prompt_ids, row.response_ids]).astype(np.int64))[None]
            mine, theirs = (
                one.student.lm(input_ids=ids).logits[0].double().log_softmax(-1) for one in (student, teacher)
            )
            each = (mine.exp() * (mine - theirs)).sum(-1)  # at position t it is about token t + 1
            first = len(row.prompt_ids) - 1
            for turn, (start, end) in enumerate(row.turns):
                found.setdefault(turn, []).append(float(each[first + start : first + end].sum()))
    return [float(np.mean(found[turn])) for turn in sorted(found)]


def _takes_over(teacher: Examiner, rows: Sequence[Row], depth: int) -> Taken:
    """Have a teacher play on from turn `depth` of the rows' episodes, those that can still be won."""
    decode = teacher.tokenizer.decode
    begun = [
        (row.prompt, [str(decode(row.response_ids[a:b], skip_special_tokens=True)) for a, b in row.turns[:depth]])
        for row in rows
    ]
    stood = [(prompt, actions, winnable(prompt, actions)) for prompt, actions in begun]
    alive = [(prompt, actions, standing.lost) for prompt, actions, standing in stood if standing is not None]
    planned = _planned([prompt for prompt, *_ in alive])
    played = teacher.play([_with(row, replay=one[1]) for row, one in zip(planned, alive, strict=True)])
    won = [row.tags["ended"] == "success" for row in played]
    lost = [at for *_, at in alive]
    return Taken(sum(won), len(won), sum(w for w, at in zip(won, lost, strict=True) if at), sum(lost))


def winnable(prompt: Prompt, actions: Sequence[str]) -> Standing | None:
    """How the episode stands after these actions; None if it has ended, or perfect play can no longer win it."""
    world = make_environment(dict(prompt.extra[ENVIRONMENT]))
    seen = world.reset(prompt, 0)
    for action in actions:
        seen = world.step(action)
    standing: Standing = world.standing()  # type: ignore[attr-defined]
    left = prompt.extra[ENVIRONMENT]["options"]["turns"] - len(actions)
    return None if seen.done or standing.needed > left else standing


def _planned(prompts: Sequence[Prompt]) -> list[PlannedRow]:
    return list(plan_step(0, prompts, samples=1, max_new_tokens=1, temperature=1.0).rows)


def _with(row: PlannedRow, *, replay: Sequence[str], given: bool = False) -> PlannedRow:
    return replace(row, episode=EpisodePlan(replay=tuple(replay), given=given))


def _words(
    teacher: str, wins: Mapping[int, Taken], by_turn: Mapping[str, Sequence[float]], ratio: float, astray: str
) -> str:
    won = ", ".join(
        f"{_share(taken.won, taken.count)} after {depth} turns"
        + (f" ({_share(taken.won_lost, taken.count_lost)} in {astray})" if taken.count_lost else "")
        for depth, taken in wins.items()
    )
    lines = "; ".join(
        f"nats by turn on {name} states " + " ".join(f"{value:.2f}" for value in values)
        for name, values in by_turn.items()
    )
    return f"{teacher} wins {won} of the student; {lines}; last third over first, own: {ratio:.1f}"


def _share(won: int, count: int) -> str:
    if not count:
        return "none of 0"
    low, high = share_interval(won, count)
    return f"{won / count:.2f} [{low:.2f}, {high:.2f}] of {count}"
