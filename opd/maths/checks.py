"""Argument checks of `opd.maths`: every error is a `ValueError` that names the argument, its shape and its value.

Shapes, dtypes and Python scalars are always checked. Values inside tensors are checked by default on a CPU only: on an
accelerator, reading a value makes the host wait for the device, so callers have to ask for it with `check_values=True`.
"""

import math
from numbers import Real
from typing import Any

import torch
from torch import Tensor


def describe(name: str, tensor: Tensor) -> str:
    """`name` with dtype and shape, as messages show it."""
    return f"{name} ({str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)})"


def check_logits(name: str, logits: Tensor) -> None:
    """Refuses logits that are not floating point or have no vocabulary axis."""
    if not logits.is_floating_point():
        raise ValueError(f"{describe(name, logits)} must be floating point; cast it with .float().")
    if logits.ndim < 1 or logits.shape[-1] < 1:
        raise ValueError(f"{describe(name, logits)} needs a last axis of at least one vocabulary entry.")


def check_shape(name: str, tensor: Tensor, expected: tuple[int, ...], like: str) -> None:
    """Refuses a tensor whose shape is not `expected`; `like` names, for the message, what that shape follows from."""
    if tuple(tensor.shape) != expected:
        raise ValueError(f"{describe(name, tensor)} must have shape {list(expected)} to match {like}.")


def check_last_axis(name: str, tensor: Tensor, leading: tuple[int, ...], like: str) -> None:
    """Refuses a tensor that is not [*leading, K] for some K; `like` names what the leading axes follow from."""
    if tensor.ndim != len(leading) + 1 or tuple(tensor.shape[:-1]) != leading:
        expected = ", ".join([*map(str, leading), "K"])
        raise ValueError(f"{describe(name, tensor)} must have shape [{expected}] to match {like}.")


def check_ids(
    name: str,
    ids: Tensor,
    vocabulary: int,
    *,
    distinct: bool = False,
    check_values: bool | None = None,
    whole: str = "the vocabulary",
) -> None:
    """Refuses ids that are not integers, out of [0, vocabulary), or repeated within a row when `distinct`."""
    if ids.dtype not in (torch.int64, torch.int32):
        raise ValueError(f"{describe(name, ids)} must be int64 or int32; cast it with .long().")
    if not should_check_values(ids, check_values) or ids.numel() == 0:
        return
    low, high = int(ids.min()), int(ids.max())
    if low < 0 or high >= vocabulary:
        bad = low if low < 0 else high
        raise ValueError(f"{describe(name, ids)} holds the id {bad}, which is outside {whole} of {vocabulary}.")
    if distinct and ids.shape[-1] > 1:
        # After sorting, equal ids are neighbours. Comparing all pairs would take a tensor [..., K, K].
        ordered = ids.sort(dim=-1).values
        repeated = (ordered[..., 1:] == ordered[..., :-1]).flatten(0, -2).any(-1)
        if bool(repeated.any()):
            row = int(repeated.nonzero()[0])
            raise ValueError(f"{describe(name, ids)} repeats an id in row {row}; ids of one position must be distinct.")


def check_mask(name: str, mask: Tensor | None, expected: tuple[int, ...], like: str) -> None:
    """Refuses a mask that is not boolean, or whose shape is not that of the positions."""
    if mask is None:
        return
    if mask.dtype != torch.bool:
        raise ValueError(f"{describe(name, mask)} must be bool, True where a token counts; cast it with .bool().")
    check_shape(name, mask, expected, like)


def check_integer(name: str, value: Any, low: int, high: int | None = None, hint: str = "") -> None:
    """Refuses a value that is not an integer in [low, high]."""
    # bool is a subclass of int: True would pass as 1.
    if isinstance(value, bool) or not isinstance(value, int) or value < low or (high is not None and value > high):
        wanted = f"of at least {low}" if high is None else f"in [{low}, {high}]"
        raise ValueError(f"{name} must be an integer {wanted}{', ' + hint if hint else ''}, but is {value!r}.")


def check_temperature(temperature: float) -> None:
    """Refuses a temperature that is not a positive finite number."""
    if not (isinstance(temperature, Real) and math.isfinite(temperature) and temperature > 0):
        raise ValueError(f"temperature must be a finite number above 0, but is {temperature!r}.")


