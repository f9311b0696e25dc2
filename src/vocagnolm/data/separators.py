"""Which tokens stand before and after every document."""

from vocagnolm.alignment import TextTokenizer
from vocagnolm.chat import ChatTokenizer
from vocagnolm.errors import BlocksError


def separator_ids(
    tokenizer: TextTokenizer, bos: str | None, eos: str | None
) -> tuple[tuple[int, ...], int | None]:
    """Ids for `data.bos` and `data.eos`: a token, `auto`, or None. `auto` is what the tokenizer
    puts there itself, in scoring, training and evaluation alike; a conversation's template says
    itself where it begins and ends."""
    if bos == "auto":
        before = tokenizer.prefix_ids
    else:
        before = () if bos is None else (_id_of(tokenizer, bos, "data.bos"),)
    if eos != "auto":
        return before, None if eos is None else _id_of(tokenizer, eos, "data.eos")
    if isinstance(tokenizer, ChatTokenizer):
        return before, None
    if tokenizer.eos_id is None:
        raise BlocksError(
            f"data.eos is auto, but {tokenizer.name} does not say which token ends a document (no "
            "eos_token in tokenizer_config.json, no eos_token_id in config.json). "
            "Name it in the recipe, or set data.eos to null for none."
        )
    return before, tokenizer.eos_id


def _id_of(tokenizer: TextTokenizer, token: str, where: str) -> int:
    index = tokenizer.id_of(token)
    if index is None:
        raise BlocksError(f"{where} is {token!r}, which {tokenizer.name} does not have.")
    return index
