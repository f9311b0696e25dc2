"""What the settings change, counted on tiny models: properties that can be checked by hand."""

import json
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from made import sentencepiece_bpe
from study_kit import save_model, write_materials
from typer.testing import CliRunner

from vocagnolm.cli import app
from vocagnolm.data.corpus import open_corpus
from vocagnolm.data.prepare import prepare
from vocagnolm.errors import StudyError, UsageError
from vocagnolm.recipe import recipe_from_dict
from vocagnolm.score import ScoreSettings, score_corpus
from vocagnolm.store import LossStore
from vocagnolm_studies import selection as compare_selections
from vocagnolm_studies.controls import document_sources, kept_by_source
from vocagnolm_studies.figures import source_bars
from vocagnolm_studies.sample import (
    SampleBlocks,
    SpreadSample,
    shared_teacher_share,
    sources_of,
    spread_documents,
    spread_order,
)
from vocagnolm_studies.selection import (
    REFERENCE,
    SelectionStudy,
    lead_by_source,
    selection_study,
    teachers_lead,
    variants,
)

BLOCK, SCOPE, TOKENS = 64, 4, 2048


@pytest.fixture(scope="module")
def materials(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = write_materials(tmp_path_factory.mktemp("selection") / "materials")
    # a small vocabulary: many a student token needs several of its tokens
    save_model(folder / "teacher", sentencepiece_bpe(400), seed=2, hidden=48)
    score_corpus(
        str(folder / "teacher"),
        [str(folder / "main.jsonl")],
        folder / "store",
        settings=ScoreSettings(device="cpu", context=128, threads=1),
    )
    return folder


def study_of(materials: Path, corpus: str = "main.jsonl", **changes: object) -> SelectionStudy:
    settings: dict[str, object] = {
        "tokens": TOKENS,
        "block_size": BLOCK,
        "scope_blocks": SCOPE,
        "device": "cpu",
    }
    return selection_study(
        materials / "student",
        materials / "store",
        str(materials / corpus),
        **{**settings, **changes},  # type: ignore[arg-type]
    )


@pytest.fixture(scope="module")
def seen(
    materials: Path,
) -> tuple[SelectionStudy, dict[str, np.ndarray], "SampleBlocks"]:
    """A study together with the masks it counted."""
    masks: dict[str, np.ndarray] = {}
    reads = []
    own = compare_selections._select

    def remembering(variant, read, nll):  # type: ignore[no-untyped-def]
        reads.append(read)
        masks[variant.name] = own(variant, read, nll)
        return masks[variant.name]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compare_selections, "_select", remembering)
        study = study_of(materials)
    return study, masks, reads[0]


def test_the_reference_overlaps_itself_and_rows_are_counted(seen) -> None:  # type: ignore[no-untyped-def]
    study, masks, read = seen
    assert study.blocks == TOKENS // BLOCK
    assert study.tokens == study.blocks * BLOCK
    assert [row.name for row in study.rows] == [v.name for v in variants()]
    first = study.rows[0]
    assert (first.name, first.overlap) == (REFERENCE, 1.0)
    for row in study.rows:
        assert row.tokens == masks[row.name].sum()
        assert row.kept == pytest.approx(row.tokens / study.tokens)
        both = masks[row.name] & masks[REFERENCE]
        assert row.overlap == pytest.approx(both.sum() / masks[REFERENCE].sum())
        assert not (masks[row.name] & ~read.predicted).any()


def test_unmapped_strategies_differ_by_the_unmapped_tokens(seen) -> None:  # type: ignore[no-untyped-def]
    study, masks, read = seen
    unmapped = read.predicted & np.isnan(read.guidance["max"])
    assert unmapped.any() and study.pair.unmapped == pytest.approx(unmapped.sum() / study.tokens)
    assert (masks[REFERENCE] == (masks["unmapped-exclude"] | unmapped)).all()
    assert not (masks["unmapped-exclude"] & unmapped).any()
    # 40 % of the mapped, 40 % of all (mean), in each scope, to the nearest token
    for start in range(0, study.blocks, SCOPE):
        rows = slice(start, start + SCOPE)
        mapped = (read.predicted & ~unmapped)[rows].sum()
        assert abs(masks["unmapped-exclude"][rows].sum() - 0.4 * mapped) <= 0.5
        assert abs(masks["unmapped-mean"][rows].sum() - 0.4 * read.predicted[rows].sum()) <= 0.5


