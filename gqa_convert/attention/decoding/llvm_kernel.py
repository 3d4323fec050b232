"""The decoding kernel: a few rows of queries against the keys and values of one head, as LLVM's intermediate language.

The rows are the queries of all query heads that share the head. A task is one head and a chunk of its keys. Its keys
are read in blocks, each once: scores, a softmax that continues from block to block (Milakov and Gimelshein 2018), and
the product with the values. Where a head has several chunks, the thread that finishes the last one joins them (Dao et
al. 2023, *Flash-Decoding*).

Scores lie in vectors [row][part]: `tile` rows of `parts` numbers, `tile` * `parts` = `lanes`. A vector of queries holds
`parts` consecutive groups of features of each row, and is multiplied by that piece of a key, which a load repeats for
every row. Sums over the parts follow once per key.

In bfloat16 on processors that have it, a lane multiplies pairs of numbers, adds them in float32 and never widens keys
or values. Elsewhere numbers are widened to float32.
"""

from typing import Any, Final

from llvmlite import ir

from gqa_convert.attention.decoding.llvm_emitter import BF16, F16, F32, I8, I16, I32, I64, POINTER, Emitter
from gqa_convert.attention.decoding.shape import BLOCK, FIELDS, Shape, partial_bytes, tile_of

AHEAD: Final = 64
"""How many keys earlier a key is asked for from memory. A processor that sees the kernel's own loads only, which go from
key to key and back, fetched a quarter as much per second as it can.
"""

_LINE: Final = 64
"""Bytes that come from memory at once."""

_LOG2E: Final = 1.4426950408889634
_LOWEST: Final = -(2.0**127)


def emit(shape: Shape) -> str:
    """The module with the function `attend(fields)`, which takes tasks until none is left."""
    module = ir.Module("decoding")
    function = ir.Function(module, ir.FunctionType(ir.VoidType(), [POINTER]), "attend")
    _Kernel(Emitter(function, shape.lanes), shape, function.args[0]).emit()
    return str(module)


