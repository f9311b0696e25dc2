"""Any Hugging Face tokenizer, made ready for spans: a private copy with one fixed policy."""

import hashlib
import mmap
import re
import struct
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers

from vocagnolm.alignment.alignment import TokenSpans
from vocagnolm.alignment.spans import SPACE_MARK, Spanner
from vocagnolm.base.files import require_nameable
from vocagnolm.base.strangers import read_stranger, require_tokenizer
from vocagnolm.errors import (
    MissingExtraError,
    TokenizerError,
    VocagnolmError,
    VocagnolmWarning,
    first_line,
    optional,
)
from vocagnolm.storage.copies import remembered

# ---- what stands before and after a text ----

_SPECIAL_NAMES = tuple(
    f"{name}_token" for name in ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
)


@dataclass(frozen=True)
class Frame:
    """What the files beside a tokenizer say about the tokens around a text, and its template."""

    bos_id: int | None = None
    """Put before a text where the tokenizer's own template puts nothing."""
    eos_id: int | None = None
    """Ends a document."""
    template: str | None = None
    """The chat template, in Jinja."""
    special_tokens: tuple[tuple[str, str], ...] = ()
    """`bos_token`, `eos_token`, ... by name: a template may print them."""
    named_bos: str | None = None
    """A token whose name says that it begins texts, where the files do not say whether it does."""


# `<bos>`, `<s>`, `<|begin_of_text|>`: not GPT-2's `<|endoftext|>`, nor `<|im_start|>` of a turn
_BEGINS = re.compile(r"bos|begin|start.?of.?(text|sentence)|^<s>$", re.IGNORECASE)


def read_frame(tokenizer: Tokenizer, folder: Path) -> Frame:
    """The tokens around a text, as a tokenizer's folder names them: in `tokenizer_config.json`, or,
    for the end where that says nothing, in `config.json`."""
    settings = _read(folder / "tokenizer_config.json")
    bos = _id(tokenizer, settings.get("bos_token")) if settings.get("add_bos_token") else None
    named = str(_content(settings.get("bos_token")) or "")
    unsaid = settings.get("add_bos_token") is None and _BEGINS.search(named) is not None
    eos = _id(tokenizer, settings.get("eos_token"))
    if eos is None:
        eos = _read(folder / "config.json").get("eos_token_id")
        if isinstance(eos, list):
            eos = eos[0] if eos else None
    special = {**_read(folder / "special_tokens_map.json"), **settings}
    return Frame(
        bos,
        eos if isinstance(eos, int) else None,
        read_template(folder),
        _special_tokens(special),
        named_bos=named if unsaid else None,
    )


def read_template(folder: Path) -> str | None:
    """The chat template of a folder: a file of its own, or a key of the configuration."""
    path = folder / "chat_template.jinja"
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        pass
    except (OSError, UnicodeDecodeError) as error:
        raise TokenizerError(f"{path} cannot be read: {error}") from None
    for name in ("chat_template.json", "tokenizer_config.json"):
        if (template := _default_template(_read(folder / name).get("chat_template"))) is not None:
            return template
    return None


def _default_template(value: Any) -> str | None:
    """The chat template; where a list or mapping names several, the one called default."""
    if isinstance(value, list):
        named = [entry for entry in value if isinstance(entry, dict)]
        value = {str(entry.get("name")): entry.get("template") for entry in named}
    if isinstance(value, dict):
        value = value.get("default", next(iter(value.values()), None))
    return value if isinstance(value, str) else None


def _special_tokens(named: dict[str, Any]) -> tuple[tuple[str, str], ...]:
    tokens = {name: _content(named.get(name)) for name in _SPECIAL_NAMES}
    return tuple((name, str(token)) for name, token in tokens.items() if str(token or ""))


def _content(token: Any) -> Any:
    """The text of a token, which may be written out as an AddedToken."""
    return token.get("content") if isinstance(token, dict) else token


