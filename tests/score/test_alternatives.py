"""What else the teacher would have said: the right tokens, the right probabilities, the right
bytes."""

import dataclasses
import json
from functools import cache

import numpy as np
import pytest
import torch
from chat_kit import loaded, make_chat_lab
from faults_kit import flip_bit
from score.teacher_kit import SETTINGS, ArithmeticTeacher, save_teacher, store_bytes, write_corpus
from training_kit import run_processes
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

from vocagnolm.alignment import load_tokenizer
from vocagnolm.alternatives import NOTHING, Alternatives, AlternativesSpec, pack
from vocagnolm.base.ranks import running_ranks
from vocagnolm.cli import app
from vocagnolm.errors import StoreError, UsageError
from vocagnolm.model import fp8, open_model
from vocagnolm.model import nll as choosing
from vocagnolm.model.nll import NllModel, token_nll, token_scores
from vocagnolm.objective.head import Head
from vocagnolm.score import LocalTeacher, score_corpus
from vocagnolm.store import LossStore, export_parquet, inspect_store, verify_store
from vocagnolm.store.format import VOCABULARY_FILE, encode_vocabulary

K = 3


def change(**changes):
    return dataclasses.replace(SETTINGS, **{"alternatives": K} | changes)


@pytest.fixture(scope="module")
def teacher(tmp_path_factory):
    return save_teacher(tmp_path_factory.mktemp("teacher"))


@pytest.fixture
def corpus(tmp_path):
    return write_corpus(tmp_path / "corpus.jsonl")


@cache
def plain_model(folder):
    return AutoModelForCausalLM.from_pretrained(folder).eval()


def own_log_probabilities(folder, ids, prefix):
    """Of every token's position, by the plain model: [tokens, vocabulary]."""
    with torch.no_grad():
        logits = plain_model(folder)(input_ids=torch.tensor([[*prefix, *ids]])).logits[0].double()
    return logits.log_softmax(-1)[len(prefix) - 1 : -1].numpy()


def assert_likeliest(found, log_p, ids):
    """K tokens whose probabilities are the K largest, within the rounding of the store."""
    best = -np.sort(-log_p, axis=1)[:, : found.packed.shape[1]]
    np.testing.assert_allclose(np.log(found.probability), best, atol=1 / 256 + 1e-4)
    picked = np.take_along_axis(log_p, found.ids.astype(int), axis=1)
    np.testing.assert_allclose(picked, best, atol=1e-4)
    np.testing.assert_array_equal(found.follows, found.ids == np.array(ids)[:, None])


@pytest.mark.parametrize("bos", [True, False])
def test_a_store_holds_the_plain_model_s_likeliest_tokens(tmp_path, corpus, bos):
    folder = save_teacher(tmp_path / "t", bos=bos, seed=3)
    score_corpus(folder, corpus, tmp_path / "s", settings=change())
    score_corpus(folder, corpus, tmp_path / "plain", settings=SETTINGS)
    store, plain = LossStore.open(tmp_path / "s"), LossStore.open(tmp_path / "plain")
    assert store.kept_alternatives == AlternativesSpec(K) and plain.kept_alternatives is None
    tokenizer = load_tokenizer(folder)
    prefix = [tokenizer.id_of("<|endoftext|>")] if bos else []
    compared = 0
    for index, line in enumerate(corpus.open()):
        ids = tokenizer.spans(json.loads(line)["text"]).ids.tolist()
        np.testing.assert_array_equal(store[index][1], plain[index][1])
        found = store.alternatives(index)
        assert found.packed.shape == (len(ids), K) and not found.sampled
        np.testing.assert_array_equal(found.present.all(axis=1), ~np.isnan(store[index][1]))
        first = 0 if bos else 1
        shown = ids[: 64 - len(prefix)]
        log_p = own_log_probabilities(folder, shown[first:], prefix or shown[:1])
        part = Alternatives(found.packed[first : len(shown)])
        assert_likeliest(part, log_p, shown[first:])
        compared += len(part)
    assert compared > 500


