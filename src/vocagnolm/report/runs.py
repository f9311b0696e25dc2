"""Run folders as pages: their settings, evaluations and losses side by side, and the selection
sample, for which the finished student reads some documents of its corpus beside the teachers'
stored losses, and the run's own rule selects."""

import contextlib
import dataclasses
import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from vocagnolm.alignment import TargetTable, TextTokenizer, TokenSpans, load_tokenizer
from vocagnolm.alternatives import Alternatives
from vocagnolm.base.files import json_digest, local_path, read_json, write_json
from vocagnolm.data.corpus import Corpus, Document, document_hash, open_corpus
from vocagnolm.data.guidance import common_alternatives, target_table, tiling
from vocagnolm.data.materials import recipe_corpus, student_chat
from vocagnolm.data.teachers import Lookup
from vocagnolm.errors import CorpusError, TemplateError, VocagnolmError, VocagnolmWarning
from vocagnolm.evaluate.results import BITS, Evaluation, RunFolder, Score, in_order
from vocagnolm.evaluate.settings import marks
from vocagnolm.questions.suite import AVERAGES, TASKS
from vocagnolm.recipe import Recipe, recipe_from_dict
from vocagnolm.recipe.schema import parse_yaml
from vocagnolm.report.comparison import plain_tokenizer
from vocagnolm.report.page_data import (
    FORMAT_VERSION,
    Measure,
    Page,
    Passage,
    Preflight,
    ResultGroup,
    Results,
    Run,
    Selection,
    TeacherRow,
    TokenRow,
    plain,
    write_page,
)
from vocagnolm.report.passage import Reading, joined, make_passage, preflight
from vocagnolm.report.selection import statistics, weigh_passages
from vocagnolm.report.view import environment, model_name, model_scorer, read_text
from vocagnolm.store import LossStore
from vocagnolm.train import folder as run_folder

CURVE_POINTS = 50
"""A curve on a page has no more points than this; longer ones are means over equal bins."""


class RunError(VocagnolmError):
    """A folder is not a run, or its files cannot be read."""


def read_run(folder: str | Path, name: str | None = None, setting: str | None = None) -> Run:
    """One run folder: `metrics.jsonl` and `recipe.yaml`, either of which may be missing."""
    path = local_path(folder)
    recipe_file, metrics_file = path / "recipe.yaml", path / "metrics.jsonl"
    if not path.is_dir() or not (recipe_file.is_file() or metrics_file.is_file()):
        raise RunError(
            f"{path} is not a run folder: expected recipe.yaml and metrics.jsonl in it. "
            "Give the folder that `vocagnolm train` wrote (run.folder in the recipe)"
        )
    # where a resumed run wrote a step again, the later line counts
    steps = {record["step"]: record for record in run_folder.read_metrics(metrics_file)}
    records = [steps[step] for step in sorted(steps)]
    in_rounds = bool(records) and "round" in records[-1]
    loss, per_point = _loss_curve(records, ("loss",) if in_rounds else ("nll_all", "loss"))
    # a round is measured in its first step
    last = {name: value for record in records[-1000:] for name, value in record.items()}
    forms = {
        "steps": ("step", "{:,}"),
        "tokens": ("tokens", "{:,.0f}"),
        "last loss": ("loss", "{:.4f}"),
        "rounds": ("round", "{:,}"),
        "finished answers": ("finished_share", "{:.1%}"),
        "tokens of an answer": ("answer_tokens", "{:,.0f}"),
        "answers in other tokens": ("other_ids_share", "{:.1%}"),
        "entropy": ("entropy", "{:.3f}"),
        "right answers": ("right_share", "{:.1%}"),
        "held out, right": ("held_out_right", "{:.1%}"),
    }
    about, flat = _about(path), _flat_recipe(path) or {}
    versions = about.get("versions")
    run_folder.warn_of_other_recipe(path, about)
    return Run(
        name=name or path.name,
        method=flat.get("objective.method"),
        setting=setting,
        seed=flat["run.seed"] if isinstance(flat.get("run.seed"), int) else None,
        loss=loss,
        steps_per_point=per_point,
        recipe=recipe_file.read_text("utf-8", "replace") if recipe_file.is_file() else None,
        environment={str(k): str(v) for k, v in versions.items()}
        if isinstance(versions, dict)
        else {},
        facts={
            name: form.format(last[key])
            for name, (key, form) in forms.items()
            if isinstance(last.get(key), int | float)
        },
    )


