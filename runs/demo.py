"""The demo: two unlike tokenizers, made on the spot, and how their tokens cover each other."""

import sys
from pathlib import Path

from rich.console import Console

from vocagnolm.align import load_tokenizer
from vocagnolm.align.picture import align_text, draw
from vocagnolm.compare import SAMPLE, compare

sys.path.insert(0, str(Path(__file__).parent.parent / "tests"))


def main() -> None:
    import made

    console = Console()
    student = load_tokenizer(made.tokenizer("sentencepiece prepend"))
    teacher = load_tokenizer(made.tokenizer("byte-level NFC"))
    (pair,) = compare(student, [teacher], SAMPLE)
    console.print(f"student {student.kind}, teacher {teacher.kind}: {pair.verdict}")
    console.print(
        f"raw overlap {pair.overlap.raw:.1%}, one-to-one {pair.one_to_one_share:.1%}, "
        f"student text covered {pair.ios:.1%}"
    )
    draw(align_text(student, teacher, "The first marble is blue with probability 5/8. é ½ 👧"))


if __name__ == "__main__":
    main()
