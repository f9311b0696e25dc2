"""What is asked: every format, and what stands around a prompt; what is left out, and bad input."""

import gzip
import json
from dataclasses import replace
from pathlib import Path

import datasets
import numpy as np
import pytest
from write.write_kit import (
    CHATS,
    SETTINGS,
    PlayedWriter,
    folder_bytes,
    opened,
    rows_of,
    save_writer,
    write_prompts,
)

from vocagnolm.chat import messages_of
from vocagnolm.chat.messages import readable
from vocagnolm.errors import CorpusError, ScoreError, SettingError, StoreError, UsageError
from vocagnolm.score import (
    WriteSettings,
    WrittenAnswer,
    preview_answers,
    read_prompts,
    write_answers,
)
from vocagnolm.store import LossStore

ASKED = {"role": "user", "content": "What is 2+2?"}
GIVEN = {"role": "assistant", "content": "It is 4."}
RECORDS = {
    "text": {"text": "What is 2+2?"},
    "messages": {"messages": [ASKED]},
    "prompt": {"prompt": "What is 2+2?"},
    "prompt of messages": {"prompt": [ASKED]},
    "prompt and completion": {"prompt": "What is 2+2?", "completion": "It is 4."},
    "Alpaca": {"instruction": "What is", "input": "2+2?", "output": "4"},
    "Alpaca without an answer": {"instruction": "What is 2+2?", "input": ""},
    "ShareGPT": {"conversations": [{"from": "human", "value": "What is 2+2?"}]},
}


def lines(path: Path, rows: list) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def asked(paths, **reading) -> list[str]:
    return [
        prompt.problem or readable(prompt.text or "")
        for prompt in read_prompts(paths, **reading).read()
    ]


@pytest.mark.parametrize("name", RECORDS)
def test_every_format_is_read(tmp_path, name):
    expected = "What is\n\n2+2?" if name == "Alpaca" else "What is 2+2?"
    path = lines(tmp_path / "p.jsonl", [RECORDS[name]])
    assert asked(path) == [f"user: {expected}"]
    datasets.Dataset.from_list([RECORDS[name]]).to_parquet(tmp_path / "t" / "p.parquet")
    assert asked(tmp_path / "t") == [f"user: {expected}"]
    (tmp_path / "p.jsonl.gz").write_bytes(gzip.compress(path.read_bytes()))
    assert asked(tmp_path / "p.jsonl.gz") == [f"user: {expected}"]


def test_files_folders_and_text_files(tmp_path):
    """A folder as `datasets` has it, with its card; every line of a text file."""
    folder = tmp_path / "folder"
    (folder / "data").mkdir(parents=True)
    (folder / "README.md").write_text("---\nlicense: odc-by\n---\n# Prompts\n")
    lines(folder / "data" / "a.jsonl", [RECORDS["text"], RECORDS["messages"]])
    (tmp_path / "lines.txt").write_text("one\n\ntwo\n")
    assert asked([folder, tmp_path / "lines.txt"], split="line") == [
        *["user: What is 2+2?"] * 2,
        *("user: one", "user: two"),
    ]
    assert len(read_prompts([folder], limit_prompts=1)) == 1
    assert asked(lines(tmp_path / "q.jsonl", [{"question": "why?"}]), text_field="question") == [
        "user: why?"
    ]


def test_datasets_of_the_hub(monkeypatch):
    rows = [{**RECORDS["prompt"], "answer": 4, "level": "easy"}, RECORDS["prompt of messages"]]
    rows = [dict.fromkeys(("prompt", "answer", "level")) | row for row in rows]
    asked_for = []

    def load(repository, split):
        asked_for.append((repository, split))
        return rows

    monkeypatch.setattr(datasets, "load_dataset", load)
    prompts = list(read_prompts("owner/name:train", answer_field="answer").read())
    assert [prompt.expected for prompt in prompts] == ["4", None]
    assert [prompt.place for prompt in prompts] == ["owner/name:train[0]", "owner/name:train[1]"]
    assert asked_for == [("owner/name", "train")]


