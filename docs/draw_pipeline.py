"""Draws docs/images/sm90_pipeline.svg: the warps of the Hopper forward and the tensor cores over time.

    python docs/draw_pipeline.py

A schedule of two consumers and two pipeline stages, not a measurement; docs/sm90_pipeline.md explains it.
"""

from __future__ import annotations

from pathlib import Path

PICTURE = Path(__file__).resolve().parent / "images" / "sm90_pipeline.svg"
LANES = ("scheduler warp", "load warp", "consumer 0", "tensor cores", "consumer 1")
LEFT, TOP, LANE, BOX, STEP = 128, 66, 74, 34, 250
STEPS = (
    "step: S of A1, O of A2",
    "last step of A: S of A0, O of A1",
    "change of work tile: S of B7, O of A0",
    "first step of B: S of B6, O of B7",
)
WIDTH, HEIGHT = LEFT + len(STEPS) * STEP + 14, TOP + len(LANES) * LANE + 46
K, V, Q, RING, SOFTMAX, APPLY, WAIT = "#3b6ea8", "#b4652a", "#4f8a3c", "#6b6f76", "#c9d9ea", "#e3d3c4", "#f4f5f7"
CONSUMERS = ("#8fb2d6", "#d9b08c")  # whose product the tensor cores compute
BLOCKS = (("A2", "A1"), ("A1", "A0"), ("A0", "B7"), ("B7", "B6"))  # per step: block of O, block of S
LOADS = (("A0", "A1"), ("B7", "A0"), ("B6", "B7"), ("B5", "B6"))  # per step: block of K, block of V
ARROWS = {K: "k", V: "v", Q: "q", RING: "r"}


def text(x: float, y: float, words: str, style: str = "") -> str:
    """One line of writing."""
    return f'<text x="{x:g}" y="{y:g}"{style}>{words}</text>'


def box(lane: int, begin: float, end: float, words: str, fill: str, light: bool = False) -> list[str]:
    """A box in a lane from one time to another, cut at the edges of the picture."""
    begin, end = max(begin, 0), min(end, len(STEPS) * STEP)
    if end <= begin:
        return []
    x, y, colour = LEFT + begin, TOP + lane * LANE, "#ffffff" if light else "#24292f"
    rect = f'<rect x="{x:g}" y="{y}" width="{end - begin - 1:g}" height="{BOX}" rx="2" fill="{fill}"/>'
    if len(words) * 5.4 > end - begin:
        return [rect]
    middle = text(x + (end - begin) / 2, y + BOX / 2 + 4, words, f' text-anchor="middle" fill="{colour}"')
    return [rect, middle]


def arrow(start: tuple[int, float], end: tuple[int, float], words: str, colour: str) -> list[str]:
    """From one lane and time to another: a barrier that one side arrives at and the other waits for."""
    (from_lane, from_time), (to_lane, to_time) = start, end
    down = to_lane > from_lane
    x1, y1 = LEFT + from_time, TOP + from_lane * LANE + (BOX if down else 0)
    x2, y2 = LEFT + to_time, TOP + to_lane * LANE + (0 if down else BOX)
    line = f'<path d="M{x1:g} {y1}L{x2:g} {y2}" stroke="{colour}" fill="none" marker-end="url(#{ARROWS[colour]})"/>'
    near = y1 + (13 if down else -6)
    return [line, text(x1 + 4, near, words, f' fill="{colour}" font-size="10"')] if words else [line]


def consumer(index: int, lane: int) -> list[str]:
    """Its boxes in every step, from the step before the picture to the last."""
    out = []
    for n in range(-1, len(STEPS)):
        start = n * STEP + index * STEP / 2
        before, block = BLOCKS[n] if n >= 0 else ("A3", "A2")
        stores = n >= 0 and before == "A0"
        out += box(lane, start, start + 62, f"wait S {block}", WAIT)
        out += box(lane, start + 62, start + 186, f"softmax {block}", SOFTMAX)
        out += box(lane, start + 186, start + 250, "store O, A" if stores else "scale O", APPLY)
    return out


