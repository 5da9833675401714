"""A thinking model whose template drops old thoughts: each turn is a sequence of its own, with the
template's prompt and the sampled tokens, and the turns of a seat share one credit."""

from itertools import compress, pairwise

import pytest
import torch

from dialop.logged import Rules
from dialop.matching.game import MatchingGame
from selfplay.advantages.advantages import reward_samples
from selfplay.advantages.sample import Sample
from selfplay.chat.rendering import Rendering, make_rendering
from selfplay.chat.template import CLOSE, think
from selfplay.config import load_config
from selfplay.data.seeds import named_seed
from selfplay.engines.base import Sampling
from selfplay.errors import SettingsError
from selfplay.learner.batch import pack
from selfplay.preflight.run import check_run, read_rendering
from selfplay.rollout.driver import play_games
from selfplay.rollout.episode import Episode, GameSetup, Limits
from selfplay.rollout.players import PolicyPlayer
from tests.helpers.chat_families import ANEW, tokenizer_of
from tests.helpers.dialop_boards import BEST, SMALL
from tests.helpers.hand_episodes import with_advantages
from tests.helpers.scripted_engine import WaveEngine
from tests.helpers.tiny_run import CPU, tiny_model, trainer_logprobs

BRIEF = Rules(brief=True, private_reasoning=True)
THOUGHTS = ["Ava is best at BLEU", "I may skip it", "that is 12", "as good as mine"]
MOVES = [(0, "[message] BLEU Ava 3"), (1, "propose it"), (1, BEST), (0, "[accept]")]


def play(rendering: Rendering, *, index: int = 0, moves: list[tuple[int, str]] = MOVES) -> Episode:
    """The game of MOVES, each made after its thought."""
    texts, turns = {}, [0, 0]
    for (seat, move), thought in zip(moves, THOUGHTS, strict=False):
        said = f"{thought}\n{CLOSE}{move}"
        texts[named_seed("hand", index, seat, turns[seat])] = (
            said if rendering._opened else think(said)
        )
        turns[seat] += 1

    class Thinking(WaveEngine):
        def answer(self, request):
            blanks = rendering._before_answer
            self.texts = {seed: text.removeprefix(blanks) for seed, text in texts.items()}
            completion = super().answer(request)
            # `action_ids` closes a thought that the prompt opened; this answer thinks first.
            num = len(rendering._markers.encode(rendering._markers.hide(blanks))) if blanks else 0
            return type(completion)(
                completion.ids[num:], completion.logprobs[num:], completion.finish, self.version
            )

    players = tuple(
        PolicyPlayer(rendering, seed_names=("hand", index), max_new_tokens=400, max_game_tokens=900)
        for _ in (0, 1)
    )
    setup = GameSetup(MatchingGame(SMALL, BRIEF), players, SMALL.key, index)
    engine = Thinking(rendering, texts)
    (episode,), _ = play_games(
        [setup], engine, sampling=Sampling(temperature=1.0, stop_ids=()),
        limits=Limits(max_turns=8, max_retries=1),
    )  # fmt: skip
    return episode


def rendering_of(name: str) -> Rendering:
    return make_rendering(tokenizer_of(name), template_kwargs=ANEW[name].kwargs)


@pytest.mark.parametrize("name", ["qwen3 thinking, tags unflagged", "qwen3 thinking 2507"])
def test_each_turn_has_the_templates_prompt_and_its_own_thought(name: str) -> None:
    tokenizer, rendering = tokenizer_of(name), rendering_of(name)
    episode = play(rendering)
    assert (episode.ended, episode.num_errors(1)) == ("finished", 1)
    for seat, thoughts in ((0, (0, 3)), (1, (1, 2))):
        transcript = episode.transcripts[seat]
        assert transcript is not None and len(transcript.starts) == 1
        bounds = [0, *transcript.starts, len(transcript)]
        talk: list[dict[str, str]] = []
        own = [turn for turn in episode.turns if turn.seat == seat]
        for number, (start, end) in enumerate(pairwise(bounds)):
            span = transcript.spans[number]
            assert start < span.start and span.end == end
            parts = ["" if number else episode.prompts[seat].user, talk_read(episode, seat, number)]
            read = "\n".join(part for part in parts if part)
            talk.append({"role": "user", "content": read})
            prompt = tokenizer.apply_chat_template(
                talk, tokenize=True, return_dict=False, add_generation_prompt=True
            )
            assert transcript.ids[start : span.start] == prompt
            assert transcript.mask[start:end] == [0] * len(prompt) + [1] * (end - span.start)
            assert THOUGHTS[thoughts[number]] in rendering.decode(transcript.ids[span.start : end])
            talk.append({"role": "assistant", "content": own[number].text})
        last = tokenizer.decode(transcript.ids[bounds[1] : transcript.spans[1].start])
        assert THOUGHTS[thoughts[0]] not in last, "the template dropped the old thought"


