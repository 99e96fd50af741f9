/* The interpreter: the oracle's cases, errors and their lines, scoping, limits.
 * With --lines it is a driver for the differential test: JSON lines {"template", "context"} in,
 * {"text"} or {"error", "id"} out. */
#include "base/file.h" /* before cmocka.h, whose macro fail() would hide ours */
#include "base/json.h"
#include "text/jinja.h"

#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define ORACLE "tests/oracle/qwen36-tiny/"

static bool render_vars(str source, const json *context, const jinja_limits *l, buf *out, err *e) {
    jinja *t;
    char *copy = malloc(source.n ? source.n : 1); /* exact size: reads behind it are seen by ASan */
    if (source.n) memcpy(copy, source.p, source.n);
    bool ok = jinja_compile(&t, (str){ copy, source.n }, e);
    free(copy); /* a compiled template does not point into its source */
    if (!ok) return false;
    const uint32_t n = context ? context->n : 0;
    jinja_var *v = malloc((n + 1) * sizeof *v);
    for (uint32_t i = 0; i < n; i++)
        v[i] = (jinja_var){ .name = context->u.members[i].key, .value = &context->u.members[i].value };
    ok = jinja_render(t, out, v, n, l, e);
    free(v);
    jinja_free(t);
    return ok;
}

static bool render(const char *source, const char *context, const jinja_limits *l, buf *out, err *e) {
    arena a = { 0 };
    const json *v = NULL;
    if (context && !json_parse(&v, &a, str_of(context), "context", NULL, e)) fail_msg("context: %s", e->msg);
    const bool ok = render_vars(str_of(source), v, l, out, e);
    arena_free(&a);
    return ok;
}

static void gives(const char *source, const char *context, const char *want) {
    buf b = { 0 };
    err e = { 0 };
    if (!render(source, context, NULL, &b, &e)) fail_msg("%s: %s: %s", source, e.id, e.msg);
    if (!str_is(buf_view(&b), want)) fail_msg("%s: got '%s', want '%s'", source, b.p, want);
    buf_free(&b);
}

/* Fails with this id and with `part` in its message; the output keeps what it had. */
static void fails(const char *source, const char *context, const jinja_limits *l, const char *id, const char *part) {
    buf b = { 0 };
    err e = { 0 };
    buf_puts(&b, "before");
    if (render(source, context, l, &b, &e)) fail_msg("%s: accepted, gives '%s'", source, b.p);
    if (strcmp(e.id, id) != 0 || !strstr(e.msg, part))
        fail_msg("%s: %s: %s (want %s with '%s')", source, e.id, e.msg, id, part);
    assert_string_equal(b.p, "before");
    buf_free(&b);
}

static void oracle_cases(void **state) {
    (void)state;
    arena a = { 0 };
    const json *all;
    err e = { 0 };
    if (!json_parse_file(&all, &a, ORACLE "jinja.json", NULL, &e)) fail_msg("%s", e.msg);
    assert_int_equal(all->n, 53);
    for (uint32_t i = 0; i < all->n; i++) {
        const json *c = &all->u.items[i], *text = json_get(c, "text");
        const str source = json_str(json_get(c, "template"));
        buf b = { 0 };
        err why = { 0 };
        const bool ok = render_vars(source, json_get(c, "context"), NULL, &b, &why);
        if (ok != (text != NULL)) fail_msg("case %u: %s: %s", i, source.p, ok ? b.p : why.msg);
        if (ok && !str_eq(buf_view(&b), json_str(text)))
            fail_msg("case %u: %s: got '%s', want '%s'", i, source.p, b.p, text->u.s);
        if (!ok) assert_non_null(strstr(why.msg, "line 1"));
        buf_free(&b);
    }
    arena_free(&a);
}

