"""What a recipe names, and what blocks were made from: by digest, so that nothing else is taken for
it, and by name, so that a difference can be put into words."""

from collections import defaultdict
from collections.abc import Container, Iterator
from pathlib import Path, PurePosixPath
from typing import Any

from vocagnolm.alignment import TextTokenizer, load_tokenizer
from vocagnolm.alignment.targets import TARGETS_RULE
from vocagnolm.base.files import address_of, differences, json_bytes, json_digest
from vocagnolm.chat import ChatTokenizer, template_of
from vocagnolm.chat.tokens import TRAINED_RULE
from vocagnolm.data.bins import Bins
from vocagnolm.data.blocks import MANIFEST, Blocks, block_count, read_manifest
from vocagnolm.data.corpus import Corpus, files_of_folder, is_corpus_file, open_corpus
from vocagnolm.data.guidance import common_alternatives
from vocagnolm.errors import BlocksError
from vocagnolm.recipe import Recipe
from vocagnolm.recipe.methods import METHODS, Method
from vocagnolm.storage import Folder, Storage, require_storage, storage_of
from vocagnolm.storage.copies import Wanted, cache_folder, copy_files
from vocagnolm.store import LossStore

# A corpus up to here is read again when only its date or its name has changed.
LARGEST_READ_AGAIN_BYTES = 2 * 10**9

# ---- separators ----


def separator_ids(
    tokenizer: TextTokenizer, bos: str | None, eos: str | None
) -> tuple[tuple[int, ...], int | None]:
    """Ids for `data.bos` and `data.eos`: a token, `auto`, or None. `auto` is what the tokenizer
    puts there itself, in scoring, training and evaluation alike; a conversation's template says
    itself where it begins and ends."""
    if bos == "auto":
        before = tokenizer.prefix_ids
    else:
        before = () if bos is None else (_id_of(tokenizer, bos, "data.bos"),)
    if eos != "auto":
        return before, None if eos is None else _id_of(tokenizer, eos, "data.eos")
    if isinstance(tokenizer, ChatTokenizer):
        return before, None
    if tokenizer.eos_id is None:
        raise BlocksError(
            f"data.eos is auto, but {tokenizer.name} does not say which token ends a document (no "
            "eos_token in tokenizer_config.json, no eos_token_id in config.json). "
            "Name it in the recipe, or set data.eos to null for none."
        )
    return before, tokenizer.eos_id


def _id_of(tokenizer: TextTokenizer, token: str, where: str) -> int:
    index = tokenizer.id_of(token)
    if index is None:
        raise BlocksError(f"{where} is {token!r}, which {tokenizer.name} does not have.")
    return index


# ---- what a recipe names ----


def blocks_storage(recipe: Recipe) -> Storage:
    """Where the blocks are, or go."""
    if not recipe.data.blocks:
        raise BlocksError("The recipe does not say where the blocks go: set data.blocks.")
    require_storage(recipe.data.blocks)
    return storage_of(recipe.data.blocks)


def student_tokenizer(recipe: Recipe) -> TextTokenizer:
    if not recipe.student_tokenizer:
        raise BlocksError(
            "The recipe names no student tokenizer: set student.tokenizer (or student.model)."
        )
    revision = None if recipe.student.tokenizer else recipe.student.revision
    return load_tokenizer(recipe.student_tokenizer, revision=revision)


def teacher_tokenizer(recipe: Recipe) -> TextTokenizer:
    """The teacher's own, or the one that the recipe names beside it."""
    assert recipe.teacher_tokenizer is not None
    revision = None if recipe.teacher.tokenizer else recipe.teacher.revision
    return load_tokenizer(recipe.teacher_tokenizer, revision=revision)


def student_chat(recipe: Recipe, tokenizer: TextTokenizer) -> ChatTokenizer:
    """The student's tokenizer in its template."""
    options = recipe.student.chat_template, recipe.student.template_options
    return ChatTokenizer(tokenizer, template_of(tokenizer, *options))


def teacher_chat(recipe: Recipe, tokenizer: TextTokenizer) -> ChatTokenizer:
    options = recipe.teacher.chat_template, recipe.teacher.template_options
    return ChatTokenizer(tokenizer, template_of(tokenizer, *options))


def recipe_corpus(recipe: Recipe) -> Corpus:
    if not recipe.corpus.files:
        raise BlocksError("The recipe names no corpus: set corpus.files.")
    return open_corpus(
        recipe.corpus.files,
        text_field=recipe.corpus.text_field,
        format=recipe.corpus.format,
        split=recipe.corpus.split,
        limit=recipe.corpus.limit_documents,
        answers=recipe.corpus.answers,
    )


