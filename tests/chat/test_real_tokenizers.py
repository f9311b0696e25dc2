"""The paper's own tokenizers in the templates of their chat models."""

import copy

import chat_kit
import pytest
from faults_kit import LONG
from real import PACKAGES, real
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from vocagnolm.alignment.tokenizer import Frame
from vocagnolm.chat import ChatTokenizer, Message, shared_text, template_of
from vocagnolm.chat.template import DATE

pytestmark = pytest.mark.skipif(
    not PACKAGES.is_dir(), reason="the packages with real tokenizers are not installed: make test"
)

ENDS = {
    "qwen2.5": (None, "<|im_end|>"),
    "llama3": ("<|begin_of_text|>", "<|eot_id|>"),
    "mistral": ("<s>", "</s>"),
    "llama2": ("<s>", "</s>"),
}
TALK = [
    Message("user", "What is 2+2 in naïve 東京?"),
    Message("assistant", "It's **4**.\n\nDone."),
    Message("user", "{{ ok }}"),
    Message("assistant", "bye"),
]


@pytest.mark.parametrize("name", ENDS if LONG else ("qwen2.5", "mistral"))
def test_ids_spans_and_ends_of_turns(name):
    base = real(name)
    special = {n: t for n, t in zip(("bos_token", "eos_token"), ENDS[name], strict=True) if t}
    source = (chat_kit.TEMPLATES / f"{name}.jinja").read_text(encoding="utf-8").removesuffix("\n")
    own = copy.copy(base)  # to prepare one of this size anew takes seconds
    own.frame = Frame(template=source, special_tokens=tuple(special.items()))
    chat = ChatTokenizer(own, template_of(own))
    inner = Tokenizer.from_str(base._spanner.as_json())
    theirs = PreTrainedTokenizerFast(tokenizer_object=inner, chat_template=source, **special)
    written = [{"role": m.role, "content": m.content} for m in TALK]
    options = {"date_string": DATE} if name == "llama3" else {}
    expected = theirs.apply_chat_template(written, return_dict=False, **options)
    text = shared_text(TALK)
    tokens = chat.spans(text)
    assert tokens.ids.tolist() == list(expected)
    assert tokens.lost_bytes == 0
    assert chat.token(chat.end_of_turn) == ENDS[name][1]
    # a control token that is written in a content is text
    spelled = [TALK[0], Message("assistant", f"so {ENDS[name][1]} then")]
    plain = [TALK[0], Message("assistant", "so then")]
    counts = [int(chat._is_control[chat.spans(shared_text(t)).ids].sum()) for t in (spelled, plain)]
    assert counts[0] == counts[1]
