"""Models in this process that answer score requests as a teacher server would, with weights of the student.

    student        the current weights: the old policy before an update, or a teacher that reads a context of its own
    initial, ema   see `student.model.kept_weights`

Payloads are sampled, topk, gather and hidden, always in float32, because the signal of a self-teacher is often smaller
than the rounding of a payload on the wire.
"""

from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from opd import maths
from opd.errors import ConfigError
from opd.heads import OutputHead
from opd.wire.spans import put_back
from opd.wire.types import PayloadKind, PayloadSpec, ScoreItem, Scores
from student.data.batch import packed
from student.data.hooks import Pass, Reading
from student.data.needs import STUDENT
from student.data.row import Row
from student.model.kept_weights import KeptWeights
from student.model.model import Student, evaluating
from student.model.ranks import Ranks
from student.model.sharding import units
from student.settings.teachers import EmaSettings
from student.settings.train import TrainSettings

_FILLER = ScoreItem(np.zeros(2, np.uint32), 1)


class LocalModels:
    """Scores rows with the student's weights, or with copies kept of them.

    Args:
        student: the model; its weights are those of model "student".
        ranks: all ranks; if the student is sharded, they must make forward passes in step.
        settings: the recipe's `train` group, for the sizes of micro-batches and tiles.
        ema: settings of the moving average.
        device: the device of the inputs.
        valid_vocab: number of ids that the tokenizer can produce; further rows of the head get no probability.
        temperature: the temperature of rollouts, which divides logits unless a caller gives another.

    Attributes:
        kept: the weights of the other models.
        temperature: see above.
    """

    def __init__(
        self,
        student: Student,
        ranks: Ranks,
        settings: TrainSettings,
        ema: EmaSettings,
        device: torch.device,
        *,
        valid_vocab: int,
        temperature: float,
    ) -> None:
        self._student, self._ranks, self._device = student, ranks, device
        self.kept = KeptWeights(student, ema)
        self._micro_batch_tokens = settings.micro_batch_tokens
        self._scratch_bytes = settings.logit_scratch_mib * 2**20
        self._valid_vocab = valid_vocab
        self.temperature = temperature
        self._heads: dict[str, OutputHead] = {}

    @property
    def models(self) -> tuple[str, ...]:
        """Names of the models that may be asked."""
        return self.kept.models

    @torch.no_grad()
    def score(
        self,
        model: str,
        items: Sequence[Row | ScoreItem],
        spec: PayloadSpec | None = None,
        *,
        rows: Sequence[Row] | None = None,
        temperature: float | None = None,
        learning: bool = False,
        poll: Callable[[], None] = lambda: None,
    ) -> list[Scores]:
        """Score each response with `model`; if the student is sharded, every rank must call this at the same time.

        Args:
            model: "student", "initial" or "ema".
            items: requests, or rows; a row's response is scored under its context for `model`, or else its prompt.
            spec: the payload, `sampled` by default; its dtype is ignored.
            rows: the rows that the items are parts of, for hooks on the model.
            temperature: divides the logits; None for the temperature of rollouts.
            learning: read in the mode in which the student learns, instead of eval mode; see `Student`.
            poll: called before each micro-batch; may raise to give up.

        Raises:
            ConfigError: for a model that was not prepared, or payload full.
        """
        if model not in self.models:
            raise ConfigError(
                f"model {model!r} was not prepared before the run; name it in teachers.routes, or in the needs of the "
                "plug-in that reads it."
            )
        spec = spec or PayloadSpec.sampled()
        if spec.kind is PayloadKind.FULL:
            raise ConfigError("payload full is not available in process; use hidden.")
        gather = spec.kind is PayloadKind.GATHER
        asked = [i.asked(gather=gather, role=model) if isinstance(i, Row) else [(i, 0)] for i in items]
        requests = [request for mine in asked for request, _ in mine]
        given = [item if isinstance(item, Row) else None for item in items] if rows is None else rows
        owners = [row for row, mine in zip(given, asked, strict=True) for _ in mine]
        level = self.temperature if temperature is None else temperature
        with nullcontext() if learning else evaluating(self._student):
            answers = iter(self._answers(model, requests, owners, spec, level, poll))
        joined: list[Scores] = []
        for item, mine in zip(items, asked, strict=True):
            answered = [(next(answers), request, first) for request, first in mine]
            if isinstance(item, Row):
                joined.append(put_back(answered, item.length, item.candidates if gather else None))
            else:
                joined.append(answered[0][0])
        return joined

    def _answers(
        self,
        model: str,
        requests: Sequence[ScoreItem],
        owners: Sequence[Row | None],
        spec: PayloadSpec,
        level: float,
        poll: Callable[[], None],
    ) -> list[Scores]:
        """What `model` says about each request, which is a part of the row in `owners`; see `score`."""
        parts = self._parts(requests)
        if not parts:
            return []
        answers: dict[int, Scores] = {}
        with self.kept.lent(model):
            head = self._student.head()
            if spec.kind is PayloadKind.HIDDEN:
                # The student's head is copied, because the update changes it while the signal is still in use.
                self._heads[model] = _detached(head, copied=model == STUDENT)
            for part in parts:
                poll()
                # A rank without micro-batches left still takes part in gathering a sharded student's weights.
                chosen = [requests[i] for i in part] or [_FILLER]
                rows_read = [owners[i] for i in part] or [None]
                with self._student.around(partial(_reading, model, rows_read, chosen)):
                    scores = self._read(chosen, head, spec if part else PayloadSpec.sampled(), level)
                answers.update(zip(part, scores, strict=False))
        return [answers[i] for i in range(len(requests))]

    def _parts(self, items: Sequence[ScoreItem]) -> list[list[int]]:
        """Indices of the items of each micro-batch, longest first.

        If the student is sharded, empty micro-batches are added until all ranks have equally many, because every
        forward pass gathers weights from all ranks.
        """
        # Longest first: the first item gives a micro-batch its width, and similar lengths need little padding.
        lengths = [len(item.token_ids) for item in items]
        order = sorted(range(len(items)), key=lambda i: (-lengths[i], i))
        parts = packed(order, lengths, self._micro_batch_tokens, turn=self._student.turn)
        if units(self._student):
            parts += [[] for _ in range(max(self._ranks.gather(len(parts))) - len(parts))]
        return parts

    def _read(self, items: Sequence[ScoreItem], head: OutputHead, spec: PayloadSpec, level: float) -> list[Scores]:
        width = _width(items)
        ids = np.zeros((len(items), width), np.int64)
        attention = np.zeros((len(items), width), np.int64)
        for b, item in enumerate(items):
            ids[b, : len(item.token_ids)] = item.token_ids
            attention[b, : len(item.token_ids)] = 1
        lengths = [item.scored_length for item in items]
        # The hidden state before a token predicts it; that of the first response token is at the prompt's last token.
        source = np.concatenate([item.prompt_length - 1 + item.pick(np.arange(item.response_length)) for item in items])
        row = np.repeat(np.arange(len(items)), lengths)
        hidden = self._student(*(torch.from_numpy(a).to(self._device) for a in (ids, attention, row, source)))
        cuts = np.cumsum(lengths)[:-1]
        if spec.kind is PayloadKind.HIDDEN:
            return [Scores(hidden=part) for part in np.split(_host(hidden), cuts)]
        return self._log_probs(items, hidden, head, spec, level, cuts)

    def _log_probs(
        self,
        items: Sequence[ScoreItem],
        hidden: Float[Tensor, "n h"],
        head: OutputHead,
        spec: PayloadSpec,
        level: float,
        cuts: np.ndarray,
    ) -> list[Scores]:
        tiles: dict[str, Any] = {"vocab_size": self._valid_vocab, "scratch_bytes": self._scratch_bytes or None}
        ids: Tensor | None = None
        if spec.kind is PayloadKind.TOPK:
            ids = maths.linear_topk(hidden, head, min(spec.k, self._valid_vocab), **tiles)
        elif spec.kind is PayloadKind.GATHER:
            ids = self._tensor(np.concatenate([_gathered(item) for item in items]))
        # Also at the response's own tokens, as payloads topk and gather carry these on the wire as well.
        sampled = self._tensor(np.concatenate([item.scored_ids for item in items]))
        scores = maths.linear_token_scores(
            hidden, head, candidate_ids=ids, sampled_ids=sampled, temperature=level, **tiles
        )
        at_tokens = np.split(_host(scores.sampled), cuts)
        if ids is None:
            return [Scores(sampled=part) for part in at_tokens]
        columns = (
            at_tokens,
            np.split(_host(scores.candidates), cuts),
            np.split(ids.cpu().numpy().astype(np.uint32), cuts),
            np.split(_host(scores.log_tail), cuts),
        )
        return [Scores(sampled=a, values=v, ids=i, log_tail=t) for a, v, i, t in zip(*columns, strict=True)]

    def _tensor(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array.astype(np.int64)).to(self._device)

    def head(self, model: str) -> OutputHead:
        """The head that `model` had when it last returned hidden states, float32 on the device."""
        return self._heads[model]


