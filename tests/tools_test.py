#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""Tests of the scripts that judge the tests."""

import contextlib
import io
import json
import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

ROOT = pathlib.Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tools"))

import compile_fail  # noqa: E402
import errors  # noqa: E402
import layering  # noqa: E402
import snippets  # noqa: E402
import summarise_tests  # noqa: E402


def summary(passed, failed, skipped):
    return (f"[doctest] test cases: {passed + failed} | {passed} passed | {failed} failed | {skipped} skipped\n"
            "[doctest] assertions: 9 | 9 passed | 0 failed |\n")


def tally_of(*records, skipped=()):
    return summarise_tests.summarise([("build", [json.dumps(record) for record in records])], skipped)


def doctest(result, output, returncode=0):
    return {"name": "core", "command": ["/build/tests/core_tests"], "result": result, "stdout": output,
            "returncode": returncode}


def other(result, output="", returncode=0):
    return {"name": "x:repository / runner", "command": ["python3", "runner.py"], "result": result,
            "stdout": output, "returncode": returncode}


class counts(unittest.TestCase):
    def expect(self, total, passed, failed, skipped):
        self.assertEqual((total.passed, total.failed, total.skipped), (passed, failed, skipped))

    def test_doctest_cases_are_counted(self):
        self.expect(tally_of(doctest("OK", summary(5, 0, 1))), 5, 0, 1)
        self.expect(tally_of(doctest("FAIL", summary(5, 2, 0), 1)), 5, 2, 0)

    def test_coloured_summary_is_read(self):
        self.expect(tally_of(doctest("OK", "\x1b[0;36m" + summary(2, 0, 0))), 2, 0, 0)

    def test_crash_without_summary_is_a_failure(self):
        self.expect(tally_of(doctest("FAIL", "", -11)), 0, 1, 0)

    def test_crash_after_the_summary_is_a_failure(self):
        self.expect(tally_of(doctest("FAIL", summary(3, 0, 0), 66)), 3, 1, 0)

    def test_doctest_that_ends_well_without_summary_is_a_failure(self):
        self.expect(tally_of(doctest("OK", "")), 0, 1, 0)

    def test_zero_cases_are_a_failure(self):
        self.expect(tally_of(doctest("OK", summary(0, 0, 0))), 0, 1, 0)
        self.expect(tally_of(other("OK", "0 passed, 0 failed, 0 skipped\n")), 0, 1, 0)

    def test_timeout_is_a_failure(self):
        self.expect(tally_of(doctest("TIMEOUT", "")), 0, 1, 0)
        self.expect(tally_of(other("TIMEOUT")), 0, 1, 0)

    def test_no_test_at_all_is_a_failure(self):
        self.expect(tally_of(), 0, 1, 0)
        self.expect(summarise_tests.summarise([("build", None)]), 0, 1, 0)
        with contextlib.redirect_stdout(io.StringIO()):
            self.assertEqual(summarise_tests.main([]), 1)
            self.assertEqual(summarise_tests.main(["--skipped", "all of it"]), 1)

    def test_runner_counts_are_taken(self):
        self.expect(tally_of(other("OK", "7 passed, 0 failed, 2 skipped\n")), 7, 0, 2)
        self.expect(tally_of(other("FAIL", "7 passed, 0 failed, 2 skipped\n", 1)), 7, 1, 2)

    def test_any_other_test_counts_once(self):
        self.expect(tally_of(other("OK"), other("FAIL", returncode=3)), 1, 1, 0)

    def test_skips_name_their_reason(self):
        total = tally_of(other("SKIP", "skipped: no such library\n", 77), other("OK"), skipped=["clang: none"])
        self.expect(total, 1, 0, 2)
        self.assertIn("SKIPPED build: runner: no such library", total.notes)
        self.assertIn("SKIPPED clang: none", total.notes)

    def test_failure_shows_its_output(self):
        note, = tally_of(other("FAIL", "what went wrong", 1)).notes
        self.assertIn("what went wrong", note)


class layers(unittest.TestCase):
    def wrong(self, path, target):
        return layering.complaints(path, f"#include {target}\n", lambda inner: True)

    def test_down_own_folder_and_standard_are_fine(self):
        for path, target in [("plan/line.hpp", '"ulysses/core/view.hpp"'), ("core/a.hpp", '"ulysses/core/b.hpp"'),
                             ("core/a.hpp", '<span>'), ("adapters/mpi.hpp", '<mpi.h>'),
                             ("adapters/mpi.hpp", '"ulysses/comm/threads.hpp"'),
                             ("ulysses.hpp", '"ulysses/pipeline.hpp"')]:
            self.assertEqual(self.wrong(path, target), [], (path, target))

    def test_up_sideways_foreign_and_unknown_are_not(self):
        for path, target in [("core/a.hpp", '"ulysses/plan/line.hpp"'), ("comm/a.hpp", '<ulysses/space/host.hpp>'),
                             ("plan/a.hpp", '"ulysses/pipeline.hpp"'), ("pipeline.hpp", '"ulysses/adapters/mpi.hpp"'),
                             ("ulysses.hpp", '"ulysses/adapters/mpi.hpp"'), ("core/a.hpp", '"ulysses/ulysses.hpp"'),
                             ("core/a.hpp", '<mpi.h>'), ("core/a.hpp", '<immintrin.h>'), ("core/a.hpp", '"b.hpp"'),
                             ("core/a.hpp", 'MACRO'), ("extra/a.hpp", '<span>')]:
            self.assertEqual(len(self.wrong(path, target)), 1, (path, target))


