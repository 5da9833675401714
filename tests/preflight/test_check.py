"""Functions of one's own: what settings accept, what the check says of right and wrong ones, the
examples by hand, and a run with them."""

import hashlib
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from dialop.matching.game import MatchingGame
from selfplay.advantages.advantages import reward_samples
from selfplay.advantages.rewards import seat_reward, with_rewards
from selfplay.chat.rendering import Rendering
from selfplay.check import main
from selfplay.config import Config, RewardConfig
from selfplay.config.load import load
from selfplay.config.plugins import PLUGINS, as_setting, function_of, key_of
from selfplay.data.seeds import named_seed
from selfplay.preflight.functions import check_functions, findings
from selfplay.rollout.driver import play_games
from selfplay.rollout.episode import BranchPoint, Episode, GameSetup
from tests.helpers import small_games
from tests.helpers.chat_server import Answer, chat_server
from tests.helpers.dialop_boards import BEST, BRIEF, SMALL
from tests.helpers.hand_episodes import episode, with_advantages
from tests.helpers.scripted_engine import WaveEngine
from tests.helpers.small_games import LIMITS, SAMPLING, prepared
from tests.helpers.small_updates import batch_of
from tests.helpers.tiny_run import begin_warm, metrics_of, run_tiny, run_warm

METHOD = Path(__file__).resolve().parents[2] / "examples" / "method"
LOSS = f"{METHOD / 'squared_ratio.py'}:loss"

