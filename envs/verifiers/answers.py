"""Verifiers of short answers: pure functions of a completion and a reference, to a reward from 0 to 1.

Invariants:
- One answer counts, the last that the completion gives; naming several at once earns nothing.
- A reference that cannot be read is the data's fault: EnvError. Whatever the completion holds, it never raises, and costs
  time in proportion to its length: these functions run on the event loop. Patterns never repeat blanks without a bound twice.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from decimal import Decimal, InvalidOperation
from typing import Any

from ...errors import EnvError

LONGEST_NUMBER = 100  # characters: Decimal is exact, and fast, well beyond it
LONGEST_CHOICE = 2000  # characters of a choice in which letters are looked for
NUMBER = re.compile(r"[-+]?\$?\d[\d,]*(?:\.\d+)?|[-+]?\$?\.\d+")
ANSWER_TAG = re.compile(r"<(/?)answer>", re.IGNORECASE)
CHOICE = re.compile(r"\(?\b([A-Z])\b\)?")
ANSWER_IS = re.compile(
    r"\b(?:answer|choice|option)\s{0,8}(?:is\s{0,8})?[:=]?\s{1,8}(?=[*($]{0,8}[A-Z]\b)|\banswer\s{0,8}[:=]",
    re.IGNORECASE,
)
ARTICLES = re.compile(r"\b(a|an|the)\b")
PUNCTUATION = str.maketrans("", "", string.punctuation)


def exact(completion: str, reference: Any) -> float:
    """1 where the answer equals the reference, or one of them, without case, punctuation, articles and blanks (as in SQuAD).
    The answer is what the last `<answer>` holds, else the whole completion."""
    given = answer_of(completion)
    return float(any(_normalized(given, wanted) for wanted in references_of(reference)))


def f1(completion: str, reference: Any) -> float:
    """The F1 of the answer's words, normalized as for `exact`, with those of the reference; the best of several."""
    given = Counter(normalize(answer_of(completion)).split())
    return max(_f1(given, Counter(normalize(wanted).split())) for wanted in references_of(reference))


def gsm8k(completion: str, reference: Any) -> float:
    """1 where the completion's number equals that of the reference, whose number is after `####` where it has that. The
    completion's is the one after its last `####`, else in its last `\\boxed`, else its last number."""
    wanted = number_in(str(reference).rpartition("####")[2])
    if wanted is None:
        raise EnvError(f"the reference {reference!r:.100} has no number")
    _, mark, given = completion.rpartition("####")
    if not mark:
        given = last_boxed(completion)
        given = completion if given is None else given
        return float(_last_number(given) == wanted)
    return float(number_in(given) == wanted)


def choice(completion: str, reference: Any) -> float:
    """1 where the completion chooses the letter of the reference, such as `B`: in its last `\\boxed` or `<answer>`, else
    after its last "answer is" or "Answer:", else as its whole text or at the start of its last line, as `(B)`, `B.` or `B)
    the text`."""
    wanted = str(reference).strip().strip("().").upper()
    if not re.fullmatch(r"[A-Z]", wanted):
        raise EnvError(f"the reference {reference!r:.100} is no letter")
    marked = last_boxed(completion) or last_tagged(completion)
    if marked is not None:
        return float(_letters(re.sub(r"\\text(?:bf)?\{([^}]{0,100})\}", r"\1", marked)) == {wanted})
    said = [found.end() for found in ANSWER_IS.finditer(completion)]
    if said:
        return float(_letters(completion[said[-1] :].partition("\n")[0]) == {wanted})
    lines = [line for line in completion.strip().splitlines() if line.strip()]
    start = re.match(r"\s*[*(]*([A-Z])(?:[*).:]|\s*$)", lines[-1]) if lines else None
    return float(start is not None and start[1] == wanted and len(_letters(lines[-1])) == 1)


def last_boxed(text: str) -> str | None:
    """What the last `\\boxed{...}` holds; None where there is none, or its brace is not closed."""
    at = max(text.rfind("\\boxed{"), text.rfind("\\fbox{"))
    if at < 0:
        return None
    begin = text.index("{", at)
    depth = 0
    for i in range(begin, len(text)):
        depth += (text[i] == "{") - (text[i] == "}")
        if depth == 0:
            return text[begin + 1 : i]
    return None


def answer_of(completion: str) -> str:
    """What the last `<answer>` holds, else the whole completion."""
    tagged = last_tagged(completion)
    return completion if tagged is None else tagged


def last_tagged(text: str) -> str | None:
    """What the last `<answer>` that is closed holds; None where there is none."""
    begin = found = None
    for tag in ANSWER_TAG.finditer(text):
        if not tag[1]:
            begin = tag.end()
        elif begin is not None:
            found, begin = text[begin : tag.start()], None
    return found


def references_of(reference: Any) -> list[str]:
    """One or several texts or numbers, also as `{"target": ...}`. Raises EnvError."""
    if isinstance(reference, dict) and set(reference) == {"target"}:
        reference = reference["target"]
    several = reference if isinstance(reference, list | tuple) else [reference]
    if not several or not all(isinstance(one, str | int | float) for one in several):
        raise EnvError(f"the reference {reference!r:.100} is neither text, nor a number, nor a list of these")
    return [str(one) for one in several]


def normalize(text: str) -> str:
    """Lower case, without punctuation, articles and extra blanks."""
    return " ".join(ARTICLES.sub(" ", text.lower().translate(PUNCTUATION)).split())


def number_in(text: str) -> Decimal | None:
    """The first number of a text; None where there is none."""
    found = NUMBER.search(text)
    return _decimal(found[0]) if found else None


def _last_number(text: str) -> Decimal | None:
    found = NUMBER.findall(text)
    return _decimal(found[-1]) if found else None


def _decimal(text: str) -> Decimal | None:
    try:
        return Decimal(text.replace(",", "").replace("$", "")) if len(text) <= LONGEST_NUMBER else None
    except InvalidOperation:
        return None


def _normalized(given: str, wanted: str) -> bool:
    """Equal when normalized; a reference of which nothing would be left, such as `the` or `+`, as it stands."""
    if normalized := normalize(wanted):
        return normalize(given) == normalized
    return given.strip() == wanted.strip() != ""


def _f1(given: Counter[str], wanted: Counter[str]) -> float:
    common = (given & wanted).total()
    return 2 * common / (given.total() + wanted.total()) if common else 0.0


def _letters(text: str) -> set[str]:
    """The letters that a short answer names: the first, and others that are chosen with it (`A or B`, `A, B`). What follows
    the first letter as its text (`B) a dog`) names none."""
    stripped = text[:LONGEST_CHOICE].strip().strip("*$ ")
    named = CHOICE.match(stripped) or CHOICE.search(stripped)
    if named is None:
        return set()
    found, rest = {named[1]}, stripped[named.end() :]
    while more := re.match(r"[\s*)]*(?:or|and|,|/|&|;)+[\s*(]*([A-Z])\b", rest):
        found.add(more[1])
        rest = rest[more.end() :]
    return found
