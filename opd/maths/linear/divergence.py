"""`linear_divergence`: exact divergences between models given by hidden states and heads, without logits [N, V].

    loss = linear_divergence(student_hidden, model.lm_head.weight, teacher_hidden, teacher_head, kind="reverse_kl").mean

For payload `hidden`, and for any divergence over a large vocabulary: exact at any mixture weight and temperature, with
scratch memory that does not depend on N (`opd.maths.linear.tiles` describes the scheme).
"""

import os

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from opd.heads import OutputHead
from opd.maths.checks import (
    check_finite,
    check_integer,
    check_mask,
    check_projection,
    check_shape,
    check_temperature,
    describe,
    should_check_values,
)
from opd.maths.diagnostics import TOPK_FIGURES
from opd.maths.linear.inputs import Reference, check_matrix, check_models, check_scratch
from opd.maths.linear.op import linear_divergence_op
from opd.maths.pointwise import divergence_spec
from opd.maths.result import Divergence
from opd.maths.rows import Statistic


def linear_divergence(
    student_hidden: Float[Tensor, "N Hs"],
    student_head: OutputHead | Float[Tensor, "Vs Hs"],
    teacher_hidden: Float[Tensor, "N Ht"],
    teacher_head: OutputHead | Float[Tensor, "Vt Ht"],
    *,
    kind: str = "reverse_kl",
    weight: float | None = None,
    normalised: bool = False,
    temperature: float = 1.0,
    reference: Reference | None = None,
    vocab_size: int | None = None,
    mask: Bool[Tensor, " N"] | None = None,
    token_weights: Float[Tensor, " N"] | None = None,
    recompute: bool = False,
    topk: int | None = None,
    scratch_bytes: int | None = None,
    backend: str | None = None,
    check_values: bool | None = None,
) -> Divergence:
    """Divergence per token between two models given by hidden states and heads, with gradients to the student's.

    Args:
        student_hidden: [N, Hs] after the final norm, carries the gradient.
        student_head: the head, or its weight [Vs, Hs] alone. Weight and bias carry gradients. The weight may be tied to
            the embedding, or a DTensor, which is gathered once.
        teacher_hidden: [N, Ht] after the final norm, detached; Ht may differ from Hs.
        teacher_head: the teacher's head, or its weight [Vt, Ht] alone; detached.
        kind: "forward_kl" KL(T || S), "reverse_kl" KL(S || T), "jsd", "skew_forward_kl", "skew_reverse_kl" or
            "total_variation".
        weight: beta of jsd, alpha of a skewed KL.
        normalised: divide jsd by beta (1 - beta).
        temperature: divides the logits of both sides, after logit scale and soft-cap.
        reference: a reference model that adjusts the target (G-OPD).
        vocab_size: number of ids that count; rows of a head beyond it are padding. None takes that of the smaller head.
        mask: [N] bool, True where a token counts. Masked rows are dropped before the projection, for which an
            accelerator has to be waited for once; pass only the rows that count to avoid that.
        token_weights: [N] weight of each token in `total`, for example one over a global count; None for ones.
        recompute: keep no gradients from the forward pass. Takes half as much compute again, but makes `per_token`
            differentiable with any weights, any number of times.
        topk: also report overlap, covered mass and tails of both models' top k, from the logits of the same tiles.
            None, for no such figures, is faster.
        scratch_bytes: bound on the logit tiles, which hold at least one token; None for 1 GiB on a GPU and 128 MiB on
            CPU.
        backend: "torch", "triton" (float32 tiles only), or None for triton where it can run.
        check_values: whether to refuse rows that are not finite; by default on CPU only.

    Returns:
        `total` is the weighted sum and `mean` that sum over the number of tokens: differentiate either. `per_token` is
        detached unless `recompute` is set. Both entropies are given. With `topk`, the diagnostics have the names of
        `opd.maths.diagnostics.TOPK_FIGURES`, as `topk_figures` defines them.

    Raises:
        ValueError: if a shape, a dtype or a setting is not valid.
    """
    spec = divergence_spec(kind, weight=weight, normalised=normalised)
    check_temperature(temperature)
    check_matrix("student_hidden", student_hidden)
    tokens = len(student_hidden)
    check_mask("mask", mask, (tokens,), "student_hidden")
    models = [
        ("student", student_hidden, OutputHead.of(student_head)),
        ("teacher", teacher_hidden, OutputHead.of(teacher_head)),
    ]
    if reference is not None:
        models.append(("reference", reference.hidden, OutputHead.of(reference.head)))
    limit = check_models(models, reference, tokens, vocab_size)
    check_scratch(scratch_bytes)
    if topk is not None:
        check_integer("topk", topk, 1, limit, "the vocabulary")
    weights = _token_weights(token_weights, student_hidden, mask, check_values)
    chosen = None if mask is None else mask.nonzero().squeeze(-1)
    # Selected first: the weight of a masked row may be anything and must not affect the unit of the others.
    weights, unit = _in_range_of(student_hidden.dtype, weights if chosen is None else weights[chosen])
    tensors, wanted = _operands(models, limit, chosen)
    total, statistics, *_, figures = linear_divergence_op(
        *tensors,
        weights,
        spec.kind.value,
        spec.weight,
        spec.scale,
        temperature,
        1.0 if reference is None else reference.power,
        [head.scale for _, _, head in models],
        [head.soft_cap for _, _, head in models],
        wanted,
        recompute,
        scratch_bytes or 0,
        _checked_backend(backend, student_hidden),
        topk or 0,
    )
    # A row that is not finite shows in its log-normaliser, which is computed anyway.
    if should_check_values(student_hidden, check_values):
        check_projection("student_hidden", student_hidden, statistics[Statistic.STUDENT_LOG_Z].detach(), chosen)
        check_projection("teacher_hidden", teacher_hidden, statistics[Statistic.TEACHER_LOG_Z].detach(), chosen)
    return _result(
        total if unit is None else total * unit,
        statistics if recompute else statistics.detach(),
        figures,
        tokens,
        chosen,
    )


