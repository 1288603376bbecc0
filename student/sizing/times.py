"""Seconds of a step by stage, and bytes on the network: arithmetic with stated assumptions, not measurements.

    decoding forward   reading weights, keys, values and logits; 2 P operations a row; launching the layers: the longest
                       of them on a GPU, their sum on a CPU
    prompts            once for all samples; of episodes whose history is cut, also what each turn is written after
    forwards           new tokens of the rank over its slots, and the tail in which the longest answers end
    learning           6 P operations a token, 8 with recomputation, 4 (6) where the weights are frozen under adapters
    network            prompt, response and asked ids up, payloads down, per row and signal; zstd is not counted
    between ranks      gradients of every update, twice; sharded: layers for the forward and the backward pass of every
                       micro-batch, its gradients in float32, and all weights for the rollout

The teachers' own time depends on their servers and is not included: rows are scored while others are still sampled.
"""

import math
from dataclasses import dataclass

from opd.wire.types import PayloadKind, PayloadSpec
from student.recipe import Recipe
from student.scoring.needs import ROLES, Needs
from student.sizing.hardware import Hardware
from student.sizing.lengths import lengths_of
from student.sizing.memory import slots
from student.sizing.shape import ModelShape

_REACHED = 0.4
"""Share of the device's speed that a transformers model reaches in training and prefill."""
_LOGIT_BYTES = 48
"""Traffic of a logit that is sampled from: float32, read or written a dozen times."""
_SIZES = {"f16": 2.0, "u16": 2.0, "bf16": 2.0, "f32": 4.0}
_ID = 18 / 8
"""Bytes of a packed id."""


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of a step on each rank, and what it sends.

    Attributes:
        stages: seconds by stage.
        bound: stage to what bounds it.
        tokens: response tokens of a step on all ranks.
        sent: bytes of all ranks to the teachers.
        received: bytes of all ranks from them.
        exchanged: bytes that each rank gets from the others.
    """

    stages: dict[str, float]
    bound: dict[str, str]
    tokens: float
    sent: float
    received: float
    exchanged: float

    @property
    def step(self) -> float:
        """Seconds of a step, without evaluations, checkpoints and waiting for teachers."""
        return sum(self.stages.values())


def times_of(recipe: Recipe, shape: ModelShape, needs: Needs, device: Hardware, *, mean: float, ranks: int) -> Times:
    """How long a step takes when responses have `mean` tokens; see the module."""
    rollout = recipe.rollout
    rows = rollout.prompts_per_step * rollout.samples_per_prompt
    mine, prompt = rows / ranks, rollout.max_prompt_tokens / 2
    read, here = lengths_of(recipe, prompt, mean), slots(recipe, ranks)
    forwards = mine * mean / here + max(0.0, rollout.max_new_tokens - mean)
    logits = _LOGIT_BYTES * shape.vocabulary
    decoding = {
        "memory": (shape.weight_bytes + here * logits + here * read.context * shape.cache_bytes) / device.bandwidth,
        "arithmetic": 2 * shape.active * here / (device.flops * _REACHED),
        "launching layers": shape.layers * device.overhead,
    }
    bound = max(decoding, key=lambda name: decoding[name])
    forward = decoding[bound] if device.overlaps else sum(decoding.values())
    before = prompt * mine / rollout.samples_per_prompt + read.prefilled * mine
    prefill = 2 * shape.active * before / (device.flops * _REACHED)
    # Per parameter and token: 2 operations forward, 2 backward to the inputs, 2 to the weights unless they are frozen,
    # and 2 for recomputation.
    passes = (2 if recipe.model.lora is None else 1) * 2 + 2 + (2 if recipe.model.gradient_checkpointing else 0)
    learning = passes * shape.active * mine * read.positions * recipe.train.epochs / (device.flops * _REACHED)
    sent, received = _traffic(needs, read.positions, mean, shape)
    return Times(
        stages={"rollout": forwards * forward + prefill, "learn": learning},
        bound={"rollout": bound, "learn": "arithmetic"},
        tokens=rows * mean,
        sent=rows * sent,
        received=rows * received,
        exchanged=_exchanged(recipe, shape, mine * read.positions, ranks),
    )


def _exchanged(recipe: Recipe, shape: ModelShape, tokens: float, ranks: int) -> float:
    """Bytes that a rank gets from the others in a step in which it learns from `tokens`."""
    train, others = recipe.train, (ranks - 1) / ranks
    if train.sharding == "none":
        return 2 * others * shape.trained_bytes * train.epochs * train.minibatches
    passes = train.epochs * max(train.minibatches, math.ceil(tokens / train.micro_batch_tokens))
    layers = shape.total - shape.outside
    gathered = (2 * layers + shape.outside) * shape.width + shape.trained * 4
    return others * (passes * gathered + shape.total * shape.width)


def _traffic(needs: Needs, read: float, mean: float, shape: ModelShape) -> tuple[float, float]:
    """Bytes of a row up and down, over all signals of served roles: `read` tokens up, `mean` of them asked about."""
    sent = received = 0.0
    for need in needs.signals:
        if need.role not in ROLES[:2]:
            continue
        sent += 4 * read + (_ID * need.spec.k * mean if need.spec.kind is PayloadKind.GATHER else 0.0)
        received += mean * _position(need.spec, shape)
    return sent, received


def _position(spec: PayloadSpec, shape: ModelShape) -> float:
    """Bytes of a position: the values, ids where the teacher chooses them, the sampled token and the tail."""
    size = _SIZES[spec.value_dtype]
    if spec.kind is PayloadKind.HIDDEN:
        return size * shape.hidden
    if spec.kind is PayloadKind.SAMPLED:
        return 4.0
    return spec.k * (size + (_ID if spec.kind is PayloadKind.TOPK else 0.0)) + 8.0
