"""The embedding that a model expects of its next token, without logits of size N x V."""

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
    """Mean of the head's rows under the model's own distribution: sum_v p_v head_v; no gradient.

    With y the token drawn, head[y] minus it is the gradient of log p(y) with respect to the hidden state, up to scale,
    soft-cap and temperature: the feature that G2RL compares between responses.

    Args:
        hidden: [N, H] after the final norm.
        head: the head, or its weight [V, H] alone.
        temperature: divides the logits, above 0.
        vocab_size: rows of the head beyond it are padding; None for all rows.
        scratch_bytes: bound on the logit tile; 1 GiB on a GPU and 128 MiB on CPU if None.
        check_values: whether to refuse non-finite rows; by default on CPU only.

    Returns:
        float32, float64 for float64 hidden states.

    Raises:
        ValueError: for shapes, dtypes or settings that cannot work.
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
            for step in vocabulary_steps(limit):  # so that a half-precision head is never widened whole
                found[tile].addmm_(probability[:, step], weight[step].to(model.dtype))
    return found
