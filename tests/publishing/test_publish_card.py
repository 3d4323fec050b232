"""Model cards: every fact in them is one of the files', and nothing is lost or let in by the way."""

import hashlib
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard

from gqa_convert.checkpoint.machine import measurement
from gqa_convert.checkpoint.signed_card import is_our_card
from gqa_convert.conversion.run import convert_checkpoint
from gqa_convert.errors import (
    CorruptCheckpointError,
    GQAConvertError,
    OptionError,
    PublishError,
    ReportError,
)
from gqa_convert.publishing.hashing import digests as read_digests
from gqa_convert.publishing.hashing import refuse_tokens
from gqa_convert.publishing.markup import code, fenced, plain, significant, table, with_error
from gqa_convert.publishing.publish import Options, publish
from gqa_convert.publishing.remote import Place
from gqa_convert.training.recipe import make_recipe
from tests.helpers.checkpoints import HEADS, WIDTH, digests, write_llama
from tests.helpers.result_files import LOSSES, TIMES, benchmark, evaluation, write_json
from tests.helpers.uptrain_runs import die, in_child

REPO = "me/gqa-3"
COMMAND = ["gqa-convert", "convert", "org/model", "out folder", "--groups", "3"]
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("card")
    source = write_llama(base / "source")
    (source / "README.md").write_text("---\nlicense: apache-2.0\nlanguage: [en, de]\n---\n# The source's own card\n")
    convert_checkpoint(source, base / "out", 3, method="mean", hash_weights=True, command=COMMAND)
    return base / "out"


@pytest.fixture
def out(original: Path, tmp_path: Path) -> Path:
    return shutil.copytree(original, tmp_path / "gqa-3")


def record(out: Path, **changes: Any) -> dict[str, Any]:
    """Change the record of the conversion."""
    path = out / "gqa_conversion.json"
    content: dict[str, Any] = json.loads(path.read_bytes()) | changes
    write_json(path, content)
    return content


def from_hub(out: Path, name: str = "org/model", revision: str = COMMIT) -> None:
    source = json.loads((out / "gqa_conversion.json").read_bytes())["source"]
    record(out, source=source | {"id": name, "revision": revision})


def source_readme(out: Path, text: str) -> None:
    """As if the source had had another README, which the conversion carried along."""
    source = json.loads((out / "gqa_conversion.json").read_bytes())["source"]
    source["files"]["README.md"] = {"bytes": len(text.encode()), "sha256": hashlib.sha256(text.encode()).hexdigest()}
    record(out, source=source)
    (out / "README.md").write_bytes(text.encode())


def card(out: Path, repo_id: str = REPO, **options: Any) -> tuple[str, dict[str, Any], list[str]]:
    """The card, its front matter and the warnings; the Hub's own reader finds the same front matter, and gives it back
    unchanged.
    """
    made = publish(out, Place(repo_id), Options(**options), dry_run=True)
    text = (out / "README.md").read_text(encoding="utf-8")
    front = yaml.safe_load(text.split("---\n")[1])
    read = ModelCard(text)
    assert read.data.to_dict() == front
    assert yaml.safe_load(ModelCard(str(read)).data.to_yaml()) == front
    assert text == read.content
    return text, front, list(made.warnings)


def test_a_killed_publish_leaves_nothing_that_stays(out: Path) -> None:
    def killed() -> None:
        os.fsync = lambda handle: die()  # type: ignore[assignment]  # in the child only
        publish(out, Place(REPO), Options(), dry_run=True)

    from_hub(out)
    before = {path.name for path in out.iterdir()}
    assert in_child(killed) == (-signal.SIGKILL, "")
    assert {path.name for path in out.iterdir()} != before
    card(out)
    assert {path.name for path in out.iterdir()} == before | {"README.md"}


def uptrained(out: Path, **changes: Any) -> None:
    recipe = make_recipe(
        {
            "model": "out",
            "output": "runs/up",
            "tokens": 65536,
            "teacher": "org/model",
            "distillation_weight": 0.75,
            "learning_rate": 3e-4,
            "data": [{"source": "org/corpus", "name": "en"}, {"source": "texts/extra"}],
        }
    ).resolved()
    training = measurement("uptrain", ["gqa-convert", "uptrain", "recipe.yaml"]).as_json() | {
        "processes": 1,
        "tokens": 65536,
        "changes": [],
        "recipe": recipe,
        "evaluation": {"start": 3.125, "source": 2.5, "final": 2.625, "recovered_share": 0.8},
    }
    record(out, uptraining=[training | changes], uptraining_tokens=65536)