def refuse_code(folder: Path) -> None:
    """Refuse a folder whose tokenizer is made by its own Python code: the code is not run, and
    tokenizer.json may describe another tokenizer."""
    named = _read(folder / "tokenizer_config.json").get("auto_map")
    if isinstance(named, dict) and named.get("AutoTokenizer"):
        raise TokenizerError(
            f"{folder} has Python code of its own for its tokenizer (auto_map in "
            f"tokenizer_config.json), which is not run. Review that code; if tokenizer.json "
            f"works without it, pass that file, or --trust-remote-code to `score` or `evaluate`"
        )


def frame_of(transformers_tokenizer: Any) -> Frame:
    """What a tokenizer object of transformers says about the tokens around a text."""
    adds_bos = getattr(transformers_tokenizer, "add_bos_token", False)
    bos = getattr(transformers_tokenizer, "bos_token_id", None) if adds_bos else None
    eos = getattr(transformers_tokenizer, "eos_token_id", None)
    named = getattr(transformers_tokenizer, "special_tokens_map", None)
    return Frame(
        bos if isinstance(bos, int) else None,
        eos if isinstance(eos, int) else None,
        template=_default_template(getattr(transformers_tokenizer, "chat_template", None)),
        special_tokens=_special_tokens(named if isinstance(named, dict) else {}),
    )


def _id(tokenizer: Tokenizer, token: Any) -> int | None:
    content = _content(token)
    return tokenizer.token_to_id(content) if isinstance(content, str) else None


def _read(path: Path) -> dict[str, Any]:
    mend = "It says which tokens begin and end a text: get it again from where it came from."
    try:
        return read_stranger(path, TokenizerError, mend)
    except FileNotFoundError:
        return {}


# ---- GGUF files ----


_BOOL, _STRING = 7, 8
# Metadata stand before the weights; the largest vocabularies take 20 MiB.
_HEADER_BYTES = 128 * 2**20


def gguf_tokenizer(path: Path) -> Any:
    """Load the tokenizer of a GGUF file as a transformers tokenizer."""
    if not path.is_file():
        raise TokenizerError(f"{path} does not exist")
    if find_spec("gguf") is None:
        raise MissingExtraError("gguf", "gguf", f"reading {path.name}")
    from transformers import AutoTokenizer

    try:
        tokenizer = AutoTokenizer.from_pretrained(
            str(path.parent), gguf_file=path.name, trust_remote_code=False
        )
    except Exception as error:  # of many kinds; all mean: no tokenizer in there
        raise TokenizerError(f"{path} has no tokenizer that can be read: {error}") from None
    # transformers passes over what the file says of the tokens around a text; without its first
    # token Gemma predicts every other one far worse. Where the file does not say, a SentencePiece
    # model has the token for a text's beginning
    usual = {"bos": metadata(path, "tokenizer.ggml.model") == "llama", "eos": False}
    for side, otherwise in usual.items():
        wanted = metadata(path, f"tokenizer.ggml.add_{side}_token")
        wanted = otherwise if wanted is None else bool(wanted)
        if wanted != getattr(tokenizer, f"add_{side}_token"):
            setattr(tokenizer, f"add_{side}_token", wanted)
    return tokenizer


def metadata(path: Path, key: str) -> bool | str | None:
    """The truth value or text under a key of a GGUF file, found by the key's bytes: package gguf
    makes an object of every token before it can say anything, which takes it tens of seconds."""
    name = struct.pack("<Q", len(key)) + key.encode()
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        offset = content.find(name, 0, _HEADER_BYTES)
        if offset < 0:
            return None
        offset += len(name)
        (kind,) = struct.unpack_from("<I", content, offset)
        if kind == _BOOL:
            return bool(content[offset + 4])
        if kind == _STRING:
            (size,) = struct.unpack_from("<Q", content, offset + 4)
            return content[offset + 12 : offset + 12 + size].decode()
    return None


# ---- SentencePiece files ----


