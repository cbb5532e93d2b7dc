"""Chat templates that ask for unbounded memory or time are refused before they get it."""

from __future__ import annotations

import tracemalloc
from collections.abc import Iterator

import pytest
from jinja2.defaults import DEFAULT_FILTERS, DEFAULT_TESTS
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

from foredraft.errors import RequestError
from foredraft.model import template, template_functions, template_limits, template_sandbox
from foredraft.model.chat import ChatTemplate
from foredraft.model.template_limits import Meter
from foredraft.model.template_metering import Metering
from foredraft.model.template_sandbox import Environment

LIMIT = 2**19  # characters that a value may have in these tests
PEAK = 2**23  # bytes that a refused template may take

# Templates that make a value of about 10 MB, or a list of as many bytes, out of names that may be used.
SIZES = r"""
{{ 'a' * N }} {{ N * 'a' }}
{% set x = [1] * 2000000 %}
{% set x = 1000000 * (1, 2) %}
{{ a.replace('', 'b' * 100) }} {{ a.replace('a', 'b' * 1000, 10000) }} {{ a|replace('a', 'b' * 1000) }}
{{ ('a' * 1000).join('b' * 10000) }} {{ ('b' * 10000)|join('a' * 1000) }} {{ ([a] * 100)|join }} {{ ''.join([a] * 100) }}
{{ range(10000)|map('string')|join('a' * 1000) }} {{ ('a' * 1000).join(range(10000)|map('string')) }}
{{ ('a\n' * 1000)|indent(10000) }} {{ 'a'|indent(N, true) }} {{ 'a'|indent(a * 200, true) }}
{{ [[1]]|tojson(indent=N) }} {{ ([1] * 1000)|tojson(indent='a' * 10000) }} {{ ([[1] * 100] * 100)|tojson(indent=100) }}
{{ (' a' * 100000).split() }} {{ ('a' * 200000).split('a') }} {{ ('a' * 200000).split('a', 199999) }}
{% set n = namespace(x=a) %}{% for i in range(7) %}{% set n.x = n.x ~ n.x %}{% endfor %}
{% set n = namespace(x=a) %}{% for i in range(7) %}{% set n.x = n.x + n.x %}{% endfor %}
{% set n = namespace(x=[a]) %}{% for i in range(7) %}{% set n.x = n.x + n.x %}{% endfor %}
{{ range(1000)|list|tojson(separators=('b' * 10000, ':')) }} {{ ('{0}' * 100).format(a) }}
{{ ('漢' * 20000)|list }} {{ ('漢' * 20000)|select|list }} {{ ('漢' * 20000)|sort }} {{ ('漢' * 20000)|unique|list }}
{{ ('漢' * 20000)|join }} {{ ''.join('漢' * 20000) }} {{ ('漢' * 20000)|map('upper')|list }}
{% set x %}{% for i in range(999) %}{{ a }}{% endfor %}{% endset %}
"""
# The same by names that no published template uses.
NAMED = r"""
{{ 'a'.center(N) }} {{ 'a'.ljust(N) }} {{ 'a'.encode().rjust(N) }} {{ '1'.zfill(N) }} {{ '\t'.expandtabs(tabsize=N) }}
{{ 'a'|center(N) }} {{ ['a']|map('center', width=N)|list }} {{ ('a'|attr('center'))(N) }}
{% filter center(N) %}a{% endfilter %}
{{ '{:>10000000}'.format(1) }} {{ '{:{}}'.format(1, N) }} {{ '{:{w}}'.format(1, w=N) }} {{ '{:.10000000f}'.format(1.0) }}
{{ '{a:>10000000}'.format_map({'a': 1}) }} {{ ('{:>10000000}'|safe).format(1) }}
{% set f = '{:>10000000}'.format %}{{ f(1) }}
{{ '%10000000d' % 1 }} {{ '%*d' % (N, 1) }} {{ '%.*f' % (N, 1.0) }} {{ '%.10000000f' % 1.0 }}
{{ '%(a)10000000d' % {'a': 1} }} {{ '%10000000d'|format(1) }} {{ '%(a)10000000d'|format(a=1) }} {{ '%10000000d'.encode() % 1 }}
{{ ('%s' * 100) % ((a,) * 5) }}
{{ 'a'|batch(2000000, 'b')|first|length }} {{ 'a'|slice(200000)|list|length }} {{ ('漢' * 100000)|batch(2)|list }}
{{ a|wordwrap(1, true, 'b' * 100) }} {{ ('a' * 1000).translate({97: 'b' * 10000}) }} {{ (1).to_bytes(N, 'big') }}
{{ ([[1] * 100] * 500)|sum(start=[]) }} {{ (([[1] * 100] * 500)|map('list'))|sum(start=[]) }}
{{ ('\n' * 100000).splitlines() }} {{ ('{:100000}' * 100).format(*range(100)) }}
{% autoescape true %}{{ 'a' * N }}{% endautoescape %}
{{ ('http://a.de ' * 100)|urlize(target='b' * 100000) }} {{ ('http://a.de ' * 100)|urlize(rel='b' * 100000) }}
{% set x = cycler(*('漢' * 100000)) %}
{{ (' ab' * 100000)|title }} {{ (' ab' * 100000)|wordcount }}
"""
LONG = "{% set b, t, u = a * 300, ('b',) * 400000, ('b',) * 400000 %}"
# Templates whose values are small, and take exponentially more when they are printed or compared.
SHARED = """
{% set n.x = [n.x, n.x] %}
{% set n.x = (n.x, n.x) %}
{% set n.x = {'a': n.x, 'b': n.x} %}
{% set n.x = [n.x] * 2 %}
{% set n.x = [n.x]|list + [n.x] %}
""".strip().split("\n")  # fmt: skip


