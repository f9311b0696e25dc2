"""How blocks differ from what a recipe asks for, in words."""

from collections import defaultdict
from collections.abc import Container, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from vocagnolm.base.files import address_of, differences
from vocagnolm.data.corpus import Corpus, files_of_folder, is_corpus_file
from vocagnolm.data.fingerprints import local_files, store_identity
from vocagnolm.data.materials import Materials
from vocagnolm.recipe import Recipe

# A corpus up to here is read again when only its date or its name has changed.
LARGEST_READ_AGAIN_BYTES = 2 * 10**9

_VALUES = "{} in the blocks, {} now"
_IN_WORDS = {
    "bos": f"data.bos: token {_VALUES}",
    "eos": f"data.eos: token {_VALUES}",
    "answers": f"corpus.answers: {_VALUES}",
    "text": "text: the online teacher reads the blocks' text, which was not kept",
    "conversations": "corpus: texts and conversations are prepared differently",
    "conversations.template": "student.chat_template: the blocks were made in another template",
    "conversations.train_on": f"data.train_on: {_VALUES}",
    "conversations.rule": "conversations: the blocks are of an older version, which did not train "
    "on what templates print behind the generation prompt. Prepare them again",
    "guidance": "guidance: the blocks were made without a store",
    "guidance.aggregation": f"objective.aggregation: {_VALUES}",
    "guidance.combine": f"store.combine: {_VALUES}",
    "guidance.missing": f"data.missing: {_VALUES}",
    "guidance.teacher_losses": "teacher_losses: method chunk and unmapped: mean need them, they "
    "were not kept (data.extra_columns: [teacher_losses] keeps them)",
    "guidance.stretch": "stretch: the losses of whole stretches were not kept "
    "(data.extra_columns: [stretch] keeps them)",
    "guidance.targets": "targets: the blocks were made without the teacher's alternatives "
    "(data.extra_columns: [targets] keeps them)",
    "guidance.targets.alternatives": f"objective.alternatives: {_VALUES}",
    "guidance.targets.inside": f"objective.inside: {_VALUES}",
    "guidance.targets.weights": f"store.weights: {_VALUES}",
}


def differing_inputs(
    manifest: dict[str, Any],
    materials: Materials,
    wanted: dict[str, Any],
    corpus: Corpus | None,
    *,
    look: bool = True,
) -> list[str]:
    """How blocks differ from what a recipe asks for, in words: the one comparison of `prepare`,
    `check` and `train`. Blocks may hold more than the recipe needs, so that one preparation serves
    runs of several methods. Where no `corpus` was opened, what the recipe names is compared, and
    with `look` the files on this machine."""
    recipe = materials.recipe
    settings, inputs = manifest["settings"], manifest.get("inputs") or {}
    lines = []
    if settings.get("tokenizer") != wanted["tokenizer"]:
        named = inputs.get("tokenizer", "another one")
        lines.append(f"tokenizer: the blocks hold ids of {named}, or of an older version of it")
    if corpus is None:
        lines += _unread_corpus_differences(manifest, materials) if look else []
    elif settings.get("corpus") != wanted["corpus"]:
        lines += corpus_differences(inputs.get("corpus"), corpus.describe())
    guided = recipe.needs_guidance and not recipe.teacher.online
    if guided and not wanted["guidance"]:
        return [*lines, "store: this recipe needs guidance, but store.path is not set"]
    if guided and settings.get("guidance"):
        made_with, now = settings["guidance"]["store"], wanted["guidance"]["store"]
        if now not in (None, made_with):
            lines += _store_differences(inputs.get("stores"), materials)
        if manifest["summary"].get("mapped") == 0:
            lines.append("guidance: no token has any, the store held none of these documents")
    for name, old, new in differences(
        _needed(settings, wanted, recipe), _needed(wanted, wanted, recipe)
    ):
        section, _, key = name.rpartition(".")
        known = f"corpus.keep_documents: {key} is {_VALUES}" if section == "documents" else None
        lines.append((known or _IN_WORDS.get(name, f"{name}: {_VALUES}")).format(old, new))
    return lines


def _needed(settings: dict[str, Any], wanted: dict[str, Any], recipe: Recipe) -> dict[str, Any]:
    """The settings on which the recipe's training depends, as far as `wanted` knows them. How many
    documents a part has decides nothing; what is compared by name is left out."""
    apart = (
        *("tokenizer", "corpus", "part_documents", "text", "guidance", "documents", "answers"),
    )
    needed = {name: value for name, value in settings.items() if name not in apart}
    needed["documents"] = dict(settings.get("documents") or {})
    needed["answers"] = settings.get("answers", "all")
    if "against" not in (wanted.get("documents") or {}):
        needed["documents"].pop("against", None)
    if recipe.needs_block_text:
        needed["text"] = settings.get("text")
    if recipe.needs_guidance and not recipe.teacher.online and (has := settings.get("guidance")):
        keys = ["missing", "combine"]
        if recipe.objective.method != "chunk" and not recipe.needs_stretches:
            keys.append("aggregation")
        keys += ["teacher_losses"] if recipe.needs_teacher_losses else []
        keys += ["stretch"] if recipe.needs_stretches else []
        needed["guidance"] = {key: has.get(key) for key in keys}
        if recipe.needs_targets and (targets := has.get("targets")):
            known = wanted["guidance"]["targets"]["alternatives"] is not None
            # blocks of an older rule train on
            ignored = ("rule",) if known else ("rule", "alternatives")
            needed["guidance"]["targets"] = {
                key: value for key, value in targets.items() if key not in ignored
            }
    return needed


