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
from tokenizers import Tokenizer, models, pre_tokenizers

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
from vocagnolm.alternatives import NOTHING, Alternatives, Vocabulary, pack
from vocagnolm.report.comparison import SAMPLE, STRESS

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
def speller(student, teacher="byte-level large"):
    return Speller(tokenizer(student), token_texts(tokenizer(teacher), []))


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
def written(pair, text):
    return speller_of(pair).tokens([text])[0]


@cache
def speller_of(pair):
    return Speller(pair.student, pair.vocabulary)


def goes_on_with(pair, ours, row, begin, alternative):
    """The student's token that goes on in an alternative behind the tokens that stand in the text
    from byte `begin` on; None if it writes the alternative in another way."""
    before = ours.ids[(ours.spans[:, 0] >= begin) & (np.arange(len(ours)) < row)].tolist()
    spelled = b"".join(pair.student.bytes_of(n) for n in before)
    own = written(pair, alternative)
    whole = spelled == alternative[: int(ours.spans[row, 0]) - begin]
    return own[len(before)] if whole and own[: len(before)] == before != own else None


def behind_blanks(pair, ours, row, begin, read):
    """Whether the token before is blanks from before `begin` to the one blank that was read."""
    if row == 0 or read != b" ":
        return False
    start, end = ours.spans[row - 1].tolist()
    spelled = pair.student.bytes_of(int(ours.ids[row - 1])) or b"x"
    return start < begin and end == begin + 1 and not spelled.strip(b" ")


def naive(pair, text, ours, known, inside, ids_of_teacher):
    """By the text of `carry_alternatives`: for every student token a dictionary of targets, and
    whether the teacher has a say."""
    encoded, vocabulary = text.encode(), pair.vocabulary
    given_ = known.alternatives
    found = []
    for row, (label, (start, end)) in enumerate(
        zip(ours.ids.tolist(), ours.spans.tolist(), strict=True)
    ):
        target, says = {}, False
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
                lead = b" " if vocabulary.dummy_space and j == 0 else b""
            read = lead + encoded[t_start:start]
            mine = pair.student.bytes_of(label) or b""
            before = mine[: max(0, len(mine) - (end - start))]
            odd = lead not in (b"", b" ") or before not in (b"", b" ")
            if odd or (start > t_start and (lead or before)):
                found.append(({}, False))
                continue
            says = start == t_start or (inside and in_k)
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
                    says |= inside
                    if start > t_start and behind_blanks(pair, ours, row, t_start, read):
                        token = next(iter(written(pair, spelled_text[1:])), None)
                    elif start > t_start:
                        token = goes_on_with(pair, ours, row, t_start, spelled_text)
                    else:
                        token = next(iter(written(pair, before + spelled_text[len(read) :])), None)
                    counted.append((token, p))
                elif not spelled_text or not read.startswith(spelled_text):
                    left -= p
            whole = left if start > t_start else 1.0
            if start == t_start or inside:
                for token, p in counted:
                    if token not in (-1, None, label):
                        target[token] = target.get(token, 0.0) + p / whole
        found.append((target, says))
    return found


