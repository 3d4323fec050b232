"""Machine code of the decoding kernel for this processor, made by LLVM in memory."""

import ctypes
import platform
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from gqa_convert.attention.decoding.shape import Shape


@dataclass(frozen=True, slots=True)
class Processor:
    """What the kernel can use.

    Attributes:
        lanes: float32 numbers in a vector register, 8 or 16.
        pairs: it multiplies pairs of bfloat16 (AVX-512 BF16).
    """

    lanes: int
    pairs: bool


@cache
def processor() -> Processor | None:
    """None where the kernel cannot run: llvmlite is missing or older than 0.45, or the processor lacks AVX2."""
    if platform.machine() not in ("x86_64", "AMD64"):
        return None
    try:
        import llvmlite.binding as llvm
    except ImportError:
        return None
    if llvm.llvm_version_info[0] < 20:  # llvmlite before 0.45, whose LLVM has other types of vectors of bfloat16
        return None
    features = llvm.get_host_cpu_features()
    if not all(features.get(name) for name in ("avx2", "fma", "f16c")):
        return None
    wide = all(features.get(name) for name in ("avx512f", "avx512bw", "avx512dq", "avx512vl"))
    return Processor(16 if wide else 8, bool(wide and features.get("avx512bf16")))


@dataclass(frozen=True, slots=True)
class Kernel:
    """A compiled kernel.

    Attributes:
        address: of the machine code.
        call: runs it in the calling thread, on the address of its fields.
        engine: owns the machine code.
    """

    address: int
    call: Callable[[Any], None]
    engine: Any


@cache
def compiled(shape: Shape) -> Kernel:
    """The kernel for a shape; the first call for each compiles it."""
    import llvmlite.binding as llvm

    from gqa_convert.attention.decoding.llvm_kernel import emit

    llvm.initialize_native_target()
    llvm.initialize_native_asmprinter()
    text = emit(shape)
    width = 32 * shape.lanes
    begin, rest = text.split("\n{", 1)  # LLVM would split vectors of 512 bits on some processors
    text = f'{begin} #0\n{{{rest}\nattributes #0 = {{ nounwind "min-legal-vector-width"="{width}" "prefer-vector-width"="{width}" }}\n'
    module = llvm.parse_assembly(text)
    module.verify()
    machine = llvm.Target.from_default_triple().create_target_machine(
        cpu=llvm.get_host_cpu_name(), features=llvm.get_host_cpu_features().flatten(), opt=3, jit=True
    )
    options = llvm.create_pipeline_tuning_options(speed_level=2)
    options.loop_vectorization = options.slp_vectorization = options.loop_unrolling = False
    llvm.create_pass_builder(machine, options).getModulePassManager().run(
        module, llvm.create_pass_builder(machine, options)
    )
    engine = llvm.create_mcjit_compiler(module, machine)
    engine.finalize_object()
    address = engine.get_function_address("attend")
    return Kernel(address, ctypes.CFUNCTYPE(None, ctypes.c_void_p)(address), engine)
