"""Every mesh gives the gradient of one process: FSDP2, tensor parallelism and both together."""

import os
import random
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed import DistStoreError, TCPStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule

from selfplay.advantages.sample import Sample
from selfplay.config import ScratchConfig
from selfplay.distributed import (
    all_reduce_sum,
    clip_grad_norm,
    init_world,
    local_part,
    shard,
    world,
)
from selfplay.distributed.tensor_parallel import why_undivided
from selfplay.distributed.world import check_size, data_parallel_size
from selfplay.learner.batch import pack
from selfplay.model.policy import policy_logprobs, scratch_model
from tests.helpers.mesh_worker import AGGREGATIONS, FAST
from tests.helpers.processes import fork, free_port, measured_by, two_ranks
from tests.helpers.shared_work import slow_except
from tests.helpers.tolerance import tolerance

SHAPE = ScratchConfig(
    width=16, layers=4, heads=4, kv_heads=2, mlp_width=24, max_positions=32, vocab_size=20
)
# The number of roundings in the worker's models, and the size of a log-prob over 54 tokens.
FORWARD = 54 + 2 * 32 + 2 * (2 * 32 + 2 * 32 + 8 + 9 + 32 + 64)
GRADIENT, NATS = 3 * FORWARD + 200, 4.0
MODELS = ("llama False", "qwen3 True", "one unit")


MESHES = [
    pytest.param((2, "fsdp2"), id="fsdp2"),
    pytest.param((2, "tp2"), id="tp2"),
    pytest.param((4, "2"), id="fsdp2xtp2", marks=pytest.mark.slow),
]
# Eight ranks measure what depends on the number of rows.
EIGHT = pytest.param((8, "2"), id="fsdp4xtp2", marks=pytest.mark.slow)
OF_EIGHT = ("shared", "token_mean")


Report = tuple[int, Callable[[str], Any]]


@pytest.fixture(params=MESHES)
def report(request: pytest.FixtureRequest) -> Report:
    """The number of processes of a mesh, and their measurements in a case."""
    num, mesh = request.param

    def read(case: str) -> Any:
        if num > 2:
            cases = OF_EIGHT if num == 8 else ()
            return measured_by("mesh_worker:on_mesh", mesh, "cpu", *cases, ranks=num)[case]
        return two_ranks(mesh, part="fast" if case in FAST else "slow")[case]

    return num, read


@pytest.mark.parametrize("model", slow_except(MODELS, *FAST))
def test_a_sharded_model_is_that_of_one_process(report: Report, model: str) -> None:
    """Log-probs, gradients, names and values; one gather equals `full_tensor()` of each parameter
    bit for bit. Norms read plain tensors: liger's takes a raw address, and a collective's result
    has none until it is awaited."""
    measured = report[1](model)
    assert measured["logprob"] < tolerance(FORWARD, scale=NATS)
    assert measured["entropy"] < tolerance(FORWARD, scale=NATS)
    assert measured["gradient"] < tolerance(GRADIENT)  # of the largest entry of each tensor
    assert measured["norm"] < tolerance(GRADIENT)
    for exact in ("values_kept", "names_kept", "gathered", "plain"):
        assert measured[exact] == 1.0, exact


@pytest.mark.parametrize("report", [*MESHES, EIGHT], indirect=True)
def test_ranks_share_samples_by_tokens_and_ranks_of_a_row_get_the_same(report: Report) -> None:
    """Rank 0 has samples of 5 and 3 tokens, rank 1 none, rank 2 two of 4, rank 3 one of 1.

    Of two ranks the second gets the sample of 3. Of two rows, with 8 and 9 tokens, neither passes
    any on. Of four rows two have nothing, and get one of 4 and the one of 3.
    """
    num, read = report
    of_rows = {
        (2, 1): ["a", "b"],
        (2, 2): ["ab"],
        (4, 2): ["ab", "cde"],
        (8, 2): ["a", "ce", "d", "b"],
    }
    tp = read("tp")
    wanted = [[names, True] for names in of_rows[num, tp] for _ in range(tp)]
    assert read("shared") == wanted
    assert read("token_mean")["gradient"] < tolerance(GRADIENT)  # a step over these rows


@pytest.mark.parametrize("aggregation", slow_except(AGGREGATIONS, *FAST))
def test_an_aggregation_is_that_of_one_process(report: Report, aggregation: str) -> None:
    """Ranks with unequal numbers of samples and micro-batches share one denominator."""
    assert report[1](aggregation)["gradient"] < tolerance(GRADIENT)
    assert report[1](aggregation)["shared_rows"] > 0  # the one process shares no prefix


def test_export_and_load_are_exact_and_no_rank_holds_more_than_its_share(report: Report) -> None:
    num, measured = report[0], report[1]("round trip")
    assert measured["exported"] == measured["loaded"] == 1.0
    assert measured["logprob"] < tolerance(FORWARD, scale=NATS)
    # Norms are not divided over tp ranks, and rows do not always divide evenly.
    assert measured["share"] < 1 / num + 0.02


def test_ranks_round_repeated_parameters_alike(report: Report) -> None:
    """bf16 weights are rounded stochastically; every tensor-parallel rank holds the full norms, and
    the biases of rowwise layers."""
    assert report[1]("rounded") == {"alike": 1.0, "moved": 1.0}


def test_one_cpu_process_is_a_world_without_a_mesh() -> None:
    world = init_world(device="cpu")
    model = scratch_model(SHAPE, seed=0)
    assert world.mesh is None
    assert shard(model, world) is model
    assert all_reduce_sum([1.5], world) == [1.5]