def test_a_larger_share_contains_the_smaller(seen) -> None:  # type: ignore[no-untyped-def]
    study, masks, _ = seen
    names = [REFERENCE, "keep-0.5", "keep-0.6", "keep-0.7", "keep-0.8"]
    for small, large in pairwise(names):
        assert (masks[small] <= masks[large]).all()
    rows = {row.name: row for row in study.rows}
    assert all(rows[name].overlap == 1.0 for name in names)
    assert [rows[n].excess for n in names] == sorted([rows[n].excess for n in names], reverse=True)


def test_the_best_are_kept(seen) -> None:  # type: ignore[no-untyped-def]
    """With the same tokens to choose from, and as many to keep, no other rule has a larger excess
    than the reference; and none a larger student loss than the student's loss alone."""
    study, _, _ = seen
    rows = {row.name: row for row in study.rows}
    for name in ("mean", "sum"):
        assert rows[name].tokens == rows[REFERENCE].tokens
        assert rows[name].excess <= rows[REFERENCE].excess
    assert rows["random"].excess < rows[REFERENCE].excess
    assert max(study.rows, key=lambda row: row.student_nll).name == "no_teacher"
    assert rows["random"].overlap == pytest.approx(0.4, abs=0.06)


def test_aggregations_differ_only_where_there_are_several_teacher_tokens(seen) -> None:  # type: ignore[no-untyped-def]
    study, _, read = seen
    width = read.teacher_range[..., 1] - read.teacher_range[..., 0] + 1
    top, mean, total = (read.guidance[how] for how in ("max", "mean", "sum"))
    mapped = read.predicted & ~np.isnan(top)
    single = mapped & (width == 1) & (read.teacher_range[..., 0] >= 0)
    assert single.any() and (mapped & ~single).any()
    assert (top[single] == mean[single]).all() and (top[single] == total[single]).all()
    assert (mean[mapped] <= top[mapped]).all() and (top[mapped] <= total[mapped]).all()
    pair = study.pair
    assert pair.one == pytest.approx(single.sum() / study.tokens)
    assert pair.one + pair.two + pair.more + pair.unmapped == pytest.approx(1)
    assert pair.separators + pair.unscored == pytest.approx(pair.unmapped)
    assert pair.separators > 0 and pair.two + pair.more > 0 and 0 <= pair.shared_teacher < 1


def test_kinds_of_stretches_add_up(seen) -> None:  # type: ignore[no-untyped-def]
    study, masks, read = seen
    shares = study.by_kind
    assert sum(share.tokens for share in shares.values()) == pytest.approx(1)
    for share in shares.values():
        assert share.joined - share.left == pytest.approx(share.by_stretch - share.by_token)
    kept = sum(share.tokens * share.by_stretch for share in shares.values())
    assert kept == pytest.approx(masks["stretch"].sum() / study.tokens)
    # by hand: the tokens of a stretch are chosen together
    for block in range(study.blocks):
        for number in np.unique(read.stretch[block]):
            here = read.stretch[block] == number
            assert len(set(masks["stretch"][block][here].tolist())) == 1
    # one token against one token is the same comparison; only what competes has changed
    alone = shares["1:1"]
    assert alone.joined + alone.left < 0.5 and {"1:N", "N:1"} & set(shares)


def test_shared_teacher_tokens_by_hand() -> None:
    # teacher 0 has two student tokens, 1 and 2 one, 3 has three; -1 is unmapped
    ranges = np.array([[0, 0], [0, 1], [-1, -1], [2, 3], [3, 3], [3, 3]])
    assert shared_teacher_share(ranges) == 2 / 4
    assert shared_teacher_share(np.full((2, 2), -1)) == 0


def test_sources_add_up(seen) -> None:  # type: ignore[no-untyped-def]
    study, masks, _ = seen
    assert study.by_source is not None
    assert set(study.by_source) == {REFERENCE, "chunk-16", "no_teacher", "random"}
    for name, sources in study.by_source.items():
        assert set(sources) == {"noise", "problems"}
        assert sum(source["tokens"] for source in sources.values()) == study.tokens
        kept = sum(source["kept"] * source["tokens"] for source in sources.values())
        assert kept == pytest.approx(masks[name].sum())