HEADS = {
    "algorithm.loss": "import torch\ndef {}(logprobs_M, batch, algorithm):\n    ",
    "algorithm.advantage": "import random\ndef {}(samples, state, algorithm):\n    ",
    "reward.function": "import random\ndef {}(episode):\n    ",
    "rollout.player": "from dataclasses import replace\n"
    "from selfplay.rollout.players import PolicyPlayer\nclass {}(PolicyPlayer):\n    ",
}
LOSS_OF = "-batch.advantages_M * "
# A key, the body of a function or class that cannot train, and why it is refused.
REFUSED = [
    (key, body, rule)
    for key, rows in {
        "algorithm.loss": {
            f"return {LOSS_OF}logprobs_M, {{'grad_norm': logprobs_M.detach()}}": (
                "metrics must have new names, got 'grad_norm'"
            ),
            f"return {LOSS_OF}logprobs_M, {{'proposals': logprobs_M.detach()}}": (
                "metrics must not reuse the game's names, got proposals"
            ),
            "raise SystemExit(0)": "own_[0-9]+.py:[0-9]+ mine: SystemExit: 0",
            f"return ({LOSS_OF}logprobs_M).mean(), {{}}": (
                r"losses_M must have the shape \[M\] of logprobs_M, \(8,\), got \(\)"
            ),
            f"return {LOSS_OF}logprobs_M": r"must return \(losses_M, metrics\), got Tensor",
            f"return {LOSS_OF}(logprobs_M - batch.old_logprobs_M).exp(), {{}}": (
                "losses must be finite, .*selfplay.learner.loss.ratio is"
            ),
            f"return {LOSS_OF}logprobs_M.detach(), {{}}": (
                "must depend on logprobs_M, got no gradient"
            ),
            f"return {LOSS_OF}logprobs_M * torch.rand(len(logprobs_M)), {{}}": (
                "must be deterministic"
            ),
            "return -(batch.advantages_M - batch.advantages_M.mean()) * logprobs_M, {}": (
                "must not depend on other samples"
            ),
            "logs_M = logprobs_M - batch.old_logprobs_M; return "
            f"{LOSS_OF}logs_M.mean().clamp(-20, 20).exp().expand_as(logs_M), {{}}": (
                "must not depend on other samples"
            ),
            "mean = logprobs_M.mean(); return "
            f"{LOSS_OF}(logprobs_M.detach() + mean - mean.detach()), {{}}": (
                "must not depend on other samples"
            ),
            "return -batch.advantages_M.clamp_(min=0) * logprobs_M, {}": (
                "must not change its batch"
            ),
            "return -batch.advantage_M * logprobs_M, {}": (
                "own_[0-9]+.py:[0-9]+ mine: AttributeError: .*nearest is advantages_M"
            ),
        },
        "algorithm.advantage": {
            "return [(0.0, 1.0)]": (
                r"\(baseline, divisor\) for each of 12 samples, got \[\(0.0, 1.0\)\]"
            ),
            "return [one.mean for one in samples]": (
                r"\(baseline, divisor\) for each of 12 samples, got \[0.0, 0.5"
            ),
            "return [(samples[i - i % 3].mean, 1.0) for i in range(len(samples))]": (
                "must not depend on the order of the samples"
            ),
            "return [(one.mean, one.variance) for one in samples]": (
                "divisors above 0, got 0.0 and 0.0 in a group of 3"
            ),
            "return [(random.random(), 1.0) for one in samples]": "must be deterministic",
            "state['last'] = samples; return [(0.0, 1.0)] * len(samples)": (
                "state must be numbers by name"
            ),
        },
        "reward.function": {
            "return [1.0], ()": r"2 finite numbers, one per seat, and .*got \(\[1.0\], ",
            "return [float('inf')] * 2, ()": "2 finite numbers, one per seat",
            "return [1.0, 1.0], [[0.5, 0.5]]": (
                r"or [2-9] lists, one per turn, .*, got \(\[1.0, 1.0\], \[\[0.5, 0.5\]\]\)"
            ),
            "return [1.0, 1.0]": (
                r"mine: must return \(rewards, turn rewards\): .*, got \[1.0, 1.0\] \("
            ),
            "return 0.5": r"mine: must return \(rewards, turn rewards\): .*, got 0.5 \(",
            "return [1.0, 1.0], [0.0 for _ in episode.turns]": (
                r"must return .*, got \(\[1.0, 1.0\], \[0.0, 0"
            ),
            "return [float(len(episode.turns[-1].text))] * 2, ()": (
                "own_[0-9]+.py:[0-9]+ mine: IndexError"
            ),
            "return [float(sum(len(turn.action) for turn in episode.turns))] * 2, ()": (
                "own_[0-9]+.py:[0-9]+ <?[a-z]*>?: TypeError"
            ),
            "return [random.random()] * 2, ()": "must be deterministic",
            "episode.measures['seen'] = 1.0; return [1.0, 1.0], ()": (
                "must not change the episode"
            ),
        },
        "rollout.player": {
            "async def move(self, game, seat, observation, generate):\n"
            "        async def more(request):\n"
            "            prompt = (1, *request.prompt_ids)\n"
            "            return await generate(replace(request, prompt_ids=prompt))\n"
            "        return await super().move(game, seat, observation, more)": (
                "each prompt must equal the transcript before its turn"
            ),
            "def fork(self, *names):\n        return self": (
                "a fork must have a separate transcript"
            ),
            "name = 'somebody'": "must be a PolicyPlayer",
        },
    }.items()
    for body, rule in rows.items()
]
GOOD = """
from selfplay.rollout.players import PolicyPlayer

def alone(logprobs_M, batch, algorithm):
    return -batch.advantages_M * logprobs_M

def turned(logprobs_M, batch, algorithm):
    return batch.advantages_M * logprobs_M, {}

def scalar(logprobs_M, batch, algorithm):
    return -batch.advantages_M * logprobs_M, {}

def other(logprobs, batch):
    return -logprobs, {}

def beside(samples, state, algorithm):
    of = {one.name: one.mean for one in samples}
    return [(of[f"{name} seat {1 - int(seat)}"], 1.0)
            for name, seat in (one.name.split(" seat ") for one in samples)]

def of_marks(episode):
    return [episode.measures["mark"]] * 2, ()

def for_the_user(episode):
    return [float(episode.outcome.agreed), episode.outcome.score_norm], ()

def for_the_assistant(episode):
    return [episode.outcome.score_norm, float(episode.outcome.agreed)], ()

class Thinker(PolicyPlayer):
    async def move(self, game, seat, observation, generate):
        thought = await super().move(game, seat, observation, generate)
        return thought and await super().move(game, seat, "Now move.", generate)
"""


def refusal(key: str, name: str) -> str:
    """Why the check refuses the function, under settings that name it."""
    return small_games.refusal(key, name, settings(f"{key}={name}"))


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of files with functions of one's own."""
    folder = tmp_path_factory.mktemp("own")
    (folder / "own_losses.py").write_text(GOOD)
    return folder


def settings(*overrides: str) -> Config:
    return load(Config, None, overrides)


@pytest.mark.parametrize(("key", "body", "rule"), REFUSED, ids=[row[1][:60] for row in REFUSED])
def test_what_cannot_train_is_refused_in_one_line(
    own: Path, key: str, body: str, rule: str
) -> None:
    file = own / f"own_{REFUSED.index((key, body, rule))}.py"
    file.write_text(HEADS[key].format("mine") + body.replace("; ", "\n    ") + "\n")
    said = refusal(key, f"{file}:mine")
    assert re.search(rule, said), said


