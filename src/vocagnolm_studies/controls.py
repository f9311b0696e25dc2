"""Which sources a selection keeps, and controls: blocks whose teacher says something else.

Guidance may simply prefer one source (word problems, say) over another. The control that tells:
blocks whose guidance is made of random numbers, so that the ordinary guided objective keeps as much
of every source as the guided run did, but by chance within it. And soft targets may help whatever
they say: blocks whose targets are those of other places, or of no teacher at all.
"""

import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from vocagnolm.base.files import file_digest, json_digest, write_json
from vocagnolm.data.blocks import MANIFEST, TrainingOrder, read_manifest
from vocagnolm.data.corpus import open_corpus
from vocagnolm.data.materials import Materials
from vocagnolm.errors import CorpusError, StudyError
from vocagnolm.recipe import Recipe
from vocagnolm_studies.design import Exchange
from vocagnolm_studies.sample import predicted_sources, shares_by_source

# Random guidance spans this many nats, so that the student's own loss (at most a few tens) moves
# a token by less than a thousandth; float16 reaches 65,504.
_SPAN_NATS = 30_000.0


def document_sources(files: Sequence[str], field: str, text_field: str = "text") -> list[str]:
    """The source of every document, in the order of the corpus: its `field`, else its file. The
    field is read as if it were the text, by the rule for every corpus."""
    sources: list[str] = []
    for name in files:
        stem, suffix = Path(name).stem, Path(name).suffix
        if suffix not in (".jsonl", ".ndjson"):
            raise StudyError(
                f"Kept shares per source need a corpus of plain .jsonl files, found {name}."
            )
        try:
            named = open_corpus(name, text_field=field, format="text")
        except CorpusError:  # no such field in it; a file that cannot be read is told here
            sources += [stem] * len(open_corpus(name))
            continue
        of_record = [document.text or stem for document in named]
        documents = open_corpus(name, text_field=text_field)
        sources += [of_record[documents.record_of(index)] for index in range(len(documents))]
    return sources


