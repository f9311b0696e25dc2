"""SentencePiece `tokenizer.model` files as `tokenizers.Tokenizer`, checked against the original."""

from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers

from vocagnolm.alignment.vocabulary import SPACE_MARK
from vocagnolm.errors import MissingExtraError, TokenizerError

_UNIGRAM, _BPE = 1, 2  # TrainerSpec.ModelType
_CONTROL, _USER_DEFINED = 3, 4  # SentencePiece.Type
_PROBES = (
    "Probability, Uncertainty",
    " two  spaces\nand a line, 12,345.678 x",
    "Naïve café ½ 東京 👩‍👧 \\frac{1}{2}",
)


def read_sentencepiece(path: Path) -> Tokenizer:
    """Convert the model file; refuse it when the result does not give SentencePiece's own ids."""
    try:
        from sentencepiece import SentencePieceProcessor
        from sentencepiece import sentencepiece_model_pb2 as schema
    except ImportError:
        raise MissingExtraError(
            "sentencepiece", "sentencepiece", "Reading a SentencePiece tokenizer.model"
        ) from None
    proto = schema.ModelProto()  # type: ignore[attr-defined]
    try:
        proto.ParseFromString(path.read_bytes())
        processor = SentencePieceProcessor(model_proto=path.read_bytes())
    except Exception as error:  # protobuf's and SentencePiece's errors share no useful base
        raise TokenizerError(
            f"{path} is not a SentencePiece model: {error}. Expected a tokenizer.json or a "
            "SentencePiece tokenizer.model"
        ) from None
    tokenizer = _convert(proto, path)
    for probe in _PROBES:
        expected = processor.encode(probe)
        found = tokenizer.encode(probe, add_special_tokens=False).ids
        if expected != found:
            raise TokenizerError(
                f"{path} cannot be converted exactly: for {probe!r} SentencePiece gives "
                f"{expected}, the converted tokenizer {found}. Pass the model's tokenizer.json"
            )
    return tokenizer


def _convert(proto: Any, path: Path) -> Tokenizer:
    pieces = [(piece.piece, piece.score) for piece in proto.pieces]
    spec = proto.trainer_spec
    model: models.Model
    if spec.model_type == _BPE:
        vocabulary = {piece: index for index, (piece, _) in enumerate(pieces)}
        model = models.BPE(
            vocabulary,
            _merges(pieces, vocabulary),
            unk_token=spec.unk_piece,
            fuse_unk=True,
            byte_fallback=spec.byte_fallback,
        )
    elif spec.model_type == _UNIGRAM:
        model = models.Unigram(pieces, unk_id=spec.unk_id, byte_fallback=spec.byte_fallback)
    else:
        raise TokenizerError(
            f"{path} is a SentencePiece model of type {spec.model_type}; only BPE and Unigram "
            "models can be converted"
        )
    tokenizer = Tokenizer(model)
    tokenizer.normalizer = _normaliser(proto.normalizer_spec)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE_MARK, " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    added = [
        AddedToken(piece.piece, normalized=False, special=piece.type == _CONTROL)
        for piece in proto.pieces
        if piece.type in (_CONTROL, _USER_DEFINED)
    ]
    tokenizer.add_tokens([token for token in added if not token.special])
    tokenizer.add_special_tokens([token for token in added if token.special])
    return tokenizer


def _merges(pieces: list[tuple[str, float]], vocabulary: dict[str, int]) -> list[tuple[str, str]]:
    """SentencePiece BPE joins the pair with the best-scored result: every way to cut a piece into
    two pieces is a merge of that piece's rank."""
    merges = []
    for piece, score in pieces:
        cuts = [
            (vocabulary[piece[:i]], vocabulary[piece[i:]], piece[:i], piece[i:])
            for i in range(1, len(piece))
            if piece[:i] in vocabulary and piece[i:] in vocabulary
        ]
        merges += [(-score, left, right) for _, _, left, right in sorted(cuts)]
    merges.sort(key=lambda merge: merge[0])  # stable: equal scores keep the order of the pieces
    return [(left, right) for _, left, right in merges]


def _normaliser(spec: Any) -> normalizers.Normalizer:
    steps: list[normalizers.Normalizer] = []
    if spec.precompiled_charsmap:
        steps.append(normalizers.Precompiled(spec.precompiled_charsmap))
    if spec.remove_extra_whitespaces:
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    if spec.add_dummy_prefix:
        steps.append(normalizers.Prepend(SPACE_MARK))
    steps.append(normalizers.Replace(" ", SPACE_MARK))
    return normalizers.Sequence(steps)
