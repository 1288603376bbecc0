"""Merges checkpoints of one architecture by linear, task arithmetic, TIES, DARE or SLERP, with weights per layer.

    linear            merged = sum_i w_i * theta_i, with the w_i normalised to sum to 1
    task_arithmetic   merged = base + lambda * sum_i w_i * (theta_i - base)
    ties              task_arithmetic, where only the share `density` of largest magnitude of each difference is kept,
                      and each parameter sums only the differences with the elected sign (arXiv 2306.01708)
    dare_*            task_arithmetic, where each entry of a difference is kept with probability `density` and divided
                      by it (arXiv 2311.03099); dare_ties also elects signs
    slerp             spherical interpolation between two models, t = 0 at the first

mergekit (extra `merge`) does the arithmetic. It reads safetensors lazily and writes shard by shard, so memory is
bounded by the largest tensor of the models and one output shard, except that an adapter is first merged into its base
in memory. This module adds three things: every mismatch is refused by name before anything is written, the result
appears by one rename, and merge.json records what it was made from.
"""

import json
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from math import prod
from pathlib import Path
from typing import Any, Literal

import numpy as np
from pydantic import Field, model_validator

from opd.adapters import adapter_settings, fold_adapter, split_adapter
from opd.config import Settings
from opd.errors import ConfigError
from opd.extras import require
from opd.files import share
from opd.model_files import tensor_headers, weight_files
from opd.model_path import refuse_missing
from opd.pretrained import check_tensors, read_causal_lm, read_config, read_tokenizer
from opd.tokenizer_files import has_tokenizer
from opd.wire.fingerprint import differing_token, token_bytes, weights_hash
from student.run.space import check_new, drafting

Method = Literal["linear", "task_arithmetic", "ties", "dare_linear", "dare_ties", "slerp"]
NEEDS_BASE: frozenset[str] = frozenset({"task_arithmetic", "ties", "dare_linear", "dare_ties"})
TAKES_DENSITY: frozenset[str] = frozenset({"ties", "dare_linear", "dare_ties"})
SHARD_BYTES = 2**30
_DTYPES = {"F32": "float32", "BF16": "bfloat16", "F16": "float16"}
"""Dtypes of merged weights by their names in safetensors files."""


class MergeModel(Settings):
    """A model that goes into a merge."""

    path: str = Field(description="Folder of a Hugging Face model, or BASE+ADAPTER with the folder of a PEFT adapter.")
    weight: float | tuple[float, ...] = Field(
        1.0,
        description="Weight of the model. Several values are interpolated along the layers, from the first to the "
        "last.",
    )

    @property
    def folders(self) -> tuple[Path, ...]:
        """The model's folder, and the adapter's where there is one."""
        base, adapter = split_adapter(self.path)
        return (Path(base).expanduser(), *([] if adapter is None else [adapter]))


class MergeSettings(Settings):
    """How checkpoints are merged into one."""

    method: Method = Field("linear", description="Rule of the merge; student/orbit/merge.py has the formulas.")
    models: tuple[MergeModel, ...] = Field(min_length=1, description="Models to merge, in order.")
    base: str | None = Field(
        None, description="Base model from which the models' differences are taken, for rules that need one."
    )
    density: float = Field(
        0.5, gt=0, le=1, description="Share of each model's difference from the base that rules ties and dare keep."
    )
    scale: float = Field(1.0, description="Lambda, the factor on the summed differences from the base.")
    t: float = Field(0.5, ge=0, le=1, description="Position on the slerp arc; 0 is the first model.")
    seed: int = Field(0, ge=0, description="Seed of the random choice that rules dare_linear and dare_ties make.")
    dtype: Literal["float32", "bfloat16", "float16"] | None = Field(
        None, description="Dtype of the merged weights; null for that of the base, or else of the first model."
    )

    @model_validator(mode="after")
    def _fits(self) -> "MergeSettings":
        if self.method in NEEDS_BASE and self.base is None:
            raise ValueError(f"method {self.method} needs differences from a base model; set base")
        if self.method not in NEEDS_BASE and self.base is not None:
            raise ValueError(f"method {self.method} uses no base model; list it among the models or remove base")
        if self.method == "slerp" and len(self.models) != 2:
            raise ValueError(f"slerp joins exactly two models, not {len(self.models)}; use linear or ties")
        paths = [model.path for model in self.models]
        # mergekit would refuse this too, but with its own error and only after all other checks.
        twice = next((path for path in paths if paths.count(path) > 1), None)
        if twice is not None:
            raise ValueError(f"model {twice!r} is named twice; name it once, with the sum of its weights")
        anchors = [w if isinstance(w, tuple) else (w,) for w in (model.weight for model in self.models)]
        depths = {i / max(1, len(values) - 1) for values in anchors for i in range(len(values))}
        if self.method == "linear" and any(abs(_at(anchors, depth)) < 1e-9 for depth in depths):
            raise ValueError("the weights of a linear merge sum to 0, but they are divided by their sum; change one")
        return self


