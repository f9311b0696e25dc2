"""Bits per byte against plain logits, whatever the batch, of all the text or of its parts."""

import json
import math

import numpy as np
import pytest
import torch
from test_cli import run

from vocagnolm.errors import EvaluationError
from vocagnolm.evaluate.bits import bits_per_byte
from vocagnolm.evaluate.results import rank_texts
from vocagnolm.model import open_model


def test_bits_per_byte_against_plain_logits(model_folder, text):
    path, documents = text
    files = open_model(model_folder, device="cpu")
    model = files.load()
    bits = scored = 0.0
    for document in documents:
        spans = files.tokenizer.spans(document)
        ids = spans.ids.tolist()
        with torch.inference_mode():
            log_p = model(torch.tensor([ids])).logits[0].log_softmax(-1)
        bits -= sum(log_p[i - 1, ids[i]].item() for i in range(1, len(ids))) / math.log(2)
        scored += len(document.encode()) - int(spans.spans[0, 1])
    found = bits_per_byte(model, files, [path])
    assert found.value == pytest.approx(bits / scored, rel=1e-5)
    assert found.documents == 4 and found.scored_bytes == scored
    assert sum(one for one, _ in found.by_document.values()) == pytest.approx(found.bits)
    assert sum(size for _, size in found.by_document.values()) == scored and found.seconds > 0


def test_bits_per_byte_of_the_parts_that_count(model_folder, tmp_path):
    files = open_model(model_folder, device="cpu")
    model = files.load()
    text = "Müller has 3 apples.\nAnswer: 3 + 4 = 7. The answer is 7."
    start = text.index("Answer:")
    path = tmp_path / "marked.jsonl"
    path.write_text(json.dumps({"text": text, "counts": [[start, len(text)]]}) + "\n")
    spans = files.tokenizer.spans(text)
    ids = torch.tensor([[*files.prefix_ids, *spans.ids.tolist()]])
    with torch.inference_mode():
        log_p = model(ids).logits.float().log_softmax(-1)[0]
    nll = -log_p[:-1].gather(1, ids[0, 1:, None])[:, 0][-len(spans) :].numpy()
    first = len(text[:start].encode())
    inside = (spans.spans[:, 1] > first)[-len(nll) :]
    found = bits_per_byte(model, files, [path], parts_field="counts")
    assert found.scored_bytes == spans.token_bytes[-len(nll) :][inside].sum()
    assert found.bits == pytest.approx(nll[inside].sum() / math.log(2), rel=1e-5)
    whole = bits_per_byte(model, files, [path])
    assert whole.scored_bytes > found.scored_bytes
    path.write_text(json.dumps({"text": text}) + "\n")  # without the field: all of it
    assert bits_per_byte(model, files, [path], parts_field="counts") == whole
    path.write_text(json.dumps({"text": text, "counts": "all"}) + "\n")
    with pytest.raises(EvaluationError, match=r"must hold the parts that count"):
        bits_per_byte(model, files, [path], parts_field="counts")


def test_bits_per_byte_does_not_depend_on_the_batch(model_folder, text):
    path, _ = text
    files = open_model(model_folder, device="cpu")
    model = files.load()
    values = {
        bits_per_byte(model, files, [path], context=64, batch_tokens=tokens).value
        for tokens in (64, 300, 5000)
    }
    assert max(values) - min(values) < 1e-5
    assert values != {bits_per_byte(model, files, [path]).value}  # windows see less


def test_models_are_ranked_over_the_documents_that_all_could_read():
    rng = np.random.default_rng(0)
    hardness = rng.gamma(4.0, 25.0, 200)
    found = {
        name: {at: (float(factor * hard), 100) for at, hard in enumerate(hardness)}
        for name, factor in {"weak": 1.2, "strong": 1.0, "twin": 1.0}.items()
    }
    noise = rng.normal(0, 5, 200)
    found["twin"] = {at: (bits + noise[at], 100) for at, (bits, _) in found["twin"].items()}
    del found["weak"][7]
    found["strong"][9] = (0.0, 0)  # nothing of it was scored
    ranked = {one.name: one for one in rank_texts(found)}
    assert {one.documents for one in ranked.values()} == {198}
    weak, twin = ranked["weak"], ranked["twin"]
    assert weak.outcome == "worse" and list(ranked)[-1] == "weak"
    assert {ranked["strong"].outcome, twin.outcome} == {"equal"}
    low, high = weak.difference_interval
    assert low < weak.difference < high
    # paired: what is hard for one is hard for both
    assert high - low < 0.3 * (weak.interval[1] - weak.interval[0])
    against = {one.name: one for one in rank_texts(found, "weak")}
    assert against["strong"].outcome == "better" and against["weak"].difference == 0
    with pytest.raises(EvaluationError, match="no document that all of them can read"):
        rank_texts({"a": {0: (1.0, 1)}, "b": {1: (1.0, 1)}})


def test_several_models_on_a_text_in_one_table(model_folder, other_model_folder, text):
    path, _ = text
    done = run("evaluate", model_folder, other_model_folder, "--text", path, "--device", "cpu")
    assert done.returncode == 0, done.stderr
    assert "4 documents" in done.stdout and "against the best" in done.stdout
    alone = run("evaluate", model_folder, "--text", path, "--device", "cpu", "--json")
    both = ["evaluate", model_folder, other_model_folder, "--text", path, "--device", "cpu"]
    rows = {one["name"]: one for one in json.loads(run(*both, "--json").stdout)}
    value = json.loads(alone.stdout)["bits_per_byte"]
    assert rows[model_folder.name]["bits_per_byte"] == pytest.approx(value)
    for wrong in (["--tasks", "gsm8k"], ["--out", "here"], [model_folder]):
        refused = run(*both, *wrong)
        assert refused.returncode == 2 and "only be ranked on --text" in refused.stderr
