"""`vocagnolm try`: from a student, its possible teachers and a corpus to a verdict, on a sample.

Read `try_pair` from top to bottom: its steps are `evaluate --text`, `score`, `prepare`, `train` and
`report`. Measured rates decide how many documents fit into the minutes. What is finished is kept in
the folder, and the same command goes on from there.
"""

import json
import math
import random
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any

import torch
import yaml
from transformers import AutoModelForCausalLM

from vocagnolm.base.files import (
    differences,
    folder_lock,
    local_path,
    read_json,
    write_json,
    write_text,
)
from vocagnolm.base.statistics import Z_95
from vocagnolm.data.corpus import Corpus, document_hash, open_corpus, read_texts
from vocagnolm.data.prepare import prepare
from vocagnolm.errors import CorpusError, UsageError
from vocagnolm.evaluate.bits import BitsPerByte, bits_per_byte
from vocagnolm.evaluate.results import TextScore, rank_texts
from vocagnolm.evaluate.run import evaluate
from vocagnolm.model import ModelFiles, open_model
from vocagnolm.recipe import recipe_from_dict
from vocagnolm.report import Measure, ResultGroup, Results, report_page, write_page
from vocagnolm.report.runs import write_sample
from vocagnolm.report.view import model_names
from vocagnolm.score import ScoreSettings, score_corpus
from vocagnolm.store.format import VOCABULARY_FILE
from vocagnolm.train.folder import read_metrics
from vocagnolm.train.run import train
from vocagnolm.train.settings import usual_learning_rate
from vocagnolm.train.strength import teacher_warning

RULES = {"cpt": "every token", "guided": "guided", "distill": "distilled"}
"""The methods that are tried, and what they are called."""
BEFORE = "the student before"
CHARACTERS = 500, 8_000
"""At least and at most of a document in the sample, from its beginning: where time is short, many
documents say more than long ones."""
LEAST, MOST_HELD_OUT, MOST_DOCUMENTS = 16, 2_000, 300_000
"""Documents: on either side of the split, on the held-out side, in all."""
HELD_OUT_SHARE = 0.25
"""Of the minutes: for reading the held-out documents, before and after training."""
SCORING_COST, TRAINING_COST = 1.2, 4.0
"""In the time that reading takes: guesses that choose the size of the sample and nothing else."""
ALTERNATIVES, STEPS = 4, 100
CAVEAT = (
    "These are bits per byte, which can mislead: students with more of them have answered better, "
    "and students with fewer worse (docs/try.md). Compare answers before you decide. One seed and "
    "one learning rate, not tuned for any method; intervals are 95 %, over documents only."
)
Facts = dict[str, Any]


