"""`vocagnolm try --corpus`: from a student, its possible teachers and a corpus to a verdict.

Read `try_text` from top to bottom: its steps are `evaluate --text`, `score`, `prepare`, `train` and
`report`, on a sample.
"""

import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from vocagnolm.base.files import folder_lock, local_path, write_json, write_text
from vocagnolm.base.statistics import Z_95
from vocagnolm.data.corpus import Corpus, open_corpus
from vocagnolm.data.prepare import prepare
from vocagnolm.evaluate.results import TextScore, rank_texts
from vocagnolm.recipe import recipe_from_dict
from vocagnolm.report import Measure, ResultGroup, Results
from vocagnolm.score import ScoreSettings, score_corpus
from vocagnolm.store.format import VOCABULARY_FILE
from vocagnolm.train.strength import teacher_warning
from vocagnolm.tryout.folder import Facts, Tryout, TrySettings
from vocagnolm.tryout.runs import Material, run_recipe, train_short, write_run_page
from vocagnolm.tryout.text_sample import TextSample

RULES = {"cpt": "every token", "guided": "guided", "distill": "distilled"}
"""The methods that are tried, and what they are called."""
BEFORE = "the student before"
ALTERNATIVES = 4
CAVEAT = (
    "These are bits per byte, which can mislead: students with more of them have answered better, "
    "and students with fewer worse (docs/try.md). Compare answers before you decide. One seed and "
    "one learning rate, not tuned for any method; intervals are 95 %, over documents only."
)


def try_text(
    student: str,
    teachers: Sequence[str],
    corpus: Sequence[str],
    out: str | Path,
    *,
    settings: TrySettings | None = None,
    reading: Mapping[str, Any] | None = None,
    **showing: Any,
) -> Facts:
    """The verdict on teachers that read a corpus, as `vocagnolm try --json` prints it. `reading`:
    text_field and split, as in `open_corpus`. `showing`: `say` and `progress` of `Tryout`."""
    reading = dict(reading or {})
    folder = local_path(out)
    with folder_lock(folder, "Wait for it to end, or choose another --out."):
        opened = open_corpus(list(corpus), **reading)
        tryout = Tryout([student, *teachers], folder, settings or TrySettings(), **showing)
        tryout.claim(corpus=opened.fingerprint)
        names, once = tryout.names, tryout.once
        sample = TextSample(tryout, opened)
        plan = once("plan", sample.plan, len(RULES))
        held_out = once("held_out", sample.held_out, plan)
        aside = tryout.sample("held-out")
        read = {source: once(f"read {source}", tryout.read, source, aside) for source in names}
        strength = ranked({names[source]: facts for source, facts in read.items()}, names[student])
        order = [score.name for score in strength]
        teacher = min(teachers, key=lambda source: order.index(names[source]))
        training = once("training", sample.training, plan, held_out)
        runs = ShortRuns(tryout, teacher, plan, training)
        store = once("store", runs.score)
        blocks = once("blocks", runs.prepare)
        done = {rule: once(f"run {rule}", runs.train, rule) for rule in RULES}
        after = {RULES[rule]: facts.pop("read") for rule, facts in done.items()}
        rules = ranked({BEFORE: read[student], **after}, RULES["cpt"])
        chosen = recommended(rules)
        result = {
            "student": student,
            "teacher": teacher,
            "device": str(tryout.files[student].device),
            "held_out": held_out,
            "training": training,
            "strength": [asdict(score) for score in strength],
            "blocks": blocks,
            "rules": [asdict(score) for score in rules],
            "runs": done,
            "verdict": verdict(strength, rules, names[student], names[teacher]),
            "recommended": chosen,
            "whole_corpus": whole_corpus(opened, plan, store, blocks, training, done[chosen]),
            "recipe": str(folder / "recipe.yaml"),
            "page": str(folder / "report.html"),
        }
        write_recipe(folder / "recipe.yaml", runs.whole(chosen, {"files": [*corpus], **reading}))
        write_page(runs, strength, rules, result)
        write_json(folder / "result.json", result)
        return result


def ranked(read: Mapping[str, Mapping[str, Any]], baseline: str) -> list[TextScore]:
    sums = {name: {at: s for at, *s in facts["by_document"]} for name, facts in read.items()}
    return rank_texts(sums, baseline)


