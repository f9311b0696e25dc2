"""Every measured number of the README and of docs/choosing-a-teacher.md follows from a kept result.

A claim is a piece of a page, written here with its numbers made from the results. Each has to stand
on the page, and no number may be left on the page that is in no claim and is not one of `NAMES`.
"""

# ruff: noqa: E501  (a claim is read beside its page)

import json
import math
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from result_tables import (
    RESULTS,
    ROOT,
    TEXTS,
    Difference,
    bits_text,
    chosen_rows,
    difference,
    interval_text,
    level_text,
    rounded,
    short_table,
    signed,
    table,
)
from study_kit import kept_runs

from vocagnolm.alternatives import pack
from vocagnolm.base.statistics import compare_means, mean_and_spread, paired_interval

NAMES = re.compile(
    r"""
    SmolLM2-135M | Qwen2\.5(-Coder|-Math)?(-[\d.]+B)? | Gemma-3-270M | TinyLlama[-_][\w.]+ | SmolLM2 |
    GSM8K | 2-bit | 4-bit | 8-bit | Rho-1 | H200 | arXiv\ 2503\.19123 | e4m3 | Llama-3 | Python\ 3\.11 |
    VocAgnoLM2025 | Figure\ 5 | Apache-2\.0 |
    \d[\d.]*(M|B)\b(\ (tokens|student|teacher|parameters))? | \(135M\) |   # sizes and lengths
    95\ % | 40\ %(?=\ of\ the\ tokens|\ tested) | 25\ to\ 75\ %(?=\ of\ them) | 50\ %(?=:) |
    [1-9]e-\d |   # learning rates
    bitsandbytes\ with\ 4\ and\ 8\ bits | 8\ GPUs | 8\ x\ 2,048 | float32 | bfloat16 | bf16 | \bfp8\b
    """,
    re.VERBOSE,
)
NUMBER = re.compile(r"[-+±]?\d[\d,]*(?:\.\d+)?")


def plain_text(page: Path) -> str:
    """A page without its code, links and marks, in one line; what lies between results' marks is a
    table that another test compares."""
    text = page.read_text(encoding="utf-8")
    text = re.sub(r"<!-- results: begin.*?results: end \w+ -->", " ", text, flags=re.DOTALL)
    text = re.sub(r"```.*?```|<[^>]*>", " ", text, flags=re.DOTALL)
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"`[^`]*`", "CODE", text).replace("*", "")
    return re.sub(r"\s+", " ", text)


# ---- numbers from the results ----


@cache
def kept(name: str) -> Any:
    return json.loads((RESULTS / f"{name}.json").read_text(encoding="utf-8"))


def row(study: str, name: str) -> dict[str, Any]:
    (found,) = [r for r in table(study)["rows"] if r["row"] == name]
    return dict(found)


def accuracy(study: str, name: str, digits: int = 1) -> str:
    return rounded(row(study, name)["accuracy"], digits)


def bits_of(study: str, name: str, text: str) -> float:
    return float(row(study, name)["bits_per_byte"][text]["mean"])


def gap(study: str, a: str, b: str) -> str:
    return signed(difference(study, a, b).value)


def both(study: str, a: str, b: str) -> str:
    """A difference with its interval over questions and seeds."""
    found = difference(study, a, b)
    return f"{signed(found.value)} ({interval_text(found.interval)})"


def over_seeds(study: str, a: str, b: str, last_seeds: int | None = None) -> str:
    found = difference(study, a, b, last_seeds)
    return f"{signed(found.value)} (t: {interval_text(found.t_interval)})"


def fewer(found: Difference) -> str:
    """A range of fewer bits per byte in positive numbers, to none where it is not below zero."""
    bits = [found.bits[text] for text in TEXTS]
    low, high = max(bits), min(bits)
    return f"{rounded(-low)} to {rounded(-high)} % fewer bits"


def pooled(*compared: tuple[str, str, str]) -> list[float]:
    """The seed differences of several comparisons together."""
    return [
        value
        for study, a, b in compared
        for entry in table(study)["comparisons"]
        if (entry["a"], entry["b"]) == (a, b)
        for value in entry["seed_differences"]
    ]


def benchmark(name: str, first: str, column: str) -> float:
    """A number of a benchmark's first table that has this row and column."""
    for content in kept(f"benchmarks/{name}")["tables"]:
        for cells in content["rows"]:
            if cells[0].strip("*") == first and column in content.get("columns", ()):
                found = NUMBER.search(cells[content["columns"].index(column)])
                assert found is not None
                return float(found[0].replace(",", ""))
    raise AssertionError(f"{name} has no {first}, {column}")


