import json
import tracemalloc
from contextlib import nullcontext
from datetime import date
from decimal import Decimal

import pyarrow
import pyarrow.parquet
import pytest

from opd.config import Settings, parse_settings
from opd.errors import ConfigError, DataError
from opd.tasks import FileSettings, PromptSettings, VerdictStatus, build_prompts


class Recipe(Settings):
    prompts: PromptSettings


@pytest.fixture
def rows():
    texts = [{"prompt": f"question {i}", "answer": i, "teacher": "a" if i % 2 else None} for i in range(40)]
    return [*texts, {"prompt": [{"role": "user", "content": "chat"}], "answer": "7"}]


def write_jsonl(path, rows):
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n\n")
    return path


def test_jsonl_rows_become_prompts_and_each_is_seen_once_per_epoch(tmp_path, rows):
    path = write_jsonl(tmp_path / "p.jsonl", rows)
    source = build_prompts(FileSettings(file=path, heldout=0.1, teacher="b", verifier="exact"), seed=3)
    heldout = source.prompts("heldout", 5)
    first, second = source.prompts("train", 36), source.prompts("train", 36, start=36)
    assert {prompt.uid for prompt in first} == {prompt.uid for prompt in second} and first != second
    assert len({prompt.uid for prompt in first + heldout}) == 41
    assert {prompt.teacher for prompt in first} == {"a", "b"}
    assert sum(prompt.is_chat for prompt in first + heldout) == 1
    assert source.prompts("train", 4, start=34) == (first + second)[34:38]


def test_an_answer_that_is_a_number_is_written_as_mathematics_reads_it(tmp_path):
    texts = {1e-05: "0.00001", 1e16: "10000000000000000", 2.5: "2.5", 3: "3"}
    path = write_jsonl(tmp_path / "p.jsonl", [{"prompt": text, "answer": number} for number, text in texts.items()])
    source = build_prompts(FileSettings(file=path, heldout=0, verifier="math"), seed=0)
    found = {prompt.text: source.verify(prompt, rf"\boxed{{{prompt.text}}}") for prompt in source.prompts("train", 4)}
    assert {text: verdict.status for text, verdict in found.items()} == dict.fromkeys(
        texts.values(), VerdictStatus.CORRECT
    )
    source.close()


def test_an_answer_within_an_object_is_named_by_its_path(tmp_path):
    row = {"prompt": "q", "reward_model": {"ground_truth": "34", "style": "rule"}}
    path = write_jsonl(tmp_path / "p.jsonl", [row, {"prompt": "r", "reward_model": None}])
    source = build_prompts(FileSettings(file=path, heldout=0, answer_column="reward_model.ground_truth"), seed=0)
    assert {prompt.text: prompt.answer for prompt in source.prompts("train", 2)} == {"q": "34", "r": None}
    with pytest.raises(DataError, match=r"line 1 has the answer \{.*; .* answer_column: reward_model\.ground_truth\."):
        build_prompts(FileSettings(file=path, answer_column="reward_model"), seed=0)


def test_parquet_gives_the_same_prompts_as_jsonl(tmp_path, rows):
    rows = [{**row, "answer": str(row["answer"])} for row in rows[:-1]]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "p.parquet")
    lines = build_prompts(FileSettings(file=write_jsonl(tmp_path / "p.jsonl", rows)), seed=0)
    table = build_prompts(FileSettings(file=tmp_path / "p.parquet"), seed=0)
    assert table.prompts("train", 20) == lines.prompts("train", 20)


def test_chat_messages_in_parquet_are_read(tmp_path):
    rows = [{"prompt": [{"role": "user", "content": f"q{i}"}]} for i in range(3)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "p.parquet")
    source = build_prompts(FileSettings(file=tmp_path / "p.parquet", heldout=0), seed=0)
    assert {prompt.messages[0]["content"] for prompt in source.prompts("train", 3)} == {"q0", "q1", "q2"}


def test_columns_that_json_has_not_are_kept_as_text_that_checkpoints_and_environments_take(tmp_path):
    played = {
        "prompt": "p",
        "environment": {"name": "lock"},
        "when": date(2026, 1, 2),
        "of": [{"cost": Decimal("1.5")}],
    }
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([played]), tmp_path / "p.parquet")
    (prompt,) = build_prompts(FileSettings(file=tmp_path / "p.parquet", heldout=0), seed=0).prompts("train", 1)
    assert prompt.extra["when"] == "2026-01-02" and prompt.extra["of"] == [{"cost": "1.5"}]
    assert json.loads(json.dumps(prompt.extra)) == prompt.extra


