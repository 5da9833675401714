"""Several policies with adapters on one base that is held once: each computes, learns, is pushed,
saved and resumed bit for bit as if it were alone on it."""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import patch

import pytest
import torch
from peft import PeftModel
from torch.distributed.checkpoint import FileSystemReader
from transformers import AutoModelForCausalLM

from selfplay.checkpoint import begin_checkpoint, home_of, resume
from selfplay.config import Config, ParallelConfig, load_config
from selfplay.distributed import init_world
from selfplay.engines.base import Completion, Request, Sampling
from selfplay.engines.hf import HFEngine
from selfplay.engines.weights import Weights
from selfplay.learner.batch import pack
from selfplay.learner.learner import Learner, batch_logprobs, make_learner, reference_logprobs
from selfplay.learner.update import optimizer_step, surrogate_term
from selfplay.model.lora import export_adapters, own_parameters, plain_weights
from selfplay.model.policy import export
from selfplay.weight_sync.offload import HostStore, Offload
from selfplay.weight_sync.supervised import compared_names
from tests.helpers.processes import two_ranks
from tests.helpers.small_updates import some_samples
from tests.helpers.tiny_run import CPU, FORWARD, GRADIENT, LOGPROB, tiny_model
from tests.helpers.tolerance import assert_near, tolerance

USER = ("model.lora.rank=4", "model.lora.alpha=8", "optim.lr=0.01", "algorithm.kl=0.1")
AGENT = ("model.lora.rank=2", "model.lora.targets=[q_proj, down_proj]", "optim.lr=0.02")
POLICIES = {"user": USER, "values": AGENT}  # the second name is an attribute of dictionaries


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapter sets") / "base"
    export(tiny_model(), None, folder)
    return folder


def config_of(base: Path, *words: str) -> Config:
    return load_config(None, [f"model.path={base}", "rollout.max_game_tokens=1000", *words])


def together(base: Path, *words: str) -> list[Learner]:
    """The learners of both policies on one base."""
    later = {name: (config_of(base, *own, *words), base) for name, own in POLICIES.items()}
    made: list[Learner] = []
    for name in POLICIES:
        config, weights = later.pop(name)
        world = init_world(device="cpu")
        made.append(make_learner(config, weights, world, name=name, beside=made, later=later))
    return made


def alone(base: Path, *words: str) -> list[Learner]:
    """A learner for each policy, each with a base of its own."""
    world = init_world(device="cpu")
    return [make_learner(config_of(base, *own, *words), base, world) for own in POLICIES.values()]


def pairs(base: Path, *words: str) -> Iterator[tuple[Learner, Learner]]:
    """Each policy beside the other and alone, with equal adapters that are not zero."""
    for number, pair in enumerate(zip(together(base, *words), alone(base, *words), strict=True)):
        for learner in pair:
            generator = torch.Generator().manual_seed(number)
            with torch.no_grad():
                for p in own_parameters(learner.model, learner.policy).values():
                    p.add_(0.1 * torch.randn(p.shape, generator=generator))
        yield pair


def own_values(learner: Learner) -> list[torch.Tensor]:
    return [p.detach().clone() for p in own_parameters(learner.model, learner.policy).values()]


def base_of(learner: Learner) -> Iterator[torch.Tensor]:
    return (p for p in learner.model.parameters() if not p.requires_grad)


def logprobs(learner: Learner) -> torch.Tensor:
    batch = pack(some_samples(tiny_model()), device=CPU)
    with torch.no_grad():
        return batch_logprobs(learner, learner.model, batch, temperature=1.0)[0]


def step(learner: Learner) -> dict[str, float]:
    assert learner.base is not None
    config = config_of(learner.base.weights, "algorithm.kl=0.1")
    term = surrogate_term(some_samples(tiny_model()), config)
    (rate,) = {group["lr"] for group in learner.optimizer.param_groups}
    return optimizer_step(learner, [term], lr=rate, config=config)


def equal(ours: Sequence[torch.Tensor], theirs: Sequence[torch.Tensor]) -> bool:
    return all(torch.equal(*pair) for pair in zip(ours, theirs, strict=True))


