"""Any Hugging Face tokenizer, made ready for spans: a private copy with one fixed policy."""

import hashlib
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from vocagnolm.alignment.alignment import TokenSpans
from vocagnolm.alignment.frame import Frame, frame_of, read_frame, refuse_code
from vocagnolm.alignment.gguf_file import gguf_tokenizer
from vocagnolm.alignment.sentencepiece import read_sentencepiece
from vocagnolm.alignment.spans import Spanner
from vocagnolm.errors import TokenizerError

# What two loaders of one tokenizer must agree on: words, white space, digits, marks, accents,
# emoji, CJK, bytes outside any vocabulary, LaTeX.
PROBES = (
    "Probability, Uncertainty",
    " Hello  world\n\n\tif x<=10: print('It''s')",
    "Naïve café e\u0301 ½ ﬁ İstanbul 東京 👩‍👩‍👧 \u2581x \x07",
    r"\begin{align} \frac{1}{2} + 3,141.59 \\ \end{align} <0x0A> 100%",
)


class TextTokenizer:
    """A tokenizer that reads plain text and says where every token lies in its bytes.

    The policy is the same for student and teacher: the text is text. Truncation and padding are
    off, and special tokens that are written in the text (`</s>` in a tutorial) are read as the
    characters they are, unless `special_tokens="control"` asks for the control ids.
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
        """For example 'byte-level BPE', 'SentencePiece BPE', 'WordPiece'."""
        return self._spanner.pipeline.kind

    @property
    def vocabulary_size(self) -> int:
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    @cached_property
    def vocabulary(self) -> dict[str, int]:
        """Token string -> id, added tokens included."""
        return dict(self._tokenizer.get_vocab(with_added_tokens=True))

    @cached_property
    def fingerprint(self) -> str:
        """sha256 over everything that decides the ids of a text."""
        decides = f"{self.special_tokens}\n{self._tokenizer.to_str()}"
        return hashlib.sha256(decides.encode()).hexdigest()

    @cached_property
    def prefix_ids(self) -> tuple[int, ...]:
        """What stands before every text that the model was trained on (beginning-of-text): what
        the tokenizer's own template puts there, or where it has none what its files say."""
        bare = self.spans("a").ids.tolist()
        framed = self.spans("a", add_special_tokens=True).ids.tolist()
        if len(framed) > len(bare):
            for start in range(len(framed) - len(bare) + 1):
                if framed[start : start + len(bare)] == bare:
                    return tuple(framed[:start])
        return () if self.frame.bos_id is None else (self.frame.bos_id,)

    @property
    def eos_id(self) -> int | None:
        """The token that ends a document, as the tokenizer's files say."""
        return self.frame.eos_id

    def __reduce__(self) -> Any:
        # by hand: a pickled `tokenizers.Tokenizer` forgets how special tokens in the text are read
        return _rebuild, (self._spanner.as_json(), self.name, self.special_tokens, self.frame)

    def token(self, index: int) -> str:
        return self._tokenizer.id_to_token(index) or ""

    def id_of(self, token: str) -> int | None:
        index = self._tokenizer.token_to_id(token)
        return None if index is None else int(index)

    def bytes_of(self, index: int) -> bytes | None:
        """The text behind an id, with space marks as spaces; None where it stands for none."""
        return self._spanner.token_bytes[index]

    @property
    def control_ids(self) -> frozenset[int]:
        """Special tokens, which no plain text holds."""
        added = self._tokenizer.get_added_tokens_decoder()
        return frozenset(index for index, token in added.items() if token.special)

    def shown(self, text: str, tokens: TokenSpans) -> list[str | None]:
        """For the eye, what a token is where the text does not show it: nowhere, in plain text."""
        return [None] * len(tokens)

    def spans(self, text: str, *, add_special_tokens: bool = False) -> TokenSpans:
        return self._spanner.spans(text, add_special_tokens=add_special_tokens)

    def spans_batch(self, texts: Sequence[str]) -> list[TokenSpans]:
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


def token_spans(tokenizer: Any, text: str, *, add_special_tokens: bool = False) -> TokenSpans:
    """Ids and byte spans of `text` for any tokenizer that `load_tokenizer` takes.

    The tokenizer is prepared anew with every call. For more than a few texts prepare it once:
    `load_tokenizer(tokenizer)`, and then `.spans(text)` or `.spans_batch(texts)`.
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

    `check`: refuse a folder for which transformers would build a tokenizer with other ids. That
    imports transformers (seconds); what needs no model can do without.
    `trust_remote_code`: take the tokenizer.json of a folder that brings code for its tokenizer;
    the code itself is never run. Without, such a folder is refused."""
    if isinstance(source, TextTokenizer):
        if source.special_tokens == special_tokens:
            return source
        return _rebuild(source._spanner.as_json(), source.name, special_tokens, source.frame)
    if isinstance(source, Tokenizer):
        return TextTokenizer(source, name="tokenizer", special_tokens=special_tokens)
    if not isinstance(source, str | Path):
        return _from_transformers(source, special_tokens)
    path = Path(source)
    if path.is_dir():
        return _from_folder(path, special_tokens, check, trust_remote_code)
    if path.suffix.lower() == ".gguf":
        loaded = _from_transformers(gguf_tokenizer(path), special_tokens)
        loaded.name = path.stem
        return loaded
    if path.is_file():
        reader = _read_json if path.suffix == ".json" else read_sentencepiece
        return _from_file(reader(path), path.parent, _short_name(path), special_tokens)
    return _from_hub(str(source), special_tokens, revision, check, trust_remote_code)


