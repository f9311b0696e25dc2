"""Teachers that write behind a real vLLM: `make test-vllm`. A start takes a minute or more."""

import json
import os
from dataclasses import replace

import numpy as np
import pytest
from tokenizers import Tokenizer
from vllm_kit import Vllm
from write.write_kit import rows_of, save_writer, write_prompts

from vocagnolm.data.corpus import open_corpus
from vocagnolm.errors import LimitError, ServerError
from vocagnolm.score import (
    ScoreSettings,
    Server,
    Spending,
    WriteSettings,
    score_corpus,
    write_answers,
)
from vocagnolm.store import LossStore, verify_store

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif("VOCAGNOLM_VLLM_PYTHON" not in os.environ, reason="`make test-vllm`"),
]
SETTINGS = WriteSettings(samples=3, max_new_tokens=20, alternatives=4, shard_prompts=4)


class Lab:
    def __init__(self, folder):
        self.folder = folder
        # heads of 32 dimensions: the smallest that vLLM has kernels for on a CPU
        wide = {"hidden_size": 128, "initializer_range": 0.01}
        self.teacher = save_writer(folder / "teacher", **wide)
        end = Tokenizer.from_file(f"{self.teacher}/tokenizer.json").token_to_id("<|im_end|>")
        (self.teacher / "generation_config.json").write_text(json.dumps({"eos_token_id": end}))
        write_prompts(folder / "prompts.jsonl")
        self.vllm = Vllm(folder)

    def write(self, out, by_ids, **options):
        given = {"settings": SETTINGS} | options
        server = Server(url=self.vllm.url, patience_seconds=600)
        teacher = self.teacher if by_ids else None
        prompts = self.folder / "prompts.jsonl"
        return write_answers(teacher, prompts, out, server=server, **given)


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    lab = Lab(tmp_path_factory.mktemp("vllm"))
    try:
        lab.vllm.start(lab.teacher, length=512)
        yield lab
    finally:
        lab.vllm.kill()


@pytest.mark.parametrize("by_ids", [True, False], ids=["completions", "chat"])
def test_what_it_writes_has_the_losses_of_the_local_model(lab, tmp_path, by_ids):
    """Wherever its tokens are those of the tokenizer, `score` finds the same numbers."""
    with pytest.raises(LimitError):
        lab.write(tmp_path / "w", by_ids, spending=Spending(max_requests=1))
    summary = lab.write(tmp_path / "w", by_ids)
    assert summary.folder["complete"] and verify_store(tmp_path / "w") == []
    settings = ScoreSettings(device="cpu", threads=1, context=256, alternatives=4)
    score_corpus(lab.teacher, tmp_path / "w", tmp_path / "read", settings=settings)
    written, read = LossStore.open(tmp_path / "w"), LossStore.open(tmp_path / "read")
    texts = [document.text for document in open_corpus(tmp_path / "w")]
    assert len(texts) == len(rows_of(tmp_path / "w")) > 15
    compared = 0
    for number in range(len(texts)):
        known = ~np.isnan(written.columns(number)["nll"])
        begin = written.spans(number)[known][0, 0]
        ours, theirs = (tokens_behind(store, number, begin) for store in (written, read))
        if not np.array_equal(ours["spans"], theirs["spans"]):
            continue
        if not by_ids and abs(ours["nll"][0] - theirs["nll"][0]) > 0.01:
            continue  # drawn with a space that is not in the conversation: another token
        compared += 1
        np.testing.assert_allclose(ours["nll"], theirs["nll"], atol=0.01)  # float16 below 16
        for one, other in zip(ours["likeliest"], theirs["likeliest"], strict=True):
            assert len(one.keys() & other.keys()) >= 3  # of two as likely, either may be there
            for name in one.keys() & other.keys():
                assert abs(one[name] - other[name]) <= 2
    assert compared >= 5


def tokens_behind(store, number, begin):
    """Spans, losses and alternatives of a document from this byte on; these by what they spell."""
    spans, columns = store.spans(number), store.columns(number)
    behind = (spans[:, 0] >= begin) & ~np.isnan(columns["nll"])
    given, vocabulary = store.alternatives(number), store.vocabulary
    ends = set(vocabulary.ends.tolist())
    likeliest = [
        {
            b"" if n in ends else vocabulary[n]: step
            for n, step in zip(ids, steps, strict=True)
            if n < len(vocabulary)
        }
        for ids, steps in zip(given.ids.tolist(), (given.packed & 2047).tolist(), strict=True)
    ]
    kept = [row for row, is_kept in zip(likeliest, behind, strict=True) if is_kept]
    return {"spans": spans[behind], "nll": columns["nll"][behind], "likeliest": kept}


def test_scaled_log_probabilities_are_refused(lab, tmp_path):
    lab.vllm.kill()
    lab.vllm.start(lab.teacher, length=512, more=["--logprobs-mode", "processed_logprobs"])
    try:
        for by_ids in (True, False):
            with pytest.raises(ServerError, match="--logprobs-mode raw_logprobs"):
                lab.write(tmp_path / "w", by_ids)
            at_one = replace(SETTINGS, temperature=1.0)
            out = tmp_path / f"one-{by_ids}"
            assert lab.write(out, by_ids, settings=at_one).folder["complete"]
    finally:
        lab.vllm.kill()
        lab.vllm.start(lab.teacher, length=512)
