"""LoadOptions: the options of `load`. Every value is checked when the object is made.

`loading/checkpoints.py` has the checks of several options together. Nothing here imports PyTorch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from foredraft.arguments import check_fields, declare
from foredraft.arguments.values import Choice, Flag, Source, Sources, Unfit, Value, Whole
from foredraft.errors import ConfigError, Option, Text, did_you_mean
from foredraft.kinds.compatibility import asset_options
from foredraft.kinds.tables import DRAFTERS, POLICIES

if TYPE_CHECKING:
    import torch

    from foredraft.drafters.plan_files import PlanFile, Skips

PlanSource: TypeAlias = "str | Path | PlanFile | Skips"
# Stage, and how much of it is done, of how much.
Progress: TypeAlias = Callable[[str, int, int], None]

DTYPES = ("bfloat16", "float16", "float32")
SHORT = {"bf16": "bfloat16", "fp16": "float16", "half": "float16", "fp32": "float32", "float": "float32"}
CODES = Choice(names=("int4", "int8"))  # weights of few bits
MAX_MIB = 2**30  # of memory: far more than any machine has
PREFIX_MIB = 512  # of memory for beginnings of texts, where the user does not say how much
MAX_THREADS = 1024  # more is a slip of the pen: the largest machines have some hundreds of cores
THREADS = Whole(f"a whole number from 1 to {MAX_THREADS:,}", least=1, most=MAX_THREADS)


class Dtype(Value):
    """A dtype as PyTorch's own, by its name or by its short one, kept by its name.

    Examples:
        >>> Dtype().read("torch.float16"), Dtype().read("FP32")
        ('float16', 'float32')
    """

    def read(self, given: Any) -> str:
        name = str(given).removeprefix("torch.").lower()
        name = SHORT.get(name, name)
        if name not in DTYPES:
            raise Unfit(f"give one of {', '.join(DTYPES)}{did_you_mean(given, DTYPES)}")
        return name


def _count(*alternative: str | Option) -> Value:
    what: Text = ("a whole number, 1 or more", *alternative)
    return Whole(what, least=1, most=math.inf)


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """The options of `load`.

    Args:
        model: The target: a folder, a GGUF file or a hub id ("owner/name[:Q4_K_M]"). Default:
            the demo models.
        drafter: The drafter for requests that do not give one: "none", "lookup", "suffix", "prediction",
            "draft-model", "retokenize", "layer-skip", "kangaroo" or "low-bit". "auto" uses in every round the
            loaded drafter that pays most. Default: "auto" under policy "auto"; under other policies
            "kangaroo" if an adapter is given, "layer-skip" if a plan is, else the draft model, else "lookup",
            or "none" where the policy needs draft probabilities.
        draft: The draft model: a folder, a GGUF file or a hub id.
        revision: Branch, tag or commit of `model` on the Hugging Face Hub; "owner/name@revision" says the
            same.
        lora: The folder or hub id of a LoRA that PEFT saved, or several: they change the target's weights
            while these are read, and add up. "owner/name@revision" names a revision.
        draft_revision: Branch, tag or commit of `draft` on the Hugging Face Hub.
        tokenizer: The folder of a tokenizer that takes the place of the model's own.
        plan: The sub-layers that drafter "layer-skip" leaves out: a file that `foredraft tune` wrote,
            "exit:LAYER", or "skip:attn=LAYERS/mlp=LAYERS" with layers as in 3,5-7. Default: the plan that is
            kept for this model, if any.
        adapter: The folder of the adapter that drafter "kangaroo" uses, as `foredraft train adapter` wrote
            it. Default: the adapter that is kept for this model, if any.
        draft_weights: "int4" or "int8": make the copy of the target that drafter "low-bit" drafts with, in so
            many bits. Default: "int4" with that drafter, without what `plan` leaves out; else auto makes a
            copy in 4 bits by itself where a model of 16 or 32 bits takes 128 MiB or more, runs on the CPU
            kernels, and leaves memory for 4 copies free.
        recent_texts: MiB of memory for what requests of drafter "suffix" wrote: later requests copy from it,
            and the oldest texts go first. Default: 0, so that it copies from a request's own text alone; with
            `texts_file`, 64.
        texts_file: A file of such texts: drafter "suffix" begins with them, where the file is there, and
            `LLM.save_texts` writes it. Default: none.
        policy: Decides whether and how far to draft: "auto", "fixed", "heuristic", "confidence",
            "adaptive-exit", "target-confidence" or "fallback".
        policy_options: The policy's own settings by name (docs/guides/policies.md).
        max_draft: Longest draft, in tokens. Default: that of the plan or the adapter where "layer-skip" or
            "kangaroo" is the default drafter and the policy does not compare costs, 24 where "suffix" is, or
            where it is loaded and the policy compares costs, else the policy's.
        draft_sampling: How a model picks the tokens of a draft: "sampled" draws them with the parameters of
            the request, "greedy" takes the likeliest. Both are exact.
        dtype: Dtype of the models: "bfloat16", "float16" or "float32", for short "bf16", "fp16" or "fp32".
            Default: the checkpoint's.
        weights: "int4" or "int8": quantise the target's linear layers while loading, in groups of 32 weights;
            the quantised model is the target then. Default: as the checkpoint stores them.
        device: "cpu", "cuda" or "cuda:N". Default: "cuda" if there is one.
        max_batch: Sequences decoded together, at most. Default: as many as fit, at most 8 on a CPU and 32 on
            a GPU.
        max_length: Positions of each sequence, for prompt and output together. Default: the model's; where 8
            sequences do not fit into memory, the positions are halved until they do, but not below 4096, and
            where not even one sequence (or `max_batch` of them) fits, further, down to 512.
        prefix_folder: A folder for the beginnings of texts that were read: later requests, and later loads of
            the same model, go on from there. It takes up to a quarter of what is free on its disk, and the
            oldest go first. In memory, 512 MiB hold what was used last; on a server, `prefix_cache` says how
            much. Default: none.
        deterministic: Make passes of all shapes give the same bits, so that greedy output is bit-identical
            for every drafter and every batch.
        compile: Fuse the operators between the products of each layer with `torch.compile`. It needs a
            compiler, and seconds at loading and at the first text. It is meant for GPUs; on CPUs it replaces
            Foredraft's own kernels.
        kernels: Run layers and vocabulary operations with Foredraft's own kernels, which the wheel carries
            for most CPUs; elsewhere a C compiler builds them once, in seconds. `foredraft info` names the
            level of CPUs that they are for. Default: on where they are there and support the model.
        threads: CPU threads that compute, of this whole process. Default: FOREDRAFT_THREADS, what the program
            gave to `torch.set_num_threads`, OMP_NUM_THREADS, or the CPUs that the process may really use
            (docs/guides/models.md). A later load with another number changes it for every model.
        progress: Called as (stage, done, total) while loading and during prefill.

    Raises:
        ConfigError: The value of an option cannot be honoured.
    """

    model: str | Path | None = declare(None, Value(), elsewhere="path model_path hf_repo -m -hf")
    _: KW_ONLY
    drafter: str | None = declare(None, Choice(names=DRAFTERS))
    draft: str | Path | None = declare(None, Value(), elsewhere="model_draft assistant_model -md")
    revision: str | None = declare(None, Value())
    lora: str | Path | tuple[str | Path, ...] | list[str | Path] = declare(
        (), Sources("a folder or a hub id, or several"), elsewhere="lora_modules lora_path"
    )
    draft_revision: str | None = declare(None, Value())
    tokenizer: str | Path | None = declare(None, Value())
    plan: PlanSource | None = declare(None, Value())
    adapter: str | Path | None = declare(None, Source("the folder of an adapter"))
    draft_weights: str | None = declare(None, CODES)
    recent_texts: int | None = declare(None, Whole("MiB, 0 or more", most=MAX_MIB))
    texts_file: str | Path | None = declare(None, Source("a file"))
    policy: str = declare("auto", Choice(names=POLICIES))
    policy_options: Mapping[str, float | str] | None = declare(None, Value())
    max_draft: int | None = declare(None, _count(", or ", Option("drafter", "none")), elsewhere="draft_max")
    draft_sampling: Literal["sampled", "greedy"] = declare("sampled", Choice(names=("sampled", "greedy")))
    dtype: str | torch.dtype | None = declare(None, Dtype(), elsewhere="torch_dtype")
    weights: str | None = declare(None, CODES)
    device: str | None = declare(None, Value())
    max_batch: int | None = declare(None, _count(), elsewhere="max_num_seqs parallel -np")
    max_length: int | None = declare(None, _count(), elsewhere="max_model_len ctx_size -c")
    prefix_folder: str | Path | None = declare(None, Source("a folder"))
    deterministic: bool = declare(True, Flag())
    compile: bool = declare(False, Flag())
    kernels: bool | None = declare(None, Flag())
    threads: int | None = declare(None, THREADS, elsewhere="-t")
    progress: Progress | None = declare(None, Value())

    def __post_init__(self) -> None:
        check_fields(self, ConfigError)

    @property
    def assets(self) -> dict[str, Any]:
        """The options that the user gives of those that give drafters their assets, with their values."""
        given = {name: getattr(self, name) for name in asset_options()}
        return {name: value for name, value in given.items() if value is not None}

    @property
    def allows_kernels(self) -> bool:
        """Whether Foredraft's kernels may run the models; `compile` takes their place."""
        return self.kernels is not False and not self.compile

    def report(self, stage: str, done: int, total: int) -> None:
        """Report progress where the caller wants it."""
        if self.progress is not None:
            self.progress(stage, done, total)
