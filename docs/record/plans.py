"""Draw the pictures of the exchanges and plans in docs/parallelism.md.

    python docs/record/plans.py docs/images

They are as those of diagrams.py: without fonts or scripts of others, on a background of their own. A test holds the
files equal to what this script draws.
"""

from __future__ import annotations

import sys
from html import escape
from pathlib import Path

_STYLE = (
    "text{font:13px system-ui,-apple-system,'Segoe UI','DejaVu Sans',sans-serif;fill:#1f2937}"
    ".title{font-weight:bold;font-size:14px}.label{fill:#475569;font-size:12px}"
    ".mid{fill:#475569;font-size:12px;text-anchor:middle}.name{text-anchor:middle}"
    ".b{fill:#dbeafe}.g{fill:#dcfce7}.y{fill:#fef3c7}.e{fill:#eef2f7}.w{fill:#fff}"
    "rect{stroke:#64748b}.page{fill:#fff;stroke:none}"
    ".arrow{stroke:#475569;stroke-width:1.5;fill:none;marker-end:url(#head)}"
)
_HEAD = (
    '<defs><marker id="head" markerWidth="9" markerHeight="8" refX="8" refY="4" orient="auto">'
    '<path d="M0 0 L9 4 L0 8 z" fill="#475569"/></marker></defs>'
)


class Picture:
    """An SVG that is drawn from top to bottom; all measures are pixels."""

    def __init__(self, title: str, width: int, height: int) -> None:
        self._rows = [
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"'
            f' width="{width}" height="{height}">',
            f"<title>{escape(title)}</title>",
            f"<style>{_STYLE}</style>",
            _HEAD,
            f'<rect width="{width}" height="{height}" rx="8" class="page"/>',
        ]
        self.text(20, 30, title, "title")

    def box(self, x: float, y: float, width: float, height: float, colour: str) -> None:
        letter = {"blue": "b", "green": "g", "yellow": "y", "grey": "e", "white": "w"}[colour]
        self._rows.append(f'<rect class="{letter}" x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}"/>')

    def text(self, x: float, y: float, text: str, kind: str = "label") -> None:
        self._rows.append(f'<text class="{kind}" x="{x:g}" y="{y:g}">{escape(text)}</text>')

    def arrow(self, x: float, y: float, to_x: float, to_y: float) -> None:
        self._rows.append(f'<path class="arrow" d="M{x:g} {y:g} L{to_x:g} {to_y:g}"/>')

    def done(self) -> str:
        return "\n".join([*self._rows, "</svg>", ""])


def sharding() -> str:
    """What a worker holds with each kind of data parallel."""
    picture = Picture("What each of four workers holds between two steps", 960, 330)
    kinds = [
        ("DDP", (1, 1, 1), "all of everything"),
        ("ZeRO-1", (1, 1, 4), "a quarter of the optimizer"),
        ("ZeRO-2, FSDP2", (4, 4, 4), "a quarter of everything"),
        ("HSDP: dp=2,fsdp=2", (2, 2, 2), "half of everything"),
    ]
    rows = (("parameters", "blue"), ("gradients", "green"), ("optimizer", "yellow"))
    for column, (name, shards, says) in enumerate(kinds):
        left = 110 + column * 215
        picture.text(left, 62, name, "title")
        picture.text(left, 80, says)
        for row, ((what, colour), many) in enumerate(zip(rows, shards, strict=True)):
            top = 98 + row * 52
            if not column:
                picture.text(20, top + 25, what)
            for worker in range(4):
                x, height = left + worker * 47, 40 / many
                if many > 1:
                    picture.box(x, top, 38, 40, "white")
                picture.box(x, top + worker % many * height, 38, height, colour)
        for worker in range(4):
            picture.text(left + worker * 47 + 19, 268, str(worker), "mid")
    picture.text(20, 268, "worker")
    picture.text(
        20, 298, "ZeRO-2 gathers all parameters once per step, and keeps them until the backward pass is over."
    )
    picture.text(
        20, 316, "FSDP2 gathers those of one block before its forward pass, and again before its backward pass."
    )
    return picture.done()


def tensor_parallel() -> str:
    """What two workers compute of a block."""
    picture = Picture("One block on two workers: tensor parallel (tp=2) with sequence parallel", 960, 280)
    parts = [
        ("norm", 60, "green"), ("gather", 60, "grey"), ("attention", 110, "blue"), ("project", 80, "blue"),
        ("sum, scatter", 70, "grey"), ("norm", 60, "green"), ("gather", 60, "grey"), ("expand", 80, "blue"),
        ("project", 80, "blue"), ("sum, scatter", 70, "grey"),
    ]  # fmt: skip
    for worker in range(2):
        picture.text(20, 68 + worker * 144, f"worker {worker}")
    x = 20
    for number, (name, width, colour) in enumerate(parts):
        for top in (80, 156):
            if colour != "grey":
                picture.box(x, top, width, 40, colour)
                picture.text(x + width / 2, top + 25, name, "name")
            if number + 1 < len(parts):
                picture.arrow(x + width, top + 20, x + width + 20, top + 20)
        if colour == "grey":
            picture.box(x, 76, width, 124, colour)
            for line, word in enumerate(name.split()):
                picture.text(x + width / 2, 142 + 17 * line, word, "name")
        x += width + 22
    picture.text(
        20, 244, "green: half of the positions. blue: all positions, and half of the heads, outputs or inputs."
    )
    picture.text(20, 262, "grey: the workers exchange activations. The backward pass gathers where this one scatters.")
    return picture.done()