def _detached(head: OutputHead, *, copied: bool) -> OutputHead:
    def plain(tensor: Tensor) -> Tensor:
        tensor = tensor.detach()
        return tensor.float().clone() if copied else tensor.float()

    return OutputHead(plain(head.weight), None if head.bias is None else plain(head.bias), head.scale, head.soft_cap)


def _width(items: Sequence[ScoreItem]) -> int:
    return max(len(item.token_ids) for item in items)


def _reading(model: str, rows: Sequence[Row | None], items: Sequence[ScoreItem]) -> Reading:
    """The description, for hooks, of a forward pass over `items`, which are parts of `rows`."""
    kind: Pass = "student" if model == STUDENT else "kept"
    return Reading(kind, tuple(map(_whole, rows, items)), _width(items))


def _whole(row: Row | None, item: ScoreItem) -> Row | None:
    """`row` if `item` is the whole row under its own prompt; otherwise None."""
    if row is None or row.windows:
        return None
    return row if np.array_equal(item.token_ids, np.concatenate([row.prompt_ids, row.response_ids])) else None


def _host(tensor: Tensor) -> np.ndarray:
    return tensor.detach().float().cpu().numpy()


def _gathered(item: ScoreItem) -> np.ndarray:
    if item.gather_ids is None:
        raise ConfigError("payload gather needs candidate ids, but a row has none.")
    return item.gather_ids
