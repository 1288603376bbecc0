"""Records which experts of a mixture each token passes in one forward pass, for replay in another.

    p = softmax of the router's logits, over all E experts
    own choice       i = the k largest p
    replayed         i = the experts that were recorded
    gate             p_i / sum_k p_i, or p_i if the model does not normalise (`norm_topk_prob: false`)

Only the choice is replayed. The gate is computed from the router's current logits, so its gradient reaches the router.
Routers are the modules of transformers whose class is named ...TopKRouter and which return (logits, gates, choice) by
the formula above; others, such as sigmoid routers with groups, are refused at their first forward pass.
"""

from types import TracebackType
from typing import Any
from weakref import WeakSet

import numpy as np
import torch
from jaxtyping import Float, Int
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from transformers import PreTrainedModel

from opd.errors import ConfigError


def routers(lm: PreTrainedModel) -> list[nn.Module]:
    """The routers of a mixture of experts, layer by layer.

    Raises:
        ConfigError: if the model has no router.
    """
    modules = [module for module in lm.modules() if type(module).__name__.lower().endswith("topkrouter")]
    if not modules:
        raise ConfigError(
            f"method routing_replay found no router of experts that it can record in a {type(lm).__name__}; remove "
            "the method."
        )
    return modules


def gates(
    router: nn.Module, logits: Float[Tensor, "n e"], experts: Int[Tensor, "n k"], like: torch.dtype
) -> Float[Tensor, "n k"]:
    """The weights with which the outputs of `experts` are summed, by the router's rule, with gradient to the logits."""
    # In float32, as the models do, even for float64 weights.
    chosen = torch.softmax(logits, dim=-1, dtype=torch.float).gather(-1, experts)
    if getattr(router, "norm_topk_prob", True):
        chosen = chosen / chosen.sum(-1, keepdim=True)
    return chosen.to(like)


_checked: WeakSet[nn.Module] = WeakSet()


def check_rule(router: nn.Module, output: Any) -> None:
    """Refuse a router whose gates do not follow the formula of this module; asked once of each.

    The comparison waits for the device, in every layer of every pass.

    Raises:
        ConfigError: naming the router's class.
    """
    if router in _checked:
        return
    ours: Tensor | None = None
    if isinstance(output, tuple) and len(output) == 3 and output[2].dtype == torch.long:
        logits, scores, choice = output
        if logits.shape[0] == choice.shape[0] and scores.shape == choice.shape:
            ours = gates(router, logits.detach(), choice, scores.dtype)
    if ours is None or not torch.allclose(ours, output[1].detach(), rtol=2e-2, atol=1e-4):
        raise ConfigError(
            f"method routing_replay cannot replay the choice of a {type(router).__name__}, whose gates are not a "
            "softmax over experts; remove the method."
        )
    _checked.add(router)


class Recorder:
    """Records the choices of all routers; a context manager around forward passes.

    Args:
        lm: a mixture-of-experts model.
    """

    def __init__(self, lm: PreTrainedModel) -> None:
        self._routers = routers(lm)
        self._found: list[Tensor] = []
        self._handles: list[RemovableHandle] = []

    def __enter__(self) -> "Recorder":
        self._handles = [router.register_forward_hook(self._keep) for router in self._routers]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for handle in self._handles:
            handle.remove()
        self._found = []

    def _keep(self, router: nn.Module, inputs: Any, output: Any) -> None:
        check_rule(router, output)
        self._found.append(output[2])

    def take(self, sequences: int) -> NDArray[np.int16]:
        """The experts chosen in the forward passes since the last call: [sequences, tokens, layers, k] int16."""
        stacked = torch.stack(self._found, dim=1).to(torch.int16).cpu().numpy()
        self._found = []
        return stacked.reshape(sequences, -1, *stacked.shape[1:])
