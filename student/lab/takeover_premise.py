"""Premise of TCOD: a teacher that is lost where only the student goes, or is not.

Both are measured on two fixed sets of states: those of the problems' own paths, and those that the student reaches by
itself at temperature 1. On each state the divergence KL(student || teacher) is exact, summed over the turn's tokens.
How well a teacher knows the way is measured by playing: the student plays the first turns, the teacher the rest, in
the episodes that can still be won; those that stand then where a mistake has led (a letter state of the lock, a side
room of a house) are counted once more by themselves, because a teacher that is lost there wins all the others.

For environments that say how an episode stands (`standing`): lock and rooms.
"""

from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, replace

import numpy as np
import torch

from opd.tasks.build import build_prompts
from opd.tasks.environments.base import ENVIRONMENT, PATH, Standing
from opd.tasks.environments.host import make_environment
from opd.tasks.prompt import Prompt
from student.data.plan import EpisodePlan, PlannedRow, plan_step
from student.data.row import Row
from student.lab.experiment import Arm, Replicate
from student.lab.plan import ExperimentPlan
from student.lab.premises import Measured
from student.lab.stats import share_interval
from student.lab.tiny.training import Examiner
from student.recipe import Recipe

DEPTHS = (0, 2, 4)
"""Turns that the student plays before the teacher takes over, where an experiment names no others."""


@dataclass(frozen=True, slots=True)
class Taken:
    """Episodes that a teacher took over from the student.

    Attributes:
        won, count: how many it won, of all that could be won.
        won_lost, count_lost: the same of those that stood where a mistake had led.
    """

    won: int
    count: int
    won_lost: int
    count_lost: int

    @property
    def share(self) -> float:
        """What it won of what could be won."""
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
    """Success of a teacher by the turn at which it takes over, and the student's divergence from it by turn.

    Args:
        plan: gives the models and the prompts.
        world: seed of the world.
        teacher: which of the world's models.
        lost: present only if from the deepest of `depths` it wins at most this share of what can be won.
        rise: present only if the divergence on the student's states is this many times as large in the last third of
            the turns as in the first.
        kept: present only if from every depth it wins at least this share of what can be won.
        prompts: episodes that are played; as many as in an evaluation of the plan when None.
        depths: turns that the student plays before the teacher takes over.
        astray: what the states are called that a mistake leads to.
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
    """Mean KL(student || teacher) of each turn over the rows that reached it, nats summed over the turn's tokens."""
    found: dict[int, list[float]] = {}
    with torch.no_grad():
        for row in rows:
            ids = torch.from_numpy(np.concatenate([row.prompt_ids, row.response_ids]).astype(np.int64))[None]
            mine, theirs = (
                one.student.lm(input_ids=ids).logits[0].double().log_softmax(-1) for one in (student, teacher)
            )
            each = (mine.exp() * (mine - theirs)).sum(-1)  # at the position before the token that it is about
            first = len(row.prompt_ids) - 1
            for turn, (start, end) in enumerate(row.turns):
                found.setdefault(turn, []).append(float(each[first + start : first + end].sum()))
    return [float(np.mean(found[turn])) for turn in sorted(found)]


def _takes_over(teacher: Examiner, rows: Sequence[Row], depth: int) -> Taken:
    """What a teacher wins of the episodes that can be won when `depth` of their turns are played."""
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
    """How the episode stands after these actions; None where it has ended, or perfect play cannot reach the end."""
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
