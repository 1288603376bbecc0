"""Every payload over the real wire against a forward of the same model in this process.

The model's head has more rows than the tokenizer has ids, as most published ones do: those rows count nowhere.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from opd import PayloadSpec, ScoreItem, TeacherFleet
from opd.wire.types import PayloadKind

V, K = 260, 16


@pytest.fixture(scope="module")
def fleet(world: Path, serve: Any) -> Iterator[TeacherFleet]:
    server = serve("--model", f"teacher={world / 'padded'}", "--deterministic")
    with TeacherFleet.connect(server.address) as connected:
        yield connected


@pytest.fixture(scope="module")
def local(world: Path) -> Any:
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(world / "padded").eval()


@pytest.fixture(scope="module")
def items() -> list[ScoreItem]:
    random = np.random.default_rng(3)
    made = []
    for prompt, response in [(1, 1), (5, 12), (9, 3), (2, 40)]:
        ids = random.integers(2, V, prompt + response).astype(np.uint32)
        gather = np.stack([random.choice(V, K, replace=False) for _ in range(response)]).astype(np.uint32)
        made.append(ScoreItem(ids, prompt, gather))
    return made


def without_ids(items: list[ScoreItem]) -> list[ScoreItem]:
    return [ScoreItem(item.token_ids, item.prompt_length) for item in items]


def expected(local: Any, item: ScoreItem, temperature: float = 1.0) -> torch.Tensor:
    """[T, V] log-probs of the tokens after each position, by a plain forward."""
    ids = torch.from_numpy(item.token_ids.astype(np.int64))[None]
    with torch.no_grad():
        logits = local(ids).logits[0, item.prompt_length - 1 : -1, :V].float()
    return torch.log_softmax(logits / temperature, -1)


@pytest.mark.parametrize("temperature", [1.0, 0.5, 3.0])
def test_sampled_log_probs_agree(fleet: TeacherFleet, local: Any, items: list[ScoreItem], temperature: float) -> None:
    for item, scores in zip(
        items, fleet.score("teacher", without_ids(items), PayloadSpec.sampled(), temperature=temperature), strict=True
    ):
        logp = expected(local, item, temperature)
        want = logp.gather(-1, torch.from_numpy(item.response_ids.astype(np.int64))[:, None]).squeeze(-1)
        np.testing.assert_allclose(scores.sampled, want, atol=1e-5)


@pytest.mark.parametrize(("dtype", "bound"), [("f32", 1e-5), ("f16", 1e-2), ("u16", 1e-2)])
@pytest.mark.parametrize("kind", [PayloadKind.TOPK, PayloadKind.GATHER])
def test_partial_payloads_agree(
    fleet: TeacherFleet, local: Any, items: list[ScoreItem], kind: PayloadKind, dtype: str, bound: float
) -> None:
    spec = PayloadSpec(kind, K, dtype)
    asked = items if kind is PayloadKind.GATHER else without_ids(items)
    for item, scores in zip(items, fleet.score("teacher", asked, spec), strict=True):
        logp = expected(local, item)
        ids = item.gather_ids if kind is PayloadKind.GATHER else scores.ids
        assert ids is not None and scores.values is not None and scores.log_tail is not None
        chosen = torch.from_numpy(ids.astype(np.int64))
        np.testing.assert_allclose(scores.values.astype(np.float32), logp.gather(-1, chosen), atol=bound)
        tail = logp.scatter(-1, chosen, -torch.inf).logsumexp(-1)
        np.testing.assert_allclose(scores.log_tail, tail, atol=1e-5)
        if kind is PayloadKind.TOPK:
            np.testing.assert_allclose(logp.gather(-1, chosen), logp.topk(K, -1).values, atol=1e-5)


def test_hidden_states_and_the_fetched_head_give_the_logits(
    fleet: TeacherFleet, local: Any, items: list[ScoreItem]
) -> None:
    head = fleet.head("teacher")
    for item, scores in zip(items, fleet.score("teacher", without_ids(items), PayloadSpec.hidden("f32")), strict=True):
        logits = torch.from_numpy(scores.hidden) @ torch.from_numpy(head.weight).float().T
        np.testing.assert_allclose(torch.log_softmax(logits, -1), expected(local, item), atol=1e-5)


def test_bf16_hidden_states_agree_to_their_rounding(fleet: TeacherFleet, local: Any, items: list[ScoreItem]) -> None:
    head = fleet.head("teacher")
    scores = fleet.score("teacher", without_ids(items[1:2]), PayloadSpec.hidden())[0]
    hidden = torch.from_numpy(scores.hidden).view(torch.bfloat16).float()
    logits = hidden @ torch.from_numpy(head.weight).float().T
    np.testing.assert_allclose(torch.log_softmax(logits, -1), expected(local, items[1]), atol=0.1)


def test_the_description_counts_the_tokenizers_ids(fleet: TeacherFleet, local: Any) -> None:
    info = fleet.describe("teacher")
    assert info.vocab_size == info.tokenizer.size == V
    assert info.padding_rows == local.config.vocab_size - V > 0


def test_row_t_predicts_response_token_t(fleet: TeacherFleet, local: Any) -> None:
    """Off by one in either direction would score another token: all ids here are distinct."""
    ids = np.arange(20, 40, dtype=np.uint32)
    scores = fleet.score("teacher", [ScoreItem(ids, 7)], PayloadSpec.sampled())[0]
    with torch.no_grad():
        logp = torch.log_softmax(local(torch.from_numpy(ids.astype(np.int64))[None]).logits[0, :, :V].float(), -1)
    right = [float(logp[t - 1, ids[t]]) for t in range(7, 20)]
    late = [float(logp[t, ids[t]]) for t in range(7, 20)]
    np.testing.assert_allclose(scores.sampled, right, atol=1e-5)
    assert np.abs(np.array(late) - np.array(right)).max() > 0.1


def test_a_teacher_measured_against_itself_diverges_by_zero(fleet: TeacherFleet, local: Any) -> None:
    from opd.maths import head_tail_reverse_kl, topk_divergence

    ids = np.arange(30, 60, dtype=np.uint32)
    response = torch.arange(40, 60)
    with torch.no_grad():
        logits = local(torch.from_numpy(ids.astype(np.int64))[None]).logits[0, 9:-1, :V].float()
    candidates = logits.topk(K, -1).indices
    item = ScoreItem(ids, 10, candidates.numpy().astype(np.uint32))
    scores = fleet.score("teacher", [item], PayloadSpec.gather(K, "f32"))[0]
    values, tail = torch.from_numpy(scores.values), torch.from_numpy(scores.log_tail)
    estimate = head_tail_reverse_kl(logits, response, candidates, values, torch.from_numpy(scores.sampled), tail)
    assert estimate.per_token.abs().max() < 1e-5
    bucket = topk_divergence(logits, candidates, values, tail, kind="reverse_kl")
    assert bucket.per_token.abs().max() < 1e-5
