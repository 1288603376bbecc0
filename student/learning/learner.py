"""The learner: owns the trained weights and the optimizer, and makes optimizer updates from scored rows."""

import dataclasses
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import accumulate
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from torch import Tensor

from opd.errors import CheckpointError, DeviceMemoryError, NonFiniteError, PluginError
from student.data.batch import HeadLookup, collate
from student.data.costs import positions
from student.data.hooks import ModelHook
from student.data.needs import Needs
from student.data.prefixes import Prefixes
from student.data.row import Row
from student.data.schedule import learning_rate
from student.data.token_batch import TokenBatch
from student.learning.layout import lay_out
from student.learning.micro_batches import MicroBatches
from student.learning.objective import Metrics, Objective, Sums, add, of_the_step, to_host
from student.learning.optimizer import make_optimizer, restored
from student.model.adamw_8bit import same_kind
from student.model.model import ProjectionSpec, Student
from student.model.ranks import Ranks
from student.model.sharding import full, recover, reshard, units, whole
from student.settings.train import TrainSettings
from student.state.random_state import random_state, set_random_state


class Learner:
    """Owns the trained weights and the optimizer; an update runs micro-batches, clips the gradient and steps.

    Args:
        student: the model to train.
        objective: what to minimise.
        needs: everything the terms need, merged.
        settings: the recipe's `train` group.
        accelerator: device, precision and ranks.
        valid_vocab: number of ids that the tokenizer can produce.
        temperature: the temperature of rollouts; divides the student's logits.
        head_of: looks up the output heads of other models, for hidden payloads.
        ranks: the ranks of the run; made from `accelerator` if None.
        shortest_first: take the micro-batches of the shortest rows first, for learning while rows are still being
            scored. Otherwise the longest come first, so that a lack of memory shows at once.

    Attributes:
        random: torch's random state before a gradient that was begun and not yet applied; None at all other times.
    """

    def __init__(
        self,
        student: Student,
        objective: Objective,
        needs: Needs,
        settings: TrainSettings,
        accelerator: Accelerator,
        *,
        valid_vocab: int,
        temperature: float,
        head_of: HeadLookup,
        ranks: Ranks | None = None,
        shortest_first: bool = False,
    ) -> None:
        self.objective = objective
        self.needs = needs
        self.settings = settings
        self.accelerator = accelerator
        self.ranks = ranks or Ranks(accelerator)
        self.head_of = head_of
        self.projection = ProjectionSpec(needs.student, valid_vocab, temperature, settings.logit_scratch_mib * 2**20)
        self.student = student
        # As usual, weight decay applies to matrices only, not to norms and biases.
        matrices = [p for p in student.parameters() if p.requires_grad and p.ndim >= 2]
        others = [p for p in student.parameters() if p.requires_grad and p.ndim < 2]
        groups: list[dict[str, Any]] = [
            {"params": matrices, "weight_decay": settings.weight_decay},
            {"params": others, "weight_decay": 0.0},
        ]
        for place, (module, rate) in objective.modules(student).items():
            # Registered on the student, so that their gradients are averaged over ranks like its own.
            student.beside[place] = module
            times = rate / settings.learning_rate
            groups.append({"params": list(module.parameters()), "weight_decay": 0.0, "times": times})
        student.hooks = [*student.hooks, *(term for term in objective.terms if isinstance(term, ModelHook))]
        # Not wrapped by accelerate, whose wrapper serves TPUs and float16 and searches for a package twice a step.
        self.optimizer = make_optimizer(groups, settings, accelerator.device)
        # FSDP2 averages gradients itself, and accelerate's own FSDP support would be plain DDP on a CPU.
        self.sharded = bool(units(student))
        self.wrapped: Any = student
        if not self.sharded:
            self.wrapped = accelerator.prepare(student)
        # In model order, which fixes the rounding of the gradient norm. Not kept if sharded: FSDP2 replaces parameters.
        self._parameters = None if self.sharded else [*self.wrapped.parameters()]
        self._micro_batches = MicroBatches(student, needs, settings, self.ranks, shortest_first=shortest_first)
        self.updates = 0
        self.random: dict[str, Any] | None = None
        self._begun: tuple[Sequence[Row], Metrics | None] | None = None  # rows of a gradient, not applied yet

    def update(self, rows: Sequence[Row], step: int) -> Metrics | None:
        """Make one optimizer update on rows of a step.

        Args:
            rows: this rank's rows; may be empty as long as another rank has some.
            step: the step, which determines the learning rate.

        Returns:
            Metrics as (numerator, denominator), summed over micro-batches and ranks; a denominator of 0 means that
            nothing was measured. None if no rank has a row that a term learns from: nothing was done then.

        Raises:
            NonFiniteError: if a loss or the gradient is not finite; the weights are unchanged.
            DeviceMemoryError: if a micro-batch does not fit on the device in a run of one rank; the weights are
                unchanged. With several ranks torch's error is raised, because the others wait in a reduction.
        """
        begun, self._begun, self.random = self._begun, None, None
        if begun is not None and [*map(id, begun[0])] != [*map(id, rows)]:
            raise RuntimeError("another update than the one whose gradient has been taken")
        rate = learning_rate(
            step,
            peak=self.settings.learning_rate,
            warmup=self.settings.warmup_steps,
            total=self.settings.steps,
            schedule=self.settings.schedule,
            floor=self.settings.final_fraction,
        )
        for group in self.optimizer.param_groups:
            group["lr"] = rate * group.get("times", 1.0)
        sums = self._gradient(rows, step) if begun is None else begun[1]
        if sums is None:
            return None
        # The norm of the whole gradient before clipping: not finite if any element of the gradient is not.
        parameters = self._parameters or self.wrapped.parameters()
        norm = float(full(self.accelerator.clip_grad_norm_(parameters, self.settings.max_grad_norm)))
        # The gradient comes last, because a loss that is not finite also names the term.
        sizes = {name: top for name, (top, _) in sums.items() if name.startswith("loss/")} | {"gradient": norm}
        for name, value in sizes.items():
            if not math.isfinite(value):
                self.optimizer.zero_grad(set_to_none=True)
                raise NonFiniteError(
                    f"the {name} of step {step} is not finite ({value}); lower train.learning_rate, or check what the "
                    "teacher and the terms returned in this step."
                )
        self.updates += 1  # before the step: an optimizer that fails may have moved some weights already
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        clipped = float(norm > self.settings.max_grad_norm)
        return sums | {"grad_norm": (norm, 1.0), "grad_clipped": (clipped, 1.0), "learning_rate": (rate, 1.0)}

    def begin(self, rows: Sequence[Row], step: int, arrive: Callable[[Sequence[Row]], None]) -> Metrics | None:
        """Compute the gradient of the next update while the scores of its rows arrive; `update` then applies it.

        Args:
            rows: the rows of the next update.
            step: see `update`.
            arrive: waits for the scores of some rows; if it fails on one rank, it fails on all.

        Returns:
            Metrics, as from `accumulate`.

        Raises:
            OpdError: what `update` raises, except for a loss or gradient that is not finite, or what `arrive` raised.
                The gradient is then cleared and the random state restored.
        """
        device = self.accelerator.device
        self.random = random_state(device)
        try:
            self._begun = rows, self._gradient(rows, step, arrive)
        except BaseException:
            self.optimizer.zero_grad(set_to_none=True)
            set_random_state(self.random, device)
            self.random = None
            raise
        return self._begun[1]

    def _gradient(
        self, rows: Sequence[Row], step: int, arrive: Callable[[Sequence[Row]], None] | None = None
    ) -> Metrics | None:
        """`accumulate`, in the mode for learning, for an update; lack of device memory becomes an error with advice."""
        if self.student.lm.training != self.student.dropout:  # setting it walks through every module
            self.student.train()
        self.objective.step = step
        try:
            return self.accumulate(rows, arrive=arrive)
        except torch.OutOfMemoryError as error:
            if self.ranks.count > 1:
                raise
            recover(self.student)
            self.optimizer.zero_grad(set_to_none=True)
            reason = str(error).splitlines()[0].rstrip(".")
            raise DeviceMemoryError(
                f"a micro-batch of step {step} does not fit in the device's memory ({reason}); lower "
                f"train.micro_batch_tokens, now {self.settings.micro_batch_tokens}."
            ) from error

    def accumulate(
        self,
        rows: Sequence[Row],
        select: Callable[[TokenBatch], Tensor] | None = None,
        *,
        weights: Sequence[Tensor] | None = None,
        arrive: Callable[[Sequence[Row]], None] | None = None,
    ) -> Metrics | None:
        """Add the gradient of the objective on `rows` to the parameters' `.grad`.

        Gradients are reduced over ranks in collectives, so every rank makes as many passes as the rank with the most
        micro-batches; the others make up the number with passes over one token whose loss is 0.

        Args:
            rows: this rank's rows.
            select: returns a bool mask [N] that narrows the trained positions of a micro-batch. The weights stay those
                of all rows, so that the gradients of disjoint selections add up to the whole.
            weights: for each term, the weight of every position of `rows`; from `Objective.position_weights` if None.
            arrive: waits for the scores of some rows. With one rank it is called after the forward pass, which needs no
                scores; with several ranks or a sharded student before it, where all ranks can agree on a failure.

        Returns:
            Metrics as `update` returns them; None, and no gradient, if no rank has a row that a term learns from.
        """
        parts, shared = self._micro_batches.of(rows)
        rounds = max(self.ranks.gather(len(parts)))
        if rounds == 0:
            return None
        self.objective.prepare(rows)
        # Without a row to learn from, an update would only apply weight decay and momentum.
        if not any(self.ranks.gather(self.objective.selects_any(rows))):
            return None
        if weights is None:
            # From all rows at once, so that weights do not depend on how rows are split into micro-batches.
            weights = self.objective.position_weights(rows, self.accelerator.device)
        # Weights are stored row after row in the order of `rows`; a micro-batch may take any of the rows.
        ends = list(accumulate((row.length for row in rows), initial=0))
        sums: Sums = {}
        for index in range(rounds):
            part = parts[index] if index < len(parts) else []
            arrived = self._arrival([rows[i] for i in part], arrive)
            # Gradients are reduced over ranks once, in the last pass.
            unsent = nullcontext() if index == rounds - 1 else self.accelerator.no_sync(self.wrapped)
            with self.ranks.bound(), self.accelerator.autocast(), unsent:
                if not part:
                    self.accelerator.backward(self._filler(shared))
                    continue
                batch = collate(rows, part, self.accelerator.device, shared=shared)
                places = np.concatenate([np.arange(ends[i], ends[i + 1]) for i in part])
                index_of = torch.from_numpy(places).to(self.accelerator.device)
                sums = add(sums, self._pass(batch, [every[index_of] for every in weights], select, arrived))
        total: Metrics = {}
        for part_of_rank in self.ranks.gather(to_host(sums)):
            total = add(total, part_of_rank)
        return of_the_step(total, self.ranks.count)

    def _arrival(
        self, rows: Sequence[Row], arrive: Callable[[Sequence[Row]], None] | None
    ) -> Callable[[], None] | None:
        """What a pass over `rows` calls to wait for their scores; None if there is nothing to wait for.

        Several ranks wait here, before torch's collectives, which cannot report a failure to other ranks.
        """
        if arrive is None:
            return None
        arrived = partial(arrive, rows)
        if not self.sharded and self.ranks.count == 1:
            return arrived
        self.ranks.agree(arrived)
        return None

    def _pass(
        self,
        batch: TokenBatch,
        weights: Sequence[Tensor],
        select: Callable[[TokenBatch], Tensor] | None,
        arrived: Callable[[], None] | None,
    ) -> Sums:
        """Forward, loss and backward of one micro-batch; see `accumulate`."""
        # Around both: where layers are checkpointed, the backward pass runs them forward again.
        with self.student.around(partial(batch.reading, self.updates)):
            batch = self.token_batch(batch, arrived=arrived)
            if select is not None:
                batch = dataclasses.replace(batch, mask=batch.mask & select(batch))
            loss, sums = self.objective.loss(batch, weights)
            if not loss.requires_grad:
                raise PluginError(
                    "no term of the objective returned a loss with a gradient; add a term whose loss depends on the "
                    "student's scores."
                )
            self.accelerator.backward(loss)
        if batch.prefixes is not None:
            sums["positions_shared"] = (batch.prefixes.spared, float(positions(batch.rows)))
        return sums

    def _filler(self, shared: bool) -> Tensor:
        """A loss of 0 whose graph contains every parameter, from a pass over one token, with a prefix if `shared`."""
        token = torch.ones((1, 1), dtype=torch.long, device=self.accelerator.device)
        zero = torch.zeros(1, dtype=torch.long, device=self.accelerator.device)
        hidden = self.wrapped(zero[None], token, zero, zero, Prefixes(token, zero + 1, zero) if shared else None)
        head = self.student.head()
        # DDP waits for every parameter's gradient, so every parameter must be in the graph.
        touched = [hidden, head.weight, *self.student.beside.parameters()] + ([] if head.bias is None else [head.bias])
        return torch.stack([part.float().sum() for part in touched]).sum() * 0.0

    def token_batch(
        self, batch: TokenBatch, *, needs: Needs | None = None, arrived: Callable[[], None] | None = None
    ) -> TokenBatch:
        """Run the student on a collated batch and, once `arrived` returns, complete it for the terms."""
        needs = needs or self.needs
        # Without gradients, ranks may make different numbers of passes, which DDP's wrapper would not allow.
        model = self.wrapped if torch.is_grad_enabled() else self.student
        hidden = model(batch.input_ids, batch.attention_mask, batch.sequence, batch.source, batch.prefixes)
        if arrived is not None:
            arrived()
        head = self.student.head()  # called once, because it gathers a sharded head
        spec = dataclasses.replace(self.projection, want=needs.student)
        return lay_out(hidden, head, batch, needs, spec, self.head_of)

    def named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Trained parameters with their names in the saved model; of a sharded student, this rank's shards."""
        reshard(self.student)
        for name, parameter in self.student.lm.named_parameters():
            if parameter.requires_grad:
                yield name, parameter

    def whole_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """As `named_parameters`, detached and each gathered in turn; every rank must iterate over all of them."""
        if self.sharded:
            self.ranks.meet()
        return ((name, full(parameter.detach())) for name, parameter in self.named_parameters())

    def whole(self) -> AbstractContextManager[None]:
        """See `student.model.sharding.whole`; ranks meet first, so that none gathers weights without the others.

        Raises:
            CancelledError: within work that the ranks agree on, if another rank failed.
        """
        if not self.sharded:
            return nullcontext()
        self.ranks.meet()
        return whole(self.student)

    def state_dict(self) -> dict[str, Any]:
        """Optimizer moments by parameter name, the number of updates, and the terms' own parameters."""
        moments = {name: dict(self.optimizer.state.get(p, {})) for name, p in self._all_parameters()}
        beside = {name: p.detach() for name, p in self.student.beside.named_parameters()}
        return {"updates": self.updates, "moments": moments} | ({"beside": beside} if beside else {})

    def _all_parameters(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.named_parameters()
        yield from ((f"beside.{name}", p) for name, p in self.student.beside.named_parameters())

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned; the model's own weights are loaded with the model.

        Raises:
            CheckpointError: if the state is of another kind of optimizer or of another model.
        """
        if not same_kind(state["moments"], self.settings.optimizer):
            raise CheckpointError(
                f"the checkpoint has the moments of another optimizer than train.optimizer {self.settings.optimizer}, "
                "or of an earlier format; resume with the optimizer and the version of opd that the run began with."
            )
        for name, parameter in self._all_parameters():
            if name not in state["moments"] and name.startswith("beside."):
                raise CheckpointError(
                    f"a term of the objective trains weights of its own ({name.removeprefix('beside.')}), which the "
                    "checkpoint lacks; leave the term out, or begin a new run."
                )
            if name not in state["moments"]:
                raise CheckpointError(
                    f"the checkpoint has no optimizer state for {name}, so it is from another model; resume with the "
                    "model that the run began with."
                )
            moments = state["moments"][name]
            if moments:
                self.optimizer.state[parameter] = restored(self.optimizer, moments, parameter)
        with torch.no_grad():
            for name, parameter in self.student.beside.named_parameters():
                parameter.copy_(state["beside"][name])
        self.updates = int(state["updates"])