_UNIGRAM, _BPE = 1, 2  # TrainerSpec.ModelType
_CONTROL, _USER_DEFINED = 3, 4  # SentencePiece.Type
_PROBES = (
    "Probability, Uncertainty",
    " two  spaces\nand a line, 12,345.678 x",
    "Naïve café ½ 東京 👩‍👧 \\frac{1}{2}",
)


def read_sentencepiece(path: Path) -> Tokenizer:
    """Convert the model file; refuse it when the result does not give SentencePiece's own ids."""
    modules = ("sentencepiece", "sentencepiece.sentencepiece_model_pb2")
    purpose = "Reading a SentencePiece tokenizer.model"
    library, schema = (optional(name, "sentencepiece", purpose) for name in modules)
    proto = schema.ModelProto()
    try:
        proto.ParseFromString(path.read_bytes())
        processor = library.SentencePieceProcessor(model_proto=path.read_bytes())
    except Exception as error:  # protobuf's and SentencePiece's errors share no useful base
        raise TokenizerError(
            f"{path} is not a SentencePiece model: {error}. Expected a tokenizer.json or a "
            "SentencePiece tokenizer.model"
        ) from None
    tokenizer = _convert(proto, path)
    for probe in _PROBES:
        expected = processor.encode(probe)
        converted = tokenizer.encode(probe, add_special_tokens=False).ids
        if expected != converted:
            raise TokenizerError(
                f"{path} cannot be converted exactly: for {probe!r} SentencePiece gives "
                f"{expected}, the converted tokenizer {converted}. Pass the model's tokenizer.json"
            )
    return tokenizer


def _convert(proto: Any, path: Path) -> Tokenizer:
    pieces = [(piece.piece, piece.score) for piece in proto.pieces]
    spec = proto.trainer_spec
    model: models.Model
    if spec.model_type == _BPE:
        vocabulary = {piece: index for index, (piece, _) in enumerate(pieces)}
        unknown = {"unk_token": spec.unk_piece, "fuse_unk": True}
        merges = _merges(pieces, vocabulary)
        model = models.BPE(vocabulary, merges, byte_fallback=spec.byte_fallback, **unknown)
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


# ---- tokenizers, ready for spans ----


# What two loaders of one tokenizer must agree on: words, white space, digits, marks, accents,
# emoji, CJK, bytes outside any vocabulary, LaTeX.
PROBES = (
    "Probability, Uncertainty",
    " Hello  world\n\n\tif x<=10: print('It''s')",
    "Naïve café e\u0301 ½ ﬁ İstanbul 東京 👩‍👩‍👧 \u2581x \x07",
    r"\begin{align} \frac{1}{2} + 3,141.59 \\ \end{align} <0x0A> 100%",
)


