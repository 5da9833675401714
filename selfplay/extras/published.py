"""Converts rows of the published CollabLLM data sets to instances.

Two row formats are supported. Multi-turn rows have `prompt`, the conversation so far (a list of
messages with role and content), `single_turn_prompt`, the full task, `single_turn_completion`, its
solution, and `single_turn_metadata`; several rows may come from one task. Single-turn rows have
`prompt`, the full task, `completion`, its solution, and `metadata` or more columns. Source of the
schema: the data sets at huggingface.co/collabllm and the project's repository.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from reprlib import repr as short
from typing import Any, cast

from dialop.collab.grading import check_tasks
from dialop.collab.task import TASKS, CollabInstance, Task
from dialop.collab.value import is_boxed, is_number
from dialop.people import as_read
from dialop.rows import parse_json

Rows = Iterable[tuple[str, Mapping[str, Any]]]

# The request for a row without a user message. It reveals nothing about the task.
_REQUESTS: dict[Task, str] = {
    "math": "Can you help me solve a problem?",
    "writing": "Can you help me write something?",
    "code": "Can you help me write some code?",
}


def instances_of(rows: Rows, *, name: str, task: Task | None = None) -> list[CollabInstance]:
    """One instance per task, in the order of the rows. Each row has its location, for errors. Rows
    whose tasks read alike (`as_read`) become one instance, in the first row's position, with the
    goal that sorts first.

    The kind of task is `task` if given, else the metadata's "task". Otherwise it is code if the row
    has tests, math if the solution is or ends in a number or has a `\\boxed{}`, and writing in all
    other cases. Keys are `name` and a count.

    Raises:
        ValueError: for a row in neither format, or a task that cannot be graded; it names the row's
            location.
    """
    by_goal: dict[str, tuple[str, CollabInstance]] = {}
    for location, row in rows:
        try:
            instance = _instance(row, key=f"{name}/{len(by_goal)}", task=task)
        except ValueError as error:
            raise ValueError(f"{location}: {error}") from error
        _, first = by_goal.setdefault(as_read(instance.goal), (location, instance))
        if instance.goal < first.goal:
            by_goal[as_read(instance.goal)] = location, replace(instance, key=first.key)
    check_tasks(by_goal.values())
    return [instance for _, instance in by_goal.values()]


def _instance(row: Mapping[str, Any], *, key: str, task: Task | None) -> CollabInstance:
    if "single_turn_prompt" in row:
        goal, solution = _text(row, "single_turn_prompt"), _text(row, "single_turn_completion")
        more = _metadata(row.get("single_turn_metadata"), "single_turn_metadata")
        request = _first_request(row.get("prompt"))
    elif isinstance(row.get("prompt"), str):
        goal, solution, request = _text(row, "prompt"), _text(row, "completion"), ""
        more = _metadata(row.get("metadata"), "metadata") | {
            k: v for k, v in row.items() if k not in ("prompt", "completion", "metadata")
        }
    else:
        raise ValueError(
            "a row needs single_turn_prompt and single_turn_completion, or prompt and completion "
            f"as strings, got the columns {', '.join(sorted(row))[:200] or 'none'}"
        )
    if solution.lstrip().startswith("{"):  # code data sets pack the solution with its tests
        packed = _json_object(solution)
        if "answer" in packed:
            more, solution = {**packed, **more}, _plain(packed, "answer")
    kind = task or _kind(more, solution)
    return CollabInstance(
        key=key,
        task=kind,
        request=request or _REQUESTS[kind],
        goal=goal,
        target=solution,
        tests=_plain(more, "test") if kind == "code" else "",
        entry_point=_plain(more, "entry_point") if kind == "code" else "",
    )


def _kind(more: Mapping[str, Any], solution: str) -> Task:
    task = more.get("task")
    if task is not None:
        if task not in TASKS:
            raise ValueError(f"task must be one of {', '.join(TASKS)}, got {short(task)}")
        return cast(Task, task)
    if more.get("test"):
        return "code"
    return "math" if is_boxed(solution) or is_number(solution) else "writing"


def _first_request(prompt: Any) -> str:
    """The first user message of a conversation, "" if there is none."""
    if isinstance(prompt, str) or prompt is None:
        return prompt or ""
    if not isinstance(prompt, list) or not all(isinstance(m, Mapping) for m in prompt):
        raise ValueError("prompt must be a list of messages with role and content")
    contents = [message.get("content") for message in prompt if message.get("role") == "user"]
    if contents and not isinstance(contents[0], str):
        raise ValueError(f"a message's content must be text, got {type(contents[0]).__name__}")
    return contents[0].strip() if contents else ""


def _text(row: Mapping[str, Any], name: str) -> str:
    value = row.get(name)
    if not isinstance(value, str) or not value.strip():
        got = "nothing" if value is None else short(value)
        raise ValueError(f"{name} must be a non-empty string, got {got}")
    return value.strip()


def _plain(more: Mapping[str, Any], name: str) -> str:
    """A string or number as text, "" if there is none."""
    value = more.get(name)
    if value is None:
        return ""
    if not isinstance(value, str | int | float):
        raise ValueError(f"{name} must be a string, got {short(value)}")
    return str(value)


def _metadata(value: Any, name: str) -> dict[str, Any]:
    """Metadata as a dict. Some files store it as JSON text."""
    if value is None or value == "":
        return {}
    if isinstance(value, str):
        metadata = _json_object(value)
        if not metadata and value.strip() != "{}":
            raise ValueError(f"{name} must be an object or its JSON, got {value[:40]!r}")
        return metadata
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} must be an object, got {type(value).__name__}")
    return dict(value)


def _json_object(text: str) -> dict[str, Any]:
    """The object in a JSON text; {} for any other text."""
    try:
        value = parse_json(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
