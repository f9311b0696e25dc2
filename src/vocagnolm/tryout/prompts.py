"""`vocagnolm try --prompts`: from a student, a teacher that writes and some prompts to a verdict.

Read `try_prompts` from top to bottom: its steps are `write`, `prepare`, `train` and `evaluate`, on
a sample of the prompts.
"""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import yaml

from vocagnolm.base.files import folder_lock, local_path, write_json, write_text
from vocagnolm.base.statistics import Z_95
from vocagnolm.data.corpus import read_texts
from vocagnolm.data.prepare import prepare
from vocagnolm.errors import CorpusError
from vocagnolm.evaluate.results import TextScore
from vocagnolm.recipe import recipe_from_dict
from vocagnolm.report import Measure, ResultGroup, Results
from vocagnolm.score.write import open_prompts_of
from vocagnolm.tryout.answers import AnswerScore, answer_questions, rank_answers
from vocagnolm.tryout.folder import Facts, Tryout, TrySettings
from vocagnolm.tryout.prompt_sample import MOST_SAMPLES, PASSES, PromptSample, asked_settings
from vocagnolm.tryout.runs import Material, run_recipe, train_short, write_run_page
from vocagnolm.tryout.text import BEFORE, ranked

GIVEN, WRITTEN, DISTILLED = "given answers", "teacher's answers", "the same, distilled"
METHODS = {GIVEN: "cpt", WRITTEN: "cpt", DISTILLED: "distill"}
"""What a student is trained on, and how."""
RIGHT_CAVEAT = (
    "One seed and one learning rate, not tuned for any method; every student is trained for the "
    "same number of tokens; intervals are 95 %, over questions only."
)
BITS_CAVEAT = (
    "These are bits per byte of the teacher's answers to held-out prompts, which mislead: they "
    "reward writing like the teacher, right or wrong, and cannot say whether its answers are "
    "better to learn from than others. Name the expected answers (--answer-field) to compare right "
    "answers. One seed and one learning rate; intervals are 95 %, over documents only."
)


def try_prompts(
    student: str,
    teacher: str,
    prompts: Sequence[str],
    out: str | Path,
    *,
    settings: TrySettings | None = None,
    reading: Mapping[str, Any] | None = None,
    writing: Mapping[str, Any] | None = None,
    **showing: Any,
) -> Facts:
    """The verdict on a teacher that answers prompts, as `vocagnolm try --prompts --json` prints it.
    `reading`: fields of `PromptsSection`; `writing`: fields of `WriteSection`. `showing`: `say` and
    `progress` of `Tryout`."""
    folder, given = local_path(out), {**(reading or {}), **(writing or {})}
    with folder_lock(folder, "Wait for it to end, or choose another --out."):
        opened = open_prompts_of(list(prompts), {**(reading or {}), "drop_answers": True})
        asked = asked_settings(opened, writing or {})
        tryout = Tryout([student, teacher], folder, settings or TrySettings(), **showing)
        tryout.claim(prompts=opened.describe(), writing=asked)
        once, name = tryout.once, tryout.names[teacher]
        sample = PromptSample(tryout, opened, teacher, asked)
        plan = once("plan", sample.plan)
        split = once("split", sample.split, plan)
        written = once("written", sample.write, "prompts", "written", plan["samples"])
        if not opened.answer_field:
            once("held_out", sample.write, "held-out", "held-out", 1)
        runs = ShortRuns(tryout, sample, plan, written)
        sizes = once("sizes", runs.sizes)
        before = once(f"measure {BEFORE}", runs.measure, student, BEFORE)
        methods = [what for what in METHODS if what != GIVEN or split["given"]]
        done = {what: once(f"run {what}", runs.train, what, sizes) for what in methods}
        measured = {BEFORE: before} | {what: run.pop("measured") for what, run in done.items()}
        scores = scored(measured, WRITTEN)
        chosen = worth_doing(measured)
        result = {
            "student": student,
            "teacher": teacher,
            "device": str(tryout.files[student].device),
            "measure": "right answers" if opened.answer_field else "bits per byte",
            "split": split,
            "written": written,
            "rows": [asdict(score) for score in scores],
            "runs": done,
            "verdict": verdict(scores, measured, written, name, chosen),
            "recommended": chosen,
            "whole": runs.whole(len(opened), sizes, done[WRITTEN]),
            "next": [],
            "page": str(folder / "report.html"),
        }
        result["next"] = next_commands(runs, result, list(prompts), given, sizes)
        write_page(tryout, done, scores, result)
        write_json(folder / "result.json", result)
        return result


# ---- the students ----