def test_longer_conversations_and_their_system_messages(tmp_path):
    talk = [{"role": "system", "content": "Be kind."}, ASKED, GIVEN, ASKED]
    (found,) = read_prompts(lines(tmp_path / "p.jsonl", [{"messages": talk}])).read()
    roles = [message.role for message in messages_of(found.text)]
    assert roles == ["system", "user", "assistant", "user"]
    path = lines(tmp_path / "a.jsonl", [{"messages": talk[:3]}])
    (reason,) = asked(path)
    assert reason.startswith("ends with the assistant: a prompt ends with the user. --drop-answers")
    assert asked(path, drop_answers=True) == ["system: Be kind.\nuser: What is 2+2?"]


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    return save_writer(tmp_path_factory.mktemp("teacher") / "t")


def seen(teacher, prompts, settings=SETTINGS, **reading) -> list[str]:
    return preview_answers(teacher, prompts, settings=settings, **reading).shown


def test_what_stands_before_a_prompt_is_read_and_not_kept(tmp_path, teacher):
    prompts = write_prompts(tmp_path / "p.jsonl", 4)
    examples = lines(tmp_path / "e.jsonl", [{"question": "one", "answer": "two"}])
    settings = replace(SETTINGS, system="Be brief.", examples=str(examples))
    (first, *_) = seen(teacher, prompts, settings)
    text = json.loads(prompts.read_text().splitlines()[0])["prompt"]
    assert first == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\none<|im_end|>\n"
        "<|im_start|>assistant\ntwo<|im_end|>\n"
        f"<|im_start|>user\n{text}<|im_end|>\n<|im_start|>assistant\n"
    )
    summary = write_answers(teacher, prompts, tmp_path / "out", settings=settings)
    writing = summary.folder["writing"]
    assert writing["system"] == "Be brief."
    assert writing["examples"] == [["user", "one"], ["assistant", "two"]]
    contents = [m["content"] for row in rows_of(tmp_path / "out") for m in row["messages"]]
    assert not {"Be brief.", "one"} & {*contents}
    card = (tmp_path / "out" / "README.md").read_text()
    assert "    system: Be brief.\n    user: one\n    assistant: two" in card
    plain = write_answers(teacher, prompts, tmp_path / "plain", settings=SETTINGS)
    assert plain.folder["writing"]["system"] is None
    assert rows_of(tmp_path / "plain") != rows_of(tmp_path / "out")
    with pytest.raises(StoreError, match=r"writing\.system.*\"Be brief\.\".*null"):
        write_answers(teacher, prompts, tmp_path / "out", settings=SETTINGS)


def test_a_model_without_a_template_continues_the_prompt_as_it_stands(tmp_path):
    model = save_writer(tmp_path / "t", chat=False)
    prompts = lines(tmp_path / "p.jsonl", [RECORDS["text"], {"messages": [ASKED, GIVEN, ASKED]}])
    examples = lines(tmp_path / "e.jsonl", [{"prompt": "one", "completion": "two"}])
    assert seen(model, prompts) == ["What is 2+2?"]
    assert seen(model, prompts, replace(SETTINGS, examples=str(examples), system="Be brief.")) == [
        "Be brief.\n\none\n\ntwo\n\nWhat is 2+2?"
    ]
    summary = write_answers(model, prompts, tmp_path / "out", settings=SETTINGS)
    (reason,) = {r["reason"] for r in summary.folder["skipped_documents"] if ":2" in r["place"]}
    assert (
        reason.startswith("no template: the prompt is a conversation")
        and "--chat-template" in reason
    )
    template = tmp_path / "c.jinja"
    template.write_text(CHATS["bytes"][0])
    (_, second) = seen(model, prompts, replace(SETTINGS, chat_template=str(template)))
    assert second.startswith("<|im_start|>user\nWhat is 2+2?<|im_end|>\n<|im_start|>assistant\n")


def test_texts_are_continued(tmp_path, teacher):
    texts = ["the sum of two numbers is a number and prime", "naïve café ½ 東京", "東"]
    prompts = lines(tmp_path / "p.jsonl", [{"text": text} for text in texts])
    write_answers(
        teacher, prompts, tmp_path / "out", settings=SETTINGS, continues=True, prompt_tokens=4
    )
    rows, store = rows_of(tmp_path / "out"), LossStore.open(tmp_path / "out")
    files, _ = opened(teacher)
    assert {row["prompt_index"] for row in rows} == {0, 1, 2} and len(rows) == len(store)
    for index, row in enumerate(rows):
        spans = files.tokenizer.spans(texts[row["prompt_index"]]).spans
        begin = next(
            end
            for end in spans[:4][::-1, 1].tolist()
            if len(texts[row["prompt_index"]].encode()[:end].decode(errors="ignore").encode())
            == end
        )
        head = texts[row["prompt_index"]].encode()[:begin].decode()
        assert row["text"].startswith(head) and len(row["text"]) > len(head)
        assert set(row) == {"text", "prompt_index", "answer_index", "finished"}
        known = store.columns(index)["nll"] == store.columns(index)["nll"]
        assert store.spans(index)[known][0, 0] == begin
    shown = seen(teacher, prompts, continues=True, prompt_tokens=4)
    assert shown[0] == rows[0]["text"][: len(shown[0])]
    with pytest.raises(UsageError, match="--continue goes on with texts: remove --system"):
        seen(teacher, prompts, replace(SETTINGS, system="a"), continues=True)


