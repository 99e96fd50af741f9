"""Random Jinja expressions and templates for the differential test: mostly well typed, sometimes not."""
import random

CONTEXT = {
    "n": 3, "m": -7, "zero": 0, "f": 2.5, "g": -0.125, "big": 1e16, "t": True, "nil": None,
    "s": "Hello wörld", "e": "", "u": "ŉ ß ΑΣ İx 🙂é", "sp": "  a b\t\nc  ", "q": "it's \"q\" & <b>", "num": " 42 ", "csv": "b,a,,c",
    "lines": "one\n two\r\n\nthree\x0bfour\u2028five", "path": "a/b.c",
    "xs": [3, 1, 2, 1], "ys": ["b", "A", "a", "é", "B"], "ns": [[1, 2], [3], []], "mix": [1, "1", None, True, 2.0, [0], {"k": 1}],
    "empty": [], "d": {"b": 1, "a": [2, {"x": None}], "é": "ü", "items": 5}, "e_d": {}, "i": {"x": {"y": {"z": 7}}},
    "users": [{"name": "Bo", "age": 30, "tags": ["x"]}, {"name": "al", "age": 25, "tags": []}, {"name": "Cy", "age": 30, "tags": ["y", "x"]},
              {"name": "bo", "age": 4.5}],
    "messages": [{"role": "system", "content": "be good"}, {"role": "user", "content": [{"type": "text", "text": "hi"}, {"type": "image"}]},
                 {"role": "assistant", "content": None, "tool_calls": [{"id": "c1", "function": {"name": "f", "arguments": {"a": 1, "b": [True, None, 1.5]}}}]},
                 {"role": "tool", "content": "42"}, {"role": "user", "content": "  bye "}],
}

INTS = ["n", "m", "zero", "0", "1", "2", "-1", "3", "10", "xs[0]", "xs|length", "s|length", "i.x.y.z", "7 // 2", "t"]
FLOATS = ["f", "g", "big", "1.5", "0.1", "1e-7", "2.0", "1e22", "123456789.125", "3.14159"]
STRS = ["s", "e", "u", "sp", "q", "num", "csv", "lines", "path", "'a'", "'é'", '"x,y"', "'%s-%s'", "'abc' 'def'", "ys[1]", "'{} {}'", "'\\n'", "'A B'"]
LISTS = ["xs", "ys", "ns", "mix", "empty", "users", "messages", "[1, 2, 3]", "['a', 'b']", "('t', 1)", "(1,)", "()", "range(4)", "d.keys()", "d.items()", "d.values()"]
# Generators are lazy and print an address, so they appear where they are consumed.
GENERATORS = ["users|map(attribute='name')", "xs|select('odd')", "ys|map('upper')", "xs|unique", "d|items", "xs|reverse", "xs|batch(2)", "mix|reject('none')",
              "users|selectattr('age', 'gt', 20)|map(attribute='age')", "empty|map('nofilter')", "xs|reject('notest')"]
DICTS = ["d", "e_d", "i", "users[0]", "{'k': 'v', 1: 2}", "{'z': 1, 'y': [1]}", "messages[2]", "dict(a=1, b='c')"]
OTHER = ["nil", "nope", "d.nope", "none", "true", "false", "users[9]", "s.nope", "namespace(a=1).a", "i['x']['q']"]

STR_METHODS = ["upper()", "lower()", "title()", "capitalize()", "strip()", "lstrip()", "rstrip()", "split()", "split(',')", "split(',', 1)", "rsplit(None, 1)",
               "rsplit(' ', 1)", "splitlines()", "splitlines(true)", "startswith('H')", "endswith(('d', 'x'))", "replace('a', 'ZZ')", "replace('', '-')",
               "replace('l', '', 1)", "find('o')", "rfind('o')", "find('o', 5)", "count('l')", "index('l')", "isdigit()", "isalpha()", "isalnum()", "isspace()", "isupper()",
               "islower()", "istitle()", "partition(' ')", "rpartition(' ')", "zfill(8)", "center(15, '*')", "ljust(14)", "rjust(14, '-')", "removeprefix('He')",
               "removesuffix('ld')", "swapcase()", "casefold()", "strip('Hd ')", "join(['x', 'y'])", "format(1, 'z')", "isidentifier()", "expandtabs(4)", "isprintable()",
               "isascii()", "find('')", "count('')", "split('l')", "startswith('', 3)"]
