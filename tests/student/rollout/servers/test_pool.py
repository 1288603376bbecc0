"""Which servers hold the weights after a sync."""

from dataclasses import replace
from typing import Any

import pytest
from other_weights import move
from server_engines import sync

from opd.errors import ConfigError
from opd.tasks.prompt import Prompt
from student.data.plan import plan_step
from student.rollout.servers.sglang import SglangDialect


@pytest.mark.parametrize("path", ["/model_info", "/update_weights_from_disk", "/generate"])
def test_a_server_whose_proxy_answers_with_a_page_is_left_out_of_a_sync(
    start: Any, open_engine: Any, path: str
) -> None:
    planned = plan_step(1, [Prompt.make("1+7=")], samples=8, max_new_tokens=6, temperature=1.0).rows
    steady, behind = start(), start()
    engine = open_engine(steady, behind)
    answer = behind.answer
    behind.answer = lambda asked, body: (200, None) if asked == path else answer(asked, body)
    sync(engine)
    assert [server.label for server in engine._pool.servers] == [engine._label, None]
    assert len(engine.sample(planned)) == 8
    behind.answer = answer
    move(engine.setup.model)
    sync(engine)
    assert [server.label for server in engine._pool.servers] == [engine._label] * 2


def test_a_head_with_more_padding_than_a_server_can_keep_from_being_drawn_is_refused(
    start: Any, open_engine: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = open_engine(start())
    known = SglangDialect.facts
    monkeypatch.setattr(SglangDialect, "facts", lambda *given, **more: replace(known(*given, **more), most_barred=1024))
    (server,) = engine._pool.servers
    engine._pool._look_at(server)
    engine.setup.model.config.vocab_size = 9000
    with pytest.raises(ConfigError, match=r"rows without a token, but .* at most 1024 ids"):
        engine._pool._look_at(server)
