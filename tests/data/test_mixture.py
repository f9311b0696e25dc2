"""The order of several corpora: exact shares, and any place computed alone."""

from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vocagnolm.data.mixture import Interleaving
from vocagnolm.errors import RecipeError
from vocagnolm.recipe import recipe_from_dict
from vocagnolm.recipe.load import recipe_difference


def shares_of(weights: list[int]) -> dict[str, Fraction]:
    return {str(n): Fraction(weight, sum(weights)) for n, weight in enumerate(weights)}


@given(st.lists(st.integers(1, 60), min_size=1, max_size=6), st.integers(0, 400))
def test_every_corpus_has_its_share_to_within_a_block_at_any_time(weights, length):
    order = Interleaving(shares := shares_of(weights), length)
    counts = [0] * len(weights)
    for position in range(length):
        corpus, before = order.place(position)
        assert before == counts[corpus]
        counts[corpus] += 1
        assert order.counts(position + 1) == counts
        for count, share in zip(counts, shares.values(), strict=True):
            assert abs(count - share * (position + 1)) < 1


def test_shares_are_exact_where_their_period_is_longer_than_the_run():
    shares = {"a": Fraction("0.333333333"), "b": Fraction("0.666666667")}
    order = Interleaving(shares, 3000)
    assert [order.counts(n) for n in (3, 1500, 3000)] == [[1, 2], [500, 1000], [1000, 2000]]


def corpora(**more):
    web = {"files": ["web"], "share": 0.9}
    answers = {"files": ["w"], "store": {"path": "w"}, "share": 0.1}
    return {"corpora": {"web": web, "answers": answers}, **more}


def test_shares_are_relative_and_the_order_of_corpora_does_not_matter():
    recipe = recipe_from_dict(corpora())
    assert recipe.shares == {"answers": Fraction(1, 10), "web": Fraction(9, 10)}
    tree = corpora()["corpora"]
    tree["web"]["share"], tree["answers"]["share"] = 45, 5
    turned = {"corpora": {name: tree[name] for name in ("answers", "web")}}
    other = recipe_from_dict(turned)
    assert list(other.shares.items()) == list(recipe.shares.items())
    assert recipe_difference(recipe, other) == [
        "corpora.answers.share: 0.1 -> 5.0",
        "corpora.web.share: 0.9 -> 45.0",
    ]
    assert recipe_difference(recipe, recipe_from_dict(dict(corpora()))) == []


def test_each_corpus_has_a_recipe_and_a_folder_of_its_own():
    recipe = recipe_from_dict(corpora(data={"blocks": "out/blocks"}))
    web, answers = (recipe.by_corpus()[name] for name in ("web", "answers"))
    assert (web.data.blocks, answers.data.blocks) == ("out/blocks/web", "out/blocks/answers")
    assert web.objective.method == "cpt" and answers.objective == recipe.objective
    assert answers.stores == recipe.stores == ["w"] and web.stores == []
    alone = recipe_from_dict({"corpus": {"files": ["web"]}})
    assert alone.by_corpus() == {"": alone} and "corpora" not in alone.to_yaml()


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        (corpora(corpus={"files": ["c"]}), "corpora and corpus are both given"),
        (corpora(store={"path": "s"}), "corpora and store are both given"),
        ({"corpora": {"a/b": {"share": 1}}}, "'a/b' cannot be the name of a corpus"),
        ({"corpora": {"web.2": {"share": 1}}}, "'web.2' cannot be the name of a corpus"),
        ({"corpora": {1: {"share": 1}}}, "1 cannot be the name of a corpus"),
        ({"corpora": {"web": {"files": ["w"]}}}, "corpora.web.share is missing"),
        ({"corpora": {"web": {"share": 0}}}, "share is 0.0, expected a number above 0"),
        ({"corpora": {"web": {"share": 1, "file": []}}}, "Did you mean 'files'"),
    ],
)
def test_corpora_that_are_refused(tree, message):
    with pytest.raises(RecipeError, match=message):
        recipe_from_dict(tree)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        ({"teacher": {"online": True, "model": "t"}}, "an online teacher reads one corpus"),
        ({"objective": {"method": "uld"}}, "an online teacher reads one corpus"),
        ({"objective": {"unmapped": "exclude"}}, "no token of corpora.web has guidance"),
        ({"objective": {"unmapped": "mean"}}, "no token of corpora.web has guidance"),
        ({"corpora": {"web": {"files": ["w"], "share": 1}}}, "needs the store of at least one"),
        (
            {"corpora": {"web": {"files": ["w"], "share": 1, "store": {"combine": "min"}}}},
            "corpora.web: store.combine joins several stores",
        ),
    ],
)
def test_what_corpora_cannot_do_together(more, message):
    problems = recipe_from_dict(corpora() | more).store_problems()
    assert any(message in problem for problem in problems), problems
    assert recipe_from_dict(corpora()).store_problems() == []