def try_pair(
    student: str, teachers: Sequence[str], corpus: Sequence[str], out: str | Path, **settings: Any
) -> Facts:
    """The verdict on a pair, as `vocagnolm try --json` prints it. `settings`: fields of `Trial`;
    the others (text_field, split) as in `open_corpus`."""
    reading: Facts = {n: settings.pop(n) for n in ("text_field", "split") if n in settings}
    folder = local_path(out)
    with folder_lock(folder, "Wait for it to end, or choose another --out."):
        opened = open_corpus(list(corpus), **reading)
        trial = Trial([student, *teachers], opened, folder, **settings)
        names, once = trial.names, trial.once
        held_out = once("held_out", trial.draw_held_out)
        read = {source: once(f"read {source}", trial.read, source) for source in names}
        strength = ranked({names[source]: one for source, one in read.items()}, names[student])
        order = [one.name for one in strength]
        trial.teacher = min(teachers, key=lambda source: order.index(names[source]))
        training = once("training", trial.draw_training, read[student], read[trial.teacher])
        store = once("store", trial.score, read[trial.teacher])
        blocks = once("blocks", trial.prepare)
        runs = {rule: once(f"run {rule}", trial.train, rule) for rule in RULES}
        after = {RULES[rule]: run.pop("read") for rule, run in runs.items()}
        rules = ranked({BEFORE: read[student], **after}, RULES["cpt"])
        chosen = recommended(rules)
        size = held_out["corpus_bytes"]
        tokens = size * blocks["tokens"] / training["bytes"]
        result = {
            "student": student,
            "teacher": trial.teacher,
            "device": str(trial.files[student].device),
            "held_out": held_out,
            "training": training,
            "strength": [asdict(one) for one in strength],
            "blocks": blocks,
            "rules": [asdict(one) for one in rules],
            "runs": runs,
            "verdict": verdict(strength, rules, names[student], names[trial.teacher]),
            "recommended": chosen,
            "whole_corpus": {
                "documents": len(opened),
                "bytes": size,
                "scoring": [
                    size / store["bytes_per_second"],
                    size * store["disk_share"] + store["vocabulary_bytes"],
                ],
                "preparing": [size / blocks["bytes_per_second"], size * blocks["disk_share"]],
                "training": [tokens / runs[chosen]["rate"], 4 * held_out["parameters"]],
            },
            "recipe": str(folder / "recipe.yaml"),
            "page": str(folder / "report.html"),
        }
        recipe = trial.recipe(chosen, {"files": list(corpus), **reading})
        recipe_from_dict(recipe)  # what is wrong with it shows here
        head = f"# By `vocagnolm try`: {RULES[chosen]}, one pass over the corpus, not tuned."
        body = yaml.safe_dump(recipe, sort_keys=False, allow_unicode=True)
        write_text(folder / "recipe.yaml", f"{head}\n# Every key: docs/recipes.md\n{body}")
        trial.write_page(strength, rules, result)
        write_json(folder / "result.json", result)
        return result


def ranked(read: Mapping[str, Mapping[str, Any]], baseline: str) -> list[TextScore]:
    sums = {name: {at: s for at, *s in one["by_document"]} for name, one in read.items()}
    return rank_texts(sums, baseline)


