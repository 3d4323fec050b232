"""What the decoding kernel is written in: LLVM's instructions on vectors, loops, and the exponential function."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final

from llvmlite import ir

I8, I16, I32, I64, F32, F16 = (
    ir.IntType(8),
    ir.IntType(16),
    ir.IntType(32),
    ir.IntType(64),
    ir.FloatType(),
    ir.HalfType(),
)
POINTER: Final = I8.as_pointer()

_MAGIC: Final = 1.5 * 2.0**23
"""Adding it to a float32 rounds that to an integer, which then stands in the lowest bits."""

_EXP2: Final = (1.000000071, 0.6931469491, 0.2402212175, 0.05550742616, 0.009675459746, 0.001326697039)
"""2^x for |x| <= 1/2 as a polynomial: the one of degree 5 that fits best, to 8e-8."""


class _BFloat(ir.Type):  # type: ignore[misc]  # llvmlite has no types here, and no bfloat16
    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


BF16: Final = _BFloat()


@dataclass(slots=True)
class Loop:
    """The body of a loop under construction.

    Attributes:
        index: the counter, i64.
        values: what the iteration starts with; the body replaces them by what the next one starts with.
    """

    index: Any
    values: list[Any]


class Emitter:
    """Instructions appended to one function.

    Args:
        function: which has no blocks yet.
        lanes: float32 numbers in a vector register.
    """

    def __init__(self, function: Any, lanes: int) -> None:
        self.module = function.module
        self.entry = function.append_basic_block("entry")
        self.builder: Any = ir.IRBuilder(self.entry)
        self.lanes = lanes
        self.floats = ir.VectorType(F32, lanes)
        self.words = ir.VectorType(I32, lanes)

    # constants and conversions

    def integer(self, value: int) -> Any:
        return ir.Constant(I64, value)

    def splat(self, value: float) -> Any:
        return ir.Constant(self.floats, [value] * self.lanes)

    def repeated(self, vector: Any, count: int) -> Any:
        """The vector `count` times in a row."""
        size = vector.type.count
        order = ir.Constant(ir.VectorType(I32, size * count), list(range(size)) * count)
        return self.builder.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined), order)

    def spread(self, scalar: Any, count: int | None = None) -> Any:
        """A vector of equal numbers."""
        kind = ir.VectorType(scalar.type, 1)
        one = self.builder.insert_element(ir.Constant(kind, ir.Undefined), scalar, ir.Constant(I32, 0))
        return self.repeated(one, self.lanes if count is None else count)

    def shuffled(self, first: Any, second: Any, order: Sequence[int]) -> Any:
        return self.builder.shuffle_vector(first, second, ir.Constant(ir.VectorType(I32, len(order)), list(order)))

    # memory

    def scratch(self, size: int) -> Any:
        """Bytes on the stack of the function."""
        with self.builder.goto_entry_block():
            slot = self.builder.alloca(ir.ArrayType(I8, size))
            slot.align = 64
            return self.builder.bitcast(slot, POINTER)

    def at(self, pointer: Any, *offsets: Any) -> Any:
        """The pointer, moved by bytes."""
        for offset in offsets:
            pointer = self.builder.gep(pointer, [self.integer(offset) if isinstance(offset, int) else offset])
        return pointer

    def load(self, pointer: Any, kind: Any, align: int = 1) -> Any:
        return self.builder.load(self.builder.bitcast(pointer, kind.as_pointer()), align=align, typ=kind)

    def store(self, value: Any, pointer: Any, align: int = 1) -> None:
        self.builder.store(value, self.builder.bitcast(pointer, value.type.as_pointer()), align=align)

    def prefetch(self, pointer: Any) -> None:
        """Ask for a line of memory, into the second cache; any address will do."""
        function = self.declared("llvm.prefetch.p0", ir.VoidType(), [POINTER, I32, I32, I32])
        self.builder.call(function, [pointer, *(ir.Constant(I32, value) for value in (0, 2, 1))])

    # control

    @contextmanager
    def loop(self, start: Any, stop: Any, step: int = 1, values: Sequence[Any] = ()) -> Iterator[Loop]:
        """index = start, start + step, ... below stop; afterwards `values` holds the results."""
        start, stop = (self.integer(x) if isinstance(x, int) else x for x in (start, stop))
        builder, before = self.builder, self.builder.block
        head, body, end = (builder.append_basic_block(name) for name in ("head", "body", "end"))
        builder.branch(head)
        builder.position_at_end(head)
        phis = [builder.phi(value.type) for value in (start, *values)]
        for phi, value in zip(phis, (start, *values), strict=True):
            phi.add_incoming(value, before)
        builder.cbranch(builder.icmp_signed("<", phis[0], stop), body, end)
        builder.position_at_end(body)
        loop = Loop(phis[0], list(phis[1:]))
        yield loop
        following = builder.add(phis[0], self.integer(step))
        for phi, value in zip(phis, (following, *loop.values), strict=True):
            phi.add_incoming(value, builder.block)
        builder.branch(head)
        builder.position_at_end(end)
        loop.values = list(phis[1:])

    # arithmetic on float32 vectors

    def multiply_add(self, first: Any, second: Any, added: Any) -> Any:
        function = self.declared(f"llvm.fma.v{self.lanes}f32", self.floats, [self.floats] * 3)
        return self.builder.call(function, [first, second, added])

    def larger(self, first: Any, second: Any) -> Any:
        """Per lane; NaN where the second is NaN."""
        return self.builder.select(self.builder.fcmp_ordered(">", first, second), first, second)

    def dot_pairs(self, added: Any, first: Any, second: Any) -> Any:
        """`added` plus, in each lane, the products of two bfloat16 numbers; the factors are vectors of i32 or float."""
        pairs = ir.VectorType(BF16, 2 * self.lanes)
        bits = 32 * self.lanes
        function = self.declared(f"llvm.x86.avx512bf16.dpbf16ps.{bits}", self.floats, [self.floats, pairs, pairs])
        return self.builder.call(function, [added, *(self.builder.bitcast(x, pairs) for x in (first, second))])

    def exp2(self, x: Any) -> Any:
        """2^x for x <= 0, where less than 2^-126 is 0."""
        builder = self.builder
        small = builder.fcmp_ordered("<", x, self.splat(-126.0))
        x = builder.select(small, self.splat(-126.0), x)
        shifted = builder.fadd(x, self.splat(_MAGIC))
        rest = builder.fsub(x, builder.fsub(shifted, self.splat(_MAGIC)))
        result = self.splat(_EXP2[-1])
        for factor in reversed(_EXP2[:-1]):
            result = self.multiply_add(result, rest, self.splat(factor))
        exponent = builder.shl(builder.bitcast(shifted, self.words), ir.Constant(self.words, [23] * self.lanes))
        exponent = builder.add(exponent, ir.Constant(self.words, [0x3F800000] * self.lanes))
        result = builder.fmul(result, builder.bitcast(exponent, self.floats))
        return builder.select(small, self.splat(0.0), result)

    def over_parts(self, vector: Any, parts: int, combine: Any) -> Any:
        """Lanes [row][part]: in all lanes of a row, what its parts combine to."""
        step = 1
        while step < parts:
            vector = combine(vector, self.shuffled(vector, vector, [lane ^ step for lane in range(self.lanes)]))
            step *= 2
        return vector

    # helpers

    def declared(self, name: str, result: Any, arguments: list[Any]) -> Any:
        found = self.module.globals.get(name)
        return found or ir.Function(self.module, ir.FunctionType(result, arguments), name)
