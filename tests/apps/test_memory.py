"""Memory by phase: near what was measured, refused where it cannot fit, with settings that fit."""

import shutil
from dataclasses import replace
from functools import cache
from pathlib import Path

import pytest
from huggingface_hub.utils import filter_repo_objects

import train
from bench.rows import SHAPES
from bench.shapes import qwen2_config
from dialop.matching.kit import write as write_instances
from selfplay.apps.plan.dry_run import model_shape
from selfplay.apps.plan.memory import (
    GIB,
    Demand,
    Shape,
    cache_tokens,
    estimate,
    estimate_policies,
    gpu_gib,
    remedy,
    shared_out,
    why_not,
    why_not_policies,
)
from selfplay.chat.rendering import make_rendering
from selfplay.config import Config, LoraConfig, OptimConfig, load_config
from selfplay.data.instances import TRAIN, generated
from selfplay.learner.optimizer import make_optimizer
from selfplay.model.hub import local_folder
from selfplay.model.lora import add_adapters
from selfplay.warm_start.imitation import scratch_tokenizer
from tests.helpers.run_folders import untrained_run
from tests.helpers.tiny_run import TINY, tiny_model

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
H100, H200 = gpu_gib(80), gpu_gib(141)


@cache
def shape_of(size: str, lora: LoraConfig | None) -> Shape:
    return model_shape(qwen2_config(size), lora)


def demand_of(size: str, config: Config, *, total: float = H200) -> Demand:
    """The demand of a Qwen2.5 model with these settings."""
    return Demand.of(config, shape_of(size, config.model.lora), total=total)


# GiB of a pass of so many tokens before there are moments, measured on one H200 (docs/gpu.md).
MEASURED = [
    ("0.5B", 16_384, "none", True, 19.0),
    ("0.5B", 32_768, "none", True, 34.0),
    ("0.5B", 32_768, "none", False, 46.5),
    ("7B", 16_384, "none", True, 113.1),
    ("7B", 16_384, "full", True, 65.1),
]


@pytest.mark.parametrize(("size", "tokens", "checkpointing", "liger", "gib"), MEASURED)
def test_a_pass_is_estimated_near_what_was_measured(
    size: str, tokens: int, checkpointing: str, liger: bool, gib: float
) -> None:
    config = load_config(
        None,
        [
            *("model.path=x", "model.dtype=bfloat16", f"optim.tokens_per_microbatch={tokens}"),
            *(f"parallel.checkpointing={checkpointing}", f"model.liger={str(liger).lower()}"),
        ],
    )
    update = estimate(demand_of(size, config)).phases["update"]
    # One micro-batch: gradients come as the copy of the weights and the activations go.
    forward = sum(update[part] for part in ("copies in the compute dtype", "activations", "logits"))
    backward = sum(
        update[part]
        for part in ("gradients", "activations", "logits", "gradients of the root above the pass")
    )
    passed = update["weights"] + max(forward, backward if checkpointing == "full" else 0.0)
    assert 0.95 * gib < passed < 1.1 * gib


FITTING = [
    ("qwen2.5_0.5b", "0.5B", 1, H100),
    ("qwen2.5_1.5b", "1.5B", 1, H100),
    ("qwen2.5_7b_lora", "7B", 1, H100),
    ("qwen2.5_7b_lora warm_start.num_games=512", "7B", 1, H100),
    ("qwen2.5_0.5b_rules", "0.5B", 1, H100),
    ("collab_qwen0.5b", "0.5B", 1, H100),
    ("own_game", "1.5B", 1, H100),
    ("own_game_lora", "7B", 1, H100),
    ("qwen2.5_7b_1gpu", "7B", 1, H200),
    ("qwen2.5_7b", "7B", 2, H200),
    ("qwen2.5_7b", "7B", 8, H200),
]


@pytest.mark.parametrize(("name", "size", "ranks", "total"), FITTING)
def test_shipped_configs_fit_where_they_say(name: str, size: str, ranks: int, total: float) -> None:
    name, *words = name.split()
    config = load_config(CONFIGS / f"{name}.yaml", words)
    assert why_not(replace(demand_of(size, config, total=total), ranks=ranks)) is None


