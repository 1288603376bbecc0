from opd.tasks.verdict import Verdict, guarded


def test_a_reason_can_be_written_whatever_it_quotes() -> None:
    assert Verdict.of(False, "expected \ud800").reason == "expected \\ud800"
    assert Verdict.unknown("\u00e9 \u202e").reason == "\u00e9 \u202e"

    def check(*_: object) -> Verdict:
        raise ValueError("\udfff")

    assert guarded(check, None, "").reason.encode()  # type: ignore[arg-type]  # the prompt is not looked at