def test_a_native_one(out: Path) -> None:
    from_hub(out)
    text, front, warnings = card(out)
    assert front == {
        "base_model": "org/model",
        "base_model_relation": "finetune",
        "library_name": "transformers",
        "pipeline_tag": "text-generation",
        "language": ["en", "de"],
        "license": "apache-2.0",
        "tags": ["gqa-convert", "grouped-query-attention"],
    }
    assert "# gqa-3\n" in text
    assert f"[org/model](https://huggingface.co/org/model) at revision `{COMMIT}`" in text
    assert "3 key/value heads per layer in place of 12" in text
    assert "| K/V heads per layer | 12 | 3 |" in text
    assert f"| K/V-cache bytes per token | {2 * 2 * HEADS * WIDTH * 4:,} | {2 * 2 * 3 * WIDTH * 4:,} |" in text
    assert 'AutoModelForCausalLM.from_pretrained("me/gqa-3")' in text
    assert "trust_remote_code" not in text
    assert "llama.cpp, transformers, vLLM" in text
    assert "method `mean`: the K/V heads of a group were replaced by their mean" in text
    assert "gqa-convert convert org/model 'out folder' --groups 3" in text
    errors = json.loads((out / "gqa_conversion.json").read_bytes())["merge_error"]
    keys = [value for name, value in errors.items() if "k_proj" in name]
    assert f"| `k_proj` | 2 | {min(keys):.4f} | {sum(keys) / 2:.4f} | {max(keys):.4f} |" in text
    assert "Loss: not measured." in text
    assert "Decode speed: not measured." in text
    assert "not uptrained" in text
    assert "It was fitted" not in text
    assert f"python {json.loads((out / 'gqa_conversion.json').read_bytes())['machine']['versions']['python']}" in text
    assert warnings == []


def test_a_fitted_one(tmp_path: Path) -> None:
    from tests.helpers.evaluate_models import causal

    words = tmp_path / "calibration words.txt"
    words.write_text("def add(left, right):\n    return left + right\n" * 400)
    made = causal(tmp_path / "source")
    groups = json.loads((made / "config.json").read_bytes())["num_key_value_heads"] // 2
    convert_checkpoint(
        made, tmp_path / "fitted", groups, calibration=str(words), calibration_tokens=480, fit_steps=2, kl_steps=2
    )
    text, _, warnings = card(tmp_path / "fitted")
    content = json.loads((tmp_path / "fitted" / "gqa_conversion.json").read_bytes())
    assert "method `fit`" in text
    assert "It was fitted to the texts named above" in text
    assert content["calibration"]["text"].startswith(f"480 tokens of {words}: ")
    assert "Calibration text: `480 tokens of calibration words.txt: " in text
    divergence = content["calibration"]["kl"]
    assert f"diverged from the source's by {significant(divergence['after'])} nats per token" in text
    assert (f"{significant(divergence['before'])} before all layers were trained" in text) == (
        divergence["after"] < divergence["before"]
    )
    assert "The command was not recorded: the work was started from Python" in text
    assert "A local checkpoint (`source`)" in text
    assert "torch" in text.split("Versions: ")[1]
    assert any("--base-model" in each for each in warnings)
    assert any("no licence" in each for each in warnings)


def test_one_with_a_file_of_its_own(tmp_path: Path) -> None:
    from tests.helpers.own_files import make_source

    source = make_source("t5", tmp_path / "source")
    (source / "preprocessor_config.json").write_text("{}")
    convert_checkpoint(source, tmp_path / "out", 4, method="first")
    text, front, _ = card(tmp_path / "out", licence="apache-2.0")
    assert 'AutoModelForSeq2SeqLM.from_pretrained("me/gqa-3", trust_remote_code=True)' in text
    assert 'processor = AutoProcessor.from_pretrained("me/gqa-3", trust_remote_code=True)' in text
    assert "`gqa_t5.py`" in text
    assert "encoder is unchanged" in text
    sizes = {key: f"{2 * 2 * heads * 16 * 4:,}" for key, heads in (("before", 12), ("after", 4))}
    assert f"| K/V-cache bytes per token | {sizes['before']} | {sizes['after']} |" in text
    assert f"| K/V-cache bytes per encoder token | {sizes['before']} | {sizes['after']} |" in text
    assert "pipeline_tag" not in front
    assert front["license"] == "apache-2.0"
    assert "as its publisher states" in text
    (tmp_path / "out" / "gqa_t5.py").unlink()
    with pytest.raises(PublishError, match=r"lacks gqa_t5\.py"):
        card(tmp_path / "out")