@pytest.mark.parametrize("environment", ["lock", {}, {"name": None}, ["lock"], {"name": "lock", "options": "deep"}])
def test_an_environment_that_is_not_named_is_refused_with_its_line(tmp_path, environment):
    (tmp_path / "p.jsonl").write_text('{"prompt": "a"}\n' + json.dumps({"prompt": "b", "environment": environment}))
    with pytest.raises(DataError, match=r"p\.jsonl line 2 .*environment .*\{\"name\""):
        build_prompts(FileSettings(file=tmp_path / "p.jsonl"), seed=0)


def test_a_path_that_is_text_is_refused_because_its_letters_would_be_played(tmp_path):
    (tmp_path / "p.jsonl").write_text(json.dumps({"prompt": "a", "environment": {"name": "lock"}, "path": "open"}))
    with pytest.raises(DataError, match=r"p\.jsonl line 1 .*path 'open'"):
        build_prompts(FileSettings(file=tmp_path / "p.jsonl"), seed=0)


def test_rows_of_a_parquet_file_have_the_options_of_their_own_environment_alone(tmp_path):
    played = [{"name": "lock", "options": {"digits": 3}}, {"name": "rooms", "options": {"depth": 2}}]
    rows = [{"prompt": one["name"], "environment": one} for one in played]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), tmp_path / "p.parquet")
    source = build_prompts(FileSettings(file=tmp_path / "p.parquet", heldout=0), seed=0)
    found = {prompt.text: prompt.extra["environment"] for prompt in source.prompts("train", 2)}
    assert found == {one["name"]: one for one in played}


def test_a_local_dataset_folder_is_read(tmp_path, rows, monkeypatch):
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    from opd.tasks import DatasetSettings

    (tmp_path / "data").mkdir()
    write_jsonl(tmp_path / "data" / "train.jsonl", [{"q": f"question {i}", "answer": str(i)} for i in range(20)])
    import datasets

    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    source = build_prompts(DatasetSettings(dataset=str(tmp_path / "data"), prompt_column="q"), seed=0)
    assert {prompt.text for prompt in source.prompts("train", 19)} < {f"question {i}" for i in range(20)}


def test_repeated_content_never_crosses_the_split(tmp_path):
    rows = [{"prompt": f"question {i % 10}", "answer": str(i)} for i in range(100)]
    source = build_prompts(FileSettings(file=write_jsonl(tmp_path / "p.jsonl", rows), heldout=0.3), seed=0)
    heldout = {prompt.text for prompt in source.prompts("heldout", 3)}
    assert len(heldout) == 3 and not heldout & {prompt.text for prompt in source.prompts("train", 200)}


def test_prompts_of_the_heldout_file_leave_training(tmp_path):
    train = write_jsonl(tmp_path / "p.jsonl", [{"prompt": f"question {i}"} for i in range(10)])
    heldout = write_jsonl(tmp_path / "h.jsonl", [{"prompt": f"question {i}"} for i in range(7, 12)])
    source = build_prompts(FileSettings(file=train, heldout_file=heldout), seed=0)
    assert {prompt.text for prompt in source.prompts("train", 30)} == {f"question {i}" for i in range(7)}
    assert len(source.prompts("heldout", 5)) == 5


def test_prompts_without_an_answer_are_unknown(tmp_path):
    path = write_jsonl(tmp_path / "p.jsonl", [{"prompt": "a"}, {"prompt": "b"}])
    source = build_prompts(FileSettings(file=path, verifier="exact"), seed=0)
    assert source.verify(source.prompts("train", 1)[0], "x").status is VerdictStatus.UNKNOWN


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('{"prompt": "a"}\n{broken\n', r"line 2 is not valid JSON"),
        ('{"prompt": "a"}\n[1]\n', r"line 2 is a list"),
        ('{"question": "a"}\n', r"line 1 has no 'prompt', but 'question'; set prompt_column"),
        ('{"prompt": ""}\n', r"line 1: a prompt is an empty string"),
        ('{"prompt": 3}\n', r"line 1: a prompt is '3', which is neither text nor a list of chat messages"),
        ('{"prompt": {"role": "user"}}\n', r"line 1: a prompt is .* which is neither text nor a list"),
        ('{"prompt": "ab\\ud800"}\n', r"line 1: a prompt holds half a surrogate pair at character 2"),
        ('{"prompt": [{"role": "user", "content": "\\ud800"}]}\n', r"line 1: a prompt holds half a surrogate pair"),
        (
            '{"prompt": "a", "answer": "b\\ud800"}\n',
            r"line 1: the answer of a prompt holds half a surrogate pair at",
        ),
        ('{"prompt": "a", "domain": "\\ud800"}\n', r"line 1: the domain of a prompt holds half a surrogate pair"),
        ('{"prompt": ' + "[" * 100_000, r"line 1 is not valid JSON"),
        ("", r"leaves no prompt to train on"),
    ],
)
def test_damaged_files_are_refused_with_the_line(tmp_path, text, message):
    path = tmp_path / "p.jsonl"
    path.write_text(text)
    with pytest.raises(DataError, match=message):
        build_prompts(FileSettings(file=path), seed=0)


