"""Partners: specs, shares and seats, their engines and the policy pool."""

import asyncio
import shutil
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from selfplay.chat.rendering import Rendering, make_rendering
from selfplay.checkpoint import export_atomically
from selfplay.config import RolloutConfig
from selfplay.config.player_spec import parse_shares, parse_spec
from selfplay.config.text import dump
from selfplay.distributed import init_world
from selfplay.engines.base import Completion, Request
from selfplay.engines.hf import HFEngine
from selfplay.errors import SettingsError
from selfplay.evaluation.held_out import check_fixed_partners
from selfplay.metrics.step import game_sums
from selfplay.partners.checkpoints import check_partners
from selfplay.partners.frozen import snapshot_weights
from selfplay.partners.partners import Partners
from selfplay.partners.pool import snapshot_folder
from selfplay.partners.router import EngineRouter, Frozen
from selfplay.partners.specs import read_spec
from selfplay.rollout.driver import play_games
from selfplay.rollout.episode import GameSetup, Position
from selfplay.rollout.players import FrozenPlayer, PolicyPlayer
from selfplay.rollout.seating import SELF_PLAY, Partner, scripted_partner
from tests.helpers.chat_families import tokenizer_of
from tests.helpers.chat_server import Answer, chat_server
from tests.helpers.scripted_engine import WaveEngine
from tests.helpers.small_games import (
    LIMITS,
    SAMPLING,
    Proposes,
    ProposesInAStream,
    boards,
    config_of,
    games_of,
)
from tests.helpers.small_updates import learner_of
from tests.helpers.tiny_run import (
    RUN_GAP,
    RUNS,
    finished,
    metrics_of,
    run_tiny,
    run_warm,
    same_weights,
    tiny_model,
)


def scripted(spec: str) -> Partner:
    config = config_of()
    return Partner(
        f"scripted:{spec}", lambda names, seat: scripted_partner(spec, names, seat, config.game)
    )


# --- specs --------------------------------------------------------------------------------------


def test_a_spec_has_a_kind_and_an_argument() -> None:
    spec = parse_spec("scripted:honest:tell=top")
    assert (spec.kind, spec.argument) == ("scripted", "honest:tell=top")
    spec = parse_spec("endpoint:org/small:free@https://host.example/v1/")
    assert spec.address == ("org/small:free", "https://host.example/v1")
    assert parse_spec("self").text == "self"


def test_a_bad_spec_is_refused_with_the_nearest_valid_one() -> None:
    for bad, nearest in (
        *(("honest", "scripted:honest"), ("scripted", "scripted:NAME")),
        *(("scripted:", "scripted:NAME"), ("chekpoint:x", "checkpoint:PATH"), ("pool:20", "pool")),
        *(("endpoint:small", "endpoint:MODEL@URL"), ("endpoint:@http://x", "endpoint:MODEL@URL")),
    ):
        with pytest.raises(ValueError, match=nearest):
            parse_spec(bad, ("honest", "solo"))
    with pytest.raises(SettingsError, match="nearest is honest"):
        read_spec("scripted:honst", config_of().game, RolloutConfig(), what="rollout.partners")


def test_shares_add_up_to_one_and_each_partner_occurs_once() -> None:
    pairs = parse_shares(["self", "scripted:honest:slip=0.1*0.5", "pool*0.5"])
    assert [(spec.text, share) for spec, share in pairs] == [
        ("self", 0.5),
        ("scripted:honest:slip=0.1", 0.25),
        ("pool", 0.25),
    ]
    assert [share for _, share in parse_shares(["self", "pool*0"])] == [1.0, 0.0]
    for bad in (["self*x"], ["self*-1"], ["self*0"], ["self", "self*2"]):
        with pytest.raises(ValueError, match="self"):
            parse_shares(bad)


# --- shares and seats ---------------------------------------------------------------------------


def player_names(setups: Sequence[GameSetup]) -> list[tuple[str, ...]]:
    return [tuple(player.name for player in setup.players) for setup in setups]


