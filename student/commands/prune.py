"""Leaves out layers of a model: a smaller student, whose losses distillation wins back.

    KL(S)  = mean over prompts and answer tokens of KL(model without the layers S || whole model), nats
    S      = {} at first; then, until enough are gone, the layer is added that raises KL(S) least

The answers are the whole model's own at temperature 0, so that what is measured is what it is asked to do. Each round
reads them once for each layer that is left.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from opd.errors import ConfigError
from opd.files import share
from opd.model_path import refuse_missing
from opd.pretrained import read_causal_lm, read_config, read_tokenizer
from opd.tasks.build import build_prompts
from opd.tasks.encode import encode_prompts
from opd.tasks.settings import FileSettings
from opd.tasks.stops import generation_stops, stop_set
from student.commands.convert import continued
from student.run.space import check_new, drafting

_PROMPTS = 32
Drop = tuple[int, float | None]
"""A layer that is left out, and the KL without it and those before it, if it was measured."""


def prune(
    model: str,
    out: Path,
    *,
    layers: int = 0,
    prompts: Path | None = None,
    drop: Sequence[int] = (),
    told: Callable[[int, float], None] = lambda layer, kl: None,
) -> list[Drop]:
    """Write `model` without some of its layers into the folder `out`, which must not exist yet.

    Args:
        model: folder or hub id.
        out: the folder.
        layers: number of layers to keep; which go is measured on `prompts`.
        prompts: JSON lines or parquet with prompts; the first 32 are read.
        drop: the layers to leave out, from 0 on, instead of `layers`.
        told: called with each layer that is chosen and the KL without it.

    Returns:
        The layers that were left out, in the order of choice.

    Raises:
        ConfigError: if the model cannot be loaded or has no stack of equal layers, or the numbers do not fit it.
        OutputError: if `out` cannot be written.
    """
    check_new(out)
    refuse_missing(model)
    lm, tokenizer = read_causal_lm(model, config=read_config(model), dtype="auto").eval(), read_tokenizer(model)
    stack = _stack(lm, model)
    if drop:
        wrong = next((layer for layer in drop if not 0 <= layer < len(stack)), None)
        if wrong is not None or len(set(drop)) == len(stack):
            raise ConfigError(
                f"model {model!r} has layers 0 to {len(stack) - 1}; layers {list(drop)} cannot be dropped."
            )
        gone: list[Drop] = [(layer, None) for layer in dict.fromkeys(drop)]
    else:
        if not 0 < layers < len(stack):
            raise ConfigError(f"model {model!r} has {len(stack)} layers, so {layers} cannot be kept of them.")
        if prompts is None:
            raise ConfigError("which layers go is measured on prompts; name a file of them with --prompts.")
        read = list(_answered(lm, tokenizer, model, prompts))
        gone = _choose(lm, stack, read, len(stack) - layers, told)
    _leave_out(lm, stack, {layer for layer, _ in gone})
    with drafting(out) as part:
        lm.save_pretrained(part)
        tokenizer.save_pretrained(part)
        share(part.iterdir())
        _check_saved(lm, part, model)
    return gone


def _stack(lm: nn.Module, model: str) -> nn.ModuleList:
    """The decoder's layers."""
    count = getattr(lm.config.get_text_config(), "num_hidden_layers", None)  # type: ignore[operator,union-attr]
    found = [part for part in lm.modules() if isinstance(part, nn.ModuleList) and len(part) == count]
    if not found:
        raise ConfigError(f"model {model!r} ({type(lm).__name__}) has no stack of layers that could be left out.")
    return found[0]


def _answered(lm: Any, tokenizer: Any, model: str, file: Path) -> Iterator[tuple[Tensor, int]]:
    """[1, T] ids of prompts with the model's own answers, and where the answers begin."""
    settings = FileSettings(file=file, chat=bool(tokenizer.chat_template), heldout=0.0, limit=_PROMPTS)
    source = build_prompts(settings, seed=0)
    try:
        asked = encode_prompts(source.prompts("train", _PROMPTS), tokenizer)
    finally:
        source.close()
    stops = stop_set(tokenizer, generation_stops(model)).ids
    for ids in asked:
        yield continued(lm, tokenizer, ids, stops), len(ids)


def _choose(
    lm: Any, stack: nn.ModuleList, read: Sequence[tuple[Tensor, int]], count: int, told: Callable[[int, float], None]
) -> list[Drop]:
    """The `count` layers that are missed least, chosen one by one."""
    whole = _log_probs(lm, read)
    gone: list[Drop] = []
    for _ in range(count):
        taken = {layer for layer, _ in gone}
        costs = {}
        for layer in set(range(len(stack))) - taken:
            with _without(stack, taken | {layer}):
                costs[layer] = _reverse_kl(_log_probs(lm, read), whole)
        best = min(costs, key=lambda layer: (costs[layer], layer))
        gone.append((best, costs[best]))
        told(best, costs[best])
    return gone


@torch.no_grad()
def _log_probs(lm: Any, read: Sequence[tuple[Tensor, int]]) -> list[Tensor]:
    """[A, V] log-probs, nats, of the tokens of each answer."""
    return [lm(ids, use_cache=False).logits[0, start - 1 : -1].float().log_softmax(-1) for ids, start in read]


def _reverse_kl(ours: Sequence[Tensor], whole: Sequence[Tensor]) -> float:
    """Mean KL(ours || whole) over all tokens, nats."""
    values = torch.cat([(one.exp() * (one - other)).sum(-1) for one, other in zip(ours, whole, strict=True)])
    return float(values.mean())


@contextmanager
def _without(stack: nn.ModuleList, gone: set[int]) -> Iterator[None]:
    """Pass over some layers: hooks put what a layer was given in place of what it computes."""

    def passed(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        given = args[0] if args else kwargs["hidden_states"]
        return (given, *output[1:]) if isinstance(output, tuple) else given

    hooks = [stack[layer].register_forward_hook(passed, with_kwargs=True) for layer in gone]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _leave_out(lm: Any, stack: nn.ModuleList, gone: set[int]) -> None:
    """Remove layers, number the others anew, and shorten whatever the config lists for each layer."""
    kept = [layer for layer in range(len(stack)) if layer not in gone]
    config = lm.config.get_text_config()
    for name, value in vars(config).copy().items():
        if isinstance(value, list | tuple) and len(value) == len(stack):
            setattr(config, name, [value[layer] for layer in kept])
    config.num_hidden_layers = len(kept)
    layers = [stack[layer] for layer in kept]
    for old, new in zip(kept, layers, strict=True):
        parts: Iterator[Any] = new.modules()
        for part in parts:
            if getattr(part, "layer_idx", None) == old:
                part.layer_idx = kept.index(old)
    del stack[:]
    stack.extend(layers)


def _check_saved(lm: Any, folder: Path, model: str) -> None:
    """Check that what was saved computes what was pruned: a family may give layers a meaning by their numbers.

    Raises:
        ConfigError: if it does not.
    """
    again = read_causal_lm(folder, config=read_config(folder), dtype="auto").eval()
    ids = torch.arange(8)[None]
    with torch.no_grad():
        same = torch.allclose(lm(ids, use_cache=False).logits, again(ids, use_cache=False).logits, atol=1e-4)
    if not same:
        raise ConfigError(
            f"model {model!r} ({type(lm).__name__}) computes something else with layers left out once it is saved and "
            "loaded; its family gives layers a meaning by their numbers, so it cannot be pruned."
        )