def test_an_advantage_may_look_at_the_other_seat_of_a_game_by_name(own: Path) -> None:
    """The check's samples have the names that a run's have."""
    name = f"{own}/own_losses.py:beside"
    found = list(findings("algorithm.advantage", name, settings(f"algorithm.advantage={name}")))
    assert any("0, 0, 0 for a group of rewards 0, 0.5, 1; they do" in one for one in found)
    config = settings()
    samples, _ = reward_samples(
        [episode((0.5, 0.5))], algorithm=config.algorithm, reward=config.reward
    )
    names = [(one.name, one.group, one.seating) for one in samples]
    assert names == [
        (f"instance hand/0 episode 0 seat {seat}", f"seat {seat} of hand/0", f"seat {seat}")
        for seat in (0, 1)
    ]


def test_the_check_shows_advantages_of_samples_of_unlike_length_and_says_if_they_are_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The return over 4, 7 and 10 tokens, and a baseline that leaves nothing."""
    (tmp_path / "two.py").write_text(
        "def lengths(samples, state, algorithm):\n"
        "    return [(0.0, one.num_tokens) for one in samples]\n"
        "def nothing(samples, state, algorithm):\n"
        "    return [(one.mean, 1.0) for one in samples]\n"
    )
    for name, shown in (("lengths", "0, 0.0714, 0.1 for"), ("nothing", "do not distinguish")):
        assert main([f"{tmp_path / 'two.py'}:{name}"]) == 0
        assert shown in capsys.readouterr().out


@pytest.mark.parametrize(("name", "warned"), [("for_the_user", False), ("for_the_assistant", True)])
def test_a_check_plays_the_games_of_the_settings_and_says_if_all_are_paid_the_same(
    own: Path, name: str, warned: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    """Scripts that ask and that guess both answer. In these settings only seat 1 is the policy."""
    reward = f"{own}/own_losses.py:{name}"
    assert main([reward, "--config", "tiny_collab", "rollout.max_turns=6"]) == 0
    said = capsys.readouterr().out
    assert "in 16 games of collab between scripted players (ask, guess)" in said
    warning = "\nwarning: seat 1 gets the same reward in all 16 games"
    assert said.count("warning: ") == said.count(warning) == warned
    assert said.endswith(f"--config tiny_collab reward.function={reward} rollout.max_turns=6\n")


def test_a_reward_may_read_a_judges_mark(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    words = [f"{own}/own_losses.py:of_marks", "--config", "tiny", "methods.judge.rubric=rubric.md"]
    assert main([*words, "methods.judge.model=endpoint:judge@http://127.0.0.1:9/v1"]) == 0
    assert "ok  seat 1: mean 0.521, from 0.0417 to 1\n" in capsys.readouterr().out
    assert main(words[:3]) == 2
    assert "KeyError: 'mark'" in capsys.readouterr().err


# What a method needs to be on.
NEEDED = {
    "methods.ppo=on": ["algorithm.advantage=ppo"],
    "methods.judge=on": ["methods.judge={model: 'checkpoint:a', rubric: b}"],
    "methods.kl_reference=on": ["methods.kl_reference={every: 100}", "algorithm.kl=0.1"],
    "rollout.opponents=league": ["rollout={opponents: league, partners: [self, pool]}"],
}
OF_A_PROGRAM = "endpoint_seat"  # it plays only beside a program of the user's, on its event loop


@pytest.mark.parametrize("key", PLUGINS)
def test_the_built_in_functions_pass_the_checks_of_ones_own(key: str) -> None:
    for name in PLUGINS[key].built_in.keys() - {OF_A_PROGRAM}:
        on = f"methods.{name}=on" if key == "methods" else as_setting(key, name)
        words = NEEDED.get(on, [on])
        assert key == "methods" or name in PLUGINS[key_of(name)].built_in
        assert len(list(findings(key, name, settings(*words, "game.options.size=4")))) >= 2


def test_a_name_that_is_no_function_is_refused_before_a_run(
    own: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own_losses = own / "own_losses.py"
    for name, rule in {
        "cisp": "must be one of clip, gspo, cispo, reinforce, or .*nearest is cispo",
        "own_losses.py": "my_file.py:name, got 'own_losses.py'",
        ":loss": "my_file.py:name, got ':loss'",
    }.items():
        with pytest.raises(ValueError, match=f"algorithm.loss .*{rule}"):
            settings(f"algorithm.loss={name}")
    for name, rule in {
        f"{own_losses}:scaler": "a function of own_losses, got 'scaler'; nearest is scalar",
        f"{own_losses.with_name('own_loses.py')}:scalar": "existing .py file.*nearest is own_loss",
        "no_such_module:loss": "there is no module no_such_module",
        f"{own_losses}:other": r"of \(logprobs_M, batch, algorithm\), got other\(logprobs, batch\)",
    }.items():
        with pytest.raises(ValueError, match=f"algorithm.loss .*{rule}"):
            function_of("algorithm.loss", settings(f"algorithm.loss={name}").algorithm.loss)
    for words, rule in {
        f"{own_losses}:other": "other must take the parameters",
        "nofile.py:loss": "must be an existing .py file",
        f"{own_losses}:alone --config tiny_colab": "nearest shipped file is tiny_collab",
    }.items():
        assert main(words.split()) == 2
        said = capsys.readouterr().err
        assert said.startswith("selfplay.check: ") and rule in said and said.count("\n") == 1


def test_a_loss_of_the_wrong_sign_is_told(own: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([f"{own}/own_losses.py:turned"]) == 0
    said = capsys.readouterr().out
    assert "\nwarning: a step makes tokens of positive advantage less likely" in said
    config = settings(f"algorithm.loss={own}/own_losses.py:turned")
    other = replace(config, algorithm=replace(config.algorithm, kl=0.1))
    # A run's only policy, a second one with the same settings, and one with others.
    for policy, first, num in ((config, None, 1), (config, config, 0), (other, config, 1)):
        check_functions(policy, first)
        warned = capsys.readouterr().err
        line = f"warning: algorithm.loss {own}/own_losses.py:turned: a step ma"
        assert warned.startswith(line * num) and warned.count("\n") == num


# --- the examples, by hand ------------------------------------------------------------------------


def test_the_example_loss(capsys: pytest.CaptureFixture[str]) -> None:
    """Log-ratios 0 and 2 under tau 0.1: losses -A log pi + 0.05 x^2, gradients -A + 0.1 x."""
    logprobs_M = torch.tensor([-1.0, -1.0], requires_grad=True)
    batch = batch_of(torch.tensor([-1.0, -3.0]), torch.tensor([1.0, -0.5]))
    config = settings("algorithm.options.tau=0.1")
    losses_M, metrics = function_of("algorithm.loss", LOSS)(logprobs_M, batch, config.algorithm)
    losses_M.sum().backward()
    assert losses_M.tolist() == pytest.approx([1.0, -0.3])
    assert logprobs_M.grad is not None
    assert logprobs_M.grad.tolist() == pytest.approx([-1.0, 0.7])
    assert metrics["squared_log_ratio"].tolist() == [0.0, 4.0]
    assert main([LOSS, "algorithm.options.tau=0.1"]) == 0
    assert main([LOSS]) == 2
    why = "KeyError: 'tau'; if it is an option, give algorithm.options.tau=VALUE"
    assert why in capsys.readouterr().err


def test_the_example_advantage() -> None:
    """Rewards 0, 0.25 and 1 have the median 0.25; the other seat's group, of equal ones, is left
    out."""
    name = f"{METHOD / 'median.py'}:advantage"
    episodes = [episode((r, 1.0), i) for i, r in enumerate((0.0, 0.25, 1.0))]
    algorithm = settings(f"algorithm.advantage={name}").algorithm
    samples, _ = reward_samples(episodes, algorithm=algorithm, reward=RewardConfig())
    advantages = [s.advantages[-1] for s in with_advantages(samples, algorithm=algorithm)]
    assert len(samples) == 6 and advantages == [-0.25, 0.0, 0.75]
    assert main([name]) == 0


def test_the_example_reward() -> None:
    """Seat 0 says "?" three times and pays 0.1 for the second and the third; seat 1 says it once.
    A continuation of a branch point is paid alike."""
    name = f"{METHOD / 'no_repeats.py'}:reward"
    config = settings(f"reward.function={name}").reward
    repeated = episode((0.5, 0.75), errors=(3, 1))
    point = BranchPoint(turn=0, seat=0, continuations={(1, 0): repeated})
    (paid,) = with_rewards([replace(episode((0.5, 0.75)), branches=(point,))], config)
    assert paid.paid == ((0.5, 0.75), ())
    (game,) = paid.branches[0].continuations.values()
    assert game.paid == ((0.5, 0.75), ((0, 0), (-0.1, 0), (-0.1, 0), (0, 0)))
    assert game.own_rewards == ((0.5, 0.75), ((),) * 4), "the game's own stay beside it"
    assert [seat_reward(game, seat, config=config) for seat in (0, 1)] == pytest.approx([0.3, 0.75])
    assert repeated.turns[1].rewards == (), "the input is not changed"
    assert main([name]) == 0
    dear = settings(f"reward.function={name}", "reward.options.cost=0.3").reward
    (paid,) = with_rewards([repeated], dear)
    assert paid.paid is not None
    assert paid.paid[1] == ((0, 0), (-0.3, 0), (-0.3, 0), (0, 0))


def test_options_of_a_reward_need_a_parameter(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    own = tmp_path / "without_options.py"
    own.write_text("def reward(episode):\n    return episode.outcome.rewards, ()\n")
    assert main([f"{own}:reward", "reward.options.cost=1"]) == 2
    assert "it must have a parameter options, as in reward(ep" in capsys.readouterr().err
    with_cost = tmp_path / "with_cost.py"
    with_cost.write_text(
        "def reward(episode, options=None):\n    return [options['cost']] * 2, ()\n"
    )
    assert main([f"{with_cost}:reward", "reward.options.fee=1"]) == 2
    said = capsys.readouterr().err
    assert "KeyError: 'cost'" in said and "give reward.options.cost=VALUE (given: fee)" in said
    with pytest.raises(ValueError, match=r"custom reward.function, got cost for score_norm"):
        settings("reward.options.cost=1")


def test_the_example_player(rendering: Rendering) -> None:
    """Both seats read the hint before their turns; only what they sampled trains."""
    name = f"{METHOD / 'reminded.py'}:Reminded"
    room = {"max_new_tokens": 100, "max_game_tokens": 900}
    reminded = function_of("rollout.player", name)
    players = tuple(reminded(rendering, seed_names=("hand", 0), **room) for _ in (0, 1))
    engine = WaveEngine(rendering, prepared([(0, BEST), (1, "[accept]")]))
    setup = GameSetup(MatchingGame(SMALL, BRIEF), players, SMALL.key, 0)
    (played,), _ = play_games([setup], engine, sampling=SAMPLING, limits=LIMITS)
    assert played.outcome.agreed
    for transcript, text in zip(played.transcripts, (BEST, "[accept]"), strict=True):
        assert transcript is not None
        assert rendering.decode(transcript.ids).count("(Use at most ten words.)") == 1
        trained = [i for i, m in zip(transcript.ids, transcript.mask, strict=True) if m]
        assert trained == rendering.action_ids(text)


def test_a_player_that_thinks_before_its_move_has_one_turn_of_both(
    own: Path, rendering: Rendering
) -> None:
    """The thought and the move are tokens of one turn: it ends with the move, where its reward
    stands, and costs both. A thought that takes the move's last tokens ends the game."""
    name = f"{own}/own_losses.py:Thinker"
    assert len(list(findings("rollout.player", name, settings(f"rollout.player={name}")))) == 2
    made = function_of("rollout.player", name)
    said = [(0, "let me see"), (0, BEST), (1, "good"), (1, "[accept]")]
    texts = {named_seed("hand", 0, seat, k % 2): text for k, (seat, text) in enumerate(said)}

    def played(max_game_tokens: int) -> Episode:
        room = {"max_new_tokens": 100, "max_game_tokens": max_game_tokens}
        players = tuple(made(rendering, seed_names=("hand", 0), **room) for _ in (0, 1))
        setup = GameSetup(MatchingGame(SMALL, BRIEF), players, SMALL.key, 0)
        engine = WaveEngine(rendering, texts)
        (episode,), _ = play_games([setup], engine, sampling=SAMPLING, limits=LIMITS)
        return episode

    episode = played(900)
    assert [turn.text for turn in episode.turns] == [BEST, "[accept]"]
    for seat, (thought, move) in enumerate((("let me see", BEST), ("good", "[accept]"))):
        (span,), transcript = episode.transcripts[seat].spans, episode.transcripts[seat]
        parts = [rendering.action_ids(text) for text in (thought, move)]
        assert transcript.ids[span.start :][: len(parts[0])] == parts[0]
        assert transcript.ids[: span.end][-len(parts[1]) :] == parts[1]
        assert sum(transcript.mask) == sum(map(len, parts)) == episode.turns[seat].num_tokens
    (span,) = episode.transcripts[0].spans
    cut = played(span.start + len(rendering.action_ids("let me see")) + 1)
    assert (cut.ended, [turn.text for turn in cut.turns]) == ("tokens", [""])
    assert cut.turns[0].num_tokens == sum(cut.transcripts[0].mask) > 0


