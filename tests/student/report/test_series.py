import re

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from opd.errors import ConfigError
from student.report.series import Series, gauge_name

METRICS = {
    "reverse_kl": 0.5,
    "student_entropy": 1.0,
    "student_head_mass": 0.9,
    "truncation_rate": 0.1,
    "learning_rate": 1e-3,
    "response_length": 9.0,
    "response_tokens": 100.0,
    "payload_bytes": 5.0,
    "payload_bytes_per_token": 3.0,
    "tokens_per_second": 3.0,
    "eval/accuracy": 0.25,
    "eval/reverse_kl": 0.4,
    "loss/opd": 0.3,
    "by_position/reverse_kl/64": 0.2,
    "cost/train/sampled_tokens": 7.0,
    "domain_tokens/sums": 40.0,
    "teacher_tokens/none": 60.0,
}


def test_names_end_in_their_unit() -> None:
    expected = {
        "reverse_kl": "opd_student_reverse_kl_nats",
        "eval/reverse_kl": "opd_student_eval_reverse_kl_nats",
        "eval/accuracy": "opd_student_eval_accuracy_ratio",
        "truncation_rate": "opd_student_truncation_rate_ratio",
        "learning_rate": "opd_student_learning_rate",
        "response_length": "opd_student_response_length_tokens",
        "tokens_per_second": "opd_student_tokens_per_second",
    }
    assert {name: gauge_name(name) for name in expected} == expected


def test_counters_add_up_and_gauges_show_the_latest_step() -> None:
    registry = CollectorRegistry()
    series = Series(registry)
    for _ in range(2):
        series.record(METRICS, {"rollout": 1.5})
    assert registry.get_sample_value("opd_student_steps_total") == 2
    assert registry.get_sample_value("opd_student_response_tokens_total") == 200
    assert registry.get_sample_value("opd_student_reverse_kl_nats") == 0.5
    assert registry.get_sample_value("opd_student_loss_nats", {"term": "opd"}) == 0.3
    later = {"divergence": "reverse_kl", "position": "64"}
    assert registry.get_sample_value("opd_student_divergence_by_position_nats", later) == 0.2
    labels = {"purpose": "train", "kind": "sampled"}
    assert registry.get_sample_value("opd_student_cost_tokens_total", labels) == 14
    assert registry.get_sample_value("opd_student_domain_tokens_total", {"domain": "sums"}) == 80
    assert registry.get_sample_value("opd_student_teacher_tokens_total", {"teacher": "none"}) == 120
    assert registry.get_sample_value("opd_student_stage_seconds_sum", {"stage": "rollout"}) == 3.0


def test_an_evaluation_before_the_first_step_is_shown_and_counts_no_step() -> None:
    registry = CollectorRegistry()
    Series(registry).show({"eval/accuracy": 0.25})
    assert registry.get_sample_value("opd_student_eval_accuracy_ratio") == 0.25
    assert registry.get_sample_value("opd_student_steps_total") == 0


def test_every_series_has_a_help_text_and_a_legal_name() -> None:
    registry = CollectorRegistry()
    Series(registry).record(METRICS, {"rollout": 1.5})
    page = generate_latest(registry).decode()
    names = set(re.findall(r"^# HELP (\S+) \S+", page, re.M))
    assert (
        all(re.fullmatch(r"(opd_student|process)_[a-z0-9_]+|opd_build_info", name) for name in names)
        and len(names) > 12
    )


@pytest.mark.parametrize("name", ["steps", "stage_seconds", "cost_tokens", "mode/tokens/a/b/c", "by_position/kl"])
def test_a_metric_of_a_plug_in_with_a_name_of_the_students_own_is_refused_by_name_and_with_a_fix(name: str) -> None:
    with pytest.raises(ConfigError, match=f"metric '{name}' .*my_plugin/value") as caught:
        Series(CollectorRegistry()).record({name: 1.0}, {})
    assert "CollectorRegistry" not in str(caught.value)