def test_a_store_without_them_has_the_bytes_it_always_had(tmp_path, teacher, corpus):
    """`test_store` has the digest of a shard; here all files."""
    score_corpus(ArithmeticTeacher(), corpus, tmp_path / "s", settings=SETTINGS)
    files = store_bytes(tmp_path / "s")
    assert VOCABULARY_FILE not in files
    manifest = json.loads(files["manifest.json"])
    assert manifest["format_version"] == 1 and "alternatives" not in manifest["identity"]
    shards = {entry["sha256"] for entry in manifest["shards"]}
    score_corpus(ArithmeticTeacher(), corpus, tmp_path / "z", settings=change(alternatives="0"))
    assert store_bytes(tmp_path / "z") == files and len(shards) == 5


def test_what_the_vocabulary_says(tmp_path, teacher, corpus):
    score_corpus(teacher, corpus, tmp_path / "s", settings=change())
    vocabulary = LossStore.open(tmp_path / "s").vocabulary
    tokenizer = load_tokenizer(teacher)
    end = tokenizer.id_of("<|endoftext|>")
    assert vocabulary[end] == b"" and vocabulary.ends.tolist() == [end]
    for index in (1, 100, tokenizer.vocabulary_size - 1):
        assert vocabulary[index] == tokenizer.bytes_of(index)


def test_the_same_bytes_however_it_is_made(tmp_path, teacher, corpus):
    for kind in (K, f"sampled:{K}"):
        settings = change(alternatives=kind)
        whole = tmp_path / f"whole-{kind}"
        score_corpus(teacher, corpus, whole, settings=settings)
        score_corpus(teacher, corpus, tmp_path / f"again-{kind}", settings=settings)
        assert store_bytes(whole) == store_bytes(tmp_path / f"again-{kind}")
        assert verify_store(whole) == []
        done = score_corpus(teacher, corpus, whole, settings=settings)
        assert done.scored_shards == 0


def test_another_number_is_another_store(tmp_path, teacher, corpus):
    score_corpus(teacher, corpus, tmp_path / "s", settings=change())
    before = store_bytes(tmp_path / "s")
    for other in (0, K + 1, f"sampled:{K}"):
        with pytest.raises(StoreError, match="alternatives"):
            score_corpus(teacher, corpus, tmp_path / "s", settings=change(alternatives=other))
    assert store_bytes(tmp_path / "s") == before


# ---- drawn ----


def test_draws_follow_the_distribution(tmp_path, teacher, corpus):
    """Over many places: a token of probability p is drawn in a share p of the draws."""
    settings = change(alternatives="sampled:64")
    score_corpus(teacher, corpus, tmp_path / "s", settings=settings)
    store = LossStore.open(tmp_path / "s")
    assert store.kept_alternatives == AlternativesSpec(64, sampled=True)
    tokenizer = load_tokenizer(teacher)
    prefix = [tokenizer.id_of("<|endoftext|>")]
    expected = np.zeros(416)
    counts = np.zeros(416)
    for index, line in enumerate(corpus.open()):
        ids = tokenizer.spans(json.loads(line)["text"]).ids.tolist()[:63]
        p = np.exp(own_log_probabilities(teacher, ids, prefix))
        found = Alternatives(store.alternatives(index).packed[: len(ids)], sampled=True)
        np.testing.assert_allclose(
            np.log(found.probability),
            np.log(np.take_along_axis(p, found.ids.astype(int), axis=1)),
            atol=1 / 256 + 1e-3,
        )
        np.testing.assert_array_equal(found.mass, np.full(found.packed.shape, 1 / 64))
        expected += p.sum(0) * 64
        counts += np.bincount(found.ids.ravel(), minlength=416)
    assert counts.sum() > 50_000
    deviation = (counts - expected) / np.sqrt(expected)
    assert np.abs(deviation).max() < 5 and deviation.std() < 1.3


def test_draws_are_a_function_of_the_document_alone(tmp_path, teacher):
    one, two = (write_corpus(tmp_path / f"{n}.jsonl", documents=n) for n in (5, 12))
    settings = change(alternatives="sampled:4")
    stores = []
    for corpus in (one, two):
        score_corpus(teacher, corpus, tmp_path / f"s-{corpus.stem}", settings=settings)
        stores.append(LossStore.open(tmp_path / f"s-{corpus.stem}"))
    same = [stores[0].alternatives(n).packed for n in range(5)]
    for n in range(5):
        other = stores[1].alternatives(n).packed
        differing = (same[n] >> 12) != (other >> 12)
        assert differing.mean() < 0.01  # a batch of other shape may round otherwise
    assert not np.array_equal(same[0][:5], same[1][:5])


