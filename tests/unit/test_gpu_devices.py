"""Devices of GPUs: indices, a GPU for each training process, errors that name the cause, and a plan of memory."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from foredraft.drafters.asset import Found
from foredraft.errors import ConfigError
from foredraft.loading import capacity
from foredraft.loading import runners as devices
from foredraft.loading.capacity import CacheLimits, Capacity
from foredraft.loading.runners import check_dtype, find_device
from foredraft.model.attention import PINNED
from foredraft.model.cache import KVCache
from foredraft.model.runner import compiled, shape_cache
from foredraft.model.spec import ModelSpec
from foredraft.model.weights import weight_bytes
from foredraft.train.training_checkpoints import dist, joined
from tests.support.panics import raising

CUDA, GIB = torch.device("cuda"), 2**30
LLAMA_8B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"], "model_type": "llama", "vocab_size": 128_256, "hidden_size": 4096,
    "intermediate_size": 14_336, "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    "hidden_act": "silu", "max_position_embeddings": 131_072, "rms_norm_eps": 1e-5, "rope_theta": 500_000.0,
    "tie_word_embeddings": False,
}  # fmt: skip
TARGET: Any = SimpleNamespace(spec=ModelSpec.from_hf(LLAMA_8B), dtype=torch.bfloat16, bits=None)
GRAPHS = (128 + 10 * 8) * 2**20  # inputs and results, and ten tensors of 8 MiB; of passes and of decisions
# bytes of a row: what a sampled round makes of nine columns of logits, and a layer of sixteen tokens
IN_A_ROUND = 11 * 9 * 4 * 128_256 + 16 * (4 * 4096 + 3 * 14_336) * 2


@pytest.fixture
def gpus(monkeypatch: pytest.MonkeyPatch) -> list[torch.device]:
    """Pretend two GPUs, of which the second is current; return the devices that are made current."""
    made: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    monkeypatch.setattr(torch.cuda, "set_device", made.append)
    return made


@pytest.mark.parametrize(("name", "index"), [(None, 1), ("cuda", 1), ("cuda:0", 0), ("cuda:1", 1)])
def test_a_gpu_has_its_index_from_the_beginning(gpus: object, name: str | None, index: int) -> None:
    assert find_device(name) == torch.device("cuda", index)


def started(monkeypatch: pytest.MonkeyPatch, processes: int, rank: int) -> list[Any]:
    """Act as one of the processes of torchrun; return the calls that join them."""
    calls: list[Any] = []
    for key, value in (("WORLD_SIZE", processes), ("LOCAL_WORLD_SIZE", processes), ("LOCAL_RANK", rank)):
        monkeypatch.setenv(key, str(value))
    monkeypatch.setattr(dist, "init_process_group", lambda *args, **kwargs: calls.append((args, kwargs)))
    monkeypatch.setattr(dist, "destroy_process_group", lambda: None)
    monkeypatch.setattr(dist, "get_rank", lambda: rank)
    return calls


def test_each_process_has_a_gpu_of_its_own(gpus: list[torch.device], monkeypatch: pytest.MonkeyPatch) -> None:
    calls, own = started(monkeypatch, 2, 0), torch.device("cuda", 0)
    with joined("cuda") as processes:
        assert (processes.rank, processes.count) == (0, 2)
    assert gpus == [own] and calls == [(("nccl",), {"device_id": own})]


@pytest.mark.parametrize(
    ("processes", "name", "message"),
    [
        (3, None, "3 processes train here, and PyTorch sees 2 GPUs; start 2 processes, or give 'cpu'"),
        (2, "cuda:1", "each on a GPU of its own; give 'cuda' or 'cpu'"),
    ],
)
def test_processes_that_would_share_a_gpu_are_refused(
    gpus: object, monkeypatch: pytest.MonkeyPatch, processes: int, name: str | None, message: str
) -> None:
    calls = started(monkeypatch, processes, 1)
    with pytest.raises(ConfigError, match=message), joined(name):
        pass
    assert not calls


@pytest.mark.parametrize(
    ("fails", "message"),
    [
        ((torch.bfloat16,), "dtype is 'bfloat16', which cuda cannot compute in .no kernel image"),
        (
            (torch.bfloat16, torch.float32),
            "device is 'cuda', on which this PyTorch cannot compute .no kernel",
        ),
    ],
    ids=["one dtype", "every dtype"],
)
def test_an_error_of_the_device_is_not_blamed_on_the_dtype(
    monkeypatch: pytest.MonkeyPatch, fails: tuple[torch.dtype, ...], message: str
) -> None:
    def layer(device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        if dtype in fails:
            raise RuntimeError("no kernel image is available\nCompile with ...")
        return torch.ones(8, 8)

    monkeypatch.setattr(devices, "_layer_of_ones", layer)
    with pytest.raises(ConfigError, match=message):
        check_dtype(CUDA, torch.bfloat16)


@pytest.mark.parametrize(
    ("found", "needed"), [(None, "install Triton"), (object(), "a C compiler such as gcc")]
)
def test_a_missing_c_compiler_is_not_blamed_on_triton(
    monkeypatch: pytest.MonkeyPatch, found: object, needed: str
) -> None:
    monkeypatch.setattr(torch, "compile", raising(RuntimeError("Failed to find C compiler")))
    monkeypatch.setattr(compiled, "find_spec", lambda name: found)
    with pytest.raises(ConfigError, match=needed):
        compiled.check_compiler(CUDA)


def test_newer_settings_of_precision_can_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    assert torch.get_float32_matmul_precision() in shape_cache._float32_precision()
    monkeypatch.setattr(torch, "get_float32_matmul_precision", raising(RuntimeError("allow_tf32 is enabled")))
    assert shape_cache._float32_precision()


def test_attention_is_pinned_while_any_thread_is_within() -> None:
    enabled = torch.backends.cuda.cudnn_sdp_enabled
    assert enabled()
    with PINNED:
        with PINNED:
            assert not enabled()
        assert not enabled(), "another thread is within"
    assert enabled()


@pytest.mark.parametrize("kept", [0, 512 * 2**20], ids=["library", "server"])
@pytest.mark.parametrize("gib", [20, 24, 80])
def test_an_8b_model_leaves_room_on_a_gpu(monkeypatch: pytest.MonkeyPatch, gib: int, kept: int) -> None:
    """A fifth is free beside weights, caches, kept prompts, a sampled round of all rows, and GRAPHS."""
    spec, dtype = TARGET.spec, TARGET.dtype
    memory = int(0.97 * gib * GIB)  # what CUDA itself leaves
    monkeypatch.setattr(capacity, "free_memory", lambda device: memory)
    whole = Capacity(TARGET, (), CUDA, kernels=False, reserved=kept)
    default = whole.cache_size(CacheLimits())
    assert default.rows >= 4 and default.positions >= 4096
    room = memory - weight_bytes(spec, CUDA, dtype) - kept - 2 * GRAPHS
    for limits in (CacheLimits(), CacheLimits(max_length=2048)):
        size = whole.cache_size(limits)
        row = KVCache.bytes_per_row(spec, size.positions, dtype)
        assert row >= size.positions * 2 * spec.layers * spec.kv_heads * spec.head_dim * 2  # keys and values
        row += IN_A_ROUND
        taken = size.rows * row
        assert taken <= 0.8 * room, "a fifth is left"
    assert size.rows == 32 or taken + row > 0.79 * room


def test_each_model_of_a_drafter_has_graphs_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """A CPU has none, and its kernels make no copies of logits."""
    monkeypatch.setattr(capacity, "free_memory", lambda device: 24 * GIB)
    cache = KVCache.bytes_per_row(TARGET.spec, 4096, TARGET.dtype)
    for device, graphs, row in ((CUDA, GRAPHS, IN_A_ROUND), (torch.device("cpu"), 0, 0)):
        assert Capacity(TARGET, (), device).row_bytes(4096) == cache + row
        assets = ((), (Found(),), (Found(bytes=1024),))
        none, free, large = (Capacity(TARGET, each, device, False).cache_budget() for each in assets)
        assert none == free
        assert free - large == pytest.approx((1024 + graphs) * capacity._SHARE[device.type], abs=1)