@pytest.mark.parametrize(
    ("name", "size", "ranks", "total"),
    [
        ("own_game", "1.5B", 1, H100),
        ("qwen2.5_1.5b", "1.5B", 1, H100),
        ("qwen2.5_7b_lora", "7B", 1, H100),
        ("collab_math", "1.5B", 1, H100),
        ("qwen2.5_7b", "7B", 2, H200),
        ("qwen2.5_7b_1gpu", "7B", 1, H200),
    ],
)
def test_a_config_lowers_the_share_of_memory_only_where_the_default_does_not_fit(
    name: str, size: str, ranks: int, total: float
) -> None:
    default = load_config(None, ["engine.kind=sglang", "model.path=x"]).engine.mem_fraction
    config = load_config(CONFIGS / f"{name}.yaml", [f"engine.mem_fraction={default}"])
    reason = why_not(replace(demand_of(size, config, total=total), ranks=ranks))
    assert reason is not None and "play" in reason


@pytest.mark.parametrize("name", ["scratch_h200", "planning_h200", "mediation_h200"])
def test_an_imitation_beside_a_sleeping_engine_needs_no_more_than_an_update(name: str) -> None:
    """So an engine may start before it: where the run fits, both fit."""
    config = load_config(CONFIGS / f"{name}.yaml")
    phases = estimate(demand_of("26M", config)).phases
    start, update = phases["warm start"], phases["update"]
    assert start["engine asleep"] == update["engine asleep"] >= 2.0
    assert sum(start.values()) <= sum(update.values())
    for words in (["warm_start.num_games=8"], ["warm_start={num_games: 8, optimizer: muon}"]):
        phases = estimate(
            demand_of("1.5B", load_config(CONFIGS / "qwen2.5_1.5b.yaml", words))
        ).phases
        assert sum(phases["warm start"].values()) <= sum(phases["update"].values())


def test_what_does_not_fit_gets_settings_with_which_it_fits() -> None:
    def asked(*words: str, total: float = H200) -> Demand:
        config = load_config(CONFIGS / "qwen2.5_7b.yaml", words)
        return replace(demand_of("7B", config, total=total), ranks=1)

    assert why_not(asked()) is not None
    words = remedy(asked())
    assert words
    assert why_not(asked(*words)) is None
    for word in words:  # none of them is needless
        assert why_not(asked(*(w for w in words if w != word))) is not None
    assert remedy(asked(total=H100)) == []


def test_copies_of_the_weights_are_counted() -> None:
    """One data-parallel rank keeps the weights in bf16 through a pass if the masters are fp32, and
    those of a reference beside them. The hf engine has its own copy in fp32."""
    words = ["model.path=x", "model.dtype=bfloat16", "engine.kind=sglang", "algorithm.kl=0.03"]
    config = load_config(None, words)
    alone = estimate(demand_of("1.5B", config)).phases
    shared = estimate(replace(demand_of("1.5B", config), ranks=2)).phases
    lower = load_config(None, [*words, "optim.master_dtype=bfloat16"])
    same = estimate(demand_of("1.5B", lower)).phases
    bf16 = 2 * demand_of("1.5B", config).shape.base / GIB
    above, passes = alone["play"]["sync check above the passes"], alone["play"]["engine's passes"]
    assert above == pytest.approx(max(0.0, bf16 - passes)) and above + passes >= bf16
    assert alone["update"]["copies in the compute dtype"] == pytest.approx(2 * bf16)
    for phases in (shared, same):
        assert phases["play"]["sync check above the passes"] == 0
        assert phases["update"]["copies in the compute dtype"] == 0
    own = load_config(None, [*words, "engine.kind=hf"])
    assert estimate(demand_of("1.5B", own)).phases["play"]["engine's weights"] == pytest.approx(
        2 * bf16
    )