def test_the_base_is_held_once_and_policies_that_hold_it_otherwise_have_their_own(
    base: Path,
) -> None:
    user, agent = together(base)
    lone = alone(base)
    assert user.model is agent.model and user.reference is user.model
    held = {p.data_ptr(): p.numel() for p in user.model.parameters()}
    own = [sum(p.numel() for p in own_parameters(each.model).values()) for each in lone]
    assert sum(held.values()) == sum(p.numel() for p in tiny_model().parameters()) + sum(own)
    for ours, theirs in zip((user, agent), lone, strict=True):
        trained = [p for group in ours.optimizer.param_groups for p in group["params"]]
        wanted = [p for group in theirs.optimizer.param_groups for p in group["params"]]
        assert equal(trained, wanted) and equal(own_values(ours), own_values(theirs))
    world = init_world(device="cpu")
    for words, policy in (((*AGENT, "model.dtype=bfloat16"), "other"), ((), "")):
        other = make_learner(config_of(base, *words), base, world, name="other", beside=[user])
        assert other.model is not user.model and other.policy == policy


def test_policies_that_train_all_weights_from_the_same_ones_share_one_reference(
    base: Path,
) -> None:
    world, made = init_world(device="cpu"), list[Learner]()
    for name in POLICIES:
        config = config_of(base, "algorithm.kl=0.1")
        made.append(make_learner(config, base, world, name=name, beside=made))
    one, other = made
    assert one.reference is not None and one.reference is other.reference
    assert one.model is not other.model


def test_log_probs_and_those_of_the_base_are_a_lone_policy_s(base: Path) -> None:
    for ours, theirs in list(pairs(base, "algorithm.kl=0.1")):
        assert torch.equal(logprobs(ours), logprobs(theirs))
        batch = pack(some_samples(tiny_model()), device=CPU)
        wanted = reference_logprobs(theirs, batch, temperature=1.0)
        assert torch.equal(reference_logprobs(ours, batch, temperature=1.0), wanted)
        assert float((logprobs(ours) - wanted).abs().max()) > 0.05


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_updates_by_turns_are_those_of_lone_policies(base: Path, checkpointing: str) -> None:
    """Gradient norms, log-probs and weights over two steps each; the other's stay bit for bit. A
    backward pass that recomputes uses the adapters of its forward pass."""
    both = list(pairs(base, f"parallel.checkpointing={checkpointing}"))
    frozen = list(base_of(both[0][0]))
    begun = [p.clone() for p in frozen]
    for _ in range(2):
        for number, (ours, theirs) in enumerate(both):
            other, before = both[1 - number][0], own_values(both[1 - number][0])
            moved = own_values(ours)
            assert step(ours) == step(theirs)
            assert equal(own_values(ours), own_values(theirs))
            assert not equal(moved, own_values(ours))
            assert equal(own_values(other), before) and equal(frozen, begun)


def test_pushes_exports_and_comparisons_are_those_of_a_lone_policy(
    base: Path, tmp_path: Path
) -> None:
    world = init_world(device="cpu")
    for number, (ours, theirs) in enumerate(list(pairs(base))):
        pushed, wanted = (
            dict(Weights(each.model, torch.bfloat16, policy=each.policy).named())
            for each in (ours, theirs)
        )
        assert pushed.keys() == wanted.keys() and equal([*pushed.values()], [*wanted.values()])
        assert compared_names(ours, 3) == compared_names(theirs, 3)
        files = []
        for which, each in (("ours", ours), ("theirs", theirs)):
            folder = tmp_path / f"{which} {number}"
            export(each.model, None, folder / "merged", world=world, policy=each.policy)
            assert each.adapters is not None
            export_adapters(each.model, each.adapters, None, folder / "peft", world=world)
            files.append(
                {
                    (path.parent.name, path.name): path.read_bytes()
                    for path in folder.rglob("*")
                    if path.is_file()
                }
            )
        assert files[0] == files[1]
        by_peft = PeftModel.from_pretrained(
            AutoModelForCausalLM.from_pretrained(base), tmp_path / f"ours {number}" / "peft"
        )
        merged = AutoModelForCausalLM.from_pretrained(tmp_path / f"ours {number}" / "merged")
        ids = torch.tensor([[1, 2, 3, 4]])
        assert_near(by_peft(ids).logits, merged(ids).logits, FORWARD)


def test_weights_of_a_shared_model_are_not_read_without_their_policy(base: Path) -> None:
    user, _ = together(base)
    with pytest.raises(AssertionError, match="adapters of default"):
        plain_weights(user.model)