/* What jinja2 decides from the code alone: which scope a name belongs to. */
static void scoping(void **state) {
    (void)state;
    gives("{% set x = 1 %}{% for i in [2] %}{% set x = i %}{{ x }}{% endfor %}{{ x }}", NULL, "21");
    gives("{% for i in [1,2] %}{{ x }}|{% set x = i %}{% endfor %}", "{\"x\": 9}", "9|9|");
    gives("{% for i in [1,2] %}{% if i > 1 %}{% set x = i %}{% endif %}{{ x }}{% endfor %}", "{\"x\": 9}", "92");
    gives("{% if false %}{% set x = 1 %}{% endif %}{{ x }}", "{\"x\": 9}", "9");
    gives("{% if true %}{% set x = 1 %}{% endif %}{{ x }}", "{\"x\": 9}", "1");
    gives("{% macro m() %}{{ x }}{% endmacro %}{% set x = 1 %}{{ m() }}{% set x = 2 %}{{ m() }}", NULL, "12");
    gives("{% macro m(a, b=a ~ '!') %}{{ a }}{{ b }}{% endmacro %}{{ m('x') }}{{ m(b=1) }}", NULL, "xx!1");
    gives("{% macro m() %}{{ varargs }}{{ kwargs }}{% endmacro %}{{ m(1, k=2) }}", NULL, "(1,){'k': 2}");
    gives("{% macro m(x) %}<{{ caller(x) if caller else '-' }}>{% endmacro %}{{ m(1) }}{% call(v) m(2) %}{{ v }}{% "
          "endcall %}",
          NULL, "<-><2>");
    gives("{% with a = 1, b = a %}{{ a }}{{ b }}{% set a = 5 %}{% endwith %}{{ a }}", "{\"a\": 7}", "177");
    gives("{% set x %}a{% set y = 1 %}{{ y }}{% endset %}{{ x }}{{ y is defined }}", NULL, "a1False");
    gives("{% set x | upper | replace('A', 'o') %}abc{% endset %}{{ x }}", NULL, "oBC");
    gives("{% filter upper %}a{{ b }}{% endfilter %}", "{\"b\": \"c\"}", "AC");
    gives("{% block b %}{{ x }}{% set x = 5 %}{% endblock %}{{ x }}", "{\"x\": 1}", "11");
    gives("{% set x = 1 %}{% block b %}{{ x }}{% endblock %}", NULL, "1");
    gives("{% generation %}{% set x = 1 %}{{ x }}{% endgeneration %}{{ x }}", "{\"x\": 2}", "12");
    gives("{% set ns = namespace(a=0) %}{% for i in range(3) %}{% set ns.a, z = ns.a + i, 1 %}{% endfor %}{{ ns.a }}",
          NULL, "3");
    gives("{% do ns.x %}{% set ns = namespace({'x': 1}, y=2) %}{{ ns }}{{ ns.x }}{{ ns['y'] }}", "{\"ns\": {}}",
          "<Namespace {'x': 1, 'y': 2}>12");
}

static void loops(void **state) {
    (void)state;
    gives(
        "{% for i in [3,4] recursive %}{{ i }}{{ loop.depth }}{% if i > 3 %}{{ loop([1,2]) }}{% endif %};{% endfor %}",
        NULL, "31;4112;22;;");
    gives("{% for i in range(5) if i % 2 %}{{ i }}{{ loop.length }}{{ loop.last }} {% endfor %}", NULL,
          "12False 32True ");
    gives("{% for i in [1,1,2] %}{{ loop.changed(i) }}{{ loop.previtem }}{{ loop.nextitem }} {% endfor %}", NULL,
          "True1 False12 True1 ");
    gives("{% for i in [1,2,3,4] %}{% if i == 2 %}{% continue %}{% elif i == 4 %}{% break %}{% endif %}{{ i }}{% "
          "endfor %}",
          NULL, "13");
    gives("{% for i in [1] %}{% break %}{% else %}else{% endfor %}", NULL, "else"); /* jinja2's own oddity */
    gives("{% for a, (b, c) in [(1, (2, 3))] %}{{ a }}{{ b }}{{ c }}{% endfor %}", NULL, "123");
    gives("{% set ns = namespace(stop=false) %}{% for i in [1,2,3] if not ns.stop %}{{ i }}{% set ns.stop = true %}{% "
          "endfor %}",
          NULL, "1");
    gives("{{ [1,2,3]|map('string')|select('ne', '2')|join }}{% if []|select %}y{% endif %}", NULL, "13y");
    gives("{% set c = cycler('a', 'b') %}{{ c.next() }}{{ c.next() }}{{ c.next() }}{{ c.current }}{% set j = joiner() "
          "%}{{ j() }}{{ j() }}",
          NULL, "abab, ");
}

