"""Throughput of `vocagnolm evaluate` against lm-eval's own `gsm8k_cot`.

The same model, the same eight worked examples, the same questions, batch size and longest answer;
all generate greedily. The ratio is of the seconds spent in generation.

    python benchmarks/evaluate.py --benchmarks DIR [--model MODEL] [--questions 16]
        [--vllm-python .venv-vllm/bin/python] [--rounds 1]

Without a model, a small random one is made, which never stops by itself: then all write the
same number of tokens, and what is compared is reading the prompts and the loop.

With the Python of vLLM's environment (`make test-vllm` builds it), a server of vLLM is started on
the same model, and `evaluate --server` and lm-eval's `local-completions` are asked the same through
it, with as many prompts under way; lm-eval needs its extra `api` for that. Before every turn the
server forgets the prefixes that it has read. The engines take turns, and the seconds are medians.
"""

import argparse
import contextlib
import json
import logging
import os
import statistics
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from record import add_json, keep

if TYPE_CHECKING:
    from transformers import PreTrainedModel

    from vocagnolm.evaluate.render import Request
    from vocagnolm.generate import Answer, Generator, ServerGenerator
    from vocagnolm.model.load import ModelFiles


CONTEXT = 4096


def random_model(folder: Path, layers: int, width: int) -> Path:
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    from vocagnolm.evaluate.render import shots_of
    from vocagnolm.questions.suite import tasks_named

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
    end = "<|endoftext|>"
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=end).save_pretrained(folder)
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
    generator: "Generator | ServerGenerator", requests: "list[Request]"
) -> "tuple[float, dict[int, Answer]]":
    started = time.perf_counter()
    batches = generator.generate(
        [request.prompt for request in requests],
        stop=requests[0].stop,
        max_new_tokens=requests[0].max_new_tokens,
    )
    answers = dict(pair for batch in batches for pair in batch)
    return time.perf_counter() - started, answers


def theirs(lm: Any, docs: list[str], max_new_tokens: int) -> float:
    """lm-eval's gsm8k_cot prompts through a model of lm-eval's."""
    import yaml
    from lm_eval.api.instance import Instance

    from vocagnolm.evaluate.render import _lm_eval_file

    task = yaml.safe_load(_lm_eval_file("gsm8k", "gsm8k-cot.yaml"))
    samples = task["fewshot_config"]["samples"]
    put = task["doc_to_text"]
    shots = "".join(
        f"{put.replace('{{question}}', s['question'])} {s['target']}\n\n" for s in samples
    )
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


def their_local(files: "ModelFiles", model: "PreTrainedModel", batch_size: int) -> Any:
    from lm_eval.models.huggingface import HFLM
    from transformers import PreTrainedTokenizerFast

    tokenizer = PreTrainedTokenizerFast(tokenizer_object=files.tokenizer._tokenizer)
    tokenizer.eos_token = tokenizer.pad_token = tokenizer.convert_ids_to_tokens(
        min(t for t in (model.config.eos_token_id, 0) if t is not None)
    )
    return HFLM(pretrained=model, tokenizer=tokenizer, batch_size=batch_size, device="cpu")


def their_client(url: str, folder: Path, under_way: int) -> Any:
    """lm-eval's `local-completions`, one prompt in a request as its guide says."""
    from lm_eval.models.openai_completions import LocalCompletionsAPI
    from score_server import MODEL

    return LocalCompletionsAPI(
        base_url=f"{url}/v1/completions",
        model=MODEL,
        tokenizer=str(folder),
        tokenizer_backend="huggingface",
        num_concurrent=under_way,
        max_length=CONTEXT,
        timeout=3600,
    )


