"""Reads texts with a tokenizer: ids of bytes that may not be UTF-8, and where each token ends."""

import codecs
import copy
import re
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from opd.errors import IncompatibleTeacherError
from opd.tasks.prompt import Prompt
from opd.tasks.template import rendered
from opd.tokenizer_files import PROBE
from opd.wire.tokenizer import refusing
from student.scoring.spans import Ints, Vocabulary, character_ends

_INVALID = re.compile("([\udc80-\udcff]+)")  # what bytes that are not UTF-8 are decoded to
_NONE = np.empty(0, np.int64)


class Reader:
    """A tokenizer as a reader of texts: the bytes of its ids, and how it begins a response.

    Args:
        tokenizer: a `transformers` tokenizer; copied, because two threads must not use one at once.
        who: whose it is, for messages.

    Attributes:
        words: the bytes of its ids.
        unknown: the id of text that it cannot write; -1 for none.

    Raises:
        IncompatibleTeacherError: if the bytes of a text cannot be had back from its ids.
    """

    def __init__(self, tokenizer: Any, who: str) -> None:
        if getattr(tokenizer, "backend_tokenizer", None) is None:
            raise IncompatibleTeacherError(
                f"the tokenizer of {who} is written in Python, so that its tokens cannot be aligned; use a model "
                "with a tokenizer.json."
            )
        self.tokenizer, self.who = copy.deepcopy(tokenizer), who
        self.words = Vocabulary(tokenizer)
        unknown = tokenizer.unk_token_id
        self.unknown = -1 if unknown is None else int(unknown)
        # For responses: there, typing the text of a special token does not produce it, and offsets are not trimmed.
        self._backend = Tokenizer.from_str(self.tokenizer.backend_tokenizer.to_str())
        self._backend.encode_special_tokens = True
        self._backend.post_processor = None
        self._backend.no_padding()
        self._backend.no_truncation()
        self._prefixes = self._encoded("x")[1] == b" x"
        self._continues: dict[bool, bool] = {}
        for word in PROBE.split():
            ids, text = self._encoded(word)
            if self.unknown not in ids and text.removeprefix(b" ") != word.encode():
                raise IncompatibleTeacherError(
                    f"the tokenizer of {who} makes {text.decode(errors='replace')!r} of the text {word!r} (id "
                    f"{int(ids[0]) if len(ids) else 'none'} first), so that bytes cannot be had back from its ids; use "
                    "a model whose tokenizer keeps the text as it is."
                )

    def _encoded(self, text: str) -> tuple[Ints, bytes]:
        ids = np.array(self._backend.encode(text, add_special_tokens=False).ids, np.int64)
        return ids, self.words.text(ids).tobytes()

    def begins_with_space(self, prompt: Prompt) -> bool:
        """Whether it writes a response to `prompt` as tokens that begin with a space which is not part of the text.

        SentencePiece puts a space before every text; within a text, after a newline for example, there is none.
        """
        if not self._prefixes:
            return False
        chat = prompt.messages is not None
        if chat not in self._continues:
            before = rendered(prompt, self.tokenizer) if chat else prompt.text or ""
            last = self.tokenizer(before + "x", add_special_tokens=False)["input_ids"][-1:]
            self._continues[chat] = before.endswith(" ") or self.words.text(np.array(last)).tobytes() != b" x"
        return not self._continues[chat]

    def read(self, data: bytes, *, spaced: bool, last: bool) -> tuple[Ints, Ints]:
        """Encode bytes of a response.

        Args:
            data: the bytes.
            spaced: whether the text begins after a space of the tokenizer's own (`begins_with_space`).
            last: whether they end the response, so that a cut character is left out.

        Returns:
            [U] ids, -1 for bytes that it cannot read, and [U] the offsets at which they end.
        """
        decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
        text = decoder.decode(data, final=not last)
        ids, ends, done = [_NONE], [_NONE], 0
        for odd, part in enumerate(_INVALID.split(text)):
            raw = part.encode("utf-8", "surrogateescape")
            if odd % 2:
                found, offsets = self.words.bytewise[np.frombuffer(raw, np.uint8)], 1 + np.arange(len(raw))
            else:
                found, offsets = self._tokens(part, raw, spaced=spaced) if raw else (_NONE, _NONE)
            ids.append(found)
            ends.append(done + offsets)
            done += len(raw)
            spaced &= not raw
        return np.concatenate(ids), np.concatenate(ends)

    def _tokens(self, text: str, raw: bytes, *, spaced: bool) -> tuple[Ints, Ints]:
        """The ids of a text, and the byte offsets at which they end."""
        if self._prefixes and not spaced:
            # Within a text: encoded after another character, whose tokens are then left out.
            for before in ("\n", "x"):
                ids, ends = self._ends(before, text, raw)
                if (ends == 0).any():  # otherwise a token has parts of both
                    return ids[ends > 0], ends[ends > 0]
        return self._ends("", text, raw)

    def _ends(self, before: str, text: str, raw: bytes) -> tuple[Ints, Ints]:
        """The ids of `before` and a text, and where they end in the text; at 0 or less before it."""
        with refusing(f"the tokenizer of {self.who} cannot encode a response of {len(raw)} bytes", "use another one"):
            encoding = self._backend.encode(before + text, add_special_tokens=False)
        ids = np.array(encoding.ids, np.int64)
        lengths, whole = self.words.lengths[ids], self.words.text(ids).tobytes()
        extra = len(whole) - len(raw)  # `before`, and the tokenizer's own space
        if 0 <= extra <= 2 and whole.endswith(raw) and whole[:extra].lstrip(b" ") == before.encode():
            return ids, np.cumsum(lengths) - extra
        # The tokenizer has changed the text, as by normalising it; the library knows what each token is made of.
        places = np.array([end for _, end in encoding.offsets], np.int64) - len(before)
        ends = np.maximum.accumulate(character_ends(text, np.maximum(places, 0)))
        ends[places <= 0] = 0
        if self._prefixes and whole.startswith(b" ") and not (before + text).startswith(" ") and lengths[0] == 1:
            ends[0] = 0  # the tokenizer's own space, which the library counts to the first character
        return ids, ends
