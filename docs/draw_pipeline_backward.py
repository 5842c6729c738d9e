"""Draws docs/images/sm90_backward.svg: two steps of the Hopper backward at head dim 64.

    python docs/draw_pipeline_backward.py

A schedule, not a measurement; docs/sm90_pipeline.md explains it.
"""

from __future__ import annotations

from pathlib import Path

from draw_pipeline import (
    APPLY,
    CONSUMERS,
    HEIGHT,
    LANE,
    LEFT,
    SOFTMAX,
    TOP,
    WAIT,
    K,
    Q,
    V,
    arrow,
    box,
    document,
    text,
)

PICTURE = Path(__file__).resolve().parent / "images" / "sm90_backward.svg"
LANES = ("load warp", "consumer 0", "tensor cores", "consumer 1", "adding warps")
STEP, LAG = 500, 14  # of a step, and of consumer 1 behind consumer 0
# What a consumer does in a step, and the products of both: (begin, end, words), of 500.
CONSUMER = (
    (0, 76, "wait S", WAIT),
    (76, 246, "P = exp(S - lse)", SOFTMAX),
    (246, 292, "store dQ", APPLY),
    (292, 334, "wait dP", WAIT),
    (334, 436, "dS, store it", SOFTMAX),
    (436, 486, "wait dV", WAIT),
)
PRODUCTS = ((0, "S"), (76, "dQ"), (162, "dK"), (254, "dP"), (340, "dV"))
WIDTH_OF_PRODUCT = 43


def step_names(n: int) -> tuple[str, str]:
    """The row blocks of an iteration: whose dQ and dK it computes, and whose S, dP and dV."""
    return str(n), str(n + 1)


def tensor_cores(lane: int) -> list[str]:
    """The products, of both consumers in turn."""
    out = []
    for n in range(2):
        before, after = step_names(n)
        for begin, name in PRODUCTS:
            of = before if name in ("dQ", "dK") else after
            for index in range(2):
                start = n * STEP + begin + index * WIDTH_OF_PRODUCT
                out += box(lane, start, start + WIDTH_OF_PRODUCT, f"{name}{of}", CONSUMERS[index])
    return out


def consumer(index: int, lane: int) -> list[str]:
    """Its arithmetic and its waits."""
    out = []
    for n in range(2):
        for begin, end, words, colour in CONSUMER:
            start = n * STEP + index * LAG
            out += box(lane, start + begin, start + end, words, colour)
    return out


def producer(load_lane: int, add_lane: int) -> list[str]:
    """Loads of Q and dO as stages get free, and the additions of dQ."""
    out = []
    for n in range(2):
        out += box(load_lane, n * STEP + 262, n * STEP + 352, f"Q, lse {n + 3}", Q, light=True)
        out += box(load_lane, n * STEP + 2, n * STEP + 92, f"dO, delta {n + 2}", V, light=True)
        out += box(add_lane, n * STEP + 440, n * STEP + 540, f"add dQ{n}", K, light=True)
    return out


def barriers() -> list[str]:
    """One example each of most barriers."""
    load, first, _, second, adding = range(5)
    out = arrow((first, 246), (load, 262), "Q empty", Q)
    out += arrow((load, 352), (first, STEP), "Q full", Q)
    out += arrow((first, 486), (load, 502), "", V)
    out.append(text(LEFT + 506, TOP + LANE - 6, "dO empty", f' fill="{V}" font-size="10"'))
    out += arrow((first, 436), (second, STEP + LAG + 4), "dS full", K)
    return out + arrow((second, 436 + LAG), (adding, 470), "dQ full", K)


def picture() -> str:
    """The whole SVG."""
    body = [
        text(14, 22, "Head dim 64, two iterations: dQ and dK of one row block, then S, P, dP, dV and dS of the next.")
    ]
    for n in range(2):
        before, after = step_names(n)
        x = LEFT + n * STEP
        words = f"dQ, dK of row block {before}; S, dP, dV of row block {after}"
        body += [
            text(x + 4, 48, words, ' font-weight="bold" font-size="11"'),
            f'<path d="M{x} 54V{HEIGHT - 40}" stroke="#c8ccd0" stroke-dasharray="3 3"/>',
        ]
    for lane, name in enumerate(LANES):
        body.append(text(14, TOP + lane * 74 + 21, name, ' font-weight="bold"'))
    body += barriers()  # below the boxes
    body += producer(0, 4) + consumer(0, 1) + tensor_cores(2) + consumer(1, 3)
    return document(body)


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
