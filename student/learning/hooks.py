"""Hooks on the student's forward in a named pass: noise on hidden states, experts that were chosen elsewhere.

    with student.around(lambda: reading):
        loss = ...                                       # the forward
        loss.backward()                                  # the hooks are still there where activations are recomputed

A hook is a context manager around one forward of a micro-batch, in an update around its backward too: activation
checkpointing runs the layers again in the backward pass, and must meet the same hook. Methods and terms of the
objective give hooks (`Controller.hooks`, `Term.hooks`); one finds modules in the model it is handed (`decoder_layers`,
or by their names) and registers torch's own forward hooks on them, which work as well under DDP, FSDP2 and adapters.
What it does to a row must depend on the row alone, so that it does not change with micro-batches, ranks and steps that
are taken again.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from collections.abc import Iterator

    from torch import nn
    from torch.utils.hooks import RemovableHandle
    from transformers import PreTrainedModel

    from student.data.row import Row

Pass = Literal["update", "student", "kept"]
"""An update's forward; the student's weights read without gradient, as the old policy or by a probe; copies of it
("initial", "ema") likewise."""


@dataclass(frozen=True, slots=True)
class Reading:
    """What a forward reads.

    Attributes:
        kind: the pass.
        rows: of each of B sequences the row that it is the whole of, prompt and response; None where it is another
            text, or one window of several.
        width: L, tokens that every sequence is padded to, on the right.
        names: of each sequence a name that is its own in the step, in whatever pass of an update it is read; in other
            passes none.
        lengths: tokens of each sequence, as `names`.
        update: optimizer updates of the run before this one; 0 in other passes.
    """

    kind: Pass
    rows: tuple[Row | None, ...]
    width: int
    names: tuple[str, ...] = ()
    lengths: tuple[int, ...] = ()
    update: int = 0


class ModelHook(Protocol):
    """Acts on the student's forward."""

    def around(self, lm: PreTrainedModel, reading: Reading) -> AbstractContextManager[None]:
        """Entered before the forward, and left after it, or after the backward of an update."""


@contextmanager
def around(hooks: Sequence[ModelHook], lm: PreTrainedModel, reading: Reading) -> Iterator[None]:
    """All of `hooks` around one forward."""
    with ExitStack() as stack:
        for hook in hooks:
            stack.enter_context(hook.around(lm, reading))
        yield


@contextmanager
def registered(handles: Sequence[RemovableHandle]) -> Iterator[None]:
    """Torch's hooks, removed at the end whatever happens."""
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def decoder_layers(lm: PreTrainedModel) -> list[nn.Module]:
    """The decoder layers in order: what transformers never splits over devices; adapters leave them where they are."""
    names = set(getattr(lm, "_no_split_modules", None) or ())
    return [module for module in lm.modules() if type(module).__name__ in names]
