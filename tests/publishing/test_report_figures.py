"""The figures of a report hold their series, point by point, and a real browser shows them on light and on dark
ground.
"""

import json
import math
import re
import shutil
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from xml.etree import ElementTree as ET

import numpy as np
import pytest

from gqa_convert.measuring.results.records import Origin, Run
from gqa_convert.publishing.report import drawing
from gqa_convert.publishing.report.figures import recovery
from gqa_convert.publishing.report.heatmap import layer_labels, split_name
from gqa_convert.publishing.report.run import make_report
from gqa_convert.publishing.report.theme import INK, SERIES, inline
from tests.helpers.report_runs import CURVE, LOSSES, SOURCE_LOSS, TIMES, benchmark, evaluation, write_json, write_runs

BROWSER = next(
    (found for name in ("chromium", "chromium-browser", "google-chrome") if (found := shutil.which(name))), None
)
needs_browser = pytest.mark.skipif(
    BROWSER is None, reason="NO CHROMIUM: that a browser shows the report is NOT tested; install the package chromium"
)
WINDOW = (1200, 4400)
SVG = "{http://www.w3.org/2000/svg}"
Point = tuple[float, float]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_runs(tmp_path_factory.mktemp("figures"))


@pytest.fixture(scope="module")
def made(runs: Path) -> dict[str, Any]:
    return make_report([runs]).as_json()


@pytest.fixture(scope="module")
def drawn(made: dict[str, Any]) -> dict[str, ET.Element]:
    return {each["name"]: ET.fromstring(Path(each["file"]).read_bytes()) for each in made["figures"]}


def markers(figure: ET.Element, name: str) -> list[Point]:
    """Where the markers of a series stand, in the picture's own coordinates."""
    (group,) = (each for each in figure.iter(f"{SVG}g") if each.get("id") == name)
    return [(float(each.get("x", "nan")), float(each.get("y", "nan"))) for each in group.iter(f"{SVG}use")]


def texts(figure: ET.Element) -> list[str]:
    return ["".join(each.itertext()) for each in figure.iter(f"{SVG}text")]


def assert_same_axes(data: Sequence[Point], pixels: Sequence[Point], across: Callable[[float], float] = float) -> None:
    """All pixels are one affine map of the data, to a hundredth of a point, x to the right and y upwards."""
    assert len(data) == len(pixels)
    for axis, scale in ((0, across), (1, float)):
        values = np.array([scale(point[axis]) for point in data])
        places = np.array([point[axis] for point in pixels])
        slope, offset = np.polyfit(values, places, 1)
        assert np.abs(slope * values + offset - places).max() < 0.01
        assert slope > 0 if axis == 0 else slope < 0


def test_quality_against_time(drawn: dict[str, ET.Element]) -> None:
    figure = drawn["quality-time"]
    data: list[Point] = []
    pixels: list[Point] = []
    for number, counts in enumerate(((12,), (3, 4))):
        places = markers(figure, f"series-loss-{number}")
        data += [(TIMES[groups][0], LOSSES[groups][0]) for groups in counts]
        pixels += places
        for place, groups in enumerate(counts):
            (decode, low, high), (loss, error) = TIMES[groups], LOSSES[groups]
            data += [(decode, loss - error), (decode, loss + error), (low, loss), (high, loss)]
            pixels += [
                *markers(figure, f"error-loss-{number}-{place}"),
                *markers(figure, f"error-time-{number}-{place}"),
            ]
    assert_same_axes(data, pixels)
    labels = texts(figure)
    assert {"N = 12", "N = 4", "N = 3", "source", "mean", "decode time, ms per token", "loss, nats per token"} <= set(
        labels
    )
    assert "N = 1" not in labels


