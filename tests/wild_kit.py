"""Templates that the project has not been written for, each read by a small tokenizer."""

import re
from functools import cache

import chat_kit
import made
from tokenizers import AddedToken, Tokenizer, processors

from vocagnolm.alignment import TextTokenizer
from vocagnolm.alignment.tokenizer import Frame
from vocagnolm.chat import ChatTokenizer, template_of

WILD = [path for folder in ("trl", "wild") for path in (chat_kit.TEMPLATES / folder).iterdir()]
WILD = {path.stem: path for path in sorted(WILD) if path.suffix == ".jinja"}
CONTROL = re.compile(
    r"<\|[^|<>\s]+\|>|<｜[^｜<>]+｜>|<(?:start|end)_of_turn>|\[gMASK\]|<sop>|\[/?[A-Z_]{3,}\]"
    r"|<\|(?:tool\w*|channel|turn)>|<(?:tool\w*|channel|turn)\|>|<end_of_utterance>|<escape>"
    r"|<(?:start|end)_function_\w+>|\[\|\w+\|\]"
)
SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
NEEDS_TOOLS = {"vllm__tool_chat_template_functiongemma": "object of type 'NoneType' has no len()"}


def tokenizer_of(source: str, kind: str = "byte-level", **added) -> ChatTokenizer:
    inner = Tokenizer.from_str(made.tokenizer(kind).to_str())
    if kind == "byte-level":  # transformers finds no token for white space that is trimmed
        inner.post_processor = processors.ByteLevel(trim_offsets=False)
    control = sorted({*CONTROL.findall(source), *SPECIAL.values()})
    inner.add_special_tokens(
        [AddedToken(token, special=True, normalized=False, **added) for token in control]
    )
    frame = Frame(template=source, special_tokens=tuple(SPECIAL.items()))
    base = TextTokenizer(inner, name="toy", frame=frame)
    return ChatTokenizer(base, template_of(base))


@cache
def wild(name: str) -> ChatTokenizer:
    return tokenizer_of(WILD[name].read_text("utf-8"))
