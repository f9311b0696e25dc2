"""The folder of a try: its settings, its models, and every step that is finished."""

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from vocagnolm.base.files import differences, read_json, write_json
from vocagnolm.chat import ChatTokenizer, template_of
from vocagnolm.errors import UsageError
from vocagnolm.evaluate.bits import BitsPerByte, bits_per_byte
from vocagnolm.model import ModelFiles, open_model
from vocagnolm.report.view import model_names

LEAST = 16
"""Documents or prompts on either side of the split, at least."""
Facts = dict[str, Any]


@dataclass(frozen=True)
class TrySettings:
    """What a caller may choose."""

    minutes: float = 10.0
    learning_rate: float | None = None
    """Peak rate of the short runs; None: by the student's size."""
    seed: int = 0
    device: str = "auto"


class Tryout:
    """A try in its folder. The first source is the student, the others are its teachers."""

    def __init__(
        self,
        sources: Sequence[str],
        out: Path,
        settings: TrySettings,
        *,
        say: Callable[[str], None] = print,
        progress: Callable[[str, str], AbstractContextManager[Any]] = lambda *_: nullcontext(),
    ) -> None:
        """say: is given a line for every finished step. progress: opens a bar, for a label and a
        unit."""
        self.out, self.settings = out, settings
        self.say, self.progress = say, progress
        self.student = sources[0]
        self.names = model_names(list(sources))
        self.files: dict[str, ModelFiles] = {}
        self._prints: dict[str, str] = {}
        for source in sources:
            self.files[source] = open_model(source, device=settings.device)
            twin = self._prints.setdefault(self.files[source].describe()["fingerprint"], source)
            if twin != source or list(sources).count(source) > 1:
                raise UsageError(
                    f"{source} and {twin} are the same model: the teacher must be another model "
                    "than the student, and every teacher is named once."
                )
        self.state: Facts = {}

    def claim(self, **asked: Any) -> None:
        """Take the folder for these settings, and what was finished there before with the same."""
        identity = {"models": list(self._prints), **asked, **vars(self.settings)}
        self.state = {"try": identity}
        advice = "Choose another --out, or remove the folder."
        if (self.out / "state.json").is_file():
            self.state = read_json(self.out / "state.json", UsageError, advice, {"try": dict})
        for name, there, now in differences(self.state["try"], identity):
            raise UsageError(f"{self.out} holds a try with {name} {there}, not {now}. {advice}")

    def once(self, name: str, make: Callable[..., Facts], *given: Any) -> Facts:
        """The result of a step: from the folder, or made now and kept there."""
        if name not in self.state:
            self.state[name] = make(*given)
            write_json(self.out / "state.json", self.state)
        return dict(self.state[name])

    @contextmanager
    def bar(self, label: str, unit: str = "documents") -> Iterator[Callable[[float, int], None]]:
        with self.progress(label, unit) as meter:

            def note(done: float, total: int) -> None:
                if meter is not None:
                    meter.note(done, total, f"{done:,.0f}/{total:,} {unit}", done)

            yield note

    def sample(self, name: str) -> Path:
        return self.out / "sample" / f"{name}.jsonl"

    @property
    def on_gpu(self) -> bool:
        return self.files[self.student].device.type == "cuda"

    def parameters(self) -> dict[str, int]:
        """The size of every model, from its shapes alone."""
        with torch.device("meta"):
            return {
                source: AutoModelForCausalLM.from_config(files.config).num_parameters()
                for source, files in self.files.items()
            }

    def student_lengths(self, texts: Sequence[str], conversations: bool) -> list[int]:
        """The student's tokens of some texts; of conversations in its template."""
        tokenizer = self.files[self.student].tokenizer
        if not conversations:
            return [len(spans) for spans in tokenizer.spans_batch(texts)]
        read = ChatTokenizer(tokenizer, template_of(tokenizer, None, None)).outcomes(texts)
        return [len(tokens) for tokens in read if not isinstance(tokens, str)]

    def read(self, source: str, path: str | Path, name: str = "") -> Facts:
        """Bits per byte of held-out documents under a model; of conversations, of the answers."""
        name, measured = name or self.names[source], self.measured(source, path, name)
        self.say(f"{name}: {measured.value:.4f} bits per byte on the held-out documents")
        return {"by_document": [[at, *sums] for at, sums in measured.by_document.items()]}

    def measured(self, source: str, path: str | Path, name: str) -> BitsPerByte:
        files = open_model(source, device=self.settings.device)
        with self.bar(f"{name} reads") as note:
            return bits_per_byte(
                files.load(), files, [path], train_on="assistant", on_documents=note
            )


def rounded_speed(speed: float) -> float:
    """A measured speed as a power of two: measured again, it is nearly always the same."""
    return 2.0 ** math.floor(math.log2(max(speed, 2.0**-40)))
