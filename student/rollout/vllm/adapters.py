"""A LoRA student's adapters inside vLLM, which applies them beside the base that it has read from the student's folder.

Merged into weights of half precision, most of a small update would be lost in rounding (`student.rollout.held_update`).
In float32 nothing is lost, and merged weights decode faster, so they are merged there, as are adapters that vLLM cannot
apply: a warning then says why.
"""

import logging
from collections.abc import Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedModel

from opd.errors import one_line
from student.model.lora import ADAPTER, has_lora, sends_adapters
from student.model.sharding import full
from student.rollout.held_update import HeldUpdate
from student.rollout.servers.weights import written
from student.rollout.vllm.launch import prepare

log = logging.getLogger(__name__)
_LEAST_RANK, _MOST_RANK = 8, 512
"""Of those powers of two that vLLM takes as max_lora_rank."""


def lora_options(model: PreTrainedModel, dtype: str) -> dict[str, Any]:
    """Arguments of `vllm.LLM` with which it applies the adapters of a student; none where they are to be merged."""
    if not has_lora(model) or dtype == "float32":
        return {}
    settings: Any = model.peft_config[ADAPTER]
    if not sends_adapters(model):
        return merged("vLLM has no DoRA")
    if settings.r > _MOST_RANK:
        return merged(f"vLLM applies adapters of rank {_MOST_RANK} at most, and model.lora.rank is {settings.r}")
    if not _takes_adapters(model):
        return merged(f"vLLM applies no adapters to {type(model).__name__}")
    return {"enable_lora": True, "max_lora_rank": max(_LEAST_RANK, 1 << (settings.r - 1).bit_length())}


def merged(reason: str) -> dict[str, Any]:
    """Say why adapters are merged; returns the arguments of `vllm.LLM` for that."""
    log.warning("adapters are merged into the weights of rollouts, which rounds small updates away: %s", reason)
    return {"enable_lora": False}


def _takes_adapters(model: PreTrainedModel) -> bool:
    prepare()
    from vllm import ModelRegistry
    from vllm.model_executor.models import supports_lora

    known, names = ModelRegistry.models, model.config.architectures or [type(model).__name__]
    return any(supports_lora(known[name].load_model_cls()) for name in names if name in known)


class Adapters:
    """Gives vLLM the student's adapters.

    Args:
        model: the student.
        dtype: name of the dtype in which vLLM holds them.
        held: looks at them before they are rounded.

    Attributes:
        request: what a request to vLLM names them by; None before the first ones.
    """

    def __init__(self, model: PreTrainedModel, dtype: str, held: HeldUpdate) -> None:
        self._model, self._dtype, self._held = model, dtype, held
        self._count = 0
        self.request: Any = None

    def load(self, llm: Any, given: Mapping[str, Tensor]) -> None:
        """Replace the adapters in vLLM; ranks of a sharded student must call it together.

        Args:
            llm: a `vllm.LLM`.
            given: trained parameters by name, which replace the model's own of the same name.
        """
        whole = {name: full(tensor.detach()) for name, tensor in given.items() if "lora_" in name}
        self._held.adapters(self._sent(llm, whole))

    def _sent(self, llm: Any, whole: Mapping[str, Tensor]) -> dict[str, Tensor]:
        from vllm.lora.request import LoRARequest

        tensors, config, files = written(self._model, whole, self._dtype, self._held, adapters=True)
        # Under a new number, so that vLLM cannot take older ones for them.
        self._count += 1
        with TemporaryDirectory() as folder:
            save_file(tensors, Path(folder, files[0]))
            Path(folder, files[1]).write_text(config)
            self.request = LoRARequest(f"adapters-{self._count}", self._count, folder)
            llm.llm_engine.add_lora(self.request)
        return tensors

    def problem(self, llm: Any) -> str:
        """A clause saying why vLLM cannot apply the adapters, found by a trial; "" if it can.

        vLLM refuses adapters of some layers, and leaves others out without a word.
        """
        ones = {name: torch.ones(p.shape) for name, p in self._model.named_parameters() if "lora_" in name}
        try:
            self._sent(llm, ones)
            arrived = sum(llm.apply_model(_entries))
        except Exception as error:
            return one_line(error, 300)
        sent = sum(tensor.numel() for name, tensor in ones.items() if "lora_B" in name)
        return "" if arrived == sent else f"of {sent} entries of adapters, {arrived} arrive in vLLM's layers"


def _entries(model: torch.nn.Module) -> int:
    """Number of entries other than 0 that vLLM's layers hold of the second factors."""
    stacks = (getattr(module, "lora_b_stacked", ()) for module in model.modules())
    return sum(int(torch.count_nonzero(tensor)) for stack in stacks for tensor in stack)
