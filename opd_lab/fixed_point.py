"""Premise of ExOPD: the accuracy of the policy that its training converges to, measured without training.

On-policy distillation of the reward lambda (log T - log R) with discount 0 has the fixed point T^lambda R^(1 - lambda),
normalised at every token. Decoding with both models samples from it. If these answers are no more accurate than the
teacher's, no student that reaches the fixed point will be. All values of lambda use the same random numbers, so that
they are compared on paired draws.
"""

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn
from transformers import PreTrainedModel

from opd.kv_cache import kept_by, reading
from opd.tasks import Prompt, PromptSource, build_prompts, encode_prompt
from opd.tasks.stops import generation_stops, stop_set
from opd_lab.experiment import Arm, Replicate
from opd_lab.plan import ExperimentPlan
from opd_lab.premises import Measured
from student.data.streams import stream, uniforms
from student.model.model import Weights, load_student, load_tokenizer
from student.settings.recipe import Recipe

PROMPTS = {"full": 1024, "quick": 16}
GAIN = 0.01
"""Accuracy by which the fixed point must exceed the teacher."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Teacher and reference of one domain, on one device.

    Attributes:
        teacher: the model T.
        reference: the model R.
        tokenizer: tokenizer of both models.
        stops: token ids that end an answer.
        temperature: divisor of the logits of both models.
    """

    teacher: PreTrainedModel
    reference: PreTrainedModel
    tokenizer: Any
    stops: frozenset[int]
    temperature: float = 1.0


def measure(
    plan: ExperimentPlan, world: int, *, scales: Sequence[float], decisive: float, reference: str | None = None
) -> Measured:
    """Measure the accuracy at temperature 1 of each lambda on held-out prompts.

    The premise is present if the accuracy at `decisive` exceeds that at 1, the teacher's, by at least `GAIN`.

    Args:
        plan: gives the models and the prompts.
        world: seed of the world.
        scales: values of lambda, which include 1 and `decisive`.
        decisive: the lambda that the claims are about.
        reference: name of the reference in the world; None for that of the recipe.
    """
    torch.set_num_threads(1)
    models, experiment = plan.models[world], plan.experiment
    data = plan.recipe(Arm("premise", ""), Replicate(world, world), plan.default_rate())
    recipe = Recipe.model_validate({"run": "unused", **data})
    source = build_prompts(recipe.prompts, seed=experiment.seeds[0])
    prompts = source.prompts("heldout", PROMPTS[plan.form])
    base = load(Weights(str(models.model(reference or str(experiment.recipe["teachers"]["reference"])).path)))
    names = experiment.routes or {"": experiment.served[0]}
    found: dict[float, list[float]] = {scale: [] for scale in scales}
    for domain, name in names.items():
        own = [prompt for prompt in prompts if not domain or prompt.domain == domain]
        pair = pair_of(Weights(str(models.model(name).path)), base)
        for scale in scales:
            found[scale] += judge(pair, own, source, scale, recipe.rollout.max_new_tokens)
    means = {scale: sum(values) / len(values) for scale, values in found.items()}
    error = math.sqrt(0.25 / max(1, len(prompts)))
    numbers = ", ".join(f"lambda {scale:g}: {mean:.3f}" for scale, mean in means.items())
    return Measured(means[decisive] - means[1.0] >= GAIN, f"{numbers} (standard error up to {error:.3f})")


def pair_of(
    teacher: Weights, reference: PreTrainedModel, *, further: Sequence[int | str] = (), temperature: float = 1.0
) -> Pair:
    """Load a teacher with its tokenizer on the device of `reference`.

    Args:
        teacher: location of the teacher's weights.
        reference: the loaded reference.
        further: stop tokens in addition to the teacher's own, by text or id.
        temperature: see `Pair`.

    Raises:
        ConfigError: when the teacher cannot be loaded, or one of `further` is not a single token.
    """
    tokenizer = load_tokenizer(teacher.base, teacher.revision)
    stops = stop_set(tokenizer, generation_stops(teacher.base, teacher.revision), further)
    return Pair(load(teacher, reference.device), reference, tokenizer, frozenset(stops.ids), temperature)


