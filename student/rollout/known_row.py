"""The known row: student and engine both score it after every sync, so that stale weights in the engine are noticed.

Its tokens are pseudo-random ids over the whole vocabulary. Engine vllm reads its prompt, which is longer than a block
of the cache if rows can be that long, and is forced to take given tokens after it. This goes the way of every rollout:
through cached blocks of the prompt, the layers and the head. The engine starts with random weights and scores the row
once with them, so if a sync misses any weight, the first comparison fails, however little training changes that weight.
A server instead samples one token after each beginning of the row, for which the student has computed the whole
distribution. It can so be checked again at any time, even after the student's weights have moved on.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.func import functional_call
from transformers import PreTrainedModel

from student.data.streams import stream
from student.model.lora import has_lora
from student.model.model import ProjectionSpec, Student, evaluating, logits_of
from student.model.sharding import reshard
from student.rollout.draw import most_likely
from student.rollout.requests import RolloutSpec

ANSWER = 8
_POSITIONS = 256
_PROMPT = 272
"""More than two blocks of 128 tokens, the largest block size that vLLM chooses by itself."""


@dataclass(frozen=True, slots=True)
class KnownRow:
    """The ids of the prompt, and of the answer whose log-probs are compared."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]

    @classmethod
    def of(cls, spec: RolloutSpec, longest: int) -> "KnownRow":
        """The known row of a run, at most `longest` tokens long."""
        size = max(1, min(_PROMPT, longest - ANSWER))
        ids = stream(spec.seed, "known row").integers(0, spec.valid_vocab, size + ANSWER).tolist()
        return cls(tuple(ids[:size]), tuple(ids[size:]))

    def beginnings(self) -> Iterator[list[int]]:
        """The prompt followed by the first 0, 1, ... tokens of the answer, up to all but one."""
        return ([*self.prompt, *self.answer[:count]] for count in range(len(self.answer)))

    def of_answer(self, distributions: NDArray[np.float32]) -> NDArray[np.float32]:
        """[8] log-probs of the answer's tokens, taken from distributions [8, V]."""
        return distributions[np.arange(len(self.answer)), list(self.answer)]


class Reader:
    """Scores known rows with a copy of the student's modules and given weights, because the student may be training.

    The copy's adapters are switched on, since another thread may have switched the student's off, for the reference,
    while the copy was made.

    Args:
        model: the student.
        spec: settings that every rollout of the run shares.
    """

    def __init__(self, model: PreTrainedModel, spec: RolloutSpec) -> None:
        self._model, self._spec = model, spec
        # Modules without weights, which are given with each call: those of the model change in training.
        shapes = {id(t): torch.empty_like(t, device="meta") for t in _tensors(model).values()}
        for parameter in model.parameters():
            shapes[id(parameter)] = torch.nn.Parameter(shapes[id(parameter)], requires_grad=False)
        self._code = copy.deepcopy(model, shapes).eval()
        if has_lora(model):
            self._code.enable_adapters()

    def log_probs(
        self, row: KnownRow, parameters: Mapping[str, Tensor], temperature: float = 1.0
    ) -> NDArray[np.float32]:
        """[8] log-probs of the answer, nats; see `distributions`."""
        return row.of_answer(self.distributions(row, parameters, temperature))

    @torch.no_grad()
    def distributions(
        self, row: KnownRow, parameters: Mapping[str, Tensor], temperature: float = 1.0
    ) -> NDArray[np.float32]:
        """[8, V] log-probs of every id at the positions of the answer's tokens, nats.

        Args:
            row: the known row.
            parameters: trained parameters by name, which replace the model's own of the same name.
            temperature: divides the logits.
        """
        device = self._model.device
        ids = torch.tensor([[*row.prompt, *row.answer]], device=device)
        given = {name: tensor.to(device) for name, tensor in parameters.items()}
        with _precision(device, self._spec):
            logits = functional_call(self._code, {**_tensors(self._model), **given}, (ids,)).logits[0]
        logp = logits[len(row.prompt) - 1 : -1, : self._spec.valid_vocab].float().div(temperature).log_softmax(-1)
        return logp.cpu().numpy()


class LikelyIds(nn.Module):
    """Finds the most likely ids at each position of a row, with a copy of the student's modules as in `Reader`.

    Args:
        model: the student.
        spec: settings that every rollout of the run shares.
        parameters: trained parameters by name, which replace the model's own of the same name.
    """

    def __init__(self, model: PreTrainedModel, spec: RolloutSpec, parameters: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._spec, self._device = spec, model.device
        self.student = Student(Reader(model, spec)._code)
        every = {**_tensors(model), **parameters}
        self._weights = {f"student.lm.{name}": tensor.to(model.device) for name, tensor in every.items()}

    @torch.no_grad()
    def of(self, prompt: Sequence[int], answer: Sequence[int]) -> NDArray[np.uint32]:
        """[T, K] ids in descending order of probability at the position of each token of the answer."""
        ids = torch.tensor([[*prompt, *answer]], device=self._device)
        source = torch.arange(len(prompt) - 1, ids.shape[1] - 1, device=self._device)
        with _precision(self._device, self._spec):
            return functional_call(self, self._weights, (ids, source)).cpu().numpy().astype(np.uint32)

    def forward(self, ids: Tensor, source: Tensor) -> Tensor:
        """[T, K] ids in descending order of probability at the positions `source` [T] of a row `ids` [1, L]."""
        hidden = self.student(ids, torch.ones_like(ids), torch.zeros_like(source), source)
        spec, head = self._spec, self.student.head()
        projection = ProjectionSpec(frozenset(), spec.valid_vocab, 1.0)
        # In pieces, because logits of all positions at once would be the largest tensor of a run.
        found = [
            most_likely(logits_of(piece, head, projection), spec.candidates, spec.keep_ids)
            for piece in hidden.split(_POSITIONS)
        ]
        return torch.cat(found)


@torch.no_grad()
def read_together(student: Student, row: KnownRow, spec: RolloutSpec, temperature: float) -> NDArray[np.float32]:
    """`Reader.distributions` for a sharded student, by a forward pass that all ranks make together."""
    device = student.lm.device
    ids = torch.tensor([[*row.prompt, *row.answer]], device=device)
    source = torch.arange(len(row.prompt) - 1, ids.shape[1] - 1, device=device)
    with evaluating(student), _precision(device, spec):
        hidden = student(ids, torch.ones_like(ids), torch.zeros_like(source), source)
        logits = logits_of(hidden, student.head(), ProjectionSpec(frozenset(), spec.valid_vocab, temperature))
    reshard(student)
    return logits.float().log_softmax(-1).cpu().numpy()


def _precision(device: torch.device, spec: RolloutSpec) -> torch.autocast:
    return torch.autocast(device.type, spec.autocast or torch.bfloat16, enabled=spec.autocast is not None)


def _tensors(model: PreTrainedModel) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def distance(one: Sequence[float] | NDArray[np.float32], other: NDArray[np.float32]) -> float:
    """The largest absolute difference between two rows of log-probs, nats; infinite if any of them is not finite."""
    gap = np.abs(np.asarray(one, np.float64) - other)
    return float(gap.max()) if np.isfinite(gap).all() else float("inf")


def tolerance(*dtypes: str) -> float:
    """The distance in nats that rounding explains, by the precisions of engine and student; if the recipe sets none."""
    return 0.3 if {"bfloat16", "float16"} & set(dtypes) else 0.005
