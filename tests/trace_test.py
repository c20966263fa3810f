#!/usr/bin/env python3
# SPDX-License-Identifier: Apache-2.0
"""usage: trace_test.py PROGRAM

Checks the traces that tests/observer/trace_program.cpp writes: valid JSON, a track a rank, spans that nest,
the six steps, two fences a call, the plan's bytes, and that what found no room is told.
"""

import json
import pathlib
import subprocess
import sys
import tempfile

import tally

STEPS = {
    "forward": ["project_in", "to_heads", "attend", "to_tokens", "project_out"],
    "backward": ["project_out", "to_tokens", "attend", "to_heads", "project_in"],
}


class complaint(Exception):
    pass


def expect(condition, *what):
    if not condition:
        raise complaint(" ".join(map(str, what)))


def nanoseconds(text):
    """Numbers are read as text, so that no digit is rounded."""
    whole, _, fraction = text.partition(".")
    return int(whole) * 1000 + int((fraction + "000")[:3])


def read(path):
    """The tracks of a trace: {rank: [event, ...]}, in the order of the file."""
    text = pathlib.Path(path).read_bytes().decode("utf-8")
    tracks, named = {}, set()
    for event in json.loads(text, parse_float=str):
        expect(event["pid"] == 1, "pid", event)
        if event["ph"] == "M":
            if event["name"] == "thread_name":
                expect(event["args"]["name"] == f"rank {event['tid']}", event)
                expect(event["tid"] not in named, "a second track", event)
                named.add(event["tid"])
            continue
        expect(event["tid"] in named, "no name of its track", event)
        event["begin"] = nanoseconds(event["ts"])
        event["end"] = event["begin"] + nanoseconds(event.get("dur", "0"))
        tracks.setdefault(event["tid"], []).append(event)
    return tracks


def check_nesting(track):
    """No two spans overlap in part, none ends before it began, and each call holds its steps and fences."""
    stack = []
    for event in track:
        expect(event["end"] >= event["begin"] >= 0, "time runs backwards", event)
        if stack:
            expect(event["begin"] >= stack[-1]["begin"], "not in order", event)
        while stack and event["begin"] >= stack[-1]["end"] and not event["end"] == stack[-1]["end"]:
            stack.pop()
        if stack:
            expect(event["end"] <= stack[-1]["end"], "overlaps in part", stack[-1], event)
        if event["ph"] == "X":
            stack.append(event)


def of(track, category):
    return [event for event in track if event.get("cat") == category]


def check_whole(track, ranks):
    """Two layers, forward and backward, and step 1, none of which was dropped."""
    calls, fences = of(track, "call"), of(track, "fence")
    expect([call["args"]["pass"] for call in calls] == ["forward", "backward"] * 2, "calls", calls)
    expect([call["args"]["call"] for call in calls] == [1, 2, 3, 4], "numbers", calls)
    layers = [call["args"]["layer"] for call in calls]
    expect(layers == ['layer "0"\\\n\t\x01'] * 2 + ["layer 1 \u00e9 \ufffd\ufffd\ufffd \ufffd\ufffd\ufffd"] * 2,
           "names", layers)
    expect(all(call["name"] == f"{call['args']['layer']}: {call['args']['pass']}" for call in calls), "names")
    expect([event["name"] for event in of(track, "step")][0] == "shard", "step 1")
    for call in calls:
        inside = [event for event in track
                  if event["args"].get("call") == call["args"]["call"] and event is not call]
        expect(all(call["begin"] <= event["begin"] and event["end"] <= call["end"] for event in inside), "outside")
        steps = [event["name"] for event in inside if event["cat"] == "step"]
        exchanges = {"to_heads", "to_tokens"} if ranks == 1 else set()
        expect(steps == [step for step in STEPS[call["args"]["pass"]] if step not in exchanges], "steps", steps)
        expect(len([event for event in inside if event["cat"] == "fence"]) == (0 if ranks == 1 else 2), "fences")
    expect(len(fences) == (0 if ranks == 1 else 8), "fences", len(fences))
    expect(all(event["args"]["finished"] is True for event in calls + of(track, "step")), "finished")


def check_bytes(tracks, planned):
    """What leaves a rank is what it wrote to others and what others read of it."""
    leaving = [0] * len(tracks)
    for rank, track in tracks.items():
        for event in track:
            args = event["args"]
            if "bytes_written" not in args:
                continue
            expect(event["name"] in ("to_heads", "to_tokens"), "moves", event)
            expect(str(rank) not in args["written_to"] and str(rank) not in args["read_from"], "own share", event)
            expect(sum(args["written_to"].values()) == args["bytes_written"], "sum", event)
            expect(sum(args["read_from"].values()) == args["bytes_read"], "sum", event)
            leaving[rank] += args["bytes_written"]
            for peer, count in args["read_from"].items():
                leaving[int(peer)] += count
    expect(leaving == planned["leaving"], "bytes", leaving, "planned", planned["leaving"])
    expect(sum(leaving) == planned["total"] and (planned["total"] > 0) == (len(tracks) > 1), "total")


def check(program, folder, ranks, events):
    path = pathlib.Path(folder, "trace.json")
    done = subprocess.run([program, path, str(ranks), str(events)], capture_output=True, text=True, timeout=120)
    expect(done.returncode == 0, "exit status", done.returncode, done.stderr)
    planned, tracks = json.loads(done.stdout), read(path)
    expect(sorted(tracks) == list(range(ranks)), "tracks", sorted(tracks))
    for track in tracks.values():
        told = of(track, "recorder")
        kept = track[:len(track) - len(told)]
        expect(kept == [event for event in track if event not in told], "what was dropped is told at the end of a track")
        # Step 1, and four calls: each a span, its steps, its fences.
        whole = 1 + 4 * (1 + 3 if ranks == 1 else 1 + 5 + 2)
        expect(len(kept) == min(events, whole), "events", len(kept))
        expect(len(told) == (events < whole), "what was dropped is told once, and only then", told)
        for each in told:
            args = each["args"]
            expect(args["events"] == len(kept) and args["capacity"] == events, "told", args, len(kept))
            expect(args["dropped"] >= whole - events and each["name"] == f"{args['dropped']} dropped", "dropped", args)
        check_nesting(kept)
        if events >= whole:
            check_whole(kept, ranks)
    if events >= 33:
        check_bytes(tracks, planned)


def refused(*spans):
    try:
        check_nesting([{"begin": begin, "end": end, "ph": "X"} for begin, end in spans])
    except complaint:
        return True
    return False


def main(program):
    count = tally.tally()
    good = [[(0, 9), (1, 4), (4, 9)], [(0, 9), (9, 9)], [(0, 4), (4, 9)]]
    bad = [[(0, 5), (3, 9)], [(0, 9), (2, 6), (5, 7)], [(3, 4), (0, 9)], [(0, 9), (5, 3)]]
    known = not any(refused(*spans) for spans in good) and all(refused(*spans) for spans in bad)
    count.ok("overlap is noticed") if known else count.fail("overlap", "is not noticed")
    for ranks, events in [(1, 100), (2, 33), (3, 100), (4, 100), (8, 1000), (3, 32), (3, 7), (2, 1), (1, 0)]:
        name = f"{ranks} ranks, {events} events"
        with tempfile.TemporaryDirectory() as folder:
            try:
                check(program, folder, ranks, events)
                count.ok(name)
            except (complaint, ValueError, KeyError, UnicodeDecodeError) as wrong:
                count.fail(name, f"{type(wrong).__name__}: {wrong}")
    return count.close()


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit(__doc__)
    sys.exit(main(sys.argv[1]))
