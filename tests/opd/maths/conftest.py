"""Fixtures of the mathematics: shape checking of every call, small random problems, enumeration in float64."""

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from jaxtyping import config as jaxtyping_config
from jaxtyping import install_import_hook
from torch import Tensor

# The kernels choose between compiler and interpreter when they are defined, that is at import.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
torch.set_num_threads(1)
# Every annotated shape and dtype of opd.maths is checked at run time, in all the tests of this folder. Triton reads the
# source of its kernels, which the checker must not rewrite.
_FOLDER = Path(__file__).parents[3] / "opd" / "maths"
install_import_hook(
    [
        ".".join(("opd.maths", *path.relative_to(_FOLDER).with_suffix("").parts))
        for path in _FOLDER.rglob("*.py")
        if path.stem not in ("__init__", "kernels")
    ],
    "beartype.beartype",
)


@pytest.fixture
def unchecked_types() -> Iterator[None]:
    """Switches the run-time type checker off, to see the errors that users see."""
    before = jaxtyping_config.jaxtyping_disable
    jaxtyping_config.update("jaxtyping_disable", True)
    yield
    jaxtyping_config.update("jaxtyping_disable", before)


@pytest.fixture
def make_logits() -> Callable[..., Tensor]:
    """Random float64 logits: make_logits(3, 7, seed=1, scale=2.0)."""

    def make(*shape: int, seed: int = 0, scale: float = 1.5) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        return scale * torch.randn(*shape, generator=generator, dtype=torch.float64)

    return make


@pytest.fixture
def closed_form() -> dict[str, Callable[..., Tensor]]:
    """Naive definitions, written from the textbook in probabilities: name -> f(p student, q teacher, w) per row."""

    def kl(a: Tensor, b: Tensor) -> Tensor:
        return (a * (a / b).log()).sum(-1)

    return {
        "forward_kl": lambda p, q, w: kl(q, p),
        "reverse_kl": lambda p, q, w: kl(p, q),
        "jsd": lambda p, q, w: w * kl(q, w * q + (1 - w) * p) + (1 - w) * kl(p, w * q + (1 - w) * p),
        "skew_forward_kl": lambda p, q, w: kl(q, w * q + (1 - w) * p),
        "skew_reverse_kl": lambda p, q, w: kl(p, w * p + (1 - w) * q),
        "total_variation": lambda p, q, w: 0.5 * (p - q).abs().sum(-1),
    }


@pytest.fixture
def expected_gradient() -> Callable[..., Tensor]:
    """Enumeration of every sampled token: the expectation of an estimator's gradient, and optionally its variance.

    `expected_gradient(estimate, logits, weights=None)`, where `estimate(logits, y)` gives per-token losses [N] for the
    sampled ids y [N]; token y is drawn with the student's own probability, or with `weights` [N, V].
    """

    def enumerate_tokens(
        estimate: Callable[[Tensor, Tensor], Tensor], logits: Tensor, weights: Tensor | None = None
    ) -> Tensor:
        probability = logits.detach().softmax(-1) if weights is None else weights
        total = torch.zeros_like(logits)
        for token in range(logits.shape[-1]):
            leaf = logits.detach().clone().requires_grad_()
            y = torch.full(logits.shape[:-1], token)
            (gradient,) = torch.autograd.grad(estimate(leaf, y).sum(), leaf)
            total += probability[..., token, None] * gradient
        return total

    return enumerate_tokens
