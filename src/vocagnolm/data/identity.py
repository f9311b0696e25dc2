"""What packed blocks were made from: by digest, so that nothing else is taken for it, and by name,
so that a difference can be told in words."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from vocagnolm.alignment import TextTokenizer, load_tokenizer
from vocagnolm.chat import ChatTokenizer, template_of
from vocagnolm.data.corpus import Corpus, open_corpus
from vocagnolm.data.targets import common_alternatives
from vocagnolm.errors import BlocksError
from vocagnolm.files import differences, json_digest
from vocagnolm.recipe import Recipe
from vocagnolm.storage import Place, place_of, require_place
from vocagnolm.store import LossStore
from vocagnolm.store.format import identity_digest

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


# ---- identities ----


# A corpus up to here is read again when only its date has changed.
LARGEST_READ_AGAIN_BYTES = 2 * 10**9


# ---- what a recipe names ----


def blocks_place(recipe: Recipe) -> Place:
    """Where the blocks are, or go."""
    if not recipe.data.blocks:
        raise BlocksError("The recipe does not say where the blocks go: set data.blocks.")
    require_place(recipe.data.blocks)
    return place_of(recipe.data.blocks)


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
    given = recipe.student
    template = template_of(tokenizer, given.chat_template, given.template_options)
    return ChatTokenizer(tokenizer, template)


def teacher_chat(recipe: Recipe, tokenizer: TextTokenizer) -> ChatTokenizer:
    given = recipe.teacher
    template = template_of(tokenizer, given.chat_template, given.template_options)
    return ChatTokenizer(tokenizer, template)


def recipe_corpus(recipe: Recipe) -> Corpus:
    if not recipe.corpus.files:
        raise BlocksError("The recipe names no corpus: set corpus.files.")
    return open_corpus(
        recipe.corpus.files,
        text_field=recipe.corpus.text_field,
        format=recipe.corpus.format,
        split=recipe.corpus.split,
        limit=recipe.corpus.limit_documents,
    )


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
        }
    return settings


def _targets(recipe: Recipe, here: bool) -> dict[str, Any]:
    """`here`: the stores can be asked how many alternatives they hold."""
    objective, wanted = recipe.objective, recipe.objective.alternatives
    if here:
        stores = [LossStore.open(path) for path in recipe.stores]
        wanted = common_alternatives(stores, wanted).count
    targets: dict[str, Any] = {"alternatives": wanted, "inside": objective.inside}
    if len(recipe.stores) > 1:
        targets["weights"] = recipe.store.weights
    return targets


def _stores_digest(paths: list[str]) -> str:
    digests = [identity_digest(store_identity(path)) for path in paths]
    return digests[0] if len(digests) == 1 else json_digest(digests)


def store_identity(path: str) -> dict[str, Any]:
    identity: dict[str, Any] = LossStore.open(path).manifest["identity"]
    return identity


# ---- by name ----


def described_inputs(recipe: Recipe, tokenizer: TextTokenizer, corpus: Corpus) -> dict[str, Any]:
    """The same inputs for people, kept in the manifest."""
    return {
        "tokenizer": tokenizer.name,
        "corpus": corpus.describe(),
        "files": [
            {"name": name, "bytes": state.st_size, "mtime_ns": state.st_mtime_ns}
            for name, path in local_files(recipe).items()
            for state in [path.stat()]
        ],
        "stores": [store_identity(path) for path in recipe.stores],
        **(
            {"template": tokenizer.template.describe()}
            if isinstance(tokenizer, ChatTokenizer)
            else {}
        ),
    }


def local_files(recipe: Recipe) -> dict[str, Path]:
    """Name -> path of the corpus's files that are on this machine."""
    found: dict[str, Path] = {}
    for name in recipe.corpus.files:
        path = Path(name)
        if path.is_dir():
            inside = sorted(p for p in path.rglob("*") if p.is_file())
            found |= {p.relative_to(path).as_posix(): p for p in inside}
        elif path.is_file():
            found[path.name] = path
    return found


def unmet_needs(
    manifest: dict[str, Any], recipe: Recipe, wanted: dict[str, Any], corpus: Corpus | None
) -> list[str]:
    """What blocks lack for this recipe, in words. They may hold more than it needs, so that one
    preparation serves runs of several methods."""
    found, inputs = manifest["settings"], manifest.get("inputs") or {}
    lines = []
    if found.get("tokenizer") != wanted["tokenizer"]:
        named = inputs.get("tokenizer", "another one")
        lines.append(f"tokenizer: the blocks hold ids of {named}, or of an older version of it")
    for name in ("bos", "eos"):
        if found.get(name) != wanted[name]:
            lines.append(f"data.{name}: token {found.get(name)} in the blocks, {wanted[name]} now")
    if wanted["corpus"] is not None and found.get("corpus") != wanted["corpus"]:
        now = corpus.describe() if corpus is not None else None
        lines += corpus_differences(inputs.get("corpus"), now)
    talks, now = found.get("conversations"), wanted.get("conversations")
    if talks and now and talks["template"] != now["template"]:
        lines.append("student.chat_template: the blocks were made in another template")
    if talks and now and talks["train_on"] != now["train_on"]:
        lines.append(f"data.train_on: {talks['train_on']} in the blocks, {now['train_on']} now")
    if recipe.needs_block_text and not found.get("text"):
        lines.append("text: the online teacher reads the blocks' text, which was not kept")
    if recipe.needs_guidance and not recipe.teacher.online:
        lines += _guidance_lines(found.get("guidance"), inputs.get("stores"), recipe, wanted)
    chosen, wants = found.get("documents") or {}, wanted.get("documents") or {}
    for name in ("by", "share", "seed", "against"):
        if chosen.get(name) != wants.get(name) and (name != "against" or "against" in wants):
            lines.append(
                f"corpus.keep_documents: {name} is {chosen.get(name)} in the blocks, "
                f"{wants.get(name)} now"
            )
    return lines


