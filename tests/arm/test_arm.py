"""The kernels on ARM: QEMU runs them on every level of ARM64, and each call gives the bits that it gives with AVX2.

Calls are compared byte by byte: no product is fused with a sum unless the sources say so."""

from __future__ import annotations

import importlib.util
import platform
import re
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import pytest
import torch
from torch import Tensor

from foredraft.kernels import building, compilation
from foredraft.kernels.building import SYSTEMS, Level
from foredraft.kernels.vocab import KernelVocabOps
from foredraft.model.quantisation.codes import BITS, quantise
from foredraft.model.quantisation.scheme import ActivationFormat
from foredraft.model.runner import Runner
from foredraft.model.runner.native.products import pack_codes, pack_native
from tests.arm.recording import Call, packed, recording
from tests.exactness.test_heads import check_fused
from tests.support.compiling import change_sources
from tests.support.quantising import integer_product
from tests.unit import test_kernels_fused, test_kernels_leaves, test_kernels_vocab
from tests.unit.test_kernels_codes import CODE_FORMATS, Coded, codes_of
from tests.unit.test_kernels_passes import decoders, text_logits

QEMU = shutil.which("qemu-aarch64")
AVX2 = next(level for level in SYSTEMS["linux-x86_64"].levels if level.name == "x86-64-v3")
pytestmark = [
    pytest.mark.skipif(QEMU is None, reason="no qemu-aarch64 (Debian's package qemu-user)"),
    pytest.mark.skipif(importlib.util.find_spec("ziglang") is None, reason="no package ziglang"),
    pytest.mark.skipif(
        platform.machine() != "x86_64" or AVX2 not in compilation.cpu_levels(),
        reason="no AVX2 to compare with",
    ),
    pytest.mark.timeout(1200),
]
DRIVER = Path(__file__).parent / "driver.c"
LEVELS = {level.name: level for level in SYSTEMS["linux-aarch64"].levels}
# QEMU's, which have no more than the level
CPUS = {"arm64": "cortex-a72", "arm64-dotprod": "neoverse-n1", "arm64-i8mm": "max"}
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FAMILIES = ("llama", "mistral", "gemma2", "phi3", "gpt2", "cohere2", "opt-sums-normed", "stablelm-head-norms")
FAMILIES += ("gemma4-shared",)
# of products: full and partial tiles, of codes that are expanded in registers and in memory
ROWS = (1, 2, 3, 4, 5, 7, 13)
QUICK = ("-O0", "-fno-sanitize=undefined")  # gives the same bits, in a twentieth of the time


def run_coded_products(coded: Coded, dtype: torch.dtype) -> None:
    """Multiply by codes at all row counts, with rounded inputs and with ordered columns; take rows of the weight."""
    columns = 512 if coded[0].nested else 320
    codes = codes_of(72, columns, coded)
    x = torch.randn(max(ROWS), columns, generator=torch.Generator().manual_seed(2)).to(dtype)
    x[1] = 0
    x[2, :32] *= 2.0**-14  # of float16, these inputs are subnormal
    if dtype == torch.bfloat16:  # in other dtypes, CPUs differ in the sign of NaN
        x[3, 32] = torch.inf
    # all bits of the significand are 1: the largest integers
    most = 65280.0 if dtype == torch.bfloat16 else 65504.0
    x[4, :64:2], x[4, 1:64:4], x[4, 3:64:4] = most, -most, 1
    product = pack_codes(codes, dtype, None)
    for rows in ROWS:
        found = product(x[:rows])
        if dtype != torch.float32 and not coded[0].float8:
            assert same_bits(found, integer_product(x[:rows], codes).to(dtype)), "not as defined"
    product.rows(torch.tensor([0, 71, 40]))
    replace(product, inputs=ActivationFormat.INT8, order=torch.arange(columns).flip(0).int())(x[:2])


def same_bits(one: Tensor, other: Tensor) -> bool:
    """Return whether tensors are equal, where NaN is NaN."""
    return bool(((one == other) | (one.isnan() & other.isnan())).all())