def test_quality_against_groups(drawn: dict[str, ET.Element]) -> None:
    figure = drawn["quality-groups"]
    pixels = [*markers(figure, "series-loss-0"), *markers(figure, "series-loss-1")]
    data = [(groups, LOSSES[groups][0]) for groups in (12, 3, 4)]
    for name, groups in (("0-0", 12), ("1-0", 3), ("1-1", 4)):
        loss, error = LOSSES[groups]
        data += [(groups, loss - error), (groups, loss + error)]
        pixels += markers(figure, f"error-loss-{name}")
    assert_same_axes(data, pixels, math.log2)


def test_recovery(drawn: dict[str, ET.Element]) -> None:
    figure = drawn["recovery"]
    pixels = markers(figure, "series-run-0")
    assert_same_axes(CURVE, pixels)
    slope, offset = np.polyfit([loss for _, loss in CURVE], [y for _, y in pixels], 1)
    (line,) = (each for each in figure.iter(f"{SVG}g") if each.get("id") == "series-source-0")
    (path,) = line.iter(f"{SVG}path")
    heights = [float(y) for y in re.findall(r"[ML] \S+ (\S+)", path.get("d", ""))]
    assert heights == pytest.approx([slope * SOURCE_LOSS + offset] * 2, abs=0.01)
    assert {"N = 3, uptraining", f"source, {SOURCE_LOSS:.3f}"} <= set(texts(figure))


def test_runs_on_different_texts_have_axes_of_their_own() -> None:
    def uptrained(name: str, source_loss: float) -> Run:
        numbers = (None, 100, None, 3.0, 2.0, source_loss, 0.5, 10.0)
        return Run(Origin(Path("summary.json")), name, "m", *numbers, curve=((0, 3.0), (100, 2.0)), finished=True)

    both = recovery([uptrained("a", 1.5), uptrained("b", 1.75), uptrained("c", 1.5)], "recovery")
    assert both is not None
    assert both.svg.count('<g id="axes_') == 2
    assert "another text" in both.caption
    same = recovery([uptrained("a", 1.5), uptrained("c", 1.5)], "recovery")
    assert same is not None
    assert same.svg.count('<g id="axes_') == 1
    assert "another text" not in same.caption


def test_time_and_bytes_against_groups(drawn: dict[str, ET.Element]) -> None:
    figure = drawn["time-groups"]
    counts = sorted(TIMES)
    data, pixels = [(groups, TIMES[groups][0]) for groups in counts], markers(figure, "series-time-0")
    for place, groups in enumerate(counts):
        data += [(groups, TIMES[groups][1]), (groups, TIMES[groups][2])]
        pixels += markers(figure, f"error-time-0-{place}")
    assert_same_axes(data, pixels, math.log2)
    assert_same_axes([(groups, 256 * groups) for groups in counts], markers(figure, "series-bytes-0"), math.log2)
    assert texts(figure).count("12") == 2


def test_series_of_several_contexts(tmp_path: Path) -> None:
    """Two times, and bytes that are the same per token are drawn once."""
    write_json(tmp_path / "b.json", benchmark(TIMES, contexts=(128, 512)))
    (each,) = make_report([tmp_path]).as_json()["figures"]
    figure = ET.fromstring(Path(each["file"]).read_bytes())
    assert len(markers(figure, "series-time-1")) == len(markers(figure, "series-time-0")) == len(TIMES)
    names = {group.get("id") for group in figure.iter(f"{SVG}g")}
    assert "series-bytes-0" in names
    assert "series-bytes-1" not in names
    assert {"batch 2, context 128", "batch 2, context 512", "batch 2, context 128 and 1 alike"} <= set(texts(figure))


