"""Sixteen float32 lanes as one value of compiled code, and memory access by address.

numba leaves vector instructions to LLVM, which splits a sum over lanes at will: another loop around the same
values changes the last bits. These functions fix the order. Addresses are integers (``Tensor.data_ptr``) in bytes,
counts and indices are in elements. Bounds are not checked; callers must do so.
"""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core.cgutils import get_or_insert_function
from numba.extending import intrinsic, models, register_model

WIDTH = 16
_FLOAT, _INT16, _INT32, _INT64 = ir.FloatType(), ir.IntType(16), ir.IntType(32), ir.IntType(64)
_VECTOR, _HALVES, _INTS = (ir.VectorType(kind, WIDTH) for kind in (_FLOAT, _INT16, _INT32))
_F32, _I64 = types.float32, types.int64


class _Lanes(types.Type):
    def __init__(self) -> None:
        super().__init__(name=f"Lanes{WIDTH}")


LANES = _Lanes()


@register_model(_Lanes)
class _LanesModel(models.PrimitiveModel):
    def __init__(self, manager: Any, frontend: Any) -> None:
        super().__init__(manager, frontend, _VECTOR)


def _instruction(result: Any, arguments: tuple[Any, ...], emit: Callable[..., Any]) -> Any:
    """A function of compiled code made from ``emit(builder, *LLVM values)``, which returns an LLVM value."""

    def generate(context: Any, builder: Any, signature: Any, values: Any) -> Any:
        made = emit(builder, *values)
        return context.get_dummy_value() if result is types.void else made

    signature = result(*arguments)
    # numba needs a function with exactly as many named parameters as there are arguments.
    return intrinsic(
        [
            lambda typing: (signature, generate),
            lambda typing, a: (signature, generate),
            lambda typing, a, b: (signature, generate),
            lambda typing, a, b, c: (signature, generate),
        ][len(arguments)]
    )


def _at(builder: Any, address: Any, kind: Any, index: Any = None) -> Any:
    pointer = builder.inttoptr(address, kind.as_pointer())
    return pointer if index is None else builder.gep(pointer, [index])


def _put(builder: Any, pointer: Any, value: Any, align: int | None = None) -> None:
    builder.store(value, pointer, align=align)


def _first_lanes(builder: Any, count: Any) -> Any:
    lanes = ir.Constant(_INTS, list(range(WIDTH)))
    return builder.icmp_signed("<", lanes, _splat_of(builder, builder.trunc(count, _INT32), _INTS))


def _load_masked(builder: Any, address: Any, count: Any, kind: Any, name: str) -> Any:
    mask, align = _first_lanes(builder, count), ir.Constant(_INT32, 2 if kind is _HALVES else 4)
    load = ir.FunctionType(kind, [kind.as_pointer(), _INT32, mask.type, kind])
    function = get_or_insert_function(builder.module, load, name)
    return builder.call(function, [_at(builder, address, kind), align, mask, ir.Constant(kind, None)])


def _store_masked(builder: Any, address: Any, value: Any, count: Any) -> None:
    mask, align = _first_lanes(builder, count), ir.Constant(_INT32, 4)
    store = ir.FunctionType(ir.VoidType(), [_VECTOR, _VECTOR.as_pointer(), _INT32, mask.type])
    function = get_or_insert_function(builder.module, store, "llvm.masked.store.v16f32.p0")
    builder.call(function, [value, _at(builder, address, _VECTOR), align, mask])


def _widened(builder: Any, halves: Any) -> Any:
    """Convert bfloat16 bits to float32."""
    bits = builder.shl(builder.zext(halves, _INTS), ir.Constant(_INTS, [16] * WIDTH))
    return builder.bitcast(bits, _VECTOR)


def _splat_of(builder: Any, value: Any, kind: Any = _VECTOR) -> Any:
    first = builder.insert_element(ir.Constant(kind, ir.Undefined), value, ir.Constant(_INT32, 0))
    return builder.shuffle_vector(first, ir.Constant(kind, ir.Undefined), ir.Constant(_INTS, [0] * WIDTH))


def _fma(builder: Any, a: Any, b: Any, c: Any) -> Any:
    function = ir.FunctionType(_VECTOR, [_VECTOR] * 3)
    return builder.call(get_or_insert_function(builder.module, function, "llvm.fma.v16f32"), [a, b, c])


