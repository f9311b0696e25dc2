"""The table of docs/full-scale.md: rates in, GPU hours out.

python runs/full_scale.py
"""

STUDENT_TOKENS = 15e9  # the paper: TinyLlama-1.1B, 15B tokens of OpenWebMath
TEACHER_TOKENS_PER_STUDENT_TOKEN = 0.88  # Qwen2.5 by Llama-2 on the clean part of main.jsonl
GPUS = 32  # the paper's H100s
STORE_BYTES_PER_TEACHER_TOKEN = 3.5

# thousand tokens a second on one H200, bf16, sequence length 2048: docs/benchmarks.md
SCORING = 42.5  # teacher tokens: 7B, compiled layers, chunked head
TRAINING = {  # student tokens, TinyLlama-1.1B configuration
    "plain pretraining, compiled layers": 75.3,
    "guided from a loss store, compiled layers": 76.5,
    "guided, 7B teacher online": 27.7,
    "TRL GOLD's loss, 7B teacher online": 3.7,
}
# a node lost every hour: docs/clusters.md, docs/benchmarks.md
GPUS_A_NODE = 8
SHARD_TOKENS = (
    1024 * 1589
)  # documents of a shard, tokens of a document: the lengths of score_gpu.py
BACK_SECONDS = 23.0  # a new node's worker, measured with a tiny teacher on two busy cores
LOADING_SECONDS = 120.0  # 15 GB of weights, compiled layers: assumed
STORED = "guided from a loss store, compiled layers"


def hours(tokens: float, thousand_a_second: float) -> float:
    return tokens / (1000 * thousand_a_second) / 3600


def with_lost_nodes(gpu_hours: float, away_hours: float | None) -> tuple[float, float, float]:
    """(hours, GPU hours spent, share done) when every full hour takes a node, which is back
    `away_hours` later, or never. A lost node's GPUs are half through a shard on average, which is
    scored again."""
    again = GPUS_A_NODE * SHARD_TOKENS / 2 / (1000 * SCORING) / 3600
    step = 1 / 3600
    now, left, spent = 0.0, gpu_hours, 0.0
    gpus, hour = GPUS, 1
    returns: list[float] = []
    while left > 0 and (gpus or returns):
        if now >= hour:
            hour += 1
            gpus -= GPUS_A_NODE
            left += again
            returns += [] if away_hours is None else [now + away_hours]
        while returns and returns[0] <= now:
            returns.pop(0)
            gpus += GPUS_A_NODE
        left -= gpus * step
        spent += gpus * step
        now += step
    return now, spent, 1 - max(0.0, left) / gpu_hours


def main() -> None:
    teacher_tokens = STUDENT_TOKENS * TEACHER_TOKENS_PER_STUDENT_TOKEN
    scoring = hours(teacher_tokens, SCORING)
    print(
        "| step | k tokens/s on one GPU | GPU hours | hours on 32 GPUs | GPU hours for 1B tokens |"
    )
    print("| --- | ---: | ---: | ---: | ---: |")
    steps = {f"scoring {teacher_tokens / 1e9:.1f}B teacher tokens, once": (SCORING, scoring)}
    steps |= {name: (rate, hours(STUDENT_TOKENS, rate)) for name, rate in TRAINING.items()}
    for name, (rate, whole) in steps.items():
        billion = hours(1e9, rate)
        print(f"| {name} | {rate} | {whole:,.0f} | {whole / GPUS:.1f} | {billion:.1f} |")
    print()
    print("| runs with one teacher | score once, then guide | guided online |")
    print("| ---: | ---: | ---: |")
    for runs in (1, 2, 5, 10, 20):
        stored = scoring + runs * hours(STUDENT_TOKENS, TRAINING[STORED])
        online = runs * hours(STUDENT_TOKENS, TRAINING["guided, 7B teacher online"])
        print(f"| {runs} | {stored:,.0f} | {online:,.0f} |")
    print()
    print("| a node of 8 GPUs is lost every hour and returns | hours | GPU hours | done |")
    print("| --- | ---: | ---: | ---: |")
    print(f"| (no node is lost) | {scoring / GPUS:.2f} | {scoring:.1f} | 100 % |")
    back = BACK_SECONDS + LOADING_SECONDS
    cases = {f"after {back:.0f} s": back / 3600, "after half an hour": 0.5, "never": None}
    for name, away in cases.items():
        there, spent, done = with_lost_nodes(scoring, away)
        print(f"| {name} | {there:.2f} | {spent:.1f} | {100 * done:.0f} % |")
    print()
    print(f"Store: {teacher_tokens * STORE_BYTES_PER_TEACHER_TOKEN / 1e9:.0f} GB.")


if __name__ == "__main__":
    main()