def test_partners_get_their_shares_and_the_policy_has_each_seat_half_the_time(
    rendering: Rendering,
) -> None:
    partners = [(SELF_PLAY, 0.5), (scripted("solo"), 0.25), (scripted("honest"), 0.25)]
    counts: Counter[tuple[str, ...]] = Counter()
    for step in range(5):
        setups = games_of(boards(8), rendering, config_of(), partners, step=step)
        names = player_names(setups)
        counts.update(names)
        by_instance = {s.instance: set(n) for s, n in zip(setups, names, strict=True)}
        assert len(by_instance) == 8 and all(len(group) <= 2 for group in by_instance.values())
    # 5 steps of 8 instances with 4 games: shares of an eighth of a step come out exactly.
    assert counts == {
        ("policy", "policy"): 80,
        ("policy", "scripted:solo"): 20,
        ("scripted:solo", "policy"): 20,
        ("policy", "scripted:honest"): 20,
        ("scripted:honest", "policy"): 20,
    }


def test_partners_are_drawn_with_a_named_seed(rendering: Rendering) -> None:
    partners = [(SELF_PLAY, 0.7), (scripted("solo"), 0.3)]

    def seated(step: int, seed: int) -> list[tuple[str, ...]]:
        config = config_of(f"seed={seed}")
        return player_names(games_of(boards(3), rendering, config, partners, step=step))

    assert seated(0, 0) == seated(0, 0)
    drawn = {tuple(seated(step, seed)) for step in range(8) for seed in (0, 1)}
    assert len(drawn) > 1
    # Three instances cannot hold 0.7 exactly; on average they do.
    num_self = sum(seated(step, 0).count(("policy", "policy")) for step in range(60))
    assert num_self / (60 * 12) == pytest.approx(0.7, abs=0.05)


# --- partners with engines ----------------------------------------------------------------------


def frozen_partner(rendering: Rendering, name: str = "checkpoint:x") -> Partner:
    def sit(names: tuple[object, ...], seat: int) -> FrozenPlayer:
        policy = PolicyPlayer(
            rendering, seed_names=names, max_new_tokens=60, max_game_tokens=900, model=name
        )
        return FrozenPlayer(policy, name=name)

    return Partner(name, sit)


@pytest.mark.parametrize("kind", [Proposes, ProposesInAStream])
def test_a_frozen_player_uses_its_own_engine_and_leaves_no_transcript(
    kind: type[WaveEngine], rendering: Rendering
) -> None:
    policy, other = kind(rendering, {}), Proposes(rendering, {})
    router = EngineRouter(policy, frozen={"checkpoint:x": Frozen(other, (1, 2))}, endpoints={})
    setups = games_with_frozen(rendering, num=4)
    episodes, _ = play_games(setups, router, sampling=SAMPLING, limits=LIMITS)
    assert len(episodes) == 16
    for episode in episodes:
        seat = episode.players.index("policy")
        assert episode.transcripts[seat] is not None and episode.transcripts[1 - seat] is None
    assert {request.model for request in policy.asked} == {""}
    assert {request.model for request in other.asked} == {"checkpoint:x"}
    measured = game_sums(episodes).means()
    assert {"score/checkpoint:x/0", "score/checkpoint:x/1"} <= set(measured)


def test_frozen_partners_answer_alike_in_waves_and_in_a_stream(rendering: Rendering) -> None:
    """With a real second model, once in waves and once in its own thread."""
    model = tiny_model(seed=3, vocab_size=len(tokenizer_of("no template")))
    texts = []
    for kind in (Proposes, ProposesInAStream):
        frozen = Frozen(HFEngine(model), rendering.stop_ids)
        router = EngineRouter(kind(rendering, {}), frozen={"checkpoint:x": frozen}, endpoints={})
        setups = games_with_frozen(rendering, num=2)
        episodes, _ = play_games(setups, router, sampling=SAMPLING, limits=LIMITS)
        texts.append([[turn.text for turn in episode.turns] for episode in episodes])
    assert texts[0] == texts[1]


class InRollouts:
    """Answers only inside a rollout, of which it counts those that are open and all."""

    num_open = num = 0
    fails = False

    @contextmanager
    def rollout(self) -> Iterator[None]:
        self.num_open, self.num = self.num_open + 1, self.num + 1
        try:
            yield
        finally:
            self.num_open -= 1

    def answer(self, request: Request) -> Completion:
        assert self.num_open == 1
        if self.fails:
            raise ValueError("out of memory, say")
        return super().answer(request)  # type: ignore[misc]