def _loss_curve(
    steps: Sequence[dict[str, Any]], metrics: Sequence[str]
) -> tuple[list[tuple[float, float]], int]:
    """The first of these metrics that the run has written, and how many steps one point stands for:
    the mean loss over all tokens, which methods can be compared by, or the loss that was minimised,
    which in rounds is the divergence."""
    for metric in metrics:
        pairs = [
            (float(record["step"]), float(record[metric]))
            for record in steps
            if isinstance(record.get(metric), int | float) and math.isfinite(record[metric])
        ]
        if len(pairs) > 1:
            per_point = math.ceil(len(pairs) / CURVE_POINTS)
            bins = (pairs[at : at + per_point] for at in range(0, len(pairs), per_point))
            means = (np.mean(points, axis=0).tolist() for points in bins)
            return [(round(step, 1), float(f"{value:.5g}")) for step, value in means], per_point
    return [], 1


def _about(run: Path) -> dict[str, Any]:
    """run.json; empty where an older run, or one of another program, has none that can be read."""
    try:
        return run_folder.read_run(run)
    except VocagnolmError as error:
        warnings.warn(f"{error} The run is shown without it.", VocagnolmWarning, stacklevel=2)
        return {}


def report_page(
    runs: Sequence[str | Path],
    *,
    title: str | None = None,
    subtitle: str | None = None,
    results: Results | None = None,
    notes: Sequence[str] = (),
) -> Page:
    """The page for finished runs: their evaluations and losses side by side, and the text of the
    first run that has a selection sample."""
    folders = [Path(run) for run in runs]
    if not folders:
        raise RunError("no run was given: expected one or more run folders")
    names = _names(folders)
    settings = setting_names(folders, names)
    read = [read_run(*run) for run in zip(folders, names, settings, strict=True)]
    sample = next(filter(None, map(read_sample, folders)), Sample())
    return Page(
        title=title or (read[0].name if len(read) == 1 else f"{len(read)} runs, side by side"),
        subtitle=subtitle,
        passages=sample.passages,
        selection=sample.selection,
        statistics=statistics(sample.passages),
        preflight=sample.preflight,
        results=results or evaluation_results(folders, read),
        runs=read,
        environment=environment(),
        notes=list(notes),
    )


def write_report(
    runs: Sequence[str | Path],
    html: str | Path,
    *,
    sample_documents: int = 16,
    source_field: str | None = None,
) -> Path:
    """`vocagnolm report --html`: makes a selection sample when no run has one yet. Where that
    cannot be done (no store, no model, a corpus that has moved) the page says why."""
    folders = [Path(run) for run in runs]
    notes: list[str] = []
    samples = list(filter(None, map(read_sample, folders)))
    if source_field is not None:  # those that do not know the sources are made again
        samples = [
            sample for sample in samples if all(passage.sources for passage in sample.passages)
        ]
    if sample_documents and not samples:
        for folder in sorted(folders, key=lambda path: read_run(path).method != "guided"):
            try:
                write_sample(folder, documents=sample_documents, source_field=source_field)
                notes = []
                break
            except VocagnolmError as error:
                notes = [
                    f"The page shows no text, because no selection sample could be made: {error}"
                ]
    return write_page(report_page(folders, notes=notes), html)


