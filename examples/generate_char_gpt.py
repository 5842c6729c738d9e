"""Trains the GPT of train_char_gpt for a short time and lets it write, with a KV cache and without.

`python -m examples.generate_char_gpt`: with the cache, each step passes one character through the model, and
flash_attn_with_kvcache rotates and appends its key and value; without, each step passes the whole text. Both take the
most probable character. The example prints the text and the characters per second of both.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from dataclasses import replace

from . import INSTALL

try:
    from tabulate import tabulate
    from tqdm import tqdm
except ImportError as error:
    raise SystemExit(f"examples.generate_char_gpt: {error}. {INSTALL}") from None

import torch
from torch import Tensor

from flash_attn_mini import flash_attn_with_kvcache

from .train_char_gpt import GPT, SIZES, Run, Size, Text, attend_with_flash_attn_mini, check, parser_for

STEPS = {"cpu": 200, "cuda": 400}
PROMPT = 32  # characters


def forward_with_cache(model: GPT, tokens: Tensor, caches: Sequence[Tensor], filled: int, backend: str) -> Tensor:
    """Logits of tokens behind `filled` cached ones. A layer's cache is `[2, batch, context, heads, headdim]`."""
    x = model.embedding(tokens)
    cos, sin = model.rotation[:, :, 0].to(caches[0].dtype)
    for block, (k_cache, v_cache) in zip(model.blocks, caches, strict=True):
        q, k, v = block.project(x)
        attended = flash_attn_with_kvcache(
            q,
            k_cache,
            v_cache,
            k,
            v,
            rotary_cos=cos,
            rotary_sin=sin,
            cache_seqlens=filled,
            causal=True,
            rotary_interleaved=False,
            backend=backend,
        )
        x = block.finish(x, attended)
    return model.head(model.norm(x))


@torch.no_grad()
def generate(model: GPT, prompt: Tensor, length: int, size: Size, backend: str, *, with_cache: bool) -> Tensor:
    """The prompt `[batch, seqlen]` and `length` characters more, always the most probable one."""
    on_gpu = prompt.device.type == "cuda"
    shape = (2, len(prompt), size.context, size.heads, size.width // size.heads)
    dtype = torch.bfloat16 if on_gpu else model.embedding.weight.dtype
    caches = [torch.zeros(shape, device=prompt.device, dtype=dtype) for _ in model.blocks] if with_cache else []
    tokens = new = prompt
    with torch.autocast(prompt.device.type, torch.bfloat16, enabled=on_gpu):
        for _ in range(length):
            if with_cache:
                logits = forward_with_cache(model, new, caches, tokens.shape[1] - new.shape[1], backend)
            else:
                logits = model(tokens)
            new = logits[:, -1].argmax(dim=-1, keepdim=True)
            tokens = torch.cat((tokens, new), dim=1)
    return tokens


def train(text: Text, size: Size, device: torch.device, backend: str, seed: int) -> GPT:
    torch.manual_seed(seed)
    run = Run(GPT(len(text.alphabet), size, attend_with_flash_attn_mini(backend)).to(device), size)
    generator = torch.Generator().manual_seed(seed)
    bar = tqdm(range(size.steps), desc="training", unit="step", disable=None)
    for _ in bar:
        run.step(text.draw(text.training, size, generator, device))
        bar.set_postfix_str(f"loss {run.losses[-1]:.3f}")
    return run.model.eval()


def timed(
    model: GPT, prompt: Tensor, length: int, size: Size, backend: str, *, with_cache: bool
) -> tuple[Tensor, float]:
    """The text, and new characters per second."""
    generate(model, prompt, 2, size, backend, with_cache=with_cache)
    if prompt.device.type == "cuda":
        torch.cuda.synchronize()
    start = time.perf_counter()
    tokens = generate(model, prompt, length, size, backend, with_cache=with_cache)
    written = tokens.cpu()  # waits for the device
    return written, length * len(prompt) / (time.perf_counter() - start)


def main(argv: Sequence[str] | None = None) -> int:
    parser = parser_for("examples.generate_char_gpt", __doc__, STEPS)
    parser.add_argument("--batch", type=int, default=1, help="texts to write at once (default: %(default)s)")
    arguments = parser.parse_args(argv)
    device, backend, content = check(parser, arguments)
    if arguments.batch < 1:
        parser.error(f"--batch {arguments.batch}: at least 1")
    size = replace(SIZES[device.type], steps=arguments.steps or STEPS[device.type])
    text = Text(content)
    model = train(text, size, device, backend, arguments.seed)

    length = size.context - PROMPT
    generator = torch.Generator().manual_seed(arguments.seed)
    prompts = text.draw(text.validation, replace(size, batch=arguments.batch), generator, device)[:, :PROMPT]
    (cached, fast), (plain, slow) = (
        timed(model, prompts, length, size, backend, with_cache=with_cache) for with_cache in (True, False)
    )
    print("".join(text.alphabet[token] for token in cached[0].tolist()), end="\n\n")
    rows = [["with the cache", f"{fast:,.0f}"], ["without", f"{slow:,.0f}"], ["ratio", f"{fast / slow:.1f}"]]
    print(tabulate(rows, ["", "characters per second"], colalign=("left", "right"), disable_numparse=True))
    equal = int((cached == plain).all(dim=0).long().cumprod(0).sum()) - PROMPT
    print(f"\n{equal} of {length} new characters are equal; backend {backend}, batch {arguments.batch}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