@pytest.mark.parametrize("trained", [True, False])
def test_a_single_rank_casts_a_small_model_s_weights_to_the_bits_of_fsdp(trained: bool) -> None:
    """fp32 weights, bf16 passes, two micro-batches: log-probs and gradients, of a tied embedding
    too. A reference has no gradients."""
    world = init_world(device="cpu")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1, 1), mesh_dim_names=("dp", "tp"))
        draws, found = random.Random(0), []
        ids = [[draws.randrange(20) for _ in range(9 + row)] for row in range(4)]
        for wrapped in (True, False):
            model = scratch_model(SHAPE, seed=0).requires_grad_(trained)
            shard(model, replace(world, mesh=mesh), compute_dtype=torch.bfloat16, wrapped=wrapped)
            assert isinstance(model, FSDPModule) is wrapped
            bits = []
            for rows in (ids[:2], ids[2:]):
                samples = [Sample("", one, [0, *[1] * (len(one) - 1)], [], []) for one in rows]
                batch = pack(samples, device=world.device)
                with torch.set_grad_enabled(trained):
                    logprobs_M, _ = policy_logprobs(
                        model, batch.row, batch.targets_M, temperature=1.0
                    )
                bits.append(logprobs_M.detach())
                if trained:
                    logprobs_M.sum().backward()
            assert {p.dtype for p in model.parameters()} == {torch.float32}
            bits += [local_part(p.grad) for p in model.parameters() if p.grad is not None]
            found.append(bits)
        assert len(found[0]) == 2 + trained * len([*model.parameters()])
        assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))
    finally:
        dist.destroy_process_group()


def test_a_second_world_opens_in_the_processes_of_an_earlier_one() -> None:
    """As a script has it that trains twice."""
    assert two_ranks("a later world") == [0, 1]


def test_the_norm_before_clipping_is_returned() -> None:
    world = init_world(device="cpu")
    model = scratch_model(SHAPE, seed=0)
    model.model.norm.weight.grad = torch.full((16,), 3.0)  # norm: 3 * sqrt(16) = 12
    assert clip_grad_norm(model, float("inf"), world) == pytest.approx(12.0)
    assert clip_grad_norm(model, 0.0, world) == pytest.approx(12.0)  # 0 clips nothing
    assert clip_grad_norm(model, 6.0, world) == pytest.approx(12.0)
    assert model.model.norm.weight.grad.tolist() == pytest.approx([1.5] * 16)
    assert clip_grad_norm(model, 6.1, world) == pytest.approx(6.0)


def test_mesh_sizes_must_multiply_to_the_number_of_processes() -> None:
    assert data_parallel_size(8, 2, None) == data_parallel_size(8, 2, 4) == 4
    with pytest.raises(ValueError, match=r"tp must divide .*\(8\), got 3; the nearest is 2"):
        data_parallel_size(8, 3, None)
    with pytest.raises(ValueError, match=r"\(8\), got 2 \* 3; with this tp, fsdp is 4"):
        data_parallel_size(8, 2, 3)


def test_an_engine_stays_on_one_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """With hosts of four ranks an engine of four is accepted, one of eight refused at once."""
    for name, value in {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    check_size(4, host_size=4)
    with pytest.raises(ValueError, match=r"tp_size must divide the 4 .*, got 8; the nearest is 4"):
        init_world(engine_tp=8, device="cpu")


def test_tensor_parallelism_must_divide_heads_and_vocabulary() -> None:
    config = scratch_model(SHAPE, vocab_size=21, seed=0).config
    assert "num_key_value_heads (2), got 4; the nearest is 2" in str(why_undivided(config, 4))
    assert "vocab_size (21), got 2; the nearest is 1" in str(why_undivided(config, 2))


def test_a_rank_that_waits_for_others_says_so(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with free_port() as port:
        words = {"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
        for name, value in words.items():
            monkeypatch.setenv(name, str(value))
        monkeypatch.setattr(world, "WAIT_REPORT_S", 0.05)
        monkeypatch.setattr(world, "TIMEOUT_S", 0.6)
        with pytest.raises(DistStoreError):
            init_world(device="cpu")
    said = capsys.readouterr().err
    assert f"rank 0 waits at 127.0.0.1:{port} until all 2 ranks of WORLD_SIZE have started" in said
    assert "at most 0.01 minutes; missing: 1; to run" in said


# Which ranks come, of how many, whether a launcher has the store, and what is told.
COMES = [
    ("02", 3, False, "missing: 1;"),
    ("12", 3, False, "missing: 0;"),
    ("1", 4, True, "missing: 0, 2, 3;"),
]


@pytest.mark.slow
def test_ranks_that_wait_name_those_that_never_come() -> None:
    """Also where the store is that of a launcher and where rank 0, which would have it, is one."""

    def comes(rank: str, size: int, launcher: bool, port: int) -> None:
        words = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "RANK": rank}
        words |= {"WORLD_SIZE": size, "LOCAL_WORLD_SIZE": size}
        words |= {"TORCHELASTIC_USE_AGENT_STORE": True} if launcher else {}
        os.environ |= {name: str(value) for name, value in words.items()}
        world.WAIT_REPORT_S, world.TIMEOUT_S = 1.0, 6.0
        init_world(device="cpu")

    with ExitStack() as ports:
        begun, held = [], []
        for present, size, launcher, told in COMES:  # all wait at the same time
            port = ports.enter_context(free_port())
            if launcher:
                held.append(TCPStore("127.0.0.1", port, is_master=True))
            for rank in present:
                begun.append((rank, told, fork(partial(comes, rank, size, launcher, port))))
        told_by = [(rank, told, process.communicate()[0]) for rank, told, process in begun]
    for rank, told, said in told_by:
        assert f"rank {rank} waits at" in said and said.count(told) == 1