# --- a run with all of them -----------------------------------------------------------------------


def test_a_run_with_functions_of_ones_own(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A judge marks the scripted game that tries it, then every other game; the others are void.
    `code.txt` has the files' digests."""
    files = {
        "algorithm.loss": LOSS,
        "algorithm.advantage": f"{METHOD / 'median.py'}:advantage",
        "reward.function": f"{METHOD / 'no_repeats.py'}:reward",
        "rollout.player": f"{METHOD / 'reminded.py'}:Reminded",
    }
    (tmp_path / "rubric.md").write_text("Rate the talk.")

    def marks(body: dict[str, Any], number: int) -> Answer:
        return Answer("no" if number % 2 else f'{{"mark": {number / 64}}}')  # no two alike

    with chat_server(marks) as server:
        words = [f"{key}={name}" for key, name in files.items()]
        words += ["algorithm.options.tau=0.1", f"methods.judge.rubric={tmp_path / 'rubric.md'}"]
        words += [f"methods.judge.model=endpoint:judge@{server.url}", "rollout.max_turns=3"]
        folder = run_warm(tmp_path / "run", *words, "steps=2")
        code = (folder / "code.txt").read_text()
        for key, name in files.items():
            digest = hashlib.sha256(Path(name.rpartition(":")[0]).read_bytes()).hexdigest()
            assert f"{key} {name} sha256 {digest}\n" in code
        (folder / "code.txt").write_text(code.replace(digest, "0" * 64))
        assert run_tiny(folder, *words, "steps=3") == 0
    said = capsys.readouterr().out
    assert f"continues with a changed rollout.player {files['rollout.player']}\n" in said
    first, second, _ = metrics_of(folder)
    for line, mark in ((first, 9 / 64), (second, 25 / 64)):  # of 2 … 16, 18 … 32
        assert line["squared_log_ratio"] >= 0 and line["mark"] == pytest.approx(mark)
        assert line["num_void"] == 8 and line["num_endpoint_requests"] == 16


def test_an_exit_in_a_step_is_an_error_after_a_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The first step's games go to another folder, in the second the function exits with status 0.
    The state between them is saved in the run's one folder, and the same command goes on."""
    own, other = tmp_path / "leaves.py", tmp_path / "other"
    other.mkdir()
    own.write_text(
        "import os, sys\nfrom pathlib import Path\n"
        "def reward(episode):\n"
        f"    run, once = Path({str(tmp_path)!r}) / 'run', Path({str(tmp_path)!r}) / 'once'\n"
        "    if (run / 'metrics.jsonl').exists() and episode.players[0] == 'policy':\n"
        f"        os.chdir({str(other)!r})\n"
        "        if (run / 'metrics.jsonl').stat().st_size and not once.exists():\n"
        "            once.touch()\n"
        "            sys.exit(0)\n"
        "    return episode.outcome.rewards, ()\n"
    )
    words = (f"reward.function={own}:reward", "steps=2", "save_every=9")
    begin_warm(tmp_path / "run", *words)
    monkeypatch.chdir(tmp_path)
    assert run_tiny(Path("run"), *words) == 1
    said = capsys.readouterr().err
    place = rf"{own}:reward: leaves.py:9 reward: SystemExit: 0 \(in instance .* episode \d+\)"
    saved = "the state after step 1 is saved, and the same command continues with step 2"
    end = f"{saved}; the trace.* is"
    (line,) = [line for line in said.splitlines() if line.startswith("train.py: ")]
    assert re.match(rf"train.py: reward.function {place}; {end} in {tmp_path}/run/error.txt$", line)
    assert [path.name for path in (tmp_path / "run" / "checkpoints").iterdir()] == ["step_000001"]
    monkeypatch.chdir(tmp_path)
    assert run_tiny(Path("run"), *words) == 0
    assert len(metrics_of(tmp_path / "run")) == 2 and not list(other.iterdir())
