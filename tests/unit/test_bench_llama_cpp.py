"""llama.cpp as a contender: its GGUF file holds the checkpoint's weights, and it generates the same tokens."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

import foredraft
from foredraft import LLM, SamplingParams
from foredraft.bench.contender import BenchContext
from foredraft.bench.llama_cpp import LlamaCpp, write_gguf
from foredraft.errors import ConfigError
from foredraft.model.locate import resolve
from foredraft.model.source import source_of
from tests.support.checkpoints import save_checkpoint, tiny_tokenizer
from tests.support.quantising import KINDS, quantise

gguf = pytest.importorskip("gguf")

from benchmarks.shape import random_checkpoint  # noqa: E402
from tests.support import gguf_files  # noqa: E402

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 10_000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "grouped, tied": ("llama", {"num_key_value_heads": 2, "tie_word_embeddings": True, "rms_norm_eps": 3e-2}),
    "biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "wide heads": ("llama", {"head_dim": 24}),
    "llama3 rope": ("llama", {"rope_parameters": LLAMA3}),
    "linear": ("llama", {"rope_parameters": {"rope_type": "linear", "rope_theta": 10_000.0, "factor": 4.0}}),
    "mistral": ("mistral", {"sliding_window": None}),
    "qwen2": ("qwen2", {}),
    "qwen3": ("qwen3", {}),
}


def read(folder: Path, dtype: torch.dtype = torch.float32) -> Any:
    file = folder / "model.gguf"
    write_gguf(folder, file, dtype)
    return gguf.GGUFReader(file)


def values(reader: Any) -> dict[str, np.ndarray[Any, Any]]:
    return {tensor.name: tensor.data for tensor in reader.tensors}


def logits(model: Path, dtype: torch.dtype) -> torch.Tensor:
    """Return the logits of some text, [T, V]."""
    name = str(dtype).removeprefix("torch.")
    runner = foredraft.load(model, dtype=name, drafter="none", max_batch=1, max_length=256).loaded.runner
    text = list(range(3, 96))
    found: torch.Tensor = runner.head(runner.prefill(runner.new_cache(1, len(text)), 0, text, 0).hidden)
    return found


def context(folder: Path, llm: Any = None, **keys: Any) -> BenchContext:
    common: dict[str, Any] = {"dtype": torch.float32, "device": torch.device("cpu"), "positions": 256}
    return BenchContext(llm, source_of(folder), None, **{**common, **keys})


class TestFile:
    def test_matrices_are_bfloat16_and_vectors_float32(self, tmp_path: Path) -> None:
        reader = read(save_checkpoint(tmp_path, dtype=torch.bfloat16), torch.bfloat16)
        kinds = {(len(tensor.shape) > 1, tensor.tensor_type.name) for tensor in reader.tensors}
        assert kinds == {(True, "BF16"), (False, "F32")}

    def test_a_tied_head_is_left_out(self, tmp_path: Path) -> None:
        file = save_checkpoint(tmp_path, tie_word_embeddings=True) / "model.safetensors"
        saved = load_file(file)
        save_file(saved | {"lm_head.weight": saved["model.embed_tokens.weight"].clone()}, file)
        written = values(read(tmp_path))
        assert "token_embd.weight" in written
        assert "output.weight" not in written

    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
    @pytest.mark.parametrize("model", MODELS)
    def test_a_file_computes_as_its_folder(self, tmp_path: Path, model: str, dtype: torch.dtype) -> None:
        family, keys = MODELS[model]
        folder = save_checkpoint(tmp_path / "model", family, dtype=dtype, **keys)
        files = tmp_path / "first.gguf", tmp_path / "second.gguf"
        write_gguf(folder, files[0], dtype)
        torch.testing.assert_close(logits(files[0], dtype), logits(folder, dtype), rtol=0, atol=0)
        write_gguf(resolve(files[0]), files[1], dtype)
        assert files[0].read_bytes() == files[1].read_bytes()

    def test_added_tokens_keep_their_texts(self, tmp_path: Path) -> None:
        tokenizer = tiny_tokenizer()
        tokenizer.add_special_tokens(["<|end|>"])
        tokenizer.add_tokens(["<tool>"])
        tokenizer.save(str(save_checkpoint(tmp_path, vocab_size=400) / "tokenizer.json"))
        write_gguf(tmp_path, tmp_path / "model.gguf", torch.float32, vocabulary=True)
        own, found = (resolve(each).tokenizer() for each in (tmp_path, tmp_path / "model.gguf"))
        assert own is not None and found is not None
        assert found.special == own.special
        text = "<|end|>a<tool>"
        ids = own.encode(text, add_special_tokens=False)
        assert found.encode(text, add_special_tokens=False) == ids
        assert found.decode(ids, skip_special=False) == text

    @pytest.mark.parametrize(
        ("variant", "named"),
        [
            ({"family": "gemma2"}, "architecture 'Gemma2ForCausalLM'"),
            ({"family": "mistral"}, "a sliding window"),
            ({"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}}, "rope type 'dynamic'"),
            ({"hidden_act": "gelu_pytorch_tanh"}, "activation 'gelu_tanh'"),
        ],
    )
    def test_other_models_are_refused(self, tmp_path: Path, variant: dict[str, Any], named: str) -> None:
        folder = save_checkpoint(tmp_path, **variant)
        with pytest.raises(ConfigError, match=named):
            write_gguf(folder, tmp_path / "model.gguf", torch.float32)
        assert not (tmp_path / "model.gguf").exists()

    @pytest.mark.parametrize("kind", ["gptq", "Q8_0"])
    def test_a_quantised_model_is_refused(self, tmp_path: Path, kind: str) -> None:
        folder = save_checkpoint(tmp_path / "model")
        if kind in KINDS:
            quantise(folder, KINDS[kind])
        else:
            folder = resolve(gguf_files.write_gguf(folder, tmp_path / "quantised.gguf", kind))
        with pytest.raises(ConfigError, match="a model with quantised weights cannot be converted"):
            write_gguf(folder, tmp_path / "model.gguf", torch.float32)


class TestSupported:
    @pytest.mark.parametrize(
        ("keys", "named"),
        [
            ({"device": torch.device("cuda")}, "device is cuda"),
            ({"dtype": torch.float16}, "dtype is float16"),
            ({"temperature": 0.7}, "temperature is 0.7"),
        ],
    )
    def test_unsupported_settings_are_refused(self, tmp_path: Path, keys: dict[str, Any], named: str) -> None:
        with pytest.raises(ConfigError, match=named):
            LlamaCpp(context(tmp_path, **keys))

    @pytest.mark.parametrize("missing", ["llama_cpp", "gguf"])
    def test_a_missing_package(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
        if missing == "gguf":
            pytest.importorskip("llama_cpp")
        monkeypatch.setitem(sys.modules, missing, None)
        with pytest.raises(ConfigError, match=rf"llama.cpp needs {missing}, .*pip install") as caught:
            LlamaCpp(context(save_checkpoint(tmp_path)))
        assert "\n" not in str(caught.value)


class TestContender:
    @pytest.fixture(autouse=True)
    def _installed(self) -> None:
        pytest.importorskip("llama_cpp")

    @staticmethod
    def prompts() -> list[list[int]]:
        random = torch.Generator().manual_seed(0)
        return [torch.randint(3, 97, (count,), generator=random).tolist() for count in (1, 7, 40, 90)]

    @staticmethod
    def plain(llm: LLM, prompt: list[int], count: int) -> tuple[int, ...]:
        params = SamplingParams(temperature=0, max_new_tokens=count, ignore_eos=True, drafter="none")
        return tuple(llm.generate([prompt], params)[0].token_ids)

    @pytest.mark.parametrize("model", MODELS)
    def test_it_generates_the_same_tokens(self, tmp_path: Path, model: str) -> None:
        family, keys = MODELS[model]
        llm = foredraft.load(save_checkpoint(tmp_path, family, **keys), dtype="float32")
        contender = LlamaCpp(context(tmp_path, llm))
        for prompt in self.prompts():
            timing = contender.run([prompt], 40)
            assert timing.tokens == (self.plain(llm, prompt, 40),)
            assert timing.decoded_tokens == 39
            assert timing.prefill_seconds > 0
            assert timing.decode_seconds > 0
        contender.close()

    def test_neither_a_run_nor_a_timed_forward_affects_the_next_run(self, tmp_path: Path) -> None:
        contender, (_, prompt, _, long) = LlamaCpp(context(save_checkpoint(tmp_path))), self.prompts()
        alone = contender.run([prompt], 12).tokens
        contender.run([long], 12)
        assert contender.run([prompt], 12).tokens == alone
        for length in (0, 40, 40, 20, 50):
            assert all(contender.forward_seconds(rows, length) > 0 for rows in (1, 8))
        assert contender.run([prompt], 12).tokens == alone
        contender.close()

    def test_close_removes_the_file_and_may_be_repeated(self, tmp_path: Path) -> None:
        contender = LlamaCpp(context(save_checkpoint(tmp_path)))
        folder = Path(contender._folder.name)
        assert (folder / "model.gguf").is_file()
        contender.close()
        assert not folder.exists()
        contender.close()


SIZES = {
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 97,
    "tie_word_embeddings": True,
}


class TestShape:
    def test_a_random_checkpoint_can_be_loaded_and_converted(self, tmp_path: Path) -> None:
        folder = random_checkpoint(tmp_path, SIZES, torch.float32, shard_bytes=20_000)
        assert len(list(folder.glob("*.safetensors"))) > 2
        spec = foredraft.load(folder).loaded.spec
        assert (spec.layers, spec.hidden_size, spec.kv_heads, spec.tied) == (2, 64, 2, True)
        assert "rope_freqs.weight" not in values(read(folder))