def cases(table: str) -> list[str]:
    """Return the templates of a table, one each."""
    found: list[str] = []
    for line in table.strip().split("\n"):
        found += (
            [line]
            if "{%" in line and "{{" not in line.split("{%")[0]
            else line.replace(" {{", "\0{{").split("\0")
        )
    return found


def render(source: str) -> str:
    messages = [{"role": "user", "content": "a" * 100_000}]
    start = "{% set N = 10000000 %}{% set a = messages[0].content %}"
    return ChatTemplate({"default": start + source}).render(messages)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (template, template_limits):
        monkeypatch.setattr(module, "MAX_LENGTH", LIMIT)
    for module in (template_functions, template_limits):
        monkeypatch.setattr(module, "MAX_ITEMS", LIMIT // template_limits.ITEM)


def check(source: str, problem: str) -> None:
    """Check that the template is refused before it has taken PEAK bytes."""
    for each in (template._compiled, template.variables_of):
        each.cache_clear()
    tracemalloc.start()
    try:
        with pytest.raises(RequestError, match=problem):
            render(source)
        assert tracemalloc.get_traced_memory()[1] < PEAK
    finally:
        tracemalloc.stop()


TOO_LARGE = (
    "it makes a value of more than 524288 characters|it makes a list of more than 8192 items|it indents JSON"
)
UNKNOWN = "is not among those that published chat templates use"


@pytest.mark.parametrize("source", cases(SIZES))
def test_a_value_that_is_too_large_is_refused_before_it_is_made(small: None, source: str) -> None:
    check(source, TOO_LARGE)


@pytest.mark.parametrize("source", cases(SIZES))
def test_without_the_meter_the_value_is_made(
    small: None, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("reserve", "reserve_items"):
        monkeypatch.setattr(Meter, name, lambda meter, length: None)
    monkeypatch.setattr(Meter, "weigh", lambda meter, value: (0, 0))
    monkeypatch.setattr(template_functions, "MAX_INDENT", 10**9)
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        check(source, TOO_LARGE)


@pytest.mark.parametrize("source", cases(NAMED))
def test_a_name_that_makes_a_large_value_is_refused_before_it_does(small: None, source: str) -> None:
    check(source, UNKNOWN)


@pytest.fixture
def permissive(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Names are not refused, as in Jinja's own sandbox."""
    for name in ("call_binop", "is_safe_attribute", "wrap_str_format"):
        monkeypatch.setattr(Environment, name, getattr(ImmutableSandboxedEnvironment, name))
    monkeypatch.setattr(Metering, "visit", NodeTransformer.visit)
    monkeypatch.setattr(template_sandbox, "WHOLE_FILTERS", frozenset(DEFAULT_FILTERS))
    monkeypatch.setattr(template_sandbox, "FUNCTIONS", frozenset({"cycler", "namespace", "range"}))
    for each in (template._environment, template._compiled, template.variables_of):
        each.cache_clear()
    yield
    for each in (template._environment, template._compiled, template.variables_of):
        each.cache_clear()


@pytest.mark.parametrize("source", ["{{ 'a'.center(N) }}", "{{ 'a'|center(N) }}", "{{ '%10000000d' % 1 }}"])
def test_without_the_tables_the_value_is_made(small: None, permissive: None, source: str) -> None:
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        check(source, UNKNOWN)


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("{{ a|urlize }}", "the filter 'urlize'"),
        ("{{ [a]|map('urlize')|list }}", "the filter 'urlize'"),
        ("{{ a is escaped }}", "the test 'escaped'"),
        ("{{ [a]|select('escaped')|list }}", "the test 'escaped'"),
        ("{{ lipsum() }}", "the function 'lipsum'"),
        ("{{ dict(a=1) }}", "the function 'dict'"),
        ("{{ dict.fromkeys('ab') }}", "the function 'dict'"),
        ("{{ a.rfind(a) }}", "the attribute 'rfind' of str"),
        ("{{ a.zfill(3) }}", "the attribute 'zfill' of str"),
        ("{{ a['zfill'](3) }}", "the attribute 'zfill' of str"),
        ("{{ messages[0].copy() }}", "the attribute 'copy' of dict"),
        ("{{ messages.index(1) }}", "the attribute 'index' of list"),
        ("{{ (1).bit_length() }}", "the attribute 'bit_length' of int"),
        ("{{ 2 ** 3 }}", r"the operator '\*\*'"),
        ("{{ '%s' % a }}", "the operator '%'"),
        ("{{ '{:>3}'.format(1) }}", "the format '>3'"),
        ("{% block b %}{% endblock %}", "the statement 'block'"),
        ("{% include 'a' %}", "the statement 'include'"),
        ("{% for x in a recursive %}{% endfor %}", "the loop modifier 'recursive'"),
        ("{{ range(*[1]) }}", r"the argument '\*'"),
        ("{{ namespace(**{'a': 1}) }}", r"the argument '\*'"),
    ],
)  # fmt: skip
def test_what_published_templates_do_without_is_refused_by_name(source: str, name: str) -> None:
    with pytest.raises(
        RequestError, match=rf"\({name} {UNKNOWN}\); change the messages, or put another"
    ) as caught:
        render(source)
    assert "\n" not in str(caught.value)


def test_a_name_in_a_branch_that_is_not_taken_is_no_error() -> None:
    assert (
        render("{% if false %}{{ a|urlize }}{{ a.zfill(3) }}{{ a is escaped }}{{ dict(a=1) }}{% endif %}b")
        == "b"
    )


def test_every_name_of_the_tables_is_known_to_jinja_or_python() -> None:
    """A misspelt name would be in no template."""
    assert DEFAULT_FILTERS.keys() >= template_sandbox.WHOLE_FILTERS | template_sandbox.ITEM_FILTERS
    assert template_functions.FILTERS.keys() <= template_sandbox.WHOLE_FILTERS | template_sandbox.ITEM_FILTERS
    assert DEFAULT_TESTS.keys() >= template_sandbox.TESTS
    assert template._environment().globals.keys() >= template_sandbox.FUNCTIONS
    assert {*dir(str)} >= template_sandbox.METHODS_OF_STR
    assert {*dir(dict)} >= template_sandbox.METHODS_OF_DICT


@pytest.mark.parametrize("step", SHARED)
def test_a_value_that_holds_another_many_times_counts_it_as_often(step: str) -> None:
    source = "{% set n = namespace(x=['a']) %}{% for i in range(60) %}" + step + "{% endfor %}{{ n.x }}"
    with pytest.raises(RequestError, match="it makes a value of more than"):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{% set n = namespace(x=99) %}{% for i in range(99) %}{% set n.x = n.x * n.x %}{% endfor %}",
        "{{ ('f' * 100000)|int(base=16) }}",
    ],
)
def test_a_number_that_is_too_large_is_refused(source: str) -> None:
    with pytest.raises(RequestError, match="it makes a number of more than 65536 bits"):
        render(source)


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("{% set r = range(9999)|list %}{% for i in r %}{% for j in r %}{% endfor %}{% endfor %}", "takes more than 0.05 seconds"),
        ("{% for i in range(99999) %}{% for j in range(99999) if false %}{% endfor %}{% endfor %}", "seconds"),
        ("{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}", "seconds"),
        ("{% for i in range(99999) %}{% set x = range(9999)|max %}{% endfor %}", "seconds"),
        ("{% for i in range(99999) %}{% set x = a.upper() %}{% endfor %}", "seconds"),
        ("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}", "seconds|recursion"),
        ("{% for i in range(999999999) %}{% endfor %}", "Range too big"),
        ("{{ strftime_now('%A' * 1000) }}", "formats the time by more than 1000 characters"),
        ("{% set n = namespace(x=[]) %}{% for i in range(999) %}{% set n.x = [n.x] %}{% endfor %}", "100 deep"),
        ("{{ (['b'] * 9999)|select('in', a * 9)|list }}", "seconds"),
        ("{{ (['b'] * 9999)|reject('in', a * 9)|list }}", "seconds"),
        (LONG + "{% set x = 'b' in b %}" * 200, "seconds"),
        (LONG + "{% set x = t == u %}" * 50, "seconds"),
        (LONG + "{% set x = {}[t] %}" * 50, "seconds"),
        ("{{ range(99999)|map(attribute='a.' * 99999, default=1)|list }}", "seconds"),
        (LONG + "{% set x = b.count('b') %}" * 200, "seconds"),
        ("{{ a.strip(a) }}", "it strips more than 100 characters"),
        ("{{ a|trim(a) }}", "it strips more than 100 characters"),
        ("{{ ('{0}' * 999999).format('') }}", "seconds"),
        ("a" * 200_000, "it is longer than 131072 characters"),
    ],
)  # fmt: skip
def test_a_template_that_takes_too_long_is_stopped(
    source: str, problem: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(template_limits, "MAX_SECONDS", 0.05)
    with pytest.raises(RequestError, match=problem):
        render(source)


KEPT = [
    "{% set n = namespace(x=none) %}{% for i in range(99999) %}{% set n.x = namespace(x=n.x, t=a ~ i) %}{% endfor %}",
    "{% set n = namespace(x=none) %}{% for i in range(99999) %}{% set n.x = namespace(x=n.x, t=a[1:]) %}{% endfor %}",
    "{% set n = namespace(x=none) %}{% for i in range(99999) %}{% set n.x = namespace(x=n.x, t=a|upper) %}{% endfor %}",
    "{% set n = namespace(x=none) %}{% for i in range(99999) %}{% set n.x = namespace(x=n.x, t=range(9999)|list) %}"
    "{% endfor %}",
    "{% set n = namespace(x=none) %}{% for i in range(99999) %}{% set t %}{{ a }}{{ i }}{% endset %}"
    "{% set n.x = namespace(x=n.x, t=t) %}{% endfor %}",
    "{% set x %}{% for i in range(99999) %}" + 2000 * "x" + "{{ i }}{% endfor %}{% endset %}",
    "{% macro m() %}" + 2000 * "x" + "{% endmacro %}{% set x %}{% for i in range(99999) %}{{ m() }}{% endfor %}{% endset %}",
]  # fmt: skip


@pytest.mark.parametrize("visible", [True, False])
@pytest.mark.parametrize("source", KEPT)
def test_the_memory_of_all_values_together_is_bounded(
    source: str, visible: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where the system does not say how much memory the process holds."""
    monkeypatch.setattr(template_limits, "MAX_BYTES", 2**25)
    monkeypatch.setattr(template_limits, "LOOK", 2**22)
    if not visible:
        monkeypatch.setattr(template_limits, "_resident", lambda: None)
    monkeypatch.setattr(template_limits, "MAX_LENGTH", 2**24)
    with pytest.raises(RequestError, match="it takes more than 32 MiB|it makes a value of more than"):
        render(source)


def test_values_that_are_gone_again_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """The values take 280 MB in all."""
    monkeypatch.setattr(template_limits, "MAX_BYTES", 2**27)
    monkeypatch.setattr(template_limits, "LOOK", 2**22)
    source = (
        "{% set n = namespace(t='', l=[]) %}{% for i in range(2000) %}{% set n.t = n.t ~ 'abcdefgh' * 10 %}"
        "{% set n.l = n.l + [i] %}{% endfor %}{{ n.t|length }} {{ n.l|length }}"
    )
    assert render(source) == "160000 2000"


def test_a_long_conversation_is_far_below_the_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two hundred messages of a thousand characters, in a template that builds its text step by step."""
    made, tick = list[int](), Meter.tick
    monkeypatch.setattr(Meter, "tick", lambda meter, size=0: made.append(size) or tick(meter, size))
    source = (
        "{% set n = namespace(all='') %}{% for m in messages %}{% set n.all = n.all"
        " + '<|' + m.role + '|>' + m.content.split('</think>')[-1].strip('\n') + m.role|trim %}{% endfor %}{{ n.all }}"
    )
    messages = [{"role": "user", "content": "x" * 1000}] * 200
    assert len(ChatTemplate({"default": source}).render(messages)) == 200 * 1012
    assert sum(made) < template_limits.MAX_BYTES / 10


@pytest.mark.parametrize(
    ("source", "text"),
    [
        (
            "{{ [1, [2, m]] }}{{ (1, m) }}{{ {'a': m, 'b': [m]} }}",
            "[1, [2, 'user']](1, 'user'){'a': 'user', 'b': ['user']}",
        ),
        ("{{ 1 ~ m ~ none ~ 2.5 }}", "1userNone2.5"),
        ("{% for k, v in {'a': m}.items() if v %}{{ k }}{{ v }}{{ loop.last }}{% endfor %}", "auserTrue"),
        (
            "{% macro f(x, y=[1]) %}{{ x }}{{ y }}{{ caller() }}{% endmacro %}{% call f(m) %}c{% endcall %}",
            "user[1]c",
        ),
        ("{{ '{0} {x} {y!r} {{}} {z[a]}'.format(1, x=2, y=m, z={'a': 3}) }}", "1 2 'user' {} 3"),
        ("{{ [m, m]|join('-') }}{{ ','.join([m]) }}{{ range(3)|map('string')|join }}", "user-useruser012"),
        ("{{ m[1:] }}{{ [m, 2][:1] }}{{ m[::-1] }}", "ser['user']resu"),
        (
            "{{ m.upper() }}{{ ' a '.strip() }}{{ 'xax'.strip('x') }}{{ ' a '|trim }}{{ ('a\nb')|indent }}{{ 'a-b-c'.split('-', 1) }}{{ 'a b'.split() }}",
            "USERaaaa\n    b['a', 'b-c']['a', 'b']",
        ),
        ("{{ {'a': [1]}|tojson(indent=2) }}", '{\n  "a": [\n    1\n  ]\n}'),
        (
            "{{ 'aaa'.replace('a', 'bc', 2) }}{{ 'aaa'|replace('a', 'b') }}{{ 11|replace(1, 2) }}",
            "bcbcabbb22",
        ),
        ("{{ 3 * 'ab' }}{{ 2 * [1] }}{{ 3 * 4 }}{{ 7 % 4 }}{{ 1.5 * 2 }}", "ababab[1, 1]1233.0"),
        ("{{ namespace(a=1) }}", "<Namespace>"),
        ("{{ ('<b>'|safe) + '<' }}{{ ('<b>'|safe) ~ '<' }}{{ ('-'|safe).join(['<']) }}", "<b>&lt;<b><&lt;"),
        ("{% set x|upper %}a{{ m }}{% endset %}{{ x }}{% set y %}{% endset %}{{ y }}", "AUSER"),
        (
            "{{ 1 < 2 < 3 }}{{ m in [m] }}{{ m is in [m] }}{{ m != 'a' }}{{ {'a': 1}['a'] }}{{ {m: 2}[m] }}",
            "TrueTrueTrueTrue12",
        ),
        (
            "{{ [1, 2, 3]|select('ne', 1)|list }}{{ m is defined }}{{ q is defined }}{{ [2, 1]|sort|first }}",
            "[2, 3]TrueFalse1",
        ),
    ],
)
def test_counting_changes_no_text(source: str, text: str) -> None:
    rendered = ChatTemplate({"default": "{% set m = messages[0].role %}" + source}).render([{"role": "user"}])
    assert rendered == text
