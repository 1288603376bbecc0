"""Quantities to monitor during distillation, from numbers that the loss has computed anyway: per token and detached.

In a healthy run the top-k overlap rises, the reverse KL falls at every position, both tails stay small, and the
student's entropy stays above the teacher's (arXiv 2604.13016, 2604.08527). Accumulate sums and counts over ranks and
steps and divide at the end; a mean of means would weight tokens unequally.

What each payload allows:

    hidden, full   everything: `linear_divergence(topk=k)` in the same pass, `topk_figures` on logits
    topk           overlap with the student's own candidates (`topk_overlap`); masses and tails of the teacher's top k
    gather         masses and tails of the student's top k; no overlap, because the teacher's top k is not sent
    sampled        the log-ratio alone
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from opd.maths.blocks import accumulator_dtype, flat_rows, row_blocks
from opd.maths.checks import (
    check_integer,
    check_last_axis,
    check_log_probs,
    check_logits,
    check_mask,
    check_shape,
    check_temperature,
    describe,
)
from opd.maths.pointwise import Kind, Spec, term_and_slope

#: The rows that `topk_rows` returns. "Head" and "tail" refer to the student's top k, the ids that payload gather
#: scores.
TOPK_FIGURES = (
    "topk_overlap",
    "student_head_mass",
    "teacher_head_mass",
    "student_tail_mass",
    "teacher_tail_mass",
    "student_mass_on_teacher_topk",
    "teacher_mass_on_teacher_topk",
)


def topk_overlap(student_ids: Int[Tensor, "*N K"], teacher_ids: Int[Tensor, "*N M"]) -> Float[Tensor, "*N"]:
    """Share of the student's K ids that are among the teacher's M ids, per position, in [0, 1]; 0 if K is 0.

    Args:
        student_ids: [..., K] distinct within a position.
        teacher_ids: [..., M] distinct within a position.

    Raises:
        ValueError: when the leading axes differ or ids are not integers.
    """
    for name, ids in (("student_ids", student_ids), ("teacher_ids", teacher_ids)):
        if ids.is_floating_point() or ids.is_complex() or not ids.ndim:
            raise ValueError(f"{describe(name, ids)} must be integers [..., K].")
    check_last_axis("teacher_ids", teacher_ids, tuple(student_ids.shape[:-1]), "student_ids")
    both = (student_ids.unsqueeze(-1) == teacher_ids.unsqueeze(-2)).any(-1)
    # The mean over zero ids would be NaN.
    return both.float().mean(-1) if both.shape[-1] else both.float().sum(-1)


def support_figures(
    student_log_probs: Float[Tensor, "*N K"],
    student_log_tail: Float[Tensor, "*N"],
    teacher_log_probs: Float[Tensor, "*N K"],
    teacher_log_tail: Float[Tensor, "*N"],
) -> dict[str, Float[Tensor, "*N"]]:
    """How much of either model K ids cover, and the KL in both directions between the K + 1 buckets they define.

    The buckets are the K ids and everything else, so both KLs are lower bounds of those over the full vocabulary.

    Args:
        student_log_probs: [..., K] at the ids, as in `TokenScores.candidates`.
        student_log_tail: [...] log mass outside them.
        teacher_log_probs: [..., K] at the same ids.
        teacher_log_tail: [...] log mass outside them.

    Returns:
        The masses that `head_and_tail_masses` returns, and bucket_reverse_kl = KL(S || T) and bucket_forward_kl = KL(T
        || S) in nats. All detached.

    Raises:
        ValueError: if shapes disagree or dtypes are not floating point.
    """
    leading = tuple(student_log_tail.shape)
    check_last_axis("student_log_probs", student_log_probs, leading, "student_log_tail")
    check_shape("teacher_log_probs", teacher_log_probs, tuple(student_log_probs.shape), "student_log_probs")
    check_shape("teacher_log_tail", teacher_log_tail, leading, "student_log_tail")
    for name, values in (("student_log_probs", student_log_probs), ("teacher_log_probs", teacher_log_probs)):
        # Dtypes only: looking at the values would make an accelerator wait, for a diagnostic.
        check_log_probs(name, values, None, False)
    student = torch.cat([student_log_probs, student_log_tail.unsqueeze(-1)], -1).detach()
    teacher = torch.cat([teacher_log_probs, teacher_log_tail.unsqueeze(-1)], -1).detach().to(student.dtype)
    return {
        **head_and_tail_masses(student[..., :-1], student[..., -1], teacher[..., :-1], teacher[..., -1]),
        "bucket_reverse_kl": term_and_slope(Spec(Kind.REVERSE_KL), student, teacher)[0].sum(-1),
        "bucket_forward_kl": term_and_slope(Spec(Kind.FORWARD_KL), student, teacher)[0].sum(-1),
    }


def head_and_tail_masses(
    student_log_probs: Float[Tensor, "*N K"],
    student_log_tail: Float[Tensor, "*N"],
    teacher_log_probs: Float[Tensor, "*N K"],
    teacher_log_tail: Float[Tensor, "*N"] | None,
) -> dict[str, Float[Tensor, "*N"]]:
    """Mass of both models on the candidates and outside them: the diagnostics of every estimator with K candidates.

    Args:
        student_log_probs: [..., K] at the candidates, as in `TokenScores.candidates`.
        student_log_tail: [...].
        teacher_log_probs: [..., K] at the same ids.
        teacher_log_tail: [...], or None where the payload has none.

    Returns:
        student_head_mass, teacher_head_mass, student_tail_mass and, with a tail, teacher_tail_mass, in [0, 1].
    """
    figures = {
        "student_head_mass": student_log_probs.exp().sum(-1),
        "teacher_head_mass": teacher_log_probs.exp().sum(-1),
        "student_tail_mass": student_log_tail.exp(),
    }
    return figures if teacher_log_tail is None else figures | {"teacher_tail_mass": teacher_log_tail.exp()}


def topk_figures(
    student_logits: Float[Tensor, "*N V"],
    teacher_logits: Float[Tensor, "*N V"],
    k: int,
    *,
    temperature: float = 1.0,
    mask: Bool[Tensor, "*N"] | None = None,
) -> dict[str, Float[Tensor, "*N"]]:
    """Overlap of the two models' top k, and the mass of both models on either top k: exact, from logits.

    Args:
        student_logits: [..., V].
        teacher_logits: [..., V].
        k: 1 to V.
        temperature: divides both sides' logits, above 0.
        mask: [...] bool, True where a position counts; 0 elsewhere.

    Returns:
        Per position, in [0, 1], under the names of `TOPK_FIGURES`: topk_overlap, the share of the student's top k that
        is in the teacher's; student_head_mass and teacher_head_mass on the student's top k, student_tail_mass and
        teacher_tail_mass outside it; student_mass_on_teacher_topk and teacher_mass_on_teacher_topk.

    Raises:
        ValueError: if a shape, a dtype, k or the temperature is not valid.
    """
    check_logits("student_logits", student_logits)
    check_logits("teacher_logits", teacher_logits)
    check_shape("teacher_logits", teacher_logits, tuple(student_logits.shape), "student_logits")
    leading, vocabulary = student_logits.shape[:-1], student_logits.shape[-1]
    check_integer("k", k, 1, vocabulary, "the vocabulary")
    check_temperature(temperature)
    check_mask("mask", mask, tuple(leading), "the leading axes of student_logits")
    ours, theirs = flat_rows(student_logits.detach()), flat_rows(teacher_logits.detach())
    dtype = accumulator_dtype(ours, theirs)
    found = torch.empty(len(TOPK_FIGURES), len(ours), dtype=dtype, device=ours.device)
    for block in row_blocks(ours):
        found[:, block] = topk_rows(ours[block].to(dtype), theirs[block].to(dtype), k, temperature)
    if mask is not None:
        found = torch.where(mask.reshape(-1), found, torch.zeros_like(found))
    return {name: row.reshape(leading) for name, row in zip(TOPK_FIGURES, found, strict=True)}


def topk_rows(
    student: Float[Tensor, "n V"], teacher: Float[Tensor, "n V"], k: int, temperature: float
) -> Float[Tensor, "7 n"]:
    """`TOPK_FIGURES` of a few rows of logits, which are not modified."""
    log_p, log_q = (logits / temperature for logits in (student, teacher))
    log_p -= log_p.logsumexp(-1, keepdim=True)
    log_q -= log_q.logsumexp(-1, keepdim=True)
    ours, theirs = log_p.topk(k).indices, log_q.topk(k).indices
    in_ours = torch.zeros_like(log_p, dtype=torch.bool).scatter_(1, ours, True)
    on_theirs = [log.gather(1, theirs).exp().sum(-1) for log in (log_p, log_q)]
    on_ours = [log.gather(1, ours).exp().sum(-1) for log in (log_p, log_q)]
    # Last, because it overwrites the log-probs. Summed over the complement: 1 - mass would be nothing but rounding
    # error where the tail is tiny.
    outside = [log.masked_fill_(in_ours, -torch.inf).exp_().sum(-1) for log in (log_p, log_q)]
    overlap = in_ours.gather(1, theirs).to(log_p.dtype).mean(-1)
    return torch.stack([overlap, *on_ours, *outside, *on_theirs])


POSITION_EDGES = (0, 16, 64, 256, 1024, 4096, 16384)
"""First position of each default bin: narrow bins where responses begin, and few enough to plot."""


@dataclass(frozen=True, slots=True, eq=False)
class PositionProfile:
    """Sums of a per-token quantity by position in the response. Add the profiles of ranks and steps, then take `mean`.

    Attributes:
        total: [bins] sums.
        count: [bins] number of tokens.
        edges: first position of each bin; the last bin takes all later positions.
    """

    total: Float[Tensor, " bins"]
    count: Float[Tensor, " bins"]
    edges: tuple[int, ...]

    @property
    def mean(self) -> Float[Tensor, " bins"]:
        """Mean per bin; 0 where a bin is empty."""
        return self.total / self.count.clamp(min=1)

    def __add__(self, other: "PositionProfile") -> "PositionProfile":
        if self.edges != other.edges:
            raise ValueError(f"edges of profiles must agree to add them, but are {self.edges} and {other.edges}.")
        return PositionProfile(self.total + other.total, self.count + other.count, self.edges)


def position_profile(
    per_token: Float[Tensor, " N"],
    position: Int[Tensor, " N"],
    *,
    edges: Sequence[int] = POSITION_EDGES,
    mask: Bool[Tensor, " N"] | None = None,
) -> PositionProfile:
    """Sums a per-token quantity, for example the reverse KL, by the token's position in its response.

    Args:
        per_token: [N].
        position: [N] index in the response, from 0; negative indices count as 0.
        edges: first position of each bin, ascending from 0.
        mask: [N] bool, True where a token counts.

    Raises:
        ValueError: for shapes that differ or are not [N], positions that are not integers, or edges that do not
            ascend from 0.
    """
    if not edges or edges[0] != 0 or any(a >= b for a, b in pairwise(edges)):
        raise ValueError(f"edges must ascend from 0, but are {tuple(edges)!r}.")
    if per_token.ndim != 1:
        raise ValueError(f"{describe('per_token', per_token)} must have shape [N]; flatten it.")
    check_shape("position", position, tuple(per_token.shape), "per_token")
    check_mask("mask", mask, tuple(per_token.shape), "per_token")
    if position.is_floating_point():
        raise ValueError(f"{describe('position', position)} must be integers; cast it with .long().")
    # right=True: a position that equals an edge belongs to the bin that starts there.
    index = (
        torch.bucketize(position.long(), torch.tensor(edges, device=position.device), right=True).sub(1).clamp(min=0)
    )
    values = per_token.detach().float()
    counted = torch.ones_like(values)
    if mask is not None:
        # `where`, not a product: masked entries may hold NaN.
        values, counted = torch.where(mask, values, 0.0), mask.float()
    empty = torch.zeros(len(edges), device=values.device)
    return PositionProfile(empty.scatter_add(0, index, values), empty.scatter_add(0, index, counted), tuple(edges))
