"""Which decoder layers suffer from products in fp8, on a real model and real text, on a CPU.

    PYTHONPATH=src python benchmarks/fp8_layers.py MODEL CORPUS [--documents 4] [--tokens 384]
        [--json [FILE]]
    PYTHONPATH=src python benchmarks/fp8_layers.py --smoke

The loss of MODEL on the first tokens of some documents that are long enough, in float32, with the
products of some of its layers rounded as `train.dtype: fp8` rounds them; `higher by` is relative to
float32. `train_in_fp8` leaves the first and the last layer alone for what this shows.
"""

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from measure import report
from record import add_json
from score_precision import read_texts
from shapes import tiny_model
from torch import nn
from torch.nn.functional import cross_entropy

from vocagnolm.alignment import load_tokenizer
from vocagnolm.model import open_model
from vocagnolm.model.fp8 import Fp8TrainedLinear
from vocagnolm.model.runtime import find_layers

Chosen = Callable[[int], bool]


def first_tokens(model: str, texts: list[str], tokens: int) -> torch.Tensor:
    tokenizer = load_tokenizer(model)
    found = [tokenizer.spans(text).ids[:tokens].astype("int64") for text in texts]
    found = [ids for ids in found if len(ids) == tokens]
    if not found:
        raise SystemExit(f"No document has {tokens} tokens.")
    return torch.from_numpy(np.stack(found))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n", 1)[0])
    parser.add_argument("model", nargs="?")
    parser.add_argument("corpus", nargs="?")
    parser.add_argument("--documents", type=int, default=4)
    parser.add_argument(
        "--tokens", type=int, default=384, help="of each document, a multiple of 16"
    )
    parser.add_argument("--smoke", action="store_true", help="a tiny random model")
    add_json(parser)
    given = parser.parse_args()
    if not given.smoke and given.corpus is None:
        parser.error("MODEL and CORPUS are needed: use --smoke to try the script without them")
    with tempfile.TemporaryDirectory() as lab:
        if given.smoke:
            from vocagnolm.report.comparison import SAMPLE

            model, texts, tokens = tiny_model(Path(lab) / "model", 500, layers=5), [*SAMPLE], 16
        else:
            model, tokens = given.model, given.tokens
            texts = read_texts(given.corpus, given.documents, 20 * tokens)
        rows = compare(model, first_tokens(model, texts, tokens))
    report(f"layers of {Path(model).name} in fp8, {tokens} tokens a document", rows, given.json)


@torch.no_grad()
def compare(folder: str, ids: torch.Tensor) -> list[dict[str, Any]]:
    model = open_model(folder, device="cpu", dtype="float32").load()
    layers = list(find_layers(model) or ())
    last = len(layers) - 1
    parts: dict[str, Chosen] = {
        "none: float32": lambda i: False,
        "all": lambda i: True,
        "all but the first": lambda i: i > 0,
        "all but the last": lambda i: i < last,
        "all but the first and the last": lambda i: 0 < i < last,
        "all but the first two and the last two": lambda i: 1 < i < last - 1,
        "the first alone": lambda i: i == 0,
        "the middle one alone": lambda i: i == last // 2,
        "the last alone": lambda i: i == last,
    }
    rows: list[dict[str, Any]] = []
    exact = 0.0
    for name, chosen in parts.items():
        for number, layer in enumerate(layers):
            for module in layer.modules():
                if type(module) in (nn.Linear, Fp8TrainedLinear):
                    module.__class__ = Fp8TrainedLinear if chosen(number) else nn.Linear
        logits = model(ids).logits[:, :-1].float()
        loss = float(cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten()))
        exact = exact or loss
        rows.append({"in fp8": name, "loss": loss, "higher by": loss / exact - 1})
    return rows


if __name__ == "__main__":
    main()
