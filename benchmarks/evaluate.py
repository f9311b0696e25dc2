"""Throughput of `vocagnolm evaluate` against lm-eval's own `gsm8k_cot`.

The same model, the same eight worked examples, the same questions, batch size and longest answer;
both generate greedily. The ratio is of the seconds spent in generation.

    python benchmarks/evaluate.py --benchmarks DIR [--model MODEL] [--questions 16]

Without a model, a small random one is made, which never stops by itself: then both write the
same number of tokens, and what is compared is reading the prompts and the loop.
"""

import argparse
import json
import logging
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from vocagnolm.evaluate.render import Request
    from vocagnolm.evaluate.results import Answer
    from vocagnolm.model.load import ModelFiles


def random_model(folder: Path, layers: int, width: int) -> Path:
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM

    from vocagnolm.evaluate.render import shots_of
    from vocagnolm.evaluate.suite import tasks_named

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=2000,
        special_tokens=["<|endoftext|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    texts = [text for task in tasks_named(None) for shot in shots_of(task) for text in shot]
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.save(str(folder / "tokenizer.json"))
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=width,
        intermediate_size=3 * width,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        max_position_embeddings=4096,
        bos_token_id=None,
        eos_token_id=0,
    )
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


def ours(
    files: "ModelFiles", model: "PreTrainedModel", requests: "list[Request]", batch_size: int
) -> "tuple[float, dict[int, Answer]]":
    from vocagnolm.evaluate.generate import Generator

    generator = Generator(model, files, batch_size)
    started = time.perf_counter()
    batches = generator.generate(
        [request.prompt for request in requests],
        stop=requests[0].stop,
        max_new_tokens=requests[0].max_new_tokens,
    )
    answers = dict(pair for batch in batches for pair in batch)
    seconds = time.perf_counter() - started
    generator.close()
    return seconds, answers


def theirs(
    files: "ModelFiles",
    model: "PreTrainedModel",
    docs: list[str],
    batch_size: int,
    max_new_tokens: int,
) -> float:
    """lm-eval's gsm8k_cot prompts through lm-eval's HFLM."""
    import yaml
    from lm_eval.api.instance import Instance
    from lm_eval.models.huggingface import HFLM
    from transformers import PreTrainedTokenizerFast

    from vocagnolm.evaluate.render import _lm_eval_file

    task = yaml.safe_load(_lm_eval_file("gsm8k", "gsm8k-cot.yaml"))
    samples = task["fewshot_config"]["samples"]
    put = task["doc_to_text"]
    shots = "".join(
        f"{put.replace('{{question}}', s['question'])} {s['target']}\n\n" for s in samples
    )
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=files.tokenizer._tokenizer)
    tokenizer.eos_token = tokenizer.pad_token = tokenizer.convert_ids_to_tokens(
        min(t for t in (model.config.eos_token_id, 0) if t is not None)
    )
    lm = HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size, device="cpu")
    settings = {**task["generation_kwargs"], "max_gen_toks": max_new_tokens}
    instances = [
        Instance(
            "generate_until", {}, (shots + put.replace("{{question}}", question), dict(settings)), i
        )
        for i, question in enumerate(docs)
    ]
    started = time.perf_counter()
    lm.generate_until(instances, disable_tqdm=True)
    return time.perf_counter() - started


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--benchmarks", required=True)
    parser.add_argument("--model")
    parser.add_argument("--questions", type=int, default=16)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    options = parser.parse_args()
    logging.disable(logging.WARNING)

    from vocagnolm.evaluate.benchmarks import load_examples
    from vocagnolm.evaluate.render import render, spread
    from vocagnolm.evaluate.suite import tasks_named
    from vocagnolm.model import open_model

    requests = render(
        tasks_named("gsm8k"),
        benchmarks=options.benchmarks,
        limit=options.questions,
        max_new_tokens=options.max_new_tokens,
    )["gsm8k"]
    examples = load_examples("gsm8k", options.benchmarks)
    docs = [examples[i].question for i in spread(len(examples), options.questions)]
    with tempfile.TemporaryDirectory() as made:
        source = options.model or random_model(Path(made), options.layers, options.width)
        files = open_model(source)
        model = files.load()
        lm_eval_seconds = theirs(files, model, docs, options.batch_size, options.max_new_tokens)
        our_seconds, answers = ours(files, model, requests, options.batch_size)
    print(
        json.dumps(
            {
                "model": str(options.model or "random"),
                "questions": len(docs),
                "batch_size": options.batch_size,
                "max_new_tokens": options.max_new_tokens,
                "lm_eval_seconds": round(lm_eval_seconds, 2),
                "vocagnolm_seconds": round(our_seconds, 2),
                "ratio": round(lm_eval_seconds / our_seconds, 2),
                "answers": len(answers),
            }
        )
    )


if __name__ == "__main__":
    main()
