"""Payloads are reduced exactly: tails over the complement, blocks of any size, NaN flagged."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from opd.heads import OutputHead
from opd.wire.types import PayloadSpec
from teacher_server.engines.payload import PayloadRows, reduce_logits, reduce_rows
from teacher_server.engines.project import HostCopy


def _logits(rows: int, vocabulary: int, seed: int, scale: float = 5.0) -> torch.Tensor:
    return torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed)) * scale


@settings(max_examples=60, deadline=None)
@given(st.integers(2, 40), st.data())
def test_head_ids_and_tail_add_up_to_one(vocabulary: int, data: st.DataObject) -> None:
    k = data.draw(st.integers(1, vocabulary))
    logits = _logits(5, vocabulary, data.draw(st.integers(0, 99)), data.draw(st.sampled_from([0.1, 3.0, 60.0])))
    out = reduce_logits(logits, PayloadSpec.topk(k, "f32"), torch.zeros(5, dtype=torch.long), None)
    total = out["values"].double().exp().sum(-1) + out["log_tail"].double().exp()
    np.testing.assert_allclose(total.numpy(), 1.0, atol=1e-5)
    assert (out["values"].diff(dim=-1) <= 0).all()
    assert out["log_tail"].isneginf().all() == (k == vocabulary)


def test_a_tail_far_below_f32_resolution_of_one_is_exact() -> None:
    logits = torch.tensor([[0.0, -40.0, -41.0]])
    out = reduce_logits(logits.clone(), PayloadSpec.topk(1, "f32"), torch.tensor([0]), None)
    expected = torch.logsumexp(logits[:, 1:].double(), -1)  # 1 - sum would give -inf
    np.testing.assert_allclose(out["log_tail"].double(), expected, rtol=1e-6)


def test_gather_ids_may_be_any_distinct_ids_of_the_row() -> None:
    logits, ids = _logits(2, 6, 0), torch.tensor([[5, 0, 3], [1, 2, 4]])
    out = reduce_logits(logits.clone(), PayloadSpec.gather(3, "f32"), torch.tensor([0, 1]), ids)
    logp = logits.log_softmax(-1)
    torch.testing.assert_close(out["values"], logp.gather(-1, ids))
    rest = torch.stack([logp[0, [1, 2, 4]], logp[1, [0, 3, 5]]])
    torch.testing.assert_close(out["log_tail"], torch.logsumexp(rest, -1))


@pytest.mark.parametrize("spec", [PayloadSpec.sampled(), PayloadSpec.topk(2)])
def test_a_tokens_rank_is_one_more_than_the_number_of_likelier_ids(spec: PayloadSpec) -> None:
    logits, targets = _logits(5, 9, 3), torch.tensor([0, 8, 3, 3, 5])
    out = reduce_logits(logits.clone(), spec, targets, None, ranks=True)
    order = logits.argsort(-1, descending=True)
    assert out["ranks"].tolist() == [1 + order[row].tolist().index(target) for row, target in enumerate(targets)]
    assert "ranks" not in reduce_logits(logits.clone(), spec, targets, None)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_row_with_a_non_finite_logit_is_flagged_alone(bad: float) -> None:
    logits = _logits(3, 8, 1)
    logits[1, 4] = bad
    for spec in (PayloadSpec.sampled(), PayloadSpec.topk(2), PayloadSpec.full()):
        out = reduce_logits(logits.clone(), spec, torch.zeros(3, dtype=torch.long), None)
        assert out["finite"].tolist() == [True, False, True]


def test_f16_values_saturate_instead_of_becoming_infinite() -> None:
    logits = torch.tensor([[0.0, -1e6]])
    out = reduce_logits(logits, PayloadSpec.topk(2, "f16"), torch.tensor([0]), None)
    assert out["values"].isfinite().all()


def _rows(count: int, k: int = 0) -> PayloadRows:
    draw = torch.Generator().manual_seed(3)
    return PayloadRows(
        hidden=torch.randn(count, 8, generator=draw),
        targets=torch.randint(0, 50, (count,), generator=draw),
        temperature=torch.rand(count, generator=draw) + 0.5,
        gather_ids=torch.stack([torch.randperm(50, generator=draw)[:k] for _ in range(count)]) if k else None,
    )


@pytest.mark.parametrize(
    "spec",
    [
        PayloadSpec.sampled(),
        PayloadSpec.topk(4, "f32"),
        PayloadSpec.gather(4, "f32"),
        PayloadSpec.full(),
        PayloadSpec.hidden("bf16"),
    ],
    ids=lambda spec: str(spec.kind),
)
def test_blocks_of_one_row_give_what_one_block_gives(spec: PayloadSpec) -> None:
    head = OutputHead(torch.randn(50, 8, generator=torch.Generator().manual_seed(4)), None, 1.0, 0.0)
    rows = _rows(13, spec.k)
    (whole,) = HostCopy(reduce_rows(rows, spec, head, 1 << 30), 13).split([13], "h")
    pieces = HostCopy(reduce_rows(rows, spec, head, 1), 13).split([5, 8], "h")
    for name in ("sampled", "values", "ids", "log_tail", "hidden", "logits"):
        expected = getattr(whole, name)
        if expected is None:
            assert getattr(pieces[0], name) is None
            continue
        joined = np.concatenate([getattr(piece, name) for piece in pieces])
        np.testing.assert_allclose(joined.astype(np.float64), expected.astype(np.float64), atol=1e-5)


@pytest.mark.parametrize("spec", [PayloadSpec.topk(4, "f32"), PayloadSpec.gather(4, "f32"), PayloadSpec.full()])
def test_a_block_is_reduced_a_few_rows_at_a_time(spec: PayloadSpec, monkeypatch: pytest.MonkeyPatch) -> None:
    head = OutputHead(torch.randn(50, 8, generator=torch.Generator().manual_seed(4)), None, 1.0, 0.0)
    rows = _rows(13, spec.k)
    (whole,) = reduce_rows(rows, spec, head, 1 << 30)
    monkeypatch.setattr("opd.maths.blocks._CPU_BLOCK", 5 * 50)
    pieces = list(reduce_rows(rows, spec, head, 1 << 30))
    assert [len(piece["finite"]) for piece in pieces] == [5, 5, 3]
    for name, expected in whole.items():
        assert torch.equal(torch.cat([piece[name] for piece in pieces]), expected), name


@pytest.mark.parametrize("spec", [PayloadSpec.topk(4, "f32"), PayloadSpec.gather(4, "f32"), PayloadSpec.full()])
def test_rows_that_fill_a_block_up_leave_no_trace(spec: PayloadSpec) -> None:
    head = OutputHead(torch.randn(50, 8, generator=torch.Generator().manual_seed(4)), None, 1.0, 0.0)
    rows = _rows(13, spec.k)
    (whole,) = reduce_rows(rows, spec, head, 1 << 30)
    blocks = list(reduce_rows(rows, spec, head, 1, least_rows=5))
    assert [len(block["finite"]) for block in blocks] == [5, 5, 3]
    for name, expected in whole.items():
        torch.testing.assert_close(torch.cat([block[name] for block in blocks]), expected, atol=1e-5, rtol=0)


def test_a_block_has_at_least_so_many_rows_whatever_the_budget() -> None:
    seen: list[int] = []

    class Watched(OutputHead):
        def logits(self, hidden: torch.Tensor) -> torch.Tensor:
            seen.append(len(hidden))
            return OutputHead.logits(self, hidden)

    list(reduce_rows(_rows(40), PayloadSpec.sampled(), Watched(torch.randn(50, 8), None, 1.0, 0.0), 1, least_rows=16))
    assert seen == [16, 16, 16]


def test_logits_of_one_block_stay_within_the_byte_budget() -> None:
    seen: list[int] = []

    class Watched(OutputHead):
        def logits(self, hidden: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
            seen.append(hidden.shape[0] * 50 * 4)
            return OutputHead.logits(self, hidden, out)

    list(reduce_rows(_rows(40), PayloadSpec.sampled(), Watched(torch.randn(50, 8), None, 1.0, 0.0), 4000))
    assert max(seen) <= 4000 and sum(seen) == 40 * 50 * 4