@pytest.mark.parametrize("rows", [5, 128, 130, 1000])
def test_drawn_by_the_running_sum(rows):
    torch.manual_seed(0)
    z = 3 * torch.randn(40, rows)
    z[0] = -torch.inf
    z[0, rows - 1] = 0.0  # all of it in the last
    z[1] = -50.0
    z[1, 0] = 10.0
    lse = z.logsumexp(-1)
    uniform = torch.rand(40, 200, dtype=torch.float64)
    uniform[:, 0], uniform[:, 1] = 0.0, 1 - 1e-16
    values, ids = choosing.drawn(z, lse, uniform)
    total = (z - lse[:, None]).double().exp().cumsum(1)
    expected = torch.searchsorted(total, uniform * total[:, -1:], right=True).clamp(max=rows - 1)
    assert (ids == expected).float().mean() > 0.99  # float32 sums may fall to the other side
    assert (ids[0] == rows - 1).all() and (ids[1] == 0).all()
    assert torch.equal(values, z.gather(1, ids)) and torch.isfinite(values).all()


def test_numbers_as_if_by_chance():
    numbers = choosing.uniform_numbers(torch.arange(2000), 16)
    assert float(numbers.min()) >= 0 and float(numbers.max()) < 1
    assert len(numbers.unique()) == numbers.numel()
    assert abs(float(numbers.mean()) - 0.5) < 0.01
    assert abs(float((numbers[:, 0] * numbers[:, 1]).mean()) - 0.25) < 0.02


# ---- ways through the head ----


@pytest.mark.parametrize(("rows", "count"), [(640, 1), (640, 4), (700, 4), (4096, 4), (4096, 20)])
def test_searching_groups_finds_the_same(rows, count):
    torch.manual_seed(0)
    z = torch.randn(50, rows)
    z[0] = 1.0  # all the same
    z[1, -1] = 9.0
    values, ids = choosing.by_groups(z, count)
    torch.testing.assert_close(values, z.topk(count).values)
    assert torch.equal(z.gather(1, ids), values)
    assert all(len(set(row)) == count for row in ids.tolist())


@pytest.mark.parametrize(
    "head", [{}, {"bias": True}, {"softcap": 3.0, "scale": 2.0}, {"dtype": torch.bfloat16}]
)
def test_any_head_in_any_chunks(head):
    torch.manual_seed(0)
    dtype = head.pop("dtype", torch.float32)
    bias = torch.randn(300, dtype=dtype) if head.pop("bias", False) else None
    own = Head(weight=torch.randn(300, 16, dtype=dtype), bias=bias, **head)
    hidden, labels = torch.randn(70, 16).to(dtype), torch.randint(0, 300, (70,))
    log_p = own.transform(hidden.float() @ own.weight.float().T).log_softmax(-1).double().numpy()
    for chunk in (None, 9):
        found = token_scores(hidden, own, labels, chunk=chunk, alternatives=AlternativesSpec(5))
        given = Alternatives(found.packed_NK.numpy().view(np.uint32))
        assert_likeliest(given, log_p, labels.tolist())
        torch.testing.assert_close(
            found.nll_N, token_nll(hidden, own, labels), rtol=1e-4, atol=1e-4
        )


def test_a_row_that_is_not_a_number_has_none():
    hidden = torch.ones(2, 4)
    hidden[0, 0] = torch.nan
    found = token_scores(
        hidden,
        Head(weight=torch.randn(9, 4)),
        torch.zeros(2, dtype=torch.int64),
        alternatives=AlternativesSpec(2),
    )
    present = Alternatives(found.packed_NK.numpy().view(np.uint32)).present
    assert present.tolist() == [[False, False], [True, True]]


def test_a_head_in_fp8(tmp_path):
    folder = save_teacher(tmp_path / "t")
    model = open_model(folder, device="cpu", dtype="float32").load()
    scorer = NllModel(
        model,
        context=64,
        stride=16,
        batch_tokens=256,
        prefix_ids=(0,),
        fp8_head=True,
        alternatives=AlternativesSpec(K),
    )
    assert isinstance(model.get_output_embeddings(), fp8.Fp8Linear)
    ids = np.arange(60) * 7 % 416
    (found,) = scorer.start([ids])()
    with torch.no_grad():
        logits = model(input_ids=torch.tensor([[0, *ids]])).logits[0, :-1].double()
    assert_likeliest(Alternatives(found.alternatives), logits.log_softmax(-1).numpy(), ids)


