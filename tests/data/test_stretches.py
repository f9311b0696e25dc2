"""Stretches, several stores and chosen documents in blocks, against the obvious way."""

import math
import shutil
from itertools import pairwise

import numpy as np
import pytest
from training_kit import make_lab, recipe_dict, save_tokenizer, write_corpus, write_store

from vocagnolm.alignment import align, carry, load_tokenizer
from vocagnolm.data.blocks import Blocks
from vocagnolm.data.guidance import cut_stretches
from vocagnolm.data.prepare import prepare
from vocagnolm.errors import BlocksError, RecipeError, StoreError, VocagnolmError
from vocagnolm.recipe import recipe_from_dict
from vocagnolm.store import LossStore
from vocagnolm.store.analysis import document_bits
from vocagnolm.train.check import static_problems


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """A second teacher with a third tokenizer, whose store lacks the last ten documents."""
    folder = tmp_path_factory.mktemp("lab")
    texts = make_lab(folder)
    save_tokenizer(folder / "third", kind="bytes", size=400)
    write_store(folder / "second", texts[:50], folder / "third", seed=1)
    return folder, texts


def recipe_of(folder, target, **sections):
    sections["data"] = {"blocks": str(target), **sections.get("data", {})}
    return recipe_from_dict(recipe_dict(folder, **sections))


def tiles(token_bytes):
    ends = np.cumsum(token_bytes)
    return [(int(end - width), int(end)) for end, width in zip(ends, token_bytes, strict=True)]


def obvious_stretches(own, entries):
    """Pieces between boundaries that all have: [(tokens of ours, [loss of each teacher])]."""
    common = {edge for span in own for edge in span}
    tiled = [(tiles(token_bytes), nll.astype(np.float64)) for token_bytes, nll in entries]
    for spans, _ in tiled:
        common &= {edge for span in spans for edge in span}
    edges = sorted(common)
    pieces = []
    for low, high in pairwise(edges):
        tokens = [t for t, (a, b) in enumerate(own) if low <= a and b <= high and a < b]
        losses = [
            math.fsum(n for (a, _), n in zip(spans, nll, strict=True) if low <= a < high)
            for spans, nll in tiled
        ]
        pieces.append((tokens, losses))
    return pieces


def obvious_stream(texts, student, stores, join, eos=True):
    """(loss of the token's stretch, number of the stretch) of every token of the stream."""
    stream = []
    for number, text in enumerate(texts):
        own = [tuple(span) for span in student.spans(text).spans.tolist()]
        found = [(math.nan, None)] * len(own)
        entries = [store[number] for store in stores if number < len(store)]
        for tokens, losses in obvious_stretches(own, entries):
            for token in tokens:
                found[token] = (join(losses), (number, tokens[0]))
        stream += [*found, (math.nan, None)] if eos else found
    return stream


@pytest.mark.parametrize("several", [False, True])
def test_blocks_hold_whole_stretches(lab, tmp_path, several):
    folder, texts = lab
    names = ["store", "second"] if several else ["store"]
    path = [str(folder / name) for name in names]
    recipe = recipe_of(
        folder,
        tmp_path / "b",
        store={"path": path if several else path[0]} | ({"combine": "min"} if several else {}),
        objective={"compare": "stretch"},
    )
    prepare(recipe)
    stores = [LossStore.open(one) for one in path]
    stream = obvious_stream(texts, load_tokenizer(str(folder / "student")), stores, np.min)
    for size in (3, 32):
        assert_whole_stretches(Blocks(tmp_path / "b", size, stretches=True), stream, size)


def assert_whole_stretches(blocks, stream, size):
    assert blocks.tokens == len(stream)
    several_tokens, values, wanted = 0, [], []
    for index in range(len(blocks)):
        start, stop = blocks.window(index)
        block = blocks[index]
        inside = stream[start + 1 : stop]
        # what the window cuts, at the token that is only read or behind its end, has no loss
        outside = {s for _, s in (*stream[:0], stream[start], *stream[stop : stop + 1])}
        wanted += [math.nan if s in outside else loss for loss, s in inside]
        values.append(block["guidance"][1:])
        known = ~np.isnan(block["guidance"][1:])
        numbers = block["stretch"][1:]
        assert numbers[0] == 0 and numbers.max() < size
        pairs = {(n, s) for n, (_, s), k in zip(numbers, inside, known, strict=True) if k}
        assert len(pairs) == len({n for n, _ in pairs}) == len({s for _, s in pairs})
        alone = numbers[~known]
        assert len(set(alone.tolist())) == len(alone)
        several_tokens += len(numbers) - len(set(numbers.tolist()))
    np.testing.assert_allclose(np.concatenate(values), np.float16(wanted), rtol=2e-3)
    assert several_tokens > 20  # stretches of several tokens are there at all


