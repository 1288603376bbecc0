"""The student's weights as a checkpoint would hold them, for engines that have weights of their own.

Every sync passes all tensors, with the names and shapes of the saved model, because vLLM fuses layers (queries with
keys and values) and fills a fused layer only when all its parts arrive. The output head is passed even if it is tied to
the embeddings: an engine that keeps a packed copy of the head would otherwise silently keep the old one. The exception
are families that vLLM implements without a head, for which it refuses the name. Adapters are merged into the weights,
in float32, for engines that do not apply them.

Tensors come in chunks, each a layer or a tensor outside the layers, so that no more than one chunk of a sharded student
is gathered at a time.
"""

import copy
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from opd.errors import ConfigError
from student.model.lora import add_lora, has_lora
from student.model.model import Weights
from student.model.sharding import Chunk, full, in_chunks
from student.settings.model import ModelSettings

_WITHOUT_HEAD = frozenset({"gemma2", "gemma3n_text"})
"""Model families whose tied head has no name in vLLM."""
_NAMES_EXPERTS = re.compile(r"expert|moe", re.IGNORECASE)
"""Matches the configuration of every mixture-of-experts model."""


def checkpoint_tensors(
    model: PreTrainedModel, parameters: Iterable[tuple[str, Tensor]] = ()
) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors of the saved model, adapters merged; ranks of a sharded student must iterate together.

    Args:
        model: the student.
        parameters: trained parameters by name, which replace the model's own of the same name.
    """
    for chunk in chunks(model, parameters):
        yield from as_saved(model, chunk).items()


def chunks(model: PreTrainedModel, parameters: Iterable[tuple[str, Tensor]] = ()) -> list[Chunk]:
    """The tensors in groups that are converted together, because a saved tensor may be made of several of the model's.

    See `checkpoint_tensors`.
    """
    given = dict(parameters)
    own = {id(p): given[name] for name, p in model.named_parameters() if name in given}
    config, head = model.config.get_text_config(), model.get_output_embeddings()
    tied = config.model_type in _WITHOUT_HEAD and head.weight is model.get_input_embeddings().weight
    return in_chunks(
        (name, own.get(id(tensor), tensor))
        for name, tensor in model.state_dict(keep_vars=True).items()
        if not (tied and name == "lm_head.weight")
    )


@torch.no_grad()
def as_saved(model: PreTrainedModel, chunk: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """A chunk with the names and shapes of the saved model, gathered and merged, on the model's device."""
    state = {name: full(tensor.detach()).to(model.device) for name, tensor in chunk.items()}
    if has_lora(model):
        state = _merged(model, state)
    return dict(revert_weight_conversion(model, state))


def check_merges(settings: ModelSettings, engine: str, *, merged: bool = True) -> None:
    """Refuse adapters on stacked parameters, as PEFT puts them on the experts of a mixture, instead of on layers.

    The student is built without its weights. A model that cannot be built is not refused here; loading it says why.

    Args:
        settings: the recipe's `model`.
        engine: name of the engine, for the error message.
        merged: whether the engine is sent merged weights rather than adapters.

    Raises:
        ConfigError: naming one such adapter.
    """
    if settings.lora is None:
        return
    found = Weights.of(settings)
    # A dense model has nothing to refuse.
    model = found.skeleton(lambda config: bool(_NAMES_EXPERTS.search(str(config.to_dict()))))
    if model is None:
        return
    add_lora(model, settings.lora, base=found.base)
    from peft.tuners.tuners_utils import BaseTunerLayer  # installed, because add_lora would have refused otherwise

    held = model.state_dict(keep_vars=True)
    for name, layer in model.named_modules():
        if isinstance(layer, BaseTunerLayer) and f"{name}.base_layer.weight" not in held:
            given, done = ("weights with the adapters merged", "merged") if merged else ("the adapters", "sent")
            raise ConfigError(
                f"rollout.engine {engine} receives {given}, but those of {name} (a mixture's experts, "
                f"model.lora.targets) cannot be {done}; name only the attention layers in model.lora.targets, or set "
                "rollout.engine to {name: transformers}."
            )


def _merged(model: PreTrainedModel, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of the plain model: W + (alpha / r) B A, or DoRA's rescaling of it."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    found = {
        name.replace(".base_layer.", "."): tensor
        for name, tensor in state.items()
        if "lora_" not in name and not name.endswith(".base_layer.weight")
    }
    for name, layer in model.named_modules():
        if isinstance(layer, BaseTunerLayer) and f"{name}.base_layer.weight" in state:
            found[f"{name}.weight"] = _merged_weight(layer, name, state)
    return found


def _merged_weight(layer: Any, name: str, state: Mapping[str, Tensor]) -> Tensor:
    # Merge a copy, one layer at a time, because merging and unmerging the layer itself would not restore its bits.
    floats: dict[int, Any] = {
        id(p): nn.Parameter(state[f"{name}.{part}"].clone().float(), requires_grad=False)
        for part, p in layer.named_parameters()
    }
    other = copy.deepcopy(layer, floats)
    other.merge()
    return other.get_base_layer().weight.data