def test_series_of_one_name_are_told_apart(runs: Path, tmp_path: Path) -> None:
    """Two machines' benchmarks, and two runs, in folders of the same layout."""
    for name, decode in (("a", 4.0), ("b", 6.0)):
        write_json(tmp_path / name / "benchmark.json", benchmark({3: (decode, decode, decode), 4: (7.0, 7.0, 7.0)}))
        shutil.copytree(runs / "uptraining", tmp_path / name / "run")
    made = make_report([tmp_path]).as_json()
    figures = {each["name"]: ET.fromstring(Path(each["file"]).read_bytes()) for each in made["figures"]}
    labels = {"a/benchmark: batch 2, context 512", "b/benchmark: batch 2, context 512"}
    assert labels <= set(texts(figures["time-groups"]))
    assert {"N = 3, a/run", "N = 3, b/run"} <= set(texts(figures["recovery"]))


def test_many_series_and_long_ones(tmp_path: Path) -> None:
    """The legend stands beside the axes, where it hides no point; a long curve is a line."""
    write_json(tmp_path / "b.json", benchmark(TIMES, contexts=tuple(range(1, 31))))
    lines = [{"step": step, "tokens": step, "evaluation_loss": 2 + 1 / step} for step in range(1, 102)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    figures = {
        each["name"]: ET.fromstring(Path(each["file"]).read_bytes())
        for each in make_report([tmp_path]).as_json()["figures"]
    }
    assert markers(figures["recovery"], "series-run-0") == []
    points = [place for number in range(30) for place in markers(figures["time-groups"], f"series-time-{number}")]
    (legend,) = (
        each
        for each in figures["time-groups"].iter(f"{SVG}g")
        if "30" in "".join(each.itertext()) and "legend" in str(each.get("id"))
    )
    entries = [float(each.get("x", "nan")) for each in legend.iter(f"{SVG}use")]
    width, height = (float(each) for each in figures["time-groups"].get("viewBox", "").split()[2:])
    assert len(entries) == 30
    assert max(x for x, _ in points) < min(entries)
    assert all(
        0 < float(each.get("y", "nan")) < height and float(each.get("x", "nan")) < width
        for each in legend.iter(f"{SVG}use")
    )


def test_bytes_from_shapes_and_sources_apart(runs: Path, tmp_path: Path) -> None:
    """Without a benchmark bytes are those of the weights, a series and a heat map per source; two models may have the
    same loss.
    """
    other = json.loads((runs / "gqa-4" / "gqa_conversion.json").read_bytes())
    other = other | {"source": {"id": "org/other"}, "groups": 2, "kv_bytes_per_token": {"before": 1200, "after": 200}}
    write_json(tmp_path / "other" / "gqa_conversion.json", other)
    write_json(
        tmp_path / "e.json",
        evaluation({str(runs / "gqa-3"): (2.5, 0.5), str(tmp_path / "other"): (2.5, None), "gqa-3": (2.5, 0.25)}),
    )
    made = make_report([runs / "gqa-3", runs / "gqa-4", tmp_path], tmp_path / "out").as_json()
    assert [each["name"] for each in made["figures"]] == [
        "quality-groups",
        "time-groups",
        "merge-error-1",
        "merge-error-2",
    ]
    assert [each["title"] for each in made["figures"]][2:] == [
        "Merge error by layer: other",
        "Merge error by layer: source",
    ]
    figures = [ET.fromstring(Path(each["file"]).read_bytes()) for each in made["figures"]]
    before, after = (
        json.loads((runs / "gqa-3" / "gqa_conversion.json").read_bytes())["kv_bytes_per_token"][key]
        for key in ("before", "after")
    )
    assert after * 4 == before
    pixels = [*markers(figures[1], "series-computed-0"), *markers(figures[1], "series-computed-1")]
    assert_same_axes([(2, 200), (3, before / 4), (4, before / 3)], pixels, math.log2)
    assert len(markers(figures[0], "series-loss-0")) == 3


def labels_that_overlap(figure: Any) -> list[tuple[str, str]]:
    """Pairs of words whose boxes share more than an edge, in a figure that was drawn."""
    boxes = []
    for axes in figure.axes:
        words = [axes.title, axes.xaxis.label, axes.yaxis.label, *axes.texts]
        for axis in (axes.xaxis, axes.yaxis):
            low, high = sorted(axis.get_view_interval())
            words += [tick.label1 for tick in axis.get_major_ticks() if low <= tick.get_loc() <= high]
        words += axes.get_legend().get_texts() if axes.get_legend() else []
        boxes += [
            (word.get_text(), word.get_window_extent()) for word in words if word.get_visible() and word.get_text()
        ]
    return [
        (one, other)
        for place, (one, a) in enumerate(boxes)
        for other, b in boxes[:place]
        if min(a.x1, b.x1) - max(a.x0, b.x0) > 0.5 and min(a.y1, b.y1) - max(a.y0, b.y0) > 0.5
    ]


def test_labels_do_not_overlap(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither where models have nearly the same loss and time, nor where there are many N."""
    figures = []
    written = drawing.svg
    monkeypatch.setattr(drawing, "svg", lambda figure: (written(figure), figures.append(figure))[0])
    groups = (48, 24, 22, 21, 20, 16, 12, 8, 6, 4, 3, 2, 1)
    times = {number: (5 + number / 1000, 5.0, 5.1) for number in groups}
    write_json(tmp_path / "b.json", benchmark(times, contexts=(128, 512, 2048)))
    write_json(tmp_path / "e.json", evaluation({f"model-{number}": (2.5 + number / 1e4, 0.001) for number in groups}))
    conversion = json.loads((write_runs(tmp_path / "runs") / "gqa-4" / "gqa_conversion.json").read_bytes())
    errors = dict.fromkeys((f"model.layers.{n}.self_attn.{k}_proj.weight" for n in range(80) for k in "kv"), 0.5)
    write_json(tmp_path / "deep" / "gqa_conversion.json", conversion | {"merge_error": errors})
    make_report([tmp_path])
    assert len(figures) >= 4
    for figure in figures:
        assert not labels_that_overlap(figure)


def test_merge_errors(runs: Path, drawn: dict[str, ET.Element]) -> None:
    """Opacity is the share of the highest error; the uptrained copy has no column of its own."""
    figure = drawn["merge-error"]
    errors = {
        groups: json.loads((runs / f"gqa-{groups}" / "gqa_conversion.json").read_bytes())["merge_error"]
        for groups in (4, 3)
    }
    highest = max(value for table in errors.values() for value in table.values())
    cells = {str(each.get("id")): each for each in figure.iter(f"{SVG}g") if str(each.get("id")).startswith("cell-")}
    assert len(cells) == 2 * 2 * 2
    written = texts(figure)
    for part, role in enumerate(("k", "v")):
        for layer in range(2):
            for column, groups in enumerate((4, 3)):
                error = errors[groups][f"model.layers.{layer}.self_attn.{role}_proj.weight"]
                (path,) = cells[f"cell-{part}-{layer}-{column}"].iter(f"{SVG}path")
                found = re.search(r"opacity: ([\d.]+)", path.get("style", ""))
                assert float(found[1] if found else 1.0) == pytest.approx(error / highest, abs=1e-5)
                assert f"{error:.3f}" in written
    assert {"keys", "values", "0", "1"} <= set(written)


def test_names_of_layers_and_parts() -> None:
    assert split_name("model.layers.3.self_attn.k_proj.weight") == ("model.layers.3.self_attn", "keys")
    assert split_name("model.layers.3.self_attn.v_proj.bias") == ("model.layers.3.self_attn", "values bias")
    assert split_name("model.layers.3.self_attn.output") == ("model.layers.3.self_attn", "output")
    assert split_name("transformer.h.0.attn.c_attn.weight") == ("transformer.h.0.attn", "c_attn")
    t5 = [
        f"decoder.block.{block}.layer.{number}.{name}"
        for block in (0, 1)
        for number, name in enumerate(("SelfAttention", "EncDecAttention"))
    ]
    assert layer_labels(t5) == ["0 SelfAttention", "0 EncDecAttention", "1 SelfAttention", "1 EncDecAttention"]
    assert layer_labels(["model.layers.0.self_attn", "model.layers.11.self_attn"]) == ["0", "11"]
    assert layer_labels(["model.layers.0.self_attn"]) == ["0"]


def test_text_that_looks_like_a_colour_or_a_link_stays() -> None:
    svg = f'<svg id="a"><path style="fill: {INK}; stroke: {SERIES[5]}"/><text>{INK} id="a" url(#a)</text><use href="#a"/></svg>'
    assert inline(svg, "f") == (
        f'<svg id="f--a"><path style="fill: var(--ink); stroke: var(--series-6)"/><text>{INK} id="a" url(#a)</text><use href="#f--a"/></svg>'
    )


def browse(page: Path, folder: Path, *options: str) -> str:
    """What chromium prints."""
    assert BROWSER
    command = [
        BROWSER,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        f"--user-data-dir={folder / 'profile'}",
        f"--window-size={WINDOW[0]},{WINDOW[1]}",
        *options,
        page.as_uri(),
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, check=True).stdout


def boxes(page: Path, folder: Path) -> dict[str, list[int]]:
    """Where the browser puts each figure's picture: left, top, right, bottom; told by a script that only this copy of
    the page has.
    """
    text = page.read_text(encoding="utf-8")
    text = re.sub(r"<meta http-equiv=[^>]*>", "", text)
    script = (
        "<script>for (const f of document.querySelectorAll('figure')) { const b = f.querySelector('svg').getBoundingClientRect();"
        "f.dataset.box = [b.left, b.top, b.right, b.bottom].map(Math.round).join(' '); }</script></body>"
    )
    copy = folder / "copy.html"
    copy.write_text(text.replace("</body>", script), encoding="utf-8")
    dom = browse(copy, folder, "--dump-dom")
    tags = re.findall(r"<figure [^>]*>", dom)
    return {
        re.findall(r'id="([^"]*)"', tag)[0]: [int(each) for each in re.findall(r'data-box="([^"]*)"', tag)[0].split()]
        for tag in tags
    }


@needs_browser
def test_a_browser_shows_every_figure_on_light_and_dark_ground(made: dict[str, Any], tmp_path: Path) -> None:
    from matplotlib.image import imread

    page = Path(made["html"])
    places = boxes(page, tmp_path)
    assert list(places) == [figure["name"] for figure in made["figures"]]
    grounds = {"light": (255, 255, 255), "dark": (0x14, 0x17, 0x1C)}
    inks = {"light": (0x1B, 0x1F, 0x24), "dark": (0xE6, 0xE9, 0xED)}
    lines = {"light": (0x00, 0x72, 0xB2), "dark": (0x56, 0xB4, 0xE9)}
    for scheme, preferred in (("light", 1), ("dark", 0)):
        picture = tmp_path / f"{scheme}.png"
        browse(page, tmp_path, f"--blink-settings=preferredColorScheme={preferred}", f"--screenshot={picture}")
        pixels = np.rint(imread(picture)[..., :3] * 255).astype(int)
        assert pixels.shape[:2] == WINDOW[::-1]
        assert tuple(pixels[2, 2]) == grounds[scheme]
        for name, (left, top, right, bottom) in places.items():
            assert right - left > 400
            assert bottom - top > 200
            assert bottom < WINDOW[1]
            region = pixels[top:bottom, left:right]
            drawn = (np.abs(region - grounds[scheme]).max(axis=-1) > 24).mean()
            assert 0.01 < drawn < 0.9, (scheme, name)
            assert near(region, inks[scheme]) > 50, (scheme, name)
            if name != "merge-error":
                assert near(region, lines[scheme]) > 20, (scheme, name)


def near(region: np.ndarray[Any, Any], colour: tuple[int, int, int]) -> int:
    """Pixels of a colour."""
    return int((np.abs(region - np.array(colour)).max(axis=-1) < 8).sum())