def tensor_cores(lane: int) -> list[str]:
    """The products of both consumers, one behind the other."""
    out = []
    for n in range(-1, len(STEPS)):
        before, block = BLOCKS[n] if n >= 0 else ("A3", "A2")
        for index in range(2):
            start = n * STEP + index * STEP / 2
            out += box(lane, start, start + 62, f"S {block}", CONSUMERS[index])
            out += box(lane, start + 62, start + 125, f"O {before}", CONSUMERS[index])
    return out


def producer(lane: int) -> list[str]:
    """Loads of K and V as slots get free, and of Q of the next work tile."""
    out = box(lane, 0, 60, "Q of B", Q, light=True)
    for n, (k_block, v_block) in enumerate(LOADS):
        out += box(lane, n * STEP + 66, n * STEP + 136, f"K {k_block}", K, light=True)
        out += box(lane, n * STEP + 138, n * STEP + 208, f"V {v_block}", V, light=True)
    return out


def barriers() -> list[str]:
    """One example each of most barriers."""
    scheduler, loads, first, _, second = range(5)
    out = arrow((loads, 136), (first, STEP), "K full", K)
    out += arrow((loads, STEP + 208), (first, 2 * STEP + 66), "V full", V)
    out += arrow((loads, 60), (first, 2 * STEP), "Q full", Q)
    out += arrow((second, STEP / 2 + 186), (loads, STEP + 66), "K empty", K)
    out += arrow((second, 3 * STEP / 2 + 186), (loads, 2 * STEP + 138), "V empty", V)
    out += arrow((first, STEP + 2), (second, 3 * STEP / 2), "ping-pong", RING)
    return out + arrow((second, 5 * STEP / 2 + 250), (scheduler, 3 * STEP + 130), "slot of A empty", RING)


def picture() -> str:
    """The whole SVG."""
    body = [text(14, 22, "Work tile A ends with key blocks 2, 1, 0; work tile B begins with its last key block, 7.")]
    for n, words in enumerate(STEPS):
        x = LEFT + n * STEP
        body += [
            text(x + 4, 48, words, ' font-weight="bold" font-size="11"'),
            f'<path d="M{x} 54V{HEIGHT - 40}" stroke="#c8ccd0" stroke-dasharray="3 3"/>',
        ]
    for lane, name in enumerate(LANES):
        body.append(text(14, TOP + lane * LANE + BOX / 2 + 4, name, ' font-weight="bold"'))
    body += barriers()  # below the boxes
    body += box(0, 0, 120, "find work tile C", RING, light=True)
    body += box(0, 120, 3 * STEP + 130, "wait for a free slot of the ring (A, B and C are in it)", WAIT)
    body += box(0, 3 * STEP + 130, 4 * STEP, "find D", RING, light=True)
    body += producer(1) + consumer(0, 2) + tensor_cores(3) + consumer(1, 4)
    return document(body)


def document(body: list[str]) -> str:
    """The picture with these elements, and what its colours mean."""
    x, body = LEFT, list(body)
    for colour, words in ((CONSUMERS[0], "product of consumer 0"), (CONSUMERS[1], "product of consumer 1")):
        body.append(f'<rect x="{x}" y="{HEIGHT - 28}" width="14" height="14" fill="{colour}"/>')
        body.append(text(x + 20, HEIGHT - 17, words))
        x += 180
    body.append(text(x, HEIGHT - 17, "arrows: a barrier, from who arrives to who waits; one example each"))
    heads = "".join(
        f'<marker id="{name}" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="6" markerHeight="6" orient="auto">'
        f'<path d="M0 0L8 4L0 8z" fill="{colour}"/></marker>'
        for colour, name in ARROWS.items()
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" width="{WIDTH}" '
        f'font-family="sans-serif" font-size="11" fill="#24292f">\n<defs>{heads}</defs>\n'
        f'<rect width="100%" height="100%" fill="#ffffff"/>\n' + "\n".join(body) + "\n</svg>\n"
    )


if __name__ == "__main__":
    PICTURE.write_text(picture(), encoding="utf-8")