def run_products(dtype: torch.dtype) -> None:
    """Multiply by numbers, with rounded inputs."""
    random = torch.Generator().manual_seed(3)
    weight, bias, x = (
        torch.randn(*shape, generator=random).to(dtype) for shape in ((72, 256), (72,), (13, 256))
    )
    product = pack_native(weight, bias)
    for rows in ROWS:
        product(x[:rows])
    for inputs in ActivationFormat:
        replace(product, inputs=inputs)(x[:3])


def run_passes(family: str, dtype: torch.dtype) -> None:
    text_logits(Runner(decoders(family, dtype)[0]), (60, 1, 29))


def run_drafts(family: str, dtype: torch.dtype) -> None:
    runner = Runner(test_kernels_fused.decoder(family, dtype))
    for sampled in (False, True):
        test_kernels_fused.fused(runner, test_kernels_fused.filled(runner), sampled)


def run_vocabulary_operations(width: int) -> None:
    test_kernels_vocab.test_distributions_equal_their_definition(width)
    test_kernels_vocab.test_draws_equal_their_definition(width)
    test_kernels_vocab.test_argmax_equals_its_definition(width)
    for one_hot in (True, False):
        test_kernels_vocab.test_residuals_equal_their_definition(width, one_hot)
    test_kernels_vocab.test_what_p_has_beyond_q_equals_its_definition(width)
    test_kernels_vocab.test_noise_equals_its_definition()
    test_kernels_vocab.test_common_prefixes_equal_their_definition()
    test_kernels_vocab.nucleus(test_kernels_vocab.random_logits(width).softmax(-1), torch.tensor(0.8))
    KernelVocabOps().max_prob(test_kernels_vocab.random_logits(width))


def run_leaves(dtype: torch.dtype) -> None:
    test_kernels_leaves.trees(Runner(decoders("mistral", dtype)[0]))


def parts() -> Iterator[Callable[[], object]]:
    for dtype in DTYPES:
        yield partial(run_products, dtype)
        yield from (partial(run_coded_products, coded, dtype) for coded in CODE_FORMATS)
        for bits in BITS.values():
            weight = torch.randn(70, 64, generator=torch.Generator().manual_seed(bits)).to(dtype)
            yield partial(quantise, weight, bits)
        yield partial(run_drafts, "gemma2", dtype)
        yield partial(run_leaves, dtype)
    for number, family in enumerate(FAMILIES):
        yield partial(run_passes, family, DTYPES[number % 3])
    yield from (partial(run_vocabulary_operations, width) for width in (65, 1000))
    yield partial(check_fused, "qwen3", "bfloat16")  # a head that reads pairs


@dataclass(frozen=True)
class Recorded:
    """Calls in a file, the bytes that it shall become, and where each call's memory but work memory lies there."""

    calls: list[Call]
    file: Path
    want: bytes
    images: list[tuple[slice, slice]]

    @classmethod
    def of(cls, calls: list[Call], folder: Path) -> Recorded:
        file = folder / "calls"
        file.write_bytes(packed(calls)[0])
        return cls(calls, file, *packed(calls, after=True))

    def differing(self, program: Path, cpu: str, written: Path) -> list[str]:
        """Run a driver on a CPU, and return the calls that leave other bytes in memory than they shall."""
        assert QEMU is not None
        subprocess.run([QEMU, "-cpu", cpu, program, self.file, written], check=True, timeout=900)
        got = written.read_bytes()
        return [
            f"call {number}, {call.function}"
            for number, (call, image) in enumerate(zip(self.calls, self.images, strict=True))
            if any(got[part] != self.want[part] for part in image)
        ]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    """Record all parts with the kernels of AVX2, each third one by two threads."""
    command, before = building.compiler(), torch.get_num_threads()
    assert command is not None
    with recording(compilation._compiled(command, AVX2)) as kernels:
        try:
            for number, part in enumerate(parts()):
                torch.set_num_threads(1 + (number % 3 == 0))
                kernels.begin_part()
                part()
        finally:
            torch.set_num_threads(before)
    return Recorded.of(kernels.calls, tmp_path_factory.mktemp("all"))


