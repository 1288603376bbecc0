"""The student's weights as a checkpoint would hold them, for an engine that has weights of its own.

Everything is given at each update, in names and shapes of the saved model: vLLM fuses layers (queries with keys and
values), and fills a fused one only when all its parts come. The output head is named even where it is tied to the
embeddings: an engine that keeps a packed copy of it would otherwise go on with the old one, without an error. Adapters
are added to the weights, in float32, because a merged model decodes at the speed of a plain one.
"""

import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion

from opd.maths.linear.divergence import gathered
from student.learning.lora import has_lora


@torch.no_grad()
def checkpoint_tensors(
    model: PreTrainedModel, parameters: Iterable[tuple[str, Tensor]] = ()
) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors of the saved model, adapters added.

    Args:
        model: the student.
        parameters: trained parameters by name, in place of the model's own of the same name.
    """
    given = dict(parameters)
    own = {id(p): given[name].to(p.device) for name, p in model.named_parameters() if name in given}
    state = {name: own.get(id(t), t) for name, t in model.state_dict(keep_vars=True).items()}
    if has_lora(model):
        state = _merged(model, state)
    for name, tensor in revert_weight_conversion(model, state).items():
        yield name, gathered(tensor).detach()


def _merged(model: PreTrainedModel, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """The weights of the plain model: W + (alpha / r) B A, or what DoRA makes of it."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    found = {
        name.replace(".base_layer.", "."): tensor
        for name, tensor in state.items()
        if "lora_" not in name and not name.endswith(".base_layer.weight")
    }
    for name, layer in model.named_modules():
        if isinstance(layer, BaseTunerLayer):
            found[f"{name}.weight"] = _merged_weight(layer, name, state)
    return found


def _merged_weight(layer: Any, name: str, state: Mapping[str, Tensor]) -> Tensor:
    # A copy, one layer at a time: merging and unmerging the layer itself would not give its bits back.
    other = copy.deepcopy(layer)
    for part, parameter in other.named_parameters():
        parameter.data = state[f"{name}.{part}"].detach().clone().float()
    other.merge()
    return other.get_base_layer().weight.data
