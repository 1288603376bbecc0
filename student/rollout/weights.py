"""The student's weights as a checkpoint would hold them, for an engine that has weights of its own.

Everything is given at each update, in names and shapes of the saved model: vLLM fuses layers (queries with keys and
values), and fills a fused one only when all its parts come. The output head is named even where it is tied to the
embeddings: an engine that keeps a packed copy of it would otherwise go on with the old one, without an error. Not of
families that vLLM has without a head: it refuses the name. Adapters are added to the weights, in float32, because a
merged model decodes at the speed of a plain one.

Tensors come in chunks, a layer or a tensor outside the layers: no more than a chunk of a sharded student is ever whole.
"""

import copy
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from opd.errors import ConfigError
from student.learning.lora import add_lora, has_lora
from student.learning.model import Weights
from student.learning.sharding import Chunk, full, in_chunks
from student.recipe import ModelSettings

_WITHOUT_HEAD = frozenset({"gemma2", "gemma3n_text"})
"""Families whose tied head vLLM has no name for."""
_NAMES_EXPERTS = re.compile(r"expert|moe", re.IGNORECASE)
"""Stands in the configuration of every mixture."""


def checkpoint_tensors(
    model: PreTrainedModel, parameters: Iterable[tuple[str, Tensor]] = ()
) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors of the saved model, adapters added; of a sharded student all ranks run through them.

    Args:
        model: the student.
        parameters: trained parameters by name, in place of the model's own of the same name.
    """
    for chunk in chunks(model, parameters):
        yield from as_saved(model, chunk).items()


def chunks(model: PreTrainedModel, parameters: Iterable[tuple[str, Tensor]] = ()) -> list[Chunk]:
    """The tensors that are saved together, because one may be made of several; see `checkpoint_tensors`."""
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
    """A chunk by names and shapes of the saved model, whole and with its adapters added, on the model's device."""
    state = {name: full(tensor.detach()).to(model.device) for name, tensor in chunk.items()}
    if has_lora(model):
        state = _merged(model, state)
    return dict(revert_weight_conversion(model, state))


def check_merges(settings: ModelSettings, engine: str, *, merged: bool = True) -> None:
    """Refuse adapters that are not on layers but on stacked parameters, as peft has those of a mixture's experts.

    The student is built without its weights. What cannot be built is not refused here: loading says why.

    Args:
        settings: the recipe's `model`.
        engine: name of an engine that is given merged weights, or adapters.
        merged: whether it is given merged weights.

    Raises:
        ConfigError: naming one of them.
    """
    if settings.lora is None:
        return
    found = Weights.of(settings)
    try:
        config = AutoConfig.from_pretrained(found.base, revision=found.revision)
        # Building takes seconds for a large model, and a dense one has nothing to refuse.
        if not _NAMES_EXPERTS.search(str(config.to_dict())):
            return
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config)
    except (OSError, ValueError):
        return
    add_lora(model, settings.lora, base=found.base)
    from peft.tuners.tuners_utils import BaseTunerLayer  # there, or add_lora would have said so

    held = model.state_dict(keep_vars=True)
    for name, layer in model.named_modules():
        if isinstance(layer, BaseTunerLayer) and f"{name}.base_layer.weight" not in held:
            given, done = ("weights with the adapters merged", "merged") if merged else ("the adapters", "sent")
            raise ConfigError(
                f"rollout.engine {engine} is given {given}, and those of {name} (a mixture's experts, "
                f"model.lora.targets) cannot be {done}; name the layers of attention in model.lora.targets, or set "
                "rollout.engine to {name: transformers}."
            )


def _merged(model: PreTrainedModel, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of the plain model: W + (alpha / r) B A, or what DoRA makes of it."""
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
    # A copy, one layer at a time: merging and unmerging the layer itself would not give its bits back.
    floats: dict[int, Any] = {
        id(p): nn.Parameter(state[f"{name}.{part}"].clone().float(), requires_grad=False)
        for part, p in layer.named_parameters()
    }
    other = copy.deepcopy(layer, floats)
    other.merge()
    return other.get_base_layer().weight.data
