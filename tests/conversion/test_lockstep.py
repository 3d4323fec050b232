"""Source and student side by side: what they see is what ordinary calls of two independent models see."""

import copy
import json
import os
import re
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import gqa_convert.families.modeling
from gqa_convert.conversion.fit.lockstep import LockstepRunner, offloaded_weights, open_model
from gqa_convert.conversion.options import ConversionOptions
from gqa_convert.conversion.run import convert_checkpoint
from gqa_convert.errors import ConfigError
from tests.helpers import folding_cases as folded
from tests.helpers.command_line import run_python
from tests.helpers.heap import LARGE_TENSORS_MAPPED
from tests.helpers.tiny import make_config

PAIRS = ("t5", "bart", "mbart")
"""Encoder-decoder models."""
ATTENTION = ("self_attn", "encoder_attn", "attn", "attention", "self_attention", "SelfAttention", "EncDecAttention")


def build(kind: str, **overrides: Any) -> Any:
    return folded.build(kind, **overrides).model.requires_grad_(False)


def batches_for(kind: str, count: int = 3) -> list[dict[str, Tensor]]:
    """Of different lengths, the first with padding."""
    generator = torch.Generator().manual_seed(1)
    batches = []
    for number in range(count):
        ids = torch.randint(3, 64, (2, 9 + number), generator=generator)
        mask = torch.ones_like(ids)
        if number == 0:
            mask[1, -3:] = 0
        batch = {"input_ids": ids, "attention_mask": mask}
        if kind in PAIRS:
            batch["decoder_input_ids"] = torch.randint(3, 64, (2, 5 + number), generator=generator)
        batches.append(batch)
    return batches


def sites_of(model: Any) -> list[str]:
    """The decoder's attention modules, without the prefix that only the loaded model has."""
    names = [
        name
        for name, _ in model.named_modules()
        if name.split(".")[-1] in ATTENTION and "encoder" not in name.split(".")
    ]
    return [re.sub(r"^(model|transformer|gpt_neox)\.(?=decoder|layers|h\.)", "", name) for name in names]


def changed(parameters: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: tensor + 0.05 * torch.randn(tensor.shape, generator=generator) for name, tensor in parameters.items()}


def recorded(
    model: Any, batch: dict[str, Tensor], modules: list[nn.Module]
) -> tuple[Tensor, dict[int, tuple[Tensor, Tensor]]]:
    """Logits, and each module's first input and output, of an ordinary call."""
    seen: dict[int, tuple[Tensor, Tensor]] = {}

    def record(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        entered = args[0] if args else kwargs["hidden_states"]
        seen[id(module)] = (entered.clone(), (output if isinstance(output, Tensor) else output[0]).clone())

    hooks = [module.register_forward_hook(record, with_kwargs=True) for module in modules]
    with torch.no_grad():
        logits = model(**batch, use_cache=False).logits
    for hook in hooks:
        hook.remove()
    return logits, seen


def module_for(model: Any, site: str) -> nn.Module:
    return next(module for name, module in model.named_modules() if name == site or name.endswith(f".{site}"))


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gpt_neox", "t5", "bart"])
def test_both_streams_equal_ordinary_calls(kind: str) -> None:
    model, batches = build(kind), batches_for(kind)
    sites, source = sites_of(model), copy.deepcopy(model)
    student = copy.deepcopy(model)
    for number, name in enumerate(sites):
        module = module_for(student, name)
        module.load_state_dict(changed(dict(module.named_parameters()), number), strict=False)
    oracles = [
        [recorded(each, batch, [module_for(each, name) for name in sites]) for each in (source, student)]
        for batch in batches
    ]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    with LockstepRunner(model, batches, sites) as streams:
        for number, site in enumerate(streams):
            assert site.name == sites[number]
            weights = changed(site.parameters(), number)
            for calls, oracle in zip(site.calls, oracles, strict=True):
                for call, (_, seen), plain, used in zip(calls, oracle, (source, student), ({}, weights), strict=True):
                    entered, left = seen[id(module_for(plain, site.name))]
                    torch.testing.assert_close(call.hidden, entered, atol=1e-6, rtol=1e-6)
                    output, _ = site.run(call, used)
                    torch.testing.assert_close(output, left, atol=1e-6, rtol=1e-6)
            site.commit(weights)
        logits = list(streams.logits())
    assert len(logits) == len(batches)
    for pair, oracle in zip(logits, oracles, strict=True):
        for mine, (theirs, _) in zip(pair, oracle, strict=True):
            torch.testing.assert_close(mine, theirs, atol=1e-5, rtol=1e-6)
        assert (pair[0] - pair[1]).abs().max() > 0.01
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())
    torch.testing.assert_close(recorded(model, batches[0], [])[0], oracles[0][0][0], atol=1e-6, rtol=1e-6)