class cuts(unittest.TestCase):
    source = "int a;\n    // [snippet]\n    int b;\n      int c;\n    // [/snippet]\nint d;\n"

    def test_region_must_be_the_block(self):
        self.assertIsNone(snippets.complaint("int b;\n  int c;\n", self.source))
        self.assertIn("differs", snippets.complaint("int b;\n", self.source))
        self.assertIn("differs", snippets.complaint("int d;\n", self.source))

    def test_without_regions_any_run_of_lines_will_do(self):
        self.assertIsNone(snippets.complaint("int b;\n", "int a;\n  int b;\n"))
        self.assertIsNotNone(snippets.complaint("int a;\n", "int a; int b;\n"))

    def test_named_regions_are_told_apart(self):
        source = self.source + "// [snippet end]\nint e;\n// [/snippet]\n"
        self.assertIsNone(snippets.complaint("int e;\n", source, "end"))
        self.assertIsNone(snippets.complaint("int b;\n  int c;\n", source))
        self.assertIn("differs", snippets.complaint("int e;\n", source))
        self.assertIn("differs", snippets.complaint("int b;\n  int c;\n", source, "end"))
        self.assertIn("no region `// [snippet start]`", snippets.complaint("int e;\n", source, "start"))
        block = snippets.BLOCK.search("<!-- cut from a.cpp end -->\n```cpp\nint e;\n```\n")
        self.assertEqual(block.groups(), ("a.cpp", "end", "int e;\n"))


class error_rules(unittest.TestCase):
    codes = {"invalid_call", "invalid_tensor", "disagreement", "peer_failed"}

    def rules(self, text):
        found, wrong = errors.rules_of("a.hpp", text, self.codes)
        return [(each.code, each.operation, each.text) for each in found], wrong

    def test_a_raise_over_several_lines(self):
        text = '''if (a, b) raise(errc::invalid_call, at, concat(call, ": q"),  // raise(
                      "one (rule), "
                      "of two parts", f(a, b), " of ", c);'''
        self.assertEqual(self.rules(text), ([("invalid_call", "…: q", "one (rule), of two parts")], []))

    def test_a_rule_with_a_hole(self):
        self.assertEqual(self.rules('raise(errc::disagreement, {}, "x", concat(field, " must agree"), 1);')[0],
                         [("disagreement", "x", "… must agree")])

    def test_a_message_that_is_thrown(self):
        for call in ("throw_error(errc::peer_failed,", "status.fail(errc::peer_failed,", "throw peer_failed("):
            self.assertEqual(self.rules(f'{call} concat("ulysses: run: a rank threw: rank ", rank));'),
                             ([("peer_failed", "run", "a rank threw")], []))

    def test_a_sentence_is_no_message(self):
        self.assertEqual(self.rules('static_assert(x<a, b>, "ulysses: a type must have: this and that.");'), ([], []))

    def test_a_comment_is_no_call(self):
        text = '/// raise(errc::invalid_call, at, "x", "y", z)\n/* "ulysses: a: b: c" */'
        self.assertEqual(self.rules(text), ([], []))

    def test_a_rule_that_is_given_to_a_lambda(self):
        text = '''auto const refuse = [](char const* rule, auto const&... values) {
                      raise(errc::invalid_tensor, {}, "attention", rule, values...); };
                  refuse("rows must be contiguous", 1); other.refuse(status);'''
        self.assertEqual(self.rules(text), ([("invalid_tensor", None, "rows must be contiguous")], []))

    def test_rules_of_a_variable(self):
        text = 'auto const rule = a ? std::string("this") : concat("that ", b); throw_disagreement(r, rule, v);'
        self.assertEqual([each[2] for each in self.rules(text)[0]], ["this", "that …"])

    def test_what_is_not_of_the_form(self):
        for text in ('raise(errc::invalid_call, at, "x", "no values");', 'raise(errc::invalid_call, at, "x", text, 1);',
                     'raise(code, at, "x", "no errc", 1);', 'throw_error(errc::peer_failed, "ulysses: no values: ");'):
            self.assertEqual(len(self.rules(text)[1]), 1, text)

    def page(self, rows, code="invalid_call"):
        head = "| operation | rule | cause | mend |\n|---|---|---|---|"
        sections, wrong = errors.rows_of(f"## `{code}`\n\n{head}\n{rows}\n")
        found = [errors.rule("invalid_call", "x", "a rule", "a.hpp:1")]
        return wrong + errors.compare(found, sections)

    def test_the_page_and_the_code(self):
        row = "| `w`, `x` | `a rule` | cause | mend |"
        self.assertEqual(self.page(row), [])
        self.assertEqual(len(self.page("")), 1)
        self.assertEqual(len(self.page(row + "\n| `x` | `another` | cause | mend |")), 1)
        self.assertEqual(len(self.page("| `w` | `a rule` | cause | mend |")), 2)
        self.assertEqual(len(self.page(row, "invalid_tensor")), 2)
        self.assertTrue(self.page("| `x` | `a rule` | | mend |"))

    def test_the_codes(self):
        text = "enum class errc : std::uint32_t { none = 0, a,  ///< b, c\n d, };"
        self.assertEqual(errors.codes_of(text), {"a", "d"})


