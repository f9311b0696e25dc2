"""From alternatives to targets, against the definition, one token and one alternative at a time."""

import pickle
import random
from functools import cache

import made
import numpy as np
import pytest
from faults_kit import LONG, examples
from hypothesis import given, settings
from hypothesis import strategies as st

from vocagnolm.alignment import (
    Speller,
    TargetTable,
    TeacherTokens,
    align,
    carry_alternatives,
    load_tokenizer,
    token_texts,
)
from vocagnolm.alignment.targets import spell
from vocagnolm.alternatives import NOTHING, Alternatives, pack
from vocagnolm.pair import SAMPLE, STRESS

KINDS = [
    "byte-level",
    "byte-level large",
    "byte-level prefix space",
    "sentencepiece prepend",
    "sentencepiece always split",
    "sentencepiece never",
    "unigram byte fallback",
]
PAIRS = [
    ("byte-level", "byte-level large"),
    ("byte-level large", "byte-level"),
    ("byte-level", "sentencepiece prepend"),
    ("sentencepiece prepend", "byte-level large"),
    ("sentencepiece always split", "byte-level large"),
    ("unigram byte fallback", "sentencepiece prepend"),
    ("byte-level prefix space", "unigram byte fallback"),
    ("sentencepiece prepend", "sentencepiece prepend"),
]


@cache
def tokenizer(name):
    return load_tokenizer(made.tokenizer(name))


@cache
def speller(name):
    return Speller(tokenizer(name))


END = 5


@cache
def table(student, teacher):
    ends = [tokenizer(teacher).vocabulary_size - 1]
    return TargetTable(tokenizer(student), token_texts(tokenizer(teacher), ends), END)


def made_up(teacher, text, count, seed, sampled=False):
    """A teacher's tokens of a text with alternatives by chance: often the token that follows, often
    one that begins as it does."""
    tokens = tokenizer(teacher).spans(text)
    vocabulary = token_texts(tokenizer(teacher), [])
    chance = random.Random(seed)
    by_first = {}
    for n in range(len(vocabulary)):
        by_first.setdefault(vocabulary[n][:2], []).append(n)
    ids, follows, nll = [], [], []
    for index in tokens.ids.tolist():
        near = by_first[vocabulary[index][:2]]
        drawn = [chance.choice(near) for _ in range(count)]
        drawn += [chance.randrange(len(vocabulary)) for _ in range(count)]
        chosen = chance.sample(drawn, count)
        if chance.random() < 0.6:
            chosen[chance.randrange(count)] = index
        p = sorted((chance.random() for _ in range(count + 1)), reverse=True)
        p = [x / sum(p) for x in p]
        ids.append(chosen)
        follows.append([n == index for n in chosen])
        nll.append([-np.log(x) for x in p[:count]])
    packed = pack(
        np.array(ids).reshape(-1, count),
        np.array(nll).reshape(-1, count),
        np.array(follows, bool).reshape(-1, count),
    )
    if len(packed) > 3:
        packed[2] = NOTHING
    return tokens, TeacherTokens(spans=tokens.spans, alternatives=Alternatives(packed, sampled))


@cache
def spelled(pair, text):
    return int(speller_of(pair)([text])[0][0])


@cache
def speller_of(pair):
    return Speller(pair.student)


def naive(pair, text, ours, known, inside, ids_of_teacher):
    """By the text of `carry_alternatives`: a dictionary of targets for every student token."""
    encoded, vocabulary = text.encode(), pair.vocabulary
    given_ = known.alternatives
    found = []
    for label, (start, end) in zip(ours.ids.tolist(), ours.spans.tolist(), strict=True):
        target = {}
        covering = [
            j for j, (s, e) in enumerate(known.spans.tolist()) if s <= start < e and start < end
        ]
        if covering and given_.present[covering[0], 0]:
            j = covering[0]
            t_start, t_end = known.spans[j].tolist()
            own = vocabulary[ids_of_teacher[j]]
            in_k = bool(given_.follows[j].any())
            # what the teacher's token spells before the text: known if it is among them
            lead = own[: max(0, len(own) - (t_end - t_start))]
            if not in_k:
                lead = b" " if vocabulary.dummy_space and t_start == 0 else b""
            read = lead + encoded[t_start:start]
            mine = pair.student.bytes_of(label) or b""
            before = mine[: max(0, len(mine) - (end - start))]
            odd = lead not in (b"", b" ") or before not in (b"", b" ")
            if odd or (start > t_start and (lead or before)):
                found.append({})
                continue
            left = 1.0  # what the bytes already read do not rule out
            counted = []
            for k in range(given_.packed.shape[1]):
                index, p = int(given_.ids[j, k]), float(given_.mass[j, k])
                spelled_text = vocabulary[index]
                if given_.follows[j, k]:
                    continue
                if start == t_start and index in vocabulary.ends:
                    counted.append((pair.end_id, p))
                elif spelled_text.startswith(read) and len(spelled_text) > len(read):
                    rest = spelled_text[len(read) :]
                    counted.append((spelled(pair, before + rest), p))
                elif not spelled_text or not read.startswith(spelled_text):
                    left -= p
            whole = left if start > t_start else 1.0
            if start == t_start or inside:
                for token, p in counted:
                    if token not in (-1, label):
                        target[token] = target.get(token, 0.0) + p / whole
        found.append(target)
    return found


