"""An option is declared in one place, and is then wherever a user gives it."""

from __future__ import annotations

import inspect
from dataclasses import dataclass, field
from typing import Any

import pytest

import foredraft
from foredraft.arguments import check_fields, declared, option, spelled_elsewhere, takes_fields_of
from foredraft.arguments.values import Choice, Flag, Number, Source, Strings, Unfit, Value, Whole, Words
from foredraft.bench.settings import BenchSettings, TuneSettings
from foredraft.errors import ConfigError
from foredraft.kinds.load_options import LoadOptions
from foredraft.serve.settings import Settings
from foredraft.verify import VerifySettings
from tests.support.running import python

# Runs a module of the package with a further option in its source, and then a program.
ADDED = """
import importlib.util, sys, types
from pathlib import Path

def add(name, help, field):
    file = importlib.util.find_spec(name).origin
    source = Path(file).read_text(encoding="utf-8")
    for old, new in (help, field):
        assert source.count(old) == 1, old
        source = source.replace(old, new + old)
    sys.modules[name] = module = types.ModuleType(name)
    exec(compile(source, file, "exec"), module.__dict__)

add(
    "foredraft.decode.params",
    ("        regex: A regular", "        wobble: How much the text wobbles. Default: not at all.\\n"),
    ("    regex: str | None = declare(",
     "    wobble: float = declare(0.0, Number('from 0 to 3', most=3.0), elsewhere='wibble')\\n"),
)
add(
    "foredraft.kinds.load_options",
    ("        device: ", '        haste: `device` hurries with "slow" or "fast". Default: "slow".\\n'),
    ("    device: str | None = declare(",
     "    haste: str | None = declare(None, Choice(names=('slow', 'fast')), elsewhere='hurry')\\n"),
)
import foredraft
"""


PROGRAM = """
import inspect, os
os.environ["COLUMNS"] = "200"
from foredraft.cli import main
from foredraft.cli.commands import app
from foredraft.cli.options import load_options, request_options
from foredraft.cli.words import other_names
def refusal(call, **options):
    try:
        call(**options)
    except foredraft.ForedraftError as error:
        return str(error)
print(foredraft.SamplingParams(wobble=2).replace(temperature=0).wobble)
print(inspect.signature(foredraft.load).parameters["haste"])
print("haste: `device` hurries" in foredraft.load.__doc__)
for call, options in (
    (foredraft.SamplingParams, {"wobble": 4}), (foredraft.SamplingParams, {"wibble": 1}),
    (foredraft.load, {"haste": "no"}), (foredraft.load, {"hurry": "slow"}),
):
    print(refusal(call, **options))
_, bound, _ = app.parse_args(["generate", "x", "--wobble", "2", "--haste", "fast"])
print(request_options(bound.arguments["sampling"]), load_options(bound.arguments["model"]))
print(other_names()["--wibble"], other_names()["--hurry"])
if importlib.util.find_spec("fastapi"):
    from foredraft.serve.requests import ChatRequest
    print(ChatRequest.read({"model": "m", "messages": [], "wobble": 2}).options())
    print(ChatRequest.model_json_schema()["properties"]["wobble"]["anyOf"])
print("help")
main(["generate", "--help-all"])
"""
SAID = """2
haste: 'str | None' = None
True
wobble is 4; give from 0 to 3
unknown sampling option 'wibble'; its name is wobble
haste is 'no'; give one of slow, fast
unknown option 'hurry' of load; its name is haste
{'wobble': 2.0} {'haste': 'fast'}
--wobble --haste
""".splitlines()
SERVED = ["{'wobble': 2.0}", "[{'type': 'number'}, {'type': 'null'}]"]


@pytest.mark.heavy
def test_a_new_option_is_a_keyword_an_option_of_the_command_line_and_a_field_of_requests() -> None:
    """With its checks, its help and its hints: in a process where two more options are declared."""
    said, _, help = python("-c", ADDED + PROGRAM).partition("\nhelp\n")
    assert said.splitlines() in (SAID, SAID + SERVED)
    text = " ".join(help.split())
    assert "--wobble FLOAT How much the text wobbles. Default: not at all." in text
    assert "--haste CHOICE --device hurries with slow or fast. Default: slow." in text