def default_backend(tensor: Tensor) -> str:
    """The kernel to use by default: "triton" on CUDA where installed, except for float64 tensors; else "torch"."""
    # The Triton kernels compute in float32, too little for float64 hidden states.
    if not tensor.is_cuda or tensor.dtype == torch.float64:
        return "torch"
    try:
        import triton  # noqa: F401
    except ImportError:
        return "torch"
    return "triton"


def _checked_backend(backend: str | None, tensor: Tensor) -> str:
    if backend not in (None, "torch", "triton"):
        raise ValueError(f"backend must be one of torch, triton or None, but is {backend!r}.")
    runs = tensor.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"
    if backend == "triton" and (tensor.dtype == torch.float64 or not runs):
        raise ValueError(
            f"backend 'triton' needs CUDA tensors below float64, but {describe('student_hidden', tensor)} is on "
            f"{tensor.device}; use 'torch'."
        )
    return backend or default_backend(tensor)


def _operands(
    models: list[tuple[str, Tensor, OutputHead]], limit: int, chosen: Tensor | None
) -> tuple[list[Tensor | None], list[bool]]:
    """Hidden states, weight and bias of student, teacher and reference, and which of the student's need a gradient."""
    tensors: list[Tensor | None] = []
    for name, hidden, head in models:
        tensors += prepared(hidden, head, limit, chosen, detach=name != "student")
    # The operator's schema is fixed: without a reference, its three arguments are None.
    tensors += [None] * (9 - len(tensors))
    wanted = [tensor is not None and tensor.requires_grad and torch.is_grad_enabled() for tensor in tensors[:3]]
    return tensors, wanted


def _result(total: Tensor, statistics: Tensor, figures: Tensor, tokens: int, chosen: Tensor | None) -> Divergence:
    counted = statistics.shape[1]
    if chosen is not None:
        # Scatter to the positions of all rows; those that were dropped get 0.
        statistics = statistics.new_zeros(len(Statistic), tokens).index_copy(1, chosen, statistics)
        figures = figures.new_zeros(len(figures), tokens).index_copy(1, chosen, figures)
    return Divergence(
        per_token=statistics[Statistic.VALUE],
        total=total,
        count=torch.full((), counted, dtype=torch.int64, device=total.device),
        mean=total / max(counted, 1),
        student_entropy=statistics[Statistic.STUDENT_ENTROPY].detach(),
        teacher_entropy=statistics[Statistic.TEACHER_ENTROPY].detach(),
        diagnostics=dict(zip(TOPK_FIGURES, figures, strict=True)) if len(figures) else {},
    )


def prepared(
    hidden: Tensor, head: OutputHead, limit: int, chosen: Tensor | None = None, *, detach: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Hidden states, weight and bias as the operator takes them: gathered, cast, cut to the vocabulary and the rows."""
    weight, bias = gathered(head.weight), None if head.bias is None else gathered(head.bias)
    if detach:
        hidden, weight, bias = hidden.detach(), weight.detach(), None if bias is None else bias.detach()
    if chosen is not None:
        hidden = hidden.index_select(0, chosen)
    # The operator is opaque to autocast, so the operands are cast here as autocast would cast those of a linear layer.
    # Like autocast, this leaves float64 alone.
    kind = hidden.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else hidden.dtype
    if hidden.dtype == torch.float64:
        dtype = torch.float64
    if limit < len(weight):  # the backward pass of a slice allocates a whole head, so slice only where it is needed
        weight, bias = weight[:limit], None if bias is None else bias[:limit]
    return hidden.to(dtype), weight.to(dtype), bias


def gathered(tensor: Tensor) -> Tensor:
    """A DTensor as a full tensor, whose gradient is averaged back over the shards as FSDP2 does; others unchanged.

    `Partial("avg")` declares each rank's gradient to be its contribution to a mean. By default it would be taken for a
    replicated gradient, and only one rank's would be kept.
    """
    if not hasattr(tensor, "full_tensor"):
        return tensor
    from torch.distributed.tensor import DTensor, Partial

    if not isinstance(tensor, DTensor):
        return tensor
    return tensor.full_tensor(grad_placements=[Partial("avg")] * tensor.device_mesh.ndim)


def _in_range_of(dtype: torch.dtype, weights: Float[Tensor, " N"]) -> tuple[Float[Tensor, " N"], Tensor | None]:
    """For float16, whose gradients would underflow with small weights: weights of order one, and the factor taken out.

    The factor is a power of two, so dividing and later multiplying by it are exact. None if the dtype does not need it.
    """
    if dtype != torch.float16 or not len(weights):
        return weights, None
    exponent = torch.frexp(weights.abs().amax()).exponent
    return torch.ldexp(weights, -exponent), torch.ldexp(torch.ones_like(weights[0]), exponent)


def _token_weights(
    given: Tensor | None, student_hidden: Tensor, mask: Tensor | None, check_values: bool | None
) -> Float[Tensor, " N"]:
    """The weight of each token, in the accumulator's dtype."""
    dtype = torch.float64 if student_hidden.dtype == torch.float64 else torch.float32
    if given is None:
        return torch.ones(len(student_hidden), dtype=dtype, device=student_hidden.device)
    check_shape("token_weights", given, (len(student_hidden),), "student_hidden")
    check_finite("token_weights", given, mask, check_values)
    return given.detach().to(dtype)