def of_policies(size: str, *words: str, **own: str) -> dict[str, Demand]:
    """The demands of policies with the settings of their names besides these."""
    words = ("model.path=x", "model.dtype=bfloat16", "engine.kind=sglang", *words)
    configs = {name: load_config(None, [*words, *more.split()]) for name, more in own.items()}
    return {name: demand_of(size, config) for name, config in configs.items()}


def test_policies_hold_the_base_of_their_adapters_once() -> None:
    """In fp32 4 bytes a weight, in the engines a merged copy each; only the one's own pass."""
    ranks = {"user": "model.lora.rank=16", "agent": "model.lora.rank=64"}
    demands = of_policies("7B", "algorithm.kl=0.1", "engine.mem_fraction=0.25", **ranks)
    base, small, large = (
        num * 4 / GIB
        for num in (demands["user"].shape.base, *(d.shape.adapters for d in demands.values()))
    )
    phases = estimate_policies(demands).phases
    assert [*phases] == ["play", "update/user", "update/agent", "push"]
    for parts in phases.values():
        assert parts["weights"] == pytest.approx(base + small + large)
    for name, own in (("user", small), ("agent", large)):
        alone, update = estimate(demands[name]).phases["update"], phases[f"update/{name}"]
        assert update["gradients"] == pytest.approx(own)
        assert update["moments"] == pytest.approx(2 * (small + large))
        assert update["activations"] == alone["activations"] and update["reference"] == 0
    own_base = of_policies("7B", user=ranks["user"], agent=f"{ranks['agent']} model.liger=false")
    weights = estimate_policies(own_base).phases["push"]["weights"]
    assert weights == pytest.approx(2 * base + small + large)
    assert why_not_policies(demands) is None


def test_policies_update_in_turn_beside_the_weights_and_moments_of_all() -> None:
    """The moments of the other are there only if nothing moves them, its reference never."""
    for offload, in_play, moments in (("none", 2, 2), ("optimizer", 2, 0), ("all", 0, 0)):
        words = (f"parallel.offload={offload}", "algorithm.kl=0.1")
        demands = of_policies("1.5B", *words, user="", agent="")
        alone = estimate(demands["user"]).phases["update"]
        phases = estimate_policies(demands).phases
        update = phases["update/agent"]
        assert update["weights"] == pytest.approx(2 * alone["weights"])
        assert update["moments"] == pytest.approx(max(1, moments) * alone["moments"])
        assert phases["play"]["moments"] == pytest.approx(moments * alone["moments"])
        for part in ("reference", "gradients", "activations", "context"):
            assert update[part] == alone[part]
        assert phases["play"]["weights"] == pytest.approx(in_play * alone["weights"])
        assert phases["push"]["weights"] == pytest.approx(2 * alone["weights"])
    other = of_policies("1.5B", "algorithm.kl=0.1", user="", agent="model.liger=false")
    apart = estimate_policies(other).phases["update/agent"]
    assert apart["reference"] == pytest.approx(alone["reference"]) and alone["reference"] > 0
    one = of_policies("1.5B", *words, "warm_start.num_games=640", user="")
    told = {name.partition("/")[0]: parts for name, parts in estimate_policies(one).phases.items()}
    assert told == estimate(one["user"]).phases and "warm start" in told


def test_the_engines_of_policies_share_the_gpu() -> None:
    """As given up to 0.95 of it, otherwise each divided by their number."""
    for share, wanted in ((0.4, 0.4), (0.7, 0.35)):
        demands = of_policies("0.5B", f"engine.mem_fraction={share}", user="", agent="")
        each = [demand.engine.mem_fraction for demand in shared_out(demands).values()]
        assert each == pytest.approx([wanted, wanted])
        play = estimate_policies(demands).phases["play"]
        taken = play["engine's cache"] + play["engine's weights"]
        assert taken == pytest.approx(2 * wanted * (H200 - 1.0))
        push = estimate_policies(demands).phases["push"]  # of the second one, whose cache sleeps
        assert push["engine's cache"] == pytest.approx(play["engine's cache"] / 2)
    tight = of_policies("7B", "engine.mem_fraction=0.12", user="model.lora.rank=16", agent="")
    why = why_not_policies(tight)
    assert why is not None and why.startswith(("engine.mem_fraction must", "the phase update/"))