def _at(anchors: Sequence[Sequence[float]], depth: float) -> float:
    """Sum of the models' weights at a relative depth, from 0 for the first layer to 1 for the last."""
    return sum(float(np.interp(depth, np.linspace(0, 1, len(values)), values)) for values in anchors if values)


def merge(settings: MergeSettings, out: Path) -> Path:
    """Merge models into the folder `out`, which must not exist yet, and return it.

    An interrupted merge leaves no `out`, and the next one starts from the beginning.

    Raises:
        ConfigError: when a model's folder is missing or holds no model, tensors or tokenizers differ, `out` exists, or
            mergekit is not installed.
        OutputError: when `out` cannot be written.
    """
    check_new(out)
    names = _names(settings)
    check_fit(names)
    settings = settings.model_copy(update={"dtype": settings.dtype or _dtype(names[0])})
    with drafting(out) as part:
        version = _run(settings, part)
        record = {
            "settings": settings.model_dump(mode="json"),
            "inputs": {name: _hashes(name) for name in dict.fromkeys(names)},
            "mergekit": version,
        }
        (part / "merge.json").write_text(json.dumps(record, indent=2) + "\n")
    return out


def check_fit(models: Sequence[str]) -> None:
    """Check that all models have the tensors, shapes and tokenizer of the first one.

    Raises:
        ConfigError: naming the first folder, tensor or tokenizer that does not fit.
    """
    first, *others = models
    shapes, *shapes_of_others = map(_shapes, models)  # of all, before the slow import of tokenizers
    for folder, *_ in (MergeModel(path=model).folders for model in models):
        check_tensors(folder, read_config(folder))
    tokens = _tokens(first)
    for other, other_shapes in zip(others, shapes_of_others, strict=True):
        for name in chain(shapes, other_shapes):
            here, there = shapes.get(name), other_shapes.get(name)
            if here is None or there is None:
                holder, lacks = (first, other) if there is None else (other, first)
                raise ConfigError(f"tensor {name} is in {holder!r} but not in {lacks!r}; merge models of one family.")
            if here != there:
                raise ConfigError(
                    f"tensor {name} is {list(here)} in {first!r} but {list(there)} in {other!r}; "
                    "merge models of one size and vocabulary."
                )
        theirs = _tokens(other)
        if (tokens is None) is not (theirs is None):
            raise ConfigError(
                f"models {first!r} and {other!r} have different tokenizers: {first if tokens is None else other!r} has "
                "none; copy the files of the other one's there if it was trained with the same ids."
            )
        # The result has the first one's tokenizer, so further tokens of another model do no harm.
        if found := differing_token(tokens or (), theirs or ()):
            raise ConfigError(
                f"models {first!r} and {other!r} have different tokenizers, so that equal rows mean different tokens: "
                f"id {found[0]} is {found[1]} in the first and {found[2]} in the second; merge models that share one."
            )


def _shapes(model: str) -> Mapping[str, tuple[int, ...]]:
    """Shape of every tensor of a model, read from the headers of its files."""
    for part in MergeModel(path=model).folders:
        if not part.is_dir():
            raise ConfigError(f"model folder {str(part)!r} was not found; give the folder of a saved model.")
        refuse_missing(str(part))
    folder, *adapters = MergeModel(path=model).folders
    for adapter in adapters:
        adapter_settings(adapter)
    files = weight_files(folder)
    if not files or not (folder / "config.json").is_file():
        raise ConfigError(
            f"folder {str(folder)!r} lacks config.json or safetensors weights; save the model with save_pretrained."
        )
    return {name: shape for file in files for name, shape, _ in tensor_headers(file)}