def demo(name: str, *, exact: str, seeds: int = 5) -> list[float]:
    (found,) = [r for r in kept("demo-distill")["rows"] if r["row"] == name]
    return list(found[exact][:seeds])


def demo_points(name: str) -> str:
    """Exact answers of a rule of the demo's setting minus those of every token."""
    return f"{np.mean(demo(name, exact='exact')) - np.mean(demo('cpt', exact='exact')):+.0f}"


def demo_bits(name: str, against: str = "cpt") -> float:
    ratio = np.mean(demo(name, exact="clean")) / np.mean(demo(against, exact="clean"))
    return 100 * (float(ratio) - 1)


def toy(name: str) -> str:
    return f"{row('toy', name)['accuracy']:.0f} %"


def taught(teacher: str | None, method: str, key: str = "accuracy") -> float:
    (found,) = [
        r for r in kept("teachers")["rows"] if (r["teacher"], r["method"]) == (teacher, method)
    ]
    return float(found[key])


def why(
    place: float, method: str, sweep: str = "wrong pages in the corpus, % (30 % junk)"
) -> float:
    (found,) = [r for r in kept("why")["rows"] if r["row"] == f"{sweep}-{place}-{method}"]
    return float(found["accuracy"])


def lead(name: str, source: str | None = None) -> float:
    study = kept("lead")[name]
    found = study["lead"] if source is None else study["lead_by_source"][source]
    return 1 - found["teacher"] / found["student"]


def span(values: Sequence[float], digits: int = 1) -> str:
    return f"{signed(min(values), digits)} to {signed(max(values), digits)}"


# ---- the README ----


def readme() -> list[str]:
    usual = "900 steps, the demo's"
    three = mean_and_spread(demo("half", exact="exact", seeds=3))
    guided = (taught(usual, "guided"), taught(usual, "guided", "accuracy_spread"))
    plain = (taught(None, "cpt"), taught(None, "cpt", "accuracy_spread"))
    low, high = row("noisy", "noisy-cpt-5-3e-4"), row("distill", "distill-half")
    at_low_rate = compare_means(*([*r["accuracy_by_seed"].values()] for r in (high, low)))
    first = difference("distill", "distill-half", "distill-plain").value
    uld = difference("distill-peers", "peer-half", "peer-uld")
    runs = kept_runs("distill-peers", "peer-half").values()
    seconds = np.mean([run["evaluation.json"]["train_seconds"] for run in runs])
    more = (seconds + table("distill-peers")["teachers"]["clean"]["seconds"]) / seconds
    weak = [accuracy("weak", f"weak-{rule}") for rule in ("published", "reducible")]
    bytes_of_four = pack(np.zeros((1, 4), int), np.zeros((1, 4)), np.zeros((1, 4), bool)).nbytes
    store, scoring, gold = rates()
    liger = benchmark("train-step", "plain, Liger, chunk constant 16", "tokens/s")
    once = 1 / (1 / store + 1 / scoring) / gold
    distilled = benchmark(
        "train-step-distill", "distilled, 4 alternatives", "throughput relative to plain, ours"
    )
    assert round(distilled, 2) == 1.00 and bytes_of_four == 16
    written = [
        difference("teacher-writes", f"half-{rate}", f"plain-{rate}")
        for rate in ("1.6e-3", "8e-4", "4e-4")
    ]
    assert chosen_rows()["half"]["row"] == "half-1.6e-3"
    assert chosen_rows()["plain"]["row"] == "plain-1.6e-3"
    assert {d.seeds for d in written} == {1}
    return [
        f"reaches {level_text(plain)} % exact answers, guided training {level_text(guided)} % and "
        f"distillation {level_text(three)} % (three seeds;",
        f"Up to {rounded(first - at_low_rate.difference)} of the {signed(first)} points may be",
        f"every token reached {level_text((low['accuracy'], low['accuracy_spread']))} at a lower",
        f"ends {rounded(uld.value)} points (t: {interval_text(uld.t_interval).replace('+', '')}) ",
        f"would have read {rounded(more)} x as much",
        f"every method did harm ({weak[0]} to {weak[1]} % accuracy, compared with "
        f"{accuracy('weak', 'weak-plain')} % for every token in one run; distillation "
        f"{accuracy('distill-teachers', 'other-weak')} %, compared with "
        f"{accuracy('distill-teachers', 'other-plain')} %)",
        f"3 to 4 bytes per token, or {bytes_of_four + 3} to {bytes_of_four + 4} with four",
        f"runs at 1.00 to {store / liger:.2f} x the throughput of plain pretraining, and at "
        f"{math.floor(store / gold)} x that of TRL's GOLD loss",
        f"or {rounded(once)} x if the store is used once",
        f"runs at {train_ratio('TinyLlama', 1)} x (1.1B student; {train_ratio('TinyLlama', 2)} x "
        f"with CODE) and {train_ratio('SmolLM2', 1)[:3]} x (135M)",
        f"add {signed(written[0].value)} points to the same text ({interval_text(written[0].interval)} "
        f"over questions; at two lower learning rates {signed(written[1].value)} and "
        f"{signed(written[2].value)})",
        *hardware(),
    ]


