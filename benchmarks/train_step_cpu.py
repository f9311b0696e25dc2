"""Guided training beside plain training with full logits, on a CPU. About a minute.

    python benchmarks/train_step_cpu.py [--json [FILE]] [--smoke]

A small Llama with a 32,000-token vocabulary in fp32: whole steps (forward, backward, AdamW),
taking turns. Targets: guided takes at most 1.0 x the time of plain training with full logits, by
stretch at most 1 % more than by token; reducible and alm, which train nearly all tokens, at most
1.05 x.
"""

import argparse
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from measure import report, side_by_side, stored_targets
from record import add_json
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from vocagnolm.objective import Head, ObjectiveConfig, objective_loss


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--smoke", action="store_true", help="tiny sizes")
    add_json(parser)
    parser.add_argument("--rounds", type=int, default=7)
    given = parser.parse_args()
    torch.manual_seed(0)
    vocabulary, hidden, rows, length = (400, 32, 2, 32) if given.smoke else (32000, 256, 4, 256)
    config = LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=hidden,
        intermediate_size=4 * hidden,
        num_hidden_layers=4,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=length,
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5)
    ids = torch.randint(0, vocabulary, (rows, length))
    labels = F.pad(ids[:, 1:], (0, 1), value=-100)
    guidance = 10 * torch.rand(rows, length)

    def full() -> Tensor:
        logits = model(input_ids=ids, use_cache=False).logits
        return F.cross_entropy(logits.float().flatten(0, 1), labels.flatten())

    def ours(**keys: Any) -> Callable[[], Tensor]:
        objective = ObjectiveConfig(**keys)
        targets = stored_targets(labels, guidance, objective)

        def loss() -> Tensor:
            states = model.model(input_ids=ids, use_cache=False).last_hidden_state
            head = Head(weight=model.lm_head.weight)
            return objective_loss(states, head, targets, objective).loss

        return loss

    def step(loss: Callable[[], Tensor]) -> Callable[[], None]:
        def call() -> None:
            optimizer.zero_grad(set_to_none=True)
            loss().backward()
            optimizer.step()

        return call

    calls = {
        "plain, full logits": step(full),
        "plain, ours": step(ours(method="cpt")),
        "guided, ours": step(ours()),
        "guided by stretch, ours": step(ours(compare="stretch")),
        "reducible by stretch, ours": step(ours(compare="stretch", weighting="reducible")),
        "alm, ours": step(ours(method="alm")),
    }
    times = side_by_side(calls, rounds=given.rounds, warm_up=1)
    table: list[dict[str, Any]] = [
        {
            "step": name,
            "ms": ms,
            "tokens/s": rows * length / ms * 1e3,
            "x time of plain, full logits": ms / times["plain, full logits"],
        }
        for name, ms in times.items()
    ]
    threads = torch.get_num_threads()
    report(f"train step on a CPU, {rows} x {length}, {threads} threads", table, given.json)


if __name__ == "__main__":
    main()