static void white_space(void **state) {
    (void)state;
    gives("a\r\n  {% if true %}  \r\nb\r  {%+ if true %}\nc{% endif %}{% endif %}\n", NULL, "a\n  \nb\n  c");
    gives("  {#- c -#}  x {#+ d +#}\n y", NULL, "x \n y");
    gives("{% raw -%}  {{ a }}\n  {%- endraw +%}\nb", NULL, "{{ a }}\nb");
    gives("x \xc2\xa0\n{{- 1 -}}\xe3\x80\x80 y", NULL, "x1y");
    gives("{{ '\\x41\\u00e9\\n' 'b' }}\\n", NULL, "A\xc3\xa9\nb\\n");
}

static void values_of_json(void **state) {
    (void)state;
    gives("{{ a }}|{{ b }}|{{ c }}|{{ d }}|{{ [a, b, c, d]|tojson }}|{{ a == a }}{{ a > 5 }}{{ a is integer }}{{ b is "
          "float }}",
          "{\"a\": 123456789012345678901234567890, \"b\": 1.50, \"c\": 1e3, \"d\": -0}",
          "123456789012345678901234567890|1.5|1000.0|0|[123456789012345678901234567890, 1.5, 1000.0, "
          "0]|TrueTrueTrueTrue");
    gives("{{ a ~ 'x' }}{{ -a }}{{ a|string|length }}{{ {a: 1}[a] }}", "{\"a\": 12345678901234567890}",
          "12345678901234567890x-12345678901234567890201");
    fails("{{ a + 1 }}", "{\"a\": 12345678901234567890}", NULL, "E-TEMPLATE-RUN", "64 bits");
    gives("{{ d.items }}{{ d['items'] }}{{ d.keys()|list }}{{ d.get('items') }}", "{\"d\": {\"items\": 5}}",
          "<built-in method of dict object>5['items']5");
    gives("{{ m.content is none }}{{ m.x is defined }}{{ m['x'] }}{{ m.content or 'e' }}",
          "{\"m\": {\"content\": null}}", "TrueFalsee");
}

static void sandbox(void **state) {
    (void)state;
    fails("{{ [].append(1) }}", NULL, NULL, "E-TEMPLATE-RUN", "SecurityError");
    fails("{{ {}.update(a=1) }}", NULL, NULL, "E-TEMPLATE-RUN", "SecurityError");
    gives("{{ ''.__class__ }}{{ [].append is defined }}{{ x['__init__'] }}", "{\"x\": []}", "False");
    fails("{{ ''.__class__.__mro__ }}", NULL, NULL, "E-TEMPLATE-RUN", "SecurityError");
    fails("{{ range(100001) }}", NULL, NULL, "E-TEMPLATE-RUN", "Range too big");
    gives("{{ range(100000)|length }}", NULL, "100000");
}

