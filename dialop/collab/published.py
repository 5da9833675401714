"""Rows of the published CollabLLM data sets as instances.

Two shapes are read. Multi-turn rows: `prompt` is the conversation so far (a list of messages with
role and content), `single_turn_prompt` the whole task, `single_turn_completion` its solution,
`single_turn_metadata` more about it; several rows may come from one task. Single-turn rows:
`prompt` is the whole task, `completion` its solution, `metadata` or other columns more about it.
Source of the schema: the data sets at huggingface.co/collabllm and the project's repository.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from reprlib import repr as short
from typing import Any, cast

from dialop.collab.task import TASKS, CollabInstance, Task
from dialop.rows import parse_json

Rows = Iterable[tuple[str, Mapping[str, Any]]]

_BOXED = re.compile(r"\\boxed\s*\{")
_NUMBER = re.compile(r"[-+]?\d[\d,./ ]*%?")
# What the assistant reads where a row has no first message of a user: nothing about the task.
_REQUESTS: dict[Task, str] = {
    "math": "Can you help me solve a problem?",
    "writing": "Can you help me write something?",
    "code": "Can you help me write some code?",
}


def instances_of(rows: Rows, *, name: str, task: Task | None = None) -> list[CollabInstance]:
    """One instance a task, in the order of the rows; `rows` come with their place for errors.

    The task's kind is `task`, else the metadata's "task", else code where there are tests, math
    where the solution is a number or has a `\\boxed{}`, and writing otherwise. Keys are `name` and
    a count.

    Raises:
        ValueError: names the place of a row that has neither shape.
    """
    found: dict[str, CollabInstance] = {}
    for place, row in rows:
        try:
            instance = _instance(row, key=f"{name}/{len(found)}", task=task)
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from error
        found.setdefault(instance.goal, instance)
    return list(found.values())


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
            f"as texts, got the columns {', '.join(sorted(row))[:200] or 'none'}"
        )
    if solution.lstrip().startswith("{"):  # coding sets keep the solution and its tests together
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
    said = more.get("task")
    if said is not None:
        if said not in TASKS:
            raise ValueError(f"task must be one of {', '.join(TASKS)}, got {short(said)}")
        return cast(Task, said)
    if more.get("test"):
        return "code"
    return "math" if _BOXED.search(solution) or _is_number(solution) else "writing"


def _is_number(text: str) -> bool:
    """Whether a text is a number alone, with dollar signs or a percent sign around it or not."""
    bare = text.strip().removeprefix("$").removesuffix("$").strip()
    return _NUMBER.fullmatch(bare) is not None


def _first_request(prompt: Any) -> str:
    """The first user message of a conversation, "" where there is none."""
    if isinstance(prompt, str) or prompt is None:
        return prompt or ""
    if not isinstance(prompt, list) or not all(isinstance(m, Mapping) for m in prompt):
        raise ValueError("prompt must be a list of messages with role and content")
    said = [message.get("content") for message in prompt if message.get("role") == "user"]
    if said and not isinstance(said[0], str):
        raise ValueError(f"a message's content must be text, got {type(said[0]).__name__}")
    return said[0].strip() if said else ""


def _text(row: Mapping[str, Any], name: str) -> str:
    value = row.get(name)
    if not isinstance(value, str) or not value.strip():
        got = "nothing" if value is None else short(value)
        raise ValueError(f"{name} must be a text, got {got}")
    return value.strip()


def _plain(more: Mapping[str, Any], name: str) -> str:
    """A text or number as text, "" where there is none."""
    value = more.get(name)
    if value is None:
        return ""
    if not isinstance(value, str | int | float):
        raise ValueError(f"{name} must be a text, got {short(value)}")
    return str(value)


def _metadata(value: Any, name: str) -> dict[str, Any]:
    """Metadata as an object, which parquet files also keep as JSON text."""
    if value is None or value == "":
        return {}
    if isinstance(value, str):
        found = _json_object(value)
        if not found and value.strip() != "{}":
            raise ValueError(f"{name} must be an object or its JSON, got {value[:40]!r}")
        return found
    if not isinstance(value, Mapping):
        raise ValueError(f"{name} must be an object, got {type(value).__name__}")
    return dict(value)


def _json_object(text: str) -> dict[str, Any]:
    """The object that a text is the JSON of; {} for any other text."""
    try:
        value = parse_json(text)
    except ValueError:
        return {}
    return value if isinstance(value, dict) else {}