def talk_read(episode: Episode, seat: int, number: int) -> str:
    """What the seat read between its turns number - 1 and number."""
    own = [i for i, turn in enumerate(episode.turns) if turn.seat == seat]
    since = own[number - 1] if number else 0
    texts = [
        turn.error if turn.error and turn.seat == seat else turn.observations[seat]
        for turn in episode.turns[since : own[number]]
    ]
    return "\n".join(text for text in texts if text)


def test_the_turns_of_a_seat_share_one_credit_and_each_has_its_own_context() -> None:
    rendering = rendering_of("qwen3 thinking, tags unflagged")
    worse = [(0, "[message] BLEU Ava 3"), (1, "propose it"), (1, "still nothing")]
    episodes = [play(rendering), play(rendering, index=1, moves=worse)]
    config = load_config(None, ["model.path=x", "rollout.group_size=2"])
    samples, _ = reward_samples(episodes, algorithm=config.algorithm, reward=config.reward)
    samples = with_advantages(samples, algorithm=config.algorithm)
    by_name = {sample.name.partition("episode ")[2]: sample for sample in samples}
    good, bad = by_name["0 seat 0"], by_name["1 seat 0"]
    assert len(good.sequences()) == 2 and len(bad.sequences()) == 1
    assert len(set(compress(good.advantages, good.mask))) == 1
    assert good.advantages[good.mask.index(1)] > 0 > bad.advantages[bad.mask.index(1)]

    model = tiny_model(vocab_size=len(tokenizer_of("qwen3 thinking, tags unflagged")))
    apart = [
        Sample(f"part {start}", good.ids[start:end], good.mask[start:end], [], [])
        for start, end in good.sequences()
    ]
    whole = trainer_logprobs(model, [good], temperature=1.0)
    assert torch.allclose(whole, trainer_logprobs(model, apart, temperature=1.0), atol=1e-4)
    joined = Sample("one context", good.ids, good.mask, [], [])
    assert not torch.allclose(whole, trainer_logprobs(model, [joined], temperature=1.0), atol=1e-2)
    batch = pack([good, bad], device=CPU)
    assert batch.names == (good.name, bad.name)
    assert batch.sample_M.tolist() == [0] * sum(good.mask) + [1] * sum(bad.mask)


def test_a_turn_without_a_trained_token_is_not_computed() -> None:
    sample = Sample("s", list(range(9)), [0, 0, 1, 0, 0, 0, 0, 0, 1], [], [], starts=(3, 6))
    assert sample.sequences() == [(0, 3), (6, 9)]
    batch = pack([sample], device=CPU, share_prefixes=False)
    assert batch.row.ids_N.tolist() == [0, 1, 2, 6, 7, 8]
    assert batch.row.positions_N.tolist() == [0, 1, 2, 0, 1, 2]
    assert batch.targets_M.tolist() == [2, 8]


def test_a_thinking_model_needs_private_reasoning(tmp_path: object) -> None:
    folder = str(tmp_path)
    tiny_model(vocab_size=len(tokenizer_of("qwen3 thinking"))).save_pretrained(folder)
    tokenizer_of("qwen3 thinking").save_pretrained(folder)
    config = load_config(None, [f"model.path={folder}"])
    with pytest.raises(SettingsError, match=r"game\.options\.private_reasoning must be true"):
        read_rendering(config.model, config.game, seed=0)
    config = load_config(None, [f"model.path={folder}", "game.options.private_reasoning=true"])
    assert read_rendering(config.model, config.game, seed=0).rewritten
    check_run(config, here=False)
    with_sessions = [
        "engine.kind=sglang",
        "engine.sessions=true",
        "game.options.private_reasoning=true",
    ]
    config = load_config(None, [f"model.path={folder}", *with_sessions])
    with pytest.raises(SettingsError, match=r"engine\.sessions must be false with this chat"):
        check_run(config, here=False)
    off = load_config(None, [f"model.path={folder}", "model.chat_template.enable_thinking=false"])
    assert not read_rendering(off.model, off.game, seed=0).rewritten