static void errors_have_lines(void **state) {
    (void)state;
    fails("\n\n{{ 1 + 'a' }}", NULL, NULL, "E-TEMPLATE-RUN",
          "line 3: TypeError: unsupported operand type(s) for +: 'int' and 'str'");
    fails("{{ a }}\n{{ a.b }}{{ a.b.c }}", "{\"a\": {}}", NULL, "E-TEMPLATE-RUN",
          "line 2: UndefinedError: 'dict object' has no attribute 'b'");
    fails("{% macro m(x) %}\n{{ x.y.z }}\n{% endmacro %}\n{{ m() }}", NULL, NULL, "E-TEMPLATE-RUN",
          "line 2: UndefinedError: parameter 'x' was not provided");
    fails("\n{{ raise_exception('no ' ~ 5) }}", NULL, NULL, "E-TEMPLATE-RAISE",
          "no 5 (raised by the chat template, line 2)");
    fails("{% if x %}\n{% for y in z %}", NULL, NULL, "E-TEMPLATE-SYNTAX", "line 2");
    fails("a\n{% include 'b' %}", NULL, NULL, "E-TEMPLATE-SYNTAX", "line 2: {% include %} needs other template files");
    fails("{% import 'b' as c %}", NULL, NULL, "E-TEMPLATE-SYNTAX", "import");
    fails("{% extends 'b' %}", NULL, NULL, "E-TEMPLATE-SYNTAX", "extends");
    fails("{{ x | nope }}", NULL, NULL, "E-TEMPLATE-SYNTAX", "no filter named 'nope'");
    fails("{{ x is nope }}", NULL, NULL, "E-TEMPLATE-SYNTAX", "no test named 'nope'");
    gives("{% if false %}{{ x | nope }}{% endif %}{{ 1 if true else x is nope }}", NULL,
          "1"); /* as jinja2: only when reached */
    fails("{% if true %}\n{{ x | nope }}{% endif %}", NULL, NULL, "E-TEMPLATE-RUN", "line 2: no filter named 'nope'");
    fails("{% break %}", NULL, NULL, "E-TEMPLATE-SYNTAX", "outside loop");
    fails("{% for x in y %}{% else %}{% break %}{% endfor %}", NULL, NULL, "E-TEMPLATE-SYNTAX", "outside loop");
    fails("{% for loop in y %}{% endfor %}", NULL, NULL, "E-TEMPLATE-SYNTAX", "loop");
    fails("{% autoescape true %}{% endautoescape %}", NULL, NULL, "E-TEMPLATE-SYNTAX", "autoescape");
    fails("{{ 'abc", NULL, NULL, "E-TEMPLATE-SYNTAX", "never closed");
    fails("{{ (1] }}", NULL, NULL, "E-TEMPLATE-SYNTAX", "']'");
    fails("{{ '\\ud800' }}", NULL, NULL, "E-TEMPLATE-SYNTAX", "Unicode");
    fails("{{ x.encode('utf-8') }}", "{\"x\": \"\"}", NULL, "E-TEMPLATE-RUN", "not supported");
}

static void dates(void **state) {
    (void)state;
    buf b = { 0 };
    err e = { 0 };
    const time_t now = time(NULL);
    struct tm tm;
    char year[16];
    localtime_r(&now, &tm);
    snprintf(year, sizeof year, "%d|", tm.tm_year + 1900);
    if (!render("{{ strftime_now('%Y|%d %b %Y|%H:%M:%S.%f|%%|%z%Z|%-d|x') }}", NULL, NULL, &b, &e))
        fail_msg("%s", e.msg);
    assert_int_equal(strncmp(b.p, year, 5), 0);
    assert_non_null(strstr(b.p, "|%||"));
    assert_int_equal(b.p[b.n - 1], 'x');
    buf_free(&b);
}