def pipeline() -> str:
    """The times of forward and backward passes with two schedules. A backward pass takes twice as long."""
    stages, many = 4, 6
    gpipe = [[*(("F", m) for m in range(many)), *(("B", m) for m in range(many))] for _ in range(stages)]
    picture = Picture(f"A pipeline of {stages} stages computes {many} micro-batches", 960, 420)
    says = [
        ("GPipe", gpipe, f"all forward passes, then all backward passes: a stage keeps activations of {many}"),
        ("1F1B", [_one_each(stage, stages, many) for stage in range(stages)], "a backward pass as soon as it can be: "
         f"a stage keeps activations of at most {stages}"),
    ]  # fmt: skip
    for number, (name, orders, text) in enumerate(says):
        top = 60 + number * 172
        picture.text(20, top, name, "title")
        picture.text(90, top, text)
        for stage in range(stages):
            picture.text(20, top + 30 + stage * 32, f"stage {stage}")
        for (kind, stage, micro), (begin, end) in _times(orders).items():
            x, y = 90 + begin * 30, top + 12 + stage * 32
            picture.box(x, y, (end - begin) * 30, 26, "blue" if kind == "F" else "green")
            picture.text(x + (end - begin) * 15, y + 18, str(micro + 1), "mid")
    picture.text(
        20,
        400,
        "blue: forward, green: backward, with the micro-batch's number. A worker waits a third of the time.",
    )
    return picture.done()


def combinations() -> str:
    """Eight workers along three axes."""
    picture = Picture("Eight workers: dp=2,tp=2,pp=2", 960, 350)
    tops = (66, 206)
    for stage, top in enumerate(tops):
        picture.text(20, top + 44, f"stage {stage} (pp)")
        picture.text(20, top + 62, "layers 0, 1" if not stage else "layers 2, 3")
        for replica in range(2):
            left = 140 + replica * 440
            if not stage:
                picture.text(left, 56, f"replica {replica} (dp): its own windows")
            picture.box(left, top, 350, 96, "grey")
            for part in range(2):
                x = left + 15 + part * 165
                picture.box(x, top + 16, 155, 62, "green" if part else "blue")
                picture.text(x + 77, top + 42, f"rank {stage * 4 + replica * 2 + part}", "name")
                picture.text(x + 77, top + 62, f"{('first', 'second')[part]} half of all", "mid")
        picture.arrow(492, top + 40, 578, top + 40)
        picture.arrow(578, top + 56, 492, top + 56)
        picture.text(535, top + 76, "gradients", "mid")
    # Above the boxes of both stages.
    for left in (140, 580):
        picture.arrow(left + 92, tops[0] + 78, left + 92, tops[1] + 14)
        picture.arrow(left + 257, tops[0] + 78, left + 257, tops[1] + 14)
        picture.text(left + 174, tops[0] + 114, "activations of half", "mid")
        picture.text(left + 174, tops[0] + 130, "of the positions each", "mid")
    picture.text(
        20,
        330,
        "Blue and green: half of each matrix. Neighbouring ranks exchange most: tp in each block, pp at the boundary "
        "of two stages, dp once per step.",
    )
    return picture.done()


def _one_each(stage: int, stages: int, many: int) -> list[tuple[str, int]]:
    """The order in which a stage of 1F1B computes."""
    ahead = min(many, stages - stage)
    order = [("F", micro) for micro in range(ahead)]
    for micro in range(many):
        order.append(("B", micro))
        if ahead + micro < many:
            order.append(("F", ahead + micro))
    return order


def _times(orders: list[list[tuple[str, int]]]) -> dict[tuple[str, int, int], tuple[int, int]]:
    """When each pass of each stage begins and ends: in its stage's order, and after the passes that it needs."""
    times: dict[tuple[str, int, int], tuple[int, int]] = {}
    free, left = [0] * len(orders), [list(order) for order in orders]
    while any(left):
        for stage, order in enumerate(left):
            if not order:
                continue
            kind, micro = order[0]
            is_last = stage == len(orders) - 1
            before = (
                ("F", stage - 1, micro) if kind == "F" else ("F", stage, micro) if is_last else ("B", stage + 1, micro)
            )
            if before in times or (kind == "F" and not stage):
                begin = max(free[stage], times.get(before, (0, 0))[1])
                free[stage] = begin + (1 if kind == "F" else 2)
                times[kind, stage, micro] = (begin, free[stage])
                order.pop(0)
    return times


