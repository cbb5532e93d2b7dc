"""The shipped workloads: whole, of held-out text alone, and within the demo models' reach."""

from __future__ import annotations

import importlib
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from foredraft import demo
from foredraft.demo.recipe.corpus import PACKAGES, Source, write_lines
from foredraft.model.tokenizer import Tokenizer

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
FILES = sorted((BENCHMARKS / "workloads").glob("*.jsonl"))
POSITIONS, NEW_TOKENS = 1024, 128
LICENCES = {licence for _, licence, _ in PACKAGES}


def lines(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


@pytest.fixture(scope="module")
def tokenizer() -> Tokenizer:
    found = Tokenizer.from_folder(demo.target_path())
    assert found is not None
    return found


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    sys.path.insert(0, str(BENCHMARKS))
    try:
        yield importlib.import_module("make_workloads")
    finally:
        sys.path.remove(str(BENCHMARKS))


class TestShipped:
    def test_there_are_six_kinds_of_twenty_prompts_at_least(self, script: ModuleType) -> None:
        assert {file.stem for file in FILES} == set(script.KINDS)
        assert len(FILES) == 6
        assert all(len(lines(file)) >= 20 for file in FILES)

    def test_every_line_says_what_it_is_and_where_from(self) -> None:
        for file in FILES:
            for line in lines(file):
                assert set(line) == {"prompt", "kind", "module", "name", "licence"}
                assert line["kind"] == file.stem
                assert line["licence"] in LICENCES

    def test_no_prompt_comes_twice(self) -> None:
        prompts = [line["prompt"] for file in FILES for line in lines(file)]
        assert len(set(prompts)) == len(prompts)

    def test_modules_are_those_that_training_held_out(self) -> None:
        heldout = {line["module"] for line in lines(BENCHMARKS / "prompts" / "heldout.jsonl")}
        assert {line["module"] for file in FILES for line in lines(file)} <= heldout

    def test_a_prompt_and_its_continuation_fit_half_the_positions(self, tokenizer: Tokenizer) -> None:
        longest = max(len(tokenizer.encode(line["prompt"])) for file in FILES for line in lines(file))
        assert longest + NEW_TOKENS <= POSITIONS // 2

    def test_no_prompt_ends_in_a_line_break(self) -> None:
        """Which the tokenizer would join with the indentation that follows."""
        assert not [line for file in FILES for line in lines(file) if line["prompt"].endswith(("\n", " "))]

    def test_no_module_dominates(self) -> None:
        for file in FILES:
            modules = [line["module"] for line in lines(file)]
            assert max(map(modules.count, modules)) <= len(modules) // 3, file.name


MODULE = '''"""A module.

It has a docstring
of many
lines, so that
a part of it
can stand alone
and another not.
"""

import math


def area(width, height):
    """Multiply the two sides, for that is what the area of a rectangle with straight corners is."""
    sides = sorted([width, height])
    first = sides[0] * 1
    second = sides[1] * 1
    third = sides[0] * 1
    return math.prod(sides) * third / first


TABLE = {
    "one": 1,
    "two": 2,
    "three": 3,
    "four": 4,
    "five": 5,
    "six": 6,
}
'''


class TestKinds:
    @pytest.mark.parametrize(
        ("kind", "end"),
        [
            ("complete-function", "corners is.\"\"\""),
            ("write-docstring", 'height):\n    """'),
            ("fill-table", '    "three": 3,'),
            ("write-tests", "\n\n\ndef test_area():"),
            ("free", "It has a docstring"),
        ],
    )  # fmt: skip
    def test_a_beginning_ends_where_something_is_left_to_write(
        self, script: ModuleType, kind: str, end: str
    ) -> None:
        beginnings = list(script.KINDS[kind](script.Text(MODULE)))
        assert beginnings
        assert all(beginning.needed.endswith(end) for beginning in beginnings)
        assert all(MODULE.startswith(beginning.context) for beginning in beginnings)

    def test_an_edit_shows_the_code_the_wish_and_a_third_of_the_changed_copy(
        self, script: ModuleType
    ) -> None:
        (edit,) = script.KINDS["edit-file"](script.Text(MODULE))
        original, begun = edit.needed.split("\n\n\n# The same code with sides renamed to new_sides:\n")
        assert original in MODULE
        assert begun + edit.rest == original.replace("sides", "new_sides")
        assert begun.count("\n") + 1 == (original.count("\n") + 1) // 3

    def test_what_follows_a_verbatim_beginning_is_the_rest_of_the_module(self, script: ModuleType) -> None:
        for kind in ("complete-function", "write-docstring", "fill-table", "free"):
            for beginning in script.KINDS[kind](script.Text(MODULE)):
                assert beginning.context + beginning.needed + beginning.rest == MODULE, kind

    def test_context_is_cut_at_a_line_and_only_as_far_as_it_must_be(
        self, script: ModuleType, tokenizer: Tokenizer
    ) -> None:
        long = "".join(f"value_{number} = {number}\n" for number in range(200))
        prompt = script.prompt_of(script.Beginning(long, "last = 1", "\n", "x"), tokenizer)
        assert long.endswith(prompt.removesuffix("last = 1"))
        assert prompt.startswith("value_")
        assert script.CONTEXT - 12 < len(tokenizer.encode(prompt)) <= script.CONTEXT

    def test_context_never_leaps_a_line_that_is_too_long(
        self, script: ModuleType, tokenizer: Tokenizer
    ) -> None:
        context = f"early = 1\n{'number + ' * 400}0\nlate = 1\n"
        assert script.prompt_of(script.Beginning(context, "x =", " 1\n", "x"), tokenizer) == "late = 1\nx ="

    def test_statements_that_begin_alike_are_a_table_of_their_own(self, script: ModuleType) -> None:
        calls = [f"    check({number})\n" for number in range(7)]
        module = "def test_all():\n    value = 1\n" + "".join(calls) + "    other(value)\n"
        (beginning,) = script.KINDS["fill-table"](script.Text(module))
        assert beginning.needed == "".join(calls[:3]).removesuffix("\n")
        assert beginning.context == "def test_all():\n    value = 1\n"
        assert not list(script.KINDS["fill-table"](script.Text(module.replace("check(3)", "chuck(3)"))))

    def test_a_cut_inside_a_token_is_no_prompt(self, script: ModuleType, tokenizer: Tokenizer) -> None:
        assert script.prompt_of(script.Beginning("", "return Fal", "se\n", "x"), tokenizer) is None
        assert script.prompt_of(script.Beginning("", "return", " False\n", "x"), tokenizer) == "return"


class TestHeldOut:
    def record(self) -> dict[str, Any]:
        return lines(BENCHMARKS / "prompts" / "heldout.jsonl")[0]

    def corpus(self, folder: Path, training: str, text: str) -> Path:
        package, path = self.record()["module"].split(":")
        known = {"package": package, "path": path, "text": text}
        write_lines(folder / "heldout.jsonl", [known])
        write_lines(folder / "train.jsonl", [{"package": package, "path": training, "text": ""}])
        return folder

    def all_prompts(self) -> str:
        module = self.record()["module"]
        recorded = lines(BENCHMARKS / "prompts" / "heldout.jsonl")
        return "\n".join(line["prompt"] for line in recorded if line["module"] == module)

    def test_a_module_with_the_recorded_text_counts(self, script: ModuleType, tmp_path: Path) -> None:
        (found,) = script.heldout(self.corpus(tmp_path, "other.py", self.all_prompts()))
        assert isinstance(found, Source)

    def test_another_version_of_it_does_not(self, script: ModuleType, tmp_path: Path) -> None:
        assert script.heldout(self.corpus(tmp_path, "other.py", self.all_prompts()[5:])) == []

    def test_one_that_is_trained_on_stops_everything(self, script: ModuleType, tmp_path: Path) -> None:
        path = self.record()["module"].split(":")[1]
        with pytest.raises(SystemExit, match="was held out, but"):
            script.heldout(self.corpus(tmp_path, path, self.all_prompts()))
