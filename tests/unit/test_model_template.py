"""Chat templates that ask for unbounded memory or time are refused before they get it."""

from __future__ import annotations

import tracemalloc

import pytest

from foredraft.errors import RequestError
from foredraft.model import template, template_limits
from foredraft.model.chat import ChatTemplate
from foredraft.model.template_growth import FILTERS, ITERATING, METHODS
from foredraft.model.template_limits import Meter

LIMIT = 2**19  # characters that a value may have in these tests
PEAK = 2**22  # bytes that a refused template may take

# Templates that make a value of about 10 MB.
SIZES = r"""
{{ 'a' * N }} {{ N * 'a' }}
{% set x = [1] * 2000000 %}
{% set x = 1000000 * (1, 2) %}
{{ 'a'.center(N) }} {{ 'a'.ljust(N) }} {{ 'a'.encode().rjust(N) }} {{ '1'.zfill(N) }} {{ '\t'.expandtabs(tabsize=N) }}
{{ 'a'|center(N) }} {{ ['a']|map('center', width=N)|list }} {{ ('a'|attr('center'))(N) }}
{% filter center(N) %}a{% endfilter %}
{{ '{:>10000000}'.format(1) }} {{ '{:{}}'.format(1, N) }} {{ '{:{w}}'.format(1, w=N) }} {{ '{:.10000000f}'.format(1.0) }}
{{ '{a:>10000000}'.format_map({'a': 1}) }} {% set f = '{:>10000000}'.format %}{{ f(1) }}
{{ '%10000000d' % 1 }} {{ '%*d' % (N, 1) }} {{ '%.*f' % (N, 1.0) }} {{ '%.10000000f' % 1.0 }}
{{ '%(a)10000000d' % {'a': 1} }} {{ '%10000000d'|format(1) }} {{ '%(a)10000000d'|format(a=1) }} {{ '%10000000d'.encode() % 1 }}
{{ ('%s' * 100) % ((a,) * 100) }}
{{ a.replace('', 'b' * 100) }} {{ a.replace('a', 'b' * 1000, 10000) }} {{ a|replace('a', 'b' * 1000) }}
{{ ('a' * 1000).join('b' * 10000) }} {{ ('b' * 10000)|join('a' * 1000) }} {{ ([a] * 100)|join }} {{ ''.join([a] * 100) }}
{{ range(10000)|map('string')|join('a' * 1000) }} {{ ('a' * 1000).join(range(10000)|map('string')) }}
{{ 'a'|batch(2000000, 'b')|first|length }} {{ 'a'|slice(200000)|list|length }}
{{ ('a\n' * 1000)|indent(10000) }} {{ 'a'|indent(N, true) }} {{ 'a'|indent(a * 20, true) }}
{{ [[1]]|tojson(indent=N) }} {{ ([1] * 1000)|tojson(indent='a' * 10000) }}
{{ a|wordwrap(1, true, 'b' * 100) }} {{ ('a' * 1000).translate({97: 'b' * 10000}) }} {{ (1).to_bytes(N, 'big') }}
{{ ([[1] * 100] * 500)|sum(start=[]) }} {{ (([[1] * 100] * 500)|map('list'))|sum(start=[]) }}
{{ (' a' * 100000).split() }} {{ ('\n' * 100000).splitlines() }} {{ ('a' * 200000).rsplit('a') }}
{% set n = namespace(x=a) %}{% for i in range(7) %}{% set n.x = n.x ~ n.x %}{% endfor %}
{% set n = namespace(x=a) %}{% for i in range(7) %}{% set n.x = n.x + n.x %}{% endfor %}
{% set n = namespace(x=[1] * 1000) %}{% for i in range(10) %}{% set n.x = n.x + n.x %}{% endfor %}
{% autoescape true %}{{ 'a' * N }}{% endautoescape %}
{{ range(1000)|list|tojson(separators=('b' * 10000, ':')) }} {{ ('{:100000}' * 100).format(*range(100)) }}
{{ ('http://a.de ' * 100)|urlize(target='b' * 100000) }} {{ ('http://a.de ' * 100)|urlize(rel='b' * 100000) }}
{{ ('漢' * 100000)|list }} {{ ('漢' * 100000)|batch(2)|list }} {{ ('漢' * 100000)|select|list }} {{ ('漢' * 100000)|sort }}
{{ ('漢' * 100000)|join }} {{ ''.join('漢' * 100000) }}
{% set x = cycler(*('漢' * 100000)) %}
{{ (' ab' * 100000)|title }} {{ (' ab' * 100000)|wordcount }}
"""
TUPLES = "{% set t, u = ('b',) * 9999, ('b',) * 9999 %}"
# Templates whose values are small, and take exponentially more when they are printed or compared.
SHARED = """
{% set n.x = [n.x, n.x] %}
{% set n.x = (n.x, n.x) %}
{% set n.x = {'a': n.x, 'b': n.x} %}
{% set n.x = dict(a=n.x, b=n.x) %}
{% set n.x = {}.fromkeys('ab', n.x) %}
{% set n.x = [n.x]|batch(2, n.x)|first %}
{% set n.x = [n.x] * 2 %}
""".strip().split("\n")  # fmt: skip


