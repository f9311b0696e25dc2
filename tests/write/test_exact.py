"""What is written against a reference of ten lines: the draws, the losses, the alternatives. And
against `score`, which reads the same conversations."""

import dataclasses
import hashlib
import json

import numpy as np
import pytest
import torch
from write.write_kit import SETTINGS, opened, rows_of, save_writer, write_prompts

from vocagnolm.alternatives import STEPS_PER_NAT
from vocagnolm.chat import ChatTokenizer, messages_of, template_of
from vocagnolm.data.corpus import open_corpus
from vocagnolm.model.nll import uniform_numbers
from vocagnolm.score import ScoreSettings, score_corpus, write_answers
from vocagnolm.store import LossStore

SYSTEM = "Answer the question in as few words as you can, and say nothing else."
KINDS = {
    "bytes": ("bytes", True, None),
    "pieces": ("pieces", True, None),
    "bytes after a shared prefix": ("bytes", True, SYSTEM),
    "bytes alone": ("bytes", False, None),
    "pieces alone": ("pieces", False, None),
}
"""A tokenizer's kind, whether the model has a template, and a system message."""
HALF = 2.0**-10
"""A step of half precision, relative."""


@pytest.fixture(scope="module")
def lab(request, tmp_path_factory):
    """A teacher, its prompts, and what it wrote."""
    folder = tmp_path_factory.mktemp("lab")
    kind, chat, system = KINDS[request.param]
    settings = dataclasses.replace(SETTINGS, system=system)
    teacher = save_writer(folder / "teacher", kind, chat=chat)
    prompts = write_prompts(folder / "prompts.jsonl")
    write_answers(teacher, prompts, folder / "written", settings=settings)
    return folder


def prompt_ids(files, text, system):
    """What the teacher reads: the prompt in its template, or as it stands."""
    if files.tokenizer.frame.template is None:
        return [*files.prefix_ids, *files.tokenizer.spans(text).ids.tolist()]
    chat = ChatTokenizer(files.tokenizer, template_of(files.tokenizer))
    before = f"{system}\x01" if system else ""
    return chat.prompt_ids(messages_of(f"{before}{text}\x02"))


def seed_of(text, occurrence, number, seed=SETTINGS.seed):
    digest = hashlib.sha256(f"{text}\x02".encode()).digest()[:16]
    key = f"{seed} {occurrence} {number} ".encode() + digest
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little") >> 2


def reference(files, model, ids, seed, ends, known):
    """Token by token through the whole model: ids, losses, and the log probabilities behind."""
    written, logs = [], []
    while len(written) < SETTINGS.max_new_tokens and not (written and written[-1] in ends):
        with torch.inference_mode():
            logits = model(torch.tensor([[*ids, *written]])).logits[0, -1].float()
        upto = (logits[:known] / SETTINGS.temperature).softmax(0).double().cumsum(0)
        drawn = uniform_numbers(torch.tensor([seed + len(written)]), 1)[0] * upto[-1]
        written.append(int(torch.searchsorted(upto, drawn, right=True)[0]))
        logs.append(-logits.log_softmax(0).numpy())
    return written, np.stack(logs)


@pytest.mark.parametrize("lab", KINDS, indirect=True)
def test_draws_losses_and_alternatives_are_those_of_the_reference(lab):
    files, model = opened(lab / "teacher")
    store = LossStore.open(lab / "written")
    tokenizer = files.tokenizer
    names = ("<|im_end|>", "<|eot|>", "<end>", "</s>")
    ends = {tokenizer.id_of(name) for name in names} - {None}
    prompts = [json.loads(line) for line in (lab / "prompts.jsonl").read_text().splitlines()]
    rows = {(row["prompt_index"], row["answer_index"]): row for row in rows_of(lab / "written")}
    left_out = {
        (r["prompt_index"], r["answer_index"]): r for r in rows_of(lab / "written", "dropped")
    }
    assert len(rows) == len(store) > 20 and len(rows) + len(left_out) == 30
    order = {place: n for n, place in enumerate(rows)}
    for number, prompt in enumerate(prompts):
        text = prompt["prompt"]
        ids = prompt_ids(files, text, store.manifest["identity"]["writing"]["system"])
        occurrence = int(number == len(prompts) - 1)  # equal to the first
        for answer in range(SETTINGS.samples):
            seed = seed_of(text, occurrence, answer)
            known = max(tokenizer.vocabulary.values()) + 1
            written, logs = reference(files, model, ids, seed, ends, known)
            finished = written[-1] in ends
            texts = written[:-1] if finished else written
            spelled = b"".join(tokenizer.bytes_of(n) or b"" for n in texts).decode()
            if (number, answer) in left_out:
                assert not finished or not spelled.strip()
                continue
            row = rows[number, answer]
            assert [m["role"] for m in row["messages"]] == ["user", "assistant"]
            assert row["messages"][0]["content"] == text and row["finished"] is finished is True
            content = row["messages"][1]["content"]
            assert content in (spelled, spelled.strip())
            columns = store.columns(order[number, answer])
            known_ones = ~np.isnan(columns["nll"])
            assert (store.spans(order[number, answer])[known_ones][0, 0]) == len(text.encode()) + 1
            stored = columns["nll"][known_ones].astype(np.float32)
            kept = [n for n, token in enumerate(written) if _shows(tokenizer, token, n, written)]
            nll = logs[np.arange(len(written)), written][kept]
            assert np.abs(stored - nll).max() <= 1e-4 + HALF * nll.max()
            _same_alternatives(
                store.alternatives(order[number, answer]).packed[known_ones],
                logs[kept],
                np.array(written)[kept],
            )


