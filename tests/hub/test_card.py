"""Model cards: every fact in them is one of the files', and nothing is lost or let in."""

import errno
import hashlib
import itertools
import json
import os
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml
from huggingface_hub import ModelCard

from gqa_convert.checkpoint.fingerprint import fingerprint
from gqa_convert.checkpoint.source import open_checkpoint
from gqa_convert.conversion.options import ConversionOptions
from gqa_convert.conversion.run import convert_checkpoint
from gqa_convert.errors import GQAConvertError, OptionError, PublishError
from gqa_convert.families.family import TESTED
from gqa_convert.hub.publishing import publish
from gqa_convert.hub.repository import PublishOptions
from gqa_convert.measuring.results import EvaluationFile, write_result
from gqa_convert.publishing.ownership import is_our_card
from gqa_convert.runtime.machine import measurement
from gqa_convert.runtime.messages import size
from gqa_convert.training.recipe import make_recipe
from gqa_convert.verify import verify_checkpoint
from tests.helpers.checkpoints import HEADS, WIDTH, digests, write_llama

REPO = "me/gqa-3"
COMMAND = ["gqa-convert", "convert", "org/model", "out folder", "--kv-heads", "3"]
COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture(scope="module")
def original(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("card")
    source = write_llama(base / "source")
    (source / "README.md").write_text(
        "---\nlicense: apache-2.0\nlanguage: [en, de]\n---\n# The source's own card\n"
    )
    convert_checkpoint(
        source,
        base / "out",
        3,
        ConversionOptions(method="mean", hash_weights=True, command=COMMAND),
    )
    return base / "out"


@pytest.fixture
def out(original: Path, tmp_path: Path) -> Path:
    return shutil.copytree(original, tmp_path / "gqa-3")


def record(out: Path, **changes: Any) -> dict[str, Any]:
    """Change the record of the conversion."""
    path = out / "gqa_conversion.json"
    content: dict[str, Any] = json.loads(path.read_bytes()) | changes
    path.write_text(json.dumps(content))
    return content


def from_hub(out: Path, name: str = "org/model", revision: str | None = COMMIT) -> dict[str, Any]:
    source = json.loads((out / "gqa_conversion.json").read_bytes())["source"]
    return record(out, source=source | {"id": name, "revision": revision})


def source_readme(out: Path, text: str) -> None:
    """As if the source had had another README, which the conversion copied."""
    written = json.loads((out / "gqa_conversion.json").read_bytes())["written"]
    written["README.md"] = {
        "bytes": len(text.encode()),
        "sha256": hashlib.sha256(text.encode()).hexdigest(),
    }
    record(out, written=written)
    (out / "README.md").write_bytes(text.encode())


def card(out: Path, repo_id: str = REPO, **options: Any) -> tuple[str, dict[str, Any], list[str]]:
    """The card, its front matter and the warnings; the Hub's own reader finds the same front
    matter, and gives it back unchanged.
    """
    made = publish(out, PublishOptions(repo_id, **options), dry_run=True)
    text = (out / "README.md").read_text(encoding="utf-8")
    front = yaml.safe_load(text.split("---\n")[1])
    read = ModelCard(text)
    assert read.data.to_dict() == front
    assert yaml.safe_load(ModelCard(str(read)).data.to_yaml()) == front
    assert text == read.content
    return text, front, list(made.warnings)


def uptrained(out: Path, **changes: Any) -> None:
    stated: dict[str, Any] = {
        "model": "out",
        "output": "runs/up",
        "tokens": 65536,
        "learning_rate": 3e-4,
    }
    stated |= {"teacher": "org/model", "distillation_weight": 0.75}
    stated["data"] = [
        {"source": "org/corpus", "name": "en", "revision": COMMIT},
        {"source": "texts/extra"},
    ]
    stated["evaluation_data"] = "texts/held-out"
    recipe = make_recipe(stated).resolved()
    training = measurement("uptrain", ["gqa-convert", "uptrain", "recipe.yaml"]) | {
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
        "language": ["en", "de"],
        "library_name": "transformers",
        "license": "apache-2.0",
        "pipeline_tag": "text-generation",
        "tags": ["gqa-convert", "grouped-query-attention"],
    }
    content = json.loads((out / "gqa_conversion.json").read_bytes())
    before, after = 2 * 2 * HEADS * WIDTH * 4, 2 * 2 * 3 * WIDTH * 4
    parameters = content["parameters"]
    errors = content["merge_error"].values()
    for words in (
        (
            f"[org/model](https://huggingface.co/org/model) at revision `{COMMIT}`, converted to "
            "grouped-query attention: 3 key/value heads per layer in place of 12, not uptrained."
        ),
        f"- **K/V cache: {size(after)} per token, 25.0% of the source's {size(before)}.**",
        "- **Loss: not measured.**",
        f"| K/V-cache bytes per token | {before:,} | {after:,} |",
        f"| parameters | {parameters['before']:,} | {parameters['after']:,} |",
        'AutoModelForCausalLM.from_pretrained("me/gqa-3")',
        (
            "No custom code is needed. Software that has classes for it: "
            "llama.cpp, transformers, vLLM."
        ),
        (
            "**Conversion** from 12 K/V heads per layer to 3, method `mean`: "
            "the K/V heads of a group were replaced by their mean"
        ),
        "gqa-convert convert org/model 'out folder' --kv-heads 3",
        (
            "within one method only: "
            f"{sum(errors) / 4:.4g} in the mean over 4 tensors, {max(errors):.4g} at most."
        ),
        "- Its loss was not measured",
    ):
        assert words in text
    assert "trust_remote_code" not in text
    assert "not recorded" not in text
    assert warnings == []


def test_what_was_left_out_of_the_calibration_is_said(out: Path) -> None:
    left_out = "the last stage, which needs 108 GB of memory, and 70 GB are free: name a larger GPU"
    record(out, method="fit", calibration={"text": "a.txt", "kl": None, "left_out": [left_out]})
    text, _, _ = card(out)
    assert f"\nLeft out was {left_out}.\n" in text
    record(out, calibration={"text": "a.txt", "kl": None, "left_out": []})
    assert "Left out" not in card(out)[0]


def test_one_with_code_of_its_own(tmp_path: Path) -> None:
    from tests.helpers.own_files import make_source

    source = make_source("t5", tmp_path / "source")
    (source / "preprocessor_config.json").write_text("{}")
    convert_checkpoint(source, tmp_path / "out", 4, ConversionOptions(method="first"))
    text, front, _ = card(tmp_path / "out", license="apache-2.0")
    assert 'AutoModelForSeq2SeqLM.from_pretrained("me/gqa-3", trust_remote_code=True)' in text
    assert 'processor = AutoProcessor.from_pretrained("me/gqa-3", trust_remote_code=True)' in text
    assert f"tested with transformers `{TESTED}`" in text
    assert "comes with its own code (`gqa_common.py`, `gqa_t5.py`). Read" in text
    assert "The model is an encoder-decoder; the encoder is unchanged." in text
    assert "K/V-cache bytes per encoder token" in text
    assert "pipeline_tag" not in front
    (tmp_path / "out" / "gqa_t5.py").unlink()
    with pytest.raises(PublishError, match=r"lacks gqa_t5\.py"):
        card(tmp_path / "out")


def test_an_uptrained_one(out: Path) -> None:
    from_hub(out)
    uptrained(out, adapters="LoRA of rank 8")
    text, front, _ = card(out)
    assert "uptrained on 65,536 tokens with LoRA of rank 8, merged." in text
    assert (
        "**Uptraining** on 65,536 tokens.\nText: "
        f"`org/corpus` (name `en`, revision `{COMMIT}`), `extra`.\n" in text
    )
    held_out = "on the uptraining's held-out text: `held-out`.\n"
    assert (
        f"- **Loss after uptraining: 2.625 nats per token** where the source's is 2.5, {held_out}"
        in text
    )
    assert "learning\\_rate `0.0003`" in text
    assert "teacher `org/model`" in text
    assert (
        "Loss on held-out text, `held-out`: 3.125 at the start, 2.625 at the end, "
        "2.5 for the source (nats per token); 80.0% of the gap closed." in text
    )
    assert text.index("gqa-convert convert org/model") < text.index(
        "gqa-convert uptrain recipe.yaml"
    )
    assert "loss was not measured" not in text
    assert "It was fitted" in text
    assert "It was not uptrained" not in text
    assert front["tags"][-1] == "uptrained"


@pytest.mark.parametrize(
    ("front", "said", "warned"),
    [
        ("license: mit", "`mit`, that of the source", ""),
        ("license: llama3", "**Built with Meta Llama 3**", ""),
        ("license: cc-by-nc-nd-4.0", "`cc-by-nc-nd-4.0`", ""),
        (
            "license: other\nlicense_name: odd\nlicense_link: X",
            "`other`, name `odd`, terms at `X`, that",
            "",
        ),
        ("license: something-new", "`something-new`", ""),
        ("language: en", "Not known", "no licence is known"),
    ],
)
def test_licences(out: Path, front: str, said: str, warned: str) -> None:
    from_hub(out)
    source_readme(out, f"---\n{front}\n---\n# Source\n")
    text, found, warnings = card(out)
    assert said in text
    assert warned in " ".join(warnings)
    assert bool(warned) == bool(warnings)
    assert card(out)[1].get("license") == found.get("license")  # from our own card now


def test_what_convert_did_not_write_stays_here(out: Path, tmp_path: Path) -> None:
    def sent() -> set[str]:
        return {each.path for each in publish(out, PublishOptions(REPO), dry_run=True).files}

    before = sent()
    assert before == {each.name for each in out.iterdir()}
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "secret").write_text("secret")
    (out / "linked").symlink_to(tmp_path / "outside")
    for name in ("tokens.txt", "LICENSE"):
        (out / name).symlink_to(tmp_path / "outside" / "secret")
    (out / "runs").mkdir()
    for name in (
        ".env",
        "id_rsa",
        "optimizer.pt",
        "runs/config.json",
        "runs/LICENSE",
        "LICENSE.txt",
        "NOTICE",
    ):
        (out / name).write_text("{}")
    assert sent() == before | {"LICENSE.txt", "NOTICE"}
    warnings = card(out)[2]
    assert (
        "not sent, as links that lead out of the folder: LICENSE, linked/, tokens.txt" in warnings
    )
    assert any(each.endswith("id_rsa, optimizer.pt, runs/LICENSE and 1 more") for each in warnings)


