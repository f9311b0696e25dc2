"""Every way in, and every wrong turn with one clear message."""

import json
import pickle
import sys

import made
import pytest
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from vocagnolm.alignment import load_tokenizer, token_spans
from vocagnolm.errors import MissingExtraError, TokenizerError
from vocagnolm.report.comparison import SAMPLE


def test_all_sources_give_the_same_tokenizer(tmp_path):
    folder = made.save("byte-level", tmp_path / "teacher")
    plain = made.tokenizer("byte-level")
    fast = PreTrainedTokenizerFast(tokenizer_object=plain)
    sources = [folder, str(folder), folder / "tokenizer.json", plain, fast]
    loaded = [load_tokenizer(source) for source in sources]
    assert len({tokenizer.fingerprint for tokenizer in loaded}) == 1
    assert [tokenizer.name for tokenizer in loaded[:3]] == ["teacher"] * 3
    assert len({tuple(token_spans(source, SAMPLE[0]).ids) for source in sources}) == 1


def test_the_fingerprint_sees_the_vocabulary_and_the_policy():
    one = load_tokenizer(made.tokenizer("byte-level"))
    other = load_tokenizer(made.tokenizer("byte-level large"))
    control = load_tokenizer(one, special_tokens="control")
    assert len({one.fingerprint, other.fingerprint, control.fingerprint}) == 3
    with pytest.raises(ValueError, match="'text' or 'control'"):
        load_tokenizer(one, special_tokens="magic")


@pytest.mark.parametrize(
    ("model_type", "byte_fallback", "kind"),
    [
        ("bpe", True, "SentencePiece BPE"),
        ("bpe", False, "SentencePiece BPE"),
        ("unigram", False, "SentencePiece Unigram"),
        ("unigram", True, "SentencePiece Unigram"),
    ],
)
def test_sentencepiece_models(tmp_path, model_type, byte_fallback, kind):
    sentencepiece = pytest.importorskip("sentencepiece")
    corpus = tmp_path / "corpus.txt"
    corpus.write_text("\n".join(SAMPLE))
    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus),
        model_prefix=str(tmp_path / "tokenizer"),
        vocab_size=600 if byte_fallback else 360,
        hard_vocab_limit=False,  # versions differ in how many pieces they find
        model_type=model_type,
        byte_fallback=byte_fallback,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
        minloglevel=2,
    )
    reference = sentencepiece.SentencePieceProcessor(model_file=str(tmp_path / "tokenizer.model"))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer.kind == kind
    for text in SAMPLE:
        for line in text.splitlines():
            tokens = tokenizer.spans(line)
            assert tokens.ids.tolist() == reference.encode(line)
            assert tokens.exact


def test_sentencepiece_is_an_extra(tmp_path, monkeypatch):
    (tmp_path / "tokenizer.model").write_bytes(b"x")
    monkeypatch.setitem(sys.modules, "sentencepiece", None)
    with pytest.raises(MissingExtraError, match=r"vocagnolm\[sentencepiece\]"):
        load_tokenizer(tmp_path)


def test_auto_tokenizer_with_other_ids_is_refused(tmp_path):
    """The class named in the configuration builds its own pipeline and ignores the file's."""
    made.save("byte-level prefix space", tmp_path)
    description = json.loads((tmp_path / "tokenizer.json").read_text())
    description["normalizer"] = {"type": "Lowercase"}
    (tmp_path / "tokenizer.json").write_text(json.dumps(description))
    (tmp_path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "GPT2Tokenizer"})
    )
    with pytest.raises(TokenizerError, match=r"AutoTokenizer.*different ids.*tokenizer_class"):
        load_tokenizer(tmp_path)
    # the file itself is still a tokenizer
    assert load_tokenizer(tmp_path / "tokenizer.json").spans("ABC").exact


def test_a_transformers_tokenizer_that_left_its_file_is_refused(tmp_path):
    made.save("byte-level", tmp_path)
    other = PreTrainedTokenizerFast(tokenizer_object=made.tokenizer("byte-level large"))
    other.name_or_path = str(tmp_path)
    with pytest.raises(TokenizerError, match="different ids"):
        load_tokenizer(other)


def test_an_honest_configuration_is_accepted(tmp_path):
    made.save("byte-level", tmp_path)
    config = {"tokenizer_class": "PreTrainedTokenizerFast"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    assert load_tokenizer(tmp_path).kind == "byte-level BPE"


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (
            lambda p: p,
            "has no tokenizer: expected tokenizer.json or tokenizer.model, found nothing",
        ),
        (lambda p: p / "no" / "such" / "place", "does not exist"),
        (lambda p: _written(p / "tokenizer.json", "{}"), "not a tokenizer"),
        (lambda p: _written(p / "tokenizer.model", "junk"), "not a SentencePiece model"),
        (lambda p: "nobody/nothing", "neither a local file or folder nor"),
        (lambda p: 42, "not a fast tokenizer"),
    ],
)
def test_wrong_sources(tmp_path, make, message):
    with pytest.raises(TokenizerError, match=message):
        load_tokenizer(make(tmp_path))


