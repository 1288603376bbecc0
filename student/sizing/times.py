"""Estimates the seconds of a step by stage, and the bytes on the network, by arithmetic from stated assumptions.

P is the number of parameters that a token uses.

    decoding forward   reads weights, keys, values and logits; takes 2 P operations a row; launches the layers. The time
                       is the longest of the three on a GPU, and their sum on a CPU
    prompts            are read once for all samples; in episodes whose history is cut, each turn's context is read too
    forwards           the new tokens of a rank divided by its slots, and a tail in which the longest answers end
    learning           6 P operations a token that is read, 8 P with recomputation; 4 P (6 P) if the weights are
                       frozen under adapters
    network            prompt, response and asked ids up, payloads down, per row and signal; zstd is not counted
    between ranks      gradients of every update, twice; sharded: layers for the forward and the backward pass of every
                       micro-batch, its gradients in float32, and all weights for the rollout

    a step             Rows are scored while others are still sampled, and learning begins when all are scored: the
                       longer of rollout and teachers, plus learning. If the job learns early
                       (student/job/learns_early.py), all micro-batches but the last overlap with scoring. If steps are
                       sampled ahead (train.max_staleness), the teachers work at the same time as the student, and
                       rollouts at the same time as learning if they have their own devices or cores

The teachers' time is that of student/sizing/teachers.py, if their models are known.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from opd.wire.types import PayloadKind, PayloadSpec
from student.data.needs import Needs
from student.settings.recipe import Recipe
from student.sizing.hardware import Hardware
from student.sizing.lengths import lengths_of
from student.sizing.memory import engine_of, slots
from student.sizing.shape import ModelShape
from student.sizing.teachers import Ask, Fleet, asks_of, stages_of

_LOGIT_BYTES = 48
"""Memory traffic in bytes per logit of a sampled token: float32, read or written a dozen times."""
_SIZES = {"f16": 2.0, "u16": 2.0, "bf16": 2.0, "f32": 4.0}
_ID = 18 / 8
"""Bytes of a packed token id of 18 bits."""


@dataclass(frozen=True, slots=True)
class Times:
    """Seconds of a step, and bytes that are sent in it.

    Attributes:
        stages: seconds by stage: rollout, learn, teachers if they are known, and "in process" if models there score.
        bound: the resource that bounds each stage.
        tokens: response tokens of a step on all ranks.
        sent: bytes that all ranks together send to the teachers.
        received: bytes that all ranks together receive from them.
        exchanged: bytes that each rank receives from the others.
        ahead: whether steps are sampled ahead.
        beside: whether rollouts have devices of their own.
        parts: number of parts of a step, each of which is learnt from as soon as it is scored; 1 if learning waits for
            all scores.
    """

    stages: dict[str, float]
    bound: dict[str, str]
    tokens: float
    sent: float
    received: float
    exchanged: float
    ahead: bool = False
    beside: bool = False
    parts: int = 1

    @property
    def step(self) -> float:
        """Seconds of a step, not counting evaluations, checkpoints and teachers whose models are not known."""
        longest = max(self.rivals, self.stages.get("teachers", 0.0))
        return longest if self.ahead else longest + self.stages["learn"] / self.parts

    @property
    def rivals(self) -> float:
        """Seconds of the work that overlaps with the teachers', which they may take without making the step longer."""
        rollout, read, learning = self.stages["rollout"], self.stages.get("in process", 0.0), self.stages["learn"]
        if not self.ahead:
            return rollout + read + learning * (1 - 1 / self.parts)
        learning += read
        return max(rollout, learning) if self.beside else rollout + learning

    @property
    def slowest(self) -> str:
        """The stage that bounds the step: to speed up another one would shorten it less, or not at all."""
        others = {name: seconds for name, seconds in self.stages.items() if name != "teachers"}
        teachers = self.stages.get("teachers", 0.0)
        if self.ahead and self.beside and self.rivals > others["rollout"]:
            del others["rollout"]  # it ends before the stages that run at the same time, one after the other
        longest = max(others, key=lambda name: others[name])
        return "teachers" if teachers > self.rivals and (self.ahead or teachers > others[longest]) else longest


