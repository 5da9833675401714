"""Limits that the code promises, whatever it is given: of batches, rows, files, lines, waits."""

import itertools
import json
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from dialop.shown import error_line
from dialop.starts import start_length
from selfplay.apps.console import step_line
from selfplay.apps.report.charts import MAX_POINTS, thinned
from selfplay.apps.report.run_files import _spread
from selfplay.chat.rendering import Rendering
from selfplay.checkpoint import checkpoints, keep_newest
from selfplay.engines import hf
from selfplay.engines.base import Completion, Generate, Request
from selfplay.engines.weights import plan_buckets
from selfplay.learner.batch import deal
from selfplay.metrics.records import game_text
from selfplay.model.attention import _chunks_by_length
from selfplay.partners import endpoint
from selfplay.partners.pool import joined
from selfplay.rollout.driver import play_games
from selfplay.rollout.episode import Limits
from tests.helpers.scripted_engine import WaveEngine
from tests.helpers.small_games import BEST, SAMPLING, hand_setups
from tests.helpers.tiny_run import tiny_model

SIZES = st.lists(st.integers(1, 60), min_size=1, max_size=20)


@given(SIZES, st.integers(1, 200))
def test_a_bucket_has_at_most_its_bytes(sizes: list[int], most: int) -> None:
    shapes = {str(i): torch.Size([size]) for i, size in enumerate(sizes)}
    made = plan_buckets(shapes, torch.bfloat16, bucket_bytes=most)
    assert [name for bucket in made for name in bucket] == list(shapes)
    for bucket in made:
        assert len(bucket) == 1 or 2 * sum(shapes[name].numel() for name in bucket) <= most


@given(st.lists(st.lists(st.integers(1, 50), max_size=8), min_size=2, max_size=6))
def test_dealt_samples_stay_whole_and_no_rank_gets_more_than_the_fullest_had(
    sizes: list[list[int]],
) -> None:
    groups = deal(sizes, tp=1)
    every = {(rank, i) for rank, of in enumerate(sizes) for i in range(len(of))}
    dealt = [sample for group in groups for sample in group]
    assert sorted(dealt) == sorted(every)
    loads = [sum(sizes[rank][i] for rank, i in group) for group in groups]
    assert max(loads) <= max(map(sum, sizes))
    fullest = groups[loads.index(max(loads))]
    # What could still move would be more than half of the difference.
    half = (max(loads) - min(loads)) // 2
    assert all(sizes[rank][i] > half for rank, i in fullest)


@given(SIZES, SIZES)
@example([5, 5, 4, 4, 4, 4], [5, 15, 1, 1, 1, 1])
def test_at_most_half_of_a_chunk_s_queries_and_three_quarters_of_its_keys_are_padding(
    own: list[int], more: list[int]
) -> None:
    lengths = [(a, a + b) for a, b in zip(own, more, strict=False)]
    segments, sequences = (list(of) for of in zip(*lengths, strict=True))
    chunks = _chunks_by_length(segments, sequences)
    assert sorted(i for chunk in chunks for i in chunk) == list(range(len(lengths)))
    for chunk in chunks:
        for of, part in ((segments, 2), (sequences, 4)):
            assert part * sum(of[i] for i in chunk) >= len(chunk) * max(of[i] for i in chunk)


@given(st.lists(st.lists(st.integers(0, 3), min_size=1, max_size=8), min_size=1, max_size=8))
def test_kept_texts_have_at_most_twice_the_largest_batch(texts: list[list[int]]) -> None:
    tree, largest = hf.TextTree(1, torch.device("cpu")), 0
    for text in texts:
        largest = max(largest, len(text))
        tree.make_room(len(text))
        assert len(tree) <= 2 * largest
        tree.add(text)


@given(st.lists(st.integers(1, 9_000), min_size=1, max_size=12))
def test_a_pass_has_at_most_its_tokens_and_one_text_more(lengths: list[int]) -> None:
    tree = hf.TextTree(0, torch.device("cpu"))
    texts = [[i] * num for i, num in enumerate(lengths)]
    added = [tree.add(text) for text in texts]
    rows = list(tree.passes(texts, [path for path, _ in added], [num for _, num in added]))
    nums = [len(row.prefixes.tokens_K) for row in rows if row.prefixes is not None]
    assert sum(nums) == sum(lengths)
    assert all(num < hf.MAX_PASS_TOKENS + max(lengths) for num in nums)