# ---- blocks at an address ----


def local_blocks(recipe: Recipe) -> Path:
    """The folder to read the recipe's blocks from. Those at an address are copied to `data.cache`,
    by one process of a machine while the others wait, and found there the next time."""
    storage = blocks_storage(recipe)
    if isinstance(storage, Folder):
        return storage.path
    manifest = read_manifest(storage)
    folder = blocks_cache(recipe) / str(manifest["fingerprint"])[:32]
    parts = [
        Wanted(part["name"], part.get("bytes"), part.get("sha256")) for part in manifest["parts"]
    ]
    mend = "Remove it there and run `vocagnolm prepare` again: it makes what is missing."
    copy_files(storage, parts, folder, mend)
    Folder(folder).create(MANIFEST, json_bytes(manifest, sealed=True))
    return folder


def blocks_cache(recipe: Recipe) -> Path:
    """The folder of this machine for blocks that are at an address."""
    return Path(recipe.data.cache) if recipe.data.cache else cache_folder() / "blocks"


def opened_count(recipe: Recipe, manifest: dict[str, Any]) -> tuple[int, Bins | None]:
    """How many blocks the recipe's folder gives; of conversations also how they fill them, for
    which the blocks are read."""
    size = recipe.data.block_size
    if not manifest["settings"].get("conversations"):
        return block_count(manifest["tokens"], size), None
    blocks = Blocks(local_blocks(recipe), size)
    return len(blocks), blocks.bins


# ---- by digest ----


def block_settings(
    recipe: Recipe, tokenizer: TextTokenizer, corpus: Corpus | None
) -> dict[str, Any]:
    """Everything that decides the parts, by digest; compared on resume and by `train`. The block
    size is not among them: blocks are cut when they are read. Blocks stand for themselves, so
    neither the corpus nor the store has to be on the machine that trains: None where they are not
    there, or not asked for."""
    prefix, eos = separator_ids(tokenizer, recipe.data.bos, recipe.data.eos)
    extra = recipe.data.extra_columns
    settings: dict[str, Any] = {
        "tokenizer": tokenizer.fingerprint,
        # one id nearly always; so it was written before there could be more
        "bos": list(prefix) if len(prefix) > 1 else next(iter(prefix), None),
        "eos": eos,
        "corpus": None if corpus is None else corpus.fingerprint,
        "part_documents": recipe.data.part_documents,
        "text": recipe.needs_block_text or "text" in extra,
        "guidance": None,
    }
    if recipe.stores:
        here = corpus is not None or all(Path(path).exists() for path in recipe.stores)
        settings["guidance"] = {
            "store": _stores_digest(recipe.stores) if here else None,
            "aggregation": recipe.objective.aggregation,
            "missing": recipe.data.missing,
            "teacher_losses": recipe.needs_teacher_losses or "teacher_losses" in extra,
        }
        # keys that came later are written only where they are used: older blocks stay the same
        if recipe.needs_stretches or "stretch" in extra:
            settings["guidance"]["stretch"] = True
        if recipe.needs_targets or "targets" in extra:
            settings["guidance"]["targets"] = _targets(recipe, here)
        if len(recipe.stores) > 1:
            settings["guidance"]["combine"] = recipe.store.combine or "min"
    if recipe.corpus.answers != "all":
        settings["answers"] = recipe.corpus.answers
    if recipe.corpus.keep_documents is not None:
        chosen = recipe.corpus.keep_documents
        settings["documents"] = {"by": chosen.by, "share": chosen.share}
        settings["documents"]["seed"] = recipe.run.seed if chosen.by == "random" else None
        if chosen.against is not None and (corpus is not None or Path(chosen.against).exists()):
            settings["documents"]["against"] = _stores_digest([chosen.against])
    if isinstance(tokenizer, ChatTokenizer):
        settings["conversations"] = {
            "template": tokenizer.template.fingerprint,
            "train_on": recipe.data.train_on,
            "rule": TRAINED_RULE,
        }
    return settings


def _targets(recipe: Recipe, here: bool) -> dict[str, Any]:
    """`here`: the stores can be asked how many alternatives they hold."""
    objective, wanted = recipe.objective, recipe.objective.alternatives
    if here:
        stores = [LossStore.open(path) for path in recipe.stores]
        wanted = common_alternatives(stores, wanted).count
    targets: dict[str, Any] = {
        "alternatives": wanted,
        "inside": objective.inside,
        "rule": TARGETS_RULE,
    }
    if len(recipe.stores) > 1:
        targets["weights"] = recipe.store.weights
    return targets