def test_an_uptrained_one(out: Path) -> None:
    from_hub(out)
    uptrained(out)
    text, front, _ = card(out)
    assert "uptrained on 65,536 tokens" in text
    assert "Text: `org/corpus` (name `en`), `texts/extra`." in text
    assert "learning\\_rate `0.0003`" in text
    assert "teacher `org/model`" in text
    assert (
        "3.125 at the start, 2.625 at the end, 2.500 for the source (nats per token); 80.0% of the gap closed." in text
    )
    assert text.index("gqa-convert convert org/model") < text.index("gqa-convert uptrain recipe.yaml")
    assert front["datasets"] == ["org/corpus"]
    assert front["tags"][-1] == "uptrained"
    _, front, _ = card(out, datasets=("texts/extra",))
    assert front["datasets"] == ["texts/extra", "org/corpus"]


def test_results_are_those_of_the_files(out: Path, tmp_path: Path) -> None:
    record(out, created="2026-01-01T00:00:00Z")
    from_hub(out)
    scores = evaluation({"org/model": LOSSES[12], str(out): LOSSES[3], "another": LOSSES[4]})
    scores["reference"] = scores["results"][0]
    write_json(tmp_path / "results" / "evaluate.json", scores)
    write_json(tmp_path / "results" / "benchmark.json", benchmark(TIMES, model="org/model"))
    text, front, warnings = card(out, results=(tmp_path / "results",))
    assert warnings == []
    assert f"| source | {with_error(*LOSSES[12])} | 7.500 | 1.250 |" in text
    assert f"| this model | {with_error(*LOSSES[3])} | 7.500 | 1.250 |" in text
    assert "another" not in text.split("```sh")[0]
    assert "Paired difference in loss to the source: 0.1250 ± 0.0078" in text
    assert "The reference is the source." in text
    assert "| 12 | 2 | 512 | 10.00 | 9.500 | 10.75 | 200.0 |  |" in text
    assert "| 3 | 2 | 512 | 5.000 | 4.750 | 5.500 | 400.0 | 2.00 |" in text
    first = text.split("gqa-convert made this model")[0]
    assert "- **K/V cache: " in first
    assert " per token, 25.0% of the source's " in first
    assert "- **Loss: 0.1250 ± 0.0078 above the source's 2.500 nats per token**, on `held out.txt" in first
    assert "- **Decode step: 2.00 times as fast as the source's** on " in first
    assert "```sh\nvllm serve me/gqa-3\n```" in text
    assert "llama-server -m gqa-3.gguf" in text
    assert "| 4 |" not in text
    assert "Example Processor 9" in text
    assert "not measured" not in text
    results = front["model-index"][0]["results"]
    assert front["model-index"][0]["name"] == "gqa-3"
    values = {
        (each["dataset"]["type"], metric["type"]): metric["value"] for each in results for metric in each["metrics"]
    }
    assert values == {
        ("text", "loss"): LOSSES[3][0],
        ("text", "perplexity"): 7.5,
        ("text", "bits_per_byte"): 1.25,
        ("text", "kl"): 0.0625,
    }
    assert results[0]["dataset"]["name"] == "held out.txt, causal, context 512, stride 256"


