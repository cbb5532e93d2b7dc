"""Errors carry option, value, problem and remedy as fields, and one line joins them in either spelling."""

from __future__ import annotations

import pickle

import pytest

from foredraft.errors import CheckpointError, ConfigError, ForedraftError, Option, RequestError, shortened


def as_flag(option: Option) -> str:
    flag = f"--{option.name.replace('_', '-')}"
    return flag if not isinstance(option.value, str) else f"{flag} {option.value}"


@pytest.mark.parametrize(
    ("error", "python", "flags"),
    [
        (ConfigError("no prompt", remedy="give one"), "no prompt; give one", "no prompt; give one"),
        (ConfigError(option="max_draft", value=0, remedy="give 1 or more"), "max_draft is 0; give 1 or more", "--max-draft is 0; give 1 or more"),
        (
            ConfigError("which cpu cannot compute in", option="dtype", value="float16", remedy=("give ", Option("dtype", "bfloat16"))),
            "dtype is 'float16', which cpu cannot compute in; give dtype='bfloat16'",
            "--dtype is 'float16', which cpu cannot compute in; give --dtype bfloat16",
        ),
        (RequestError("names token 9", option="logit_bias"), "logit_bias names token 9", "--logit-bias names token 9"),
        (
            RequestError(("the cache is full beside ", Option("max_batch")), remedy=("lower ", Option("max_batch"))),
            "the cache is full beside max_batch; lower max_batch",
            "the cache is full beside --max-batch; lower --max-batch",
        ),
    ],
    ids=lambda value: None if isinstance(value, Exception) else str(value)[:30],
)  # fmt: skip
def test_one_line_joins_the_fields_in_either_spelling(error: ForedraftError, python: str, flags: str) -> None:
    assert str(error) == python
    assert error.describe(as_flag) == flags


def test_a_line_is_printable_whatever_it_quotes() -> None:
    error = CheckpointError("key a\nb\x1b\ud800 is not known: ä", option="stop", value="\ud800")
    assert str(error) == r"stop is '\ud800', key a b\x1b\ud800 is not known: ä"
    str(error).encode()


def test_a_value_is_shown_in_part_where_it_is_large() -> None:
    deep: list[object] = []
    for _ in range(100_000):
        deep = [deep]
    assert shortened(deep) == "a large list"
    assert shortened(10**5000) == "a large int"
    assert shortened("x" * 100) == "'" + 76 * "x" + "..."
    assert len(str(ConfigError(option="policy", value="x" * 10_000, remedy="give 'auto'"))) < 300


def test_wrong_options_and_requests_are_value_errors_and_checkpoints_are_not() -> None:
    assert issubclass(ConfigError, ValueError)
    assert issubclass(RequestError, ValueError)
    assert not issubclass(CheckpointError, ValueError)


def test_fields_are_readable_and_survive_pickling() -> None:
    error = ConfigError("but it is not", option="policy", value="fast", remedy="give 'auto'")
    again = pickle.loads(pickle.dumps(error))
    assert (again.option, again.value, again.problem, again.remedy) == (
        "policy",
        "fast",
        "but it is not",
        "give 'auto'",
    )
    assert str(again) == str(error)
