"""Which attention of transformers gives a model's own numbers: asked of the model itself, by running it.

No list of families and no key of a config is read: a model hands its attention function what its scores need, and what
the function does not take it drops in silence.
"""

from contextlib import suppress
from typing import Any

import torch

from opd.errors import ConfigError

_OTHERS_TAKE = ("softcap", "s_aux")
"""Arguments with which models cap attention scores and add sinks to them. Eager attention and flash attention take
them; sdpa drops them."""


@torch.no_grad()
def keep_scores(lm: Any, asked: str | None, key: str) -> None:
    """Have a loaded model run with eager attention if sdpa would drop something of its scores.

    Args:
        lm: a causal language model of transformers.
        asked: the attention implementation that was asked for; None for the default.
        key: the setting to name in an error.

    Raises:
        ConfigError: if sdpa was asked for, or the model does not let go of it.
    """
    if lm.config._attn_implementation != "sdpa" or not (dropped := _dropped(lm)):
        return
    if asked != "sdpa":
        lm.set_attn_implementation("eager")
    if lm.config._attn_implementation == "sdpa":
        raise ConfigError(f"{key} is sdpa, which ignores {dropped} of this model's attention scores; set it to eager.")


def _dropped(lm: Any) -> str:
    """What sdpa would drop of the model's attention scores, in words; "" for nothing."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS as functions

    found = set[str]()
    sdpa = functions["sdpa"]

    def listening(*arguments: Any, **keywords: Any) -> Any:
        found.update(name for name in _OTHERS_TAKE if keywords.get(name) is not None)
        return sdpa(*arguments, **keywords)

    functions["sdpa"] = listening
    try:
        with suppress(Exception):  # what cannot be run is refused by those who run it, with their reasons
            lm.base_model(input_ids=torch.ones((1, 2), dtype=torch.long, device=lm.device), use_cache=False)
    finally:
        functions["sdpa"] = sdpa
    return " and ".join({"softcap": "the soft-cap", "s_aux": "the sinks"}[name] for name in sorted(found))
