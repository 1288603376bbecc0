"""What the linear functions take besides tensors, and what they refuse before any tile is projected."""

import math
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from opd.maths.checks import check_integer, check_shape, describe


@dataclass(frozen=True, slots=True, eq=False)
class HeadSettings:
    """What turns a projection into logits: soft_cap * tanh(scale * (head @ hidden + bias) / soft_cap).

    Attributes:
        bias: [V] or None; the student's carries its gradient.
        scale: logit scale (Cohere, Granite), not 0.
        soft_cap: final soft-cap (Gemma), 0 for none.
    """

    bias: Float[Tensor, " V"] | None = None
    scale: float = 1.0
    soft_cap: float = 0.0


@dataclass(frozen=True, slots=True, eq=False)
class Reference:
    """A reference model R that turns the target T into T^power R^(1 - power), normalised (G-OPD, arXiv 2602.12125).

    Attributes:
        hidden: [N, Hr].
        head: [V, Hr].
        power: lambda of G-OPD, at least 0: 1 is the teacher alone, above 1 extrapolates away from the reference.
        settings: of the reference's head.
    """

    hidden: Float[Tensor, "N Hr"]
    head: Float[Tensor, "V Hr"]
    power: float
    settings: HeadSettings = HeadSettings()


def check_sides(
    sides: list[tuple[str, Tensor, Tensor, HeadSettings]], reference: Reference | None, tokens: int, limit: int | None
) -> int:
    """Number of vocabulary entries that count."""
    if reference is not None and not 0 <= reference.power < math.inf:
        raise ValueError(f"reference.power must be at least 0 and finite, but is {reference.power!r}.")
    for side in sides:
        _check_side(*side, tokens)
    return _vocabulary_limit(limit, [len(side[2]) for side in sides])


def _check_side(name: str, hidden: Tensor, head: Tensor, settings: HeadSettings, tokens: int) -> None:
    check_matrix(f"{name}_hidden", hidden)
    check_matrix(f"{name}_head", head)
    check_shape(f"{name}_hidden", hidden, (tokens, head.shape[1]), f"student_hidden and {name}_head")
    check_head_settings(f"{name}_settings", settings, head, f"{name}_head")


def check_matrix(name: str, tensor: Tensor) -> None:
    """Refuses a tensor that is not a floating-point matrix."""
    if tensor.ndim != 2 or not tensor.is_floating_point():
        raise ValueError(f"{describe(name, tensor)} must be a floating-point matrix.")


def check_head_settings(name: str, settings: HeadSettings, head: Tensor, like: str) -> None:
    """Refuses a bias that does not fit the head, and a scale or soft-cap without meaning."""
    if settings.bias is not None:
        check_shape(f"{name}.bias", settings.bias, (len(head),), like)
        if not settings.bias.is_floating_point():
            raise ValueError(f"{describe(f'{name}.bias', settings.bias)} must be floating point.")
    if not (settings.scale and math.isfinite(settings.scale) and 0 <= settings.soft_cap < math.inf):
        raise ValueError(
            f"{name} must have a finite scale other than 0 and a finite soft_cap of at least 0, but they are "
            f"{settings.scale!r} and {settings.soft_cap!r}."
        )


def check_hidden_and_head(hidden: Tensor, head: Tensor, settings: HeadSettings, vocab_size: int | None) -> int:
    """Number of vocabulary entries that count, for functions of one model.

    Raises:
        ValueError: for shapes, dtypes or settings that cannot work.
    """
    check_matrix("hidden", hidden)
    check_matrix("head", head)
    check_shape("hidden", hidden, (len(hidden), head.shape[1]), "head")
    check_head_settings("settings", settings, head, "head")
    return _vocabulary_limit(vocab_size, [len(head)])


def check_scratch(scratch_bytes: int | None) -> None:
    """Refuses a bound on the tiles that is not a positive number of bytes."""
    if scratch_bytes is not None:
        check_integer("scratch_bytes", scratch_bytes, 1)


def _vocabulary_limit(vocab_size: int | None, sizes: list[int]) -> int:
    limit = min(sizes) if vocab_size is None else vocab_size
    check_integer("vocab_size", limit, 1, min(sizes), "the smallest head")
    return limit