def train_ratio(shape: str, place: int) -> str:
    """How much faster than Hugging Face a contestant of `vocagnolm train`'s table is."""
    rows = kept("benchmarks/train")["tables"][0]["rows"]
    at = next(n for n, cells in enumerate(rows) if cells[0].startswith(shape))
    ours = [cells for cells in rows[at:] if cells[3] and cells[3] != "1.00"][place - 1]
    return str(ours[3]).split(",")[0]


def hardware() -> list[str]:
    weights = benchmark("score", "chunked head, compiled layers", "GiB of weights")
    above = benchmark("score", "chunked head, compiled layers", "GiB above the weights")
    from_store = kept("benchmarks/train")["tables"][0]["rows"]
    (peak,) = [c[4] for c in from_store if c[3].startswith("1.17")]
    step = [
        benchmark("train-step", name, "peak GiB")
        for name in ("guided, from stored losses", "guided, online 7B teacher")
    ]
    assert round(weights * 2**30 / 1e9) == 15
    return [
        f"its weights (15 GB) and {rounded(above)} GiB more",
        f"one GPU: {round(float(peak))} GiB from a store with float32 weights; with bfloat16 weights "
        f"{round(step[0])} GiB, or {round(step[1])} GiB with a 7B teacher online",
    ]


# ---- choosing a teacher ----


def choosing() -> list[str]:
    return [
        *by_what_is_there(),
        *methods_by_text(),
        *distill_or_guide(),
        *strength_of_teachers(),
        *what_to_expect(),
    ]


def by_what_is_there() -> list[str]:
    text = difference("teacher-writes", "plain-1.6e-3", "human-1.6e-3")
    kept_too = difference("teacher-writes", "half-1.6e-3", "plain-1.6e-3")
    assert text.seeds == kept_too.seeds == 1
    return [
        f"The teacher's text instead of human solutions: {signed(text.value)} points "
        f"({interval_text(text.interval)}); distilled instead of plain: {signed(kept_too.value)} "
        f"({interval_text(kept_too.interval)})",
    ]