def test_results_of_other_models_and_of_older_weights_stay_out(out: Path, tmp_path: Path) -> None:
    strange = write_json(tmp_path / "strange.json", evaluation({"somewhere/gqa-3": LOSSES[3]}))
    text, front, warnings = card(out, results=(strange,))
    assert "model-index" not in front
    assert "3.125" not in text
    assert any("--evaluated-as" in each for each in warnings)
    text, front, warnings = card(out, results=(strange,), names=("somewhere/gqa-3",))
    assert "older" in " ".join(warnings)  # HEAD of the results is earlier than the conversion
    assert "model-index" not in front
    record(out, created="2026-01-01T00:00:00Z")
    assert "model-index" in card(out, results=(strange,), names=("somewhere/gqa-3",))[1]
    timed = write_json(tmp_path / "timed.json", benchmark(TIMES, model="another"))
    text, _, warnings = card(out, results=(timed,))
    assert "Decode speed: not measured." in text
    assert any("another" in each for each in warnings)
    from_hub(out)
    timed = write_json(tmp_path / "timed.json", benchmark({12: TIMES[12]}, model="org/model"))
    assert any("no time at N = 3" in each for each in card(out, results=(timed,))[2])
    uptrained(out, created="2026-05-05T00:00:00Z")  # after the evaluation
    text, front, warnings = card(out, results=(strange,), names=("somewhere/gqa-3",))
    assert "model-index" not in front
    assert "older" in " ".join(warnings)
    with pytest.raises(ReportError, match="does not exist"):
        card(out, results=(tmp_path / "nothing",))


def test_the_source_is_known_by_its_files_from_elsewhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_llama(tmp_path / "work" / "models" / "source")
    monkeypatch.chdir(tmp_path / "work")
    convert_checkpoint("models/source", tmp_path / "out", 3, method="mean")
    monkeypatch.chdir(tmp_path)
    losses = {str(tmp_path / "work" / "models" / "source"): LOSSES[12], "out": LOSSES[3]}
    path = write_json(tmp_path / "e.json", evaluation(losses, created="2999-01-01T00:00:00Z"))
    text = card(tmp_path / "out", results=(path,))[0]
    assert "| source | 2.500" in text
    assert "Paired difference in loss to the source: 0.1250" in text
    for name in ("tokenizer.json", "model.safetensors"):
        file = tmp_path / "work" / "models" / "source" / name
        before = file.read_bytes()
        file.write_bytes(
            before[:-2] + b"x\n" if name == "tokenizer.json" else before + b"x"
        )  # by its hash, and by its size
        assert "| source | 2.500" not in card(tmp_path / "out", results=(path,))[0]
        file.write_bytes(before)
    (tmp_path / "work" / "models" / "source").rename(tmp_path / "work" / "models" / "another")
    scores = evaluation(
        {str(tmp_path / "work" / "models" / "another"): LOSSES[12], "out": LOSSES[3]}, created="2999-01-01T00:00:00Z"
    )
    assert "| source | 2.500" not in card(tmp_path / "out", results=(write_json(path, scores),))[0]


@pytest.mark.parametrize(
    ("front", "repo_id", "said", "warned"),
    [
        ("license: mit", REPO, "`mit`, that of the source", ""),
        ("license: llama2", REPO, "`llama2`", "acceptable use policy"),
        ("license: llama3", "me/gqa-3", "**Built with Meta Llama 3**", "must begin with 'Llama 3'"),
        ("license: llama3", "me/Llama-3-8B-gqa", "**Built with Meta Llama 3**", "acceptable use policy"),
        ("license: llama3.1", "me/gqa-3", "**Built with Llama**", "must begin with 'Llama'"),
        ("license: gemma", REPO, "`gemma`", "passed on"),
        ("license: cc-by-nc-4.0", REPO, "`cc-by-nc-4.0`", "non-commercial"),
        ("license: cc-by-nc-nd-4.0", REPO, "`cc-by-nc-nd-4.0`", "forbids sharing changed versions"),
        ("license: cc-by-sa-4.0", REPO, "`cc-by-sa-4.0`", "same licence"),
        ("license: bigscience-bloom-rail-1.0", REPO, "`bigscience-bloom-rail-1.0`", "restrictions"),
        ("license: other\nlicense_name: odd\nlicense_link: LICENSE", REPO, "name `odd`, terms at `LICENSE`", "read it"),
        ("license: something-new", REPO, "`something-new`", "does not know its terms"),
        ("license: [mit, gemma]", REPO, "`mit`, `gemma`", "licence gemma"),
        ("language: en", REPO, "Not known", "no licence is known"),
        ("license: [", REPO, "Not known", "no licence is known"),
        ("license: {a: b}", REPO, "Not known", "no licence is known"),
    ],
)
def test_licences(out: Path, front: str, repo_id: str, said: str, warned: str) -> None:
    from_hub(out)
    source_readme(out, f"---\n{front}\n---\n# Source\n")
    text, found, warnings = card(out, repo_id)
    assert said in text
    assert warned in " ".join(warnings)
    assert bool(warned) == bool(warnings)
    first = found.get("license")
    assert card(out, repo_id)[1].get("license") == first  # from our own card now
    if repo_id == "me/Llama-3-8B-gqa":
        assert "must begin" not in " ".join(warnings)


