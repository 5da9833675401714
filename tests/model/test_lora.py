"""Adapters in the policy, the reference, the engine, exports and whole runs."""

import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader
from transformers import AutoModelForCausalLM, PreTrainedModel

from selfplay.config import LoraConfig, OptimConfig
from selfplay.distributed import init_world
from selfplay.errors import SettingsError
from selfplay.learner.batch import pack
from selfplay.learner.learner import reference_logprobs
from selfplay.learner.optimizer import make_optimizer
from selfplay.learner.update import optimizer_step, surrogate_term
from selfplay.model.lora import (
    Adapters,
    add_adapters,
    export_adapters,
    full_weights,
    is_adapter,
    without_adapters,
)
from selfplay.model.policy import export, load_model
from selfplay.partners.checkpoints import find_source
from selfplay.weight_sync.start import merged_folder
from tests.helpers.processes import two_ranks
from tests.helpers.small_updates import (
    config_of,
    learner_of,
    some_samples,
)
from tests.helpers.tiny_run import (
    CPU,
    FORWARD,
    GRADIENT,
    LOGPROB,
    LORA,
    RUN_GAP,
    RUNS,
    finished,
    metrics_of,
    run_tiny,
    tiny_model,
    trainer_logprobs,
)
from tests.helpers.tolerance import assert_near, tolerance

SMALL = LoraConfig(rank=4, alpha=8)


def adapted(config: LoraConfig = SMALL, *, trained: bool = True) -> PreTrainedModel:
    """The tiny model with adapters; with `trained` A and B get noise, so B is not zero."""
    model = tiny_model()
    add_adapters(model, config, seed=7)
    if trained:
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if is_adapter(name):
                    parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def scores(model: PreTrainedModel) -> torch.Tensor:
    return trainer_logprobs(model, some_samples(tiny_model()), temperature=1.0)


def merged(model: PreTrainedModel) -> PreTrainedModel:
    plain = tiny_model()
    plain.load_state_dict(dict(full_weights(model)), strict=False)
    return plain.eval()


def test_new_adapters_change_nothing_and_depend_on_the_seed_alone() -> None:
    first, same, other = (tiny_model() for _ in range(3))
    before = torch.get_rng_state()
    for model, seed in ((first, 7), (same, 7), (other, 8)):
        add_adapters(model, SMALL, seed=seed)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(scores(first.eval()), scores(tiny_model().eval()))
    values = [dict(model.named_parameters()) for model in (first, same, other)]
    assert all(torch.equal(values[0][name], values[1][name]) for name in values[0])
    drawn = [name for name in values[0] if "lora_A" in name]
    assert len(drawn) == 2 * 7 and len({values[0][n][0, 0].item() for n in drawn}) == 14
    assert not any(torch.equal(values[0][name], values[2][name]) for name in drawn)
    assert max(values[0][n].abs().max().item() for n in drawn if "down" not in n) < 32**-0.5


def test_merged_weights_give_the_log_probs_of_the_adapters() -> None:
    """W + 8 / 4 * B A by hand for one matrix, then the full model."""
    model = adapted()
    layer = model.base_model.layers[1].mlp.up_proj
    by_hand = layer.base_layer.weight + 2.0 * layer.lora_B.default.weight @ (
        layer.lora_A.default.weight
    )
    weights = dict(full_weights(model))
    assert torch.equal(weights["model.layers.1.mlp.up_proj.weight"], by_hand)
    assert weights.keys() == dict(tiny_model().named_parameters()).keys()
    assert float((scores(model) - scores(tiny_model().eval())).abs().max()) > 0.05
    assert_near(scores(merged(model)), scores(model), FORWARD)


@pytest.mark.parametrize("num_tokens", [3, 40])
def test_a_layer_s_values_and_gradients_are_those_of_peft(num_tokens: int) -> None:
    """In fp64, on few tokens and on enough to merge the matrices first."""
    layer = adapted().double().base_model.layers[0].mlp.down_proj
    inner = [layer.lora_A.default.weight, layer.lora_B.default.weight]
    found = []
    for forward in (layer.forward, partial(type(layer).forward, layer)):
        generator = torch.Generator().manual_seed(0)
        shape = (1, num_tokens, layer.in_features)
        x = torch.randn(shape, generator=generator, dtype=torch.float64, requires_grad=True)
        out = forward(x)
        found.append([out, *torch.autograd.grad((out**3).sum(), [x, *inner])])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


def test_in_bf16_a_layer_multiplies_by_the_weights_that_the_engine_plays() -> None:
    model = adapted().bfloat16()
    layer = model.base_model.layers[0].mlp.down_proj
    pushed = dict(full_weights(model))["model.layers.0.mlp.down_proj.weight"]
    one_by_one = torch.eye(layer.in_features, dtype=torch.bfloat16)
    assert pushed.dtype == torch.bfloat16 and not torch.equal(pushed, layer.base_layer.weight)
    assert torch.equal(layer(one_by_one).mT, pushed)