def test_a_window_inside_one_stretch_has_no_loss():
    goes_on = np.array([True, True, True, True])
    losses, number = cut_stretches(np.full(4, 2.0), goes_on, cut_at_end=True)
    assert np.isnan(losses).all() and number.tolist() == [0, 0, 1, 2]
    losses, number = cut_stretches(np.full(4, 2.0), goes_on, cut_at_end=False)
    assert np.isnan(losses).all()
    begins = np.array([False, False, True, False])
    losses, number = cut_stretches(np.full(4, 2.0), begins, cut_at_end=False)
    assert np.isnan(losses[0]) and losses[1:].tolist() == [2.0] * 3
    assert number.tolist() == [0, 0, 0, 1]


@pytest.mark.parametrize("combine", ["min", "best_document"])
def test_several_stores_become_one_number_a_token(lab, tmp_path, combine):
    folder, texts = lab
    path = [str(folder / "store"), str(folder / "second")]
    prepare(recipe_of(folder, tmp_path / "b", store={"path": path, "combine": combine}))
    student = load_tokenizer(str(folder / "student"))
    stores = [LossStore.open(one) for one in path]
    expected = []
    for number, text in enumerate(texts):
        own = student.spans(text).spans
        carried, bits = [], []
        for store in stores:
            if number >= len(store):
                carried.append(np.full(len(own), np.nan))
                bits.append(np.inf)
                continue
            token_bytes, nll = store[number]
            carried.append(carry(align(own, np.array(tiles(token_bytes))), nll, "max"))
            bits.append(nll.sum(dtype=np.float64) / token_bytes.sum(dtype=np.int64))
        table = np.stack(carried)
        if combine == "best_document":
            best = table[int(np.argmin(bits))]
            expected += np.where(np.isnan(best), np.nanmin(table, axis=0), best).tolist()
        else:
            expected += np.nanmin(table, axis=0).tolist()
        expected.append(math.nan)
    blocks = Blocks(tmp_path / "b", 32)
    found = blocks.read("guidance", 0, blocks.tokens)
    np.testing.assert_allclose(found, np.array(expected), rtol=1e-3)


def test_kinds_of_stretches_are_counted(lab, tmp_path):
    folder, texts = lab
    summary = prepare(recipe_of(folder, tmp_path / "b"))["summary"]
    kinds = summary["kinds"]
    assert sum(kinds.values()) == summary["tokens"] - summary["separators"]
    student = load_tokenizer(str(folder / "student"))
    store, counted = LossStore.open(folder / "store"), dict.fromkeys(kinds, 0)
    for number, text in enumerate(texts):
        own = [tuple(span) for span in student.spans(text).spans.tolist()]
        theirs = tiles(store[number][0])
        common = sorted({e for s in own for e in s} & {e for s in theirs for e in s})
        for low, high in pairwise(common):
            ours = sum(low <= a and b <= high for a, b in own)
            other = sum(low <= a and b <= high for a, b in theirs if a < b)
            name = f"{'N' if ours > 1 else 1}:{'1' if other == 1 else 'M' if ours > 1 else 'N'}"
            counted[name] += ours
    tokens = sum(len(student.spans(text)) for text in texts)
    counted["unmapped"] = tokens - sum(counted.values())
    assert kinds == counted


# ---- documents ----


def kept_documents(target) -> set[int]:
    blocks = Blocks(target, 32)
    return set(np.concatenate([blocks.documents(i) for i in range(len(blocks))]).tolist())


def test_documents_worth_reading(lab, tmp_path):
    folder, texts = lab
    bits = document_bits(LossStore.open(folder / "store"))
    second = document_bits(LossStore.open(folder / "second"))
    gain = np.full(len(texts), -np.inf)
    gain[: len(second)] = second.bits_per_byte - bits.bits_per_byte[: len(second)]
    for number, (how, score) in enumerate(
        [
            ({"by": "bits_per_byte", "share": 0.3}, -bits.bits_per_byte),
            ({"by": "difference", "share": 0.5, "against": str(folder / "second")}, gain),
        ]
    ):
        order, held, wanted = np.argsort(-score), 0, set()
        for document in order:
            if held >= how["share"] * bits.bytes.sum():
                break
            wanted.add(int(document))
            held += int(bits.bytes[document])
        target = tmp_path / str(number)
        summary = prepare(recipe_of(folder, target, corpus={"keep_documents": how}))["summary"]
        assert summary["documents"] == len(wanted)
        assert summary["left_out_documents"] == len(texts) - len(wanted)
        assert kept_documents(target) <= wanted
        assert len(wanted - kept_documents(target)) <= 1  # the rest of the stream fills no block