def _unread_corpus_differences(manifest: dict[str, Any], materials: Materials) -> list[str]:
    """How a corpus differs that is not read unless it must be: by the names and settings of the
    recipe, and by the sizes of the files that are on this machine. Those whose names or dates alone
    differ are read, if they are not too large."""
    recipe = materials.recipe
    inputs = manifest.get("inputs") or {}
    before: dict[str, Any] | None = inputs.get("corpus")
    if before is None or not recipe.corpus.files:
        return []
    here = {name: path.stat() for name, path in local_files(recipe).items()}
    lines = corpus_differences(before, _named_corpus(before, recipe, here))
    files = {entry["name"]: entry for entry in inputs.get("files", []) if entry["name"] in here}
    resized = [
        f"corpus: {name} has {here[name].st_size:,} bytes, it had {entry['bytes']:,}"
        for name, entry in files.items()
        if here[name].st_size != entry["bytes"]
    ]
    touched = any(here[name].st_mtime_ns != entry["mtime_ns"] for name, entry in files.items())
    if resized or not (lines or touched):
        return lines + resized
    size = sum(state.st_size for state in here.values())
    complete = all(Path(path).exists() for path in recipe.corpus.files)
    if not complete or size > LARGEST_READ_AGAIN_BYTES:
        return lines
    corpus = materials.corpus
    if corpus.fingerprint == manifest["settings"]["corpus"]:
        return []
    return corpus_differences(before, corpus.describe())


def _named_corpus(before: dict[str, Any], recipe: Recipe, here: Container[str]) -> dict[str, Any]:
    """What a recipe says of its corpus, as `Corpus.describe` would; what only the files could tell
    is taken from the description `before`."""
    asked, known = recipe.corpus, _by_name(before)
    names, elsewhere = [], False
    for path in asked.files:
        if Path(path).is_dir():
            names += [p.relative_to(path).as_posix() for p in files_of_folder(Path(path))]
        elif not is_corpus_file(path) or "*" in path:
            elsewhere = True  # a folder, a pattern, a dataset: what is in it is not known here
        elif not here or Path(path).is_file() or address_of(path) is not None:
            names.append(PurePosixPath(path).name)
    sources = [known[n].pop() if known[n] else {"name": n, "documents": 0} for n in names]
    if elsewhere:
        sources = before["sources"] + [source for source in sources if "sha256" not in source]
    total = sum(source["documents"] for source in before["sources"])
    documents = min(total, asked.limit_documents or total)
    same = documents == before["documents"]
    formats = {"auto": before.get("format"), "text": None}
    return {
        **before,
        "sources": sources,
        "documents": documents,
        "limit_documents": before.get("limit_documents") if same else asked.limit_documents,
        "text_field": asked.text_field,
        "split": None if asked.split == "none" else asked.split,
        "format": formats.get(asked.format, [asked.format]),
    }


def _by_name(corpus: dict[str, Any]) -> defaultdict[str, list[dict[str, Any]]]:
    """A corpus's sources by their names, which need not be unique; the first comes last."""
    groups = defaultdict(list)
    for source in reversed(corpus["sources"]):
        groups[source["name"]].append(source)
    return groups


def corpus_differences(before: dict[str, Any] | None, now: dict[str, Any]) -> list[str]:
    """Which file or setting of a corpus differs."""
    if before is None:
        return ["corpus: it is another one than the blocks were made from"]
    left, lines = _by_name(before), []
    for source in now["sources"]:
        name = source["name"]
        old = left[name].pop() if left[name] else None
        if old is None:
            lines.append(f"corpus: {name} is new")
        elif old["documents"] != source["documents"]:
            counts = f"{old['documents']:,} documents, now {source['documents']:,}"
            lines.append(f"corpus: {name} had {counts}")
        elif old["sha256"] != source["sha256"]:
            lines.append(f"corpus: the text of {name} has changed")
    lines += [f"corpus: {name} is not in it any more" for name, gone in left.items() if gone]
    for name in ("format", "split", "text_field", "limit_documents", "documents"):
        if not lines and before.get(name) != now.get(name):
            lines.append(f"corpus.{name}: {before.get(name)} then, {now.get(name)} now")
    if not lines and before["sources"] != now["sources"]:
        lines.append("corpus: its files come in another order")
    return lines


def _store_differences(
    made_with: list[dict[str, Any]] | None, materials: Materials
) -> Iterator[str]:
    now = [store_identity(store) for store in materials.stores]
    if made_with is None or len(made_with) != len(now):
        yield "store: the blocks were made with other stores"
        return
    for before, after in zip(made_with, now, strict=True):
        lines = [
            f"store: its {name} is {new!r:.50}, the blocks were made with {old!r:.50}"
            for name, old, new in differences(before, after)
            if not name.endswith(("fingerprint", "sha256"))
        ]
        if before != after:
            yield from lines[:4] or [
                "store: it is of other weights or another corpus under the same names"
            ]