def assert_as_defined(student, teacher, text, count, seed, inside=True, sampled=False):
    pair, ours = table(student, teacher), tokenizer(student).spans(text)
    theirs, known = made_up(teacher, text, count, seed, sampled)
    encoded = np.frombuffer(text.encode(), np.uint8)
    mapping = align(ours.spans, known.spans)
    found = carry_alternatives(pair, ours.ids, ours.spans, known, mapping, encoded, inside=inside)
    expected = naive(pair, text, ours, known, inside, theirs.ids.tolist())
    assert found.ids.shape == found.probability.shape == (len(ours), count)
    for row, (label, (wanted, says)) in enumerate(zip(ours.ids.tolist(), expected, strict=True)):
        assert found.has_targets[row] == says, (row, text)
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
    alone, labels, spans, theirs, packed, begins, axis = [], [], [], [], [], [], b""
    for seed, text in enumerate(SAMPLE[:4]):
        alone.append(assert_as_defined(student, teacher, text, 4, seed))
        _, known = made_up(teacher, text, 4, seed)
        ours = tokenizer(student).spans(text)
        labels.append(ours.ids)
        spans.append(ours.spans + len(axis))
        begins.append(sum(map(len, theirs)))
        theirs.append(known.spans + len(axis))
        packed.append(known.alternatives.packed)
        axis += text.encode() + b"\0"
    laid = TeacherTokens(
        spans=np.concatenate(theirs),
        alternatives=Alternatives(np.concatenate(packed)),
        begins=np.array(begins),
    )
    all_spans = np.concatenate(spans)
    found = carry_alternatives(
        pair,
        np.concatenate(labels),
        all_spans,
        laid,
        align(all_spans, laid.spans),
        np.frombuffer(axis, np.uint8),
    )
    np.testing.assert_array_equal(found.ids, np.concatenate([text.ids for text in alone]))
    np.testing.assert_array_equal(
        found.probability, np.concatenate([text.probability for text in alone])
    )
    assert found.mass.shared == sum(text.mass.shared for text in alone)


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
    ids, exact = speller(name).first(texts)
    assert (ids >= 0).mean() > 0.95
    for text, index, whole in zip(texts, ids.tolist(), exact.tolist(), strict=True):
        own = speller(name).texts[index] if index >= 0 else b""
        assert text.startswith(own) and whole == (own == text)


@pytest.mark.parametrize("name", KINDS)
def test_a_word_in_the_middle_of_a_text_is_spelled_as_there(name):
    """No dummy space: what stands behind a space begins as it does in a text."""
    spans = tokenizer(name).spans("so the answer is the sum")
    at = spans.spans[:, 0].tolist().index(6)
    assert speller(name).first([b" answer"])[0].tolist() == [spans.ids[at]]


def words(*merges, split=True):
    """A byte-level tokenizer with these merges. `split`: it reads words as GPT-2 does."""
    pairs = [tuple(merge.split("+")) for merge in merges]
    tokens = [*sorted(pre_tokenizers.ByteLevel.alphabet()), *("".join(pair) for pair in pairs)]
    inner = Tokenizer(models.BPE({token: n for n, token in enumerate(tokens)}, pairs))
    inner.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split)
    return load_tokenizer(inner)


def texts_of(student, tokens):
    return [student.bytes_of(n) for n in tokens]


def teacher_of(*texts):
    return Vocabulary.of(texts, [], False)


def test_white_space_is_written_as_before_what_follows():
    """GPT-2's words take one blank, and leave one line end of several apart."""
    student = words("Ċ+Ċ", "Ġ+Ġ", "Ġ+1", "Ġ+a", "ĠĠ+Ġ")
    qwen = Speller(student, teacher_of(b" a", b"\n\n", b" "))  # digits stand alone
    gpt = Speller(student, teacher_of(b" a", b" 1"))
    plain = Speller(student, teacher_of(b"a", b" "))  # no word takes a blank

    def of(speller, text):
        return texts_of(student, speller.tokens([text])[0])

    assert student.spans("\n\n").ids.tolist() == [student.vocabulary["ĊĊ"]]
    for speller in (qwen, gpt, plain):
        assert of(speller, b"\n\n") == [b"\n", b"\n"]
        assert of(speller, b".\n\n") == [b".", b"\n", b"\n"]
        assert of(speller, b"a") == [b"a"] and of(speller, b" a") == [b" a"]
    assert of(qwen, b" ") == []  # ` 1`, whatever the number is
    assert of(gpt, b" ") == [b" "]  # before a word with a blank of its own
    assert of(plain, b" ") == []  # ` a`
    assert of(qwen, b"   ") == of(gpt, b"   ") == [b"   "]
    exact = spell(student, teacher_of(b"\n\n", b" ", b" a")).exact
    assert exact.tolist() == [False, False, True]


