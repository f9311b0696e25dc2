"""Values by chance, and valid ones that are changed at some place: what a stranger may write."""

import copy

from hypothesis import strategies as st

SCALARS = (
    st.none()
    | st.booleans()
    | st.integers(-(2**70), 2**70)
    | st.floats(allow_nan=True, allow_infinity=True)
    | st.text(max_size=5)
    | st.sampled_from(["9" * 4000, "\ud800", "token_id:2147483648", "token_id:7", ""])
)
VALUES = st.recursive(
    SCALARS,
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3)
    ),
    max_leaves=6,
)


@st.composite
def changed(draw, valid):
    """A valid answer in which something at some place is another value, twice, or not there."""
    answer = copy.deepcopy(valid)
    for _ in range(draw(st.integers(1, 3))):
        here, key = {"": answer}, ""
        holder = here
        while isinstance(holder[key], dict | list) and holder[key] and draw(st.integers(0, 5)):
            holder = holder[key]
            keys = list(holder) if isinstance(holder, dict) else range(len(holder))
            key = draw(st.sampled_from(list(keys)))
        how = draw(st.integers(0, 4))
        if how == 0 and holder is not here:
            del holder[key]
        elif how == 1 and isinstance(holder, list):
            holder.append(copy.deepcopy(holder[key]))
        else:
            holder[key] = draw(VALUES)
        answer = here[""]
    return answer
