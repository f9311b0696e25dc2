"""Corpora of conversations, and what packing makes of them; texts stay as they were."""

import gzip
import hashlib
import json

import chat_kit
import numpy as np
import pytest
from chat_kit import Message
from faults_kit import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file
from training_kit import make_lab, recipe_dict, save_tokenizer
from typer.testing import CliRunner

from vocagnolm.chat import messages_of, shared_text
from vocagnolm.cli import app
from vocagnolm.data.bins import fill_bins
from vocagnolm.data.blocks import Blocks
from vocagnolm.data.corpus import open_corpus
from vocagnolm.data.prepare import prepare
from vocagnolm.errors import BlocksError, CorpusError
from vocagnolm.recipe import recipe_from_dict

TALK = [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]


def write_lines(path, records):
    content = "".join(json.dumps(record) + "\n" for record in records)
    if path.suffix == ".gz":
        path.write_bytes(gzip.compress(content.encode()))
    else:
        path.write_text(content)
    return path


def texts_of(*arguments, **options):
    return [document.text for document in open_corpus(*arguments, **options)]


def test_every_source_gives_the_same_conversations(tmp_path):
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as pq

    expected = [shared_text([Message("user", "a"), Message("assistant", "b")])] * 2
    records = [{"messages": TALK, "id": 1}] * 2
    assert texts_of(write_lines(tmp_path / "a.jsonl", records)) == expected
    assert texts_of(write_lines(tmp_path / "a.jsonl.gz", records)) == expected
    pairs = [{"prompt": "a", "completion": "b"}, {"prompt": TALK[:1], "completion": TALK[1:]}]
    assert texts_of(write_lines(tmp_path / "b.jsonl", pairs)) == expected
    pq.write_table(pa.Table.from_pylist(records), tmp_path / "a.parquet")
    assert texts_of(tmp_path / "a.parquet") == expected
    both = [{"text": "t", "messages": TALK}] * 2
    pq.write_table(pa.Table.from_pylist(both), tmp_path / "both.parquet")
    write_lines(tmp_path / "both.jsonl", both)
    for name in ("both.parquet", "both.jsonl"):
        assert texts_of(tmp_path / name) == ["t", "t"]
        assert texts_of(tmp_path / name, format="messages") == expected
    talks = open_corpus(tmp_path / "a.jsonl")
    assert talks.conversations and talks.describe()["format"] == ["messages"]
    assert talks.fingerprint != open_corpus(tmp_path / "both.jsonl").fingerprint


