"""The `Reference` argument of the linear functions, and the checks that run before any tile is projected."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from jaxtyping import Float
from torch import Tensor

from opd.heads import OutputHead
from opd.maths.checks import check_integer, check_shape, describe


@dataclass(frozen=True, slots=True, eq=False)
class Reference:
    """A reference model R, which changes the target T into T^power R^(1 - power), normalised (G-OPD, arXiv 2602.12125).

    Attributes:
        hidden: [N, Hr] after the final norm.
        head: the reference's head, or its weight [V, Hr] alone.
        power: lambda of G-OPD, at least 0: 1 is the teacher alone, above 1 extrapolates away from the reference.
    """

    hidden: Float[Tensor, "N Hr"]
    head: OutputHead | Float[Tensor, "V Hr"]
    power: float


def check_models(
    models: Sequence[tuple[str, Tensor, OutputHead]], reference: Reference | None, tokens: int, limit: int | None
) -> int:
    """Checks the models and returns the number of ids that count.

    Args:
        models: name, hidden states and head of each model.
        reference: the reference, for its power; or None.
        tokens: N, the number of hidden states that every model must have.
        limit: the caller's vocab_size, or None for that of the smallest head.

    Raises:
        ValueError: if a shape, a dtype or a setting is not valid.
    """
    if reference is not None and not 0 <= reference.power < math.inf:
        raise ValueError(f"reference.power must be at least 0 and finite, but is {reference.power!r}.")
    for name, hidden, head in models:
        check_matrix(f"{name}_hidden", hidden)
        check_head(f"{name}_head", head)
        check_shape(f"{name}_hidden", hidden, (tokens, head.weight.shape[1]), f"student_hidden and {name}_head")
    return _vocabulary_limit(limit, [head for _, _, head in models])


def check_matrix(name: str, tensor: Tensor) -> None:
    """Refuses a tensor that is not a floating-point matrix."""
    if tensor.ndim != 2 or not tensor.is_floating_point():
        raise ValueError(f"{describe(name, tensor)} must be a floating-point matrix.")


def check_head(name: str, head: OutputHead) -> None:
    """Refuses a weight or bias of the wrong shape or dtype, and a scale, soft-cap or padding out of range."""
    check_matrix(name, head.weight)
    if head.bias is not None:
        check_shape(f"{name}.bias", head.bias, (len(head.weight),), name)
        if not head.bias.is_floating_point():
            raise ValueError(f"{describe(f'{name}.bias', head.bias)} must be floating point.")
    if not (head.scale and math.isfinite(head.scale) and 0 <= head.soft_cap < math.inf):
        raise ValueError(
            f"{name} must have a finite scale other than 0 and a finite soft_cap of at least 0, but they are "
            f"{head.scale!r} and {head.soft_cap!r}."
        )
    if head.padding:
        check_integer(f"{name}.padding", head.padding, 0, len(head.weight) - 1, "fewer than the rows of the weight")


def check_hidden_and_head(hidden: Tensor, head: OutputHead, vocab_size: int | None) -> int:
    """Checks the inputs of a function of one model and returns the number of ids that count.

    Raises:
        ValueError: if a shape, a dtype or a setting is not valid.
    """
    check_matrix("hidden", hidden)
    check_head("head", head)
    check_shape("hidden", hidden, (len(hidden), head.weight.shape[1]), "head")
    return _vocabulary_limit(vocab_size, [head])


def check_scratch(scratch_bytes: int | None) -> None:
    """Refuses a bound on the tiles that is not a positive number of bytes; None is allowed."""
    if scratch_bytes is not None:
        check_integer("scratch_bytes", scratch_bytes, 1)


def _vocabulary_limit(vocab_size: int | None, heads: Sequence[OutputHead]) -> int:
    smallest = min(head.vocab_size for head in heads)
    limit = smallest if vocab_size is None else vocab_size
    check_integer("vocab_size", limit, 1, smallest, "the smallest head")
    return limit