@given(st.integers(0, 3 * MAX_POINTS), st.integers(1, 40))
def test_what_is_spread_has_at_most_its_number_and_the_last(num: int, most: int) -> None:
    shown = thinned(range(num))
    assert len(shown) == min(num, MAX_POINTS) and shown[-1:] == [*range(num)][-1:]


@pytest.mark.parametrize("num", [0, 1, 6, 7, 8, 50, 99])
def test_a_file_that_is_spread_gives_at_most_its_lines_and_the_last(
    num: int, tmp_path: Path
) -> None:
    path = tmp_path / "games.jsonl"
    path.write_text("".join(json.dumps({"step": i}) + "\n" for i in range(num)), "utf-8")
    steps = [line["step"] for line in _spread(path, [], most=7)]
    assert len(steps) == min(num, 7) and steps[-1:] == [*range(num)][-1:]


NUMBERS = st.floats(-1e30, 1e30) | st.none()
METRICS = "score reward eval_score agreement messages errors entropy mismatch_mean num_void"
METRICS += " tokens_per_s play_s update_s"


@given(st.dictionaries(st.sampled_from(METRICS.split()), NUMBERS), st.integers(1, 10**6))
def test_a_step_s_line_has_at_most_120_columns(metrics: dict[str, Any], step: int) -> None:
    given = {name: value for name, value in metrics.items() if value is not None}
    line = step_line({"step": step, "reward_std": 0.1, **given}, num_steps=step, remaining_s=1e9)
    assert len(line) <= 120 and line.startswith(f"{step}/")


TEXT = st.text(max_size=300)


@given(TEXT, TEXT, TEXT, TEXT)
@example("p" * 150, "", "said", "")
@example("policy", "", "said", "n" * 150)
def test_a_game_s_lines_have_at_most_100_columns(
    player: str, system: str, text: str, name: str
) -> None:
    seats = [{"player": player, "system": system, "user": text}] * 2
    turns = [{"seat": 0, "text": text, "error": name}, {"seat": 1, "text": name, "error": None}]
    record = {
        "instance": name,
        "episode": 3,
        "step": 2,
        "seats": seats,
        "turns": turns,
        "agreed": True,
        "score_norm": 0.5,
        "facts": {},
        "judge": text,
    }
    assert all(len(line) <= 100 for line in game_text(record).split("\n"))


@given(st.text(max_size=2_000))
def test_an_error_is_told_on_one_line_of_at_most_500_characters(text: str) -> None:
    assert len(error_line(ValueError(text))) <= 500 and "\n" not in error_line(ValueError(text))


@given(
    st.lists(st.integers(0, 50), max_size=12),
    st.integers(0, 700),
    st.integers(0, 12) | st.just("random") | st.floats(0, 1),
    st.floats(0, 1, exclude_max=True),
)
def test_a_start_has_at_most_the_entries_before_the_end(
    words: list[int], more: int, entries: Any, uniform: float
) -> None:
    num = start_length(words, sum(words) + more, entries, uniform=uniform)
    assert 0 <= num <= len(words)
    if isinstance(entries, float):
        assert sum(words[:num]) <= entries * (sum(words) + more)


@given(st.integers(0, 2**62), st.integers(0, 60))
def test_a_wait_before_a_retry_is_at_most_a_minute(seed: int, attempt: int) -> None:
    one = object.__new__(endpoint.Endpoint)
    assert 0 < one._backoff_s(seed, attempt) <= endpoint.LONGEST_BACKOFF_S == 60


@pytest.mark.parametrize("keep", [1, 2, 5])
def test_at_most_the_newest_checkpoints_are_kept(keep: int, tmp_path: Path) -> None:
    steps = (3, 20, 100, 9)
    for step in steps:
        folder = tmp_path / "checkpoints" / f"step_{step}"
        folder.mkdir(parents=True)
        (folder / "progress.json").write_text(json.dumps({"step": step, "state": {}}))
    keep_newest(tmp_path, keep)
    names = [path.name for path in checkpoints(tmp_path)]
    assert names == [f"step_{step}" for step in sorted(steps)[-keep:]]