class Untimed:
    """A verifier whose class takes no timeout."""

    def verify(self, prompt, completion):
        return completion == prompt.answer

    def close(self): ...


def test_a_verifier_that_cannot_be_made_is_refused(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_text('{"prompt": "a"}\n')
    with pytest.raises(ConfigError, match=r"test_table:Untimed' .*timeout: .* __init__"):
        build_prompts(FileSettings(file=path, verifier=f"{__name__}:Untimed"), seed=0)


def test_a_byte_order_mark_is_no_part_of_the_data(tmp_path):
    path = tmp_path / "p.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\n')
    (prompt,) = build_prompts(FileSettings(file=path), seed=0).prompts("train", 1)
    assert prompt.text == "a"


def test_missing_and_foreign_files_are_refused(tmp_path):
    with pytest.raises(DataError, match="does not exist"):
        build_prompts(FileSettings(file=tmp_path / "none.jsonl"), seed=0)
    with pytest.raises(DataError, match=r"neither \.jsonl nor \.parquet"):
        build_prompts(FileSettings(file=tmp_path / "p.csv"), seed=0)
    (tmp_path / "p.parquet").write_bytes(b"not parquet")
    with pytest.raises(DataError, match="read as parquet"):
        build_prompts(FileSettings(file=tmp_path / "p.parquet"), seed=0)


def test_wanting_more_heldout_prompts_than_there_are_says_so(tmp_path, rows):
    source = build_prompts(FileSettings(file=write_jsonl(tmp_path / "p.jsonl", rows)), seed=0)
    with pytest.raises(DataError, match="3 held-out prompts, but 10"):
        source.prompts("heldout", 10)


@pytest.mark.parametrize(
    ("prompts", "kind"),
    [
        ({"file": "p.jsonl"}, "FileSettings"),
        ({"dataset": "org/name"}, "DatasetSettings"),
        ({"task": "addition", "options": {"digits": 3}}, "TaskSettings"),
        ({"mix": [{"task": "addition"}, {"file": "p.jsonl", "weight": 3}]}, "MixSettings"),
    ],
)
def test_one_key_tells_the_kind_of_source(prompts, kind):
    parsed = parse_settings(Recipe, {"prompts": prompts})
    assert type(parsed.prompts).__name__ == kind
    assert parse_settings(Recipe, parsed.model_dump(mode="json")) == parsed


def test_bad_prompt_settings_are_one_sentence():
    with pytest.raises(ConfigError, match=r"exactly one .*dataset, .*mix"):
        parse_settings(Recipe, {"prompts": {"tusk": "addition"}})
    with pytest.raises(ConfigError, match=r"exactly one .*dataset, .*mix"):
        parse_settings(Recipe, {"prompts": {"file": "p.jsonl", "task": "addition"}})
    with pytest.raises(ConfigError, match=r"'prompts\.verifer'.*did you mean 'verifier'"):
        parse_settings(Recipe, {"prompts": {"file": "p.jsonl", "verifer": "math"}})
    with pytest.raises(ConfigError, match="verifier 'maths'; did you mean 'math'"):
        build_prompts(FileSettings(file="p.jsonl", verifier="maths"), seed=0)


def test_labels_are_those_of_every_row(tmp_path):
    rows = [{"prompt": f"question {i}", "teacher": "a", "domain": "x"} for i in range(2000)]
    rows += [{"prompt": "the last one", "domain": "rare"}]
    source = build_prompts(FileSettings(file=write_jsonl(tmp_path / "p.jsonl", rows)), seed=0)
    assert source.labels() == {("a", "x"), (None, "rare")}


def test_questions_become_chats_with_system_message_and_template_options(tmp_path):
    path = write_jsonl(tmp_path / "p.jsonl", [{"prompt": f"q{i}"} for i in range(4)])
    settings = {"file": str(path), "chat": True, "system": "be brief", "template_options": {"enable_thinking": False}}
    source = build_prompts(parse_settings(Recipe, {"prompts": settings}).prompts, seed=0)
    prompt = source.prompts("train", 1)[0]
    assert [message["role"] for message in prompt.messages] == ["system", "user"]
    assert prompt.template_options == {"enable_thinking": False}
    plain = build_prompts(FileSettings(file=path, chat=True), seed=0)
    assert [p.content_hash for p in plain.prompts("heldout", 1)] == [
        p.content_hash for p in source.prompts("heldout", 1)
    ]
    assert prompt.uid not in {p.uid for p in plain.prompts("train", 3)}


def test_a_system_message_before_plain_text_is_refused_with_its_line(tmp_path):
    path = write_jsonl(tmp_path / "p.jsonl", [{"prompt": "q"}] * 2)
    with pytest.raises(DataError, match=r"p\.jsonl line 1: .*system message .* chat: true"):
        build_prompts(FileSettings(file=path, system="be brief"), seed=0)


def test_a_chat_that_ends_with_the_assistant_is_refused_with_its_line(tmp_path):
    chat = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}]
    path = write_jsonl(tmp_path / "p.jsonl", [{"prompt": chat[:1]}, {"prompt": chat}])
    with pytest.raises(DataError, match=r"p\.jsonl line 2: .*from the assistant"):
        build_prompts(FileSettings(file=path), seed=0)