def _written(path, content):
    path.write_text(content)
    return path


def test_a_pickled_tokenizer_keeps_its_policy_and_its_template():
    for policy in ("text", "control"):
        before = load_tokenizer(made.tokenizer("wordpiece"), special_tokens=policy)
        after = pickle.loads(pickle.dumps(before))
        assert after.fingerprint == before.fingerprint and after.name == before.name
        for add in (False, True):
            one, two = (t.spans("[SEP] red", add_special_tokens=add) for t in (before, after))
            assert one.ids.tolist() == two.ids.tolist()
            assert one.spans.tolist() == two.spans.tolist()


def test_a_tokenizer_object_is_copied():
    original = Tokenizer.from_str(made.tokenizer("byte-level").to_str())
    before = original.to_str()
    load_tokenizer(original).spans("text")
    assert original.to_str() == before


def framed(folder, **settings):
    """A made tokenizer without a template, and the files beside it."""
    made.save("byte-level", folder)
    (folder / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", **settings})
    )
    return folder


def test_what_stands_before_a_text_is_one_rule(tmp_path):
    """DeepSeek's way: no template, `add_bos_token` in the files. Scoring, packing and evaluation
    all ask the tokenizer."""
    end = "<|endoftext|>"
    says_so = load_tokenizer(framed(tmp_path / "a", add_bos_token=True, bos_token=end))
    assert says_so.prefix_ids == (says_so.id_of(end),)
    written_out = {"content": end, "lstrip": False}
    same = load_tokenizer(framed(tmp_path / "b", add_bos_token=True, bos_token=written_out))
    assert same.prefix_ids == says_so.prefix_ids
    silent = load_tokenizer(framed(tmp_path / "c", add_bos_token=False, bos_token=end))
    assert silent.prefix_ids == () and silent.eos_id is None
    ends = load_tokenizer(framed(tmp_path / "d", eos_token=end))
    assert ends.eos_id == ends.id_of(end)
    (tmp_path / "c" / "config.json").write_text(json.dumps({"eos_token_id": [7, 8]}))
    assert load_tokenizer(tmp_path / "c", check=False).eos_id == 7
    assert load_tokenizer(tmp_path / "a" / "tokenizer.json").prefix_ids == says_so.prefix_ids
    assert pickle.loads(pickle.dumps(says_so)).prefix_ids == says_so.prefix_ids
    template = load_tokenizer(made.tokenizer("wordpiece"))
    assert [template.token(i) for i in template.prefix_ids] == ["[CLS]"]


def test_a_beginning_that_is_named_and_put_nowhere(tmp_path):
    """Gemma's and Llama's names are for that alone; GPT-2's names the end, ChatML's a turn."""

    def missing(name, **settings):
        tokenizer = Tokenizer.from_str(made.tokenizer("sentencepiece prepend").to_str())
        tokenizer.add_special_tokens(["<bos>", "<|begin_of_text|>", "<|im_start|>"])
        folder = framed(tmp_path / name, **settings)
        tokenizer.save(str(folder / "tokenizer.json"))
        return load_tokenizer(folder, check=False).missing_beginning

    for number, token in enumerate(("<s>", "<bos>", "<|begin_of_text|>", {"content": "<s>"})):
        assert missing(f"{number}", bos_token=token) in (token, "<s>")
    for number, token in enumerate(("<|endoftext|>", "<|im_start|>", None)):
        assert missing(f"other{number}", bos_token=token) is None
    for says in (True, False):
        assert missing(f"{says}", bos_token="<bos>", add_bos_token=says) is None


@pytest.mark.parametrize("content", ["", "[]", "{", "\udcff", "[" * 5000])
def test_broken_files_beside_a_tokenizer_are_one_message(tmp_path, content):
    folder = framed(tmp_path / "a")
    (folder / "tokenizer_config.json").write_bytes(content.encode("utf-8", "surrogateescape"))
    with pytest.raises(TokenizerError, match=r"tokenizer_config\.json"):
        load_tokenizer(folder)


def test_a_revision_reaches_the_hub(tmp_path, monkeypatch):
    asked = {}

    def snapshot(repository, **options):
        asked.update(options, repository=repository)
        return str(framed(tmp_path / "hub"))

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot)
    assert load_tokenizer("owner/name", revision="v2").name == "owner/name"
    assert asked["repository"] == "owner/name" and asked["revision"] == "v2"