def test_a_character_that_is_broken_off():
    """Only a token that stands there however the character ends."""
    sentencepiece = tokenizer("sentencepiece prepend")
    table = TargetTable(sentencepiece, teacher_of(b" \xe2\x89", b"\xe2\x89", b" \xe6"), None)
    space = sentencepiece.vocabulary["▁"]
    assert sentencepiece.bytes_of(space) == b" " and "<0x20>" in sentencepiece.vocabulary
    e2 = sentencepiece.vocabulary["<0xE2>"]
    assert table.targets[0].tolist() == [space, e2, space, -1]
    # with `≤` in the vocabulary a text that goes on with it has no token for its beginning
    student = words("â+ī", "âī+¤", "Ġ+âī")
    known = Speller(student, teacher_of(b" a"))
    assert known.tokens(["≤".encode()[:2], b" \xe2\x89"]) == [[], []]
    other = words("â+ī", "Ġ+âī")
    unknown = Speller(other, teacher_of(b" a"))
    written = unknown.tokens(["≤".encode()[:2], b" \xe2\x89"])
    assert [texts_of(other, tokens) for tokens in written] == [[b"\xe2\x89"], [b" \xe2\x89"]]


def test_bytes_that_begin_inside_a_character():
    rest = "東京".encode()[1:]
    for name in ("byte-level", "sentencepiece prepend", "unigram byte fallback"):
        (index,), _ = speller(name).first([rest])
        assert index >= 0 and rest.startswith(speller(name).texts[index])
    lossy = Speller(load_tokenizer(made.tokenizer("wordpiece")), teacher_of(b"a"))
    for text in (rest, "東".encode()[:1]):
        ids, exact = lossy.first([text])
        assert ids.tolist() == [-1] and exact.tolist() == [False]


def one_position(student, vocabulary, text, spans, alternatives, follows, at=-1):
    """Targets of the student's tokens of a text, where one teacher token has alternatives."""
    ids = np.array([[vocabulary.index(one) for one in alternatives]])
    nll = -np.log(np.full(ids.shape, 0.2))
    packed = np.full((len(spans), ids.shape[1]), NOTHING, np.uint32)
    packed[at] = pack(ids, nll, np.array([[one == follows for one in alternatives]]))[0]
    table = TargetTable(student, teacher_of(*vocabulary), None)
    spans, ours = np.array(spans), student.spans(text)
    known = TeacherTokens(spans=spans, alternatives=Alternatives(packed))
    encoded = np.frombuffer(text.encode(), np.uint8)
    found = carry_alternatives(
        table, ours.ids, ours.spans, known, align(ours.spans, spans), encoded
    )
    targets = [
        {table.student.bytes_of(n): round(p, 3) for n, p in zip(*row, strict=True) if p > 0}
        for row in zip(found.ids.tolist(), found.probability.tolist(), strict=True)
    ]
    return texts_of(student, ours.ids.tolist()), targets, found


def test_inside_only_where_the_student_goes_on_so():
    """After `▁` alone an alternative that the student begins with another token has no target."""
    student = words("Ġ+F", "Ġ+a", "a+b")
    teacher = [b"x", b" 12", b" F", b" 1", b" 1a", b" 2"]
    # the teacher's ` 12` is ` `, `1`, `2` for the student
    tokens, targets, found = one_position(
        student, teacher, "x 12", [[0, 1], [1, 4]], [b" 12", b" F", b" 1a"], b" 12"
    )
    assert tokens == [b"x", b" ", b"1", b"2"]
    # at ` ` each by its first token; at `1` only ` 1a` begins as the text does, and ` F` does not
    assert targets[1] == {b" F": 0.2}
    assert targets[2] == {}  # ` 1a` goes on with `1`, the label
    assert targets[3] == {b"a": pytest.approx(0.25)}  # 0.2 / (1 - 0.2), for ` F` is ruled out
    assert found.has_targets.tolist() == [False, True, True, True]
    assert (found.mass.inside, found.mass.continued) == (2, 2)