class scripts(unittest.TestCase):
    """The shell scripts, in a repository of one source and two tests, with a tools/setup that does nothing."""

    def setUp(self):
        if not shutil.which("meson") or not shutil.which("ninja") or not shutil.which("bash"):
            self.skipTest("no meson, ninja or bash")
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.root = pathlib.Path(folder.name).resolve()
        for name in ("tests", "tools"):
            (self.root / name).mkdir()
        for name in ("tests/run", "tools/build", "tools/summarise_tests.py"):
            shutil.copy(ROOT / name, self.root / name)
        (self.root / "tools/setup").write_text("#!/bin/sh\n")
        (self.root / "tools/setup").chmod(0o755)
        (self.root / "meson_options.txt").write_text("".join(
            f"option('{name}', type: 'feature')\n" for name in ("tests", "examples", "bench")) +
            "option('native', type: 'boolean')\n")
        (self.root / "meson.build").write_text("project('x')\nsubdir('tests')\n")
        (self.root / "tests/meson.build").write_text(
            "made = custom_target('made', output: 'made', command: ['touch', '@OUTPUT@'])\n"
            "python = find_program('python3')\n"
            "test('scripted', python, args: [files('x.py'), made])\n"
            "test('other', python, args: files('x.py'))\n")
        (self.root / "tests/x.py").write_text("print('1 passed, 0 failed, 0 skipped')\n")

    def run_script(self, *command):
        done = subprocess.run(command, cwd=self.root, text=True, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                              stderr=subprocess.STDOUT, timeout=120)
        return done.returncode, done.stdout

    def test_a_scripted_test_is_chosen_by_name(self):
        code, output = self.run_script("tests/run", "--quick", "--filter", "scripted")
        self.assertEqual(code, 0, output)
        self.assertIn("1 passed, 0 failed, 0 skipped", output.splitlines()[-1])
        self.assertTrue((self.root / "build/tests/made").exists(), "its program is built")

    def test_a_filter_without_tests_lists_them(self):
        code, output = self.run_script("tests/run", "--quick", "--filter", "nothing")
        self.assertNotEqual(code, 0)
        self.assertIn("there are: scripted other", output)

    def test_an_unknown_target_leaves_the_build_as_it_is(self):
        self.assertEqual(self.run_script("tools/build", "build", "--")[0], 0)
        (self.root / "build/mine").write_text("kept")
        code, output = self.run_script("tools/build", "build", "--", "no_such_target")
        self.assertEqual(code, 1)
        self.assertIn("unknown target 'no_such_target'", output)
        self.assertTrue((self.root / "build/mine").exists())

    def test_a_broken_build_is_made_anew(self):
        self.assertEqual(self.run_script("tools/build", "build", "--")[0], 0)
        with (self.root / "build/build.ninja").open("a") as ninja:
            ninja.write("\nnonsense\n")
        (self.root / "build/mine").write_text("not kept")
        code, output = self.run_script("tools/build", "build", "--")
        self.assertEqual(code, 0, output)
        self.assertFalse((self.root / "build/mine").exists())


class compile_fail_cases(unittest.TestCase):
    def test_expectations(self):
        with tempfile.TemporaryDirectory() as folder:
            case = pathlib.Path(folder, "case.cpp")
            case.write_text("// SPDX\n// expect: one\n// expect: two\n// never: three\n\n// expect: late\n"
                            "f();  // refused\n")
            self.assertEqual(compile_fail.expectations(case), (["one", "two", "case.cpp:7:"], ["three"]))
            case.write_text("// SPDX\nf();  // refused\n")
            self.assertEqual(compile_fail.expectations(case), ([], []))


if __name__ == "__main__":
    unittest.main()