def test_a_head_that_is_not_understood(tmp_path, monkeypatch):
    folder = save_teacher(tmp_path / "t")
    documents = [np.arange(n) * 7 % 416 for n in (5, 60, 150)]
    scores = []
    for form in ("known", None):
        model = open_model(folder, device="cpu", dtype="float32").load()
        options = {"context": 64, "stride": 16, "batch_tokens": 256, "prefix_ids": (0,)}
        for spec in (AlternativesSpec(K), AlternativesSpec(K, sampled=True)):
            scorer = NllModel(model, **options, alternatives=spec)
            scorer.form = scorer.form if form else None
            scores.append([one.alternatives for one in scorer.start(documents)()])
    for known, other in zip(scores[:2], scores[2:], strict=True):
        for a, b in zip(known, other, strict=True):
            assert ((a >> 12) == (b >> 12)).mean() > 0.98


def alternatives_of(folder, corpus, settings):
    teacher = LocalTeacher(open_model(folder, device="cpu"), settings)
    found = teacher.start(teacher.tokenize([json.loads(x)["text"] for x in corpus.open()]))()
    return np.concatenate([one.alternatives for one in found])


def parts_of_a_teacher(folder, corpus, out, kinds):
    with running_ranks(tensors=True) as ranks:
        for kind in kinds:
            # in every batch they wait for each other: there are few
            settings = change(alternatives=kind, shard_teacher=True, batch_tokens=2048)
            np.save(out / f"{kind}-{ranks.rank}.npy", alternatives_of(folder, corpus, settings))


@pytest.mark.slow
def test_two_processes_that_hold_one_teacher(tmp_path, corpus):
    """417 rows: the second process has one less than the first."""
    folder, kinds = save_teacher(tmp_path / "t", vocab_size=417), [K, "sampled:32"]
    run_processes(parts_of_a_teacher, 2, folder, corpus, tmp_path, kinds)
    for kind in kinds:
        alone = alternatives_of(folder, corpus, change(alternatives=kind))
        first, second = (np.load(tmp_path / f"{kind}-{rank}.npy") for rank in range(2))
        assert np.array_equal(first, second)
        assert (first == alone).mean() > 0.98  # sums of parts round otherwise


# ---- conversations ----


def test_conversations_have_alternatives_for_contents_and_ends_of_turns(tmp_path):
    make_chat_lab(tmp_path, 6)
    settings = change(context=None, stride=None)
    score_corpus(tmp_path / "teacher", tmp_path / "corpus.jsonl", tmp_path / "s", settings=settings)
    store = LossStore.open(tmp_path / "s")
    tokenizer = loaded(tmp_path / "teacher")
    turn = tokenizer.end_of_turn
    assert turn in store.vocabulary.ends
    assert len(store) == 6
    for index in range(len(store)):
        token_bytes, nll = store[index]
        found = store.alternatives(index)
        assert len(found) == len(token_bytes)
        np.testing.assert_array_equal(found.present.all(axis=1), ~np.isnan(nll))


# ---- looking at it ----


def test_inspect_tells_the_mass_by_rank(tmp_path, teacher, corpus):
    score_corpus(teacher, corpus, tmp_path / "s", settings=change())
    about = inspect_store(tmp_path / "s")
    store = LossStore.open(tmp_path / "s")
    every = Alternatives(np.concatenate([store.alternatives(n).packed for n in range(len(store))]))
    tokens = int(every.present[:, 0].sum())
    kept = about["alternatives"]
    assert about["format_version"] == 2 and kept["count"] == K and not kept["sampled"]
    np.testing.assert_allclose(kept["mass"], every.probability.sum(0) / tokens, rtol=1e-5)
    np.testing.assert_allclose(kept["hits"], every.follows.sum(0) / tokens, rtol=1e-9)
    assert sorted(kept["mass"], reverse=True) == kept["mass"]
    shown = CliRunner().invoke(app, ["store", "inspect", str(tmp_path / "s")]).stdout
    assert f"{K} per token, most likely first" in shown and "rank" in shown


