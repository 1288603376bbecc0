"""The expected embedding of a model's next token, without logits [N, V]."""

import torch
from jaxtyping import Float
from torch import Tensor

from opd.heads import OutputHead, vocabulary_steps
from opd.maths.checks import check_projection, check_temperature, should_check_values
from opd.maths.linear.divergence import prepared
from opd.maths.linear.inputs import check_hidden_and_head, check_scratch
from opd.maths.linear.project import Projection, scratch_of, tiles_of


@torch.no_grad()
def expected_embedding(
    hidden: Float[Tensor, "N H"],
    head: OutputHead | Float[Tensor, "V H"],
    *,
    temperature: float = 1.0,
    vocab_size: int | None = None,
    scratch_bytes: int | None = None,
    check_values: bool | None = None,
) -> Float[Tensor, "N H"]:
    """The mean of the head's rows under the model's own distribution, sum_v p_v head_v; no gradient.

    For a sampled token y, head[y] minus this mean is the gradient of log p(y) with respect to the hidden state, up to
    logit scale, soft-cap and temperature. G2RL compares this feature between responses.

    Args:
        hidden: [N, H] after the final norm.
        head: the head, or its weight [V, H] alone.
        temperature: divides the logits, above 0.
        vocab_size: number of ids that count; rows of the head beyond it are padding. None for all rows.
        scratch_bytes: bound on the logit tile; None for 1 GiB on a GPU and 128 MiB on CPU.
        check_values: whether to refuse rows that are not finite; by default on CPU only.

    Returns:
        [N, H] float32; float64 for float64 hidden states.

    Raises:
        ValueError: if a shape, a dtype or a setting is not valid.
    """
    head = OutputHead.of(head)
    check_temperature(temperature)
    limit = check_hidden_and_head(hidden, head, vocab_size)
    check_scratch(scratch_bytes)
    check = should_check_values(hidden, check_values)
    hidden, weight, bias = prepared(hidden, head, limit, detach=True)
    model = Projection(hidden, OutputHead(weight, bias, head.scale, head.soft_cap))
    found = torch.zeros(hidden.shape, dtype=model.dtype, device=hidden.device)
    with torch.autocast(hidden.device.type, enabled=False):
        for tile, (logits,) in tiles_of(model, 1, scratch_of(model, scratch_bytes)):
            model.write(tile, logits)
            if check:
                check_projection("hidden", hidden, logits.logsumexp(-1), torch.arange(tile.start, tile.stop))
            probability = logits.div_(temperature).softmax(-1)
            for step in vocabulary_steps(limit):  # in steps, so that a half-precision head is never widened as a whole
                found[tile].addmm_(probability[:, step], weight[step].to(model.dtype))
    return found