def judge(pair: Pair, prompts: Sequence[Prompt], source: PromptSource, scale: float, longest: int) -> list[float]:
    """Values of the verdicts on one answer to each prompt, sampled from T^scale R^(1 - scale); nan where unknown."""
    values = []
    for start in range(0, len(prompts), 256):
        part = prompts[start : start + 256]
        for prompt, text in zip(part, decode(pair, part, scale, longest), strict=True):
            verdict = source.verify(prompt, text)
            values.append(verdict.value if verdict.known else math.nan)
    return values


@torch.no_grad()
def decode(pair: Pair, prompts: Sequence[Prompt], scale: float, longest: int) -> list[str]:
    """Sample one answer to each prompt from T^scale R^(1 - scale), normalised at every token; scale 1 is the teacher.

    Args:
        pair: teacher and reference.
        prompts: prompts, decoded in one batch.
        scale: lambda.
        longest: maximum tokens of an answer; a prompt may have a lower limit.

    Returns:
        The text of each answer, without stop tokens.
    """
    tokenizer, device = pair.tokenizer, pair.teacher.device
    encoded = [encode_prompt(prompt, tokenizer) for prompt in prompts]
    width, pad = max(map(len, encoded)), int(tokenizer.pad_token_id or 0)  # padding is masked, so any token will do
    ends = torch.tensor(sorted(pair.stops), dtype=torch.long, device=device)
    # Padded on the left, so that the newest token of every row is in the last column.
    ids = torch.tensor([[pad] * (width - len(row)) + row for row in encoded], device=device)
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in encoded], device=device)
    # The numbers do not depend on the scale, so that scales are compared on paired draws.
    numbers = np.stack([uniforms(stream(0, "fixed point", prompt.uid), longest) for prompt in prompts])
    limits = [min(longest, prompt.max_new_tokens or longest) for prompt in prompts]
    draws = torch.as_tensor(numbers, device=device)
    done = torch.zeros(len(encoded), dtype=torch.bool, device=device)
    caches: list[Any] = [None, None]
    # At scale 1 the reference has no weight and need not run.
    running = (pair.teacher, pair.reference) if scale != 1.0 else (pair.teacher,)
    fresh, written = ids, []
    for step in range(max(limits)):
        # Counted from the first real token, because padding on the left must not shift a row's positions.
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -fresh.shape[1] :]
        logs = []
        for index, model in enumerate(running):
            out = model(
                input_ids=fresh,
                attention_mask=mask,
                position_ids=positions,
                **reading(model, caches[index]),
                logits_to_keep=1,
            )
            caches[index] = kept_by(out)
            # In float64: a scale above 1 multiplies the rounding of both models.
            logs.append((out.logits[:, -1, : len(tokenizer)].double() / pair.temperature).log_softmax(-1))
        target = (logs[0] if len(logs) == 1 else scale * logs[0] + (1.0 - scale) * logs[1]).softmax(-1)
        chosen = torch.searchsorted(target.cumsum(-1), draws[:, step : step + 1].contiguous())
        chosen = chosen.clamp(max=target.shape[-1] - 1)  # after rounding, the last sum may be below 1
        fresh = torch.where(done[:, None], pad, chosen)
        written.append(fresh)
        mask = torch.cat([mask, (~done[:, None]).long()], 1)
        done |= torch.isin(fresh[:, 0], ends)
        if bool(done.all()):
            break
    rows = torch.cat(written, 1).tolist()
    whole = [row[:limit] for row, limit in zip(rows, limits, strict=True)]
    answers = [list(itertools.takewhile(lambda token: token not in pair.stops, row)) for row in whole]
    texts: list[str] = tokenizer.batch_decode(answers, skip_special_tokens=True)
    return texts


def load(weights: Weights, device: torch.device | None = None) -> PreTrainedModel:
    """Load a model in float32 and evaluation mode, on the CPU unless `device` is given."""
    model = load_student(
        weights.base,
        dtype="float32",
        attention=None,
        gradient_checkpointing=False,
        revision=weights.revision,
        adapter=weights.adapter,
    ).lm
    nn.Module.to(model, device)
    return model.eval()