def _guidance_lines(
    has: dict[str, Any] | None,
    made_with: list[dict[str, Any]] | None,
    recipe: Recipe,
    wanted: dict[str, Any],
) -> Iterator[str]:
    wants = wanted["guidance"]
    if not wants:
        yield "store: this recipe needs guidance, but store.path is not set"
        return
    if not has:
        yield "guidance: the blocks were made without a store"
        return
    if wants["store"] is not None and has["store"] != wants["store"]:
        now = [store_identity(path) for path in recipe.stores]
        if made_with is None or len(made_with) != len(now):
            yield "store: the blocks were made with other stores"
        else:
            for old, new in zip(made_with, now, strict=True):
                if old != new:
                    yield from store_differences(old, new)
    if recipe.needs_teacher_losses and not has["teacher_losses"]:
        yield "teacher_losses: method chunk and unmapped: mean need them, they were not kept"
    if recipe.needs_stretches and not has.get("stretch"):
        yield "stretch: the losses of whole stretches were not kept"
    if recipe.needs_targets:
        yield from _target_lines(has.get("targets"), wants["targets"])
    names = {"missing": "data.missing"}
    if len(recipe.stores) > 1:
        names["combine"] = "store.combine"
    if recipe.objective.method != "chunk" and not recipe.needs_stretches:
        names["aggregation"] = "objective.aggregation"
    for name, key in names.items():
        if has.get(name) != wants[name]:
            yield f"{key}: {has.get(name)} in the blocks, {wants[name]} now"


def _target_lines(has: dict[str, Any] | None, wants: dict[str, Any]) -> Iterator[str]:
    if has is None:
        yield "targets: the blocks were made without the teacher's alternatives"
        return
    names = {"alternatives": "objective.alternatives", "inside": "objective.inside"}
    if "weights" in wants:
        names["weights"] = "store.weights"
    for name, key in names.items():
        known = name != "alternatives" or wants[name] is not None
        if known and has.get(name) != wants[name]:
            yield f"{key}: {has.get(name)} in the blocks, {wants[name]} now"


def corpus_differences(before: dict[str, Any] | None, now: dict[str, Any] | None) -> list[str]:
    """Which file or setting of a corpus differs."""
    if before is None or now is None:
        return ["corpus: it is another one than the blocks were made from"]
    files = {source["name"]: source for source in before["sources"]}
    lines = []
    for source in now["sources"]:
        old = files.pop(source["name"], None)
        if old is None:
            lines.append(f"corpus: {source['name']} is new")
        elif old["documents"] != source["documents"]:
            lines.append(
                f"corpus: {source['name']} had {old['documents']:,} documents, now "
                f"{source['documents']:,}"
            )
        elif old["sha256"] != source["sha256"]:
            lines.append(f"corpus: the text of {source['name']} has changed")
    lines += [f"corpus: {name} is not in it any more" for name in files]
    for name in ("format", "split", "text_field", "limit_documents", "documents"):
        if not lines and before.get(name) != now.get(name):
            lines.append(f"corpus.{name}: {before.get(name)} then, {now.get(name)} now")
    return lines or ["corpus: its files come in another order"]


def store_differences(before: dict[str, Any], now: dict[str, Any]) -> list[str]:
    lines = [
        f"store: its {name} is {new!r:.50}, the blocks were made with {old!r:.50}"
        for name, old, new in differences(before, now)
        if not name.endswith(("fingerprint", "sha256"))
    ]
    return lines[:4] or ["store: it is of other weights or another corpus under the same names"]


def stale_files(manifest: dict[str, Any], recipe: Recipe) -> list[str]:
    """Files of the corpus on this machine that are not those the blocks were made from. Where
    none is here there is nothing to say. What has kept its size and its date is not read."""
    before = {entry["name"]: entry for entry in (manifest.get("inputs") or {}).get("files", [])}
    here = {name: path.stat() for name, path in local_files(recipe).items() if name in before}
    if not before or not here:
        return []
    gone = [f"corpus: {name} is not there any more" for name in before if name not in here]
    resized = [
        f"corpus: {name} has {state.st_size:,} bytes, it had {before[name]['bytes']:,}"
        for name, state in here.items()
        if state.st_size != before[name]["bytes"]
    ]
    touched = [n for n, state in here.items() if state.st_mtime_ns != before[n]["mtime_ns"]]
    if gone or resized or not touched:
        return gone + resized
    if sum(state.st_size for state in here.values()) > LARGEST_READ_AGAIN_BYTES:
        return []
    corpus = recipe_corpus(recipe)
    if corpus.fingerprint == manifest["settings"]["corpus"]:
        return []
    return corpus_differences(manifest["inputs"]["corpus"], corpus.describe())
