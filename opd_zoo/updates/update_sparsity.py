"""Measures how sparse the update of reinforcement learning is: the share of weights that moved by no more than a bound.

    update_sparsity         share of all trained weights with |w - w_0| <= bound
    update_sparsity_least   the smallest such share of any one parameter tensor

w_0 is read from the model's files, one tensor at a time, so no copy of the first weights stays in memory. Values are
compared in the dtype that is trained: with model.dtype bfloat16 many moves vanish in the rounding. Source: "RL
finetunes small subnetworks", arXiv 2505.11711 (abstract; the bound of 1e-5 is the usual one).
"""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from pydantic import Field

from opd.adapters import split_adapter
from opd.errors import ConfigError
from student.plugin.controllers import Controller, ControllerSettings

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from torch import Tensor
    from transformers import PreTrainedModel

    from student.plugin.controllers import Services
    from student.plugin.terms import Term
    from student.settings.model import ModelSettings
    from student.settings.recipe import Recipe


class UpdateSparsitySettings(ControllerSettings):
    """Settings of the measurement."""

    every: int = Field(100, ge=1, description="Number of steps between two measurements.")
    bound: float = Field(1e-5, ge=0, description="Largest change of a weight that counts as unmoved.")


class UpdateSparsity(Controller[UpdateSparsitySettings]):
    """Measures the share of weights that training has not moved."""

    evidence: ClassVar[str] = "abstract"

    def __init__(self, settings: UpdateSparsitySettings) -> None:
        super().__init__(settings)
        self._model: ModelSettings | None = None
        self._files: dict[str, Path] = {}

    def check(self, recipe: Recipe, terms: Sequence[Term]) -> None:
        """Refuse adapters, whose weights are not in the model's files.

        Raises:
            ConfigError: with the setting to change.
        """
        if recipe.model.lora is not None:
            raise ConfigError(
                "method update_sparsity compares weights with the model's files, which do not contain the adapters of "
                "model.lora; remove one of the two."
            )
        if split_adapter(recipe.model.path)[1] is not None:
            raise ConfigError(
                f"method update_sparsity compares weights with the model's files, but {recipe.model.path} has an "
                "adapter beside them; merge it first (opd merge OUT BASE+ADAPTER)."
            )
        self._model = recipe.model

    def check_model(self, lm: PreTrainedModel) -> None:
        """If the model's files are here, find the file of each tensor.

        Raises:
            ConfigError: if the files hold no tensor of that name.
        """
        from huggingface_hub.errors import LocalEntryNotFoundError

        with suppress(LocalEntryNotFoundError):  # the first load fetches them, and `start` looks again
            self._find(name for name, _ in lm.named_parameters())

    def start(self, services: Services) -> None:
        """Find the file of each trained tensor's first weights.

        Raises:
            ConfigError: if the files hold no tensor under the name of a trained one.
        """
        self._find(name for name, _ in services.parameters())

    def _find(self, names: Iterable[str]) -> None:
        if self._model is None:
            raise RuntimeError("method update_sparsity starts before it has seen the recipe.")
        self._files = places_of(self._model.path, self._model.revision)
        missing = next((name for name in names if name not in self._files), None)
        if missing is not None:
            raise ConfigError(
                f"method update_sparsity finds no tensor {missing!r} in the files of {self._model.path}; save the "
                "model anew with transformers, or remove the method if transformers joins tensors on loading, as it "
                "does with those of experts."
            )

    def after_update(self, step: int, services: Services) -> dict[str, float]:
        """After every `every` steps, measure; see the module for the metrics."""
        if (step + 1) % self.settings.every:
            return {}
        counts = [self._left_alone(name, tensor) for name, tensor in services.parameters()]
        least = min(still / size for still, size in counts)
        share = sum(still for still, _ in counts) / sum(size for _, size in counts)
        return {"update_sparsity": share, "update_sparsity_least": least}

    def _left_alone(self, name: str, tensor: Tensor) -> tuple[int, int]:
        """How many weights of a tensor moved by at most the bound, and how many it has."""
        from safetensors import safe_open
        from torch.distributed.tensor import DTensor

        now: Any = tensor.detach()
        now = now.full_tensor() if isinstance(now, DTensor) else now
        with safe_open(self._files[name], framework="pt") as file:
            # Cast to the trained dtype, so that the rounding when the model was loaded does not count as a move.
            first = file.get_tensor(name).to(now.dtype)
        still = (now.cpu() - first).abs() <= self.settings.bound
        return int(still.sum()), still.numel()


def places_of(path: str, revision: str | None) -> dict[str, Path]:
    """The safetensors file that holds each tensor of a model (a folder or a Hub name), by the tensor's name."""
    from safetensors import safe_open

    folder = Path(path)
    if not folder.is_dir():
        from huggingface_hub import snapshot_download

        folder = Path(snapshot_download(path, revision=revision, local_files_only=True))
    found: dict[str, Path] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="pt") as tensors:
            found |= dict.fromkeys(tensors.keys(), file)
    return found