def test_an_instruction_asks_for_something_to_be_done_with_a_text(tmp_path, teacher):
    prompts = lines(
        tmp_path / "p.jsonl", [{"text": "ab {text}"}, {"messages": [ASKED, GIVEN, ASKED]}]
    )
    told = {"instruction": "Say it again: {text}!"}
    texts = asked(prompts, **told)
    assert texts[0] == "user: Say it again: ab {text}!"
    assert texts[1].startswith("messages: --instruction is for texts and single prompts")
    write_answers(teacher, prompts, tmp_path / "out", settings=SETTINGS, **told)
    assert {r["messages"][0]["content"] for r in rows_of(tmp_path / "out")} == {
        "Say it again: ab {text}!"
    }
    with pytest.raises(UsageError, match=r"'Say it.' has no \{text\}, where the text belongs"):
        read_prompts(prompts, instruction="Say it.")


def test_an_answer_ends_where_a_stop_text_appears(tmp_path, teacher):
    prompts = write_prompts(tmp_path / "p.jsonl", 6)
    whole = replace(SETTINGS, cut="keep", max_new_tokens=30)
    write_answers(teacher, prompts, tmp_path / "whole", settings=whole)
    write_answers(teacher, prompts, tmp_path / "out", settings=replace(whole, stop=["er", "re"]))
    without = {_place(row): row["messages"][1]["content"] for row in rows_of(tmp_path / "whole")}
    stopped = 0
    store = LossStore.open(tmp_path / "out")
    for index, row in enumerate(rows_of(tmp_path / "out")):
        text = without[_place(row)]
        ends = [text.find(stop) for stop in ("er", "re") if stop in text]
        assert row["messages"][1]["content"] == (text[: min(ends)] if ends else text)
        if ends:
            stopped += 1
            nll = store.columns(index)["nll"]
            assert row["finished"] and nll[-1] != nll[-1], "its end is nobody's token"
            assert (store.alternatives(index).packed[nll != nll] == 0xFFFFFFFF).all()
    assert stopped > 3
    with pytest.raises(SettingError, match="stop is ''"):
        replace(SETTINGS, stop=["a", ""])


def _place(row):
    return row["prompt_index"], row["answer_index"]


def test_cut_answers_are_dropped_or_kept_without_an_end(tmp_path, teacher):
    prompts = write_prompts(tmp_path / "p.jsonl", 6)
    short = replace(SETTINGS, max_new_tokens=4)
    dropped = write_answers(teacher, prompts, tmp_path / "drop", settings=short).folder
    kept = write_answers(
        teacher, prompts, tmp_path / "keep", settings=replace(short, cut="keep")
    ).folder
    cut = [row for row in rows_of(tmp_path / "keep") if not row["finished"]]
    assert cut and dropped["skipped_reasons"]["cut"] == len(cut)
    assert kept["documents"] == dropped["documents"] + len(cut)
    (reason,) = {
        r["reason"] for r in rows_of(tmp_path / "drop", "dropped") if r["reason"][:3] == "cut"
    }
    assert reason == "cut: not finished after 4 tokens"
    store = LossStore.open(tmp_path / "keep")
    for index, row in enumerate(rows_of(tmp_path / "keep")):
        nll = store.columns(index)["nll"]
        assert (nll[-1] == nll[-1]) == row["finished"]


