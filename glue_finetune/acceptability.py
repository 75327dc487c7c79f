"""A generated acceptability corpus: is the sentence grammatical? The task of CoLA, without its licence.

Sentences come from a small grammar of the English present tense. Half are grammatical; each of the others breaks one
rule, a quarter of them each:

agreement    the verb does not agree with the noun next to it: "the dog bark"
distance     the same across a phrase or a clause whose own noun has the other number: "the keys near the door is old"
determiner   the determiner does not fit its noun: "these dog", "an teacher", "the her garden"
order        one word stands on the wrong side of its neighbour: "the dog old barks"

Grammatical sentences have the same structures in the same proportions, so that no single word gives the answer away.
Only ``Random.random`` is used, the one method whose sequence Python promises to keep between versions.
"""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TypeVar

T = TypeVar("T")

VIOLATIONS = ("agreement", "distance", "determiner", "order")
TRAIN_SIZE, DEV_SIZE = 4000, 1000

# Singular, plural.
_NOUNS = (
    "dog dogs|cat cats|teacher teachers|child children|woman women|man men|farmer farmers|doctor doctors|"
    "neighbour neighbours|student students|pilot pilots|singer singers|actor actors|uncle uncles|artist artists|"
    "judge judges|sailor sailors|baker bakers|horse horses|rabbit rabbits|engineer engineers|visitor visitors"
)
_PLACES = (
    "garden gardens|house houses|door doors|river rivers|table tables|window windows|bridge bridges|island islands|"
    "office offices|tree trees|school schools|car cars|apple apples|box boxes|lamp lamps|orchard orchards"
)
_INTRANSITIVE = (
    "barks bark|sleeps sleep|laughs laugh|sings sing|arrives arrive|waits wait|smiles smile|disappears disappear"
)
_TRANSITIVE = (
    "admires admire|follows follow|sees see|helps help|knows know|avoids avoid|remembers remember|likes like|"
    "visits visit|hears hear|trusts trust|paints paint"
)
_BE = ("is", "are")
_ADJECTIVES = (
    *("old", "young", "small", "tall", "quiet", "happy", "angry"),
    *("strange", "famous", "clever", "lonely", "elegant", "tired", "polite"),
)
_PLACE_ADJECTIVES = ["old", "small", "strange", "famous", "elegant", "quiet"]
_ADVERBS = ["often", "always", "rarely", "sometimes", "usually", "never"]
_PREPOSITIONS = ["near", "behind", "beside", "under", "above"]
_EITHER = ("the", "my", "her", "our", "their")
_WRONG_ARTICLE = "a/an"  # written as the one that does not fit
_DETERMINERS = (("a", "this", "that", "every", *_EITHER), ("these", "those", "many", "several", *_EITHER))


@dataclasses.dataclass(frozen=True)
class Example:
    """One sentence of the corpus."""

    text: str
    label: int  # 1 if it is grammatical
    source: str  # "grammatical", or the violation


def make_corpus(train: int = TRAIN_SIZE, dev: int = DEV_SIZE, seed: int = 0) -> tuple[list[Example], list[Example]]:
    """Return training and dev sentences, all different from each other, half of each part grammatical."""
    writer = _Writer(seed)
    seen: set[str] = set()
    return writer.examples(train, seen), writer.examples(dev, seen)


def write_corpus(folder: Path, seed: int = 0) -> Path:
    """Write the corpus into a --data_dir and return it; CoLA's layout, with the violation in the first column."""
    target = folder / "CoLA"
    target.mkdir(parents=True, exist_ok=True)
    for name, examples in zip(("train", "dev"), make_corpus(seed=seed), strict=True):
        lines = (
            f"{example.source}\t{example.label}\t{'' if example.label else '*'}\t{example.text}\n"
            for example in examples
        )
        (target / f"{name}.tsv").write_text("".join(lines), encoding="utf-8", newline="\n")
    return folder


def _pairs(text: str) -> list[tuple[str, str]]:
    return [(pair.split()[0], pair.split()[1]) for pair in text.split("|")]