def test_both_resume_from_one_checkpoint_bit_for_bit(base: Path, tmp_path: Path) -> None:
    going = together(base)
    for learner in (*going, *going):
        step(learner)
    named = {learner.policy: (learner, None) for learner in going}
    saved = begin_checkpoint(tmp_path, named, step=1).finish({}, keep=1)
    again = together(base)
    assert resume(tmp_path, {ours.policy: ours for ours in again}) == (1, {})
    for ours, theirs in zip(again, going, strict=True):
        state = FileSystemReader(home_of(saved, ours.policy) / "state").read_metadata()
        weights = [n for n in state.state_dict_metadata if n.startswith("model.")]
        assert len(weights) == len(own_values(ours))
        assert all(f".policy_{ours.policy}." in name for name in weights)
        assert equal(own_values(ours), own_values(theirs))
    for ours, theirs in zip(again, going, strict=True):
        assert step(ours) == step(theirs) and equal(own_values(ours), own_values(theirs))


def test_engines_around_one_model_answer_by_turns_each_by_its_policy(base: Path) -> None:
    """Five batches of a rollout of each."""
    requests = [Request(tuple(range(3, 9 + n)), max_new_tokens=12, seed=n) for n in range(6)]
    sampling, both = Sampling(temperature=1.0, stop_ids=()), list(pairs(base))

    def answers(*learners: Learner) -> list[list[list[Completion]]]:
        settings = config_of(base).engine
        engines = [HFEngine.around(each.model, settings, each.policy) for each in learners]
        with ExitStack() as rollouts:
            for engine in engines:
                rollouts.enter_context(engine.rollout())
            rounds = [
                [each.generate_batch(requests, sampling) for each in engines] for _ in range(5)
            ]
        return [list(of_engine) for of_engine in zip(*rounds, strict=True)]

    wanted = [each for _, theirs in both for each in answers(theirs)]
    assert answers(*(ours for ours, _ in both)) == wanted and wanted[0] != wanted[1]


ORDERS = ([0, 1, 0, 1], [0, 1, 1, 0], [1, 0, 0, 1], [1, 0, 1, 0])


@pytest.mark.parametrize("order", ORDERS)
def test_the_base_is_there_while_a_policy_needs_it(base: Path, order: list[int]) -> None:
    """In any order of offloading and onloading, of the model and of a shared reference."""
    with patch("selfplay.weight_sync.offload.HostStore", lambda: HostStore("cpu")):
        learners = together(base)
        for p in learners[0].model.parameters():
            p.data = p.data.clone()  # it is read from a file, whose memory cannot be emptied
        reference = tiny_model(seed=5).requires_grad_(False)
        for learner in learners:
            learner.reference = reference
        moved: list[Offload] = []
        for learner in learners:
            moved.append(Offload(learner, ParallelConfig(offload="all"), beside=moved))

    def here(tensors: Sequence[torch.Tensor]) -> bool:
        (found,) = {tensor.untyped_storage().size() > 0 for tensor in tensors}
        return found

    model = learners[0].model
    shared = list(base_of(learners[0]))
    before = [p.clone() for p in (*model.parameters(), *reference.parameters())]
    for _ in range(2):
        for at, number in enumerate(order):
            first = at < 2
            if first:
                moved[number].offload_state()
                moved[number].offload_parameters()
            else:
                moved[number].onload()
            assert here(own_parameters(model, learners[number].policy).values()) is not first
            assert here(shared) is here([*reference.parameters()]) is (at != 1)
    assert equal([*model.parameters(), *reference.parameters()], before)
    moved[order[0]].offload_parameters()  # onloaded again before the other has offloaded
    moved[order[0]].onload()
    moved[order[1]].offload_parameters()
    assert here(shared) and here(own_parameters(model, learners[order[0]].policy).values())


@pytest.mark.slow
def test_two_ranks_train_two_sets_as_one_and_each_as_alone() -> None:
    """Three steps each, by turns, under FSDP: weights, pushes and exports near one process, and bit
    for bit those of the set alone on the ranks."""
    report = two_ranks("adapter sets", part="slow")
    for name in ("first", "second"):
        assert report[f"{name} moved"] > 0.01
        assert report[f"{name} weights"] < tolerance(3 * GRADIENT)
        assert report[f"{name} logprobs"] < tolerance(FORWARD, scale=LOGPROB)
    assert report["frozen"] == report["alone"] == report["resumed"] == 1.0
