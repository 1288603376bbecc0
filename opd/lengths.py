"""Lengths at which a model may change: those that its config states, and, by trial, where its positions do.

A config may state a length under any name, so each of its numbers is taken as a guess of where to try a model.
"""

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_SPANS = (4, 1024)
"""Numbers of first positions in which a change is looked for."""
_PAST = 4
"""Lengths past the end of a table that are tried as well."""
_MOST = (
    *("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_length", "max_seq_len"),
    *("model_max_length", "context_length", "max_context_length", "seq_length", "n_ctx", "max_target_positions"),
)
"""Names of the number of positions that a model was made for; the first that a config has counts."""


def stated(config: Any) -> set[int]:
    """The numbers in a transformers config, at any depth, whatever they are called."""
    return set(_stated(config.to_dict()))


def _stated(value: Any) -> Iterable[int]:
    if isinstance(value, dict):
        value = [*value.values()]
    if isinstance(value, list | tuple):
        return [found for one in value for found in _stated(one)]
    return [value] if isinstance(value, int) and not isinstance(value, bool) else []


def within(lengths: Iterable[int], tokens: float) -> list[int]:
    """The longest of `lengths` that have at most `tokens` in all, ascending: what a bound on a trial's cost leaves."""
    chosen: list[int] = []
    for length in sorted(lengths, reverse=True):
        if length <= tokens:
            chosen.append(length)
            tokens -= length
    return chosen[::-1]


def most_positions(config: Any) -> int | None:
    """The number of positions that a model was made for, from its transformers config; None if it states none."""
    text = config.get_text_config()
    found = (getattr(text, name, None) for name in _MOST)
    return next((most for most in found if isinstance(most, int) and not isinstance(most, bool) and most > 1), None)


@torch.no_grad()
def positions_end(model: "PreTrainedModel", longest: int, whole: float) -> int | None:
    """Find by trial the longest row that a model on a CPU has positions for; None if it takes `longest` tokens.

    A table of positions ends in an error, which only a CPU reports in a way that can be caught.

    Args:
        model: a causal language model, or its base.
        longest: the longest row to try.
        whole: rows of up to so many tokens are run whole, and of longer ones two tokens, the last one at their end.
    """
    if _takes(model, longest, whole):
        return None
    least, beyond = 1, longest
    while beyond - least > 1:
        middle = (least + beyond) // 2
        least, beyond = (middle, beyond) if _takes(model, middle, whole) else (least, middle)
    if least <= whole < beyond:  # nothing but the way of trying made the difference: it refuses gaps between positions
        return None
    # A model that takes only some lengths, such as whole chunks, has no end there.
    return None if any(_takes(model, n, whole) for n in range(beyond, min(beyond + _PAST, longest))) else least


def _takes(model: "PreTrainedModel", tokens: int, whole: float) -> bool:
    inputs: dict[str, Any] = {"input_ids": torch.ones((1, tokens if tokens <= whole else 2), dtype=torch.long)}
    if tokens > whole:
        inputs["position_ids"] = torch.tensor([[0, tokens - 1]])
    try:
        model(**inputs, use_cache=False)
    except (IndexError, RuntimeError, ValueError):
        return False
    except TypeError:  # it takes no positions
        return True
    return True


class Turn(NamedTuple):
    """A length beyond which a row changes the positions of all rows in its pass.

    Attributes:
        length: the longest row that does not.
        settles: whether the positions of all longer rows are the same; otherwise each length has its own.
    """

    length: int
    settles: bool


@torch.no_grad()
def position_turn(model: "PreTrainedModel", longest: int) -> Turn | None:
    """Find by trial the length beyond which a row changes the positions of all rows in its pass; None if there is none.

    Tokens at the first positions are read together with a token far behind, which must not change them. Neither the
    family nor the config says where the turn is: it is searched for by bisection. In half precision, what is first
    compared are four tokens, then tokens hundreds of positions apart, whose rotations differ by more than is rounded
    away; a turn below these that changes little is not seen.

    Args:
        model: a causal language model, or its base.
        longest: the longest row to try; all its positions are taken to exist.
    """
    training = model.training
    model.eval()
    try:
        found = (_turn(model, span, longest) for span in _SPANS if span + 1 < longest)
        return next((turn for turn in found if turn is not None), None)
    except (TypeError, ValueError, RuntimeError, IndexError, AttributeError):
        return None  # it takes no position ids, and so scales none by a row's length
    finally:
        model.train(training)


def _turn(model: "PreTrainedModel", span: int, longest: int) -> Turn | None:
    """The turn between `span` + 1 and `longest` tokens, seen in three tokens within the first `span` positions."""
    ids = torch.arange(1, 5, device=model.device)[None]
    ids.tolist()  # fails of tensors without content, on which nothing could be seen, before a pass is made

    def first(length: int) -> Tensor:
        """Hidden states of three tokens in a row whose fourth and last token is at position `length` - 1."""
        at = torch.tensor([[0, span // 2, span - 1, length - 1]], device=model.device)
        # With a mask, because without one the gaps between positions would mean that several rows are packed.
        inputs = {"attention_mask": torch.ones_like(ids), "position_ids": at, "use_cache": False}
        return model.base_model(input_ids=ids, **inputs).last_hidden_state[0, :3]

    def first_anew(length: int) -> Tensor:
        first(span + 1)  # a short row ends what some models keep of the longest row before
        return first(length)

    short, far = first(span + 1), first(longest)
    if _same(short, far):
        return None
    within, beyond = span + 1, longest
    while beyond - within > 1:
        middle = (within + beyond) // 2
        within, beyond = (middle, beyond) if _same(short, first_anew(middle)) else (within, middle)
    turn = Turn(within, _same(first_anew(beyond), far))
    first(span + 1)
    return turn


def _same(one: Tensor, other: Tensor) -> bool:
    # The shapes are the same, so that nothing rounds otherwise, except among the experts of a mixture.
    least = 1e-4 if one.dtype == torch.float32 else 1e-2
    apart = bool((one.float() - other.float()).abs().max() > least * one.float().abs().max())
    return not apart  # as it is of states that are not finite, which tell nothing
