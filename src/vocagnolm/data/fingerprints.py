"""What blocks were made from: by digest, so that nothing else is taken for it, and by name, so that
a difference can be put into words."""

from pathlib import Path
from typing import Any

from vocagnolm.alignment import TextTokenizer
from vocagnolm.alignment.targets import TARGETS_RULE
from vocagnolm.base.files import json_digest
from vocagnolm.chat import ChatTokenizer
from vocagnolm.chat.tokens import TRAINED_RULE
from vocagnolm.data.corpus import Corpus, files_of_folder
from vocagnolm.data.guidance import common_alternatives
from vocagnolm.data.materials import Materials, separator_ids
from vocagnolm.recipe import Recipe
from vocagnolm.recipe.methods import METHODS, Method
from vocagnolm.store import LossStore

# ---- by digest ----


def block_settings(
    materials: Materials, tokenizer: TextTokenizer, corpus: Corpus | None
) -> dict[str, Any]:
    """Everything that decides the parts, by digest; compared on resume and by `train`. The block
    size is not among them: blocks are cut when they are read. Blocks stand for themselves, so
    neither the corpus nor the store has to be on the machine that trains: None where they are not
    there, or not asked for."""
    recipe = materials.recipe
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
            "store": _stores_digest(materials.stores) if here else None,
            "aggregation": recipe.objective.aggregation,
            "missing": recipe.data.missing,
            "teacher_losses": recipe.needs_teacher_losses or "teacher_losses" in extra,
        }
        # keys that came later are written only where they are used: older blocks stay the same
        if recipe.needs_stretches or "stretch" in extra:
            settings["guidance"]["stretch"] = True
        if recipe.needs_targets or "targets" in extra:
            settings["guidance"]["targets"] = _targets(materials, here)
        if len(recipe.stores) > 1:
            settings["guidance"]["combine"] = recipe.store.combine or "min"
    if recipe.corpus.answers != "all":
        settings["answers"] = recipe.corpus.answers
    if recipe.corpus.keep_documents is not None:
        chosen = recipe.corpus.keep_documents
        settings["documents"] = {"by": chosen.by, "share": chosen.share}
        settings["documents"]["seed"] = recipe.run.seed if chosen.by == "random" else None
        if chosen.against is not None and (corpus is not None or Path(chosen.against).exists()):
            settings["documents"]["against"] = _stores_digest([LossStore.open(chosen.against)])
    if isinstance(tokenizer, ChatTokenizer):
        settings["conversations"] = {
            "template": tokenizer.template.fingerprint,
            "train_on": recipe.data.train_on,
            "rule": TRAINED_RULE,
        }
    return settings


def _targets(materials: Materials, here: bool) -> dict[str, Any]:
    """The settings that decide the targets. `here`: the stores can be asked how many alternatives
    they hold."""
    recipe = materials.recipe
    objective, wanted = recipe.objective, recipe.objective.alternatives
    if here:
        wanted = common_alternatives(materials.stores, wanted).count
    targets: dict[str, Any] = {
        "alternatives": wanted,
        "inside": objective.inside,
        "rule": TARGETS_RULE,
    }
    if len(recipe.stores) > 1:
        targets["weights"] = recipe.store.weights
    return targets


def _stores_digest(stores: list[LossStore]) -> str:
    digests = [json_digest(store_identity(store)) for store in stores]
    return digests[0] if len(digests) == 1 else json_digest(digests)


def store_identity(store: LossStore) -> dict[str, Any]:
    identity: dict[str, Any] = store.manifest["identity"]
    return identity


def lacking_columns(manifest: dict[str, Any]) -> dict[str, str | None]:
    """What the blocks lack for each method, by its name in `data.extra_columns` (`store`: all of a
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


def described_inputs(materials: Materials, tokenizer: TextTokenizer) -> dict[str, Any]:
    """A description of what blocks were made from, kept in the manifest so that differences can be
    put into words."""
    about: dict[str, Any] = {
        "tokenizer": tokenizer.name,
        "corpus": materials.corpus.describe(),
        "files": [
            {"name": name, "bytes": path.stat().st_size, "mtime_ns": path.stat().st_mtime_ns}
            for name, path in local_files(materials.recipe).items()
        ],
        "stores": [store_identity(store) for store in materials.stores],
    }
    if isinstance(tokenizer, ChatTokenizer):
        about["template"] = tokenizer.template.describe()
    return about


def local_files(recipe: Recipe) -> dict[str, Path]:
    """The path of every file of the corpus that is on this machine, by name."""
    paths: dict[str, Path] = {}
    for path in map(Path, recipe.corpus.files):
        if path.is_dir():
            paths |= {p.relative_to(path).as_posix(): p for p in files_of_folder(path)}
        elif path.is_file():
            paths[path.name] = path
    return paths
