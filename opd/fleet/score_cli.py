"""`opd score`: score a file of rows against a fleet, to read the numbers or to train from them without a teacher."""

import contextlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from opd.errors import DataError, RunFolderError
from opd.fleet.cli import Endpoints, Override, SettingsFile, fleet_settings
from opd.printable import echo

if TYPE_CHECKING:
    from opd.wire.types import PayloadSpec, ScoreItem, Scores


def score(
    endpoints: Endpoints,
    rows: Annotated[
        Path,
        typer.Option(
            help="File with a JSON object per line: prompt_ids and response_ids (also gather_ids for gather, and spans "
            "to score some positions only), or prompt and response as text together with --tokenizer."
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder of a store of scores, to train from as endpoint store:FOLDER. Rows already in it are not "
            "scored again. Default: print the scores."
        ),
    ] = None,
    tokenizer: Annotated[str, typer.Option(help="Folder or hub id of the tokenizer, for rows of text.")] = "",
    teacher: Annotated[str, typer.Option(help="Name of the teacher; may be omitted if only one is served.")] = "",
    payload: Annotated[
        str, typer.Option(help="What to ask for at each response token: sampled, topk, gather or hidden.")
    ] = "sampled",
    k: Annotated[int, typer.Option(help="Ids per response token, for topk and gather.")] = 64,
    value_dtype: Annotated[
        str,
        typer.Option(
            help="Dtype of the values: f16, f32 or u16; for hidden bf16 or f32. Default: f16, or bf16 for hidden."
        ),
    ] = "",
    temperature: Annotated[float, typer.Option(help="Temperature by which the teacher divides its logits.")] = 1.0,
    settings: SettingsFile = None,
    override: Override = [],  # noqa: B006 - typer reads the default
) -> None:
    """Score rows. Prints one JSON line per row with log-probs in nats (null is -inf); with --out, fills a store."""
    from opd.fleet.client import TeacherFleet

    spec = _spec(payload, k, value_dtype)
    if out is None and payload in ("hidden", "full"):
        raise DataError(f"payload {payload} is too large to be printed; give --out FOLDER.")
    # Through the fleet's cache, so that rows that are in the folder already are not sent again.
    overrides = [*override, *([f"cache.folder={json.dumps(str(out))}"] if out is not None else [])]
    chosen = fleet_settings(settings, overrides)
    items = list(_read_rows(rows, spec, tokenizer))
    if not items:
        raise DataError(f"{rows} holds no rows; give one JSON object per line.")
    with TeacherFleet.connect(endpoints, settings=chosen, client="score") as fleet:
        if out is not None and fleet.recorded:
            raise DataError(
                f"{endpoints} is a store of scores, not a live fleet; copy its folder, or name live servers to fill "
                f"{out}."
            )
        served = sorted(fleet.teachers())
        if not teacher and len(served) > 1:
            raise DataError(f"the fleet serves {', '.join(served)}; name one with --teacher.")
        name = teacher or served[0]
        scores = fleet.score(name, items, spec, temperature=temperature)
        # Hidden states are useless without the head; asking for the head puts it into the store.
        if payload == "hidden" and out is not None:
            fleet.head(name)
    if out is None:
        for line in _lines(scores):
            echo(line)
        return
    _check_stored(out, name, items, spec, temperature, scores)
    tokens = sum(item.response_length for item in items)
    size = sum(found.wire_bytes for found in scores)
    echo(f"{len(scores)} rows, {tokens} response tokens, {size} bytes of scores by {name!r} in {out}")


def _lines(scores: Sequence["Scores"]) -> Iterator[str]:
    for index, found in enumerate(scores):
        record: dict[str, Any] = {"row": index}
        if found.sampled is not None:
            record |= {"log_prob": _plain(found.sampled.sum()), "log_probs": _plain(found.sampled)}
        if found.ids is not None:
            record |= {"ids": found.ids.tolist(), "values": _plain(found.values), "log_tail": _plain(found.log_tail)}
        yield json.dumps(record, allow_nan=False)


def _plain(values: Any) -> Any:
    """Numbers as JSON can represent them: -inf and NaN become null."""
    import numpy as np

    numbers = np.asarray(values, np.float32)
    found = numbers.astype(object)
    found[~np.isfinite(numbers)] = None
    return found.tolist()