def test_folders_of_the_machine_stay_out_of_the_card(out: Path) -> None:
    """Every string of the records that may hold a path, and those of results, with folders of many
    forms.
    """
    folder = out.parent / "Secret Plans"
    words = [
        "gqa-convert",
        "uptrain",
        f"{folder}/r.yaml",
        f"teacher={folder}/model",
        f"data=[{{source: {folder}/t}}]",
    ]
    uptrained(out, command=words)
    content = from_hub(out, f"{folder}/llama/", None)
    content["uptraining"][0]["recipe"] |= {
        "teacher": f"{folder}/model",
        "data": [{"source": "Secret Plans/texts"}],
    }
    content["uptraining"][0]["recipe"] |= {
        "evaluation_data": [{"source": "../Secret Plans/held-out"}]
    }
    command = [
        "gqa-convert",
        "convert",
        f"{folder}/llama/",
        "Secret Plans/up",
        "--calibration",
        "~/Secret Plans/c.txt",
    ]
    text_record = {"text": "9 tokens of ~/Secret Plans/c.txt: 1", "kl": None}
    record(out, uptraining=content["uptraining"], calibration=text_record, command=command)
    scored = {"source": "Secret Plans/test.txt"}
    own = fingerprint(open_checkpoint(out))
    found = {"model": f"{folder}/gqa-3", "fingerprint": own, "tokens": 9, "loss": 1.0}
    found["difference"] = {"to": f"{folder}/other", "loss": 0.5}
    measured = measurement("evaluate", ["gqa-convert", "evaluate", f"--data={folder}/test.txt"])
    results = EvaluationFile(**measured, data=scored, objective="causal", results=[found])
    write_result(out.parent / "results.json", results)
    text, _, warnings = card(out, results=(out.parent / "results.json",))
    assert "Secret" not in text
    assert "Plans" not in text
    for said in (
        "A local checkpoint (`llama`)",
        "gqa-convert convert llama up --calibration c.txt",
        "gqa-convert uptrain r.yaml teacher=model 'data=... t}]'",
        "Text: `texts`.",
        "teacher `model`",
        "Calibration text: `9 tokens of c.txt: 1`.",
        "gqa-convert evaluate --data=test.txt",
        "9 tokens of test.txt",
        "differences are from other",
    ):
        assert said in text
    assert any("names folders of this machine" in each for each in warnings)


