"""Drafts by recent texts: their lengths, whose texts they copy, the bound of memory, and the file of the texts."""

from __future__ import annotations

import signal
import stat
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import foredraft
from foredraft.decode.sequence import Finish
from foredraft.drafters import suffix as module
from foredraft.drafters.recent_texts import RecentTexts, Text
from foredraft.drafters.suffix import CONTEXT, LONGEST_DRAFT, Suffix, agreed
from foredraft.drafters.texts_file import TextsFile
from foredraft.errors import ConfigError, RequestError
from tests.support import checkpoints
from tests.support.harness import request
from tests.support.planting import Mutant, assert_caught, defect
from tests.support.running import environment

Function = Callable[..., Any]
MIB = 1 << 20
SIZE = 1000  # ids of the vocabulary


def drafter(most_bytes: int = MIB) -> Suffix:
    return Suffix(RecentTexts(most_bytes), TextsFile(None, None, SIZE))


def written(suffix: Suffix, prompt: list[int], output: list[int], scope: bytes = b"", **more: Any) -> None:
    """Let a request write a text to its end."""
    sequence = request(prompt, "suffix")
    sequence.text_scope = scope
    suffix.join(sequence)
    sequence.tokens += output
    suffix.rewind(sequence)
    sequence.finish = more.get("finish", Finish.EOS)
    suffix.leave(sequence)


def draft(suffix: Suffix, tokens: list[int], scope: bytes = b"", most: int = 99) -> list[int]:
    """Return the draft of a request that begins with a text."""
    sequence = request(tokens, "suffix")
    sequence.text_scope = scope
    suffix.join(sequence)
    [made] = suffix.propose([(sequence, most)])
    assert suffix.peek(sequence, most).length == len(made)
    suffix.leave(sequence)
    return made


# --- drafts -----------------------------------------------------------------------------------------


def test_a_draft_copies_what_an_earlier_request_wrote() -> None:
    suffix = drafter()
    prompt, output = [*range(100, 150)], [*range(10, 90)]
    written(suffix, prompt, output)
    assert draft(suffix, output[:8]) == output[8 : 8 + LONGEST_DRAFT]
    assert draft(suffix, [5, *prompt[-3:]]) == output[:12]  # the end of the prompt leads to the output
    assert draft(suffix, prompt[: -CONTEXT - 1]) == []  # but the rest of the prompt is not kept
    assert draft(suffix, output[:8], most=3) == output[8:11]


def test_a_request_copies_from_its_own_text_first() -> None:
    suffix = drafter()
    written(suffix, [1], [2, 3, 4, 5, 6, 7])
    assert draft(suffix, [2, 3, 4, 9, 9, 2, 3, 4]) == [9, 9, 2, 3, 4]  # of equally many counts
    assert draft(suffix, [3, 4, 9, 9, 2, 3, 4])[:1] == [5]  # by a longer match
    assert draft(suffix, [8, 9, 8]) == [9, 8]


@pytest.mark.parametrize(("length", "most"), [(1, 4), (2, 8), (3, 12), (6, 24), (20, LONGEST_DRAFT)])
def test_a_draft_is_as_long_as_its_match_allows(length: int, most: int) -> None:
    text = [*range(100)]
    assert draft(drafter(), [*text, 500, *text[40 : 40 + length]]) == text[40 + length : 40 + length + most]


def check_counts() -> None:
    """A draft goes on as far as the counts make it likely, and by the way that most texts went."""
    assert agreed([[1, 2, 3], [1, 2, 4], [1, 5, 6]], 9) == ([1, 2, 3], 1.0)
    assert agreed([[1, 2], [2, 3], [3, 4], [4, 5], [5, 6]], 9) == ([], 1.0)
    assert agreed([[1, 2, 3], [1, 2, 4], [1, 3, 5], [1, 4, 6], [1, 5, 7]], 9) == ([1, 2], 1.0)
    assert agreed([[7, 1], [8, 2], [8, 3]], 9) == ([8, 2], 2 / 3)
    assert agreed([[7, 1], [8, 2]], 9) == ([7, 1], 0.5)  # of equally many, the latest decides
    assert agreed([[7], [7, 8, 9]], 2) == ([7, 8], 1.0)  # a text that ends counts no further