class TextTokenizer:
    """A tokenizer that reads plain text and returns the byte span of every token.

    Student and teacher follow the same rules: truncation and padding are off, and special tokens
    written in the text (`</s>` in a tutorial) are read as plain characters, unless
    `special_tokens="control"` asks for the control ids.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        name: str,
        special_tokens: str = "text",
        frame: Frame | None = None,
        private: bool = False,
    ):
        """`private`: the tokenizer is given away for good, and need not be copied."""
        if special_tokens not in ("text", "control"):
            raise ValueError(f"special_tokens must be 'text' or 'control', got {special_tokens!r}")
        self.name = name
        self.special_tokens = special_tokens
        self.frame = frame or Frame()
        self._tokenizer = tokenizer if private else Tokenizer.from_str(tokenizer.to_str())
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._tokenizer.encode_special_tokens = special_tokens == "text"
        self._spanner = Spanner(self._tokenizer)

    def __repr__(self) -> str:
        return f"TextTokenizer({self.name!r}, {self.kind}, {self.vocabulary_size:,} tokens)"

    @property
    def kind(self) -> str:
        """The kind of tokenizer, for example 'byte-level BPE', 'SentencePiece BPE', 'WordPiece'."""
        return self._spanner.pipeline.kind

    @property
    def vocabulary_size(self) -> int:
        """Number of tokens, including added tokens."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    @cached_property
    def vocabulary(self) -> dict[str, int]:
        """Every token's id by its string, including added tokens."""
        return dict(self._tokenizer.get_vocab(with_added_tokens=True))

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 over everything that determines the ids of a text."""
        decides = f"{self.special_tokens}\n{self._tokenizer.to_str()}"
        return hashlib.sha256(decides.encode()).hexdigest()

    @cached_property
    def prefix_ids(self) -> tuple[int, ...]:
        """Tokens before every text (beginning-of-text): those of the tokenizer's own template, or,
        if it has none, those named in its files."""
        bare = self.spans("a").ids.tolist()
        framed = self.spans("a", add_special_tokens=True).ids.tolist()
        if len(framed) > len(bare):
            for start in range(len(framed) - len(bare) + 1):
                if framed[start : start + len(bare)] == bare:
                    return tuple(framed[:start])
        return () if self.frame.bos_id is None else (self.frame.bos_id,)

    @property
    def missing_beginning(self) -> str | None:
        """A token that the files name for the beginning of a text, and that no text gets."""
        return None if self.prefix_ids else self.frame.named_bos

    @property
    def eos_id(self) -> int | None:
        """The token that ends a document, according to the tokenizer's files."""
        return self.frame.eos_id

    def __reduce__(self) -> Any:
        # by hand: a pickled `tokenizers.Tokenizer` forgets how special tokens in the text are read
        return _rebuild, (self._spanner.as_json(), self.name, self.special_tokens, self.frame)

    def token(self, index: int) -> str:
        """The token of an id as the vocabulary spells it; empty if there is none."""
        return self._tokenizer.id_to_token(index) or ""

    def id_of(self, token: str) -> int | None:
        """The id of a token as the vocabulary spells it; None if there is none."""
        index = self._tokenizer.token_to_id(token)
        return None if index is None else int(index)

    def bytes_of(self, index: int) -> bytes | None:
        """The bytes of an id, with space marks as spaces; None if it has no text."""
        return self._spanner.token_bytes[index]

    @property
    def control_ids(self) -> frozenset[int]:
        """Ids of the special tokens, which plain text never contains."""
        added = self._tokenizer.get_added_tokens_decoder()
        return frozenset(index for index, token in added.items() if token.special)

    def shown(self, text: str, tokens: TokenSpans) -> list[str | None]:
        """Display names for tokens that the text does not show; there are none in plain text."""
        return [None] * len(tokens)

    def spans(self, text: str, *, add_special_tokens: bool = False) -> TokenSpans:
        """Ids and byte spans of one text. `spans_batch` reads many."""
        if not isinstance(text, str):
            raise TypeError(
                f"spans takes one text as str, got {type(text).__name__}: use spans_batch for a "
                "list of texts, and align_batch to align them"
            )
        return self._spanner.spans(text, add_special_tokens=add_special_tokens)

    def spans_batch(self, texts: Sequence[str]) -> list[TokenSpans]:
        """Ids and byte spans of many texts, tokenized in parallel; for `align_batch`."""
        if isinstance(texts, str):
            raise TypeError("spans_batch takes a list of texts, got one str: use spans for it")
        return self._spanner.spans_batch(texts)


def _rebuild(
    description: str, name: str, special_tokens: str, frame: Frame | None = None
) -> TextTokenizer:
    return TextTokenizer(
        Tokenizer.from_str(description),
        name=name,
        special_tokens=special_tokens,
        frame=frame,
        private=True,
    )


def missing_beginning(tokenizer: TextTokenizer) -> str | None:
    """A warning where texts are read without the token that should begin them: models that were
    trained with it predict far worse then."""
    if (token := tokenizer.missing_beginning) is None:
        return None
    return (
        f"{tokenizer.name} names {token} for the beginning of a text, but its tokenizer puts none "
        f"there, and texts are read without it; Gemma needs 2.4 instead of 1.5 bits per byte then. "
        f'Write "add_bos_token": true into its tokenizer_config.json, or false if that is meant.'
    )