def test_refusals_are_counted_and_named(tmp_path):
    bad = [
        {"messages": [*TALK, {"role": "assistant", "content": None, "tool_calls": [{}]}]},
        {"messages": [{"role": "user", "content": [{"type": "image"}]}]},
        {"messages": [{"role": "critic", "content": "x"}]},
        {"messages": [{"role": "user", "content": ""}]},
        {"text": "no conversation"},
    ]
    path = write_lines(tmp_path / "c.jsonl", [{"messages": TALK}, *bad])
    problems = [d.problem for d in open_corpus(path) if d.text is None]
    assert problems == [
        "tool calls: one of message 2 names no function",
        "images: message 0 holds a part of type 'image'",
        "unknown role: 'critic' in message 0",
        "empty: no message has content",
        "no field 'messages': the record holds text",
    ]
    for name in ("student", "teacher"):
        save_tokenizer(tmp_path / name, kind="bytes")
    arguments = ["compare", "--student", str(tmp_path / "student")]
    arguments += ["--teacher", str(tmp_path / "teacher"), "--corpus", str(path), "--json"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    report = json.loads(result.stdout)
    assert report["corpus"]["left_out"]["reasons"] == {
        **{"tool calls": 1, "images": 1, "unknown role": 1, "empty": 1, "no field 'messages'": 1}
    }
    assert [one["template"] for one in report["templates"]] == [
        "no template of its own: plain `role: content`"
    ] * 2


def test_nothing_of_a_record_is_dropped_in_silence(tmp_path):
    user, answer = TALK
    records = [
        {"messages": [user, {**answer, "weight": 0}, user, {**answer, "weight": 1}]},
        {"messages": [user, {**answer, "weight": 0.5}]},
        {"messages": [{**user, "weight": 0}, answer]},
        {"messages": TALK, "chat_template_kwargs": {"enable_thinking": False}},
        {"messages": TALK, "chat_template_kwargs": {}},
        {"prompt": "a", "completion": "b"},
        {"prompt": "a"},
    ]
    found = list(open_corpus(write_lines(tmp_path / "a.jsonl", records)))
    first = messages_of(found[0].text)
    assert [m.given for m in first] == [False, True, False, False]
    assert [d.problem for d in found if d.text is None] == [
        "weight: 0.5 of message 1 (assistant); an assistant's is 0 or 1",
        "weight: 0 of message 0 (user); an assistant's is 0 or 1",
        "no field 'messages': the record holds prompt",
    ]
    options = messages_of(found[3].text)[0].fields
    assert options == {"chat_template_kwargs": {"enable_thinking": False}}
    assert found[4].text == found[5].text == shared_text(messages_of(found[4].text))


def test_blocks_of_the_older_rule_are_refused_in_words(tmp_path):
    recipe = lab_recipe(tmp_path, [[Message("user", "a"), Message("assistant", "b")]], STRICT)
    prepare(recipe)
    path = tmp_path / "blocks" / "manifest.json"
    manifest = json.loads(path.read_text())
    assert manifest["settings"]["conversations"].pop("rule") == 2
    del manifest["content_sha256"]  # older manifests have none
    path.write_text(json.dumps(manifest))
    assert len(Blocks(tmp_path / "blocks", 16)) == 1  # they can be read
    with pytest.raises(BlocksError, match="older version, which did not train on what templates"):
        prepare(recipe)


def test_texts_and_conversations_are_not_mixed(tmp_path):
    write_lines(tmp_path / "a.jsonl", [{"messages": TALK}])
    write_lines(tmp_path / "b.jsonl", [{"text": "x"}])
    with pytest.raises(
        CorpusError, match=r"mixes texts and conversations: a\.jsonl \(messages\), b"
    ):
        open_corpus(tmp_path)
    with pytest.raises(CorpusError, match="has no field 'text'; its fields are: messages"):
        open_corpus(tmp_path / "a.jsonl", format="text")


def lab_recipe(folder, talks, template, **data):
    save_tokenizer(folder / "bytes", kind="bytes")
    chat_kit.write_conversations(folder / "corpus.jsonl", talks)
    marks = ["<|im_start|>", "<|im_end|>"]
    chat_kit.save_chat_tokenizer(folder / "student", folder / "bytes", template, marks)
    tree = recipe_dict(folder, store={"path": None}, objective={"method": "cpt"}, data=data)
    return recipe_from_dict(tree)


STRICT = (
    "{% for m in messages %}{% if m.role == 'system' and not loop.first %}"
    "{{ raise_exception('one system message, and first') }}{% endif %}"
    "{% if loop.first and m.role == 'assistant' %}{{ raise_exception('the user begins') }}"
    "{% endif %}"
    "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>' }}{% endfor %}"
)


def test_bad_conversations_lose_nothing_else(tmp_path):
    """One line each, and everything else is packed."""
    user, answer = Message("user", "why?"), Message("assistant", "so <|im_end|> it is")
    talks = [
        [user, answer],
        [Message("system", "a"), Message("system", "b"), user, answer],
        [answer, user],
        [user, Message("assistant", "")],
        [user, Message("assistant", "<|im_start|>assistant\n")],
    ]
    recipe = lab_recipe(tmp_path, talks, STRICT, block_size=48)
    summary = prepare(recipe)["summary"]
    assert summary["documents"] == 3
    assert summary["refused"] == {
        "template: one system message, and first": 1,
        "template: the user begins": 1,
    }
    chat = chat_kit.loaded(tmp_path / "student")
    end, start = chat.id_of("<|im_end|>"), chat.id_of("<|im_start|>")
    columns = load_file(tmp_path / "blocks" / "part-00000.safetensors")
    # what is written in a content is text: six turns begin and end
    assert (columns["ids"] == end).sum() == (columns["ids"] == start).sum() == 6
    trained = columns["trained"].astype(bool)
    assert (columns["ids"][trained] == end).sum() == 3
    (tmp_path / "recipe.yaml").write_text(recipe.to_yaml())
    result = CliRunner().invoke(app, ["prepare", str(tmp_path / "recipe.yaml")])
    assert result.exit_code == 0, result.output
    assert "the template refuses 1 conversations: template: the user begins" in result.output
    assert "conversations, in its own template; trained on:" in result.output


def test_nothing_to_train_on_is_said(tmp_path):
    alone = [[Message("user", "a")]]
    with pytest.raises(BlocksError, match=r"no conversation has a message of data\.train_on"):
        prepare(lab_recipe(tmp_path / "a", alone, chat_kit.CHATML))
    raising = "{{ raise_exception('never') }}"
    with pytest.raises(BlocksError, match=r"refuses the conversations of .*: 1 x template: never"):
        prepare(lab_recipe(tmp_path / "b", alone, raising))
    manifest = prepare(lab_recipe(tmp_path / "c", alone, chat_kit.CHATML, train_on="all"))
    assert manifest["summary"]["trained"] == 2


def test_conversations_that_are_too_long_are_cut_and_counted(tmp_path):
    long = [[Message("user", "a"), Message("assistant", "b c d " * 40)]]
    lost = [[Message("user", "a b c " * 40), Message("assistant", "d")]]
    recipe = lab_recipe(tmp_path, long + lost, chat_kit.CHATML, block_size=64)
    prepare(recipe)
    blocks = Blocks(tmp_path / "blocks", 64)
    assert (len(blocks), blocks.bins.cut, blocks.bins.without) == (1, 1, 1)
    assert blocks[0]["trained"][-1]
    (tmp_path / "recipe.yaml").write_text(recipe.to_yaml())
    result = CliRunner().invoke(app, ["prepare", str(tmp_path / "recipe.yaml"), "--json"])
    values = json.loads(result.stdout)
    assert (values["cut_documents"], values["documents_without_training"]) == (1, 1)


@settings(max_examples=examples(100), deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(-1, 40)), max_size=60), st.integers(2, 32)
)
def test_bins_hold_every_document_once(documents, room):
    lengths = np.array([n for n, _ in documents], np.int64)
    first = np.array([min(f, n - 1) for n, f in documents], np.int64)
    bins = fill_bins(lengths, first, room)
    found = [bins.documents(n) for n in range(len(bins))]
    usable = [n for n in range(len(documents)) if 0 <= first[n] < room]
    assert sorted(d for block in found for d in block) == usable
    sizes = [sum(min(int(lengths[d]), room) for d in block) for block in found]
    assert all(0 < size <= room for size in sizes)
    assert bins.tokens == sum(sizes) and bins.without == len(documents) - len(usable)
    # no two blocks could have been one
    assert sum(2 * size <= room for size in sizes) <= 1