def test_a_draft_ends_where_its_counts_say() -> None:
    check_counts()


def test_confidence_follows_the_match_and_the_counts() -> None:
    suffix, text = drafter(), [*range(60)]
    for known in (text, [*text[:20], 70, 71], [*text[:20], 80, 81]):
        written(suffix, [99], known)

    def confidence(tokens: list[int]) -> float | None:
        sequence = request(tokens, "suffix")
        suffix.join(sequence)
        return suffix.peek(sequence, 8).confidence

    assert [confidence([500, *text[30 : 30 + n]]) for n in (3, 5, 12)] == [0.6, 0.85, 0.95]
    assert confidence(text[:20]) == 0.2  # one of three texts goes on so
    assert confidence([500]) == 0.2 and draft(suffix, [500]) == []


@pytest.mark.parametrize("finish", [None, Finish.CANCELLED, Finish.ERROR])
def test_texts_that_did_not_end_by_themselves_are_not_kept(finish: Finish | None) -> None:
    suffix = drafter()
    written(suffix, [1], [*range(10, 30)], finish=finish)
    assert len(suffix.texts) == 0 and draft(suffix, [10, 11, 12, 13]) == []


def test_without_memory_nothing_is_kept() -> None:
    suffix = drafter(0)
    written(suffix, [1], [*range(10, 30)])
    assert len(suffix.texts) == suffix.texts.bytes == 0


# --- scopes and memory ------------------------------------------------------------------------------


def check_scopes() -> None:
    """Texts that were planted in one scope are drafted there, and nowhere else."""
    suffix = drafter()
    one, other = [*range(100, 140)], [*range(100, 110), *range(200, 230)]
    written(suffix, [1], one, b"one")
    written(suffix, [1], other, b"other")
    assert draft(suffix, one[:10], b"one") == one[10 : 10 + LONGEST_DRAFT]
    assert draft(suffix, one[:10], b"other") == other[10 : 10 + LONGEST_DRAFT]
    assert draft(suffix, one[:10]) == []
    assert draft(suffix, one[12:20], b"other") == []


def test_texts_of_two_scopes_never_meet() -> None:
    check_scopes()


def test_the_oldest_texts_go_first_whoever_wrote_them() -> None:
    recent = RecentTexts(64 << 10)
    for number in range(400):
        recent.add(b"%d" % (number % 3), [number % SIZE, *range(10)])
        assert recent.bytes <= recent.most_bytes
    kept = recent.all()
    assert 3 < len(kept) == len(recent) < 400
    assert [text.tokens[0] for text in kept] == [*range(400 - len(kept), 400)]
    assert [text.scope for text in kept] == [b"%d" % (text.tokens[0] % 3) for text in kept]
    gone = kept[0].tokens[0] - 1
    assert recent.search(b"%d" % (gone % 3), [gone, 0, 1], 9).length < 3


def test_of_a_text_that_never_fits_the_end_is_kept() -> None:
    recent = RecentTexts(64 << 10)
    recent.add(b"", [*range(5000)])
    [kept] = recent.all()
    assert 50 < len(kept.tokens) < 200 and kept.tokens[-1] == 4999 and recent.bytes <= recent.most_bytes


def test_memory_is_bounded_under_a_hundred_thousand_requests() -> None:
    """Each of three new tokens; every tenth has a scope of its own, as a salt of a request gives it."""
    suffix = drafter(MIB)
    most = 0
    for number in range(100_000):
        scope = b"%d" % number if number % 10 == 0 else b""
        suffix.texts.add(scope, [number % 997, number % 31, number % 89, number % 53])
        most = max(most, suffix.texts.bytes)
    assert MIB // 2 < most <= MIB
    assert len(suffix.texts._indices) < 300 and not suffix._own


@pytest.mark.parametrize(("tokens", "scopes"), [(400, 1), (4, 1), (4, 10**6), (40, 7)])
def test_memory_is_no_more_than_is_counted(tokens: int, scopes: int) -> None:
    """All runs differ, which takes the most memory; twice as many texts come as there is room for."""
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        recent, number, dropped = RecentTexts(2 * MIB), 0, False
        while not dropped:
            held = len(recent)
            for _ in range(max(8, 2 * held)):
                recent.add(b"%d" % (number % scopes), [*range(number * tokens, (number + 1) * tokens)])
                number += 1
            dropped = len(recent) < number
            assert tracemalloc.get_traced_memory()[0] - before < 1.02 * recent.most_bytes
    finally:
        tracemalloc.stop()


