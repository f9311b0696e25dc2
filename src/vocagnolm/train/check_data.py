"""What a recipe reads, for `vocagnolm check`: corpus, stores, teacher, templates, blocks."""

import contextlib
from pathlib import Path
from typing import Any

from vocagnolm.alignment import TextTokenizer
from vocagnolm.chat import ChatTokenizer, survey
from vocagnolm.data.block_copies import opened_count
from vocagnolm.data.blocks import MANIFEST, read_manifest
from vocagnolm.data.corpus import Corpus, document_hash
from vocagnolm.data.identity import (
    block_settings,
    blocks_place,
    recipe_corpus,
    stale_files,
    student_chat,
    teacher_chat,
    teacher_tokenizer,
    unmet_needs,
)
from vocagnolm.data.targets import common_alternatives
from vocagnolm.data.teachers import best_shares
from vocagnolm.errors import VocagnolmError
from vocagnolm.files import address_of
from vocagnolm.recipe import Recipe
from vocagnolm.store import LossStore
from vocagnolm.store.strength import best_store
from vocagnolm.train.check_report import CheckReport, Found
from vocagnolm.train.vocabulary import refuse_other_vocabulary

# Beyond this a corpus is not read through by a mere check.
LARGEST_CORPUS_READ_BYTES = 2 * 10**9
# Conversations that are rendered to see what the templates do to them.
SURVEYED = 200


def check_corpus(recipe: Recipe, report: CheckReport) -> Corpus | None:
    if not recipe.corpus.files:
        return None
    local = [Path(name) for name in recipe.corpus.files if Path(name).exists()]
    size = sum(
        p.stat().st_size for path in local for p in ([path] if path.is_file() else path.rglob("*"))
    )
    facts = report.plan["corpus"] = {"files": recipe.corpus.files, "bytes_on_disk": size}
    if any(address_of(name) for name in recipe.corpus.files):
        facts["read"] = "at an address: not copied for a check"
        return None
    if size > LARGEST_CORPUS_READ_BYTES:
        facts["read"] = "too large to read through in a check"
        return None
    corpus = recipe_corpus(recipe)
    facts["documents"] = len(corpus)
    return corpus


def check_stores(recipe: Recipe, report: CheckReport, corpus: Corpus | None) -> LossStore | None:
    if not recipe.stores:
        return None
    stores = [LossStore.open(path) for path in recipe.stores]
    facts: list[dict[str, Any]] = [
        {
            "path": str(store.path),
            "teacher": store.teacher_name,
            "documents": store.manifest["totals"]["documents"],
            "tokens": store.manifest["totals"]["tokens"],
            "bits_per_byte": store.bits_per_byte,
            **({"alternatives": str(kept)} if (kept := store.kept_alternatives) else {}),
        }
        for store in stores
    ]
    if recipe.needs_targets and not recipe.teacher.online:
        common_alternatives(stores, recipe.objective.alternatives)
    if len(stores) == 1:
        report.plan["store"] = facts[0]
    else:
        report.plan["stores"] = facts
        for about, share in zip(facts, best_shares(stores) or [], strict=False):
            about["best_share"] = share
    wanted = recipe.teacher.model
    names = {Path(store.teacher_name).name for store in stores}
    if wanted is not None and Path(wanted).name not in names:
        report.warnings.append(
            f"the store is of teacher {', '.join(sorted(names))}, the recipe names {wanted}."
        )
    if corpus is not None and not any(_made_from(store, corpus) for store in stores):
        absent = _absent(stores, corpus)
        if absent is not None and recipe.data.missing == "error":
            report.problem(
                f"the store was made from another corpus: it lacks {absent}. Score the recipe's "
                "corpus, or set data.missing to drop or keep."
            )
        else:
            report.warnings.append(
                "the store was made from another corpus than the recipe's; documents are looked up "
                f"by content, and those not in it follow data.missing = {recipe.data.missing}."
            )
    return best_store(stores)


