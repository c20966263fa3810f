#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""usage: errors.py REPOSITORY

docs/errors.md against the code: each rule that the library raises has its row, in the section of its `errc`
and under its operation, and each row is a rule that the library raises. A message is

    ulysses: <operation>: <rule>: <values>

What is found: every call of `raise(code, at, operation, rule, values...)`; every text that begins with
"ulysses: " and is no sentence of a static_assert; and, where a rule comes by a parameter or a function's
value, the literals that are given there. Parts that are computed are written `…`.
"""

import pathlib
import re
import sys

import tally

HOLE = "…"
# Functions that are given a rule, and which of their arguments it is; `code` when they are of one errc.
FORWARDERS = {"refuse": (0, "invalid_tensor"), "throw_disagreement": (1, "disagreement"), "differ": (0, "disagreement"),
              "caught": (1, None)}
# Functions that return a rule, and of which errc it then is.
RETURNERS = {"broken_rule": "invalid_shape"}
EXCEPTIONS = {"transport_error": "transport"}
# Functions that take an errc first and a whole message then.
RAISERS = ("throw_error", "fail", "record")

TOKEN = re.compile(r"""
    (?P<comment>//[^\n]*|/\*.*?\*/)
  | (?P<directive>^[ \t]*\#(?:\\\n|[^\n])*)
  | (?P<string>"(?:\\.|[^"\\\n])*")
  | (?P<character>'(?:\\.|[^'\\\n])+')
  | (?P<number>\d(?:[\w.']|[eE][+-])*)
  | (?P<word>[A-Za-z_]\w*)
  | (?P<sign>::|->|[^\s\w])
""", re.X | re.S | re.M)
OPEN, CLOSE = {"(": ")", "[": "]", "{": "}"}, set(")]}")


class unclear(Exception):
    pass


def tokens_of(text):
    """[(kind, text, line)], neighbouring string literals joined, without quotes."""
    found = []
    for match in TOKEN.finditer(text):
        kind, value = match.lastgroup, match[0]
        if kind in ("comment", "directive"):
            continue
        line = text.count("\n", 0, match.start()) + 1
        if kind == "string":
            value = value[1:-1].encode().decode("unicode_escape").encode("latin-1").decode("utf-8")
            if found and found[-1][0] == "string":
                found[-1] = ("string", found[-1][1] + value, found[-1][2])
                continue
        found.append((kind, value, line))
    return found


def arguments(tokens, at):
    """The arguments of the call whose parenthesis is tokens[at], and where it closes."""
    depth, parts = 0, [[]]
    for i in range(at, len(tokens)):
        kind, value, _ = tokens[i]
        if kind == "sign" and value in OPEN:
            depth += 1
            if depth == 1:
                continue
        if kind == "sign" and value in CLOSE:
            depth -= 1
            if depth == 0:
                return [part for part in parts if part], i
        if depth == 1 and (kind, value) == ("sign", ","):
            parts.append([])
        else:
            parts[-1].append(tokens[i])
    raise unclear("a call that does not end")


def pattern(part):
    """An argument as text with holes: a literal, a concat of some, or a hole."""
    if len(part) == 1 and part[0][0] == "string":
        return part[0][1]
    if len(part) > 1 and part[0][1] == "concat" and part[1][1] == "(":
        inner, _ = arguments(part, 1)
        return re.sub(f"{HOLE}+", HOLE, "".join(map(pattern, inner)))
    return HOLE


def code_of(part):
    """The errc that an argument names, or None."""
    words = [value for _, value, _ in part]
    return words[2] if len(words) == 3 and words[:2] == ["errc", "::"] else None


def is_declaration(tokens, at):
    """Whether the word at `at` is being declared: a type stands before it."""
    before = tokens[at - 1][1] if at else ""
    return before in ("void", "bool", "inline", "string", "error", "const", "auto", "string_view")


def enclosing_call(tokens, at):
    """The word before the innermost parenthesis that is open at `at` and is no concat, and where it opens."""
    depth = 0
    for i in range(at - 1, -1, -1):
        kind, value, _ = tokens[i]
        if kind != "sign":
            continue
        if value in CLOSE:
            depth += 1
        elif value in OPEN:
            if depth > 0:
                depth -= 1
            elif value == "(" and tokens[i - 1][0] == "word" and tokens[i - 1][1] not in ("concat", "string"):
                return tokens[i - 1][1], i
            elif value == "{":
                return "", i
        elif value == ";" and depth == 0:
            return "", i
    return "", 0


class rule:
    def __init__(self, code, operation, text, place):
        self.code, self.operation, self.text, self.place = code, operation, text, place

    def __str__(self):
        return f"{self.place}: {self.code or 'some errc'}: `{self.operation}`: `{self.text}`"


def rules_of_message(tokens, at, place, codes):
    """The rule of a text that begins with "ulysses: " at tokens[at], or None for a sentence."""
    name, open_at = enclosing_call(tokens, at)
    if name == "static_assert":
        return None
    # The whole text: the literal alone, or the concat that it begins.
    begins = at >= 2 and tokens[at - 1][1] == "(" and tokens[at - 2][1] == "concat"
    text = pattern(tokens[at - 2:arguments(tokens, at - 1)[1] + 1]) if begins else tokens[at][1]
    parts = text.split(": ")
    if len(parts) < 4 or not parts[1] or not parts[2] or (not parts[3] and len(parts) == 4):
        raise unclear(f"{place}: not `ulysses: operation: rule: values`: {text}")
    code = EXCEPTIONS.get(name, name)
    if name in RAISERS:
        code = code_of(arguments(tokens, open_at)[0][0])
    return None if HOLE == parts[2] else rule(code if code in codes else None, parts[1], parts[2], place)


def rules_of_variable(tokens, at):
    """The texts that a variable may be initialised with, which is named at tokens[at]."""
    found, i = [], at + 2
    while tokens[i][1] not in (";", "{"):
        if tokens[i][1] == "concat" and tokens[i + 1][1] == "(":
            found.append(pattern(tokens[i:]))
            i = arguments(tokens, i + 1)[1]
        elif tokens[i][0] == "string":
            found.append(tokens[i][1])
        i += 1
    return found


def rules_of(path, text, codes):
    """Every rule that a header raises, and what is unclear in it."""
    tokens, found, wrong = tokens_of(text), [], []
    for i, (kind, value, line) in enumerate(tokens):
        place = f"{path}:{line}"
        try:
            called = kind == "word" and i + 1 < len(tokens) and tokens[i + 1][1] == "("
            if kind == "string" and value.startswith("ulysses: "):
                found.append(rules_of_message(tokens, i, place, codes))
            elif kind == "word" and value == "rule" and tokens[i + 1][1] == "=":
                found += [rule(None, None, each, place) for each in rules_of_variable(tokens, i)]
            elif called and value == "raise" and not is_declaration(tokens, i):
                given, _ = arguments(tokens, i + 1)
                if len(given) < 5:
                    raise unclear(f"{place}: raise without values")
                text = pattern(given[3])
                if text == HOLE:
                    word = given[3][0][1]
                    if len(given[3]) > 1 or word != "rule":
                        raise unclear(f"{place}: the rule `{word}` is no literal; say where it comes from in errors.py")
                    continue
                code = code_of(given[0])
                if code is None:
                    raise unclear(f"{place}: raise of no errc")
                found.append(rule(code, pattern(given[2]), text, place))
            elif (called and value in FORWARDERS and not is_declaration(tokens, i)
                  and tokens[i - 1][1] not in (".", "->")):
                given, _ = arguments(tokens, i + 1)
                index, code = FORWARDERS[value]
                if len(given) <= index + 1:
                    raise unclear(f"{place}: {value} without values")
                text = pattern(given[index])
                # A forwarder in a header that builds the rule itself is found by its raise.
                if text != HOLE and not whole_rule_elsewhere(tokens, value):
                    found.append(rule(code, None, text, place))
            elif called and value in RETURNERS and tokens[i - 1][1] in ("string_view", "string"):
                body = next(j for j in range(i, len(tokens)) if tokens[j][1] == "{")
                _, end = arguments(tokens, body)
                for j in range(body, end):
                    if tokens[j][1] == "return" and tokens[j + 1][0] == "string":
                        found.append(rule(RETURNERS[value], None, tokens[j + 1][1], f"{path}:{tokens[j][2]}"))
        except unclear as complaint:
            wrong.append(str(complaint))
    return [each for each in found if each], wrong


def whole_rule_elsewhere(tokens, name):
    """Whether the lambda `name` here puts its argument into a longer rule, which its raise then shows."""
    for i, (_, value, _) in enumerate(tokens):
        if value == name and is_declaration(tokens, i) and tokens[i + 1][1] == "=":
            body = next(j for j in range(i, len(tokens)) if tokens[j][1] == "{")
            _, end = arguments(tokens, body)
            for j in range(body, end):
                if tokens[j][1] == "raise":
                    return pattern(arguments(tokens, j + 1)[0][3]) != HOLE
    return False


ROW = re.compile(r"^\|(?P<operations>[^|]*)\|(?P<rule>[^|]*)\|(?P<cause>[^|]*)\|(?P<mend>[^|]*)\|$")
QUOTED = re.compile(r"`([^`]+)`")


def rows_of(page):
    """{errc: [(operations, rule, line)]} of the page, and what is wrong with it."""
    sections, wrong, code = {}, [], None
    for number, line in enumerate(page.splitlines(), 1):
        if line.startswith("## "):
            quoted = QUOTED.search(line)
            code = quoted[1] if quoted else None
            if code:
                sections[code] = []
        match = ROW.match(line)
        if not match or code is None or set(line) <= set("|- ") or match["operations"].strip() == "operation":
            continue
        rules = QUOTED.findall(match["rule"])
        if len(rules) != 1 or not match["cause"].strip() or not match["mend"].strip():
            wrong.append(f"docs/errors.md:{number}: a row is operations, one rule, cause and mend")
            continue
        sections[code].append((QUOTED.findall(match["operations"]), rules[0], number))
    return sections, wrong


def codes_of(text):
    """The enumerators of errc but none."""
    tokens = tokens_of(text)
    at = next(i for i in range(len(tokens) - 2) if [t[1] for t in tokens[i:i + 3]] == ["enum", "class", "errc"])
    body = next(j for j in range(at, len(tokens)) if tokens[j][1] == "{")
    return {part[0][1] for part in arguments(tokens, body)[0]} - {"none"}


def compare(found, sections):
    """What the page lacks, and what it has too much."""
    wrong, used = [], set()
    for each in found:
        rows = [(code, row) for code, rows in sections.items() for row in rows if row[1] == each.text]
        fitting = [row for code, row in rows if each.code in (None, code) and
                   (each.operation is None or HOLE in each.operation or each.operation in row[0])]
        if fitting:
            used.update(row[2] for row in fitting)
        else:
            elsewhere = ", ".join(f"{code}: {row[0]}" for code, row in rows)
            wrong.append(f"{each} is not in docs/errors.md" + (f", only under {elsewhere}" if rows else ""))
    for code, rows in sections.items():
        for operations, text, line in rows:
            if line not in used:
                wrong.append(f"docs/errors.md:{line}: {code}: {operations}: `{text}` is raised nowhere")
    return wrong


def main(repository):
    root, count = pathlib.Path(repository), tally.tally()
    codes = codes_of((root / "include/ulysses/core/error.hpp").read_text(encoding="utf-8"))
    found, wrong = [], []
    for path in sorted((root / "include").rglob("*.hpp")):
        name = path.relative_to(root).as_posix()
        if name.endswith("core/error.hpp"):  # defines the form
            continue
        here, complaints = rules_of(name, path.read_text(encoding="utf-8"), codes)
        found += here
        wrong += complaints
    sections, complaints = rows_of((root / "docs/errors.md").read_text(encoding="utf-8"))
    count.ok("sections") if set(sections) == codes else count.fail(
        "sections", f"errc {sorted(codes - set(sections))} without, {sorted(set(sections) - codes)} of no errc")
    wrong += complaints
    count.ok("form of the messages and of the page") if not wrong else count.fail("form", "\n  ".join(["", *wrong]))
    wrong = compare(found, sections)
    count.ok(f"{len(found)} rules") if found and not wrong else count.fail("rules", "\n  ".join(["", *wrong]))
    return count.close()


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1]))