class Telling(PlayedWriter):
    """Gives the answers that it was made with, to every prompt."""

    settings = replace(PlayedWriter.settings, samples=6)

    def __init__(self, *answers):
        super().__init__()
        self.answers = answers

    def write(self, reads, seeds, on_tokens=None):
        for number in range(len(reads)):
            for answer, said in enumerate(self.answers):
                about = {"refused": said[1]} if isinstance(said, tuple) else {}
                pieces = [] if about else [said.encode()]
                nll = np.full(len(pieces), 0.5, np.float32)
                yield (
                    number,
                    answer,
                    WrittenAnswer(pieces, nll, None, finished=True, ended=False, **about),
                )


def test_what_is_left_out_is_counted_and_kept_beside(tmp_path):
    prompts = lines(tmp_path / "p.jsonl", [{"prompt": "a"}, {"prompt": "b"}, {"other": 1}])
    endless = "again and again, " * 60
    teacher = Telling("yes", " \n", "yes ", endless, ("", "refused: it may not"), "a\x02b")
    folder = write_answers(teacher, prompts, tmp_path / "out").folder
    assert folder["documents"] == 2 and folder["skipped"] == 16
    kinds = ("empty", "same", "repetition", "refused", "control character")
    assert folder["skipped_reasons"] == {**dict.fromkeys(kinds, 2), "no field 'text'": 6}
    dropped = rows_of(tmp_path / "out", "dropped")
    assert [(r["prompt_index"], r["answer_index"]) for r in dropped] == [
        (prompt, answer) for prompt in (0, 1) for answer in (1, 2, 3, 4, 5)
    ]
    assert dropped[1]["reason"] == "same: as answer 0 to this prompt"
    assert dropped[2]["text"] == endless and dropped[3]["reason"] == "refused: it may not"


def test_prompts_that_hold_a_benchmark_s_question_are_left_out(tmp_path):
    question = "A baker makes 24 muffins and sells them for 2 dollars each on every market day"
    (tmp_path / "b" / "gsm8k").mkdir(parents=True)
    lines(
        tmp_path / "b" / "gsm8k" / "test.jsonl",
        [{"question": question, "answer": "#### 48"}, {"question": "How old?", "answer": "#### 3"}],
    )
    texts = [
        f"Tell me: {question.upper()}!",
        "A baker makes 24 muffins and sells them for 3 dollars each on every market day",
        "how  OLD",
        "How old are you?",
    ]
    prompts = lines(tmp_path / "p.jsonl", [{"text": text} for text in texts])
    reading = {"without": ["gsm8k"], "benchmarks": tmp_path / "b"}
    found = [prompt.problem for prompt in read_prompts(prompts, **reading).read()]
    reason = "benchmark: shares 13 words in a row with a question"
    assert found == [reason, None, reason, None]
    inside = read_prompts(
        prompts, **reading, instruction="Rephrase this text in other words: {text}"
    )
    assert [prompt.problem for prompt in inside.read()] == found
    summary = write_answers(PlayedWriter(), prompts, tmp_path / "out", **reading)
    assert summary.folder["skipped_reasons"]["benchmark"] == 2 * 3
    assert summary.folder["corpus"]["without"]["names"] == ["gsm8k"]
    with pytest.raises(StoreError, match=r"corpus\.without"):
        write_answers(PlayedWriter(), prompts, tmp_path / "out")
    with pytest.raises(UsageError, match="unknown task 'gms8k'"):
        read_prompts(prompts, without=["gms8k"])


def test_bad_input_is_one_clear_message_and_nothing_is_written(tmp_path, teacher):
    def refused(prompts, kind=CorpusError, settings=SETTINGS, **reading):
        with pytest.raises(kind) as raised:
            write_answers(teacher, prompts, tmp_path / "out", settings=settings, **reading)
        assert "\n" not in str(raised.value) and not (tmp_path / "out").exists()
        return str(raised.value)

    ends = lines(tmp_path / "a.jsonl", [{"messages": [ASKED, GIVEN]}])
    assert "none of the 1 prompts can be asked. The first, a.jsonl:1: ends with" in refused(ends)
    assert "--drop-answers" in refused(ends)
    assert "holds no prompts" in refused(lines(tmp_path / "none.jsonl", []))
    assert "does not exist" in refused(tmp_path / "missing.jsonl")
    prompts = write_prompts(tmp_path / "p.jsonl", 4)
    number = replace(SETTINGS, grade="number")
    assert "name their field with --answer-field" in refused(prompts, UsageError, number)
    said = refused(prompts, UsageError, number, answer_field="anwser")
    assert said == "--answer-field anwser: no prompt has a text or number there."
    said = refused(prompts, UsageError, number, answer_field="prompt")
    assert "--grade number does not fit the expected answers: that of p.jsonl:1 is 'na" in said
    long = replace(SETTINGS, max_new_tokens=600)
    assert "--max-new-tokens 600 leaves no room for prompts" in refused(prompts, UsageError, long)
    wide = replace(SETTINGS, context=4096)
    assert "--context 4096: t reads at most 512 tokens" in refused(prompts, UsageError, wide)
    examples = str(lines(tmp_path / "e.jsonl", [{"text": "one"}]))
    said = refused(prompts, UsageError, replace(SETTINGS, examples=examples))
    assert "e.jsonl:1 is no worked example: neither messages nor a prompt" in said