def check_fraction(name: str, value: float, *, low_open: bool = False, high_open: bool = False, hint: str = "") -> None:
    """Refuses a number outside [0, 1]; `low_open` and `high_open` exclude the ends."""
    if not (
        isinstance(value, Real) and (value > 0 if low_open else value >= 0) and (value < 1 if high_open else value <= 1)
    ):
        interval = f"{'(' if low_open else '['}0, 1{')' if high_open else ']'}"
        raise ValueError(f"{name} must lie in {interval}, but is {value!r}{'; ' + hint if hint else ''}.")


def should_check_values(tensor: Tensor, asked: bool | None) -> bool:
    """Whether to look at the values of a tensor: as asked, by default on CPU only, and never under `torch.compile`."""
    # Reading a value causes a graph break.
    if torch.compiler.is_compiling():
        return False
    return tensor.device.type == "cpu" if asked is None else asked


def check_rows_finite(name: str, rows: Tensor, log_z: Tensor, mask: Tensor | None) -> None:
    """Refuses logits with NaN, +inf or nothing but -inf in a row that counts.

    Args:
        name: the name of the argument, for the message.
        rows: [N, V], the logits, read only to say what is wrong with the first bad row.
        log_z: [N], their logsumexp, which is finite exactly if the row is usable.
        mask: [N] bool, True for rows that count; None if all do.
    """
    bad = ~log_z.isfinite()
    if mask is not None:
        bad &= mask
    if bool(bad.any()):
        row = int(bad.nonzero()[0])
        value = "NaN" if bool(rows[row].isnan().any()) else "+inf" if bool((rows[row] > 0).any()) else "only -inf"
        raise ValueError(f"{describe(name, rows)} holds {value} in row {row}; mask the row or repair the model.")


def check_projection(name: str, hidden: Tensor, log_z: Tensor, rows: Tensor | None) -> None:
    """Refuses hidden states whose logits have no finite logsumexp: NaN, +inf or only -inf.

    Args:
        name: the name of the argument, for the message.
        hidden: [N, H], all hidden states.
        log_z: [n], logsumexp of the logits of the rows that were projected.
        rows: [n], the index into `hidden` of each projected row; None if all N were projected.
    """
    bad = ~log_z.isfinite()
    if bool(bad.any()):
        at = int(bad.nonzero()[0])
        row = at if rows is None else int(rows[at])
        raise ValueError(
            f"{describe(name, hidden)} and its head give logits with logsumexp {float(log_z[at])} in row {row}; mask "
            "the row or repair the model."
        )


def check_log_probs(
    name: str, values: Tensor, mask: Tensor | None, check_values: bool | None = None, *, normalised: bool = True
) -> None:
    """Refuses teacher log-probs that are NaN, +inf or clearly above 0 at a position that counts; -inf is allowed.

    Args:
        name: the name of the argument, for the message.
        values: [...] or [..., K].
        mask: [...] bool, True for positions that count; None if all do.
        check_values: whether to look at the values; by default on CPU only.
        normalised: False for unnormalised log-weights, which may exceed 0.
    """
    if not values.is_floating_point():
        raise ValueError(f"{describe(name, values)} must be floating point; cast it with .float().")
    if not should_check_values(values, check_values):
        return
    # The tolerance allows for rounding in half precision. A negated comparison, because NaN compares false.
    bad = ~(values <= (1e-2 if normalised else torch.finfo(values.dtype).max))
    _refuse_values(name, values, bad, mask, "a log-probability")


def check_finite(name: str, values: Tensor, mask: Tensor | None, check_values: bool | None = None) -> None:
    """Refuses a tensor [...] that is not floating point or not finite at a position that counts."""
    if not values.is_floating_point():
        raise ValueError(f"{describe(name, values)} must be floating point; cast it with .float().")
    if should_check_values(values, check_values):
        _refuse_values(name, values, ~values.isfinite(), mask, "finite")


def _refuse_values(name: str, values: Tensor, bad: Tensor, mask: Tensor | None, wanted: str) -> None:
    if mask is not None:
        bad = bad & mask.reshape(*mask.shape, *(1,) * (values.ndim - mask.ndim))
    if bool(bad.any()):
        where = bad.nonzero()[0].tolist()
        raise ValueError(
            f"{describe(name, values)} holds {float(values[tuple(where)])} at {where}, which is not {wanted}."
        )