def test_the_reference_is_the_model_without_its_adapters() -> None:
    model = adapted()
    with without_adapters(model):
        assert torch.equal(scores(model), scores(tiny_model().eval()))
    assert not torch.equal(scores(model), scores(tiny_model().eval()))
    learner = learner_of(model, reference=model)
    batch = pack(some_samples(tiny_model()), device=CPU)
    logprobs = reference_logprobs(learner, batch, temperature=1.0)
    assert torch.equal(logprobs, scores(tiny_model().eval())) and not logprobs.requires_grad


def test_only_adapters_are_trained() -> None:
    """The optimizer holds only adapters, and the base stays bit for bit."""
    model = adapted(trained=False)
    learner = learner_of(model)
    learner.optimizer = make_optimizer(model, config_of().optim)
    samples = some_samples(tiny_model())
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    terms = [surrogate_term(samples, config_of())]
    metrics = optimizer_step(learner, terms, lr=0.01, config=config_of())
    changed = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    # With B zero no gradient reaches A yet.
    assert changed == {name for name in before if "lora_B" in name}
    held = sum(p.numel() for g in learner.optimizer.param_groups for p in g["params"])
    assert held == sum(p.numel() for n, p in model.named_parameters() if is_adapter(n))
    assert metrics["grad_norm"] > 0
    optimizer_step(learner, terms, lr=0.01, config=config_of())
    changed = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert changed == {name for name in before if is_adapter(name)}


def test_exports_reload_with_transformers_and_with_peft(tmp_path: Path) -> None:
    model, world = adapted(), init_world(device="cpu")
    export(tiny_model(), None, tmp_path / "base")
    export(model, None, tmp_path / "merged", world=world)
    adapters = Adapters(SMALL, tmp_path / "base")
    export_adapters(model, adapters, None, tmp_path / "peft", world=world)
    wanted = model(torch.tensor([[1, 2, 3, 4]])).logits
    by_merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    by_peft = PeftModel.from_pretrained(
        AutoModelForCausalLM.from_pretrained(tmp_path / "base"), tmp_path / "peft"
    )
    by_name = load_model(str(tmp_path / "peft"), device="cpu", dtype=torch.float32)
    for other in (by_merged, by_peft, by_name):
        assert_near(other(torch.tensor([[1, 2, 3, 4]])).logits, wanted, FORWARD)
    size = (tmp_path / "peft" / "adapter_model.safetensors").stat().st_size
    assert size < 0.5 * (tmp_path / "merged" / "model.safetensors").stat().st_size


def test_an_unknown_target_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"model\.lora\.targets.*query"):
        add_adapters(tiny_model(), replace(SMALL, targets=("query",)), seed=0)


# --- whole runs -----------------------------------------------------------------------------------


def test_a_run_saves_and_exports_its_adapters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Checkpoints contain only the adapters; the export contains the merged policy, and so does the
    folder that SGLang, which cannot read adapters, is given. No run trains on adapters."""
    straight = finished(*RUNS["adapters"])
    lines = metrics_of(straight)
    assert all(line["grad_norm"] > 0 and line["mismatch_max"] < RUN_GAP for line in lines)
    assert lines[0]["kl_reference"] < lines[-1]["kl_reference"]
    held = FileSystemReader(straight / "checkpoints/step_000004/state").read_metadata()
    weights = [name for name in held.state_dict_metadata if name.startswith("model.")]
    assert len(weights) == 2 * 2 * 7 and all("lora_" in name for name in weights)
    base, final = (
        load_file(straight / name / "model.safetensors") for name in ("warm_start", "final")
    )
    kept = {name for name in base if torch.equal(base[name], final[name])}
    assert kept == {name for name in base if "_proj.weight" not in name}
    # An unfinished run is evaluated with the adapters of its newest checkpoint on their base.
    unfinished = tmp_path / "run"
    shutil.copytree(straight, unfinished, ignore=shutil.ignore_patterns("final*"))
    source = find_source(unfinished)
    newest = load_model(str(source.weights), device="cpu", dtype=torch.float32)
    last = AutoModelForCausalLM.from_pretrained(straight / "final")
    ids = torch.tensor([[1, 2, 3, 4]])
    assert_near(newest(ids).logits, last(ids).logits, FORWARD)
    merged = merged_folder(source.weights, init_world(device="cpu"), OptimConfig())
    assert merged == merged_folder(source.weights, init_world(device="cpu"), OptimConfig())
    assert not (merged / "adapter_config.json").exists()
    for name, value in load_file(merged / "model.safetensors").items():
        assert_near(value, final[name], 8)
    plain = [word for word in LORA if not word.startswith("model.lora.")]
    on_adapters = [*plain, f"model.path={source.weights}", "model.scratch=null", "model.lora=null"]
    assert run_tiny(tmp_path / "on", *on_adapters) == 2
    assert str(source.weights) in capsys.readouterr().err


def test_two_ranks_train_adapters_as_one() -> None:
    """Three steps, merged weights and their export from shards."""
    report = two_ranks("adapters")
    assert report["moved"] > 0.01 and report["weights"] < tolerance(3 * GRADIENT)
    assert report["logprobs"] < tolerance(FORWARD, scale=LOGPROB)
    assert report["frozen"] == 1.0
