"""Hooks on the student's forward pass: noise on hidden states, or experts that were chosen in another pass.

    with student.around(lambda: reading):
        loss = ...                                       # the forward pass
        loss.backward()                                  # the hooks still act where activations are recomputed

A hook is a context manager around the forward pass of a micro-batch. In an update it also covers the backward pass,
because activation checkpointing runs the layers there again and must meet the same hook. A method or term
is a hook if it has `around`. A hook finds modules in the model that it is given (`decoder_layers`, or by name) and
registers torch's own forward hooks on them, which also work under DDP, FSDP2 and adapters. What a hook does to a row
must depend on that row alone, so that it does not change with micro-batches or ranks, or when a step is repeated.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol, runtime_checkable

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn
    from torch.utils.hooks import RemovableHandle
    from transformers import PreTrainedModel

    from student.data.row import Row

Pass = Literal["update", "student", "kept"]
"""update: a forward pass of an update. student: the student's weights without gradient, for old log-probs or a probe.
kept: the same with kept weights, roles "initial" and "ema"."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What a forward pass reads.

    Attributes:
        kind: the kind of pass.
        rows: for each of B sequences, the row whose prompt and response it consists of; None for any other text, and
            for one of several windows of a row.
        width: L, the number of tokens to which every sequence is padded on the right.
        names: in an update, a name for each sequence that is unique within the step and does not depend on the
            micro-batch; empty in other passes.
        lengths: in an update, the number of tokens of each sequence; empty in other passes.
        update: optimizer updates that the run made before this one; 0 in other passes.
    """

    kind: Pass
    rows: tuple[Row | None, ...]
    width: int
    names: tuple[str, ...] = ()
    lengths: tuple[int, ...] = ()
    update: int = 0


@runtime_checkable
class ModelHook(Protocol):
    """A hook on the student's forward pass."""

    def around(self, lm: PreTrainedModel, reading: Reading) -> AbstractContextManager[None]:
        """A context that is entered before the forward pass and left after it; in an update, after the backward."""


@contextmanager
def around(hooks: Sequence[ModelHook], lm: PreTrainedModel, reading: Reading) -> Iterator[None]:
    """Enter all of `hooks` around one forward pass."""
    with ExitStack() as stack:
        for hook in hooks:
            stack.enter_context(hook.around(lm, reading))
        yield


@contextmanager
def registered(handles: Sequence[RemovableHandle]) -> Iterator[None]:
    """Remove torch hooks on exit, after an exception too."""
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def decoder_layers(lm: PreTrainedModel) -> list[nn.Module]:
    """The decoder layers in order, found as the modules that transformers never splits over devices."""
    names = set(getattr(lm, "_no_split_modules", None) or ())
    return [module for module in lm.modules() if type(module).__name__ in names]
