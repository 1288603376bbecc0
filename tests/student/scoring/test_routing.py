import numpy as np
import pytest

from opd.errors import ConfigError
from opd.wire.types import Scores
from student.scoring.routing import Destination, Router, RouteRule, RoutingSettings, mix_scores

SERVED = ["code", "math", "reference"]


def router(**settings: object) -> Router:
    return Router(RoutingSettings.model_validate(settings), SERVED)


def test_the_column_goes_before_rules_and_rules_before_the_default() -> None:
    r = router(rules=[{"when": {"domain": "code"}, "teacher": "code"}], default="reference")
    assert r.route({"teacher": "math", "domain": "code"}).single == "math"
    assert r.route({"domain": "code"}).single == "code"
    assert r.route({"domain": "poetry"}).single == "reference"
    assert r.route({"teacher": "", "domain": "code"}).single == "code"


def test_an_unmapped_prompt_is_an_error_that_names_it() -> None:
    with pytest.raises(ConfigError, match=r"domain 'poetry'; set teachers\."):
        router().route({"domain": "poetry", "prompt": "long text"})
    with pytest.raises(ConfigError, match=r"neither teacher nor domain; .*teachers\.default"):
        router().route({"teacher": None, "domain": None})


def test_rules_take_the_first_match_with_wildcards_and_lists() -> None:
    r = router(
        rules=[
            {"when": {"domain": ["algebra", "geometry"], "level": "[12]"}, "teacher": "math"},
            {"when": {"domain": "py*"}, "teacher": "code"},
        ],
        default="reference",
    )
    assert r.route({"domain": "geometry", "level": 2}).single == "math"
    assert r.route({"domain": "geometry", "level": 3}).single == "reference"
    assert r.route({"domain": "python"}).single == "code"


def test_weights_are_normalised_and_combination_is_data() -> None:
    r = router(default={"math": 3, "code": 1}, combine="divergence")
    assert r.route({}) == Destination((("code", 0.25), ("math", 0.75)), "divergence")
    assert r.route({}).single is None
    assert r.route({"teacher": {"math": 2.0}}).parts == (("math", 1.0),)
    # As a table gives a mapping in which a row lacks a key.
    assert r.route({"teacher": {"math": 2.0, "code": None}}).parts == (("math", 1.0),)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"default": "maths"}, "did you mean 'math'"),
        ({"rules": [{"when": {}, "teacher": "x" * 9}]}, "route 1 names teacher .* served: code, math, reference"),
        ({"default": {"math": 0.0}}, "weights must be positive"),
        ({"default": {"math": -1.0}}, "weights must be positive"),
        ({"default": {}}, "must be a teacher's name"),
    ],
)
def test_a_route_that_cannot_work_is_refused_at_once(settings: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        router(**settings)


def test_a_wildcard_does_not_match_a_column_that_a_prompt_lacks() -> None:
    r = router(rules=[{"when": {"domain": "*"}, "teacher": "code"}], default="reference")
    assert r.route({"domain": "any"}).single == "code"
    assert r.route({"domain": None}).single == r.route({}).single == "reference"


@pytest.mark.parametrize(
    ("named", "message"),
    [
        (7, "is 7; it must be a teacher's name or a mapping"),
        ({"math": True}, "the weight True; weights must be positive"),
        ({"math": "2"}, "the weight '2'; weights must be positive"),
        ({"math": float("inf")}, "the weight inf; weights must be positive"),
        ({"math": float("nan")}, "the weight nan; weights must be positive"),
    ],
)
def test_a_column_that_holds_something_else_than_teachers_is_refused(named: object, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        router().route({"teacher": named})


def test_a_column_that_names_nobody_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"column 'teacher' .*'maht'"):
        router().route({"teacher": "maht"})
    assert RouteRule(when={"a": "b"}, teacher="math").teacher == "math"


def part(seed: int, gather: np.ndarray, vocab: int = 11) -> tuple[np.ndarray, Scores]:
    logits = np.random.default_rng(seed).normal(size=(4, vocab)) * 3
    p = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    picked = np.take_along_axis(p, gather, -1)
    return p, Scores(
        sampled=np.log(p[:, 2]).astype(np.float32),
        values=np.log(picked).astype(np.float32),
        ids=gather.astype(np.uint32),
        log_tail=np.log(1 - picked.sum(-1)).astype(np.float32),
        weights_hash=str(seed),
    )


def test_a_mixture_is_the_mixture_of_the_distributions_with_its_tail() -> None:
    gather = np.array([[0, 5, 7]] * 4)
    (p, one), (q, two) = part(1, gather), part(2, gather)
    mixed = mix_scores([(one, 0.3), (two, 0.7)])
    m = 0.3 * p + 0.7 * q
    picked = np.take_along_axis(m, gather, -1)
    assert mixed.values is not None and mixed.log_tail is not None and mixed.sampled is not None
    np.testing.assert_allclose(mixed.values, np.log(picked), atol=1e-5)
    np.testing.assert_allclose(mixed.log_tail, np.log(1 - picked.sum(-1)), atol=1e-5)
    np.testing.assert_allclose(mixed.sampled, np.log(m[:, 2]), atol=1e-5)
    assert mixed.weights_hash == "1+2"


def test_a_teacher_that_excludes_a_token_leaves_the_others_share() -> None:
    one = Scores(sampled=np.array([-np.inf, -np.inf], np.float32))
    two = Scores(sampled=np.array([-1.0, -np.inf], np.float32))
    mixed = mix_scores([(one, 0.5), (two, 0.5)])
    assert mixed.sampled is not None
    np.testing.assert_allclose(mixed.sampled, [-1.0 + np.log(0.5), -np.inf])


def test_a_mixture_that_is_not_determined_is_refused() -> None:
    _, one = part(1, np.array([[0, 5, 7]] * 4))
    _, two = part(2, np.array([[0, 5, 8]] * 4))
    with pytest.raises(ValueError, match="same ids"):
        mix_scores([(one, 0.5), (two, 0.5)])
    with pytest.raises(ValueError, match=r"sum to 0\.8"):
        mix_scores([(one, 0.5), (one, 0.3)])
    with pytest.raises(ValueError, match="sampled or gather"):
        mix_scores([(Scores(hidden=np.zeros((2, 2), np.float32)), 1.0)])