def _stores_digest(paths: list[str]) -> str:
    digests = [json_digest(store_identity(path)) for path in paths]
    return digests[0] if len(digests) == 1 else json_digest(digests)


def store_identity(path: str) -> dict[str, Any]:
    identity: dict[str, Any] = LossStore.open(path).manifest["identity"]
    return identity


def lacking_columns(manifest: dict[str, Any]) -> dict[str, str | None]:
    """Method -> what the blocks lack for it, by its name in `data.extra_columns` (`store`: all of a
    teacher's losses); None where they serve it."""
    settings = manifest["settings"]
    guidance = settings["guidance"]

    def lacking(rule: Method) -> str | None:
        if rule.distance:
            return None if rule.one_vocabulary or settings["text"] else "text"
        if not rule.guidance:
            return None
        if guidance is None:
            return "store"
        wanted = {
            "targets": rule.alternatives,
            "stretch": rule.by_stretch,
            "teacher_losses": rule.unit == "chunk",
        }
        return next(
            (name for name, needed in wanted.items() if needed > bool(guidance.get(name))), None
        )

    return {name: lacking(rule) for name, rule in METHODS.items()}


# ---- by name ----


def described_inputs(recipe: Recipe, tokenizer: TextTokenizer, corpus: Corpus) -> dict[str, Any]:
    """The same inputs for people, kept in the manifest."""
    about: dict[str, Any] = {
        "tokenizer": tokenizer.name,
        "corpus": corpus.describe(),
        "files": [
            {"name": name, "bytes": path.stat().st_size, "mtime_ns": path.stat().st_mtime_ns}
            for name, path in local_files(recipe).items()
        ],
        "stores": [store_identity(path) for path in recipe.stores],
    }
    if isinstance(tokenizer, ChatTokenizer):
        about["template"] = tokenizer.template.describe()
    return about


def local_files(recipe: Recipe) -> dict[str, Path]:
    """Name -> path of the corpus's files that are on this machine."""
    found: dict[str, Path] = {}
    for path in map(Path, recipe.corpus.files):
        if path.is_dir():
            found |= {p.relative_to(path).as_posix(): p for p in files_of_folder(path)}
        elif path.is_file():
            found[path.name] = path
    return found


# ---- what differs ----


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
    recipe: Recipe,
    wanted: dict[str, Any],
    corpus: Corpus | None,
    *,
    look: bool = True,
) -> list[str]:
    """How blocks differ from what a recipe asks for, in words: the one comparison of `prepare`,
    `check` and `train`. Blocks may hold more than the recipe needs, so that one preparation serves
    runs of several methods. Where no `corpus` was opened, what the recipe names is compared, and
    with `look` the files on this machine."""
    found, inputs = manifest["settings"], manifest.get("inputs") or {}
    lines = []
    if found.get("tokenizer") != wanted["tokenizer"]:
        named = inputs.get("tokenizer", "another one")
        lines.append(f"tokenizer: the blocks hold ids of {named}, or of an older version of it")
    if corpus is None:
        lines += _unread_corpus_differences(manifest, recipe) if look else []
    elif found.get("corpus") != wanted["corpus"]:
        lines += corpus_differences(inputs.get("corpus"), corpus.describe())
    guided = recipe.needs_guidance and not recipe.teacher.online
    if guided and not wanted["guidance"]:
        return [*lines, "store: this recipe needs guidance, but store.path is not set"]
    if guided and found.get("guidance"):
        made_with, now = found["guidance"]["store"], wanted["guidance"]["store"]
        if now not in (None, made_with):
            lines += _store_differences(inputs.get("stores"), recipe)
        if manifest["summary"].get("mapped") == 0:
            lines.append("guidance: no token has any, the store held none of these documents")
    for name, old, new in differences(
        _needed(found, wanted, recipe), _needed(wanted, wanted, recipe)
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


def _unread_corpus_differences(manifest: dict[str, Any], recipe: Recipe) -> list[str]:
    """Of a corpus that is not read unless it must be: by the names and settings of the recipe, and
    by the sizes of the files that are on this machine. Those whose names or dates alone differ are
    read, if they are not too large."""
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
    corpus = recipe_corpus(recipe)
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
        sources = before["sources"] + [one for one in sources if "sha256" not in one]
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
    found = defaultdict(list)
    for source in reversed(corpus["sources"]):
        found[source["name"]].append(source)
    return found


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


def _store_differences(made_with: list[dict[str, Any]] | None, recipe: Recipe) -> Iterator[str]:
    now = [store_identity(path) for path in recipe.stores]
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