def _from_file(tokenizer: Tokenizer, folder: Path, name: str, special_tokens: str) -> TextTokenizer:
    frame = read_frame(tokenizer, folder)
    return TextTokenizer(
        tokenizer, name=name, special_tokens=special_tokens, frame=frame, private=True
    )


def _short_name(path: Path) -> str:
    """A file is called by its folder when its own name says nothing."""
    generic = path.name in ("tokenizer.json", "tokenizer.model")
    return (path.resolve().parent.name if generic else path.stem) or path.stem


def _read_json(path: Path) -> Tokenizer:
    try:
        return Tokenizer.from_file(str(path))
    except Exception as error:  # the Rust side raises bare Exception
        raise TokenizerError(
            f"{path} is not a tokenizer that the library 'tokenizers' can read: {error}. "
            "Expected a tokenizer.json as written by save_pretrained"
        ) from None


def _from_folder(
    folder: Path, special_tokens: str, check: bool, trust_remote_code: bool
) -> TextTokenizer:
    name = folder.resolve().name
    if not trust_remote_code:
        refuse_code(folder)
    if (folder / "tokenizer.json").is_file():
        tokenizer = _read_json(folder / "tokenizer.json")
        read_frame(tokenizer, folder)  # files that cannot be read are named before all else
        if check and any((folder / f).is_file() for f in ("tokenizer_config.json", "config.json")):
            _check_auto_tokenizer(tokenizer, folder)
        return _from_file(tokenizer, folder, name, special_tokens)
    if (folder / "tokenizer.model").is_file():
        tokenizer = read_sentencepiece(folder / "tokenizer.model")
        return _from_file(tokenizer, folder, name, special_tokens)
    found = ", ".join(sorted(p.name for p in folder.iterdir())[:8]) or "nothing"
    raise TokenizerError(
        f"{folder} has no tokenizer: expected tokenizer.json or tokenizer.model, found {found}"
    )


def _from_hub(
    repository: str,
    special_tokens: str,
    revision: str | None,
    check: bool,
    trust_remote_code: bool,
) -> TextTokenizer:
    if repository.count("/") > 1 or repository.startswith((".", "/", "~")):
        raise TokenizerError(
            f"{repository} does not exist. Expected a folder with tokenizer.json or "
            "tokenizer.model, one of these files, or a hub id such as Qwen/Qwen2.5-Math-7B"
        )
    from huggingface_hub import snapshot_download

    try:
        folder = snapshot_download(
            repository,
            revision=revision,
            allow_patterns=[
                *("tokenizer*", "config.json", "special_tokens_map.json", "chat_template*"),
            ],
        )
    except Exception as error:  # network, authorisation, cache: many types, one meaning here
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise TokenizerError(
            f"'{repository}' is neither a file or folder here nor a tokenizer that the hub gave: "
            f"{reason.rstrip('.')}. Check the spelling, or download it and pass the folder"
        ) from None
    loaded = _from_folder(Path(folder), special_tokens, check, trust_remote_code)
    loaded.name = repository
    return loaded


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
        _refuse_other_ids(
            tokenizer,
            backend,
            str(folder / "tokenizer.json"),
            f"AutoTokenizer ({type(auto).__name__})",
        )


def _refuse_other_ids(file: Tokenizer, other: Tokenizer, file_name: str, other_name: str) -> None:
    for probe in PROBES:
        expected = file.encode(probe, add_special_tokens=False)
        try:
            found = other.encode(probe, add_special_tokens=False)
        except Exception as error:  # the Rust side raises bare Exception
            raise TokenizerError(
                f"{other_name}, made for {file_name}, cannot encode {probe!r}: {error}. The "
                "configuration beside tokenizer.json belongs to another tokenizer"
            ) from None
        if expected.ids != found.ids:
            raise TokenizerError(
                f"{other_name} and {file_name} give different ids for {probe!r}: {found.tokens} "
                f"against {expected.tokens}. One of them is not what the model was trained with. "
                "Correct 'tokenizer_class' in tokenizer_config.json (PreTrainedTokenizerFast reads "
                "tokenizer.json as it is), or pass the tokenizer.json file itself"
            )
