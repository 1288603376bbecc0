"""The part of `opd premise` that needs the teacher's weights, not only its scores: ExOPD and EffOPD.

    ExOPD: accuracy of answers sampled from T^lambda R^(1 - lambda), the policy that training converges to. A student
        that reaches it is no better, so a lambda can pay only if this accuracy exceeds the teacher's own
    EffOPD: accuracy on the straight line in weight space from the student (0) to its teacher (1) and beyond. Jumps
        continue the path of training; if accuracy is lost at 1.5, long jumps are likely to lose it too. This needs a
        teacher of the student's shape, and since training need not follow a straight line, it is only an indication

All answers to a prompt are drawn with the same random numbers, so that differences are paired.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from opd.errors import ConfigError
from opd.tasks import Prompt, PromptSource, build_prompts
from opd.tasks.environments.base import ENVIRONMENT
from opd.wire.fingerprint import differing_token, token_bytes
from opd_lab.fixed_point import Pair, judge, load, pair_of
from student.data.intervals import LEVEL, Interval, t_interval
from student.model.model import Weights, load_tokenizer
from student.settings.recipe import Recipe

SCALES = (1.0, 1.25, 1.5)
PLACES = (0.0, 1.0, 1.5, 2.0)
LOST = 0.02
"""Accuracy that may be lost at place 1.5 of the line, compared with the teacher at 1."""


@dataclass(frozen=True, slots=True)
class WeightsReport:
    """The measurements; see the module.

    Attributes:
        prompts: number of distinct training prompts, each answered once per lambda and place.
        scales: accuracy by lambda; lambda 1 is the teacher.
        gains: paired difference in accuracy between each other lambda and lambda 1. The intervals hold together with
            95 % confidence.
        places: accuracy by place on the line; empty if student and teacher have different shapes.
        beyond: accuracy at place 1.5 minus that at the teacher, paired; None without a line.
    """

    prompts: int
    scales: Mapping[float, float]
    gains: Mapping[float, Interval]
    places: Mapping[float, float] = field(default_factory=dict)
    beyond: Interval | None = None


def measure_weights(recipe: Recipe, teacher: str, *, reference: str | None = None, rows: int = 64) -> WeightsReport:
    """Measure by decoding with teacher, reference and student.

    Args:
        recipe: gives the student, the prompts, and the limit, temperature and stop tokens of a response.
        teacher: folder or hub id, or BASE+ADAPTER, of a model with the student's tokenizer.
        reference: the same for the reference; None for the student's initial weights.
        rows: number of prompts drawn from the training stream; repeated ones are left out.

    Raises:
        ConfigError: if the verdicts of fewer than two prompts are known, the tokenizers differ, or the recipe has
            contexts or episodes, because answers are decoded from the student's prompts alone.
        OpdError: as `opd train` would.
    """
    settings = recipe.rollout
    source = build_prompts(recipe.prompts, seed=recipe.seed, modes=recipe.modes)
    # The training stream repeats the prompts of a table. Answers counted twice would make every interval too narrow.
    prompts = list({prompt.uid: prompt for prompt in source.prompts("train", rows)}.values())
    if recipe.contexts or any(ENVIRONMENT in prompt.extra for prompt in prompts):
        raise ConfigError(
            "weights answer the student's own prompts here, without contexts and episodes; omit --teacher."
        )
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    own, taught = Weights.of(recipe.model), Weights.of(recipe.model, teacher)
    referred = own if reference is None else Weights.of(recipe.model, reference)
    student = load(own, device)
    pair = pair_of(
        taught,
        student if reference is None else load(referred, device),
        further=settings.stop_tokens,
        temperature=settings.temperature,
    )
    for other in (own, referred):
        _check_tokenizer(pair, taught, other)
    longest = settings.max_new_tokens
    scaled = {scale: judge(pair, prompts, source, scale, longest) for scale in SCALES}
    others = [scale for scale in SCALES if scale != 1.0]
    # The best lambda is judged, so the 5 % are divided among the intervals (Bonferroni): together they hold with 95 %.
    gains = {scale: _paired(scaled[scale], scaled[1.0], 1.0 - (1.0 - LEVEL) / len(others)) for scale in others}
    placed = {} if _other_shape(student, pair.teacher) else _line(student, pair, prompts, source, longest)
    return WeightsReport(
        prompts=len(prompts),
        scales=_means(scaled),
        gains=gains,
        places=_means(placed),
        beyond=_paired(placed[1.5], placed[1.0]) if placed else None,
    )


def verdicts(report: WeightsReport) -> list[str]:
    """The conclusions on ExOPD and EffOPD, a sentence each."""
    best = max(report.gains, key=lambda scale: report.gains[scale].mean)
    gain = report.gains[best]
    interval = f"95 % of all lambdas together from {gain.low:.3f} to {gain.high:.3f}"
    figures = f"lambda {best:g} is {gain.mean:+.3f} beside the teacher, {interval}"
    if gain.low > 0:
        found = [f"ExOPD can pay: the policy of {figures}."]
    elif gain.high < 0:
        found = [f"ExOPD is unlikely to pay: the policy of {figures}."]
    else:
        found = [f"ExOPD: no difference shown by {report.prompts} prompts; the policy of {figures}."]
    if report.beyond is None:
        found.append("EffOPD: student and teacher have different shapes, so that no line leads from one to the other.")
        return found
    beyond = report.beyond
    place = "half as far again beyond the teacher"
    figures = f"{beyond.mean:+.3f} beside the teacher's, 95 % from {beyond.low:.3f} to {beyond.high:.3f}"
    if beyond.low >= -LOST:
        found.append(f"EffOPD can pay: {place} accuracy is kept, {figures}.")
    elif beyond.high < -LOST:
        found.append(f"EffOPD's long jumps are unlikely to pay: {place} accuracy is lost, {figures}.")
    else:
        found.append(f"EffOPD: not decided by {report.prompts} prompts; {place} accuracy is {figures}.")
    return found


def _line(
    student: PreTrainedModel, pair: Pair, prompts: Sequence[Prompt], source: PromptSource, longest: int
) -> dict[float, list[float]]:
    start = {name: tensor.clone() for name, tensor in student.state_dict().items()}
    goal = {name: tensor.clone() for name, tensor in pair.teacher.state_dict().items()}
    found = {}
    for place in PLACES:
        pair.teacher.load_state_dict({name: _between(start[name], goal[name], place) for name in goal})
        found[place] = judge(pair, prompts, source, 1.0, longest)
    pair.teacher.load_state_dict(goal)
    return found


def _between(start: Tensor, goal: Tensor, place: float) -> Tensor:
    return (start.double() + place * (goal.double() - start.double())).to(goal.dtype)


def _other_shape(student: PreTrainedModel, teacher: PreTrainedModel) -> bool:
    shapes = ({name: tensor.shape for name, tensor in model.state_dict().items()} for model in (student, teacher))
    return next(shapes) != next(shapes)


def _check_tokenizer(pair: Pair, teacher: Weights, other: Weights) -> None:
    found = differing_token(token_bytes(pair.tokenizer), token_bytes(load_tokenizer(other.base, other.revision)))
    if found is not None:
        token, one, another = found
        raise ConfigError(
            f"{teacher.base} and {other.base} have different tokenizers: id {token} is {one} in the first and "
            f"{another} in the second; give models that share one."
        )


def _means(found: Mapping[float, Sequence[float]]) -> dict[float, float]:
    return {key: float(np.nanmean(values)) for key, values in found.items()}


def _paired(one: Sequence[float], other: Sequence[float], level: float = LEVEL) -> Interval:
    """The interval of one minus other, over the prompts that are judged both times.

    Raises:
        ConfigError: if there are fewer than two of these.
    """
    differences = np.subtract(one, other)
    known = differences[np.isfinite(differences)].tolist()
    if len(known) < 2:
        raise ConfigError(
            f"the answers to {len(known)} of {len(differences)} prompts were judged, and two are the least; give "
            "prompts whose answers a verifier knows, or more --rows."
        )
    return t_interval(known, level)
