"""Models in this process that answer score requests as a teacher server would, with weights of the student.

student   the current weights: the old policy before an update, or a teacher that reads a context of its own
initial   the weights of step 0: a reference without a server
ema       e <- decay e + (1 - decay) w after a step, kept in float32: a teacher that follows slowly

Payloads are sampled, topk, gather and hidden, always in float32, because the signal of a self-teacher is often smaller
than the rounding of a payload on the wire. `initial` and `ema` cost one copy of the trained tensors each. With
`model.lora` these are the adapters, and `initial` is the model with its adapters off and costs nothing. `ema` averages
the factors, not their products.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from typing import Any

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor
from torch.distributed.tensor import DTensor

from opd import maths
from opd.errors import CheckpointError, ConfigError
from opd.heads import OutputHead
from opd.wire.spans import put_back
from opd.wire.types import PayloadKind, PayloadSpec, ScoreItem, Scores
from student.data.batch import packed
from student.data.hooks import Pass, Reading
from student.data.needs import EMA, INITIAL, LOCAL_MODELS, STUDENT
from student.data.row import Row
from student.model.lora import adapters_off
from student.model.model import Student, evaluating
from student.model.ranks import Ranks
from student.model.sharding import full, placed, reshard, units
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
        models: names of the models that may be asked; see `start`.
        moves: how often each kept copy was updated.
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
        self._student, self._ranks, self._ema, self._device = student, ranks, ema, device
        self._micro_batch_tokens = settings.micro_batch_tokens
        self._scratch_bytes = settings.logit_scratch_mib * 2**20
        self._valid_vocab = valid_vocab
        self.temperature = temperature
        self.models: tuple[str, ...] = ()
        self.moves: Counter[str] = Counter()
        self._copies: dict[str, dict[str, Tensor]] = {}
        self._heads: dict[str, OutputHead] = {}

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
        wanted = set(models)
        for model in sorted(wanted):
            if model not in LOCAL_MODELS:
                raise ConfigError(
                    f"model {model!r} is not one of those computed in process, {', '.join(LOCAL_MODELS)}."
                )
        self.models = tuple(model for model in LOCAL_MODELS if model in wanted)
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
        found: dict[int, Scores] = {}
        with self._weights(model):
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
                found.update(zip(part, scores, strict=False))
        return [found[i] for i in range(len(requests))]

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

    @contextmanager
    def _weights(self, model: str) -> Iterator[None]:
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
