"""How the losses of a term's tokens are averaged: which tokens form a sequence, a prompt or a stratum.

    token_mean      every trained token of the update weighs the same
    sequence_mean   every response weighs the same, its tokens sharing                       (GRPO's paper)
    prompt_mean     every prompt weighs the same, the tokens of its responses sharing        (ScaleRL)
    turn_mean       every turn of every episode weighs the same, its tokens sharing          (TurnOPD)
    constant        sum over tokens, divided by responses times the length limit             (Dr. GRPO)
    balanced        token mean within each stratum, strata weighted by their responses       (arXiv 2605.04077)

An episode of several rows counts as one response. `opd.maths.token_weights` does the division itself, over all rows of
an update on all ranks.
"""

from collections.abc import Hashable, Iterable, Sequence

import numpy as np
import torch
from jaxtyping import Bool, Float, Int
from numpy.typing import NDArray
from torch import Tensor

from opd import maths
from student.data.row import Row
from student.plugin.terms import Term

_MODES = {
    "token_mean": "token_mean",
    "sequence_mean": "sequence_mean",
    "prompt_mean": "sequence_mean",  # of sequences that are prompts
    "turn_mean": "sequence_mean",  # of sequences that are turns
    "constant": "sequence_sum",
    "balanced": "balanced",
}


def position_weights(
    terms: Sequence[Term], strata: Sequence[Sequence[str]], rows: Sequence[Row], length_limit: int, device: torch.device
) -> list[Float[Tensor, " N"]]:
    """For each term, the weight [N] of every response position, row after row; 0 where the term does not train.

    Args:
        terms: the terms, the same on every rank.
        strata: for each term, the strata that occur on any rank; a rank numbers even those that it has no row of.
        rows: this rank's rows of an update; may be empty.
        length_limit: response tokens per row that `constant` divides by.
        device: where the weights go.

    Returns:
        Float32, scaled so that gradients averaged over ranks are those of the whole update.
    """
    # Dtypes are explicit, because a rank without rows has nothing to infer them from.
    lengths = torch.tensor([row.length for row in rows], dtype=torch.long, device=device)
    place = torch.arange(len(rows), device=device).repeat_interleave(lengths)
    trained = torch.from_numpy(np.concatenate([np.zeros(0, np.bool_), *(row.loss_mask for row in rows)])).to(device)
    factor = torch.tensor([row.weight for row in rows], dtype=torch.float32, device=device)[place]

    def spread(values: Sequence[int]) -> Int[Tensor, " N"]:
        return torch.tensor(values, dtype=torch.long, device=device)[place]

    parts = {}
    for index, (term, labels_anywhere) in enumerate(zip(terms, strata, strict=True)):
        mode = term.settings.aggregation
        of_token, count = None, 0
        if mode == "turn_mean":
            turns, count = turn_numbers(rows)
            of_token = torch.from_numpy(turns).to(device)
        elif mode != "token_mean":
            sequences = _numbered(_sequences(rows, whole_prompts=mode == "prompt_mean"))
            of_token, count = spread(sequences), len(set(sequences))
        labels = [term.stratum(row) for row in rows] if mode == "balanced" else []
        # The same order on all ranks, because `token_weights` sums counts over ranks by index.
        every = sorted({*labels_anywhere, *labels})
        parts[str(index)] = maths.LossWeights(
            mask=trained & spread([term.selects(row) for row in rows]).bool() & positions_of(term, rows).to(device),
            mode=_MODES[mode],
            sequence=of_token,
            num_sequences=count,
            stratum=spread([every.index(label) for label in labels]) if mode == "balanced" else None,
            num_strata=max(1, len(every)) if mode == "balanced" else 1,
            length=length_limit if mode == "constant" else 1,
        )
    # All terms in one call, so that a single reduction over ranks carries all counts.
    weights = maths.token_weights(parts)
    # A row's own weight is applied after the division: it scales the row's gradient, not the denominator.
    return [weights[str(index)] * factor for index in range(len(terms))]


def positions_of(term: Term, rows: Sequence[Row]) -> Bool[Tensor, " N"]:
    """[N] bool, the positions of `rows`, row after row, that `TermSettings.within_turns` leaves to the term."""
    if term.settings.first_turns is None:
        return torch.ones(sum(row.length for row in rows), dtype=torch.bool)
    return torch.from_numpy(np.concatenate([np.zeros(0, np.bool_), *(term.settings.within_turns(row) for row in rows)]))


def turn_numbers(rows: Sequence[Row]) -> tuple[NDArray[np.int64], int]:
    """The turn of each position [N], numbered through all rows, and the number of turns.

    Tokens between two turns belong to the earlier one, tokens before the first turn to the first. A row without turns
    is one turn.
    """
    numbers, first = [np.zeros(0, np.int64)], 0
    for row in rows:
        starts = [start for start, _ in row.turns][1:]  # without the first, so that tokens before it belong to it
        numbers.append(first + np.searchsorted(starts, np.arange(row.length), side="right"))
        first += len(starts) + 1
    return np.concatenate(numbers), first


def _sequences(rows: Sequence[Row], *, whole_prompts: bool) -> list[Hashable]:
    """The sequence that each row belongs to; a row that occurs twice, as a replayed row may, counts twice."""
    if whole_prompts:
        return [(row.key.step, row.key.uid) for row in rows]
    seen: dict[Hashable, int] = {}
    sequences: list[Hashable] = []
    for row in rows:
        seen[row.key] = copy = seen.get(row.key, -1) + 1
        sequences.append((row.key.rollout, copy))
    return sequences


def _numbered(labels: Iterable[Hashable]) -> list[int]:
    """Number the labels from 0 in the order of first occurrence."""
    numbers: dict[Hashable, int] = {}
    return [numbers.setdefault(label, len(numbers)) for label in labels]