def test_prompts_that_are_too_long_or_broken_are_left_out_and_the_others_answered(
    tmp_path, teacher
):
    path = tmp_path / "p.jsonl"
    lines(path, [{"prompt": "a b " * 300}, {"prompt": "short"}])
    path.write_text(
        path.read_text() + "{broken\n" + json.dumps({"messages": [ASKED, GIVEN]}) + "\n"
    )
    folder = write_answers(teacher, path, tmp_path / "out", settings=SETTINGS).folder
    assert folder["skipped_reasons"]["too long"] == folder["skipped_reasons"]["not JSON"] == 3
    assert folder["skipped_reasons"]["ends with the assistant"] == 3
    assert {row["prompt_index"] for row in rows_of(tmp_path / "out")} == {1}
    (reason,) = {r["reason"] for r in folder["skipped_documents"] if r["place"] == "p.jsonl:1"}
    assert "tokens, and there is room for 492 (--context)" in reason
    lines(path, [{"prompt": "a b " * 300}])
    with pytest.raises(ScoreError, match=r"none of the 1 prompts has an answer.*too long"):
        write_answers(teacher, path, tmp_path / "none", settings=SETTINGS)


def test_answers_without_an_expected_one_are_not_marked(tmp_path):
    rows = [{"prompt": "a", "answer": 7}, {"prompt": "b"}, {"prompt": "c", "answer": ["7"]}]
    prompts = lines(tmp_path / "p.jsonl", rows)
    teacher = Telling(*["The answer is 7.", "The answer is 8.", "7", "8", "9", "10"])
    teacher.settings = replace(teacher.settings, grade="number")
    write_answers(teacher, prompts, tmp_path / "out", answer_field="answer")
    marks = {}
    for row in rows_of(tmp_path / "out"):
        marks.setdefault(row["prompt_index"], []).append(row.get("right"))
    assert marks == {0: [True, False, True, False, False, False], 1: [None] * 6, 2: [None] * 6}
    written = LossStore.open(tmp_path / "out").written
    assert written["marked_answers"] == 6 and written["right_answers"] == 2
    assert (written["marked_prompts"], written["solved_prompts"]) == (1, 1)
    assert written["prompts_by_right_answers"] == [0, 0, 1, 0, 0, 0, 0]


def test_equal_prompts_get_other_answers_and_other_seeds_too(tmp_path, teacher):
    prompts = lines(tmp_path / "p.jsonl", [{"prompt": "what is the sum"}] * 3)
    write_answers(teacher, prompts, tmp_path / "a", settings=SETTINGS)
    contents = [row["messages"][1]["content"] for row in rows_of(tmp_path / "a")]
    assert len({*contents}) > 5
    write_answers(teacher, prompts, tmp_path / "b", settings=replace(SETTINGS, seed=2))
    assert folder_bytes(tmp_path / "a") != folder_bytes(tmp_path / "b")
    greedy = replace(SETTINGS, temperature=0.0, samples=1, cut="keep")
    write_answers(teacher, prompts, tmp_path / "c", settings=greedy)
    assert len({row["messages"][1]["content"] for row in rows_of(tmp_path / "c")}) == 1


def test_settings_are_checked():
    for bad, said in (
        ({"samples": 0}, "samples is 0"),
        ({"top_p": 0.0}, "top_p is 0.0"),
        ({"alternatives": 65}, "alternatives is 65"),
        ({"cut": "never"}, "cut is 'never'"),
        ({"temperature": 0.0}, "temperature is 0, expected more with samples 4"),
    ):
        with pytest.raises(SettingError, match=said):
            WriteSettings(**bad)