def test_access_tokens_are_not_published(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.get_token", lambda: "hidden_act")
    with pytest.raises(PublishError, match=r"config\.json holds an access token"):
        card(out)  # a token of another form is known if it is the user's
    monkeypatch.setattr("huggingface_hub.get_token", lambda: None)
    record(out, command=["hf_" + "Qw7" * 12])
    with pytest.raises(PublishError, match=r"the model card holds an access token"):
        card(out)
    assert "not sent" not in (out / "README.md").read_text()


def test_weights_that_changed_are_not_published(out: Path) -> None:
    path = out / "model.safetensors"
    content = path.read_bytes()
    path.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))
    before = digests(out, ignore=())
    with pytest.raises(PublishError, match=r"model\.safetensors has changed since"):
        card(out)
    assert digests(out, ignore=()) == before
    written = json.loads((out / "gqa_conversion.json").read_bytes())["written"]
    del written["model.safetensors"]["sha256"]
    record(out, written=written)
    assert any("model.safetensors: their hashes were not recorded" in note for note in card(out)[2])
    del written["model.safetensors"]
    record(out, written=written)
    with pytest.raises(
        PublishError, match=r"model\.safetensors was written by neither convert nor uptrain"
    ):
        card(out)


HOSTILE = (
    "`|x|` </div><script>alert(1)</script>\n---\nlicense: mit\n---\n# Heading\n```\n"
    "[a](javascript:b) \u202e![i](http://e) ${{7*7}} {{ x }}"
)