def methods_by_text() -> list[str]:
    half = difference("distill", "distill-half", "distill-plain")
    alm = [difference("noisy", f"noisy-{rule}-5", "noisy-cpt-5") for rule in ("guided", "alm")]
    clean = pooled(
        ("distill-clean", "clean-half", "clean-plain"), ("distill-peers", "peer-half", "peer-plain")
    )
    eleven = pooled(("stretch", "alm", "cpt"), ("uld", "matching", "plain"))
    prose = [
        [difference(study, f"{part}-{rule}", f"{part}-plain").bits[text]
         for study, part in (("distill-clean", "clean"), ("distill-peers", "peer"))
         for text in ("nlab", "openstax")]
        for rule in ("half", "published")
    ]  # fmt: skip
    levels = ("00", "25", "50", "75")
    unchecked = [
        difference("unchecked", f"{rule}-{at}", f"cpt-{at}").value
        for rule in ("alm", "guided", "reducible")
        for at in levels
    ]
    oracle = [gap("unchecked", f"oracle-{at}", f"cpt-{at}") for at in ("25", "75")]
    wrong = difference("distill-unchecked", "wrong-half", "wrong-plain")
    healed = difference("distill-heal", "heal-half", "heal-plain")
    longest = [difference("noisy", f"noisy-{r}-49", "noisy-cpt-49") for r in ("guided", "alm")]
    return [
        f"| {signed(half.value)} and {gap('distill-teachers', 'other-half', 'other-plain')} points, "
        f"both certain, in two sessions, with fewer bits per byte; "
        f"{gap('distill-long', 'long-half', 'long-plain')} at 16.5M tokens (two seeds) and "
        f"{signed(difference('distill-longest-low', 'low-half', 'low-plain').value)} at 49.5M "
        f"({interval_text(difference('distill-longest-low', 'low-half', 'low-plain').interval)})",
        f"CODE {gap('distill', 'distill-published', 'distill-plain')}, certain, in one session; "
        f"{signed(alm[0].value)} points each in another, not certain over seeds "
        f"(t: {interval_text(alm[0].t_interval)} and {interval_text(alm[1].t_interval)}); at 49.5M "
        f"tokens nothing certain ({signed(longest[0].value)} and {signed(longest[1].value)})",
        f"distillation {gap('distill-clean', 'clean-half', 'clean-plain')} and "
        f"{gap('distill-peers', 'peer-half', 'peer-plain')} points in two sessions, the second "
        f"certain ({signed(float(np.mean(clean)))} over all six seeds, t: "
        f"{interval_text(paired_interval(np.array(clean)))})",
        f"the published rule {both('distill-second', 'pair-published', 'pair-plain')}, certain, "
        f"distillation {both('distill-second', 'pair-half', 'pair-plain')}",
        f"distillation has {rounded(min(prose[0]))} to {rounded(max(prose[0]))} % more bits per byte "
        f"and the published rule {rounded(min(prose[1]))} to {rounded(max(prose[1]))} % more",
        f"no method is better at any level ({span(unchecked)}). Training only on the checked ones "
        f"when they are few: {oracle[0]} to {oracle[1]}. Distillation at 50 %: "
        f"{both('distill-unchecked', 'wrong-half', 'wrong-plain')}, with "
        f"{fewer(wrong).removesuffix(' fewer bits')} fewer bits per byte",
        f"{toy('documents-longer')} exact answers, compared with {toy('cpt')}. Dropping half of the "
        f"solutions above by the teacher's bits per byte: {gap('unchecked', 'documents-50', 'cpt-50')} "
        f"points ({interval_text(difference('unchecked', 'documents-50', 'cpt-50').interval)})",
        f"the demo's setting: {toy('reducible-0.2')} compared with {toy('cpt')}, and fewer bits per "
        f"byte. On the solutions above: {both('unchecked', 'reducible-50', 'cpt-50')}",
        f"{signed(healed.value)} points ({interval_text(healed.interval)}; if one baseline run is "
        f"replaced by its repetition, {repeated_baseline()}), and "
        f"{rounded(sorted(healed.bits.values())[1])} to {rounded(max(healed.bits.values()))} % more "
        f"bits per byte on three texts of four. The demo's setting: {healed_demo()}",
        f"the demo's setting: {toy('guided')} compared with {toy('cpt')}, more bits per byte",
        f"ALM on clean text: {gap('stretch', 'alm', 'cpt')} points "
        f"({interval_text(difference('stretch', 'alm', 'cpt').interval)}) in the study planned for "
        f"it, {both('uld', 'matching', 'plain')} in three more seeds, "
        f"{signed(float(np.mean(eleven)))} (t: {interval_text(paired_interval(np.array(eleven)))}) "
        f"over all eleven. With Gemma-3-270M: {both('second', 'gemma-alm', 'gemma-cpt')}",
        f"with SmolLM2: {over_seeds('miniature', 'guided-qwen-9e-4', 'cpt-3e-4', 5)} in the study "
        f"planned for it; {over_seeds('distill-clean', 'clean-published', 'clean-plain')} and "
        f"{over_seeds('distill-peers', 'peer-published', 'peer-plain')} in two later sessions",
        f"have {-longest[0].bits['gsm8k']:.0f} % fewer on GSM8K and "
        f"{rounded(min(g.bits['openstax'] for g in longest))} to "
        f"{rounded(max(g.bits['nlab'] for g in longest))} % more on prose",
    ]


def repeated_baseline() -> str:
    """The healing of a student with the other run of one seed of the baseline."""
    marks = {name: kept_runs("distill-heal", name) for name in ("heal-half", "heal-plain")}

    def points(grades: dict[str, dict[str, int]]) -> float:
        return 100 * float(np.mean([np.mean(list(task.values())) for task in grades.values()]))

    earlier = kept_runs("distill-heal", "heal-plain", folder="earlier")
    plain = {**marks["heal-plain"], **earlier}
    gaps = [
        points(run["grades.json"]) - points(plain[seed]["grades.json"])
        for seed, run in sorted(marks["heal-half"].items())
    ]
    return f"{signed(float(np.mean(gaps)))}, t: {interval_text(paired_interval(np.array(gaps)))}"


