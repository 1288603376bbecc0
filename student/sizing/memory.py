"""Estimates the memory of a rank by part, and says which setting to change if it does not fit.

    always      weights, AdamW's moments, copies of weights
    learning    gradients, what autograd saves of the largest micro-batch, tiles of logits and the head's gradient
    rollout     keys and values of the slots, logits of a decoding step

The weights and the cache of engine vllm count as `always`, or as `rollout` if it sleeps between rollouts.

Under `train.sharding: fsdp` a rank has its shard of weights, gradients and moments. What it gathers temporarily comes
on top: two layers and the parameters outside the layers while it learns, and all weights while it decodes.

The peak is the sum of `always` and the larger of the other two, or of all three if steps are sampled ahead.
"""

import math
from collections.abc import Collection
from dataclasses import dataclass

from opd.errors import ConfigError
from student.data.needs import EMA, INITIAL, Needs
from student.rollout.engine import ROLLOUT_ENGINES, RolloutEngine
from student.rollout.requests import LEAST_ROWS
from student.rollout.slots import settled
from student.settings.recipe import Recipe
from student.sizing.hardware import GIB, USABLE, Hardware
from student.sizing.lengths import largest
from student.sizing.shape import ModelShape
from student.sizing.shared import Shared

_GATHERED_LAYERS = 2
"""Layers gathered at the same time: the one in use and the next."""
VLLM_CACHE = "keys and values of vLLM"
ACTIVATIONS = "activations of a micro-batch"
CASTS = "casts of the weights"
WIDENED = "a weight widened from 4 bits"
_SLOT_PARTS = ("keys and values", "copy for one layer's attention", "logits of a decoding step")
_DTYPES = {"float32": 4, "bfloat16": 2, "float16": 2}
_LOGIT_COPIES = 4
"""Float32 [slots, vocabulary] arrays of a decoding step: logits, log-probs, probabilities and their padded blocks."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory of a rank in bytes.

    Attributes:
        always: what it takes all the time, by part.
        learning: what it takes in addition during an update, by part.
        rollout: what it takes in addition during rollouts, by part.
        reserve: what libraries take.
        together: whether rollouts and learning run at the same time (train.max_staleness).
        slots: number of responses decoded together.
        unknown: (when, part) of the parts that cannot be counted for this family, and count as 0.
    """

    always: dict[str, float]
    learning: dict[str, float]
    rollout: dict[str, float]
    reserve: float = 0.0
    together: bool = False
    slots: int = LEAST_ROWS
    unknown: tuple[tuple[str, str], ...] = ()

    @property
    def peak(self) -> float:
        """The most bytes in use at the same time, without the reserve."""
        learning, rollout = sum(self.learning.values()), sum(self.rollout.values())
        return sum(self.always.values()) + (learning + rollout if self.together else max(learning, rollout))


