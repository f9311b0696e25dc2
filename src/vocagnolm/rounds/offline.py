"""Answers from a corpus and its store beside those that the student writes
(`rounds.offline_share`): the same targets, of the tokens by which the student would read them."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from vocagnolm.alternatives import AlternativesSpec
from vocagnolm.chat import ChatTokenizer
from vocagnolm.chat.answers import LaidAnswer
from vocagnolm.chat.tokens import ChatTokens, TrainOn, trained_ranges, trained_tokens
from vocagnolm.data.corpus import Corpus, document_hash
from vocagnolm.data.guidance import TargetsPlan, common_alternatives, target_table
from vocagnolm.data.materials import recipe_corpus
from vocagnolm.errors import RecipeError
from vocagnolm.recipe import Recipe
from vocagnolm.rounds.targets import Columns, Rollout, rollout_columns
from vocagnolm.rounds.teacher import Reading
from vocagnolm.store import LossStore


@dataclass(frozen=True)
class OfflineAnswers:
    """The conversations of a corpus with the store over them, and which of them a round takes:
    every pass over them in an order of its own, by seed."""

    corpus: Corpus
    store: LossStore
    chat: ChatTokenizer
    plan: TargetsPlan
    train_on: TrainOn
    per_round: int
    seed: int
    longest: int
    """Tokens of a conversation, at most; longer ones are left out."""

    @classmethod
    def of(cls, recipe: Recipe, chat: ChatTokenizer) -> "OfflineAnswers | None":
        """Those of a recipe; None where a round has none."""
        rounds, share = recipe.rounds, recipe.rounds.offline_share
        if not share:
            return None
        if len(recipe.stores) > 1:
            raise RecipeError("rounds.offline_share reads one store: store.path names several.")
        corpus, store = recipe_corpus(recipe), LossStore.open(recipe.stores[0])
        if not corpus.conversations:
            raise RecipeError(
                "rounds.offline_share is for conversations, and the corpus holds texts."
            )
        kept = common_alternatives([store], None)
        plan = TargetsPlan(
            tables=(target_table(chat, store.vocabulary, None),),
            spec=AlternativesSpec(kept.count, kept.sampled),
            inside=True,
            weights=(1.0,),
            with_label=True,
        )
        if kept.sampled:
            raise RecipeError(
                "rounds.offline_share needs the likeliest alternatives, and the store holds "
                "sampled ones."
            )
        answers = rounds.prompts_per_round * rounds.samples
        count = max(1, round(answers * share / (1 - share)))
        longest = recipe.data.block_size + 1
        return cls(corpus, store, chat, plan, recipe.data.train_on, count, recipe.run.seed, longest)

    def rows(self, number: int, update: int, updates: int) -> list[Columns]:
        """The rows of an update of round `number`. Conversations that the student or the store does
        not have are left out."""
        places = np.arange(number * self.per_round, (number + 1) * self.per_round)
        documents = [self._document(int(n)) for n in np.array_split(places, updates)[update]]
        rollouts, laid, readings = [], [], []
        for document in self._texts(documents):
            (tokens,) = self.chat.outcomes([document])
            index = self.store.find(document_hash(document))
            if index is None or not isinstance(tokens, ChatTokens):
                continue
            if len(tokens.ids) > self.longest:
                continue
            trained = trained_tokens(tokens, trained_ranges(document, self.train_on))
            if not trained[1:].any():
                continue
            where = np.flatnonzero(trained)
            first, end = max(1, int(where[0])), int(where[-1]) + 1
            ids, spans = tokens.ids[:end].tolist(), tokens.spans[first:end].copy()
            # what is not trained on stands for no text here
            context = ~trained[first:end]
            spans[context, 0] = spans[context, 1]
            rollouts.append(Rollout("", ids[:first], ids[first:], True))
            laid.append(LaidAnswer(document, "", "", 0, spans))
            token_bytes, nll = self.store[index]
            readings.append(Reading(token_bytes, nll, self.store.alternatives(index).packed))
        rows = rollout_columns(rollouts, laid, readings, self.plan)
        return [row for row in rows if (row["labels"] != -100).any()]

    def _document(self, place: int) -> int:
        epoch, position = divmod(place, len(self.corpus))
        order = np.random.default_rng([self.seed, epoch, 1]).permutation(len(self.corpus))
        return int(order[position])

    def _texts(self, documents: Sequence[int]) -> list[str]:
        texts = [
            document.text
            for number in documents
            for document in self.corpus.read(number, number + 1)
        ]
        return [text for text in texts if text is not None]