def _check_stored(
    out: Path,
    teacher: str,
    items: "Sequence[ScoreItem]",
    spec: "PayloadSpec",
    temperature: float,
    scores: "Sequence[Scores]",
) -> None:
    """Check that every row is in the store, because the cache that writes them only warns if the disk fails."""
    from opd.fleet.record.row import score_key
    from opd.fleet.record.store import ScoreStore

    keys = [score_key(found.weights_hash, item, spec, temperature) for item, found in zip(items, scores, strict=True)]
    with contextlib.closing(ScoreStore(out)) as store:
        missing = sum(key not in store for key in keys)
        info = store.teachers().get(teacher)
        headless = spec.kind == "hidden" and (info is None or store.head(info.head.hash) is None)
    if missing or info is None or headless:
        what = "the head" if headless and not missing else f"{missing} of {len(keys)} rows"
        raise RunFolderError(
            f"{what} of teacher {teacher!r} could not be stored in {out}; free space on its disk, or raise "
            "cache.max_bytes, and run again: rows that are stored already are not scored again."
        )


def _spec(payload: str, k: int, value_dtype: str) -> "PayloadSpec":
    from opd.wire.types import PayloadKind, PayloadSpec

    if payload not in list(PayloadKind):
        raise DataError(f"payload {payload!r} is unknown; use one of {', '.join(PayloadKind)}.")
    return PayloadSpec.named(payload, k, value_dtype)


def _read_rows(path: Path, spec: "PayloadSpec", tokenizer: str) -> Iterator["ScoreItem"]:
    import numpy as np

    from opd.wire.types import PayloadKind, ScoreItem

    encode = _encoder(tokenizer) if tokenizer else None
    gathers = spec.kind is PayloadKind.GATHER
    try:
        # Not `splitlines`, which also splits at characters that JSON allows within a string, such as U+2028.
        lines = path.read_text(encoding="utf-8").split("\n")
    except OSError as error:
        raise DataError(f"rows {path} cannot be read: {error.strerror}; check the path.") from error
    except UnicodeDecodeError as error:
        raise DataError(
            f"rows {path} are not UTF-8 text (byte {error.start}); give one JSON object per line."
        ) from error
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
            if not isinstance(row, dict):
                raise TypeError(f"it is {line.strip()[:60]}")
            if encode is not None and "prompt_ids" not in row:
                # Special tokens only once: the response continues where the prompt ends.
                prompt, response = encode(row["prompt"], True), encode(row["response"], False)
            else:
                prompt, response = _whole(row["prompt_ids"]), _whole(row["response_ids"])
            ids = np.array([*prompt, *response], dtype=np.uint32)
            gather = np.array([_whole(row_ids) for row_ids in row["gather_ids"]], dtype=np.uint32) if gathers else None
            spans = _spans(row.get("spans", []))
        except (ValueError, KeyError, TypeError, OverflowError) as error:
            wanted = "prompt_ids and response_ids" + (" and gather_ids" if gathers else "")
            hint = "" if tokenizer else "; rows of text need --tokenizer"
            reason = f"it has no key {error.args[0]!r}" if isinstance(error, KeyError) else error
            raise DataError(f"line {number} of {path} is not a row with {wanted}: {reason}{hint}.") from error
        yield ScoreItem(ids, len(prompt), gather, spans)


def _whole(ids: Any) -> list[int]:
    if not isinstance(ids, list) or not all(type(value) is int and 0 <= value < 2**32 for value in ids):
        raise TypeError(f"ids must be a list of whole numbers from 0 on, not {str(ids)[:60]}")
    return ids


def _spans(found: Any) -> tuple[tuple[int, int], ...]:
    if not isinstance(found, list) or not all(isinstance(one, list) and len(one) == 2 for one in found):
        raise TypeError(f"spans must be a list of pairs [start, end], not {str(found)[:60]}")
    return tuple((start, end) for start, end in map(_whole, found))


def _encoder(tokenizer: str) -> Any:
    """A function that takes (text, whether to add special tokens) and returns ids."""
    from opd.model_path import refuse_missing
    from opd.pretrained import read_tokenizer
    from opd.tasks.encode import encode_text

    refuse_missing(tokenizer)
    loaded = read_tokenizer(tokenizer)
    return lambda text, special: encode_text(text, loaded) if special else loaded.encode(text, add_special_tokens=False)
