"""What tokenizer files a model has, and whether a loaded tokenizer encodes text as its own tokenizer.json says.

transformers 5 chooses the class of some tokenizers by the architecture of the model they are saved with, whatever their
files say: a custom BPE saved with a Qwen2 model becomes a Qwen2Tokenizer, which splits text differently and has one
token more.
"""

from pathlib import Path
from typing import Any

_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "spiece.model")
_PROBE = "Don't say 12345 x=1:  naïve Zoë,\n\n\t李雷 has 7.5% more💥"


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
    if own.encode(_PROBE, add_special_tokens=False).ids == tokenizer.encode(_PROBE, add_special_tokens=False):
        return None
    return (
        f"the tokenizer of {folder} is loaded as {type(tokenizer).__name__} of {len(tokenizer)} ids, which splits text "
        f"differently from its tokenizer.json of {own.get_vocab_size()} ids: transformers chooses the tokenizer's "
        "class by the model's architecture. If the model was trained with tokenizer.json, it now reads other ids; save "
        "it with an architecture that has no tokenizer class of its own, such as llama."
    )
