"""Generation against transformers' own, whatever the batch; likelihoods against plain logits."""

import re

import pytest
import torch
from evaluation_kit import make_model
from transformers import (
    AutoModelForCausalLM,
    Gemma3ForCausalLM,
    Gemma3TextConfig,
    GPT2Config,
    GPT2LMHeadModel,
    Llama4ForCausalLM,
    Llama4TextConfig,
    MistralConfig,
    MistralForCausalLM,
)

from vocagnolm.generate import Generator, Sampling
from vocagnolm.generate.reading import common_prefix_length, plan_batches
from vocagnolm.model import open_model

SHARED = (
    "Question: Tom has 1 apple and buys 2. How many?\nAnswer: 1 + 2 = 3. The answer is 3.\n\n\n"
)
PROMPTS = [
    SHARED + question
    for question in (
        "How many?",
        "What is the mean of the numbers in the table?",
        "x",
        "Seven red apples and two green apples are in the basket. How many apples in all, and why?",
        "Is Ann faster?",
    )
]
NEW_TOKENS = 24


def reference(files, model, prompt):
    """One prompt at a time through `generate`, with no padding and nothing shared."""
    ids = torch.tensor([[*files.prefix_ids, *files.tokenizer.spans(prompt).ids.tolist()]])
    ids = ids.to(model.device)
    out = model.generate(
        ids, do_sample=False, max_new_tokens=NEW_TOKENS, eos_token_id=0, pad_token_id=0
    )
    tokens = [t for t in out[0, ids.shape[1] :].tolist() if t != 0]
    data = b"".join(files.tokenizer.bytes_of(t) or b"" for t in tokens)
    return data.decode("utf-8", "replace")


def answers(generator, prompts=PROMPTS, stop=(), **options):
    batches = generator.generate(prompts, stop=stop, max_new_tokens=NEW_TOKENS, **options)
    return {index: answer.output for batch in batches for index, answer in batch}


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    return make_model(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def loaded(model_folder):
    files = open_model(model_folder, device="cpu")
    return files, files.load()


@pytest.fixture(scope="module")
def expected(loaded):
    return {i: reference(*loaded, prompt) for i, prompt in enumerate(PROMPTS)}


@pytest.mark.parametrize("batch_size", [1, 2, 5])
@pytest.mark.parametrize("shared", [True, False])
def test_same_answers_as_generate(loaded, expected, batch_size, shared, monkeypatch):
    files, model = loaded
    generator = Generator(model, files, batch_size)
    assert generator.decoder.by_rows
    if not shared:
        monkeypatch.setattr(generator, "_share", lambda rows: 0)
    try:
        assert answers(generator) == expected
    finally:
        generator.close()
    assert model.config._attn_implementation == "sdpa"


OTHERS = {
    "gpt2": lambda **rest: GPT2LMHeadModel(
        GPT2Config(n_layer=2, n_head=2, n_embd=32, n_positions=512, **rest)
    ),
    "mistral": lambda **rest: MistralForCausalLM(
        MistralConfig(
            hidden_size=32, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, sliding_window=16, initializer_range=0.4, **rest,
        )
    ),
    # layers with a window, and one without
    "gemma3": lambda **rest: Gemma3ForCausalLM(
        Gemma3TextConfig(
            hidden_size=32, intermediate_size=32, num_hidden_layers=3, num_attention_heads=2,
            num_key_value_heads=1, head_dim=16, sliding_window=24, initializer_range=0.4,
            layer_types=["sliding_attention", "full_attention", "sliding_attention"],
            tie_word_embeddings=False, **rest,
        )
    ),
    "llama4": lambda **rest: Llama4ForCausalLM(
        Llama4TextConfig(
            hidden_size=32, intermediate_size=32, intermediate_size_mlp=32, num_hidden_layers=2,
            num_attention_heads=2, num_key_value_heads=1, head_dim=16, num_local_experts=2,
            attention_chunk_size=32, initializer_range=0.4, **rest,
        )
    ),
}  # fmt: skip


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
@pytest.mark.parametrize("name", list(OTHERS))
def test_other_architectures(name, device, tmp_path):
    """Learned positions, sliding windows, and chunks, which are answered one by one."""
    folder = make_model(tmp_path)  # for the tokenizer
    size = open_model(folder, device="cpu").tokenizer.vocabulary_size
    torch.manual_seed(0)
    OTHERS[name](vocab_size=size, eos_token_id=0, bos_token_id=None).save_pretrained(folder)
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "TokenizersBackend"}')
    files = open_model(folder, device=device, dtype="float32")
    model = files.load()
    expected = {i: reference(files, model, p) for i, p in enumerate(PROMPTS)}
    generator = Generator(model, files, 3)
    assert generator.decoder.by_rows is (name != "llama4")
    assert answers(generator) == expected
    options = [(" (A)", " no, never")] * len(PROMPTS)
    likelihoods = dict(pair for batch in generator.compare(PROMPTS, options) for pair in batch)
    generator.close()
    for index, values in likelihoods.items():
        assert values == pytest.approx(plain_likelihoods(files, model, index, options), abs=1e-3)


def plain_likelihoods(files, model, index, options):
    """Log-likelihoods of a prompt's options, each read alone."""
    context = files.tokenizer.spans(PROMPTS[index]).ids.tolist()
    values = []
    for option in options[index]:
        ids = files.tokenizer.spans(PROMPTS[index] + option).ids.tolist()
        assert ids[: len(context)] == context
        with torch.inference_mode():
            log_p = model(torch.tensor([ids], device=model.device)).logits[0].log_softmax(-1)
        values.append(sum(log_p[i - 1, ids[i]].item() for i in range(len(context), len(ids))))
    return values