def _tokens(model: str) -> list[bytes] | None:
    """The tokens of a model's tokenizer by id; None where its folder has none."""
    folder = MergeModel(path=model).folders[0]
    return token_bytes(read_tokenizer(folder)) if has_tokenizer(folder) else None


def _hashes(model: str) -> list[str]:
    return [weights_hash(folder) for folder in MergeModel(path=model).folders]


def _run(settings: MergeSettings, out: Path) -> str:
    """Have mergekit write the merged model; returns mergekit's version."""
    require("merging", "mergekit", "merge")
    from importlib.metadata import version

    from mergekit.config import MergeConfiguration
    from mergekit.merge import run_merge
    from mergekit.options import MergeOptions

    folded = out / ".folded"  # in the unfinished folder, so that a merge that is killed leaves nothing else
    folders = {name: _plain(name, folded / str(i), settings.dtype) for i, name in enumerate(_names(settings))}
    options = MergeOptions(
        out_shard_size=SHARD_BYTES, copy_tokenizer=True, write_model_card=False, quiet=True, random_seed=settings.seed
    )
    run_merge(MergeConfiguration.model_validate(_config(settings, folders)), str(out), options)
    shutil.rmtree(folded, ignore_errors=True)
    share(out.iterdir())
    return version("mergekit")


def _names(settings: MergeSettings) -> list[str]:
    return [*([settings.base] if settings.base else []), *(model.path for model in settings.models)]


def _dtype(model: str) -> str:
    """The dtype of most numbers of a model's files.

    Raises:
        ConfigError: if merges cannot compute in it.
    """
    counts: Counter[str] = Counter()
    for file in weight_files(MergeModel(path=model).folders[0]):
        for _, shape, dtype in tensor_headers(file):
            counts[dtype] += prod(shape)
    (stored, _), *_ = counts.most_common(1)
    if stored not in _DTYPES:
        raise ConfigError(f"the weights of {model!r} are {stored}, which cannot be merged; name one of full precision.")
    return _DTYPES[stored]


def _plain(model: str, folder: Path, dtype: str | None) -> Path:
    """The folder of a model: its own, or `folder` with its adapter merged, which is then written.

    Raises:
        ConfigError: if the adapter cannot be merged.
    """
    base, *adapters = MergeModel(path=model).folders
    if not adapters:
        return base
    shutil.copytree(base, folder, ignore=shutil.ignore_patterns("*.safetensors*", "*.bin*"))
    lm = read_causal_lm(base, config=read_config(base), dtype=dtype)
    fold_adapter(lm, adapters[0]).save_pretrained(folder)
    return folder


def _config(settings: MergeSettings, folders: Mapping[str, Path]) -> dict[str, Any]:
    """The settings as mergekit's configuration; `folders` has the folder of each model by its name."""

    def model_at(name: str) -> dict[str, Any]:  # and no text, in which mergekit would read a plus and an @
        return {"model": {"path": str(folders[name])}}

    config: dict[str, Any] = {"merge_method": settings.method, "dtype": settings.dtype}
    if settings.method == "slerp":
        first, second = settings.models
        return config | {
            "base_model": model_at(first.path),
            "models": [{"model": model_at(second.path)}],
            "parameters": {"t": settings.t},
        }
    models: list[dict[str, Any]] = []
    for model in settings.models:
        weight = list(model.weight) if isinstance(model.weight, tuple) else model.weight
        parameters: dict[str, Any] = {"weight": weight}
        if settings.method in TAKES_DENSITY:
            parameters["density"] = settings.density
        models.append({"model": model_at(model.path), "parameters": parameters})
    # mergekit takes config and tokenizer from the base, and without one from any of the models.
    config |= {"models": models, "base_model": model_at(settings.base or settings.models[0].path)}
    if settings.method in NEEDS_BASE:
        config["parameters"] = {"normalize": False, "lambda": settings.scale}
    return config