STR_FILTERS = ["upper", "lower", "title", "capitalize", "trim", "trim('Hd')", "length", "list", "first", "last", "reverse", "replace('o', '0')", "replace('l', 'L', 1)",
               "indent", "indent(2, true)", "indent('>> ', blank=true)", "wordcount", "int", "int(9)", "float", "float(1.5)", "string", "e", "tojson", "truncate(5)",
               "truncate(8, true, '…')", "truncate(9, leeway=0)", "center(20)", "join('.')", "default('D')", "default('D', true)", "urlencode", "unique|list", "striptags",
               "safe", "forceescape", "format('x')", "sort|join", "batch(3)|list", "count", "escape|upper", "int(base=16)"]
LIST_FILTERS = ["length", "list", "first", "last", "join(', ')", "sort", "sort(reverse=true)", "reverse|list", "unique|list", "sum", "min", "max", "tojson", "string",
                "map('string')|list", "map('upper')|list", "map('int')|list", "map(attribute='name')|list", "map(attribute='age', default=0)|list",
                "select|list", "reject('none')|list", "select('number')|list", "select('string')|list", "selectattr('age')|list|length",
                "selectattr('age', 'gt', 20)|map(attribute='name')|join('/')", "rejectattr('name', 'equalto', 'al')|list|length", "groupby('age')|list",
                "groupby('name')|map('first')|list", "batch(2)|list", "batch(3, 'x')|list", "slice(2)|list", "slice(3, 'f')|list", "sort(attribute='name')|map(attribute='name')|list",
                "sort(attribute='age,name')|list|length", "map('length')|list", "tojson(indent=2)", "tojson(separators=(',', ':'))", "selectattr('tags')|list|length",
                "map(attribute='tags.0')|list", "min(attribute='age')", "max(attribute='name')|string", "sum(start=1.5)", "select('in', [1, 'a'])|list", "join",
                "map('tojson')|join(';')", "default('x')", "unique(true)|list", "sort(case_sensitive=true)", "select('odd')|list", "sum(attribute='age')", "count",
                "list|tojson", "map('default', 'q')|list", "map('trim')|list", "join('-', attribute='name')", "map('replace', 'a', 'b')|list"]
DICT_FILTERS = ["length", "list", "items|list", "dictsort", "dictsort(true)", "dictsort(by='value')", "dictsort(reverse=true)", "tojson", "tojson(sort_keys=true)",
                "tojson(indent=4)", "string", "first", "join(',')", "xmlattr", "urlencode", "sort", "tojson(ensure_ascii=true)", "min", "attr('keys')|string|length > 0"]
NUM_FILTERS = ["abs", "round", "round(1)", "round(2, 'floor')", "round(1, 'ceil')", "int", "float", "string", "tojson", "round(-1)", "filesizeformat", "default(1)", "length"]
TESTS = ["defined", "undefined", "none", "string", "number", "integer", "float", "boolean", "mapping", "sequence", "iterable", "true", "false", "odd", "even", "lower", "upper",
         "callable", "divisibleby 2", "divisibleby(3)", "in [1, 'a', none]", "eq 1", "equalto('a')", "ne none", "gt 1", "lt(2)", "ge 0", "le 3", "sameas true", "escaped",
         "not defined", "not none", "not string", "sameas none", "eq(1)", "filter", "test"]
SLICES = ["[0]", "[-1]", "[1:]", "[:-1]", "[::-1]", "[::2]", "[1:3]", "[-2:]", "[5:1:-2]", "[:]", "[100:]", "[-100:2]", "[::-3]", "[1]", "[9]", "['name']", "['x']"]


