"""A small random model of the student's family, on which can be tried, without any weights, what the student can do.

It has the student's config, except for few layers, few ids and narrow MLPs.
"""

import copy
import re
from typing import Any

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from student.model.recompute import layers_of

_LEAST_LAYERS = 2
_MOST_LAYERS = 8
_IDS = 64
_NARROW = 64
_MLP = re.compile(r"(^|_)(intermediate_size|ffn_dim|n_inner)")


@torch.no_grad()
def sibling(config: PreTrainedConfig, attention: str | None = None) -> PreTrainedModel | None:
    """A small model of the family of `config` in eval mode; None if none can be built or run.

    Args:
        config: the student's config.
        attention: attention implementation; None for the default.
    """
    extra = {"attn_implementation": attention} if attention else {}
    try:
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(0)
            model: PreTrainedModel = AutoModelForCausalLM.from_config(_small(config), dtype=torch.float32, **extra)
        model.eval()
        model(torch.tensor([[1, 2, 3]]), use_cache=False)
        if len(layers_of(model)) not in (0, model.config.get_text_config().num_hidden_layers):
            return None  # its layers are counted in another way, so that a cache for it would be of another size
    except Exception:  # sizes may depend on each other in any way, and what is tried must not be refused for that
        return None
    return model


def _small(config: PreTrainedConfig) -> PreTrainedConfig:
    small = copy.deepcopy(config)
    text: Any = small.get_text_config()
    depth, kinds = int(text.num_hidden_layers), getattr(text, "layer_types", None) or []
    # Enough layers for one of each kind.
    layers = min(depth, _MOST_LAYERS, max([_LEAST_LAYERS, *(kinds.index(kind) + 1 for kind in set(kinds))]))
    for key, value in list(vars(text).items()):
        if isinstance(value, list) and len(value) == depth:
            setattr(text, key, value[:layers])
        elif _MLP.search(key) and isinstance(value, int):
            setattr(text, key, min(value, _NARROW))
    text.num_hidden_layers = layers
    for part in (small, text):
        part.vocab_size = min(_IDS, text.vocab_size)
        for name in ("pad_token_id", "bos_token_id", "eos_token_id"):
            token = getattr(part, name, None)
            setattr(part, name, min(token, _IDS - 1) if isinstance(token, int) else None)
    return small
