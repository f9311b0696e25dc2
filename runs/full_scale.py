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
STORED = "guided from a loss store, compiled layers"


def hours(tokens: float, thousand_a_second: float) -> float:
    return tokens / (1000 * thousand_a_second) / 3600


def main() -> None:
    teacher_tokens = STUDENT_TOKENS * TEACHER_TOKENS_PER_STUDENT_TOKEN
    scoring = hours(teacher_tokens, SCORING)
    print("| step | k tokens/s on one GPU | GPU hours | hours on 32 GPUs |")
    print("| --- | ---: | ---: | ---: |")
    print(
        f"| scoring {teacher_tokens / 1e9:.1f}B teacher tokens, once | {SCORING} | "
        f"{scoring:,.0f} | {scoring / GPUS:.1f} |"
    )
    for name, rate in TRAINING.items():
        one = hours(STUDENT_TOKENS, rate)
        print(f"| {name} | {rate} | {one:,.0f} | {one / GPUS:.1f} |")
    print()
    print("| runs with one teacher | score once, then guide | guided online |")
    print("| ---: | ---: | ---: |")
    for runs in (1, 2, 5, 10, 20):
        stored = scoring + runs * hours(STUDENT_TOKENS, TRAINING[STORED])
        online = runs * hours(STUDENT_TOKENS, TRAINING["guided, 7B teacher online"])
        print(f"| {runs} | {stored:,.0f} | {online:,.0f} |")
    print()
    print(f"Store: {teacher_tokens * STORE_BYTES_PER_TEACHER_TOKEN / 1e9:.0f} GB.")


if __name__ == "__main__":
    main()
