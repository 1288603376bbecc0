"""Random but valid scores of a small softmax teacher, for the wire's tests."""

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest

from opd.wire.bounds import RequestBounds
from opd.wire.tensors import bf16_bits
from opd.wire.types import PayloadKind, PayloadSpec, ScoreItem, Scores

VOCAB = 300
HIDDEN = 16


@dataclass(frozen=True)
class Case:
    """A sequence with the scores that a correct teacher returns for it."""

    item: ScoreItem
    spec: PayloadSpec
    scores: Scores


def make_case(spec: PayloadSpec, rows: int = 7, prompt: int = 3, seed: int = 0, vocab: int = VOCAB) -> Case:
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 2.5, (rows, vocab)).astype(np.float32)
    log_probs = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    ids = rng.integers(0, vocab, prompt + rows).astype(np.uint32)
    response = ids[prompt:]
    gather = None
    if spec.kind is PayloadKind.GATHER:
        gather = np.argsort(rng.random((rows, vocab)), axis=1)[:, : spec.k].astype(np.uint32)
    item = ScoreItem(ids, prompt, gather)
    if spec.kind is PayloadKind.HIDDEN:
        hidden = rng.normal(size=(rows, HIDDEN)).astype(np.float32)
        return Case(item, spec, Scores(hidden=hidden if spec.value_dtype == "f32" else bf16_bits(hidden)))
    if spec.kind is PayloadKind.FULL:
        return Case(item, spec, Scores(logits=logits))
    sampled = np.take_along_axis(log_probs, response[:, None].astype(np.int64), 1)[:, 0]
    if spec.kind is PayloadKind.SAMPLED:
        return Case(item, spec, Scores(sampled=sampled))
    chosen = gather if gather is not None else np.argsort(-log_probs, axis=1)[:, : spec.k].astype(np.uint32)
    values = np.take_along_axis(log_probs, chosen.astype(np.int64), 1)
    rest = np.exp(log_probs).astype(np.float64)
    np.put_along_axis(rest, chosen.astype(np.int64), 0.0, 1)
    with np.errstate(divide="ignore"):
        log_tail = np.log(rest.sum(axis=1)).astype(np.float32)
    return Case(item, spec, Scores(sampled=sampled, values=values, ids=chosen, log_tail=log_tail))


@pytest.fixture
def case() -> Callable[..., Case]:
    return make_case


@pytest.fixture
def bounds() -> RequestBounds:
    return RequestBounds(
        teacher="t",
        vocab_size=VOCAB,
        payloads=frozenset(PayloadKind),
        supports_temperature=True,
        max_sequence_tokens=64,
        max_k=VOCAB,
        max_sequences=4,
        max_request_tokens=128,
        max_request_bytes=1 << 20,
        hidden_size=HIDDEN,
    )


ALL_SPECS = [
    PayloadSpec.sampled(),
    PayloadSpec.topk(8),
    PayloadSpec.topk(8, "f32"),
    PayloadSpec.topk(8, "u16"),
    PayloadSpec.topk(VOCAB, "f32"),
    PayloadSpec.gather(5),
    PayloadSpec.gather(5, "f32"),
    PayloadSpec.gather(5, "u16"),
    PayloadSpec.hidden(),
    PayloadSpec.hidden("f32"),
    PayloadSpec.full(),
]


@pytest.fixture(params=ALL_SPECS, ids=lambda s: f"{s.kind}-{s.k}-{s.value_dtype}")
def spec(request: pytest.FixtureRequest) -> PayloadSpec:
    return request.param