def test_arguments_of_the_rendering_are_no_template_options():
    with pytest.raises(ConfigError, match=r"tokenize .*template_options"):
        parse_settings(Recipe, {"prompts": {"file": "p.jsonl", "template_options": {"tokenize": False}}})


def test_memory_holds_where_rows_are_and_not_the_rows(tmp_path):
    rows = [{"prompt": f"question {i} " + "x" * 200, "answer": str(i)} for i in range(3000)]
    settings = FileSettings(file=write_jsonl(tmp_path / "p.jsonl", rows), heldout=0.1)
    build_prompts(settings, seed=0)  # what is imported for it is not counted
    tracemalloc.start()
    try:
        source = build_prompts(settings, seed=0)
        source.prompts("train", 10)
        held, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert held < 60 * len(rows)  # a prompt takes 900
    assert source.limit(lambda prompts: [len(prompt.text) for prompt in prompts], 213, drop=True) == 2000


def test_a_file_put_in_the_place_of_another_changes_nothing_and_one_that_changes_is_noticed(tmp_path, rows):
    path = write_jsonl(tmp_path / "p.jsonl", rows)
    source = build_prompts(FileSettings(file=path, heldout=0), seed=0)
    before = source.prompts("train", 41)
    write_jsonl(tmp_path / "other.jsonl", rows[:3]).replace(path)
    assert source.prompts("train", 41) == before
    source = build_prompts(FileSettings(file=path, heldout=0), seed=0)
    path.write_text(path.read_text().replace("question", "quotient"))
    with pytest.raises(DataError, match="has changed since"):
        source.prompts("train", 1)


@pytest.mark.parametrize("split", ["train", "other"])
@pytest.mark.parametrize("several", [False, True])
def test_a_dataset_that_was_saved_to_disk_is_read(tmp_path, split, several):
    import datasets

    from opd.tasks import DatasetSettings

    saved = datasets.Dataset.from_list([{"prompt": f"question {i}", "answer": str(i)} for i in range(4)])
    (datasets.DatasetDict({"train": saved}) if several else saved).save_to_disk(str(tmp_path / "data"))
    settings = DatasetSettings(dataset=str(tmp_path / "data"), heldout=0, split=split)
    with nullcontext() if split == "train" else pytest.raises(DataError, match="no split 'other', but 'train'"):
        assert len({prompt.text for prompt in build_prompts(settings, seed=0).prompts("train", 4)}) == 4


def test_an_answer_in_a_list_is_named_by_its_place(tmp_path):
    file = write_jsonl(tmp_path / "p.jsonl", [{"prompt": "a", "answer": ["4", "5"]}])
    with pytest.raises(DataError, match=r"line 1 .*answer .*answer\.0"):
        build_prompts(FileSettings(file=file, heldout=0), seed=0)
    source = build_prompts(FileSettings(file=file, heldout=0, answer_column="answer.0"), seed=0)
    assert source.prompts("train", 1)[0].answer == "4"


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"prompt": "a", "anwser": "1"}, "'anwser' (did you mean 'answer'?)"),
        ({"prompt": "a", "answer": "1", "messages": [], "images": ["x"], "id": 3}, "'images', 'messages'"),
        ({"prompt": "a", "answer": "1", "system": "b"}, "'system'"),
        ({"prompt": "a", "answer": "1", "system": None, "id": 3, "source": "c"}, None),
    ],
)
def test_columns_that_are_meant_for_a_trainer_but_not_read_are_named(tmp_path, caplog, row, said):
    build_prompts(FileSettings(file=write_jsonl(tmp_path / "p.jsonl", [row]), heldout=0), seed=0)
    found = [record.args[1] for record in caplog.records if record.name == "opd.tasks.table"]
    assert found == ([] if said is None else [said])


def test_prompts_that_a_table_asks_again_are_counted_once_in_the_log(tmp_path, caplog):
    path = write_jsonl(tmp_path / "p.jsonl", [{"prompt": f"question {i % 5}", "answer": i} for i in range(8)])
    source = build_prompts(FileSettings(file=path, heldout=0), seed=0)
    source.prompts("train", 20)
    (said,) = [record.getMessage() for record in caplog.records if record.name == "opd.tasks.table"]
    assert said == f"{path} asks some prompts again: 3 of its 8 rows repeat the prompt of another row"
