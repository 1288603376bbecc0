"""Find forms that a native reader stumbles over, and second words for one thing: python scripts/words.py.

Reads the pages of this repository, and all text of its packages, scripts, examples and settings: errors, descriptions,
docstrings and comments, also where a form goes over the end of a line; second words in names too. Prints each place,
and exits with 1 when there is one. Not read: tests, whose strings are wrong on purpose, and what generators write.
"""

import re
import sys
from bisect import bisect_right
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BANNED = re.compile(
    r"\b(?:nobody|somebody|whoever|for ever|(?<!the )one that|what became of|for want of|broken off|without end|unsaid"
    r"|mend(?:s|ed)?|parted|to be told from|came to|answer(?:s|ed)? nonsense|outlook|farms?)\b"
    r"|(?<!there )\b(?:is|are|was|were) no "
    r"(?!(?:longer|more|less|such|matter|better|worse|different|reason)\b|\w+er than\b)"
    r"|\b(?:is|are) none of\b|\bthat (?:is|are) none\b",
    re.IGNORECASE,
)
ONE_WORD = {
    "episode": r"trajector(?:y|ies)",
    "given row": r"(?:expert|demonstration) (?:answers?|responses?)|off policy rows?",
    "routed experts": r"moe experts?",
    "term": r"loss terms?",
    "controller": r"method (?:settings|plug ins?|hooks?)",
    "minibatch": r"mini batch(?:es)?(?! size)",
    "micro-batch": r"microbatch(?:es)?",
    "setting": r"hyper ?parameters?",
}
"""Of the glossary in ARCHITECTURE.md: the word for a thing, and what is not written for it, in prose or in names."""
SECOND = re.compile("|".join(rf"\b(?P<w{number}>{form})\b" for number, form in enumerate(ONE_WORD.values())))
JOINT = re.compile(r"(?<=[a-z])(?=[A-Z])|[_-]+")
"""What stands between the words of a name."""
FOLDERS = (
    *("opd", "student", "teacher_server", "opd_zoo", "opd_lab"),
    *("scripts", "examples", "benchmarks", "deploy", "docs", "protos"),
)
SUFFIXES = {".md", ".py", ".proto", ".yaml", ".yml", ".toml", ".jinja", ".sh"}
PASSED_OVER = ("scripts/words.py", "opd/wire/v1/")
MARKS = re.compile(r"""^[\s#/>]*(?:[rbf]{0,2}["'])?|["']?\s*$""")
"""What stands around the text of a line: indentation, the sign of a comment, the quotes of a string's parts."""


def found_in(text: str) -> Iterator[tuple[int, str]]:
    """(line number, what stands around it) of each banned form in a text, and of each second word for one thing."""
    plain = JOINT.sub(" ", text).lower()
    for match in SECOND.finditer(plain):
        word = next(word for word, said in zip(ONE_WORD, match.groups(), strict=True) if said)
        yield plain.count("\n", 0, match.start()) + 1, f"{match[0]}: write {word}"
    joined, starts = "", []
    for line in text.splitlines():
        starts.append(len(joined))
        joined += " ".join(MARKS.sub("", line).split()) + " "
    for match in BANNED.finditer(joined):
        around = joined[max(0, match.start() - 60) : match.end() + 40]
        yield bisect_right(starts, match.start()), around.strip()


def places() -> Iterator[str]:
    """Every place with such a form."""
    for path in [*sorted(ROOT.glob("*")), *(p for folder in FOLDERS for p in sorted((ROOT / folder).rglob("*")))]:
        name = path.relative_to(ROOT).as_posix()
        text = path.suffix in SUFFIXES or path.name in {"Makefile", "Dockerfile"}
        if text and path.is_file() and not name.startswith(PASSED_OVER):
            for number, around in found_in(path.read_text(encoding="utf-8")):
                yield f"{name}:{number}: {around}"


if __name__ == "__main__":
    found = list(places())
    print("\n".join(found))
    sys.exit(bool(found))
