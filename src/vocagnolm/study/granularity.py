"""The granularity of a study's pair and corpus."""

from pathlib import Path

from vocagnolm.alignment import load_tokenizer
from vocagnolm.data.corpus import open_corpus
from vocagnolm.errors import StudyError
from vocagnolm.pair.granularity import GranularityStudy, granularity_study
from vocagnolm.recipe import Recipe
from vocagnolm.study.design import GranularityPlan


def corpus_granularity(recipe: Recipe, teacher: str, plan: GranularityPlan) -> GranularityStudy:
    """The same for a recipe's student, corpus and blocks, and the tokenizer of a teacher."""
    if recipe.student_tokenizer is None:
        raise StudyError("IoU and IoS need base.student.tokenizer or base.student.model.")
    corpus = open_corpus(
        list(recipe.corpus.files),
        text_field=recipe.corpus.text_field,
        format="text",
        split=recipe.corpus.split,
        limit=plan.documents,
    )
    return granularity_study(
        load_tokenizer(_tokenizer_file(recipe.student_tokenizer)),
        load_tokenizer(_tokenizer_file(teacher)),
        [document.text for document in corpus if document.text is not None],
        n_chunks=plan.chunks,
        sequence_tokens=recipe.data.block_size,
        packed=True,
    )


def _tokenizer_file(source: str) -> str:
    """A folder's tokenizer.json. A folder is checked against transformers, which brings torch in;
    what trains and scores with it makes that check."""
    file = Path(source) / "tokenizer.json"
    return str(file) if file.is_file() else source
