"""Decoding on CUDA, as far as a machine without a GPU can test it: the kernels in Triton's interpreter, their machine code
by Triton's compiler, and which calls take them.
"""

import os
import re
import subprocess
import sys
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from torch import Tensor
from torch._subclasses import FakeTensorMode
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from gqa_convert.attention import grouped_query_attention
from gqa_convert.attention.by_torch import attend
from gqa_convert.attention.decoding import cuda, operator, triton_kernels
from gqa_convert.attention.decoding.compiling import processor

SHARED_MEMORY = 99 << 10
"""Bytes that a program may have on every GPU of compute capability 8.0 and later (8.6, 8.9 and 12.0 have no more)."""

TYPES = {torch.float32: "*fp32", torch.bfloat16: "*bf16", torch.float16: "*fp16", torch.uint8: "*u8"}


@pytest.fixture(autouse=True)
def ready(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a process that has just started, with a GPU."""
    monkeypatch.setattr(cuda, "ready", True)
    monkeypatch.setattr(cuda, "_proven", set())
    monkeypatch.setattr(cuda, "_room", lambda device: 8)


def inputs(
    heads: int = 4, queries: int = 1, keys: int = 140, head_dim: int = 16, value_head_dim: int = 16, **options: Any
) -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.randn(2, heads, queries, head_dim, **options),
        torch.randn(2, 2, keys, head_dim, **options),
        torch.randn(2, 2, keys, value_head_dim, **options),
    )


def test_the_kernels_in_the_interpreter() -> None:
    cases = Path(__file__).with_name("interpreted_kernels.py")
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST_")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-n", "0", "-p", "no:cacheprovider", cases],
        cwd=Path(__file__).parents[2],
        env={**environment, "TRITON_INTERPRET": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert re.fullmatch(r"\d+ passed in .*", done.stdout.strip().splitlines()[-1]), done.stdout


class Recorder:
    """Stands for a kernel, and keeps what it is launched with."""

    def __init__(self) -> None:
        self.given: tuple[Any, ...] = ()
        self.options: dict[str, Any] = {}

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        def launched(*given: Any, **options: Any) -> None:
            self.given, self.options = given, options

        return launched


def machine_code(kernel: Any, launch: Recorder, capability: int) -> tuple[int, str]:
    """Bytes of shared memory, and the resources of the code for a launch's arguments, with the hints that Triton derives."""
    options = {name: launch.options[name] for name in ("num_warps", "num_stages") if name in launch.options}
    constants = {name: value for name, value in launch.options.items() if name not in options}
    signature, hints = {}, {}
    for number, (name, value) in enumerate(zip(kernel.arg_names, launch.given, strict=False)):
        if isinstance(value, Tensor):
            signature[name] = TYPES[value.dtype]
        else:
            signature[name] = "fp32" if isinstance(value, float) else "i32"
        free = name in {kernel.arg_names[x] if isinstance(x, int) else x for x in kernel.do_not_specialize or ()}
        if isinstance(value, Tensor) or (isinstance(value, int) and value % 16 == 0 and not free):
            hints[(number,)] = [["tt.divisibility", 16]]
    signature |= dict.fromkeys(constants, "constexpr")
    assert list(signature) == kernel.arg_names
    source = ASTSource(kernel, signature, constants, hints)
    compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    binary = Path(os.environ["TRITON_CACHE_DIR"]) / "kernel.cubin"
    binary.write_bytes(compiled.asm["cubin"])
    listed = subprocess.run([tool, "--dump-resource-usage", binary], capture_output=True, text=True, check=True)
    return compiled.metadata.shared, listed.stdout


@pytest.mark.parametrize(
    ("capability", "dtype", "ratio", "queries", "head_dim", "value_head_dim", "kind"),
    [
        (80, torch.float32, 8, 4, 256, 256, "float"),  # the most shared memory in float32
        (90, torch.bfloat16, 16, 2, 128, 96, "bool"),
    ],
)
def test_the_kernels_compile_for_gpus(
    capability: int,
    dtype: torch.dtype,
    ratio: int,
    queries: int,
    head_dim: int,
    value_head_dim: int,
    kind: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    stock = triton_kernels.attend_splits, triton_kernels.join_splits
    recorders = Recorder(), Recorder()
    monkeypatch.setattr(triton_kernels, "attend_splits", recorders[0])
    monkeypatch.setattr(triton_kernels, "join_splits", recorders[1])
    tensors = inputs(2 * ratio, queries, 160, head_dim, value_head_dim, dtype=dtype)
    mask = torch.randn(2, 1, 1, 160) > 0 if kind == "bool" else torch.randn(1, 2 * ratio, queries, 160)
    cuda.launch(*tensors, mask, 0.1, 3)
    for kernel, recorder in zip(stock, recorders, strict=True):
        shared, resources = machine_code(kernel, recorder, capability)
        assert shared <= SHARED_MEMORY
        assert " STACK:0 " in resources  # all numbers fit into registers


def test_the_host_knows_how_many_splits_the_kernel_joins() -> None:
    assert triton_kernels.MOST_SPLITS.value == cuda._MOST_SPLITS
    for sharers, blocks, room, expected in (
        (8, 512, 8, 1),  # every head has a program's room
        (1, 512, 8, 8),
        (3, 512, 8, 8),  # three rounds of 64 blocks; two programs each would take one of 256
        (1, 3, 8, 1),  # too little for a join
        (1, 12800, 1000, 128),
    ):
        assert cuda._splits(sharers, blocks, room) == expected


@pytest.mark.parametrize(
    ("changed", "masked", "expected"),
    [
        ({}, True, True),
        ({}, False, True),  # float32, for which torch has no kernel that splits keys
        ({"dtype": torch.bfloat16}, True, True),
        ({"dtype": torch.float16}, False, False),  # FlashAttention-2
        ({"dtype": torch.float16, "value_head_dim": 24}, False, True),
        ({"dtype": torch.bfloat16, "head_dim": 12, "value_head_dim": 12}, False, True),
        ({"dtype": torch.float64}, True, False),
        ({"keys": 127}, True, False),
        ({"heads": 32, "queries": 2}, True, True),
        ({"heads": 32, "queries": 3}, True, False),
        ({"queries": 0}, True, False),
        ({"head_dim": 257}, True, False),
        ({"value_head_dim": 272}, True, False),
    ],
)
def test_which_calls_take_the_kernels(
    changed: dict[str, Any], masked: bool, expected: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    given = inputs(**changed)
    assert cuda.supports(*given, masked) == expected
    assert not cuda.supports(given[0], given[1].mT.contiguous().mT, given[2], masked)
    assert not cuda.supports(given[0], given[1], given[2].mT.contiguous().mT, masked)
    monkeypatch.setattr(cuda, "ready", False)
    assert not cuda.supports(*given, masked)


def test_the_operator_has_kernels_for_cuda() -> None:
    assert torch._C._dispatch_has_kernel_for_dispatch_key("gqa_convert::decode", "CUDA")
    with FakeTensorMode(), torch.device("cuda"):
        query, key, value = inputs(value_head_dim=40, dtype=torch.bfloat16)
        found = operator.decode(query, key, value, None, 0.25)
    assert (found.shape, found.dtype, found.device.type) == ((2, 4, 1, 40), torch.bfloat16, "cuda")


def failing(*_: Any) -> Tensor:
    raise RuntimeError("out of resources: shared memory\nRequired: 120000")


@pytest.mark.parametrize("kind", ["none", "bool", "float"])
def test_torch_computes_what_the_kernels_cannot(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "launch", failing)
    query, key, value = inputs()
    masks = {"none": None, "bool": torch.rand(2, 1, 1, 140) < 0.5, "float": torch.randn(1, 4, 1, 140)}
    mask = masks[kind]
    bias = mask if kind == "float" else None
    expected = attend(query, key, value, mask if kind == "bool" else None, bias, scale=0.3)
    with pytest.warns(RuntimeWarning) as caught:
        found = cuda.decode(query, key, value, mask, 0.3)
    assert [str(one.message) for one in caught] == [
        "torch's kernels decode on CUDA, because the Triton kernel does not work here: RuntimeError: out of resources: shared memory"
    ]
    torch.testing.assert_close(found, expected, rtol=0, atol=0)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.testing.assert_close(cuda.decode(query, key, value, mask, 0.3), expected, rtol=0, atol=0)
    assert not cuda.supports(query, key, value, masked=True)


def test_without_triton_torch_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "triton", None)
    monkeypatch.delitem(sys.modules, triton_kernels.__name__)
    monkeypatch.delattr("gqa_convert.attention.decoding.triton_kernels")
    query, key, value = inputs()
    with pytest.warns(RuntimeWarning, match="does not work here: ModuleNotFoundError"):
        found = cuda.decode(query, key, value, None, 0.25)
    torch.testing.assert_close(found, attend(query, key, value, scale=0.25), rtol=0, atol=0)


def test_a_wrong_result_is_never_returned(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "launch", lambda query, key, value, *_: query.new_zeros(*query.shape[:3], value.shape[3]))
    query, key, value = inputs()
    with pytest.warns(RuntimeWarning, match="ArithmeticError: results differ from attention in float64 by"):
        found = cuda.decode(query, key, value, None, 0.25)
    torch.testing.assert_close(found, attend(query, key, value, scale=0.25), rtol=0, atol=0)


def test_an_old_gpu_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(cuda, "ready", True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 5))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla T4")
    cuda._room.cache_clear()
    with pytest.warns(RuntimeWarning, match=r"needs compute capability 8\.0, and Tesla T4 has 7\.5"):
        cuda.decode(*inputs(), None, 0.25)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(multi_processor_count=132))
    assert cuda._room(torch.device("cpu")) == 264
    cuda._room.cache_clear()