def _made_from(store: LossStore, corpus: Corpus) -> bool:
    return store.corpus_fingerprint in (None, corpus.fingerprint)


def _absent(stores: list[LossStore], corpus: Corpus) -> str | None:
    """The place of a document that no store holds, among the corpus's first hundred."""
    for document in corpus.read(0, 100):
        if document.text is None:
            continue
        digest = document_hash(document.text)
        if all(store.find(digest) is None for store in stores):
            return str(document.place)
    return None


def check_teacher(recipe: Recipe, report: CheckReport, tokenizer: TextTokenizer | None) -> None:
    same_vocabulary = recipe.method.one_vocabulary
    if recipe.teacher_tokenizer is None:
        if same_vocabulary:
            report.warnings.append(
                f"objective.method {recipe.objective.method} presupposes one vocabulary; set "
                "teacher.model or teacher.tokenizer so that it can be checked."
            )
        return
    if not (same_vocabulary or recipe.needs_online_teacher):
        return
    teacher = teacher_tokenizer(recipe)
    report.plan["teacher_tokenizer"] = {
        "name": teacher.name,
        "vocabulary": teacher.vocabulary_size,
    }
    if same_vocabulary and tokenizer is not None:
        refuse_other_vocabulary(tokenizer.vocabulary, teacher.vocabulary)


def check_conversations(recipe: Recipe, report: CheckReport, found: Found) -> None:
    """What the two templates make of the corpus."""
    if found.corpus is None or not isinstance(found.tokenizer, ChatTokenizer):
        return
    texts = [d.text for d in found.corpus.read(0, SURVEYED) if d.text is not None]
    sides = {"student": found.tokenizer}
    if recipe.teacher_tokenizer is not None:
        # with a store the teacher itself need not be here
        with contextlib.suppress(*(() if recipe.needs_online_teacher else (VocagnolmError,))):
            sides["teacher"] = teacher_chat(recipe, teacher_tokenizer(recipe))
    for side, tokenizer in sides.items():
        seen = survey(tokenizer, texts)
        facts = seen.to_dict()
        report.plan[f"{side}_template"] = {
            "template": facts["template"],
            "conversations": seen.conversations,
            "refused": sum(seen.refused.values()),
        }
        report.warnings += [f"{side} {line}" for line in seen.warnings()]
        if texts and sum(seen.refused.values()) == len(texts):
            report.problem(
                f"{side}: the template of {tokenizer.name} refuses every conversation "
                f"({next(iter(seen.refused))})."
            )


def check_blocks(recipe: Recipe, report: CheckReport, found: Found) -> dict[str, Any] | None:
    """The manifest of prepared blocks."""
    if recipe.data.blocks is None or found.tokenizer is None:
        return None
    folder = blocks_place(recipe)
    if not folder.has(MANIFEST):
        report.plan["blocks"] = {"prepared": False, "next": "vocagnolm prepare RECIPE"}
        return None
    manifest = read_manifest(folder)
    if manifest["settings"].get("conversations") and found.corpus is None:
        found.tokenizer = student_chat(recipe, found.tokenizer)
    wanted = block_settings(recipe, found.tokenizer, found.corpus)
    unmet = unmet_needs(manifest, recipe, wanted, found.corpus) or stale_files(manifest, recipe)
    for line in unmet:
        report.problem(f"{folder} does not belong to this recipe: {line}")
    summary, guided = manifest["summary"], manifest["settings"]["guidance"]
    found.blocks, bins = opened_count(recipe, manifest)
    report.plan["blocks"] = {
        "prepared": True,
        "blocks": found.blocks,
        "tokens": manifest["tokens"],
        "mapped_share": summary["mapped_share"] if guided else None,
        "one_to_one_share": summary["one_to_one_share"] if guided else None,
        "target_shares": summary.get("target_shares"),
        "conversations": None if bins is None else bins.words(recipe.data.block_size + 1),
    }
    return manifest