def test_the_teachers_lead_by_hand(seen) -> None:  # type: ignore[no-untyped-def]
    """One loss of the teacher for every stretch, however many tokens the student cuts it into."""
    study, _, read = seen
    whole = read.guidance["stretch"]
    losses, tokens = {"noise": 0.0, "problems": 0.0}, {"noise": 0, "problems": 0}
    for block in range(study.blocks):
        for number in np.unique(read.stretch[block]):
            here = (read.stretch[block] == number) & ~np.isnan(whole[block])
            if here.any():
                source = read.named[block][here][0]
                losses[source] += float(whole[block][here][0])
                tokens[source] += int(here.sum())
    made_up = np.full(whole.shape, 2.0, np.float32)
    lead, by_source = teachers_lead(read, made_up), lead_by_source(read, made_up)
    assert lead.student == 2.0 and lead.share == pytest.approx(1 - lead.teacher / 2)
    assert lead.teacher == pytest.approx(sum(losses.values()) / sum(tokens.values()))
    assert by_source is not None
    for source, found in by_source.items():
        assert found.teacher == pytest.approx(losses[source] / tokens[source])
    # what a block cuts off is all that is missing from the losses behind it
    assert 0.95 < sum(losses.values()) / read.teacher_sums[:, 0].sum() <= 1
    assert study.lead.student > 0 and set(study.lead_by_source or {}) == set(losses)


def test_the_same_tokens_as_in_training(materials: Path, tmp_path: Path) -> None:
    """With all of the corpus in the sample the blocks are those of `prepare`, and what is kept of
    every source is what the training code keeps in the same micro-batches."""
    lines = (materials / "main.jsonl").read_text(encoding="utf-8").splitlines(keepends=True)
    (tmp_path / "some.jsonl").write_text("".join(lines[:50]), encoding="utf-8")
    corpus = str(tmp_path / "some.jsonl")
    study = study_of(materials, corpus, tokens=1_000_000)
    for name, objective in (
        (REFERENCE, {"method": "guided"}),
        ("chunk-16", {"method": "chunk", "n_chunks": 16}),
    ):
        recipe = recipe_from_dict(
            {
                "student": {"model": str(materials / "student")},
                "corpus": {"files": [corpus]},
                "store": {"path": str(materials / "store")},
                "data": {"blocks": str(tmp_path / name), "block_size": BLOCK},
                "objective": objective,
                "train": {"micro_batch": SCOPE, "device": "cpu"},
            }
        )
        prepare(recipe)
        trained = kept_by_source(
            recipe,
            str(materials / "student"),
            document_sources([corpus], "source"),
            micro_batches=study.blocks // SCOPE,
        )
        assert study.by_source is not None
        for source, shares in study.by_source[name].items():
            assert trained[source]["tokens"] == shares["tokens"]
            # the two compute the same losses in another order of summation
            assert trained[source]["kept"] == pytest.approx(shares["kept"], abs=2e-3)


def test_documents_are_spread_evenly() -> None:
    for count in (1, 2, 3, 10, 97, 1000):
        order = spread_order(count)
        assert sorted(order) == list(range(count))
    for count in (1000, 7864):
        for taken in (10, 50, 128, 400):
            gaps = np.diff(np.sort(spread_order(count)[:taken]))
            assert gaps.max() <= 2.1 * count / taken and gaps.min() >= 0.4 * count / taken - 1


def test_documents_that_the_store_lacks_are_counted(materials: Path, tmp_path: Path) -> None:
    held = (materials / "main.jsonl").read_text(encoding="utf-8").splitlines()
    lines = [*held[:60], json.dumps({"source": "new", "text": "never scored"}), json.dumps({})]
    file = tmp_path / "mixed.jsonl"
    file.write_text("\n".join(lines), encoding="utf-8")
    study = study_of(materials, str(file), tokens=1_000_000)
    assert (study.documents, study.missing_documents, study.unusable_documents) == (60, 1, 1)
    with pytest.raises(StudyError, match=r"None of 3 documents .* 3 are not in the loss store"):
        study_of(materials, "held-out-gsm8k.jsonl")