# --- the file ---------------------------------------------------------------------------------------


def test_saved_texts_are_drafted_by_a_later_process(tmp_path: Path) -> None:
    file, suffix = TextsFile(tmp_path / "texts", "digest", SIZE), drafter()
    written(suffix, [1], [*range(10, 40)], b"\x01key")
    written(suffix, [1], [*range(50, 60)])
    assert suffix.save(tmp_path / "texts") == 2
    file.write(suffix.texts.all())
    assert stat.S_IMODE((tmp_path / "texts").stat().st_mode) == 0o600
    later = drafter()
    for text in file.read():
        later.texts.add(*text)
    assert later.texts.all() == suffix.texts.all()
    assert draft(later, [10, 11, 12, 13], b"\x01key") == [*range(14, 30)]
    assert draft(later, [10, 11, 12, 13]) == []


def test_there_may_be_no_file_yet(tmp_path: Path) -> None:
    assert TextsFile(tmp_path / "texts", None, SIZE).read() == TextsFile(None, None, SIZE).read() == []
    TextsFile(tmp_path / "texts", None, SIZE).write([])
    assert TextsFile(tmp_path / "texts", None, SIZE).read() == []
    with pytest.raises(ConfigError, match="in a folder that exists"):
        TextsFile(tmp_path / "missing/texts", None, SIZE).read()
    with pytest.raises(ConfigError, match="have no file"):
        TextsFile(None, None, SIZE).write([])


@pytest.mark.parametrize(
    ("spoil", "says"),
    [
        (lambda whole: whole[:-3], "which is damaged; remove it, or give another one"),
        (lambda whole: whole[:-1] + bytes([whole[-1] ^ 1]), "which is damaged"),
        (lambda whole: whole.replace(b'"6b6579"', b'"6b657a"'), "which is damaged"),  # the text's scope
        (lambda whole: whole[:40], "which is damaged"),
        (lambda whole: b"", "which is no file of texts"),
        (lambda whole: b"{}\n", "which is no file of texts"),
    ],
)
def test_a_damaged_file_is_one_line(spoil: Callable[[bytes], bytes], says: str, tmp_path: Path) -> None:
    file = TextsFile(tmp_path / "texts", None, SIZE)
    file.write([Text(b"key", [1, 2, 3, 4])])
    whole = (tmp_path / "texts").read_bytes()
    assert spoil(whole) != whole
    (tmp_path / "texts").write_bytes(spoil(whole))
    with pytest.raises(ConfigError, match=says) as refused:
        file.read()
    assert str(tmp_path / "texts") in str(refused.value) and "\n" not in str(refused.value)


def test_texts_of_another_tokenizer_are_refused(tmp_path: Path) -> None:
    TextsFile(tmp_path / "texts", "one", SIZE).write([Text(b"", [1, 2, 3, 4])])
    for other in (TextsFile(tmp_path / "texts", "two", SIZE), TextsFile(tmp_path / "texts", "one", SIZE + 1)):
        with pytest.raises(ConfigError, match="whose texts are of another tokenizer"):
            other.read()


HALF_WRITTEN = """
import sys, time
from pathlib import Path
from foredraft.drafters.recent_texts import Text
from foredraft.drafters.texts_file import TextsFile
written = Path.write_bytes
def half(path, content):
    written(path, content[: len(content) // 2])
    print("half", flush=True)
    time.sleep(600)
Path.write_bytes = half
TextsFile(Path(sys.argv[1]), None, 1000).write([Text(b"", [9, 9, 9, 9, 9])])
"""


def test_a_process_that_is_killed_while_it_saves_loses_nothing_older(tmp_path: Path) -> None:
    file, texts = TextsFile(tmp_path / "texts", None, SIZE), [Text(b"a", [1, 2, 3, 4]), Text(b"", [5, 6, 7])]
    file.write(texts)
    with subprocess.Popen(
        [sys.executable, "-c", HALF_WRITTEN, str(tmp_path / "texts")],
        env=environment(),
        stdout=subprocess.PIPE,
    ) as saving:
        assert saving.stdout is not None
        assert saving.stdout.readline() == b"half\n"
        saving.send_signal(signal.SIGKILL)
    assert file.read() == texts
    file.write(texts[:1])
    assert file.read() == texts[:1]


