"""Chat templates render as in transformers' sandbox, and one that runs away is stopped."""

from __future__ import annotations

import time
import tracemalloc
from collections.abc import Callable
from typing import Any

import pytest
from jinja2 import pass_context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from transformers.utils.chat_template_utils import _compile_jinja_template

from foredraft.errors import RequestError
from foredraft.model import template
from foredraft.model.chat import ChatTemplate
from foredraft.model.template import MAX_LENGTH
from tests.support.mutation import Mutant, Mutation, assert_caught, defect

MESSAGES = [{"role": "user", "content": "a" * 100_000}]
PEAK = 2**21  # bytes that a refused template may take beside its source


def render(source: str) -> str:
    return ChatTemplate({"default": source}).render(MESSAGES)


def clear_caches() -> None:
    for each in (template._environment, template._compiled, template.variables_of):
        each.cache_clear()


LARGE = f"it makes a value of more than {MAX_LENGTH} characters"
LONG_NUMBER = "it makes a number of more than 65536 bits"
PRODUCTS = [
    ("{{ 'a' * 40000000 }}", LARGE),
    ("{{ 40000000 * 'a' }}", LARGE),
    ("{{ messages[0].content * 400 }}", LARGE),
    ("{% set x = [1] * 40000000 %}", LARGE),
    ("{% set x = 20000000 * (1, 2) %}", LARGE),
    ("{% set n = namespace(x=99) %}{% for i in range(16) %}{% set n.x = n.x * n.x %}{% endfor %}", LONG_NUMBER),
    ("{% set x = 9 ** 99999 %}", LONG_NUMBER),
    ("{% set n = 9 %}{% set x = n ** (n ** n) %}", LONG_NUMBER),
]  # fmt: skip


@pytest.mark.parametrize(("source", "problem"), PRODUCTS)
def test_a_product_that_is_too_large_is_refused_before_it_is_made(source: str, problem: str) -> None:
    """In one line, and before it has taken PEAK bytes."""
    clear_caches()
    tracemalloc.start()
    try:
        with pytest.raises(RequestError, match=problem) as caught:
            render(source)
        assert tracemalloc.get_traced_memory()[1] < PEAK
    finally:
        tracemalloc.stop()
    assert "\n" not in str(caught.value) and "put another chat_template.jinja" in str(caught.value)


LOOPS = [
    "{% set r = range(2000)|list %}{% for i in r %}{% for j in r %}{% endfor %}{% endfor %}",
    "{% for i in range(2000) %}{% for j in range(2000) if false %}{% endfor %}{% endfor %}",
    "{% macro m() %}{% for i in range(2000) %}{% for j in range(2000) %}{% endfor %}{% endfor %}{% endmacro %}{{ m() }}",
    "{% generation %}{% for i in range(2000) %}{% for j in range(2000) %}{% endfor %}{% endfor %}{% endgeneration %}",
]  # fmt: skip
ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}" + "x" * 999 + "{% endfor %}" * 2
CALLS = ["{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(16) }}"]


@pytest.mark.parametrize("source", LOOPS + CALLS)
def test_a_template_that_takes_too_long_is_stopped(source: str) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(template, "MAX_SECONDS", 0.05)
        began = time.thread_time()
        with pytest.raises(RequestError, match=r"\(it takes more than 0.05 seconds\)"):
            render(source)
        assert time.thread_time() - began < 0.3


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("{% for i in range(999999999) %}{% endfor %}", "Range too big"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "recursion"),
        ("a" * 200_000, "it is longer than 131072 characters"),
        (ENDLESS, r"\(its text is longer than 33554432 characters\)"),
    ],
)
def test_other_templates_that_run_away_are_refused(source: str, problem: str) -> None:
    with pytest.raises(RequestError, match=problem):
        render(source)


def test_a_long_conversation_is_far_below_the_bounds() -> None:
    """Two hundred messages of a thousand characters, in a template that builds its text step by step."""
    source = (
        "{% set n = namespace(all='') %}{% for m in messages %}{% set n.all = n.all"
        " + '<|' + m.role + '|>' + m.content.split('</think>')[-1].strip('\n') + m.role|trim %}{% endfor %}{{ n.all }}"
    )
    messages = [{"role": "user", "content": "x" * 1000}] * 200
    began = time.thread_time()
    assert len(ChatTemplate({"default": source}).render(messages)) == 200 * 1012
    assert time.thread_time() - began < template.MAX_SECONDS / 10


