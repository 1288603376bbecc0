"""A fleet of teachers: is it reachable and encrypted, do its replicas agree, and how fast is it?"""

import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from opd.doctor.finding import Finding, Level
from opd.errors import OpdError

if TYPE_CHECKING:
    from opd.fleet.settings import FleetSettings

_PROBE_ROWS, _PROBE_TOKENS = 16, 64


def examine_fleet(
    endpoints: list[str], settings: "FleetSettings | None" = None, student: str = "", questions: Sequence[str] = ()
) -> Iterator[Finding]:
    """Findings about encryption, identity, agreement and speed of every teacher, and how a student's answers end."""
    import numpy as np

    from opd.doctor.tls import examine_tls
    from opd.fleet.client import TeacherFleet
    from opd.wire.channel import ClientSecurity
    from opd.wire.types import PayloadSpec, ScoreItem

    examiner = None
    if student:
        from opd.doctor.stops import StopExaminer

        examiner = StopExaminer(student, questions)
        yield Finding("ok" if examiner.stops.ids else "note", "student", examiner.stops.describe())
    yield from examine_tls(endpoints, ClientSecurity() if settings is None else settings.security)
    try:
        fleet = TeacherFleet.connect(endpoints, settings=settings, client="doctor")
    except OpdError as error:
        yield Finding("fail", "fleet", str(error))
        return
    with fleet:
        fleet.settle()  # connect returns with the first replica of every teacher
        for name, info in fleet.teachers().items():
            yield Finding("ok", name, f"{info.engine}, {info.model}, weights {info.weights_hash[:12]}")
            if not info.tokenizer.fingerprint:
                yield Finding(
                    "note", name, "was loaded without a tokenizer, so students cannot check that theirs is the same"
                )
            try:
                report = fleet.verify(name)
                length = min(_PROBE_TOKENS, info.limits.max_sequence_tokens)
                ids = np.arange(length, dtype=np.uint32) % max(1, info.tokenizer.size or info.vocab_size)
                begin = time.monotonic()
                fleet.score(name, [ScoreItem(ids, 1)] * _PROBE_ROWS, PayloadSpec.sampled())
                speed = _PROBE_ROWS * length / (time.monotonic() - begin)
            except OpdError as error:
                yield Finding("fail", name, str(error))
                continue
            level: Level = "ok" if report.agrees else "fail"
            yield Finding(level, name, f"{report.sentence()} Probe of {_PROBE_ROWS} rows: {speed:,.0f} tokens/s")
            try:
                for well, text in examiner.examine(fleet, info) if examiner is not None else ():
                    yield Finding("ok" if well else "note", name, text)
            except OpdError as error:  # of this teacher only: the others are examined all the same
                yield Finding("fail", name, str(error))