def test_inside_the_tokens_before_are_compared():
    """`ab` is one token in the text, so that `abc` is no way to go on; and a token that begins
    before the teacher's has none."""
    student = words("a+b", "b+c", "c+d")
    tokens, targets, _ = one_position(
        student, [b"abcd", b"abx", b"ax"], "abcd", [[0, 4]], [b"abcd", b"abx", b"ax"], b"abcd"
    )
    assert tokens == [b"ab", b"cd"]
    assert targets == [{b"a": 0.2}, {b"x": pytest.approx(0.25)}]
    over = words("x+a")
    tokens, targets, found = one_position(
        over, [b"ab", b"ac", b"x"], "xab", [[0, 1], [1, 3]], [b"ab", b"ac"], b"ab"
    )
    assert tokens == [b"xa", b"b"] and targets == [{}, {}]
    assert found.has_targets.tolist() == [False, True]


def test_a_blank_that_is_written_with_blanks_before_it():
    """Gemma writes the end of a sentence, two blanks and a word as `.`, two blanks and the word,
    and so it does with every other word."""
    student = words("Ġ+Ġ", "T+h", "Ġ+W", split=False)
    teacher = [b".", b" ", b" Th", b" W", b"x"]
    tokens, targets, _ = one_position(
        student, teacher, ".  Th", [[0, 1], [1, 2], [2, 5]], [b" Th", b" W", b"x"], b" Th"
    )
    assert tokens == [b".", b"  ", b"Th"]
    assert targets[2] == {b"W": pytest.approx(0.25)}  # not ` W`; `x` is ruled out: 0.2 / 0.8


def test_to_go_on_as_the_text_does_is_a_target():
    """The teacher's token goes on beyond the student's, and it expected nothing else there."""
    student = words("a+b")
    tokens, targets, found = one_position(
        student, [b"abc", b"xy"], "abc", [[0, 3]], [b"abc", b"xy"], b"abc"
    )
    assert tokens == [b"ab", b"c"] and targets[1] == {}
    assert found.has_targets.tolist() == [True, True]
    _, _, found = one_position(student, [b"abc", b"xy"], "abc", [[0, 3]], [b"xy"], b"abc")
    assert found.has_targets.tolist() == [True, False]  # it expected nothing that begins so


@pytest.mark.parametrize("text", ["\t1", "é"])
def test_a_first_token_behind_a_dummy_space_of_its_own(text):
    """Llama's way: `▁` is a token, and the alternatives behind it keep their space."""
    llama, student = tokenizer("sentencepiece prepend"), tokenizer("byte-level large")
    theirs = llama.spans(text)
    first = int(np.flatnonzero(theirs.token_bytes > 0)[0])
    assert first == 1 and llama.bytes_of(int(theirs.ids[0])) == b" "
    vocabulary = token_texts(llama, [])
    index = llama.vocabulary["▁the"]
    packed = np.full((len(theirs), 1), NOTHING, np.uint32)
    packed[first] = pack(np.array([index]), np.array([0.5]), np.array([False]))
    table = TargetTable(student, vocabulary, None)
    known = TeacherTokens(spans=theirs.spans, alternatives=Alternatives(packed))
    ours = student.spans(text)
    found = carry_alternatives(
        table,
        ours.ids,
        ours.spans,
        known,
        align(ours.spans, theirs.spans),
        np.frombuffer(text.encode(), np.uint8),
    )
    assert texts_of(student, found.ids[0].tolist()) == [b" the"]


def test_the_table_is_what_the_student_writes_at_every_place():
    vocabulary = token_texts(tokenizer("byte-level large"), [])
    found, own = spell(tokenizer("byte-level"), vocabulary), speller("byte-level")
    for n in range(len(vocabulary)):
        text, at = vocabulary[n], int(vocabulary.offsets[n])
        (tokens,) = own.tokens([text])
        place, expected = 0, np.full((2, len(text)), -1)
        for before, token in zip([-1, *tokens], tokens, strict=False):
            expected[:, place] = token, before
            place += len(own.texts[token])
        np.testing.assert_array_equal(found.token[at : at + len(text)], expected[0])
        np.testing.assert_array_equal(found.before[at : at + len(text)], expected[1])
        assert found.exact[n] == (len(tokens) == 1 and place == len(text) > 0)


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