# Of SGLang 0.5.17 on an H200 (docs/notes/2026-11-29-two-policies-on-one-gpu.md): the model,
# policies, engine processes of each, games; GiB of all engines asleep, and of their passes in play.
ENGINES = [
    ("qwen2.5_0.5b", "0.5B", 2, 1, 512, 4.8, 5.8),
    ("qwen2.5_0.5b", "0.5B", 1, 2, 512, 4.45, 5.9),
    ("qwen2.5_7b_lora", "7B", 2, 1, 96, 2.1, None),
]


@pytest.mark.parametrize(
    ("name", "size", "policies", "processes", "games", "asleep", "passes"), ENGINES
)
def test_engines_are_estimated_near_what_was_measured(
    name: str,
    size: str,
    policies: int,
    processes: int,
    games: int,
    asleep: float,
    passes: float | None,
) -> None:
    """In the games of two engines each has half of the requests, so they pass as much as one."""
    named = ", ".join(f"p{seat}: {{seats: [{seat}]}}" for seat in range(policies))
    words = [f"policies={{{named}}}"] if policies > 1 else []
    words += [f"engine.processes={processes}", f"rollout.instances={games // 8}"]
    words += ["rollout.group_size=8", f"engine.max_batch={games}", "rollout.max_new_tokens=64"]
    config = load_config(CONFIGS / f"{name}.yaml", words)
    demands = {each: demand_of(size, config.of_policy(each)) for each in config.policy_names}
    phases = estimate_policies(demands).phases
    for phase, part in (("play", "engine's graphs"), ("push", "engine asleep")):
        assert phases[phase][part] == pytest.approx(asleep, rel=0.05)
    assert passes is None or phases["play"]["engine's passes"] == pytest.approx(passes, rel=0.05)


def test_a_step_of_two_policies_is_planned_within_5_percent_of_what_it_needed() -> None:
    """Two 0.5B policies, 512 games: 92.1 GiB in play; in an update 53.8, before log-probs kept
    gradients (up to 4 GiB here, and 0.9 less of logits)."""
    words = ["policies={a: {seats: [0]}, b: {seats: [1]}}", "engine.processes=1"]
    words += ["rollout.instances=64", "rollout.group_size=8", "engine.max_batch=512"]
    words += ["engine.mem_fraction=0.5"]
    config = load_config(CONFIGS / "qwen2.5_0.5b.yaml", [*words, "rollout.max_new_tokens=64"])
    demands = {name: demand_of("0.5B", config.of_policy(name)) for name in "ab"}
    memory = estimate_policies(demands)
    needed = memory.needed()
    assert needed["play"] == pytest.approx(92.1, rel=0.05)
    kept = memory.phases["update/a"]["kept gradients of logits"]
    assert needed["update/a"] - kept + 0.9 == pytest.approx(53.8, rel=0.05)
    held = sum(memory.phases["update/a"].values()) - needed["update/a"]
    assert held == pytest.approx(memory.phases["update/a"]["activations"] / 10)


def test_a_cache_of_a_set_size_is_planned_as_it_is() -> None:
    """100,000 tokens of 24 layers x 2 x 2 heads x 64 in bf16, 1.14 GiB, also a partner's; never
    more than the engine's share. A partner needs its weights, its context and graphs besides."""
    words = ["model.path=x", "model.dtype=bfloat16", "engine.kind=sglang"]
    words.append("rollout.partners=['self*0.5', 'checkpoint:x*0.5']")
    demand = demand_of("0.5B", load_config(None, [*words, "engine.max_cache_tokens=100000"]))
    tokens = 100_000 * 24 * 2 * 2 * 64 * 2 / GIB
    play = estimate(demand).phases["play"]
    assert play["engine's cache"] == pytest.approx(tokens)
    own = 2 * demand.shape.base / GIB + tokens
    assert own < play["partners"] < own + 3.0
    whole = demand_of("0.5B", load_config(None, [*words, "engine.max_cache_tokens=100000000"]))
    shared = demand_of("0.5B", load_config(None, words))
    assert cache_tokens(whole) <= cache_tokens(shared)


