"""The plot of a run: quantities of different kinds have axes of their own."""

from gqa_convert.training.curve import loss_figure
from gqa_convert.training.metrics import MetricsLine

PACE = {"learning_rate": 1e-4, "tokens_per_second": 1000.0}
LOSSES = {"start": 3.5, "source": 2.25}


def run(**parts: float) -> list[MetricsLine]:
    return [
        MetricsLine(step=step, tokens=100 * step, loss=0.5, evaluation_loss=3.0, **parts, **PACE)
        for step in range(1, 4)
    ]


def labels(lines: list[MetricsLine]) -> list[tuple[str, list[str]]]:
    """Return the vertical label and the legend of each plot."""
    figure = loss_figure(lines, LOSSES)
    return [(" ".join(axes.get_ylabel().split()), axes.get_legend_handles_labels()[1]) for axes in figure.get_axes()]


HELD_OUT = ["language-model loss on held-out text", "language-model loss of the source"]


def test_a_divergence_and_a_loss_are_not_on_one_axis() -> None:
    assert labels(run(kl=0.5)) == [
        (
            "KL divergence from the teacher, nats per token",
            ["KL divergence from the teacher on the training text"],
        ),
        ("language-model loss, nats per token", HELD_OUT),
    ]
    (above, _), _ = labels(run(kl=0.5, lm=2.0))
    assert above == ("weighted sum of language-model loss and KL divergence from the teacher, nats per token")


def test_losses_of_one_kind_share_an_axis() -> None:
    expected = ("language-model loss, nats per token", ["language-model loss on the training text", *HELD_OUT])
    assert labels(run(lm=0.5)) == [expected]


def test_runs_without_evaluation_or_steps() -> None:
    (figure,) = loss_figure([line for line in run(kl=0.5) if not line.evaluation_loss], {}).get_axes()
    assert figure.get_xlabel() == "tokens of training text"
