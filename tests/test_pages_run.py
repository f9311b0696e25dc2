"""Every command and snippet of the README, the quick start and the tutorial runs as it stands, in
order and in one folder: only models of the hub are replaced by tiny ones, and sizes by small ones.

A tiny shell reads the blocks, so that all commands run in this process.
"""

import json
import re
import shlex
import shutil
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path

import pytest
from evaluation_kit import ROWS, write_rows
from test_cli import run
from tryout_kit import chat_models, demo_prompts, speed

from vocagnolm.demo import corpus as demo_corpus

ROOT = Path(__file__).parent.parent
LOCAL = {
    r"HuggingFaceTB/SmolLM2-360M-Instruct|meta-llama/Llama-3.2-1B-Instruct": "models/start",
    r"HuggingFaceTB/SmolLM2-135M|TinyLlama/TinyLlama_v1.1": "models/start",
    r"Qwen/Qwen2.5-7B-Instruct|Qwen/Qwen2.5-1.5B|Qwen/Qwen2.5-Math-7B": "models/teacher",
}
SMALLER = {
    r"block_size: 2048": "block_size: 128",
    r"batch_blocks: (64|16 +#)": "batch_blocks: 2  #",
    r"micro_batch: auto": "micro_batch: 1",
    r"compile: true": "compile: false",
    r"tokens: [48]00_000": "tokens: 8_000",
    r"--tasks gsm8k": "--tasks gsm8k --benchmarks benchmarks --shots 0 --max-new-tokens 8",
    r"vocagnolm write": "vocagnolm write --samples 1 --max-new-tokens 48",
    r"--answer-field answer": "--answer-field answer --max-new-tokens 48",
    r"topics\.values\(\)": "list(topics.values())[:6]",
    r'\("student", 1000\), \("teacher", 4000\)': '("student", 400), ("teacher", 700)',
    r"vocab_size: 1000": "vocab_size: 400",
    r"vocab_size: 4000": "vocab_size: 700",
}
LEFT_OUT = ("pip", "pipx", "make", "hf", "torchrun")
"""Installing, logging in, and several processes."""


def small(text: str) -> str:
    for old, new in {**LOCAL, **SMALLER}.items():
        text = re.sub(old, new, text)
    return text


def blocks(page: str) -> Iterator[str]:
    """The blocks of a page that are meant to be run; the others show files and outputs."""
    text = (ROOT / page).read_text(encoding="utf-8")
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```", text, re.MULTILINE | re.DOTALL):
        known = ("vocagnolm ", "python ", "cat >", *(f"{word} " for word in LEFT_OUT))
        if language == "python" or (language in ("", "bash") and block.startswith(known)):
            yield ("#python\n" if language == "python" else "") + block


def run_block(block: str, names: dict) -> None:
    if block.startswith("#python"):
        exec(small(block), names)
        return
    lines = iter(small(block).replace("\\\n", " ").splitlines())
    for line in lines:
        words = line.split()
        if words and words[-1] == "<<'END'":
            body = "\n".join(takewhile(lambda line: line != "END", lines)) + "\n"
            if words[0] == "cat":
                Path(words[2]).write_text(body)
            else:
                exec(body, {})
        else:
            for command in re.sub(r"\s#.*", "", line).split("&&"):
                run_command(command)


def run_command(command: str) -> None:
    command, _, target = command.partition(" > ")
    words = shlex.split(command)
    if not words or words[0] in LEFT_OUT:
        return
    assert words[0] == "vocagnolm", f"this test cannot run {command}"
    done = run(*words[1:])
    assert done.returncode == 0, f"{command}\n{done.stderr}\n{done.stdout}"
    if target:
        Path(target.strip()).write_text(small(done.stdout))


@pytest.fixture
def place(tmp_path, monkeypatch):
    """An empty folder with what a user brings: models, a text, conversations and prompts."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("VOCAGNOLM_PROGRESS_SECONDS", "1000")
    chat_models(tmp_path / "models")
    documents = [text for _, text in demo_corpus.corpus_documents(100)]
    demo_prompts(tmp_path / "prompts.jsonl", 36)
    shutil.copy("prompts.jsonl", "conversations.jsonl")
    for name, texts in (("corpus", documents[:70]), ("held-out", documents[70:])):
        lines = (json.dumps({"text": text}) + "\n" for text in texts)
        Path(f"{name}.jsonl").write_text("".join(lines))
    Path("page.txt").write_text(documents[0])
    write_rows(tmp_path / "benchmarks", "gsm8k/test.jsonl", ROWS["gsm8k/test.jsonl"])
    with speed(64.0):
        yield tmp_path


@pytest.mark.slow
@pytest.mark.parametrize(
    ("page", "least"), [("README.md", 5), ("docs/quick-start.md", 6), ("docs/tutorial.md", 8)]
)
def test_a_page_runs_from_top_to_bottom(page, least, place):
    found = list(blocks(page))
    assert len(found) >= least
    names: dict = {}
    for block in found:
        run_block(block, names)
    html = {path.name for path in place.glob("*.html")}
    assert html == {"README.md": set(), "docs/tutorial.md": {"report.html"}}.get(
        page, {"report.html", "view.html"}
    )