def assert_as_defined(student, teacher, text, count, seed, inside=True, sampled=False):
    pair, ours = table(student, teacher), tokenizer(student).spans(text)
    theirs, known = made_up(teacher, text, count, seed, sampled)
    encoded = np.frombuffer(text.encode(), np.uint8)
    mapping = align(ours.spans, known.spans)
    found = carry_alternatives(pair, ours.ids, ours.spans, known, mapping, encoded, inside=inside)
    expected = naive(pair, text, ours, known, inside, theirs.ids.tolist())
    assert found.ids.shape == found.probability.shape == (len(ours), count)
    for row, (label, wanted) in enumerate(zip(ours.ids.tolist(), expected, strict=True)):
        got = {}
        for token, p in zip(found.ids[row].tolist(), found.probability[row].tolist(), strict=True):
            assert token == label or p > 0
            if p > 0:
                got[token] = got.get(token, 0.0) + p
        assert label not in got
        assert got == pytest.approx(wanted, abs=1e-5), (row, text)
        assert sum(got.values()) <= 1 + 1e-5
    return found


OTHERS = [{"inside": False}, {"sampled": True}]


@pytest.mark.parametrize(
    ("student", "teacher", "count"),
    [*((*pair, 4) for pair in PAIRS), *((*pair, 1) for pair in (PAIRS if LONG else PAIRS[:1]))],
)
def test_as_defined_on_real_text(student, teacher, count):
    told = 0
    for seed, text in enumerate((*SAMPLE, *STRESS, " x", "a", "")):
        found = assert_as_defined(student, teacher, text, count, seed)
        for other in OTHERS if LONG else OTHERS[seed % 4 :][:1]:
            assert_as_defined(student, teacher, text, count, seed, **other)
        told += int(found.has_targets.sum())
    assert told > 500


@settings(max_examples=examples(60), deadline=None, derandomize=True)
@given(
    text=st.one_of(
        st.text(), st.lists(st.sampled_from([*SAMPLE[4].split(), " ", "é", "½"])).map("".join)
    ),
    pair=st.sampled_from(PAIRS),
    seed=st.integers(0, 99),
)
def test_as_defined_on_any_text(text, pair, seed):
    assert_as_defined(*pair, text, 3, seed)


@pytest.mark.parametrize("count", [1, 3, 4, 16])
def test_probabilities_do_not_depend_on_where_a_row_lies(count):
    """So that a document gives the same targets alone, in a slice, and among others."""
    chance = np.random.default_rng(count)
    nll = chance.exponential(0.7, (5000, count)) + np.log(count) / 2  # many exceed 1 together
    packed = pack(chance.integers(0, 900, nll.shape), nll, np.zeros(nll.shape, bool))
    together = Alternatives(packed).mass
    assert count == 1 or (Alternatives(packed).probability.sum(1) > 1).any()
    for width in (1, 2, 3, 5, 7, 1001):
        for begin in (0, 1, 4, 17):
            part = Alternatives(packed[begin : begin + width]).mass
            np.testing.assert_array_equal(part, together[begin : begin + width])


def test_many_texts_at_once_are_each_on_its_own():
    student, teacher = "sentencepiece prepend", "sentencepiece always split"
    pair = table(student, teacher)
    alone, labels, spans, theirs, packed, origins, axis = [], [], [], [], [], [], b""
    for seed, text in enumerate(SAMPLE[:4]):
        alone.append(assert_as_defined(student, teacher, text, 4, seed))
        _, known = made_up(teacher, text, 4, seed)
        ours = tokenizer(student).spans(text)
        labels.append(ours.ids)
        spans.append(ours.spans + len(axis))
        theirs.append(known.spans + len(axis))
        packed.append(known.alternatives.packed)
        origins.append(len(axis))
        axis += text.encode() + b"\0"
    laid = TeacherTokens(
        spans=np.concatenate(theirs),
        alternatives=Alternatives(np.concatenate(packed)),
    )
    all_spans = np.concatenate(spans)
    found = carry_alternatives(
        pair,
        np.concatenate(labels),
        all_spans,
        laid,
        align(all_spans, laid.spans),
        np.frombuffer(axis, np.uint8),
        begins=np.array(origins),
    )
    np.testing.assert_array_equal(found.ids, np.concatenate([one.ids for one in alone]))
    np.testing.assert_array_equal(
        found.probability, np.concatenate([one.probability for one in alone])
    )
    assert found.mass.shared == sum(one.mass.shared for one in alone)


