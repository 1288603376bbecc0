"""Premise of ExOPD: what the policy that it aims at is worth, measured without training anything.

On-policy distillation of the reward lambda (log T - log R) with discount 0 has the fixed point T^lambda R^(1 - lambda),
token by token. Decoding with both models samples from it: if that is no more accurate than the teacher, no student that
reaches it will be. Common random numbers make the scales comparable.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from opd.tasks import Prompt, PromptSource, build_prompts, encode_prompt
from student.data.streams import stream, uniforms
from student.lab.experiment import Arm, Replicate
from student.lab.plan import ExperimentPlan
from student.lab.premises import Measured
from student.recipe import Recipe

PROMPTS = {"full": 1024, "quick": 16}
GAIN = 0.01
"""Accuracy by which the fixed point must pass the teacher."""


@dataclass(frozen=True, slots=True)
class Pair:
    """Teacher and reference of one domain."""

    teacher: PreTrainedModel
    reference: PreTrainedModel
    tokenizer: Any


def measure(
    plan: ExperimentPlan, world: int, *, scales: Sequence[float], decisive: float, reference: str | None = None
) -> Measured:
    """Accuracy at temperature 1 of each scale on held-out prompts; present where `decisive` passes scale 1.

    Args:
        plan: gives the models and the prompts.
        world: seed of the world.
        scales: lambdas, 1 among them.
        decisive: the lambda that the claims are about.
        reference: model of the world, by default that of the recipe.
    """
    torch.set_num_threads(1)
    models, experiment = plan.models[world], plan.experiment
    data = plan.recipe(Arm("premise", ""), Replicate(world, world), plan.default_rate())
    recipe = Recipe.model_validate({"run": "unused", **data})
    source = build_prompts(recipe.prompts, seed=experiment.seeds[0])
    prompts = source.prompts("heldout", PROMPTS[plan.form])
    base = _load(str(models.model(reference or str(experiment.recipe["teachers"]["reference"])).path))
    names = experiment.routes or {"": experiment.served[0]}
    found: dict[float, list[float]] = {scale: [] for scale in scales}
    for domain, name in names.items():
        own = [prompt for prompt in prompts if not domain or prompt.domain == domain]
        path = str(models.model(name).path)
        pair = Pair(_load(path), base, AutoTokenizer.from_pretrained(path))
        for scale in scales:
            found[scale] += judge(pair, own, source, scale, recipe.rollout.max_new_tokens)
    means = {scale: sum(values) / len(values) for scale, values in found.items()}
    error = math.sqrt(0.25 / max(1, len(prompts)))
    numbers = ", ".join(f"lambda {scale:g}: {mean:.3f}" for scale, mean in means.items())
    return Measured(means[decisive] - means[1.0] >= GAIN, f"{numbers} (standard error up to {error:.3f})")


def judge(pair: Pair, prompts: Sequence[Prompt], source: PromptSource, scale: float, longest: int) -> list[float]:
    """The verdict of one answer to each prompt, sampled from T^scale R^(1 - scale)."""
    values = []
    for start in range(0, len(prompts), 256):
        part = prompts[start : start + 256]
        for prompt, text in zip(part, decode(pair, part, scale, longest), strict=True):
            values.append(source.verify(prompt, text).value)
    return values


@torch.no_grad()
def decode(pair: Pair, prompts: Sequence[Prompt], scale: float, longest: int) -> list[str]:
    """One answer to each prompt from T^scale R^(1 - scale), normalised at every token; scale 1 is the teacher.

    Args:
        pair: models of one tokenizer.
        prompts: together in one batch.
        scale: lambda.
        longest: tokens.
    """
    tokenizer = pair.tokenizer
    encoded = [encode_prompt(prompt, tokenizer) for prompt in prompts]
    width, pad, end = max(map(len, encoded)), int(tokenizer.pad_token_id), int(tokenizer.eos_token_id)
    # Padded on the left, so that the newest token of every row is in the last column.
    ids = torch.tensor([[pad] * (width - len(row)) + row for row in encoded])
    mask = torch.tensor([[0] * (width - len(row)) + [1] * len(row) for row in encoded])
    # The same numbers whatever the scale, so that scales are compared on paired draws.
    draws = torch.tensor([uniforms(stream(0, "fixed point", prompt.uid), longest) for prompt in prompts])
    done = torch.zeros(len(encoded), dtype=torch.bool)
    caches: list[Any] = [None, None]
    fresh, written = ids, []
    for step in range(longest):
        # Counted from the first real token: padding on the left must not move a row's positions.
        positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -fresh.shape[1] :]
        logs = []
        for index, model in enumerate((pair.teacher, pair.reference)):
            out = model(
                input_ids=fresh,
                attention_mask=mask,
                position_ids=positions,
                past_key_values=caches[index],
                use_cache=True,
                logits_to_keep=1,
            )
            caches[index] = out.past_key_values
            # In float64: a scale above 1 multiplies the rounding of both models.
            logs.append(out.logits[:, -1, : len(tokenizer)].double().log_softmax(-1))
        target = (scale * logs[0] + (1.0 - scale) * logs[1]).softmax(-1)
        chosen = torch.searchsorted(target.cumsum(-1), draws[:, step : step + 1]).clamp(max=target.shape[-1] - 1)
        fresh = torch.where(done[:, None], pad, chosen)
        written.append(fresh)
        mask = torch.cat([mask, (~done[:, None]).long()], 1)
        done |= fresh[:, 0] == end
        if bool(done.all()):
            break
    texts: list[str] = tokenizer.batch_decode(torch.cat(written, 1), skip_special_tokens=True)
    return texts


def _load(path: str) -> PreTrainedModel:
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    return model.eval()