def warn_of_missing_beginning(tokenizer: TextTokenizer) -> None:
    if (line := missing_beginning(tokenizer)) is not None:
        warnings.warn(line, VocagnolmWarning, stacklevel=1)  # one place: shown once


def token_spans(tokenizer: Any, text: str, *, add_special_tokens: bool = False) -> TokenSpans:
    """Ids and byte spans of `text`, for any tokenizer that `load_tokenizer` accepts.

    The tokenizer is prepared again with every call. For more than a few texts, prepare it once with
    `load_tokenizer(tokenizer)` and call `.spans(text)` or `.spans_batch(texts)`.
    """
    return load_tokenizer(tokenizer).spans(text, add_special_tokens=add_special_tokens)


def load_tokenizer(
    source: Any,
    *,
    special_tokens: str = "text",
    revision: str | None = None,
    check: bool = True,
    trust_remote_code: bool = False,
) -> TextTokenizer:
    """Prepare a tokenizer from a folder, a `tokenizer.json`, a SentencePiece `tokenizer.model`, a
    GGUF file, a hub id, a `tokenizers.Tokenizer` or a transformers fast tokenizer.

    `check`: refuse a folder for which transformers would build a tokenizer with other ids. This
    imports transformers the first time, which takes seconds.
    `trust_remote_code`: accept the tokenizer.json of a folder that comes with code for its
    tokenizer. The code itself is never run. Otherwise such a folder is refused."""
    if isinstance(source, TextTokenizer):
        if source.special_tokens == special_tokens:
            return source
        return _rebuild(source._spanner.as_json(), source.name, special_tokens, source.frame)
    if isinstance(source, Tokenizer):
        return TextTokenizer(source, name="tokenizer", special_tokens=special_tokens)
    if not isinstance(source, str | Path):
        return _from_transformers(source, special_tokens)
    require_nameable(source)
    path, name = Path(source), ""
    if path.suffix.lower() == ".gguf" and not path.is_dir():
        loaded = _from_transformers(gguf_tokenizer(path), special_tokens)
        loaded.name = path.stem
        return loaded
    if not path.exists():
        name = str(source)
        expected = "a folder with tokenizer.json or tokenizer.model, one of these files"
        wanted = ["tokenizer*", "config.json", "special_tokens_map.json", "chat_template*"]
        path = from_hub(name, TokenizerError, expected, revision=revision, allow_patterns=wanted)
    folder, of_folder = (path, True) if path.is_dir() else (path.parent, False)
    if of_folder:
        if not trust_remote_code:
            refuse_code(folder)
        path = _tokenizer_file(folder)
    tokenizer = _read_json(path) if path.suffix == ".json" else read_sentencepiece(path)
    frame = read_frame(tokenizer, folder)  # files that cannot be read are named before all else
    configured = any((folder / f).is_file() for f in ("tokenizer_config.json", "config.json"))
    if of_folder and check and configured and path.suffix == ".json":
        remembered(
            "AutoTokenizer", _digests(folder), lambda: _check_auto_tokenizer(tokenizer, folder)
        )
    # a file is called by its folder when its own name says nothing
    generic = path.name in ("tokenizer.json", "tokenizer.model")
    name = name or (folder.resolve().name if generic else path.stem) or path.stem
    return TextTokenizer(
        tokenizer, name=name, special_tokens=special_tokens, frame=frame, private=True
    )


def _tokenizer_file(folder: Path) -> Path:
    for name in ("tokenizer.json", "tokenizer.model"):
        if (folder / name).is_file():
            return folder / name
    names = ", ".join(sorted(p.name for p in folder.iterdir())[:8]) or "nothing"
    raise TokenizerError(
        f"{folder} has no tokenizer: expected tokenizer.json or tokenizer.model, found {names}"
    )


def _read_json(path: Path) -> Tokenizer:
    require_tokenizer(path, TokenizerError)
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the Rust side raises bare Exception
        raise TokenizerError(
            f"{path} is not a tokenizer that the library 'tokenizers' can read: {error!s:.300}. "
            "Expected a tokenizer.json as written by save_pretrained"
        ) from None


