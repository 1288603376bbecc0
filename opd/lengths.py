"""Lengths at which a model may change: those that its config states, and, by trial, where its positions do.

A config states lengths under many names: positions, windows, chunks. They are taken as guesses of where to try a model.
"""

import re
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

if TYPE_CHECKING:
    from transformers import PreTrainedModel

LENGTHS = r"window|position|chunk|conv|block|length|seq_len|context|n_ctx"
"""Names in configs that may stand for a number of tokens; a length too many costs a few forward passes."""
POSITIONS = r"position|seq_len|n_ctx|context|model_max_length"
"""Names in configs that may stand for a number of positions."""
_SPANS = (4, 1024)
"""Numbers of first positions in which a change is looked for."""
_MOST = (
    *("max_position_embeddings", "n_positions", "max_sequence_length", "max_seq_length", "max_seq_len"),
    *("model_max_length", "context_length", "max_context_length", "seq_length", "n_ctx", "max_target_positions"),
)
"""Names of the number of positions that a model was made for; the first that a config has counts."""


def stated(config: Any, pattern: str = LENGTHS) -> set[int]:
    """The numbers in a transformers config, at any depth, whose names match `pattern`."""
    return _stated(config.to_dict(), pattern, "")


def _stated(value: Any, pattern: str, name: str) -> set[int]:
    if isinstance(value, dict):
        return {found for key, one in value.items() for found in _stated(one, pattern, str(key))}
    return {value} if isinstance(value, int) and not isinstance(value, bool) and re.search(pattern, name) else set()


def most_positions(config: Any) -> int | None:
    """The number of positions that a model was made for, from its transformers config; None if it states none."""
    text = config.get_text_config()
    found = (getattr(text, name, None) for name in _MOST)
    return next((most for most in found if isinstance(most, int) and not isinstance(most, bool) and most > 1), None)


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