@pytest.fixture(scope="module")
def products(recorded: Recorded, tmp_path_factory: pytest.TempPathFactory) -> Recorded:
    calls = [call for call in recorded.calls if call.function.startswith("foredraft_product")]
    return Recorded.of(calls, tmp_path_factory.mktemp("products"))


def build_driver(program: Path, level: Level, *flags: str, sources: Path = building.HERE) -> Path:
    kernels = ", ".join(f"(Function *){name}" for name in building.functions())
    command = [
        sys.executable, "-m", "ziglang", "cc", "-target", "aarch64-linux-musl", "-static", f"-mcpu={level.zig}",
        "-g0", *building.FLAGS, *flags, f"-DFUNCTIONS={kernels}", f"-I{sources}", DRIVER, "-o", program,
    ]  # fmt: skip
    subprocess.run(command, check=True, timeout=900)
    return program


def test_every_kernel_is_called(recorded: Recorded) -> None:
    """In one dtype at least; all dtypes share their sources."""
    called, all_names = [call.function for call in recorded.calls], building.functions()
    wanted, found = (
        {re.sub("_(b?float16|float32)$", "", name) for name in names} for names in (all_names, called)
    )
    assert wanted - found == {"foredraft_integers", "foredraft_settled"}, "these two read no memory"


@pytest.mark.parametrize("name", LEVELS)
def test_a_level_gives_the_bits_of_avx2(name: str, recorded: Recorded, tmp_path: Path) -> None:
    program = build_driver(tmp_path / "driver", LEVELS[name])
    assert recorded.differing(program, CPUS[name], tmp_path / "written") == []


# level, what stands in the sources, and what takes its place
DEFECTS = {
    "columns added from the last one": (
        "arm64", "for (int64_t k = 0; k < columns; k++) {", "for (int64_t k = columns; k-- > 0;) {",
    ),
    "a product rounded before it is added": (
        "arm64", "vfmaq_f32(sum.half[i], x.half[i], y.half[i])", "vaddq_f32(sum.half[i], vmulq_f32(x.half[i], y.half[i]))",
    ),
    "float16 cut off": (
        "arm64", "convertvector(v, Raw)", "convertvector((F)((int32_t __attribute__((vector_size(32))))v & -8192), Raw)",
    ),
    "entries of a book at the first numbers": (
        "arm64", "vqtbl1q_u8(from.half[i], indices.half[i])", "vqtbl1q_u8(from.half[i], indices.half[0])",
    ),
    "the first pairs twice": ("arm64", "vmull_high_s16(x.half[i], y.half[i])", "low"),
    "nested scales without a sign": ("arm64", "typedef int8_t B ", "typedef uint8_t B "),
    "digits in the order of columns": ("arm64-dotprod", "((j & ~3) | (j & 1) << 1 | (j >> 1 & 1))", "j"),
    "high digits in place of low ones": ("arm64-dotprod", "vdupq_n_u32(digit[0])", "vdupq_n_u32(digit[1])"),
    "codes with a sign taken for numbers": ("arm64-dotprod", "vdupq_n_u8(signs ? 128 : 0)", "vdupq_n_u8(0)"),
    "low digits with a sign": (
        "arm64-i8mm", "vusdotq_s32(sums, digits, codes)", "vdotq_s32(sums, vreinterpretq_s8_u8(digits), codes)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", LEVELS)
def test_the_bits_are_the_same_without_optimisation(name: str, products: Recorded, tmp_path: Path) -> None:
    """The defects below are compiled so."""
    program = build_driver(tmp_path / "driver", LEVELS[name], *QUICK)
    assert products.differing(program, CPUS[name], tmp_path / "written") == []


@pytest.mark.parametrize("name", DEFECTS)
def test_a_defect_is_caught(name: str, products: Recorded, tmp_path: Path) -> None:
    level, old, new = DEFECTS[name]
    change_sources(tmp_path, old, new)
    program = build_driver(tmp_path / "driver", LEVELS[level], *QUICK, sources=tmp_path)
    assert products.differing(program, CPUS[level], tmp_path / "written")