# made by the version before conversations, from `make_lab`: every column of every part
TEXT_BLOCKS = "64326cd55619cf69faf662036f4e54e64c6a8aa4960bd9545ba0a39d1f229b57"


def test_blocks_of_texts_are_what_they_were(tmp_path):
    make_lab(tmp_path)
    extra = ["text", "teacher_losses", "stretch"]
    manifest = prepare(recipe_from_dict(recipe_dict(tmp_path, data={"extra_columns": extra})))
    digest = hashlib.sha256()
    for part in manifest["parts"]:
        columns = load_file(tmp_path / "blocks" / part["name"])
        for name in sorted(columns):
            digest.update(name.encode() + columns[name].tobytes())
    assert digest.hexdigest() == TEXT_BLOCKS
    assert not {"trained", "refused", "untrained_documents"} & set(manifest["summary"])


def test_plain_text_in_a_conversation_guides_as_plain_text_does(tmp_path):
    """One message that is all content, in a template that prints nothing else: the tokens and their
    guidance are those of the text."""
    from vocagnolm.data.guidance import GuidancePlan
    from vocagnolm.data.packing import Batch, pack_documents

    save_tokenizer(tmp_path / "bytes", kind="bytes")
    bare = "{% for m in messages %}{{ m.content }}{% endfor %}"
    chat_kit.save_chat_tokenizer(tmp_path / "s", tmp_path / "bytes", bare, [])
    chat = chat_kit.loaded(tmp_path / "s")
    text = "the sum of naïve numbers is 東京 42"
    ours, theirs = chat.base.spans(text), np.array([3, 7, len(text.encode()) - 10])
    nll = np.array([0.5, 1.5, 2.5], np.float32)
    talk = shared_text([Message("assistant", text)])
    options = {"id_dtype": np.uint16, "prefix": (), "eos": None, "guidance": GuidancePlan()}
    text_batch = Batch(indices=[0], students=[ours], teachers=[[(theirs, nll)]])
    talk_batch = Batch(
        indices=[0],
        students=[chat.spans(talk)],
        teachers=[[(np.append(theirs, 1), np.append(nll, np.float32(np.nan)))]],
        trained=[np.array([[0, len(talk.encode())]])],
    )
    plain = pack_documents([text_batch], **options)
    whole = pack_documents([talk_batch], **options)
    assert (plain.columns["ids"] == whole.columns["ids"]).all()
    np.testing.assert_array_equal(plain.columns["guidance"], whole.columns["guidance"])
    assert messages_of(talk)[0].content == text