def test_parquet_holds_readable_alternatives(tmp_path, teacher, corpus):
    pq = pytest.importorskip("pyarrow.parquet")
    score_corpus(teacher, corpus, tmp_path / "s", settings=change())
    export_parquet(tmp_path / "s", tmp_path / "s.parquet")
    store = LossStore.open(tmp_path / "s")
    for index, row in enumerate(pq.read_table(tmp_path / "s.parquet").to_pylist()):
        found = store.alternatives(index)
        assert len(row["alternatives"]) == len(found) == len(row["nll"])
        for token, given in enumerate(row["alternatives"]):
            assert [one["id"] for one in given] == found.ids[token].tolist()
            assert [one["follows"] for one in given] == found.follows[token].tolist()
            np.testing.assert_allclose(
                [one["probability"] for one in given], found.probability[token], rtol=1e-6
            )
            for one in given:
                if one["id"] < len(store.vocabulary):
                    spelled = store.vocabulary[one["id"]].decode(errors="backslashreplace")
                    assert one["text"] == spelled
                else:
                    assert one["text"] is None  # a row of the head beyond the tokenizer


def test_damage_is_found_told_and_mended(tmp_path, teacher, corpus):
    score_corpus(teacher, corpus, tmp_path / "s", settings=change())
    whole = store_bytes(tmp_path / "s")
    path = tmp_path / "s" / VOCABULARY_FILE
    flip_bit(path)
    assert any(VOCABULARY_FILE in problem for problem in verify_store(tmp_path / "s"))
    with pytest.raises(StoreError, match=r"vocabulary.*checksum"):
        _ = LossStore.open(tmp_path / "s").vocabulary
    score_corpus(teacher, corpus, tmp_path / "s", settings=change())
    assert store_bytes(tmp_path / "s") == whole
    path.unlink()
    assert any("it is missing" in problem for problem in verify_store(tmp_path / "s"))
    with pytest.raises(StoreError, match="is missing"):
        _ = LossStore.open(tmp_path / "s").vocabulary
    score_corpus(teacher, corpus, tmp_path / "s", settings=change())
    assert store_bytes(tmp_path / "s") == whole


def test_the_format_can_be_read_with_what_the_documentation_says(tmp_path, teacher, corpus):
    """Nothing but struct and json, as a reader in another language would."""
    import struct

    score_corpus(teacher, corpus, tmp_path / "s", settings=change())
    store = LossStore.open(tmp_path / "s")

    def columns(name):
        raw = (tmp_path / "s" / name).read_bytes()
        (size,) = struct.unpack("<Q", raw[:8])
        header = json.loads(raw[8 : 8 + size])
        about = json.loads(header.pop("__metadata__")["vocagnolm"])
        return about, {
            key: (raw[8 + size + e["data_offsets"][0] : 8 + size + e["data_offsets"][1]], e)
            for key, e in header.items()
        }

    about, shard = columns("shards/000000.safetensors")
    assert about["format_version"] == 2
    raw, entry = shard["alternatives"]
    assert entry["dtype"] == "U32" and entry["shape"][1] == K
    numbers = struct.unpack(f"<{len(raw) // 4}I", raw)
    first = numbers[:K]
    found = store.alternatives(0)
    assert [n >> 12 for n in first] == found.ids[0].tolist()
    assert [bool(n & 2048) for n in first] == found.follows[0].tolist()
    np.testing.assert_allclose(
        [2.718281828459045 ** (-(n & 2047) / 128) for n in first], found.probability[0], rtol=1e-6
    )
    about, vocabulary = columns(VOCABULARY_FILE)
    assert about["format"] == "vocagnolm-vocabulary" and about["dummy_space"] is False
    offsets = struct.unpack(f"<{len(store.vocabulary) + 1}I", vocabulary["offsets"][0])
    content = vocabulary["content"][0]
    token = int(found.ids[0, 0])
    assert content[offsets[token] : offsets[token + 1]] == store.vocabulary[token]


def test_a_card_says_what_is_in_it(tmp_path, teacher, corpus):
    score_corpus(teacher, corpus, tmp_path / "s", settings=change())
    done = CliRunner().invoke(app, ["store", "card", str(tmp_path / "s")])
    assert done.exit_code == 0
    card = (tmp_path / "s" / "README.md").read_text()
    assert f"| alternatives per token | {K}, most likely first |" in card
    assert "much of the text can be read back" in " ".join(card.split())
    assert "The text itself is not here" not in card