class Gen:
    def __init__(self, rnd):
        self.r = rnd

    def pick(self, xs):
        return self.r.choice(xs)

    def atom(self):
        return self.pick(self.pick([INTS, FLOATS, STRS, STRS, LISTS, LISTS, DICTS, OTHER]))

    def num(self, d):
        r = self.r.random()
        if d <= 0 or r < 0.3:
            return self.pick(INTS if self.r.random() < 0.6 else FLOATS)
        if r < 0.7:
            return f"{self.num(d - 1)} {self.pick(['+', '-', '*', '/', '//', '%'])} {self.num(d - 1)}"
        if r < 0.76:
            return f"({self.num(d - 1)}) ** {self.pick(['2', '3', '0', '-1', '0.5', 'n'])}"
        if r < 0.9:
            return f"({self.num(d - 1)})|{self.pick(NUM_FILTERS)}"
        return f"-{self.pick(INTS)}"

    def text(self, d):
        r = self.r.random()
        if d <= 0 or r < 0.2:
            return self.pick(STRS)
        if r < 0.35:
            return f"{self.text(d - 1)} + {self.text(d - 1)}"
        if r < 0.45:
            return f"{self.expr(d - 1)} ~ {self.text(d - 1)}"
        if r < 0.65:
            return f"({self.text(d - 1)}).{self.pick(STR_METHODS)}"
        if r < 0.85:
            return f"({self.text(d - 1)})|{self.pick(STR_FILTERS)}"
        if r < 0.92:
            return f"({self.text(d - 1)}){self.pick(SLICES)}"
        if r < 0.95:
            return f"{self.pick(STRS)} * {self.pick(['0', '2', '-1', '3'])}"
        return f"{self.pick(PERCENT)} % {self.pick(['s', '(n, f)', '(s,)', 'd', 'xs', 'n', '(m, s)', 'f', 'u', 'nope', '(1, 2, 3)', 'mix'])}"

    def seq(self, d):
        r = self.r.random()
        if d <= 0 or r < 0.3:
            return self.pick(LISTS)
        if r < 0.5:
            return f"({self.seq(d - 1)}){self.pick(SLICES)}"
        if r < 0.75:
            return f"({self.seq(d - 1)})|{self.pick(LIST_FILTERS)}"
        if r < 0.82:
            return f"{self.seq(d - 1)} + {self.seq(d - 1)}"
        if r < 0.9:
            return f"({self.pick(GENERATORS)})|{self.pick(['list', 'first', 'join', 'sum', 'sort', 'max', 'list|length', 'length', 'last', 'tojson', 'unique|list', 'map(%r)|list' % 'string'])}"
        return "[" + ", ".join(self.expr(d - 1) for _ in range(self.r.randrange(4))) + "]"

    def mapping(self, d):
        r = self.r.random()
        if d <= 0 or r < 0.4:
            return self.pick(DICTS)
        if r < 0.7:
            return f"({self.mapping(d - 1)})|{self.pick(DICT_FILTERS)}"
        if r < 0.85:
            return f"({self.mapping(d - 1)}).{self.pick(['get(%r)' % 'b', 'get(1, 2)', 'keys()|list', 'values()|list', 'items()|list', 'items', 'x', 'name', 'pop(1)', 'update({})', 'copy()', 'a[0]'])}"
        return "{" + ", ".join(f"{self.pick(['%r' % 'k', '1', 'n', 's', '(1, 2)', 'none', 'xs'])}: {self.expr(d - 1)}" for _ in range(self.r.randrange(3))) + "}"

    def boolean(self, d):
        r = self.r.random()
        if d <= 0 or r < 0.1:
            return self.atom()
        if r < 0.3:
            return f"{self.expr(d - 1)} {self.pick(['==', '!=', '<', '>', '<=', '>='])} {self.expr(d - 1)}"
        if r < 0.4:
            return f"{self.num(d - 1)} {self.pick(['<', '<=', '==', '!='])} {self.num(d - 1)} {self.pick(['<', '>'])} {self.num(d - 1)}"
        if r < 0.55:
            return f"{self.expr(d - 1)} {self.pick(['in', 'not in'])} {self.pick([self.seq, self.text, self.mapping, lambda _: self.pick(GENERATORS)])(d - 1)}"
        if r < 0.75:
            return f"({self.expr(d - 1)}) is {self.pick(TESTS)}"
        if r < 0.9:
            return f"{self.expr(d - 1)} {self.pick(['and', 'or'])} {self.expr(d - 1)}"
        return f"not {self.expr(d - 1)}"

    def expr(self, d):
        r = self.r.random()
        if r < 0.06:
            return self.pick(STRS) + "." + self.pick(STR_METHODS) if self.r.random() < 0.3 else self.atom() + self.pick(["", "|" + self.pick(STR_FILTERS + LIST_FILTERS + DICT_FILTERS + NUM_FILTERS), self.pick(SLICES)])
        if r < 0.12:
            return f"({self.expr(d - 1)} if {self.boolean(d - 1)}" + (f" else {self.expr(d - 1)})" if self.r.random() < 0.8 else ")") if d > 0 else self.atom()
        return self.pick([self.num, self.text, self.text, self.seq, self.seq, self.mapping, self.boolean])(d)

    # ---- statements ----
    def ws(self):
        return self.pick(["", "", "", " ", "\n", "\n  ", "text", " x \n", "\t\n\n", "é ", "\r\n"])

    def tag(self, body):
        return "{%" + self.pick(["", "", "-", "+"]) + " " + body + " " + self.pick(["", "", "-", "+"]) + "%}"

    def out(self, e):
        return "{{" + self.pick(["", "", "-"]) + " " + e + " " + self.pick(["", "", "-"]) + "}}"

    def name(self):
        return self.pick(["a", "b", "c", "x", "n", "s", "item"])

    def block(self, d, loops=0):
        return "".join(self.stmt(d, loops) + self.ws() for _ in range(self.r.randrange(1, 4)))

    def stmt(self, d, loops):
        r = self.r.random()
        if d <= 0 or r < 0.3:
            return self.out(self.pick([self.name(), self.expr(1), self.expr(2), f"{self.name()} ~ '|'"]))
        if r < 0.45:
            kind = self.r.random()
            if kind < 0.6:
                return self.tag(f"set {self.name()} = {self.expr(1)}")
            if kind < 0.7:
                return self.tag(f"set {self.name()}, {self.name()} = {self.pick(['1, 2', 'xs[:2]', 'd', 's[:2]', '(1, 2, 3)', 'n'])}")
            if kind < 0.85:
                return self.tag(f"set {self.name()}" + self.pick(["", " | upper", " | trim | replace('a', 'b')"])) + self.block(d - 1, loops) + self.tag("endset")
            return self.tag("set ns = namespace(v=0, w='')") + self.tag(f"for q in {self.pick(LISTS)}") + self.tag("set ns.v = ns.v + 1") + self.block(d - 1, loops + 1) + self.tag("endfor") + self.out("ns.v")
        if r < 0.62:
            s = self.tag(f"if {self.boolean(1)}") + self.ws() + self.block(d - 1, loops)
            while self.r.random() < 0.3:
                s += self.tag(f"elif {self.boolean(1)}") + self.block(d - 1, loops)
            if self.r.random() < 0.4:
                s += self.tag("else") + self.block(d - 1, loops)
            return s + self.tag("endif")
        if r < 0.82:
            target, it = self.pick([("item", self.seq(1)), ("item", self.text(1)), ("k, v", "d.items()"), ("k, v", "d|dictsort"), ("item", "users"), ("item", "messages"), ("a, b", "ns"),
                                    ("item", self.pick(LISTS)), ("item", "xs"), ("item", "ys"), ("item", self.pick(GENERATORS))])
            s = self.tag(f"for {target} in {it}" + (f" if {self.pick(['item', 'loop is defined', 'item != 1', 'not item', 'x', 'item is string'])}" if self.r.random() < 0.25 and target == "item" else ""))
            for _ in range(self.r.randrange(1, 4)):
                s += self.ws() + self.pick([self.out(self.pick(["item", "loop.index", "loop.index0", "loop.first", "loop.last", "loop.revindex", "loop.revindex0", "loop.length", "loop.previtem", "loop.nextitem",
                                                                "loop.cycle('a', 'b', 'c')", "loop.changed(item)", "loop.depth", "item.name", "k", "v", "loop.nextitem is defined", "loop"])),
                                            self.stmt(d - 1, loops + 1)])
            if self.r.random() < 0.15:
                s += self.tag(f"if {self.boolean(1)}") + self.tag(self.pick(["break", "continue"])) + self.tag("endif") + "after"
            if self.r.random() < 0.2:
                s += self.tag("else") + self.block(d - 1, loops)
            return s + self.tag("endfor")
        if r < 0.9:
            name = self.pick(["mac", "mac2"])
            params = self.pick(["", "x", "x, y=1", "x='d', y=x", "a, b=[], c=none"])
            call = self.pick([f"{name}()", f"{name}(1)", f"{name}('p', y=2)", f"{name}(n, s)", f"{name}(x=1)", f"{name}(1, 2, 3, 4)", f"{name}(*xs[:1])", f"{name}(**{{'x': 5}})"])
            body = self.block(d - 1) + self.pick(["", self.out("x"), self.out("varargs"), self.out("kwargs"), self.out("caller()") if self.r.random() < 0.3 else "", self.out("y ~ x")])
            s = self.tag(f"macro {name}({params})") + body + self.tag("endmacro")
            if self.r.random() < 0.25:
                return s + self.tag(f"call {call}") + self.block(d - 1) + self.tag("endcall")
            return s + self.out(call)
        if r < 0.93:
            return self.tag(f"with {self.name()} = {self.expr(1)}, y = {self.name()}") + self.block(d - 1, loops) + self.tag("endwith")
        if r < 0.96:
            return self.tag(f"filter {self.pick(['upper', 'trim', 'indent(3)', 'replace(%r, %r)' % ('a', 'o'), 'length', 'title|e'])}") + self.block(d - 1, loops) + self.tag("endfilter")
        if r < 0.98:
            return "{#" + self.pick(["", "-", "+"]) + " note {{ no }} " + self.pick(["", "-", "+"]) + "#}"
        return self.tag("raw") + " {{ x }} {% y %} " + self.tag("endraw")