def test_a_licence_that_is_given(out: Path) -> None:
    from_hub(out)
    text, front, warnings = card(out, licence="MIT")
    assert front["license"] == "mit"
    assert "as its publisher states" in text
    assert "replaces apache-2.0" in " ".join(warnings)
    assert card(out, licence="MIT") == (text, front, warnings)
    text, front, _ = card(out)  # what the source states has not been forgotten
    assert front["license"] == "apache-2.0"
    assert front["language"] == ["en", "de"]
    assert "`apache-2.0`, that of the source" in text
    with pytest.raises(OptionError, match="is not a licence"):
        card(out, licence="my own: one")


def test_what_a_source_states_outlives_its_readme(out: Path) -> None:
    source_readme(
        out, '---\nlicense: llama2\nlanguage: [no, en]\npipeline_tag: fill-mask\nlicense_name: "--><b>"\n---\n'
    )
    _, front, _ = card(out)
    assert (front["language"], front["pipeline_tag"]) == (["no", "en"], "fill-mask")
    written = (out / "README.md").read_text()
    for edited in (
        written.replace('"license": "llama2"', '"license": "mit"'),
        written.replace("\nlicense: llama2", "\nlicense: mit"),
    ):
        assert edited != written
        (out / "README.md").write_text(edited)
        with pytest.raises(PublishError, match="edited"):
            card(out)
    assert card(out, overwrite_card=True)[1]["license"] == "llama2"
    (out / "README.md").write_text("---\nlicense: mit\n---\nMy own.\n")
    assert "license" not in card(out, overwrite_card=True)[1]
    source_readme(
        out,
        "---\nlicense: mit\n---\n<!-- written by gqa-convert publish from a source that states {[}, sha256 "
        + "0" * 64
        + " -->\n",
    )
    assert "license" not in card(out)[1]


def test_what_convert_did_not_write_stays_here(out: Path, tmp_path: Path) -> None:
    sent = {each.path for each in publish(out, Place(REPO), dry_run=True).files}
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret").write_text("secret")
    (out / "linked").symlink_to(tmp_path / "outside")
    (out / "tokens.txt").symlink_to(tmp_path / "outside" / "secret")
    (out / "LICENSE").symlink_to(tmp_path / "outside" / "secret")
    (out / "runs" / "one").mkdir(parents=True)
    for name in (
        ".env",
        "id_rsa",
        "optimizer.pt",
        "state.pkl",
        "runs/one/config.json",
        "runs/one/LICENSE",
        "LICENSE.txt",
        "NOTICE",
    ):
        (out / name).write_text("{}")
    made = publish(out, Place(REPO), dry_run=True)
    assert {each.path for each in made.files} == sent | {"LICENSE.txt", "NOTICE"}
    assert "not sent, as links that lead out of the folder: LICENSE, linked/, tokens.txt" in made.warnings
    assert any(
        each.endswith("id_rsa, optimizer.pt, runs/one/LICENSE, runs/one/config.json and 1 more")
        for each in made.warnings
    )