def our_client(url: str, files: "ModelFiles", batch_size: int, under_way: int) -> "ServerGenerator":
    from vocagnolm.generate import ServerGenerator
    from vocagnolm.model.served import ServedModel, Server

    served = ServedModel(Server(url=url, requests=-(-under_way // batch_size)))
    served.take_probe(files.tokenizer, files.prefix_ids, given=files.name)
    return ServerGenerator(served, files, batch_size)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--benchmarks", required=True)
    parser.add_argument("--model")
    parser.add_argument("--questions", type=int, default=16)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--vllm-python", help="Python of vLLM's environment")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    add_json(parser)
    options = parser.parse_args()
    logging.disable(logging.WARNING)

    from vocagnolm.evaluate.render import render, spread
    from vocagnolm.generate import Generator
    from vocagnolm.model import open_model
    from vocagnolm.questions.benchmarks import load_examples
    from vocagnolm.questions.suite import tasks_named

    requests = render(
        tasks_named("gsm8k"),
        benchmarks=options.benchmarks,
        limit=options.questions,
        max_new_tokens=options.max_new_tokens,
    )["gsm8k"]
    examples = load_examples("gsm8k", options.benchmarks)
    docs = [examples[i].question for i in spread(len(examples), options.questions)]
    seconds: dict[str, list[float]] = {}
    answers: dict[str, dict[int, Answer]] = {}
    with contextlib.ExitStack() as stack:
        made = stack.enter_context(tempfile.TemporaryDirectory())
        source = Path(options.model or random_model(Path(made), options.layers, options.width))
        files = open_model(source)
        model = files.load()
        generator = Generator(model, files, options.batch_size)
        stack.callback(generator.close)
        lm = their_local(files, model, options.batch_size)

        def of_ours(name: str, asked: "Generator | ServerGenerator") -> Callable[[], float]:
            def run() -> float:
                taken, answers[name] = ours(asked, requests)
                return taken

            return run

        engines: dict[str, Callable[[], float]] = {
            "vocagnolm": of_ours("vocagnolm", generator),
            "lm_eval": lambda: theirs(lm, docs, options.max_new_tokens),
        }
        if options.vllm_python:
            from score_server import started

            os.environ["VLLM_SERVER_DEV_MODE"] = "1"  # it can be told to forget what it has read
            url, _ = stack.enter_context(
                started(
                    *(options.vllm_python, str(source), "--dtype", "float32"),
                    *("--max-model-len", str(CONTEXT)),
                )
            )

            def forget_prefixes() -> None:
                request = urllib.request.Request(f"{url}/reset_prefix_cache", method="POST")
                urllib.request.urlopen(request).read()

            size, under_way = options.batch_size, len(requests)
            client = their_client(url, source, under_way)
            engines |= {
                "vocagnolm_server": of_ours(
                    "vocagnolm_server", our_client(url, files, size, under_way)
                ),
                "lm_eval_server": lambda: theirs(client, docs, options.max_new_tokens),
            }
        for _ in range(options.rounds):
            for name, run in engines.items():
                if name.endswith("_server"):
                    forget_prefixes()
                seconds.setdefault(name, []).append(run())
                print(f"{name}: {seconds[name][-1]:.1f} s", file=sys.stderr, flush=True)
    taken = {name: statistics.median(values) for name, values in seconds.items()}
    outcome = {
        "model": str(options.model or "random"),
        "questions": len(docs),
        "batch_size": options.batch_size,
        "max_new_tokens": options.max_new_tokens,
        **{f"{name}_seconds": round(value, 2) for name, value in taken.items()},
        "questions_per_second": {
            name: round(len(docs) / value, 3) for name, value in taken.items()
        },
        "ratio": round(taken["lm_eval"] / taken["vocagnolm"], 2),
        "answers": len(answers["vocagnolm"]),
        **{
            f"{name}_equal_answers": sum(
                answer.output == answers["vocagnolm"][i].output for i, answer in theirs.items()
            )
            for name, theirs in answers.items()
            if name != "vocagnolm"
        },
    }
    print(json.dumps(outcome))
    turns = [
        {"engine": name, "seconds": ", ".join(f"{value:.1f}" for value in values)}
        | {"questions/s": outcome["questions_per_second"][name]}
        for name, values in seconds.items()
    ]
    keep(options.json, "engines taking turns", turns)


if __name__ == "__main__":
    main()