def healed_demo() -> str:
    rows = {r["row"]: r["exact"] for r in kept("demo-heal")["lengths"][0]["rows"]}
    gaps = [a - b for a, b in zip(rows["half"], rows["cpt"], strict=True)]
    mean, spread = mean_and_spread(gaps)
    return f"{signed(mean)} ± {rounded((spread or 0) / math.sqrt(len(gaps)))}"


def distill_or_guide() -> list[str]:
    def against_plain(name: str) -> Difference:
        return difference("distill", f"distill-{name}", "distill-plain")

    half, one, falling = (against_plain(name) for name in ("half", "one", "falling"))
    published = against_plain("published")
    same = [
        difference("distill", f"distill-{name}", "distill-one").value
        for name in ("one-k1", "one-k16", "starts")
    ]
    k1, k16 = (np.mean(demo(name, exact="exact")) for name in ("k1", "k16"))
    plain, four = (np.mean(demo(name, exact="exact")) for name in ("cpt", "half"))
    assert abs(k16 - four) < 0.5
    return [
        "(19 bytes per token instead of 3)",  # 16 of them are four alternatives: see the README
        f"where CODE did ({gap('distill-second', 'pair-published', 'pair-plain')})",
        f"{signed(half.value)} points ({interval_text(half.interval)}), {fewer(half)} | "
        f"{demo_points('half')} points, {rounded(demo_bits('half'))} % more bits",
        f"{signed(one.value)} ({interval_text(one.interval)}), {-one.bits['math']:.0f} to "
        f"{-one.bits['gsm8k']:.0f} % fewer bits on problems, {one.bits['nlab']:.0f} % more on prose "
        f"| {demo_points('one')} points, {rounded(demo_bits('one'))} % more bits",
        f"{signed(falling.value)} ({interval_text(falling.interval)}), {fewer(falling)} | "
        f"{demo_points('falling')} points, {rounded(demo_bits('falling'))} % more bits",
        f"{both('distill', 'distill-weighted', 'distill-plain')}, no better than without weights | "
        f"{demo_points('weighted')} points, {rounded(-demo_bits('weighted'))} % fewer bits",
        f"{signed(published.value)} ({interval_text(published.interval)}), "
        f"{-published.bits['gsm8k']:.0f} % fewer to {rounded(published.bits['nlab'])} % more bits | "
        f"{demo_points('guided')} points, {rounded(demo_bits('guided'))} % more bits",
        f"| {gap('distill', 'distill-share', 'distill-plain')}, not certain | "
        f"{demo_points('share').lstrip('+')} |",
        f"not tried | {demo_points('selected')} points, {rounded(demo_bits('selected'))} % more bits",
        f"1, 4 or 16 alternatives; with or without CODE | {signed(min(same))} to "
        f"{signed(max(same), 2)}, not certain | 1: {k1 - plain:+.0f} points; 16: the same points as "
        f"four, {demo_bits('k16', 'half'):.0f} % more bits",
        f"At equal tokens it gave {signed(difference('uld', 'uld-qwen', 'plain').value)} points "
        f"({interval_text(difference('uld', 'uld-qwen', 'plain').interval)}) over every token",
        f"at equal time it lost {gap('uld', 'uld-qwen-time', 'plain').lstrip('-')} in one study and "
        f"{gap('distill-peers', 'peer-uld', 'peer-plain').lstrip('-')} in another, "
        f"{both('distill-peers', 'peer-half', 'peer-uld').replace('+', '').replace(' (', ' points (')}",
        f"ALM from a store gave {both('uld', 'matching', 'plain')} with the same seeds",
    ]