TABLE = r"""
{{ [1, [2, m]] }}{{ (1, m) }}{{ {'a': m, 'b': [m]} }}{{ 1 ~ m ~ none ~ 2.5 }}
{% for k, v in {'a': m}.items() if v %}{{ k }}{{ v }}{{ loop.last }}{{ loop.length }}{{ loop.revindex }}{% endfor %}
{% for x in [1, 2, 3] %}{{ loop.previtem }}{{ loop.nextitem }}{% if x == 2 %}{% break %}{% endif %}{% else %}e{% endfor %}
{% for x in [[1, [2]], [3]] recursive %}{{ x if x is number else loop(x) }},{% endfor %}{% for x in [] %}{% else %}e{% endfor %}
{% for x in undefined_one %}{{ x }}{% endfor %}{% for x in 'abc' %}{{ x }}{{ loop.index0 }}{% endfor %}{% for x in {'a': 1} %}{{ x }}{% endfor %}
{% macro f(x, y=[1]) %}{{ x }}{{ y }}{{ caller() }}{% endmacro %}{% call f(m) %}c{% endcall %}{{ f.name }}
{{ '{0} {x} {y!r} {{}} {z[a]}'.format(1, x=2, y=m, z={'a': 3}) }}{{ '{:>9}'.format(m) }}{{ '%5s|%d' % (m, 3) }}{{ '%s'|format(m) }}
{{ [m, m]|join('-') }}{{ ','.join([m]) }}{{ range(3)|map('string')|join }}{{ m[1:] }}{{ [m, 2][:1] }}{{ m[::-1] }}
{{ m.upper() }}{{ 'xax'.strip('x') }}{{ ' a '|trim }}{{ ('a\nb')|indent }}{{ 'a-b-c'.split('-', 1) }}{{ 'a b'.rsplit() }}
{{ {'a': ['<é>'], 'b': 1}|tojson }}{{ {'b': 1, 'a': [1]}|tojson(indent=2, sort_keys=true) }}{{ [1]|tojson(separators=(',', ':')) }}
{{ 'aaa'.replace('a', 'bc', 2) }}{{ 'aaa'|replace('a', 'b') }}{{ 3 * 'ab' }}{{ 2 * [1] }}{{ 3 * 4 }}{{ 2 ** 3 }}{{ 2 ** -1 }}{{ 1.5 * 2 }}{{ 7 % 4 }}
{{ namespace(a=1) }}{{ dict(a=1, b=m) }}{{ dict.fromkeys('ab', 1) }}{{ dict([('a', 1)]).a }}{% set c = cycler(1, 2) %}{{ c.next() }}{{ c.next() }}
{{ ('<b>'|safe) + '<' }}{{ ('<b>'|safe) ~ '<' }}{{ ('-'|safe).join(['<']) }}{{ ('<'|safe) * 2 }}{{ '<'|escape }}{{ m is escaped }}
{% set x|upper %}a{{ m }}{% endset %}{{ x }}{% filter center(9) %}a{% endfilter %}{% generation %}{{ m }}{% set q = 1 %}{% endgeneration %}{{ q }}
{{ [3, 1]|sort|first }}{{ [{'a': 1}, {'a': 2}]|selectattr('a', 'ne', 1)|list }}{{ [1, 2]|batch(2)|list }}{{ m|wordcount }}{{ m.zfill(9) }}
{{ range(*[2])|list }}{{ namespace(**{'a': 1}).a }}{{ m.rfind('e') }}{{ messages[0].copy() }}{{ [1, 2].index(2) }}{{ (5).bit_length() }}
{% set n = namespace(self=1, values=2, made=3) %}{% set n.self = 4 %}{{ n.self }}{{ n.values }}{{ n.made }}{{ namespace({'a': 1}, b=2).a }}
{% block b %}{{ 1 }}{% endblock %}{{ self.b() }}{% autoescape true %}{{ '<' }}{% endautoescape %}{{ m|attr('upper') is callable }}
   {% if m %}
  x   {#- c -#}   y {%+ if true %}z{% endif %}
{% for i in [1] %}
    {{ i }}
  {%- endfor %}
{% endif %}
""".strip("\n")  # fmt: skip
SOURCES = TABLE.split("\n", 18)  # the last one is about lines, so it keeps them


@pytest.mark.parametrize("source", SOURCES)
def test_templates_render_as_in_transformers(source: str) -> None:
    source, messages = "{% set m = messages[0].role %}" + source, [{"role": "user", "content": "b"}]
    values: dict[str, Any] = {"messages": messages, "tools": None, "documents": None}
    expected = _compile_jinja_template(source).render(**values)
    assert ChatTemplate({"default": source}).render(messages) == expected


def nothing(sound: Any) -> Any:
    return lambda *_: None


def as_in_the_library(name: str) -> Mutation:
    return lambda sound: getattr(ImmutableSandboxedEnvironment, name)


def refused(case: tuple[str, str]) -> Callable[[], None]:
    return lambda: test_a_product_that_is_too_large_is_refused_before_it_is_made(*case)


def stopped(source: str) -> Callable[[], None]:
    return lambda: test_a_template_that_takes_too_long_is_stopped(source)


def renders(number: int) -> Callable[[], None]:
    return lambda: test_templates_render_as_in_transformers(SOURCES[number])


def escaped(sound: Any) -> Any:
    return lambda value, *given, **named: sound(value, *given, **named).replace("<", "&lt;")


def without_a(sound: Any) -> Any:
    return pass_context(lambda context, values: [each for each in sound(context, values) if each != "a"])


CAUGHT: Any = (AssertionError, pytest.fail.Exception)  # the second: nothing was raised
ENVIRONMENT, KEYS_ALONE = template.Environment, lambda sound: lambda self, keys, *values: dict.fromkeys(keys)
MUTANTS = [
    *(defect("unbounded", template._check_size, nothing, refused(PRODUCTS[case]), CAUGHT) for case in (2, 5, 6)),
    *(defect("untimed", template._check_time, nothing, stopped(each), CAUGHT) for each in (LOOPS[0], CALLS[0])),
    defect("a loop untimed", ENVIRONMENT._parse, as_in_the_library("_parse"), stopped(LOOPS[0]), CAUGHT),
    defect("a call untimed", ENVIRONMENT.call, as_in_the_library("call"), stopped(CALLS[0]), CAUGHT),
    defect("JSON escaped for HTML", template._to_json, escaped, renders(9)),
    defect("values of dict.fromkeys lost", template.Dictionary.fromkeys, KEYS_ALONE, renders(11)),
    defect("items of loops lost", template._timed, without_a, renders(4)),
]  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_defect_is_caught(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    clear_caches()
    assert_caught(mutant, monkeypatch)
    clear_caches()
