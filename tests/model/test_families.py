"""Each family is computed as transformers computes it, or refused by name before a run begins."""

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from selfplay.advantages.sample import Sample
from selfplay.config import load_config
from selfplay.distributed.tensor_parallel import DIVIDED, why_undivided
from selfplay.engines.base import Request, Sampling
from selfplay.engines.hf import HFEngine
from selfplay.engines.kinds import engine_kind
from selfplay.errors import SettingsError
from selfplay.learner.batch import pack
from selfplay.model.families import why_not
from selfplay.model.policy import empty_model, export, load_model, policy_logprobs
from selfplay.partners.frozen import snapshot_weights
from selfplay.preflight.run import check_run
from selfplay.preflight.small_copy import (
    check_copy,
    in_shards,
    packed_logprobs,
    whole_copy,
)
from tests.helpers.chat_families import tokenizer_of
from tests.helpers.family_models import (
    FAMILIES,
    TEXTS,
    eager_logprobs,
    family_config,
    random_folder,
)
from tests.helpers.processes import measured_by
from tests.helpers.shared_work import slow_except

PAGE = Path(__file__).resolve().parents[2] / "docs" / "models.md"
# Refused families, and a word that the reason must contain.
REFUSED = {
    "gpt_oss": "sinks",
    "lfm2": "conv",
    "qwen3_next": "linear_attention",
    "mamba2": "mix the sequences",
    "falcon_h1": "hybrid",
    "opt": "dropout",
    "gpt2": "attn_pdrop",
    "seed_oss": "attention_dropout",
}
# Refused by the small copy: StableLM's layers ignore the sequences' bounds, Nemotron has no packed
# attention.
BY_NUMBERS = {"stablelm", "nemotron"}
# Seed-OSS is refused only for the dropout of its default config.
TAUGHT = sorted(set(FAMILIES) - set(REFUSED) - BY_NUMBERS | {"seed_oss"})
# One of each way to compute a layer; the slow tests take all families.
FAST = ("qwen2", "qwen3", "llama", "gemma3_text", "qwen3_moe", "phi", "seed_oss")
IN_SHARDS = ["llama", "gemma", "gemma2", "gemma3_text", "qwen3_moe", "mixtral", "apertus", "phi"]
# fp32, a log-prob of at most 15 nats through two narrow layers: some 100 roundings of 1e-6.
BOUND = 1e-4


def largest_difference(ours: torch.Tensor, theirs: torch.Tensor) -> float:
    return float((ours - theirs).detach().abs().max())


def refusal(name: str, **changes: Any) -> str | None:
    settings = {"sharded": True, "max_tokens": 64}
    model = empty_model(family_config(name), dtype=torch.float32)
    return why_not(model, **{**settings, **changes})