def test_no_more_documents_are_read_than_needed(materials: Path) -> None:
    corpus, store = open_corpus(str(materials / "main.jsonl")), LossStore.open(materials / "store")
    sample = spread_documents(corpus, store, lambda texts: [10] * len(texts), 45)
    assert sample.tokens == 50 and sample.indices == sorted(spread_order(len(corpus))[:5])


def test_a_corpus_without_sources(materials: Path, tmp_path: Path) -> None:
    study = study_of(materials, tokens=256, source_field="origin")
    assert study.by_source is None and study.lead_by_source is None
    assert "by_source" in study.as_json()
    with pytest.raises(UsageError, match="--source-field"):
        source_bars(study, tmp_path / "figure.svg")
    plain = tmp_path / "text.txt"
    plain.write_text("only text")
    assert sources_of(str(plain), "source", SpreadSample([0], ["only text"], records=[0])) is None


def test_wrong_sizes_say_what_to_change(materials: Path) -> None:
    with pytest.raises(StudyError, match="--tokens"):
        study_of(materials, tokens=BLOCK - 1)
    with pytest.raises(StudyError, match="at most 512"):
        study_of(materials, block_size=1024, tokens=2048)


def test_command(materials: Path, tmp_path: Path) -> None:
    figure = tmp_path / "sources.svg"
    arguments = ["study", "selection", "--student", str(materials / "student")]
    arguments += ["--store", str(materials / "store"), "--corpus", str(materials / "main.jsonl")]
    arguments += ["--tokens", "512", "--block-size", "64", "--scope-blocks", "4", "--device", "cpu"]
    kinds = tmp_path / "kinds.svg"
    plots = ["--plot", str(figure), "--plot-kinds", str(kinds)]
    printed = CliRunner().invoke(app, [*arguments, *plots])
    assert printed.exit_code == 0, printed.output
    assert "joined" in printed.stdout and "compared by token" in kinds.read_text(encoding="utf-8")
    assert "unmapped: exclude" in printed.stdout and "problems" in printed.stdout
    assert "a lead of" in printed.stdout
    assert "noise" in figure.read_text(encoding="utf-8")
    as_json = CliRunner().invoke(app, [*arguments, "--json"])
    assert as_json.exit_code == 0
    told = json.loads(as_json.stdout)
    assert told["rows"][0]["overlap"] == 1.0 and told["pair"]["mapped"] > 0.9


def test_the_source_of_every_document_by_the_rule_of_every_corpus(tmp_path: Path) -> None:
    """A broken line has its number too: no document after it moves."""
    lines = ['{"text": "a", "source": "x"}', "{", '{"text": "b", "source": 3}']
    (tmp_path / "one.jsonl").write_text("\n".join([*lines, '{"text": "c", "source": "y"}']))
    (tmp_path / "two.jsonl").write_text('{"text": "d"}\n')
    files = [str(tmp_path / name) for name in ("one.jsonl", "two.jsonl")]
    assert document_sources(files, "source") == ["x", "one", "one", "y", "two"]
    (tmp_path / "c.txt").write_text("text")
    with pytest.raises(StudyError, match=r"plain \.jsonl"):
        document_sources([str(tmp_path / "c.txt")], "source")


def test_conversations_are_read_in_the_template(tmp_path):
    from chat_kit import make_chat_lab

    make_chat_lab(tmp_path, 24)
    corpus = tmp_path / "corpus.jsonl"
    settings = ScoreSettings(device="cpu", threads=1)
    score_corpus(str(tmp_path / "teacher"), [str(corpus)], tmp_path / "store", settings=settings)
    sizes = {"tokens": 4096, "block_size": 512, "scope_blocks": 2, "device": "cpu"}
    study = selection_study(tmp_path / "start", tmp_path / "store", str(corpus), **sizes)
    assert study.pair.mapped > 0.9 and study.documents > 4
    assert 0 < study.tokens < study.blocks * 512  # the assistant's tokens alone
    by_name = {row.name: row for row in study.rows}
    assert by_name[REFERENCE].kept == pytest.approx(0.4, abs=0.1)
    assert by_name["chunk-16"].tokens > 0
    assert all(np.isfinite(row.student_nll) for row in study.rows)
