"""Counts turns of phrase that make a native reader read twice, in pages, docstrings and user texts.

`python tools/prose.py [--show NAME] [--most PERCENT]`: `--show` prints the sentences that the patterns named so find,
`--most` exits with 1 if a larger share of the sentences in pages has a hit. A hit is a place to look at, not a verdict.
"""

from __future__ import annotations

import argparse
import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Final

ROOT: Final = Path(__file__).resolve().parents[1]
PLACES: Final = ("peer", "dht", "optim", "swarm", "cli", "docs", "README.md", "CONTRIBUTING.md")
PART: Final = re.compile(r"\n\s*\n|\n\||\n- ")  # between paragraphs, rows of a table, items of a list
BLANK: Final = re.compile(r"\s+")
END: Final = re.compile(r"(?<=[.?!])\s+")

PATTERNS: Final = {
    "tell or told, for report, emit, name": r"\b(tells?|told|telling|untold)\b",
    "hear or heard, for receive, reach": r"\b(hears?|heard)\b",
    "go on, for continue": r"\b(go(?:es)? on|went on|gone on|going on)\b",
    "so many, so long, for N, at most N": r"\bso (?:many|long|often|much)\b(?! (?:as|that))",
    "who or what without a noun": r"(?:^|[;,:] |\. )(?:Who|Whom|What|Which)\b[^?.]*\.",
    "of which, of whom as a hinge": r"\bof (?:which|whom|these|those|them|that) (?:it|the|a|this|all|each|none|one)\b",
    "bare there or here": r"\b(?:is|are|was|were|be|lies|stays?|stands?) (?:t?here)\b(?! (?:is|are|was|no))",
    "inverted object": r"^(?:What|Of|To|From|With|In) [^,.]{3,40}(?:, )?"
    r"(?:it|they|this|no|each|the) \w+s?\b[^.]*\bnot?\b|^What (?:it|they) ha(?:s|ve) \w+ (?:it|they) ",
    "for ever, lately, mostly": r"\b(?:for ever|lately|mostly|to and fro)\b",
    "behind, for after": r"\bbehind (?:the|a|it|them|stop|2)\b",
    "stands at": r"\b(?:stands?|stood) (?:at|for|still|there|in)\b",
    "have X done, for do X": r"\b(?:[Hh]as|[Hh]ave|[Hh]ad) (?:the|a|an|these|those|it|them|others) [\w ]{2,30} "
    r"(?:sent|fetched|made|done|dispatched|computed|told|forwarded)\b",
    "what there is, what it has": r"\bwhat (?:there is|is there|came of|became of|it has|they have|others have)\b",
    "person or people, for operator, user": r"\b(?:a person|people|nobody|somebody|everybody|whoever)\b",
}

Sentence = tuple[str, str, str]  # page, doc or text; the file; its words


def of_module(file: str, source: str) -> Iterator[Sentence]:
    """Yield the sentences of the docstrings of a module, and its other strings of six words or more."""
    docs: set[str] = set()
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Module() | ast.ClassDef() | ast.FunctionDef() | ast.AsyncFunctionDef():
                if doc := ast.get_docstring(node):
                    docs.add(doc)
                    yield from (("doc", file, words) for words in END.split(BLANK.sub(" ", doc)))
            case ast.Constant(value=str(text)) if text.count(" ") >= 5 and text not in docs:
                yield "text", file, BLANK.sub(" ", text)


def of_page(file: str, text: str) -> Iterator[Sentence]:
    """Yield the sentences of a page of five words or more, without its code blocks."""
    for part in PART.split(re.sub(r"(?s)```.*?```", "", text)):
        split = END.split(BLANK.sub(" ", part))
        yield from (("page", file, words) for words in split if words.count(" ") >= 4)


def sentences() -> list[Sentence]:
    """Return all sentences of the git-tracked packages and pages."""
    names = subprocess.run(["git", "ls-files", *PLACES], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    read = {".py": of_module, ".md": of_page}
    files = [file for name in names.splitlines() if (file := Path(name)).suffix in read]
    return [found for file in files for found in read[file.suffix](str(file), (ROOT / file).read_text())]


def report(found: list[Sentence], show: str) -> tuple[list[str], float]:
    """Return the counts in words, with the sentences of the patterns to show, and the share of pages' hits in %."""
    lines, hits = [], set[int]()
    for name, pattern in PATTERNS.items():
        places = {n: each for n, each in enumerate(found) if re.search(pattern, each[2], re.MULTILINE)}
        hits |= places.keys()
        lines += [f"    {file} | {words}" for _, file, words in places.values() if show and show in name]
        lines.append(f"{name}: {dict(Counter(kind for kind, _, _ in places.values()))}")
    totals, counts = Counter(kind for kind, _, _ in found), Counter(found[n][0] for n in hits)
    lines += [f"{kind}: {counts[kind]} of {n} sentences ({100 * counts[kind] / n:.1f} %)" for kind, n in totals.items()]
    return lines, 100 * counts["page"] / totals["page"]


def main() -> int:
    """Print the counts; return 1 if pages have more hits than `--most` allows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--show", metavar="NAME", default="")
    parser.add_argument("--most", metavar="PERCENT", type=float, default=100.0)
    options = parser.parse_args()
    lines, share = report(sentences(), options.show)
    sys.stdout.write("\n".join([*lines, ""]))
    return int(share > options.most)


if __name__ == "__main__":
    sys.exit(main())