@pytest.mark.parametrize("name", slow_except(TAUGHT, *FAST))
def test_a_family_is_computed_as_transformers_computes_it(name: str, tmp_path: Path) -> None:
    """Log-probs on packed rows, with weights read in shards, with a shared prefix, and of the hf
    engine."""
    folder = random_folder(name, tmp_path)
    expected = eager_logprobs(folder, TEXTS)
    assert largest_difference(packed_logprobs(whole_copy(folder), TEXTS), expected) < BOUND
    assert largest_difference(packed_logprobs(in_shards(folder), TEXTS), expected) < BOUND
    longest = list(max(TEXTS, key=len))
    shared = [longest, [*longest[: len(longest) // 2], *reversed(longest)]]
    samples = [
        Sample(str(i), ids, [0, *[1] * (len(ids) - 1)], [], []) for i, ids in enumerate(shared)
    ]
    batch = pack(samples, device=torch.device("cpu"))
    assert batch.row.prefixes is not None
    with torch.no_grad():
        logprobs, _ = policy_logprobs(
            whole_copy(folder), batch.row, batch.targets_M, temperature=1.0
        )
    assert largest_difference(logprobs, eager_logprobs(folder, shared)) < BOUND
    requests = [Request(ids, 16, seed) for seed, ids in enumerate(TEXTS[:2])]
    completions = HFEngine(whole_copy(folder)).generate_batch(requests, Sampling(1.0, ()))
    for ids, completion in zip(TEXTS, completions, strict=False):
        expected = eager_logprobs(folder, [[*ids, *completion.ids]])[len(ids) - 1 :]
        assert largest_difference(torch.tensor(completion.logprobs), expected) < BOUND


@pytest.mark.parametrize("name", slow_except(TAUGHT, *FAST))
def test_a_correct_family_is_not_refused(name: str) -> None:
    if name not in REFUSED:
        assert refusal(name) is None
    assert check_copy(family_config(name), engine=True) is None


@pytest.mark.parametrize(("name", "named"), REFUSED.items())
def test_an_unsupported_family_is_refused_with_the_reason(name: str, named: str) -> None:
    assert named in (refusal(name) or "")


def test_a_model_without_a_list_of_layers_trains_in_one_process_only() -> None:
    no_dropout = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}
    model = empty_model(family_config("gpt2", **no_dropout), dtype=torch.float32)
    settings = {"max_tokens": 64}
    assert why_not(model, sharded=False, **settings) is None
    assert "one CPU process" in (why_not(model, sharded=True, **settings) or "")


@pytest.mark.parametrize("name", ["gpt_oss", "lfm2", "qwen3_next", "mamba2", *sorted(BY_NUMBERS)])
def test_the_small_copy_shows_unsupported_families(name: str) -> None:
    """It needs no list of known reasons, so it covers unknown families too."""
    assert "packed rows" in (check_copy(family_config(name), engine=True) or "")


def test_the_engine_refuses_layers_that_ignore_the_bounds_of_texts(tmp_path: Path) -> None:
    model = whole_copy(random_folder("stablelm", tmp_path))
    with pytest.raises(ValueError, match="bounds of packed sequences"):
        HFEngine(model).generate_batch([Request(TEXTS[0], 4, seed=0)], Sampling(1.0, ()))


def test_the_small_copy_shows_a_missing_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the logits, then of attention."""
    config = family_config("gemma2")
    assert check_copy(config, engine=False) is None
    monkeypatch.setattr("selfplay.model.policy.logit_rule", lambda config: (1.0, None))
    assert "packed rows" in (check_copy(config, engine=False) or "")
    monkeypatch.undo()
    monkeypatch.setattr(
        "selfplay.model.attention._explicit", lambda q, k, v, *rest: v.repeat(1, 2, 1, 1)
    )
    assert "packed rows" in (check_copy(config, engine=False) or "")


def test_rotary_frequencies_that_change_with_the_length_bound_a_transcript() -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    model = empty_model(family_config("llama", rope_parameters=rope), dtype=torch.float32)
    settings = {"sharded": True}
    assert why_not(model, max_tokens=128, **settings) is None
    assert "rollout.max_game_tokens" in (why_not(model, max_tokens=129, **settings) or "")


def test_merged_experts_are_not_pushed_to_sglang() -> None:
    moe, dense = (
        empty_model(family_config(n), dtype=torch.float32) for n in ("qwen3_moe", "qwen3")
    )
    assert "engine.kind" in (engine_kind("sglang").why_not(moe) or "")
    assert engine_kind("sglang").why_not(dense) is None is engine_kind("hf").why_not(moe)


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe", "glm4_moe", "apertus", "gemma2"])
def test_an_export_has_the_released_names_and_every_value(name: str, tmp_path: Path) -> None:
    """A tensor for each expert, and the buffers that the files contain (GLM's correction bias)."""
    folder = random_folder(name, tmp_path / "released")
    model = load_model(str(folder), device="cpu", dtype=torch.float32)
    export(model, None, tmp_path / "again")
    first, again = (
        AutoModelForCausalLM.from_pretrained(tmp_path / place).state_dict()
        for place in ("released", "again")
    )
    assert set(first) == set(again)
    assert all(torch.equal(first[key], again[key]) for key in first)
    snapshot = dict(snapshot_weights(tmp_path / "again"))
    assert set(snapshot) == {key for key, _ in model.named_parameters()}
    assert all(torch.equal(value, first[key]) for key, value in snapshot.items())


@pytest.mark.slow
def test_families_read_in_shards_by_two_ranks() -> None:
    differences = measured_by("family_worker:families", "1", *IN_SHARDS)
    assert all(isinstance(v, float) and v < BOUND for v in differences.values()), differences


@pytest.mark.slow
def test_families_that_are_divided_over_two_ranks() -> None:
    """Families without tensor parallelism are refused by name."""
    names = (*DIVIDED, "gpt_neox", "gemma3_text")
    differences = measured_by("family_worker:families", "2", *names)
    for name in DIVIDED:
        assert isinstance(differences[name], float) and differences[name] < BOUND, (
            name,
            differences[name],
        )
    for name in ("gpt_neox", "gemma3_text"):
        assert name in str(differences[name]) and "parallel.tp" in str(differences[name])


def test_tensor_parallelism_is_refused_before_a_run_for_untested_families(tmp_path: Path) -> None:
    assert why_undivided(family_config("gemma2"), 1) is None
    assert why_undivided(family_config("llama"), 2) is None
    tokenizer = tokenizer_of("qwen2.5")
    folder = random_folder("gemma2", tmp_path, vocab_size=len(tokenizer))
    tokenizer.save_pretrained(folder)
    config = load_config(None, [f"model.path={folder}", "parallel.tp=2"])
    words = r"parallel\.tp must be 1 for gemma2, got 2: tensor parallelism is tested only for llama"
    with pytest.raises(SettingsError, match=words):
        check_run(config, here=False)


def test_the_docs_list_the_tested_families() -> None:
    """Each family in one row, by what a run does with it; three rows share a kind."""
    rows: dict[str, list[str]] = {}
    for row, names in re.findall(
        r"^\| (trained.*|refused) \| (.*) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE
    ):
        kind = re.sub(", (a to g|h to z|mixtures of experts)$", "", row)
        rows.setdefault(kind, []).extend(re.findall(r"`(\w+)`", names))
    refused = (set(REFUSED) | BY_NUMBERS) - {"seed_oss"}
    assert {row: sorted(names) for row, names in rows.items()} == {
        "trained, also with tensor parallel": sorted(DIVIDED),
        "trained": sorted(set(TAUGHT) - set(DIVIDED)),
        "refused": sorted(refused),
    }
