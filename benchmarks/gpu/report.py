"""Write docs/gpu.md: a text that is kept as it is, and behind a mark the figures of all parts of an acceptance that
have run.

python -m gpu.report [--out FOLDER] [--doc docs/gpu.md]
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from .parts import GIB, ROOT, Options

DOC = ROOT / "docs" / "gpu.md"
MARK = "<!-- What follows is written by benchmarks/gpu/report.py. -->"
PARTS = (
    "waits", "repeats", "verify", "tests", "fast", "memory", "prototypes",
    "pipeline", "zero", "tensor", "killed", "communicators",
)  # fmt: skip
Found = Mapping[str, Mapping[str, Any]]
"""The contents of the JSON files, by part."""


def read(out: Path) -> dict[str, dict[str, Any]]:
    """Return the contents of the files that exist, by part."""
    return {
        name: json.loads((out / f"{name}.json").read_text(encoding="utf-8"))
        for name in PARTS
        if (out / f"{name}.json").exists()
    }


def rewrite(options: Options) -> Path:
    """Write the report into the folder of the parts, and after a real run on a card also into docs/gpu.md; return the
    path of the last one written.
    """
    text = document(DOC.read_text(encoding="utf-8"), read(options.out))
    paths = [options.out / "gpu.md", *([DOC] if options.gpu and not options.tiny else [])]
    for path in paths:
        path.write_text(text, encoding="utf-8")
    return paths[-1]


def document(before: str, found: Found) -> str:
    """Return the document with the text before its mark as it is, and the figures after it; ValueError without mark."""
    kept, mark, _ = before.partition(MARK)
    if not mark:
        raise ValueError(f"{DOC}: the line {MARK!r} is not there; legal: the text, then that line")
    return "\n".join([kept.rstrip(), "", MARK, "", *figures(found)]).rstrip() + "\n"


def figures(found: Found) -> list[str]:
    """Return the lines after the mark."""
    lines = [*_where(found), *_verdicts(found)]
    makers: dict[str, Callable[[Mapping[str, Any]], list[str]]] = {
        "fast": _fast,
        "memory": _memory,
        "prototypes": _prototypes,
        "zero": partial(_several, "ZeRO-3"),
        "tensor": partial(_several, "1d-sp"),
        "communicators": _communicators,
    }
    for name, make in makers.items():
        if name in found and found[name]["figures"]:
            lines += [*make(found[name]["figures"]), ""]
    return lines


def table(head: Sequence[str], rows: Iterable[Sequence[object]]) -> list[str]:
    """Return the lines of a table of Markdown."""
    body = ["| " + " | ".join(str(cell).replace("|", "\\|").replace("\n", " ") for cell in row) + " |" for row in rows]
    return ["| " + " | ".join(head) + " |", "|" + "---|" * len(head), *body]


def _where(found: Found) -> list[str]:
    on_cards = [one for one in found.values() if one["machine"]["card"] and not one["tiny"]]
    if not found:
        return [
            "## Found",
            "",
            "Nothing yet: **no card has run shardwise so far.** Every row of the table is unknown until one has.",
            "",
        ]
    if not on_cards:
        device = next(iter(found.values()))["device"]
        return [
            "## Found",
            "",
            f"**No card has run shardwise at full size so far**: what follows is a trial of the scripts on {device}.",
            "",
        ]
    rows = []
    for name, one in found.items():
        m = one["machine"]
        size = f"{m['memory_gib']} GiB" if m["memory_gib"] else ""
        rows.append(
            (
                name,
                m["card"] or "CPU",
                m["cards"] or "",
                size,
                m["driver"] or "",
                m["torch"],
                m["cuda"] or "",
                m["python"],
                f"{one['seconds']:.0f}",
            )
        )
    return [
        "## Found",
        "",
        *table(("part", "card", "cards", "memory", "driver", "torch", "CUDA", "Python", "seconds"), rows),
        "",
    ]


UNKNOWN: tuple[tuple[str, str], ...] = (
    ("waits", "no wait of the host in a step"),
    ("repeats", "the same losses with launches that block, and after a rank was killed"),
    ("verify", "`verify` on the device"),
    ("tests", "gpu-marked tests"),
    (
        "fast",
        "tokens/s and MFU of a Llama-1B beside an ordinary loop, that loop compiled, and FSDP2; idle share; kernels by "
        "class",
    ),
    ("memory", "predicted beside measured bytes of none, full, selective and offload; the rows that fit"),
    (
        "prototypes",
        "what out_dtype, fused cross-entropy, keyed dropout, enable_gqa, fewer launches of STEP and one thread of "
        "autograd are worth",
    ),
    ("pipeline", "the default GPT in a pipeline of 2 over NCCL"),
    ("zero", "ZeRO-3 on 2 to 8 cards, and how much of its communication is hidden"),
    ("tensor", "1d-sp on 2 to 8 cards"),
    ("killed", "SIGKILL to one of several ranks: seconds until it trains again"),
    ("communicators", "memory that a communicator takes of a card"),
)


def _verdicts(found: Found) -> list[str]:
    rows: list[tuple[str, str, str, str]] = []
    for part, about in UNKNOWN:
        if part not in found:
            rows.append((part, about, "unknown", "not run yet"))
            continue
        for one in found[part]["verdicts"]:
            word = {True: "right", False: "**wrong**", None: "unknown"}[one["right"]]
            rows.append((part, one["what"], word, one["detail"][:300]))
    return [*table(("part", "what", "verdict", ""), rows), ""]


def _fast(values: Mapping[str, Any]) -> list[str]:
    facts, lines = values.get("facts"), []
    if facts and "rows" in values:
        how = "in turns" if facts["together"] else "one after the other, for all do not fit the card at once"
        lines += [
            "### Speed", "",
            f"{facts['parameters'] / 1e9:.2f} B parameters, sequence {facts['sequence']}, {facts['precision']}, "
            f"{facts['rows']} rows a step, AdamW, "
            f"gradients clipped; each in a process of its own, {how}; medians over clean steps, timed by the device.",
            "",
        ]  # fmt: skip
        rows = [
            (
                one["name"], f"{one['step_seconds'] * 1e3:.1f}", f"{one['tokens_per_second']:,.0f}",
                "" if one["mfu"] is None else f"{one['mfu']:.1%}", _gib(one["peak_gib"]), one["clean_steps"],
                f"{one.get('off', 0):.0e}",
            )
            for one in values["rows"]
        ]  # fmt: skip
        lines += table(("", "ms/step", "tokens/s", "MFU", "peak GiB", "clean steps", "loss off by"), rows)
    for title, one in values.get("profiles", {}).items():
        lines += [
            "", f"A profiled step of {title}: idle {one['idle']:.1%} of {one['step_seconds'] * 1e3:.1f} ms "
            f"({one['profiled_step_seconds'] * 1e3:.1f} ms under the profiler), {one['kernels']:.0f} kernels.", "",
        ]  # fmt: skip
        classes = [
            (kind, f"{c['seconds'] * 1e3:.2f}", f"{c['seconds'] / one['step_seconds']:.1%}", f"{c['launches']:.0f}")
            for kind, c in one["classes"].items()
        ]
        lines += table(("kernels", "ms", "of the step", "launches"), classes)
    return lines


def _memory(values: Mapping[str, Any]) -> list[str]:
    lines = ["### Memory", ""]
    rows = []
    for plan, one in values.get("plans", {}).items():
        p, m = one["predicted"], one["measured"]
        beside = m.get("beside_the_allocator")
        rows.append(
            (
                plan, _gib(sum(p["states"].values()) / GIB), _gib(sum(m["states"].values()) / GIB),
                _gib(p["peak"] / GIB),
                _gib(m["peak"] / GIB), f"{m['peak'] / p['peak'] - 1:+.2%}", _gib(m["reserve"] / GIB),
                _gib(None if beside is None else beside / GIB),
            )
        )  # fmt: skip
    head = (
        "GiB",
        "states, predicted",
        "measured",
        "peak, predicted",
        "measured",
        "apart",
        "reserved beyond the peak",
        "of the card, beside the allocator",
    )
    lines += table(head, rows)
    rows_found = values.get("rows", {})
    if rows_found:
        cells = [
            (plan, one["predicted"], one["fitted"], one["refused"] or "none tried") for plan, one in rows_found.items()
        ]
        lines += ["", *table(("rows of a step", "predicted to fit", "the most that ran", "did not fit"), cells)]
    return lines


def _prototypes(values: Mapping[str, Any]) -> list[str]:
    rows = []
    for one in values["prototypes"].values():
        first = next((w["milliseconds"] for w in one["ways"].values() if "milliseconds" in w), None)
        for way, found in one["ways"].items():
            if "unknown" in found:
                rows.append((one["what"], way, "unknown", found["unknown"], "", ""))
                continue
            ms, taken = found["milliseconds"], found.get("bytes")
            more = [f"off by {found['error']:.0e}"] if "error" in found else []
            more += [f"{found['kernels']:.0f} kernels"] if "kernels" in found else []
            more += [f"{found['bytes_per_score']:.1f} bytes a score"] if "bytes_per_score" in found else []
            mib = "" if taken is None else f"{taken / 2**20:,.0f}"
            rows.append((one["what"], way, f"{ms:.3f}", f"{first / ms:.2f}" if first else "", mib, ", ".join(more)))
    return [
        "### What ideas are worth",
        "",
        *table(("", "way", "ms", "× as fast as the first", "MiB beside its inputs", ""), rows),
    ]


def _several(title: str, values: Mapping[str, Any]) -> list[str]:
    lines = [f"### {title} on several cards", ""]
    if "speed" in values:
        ranks = values["speed"]["ranks"]
        rows = [
            (one, f"{c['step_seconds'] * 1e3:.1f}", f"{c['tokens_per_second']:,.0f}")
            for one, c in values["speed"]["contenders"].items()
        ]
        lines += table((f"{ranks} ranks", "ms/step", "tokens/s"), rows)
    if "overlap" in values:
        rows = [
            (rank, _percent(one["hidden"]), f"{one['communication_seconds'] * 1e3:.1f}")
            for rank, one in enumerate(values["overlap"])
        ]
        lines += ["", *table(("rank", "of communication hidden", "ms of communication a step"), rows)]
    return lines


def _communicators(values: Mapping[str, Any]) -> list[str]:
    by_rank = values["communicators"]["bytes"]
    rows = [(rank, ", ".join(f"{n / 2**20:.0f}" for n in taken)) for rank, taken in enumerate(by_rank)]
    return ["### Communicators", "", *table(("rank", "MiB of the card that each further communicator takes"), rows)]


def _gib(value: float | None) -> str:
    return "" if value is None else f"{value:.3f}"


def _percent(value: float | None) -> str:
    return "" if value is None else f"{value:.0%}"


def main() -> None:
    """Rewrite the report from the files that exist."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "runs" / "gpu", help="folder of the JSON files")
    parser.add_argument("--doc", type=Path, default=DOC)
    chosen = parser.parse_args()
    chosen.doc.write_text(document(chosen.doc.read_text(encoding="utf-8"), read(chosen.out)), encoding="utf-8")


if __name__ == "__main__":
    main()