/* Hostile templates end in an error, soon and in little memory, whatever limit they run into. */
static void limits(void **state) {
    (void)state;
    const jinja_limits l = {
        .max_steps = 2000000, .max_memory_bytes = 32 << 20, .max_output_bytes = 4 << 20, .max_seconds = 20
    };
    static const char *const hostile[] = {
        "{{ 'a' * 10**9 }}",
        "{{ [0] * 10**9 }}",
        "{{ (1, 2) * 9223372036854775807 }}",
        "{{ 'x'|center(10**12) }}",
        "{{ 'x'.ljust(2**40) }}",
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% for i in range(99999) %}{{ 'xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx' }}{% endfor "
        "%}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{% macro m(f) %}{{ f(f) }}{% endmacro %}{{ m(m) }}",
        "{% for a in [1] recursive %}{{ loop([1]) }}{% endfor %}",
        "{% set ns = namespace(s='x') %}{% for i in range(40) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
        "{% set ns = namespace(s=[1]) %}{% for i in range(40) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
        "{% set ns = namespace(x=[]) %}{% for i in range(5000) %}{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x }}",
        "{% set ns = namespace(x=[], y=[]) %}{% for i in range(5000) %}{% set ns.x, ns.y = [ns.x], [ns.y] %}{% endfor "
        "%}{{ ns.x == ns.y }}",
        "{% set ns = namespace(x=[]) %}{% for i in range(5000) %}{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x|tojson }}",
        "{% set ns = namespace(g=[1]) %}{% for i in range(5000) %}{% set ns.g = ns.g|map('string') %}{% endfor %}{{ "
        "ns.g|list }}",
        "{% set ns = namespace(s='x') %}{% for i in range(15) %}{% set ns.s = ns.s.replace('x', 'xxxx') %}{% endfor %}",
        "{{ '%99999999d' % 1 }}",
        "{{ '{:>99999999}'.format(1) }}",
        "{{ 'x'|indent(10**9) }}",
        "{{ {'a': 1}|tojson(indent=10**10) }}",
        "{{ 'a'.expandtabs(10**9) }}",
        "{{ [1]|batch(10**10, 0)|list }}",
        "{{ [1]|slice(10**10)|list }}",
        "{% set ns = namespace(x=none) %}{% set ns.x = ns %}{{ ns }}",
        "{% set b %}{% for i in range(99999) %}{{ 'xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx' "
        "* 9 }}{% endfor %}{% endset %}",
        "{% for i in range(99999) %}{% set x = 'ab' * 400 %}{% endfor %}",
        "{{ 'aaaaaaaa'|replace('', 'bbbbbbbb' * 99999)|replace('b', 'cccccccccc') }}",
        "{{ range(99999)|sort(reverse=true)|unique|list|sum }}{% for x in range(9999) %}{{ x in range(99999)|list }}{% "
        "endfor %}",
    };
    for (size_t i = 0; i < ARRAY_LEN(hostile); i++) {
        buf b = { 0 };
        err e = { 0 };
        const clock_t start = clock(); /* processor time: the machine may be busy */
        if (render(hostile[i], NULL, &l, &b, &e)) fail_msg("%s: accepted", hostile[i]);
        if (strcmp(e.id, "E-TEMPLATE-LIMIT") != 0) fail_msg("%s: %s: %s", hostile[i], e.id, e.msg);
        const double seconds = (double)(clock() - start) / CLOCKS_PER_SEC;
        if (seconds > 15) fail_msg("%s: %.1f seconds", hostile[i], seconds);
        buf_free(&b);
    }
    const jinja_limits hurried = { .max_seconds = 1e-9 };
    fails("{% for i in range(99999) %}{% endfor %}", NULL, &hurried, "E-TEMPLATE-LIMIT", "takes too long");
    const jinja_limits few = { .max_steps = 100 };
    fails("{% for i in range(99) %}{% endfor %}", NULL, &few, "E-TEMPLATE-LIMIT", "too many steps");
}

static void repeated(const char *head, const char *piece, int n, const char *tail, const char *id) {
    buf b = { 0 }, out = { 0 };
    err e = { 0 };
    buf_puts(&b, head);
    for (int i = 0; i < n; i++) buf_puts(&b, piece);
    buf_puts(&b, tail);
    const bool ok = render_vars(buf_view(&b), NULL, NULL, &out, &e);
    if (ok != (id == NULL) || (id && strcmp(e.id, id) != 0))
        fail_msg("%d x %s: %s: %s", n, piece, ok ? "ok" : e.id, e.msg);
    buf_free(&b);
    buf_free(&out);
}

