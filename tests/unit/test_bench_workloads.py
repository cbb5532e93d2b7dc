"""The shipped workloads: complete, cut from held-out modules only, and short enough for the demo models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.make_workloads import CONTEXT, heldout, prompt_of
from benchmarks.workload_kinds import KINDS, Beginning, Text
from foredraft import demo
from foredraft.model.tokenizer import Tokenizer
from recipes.demo.corpus import PACKAGES, Source, write_jsonl

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


class TestShipped:
    def test_six_workloads_have_at_least_twenty_prompts_each(self) -> None:
        assert {file.stem for file in FILES} == set(KINDS)
        assert len(FILES) == 6
        assert all(len(lines(file)) >= 20 for file in FILES)

    def test_every_line_names_kind_module_and_licence(self) -> None:
        for file in FILES:
            for line in lines(file):
                assert set(line) == {"prompt", "kind", "module", "name", "licence"}
                assert line["kind"] == file.stem
                assert line["licence"] in LICENCES

    def test_all_prompts_are_different(self) -> None:
        prompts = [line["prompt"] for file in FILES for line in lines(file)]
        assert len(set(prompts)) == len(prompts)

    def test_all_modules_are_held_out(self) -> None:
        heldout = {line["module"] for line in lines(BENCHMARKS / "prompts" / "heldout.jsonl")}
        assert {line["module"] for file in FILES for line in lines(file)} <= heldout

    def test_a_prompt_and_its_continuation_fit_half_the_positions(self, tokenizer: Tokenizer) -> None:
        longest = max(len(tokenizer.encode(line["prompt"])) for file in FILES for line in lines(file))
        assert longest + NEW_TOKENS <= POSITIONS // 2

    def test_no_prompt_ends_in_a_line_break(self) -> None:
        """The tokenizer would join the line break with the indentation of the next line."""
        assert not [line for file in FILES for line in lines(file) if line["prompt"].endswith(("\n", " "))]

    def test_a_module_contributes_at_most_a_third_of_a_workload(self) -> None:
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
    def test_a_prompt_ends_where_its_kind_says(self, kind: str, end: str) -> None:
        beginnings = list(KINDS[kind](Text(MODULE)))
        assert beginnings
        assert all(beginning.needed.endswith(end) for beginning in beginnings)
        assert all(MODULE.startswith(beginning.context) for beginning in beginnings)

    def test_an_edit_has_the_code_the_instruction_and_a_third_of_the_edited_copy(self) -> None:
        (edit,) = KINDS["edit-file"](Text(MODULE))
        original, begun = edit.needed.split("\n\n\n# The same code with sides renamed to new_sides:\n")
        assert original in MODULE
        assert begun + edit.rest == original.replace("sides", "new_sides")
        assert begun.count("\n") + 1 == (original.count("\n") + 1) // 3

    def test_context_prompt_and_rest_make_up_the_module(self) -> None:
        for kind in ("complete-function", "write-docstring", "fill-table", "free"):
            for beginning in KINDS[kind](Text(MODULE)):
                assert beginning.context + beginning.needed + beginning.rest == MODULE, kind

    def test_context_is_as_long_as_fits_in_whole_lines(self, tokenizer: Tokenizer) -> None:
        long = "".join(f"value_{number} = {number}\n" for number in range(200))
        prompt = prompt_of(Beginning(long, "last = 1", "\n", "x"), tokenizer)
        assert long.endswith(prompt.removesuffix("last = 1"))
        assert prompt.startswith("value_")
        assert CONTEXT - 12 < len(tokenizer.encode(prompt)) <= CONTEXT

    def test_context_stops_at_a_line_that_does_not_fit(self, tokenizer: Tokenizer) -> None:
        context = f"early = 1\n{'number + ' * 400}0\nlate = 1\n"
        assert prompt_of(Beginning(context, "x =", " 1\n", "x"), tokenizer) == "late = 1\nx ="

    def test_a_run_of_similar_statements_is_a_table(self) -> None:
        calls = [f"    check({number})\n" for number in range(7)]
        module = "def test_all():\n    value = 1\n" + "".join(calls) + "    other(value)\n"
        (beginning,) = KINDS["fill-table"](Text(module))
        assert beginning.needed == "".join(calls[:3]).removesuffix("\n")
        assert beginning.context == "def test_all():\n    value = 1\n"
        assert not list(KINDS["fill-table"](Text(module.replace("check(3)", "chuck(3)"))))

    def test_a_prompt_never_ends_inside_a_token(self, tokenizer: Tokenizer) -> None:
        assert prompt_of(Beginning("", "return Fal", "se\n", "x"), tokenizer) is None
        assert prompt_of(Beginning("", "return", " False\n", "x"), tokenizer) == "return"


class TestHeldOut:
    def record(self) -> dict[str, Any]:
        return lines(BENCHMARKS / "prompts" / "heldout.jsonl")[0]

    def corpus(self, folder: Path, training: str, text: str) -> Path:
        package, path = self.record()["module"].split(":")
        known = {"package": package, "path": path, "text": text}
        write_jsonl(folder / "heldout.jsonl", [known])
        write_jsonl(folder / "train.jsonl", [{"package": package, "path": training, "text": ""}])
        return folder

    def all_prompts(self) -> str:
        module = self.record()["module"]
        recorded = lines(BENCHMARKS / "prompts" / "heldout.jsonl")
        return "\n".join(line["prompt"] for line in recorded if line["module"] == module)

    def test_a_module_with_the_recorded_text_is_held_out(self, tmp_path: Path) -> None:
        (found,) = heldout(self.corpus(tmp_path, "other.py", self.all_prompts()))
        assert isinstance(found, Source)

    def test_another_version_of_a_held_out_module_is_left_out(self, tmp_path: Path) -> None:
        assert heldout(self.corpus(tmp_path, "other.py", self.all_prompts()[5:])) == []

    def test_a_held_out_module_in_the_training_set_is_an_error(self, tmp_path: Path) -> None:
        path = self.record()["module"].split(":")[1]
        with pytest.raises(SystemExit, match="was held out, but"):
            heldout(self.corpus(tmp_path, path, self.all_prompts()))