PERCENT = ["'%s'", "'%s-%s'", "'%d|%5d'", "'%05.1f'", "'%-6s|'", "'%+d'", "'%x %X %o'", "'%r'", "'%(b)s'", "'100%%'", "'%e'", "'%g'", "'%c'", "'%5.2s'", "'%%'", "'%i'", "'%#x'", "'% d'", "'%.3g'"]


def templates(seed, count):
    """(template, context) pairs: single expressions and whole templates in turn."""
    g = Gen(random.Random(seed))
    for i in range(count):
        if i % 2:
            yield "{{ " + g.expr(g.r.randrange(1, 4)) + " }}"
        else:
            yield g.ws() + g.block(g.r.randrange(1, 4)) + g.ws()


PIECES = ["{", "}", "%", "{{", "}}", "{%", "%}", "{#", "#}", "-", "+", "(", ")", "[", "]", ".", ",", "|", "~", " ", "\n", "not ", "is ", "in ", "if ", "else ", "1", '"', "'",
          "\\", "=", "*", "**", ":", "#", "endif", "é", "0x", "1e5", "_", "raw", "\t", "loop", "and ", "endraw", "\x0b", "\u00a0"]


def mutate(rnd, template):
    t = list(template)
    for _ in range(rnd.randrange(1, 3)):
        i, kind = rnd.randrange(len(t) + 1), rnd.random()
        if kind < 0.4 and t:
            del t[min(i, len(t) - 1)]
        elif kind < 0.8:
            t[i:i] = list(rnd.choice(PIECES))
        else:
            j = rnd.randrange(len(t) + 1)
            i, j = min(i, j), max(i, j)
            t[i:i] = t[i:min(j, i + 6)]
    return "".join(t)


