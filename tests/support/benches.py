"""Scored rows without a server: of the test world, with its engine called in this process, and of random numbers."""

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
import torch
from torch import Tensor

from opd.heads import OutputHead
from opd.maths import score_tokens
from opd.tasks.prompt import Prompt
from opd.tasks.verdict import Verdict
from opd.wire.types import PayloadKind
from student.data.needs import EMA, REFERENCE, STUDENT, TEACHER, Needs, merge
from student.data.plan import plan_step
from student.data.row import Row, RowKey
from student.data.token_batch import SignalTokens, StudentTokens, TokenBatch
from student.learning.learner import Learner
from student.learning.objective import Objective
from student.model.model import load_student, load_tokenizer
from student.plugin.terms import Term, build_terms
from student.rollout.transformers import RolloutSpec, rollout
from student.settings.train import TrainSettings

if TYPE_CHECKING:
    from teacher_server.engines.transformers import TransformersEngine


@cache
def engine_of(model: Path) -> "TransformersEngine":
    """Made once a process: what it answers in deterministic mode depends on the rows asked for alone."""
    from teacher_server.engines.transformers import TransformersEngine

    return TransformersEngine(str(model), device="cpu", deterministic=True)


PROMPTS = ["1+1=", "12+34=", "7+7=", "99+1=", "5+50="]


class Bench:
    """A student of the test world with an objective, and the means to roll out and score rows for it."""

    def __init__(
        self,
        world: Path,
        objective: list[dict[str, Any]],
        teacher: str,
        temperature: float = 1.0,
        student: str | Path = "student",
        **train: Any,
    ) -> None:
        from accelerate import Accelerator

        from teacher_server.engines.base import EngineItem

        torch.set_num_threads(1)
        torch.manual_seed(0)
        self.engine = engine_of(world / teacher)
        self.item = EngineItem
        self.tokenizer = load_tokenizer(str(world / "student"))
        loaded = load_student(str(world / student), dtype="float32", attention=None, gradient_checkpointing=False)
        self.objective = Objective(build_terms(objective), length_limit=12)
        self.temperature = temperature
        self.needs: Needs = merge([self.objective.needs()], temperature=temperature)
        self.learner = Learner(
            loaded,
            self.objective,
            self.needs,
            TrainSettings(**{"steps": 10, "learning_rate": 1e-3, **train}),
            Accelerator(cpu=True),
            valid_vocab=len(self.tokenizer),
            temperature=temperature,
            head_of=self.head_of,
        )

    def head_of(self, role: str, row: Row) -> OutputHead:
        head = self.engine.head()
        return OutputHead(torch.from_numpy(head.weight), None, head.logit_scale, head.soft_cap)

    def rows(self, step: int = 0, samples: int = 2) -> list[Row]:
        spec = RolloutSpec(7, 64, self.needs.candidates, len(self.tokenizer), 40)
        prompts = [Prompt.make(p) for p in PROMPTS]
        plan = plan_step(step, prompts, samples=samples, max_new_tokens=12, temperature=self.temperature)
        rows = rollout(self.learner.student.lm, self.tokenizer, plan.rows, spec)
        for need in self.needs.signals:
            gather = need.spec.kind is PayloadKind.GATHER
            items = [self.item(row.asked(gather=gather)[0][0], need.spec, need.level) for row in rows]
            for row, scores in zip(rows, self.engine.score(items), strict=True):
                assert scores is not None
                row.signals[need.role, need.spec.kind] = scores
        return rows

    def step(self, rows: list[Row], step: int) -> dict[str, float]:
        """An update; its metrics as means."""
        sums = self.learner.update(rows, step) or {}
        return {name: top / bottom for name, (top, bottom) in sums.items() if bottom}

    def gradient(self, rows: list[Row], **keywords: Any) -> dict[str, torch.Tensor]:
        self.learner.optimizer.zero_grad(set_to_none=True)
        self.learner.accumulate(rows, **keywords)
        return {
            name: torch.zeros_like(p) if p.grad is None else p.grad.clone()
            for name, p in self.learner.named_parameters()
        }


@pytest.fixture
def bench(world: Path) -> Callable[..., Bench]:
    def make(*objective: dict[str, Any], teacher: str = "teacher", **train: Any) -> Bench:
        return Bench(world, list(objective) or [{"name": "opd", "k": 8}], teacher, **train)

    return make