def test_a_cache_too_small_for_the_games_is_refused() -> None:
    config = load_config(CONFIGS / "qwen2.5_7b_lora.yaml", ["engine.mem_fraction=0.2"])
    demand = demand_of("7B", config, total=H100)
    assert cache_tokens(demand) < 32_768
    why = why_not(demand)
    assert why is not None and why.startswith("engine.mem_fraction must leave a cache of")


def test_static_memory_is_the_exact_sum_of_bytes() -> None:
    """The table of docs/gpu.md: 113.5 GiB of masters, gradients and moments in fp32, 85.1 with
    bf16 masters, for 7.62 billion weights."""
    for dtype, gib in (("float32", 113.5), ("bfloat16", 85.1)):
        words = ["model.path=x", "model.dtype=bfloat16", f"optim.master_dtype={dtype}"]
        config = load_config(None, words)
        update = estimate(demand_of("7B", config)).phases["update"]
        static = sum(update[part] for part in ("weights", "gradients", "moments"))
        assert static == pytest.approx(gib, abs=0.1)
    assert set(SHAPES) >= {"0.5B", "1.5B", "7B"}


def test_a_warm_start_of_adapters_is_estimated_with_their_gradients_and_moments() -> None:
    model, words = tiny_model(), ["model.path=x", "model.lora.rank=4", "warm_start.num_games=8"]
    full, lora = (load_config(None, [*words, f"warm_start.lora={on}"]) for on in ("false", "true"))
    assert lora.model.lora is not None
    shape = model_shape(model.config, lora.model.lora)
    added = model.num_parameters()
    add_adapters(model, lora.model.lora, seed=0)
    added = model.num_parameters() - added
    of_all, of_adapters = (
        estimate(Demand.of(config, shape, total=H100)).phases["warm start"]
        for config in (full, lora)
    )
    assert of_adapters["gradients"] * GIB == 4 * added < of_all["gradients"] * GIB
    assert of_adapters["moments"] * GIB == 8 * added
    assert (of_adapters["weights"] - of_all["weights"]) * GIB == pytest.approx(4 * added)


@pytest.mark.parametrize("kind", ["adamw", "muon"])
def test_the_warm_start_is_estimated_with_the_moments_that_its_optimizer_holds(kind: str) -> None:
    """Also with adapters and a KL, which it does not have: it trains the model's own weights."""
    model = tiny_model()
    optimizer = make_optimizer(model, OptimConfig(), kind=kind)
    sum(p.sum() for p in model.parameters()).backward()
    optimizer.step()
    held = [v for state in optimizer.state.values() for v in state.values() if v.ndim]
    words = ["model.path=x", "warm_start.num_games=8", f"warm_start.optimizer={kind}"]
    beside = ["model.lora.rank=4", "algorithm.kl=0.1", "engine.kind=sglang"]
    for more in ([], beside):
        config = load_config(None, [*words, *more])
        shape = model_shape(model.config, config.model.lora)
        parts = estimate(Demand.of(config, shape, total=H100)).phases["warm start"]
        num_bytes = sum(p.numel() * p.element_size() for p in model.parameters())
        assert parts["moments"] * GIB == sum(v.numel() * v.element_size() for v in held)
        assert parts["weights"] * GIB == parts["gradients"] * GIB == num_bytes
        assert not {"reference", "critic", "engine asleep"} & set(parts)


@pytest.fixture
def model(tmp_path: Path) -> Path:
    (tmp_path / "tiny.yaml").write_text(TINY)
    return untrained_run(tmp_path / "untrained", TINY) / "final"


