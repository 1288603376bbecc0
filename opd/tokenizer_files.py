"""What tokenizer files a model has, and whether a loaded tokenizer encodes text as the model's files say.

transformers 5 chooses the class of some tokenizers by the architecture of the model they are saved with, whatever their
files say: a custom BPE saved with a Qwen2 model becomes a Qwen2Tokenizer, which splits text differently and has one
token more.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "spiece.model")
PROBE = "Don't say 12345 x=1:  naïve Zoë,\n\n\t李雷 has 7.5% more💥"
"""A text at which tokenizers differ."""


def has_tokenizer(folder: str | Path) -> bool:
    """Whether a model's folder has files of a tokenizer."""
    return any((Path(folder) / name).is_file() for name in _FILES)


def read_otherwise(tokenizer: Any, folder: str | Path) -> str | None:
    """A sentence if `tokenizer` encodes a test string differently from the folder's tokenizer.json, else None.

    Args:
        tokenizer: a `transformers` tokenizer that was loaded from the folder.
        folder: the model's folder; without a tokenizer.json there is nothing to compare with.
    """
    file = Path(folder) / "tokenizer.json"
    if not file.is_file():
        return None
    from tokenizers import Tokenizer

    own = Tokenizer.from_file(str(file))
    # Saved by a training script; transformers pads and truncates only where it is told to.
    own.no_padding()
    own.no_truncation()
    if own.encode(PROBE, add_special_tokens=False).ids == tokenizer.encode(PROBE, add_special_tokens=False):
        return None
    return (
        f"the tokenizer of {folder} is loaded as {type(tokenizer).__name__} of {len(tokenizer)} ids, which splits text "
        f"differently from its tokenizer.json of {own.get_vocab_size()} ids: transformers chooses the tokenizer's "
        "class by the model's architecture. If the model was trained with tokenizer.json, it now reads other ids; save "
        "it with an architecture that has no tokenizer class of its own, such as llama."
    )


def lacks_bos(tokenizer: Any, config: Mapping[str, Any]) -> str | None:
    """A sentence if a model has a BOS token that its tokenizer puts before no text, else None.

    Converted tokenizers lose it, and models that were trained with it, such as Gemma, write garbage without it. Not
    meant are models without a BOS token of their own: where it is also EOS or padding, as in Qwen, or opens every turn
    of the chat template, as in SmolLM2.

    Args:
        tokenizer: a `transformers` tokenizer.
        config: the model's config.json.
    """
    bos = config.get("bos_token_id", (config.get("text_config") or {}).get("bos_token_id"))
    if bos is None or bos != tokenizer.bos_token_id or bos in (tokenizer.eos_token_id, tokenizer.pad_token_id):
        return None
    if tokenizer.bos_token in str(tokenizer.chat_template) or bos in tokenizer("x")["input_ids"]:
        return None
    return (
        f"the tokenizer of {tokenizer.name_or_path} puts no {tokenizer.bos_token} before a text, although the model's "
        "config has it as bos_token_id; if the model was trained with it, plain prompts are garbage to it: load the "
        "tokenizer with transformers, set its add_bos_token to True and save it there."
    )
