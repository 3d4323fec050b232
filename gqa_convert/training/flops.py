"""Counts the floating-point operations of a training step, from sizes alone.

Matrix products count two operations per multiplication, as torch's FlopCounterMode counts them. Attention counts all
pairs of positions, although causal kernels skip half of them; softmaxes, norms and activations are not counted.
"""

from dataclasses import dataclass

from gqa_convert.checkpoint.results import Result
from gqa_convert.training.architecture import Architecture
from gqa_convert.training.memory import Setting


@dataclass(frozen=True, slots=True)
class Flops(Result):
    """Floating-point operations.

    Attributes:
        forward: of the student's forward pass.
        backward: of its backward pass, without recomputation.
        recomputation: of recomputed activations.
        teacher: of the teacher's forward pass.
    """

    forward: int
    backward: int
    recomputation: int
    teacher: int

    @property
    def total(self) -> int:
        """All of them."""
        return self.forward + self.backward + self.recomputation + self.teacher

    def times(self, count: int) -> "Flops":
        """The operations of `count` samples."""
        return Flops(*(count * each for each in (self.forward, self.backward, self.recomputation, self.teacher)))


@dataclass(frozen=True, slots=True)
class _Forward:
    """The operations of a forward pass of one sample.

    Attributes:
        products: products with weights, in the layers.
        attention: products of queries with keys and of scores with values.
        head: the output layer.
        last: the last product with a weight in each layer, together.
    """

    products: int
    attention: int
    head: int
    last: int

    @property
    def total(self) -> int:
        return self.products + self.attention + self.head


def sample_flops(architecture: Architecture, setting: Setting, teacher: Architecture | None = None) -> Flops:
    """The operations for one sample.

    Args:
        architecture: that of the student.
        setting: the lengths of a sample, the share of trained parameters and whether activations are recomputed.
        teacher: that of the teacher, if there is one.
    """
    own = _forward(architecture, setting)
    # each product with a weight has two in the backward pass: one for its input, and one for the weight if it is trained
    trained = setting.trained / max(1, setting.parameters)
    backward = round((1 + trained) * (own.products + own.head)) + 2 * own.attention
    # recomputing a layer stops before its last product, whose result nothing needs
    again = own.products + own.attention - own.last if setting.gradient_checkpointing else 0
    return Flops(own.total, backward, again, 0 if teacher is None else _forward(teacher, setting).total)


def _forward(a: Architecture, setting: Setting) -> _Forward:
    decoded = setting.target_length if a.encoder_layers else setting.sequence_length
    encoded = setting.sequence_length if a.encoder_layers else 0
    inner_size = a.heads * a.head_dim
    queries, keys = 2 * a.hidden_size * inner_size, 2 * a.hidden_size * a.kv_heads * a.head_dim
    mlp = (3 if a.gated else 2) * a.hidden_size * a.inner
    decoder = decoded * (queries + keys + mlp)
    pairs = decoded * decoded
    encoder = encoded * (2 * queries + mlp)  # an encoder keeps all its K/V heads
    if encoded:
        decoder += decoded * queries + encoded * keys
        pairs += decoded * encoded
    return _Forward(
        products=2 * (a.layers * decoder + a.encoder_layers * encoder),
        attention=4 * inner_size * (a.layers * pairs + a.encoder_layers * encoded * encoded),
        head=2 * decoded * a.hidden_size * a.vocabulary,
        last=2 * a.hidden_size * a.inner * (a.layers * decoded + a.encoder_layers * encoded),
    )