def test_too_little_memory_is_no_fault_of_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_memory(*_: Any) -> Tensor:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(cuda, "launch", out_of_memory)
    with pytest.raises(torch.OutOfMemoryError):
        cuda.decode(*inputs(), None, 0.25)
    assert cuda.ready


def test_nothing_is_compiled_while_a_graph_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda, "launch", failing)
    monkeypatch.setattr(cuda, "_capturing", lambda query: True)
    query, key, value = inputs()
    found = cuda.decode(query, key, value, None, 0.25)
    torch.testing.assert_close(found, attend(query, key, value, scale=0.25), rtol=0, atol=0)
    assert cuda.ready


def test_under_torch_compile_a_failure_leads_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    """The choice is traced, and made again after a failure."""
    monkeypatch.setattr(operator, "_supports_on_cpu", lambda query, key, value: cuda.supports(query, key, value, True))
    torch._dynamo.reset()
    graphs: list[str] = []

    def backend(graph: Any, _: list[Tensor]) -> Any:
        graphs.append(graph.code)
        return graph.forward

    compiled = torch.compile(grouped_query_attention, fullgraph=True, backend=backend)
    given = inputs()
    mask = torch.rand(2, 1, 1, 140) < 0.5
    expected = attend(*given, mask)
    with torch.no_grad():
        for ready in (True, True, False):
            cuda.ready = ready
            if processor() is not None or not ready:  # the operator's kernel for CPUs computes here
                torch.testing.assert_close(compiled(*given, mask=mask), expected, rtol=0, atol=1e-5)
    assert ["gqa_convert" in code for code in graphs] == ([True, False] if processor() else [False])