def strength_of_teachers() -> list[str]:
    miniature = {
        n: table("miniature")["teachers"][n]["bits_per_byte"] for n in ("qwen", "gemma", "same")
    }
    sources = kept("lead")["noisy"]["lead_by_source"]
    good, bad = taught("300 steps", "guided"), taught("250 steps", "guided")
    assert good > taught(None, "cpt") > bad
    unchecked = {
        rule: [
            difference("unchecked", f"{rule}-{at}", f"cpt-{at}").value
            for at in ("00", "25", "50", "75")
        ]
        for rule in ("reducible", "guided")
    }
    names = ("weak-plain", "start", "weak-reducible", "weak-alm", "weak-published")
    plain, start, reducible, alm, published = (accuracy("weak", name) for name in names)
    drop = difference("distill-teachers", "other-weak", "other-plain")
    wrong = kept("labels")["GSM8K, 50 % wrong (teacher's loss alone)"]["areas"]
    gains = [why(at, "guided") - why(at, "cpt") for at in (10.0, 30.0)]
    demo_gain = demo_points("guided").lstrip("+")
    return [
        f"SmolLM2-135M reached {accuracy('miniature', 'guided-qwen')} to "
        f"{accuracy('miniature', 'guided-qwen-9e-4')} % when guided by Qwen2.5-Coder-1.5B "
        f"({miniature['qwen']:.3f} bits per byte on the corpus), {accuracy('miniature', 'cpt-3e-4')} "
        f"% on every token, and only {accuracy('miniature', 'guided-gemma')} % when guided by "
        f"Gemma-3-270M ({miniature['gemma']:.3f})",
        f"this very corpus ({miniature['same']:.3f}), gave {accuracy('miniature', 'rho1')} %",
        f"Qwen's lead was {100 * lead('clean'):.0f} %, and {100 * lead('clean', 'nlab'):.0f} % on",
        f"the lead was {100 * lead('noisy'):.0f} %, and "
        f"{100 * min(lead('noisy', s) for s in sources):.0f} % or more in every source",
        f"teachers with {taught('250 steps', 'guided', 'bits_per_byte_clean'):.3f} or more did harm "
        f"and those with {taught('300 steps', 'guided', 'bits_per_byte_clean'):.3f} or less gained",
        f"every token {plain} %, before training {start}), it ended at {reducible} %, ALM at {alm} "
        f"and the published rule at {published}",
        f"on noisy text: {accuracy('distill-teachers', 'other-weak')} %, compared with "
        f"{accuracy('distill-teachers', 'other-plain')} % for every token ({signed(drop.value)}, "
        f"{interval_text(drop.interval)}; t: {interval_text(drop.t_interval)}) and "
        f"{accuracy('distill-teachers', 'other-half')} % with Qwen",
        f"the reducible share are between {signed(min(unchecked['reducible']))} and "
        f"{signed(max(unchecked['reducible']))} points from every token",
        f"those of the published rule between {signed(min(unchecked['guided']))} and "
        f"{rounded(max(unchecked['guided']))};",
        f"zero without wrong pages, {gains[0]:+.0f} points with 10 % of them and {gains[1]:+.0f} "
        "with 30 %",
        f"At {taught(USUAL, 'guided', 'tells_wrong'):.2f} (the demo) guidance gained {demo_gain} "
        f"points. At {wrong['results']['teacher loss']['value']:.2f} (a 1.5B",
        f"the gain begins at {taught('300 steps', 'guided', 'tells_wrong'):.2f}; at "
        f"{taught('250 steps', 'guided', 'tells_wrong'):.2f} and below",
        f"three out of four wrong: {gap('unchecked', 'cpt-75', 'cpt-00')} points, "
        f"{interval_text(difference('unchecked', 'cpt-75', 'cpt-00').interval)})",
    ]


USUAL = "900 steps, the demo's"


def what_to_expect() -> list[str]:
    bits = {
        (r["place"], r["row"].rpartition("-")[2]): np.mean(r["bits_per_byte_by_seed"])
        for r in kept("why-long")["rows"]
    }
    rise = 100 * (bits[2000.0, "guided"] / bits[2000.0, "cpt"] - 1)
    worse = [
        100 * (bits_of("miniature", "guided-qwen", t) / bits_of("miniature", "cpt-3e-4", t) - 1)
        for t in ("gsm8k", "math", "nlab", "openstax")
    ]
    late = row("second", "gemma-cpt")["accuracy"] - row("second-first", "gemma-cpt")["accuracy"]
    misled = difference("second-first", "gemma-alm", "gemma-cpt").value
    matched = [
        difference("miniature", "guided-qwen", "matched").value,
        difference("miniature", "guided-qwen-9e-4", "matched-9e-4").value,
    ]
    fp8 = benchmark("score", "fp8 layers and head", "relative to bf16")
    changed = [
        cells[-1]
        for content in kept("benchmarks/score-precision-fp8")["tables"]
        for cells in content["rows"]
        if cells[0].strip("*") == "fp8 layers and head"
    ]
    return [
        f"was still there ({gap('distill-longest-low', 'low-half', 'low-plain')} points)",
        f"rise during training ({rise:+.0f} % at 2M tokens)",
        f"held-out bits per byte were {min(worse):.0f}-{max(worse):.0f} % worse",
        f"1e-4 instead of 3e-5 cost it {rounded(late)} points and made ALM look {rounded(misled)}",
        f"(guided was {matched[0]:.0f} to {matched[1]:.0f} points better than that)",
        "(19 with four alternatives)",
        f"{rounded(fp8)} x the throughput and half the memory; "
        f"{rounded(float(changed[0].strip('* %')))} % of the selected tokens change",
    ]


