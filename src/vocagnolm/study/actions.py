"""What the tasks of a study do: the ordinary code (`score_corpus`, `prepare`, `train`) with an
ordinary recipe. Every action leaves its results in the study's folder."""

import shutil
import time
from pathlib import Path
from typing import Any

from vocagnolm.files import write_json
from vocagnolm.recipe import Recipe
from vocagnolm.study.design import Exchange, GranularityPlan, RunPlan
from vocagnolm.study.folder import EVALUATION, SELECTION, StudyFolder, read_result
from vocagnolm.study.task import release_memory

_SELECTION_MICRO_BATCHES = 8


def score_teacher(home: StudyFolder, teacher: str) -> None:
    from vocagnolm.score import ScoreSettings, score_corpus

    files = home.scored_files()
    base = home.study.base.get("corpus", {})
    started = time.perf_counter()
    summary = score_corpus(
        home.teacher_model(teacher),
        files,
        home.store(teacher),
        settings=ScoreSettings(**home.study.score),
        text_field=base.get("text_field", "text"),
        split=base.get("split", "none"),
    )
    about = {
        "teacher": teacher,
        "tokens": summary.tokens,
        "seconds": summary.seconds,
        "seconds_with_loading": time.perf_counter() - started,
        "bits_per_byte": summary.store["bits_per_byte"],
    }
    write_json(home.folder / "stores" / f"{teacher}.json", about)
    release_memory()


def prepare_blocks(home: StudyFolder, recipe: Recipe) -> None:
    from vocagnolm.data.prepare import prepare

    prepare(recipe, workers=home.study.prepare_workers)


def train_model(recipe: Recipe) -> float:
    from vocagnolm.train.run import train

    started = time.perf_counter()
    train(recipe, quiet=True)
    release_memory()
    return time.perf_counter() - started


def run_start(home: StudyFolder, recipe: Recipe) -> None:
    # the blocks of the start are its own: made in the same task
    prepare_blocks(home, recipe)
    train_model(recipe)


def run_tuning(home: StudyFolder, recipe: Recipe, folder: Path, group: str, rate: float) -> None:
    tune = home.study.tune
    assert tune is not None
    requests = home.study.evaluate.validation_requests if tune.by == "accuracy" else None
    seconds = train_model(recipe)
    about = {"group": group, "learning_rate": rate, "train_seconds": seconds}
    evaluate(home, folder / "model", folder, about, requests=requests, choosing=True)
    discard(home, folder / "model")


def run_seed(home: StudyFolder, run: RunPlan) -> None:
    rate = home.learning_rate(run.tuned) if run.tuned is not None else None
    recipe = home.recipe(run, learning_rate=rate)
    folder = home.run_folder(run)
    if run.matched_to is not None:
        _match(home, run, recipe)
    if run.targets is not None:
        _exchange(home, run, run.targets, recipe)
    seconds = train_model(recipe)
    _measure_selection(home, run, recipe, folder)
    about = {
        "row": run.row,
        "seed": run.seed,
        "learning_rate": recipe.optimizer.learning_rate,
        "train_seconds": seconds,
    }
    evaluate(home, folder / "model", folder, about, requests=home.study.evaluate.requests)
    discard(home, folder / "model")


def _match(home: StudyFolder, run: RunPlan, recipe: Recipe) -> None:
    from vocagnolm.study.selection import document_sources, mean_shares, write_matched_blocks

    assert run.matched_to is not None and recipe.data.blocks is not None
    path = home.first_run(run.matched_to) / SELECTION
    measured = read_result(path)
    target = home.folder / "blocks" / f"matched-{run.name}"
    write_matched_blocks(
        Path(recipe.data.blocks),
        target,
        document_sources(recipe.corpus.files, home.study.source_field),
        mean_shares(*measured.values()),
        run.seed,
    )
    recipe.data.blocks = str(target)


def _exchange(home: StudyFolder, run: RunPlan, exchange: Exchange, recipe: Recipe) -> None:
    from vocagnolm.alignment import load_tokenizer
    from vocagnolm.study.selection import write_exchanged_blocks

    assert recipe.data.blocks is not None and recipe.student_tokenizer is not None
    target = home.folder / "blocks" / f"exchanged-{run.name}"
    vocabulary = len(load_tokenizer(recipe.student_tokenizer).vocabulary)
    write_exchanged_blocks(Path(recipe.data.blocks), target, exchange, vocabulary, run.seed)
    recipe.data.blocks = str(target)


def _measure_selection(home: StudyFolder, run: RunPlan, recipe: Recipe, folder: Path) -> None:
    """Kept share per source of the row's first run, with the student before and after."""
    first = home.rows[run.row].seeds[0] == run.seed
    every_token = recipe.objective.keep == 1.0 and recipe.objective.weighting == "top_k"
    by_chance = recipe.method.ranking == "chance"
    chooses = recipe.method.selects and not every_token and not by_chance
    if not first or not chooses or recipe.needs_online_teacher:
        return
    from vocagnolm.study.selection import document_sources, kept_by_source

    sources = document_sources(recipe.corpus.files, home.study.source_field)
    measured = {}
    students = {"after": str(folder / "model")}
    if recipe.student.model is not None:
        students["before"] = recipe.student.model
    for when, model in students.items():
        measured[when] = kept_by_source(
            recipe, model, sources, micro_batches=_SELECTION_MICRO_BATCHES
        )
    write_json(folder / SELECTION, measured)
    release_memory()


def evaluate(
    home: StudyFolder,
    model: Path,
    folder: Path,
    about: dict[str, Any],
    *,
    requests: str | None,
    choosing: bool = False,
) -> None:
    """`choosing`: answers are graded at once, as a learning rate waits for them. Other answers are
    graded when the table is made, perhaps on another machine."""
    from vocagnolm.study.evaluation import ANSWERS_FILE, evaluate_model, grade_answers, questions_of
    from vocagnolm.study.rows import average_accuracy

    folder.mkdir(parents=True, exist_ok=True)
    started = time.perf_counter()
    result = evaluate_model(model, home.study.evaluate, folder, requests=requests)
    if choosing and requests is not None:
        grades = grade_answers(folder / ANSWERS_FILE, questions_of(requests))
        result["validation_accuracy"] = average_accuracy(grades)
    seconds = time.perf_counter() - started
    write_json(folder / EVALUATION, {**about, **result, "evaluate_seconds": seconds})
    release_memory()


def discard(home: StudyFolder, model: Path) -> None:
    if not home.study.keep_models:
        shutil.rmtree(model)


def measure_granularity(
    home: StudyFolder, recipe: Recipe, teacher: str, plan: GranularityPlan
) -> None:
    from vocagnolm.study.granularity import corpus_granularity

    found = corpus_granularity(recipe, teacher, plan)
    write_json(home.granularity_file(plan), found.as_json())