def _names(folders: Sequence[Path]) -> list[str]:
    """The folders' own names, with as many parents as it takes to tell them apart."""
    parts = [folder.resolve().parts for folder in folders]
    for depth in range(1, max(len(p) for p in parts) + 1):
        names = ["/".join(p[-depth:]) for p in parts]
        if len(set(names)) == len(names):
            return names
    return ["/".join(p[-2:]) for p in parts]


# ---- evaluations ----


def evaluation_results(folders: Sequence[Path], runs: Sequence[Run]) -> Results | None:
    """What `vocagnolm evaluate` left in the runs: a column for each task, a row for each setting
    with its seeds. Scores made under other conditions have a column of their own, named after what
    differs. None when no run was evaluated."""
    scores: list[dict[str, Score]] = [{} for _ in folders]
    measures: dict[str, Measure] = {}
    evaluations = [RunFolder(folder).results() or Evaluation({}) for folder in folders]
    tasks = in_order(name for evaluation in evaluations for name in evaluation.tasks)
    for task in (*tasks, *AVERAGES, BITS):
        held = [
            at for at, evaluation in enumerate(evaluations) if evaluation.score(task)[0] is not None
        ]
        apart = marks([_conditions(evaluations[at], task) for at in held])
        names = [f"{task} ({mark})" if mark else task for mark in apart]
        for name, at in zip(names, held, strict=True):
            scores[at][name] = evaluations[at].score(task)
        for name in sorted(set(names)):
            measures[name] = Measure(name=name, unit="%", digits=1)
            if task == BITS:
                shown = name.replace(BITS, "bits per byte")
                measures[name] = Measure(name=shown, better="lower", digits=4)
    if not measures:
        return None
    groups: dict[str, list[dict[str, Score]]] = {}
    for run, results in zip(runs, scores, strict=True):
        groups.setdefault(run.setting or run.name, []).append(results)
    tables = {
        row: [[results.get(name, (None, None)) for results in seeds] for name in measures]
        for row, seeds in groups.items()
    }
    return Results(
        measures=list(measures.values()),
        groups=[
            ResultGroup(
                name=row,
                values=[[value for value, _ in seeds] for seeds in table],
                errors=[[error for _, error in seeds] for seeds in table],
            )
            for row, table in tables.items()
        ],
    )


def _conditions(evaluation: Evaluation, name: str) -> dict[str, Any]:
    if name not in AVERAGES:
        known = evaluation.conditions.get(name, {})
        # older evaluations know their protocol alone
        return known or ({"protocol": evaluation.protocol} if name in TASKS else {})
    parts = [_conditions(evaluation, task) for task in AVERAGES[name]]
    shared = {key: [part.get(key) for part in parts] for part in parts for key in part}
    return {
        key: values[0] if len({str(value) for value in values}) == 1 else json_digest(values)[:8]
        for key, values in shared.items()
    }


# ---- which runs are seeds of one setting, and what sets the others apart ----


# what a seed of one setting may differ in
_OF_A_SEED = frozenset({"run.seed", "run.folder", "run.save_every"}) | run_folder.RUNTIME_KEYS
_NAMED = 3
"""Differing keys that a name holds; where there are more it says how many."""
_VALUE_LIMIT = 32

Setting = dict[str, Any]
"""`section.key` to value, of all that decides what is trained, but for the seed."""