def number_cases(rnd, count):
    for _ in range(count):
        x = rnd.choice([rnd.uniform(-1e6, 1e6), rnd.uniform(-10, 10), rnd.uniform(-1e22, 1e22), round(rnd.uniform(-1000, 1000), rnd.randrange(4)), rnd.randrange(-10**6, 10**6) / 2,
                        2.0 ** rnd.randrange(-1000, 1000), rnd.random() * 10.0 ** rnd.randrange(-300, 300)])
        p = [rnd.randrange(8) for _ in range(3)]
        yield ("{{ x }} {{ x|round(" + str(rnd.randrange(-6, 8)) + ") }} {{ '%." + str(p[0]) + "f|%e|%g|%.3g|%10.2f|%+.1e|%#.3g' % (x,x,x,x,x,x,x) }} {{ x|tojson }} {{ x|int }} "
               "{{ '{}|{:." + str(p[1]) + "f}|{:e}|{:g}|{:.3}|{:,.2f}|{:>20}|{:^20.3f}|{:+}|{:%}|{:010.2f}|{:.0f}'.format(x,x,x,x,x,x,x,x,x,x,x,x) }}"), {"x": x}
        a, b = (rnd.choice([rnd.randrange(-10**6, 10**6), rnd.randrange(-2**63, 2**63), rnd.randrange(-20, 20)]) for _ in range(2))
        yield ("{{ x // y if y }} {{ x % y if y }} {{ x / 7 }} {{ x|round(" + str(rnd.randrange(-5, 3)) + ") }} {{ '%d|%5d|%-9d|%+d|%x|%#o|%012d|%s|%.5d' % (x,x,x,x,x,x,x,x,x) }} "
               "{{ '{:d}|{:,}|{:x}|{:#b}|{:>12}|{:<12}|{:=+12}|{:012d}|{:_}|{:e}|{:c}'.format(x,x,x,x,x,x,x,x,x,x,65) }} {{ x < y }} {{ x == y }} {{ x > 1.5 }} {{ [x,y,0.5]|sort }} "
               "{{ x|float }} {{ x ~ '' == x|string }}"), {"x": a, "y": b}
    for s in ["12", "-7", " 3 ", "1_000", "0x1f", "1e3", "2.50", "abc", "", "٣٤", "1__0", "_1", "+5", "- 5", "0b11", "0o17", "inf", "-inf", "nan", "1e400", "99999999999999999999",
              "-99999999999999999999.9", "00012", "1_0.5", "0x", "1.", "  .5", "1e", "True", "１２", "9223372036854775807", "-9223372036854775808", "9223372036854775808"]:
        for base in (10, 16, 2, 8, 0, 36, 99):
            yield "{{ s|int(-1, %d) }} {{ s|float('F') }}" % base, {"s": s}