def test_a_dry_run_prints_settings_prompt_and_memory_and_makes_nothing(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--config", str(tmp_path / "tiny.yaml"), f"out={tmp_path / 'run'}"]
    words += [f"model.path={model}", "model.scratch=null", "engine.kind=sglang", "--dry-run"]
    before = sorted(tmp_path.rglob("*"))
    assert train.main([*words, "--gpu", "80"]) == 0
    shown = capsys.readouterr().out
    assert sorted(tmp_path.rglob("*")) == before
    assert f"path: {model}" in shown and "max_game_tokens: 160" in shown
    config = load_config(tmp_path / "tiny.yaml", [])
    ids = [int(word) for word in shown.partition("\ntokens: ")[2].splitlines()[0].split()]
    rendering = make_rendering(scratch_tokenizer(config))
    assert f"first prompt, {len(ids)} tokens" in shown
    assert rendering.readable(ids) in shown and "<|im_start|>user" in shown
    for phase in ("warm start", "play", "update", "push"):
        assert f"\n  {phase} " in shown
    assert shown.startswith("it fits\n")


def test_a_dry_run_fetches_no_weights_from_the_hub(
    model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A hub that has the model as `org/name` and copies the files that are asked for."""
    fetched = tmp_path / "fetched"

    def download(name: str, *, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        assert name == "org/name"
        names = [path.name for path in model.iterdir()]
        for each in filter_repo_objects(
            names, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns
        ):
            fetched.mkdir(exist_ok=True)
            shutil.copy(model / each, fetched)
        return str(fetched)

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    monkeypatch.chdir(tmp_path)
    words = ["--config", "tiny.yaml", "model.path=org/name", "model.scratch=null", "out=run"]
    assert train.main([*words, "engine.kind=sglang", "--dry-run", "--gpu", "80"]) == 0
    assert "it fits\n" in capsys.readouterr().out
    assert (fetched / "config.json").exists() and not [*fetched.glob("*.safetensors")]
    assert local_folder("org/name") == fetched and [*fetched.glob("*.safetensors")]


def test_a_dry_run_of_a_scratch_model_counts_the_runs_own_tokens_and_refuses_a_prompt_too_long(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "tiny.yaml").write_text(TINY)
    words = [
        "game.options.brief=false",
        "model.scratch.max_positions=4096",
        f"out={tmp_path / 'run'}",
    ]
    command = ["--dry-run", "--config", str(tmp_path / "tiny.yaml"), *words]
    assert train.main([*command, "rollout.max_game_tokens=4000"]) == 0
    shown = capsys.readouterr().out
    config = load_config(tmp_path / "tiny.yaml", words)
    ids = [int(word) for word in shown.partition("\ntokens: ")[2].splitlines()[0].split()]
    assert f"first prompt, {len(ids)} tokens" in shown
    assert make_rendering(scratch_tokenizer(config)).readable(ids) in shown
    assert train.main([*command, f"rollout.max_game_tokens={len(ids)}"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "rollout.max_game_tokens must be above the longest prompt" in line
    boards = tmp_path / "boards.parquet"
    larger = load_config(tmp_path / "tiny.yaml", [*words, "game.options.size=8"]).game
    write_instances(boards, generated(TRAIN, game=larger, seed=0, start=0, num=2, easy=True))
    words = [f"data.train={boards}", f"rollout.max_game_tokens={len(ids) + 40}"]
    assert train.main([*command, *words, "rollout.instances=2"]) == 2
    assert "longest prompt, which has" in capsys.readouterr().err


def test_a_dry_run_refuses_what_does_not_fit_in_one_line(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--config", str(tmp_path / "tiny.yaml"), f"out={tmp_path / 'run'}"]
    words += [f"model.path={model}", "model.scratch=null", "engine.kind=sglang"]
    words.append("rollout.max_game_tokens=192")
    assert train.main([*words, "--dry-run", "--gpu", "2"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "GiB, on a GPU with 2" in line or "engine.mem_fraction" in line
    assert train.main([*words, "--gpu", "80"]) == 2
    assert "--gpu needs --dry-run" in capsys.readouterr().err