class ShortRuns:
    """The students of given and of written answers, and what they are measured by."""

    def __init__(self, tryout: Tryout, sample: PromptSample, plan: Facts, written: Facts) -> None:
        self.tryout, self.sample, self.plan, self.written = tryout, sample, plan, written
        self.folder = tryout.out / "written"
        self.questions = sample.questions() if sample.prompts.answer_field else []

    def sizes(self) -> Facts:
        """The teacher's answers in tokens of the student; blocks fit the longest conversation."""
        texts, _ = read_texts(self.folder)
        lengths = self.tryout.student_lengths(texts[:256], conversations=True)
        if not lengths:
            raise CorpusError("The student's chat template refuses the prompts of the sample.")
        tokens = round(sum(lengths) / len(lengths) * len(texts))
        given = self.tryout.sample("given")
        more = read_texts(given)[0][:256] if given.is_file() else []
        longest = max(lengths + self.tryout.student_lengths(more, conversations=True))
        return {"tokens": tokens, "longest": longest, "conversations": len(texts)}

    def train(self, what: str, sizes: Facts) -> Facts:
        tree = self.recipe(what, sizes)
        prepare(recipe_from_dict(tree))
        done = train_short(tree)
        return done | {"measured": self.measure(done.pop("model"), what)}

    def recipe(self, what: str, sizes: Facts) -> dict[str, Facts]:
        """Every student is trained for the same number of tokens."""
        tokens, given = PASSES * sizes["tokens"], what == GIVEN
        files = str(self.tryout.sample("given") if given else self.folder)
        material = Material([files], tokens, sizes["longest"], None if given else files)
        place = self.tryout.out
        method, name = METHODS[what], {GIVEN: "given", WRITTEN: "written", DISTILLED: "distilled"}
        tree = run_recipe(self.tryout, self.plan["parameters"], material, method, place, name[what])
        tree["train"]["tokens"] = tokens
        if given:
            tree["data"]["blocks"] = str(place / "blocks-given")
        if method == "distill":
            tree["objective"]["mix"] = 0.5
        return tree

    def measure(self, model: str, name: str) -> Facts:
        """Right answers to the held-out questions, or else bits per byte of the teacher's."""
        if self.questions:
            asked = self.sample.asked
            return answer_questions(self.tryout, model, name, self.questions, asked)
        return self.tryout.read(model, self.tryout.out / "held-out", name)

    def whole(self, prompts: int, sizes: Facts, run: Facts) -> Facts:
        """What four answers to all prompts would cost: seconds and bytes on disk."""
        answers, kept = MOST_SAMPLES * prompts, self.written["kept"]
        seconds = self.written["seconds_per_answer"] or self.plan["seconds_per_answer"]
        tokens = PASSES * sizes["tokens"] / kept * answers
        size = self.written["file_bytes"] / kept * answers
        return {
            "prompts": prompts,
            "answers": answers,
            "writing": [answers * seconds, size],
            "training": [tokens / run["rate"], 4 * self.plan["parameters"]],
        }


# ---- what follows ----

Score = TextScore | AnswerScore


def scored(measured: Mapping[str, Facts], baseline: str) -> Sequence[Score]:
    """The students, the best first, each compared with the baseline."""
    if "right" in measured[baseline]:
        return rank_answers({name: facts["right"] for name, facts in measured.items()}, baseline)
    return ranked(measured, baseline)


def worth_doing(measured: Mapping[str, Facts]) -> str:
    """What to train on: of what is clearly better than the student before, the teacher's answers
    (distilled or plain), unless the given ones do as well."""
    (distilled,) = (s for s in scored(measured, WRITTEN) if s.name == DISTILLED)
    loss = distilled.difference * (-1 if isinstance(distilled, AnswerScore) else 1)
    teacher = WRITTEN if loss > 0 else DISTILLED
    gains = {s.name for s in scored(measured, BEFORE) if s.outcome == "better"}
    if GIVEN in gains and "right" in measured[GIVEN]:  # bits per byte say nothing about these
        against = {score.name: score.outcome for score in scored(measured, GIVEN)}
        return teacher if teacher in gains and against[teacher] == "better" else GIVEN
    return teacher if teacher in gains else BEFORE