@pytest.fixture(scope="session")
def longrope(world: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random student whose positions are scaled otherwise in forwards of more than 16 tokens."""
    from transformers import Phi3Config, Phi3ForCausalLM

    torch.manual_seed(0)
    rope = {"rope_type": "longrope", "rope_theta": 1e4, "short_factor": [1.0] * 4, "long_factor": [4.0] * 4}
    config = Phi3Config(
        vocab_size=len(load_tokenizer(str(world / "student"))), hidden_size=16, intermediate_size=16,
        num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2, original_max_position_embeddings=16,
        rope_parameters=rope, pad_token_id=0, initializer_range=0.5,
    )  # fmt: skip
    folder = tmp_path_factory.mktemp("longrope")
    Phi3ForCausalLM(config).save_pretrained(folder)
    return folder


class Toy:
    """Rows of random numbers, in float64: a student whose hidden states and head are the trained parameters.

    Every position has its own hidden state, so a gradient with respect to it is the gradient of that position.

    Args:
        lengths: response tokens of each row.
        seed: decides all numbers.
        group: rows of a group.
        origins: origin of each row; all "policy" if None.
    """

    vocab, width, k = 7, 5, 3

    def __init__(
        self,
        lengths: Sequence[int] = (4, 1, 5, 3),
        seed: int = 0,
        group: int = 2,
        origins: Sequence[str] | None = None,
        masked: bool = True,
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        count = sum(lengths)

        def normal(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64)

        self.hidden, self.head = normal(count, self.width), normal(self.vocab, self.width)
        self.models = {
            role: (normal(count, self.width), normal(self.vocab, self.width)) for role in (TEACHER, REFERENCE)
        }
        self.token_ids = torch.randint(self.vocab, (count,), generator=generator)
        self.row = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths))
        self.position = torch.cat([torch.arange(length) for length in lengths])
        self.behaviour = self.logp(self.hidden, self.head).gather(1, self.token_ids[:, None])[:, 0]
        mask = torch.rand(count, generator=generator) < (0.7 if masked else 2.0)
        mask[0] = True
        # A token that the student did not sample has no log-prob under it.
        self.behaviour = torch.where(mask, self.behaviour, torch.nan)
        self.rows = [self._row(i, length, group, origins, mask) for i, length in enumerate(lengths)]
        self.candidates = self.logp(self.hidden, self.head).topk(self.k, dim=-1).indices
        # The old policy: near the present one, so that ratios are moderate.
        self.models[STUDENT] = (self.hidden + 0.1 * normal(count, self.width), self.head.clone())
        self.models[EMA] = (normal(count, self.width), normal(self.vocab, self.width))

    @staticmethod
    def logp(hidden: Tensor, head: Tensor) -> Tensor:
        return (hidden @ head.T).log_softmax(-1)

    def _row(self, index: int, length: int, group: int, origins: Sequence[str] | None, mask: Tensor) -> Row:
        prompt = Prompt.make(f"p{index // group}", domain=f"d{index // group % 2}")
        mine = self.row == index
        return Row(
            key=RowKey(0, prompt.uid, index % group),
            prompt=prompt,
            prompt_ids=np.ones(2, np.uint32),
            response_ids=self.token_ids[mine].numpy().astype(np.uint32),
            behaviour_logp=self.behaviour[mine].numpy().astype(np.float32),
            policy_version=np.zeros(length, np.int32),
            loss_mask=mask[mine].numpy(),
            truncated=False,
            text="",
            origin="policy" if origins is None else origins[index],  # type: ignore[arg-type]
            verdict=Verdict.of(index % group == 0),
        )

    def signals(self, chosen: Tensor) -> dict[tuple[str, PayloadKind], SignalTokens]:
        found = {}
        for role, (hidden, head) in self.models.items():
            logp = self.logp(hidden, head)[chosen]
            sampled = logp.gather(1, self.token_ids[chosen, None])[:, 0]
            for kind in (PayloadKind.GATHER, PayloadKind.TOPK):
                ids = self.candidates[chosen] if kind is PayloadKind.GATHER else self.teacher_ids()[chosen]
                tail = logp.scatter(1, ids, -torch.inf).logsumexp(-1)
                found[role, kind] = SignalTokens(sampled, logp.gather(1, ids), ids, tail)
            found[role, PayloadKind.SAMPLED] = SignalTokens(sampled)
            found[role, PayloadKind.HIDDEN] = SignalTokens(hidden=hidden[chosen], head=OutputHead(head))
        return found

    def teacher_ids(self) -> Tensor:
        return self.logp(*self.models[TEACHER]).nan_to_num(0.0).topk(self.k, dim=-1).indices

    def positions(self, indices: Sequence[int]) -> Tensor:
        return torch.cat([(self.row == i).nonzero()[:, 0] for i in indices])

    def batch(self, indices: Sequence[int] | None = None) -> TokenBatch:
        """The rows `indices` as terms see them, with gradients to `hidden` and `head`."""
        indices = range(len(self.rows)) if indices is None else indices
        chosen = self.positions(indices)
        logits, ids = self.hidden[chosen] @ self.head.T, self.token_ids[chosen]
        rows = [self.rows[i] for i in indices]
        mask = torch.from_numpy(np.concatenate([row.loss_mask for row in rows]))
        at_teacher = score_tokens(logits, candidate_ids=self.teacher_ids()[chosen], sampled_ids=ids)
        return TokenBatch(
            token_ids=ids,
            mask=mask,
            weights=mask.float(),
            row=torch.cat([torch.full((row.length,), b) for b, row in enumerate(rows)]),
            position=self.position[chosen],
            behaviour_logp=self.behaviour[chosen],
            candidates=self.candidates[chosen],
            student=StudentTokens(
                score_tokens(logits, candidate_ids=self.candidates[chosen], sampled_ids=ids),
                at_teacher,
                self.hidden[chosen],
                OutputHead(self.head),
            ),
            signals=self.signals(chosen),
            rows=rows,
            valid_vocab=self.vocab,
        )

    def gradient(self, terms: Sequence[Term], parts: Sequence[Sequence[int]] | None = None) -> tuple[Tensor, Tensor]:
        """Gradients of the objective with respect to hidden states and head, over micro-batches of rows `parts`."""
        objective = Objective(terms, length_limit=8)
        self.hidden, self.head = (p.detach().clone().requires_grad_() for p in (self.hidden, self.head))
        objective.prepare(self.rows)
        weights = objective.position_weights(self.rows, torch.device("cpu"))
        for part in parts or [range(len(self.rows))]:
            chosen = self.positions(part)
            objective.loss(self.batch(part), [weight[chosen] for weight in weights])[0].backward()
        gradients = tuple(torch.zeros_like(p) if p.grad is None else p.grad for p in (self.hidden, self.head))
        return gradients[0], gradients[1]


@pytest.fixture
def toy() -> type[Toy]:
    return Toy
