"""What a recipe names: tokenizers, corpus, stores and the place of its blocks, each opened once."""

from functools import cached_property
from pathlib import Path
from typing import Any

from vocagnolm.alignment import TextTokenizer, load_tokenizer
from vocagnolm.base.files import json_bytes
from vocagnolm.chat import ChatTokenizer, template_of
from vocagnolm.data.bins import Bins
from vocagnolm.data.blocks import MANIFEST, Blocks, block_count, read_manifest
from vocagnolm.data.corpus import Corpus, open_corpus
from vocagnolm.errors import BlocksError
from vocagnolm.recipe import Recipe
from vocagnolm.storage import Folder, Storage, require_storage, storage_of
from vocagnolm.storage.copies import Wanted, cache_folder, copy_files
from vocagnolm.store import LossStore


class Materials:
    """What a recipe names. Everything is opened when it is first asked for, and then kept; what
    cannot be opened is an error each time."""

    def __init__(self, recipe: Recipe, beside: "Materials | None" = None):
        """`beside`: materials for the same student, whose tokenizer is shared."""
        self.recipe, self._beside = recipe, beside

    @cached_property
    def tokenizer(self) -> TextTokenizer:
        """The student's tokenizer."""
        return student_tokenizer(self.recipe) if self._beside is None else self._beside.tokenizer

    @cached_property
    def chat(self) -> ChatTokenizer:
        """The student's tokenizer in its template."""
        return student_chat(self.recipe, self.tokenizer)

    def reader(self, conversations: bool) -> TextTokenizer:
        """The tokenizer that reads a corpus of conversations, or of texts."""
        return self.chat if conversations else self.tokenizer

    @cached_property
    def corpus(self) -> Corpus:
        return recipe_corpus(self.recipe)

    @cached_property
    def stores(self) -> list[LossStore]:
        return [LossStore.open(path) for path in self.recipe.stores]

    @cached_property
    def storage(self) -> Storage:
        """The place of the blocks, which may not be there yet."""
        return blocks_storage(self.recipe)

    def by_corpus(self) -> dict[str, "Materials"]:
        """The materials of each of several corpora, by name, which share the tokenizer; those of a
        recipe with one corpus are its own, under an empty name."""
        if not self.recipe.corpora:
            return {"": self}
        parts = self.recipe.by_corpus().items()
        return {name: Materials(part, beside=self) for name, part in parts}


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
    """The place of a recipe's blocks, which may not be there yet."""
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
    """The teacher's own tokenizer, or the one that the recipe names beside it."""
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