def _shows(tokenizer, token, place, written):
    """Whether a token has a part in the conversation: all but white space at either end."""
    before = b"".join(tokenizer.bytes_of(n) or b"" for n in written[:place]).strip()
    own = tokenizer.bytes_of(token) or b""
    return place == len(written) - 1 or bool(before or own.strip())


def _same_alternatives(packed, logs, written):
    ids, steps = packed >> 12, packed & 2047
    nll = np.take_along_axis(logs, ids.astype(np.int64), 1)
    assert np.abs(steps / STEPS_PER_NAT - nll).max() <= 0.5 / STEPS_PER_NAT + 1e-4
    assert (
        np.abs(np.sort(logs, 1)[:, : ids.shape[1]] - nll).max() <= 1e-4
    )  # the likeliest, in order
    follows = (packed >> 11 & 1).astype(bool)
    assert np.array_equal(follows, ids == written[:, None])


@pytest.mark.parametrize("lab", ["bytes", "pieces"], indirect=True)
def test_losses_are_those_of_score_where_the_ids_are_the_tokenizer_s_own(lab, tmp_path):
    written = LossStore.open(lab / "written")
    corpus = open_corpus(lab / "written")
    assert written.made_from(corpus.fingerprint) and len(corpus) == len(written)
    settings = ScoreSettings(device="cpu", threads=1, context=256, alternatives=4)
    score_corpus(lab / "teacher", lab / "written", tmp_path / "s", settings=settings)
    read = LossStore.open(tmp_path / "s")
    compared = 0
    for number, document in enumerate(corpus):
        assert written.place_of(number) == written.of(document.text)
        begin = written.spans(number)[~np.isnan(written.columns(number)["nll"])][0, 0]
        own, theirs = (_behind(store, number, begin) for store in (written, read))
        if not np.array_equal(own[0], theirs[0]):
            continue
        compared += 1
        assert np.abs(own[1] - theirs[1]).max() <= HALF * own[1].max() + 1e-4
        apart = (own[2] & 2047).astype(int) - (theirs[2] & 2047).astype(int)
        assert np.array_equal(own[2] >> 11, theirs[2] >> 11) and np.abs(apart).max() <= 1
    assert compared >= 5


def _behind(store, number, begin):
    """Spans, losses and alternatives of a document from this byte on."""
    spans, columns = store.spans(number), store.columns(number)
    behind = spans[:, 0] >= begin
    return spans[behind], columns["nll"][behind].astype("f4"), columns["alternatives"][behind]


def answers_of(folder):
    """Every answer by its prompt and number: what was written, and its numbers to the last bit."""
    store, found = LossStore.open(folder), {}
    for index, row in enumerate(rows_of(folder)):
        columns = {name: column.tobytes() for name, column in store.columns(index).items()}
        prompt, answer = (message["content"] for message in row["messages"])
        found[prompt, row["answer_index"]] = (answer, row["finished"], columns)
    return found


@pytest.mark.parametrize("lab", ["bytes"], indirect=True)
def test_an_answer_does_not_depend_on_what_is_written_beside_it(lab, tmp_path):
    """In other shards, in another order, or as the only one."""
    prompts = (lab / "prompts.jsonl").read_text().splitlines(keepends=True)[:-1]
    orders = {"whole": prompts, "turned": prompts[::-1], "some": prompts[3:5], "one": prompts[6:7]}
    sizes = {"whole": 9, "turned": 2, "some": 1, "one": 4}
    found = {}
    for name, lines in orders.items():
        (tmp_path / f"{name}.jsonl").write_text("".join(lines))
        settings = dataclasses.replace(SETTINGS, shard_prompts=sizes[name], cut="keep")
        write_answers(
            lab / "teacher", tmp_path / f"{name}.jsonl", tmp_path / name, settings=settings
        )
        found[name] = answers_of(tmp_path / name)
    assert len(found["whole"]) > 22 and found["turned"] == found["whole"]
    for name in ("some", "one"):
        assert found[name] and found[name].items() <= found["whole"].items()
