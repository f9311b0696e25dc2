"""Bits per byte against plain logits, whatever the batch, of all the text or of its parts."""

import json
import math

import pytest
import torch

from vocagnolm.errors import EvaluationError
from vocagnolm.evaluate.bits import bits_per_byte
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