def test_what_is_captured_makes_the_output_and_gradients_reach_candidates() -> None:
    model = build("llama")
    with LockstepRunner(model, batches_for("llama"), sites_of(model)) as streams:
        for site in streams:
            source, _ = site.calls[1]
            output, entered = site.run(source, capture="o_proj")
            assert entered is not None
            assert entered.shape == (*source.hidden.shape[:2], 12 * 16)
            torch.testing.assert_close(entered @ site.parameters()["o_proj.weight"].T, output)
            candidate = site.parameters()["k_proj.weight"].clone().requires_grad_()
            with torch.enable_grad():
                site.run(source, {"k_proj.weight": candidate})[0].square().sum().backward()
            assert candidate.grad is not None
            assert candidate.grad.abs().max() > 0
            assert torch.is_grad_enabled()
            with pytest.raises(ValueError, match=r"k_proj\.weight was given with shape"):
                site.commit({"k_proj.weight": candidate[:4]})


def test_cross_attention_reads_the_encoder_and_padding_is_told() -> None:
    model, batches = build("t5"), batches_for("t5")
    sites = [name for name in sites_of(model) if name.endswith("EncDecAttention")]
    with torch.no_grad():
        encoded = model.get_encoder()(input_ids=batches[0]["input_ids"], attention_mask=batches[0]["attention_mask"])[0]
    with LockstepRunner(model, batches, sites) as streams:
        for site in streams:
            for call in site.calls[0]:
                torch.testing.assert_close(call.states, encoded)
                assert call.hidden.shape[1] == 5
                assert call.counted is None
                assert call.states_counted is not None
                assert call.states_counted.equal(batches[0]["attention_mask"].bool())
            assert site.calls[1][0].states_counted is None
    model, batches = build("llama"), batches_for("llama")
    with LockstepRunner(model, batches, sites_of(model)) as streams:
        counted = next(iter(streams)).calls[0][1].counted
        assert counted is not None
        assert counted.equal(batches[0]["attention_mask"].bool())