def _folded(combine: Callable[..., Any]) -> Callable[..., Any]:
    """Reduce all lanes to one value: combine the upper half with the lower half until one lane is left."""

    def emit(builder: Any, value: Any) -> Any:
        width = WIDTH
        while width > 1:
            width //= 2
            lower, upper = (
                builder.shuffle_vector(
                    value,
                    ir.Constant(value.type, ir.Undefined),
                    ir.Constant(ir.VectorType(_INT32, width), [first + lane for lane in range(width)]),
                )
                for first in (0, width)
            )
            value = combine(builder, lower, upper)
        return builder.extract_element(value, ir.Constant(_INT32, 0))

    return emit


def _greater(builder: Any, a: Any, b: Any) -> Any:
    return builder.select(builder.fcmp_ordered(">", a, b), a, b)


def _power_of_two(builder: Any, shifted: Any) -> Any:
    """Compute 2**n from n + 1.5 * 2**23, whose last bits are n."""
    bits = builder.add(builder.bitcast(shifted, _INTS), ir.Constant(_INTS, [127 - 0x4B400000] * WIDTH))
    return builder.bitcast(builder.shl(bits, ir.Constant(_INTS, [23] * WIDTH)), _VECTOR)


def _binary(name: str) -> Callable[..., Any]:
    return lambda builder, a, b: getattr(builder, name)(a, b)


_HALF_LOAD = "llvm.masked.load.v16i16.p0"
add = _instruction(LANES, (LANES, LANES), _binary("fadd"))
sub = _instruction(LANES, (LANES, LANES), _binary("fsub"))
mul = _instruction(LANES, (LANES, LANES), _binary("fmul"))
div = _instruction(LANES, (LANES, LANES), _binary("fdiv"))
greater = _instruction(LANES, (LANES, LANES), _greater)
fma = _instruction(LANES, (LANES, LANES, LANES), _fma)
"""Fused multiply-add: a * b + c, rounded once."""
splat = _instruction(LANES, (_F32,), _splat_of)
power_of_two = _instruction(LANES, (LANES,), _power_of_two)
sum_of = _instruction(_F32, (LANES,), _folded(_binary("fadd")))
greatest_of = _instruction(_F32, (LANES,), _folded(_greater))
load = _instruction(LANES, (_I64,), lambda b, address: b.load(_at(b, address, _VECTOR), align=4))
load_half = _instruction(LANES, (_I64,), lambda b, address: _widened(b, b.load(_at(b, address, _HALVES), align=2)))
"""Loads sixteen bfloat16 values as float32 lanes."""
load_first = _instruction(
    LANES, (_I64, _I64), lambda b, address, n: _load_masked(b, address, n, _VECTOR, "llvm.masked.load.v16f32.p0")
)
"""Loads the first n lanes; the others are zeros."""
load_half_first = _instruction(
    LANES, (_I64, _I64), lambda b, address, n: _widened(b, _load_masked(b, address, n, _HALVES, _HALF_LOAD))
)
store = _instruction(types.void, (_I64, LANES), lambda b, address, x: _put(b, _at(b, address, _VECTOR), x, align=4))
store_first = _instruction(types.void, (_I64, LANES, _I64), _store_masked)
float_at = _instruction(_F32, (_I64, _I64), lambda b, address, index: b.load(_at(b, address, _FLOAT, index)))
int_at = _instruction(_I64, (_I64, _I64), lambda b, address, index: b.load(_at(b, address, _INT64, index)))
int32_at = _instruction(
    _I64, (_I64, _I64), lambda b, address, index: b.sext(b.load(_at(b, address, _INT32, index)), _INT64)
)
put_float = _instruction(
    types.void, (_I64, _I64, _F32), lambda b, address, index, x: _put(b, _at(b, address, _FLOAT, index), x)
)
put_int = _instruction(
    types.void, (_I64, _I64, _I64), lambda b, address, index, x: _put(b, _at(b, address, _INT64, index), x)
)
put_int32 = _instruction(
    types.void,
    (_I64, _I64, _I64),
    lambda b, address, index, x: _put(b, _at(b, address, _INT32, index), b.trunc(x, _INT32)),
)