def kept_by_source(
    recipe: Recipe, model_folder: str, sources: Sequence[str], *, micro_batches: int
) -> dict[str, dict[str, float]]:
    """`{source: {kept, tokens}}` for the recipe's objective with a given student, over the first
    micro-batches of its training order. kept is the share of the source's predicted tokens."""
    import torch

    from vocagnolm.model import open_model
    from vocagnolm.model.runtime import head_form, last_hidden
    from vocagnolm.objective import ScoredBatch, student_nll, weigh_step
    from vocagnolm.train.collate import GuidedCollator, batch_targets
    from vocagnolm.train.run import open_blocks
    from vocagnolm.train.settings import check_batch, objective_config

    blocks = open_blocks(Materials(recipe))
    rows = check_batch(recipe, 1)
    count = min(micro_batches, len(blocks) // rows)
    order = TrainingOrder(blocks, count * rows, recipe.run.seed)
    device = "cpu" if recipe.train.device == "cpu" else "auto"
    model = open_model(model_folder, device=device).load()
    form = head_form(model)
    assert form is not None  # it was trained here
    config = objective_config(recipe)
    collate = GuidedCollator.for_blocks(recipe.data.document_mask)
    named, weights, valid = [], [], []
    for start in range(0, count * rows, rows):
        items = [order[position] for position in range(start, start + rows)]
        batch = {
            name: value.to(model.device)
            for name, value in collate(items).items()
            if isinstance(value, torch.Tensor)
        }
        with torch.inference_mode():
            hidden = last_hidden(model, batch["input_ids"], batch.get("position_ids"))
            nll = student_nll(hidden, form.head(model), batch["labels"])
            scored = ScoredBatch(batch_targets(batch), nll)
            weighed = weigh_step([scored], config, step=start // rows)
        weights.append(weighed.weights[0].cpu().numpy())
        valid.append((batch["labels"] >= 0).cpu().numpy())
        named.append(np.stack([predicted_sources(blocks, i["block"], sources) for i in items]))
    if not named:
        return {}
    return shares_by_source(np.concatenate(named), np.concatenate(weights), np.concatenate(valid))


def mean_shares(*measured: dict[str, dict[str, float]]) -> dict[str, float]:
    """Kept share per source, averaged over several measurements (before and after training)."""
    names = sorted({name for one in measured for name in one})
    return {
        name: float(np.mean([one[name]["kept"] for one in measured if name in one]))
        for name in names
    }


def matched_guidance(
    guidance: np.ndarray, sources: np.ndarray, shares: dict[str, float], seed: list[int]
) -> np.ndarray:
    """Random guidance under which the best tokens are a share `shares[source]` of each source.
    A token is kept when share - u is above the batch's threshold, u uniform: near 0 where the
    shares add up to the quota. NaN (unmapped) stays."""
    uniform = np.random.default_rng(seed).random(len(guidance))
    names, place = np.unique(sources.astype(str), return_inverse=True)
    overall = float(np.mean(list(shares.values())))
    share = np.array([shares.get(name, overall) for name in names])[place]
    made = (-_SPAN_NATS * (share - uniform)).astype(np.float16)
    made[np.isnan(guidance)] = np.nan
    return made


def write_matched_blocks(
    source: Path, target: Path, sources: Sequence[str], shares: dict[str, float], seed: int
) -> None:
    """The blocks of `source` with random guidance in place of the teacher's."""

    def match(columns: dict[str, np.ndarray], number: int) -> None:
        named = np.array([sources[i] for i in columns["document_index"]], dtype=object)
        per_token = np.repeat(named, columns["document_tokens"])
        columns["guidance"] = matched_guidance(
            columns["guidance"], per_token, shares, [seed, number]
        )

    def tell(manifest: dict[str, Any]) -> None:
        manifest["teacher"] = "none: random, matched per source"
        guidance = manifest["settings"]["guidance"]
        guidance |= {"teacher_losses": False, "stretch": False}
        guidance.pop("targets", None)

    columns = ["ids", "document_tokens", "document_index", "guidance"]
    _rewrite_blocks(source, target, columns, match, tell)


def write_exchanged_blocks(
    source: Path, target: Path, exchange: Exchange, vocabulary: int, seed: int
) -> None:
    """The blocks of `source` with other targets for distillation (`exchanged_targets`)."""

    def change(columns: dict[str, np.ndarray], number: int) -> None:
        columns["target_ids"], columns["target_p"] = exchanged_targets(
            columns["ids"],
            columns["target_ids"],
            columns["target_p"],
            exchange,
            vocabulary,
            [seed, number],
        )

    def tell(manifest: dict[str, Any]) -> None:
        manifest["teacher"] = f"{manifest.get('teacher')}, targets {exchange}"

    _rewrite_blocks(source, target, read_manifest(source)["columns"], change, tell)


def exchanged_targets(
    ids_N: np.ndarray,
    target_ids_NK: np.ndarray,
    target_p_NK: np.ndarray,
    exchange: Exchange,
    vocabulary: int,
    seed: list[int],
) -> tuple[np.ndarray, np.ndarray]:
    """Is it what the teacher says of this place? `shuffled`: every token has the targets of another
    place with the same label. `uniform`: the tokens are drawn from the whole vocabulary, so that
    the probabilities smooth the label as a teacher would that knows nothing."""
    chance = np.random.default_rng(seed)
    if exchange == "uniform":
        drawn = chance.integers(vocabulary, size=target_ids_NK.shape)
        return drawn.astype(target_ids_NK.dtype), target_p_NK
    by_label = np.lexsort((chance.random(len(ids_N)), ids_N))
    # within a label the targets move on by one place, so that none keeps its own
    bounds = np.flatnonzero(np.diff(ids_N[by_label], prepend=-1, append=-1))
    taken = np.concatenate(
        [np.roll(by_label[a:b], 1) for a, b in itertools.pairwise(bounds.tolist())]
    )
    giver = np.empty(len(ids_N), np.int64)
    giver[by_label] = taken
    return target_ids_NK[giver], target_p_NK[giver]


def _rewrite_blocks(
    source: Path,
    target: Path,
    names: list[str],
    change: Callable[[dict[str, np.ndarray], int], None],
    tell: Callable[[dict[str, Any]], None],
) -> None:
    """The columns `names` of blocks, part by part as `change` leaves them."""
    if (target / MANIFEST).is_file():
        return
    manifest = read_manifest(source)
    target.mkdir(parents=True, exist_ok=True)
    for number, part in enumerate(manifest["parts"]):
        with safe_open(source / part["name"], framework="np") as file:
            columns = {name: file.get_tensor(name) for name in names}
            metadata = file.metadata()
        change(columns, number)
        save_file(columns, target / part["name"], metadata=metadata)
        part["sha256"] = file_digest(target / part["name"])
        part["bytes"] = (target / part["name"]).stat().st_size
    manifest["columns"] = names
    tell(manifest)
    manifest["fingerprint"] = json_digest([part["sha256"] for part in manifest["parts"]])
    write_json(target / MANIFEST, manifest)
