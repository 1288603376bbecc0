"""Hooks on the student's forward in a named pass: noise on hidden states, experts that were chosen elsewhere.

    with student.around(Reading("update", rows, width)):
        loss = ...                                       # the forward
        loss.backward()                                  # the hooks are still there where activations are recomputed

A hook is a context manager around one forward of a micro-batch, in an update around its backward too: activation
checkpointing runs the layers again in the backward pass, and must meet the same hook. A plug-in of the kind `method`
gives hooks (`Controller.hooks`); it finds modules in the model it is handed (`decoder_layers`, or by their names) and
registers torch's own forward hooks on them, which work as well under DDP, FSDP2 and adapters. What it does to a row
must depend on the row alone, so that it does not change with micro-batches, ranks and steps that are taken again.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

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
    """

    kind: Pass
    rows: tuple[Row | None, ...]
    width: int


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
    """The decoder layers in order; adapters and shards leave them where they are."""
    return list(getattr(lm.base_model, "layers", []))


def on_output(module: nn.Module, change: Callable[[Any], Any]) -> RemovableHandle:
    """Have `change(output)` take the place of what `module` gives; None leaves it as it is."""
    return module.register_forward_hook(lambda _module, _inputs, output: change(output))
