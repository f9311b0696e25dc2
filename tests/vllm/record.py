"""Record what a real vLLM answers, for the tests that replay it.

    PYTHONPATH=tests python tests/vllm/record.py http://localhost:8000

The server must have the model of `save_served_teacher`, under the name `tiny`; `make test-vllm`
shows how it is started.
"""

import dataclasses
import json
import sys
import tempfile
from pathlib import Path

from score.server_kit import (
    RECORDED_ALTERNATIVES,
    RECORDING,
    SERVER_SETTINGS,
    key_of,
    save_served_teacher,
    write_served_corpus,
)

from vocagnolm.model.served.exchange import Exchange
from vocagnolm.score import score_corpus


def main(url):
    choices, tokenized, rest = {}, {}, {}
    ask = Exchange.ask

    def recording(self, path, content=None):
        answer, asked = ask(self, path, content), content or {}
        if path == "/tokenize":
            tokenized[asked["prompt"]] = answer
        elif path == "/v1/completions":
            found = answer.pop("choices")
            assert [choice["index"] for choice in found] == list(range(len(found)))
            choices.update(zip(map(key_of, asked["prompt"]), found, strict=True))
            rest["completion"] = answer
        else:
            rest[path.rpartition("/")[2]] = answer
        return answer | {"choices": found} if path == "/v1/completions" else answer

    Exchange.ask = recording
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "teacher").mkdir()
        teacher = save_served_teacher(Path(folder) / "teacher")
        corpus = write_served_corpus(Path(folder) / "corpus.jsonl")
        settings = dataclasses.replace(SERVER_SETTINGS, alternatives=RECORDED_ALTERNATIVES)
        score_corpus(teacher, corpus, f"{folder}/s", settings=settings, server=url)
    for model in rest["models"]["data"]:
        model["root"] = model["id"]  # instead of a path of the machine
    lines = [f"{json.dumps(key)}: {json.dumps(choice)}" for key, choice in choices.items()]
    RECORDING.write_text(
        json.dumps(rest)[:-1]
        + f',\n"tokenize": {json.dumps(tokenized)},\n"choices": {{\n'
        + ",\n".join(lines)
        + "\n}}\n"
    )


if __name__ == "__main__":
    main(sys.argv[1])