/* Deep nesting is refused by number, not by the machine's stack; what real templates do is far below. */
static void nesting(void **state) {
    (void)state;
    static const char *const pieces[] = { "(", "[", "{'a':", "-", "not ", "x(", "x[", "1 if 1 else ", "{}|x(" };
    for (size_t i = 0; i < ARRAY_LEN(pieces); i++)
        repeated("{{ ", pieces[i], 100000 / (int)strlen(pieces[i]), "", "E-TEMPLATE-LIMIT");
    repeated("", "{% if 1 %}", 50000, "", "E-TEMPLATE-LIMIT");
    repeated("", "{% for x in y %}", 50000, "", "E-TEMPLATE-LIMIT");
    repeated("{% set ", "(", 50000, "a", "E-TEMPLATE-LIMIT");
    repeated("{{ 1", " + 1", 100000, " }}", "E-TEMPLATE-LIMIT");
    repeated("{{ x", ".x", 100000, " }}", "E-TEMPLATE-LIMIT");
    repeated("{{ x", "|d", 100000, " }}", "E-TEMPLATE-LIMIT");
    repeated("{{ x", "()", 100000, " }}", "E-TEMPLATE-LIMIT");
    repeated("{{ 1", " + 1", 900, " }}", NULL);
    repeated("{{ 'a'", " ~ 'a'", 100000, " }}", NULL);
    repeated("{% if 0 %}", "{% elif 0 %}", 80000, "{% endif %}", NULL);
    repeated("{{ [", "1,", 100000, "] }}", NULL);
    repeated("", "{{ a }}{% set a = 1 %}", 40000, "", NULL);
    repeated("", "{# x #}", 100000, "", NULL);
    repeated("", "x", 2 << 20, "", "E-TEMPLATE-LIMIT");
}

/* A loop that builds text piece by piece must not cost quadratic time or memory. */
static void building_text(void **state) {
    (void)state;
    buf b = { 0 };
    err e = { 0 };
    const jinja_limits l = { .max_memory_bytes = 64 << 20 };
    if (!render(
            "{% set ns = namespace(s='', t='') %}{% for i in range(60000) %}{% set ns.s = ns.s + '0123456789' ~ i %}"
            "{% set ns.t = ns.t ~ 'xxxxx' %}{% endfor %}{{ ns.s|length }}",
            NULL, &l, &b, &e))
        fail_msg("%s", e.msg);
    assert_string_equal(b.p, "888890");
    buf_free(&b);
}