def collectives() -> str:
    """What four ranks have before and after each exchange of c10d."""
    each, parts = ("a", "b", "c", "d"), ("a0..a3", "b0..b3", "c0..c3", "d0..d3")
    exchanges = [
        ("send, recv in a ring", each, ("d", "a", "b", "c")),
        ("broadcast from rank 0", ("a", "", "", ""), ("a", "a", "a", "a")),
        ("scatter from rank 0", ("abcd", "", "", ""), each),
        ("gather to rank 0", each, ("abcd", "", "", "")),
        ("reduce to rank 0", each, ("sum", "", "", "")),
        ("all_reduce", each, ("sum",) * 4),
        ("all_gather", each, ("abcd",) * 4),
        ("reduce_scatter", parts, tuple(f"sum {number}" for number in range(4))),
        ("all_to_all", parts, tuple("".join(f"{letter}{number}" for letter in each) for number in range(4))),
    ]
    picture = Picture("What ranks 0 to 3 have before (above) and after (below)", 960, 420)
    for number, (name, before, after) in enumerate(exchanges):
        left, top = 20 + number % 3 * 312, 66 + number // 3 * 118
        picture.text(left, top, name, "title")
        for rank in range(4):
            for row, (values, colour) in enumerate(((before, "green"), (after, "blue"))):
                x, y = left + rank * 72, top + 12 + row * 42
                picture.box(x, y, 68, 28, colour if values[rank] else "white")
                picture.text(x + 34, y + 19, values[rank], "name")
    picture.text(20, 408, "A ring does an all_reduce as a reduce_scatter and then an all_gather.")
    return picture.done()


def hooks() -> str:
    """What a rank sends for a bucket, in parts of what it sends without a hook; for many ranks."""
    rows = [
        ("none", (1.0,), "float32: the sum of all ranks' gradients"),
        ("fp16, bf16", (0.5,), "half as many bytes for each number"),
        ("powersgd", (0.012, 0.012), "two thin factors of each matrix; what they lack waits for the next step"),
        ("top-k (an example)", (0.08,), "the largest gradients and where they are; the others wait"),
        ("post-local SGD", (), "nothing in most steps, and all weights every H steps"),
        ("gossip", (0.5, 0.5), "weights, to each of two neighbours; no gradients"),
        ("noop", (), "nothing: each rank trains for itself"),
    ]
    picture = Picture("What a rank sends for a bucket with each hook", 960, 314)
    for number, (name, messages, text) in enumerate(rows):
        top = 50 + number * 36
        picture.text(20, top + 17, name)
        x = 150.0
        for share in messages:
            picture.box(x, top, 320 * share, 24, "blue")
            x += 320 * share + 4
        picture.text(490, top + 17, text)
    return picture.done()


def tuning() -> str:
    """When the buckets of a backward pass are sent, with three sizes."""
    picture = Picture("One backward pass with three sizes of buckets", 960, 350)
    # A layer is computed by then.
    ready = {"3": 330, "2": 460, "1": 590}
    rows = [
        ("25 MiB", [(590, 300, "3 + 2 + 1")], (90, "one bucket: nothing overlaps")),
        ("5 MiB", [(end, 100, layer) for layer, end in ready.items()], (90, "only the last one is exposed")),
        ("1 MiB", [(200 + 32.5 * turn, 25, "") for turn in range(1, 13)], (630, "the gaps are the messages' latency")),
    ]
    for number, (name, sends, (at, text)) in enumerate(rows):
        top = 52 + number * 96
        picture.text(20, top + 19, name, "title")
        picture.box(90, top, 110, 28, "green")
        picture.text(145, top + 19, "forward", "name")
        for layer, end in ready.items():
            picture.box(end - 130, top, 130, 28, "green")
            picture.text(end - 65, top + 19, f"backward {layer}", "name")
        for begin, width, layers in sends:
            picture.box(begin, top + 34, width, 28, "blue")
            picture.text(begin + width / 2, top + 53, layers, "name")
        picture.text(at, top + 53, text)
    picture.text(20, 338, "green: computed. blue: sent. The step ends when both are done.")
    return picture.done()


PICTURES = {
    "collectives.svg": collectives,
    "hooks.svg": hooks,
    "tuning.svg": tuning,
    "sharding.svg": sharding,
    "tensor-parallel.svg": tensor_parallel,
    "pipeline.svg": pipeline,
    "combinations.svg": combinations,
}

if __name__ == "__main__":
    for name, draw in PICTURES.items():
        (Path(sys.argv[1]) / name).write_text(draw())