def times_of(
    recipe: Recipe,
    shape: ModelShape,
    needs: Needs,
    device: Hardware,
    *,
    mean: float,
    ranks: int,
    fleet: Fleet | None = None,
    early: bool = False,
    spared: float = 0.0,
) -> Times:
    """Estimate how long a step takes; see the module. Prompts are taken to have half their maximum length.

    Args:
        recipe: the job.
        shape: sizes of its student.
        needs: needs of its terms and controllers, which decide what is asked of the teachers.
        device: the device of a rank.
        mean: mean number of tokens of a response.
        ranks: number of data-parallel processes.
        fleet: the teachers; None if nothing is known of them.
        early: whether the job learns early.
        spared: mean number of positions of a row that learning does not read again.
    """
    rollout = recipe.rollout
    rows = rollout.prompts_per_step * rollout.samples_per_prompt
    mine, prompt = rows / ranks, rollout.max_prompt_tokens / 2
    read, here = lengths_of(recipe, prompt, mean), slots(recipe, ranks)
    forwards = mine * mean / here + max(0.0, rollout.max_new_tokens - mean)
    of_row = _LOGIT_BYTES * shape.vocabulary + read.context * (shape.cache_bytes or 0) + (shape.state_bytes or 0)
    decoding = {
        "memory": (shape.weight_bytes + here * of_row) / device.bandwidth,
        "arithmetic": 2 * shape.active * here / (device.flops * device.reached),
        "launching layers": shape.layers * device.overhead,
    }
    bound = max(decoding, key=lambda name: decoding[name])
    forward = decoding[bound] if device.overlaps else sum(decoding.values())
    before = prompt * mine / rollout.samples_per_prompt + read.prefilled * mine
    prefill = 2 * shape.active * before / (device.flops * device.reached)
    # Per parameter and token: 2 operations forward, 2 backward to the inputs, 2 to the weights unless they are frozen,
    # and 2 for recomputation.
    passes = (2 if recipe.model.lora is None else 1) * 2 + 2 + (2 if recipe.model.gradient_checkpointing else 0)
    learnt = mine * (read.positions - spared)
    learning = passes * shape.active * learnt * recipe.train.epochs / (device.flops * device.reached)
    asks, fleet = asks_of(recipe, needs), fleet or Fleet({}, device)
    sent, received = _traffic(asks, read.positions, mean, shape, fleet)
    scored = list(stages_of(asks, fleet, shape, rows * read.positions, rows * mean, device, ranks))
    return Times(
        stages={"rollout": forwards * forward + prefill, "learn": learning} | {name: of for name, of, _ in scored},
        bound={"rollout": bound, "learn": "arithmetic"} | {name: by for name, _, by in scored},
        tokens=rows * mean,
        sent=rows * sent,
        received=rows * received,
        exchanged=_exchanged(recipe, shape, learnt, ranks),
        ahead=recipe.train.max_staleness > 0,
        beside=not engine_of(recipe).traits.on_device or device.spare,
        parts=max(1, math.ceil(learnt / recipe.train.micro_batch_tokens)) if early else 1,
    )


def _exchanged(recipe: Recipe, shape: ModelShape, tokens: float, ranks: int) -> float:
    """Bytes that a rank receives from the others in a step in which it learns from `tokens` tokens."""
    train, others = recipe.train, (ranks - 1) / ranks
    if train.sharding == "none":
        return 2 * others * shape.trained_bytes * train.epochs * train.minibatches
    passes = train.epochs * max(train.minibatches, math.ceil(tokens / train.micro_batch_tokens))
    layers = shape.total - shape.outside
    gathered = (2 * layers + shape.outside) * shape.width + shape.trained * 4
    return others * (passes * gathered + shape.total * shape.width)


def _traffic(asks: Sequence[Ask], read: float, mean: float, student: ModelShape, fleet: Fleet) -> tuple[float, float]:
    """Mean bytes per row sent to and received from all served models.

    A row has `read` tokens, of which `mean` are asked about.
    """
    sent = received = 0.0
    for ask in asks:
        if not ask.served:
            continue
        sent += ask.share * (4 * read + (_ID * ask.spec.k * mean if ask.spec.kind is PayloadKind.GATHER else 0.0))
        received += ask.share * mean * _position(ask.spec, fleet.shape(ask.model) or student)
    return sent, received


def _position(spec: PayloadSpec, shape: ModelShape) -> float:
    """Bytes of one position of a payload: values, ids if the teacher chooses them, and sampled token and tail."""
    size = _SIZES[spec.value_dtype]
    if spec.kind is PayloadKind.HIDDEN:
        return size * shape.hidden
    if spec.kind is PayloadKind.SAMPLED:
        return 4.0
    return spec.k * (size + (_ID if spec.kind is PayloadKind.TOPK else 0.0)) + 8.0
