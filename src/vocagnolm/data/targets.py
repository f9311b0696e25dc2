"""What of the stores' alternatives goes into blocks: one table for every pair of vocabularies,
made once and kept, and targets averaged over teachers."""

import contextlib
import hashlib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors import SafetensorError
from safetensors.numpy import load, save

from vocagnolm.alignment import (
    Alignment,
    Speller,
    TargetTable,
    TeacherTokens,
    TextTokenizer,
    carry_alternatives,
)
from vocagnolm.alignment.targets import Spelling, spell
from vocagnolm.alternatives import Alternatives, AlternativesSpec, Vocabulary
from vocagnolm.chat import ChatTokenizer
from vocagnolm.data.guidance import Laid, LaidTeacher
from vocagnolm.errors import BlocksError, WriteError
from vocagnolm.files import write_bytes
from vocagnolm.storage.copies import cache_folder
from vocagnolm.store import LossStore
from vocagnolm.store.format import encode_vocabulary
from vocagnolm.store.reader import SCORE_WITH_ALTERNATIVES

_SPELLING_VERSION = 1
# Below this share of a teacher's tokens that it can spell, a student's vocabulary is the wrong one.
_LEAST_SPELLED = 0.01


@dataclass(frozen=True, kw_only=True)
class TargetsPlan:
    """What blocks hold of the teachers' alternatives."""

    tables: tuple[TargetTable, ...]
    """One for every store."""
    spec: AlternativesSpec
    inside: bool
    weights: tuple[float, ...]


def targets_plan(
    stores: Sequence[LossStore],
    tokenizer: TextTokenizer,
    eos: int | None,
    *,
    count: int | None,
    inside: bool,
    weights: Sequence[float] | None,
) -> TargetsPlan:
    """`eos`: the student's token behind a document, which the teachers' ends become."""
    spec = common_alternatives(stores, count)
    return TargetsPlan(
        tables=tuple(target_table(tokenizer, store.vocabulary, eos) for store in stores),
        spec=spec,
        inside=inside,
        weights=tuple(weights or [1.0] * len(stores)),
    )


def common_alternatives(stores: Sequence[LossStore], count: int | None) -> AlternativesSpec:
    """How many alternatives the blocks have: as many as are asked for, or all. Refused where a
    store has none or too few, or where stores differ."""
    found = [(store.path, store.kept_alternatives) for store in stores]
    kept = [(path, spec) for path, spec in found if spec is not None]
    if len(kept) < len(found):
        path = next(path for path, spec in found if spec is None)
        raise BlocksError(f"{path} holds no alternatives to distil from. {SCORE_WITH_ALTERNATIVES}")
    if len({spec.sampled for _, spec in kept}) > 1:
        raise BlocksError(
            "the stores hold alternatives of two kinds: "
            + ", ".join(f"{path} has {spec}" for path, spec in kept)
            + ". Draws and likeliest tokens cannot be averaged: use stores of one kind."
        )
    counts = {spec.count for _, spec in kept}
    least = min(counts)
    if count is None and len(counts) > 1:
        raise BlocksError(
            "the stores hold unlike numbers of alternatives: "
            + ", ".join(f"{path} has {spec.count}" for path, spec in kept)
            + f". Set objective.alternatives to what all of them have, at most {least}."
        )
    if count is not None and count > least:
        raise BlocksError(
            f"objective.alternatives is {count}, and {kept[0][0] if len(kept) == 1 else 'a store'} "
            f"holds {least} a token. Use at most {least}, or score the corpus again with "
            f"--alternatives {count} into another folder."
        )
    return AlternativesSpec(count or least, kept[0][1].sampled)


def target_table(tokenizer: TextTokenizer, vocabulary: Vocabulary, eos: int | None) -> TargetTable:
    """What a teacher's tokens become: out of the user's cache, or made and put there. Its ends
    become `eos`, or of conversations the end of a turn."""
    end_id = tokenizer.end_of_turn if isinstance(tokenizer, ChatTokenizer) else eos
    student = tokenizer.base if isinstance(tokenizer, ChatTokenizer) else tokenizer
    digest = hashlib.sha256(encode_vocabulary(vocabulary)).hexdigest()
    key = f"{_SPELLING_VERSION} {digest} {student.fingerprint}"
    path = cache_folder() / "spelling" / hashlib.sha256(key.encode()).hexdigest()[:32]
    spelling = _cached(path.with_suffix(".safetensors"), len(vocabulary.content))
    if spelling is None:
        spelling = spell(Speller(student), vocabulary)
        _keep(path.with_suffix(".safetensors"), spelling)
    table = TargetTable(student, vocabulary, end_id, spelling)
    spelled = float((table.targets[0] >= 0).mean())
    if spelled < _LEAST_SPELLED:
        raise BlocksError(
            f"{student.name} ({student.kind}) can spell {spelled:.1%} of the teacher's tokens: it "
            "has neither their characters nor bytes to write them with. Distillation needs a "
            "student that can; use method guided."
        )
    return table


def _cached(path: Path, size: int) -> Spelling | None:
    try:
        content = path.read_bytes()
        arrays = load(content[32:])
    except (OSError, SafetensorError, ValueError):
        return None
    same = hashlib.sha256(content[32:]).digest() == content[:32]
    found = Spelling(**arrays) if same else None
    return found if found is not None and len(found.first) == size else None


def _keep(path: Path, spelling: Spelling) -> None:
    content = save(vars(spelling))
    with contextlib.suppress(WriteError):  # a home that cannot be written: made again next time
        write_bytes(path, hashlib.sha256(content).digest() + content)


@dataclass(frozen=True)
class AveragedTargets:
    """Of the student's tokens of a part."""

    ids: NDArray[np.int32]
    """[N, K]"""
    probability: NDArray[np.float32]
    mass: dict[str, Any]
    """What became of the first teacher's alternatives (`TargetMass`)."""


def carry_targets(
    labels: NDArray[Any],
    ours: Laid,
    theirs: Sequence[LaidTeacher],
    alignments: Sequence[Alignment],
    text: NDArray[np.uint8],
    plan: TargetsPlan,
) -> AveragedTargets:
    """The teachers' targets side by side, each by its weight; where one has no say, the others
    share its weight."""
    found = []
    for table, teacher, alignment in zip(plan.tables, theirs, alignments, strict=True):
        assert teacher.packed is not None
        packed = teacher.packed[:, : plan.spec.count]
        tokens = TeacherTokens(
            spans=teacher.spans, alternatives=Alternatives(packed, plan.spec.sampled)
        )
        found.append(
            carry_alternatives(
                table,
                labels,
                ours.spans,
                tokens,
                alignment,
                text,
                inside=plan.inside,
                begins=ours.origins,
            )
        )
    mass = asdict(found[0].mass)
    if len(found) == 1:
        return AveragedTargets(found[0].ids, found[0].probability, mass)
    weights = np.array(plan.weights)[:, None] * np.stack([one.told for one in found])
    shares = (weights / np.maximum(weights.sum(0), 1e-30)).astype(np.float32)
    return AveragedTargets(
        np.concatenate([one.ids for one in found], axis=1),
        np.concatenate(
            [one.probability * share[:, None] for one, share in zip(found, shares, strict=True)],
            axis=1,
        ),
        mass,
    )