def test_folders_of_the_machine_stay_out_of_the_card(out: Path, tmp_path: Path) -> None:
    home = "/home/jane/secret plans"
    content = json.loads((out / "gqa_conversion.json").read_bytes())
    uptrained(
        out,
        command=[
            "gqa-convert",
            "uptrain",
            f"{home}/r.yaml",
            "teacher=/home/jane/model",
            "--x=~jane/y/z",
            "data=[{source: /home/jane/t}]",
        ],
    )
    trained = json.loads((out / "gqa_conversion.json").read_bytes())["uptraining"][0]
    trained |= {"created": "2026-01-01T00:00:00Z"}
    trained["recipe"] |= {"teacher": "/home/jane/model", "data": [{"source": "/home/jane/texts", "split": "train"}]}
    source = content["source"] | {"id": "/home/jane/models/llama/"}
    record(
        out,
        created="2026-01-01T00:00:00Z",
        source=source,
        uptraining=[trained],
        calibration={"text": "9 tokens of /home/jane/c.txt: 1"},
        command=[
            "gqa-convert",
            "convert",
            "/home/jane/models/llama/",
            "org/name",
            "../up",
            "https://huggingface.co/a/b",
        ],
    )
    scores = evaluation(
        {"/home/jane/models/llama/": LOSSES[12], str(out): LOSSES[3]},
        data={"source": "/home/jane/held.txt"},
        command=["evaluate", "/home/jane/x"],
    )
    scores["results"][1] |= {"note": "see /home/jane/log"}
    times = benchmark(TIMES, model="/home/jane/models/llama/", command=["benchmark", "/home/jane/models/llama/"])
    results = (write_json(tmp_path / "e.json", scores), write_json(tmp_path / "b.json", times))
    text, front, warnings = card(out, results=results)
    assert "jane" not in text
    assert "gqa-convert convert llama/ org/name ../up https://huggingface.co/a/b" in text
    assert "teacher=model" in text
    assert front["model-index"][0]["results"][0]["dataset"]["name"].startswith("held.txt, ")
    assert any("gqa_conversion.json" in each and "/home/jane/" in each for each in warnings)
    assert "Decode time of `llama/`" in text


def test_files_that_are_not_what_they_were(out: Path) -> None:
    from_hub(out)
    (out / "tokenizer.json").write_text('{"version": "2.0"}')
    assert "changed since the conversion, or by it: tokenizer.json" in card(out)[2]
    record(out, route="translated", model_type="gpt_neox")
    assert "rewritten from `gpt_neox` to `llama`" in card(out)[0]

    def write(count: int) -> None:
        with (out / "tokenizer.json").open("ab") as file:
            file.write(b"x" * (1 if count > 1 else 0))

    with pytest.raises(PublishError, match="being written to"):
        read_digests(out, ["tokenizer.json"], write)
    with pytest.raises(PublishError, match="an access token"):
        refuse_tokens(
            out, ["config.json"], "hidden_act", "card"
        )  # a token of another form is known if it is the user's
    with pytest.raises(PublishError, match="the model card holds an access token"):
        refuse_tokens(out, [], None, "hf_" + "Qw7" * 12)


def test_weights_that_changed_are_not_published(out: Path, tmp_path: Path) -> None:
    record(out, result=None)
    notes = publish(out, Place(REPO), dry_run=True).warnings
    assert any("model.safetensors: their hashes were not recorded" in note for note in notes)
    made = tmp_path / "made"
    convert_checkpoint(write_llama(tmp_path / "source"), made, 3, method="factor")
    assert not any("hashes" in note for note in publish(made, Place(REPO), dry_run=True).warnings)
    (made / "README.md").unlink()
    with (made / "model.safetensors").open("r+b") as file:
        file.seek(-1, 2)
        last = file.read(1)[0]
        file.seek(-1, 2)
        file.write(bytes([last ^ 1]))
    with pytest.raises(
        PublishError, match=r"model\.safetensors has SHA-256 \w+ where \w+ was written: it has changed since"
    ):
        publish(made, Place(REPO), dry_run=True)
    assert not (made / "README.md").exists()


def test_losses_that_are_not_finite(out: Path, tmp_path: Path) -> None:
    record(out, created="2026-01-01T00:00:00Z")
    scores = evaluation({"org/model": LOSSES[12], str(out): (None, None)})
    text, front, _ = card(out, results=(write_json(tmp_path / "e.json", scores),))
    assert "17 losses were not finite." in text
    assert "loss" not in [metric["type"] for metric in front["model-index"][0]["results"][0]["metrics"]]


def test_what_was_merged_once_stays_merged(out: Path) -> None:
    content = record(out, merge_error={"a.k_proj.bias": 0.5, "a.v_proj.bias": 0.25, "a.k_proj.weight": 0.125})
    assert "| `k_proj.bias` | 1 | 0.5000 |" in card(out)[0]
    record(out, previous=content, method="copy")
    text = card(out)[0]
    assert "Merging heads changes what the model computes." in text
    assert "It was not uptrained after the conversion." in text
    record(out, previous=content | {"method": "repeat"}, method="copy")
    assert "Merging heads" not in card(out)[0]


