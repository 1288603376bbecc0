"""Gradient probes: segments add up, cutting is exact, sketches keep inner products."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rows import make_row
from thread_ranks import SOURCE, of_each

from student.data.costs import Costs
from student.data.plan import plan_step
from student.data.row import Row
from student.methods.windows.gradient_metric import GradientMetric, gram
from student.methods.windows.probe import Prober, _segment_vector, _weights, cut_row, split_folds
from student.model.ranks import Ranks

TERM = {"name": "opd", "payload": "hidden", "aggregation": "constant"}
FULL = GradientMetric()


SEGMENTS = [(0, 3), (3, 7), (7, 12)]


def vectors(bench: Any, rows: list[Any], edges: list[tuple[int, int]], *, random: bool = False) -> list[torch.Tensor]:
    weights = _weights(bench.learner, rows)
    return [_segment_vector(bench.learner, rows, edge, weights, FULL, Costs(), random=random) for edge in edges]


def gradient(made: Any, rows: list[Any], **keywords: Any) -> torch.Tensor:
    made.gradient(rows, **keywords)
    return FULL.vector(made.learner.named_parameters())


def inside(start: int, end: int) -> Callable[[Any], torch.Tensor]:
    return lambda micro: (micro.position >= start) & (micro.position < end)


@pytest.mark.parametrize("term", [TERM, {**TERM, "payload": "gather", "k": 4}, {**TERM, "payload": "sampled"}])
@pytest.mark.parametrize("random", [False, True])
def test_segments_add_up_to_the_whole(bench: Callable[..., Any], term: dict[str, Any], random: bool) -> None:
    made = bench(term)
    rows = made.rows()
    parts = vectors(made, rows, SEGMENTS, random=random)
    torch.testing.assert_close(sum(parts), gradient(made, rows), rtol=1e-4, atol=1e-6)
    assert all(part.norm() > 0 for part in parts)


def test_a_segment_is_the_gradient_of_its_positions_alone(bench: Callable[..., Any]) -> None:
    made = bench(TERM)
    rows = made.rows()
    (found,) = vectors(made, rows, [(2, 5)])
    expected = gradient(made, rows, select=inside(2, 5))
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-7)


@pytest.mark.parametrize("which", [min, max])
def test_rows_that_no_or_not_every_term_learns_from_scale_no_segment(bench: Callable[..., Any], which: Any) -> None:
    made = bench(TERM, {**TERM, "name": "reference_kl", "payload": "gather", "k": 4})
    rows = made.rows()
    broken = which(rows, key=lambda row: row.length)  # an episode that broke: kept, and not trained on
    broken.loss_mask[:] = broken.trained = False
    next(row for row in rows if row.trained).unread = frozenset({"reference"})
    for (start, end), found in zip(SEGMENTS, vectors(made, rows, SEGMENTS), strict=True):
        expected = gradient(made, rows, select=inside(start, end))
        torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


def test_a_cut_row_loses_its_tail_everywhere(bench: Callable[..., Any]) -> None:
    row = max(bench({"name": "opd", "k": 4}).rows(), key=lambda r: r.length)
    short = cut_row(row, 3)
    assert short.length == 3 and short.truncated and short.candidates is not None
    assert len(short.candidates) == len(short.loss_mask) == len(short.behaviour_logp) == 3
    for scores in short.signals.values():
        assert scores.values is not None and len(scores.values) == 3
    assert row.length > 3 and cut_row(row, 99) is row


def test_folds_keep_the_samples_of_a_prompt_together(bench: Callable[..., Any]) -> None:
    rows = bench(TERM).rows(samples=3)
    folds = split_folds(rows, 2)
    uids = [{row.key.uid for row in fold} for fold in folds]
    assert not uids[0] & uids[1] and sum(map(len, folds)) == len(rows)
    assert abs(len(folds[0]) - len(folds[1])) <= 3


def _tensors(count: int, generator: torch.Generator) -> list[tuple[str, torch.Tensor]]:
    named = []
    for i in range(count):
        tensor = torch.zeros(50, 40)
        tensor.grad = torch.randn(50, 40, generator=generator)
        named.append((f"model.layers.{i}.w", tensor))
    return named


def test_a_sketch_keeps_inner_products_on_average() -> None:
    generator = torch.Generator().manual_seed(0)
    one, other = _tensors(3, generator), _tensors(3, generator)
    for (_, a), (_, b) in zip(one, other, strict=True):
        assert a.grad is not None and b.grad is not None
        b.grad += a.grad
    exact = float(FULL.vector(one) @ FULL.vector(other))
    found = torch.tensor(
        [float(m.vector(one) @ m.vector(other)) for m in (GradientMetric("sketch", 256, seed=s) for s in range(60))]
    )
    scale = float(FULL.vector(one).norm() * FULL.vector(other).norm())
    assert float(found.mean()) == pytest.approx(exact, abs=4 * float(found.std()) / 60**0.5)
    assert float(found.std()) < scale * (2 / 256) ** 0.5 * 1.3


def test_last_layers_are_the_last_ones() -> None:
    named = _tensors(4, torch.Generator().manual_seed(0))
    expected = torch.cat([p.grad.flatten() for _, p in named[2:] if p.grad is not None])
    torch.testing.assert_close(GradientMetric("last_layers", layers=2).vector(named), expected)
    with pytest.raises(ValueError, match="metric full or sketch"):
        GradientMetric("last_layers").vector([("weight", torch.zeros(2))])


def test_gram_is_the_matrix_of_inner_products() -> None:
    data = torch.randn(5, 1000, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(gram(data), data.double() @ data.double().T)


def test_a_rank_without_prompts_samples_as_often_as_the_others() -> None:
    plan = plan_step(0, SOURCE.prompts("train", 1), samples=2, max_new_tokens=2, temperature=1.0)

    def work(ranks: Ranks) -> int:
        def sample(planned: Any, **_: Any) -> list[Row]:
            ranks.meet()  # a sharded student's weights are gathered
            return [make_row(prompt=one.prompt) for one in planned]

        bench: Any = SimpleNamespace(
            learner=SimpleNamespace(ranks=ranks),
            sampler=SimpleNamespace(sample=sample),
            scorer=SimpleNamespace(wait=lambda rows, poll: None),
            poll=lambda: None,
            closing=lambda close: None,
        )
        prober = Prober(bench)
        return len(ranks.agree(lambda: prober._scored(bench.learner, plan.shard(ranks.index, ranks.count))))

    assert of_each(work, count=2) == [2, 0]