@pytest.mark.parametrize("kind", [Proposes, ProposesInAStream])
def test_all_engines_share_one_rollout_which_ends_with_an_error_too(
    rendering: Rendering, kind: type[WaveEngine]
) -> None:
    class Policy(InRollouts, kind):  # type: ignore[misc, valid-type]
        pass

    class Other(InRollouts, Proposes):
        pass

    policy, other = Policy(rendering, {}), Other(rendering, {})
    router = EngineRouter(policy, frozen={"checkpoint:x": Frozen(other, ())}, endpoints={})
    for num, fails in ((1, False), (2, True)):
        other.fails = fails
        with pytest.raises(ValueError, match="memory") if fails else nullcontext():
            setups = games_with_frozen(rendering, num=2)
            play_games(setups, router, sampling=SAMPLING, limits=LIMITS)
        assert (policy.num_open, other.num_open) == (0, 0)
        assert (policy.num, other.num) == (num, num)


@pytest.mark.parametrize("kind", [Proposes, ProposesInAStream])
@pytest.mark.parametrize("error", [OSError, StopIteration, BaseException])
def test_an_error_in_a_partner_engine_reaches_the_rollout(
    rendering: Rendering, kind: type[WaveEngine], error: type[BaseException]
) -> None:
    class Broken(Proposes):
        def answer(self, request: Request) -> Completion:
            raise error("out of memory, say")

    def play() -> None:
        setups = games_with_frozen(rendering, num=3)
        play_games(setups, with_partner(kind, Broken, rendering), sampling=SAMPLING, limits=LIMITS)

    with pytest.raises(RuntimeError if error is StopIteration else error):
        within_seconds(play)


def with_partner(
    kind: type[WaveEngine], partner: type[WaveEngine], rendering: Rendering
) -> EngineRouter:
    frozen = Frozen(partner(rendering, {}), ())
    return EngineRouter(kind(rendering, {}), frozen={"checkpoint:x": frozen}, endpoints={})


def games_with_frozen(rendering: Rendering, *, num: int) -> list[GameSetup]:
    return games_of(boards(num), rendering, config_of(), [(frozen_partner(rendering), 1.0)])


def within_seconds(play: Callable[[], None]) -> None:
    """Run `play`; a rollout that hangs fails after two minutes."""

    def out_of_time(*_: object) -> None:
        raise TimeoutError("the rollout hangs")

    before = signal.signal(signal.SIGALRM, out_of_time)
    signal.alarm(120)
    try:
        play()
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def test_a_fork_of_a_frozen_player_is_independent(rendering: Rendering) -> None:
    """The fork has the same context as the original and other seeds."""
    setup = games_with_frozen(rendering, num=1)[1]
    position, engine = Position(setup, LIMITS), Proposes(rendering, {})
    requests: list[Request] = []

    async def generate(request: Request) -> Completion:
        requests.append(request)
        return engine.answer(request)

    asyncio.run(position.turn(generate))
    assert position.turns[0].action == "propose" and requests.pop().model == "checkpoint:x"
    twin = position.fork("branch", 1)
    assert twin.setup.players[0] is not setup.players[0]
    for each in (position, twin):
        player = each.setup.players[0]
        assert player.name == "checkpoint:x" and player.transcript is None
        asyncio.run(player.move(each.setup.game, 0, "again", generate))
    assert requests[0].prompt_ids == requests[1].prompt_ids
    assert requests[0].seed != requests[1].seed


# --- the pool -----------------------------------------------------------------------------------


def test_a_snapshot_replaces_an_older_one_and_is_read_back(tmp_path: Path) -> None:
    model, other, tokenizer = tiny_model(seed=1), tiny_model(seed=2), tokenizer_of("no template")
    folder = snapshot_folder(tmp_path, 20)
    for weights in (other, model):
        export_atomically(weights, tokenizer, folder, world=init_world(device="cpu"))
    assert [path.name for path in folder.parent.iterdir()] == ["step_000020"]
    HFEngine(other).update_weights(snapshot_weights(folder), 1)
    expected, loaded = model.state_dict(), other.state_dict()
    assert expected.keys() == loaded.keys()
    assert all(torch.equal(expected[name], loaded[name]) for name in expected)