def test_the_checkpoint_that_a_monitor_goes_back_to_is_kept_too(tmp_path: Path) -> None:
    """As the newest one names it."""
    for step, best in ((3, 3), (9, 3), (20, 9), (100, 9)):
        folder = tmp_path / "checkpoints" / f"step_{step}"
        folder.mkdir(parents=True)
        state = {"monitors": {"series": [], "best": [best]}}
        (folder / "progress.json").write_text(json.dumps({"step": step, "state": state}))
    keep_newest(tmp_path, 1)
    assert [path.name for path in checkpoints(tmp_path)] == ["step_9", "step_100"]


SAID = st.sampled_from(
    [f"[message] {'so ' * n}" for n in (1, 7, 30)] + ["no tag", BEST, "[accept]"]
)


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=60)
@given(
    said=st.lists(SAID, min_size=1, max_size=6),
    turns=st.integers(1, 5),
    retries=st.integers(0, 3),
    new=st.integers(1, 60),
    room=st.integers(60, 260),
)
def test_a_game_a_seat_and_a_turn_have_at_most_their_moves_tries_and_tokens(
    rendering: Rendering, said: list[str], turns: int, retries: int, new: int, room: int
) -> None:
    """Whatever the policy says: moves of a game, invalid tries in a row, tokens that a turn may
    sample, tokens of a seat's whole game with what it reads."""

    class Says(WaveEngine):
        def answer(self, request: Request) -> Completion:
            self.texts = {request.seed: said[len(self.asked) % len(said)]}
            return super().answer(request)

    engine = Says(rendering, {})
    (setup,) = hand_setups(rendering, max_new_tokens=new, max_game_tokens=room)
    (episode,), _ = play_games(
        [setup], engine, sampling=SAMPLING, limits=Limits(turns, max_retries=retries)
    )
    assert all(0 < r.max_new_tokens <= new for r in engine.asked)
    assert all(len(r.prompt_ids) + r.max_new_tokens <= room for r in engine.asked)
    assert sum(turn.action is not None for turn in episode.turns) <= turns
    in_a_row = [
        len([*run]) for bad, run in groupby(t.error is not None for t in episode.turns) if bad
    ]
    assert max(in_a_row, default=0) <= retries + 1
    assert all(t is None or sum(t.mask) <= new * len(t.spans) for t in episode.transcripts)


@given(st.lists(st.integers(1, 9), max_size=12), st.integers(0, 5))
def test_a_pool_has_at_most_its_size(gaps: list[int], size: int) -> None:
    """The first member and the newest others; size 0 keeps all."""
    steps, members = [0, *itertools.accumulate(gaps)], list[int]()
    for num, step in enumerate(steps, start=1):
        members = joined(members, step, size=size)
        kept = [0, *steps[1:num][-(size - 1) :]] if size > 1 else [step]
        assert members == (steps[:num] if size == 0 else kept[:size])
        assert joined(members, step, size=size) == members  # a step that is taken again


@settings(max_examples=12, deadline=None)
@given(st.integers(1, 4), st.lists(st.lists(st.integers(1, 5), max_size=3), max_size=9))
def test_the_plain_engine_has_at_most_its_games_and_rows(most: int, games: list[list[int]]) -> None:
    """Games of some turns with prompts of these lengths: games at once, and texts of a pass. The
    prompts of a batch are one packed row."""
    model, playing, rows = tiny_model(), list[int](), [0]
    engine = hf.HFEngine(model, max_batch=most)
    model.register_forward_pre_hook(
        lambda _, __, words: rows.append(words["input_ids"].shape[0]), with_kwargs=True
    )

    async def game(generate: Generate, number: int) -> int:
        playing.append(number)
        assert len(playing) <= most
        for turn, length in enumerate(games[number]):
            await generate(Request((number + 3,) * length, 3, seed=turn))
        playing.remove(number)
        return number

    played = engine.run_games([partial(game, number=i) for i in range(len(games))], SAMPLING)
    assert played == [*range(len(games))]
    requests = [Request((i + 3,), 3, seed=0) for i in range(len(games))]
    assert len(engine.generate_batch(requests, SAMPLING)) == len(requests)
    assert max(rows) <= most
