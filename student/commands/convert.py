"""Converts a GGUF file into the folder that transformers, `opd serve` and `model.path` read.

transformers reads the file and multiplies its weights out. Four things are done here, because it does not: what keeps
such a model from being saved is cleared; every token that ends an answer goes into generation_config.json; the
tokenizer puts BOS and EOS around a text where the file says so, without which the text of some models, such as Gemma's,
is garbage; and what it cannot read is refused in one sentence before anything is written.
"""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from opd.errors import ConfigError, OutputError, one_line
from opd.files import share
from opd.pretrained import check_report, quiet
from opd.tasks.encode import encode_prompt
from opd.tasks.prompt import Prompt
from opd.tasks.stops import generation_stops, stop_set
from student.run.space import check_new, drafting

Dtype = Literal["float32", "bfloat16", "float16"]
_ENDS = ("eos", "eot", "eom")
_QUESTION, _BEGINNING = "What is the capital of France?", "The capital of France is"
_ANSWER_TOKENS = 24


@dataclass(frozen=True, slots=True)
class Converted:
    """What came out of a GGUF file.

    Attributes:
        architecture: transformers' model type.
        parameters: number of parameters.
        license: the licence that the file names; empty if it names none.
        prompt: what the converted model was asked.
        answer: what it continued with at temperature 0.
    """

    architecture: str
    parameters: int
    license: str
    prompt: str
    answer: str


def convert(file: Path, out: Path, dtype: Dtype = "float32") -> Converted:
    """Convert the GGUF file `file` into the model folder `out`, which must not exist yet.

    An interrupted conversion leaves no `out`.

    Args:
        file: a whole file; the parts of a split one must be joined first.
        out: the folder.
        dtype: dtype of the weights; float32 keeps every bit of them.

    Raises:
        ConfigError: if `file` is not a GGUF file, is damaged or split, holds an architecture or quantisation that
            transformers cannot read, or if `out` exists.
        OutputError: if `out` cannot be written, or its disk lacks the space.
    """
    check_new(out)
    metadata = _metadata(file)
    with _reading(file):
        model, tokenizer = _load(file, dtype)
    _restore_ends(tokenizer, model, metadata)
    _check_space(model, out)
    with drafting(out) as part:
        model.save_pretrained(part)
        tokenizer.save_pretrained(part)
        share(part.iterdir())
    prompt, answer = _greedy(model, tokenizer, out)
    return Converted(
        model.config.model_type, model.num_parameters(), str(metadata.get("general.license", "")), prompt, answer
    )


def _metadata(file: Path) -> Mapping[str, Any]:
    """The scalars of a file's header, by their names.

    Raises:
        ConfigError: if it is not a whole GGUF file, or a package is missing.
    """
    if not file.is_file():
        raise ConfigError(f"{str(file)!r} is not a file; name a GGUF file.")
    try:
        import gguf  # noqa: F401  (transformers imports it later)
        from transformers.integrations.gguf.reader import read_gguf_metadata
    except ImportError as error:
        raise ConfigError(f"opd convert needs packages that are missing ({error}): pip install 'opd[gguf]'.") from error
    with _reading(file):
        metadata, _ = read_gguf_metadata(str(file))
    count = metadata.get("split.count", 1)
    if count > 1:
        raise ConfigError(
            f"GGUF file {str(file)!r} is one part of {count}; join them with llama.cpp first: llama-gguf-split --merge "
            "FIRST_PART WHOLE."
        )
    if "tokenizer.ggml.tokens" not in metadata:
        raise ConfigError(f"GGUF file {str(file)!r} has no tokenizer, so it is not a language model; name one.")
    return metadata


def _load(file: Path, dtype: Dtype) -> tuple[Any, Any]:
    """Model and tokenizer, which can be saved."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig

    where: dict[str, Any] = {"pretrained_model_name_or_path": str(file.parent), "gguf_file": file.name}
    config = AutoConfig.from_pretrained(**where)
    tokenizer = AutoTokenizer.from_pretrained(**where)
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        **where,
        config=config,
        dtype=getattr(torch, dtype),
        quantization_config=GgufConfig(dequantize=True),
        output_loading_info=True,
    )
    model, report = loaded
    check_report(report, model, file)
    # The weights are whole now, but transformers refuses to save what it has read from quantised ones.
    model.hf_quantizer = None
    for holder, name in ((model, "quantization_method"), (model.config, "quantization_config")):
        if hasattr(holder, name):
            delattr(holder, name)
    return model.eval(), tokenizer


@contextmanager
def _reading(file: Path) -> Iterator[None]:
    """Turn what readers raise for a file that they cannot read into one sentence."""
    try:
        with quiet():
            yield
    except ConfigError:
        raise
    except Exception as error:  # readers raise many classes for damaged files
        raise ConfigError(
            f"GGUF file {str(file)!r} cannot be read: {one_line(error, 300)}; if it should be readable, compare its "
            "size and hash with its source's and get it again, or name a file of another quantisation."
        ) from error


def _restore_ends(tokenizer: Any, model: Any, metadata: Mapping[str, Any]) -> None:
    """Take over what the file says of the tokens at the ends of texts and answers.

    Where it does not say whether texts begin with BOS, llama.cpp's default holds: those of SentencePiece models do.
    """

    def told(name: str, default: Any = None) -> Any:
        return metadata.get(f"tokenizer.ggml.{name}", default)

    for name, default in (("bos", told("model") == "llama"), ("eos", False)):
        if told(f"add_{name}_token", default) and getattr(tokenizer, f"{name}_token_id") is not None:
            setattr(tokenizer, f"add_{name}_token", True)
    ends = [told(f"{name}_token_id") for name in _ENDS]
    if found := list(dict.fromkeys(end for end in ends if end is not None)):
        model.generation_config.eos_token_id = found if len(found) > 1 else found[0]


def _check_space(model: Any, out: Path) -> None:
    """Check that the weights fit on the disk before they are written.

    Raises:
        OutputError: if they do not.
    """
    place = next(folder for folder in out.absolute().parents if folder.is_dir())
    needed, free = model.get_memory_footprint(), shutil.disk_usage(place).free
    if needed > free:
        raise OutputError(
            f"folder {str(out)!r} would take {needed / 2**30:.1f} GiB, but {place} has {free / 2**30:.1f} GiB free; "
            "free space there, choose another, or halve it with --dtype bfloat16."
        )


def _greedy(model: Any, tokenizer: Any, folder: Path) -> tuple[str, str]:
    """A prompt, a question if the model has a chat template, and what the model makes of it at temperature 0."""
    chat = bool(tokenizer.chat_template)
    prompt = Prompt.make([{"role": "user", "content": _QUESTION}] if chat else _BEGINNING)
    ids = encode_prompt(prompt, tokenizer)
    found = continued(model, tokenizer, ids, stop_set(tokenizer, generation_stops(str(folder))).ids)
    said = tokenizer.decode(found[0, len(ids) :], skip_special_tokens=True)
    return (_QUESTION if chat else _BEGINNING), " ".join(said.split())


def continued(model: Any, tokenizer: Any, ids: Sequence[int], stops: Sequence[int]) -> Any:
    """[1, T] int64, `ids` and a model's short answer to them at temperature 0."""
    import torch

    prompt = torch.tensor([ids])
    with torch.no_grad():
        return model.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            max_new_tokens=_ANSWER_TOKENS,
            do_sample=False,
            eos_token_id=list(stops) or None,
            pad_token_id=tokenizer.pad_token_id if tokenizer.pad_token_id is not None else 0,
        )
