"""Episodes with given rewards, and their samples with advantages in one process."""

from collections.abc import Mapping, Sequence

from dialop.game import Outcome
from dialop.matching.game import MatchingGame
from selfplay.advantages.advantages import compute_advantages
from selfplay.advantages.sample import Sample
from selfplay.chat.transcript import Transcript
from selfplay.config import AlgorithmConfig
from selfplay.distributed import init_world
from selfplay.rollout.episode import Episode, Turn
from tests.helpers.dialop_boards import BRIEF, SMALL


def said(token: int, *, num: int = 1, trained: bool = True) -> Transcript:
    """A prompt 1 2, then `num` sampled tokens."""
    transcript = Transcript()
    transcript.observe([1, 2])
    transcript.act([token] * num, logprobs=[-0.5] * num)
    if not trained:
        transcript.mark_untrained(0)
    return transcript


def episode(
    rewards: tuple[float, float],
    index: int = 0,
    *,
    instance: str = "hand/0",
    errors: tuple[int, int] = (0, 0),
    agreed: bool = True,
    transcripts: tuple[Transcript | None, ...] | None = None,
) -> Episode:
    turns = [
        Turn(seat, "?", None, "Error: no", "no_tag", ("", ""), 1)
        for seat in (0, 1)
        for _ in range(errors[seat])
    ]
    game = MatchingGame(SMALL, BRIEF)
    return Episode(
        instance=instance,
        index=index,
        players=("policy", "policy"),
        prompts=(game.prompt(0), game.prompt(1)),
        turns=tuple(turns),
        transcripts=transcripts or (said(10 + index), said(20 + index, num=2)),
        outcome=Outcome(
            over=True, agreed=agreed, score=0.0, score_norm=rewards[0], rewards=rewards
        ),
        ended="finished",
    )


def with_advantages(
    samples: Sequence[Sample],
    *,
    algorithm: AlgorithmConfig,
    baselines: Mapping[str, float] | None = None,
) -> list[Sample]:
    """The samples with advantages, as one process computes them."""
    world = init_world(device="cpu")
    return compute_advantages(samples, baselines or {}, algorithm=algorithm, world=world)[0]