def test_the_base_model_is_what_is_known(out: Path) -> None:
    assert "base_model" not in card(out)[1]
    given, front, _ = card(out, base_model="org/other")
    assert front["base_model"] == "org/other"
    assert "https://huggingface.co/org/other" in given
    source = json.loads((out / "gqa_conversion.json").read_bytes())["source"]
    cached = f"/home/me/.cache/huggingface/hub/models--org--cached/snapshots/{COMMIT}"
    earlier = record(out, source=source | {"id": cached})
    assert card(out)[1]["base_model"] == "org/cached"
    record(out, source=source | {"id": "./looks/like"})
    assert "base_model" not in card(out)[1]
    record(out, previous=earlier)
    text, front, _ = card(out)
    assert front["base_model"] == "org/cached"
    record(out, source=source | {"id": "org/nearer", "revision": COMMIT})
    assert card(out)[1]["base_model"] == "org/nearer"
    record(out, source=source | {"id": "./looks/like"})
    assert text.count("**Conversion**") == 2
    for name in ("no id: at all", "", "org/", "/home/me/model"):
        with pytest.raises(OptionError, match="--base-model"):
            card(out, base_model=name)


HOSTILE = "`|x|` </div><script>alert(1)</script>\n---\nlicense: mit\n---\n# Heading\n```\n[a](javascript:b) \u202e![i](http://e) ${{7*7}} {{ x }}"


def test_names_stay_names(out: Path, tmp_path: Path) -> None:
    content = record(out, created="2026-01-01T00:00:00Z", method=HOSTILE, command=["gqa-convert", HOSTILE])
    machine = content["machine"] | {"versions": {HOSTILE: HOSTILE}}
    errors = {f"{HOSTILE}.k": 0.5}
    calibration = {"text": HOSTILE, "tokens": 4}
    record(
        out, machine=machine, merge_error=errors, calibration=calibration, source=content["source"] | {"id": HOSTILE}
    )
    uptrained(out, command=[HOSTILE])
    source_readme(
        out,
        f"---\nlicense: other\nlicense_name: {json.dumps(HOSTILE)}\nlanguage: {json.dumps(HOSTILE[:15])}\npipeline_tag: |\n  a\n  b\n---\n",
    )
    scores = evaluation({str(out): LOSSES[3]}, data={"source": HOSTILE}, created="2999-01-01T00:00:00Z")
    scores["results"][0] |= {"note": HOSTILE}
    scores["results"][0]["difference"]["to"] = HOSTILE
    times = benchmark(TIMES, model=HOSTILE, dtype=HOSTILE)
    text, front, _ = card(
        out, results=(write_json(tmp_path / "e.json", scores), write_json(tmp_path / "b.json", times))
    )
    assert front["license"] == "other"
    body = re.sub(r"\A<!-- written [^<>\n]* -->\n", "", text.split("---\n", 2)[2])
    assert text.count("\n# ") == 1
    assert "\u202e" not in text
    outside = re.sub(r"(?ms)^(`{3,})[^`\n]*\n.*?^\1$", "", body)  # without code blocks, then without code spans
    outside = re.sub(r"(?<![`\\])(`+)(?!`)(.+?)(?<!`)\1(?!`)", "", outside)
    assert not re.search(r"(?<!\\)<", outside)
    assert not re.search(r"(?<!\\)!\[|(?<!\\)\[(?!org/)", outside)
    rows = [line for line in body.splitlines() if line.startswith("| ")]
    for row, after in itertools.pairwise(rows):
        if set(after) <= set("|-: "):
            assert len(re.findall(r"(?<!\\)\|", row)) == len(re.findall(r"(?<!\\)\|", after))


def test_bars_and_backticks_end_nothing() -> None:
    assert code("a``b") == "```a``b```"
    assert code("`") == "`` ` ``"
    assert fenced("x\n````\ny", "sh") == ["`````sh", "x", "````", "y", "`````"]
    cells = ["|", r"\|", r"\\|", r"\\\|", "a||b"]
    for line in table(("", "x"), [(code(each), plain(each)) for each in cells])[2:]:
        assert len(re.findall(r"(?:\\.|[^|\\])+", line)) == 2, line  # as cmark-gfm reads a row


