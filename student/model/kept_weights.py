"""Weights of the student that are kept beside the current ones, and lent to the student's modules.

    initial   the weights of step 0: a reference without a server
    ema       e <- decay e + (1 - decay) w after a step, kept in float32: a teacher that follows slowly

Each costs one copy of the trained tensors. With `model.lora` these are the adapters: `initial` is the model with its
adapters off and costs nothing, and `ema` averages the factors, not their products.
"""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from opd.errors import CheckpointError, ConfigError
from student.data.needs import EMA, INITIAL, LOCAL_MODELS, STUDENT
from student.model.lora import adapters_off
from student.model.model import Student
from student.model.sharding import full, placed, reshard
from student.settings.teachers import EmaSettings


class KeptWeights:
    """The kept weights of a run, by model.

    Args:
        student: the model; its weights are those of model "student".
        ema: settings of the moving average.

    Attributes:
        models: names of the models that the run uses, "student" among them if it does; see `start`.
        moves: how often each kept copy was updated.
    """

    def __init__(self, student: Student, ema: EmaSettings) -> None:
        self._student, self._ema = student, ema
        self.models: tuple[str, ...] = ()
        self.moves: Counter[str] = Counter()
        self._copies: dict[str, dict[str, Tensor]] = {}

    def _trained(self) -> Iterator[tuple[str, Tensor]]:
        # After a forward pass, parameters of a sharded root are still gathered tensors instead of the shards.
        reshard(self._student)
        return ((name, p) for name, p in self._student.lm.named_parameters() if p.requires_grad)

    @torch.no_grad()
    def start(self, models: Iterable[str], *, fresh: bool = True) -> None:
        """Prepare `models`; a fresh run copies its initial weights, a resumed run has loaded them already.

        Raises:
            ConfigError: for a model that is not one of this process.
            CheckpointError: if a resumed run needs weights that its checkpoint does not have.
        """
        names = set(models)
        if unknown := sorted(names - {*LOCAL_MODELS}):
            raise ConfigError(
                f"model {unknown[0]!r} is not one of those computed in process, {', '.join(LOCAL_MODELS)}."
            )
        self.models = tuple(model for model in LOCAL_MODELS if model in names)
        for model in self.models:
            if model == STUDENT or model in self._copies or self._is_base(model):
                continue
            if not fresh:
                raise CheckpointError(
                    f"the checkpoint holds no weights of model {model!r}; resume with the recipe that wrote it, or "
                    "begin a new run."
                )
            self._copies[model] = {name: _kept(p, model) for name, p in self._trained()}

    def _is_base(self, model: str) -> bool:
        """Whether `model` is the student with its adapters off, which needs no copy."""
        return model == INITIAL and self._student.starts_at_base and model not in self._copies

    @contextmanager
    def lent(self, model: str) -> Iterator[None]:
        """Within the block, the student has the weights of `model`."""
        if model == STUDENT:
            yield
            return
        if self._is_base(model):
            with adapters_off(self._student.lm):
                yield
            return
        with self.holding(self._copies[model]):
            yield

    def average(self) -> AbstractContextManager[None]:
        """Within the block, the student's trained tensors are those of its moving average."""
        return self.holding(self._copies[EMA])

    @contextmanager
    def holding(self, tensors: Mapping[str, Tensor]) -> Iterator[None]:
        """Within the block, the student's trained tensors are `tensors`, given by name."""
        own: dict[str, Tensor] = {}
        try:
            # Inside the try, so that an error half-way (out of memory) restores what was replaced so far.
            for name, p in self._trained():
                # Storage is swapped without a copy, except for shards, whose all-gathers are bound to their storage.
                own[name] = p.detach().clone() if isinstance(p, DTensor) else p.data
                _put(p, tensors[name])
            yield
        finally:
            for name, p in self._trained():
                if name in own:
                    _put(p, own[name])

    @torch.no_grad()
    def refresh(self, model: str, decay: float) -> None:
        """Update a kept copy: e <- decay e + (1 - decay) w with the student's weights w; decay 0 copies them.

        Raises:
            ConfigError: for a model of which no copy is kept.
        """
        if self._is_base(model) and model in self.models:
            if decay:
                raise ConfigError(
                    "model initial is the base without adapters, of which no average can be kept; copy it instead."
                )
            self._copies[model] = {name: _kept(p, model) for name, p in self._trained()}
        if model not in self._copies:
            raise ConfigError(
                f"no weights were kept for model {model!r}; name it in the needs of the plug-in that moves it."
            )
        for name, p in self._trained():
            kept = self._copies[model][name]
            kept.copy_(p) if decay == 0.0 else kept.lerp_(p.detach().to(kept.dtype), 1.0 - decay)
        self.moves[model] += 1

    def after_step(self, step: int) -> dict[str, float]:
        """Update the average after `step` as `teachers.ema` says; returns metrics."""
        if EMA not in self._copies:
            return {}
        copied, moved = (bool(n) and (step + 1) % n == 0 for n in (self._ema.copy_every, self._ema.every))
        if copied or moved:
            self.refresh(EMA, 0.0 if copied else self._ema.decay)
        return {"ema_distance": self._distance(EMA), "ema_moved": float(copied or moved)}

    @torch.no_grad()
    def _distance(self, model: str) -> float:
        """Euclidean distance between a kept copy and the student's weights."""
        gaps = [(p.detach().float() - self._copies[model][name].float()).norm() for name, p in self._trained()]
        return float(torch.stack([full(gap) for gap in gaps]).norm())

    def state_dict(self) -> dict[str, Any]:
        """The kept weights, by model and name of the parameter."""
        return dict(self._copies)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned.

        Raises:
            CheckpointError: if it is from another model.
        """
        for model, tensors in state.items():
            here = dict(self._trained())
            if set(here) != set(tensors):
                raise CheckpointError(f"the weights of model {model!r} in the checkpoint are those of another student.")
            self._copies[model] = {name: placed(tensors[name], p) for name, p in here.items()}


@torch.no_grad()  # independent of the caller, because a shard is written in place
def _put(parameter: Tensor, value: Tensor) -> None:
    if isinstance(parameter, DTensor):
        parameter.copy_(placed(value, parameter))
    else:
        parameter.data = value.to(parameter.device, parameter.dtype)


def _kept(parameter: Tensor, model: str) -> Tensor:
    """A copy to keep; an average is float32, because in bfloat16 a decay of 0.999 would change nothing."""
    copy = parameter.detach().clone()
    return copy.float() if model != INITIAL else copy