def test_stop_strings_cut_each_row_on_its_own(loaded):
    files, model = loaded
    generator = Generator(model, files, 5)
    (all_whole,) = generator.generate(PROMPTS, stop=(), max_new_tokens=NEW_TOKENS)
    whole = dict(all_whole)
    # a piece from the middle of one answer, over a token boundary
    stop = re.findall(r"[ -~]{4}", whole[1].output)[-1][:3]
    (found,) = generator.generate(PROMPTS, stop=[stop], max_new_tokens=NEW_TOKENS)
    generator.close()
    for index, answer in found:
        assert answer.output == whole[index].output.split(stop)[0]
        # those that the limit broke off are known
        assert answer.complete == (stop in whole[index].output or whole[index].complete)
    assert {answer.complete for _, answer in found} == {True, False}


def test_done_batches_are_passed_over_and_change_nothing(loaded):
    files, model = loaded
    generator = Generator(model, files, 2)
    whole = answers(generator)
    plan = plan_batches([len(row) for row in generator.encode(PROMPTS, NEW_TOKENS)], 2)
    rest = answers(generator, is_done=lambda batch: list(batch) == plan[0])
    generator.close()
    assert set(rest) == set(whole) - set(plan[0])
    assert all(rest[i] == whole[i] for i in rest)


def test_a_batch_without_room_is_done_in_halves(loaded, monkeypatch):
    files, model = loaded
    generator = Generator(model, files, 5)
    answer, compare, sizes = generator.decoder.answers, generator.decoder.losses, []

    def with_little_memory(work):
        def called(asked, **options):
            sizes.append(len(asked))
            if len(asked) > room:
                raise torch.OutOfMemoryError("Tried to allocate 64.00 MiB.")
            return work(asked, **options)

        return called

    def measured():
        (options,) = generator.compare(PROMPTS, [[" 3", " apples"]] * len(PROMPTS))
        return answers(generator), [value for _, values in options for value in values]

    whole, values = measured()
    monkeypatch.setattr(generator.decoder, "answers", with_little_memory(answer))
    monkeypatch.setattr(generator.decoder, "losses", with_little_memory(compare))
    room = 2
    in_parts, values_in_parts = measured()
    assert in_parts == whole
    assert values_in_parts == pytest.approx(values, abs=1e-4)
    assert sizes[:3] == [5, 3, 2]
    assert f"halved {generator.halvings} times" in generator.notes()[0]
    room = 0
    with pytest.raises(torch.OutOfMemoryError):
        answers(generator)
    generator.close()


def test_prompts_that_do_not_fit_lose_their_beginning(tmp_path):
    files = open_model(make_model(tmp_path, context=64), device="cpu")
    model = files.load()
    generator = Generator(model, files, 4)
    rows = generator.encode([SHARED * 3, "short"], 24)
    assert len(rows[0]) == 40 and rows[0] == files.tokenizer.spans(SHARED * 3).ids.tolist()[-40:]
    assert generator.truncated_prompts == 1
    assert "64 tokens: 1 of the prompts" in generator.notes()[0]
    assert len(answers(generator, [SHARED * 3, "short"])) == 2
    generator.close()


def test_a_long_limit_does_not_shorten_the_prompt(tmp_path):
    files = open_model(make_model(tmp_path, context=600), device="cpu")
    generator = Generator(files.load(), files, 1)
    generator.decoder._ends = generator.ends = frozenset()  # write to the end
    (((_, answer),),) = generator.generate([SHARED], stop=(), max_new_tokens=1024)
    generator.close()
    assert generator.truncated_prompts == 0 and answer.complete is False
    assert answer.output


@pytest.mark.parametrize("batch_size", [1, 3, 20])
def test_likelihood_of_options(loaded, batch_size):
    files, model = loaded
    options = [(" (A)", " (B)"), (" (A)", " (B)", " (C)"), (" yes", " no, never")] + [(" x",)] * 2
    generator = Generator(model, files, batch_size)
    likelihoods = dict(pair for batch in generator.compare(PROMPTS, options) for pair in batch)
    generator.close()
    for index, values in likelihoods.items():
        assert values == pytest.approx(plain_likelihoods(files, model, index, options), abs=1e-3)


def test_plan_and_common_prefix():
    assert plan_batches([3, 9, 9, 1], 2) == [[1, 2], [0, 3]]
    assert common_prefix_length([[1, 2, 3], [1, 2, 4]]) == 2
    assert common_prefix_length([[1, 2, 3]]) == 2
    assert common_prefix_length([[1, 2], [1, 2, 3]]) == 1
    assert common_prefix_length([[2, 2], [1, 2]]) == 0


def test_model_is_usable_afterwards(loaded, model_folder):
    files, model = loaded
    before = AutoModelForCausalLM.from_pretrained(model_folder)(torch.tensor([[5, 6, 7]])).logits
    Generator(model, files, 2).close()
    torch.testing.assert_close(model(torch.tensor([[5, 6, 7]])).logits, before)


def test_sampled_answers_depend_on_the_seed_alone(loaded):
    files, model = loaded

    def sampled(temperature, seed, batch_size=2):
        generator = Generator(model, files, batch_size, sampling=Sampling(temperature), seed=seed)
        found = answers(generator)
        generator.close()
        return found

    first = sampled(1.0, 1)
    assert sampled(1.0, 1, batch_size=5) == first
    assert sampled(1.0, 2) != first
    assert sampled(1e-4, 2) == sampled(0.0, 1)