def verdict(
    scores: Sequence[Score],
    measured: Mapping[str, Facts],
    written: Facts,
    teacher: str,
    chosen: str,
) -> list[str]:
    """The teacher's answers against the others, what its alternatives add, and what follows."""
    words = {
        "better": "clearly better than",
        "worse": "clearly worse than",
        "equal": "no difference that this sample shows from",
    }
    sentences = []
    if written["right_share"] is not None:
        sentences.append(f"{teacher} has {written['right_share']:.0%} of its own answers right.")
    shown = {score.name: score for score in scores}
    by_answers = "right" in measured[WRITTEN]
    compared = [BEFORE, GIVEN] if by_answers else [BEFORE]
    for name in (n for n in (*compared, DISTILLED) if n in shown):
        ours, theirs = (DISTILLED, WRITTEN) if name == DISTILLED else (WRITTEN, name)
        (score,) = (s for s in scored(measured, theirs) if s.name == ours)
        low, high = score.difference_interval
        if isinstance(score, AnswerScore):
            size = f"{100 * score.difference:+.1f} points ({100 * low:+.1f} to {100 * high:+.1f})"
        else:
            size = f"{score.difference:+.4f} bits per byte ({low:+.4f} to {high:+.4f})"
        sentences.append(f"{ours.capitalize()}: {words[score.outcome]} {theirs}, {size}.")
    if not by_answers:
        sentences.append(
            "Whether the teacher's answers are the right ones to learn from, bits per byte cannot "
            "say: read some of them, and name expected answers with --answer-field."
        )
    sentences.append(
        {
            BEFORE: "Nothing here is clearly better than the student as it is: try more --minutes, "
            "another --learning-rate or another teacher.",
            GIVEN: "Train on the given answers: the teacher's are not clearly better.",
            WRITTEN: "Let the teacher write, and train on its text.",
            DISTILLED: "Let the teacher write, and distil from what it writes.",
        }[chosen]
    )
    return sentences


def next_commands(
    runs: ShortRuns, result: Facts, prompts: list[str], given: Facts, sizes: Facts
) -> list[str]:
    """The commands that do the same with all prompts."""
    chosen, out = result["recommended"], runs.tryout.out
    recipe = str(out / "recipe.yaml")
    train = ["vocagnolm prepare " + shlex.quote(recipe), "vocagnolm train " + shlex.quote(recipe)]
    if chosen == BEFORE:
        return []
    if chosen == GIVEN:
        write_recipe(runs, Path(recipe), prompts, sizes)
        return train
    options = [
        word
        for name, value in given.items()
        for item in (value if isinstance(value, list) else [value])
        for word in (f"--{name.replace('_', '-')}", str(item))
    ]
    if "grade" not in given and runs.sample.asked["grade"]:
        options += ["--grade", runs.sample.asked["grade"]]
    files = [word for path in prompts for word in ("--prompts", path)]
    written = str(out / "whole")
    write = ["vocagnolm", "write", "--teacher", result["teacher"], *files, "--drop-answers"]
    new = ["vocagnolm", "recipe", "new", "--from", written, "--student", result["student"]]
    if chosen == WRITTEN:
        train[1] += " --set objective.method=cpt"
    return [
        shlex.join([*write, *options, "--out", written]),
        shlex.join([*new, "--out", recipe]),
        *train,
    ]


def write_recipe(runs: ShortRuns, path: Path, prompts: list[str], sizes: Facts) -> None:
    """The recipe that trains on the given answers of all prompts."""
    tryout, place = runs.tryout, runs.tryout.out / "whole"
    mean = sizes["tokens"] / sizes["conversations"]
    tokens = round(PASSES * mean * len(runs.sample.prompts))
    material = Material(prompts, tokens, sizes["longest"])
    tree = run_recipe(tryout, runs.plan["parameters"], material, "cpt", place, whole=True)
    tree["train"]["epochs"] = PASSES
    recipe_from_dict(tree)
    body = yaml.safe_dump(tree, sort_keys=False, allow_unicode=True)
    write_text(path, f"# By `vocagnolm try`: the given answers, not tuned.\n{body}")


def write_page(tryout: Tryout, done: Facts, scores: Sequence[Score], result: Facts) -> None:
    groups = []
    for score in scores:
        right = isinstance(score, AnswerScore)
        value = 100 * score.right if isinstance(score, AnswerScore) else score.bits_per_byte
        width = (score.interval[1] - score.interval[0]) * (100 if right else 1)
        errors: list[list[float | None]] = [[width / (2 * Z_95)]]
        groups.append(ResultGroup(name=score.name, values=[[value]], errors=errors))
    measure = Measure(name="Bits per byte", unit="held out", better="lower", digits=4)
    caveat = BITS_CAVEAT
    if isinstance(scores[0], AnswerScore):
        measure = Measure(name="Right answers", unit="%", better="higher", digits=1)
        caveat = RIGHT_CAVEAT
    names = tryout.names
    write_run_page(
        [Path(run["folder"]) for run in done.values()],
        Path(done[DISTILLED]["folder"]),
        Results(
            measures=[measure], groups=groups, verdict=" ".join(result["verdict"]), note=caveat
        ),
        f"Should {names[result['teacher']]} write for {names[result['student']]}?",
        f"Tried on {result['split']['held_out']:,} held-out prompts.",
        tryout.settings.seed,
    )