def test_what_is_left_is_the_labels():
    """One vocabulary: an alternative is itself, and beside the label all mass is accounted for."""
    text = SAMPLE[0]
    pair = table("byte-level", "byte-level")
    ours = tokenizer("byte-level").spans(text)
    _, known = made_up("byte-level", text, 6, 1)
    encoded = np.frombuffer(text.encode(), np.uint8)
    found = carry_alternatives(pair, ours.ids, ours.spans, known, align(ours, ours), encoded)
    mass = found.mass
    assert mass.tokens == len(ours) and mass.shared == len(ours) - 1 and mass.inside == 0
    given_ = known.alternatives
    total = mass.following + mass.exact + mass.several + mass.unspelled
    assert total == pytest.approx(float(given_.mass.sum()), rel=1e-5)
    assert mass.following == pytest.approx(float(given_.mass[given_.follows].sum()), rel=1e-5)
    reachable = [n for n in range(len(pair.vocabulary)) if pair.targets[0, n] == n]
    assert len(reachable) > 0.9 * len(pair.vocabulary)


@pytest.mark.parametrize("name", KINDS)
def test_a_spelling_begins_as_the_text_does(name):
    texts = [text.encode() for text in " ".join(SAMPLE).split(" ") if text]
    texts += [b" " + text for text in texts] + [text.encode()[1:] for text in ("é x", "東京", "½")]
    ids, exact = speller(name)(texts)
    for text, index, whole in zip(texts, ids.tolist(), exact.tolist(), strict=True):
        assert index >= 0
        own = speller(name).texts[index]
        assert own and text.startswith(own) and whole == (own == text)


@pytest.mark.parametrize("name", KINDS)
def test_a_word_in_the_middle_of_a_text_is_spelled_as_there(name):
    """No dummy space: what stands behind a space begins as it does in a text."""
    spans = tokenizer(name).spans("so the answer is the sum")
    at = spans.spans[:, 0].tolist().index(6)
    assert speller(name)([b" answer"])[0].tolist() == [spans.ids[at]]


def test_bytes_that_are_no_characters():
    first, rest = "東".encode()[:1], "東京".encode()[1:]
    for name in ("byte-level", "sentencepiece prepend", "unigram byte fallback"):
        ids, _ = speller(name)([first, rest])
        for text, index in zip((first, rest), ids.tolist(), strict=True):
            assert index >= 0 and text.startswith(speller(name).texts[index])
    ids, exact = Speller(load_tokenizer(made.tokenizer("wordpiece")))([first])
    assert ids.tolist() == [-1] and exact.tolist() == [False]


def test_the_table_of_whole_tokens_needs_no_rest_of_tokens():
    vocabulary = token_texts(tokenizer("byte-level large"), [])
    quick = spell(speller("byte-level"), vocabulary, inside=False)
    whole = spell(speller("byte-level"), vocabulary)
    starts = vocabulary.offsets[:-1][vocabulary.lengths > 0]
    np.testing.assert_array_equal(quick.first[starts], whole.first[starts])
    rest = np.setdiff1d(np.arange(len(vocabulary.content)), starts)
    assert (quick.first[rest] == -1).all() and (whole.first[rest] >= 0).all()


def test_control_tokens_spell_nothing_and_ends_become_the_end():
    teacher = load_tokenizer(made.with_added_tokens(made.byte_level()))
    end, control, tool = (teacher.id_of(t) for t in ("<|endoftext|>", "<ctrl>", "<tool>"))
    vocabulary = token_texts(teacher, [end])
    assert vocabulary[control] == vocabulary[end] == b"" and vocabulary[tool] == b"<tool>"
    pair = TargetTable(tokenizer("sentencepiece prepend"), vocabulary, 2)
    assert (pair.targets[:, end] == 2).all()
    assert (pair.targets[:, [control, -1]] == -1).all()
    without = TargetTable(tokenizer("sentencepiece prepend"), vocabulary, None)
    assert (without.targets[:, end] == -1).all()


def test_a_table_travels_to_other_processes():
    pair = table("byte-level", "sentencepiece prepend")
    copy = pickle.loads(pickle.dumps(pair))
    np.testing.assert_array_equal(copy.targets, pair.targets)
    np.testing.assert_array_equal(copy.kinds, pair.kinds)
    assert copy.end_id == END


def test_the_dummy_space_of_a_vocabulary():
    assert token_texts(tokenizer("sentencepiece prepend"), []).dummy_space
    assert token_texts(tokenizer("byte-level prefix space"), []).dummy_space
    assert not token_texts(tokenizer("byte-level"), []).dummy_space
    assert not token_texts(tokenizer("sentencepiece never"), []).dummy_space