def test_a_frozen_checkpoint_with_other_weights_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """At the start that reads them, however often its state is restored; what it saves has the
    digest of the weights that it plays with, also when their files are gone."""
    folder, world = tmp_path / "b", init_world(device="cpu")
    spec, config = parse_spec(f"checkpoint:{folder}"), config_of(f"out={tmp_path / 'run'}")
    tokenizer = tokenizer_of("no template")
    rendering, learner = make_rendering(tokenizer), learner_of(tiny_model())
    state: dict[str, Any] = {}
    told = f"{tmp_path / 'run'} continues with a changed {spec.text}\n"
    for seed, expected in ((1, ""), (1, ""), (2, told), (2, "")):
        export_atomically(tiny_model(seed=seed), tokenizer, folder, world=world)
        partners = Partners([spec], config, rendering=rendering, world=world)
        capsys.readouterr()
        partners.restore(state, learner, tokenizer)
        assert capsys.readouterr().out == expected
        shutil.rmtree(folder)
        state = partners.state()
        assert list(state["weights"]) == [spec.text]
        partners.restore(state, learner, tokenizer)
        assert capsys.readouterr().out == ""


# --- full runs ----------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def pool_run() -> Path:
    return finished(*RUNS["pool"])


def test_a_run_with_its_policy_pool(pool_run: Path) -> None:
    lines = metrics_of(pool_run)
    for line in lines:
        pool_scores = [name for name in line if name.startswith("score/pool:")]
        assert len(pool_scores) == 2 and "score/self" in line and line["num_groups"] > 8
        assert line["mismatch_max"] < RUN_GAP, "only the policy's own tokens train"
    snapshots = sorted(path.name for path in (pool_run / "policy_pool").iterdir())
    assert snapshots == ["step_000000", "step_000001", "step_000002", "step_000003"]
    pool = pool_run / "policy_pool"
    assert same_weights(pool / "step_000000", pool_run / "warm_start")
    assert same_weights(pool / "step_000003", pool_run / "final")


def test_a_run_with_a_frozen_checkpoint_and_a_script(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The checkpoint is the run's own warm start; each partner plays a third of the games."""
    folder = tmp_path / "run"
    frozen = f"checkpoint:{folder}/warm_start"
    partners = f"rollout.partners=[self,{frozen},scripted:honest]"
    run_warm(folder, partners, "rollout.instances=6", "steps=2")
    assert "MiB of additional weights on cpu" in capsys.readouterr().out
    for line in metrics_of(folder):
        scores = {name for name in line if name.startswith("score/")}
        assert scores == {
            "score/self",
            *(f"score/{name}/{seat}" for name in (frozen, "scripted:honest") for seat in (0, 1)),
        }
        assert line["mismatch_max"] < RUN_GAP and line["num_groups"] > 8


def test_an_endpoint_is_tried_before_the_warm_start(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with chat_server(lambda body, number: Answer(body=b"", status=401)) as server:
        words = [f"rollout.partners=[self*0.5, endpoint:m@{server.url}*0.5]", "endpoint.retries=0"]
        assert run_tiny(tmp_path / "run", *words) == 2
        assert len(server.bodies) == 1
    said = capsys.readouterr().err
    assert f"rollout.partners must answer before the run: endpoint:m@{server.url}: " in said
    assert "HTTP 401" in said and not (tmp_path / "run" / "warm_start").exists()


@pytest.mark.parametrize("partner", ["rollout.partners=[{}]", "eval.partners=[{}]"])
def test_a_partner_of_another_game_ends_at_once(
    partner: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """A policy without private reasoning may play where it is on, but not the other way round."""
    other, evaluating = tmp_path / "other", ("eval.every=2",)
    (other / "final").mkdir(parents=True)
    for name in ("config.json", "model.safetensors"):
        (other / "final" / name).touch()
    sits = partner.format(f"checkpoint:{other}")
    run = f"out={tmp_path}/run"
    for words in (
        "game.options.brief=false",
        "game.options.messages=false",
        "game.options.private_reasoning=true",
    ):
        key, _, value = words.partition("=")
        (other / "config.yaml").write_text(dump(config_of(words)))
        assert run_tiny(tmp_path / "run", *evaluating, sits) == 2
        message = capsys.readouterr().err
        assert f"{key} must be" in message
        assert f"got {value} in {other} and " in message and f"in {tmp_path / 'run'}\n" in message
    assert not (tmp_path / "run").exists()
    older = dump(config_of()) + "a_key_that_went: 1\n"
    (other / "config.yaml").write_text(older)
    config = config_of(*evaluating, sits, run, "game.options.private_reasoning=true")
    given = {"out": config.out, "what": "rollout.partners", "seats": [0, 1]}
    check_partners(config.rollout.partners, config.game, **given)
    check_fixed_partners(config.eval, config.game, config.rollout, out=config.out)
