"""Transcripts: which tokens are masked or trained, and that forks are independent."""

import pytest

from selfplay.chat.transcript import Span, Transcript
from tests.helpers.small_games import tokens


def two_turns() -> Transcript:
    """Prompt 1 2 3, sampled 10 11, observed 4 5, sampled 12."""
    transcript = Transcript()
    transcript.observe([1, 2, 3])
    transcript.act([10, 11], logprobs=[-0.5, -0.25])
    transcript.observe([4, 5])
    transcript.act([12], logprobs=[-2.0])
    return transcript


def test_mask_covers_exactly_the_sampled_tokens() -> None:
    transcript = two_turns()
    assert transcript.ids == [1, 2, 3, 10, 11, 4, 5, 12]
    assert transcript.mask == [0, 0, 0, 1, 1, 0, 0, 1]
    assert transcript.logprobs == [0.0, 0.0, 0.0, -0.5, -0.25, 0.0, 0.0, -2.0]
    assert transcript.spans == [Span(3, 5), Span(7, 8)]
    assert len(transcript) == 8


def test_parts_of_a_turn_can_be_left_out_of_the_loss() -> None:
    transcript = Transcript()
    transcript.observe([1])
    logprobs = [-1.0, -2.0, -3.0, -4.0]
    transcript.act([2, 3, 4, 5], logprobs=logprobs, untrained=[(1, 3)])
    assert transcript.mask == [0, 1, 0, 0, 1]
    assert transcript.logprobs == [0.0, *logprobs]


@pytest.mark.parametrize(
    ("span_index", "mask"), [(0, [0, 0, 0, 0, 0, 0, 0, 1]), (-1, [0, 0, 0, 1, 1, 0, 0, 0])]
)
def test_mark_untrained_removes_one_turn(span_index: int, mask: list[int]) -> None:
    transcript = two_turns()
    transcript.mark_untrained(span_index)
    assert transcript.mask == mask


def test_forks_share_earlier_tokens_and_nothing_else() -> None:
    original = two_turns()
    branch = original.fork()
    assert tokens(branch) == tokens(original)
    branch.observe([6])
    branch.act([13, 14], logprobs=[-0.1, -0.2])
    branch.mark_untrained(0)
    assert original.ids == two_turns().ids
    assert original.mask == two_turns().mask
    assert original.spans == two_turns().spans
    original.observe([99])
    assert branch.ids == [1, 2, 3, 10, 11, 4, 5, 12, 6, 13, 14]


def test_act_refuses_wrong_lengths_and_writes_nothing() -> None:
    transcript = two_turns()
    with pytest.raises(ValueError, match="one log-prob per id, got 1 for 2 ids"):
        transcript.act([1, 2], logprobs=[-0.5])
    with pytest.raises(ValueError, match="at least one sampled token"):
        transcript.act([], logprobs=[])
    assert transcript.ids == two_turns().ids


def test_a_list_written_from_outside_is_refused() -> None:
    transcript = two_turns()
    transcript.ids.append(1)
    with pytest.raises(RuntimeError, match="9 ids, 8 mask, 8 logprobs"):
        transcript.observe([2])
    with pytest.raises(RuntimeError, match="one length"):
        transcript.fork()