def cases() -> list[str]:
    """Return the templates of SIZES, one each."""
    found: list[str] = []
    for line in SIZES.strip().split("\n"):
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


def check_size(source: str) -> None:
    """Check that the template is refused before it has taken PEAK bytes."""
    template._compiled.cache_clear()
    tracemalloc.start()
    try:
        with pytest.raises(RequestError, match="it makes a value of more than 524288 characters"):
            render(source)
        assert tracemalloc.get_traced_memory()[1] < PEAK
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("source", cases())
def test_a_value_that_is_too_large_is_refused_before_it_is_made(small: None, source: str) -> None:
    check_size(source)


@pytest.mark.parametrize("source", cases())
def test_without_the_check_the_value_is_made(
    small: None, source: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Meter, "reserve", lambda meter, length: None)
    monkeypatch.setattr(Meter, "weigh", lambda meter, value: (0, 0))
    with pytest.raises((AssertionError, pytest.fail.Exception)):
        check_size(source)


@pytest.mark.parametrize("step", SHARED)
def test_a_value_that_holds_another_many_times_counts_it_as_often(step: str) -> None:
    source = "{% set n = namespace(x=['a']) %}{% for i in range(60) %}" + step + "{% endfor %}{{ n.x }}"
    with pytest.raises(RequestError, match="it makes a value of more than"):
        render(source)


@pytest.mark.parametrize(
    "number", ["9 ** (10**8)", "(9 ** 9999) * (9 ** 20000)", "1.5|round(10**9, 'floor')"]
)
def test_a_number_that_is_too_large_is_refused(number: str) -> None:
    with pytest.raises(RequestError, match="it makes a number of more than 65536 bits"):
        render("{{ " + number + " }}")


