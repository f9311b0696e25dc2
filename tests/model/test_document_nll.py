"""Documents through the plan against each token through the plain model, alone."""

import numpy as np
import pytest
import torch
import transformers
from torch import nn

from vocagnolm.errors import ModelError
from vocagnolm.model.nll import NllModel
from vocagnolm.model.runtime import compile_layers, find_layers

VOCABULARY = 211
SMALL = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}


def make(kind, **changes):
    torch.manual_seed(0)
    config = getattr(transformers, f"{kind}Config")(**SMALL | changes)
    model = getattr(transformers, f"{kind.removesuffix('Text')}ForCausalLM")(config).eval()
    for parameter in model.parameters():  # wide logits: a wrong head must show
        parameter.data.mul_(2.0)
    return model


MODELS = {
    "llama": lambda: make("Llama"),
    "llama tied": lambda: make("Llama", tie_word_embeddings=True),
    "qwen2, padded rows": lambda: make("Qwen2", vocab_size=VOCABULARY + 45),
    "mistral, sliding window": lambda: make("Mistral", sliding_window=16),
    "gemma2, softcap": lambda: make("Gemma2", sliding_window=16, final_logit_softcapping=5.0),
    "gemma3": lambda: make("Gemma3Text", sliding_window=16),
    "granite, divided": lambda: make("Granite", logits_scaling=8.0),
    "cohere, multiplied": lambda: make("Cohere", logit_scale=0.25),
    "gpt2, learned positions": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(
            vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=128
        )
    ).eval(),
    "gpt-neox": lambda: make("GPTNeoX"),
}
LENGTHS = (1, 2, 17, 47, 48, 49, 64, 150, 3)


def documents(seed=0):
    draw = np.random.default_rng(seed)
    return [draw.integers(3, VOCABULARY, n).astype(np.int32) for n in LENGTHS]


@torch.no_grad()
def naive(model, ids, *, context, stride, prefix):
    """Each token's window by closed form, that window alone through the plain model, cross
    entropy over all of its logits in float64."""
    room = context - len(prefix)
    out = np.full(len(ids), np.nan)
    windows = {}
    for t in range(len(ids)):
        step = room - stride
        start = 0 if t < room else ((t - room) // step + 1) * step
        if t - start + len(prefix) == 0:
            continue
        if start not in windows:
            row = torch.tensor([[*prefix, *ids[start : start + room].tolist()]])
            windows[start] = model(input_ids=row).logits[0].double()
        logits = windows[start][t - start + len(prefix) - 1]
        out[t] = nn.functional.cross_entropy(logits, torch.tensor(int(ids[t]))).item()
    return out


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("prefix", [(), (1,)], ids=["no bos", "bos"])
def test_equals_the_plain_model(name, prefix):
    model = MODELS[name]()
    ours = NllModel(model, context=48, stride=12, batch_tokens=200, prefix_ids=prefix)
    assert ours.form is not None
    texts = documents()
    for ids, found in zip(texts, ours.document_nll(texts), strict=True):
        expected = naive(model, ids, context=48, stride=12, prefix=prefix)
        assert np.isnan(found[0]) == (not prefix)
        np.testing.assert_allclose(found, expected, atol=1e-4, rtol=0)


@pytest.mark.parametrize("batch_tokens", [1, 100, 10_000])
def test_batches_do_not_matter_in_float32(batch_tokens):
    model = MODELS["llama"]()
    texts = documents(1)
    alone = NllModel(model, context=48, stride=12, batch_tokens=48)
    found = NllModel(model, context=48, stride=12, batch_tokens=batch_tokens).document_nll(texts)
    for a, ids in zip(found, texts, strict=True):
        np.testing.assert_allclose(a, alone.document_nll([ids])[0], atol=1e-4, rtol=0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_has_an_exact_head(dtype):
    """Against the same half-precision hidden states and a float64 head."""
    model = MODELS["qwen2, padded rows"]().to(dtype)
    ids = documents()[4]
    found = NllModel(model, context=64, stride=8, batch_tokens=64).document_nll([ids])[0]
    padded = np.zeros(64, np.int64)
    padded[: len(ids)] = ids
    with torch.no_grad():
        hidden = model.model(input_ids=torch.from_numpy(padded)[None]).last_hidden_state[0]
        logits = hidden.double() @ model.lm_head.weight.double().T
    expected = nn.functional.cross_entropy(
        logits[: len(ids) - 1], torch.from_numpy(ids[1:]).long(), reduction="none"
    )
    np.testing.assert_allclose(found[1:], expected.numpy(), atol=1e-4, rtol=1e-5)


class OddHead(transformers.LlamaForCausalLM):
    """A head that nobody has told us about."""

    def forward(self, *args, **kwargs):
        out = super().forward(*args, **kwargs)
        out.logits = out.logits * 1.7 + torch.linspace(0, 3, out.logits.shape[-1])
        return out


def test_an_unknown_head_is_noticed_and_scored_through_its_own_logits():
    torch.manual_seed(0)
    model = OddHead(transformers.LlamaConfig(**SMALL)).eval()
    ours = NllModel(model, context=48, stride=12, batch_tokens=200)
    assert ours.form is None
    texts = documents()
    for ids, found in zip(texts, ours.document_nll(texts), strict=True):
        expected = naive(model, ids, context=48, stride=12, prefix=())
        np.testing.assert_allclose(found, expected, atol=1e-4, rtol=0)


def test_the_same_documents_give_the_same_bits():
    ours = NllModel(MODELS["llama"](), context=48, stride=12, batch_tokens=200)
    first, second = ours.document_nll(documents()), ours.document_nll(documents())
    assert all(a.tobytes() == b.tobytes() for a, b in zip(first, second, strict=True))


def test_an_id_outside_the_embeddings_is_refused():
    ours = NllModel(MODELS["llama"](), context=48, stride=12, batch_tokens=200)
    with pytest.raises(ModelError, match=str(VOCABULARY)):
        ours.document_nll([np.array([1, VOCABULARY], np.int32)])


def test_progress_counts_every_token_once():
    ours = NllModel(MODELS["llama"](), context=48, stride=12, batch_tokens=200)
    counted = []
    ours.document_nll(documents(), counted.append)
    assert sum(counted) == sum(LENGTHS)


def test_compiled_layers_need_two_graphs_and_change_nothing():
    from torch._dynamo.testing import CompileCounter

    expected = NllModel(MODELS["llama"](), context=48, stride=12, batch_tokens=200)
    model = MODELS["llama"]()
    ours = NllModel(model, context=48, stride=12, batch_tokens=200)
    torch._dynamo.reset()
    counter = CompileCounter()
    assert compile_layers(model, (4, 48), backend=counter)
    texts = documents(2)
    texts = [t for t in texts if len(t) > 1] * 2
    for a, b in zip(ours.document_nll(texts), expected.document_nll(texts), strict=True):
        np.testing.assert_allclose(a, b, atol=1e-5)
    # full batches, other shapes, and a single row, which torch always treats apart
    assert 2 <= counter.frame_count <= 3
    torch._dynamo.reset()


def test_layers_are_found_in_all_architectures():
    for make_model in MODELS.values():
        model = make_model()
        layers = find_layers(model)
        assert layers is not None and len(layers) == 2