/* Filters, tests and methods beyond the oracle's list; the differential test covers them at random. */
static void breadth(void **state) {
    (void)state;
    gives("{{ '<b>&\"' | e }}{{ ('<'|e) + '<' }}{{ '<p>a  b</p>'|striptags }}", NULL, "&lt;b&gt;&amp;&#34;&lt;&lt;a b");
    gives("{{ 'a,b,,c'.split(',') }}{{ 'a b'.partition(' ') }}{{ 'x'.join(['1', '2']) }}", NULL,
          "['a', 'b', '', 'c']('a', ' ', 'b')1x2");
    gives("{{ '{0} {x!r:>5} {0}|{1[a]}|{{}}'.format(1, {'a': 2}, x='a') }}", NULL, "1   'a' 1|2|{}");
    gives("{{ [1,2,3,4,5]|batch(2, 'x')|list }}{{ [1,2,3]|slice(2)|list }}", NULL,
          "[[1, 2], [3, 4], [5, 'x']][[1, 2], [3]]");
    gives("{% for g in [{'k': 'b'}, {'k': 'A'}, {'k': 'B'}]|groupby('k') %}{{ g.grouper }}{{ g.list|length }}{% endfor "
          "%}",
          NULL, "A1b2");
    gives("{{ {'b': 1, 'a': [1, {}]}|tojson(indent=2, sort_keys=true) }}", NULL,
          "{\n  \"a\": [\n    1,\n    {}\n  ],\n  \"b\": 1\n}");
    gives("{{ 'stra\xc3\x9f"
          "e'.upper() }}{{ '\xce\x91\xce\xa3'.lower() }}{{ '\xc3\xa9t\xc3\xa9'|title }}",
          NULL, "STRASSE\xce\xb1\xcf\x82\xc3\x89t\xc3\xa9");
    gives("{{ 1 < 2 < 3 }}{{ 1 < 3 < 2 }}{{ 'a' in {'a': 1} and 'b' not in 'abc' }}", NULL, "TrueFalseFalse");
    gives("{{ (1, 2)|first }}{{ 'abc'|last }}{{ []|first is defined }}{{ [3, 1]|min }}{{ ['b', 'A']|sort }}", NULL,
          "1cFalse1['A', 'b']");
    gives("{{ 2.5|round }}{{ 0.1 + 0.2 }}{{ 1e100 }}{{ 5e-324 }}{{ 7 // -2 }}{{ -7 % 3 }}{{ 2 ** -1 }}", NULL,
          "2.00.300000000000000041e+1005e-324-420.5");
    gives("{{ (0 / -1)|round(1, 'ceil') }} {{ -0.04|round(1, 'ceil') }} {{ (0 / -1)|round(1, 'floor') }} {{ "
          "-0.04|round(1) }}",
          NULL, "0.0 0.0 0.0 -0.0");
    gives("{{ (0 - 7857994441727794011) % 3600528299072122043 }}{{ (0 - 9223372036854775807 - 1) // 3 }}", NULL,
          "2943590455488572118-3074457345618258603");
    fails("{{ (0 - 9223372036854775807 - 1) // -1 }}", NULL, NULL, "E-TEMPLATE-RUN", "64 bits");
    gives("{{ (0 - 0.1)|round(0, 'ceil') }}{{ 'a\nb'.splitlines(true) }}", NULL, "0.0['a\\n', 'b']");
    fails("{{ ''.splitlines(x) }}", NULL, NULL, "E-TEMPLATE-RUN", "undefined");
    gives("{{ 9007199254740993 == 9007199254740992.0 }}{{ 1 == 1.0 == true }}{{ {1: 'a'}[true] }}", NULL, "FalseTruea");
    gives("{{ x|default('d') }}{{ x.y|default('d') if x is defined }}{{ ''|d('e', true) }}", NULL, "de");
}

/* ---- driver ---- */

static void answer(const json *c) {
    buf b = { 0 }, out = { 0 };
    err e = { 0 };
    if (render_vars(json_str(json_get(c, "template")), json_get(c, "context"), NULL, &b, &e)) {
        buf_puts(&out, "{\"text\": ");
        json_write_str(&out, buf_view(&b));
    } else {
        buf_puts(&out, "{\"id\": ");
        json_write_str(&out, str_of(e.id));
        buf_puts(&out, ", \"error\": ");
        json_write_str(&out, str_of(e.msg));
    }
    buf_puts(&out, "}\n");
    fputs(out.p, stdout);
    buf_free(&out);
    buf_free(&b);
}

static int drive(void) {
    char *line = NULL;
    size_t cap = 0;
    ssize_t n;
    while ((n = getline(&line, &cap, stdin)) > 0) {
        arena a = { 0 };
        const json *c;
        err e = { 0 };
        if (!json_parse(&c, &a, (str){ line, (size_t)n }, "stdin", NULL, &e)) {
            fprintf(stderr, "%s\n", e.msg);
            return 1;
        }
        answer(c);
        fflush(stdout);
        arena_free(&a);
    }
    free(line);
    return 0;
}

int main(int argc, char **argv) {
    if (argc > 1 && strcmp(argv[1], "--lines") == 0) return drive();
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(oracle_cases), cmocka_unit_test(scoping),           cmocka_unit_test(loops),
        cmocka_unit_test(white_space),  cmocka_unit_test(values_of_json),    cmocka_unit_test(breadth),
        cmocka_unit_test(sandbox),      cmocka_unit_test(errors_have_lines), cmocka_unit_test(dates),
        cmocka_unit_test(limits),       cmocka_unit_test(nesting),           cmocka_unit_test(building_text),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