def from_hub(name: str, error: type[VocagnolmError], expected: str, **wanted: Any) -> Path:
    """Download a repository of the hub, or those of its files that are `wanted`, and give its
    folder."""
    if Path(name).exists() or name.count("/") > 1 or name.startswith((".", "/", "~")):
        wrong = "is no folder" if Path(name).exists() else "does not exist"
        raise error(
            f"{name} {wrong}. Expected {expected}, or a hub id such as Qwen/Qwen2.5-Math-7B."
        )
    from huggingface_hub import snapshot_download

    try:
        return Path(snapshot_download(name, **wanted))
    except Exception as failure:  # network, authorisation, cache: many types, one meaning here
        raise error(
            f"'{name}' is neither a local file or folder nor available on the hub: "
            f"{first_line(failure)}. Check the spelling, or download it and pass the folder."
        ) from None


def _from_transformers(source: Any, special_tokens: str) -> TextTokenizer:
    backend = getattr(source, "backend_tokenizer", None)
    if not isinstance(backend, Tokenizer):
        raise TokenizerError(
            f"{type(source).__name__} is not a fast tokenizer: expected a path, a hub id, a "
            "tokenizers.Tokenizer, or a transformers tokenizer with a 'tokenizers' backend. "
            "Load it with AutoTokenizer, or pass its folder"
        )
    name = str(getattr(source, "name_or_path", "") or type(source).__name__)
    file = Path(name) / "tokenizer.json"
    if file.is_file():
        _refuse_other_ids(_read_json(file), backend, str(file), type(source).__name__)
    return TextTokenizer(
        backend,
        name=Path(name).name if file.is_file() else name,
        special_tokens=special_tokens,
        frame=frame_of(source),
    )


def _digests(folder: Path) -> list[tuple[str, str]]:
    """Name and digest of every file that may define the tokenizer; larger files are weights."""
    kinds, largest = (".json", ".model", ".spm", ".tiktoken", ".txt"), 2**27
    files = [p for p in folder.iterdir() if p.suffix in kinds and p.stat().st_size < largest]
    return sorted((p.name, hashlib.sha256(p.read_bytes()).hexdigest()) for p in files)


def _check_auto_tokenizer(tokenizer: Tokenizer, folder: Path) -> None:
    """transformers may build a tokenizer of its own from the class named in the configuration
    and ignore tokenizer.json. Training and generation would then use other ids than we align."""
    from transformers import AutoTokenizer
    from transformers.utils import logging as transformers_logging

    verbosity = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        auto = AutoTokenizer.from_pretrained(
            str(folder), local_files_only=True, trust_remote_code=False
        )
    except Exception:  # no tokenizer class for this configuration: then nothing can disagree
        return
    finally:
        transformers_logging.set_verbosity(verbosity)
    backend = getattr(auto, "backend_tokenizer", None)
    if isinstance(backend, Tokenizer):
        name = f"AutoTokenizer ({type(auto).__name__})"
        _refuse_other_ids(tokenizer, backend, str(folder / "tokenizer.json"), name)


def _refuse_other_ids(file: Tokenizer, other: Tokenizer, file_name: str, other_name: str) -> None:
    for probe in PROBES:
        expected = file.encode(probe, add_special_tokens=False)
        try:
            encoded = other.encode(probe, add_special_tokens=False)
        except Exception as error:  # the Rust side raises bare Exception
            raise TokenizerError(
                f"{other_name}, made for {file_name}, cannot encode {probe!r}: {error}. The "
                f"configuration next to tokenizer.json belongs to another tokenizer"
            ) from None
        if expected.ids != encoded.ids:
            raise TokenizerError(
                f"{other_name} and {file_name} give different ids for {probe!r}: {encoded.tokens} "
                f"against {expected.tokens}. One of them is not what the model was trained with. "
                "Download tokenizer.json again, or correct 'tokenizer_class' in "
                "tokenizer_config.json (transformers ignores it for some architectures). If "
                "tokenizer.json is the right one, pass that file itself"
            )
