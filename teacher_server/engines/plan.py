"""Deciding which rows of a batch go through the model together: pure planning, without tensors.

A row of P prompt and T response tokens sends P + T - 1 tokens through the model, since nothing is predicted after the
last. Rows are padded on the right to the longest row of their pass, unless the attention backend packs them. Samples of
one prompt can share the prompt's keys and values. The plan is the cheaper of sharing and not sharing, in tokens through
the model.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

# The cost of one more forward pass, in tokens: with less padding than this, padding is cheaper than another pass.
FORWARD_TOKENS = 256
# Shared keys and values are repeated per row, one layer at a time; rows x tokens stay below this many budgets.
_SHARED_CONTEXT = 8


@dataclass(frozen=True, slots=True)
class Pass:
    """The rows of one forward pass.

    Attributes:
        rows: indices into the batch.
        shared: whether each distinct prompt goes through the model once and the responses continue from it; all prompts
            of such a pass have the same length.
        width: number of tokens that every row is padded to; 0 for the length of the longest row.
    """

    rows: tuple[int, ...]
    shared: bool = False
    width: int = 0


def plan_passes(
    prompts: Sequence[bytes],
    lengths: Sequence[tuple[int, int]],
    *,
    max_tokens: int,
    share: bool,
    packed: bool,
    longest: int | None = None,
) -> list[Pass]:
    """Split a batch into passes.

    Args:
        prompts: the prompt ids of each row as bytes; equal bytes mean equal prompts.
        lengths: (P, T) of each row.
        max_tokens: most tokens in a pass, padding included; a single longer row gets a pass of its own.
        share: whether rows with the same prompt may share its keys and values.
        packed: whether rows are laid end to end without padding.
        longest: number of tokens beyond which a row gets a pass of its own; None for no such limit.

    Returns:
        Passes that contain every row exactly once.
    """
    by_prompt_length: dict[int, list[int]] = defaultdict(list)
    plain: list[int] = []
    passes: list[Pass] = []
    for row, (prompt_length, response_length) in enumerate(lengths):
        if longest is not None and prompt_length + response_length - 1 > longest:
            passes.append(Pass((row,)))
        else:
            by_prompt_length[prompt_length].append(row)
    for prompt_length, rows in by_prompt_length.items():
        # If no prompt occurs twice there is nothing to share, and the extra pass of a shared plan would be wasted.
        if not share or len({prompts[row] for row in rows}) == len(rows):
            plain += rows
            continue
        shared = _shared_passes(rows, prompts, lengths, prompt_length, max_tokens)
        alone = _plain_passes(rows, lengths, max_tokens, packed)
        if _shared_cost(shared, prompts, lengths) < sum(_plain_cost(p, lengths, packed) for p in alone):
            passes += shared
        else:
            plain += rows
    return passes + _plain_passes(plain, lengths, max_tokens, packed)


def settled_width(tokens: int, most: int) -> int:
    """The width that a row of `tokens` tokens is padded to in any batch: a multiple of 16, at most `most`.

    Matrix products over 16 rows or more give each row the same bits however many rows there are; products over fewer do
    not (see `teacher_server.engines.abilities.rows_are_independent`). With coarser steps more rows could share a pass,
    but as much would be lost to padding.
    """
    return max(tokens, min(-(-tokens // 16) * 16, most))


def plan_independent(
    lengths: Sequence[tuple[int, int]], *, max_tokens: int, most: int, turn: int | None = None
) -> list[Pass]:
    """Split a batch into passes of rows of the same settled width, so that a row's width depends on the row alone.

    Args:
        lengths: (P, T) of each row.
        max_tokens: most tokens in a pass, padding included; a single longer row gets a pass of its own.
        most: most tokens that the model takes.
        turn: length beyond which a pass scales its positions, to which no shorter row is padded; None if nowhere.
    """
    by_width: dict[int, list[int]] = defaultdict(list)
    for row, (prompt, response) in enumerate(lengths):
        tokens = prompt + response - 1
        by_width[settled_width(tokens, most if turn is None or tokens > turn else min(turn, most))].append(row)
    passes = []
    for width, rows in sorted(by_width.items(), reverse=True):
        count = max(1, max_tokens // width)
        passes += [Pass(tuple(rows[i : i + count]), width=width) for i in range(0, len(rows), count)]
    return passes


def _plain_passes(rows: Sequence[int], lengths: Sequence[tuple[int, int]], max_tokens: int, packed: bool) -> list[Pass]:
    def width(row: int) -> int:
        return sum(lengths[row]) - 1

    def fits(bucket: list[int], row: int) -> bool:
        if packed:
            return sum(map(width, bucket)) + width(row) <= max_tokens
        return (len(bucket) + 1) * width(bucket[0]) <= max_tokens  # the first row of a bucket is its longest

    return [Pass(tuple(bucket)) for bucket in _buckets(rows, width, fits, packed)]


def _shared_passes(
    rows: Sequence[int], prompts: Sequence[bytes], lengths: Sequence[tuple[int, int]], prompt_length: int, budget: int
) -> list[Pass]:
    def width(row: int) -> int:
        return lengths[row][1] - 1

    def fits(bucket: list[int], row: int) -> bool:
        count, widest = len(bucket) + 1, width(bucket[0])
        distinct = {prompts[r] for r in bucket} | {prompts[row]}
        return (
            count * widest <= budget
            and len(distinct) * prompt_length <= max(budget, prompt_length)
            and count * (prompt_length + widest) <= _SHARED_CONTEXT * budget
        )

    # Rows with the same prompt stay together, so that consecutive passes can reuse its keys and values.
    longest: dict[bytes, int] = defaultdict(int)
    for row in rows:
        longest[prompts[row]] = max(longest[prompts[row]], width(row))
    order = sorted(rows, key=lambda row: (-longest[prompts[row]], prompts[row], -width(row)))
    return [Pass(tuple(bucket), shared=True) for bucket in _buckets(order, width, fits, False, ordered=True)]


def _buckets(
    rows: Sequence[int],
    width: Callable[[int], int],
    fits: Callable[[list[int], int], bool],
    packed: bool,
    *,
    ordered: bool = False,
) -> list[list[int]]:
    """Cut the rows, longest first, wherever the padding of a bucket would cost more than another forward pass."""
    out: list[list[int]] = []
    padding = 0
    for row in rows if ordered else sorted(rows, key=width, reverse=True):
        extra = 0 if packed or not out else width(out[-1][0]) - width(row)
        # Negative only in a given order: a row longer than the bucket's first would widen all rows before it.
        if out and extra >= 0 and padding + extra <= FORWARD_TOKENS and fits(out[-1], row):
            out[-1].append(row)
            padding += extra
        else:
            out.append([row])
            padding = 0
    return out


def _plain_cost(one: Pass, lengths: Sequence[tuple[int, int]], packed: bool) -> int:
    widths = [sum(lengths[row]) - 1 for row in one.rows]
    return FORWARD_TOKENS + (sum(widths) if packed else len(widths) * max(widths))


def _shared_cost(passes: Sequence[Pass], prompts: Sequence[bytes], lengths: Sequence[tuple[int, int]]) -> int:
    cost, previous = 0, frozenset[bytes]()
    for one in passes:
        distinct = frozenset(prompts[row] for row in one.rows)
        if distinct != previous:  # consecutive passes over the same prompts reuse the cache
            cost += FORWARD_TOKENS + sum(len(prompt) // 4 for prompt in distinct)  # an id has four bytes
        cost += FORWARD_TOKENS + len(one.rows) * (max(lengths[row][1] for row in one.rows) - 1)
        previous = distinct
    return cost
