"""What travels is small enough and exact enough: bytes per token, and the error that f16 and u16 put into a KL."""

import numpy as np
import pytest

from opd.wire.encoder import encode_scores
from opd.wire.tensors import decode_tensor
from opd.wire.types import PayloadSpec, Scores

ROWS, VOCAB, K = 200, 20_000, 64


def log_softmax(logits: np.ndarray) -> np.ndarray:
    top = logits.max(axis=1, keepdims=True)
    return logits - top - np.log(np.exp(logits - top).sum(axis=1, keepdims=True))


@pytest.fixture(scope="module")
def teacher() -> tuple[Scores, np.ndarray]:
    """Top-k of a synthetic language model of mixed entropy, and a nearby student's log-probs at the same ids."""
    rng = np.random.default_rng(0)
    logits = rng.gumbel(size=(ROWS, VOCAB)) * rng.uniform(1.0, 3.0, (ROWS, 1))
    exact = log_softmax(logits)
    student = log_softmax(logits + rng.normal(0, 0.2, logits.shape))
    ids = np.argsort(-exact, axis=1)[:, :K]
    values = np.take_along_axis(exact, ids, 1)
    rest = 1 - np.exp(values).sum(axis=1)
    scores = Scores(
        sampled=values[:, 0].astype(np.float32),
        values=values.astype(np.float32),
        ids=ids.astype(np.uint32),
        log_tail=np.log(rest).astype(np.float32),
    )
    return scores, np.take_along_axis(student, ids, 1)


def on_the_wire(scores: Scores, dtype: str) -> tuple[np.ndarray, float]:
    """Values after the round trip, and bytes per token."""
    encoded = encode_scores(scores, PayloadSpec.topk(K, dtype), ROWS, vocab_size=VOCAB)
    spec, data = encoded.tensors[1], encoded.buffers[1]
    return decode_tensor(data, spec.dtype, ROWS, K).astype(np.float64), encoded.nbytes / ROWS


def head_kl(values: np.ndarray, student: np.ndarray) -> float:
    """Mean over positions of sum p (log p - log q) over the K ids, nats."""
    return float((np.exp(values) * (values - student)).sum(axis=1).mean())


@pytest.mark.parametrize(("dtype", "bias", "gradient"), [("f32", 1e-6, 1e-6), ("f16", 5e-4, 1e-3), ("u16", 5e-4, 5e-4)])
def test_the_kl_and_its_gradient_survive_the_wire(
    dtype: str, bias: float, gradient: float, teacher: tuple[Scores, np.ndarray]
) -> None:
    scores, student = teacher
    exact = scores.values.astype(np.float64)
    values, _ = on_the_wire(scores, dtype)
    assert abs(head_kl(values, student) - head_kl(exact, student)) <= bias
    # The gradient of a forward KL on the student's log-probs is -p.
    error = np.linalg.norm(np.exp(values) - np.exp(exact)) / np.linalg.norm(np.exp(exact))
    assert error <= gradient


def test_topk_costs_at_most_300_bytes_a_token_and_gather_140(teacher: tuple[Scores, np.ndarray]) -> None:
    scores, _ = teacher
    assert on_the_wire(scores, "f16")[1] == 280.0
    gather = encode_scores(scores, PayloadSpec.gather(K), ROWS, vocab_size=VOCAB)
    assert gather.nbytes / ROWS == 136.0
    sampled = encode_scores(scores, PayloadSpec.sampled(), ROWS, vocab_size=VOCAB)
    assert sampled.nbytes / ROWS == 4.0