def _flat_recipe(run: Path) -> Setting | None:
    """A run's settings by flat key, the seed included; None where the folder has no recipe that can
    be read."""
    try:
        content = parse_yaml((run / "recipe.yaml").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(content, dict):
        return None
    with contextlib.suppress(VocagnolmError):  # of another version: its own words are compared
        content = recipe_from_dict(content).to_dict()
    flat: Setting = {}
    for section, value in content.items():
        if isinstance(value, Mapping):
            flat |= {f"{section}.{key}": setting for key, setting in value.items()}
        else:
            flat[section] = value
    # the blocks' fingerprint: equal recipes may have read other data
    blocks = _about(run).get("blocks")
    if isinstance(blocks, str):
        flat["blocks"] = blocks[:8]
    return flat


def setting_names(runs: Sequence[Path], names: Sequence[str]) -> list[str]:
    """A name for each run's setting; equal for the seeds of one. Settings of one method are named
    after what differs among them: `guided · objective.keep 0.4`. A run without a recipe is a
    setting of its own, under its own name."""
    settings = [
        flat and {key: value for key, value in flat.items() if key not in _OF_A_SEED}
        for flat in map(_flat_recipe, runs)
    ]
    known: list[tuple[Setting | None, str]] = []
    result = []
    for setting, name in zip(settings, names, strict=True):
        title = next((label for other, label in known if setting and other == setting), None)
        if title is None:
            title = name if setting is None else _label(setting, settings) or name
            if title in (label for _, label in known):  # long values look alike in the short
                title = f"{title} · {name}"
            known.append((setting, title))
        result.append(title)
    return result


def _label(setting: Setting, settings: Sequence[Setting | None]) -> str | None:
    method = setting.get("objective.method")
    if not method:
        return None
    rivals = [other for other in settings if other and other.get("objective.method") == method]
    keys = dict.fromkeys(key for rival in rivals for key in rival)
    differing = [key for key in keys if any(s.get(key) != setting.get(key) for s in rivals)]
    parts = [f"{key} {_value(setting.get(key))}" for key in differing[:_NAMED]]
    if len(differing) > _NAMED:
        parts.append(f"{len(differing) - _NAMED} more")
    return " · ".join([str(method), *parts])


def _value(value: Any) -> str:
    text = "null" if value is None else str(value)
    return text if len(text) <= _VALUE_LIMIT else f"…{text[1 - _VALUE_LIMIT :]}"


# ---- the selection sample ----


SAMPLE_FILE = "tokens.json"
PASSAGE_TOKENS = 600
"""Short documents are joined to passages of about so many student tokens."""
MAX_TOKENS = 50_000
"""Student tokens on a page, over all documents of the sample."""


_MAKE_AGAIN = "Remove it: `vocagnolm report --html` makes it again."


class SampleError(VocagnolmError):
    """A selection sample cannot be read or made."""


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Passages of a run's corpus with what its rule makes of them."""

    passages: list[Passage] = field(default_factory=list)
    selection: Selection | None = None
    preflight: list[Preflight] = field(default_factory=list)


def write_sample(run: str | Path, **choice: Any) -> Path:
    """Compute a run's sample and leave it in its folder as `tokens.json`; `choice`: what
    `compute_sample` takes."""
    return save_sample(compute_sample(run, **choice), run)


def save_sample(sample: Sample, run: str | Path) -> Path:
    """Write `tokens.json` into a run folder, whole or not at all."""
    path = Path(run) / SAMPLE_FILE
    content = {"format": FORMAT_VERSION, **plain(sample)}
    write_json(path, content, indent=None, sealed=True)
    return path


def read_sample(run: str | Path) -> Sample | None:
    """A run's selection sample; None where it has none of today's form, since older ones showed
    another rule's selection."""
    path = Path(run) / SAMPLE_FILE
    try:
        content = read_json(path, SampleError, _MAKE_AGAIN, {"format": int})
        if content["format"] < FORMAT_VERSION:
            return None
        if content["format"] > FORMAT_VERSION:
            raise ValueError(f"format {content['format']}; this version reads {FORMAT_VERSION}")
        return Sample(
            passages=[
                Passage(
                    **entry
                    | {
                        "student": TokenRow(**entry["student"]),
                        "teachers": [TeacherRow(**row) for row in entry.get("teachers", [])],
                    }
                )
                for entry in content.get("passages", [])
            ],
            selection=Selection(**content["selection"]) if "selection" in content else None,
            preflight=[Preflight(**entry) for entry in content.get("preflight", [])],
        )
    except FileNotFoundError:
        return None
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise SampleError(f"{path} is no selection sample ({error}). {_MAKE_AGAIN}") from None


def compute_sample(
    run: str | Path,
    *,
    documents: int = 16,
    seed: int = 0,
    model: str | Path | None = None,
    source_field: str | None = None,
) -> Sample:
    """Documents drawn at random, with the losses of the run's model (or another `model`, for
    example the start of training) and of the teachers' stores. `source_field`: the
    field of the corpus's records that names a document's source, or what kind of text it is."""
    from vocagnolm.train.settings import objective_config

    folder = Path(run)
    recipe = run_folder.run_recipe(folder)
    _require_losses(folder, recipe)
    student = Path(model) if model is not None else folder / "model"
    if not student.is_dir():
        raise SampleError(f"{student} is not there: a sample needs the trained model")
    corpus = recipe_corpus(recipe)
    template = partial(student_chat, recipe) if corpus.conversations else None
    tokenizer, score = model_scorer(str(student), template=template)
    stores = [LossStore.open(path) for path in recipe.stores]
    spec = None
    if recipe.needs_targets and not recipe.needs_online_teacher:
        spec = common_alternatives(stores, recipe.objective.alternatives)
    count = None if spec is None else spec.count
    teachers = [_reader(store, corpus, _table(recipe, tokenizer, store), count) for store in stores]
    read = _choose(corpus, teachers, tokenizer, documents, seed)
    made = (recipe.student.config or {}).get("model_type", "model")
    name = model_name(recipe.student.model) if recipe.student.model else f"{made} from scratch"
    sources = None if source_field is None else _sources(recipe, source_field, read)
    ours = []
    for document, nll in zip(read, score([document.tokens.ids for document in read]), strict=True):
        assert isinstance(nll, np.ndarray)
        ours.append(
            read_text(name, tokenizer, document.text, document.tokens, nll, recipe.data.train_on)
        )
    passages, rule = weigh_passages(
        [
            _passage(read[group], ours[group], recipe.objective.inside, sources and sources[group])
            for group in _groups([len(document.tokens) for document in read])
        ],
        objective_config(recipe),
        aggregation=recipe.objective.aggregation,
        how=recipe.store.combine or "min",
        alternatives=spec,
    )
    pairs = []
    for at, store in enumerate(stores):
        held = [document for document in read if len(document.teachers[at].spans)]
        pairs.append(
            preflight(
                (name, store.teacher_name),
                tokenizer,
                _teacher_tokenizer(recipe),
                [document.tokens for document in held],
                [document.teachers[at].spans for document in held],
                exact=all(document.tokens.exact for document in held),
            )
        )
    return Sample(passages=passages, selection=rule, preflight=pairs)


def _require_losses(folder: Path, recipe: Recipe) -> None:
    if recipe.corpora:
        raise SampleError(
            f"{folder} was trained on several corpora: a sample shows the documents of one"
        )
    if recipe.objective.entropy_keep is not None:
        raise SampleError(
            f"{folder} selects by the reference model's entropy too (objective.entropy_keep), "
            "which no store holds"
        )
    if recipe.needs_guidance and not recipe.stores:
        raise SampleError(
            f"{folder} has no loss store in its recipe: a sample needs the teacher's losses"
        )


def _table(recipe: Recipe, student: TextTokenizer, store: LossStore) -> TargetTable | None:
    """How a store's alternatives become targets; None where it has none."""
    if store.kept_alternatives is None:
        return None
    base = plain_tokenizer(student)
    eos = base.eos_id if recipe.data.eos == "auto" else base.id_of(recipe.data.eos or "")
    return target_table(student, store.vocabulary, eos)


def _teacher_tokenizer(recipe: Recipe) -> TextTokenizer | None:
    """The tokenizer that the recipe names for its only teacher; the store itself needs none."""
    if recipe.teacher_tokenizer is None or len(recipe.stores) > 1:
        return None
    with contextlib.suppress(VocagnolmError):
        return load_tokenizer(recipe.teacher_tokenizer)
    return None


ReadDocument = Callable[[int, bytes], Reading]
"""A document of a corpus, by its index and its hash, as a page's row."""


def _reader(
    store: LossStore, corpus: Corpus, table: TargetTable | None, count: int | None
) -> ReadDocument:
    """Reads a store's losses and alternatives (`count` of them; None: all). The row has no tokens
    where the store lacks the document."""
    lookup = Lookup(store, corpus.fingerprint)

    def read(index: int, digest: bytes) -> Reading:
        at = lookup.row(index, digest)
        token_bytes, nll, given = np.zeros(0, np.int64), np.zeros(0, np.float32), None
        if at is not None:
            token_bytes, nll = store[at]
            if table is not None:
                alternatives = store.alternatives(at)
                given = Alternatives(alternatives.packed[:, :count], alternatives.sampled)
        spans = tiling(token_bytes)
        return Reading(
            name=store.teacher_name, spans=spans, nll=nll, alternatives=given, table=table
        )

    return read


@dataclass(frozen=True)
class _Read:
    """A document as the student and the teachers' stores have it."""

    document: Document
    text: str
    tokens: TokenSpans
    teachers: list[Reading]


def _choose(
    corpus: Corpus,
    teachers: Sequence[ReadDocument],
    tokenizer: TextTokenizer,
    documents: int,
    seed: int,
) -> list[_Read]:
    """Random documents that a store holds, in corpus order, up to the page's token limit; without
    a store any document will do."""
    chosen: list[_Read] = []
    room = MAX_TOKENS
    for index in np.random.default_rng(seed).permutation(len(corpus)).tolist():
        if len(chosen) == documents:
            break
        document = next(corpus.read(index, index + 1))
        if not document.text:
            continue
        digest = document_hash(document.text)
        readings = [read(index, digest) for read in teachers]
        if teachers and not any(len(reading.spans) for reading in readings):
            continue
        try:
            tokens = tokenizer.spans(document.text)
        except TemplateError:  # prepare left it out as well
            continue
        if len(tokens) <= room:
            chosen.append(_Read(document, document.text, tokens, readings))
            room -= len(tokens)
    if not chosen:
        raise SampleError(
            "no document of the corpus is in the store and short enough for a page. "
            "Check that corpus.files and store.path of the recipe belong together"
        )
    return sorted(chosen, key=lambda choice: choice.document.index)


def _groups(sizes: Sequence[int]) -> Iterator[slice]:
    """Merge short documents into passages of about PASSAGE_TOKENS tokens."""
    start = held = 0
    for at, size in enumerate(sizes, 1):
        held += size
        if held >= PASSAGE_TOKENS or at == len(sizes):
            yield slice(start, at)
            start, held = at, 0


def _sources(recipe: Recipe, field: str, read: Sequence[_Read]) -> list[str]:
    """What the field holds in each document; an empty name where it has none."""
    try:
        corpus = open_corpus(recipe.corpus.files, text_field=field, format="text")
    except CorpusError as error:
        raise SampleError(f"--source-field {field}: {error}") from None
    fields = [corpus.field(choice.document.record) for choice in read]
    return ["" if value is None else str(value) for value in fields]


def _passage(
    group: Sequence[_Read], ours: Sequence[Reading], inside: bool, sources: list[str] | None
) -> Passage:
    text = b"".join(document.text.encode() for document in group)
    begins = np.cumsum([0, *(len(document.text.encode()) for document in group)])[:-1]
    more = f" and {len(group) - 1} more" if len(group) > 1 else ""
    passage = make_passage(
        group[0].document.place + more,
        text,
        joined(ours, begins),
        [
            joined(parts, begins)
            for parts in zip(*(document.teachers for document in group), strict=True)
        ],
        breaks=np.cumsum([len(document.tokens) for document in group])[:-1].tolist() or None,
        inside=inside,
    )
    return dataclasses.replace(passage, sources=sources)