# ---- pieces of other pages ----


def of_results() -> list[str]:
    first, again = row("distill", "distill-half"), row("distill-teachers", "other-half")
    low, mid = row("noisy", "noisy-cpt-5"), row("noisy", "noisy-cpt-5-3e-4")

    def apart(distilled: list[dict[str, Any]], plain: dict[str, Any]) -> str:
        scores = [score for r in distilled for score in r["accuracy_by_seed"].values()]
        found = compare_means(scores, [*plain["accuracy_by_seed"].values()])
        assert found.interval is not None
        return f"{signed(found.difference)} (t: {interval_text(found.interval)})"

    levels = [level_text((r["accuracy"], r["accuracy_spread"])) for r in (low, mid)]
    gain = difference("distill", "distill-half", "distill-plain").value
    rate = gain - (first["accuracy"] - mid["accuracy"])
    runs = kept_runs("distill-peers", "peer-half").values()
    seconds = np.mean([run["evaluation.json"]["train_seconds"] for run in runs])
    scoring = table("distill-peers")["teachers"]["clean"]["seconds"]
    weak = [difference("distill-teachers", "other-weak", f"other-{n}") for n in ("half", "plain")]
    return [
        f"every token reached {levels[0]} at 1e-4 and {levels[1]} at 3e-4. Compared with those runs, "
        f"distillation at 4.5e-4 is {apart([first], low)} and {apart([first], mid)} ahead",
        f"of the {signed(gain)} points, up to {rounded(rate)} may be the rate",
        f"the same comparisons are {apart([first, again], low)} and {apart([first, again], mid)}.",
        f"run at 3e-4 alone ({accuracy('noisy', 'noisy-guided-49')} %), where distillation also has "
        f"{accuracy('distill-longest', 'longest-half')} %",
        f"took {scoring:.0f} s beside other runs, where a run took {seconds:.0f} s on average; with it, "
        f"ULD would have had time for {(seconds + scoring) / seconds:.1f} x as many tokens",
        f"worse than the strong one ({signed(weak[0].value)}, t: {interval_text(weak[0].t_interval)}) "
        f"and ends below every token (t: {interval_text(weak[1].t_interval)})",
        f"with its repetition the difference is {repeated_baseline().replace(', t', ' (t')})",
    ]


def of_try() -> list[str]:
    weak = difference("distill-teachers", "other-weak", "other-plain")
    return [
        f"answers {demo_points('guided').lstrip('+')} points better with {demo_bits('guided'):.1f} % "
        f"more bits per byte; with real models, a weak teacher gave {rounded(-weak.bits['gsm8k'])} % "
        f"fewer bits on GSM8K and {rounded(-weak.value)} points fewer right answers",
    ]


def of_benchmarks() -> list[str]:
    store, scoring, gold = rates()
    return [
        f"and {store / gold:.1f} x that of TRL GOLD",
        f"at {scoring:,.0f} tokens/s (with as many teacher tokens as student tokens) leaves "
        f"{1 / (1 / store + 1 / scoring) / gold:.1f} x",
    ]