LETTERS = "aAbßŉΣσςİıǅǆéÉ ﬁŁ1²Ⅷⅷ\t\n-_'.🙂中ªÀ\u0345\u0301ʼ٣\u2028\x1c\xa0\xad\u200b\r"


def string_cases(rnd, count):
    for _ in range(count):
        s = "".join(rnd.choice(LETTERS) for _ in range(rnd.randrange(0, 9)))
        yield ("{{ s.upper() }}|{{ s.lower() }}|{{ s.title() }}|{{ s.capitalize() }}|{{ s.swapcase() }}|{{ s.casefold() }}|{{ s|title }}|{{ [s] }}|{{ s.split() }}|{{ s.splitlines() }}|{{ s.strip() }}|"
               "{{ s.isalpha() }}{{ s.isdigit() }}{{ s.isalnum() }}{{ s.isupper() }}{{ s.islower() }}{{ s.isspace() }}{{ s.isidentifier() }}{{ s.isprintable() }}{{ s.istitle() }}{{ s.isdecimal() }}"
               "{{ s.isnumeric() }}|{{ s|wordcount }}|{{ s|tojson }}|{{ s|tojson(ensure_ascii=true) }}|{{ s[1:4] }}|{{ s[::-1] }}|{{ s|length }}|{{ s.rsplit(None,1) }}|{{ s.split(None,2) }}|"
               "{{ s.center(11,'*') }}|{{ s|int }}|{{ s|urlencode }}|{{ s|e }}|{{ '%5.3s|%r' % (s,s) }}|{{ s.find('a') }}{{ s.partition('b') }}{{ s.expandtabs(3) }}|{{ s.zfill(6) }}|{{ s|indent }}|"
               "{{ s|truncate(5,true) }}|{{ s|list }}|{{ s.replace('a', 'é') }}|{{ s < 'b' }}{{ s in 'aAb' }}|{{ s.rstrip('aé') }}|{{ s.count('a') }}"), {"s": s}
