"""A row that is read by the student and by an engine with weights of its own after every sync: stale weights show.

Its tokens are pseudo-random ids over the whole vocabulary. Engine vllm reads its prompt, which is longer than a block
of the cache wherever rows can be, and is made to take given tokens after it: the way that every rollout takes, through
the prompt's cached blocks, the body and the head. It starts from random weights and answers the row once with them; so
the first comparison after a sync fails for whatever a sync does not reach, however little training moves it. A server
samples a token after each beginning of the row, of which the student has given the whole distribution: so it can be
asked again at any time, also when the student has moved on.
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
from student.learning.lora import has_lora
from student.learning.model import ProjectionSpec, Student, logits_of
from student.learning.sharding import reshard
from student.rollout.rows import evaluating
from student.rollout.sampling import most_likely
from student.rollout.spec import RolloutSpec

ANSWER = 8
_POSITIONS = 256
_PROMPT = 272
"""Over two blocks of 128 tokens, the largest that vLLM chooses by itself."""


@dataclass(frozen=True, slots=True)
class KnownRow:
    """The row: ids of the prompt, and of the answer whose log-probs are compared."""

    prompt: tuple[int, ...]
    answer: tuple[int, ...]

    @classmethod
    def of(cls, spec: RolloutSpec, longest: int) -> "KnownRow":
        """The run's, within `longest` tokens."""
        size = max(1, min(_PROMPT, longest - ANSWER))
        ids = stream(spec.seed, "known row").integers(0, spec.valid_vocab, size + ANSWER).tolist()
        return cls(tuple(ids[:size]), tuple(ids[size:]))

    def beginnings(self) -> Iterator[list[int]]:
        """The prompt with the answer's first tokens, from none to all but one."""
        return ([*self.prompt, *self.answer[:count]] for count in range(len(self.answer)))

    def of_answer(self, distributions: NDArray[np.float32]) -> NDArray[np.float32]:
        """[8] log-probs of the answer's tokens, of all [8, V]."""
        return distributions[np.arange(len(self.answer)), list(self.answer)]


class Reader:
    """Scores known rows with the student's code and given weights; never with the model itself, which may be training.

    Its adapters act: another thread may have switched the model's off while the code was copied, for the reference.

    Args:
        model: the student.
        spec: what every rollout of the run shares.
    """

    def __init__(self, model: PreTrainedModel, spec: RolloutSpec) -> None:
        self._model, self._spec = model, spec
        # The code without weights: they are given with each call, and those of the model move under training.
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
        """[8, V] log-probs of every id where the answer's tokens are, nats.

        Args:
            row: the row.
            parameters: trained parameters by name, in place of the model's own of the same name.
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
    """The most likely ids at each position of a row, by the student's code and given weights, as `Reader` has them.

    Args:
        model: the student.
        spec: what every rollout of the run shares.
        parameters: trained parameters by name, in place of the model's own of the same name.
    """

    def __init__(self, model: PreTrainedModel, spec: RolloutSpec, parameters: Mapping[str, Tensor]) -> None:
        super().__init__()
        self._spec, self._device = spec, model.device
        self.student = Student(Reader(model, spec)._code)
        every = {**_tensors(model), **parameters}
        self._weights = {f"student.lm.{name}": tensor.to(model.device) for name, tensor in every.items()}

    @torch.no_grad()
    def of(self, prompt: Sequence[int], answer: Sequence[int]) -> NDArray[np.uint32]:
        """[T, K] ids by falling probability where each token of the answer was drawn."""
        ids = torch.tensor([[*prompt, *answer]], device=self._device)
        source = torch.arange(len(prompt) - 1, ids.shape[1] - 1, device=self._device)
        with _precision(self._device, self._spec):
            return functional_call(self, self._weights, (ids, source)).cpu().numpy().astype(np.uint32)

    def forward(self, ids: Tensor, source: Tensor) -> Tensor:
        """See `of`."""
        hidden = self.student(ids, torch.ones_like(ids), torch.zeros_like(source), source)
        spec, head = self._spec, self.student.head()
        projection = ProjectionSpec(frozenset(), spec.valid_vocab, 1.0)
        # In pieces: logits of all positions at once would be the largest tensor of a run.
        found = [
            most_likely(logits_of(piece, head, projection), spec.candidates, spec.keep_ids)
            for piece in hidden.split(_POSITIONS)
        ]
        return torch.cat(found)


@torch.no_grad()
def read_together(student: Student, row: KnownRow, spec: RolloutSpec, temperature: float) -> NDArray[np.float32]:
    """What `Reader.distributions` gives, by a forward of a sharded student, which all ranks make together."""
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
    """The largest difference of two rows of log-probs, nats; infinite where one is not finite."""
    gap = np.abs(np.asarray(one, np.float64) - other)
    return float(gap.max()) if np.isfinite(gap).all() else float("inf")


def tolerance(dtype: str) -> float:
    """The distance that the rounding of a precision explains, nats, where a recipe names none."""
    return 0.3 if dtype in ("bfloat16", "float16") else 0.005