@dataclass
class Trial:
    sources: list[str]
    """The student and its possible teachers."""
    corpus: Corpus
    out: Path
    minutes: float = 10.0
    learning_rate: float | None = None
    seed: int = 0
    device: str = "auto"
    say: Callable[[str], None] = print
    """Is given a line for every finished step."""
    progress: Callable[[str, str], AbstractContextManager[Any]] = lambda label, unit: nullcontext()
    """Opens a bar, for a label and a unit."""
    teacher: str = ""
    """The best one, which the rules use."""
    began: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        if self.corpus.conversations:
            raise CorpusError(
                "`vocagnolm try` reads texts, and the corpus holds conversations. Write a recipe "
                "for them: `score`, `prepare` and `train` read conversations."
            )
        self.student = self.sources[0]
        self.files: dict[str, ModelFiles] = {}
        self.names = model_names(self.sources)
        prints: dict[str, str] = {}
        for source in self.sources:
            self.files[source] = open_model(source, device=self.device)
            twin = prints.setdefault(self.files[source].describe()["fingerprint"], source)
            if twin != source or self.sources.count(source) > 1:
                raise UsageError(
                    f"{source} and {twin} are the same model: the teacher must be another model "
                    "than the student, and every teacher is named once."
                )
        identity = {"models": list(prints), "corpus": self.corpus.fingerprint}
        settings = ("minutes", "learning_rate", "seed", "device")
        identity |= {name: getattr(self, name) for name in settings}
        self.state: Facts = {"trial": identity}
        advice = "Choose another --out, or remove the folder."
        if (self.out / "state.json").is_file():
            self.state = read_json(self.out / "state.json", UsageError, advice, {"trial": dict})
        for name, there, now in differences(self.state["trial"], identity):
            raise UsageError(f"{self.out} holds a trial with {name} {there}, not {now}. {advice}")

    def once(self, name: str, make: Callable[..., Facts], *given: Any) -> Facts:
        """Made now, or found in the folder."""
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

    # ---- the sample ----

    def texts(self, start: int, count: int) -> list[tuple[int, str]]:
        """Usable documents from this part of a random order, with their positions in it."""
        documents = len(self.corpus)
        order = random.Random(self.seed).sample(range(documents), min(documents, MOST_DOCUMENTS))
        positions = {index: start + at for at, index in enumerate(order[start : start + count])}
        # from front to back: a compressed file is then read once
        read = (one for index in sorted(positions) for one in self.corpus.read(index, index + 1))
        return sorted((positions[one.index], one.text) for one in read if one.text is not None)

    def write(self, name: str, texts: Sequence[str]) -> Facts:
        if len(texts) < LEAST:
            raise CorpusError(
                f"The corpus is too small to split: it has {len(self.corpus):,} documents, and a "
                f"trial needs at least {2 * LEAST} different ones with text, half of them held "
                "out. Give more text; a text file is one document unless --split cuts it."
            )
        lines = (json.dumps({"text": text}, ensure_ascii=False) + "\n" for text in texts)
        write_text(self.sample(name), "".join(lines))
        return {"documents": len(texts), "bytes": sum(len(text.encode()) for text in texts)}

    def draw_held_out(self) -> Facts:
        """Documents that no student trains on: as many as all models can read in their share of
        the time, at most a quarter of the corpus."""
        most = max(LEAST, min(MOST_HELD_OUT, len(self.corpus) // 4))
        drawn = self.texts(0, most)
        unique = {document_hash(text): (position, text) for position, text in reversed(drawn)}
        usable = sorted(unique.values())
        with torch.device("meta"):  # shapes only, no weights
            configs = [one.config for one in self.files.values()]
            sizes = [AutoModelForCausalLM.from_config(one).num_parameters() for one in configs]
        files = self.files[self.student]
        model = files.load()
        for count in (LEAST, 8 * LEAST, 64 * LEAST):  # a little text; more where that is quick
            self.write("held-out", [text[:300] for _, text in usable[:count]])
            pilot = bits_per_byte(model, files, [self.sample("held-out")])
            if pilot.seconds > 1.0 or count >= len(usable):
                break
        times_read = len(RULES) + sum(sizes) / sizes[0]
        room = HELD_OUT_SHARE * 60 * self.minutes * pilot.scored_bytes / pilot.seconds / times_read
        cut = round(min(CHARACTERS[1], max(CHARACTERS[0], room / (4 * LEAST))))
        usable = [(position, text[:cut]) for position, text in usable]
        ends = accumulate(len(text.encode()) for _, text in usable)
        chosen = usable[: max(LEAST, sum(end <= room for end in ends))]
        facts = self.write("held-out", [text for _, text in chosen])
        self.say(f"held out: {facts['documents']:,} of {len(self.corpus):,} documents")
        facts["next_place"], facts["parameters"] = chosen[-1][0] + 1, sizes[0]
        whole = sum(len(text.encode()) for _, text in drawn) / most * len(self.corpus)
        return facts | {"corpus_bytes": round(whole), "characters": cut}

    def read(self, source: str, name: str = "") -> Facts:
        """The held-out documents, read by a model."""
        began, found, name = time.perf_counter(), list[BitsPerByte](), name or self.names[source]
        with self.bar(f"{name} reads") as note:
            evaluate(
                source,
                text=[self.sample("held-out")],
                device=self.device,
                on_text=found.append,
                on_progress=lambda now: note(now.done, now.total),
            )
        bits = found[0]
        self.say(f"{name}: {bits.value:.4f} bits per byte on the held-out documents")
        return {
            "by_document": [[at, *pair] for at, pair in bits.by_document.items()],
            "bytes_per_second": bits.scored_bytes / bits.seconds,
            "seconds": time.perf_counter() - began,
        }

    def draw_training(self, ours: Facts, theirs: Facts) -> Facts:
        """Documents to train on: as many as the rest of the time allows, none of them held out."""
        held = self.state["held_out"]
        left = 60 * self.minutes - (time.monotonic() - self.began)
        left -= 1.5 * len(RULES) * ours["seconds"]  # reading again, and loading
        seconds_per_byte = SCORING_COST / theirs["bytes_per_second"]
        seconds_per_byte += len(RULES) * TRAINING_COST / ours["bytes_per_second"]
        room = max(left, 6 * self.minutes) / seconds_per_byte
        count = max(LEAST, round(room * held["documents"] / held["bytes"]))
        never = {document_hash(text) for text in read_texts(self.sample("held-out"))[0]}
        drawn = (one[: held["characters"]] for _, one in self.texts(held["next_place"], count))
        texts = [text for text in drawn if document_hash(text) not in never]
        facts = self.write("training", texts)
        spans = self.files[self.student].tokenizer.spans_batch(texts[:64])
        share = sum(map(len, spans)) / sum(one.n_bytes for one in spans)
        self.say(f"to train on: {facts['documents']:,} documents, {facts['bytes'] / 1e6:,.2f} MB")
        return facts | {"student_tokens": round(share * facts["bytes"])}

    # ---- the rules ----

    def score(self, read: Facts) -> Facts:
        settings = ScoreSettings(device=self.device, alternatives=ALTERNATIVES, compiled=False)
        with self.bar(f"{self.names[self.teacher]} scores") as note:
            done = score_corpus(
                self.teacher,
                self.sample("training"),
                self.out / "store",
                settings=settings,
                on_progress=lambda now: note(now.documents, now.total_documents),
            )
        facts, rate = done.store, done.tokens_per_second
        self.say(f"scored: {facts['tokens']:,} tokens with {ALTERNATIVES} alternatives each")
        # a store that an interrupted trial has finished was not timed
        known = rate * facts["bytes"] / facts["tokens"] if rate else read["bytes_per_second"]
        vocabulary = (self.out / "store" / VOCABULARY_FILE).stat().st_size  # of any corpus the same
        return {
            "bytes_per_second": known,
            "disk_share": (facts["file_bytes"] - vocabulary) / facts["bytes"],
            "vocabulary_bytes": vocabulary,
        }

    def prepare(self) -> Facts:
        seconds = []
        for _ in range(2):  # the second time all is there: what is left is opening it
            began = time.perf_counter()
            manifest = prepare(recipe_from_dict(self.recipe("distill")))
            seconds.append(time.perf_counter() - began)
        text, summary = self.state["training"]["bytes"], manifest["summary"]
        size = sum(file.stat().st_size for file in (self.out / "blocks").glob("part-*"))
        return {
            "tokens": manifest["tokens"],
            "mapped_share": summary["mapped_share"],
            "one_to_one_share": summary["one_to_one_share"],
            "target_share": sum(summary["target_shares"][key] for key in ("shared", "continued")),
            "bytes_per_second": text / max(seconds[0] - seconds[1], 0.1 * seconds[0]),
            "disk_share": size / text,
        }

    def train(self, rule: str) -> Facts:
        """A short run of a rule, and its student on the held-out documents."""
        recipe = recipe_from_dict(self.recipe(rule))
        done = train(recipe)
        records = read_metrics(Path(done["run"]) / "metrics.jsonl")
        return {
            "folder": done["run"],
            "steps": done["steps"],
            "tokens": done["tokens"],
            "learning_rate": recipe.optimizer.learning_rate,
            "rate": median(record["tokens_per_second"] for record in records),
            "read": self.read(done["model"], RULES[rule]),
        }

    def recipe(self, rule: str, whole: Facts | None = None) -> dict[str, Facts]:
        """Of a short run; or, with its section `corpus`, of one pass over the whole corpus."""
        held, training = self.state["held_out"], self.state["training"]
        files = self.files[self.student]
        tokens, on_gpu = training["student_tokens"], files.device.type == "cuda"
        if whole:
            tokens = round(tokens * held["corpus_bytes"] / training["bytes"])
        fitting = 2 ** int(math.log2(max(min(128, tokens / 4), tokens / STEPS)))
        block = min(fitting, 2048 if whole else 1024, files.max_context or 1024)
        batch = max(1, min(64, tokens // (block * STEPS)))
        fits = [n for n in (1, 2, 4, 8) if batch % n == 0 and (on_gpu or n * block <= 2048)]
        rate = self.learning_rate or usual_learning_rate(held["parameters"], block * batch)
        out, warmup = self.out / "whole" if whole else self.out, tokens // (block * batch) // 10
        tree: dict[str, Facts] = {
            "student": {"model": self.student},
            "corpus": whole or {"files": [str(self.sample("training"))]},
            "data": {"blocks": str(out / "blocks"), "block_size": block, "missing": "drop"},
            "objective": {"method": rule},
            "optimizer": {"learning_rate": rate, "min_learning_rate": rate / 10},
            "train": {"batch_blocks": batch, "micro_batch": max(fits)},
            "run": {"folder": str(out / "runs" / rule), "seed": self.seed},
        }
        tree["optimizer"]["warmup_steps"] = min(STEPS, warmup)
        tree["train"]["device"] = "auto" if on_gpu else "cpu"
        tree["train"]["dtype"] = "bfloat16" if on_gpu else "float32"
        if not whole:  # blocks that serve all rules
            tree["data"]["extra_columns"] = ["targets"]
            tree["run"] |= {"save_every": 0, "log_every": 10**6}
        if not whole or rule != "cpt":
            tree["teacher"] = {"model": self.teacher}
            tree["store"] = {"path": str(out / "store")}
        return tree

    def write_page(
        self, strength: Sequence[TextScore], rules: Sequence[TextScore], result: Facts
    ) -> None:
        folders = {rule: Path(run["folder"]) for rule, run in result["runs"].items()}
        if not (folders["guided"] / "tokens.json").is_file():
            write_sample(folders["guided"], documents=8, seed=self.seed)
        shown = [*(one for one in strength if one.name != self.names[self.student]), *rules]
        errors = [(one.interval[1] - one.interval[0]) / (2 * Z_95) for one in shown]
        groups = [
            ResultGroup(name=one.name, values=[[one.bits_per_byte]], errors=[[error]])
            for one, error in zip(shown, errors, strict=True)
        ]
        measure = Measure(name="Bits per byte", unit="held out", better="lower", digits=4)
        words = " ".join(result["verdict"])
        page = report_page(
            list(folders.values()),
            title=f"Should {self.names[self.teacher]} teach {self.names[self.student]}?",
            subtitle=f"A trial on {rules[0].documents:,} held-out documents.",
            results=Results(measures=[measure], groups=groups, verdict=words, note=CAVEAT),
        )
        write_page(page, self.out / "report.html")


# ---- in words ----


def recommended(rules: Sequence[TextScore]) -> str:
    """The method to train with: every token, unless the best of all is a rule that is clearly
    better than that."""
    method = {name: rule for rule, name in RULES.items()}.get(rules[0].name, "cpt")
    return method if rules[0].outcome == "better" else "cpt"


def verdict(
    strength: Sequence[TextScore], rules: Sequence[TextScore], student: str, teacher: str
) -> list[str]:
    """The teacher against the student, the rules against every token, and what follows."""
    by_name = {one.name: one for one in (*strength, *rules)}
    ours, theirs, plain = by_name[student], by_name[teacher], by_name[RULES["cpt"]]
    words = {"better": "better than", "worse": "worse than", "equal": "not clearly better than"}
    sentences = [
        f"{teacher} is {words[theirs.outcome]} {student} on this text: "
        f"{theirs.bits_per_byte:.3f} against {ours.bits_per_byte:.3f} bits per byte."
    ]
    if teacher_warning(theirs.bits_per_byte, ours.bits_per_byte) is not None:
        sentences.append("A teacher that is not clearly better than its student can do harm.")
    words = {
        "better": "better than training on every token",
        "worse": "worse than training on every token",
        "equal": "no difference from training on every token that this sample can show",
    }
    for name in (RULES["guided"], RULES["distill"]):
        one = by_name[name]
        size, low, high = (
            value / plain.bits_per_byte for value in (one.difference, *one.difference_interval)
        )
        sentences.append(
            f"{name.capitalize()}: {words[one.outcome]}, {size:+.1%} bits per byte "
            f"({low:+.1%} to {high:+.1%})."
        )
    if rules[0].name == BEFORE:
        sentences.append(
            "No short run made the student better than it was, so they say little about the rules: "
            "try a lower --learning-rate or more --minutes."
        )
    elif recommended(rules) == "cpt":
        sentences.append("Nothing here favours the teacher: train on every token.")
    else:
        sentences.append(f"Train with this teacher, {rules[0].name}.")
    return sentences