def test_the_random_control_is_one_word_away(lab, tmp_path):
    folder, texts = lab
    how = {"by": "random", "share": 0.4}
    one, two, again = (
        prepare(
            recipe_of(
                folder,
                tmp_path / f"{number}",
                corpus={"keep_documents": how},
                run={"seed": seed},
            )
        )
        for number, seed in enumerate((0, 1, 0))
    )
    share = one["summary"]["bytes"] / sum(len(text.encode()) for text in texts)
    assert 0.4 <= share < 0.45
    assert one["fingerprint"] == again["fingerprint"] != two["fingerprint"]


def test_chosen_documents_are_part_of_what_blocks_are(lab, tmp_path):
    folder, _ = lab
    prepare(recipe_of(folder, tmp_path / "b", corpus={"keep_documents": {"by": "random"}}))
    with pytest.raises(BlocksError, match="keep_documents: by is random in the blocks"):
        prepare(recipe_of(folder, tmp_path / "b"))
    with pytest.raises(BlocksError, match="stretch: the losses of whole stretches were not kept"):
        prepare(
            recipe_of(
                folder,
                tmp_path / "b",
                corpus={"keep_documents": {"by": "random"}},
                objective={"method": "alm"},
            )
        )


# ---- what does not go together ----


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"store": {"combine": "min"}}, "joins several stores, store.path names 1"),
        ({"store": {"path": ["a", "a"]}}, "names a twice"),
        (
            {"store": {"path": ["a", "b"]}, "objective": {"method": "chunk"}},
            "one teacher's own tokens",
        ),
        (
            {"store": {"path": None}, "corpus": {"keep_documents": {"by": "random"}}},
            "keep_documents needs store.path",
        ),
        ({"corpus": {"keep_documents": {"by": "difference"}}}, "needs `against`"),
        (
            {"corpus": {"keep_documents": {"by": "random", "against": "x"}}},
            "reads no second store",
        ),
    ],
)
def test_contradictions_are_refused_by_prepare_and_check(lab, tmp_path, sections, message):
    folder, _ = lab
    recipe = recipe_of(folder, tmp_path / "b", **sections)
    with pytest.raises(RecipeError, match=message):
        prepare(recipe)
    assert any(message in problem for problem in static_problems(recipe))
    assert not (tmp_path / "b").exists()


def test_stores_of_other_corpora(lab, tmp_path):
    folder, texts = lab
    strange = write_store(tmp_path / "strange", [t + "!" for t in texts], folder / "third")
    how = {"by": "difference", "against": str(strange)}
    with pytest.raises(StoreError, match="no document in common"):
        prepare(recipe_of(folder, tmp_path / "b", corpus={"keep_documents": how}))
    # beside another store it has nothing to say, and loses nothing
    path = [str(folder / "store"), str(strange)]
    both = prepare(recipe_of(folder, tmp_path / "c", store={"path": path}))
    alone = prepare(recipe_of(folder, tmp_path / "d"))
    read = [Blocks(tmp_path / name, 32) for name in "cd"]
    columns = [blocks.read("guidance", 0, blocks.tokens) for blocks in read]
    np.testing.assert_array_equal(*columns)
    assert both["tokens"] == alone["tokens"]


def test_one_damaged_store_among_several(lab, tmp_path):
    folder, _ = lab
    broken = shutil.copytree(folder / "second", tmp_path / "broken")
    shard = next(broken.rglob("*.safetensors"))
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    path = [str(folder / "store"), str(broken)]
    with pytest.raises(VocagnolmError, match="broken"):
        prepare(recipe_of(folder, tmp_path / "b", store={"path": path}))
    shutil.copy(next((folder / "second").rglob("*.safetensors")), shard)
    assert prepare(recipe_of(folder, tmp_path / "b", store={"path": path}))["tokens"] > 0


def test_a_corpus_that_no_store_knows(lab, tmp_path):
    folder, _ = lab
    other = write_corpus(tmp_path / "other.jsonl", ["a new text", "and one more"])
    path = [str(folder / "store"), str(folder / "second")]
    recipe = recipe_of(folder, tmp_path / "b", store={"path": path}, corpus={"files": [str(other)]})
    with pytest.raises(
        BlocksError, match=r"Document 0 .* is not in the loss store .*store or .*second"
    ):
        prepare(recipe)