def test_a_readme_of_the_users_own_is_kept(out: Path) -> None:
    (out / "README.md").write_text("# Mine\n")
    before = digests(out, ignore=())
    with pytest.raises(PublishError, match="--overwrite-card"):
        card(out)
    assert digests(out, ignore=()) == before
    card(out, overwrite_card=True)
    text = (out / "README.md").read_text()
    assert is_our_card(text)
    assert (out / "README.md.old").read_text() == "# Mine\n"
    (out / "README.md.old").unlink()
    (out / "README.md").write_text(text + "\nMy own words.\n")
    with pytest.raises(PublishError, match="edited"):
        card(out)
    (out / "README.md").unlink()
    card(out)
    (out / "README.md").unlink()
    (out / "README.md").symlink_to("nowhere")
    with pytest.raises(GQAConvertError, match=r"README\.md"):
        card(out)


def test_the_same_card_twice(out: Path) -> None:
    from_hub(out)
    first = card(out)
    status = (out / "README.md").stat()
    assert card(out) == first
    assert (out / "README.md").stat().st_mtime_ns == status.st_mtime_ns


@pytest.mark.parametrize(
    ("place", "match"),
    [
        (Place("gqa-3"), "org/name"),
        (Place("a/b/c"), "org/name"),
        (Place("me/gqa--3"), "org/name"),
        (Place("me/gqa 3"), "org/name"),
        (Place('me/"); import os #'), "org/name"),
        (Place(REPO, revision='x")'), "--revision"),
        (Place(REPO, revision="x", create_pr=True), "--create-pr"),
    ],
)
def test_places_that_there_are_not(out: Path, place: Place, match: str) -> None:
    before = digests(out, ignore=())
    with pytest.raises(PublishError, match=match):
        publish(out, place, dry_run=True)
    assert digests(out, ignore=()) == before


@pytest.mark.parametrize("text", ["{", "[1]", '{"groups": 3, "groups": 4}'])
def test_an_earlier_record_that_can_t_be_read(tmp_path: Path, text: str) -> None:
    source = write_llama(tmp_path / "source")
    (source / "gqa_conversion.json").write_text(text)
    with pytest.raises(CorruptCheckpointError, match=r"gqa_conversion\.json"):
        convert_checkpoint(source, tmp_path / "out", 3, method="mean")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_what_is_no_converted_checkpoint(out: Path, tmp_path: Path) -> None:
    def refused(folder: Path, match: str, kind: type[GQAConvertError] = PublishError) -> None:
        before = digests(folder, ignore=()) if folder.is_dir() else None
        with pytest.raises(kind, match=match):
            publish(folder, Place(REPO), dry_run=True)
        assert before is None or digests(folder, ignore=()) == before

    refused(tmp_path / "nothing", "not there")
    refused(out / "config.json", "a file")
    refused(write_llama(tmp_path / "plain"), "has no gqa_conversion")
    content = record(out)
    record(out, groups=4)
    refused(out, "N = 4, which the weights contradict")
    record(out, groups=6)
    refused(out, "N = 6, and the weights have 3 K/V heads")
    write_json(out / "gqa_conversion.json", {"tokens": 3})
    refused(out, "not the record")
    write_json(out / "gqa_conversion.json", content)
    weights = (out / "model.safetensors").read_bytes()
    (out / "model.safetensors").write_bytes(weights[:-4])
    refused(out, "model.safetensors", GQAConvertError)
    (out / "model.safetensors").write_bytes(weights)
    config = json.loads((out / "config.json").read_bytes())
    write_json(out / "config.json", config | {"num_key_value_heads": 4})
    refused(out, ".", GQAConvertError)


def test_a_folder_that_can_t_be_written(out: Path) -> None:
    """Root is held to the folder's mode by giving up the capability that overrides it."""
    held = ["setpriv", "--bounding-set", "-dac_override"] if os.geteuid() == 0 else []
    command = [*held, sys.executable, "-m", "gqa_convert", "publish", str(out), "--repo-id", REPO, "--dry-run"]
    before = digests(out)
    out.chmod(0o500)
    try:
        result = subprocess.run(command, capture_output=True, text=True, check=False)
    finally:
        out.chmod(0o700)
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.splitlines()[-1].endswith("make the folder writable")
    assert digests(out) == before