def _rows(recipe: Recipe, ranks: int) -> int:
    """Number of rows in a step's plan on the rank that has most."""
    return -(-recipe.rollout.prompts_per_step // ranks) * recipe.rollout.samples_per_prompt


def micro_batch(recipe: Recipe, ranks: int) -> tuple[int, int]:
    """(number of sequences, tokens per sequence) of the largest micro-batch.

    All of its rows have the longest prompt and response; it has at least one row.
    """
    row = largest(recipe)
    rows = max(1, recipe.train.micro_batch_tokens // (row.sequences * row.width))
    # Methods and other strategies may add rows to those of the plan, so that only the limit on tokens holds.
    if not recipe.methods and recipe.rollout.strategy["name"] == "single":
        rows = min(rows, _rows(recipe, ranks))
    return rows * row.sequences, row.width


def slots(recipe: Recipe, ranks: int) -> int:
    """Number of responses that a rank decodes together."""
    rollout = recipe.rollout
    cached = max(LEAST_ROWS, rollout.cache_tokens // largest(recipe).width)
    return max(LEAST_ROWS, min(rollout.batch_rows, _rows(recipe, ranks), cached))


def _asked_by_name(recipe: Recipe) -> set[str]:
    """Names of the models that the recipe's `teachers` group mentions."""
    teachers = recipe.teachers
    if teachers is None:
        return set()
    models = [teachers.default, teachers.reference, *teachers.routes.values(), EMA if teachers.ema.served else None]
    return {name for model in models for name in ([model] if isinstance(model, str) else model or ())}


def memory_of(
    recipe: Recipe,
    shape: ModelShape,
    needs: Needs,
    device: Hardware,
    *,
    gpu: bool,
    ranks: int = 1,
    shared: Shared | None = None,
) -> Memory:
    """Estimate the memory of a rank.

    Args:
        recipe: the job.
        shape: sizes of its student.
        needs: needs of its terms and controllers, which decide what copies of weights are kept.
        device: gives the reserve.
        gpu: whether the rank runs on a GPU, on which tiles of logits are larger by default.
        ranks: number of data-parallel processes.
        shared: the prompts that rows share; None if they are read whole.
    """
    sharded = recipe.train.sharding == "fsdp"
    parts = ranks if sharded else 1
    eight = recipe.train.optimizer == "adamw_8bit"
    always = {
        "weights": shape.weight_bytes,
        "moments of AdamW": shape.small_moments(parts) if eight else 2 * shape.trained_bytes,
        **_copies(recipe, shape, needs.local | _asked_by_name(recipe), gpu=gpu, ranks=ranks),
    }
    here = slots(recipe, ranks)
    fixed, decoding = _engine_parts(recipe, shape, here, sharded=sharded, gpu=gpu)
    activations = shape.activation_bytes(*micro_batch(recipe, ranks))
    if shared is not None and activations is not None:
        counted = shape.activation_bytes(shared.sequences, shared.rest, shared.prefixes, shared.prefix)
        activations = None if counted is None else max(activations, counted)  # a step's rows may all differ
    return Memory(
        always={**{name: size / parts for name, size in always.items()}, **fixed},
        learning=_learning(recipe, shape, activations or 0, gpu=gpu, ranks=ranks),
        rollout=decoding,
        reserve=device.reserve,
        together=recipe.train.max_staleness > 0,
        slots=here,
        unknown=(
            *([("learning", ACTIVATIONS)] if activations is None else []),
            *([("rollout", _SLOT_PARTS[0])] if shape.cache_bytes is None else []),
        ),
    )


_SAMPLED_WITH = "weights that steps are sampled with"


def _copies(recipe: Recipe, shape: ModelShape, named: Collection[str], *, gpu: bool, ranks: int) -> dict[str, float]:
    """Bytes of weights that are kept in addition to the student's own, by purpose."""
    methods = {str(method.get("name")) for method in recipe.methods}
    parts = {
        "copy for the reference initial": shape.trained_bytes if INITIAL in named and recipe.model.lora is None else 0,
        "moving average": shape.trained * 4 if EMA in named else 0,
        "copies of effopd": 2 * shape.trained_bytes if "effopd" in methods else 0,
        "copy of adwin's probe": shape.weight_bytes + shape.trained_bytes if "adwin" in methods and ranks == 1 else 0,
    }
    if recipe.train.sharding == "none" or engine_of(recipe).traits.takes_shards:
        parts[_SAMPLED_WITH] = shape.trained_bytes * _kept_versions(recipe, gpu=gpu)
    return {name: size for name, size in parts.items() if size}


def _kept_versions(recipe: Recipe, *, gpu: bool) -> int:
    """Number of copies of the trained tensors, or of a rank's shards, that the device holds to sample steps ahead."""
    lag, engine = recipe.train.max_staleness, engine_of(recipe)
    # On a CPU the device is the host, which keeps a copy for each step of the lag and one more. Shards stay on the
    # device.
    if not gpu or (recipe.train.sharding != "none" and engine.traits.takes_shards):
        return lag + 1 if lag else 0
    return int(bool(lag) and not engine.traits.holds_weights)


def _engine_parts(
    recipe: Recipe, shape: ModelShape, slots: int, *, sharded: bool, gpu: bool
) -> tuple[dict[str, float], dict[str, float]]:
    """Bytes that sampling takes all the time, and bytes that it takes only while it decodes, each by part."""
    rollout, engine = recipe.rollout, engine_of(recipe)
    if rollout.engine.get("name") == "vllm":
        width = _DTYPES.get(str(rollout.engine.get("dtype")), shape.width)
        of_vllm = {
            "weights of vLLM": float(shape.total * width),
            VLLM_CACHE: rollout.cache_tokens * (shape.cache_bytes or 0) * width / shape.width,
        }
        return ({}, of_vllm) if rollout.engine.get("sleep") else (of_vllm, {})
    if not engine.traits.on_device:
        return {}, {}
    longest = settled(largest(recipe).width)
    # Sampling in process needs all weights of a sharded student at once, but only while it decodes.
    gathered = shape.total * shape.width if sharded and not engine.traits.holds_weights else 0
    lagging = recipe.train.max_staleness and sharded and not engine.traits.takes_shards
    frozen = shape.weight_bytes - shape.trained_bytes
    whole = shape.trained_bytes * _kept_versions(recipe, gpu=gpu) + frozen if lagging else 0
    return {_SAMPLED_WITH: whole} if whole else {}, {
        "all weights gathered": gathered,
        CASTS: shape.cast_bytes,
        WIDENED: shape.widened,
        **dict(zip(_SLOT_PARTS, _per_slot(shape, longest, slots), strict=True)),
    }


def _learning(recipe: Recipe, shape: ModelShape, activations: int, *, gpu: bool, ranks: int) -> dict[str, float]:
    """Bytes of an update by part: gradients, and what its largest micro-batch takes."""
    sharded = recipe.train.sharding == "fsdp"
    sequences, _ = micro_batch(recipe, ranks)
    scratch = (recipe.train.logit_scratch_mib or (1024 if gpu else 128)) * 2**20
    positions = sequences // largest(recipe).sequences * recipe.rollout.max_new_tokens
    return {
        "gradients": shape.trained_bytes / (ranks if sharded else 1),
        ACTIVATIONS: activations,
        "tiles of logits": min(scratch, positions * shape.vocabulary * 4),
        "gradients of head and embeddings": shape.head_bytes,
        WIDENED: shape.widened,
        "buckets of gradients between ranks": shape.trained_bytes if ranks > 1 and not sharded else 0,
        "weights gathered": (shape.outside + _GATHERED_LAYERS * shape.layer) * shape.width if sharded else 0,
        "gradients to be scattered": _scattered(shape) if sharded else 0,
    }


def _per_slot(shape: ModelShape, longest: int, slots: int) -> tuple[float, float, float]:
    """Bytes of each of `_SLOT_PARTS` for all slots."""
    cache = slots * (longest * (shape.cache_bytes or 0) + (shape.state_bytes or 0))
    return cache, cache / shape.layers, _LOGIT_COPIES * slots * shape.vocabulary * 4


def _fitting_cache(memory: Memory, over: float, recipe: Recipe) -> int | None:
    """The largest `rollout.cache_tokens` with which rollouts take at least `over` bytes less; None if no value does.

    The cache and the other parts of a slot shrink with it, slot by slot. Weights that rollouts hold do not.
    """
    now, longest = recipe.rollout.cache_tokens, largest(recipe).width
    if cache := (memory.always | memory.rollout).get(VLLM_CACHE, 0.0):
        tokens = int(now * (1 - over / cache))
        return tokens if tokens >= longest else None
    a_slot = sum(memory.rollout.get(part, 0.0) for part in _SLOT_PARTS) / memory.slots
    slots = memory.slots - math.ceil(over / a_slot) if a_slot else 0
    return slots * longest if slots >= LEAST_ROWS else None


def _scattered(shape: ModelShape) -> float:
    """Bytes of the gradients of a gathered part before they are scattered to the ranks.

    There are two copies, one in the dtype of the backward pass and one in float32 for the reduction. The gradients of
    head and embeddings, which are counted separately, have been freed by then.
    """
    share = shape.trained / shape.total
    return max(0.0, share * max(shape.outside, shape.layer) * (shape.width + 4) - shape.head_bytes)


def engine_of(recipe: Recipe) -> type[RolloutEngine]:
    """The class of the recipe's rollout engine."""
    engine: type[RolloutEngine] = ROLLOUT_ENGINES.load(str(recipe.rollout.engine["name"]))
    return engine


def check_fits(memory: Memory, device: Hardware, recipe: Recipe, *, ranks: int = 1) -> None:
    """Check that a rank's peak fits on the device.

    Raises:
        ConfigError: if it does not; the message has what the rank takes, the room there is, and the setting to change.
    """
    room = device.memory * USABLE - memory.reserve
    if memory.peak <= room:
        return
    # Give advice on the part that is too large: vLLM's cache, weights with gradients and moments, rollouts, or a
    # micro-batch.
    always, learning, rollout = (sum(part.values()) for part in (memory.always, memory.learning, memory.rollout))
    lack = (
        f"a rank needs {memory.peak / GIB:.1f} GiB at its peak, but {device.name} has room for {max(room, 0) / GIB:.1f}"
    )
    over = memory.peak - room
    cache, fitting = memory.always.get(VLLM_CACHE, 0.0), _fitting_cache(memory, over, recipe)
    if cache and fitting is not None:
        raise ConfigError(
            f"{lack}, {cache / GIB:.1f} of it for vLLM's cache; set rollout.cache_tokens to {fitting} or less, now "
            f"{recipe.rollout.cache_tokens}, or rollout.engine.sleep to true."
        )
    fixed = always + memory.learning["gradients"]
    if fixed > 0.9 * room:
        lora = "" if recipe.model.lora is not None else "train adapters (model.lora) or "
        if recipe.train.sharding == "none":
            lora = f"shard them over ranks (train.sharding: fsdp), {lora}"
        else:
            lora = f"start more ranks, {lora}"
        raise ConfigError(
            f"{lack}: weights, gradients and moments alone need {fixed / GIB:.1f}; {lora}use a smaller model."
        )
    if rollout > learning:
        raise ConfigError(f"{lack} while it decodes; {_smaller_rollouts(memory, fitting, recipe)}.")
    ways = [] if recipe.model.gradient_checkpointing else ["set model.gradient_checkpointing to true"]
    sequences, width = micro_batch(recipe, ranks)
    windows = largest(recipe).sequences
    part = memory.learning[ACTIVATIONS]
    if sequences > windows and part:
        fitting = max(windows * width, int(sequences * width * max(0.0, part - over) / part))
        ways.append(f"set train.micro_batch_tokens to {fitting} or less, now {recipe.train.micro_batch_tokens}")
    elif windows > 1:
        ways.append(
            f"shorten episodes (rollout.max_new_tokens, now {recipe.rollout.max_new_tokens}), whose windows, {windows} "
            f"of {width} tokens, share a micro-batch"
        )
    elif not ways:
        ways.append(f"shorten the longest response (rollout.max_new_tokens, now {recipe.rollout.max_new_tokens})")
    raise ConfigError(f"{lack}; {' or '.join(ways)}.")


def _smaller_rollouts(memory: Memory, fitting: int | None, recipe: Recipe) -> str:
    """Advice for rollouts that take too much memory; `fitting` is the number of cache tokens that would fit, if any."""
    if fitting is not None:
        return f"set rollout.cache_tokens to {fitting} or less, now {recipe.rollout.cache_tokens}"
    if memory.rollout.get(CASTS, 0.0) and recipe.model.lora is not None and recipe.model.dtype == "float32":
        return f"set model.dtype to bfloat16, which makes the {CASTS} kept during decoding unnecessary"
    largest = max(memory.rollout, key=lambda part: memory.rollout[part])
    if largest in (VLLM_CACHE, *_SLOT_PARTS):
        return f"shorten the longest response (rollout.max_new_tokens, now {recipe.rollout.max_new_tokens})"
    return (
        f"most of it is {largest}, which a smaller cache does not change: set train.mixed_precision to bf16, if it is "
        "not"
    )