class _Kernel:
    def __init__(self, emitter: Emitter, shape: Shape, fields: Any) -> None:
        self.e, self.shape = emitter, shape
        self.size = 4 if shape.dtype == "float32" else 2
        self.pairs = shape.pairs and shape.dtype == "bfloat16"
        self.tile = tile_of(shape.rows, shape.lanes)
        self.parts = shape.lanes // self.tile
        self.tiles = -(-shape.rows // self.tile)
        self.units = BLOCK // shape.lanes
        self.vector = 4 * shape.lanes  # bytes
        self.group = 2 * self.parts if self.pairs else self.parts  # features of a row in a vector of queries
        self.steps = -(-shape.head_dim // self.group)
        self.field = {name: emitter.load(emitter.at(fields, 8 * number), I64, 8) for number, name in enumerate(FIELDS)}
        self.pointer = {
            name: emitter.builder.inttoptr(self.field[name], POINTER)
            for name in ("query", "key", "value", "out", "mask", "partial", "counters")
        }
        vectors = self.tiles * self.vector
        self.queries = emitter.scratch(vectors * self.steps)
        self.scores = emitter.scratch(vectors * BLOCK // self.parts)
        self.weights = emitter.scratch(vectors * BLOCK // self.parts)
        self.bias = emitter.scratch((self.tiles * self.tile if shape.per_row else 1) * BLOCK * 4)
        self.greatest, self.sums, self.factors = (emitter.scratch(vectors) for _ in range(3))
        self.results = emitter.scratch(shape.rows * shape.value_head_dim * 4)
        self.wide_keys = emitter.scratch(shape.lanes * shape.head_dim * 4)
        self.last_keys = emitter.scratch(shape.lanes * shape.head_dim * self.size)
        self.last_values = emitter.scratch(shape.lanes * shape.value_head_dim * self.size)

    def emit(self) -> None:
        b, e = self.e.builder, self.e
        head, body, end = (b.append_basic_block(name) for name in ("next", "task", "done"))
        b.branch(head)
        b.position_at_end(head)
        task = b.atomic_rmw("add", b.bitcast(self.pointer["counters"], I64.as_pointer()), e.integer(1), "monotonic")
        b.cbranch(b.icmp_signed("<", task, self.field["tasks"]), body, end)
        b.position_at_end(body)
        self._task(task)
        b.branch(head)
        b.position_at_end(end)
        b.ret_void()

    def _task(self, task: Any) -> None:
        e, b, field = self.e, self.e.builder, self.field
        head, chunk = b.sdiv(task, field["chunks"]), b.srem(task, field["chunks"])
        batch, group = b.sdiv(head, field["heads"]), b.srem(head, field["heads"])
        first = b.mul(chunk, field["chunk"])
        stop = b.add(first, field["chunk"])
        stop = b.select(b.icmp_signed("<", stop, field["keys"]), stop, field["keys"])
        key, value = (
            e.at(
                self.pointer[name],
                b.mul(batch, field[f"{name}_batch"]),
                b.mul(group, field[f"{name}_head"]),
            )
            for name in ("key", "value")
        )
        mask = e.at(
            self.pointer["mask"],
            b.mul(batch, field["mask_batch"]),
            b.mul(b.mul(group, e.integer(self.shape.ratio)), field["mask_head"]),
        )
        row_bytes = self.shape.rows * self.shape.head_dim * self.size
        self._pack_queries(e.at(self.pointer["query"], b.mul(head, e.integer(row_bytes))))
        for tile in range(self.tiles):
            e.store(e.splat(float("-inf")), e.at(self.greatest, tile * self.vector))
            e.store(e.splat(0.0), e.at(self.sums, tile * self.vector))
        with e.loop(0, self.shape.rows * self.shape.value_head_dim * 4, self.vector) as loop:
            e.store(e.splat(0.0), e.at(self.results, loop.index))
        with e.loop(first, stop, BLOCK) as loop:
            left = b.sub(stop, loop.index)
            left = b.select(b.icmp_signed("<", left, e.integer(BLOCK)), left, e.integer(BLOCK))
            seen = self._prepare_bias(mask, loop.index, left)
            with b.if_then(seen):
                keys, values = (
                    e.at(pointer, b.mul(loop.index, field[f"{name}_row"]))
                    for name, pointer in (("key", key), ("value", value))
                )
                self._block(keys, values, left)
        whole = b.icmp_signed("==", field["chunks"], e.integer(1))
        with b.if_else(whole) as (alone, several):
            with alone:
                self._finish(head)
            with several:
                self._leave(head, chunk)

    def _pack_queries(self, query: Any) -> None:
        """[rows, head_dim] -> [tile][step][row][group], zeros beyond the rows; widened unless pairs are multiplied."""
        e = self.e
        kind = ir.VectorType(I32 if self.pairs else F32, self.parts)
        for row in range(self.tiles * self.tile):
            tile, inside = divmod(row, self.tile)
            with e.loop(0, self.steps) as loop:
                target = e.at(
                    self.queries,
                    (tile * self.steps * self.tile + inside) * self.parts * 4,
                    e.builder.mul(loop.index, e.integer(self.vector)),
                )
                if row < self.shape.rows:
                    source = e.at(
                        query,
                        row * self.shape.head_dim * self.size,
                        e.builder.mul(loop.index, e.integer(self.group * self.size)),
                    )
                    found = e.load(source, kind) if self.pairs else self._widened(source, self.parts)
                else:
                    found = ir.Constant(kind, [0] * self.parts)
                e.store(found, target)

    def _widened(self, pointer: Any, count: int) -> Any:
        """Numbers in memory as float32."""
        e, b = self.e, self.e.builder
        if self.shape.dtype == "float32":
            return e.load(pointer, ir.VectorType(F32, count))
        if self.shape.dtype == "float16":
            return b.fpext(e.load(pointer, ir.VectorType(F16, count)), ir.VectorType(F32, count))
        words = b.zext(e.load(pointer, ir.VectorType(I16, count)), ir.VectorType(I32, count))
        return b.bitcast(b.shl(words, ir.Constant(words.type, [16] * count)), ir.VectorType(F32, count))

    def _prepare_bias(self, mask: Any, first: Any, left: Any) -> Any:
        """What is added to the scores of a block, in float32 and times log2(e); whether any key is seen."""
        e, b, shape = self.e, self.e.builder, self.shape
        lanes = ir.Constant(ir.VectorType(I64, shape.lanes), list(range(shape.lanes)))
        limit = e.spread(left)
        hidden = e.splat(float("-inf"))
        best = hidden
        for row in range(shape.rows if shape.per_row else 1):
            head, query = divmod(row, shape.rows // shape.ratio)
            start = e.at(
                mask,
                b.mul(e.integer(head), self.field["mask_head"]),
                b.mul(e.integer(query), self.field["mask_query"]),
                b.mul(first, e.integer(4 if shape.mask == "float" else 1)),
            )
            with e.loop(0, BLOCK, shape.lanes, [best]) as loop:
                inside = b.icmp_signed("<", b.add(lanes, e.spread(loop.index)), limit)
                if shape.mask == "none":
                    found = b.select(inside, e.splat(0.0), hidden)
                elif shape.mask == "float":
                    given = self._loaded_where(inside, e.at(start, b.mul(loop.index, e.integer(4))), F32)
                    large = b.fcmp_ordered("<", given, e.splat(_LOWEST))  # stays finite: those of a row may all be so
                    limited = b.select(large, e.splat(_LOWEST), given)
                    limited = b.select(b.fcmp_ordered("==", given, hidden), hidden, limited)
                    found = b.select(inside, b.fmul(limited, e.splat(_LOG2E)), hidden)
                else:
                    given = self._loaded_where(inside, e.at(start, loop.index), I8)
                    shown = b.icmp_unsigned("!=", given, ir.Constant(given.type, [0] * shape.lanes))
                    found = b.select(b.and_(inside, shown), e.splat(0.0), hidden)
                self._store_bias(found, row, loop.index)
                # NaN counts as seen
                loop.values[0] = b.select(b.fcmp_ordered("==", found, hidden), loop.values[0], e.splat(0.0))
            best = loop.values[0]
        seen = b.fcmp_unordered("!=", best, hidden)
        return b.icmp_unsigned("!=", b.bitcast(seen, ir.IntType(shape.lanes)), ir.Constant(ir.IntType(shape.lanes), 0))

    def _loaded_where(self, inside: Any, pointer: Any, kind: Any) -> Any:
        """A vector of which only the lanes `inside` may be read."""
        e, size = self.e, self.shape.lanes
        vector = ir.VectorType(kind, size)
        name = f"llvm.masked.load.v{size}{'f32' if kind is F32 else 'i8'}.p0"
        flags = ir.VectorType(ir.IntType(1), size)
        function = e.declared(name, vector, [POINTER, I32, flags, vector])
        zeros = ir.Constant(vector, [0] * size)
        return e.builder.call(function, [pointer, ir.Constant(I32, 1), inside, zeros])

    def _store_bias(self, found: Any, row: int, key: Any) -> None:
        e, b = self.e, self.e.builder
        if not self.shape.per_row:
            e.store(found, e.at(self.bias, b.mul(key, e.integer(4))))
            return
        tile, inside = divmod(row, self.tile)
        for number in range(self.shape.lanes // self.parts):  # [tile][keys / parts][row][parts]
            piece = e.shuffled(found, found, range(number * self.parts, (number + 1) * self.parts))
            at = e.at(
                self.bias,
                tile * self.tile * BLOCK * 4 + number * self.vector + inside * self.parts * 4,
                b.mul(key, e.integer(self.tile * 4)),
            )
            e.store(piece, at)

    def _block(self, keys: Any, values: Any, left: Any) -> None:
        """One block of keys: all of its scores, the softmax so far, and the results so far."""
        e, b, shape = self.e, self.e.builder, self.shape
        whole = b.mul(b.sdiv(left, e.integer(shape.lanes)), e.integer(shape.lanes))
        units = b.mul(b.sdiv(b.add(left, e.integer(shape.lanes - 1)), e.integer(shape.lanes)), e.integer(shape.lanes))
        with b.if_then(b.icmp_signed("<", whole, left), likely=False):
            count = b.sub(left, whole)
            for name, pointer, last, size in (
                ("key", keys, self.last_keys, shape.head_dim),
                ("value", values, self.last_values, shape.value_head_dim),
            ):
                row = self.field[f"{name}_row"]
                self._copy_rows(e.at(pointer, b.mul(whole, row)), row, count, last, size)
        for tile in range(self.tiles):
            e.store(e.splat(float("-inf")), e.at(self.factors, tile * self.vector))
        with e.loop(0, units, shape.lanes) as loop:
            source, row = self._unit(keys, "key", loop.index, whole, self.last_keys, shape.head_dim)
            if not self.pairs and shape.dtype != "float32":
                source, row = self._widen_keys(source, row), e.integer(shape.head_dim * 4)
            for tile in range(self.tiles):
                ahead = [("key", keys, AHEAD, shape.head_dim), ("value", values, 0, shape.value_head_dim)]
                self._scores(tile, source, row, loop.index, ahead if tile == 0 else [])
        for tile in range(self.tiles):
            self._softmax(tile, units)
        for tile in range(self.tiles):
            rows = min(self.tile, shape.rows - tile * self.tile)
            blocks = shape.lanes // self.tile  # accumulators: as many as lanes
            vectors = shape.value_head_dim // shape.lanes
            for start in range(0, vectors, blocks):
                self._products(tile, rows, start, min(blocks, vectors - start), values, whole, units)

    def _copy_rows(self, source: Any, stride: Any, count: Any, target: Any, size: int) -> None:
        """`count` rows, then zeros up to the number of lanes."""
        e, b, width = self.e, self.e.builder, size * self.size
        kind = ir.VectorType(I32, self.shape.lanes * self.size // 4)
        step = self.shape.lanes * self.size
        with e.loop(0, self.shape.lanes * width, step) as loop:
            e.store(ir.Constant(kind, [0] * kind.count), e.at(target, loop.index))
        with e.loop(0, count) as rows, e.loop(0, width, step) as loop:
            found = e.load(e.at(source, b.mul(rows.index, stride), loop.index), kind)
            e.store(found, e.at(target, b.mul(rows.index, e.integer(width)), loop.index))

    def _unit(self, pointer: Any, name: str, index: Any, whole: Any, last: Any, size: int) -> tuple[Any, Any]:
        """Address and stride of as many rows as there are lanes; the last ones of all were copied."""
        e, b = self.e, self.e.builder
        row = self.field[f"{name}_row"]
        inside = b.icmp_signed("<", index, whole)
        return (
            b.select(inside, e.at(pointer, b.mul(index, row)), last),
            b.select(inside, row, e.integer(size * self.size)),
        )

    def _widen_keys(self, source: Any, row: Any) -> Any:
        e, b, lanes = self.e, self.e.builder, self.shape.lanes
        with e.loop(0, lanes) as rows, e.loop(0, self.shape.head_dim, lanes) as loop:
            found = self._widened(e.at(source, b.mul(rows.index, row), b.mul(loop.index, e.integer(self.size))), lanes)
            at = b.add(b.mul(rows.index, e.integer(self.shape.head_dim)), loop.index)
            e.store(found, e.at(self.wide_keys, b.mul(at, e.integer(4))))
        return self.wide_keys

    def _scores(self, tile: int, keys: Any, row: Any, first: Any, ahead: list[tuple[str, Any, int, int]]) -> None:
        """The scores of a tile of rows and as many keys as there are lanes; what is `ahead` is asked for meanwhile."""
        e, b, lanes, parts = self.e, self.e.builder, self.shape.lanes, self.parts
        addresses = [keys]
        for _ in range(lanes - 1):
            addresses.append(e.at(addresses[-1], row))
        piece = ir.VectorType(I32 if self.pairs else F32, parts)
        with e.loop(0, self.steps, 1, [e.splat(0.0)] * lanes) as loop:
            for name, pointer, distance, size in ahead:
                start = b.add(first, e.integer(distance))
                self._ask_for(e.at(pointer, b.mul(start, self.field[f"{name}_row"])), name, size, loop.index)
            at = b.mul(loop.index, e.integer(self.vector))
            kind = e.words if self.pairs else e.floats
            queries = e.load(e.at(self.queries, tile * self.steps * self.vector, at), kind, self.vector)
            offset = b.mul(loop.index, e.integer(parts * 4))
            for number, address in enumerate(addresses):
                if parts == 2:  # one load of 64 bits, which LLVM repeats by itself
                    word = e.spread(e.load(e.at(address, offset), I64), self.tile)
                    repeated = b.bitcast(word, kind)
                else:
                    repeated = e.repeated(e.load(e.at(address, offset), piece), self.tile)
                multiply = e.dot_pairs if self.pairs else lambda added, x, y: e.multiply_add(x, y, added)
                loop.values[number] = multiply(loop.values[number], queries, repeated)
        sums = self._summed(loop.values)
        scale = e.spread(self._scale())
        best = e.load(e.at(self.factors, tile * self.vector), e.floats, self.vector)
        for number, scores in enumerate(sums):
            at = b.mul(b.add(first, e.integer(number * parts)), e.integer(self.tile * 4))
            if self.shape.per_row:
                added = e.load(e.at(self.bias, tile * self.tile * BLOCK * 4, at), e.floats)
            else:
                key = b.mul(b.add(first, e.integer(number * parts)), e.integer(4))
                added = e.repeated(e.load(e.at(self.bias, key), ir.VectorType(F32, parts)), self.tile)
            scores = e.multiply_add(scores, scale, added)
            e.store(scores, e.at(self.scores, tile * self.tile * BLOCK * 4, at), self.vector)
            best = e.larger(best, scores)
        e.store(best, e.at(self.factors, tile * self.vector), self.vector)

    def _ask_for(self, pointer: Any, name: str, size: int, step: Any) -> None:
        """Prefetch a part of as many rows as there are lanes, so that all steps together prefetch them whole."""
        e, b = self.e, self.e.builder
        in_row = -(-size * self.size // _LINE)
        count = -(-self.shape.lanes * in_row // self.steps)
        for number in range(count):
            line = b.add(b.mul(step, e.integer(count)), e.integer(number))
            row, inside = b.udiv(line, e.integer(in_row)), b.urem(line, e.integer(in_row))
            e.prefetch(e.at(pointer, b.mul(row, self.field[f"{name}_row"]), b.mul(inside, e.integer(_LINE))))

    def _scale(self) -> Any:
        b = self.e.builder
        scale = b.bitcast(self.field["scale"], ir.DoubleType())
        return b.fptrunc(b.fmul(scale, ir.Constant(ir.DoubleType(), _LOG2E)), F32)

    def _summed(self, vectors: list[Any]) -> list[Any]:
        """One vector [row][part] per key -> one vector [row][key] per `parts` keys, summed over the parts."""
        e, lanes, parts = self.e, self.shape.lanes, self.parts
        done = 1  # keys whose sums stand beside each other in a vector
        while done < parts:
            orders: list[list[int]] = [[], []]
            for row in range(self.tile):
                for pair in range(parts // (2 * done)):
                    for second in range(2):
                        for key in range(done):
                            for which in range(2):
                                orders[which].append(second * lanes + row * parts + (2 * pair + which) * done + key)
            vectors = [
                e.builder.fadd(e.shuffled(x, y, orders[0]), e.shuffled(x, y, orders[1]))
                for x, y in zip(vectors[::2], vectors[1::2], strict=True)
            ]
            done *= 2
        return vectors

    def _softmax(self, tile: int, units: Any) -> None:
        """Scores -> weights relative to the greatest score so far, their sum, and the factors for what was summed."""
        e, b = self.e, self.e.builder
        here = tile * self.vector
        block = e.over_parts(e.load(e.at(self.factors, here), e.floats), self.parts, e.larger)
        before = e.load(e.at(self.greatest, here), e.floats)
        best = e.larger(before, block)
        shift = b.select(b.fcmp_ordered("==", best, e.splat(float("-inf"))), e.splat(0.0), best)
        factor = e.exp2(b.fsub(before, shift))
        e.store(best, e.at(self.greatest, here))
        e.store(factor, e.at(self.factors, here))
        size = 2 if self.pairs else 4
        with e.loop(0, units, self.parts, [e.splat(0.0)]) as loop:
            at = b.mul(loop.index, e.integer(self.tile * 4))
            scores = e.load(e.at(self.scores, tile * self.tile * BLOCK * 4, at), e.floats, self.vector)
            weights = e.exp2(b.fsub(scores, shift))
            loop.values[0] = b.fadd(loop.values[0], weights)
            at = b.mul(loop.index, e.integer(self.tile * size))
            rounded = b.fptrunc(weights, ir.VectorType(BF16, self.shape.lanes)) if self.pairs else weights
            e.store(rounded, e.at(self.weights, tile * self.tile * BLOCK * size, at))
        sums = e.load(e.at(self.sums, here), e.floats)
        e.store(e.multiply_add(sums, factor, loop.values[0]), e.at(self.sums, here))

    def _products(self, tile: int, rows: int, start: int, count: int, values: Any, whole: Any, units: Any) -> None:
        """Add the weighted values of a block, for some rows and `count` vectors of features from the `start`-th on."""
        e, b, shape, parts = self.e, self.e.builder, self.shape, self.parts
        size = 2 if self.pairs else 4
        places, held = [], []
        for row in range(rows):
            factor = e.spread(e.load(e.at(self.factors, tile * self.vector + row * parts * 4), F32))
            for number in range(count):
                feature = (tile * self.tile + row) * shape.value_head_dim + (start + number) * shape.lanes
                places.append(e.at(self.results, feature * 4))
                held.append(b.fmul(e.load(places[-1], e.floats), factor))
        with e.loop(0, units, shape.lanes, held) as unit:
            source, stride = self._unit(values, "value", unit.index, whole, self.last_values, shape.value_head_dim)
            source = e.at(source, start * shape.lanes * self.size)
            with e.loop(0, shape.lanes, parts, unit.values) as loop:
                key = b.add(unit.index, loop.index)
                weights = e.at(self.weights, tile * self.tile * BLOCK * size, b.mul(key, e.integer(self.tile * size)))
                for inside in range(0, parts, 2 if self.pairs else 1):
                    at = e.at(source, b.mul(b.add(loop.index, e.integer(inside)), stride))
                    found = [self._values(at, stride, number) for number in range(count)]
                    for row in range(rows):
                        weight = e.at(weights, (row * parts + inside) * size)
                        spread = e.spread(e.load(weight, I32 if self.pairs else F32))
                        for number in range(count):
                            place = row * count + number
                            loop.values[place] = (
                                e.dot_pairs(loop.values[place], found[number], spread)
                                if self.pairs
                                else e.multiply_add(found[number], spread, loop.values[place])
                            )
            unit.values = loop.values
        for place, result in zip(places, unit.values, strict=True):
            e.store(result, place)

    def _values(self, pointer: Any, stride: Any, number: int) -> Any:
        """A vector of features of one key as float32, or of two keys as pairs."""
        e, lanes = self.e, self.shape.lanes
        at = e.at(pointer, number * lanes * self.size)
        if not self.pairs:
            return self._widened(at, lanes)
        kind = ir.VectorType(I16, lanes)
        first, second = e.load(at, kind), e.load(e.at(at, stride), kind)
        return e.shuffled(first, second, [lane + which * lanes for lane in range(lanes) for which in range(2)])

    # results

    def _finish(self, head: Any) -> None:
        """Divide by the sums of weights and write the output; rows without weights are zeros."""
        e, b, shape = self.e, self.e.builder, self.shape
        out = e.at(self.pointer["out"], b.mul(head, e.integer(shape.rows * shape.value_head_dim * self.size)))
        for tile in range(self.tiles):
            sums = e.over_parts(e.load(e.at(self.sums, tile * self.vector), e.floats), self.parts, b.fadd)
            nothing = b.fcmp_ordered("==", sums, e.splat(0.0))
            inverse = b.select(nothing, e.splat(0.0), b.fdiv(e.splat(1.0), sums))
            e.store(inverse, e.at(self.factors, tile * self.vector))
        for row in range(shape.rows):
            inverse = e.spread(e.load(e.at(self.factors, self._lane(row)), F32))
            with e.loop(0, shape.value_head_dim, shape.lanes) as loop:
                at = b.add(loop.index, e.integer(row * shape.value_head_dim))
                found = b.fmul(e.load(e.at(self.results, b.mul(at, e.integer(4))), e.floats), inverse)
                e.store(self._rounded(found), e.at(out, b.mul(at, e.integer(self.size))))

    def _lane(self, row: int) -> int:
        """Where the number of a row stands in tiles of vectors, in bytes."""
        tile, inside = divmod(row, self.tile)
        return tile * self.vector + inside * self.parts * 4

    def _rounded(self, vector: Any) -> Any:
        """float32 in the type of the output, to the nearest."""
        e, b, lanes = self.e, self.e.builder, self.shape.lanes
        if self.shape.dtype == "float32":
            return vector
        if self.shape.dtype == "float16":
            return b.fptrunc(vector, ir.VectorType(F16, lanes))
        if self.pairs:
            return b.fptrunc(vector, ir.VectorType(BF16, lanes))
        words = b.bitcast(vector, e.words)

        def constant(value: int) -> Any:
            return ir.Constant(e.words, [value] * lanes)

        odd = b.and_(b.lshr(words, constant(16)), constant(1))
        rounded = b.lshr(b.add(words, b.add(odd, constant(0x7FFF))), constant(16))
        broken = b.fcmp_unordered("uno", vector, vector)
        return b.trunc(b.select(broken, constant(0x7FC0), rounded), ir.VectorType(I16, lanes))

    def _leave(self, head: Any, chunk: Any) -> None:
        """Leave what a chunk sums up to in memory; whoever leaves a head's last chunk joins them all."""
        e, b, shape = self.e, self.e.builder, self.shape
        numbers = shape.rows * shape.value_head_dim * 4
        width = partial_bytes(shape.rows, shape.value_head_dim, shape.lanes)
        base = e.at(self.pointer["partial"], b.mul(b.mul(head, self.field["chunks"]), e.integer(width)))
        mine = e.at(base, b.mul(chunk, e.integer(width)))
        vectors = self.tiles * self.vector
        for source, offset, size in (
            (self.greatest, 0, vectors),
            (self.sums, vectors, vectors),
            (self.results, 2 * vectors, numbers),
        ):
            with e.loop(0, size, self.vector) as loop:
                e.store(e.load(e.at(source, loop.index), e.floats), e.at(mine, offset, loop.index))
        counter = e.at(self.pointer["counters"], 8, b.mul(head, e.integer(8)))
        left = b.atomic_rmw("add", b.bitcast(counter, I64.as_pointer()), e.integer(1), "acq_rel")
        last = b.icmp_signed("==", left, b.sub(self.field["chunks"], e.integer(1)))
        with b.if_then(last):
            self._join(base, width)
            self._finish(head)

    def _join(self, base: Any, width: int) -> None:
        e, b, shape = self.e, self.e.builder, self.shape
        vectors, numbers = self.tiles * self.vector, shape.rows * shape.value_head_dim * 4
        for tile in range(self.tiles):
            e.store(e.splat(float("-inf")), e.at(self.greatest, tile * self.vector))
            e.store(e.splat(0.0), e.at(self.sums, tile * self.vector))
        with e.loop(0, numbers, self.vector) as loop:
            e.store(e.splat(0.0), e.at(self.results, loop.index))
        scales = self.scores  # free by now: the factors of what was joined, then those of the next chunk
        with e.loop(0, self.field["chunks"]) as chunks:
            part = e.at(base, b.mul(chunks.index, e.integer(width)))
            for tile in range(self.tiles):
                here = tile * self.vector
                before, found = (e.load(e.at(x, here), e.floats) for x in (self.greatest, part))
                best = e.larger(before, found)
                shift = b.select(b.fcmp_ordered("==", best, e.splat(float("-inf"))), e.splat(0.0), best)
                old, new = (e.exp2(b.fsub(x, shift)) for x in (before, found))
                e.store(best, e.at(self.greatest, here))
                e.store(old, e.at(scales, 2 * here))
                e.store(new, e.at(scales, 2 * here + self.vector))
                added = b.fmul(e.load(e.at(part, vectors + here), e.floats), new)
                e.store(e.multiply_add(e.load(e.at(self.sums, here), e.floats), old, added), e.at(self.sums, here))
            for row in range(shape.rows):
                tile, inside = divmod(row, self.tile)
                at = 2 * tile * self.vector + inside * self.parts * 4
                old = e.spread(e.load(e.at(scales, at), F32))
                new = e.spread(e.load(e.at(scales, at + self.vector), F32))
                with e.loop(row * shape.value_head_dim * 4, (row + 1) * shape.value_head_dim * 4, self.vector) as loop:
                    place = e.at(self.results, loop.index)
                    added = b.fmul(e.load(e.at(part, 2 * vectors, loop.index), e.floats), new)
                    e.store(e.multiply_add(e.load(place, e.floats), old, added), place)