# ---- bad input ----


def command(*words):
    return CliRunner().invoke(app, ["score", *map(str, words)])


@pytest.mark.parametrize("given", ["65", "-1", "many", "sampled:0", "sampled:", "sampled", "4.0"])
def test_a_number_that_is_none(tmp_path, teacher, corpus, given):
    done = command(
        *("--teacher", teacher, "--corpus", corpus, "--out", tmp_path / "s"),
        f"--alternatives={given}",
    )
    assert isinstance(done.exception, UsageError)
    assert "expected a number from 0 to 64, or sampled:1" in str(done.exception)
    assert not (tmp_path / "s").exists()


def test_more_than_the_vocabulary_has(tmp_path, corpus):
    folder = save_teacher(tmp_path / "t")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 40}))
    with pytest.raises(UsageError, match=r"--alternatives 64: t has only 40 tokens"):
        score_corpus(folder, corpus, tmp_path / "s", settings=change(alternatives=64))
    (folder / "config.json").write_text(json.dumps(config | {"vocab_size": 2**20}))
    with pytest.raises(UsageError, match=r"numbers at most 1,048,575"):
        score_corpus(folder, corpus, tmp_path / "s", settings=change())


def test_a_teacher_of_losses_alone(tmp_path, corpus):
    with pytest.raises(UsageError, match="this teacher provides only losses"):
        score_corpus(ArithmeticTeacher(), corpus, tmp_path / "s", settings=change())


def test_a_store_without_them_is_told(tmp_path, corpus):
    score_corpus(ArithmeticTeacher(), corpus, tmp_path / "s", settings=SETTINGS)
    store = LossStore.open(tmp_path / "s")
    for ask in (lambda: store.alternatives(0), lambda: store.vocabulary):
        with pytest.raises(
            StoreError, match=r"holds no \w+\. Score the corpus again.*alternatives"
        ):
            ask()


@pytest.mark.slow
def test_the_command(tmp_path, teacher, corpus):
    words = [
        *("score", "--teacher", teacher, "--corpus", corpus, "--out", tmp_path / "s"),
        *("--device", "cpu", "--alternatives", "2"),
    ]
    done = CliRunner().invoke(app, [str(word) for word in words])
    assert done.exit_code == 0, (done.output, done.exception)
    assert "2 per token, most likely first" in done.stdout
    assert inspect_store(tmp_path / "s")["alternatives"]["count"] == 2


def test_packing_and_reading_back():
    ids = np.array([[0, 5, 2**20 - 2, 7]])
    nll = np.array([[0.0, 1.0, 15.9, np.nan]])
    follows = np.array([[False, True, False, False]])
    found = Alternatives(pack(ids, nll, follows))
    assert found.packed[0, 3] == NOTHING
    assert found.ids[0, :3].tolist() == [0, 5, 2**20 - 2]
    assert found.follows[0].tolist() == [False, True, False, False]
    np.testing.assert_allclose(-np.log(found.probability[0, :3]), [0.0, 1.0, 15.9], atol=1 / 256)
    assert found.probability[0, 3] == 0
    far = Alternatives(pack(np.array([[1]]), np.array([[40.0]]), np.array([[False]])))
    assert far.probability[0, 0] == pytest.approx(np.exp(-2047 / 128))
    draw = np.random.default_rng(0)
    nll = draw.exponential(2.0, (1000, 4))
    rounded = Alternatives(pack(draw.integers(0, 9, (1000, 4)), nll, nll < 0)).probability
    assert np.abs(rounded / np.exp(-nll) - 1)[nll < 15].max() < 0.004
    assert np.isclose((rounded / np.exp(-nll) - 1)[nll < 15].mean(), 0, atol=1e-4)
    assert (Alternatives(pack(ids, np.zeros((1, 4)), follows)).mass.sum(axis=1) <= 1).all()


def test_the_vocabulary_file_is_its_own_identity(tmp_path, teacher, corpus):
    score_corpus(teacher, corpus, tmp_path / "s", settings=change())
    store = LossStore.open(tmp_path / "s")
    content = (tmp_path / "s" / VOCABULARY_FILE).read_bytes()
    assert encode_vocabulary(store.vocabulary) == content