class ShortRuns:
    """The teacher's store of the sample, and the students that are trained from it."""

    def __init__(self, tryout: Tryout, teacher: str, plan: Facts, training: Facts) -> None:
        self.tryout, self.teacher, self.plan, self.training = tryout, teacher, plan, training
        self.corpus = str(tryout.sample("training"))
        self.store = tryout.out / "store"

    def score(self) -> Facts:
        tryout = self.tryout
        device = tryout.settings.device
        settings = ScoreSettings(device=device, alternatives=ALTERNATIVES, compiled=False)
        with tryout.bar(f"{tryout.names[self.teacher]} scores") as note:
            done = score_corpus(
                self.teacher,
                self.corpus,
                self.store,
                settings=settings,
                on_progress=lambda now: note(now.documents, now.total_documents),
            )
        facts, rate = done.store, done.tokens_per_second
        tryout.say(f"scored: {facts['tokens']:,} tokens with {ALTERNATIVES} alternatives each")
        # a store that an interrupted try has finished was not timed
        known = rate * facts["bytes"] / facts["tokens"] if rate else self.plan["bytes_per_second"]
        vocabulary = (self.store / VOCABULARY_FILE).stat().st_size  # the same for any corpus
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
        text, summary = self.training["bytes"], manifest["summary"]
        size = sum(file.stat().st_size for file in (self.tryout.out / "blocks").glob("part-*"))
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
        done, tryout = train_short(self.recipe(rule)), self.tryout
        read = tryout.read(done.pop("model"), tryout.sample("held-out"), RULES[rule])
        return done | {"read": read}

    def recipe(self, rule: str) -> dict[str, Facts]:
        training = self.training
        material = Material(
            [self.corpus], training["student_tokens"], training["longest"], str(self.store)
        )
        return self._with_teacher(
            run_recipe(self.tryout, self.plan["parameters"], material, rule, self.tryout.out)
        )

    def whole(self, rule: str, corpus: Facts) -> dict[str, Facts]:
        """The recipe of one pass over the whole corpus."""
        training, place = self.training, self.tryout.out / "whole"
        times = self.plan["corpus_bytes"] / training["bytes"]
        files = corpus.pop("files")
        store = None if rule == "cpt" else str(place / "store")
        tokens = round(training["student_tokens"] * times)
        material = Material(files, tokens, training["longest"], store, corpus)
        parameters = self.plan["parameters"]
        tree = run_recipe(self.tryout, parameters, material, rule, place, whole=True)
        return tree if store is None else self._with_teacher(tree)

    def _with_teacher(self, tree: dict[str, Facts]) -> dict[str, Facts]:
        return {**tree, "teacher": {"model": self.teacher}}


def whole_corpus(
    corpus: Corpus, plan: Facts, store: Facts, blocks: Facts, training: Facts, run: Facts
) -> Facts:
    """What the whole corpus would cost: seconds and bytes on disk."""
    size = plan["corpus_bytes"]
    tokens = size * blocks["tokens"] / training["bytes"]
    disk = size * store["disk_share"] + store["vocabulary_bytes"]
    return {
        "documents": len(corpus),
        "bytes": size,
        "scoring": [size / store["bytes_per_second"], disk],
        "preparing": [size / blocks["bytes_per_second"], size * blocks["disk_share"]],
        "training": [tokens / run["rate"], 4 * plan["parameters"]],
    }


def write_recipe(path: Path, tree: dict[str, Facts]) -> None:
    recipe_from_dict(tree)  # what is wrong with it shows here
    method = tree["objective"]["method"]
    head = f"# By `vocagnolm try`: {RULES[method]}, one pass over the corpus, not tuned."
    body = yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)
    write_text(path, f"{head}\n# Every key: docs/recipes.md\n{body}")


def write_page(
    runs: ShortRuns, strength: Sequence[TextScore], rules: Sequence[TextScore], result: Facts
) -> None:
    names, student = runs.tryout.names, runs.tryout.student
    shown = [*(score for score in strength if score.name != names[student]), *rules]
    groups = [
        ResultGroup(
            name=score.name,
            values=[[score.bits_per_byte]],
            errors=[[(score.interval[1] - score.interval[0]) / (2 * Z_95)]],
        )
        for score in shown
    ]
    measure = Measure(name="Bits per byte", unit="held out", better="lower", digits=4)
    words = " ".join(result["verdict"])
    folders = {rule: Path(facts["folder"]) for rule, facts in result["runs"].items()}
    write_run_page(
        list(folders.values()),
        folders["guided"],
        Results(measures=[measure], groups=groups, verdict=words, note=CAVEAT),
        f"Should {names[runs.teacher]} teach {names[student]}?",
        f"Tried on {rules[0].documents:,} held-out documents.",
        runs.tryout.settings.seed,
    )


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
    by_name = {score.name: score for score in (*strength, *rules)}
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
        score = by_name[name]
        size, low, high = (
            value / plain.bits_per_byte for value in (score.difference, *score.difference_interval)
        )
        sentences.append(
            f"{name.capitalize()}: {words[score.outcome]}, {size:+.1%} bits per byte "
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