def test_names_stay_names(out: Path) -> None:
    content = record(out, method=HOSTILE, command=["gqa-convert", HOSTILE])
    machine = content["machine"] | {"versions": {HOSTILE: HOSTILE}}
    from_hub(out, HOSTILE)
    record(
        out,
        machine=machine,
        merge_error={f"{HOSTILE}.k": 0.5},
        calibration={"text": HOSTILE, "kl": None},
    )
    uptrained(out, command=[HOSTILE], adapters=HOSTILE)
    words = f"license_name: {json.dumps(HOSTILE)}\nlanguage: {json.dumps(HOSTILE[:15])}\n"
    source_readme(out, f"---\nlicense: other\n{words}---\n")
    text, front, _ = card(out)
    assert front["license"] == "other"
    body = re.sub(r"\A<!-- written [^<>\n]* -->\n", "", text.split("---\n", 2)[2])
    assert text.count("\n# ") == 1
    assert "\u202e" not in body
    outside = re.sub(
        r"(?ms)^(`{3,})[^`\n]*\n.*?^\1$", "", body
    )  # without code blocks, then without code spans
    outside = re.sub(r"(?<![`\\])(`+)(?!`)(.+?)(?<!`)\1(?!`)", "", outside)
    assert not re.search(r"(?<!\\)<", outside)
    assert not re.search(r"(?<!\\)!\[|(?<!\\)\[(?!org/)", outside)
    rows = [line for line in body.splitlines() if line.startswith("| ")]
    for row, after in itertools.pairwise(rows):
        if set(after) <= set("|-: "):
            assert len(re.findall(r"(?<!\\)\|", row)) == len(re.findall(r"(?<!\\)\|", after))