class _Writer:
    """Writes sentences as lists of words; the numbers 0 and 1 are singular and plural, and index the word pairs."""

    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)
        self._nouns, self._places = _pairs(_NOUNS), _pairs(_PLACES)
        self._intransitive, self._transitive = _pairs(_INTRANSITIVE), _pairs(_TRANSITIVE)

    def examples(self, count: int, seen: set[str]) -> list[Example]:
        """Write so many sentences that are not in `seen`, add them to it, and mix their order."""
        examples = []
        while len(examples) < count:
            index = len(examples)
            violation = VIOLATIONS[index // 2 % len(VIOLATIONS)]
            # A grammatical sentence has the structure in which its turn's violation could have occurred.
            write: Callable[[bool], list[str]] = getattr(self, f"_{violation}")
            words = write(index % 2 == 1)
            text = " ".join(_articles(words)).capitalize() + " ."
            if text not in seen:
                seen.add(text)
                examples.append(Example(text, 1 - index % 2, violation if index % 2 else "grammatical"))
        keys = [self._random.random() for _ in examples]
        return [examples[place] for place in sorted(range(count), key=keys.__getitem__)]

    def _choose(self, options: Sequence[T]) -> T:
        return options[int(self._random.random() * len(options))]

    def _chance(self, probability: float) -> bool:
        return self._random.random() < probability

    def _agreement(self, broken: bool) -> list[str]:
        number = self._choose((0, 1))
        return [*self._noun_phrase(number), *self._predicate(1 - number if broken else number)]

    def _distance(self, broken: bool) -> list[str]:
        number = self._choose((0, 1))
        subject = [*self._noun_phrase(number), *self._modifier(number, 1 - number)]
        return [*subject, *self._predicate(1 - number if broken else number)]

    def _determiner(self, broken: bool) -> list[str]:
        number = self._choose((0, 1))
        subject = self._noun_phrase(number)
        if broken:
            if self._chance(0.3):
                subject.insert(1, self._choose([word for word in _EITHER if word != subject[0]]))
            else:
                wrong = [word for word in _DETERMINERS[1 - number] if word not in _EITHER]
                subject[0] = self._choose([*wrong, _WRONG_ARTICLE] if number == 0 else wrong)
        return [*subject, *self._maybe_modifier(number), *self._predicate(number)]

    def _order(self, broken: bool) -> list[str]:
        number = self._choose((0, 1))
        subject = self._noun_phrase(number, adjective=self._chance(0.6))
        middle = self._maybe_modifier(number)
        predicate = self._predicate(number)
        if broken and self._chance(0.5):
            # The noun in front of its adjective or determiner: "the dog old barks", "dog the barks".
            subject[-2], subject[-1] = subject[-1], subject[-2]
        elif broken and predicate[0] in _BE:
            predicate = [*predicate[1:], predicate[0]]  # "the dog very old is"
        elif broken:
            # The same for the last noun: "follows dog the". A verb alone gets a place first ("sleeps often" is right).
            predicate = predicate if len(predicate) > 2 else [*predicate, *self._place(self._choose((0, 1)))]
            predicate[-2], predicate[-1] = predicate[-1], predicate[-2]
        return [*subject, *middle, *predicate]

    def _noun_phrase(self, number: int, adjective: bool | None = None) -> list[str]:
        if adjective is None:
            adjective = self._chance(0.4)
        middle = [self._choose(_ADJECTIVES)] if adjective else []
        return [self._choose(_DETERMINERS[number]), *middle, self._choose(self._nouns)[number]]

    def _place(self, number: int) -> list[str]:
        middle = [self._choose(_PLACE_ADJECTIVES)] if self._chance(0.4) else []
        return [
            self._choose(_PREPOSITIONS),
            self._choose(_DETERMINERS[number]),
            *middle,
            self._choose(self._places)[number],
        ]

    def _modifier(self, subject: int, number: int) -> list[str]:
        """A phrase or clause after a subject of one number, with a noun of the other in it; correct in itself."""
        kind = self._choose(("place", "place", "object", "subject"))
        if kind == "place":
            return self._place(number)
        noun_phrase = self._noun_phrase(number)
        verb = self._choose(self._transitive)
        if kind == "object":  # "the dogs that the cat follows"
            return ["that", *noun_phrase, verb[number]]
        return ["that", verb[subject], *noun_phrase]  # "the dogs that follow the cat"

    def _maybe_modifier(self, subject: int) -> list[str]:
        return self._modifier(subject, self._choose((0, 1))) if self._chance(0.3) else []

    def _predicate(self, number: int) -> list[str]:
        adverb = [self._choose(_ADVERBS)] if self._chance(0.25) else []
        kind = self._choose(("alone", "object", "object", "be", "be"))
        if kind == "alone":
            end = self._place(self._choose((0, 1))) if self._chance(0.5) else []
            return [*adverb, self._choose(self._intransitive)[number], *end]
        if kind == "object":
            return [*adverb, self._choose(self._transitive)[number], *self._noun_phrase(self._choose((0, 1)))]
        return [_BE[number], *adverb, *(["very"] if self._chance(0.3) else []), self._choose(_ADJECTIVES)]


def _articles(words: list[str]) -> list[str]:
    """Write "a" as "an" before a vowel, and the other way round where the wrong one is wanted."""
    result = list(words)
    for place, word in enumerate(words[:-1]):
        if word in ("a", _WRONG_ARTICLE):
            vowel = words[place + 1][0] in "aeiou"
            result[place] = "an" if vowel == (word == "a") else "a"
    return result
