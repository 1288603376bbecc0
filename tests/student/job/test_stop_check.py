"""What ranks find out about stop tokens before the first step."""

from types import SimpleNamespace
from typing import Any

import numpy as np
from rows import make_row
from thread_ranks import SOURCE, of_each

from opd.wire.types import PayloadKind, Scores
from opd.wire.v1 import teacher_pb2 as pb
from student.data.needs import TEACHER
from student.data.row import Row
from student.job.stop_check import StopCheck
from student.model.ranks import Ranks

END = 1


class ReadTogether:
    """A scorer whose ranks read together, as those of a sharded student do."""

    def __init__(self, ranks: Ranks) -> None:
        self._ranks = ranks

    def ask(self, row: Row) -> None:
        row.teacher = "teacher"
        row.signals[TEACHER, PayloadKind.SAMPLED] = Scores(sampled=np.full(row.length, -0.5, np.float32))

    def wait(self, rows: list[Row], *, poll: Any) -> None:
        self._ranks.gather(len(rows))

    def head_of(self, role: str, row: Row) -> Any:
        raise AssertionError("hidden states were not asked for")


def test_a_rank_without_an_ended_answer_asks_as_often_as_the_others() -> None:
    recipe: Any = SimpleNamespace(
        rollout=SimpleNamespace(max_new_tokens=4, temperature=1.0), teachers=SimpleNamespace(map_stops=False)
    )
    info = pb.TeacherInfo(supports_temperature=True, payloads=[pb.PAYLOAD_KIND_GATHER], stop_token_ids=[END, 7])

    def lines(ranks: Ranks) -> list[str]:
        def sample(planned: Any, *, purpose: object) -> list[Row]:
            ends = END if ranks.index else END + 1
            return [make_row([3, ends], prompt=one.prompt, behaviour=-0.25) for one in planned]

        sampler: Any = SimpleNamespace(sample=sample)
        scorer: Any = ReadTogether(ranks)
        check = StopCheck(recipe, sampler, SOURCE, {"teacher": info}, [END], lambda needs, stops: scorer)
        return ranks.agree(lambda: list(check.lines(lambda: None)))

    (without,), (found,) = of_each(lines, count=2)
    assert "none of 8 answers ended" in without
    assert "where 8 of 8 answers end, log T - log S is -0.25 nats (teacher)" in found