@dataclass(frozen=True)
class Walk:
    """Options of a walk.

    Args:
        pace: Steps in a
            second; see `shoes`.
        shoes: A pair or several. Default: none.

    Raises:
        ConfigError: An option does not take its value.
    """

    pace: float = field(default=2.0, metadata=option(Number("0 or more"), elsewhere="speed -p"))
    shoes: tuple[str, ...] | None = field(default=None, metadata=option(Strings()))

    def __post_init__(self) -> None:
        check_fields(self, ConfigError)


class TestDeclaration:
    def test_it_has_the_help_of_the_docstring_and_the_rest_of_the_field(self) -> None:
        pace, shoes = declared(Walk).values()
        assert (pace.name, pace.default, pace.help) == ("pace", 2.0, "Steps in a second; see `shoes`.")
        assert (pace.meaning, pace.shown_default) == (pace.help, "2")
        assert (shoes.meaning, shoes.shown_default) == ("A pair or several.", "none")
        assert spelled_elsewhere(Walk) == {"speed": "pace", "-p": "pace"}

    def test_values_are_checked_and_kept_in_their_own_form(self) -> None:
        assert Walk(shoes="red").shoes == ("red",)  # type: ignore[arg-type]
        assert Walk(shoes=None).shoes is None
        for wrong in (-1, None, "2", True, float("nan")):
            with pytest.raises(ConfigError, match=r"^pace is .*; give 0 or more$"):
                Walk(pace=wrong)  # type: ignore[arg-type]

    def test_a_function_that_takes_the_fields_has_their_signature_and_help(self) -> None:
        @takes_fields_of(Walk)
        def walk(options: Walk) -> float:
            """Walk.

            Returns:
                The pace.
            """
            return options.pace

        assert walk(pace=3) == 3 and walk(4.0) == 4
        assert list(inspect.signature(walk).parameters) == ["pace", "shoes"]
        assert inspect.signature(walk).return_annotation == "float"
        assert "Args:\n    pace: Steps in a\n        second; see `shoes`.\n" in (walk.__doc__ or "")
        assert (walk.__doc__ or "").rstrip().endswith("Default: none.\n\nReturns:\n    The pace.")


@pytest.mark.parametrize(
    ("kind", "right", "wrong"),
    [
        (Number("x", most=1.0, above=True), [0.1, 1], [0, 1.1, "1", None, True, 10**400]),
        (Whole("x", least=1), [1, 2**31 - 1], [0, 1.0, True, 2**31]),
        (Flag(), [True, False], [1, "yes", None]),
        (Words(), ["", "a"], ["\ud800", 1, b"a"]),
        (Source("x"), ["a"], [1, None]),
        (Choice(names=("a", "b")), ["a"], ["c", ["a"], None]),
        (Strings(least=1), ["a", ["a"], ("a", "b")], ["", [], ["a", ""], {"a": 1}, [1]]),
        (Value(), [1, "a", None], []),
    ],
    ids=lambda value: type(value).__name__,
)
def test_a_kind_of_value_takes_and_refuses(kind: Value, right: list[Any], wrong: list[Any]) -> None:
    for value in right:
        assert kind.read(value) == (value if not isinstance(kind, Strings) else kind.read([*value]))
    for value in wrong:
        with pytest.raises(Unfit):
            kind.read(value)


def test_load_refuses_what_is_neither_true_nor_false() -> None:
    with pytest.raises(ConfigError, match=r"^deterministic is 'no'; give True or False$"):
        foredraft.load("./nowhere", deterministic="no")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "record",
    [LoadOptions, foredraft.SamplingParams, Settings, BenchSettings, TuneSettings, VerifySettings],
)
def test_every_option_has_a_line_of_help(record: type) -> None:
    assert all(each.meaning for each in declared(record).values())