@pytest.mark.parametrize(
    ("kind", "overrides", "module", "factor"),
    [
        ("llama", {}, "layer", 1.0),
        ("gpt2", {}, "layer", 1.0),
        ("gpt_neox", {}, "layer", 1.0),
        ("gptj", {}, "layer", 1.0),
        ("gpt_neox", {"use_parallel_residual": False}, "layer", 1.0),
        ("phi", {}, "layer", 1.0),
        ("opt", {}, "layer", 1.0),
        ("opt", {"do_layer_norm_before": False, "word_embed_proj_dim": 48}, "layer", 1.0),
        ("falcon", {}, "layer", 1.0),
        ("mpt", {}, "layer", 1.0),
        ("falcon", {"new_decoder_architecture": True}, "layer", 1.0),
        ("cohere", {}, "layer", 1.0),
        ("granite", {"residual_multiplier": 0.22}, "layer", 0.22),
        ("bloom", {}, "layer", 1.0),
        ("gemma2", {}, None, 1.0),
        ("olmo2", {}, None, 1.0),
        ("t5", {}, "layer", 1.0),
        ("bart", {}, "layer", 1.0),
        ("mbart", {}, "layer", 1.0),
    ],
)
def test_the_residual_is_what_the_output_is_added_to(
    kind: str, overrides: dict[str, Any], module: str | None, factor: float
) -> None:
    """BART's cross-attention adds to its own input, mBART's to its norm's; all else to the layer's, and BLOOM inside
    the module.
    """
    model, batches = build(kind, **overrides), batches_for(kind, 2)
    sites = sites_of(model)
    names = {
        name: next(full for full, _ in model.named_modules() if full == name or full.endswith(f".{name}"))
        for name in sites
    }
    holders = {}
    for name, full in names.items():
        within = {"bart": full, "mbart": f"{full}_layer_norm"}.get(kind) if name.endswith("encoder_attn") else None
        holders[name] = model.get_submodule(within or re.sub(r"(.*\.\d+)\..*", r"\1", full))
    _, seen = recorded(model, batches[1], list(holders.values()))
    with LockstepRunner(model, batches, sites) as streams:
        for site in streams:
            source, student = site.calls[1]
            residual = site.residual(source)
            if module is None:
                assert residual is None
                continue
            assert residual is not None
            torch.testing.assert_close(residual * factor, seen[id(holders[site.name])][0], atol=1e-5, rtol=1e-5)
            twin = site.residual(student)
            assert twin is not None
            torch.testing.assert_close(twin, residual, atol=1e-6, rtol=1e-6)
            if kind == "bloom":
                output, entered = site.run(source, capture="dense")
                torch.testing.assert_close(output, site.module.dense(entered), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_a_single_stream_is_the_student(kind: str) -> None:
    model, batches = build(kind), batches_for(kind)
    sites = sites_of(model)
    with LockstepRunner(model, batches, sites) as both, LockstepRunner(model, batches, sites, paired=False) as single:
        for number, (site, other) in enumerate(zip(both, single, strict=True)):
            for (_, student), (one, same) in zip(site.calls, other.calls, strict=True):
                assert one is same
                assert torch.equal(student.hidden, one.hidden)
            for each in (site, other):
                each.commit(changed(each.parameters(), number))
        for (_, student_logits), (logits, again) in zip(both.logits(), single.logits(), strict=True):
            assert logits is again
            assert torch.equal(student_logits, logits)


def state(model: Any) -> tuple[Any, ...]:
    modules = list(model.modules())
    return [sorted(vars(module)) for module in modules], [
        len(module._forward_pre_hooks) + len(module._forward_hooks) for module in modules
    ]


@pytest.mark.parametrize("error", [KeyboardInterrupt, MemoryError])
def test_errors_within_a_model_end_all_passes(error: type[BaseException], monkeypatch: pytest.MonkeyPatch) -> None:
    model = build("llama")
    before, calls = state(model), iter(range(100))
    mlp = type(model.model.layers[0].mlp)
    ordinary = mlp.forward

    def failing(self: Any, states: Tensor) -> Any:
        if next(calls) == 5:  # two in the first pass, which measures
            raise error("in the midst")
        return ordinary(self, states)

    monkeypatch.setattr(mlp, "forward", failing)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        reached: list[str] = []
        with (
            pytest.raises(error, match="in the midst"),
            LockstepRunner(model, batches_for("llama"), sites_of(model)) as streams,
        ):
            reached.extend(site.name for site in streams)
    assert reached == sites_of(model)[:1]
    assert state(model) == before
    assert torch.is_grad_enabled()


def test_leaving_early_ends_all_passes() -> None:
    model = build("t5")
    before = state(model)
    with LockstepRunner(model, batches_for("t5"), sites_of(model)) as streams:
        site = next(iter(streams))
        site.commit({})
    assert state(model) == before


def test_mistakes_are_told() -> None:
    model = build("llama")
    with pytest.raises(ConfigError, match=r"layers\.7\.self_attn"):
        LockstepRunner(model, [], ["layers.7.self_attn"])
    with (
        LockstepRunner(model, batches_for("llama"), sites_of(model)) as streams,
        pytest.raises(RuntimeError, match="has not reached"),
    ):
        next(streams.logits())


def passed(model: Any, batches: list[dict[str, Tensor]], sites: list[str], **options: Any) -> Iterator[Tensor]:
    """All that a run yields."""
    with LockstepRunner(model, batches, sites, **options) as streams:
        for number, site in enumerate(streams):
            yield from (
                tensor
                for pair in site.calls
                for call in pair
                for tensor in (call.hidden, call.states, site.run(call)[0])
            )
            residuals = [site.residual(call) for pair in site.calls for call in pair]
            yield from (each for each in residuals if each is not None)
            site.commit(changed(site.parameters(), number))
        for pair in streams.logits():
            yield from pair


@pytest.mark.parametrize("kind", ["llama", "gpt2", "gpt_neox", "mixtral", "bloom", "t5", "bart"])
def test_spilled_passes_and_weights_left_in_the_files_give_the_same_numbers(kind: str, tmp_path: Path) -> None:
    build(kind).save_pretrained(tmp_path / "model")
    here, there = open_model(tmp_path / "model"), open_model(tmp_path / "model", memory_limit=1000)
    assert offloaded_weights(here) is None
    assert all(parameter.is_meta for parameter in there.parameters())
    sites, batches = sites_of(here), batches_for(kind)
    expected = list(passed(here, batches, sites))
    assert len(expected) > 12
    (tmp_path / "spill").mkdir()
    for model, options in ((there, {}), (here, {"spill": tmp_path / "spill"})):
        for one, other in zip(expected, passed(model, batches, sites, **options), strict=True):
            assert torch.equal(one, other)
    assert list((tmp_path / "spill").iterdir()) == []
    assert all(parameter.is_meta for parameter in there.parameters())
    with torch.no_grad():
        assert torch.equal(here(**batches[0]).logits, there(**batches[0]).logits)


EVERYWHERE = ("bamba", "dbrx", "gemma3n_text", "jamba", "llama4_text", "marian", "qwen3_next", "zamba2")
"""Modules that read the parameters of modules within them, parameters of their own beside those, and a table that no
file holds.
"""


@pytest.mark.parametrize("name", EVERYWHERE)
def test_weights_left_in_the_files_are_read_wherever_they_are_used(name: str, tmp_path: Path) -> None:
    case = folded.build(name)
    there = open_model(case.save(tmp_path), memory_limit=0)
    before = [parameter.is_meta for parameter in there.parameters()]
    assert all(before) or name == "marian"
    found, expected = case.logits(there), case.logits()
    if name == "jamba":  # two copies of one Jamba in memory differ by as much on some processors: its scan rounds
        torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    else:
        assert torch.equal(found, expected)
    assert [parameter.is_meta for parameter in there.parameters()] == before


def test_results_with_a_modelling_file_are_opened_from_the_disk(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once their type is known to transformers, which is told of it here."""
    registered: list[str] = []
    ordinary = gqa_convert.families.modeling.register_modeling
    monkeypatch.setattr(
        gqa_convert.families.modeling, "register_modeling", lambda name: (registered.append(name), ordinary(name))
    )
    case = folded.build("gpt2")
    out = tmp_path / "out"
    convert_checkpoint(case.save(tmp_path / "source"), out, 3, ConversionOptions(method="mean", native=False))
    logits = [case.logits(open_model(out, memory_limit=limit)) for limit in (0, None)]
    assert torch.equal(*logits)
    assert registered == ["gqa_gpt2"] * 2


_MEASURED = """
import json, multiprocessing, sys, torch
from pathlib import Path
from gqa_convert.conversion.fit.lockstep import LockstepRunner, open_model
import transformers.models.llama.modeling_llama

def megabytes(kind):
    return int(next(line.split()[1] for line in open("/proc/self/status") if line.startswith(kind))) / 1024

def measure(folder, limit, spill, rows, results):
    model = open_model(Path(folder), memory_limit=limit)
    before, waiting = megabytes("VmHWM"), []
    batches = [{"input_ids": torch.arange(64).expand(rows, 64).contiguous()} for _ in range(8)]
    sites = [f"layers.{number}.self_attn" for number in range(model.config.num_hidden_layers)]
    with LockstepRunner(model, batches, sites, spill=Path(spill) if spill else None) as streams:
        for site in streams:
            for source, student in site.calls:
                site.run(student, capture="o_proj")
                waiting.append(megabytes("VmRSS") - before)
            site.commit({name: 0.9 * tensor for name, tensor in site.parameters().items()})
        logits = [[each.double().sum().item() for each in pair] for pair in streams.logits()]
    results.put((logits, megabytes("VmHWM") - before, max(waiting)))

for arguments in json.loads(sys.argv[1]):
    # a fork's peak begins with what is resident then, and it need not import anything again
    results = multiprocessing.get_context("fork").SimpleQueue()
    process = multiprocessing.get_context("fork").Process(target=measure, args=(*arguments, results))
    process.start()
    print(json.dumps(results.get()), flush=True)
    process.join()
"""


def measured(*runs: tuple[Path, int, Path | None, int]) -> list[tuple[Any, float, float]]:
    """Sums of the logits, and by how many megabytes the resident memory has grown at most: at any time, and while
    passes wait in a layer.

    Args:
        runs: folder, memory limit, folder to spill to, and rows of a batch.
    """
    arguments = json.dumps([[str(folder), limit, spill and str(spill), rows] for folder, limit, spill, rows in runs])
    environment = os.environ | {"OMP_NUM_THREADS": "1"} | LARGE_TENSORS_MAPPED
    done = run_python("-c", _MEASURED, arguments, environment=environment)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def save_llama(folder: Path, layers: int, inner: int) -> Path:
    torch.manual_seed(0)
    config = make_config("llama", hidden_size=384, intermediate_size=inner, num_hidden_layers=layers, head_dim=48)
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.mark.slow
def test_memory_is_that_of_a_layer_and_spilled_passes_take_that_of_one(tmp_path: Path) -> None:
    deep, layer = save_llama(tmp_path / "deep", 8, 1536), 10.6  # megabytes
    flat, passes, states = save_llama(tmp_path / "flat", 2, 96), 16, 1.5
    (tmp_path / "spill").mkdir()
    (all_there, whole, _), (on_disk, part, _), (here, _, kept), (there, _, spilled) = measured(
        (deep, 1 << 40, None, 1), (deep, 0, None, 1), (flat, 1 << 40, None, 16), (flat, 1 << 40, tmp_path / "spill", 16)
    )
    assert all_there == on_disk
    assert whole > 7 * layer
    assert part < 5 * layer
    assert here == there
    # a pass that waits before attention keeps the states and what the norm made of them
    assert spilled < kept - passes * 2 * states