# --- through load -----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoints.save_pair(tmp_path_factory.mktemp("models")) / "big"


def load(big: Path, **options: Any) -> foredraft.LLM:
    return foredraft.load(big, device="cpu", max_batch=2, max_length=128, policy="fixed", **options)


def test_it_drafts_only_where_it_is_asked_for(big: Path, tmp_path: Path) -> None:
    with load(big) as llm:
        assert "suffix" not in llm.loaded.engine.drafters
        with pytest.raises(RequestError, match="which is not loaded"):
            llm.generate("a", drafter="suffix")
        with pytest.raises(RequestError, match="suffix is not loaded; load with recent_texts"):
            llm.save_texts(tmp_path / "texts")
    for options, mib in (
        ({"drafter": "suffix"}, 0),
        ({"recent_texts": 3}, 3),
        ({"texts_file": tmp_path / "texts"}, module.DEFAULT_MIB),
        ({"texts_file": str(tmp_path / "texts"), "recent_texts": 0}, 0),
    ):
        with load(big, **options) as llm:
            found = llm.loaded.engine.drafters["suffix"]
            assert isinstance(found, Suffix) and found.texts.most_bytes == mib << 20


@pytest.mark.parametrize("value", [-1, 1.5, True, "many"])
def test_memory_is_a_whole_number(value: Any) -> None:
    with pytest.raises(ConfigError, match="recent_texts"):
        foredraft.load(recent_texts=value)


def test_the_longest_drafts_are_longer_with_it(big: Path) -> None:
    with load(big, drafter="suffix") as llm:
        assert llm.loaded.engine.policy.max_draft == LONGEST_DRAFT
    with load(big, recent_texts=1) as llm:  # the default drafter is another one
        assert llm.loaded.engine.policy.max_draft == 5
    for options, longest in (({"recent_texts": 1}, LONGEST_DRAFT), ({}, 10)):
        with foredraft.load(big, device="cpu", max_batch=1, max_length=64, **options) as llm:
            assert llm.default_drafter == "auto" and llm.loaded.engine.policy.max_draft == longest


def test_later_requests_copy_what_was_written_and_saved(big: Path, tmp_path: Path) -> None:
    greedy = {"temperature": 0.0, "max_new_tokens": 40, "ignore_eos": True}
    with load(big, drafter="none") as llm:
        [plain] = llm.generate("one text", **greedy)  # type: ignore[arg-type]
    with load(big, drafter="suffix", recent_texts=1, texts_file=tmp_path / "texts") as llm:
        first, again = (llm.generate("one text", **greedy)[0] for _ in range(2))  # type: ignore[arg-type]
        assert llm.save_texts() == 2
    with load(big, drafter="suffix", recent_texts=1, texts_file=tmp_path / "texts") as llm:
        [later] = llm.generate("one text", **greedy)  # type: ignore[arg-type]
    assert first.token_ids == again.token_ids == later.token_ids == plain.token_ids
    assert len({later.stats.rounds, again.stats.rounds}) == 1 and again.stats.rounds <= 4
    assert again.stats.rounds < first.stats.rounds


# --- defects ----------------------------------------------------------------------------------------


def without_counts(_: Function) -> Function:
    return lambda continuations, most: (max(continuations, key=len, default=[])[:most], 1.0)


def scope_ignored(sound: Function) -> Function:
    return lambda recent, scope, *rest: sound(recent, b"", *rest)


DEFECTS = [
    defect("a draft is longer than its counts allow", agreed, without_counts, check_counts),
    Mutant(
        "another key's text is drafted",
        ((RecentTexts.add, scope_ignored), (RecentTexts.search, scope_ignored)),
        check_scopes,
    ),
]


@pytest.mark.parametrize("mutant", DEFECTS, ids=lambda mutant: mutant.name)
def test_the_defect_is_caught(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    assert_caught(mutant, monkeypatch)