def test_a_readme_of_the_users_own_is_kept(out: Path) -> None:
    """It is the card, and is published as it is."""
    from_hub(out)

    def published(readme: str, **options: Any) -> list[str]:
        (out / "README.md").write_text(readme)
        before = digests(out, ignore=())
        made = publish(out, PublishOptions(REPO, **options), dry_run=True)
        assert digests(out, ignore=()) == before
        sent = {file.path: file.sha256 for file in made.files}
        assert sent["README.md"] == hashlib.sha256(readme.encode()).hexdigest()
        return made.warnings

    stays = "README.md was written or edited by you and stays as it is; move it away for a new card"
    assert published("# Mine\n") == [stays]
    (out / "README.md").unlink()
    text, _, warnings = card(out)
    assert is_our_card(text)
    assert stays not in warnings
    assert published(f"{text}\nMy own words.\n") == [stays]
    for option in (
        {"license": "mit"},
        {"base_model": "org/model"},
        {"results": (out / "no.json",)},
    ):
        name = next(iter(option)).replace("_", "-")
        with pytest.raises(
            OptionError, match=rf"README\.md was written or edited by you .* --{name} would"
        ):
            published(f"{text}\nMy own words.\n", **option)
    token = "hf_" + "Qw7" * 12
    with pytest.raises(PublishError, match="holds an access token"):
        published(f"{token}\n")
    (out / "README.md").unlink()
    (out / "README.md").symlink_to("nowhere")
    with pytest.raises(GQAConvertError, match=r"README\.md"):
        card(out)


def test_a_card_leaves_the_result_proved(out: Path, original: Path) -> None:
    card(out)
    assert verify_checkpoint(out, original.parent / "source", logits=False).passed


@pytest.mark.parametrize(
    ("stated", "languages"),
    [("no", "no"), ("[no, en]", ["no", "en"]), ("- no\n- on", ["no", "on"])],
)
def test_words_of_the_front_matter_stay_words(out: Path, stated: str, languages: Any) -> None:
    """Norwegian is a language, and false to YAML."""
    separator = "\n" if stated.startswith("-") else " "
    source_readme(out, f"---\nlicense: mit\nlanguage:{separator}{stated}\n---\n# Source\n")
    assert card(out)[1]["language"] == languages
    assert card(out)[1]["language"] == languages  # from our own card now


def test_a_full_disk_leaves_the_readme(out: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = digests(out, ignore=())

    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        card(out)
    assert digests(out, ignore=()) == before


def test_options_that_cannot_be(out: Path) -> None:
    for repo_id in ("gqa-3", "a/b/c", "me/gqa--3", 'me/"); import os #'):
        with pytest.raises(OptionError, match="org/name"):
            card(out, repo_id)


def test_what_is_no_converted_checkpoint(out: Path, tmp_path: Path) -> None:
    def refused(folder: Path, match: str, kind: type[GQAConvertError] = PublishError) -> None:
        before = digests(folder, ignore=()) if folder.is_dir() else None
        with pytest.raises(kind, match=match):
            publish(folder, PublishOptions(REPO), dry_run=True)
        assert before is None or digests(folder, ignore=()) == before

    refused(tmp_path / "nothing", "no folder")
    refused(write_llama(tmp_path / "plain"), "has no gqa_conversion")
    content = record(out)
    record(out, kv_heads=4)
    refused(out, "N = 4, which the weights contradict")
    (out / "gqa_conversion.json").write_text(
        json.dumps({key: value for key, value in content.items() if key != "kv_heads"})
    )
    refused(out, "is not the record of a conversion .*kv_heads")
    (out / "gqa_conversion.json").write_text(json.dumps(content))
    weights = (out / "model.safetensors").read_bytes()
    (out / "model.safetensors").write_bytes(weights[:-4])
    refused(out, "model.safetensors", GQAConvertError)
