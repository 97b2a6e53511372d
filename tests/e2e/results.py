"""What a run of the suite has shown: scenarios by their numbers, and what was measured. Written by every process of a
run into build/e2e, one line each, and read once at its end."""

import json
from collections.abc import Callable
from typing import Any

from tests.e2e import programs

PLACE = programs.ROOT / "build" / "e2e"
SCENARIOS, MEASURED = PLACE / "scenarios.jsonl", PLACE / "measured.jsonl"


def begin() -> None:
    PLACE.mkdir(parents=True, exist_ok=True)
    for file in (SCENARIOS, MEASURED):
        file.unlink(missing_ok=True)


def scenario(number: str, words: str, plane: str, outcome: str, seconds: float) -> None:
    _note(SCENARIOS, {"number": number, "what": words, "plane": plane, "outcome": outcome, "seconds": seconds})


def measured(against: str, what: str, result: str) -> None:
    _note(MEASURED, {"against": against, "what": what, "result": result})


def show(write: Callable[[str], object]) -> None:
    rows = sorted(_read(SCENARIOS), key=lambda row: (row["number"][0], int(row["number"][1:]), row["plane"]))
    if rows:
        write("scenarios by number:\n")
    for row in rows:
        what = row["what"].replace("_", " ")
        write(f"{row['number']:>4}  {row['outcome']:<7} {row['plane']:<5} {row['seconds']:6.1f} s  {what}\n")
    if noted := _read(MEASURED):
        write("measured:\n")
    for each in noted:
        write(f"{each['against']:<5} {each['what']}: {each['result']}\n")
    passed = sum(row["outcome"] == "passed" for row in rows)
    write(f"e2e: {passed} of {len(rows)} runs of {len({row['number'] for row in rows})} numbered scenarios passed\n")


def _note(file: Any, row: dict[str, Any]) -> None:
    with file.open("a") as lines:  # one write below the size of a pipe's buffer: lines of two processes do not mix
        lines.write(json.dumps(row) + "\n")


def _read(file: Any) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []
