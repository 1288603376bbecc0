"""Whether a student's token ids mean to a teacher what they mean to the student.

Equal fingerprints say so at once. Tokenizers with different ones may still agree on every id that the student can
write: they may mark another token as special, for example as padding, or the teacher may have further tokens. Then the
tokens themselves are compared; servers send them in parts.
"""

from typing import Any

from opd.errors import IncompatibleTeacherError
from opd.fleet.source import ScoreSource
from opd.wire.fingerprint import differing_token, token_bytes, tokenizer_fingerprint
from opd.wire.v1 import teacher_pb2 as pb


def check_same_tokens(fleet: ScoreSource, info: pb.TeacherInfo, tokenizer: Any) -> None:
    """Refuse a teacher to which some id of the student means something else.

    Args:
        fleet: serves the teacher.
        info: the teacher.
        tokenizer: the student's.

    Raises:
        IncompatibleTeacherError: naming the first id, and its token on both sides.
    """
    if (unlike := unlike_tokens(fleet, info, tokenizer)) is not None:
        raise IncompatibleTeacherError(
            f"{unlike}; token-level distillation needs ids that mean the same. Use a teacher of the student's family, "
            "give both the same tokenizer files if they were trained with the same ids, compare spans of text "
            "(objective span_opd), or learn from the teacher's own answers (opd answers, then objective sft with "
            "method expert_rows)."
        )


def unlike_tokens(fleet: ScoreSource, info: pb.TeacherInfo, tokenizer: Any) -> str | None:
    """How the tokenizers differ, as a clause that names the first id of the student with another meaning; None if none.

    Arguments are those of `check_same_tokens`.

    Raises:
        IncompatibleTeacherError: if the teacher has no tokenizer, or its tokens are not known.
    """
    fingerprint, name = tokenizer_fingerprint(tokenizer), f"teacher {info.name!r}"
    if info.tokenizer.fingerprint == fingerprint:
        return None
    if not info.tokenizer.fingerprint:
        raise IncompatibleTeacherError(
            f"{name} ({info.model}) was served from a folder without a tokenizer, so that it cannot be compared with "
            f"that of student {tokenizer.name_or_path!r}; copy the tokenizer's files there (tokenizer.json, "
            "tokenizer_config.json) and serve it again."
        )
    both = (
        f"student {tokenizer.name_or_path!r} (tokenizer of {len(tokenizer)} ids, fingerprint {fingerprint[:12]}) and "
        f"{name} (tokenizer of {info.tokenizer.size} ids, fingerprint {info.tokenizer.fingerprint[:12]}) have "
        "different tokenizers"
    )
    mine, start = token_bytes(tokenizer), 0
    while start < len(mine):
        theirs = fleet.tokens(info.name, start)
        if not theirs and start == 0:
            raise IncompatibleTeacherError(
                f"{both}, which cannot be compared token by token, because this source of scores does not send its "
                "tokens; use a live teacher of a current version, or one of the student's family."
            )
        # Ids beyond the teacher's last one come back empty, so one more token is compared in any case.
        end = start + len(theirs or (b"",))
        if found := differing_token(mine[start:end], theirs, start):
            token, own, other = found
            return f"{both}: id {token} is {own} to the student and {other} to the teacher"
        start = end
    return None