def of_distillation() -> list[str]:
    """The summary at the head of the log."""

    def t(study: str, a: str, b: str) -> str:
        found = difference(study, a, b)
        return f"{signed(found.value)} ({interval_text(found.t_interval)})"

    primary = difference("distill", "distill-half", "distill-plain")
    prices = {
        name: rounded(max(difference(name, f"{part}-half", f"{part}-plain").bits[x] for x in TEXTS))
        for name, part in (("distill-clean", "clean"), ("distill-peers", "peer"))
    }
    rows = (
        ("noisy, 5.5M, SmolLM2-135M", t("distill", "distill-half", "distill-plain")),
        ("the same, another session", t("distill-teachers", "other-half", "other-plain")),
        ("clean, 5.5M", t("distill-clean", "clean-half", "clean-plain")),
        ("clean, another session", t("distill-peers", "peer-half", "peer-plain")),
        ("noisy, 16.5M, two seeds", t("distill-long", "long-half", "long-plain")),
        ("noisy, 49.5M, 1e-4", t("distill-longest-low", "low-half", "low-plain")),
        ("noisy, 49.5M, 3e-4, two seeds", t("distill-longest", "longest-half", "longest-plain")),
        ("clean, Gemma-3-270M", t("distill-second", "pair-half", "pair-plain")),
        ("clean, 2.75M, a 2-bit TinyLlama", t("distill-heal", "heal-half", "heal-plain")),
        ("half-wrong solutions, 1.5M", t("distill-unchecked", "wrong-half", "wrong-plain")),
        ("a weak teacher, noisy, 5.5M", t("distill-teachers", "other-weak", "other-plain")),
    )
    controls = [
        gap("distill-why", f"why-{c}", "distill-plain") for c in ("self", "smooth", "shuffled")
    ]
    below = [
        difference("distill-why", "distill-half", f"why-{c}").value
        for c in ("self", "smooth", "shuffled")
    ]
    return [
        *(f"| {text} | {value}" for text, value in rows),
        f"with {fewer(primary)} per byte",
        *(f"up to {price} % more bits" for price in prices.values()),
        f"with one baseline run repeated {repeated_baseline().replace(', t: ', ' (')})",
        f"gained {t('distill-second', 'pair-published', 'pair-plain')}",
        f"the strong one: {t('distill-teachers', 'other-weak', 'other-half')}",
        f"are {controls[0]}, {controls[1]} and {controls[2]} points from every token, and "
        f"{rounded(min(below))} to {rounded(max(below))} points below the distilled ones",
        f"{gap('distill-peers', 'peer-half', 'peer-uld').lstrip('+')} points ahead of ULD online, not "
        f"certainly ahead of likelihood matching ({gap('distill-peers', 'peer-half', 'peer-matching')}) "
        f"or of the published rule ({gap('distill-peers', 'peer-half', 'peer-published')})",
        f"Mix 1 has {gap('distill', 'distill-one', 'distill-plain')}",
    ]


def of_comparison() -> list[str]:
    store, scoring, _ = rates()
    return [f"if it is used once | {1e-3 / (1 / store + 1 / scoring):.1f} |"]


def rates() -> tuple[float, float, float]:
    """Tokens a second: guided from a store, scoring with a 7B teacher, GOLD's loss."""
    names = ("guided, from stored losses", "TRL GOLD, online 7B teacher")
    store, gold = (benchmark("train-step", name, "tokens/s") for name in names)
    return store, benchmark("score", "chunked head, compiled layers", "tokens/s"), gold


PAGES = {"README.md": readme, "docs/choosing-a-teacher.md": choosing}
PARTS = {
    "docs/results.md": of_results,
    "docs/try.md": of_try,
    "docs/benchmarks.md": of_benchmarks,
    "docs/comparison.md": of_comparison,
    "research/distillation.md": of_distillation,
}


@pytest.mark.parametrize("page", PAGES)
def test_every_number_of_a_page_follows_from_a_result(page: str) -> None:
    text = plain_text(ROOT / page)
    claims = PAGES[page]()
    assert [claim for claim in claims if claim not in text] == [], "the page says otherwise"
    for claim in claims:
        text = text.replace(claim, " ")
    left = NAMES.sub(" ", text)
    numbers = [left[max(0, n.start() - 50) : n.end() + 20] for n in NUMBER.finditer(left)]
    assert numbers == []


@pytest.mark.parametrize("page", PARTS)
def test_what_was_put_right_follows_from_the_results(page: str) -> None:
    text = plain_text(ROOT / page)
    assert [claim for claim in PARTS[page]() if claim not in text] == [], "the page says otherwise"


def test_a_number_that_changes_is_noticed() -> None:
    claim = readme()[0]
    assert NUMBER.search(NAMES.sub(" ", claim))
    assert claim not in plain_text(ROOT / "README.md").replace("60.9", "61.9")
    assert not NUMBER.search(NAMES.sub(" ", "SmolLM2-135M, 5.5M tokens, 40 % of the tokens, 3e-4"))
    assert short_table() in (ROOT / "README.md").read_text(encoding="utf-8")
    assert bits_text(difference("distill", "distill-half", "distill-plain")) == "-4.5 to -0.2 %"