@pytest.mark.parametrize(
    ("source", "problem"),
    [
        ("{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}", "takes more than 0.05 seconds"),
        ("{% for i in range(99999) %}{% for j in range(99999) if false %}{% endfor %}{% endfor %}", "seconds"),
        ("{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}{{ m(60) }}", "seconds"),
        ("{% for i in range(99999) %}{% set x = range(9999)|sum %}{% endfor %}", "seconds"),
        ("{% for i in range(99999) %}{% set x = a.upper() %}{% endfor %}", "seconds"),
        ("{% for i in range(9) recursive %}{{ loop(range(9)) }}{% endfor %}", "seconds|recursion"),
        ("{% for i in range(10**9) %}{% endfor %}", "Range too big"),
        ("{{ strftime_now('%A' * 1000) }}", "formats the time by more than 1000 characters"),
        ("{{ lipsum(n=10**6) }}", "more than 100000 words"),
        ("{{ a.encode('punycode') }}", "uses the encoding 'punycode'"),
        ("{{ '%((a))9d' % {'(a)': 1} }}", "key with brackets"),
        ("{{ ('<!--' * 100000)|striptags }}", "makes a value"),
        ("{{ ([[1] * 1000] * 400)|pprint }}", "makes a value"),
        ("{% set n = namespace(x=[]) %}{% for i in range(999) %}{% set n.x = [n.x] %}{% endfor %}", "100 deep"),
        ("{{ (['b'] * 9999)|select('in', a * 9)|list }}", "seconds"),
        ("{{ (['b'] * 9999)|reject('in', a * 9)|list }}", "seconds"),
        ("{% set x = 'b' in a %}" * 5000, "seconds"),
        (TUPLES + "{% set x = t == u %}" * 5000, "seconds"),
        (TUPLES + "{% set x = {}[t] %}" * 5000, "seconds"),
        ("{{ (')' * 40000 ~ 'a)')|urlize }}", "makes a value"),
        ("{{ (a * 10)|wordwrap(1) }}", "makes a value"),
        ("{% set x %}{% for i in range(999) %}{{ a }}{% endfor %}{% endset %}", "makes a value"),
        ("{{ lipsum('a', max=10**7) }}", "more than 100000 words"),
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
    with pytest.raises(RequestError, match="it takes more than 32 MiB"):
        render(source)


def test_values_that_are_gone_again_do_not_count(monkeypatch: pytest.MonkeyPatch) -> None:
    """The values take 600 MB in all."""
    monkeypatch.setattr(template_limits, "MAX_BYTES", 2**28)
    monkeypatch.setattr(template_limits, "LOOK", 2**22)
    source = (
        "{% set n = namespace(t='', l=[]) %}{% for i in range(3000) %}{% set n.t = n.t ~ 'abcdefgh' * 10 %}"
        "{% set n.l = n.l + [i] %}{% endfor %}{{ n.t|length }} {{ n.l|length }}"
    )
    assert render(source) == "240000 3000"


def test_a_long_conversation_is_far_below_the_bounds(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two hundred messages of a thousand characters, in a template that builds its text step by step."""
    made, tick = list[int](), Meter.tick
    monkeypatch.setattr(Meter, "tick", lambda meter, size=0: made.append(size) or tick(meter, size))
    source = (
        "{% set n = namespace(all='') %}{% for m in messages %}{% set n.all = n.all"
        " + '<|' + m.role + '|>' + m.content.split('</think>')[-1].strip('\n') + '%s' % m.role %}{% endfor %}{{ n.all }}"
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
        ("{% for x in [[1, [2]]] recursive %}{{ loop(x) if x is iterable else x }}{% endfor %}", "12"),
        (
            "{% macro f(x, y=[1]) %}{{ x }}{{ y }}{{ caller() }}{% endmacro %}{% call f(m) %}c{% endcall %}",
            "user[1]c",
        ),
        ("{{ '{0} {x:>4} {y!r}'.format(1, x=2, y=m) }}{{ '{a}'.format_map({'a': m}) }}", "1    2 'user'user"),
        ("{{ '%s %05d %% %(x)s' % {'x': m} if false else '%s %03d %%' % (m, 5) }}", "user 005 %"),
        ("{{ [m, m]|join('-') }}{{ ','.join([m]) }}{{ range(3)|map('string')|join }}", "user-useruser012"),
        ("{{ m[1:] }}{{ [m, 2][:1] }}{{ m[::-1] }}", "ser['user']resu"),
        (
            "{{ ['a', 'b']|batch(3, '-')|list }}{{ 2 ** 10 }}{{ 2 ** -1 }}{{ 2.5|round }}",
            "[['a', 'b', '-']]10240.52.0",
        ),
        ("{{ m.upper().center(8, '*') }}{{ m|center(6) }}{{ ('a\nb')|indent }}", "**USER** user a\n    b"),
        ("{{ {'a': [1]}|tojson(indent=2) }}", '{\n  "a": [\n    1\n  ]\n}'),
        ("{{ [[1], [2]]|sum(start=[]) }}{{ [1, 2]|sum }}", "[1, 2]3"),
        ("{{ namespace(a=1) }}", "<Namespace>"),
        ("{{ ('<b>{}</b>{:>3}'|safe).format('<', 'x') }}", "<b>&lt;</b>  x"),
        ("{{ ('{a}'|safe).format_map({'a': '<'}) }}{{ '{}'.format('<') }}", "&lt;<"),
        ("{% set x|upper %}a{{ m }}{% endset %}{{ x }}{% set y %}{% endset %}{{ y }}", "AUSER"),
        (
            "{{ 1 < 2 < 3 }}{{ m in [m] }}{{ m is in [m] }}{{ m != 'a' }}{{ {'a': 1}['a'] }}{{ {m: 2}[m] }}",
            "TrueTrueTrueTrue12",
        ),
        (
            "{{ [1, 2, 3]|select('gt', 1)|list }}{{ m is defined }}{{ q is defined }}{{ 'upper' is filter }}",
            "[2, 3]TrueFalseTrue",
        ),
        (
            "{% macro f(x, y) %}{{ x }}{{ y }}{% endmacro %}{{ f(*[1, 2]) }}{{ f(*'ab') }}{{ f(**{'x': 3, 'y': 4}) }}",
            "12ab34",
        ),
        (
            "{% autoescape true %}{{ '<' ~ ('<b>'|safe) }}{{ '%s'|safe % '<' }}{% endautoescape %}",
            "&lt;<b>&lt;",
        ),
    ],
)
def test_counting_changes_no_text(source: str, text: str) -> None:
    rendered = ChatTemplate({"default": "{% set m = messages[0].role %}" + source}).render([{"role": "user"}])
    assert rendered == text


def test_every_estimate_belongs_to_a_method_or_a_filter() -> None:
    """The names of estimates that no template could ever use would hide a misspelt one."""
    for name in METHODS:
        assert any(hasattr(kind, name) for kind in (str, bytes, int))
    assert FILTERS.keys() | ITERATING <= template._environment().filters.keys()
