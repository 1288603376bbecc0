"""`opd tiny random`: writes models of real shapes with random weights, a tokenizer of their size, and prompts.

With them one can measure, without access to a hub, what depends only on shapes: tokens per second, memory, bytes on the
network. Their answers are random and mostly end at the limit of new tokens, because the stop token is as unlikely as
any other; with a small vocabulary it is likelier, and some answers end earlier.

    qwen2.5-0.5b  qwen2.5-1.5b  qwen3-1.7b  qwen3-8b      as in their config.json on the hub
"""

import json
import os
import random
import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from opd.errors import ConfigError, DataError
from opd.files import check_writable, share
from student.run.space import drafted

STUDENT, TEACHER, PROMPTS = "student", "teacher", "prompts.jsonl"
_LEAST_ROWS = 512
"""Least rows of an embedding: room for the tokenizer's bytes, its special tokens and some words."""
_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class RandomShape:
    """Size of a model. Its heads have hidden / heads dimensions.

    Attributes:
        family: model type, as transformers names it.
        hidden: width of the residual stream.
        inner: width of the feed-forward layers.
        layers: number of decoder layers.
        heads: number of query heads.
        shared_heads: number of key-value heads.
        tied: whether the output head shares the embedding.
        longest: maximum length of a sequence in tokens.
        vocabulary: number of rows of the embedding.
    """

    family: str
    hidden: int
    inner: int
    layers: int
    heads: int
    shared_heads: int
    tied: bool
    longest: int
    vocabulary: int = 151_936

    def scaled(self, scale: float, vocabulary: int | None = None) -> "RandomShape":
        """Return a smaller shape: width, layers and heads are multiplied by `scale`; the width of a head stays.

        Args:
            scale: factor in (0, 1].
            vocabulary: number of rows of the embedding; None keeps the shape's.

        Raises:
            ConfigError: for a scale or a number of rows out of range.
        """
        if not 0 < scale <= 1:
            raise ConfigError(f"scale is {scale:g}, but it must be above 0 and at most 1.")
        rows = self.vocabulary if vocabulary is None else vocabulary
        if not _LEAST_ROWS <= rows <= self.vocabulary:
            raise ConfigError(f"the vocabulary has {rows} rows, but it must have {_LEAST_ROWS} to {self.vocabulary}.")
        heads = max(1, round(self.heads * scale))
        wanted = max(1, round(self.shared_heads * scale))
        return replace(
            self,
            hidden=heads * (self.hidden // self.heads),
            inner=max(8, round(self.inner * scale / 8) * 8),
            layers=max(1, round(self.layers * scale)),
            heads=heads,
            shared_heads=max(count for count in range(1, wanted + 1) if heads % count == 0),
            vocabulary=rows,
        )


RANDOM_SHAPES = {
    "qwen2.5-0.5b": RandomShape("qwen2", 896, 4864, 24, 14, 2, True, 32_768),
    "qwen2.5-1.5b": RandomShape("qwen2", 1536, 8960, 28, 12, 2, True, 32_768),
    "qwen3-1.7b": RandomShape("qwen3", 2048, 6144, 28, 16, 8, True, 40_960),
    "qwen3-8b": RandomShape("qwen3", 4096, 12_288, 36, 32, 8, False, 40_960),
}
"""The shapes by name."""


def random_shape(name: str) -> RandomShape:
    """Return the shape called `name`.

    Raises:
        ConfigError: for an unknown name.
    """
    if name not in RANDOM_SHAPES:
        raise ConfigError(f"shape {name!r} is unknown; use one of {', '.join(RANDOM_SHAPES)}.")
    return RANDOM_SHAPES[name]


def config_of(shape: RandomShape) -> Any:
    """The transformers config of a shape; token 0 is for padding, and token 1 ends an answer."""
    from transformers import AutoConfig

    architecture = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM"}[shape.family]
    return AutoConfig.for_model(
        shape.family,
        architectures=[architecture],
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.inner,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.shared_heads,
        head_dim=shape.hidden // shape.heads,
        max_position_embeddings=shape.longest,
        max_window_layers=shape.layers,
        rope_parameters={"rope_type": "default", "rope_theta": 1_000_000.0},
        rms_norm_eps=1e-6,
        tie_word_embeddings=shape.tied,
        pad_token_id=0,
        bos_token_id=None,
        eos_token_id=1,
    )


def make_random_models(
    folder: Path,
    student: RandomShape,
    teacher: RandomShape,
    *,
    seed: int = 0,
    dtype: str = "bfloat16",
    prompts: int = 4096,
    prompt_tokens: int = 128,
) -> dict[str, int]:
    """Write a student, a teacher and prompts to `folder`. The same arguments give the same files.

    Args:
        folder: output folder; it must be empty or not exist.
        student: shape of the student.
        teacher: shape of the teacher, with the student's vocabulary.
        seed: seed of weights and prompts.
        dtype: dtype of the stored weights.
        prompts: number of prompts in prompts.jsonl.
        prompt_tokens: length of each prompt in tokens.

    Returns:
        The number of parameters of each model, by name.

    Raises:
        ConfigError: for vocabularies that differ, or an unknown dtype.
        DataError: when the folder is not empty, or its disk is too full.
        OutputError: when it cannot be written.
    """
    from opd_lab.tiny.tokenizer import make_word_tokenizer

    if student.vocabulary != teacher.vocabulary:
        raise ConfigError(
            f"the shapes of student and teacher have vocabularies of {student.vocabulary} and {teacher.vocabulary} "
            "rows; give one number for both."
        )
    if dtype not in _BYTES:
        raise ConfigError(f"weights cannot be stored as {dtype!r}; use one of {', '.join(_BYTES)}.")
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise DataError(f"{folder} exists already; remove it or choose another folder.")
    sizes = {name: count_parameters(shape) for name, shape in ((STUDENT, student), (TEACHER, teacher))}
    draft = folder.with_name(f".{folder.name}.part")
    check_writable(draft, f"folder {folder}")
    folder.parent.mkdir(parents=True, exist_ok=True)
    needed, free = sum(sizes.values()) * _BYTES[dtype], shutil.disk_usage(folder.parent).free
    if needed > free:
        raise DataError(f"{folder} would take {needed / 1e9:.2g} GB, but {free / 1e9:.2g} are free; use another disk.")
    # Moved into place by one rename: a call that is killed leaves only a draft, not a folder that looks finished.
    tokenizer = make_word_tokenizer(student.vocabulary, max_length=min(student.longest, teacher.longest))
    with drafted(draft, f"folder {folder}"):
        for place, (name, shape) in enumerate(((STUDENT, student), (TEACHER, teacher))):
            _save(shape, draft / name, seed=2 * seed + place, dtype=dtype)
            tokenizer.save_pretrained(draft / name)
        (draft / PROMPTS).write_text(_prompts(tokenizer, prompts, prompt_tokens, seed), encoding="utf-8")
        os.replace(draft, folder)  # an empty folder may be there
    return sizes


def count_parameters(shape: RandomShape) -> int:
    """Number of parameters of a model, with a tied head counted once; nothing is allocated."""
    import torch
    from transformers import AutoModelForCausalLM

    with torch.device("meta"):
        return int(AutoModelForCausalLM.from_config(config_of(shape)).num_parameters())


def _save(shape: RandomShape, folder: Path, *, seed: int, dtype: str) -> None:
    """Write a model with the random weights that its family is initialized with; torch's global RNG is not changed."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config_of(shape), dtype=getattr(torch, dtype))
    model.generation_config = GenerationConfig(pad_token_id=0, eos_token_id=1, do_sample=True)
    model.save_pretrained(folder)
    share(folder.iterdir())


def _prompts(tokenizer: Any, count: int, tokens: int, seed: int) -> str:
    """JSON lines with prompts of random words, each of exactly `tokens` tokens, and without reference answers."""
    words = [piece for piece in tokenizer.get_vocab() if len(piece) > 1 and piece.startswith("Ġ")]
    words.sort(key=tokenizer.convert_tokens_to_ids)
    draw = random.Random(seed)
    lines = ("".join(draw.choices(words, k=tokens)).replace("Ġ", " ") for _ in range(count))
    return "".join(json.dumps({"prompt": line}) + "\n" for line in lines)
