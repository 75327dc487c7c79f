"""The generated corpus: sizes, balance, and labels checked by a recogniser that knows the grammar by itself."""

import hashlib
import itertools
import re
from collections import Counter

import pytest

from glue_finetune import acceptability
from glue_finetune.acceptability import VIOLATIONS, make_corpus, write_corpus
from glue_finetune.tasks import TASKS, load_task


@pytest.fixture(scope="module")
def corpus():
    return make_corpus()


def test_sizes_balance_and_disjointness(corpus):
    for part, size in zip(corpus, (4000, 1000), strict=True):
        assert len(part) == size
        assert sum(example.label for example in part) == size // 2
        counts = Counter(example.source for example in part if not example.label)
        assert counts == dict.fromkeys(VIOLATIONS, size // 8)
    texts = [example.text for part in corpus for example in part]
    assert len(set(texts)) == len(texts)


def test_the_same_sentences_everywhere(corpus):
    text = "\n".join(f"{example.label} {example.text}" for part in corpus for example in part)
    assert (
        hashlib.sha256(text.encode()).hexdigest() == "94901b632889651d17419c6242ff559cb0e6ed8e276ea605ad92570fd2adb76c"
    )
    assert make_corpus(seed=1)[0] != corpus[0]


def test_labels_take_no_order(corpus):
    for part in corpus:
        runs = 1 + sum(one.label != two.label for one, two in itertools.pairwise(part))
        assert abs(runs - len(part) / 2) < 4 * len(part) ** 0.5 / 2  # 4 sigma around what chance gives


def test_the_recogniser_agrees_with_every_label(corpus):
    grammar = _grammar()
    wrong = [example for part in corpus for example in part if bool(grammar.fullmatch(example.text)) != example.label]
    assert wrong == []


def test_it_is_written_in_the_layout_of_cola(tmp_path):
    data = load_task(TASKS["cola"], str(write_corpus(tmp_path)))
    train, dev = make_corpus()
    assert list(data.train["text"]) == [example.text for example in train]
    assert list(data.dev[""]["label"]) == [example.label for example in dev]


def _grammar():
    """The whole language as one regular expression over the module's words, singular and plural spelled out."""
    nouns = [_either(pair[n] for pair in acceptability._pairs(acceptability._NOUNS)) for n in (0, 1)]
    places = [_either(pair[n] for pair in acceptability._pairs(acceptability._PLACES)) for n in (0, 1)]
    transitive = [_either(pair[n] for pair in acceptability._pairs(acceptability._TRANSITIVE)) for n in (0, 1)]
    intransitive = [_either(pair[n] for pair in acceptability._pairs(acceptability._INTRANSITIVE)) for n in (0, 1)]
    adjective, adverb = _either(acceptability._ADJECTIVES), _either(acceptability._ADVERBS)
    both = "the|my|her|our|their"
    determiners = [
        rf"(?:an(?= [aeiou])|a(?= [^aeiou])|this|that|every|{both})",
        rf"(?:these|those|many|several|{both})",
    ]
    phrases = [rf"{determiners[n]} (?:{adjective} )?{nouns[n]}" for n in (0, 1)]
    phrase = _either(phrases)
    end = _either(rf"{determiners[n]} (?:{adjective} )?{places[n]}" for n in (0, 1))
    place = rf"(?:near|behind|beside|under|above) {end}"
    clause = _either(rf"{phrases[n]} {transitive[n]}" for n in (0, 1))
    sentences = []
    for n, be in enumerate(("is", "are")):
        modifier = _either([place, rf"that {clause}", rf"that {transitive[n]} {phrase}"])
        predicate = _either(
            [
                rf"(?:{adverb} )?{intransitive[n]}(?: {place})?",
                rf"(?:{adverb} )?{transitive[n]} {phrase}",
                rf"{be} (?:{adverb} )?(?:very )?{adjective}",
            ]
        )
        sentences.append(rf"{phrases[n]}(?: {modifier})? {predicate} \.")
    return re.compile(_either(sentences), re.IGNORECASE)


def _either(options):
    return "(?:" + "|".join(options) + ")"
