"""How fast a small model writes on a CPU: our decoder beside vLLM, in one run.

    PYTHONPATH=src python benchmarks/write_cpu.py [--vllm PYTHON] [--rows 32] [--json [FILE]]

Random weights in the shape of SmolLM2-135M in float32, prompts of 100 to 150 tokens, four answers
of 32 tokens to each at temperature 0.7 with 16 alternatives, nothing ends by itself. `--vllm`: the
Python of an environment with vLLM for CPUs (`make .venv-vllm/.installed`), which gets the same
weights and prompts and returns log probabilities. Each has all cores; the better of two rounds
counts, after one that warms up. Some minutes.
"""

import argparse
import json
import os
import subprocess
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measure import report
from record import add_json
from shapes import config_of, random_model

from vocagnolm.generate import Decoder, PromptTokens, Sampling

SAMPLES, TEMPERATURE, ALTERNATIVES, CONTEXT = 4, 0.7, 16, 256
ROUNDS = 3  # the first one warms up
VLLM = """
import json, sys, time
from vllm import LLM, SamplingParams
given = json.load(open(sys.argv[1]))
llm = LLM(given["model"], dtype="float32", max_model_len=given["context"],
          skip_tokenizer_init=True, max_num_seqs=given["rows"],
          max_logprobs=given["alternatives"], enable_prefix_caching=False)
how = SamplingParams(n=given["samples"], temperature=given["temperature"], max_tokens=given["new"],
                     logprobs=given["alternatives"], ignore_eos=True, detokenize=False, seed=0)
prompts = [{"prompt_token_ids": ids} for ids in given["prompts"]]
seconds = []
for _ in range(given["rounds"]):
    began = time.perf_counter()
    found = llm.generate(prompts, how, use_tqdm=False)
    seconds.append(time.perf_counter() - began)
tokens = sum(len(answer.token_ids) for one in found for answer in one.outputs)
json.dump({"tokens": tokens, "seconds": seconds}, open(sys.argv[2], "w"))
"""


def ours(model: Any, prompts: list[PromptTokens], rows: int) -> tuple[int, list[float]]:
    decoder = Decoder(
        model,
        ends=[],
        known=model.config.vocab_size,
        sampling=Sampling(TEMPERATURE),
        alternatives=ALTERNATIVES,
    )
    seconds, tokens = [], 0
    for _ in range(ROUNDS):
        began = time.perf_counter()
        answers = decoder.answers(prompts, rows=rows, slot_tokens=CONTEXT)
        tokens = sum(len(answer.tokens.ids) for answer in answers)
        seconds.append(time.perf_counter() - began)
    decoder.close()
    return tokens, seconds


def theirs(
    python: str, model: Any, prompts: list[PromptTokens], rows: int
) -> tuple[int, list[float]]:
    with tempfile.TemporaryDirectory() as folder:
        model.save_pretrained(Path(folder) / "model")
        given = {
            "model": f"{folder}/model",
            "prompts": [list(prompt.ids) for prompt in prompts],
            "context": CONTEXT,
            "rows": rows,
            "rounds": ROUNDS,
            "new": prompts[0].limit,
            **{"samples": SAMPLES, "temperature": TEMPERATURE, "alternatives": ALTERNATIVES},
        }
        asked, answered = Path(folder) / "asked.json", Path(folder) / "answered.json"
        asked.write_text(json.dumps(given), "utf-8")
        settings = {"VLLM_CPU_KVCACHE_SPACE": "2", "HF_HUB_OFFLINE": "1"}
        environment = {name: os.environ[name] for name in os.environ if name != "PYTHONPATH"}
        command = [python, "-c", VLLM, str(asked), str(answered)]
        subprocess.run(command, check=True, env=environment | settings, stdout=subprocess.DEVNULL)
        found = json.loads(answered.read_text("utf-8"))
    return found["tokens"], found["seconds"]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--smoke", action="store_true", help="tiny sizes")
    parser.add_argument("--vllm", metavar="PYTHON", help="of an environment with vLLM")
    parser.add_argument("--rows", type=int, default=32, help="answers at once")
    add_json(parser)
    given = parser.parse_args()
    new, rows = (4, 8) if given.smoke else (32, given.rows)
    model = random_model(config_of("smollm2-135m", given.smoke), torch.float32, "cpu").eval()
    random, size = np.random.default_rng(0), model.config.vocab_size
    prompts = [
        PromptTokens(
            random.integers(5, size - 5, int(random.integers(100, 151))).tolist(),
            tuple(n * 1_000_003 + m * 10_007 for m in range(SAMPLES)),
            new,
        )
        for n in range(2 * rows // SAMPLES)
    ]
    measured = {"vocagnolm": ours(model, prompts, rows)}
    if given.vllm:
        measured["vLLM"] = theirs(given.vllm, model, prompts, rows)
    table = [
        {
            "writing": name,
            "rows": rows,
            "answers": SAMPLES * len(prompts),
            "tokens": tokens,
            "seconds": min(seconds[1:]),
            "tokens/s": tokens / min(seconds[1:]),
        }
        for name, (tokens, seconds) in measured.items()
    ]
    report(f"writing on a CPU, {torch.get_num_threads()} threads", table, given.json)


if __name__ == "__main__":
    main()
